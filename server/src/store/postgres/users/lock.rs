//! Locks a user for a change that depends on the user's current state.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;

use crate::domain::{
    mail::MailKind,
    user::{Epoch, UserId},
};

/// A user before a change.
pub(in crate::store::postgres) struct LockedUser {
    pub(in crate::store::postgres) email: Option<String>,
    email_canonical: Option<String>,
    pub(in crate::store::postgres) is_verified: bool,
    pending_email_canonical: Option<String>,
    has_password: bool,
    pub(super) contested: bool,
    epoch: i64,
    is_disabled: bool,
}

/// Locks the user until the transaction ends. Waits for concurrent changes, and returns what they committed: `READ
/// COMMITTED` reads the row again after the wait. Later statements of the transaction also see what was committed.
pub(in crate::store::postgres) async fn lock_user(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
) -> Result<Option<LockedUser>, sqlx::Error> {
    sqlx::query_as!(
        LockedUser,
        r#"
        SELECT email, email_canonical, email_verified_at IS NOT NULL AS "is_verified!", pending_email_canonical,
            password_hash IS NOT NULL AS "has_password!", contested, epoch, disabled_at IS NOT NULL AS "is_disabled!"
        FROM users WHERE app_id = $1 AND id = $2
        FOR UPDATE
        "#,
        app.as_str(),
        user.0,
    )
    .fetch_optional(connection)
    .await
}

// === impl LockedUser ===

impl LockedUser {
    /// Whether the user is enabled and still at the epoch at which the change was decided.
    pub(in crate::store::postgres) fn is_active_at(&self, epoch: Epoch) -> bool {
        !self.is_disabled && self.epoch == epoch.0
    }

    /// Whether this canonical email address is the user's current address, verified or not.
    pub(in crate::store::postgres) fn has_address(&self, canonical: &str) -> bool {
        self.email_canonical.as_deref() == Some(canonical)
    }

    /// Whether this canonical email address is the user's pending address.
    pub(super) fn has_pending_address(&self, canonical: &str) -> bool {
        self.pending_email_canonical.as_deref() == Some(canonical)
    }

    /// Whether an administrator can send the user this mail with a code, as in `domain::administration::request_mail`.
    pub(in crate::store::postgres) fn can_get_code(&self, kind: MailKind) -> bool {
        let has_address = match kind {
            MailKind::Confirm => {
                self.pending_email_canonical.is_some() || (self.email_canonical.is_some() && !self.is_verified)
            }
            _ => self.email_canonical.is_some(),
        };
        has_address && !self.is_disabled && !(kind == MailKind::Invitation && self.has_password)
    }

    /// Whether the user can log in with a password, which needs an email address.
    pub(in crate::store::postgres) fn can_use_password(&self) -> bool {
        self.email.is_some() && self.has_password
    }
}
