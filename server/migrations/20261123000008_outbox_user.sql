-- no-transaction
-- The rows of a user: a mail that waits already, and the rows of a deleted user.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outbox_user ON outbox (app_id, user_id);
