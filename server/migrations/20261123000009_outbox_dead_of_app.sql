-- no-transaction
-- The dead letters of an App, newest first.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outbox_dead_of_app ON outbox (app_id, dead_at, id) WHERE dead_at IS NOT NULL;
