-- What administrators and imports store with a user. New columns with a constant default do not rewrite the table. The
-- constraints hold for all rows, because the columns are new. Without NOT VALID, Postgres would scan the table under the
-- exclusive lock.
ALTER TABLE users
    -- The id of the user in another system.
    ADD COLUMN external_id text,
    ADD COLUMN metadata jsonb,
    ADD COLUMN created_by text NOT NULL DEFAULT 'registration',
    ADD CONSTRAINT users_external_id_length CHECK (octet_length(external_id) BETWEEN 1 AND 255) NOT VALID,
    -- The server allows 8 KiB of JSON text, of which jsonb can need the sixfold: `[0,0,…]`.
    ADD CONSTRAINT users_metadata_size CHECK (pg_column_size(metadata) <= 65536) NOT VALID,
    ADD CONSTRAINT users_created_by_known
        CHECK (created_by IN ('registration', 'provider', 'administrator', 'import')) NOT VALID;
