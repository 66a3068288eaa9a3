//! The document that the operator writes and the servers read, one for each App, and its revision.
//!
//! A reader ignores fields that it does not know; a later format only adds fields. Every field of this format is
//! written out, with defaults filled in: the server never decides a default. It holds secrets, so nothing here is
//! printed: `Debug` of a secret shows no value.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::types::{AppId, EmailDomain, IssuerUrl, LinkTemplate, Mailbox, Origin, ProviderName, RedirectUrl};

/// The format that this code writes, and the highest that it reads in full.
pub const FORMAT: u32 = 1;

/// The largest document, in octets: half of what a Secret may hold.
pub const MAX_DOCUMENT: usize = 512 * 1024;

/// A value that is never printed. `Debug` shows `Secret(…)`; serde writes it, since the document must hold it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct SecretString(String);

impl SecretString {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself; only for handing it to what needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// An App as servers see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedApp {
    /// The format of this document; see [`FORMAT`].
    pub format: u32,
    #[serde(rename = "appID")]
    pub app_id: AppId,
    /// The namespace that holds the appID.
    pub namespace: String,
    /// The name of the App resource.
    pub name: String,
    pub state: AppState,
    /// See [`DeletedApp::incarnation`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incarnation: Option<String>,
    /// See [`DeletedApp::handover`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub handover: Option<u32>,
    /// `iss` of its tokens: base URL, `/`, appID.
    pub issuer: IssuerUrl,
    pub display_name: String,
    #[serde(rename = "redirectURLs")]
    pub redirect_urls: Vec<RedirectUrl>,
    pub allowed_origins: Vec<Origin>,
    pub sign_up: SignUp,
    /// Empty: every domain.
    pub allowed_email_domains: Vec<EmailDomain>,
    /// Already true where `allowedEmailDomains` is not empty.
    pub require_verified_email: bool,
    pub enumeration_protection: EnumerationProtection,
    pub allow_users_without_email: bool,
    pub browser_binding: BrowserBinding,
    pub callback_mode: CallbackMode,
    pub password: PasswordPolicy,
    pub mail: RenderedMail,
    pub tokens: RenderedTokens,
    /// By the name of contract 7; every limit is present.
    pub limits: BTreeMap<LimitName, Vec<Window>>,
    pub administrators: Vec<Administrator>,
    pub unverified_retention_days: u32,
    pub audit_retention_days: u32,
    pub providers: Vec<RenderedProvider>,
    pub keys: RenderedKeys,
}

/// What is published of an App that is not served any more: it follows from the appID and its holder alone, so that an
/// App that is not accepted can be deleted too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeletedApp {
    pub format: u32,
    #[serde(rename = "appID")]
    pub app_id: AppId,
    pub namespace: String,
    pub name: String,
    /// [`AppState::Deleted`] or [`AppState::Released`].
    pub state: AppState,
    /// Made with the App's first keys: tells an App from one of the same appID whose users were deleted before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incarnation: Option<String>,
    /// How often the appID and its users were handed to another namespace; none is 0. Of two namespaces that say that
    /// the appID is theirs, the greater number is right.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub handover: Option<u32>,
}

/// What every document of every format begins with: enough to know how to read the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub format: u32,
    pub state: AppState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AppState {
    Serving,
    /// Its users are to be deleted; nothing of it is served.
    Deleted,
    /// The App is gone and its users were retained. If it has none, its appID becomes free; nothing is served or
    /// deleted. Servers that do not know this state refuse the document, which frees nothing.
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
    // Documents say `Off`, the former name: servers of an earlier version read no other. `kubectl` reads a bare `Off` as a
    // boolean, hence the new name. Both are read.
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
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedMail {
    /// The sender; none: the install's.
    pub from: Option<Mailbox>,
    #[serde(rename = "confirmURL")]
    pub confirm_url: Option<LinkTemplate>,
    #[serde(rename = "resetURL")]
    pub reset_url: Option<LinkTemplate>,
    pub confirm_code_lifetime_seconds: u32,
    pub reset_code_lifetime_seconds: u32,
    /// The App's own templates by file name, `<mail>.subject`, `<mail>.txt` or `<mail>.html`; what is not here has its
    /// default in the server. Shared, because many Apps can name one ConfigMap.
    pub templates: BTreeMap<String, Arc<String>>,
    pub smtp: RenderedSmtp,
}

/// Through what an App's mail leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "relay")]
pub enum RenderedSmtp {
    /// The install's own relay.
    Install,
    /// The App's own.
    Own(SmtpRelay),
    /// The App names a Secret that does not resolve: mail waits, and no attempt is counted.
    Unresolved,
}

/// A relay, from a Secret with the keys `host`, `port`, `tls` and, where it wants a login, `username` and `password`.
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
    /// `aud`; never empty: the appID where the App names none.
    pub audiences: Vec<String>,
}

/// The limits of contract 7, by name.
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

    /// The name in manifests, answers and metrics.
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

    /// The windows where an App says nothing (contract, 7).
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

/// At most `count` in any `windowSeconds`.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AdministratorRole {
    UserAdmin,
    Reader,
    Introspector,
}

/// A social login of the App.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedProvider {
    /// `{PROVIDER}` in paths: the alias, else the resource's name.
    pub name: ProviderName,
    /// The Provider resource's name.
    pub resource: String,
    pub link_by_email: bool,
    /// The Provider's spec with its references replaced by what they lead to: the preset's member, camel case, and
    /// beside the reference's name without `Ref` the secret.
    pub settings: ProviderSettings,
}

/// What a server needs to talk to a provider.
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
    /// The client's secret, or Apple's private key; none: it did not resolve, and the provider answers 503.
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
}

/// A key that signs tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SigningKey {
    /// `s1`, `s2`, …: counts up, never reused. `kid` of tokens is this id.
    pub id: String,
    pub state: KeyState,
    pub algorithm: SigningAlgorithm,
    /// PKCS#8 in PEM.
    pub private_key: SecretString,
}

/// A key from which codes and refresh tokens get theirs (HKDF with a label per use).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HmacKey {
    /// `h1`, `h2`, …: counts up, never reused.
    pub id: String,
    pub state: KeyState,
    /// 32 octets, base64.
    pub secret: SecretString,
}

/// Published → Active → Retired → dropped. One key of each sort is Active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KeyState {
    /// Known to servers, so that what is made under it is understood; makes nothing itself.
    Published,
    /// What new tokens and codes are made under.
    Active,
    /// Still understood, until the last token under it has ended.
    Retired,
}

/// SHA-256 of a document's octets, in lower-case hexadecimal.
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
    /// The octets that are published: the same document always gives the same octets.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a rendered App is maps with string keys, numbers and strings")
    }
}

impl DeletedApp {
    /// The octets that are published: the same document always gives the same octets.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a deleted App is strings and a number")
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

/// A line of a server's stream of what it serves (`GET /revisions` on the operations port, NDJSON).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RevisionsLine {
    Hello { hello: Hello },
    Change(Change),
    Provider { provider: ProviderReport },
    Heartbeat { heartbeat: u64 },
}

/// The first line: who tells, and all that it serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// The highest format that this server honours; see [`FORMAT`].
    pub format: u32,
    pub revisions: BTreeMap<AppId, Revision>,
    /// The newest document of an App, where it is refused. What is in `revisions`, if anything is, goes on.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub refused: BTreeMap<AppId, RefusedDocument>,
    /// How far the deletion of users is, or whether the appID is free, for each App that is [`AppState::Deleted`] or
    /// [`AppState::Released`] and that this server knows of.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub deletions: BTreeMap<AppId, Deletion>,
}

/// A document that a server does not take. It is named, so that what was refused before says nothing of what is
/// published now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedDocument {
    pub revision: Revision,
    pub reason: String,
    /// Its keys are not those of the users that are there, whose keys were lost.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub keys_lost: bool,
}

/// How far the deletion of an App's users is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Deletion {
    /// Users that are still there. Of a [`AppState::Released`] App: at least 1 if the appID stays reserved.
    pub users_left: u64,
    /// Users, sessions and mails are gone, and the database says so. Of a [`AppState::Released`] App: the appID is free.
    pub done: bool,
}

/// An App changed, went (`revision` is none), or its new document was refused (`refused` says which and why, `revision`
/// is the one that goes on).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub app: AppId,
    pub revision: Option<Revision>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refused: Option<RefusedDocument>,
    /// Of an App that is [`AppState::Deleted`] or [`AppState::Released`]; `revision` is then that of the document that
    /// says so.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub deletion: Option<Deletion>,
}

/// What a server found of a provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProviderReport {
    pub namespace: String,
    pub name: String,
    pub reason: String,
}
