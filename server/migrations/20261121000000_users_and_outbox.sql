-- Every table leads with app_id in its primary key, so that partitioning and sharding stay possible. Times are those of
-- the request that made them, but for due_at and lease_until of the outbox, which are Postgres' own.

-- Which namespace owns an App, and whether it is being deleted.
CREATE TABLE apps (
    app_id     text        NOT NULL PRIMARY KEY CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    namespace  text        NOT NULL CHECK (octet_length(namespace) BETWEEN 1 AND 63),
    state      text        NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'deleting', 'deleted')),
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE users (
    app_id                  text        NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    id                      uuid        NOT NULL,
    email                   text        CHECK (octet_length(email) BETWEEN 3 AND 254),
    email_canonical         text        CHECK (octet_length(email_canonical) BETWEEN 3 AND 254),
    email_verified_at       timestamptz,
    pending_email           text        CHECK (octet_length(pending_email) BETWEEN 3 AND 254),
    pending_email_canonical text        CHECK (octet_length(pending_email_canonical) BETWEEN 3 AND 254),
    name                    text        NOT NULL CHECK (char_length(name) <= 200),
    -- A PHC string, or a foreign hash that was imported.
    password_hash           text        CHECK (octet_length(password_hash) BETWEEN 1 AND 1024),
    contested               boolean     NOT NULL DEFAULT false,
    epoch                   bigint      NOT NULL DEFAULT 1 CHECK (epoch > 0),
    disabled_at             timestamptz,
    created_at              timestamptz NOT NULL,
    updated_at              timestamptz NOT NULL,
    PRIMARY KEY (app_id, id),
    CHECK ((email IS NULL) = (email_canonical IS NULL)),
    CHECK ((pending_email IS NULL) = (pending_email_canonical IS NULL)),
    CHECK (email IS NOT NULL OR email_verified_at IS NULL)
);

-- One account an address; a pending address is nobody's yet.
CREATE UNIQUE INDEX users_email ON users (app_id, email_canonical) WHERE email_canonical IS NOT NULL;

-- Who another service says a user is.
CREATE TABLE identities (
    app_id    text        NOT NULL,
    authority text        NOT NULL CHECK (octet_length(authority) BETWEEN 1 AND 2048),
    subject   text        NOT NULL CHECK (octet_length(subject) BETWEEN 1 AND 512),
    user_id   uuid        NOT NULL,
    -- The Provider's name when it was linked: a label only.
    provider  text        NOT NULL CHECK (octet_length(provider) BETWEEN 1 AND 63),
    email     text        CHECK (octet_length(email) BETWEEN 3 AND 254),
    linked_at timestamptz NOT NULL,
    PRIMARY KEY (app_id, authority, subject),
    FOREIGN KEY (app_id, user_id) REFERENCES users (app_id, id) ON DELETE CASCADE
);

CREATE INDEX identities_user ON identities (app_id, user_id);

-- What is to be done after the transaction that decided it: mails, and epochs for Redis.
CREATE TABLE outbox (
    app_id       text        NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    id           uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- The name of a mail, or `epoch`. A server takes only the kinds it knows, so a newer one may add some.
    kind         text        NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 63),
    -- None: the row does nothing. No foreign key: a row outlives its user, and then does nothing either.
    user_id      uuid,
    -- Of a mail: when the request that asked for it came.
    requested_at timestamptz,
    -- Of an epoch: the epoch, and the session that goes on.
    epoch        bigint,
    keep_session uuid,
    -- What kinds to come need beyond that.
    payload      jsonb       CHECK (pg_column_size(payload) <= 16384),
    attempts     integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    due_at       timestamptz NOT NULL DEFAULT now(),
    lease_until  timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now(),
    dead_at      timestamptz,
    error        text        CHECK (char_length(error) <= 500),
    PRIMARY KEY (app_id, id),
    CHECK (kind <> 'epoch' OR (user_id IS NOT NULL AND epoch IS NOT NULL)),
    CHECK (dead_at IS NULL OR lease_until IS NULL)
);

-- What is waiting in an App, what waits longest of all, what is held, what is dead, and the epochs of a user.
CREATE INDEX outbox_waiting ON outbox (app_id, due_at) WHERE dead_at IS NULL;
CREATE INDEX outbox_oldest ON outbox (due_at) WHERE dead_at IS NULL;
CREATE INDEX outbox_held ON outbox (app_id, lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX outbox_dead ON outbox (dead_at, app_id, id) WHERE dead_at IS NOT NULL;
CREATE INDEX outbox_epoch ON outbox (app_id, user_id) WHERE kind = 'epoch';

-- Rows come and go: what is dead to all is cleaned up before the indexes grow.
ALTER TABLE outbox SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- One row, locked by whoever claims, so that two servers do not both see the same room for an App.
CREATE TABLE outbox_claims (
    one boolean NOT NULL PRIMARY KEY DEFAULT true CHECK (one)
);
INSERT INTO outbox_claims DEFAULT VALUES;

-- What happened to whom, for users (their activity) and administrators.
CREATE TABLE audit_events (
    app_id     text        NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    id         uuid        NOT NULL,
    at         timestamptz NOT NULL,
    kind       text        NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 63),
    user_id    uuid,
    session_id uuid,
    ip         inet,
    -- Refusals are counted in one row per account, client address and quarter of an hour.
    count      integer     NOT NULL DEFAULT 1 CHECK (count > 0),
    detail     jsonb       CHECK (pg_column_size(detail) <= 16384),
    PRIMARY KEY (app_id, id)
);

CREATE INDEX audit_events_user ON audit_events (app_id, user_id, at DESC);
CREATE INDEX audit_events_at ON audit_events (app_id, at);
