//! Callers in the cluster, by the keys of a real API server.

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
    client::{Anonymous, Answer},
    cluster::{Cluster, Endpoint, Install, Operator, PodServer, apply},
    control_plane::Account,
    eventually,
    service_account::{AUDIENCE, Issuer},
};
use serde_json::{Value, json};

use crate::support::{NAME, PASSWORD, claims_of};

/// Keys are asked for anew within seconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(60);
const EMAIL: &str = "ada@example.com";
/// The ServiceAccount that the App lists.
const LISTED: &str = "backoffice";
/// What gives every ServiceAccount the right to read who signs their tokens.
const DISCOVERY: &str = "system:service-account-issuer-discovery";

/// An install with an App that lists a ServiceAccount of its own namespace.
struct House<'a> {
    install: Install<'a>,
    app: App,
    _operator: Operator,
}

// === impl House ===

impl<'a> House<'a> {
    async fn of(cluster: &'a Cluster) -> Self {
        let install = cluster.install().await;
        let listed = json!({ "namespace": install.tenant(), "name": LISTED });
        let app =
            App::new("shop").set("/administrators", json!([{ "serviceAccount": listed, "role": "Introspector" }]));
        for (namespace, name) in
            [(install.tenant(), LISTED), (install.tenant(), "other"), (install.namespace(), LISTED)]
        {
            let account = json!({
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": { "namespace": namespace, "name": name },
            });
            apply(&install.admin(), &account).await.unwrap();
        }
        install.apply(&app).await.unwrap();
        let operator = install.operator().await;
        Self { install, app, _operator: operator }
    }

    /// A server that serves the App.
    async fn server(&self) -> PodServer {
        self.server_as(self.install.server_account()).await
    }

    async fn server_as(&self, account: &Account) -> PodServer {
        let server = self.install.server_as(account, &[]).await.unwrap();
        server.start_ready().await.unwrap();
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
        let client = Anonymous::new(server.public);
        eventually("the App is served", LIMIT, || async {
            let keys = client.get(&format!("{}/.well-known/jwks.json", self.app.id())).await;
            (keys.status == StatusCode::OK).then_some(())
        })
        .await;
        server
    }

    /// The token of a ServiceAccount of the App's namespace.
    async fn token(&self, name: &str, audience: &str) -> String {
        self.install.cluster().plane().token(self.install.tenant(), name, audience).await.unwrap()
    }

    async fn ask(&self, server: &PodServer, caller: &str, token: &str) -> Answer {
        let client = Anonymous::new(server.public);
        let request = client.request(Method::POST, &format!("v1/{}/introspect", self.app.id()));
        client.send(request.bearer_auth(caller).json(&json!({ "token": token }))).await
    }

    async fn takes(&self, server: &PodServer, caller: &str) {
        let answer = self.ask(server, caller, "token").await.expect(StatusCode::OK);
        assert_eq!(answer.body, json!({ "active": false }));
    }

    async fn refuses(&self, server: &PodServer, caller: &str) {
        self.ask(server, caller, "token").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    }

    async fn comes_to(&self, server: &PodServer, caller: &str, status: StatusCode) {
        eventually(&format!("the caller is answered {status}"), LIMIT, || async {
            (self.ask(server, caller, "token").await.status == status).then_some(())
        })
        .await;
    }

    /// The token again with changed claims, signed by this key under the name of the first one's.
    fn forge(&self, token: &str, pem: &str, change: impl FnOnce(&mut Value)) -> String {
        let head = token.split('.').next().unwrap();
        let head: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(head).unwrap()).unwrap();
        let mut claims = claims_of(token);
        change(&mut claims);
        let header = Header { kid: head["kid"].as_str().map(str::to_owned), ..Header::new(Algorithm::ES256) };
        jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_pem(pem.as_bytes()).unwrap()).unwrap()
    }
}

#[tokio::test]
async fn a_projected_token_of_a_listed_service_account_may_introspect_and_no_other() {
    let cluster = Cluster::shared().await;
    let plane = cluster.plane();
    let house = House::of(cluster).await;
    let server = house.server().await;
    let client = Anonymous::new(server.public);
    client.register(house.app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user = client.sign_in(house.app.id(), EMAIL, PASSWORD).await;

    let caller = house.token(LISTED, AUDIENCE).await;
    let answer = house.ask(&server, &caller, user.token()).await.expect(StatusCode::OK);
    assert_eq!(answer.body["active"], true);
    assert_eq!(answer.body["sub"], claims_of(user.token())["sub"]);

    let namesake = plane.token(house.install.namespace(), LISTED, AUDIENCE).await.unwrap();
    let key = plane.account_key().unwrap();
    let lasting = house.forge(&caller, &key, |claims| claims["exp"] = json!(claims["exp"].as_i64().unwrap() + 60));
    house.takes(&server, &lasting).await;
    let other_cluster = Issuer::new().unwrap();
    let stranger = other_cluster.token(house.install.tenant(), LISTED, AUDIENCE, LIMIT).unwrap();
    for (who, token) in [
        ("one for the API server", house.token(LISTED, "https://kubernetes.default.svc.cluster.local").await),
        ("one for somebody else", house.token(LISTED, "vault").await),
        ("an account that is not listed", house.token("other", AUDIENCE).await),
        ("its namesake elsewhere", namesake),
        ("an expired one", house.forge(&caller, &key, |claims| claims["exp"] = claims["iat"].clone())),
        ("one of another issuer", house.forge(&caller, &key, |claims| claims["iss"] = json!("https://other"))),
        ("another cluster's", stranger),
        ("another key under the name of the cluster's", house.forge(&caller, other_cluster.pem(), |_| {})),
        ("a user's", user.token().to_owned()),
    ] {
        let refused = house.ask(&server, &token, user.token()).await;
        assert_eq!(
            (refused.status, &refused.body["error"]),
            (StatusCode::UNAUTHORIZED, &json!("invalid_client")),
            "{who}"
        );
        assert_eq!(refused.body.get("active"), None, "{who}");
    }
    house.takes(&server, &caller).await;
}

#[tokio::test]
async fn keys_that_are_known_go_on_without_the_api_server_and_its_changes_are_followed() {
    let cluster = Cluster::start().await.unwrap();
    let plane = cluster.plane();
    let house = House::of(&cluster).await;
    let server = house.server().await;
    let caller = house.token(LISTED, AUDIENCE).await;
    house.takes(&server, &caller).await;

    plane.kill();
    house.takes(&server, &caller).await;
    // Who starts now serves the Apps it knew, and cannot tell who calls.
    server.terminate().await;
    server.start_ready().await.unwrap();
    let answer = house.ask(&server, &caller, "token").await;
    let answer = answer.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(answer.header("retry-after").is_some());
    house.refuses(&server, "garbage").await;

    // Back with a new key, which counts as soon as somebody shows it, beside the old one.
    plane.rotate_account_key(true).unwrap();
    plane.start_api_server().await.unwrap();
    house.comes_to(&server, &caller, StatusCode::OK).await;
    let newer = house.token(LISTED, AUDIENCE).await;
    house.takes(&server, &newer).await;
    house.takes(&server, &caller).await;

    // Two rotations later the first key is gone.
    plane.kill();
    plane.rotate_account_key(false).unwrap();
    plane.start_api_server().await.unwrap();
    let newest = house.token(LISTED, AUDIENCE).await;
    let account = plane.account(house.install.namespace(), house.install.server_account().name()).await.unwrap();
    let fresh = house.server_as(&account).await;
    house.takes(&fresh, &newest).await;
    for gone in [&caller, &newer] {
        house.refuses(&fresh, gone).await;
    }
}

#[tokio::test]
async fn servers_need_no_more_than_what_every_service_account_may_read() {
    let cluster = Cluster::start().await.unwrap();
    let house = House::of(&cluster).await;
    let caller = house.token(LISTED, AUDIENCE).await;
    let bindings: Api<ClusterRoleBinding> = Api::all(cluster.admin().await);
    let mut binding = bindings.get(DISCOVERY).await.unwrap();
    bindings.delete(DISCOVERY, &DeleteParams::default()).await.unwrap();
    let server = house.server().await;
    house.comes_to(&server, &caller, StatusCode::SERVICE_UNAVAILABLE).await;
    let logged = server.logged();
    assert!(logged.contains("forbidden") && logged.contains("/.well-known/openid-configuration"), "{logged}");

    // The same for the servers alone.
    binding.metadata.resource_version = None;
    binding.metadata.uid = None;
    let account = house.install.server_account();
    let subject = json!([{ "kind": "ServiceAccount", "namespace": account.namespace(), "name": account.name() }]);
    binding.subjects = serde_json::from_value(subject).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
    house.comes_to(&server, &caller, StatusCode::OK).await;
}
