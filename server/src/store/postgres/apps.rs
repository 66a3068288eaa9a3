//! Whose an App is, as the database has it, and the deletion of its users.

use latchkey_crds::{
    rendered::{DeletedApp, Deletion, RenderedApp},
    types::AppId,
};
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use uuid::Uuid;

use super::Postgres;
use crate::{
    domain::{ports::StoreError, user::UserId},
    store::Stores,
};

/// Mails and events that are deleted in one transaction when an App is released.
const RELEASE_BATCH: u32 = 500;

/// What a document says of whose an App is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub app: AppId,
    pub namespace: String,
    pub incarnation: Option<String>,
    pub handover: u32,
}

/// Whether a namespace may serve an App from this database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppClaim {
    /// It is that namespace's, from now on if it was nobody's.
    Held,
    /// Its users are those of an App of another namespace.
    OtherNamespace,
    /// Its users are those of an incarnation of the App before it, whose keys are not these.
    KeysLost,
    /// The users of this very App were deleted.
    Deleted,
}

/// How a part of the deletion of an App's users ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleting {
    /// Some are gone; there may be more.
    Some,
    /// All are gone, and the database says so.
    Done,
    /// Another server is at it, or somebody registers at this moment: to be tried again.
    Elsewhere,
    /// The users are those of an App of another namespace.
    OtherNamespace,
    /// The users are those of another App of this appID.
    OtherApp,
}

/// What came of the question whether an App that is gone has users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Releasing {
    /// It had none: the appID is free.
    Freed,
    /// The appID stays reserved: the App has so many, or events of users that were deleted, or the database does not
    /// know the App. At least 1.
    Reserved { users: u64 },
    /// Another server works on it, or somebody registers at this moment: to be tried again.
    Elsewhere,
    /// The users are those of an App of another namespace.
    OtherNamespace,
    /// The users are those of another App of this appID, or this one is served again.
    OtherApp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Active,
    Deleting,
    Deleted,
}

struct Row {
    app_id: String,
    namespace: String,
    state: String,
    incarnation: Option<String>,
    handover: i64,
    has_users: bool,
}

/// What is to be done about a claim.
enum Verdict {
    Answer(AppClaim),
    /// It holds once the row says so.
    Write,
}

// === impl Claim ===

impl From<&RenderedApp> for Claim {
    fn from(doc: &RenderedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}

impl From<&DeletedApp> for Claim {
    fn from(doc: &DeletedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}

// === impl Row ===

impl Row {
    /// The table has no other states.
    fn state(&self) -> State {
        match self.state.as_str() {
            "active" => State::Active,
            "deleting" => State::Deleting,
            _ => State::Deleted,
        }
    }

    /// Whether the namespace is the row's, or the appID was handed to it since. A hand-over keeps the keys. Other keys are
    /// those of an App that had the appID before it became free: its documents may have the greater `handover`.
    fn is_of(&self, claim: &Claim) -> bool {
        let same_keys = self.incarnation.is_none() || self.incarnation == claim.incarnation;
        self.namespace == claim.namespace || same_keys && i64::from(claim.handover) > self.handover
    }

    /// Whether users are there whose codes and refresh tokens are under keys that these do not follow.
    fn lost_keys(&self, claim: &Claim) -> bool {
        self.has_users && i64::from(claim.handover) <= self.handover && self.is_of_other_keys(claim)
    }

    fn is_of_other_keys(&self, claim: &Claim) -> bool {
        let incarnations = self.incarnation.as_ref().zip(claim.incarnation.as_ref());
        incarnations.is_some_and(|(known, claimed)| known != claimed)
    }

    /// `write_claims` has the same rule in SQL.
    fn judge(&self, claim: &Claim) -> Verdict {
        let is_news = claim.incarnation.is_some() && claim.incarnation != self.incarnation;
        match self.state() {
            State::Deleted if is_news => Verdict::Write,
            State::Deleted => Verdict::Answer(AppClaim::Deleted),
            State::Active | State::Deleting if !self.is_of(claim) => Verdict::Answer(AppClaim::OtherNamespace),
            State::Active | State::Deleting if self.lost_keys(claim) => Verdict::Answer(AppClaim::KeysLost),
            // The deletion was taken back.
            State::Deleting => Verdict::Write,
            State::Active if is_news || i64::from(claim.handover) > self.handover => Verdict::Write,
            State::Active => Verdict::Answer(AppClaim::Held),
        }
    }
}

// === impl Postgres ===

impl Postgres {
    /// Makes the Apps those namespaces' where they are nobody's, and tells whose they are, in the order of the claims.
    /// Where nothing changed since the last time nothing is written.
    pub async fn claim_apps(&self, claims: &[Claim]) -> Result<Vec<AppClaim>, StoreError> {
        let mut held = self.hold("claim_apps").await?;
        let (connection, until) = held.parts();
        let query = async {
            let rows = claimed_rows(connection, claims).await?;
            let verdict = |rows: &[Row], claim: &Claim| match rows.iter().find(|row| row.app_id == claim.app.as_str()) {
                Some(row) => row.judge(claim),
                None => Verdict::Write,
            };
            let writes: Vec<_> =
                claims.iter().filter(|claim| matches!(verdict(&rows, claim), Verdict::Write)).cloned().collect();
            let rows = if writes.is_empty() {
                rows
            } else {
                write_claims(connection, &writes).await?;
                // A statement of its own: it sees what another server wrote meanwhile.
                claimed_rows(connection, claims).await?
            };
            let answer = |claim| match verdict(&rows, claim) {
                Verdict::Answer(answer) => answer,
                // Another server writes of the same App at this moment, by a newer document than ours or an older one.
                Verdict::Write => AppClaim::Held,
            };
            Ok(claims.iter().map(answer).collect())
        };
        let answer = timeout_at(until, query).await;
        held.done(answer)
    }

    /// How far the deletion of an App's users is.
    pub async fn deletion(&self, claim: &Claim) -> Result<Deletion, StoreError> {
        let mut held = self.hold("deletion").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            r#"
            SELECT
                (SELECT count(*) FROM users WHERE app_id = $1) AS "users_left!",
                EXISTS (
                    SELECT FROM apps
                    WHERE app_id = $1 AND state = 'deleted' AND ($2::text IS NULL OR incarnation = $2)
                ) AS "done!"
            "#,
            claim.app.as_str(),
            claim.incarnation.as_deref(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let row = held.done(answer)?;
        Ok(Deletion { users_left: u64::try_from(row.users_left).unwrap_or(0), done: row.done })
    }
}

async fn claimed_rows(connection: &mut PgConnection, claims: &[Claim]) -> Result<Vec<Row>, sqlx::Error> {
    let ids: Vec<String> = claims.iter().map(|claim| claim.app.to_string()).collect();
    sqlx::query_as!(
        Row,
        r#"
        SELECT app_id, namespace, state, incarnation, handover,
            EXISTS (SELECT FROM users WHERE users.app_id = apps.app_id) AS "has_users!"
        FROM apps WHERE app_id = ANY ($1)
        "#,
        &ids
    )
    .fetch_all(connection)
    .await
}

async fn write_claims(connection: &mut PgConnection, claims: &[Claim]) -> Result<(), sqlx::Error> {
    let ids: Vec<String> = claims.iter().map(|claim| claim.app.to_string()).collect();
    let namespaces: Vec<String> = claims.iter().map(|claim| claim.namespace.clone()).collect();
    let incarnations: Vec<Option<String>> = claims.iter().map(|claim| claim.incarnation.clone()).collect();
    let handovers: Vec<i64> = claims.iter().map(|claim| i64::from(claim.handover)).collect();
    // In one order, so that two servers do not wait for each other. The rule is that of `Row::judge`.
    sqlx::query!(
        r#"
        INSERT INTO apps AS known (app_id, namespace, incarnation, handover)
        SELECT app_id, namespace, incarnation, handover
        FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[])
            AS claim (app_id, namespace, incarnation, handover)
        ORDER BY app_id
        ON CONFLICT (app_id) DO UPDATE
        SET namespace = excluded.namespace,
            incarnation = coalesce(excluded.incarnation, known.incarnation),
            handover = CASE
                WHEN known.state = 'deleted' THEN excluded.handover
                ELSE greatest(known.handover, excluded.handover)
            END,
            state = 'active',
            updated_at = now()
        WHERE CASE
            WHEN known.state = 'deleted'
                THEN excluded.incarnation IS NOT NULL AND excluded.incarnation IS DISTINCT FROM known.incarnation
            WHEN excluded.handover > known.handover
                THEN known.namespace = excluded.namespace OR known.incarnation IS NULL
                    OR known.incarnation = excluded.incarnation
            ELSE known.namespace = excluded.namespace AND (
                known.incarnation IS NULL OR excluded.incarnation IS NULL
                OR known.incarnation = excluded.incarnation
                OR NOT EXISTS (SELECT FROM users WHERE users.app_id = known.app_id)
            )
        END
        "#,
        &ids,
        &namespaces,
        &incarnations as &[Option<String>],
        &handovers,
    )
    .execute(connection)
    .await
    .map(drop)
}

impl Postgres {
    /// Frees the appID of an App that is gone, if it has no users. Deletes no user. The row of the App is locked
    /// meanwhile: a registration that began before is seen here, and one that comes later is refused by the row.
    /// An App that the database does not know is not freed. `wanted` is asked once Postgres answers: the App may be
    /// served again by then.
    pub async fn release_app(
        &self,
        claim: &Claim,
        wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Releasing, StoreError> {
        let mut held = self.hold("release_app").await?;
        let (connection, until) = held.parts();
        let releasing = timeout_at(until, release(connection, claim, wanted)).await;
        held.done(releasing)
    }
}

async fn release(
    connection: &mut PgConnection,
    claim: &Claim,
    wanted: impl Fn() -> bool + Send + Sync,
) -> Result<Releasing, sqlx::Error> {
    // An empty or a wrong database knows no App, and says nothing of its users.
    let known =
        sqlx::query_scalar!(r#"SELECT EXISTS (SELECT FROM apps WHERE app_id = $1) AS "known!""#, claim.app.as_str())
            .fetch_one(&mut *connection)
            .await?;
    if !known {
        return Ok(Releasing::Reserved { users: 1 });
    }
    let mut transaction = connection.begin().await?;
    let row = sqlx::query_as!(
        Row,
        r#"SELECT app_id, namespace, state, incarnation, handover, true AS "has_users!" FROM apps
         WHERE app_id = $1 FOR UPDATE SKIP LOCKED"#,
        claim.app.as_str()
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let ends = match row.filter(|_| wanted()) {
        None => Some(Releasing::Elsewhere),
        Some(row) => match row.state() {
            State::Deleted if row.incarnation.is_none() || row.incarnation == claim.incarnation => {
                Some(Releasing::Freed)
            }
            // Of an App before this one, which itself was never served.
            State::Deleted => None,
            State::Active | State::Deleting if row.namespace != claim.namespace => Some(Releasing::OtherNamespace),
            // A server that is behind asks by an old document: the App was made anew since. The operator raises the
            // number before it asks, so every later document has a greater one.
            State::Active | State::Deleting
                if row.handover > i64::from(claim.handover) || row.is_of_other_keys(claim) =>
            {
                Some(Releasing::OtherApp)
            }
            State::Active | State::Deleting => None,
        },
    };
    if let Some(ends) = ends {
        transaction.rollback().await?;
        return Ok(ends);
    }
    // A statement of its own: it sees all that was committed before the lock was granted.
    let left = sqlx::query!(
        r#"
        SELECT (SELECT count(*) FROM users WHERE app_id = $1) AS "users!",
            EXISTS (SELECT FROM audit_events WHERE app_id = $1 AND user_id IS NOT NULL) AS "has_events!"
        "#,
        claim.app.as_str(),
    )
    .fetch_one(&mut *transaction)
    .await?;
    let users = u64::try_from(left.users).unwrap_or(0);
    if users > 0 || left.has_events {
        transaction.rollback().await?;
        return Ok(Releasing::Reserved { users: users.max(1) });
    }
    // What is left belongs to no user: mails without a reader, and refusals without an account.
    let more = delete_batch(&mut transaction, &claim.app, &[], RELEASE_BATCH).await?;
    if !more {
        // Without an incarnation: whoever claims it next has it, the same App as well if it is made anew meanwhile.
        sqlx::query!(
            "UPDATE apps SET state = 'deleted', namespace = $2, incarnation = NULL,
                handover = greatest(handover, $3), updated_at = now()
             WHERE app_id = $1",
            claim.app.as_str(),
            claim.namespace,
            i64::from(claim.handover),
        )
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(if more { Releasing::Elsewhere } else { Releasing::Freed })
}

impl Stores {
    /// Deletes up to so many of an App's users, with their sessions, and as many of its mails and events. Several servers
    /// may call it at once: one is at it. The row of the App is locked meanwhile, so who registers waits, and is refused.
    /// `wanted` is asked once Postgres answers, which may be long after the call: the App's owner may have taken it back.
    pub async fn delete_users(
        &self,
        claim: &Claim,
        most: u32,
        wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Deleting, StoreError> {
        let mut held = self.postgres.hold("delete_users").await?;
        let (connection, until) = held.parts();
        let deleting = async {
            // Also of an App that no server ever claimed, Postgres having been away.
            sqlx::query!(
                "INSERT INTO apps (app_id, namespace, incarnation, handover, state)
                 VALUES ($1, $2, $3, $4, 'deleting') ON CONFLICT DO NOTHING",
                claim.app.as_str(),
                claim.namespace,
                claim.incarnation.as_deref(),
                i64::from(claim.handover),
            )
            .execute(&mut *connection)
            .await?;
            let mut transaction = connection.begin().await?;
            let row = sqlx::query_as!(
                Row,
                r#"SELECT app_id, namespace, state, incarnation, handover, true AS "has_users!" FROM apps
                 WHERE app_id = $1 FOR UPDATE SKIP LOCKED"#,
                claim.app.as_str()
            )
            .fetch_optional(&mut *transaction)
            .await?;
            let row = row.filter(|_| wanted());
            let ends = row.map_or(Some(Deleting::Elsewhere), |row| {
                let same = row.incarnation == claim.incarnation;
                match row.state() {
                    State::Deleted if same || claim.incarnation.is_none() => Some(Deleting::Done),
                    // Of a later App, which never was served.
                    State::Deleted => None,
                    State::Active | State::Deleting if !row.is_of(claim) => Some(Deleting::OtherNamespace),
                    State::Active | State::Deleting if !same && row.incarnation.is_some() => Some(Deleting::OtherApp),
                    State::Active | State::Deleting => None,
                }
            });
            if let Some(ends) = ends {
                // Said, not left to the drop, which would hold the lock until the connection is used again.
                transaction.rollback().await?;
                return Ok(Ok(ends));
            }
            let users = sqlx::query_scalar!(
                "SELECT id FROM users WHERE app_id = $1 ORDER BY id LIMIT $2",
                claim.app.as_str(),
                i64::from(most)
            )
            .fetch_all(&mut *transaction)
            .await?;
            let ids: Vec<UserId> = users.iter().copied().map(UserId).collect();
            // Before the rows: what fails here is done again, as long as they tell whose the sessions are.
            if let Err(error) = self.redis.forget_users(&claim.app, &ids).await {
                return Ok(Err(error));
            }
            let more = delete_batch(&mut transaction, &claim.app, &users, most).await?;
            let state = if more { "deleting" } else { "deleted" };
            sqlx::query!(
                "UPDATE apps SET state = $2, namespace = $3, incarnation = coalesce($4, incarnation), \
                 handover = greatest(handover, $5), updated_at = now()
                 WHERE app_id = $1",
                claim.app.as_str(),
                state,
                claim.namespace,
                claim.incarnation.as_deref(),
                i64::from(claim.handover),
            )
            .execute(&mut *transaction)
            .await?;
            transaction.commit().await?;
            Ok(Ok(if more { Deleting::Some } else { Deleting::Done }))
        };
        let answer = timeout_at(until, deleting).await;
        held.done(answer)?
    }
}

/// Whether anything was there. Identities go with their users.
async fn delete_batch(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
    most: u32,
) -> Result<bool, sqlx::Error> {
    let most = i64::from(most);
    let users = sqlx::query!("DELETE FROM users WHERE app_id = $1 AND id = ANY ($2)", app.as_str(), users)
        .execute(&mut *connection)
        .await?;
    let mails = sqlx::query!(
        "DELETE FROM outbox WHERE app_id = $1 AND id IN (SELECT id FROM outbox WHERE app_id = $1 LIMIT $2)",
        app.as_str(),
        most
    )
    .execute(&mut *connection)
    .await?;
    let events = sqlx::query!(
        "DELETE FROM audit_events USING (SELECT at, id FROM audit_events WHERE app_id = $1 LIMIT $2) AS batch
         WHERE audit_events.app_id = $1 AND audit_events.at = batch.at AND audit_events.id = batch.id",
        app.as_str(),
        most
    )
    .execute(&mut *connection)
    .await?;
    Ok(users.rows_affected() + mails.rows_affected() + events.rows_affected() > 0)
}
