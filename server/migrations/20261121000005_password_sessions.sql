-- The session that may set a password without the old one: that of the *confirm* which took a contested password.
ALTER TABLE users ADD COLUMN password_session uuid;
