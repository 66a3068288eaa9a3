//! Tests of the watch handlers with scripted events.

use futures::{StreamExt, stream};
use k8s_openapi::{
    api::core::v1::{Namespace, Secret},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Resource, ResourceExt,
    core::DeserializeGuard,
    runtime::{
        reflector::{store, store::Writer},
        watcher::Event,
    },
};
use latchkey_crds::{app::App, client::Client, rendered::Revision};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    client_index::ClientReference,
    handlers::Handlers,
    index::NamespacedName,
    namespaces::Namespaces,
    objects::{Metadata, WatchedClient, is_same_except_status, strip_metadata},
    published::{PublishedApp, PublishedDocuments},
    queue::{QueueReceivers, ReconcileQueue},
    state::ClusterState,
};
use crate::{
    admin::Health,
    app::{
        ownership::{AppIdOwner, Claim},
        pages_host,
    },
    quota::{DocumentSize, QuotaLimits},
};

fn app(namespace: &str, app_id: &str, version: &str) -> DeserializeGuard<App> {
    let app = json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
        "metadata": { "namespace": namespace, "name": "store", "uid": app_id, "resourceVersion": version },
        "spec": { "appID": app_id, "displayName": "Shop" },
    });
    serde_json::from_value(app).unwrap()
}

fn objects() -> (ClusterState, Writer<DeserializeGuard<App>>) {
    let ((apps, writer), (providers, _)) = (store(), store());
    (ClusterState::new(apps, providers, Namespaces::default(), QuotaLimits::default()), writer)
}

fn handlers(objects: &ClusterState, queue: ReconcileQueue, watch: &'static str) -> Handlers {
    Handlers { objects: objects.clone(), queue, health: Health::new(&[watch]) }
}

fn published(version: &str, document: &[u8]) -> PublishedApp {
    PublishedApp {
        revision: Some(Revision::of(document)),
        namespace: "shop".into(),
        name: "store".into(),
        pages_host: None,
        resource_version: version.into(),
        uid: "1".into(),
        size: DocumentSize::of(document),
    }
}

/// Runs the handler of Apps with one watch for each list of events.
async fn follow_app_events(watches: Vec<Vec<Event<DeserializeGuard<App>>>>) -> (ClusterState, QueueReceivers) {
    let (objects, writer) = objects();
    objects.published.record_write("latchkey-app-shop", published("1", b"1"));
    let (queue, receivers) = ReconcileQueue::new();
    let watches = watches.into_iter().map(|events| stream::iter(events).map(Ok).boxed()).collect();
    handlers(&objects, queue, "apps").follow_apps(watches, writer).await;
    (objects, receivers)
}

#[tokio::test]
async fn an_app_deleted_before_the_first_sync_does_not_come_back() {
    let first = vec![
        Event::Init,
        Event::InitApply(app("shop", "shop", "3")),
        Event::InitDone,
        Event::Delete(app("shop", "shop", "4")),
    ];
    let second = vec![Event::Init, Event::InitApply(app("other", "other", "3")), Event::InitDone];
    // The second watch reports its events last, after all events of the first watch.
    let (objects, writer) = objects();
    let (queue, _receivers) = ReconcileQueue::new();
    let (second_sender, second_receiver) = mpsc::unbounded_channel();
    let second_watch =
        stream::unfold(second_receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
    let follower = tokio::spawn(
        handlers(&objects, queue, "apps")
            .follow_apps(vec![stream::iter(first).map(Ok).boxed(), second_watch.boxed()], writer),
    );
    tokio::task::yield_now().await;
    second.into_iter().for_each(|event| second_sender.send(Ok(event)).unwrap());
    drop(second_sender);
    follower.await.unwrap();
    let stored: Vec<_> = objects.apps.state().iter().map(|app| app.namespace().unwrap()).collect();
    assert_eq!(stored, ["other"]);
}

#[tokio::test]
async fn the_document_of_an_app_that_is_recreated_with_another_app_id_may_be_an_orphan() {
    let events = vec![
        Event::Init,
        Event::InitApply(app("shop", "shop", "3")),
        Event::InitApply(app("waiting", "shop", "3")),
        Event::InitDone,
        Event::Apply(app("shop", "other", "5")),
    ];
    let (_, mut receivers) = follow_app_events(vec![events]).await;
    assert_eq!(receivers.orphans.try_recv().unwrap(), "latchkey-app-shop");
    let mut enqueued = Vec::new();
    while let Ok(app) = receivers.apps.try_recv() {
        enqueued.push(app.namespace().to_owned());
    }
    assert_eq!(enqueued, ["shop", "waiting", "shop", "waiting"], "its appID may be free for another App");
}

fn app_created(name: &str, second: u32) -> DeserializeGuard<App> {
    let app = json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
        "metadata": {
            "namespace": "shop", "name": name, "resourceVersion": "3",
            "creationTimestamp": format!("2026-01-02T03:04:{second:02}Z"),
        },
        "spec": { "displayName": "Shop" },
    });
    serde_json::from_value(app).unwrap()
}

#[tokio::test]
async fn older_apps_have_precedence_if_a_namespace_exceeds_its_quota() {
    let apps = [app_created("young", 3), app_created("held", 0), app_created("old", 1), app_created("middle", 2)];
    let claims = apps.clone().map(|app| Claim::from_app(app.0.as_ref().unwrap()));
    let ahead = async |limit| {
        let ((apps_store, writer), (providers, _)) = (store(), store());
        let limits = QuotaLimits { apps: limit, ..QuotaLimits::default() };
        let objects = ClusterState::new(apps_store, providers, Namespaces::default(), limits);
        let owner = AppIdOwner { namespace: "shop".into(), name: "held".into() };
        objects.quotas.record_keys(&"held".parse().unwrap(), Some(owner));
        let applied = apps.clone().into_iter().map(Event::InitApply);
        let events: Vec<_> = std::iter::once(Event::Init).chain(applied).chain([Event::InitDone]).collect();
        let (queue, _receivers) = ReconcileQueue::new();
        let watches = vec![stream::iter(events).map(Ok).boxed()];
        handlers(&objects, queue, "apps").follow_apps(watches, writer).await;
        claims.clone().map(|claim| objects.count_ahead_of(&claim))
    };
    assert_eq!(ahead(3).await, [2, 0, 0, 1], "an App that already owns its appID does not count");
    assert_eq!(ahead(100).await, [0; 4], "there is room for all");
}

/// An App that wants the host `login.example.com` for its pages.
fn app_with_host(name: &str, second: u32, status: &Value) -> DeserializeGuard<App> {
    let app = json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
        "metadata": {
            "namespace": "shop", "name": name, "resourceVersion": "3", "generation": 1,
            "creationTimestamp": format!("2026-01-02T03:04:{second:02}Z"),
        },
        "spec": { "pages": { "mode": "Enabled", "host": "login.example.com" } },
        "status": status,
    });
    serde_json::from_value(app).unwrap()
}

fn accepted(status: &str, reason: &str) -> Value {
    json!({ "conditions": [{
        "type": "Accepted", "status": status, "reason": reason, "message": "", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }]})
}

fn published_with_host(version: &str, host: Option<&str>) -> PublishedApp {
    PublishedApp { pages_host: host.map(|host| host.parse().unwrap()), ..published(version, b"1") }
}

/// Applies these Apps to an empty state, and returns the state.
async fn objects_with(apps: &[DeserializeGuard<App>]) -> ClusterState {
    let (objects, writer) = objects();
    let applied = apps.iter().cloned().map(Event::InitApply);
    let events: Vec<_> = std::iter::once(Event::Init).chain(applied).chain([Event::InitDone]).collect();
    let (queue, _receivers) = ReconcileQueue::new();
    handlers(&objects, queue, "apps").follow_apps(vec![stream::iter(events).map(Ok).boxed()], writer).await;
    objects
}

fn claims_host(app: &DeserializeGuard<App>, objects: &ClusterState) -> bool {
    let app = app.0.as_ref().unwrap();
    pages_host::claim(app, &app.app_id().unwrap(), objects)
}

#[tokio::test]
async fn a_free_host_goes_to_the_oldest_app_that_can_be_served() {
    let young = app_with_host("young", 3, &accepted("True", "Accepted"));
    for (status, takes_precedence) in [
        (json!({}), true),
        (accepted("True", "Accepted"), true),
        (accepted("False", "InvalidSpec"), false),
        (accepted("False", "QuotaExceeded"), false),
        (accepted("False", "AppIDConflict"), false),
    ] {
        let old = app_with_host("old", 1, &status);
        let objects = objects_with(&[young.clone(), old.clone()]).await;
        assert_eq!(claims_host(&young, &objects), !takes_precedence, "{status}");
    }
    let old = app_with_host("old", 1, &json!({}));
    let objects = objects_with(&[young.clone(), old.clone()]).await;
    assert!(claims_host(&old, &objects) && !claims_host(&young, &objects));
    // If two Apps were created in the same second, the first by name takes the host.
    let (one, two) = (app_with_host("one", 1, &json!({})), app_with_host("two", 1, &json!({})));
    let objects = objects_with(&[two.clone(), one.clone()]).await;
    assert!(!claims_host(&two, &objects) && claims_host(&one, &objects));
}

#[tokio::test]
async fn a_host_stays_with_the_app_that_published_it_and_is_reserved_until_then() {
    let (old, young) = (app_with_host("old", 1, &json!({})), app_with_host("young", 3, &json!({})));
    let objects = objects_with(std::slice::from_ref(&young)).await;
    assert!(claims_host(&young, &objects));
    // The older App is created while the younger one is being reconciled.
    let after = objects_with(&[young.clone(), old.clone()]).await;
    let objects = ClusterState { published: objects.published, ..after };
    assert!(!claims_host(&old, &objects) && claims_host(&young, &objects), "the host is reserved");
    pages_host::release(young.0.as_ref().unwrap(), &objects);
    assert!(claims_host(&old, &objects), "nothing was published");
    pages_host::release(old.0.as_ref().unwrap(), &objects);

    let host = Some("login.example.com");
    objects.published.record_write("latchkey-app-young", published_with_host("10", host));
    assert!(!claims_host(&old, &objects) && claims_host(&young, &objects), "the host is published");
    // If two documents have the host, for example because somebody wrote an annotation, the host belongs to the App
    // with the smaller appID.
    objects.published.record_write("latchkey-app-old", published_with_host("11", host));
    assert!(claims_host(&old, &objects) && !claims_host(&young, &objects));
    objects.published.record_deletion("latchkey-app-old", None);
    objects.published.record_write("latchkey-app-young", published_with_host("12", None));
    assert!(claims_host(&old, &objects), "the host is free again");
}

#[tokio::test]
async fn apps_that_wait_for_a_host_are_enqueued_when_it_can_be_free() {
    let secret = |host: Option<&str>, version: &str| -> Secret {
        let annotations = host.map(|host| json!({ "latchkey.dev/pages-host": host }));
        serde_json::from_value(json!({ "metadata": {
            "name": "latchkey-app-holder", "namespace": "latchkey", "uid": "1", "resourceVersion": version,
            "annotations": annotations,
        }}))
        .unwrap()
    };
    let enqueued_by = async |event| {
        let waiting = app_with_host("waiting", 3, &json!({}));
        let objects = objects_with(&[waiting]).await;
        let (queue, mut receivers) = ReconcileQueue::new();
        let first = secret(Some("login.example.com"), "7");
        let events = [Event::Init, Event::InitApply(first), Event::InitDone, event];
        let watches = vec![stream::iter(events).map(Ok).boxed()];
        handlers(&objects, queue, "rendered apps").follow_published(watches).await;
        std::iter::from_fn(move || receivers.apps.try_recv().ok()).map(|app| app.name().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(enqueued_by(Event::Apply(secret(Some("login.example.com"), "8"))).await, [""; 0]);
    assert_eq!(enqueued_by(Event::Apply(secret(None, "8"))).await, ["waiting"]);
    assert_eq!(enqueued_by(Event::Apply(secret(Some("other.example.com"), "8"))).await, ["waiting"]);
    assert_eq!(enqueued_by(Event::Delete(secret(Some("login.example.com"), "8"))).await, ["waiting"]);

    // An older App that wants the host is deleted before it was ever published with the host.
    let (objects, writer) = objects();
    let (old, waiting) = (app_with_host("old", 1, &json!({})), app_with_host("waiting", 3, &json!({})));
    let events = vec![Event::Init, Event::InitApply(old.clone()), Event::InitApply(waiting), Event::InitDone];
    let events = stream::iter(events).chain(stream::iter([Event::Delete(old)])).map(Ok).boxed();
    let (queue, mut receivers) = ReconcileQueue::new();
    handlers(&objects, queue, "apps").follow_apps(vec![events], writer).await;
    let enqueued: Vec<_> = std::iter::from_fn(|| receivers.apps.try_recv().ok()).collect();
    assert_eq!(enqueued[2..], [NamespacedName::new("shop", "waiting")], "{enqueued:?}");
}

#[test]
fn labels_and_annotations_of_other_programs_are_not_stored_and_their_change_is_ignored() {
    let edited = |note: &str| {
        let mut app = app("shop", "shop", "3");
        let annotations = [("example.com/note", note), ("latchkey.dev/rotate-keys", "1")];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
        app.meta_mut().annotations = Some(annotations.into());
        app.meta_mut().labels = Some([("note".to_owned(), note.to_owned())].into());
        let Event::Apply(app) = strip_metadata(Ok(Event::Apply(app))).unwrap() else { unreachable!("an Apply event") };
        app
    };
    let (one, other) = (edited("1"), edited("2"));
    assert!(is_same_except_status(&one, &other));
    assert_eq!(one.annotations().keys().collect::<Vec<_>>(), ["latchkey.dev/rotate-keys"]);
    assert!(one.labels().is_empty());
}

#[test]
fn of_the_metadata_of_a_client_little_is_stored_and_copies_share_it() {
    let watched = |request: &str| -> WatchedClient {
        let annotations = json!({ "latchkey.dev/note": "a".repeat(1000), "latchkey.dev/rotate-secret": request });
        let client = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client",
            "metadata": { "namespace": "monitoring", "name": "grafana", "annotations": annotations },
            "spec": { "appRef": { "name": "platform" }, "web": { "redirectURLs": ["https://grafana.example.com/"] } },
        });
        serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into()
    };
    let stored = watched("1");
    assert_eq!(stored.annotations().len(), 1);
    assert_eq!(stored.annotations()["latchkey.dev/rotate-secret"], "1");
    let long = watched(&"1".repeat(1000));
    assert!(long.annotations()["latchkey.dev/rotate-secret"].len() < 100);
    assert!(!long.is_same_except_status(&watched(&"2".repeat(1000))), "another request");
    let copy = long.clone();
    assert!(std::ptr::eq(copy.decoded().unwrap(), long.decoded().unwrap()));
    let undecodable = json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client", "metadata": { "name": "grafana" },
        "spec": { "appRef": { "name": "platform" }, "web": { "redirectURLs": [], "pkce": "x".repeat(10_000) } },
    });
    let undecodable: WatchedClient = serde_json::from_value::<DeserializeGuard<Client>>(undecodable).unwrap().into();
    assert!(undecodable.client.unwrap_err().error.len() <= 1024);
}

#[test]
fn of_a_written_and_a_watched_document_the_newer_one_is_used() {
    let documents = objects().0.published;
    let revision = |documents: &PublishedDocuments| documents.get("shop").and_then(|app| app.revision);
    documents.record_write("shop", published("10", b"ours"));
    assert!(!documents.record_watched("shop", published("10", b"ours")), "unchanged");
    // The operator writes version 11, and somebody then writes version 12. The watch reports 12 before the operator
    // gets the response for 11.
    assert!(documents.record_watched("shop", published("12", b"theirs")));
    documents.record_write("shop", published("11", b"ours"));
    assert_eq!(revision(&documents), Some(Revision::of(b"theirs")));
    documents.record_deletion("shop", Some(14));
    documents.record_write("shop", published("13", b"ours"));
    assert_eq!(revision(&documents), None);
    // The watch has not reported the operator's write yet.
    documents.record_write("shop", published("20", b"ours"));
    assert!(!documents.record_watched("shop", published("17", b"theirs")));
    documents.record_deletion("shop", Some(18));
    assert_eq!(revision(&documents), Some(Revision::of(b"ours")));
    // If a new list reveals a deletion, it is not known when the object was deleted.
    documents.record_deletion("shop", None);
    assert_eq!(revision(&documents), None);
}

#[tokio::test]
async fn the_app_of_a_deleted_document_is_enqueued_even_if_the_operator_deleted_it() {
    let events = vec![Event::Init, Event::InitApply(app("shop", "shop", "3")), Event::InitDone];
    let (objects, _) = follow_app_events(vec![events]).await;
    let secret = json!({
        "metadata": { "name": "latchkey-app-shop", "namespace": "latchkey", "uid": "1", "resourceVersion": "7" },
    });
    let secret: Secret = serde_json::from_value(secret).unwrap();
    let events = vec![Event::Init, Event::InitApply(secret.clone()), Event::InitDone, Event::Delete(secret)];
    let (queue, mut receivers) = ReconcileQueue::new();
    let watches = vec![stream::iter(events).map(Ok).boxed()];
    handlers(&objects, queue, "rendered apps").follow_published(watches).await;
    assert_eq!(receivers.apps.try_recv().unwrap().name(), "store");
}

#[tokio::test]
async fn changed_keys_enqueue_all_apps_with_the_app_id_unless_its_only_app_has_already_used_them() {
    let keys = |version: &str| {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": { "name": "latchkey-keys-shop", "namespace": "latchkey", "resourceVersion": version },
        });
        serde_json::from_value::<Metadata<Secret>>(secret).unwrap()
    };
    let enqueued_by = async |apps: &[&str], event| {
        let applied = apps.iter().map(|namespace| Event::InitApply(app(namespace, "shop", "3")));
        let (objects, _) =
            follow_app_events(vec![std::iter::once(Event::Init).chain(applied).chain([Event::InitDone]).collect()])
                .await;
        objects.key_versions.record(&"shop".parse().unwrap(), "7");
        let (queue, mut receivers) = ReconcileQueue::new();
        let watches = vec![stream::iter([Event::Init, Event::InitDone, event]).map(Ok).boxed()];
        handlers(&objects, queue, "keys").follow_keys(watches).await;
        std::iter::from_fn(move || receivers.apps.try_recv().ok()).count()
    };
    assert_eq!(enqueued_by(&["shop"], Event::Apply(keys("7"))).await, 0);
    assert_eq!(enqueued_by(&["shop"], Event::Apply(keys("8"))).await, 1, "somebody changed them");
    assert_eq!(enqueued_by(&["shop", "waiting"], Event::Apply(keys("7"))).await, 2, "another App waits for the appID");
    assert_eq!(enqueued_by(&["shop"], Event::Delete(keys("7"))).await, 1);
}

/// A Client in the namespace `monitoring` of the App `identity/platform`.
fn client(name: &str, version: &str, spec: &Value) -> WatchedClient {
    let mut all = json!({
        "appRef": { "name": "platform", "namespace": "identity" },
        "web": { "redirectURLs": ["https://grafana.example.com/login"] },
    });
    all.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let client = json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client",
        "metadata": {
            "namespace": "monitoring", "name": name, "uid": name, "resourceVersion": version,
            "generation": version.parse::<i64>().unwrap(),
        },
        "spec": all,
    });
    serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into()
}

/// Follows these events of Clients after a first list, and returns the changes that they cause.
async fn client_changes(
    objects: &ClusterState,
    first: Vec<WatchedClient>,
    events: Vec<Event<WatchedClient>>,
) -> Vec<String> {
    let (queue, receivers) = ReconcileQueue::new();
    let listed = first.into_iter().map(Event::InitApply);
    let events = std::iter::once(Event::Init).chain(listed).chain([Event::InitDone]).chain(events);
    let watches = vec![stream::iter(events.collect::<Vec<_>>()).map(Ok).boxed()];
    handlers(objects, queue, "clients").follow_clients(watches).await;
    std::iter::from_fn(|| receivers.client_changes.try_pop())
        .map(|change| format!("{} of {}", change.client.name(), change.app))
        .collect()
}

fn objects_for_clients(namespaces: Namespaces) -> ClusterState {
    let ((apps, _), (providers, _)) = (store(), store());
    ClusterState::new(apps, providers, namespaces, QuotaLimits::default())
}

#[tokio::test]
async fn each_change_of_a_client_concerns_its_app_and_a_status_write_does_not() {
    let objects = objects_for_clients(Namespaces::default());
    let mut same = client("grafana", "1", &json!({}));
    same.meta_mut().resource_version = Some("2".to_owned());
    let first = vec![client("grafana", "1", &json!({})), client("argo", "1", &json!({}))];
    let changes = client_changes(&objects, first, vec![Event::Apply(same)]).await;
    assert_eq!(changes, ["grafana of identity/platform", "argo of identity/platform"], "of the first list");

    let objects = objects_for_clients(Namespaces::default());
    let events = vec![
        Event::Apply(client("grafana", "2", &json!({ "displayName": "Edited" }))),
        Event::Apply(client("new", "3", &json!({ "appRef": { "name": "other" } }))),
        Event::Delete(client("grafana", "4", &json!({}))),
    ];
    let changes = client_changes(&objects, Vec::new(), events).await;
    assert_eq!(changes, ["grafana of identity/platform", "new of monitoring/other"]);
    let of_app = ClientReference::App { namespace: "identity", name: "platform" };
    assert!(objects.client_index.get(of_app).is_empty());
}

#[tokio::test]
async fn the_deletion_of_an_undecodable_client_concerns_the_app_that_it_named() {
    let objects = objects_for_clients(Namespaces::watched());
    let broken = |version: &str| client("grafana", version, &json!({ "displayName": 7 }));
    assert!(broken("2").decoded().is_none());
    let events = vec![Event::Apply(broken("2")), Event::Delete(broken("3"))];
    let changes = client_changes(&objects, vec![client("grafana", "1", &json!({}))], events).await;
    assert_eq!(changes, ["grafana of identity/platform"], "of no unknown App");
    let of_app = ClientReference::App { namespace: "identity", name: "platform" };
    assert!(objects.client_index.get(of_app).is_empty());

    let objects = objects_for_clients(Namespaces::watched());
    client_changes(&objects, vec![client("grafana", "1", &json!({}))], vec![Event::Apply(broken("2"))]).await;
    let (queue, mut receivers) = ReconcileQueue::new();
    queue.enqueue_apps_of_clients_with(&objects, ClientReference::GrantedNamespace("monitoring"));
    assert_eq!(receivers.apps.try_recv().unwrap().name(), "platform");
}

#[tokio::test]
async fn changes_of_the_secret_and_of_the_namespace_labels_of_a_client_queue_the_client() {
    let objects = objects_for_clients(Namespaces::watched());
    client_changes(&objects, vec![client("grafana", "1", &json!({}))], Vec::new()).await;
    let secret = |name: &str, version: &str| -> Secret {
        serde_json::from_value(json!({
            "metadata": { "namespace": "monitoring", "name": name, "resourceVersion": version },
            "type": "latchkey.dev/client", "data": { "client-secret": "MDEyMzQ1Njc4OWFiY2RlZg==" },
        }))
        .unwrap()
    };
    let (queue, mut receivers) = ReconcileQueue::new();
    let events = [
        Event::Init,
        Event::InitDone,
        Event::Apply(secret("other-oidc", "2")),
        Event::Apply(secret("grafana-oidc", "3")),
    ];
    let watches = vec![stream::iter(events).map(Ok).boxed()];
    handlers(&objects, queue.clone(), "client secrets").follow_client_secrets(watches).await;
    assert_eq!(receivers.client_changes.try_pop().unwrap().client.name(), "grafana");
    assert_eq!(receivers.client_changes.try_pop(), None);

    let namespace = |name: &str, env: &str| -> Metadata<Namespace> {
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": { "env": env } },
        }))
        .unwrap()
    };
    let events = [
        Event::Init,
        Event::InitApply(namespace("monitoring", "test")),
        Event::InitDone,
        Event::Apply(namespace("monitoring", "test")),
        Event::Apply(namespace("other", "live")),
        Event::Apply(namespace("monitoring", "live")),
    ];
    let watches = vec![stream::iter(events).map(Ok).boxed()];
    handlers(&objects, queue, "namespaces").follow_namespaces(watches).await;
    assert_eq!(receivers.client_changes.try_pop().unwrap().client.name(), "grafana");
    assert_eq!(receivers.client_changes.try_pop(), None, "the other changes concern no Client");
    assert_eq!(receivers.apps.try_recv().unwrap().name(), "platform", "it does not wait behind other Clients");
    assert!(receivers.apps.try_recv().is_err());
}

#[tokio::test]
async fn a_new_leader_queues_the_clients_that_no_app_decides_about() {
    let (objects, mut writer) = objects();
    let app = |name: &str, is_being_deleted: bool| {
        let mut app = app("monitoring", name, "3");
        app.0.as_mut().unwrap().metadata.name = Some(name.to_owned());
        if is_being_deleted {
            app.0.as_mut().unwrap().metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        }
        app
    };
    writer.apply_watcher_event(&Event::Init);
    writer.apply_watcher_event(&Event::InitApply(app("live", false)));
    writer.apply_watcher_event(&Event::InitApply(app("ending", true)));
    writer.apply_watcher_event(&Event::InitDone);
    let client_of = |app: &str| client(&format!("client-of-{app}"), "1", &json!({ "appRef": { "name": app } }));
    let mut clients = Vec::from(["live", "ending", "missing"].map(client_of));
    clients.push(client("client-of-other-namespace", "1", &json!({})));
    client_changes(&objects, clients, Vec::new()).await;
    let (queue, mut receivers) = ReconcileQueue::new();
    queue.enqueue_everything(&objects);
    let mut queued: Vec<_> =
        std::iter::from_fn(|| receivers.clients.try_recv().ok()).map(|client| client.name().to_owned()).collect();
    queued.sort();
    assert_eq!(queued, ["client-of-ending", "client-of-missing", "client-of-other-namespace"]);
}

#[tokio::test]
async fn a_standby_keeps_no_queue() {
    let (objects, mut writer) = objects();
    writer.apply_watcher_event(&Event::Init);
    writer.apply_watcher_event(&Event::InitApply(app("shop", "shop", "3")));
    writer.apply_watcher_event(&Event::InitDone);
    objects.published.record_write("latchkey-app-shop", published("1", b"1"));
    let (queue, mut receivers) = ReconcileQueue::new();
    queue.enqueue_everything(&objects);
    tokio::select! {
        biased;
        never = receivers.discard_all() => match never {},
        () = tokio::task::yield_now() => {}
    }
    assert!(receivers.apps.is_empty() && receivers.orphans.is_empty());
    // When the standby becomes the leader, it queues everything.
    queue.enqueue_everything(&objects);
    assert_eq!(receivers.apps.try_recv().unwrap().name(), "store");
    assert_eq!(receivers.orphans.try_recv().unwrap(), "latchkey-app-shop");
}
