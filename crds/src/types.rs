//! String types that are validated when they are parsed. One declaration gives each type `FromStr`, serde and a JSON
//! schema.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use url::{Host, Url};

use crate::schema::Rule;

/// Why a string is not a valid value of a type. The message never quotes the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub &'static str);

/// Declares a string type. Every value of the type has passed the function `check`, which is the full validation.
/// `pattern` and `rules` are the part of the validation that the API server can do, so that `kubectl apply` reports
/// most mistakes.
macro_rules! string_type {
    ($(#[$doc:meta])* $name:ident, max: $max:expr, $(pattern: $pattern:expr,)? $(rules: $rules:expr,)? check: $check:path) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            /// The maximum length, in bytes.
            pub const MAX_LENGTH: usize = $max;

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Invalid;

            fn from_str(input: &str) -> Result<Self, Invalid> {
                if input.len() > Self::MAX_LENGTH {
                    return Err(Invalid(concat!("is longer than ", stringify!($max), " bytes")));
                }
                $check(input)?;
                Ok(Self(input.into()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = Invalid;

            fn try_from(input: String) -> Result<Self, Invalid> {
                input.parse()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = Cow::<'de, str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "minLength": 1,
                    "maxLength": $max,
                    $("pattern": $pattern,)?
                    $("x-kubernetes-validations": $rules,)?
                })
            }
        }
    };
}

/// The pattern of an appID and of a provider's name: a DNS label.
pub const LABEL_PATTERN: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";

/// First path segments that are reserved for the service, so no App can have them as its appID
/// (specification: HTTP API, Values).
pub const RESERVED_APP_IDS: [&str; 9] =
    ["v1", "healthz", "livez", "readyz", "metrics", "openapi", "docs", "assets", "well-known"];

/// The characters of a URL: no control characters, no white space, ASCII only (RFC 3986, 2).
const URL_PATTERN: &str = "^[!-~]+$";

/// A part of a regular expression: an `http` URL on a loopback host, up to the end of host and port.
const LOOPBACK_PATTERN: &str = r"http://(localhost|127\\.[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}|\\[::1\\])(:[0-9]{1,5})?";

const NO_FRAGMENT_RULE: Rule = Rule::from_static("!self.contains('#')", "has a fragment (#…); remove it");
const NO_USER_INFO_RULE: Rule = Rule::from_static(
    "!self.matches('^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*@')",
    "has user info before the host; remove it",
);

fn redirect_url_rules() -> [Rule; 3] {
    [
        NO_FRAGMENT_RULE,
        NO_USER_INFO_RULE,
        Rule::new(
            format!(r"self.matches('^(https://[^/?#]|{LOOPBACK_PATTERN}([/?]|$)|[a-z][a-z0-9+-]*\\.[a-z0-9+.-]*:)')"),
            "use https, or http on a loopback host (localhost, 127.0.0.1, [::1]), or a private-use scheme that contains a dot, such as com.example.app:/done",
        ),
    ]
}

fn origin_rules() -> [Rule; 2] {
    [
        Rule::new(
            format!(r"self.matches('^(https://([a-z0-9_.-]+|\\[[0-9a-f:.]+\\])(:[0-9]{{1,5}})?|{LOOPBACK_PATTERN})$')"),
            "write an origin as browsers do: https (http only on loopback), a lower-case host, a port if it is not the default one, nothing after, for example https://shop.example.com",
        ),
        Rule::from_static(
            "!self.matches('^(https:.*:443|http:.*:80)$')",
            "remove the default port: browsers do not send it",
        ),
    ]
}

fn issuer_rules() -> [Rule; 3] {
    [
        HTTPS_RULE,
        NO_USER_INFO_RULE,
        Rule::from_static("!self.contains('?') && !self.contains('#')", "has a query or a fragment; remove it"),
    ]
}

fn endpoint_rules() -> [Rule; 3] {
    [HTTPS_RULE, NO_USER_INFO_RULE, NO_FRAGMENT_RULE]
}

const HTTPS_RULE: Rule = Rule::policy("self.matches('^https://[^/?#]')", "use https");

fn link_template_rules() -> [Rule; 4] {
    [
        Rule::from_static("self.contains('{code}')", "write {code} at the place of the code"),
        Rule::from_static(
            r"self.matches('^([^{}]|\\{code\\}|\\{email\\})*$')",
            "has braces other than {code} and {email}; remove them",
        ),
        Rule::from_static(
            "!self.matches('^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*[{@]')",
            "has a placeholder or user info in its host; put placeholders into the path or the query",
        ),
        Rule::new(
            format!(r"self.matches('^(https://[^/?#]|{LOOPBACK_PATTERN}([/?#]|$)|[a-z][a-z0-9+-]*\\.[a-z0-9+.-]*:)')"),
            "use https, or http on a loopback host, or a private-use scheme that contains a dot, such as com.example.app:/confirm",
        ),
    ]
}

fn mailbox_rules() -> [Rule; 1] {
    [Rule::from_static(
        r"self.matches('^([^<>@]*<[^<>@ ]+@[^<>@ ]+>|[^<>@ ]+@[^<>@ ]+)$')",
        "write an address, or Name <address>",
    )]
}

fn custom_client_id_rules() -> [Rule; 1] {
    [Rule::from_static(
        "!self.matches('^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$')",
        "is a UUID, which could be the ID of a user; choose another clientID",
    )]
}

fn page_url_rules() -> [Rule; 2] {
    [Rule::from_static("self.matches('^https://[^/?#]')", "use https"), NO_USER_INFO_RULE]
}

fn support_url_rules() -> [Rule; 2] {
    [
        Rule::from_static(
            "self.matches('^(https://[^/?#]|mailto:[^@?#/]+@[^@?#/]+([?]|$))')",
            "use https, or mailto: with an email address",
        ),
        NO_USER_INFO_RULE,
    ]
}

string_type! {
    /// The ID of an App: `{APPID}` in paths.
    AppId, max: 63, pattern: LABEL_PATTERN, check: check_app_id
}

string_type! {
    /// The name of a social login in an App: `{PROVIDER}` in paths.
    ProviderName, max: 63, pattern: LABEL_PATTERN, check: check_provider_name
}

string_type! {
    /// A URL to which a browser can be redirected after a social login: `https`, `http` for loopback only, or a
    /// private-use scheme that contains a dot (RFC 8252, 7.1); no user info, no fragment.
    RedirectUrl, max: 2048, pattern: URL_PATTERN, rules: redirect_url_rules(), check: check_redirect_url
}

string_type! {
    /// A web origin (RFC 6454): scheme, host and port as a browser serializes them, without a path.
    Origin, max: 300, rules: origin_rules(), check: check_origin
}

string_type! {
    /// An issuer (RFC 8414, 2): `https` without query or fragment; `http` only in development (`--allow-insecure`).
    IssuerUrl, max: 2048, pattern: URL_PATTERN, rules: issuer_rules(), check: check_issuer
}

string_type! {
    /// An endpoint of a provider or of a webhook's receiver: an `https` URL without user info or fragment; `http` only
    /// in development (`--allow-insecure`).
    EndpointUrl, max: 2048, pattern: URL_PATTERN, rules: endpoint_rules(), check: check_endpoint
}

string_type! {
    /// The name of a webhook in an App.
    WebhookName, max: 63, pattern: LABEL_PATTERN, check: check_webhook_name
}

string_type! {
    /// The URL of a link in an email, with the placeholders `{code}` and `{email}`.
    LinkTemplate, max: 2048, pattern: URL_PATTERN, rules: link_template_rules(), check: check_link_template
}

string_type! {
    /// A host name of two labels or more, in lower case and ASCII (international names as A-labels).
    EmailDomain, max: 253, pattern: "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+$", check: check_email_domain
}

string_type! {
    /// The sender of emails: an email address, or `Name <address>`.
    Mailbox, max: 320, pattern: r"^[^\x00-\x1f\x7f]+$", rules: mailbox_rules(), check: check_mailbox
}

string_type! {
    /// The DNS name of a host: two labels or more, in lower case and ASCII (international names as A-labels). Not an IP
    /// address.
    HostName, max: 253, pattern: r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?$", check: check_host_name
}

string_type! {
    /// A color in CSS: `#` and six hexadecimal digits.
    Color, max: 7, pattern: "^#[0-9a-fA-F]{6}$", check: check_color
}

string_type! {
    /// A link to a web page: `https`, without user info.
    PageUrl, max: 2048, pattern: URL_PATTERN, rules: page_url_rules(), check: check_page_url
}

string_type! {
    /// A link to help: `https` without user info, or `mailto` with one email address.
    SupportUrl, max: 2048, pattern: URL_PATTERN, rules: support_url_rules(), check: check_support_url
}

string_type! {
    /// The ID of a client of an App: `client_id` in OAuth. Either a [`CustomClientId`], or the default: the namespace
    /// and the name of the Client, with a dot between them.
    ClientId, max: 317, pattern: "^[A-Za-z0-9_.-]+$", check: check_client_id
}

string_type! {
    /// A client ID that a Client sets itself. It has no dot, so it is never the default of another Client. It is not a
    /// UUID, because users have UUIDs, and a token's `sub` must never be ambiguous (RFC 9068, 5).
    CustomClientId, max: 64, pattern: "^[A-Za-z0-9_-]+$", rules: custom_client_id_rules(), check: check_custom_client_id
}

string_type! {
    /// The name of a group of users, as in the claim `groups`: 1 to 128 printable ASCII characters.
    GroupName, max: 128, pattern: "^[ -~]+$", check: check_group_name
}

string_type! {
    /// A group name, or a prefix of group names followed by `*`.
    GroupPattern, max: 128, pattern: "^[ -)+-~]*[ -~]$", check: check_group_pattern
}

fn is_label(input: &str) -> bool {
    let bytes = input.as_bytes();
    let is_allowed = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    !bytes.is_empty()
        && bytes.len() <= 63
        && bytes.iter().all(is_allowed)
        && bytes[0] != b'-'
        && bytes[bytes.len() - 1] != b'-'
}

fn check_app_id(input: &str) -> Result<(), Invalid> {
    if !is_label(input) {
        return Err(Invalid("is not an appID: up to 63 lower-case letters, digits and inner hyphens"));
    }
    if RESERVED_APP_IDS.contains(&input) {
        return Err(Invalid("is a name reserved for the service"));
    }
    Ok(())
}

fn check_provider_name(input: &str) -> Result<(), Invalid> {
    if !is_label(input) {
        return Err(Invalid("is not a provider's name: up to 63 lower-case letters, digits and inner hyphens"));
    }
    if input == "email" {
        return Err(Invalid("is a name reserved for the service"));
    }
    Ok(())
}

fn check_custom_client_id(input: &str) -> Result<(), Invalid> {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if input.is_empty() || input.len() > CustomClientId::MAX_LENGTH || !input.bytes().all(is_allowed) {
        return Err(Invalid("is not a client ID: up to 64 letters, digits, hyphens and underscores"));
    }
    if is_uuid(input) {
        return Err(Invalid("is a UUID, which could be the ID of a user"));
    }
    Ok(())
}

fn check_client_id(input: &str) -> Result<(), Invalid> {
    match input.split_once('.') {
        Some((namespace, name)) if is_label(namespace) && is_subdomain(name) => Ok(()),
        Some(_) => Err(Invalid("is not a client ID: a namespace, a dot, and the name of a Client")),
        None => check_custom_client_id(input),
    }
}

/// Whether `input` is a UUID with hyphens (RFC 9562, 4).
fn is_uuid(input: &str) -> bool {
    let is_hex = |part: &str| part.bytes().all(|b| b.is_ascii_hexdigit());
    let lengths = input.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && input.split('-').all(is_hex)
}

/// Whether `input` can be the name of an object: labels of any length with dots between them (RFC 1123, 2.1), at most
/// 253 characters.
pub fn is_subdomain(input: &str) -> bool {
    let is_part = |part: &str| {
        let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(is_allowed) && !part.starts_with('-') && !part.ends_with('-')
    };
    input.len() <= 253 && input.split('.').all(is_part)
}

fn check_group_name(input: &str) -> Result<(), Invalid> {
    if input.is_empty() || !input.bytes().all(|b| matches!(b, b' '..=b'~')) {
        return Err(Invalid("is not a group name: 1 to 128 printable ASCII characters"));
    }
    Ok(())
}

fn check_group_pattern(input: &str) -> Result<(), Invalid> {
    check_group_name(input)?;
    if input.strip_suffix('*').unwrap_or(input).contains('*') {
        return Err(Invalid("has a * that is not at its end"));
    }
    Ok(())
}

fn check_webhook_name(input: &str) -> Result<(), Invalid> {
    if is_label(input) {
        Ok(())
    } else {
        Err(Invalid("is not a webhook's name: up to 63 lower-case letters, digits and inner hyphens"))
    }
}

/// Whether a host is a loopback host: `localhost`, 127.0.0.0/8 or ::1 (RFC 8252, 7.3).
pub fn is_loopback(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => *name == "localhost",
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.is_loopback(),
    }
}

/// Parses a URL, and rejects what the WHATWG parser would correct: missing slashes, backslashes, white space and a
/// scheme in upper case. The types keep the text as it was written, and URLs are later compared byte for byte.
fn strict_url(input: &str) -> Result<Url, Invalid> {
    if !input.bytes().all(|b| b.is_ascii_graphic() && b != b'\\') {
        return Err(Invalid("has a character that a URL cannot have; percent-encode it"));
    }
    let url = Url::parse(input).map_err(|_| Invalid("is not an absolute URL"))?;
    let after_scheme = input.strip_prefix(url.scheme()).and_then(|after| after.strip_prefix(':'));
    let after_scheme = after_scheme.ok_or(Invalid("has a scheme in upper case; write it in lower case"))?;
    if matches!(url.scheme(), "https" | "http") {
        let after_slashes = after_scheme.strip_prefix("//").ok_or(Invalid("has no // after its scheme"))?;
        if after_slashes.starts_with(['/', '?', '#']) || after_slashes.is_empty() {
            return Err(Invalid("has no host"));
        }
    }
    if authority(input).contains('@') {
        return Err(Invalid("has user info before the host; remove it"));
    }
    Ok(url)
}

/// Returns the authority: the text between `//` and the path (RFC 3986, 3.2). It is empty if the URL has none.
fn authority(url: &str) -> &str {
    let after_slashes = url.split_once(':').and_then(|(_, after)| after.strip_prefix("//")).unwrap_or_default();
    after_slashes.split(['/', '?', '#']).next().unwrap_or_default()
}

fn check_redirect_url(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if url.fragment().is_some() {
        return Err(Invalid("has a fragment (#…); remove it"));
    }
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        "http" => Err(Invalid("is http on a host that is not loopback; use https")),
        scheme if scheme.contains('.') => Ok(()),
        _ => Err(Invalid("has a scheme that is neither https nor a private-use one such as com.example.app")),
    }
}

fn check_origin(input: &str) -> Result<(), Invalid> {
    let url = Url::parse(input).map_err(|_| Invalid("is not an origin such as https://shop.example.com"))?;
    if url.origin().ascii_serialization() != input {
        return Err(Invalid(
            "is not an origin as browsers write it: scheme, lower-case host, port if not the default one, no path",
        ));
    }
    // The WHATWG parser accepts `*` as a host, which would look like a wildcard.
    if !input.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._:/[]".contains(&b)) {
        return Err(Invalid("has a host with characters other than letters, digits, hyphens and dots"));
    }
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        _ => Err(Invalid("is neither https nor http on loopback")),
    }
}

fn check_issuer(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if !matches!(url.scheme(), "https" | "http") {
        return Err(Invalid("is not an https URL"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Invalid("has a query or a fragment; remove it"));
    }
    Ok(())
}

fn check_endpoint(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if !matches!(url.scheme(), "https" | "http") {
        return Err(Invalid("is not an https URL"));
    }
    if url.fragment().is_some() {
        return Err(Invalid("has a fragment; remove it"));
    }
    Ok(())
}

fn check_link_template(input: &str) -> Result<(), Invalid> {
    if !input.contains("{code}") {
        return Err(Invalid("does not contain {code}, the placeholder of the code"));
    }
    let filled = input.replace("{code}", "CODE").replace("{email}", "EMAIL");
    if filled.contains(['{', '}']) {
        return Err(Invalid("has braces other than {code} and {email}"));
    }
    if authority(input).contains('{') {
        return Err(Invalid("has a placeholder in its host; put it in the path or the query"));
    }
    let url = strict_url(&filled)?;
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        scheme if scheme.contains('.') => Ok(()),
        _ => Err(Invalid("is neither https, nor http on loopback, nor a private-use scheme such as com.example.app")),
    }
}

fn check_email_domain(input: &str) -> Result<(), Invalid> {
    let labels = input.split('.').count();
    if labels < 2 || !input.split('.').all(is_label) {
        return Err(Invalid("is not a host name of two labels or more in lower case"));
    }
    Ok(())
}

/// Checks a DNS name. Its last label must begin with a letter: in a URL, a name with a number as its last label would
/// be an IP address (WHATWG URL, 3.5).
fn check_host_name(input: &str) -> Result<(), Invalid> {
    let last = input.rsplit('.').next().unwrap_or_default();
    if check_email_domain(input).is_err() || !last.starts_with(|c: char| c.is_ascii_lowercase()) {
        return Err(Invalid("is not a DNS name of two labels or more in lower case"));
    }
    Ok(())
}

fn check_color(input: &str) -> Result<(), Invalid> {
    match input.strip_prefix('#') {
        Some(digits) if digits.len() == 6 && digits.bytes().all(|b| b.is_ascii_hexdigit()) => Ok(()),
        _ => Err(Invalid("is not # and six hexadecimal digits")),
    }
}

fn check_page_url(input: &str) -> Result<(), Invalid> {
    match strict_url(input)?.scheme() {
        "https" => Ok(()),
        _ => Err(Invalid("is not an https URL")),
    }
}

fn check_support_url(input: &str) -> Result<(), Invalid> {
    let Some(mailto) = input.strip_prefix("mailto:") else { return check_page_url(input) };
    strict_url(input)?;
    // Header fields such as `subject` can follow the address (RFC 6068, 2).
    let address = mailto.split('?').next().unwrap_or_default();
    match address.rsplit_once('@') {
        Some((local, domain)) if is_dot_atom(local) && check_email_domain(&domain.to_ascii_lowercase()).is_ok() => {
            Ok(())
        }
        _ => Err(Invalid("is not mailto: with an email address")),
    }
}

fn check_mailbox(input: &str) -> Result<(), Invalid> {
    if input.chars().any(char::is_control) {
        return Err(Invalid("has a control character"));
    }
    let (name, address) = split_mailbox(input);
    match address.rsplit_once('@') {
        Some((local, domain))
            if !name.contains(['<', '>', '@'])
                && is_dot_atom(local)
                && (domain == "localhost" || check_email_domain(&domain.to_ascii_lowercase()).is_ok()) =>
        {
            Ok(())
        }
        _ => Err(Invalid("is neither an address nor of the form Name <address>")),
    }
}

/// Returns the name and the email address of a mailbox. The name can be empty.
fn split_mailbox(mailbox: &str) -> (&str, &str) {
    match mailbox.strip_suffix('>').and_then(|rest| rest.rsplit_once('<')) {
        Some((name, address)) => (name.trim(), address),
        None => ("", mailbox),
    }
}

/// Whether `local` is a valid local part without quotes (RFC 5322, 3.2.3; length: RFC 5321, 4.5.3.1.1).
fn is_dot_atom(local: &str) -> bool {
    let is_atom =
        |atom: &str| !atom.is_empty() && atom.bytes().all(|b| b.is_ascii_graphic() && !b"<>()[]\\,;:\"@.".contains(&b));
    local.len() <= 64 && local.split('.').all(is_atom)
}

// === impl ClientId ===

impl ClientId {
    /// Returns the default client ID of a Client: its namespace, a dot, and its name.
    pub fn of_client(namespace: &str, name: &str) -> Result<Self, Invalid> {
        format!("{namespace}.{name}").parse()
    }
}

impl From<CustomClientId> for ClientId {
    fn from(custom: CustomClientId) -> Self {
        Self(custom.0)
    }
}

// === impl RedirectUrl ===

impl RedirectUrl {
    /// Whether the URL has a private-use scheme (RFC 8252, 7.1), so that a program on the user's device receives it.
    pub fn is_private_use(&self) -> bool {
        !self.0.starts_with("https:") && !self.0.starts_with("http:")
    }
}

// === impl GroupPattern ===

impl GroupPattern {
    /// Whether the pattern matches the name of a group. Names are compared byte for byte.
    pub fn matches(&self, group: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(prefix) => group.starts_with(prefix),
            None => *self.0 == *group,
        }
    }
}

// === impl Mailbox ===

impl Mailbox {
    /// Returns the email address without the name.
    pub fn address(&self) -> &str {
        split_mailbox(&self.0).1
    }

    /// Returns the name without quotes, or `None` if there is none.
    pub fn name(&self) -> Option<&str> {
        let name = split_mailbox(&self.0).0;
        let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name);
        (!name.is_empty()).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_valid<T: FromStr<Err = Invalid> + AsRef<str>>(inputs: &[&str]) {
        for input in inputs {
            match input.parse::<T>() {
                Ok(value) => assert_eq!(value.as_ref(), *input),
                Err(invalid) => panic!("{input:?} {invalid}"),
            }
        }
    }

    #[track_caller]
    fn assert_invalid<T: FromStr<Err = Invalid> + fmt::Debug>(inputs: &[(&str, &str)]) {
        for (input, reason) in inputs {
            let invalid = input.parse::<T>().expect_err(input);
            assert!(invalid.0.contains(reason), "{input:?} {invalid}, which does not contain {reason:?}");
        }
    }

    fn of_length(start: &str, length: usize, end: &str) -> String {
        format!("{start}{}{end}", "a".repeat(length - start.len() - end.len()))
    }

    #[test]
    fn app_ids_are_labels_that_are_not_reserved() {
        assert_valid::<AppId>(&["a", "0", "shop", "a-b", "a--b", "9lives", "v2", "healthz-a", &"a".repeat(63)]);
        for bad_label in ["", "-", "a-", "-a", "Shop", "a.b", "a_b", "a b", "é", "a\n"] {
            assert_invalid::<AppId>(&[(bad_label, "is not an appID")]);
        }
        assert_invalid::<AppId>(&[(&"a".repeat(64), "longer than 63")]);
        for reserved in RESERVED_APP_IDS {
            assert_invalid::<AppId>(&[(reserved, "reserved for the service")]);
        }
    }

    #[test]
    fn provider_names_are_labels_other_than_email() {
        assert_valid::<ProviderName>(&["github", "x", "e-mail", "emails", &"a".repeat(63)]);
        assert_invalid::<ProviderName>(&[
            ("email", "reserved for the service"),
            ("corp.example", "is not a provider's name"),
        ]);
        assert_invalid::<ProviderName>(&[(&"a".repeat(64), "longer than 63"), ("", "is not a provider's name")]);
    }

    #[test]
    fn redirect_urls_are_https_or_loopback_or_private_use() {
        assert_valid::<RedirectUrl>(&[
            "https://shop.example.com",
            "https://shop.example.com/auth/done?a=b&c=%20",
            "https://shop.example.com:8443/a@b",
            "http://127.0.0.1/done",
            "http://127.255.255.254:1/done",
            "http://[::1]/done",
            "http://localhost:3000/done",
            "com.example.shop:/done",
            "com.example.shop://done",
            &of_length("https://a.example/", 2048, ""),
        ]);
        assert_invalid::<RedirectUrl>(&[
            ("", "is not an absolute URL"),
            ("/done", "is not an absolute URL"),
            ("https://a.example/#", "has a fragment"),
            ("com.example.shop:/done#x", "has a fragment"),
            ("https://user@a.example/", "has user info"),
            ("https://@a.example/", "has user info"),
            ("https://a.example:443@b.example/", "has user info"),
            ("com.example.shop://user@done", "has user info"),
            ("http://a.example/", "use https"),
            ("http://126.255.255.255/", "use https"),
            ("http://128.0.0.1/", "use https"),
            ("http://[::2]/", "use https"),
            ("http://localhost.a.example/", "use https"),
            ("javascript:alert(1)", "neither https nor"),
            ("shop:/done", "neither https nor"),
            ("https:a.example", "has no //"),
            ("https:/a.example", "has no //"),
            ("https:///a.example", "has no host"),
            ("HTTPS://a.example/", "upper case"),
            ("https://a.example\\@b.example/", "percent-encode"),
            ("https://a.example/a b", "percent-encode"),
            (" https://a.example/", "percent-encode"),
            ("https://a.example/\n", "percent-encode"),
            ("https://é.example/", "percent-encode"),
            (&of_length("https://a.example/", 2049, ""), "longer than 2048"),
        ]);
    }

    #[test]
    fn origins_are_written_as_browsers_write_them() {
        assert_valid::<Origin>(&[
            "https://shop.example.com",
            "https://shop.example.com:8443",
            "https://xn--d-ega.example",
            "http://localhost:3000",
            "http://127.0.0.1",
            "http://[::1]:3000",
            &of_length("https://", 300, ".example"),
        ]);
        assert_invalid::<Origin>(&[
            ("https://shop.example.com/", "as browsers write it"),
            ("https://shop.example.com:443", "as browsers write it"),
            ("https://Shop.example.com", "as browsers write it"),
            ("https://user@shop.example.com", "as browsers write it"),
            ("https://*", "characters other than"),
            ("https://*.example.com", "characters other than"),
            ("com.example.shop:", "as browsers write it"),
            ("*", "is not an origin"),
            ("null", "is not an origin"),
            ("", "is not an origin"),
            ("http://shop.example.com", "neither https nor http on loopback"),
            ("ftp://shop.example.com", "neither https nor http on loopback"),
            (&of_length("https://", 301, ".example"), "longer than 300"),
        ]);
    }

    #[test]
    fn issuers_have_no_query_or_fragment() {
        assert_valid::<IssuerUrl>(&[
            "https://auth.example.com",
            "https://auth.example.com/shop",
            "http://127.0.0.1:8080",
            &of_length("https://a.example/", 2048, ""),
        ]);
        assert_invalid::<IssuerUrl>(&[
            ("auth.example.com", "is not an absolute URL"),
            ("ftp://auth.example.com", "is not an https URL"),
            ("com.example:/x", "is not an https URL"),
            ("https://auth.example.com?", "has a query"),
            ("https://auth.example.com#", "has a query or a fragment"),
            ("https://user@auth.example.com", "has user info"),
            ("https://auth.example.com/\n", "percent-encode"),
            ("https:///shop", "has no host"),
            (&of_length("https://a.example/", 2049, ""), "longer than 2048"),
        ]);
    }

    #[test]
    fn endpoints_have_no_fragment() {
        assert_valid::<EndpointUrl>(&["https://id.example.com/token?tenant=a", "http://127.0.0.1:5556/token"]);
        assert_valid::<EndpointUrl>(&[&of_length("https://a.example/", 2048, "")]);
        assert_invalid::<EndpointUrl>(&[
            ("https://id.example.com/token#a", "has a fragment"),
            ("https://user:pass@id.example.com/token", "has user info"),
            ("id.example.com", "is not an absolute URL"),
            ("com.example:/token", "is not an https URL"),
            (&of_length("https://a.example/", 2049, ""), "longer than 2048"),
        ]);
    }

    #[test]
    fn link_templates_have_the_code_outside_of_the_host() {
        assert_valid::<LinkTemplate>(&[
            "https://shop.example.com/confirm?code={code}",
            "https://shop.example.com/#/confirm/{code}/{email}",
            "http://localhost:3000/confirm?code={code}",
            "com.example.shop:/confirm?code={code}&from=https://{email}",
            &of_length("https://a.example/", 2048, "{code}"),
        ]);
        assert_invalid::<LinkTemplate>(&[
            ("https://shop.example.com/confirm", "does not contain {code}"),
            ("https://shop.example.com/{email}", "does not contain {code}"),
            ("https://shop.example.com/{{code}}", "has braces other"),
            ("https://shop.example.com/{code}?{name}", "has braces other"),
            ("https://{code}.example.com/", "in its host"),
            ("https://{email}@shop.example.com/{code}", "in its host"),
            ("https://user@shop.example.com/{code}", "has user info"),
            ("http://shop.example.com/{code}", "neither https"),
            ("javascript:{code}", "neither https"),
            ("/confirm?code={code}", "is not an absolute URL"),
            ("https://shop.example.com/ {code}", "percent-encode"),
            (&of_length("https://a.example/", 2049, "{code}"), "longer than 2048"),
        ]);
    }

    #[test]
    fn email_domains_have_two_labels_or_more() {
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        assert_valid::<EmailDomain>(&["example.com", "a.b", "xn--d-ega.example", &longest]);
        for input in ["", "example", "example.", ".example", "a..b", "Example.com", "a_b.example", "é.example"] {
            assert_invalid::<EmailDomain>(&[(input, "is not a host name")]);
        }
        assert_invalid::<EmailDomain>(&[(&format!("{}.example", "a".repeat(64)), "is not a host name")]);
        assert_invalid::<EmailDomain>(&[(&format!("{longest}a"), "longer than 253")]);
    }

    #[test]
    fn host_names_are_dns_names_of_two_labels_or_more() {
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        assert_valid::<HostName>(&["login.example.com", "a.b", "1.example", "xn--d-ega.xn--p1ai", &longest]);
        for input in [
            "",
            "localhost",
            "example.",
            ".example",
            "a..b",
            "Login.example.com",
            "a_b.example",
            "é.example",
            "login.example.com:8443",
            "https://login.example.com",
            "*.example.com",
            "192.0.2.1",
            "a.1",
            "0x7f.0x1",
            "[::1]",
        ] {
            assert_invalid::<HostName>(&[(input, "is not a DNS name")]);
        }
        assert_invalid::<HostName>(&[(&format!("{longest}a"), "longer than 253")]);
    }

    #[test]
    fn colors_have_six_digits() {
        assert_valid::<Color>(&["#1a56db", "#FFFFFF", "#000000"]);
        for input in ["", "#fff", "1a56db", "#1a56dg", "#12é45", "red"] {
            assert_invalid::<Color>(&[(input, "is not # and six")]);
        }
        assert_invalid::<Color>(&[("#1a56db0", "longer than 7")]);
    }

    #[test]
    fn links_are_https_and_the_link_to_help_can_be_mailto() {
        assert_valid::<PageUrl>(&["https://shop.example.com", "https://shop.example.com/terms?a=b#c"]);
        assert_valid::<SupportUrl>(&[
            "https://shop.example.com/help",
            "mailto:help@shop.example.com",
            "mailto:help@shop.example.com?subject=Help",
        ]);
        for (input, reason) in [
            ("http://shop.example.com", "is not an https URL"),
            ("javascript:alert(1)", "is not an https URL"),
            ("data:text/html,x", "is not an https URL"),
            ("/terms", "is not an absolute URL"),
            ("https://user@shop.example.com", "has user info"),
            ("https:///terms", "has no host"),
            ("https://a.example/\" onclick", "percent-encode"),
        ] {
            assert_invalid::<PageUrl>(&[(input, reason)]);
            assert_invalid::<SupportUrl>(&[(input, reason)]);
        }
        assert_invalid::<PageUrl>(&[("mailto:help@shop.example.com", "is not an https URL")]);
        for input in ["mailto:", "mailto:help", "mailto:a@b@shop.example.com", "mailto:?to=help@shop.example.com"] {
            assert_invalid::<SupportUrl>(&[(input, "is not mailto:")]);
        }
    }

    #[test]
    fn custom_client_ids_have_no_dot_and_are_not_uuids() {
        let custom = ["a", "Grafana_2", "-", "grafana-", &"a".repeat(64), "12345678-1234-1234-1234-1234567890a"];
        assert_valid::<CustomClientId>(&custom);
        assert_valid::<ClientId>(&custom);
        for input in ["", "a.b", "a b", "a:b", "é", "a\n"] {
            assert_invalid::<CustomClientId>(&[(input, "is not a client ID")]);
        }
        assert_invalid::<CustomClientId>(&[(&"a".repeat(65), "longer than 64")]);
        for uuid in ["01890a5d-ac96-774b-bcce-b302099a8057", "01890A5D-AC96-774B-BCCE-B302099A8057"] {
            assert_invalid::<CustomClientId>(&[(uuid, "is a UUID")]);
            assert_invalid::<ClientId>(&[(uuid, "is a UUID")]);
        }
    }

    #[test]
    fn the_default_client_id_is_namespace_and_name() {
        assert_eq!(ClientId::of_client("monitoring", "grafana").unwrap().as_str(), "monitoring.grafana");
        let (namespace, name) = ("n".repeat(63), format!("{}.{}", "a".repeat(200), "b".repeat(52)));
        assert_eq!(ClientId::of_client(&namespace, &name).unwrap().as_str().len(), ClientId::MAX_LENGTH);
        assert_valid::<ClientId>(&["a.b", "monitoring.grafana.example", "0.1-a"]);
        for input in [".", "a.", ".a", "a..b", "A.b", "a.B", "a.-b", "a_.b", "a.b_c", "a. b"] {
            assert_invalid::<ClientId>(&[(input, "is not a client ID")]);
        }
        assert_invalid::<ClientId>(&[(&format!("a.{}", "b".repeat(254)), "is not a client ID")]);
        let custom: CustomClientId = "grafana".parse().unwrap();
        assert_eq!(ClientId::from(custom).as_str(), "grafana");
    }

    #[test]
    fn group_names_are_printable_ascii() {
        assert_valid::<GroupName>(&["admins", "corp:Platform Team", "a*b", "~", &"a".repeat(128)]);
        for input in ["", "é", "a\tb", "a\n", "\x7f"] {
            assert_invalid::<GroupName>(&[(input, "is not a group name")]);
        }
        assert_invalid::<GroupName>(&[(&"a".repeat(129), "longer than 128")]);
    }

    #[test]
    fn a_group_pattern_is_a_name_or_a_prefix() {
        assert_valid::<GroupPattern>(&["admins", "argo:*", "*", &of_length("", 128, "*")]);
        assert_invalid::<GroupPattern>(&[
            ("a*b", "not at its end"),
            ("**", "not at its end"),
            ("*a", "not at its end"),
            ("", "is not a group name"),
            ("é*", "is not a group name"),
            (&of_length("", 129, "*"), "longer than 128"),
        ]);
        let matches = |pattern: &str, group: &str| pattern.parse::<GroupPattern>().unwrap().matches(group);
        assert!(matches("argo:*", "argo:admins") && matches("argo:*", "argo:") && matches("*", "any"));
        assert!(matches("admins", "admins"));
        assert!(!matches("argo:*", "argo") && !matches("argo:*", "Argo:admins"));
        assert!(!matches("admins", "admins2") && !matches("admins", "Admins"));
    }

    #[test]
    fn a_redirect_url_is_private_use_unless_its_scheme_is_http_or_https() {
        let is_private_use = |url: &str| url.parse::<RedirectUrl>().unwrap().is_private_use();
        assert!(is_private_use("com.example.shop:/done"));
        assert!(is_private_use("https.example:/done"));
        assert!(!is_private_use("https://shop.example.com/done"));
        assert!(!is_private_use("http://localhost:3000/done"));
    }

    #[test]
    fn mailboxes_have_one_email_address() {
        assert_valid::<Mailbox>(&[
            "hello@shop.example.com",
            "The Shop <hello@shop.example.com>",
            "Łódź <first.last+tag@shop.example.com>",
            "\"Shop, Inc.\" <hello@shop.example.com>",
            "<hello@shop.example.com>",
            "root@localhost",
            &of_length("", 78, "@shop.example.com")[1..],
            &of_length("", 320, " <hello@shop.example.com>"),
        ]);
        for input in [
            "",
            "hello",
            "hello@",
            "@shop.example.com",
            "hello@shop",
            "a@b@shop.example.com",
            ".hello@shop.example.com",
            "hello.@shop.example.com",
            "a..b@shop.example.com",
            "a b@shop.example.com",
            "hello@shop.example.com>",
            "a <b <hello@shop.example.com>",
            "a@b <hello@shop.example.com>",
            "The Shop <hello@shop.example.com> ",
            "The Shop <hello>",
        ] {
            assert_invalid::<Mailbox>(&[(input, "neither an address nor")]);
        }
        assert_invalid::<Mailbox>(&[("a@b.example\r\nBcc: c@d.example", "control character")]);
        assert_invalid::<Mailbox>(&[(&of_length("", 82, "@shop.example.com"), "neither an address nor")]);
        assert_invalid::<Mailbox>(&[(&of_length("", 321, " <hello@shop.example.com>"), "longer than 320")]);
    }

    #[test]
    fn a_mailbox_is_split_into_name_and_email_address() {
        let parts = |input: &str| {
            let mailbox: Mailbox = input.parse().unwrap();
            (mailbox.name().map(str::to_owned), mailbox.address().to_owned())
        };
        let address = "hello@shop.example.com".to_owned();
        assert_eq!(parts("hello@shop.example.com"), (None, address.clone()));
        assert_eq!(parts("<hello@shop.example.com>"), (None, address.clone()));
        assert_eq!(parts("The Shop <hello@shop.example.com>"), (Some("The Shop".into()), address.clone()));
        assert_eq!(parts("\"Shop, Inc.\" <hello@shop.example.com>"), (Some("Shop, Inc.".into()), address));
    }

    #[test]
    fn loopback_hosts_are_localhost_and_loopback_ip_addresses() {
        let has_loopback_host = |url: &str| is_loopback(&Url::parse(url).unwrap().host().unwrap());
        assert!(
            ["http://localhost", "http://127.0.0.1", "http://127.9.9.9", "http://[::1]"]
                .into_iter()
                .all(has_loopback_host)
        );
        assert!(
            !["http://a.example", "http://10.0.0.1", "http://[::2]", "http://0.0.0.0"]
                .into_iter()
                .any(has_loopback_host)
        );
    }

    #[test]
    fn deserialization_validates_and_errors_do_not_quote_the_value() {
        assert_eq!(serde_json::from_str::<AppId>("\"shop\"").unwrap().as_str(), "shop");
        assert_eq!(serde_json::to_string(&"shop".parse::<AppId>().unwrap()).unwrap(), "\"shop\"");
        let error = serde_json::from_str::<AppId>("\"SECRET\"").unwrap_err().to_string();
        assert!(error.contains("is not an appID") && !error.contains("SECRET"), "{error}");
    }
}
