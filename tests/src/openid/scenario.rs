//! What every program must be able to do: sign in, get the user's groups, refresh and log out, also after keys and
//! secrets have rotated.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{
    GROUP, OpenIdProvider, User,
    application::{Application, Peer, SignedIn},
    jwt_header,
};
use crate::{passwords::PASSWORD, process, web_browser::WebBrowser};

/// An annotation on a Client. Each new value rotates the Client's secret once.
const ROTATE_SECRET_ANNOTATION: &str = "latchkey.dev/rotate-secret";
/// How long the previous secret works, in seconds. No scenario takes longer.
const OVERLAP_SECONDS: u64 = 3600;
/// The name of the cookie of a browser session begins with this text.
const SESSION_COOKIE: &str = "__Host-latchkey-session.";
/// Time limit for a refresh. A program can wait for a second before it refreshes.
const REFRESH_LIMIT: Duration = Duration::from_secs(60);

/// Runs the scenario with one program.
pub async fn run(provider: &OpenIdProvider, peer: Peer) -> Result<()> {
    let user = provider.create_user("ada@example.com", &[GROUP]).await?;
    let addr = process::free_addr();
    let client = peer.client(provider, addr);
    let secret = json!({ "name": format!("{}-oidc", peer.name()), "rotationOverlapSeconds": OVERLAP_SECONDS });
    let client = client.set_own("secret", secret);
    provider.apply_client(&client).await?;
    // Publishes the next keys early, so that a program that caches the JWKS knows them before they sign tokens.
    provider.publish_next_keys().await?;
    let first_secret = provider.client_secret(&client)?;
    let mut application = Application::new(provider, peer, addr, &client).await?;
    application.start(&first_secret).await.context("start")?;

    let mut browser = provider.browser()?;
    let signed_in = application.sign_in(&mut browser, &user.email, PASSWORD).await.context("sign in")?;
    check(&signed_in, &user).context("sign in")?;
    if let Some(claims) = application.userinfo(&mut browser).await.context("userinfo")? {
        ensure!(claims["sub"] == user.id.as_str(), "userinfo is {claims}");
        ensure!(claims["email"] == user.email.as_str() && claims["groups"] == json!([GROUP]), "userinfo is {claims}");
    }
    let refreshed = refresh(&application, &mut browser, &signed_in, &user).await.context("refresh")?;

    rotate_keys(provider, &application, &mut browser, &refreshed, &user).await.context("rotated signing key")?;

    // The program signs in users with the previous secret, and then with the new one.
    let client = client.annotate(ROTATE_SECRET_ANNOTATION, "1");
    provider.apply_client(&client).await?;
    let second_secret = provider.client_secret(&client)?;
    ensure!(second_secret != first_secret, "the secret is the same");
    let previous = application.sign_in(&mut provider.browser()?, &user.email, PASSWORD).await;
    check(&previous.context("sign in with the previous secret")?, &user)?;
    application.start(&second_secret).await.context("start with the new secret")?;
    let mut browser = provider.browser()?;
    let signed_in = application.sign_in(&mut browser, &user.email, PASSWORD).await;
    check(&signed_in.context("sign in with the new secret")?, &user)?;
    refuse_wrong_secret(provider, &mut application, &user).await.context("wrong secret")?;
    application.start(&second_secret).await?;

    let mut browser = provider.browser()?;
    application.sign_in(&mut browser, &user.email, PASSWORD).await.context("sign in before the logout")?;
    log_out(provider, &application, &mut browser).await.context("log out")
}

/// Checks that this user is signed in, with the right claims.
fn check(signed_in: &SignedIn, user: &User) -> Result<()> {
    let claims = &signed_in.claims;
    let text = |name: &str| claims.get(name).and_then(|value| value.as_str());
    ensure!(text("sub") == Some(user.id.as_str()), "sub is not {}: {claims:?}", user.id);
    ensure!(text("email") == Some(user.email.as_str()), "email is not {}: {claims:?}", user.email);
    ensure!(claims.get("groups") == Some(&json!([GROUP])), "groups is not [{GROUP}]: {claims:?}");
    Ok(())
}

async fn refresh(
    application: &Application,
    browser: &mut WebBrowser,
    before: &SignedIn,
    user: &User,
) -> Result<SignedIn> {
    let refreshed = tokio::time::timeout(REFRESH_LIMIT, application.refresh(browser, before)).await;
    let refreshed = refreshed.context("it does not refresh")??;
    ensure!(refreshed.access_token != before.access_token, "the access token is the old one");
    check(&refreshed, user)?;
    check(&application.signed_in(browser).await?, user)?;
    Ok(refreshed)
}

/// Rotates the keys. Without a restart, the program refreshes a session and signs in a user with the new key.
async fn rotate_keys(
    provider: &OpenIdProvider,
    application: &Application,
    browser: &mut WebBrowser,
    before: &SignedIn,
    user: &User,
) -> Result<()> {
    provider.use_next_keys().await?;
    let refreshed = refresh(application, browser, before, user).await.context("refresh")?;
    let signed_in = application.sign_in(&mut provider.browser()?, &user.email, PASSWORD).await?;
    check(&signed_in, user)?;
    for after in [&refreshed, &signed_in] {
        let pairs = [(Some(&before.access_token), Some(&after.access_token))];
        for (old, new) in pairs.into_iter().chain([(before.id_token.as_ref(), after.id_token.as_ref())]) {
            let (Some(old), Some(new)) = (old, new) else { continue };
            let (old, new) = (jwt_header(old)?, jwt_header(new)?);
            ensure!(old["kid"] != new["kid"], "the same key signed: {new}");
        }
    }
    Ok(())
}

/// Checks that the program signs in nobody if it has a wrong secret.
async fn refuse_wrong_secret(provider: &OpenIdProvider, application: &mut Application, user: &User) -> Result<()> {
    application.start("lks_wrong-wrong-wrong-wrong-wrong-wrong-wrong-wrong").await?;
    let signed_in = application.sign_in(&mut provider.browser()?, &user.email, PASSWORD).await;
    ensure!(signed_in.is_err(), "{signed_in:?}");
    Ok(())
}

/// Logs out. Checks that this ends the session at the program and the session at the provider.
async fn log_out(provider: &OpenIdProvider, application: &Application, browser: &mut WebBrowser) -> Result<()> {
    let base_url = provider.stack().base_url();
    ensure!(browser.has_cookie(base_url, SESSION_COOKIE), "no session at the provider");
    // The provider asks nothing at a second login at the same program.
    let again = application.begin(browser).await?;
    ensure!(!again.address.starts_with(base_url), "the provider asks at {}", again.address);
    application.sign_out(browser).await?;
    ensure!(!browser.has_cookie(base_url, SESSION_COOKIE), "the session at the provider is still there");
    ensure!(application.signed_in(browser).await.is_err(), "the session at the program is still there");
    let login = application.begin(browser).await?;
    let path = format!("{}/login", provider.issuer());
    ensure!(login.address.starts_with(&path), "a new login begins at {}", login.address);
    Ok(())
}
