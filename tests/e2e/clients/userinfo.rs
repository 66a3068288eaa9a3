//! Userinfo for clients. The tokens of clients work on no other endpoint.

use http::{Method, StatusCode};
use latchkey_tests::passwords::{NEW_PASSWORD, PASSWORD};
use serde_json::json;

use super::{AS_GRAFANA, Auth, EMAIL, GRAFANA, OpenIdTest, SECRET, app, rendered_client};
use crate::support::{NAME, claims_of};

#[tokio::test]
async fn a_client_gets_the_claims_of_its_scopes() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    for (scope, claims) in [
        ("openid", json!({})),
        ("openid profile", json!({ "name": NAME })),
        ("openid email", json!({ "email": EMAIL, "email_verified": true })),
        ("openid groups", json!({ "groups": [] })),
    ] {
        let tokens = test.tokens_in(&mut browser, scope).await;
        let mut expected = claims;
        expected["sub"] = claims_of(tokens.string("id_token"))["sub"].clone();
        let response = test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);
        assert_eq!(response.body, expected, "{scope}");
    }
    let claims = json!({ "userinfo": { "name": null }, "id_token": { "email": null } }).to_string();
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid"), ("claims", &claims)]).await;
    let tokens = test.exchange(AS_GRAFANA, &code, None).await.expect(StatusCode::OK);
    let response = test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);
    assert_eq!((&response.body["name"], response.body.get("email")), (&json!(NAME), None));
    let id_token = claims_of(tokens.string("id_token"));
    assert_eq!((&id_token["email"], id_token.get("name")), (&json!(EMAIL), None));
}

#[tokio::test]
async fn the_token_can_be_in_a_form_but_not_in_two_places() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid").await;
    let token = tokens.string("access_token");
    let bearer = format!("Bearer {token}");
    let in_form = test.post("userinfo", Auth::Nothing, &[("access_token", token)]).await.expect(StatusCode::OK);
    let in_header = test.post("userinfo", Auth::Header(&bearer), &[]).await.expect(StatusCode::OK);
    assert_eq!(in_form.body, in_header.body);
    let client = test.client();
    let request = client.request(Method::POST, &test.endpoint("userinfo")).bearer_auth(token);
    client.send(request).await.expect(StatusCode::OK);
    let both = test.post("userinfo", Auth::Header(&bearer), &[("access_token", token)]).await;
    both.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let none = test.post("userinfo", Auth::Nothing, &[]).await;
    none.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    for bad in ["x", "a.b.c", tokens.string("id_token")] {
        let refused = test.post("userinfo", Auth::Nothing, &[("access_token", bad)]).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    // With a token of the App's own sessions, userinfo returns the whole account.
    let login = test.client().login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let own = test.userinfo(login.string("token")).await.expect(StatusCode::OK);
    assert!(own.body["updated_at"].is_i64(), "{}", own.text);
}

#[tokio::test]
async fn the_token_of_a_client_works_on_no_other_endpoint() {
    let test = OpenIdTest::start().await;
    let tokens = test.tokens("openid profile email offline_access").await;
    let id = test.test_app.id();
    let user = test.client().with_token(id, tokens.string("access_token"));
    let session = claims_of(tokens.string("access_token"))["sid"].as_str().unwrap().to_owned();
    let own_session = format!("sessions/{session}");
    let password = json!({ "current_password": PASSWORD, "password": NEW_PASSWORD });
    for (method, path, body) in [
        (Method::POST, "email/verify", None),
        (Method::GET, "user", None),
        (Method::PATCH, "user", Some(json!({ "name": "Eve" }))),
        (Method::DELETE, "user", Some(json!({ "password": PASSWORD }))),
        (Method::POST, "user/password", Some(password)),
        (Method::POST, "user/email", Some(json!({ "email": "eve@example.com", "password": PASSWORD }))),
        (Method::GET, "user/identities", None),
        (Method::POST, "user/identities/github", Some(json!({ "token": "x" }))),
        (Method::DELETE, "user/identities/github", None),
        (Method::GET, "user/activity", None),
        (Method::GET, "sessions", None),
        (Method::DELETE, "sessions", None),
        (Method::DELETE, own_session.as_str(), None),
        (Method::POST, "logout", None),
        (Method::GET, "authorize", None),
        (Method::GET, "authorize/orders", None),
    ] {
        let request = user.request(method.clone(), path);
        let request = if let Some(body) = body { request.json(&body) } else { request };
        let response = user.send(request).await;
        assert_eq!(
            (response.status, response.body["error"].as_str()),
            (StatusCode::UNAUTHORIZED, Some("invalid_token")),
            "{method} {path}: {}",
            response.text
        );
    }
    // The refused calls have changed nothing.
    let login = test.client().login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let account = test.client().with_token(id, login.string("token")).get("user").await.expect(StatusCode::OK);
    assert_eq!((account.string("name"), account.string("email")), (NAME, EMAIL));
    test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn forward_auth_admits_a_client_token_with_the_app_as_audience_until_the_client_is_removed() {
    let mut client = rendered_client(GRAFANA, Some(SECRET));
    let app = app();
    client["tokens"]["audiences"] = json!([app.id()]);
    let test = OpenIdTest::start_with(app, vec![client]).await;
    let tokens = test.tokens("openid email offline_access").await;
    let user = test.client().with_token(test.test_app.id(), tokens.string("access_token"));
    let admitted = user.get("authorize").await.expect(StatusCode::OK);
    assert_eq!(admitted.header("x-auth-email"), Some(EMAIL));
    let session = claims_of(tokens.string("access_token"))["sid"].as_str().unwrap().to_owned();
    assert_eq!(admitted.header("x-auth-session-id"), Some(session.as_str()));
    assert_eq!(admitted.header("x-auth-name"), Some(""), "there is no scope profile");
    let tokens_with_name = test.tokens("openid profile").await;
    let named = test.client().with_token(test.test_app.id(), tokens_with_name.string("access_token"));
    let named = named.get("authorize").await.expect(StatusCode::OK);
    assert!(!named.header("x-auth-name").unwrap().is_empty());
    assert_eq!((named.header("x-auth-email"), named.header("x-auth-email-verified")), (Some(""), Some("false")));
    // All other calls still refuse the token.
    user.get("user").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    test.set_clients(Vec::new()).await;
    user.get("authorize").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}
