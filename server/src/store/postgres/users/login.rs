//! Reads what a login needs: the user, and the classes (kind and cost) of all password hashes of the App.

use std::collections::BTreeSet;

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
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
    /// The classes of the foreign hashes.
    foreign_classes: Vec<String>,
    /// The parameters of the hashes that servers made, such as `m=19456,t=2,p=1`: the first and the last of the App, in
    /// alphabetical order. `None` if servers made no hash of the App.
    first_parameters: Option<String>,
    last_parameters: Option<String>,
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
        let read = timeout_at(deadline, read_candidate(connection, app, email)).await;
        let (mut row, parameters) = call.end_call(read)?;
        let native = parameters.iter().map(|parameters| format!("argon2id$v=19${parameters}"));
        // This server ignores the classes that only a newer server knows. It cannot check their hashes.
        let classes: BTreeSet<HashClass> =
            row.foreign_classes.drain(..).chain(native).filter_map(|class| class.parse().ok()).collect();
        let user = row.user().map(User::try_from).transpose()?;
        Ok(LoginCandidate { user, hash_classes: classes.into_iter().collect() })
    }
}

/// Returns the row, and the parameters of all hashes of the App that servers made.
async fn read_candidate(
    connection: &mut PgConnection,
    app: &AppId,
    email: &Email,
) -> Result<(LoginRow, Vec<String>), sqlx::Error> {
    // The classes of foreign hashes are in a table. The parameters of hashes that servers made are read from the hashes
    // themselves: the index `users_hash_parameters` returns the first and the last without reading the others.
    let query = sqlx::query_as!(
        LoginRow,
        r#"
        SELECT ARRAY (SELECT class FROM hash_classes WHERE hash_classes.app_id = $1) AS "foreign_classes!",
            (
                SELECT split_part(password_hash, '$', 4) FROM users
                WHERE app_id = $1 AND foreign_hash IS NULL AND password_hash LIKE '$argon2id$v=19$m=%'
                ORDER BY split_part(password_hash, '$', 4) LIMIT 1
            ) AS first_parameters,
            (
                SELECT split_part(password_hash, '$', 4) FROM users
                WHERE app_id = $1 AND foreign_hash IS NULL AND password_hash LIKE '$argon2id$v=19$m=%'
                ORDER BY split_part(password_hash, '$', 4) DESC LIMIT 1
            ) AS last_parameters,
            users.id AS "id?", email, email_verified_at, pending_email, name AS "name?", password_hash,
            password_session, contested AS "contested?", epoch AS "epoch?", version AS "version?", disabled_at,
            created_at AS "created_at?", updated_at AS "updated_at?"
        FROM (SELECT) AS always LEFT JOIN users ON users.app_id = $1 AND users.email_canonical = $2
        "#,
        app.as_str(),
        email.canonical()
    );
    let row = query.fetch_one(&mut *connection).await?;
    // Usually all these hashes have the current parameters of the installation.
    let parameters = if row.first_parameters == row.last_parameters {
        row.first_parameters.iter().cloned().collect()
    } else {
        all_parameters(connection, app).await?
    };
    Ok((row, parameters))
}

/// Returns the parameters of the hashes of the App that servers made, each once. There are few, because servers use
/// only the current and the earlier parameters of the installation. Each step of the recursion finds the next
/// parameters with one read of the index, however many users there are.
async fn all_parameters(connection: &mut PgConnection, app: &AppId) -> Result<Vec<String>, sqlx::Error> {
    let query = sqlx::query_scalar!(
        r#"
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
        SELECT parameters AS "parameters!" FROM native WHERE parameters IS NOT NULL
        "#,
        app.as_str()
    );
    query.fetch_all(connection).await
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
