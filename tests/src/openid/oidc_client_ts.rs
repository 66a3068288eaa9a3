//! `oidc-client-ts` in a single-page application: a public client in Chromium, which calls the provider from another
//! origin.

use std::{convert::Infallible, fs, net::SocketAddr, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};

use super::{GROUP, OpenIdProvider, User, jwt_header};
use crate::{browser::Browser, builders::Client, passwords::PASSWORD, process};

/// The name of the program, and of its folder in `tests/interop/openid`.
pub const NAME: &str = "oidc-client-ts";
/// The scopes that the program requests, without `offline_access`. So the public client gets a refresh token that ends
/// with the session of the browser.
const SCOPES: &str = "openid profile email groups";
const LIBRARY: &str = "node_modules/oidc-client-ts/dist/browser/oidc-client-ts.min.js";

/// What the page shows when the test can call its functions.
const LOADED: &str = "the program is loaded";

/// The site of the application. It ends when this value is dropped.
struct Site {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

/// Runs the scenario: sign in, refresh, rotate the keys, and log out. No secret is rotated, because a public client has
/// none.
pub async fn run(provider: &OpenIdProvider) -> Result<()> {
    let user = provider.create_user("ada@example.com", &[GROUP]).await?;
    let addr = process::free_addr();
    let client = Client::public(NAME, provider.app(), &format!("http://{addr}/callback"))
        .set("/scopes", json!(SCOPES.split(' ').collect::<Vec<_>>()))
        .set_own("postLogoutRedirectURLs", json!([format!("http://{addr}/signed-out")]));
    provider.apply_client(&client).await?;
    provider.publish_next_keys().await?;
    let site = Site::start(provider, addr, &client).await?;
    let browser = Browser::start_accepting_all_certificates().await?;

    site.begin(&browser).await;
    log_in(provider, &browser, &user).await;
    browser.wait_for_text(LOADED).await;
    let signed_in = call(&browser, "signedIn").await?;
    check(&signed_in["claims"], &user)?;
    let userinfo = call(&browser, "userinfo").await?;
    check(&userinfo, &user).context("userinfo")?;
    let refreshed = call(&browser, "refresh").await.context("refresh")?;
    check(&refreshed["claims"], &user)?;
    ensure!(refreshed["access_token"] != signed_in["access_token"], "the access token is the old one");

    provider.use_next_keys().await?;
    let rotated = call(&browser, "refresh").await.context("refresh with a rotated key")?;
    check(&rotated["claims"], &user)?;
    for token in ["access_token", "id_token"] {
        let kid = |tokens: &Value| -> Result<Value> {
            Ok(jwt_header(tokens[token].as_str().context("a token")?)?["kid"].clone())
        };
        ensure!(kid(&rotated)? != kid(&refreshed)?, "the {token} has the old key");
    }

    // A second login needs no password. But the user must consent again, because another program could listen at the
    // redirect URL.
    site.begin(&browser).await;
    browser.click("button[value=allow]").await;
    browser.wait_for_text(LOADED).await;
    check(&call(&browser, "signedIn").await?["claims"], &user)?;

    browser.run_script("window.program.signOut()").await;
    browser.wait_for_text("signed out").await;
    ensure!(call(&browser, "signedIn").await?.is_null(), "the session of the program is still there");
    site.begin(&browser).await;
    browser.text_of("#password").await;
    Ok(())
}

async fn log_in(provider: &OpenIdProvider, browser: &Browser, user: &User) {
    let login = format!("{}/login", provider.issuer());
    browser.wait_for_url("the login page", |url| url.as_str().starts_with(&login)).await;
    browser.fill("#email", &user.email).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("main .primary").await;
}

/// Calls a function of the page.
async fn call(browser: &Browser, function: &str) -> Result<Value> {
    let script = format!(
        "const done = arguments[arguments.length - 1];
         window.program.{function}().then(value => done({{ value }}), error => done({{ error: String(error) }}));"
    );
    let mut result = browser.run_async_script(&script).await;
    ensure!(result["error"].is_null(), "{function}: {}", result["error"]);
    Ok(result["value"].take())
}

fn check(claims: &Value, user: &User) -> Result<()> {
    ensure!(claims["sub"] == user.id.as_str() && claims["email"] == user.email.as_str(), "the claims are {claims}");
    ensure!(claims["groups"] == json!([GROUP]), "the claims are {claims}");
    Ok(())
}

// === impl Site ===

impl Site {
    async fn start(provider: &OpenIdProvider, addr: SocketAddr, client: &Client) -> Result<Self> {
        let folder = process::root().join("tests/interop/openid").join(NAME);
        ensure!(folder.join(LIBRARY).is_file(), "run tests/interop/openid/build {NAME}");
        let settings = json!({
            "authority": provider.issuer(),
            "client_id": client.client_id(),
            "redirect_uri": format!("http://{addr}/callback"),
            "post_logout_redirect_uri": format!("http://{addr}/signed-out"),
            "scope": SCOPES,
        });
        let files = Arc::new((folder, settings.to_string()));
        let listener = TcpListener::bind(addr).await?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let files = Arc::clone(&files);
                let service = service_fn(move |request| {
                    let files = Arc::clone(&files);
                    async move { Ok::<_, Infallible>(respond_with_file(&request, &files.0, &files.1)) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Ok(Self { addr, task })
    }

    /// Begins a login.
    async fn begin(&self, browser: &Browser) {
        browser.open(&format!("http://{}/", self.addr)).await;
        browser.wait_for_text(LOADED).await;
        browser.run_script("window.program.signIn()").await;
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn respond_with_file(request: &Request<Incoming>, folder: &Path, settings: &str) -> Response<Full<Bytes>> {
    let read = |path: &str| fs::read(folder.join(path)).ok();
    let (content_type, content) = match request.uri().path() {
        "/" | "/callback" | "/signed-out" => ("text/html; charset=utf-8", read("page.html")),
        "/page.js" => ("text/javascript", read("page.js")),
        "/oidc-client-ts.min.js" => ("text/javascript", read(LIBRARY)),
        "/settings.json" => ("application/json", Some(settings.as_bytes().to_owned())),
        _ => ("text/plain", None),
    };
    let mut response = Response::new(Full::default());
    match content {
        Some(content) => *response.body_mut() = Full::new(content.into()),
        None => *response.status_mut() = StatusCode::NOT_FOUND,
    }
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(content_type));
    response
}
