//! One user's way through the service, step by step, from inside the cluster.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use latchkey_tests::dex;
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{COOKIE, HeaderMap, HeaderValue, LOCATION, SET_COOKIE},
    redirect,
};
use serde_json::{Value, json};
use url::{Host, Url};

use crate::install::until;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The public API: the Service, or the name for which the front stands.
    #[arg(long)]
    url: Url,
    #[arg(long)]
    app: String,
    /// The inbox to read mail from, by its IP address. Without it the way ends where a mail would be needed.
    #[arg(long)]
    inbox: Option<Url>,
    /// The address of what stands before the Service; then the way leads through the gate and by the provider too.
    #[arg(long)]
    front: Option<IpAddr>,
}

/// What is behind the gate, where users end after a social login, the Provider, and who logs in there.
const BEHIND_THE_GATE: &str = "http://shop.example.com/basket";
pub(crate) const DONE: &str = "https://shop.example.com/done";
pub(crate) const PROVIDER: &str = "dex";
const PERSON: &str = "grace@example.com";

const PASSWORD: &str = "a quiet harbour at noon";
const OTHER_PASSWORD: &str = "nine lanterns over the pier";
/// What a client says of its address, and nobody is to believe.
const FORGED: &str = "203.0.113.7";
/// Mail goes out within seconds.
const MAIL_SECONDS: u64 = 60;
/// The gate learns of a logout within a second.
const OUT_LIMIT: Duration = Duration::from_secs(10);

struct User<'a> {
    http: reqwest::Client,
    options: &'a Options,
    email: String,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let email = format!("ada-{:08x}@example.com", rand::random::<u32>());
    let user = User { http: http(options)?, options, email };
    user.account().await?;
    if options.inbox.is_some() {
        user.mails().await?;
    }
    if options.front.is_some() {
        user.social().await?;
    }
    println!("{} is through", user.email);
    Ok(())
}

/// One that goes where it is told, and follows nobody.
fn http(options: &Options) -> Result<reqwest::Client> {
    let http = reqwest::Client::builder().no_proxy().redirect(redirect::Policy::none());
    let mut http = http.timeout(Duration::from_secs(90));
    if let Some(front) = options.front {
        for url in [&options.url, &Url::parse(BEHIND_THE_GATE)?] {
            // The port is the URL's.
            http = http.resolve(url.host_str().context("a URL names a host")?, SocketAddr::new(front, 0));
        }
        http = http
            .default_headers(HeaderMap::from_iter([("x-forwarded-for".parse()?, HeaderValue::from_static(FORGED))]));
    }
    Ok(http.build()?)
}

fn location(response: &Response) -> Result<&str> {
    ensure!(response.status() == StatusCode::FOUND, "it is answered {}", response.status());
    Ok(response.headers().get(LOCATION).context("a redirect leads somewhere")?.to_str()?)
}

/// The same address without TLS, of which the front needs none.
fn plain(url: &str) -> String {
    url.replacen("https://", "http://", 1)
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("no {field}: {value}"))
}

// === impl User ===

impl User<'_> {
    async fn account(&self) -> Result<()> {
        let email = &self.email;
        self.post("email/register", &json!({ "name": "Ada", "email": email, "password": PASSWORD }), None).await?;
        let login = self.post("email/login", &json!({ "email": email, "password": PASSWORD }), None).await?;
        ensure!(login["user"]["email"] == *email, "whose login is that? {}", login["user"]);
        let refresh = json!({ "refresh_token": text(&login, "refresh_token")? });
        let refreshed = self.post("token", &refresh, None).await?;
        let token = text(&refreshed, "access_token")?;
        ensure!(token != text(&login, "token")?, "the refreshed token is the old one");

        let jwks = self.json(self.http.get(self.at(&format!("{}/.well-known/jwks.json", self.options.app))?)).await?;
        ensure!(jwks["keys"].as_array().is_some_and(|keys| !keys.is_empty()), "no keys: {jwks}");
        let sessions = self.json(self.http.get(self.own("sessions")?).bearer_auth(token)).await?;
        let own = self.own_address()?.to_string();
        ensure!(sessions["sessions"][0]["ip"] == own, "the client is {own}, the sessions are {sessions}");

        let user = text(&login["user"], "id")?;
        let (status, said) = self.let_in(token).await?;
        ensure!((status, &*said) == (StatusCode::OK, user), "the gate answers {user} {status}: {said}");
        println!("gate: {status}");
        self.post("logout", &Value::Null, Some(token)).await?;
        until("the gate is shut", OUT_LIMIT, || async {
            let (status, _) = self.let_in(token).await?;
            ensure!(status == StatusCode::UNAUTHORIZED, "it answers {status}");
            Ok(())
        })
        .await
    }

    async fn mails(&self) -> Result<()> {
        let email = &self.email;
        let (code, mail) = self.code(0).await?;
        let confirmed = self.post("email/confirm", &json!({ "code": code }), None).await?;
        let token = text(&confirmed, "access_token")?;
        self.post("email/verify", &Value::Null, Some(token)).await?;
        self.post("email/forgot-password", &json!({ "email": email }), None).await?;
        let (code, _) = self.code(mail).await?;
        let change = json!({ "email": email, "code": code, "password": OTHER_PASSWORD });
        self.post("email/confirm-password", &change, None).await?;
        self.post("email/login", &json!({ "email": email, "password": OTHER_PASSWORD }), None).await?;
        let old = self.http.post(self.own("email/login")?).json(&json!({ "email": email, "password": PASSWORD }));
        let old = old.send().await?.status();
        ensure!(old == StatusCode::UNAUTHORIZED, "the old password is answered {old}");
        Ok(())
    }

    async fn social(&self) -> Result<()> {
        let at = |operation| self.at(&format!("{}/{PROVIDER}/{operation}", self.options.app));
        let mut begin = at("redirect")?;
        begin.query_pairs_mut().append_pair("redirect_url", DONE);
        let begun = self.http.get(begin).send().await.context("redirect")?;
        let cookie = begun.headers().get(SET_COOKIE).context("a flow has a cookie")?.to_str()?;
        let cookie = cookie.split(';').next().unwrap_or_default();
        let back = dex::way_back(&self.http, &plain(location(&begun)?), PERSON).await.context("at the provider")?;
        let (back, callback) = (plain(back.as_str()), at("callback")?);
        ensure!(back.starts_with(callback.as_str()), "the provider sends the user elsewhere than {callback}");
        let came = self.http.get(back).header(COOKIE, cookie).send().await.context("callback")?;
        let done = Url::parse(location(&came)?)?;
        ensure!(done.as_str().starts_with(DONE), "the user ends at {}", done.path());
        let token = done.query_pairs().find(|(name, _)| name == "access_token").context("no access token")?.1;
        let (status, said) = self.let_in(&token).await?;
        ensure!(status == StatusCode::OK, "the gate answers {status}: {said}");
        println!("social: {status}");
        Ok(())
    }

    fn at(&self, path: &str) -> Result<Url> {
        Ok(self.options.url.join(path)?)
    }

    /// An endpoint of the App.
    fn own(&self, name: &str) -> Result<Url> {
        self.at(&format!("v1/{}/{name}", self.options.app))
    }

    /// The status of the gate and who it says is there: by the application behind the front, or by the gate itself.
    async fn let_in(&self, token: &str) -> Result<(StatusCode, String)> {
        let behind = self.options.front.is_some();
        let url = if behind { Url::parse(BEHIND_THE_GATE)? } else { self.own("authorize")? };
        let response = self.http.get(url).bearer_auth(token).send().await.context("the gate")?;
        let status = response.status();
        let user =
            response.headers().get("x-auth-user-id").map(|user| String::from_utf8_lossy(user.as_bytes()).into_owned());
        let body = response.text().await?;
        Ok((status, if behind { body } else { user.unwrap_or_default() }))
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value> {
        let response = request.send().await?;
        let (url, status) = (response.url().clone(), response.status());
        ensure!(status.is_success(), "{url}: {status}");
        Ok(response.json().await?)
    }

    async fn post(&self, name: &str, body: &Value, token: Option<&str>) -> Result<Value> {
        let mut request = self.http.request(Method::POST, self.own(name)?);
        if !body.is_null() {
            request = request.json(body);
        }
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = request.send().await.with_context(|| name.to_owned())?;
        let (status, text) = (response.status(), response.text().await?);
        if status != StatusCode::OK {
            bail!("{name} is answered {status}: {text}");
        }
        println!("{name}: {status}");
        Ok(serde_json::from_str(&text)?)
    }

    /// The code of the first mail after that one, and its number.
    async fn code(&self, after: u64) -> Result<(String, u64)> {
        let inbox = self.options.inbox.as_ref().context("there is an inbox")?;
        let mut url = inbox.join("api/messages/latest")?;
        let (after, wait) = (after.to_string(), MAIL_SECONDS.to_string());
        url.query_pairs_mut().extend_pairs([("to", &self.email), ("after", &after), ("wait", &wait)]);
        let mail = self.json(self.http.get(url)).await.context("the mail")?;
        Ok((text(&mail, "code")?.to_owned(), mail["id"].as_u64().context("a mail has a number")?))
    }

    /// That of this pod, on the way to the service.
    fn own_address(&self) -> Result<IpAddr> {
        let port = self.options.url.port_or_known_default().unwrap_or(80);
        let to = match (self.options.front, self.options.url.host()) {
            (Some(front), _) => SocketAddr::new(front, port),
            (None, Some(Host::Domain(name))) => {
                std::net::ToSocketAddrs::to_socket_addrs(&(name, port))?.next().context("the name has an address")?
            }
            (None, _) => bail!("the Service is called by its name"),
        };
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Nothing is sent.
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        Ok(socket.local_addr()?.ip())
    }
}
