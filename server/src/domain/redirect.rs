//! Redirect addresses: an App's exact allow-list (RFC 9700, 2.1), and what is added to an address on it.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::RedirectUrl;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// All but the unreserved characters (RFC 3986, 2.3): a space becomes `%20`, which every decoder reads.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// An address that is on an App's list at this moment. There is no other way to one than the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    address: String,
    mark: Mark,
}

/// Names an address without being one: what is kept of it has to be found on the list again before it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// SHA-256 of the entry, cut.
    entry: String,
    /// The port that was asked for, where the entry is `http` on loopback.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    port: Option<u16>,
}

/// The address is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the redirect address is not on the App's list")]
pub struct NotAllowed;

/// Where what the service says is added to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Query,
    Fragment,
}

/// An `http` address of this machine, cut around its port (RFC 8252, 7.3).
struct Loopback<'a> {
    /// `http://` and the host.
    front: &'a str,
    port: Option<u16>,
    rest: &'a str,
}

/// The address that was asked for, or the first of the list; none where the list is empty and nothing was asked for.
pub fn choose(list: &[RedirectUrl], asked: Option<&str>) -> Result<Option<Target>, NotAllowed> {
    match asked {
        None => Ok(list.first().map(Target::of)),
        Some(asked) => list.iter().find_map(|entry| Target::matching(entry, asked)).map(Some).ok_or(NotAllowed),
    }
}

/// The address that was chosen before, where it is still on the list.
pub fn find(list: &[RedirectUrl], mark: &Mark) -> Result<Target, NotAllowed> {
    let entry = list.iter().find(|entry| entry_mark(entry) == mark.entry).ok_or(NotAllowed)?;
    let address = match Loopback::of(entry.as_str()) {
        None => entry.as_str().to_owned(),
        Some(loopback) => loopback.at(mark.port),
    };
    Ok(Target { address, mark: mark.clone() })
}

fn entry_mark(entry: &RedirectUrl) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, entry.as_str().as_bytes()).as_ref()[..16])
}

// === impl Target ===

impl Target {
    fn of(entry: &RedirectUrl) -> Self {
        let port = Loopback::of(entry.as_str()).and_then(|loopback| loopback.port);
        Self { address: entry.as_str().to_owned(), mark: Mark { entry: entry_mark(entry), port } }
    }

    /// Byte for byte, but for the port of an `http` loopback address.
    fn matching(entry: &RedirectUrl, asked: &str) -> Option<Self> {
        if entry.as_str() == asked {
            return Some(Self::of(entry));
        }
        let (listed, asked) = (Loopback::of(entry.as_str())?, Loopback::of(asked)?);
        (listed.front == asked.front && listed.rest == asked.rest)
            .then(|| Self { address: listed.at(asked.port), mark: Mark { entry: entry_mark(entry), port: asked.port } })
    }

    pub fn as_str(&self) -> &str {
        &self.address
    }

    pub fn mark(&self) -> &Mark {
        &self.mark
    }

    /// The address with parameters after what it has; nothing of it is written anew.
    pub fn with<'a>(&self, place: Place, parameters: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
        let mut address = self.address.clone();
        let mut separator = match place {
            // An entry has no fragment.
            Place::Fragment => "#",
            // The first `?` begins the query. An `&` without it is part of the path or the host, a second one of a value.
            Place::Query => match address.split_once('?') {
                None => "?",
                Some((_, query)) if query.is_empty() || query.ends_with('&') => "",
                Some(_) => "&",
            },
        };
        for (name, value) in parameters {
            address.push_str(separator);
            address.push_str(name);
            address.push('=');
            address.extend(utf8_percent_encode(value, ENCODED));
            separator = "&";
        }
        address
    }
}

// === impl Loopback ===

impl<'a> Loopback<'a> {
    /// None where it is not `http`, or where its port is not one. That the host is this machine's own is a rule of the
    /// list; what is asked for is compared with an entry.
    fn of(address: &'a str) -> Option<Self> {
        let authority = address.strip_prefix("http://")?;
        let end = authority.find(['/', '?', '#']).unwrap_or(authority.len());
        let (authority, rest) = authority.split_at(end);
        let host = match authority.strip_prefix('[') {
            Some(v6) => v6.find(']')? + 2,
            None => authority.find(':').unwrap_or(authority.len()),
        };
        let port = match authority.get(host..)? {
            "" => None,
            port => Some(port.strip_prefix(':').and_then(number)?),
        };
        Some(Self { front: &address[.."http://".len() + host], port, rest })
    }

    fn at(&self, port: Option<u16>) -> String {
        let Self { front, rest, .. } = self;
        port.map_or_else(|| format!("{front}{rest}"), |port| format!("{front}:{port}{rest}"))
    }
}

/// A port as it is written in one way only.
fn number(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<RedirectUrl> {
        entries.iter().map(|entry| entry.parse().unwrap()).collect()
    }

    fn chosen(entries: &[&str], asked: &str) -> Option<String> {
        choose(&list(entries), Some(asked)).ok().flatten().map(|target| target.as_str().to_owned())
    }

    #[test]
    fn without_a_wish_it_is_the_first_of_the_list() {
        let entries = list(&["https://shop.example.com/done", "com.example.shop:/done"]);
        assert_eq!(choose(&entries, None).unwrap().unwrap().as_str(), "https://shop.example.com/done");
        assert_eq!(choose(&[], None), Ok(None));
        assert_eq!(choose(&[], Some("https://shop.example.com/done")), Err(NotAllowed));
    }

    #[test]
    fn an_address_counts_byte_for_byte() {
        let entries = ["https://shop.example.com/done?a=b", "com.example.shop:/done"];
        for asked in entries {
            assert_eq!(chosen(&entries, asked).as_deref(), Some(asked));
        }
        for asked in [
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
            assert_eq!(chosen(&entries, asked), None, "{asked}");
        }
    }

    #[test]
    fn the_port_of_a_loopback_address_is_free() {
        let entries = ["http://127.0.0.1/done", "http://[::1]:3000/done", "http://localhost:3000/?x"];
        for asked in [
            "http://127.0.0.1/done",
            "http://127.0.0.1:1/done",
            "http://127.0.0.1:65535/done",
            "http://[::1]/done",
            "http://[::1]:51004/done",
            "http://localhost/?x",
            "http://localhost:80/?x",
        ] {
            assert_eq!(chosen(&entries, asked).as_deref(), Some(asked));
        }
        for asked in [
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
            assert_eq!(chosen(&entries, asked), None, "{asked}");
        }
    }

    #[test]
    fn what_is_kept_is_found_again_while_it_is_on_the_list() {
        let entries = list(&["https://shop.example.com/done", "http://127.0.0.1:3000/done"]);
        for asked in ["https://shop.example.com/done", "http://127.0.0.1/done", "http://127.0.0.1:51004/done"] {
            let target = choose(&entries, Some(asked)).unwrap().unwrap();
            assert_eq!(find(&entries, target.mark()), Ok(target.clone()));
            assert_eq!(target.as_str(), asked);
            assert_eq!(find(&list(&["https://shop.example.com/other"]), target.mark()), Err(NotAllowed));
        }
    }

    #[test]
    fn parameters_come_after_what_an_address_has() {
        let with = |entry: &str, place| {
            let target = choose(&list(&[entry]), None).unwrap().unwrap();
            target.with(place, [("error", "access_denied"), ("error_description", "né & so on")])
        };
        let parameters = "error=access_denied&error_description=n%C3%A9%20%26%20so%20on";
        assert_eq!(with("https://a.example", Place::Query), format!("https://a.example?{parameters}"));
        assert_eq!(with("https://a.example/x?y=z", Place::Query), format!("https://a.example/x?y=z&{parameters}"));
        assert_eq!(with("https://a.example/x?", Place::Query), format!("https://a.example/x?{parameters}"));
        assert_eq!(with("https://a.example/x?y=z&", Place::Query), format!("https://a.example/x?y=z&{parameters}"));
        assert_eq!(with("com.example:/x", Place::Query), format!("com.example:/x?{parameters}"));
        assert_eq!(with("https://a.example/x?y?", Place::Query), format!("https://a.example/x?y?&{parameters}"));
        for no_query in ["https://a.example/x&", "https://a.example&"] {
            assert_eq!(with(no_query, Place::Query), format!("{no_query}?{parameters}"));
        }
        assert_eq!(with("https://a.example/x?y=z", Place::Fragment), format!("https://a.example/x?y=z#{parameters}"));
    }
}
