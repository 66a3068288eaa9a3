//! Callers in the cluster (ServiceAccounts that introspect tokens), verified with the keys of a real API server.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{Method, StatusCode};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    cluster::{Endpoint, Installation, OperatorProcess, ServerInPod, TestCluster, apply},
    control_plane::ServiceAccountToken,
    eventually,
    passwords::PASSWORD,
    service_account::{AUDIENCE, ServiceAccountIssuer},
};
use serde_json::{Value, json};

use crate::support::{NAME, claims_of};

/// Servers fetch new keys within seconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(60);
const EMAIL: &str = "ada@example.com";
/// The ServiceAccount that the App lists as a caller.
const LISTED_ACCOUNT: &str = "backoffice";
/// The ClusterRoleBinding that lets every ServiceAccount read the issuer's discovery document and keys.
const DISCOVERY_BINDING: &str = "system:service-account-issuer-discovery";

/// An installation with an App that lists a ServiceAccount in the App's namespace as a caller.
struct InstalledApp<'a> {
    install: Installation<'a>,
    app: App,
    _operator: OperatorProcess,
}

// === impl InstalledApp ===

impl<'a> InstalledApp<'a> {
    async fn start(cluster: &'a TestCluster) -> Self {
        let install = cluster.install().await;
        let listed = json!({ "namespace": install.tenant(), "name": LISTED_ACCOUNT });
        let app =
            App::new("shop").set("/administrators", json!([{ "serviceAccount": listed, "role": "Introspector" }]));
        for (namespace, name) in
            [(install.tenant(), LISTED_ACCOUNT), (install.tenant(), "other"), (install.namespace(), LISTED_ACCOUNT)]
        {
            let account = json!({
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": { "namespace": namespace, "name": name },
            });
            apply(&install.admin(), &account).await.unwrap();
        }
        install.apply(&app).await.unwrap();
        let operator = install.start_operator().await;
        Self { install, app, _operator: operator }
    }

    /// Starts a server and waits until it serves the App.
    async fn start_server(&self) -> ServerInPod {
        self.start_server_as(self.install.server_account()).await
    }

    async fn start_server_as(&self, account: &ServiceAccountToken) -> ServerInPod {
        let server = self.install.create_server(account, &[]).await.unwrap();
        server.start_ready().await.unwrap();
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
        let client = ApiClient::new(server.public);
        eventually("the App is served", LIMIT, || async {
            let keys = client.get(&format!("{}/.well-known/jwks.json", self.app.id())).await;
            (keys.status == StatusCode::OK).then_some(())
        })
        .await;
        server
    }

    /// A token of a ServiceAccount in the App's namespace.
    async fn token(&self, name: &str, audience: &str) -> String {
        self.install.cluster().plane().token(self.install.tenant(), name, audience).await.unwrap()
    }

    async fn introspect(&self, server: &ServerInPod, caller: &str, token: &str) -> ApiResponse {
        let client = ApiClient::new(server.public);
        let request = client.request(Method::POST, &format!("v1/{}/introspect", self.app.id()));
        client.send(request.bearer_auth(caller).json(&json!({ "token": token }))).await
    }

    async fn assert_accepted(&self, server: &ServerInPod, caller: &str) {
        let response = self.introspect(server, caller, "token").await.expect(StatusCode::OK);
        assert_eq!(response.body, json!({ "active": false }));
    }

    async fn assert_refused(&self, server: &ServerInPod, caller: &str) {
        self.introspect(server, caller, "token").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    }

    async fn wait_for_status(&self, server: &ServerInPod, caller: &str, status: StatusCode) {
        eventually(&format!("the caller gets {status}"), LIMIT, || async {
            (self.introspect(server, caller, "token").await.status == status).then_some(())
        })
        .await;
    }

    /// Changes the claims of `token`, and signs them with the key `pem`. The result has the `kid` of `token`.
    fn forge_token(&self, token: &str, pem: &str, change: impl FnOnce(&mut Value)) -> String {
        let head = token.split('.').next().unwrap();
        let head: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(head).unwrap()).unwrap();
        let mut claims = claims_of(token);
        change(&mut claims);
        let header = Header { kid: head["kid"].as_str().map(str::to_owned), ..Header::new(Algorithm::ES256) };
        jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_pem(pem.as_bytes()).unwrap()).unwrap()
    }
}

#[tokio::test]
async fn only_a_projected_token_of_a_listed_service_account_can_introspect() {
    let cluster = TestCluster::shared().await;
    let plane = cluster.plane();
    let installed = InstalledApp::start(cluster).await;
    let server = installed.start_server().await;
    let client = ApiClient::new(server.public);
    client.register(installed.app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user = client.authenticate(installed.app.id(), EMAIL, PASSWORD).await;

    let caller = installed.token(LISTED_ACCOUNT, AUDIENCE).await;
    let response = installed.introspect(&server, &caller, user.token()).await.expect(StatusCode::OK);
    assert_eq!(response.body["active"], true);
    assert_eq!(response.body["sub"], claims_of(user.token())["sub"]);

    let same_name = plane.token(installed.install.namespace(), LISTED_ACCOUNT, AUDIENCE).await.unwrap();
    let key = plane.account_key().unwrap();
    let extended =
        installed.forge_token(&caller, &key, |claims| claims["exp"] = json!(claims["exp"].as_i64().unwrap() + 60));
    installed.assert_accepted(&server, &extended).await;
    let other_cluster = ServiceAccountIssuer::new().unwrap();
    let foreign_token = other_cluster.token(installed.install.tenant(), LISTED_ACCOUNT, AUDIENCE, LIMIT).unwrap();
    for (who, token) in [
        (
            "a token for the API server",
            installed.token(LISTED_ACCOUNT, "https://kubernetes.default.svc.cluster.local").await,
        ),
        ("a token for another audience", installed.token(LISTED_ACCOUNT, "vault").await),
        ("an account that is not listed", installed.token("other", AUDIENCE).await),
        ("the same name in another namespace", same_name),
        ("an expired token", installed.forge_token(&caller, &key, |claims| claims["exp"] = claims["iat"].clone())),
        (
            "a token of another issuer",
            installed.forge_token(&caller, &key, |claims| claims["iss"] = json!("https://other")),
        ),
        ("a token of another cluster", foreign_token),
        ("another key under the key id of the cluster", installed.forge_token(&caller, other_cluster.pem(), |_| {})),
        ("a user's token", user.token().to_owned()),
    ] {
        let refused = installed.introspect(&server, &token, user.token()).await;
        assert_eq!(
            (refused.status, &refused.body["error"]),
            (StatusCode::UNAUTHORIZED, &json!("invalid_client")),
            "{who}"
        );
        assert_eq!(refused.body.get("active"), None, "{who}");
    }
    installed.assert_accepted(&server, &caller).await;
}

#[tokio::test]
async fn known_keys_work_without_the_api_server_and_new_keys_are_fetched() {
    let cluster = TestCluster::start().await.unwrap();
    let plane = cluster.plane();
    let installed = InstalledApp::start(&cluster).await;
    let server = installed.start_server().await;
    let caller = installed.token(LISTED_ACCOUNT, AUDIENCE).await;
    installed.assert_accepted(&server, &caller).await;

    plane.kill();
    installed.assert_accepted(&server, &caller).await;
    // A server that starts without the API server serves the Apps from its local copy, but cannot verify callers.
    server.terminate().await;
    server.start_ready().await.unwrap();
    let response = installed.introspect(&server, &caller, "token").await;
    let response = response.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(response.header("retry-after").is_some());
    installed.assert_refused(&server, "garbage").await;

    // The API server starts again with a new key, and still accepts the old key. The first token with the new key makes
    // the Latchkey server fetch the keys again.
    plane.rotate_account_key(true).unwrap();
    plane.start_api_server().await.unwrap();
    installed.wait_for_status(&server, &caller, StatusCode::OK).await;
    let newer_token = installed.token(LISTED_ACCOUNT, AUDIENCE).await;
    installed.assert_accepted(&server, &newer_token).await;
    installed.assert_accepted(&server, &caller).await;

    // The API server starts again with a third key, and no longer accepts the first two keys.
    plane.kill();
    plane.rotate_account_key(false).unwrap();
    plane.start_api_server().await.unwrap();
    let newest_token = installed.token(LISTED_ACCOUNT, AUDIENCE).await;
    let account =
        plane.account(installed.install.namespace(), installed.install.server_account().name()).await.unwrap();
    let new_server = installed.start_server_as(&account).await;
    installed.assert_accepted(&new_server, &newest_token).await;
    for removed in [&caller, &newer_token] {
        installed.assert_refused(&new_server, removed).await;
    }
}

#[tokio::test]
async fn servers_need_only_permissions_that_every_service_account_has() {
    let cluster = TestCluster::start().await.unwrap();
    let installed = InstalledApp::start(&cluster).await;
    let caller = installed.token(LISTED_ACCOUNT, AUDIENCE).await;
    let bindings: Api<ClusterRoleBinding> = Api::all(cluster.admin().await);
    let mut binding = bindings.get(DISCOVERY_BINDING).await.unwrap();
    bindings.delete(DISCOVERY_BINDING, &DeleteParams::default()).await.unwrap();
    let server = installed.start_server().await;
    installed.wait_for_status(&server, &caller, StatusCode::SERVICE_UNAVAILABLE).await;
    let logged = server.read_log();
    assert!(logged.contains("forbidden") && logged.contains("/.well-known/openid-configuration"), "{logged}");

    // Grants the permission again, but only to the servers.
    binding.metadata.resource_version = None;
    binding.metadata.uid = None;
    let account = installed.install.server_account();
    let subject = json!([{ "kind": "ServiceAccount", "namespace": account.namespace(), "name": account.name() }]);
    binding.subjects = serde_json::from_value(subject).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
    installed.wait_for_status(&server, &caller, StatusCode::OK).await;
}
