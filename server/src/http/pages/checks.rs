//! Checks that a request must pass before its page handles it: the host, and the origin of a form.

use http::{
    HeaderMap, Method,
    header::{HOST, ORIGIN},
    uri::Authority,
};
use latchkey_crds::types::IssuerUrl;
use url::Url;

use crate::{
    config::Apps,
    domain::{app::App, pages::PagesUrl},
    http::{
        error::{ErrorCode, Problem},
        request::InboundRequest,
    },
};

/// Whether a page is on the host of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PageLocation {
    /// The page is on this host.
    ThisHost,
    /// The page is on the App's own host, at this URL.
    OwnHost(String),
    NotFound,
}

/// Finds out whether the page is on the host of the request (specification: Hosted pages, Own host).
///
/// An own host that is also the host of the base URL is ignored. Otherwise its App would hide the pages of all other
/// Apps. The operator refuses such an own host, but the base URL can change later.
pub(super) fn locate_page(
    apps: &Apps,
    app: &App,
    url: &PagesUrl,
    base_url: &IssuerUrl,
    request: &InboundRequest,
) -> PageLocation {
    let base_url = Url::parse(base_url.as_str()).ok();
    let is_own = |host: &str| base_url.as_ref().and_then(Url::host_str) != Some(host);
    let holder = requested_host(request).filter(|host| is_own(host)).and_then(|host| apps.get_by_pages_host(&host));
    match holder {
        Some(holder) if holder.id() == app.id() => PageLocation::ThisHost,
        Some(_) => PageLocation::NotFound,
        None if apps.held_pages_host(app).is_none_or(|host| !is_own(host.as_str())) => PageLocation::ThisHost,
        None if matches!(request.method, Method::GET | Method::HEAD) => {
            // The path of a page begins with the appID, which `url` already contains.
            let path = request.uri.path().trim_start_matches('/');
            let path = path.split_once('/').map_or("", |(_, path)| path);
            let query = request.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
            PageLocation::OwnHost(url.page(&format!("{path}{query}")))
        }
        None => PageLocation::NotFound,
    }
}

/// The host of the request, in lower case and without port. `None` if it is missing, repeated or malformed.
fn requested_host(request: &InboundRequest) -> Option<String> {
    if let Some(authority) = request.uri.authority() {
        return host_of(authority);
    }
    let mut fields = request.headers.get_all(HOST).iter();
    let (Some(only), None) = (fields.next(), fields.next()) else { return None };
    host_of(&Authority::try_from(only.as_bytes()).ok()?)
}

fn host_of(authority: &Authority) -> Option<String> {
    let host = authority.host();
    let has_user = authority.as_str().contains('@');
    let has_port = authority.port_u16().is_some();
    (!has_user && (has_port || authority.as_str() == host)).then(|| host.to_ascii_lowercase())
}

/// Checks that a form comes from the origin of the App's pages. Old browsers send neither `Origin` nor `Sec-Fetch-Site`
/// with a form. In that case, only the field `csrf` protects the form.
pub(super) fn check_origin(headers: &HeaderMap, url: &PagesUrl) -> Result<(), Problem> {
    let mut origins = headers.get_all(ORIGIN).iter();
    let is_own = match (origins.next(), origins.next()) {
        (Some(only), None) => only.as_bytes() == url.origin().as_bytes(),
        (Some(_), Some(_)) => false,
        (None, _) => headers.get_all("sec-fetch-site").iter().all(|site| site.as_bytes() == b"same-origin"),
    };
    if is_own { Ok(()) } else { Err(Problem::new(ErrorCode::OriginNotAllowed, "the form is not from this site")) }
}

/// Whether a request comes from a page of this host, from the user (a typed address or a bookmark), or from an old
/// browser, which does not send its origin.
pub(super) fn is_from_own_pages_or_user(headers: &HeaderMap) -> bool {
    headers.get_all("sec-fetch-site").iter().all(|site| matches!(site.as_bytes(), b"same-origin" | b"none"))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;
    use crate::fixtures;

    #[test]
    fn a_form_from_another_site_is_refused_if_the_browser_names_the_site() {
        let url = PagesUrl::new(&fixtures::app(fixtures::rendered("shop")), None);
        let is_accepted = |fields: &[(&'static str, &'static str)]| {
            let headers: HeaderMap = fields
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
                .collect();
            check_origin(&headers, &url).is_ok()
        };
        let own = ("origin", "https://auth.example.com");
        assert!(is_accepted(&[]));
        assert!(is_accepted(&[own]));
        assert!(is_accepted(&[own, ("sec-fetch-site", "cross-site")]), "the origin decides");
        assert!(is_accepted(&[("sec-fetch-site", "same-origin")]));
        for bad in [
            &[("origin", "null")][..],
            &[("origin", "https://auth.example.com:443")],
            &[("origin", "https://shop.example.com")],
            &[("origin", "http://auth.example.com")],
            &[own, own],
            &[("sec-fetch-site", "same-site")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
        ] {
            assert!(!is_accepted(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_host_is_compared_without_port_and_case() {
        let host = |text: &str| Authority::try_from(text.as_bytes()).ok().and_then(|authority| host_of(&authority));
        assert_eq!(host("Login.Shop.example:8443").as_deref(), Some("login.shop.example"));
        assert_eq!(host("login.shop.example").as_deref(), Some("login.shop.example"));
        for other in ["login.shop.example.", "x@login.shop.example", "", "login.shop.example/x", "login.shop.example:x"]
        {
            assert_ne!(host(other).as_deref(), Some("login.shop.example"), "{other}");
        }
    }
}
