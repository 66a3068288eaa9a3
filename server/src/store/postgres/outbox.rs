//! The outbox: mails, epochs, profiles and groups that wait for delivery.
//!
//! A deliverer claims rows for a limited time (the lease), fairly between Apps. It finishes a row only while it has the
//! lease.

use std::time::Duration;

use latchkey_crds::types::AppId;

use crate::{
    domain::{
        mail::{EpochChange, Mail},
        ports::{ClaimedRow, DeliveryOutcome, Outbox, OutboxBacklog, StoreError},
    },
    store::Stores,
};

mod backlog;
mod claim;
mod dead_letters;
mod enqueue;
mod finish;
mod insert;

pub use dead_letters::DeadLetter;
pub(super) use insert::{
    PROPAGATION_DELAY_SECONDS, delete_rows_of, insert_due_groups_change, insert_epoch_change, insert_groups_changes,
    insert_mail, insert_mail_to_former_address, insert_profile_change, mail_columns, trace_payload_json,
};

/// The kinds of rows that propagate an epoch, a profile or groups to Redis. All other kinds are kinds of mails.
const EPOCH_KIND: &str = "epoch";
const PROFILE_KIND: &str = "profile";
const GROUPS_KIND: &str = "groups";

impl Outbox for Stores {
    async fn enqueue(&self, app: &AppId, mail: Mail) -> Result<(), StoreError> {
        self.postgres.enqueue_mail(app, mail).await
    }

    async fn claim(&self, max_rows: usize, per_app: usize, lease: Duration) -> Result<Vec<ClaimedRow>, StoreError> {
        self.postgres.claim_outbox_rows(max_rows, per_app, lease).await
    }

    async fn finish(&self, claimed: &ClaimedRow, outcome: DeliveryOutcome) -> Result<(), StoreError> {
        self.postgres.finish_outbox_row(claimed, outcome).await
    }

    async fn remove_epoch_row(&self, app: &AppId, change: &EpochChange) -> Result<(), StoreError> {
        self.postgres.remove_epoch_row(app, change).await
    }

    async fn wait_for_notification(&self) {
        self.postgres.shared.outbox_notify.notified().await;
    }

    async fn backlog(&self) -> Result<OutboxBacklog, StoreError> {
        self.postgres.outbox_backlog().await
    }
}
