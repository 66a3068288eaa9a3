//! Reads what a login needs, with one statement: the user, and the classes (kind and cost) of all password hashes of
//! the App.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::UserRow;
use crate::{
    domain::{
        email::Email,
        foreign_hash::HashClass,
        ports::{LoginCandidate, StoreError},
        user::User,
    },
    store::postgres::PostgresStore,
};

/// The result of the statement. If there is no user, the columns of the user are null.
struct LoginRow {
    hash_classes: Vec<String>,
    id: Option<Uuid>,
    email: Option<String>,
    email_verified_at: Option<OffsetDateTime>,
    pending_email: Option<String>,
    name: Option<String>,
    password_hash: Option<String>,
    password_session: Option<Uuid>,
    contested: Option<bool>,
    epoch: Option<i64>,
    version: Option<i64>,
    disabled_at: Option<OffsetDateTime>,
    created_at: Option<OffsetDateTime>,
    updated_at: Option<OffsetDateTime>,
}

impl PostgresStore {
    pub(super) async fn login_candidate(&self, app: &AppId, email: &Email) -> Result<LoginCandidate, StoreError> {
        let mut call = self.begin_call("user_by_email").await?;
        let (connection, deadline) = call.parts();
        // The classes of foreign hashes are in `hash_classes`. The classes of hashes that servers made are not: they
        // are read from the hashes themselves. There are few such classes, because servers use only the current and the
        // earlier parameters of the installation. Each step of the recursion finds the next parameters of the App with
        // one read of the index `users_hash_parameters`, however many users there are.
        let query = sqlx::query_as!(
            LoginRow,
            r#"
            SELECT ARRAY (
                    WITH RECURSIVE native AS (
                        (
                            SELECT split_part(password_hash, '$', 4) AS parameters FROM users
                            WHERE app_id = $1 AND foreign_hash IS NULL AND password_hash LIKE '$argon2id$v=19$m=%'
                            ORDER BY split_part(password_hash, '$', 4) LIMIT 1
                        )
                        UNION ALL
                        SELECT (
                            SELECT split_part(password_hash, '$', 4) FROM users
                            WHERE app_id = $1 AND foreign_hash IS NULL AND password_hash LIKE '$argon2id$v=19$m=%'
                                AND split_part(password_hash, '$', 4) > native.parameters
                            ORDER BY split_part(password_hash, '$', 4) LIMIT 1
                        ) FROM native WHERE native.parameters IS NOT NULL
                    )
                    SELECT class FROM hash_classes WHERE hash_classes.app_id = $1
                    UNION
                    SELECT 'argon2id$v=19$' || parameters FROM native WHERE parameters IS NOT NULL
                ) AS "hash_classes!",
                users.id AS "id?", email, email_verified_at, pending_email, name AS "name?", password_hash,
                password_session, contested AS "contested?", epoch AS "epoch?", version AS "version?", disabled_at,
                created_at AS "created_at?", updated_at AS "updated_at?"
            FROM (SELECT) AS always LEFT JOIN users ON users.app_id = $1 AND users.email_canonical = $2
            "#,
            app.as_str(),
            email.canonical()
        );
        let row = timeout_at(deadline, query.fetch_one(connection)).await;
        let mut row = call.end_call(row)?;
        // This server ignores the classes that only a newer server knows. It cannot check their hashes.
        let hash_classes: Vec<HashClass> =
            std::mem::take(&mut row.hash_classes).iter().filter_map(|class| class.parse().ok()).collect();
        let user = row.user().map(User::try_from).transpose()?;
        Ok(LoginCandidate { user, hash_classes })
    }
}

// === impl LoginRow ===

impl LoginRow {
    /// Returns the columns of the user. `None` if there is no user.
    fn user(self) -> Option<UserRow> {
        Some(UserRow {
            id: self.id?,
            email: self.email,
            email_verified_at: self.email_verified_at,
            pending_email: self.pending_email,
            name: self.name?,
            password_hash: self.password_hash,
            password_session: self.password_session,
            contested: self.contested?,
            epoch: self.epoch?,
            version: self.version?,
            disabled_at: self.disabled_at,
            created_at: self.created_at?,
            updated_at: self.updated_at?,
        })
    }
}
