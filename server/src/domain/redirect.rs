//! Redirect URLs: an App's exact allow-list (RFC 9700, 2.1), and the parameters that are added to a URL on the list.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::RedirectUrl;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// The characters that are percent-encoded: all but the unreserved ones (RFC 3986, 2.3). A space becomes `%20`, which
/// every decoder can read.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A redirect URL that was found on the App's current list, or the page *continue*. Only [`choose_target`],
/// [`find_target`] and [`RedirectTarget::from_page`] construct it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedirectTarget {
    url: String,
    reference: RedirectReference,
}

/// A reference to a redirect URL of the list. A stored reference must be found on the list again before it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectReference {
    /// The first 16 bytes of the SHA-256 of the entry, in base64url.
    entry: String,
    /// The requested port, if the entry is an `http` loopback URL.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    port: Option<u16>,
}

/// The redirect URL is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the redirect URL is not on the App's list")]
pub struct RedirectNotAllowed;

/// The part of a redirect URL to which parameters are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterLocation {
    Query,
    Fragment,
}

/// An `http` loopback URL, split at its port (RFC 8252, 7.3).
struct LoopbackUrl<'a> {
    /// `http://` and the host.
    prefix: &'a str,
    port: Option<u16>,
    /// The path, the query and the fragment.
    suffix: &'a str,
}

/// Returns the requested redirect URL or, if none was requested, the first one on the list. Returns `None` if none was
/// requested and the list is empty.
pub fn choose_target(
    list: &[RedirectUrl],
    requested: Option<&str>,
) -> Result<Option<RedirectTarget>, RedirectNotAllowed> {
    match requested {
        None => Ok(list.first().map(RedirectTarget::from_entry)),
        Some(requested) => {
            list.iter().find_map(|entry| RedirectTarget::matching(entry, requested)).map(Some).ok_or(RedirectNotAllowed)
        }
    }
}

/// Finds a redirect URL that was chosen earlier, if it is still on the list.
pub fn find_target(list: &[RedirectUrl], reference: &RedirectReference) -> Result<RedirectTarget, RedirectNotAllowed> {
    let entry = list.iter().find(|entry| entry_digest(entry.as_str()) == reference.entry).ok_or(RedirectNotAllowed)?;
    let url = match LoopbackUrl::parse(entry.as_str()) {
        None => entry.as_str().to_owned(),
        Some(loopback) => loopback.with_port(reference.port),
    };
    Ok(RedirectTarget { url, reference: reference.clone() })
}

fn entry_digest(entry: &str) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, entry.as_bytes()).as_ref()[..16])
}

// === impl RedirectTarget ===

impl RedirectTarget {
    fn from_entry(entry: &RedirectUrl) -> Self {
        let port = LoopbackUrl::parse(entry.as_str()).and_then(|loopback| loopback.port);
        Self {
            url: entry.as_str().to_owned(),
            reference: RedirectReference { entry: entry_digest(entry.as_str()), port },
        }
    }

    /// The page *continue* of an App, which is not on the list (specification: Hosted pages, Social login).
    pub(in crate::domain) fn from_page(url: &str) -> Self {
        Self { url: url.to_owned(), reference: RedirectReference { entry: entry_digest(url), port: None } }
    }

    /// The target, if the requested URL equals the entry byte for byte. Only the port of an `http` loopback URL can
    /// differ.
    fn matching(entry: &RedirectUrl, requested: &str) -> Option<Self> {
        if entry.as_str() == requested {
            return Some(Self::from_entry(entry));
        }
        let (listed, requested) = (LoopbackUrl::parse(entry.as_str())?, LoopbackUrl::parse(requested)?);
        (listed.prefix == requested.prefix && listed.suffix == requested.suffix).then(|| Self {
            url: listed.with_port(requested.port),
            reference: RedirectReference { entry: entry_digest(entry.as_str()), port: requested.port },
        })
    }

    pub fn as_str(&self) -> &str {
        &self.url
    }

    pub fn reference(&self) -> &RedirectReference {
        &self.reference
    }

    /// Returns the redirect URL with the parameters appended. The redirect URL itself is not changed.
    pub fn with_parameters<'a>(
        &self,
        location: ParameterLocation,
        parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> String {
        let mut url = self.url.clone();
        let mut separator = match location {
            // An entry of the list has no fragment.
            ParameterLocation::Fragment => "#",
            // The first `?` starts the query. An `&` before the query is part of the host or the path. A second `?` is
            // part of the query.
            ParameterLocation::Query => match url.split_once('?') {
                None => "?",
                Some((_, query)) if query.is_empty() || query.ends_with('&') => "",
                Some(_) => "&",
            },
        };
        for (name, value) in parameters {
            url.push_str(separator);
            url.push_str(name);
            url.push('=');
            url.extend(utf8_percent_encode(value, ENCODED));
            separator = "&";
        }
        url
    }
}

// === impl LoopbackUrl ===

impl<'a> LoopbackUrl<'a> {
    /// Splits the URL. Returns `None` if the scheme is not `http` or the port is invalid. Does not check that the host
    /// is a loopback host: `http` entries of the list have only such hosts, and a requested URL must have the host of
    /// an entry.
    fn parse(url: &'a str) -> Option<Self> {
        let authority = url.strip_prefix("http://")?;
        let end = authority.find(['/', '?', '#']).unwrap_or(authority.len());
        let (authority, suffix) = authority.split_at(end);
        let host = match authority.strip_prefix('[') {
            Some(v6) => v6.find(']')? + 2,
            None => authority.find(':').unwrap_or(authority.len()),
        };
        let port = match authority.get(host..)? {
            "" => None,
            port => Some(port.strip_prefix(':').and_then(parse_port)?),
        };
        Some(Self { prefix: &url[.."http://".len() + host], port, suffix })
    }

    fn with_port(&self, port: Option<u16>) -> String {
        let Self { prefix, suffix, .. } = self;
        port.map_or_else(|| format!("{prefix}{suffix}"), |port| format!("{prefix}:{port}{suffix}"))
    }
}

/// Parses a port in its only accepted form: digits without a leading zero.
fn parse_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<RedirectUrl> {
        entries.iter().map(|entry| entry.parse().unwrap()).collect()
    }

    fn chosen_url(entries: &[&str], requested: &str) -> Option<String> {
        choose_target(&list(entries), Some(requested)).ok().flatten().map(|target| target.as_str().to_owned())
    }

    #[test]
    fn the_first_url_of_the_list_is_chosen_if_none_is_requested() {
        let entries = list(&["https://shop.example.com/done", "com.example.shop:/done"]);
        assert_eq!(choose_target(&entries, None).unwrap().unwrap().as_str(), "https://shop.example.com/done");
        assert_eq!(choose_target(&[], None), Ok(None));
        assert_eq!(choose_target(&[], Some("https://shop.example.com/done")), Err(RedirectNotAllowed));
    }

    #[test]
    fn a_redirect_url_other_than_http_loopback_must_match_byte_for_byte() {
        let entries = ["https://shop.example.com/done?a=b", "com.example.shop:/done"];
        for requested in entries {
            assert_eq!(chosen_url(&entries, requested).as_deref(), Some(requested));
        }
        for requested in [
            "",
            "https://shop.example.com/done",
            "https://shop.example.com/done?a=b&c=d",
            "https://shop.example.com/done?a=B",
            "https://shop.example.com:443/done?a=b",
            "https://shop.example.com:8443/done?a=b",
            "https://SHOP.example.com/done?a=b",
            "com.example.shop://done",
            "com.example.shop:/done/",
        ] {
            assert_eq!(chosen_url(&entries, requested), None, "{requested}");
        }
    }

    #[test]
    fn the_port_of_an_http_loopback_url_can_differ() {
        let entries = ["http://127.0.0.1/done", "http://[::1]:3000/done", "http://localhost:3000/?x"];
        for requested in [
            "http://127.0.0.1/done",
            "http://127.0.0.1:1/done",
            "http://127.0.0.1:65535/done",
            "http://[::1]/done",
            "http://[::1]:51004/done",
            "http://localhost/?x",
            "http://localhost:80/?x",
        ] {
            assert_eq!(chosen_url(&entries, requested).as_deref(), Some(requested));
        }
        for requested in [
            "https://127.0.0.1/done",
            "http://127.0.0.1:/done",
            "http://127.0.0.1:0/done",
            "http://127.0.0.1:080/done",
            "http://127.0.0.1:+80/done",
            "http://127.0.0.1:65536/done",
            "http://127.0.0.1:80:80/done",
            "http://127.0.0.1:80@evil.example/done",
            "http://evil.example@127.0.0.1/done",
            "http://127.0.0.1:3000",
            "http://127.0.0.1:3000/done/",
            "http://127.0.0.1:3000/done#x",
            "http://127.0.0.2/done",
            "http://localhost/done",
            "http://[::1]3000/done",
            "http://[::1/done",
            "http://[0:0:0:0:0:0:0:1]:3000/done",
            "http://evil.example:3000/done",
        ] {
            assert_eq!(chosen_url(&entries, requested), None, "{requested}");
        }
    }

    #[test]
    fn a_stored_reference_is_found_while_its_entry_is_listed() {
        let entries = list(&["https://shop.example.com/done", "http://127.0.0.1:3000/done"]);
        for requested in ["https://shop.example.com/done", "http://127.0.0.1/done", "http://127.0.0.1:51004/done"] {
            let target = choose_target(&entries, Some(requested)).unwrap().unwrap();
            assert_eq!(find_target(&entries, target.reference()), Ok(target.clone()));
            assert_eq!(target.as_str(), requested);
            assert_eq!(
                find_target(&list(&["https://shop.example.com/other"]), target.reference()),
                Err(RedirectNotAllowed)
            );
        }
    }

    #[test]
    fn parameters_are_appended_to_the_redirect_url() {
        let with = |entry: &str, location| {
            let target = choose_target(&list(&[entry]), None).unwrap().unwrap();
            target.with_parameters(location, [("error", "access_denied"), ("error_description", "né & so on")])
        };
        let parameters = "error=access_denied&error_description=n%C3%A9%20%26%20so%20on";
        assert_eq!(with("https://a.example", ParameterLocation::Query), format!("https://a.example?{parameters}"));
        assert_eq!(
            with("https://a.example/x?y=z", ParameterLocation::Query),
            format!("https://a.example/x?y=z&{parameters}")
        );
        assert_eq!(with("https://a.example/x?", ParameterLocation::Query), format!("https://a.example/x?{parameters}"));
        assert_eq!(
            with("https://a.example/x?y=z&", ParameterLocation::Query),
            format!("https://a.example/x?y=z&{parameters}")
        );
        assert_eq!(with("com.example:/x", ParameterLocation::Query), format!("com.example:/x?{parameters}"));
        assert_eq!(
            with("https://a.example/x?y?", ParameterLocation::Query),
            format!("https://a.example/x?y?&{parameters}")
        );
        for no_query in ["https://a.example/x&", "https://a.example&"] {
            assert_eq!(with(no_query, ParameterLocation::Query), format!("{no_query}?{parameters}"));
        }
        assert_eq!(
            with("https://a.example/x?y=z", ParameterLocation::Fragment),
            format!("https://a.example/x?y=z#{parameters}")
        );
    }
}
