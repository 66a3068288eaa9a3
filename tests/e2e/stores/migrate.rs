//! Migrations: once, also when two servers start at once.

use latchkey_server::store::{
    UrlSource,
    postgres::{
        self, Postgres,
        migrate::{REQUIRED_SCHEMA, migrate},
    },
};
use latchkey_tests::postgres::Postgres as PostgresServer;
use tokio::task::JoinSet;

use super::Fixture;

#[tokio::test]
async fn many_that_migrate_at_once_make_one_schema() {
    let database = PostgresServer::shared().await.empty_database().await.unwrap();
    let url = UrlSource::given(&database.url);
    let options = postgres::Options { listen: false, ..postgres::Options::new(url.clone()) };
    let postgres = Postgres::connect(options).unwrap();
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
async fn a_schema_of_a_newer_server_is_left_as_it_is() {
    let fixture = Fixture::new().await;
    fixture
        .execute(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
             VALUES (99990101000000, 'of tomorrow', true, '', 0)",
        )
        .await;
    migrate(&UrlSource::given(&fixture.database.url)).await.unwrap();
    assert_eq!(fixture.stores.postgres.schema_version().await.unwrap(), Some(99_990_101_000_000));
}

#[tokio::test]
async fn a_migration_that_was_applied_in_another_form_is_refused() {
    let fixture = Fixture::new().await;
    fixture.execute(&format!("UPDATE _sqlx_migrations SET checksum = 'x' WHERE version = {REQUIRED_SCHEMA}")).await;
    let error = migrate(&UrlSource::given(&fixture.database.url)).await.unwrap_err();
    assert_eq!(error.to_string(), format!("migration {REQUIRED_SCHEMA} was applied in another form than it has here"));
}
