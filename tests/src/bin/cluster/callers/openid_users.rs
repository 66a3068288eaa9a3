//! The pod `openid-users`: users of two groups, who sign in at an application behind oauth2-proxy, again and again.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use latchkey_tests::{passwords::PASSWORD, web_browser::WebBrowser};
use reqwest::{Method, StatusCode};
use serde_json::json;
use tokio::time::sleep;
use url::Url;

use super::{Api, CallerArgs};
use crate::scenario::string_field;

#[derive(clap::Args)]
pub(crate) struct OpenidUsersArgs {
    #[command(flatten)]
    caller: CallerArgs,
    /// URL of the application.
    #[arg(long)]
    application: Url,
    /// URL of the provider.
    #[arg(long)]
    provider: Url,
    /// IP address of the proxy in front of the application and the provider.
    #[arg(long)]
    front: IpAddr,
}

/// The line that the pod prints for a successful login.
pub(crate) const SIGNED_IN: &str = "signed in";
/// The beginning of the line that the pod prints for a failed login.
pub(crate) const FAILED: &str = "failed";
/// The group with access to the application.
const GROUP: &str = "ops";
/// Time between two logins.
const PAUSE: Duration = Duration::from_millis(200);

/// Prints a line for each login. Ends only if the first logins fail.
pub(crate) async fn run(options: &OpenidUsersArgs) -> Result<()> {
    let api = Api::connect(&options.caller).await?;
    let member = create_user(&api, "ada@example.com", GROUP).await?;
    let other = create_user(&api, "eve@example.com", "sales").await?;
    let (status, text) = sign_in(options, &other).await?;
    ensure!(status == StatusCode::FORBIDDEN, "a user of another group gets {status}: {text}");
    println!("a user of another group is refused");
    let mut failures = 0;
    loop {
        let outcome = sign_in(options, &member).await;
        match outcome {
            Ok((StatusCode::OK, text)) if text.contains(&member) => println!("{SIGNED_IN}"),
            Ok((status, text)) => {
                println!("{FAILED}: {status} {text}");
                failures += 1;
            }
            Err(error) => {
                println!("{FAILED}: {error:#}");
                failures += 1;
            }
        }
        ensure!(failures < 10, "too many logins failed");
        sleep(PAUSE).await;
    }
}

/// Creates a user who is a member of this group. Returns the email address.
async fn create_user(api: &Api, email: &str, group: &str) -> Result<String> {
    let user = json!({ "email": email, "email_verified": true, "name": "Ada Lovelace", "password": PASSWORD });
    let user = api.expect(Method::POST, "users", Some(&user), StatusCode::OK).await?;
    let id = string_field(&user, "id")?;
    for (path, body) in [(format!("groups/{group}"), Some(json!({}))), (format!("groups/{group}/members/{id}"), None)] {
        let (status, response) = api.call(Method::PUT, &path, body.as_ref()).await?;
        ensure!(status.is_success(), "{path}: {status} {response}");
    }
    Ok(email.to_owned())
}

/// Signs in with a new browser. Returns the status and the text of the last page.
async fn sign_in(options: &OpenidUsersArgs, email: &str) -> Result<(StatusCode, String)> {
    let front = SocketAddr::new(options.front, 80);
    let origins = [&options.application, &options.provider].map(|url| url.origin().ascii_serialization());
    let mut browser = WebBrowser::new(origins.map(|origin| (origin, front)))?;
    let page = browser.sign_in(options.application.as_str(), email, PASSWORD).await.context("the login")?;
    Ok((page.status, page.text()))
}
