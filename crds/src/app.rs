//! The App: an application whose users log in here; spec, status and rules.

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    conditions::{Condition, ConditionType, first_status},
    refs::{LocalRef, ProviderRef},
    rendered::{
        AdministratorRole, BrowserBinding, CallbackMode, EnumerationProtection, KeyState, LimitName, SignUp,
        SigningAlgorithm,
    },
    schema::{Root, Rule, complete},
    types::{AppId, EmailDomain, Invalid, LinkTemplate, Mailbox, Origin, RESERVED_APP_IDS, RedirectUrl},
};

/// What an application wants of its login service. Everything has a default but what only its owner can know.
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
    doc = "An application whose users log in here.",
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
    /// The App in every path: `/v1/{appID}/…`. Default: `metadata.name`. It cannot change, and is unique in the cluster.
    #[serde(rename = "appID", skip_serializing_if = "Option::is_none")]
    pub app_id: Option<AppId>,
    /// The name that mails show. Default: the appID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 100), regex(pattern = r"^[^\x00-\x1f\x7f]*$"))]
    pub display_name: Option<String>,
    /// Where a browser may be sent after social login. Compared byte for byte; only the port of an `http` loopback
    /// address is free. The first one is used where a call names none.
    #[serde(rename = "redirectURLs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub redirect_urls: Vec<RedirectUrl>,
    /// The web origins whose pages may call the API (CORS), for example `https://shop.example.com`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_origins: Vec<Origin>,
    /// The social logins of this App: Providers in its namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "atomic", "x-kubernetes-validations" = provider_refs_rules())
    )]
    pub provider_refs: Vec<ProviderRef>,
    /// Whether new users may register: `Open`, or `Closed` (only callers in the cluster make users).
    #[serde(default)]
    pub sign_up: SignUp,
    /// The domains that users' addresses may have; empty: every domain. Naming one implies `requireVerifiedEmail`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_email_domains: Vec<EmailDomain>,
    /// Whether a session is given only to users with a verified address. Default: no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_verified_email: bool,
    /// `Strict`: no answer tells whether an address has an account. `Disabled`: registering a known address answers 409.
    /// `"Off"`, only in quotes, is the former name of `Disabled`.
    #[serde(default)]
    pub enumeration_protection: EnumerationProtection,
    /// Whether a social login without any address makes an account. Default: no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_users_without_email: bool,
    /// `Required`: a social login that is not bound to the browser which began it is refused. `Auto`: it is allowed
    /// where the browser cannot be bound (`format=json` from elsewhere).
    #[serde(default)]
    pub browser_binding: BrowserBinding,
    /// How the result of a social login reaches the redirect address: in the query, in the fragment, or as a one-time
    /// code.
    #[serde(default)]
    pub callback_mode: CallbackMode,
    /// What a password must be.
    #[serde(default, skip_serializing_if = "PasswordSpec::is_default")]
    pub password: PasswordSpec,
    /// Mails to users.
    #[serde(default, skip_serializing_if = "MailSpec::is_default")]
    pub mail: MailSpec,
    /// Tokens and sessions.
    #[serde(default, skip_serializing_if = "TokensSpec::is_default")]
    pub tokens: TokensSpec,
    /// Limits that differ from the defaults; each has one to three windows, and all of them must hold.
    #[serde(default, skip_serializing_if = "LimitsSpec::is_default")]
    pub limits: LimitsSpec,
    /// The ServiceAccounts that may call the administration API for this App.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "atomic"))]
    pub administrators: Vec<AdministratorSpec>,
    /// After how many days an account whose address was never verified is deleted, 1–3650. Default: 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub unverified_retention_days: Option<i32>,
    /// For how many days audit events are kept, 1–3650. Default: 365.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub audit_retention_days: Option<i32>,
    /// What becomes of the users when the App is deleted: `Retain` keeps them, `Delete` deletes them.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    Delete,
}

/// What a password must be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PasswordSpec {
    /// The fewest characters, 8–128. Default: 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 8, max = 128))]
    pub minimum_length: Option<i32>,
    /// The least strength as zxcvbn scores it, 0 (anything) to 4 (very hard to guess). Default: 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4))]
    pub minimum_strength: Option<i32>,
}

/// Mails to users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MailSpec {
    /// The sender: an address, or `Name <address>`. Default: the install's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Mailbox>,
    /// The page of the application to which the link in a confirmation mail leads; `{code}` is filled in, and
    /// `{email}` where it is named. Without it the mail shows only the code.
    #[serde(rename = "confirmURL", skip_serializing_if = "Option::is_none")]
    pub confirm_url: Option<LinkTemplate>,
    /// The page of the application to which the link in a reset mail leads, as `confirmURL`.
    #[serde(rename = "resetURL", skip_serializing_if = "Option::is_none")]
    pub reset_url: Option<LinkTemplate>,
    /// For how many seconds a confirmation code is good, 300–604800. Default: 86400 (a day).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 604_800))]
    pub confirm_code_lifetime_seconds: Option<i32>,
    /// For how many seconds a reset code is good, 300–86400. Default: 1800 (half an hour).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 86_400))]
    pub reset_code_lifetime_seconds: Option<i32>,
    /// A ConfigMap (256 KiB or less) with templates of the App's own: keys `<mail>.subject`, `<mail>.txt` and
    /// `<mail>.html` for the mails confirm, reset, account-exists, password-changed, address-changing, address-changed
    /// and new-sign-in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub templates_ref: Option<LocalRef>,
    /// A Secret with the relay through which this App's mails leave: keys `host`, `port`, `tls` (`starttls`,
    /// `implicit` or `none`) and, where it wants a login, `username` and `password`. Default: the install's relay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smtp_secret_ref: Option<LocalRef>,
}

/// Tokens and sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = tokens_rules()))]
pub struct TokensSpec {
    /// With what access tokens are signed.
    #[serde(default)]
    pub signing_algorithm: SigningAlgorithm,
    /// For how many seconds an access token is good, 60–86400. Default: 900.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400))]
    pub access_lifetime_seconds: Option<i32>,
    /// After how many seconds without a refresh a session ends, 300–31536000. Default: 2592000 (30 days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 31_536_000))]
    pub refresh_idle_seconds: Option<i32>,
    /// After how many seconds a session ends in any case, 300–63072000. Default: 7776000 (90 days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 63_072_000))]
    pub session_lifetime_seconds: Option<i32>,
    /// For how many seconds a refresh token that was just used gives the same answer again, 0–300. Default: 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 300))]
    pub refresh_grace_seconds: Option<i32>,
    /// `aud` of access tokens. Default: the appID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)), extend("x-kubernetes-list-type" = "set"))]
    pub audiences: Vec<String>,
    /// After how many days a key is replaced, 7–3650. Default: 90.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 7, max = 3650))]
    pub key_rotation_days: Option<i32>,
}

/// Limits by name; what is not here has its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitsSpec {
    /// Failed logins for one account from one client address. Default: 10 in 900 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_client: Option<Vec<WindowSpec>>,
    /// Failed logins for one account from everywhere; a client address that the account knows is exempt. Default: 100
    /// in 900 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_account: Option<Vec<WindowSpec>>,
    /// Failed logins from one client address over all accounts. Default: 200 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub login_failures_per_client_overall: Option<Vec<WindowSpec>>,
    /// Calls that check or change a password, or sign in or link through a provider, from one client address. Default: 60 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub logins_per_client: Option<Vec<WindowSpec>>,
    /// Registrations from one client address. Default: 100 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub registrations_per_client: Option<Vec<WindowSpec>>,
    /// Mails of one purpose to one address. Default: 1 in 60 s and 8 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub mails_per_recipient: Option<Vec<WindowSpec>>,
    /// Mails that one client address asks for. Default: 100 in 3600 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub mails_per_client: Option<Vec<WindowSpec>>,
    /// Wrong codes, and new passwords that are too weak, from one client address. Default: 10 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub codes_per_client: Option<Vec<WindowSpec>>,
    /// New refresh tokens of one session. Default: 30 in 60 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 3), extend("x-kubernetes-list-type" = "atomic"))]
    pub refreshes_per_session: Option<Vec<WindowSpec>>,
}

/// At most `count` in any `windowSeconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowSpec {
    /// How many, 1–10000000.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub count: i32,
    /// In how many seconds, 1–86400.
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: i32,
}

/// A caller of the administration API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AdministratorSpec {
    /// Who it is.
    pub service_account: ServiceAccountRef,
    /// What it may do: `UserAdmin` everything, `Reader` look, `Introspector` introspect tokens.
    pub role: AdministratorRole,
}

/// A ServiceAccount of any namespace: it is a name to compare with, nothing is read from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceAccountRef {
    /// Its namespace.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))]
    pub namespace: String,
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// What became of an App.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppStatus {
    /// The generation that this status is of; -1 before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The App in every path.
    #[serde(rename = "appID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub app_id: Option<String>,
    /// `iss` of its tokens; what it serves is under this address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub issuer: Option<String>,
    /// The document that is published, by its SHA-256. After the change of a Secret, wait for this to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub revision: Option<String>,
    /// The social logins, and what to register at each provider.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub providers: Vec<AppProviderStatus>,
    /// The keys that sign tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub signing_keys: Vec<KeyStatus>,
    /// The keys of codes and refresh tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub hmac_keys: Vec<KeyStatus>,
    /// Accepted, ResolvedRefs, Programmed, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A social login of the App.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppProviderStatus {
    /// Its name in paths.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The callback address to register at the provider.
    #[serde(rename = "callbackURL")]
    #[schemars(length(max = 2200))]
    pub callback_url: String,
}

/// A key, without what it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyStatus {
    /// `s1`, `s2`, …, `h1`, …
    #[schemars(length(min = 1, max = 16))]
    pub id: String,
    /// Published, Active or Retired.
    pub state: KeyState,
    /// When it is replaced or dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_after: Option<Time>,
}

// === impl App ===

impl App {
    /// The appID: the field, else the name.
    pub fn app_id(&self) -> Result<AppId, Invalid> {
        match &self.spec.app_id {
            Some(app_id) => Ok(app_id.clone()),
            None => self.metadata.name.as_deref().unwrap_or_default().parse(),
        }
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

    /// The App's own windows of a limit.
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
}

/// The definition of the resource, as it is installed.
pub fn definition() -> CustomResourceDefinition {
    let root = Root {
        description: "An application whose users log in here.",
        rules: root_rules(),
        first_status: first_status(&ConditionType::APP),
    };
    complete::<AppSpec, AppStatus>(App::crd(), root)
}

fn root_rules() -> Vec<Rule> {
    let reserved = RESERVED_APP_IDS.map(|name| format!("'{name}'")).join(", ");
    vec![
        Rule::fixed(
            "has(self.spec.appID) || self.metadata.name.matches('^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$')",
            "metadata.name is not an appID (up to 63 lower-case letters, digits and inner hyphens); set spec.appID",
        )
        .on(".spec.appID"),
        Rule::new(
            format!("!((has(self.spec.appID) ? self.spec.appID : self.metadata.name) in [{reserved}])"),
            "this appID is a path that the service keeps for itself; set another spec.appID",
        )
        .on(".spec.appID"),
        // On the root, since a rule on the field could be got round by unsetting it.
        Rule::fixed(
            "(has(self.spec.appID) ? self.spec.appID : self.metadata.name) == \
             (has(oldSelf.spec.appID) ? oldSelf.spec.appID : oldSelf.metadata.name)",
            "the appID cannot change, since users and tokens belong to it; make a new App instead",
        )
        .on(".spec.appID"),
    ]
}

fn provider_refs_rules() -> serde_json::Value {
    json!([{
        "rule": "self.all(a, self.exists_one(b, (has(a.alias) ? a.alias : a.name) == (has(b.alias) ? b.alias : b.name)))",
        "message": "two entries have the same name in paths; give each its own alias",
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
