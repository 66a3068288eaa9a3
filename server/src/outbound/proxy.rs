//! The installation's proxy for connections to social providers and to receivers of webhooks: `HTTPS_PROXY` and
//! `NO_PROXY`.

use std::{fmt, sync::Arc};

use http::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

/// The proxy, if there is one, and the hosts that bypass it.
#[derive(Clone, Default)]
pub struct OutboundProxy(Option<Arc<Matcher>>);

/// The value of `HTTPS_PROXY` is not the URL of a proxy. The text of the error does not quote the value, because it can
/// contain credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("HTTPS_PROXY is not a URL such as http://proxy.example.com:3128")]
pub struct InvalidProxyUrl;

// === impl OutboundProxy ===

impl OutboundProxy {
    /// Reads `HTTPS_PROXY` and `NO_PROXY` from the environment. The names can be in upper or lower case.
    pub fn from_env() -> Result<Self, InvalidProxyUrl> {
        let get = |names: [&str; 2]| names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
        Self::new(&get(["HTTPS_PROXY", "https_proxy"]), &get(["NO_PROXY", "no_proxy"]))
    }

    /// Parses the values of `HTTPS_PROXY` (`url`) and `NO_PROXY`. An empty `url` means no proxy. `no_proxy`: IP
    /// addresses, networks and host names, separated by commas. A host name includes its subdomains.
    pub fn new(url: &str, no_proxy: &str) -> Result<Self, InvalidProxyUrl> {
        if url.is_empty() {
            return Ok(Self(None));
        }
        // A matcher with an invalid proxy URL reports no error and intercepts nothing. Therefore the matcher is tried
        // with an example URL.
        let example = Uri::from_static("https://provider.example");
        let proxy = Matcher::builder().https(url.to_owned()).build().intercept(&example);
        if proxy.is_none_or(|proxy| proxy.uri().scheme_str() != Some("http")) {
            return Err(InvalidProxyUrl);
        }
        Ok(Self(Some(Arc::new(Matcher::builder().https(url.to_owned()).no(no_proxy.to_owned()).build()))))
    }

    /// The proxy for a URL, with the credentials of the proxy. `None` if the connection is direct. Connections without
    /// TLS, which exist only in development, never use the proxy.
    pub(crate) fn intercept(&self, uri: &Uri) -> Option<Intercept> {
        self.0.as_ref()?.intercept(uri)
    }
}

impl fmt::Debug for OutboundProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Proxy(…)" } else { "Proxy(none)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxy_of(proxy: &OutboundProxy, uri: &'static str) -> Option<String> {
        proxy.intercept(&Uri::from_static(uri)).map(|proxy| proxy.uri().to_string())
    }

    #[test]
    fn tls_uses_the_proxy_except_for_excluded_hosts() {
        let proxy = OutboundProxy::new("http://someone:hush@proxy.example:3128", "corp.example, 10.0.0.0/8").unwrap();
        assert_eq!(proxy_of(&proxy, "https://github.com/x").as_deref(), Some("http://proxy.example:3128/"));
        assert_eq!(
            proxy.intercept(&Uri::from_static("https://github.com")).unwrap().basic_auth().unwrap(),
            "Basic c29tZW9uZTpodXNo"
        );
        for direct in ["https://corp.example/", "https://id.corp.example/", "https://10.1.2.3/", "http://github.com/"] {
            assert_eq!(proxy_of(&proxy, direct), None, "{direct}");
        }
        assert!(proxy_of(&proxy, "https://othercorp.example/").is_some());
        assert_eq!(format!("{proxy:?}"), "Proxy(…)");
        assert_eq!(proxy_of(&OutboundProxy::new("", "").unwrap(), "https://github.com"), None);
    }

    #[test]
    fn invalid_proxy_urls_are_rejected() {
        for bad in ["https://proxy.example", "socks5://proxy.example", "http://", "ftp://proxy.example", "a proxy"] {
            assert_eq!(OutboundProxy::new(bad, "").err(), Some(InvalidProxyUrl), "{bad}");
        }
        assert!(OutboundProxy::new("proxy.example:3128", "*").is_ok());
    }
}
