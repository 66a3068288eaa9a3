-- no-transaction
-- The dead letters of a kind, newest first.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outbox_dead_of_kind ON outbox (app_id, kind, dead_at, id)
    WHERE dead_at IS NOT NULL;
