//! Migrations: each is applied once, also if several servers start at the same time.

use latchkey_server::store::{
    UrlSource,
    postgres::{
        self, PostgresStore,
        migrate::{REQUIRED_SCHEMA, migrate},
    },
};
use latchkey_tests::postgres::Postgres as PostgresServer;
use tokio::task::JoinSet;

use super::Fixture;

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
