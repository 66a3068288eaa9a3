//! Finds the user who already has a unique value, before another user gets this value.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;

use crate::domain::{
    ports::{NewAdministeredIdentity, StoreError, UserConflict},
    user::UserId,
};

/// Maximum number of attempts for a change that needs unique values. An attempt fails only if another request takes or
/// releases one of the values during the attempt, so two attempts are nearly always enough.
pub(super) const MAX_ATTEMPTS: u32 = 5;

/// In every attempt, other requests took a unique value first.
#[derive(Debug, thiserror::Error)]
#[error("other requests took the values at the same moment")]
struct ValuesContended;

pub(super) fn values_contended() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: Box::new(ValuesContended) }
}

/// Values of a user that no other user of the App can have.
pub(super) struct UniqueValues<'a> {
    pub(super) user: UserId,
    pub(super) external_id: Option<&'a str>,
    /// The canonical email address.
    pub(super) email: Option<&'a str>,
    pub(super) identities: &'a [NewAdministeredIdentity],
}

/// Returns the first conflict in the order of `UserConflict`. The search sees what was committed before this call, and
/// what the same transaction has written.
pub(super) async fn find_conflict(
    connection: &mut PgConnection,
    app: &AppId,
    values: &UniqueValues<'_>,
) -> Result<Option<UserConflict>, sqlx::Error> {
    let authorities: Vec<String> = values.identities.iter().map(|identity| identity.authority.clone()).collect();
    let subjects: Vec<String> = values.identities.iter().map(|identity| identity.subject.clone()).collect();
    let owners = sqlx::query!(
        r#"
        SELECT
            (SELECT id FROM users WHERE app_id = $1 AND external_id = $3 AND id <> $2) AS external_id,
            (SELECT id FROM users WHERE app_id = $1 AND email_canonical = $4 AND id <> $2) AS email,
            (
                SELECT user_id
                FROM unnest($5::text[], $6::text[]) WITH ORDINALITY AS wanted (authority, subject, position)
                JOIN identities ON identities.app_id = $1 AND identities.authority = wanted.authority
                    AND identities.subject = wanted.subject
                WHERE user_id <> $2
                ORDER BY position LIMIT 1
            ) AS identity
        "#,
        app.as_str(),
        values.user.0,
        values.external_id,
        values.email,
        &authorities,
        &subjects,
    )
    .fetch_one(connection)
    .await?;
    let external_id = owners.external_id.map(|user| UserConflict::ExternalIdTaken(UserId(user)));
    let email = owners.email.map(|user| UserConflict::EmailTaken(UserId(user)));
    let identity = owners.identity.map(|user| UserConflict::IdentityTaken(UserId(user)));
    Ok(external_id.or(email).or(identity))
}
