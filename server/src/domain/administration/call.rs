//! The context of a call by an administrator.

use latchkey_crds::types::AppId;

use super::Actor;
use crate::domain::{
    audit::{Event, EventKind},
    call::Call,
    user::UserId,
};

/// The context of a use case for administrators: the context of the call, and the administrator who makes the call.
pub struct AdministratorCall<'a, S> {
    pub call: Call<'a, S>,
    pub actor: &'a Actor,
}

// === impl AdministratorCall ===

// `Clone` and `Copy` are not derived, because a derived `Copy` would require `S: Copy`.
impl<S> Clone for AdministratorCall<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for AdministratorCall<'_, S> {}

impl<'a, S> AdministratorCall<'a, S> {
    pub fn stores(self) -> &'a S {
        self.call.stores
    }

    pub fn app_id(self) -> &'a AppId {
        self.call.app_id()
    }

    /// Returns a new event caused by this administrator, with the current time.
    pub fn event(self, kind: EventKind, user: impl Into<Option<UserId>>) -> Event {
        Event::by_administrator(self.call.env, self.call.app, self.actor, kind, user)
    }
}
