//! Ends a lease with the outcome of the delivery.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;
use tracing::debug;

use crate::{
    domain::{
        mail::EpochChange,
        ports::{ClaimedRow, DeliveryOutcome, StoreError},
    },
    store::postgres::PostgresStore,
};

/// The maximum length of a stored error. A constraint of the table contains the same number.
const MAX_ERROR_CHARS: usize = 500;

impl PostgresStore {
    pub(super) async fn finish_outbox_row(
        &self,
        claimed: &ClaimedRow,
        outcome: DeliveryOutcome,
    ) -> Result<(), StoreError> {
        let mut call = self.begin_call("settle").await?;
        let (connection, deadline) = call.parts();
        let (app, id, lease) = (claimed.app.as_str(), claimed.id, claimed.lease_until);
        let query = match outcome {
            DeliveryOutcome::Done => {
                sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND id = $2 AND lease_until = $3", app, id, lease)
            }
            DeliveryOutcome::Retry { at, error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, due_at = $4, error = $5
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at,
                truncated_error(&error)
            ),
            DeliveryOutcome::Wait { at } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, due_at = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at
            ),
            DeliveryOutcome::Dead { error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, dead_at = statement_timestamp(), \
                 error = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                truncated_error(&error)
            ),
        };
        let settled = timeout_at(deadline, query.execute(connection)).await;
        if call.end_call(settled)?.rows_affected() == 0 {
            debug!(
                app = %claimed.app,
                id = %claimed.id,
                "the lease of an outbox row ended before the outcome of its delivery was stored"
            );
        }
        Ok(())
    }

    pub(super) async fn remove_epoch_row(&self, app: &AppId, change: &EpochChange) -> Result<(), StoreError> {
        let mut call = self.begin_call("epoch_carried").await?;
        let (connection, deadline) = call.parts();
        // Rows of earlier epochs are obsolete, so they are removed, too.
        let query = sqlx::query!(
            "DELETE FROM outbox WHERE app_id = $1 AND user_id = $2 AND kind = 'epoch' AND epoch <= $3",
            app.as_str(),
            change.user.0,
            change.epoch.0
        );
        let removed = timeout_at(deadline, query.execute(connection)).await;
        call.end_call(removed).map(drop)
    }
}

fn truncated_error(error: &str) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
}
