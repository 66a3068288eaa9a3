//! Migrations: each is applied once, even if several servers start at the same time.

use latchkey_server::store::{
    UrlSource,
    postgres::{
        self, PostgresStore,
        migrate::{REQUIRED_SCHEMA, migrate},
    },
};
use latchkey_tests::postgres::Postgres as PostgresServer;
use tokio::task::JoinSet;

use super::{Fixture, LIMIT};

/// The first and the last migration that creates an index concurrently.
const FIRST_INDEX: i64 = 20_261_123_000_001;
const LAST_INDEX: i64 = 20_261_123_000_010;

#[tokio::test]
async fn concurrent_migrations_create_one_schema() {
    let database = PostgresServer::shared().await.empty_database().await.unwrap();
    let url = UrlSource::from_value(&database.url);
    let options = postgres::Options { listen: false, ..postgres::Options::new(url.clone()) };
    let postgres = PostgresStore::connect(options).unwrap();
    assert_eq!(postgres.schema_version().await.unwrap(), None);
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let url = url.clone();
        tasks.spawn(async move { migrate(&url).await.unwrap() });
    }
    tasks.join_all().await;
    assert_eq!(postgres.schema_version().await.unwrap(), Some(REQUIRED_SCHEMA));
    migrate(&url).await.unwrap();
}

/// CREATE INDEX CONCURRENTLY waits for the end of older statements. So a program that waits for the migration lock must
/// not wait in a statement.
#[tokio::test]
async fn a_waiting_migration_does_not_block_the_indexes_of_the_running_migration() {
    for _ in 0..5 {
        let fixture = Fixture::new().await;
        fixture
            .execute(&format!(
                "DELETE FROM _sqlx_migrations WHERE version BETWEEN {FIRST_INDEX} AND {LAST_INDEX};
                 DROP INDEX users_external_id, users_disabled, users_contested, users_state_unverified,
                    users_email_prefix, users_name_prefix, identities_provider, outbox_user, outbox_dead_of_app,
                    outbox_dead_of_kind"
            ))
            .await;
        let url = UrlSource::from_value(&fixture.database.url);
        let migrations = futures::future::join_all((0..4).map(|_| migrate(&url)));
        let outcomes = tokio::time::timeout(LIMIT, migrations).await.expect("all migrations end");
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert_eq!(invalid_indexes(&fixture).await, 0);
        assert_eq!(fixture.stores.postgres.schema_version().await.unwrap(), Some(REQUIRED_SCHEMA));
    }
}

#[tokio::test]
async fn a_repeated_migration_repairs_the_index_that_a_failed_migration_left() {
    let fixture = Fixture::new().await;
    let url = UrlSource::from_value(&fixture.database.url);
    // Two users with the same external id make the creation of the unique index fail.
    let insert = "INSERT INTO users (app_id, id, name, external_id, created_at, updated_at)
                  VALUES ('shop', gen_random_uuid(), '', 'crm:1', now(), now());";
    fixture
        .execute(&format!(
            "DELETE FROM _sqlx_migrations WHERE version BETWEEN {FIRST_INDEX} AND {LAST_INDEX}; DROP INDEX users_external_id; {insert} {insert}"
        ))
        .await;
    for _ in 0..2 {
        let error = migrate(&url).await.unwrap_err();
        assert_eq!(error.to_string(), format!("migration {FIRST_INDEX} failed: unexpected, SQLSTATE 23505"));
        assert_eq!(invalid_indexes(&fixture).await, 1);
    }
    fixture.execute("DELETE FROM users").await;
    // The other indexes exist already, as if a program had ended after it created an index and before it wrote the row
    // in _sqlx_migrations.
    migrate(&url).await.unwrap();
    assert_eq!(invalid_indexes(&fixture).await, 0);
    assert_eq!(fixture.stores.postgres.schema_version().await.unwrap(), Some(REQUIRED_SCHEMA));
    fixture.execute(insert).await;
    let mut connection = fixture.database.connect().await.unwrap();
    assert!(sqlx::raw_sql(insert).execute(&mut connection).await.is_err(), "the index is unique");
}

async fn invalid_indexes(fixture: &Fixture) -> i64 {
    fixture.count("SELECT count(*) FROM pg_index WHERE NOT indisvalid").await
}

#[tokio::test]
async fn a_schema_of_a_newer_server_is_left_unchanged() {
    let fixture = Fixture::new().await;
    fixture
        .execute(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
             VALUES (99990101000000, 'of tomorrow', true, '', 0)",
        )
        .await;
    migrate(&UrlSource::from_value(&fixture.database.url)).await.unwrap();
    assert_eq!(fixture.stores.postgres.schema_version().await.unwrap(), Some(99_990_101_000_000));
}

#[tokio::test]
async fn a_migration_that_was_applied_with_different_content_is_rejected() {
    let fixture = Fixture::new().await;
    fixture.execute(&format!("UPDATE _sqlx_migrations SET checksum = 'x' WHERE version = {REQUIRED_SCHEMA}")).await;
    let error = migrate(&UrlSource::from_value(&fixture.database.url)).await.unwrap_err();
    assert_eq!(error.to_string(), format!("migration {REQUIRED_SCHEMA} was applied with different content"));
}

#[tokio::test]
async fn an_index_that_an_interrupted_migration_left_invalid_is_created_again() {
    let fixture = Fixture::new().await;
    fixture
        .execute(
            "DELETE FROM _sqlx_migrations WHERE version >= 20261123000301;
             DROP TABLE webhooks, webhook_events, consents, groups, group_members;
             ALTER TABLE users DROP COLUMN groups_version;
             UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'users_foreign_hash'::regclass",
        )
        .await;
    migrate(&UrlSource::from_value(&fixture.database.url)).await.unwrap();
    let valid = "SELECT count(*) FROM pg_index WHERE indexrelid = 'users_foreign_hash'::regclass AND indisvalid";
    assert_eq!(fixture.count(valid).await, 1);
    assert_eq!(fixture.stores.postgres.schema_version().await.unwrap(), Some(REQUIRED_SCHEMA));
}
