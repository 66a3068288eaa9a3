//! The delivery states of webhooks: the failures in a row, the oldest event that is not delivered, and whether delivery
//! is stopped.

use std::collections::BTreeMap;

use tokio::time::timeout_at;

use super::{key_columns, key_of};
use crate::{
    domain::ports::{DeliveryState, KnownWebhook, StoreError, WebhookKey},
    store::postgres::PostgresStore,
};

impl PostgresStore {
    pub(super) async fn webhook_delivery_states(
        &self,
        webhooks: &[KnownWebhook],
    ) -> Result<BTreeMap<WebhookKey, DeliveryState>, StoreError> {
        let (apps, names) = key_columns(webhooks.iter().map(|webhook| &webhook.key));
        let fingerprints: Vec<String> = webhooks.iter().map(|webhook| webhook.fingerprint.clone()).collect();
        let mut call = self.begin_webhook_call("delivery_states").await?;
        let (connection, deadline) = call.parts();
        // No row is inserted for an App that is being deleted. A deletion that begins later deletes the row. A changed
        // fingerprint resets the failures. So for the seconds in which servers have different documents of an App, each
        // call resets the failures that another server has counted.
        let seen = sqlx::query!(
            "INSERT INTO webhooks (app_id, name, fingerprint)
             SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS wanted (app_id, name, fingerprint)
             WHERE NOT EXISTS (SELECT FROM apps WHERE apps.app_id = wanted.app_id AND apps.state <> 'active')
             ORDER BY 1, 2
             ON CONFLICT (app_id, name) DO UPDATE
             SET seen_at = statement_timestamp(), fingerprint = excluded.fingerprint,
                failures = CASE WHEN webhooks.fingerprint <> excluded.fingerprint THEN 0 ELSE webhooks.failures END,
                paused_until = CASE WHEN webhooks.fingerprint = excluded.fingerprint THEN webhooks.paused_until END
             WHERE webhooks.seen_at < statement_timestamp() - interval '3 minutes'
                OR webhooks.fingerprint IS DISTINCT FROM excluded.fingerprint",
            &apps,
            &names,
            &fingerprints,
        );
        let query = sqlx::query!(
            r#"
            SELECT wanted.app_id AS "app_id!", wanted.name AS "name!", coalesce(webhooks.failures, 0) AS "failures!",
                webhooks.stopped_for AS "stopped_for?", (
                    SELECT min(event.at) FROM webhook_events AS event
                    WHERE event.app_id = wanted.app_id AND event.webhook = wanted.name AND event.dead_at IS NULL
                ) AS oldest
            FROM unnest($1::text[], $2::text[]) AS wanted (app_id, name)
                LEFT JOIN webhooks ON webhooks.app_id = wanted.app_id AND webhooks.name = wanted.name
            "#,
            &apps,
            &names,
        );
        let states = async {
            seen.execute(&mut *connection).await?;
            query.fetch_all(connection).await
        };
        let rows = timeout_at(deadline, states).await;
        let states = call.end_call(rows)?.into_iter().map(|row| {
            let failures = u32::try_from(row.failures).unwrap_or(0);
            let state = DeliveryState { failures, stopped_for: row.stopped_for, oldest: row.oldest };
            Ok((key_of(&row.app_id, &row.name)?, state))
        });
        states.collect::<Result<_, _>>().map_err(|error| self.record_error(error))
    }
}
