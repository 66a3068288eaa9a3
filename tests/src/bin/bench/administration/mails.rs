//! Mails while many events wait for a receiver that refuses connections.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use http::StatusCode;
use latchkey_tests::client::ApiClient;
use sqlx::PgConnection;

use super::{DEAD_WEBHOOK, Service};
use crate::{
    logins::USERS,
    measurements::{Bound, format_millis, histogram, micros_of, p99_ratio},
};

/// Number of events for the dead receiver.
const EVENTS: i32 = 100_000;
/// Number of rounds. Each round measures mails first without and then with the waiting events.
const ROUNDS: u32 = 3;
/// Number of mails in one round without the events, and again with them.
const MAILS: u32 = 400;
const WARM_UP_MAILS: u32 = 50;
/// Time limit for one mail. A mail takes a few milliseconds, or a second if a notification is lost.
const MAIL_LIMIT: Duration = Duration::from_secs(30);
/// Time limit until the server has tried to send an event for the first time.
const FIRST_ATTEMPT_LIMIT: Duration = Duration::from_secs(10);
/// Upper limit of the p99 with the events, relative to the p99 without them.
const MAX_P99_RATIO: f64 = 1.5;

/// Inserts events that are due. The server claims them like events that it has written itself.
const INSERT_EVENTS: &str = "
    INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, version)
    SELECT $1, $2, gen_random_uuid(), 'user_deleted', now(), gen_random_uuid(), 1 FROM generate_series(1, $3::int)";

/// Compares the times from a request until its mail arrives.
pub(super) async fn run(service: &Service) -> Result<Bound> {
    let client = service.stack.client();
    let mut connection = service.stack.database.connect().await?;
    let (mut calm, mut loaded) = (histogram(), histogram());
    request_mails(service, &client, WARM_UP_MAILS, &mut histogram()).await?;
    let mut attempts = 0_i64;
    for _ in 0..ROUNDS {
        request_mails(service, &client, MAILS, &mut calm).await?;
        add_events(&mut connection, service.apps.mails.id()).await?;
        request_mails(service, &client, MAILS, &mut loaded).await?;
        attempts += remove_events(&mut connection).await?;
    }
    let ratio = p99_ratio(&calm, &loaded);
    println!(
        "mails while {EVENTS} events wait for a receiver that refuses connections ({attempts} attempts to send them)"
    );
    for (what, latency) in [("without the events", &calm), ("with the events", &loaded)] {
        println!(
            "  {what:<27}   p50 {}, p99 {}, max {} ({} mails)",
            format_millis(latency, 0.5),
            format_millis(latency, 0.99),
            format_millis(latency, 1.0),
            latency.len()
        );
    }
    println!();
    Ok(Bound::new(
        format!(
            "p99 of mails while {EVENTS} events wait for a dead receiver is at most {MAX_P99_RATIO} times the p99 without \
             them: {ratio:.2}"
        ),
        ratio <= MAX_P99_RATIO,
    ))
}

/// Requests one mail after another, each for another user.
async fn request_mails(service: &Service, client: &ApiClient, mails: u32, latency: &mut Histogram<u64>) -> Result<()> {
    let (app, mailbox) = (service.apps.mails.id(), service.stack.mails());
    for number in 0..mails {
        let email = format!("{}@example.com", number % USERS);
        mailbox.clear();
        let started = Instant::now();
        let arrival = async {
            let mail = mailbox.find(|mail| mail.is_to(&email), MAIL_LIMIT).await;
            mail.map(|_| started.elapsed())
        };
        let (response, took) = tokio::join!(client.forgot_password(app, &email), arrival);
        ensure!(response.status == StatusCode::OK, "forgot-password returned {}", response.status);
        latency.record(micros_of(took.context("a mail did not arrive")?))?;
    }
    Ok(())
}

async fn add_events(connection: &mut PgConnection, app: &str) -> Result<()> {
    sqlx::query(INSERT_EVENTS).bind(app).bind(DEAD_WEBHOOK).bind(EVENTS).execute(&mut *connection).await?;
    // Updates the statistics. If the events had been written over some time, autovacuum would have done this.
    sqlx::raw_sql("ANALYZE webhook_events").execute(&mut *connection).await?;
    // Notifies the server, because a round of measurements can be shorter than the time between two polls of the queue.
    sqlx::query("SELECT pg_notify('latchkey_webhooks', $1 || '/' || $2)")
        .bind(app)
        .bind(DEAD_WEBHOOK)
        .execute(&mut *connection)
        .await?;
    let started = Instant::now();
    while started.elapsed() < FIRST_ATTEMPT_LIMIT {
        let attempts: Option<i64> =
            sqlx::query_scalar("SELECT sum(attempts) FROM webhook_events").fetch_one(&mut *connection).await?;
        if attempts.is_some_and(|attempts| attempts > 0) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bail!("the server sent no event within {FIRST_ATTEMPT_LIMIT:?}")
}

/// Removes the events and returns how often the server tried to send one of them. Returns an error if the server never
/// tried.
async fn remove_events(connection: &mut PgConnection) -> Result<i64> {
    let (waiting, attempts): (i64, i64) = sqlx::query_as(
        "SELECT count(*) FILTER (WHERE dead_at IS NULL), coalesce(sum(attempts), 0)::bigint FROM webhook_events",
    )
    .fetch_one(&mut *connection)
    .await?;
    sqlx::raw_sql("TRUNCATE webhook_events").execute(&mut *connection).await?;
    ensure!(
        waiting == i64::from(EVENTS) && attempts > 0,
        "{waiting} of {EVENTS} events waited, and the server tried {attempts} times to send one"
    );
    Ok(attempts)
}
