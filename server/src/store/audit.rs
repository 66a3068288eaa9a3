//! Audit over both stores: events go to Postgres; refusals are counted in Redis, and go there when their quarter of an
//! hour is over.

use aws_lc_rs::digest::{SHA256, digest};
use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Stores,
    postgres::RefusalColumns,
    redis::refusals::{Counted, QUARTER_MILLIS, Quarter},
};
use crate::domain::{
    audit::{Activity, Event, Refusal},
    ports::{Audit, StoreError},
    user::UserId,
};

/// Quarters looked at in one go.
const MOST_DUE: usize = 500;
/// Refusals of one statement.
const ROWS: usize = 500;

impl Audit for Stores {
    async fn record(&self, app: &AppId, event: Event) {
        self.postgres.record_event(app, event).await;
    }

    fn record_later(&self, app: &AppId, event: Event) {
        self.postgres.record_event_later(app, event);
    }

    fn refuse(&self, app: &AppId, refusal: Refusal) {
        self.redis.refuse(app, refusal);
    }

    async fn activity(&self, app: &AppId, user: UserId, since: OffsetDateTime) -> Result<Vec<Activity>, StoreError> {
        self.postgres.activity(app, user, since).await
    }
}

impl Stores {
    /// Writes down the refusals of every quarter of an hour that is over, of the Apps that are `served`; how many
    /// quarters. Several servers may do it at once, and one that dies leaves it to the others: a row's id follows from
    /// what it counts, so it is written once.
    pub async fn write_refusals(&self, served: impl Fn(&AppId) -> bool + Send + Sync) -> Result<usize, StoreError> {
        let (mut written, mut passed_over) = (0, 0);
        loop {
            let due = self.redis.due_refusals(passed_over, MOST_DUE).await?;
            let all = due.len() < MOST_DUE;
            for quarter in due {
                if !served(&quarter.app) {
                    passed_over += 1;
                    continue;
                }
                self.write_quarter(&quarter).await?;
                written += 1;
            }
            if all {
                return Ok(written);
            }
        }
    }

    async fn write_quarter(&self, quarter: &Quarter) -> Result<(), StoreError> {
        let mut counted = self.redis.refusals(quarter).await?;
        // In one order, so that two servers do not wait for each other.
        counted.sort_by(|one, other| one.name.cmp(&other.name));
        let began = i128::from(quarter.number) * i128::from(QUARTER_MILLIS) * 1_000_000;
        let began = OffsetDateTime::from_unix_timestamp_nanos(began).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        for counted in counted.chunks(ROWS) {
            let mut rows = RefusalColumns::default();
            counted.iter().for_each(|counted| rows.push(quarter, counted));
            self.postgres.insert_refusals(&quarter.app, began, &rows).await?;
        }
        self.redis.forget_refusals(quarter).await
    }
}

/// UUIDv8 (RFC 9562, 5.8).
fn row_id(quarter: &Quarter, name: &str) -> Uuid {
    let hash = digest(&SHA256, format!("{}\n{}\n{name}", quarter.app, quarter.number).as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

// === impl RefusalColumns ===

impl RefusalColumns {
    fn push(&mut self, quarter: &Quarter, counted: &Counted) {
        let mut parts = counted.name.split(' ');
        let mut part = || parts.next().filter(|part| !part.is_empty());
        let kind = part().unwrap_or_default();
        let user = part().and_then(|user| user.parse().ok());
        let client = part();
        self.ids.push(row_id(quarter, &counted.name));
        self.kinds.push(kind.to_owned());
        self.users.push(user);
        self.clients.push(client.map(str::to_owned));
        self.counts.push(counted.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quarter(app: &str) -> Quarter {
        Quarter { app: app.parse().unwrap(), number: 1_963_000 }
    }

    #[test]
    fn a_rows_id_follows_from_its_app_quarter_and_name() {
        let id = row_id(&quarter("shop"), "login_refused  192.0.2.1");
        assert_eq!(id, row_id(&quarter("shop"), "login_refused  192.0.2.1"));
        assert_ne!(id, row_id(&quarter("shop"), "login_refused  192.0.2.2"));
        assert_ne!(id, row_id(&quarter("other"), "login_refused  192.0.2.1"));
        assert_eq!(id.get_version_num(), 8);
    }

    #[test]
    fn what_a_row_does_not_name_is_none() {
        let user = Uuid::from_u128(7);
        let mut rows = RefusalColumns::default();
        let names =
            [format!("login_refused {user} 192.0.2.1"), format!("login_refused {user} "), "login_limited  ".to_owned()];
        for name in names {
            rows.push(&quarter("shop"), &Counted { name, count: 3 });
        }
        assert_eq!(rows.kinds, ["login_refused", "login_refused", "login_limited"]);
        assert_eq!(rows.users, [Some(user), Some(user), None]);
        assert_eq!(rows.clients, [Some("192.0.2.1".to_owned()), None, None]);
        assert_eq!(rows.counts, [3, 3, 3]);
    }
}
