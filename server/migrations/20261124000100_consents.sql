-- What users allowed Clients (spec.consent: Once).
CREATE TABLE consents (
    app_id     text        NOT NULL,
    user_id    uuid        NOT NULL,
    -- The UID of the Client, so that a new Client of the same name inherits nothing.
    client_uid text        NOT NULL CHECK (octet_length(client_uid) BETWEEN 1 AND 320),
    -- The names of the scopes, separated by spaces.
    scopes     text        NOT NULL CHECK (octet_length(scopes) BETWEEN 1 AND 256),
    at         timestamptz NOT NULL,
    PRIMARY KEY (app_id, user_id, client_uid),
    FOREIGN KEY (app_id, user_id) REFERENCES users (app_id, id) ON DELETE CASCADE
);
