-- no-transaction
-- The users with a subject of a Provider, by id.
CREATE INDEX CONCURRENTLY IF NOT EXISTS identities_provider ON identities (app_id, provider, subject, user_id);
