-- no-transaction
-- Prefixes of the lower-cased name, by bytes. lower() depends on the LC_CTYPE of the database: it lowers all letters with
-- a locale such as C.UTF-8 or en_US.UTF-8, and only ASCII letters with the locale C. An explicit collation would not
-- depend on the database, but Postgres 15 has none for Unicode that every build contains.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_name_prefix ON users (app_id, (lower(name) COLLATE "C"), id);
