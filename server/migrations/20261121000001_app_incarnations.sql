-- Tells an App from a later one of the same appID, and whose the appID is after it was handed to another namespace.
ALTER TABLE apps
    ADD COLUMN incarnation text CHECK (octet_length(incarnation) BETWEEN 1 AND 128),
    ADD COLUMN handover bigint NOT NULL DEFAULT 0 CHECK (handover >= 0);
