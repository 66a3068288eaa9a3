//! Listens for outbox rows and webhook events that this server and other servers enqueue.

use std::{sync::Arc, time::Duration};

use sqlx::{
    PgPool,
    postgres::{PgListener, PgPoolOptions},
};
use tokio::{
    sync::{Notify, broadcast},
    time::{sleep, timeout},
};
use tracing::{info, warn};

use super::{CallError, webhooks};

/// A listener that received nothing for this long pings its connection.
const LISTENER_PING_AFTER_IDLE: Duration = Duration::from_secs(30);
/// The timeout for opening the listener's connection, and for a ping.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(3);
/// The time between a failure of the listener and the next attempt to listen.
const LISTENER_RETRY_DELAY: Duration = Duration::from_secs(5);

/// The NOTIFY channel for outbox rows.
const OUTBOX_CHANNEL: &str = "latchkey_outbox";

/// Signals `outbox` when servers enqueue rows. Sends the appID, a slash and the name of a webhook to `new_events` when
/// the webhook has new events. While listening fails, both queues are only polled.
pub(super) async fn listen(pool: PgPool, outbox: Arc<Notify>, new_events: broadcast::Sender<String>) {
    let mut is_failing = false;
    loop {
        let error = match listen_until_error(&pool, &outbox, &new_events, &mut is_failing).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        // Of consecutive failures, only the first is logged. An outage of Postgres is logged by the module `outage`.
        if !std::mem::replace(&mut is_failing, true) {
            let error = CallError::from(&error);
            warn!(
                error = &error as &dyn std::error::Error,
                "cannot listen for new outbox rows and events; polling only"
            );
        }
        sleep(LISTENER_RETRY_DELAY).await;
    }
}

/// Listens until an error occurs. Sets `is_failing` to false as soon as listening works.
async fn listen_until_error(
    pool: &PgPool,
    outbox: &Notify,
    new_events: &broadcast::Sender<String>,
    is_failing: &mut bool,
) -> Result<std::convert::Infallible, sqlx::Error> {
    // A separate pool: calls cannot use a connection that listens.
    let listener_pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(LISTENER_TIMEOUT)
        .test_before_acquire(false)
        .connect_lazy_with(pool.connect_options().as_ref().clone());
    let mut listener = PgListener::connect_with(&listener_pool).await?;
    listener.eager_reconnect(false);
    listener.listen_all([OUTBOX_CHANNEL, webhooks::CHANNEL]).await?;
    if std::mem::take(is_failing) {
        info!("listening for new outbox rows and events again");
    }
    // Rows may have been enqueued before LISTEN.
    outbox.notify_one();
    loop {
        match timeout(LISTENER_PING_AFTER_IDLE, listener.try_recv()).await {
            Ok(Ok(Some(notification))) if notification.channel() == webhooks::CHANNEL => {
                // Sending fails if there is no subscriber, which is no error.
                let _ = new_events.send(notification.payload().to_owned());
            }
            Ok(Ok(Some(_))) => outbox.notify_one(),
            Ok(Ok(None)) => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let ping = timeout(LISTENER_TIMEOUT, sqlx::query("SELECT 1").execute(&mut listener)).await;
                ping.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
            }
        }
    }
}
