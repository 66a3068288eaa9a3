-- no-transaction
-- The users in the state `contested`, by id. A disabled user is in the state `disabled`.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_contested ON users (app_id, id) WHERE contested AND disabled_at IS NULL;
