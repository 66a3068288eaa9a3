//! The URLs of an App's pages. They never depend on the `Host` of a request.

use latchkey_crds::types::HostName;
use url::Url;

use crate::domain::app::App;

/// The base URL of an App's pages: the App's issuer. If the App holds its own host for the pages, this host replaces
/// the host of the issuer.
#[derive(Clone, Debug)]
pub struct PagesUrl(Url);

// === impl PagesUrl ===

impl PagesUrl {
    /// `host` is the App's own host for its pages. `None` if the App has no such host, or if another App holds it.
    /// Scheme, port and path are those of the App's issuer.
    pub fn new(app: &App, host: Option<&HostName>) -> Self {
        let mut url = Url::parse(app.doc.issuer.as_str()).expect("an issuer is a URL");
        if let Some(host) = host {
            url.set_host(Some(host.as_str())).expect("a DNS name is a host");
        }
        Self(url)
    }

    /// The URL of a page, for example of `login`.
    pub fn page(&self, path: &str) -> String {
        format!("{}/{path}", self.0)
    }

    /// The `Origin` that browsers send with a form of the pages (HTML standard, 7.1.1).
    pub fn origin(&self) -> String {
        self.0.origin().ascii_serialization()
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::RenderedApp;

    use super::*;
    use crate::fixtures;

    fn url(issuer: &str, host: Option<&str>) -> PagesUrl {
        let app = fixtures::app(RenderedApp { issuer: issuer.parse().unwrap(), ..fixtures::rendered("shop") });
        PagesUrl::new(&app, host.map(|host| host.parse().unwrap()).as_ref())
    }

    #[test]
    fn the_host_of_an_app_replaces_only_the_host_of_its_issuer() {
        let base = url("https://auth.example.com/shop", None);
        assert_eq!(base.page("login"), "https://auth.example.com/shop/login");
        assert_eq!(base.origin(), "https://auth.example.com");
        let own = url("https://auth.example.com:8443/base/shop", Some("login.shop.example.com"));
        assert_eq!(own.page("account/email"), "https://login.shop.example.com:8443/base/shop/account/email");
        assert_eq!(own.origin(), "https://login.shop.example.com:8443");
        assert_eq!(url("http://127.0.0.1:8080/shop", None).origin(), "http://127.0.0.1:8080");
    }
}
