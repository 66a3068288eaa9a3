//! Migrates a database to the schema that this server needs.

use std::{collections::HashSet, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection,
    migrate::{MigrateError, Migration, Migrator},
};
use tokio::time::{sleep, timeout};
use tracing::info;

use super::{CallError, ConnectError, pool::parse_url};
use crate::store::UrlSource;

static MIGRATOR: Migrator = sqlx::migrate!("./migrations");

/// The newest migration that this server's statements need. A newer schema works too, because migrations only expand
/// the schema.
pub const REQUIRED_SCHEMA: i64 = 20_261_124_000_300;

/// The number of months for which `migrate` creates partitions of `audit_events` in advance. If the servers' role
/// cannot create later partitions, the rows of later months go to the default partition.
const MONTHS_AHEAD: i32 = 12;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of attempts to create the lock's table. If two programs create the table at the same time, one of
/// them fails, and finds the table at its next attempt.
const LOCK_TABLE_ATTEMPTS: u32 = 5;
/// How often a program that waits for the lock tries to get it.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// Why a migration failed. The message contains no data from the database.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot connect to Postgres: {0}")]
    Unreachable(CallError),
    #[error("Postgres refused a statement: {0}")]
    StatementFailed(CallError),
    #[error("migration {version} failed: {error}")]
    Migration { version: i64, error: CallError },
    #[error("migration {0} was applied with different content")]
    ContentChanged(i64),
    #[error("cannot apply migrations: {0}")]
    Other(String),
}

/// Applies missing migrations in order. A concurrent call waits, and then finds nothing to do. Needs a role that can
/// create tables, and a connection that no pooler shares between transactions.
pub async fn migrate(url: &UrlSource) -> Result<(), MigrationError> {
    let options = parse_url(&url.read().map_err(ConnectError::from)?)?;
    let connect = async || -> Result<PgConnection, MigrationError> {
        match timeout(CONNECT_TIMEOUT, options.connect()).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(MigrationError::Unreachable(CallError::from(&error))),
            Err(_) => Err(MigrationError::Unreachable(CallError::deadline())),
        }
    };
    // The lock is a row that a transaction on a separate connection keeps locked, because session locks do not work
    // behind poolers.
    let mut lock = connect().await?;
    create_lock_table(&mut lock).await.map_err(|error| MigrationError::StatementFailed(CallError::from(&error)))?;
    info!("waiting for the migration lock");
    acquire_lock(&mut lock).await.map_err(|error| MigrationError::StatementFailed(CallError::from(&error)))?;

    let mut connection = connect().await?;
    let outcome = match apply(&mut connection).await {
        Ok(()) => create_audit_partitions(&mut connection).await,
        Err(error) => Err(error),
    };
    // Errors do not matter here: the transaction wrote nothing, and closing the connection releases the lock, too.
    drop(sqlx::raw_sql("ROLLBACK").execute(&mut lock).await);
    drop(lock.close().await);
    drop(connection.close().await);
    outcome
}

async fn create_lock_table(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    const CREATE_LOCK_TABLE: &str = "
        CREATE TABLE IF NOT EXISTS latchkey_migration_lock (one boolean PRIMARY KEY DEFAULT true CHECK (one));
        INSERT INTO latchkey_migration_lock DEFAULT VALUES ON CONFLICT DO NOTHING;";
    let mut tries = 1;
    loop {
        match sqlx::raw_sql(CREATE_LOCK_TABLE).execute(&mut *connection).await {
            Ok(_) => return Ok(()),
            Err(error) if tries == LOCK_TABLE_ATTEMPTS || !is_concurrent_creation(&error) => return Err(error),
            Err(_) => tries += 1,
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Begins the transaction that holds the lock. Between two attempts, this connection has neither a statement nor a
/// transaction open: the program that holds the lock can be running CREATE INDEX CONCURRENTLY, which waits until every
/// older snapshot is gone. The statements use the simple query protocol, because with the extended protocol a snapshot
/// can last until the transaction ends.
async fn acquire_lock(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    // The transaction is idle while the migrations run.
    const BEGIN: &str = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0";
    const TRY_LOCK: &str = "SELECT one FROM latchkey_migration_lock FOR UPDATE SKIP LOCKED";
    loop {
        sqlx::raw_sql(BEGIN).execute(&mut *connection).await?;
        if sqlx::raw_sql(TRY_LOCK).fetch_optional(&mut *connection).await?.is_some() {
            return Ok(());
        }
        sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await?;
        sleep(LOCK_INTERVAL).await;
    }
}

/// Whether another program created the table at the same time. IF NOT EXISTS does not prevent this race: the statement
/// fails with unique_violation in the catalog, duplicate_table or duplicate_object.
fn is_concurrent_creation(error: &sqlx::Error) -> bool {
    let code = CallError::from(error).code;
    matches!(code.as_deref(), Some("23505" | "42P07" | "42710"))
}

async fn apply(connection: &mut PgConnection) -> Result<(), MigrationError> {
    let failed = |error: &sqlx::Error| MigrationError::StatementFailed(CallError::from(error));
    let applied = applied_version(connection).await.map_err(|error| failed(&error))?;
    let newest = MIGRATOR.iter().map(|migration| migration.version).max();
    let missing: Vec<i64> = MIGRATOR
        .iter()
        .map(|migration| migration.version)
        .filter(|version| applied.is_none_or(|applied| *version > applied))
        .collect();
    if missing.is_empty() {
        info!(schema = applied, "the schema is up to date");
    }
    for migration in MIGRATOR.iter().filter(|migration| missing.contains(&migration.version)) {
        info!(version = migration.version, description = %migration.description, "applying a migration");
    }
    // An index on a large table can take longer than the time limit that the role may have.
    sqlx::raw_sql("SET statement_timeout = 0").execute(&mut *connection).await.map_err(|error| failed(&error))?;
    drop_invalid_indexes(connection).await.map_err(|error| failed(&error))?;
    // The row lock replaces sqlx's session lock. Migrations that a newer version of the server has applied are ignored.
    let mut migrator = Migrator { migrations: MIGRATOR.migrations.clone(), ..Migrator::DEFAULT };
    migrator.set_locking(false).set_ignore_missing(true);
    migrator.run_direct(None, connection, false).await.map_err(migration_error)?;
    if !missing.is_empty() {
        info!(schema = newest, "the schema is up to date");
    }
    Ok(())
}

/// Drops the indexes that failed migrations have left behind. If CREATE INDEX CONCURRENTLY fails, it leaves an invalid
/// index, and IF NOT EXISTS would find this index when the migration runs again. Indexes of applied migrations stay.
async fn drop_invalid_indexes(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let has_applied: bool =
        sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL").fetch_one(&mut *connection).await?;
    if !has_applied {
        return Ok(());
    }
    let applied: HashSet<i64> = sqlx::query_scalar("SELECT version FROM _sqlx_migrations")
        .fetch_all(&mut *connection)
        .await?
        .into_iter()
        .collect();
    let invalid: Vec<String> = sqlx::query_scalar(
        "SELECT pg_class.relname::text FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
         WHERE NOT indisvalid AND relnamespace = current_schema()::regnamespace",
    )
    .fetch_all(&mut *connection)
    .await?;
    let creates = |migration: &Migration, index: &str| {
        migration.no_tx && migration.sql.as_str().split_whitespace().any(|word| word == index)
    };
    for index in invalid {
        if MIGRATOR.iter().any(|migration| !applied.contains(&migration.version) && creates(migration, &index)) {
            info!(index, "dropping the invalid index of a failed migration");
            // The name is safe in SQL, because it comes from the text of a migration.
            sqlx::raw_sql(AssertSqlSafe(format!("DROP INDEX CONCURRENTLY {index}"))).execute(&mut *connection).await?;
        }
    }
    Ok(())
}

/// Creates partitions of audit events in advance. Servers do this too if their role permits it.
async fn create_audit_partitions(connection: &mut PgConnection) -> Result<(), MigrationError> {
    let made: i32 = sqlx::query_scalar("SELECT latchkey_audit_make_months($1)")
        .bind(MONTHS_AHEAD)
        .fetch_one(connection)
        .await
        .map_err(|error| MigrationError::StatementFailed(CallError::from(&error)))?;
    if made > 0 {
        info!(made, "created partitions of audit events ahead of time");
    }
    Ok(())
}

fn migration_error(error: MigrateError) -> MigrationError {
    match error {
        MigrateError::Execute(error) => MigrationError::StatementFailed(CallError::from(&error)),
        MigrateError::ExecuteMigration(error, version) => {
            MigrationError::Migration { version, error: CallError::from(&error) }
        }
        MigrateError::VersionMismatch(version) => MigrationError::ContentChanged(version),
        // The texts of all other errors contain only versions of migrations.
        other => MigrationError::Other(other.to_string()),
    }
}

/// Returns the version of the newest applied migration. `None` if none was applied.
pub(super) async fn applied_version(connection: &mut PgConnection) -> Result<Option<i64>, sqlx::Error> {
    let exists: bool =
        sqlx::query_scalar("SELECT to_regclass('_sqlx_migrations') IS NOT NULL").fetch_one(&mut *connection).await?;
    if !exists {
        return Ok(None);
    }
    sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations WHERE success").fetch_one(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_that_creates_an_index_concurrently_is_one_statement_without_a_transaction() {
        for migration in MIGRATOR.iter().filter(|migration| migration.sql.as_str().contains("CONCURRENTLY")) {
            let sql = migration.sql.as_str();
            assert!(migration.no_tx, "{}", migration.version);
            assert_eq!(sql.matches(';').count(), 1, "{}", migration.version);
            assert!(sql.contains("INDEX CONCURRENTLY IF NOT EXISTS "), "{}", migration.version);
        }
    }

    #[test]
    fn the_required_schema_is_the_newest_migration() {
        let newest = MIGRATOR.iter().map(|migration| migration.version).max();
        assert_eq!(newest, Some(REQUIRED_SCHEMA));
    }
}
