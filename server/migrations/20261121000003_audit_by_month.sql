-- Events of accounts, one partition a month, so that an old month goes as a whole. The table before was never written.

DROP TABLE audit_events;

CREATE TABLE audit_events (
    app_id     text        NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    at         timestamptz NOT NULL,
    id         uuid        NOT NULL,
    kind       text        NOT NULL CHECK (octet_length(kind) BETWEEN 1 AND 63),
    -- None: refusals to somebody who named no account that is there. No foreign key: events outlive their user.
    user_id    uuid,
    session_id uuid,
    ip         inet,
    -- Refusals are counted in one row per account, client address and quarter of an hour.
    count      bigint      NOT NULL DEFAULT 1 CHECK (count > 0),
    detail     jsonb       CHECK (pg_column_size(detail) <= 16384),
    PRIMARY KEY (app_id, at, id)
) PARTITION BY RANGE (at);

-- What a user sees of their own.
CREATE INDEX audit_events_user ON audit_events (app_id, user_id, at DESC) WHERE user_id IS NOT NULL;

-- What is of no month that was made ahead: nothing is ever refused for want of a partition.
CREATE TABLE audit_events_default PARTITION OF audit_events DEFAULT;

-- Rows are added, and go when they are old or their App is deleted. Partitions to come inherit this.
CREATE FUNCTION latchkey_audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit events do not change' USING ERRCODE = 'insufficient_privilege';
END
$$;

CREATE TRIGGER audit_events_append_only BEFORE UPDATE ON audit_events
    FOR EACH ROW EXECUTE FUNCTION latchkey_audit_is_append_only();

-- Whose turn the upkeep is, and a lock on the partitions: a row, since poolers break session locks.
CREATE TABLE audit_upkeep (
    one      boolean     NOT NULL PRIMARY KEY DEFAULT true CHECK (one),
    next_at  timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO audit_upkeep DEFAULT VALUES;

-- Makes the partitions of this month and so many after it, where they are missing; tells how many it made. It runs as
-- the one who made the tables, so that the server's role needs no more than leave to call it.
CREATE FUNCTION latchkey_audit_make_months(ahead integer) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '2s' AS $$
DECLARE
    this_month CONSTANT timestamp := date_trunc('month', now() AT TIME ZONE 'UTC');
    month timestamp;
    begins timestamptz;
    ends timestamptz;
    name text;
    made integer := 0;
BEGIN
    PERFORM FROM audit_upkeep FOR UPDATE;
    FOR number IN 0 .. least(ahead, 120) LOOP
        month := this_month + make_interval(months => number);
        begins := month AT TIME ZONE 'UTC';
        ends := (month + interval '1 month') AT TIME ZONE 'UTC';
        name := 'audit_events_' || to_char(month, 'YYYY_MM');
        CONTINUE WHEN to_regclass(name) IS NOT NULL;
        -- A month that has rows in the default partition already stays there: moving them could take long.
        CONTINUE WHEN EXISTS (SELECT FROM audit_events_default WHERE at >= begins AND at < ends);
        EXECUTE format('CREATE TABLE %I PARTITION OF audit_events FOR VALUES FROM (%L) TO (%L)', name, begins, ends);
        made := made + 1;
    END LOOP;
    RETURN made;
END
$$;

-- Drops the partitions of months that were over at that time and hold rows of no other Apps than these; tells how many.
CREATE FUNCTION latchkey_audit_drop_months(before timestamptz, apps text[]) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '2s' AS $$
DECLARE
    part record;
    others boolean;
    dropped integer := 0;
BEGIN
    IF before > now() THEN
        RAISE EXCEPTION 'months to come are not dropped';
    END IF;
    PERFORM FROM audit_upkeep FOR UPDATE;
    FOR part IN
        SELECT pg_class.oid::regclass AS name
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = 'audit_events'::regclass AND relname ~ '^audit_events_\d{4}_\d{2}$'
            AND (to_date(right(relname, 7), 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC' <= before
        ORDER BY relname
    LOOP
        -- From one App to the next by leaps over the index, however many rows each has.
        EXECUTE format(
            'WITH RECURSIVE here AS (
                (SELECT app_id FROM %1$s ORDER BY app_id LIMIT 1)
                UNION ALL
                SELECT (SELECT min(app_id) FROM %1$s AS later WHERE later.app_id > here.app_id)
                FROM here WHERE here.app_id IS NOT NULL
            )
            SELECT EXISTS (
                SELECT app_id FROM here WHERE app_id IS NOT NULL EXCEPT SELECT unnest($1)
            )', part.name
        ) INTO others USING apps;
        CONTINUE WHEN others;
        EXECUTE format('DROP TABLE %s', part.name);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END
$$;

-- What runs as its owner looks nowhere but here for what it names, and is for the owner and those who are given leave.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION latchkey_audit_make_months SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION latchkey_audit_drop_months SET search_path = %I, pg_temp', current_schema());
END
$$;
REVOKE ALL ON FUNCTION latchkey_audit_make_months, latchkey_audit_drop_months FROM PUBLIC;
