//! The context of one call of a use case.

use latchkey_crds::types::AppId;

use super::{
    app::App,
    audit::{Event, EventKind, Refusal, RefusalKind},
    client::{ClientAddress, ClientInfo},
    clock::Env,
    email::{AccountKey, Email},
    user::UserId,
};

/// The context of a use case: the ports, time and randomness, the App, and the client that sent the request. A use case
/// passes this context on to its steps.
pub struct Call<'a, S> {
    /// The implementation of the ports that the use case names in its trait bounds.
    pub stores: &'a S,
    pub env: &'a Env,
    pub app: &'a App,
    pub client: &'a ClientInfo,
}

// === impl Call ===

// `Clone` and `Copy` are not derived, because a derived `Copy` would require `S: Copy`.
impl<S> Clone for Call<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Call<'_, S> {}

impl<'a, S> Call<'a, S> {
    pub fn app_id(self) -> &'a AppId {
        self.app.id()
    }

    pub fn client_address(self) -> ClientAddress {
        self.client.client_address()
    }

    /// Returns the key that identifies an email address in rate limits and refusals.
    pub fn account_key(self, email: &Email) -> AccountKey {
        email.account_key(self.app.id())
    }

    /// Returns a new event caused by this client, with the current time.
    pub fn event(self, kind: EventKind, user: impl Into<Option<UserId>>) -> Event {
        Event::new(self.env, self.app, self.client, kind, user)
    }

    /// Returns the record of a refused attempt by this client.
    pub fn refusal(self, kind: RefusalKind, account: Option<AccountKey>, user: Option<UserId>) -> Refusal {
        Refusal::new(kind, self.client, account, user)
    }
}
