-- no-transaction
-- The hourly sweep finds classes without users, and hashes past their retention, without reading other users.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_foreign_hash
    ON users (app_id, foreign_hash, foreign_hash_at) WHERE foreign_hash IS NOT NULL;
