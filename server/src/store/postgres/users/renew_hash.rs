//! Replaces a password hash after a login, with one statement. The old hash can be one that a server made, or an
//! imported (foreign) one.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;

use crate::{
    domain::{password::PasswordHash, ports::StoreError, user::UserId},
    store::postgres::PostgresStore,
};

impl PostgresStore {
    pub(super) async fn replace_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> Result<(), StoreError> {
        let mut call = self.begin_call("renew_hash").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "UPDATE users SET password_hash = $4, foreign_hash = NULL, foreign_hash_at = NULL
             WHERE app_id = $1 AND id = $2 AND password_hash = $3",
            app.as_str(),
            user.0,
            old.expose(),
            new.expose()
        );
        let updated = timeout_at(deadline, query.execute(connection)).await;
        call.end_call(updated).map(drop)
    }
}
