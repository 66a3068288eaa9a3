//! The rendered document of an App, which the operator writes and the servers read, and its revision.
//!
//! A later format only adds fields, and a reader ignores unknown fields. The operator fills in the defaults of the App
//! resource, so servers need not know them. Fields that were added later are an exception: if the App does not set such
//! a field, the document does not have it, so that an upgrade of the operator does not change the document. A method of
//! the document then returns the default. The document contains secrets; their `Debug` shows no value.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    refs::ServiceAccountRef,
    types::{
        AppId, EmailDomain, EndpointUrl, GroupPattern, IssuerUrl, LinkTemplate, Mailbox, Origin, ProviderName,
        RedirectUrl, WebhookName,
    },
};

mod clients;
mod pages;

pub use clients::{
    PreviousSecret, RenderedClient, RenderedClientAuthentication, RenderedClientGroups, RenderedClientTokens,
};
pub use pages::{Base64Bytes, RenderedColors, RenderedLogo, RenderedPages, RenderedPagesSession, RenderedTheme};

/// The highest format that this code reads and writes. A document has the lowest format that supports everything that
/// its App uses.
///
/// | format | what it adds |
/// |---|---|
/// | 2 | `importers`, `password.firebaseScrypt`, `webhooks` |
/// | 3 | `pages` |
/// | 4 | `clients`, `keys.idTokens`, `providers[].groups` (and `clientLimits`, which has no effect without clients) |
pub const FORMAT: u32 = 4;

/// The format of a [`DeletedApp`], which has had the same fields since the first format.
pub const DELETED_APP_FORMAT: u32 = 1;

/// The maximum size of a document, in bytes: three quarters of the limit of a Secret.
pub const MAX_DOCUMENT_SIZE: usize = 768 * 1024;

/// The maximum size of a document without its clients, in bytes. It is also the maximum size of a document for servers
/// that know only format 3.
pub const MAX_APP_SIZE: usize = 512 * 1024;

/// The format that added clients. Servers that know it read documents of up to [`MAX_DOCUMENT_SIZE`].
pub const CLIENTS_FORMAT: u32 = 4;

/// A value that is never printed. `Debug` shows `Secret(…)`. serde writes the value, because the document must contain
/// it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct SecretString(String);

impl SecretString {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// Returns the value. Call this only in code that needs the value itself.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The configuration of an App for the servers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedApp {
    /// The format of this document, at most [`FORMAT`] if this code wrote it.
    pub format: u32,
    #[serde(rename = "appID")]
    pub app_id: AppId,
    /// The namespace that owns the appID.
    pub namespace: String,
    /// The name of the App resource.
    pub name: String,
    pub state: AppState,
    /// Distinguishes the App from an earlier App with the same appID, like [`DeletedApp::incarnation`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incarnation: Option<String>,
    /// The same number as [`DeletedApp::handover`]. It increases, for example, when the appID changes its owner.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub handover: Option<u32>,
    /// `iss` of the App's tokens: base URL, `/`, appID.
    pub issuer: IssuerUrl,
    pub display_name: String,
    #[serde(rename = "redirectURLs")]
    pub redirect_urls: Vec<RedirectUrl>,
    pub allowed_origins: Vec<Origin>,
    pub sign_up: SignUp,
    /// An empty list allows every domain.
    pub allowed_email_domains: Vec<EmailDomain>,
    /// Always true if `allowedEmailDomains` is not empty.
    pub require_verified_email: bool,
    pub enumeration_protection: EnumerationProtection,
    pub allow_users_without_email: bool,
    pub browser_binding: BrowserBinding,
    pub callback_mode: CallbackMode,
    pub password: PasswordPolicy,
    pub mail: RenderedMail,
    pub tokens: RenderedTokens,
    /// Contains every limit, also those that the App does not override.
    pub limits: BTreeMap<LimitName, Vec<Window>>,
    /// Those rate limits of OpenID Connect clients that the App overrides. [`RenderedApp::client_limit`] also returns
    /// the defaults. They are not in the field `limits`, because servers that know only format 3 reject a document with
    /// a limit that they do not know.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub client_limits: BTreeMap<ClientLimitName, Vec<Window>>,
    pub administrators: Vec<Administrator>,
    /// The ServiceAccounts with the role Importer. They are not in `administrators`, because servers that know only
    /// format 1 reject a document with a role that they do not know.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub importers: Vec<ServiceAccountRef>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub webhooks: Vec<RenderedWebhook>,
    /// `None`: the App has no hosted pages. In a `Box`, because most Apps have none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pages: Option<Box<RenderedPages>>,
    /// The OpenID Connect clients, the oldest first. Empty if the App has no pages.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub clients: Vec<RenderedClient>,
    pub unverified_retention_days: u32,
    pub audit_retention_days: u32,
    pub providers: Vec<RenderedProvider>,
    pub keys: RenderedKeys,
}

/// The document of an App that is no longer served. It depends only on the appID and its owner, so that an App that is
/// not accepted can be deleted too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeletedApp {
    /// [`DELETED_APP_FORMAT`] if this code wrote the document.
    pub format: u32,
    #[serde(rename = "appID")]
    pub app_id: AppId,
    pub namespace: String,
    pub name: String,
    /// [`AppState::Deleted`] or [`AppState::Released`].
    pub state: AppState,
    /// A random ID, created with the App's first keys, and again when new keys replace all keys. It distinguishes the
    /// App from an earlier App that had the same appID.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incarnation: Option<String>,
    /// A number that increases when the appID and its users are handed over to another namespace, when new keys replace
    /// all keys, and when the operator tries to release the appID. `None` means 0. If two namespaces claim the appID,
    /// the greater number wins.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub handover: Option<u32>,
}

/// The fields that every document of every format has. They determine how to read the other fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentHeader {
    pub format: u32,
    pub state: AppState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AppState {
    Serving,
    /// The App is not served, and its users must be deleted.
    Deleted,
    /// The App was deleted, and its users were kept. It is not served, and no users are deleted. If it has no users,
    /// its appID becomes free. Servers that do not know this state reject the document, and the appID stays reserved.
    Released,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SignUp {
    #[default]
    Open,
    Closed,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("enum" = ["Strict", "Disabled", "Off"]))]
pub enum EnumerationProtection {
    #[default]
    Strict,
    // The former name of this value is `Off`. It changed, because `kubectl` reads an unquoted `Off` as a boolean.
    // Documents still contain `Off`, because servers of an earlier version read only that name. Both names are read.
    #[serde(rename = "Off", alias = "Disabled")]
    Disabled,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BrowserBinding {
    #[default]
    Auto,
    Required,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CallbackMode {
    #[default]
    Query,
    Fragment,
    Code,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SigningAlgorithm {
    #[default]
    ES256,
    EdDSA,
    RS256,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PasswordPolicy {
    /// In characters (Unicode scalar values after NFC), 8–128.
    pub minimum_length: u32,
    /// A zxcvbn score, 0–4.
    pub minimum_strength: u8,
    /// After how many days an imported hash is deleted if its user has not logged in. `None`: never.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub foreign_hash_retention_days: Option<u32>,
    /// `None` if the App names no Secret, or if its Secret does not exist or is invalid. Firebase hashes then match no
    /// password.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub firebase_scrypt: Option<RenderedFirebaseScrypt>,
}

/// The secret parameters of the password hashes of a Firebase project, both in base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedFirebaseScrypt {
    /// 16–64 bytes.
    pub signer_key: SecretString,
    /// 1–64 bytes.
    pub salt_separator: SecretString,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedMail {
    /// The sender. `None` means the sender of the installation.
    pub from: Option<Mailbox>,
    #[serde(rename = "confirmURL")]
    pub confirm_url: Option<LinkTemplate>,
    #[serde(rename = "resetURL")]
    pub reset_url: Option<LinkTemplate>,
    pub confirm_code_lifetime_seconds: u32,
    pub reset_code_lifetime_seconds: u32,
    /// The link in invitations, if the App sets one. [`RenderedMail::invitation_url`] also returns the default.
    #[serde(rename = "invitationURL", skip_serializing_if = "Option::is_none", default)]
    pub own_invitation_url: Option<LinkTemplate>,
    /// The lifetime of the code in invitations, if the App sets one. [`RenderedMail::invitation_code_lifetime_seconds`]
    /// also returns the default.
    #[serde(rename = "invitationCodeLifetimeSeconds", skip_serializing_if = "Option::is_none", default)]
    pub own_invitation_code_lifetime_seconds: Option<u32>,
    /// The App's own templates by name: `<mail>.subject`, `<mail>.txt` or `<mail>.html`. For names that are not here,
    /// the server has default templates. In an `Arc`, because many Apps can use the templates of one ConfigMap.
    pub templates: BTreeMap<String, Arc<String>>,
    pub smtp: RenderedSmtp,
}

/// The lifetime of the code in an invitation, in seconds, if the App sets none: 7 days.
pub const DEFAULT_INVITATION_CODE_LIFETIME_SECONDS: u32 = 604_800;

/// The SMTP relay of an App.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "relay")]
pub enum RenderedSmtp {
    /// The relay of the installation.
    Install,
    /// The App's own relay.
    Own(SmtpRelay),
    /// The App's Secret does not exist or is invalid. Mails wait. Waiting does not count as an attempt to send them.
    Unresolved,
}

/// An SMTP relay, from a Secret with the keys `host`, `port`, `tls` and, for authentication, `username` and `password`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SmtpRelay {
    pub host: String,
    pub port: u16,
    pub tls: SmtpTls,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub username: Option<SecretString>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub password: Option<SecretString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SmtpTls {
    Starttls,
    Implicit,
    None,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedTokens {
    pub signing_algorithm: SigningAlgorithm,
    pub access_lifetime_seconds: u32,
    pub refresh_idle_seconds: u32,
    pub session_lifetime_seconds: u32,
    pub refresh_grace_seconds: u32,
    /// `aud` of access tokens. Never empty: the default is the appID.
    pub audiences: Vec<String>,
}

/// The names of the rate limits (specification: Limits, Rate limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LimitName {
    LoginFailuresPerClient,
    LoginFailuresPerAccount,
    LoginFailuresPerClientOverall,
    LoginsPerClient,
    RegistrationsPerClient,
    MailsPerRecipient,
    MailsPerClient,
    CodesPerClient,
    RefreshesPerSession,
}

impl LimitName {
    pub const ALL: [Self; 9] = [
        Self::LoginFailuresPerClient,
        Self::LoginFailuresPerAccount,
        Self::LoginFailuresPerClientOverall,
        Self::LoginsPerClient,
        Self::RegistrationsPerClient,
        Self::MailsPerRecipient,
        Self::MailsPerClient,
        Self::CodesPerClient,
        Self::RefreshesPerSession,
    ];

    /// Returns the name in manifests, responses and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LoginFailuresPerClient => "loginFailuresPerClient",
            Self::LoginFailuresPerAccount => "loginFailuresPerAccount",
            Self::LoginFailuresPerClientOverall => "loginFailuresPerClientOverall",
            Self::LoginsPerClient => "loginsPerClient",
            Self::RegistrationsPerClient => "registrationsPerClient",
            Self::MailsPerRecipient => "mailsPerRecipient",
            Self::MailsPerClient => "mailsPerClient",
            Self::CodesPerClient => "codesPerClient",
            Self::RefreshesPerSession => "refreshesPerSession",
        }
    }

    /// Returns the default windows (specification: Limits, Rate limits).
    pub fn default_windows(self) -> Vec<Window> {
        let window = |count, window_seconds| Window { count, window_seconds };
        match self {
            Self::LoginFailuresPerClient => vec![window(10, 900)],
            Self::LoginFailuresPerAccount => vec![window(100, 900)],
            Self::LoginFailuresPerClientOverall => vec![window(200, 3600)],
            Self::LoginsPerClient => vec![window(60, 60)],
            Self::RegistrationsPerClient | Self::MailsPerClient => vec![window(100, 3600)],
            Self::MailsPerRecipient => vec![window(1, 60), window(8, 3600)],
            Self::CodesPerClient => vec![window(10, 60)],
            Self::RefreshesPerSession => vec![window(30, 60)],
        }
    }
}

/// The names of the rate limits of OpenID Connect clients (specification: Clients, Rate limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ClientLimitName {
    /// Authorization codes that Clients get for users at one client address.
    #[serde(rename = "authorizationsPerClientAddress")]
    AuthorizationsPerClientAddress,
    /// Requests of one client to the token and PAR endpoints, counted after the client has authenticated. The requests
    /// of a public client are counted for each client address.
    #[serde(rename = "tokenRequestsPerClientID")]
    TokenRequestsPerClientId,
    /// Failed authentications of one client from one client address.
    #[serde(rename = "clientFailuresPerClientAddress")]
    ClientFailuresPerClientAddress,
}

impl ClientLimitName {
    pub const ALL: [Self; 3] =
        [Self::AuthorizationsPerClientAddress, Self::TokenRequestsPerClientId, Self::ClientFailuresPerClientAddress];

    /// Returns the name in manifests, responses and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AuthorizationsPerClientAddress => "authorizationsPerClientAddress",
            Self::TokenRequestsPerClientId => "tokenRequestsPerClientID",
            Self::ClientFailuresPerClientAddress => "clientFailuresPerClientAddress",
        }
    }

    /// Returns the default windows (specification: Clients, Rate limits).
    pub fn default_windows(self) -> Vec<Window> {
        let window = |count, window_seconds| Window { count, window_seconds };
        match self {
            Self::AuthorizationsPerClientAddress => vec![window(120, 60)],
            Self::TokenRequestsPerClientId => vec![window(3000, 60)],
            Self::ClientFailuresPerClientAddress => vec![window(30, 60)],
        }
    }
}

/// At most `count` events in any `windowSeconds` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Window {
    #[schemars(range(min = 1, max = 10_000_000))]
    pub count: u32,
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Administrator {
    pub namespace: String,
    pub service_account: String,
    pub role: AdministratorRole,
}

/// A role of format 1. This enum must not get another variant, because servers that know only format 1 reject unknown
/// roles (see [`RenderedApp::importers`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdministratorRole {
    UserAdmin,
    Reader,
    Introspector,
}

/// A webhook of the App.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedWebhook {
    pub name: WebhookName,
    /// The names of the events. A server ignores names that it does not know, so that a later version can add events.
    pub events: Vec<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub include_profile: bool,
    pub delivery: RenderedDelivery,
}

impl RenderedWebhook {
    /// Whether the webhook pushes its events to a receiver, but has no keys to sign them.
    pub fn lacks_keys(&self) -> bool {
        matches!(&self.delivery, RenderedDelivery::Push(push) if push.keys.is_none())
    }
}

/// How the events of a webhook are delivered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RenderedDelivery {
    Push(RenderedPush),
    /// The ServiceAccount that fetches the events.
    Pull(ServiceAccountRef),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedPush {
    pub url: EndpointUrl,
    /// `None` if the Secret does not exist or is invalid. Events wait until it can be used.
    pub keys: Option<RenderedWebhookKeys>,
}

/// The keys that sign the events of a webhook. Each is `whsec_` and 24–64 bytes in base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedWebhookKeys {
    pub current: SecretString,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub previous: Option<SecretString>,
}

/// A social login of the App.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedProvider {
    /// `{PROVIDER}` in paths: the alias if set, otherwise the name of the Provider.
    pub name: ProviderName,
    /// The name of the Provider.
    pub resource: String,
    pub link_by_email: bool,
    /// The Provider's spec, with references replaced by their values.
    pub settings: ProviderSettings,
    /// `None`: no groups are taken over from the provider.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub groups: Option<RenderedProviderGroups>,
}

/// Which of a user's groups at a provider are taken over at a login, and under which names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedProviderGroups {
    /// The name of the claim, or a JSON pointer if it begins with `/`.
    pub claim: String,
    /// The prefix that is put before the name of each group. Can be empty.
    pub prefix: String,
    /// The groups that are taken over, named without the prefix. Empty takes over all groups.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub only: Vec<GroupPattern>,
}

/// The settings of a provider: its preset, and the client that is registered at the provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProviderSettings {
    /// The member of the Provider's spec: `github`, `oidc`, …
    pub preset: String,
    #[serde(rename = "clientID")]
    pub client_id: String,
    #[serde(rename = "additionalClientIDs", default)]
    pub additional_client_ids: Vec<String>,
    #[serde(default)]
    pub scopes: Vec<String>,
    /// The client's secret or, for Apple, the client's private key. `None` if the Secret does not exist or is invalid;
    /// requests for the provider then get 503.
    pub secret: Option<SecretString>,
    /// The preset's own fields (`tenant`, `baseURL`, `issuer`, `claims`, …) as in the Provider's spec.
    #[serde(default)]
    pub options: BTreeMap<String, serde_json::Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedKeys {
    pub signing: Vec<SigningKey>,
    pub hmac: Vec<HmacKey>,
    /// The keys for ID tokens with other algorithms than `tokens.signingAlgorithm`: for each algorithm at most one
    /// Active key. None of them has the ID of a key in `signing`. They are not in `signing`, because servers that know
    /// only format 3 accept only one Active key there.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub id_tokens: Vec<SigningKey>,
}

/// A signing key for tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SigningKey {
    /// `s1`, `s2`, …: the number increases and is never reused. The ID is the `kid` of tokens.
    pub id: String,
    pub state: KeyState,
    pub algorithm: SigningAlgorithm,
    /// PKCS#8 in PEM.
    pub private_key: SecretString,
}

/// A key from which servers derive the keys for codes, refresh tokens, flows of social logins, and the cookies and
/// forms of hosted pages (HKDF with one label per use).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HmacKey {
    /// `h1`, `h2`, …: the number increases and is never reused.
    pub id: String,
    pub state: KeyState,
    /// 32 bytes in base64.
    pub secret: SecretString,
}

/// The states of a key, in their order. After `Retired`, the key is dropped. One key for access tokens and one HMAC key
/// are Active, and at most one key for ID tokens of each algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KeyState {
    /// The key only verifies, so that all servers know it before it becomes Active.
    Published,
    /// The key signs new tokens, or makes new codes and refresh tokens.
    Active,
    /// The key only verifies, until everything that was created with it has expired.
    Retired,
}

/// The SHA-256 of a document's bytes, in lower-case hexadecimal.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(String);

impl Revision {
    pub fn of(document: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, document);
        Self(digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl RenderedApp {
    /// Returns the bytes to publish. They depend only on the document.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a rendered App has only string keys")
    }

    /// Returns the windows of a rate limit of OpenID Connect clients: those of the App, or the defaults.
    pub fn client_limit(&self, name: ClientLimitName) -> Vec<Window> {
        self.client_limits.get(&name).cloned().unwrap_or_else(|| name.default_windows())
    }
}

impl RenderedMail {
    /// Returns the link in invitations. If the App sets none, returns the link in password resets.
    pub fn invitation_url(&self) -> Option<&LinkTemplate> {
        self.own_invitation_url.as_ref().or(self.reset_url.as_ref())
    }

    pub fn invitation_code_lifetime_seconds(&self) -> u32 {
        self.own_invitation_code_lifetime_seconds.unwrap_or(DEFAULT_INVITATION_CODE_LIFETIME_SECONDS)
    }

    /// Returns the longest lifetime of a code in any mail, in seconds.
    pub fn longest_code_lifetime_seconds(&self) -> u32 {
        let invitation = self.invitation_code_lifetime_seconds();
        self.confirm_code_lifetime_seconds.max(self.reset_code_lifetime_seconds).max(invitation)
    }
}

impl DeletedApp {
    /// Returns the bytes to publish. They depend only on the document.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a deleted App has only strings and numbers")
    }
}

impl FromStr for DeletedApp {
    type Err = serde_json::Error;

    fn from_str(document: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(document)
    }
}

impl FromStr for RenderedApp {
    type Err = serde_json::Error;

    fn from_str(document: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(document)
    }
}

/// A line of a server's stream of revisions (`GET /revisions` on the operations port, NDJSON). A heartbeat contains the
/// number of heartbeats on this stream so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RevisionsMessage {
    Hello { hello: Hello },
    Change(RevisionChange),
    Provider { provider: ProviderReport },
    Heartbeat { heartbeat: u64 },
}

/// The first line of the stream: the server and its complete state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// The highest format that this server supports; see [`FORMAT`].
    pub format: u32,
    pub revisions: BTreeMap<AppId, Revision>,
    /// The newest document of an App, if the server rejected it. The document in `revisions`, if any, remains in use.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub refused: BTreeMap<AppId, RejectedDocument>,
    /// For each App in the state [`AppState::Deleted`] that this server knows: how many users are left. For each App in
    /// the state [`AppState::Released`]: whether the appID is free.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub deletions: BTreeMap<AppId, DeletionProgress>,
    /// This server's reports on webhooks. Apps without a report are missing.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub webhooks: BTreeMap<AppId, WebhookReport>,
}

/// The webhooks of an App, each with the name of its [`WebhookState`](crate::webhook::WebhookState). The report is a
/// field of [`Hello`] and [`RevisionChange`] and not a separate line, because operators of an earlier version close the
/// stream of a server that sends a line of an unknown kind.
pub type WebhookReport = BTreeMap<WebhookName, String>;

/// A document that a server rejected. Its revision shows whether it is the document that is published now or an earlier
/// one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectedDocument {
    pub revision: Revision,
    pub reason: String,
    /// Whether the document was rejected because it has new keys, and the App has users whose keys were lost
    /// (specification: Keys, Lost keys).
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub keys_lost: bool,
}

/// The progress of the deletion of an App's users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeletionProgress {
    /// The number of users that still exist. For an App in the state [`AppState::Released`]: at least 1 if the appID
    /// stays reserved, even if no user exists.
    pub users_left: u64,
    /// Whether users, sessions and mails are deleted, and the database has recorded this. For an App in the state
    /// [`AppState::Released`]: whether the appID is free.
    pub done: bool,
}

/// An App, or the state of its webhooks, changed. If the App was removed, `revision` is `None`. If its new document was
/// rejected, `refused` describes that document, and `revision` is the document that remains in use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RevisionChange {
    pub app: AppId,
    pub revision: Option<Revision>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refused: Option<RejectedDocument>,
    /// The progress of the deletion, for an App in the state [`AppState::Deleted`] or [`AppState::Released`].
    /// `revision` is then the revision of the document with that state.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub deletion: Option<DeletionProgress>,
    /// This server's reports on the App's webhooks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub webhooks: WebhookReport,
}

/// The result of a server's check of a provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProviderReport {
    pub namespace: String,
    pub name: String,
    /// The name of a [`Reason`](crate::conditions::Reason) of the condition Reachable.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What an operator of an earlier version reads: the same lines, without the field `webhooks`.
    #[derive(Debug, Deserialize)]
    #[serde(untagged)]
    enum EarlierMessage {
        Hello { hello: EarlierHello },
        Change(EarlierChange),
    }

    #[derive(Debug, Deserialize)]
    struct EarlierHello {
        revisions: BTreeMap<AppId, Revision>,
    }

    #[derive(Debug, Deserialize)]
    struct EarlierChange {
        app: AppId,
        revision: Option<Revision>,
    }

    fn report() -> WebhookReport {
        WebhookReport::from([("crm".parse().unwrap(), "ReceiverFails".to_owned())])
    }

    #[test]
    fn an_earlier_operator_reads_reports_with_webhooks() {
        let app: AppId = "shop".parse().unwrap();
        let hello = Hello {
            pod_uid: "1".to_owned(),
            format: FORMAT,
            revisions: [(app.clone(), Revision::of(b"1"))].into(),
            refused: BTreeMap::new(),
            deletions: BTreeMap::new(),
            webhooks: [(app.clone(), report())].into(),
        };
        let line = serde_json::to_string(&RevisionsMessage::Hello { hello }).unwrap();
        let EarlierMessage::Hello { hello } = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!(hello.revisions.len(), 1);

        let revision = Some(Revision::of(b"1"));
        let change = RevisionChange {
            app: app.clone(),
            revision: revision.clone(),
            refused: None,
            deletion: None,
            webhooks: report(),
        };
        let line = serde_json::to_string(&RevisionsMessage::Change(change)).unwrap();
        let EarlierMessage::Change(change) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!((change.app, change.revision), (app, revision));
    }

    #[test]
    fn a_client_limit_is_written_as_its_name() {
        for name in ClientLimitName::ALL {
            assert_eq!(json!(name), json!(name.as_str()));
            assert!(LimitName::ALL.iter().all(|other| other.as_str() != name.as_str()));
            assert_eq!(name.default_windows().len(), 1);
        }
    }

    #[test]
    fn the_report_from_an_earlier_server_has_no_webhooks() {
        let line = json!({ "app": "shop", "revision": null }).to_string();
        let RevisionsMessage::Change(change) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!(change.webhooks, WebhookReport::new());
        assert_eq!(serde_json::to_string(&change).unwrap(), line, "a report without webhooks has no field for them");
    }
}
