-- The upkeep finds accounts whose address was not verified without reading all others.
CREATE INDEX users_unverified ON users (app_id, created_at, id) WHERE email_verified_at IS NULL;
