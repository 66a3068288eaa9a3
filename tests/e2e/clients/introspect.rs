//! Introspection of client tokens, by ServiceAccounts and by the clients.

use std::{fs, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    client::ApiResponse,
    passwords::PASSWORD,
    process,
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
};
use serde_json::{Value, json};

use super::{
    ARGOCD, AS_GRAFANA, Auth, EMAIL, GRAFANA, OTHER_SECRET, OpenIdTest, SECRET, SPA, app, expect_invalid_client,
    rendered_client,
};
use crate::support::claims_of;

const HOUR: Duration = Duration::from_secs(3600);

/// A service with an App that lists a ServiceAccount. Of all clients, only Argo CD gets tokens with the appID as an
/// audience.
struct Introspection {
    test: OpenIdTest,
    /// The value of the ServiceAccount's `Authorization` header: `Bearer` and the token.
    caller: String,
}

impl Introspection {
    async fn start() -> Self {
        let issuer = ServiceAccountIssuer::new().unwrap();
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks().unwrap().to_string()).unwrap();
        let administrator =
            json!({ "serviceAccount": { "namespace": "shop", "name": "asks" }, "role": "Introspector" });
        let app = app().set("/administrators", json!([administrator]));
        let mut argocd = rendered_client(ARGOCD, Some(OTHER_SECRET));
        argocd["tokens"]["audiences"] = json!([app.id()]);
        let clients = vec![rendered_client(GRAFANA, Some(SECRET)), argocd, rendered_client(SPA, None)];
        let builder = Stack::builder().args(["--service-account-keys", &keys.display().to_string()]);
        let test = OpenIdTest::from_builder(app, clients, builder).await;
        let caller = format!("Bearer {}", issuer.token("shop", "asks", AUDIENCE, HOUR).unwrap());
        Self { test, caller }
    }

    async fn introspect(&self, auth: Auth<'_>, token: &str) -> ApiResponse {
        self.test.post("introspect", auth, &[("token", token)]).await
    }

    async fn assert_inactive(&self, auth: Auth<'_>, token: &str) {
        let response = self.introspect(auth, token).await.expect(StatusCode::OK);
        assert_eq!(response.body, json!({ "active": false }));
    }

    async fn expect_active(&self, auth: Auth<'_>, token: &str) -> Value {
        let response = self.introspect(auth, token).await.expect(StatusCode::OK);
        assert_eq!(response.body["active"], true, "{}", response.text);
        response.body
    }
}

#[tokio::test]
async fn a_service_account_sees_only_tokens_that_are_for_the_app() {
    let introspection = Introspection::start().await;
    let test = &introspection.test;
    let caller = Auth::Header(&introspection.caller);
    let mut browser = test.logged_in_browser().await;
    let grafana = test.tokens_in(&mut browser, "openid email offline_access").await;
    introspection.assert_inactive(caller, grafana.string("access_token")).await;
    introspection.assert_inactive(caller, grafana.string("refresh_token")).await;
    introspection.assert_inactive(caller, grafana.string("id_token")).await;

    let code = test.code(&mut browser, ARGOCD, &[("scope", "openid email offline_access")]).await;
    let argocd = test.exchange(Auth::Basic(ARGOCD, OTHER_SECRET), &code, None).await.expect(StatusCode::OK);
    let active = introspection.expect_active(caller, argocd.string("access_token")).await;
    let mut expected = claims_of(argocd.string("access_token"));
    expected["active"] = json!(true);
    expected["token_type"] = json!("Bearer");
    assert_eq!(active, expected);
    assert_eq!((&active["client_id"], &active["scope"]), (&json!(ARGOCD), &json!("openid email offline_access")));
    introspection.assert_inactive(caller, argocd.string("refresh_token")).await;

    let login = test.client().login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let own = introspection.expect_active(caller, login.string("token")).await;
    assert_eq!((&own["client_id"], own.get("scope")), (&json!(test.test_app.id()), None));
}

#[tokio::test]
async fn a_client_sees_its_own_tokens() {
    let introspection = Introspection::start().await;
    let test = &introspection.test;
    let mut browser = test.logged_in_browser().await;
    let tokens = test.tokens_in(&mut browser, "openid profile offline_access").await;
    let access = introspection.expect_active(AS_GRAFANA, tokens.string("access_token")).await;
    assert_eq!((&access["token_type"], &access["client_id"]), (&json!("Bearer"), &json!(GRAFANA)));
    assert!(access["name"].is_string() && access.get("email").is_none(), "{access}");
    let refresh = introspection.expect_active(Auth::Post(GRAFANA, SECRET), tokens.string("refresh_token")).await;
    assert_eq!((&refresh["token_type"], refresh.get("exp")), (&json!("refresh_token"), None));
    for name in ["access_token", "refresh_token"] {
        introspection.assert_inactive(Auth::Basic(ARGOCD, OTHER_SECRET), tokens.string(name)).await;
    }
    let login = test.client().login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    introspection.assert_inactive(AS_GRAFANA, login.string("token")).await;
    introspection.assert_inactive(AS_GRAFANA, login.string("refresh_token")).await;

    let next = test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await.expect(StatusCode::OK);
    introspection.assert_inactive(AS_GRAFANA, tokens.string("refresh_token")).await;
    test.post("revoke", AS_GRAFANA, &[("token", next.string("refresh_token"))]).await.expect(StatusCode::OK);
    for name in ["access_token", "refresh_token"] {
        introspection.assert_inactive(AS_GRAFANA, next.string(name)).await;
    }
}

#[tokio::test]
async fn only_listed_service_accounts_and_clients_with_a_secret_can_introspect() {
    let introspection = Introspection::start().await;
    let test = &introspection.test;
    let mut browser = test.logged_in_browser().await;
    let tokens = test.public_tokens(&mut browser, "openid").await;
    let token = tokens.string("access_token");
    let bearer = format!("Bearer {token}");
    for auth in [
        Auth::Nothing,
        Auth::Public(SPA),
        Auth::Public(GRAFANA),
        Auth::Public("unknown"),
        Auth::Basic(GRAFANA, "wrong"),
        Auth::Post(SPA, SECRET),
        Auth::Header(&bearer),
    ] {
        expect_invalid_client(introspection.introspect(auth, token).await);
    }
}
