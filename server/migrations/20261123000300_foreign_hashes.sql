-- Password hashes that were imported from another service. The hash itself is in `password_hash`.
ALTER TABLE users
    -- The class of the hash, such as `bcrypt$10`. Null: the hash is native, or there is none.
    ADD COLUMN foreign_hash text,
    -- When the hash was imported.
    ADD COLUMN foreign_hash_at timestamptz,
    -- Not checked for existing rows, which have no value: that would lock the table while it is read.
    ADD CONSTRAINT users_foreign_hash_check CHECK (octet_length(foreign_hash) BETWEEN 1 AND 100) NOT VALID;

-- The classes of the hashes that an App may have. Every login of the App runs one check of each class.
CREATE TABLE hash_classes (
    app_id     text             NOT NULL CHECK (octet_length(app_id) BETWEEN 1 AND 63),
    class      text             NOT NULL CHECK (octet_length(class) BETWEEN 1 AND 100),
    -- The CPU time of a check, in native hashes.
    weight     double precision NOT NULL CHECK (weight > 0 AND weight <= 32),
    -- When a hash of the class was last imported. The hourly sweep keeps a class for an hour after that.
    touched_at timestamptz      NOT NULL DEFAULT now(),
    PRIMARY KEY (app_id, class)
);
