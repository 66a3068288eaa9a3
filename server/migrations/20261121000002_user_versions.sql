-- Counts the changes of what tokens say of a user, so that an older copy beside the sessions never replaces a newer one.
ALTER TABLE users ADD COLUMN version bigint NOT NULL DEFAULT 1 CHECK (version > 0);
