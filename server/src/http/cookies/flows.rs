//! The cookies that bind social logins to a browser. Each flow has its own cookie, so that two tabs do not interfere.

use super::{CookieScheme, timed::TimedCookies};

// === impl CookieScheme ===

impl CookieScheme {
    /// The cookies of social logins that began at the endpoint *redirect*. A browser has at most four of them at a time
    /// (specification: Social login, Redirect). Over `https`, they have `SameSite=None`, because some providers send
    /// the user back by a POST from their own site.
    pub const fn flows(self) -> TimedCookies {
        let attributes = match self {
            Self::Secure => "Path=/; Secure; HttpOnly; SameSite=None",
            Self::Plain => "Path=/; HttpOnly; SameSite=Lax",
        };
        TimedCookies { host_prefix: self.host_prefix(), name_prefix: "latchkey-flow.", attributes }
    }
}

#[cfg(test)]
mod tests {
    use http::{
        HeaderMap, HeaderValue,
        header::{COOKIE, HeaderName},
    };
    use time::{Duration, OffsetDateTime, macros::datetime};

    use super::*;
    use crate::{
        domain::{
            clock::Env,
            flow::{FlowId, FlowState},
        },
        http::cookies::TimedCookie,
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

    fn id() -> FlowId {
        FlowState::generate(&Env::system()).id()
    }

    /// The request headers of a browser that received these response headers.
    fn cookie_header(headers: &[(HeaderName, HeaderValue)]) -> HeaderMap {
        let pairs: Vec<&str> =
            headers.iter().map(|(_, value)| value.to_str().unwrap().split(';').next().unwrap()).collect();
        HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(format!("a=b; {}", pairs.join("; "))).unwrap())])
    }

    fn text(headers: &[(HeaderName, HeaderValue)]) -> Vec<&str> {
        headers.iter().map(|(_, value)| value.to_str().unwrap()).collect()
    }

    #[test]
    fn a_cookie_over_tls_is_bound_to_the_host() {
        let id = id();
        let cookies = CookieScheme::for_base_url(&"https://auth.example.com".parse().unwrap()).flows();
        let headers = cookies.add(&[], &id, NOW, "sealed", 600);
        let name = format!("__Host-latchkey-flow.{}000.{}", NOW.unix_timestamp(), id.as_str());
        assert_eq!(text(&headers), [format!("{name}=sealed; Max-Age=600; Path=/; Secure; HttpOnly; SameSite=None")]);
        let request = cookie_header(&headers);
        let sent = cookies.from_request(&request);
        assert_eq!(sent.len(), 1);
        assert!(sent[0].belongs_to(&id) && sent[0].value == "sealed");
        assert_eq!(
            text(&cookies.remove(&sent, &id)),
            [format!("{name}=; Max-Age=0; Path=/; Secure; HttpOnly; SameSite=None")]
        );
        assert!(cookies.remove(&sent, &super::tests::id()).is_empty());
        assert!(
            CookieScheme::Plain.flows().from_request(&request).is_empty(),
            "a name with the prefix is a different name"
        );
    }

    #[test]
    fn a_cookie_over_http_has_no_prefix() {
        let cookies = CookieScheme::for_base_url(&"http://127.0.0.1:8080".parse().unwrap()).flows();
        let headers = cookies.add(&[], &id(), NOW, "sealed", 600);
        assert!(text(&headers)[0].starts_with("latchkey-flow."));
        assert!(text(&headers)[0].ends_with("; Max-Age=600; Path=/; HttpOnly; SameSite=Lax"));
        let request = cookie_header(&headers);
        assert_eq!(cookies.from_request(&request).len(), 1);
        assert!(
            CookieScheme::Secure.flows().from_request(&request).is_empty(),
            "any page of the domain can set this name"
        );
    }

    #[test]
    fn at_most_four_flows_are_kept_and_the_oldest_is_cleared() {
        let cookies = CookieScheme::Secure.flows();
        let begin =
            |sent: &[TimedCookie<'_>], minute| cookies.add(sent, &id(), NOW + Duration::minutes(minute), "sealed", 600);
        let mut stored_cookies: Vec<_> = [3, 0, 2].into_iter().flat_map(|minute| begin(&[], minute)).collect();
        let request = cookie_header(&stored_cookies);
        assert_eq!(begin(&cookies.from_request(&request), 4).len(), 1);
        stored_cookies.extend(begin(&[], 4));
        let request = cookie_header(&stored_cookies);
        let headers = begin(&cookies.from_request(&request), 5);
        assert_eq!(headers.len(), 2);
        let oldest = text(&stored_cookies)[1].split('=').next().unwrap().to_owned();
        assert!(text(&headers)[1].starts_with(&format!("{oldest}=; Max-Age=0;")), "{headers:?}");
    }

    #[test]
    fn other_cookies_are_ignored() {
        for other in ["", "=", "a", "__Host-latchkey-flow", "__Host-latchkey-flow.x.y=z", "__Host-latchkey-flow.1=z"] {
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(other).unwrap())]);
            assert!(CookieScheme::Secure.flows().from_request(&request).is_empty(), "{other}");
        }
        let request = HeaderMap::from_iter([
            (COOKIE, HeaderValue::from_static("__Host-latchkey-flow.1.a,b=z")),
            (COOKIE, HeaderValue::from_bytes(b"__Host-latchkey-flow.1.a=\xff").unwrap()),
        ]);
        assert!(CookieScheme::Secure.flows().from_request(&request).is_empty());
    }
}
