//! Measures calls that list users with each filter, in an App with few users and in an App with many.

use std::time::Instant;

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, de::IgnoredAny};
use sqlx::PgConnection;

use super::{Service, administrator::Administrator};
use crate::measurements::{Bound, format_millis, histogram, micros_of, p99_ratio};

const FEW_USERS: u32 = 10_000;
const MANY_USERS: u32 = 1_000_000;
/// Number of measured calls with each filter, in each of the two Apps.
const CALLS: u32 = 1000;
const WARM_UP_CALLS: u32 = 50;
/// The size of a page if the call does not choose another.
const PAGE: usize = 100;
/// Upper limit of the p99 with many users, relative to the p99 with few.
const MAX_P99_RATIO: f64 = 2.0;
/// The provider of all identities.
const PROVIDER: &str = "idp";

/// Inserts users with the numbers from 1 to `$2`. Every tenth user is disabled. In both Apps, more users match a prefix
/// of [`Filter::query`] than fit on a page, so that both Apps return pages of the same size.
const INSERT_USERS: &str = "
    INSERT INTO users
        (app_id, id, email, email_canonical, email_verified_at, name, disabled_at, external_id, created_by, created_at,
            updated_at)
    SELECT $1, ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'u' || n || '@example.com',
        'u' || n || '@example.com', now(), 'Name ' || n % 1000, CASE WHEN n % 10 = 0 THEN now() END, 'crm:' || n,
        'import', now(), now()
    FROM generate_series(1, $2::int) AS n";
/// Links an identity to each user of an App.
const INSERT_IDENTITIES: &str = "
    INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
    SELECT app_id, 'https://idp.example', external_id, id, $2, now() FROM users WHERE app_id = $1";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Filter {
    Email,
    ExternalId,
    Subject,
    State,
    EmailPrefix,
    NamePrefix,
}

/// One of the two Apps, and its measurements with one filter.
struct MeasuredApp<'a> {
    app: &'a str,
    users: u32,
    /// Where the next page of [`Filter::State`] begins.
    cursor: Option<String>,
    latency: Histogram<u64>,
}

/// A page of users.
#[derive(Deserialize)]
struct Page {
    users: Vec<IgnoredAny>,
    next: Option<String>,
}

/// Compares the latencies of the two Apps, which are in one database.
pub(super) async fn run(service: &Service) -> Result<Vec<Bound>> {
    let (few, many) = (service.apps.few_users.id(), service.apps.many_users.id());
    let started = Instant::now();
    let mut connection = service.stack.database.connect().await?;
    fill(&mut connection, [(few, FEW_USERS), (many, MANY_USERS)]).await?;
    println!("lists of users with a filter, in two Apps (filled in {:.0} s)", started.elapsed().as_secs_f64());
    println!("  filter          {FEW_USERS} users: p50       p99  {MANY_USERS} users: p50       p99   ratio of p99");
    let mut administrator = service.administrator().await?;
    let mut bounds = Vec::new();
    for filter in Filter::ALL {
        let mut apps = [MeasuredApp::new(few, FEW_USERS), MeasuredApp::new(many, MANY_USERS)];
        for call in 0..WARM_UP_CALLS + CALLS {
            for app in &mut apps {
                let took = app.call(&mut administrator, filter).await?;
                if call >= WARM_UP_CALLS {
                    app.latency.record(took)?;
                }
            }
        }
        let [few, many] = &apps;
        let ratio = p99_ratio(&few.latency, &many.latency);
        println!(
            "  {:<14} {:>17} {:>9} {:>19} {:>9}   {ratio:>12.2}",
            filter.name(),
            format_millis(&few.latency, 0.5),
            format_millis(&few.latency, 0.99),
            format_millis(&many.latency, 0.5),
            format_millis(&many.latency, 0.99)
        );
        bounds.push(Bound::new(
            format!(
                "p99 of the filter {} with {MANY_USERS} users is at most {MAX_P99_RATIO} times that with {FEW_USERS}: \
                 {ratio:.2}",
                filter.name()
            ),
            ratio <= MAX_P99_RATIO,
        ));
    }
    println!();
    Ok(bounds)
}

/// Fills the Apps, and completes the work that Postgres would otherwise do while the calls are measured.
async fn fill(connection: &mut PgConnection, apps: [(&str, u32); 2]) -> Result<()> {
    // Disables foreign key checks, so that a million identities are inserted much faster.
    sqlx::raw_sql("SET session_replication_role = replica").execute(&mut *connection).await?;
    for (app, users) in apps {
        sqlx::query(INSERT_USERS).bind(app).bind(i32::try_from(users)?).execute(&mut *connection).await?;
        sqlx::query(INSERT_IDENTITIES).bind(app).bind(PROVIDER).execute(&mut *connection).await?;
    }
    for statement in ["VACUUM (ANALYZE) users", "VACUUM (ANALYZE) identities", "CHECKPOINT"] {
        sqlx::raw_sql(statement).execute(&mut *connection).await?;
    }
    Ok(())
}

// === impl Filter ===

impl Filter {
    const ALL: [Self; 6] =
        [Self::Email, Self::ExternalId, Self::Subject, Self::State, Self::EmailPrefix, Self::NamePrefix];

    const fn name(self) -> &'static str {
        match self {
            Self::Email => "email",
            Self::ExternalId => "external_id",
            Self::Subject => "subject",
            Self::State => "state",
            Self::EmailPrefix => "email_prefix",
            Self::NamePrefix => "name_prefix",
        }
    }

    /// The query of a call, with a random value, in an App with this number of users.
    fn query(self, users: u32) -> String {
        let number = rand::random_range(1..=users);
        // A prefix with a number of two digits matches at least 110 users. In the App with few users, the email prefix
        // `u42` matches the users `u42`, `u420` to `u429`, and `u4200` to `u4299`. The name prefix `name 42` matches
        // ten users for each of the eleven names `Name 42` and `Name 420` to `Name 429`.
        let digits = rand::random_range(10..100);
        match self {
            Self::Email => format!("email=u{number}%40example.com"),
            Self::ExternalId => format!("external_id=crm%3A{number}"),
            Self::Subject => format!("subject=crm%3A{number}&provider={PROVIDER}"),
            Self::State => "state=disabled".to_owned(),
            Self::EmailPrefix => format!("email_prefix=u{digits}"),
            Self::NamePrefix => format!("name_prefix=name%20{digits}"),
        }
    }

    /// The number of users that a call returns.
    const fn page_size(self) -> usize {
        match self {
            Self::Email | Self::ExternalId | Self::Subject => 1,
            Self::State | Self::EmailPrefix | Self::NamePrefix => PAGE,
        }
    }
}

// === impl MeasuredApp ===

impl<'a> MeasuredApp<'a> {
    fn new(app: &'a str, users: u32) -> Self {
        Self { app, users, cursor: None, latency: histogram() }
    }

    /// Lists users. Returns the latency in microseconds. The calls of [`Filter::State`] go from page to page, because
    /// its first page is always the same.
    async fn call(&mut self, administrator: &mut Administrator, filter: Filter) -> Result<u64> {
        let mut path = format!("/v1/{}/users?{}", self.app, filter.query(self.users));
        if let Some(cursor) = self.cursor.take() {
            path.push_str("&cursor=");
            path.push_str(&cursor);
        }
        let started = Instant::now();
        let body = administrator.get(&path).await?;
        let took = micros_of(started.elapsed());
        let page: Page = serde_json::from_slice(&body)?;
        ensure!(page.users.len() == filter.page_size(), "{path} returned {} users", page.users.len());
        if filter == Filter::State {
            self.cursor = page.next;
        }
        Ok(took)
    }
}
