//! The webhooks of an App: the events that servers report, and their receivers.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    conditions::Reason,
    refs::{LocalRef, ServiceAccountRef},
    schema::strip_one_of,
    types::{EndpointUrl, Invalid, WebhookName},
};

/// Declares the events, each with its name.
macro_rules! webhook_events {
    ($($variant:ident = $name:literal,)*) => {
        /// WebhookEvent is a kind of event that a webhook reports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum WebhookEvent {
            $(#[serde(rename = $name)] $variant,)*
        }

        impl WebhookEvent {
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

webhook_events! {
    UserCreated = "user.created",
    UserVerified = "user.verified",
    UserUpdated = "user.updated",
    UserPasswordChanged = "user.password_changed",
    UserDisabled = "user.disabled",
    UserEnabled = "user.enabled",
    UserDeleted = "user.deleted",
    UserIdentityLinked = "user.identity_linked",
    UserIdentityUnlinked = "user.identity_unlinked",
    SessionCreated = "session.created",
    SessionEnded = "session.ended",
    SessionStolen = "session.stolen",
    UsersImported = "users.imported",
    UsersExported = "users.exported",
}

/// WebhookSpec reports events to one receiver or consumer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = strip_one_of, extend("x-kubernetes-validations" = webhook_rules()))]
pub struct WebhookSpec {
    /// name identifies the webhook in the App.
    pub name: WebhookName,
    /// events are the kinds of events that the webhook reports.
    #[schemars(length(min = 1, max = 14), extend("x-kubernetes-list-type" = "set"))]
    pub events: Vec<WebhookEvent>,
    /// include adds data to each event: `Profile` adds the email address, name, state and external ID of the user.
    /// Without it, an event has no personal data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1), extend("x-kubernetes-list-type" = "set"))]
    pub include: Vec<WebhookInclude>,
    #[serde(flatten)]
    pub delivery: WebhookDelivery,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WebhookInclude {
    Profile,
}

/// WebhookDelivery is how events reach the application. Exactly one member is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WebhookDelivery {
    /// push sends each event to a URL, signed as Standard Webhooks specifies.
    Push(PushSpec),
    /// pull keeps the events until a program in the cluster fetches and acknowledges them.
    Pull(PullSpec),
}

/// PushSpec is a receiver of events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PushSpec {
    /// url is the URL to which events are sent.
    pub url: EndpointUrl,
    /// secretRef refers to a Secret with the keys that sign events: `current` and, during a rotation, `previous`. Each
    /// is `whsec_` and 24 to 64 bytes in base64.
    pub secret_ref: LocalRef,
}

/// PullSpec is a consumer of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PullSpec {
    /// serviceAccount is the caller that can fetch and acknowledge events.
    pub service_account: ServiceAccountRef,
}

/// Whether the events of a webhook reach their receiver or consumer. The variants are ordered from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WebhookState {
    /// Events are delivered, or there are none.
    Delivering,
    /// The oldest event has waited for more than 24 hours.
    ConsumerBehind,
    /// The last ten deliveries failed.
    ReceiverFails,
    /// The receiver responded with 410. Nothing is sent until the webhook or its Secret changes.
    ReceiverGone,
}

// === impl WebhookState ===

impl WebhookState {
    const ALL: [Self; 4] = [Self::Delivering, Self::ConsumerBehind, Self::ReceiverFails, Self::ReceiverGone];

    /// Returns the reason of the condition Delivering. The name of the reason is also the name of the state in reports
    /// from servers.
    pub const fn reason(self) -> Reason {
        match self {
            Self::Delivering => Reason::Delivering,
            Self::ConsumerBehind => Reason::ConsumerBehind,
            Self::ReceiverFails => Reason::ReceiverFails,
            Self::ReceiverGone => Reason::ReceiverGone,
        }
    }

    /// Returns the state with this name, or `None` if a later version of the server reports a state that this version
    /// does not know.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.reason().as_str() == name)
    }
}

// === impl WebhookEvent ===

impl WebhookEvent {
    /// Whether the event is about one user: its name begins with `user.`.
    pub const fn is_about_one_user(self) -> bool {
        match self {
            Self::UserCreated
            | Self::UserVerified
            | Self::UserUpdated
            | Self::UserPasswordChanged
            | Self::UserDisabled
            | Self::UserEnabled
            | Self::UserDeleted
            | Self::UserIdentityLinked
            | Self::UserIdentityUnlinked => true,
            Self::SessionCreated
            | Self::SessionEnded
            | Self::SessionStolen
            | Self::UsersImported
            | Self::UsersExported => false,
        }
    }
}

impl FromStr for WebhookEvent {
    type Err = Invalid;

    fn from_str(name: &str) -> Result<Self, Invalid> {
        let found = Self::ALL.iter().find(|event| event.as_str() == name);
        found.copied().ok_or(Invalid("is not the name of an event"))
    }
}

// === impl WebhookSpec ===

impl WebhookSpec {
    /// Returns the Secret with the keys that sign events.
    pub fn secret_ref(&self) -> Option<&LocalRef> {
        match &self.delivery {
            WebhookDelivery::Push(push) => Some(&push.secret_ref),
            WebhookDelivery::Pull(_) => None,
        }
    }
}

fn webhook_rules() -> serde_json::Value {
    json!([{ "rule": "has(self.push) != has(self.pull)", "message": "set exactly one of push, pull" }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_written_as_its_name() {
        for event in WebhookEvent::ALL {
            assert_eq!(json!(event), json!(event.as_str()));
            assert_eq!(event.is_about_one_user(), event.as_str().starts_with("user."));
            assert_eq!(event.as_str().parse::<WebhookEvent>(), Ok(*event));
        }
        assert!("user.unknown".parse::<WebhookEvent>().is_err());
    }

    #[test]
    fn a_state_is_found_by_its_name() {
        for state in WebhookState::ALL {
            assert_eq!(WebhookState::from_name(state.reason().as_str()), Some(state));
        }
        assert_eq!(WebhookState::from_name("Pending"), None);
    }
}
