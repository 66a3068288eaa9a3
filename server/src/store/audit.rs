//! The `AuditLog` port over Postgres and Redis. Events go to Postgres. Redis counts refusals for each quarter of an
//! hour. When the quarter is over, its counts go to Postgres.

use aws_lc_rs::digest::{SHA256, digest};
use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    postgres::RefusalColumns,
    redis::refusals::{CountedRefusal, QUARTER_MILLIS, QuarterHour},
    stores::Stores,
};
use crate::domain::{
    audit::{ActivityEntry, Event, Refusal},
    ports::{AuditLog, StoreError},
    user::UserId,
};

/// Maximum number of quarters of an hour that one query returns.
const MAX_DUE_QUARTERS: usize = 500;
/// Maximum number of rows that one statement writes.
const ROWS_PER_STATEMENT: usize = 500;

impl AuditLog for Stores {
    async fn record(&self, app: &AppId, event: Event) {
        self.postgres.record_event(app, event).await;
    }

    fn record_later(&self, app: &AppId, event: Event) {
        self.postgres.record_event_later(app, event);
    }

    fn count_refusal(&self, app: &AppId, refusal: Refusal) {
        self.redis.enqueue_refusal(app, refusal);
    }

    async fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> Result<Vec<ActivityEntry>, StoreError> {
        self.postgres.activity(app, user, since).await
    }
}

impl Stores {
    /// Writes the refusals of the Apps that are served, for every finished quarter of an hour. Returns the number of
    /// quarters that it wrote. Several servers can call this at the same time. If a server dies, another server writes
    /// the same quarter again. The id of a row derives from what the row counts, so each row is written only once.
    pub async fn write_refusals(&self, is_served: impl Fn(&AppId) -> bool + Send + Sync) -> Result<usize, StoreError> {
        let (mut written, mut skipped) = (0, 0);
        loop {
            let due = self.redis.due_quarters(skipped, MAX_DUE_QUARTERS).await?;
            let is_last_batch = due.len() < MAX_DUE_QUARTERS;
            for quarter in due {
                if !is_served(&quarter.app) {
                    skipped += 1;
                    continue;
                }
                self.write_quarter(&quarter).await?;
                written += 1;
            }
            if is_last_batch {
                return Ok(written);
            }
        }
    }

    async fn write_quarter(&self, quarter: &QuarterHour) -> Result<(), StoreError> {
        let mut counted = self.redis.quarter_refusals(quarter).await?;
        // Rows are inserted in a fixed order, so that two servers do not deadlock.
        counted.sort_by(|a, b| a.name.cmp(&b.name));
        let start_nanos = i128::from(quarter.number) * i128::from(QUARTER_MILLIS) * 1_000_000;
        let started_at = OffsetDateTime::from_unix_timestamp_nanos(start_nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        for chunk in counted.chunks(ROWS_PER_STATEMENT) {
            let mut rows = RefusalColumns::default();
            chunk.iter().for_each(|counted| rows.push(quarter, counted));
            self.postgres.insert_refusals(&quarter.app, started_at, &rows).await?;
        }
        self.redis.delete_refusals(quarter).await
    }
}

/// Derives the id of a row from what the row counts: a UUIDv8 (RFC 9562, section 5.8).
fn row_id(quarter: &QuarterHour, name: &str) -> Uuid {
    let hash = digest(&SHA256, format!("{}\n{}\n{name}", quarter.app, quarter.number).as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

// === impl RefusalColumns ===

impl RefusalColumns {
    fn push(&mut self, quarter: &QuarterHour, counted: &CountedRefusal) {
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

    fn quarter(app: &str) -> QuarterHour {
        QuarterHour { app: app.parse().unwrap(), number: 1_963_000 }
    }

    #[test]
    fn the_id_of_a_row_depends_on_its_app_its_quarter_of_an_hour_and_its_name() {
        let id = row_id(&quarter("shop"), "login_refused  192.0.2.1");
        assert_eq!(id, row_id(&quarter("shop"), "login_refused  192.0.2.1"));
        assert_ne!(id, row_id(&quarter("shop"), "login_refused  192.0.2.2"));
        assert_ne!(id, row_id(&quarter("other"), "login_refused  192.0.2.1"));
        assert_eq!(id.get_version_num(), 8);
    }

    #[test]
    fn missing_parts_of_a_row_name_are_none() {
        let user = Uuid::from_u128(7);
        let mut rows = RefusalColumns::default();
        let names =
            [format!("login_refused {user} 192.0.2.1"), format!("login_refused {user} "), "login_limited  ".to_owned()];
        for name in names {
            rows.push(&quarter("shop"), &CountedRefusal { name, count: 3 });
        }
        assert_eq!(rows.kinds, ["login_refused", "login_refused", "login_limited"]);
        assert_eq!(rows.users, [Some(user), Some(user), None]);
        assert_eq!(rows.clients, [Some("192.0.2.1".to_owned()), None, None]);
        assert_eq!(rows.counts, [3, 3, 3]);
    }
}
