//! Refresh of client tokens.

use http::StatusCode;
use latchkey_tests::passwords::{NEW_PASSWORD, PASSWORD};
use serde_json::json;

use super::{
    ARGOCD, AS_GRAFANA, Auth, EMAIL, GRAFANA, OTHER_SECRET, OpenIdTest, SECRET, SPA, app, default_clients,
    expect_invalid_client, expect_invalid_grant, rendered_client,
};
use crate::support::claims_of;

#[tokio::test]
async fn each_refresh_returns_new_tokens_of_the_same_login() {
    let test = OpenIdTest::start().await;
    let first = test.tokens("openid email offline_access").await;
    let second = test.refresh(AS_GRAFANA, first.string("refresh_token")).await.expect(StatusCode::OK);
    let (before, after) = (claims_of(first.string("id_token")), claims_of(second.string("id_token")));
    for name in ["iss", "sub", "aud", "auth_time", "acr", "amr", "sid", "email"] {
        assert_eq!(before[name], after[name], "{name}");
    }
    assert_eq!((before["nonce"].as_str(), after.get("nonce")), (Some("n-1"), None));
    assert_ne!(first.string("refresh_token"), second.string("refresh_token"));
    assert_eq!(second.string("scope"), "openid email offline_access");
    test.userinfo(second.string("access_token")).await.expect(StatusCode::OK);
    // A repeated refresh gets the same token again, as for the App's own sessions.
    let repeated = test.refresh(AS_GRAFANA, first.string("refresh_token")).await.expect(StatusCode::OK);
    assert_eq!(repeated.string("refresh_token"), second.string("refresh_token"));
}

#[tokio::test]
async fn an_old_refresh_token_ends_the_session() {
    let test = OpenIdTest::start().await;
    let first = test.tokens("openid offline_access").await;
    let first = first.string("refresh_token");
    let second = test.refresh(AS_GRAFANA, first).await.expect(StatusCode::OK);
    let third = test.refresh(AS_GRAFANA, second.string("refresh_token")).await.expect(StatusCode::OK);
    expect_invalid_grant(test.refresh(AS_GRAFANA, first).await);
    expect_invalid_grant(test.refresh(AS_GRAFANA, third.string("refresh_token")).await);
    let ended = test.userinfo(third.string("access_token")).await;
    ended.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn only_the_client_itself_can_refresh() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid offline_access").await;
    let token = tokens.string("refresh_token");
    expect_invalid_grant(test.refresh(Auth::Basic(ARGOCD, OTHER_SECRET), token).await);
    expect_invalid_grant(test.refresh(Auth::Public(SPA), token).await);
    expect_invalid_client(test.refresh(Auth::Basic(GRAFANA, "wrong"), token).await);
    expect_invalid_client(test.refresh(Auth::Public(GRAFANA), token).await);
    expect_invalid_client(test.refresh(Auth::Nothing, token).await);
    // The App's own front ends send a refresh as JSON and without client credentials. The token of a client is refused
    // in such a request.
    let refused = test.client().refresh(test.test_app.id(), token).await;
    refused.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    // The client cannot use a refresh token of the App's own sessions.
    let login = test.client().login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    expect_invalid_grant(test.refresh(AS_GRAFANA, login.string("refresh_token")).await);
    test.client().refresh(test.test_app.id(), login.string("refresh_token")).await.expect(StatusCode::OK);
    test.refresh(AS_GRAFANA, token).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_scope_of_the_access_token_can_be_narrowed_but_not_widened() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid email offline_access").await;
    let token = tokens.string("refresh_token");
    let with = |scope: &'static str| [("grant_type", "refresh_token"), ("refresh_token", token), ("scope", scope)];
    for beyond in ["openid profile", "roles", "openid groups"] {
        let refused = test.post("token", AS_GRAFANA, &with(beyond)).await;
        refused.expect_error(StatusCode::BAD_REQUEST, "invalid_scope");
    }
    let narrowed = test.post("token", AS_GRAFANA, &with("openid")).await.expect(StatusCode::OK);
    assert_eq!(narrowed.string("scope"), "openid");
    assert_eq!(claims_of(narrowed.string("access_token"))["scope"], "openid");
    let claims = test.userinfo(narrowed.string("access_token")).await.expect(StatusCode::OK);
    assert!(claims.body.get("email").is_none(), "{}", claims.text);
    let full = test.refresh(AS_GRAFANA, narrowed.string("refresh_token")).await.expect(StatusCode::OK);
    assert_eq!(full.string("scope"), "openid email offline_access");
}

#[tokio::test]
async fn a_session_with_offline_access_continues_after_a_logout_and_ends_when_the_epoch_is_raised() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let offline = test.tokens_in(&mut browser, "openid offline_access").await;
    let online = test.tokens_in(&mut browser, "openid").await;
    let public = test.public_tokens(&mut browser, "openid").await;
    let public = test.refresh(Auth::Public(SPA), public.string("refresh_token")).await.expect(StatusCode::OK);
    test.log_out(&mut browser).await;
    for ended in [&online, &public] {
        let refused = test.userinfo(ended.string("access_token")).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    expect_invalid_grant(test.refresh(Auth::Public(SPA), public.string("refresh_token")).await);
    test.userinfo(offline.string("access_token")).await.expect(StatusCode::OK);
    let offline = test.refresh(AS_GRAFANA, offline.string("refresh_token")).await.expect(StatusCode::OK);

    let user = test.client().authenticate(test.test_app.id(), EMAIL, PASSWORD).await;
    let change = json!({ "current_password": PASSWORD, "password": NEW_PASSWORD });
    user.post("user/password", &change).await.expect(StatusCode::OK);
    expect_invalid_grant(test.refresh(AS_GRAFANA, offline.string("refresh_token")).await);
}

#[tokio::test]
async fn the_tokens_of_a_client_are_valid_only_while_the_client_is_served() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid offline_access").await;
    let (access_token, token) = (tokens.string("access_token"), tokens.string("refresh_token"));
    test.set_clients(vec![rendered_client(ARGOCD, Some(OTHER_SECRET))]).await;
    expect_invalid_client(test.refresh(AS_GRAFANA, token).await);
    test.userinfo(access_token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    // A new Client with the same name inherits nothing.
    let mut namesake = rendered_client(GRAFANA, Some(SECRET));
    namesake["uid"] = "uid-new".into();
    test.set_clients(vec![namesake]).await;
    expect_invalid_grant(test.refresh(AS_GRAFANA, token).await);
    test.userinfo(access_token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    // Serves the same Client again, as if the App accepted the Client's namespace again. The old token is valid again.
    test.set_clients(default_clients()).await;
    test.refresh(AS_GRAFANA, token).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_refresh_leaves_out_scopes_that_the_client_lost_and_fails_without_offline_access() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid email offline_access").await;
    let mut client = rendered_client(GRAFANA, Some(SECRET));
    client["scopes"] = json!(["openid", "offline_access"]);
    test.set_clients(vec![client.clone()]).await;
    let refreshed = test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await.expect(StatusCode::OK);
    assert_eq!(refreshed.string("scope"), "openid offline_access");
    assert!(claims_of(refreshed.string("id_token")).get("email").is_none());
    let claims = test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);
    assert!(claims.body.get("email").is_none(), "{}", claims.text);
    client["scopes"] = json!(["openid", "email"]);
    test.set_clients(vec![client]).await;
    expect_invalid_grant(test.refresh(AS_GRAFANA, refreshed.string("refresh_token")).await);
}

#[tokio::test]
async fn a_user_who_is_no_longer_allowed_cannot_refresh_and_the_token_stays_valid() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid offline_access").await;
    let mut closed = rendered_client(GRAFANA, Some(SECRET));
    closed["allowedGroups"] = json!(["ops"]);
    test.set_clients(vec![closed]).await;
    expect_invalid_grant(test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await);
    test.set_clients(default_clients()).await;
    test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_limit_on_refreshes_per_session_applies_to_client_sessions() {
    let test = OpenIdTest::start_with(app().limit("refreshesPerSession", &[(2, 600)]), default_clients()).await;
    let mut tokens = test.tokens("openid offline_access").await;
    for _ in 0..2 {
        tokens = test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await.expect(StatusCode::OK);
    }
    let limited = test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn client_sessions_with_a_refresh_token_are_in_the_list_of_sessions() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let offline = test.tokens_in(&mut browser, "openid offline_access").await;
    test.tokens_in(&mut browser, "openid").await;
    let user = test.client().authenticate(test.test_app.id(), EMAIL, PASSWORD).await;
    let listed = user.get("sessions").await.expect(StatusCode::OK);
    let sessions = listed.body["sessions"].as_array().unwrap();
    let of_clients: Vec<_> = sessions.iter().filter(|session| session["kind"] == "client").collect();
    let [of_client] = of_clients[..] else { panic!("{}", listed.text) };
    let id = claims_of(offline.string("access_token"))["sid"].clone();
    assert_eq!((&of_client["id"], &of_client["client_id"]), (&id, &json!(GRAFANA)));
    user.delete(&format!("sessions/{}", id.as_str().unwrap())).await.expect(StatusCode::OK);
    expect_invalid_grant(test.refresh(AS_GRAFANA, offline.string("refresh_token")).await);
}
