//! Brings a database to the schema that this server needs.

use std::time::Duration;

use sqlx::{
    ConnectOptions, Connection, PgConnection,
    migrate::{MigrateError, Migrator},
};
use tokio::time::{sleep, timeout};
use tracing::info;

use super::{ConnectError, UrlSource, errors::Fault, parse};

static MIGRATOR: Migrator = sqlx::migrate!("./migrations");

/// The newest migration that this server's statements need; a newer schema is fine, migrations only expand.
pub const REQUIRED_SCHEMA: i64 = 20_261_122_000_000;

/// A server whose role may not make partitions is well for so long after an upgrade, and beyond that has the default one.
const MONTHS_AHEAD: i32 = 12;
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Two that make the lock's table at once: one fails, and finds it there.
const TABLE_TRIES: u32 = 5;

/// Why the schema is not there. The text does not hold what the database holds.
#[derive(Debug, thiserror::Error)]
pub enum MigrateFailed {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("Postgres does not answer: {0}")]
    Away(Fault),
    #[error("Postgres refused: {0}")]
    Refused(Fault),
    #[error("migration {version} failed: {fault}")]
    Migration { version: i64, fault: Fault },
    #[error("migration {0} was applied in another form than it has here")]
    Altered(i64),
    #[error("migrations cannot be applied: {0}")]
    Other(String),
}

/// Applies what is missing, in order; a second one at the same time waits, and finds nothing to do. Needs a role that may
/// make tables, and a connection that no pooler gives to others between transactions.
pub async fn migrate(url: &UrlSource) -> Result<(), MigrateFailed> {
    let options = parse(&url.read().map_err(ConnectError::from)?)?;
    let connect = async || -> Result<PgConnection, MigrateFailed> {
        match timeout(CONNECT_LIMIT, options.connect()).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(MigrateFailed::Away(Fault::from(&error))),
            Err(_) => Err(MigrateFailed::Away(Fault::deadline())),
        }
    };
    // The lock is a row, held by a transaction on a connection of its own: session locks do not survive poolers.
    let mut lock = connect().await?;
    make_lock(&mut lock).await.map_err(|error| MigrateFailed::Refused(Fault::from(&error)))?;
    info!("waiting for the migration lock");
    let mut holding = lock.begin().await.map_err(|error| MigrateFailed::Refused(Fault::from(&error)))?;
    sqlx::query("SELECT one FROM latchkey_migration_lock FOR UPDATE")
        .fetch_one(&mut *holding)
        .await
        .map_err(|error| MigrateFailed::Refused(Fault::from(&error)))?;

    let mut connection = connect().await?;
    let outcome = match apply(&mut connection).await {
        Ok(()) => make_months(&mut connection).await,
        Err(error) => Err(error),
    };
    // Nothing was written under the lock; what closes the connections ends it too.
    drop(holding.rollback().await);
    drop(lock.close().await);
    drop(connection.close().await);
    outcome
}

async fn make_lock(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    const MAKE: &str = "
        CREATE TABLE IF NOT EXISTS latchkey_migration_lock (one boolean PRIMARY KEY DEFAULT true CHECK (one));
        INSERT INTO latchkey_migration_lock DEFAULT VALUES ON CONFLICT DO NOTHING;";
    let mut tries = 1;
    loop {
        match sqlx::raw_sql(MAKE).execute(&mut *connection).await {
            Ok(_) => return Ok(()),
            Err(error) if tries == TABLE_TRIES || !is_race(&error) => return Err(error),
            Err(_) => tries += 1,
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// IF NOT EXISTS does not wait for another that makes the table: unique_violation in the catalog, or duplicate_table.
fn is_race(error: &sqlx::Error) -> bool {
    let code = Fault::from(error).code;
    matches!(code.as_deref(), Some("23505" | "42P07" | "42710"))
}

async fn apply(connection: &mut PgConnection) -> Result<(), MigrateFailed> {
    let refused = |error: &sqlx::Error| MigrateFailed::Refused(Fault::from(error));
    let before = seen_version(connection).await.map_err(|error| refused(&error))?;
    let newest = MIGRATOR.iter().map(|migration| migration.version).max();
    let missing: Vec<i64> = MIGRATOR
        .iter()
        .map(|migration| migration.version)
        .filter(|version| before.is_none_or(|before| *version > before))
        .collect();
    if missing.is_empty() {
        info!(schema = before, "the schema is up to date");
    }
    for migration in MIGRATOR.iter().filter(|migration| missing.contains(&migration.version)) {
        info!(version = migration.version, description = %migration.description, "applying a migration");
    }
    // Our row lock takes the place of sqlx's session lock. A database that a newer server has migrated stays as it is.
    let mut migrator = Migrator { migrations: MIGRATOR.migrations.clone(), ..Migrator::DEFAULT };
    migrator.set_locking(false).set_ignore_missing(true);
    migrator.run_direct(None, connection, false).await.map_err(failed)?;
    if !missing.is_empty() {
        info!(schema = newest, "the schema is up to date");
    }
    Ok(())
}

/// The partitions of audit events, ahead of time: what the server does too where its role may.
async fn make_months(connection: &mut PgConnection) -> Result<(), MigrateFailed> {
    let made: i32 = sqlx::query_scalar("SELECT latchkey_audit_make_months($1)")
        .bind(MONTHS_AHEAD)
        .fetch_one(connection)
        .await
        .map_err(|error| MigrateFailed::Refused(Fault::from(&error)))?;
    if made > 0 {
        info!(made, "partitions of audit events are made ahead");
    }
    Ok(())
}

fn failed(error: MigrateError) -> MigrateFailed {
    match error {
        MigrateError::Execute(error) => MigrateFailed::Refused(Fault::from(&error)),
        MigrateError::ExecuteMigration(error, version) => {
            MigrateFailed::Migration { version, fault: Fault::from(&error) }
        }
        MigrateError::VersionMismatch(version) => MigrateFailed::Altered(version),
        // What is left speaks of versions only.
        other => MigrateFailed::Other(other.to_string()),
    }
}

/// The newest migration that was applied; none where there never was one.
pub(super) async fn seen_version(connection: &mut PgConnection) -> Result<Option<i64>, sqlx::Error> {
    let there: bool =
        sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL").fetch_one(&mut *connection).await?;
    if !there {
        return Ok(None);
    }
    sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations WHERE success").fetch_one(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_required_schema_is_the_newest_migration() {
        let newest = MIGRATOR.iter().map(|migration| migration.version).max();
        assert_eq!(newest, Some(REQUIRED_SCHEMA));
    }
}
