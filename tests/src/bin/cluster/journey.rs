//! One user's way through the service, step by step, from inside the cluster.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use url::Url;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The Service of the public API.
    #[arg(long)]
    url: Url,
    #[arg(long)]
    app: String,
    /// The inbox to read mail from, by its IP address. Without it the way ends where a mail would be needed.
    #[arg(long)]
    inbox: Option<Url>,
}

const PASSWORD: &str = "a quiet harbour at noon";
const OTHER_PASSWORD: &str = "nine lanterns over the pier";
/// Mail goes out within seconds.
const MAIL_SECONDS: u64 = 60;

struct User<'a> {
    http: reqwest::Client,
    options: &'a Options,
    email: String,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(90)).build()?;
    let email = format!("ada-{:08x}@example.com", rand::random::<u32>());
    let user = User { http, options, email };
    let email = json!(user.email);
    user.post("register", &json!({ "name": "Ada", "email": email, "password": PASSWORD }), None).await?;
    let login = user.post("login", &json!({ "email": email, "password": PASSWORD }), None).await?;
    ensure!(login["token"].is_string(), "login answers a token");
    ensure!(login["user"]["email"] == email, "whose login is that? {}", login["user"]);
    let jwks = user.get(user.at(&format!("{}/.well-known/jwks.json", options.app))?).await?;
    ensure!(jwks["keys"].as_array().is_some_and(|keys| !keys.is_empty()), "no keys: {jwks}");
    if options.inbox.is_some() {
        let (code, mail) = user.code(0).await?;
        let confirmed = user.post("confirm", &json!({ "code": code }), None).await?;
        let token = confirmed["access_token"].as_str().context("confirm answers an access token")?;
        user.post("verify", &Value::Null, Some(token)).await?;
        user.post("forgot-password", &json!({ "email": email }), None).await?;
        let (code, _) = user.code(mail).await?;
        let change = json!({ "email": email, "code": code, "password": OTHER_PASSWORD });
        user.post("confirm-password", &change, None).await?;
        user.post("login", &json!({ "email": email, "password": OTHER_PASSWORD }), None).await?;
        let old = user.send(Method::POST, "login", &json!({ "email": email, "password": PASSWORD }), None).await?;
        ensure!(old.0 == 401, "the old password is answered {}", old.0);
    }
    println!("{} is through", user.email);
    Ok(())
}

// === impl User ===

impl User<'_> {
    fn at(&self, path: &str) -> Result<Url> {
        Ok(self.options.url.join(path)?)
    }

    async fn get(&self, url: Url) -> Result<Value> {
        let response = self.http.get(url.clone()).send().await?;
        ensure!(response.status().is_success(), "{url}: {}", response.status());
        Ok(response.json().await?)
    }

    async fn send(&self, method: Method, name: &str, body: &Value, token: Option<&str>) -> Result<(u16, String)> {
        let mut request = self.http.request(method, self.at(&format!("v1/{}/email/{name}", self.options.app))?);
        if !body.is_null() {
            request = request.json(body);
        }
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let response = request.send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    }

    async fn post(&self, name: &str, body: &Value, token: Option<&str>) -> Result<Value> {
        let (status, text) = self.send(Method::POST, name, body, token).await.with_context(|| name.to_owned())?;
        if status != 200 {
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
        let mail = self.get(url).await.context("the mail")?;
        let code = mail["code"].as_str().context("a mail has a code")?;
        Ok((code.to_owned(), mail["id"].as_u64().context("a mail has a number")?))
    }
}
