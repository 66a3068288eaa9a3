//! Which namespace an App belongs to, as the database has it.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;

use super::Postgres;
use crate::domain::ports::StoreError;

/// Whether a namespace may serve an App from this database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppClaim {
    /// It is that namespace's, from now on if it was nobody's.
    Held,
    /// Its users are those of an App of another namespace.
    OtherNamespace,
    /// It is being deleted, or was.
    Deleted,
}

struct Row {
    namespace: String,
    state: String,
}

// === impl Postgres ===

impl Postgres {
    /// Makes the App that namespace's where it is nobody's, and tells whose it is.
    pub async fn claim_app(&self, app: &AppId, namespace: &str) -> Result<AppClaim, StoreError> {
        let mut held = self.hold().await?;
        let (connection, until) = held.parts();
        let query = async {
            sqlx::query!(
                "INSERT INTO apps (app_id, namespace) VALUES ($1, $2) ON CONFLICT DO NOTHING",
                app.as_str(),
                namespace
            )
            .execute(&mut *connection)
            .await?;
            // A statement of its own: it sees what another server inserted meanwhile.
            sqlx::query_as!(Row, "SELECT namespace, state FROM apps WHERE app_id = $1", app.as_str())
                .fetch_one(&mut *connection)
                .await
        };
        let answer = timeout_at(until, query).await;
        let row = held.done(answer)?;
        Ok(match row.state.as_str() {
            "active" if row.namespace == namespace => AppClaim::Held,
            "active" => AppClaim::OtherNamespace,
            _ => AppClaim::Deleted,
        })
    }
}
