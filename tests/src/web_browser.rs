//! A browser without scripts that goes from site to site: it keeps the cookies of each host, follows redirects, and
//! sends forms with their hidden fields.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use http::{HeaderMap, Method, StatusCode, header};
use url::{Url, form_urlencoded};

use crate::{
    client::unique_client_address,
    page_browser::{LoadedPage, PageForm},
};

/// The maximum number of redirects that a browser follows.
const MAX_REDIRECTS: usize = 20;
/// Timeout of a request. Every response arrives earlier.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A browser at one client address. Clones continue with the same cookies, but do not share new ones.
#[derive(Clone, Debug)]
pub struct WebBrowser {
    http: reqwest::Client,
    /// Servers without TLS, by the origin of the TLS proxy in front of them. The browser connects to the servers and
    /// not to the proxies.
    servers: BTreeMap<String, SocketAddr>,
    /// The values of the cookies, by host and name. As in real browsers, all ports of a host share cookies.
    cookies: BTreeMap<String, BTreeMap<String, String>>,
}

/// A step of a login: what the browser does with the page that it has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    LogIn,
    Consent,
    /// Sends the form that contains the code (`response_mode=form_post`).
    SendResponse,
}

// === impl WebBrowser ===

impl WebBrowser {
    /// A browser without cookies. `servers` are pairs of the origin of a TLS proxy and the server behind this proxy.
    /// For a URL of the origin, the browser connects to the server directly.
    pub fn new(servers: impl IntoIterator<Item = (String, SocketAddr)>) -> Result<Self> {
        let servers: BTreeMap<String, SocketAddr> = servers.into_iter().collect();
        let mut http =
            reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).timeout(REQUEST_TIMEOUT).no_proxy();
        // If all servers are on this machine, each browser has its own client address.
        if servers.values().all(|server| server.ip().is_loopback()) {
            http = http.local_address(unique_client_address());
        }
        Ok(Self { http: http.build()?, servers, cookies: BTreeMap::new() })
    }

    /// Opens a URL, and follows redirects. [`LoadedPage::address`] of the returned page is the complete URL.
    pub async fn open(&mut self, url: &str) -> Result<LoadedPage> {
        self.load(Method::GET, url.parse().with_context(|| url.to_owned())?, None, None).await
    }

    /// Sends a form of the page, with other values for some of its fields, and follows redirects.
    pub async fn submit(&mut self, page: &LoadedPage, form: &PageForm, fields: &[(&str, &str)]) -> Result<LoadedPage> {
        let mut sent = form.fields.clone();
        for (name, value) in fields {
            sent.retain(|(known, _)| known != name);
            sent.push(((*name).to_owned(), (*value).to_owned()));
        }
        let body = form_urlencoded::Serializer::new(String::new()).extend_pairs(&sent).finish();
        let address: Url = page.address.parse()?;
        let origin = address.origin().ascii_serialization();
        self.load(Method::POST, address.join(&form.action)?, Some(body), Some(origin)).await
    }

    /// Opens a URL that leads to a login, and logs in. Allows the access if the consent page is shown. Returns the last
    /// page, which can be an error page.
    pub async fn sign_in(&mut self, url: &str, email: &str, password: &str) -> Result<LoadedPage> {
        let mut page = self.open(url).await?;
        let mut last = None;
        while let Some((step, form)) = next_step(&page) {
            // If the service refuses a form, it shows the form again.
            ensure!(last != Some(step), "{step:?} failed at {}: {}", page.address, page.text());
            page = match step {
                Step::LogIn => self.submit(&page, &form, &[("email", email), ("password", password)]).await?,
                Step::Consent => self.submit(&page, &form, &[("decision", "allow")]).await?,
                Step::SendResponse => self.submit(&page, &form, &[]).await?,
            };
            last = Some(step);
        }
        Ok(page)
    }

    /// Whether the browser has a cookie for this URL's host with a name that begins with `prefix`.
    pub fn has_cookie(&self, url: &str, prefix: &str) -> bool {
        let host = url.parse::<Url>().ok().and_then(|url| url.host_str().map(str::to_owned)).unwrap_or_default();
        self.cookies.get(&host).is_some_and(|cookies| cookies.keys().any(|name| name.starts_with(prefix)))
    }

    async fn load(
        &mut self,
        mut method: Method,
        mut url: Url,
        mut body: Option<String>,
        origin: Option<String>,
    ) -> Result<LoadedPage> {
        for _ in 0..MAX_REDIRECTS {
            let (status, headers, text) = self.send(&method, &url, body.as_deref(), origin.as_deref()).await?;
            self.store_cookies(&url, &headers)?;
            let location = headers.get(header::LOCATION).filter(|_| status.is_redirection());
            let Some(location) = location else {
                return Ok(LoadedPage { status, headers, address: url.into(), html: text, external: None });
            };
            if !matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT) {
                (method, body) = (Method::GET, None);
            }
            url = url.join(location.to_str()?)?;
        }
        bail!("more than {MAX_REDIRECTS} redirects, the last to {url}")
    }

    async fn send(
        &self,
        method: &Method,
        url: &Url,
        body: Option<&str>,
        origin: Option<&str>,
    ) -> Result<(StatusCode, HeaderMap, String)> {
        let host = url.host_str().with_context(|| format!("{url} has a host"))?;
        let port = url.port_or_known_default().context("a port")?;
        // The name `localhost` can also mean ::1, but the servers of tests listen at 127.0.0.1.
        let server = match self.servers.get(&url.origin().ascii_serialization()) {
            Some(server) => *server,
            None if url.scheme() == "http" => SocketAddr::from(([127, 0, 0, 1], port)),
            None => bail!("no server for {url}"),
        };
        let mut target = url.clone();
        target.set_scheme("http").ok().context("http")?;
        target.set_ip_host(server.ip()).ok().context("an address")?;
        target.set_port(Some(server.port())).ok().context("a port")?;
        let authority = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let mut request = self.http.request(method.clone(), target).header(header::HOST, authority);
        if let Some(cookies) = self.cookies.get(host).filter(|cookies| !cookies.is_empty()) {
            let pairs: Vec<String> = cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
            request = request.header(header::COOKIE, pairs.join("; "));
        }
        if let Some(body) = body {
            let form = "application/x-www-form-urlencoded";
            request = request.header(header::CONTENT_TYPE, form).body(body.to_owned());
            if let Some(origin) = origin {
                request = request.header(header::ORIGIN, origin);
            }
        }
        let response = request.send().await.with_context(|| format!("{method} {url}"))?;
        let (status, headers) = (response.status(), response.headers().clone());
        Ok((status, headers, response.text().await.with_context(|| format!("{method} {url}"))?))
    }

    fn store_cookies(&mut self, url: &Url, headers: &HeaderMap) -> Result<()> {
        let cookies = self.cookies.entry(url.host_str().unwrap_or_default().to_owned()).or_default();
        for field in headers.get_all(header::SET_COOKIE) {
            let text = field.to_str()?;
            let pair = text.split(';').next().unwrap_or_default();
            let (name, value) = pair.split_once('=').with_context(|| format!("a cookie: {pair}"))?;
            let is_removed = value.is_empty() || value == "\"\"" || text.to_ascii_lowercase().contains("max-age=0");
            if is_removed {
                cookies.remove(name.trim());
            } else {
                cookies.insert(name.trim().to_owned(), value.to_owned());
            }
        }
        Ok(())
    }
}

/// The step that continues a login on this page, and the form for this step.
fn next_step(page: &LoadedPage) -> Option<(Step, PageForm)> {
    page.forms().into_iter().find_map(|form| {
        let has = |name: &str| form.fields.iter().any(|(known, _)| known == name);
        let path = form.action.split('?').next().unwrap_or_default();
        let step = match path.rsplit('/').next() {
            Some("login") if has("password") => Step::LogIn,
            Some("consent") => Step::Consent,
            _ if has("code") && has("iss") => Step::SendResponse,
            _ => return None,
        };
        Some((step, form))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(html: &str) -> LoadedPage {
        LoadedPage {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            address: "https://localhost:1/shop/login".to_owned(),
            html: html.to_owned(),
            external: None,
        }
    }

    #[test]
    fn the_next_step_of_a_login_is_found_by_the_form() {
        let login = "<form method=\"post\" action=\"/shop/login\"><input name=\"csrf\" value=\"a\">\
                     <input name=\"password\"></form>";
        assert_eq!(next_step(&page(login)).map(|(step, _)| step), Some(Step::LogIn));
        let consent = "<form method=\"post\" action=\"/shop/consent\"><input name=\"tx\" value=\"a\"></form>";
        assert_eq!(next_step(&page(consent)).map(|(step, _)| step), Some(Step::Consent));
        let response = "<form action=\"http://127.0.0.1:1/x\"><input name=\"code\" value=\"a\">\
                        <input name=\"iss\" value=\"b\"></form>";
        assert_eq!(next_step(&page(response)).map(|(step, _)| step), Some(Step::SendResponse));
        for other in ["", "<form action=\"/shop/register\"><input name=\"password\"></form>"] {
            assert!(next_step(&page(other)).is_none());
        }
    }

    #[test]
    fn cookies_belong_to_a_host_and_are_removed_by_a_max_age_of_zero() {
        let mut browser =
            WebBrowser::new([("https://localhost:1".to_owned(), SocketAddr::from(([127, 0, 0, 1], 1)))]).unwrap();
        let mut headers = HeaderMap::new();
        headers.append(header::SET_COOKIE, "a=1; Path=/; Secure".parse().unwrap());
        headers.append(header::SET_COOKIE, "b=2; Path=/".parse().unwrap());
        let url: Url = "https://localhost:1/shop/login".parse().unwrap();
        browser.store_cookies(&url, &headers).unwrap();
        assert!(browser.has_cookie("http://localhost:2/", "a") && browser.has_cookie("http://localhost:2/", "b"));
        assert!(!browser.has_cookie("http://127.0.0.1:2/", "a"));
        let removed = HeaderMap::from_iter([(header::SET_COOKIE, "a=; Max-Age=0".parse().unwrap())]);
        browser.store_cookies(&url, &removed).unwrap();
        assert!(!browser.has_cookie("http://localhost:2/", "a") && browser.has_cookie("http://localhost:2/", "b"));
    }
}
