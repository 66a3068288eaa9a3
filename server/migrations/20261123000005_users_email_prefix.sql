-- no-transaction
-- Prefixes of the canonical email address, by bytes, whatever the collation of the database is.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_email_prefix ON users (app_id, email_canonical COLLATE "C", id)
    WHERE email_canonical IS NOT NULL;
