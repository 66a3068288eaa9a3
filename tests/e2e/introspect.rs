//! Introspection: the current state of a token, only for the ServiceAccounts that the App lists (specification:
//! Sessions and tokens, Introspection).

use std::{fs, path::PathBuf, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse, AuthenticatedClient},
    eventually,
    passwords::PASSWORD,
    process,
    service_account::{self, AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
};
use serde_json::{Value, json};

use crate::support::{NAME, TestApp, app, claims_of};

/// The server checks the key file every second; a loaded machine takes longer.
const RELOAD_LIMIT: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);
const EMAIL: &str = "ada@example.com";

/// A service outside Kubernetes. The issuer signs the tokens of the callers.
struct IntrospectionTest {
    test_app: TestApp,
    issuer: ServiceAccountIssuer,
    key_file: PathBuf,
}

/// Adds one ServiceAccount per role to the administrators of the App.
fn with_administrators(app: App) -> App {
    let administrator =
        |name: &str, role: &str| json!({ "serviceAccount": { "namespace": "shop", "name": name }, "role": role });
    app.set(
        "/administrators",
        json!([
            administrator("asks", "Introspector"),
            administrator("reads", "Reader"),
            administrator("runs", "UserAdmin"),
            administrator("imports", "Importer")
        ]),
    )
    .set(
        "/webhooks",
        json!([{
            "name": "sync",
            "events": ["user.created"],
            "pull": { "serviceAccount": { "namespace": "shop", "name": "fetches" } },
        }]),
    )
}

// === impl IntrospectionTest ===

impl IntrospectionTest {
    async fn start() -> Self {
        Self::start_with(with_administrators(app())).await
    }

    async fn start_with(app: App) -> Self {
        Self::from_builder(app, Stack::builder()).await
    }

    async fn from_builder(app: App, builder: latchkey_tests::stack::Builder) -> Self {
        let issuer = ServiceAccountIssuer::new().unwrap();
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks().unwrap().to_string()).unwrap();
        let builder = builder.args(["--service-account-keys", &keys.display().to_string()]);
        Self { test_app: TestApp::from_builder(app, builder).await, issuer, key_file: keys }
    }

    /// A token of a ServiceAccount in the namespace `shop`.
    fn caller_token(&self, name: &str) -> String {
        self.issuer.token("shop", name, AUDIENCE, HOUR).unwrap()
    }

    /// Introspects a token with a form, as RFC 7662 defines.
    async fn introspect(&self, caller: Option<&str>, token: &str) -> ApiResponse {
        let client = self.test_app.client();
        let mut request = self.request(&client);
        if let Some(caller) = caller {
            request = request.bearer_auth(caller);
        }
        client.send(request.body(format!("token={token}&token_type_hint=refresh_token"))).await
    }

    fn request(&self, client: &ApiClient) -> reqwest::RequestBuilder {
        let path = format!("v1/{}/introspect", self.test_app.id());
        client.request(Method::POST, &path).header("Content-Type", "application/x-www-form-urlencoded")
    }

    async fn assert_inactive(&self, token: &str, why: &str) {
        let response = self.introspect(Some(&self.caller_token("asks")), token).await.expect(StatusCode::OK);
        assert_eq!(response.body, json!({ "active": false }), "{why}");
    }

    async fn assert_active(&self, token: &str) -> Value {
        let response = self.introspect(Some(&self.caller_token("asks")), token).await.expect(StatusCode::OK);
        assert_eq!(response.body["active"], true, "{}", response.text);
        assert_eq!(response.header("cache-control"), Some("no-store"));
        response.body
    }
}

/// Logs in. Returns a client that sends the access token. Also returns the refresh token.
async fn log_in(test_app: &TestApp) -> (AuthenticatedClient, String) {
    let client = test_app.client();
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    (client.with_token(test_app.id(), login.string("token")), login.string("refresh_token").to_owned())
}

async fn refresh(test_app: &TestApp, token: &str) -> String {
    let response = test_app.client().refresh(test_app.id(), token).await.expect(StatusCode::OK);
    response.string("refresh_token").to_owned()
}

#[tokio::test]
async fn a_live_token_returns_its_claims() {
    let test = IntrospectionTest::start().await;
    test.test_app.register_and_confirm(EMAIL).await;
    let (user, refresh_token) = log_in(&test.test_app).await;
    let claims = claims_of(user.token());
    let mut expected = claims.clone();
    expected["active"] = json!(true);
    expected["token_type"] = json!("Bearer");
    assert_eq!(test.assert_active(user.token()).await, expected);
    assert_eq!(expected["email"], EMAIL);

    // `token_type` differs, so that a service that expects an access token does not accept a refresh token.
    let mut expected = json!({ "active": true, "token_type": "refresh_token", "email": EMAIL });
    for claim in ["iss", "client_id", "sub", "sid", "email_verified", "name", "auth_time", "amr"] {
        expected[claim] = claims[claim].clone();
    }
    assert_eq!(test.assert_active(&refresh_token).await, expected);

    // A JSON body works too, and a missing field is an error.
    let client = test.test_app.client();
    let path = format!("v1/{}/introspect", test.test_app.id());
    let ask = |body: Value| client.request(Method::POST, &path).bearer_auth(test.caller_token("asks")).json(&body);
    let response = client.send(ask(json!({ "token": user.token() }))).await.expect(StatusCode::OK);
    assert_eq!(response.body["sub"], claims["sub"]);
    let refused = client.send(ask(json!({}))).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(refused.body["fields"][0]["field"], "token");
    let empty = test.request(&client).bearer_auth(test.caller_token("asks")).body("token=");
    client.send(empty).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn the_response_for_an_invalid_token_says_only_that_it_is_inactive() {
    let (app, other) = (with_administrators(app()), App::new("other"));
    let test = IntrospectionTest::from_builder(app, Stack::builder().app(&other)).await;
    test.test_app.register_and_confirm(EMAIL).await;
    let (user, refresh_token) = log_in(&test.test_app).await;
    let other_app_user = test.test_app.client();
    other_app_user.register(other.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let other_app_user = other_app_user.login(other.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);

    for (token, why) in [
        ("garbage".to_owned(), "garbage"),
        ("a.b.c".to_owned(), "the form of a JWT"),
        (format!("lkr_{}", "A".repeat(80)), "the form of a refresh token"),
        (user.token()[..user.token().len() - 4].to_owned(), "a part of a token"),
        (other_app_user.string("token").to_owned(), "another App's access token"),
        (other_app_user.string("refresh_token").to_owned(), "another App's refresh token"),
        (test.caller_token("asks"), "the caller's own token"),
    ] {
        test.assert_inactive(&token, why).await;
    }

    // A refresh token is inactive after a newer one has replaced it.
    let newer_token = refresh(&test.test_app, &refresh_token).await;
    test.assert_inactive(&refresh_token, "a generation before").await;
    test.assert_active(&newer_token).await;
    // Introspection does not use up a refresh token.
    let newest_token = refresh(&test.test_app, &newer_token).await;

    user.send(user.request(Method::POST, "logout")).await.expect(StatusCode::OK);
    test.assert_inactive(user.token(), "an ended session's access token").await;
    test.assert_inactive(&newest_token, "an ended session's refresh token").await;
}

#[tokio::test]
async fn only_a_listed_service_account_can_introspect() {
    let test = IntrospectionTest::start().await;
    test.test_app.register_and_confirm(EMAIL).await;
    let (user, _) = log_in(&test.test_app).await;
    for role in ["asks", "reads", "runs"] {
        let response = test.introspect(Some(&test.caller_token(role)), user.token()).await.expect(StatusCode::OK);
        assert_eq!(response.body["active"], true, "{role}");
    }
    let refused = test.introspect(Some(&test.caller_token("imports")), user.token()).await;
    let refused = refused.expect_error(StatusCode::FORBIDDEN, "access_denied");
    assert_eq!(refused.body.get("active"), None, "an Importer can only import");
    let refused = test.introspect(Some(&test.caller_token("fetches")), user.token()).await;
    refused.expect_error(StatusCode::FORBIDDEN, "access_denied");

    let other_issuer = ServiceAccountIssuer::new().unwrap();
    let sign = |change: &dyn Fn(&mut Value)| {
        let mut claims = service_account::claims("shop", "asks", AUDIENCE, HOUR).unwrap();
        change(&mut claims);
        test.issuer.sign(&claims).unwrap()
    };
    test.introspect(Some(&sign(&|_| {})), user.token()).await.expect(StatusCode::OK);
    for (who, token) in [
        ("no caller", None),
        ("garbage", Some("garbage".to_owned())),
        ("a user", Some(user.token().to_owned())),
        ("an account that is not listed", Some(test.caller_token("other"))),
        ("the same name in another namespace", Some(test.issuer.token("blog", "asks", AUDIENCE, HOUR).unwrap())),
        ("a token for the API server", Some(test.issuer.token("shop", "asks", "https://kubernetes", HOUR).unwrap())),
        ("a token of another cluster", Some(other_issuer.token("shop", "asks", AUDIENCE, HOUR).unwrap())),
        ("an expired token", Some(sign(&|claims| claims["exp"] = claims["iat"].clone()))),
        ("a token of a node", Some(sign(&|claims| claims["sub"] = json!("system:node:shop")))),
        ("a token that contradicts itself", Some(sign(&|claims| claims["kubernetes.io"]["namespace"] = json!("blog")))),
    ] {
        let refused = test.introspect(token.as_deref(), user.token()).await;
        let refused = refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
        assert!(refused.header("www-authenticate").is_some_and(|header| header.starts_with("Bearer ")), "{who}");
        assert_eq!(refused.body.get("active"), None, "{who}");
        // All rejected callers get the same response, so that it does not reveal which ServiceAccounts are listed.
        let description = refused.string("error_description");
        assert_eq!(description, "show the token of a ServiceAccount that the App lists as an administrator", "{who}");
    }
    // The caller's token is accepted only in the Authorization header.
    let client = test.test_app.client();
    let request =
        test.request(&client).body(format!("token={}&access_token={}", user.token(), test.caller_token("asks")));
    client.send(request).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}

#[tokio::test]
async fn nobody_can_introspect_without_listed_accounts_or_without_keys() {
    let test = IntrospectionTest::start_with(app()).await;
    let refused = test.introspect(Some(&test.caller_token("asks")), "token").await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    // A change to the App's list of ServiceAccounts takes effect without a restart.
    test.test_app.stack.apply(&with_administrators(test.test_app.app.clone())).unwrap();
    eventually("the list is live", RELOAD_LIMIT, || async {
        (test.introspect(Some(&test.caller_token("asks")), "token").await.status == StatusCode::OK).then_some(())
    })
    .await;

    let test_app = TestApp::start_with(with_administrators(app())).await;
    let client = test_app.client();
    let request = client.request(Method::POST, &format!("v1/{}/introspect", test_app.id()));
    let request = request.bearer_auth(test.caller_token("asks")).json(&json!({ "token": "token" }));
    client.send(request).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}

#[tokio::test]
async fn keys_are_read_again_when_their_file_changes() {
    let test = IntrospectionTest::start().await;
    let new_issuer = ServiceAccountIssuer::new().unwrap();
    let token = new_issuer.token("shop", "asks", AUDIENCE, HOUR).unwrap();
    test.introspect(Some(&token), "token").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    test.introspect(Some(&test.caller_token("asks")), "token").await.expect(StatusCode::OK);
    let unfinished = test.key_file.with_extension("unfinished");
    fs::write(&unfinished, new_issuer.jwks().unwrap().to_string()).unwrap();
    fs::rename(&unfinished, &test.key_file).unwrap();
    eventually("the new key is accepted", RELOAD_LIMIT, || async {
        (test.introspect(Some(&token), "token").await.status == StatusCode::OK).then_some(())
    })
    .await;
    test.introspect(Some(&test.caller_token("asks")), "token")
        .await
        .expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    // While the key file is broken, the server keeps the keys that it has read before.
    fs::write(&test.key_file, "{").unwrap();
    let read_again = || async {
        let is_logged =
            test.test_app.stack.server().read_log().contains("the file has no keys; the previous keys stay in use");
        test.introspect(Some(&token), "token").await.expect(StatusCode::OK);
        is_logged.then_some(())
    };
    eventually("the server logs that the file is broken", RELOAD_LIMIT, read_again).await;
    test.introspect(Some(&token), "token").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn introspection_is_unavailable_without_redis() {
    let test = IntrospectionTest::from_builder(with_administrators(app()), Stack::builder().proxied()).await;
    test.test_app.register_and_confirm(EMAIL).await;
    let (user, refresh_token) = log_in(&test.test_app).await;
    test.test_app.stack.redis_proxy.as_ref().unwrap().refuse().await;
    for token in [user.token(), &refresh_token] {
        let response = test.introspect(Some(&test.caller_token("asks")), token).await;
        let response = response.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
        assert!(response.header("retry-after").is_some());
    }
    // A request that needs no lookup gets the same response as with Redis.
    test.assert_inactive("garbage", "garbage").await;
    test.introspect(None, user.token()).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}
