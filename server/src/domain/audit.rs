//! The audit log. Each event is a row. Refusals of the same kind, account and client address in a quarter of an hour
//! share one row, which counts them.

use std::{net::IpAddr, sync::Arc};

use latchkey_crds::{
    types::{ClientId, ProviderName},
    webhook::WebhookEvent,
};
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    administration::Actor,
    app::App,
    client::{ClientAddress, ClientInfo},
    clock::Env,
    email::AccountKey,
    session::{Amr, SessionId},
    user::UserId,
    webhook::{self, Webhook},
};

/// What happened. Each row of the audit log contains the name of its kind. docs/audit.md lists all names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    Registered,
    /// Somebody registered the email address of the account again.
    RegisteredAgain,
    /// The logged-in user requested a new confirmation code.
    ConfirmationRequested,
    Confirmed,
    /// A session was opened, or its user logged in again on a page. The detail says how the user authenticated.
    LoggedIn,
    LoggedOut,
    PasswordResetRequested,
    PasswordReset,
    PasswordChanged,
    /// An imported password hash was removed, because no login replaced it within the retention time of imported
    /// hashes.
    PasswordRemoved,
    AddressChangeRequested,
    AddressChanged,
    Renamed,
    /// A session was ended through the list of sessions, or because one of its tokens was revoked. The detail names the
    /// ended session.
    SessionEnded,
    /// The user ended all sessions except the session of the request, or an administrator ended all sessions.
    SessionsEnded,
    /// The previous refresh token was used after its grace period.
    RefreshLate,
    /// A refresh token older than the previous one was used, or the previous one was used too often after its grace
    /// period. The session was ended.
    RefreshStolen,
    IdentityLinked,
    IdentityUnlinked,
    /// A client got an authorization code. The detail names the client.
    ClientAuthorized,
    /// The user allowed the access of a client on the consent page. The detail names the client.
    ConsentGiven,
    /// The user withdrew the access of a client. The detail names the client.
    ConsentWithdrawn,
    /// A client exchanged an authorization code again. The session of the first exchange was ended. The detail names
    /// the client.
    ClientCodeReused,
    UserDeleted,
    /// An administrator created the user. The events from here to `Exported` name the administrator in the detail.
    UserCreated,
    /// An administrator changed the user. The detail names the changed fields.
    UserChanged,
    UserDisabled,
    UserEnabled,
    /// An administrator requested a mail to the user.
    MailRequested,
    /// A batch of users was imported. The detail counts them.
    UsersImported,
    /// The data of one user was exported, or an export of all users began.
    Exported,
    /// The user became a member of a group: an administrator added the user, or a provider reported the group at a
    /// login. The detail names the group.
    GroupMemberAdded,
    /// The user is no longer a member of a group. The detail names the group.
    GroupMemberRemoved,
    /// [`RefusalKind`] describes this kind and the kinds below.
    LoginRefused,
    LoginLimited,
    PasswordCheckRefused,
    PasswordResetRefused,
}

/// Why an attempt on an account was refused. One row counts the refusals of one kind, account and client address in a
/// quarter of an hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// At *login*, the email address or the password was wrong, or the user is disabled or unverified.
    Login,
    /// A rate limit was reached, so the password was not checked.
    LoginLimit,
    /// A logged-in user had to send the password again, and the password was wrong.
    PasswordCheck,
    /// The code for a reset of the password was wrong.
    PasswordReset,
}

/// One event of an account.
#[derive(Clone, Debug)]
pub struct Event {
    pub id: Uuid,
    pub kind: EventKind,
    /// `None` for an event about many users, for example an import. Also `None` for a request with an unknown email
    /// address: such an event writes no row, and only makes the request cost the same as a request with a known email
    /// address.
    pub user: Option<UserId>,
    /// The session that the request used or opened.
    pub session: Option<SessionId>,
    pub ip: Option<IpAddr>,
    pub at: OffsetDateTime,
    pub detail: Detail,
    /// The webhooks of the App. The transaction that writes the event also queues the event for each webhook that
    /// reports events of its kind.
    pub webhooks: Arc<[Webhook]>,
}

/// More about an event. Contains no text from a client, no email address, no IP address and no secret.
///
/// One change can cause many events of the kinds `GroupMemberAdded` and `GroupMemberRemoved`. To each of these events,
/// the store adds `group` (the name of the group) and, for a membership from a provider, `provider`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Detail {
    /// How the user authenticated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amr: Option<Amr>,
    /// The name of the Provider in the App.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderName>,
    /// The `client_id` of the Client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// The session that was ended through the list of sessions, or because one of its tokens was revoked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<SessionId>,
    /// The number of sessions that were ended together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<usize>,
    /// The administrator that made the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actor: Option<Actor>,
    /// The names of the fields that an administrator changed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<&'static str>,
    /// The name of the mail that an administrator requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mail: Option<&'static str>,
    /// Why the service deleted the account: `unverified`, if its email address was not verified in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub import: Option<ImportCounts>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportRange>,
}

/// The outcome of one batch of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImportCounts {
    /// The name that the import gives to the system from which the users come: at most 32 characters of `[a-z0-9-]`.
    pub source: String,
    pub created: usize,
    pub unchanged: usize,
    pub refused: usize,
}

/// What an export of all users contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportRange {
    /// Whether the export contains password hashes.
    pub hashes: bool,
    /// The export begins after this user. `None` if it begins with the first user.
    pub after: Option<UserId>,
}

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub kind: RefusalKind,
    /// The account that the request names, whether this account exists or not.
    pub account: Option<AccountKey>,
    /// Set if the account was looked up and exists.
    pub user: Option<UserId>,
    pub client: ClientAddress,
}

/// A row of the audit log, as it is shown to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivityEntry {
    pub at: OffsetDateTime,
    pub kind: EventKind,
    /// The IP address of the client. For refusals, an IPv6 address is shortened to its /64.
    pub ip: Option<String>,
    pub session: Option<SessionId>,
    /// The number of refusals that the row counts; 1 for any other event.
    pub count: u64,
}

// === impl EventKind ===

impl EventKind {
    pub const ALL: [Self; 37] = [
        Self::Registered,
        Self::RegisteredAgain,
        Self::ConfirmationRequested,
        Self::Confirmed,
        Self::LoggedIn,
        Self::LoggedOut,
        Self::PasswordResetRequested,
        Self::PasswordReset,
        Self::PasswordChanged,
        Self::PasswordRemoved,
        Self::AddressChangeRequested,
        Self::AddressChanged,
        Self::Renamed,
        Self::SessionEnded,
        Self::SessionsEnded,
        Self::RefreshLate,
        Self::RefreshStolen,
        Self::IdentityLinked,
        Self::IdentityUnlinked,
        Self::ClientAuthorized,
        Self::ConsentGiven,
        Self::ConsentWithdrawn,
        Self::ClientCodeReused,
        Self::UserDeleted,
        Self::UserCreated,
        Self::UserChanged,
        Self::UserDisabled,
        Self::UserEnabled,
        Self::MailRequested,
        Self::UsersImported,
        Self::Exported,
        Self::GroupMemberAdded,
        Self::GroupMemberRemoved,
        Self::LoginRefused,
        Self::LoginLimited,
        Self::PasswordCheckRefused,
        Self::PasswordResetRefused,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::RegisteredAgain => "registered_again",
            Self::ConfirmationRequested => "confirmation_requested",
            Self::Confirmed => "confirmed",
            Self::LoggedIn => "logged_in",
            Self::LoggedOut => "logged_out",
            Self::PasswordResetRequested => "password_reset_requested",
            Self::PasswordReset => "password_reset",
            Self::PasswordChanged => "password_changed",
            Self::PasswordRemoved => "password_removed",
            Self::AddressChangeRequested => "address_change_requested",
            Self::AddressChanged => "address_changed",
            Self::Renamed => "renamed",
            Self::SessionEnded => "session_ended",
            Self::SessionsEnded => "sessions_ended",
            Self::RefreshLate => "refresh_late",
            Self::RefreshStolen => "refresh_stolen",
            Self::IdentityLinked => "identity_linked",
            Self::IdentityUnlinked => "identity_unlinked",
            Self::ClientAuthorized => "client_authorized",
            Self::ConsentGiven => "consent_given",
            Self::ConsentWithdrawn => "consent_withdrawn",
            Self::ClientCodeReused => "client_code_reused",
            Self::UserDeleted => "user_deleted",
            Self::UserCreated => "user_created",
            Self::UserChanged => "user_changed",
            Self::UserDisabled => "user_disabled",
            Self::UserEnabled => "user_enabled",
            Self::MailRequested => "mail_requested",
            Self::UsersImported => "users_imported",
            Self::Exported => "exported",
            Self::GroupMemberAdded => "group_member_added",
            Self::GroupMemberRemoved => "group_member_removed",
            Self::LoginRefused => "login_refused",
            Self::LoginLimited => "login_limited",
            Self::PasswordCheckRefused => "password_check_refused",
            Self::PasswordResetRefused => "password_reset_refused",
        }
    }

    /// Returns the event that webhooks report for this kind. `None` if webhooks do not report this kind.
    pub const fn webhook_event(self) -> Option<WebhookEvent> {
        Some(match self {
            Self::Registered | Self::UserCreated => WebhookEvent::UserCreated,
            Self::Confirmed => WebhookEvent::UserVerified,
            Self::Renamed | Self::UserChanged | Self::AddressChanged => WebhookEvent::UserUpdated,
            Self::PasswordChanged | Self::PasswordReset | Self::PasswordRemoved => WebhookEvent::UserPasswordChanged,
            Self::UserDisabled => WebhookEvent::UserDisabled,
            Self::UserEnabled => WebhookEvent::UserEnabled,
            Self::UserDeleted => WebhookEvent::UserDeleted,
            Self::IdentityLinked => WebhookEvent::UserIdentityLinked,
            Self::IdentityUnlinked => WebhookEvent::UserIdentityUnlinked,
            Self::LoggedIn => WebhookEvent::SessionCreated,
            Self::LoggedOut | Self::SessionEnded | Self::SessionsEnded => WebhookEvent::SessionEnded,
            Self::RefreshStolen => WebhookEvent::SessionStolen,
            Self::UsersImported => WebhookEvent::UsersImported,
            Self::Exported => WebhookEvent::UsersExported,
            Self::RegisteredAgain
            | Self::ConfirmationRequested
            | Self::PasswordResetRequested
            | Self::AddressChangeRequested
            | Self::RefreshLate
            | Self::ClientAuthorized
            | Self::ConsentGiven
            | Self::ConsentWithdrawn
            | Self::ClientCodeReused
            | Self::MailRequested
            | Self::GroupMemberAdded
            | Self::GroupMemberRemoved
            | Self::LoginRefused
            | Self::LoginLimited
            | Self::PasswordCheckRefused
            | Self::PasswordResetRefused => return None,
        })
    }

    /// Returns the kind with this name. `None` for an unknown name, which a newer server may have written.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

// === impl RefusalKind ===

impl RefusalKind {
    pub const ALL: [Self; 4] = [Self::Login, Self::LoginLimit, Self::PasswordCheck, Self::PasswordReset];

    /// Returns the kind of the row that counts these refusals.
    pub const fn event_kind(self) -> EventKind {
        match self {
            Self::Login => EventKind::LoginRefused,
            Self::LoginLimit => EventKind::LoginLimited,
            Self::PasswordCheck => EventKind::PasswordCheckRefused,
            Self::PasswordReset => EventKind::PasswordResetRefused,
        }
    }
}

// === impl Event ===

impl Event {
    /// Returns a new event caused by an administrator, with the current time. The event has no IP address: users see
    /// their events, and the IP address of an administrator is internal to the cluster.
    pub fn by_administrator(
        env: &Env,
        app: &App,
        actor: &Actor,
        kind: EventKind,
        user: impl Into<Option<UserId>>,
    ) -> Self {
        Self {
            id: env.new_uuid(),
            kind,
            user: user.into(),
            session: None,
            ip: None,
            at: env.now(),
            detail: Detail::from_actor(actor),
            webhooks: Arc::clone(&app.webhooks),
        }
    }

    /// Returns a new event caused by this client, with the current time.
    pub fn new(env: &Env, app: &App, client: &ClientInfo, kind: EventKind, user: impl Into<Option<UserId>>) -> Self {
        Self {
            id: env.new_uuid(),
            kind,
            user: user.into(),
            session: None,
            ip: Some(client.ip.to_canonical()),
            at: env.now(),
            detail: Detail::default(),
            webhooks: Arc::clone(&app.webhooks),
        }
    }

    /// Returns the names of the webhooks that report this event.
    pub fn reporting_webhooks(&self) -> Vec<String> {
        webhook::names_reporting(&self.webhooks, self.kind)
    }

    #[must_use]
    pub fn in_session(self, session: SessionId) -> Self {
        Self { session: Some(session), ..self }
    }

    #[must_use]
    pub fn with_detail(self, detail: Detail) -> Self {
        Self { detail, ..self }
    }
}

// === impl Refusal ===

impl Refusal {
    pub fn new(kind: RefusalKind, client: &ClientInfo, account: Option<AccountKey>, user: Option<UserId>) -> Self {
        Self { kind, account, user, client: client.client_address() }
    }
}

// === impl Detail ===

impl Detail {
    pub fn from_amr(amr: Amr) -> Self {
        Self { amr: Some(amr), ..Self::default() }
    }

    pub fn from_client(client: &ClientId) -> Self {
        Self { client: Some(client.clone()), ..Self::default() }
    }

    pub fn from_ended_session(session: SessionId) -> Self {
        Self { ended: Some(session), ..Self::default() }
    }

    pub fn from_session_count(ended: usize) -> Self {
        Self { sessions: Some(ended), ..Self::default() }
    }

    pub fn from_actor(actor: &Actor) -> Self {
        Self { actor: Some(actor.clone()), ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_line_in_the_docs() {
        let page = include_str!("../../../docs/audit.md");
        for kind in EventKind::ALL {
            let name = kind.as_str();
            assert_eq!(page.lines().filter(|line| line.starts_with(&format!("| `{name}` |"))).count(), 1, "{name}");
            assert_eq!(EventKind::from_name(name), Some(kind));
        }
        assert_eq!(EventKind::from_name("of_tomorrow"), None);
    }

    #[test]
    fn a_detail_contains_only_set_fields() {
        let text = |detail: Detail| serde_json::to_string(&detail).unwrap();
        assert_eq!(text(Detail::from_amr(Amr::Federated)), r#"{"amr":"fed"}"#);
        assert_eq!(text(Detail::from_session_count(3)), r#"{"sessions":3}"#);
        assert_eq!(text(Detail::from_client(&"grafana".parse().unwrap())), r#"{"client":"grafana"}"#);
        assert!(Detail::default().is_empty() && !Detail::from_session_count(0).is_empty());
    }
}
