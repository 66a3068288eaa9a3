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

/// Parses what stands there and nothing that the WHATWG parser would make of it: that one forgives missing slashes,
/// backslashes, white space and upper case, and what it accepts is not what is compared, byte for byte, later.
fn strict_url(input: &str) -> Result<Url, Invalid> {
    if !input.bytes().all(|b| b.is_ascii_graphic() && b != b'\\') {
        return Err(Invalid("has a character that a URL cannot have; percent-encode it"));
    }
    let url = Url::parse(input).map_err(|_| Invalid("is not an absolute URL"))?;
    let rest = input.strip_prefix(url.scheme()).and_then(|rest| rest.strip_prefix(':'));
    let rest = rest.ok_or(Invalid("has a scheme in upper case; write it in lower case"))?;
    if matches!(url.scheme(), "https" | "http") {
        let host = rest.strip_prefix("//").ok_or(Invalid("has no // after its scheme"))?;
        if host.starts_with(['/', '?', '#']) || host.is_empty() {
            return Err(Invalid("has no host"));
        }
    }
    if authority(input).contains('@') {
        return Err(Invalid("has user info before the host; take it away"));
    }
    Ok(url)
}

/// What stands between `//` and the path (RFC 3986, 3.2), empty where there is no such thing.
fn authority(url: &str) -> &str {
    let rest = url.split_once(':').and_then(|(_, rest)| rest.strip_prefix("//")).unwrap_or_default();
    rest.split(['/', '?', '#']).next().unwrap_or_default()
}

fn redirect_url(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if url.fragment().is_some() {
        return Err(Invalid("has a fragment (#…); take it away"));
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
    // The WHATWG parser lets a host be `*`, which would look as if it stood for every host.
    if !input.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._:/[]".contains(&b)) {
        return Err(Invalid("has a host with other characters than letters, digits, hyphens and dots"));
    }
    match url.scheme() {
        "https" => Ok(()),
        "http" if url.host().is_some_and(|host| is_loopback(&host)) => Ok(()),
        _ => Err(Invalid("is neither https nor http on loopback")),
    }
}

fn issuer(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if !matches!(url.scheme(), "https" | "http") {
        return Err(Invalid("is not an https URL"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Invalid("has a query or a fragment; take it away"));
    }
    Ok(())
}

fn endpoint(input: &str) -> Result<(), Invalid> {
    let url = strict_url(input)?;
    if !matches!(url.scheme(), "https" | "http") {
        return Err(Invalid("is not an https URL"));
    }
    if url.fragment().is_some() {
        return Err(Invalid("has a fragment; take it away"));
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
    if authority(input).contains('{') {
        return Err(Invalid("has a placeholder in its host; put it in the path or the query"));
    }
    let url = strict_url(&filled)?;
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
    let (name, address) = split_mailbox(input);
    match address.rsplit_once('@') {
        Some((local, domain))
            if !name.contains(['<', '>', '@'])
                && is_dot_atom(local)
                && (domain == "localhost" || email_domain(&domain.to_ascii_lowercase()).is_ok()) =>
        {
            Ok(())
        }
        _ => Err(Invalid("is neither an address nor of the form Name <address>")),
    }
}

/// The name, empty where there is none, and the address.
fn split_mailbox(mailbox: &str) -> (&str, &str) {
    match mailbox.strip_suffix('>').and_then(|rest| rest.rsplit_once('<')) {
        Some((name, address)) => (name.trim(), address),
        None => ("", mailbox),
    }
}

/// The local part of an address without quotes (RFC 5322, 3.2.3; its length: RFC 5321, 4.5.3.1.1).
fn is_dot_atom(local: &str) -> bool {
    let is_atom =
        |atom: &str| !atom.is_empty() && atom.bytes().all(|b| b.is_ascii_graphic() && !b"<>()[]\\,;:\"@.".contains(&b));
    local.len() <= 64 && local.split('.').all(is_atom)
}

// === impl Mailbox ===

impl Mailbox {
    /// The address alone.
    pub fn address(&self) -> &str {
        split_mailbox(&self.0).1
    }

    /// The name before the address, without quotes around it.
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
    fn good<T: FromStr<Err = Invalid> + AsRef<str>>(inputs: &[&str]) {
        for input in inputs {
            match input.parse::<T>() {
                Ok(value) => assert_eq!(value.as_ref(), *input),
                Err(invalid) => panic!("{input:?} {invalid}"),
            }
        }
    }

    #[track_caller]
    fn bad<T: FromStr<Err = Invalid> + fmt::Debug>(inputs: &[(&str, &str)]) {
        for (input, reason) in inputs {
            let invalid = input.parse::<T>().expect_err(input);
            assert!(invalid.0.contains(reason), "{input:?} {invalid}, which does not say {reason:?}");
        }
    }

    fn of_length(start: &str, length: usize, end: &str) -> String {
        format!("{start}{}{end}", "a".repeat(length - start.len() - end.len()))
    }

    #[test]
    fn app_ids() {
        good::<AppId>(&["a", "0", "shop", "a-b", "a--b", "9lives", "v2", "healthz-a", &"a".repeat(63)]);
        for bad_label in ["", "-", "a-", "-a", "Shop", "a.b", "a_b", "a b", "é", "a\n"] {
            bad::<AppId>(&[(bad_label, "is not an appID")]);
        }
        bad::<AppId>(&[(&"a".repeat(64), "longer than 63")]);
        for reserved in RESERVED_APP_IDS {
            bad::<AppId>(&[(reserved, "keeps for itself")]);
        }
    }

    #[test]
    fn provider_names() {
        good::<ProviderName>(&["github", "x", "e-mail", "emails", &"a".repeat(63)]);
        bad::<ProviderName>(&[("email", "keeps for itself"), ("corp.example", "is not a provider's name")]);
        bad::<ProviderName>(&[(&"a".repeat(64), "longer than 63"), ("", "is not a provider's name")]);
    }

    #[test]
    fn redirect_urls() {
        good::<RedirectUrl>(&[
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
        bad::<RedirectUrl>(&[
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
    fn origins() {
        good::<Origin>(&[
            "https://shop.example.com",
            "https://shop.example.com:8443",
            "https://xn--d-ega.example",
            "http://localhost:3000",
            "http://127.0.0.1",
            "http://[::1]:3000",
            &of_length("https://", 300, ".example"),
        ]);
        bad::<Origin>(&[
            ("https://shop.example.com/", "as browsers write it"),
            ("https://shop.example.com:443", "as browsers write it"),
            ("https://Shop.example.com", "as browsers write it"),
            ("https://user@shop.example.com", "as browsers write it"),
            ("https://*", "other characters"),
            ("https://*.example.com", "other characters"),
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
    fn issuers() {
        good::<IssuerUrl>(&[
            "https://auth.example.com",
            "https://auth.example.com/shop",
            "http://127.0.0.1:8080",
            &of_length("https://a.example/", 2048, ""),
        ]);
        bad::<IssuerUrl>(&[
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
    fn endpoints() {
        good::<EndpointUrl>(&["https://id.example.com/token?tenant=a", "http://127.0.0.1:5556/token"]);
        good::<EndpointUrl>(&[&of_length("https://a.example/", 2048, "")]);
        bad::<EndpointUrl>(&[
            ("https://id.example.com/token#a", "has a fragment"),
            ("https://user:pass@id.example.com/token", "has user info"),
            ("id.example.com", "is not an absolute URL"),
            ("com.example:/token", "is not an https URL"),
            (&of_length("https://a.example/", 2049, ""), "longer than 2048"),
        ]);
    }

    #[test]
    fn link_templates() {
        good::<LinkTemplate>(&[
            "https://shop.example.com/confirm?code={code}",
            "https://shop.example.com/#/confirm/{code}/{email}",
            "http://localhost:3000/confirm?code={code}",
            "com.example.shop:/confirm?code={code}&from=https://{email}",
            &of_length("https://a.example/", 2048, "{code}"),
        ]);
        bad::<LinkTemplate>(&[
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
    fn email_domains() {
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        good::<EmailDomain>(&["example.com", "a.b", "xn--d-ega.example", &longest]);
        for input in ["", "example", "example.", ".example", "a..b", "Example.com", "a_b.example", "é.example"] {
            bad::<EmailDomain>(&[(input, "is not a host name")]);
        }
        bad::<EmailDomain>(&[(&format!("{}.example", "a".repeat(64)), "is not a host name")]);
        bad::<EmailDomain>(&[(&format!("{longest}a"), "longer than 253")]);
    }

    #[test]
    fn mailboxes() {
        good::<Mailbox>(&[
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
            bad::<Mailbox>(&[(input, "neither an address nor")]);
        }
        bad::<Mailbox>(&[("a@b.example\r\nBcc: c@d.example", "control character")]);
        bad::<Mailbox>(&[(&of_length("", 82, "@shop.example.com"), "neither an address nor")]);
        bad::<Mailbox>(&[(&of_length("", 321, " <hello@shop.example.com>"), "longer than 320")]);
    }

    #[test]
    fn the_parts_of_a_mailbox() {
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
    fn loopback_hosts() {
        let is = |url: &str| is_loopback(&Url::parse(url).unwrap().host().unwrap());
        assert!(["http://localhost", "http://127.0.0.1", "http://127.9.9.9", "http://[::1]"].into_iter().all(is));
        assert!(!["http://a.example", "http://10.0.0.1", "http://[::2]", "http://0.0.0.0"].into_iter().any(is));
    }

    #[test]
    fn serde_parses_too_and_a_fault_does_not_quote_the_value() {
        assert_eq!(serde_json::from_str::<AppId>("\"shop\"").unwrap().as_str(), "shop");
        assert_eq!(serde_json::to_string(&"shop".parse::<AppId>().unwrap()).unwrap(), "\"shop\"");
        let error = serde_json::from_str::<AppId>("\"SECRET\"").unwrap_err().to_string();
        assert!(error.contains("is not an appID") && !error.contains("SECRET"), "{error}");
    }
}
