-- no-transaction
-- The users in the state `disabled`, by id.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_disabled ON users (app_id, id) WHERE disabled_at IS NOT NULL;
