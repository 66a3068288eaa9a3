//! The consents of users to Clients, in Postgres.

use std::future::Future;

use latchkey_crds::types::AppId;
use time::OffsetDateTime;

use super::error::StoreResult;
use crate::domain::{audit::Event, openid::scope::Scopes, user::UserId};

/// The maximum number of consents of a user (specification: Authorization, Consent).
pub const MAX_CONSENTS: i64 = 200;

/// The consent of a user to a Client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredConsent {
    pub client_uid: String,
    pub scopes: Scopes,
    /// When the user last allowed the Client a scope.
    pub at: OffsetDateTime,
}

/// A new consent of a user to a Client.
#[derive(Clone, Debug)]
pub struct NewConsent {
    pub user: UserId,
    pub client_uid: String,
    pub scopes: Scopes,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// The scopes that users have granted to Clients, in Postgres.
pub trait Consents: Sync {
    /// Returns the scopes that the user has granted to the Client. Empty if there is no consent.
    fn consented_scopes(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
    ) -> impl Future<Output = StoreResult<Scopes>> + Send;

    /// Returns the consents of a user, the newest first.
    fn consents(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Vec<StoredConsent>>> + Send;

    /// Adds the scopes to the consent, and writes the event. A user has at most [`MAX_CONSENTS`]: if there are more,
    /// the oldest are removed. Returns false, and changes nothing, if the user does not exist any more.
    fn add_consent(&self, app: &AppId, consent: NewConsent) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Removes a consent, and writes the event. Returns false, and writes nothing, if there is none.
    fn remove_consent(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
        event: Event,
    ) -> impl Future<Output = StoreResult<bool>> + Send;
}
