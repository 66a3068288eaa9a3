use http::{Method, StatusCode};
use kube::{
    core::DeserializeGuard,
    runtime::{
        reflector::store::{self, Writer},
        watcher::Event,
    },
};
use latchkey_crds::rendered::RenderedClientAuthentication;
use serde_json::{Value, json};

use super::*;
use crate::{
    app::mock_api::{MockApi, context},
    client::{
        fixtures::{app, client_with, policy, record_document, rendered_secret},
        prune::remove_deleted_clients,
        render::render,
    },
};

const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-platform";

/// The operator's copies of the Clients of a cluster with the App `identity/platform`.
struct TestCluster {
    context: Context,
    clients: Writer<WatchedClient>,
}

impl TestCluster {
    fn new(script: &MockApi) -> Self {
        let mut context = context(script.client()).0;
        let (clients, mut writer) = store::store::<WatchedClient>();
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitDone);
        context.objects.clients = clients;
        Self { context, clients: writer }
    }

    fn add(&mut self, client: Value) {
        let client: WatchedClient = serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into();
        let name = NamespacedName::from_metadata(client.meta());
        self.context.objects.client_index.update(&name, None, Some(&client));
        self.clients.apply_watcher_event(&Event::Apply(client));
    }

    fn delete(&mut self, name: &str) {
        let name = NamespacedName::new("identity", name);
        let client = self.context.objects.clients.get(&name.object_ref()).unwrap();
        self.context.objects.client_index.update(&name, Some(&*client), None);
        self.clients.apply_watcher_event(&Event::Delete(WatchedClient::clone(&client)));
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

/// The client in a document, which cannot authenticate.
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
async fn after_a_start_an_undecodable_client_is_found_in_the_document_by_its_uid() {
    let script = with_document(2, &["grafana", "argo"]);
    let mut cluster = TestCluster::new(&script);
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
async fn after_a_start_an_undecodable_client_stays_served_even_if_its_app_could_not_be_decoded_at_first() {
    let script = with_document(2, &["grafana"]);
    let mut cluster = TestCluster::new(&script);
    cluster.add(undecodable("grafana"));
    record_document(&cluster.context, vec![rendered("grafana")]);
    let app = NamespacedName::new("identity", "platform");
    assert_eq!(remove_deleted_clients(&app, &cluster.context).await.unwrap(), None);
    assert_eq!(cluster.select().await, ["grafana"]);
    script.finish();
}

#[tokio::test]
async fn after_a_start_a_client_that_is_served_without_a_secret_stays_in_the_document() {
    let script = with_document(1, &["grafana"]);
    let mut cluster = TestCluster::new(&script);
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
    let mut cluster = TestCluster::new(&script);
    cluster.add(client("grafana", json!({ "scopes": ["groups"] })));
    record_document(&cluster.context, vec![rendered("grafana")]);
    assert_eq!(cluster.select().await, ["grafana"]);
    script.finish();
}

#[test]
fn an_unread_client_stays_as_it_is_served_or_is_left_out() {
    let selected = |name: &str| {
        let edited = RenderedClient { display_name: "Edited".to_owned(), ..rendered(name) };
        Selected { rendered: Some(edited), refusal: None, unresolved: Vec::new() }
    };
    let mut all = [selected("read"), selected("served"), selected("new")];
    let before = all[0].clone();
    let mut served = rendered("served");
    served.tokens.audiences = vec!["ops".to_owned(), "of-the-app-before".to_owned()];
    leave_out_unread(&policy(), &mut all, &[1, 2], &[rendered("read"), served.clone()]);
    assert_eq!(all[0], before);
    served.tokens.audiences = vec!["ops".to_owned()];
    assert_eq!((&all[1].rendered, &all[2].rendered), (&Some(served), &None));
}
