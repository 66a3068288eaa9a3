-- The groups that administrators manage. A group that only a provider reports has no row. Names are sorted by their
-- bytes, whatever the locale of the database is.
CREATE TABLE groups (
    app_id     text             NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    name       text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 128),
    title      text             CHECK (char_length(title) BETWEEN 1 AND 100),
    created_at timestamptz      NOT NULL,
    PRIMARY KEY (app_id, name)
);

-- Which users are in which groups. There is no foreign key to `groups`, because groups of providers have no row there.
CREATE TABLE group_members (
    app_id     text             NOT NULL,
    user_id    uuid             NOT NULL,
    name       text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 128),
    -- The Provider that reported the membership. Empty: an administrator added the member.
    source     text COLLATE "C" NOT NULL CHECK (octet_length(source) <= 63),
    created_at timestamptz      NOT NULL,
    PRIMARY KEY (app_id, user_id, name, source),
    FOREIGN KEY (app_id, user_id) REFERENCES users (app_id, id) ON DELETE CASCADE
);

-- The members of a group, in the order of their pages.
CREATE INDEX group_members_of_group ON group_members (app_id, name, user_id, source);
