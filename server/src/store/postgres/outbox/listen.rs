//! Listens for rows that other servers enqueue.

use std::{sync::Arc, time::Duration};

use sqlx::{
    PgPool,
    postgres::{PgListener, PgPoolOptions},
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tracing::{info, warn};

use crate::store::postgres::CallError;

/// A listener that received nothing for this long pings its connection.
const LISTENER_IDLE_LIMIT: Duration = Duration::from_secs(30);
const LISTENER_TIMEOUT: Duration = Duration::from_secs(3);
const LISTENER_PAUSE: Duration = Duration::from_secs(5);

/// Signals `notify` when other servers enqueue rows. While listening fails, the outbox is only polled.
pub(in crate::store::postgres) async fn listen(pool: PgPool, notify: Arc<Notify>) {
    let mut is_failing = false;
    loop {
        let error = match listen_until_error(&pool, &notify, &mut is_failing).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        // Of consecutive failures, only the first is logged. An outage of Postgres is logged by the module `outage`.
        if !std::mem::replace(&mut is_failing, true) {
            let error = CallError::from(&error);
            warn!(error = &error as &dyn std::error::Error, "cannot listen for new outbox rows; polling only");
        }
        sleep(LISTENER_PAUSE).await;
    }
}

/// Sets `is_failing` to false as soon as the listening works.
async fn listen_until_error(
    pool: &PgPool,
    notify: &Notify,
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
    listener.listen("latchkey_outbox").await?;
    if std::mem::take(is_failing) {
        info!("listening for new outbox rows again");
    }
    // Rows may have been enqueued before LISTEN.
    notify.notify_one();
    loop {
        match timeout(LISTENER_IDLE_LIMIT, listener.try_recv()).await {
            Ok(Ok(Some(_))) => notify.notify_one(),
            Ok(Ok(None)) => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let ping = timeout(LISTENER_TIMEOUT, sqlx::query("SELECT 1").execute(&mut listener)).await;
                ping.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
            }
        }
    }
}
