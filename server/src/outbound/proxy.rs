//! The install's proxy, through which social providers are reached where there is one: `HTTPS_PROXY` and `NO_PROXY`.

use std::{fmt, sync::Arc};

use http::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

/// Whether there is a proxy, and for whom.
#[derive(Clone, Default)]
pub struct Proxy(Option<Arc<Matcher>>);

/// It is not the URL of a proxy. The text does not quote it: it may hold a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("HTTPS_PROXY is not a URL such as http://proxy.example.com:3128")]
pub struct BadProxy;

// === impl Proxy ===

impl Proxy {
    /// By the usual variables, in capitals or not.
    pub fn from_env() -> Result<Self, BadProxy> {
        let get = |names: [&str; 2]| names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
        Self::new(&get(["HTTPS_PROXY", "https_proxy"]), &get(["NO_PROXY", "no_proxy"]))
    }

    /// `no`: names, which go for what is below them too, addresses and networks, with commas between them. An empty `url`
    /// is none.
    pub fn new(url: &str, no: &str) -> Result<Self, BadProxy> {
        if url.is_empty() {
            return Ok(Self(None));
        }
        // One that does not parse intercepts nothing, and is not to be passed over in silence.
        let any = Uri::from_static("https://provider.example");
        let usable = Matcher::builder().https(url.to_owned()).build().intercept(&any);
        if usable.is_none_or(|proxy| proxy.uri().scheme_str() != Some("http")) {
            return Err(BadProxy);
        }
        Ok(Self(Some(Arc::new(Matcher::builder().https(url.to_owned()).no(no.to_owned()).build()))))
    }

    /// The proxy for an address, and the login there; none where it is to be reached directly. What goes without TLS, in
    /// development alone, is never for a proxy.
    pub(crate) fn of(&self, uri: &Uri) -> Option<Intercept> {
        self.0.as_ref()?.intercept(uri)
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Proxy(…)" } else { "Proxy(none)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leads(proxy: &Proxy, uri: &'static str) -> Option<String> {
        proxy.of(&Uri::from_static(uri)).map(|proxy| proxy.uri().to_string())
    }

    #[test]
    fn tls_goes_by_the_proxy_but_where_it_is_said_not_to() {
        let proxy = Proxy::new("http://someone:hush@proxy.example:3128", "corp.example, 10.0.0.0/8").unwrap();
        assert_eq!(leads(&proxy, "https://github.com/x").as_deref(), Some("http://proxy.example:3128/"));
        assert_eq!(
            proxy.of(&Uri::from_static("https://github.com")).unwrap().basic_auth().unwrap(),
            "Basic c29tZW9uZTpodXNo"
        );
        for direct in ["https://corp.example/", "https://id.corp.example/", "https://10.1.2.3/", "http://github.com/"] {
            assert_eq!(leads(&proxy, direct), None, "{direct}");
        }
        assert!(leads(&proxy, "https://othercorp.example/").is_some());
        assert_eq!(format!("{proxy:?}"), "Proxy(…)");
        assert_eq!(leads(&Proxy::new("", "").unwrap(), "https://github.com"), None);
    }

    #[test]
    fn what_is_no_url_of_a_proxy_is_refused() {
        for bad in ["https://proxy.example", "socks5://proxy.example", "http://", "ftp://proxy.example", "a proxy"] {
            assert_eq!(Proxy::new(bad, "").err(), Some(BadProxy), "{bad}");
        }
        assert!(Proxy::new("proxy.example:3128", "*").is_ok());
    }
}
