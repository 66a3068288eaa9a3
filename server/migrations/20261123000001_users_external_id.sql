-- no-transaction
-- Each migration that creates an index concurrently is one file with one statement. If it fails, `migrate` drops the
-- invalid index that is left, before it runs the migration again.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS users_external_id
    ON users (app_id, external_id) WHERE external_id IS NOT NULL;
