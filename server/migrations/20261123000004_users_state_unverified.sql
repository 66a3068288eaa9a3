-- no-transaction
-- The users in the state `unverified`, by id: with an unverified email address, and neither disabled nor contested.
CREATE INDEX CONCURRENTLY IF NOT EXISTS users_state_unverified ON users (app_id, id)
    WHERE email IS NOT NULL AND email_verified_at IS NULL AND NOT contested AND disabled_at IS NULL;
