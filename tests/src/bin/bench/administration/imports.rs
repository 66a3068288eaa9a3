//! Imports through the server compared with plain INSERTs into Postgres, and logins during imports.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use hdrhistogram::Histogram;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    Service,
    administrator::{Administrator, Batch, CREATED_AT, bcrypt_hash},
    load::{SCHEDULED_CLIENTS, scheduled_logins},
};
use crate::measurements::{Bound, format_millis, histogram, p99_ratio};

/// Number of users in a batch: the maximum of one import.
const BATCH: usize = 1000;
/// Number of imported batches, and also of inserted batches. Imports and INSERTs alternate.
const BATCHES: u32 = 200;
const WARM_UP_BATCHES: u32 = 5;
/// The cost of the bcrypt hashes.
const BCRYPT_COST: u32 = 10;
/// The class (algorithm and cost) of the bcrypt hashes, as the server stores it.
const HASH_CLASS: &str = "bcrypt$10";
/// The appID of the users that are inserted with INSERT. No App has this appID.
const APP_ID_OF_INSERTS: &str = "bare-inserts";
/// Minimum rate of imports, relative to the rate of plain INSERTs.
const MIN_RATE: f64 = 0.5;
/// Rate of the logins to the App of the import, in logins per second. Each of these logins also checks a bcrypt hash on
/// one thread. The rate is about a third of what the server can do.
const IMPORTED_RATE: u32 = 6;
/// Rate of the logins to another App, in logins per second: a small part of what two cores can do.
const OTHER_RATE: u32 = 25;
/// Number of rounds. Each round measures logins first without and then during an import.
const ROUNDS: u32 = 3;
/// Duration of the logins in one round, without the import and again during the import.
const ROUND_TIME: Duration = Duration::from_secs(8);
/// Upper limit of the p99 of logins during an import, relative to the p99 without an import.
const MAX_P99_RATIO: f64 = 2.0;

/// Inserts a batch without looking for conflicts, into the same table and with the same values as an import. So imports
/// and INSERTs update the same indexes, which have the same size for both.
const INSERT: &str = "
    INSERT INTO users
        (app_id, id, external_id, email, email_canonical, email_verified_at, name, disabled_at, password_hash, metadata,
            created_by, created_at, updated_at, foreign_hash, foreign_hash_at)
    SELECT $1, id, external_id, email, email, now(), name, NULL, password_hash, NULL, 'import',
        to_timestamp($7::bigint), now(), $8, now()
    FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[])
        AS new (id, external_id, email, name, password_hash)";

/// Compares the rate of imports with the rate of plain INSERTs. Imports and INSERTs alternate.
pub(super) async fn compare_with_inserts(service: &Service) -> Result<Bound> {
    let app = service.apps.imported.id();
    let mut administrator = service.administrator().await?;
    let mut connection = service.stack.database.connect().await?;
    let (mut importing, mut inserting) = (Duration::ZERO, Duration::ZERO);
    for number in 0..WARM_UP_BATCHES + BATCHES {
        let batch = new_batch();
        let lines = batch.lines();
        let started = Instant::now();
        administrator.import(app, lines, batch.len()).await?;
        let imported = started.elapsed();

        let batch = new_batch();
        let ids: Vec<Uuid> = (0..batch.len()).map(|_| Uuid::now_v7()).collect();
        let started = Instant::now();
        insert(&mut connection, &ids, &batch).await?;
        let inserted = started.elapsed();
        if number >= WARM_UP_BATCHES {
            importing += imported;
            inserting += inserted;
        }
    }
    let users = f64::from(BATCHES) * f64::from(u32::try_from(BATCH)?);
    let (imports, inserts) = (users / importing.as_secs_f64(), users / inserting.as_secs_f64());
    let ratio = imports / inserts;
    println!("users per second, in batches of {BATCH}");
    println!("  imported                      {imports:.0}");
    println!("  inserted by plain INSERTs     {inserts:.0}\n");
    Ok(Bound::new(
        format!("imports have at least {MIN_RATE} times the rate of plain INSERTs: {ratio:.2}"),
        ratio >= MIN_RATE,
    ))
}

/// Compares logins during an import with logins without it, for the App of the import and for another App. The App of
/// the import has foreign hashes from the start, so the two cases differ only by the import.
pub(super) async fn measure_logins(service: &Service) -> Result<Vec<Bound>> {
    let (mut calm, mut loaded) = ([histogram(), histogram()], [histogram(), histogram()]);
    let (mut users, mut importing) = (0_u32, Duration::ZERO);
    // Warms up connections and caches.
    log_in_to_both(service, Duration::from_secs(2), &mut [histogram(), histogram()]).await?;
    for _ in 0..ROUNDS {
        log_in_to_both(service, ROUND_TIME, &mut calm).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let app = service.apps.imported.id().to_owned();
        let started = Instant::now();
        let import = tokio::spawn(import_until(Arc::clone(&stop), service.administrator().await?, app));
        log_in_to_both(service, ROUND_TIME, &mut loaded).await?;
        stop.store(true, Ordering::Relaxed);
        users += import.await??;
        importing += started.elapsed();
    }
    println!(
        "{IMPORTED_RATE} and {OTHER_RATE} logins per second in two Apps, during an import of {:.0} users per second",
        f64::from(users) / importing.as_secs_f64()
    );
    let mut bounds = Vec::new();
    for ((what, calm), loaded) in ["the App of the import", "another App"].into_iter().zip(&calm).zip(&loaded) {
        let ratio = p99_ratio(calm, loaded);
        println!(
            "  {what:<27}   p50 {}, p99 {}; without the import: p50 {}, p99 {} ({} logins)",
            format_millis(loaded, 0.5),
            format_millis(loaded, 0.99),
            format_millis(calm, 0.5),
            format_millis(calm, 0.99),
            calm.len()
        );
        bounds.push(Bound::new(
            format!(
                "during an import, p99 of logins to {what} is at most {MAX_P99_RATIO} times the p99 without it: \
                 {ratio:.2}"
            ),
            ratio <= MAX_P99_RATIO,
        ));
    }
    println!();
    Ok(bounds)
}

fn new_batch() -> Batch {
    Batch::new(BATCH, || bcrypt_hash(BCRYPT_COST))
}

async fn insert(connection: &mut PgConnection, ids: &[Uuid], batch: &Batch) -> Result<()> {
    sqlx::query(INSERT)
        .bind(APP_ID_OF_INSERTS)
        .bind(ids)
        .bind(&batch.external_ids)
        .bind(&batch.emails)
        .bind(&batch.names)
        .bind(&batch.hashes)
        .bind(CREATED_AT)
        .bind(HASH_CLASS)
        .execute(connection)
        .await?;
    Ok(())
}

/// Imports one batch after another. Returns the number of imported users.
async fn import_until(stop: Arc<AtomicBool>, mut administrator: Administrator, app: String) -> Result<u32> {
    let mut users = 0;
    while !stop.load(Ordering::Relaxed) {
        let batch = new_batch();
        administrator.import(&app, batch.lines(), batch.len()).await?;
        users += u32::try_from(batch.len())?;
    }
    Ok(users)
}

/// Logs in to the App of the import and to another App at the same time, and adds the latencies.
async fn log_in_to_both(service: &Service, duration: Duration, latencies: &mut [Histogram<u64>; 2]) -> Result<()> {
    let (server, apps) = (service.public(), &service.apps);
    let (imported, ordinary) = tokio::join!(
        scheduled_logins(server, apps.imported.id(), 0, IMPORTED_RATE, duration),
        // Uses other client addresses, because a client that uses several Apps has a lower priority.
        scheduled_logins(server, apps.ordinary.id(), SCHEDULED_CLIENTS, OTHER_RATE, duration)
    );
    latencies[0].add(&imported?)?;
    latencies[1].add(&ordinary?)?;
    Ok(())
}
