//! Reads a user with one statement, for a login or for a request with a session.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;

use super::user_query;
use crate::{
    domain::{
        email::Email,
        ports::StoreError,
        session::Session,
        user::{User, UserId},
    },
    store::postgres::PostgresStore,
};

impl PostgresStore {
    pub(super) async fn user(&self, app: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("user").await?;
        let (connection, deadline) = call.parts();
        let query = user_query!(SELECT "FROM users WHERE app_id = $1 AND id = $2", app.as_str(), id.0);
        let row = timeout_at(deadline, query.fetch_optional(connection)).await;
        call.end_call(row)?.map(User::try_from).transpose()
    }

    pub(super) async fn user_by_email(&self, app: &AppId, email: &Email) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("user_by_email").await?;
        let (connection, deadline) = call.parts();
        let query = user_query!(
            SELECT "FROM users WHERE app_id = $1 AND email_canonical = $2",
            app.as_str(),
            email.canonical()
        );
        let row = timeout_at(deadline, query.fetch_optional(connection)).await;
        call.end_call(row)?.map(User::try_from).transpose()
    }

    pub(super) async fn user_of_session(&self, app: &AppId, session: &Session) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("user_of_session").await?;
        let (connection, deadline) = call.parts();
        let query = user_query!(
            SELECT
            "FROM users
             WHERE app_id = $1 AND id = $2 AND disabled_at IS NULL
                AND (epoch = $3 OR EXISTS (
                    SELECT FROM outbox
                    WHERE outbox.app_id = $1 AND outbox.user_id = $2 AND outbox.kind = 'epoch'
                        AND outbox.epoch = users.epoch AND outbox.keep_session = $4
                ))",
            app.as_str(),
            session.user.0,
            session.epoch.0,
            session.id.0
        );
        let row = timeout_at(deadline, query.fetch_optional(connection)).await;
        call.end_call(row)?.map(User::try_from).transpose()
    }
}
