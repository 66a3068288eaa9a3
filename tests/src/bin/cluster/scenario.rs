//! A complete user scenario against the service, step by step, from inside the cluster.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use latchkey_tests::{
    dex,
    passwords::{NEW_PASSWORD, PASSWORD},
};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{COOKIE, HeaderMap, HeaderValue, LOCATION, SET_COOKIE},
    redirect,
};
use serde_json::{Value, json};
use url::{Host, Url};

use crate::{cluster_client::retry_until_ok, inbox};

#[derive(clap::Args)]
pub(crate) struct ScenarioArgs {
    /// URL of the public API, with the name of the Service or the host name of the proxy.
    #[arg(long)]
    url: Url,
    #[arg(long)]
    app: String,
    /// URL of the inbox, with an IP address. Without an inbox, the scenario skips the steps that need a mail.
    #[arg(long)]
    inbox: Option<Url>,
    /// IP address of the proxy in front of the Service. With a proxy, the scenario calls forward auth through the
    /// proxy, and also covers a social login.
    #[arg(long)]
    front: Option<IpAddr>,
}

/// A URL of the application behind forward auth.
const PROTECTED_URL: &str = "http://shop.example.com/basket";
/// The redirect URL of the social login.
pub(crate) const REDIRECT_URL: &str = "https://shop.example.com/done";
/// The name of the Provider in Kubernetes and in paths.
pub(crate) const PROVIDER_NAME: &str = "dex";
/// The user who logs in at the provider.
const PROVIDER_USER: &str = "grace@example.com";

/// A forged client address that the scenario sends in `X-Forwarded-For`. The service must not use this address.
const FORGED_ADDRESS: &str = "203.0.113.7";
/// Time limit for forward auth to reject a logged-out session. Normally, this takes about a second.
const LOGOUT_LIMIT: Duration = Duration::from_secs(10);

struct Scenario<'a> {
    http: reqwest::Client,
    options: &'a ScenarioArgs,
    email: String,
}

pub(crate) async fn run(options: &ScenarioArgs) -> Result<()> {
    let email = format!("ada-{:08x}@example.com", rand::random::<u32>());
    let user = Scenario { http: http_client(options)?, options, email };
    user.account_steps().await?;
    if options.inbox.is_some() {
        user.mail_steps().await?;
    }
    if options.front.is_some() {
        user.social_login_steps().await?;
    }
    println!("{}: all steps succeeded", user.email);
    Ok(())
}

/// A client that does not follow redirects. If there is a proxy, the client sends all requests to the proxy, with a
/// forged client address.
fn http_client(options: &ScenarioArgs) -> Result<reqwest::Client> {
    let http = reqwest::Client::builder().no_proxy().redirect(redirect::Policy::none());
    let mut http = http.timeout(Duration::from_secs(90));
    if let Some(front) = options.front {
        for url in [&options.url, &Url::parse(PROTECTED_URL)?] {
            // The client uses the port of the URL instead of this port.
            http = http.resolve(url.host_str().context("a URL names a host")?, SocketAddr::new(front, 0));
        }
        http = http.default_headers(HeaderMap::from_iter([(
            "x-forwarded-for".parse()?,
            HeaderValue::from_static(FORGED_ADDRESS),
        )]));
    }
    Ok(http.build()?)
}

fn redirect_location(response: &Response) -> Result<&str> {
    ensure!(response.status() == StatusCode::FOUND, "it returned {}", response.status());
    Ok(response.headers().get(LOCATION).context("a redirect has a Location")?.to_str()?)
}

/// This URL, but with `http`, because the scenario calls the proxy without TLS.
fn without_tls(url: &str) -> String {
    url.replacen("https://", "http://", 1)
}

pub(crate) fn string_field<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("no {field}: {value}"))
}

// === impl Scenario ===

impl Scenario<'_> {
    async fn account_steps(&self) -> Result<()> {
        let email = &self.email;
        self.post("email/register", &json!({ "name": "Ada", "email": email, "password": PASSWORD }), None).await?;
        let login = self.post("email/login", &json!({ "email": email, "password": PASSWORD }), None).await?;
        ensure!(login["user"]["email"] == *email, "the login belongs to {}", login["user"]);
        let refresh = json!({ "refresh_token": string_field(&login, "refresh_token")? });
        let refreshed = self.post("token", &refresh, None).await?;
        let token = string_field(&refreshed, "access_token")?;
        ensure!(token != string_field(&login, "token")?, "the refreshed token is the old one");

        let jwks = self
            .send_for_json(self.http.get(self.url(&format!("{}/.well-known/jwks.json", self.options.app))?))
            .await?;
        ensure!(jwks["keys"].as_array().is_some_and(|keys| !keys.is_empty()), "no keys: {jwks}");
        let sessions = self.send_for_json(self.http.get(self.app_url("sessions")?).bearer_auth(token)).await?;
        let own_address = self.own_address()?.to_string();
        ensure!(
            sessions["sessions"][0]["ip"] == own_address,
            "the client is {own_address}, the sessions are {sessions}"
        );

        let user = string_field(&login["user"], "id")?;
        let (status, reported) = self.forward_auth(token).await?;
        ensure!(
            (status, &*reported) == (StatusCode::OK, user),
            "forward auth returned {status} for {user}: {reported}"
        );
        println!("forward auth: {status}");
        self.post("logout", &Value::Null, Some(token)).await?;
        retry_until_ok("forward auth refuses the token", LOGOUT_LIMIT, || async {
            let (status, _) = self.forward_auth(token).await?;
            ensure!(status == StatusCode::UNAUTHORIZED, "it returned {status}");
            Ok(())
        })
        .await
    }

    async fn mail_steps(&self) -> Result<()> {
        let email = &self.email;
        let (code, mail) = self.wait_for_code(0).await?;
        let confirmed = self.post("email/confirm", &json!({ "code": code }), None).await?;
        let token = string_field(&confirmed, "access_token")?;
        self.post("email/verify", &Value::Null, Some(token)).await?;
        self.post("email/forgot-password", &json!({ "email": email }), None).await?;
        let (code, _) = self.wait_for_code(mail).await?;
        let change = json!({ "email": email, "code": code, "password": NEW_PASSWORD });
        self.post("email/confirm-password", &change, None).await?;
        self.post("email/login", &json!({ "email": email, "password": NEW_PASSWORD }), None).await?;
        let old = self.http.post(self.app_url("email/login")?).json(&json!({ "email": email, "password": PASSWORD }));
        let old = old.send().await?.status();
        ensure!(old == StatusCode::UNAUTHORIZED, "a login with the old password returned {old}");
        Ok(())
    }

    async fn social_login_steps(&self) -> Result<()> {
        let provider_endpoint = |operation| self.url(&format!("{}/{PROVIDER_NAME}/{operation}", self.options.app));
        let mut redirect_endpoint = provider_endpoint("redirect")?;
        redirect_endpoint.query_pairs_mut().append_pair("redirect_url", REDIRECT_URL);
        let redirect_response = self.http.get(redirect_endpoint).send().await.context("redirect")?;
        let cookie = redirect_response.headers().get(SET_COOKIE).context("a flow has a cookie")?.to_str()?;
        let cookie = cookie.split(';').next().unwrap_or_default();
        let callback_url =
            dex::callback_url(&self.http, &without_tls(redirect_location(&redirect_response)?), PROVIDER_USER)
                .await
                .context("at the provider")?;
        let (callback_url, callback) = (without_tls(callback_url.as_str()), provider_endpoint("callback")?);
        ensure!(callback_url.starts_with(callback.as_str()), "the provider does not redirect to {callback}");
        let response = self.http.get(callback_url).header(COOKIE, cookie).send().await.context("callback")?;
        let final_url = Url::parse(redirect_location(&response)?)?;
        ensure!(final_url.as_str().starts_with(REDIRECT_URL), "the callback redirects to {}", final_url.path());
        let token = final_url.query_pairs().find(|(name, _)| name == "access_token").context("no access token")?.1;
        let (status, reported) = self.forward_auth(&token).await?;
        ensure!(status == StatusCode::OK, "forward auth returned {status}: {reported}");
        println!("social: {status}");
        Ok(())
    }

    fn url(&self, path: &str) -> Result<Url> {
        Ok(self.options.url.join(path)?)
    }

    /// The URL of an App's endpoint.
    fn app_url(&self, name: &str) -> Result<Url> {
        self.url(&format!("v1/{}/{name}", self.options.app))
    }

    /// Sends a request with this token. Returns the status, and the user that forward auth reports. With a proxy, the
    /// request is for the application behind the proxy. Without a proxy, it is for the endpoint *authorize*.
    async fn forward_auth(&self, token: &str) -> Result<(StatusCode, String)> {
        let has_proxy = self.options.front.is_some();
        let url = if has_proxy { Url::parse(PROTECTED_URL)? } else { self.app_url("authorize")? };
        let response = self.http.get(url).bearer_auth(token).send().await.context("forward auth")?;
        let status = response.status();
        let user =
            response.headers().get("x-auth-user-id").map(|user| String::from_utf8_lossy(user.as_bytes()).into_owned());
        let body = response.text().await?;
        Ok((status, if has_proxy { body } else { user.unwrap_or_default() }))
    }

    async fn send_for_json(&self, request: RequestBuilder) -> Result<Value> {
        let response = request.send().await?;
        let (url, status) = (response.url().clone(), response.status());
        ensure!(status.is_success(), "{url}: {status}");
        Ok(response.json().await?)
    }

    async fn post(&self, name: &str, body: &Value, token: Option<&str>) -> Result<Value> {
        let mut request = self.http.request(Method::POST, self.app_url(name)?);
        if !body.is_null() {
            request = request.json(body);
        }
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = request.send().await.with_context(|| name.to_owned())?;
        let (status, text) = (response.status(), response.text().await?);
        if status != StatusCode::OK {
            bail!("{name} returned {status}: {text}");
        }
        println!("{name}: {status}");
        Ok(serde_json::from_str(&text)?)
    }

    /// As [`inbox::wait_for_code`], for a mail to this user.
    async fn wait_for_code(&self, after: u64) -> Result<(String, u64)> {
        let inbox = self.options.inbox.as_ref().context("there is an inbox")?;
        inbox::wait_for_code(&self.http, inbox, &self.email, after).await
    }

    /// The IP address from which this pod's requests reach the service.
    fn own_address(&self) -> Result<IpAddr> {
        let port = self.options.url.port_or_known_default().unwrap_or(80);
        let to = match (self.options.front, self.options.url.host()) {
            (Some(front), _) => SocketAddr::new(front, port),
            (None, Some(Host::Domain(name))) => {
                std::net::ToSocketAddrs::to_socket_addrs(&(name, port))?.next().context("the name has an address")?
            }
            (None, _) => bail!("the Service must be given by its name"),
        };
        let unspecified = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Connecting a UDP socket sends nothing.
        let socket = UdpSocket::bind(unspecified)?;
        socket.connect(to)?;
        Ok(socket.local_addr()?.ip())
    }
}
