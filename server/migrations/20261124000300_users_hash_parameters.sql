-- no-transaction
-- A login finds the parameters of the hashes that servers made for an App, such as m=19456,t=2,p=1, without reading the
-- users. Its statement must have the same conditions and the same expression.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_hash_parameters
    ON users (app_id, split_part(password_hash, '$', 4))
    WHERE foreign_hash IS NULL AND password_hash LIKE '$argon2id$v=19$m=%';
