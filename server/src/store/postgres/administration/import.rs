//! Imports a batch of users in one transaction, with one statement for each table. The first attempt assumes that all
//! users are new, because nearly all are. If a unique index rejects a user, the next attempt looks up the owners of the
//! values.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    conflicts::values_contended,
    insert::{insert_identities, insert_users},
};
use crate::{
    domain::{
        audit::Event,
        foreign_hash::{HashClass, MAX_CLASSES, MAX_WEIGHT},
        ports::{ImportOutcome, NewAdministeredUser, StoreError, UserConflict},
        user::UserId,
    },
    store::postgres::{
        CallError, CallErrorKind, PostgresStore, apps, audit,
        users::{add_hash_class, app_being_deleted},
    },
};

/// Maximum number of attempts for a batch while other requests take or release unique values of its users. The number
/// is greater than for a change to one user, because any of up to 1,000 users can conflict. The deadline of the call
/// also applies.
const MAX_ATTEMPTS: u32 = 20;
/// How long a batch waits for the other batches of its App.
const MAX_WAIT: Duration = Duration::from_secs(4);
/// How often a waiting batch tries to get the lock of its App.
const RETRY_INTERVAL: Duration = Duration::from_millis(25);

/// A batch waited too long for other batches of its App.
#[derive(Debug, thiserror::Error)]
#[error("other imports of this App did not end in time")]
struct ImportsContended;

enum BatchOutcome {
    Done(Vec<ImportOutcome>),
    /// Another batch of the App is being imported.
    OtherImport,
    /// A user of the batch could not be created, for example because another user has one of the unique values. The
    /// next attempt looks up the owners of all unique values.
    Taken,
    /// The App's users are being deleted.
    AppBeingDeleted,
}

/// The owners of the unique values of a batch.
#[derive(Default)]
struct Owners {
    external_ids: HashMap<String, UserId>,
    /// Owners by canonical email address.
    emails: HashMap<String, UserId>,
    /// Owners by authority and subject.
    identities: HashMap<(String, String), UserId>,
    /// The classes (kind and cost) of the App's foreign hashes, with their weights. Unlike the values above, a class
    /// has no owner, because many users can have hashes of the same class.
    hash_classes: HashMap<String, f64>,
}

impl PostgresStore {
    pub(super) async fn import_users(
        &self,
        app: &AppId,
        users: &[NewAdministeredUser],
        dry_run: bool,
        event: Event,
    ) -> Result<Vec<ImportOutcome>, StoreError> {
        let started = Instant::now();
        loop {
            let mut call = self.begin_administration("import_users").await?;
            let (connection, deadline) = call.parts();
            let importing = import(connection, app, users, dry_run, &event, self.should_notify());
            let outcome = timeout_at(deadline, importing).await;
            match call.end_call(outcome)? {
                BatchOutcome::Done(outcomes) => return Ok(outcomes),
                BatchOutcome::Taken => return Err(values_contended()),
                BatchOutcome::AppBeingDeleted => return Err(app_being_deleted()),
                BatchOutcome::OtherImport if started.elapsed() >= MAX_WAIT => {
                    return Err(StoreError::Unavailable { store: "Postgres", source: Box::new(ImportsContended) });
                }
                // The call has ended, so a waiting batch holds no connection: the calls of all administrators share a
                // few connections.
                BatchOutcome::OtherImport => sleep(RETRY_INTERVAL).await,
            }
        }
    }
}

/// Imports a batch. Repeats the transaction if a value is taken or other requests interfere.
async fn import(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[NewAdministeredUser],
    dry_run: bool,
    event: &Event,
    notify: bool,
) -> Result<BatchOutcome, sqlx::Error> {
    for attempt in 1..=MAX_ATTEMPTS {
        let mut transaction = connection.begin().await?;
        let are_new = attempt == 1 && !dry_run;
        let outcome = import_in_transaction(&mut transaction, app, users, are_new, dry_run, event, notify).await;
        match outcome {
            Ok(BatchOutcome::Done(outcomes)) => {
                transaction.commit().await?;
                return Ok(BatchOutcome::Done(outcomes));
            }
            Ok(BatchOutcome::Taken) => transaction.rollback().await?,
            // A deadlock, for example with a request that changes an email address.
            Err(error) if attempt < MAX_ATTEMPTS && CallError::from(&error).kind == CallErrorKind::Conflict => {
                transaction.rollback().await?;
            }
            other => {
                transaction.rollback().await?;
                return other;
            }
        }
    }
    Ok(BatchOutcome::Taken)
}

/// Makes one attempt. If `are_new` is set, assumes that no existing user of the App has a unique value of these users.
async fn import_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[NewAdministeredUser],
    are_new: bool,
    dry_run: bool,
    event: &Event,
    notify: bool,
) -> Result<BatchOutcome, sqlx::Error> {
    if !apps::is_active(connection, app).await? {
        return Ok(BatchOutcome::AppBeingDeleted);
    }
    if !dry_run && !try_lock_imports(connection, app).await? {
        return Ok(BatchOutcome::OtherImport);
    }
    let mut owners = if are_new { Owners::default() } else { find_owners(connection, app, users).await? };
    if users.iter().any(|user| user.foreign_class.is_some()) {
        owners.hash_classes = hash_classes(connection, app).await?;
    }
    let outcomes = owners.plan(users);
    if are_new && !outcomes.iter().all(|outcome| matches!(outcome, ImportOutcome::Created(_))) {
        // Some lines cannot be created: two lines have the same value, or there are too many kinds of hashes. If this
        // attempt went on, it would not insert these lines, so no unique index could show whether their users already
        // exist. Therefore the next attempt looks up the owners.
        return Ok(BatchOutcome::Taken);
    }
    if dry_run {
        return Ok(BatchOutcome::Done(outcomes));
    }
    let created: Vec<&NewAdministeredUser> = users
        .iter()
        .zip(&outcomes)
        .filter(|(_, outcome)| matches!(outcome, ImportOutcome::Created(_)))
        .map(|(user, _)| user)
        .collect();
    if created.is_empty() {
        return Ok(BatchOutcome::Done(outcomes));
    }
    let classes: BTreeSet<HashClass> = created.iter().filter_map(|user| user.foreign_class).collect();
    for class in classes {
        // `add_hash_class` returns false only if another request has added a class of hashes in the meantime.
        if !add_hash_class(connection, app, class).await? {
            return Ok(BatchOutcome::Taken);
        }
    }
    if !insert_users(connection, app, &created, event.at).await?
        || !insert_identities(connection, app, &created, event.at).await?
    {
        return Ok(BatchOutcome::Taken);
    }
    audit::insert(connection, app, &with_counts(event, &outcomes), notify).await?;
    Ok(BatchOutcome::Done(outcomes))
}

/// Tries to take the lock that lets only one batch of an App run at a time: concurrent batches with the same values in
/// different orders would deadlock. Returns false if another batch has the lock. The lock belongs to the transaction,
/// so it also works behind a pooler in transaction mode.
async fn try_lock_imports(connection: &mut PgConnection, app: &AppId) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"SELECT pg_try_advisory_xact_lock(hashtext('latchkey_import'), hashtext($1)) AS "locked!""#,
        app.as_str(),
    )
    .fetch_one(connection)
    .await
}

/// Returns the event with the outcomes of the batch added to the counts in its detail.
fn with_counts(event: &Event, outcomes: &[ImportOutcome]) -> Event {
    let mut event = event.clone();
    if let Some(counts) = &mut event.detail.import {
        for outcome in outcomes {
            match outcome {
                ImportOutcome::Created(_) => counts.created += 1,
                ImportOutcome::Unchanged(_) => counts.unchanged += 1,
                ImportOutcome::Conflict(_) => counts.refused += 1,
            }
        }
    }
    event
}

/// Finds the owners of all unique values of these users. Does not read the classes of foreign hashes.
async fn find_owners(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[NewAdministeredUser],
) -> Result<Owners, sqlx::Error> {
    let external_ids: Vec<String> = users.iter().filter_map(external_id).map(str::to_owned).collect();
    let emails: Vec<String> = users.iter().filter_map(canonical_email).map(str::to_owned).collect();
    let (authorities, subjects): (Vec<String>, Vec<String>) = users
        .iter()
        .flat_map(|user| &user.identities)
        .map(|identity| (identity.authority.clone(), identity.subject.clone()))
        .unzip();
    let mut owners = Owners::default();
    let rows = sqlx::query!(
        r#"SELECT external_id AS "external_id!", id FROM users
         WHERE app_id = $1 AND external_id = ANY ($2) AND external_id IS NOT NULL"#,
        app.as_str(),
        &external_ids,
    )
    .fetch_all(&mut *connection)
    .await?;
    owners.external_ids.extend(rows.into_iter().map(|row| (row.external_id, UserId(row.id))));
    let rows = sqlx::query!(
        r#"SELECT email_canonical AS "email!", id FROM users
         WHERE app_id = $1 AND email_canonical = ANY ($2) AND email_canonical IS NOT NULL"#,
        app.as_str(),
        &emails,
    )
    .fetch_all(&mut *connection)
    .await?;
    owners.emails.extend(rows.into_iter().map(|row| (row.email, UserId(row.id))));
    if !subjects.is_empty() {
        let rows = sqlx::query!(
            r#"
            SELECT wanted.authority AS "authority!", wanted.subject AS "subject!", owner.user_id
            FROM unnest($2::text[], $3::text[]) AS wanted (authority, subject) CROSS JOIN LATERAL (
                SELECT user_id FROM identities
                WHERE identities.app_id = $1 AND identities.authority = wanted.authority
                    AND identities.subject = wanted.subject
                LIMIT 1
            ) AS owner
            "#,
            app.as_str(),
            &authorities,
            &subjects,
        )
        .fetch_all(&mut *connection)
        .await?;
        let identities = rows.into_iter().map(|row| ((row.authority, row.subject), UserId(row.user_id)));
        owners.identities.extend(identities);
    }
    Ok(owners)
}

/// Reads the classes of the App's foreign hashes with their weights.
async fn hash_classes(connection: &mut PgConnection, app: &AppId) -> Result<HashMap<String, f64>, sqlx::Error> {
    let rows = sqlx::query!("SELECT class, weight FROM hash_classes WHERE app_id = $1", app.as_str())
        .fetch_all(connection)
        .await?;
    Ok(rows.into_iter().map(|row| (row.class, row.weight)).collect())
}

fn external_id(user: &NewAdministeredUser) -> Option<&str> {
    user.external_id.as_ref().map(|external_id| external_id.as_str())
}

fn canonical_email(user: &NewAdministeredUser) -> Option<&str> {
    user.email.as_ref().map(|email| email.canonical())
}

// === impl Owners ===

impl Owners {
    /// Decides on one user after the other, as if each were imported alone. Of several users with the same value, the
    /// first one that can be created gets it.
    fn plan(mut self, users: &[NewAdministeredUser]) -> Vec<ImportOutcome> {
        users.iter().map(|user| self.decide(user)).collect()
    }

    fn decide(&mut self, user: &NewAdministeredUser) -> ImportOutcome {
        if let Some(owner) = external_id(user).and_then(|external_id| self.external_ids.get(external_id)) {
            return ImportOutcome::Unchanged(*owner);
        }
        if let Some(owner) = canonical_email(user).and_then(|email| self.emails.get(email)) {
            return ImportOutcome::Conflict(UserConflict::EmailTaken(*owner));
        }
        let keys: Vec<_> =
            user.identities.iter().map(|identity| (identity.authority.clone(), identity.subject.clone())).collect();
        if let Some(owner) = keys.iter().find_map(|key| self.identities.get(key)) {
            return ImportOutcome::Conflict(UserConflict::IdentityTaken(*owner));
        }
        if let Some(class) = user.foreign_class
            && !self.add_class(class)
        {
            return ImportOutcome::Conflict(UserConflict::TooManyHashKinds);
        }
        self.external_ids.extend(external_id(user).map(|external_id| (external_id.to_owned(), user.id)));
        self.emails.extend(canonical_email(user).map(|email| (email.to_owned(), user.id)));
        self.identities.extend(keys.into_iter().map(|key| (key, user.id)));
        ImportOutcome::Created(user.id)
    }

    /// Adds a class of foreign hashes, unless the App already has the class. Returns false if the App has no room for
    /// the class, by the rule of [`add_hash_class`].
    fn add_class(&mut self, class: HashClass) -> bool {
        let name = class.to_string();
        if self.hash_classes.contains_key(&name) {
            return true;
        }
        let weight: f64 = self.hash_classes.values().sum();
        if self.hash_classes.len() >= MAX_CLASSES || weight + class.weight() > MAX_WEIGHT {
            return false;
        }
        self.hash_classes.insert(name, class.weight());
        true
    }
}
