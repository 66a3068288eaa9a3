//! Values that are parsed once, at the edge, into types that cannot be wrong: each has `FromStr`, serde and a JSON
//! schema from one declaration.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use url::{Host, Url};

use crate::schema::Rule;

/// Why a string is not a value of the type it should be. The text says what the type wants and never quotes the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub &'static str);

/// Declares a string type with `parse` as its only way in. `pattern` and `rules` tell the API server as much of it as it
/// can check, so that most mistakes are refused at `kubectl apply`; `parse` is the whole of it.
macro_rules! string_type {
    ($(#[$doc:meta])* $name:ident, max: $max:expr, $(pattern: $pattern:expr,)? $(rules: $rules:expr,)? parse: $parse:path) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            /// The longest value, in octets.
            pub const MAX_LENGTH: usize = $max;

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Invalid;

            fn from_str(input: &str) -> Result<Self, Invalid> {
                if input.len() > Self::MAX_LENGTH {
                    return Err(Invalid(concat!("is longer than ", stringify!($max), " octets")));
                }
                $parse(input)?;
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

/// The shape of an appID and of a provider's name: a DNS label.
pub const LABEL_PATTERN: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";

/// First path segments that belong to the service itself, so no App can have them (contract, 2).
pub const RESERVED_APP_IDS: [&str; 9] =
    ["v1", "healthz", "livez", "readyz", "metrics", "openapi", "docs", "assets", "well-known"];

/// No control character, no white space, nothing outside ASCII: what a URL is made of (RFC 3986, 2).
const URL_PATTERN: &str = "^[!-~]+$";

/// `http` on this machine, up to where the host ends, as a part of a regular expression.
const LOOPBACK: &str = r"http://(localhost|127\\.[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]{1,3}|\\[::1\\])(:[0-9]{1,5})?";

const NO_FRAGMENT: Rule = Rule::fixed("!self.contains('#')", "has a fragment (#…); take it away");
const NO_USER_INFO: Rule =
    Rule::fixed("!self.matches('^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*@')", "has user info before the host; take it away");

fn redirect_url_rules() -> [Rule; 3] {
    [
        NO_FRAGMENT,
        NO_USER_INFO,
        Rule::new(
            format!(r"self.matches('^(https://[^/?#]|{LOOPBACK}([/?]|$)|[a-z][a-z0-9+-]*\\.[a-z0-9+.-]*:)')"),
            "use https, or http on a loopback host (localhost, 127.0.0.1, [::1]), or a private-use scheme with a dot in it such as com.example.app:/done",
        ),
    ]
}

fn origin_rules() -> [Rule; 2] {
    [
        Rule::new(
            format!(r"self.matches('^(https://([a-z0-9_.-]+|\\[[0-9a-f:.]+\\])(:[0-9]{{1,5}})?|{LOOPBACK})$')"),
            "write an origin as browsers do: https (http only on loopback), a lower-case host, a port where it is not the usual one, nothing after, for example https://shop.example.com",
        ),
        Rule::fixed(
            "!self.matches('^(https:.*:443|http:.*:80)$')",
            "leave the usual port away: browsers do not send it",
        ),
    ]
}

fn issuer_rules() -> [Rule; 3] {
    [
        HTTPS,
        NO_USER_INFO,
        Rule::fixed("!self.contains('?') && !self.contains('#')", "has a query or a fragment; take it away"),
    ]
}

fn endpoint_rules() -> [Rule; 3] {
    [HTTPS, NO_USER_INFO, NO_FRAGMENT]
}

const HTTPS: Rule = Rule::policy("self.matches('^https://[^/?#]')", "use https");

fn link_template_rules() -> [Rule; 4] {
    [
        Rule::fixed("self.contains('{code}')", "write {code} where the code is to be filled in"),
        Rule::fixed(
            r"self.matches('^([^{}]|\\{code\\}|\\{email\\})*$')",
            "has braces other than {code} and {email}; take them away",
        ),
        Rule::fixed(
            "!self.matches('^[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*[{@]')",
            "has a placeholder or user info in its host; put placeholders into the path or the query",
        ),
        Rule::new(
            format!(r"self.matches('^(https://[^/?#]|{LOOPBACK}([/?#]|$)|[a-z][a-z0-9+-]*\\.[a-z0-9+.-]*:)')"),
            "use https, or http on a loopback host, or a private-use scheme with a dot in it such as com.example.app:/confirm",
        ),
    ]
}

fn mailbox_rules() -> [Rule; 1] {
    [Rule::fixed(
        r"self.matches('^([^<>@]*<[^<>@ ]+@[^<>@ ]+>|[^<>@ ]+@[^<>@ ]+)$')",
        "write an address, or Name <address>",
    )]
}

string_type! {
    /// The tenant in every path: `{APPID}` of the interface.
    AppId, max: 63, pattern: LABEL_PATTERN, parse: app_id
}

string_type! {
    /// A social login in an App: `{PROVIDER}` of the interface.
    ProviderName, max: 63, pattern: LABEL_PATTERN, parse: provider_name
}

string_type! {
    /// An address that a browser may be sent to after social login: `https`, `http` for loopback only, or a
    /// private-use scheme with a dot in it (RFC 8252, 7.1); no user info, no fragment.
    RedirectUrl, max: 2048, pattern: URL_PATTERN, rules: redirect_url_rules(), parse: redirect_url
}

string_type! {
    /// A web origin (RFC 6454): scheme, host and port as a browser serializes them, nothing after.
    Origin, max: 300, rules: origin_rules(), parse: origin
}

string_type! {
    /// An issuer (RFC 8414, 2): `https` without query or fragment; `http` only where an install says so (development).
    IssuerUrl, max: 2048, pattern: URL_PATTERN, rules: issuer_rules(), parse: issuer
}

string_type! {
    /// An endpoint of a provider: an `https` URL without user info or fragment; `http` only where an install says so
    /// (development).
    EndpointUrl, max: 2048, pattern: URL_PATTERN, rules: endpoint_rules(), parse: endpoint
}

string_type! {
    /// Where a mail's link leads: a URL in which `{code}` stands for the code and `{email}` for the address.
    LinkTemplate, max: 2048, pattern: URL_PATTERN, rules: link_template_rules(), parse: link_template
}

string_type! {
    /// A host name of two labels or more, lower case, ASCII (international names as A-labels).
    EmailDomain, max: 253, pattern: "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+$", parse: email_domain
}

string_type! {
    /// The sender of mails: an address, or `Name <address>`.
    Mailbox, max: 320, pattern: r"^[^\x00-\x1f\x7f]+$", rules: mailbox_rules(), parse: mailbox
}

fn label(input: &str) -> bool {
    let bytes = input.as_bytes();
    let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    !bytes.is_empty()
        && bytes.len() <= 63
        && bytes.iter().all(inner)
        && bytes[0] != b'-'
        && bytes[bytes.len() - 1] != b'-'
}

fn app_id(input: &str) -> Result<(), Invalid> {
    if !label(input) {
        return Err(Invalid("is not an appID: up to 63 lower-case letters, digits and inner hyphens"));
    }
    if RESERVED_APP_IDS.contains(&input) {
        return Err(Invalid("is a name that the service keeps for itself"));
    }
    Ok(())
}

fn provider_name(input: &str) -> Result<(), Invalid> {
    if !label(input) {
        return Err(Invalid("is not a provider's name: up to 63 lower-case letters, digits and inner hyphens"));
    }
    if input == "email" {
        return Err(Invalid("is a name that the service keeps for itself"));
    }
    Ok(())
}

/// Whether a host is this machine's own: `localhost`, 127.0.0.0/8 or ::1 (RFC 8252, 7.3).
pub fn is_loopback(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => *name == "localhost",
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.is_loopback(),
    }
}

fn redirect_url(input: &str) -> Result<(), Invalid> {
    if !input.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Invalid("has a character that a URL cannot have; percent-encode it"));
    }
    let url = Url::parse(input).map_err(|_| Invalid("is not an absolute URL"))?;
    if url.fragment().is_some() {
        return Err(Invalid("has a fragment (#…); take it away"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Invalid("has user info before the host; take it away"));
    }
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        "http" => Err(Invalid("is http on a host that is not loopback; use https")),
        scheme if scheme.contains('.') => Ok(()),
        _ => Err(Invalid("has a scheme that is neither https nor a private-use one such as com.example.app")),
    }
}

fn origin(input: &str) -> Result<(), Invalid> {
    let url = Url::parse(input).map_err(|_| Invalid("is not an origin such as https://shop.example.com"))?;
    if url.origin().ascii_serialization() != input {
        return Err(Invalid(
            "is not an origin as browsers write it: scheme, lower-case host, port if not the usual one, no path",
        ));
    }
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        _ => Err(Invalid("is neither https nor http on loopback")),
    }
}

fn issuer(input: &str) -> Result<(), Invalid> {
    let url = Url::parse(input).map_err(|_| Invalid("is not an absolute URL"))?;
    if !matches!(url.scheme(), "https" | "http") || url.host().is_none() {
        return Err(Invalid("is not an https URL"));
    }
    if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() || url.password().is_some() {
        return Err(Invalid("has a query, a fragment or user info; take it away"));
    }
    Ok(())
}

fn endpoint(input: &str) -> Result<(), Invalid> {
    let url = Url::parse(input).map_err(|_| Invalid("is not an absolute URL"))?;
    if !matches!(url.scheme(), "https" | "http") || url.host().is_none() {
        return Err(Invalid("is not an https URL"));
    }
    if url.fragment().is_some() || !url.username().is_empty() || url.password().is_some() {
        return Err(Invalid("has a fragment or user info; take it away"));
    }
    Ok(())
}

fn link_template(input: &str) -> Result<(), Invalid> {
    if !input.contains("{code}") {
        return Err(Invalid("does not contain {code}, which is where the code is filled in"));
    }
    let filled = input.replace("{code}", "CODE").replace("{email}", "EMAIL");
    if filled.contains(['{', '}']) {
        return Err(Invalid("has braces other than {code} and {email}"));
    }
    let authority = input.split_once("//").map_or("", |(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or(rest));
    if authority.contains('{') {
        return Err(Invalid("has a placeholder in its host; put it in the path or the query"));
    }
    let url = Url::parse(&filled).map_err(|_| Invalid("is not an absolute URL"))?;
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        scheme if scheme.contains('.') => Ok(()),
        _ => {
            Err(Invalid("is neither https, nor http on loopback, nor of a private-use scheme such as com.example.app"))
        }
    }
}

fn email_domain(input: &str) -> Result<(), Invalid> {
    let labels = input.split('.').count();
    if labels < 2 || !input.split('.').all(label) {
        return Err(Invalid("is not a host name of two labels or more in lower case"));
    }
    Ok(())
}

fn mailbox(input: &str) -> Result<(), Invalid> {
    if input.chars().any(char::is_control) {
        return Err(Invalid("has a control character"));
    }
    let address = match input.trim_end().strip_suffix('>') {
        Some(rest) => rest.rsplit_once('<').map(|(_, address)| address),
        None => Some(input),
    };
    let parts = address.and_then(|address| address.rsplit_once('@'));
    match parts {
        Some((local, domain))
            if !local.is_empty()
                && local.bytes().all(|b| b.is_ascii_graphic() && !b"<>()[]\\,;:\"@".contains(&b))
                && (domain == "localhost" || email_domain(&domain.to_ascii_lowercase()).is_ok()) =>
        {
            Ok(())
        }
        _ => Err(Invalid("is neither an address nor of the form Name <address>")),
    }
}
