//! The App resource: spec, status and validation rules.

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    client::ClientsSpec,
    conditions::{Condition, ConditionType, initial_status},
    pages::PagesSpec,
    refs::{LocalRef, ProviderRef, ServiceAccountRef},
    rendered::{
        BrowserBinding, CallbackMode, ClientLimitName, EnumerationProtection, KeyState, LimitName, SignUp,
        SigningAlgorithm,
    },
    schema::{RootSchema, Rule, with_schema},
    types::{AppId, EmailDomain, Invalid, LinkTemplate, Mailbox, Origin, RESERVED_APP_IDS, RedirectUrl},
    webhook::WebhookSpec,
};

/// AppSpec is the desired state of an App. Every field is optional.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "latchkey.dev",
    version = "v1alpha1",
    kind = "App",
    plural = "apps",
    shortname = "lkapp",
    category = "latchkey",
    namespaced,
    schema = "disabled",
    doc = "App is an application that uses Latchkey as its login service.",
    status = "AppStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"AppID","type":"string","jsonPath":".status.appID"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Message","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"Ready\")].message"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct AppSpec {
    /// appID identifies the App in every path: `/v1/{appID}/…`. It must be unique in the cluster and cannot change.
    /// Defaults to `metadata.name`.
    #[serde(rename = "appID", skip_serializing_if = "Option::is_none")]
    pub app_id: Option<AppId>,
    /// displayName is the name of the application in emails. Defaults to the appID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 100), regex(pattern = r"^[^\x00-\x1f\x7f]*$"))]
    pub display_name: Option<String>,
    /// redirectURLs are the URLs to which a browser can be redirected after a social login. A URL must match byte for
    /// byte, except for the port of an `http` loopback URL. A request that names no URL uses the first entry.
    #[serde(rename = "redirectURLs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub redirect_urls: Vec<RedirectUrl>,
    /// allowedOrigins are the web origins from which pages can call the API (CORS), for example
    /// `https://shop.example.com`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_origins: Vec<Origin>,
    /// providerRefs are the social logins of the App: references to Providers in its namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "atomic", "x-kubernetes-validations" = provider_refs_rules())
    )]
    pub provider_refs: Vec<ProviderRef>,
    /// signUp controls registration. With `Open`, anyone can register. With `Closed`, only callers in the cluster can
    /// create users.
    #[serde(default)]
    pub sign_up: SignUp,
    /// allowedEmailDomains are the domains that users' email addresses can have. Empty allows every domain. If set,
    /// `requireVerifiedEmail` is true.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_email_domains: Vec<EmailDomain>,
    /// requireVerifiedEmail restricts sessions to users with a verified email address. Defaults to false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_verified_email: bool,
    /// enumerationProtection controls whether responses reveal that an email address has an account. With `Strict` they
    /// do not. With `Disabled`, registration with the verified address of an account returns 409. `"Off"`, always in
    /// quotes, is the former name of `Disabled`.
    #[serde(default)]
    pub enumeration_protection: EnumerationProtection,
    /// allowUsersWithoutEmail allows a social login without an email address to create an account. Defaults to false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_users_without_email: bool,
    /// browserBinding controls whether a social login must end in the browser in which it began. `Required` refuses a
    /// login that is not bound to a browser. `Auto` also allows logins that cannot be bound to a browser (cross-site
    /// requests with `format=json`).
    #[serde(default)]
    pub browser_binding: BrowserBinding,
    /// callbackMode is how the redirect URL receives the result of a social login: in the query, in the fragment, or as
    /// a one-time code.
    #[serde(default)]
    pub callback_mode: CallbackMode,
    /// password is the password policy.
    #[serde(default, skip_serializing_if = "PasswordSpec::is_default")]
    pub password: PasswordSpec,
    /// mail configures emails to users.
    #[serde(default, skip_serializing_if = "MailSpec::is_default")]
    pub mail: MailSpec,
    /// tokens configures tokens and sessions.
    #[serde(default, skip_serializing_if = "TokensSpec::is_default")]
    pub tokens: TokensSpec,
    /// limits overrides default rate limits. A limit has one to three windows, and all of them apply.
    #[serde(default, skip_serializing_if = "LimitsSpec::is_default")]
    pub limits: LimitsSpec,
    /// administrators are the ServiceAccounts that can call the administration API for the App. A ServiceAccount with
    /// several entries has the permissions of all its roles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "atomic"))]
    pub administrators: Vec<AdministratorSpec>,
    /// webhooks report events about users and sessions to other programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "atomic", "x-kubernetes-validations" = webhooks_rules())
    )]
    pub webhooks: Vec<WebhookSpec>,
    /// pages configures the hosted pages: login, registration and the user's account, rendered by the servers.
    #[serde(default, skip_serializing_if = "PagesSpec::is_default")]
    pub pages: PagesSpec,
    /// clients controls which Clients can sign in users of the App with OpenID Connect.
    #[serde(default, skip_serializing_if = "ClientsSpec::is_default")]
    pub clients: ClientsSpec,
    /// unverifiedRetentionDays is the number of days after which an account is deleted if its email address was never
    /// verified, 1–3650. Defaults to 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub unverified_retention_days: Option<i32>,
    /// auditRetentionDays is the number of days that audit events are kept, 1–3650. Defaults to 365.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub audit_retention_days: Option<i32>,
    /// deletionPolicy controls what happens to the users when the App is deleted: `Retain` keeps them, `Delete` deletes
    /// them.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    Delete,
}

/// PasswordSpec is the password policy of an App.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PasswordSpec {
    /// minimumLength is the minimum number of characters, 8–128. Defaults to 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 8, max = 128))]
    pub minimum_length: Option<i32>,
    /// minimumStrength is the minimum zxcvbn score, 0 (any password) to 4 (very hard to guess). Defaults to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4))]
    pub minimum_strength: Option<i32>,
    /// foreignHashRetentionDays is the number of days after which a password hash that was imported from another system
    /// is deleted if its user has not logged in, 1–3650. The first login replaces the hash. If it is not set, imported
    /// hashes are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub foreign_hash_retention_days: Option<i32>,
    /// firebaseScryptRef refers to a Secret with the password hash parameters of the Firebase project from which users
    /// were imported. Its keys are `signer-key` and `salt-separator`, in base64 as Firebase shows them. If it is not
    /// set, every password of a user with a Firebase hash counts as wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firebase_scrypt_ref: Option<LocalRef>,
}

/// MailSpec configures emails to users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MailSpec {
    /// from is the sender: an email address, or `Name <address>`. Defaults to the sender of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Mailbox>,
    /// confirmURL is the page of the application that the link in a confirmation email opens. It must contain `{code}`
    /// and can contain `{email}`; both are replaced. Without it, the link opens the hosted page, if there is one.
    #[serde(rename = "confirmURL", skip_serializing_if = "Option::is_none")]
    pub confirm_url: Option<LinkTemplate>,
    /// resetURL is the page of the application that the link in a password reset email opens, in the format of
    /// `confirmURL`.
    #[serde(rename = "resetURL", skip_serializing_if = "Option::is_none")]
    pub reset_url: Option<LinkTemplate>,
    /// invitationURL is the page of the application that the link in an invitation opens, in the format of
    /// `confirmURL`. The user sets a first password there. Defaults to `resetURL`.
    #[serde(rename = "invitationURL", skip_serializing_if = "Option::is_none")]
    pub invitation_url: Option<LinkTemplate>,
    /// confirmCodeLifetimeSeconds is the lifetime of a confirmation code in seconds, 300–604800. Defaults to 86400 (one
    /// day).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 604_800))]
    pub confirm_code_lifetime_seconds: Option<i32>,
    /// resetCodeLifetimeSeconds is the lifetime of a reset code in seconds, 300–86400. Defaults to 1800 (30 minutes).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 86_400))]
    pub reset_code_lifetime_seconds: Option<i32>,
    /// invitationCodeLifetimeSeconds is the lifetime of the code in an invitation in seconds, 3600–2592000. Defaults to
    /// 604800 (7 days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 3600, max = 2_592_000))]
    pub invitation_code_lifetime_seconds: Option<i32>,
    /// templatesRef refers to a ConfigMap (at most 256 KiB) with email templates of the App. Its keys are
    /// `<mail>.subject`, `<mail>.txt` and `<mail>.html`, where `<mail>` is confirm, reset, invitation, account-exists,
    /// password-changed, address-changing, address-changed or new-sign-in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub templates_ref: Option<LocalRef>,
    /// smtpSecretRef refers to a Secret with the SMTP relay for emails of the App. Its keys are `host`, `port`, `tls`
    /// (`starttls`, `implicit` or `none`) and, if the relay requires authentication, `username` and `password`.
    /// Defaults to the relay of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smtp_secret_ref: Option<LocalRef>,
}

/// TokensSpec configures tokens and sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = tokens_rules()))]
pub struct TokensSpec {
    /// signingAlgorithm is the algorithm that signs access tokens.
    #[serde(default)]
    pub signing_algorithm: SigningAlgorithm,
    /// accessLifetimeSeconds is the lifetime of an access token in seconds, 60–86400. Defaults to 900.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400))]
    pub access_lifetime_seconds: Option<i32>,
    /// refreshIdleSeconds is the number of seconds without a refresh after which a session ends, 300–31536000. Defaults
    /// to 2592000 (30 days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 31_536_000))]
    pub refresh_idle_seconds: Option<i32>,
    /// sessionLifetimeSeconds is the maximum lifetime of a session in seconds, 300–63072000. Defaults to 7776000 (90
    /// days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 63_072_000))]
    pub session_lifetime_seconds: Option<i32>,
    /// refreshGraceSeconds is the grace period in seconds in which a used refresh token returns the same result again,
    /// 0–300. Defaults to 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 300))]
    pub refresh_grace_seconds: Option<i32>,
    /// audiences are the values of `aud` in access tokens. Defaults to the appID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)), extend("x-kubernetes-list-type" = "set"))]
    pub audiences: Vec<String>,
    /// keyRotationDays is the number of days after which a key is replaced, 7–3650. Defaults to 90.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 7, max = 3650))]
    pub key_rotation_days: Option<i32>,
}

/// LimitsSpec overrides default rate limits by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitsSpec {
    /// loginFailuresPerClient limits failed logins to one account from one client address. Defaults to 10 in 900 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_client: Option<Vec<WindowSpec>>,
    /// loginFailuresPerAccount limits failed logins to one account from all client addresses. Client addresses that the
    /// account recently used are exempt. Defaults to 100 in 900 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_account: Option<Vec<WindowSpec>>,
    /// loginFailuresPerClientOverall limits failed logins to all accounts from one client address. Defaults to 200 in
    /// 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_client_overall: Option<Vec<WindowSpec>>,
    /// loginsPerClient limits requests from one client address that check a password, log in with a provider, or change
    /// the password, name, email address or identities of an account. Defaults to 60 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub logins_per_client: Option<Vec<WindowSpec>>,
    /// registrationsPerClient limits registrations from one client address. Defaults to 100 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub registrations_per_client: Option<Vec<WindowSpec>>,
    /// mailsPerRecipient limits emails of one purpose to one email address. Defaults to 1 in 60 s and 8 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub mails_per_recipient: Option<Vec<WindowSpec>>,
    /// mailsPerClient limits emails that one client address causes. Defaults to 100 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub mails_per_client: Option<Vec<WindowSpec>>,
    /// codesPerClient limits wrong codes and new passwords that are too weak, from one client address. Defaults to 10
    /// in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub codes_per_client: Option<Vec<WindowSpec>>,
    /// refreshesPerSession limits new refresh tokens of one session. Defaults to 30 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub refreshes_per_session: Option<Vec<WindowSpec>>,
    /// authorizationsPerClientAddress limits codes that Clients get for users at one client address. Defaults to 120 in
    /// 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub authorizations_per_client_address: Option<Vec<WindowSpec>>,
    /// tokenRequestsPerClientID limits the token requests and the pushed authorization requests of one Client. The
    /// requests of a public Client are counted per client address. Defaults to 3000 in 60 s.
    #[serde(rename = "tokenRequestsPerClientID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub token_requests_per_client_id: Option<Vec<WindowSpec>>,
    /// clientFailuresPerClientAddress limits failed authentications of one Client from one client address. Defaults to
    /// 30 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub client_failures_per_client_address: Option<Vec<WindowSpec>>,
}

/// WindowSpec allows at most `count` events in any `windowSeconds` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowSpec {
    /// count is the maximum number of events, 1–10000000.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub count: i32,
    /// windowSeconds is the length of the window in seconds, 1–86400.
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: i32,
}

/// AdministratorSpec grants a ServiceAccount access to the administration API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AdministratorSpec {
    /// serviceAccount is the caller.
    pub service_account: ServiceAccountRef,
    /// role is the permission of the caller: `UserAdmin` can do everything; `Reader` can read users, groups, events and
    /// dead letters, and introspect tokens; `Introspector` can only introspect tokens; `Importer` can only import
    /// users.
    pub role: Role,
}

/// Role is what a caller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Role {
    UserAdmin,
    Reader,
    Introspector,
    Importer,
}

/// AppStatus is the observed state of an App.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppStatus {
    /// observedGeneration is the generation of the spec that this status reflects; -1 before the first reconcile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// appID identifies the App in every path.
    #[serde(rename = "appID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub app_id: Option<String>,
    /// issuer is `iss` of the tokens and the base URL of the App's JWKS, discovery and social login endpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub issuer: Option<String>,
    /// revision is the SHA-256 of the published document. After you change a Secret, wait until the revision changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub revision: Option<String>,
    /// providers are the social logins, with the callback URL to register at each provider.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub providers: Vec<AppProviderStatus>,
    /// signingKeys are the keys that sign or verify access tokens and ID tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 192), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub signing_keys: Vec<KeyStatus>,
    /// hmacKeys are the keys for codes, refresh tokens, cookies of hosted pages and flows of social logins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub hmac_keys: Vec<KeyStatus>,
    /// conditions are the conditions Accepted, ResolvedRefs, Programmed and Ready, and Delivering if the App has
    /// webhooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// AppProviderStatus is a social login of an App.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppProviderStatus {
    /// name is the name of the provider in paths.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// callbackURL is the callback URL to register at the provider.
    #[serde(rename = "callbackURL")]
    #[schemars(length(max = 2200))]
    pub callback_url: String,
}

/// KeyStatus is a key, without its secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyStatus {
    /// id is the ID of the key: `s1`, `s2`, … for signing keys, `h1`, `h2`, … for HMAC keys.
    #[schemars(length(min = 1, max = 16))]
    pub id: String,
    /// state is Published, Active or Retired.
    pub state: KeyState,
    /// notAfter is the time at which the key is replaced or dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_after: Option<Time>,
}

// === impl App ===

impl App {
    /// Returns the appID: `spec.appID` if set, otherwise `metadata.name`.
    pub fn app_id(&self) -> Result<AppId, Invalid> {
        match &self.spec.app_id {
            Some(app_id) => Ok(app_id.clone()),
            None => self.metadata.name.as_deref().unwrap_or_default().parse(),
        }
    }
}

// === impl AppSpec ===

impl AppSpec {
    /// Returns the names of the ConfigMaps that the App references. A ConfigMap can occur several times.
    pub fn config_maps(&self) -> impl Iterator<Item = &str> {
        self.mail.templates_ref.iter().map(|reference| reference.name.as_str()).chain(self.pages.config_maps())
    }

    /// Returns the Secrets that the App itself references. Its Providers reference other Secrets.
    pub fn secret_refs(&self) -> impl Iterator<Item = &LocalRef> {
        let webhooks = self.webhooks.iter().filter_map(WebhookSpec::secret_ref);
        self.mail.smtp_secret_ref.iter().chain(&self.password.firebase_scrypt_ref).chain(webhooks)
    }
}

// === impl PasswordSpec, MailSpec, TokensSpec ===

impl PasswordSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl MailSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl TokensSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

// === impl LimitsSpec ===

impl LimitsSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the windows that the App sets for a rate limit, or `None` if the App does not override the limit.
    pub fn get(&self, name: LimitName) -> Option<&[WindowSpec]> {
        let windows = match name {
            LimitName::LoginFailuresPerClient => &self.login_failures_per_client,
            LimitName::LoginFailuresPerAccount => &self.login_failures_per_account,
            LimitName::LoginFailuresPerClientOverall => &self.login_failures_per_client_overall,
            LimitName::LoginsPerClient => &self.logins_per_client,
            LimitName::RegistrationsPerClient => &self.registrations_per_client,
            LimitName::MailsPerRecipient => &self.mails_per_recipient,
            LimitName::MailsPerClient => &self.mails_per_client,
            LimitName::CodesPerClient => &self.codes_per_client,
            LimitName::RefreshesPerSession => &self.refreshes_per_session,
        };
        windows.as_deref()
    }

    /// Returns the windows that the App sets for a rate limit of OpenID Connect clients, or `None` if the App does not
    /// override the limit.
    pub fn get_client_limit(&self, name: ClientLimitName) -> Option<&[WindowSpec]> {
        let windows = match name {
            ClientLimitName::AuthorizationsPerClientAddress => &self.authorizations_per_client_address,
            ClientLimitName::TokenRequestsPerClientId => &self.token_requests_per_client_id,
            ClientLimitName::ClientFailuresPerClientAddress => &self.client_failures_per_client_address,
        };
        windows.as_deref()
    }
}

/// Returns the CustomResourceDefinition as the chart installs it.
pub fn definition() -> CustomResourceDefinition {
    let root = RootSchema {
        description: "App is an application that uses Latchkey as its login service.",
        rules: root_rules(),
        initial_status: initial_status(&ConditionType::APP),
    };
    with_schema::<AppSpec, AppStatus>(App::crd(), root)
}

fn root_rules() -> Vec<Rule> {
    let reserved = RESERVED_APP_IDS.map(|name| format!("'{name}'")).join(", ");
    vec![
        Rule::from_static(
            "has(self.spec.appID) || self.metadata.name.matches('^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$')",
            "metadata.name is not an appID (up to 63 lower-case letters, digits and inner hyphens); set spec.appID",
        )
        .at_field(".spec.appID"),
        Rule::new(
            format!("!((has(self.spec.appID) ? self.spec.appID : self.metadata.name) in [{reserved}])"),
            "this appID is a path reserved for the service; set another spec.appID",
        )
        .at_field(".spec.appID"),
        // The rule is on the root, because a rule on the field could be bypassed by removing the field.
        Rule::from_static(
            "(has(self.spec.appID) ? self.spec.appID : self.metadata.name) == \
             (has(oldSelf.spec.appID) ? oldSelf.spec.appID : oldSelf.metadata.name)",
            "the appID cannot change, because users and tokens belong to it; create a new App instead",
        )
        .at_field(".spec.appID"),
    ]
}

fn provider_refs_rules() -> serde_json::Value {
    json!([{
        "rule": "self.all(a, self.exists_one(b, (has(a.alias) ? a.alias : a.name) == (has(b.alias) ? b.alias : b.name)))",
        "message": "two entries have the same name in paths; give each its own alias",
    }])
}

fn webhooks_rules() -> serde_json::Value {
    json!([{
        "rule": "self.all(a, self.exists_one(b, a.name == b.name))",
        "message": "two webhooks have the same name; give each its own",
    }])
}

fn tokens_rules() -> serde_json::Value {
    json!([{
        "fieldPath": ".refreshIdleSeconds",
        "rule": "!has(self.refreshIdleSeconds) || !has(self.sessionLifetimeSeconds) || \
                 self.refreshIdleSeconds <= self.sessionLifetimeSeconds",
        "message": "refreshIdleSeconds is longer than sessionLifetimeSeconds, after which the session ends anyway; shorten it",
    }])
}
