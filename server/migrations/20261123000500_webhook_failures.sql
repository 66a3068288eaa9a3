ALTER TABLE webhooks
    -- The fingerprint of the webhook's settings and keys with which the failures happened.
    ADD COLUMN fingerprint text CHECK (octet_length(fingerprint) = 64),
    -- After many failures in a row: until when no event is sent. In Postgres' time.
    ADD COLUMN paused_until timestamptz;
