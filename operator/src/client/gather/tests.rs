use http::{Method, StatusCode};
use kube::core::DeserializeGuard;
use latchkey_crds::rendered::RenderedClientAuthentication;
use serde_json::{Value, json};

use super::*;
use crate::{
    app::mock_api::{MockApi, context},
    client::{
        fixtures::{app, client_with, record_document, rendered_secret, web},
        prune::remove_deleted_clients,
        render::{render, size},
        select::MAX_CLIENTS_BYTES,
    },
};

const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-platform";

/// The operator's copies of the Clients of a cluster with the App `identity/platform`.
struct TestCluster {
    context: Context,
}

impl TestCluster {
    fn new(script: &MockApi) -> Self {
        Self { context: context(script.client()).0 }
    }

    fn add(&self, client: Value) {
        let client: WatchedClient = serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into();
        let name = NamespacedName::from_metadata(client.meta());
        self.context.objects.client_index.update(&name, None, Some(&client));
        self.context.objects.clients.insert(name, &client);
    }

    fn delete(&self, name: &str) {
        let name = NamespacedName::new("identity", name);
        let client = self.context.objects.clients.remove(&name).unwrap();
        self.context.objects.client_index.update(&name, Some(&client), None);
    }

    /// Returns the names of the clients that the document gets.
    async fn select(&self) -> Vec<String> {
        let app_id = "platform".parse().unwrap();
        let selected = select_for_app(&app(json!({})), &app_id, &self.context).await.unwrap();
        selected.rendered.into_iter().map(|client| client.name).collect()
    }
}

fn client(name: &str, fields: Value) -> Value {
    serde_json::to_value(client_with("identity", name, fields)).unwrap()
}

/// A Client with a spec that this operator cannot decode.
fn undecodable(name: &str) -> Value {
    let mut client = client(name, json!({}));
    client["spec"]["appRef"] = json!(7);
    client
}

/// The form of a Client in a document, without credentials, so that the client cannot authenticate.
fn rendered(name: &str) -> RenderedClient {
    let client = client_with("identity", name, json!({}));
    render(&client, client.client_id().unwrap(), RenderedClientAuthentication::Unresolved)
}

/// Returns a mock API server that responds `times` times with a published document of these clients.
fn with_document(times: usize, names: &'static [&'static str]) -> MockApi {
    (0..times).fold(MockApi::default(), |script, _| {
        script.expect(Method::GET, RENDERED, move |_| {
            let clients = names.iter().map(|name| rendered(name)).collect();
            (StatusCode::OK, rendered_secret(clients))
        })
    })
}

#[tokio::test]
async fn clients_are_considered_in_the_order_of_age_then_namespace_and_name() {
    let cluster = TestCluster::new(&MockApi::default());
    let (early, late) = (Some("2026-01-01T00:00:00Z"), Some("2026-01-02T00:00:00Z"));
    let sorted = [(early, "b", "c"), (late, "a", "b"), (late, "b", "a"), (late, "b", "b"), (None, "a", "a")];
    for (created, namespace, name) in sorted.into_iter().rev() {
        let mut client = serde_json::to_value(client_with(namespace, name, json!({}))).unwrap();
        if let Some(created) = created {
            client["metadata"]["creationTimestamp"] = json!(created);
        }
        cluster.add(client);
    }
    let app = app(json!({ "clients": { "namespaces": { "from": "All" } } }));
    let (considered, decisions) = consider(&app, &NamespacedName::new("identity", "platform"), &cluster.context);
    let names: Vec<_> = considered.iter().map(|one| one.name.to_string()).collect();
    assert_eq!(names, sorted.map(|(_, namespace, name)| format!("{namespace}/{name}")));
    assert!(decisions.is_empty());
}

#[tokio::test]
async fn a_client_that_is_recreated_for_another_app_during_the_selection_is_not_considered() {
    let cluster = TestCluster::new(&MockApi::default());
    let (app, app_name) = (app(json!({})), NamespacedName::new("identity", "platform"));
    cluster.add(client("argo", json!({})));
    cluster.add(client("grafana", json!({})));
    let found = find_granted(&app, &app_name, &cluster.context);
    assert_eq!(found.len(), 2);
    cluster.delete("grafana");
    let mut recreated = client("grafana", json!({ "appRef": { "name": "another" } }));
    recreated["metadata"]["uid"] = json!("another");
    cluster.add(recreated);
    let (considered, decisions) = decode_oldest(found, &app_name, &cluster.context);
    let names: Vec<_> = considered.iter().map(|one| one.name.name()).collect();
    assert_eq!(names, ["argo"]);
    assert!(decisions.is_empty());
}

#[tokio::test]
async fn an_undecodable_client_is_found_in_the_document_by_its_uid_after_a_start() {
    let script = with_document(2, &["grafana", "argo"]);
    let cluster = TestCluster::new(&script);
    cluster.add(undecodable("grafana"));
    let mut recreated = undecodable("argo");
    recreated["metadata"]["uid"] = json!("another");
    cluster.add(recreated);
    assert_eq!(cluster.select().await, [""; 0], "there is no document, so none is read");
    record_document(&cluster.context, vec![rendered("grafana"), rendered("argo")]);
    assert_eq!(cluster.select().await, ["grafana"]);
    cluster.delete("grafana");
    assert_eq!(cluster.select().await, [""; 0]);
    script.finish();
}

#[tokio::test]
async fn an_undecodable_client_stays_served_after_a_start_even_if_its_app_could_not_be_decoded_at_first() {
    let script = with_document(2, &["grafana"]);
    let cluster = TestCluster::new(&script);
    cluster.add(undecodable("grafana"));
    record_document(&cluster.context, vec![rendered("grafana")]);
    let app = NamespacedName::new("identity", "platform");
    assert_eq!(remove_deleted_clients(&app, &cluster.context).await.unwrap(), None);
    assert_eq!(cluster.select().await, ["grafana"]);
    script.finish();
}

#[tokio::test]
async fn a_client_that_is_served_without_a_secret_stays_in_the_document_after_a_start() {
    let script = with_document(1, &["grafana"]);
    let cluster = TestCluster::new(&script);
    cluster.add(client("grafana", json!({})));
    cluster.add(client("new", json!({})));
    assert_eq!(cluster.select().await, [""; 0], "a new Client enters the document together with its secret");
    record_document(&cluster.context, vec![rendered("grafana")]);
    assert_eq!(cluster.select().await, ["grafana"]);
    script.finish();
}

#[tokio::test]
async fn a_refused_client_without_a_secret_stays_served_as_it_was_accepted_last() {
    let script = with_document(1, &["grafana"]);
    let cluster = TestCluster::new(&script);
    cluster.add(client("grafana", json!({ "scopes": ["groups"] })));
    record_document(&cluster.context, vec![rendered("grafana")]);
    assert_eq!(cluster.select().await, ["grafana"]);
    script.finish();
}

#[tokio::test]
async fn every_client_is_decided_even_if_large_key_sets_displace_each_other() {
    const CONFIG_MAP: &str = "/api/v1/namespaces/identity/configmaps/keys";
    // The published document contains the youngest Client, so its references are always read.
    let reads = (MAX_ROUNDS - 1) * MAX_CLIENTS + 1;
    // One of these key sets needs 15 KiB in a document, which has room for 16 of them.
    let key = |number: usize| {
        json!({
            "kty": "EC", "crv": "P-256", "kid": format!("{}{number}", "\u{1}".repeat(255)),
            "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
            "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
        })
    };
    let key_set = json!({ "keys": (0..8).map(key).collect::<Vec<_>>() }).to_string();
    let config_map = json!({ "metadata": { "name": "keys" }, "data": { "jwks": key_set } });
    let script = (0..reads).fold(with_document(1, &["c699"]), |script, _| {
        let config_map = config_map.clone();
        script.expect(Method::GET, CONFIG_MAP, move |_| (StatusCode::OK, config_map))
    });
    let cluster = TestCluster::new(&script);
    let keys = || web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks" } }));
    for number in 0..700 {
        cluster.add(client(&format!("c{number:03}"), keys()));
    }
    record_document(&cluster.context, vec![rendered("c699")]);
    let selected = select_for_app(&app(json!({})), &"platform".parse().unwrap(), &cluster.context).await.unwrap();
    let names: Vec<_> = selected.rendered.iter().map(|client| client.name.clone()).collect();
    assert_eq!(names, (0..16).map(|number| format!("c{number:03}")).collect::<Vec<_>>());
    let has_keys =
        |one: &RenderedClient| matches!(one.authentication, RenderedClientAuthentication::PrivateKeyJwt { .. });
    assert!(selected.rendered.iter().all(has_keys));
    assert!(selected.rendered.iter().map(size).sum::<usize>() <= MAX_CLIENTS_BYTES);
    assert_eq!(selected.decisions.len(), 700, "also those that were not read");
    let refused: Vec<_> = selected.decisions.iter().filter_map(|one| Some(one.refusal.as_ref()?.reason)).collect();
    assert_eq!(refused, [Reason::TooManyClients; 684]);
    assert_eq!(selected.next_due, None, "nothing is tried again");
    script.finish();
}
