-- The state of the delivery of a webhook. The row appears when a server has the webhook.
CREATE TABLE webhooks (
    app_id      text    NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    name        text    NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 63),
    -- The number of failed deliveries since the last successful one.
    failures    integer NOT NULL DEFAULT 0 CHECK (failures >= 0),
    -- The fingerprint of the webhook's settings and keys for which the receiver responded with 410.
    stopped_for text    CHECK (octet_length(stopped_for) = 64),
    -- When a server last had the webhook in its document of the App.
    seen_at     timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (app_id, name)
);

-- Events that wait for their delivery to a webhook, and events whose delivery was given up.
CREATE TABLE webhook_events (
    app_id      text        NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    webhook     text        NOT NULL CHECK (octet_length(webhook) BETWEEN 1 AND 63),
    -- The id of the event in the audit log.
    id          uuid        NOT NULL,
    -- The kind of the event in the audit log. A server claims only kinds that it knows.
    kind        text        NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 63),
    at          timestamptz NOT NULL,
    -- No foreign key: an event outlives its user.
    user_id     uuid,
    session_id  uuid,
    -- The version of the user after the event. Null for events about sessions or about many users.
    version     bigint,
    detail      jsonb       CHECK (pg_column_size(detail) <= 16384),
    attempts    integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    -- In Postgres' time. `infinity`: the row only makes two requests take the same time.
    due_at      timestamptz NOT NULL DEFAULT statement_timestamp(),
    lease_until timestamptz,
    dead_at     timestamptz,
    error       text        CHECK (char_length(error) <= 500),
    PRIMARY KEY (app_id, webhook, id),
    CHECK (dead_at IS NULL OR lease_until IS NULL)
);

-- The due events of a webhook, the oldest event of a webhook, all due events, leased events, and dead letters.
CREATE INDEX webhook_events_due ON webhook_events (app_id, webhook, due_at, id) WHERE dead_at IS NULL;
CREATE INDEX webhook_events_oldest ON webhook_events (app_id, webhook, at) WHERE dead_at IS NULL;
CREATE INDEX webhook_events_all_due ON webhook_events (due_at) WHERE dead_at IS NULL;
CREATE INDEX webhook_events_leased ON webhook_events (app_id, webhook, lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX webhook_events_dead ON webhook_events (app_id, webhook, dead_at) WHERE dead_at IS NOT NULL;
CREATE INDEX webhook_events_dead_of_app ON webhook_events (app_id, dead_at, id) WHERE dead_at IS NOT NULL;

-- Rows come and go: vacuum removes dead rows before the indexes grow.
ALTER TABLE webhook_events SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
