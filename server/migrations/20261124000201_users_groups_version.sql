-- Counts the changes of the user's groups, so that older groups never replace newer ones in Redis. A column with a
-- constant default does not rewrite the table.
ALTER TABLE users ADD COLUMN groups_version bigint NOT NULL DEFAULT 0;
