//! Queues a mail that is not part of another change, for example the mail of *forgot-password*. This is one statement.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;

use super::insert_mail;
use crate::{
    domain::{mail::Mail, ports::StoreError},
    store::postgres::PostgresStore,
};

impl PostgresStore {
    pub(super) async fn enqueue_mail(&self, app: &AppId, mail: Mail) -> Result<(), StoreError> {
        let mut call = self.begin_call("enqueue").await?;
        let (connection, deadline) = call.parts();
        let queued = timeout_at(deadline, insert_mail(connection, app, &mail, self.should_notify())).await;
        call.end_call(queued)?;
        self.notify_deliverer();
        Ok(())
    }
}
