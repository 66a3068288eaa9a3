//! Releases against a mock API server.

use std::time::Duration;

use http::{Method, StatusCode};
use kube::runtime::watcher::Event;
use latchkey_crds::{
    names::rendered_app_secret,
    rendered::{Revision, SigningAlgorithm},
    types::AppId,
};
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::{
    procedure::{Release, ReleaseOutcome, release},
    state::Releases,
};
use crate::{
    app::{
        keys::{KeyDocument, secret::AppIdOwner},
        mock_api::{MockApi, context, not_found},
    },
    quota::DocumentSize,
    watch::PublishedApp,
};

const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/store";
const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

fn shop() -> AppId {
    "shop".parse().unwrap()
}

fn app(name: &str) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "App", "metadata": { "namespace": "shop", "name": name },
        "spec": { "appID": "shop", "displayName": "Shop" },
    })
}

fn keys() -> Value {
    let keys = KeyDocument::first(&shop(), SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
    let secret = k8s_openapi::ByteString(serde_json::to_vec(&keys).unwrap());
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "latchkey.dev/app-keys",
        "metadata": {
            "name": "latchkey-keys-shop", "namespace": "latchkey", "uid": "1", "resourceVersion": "7",
            "annotations": { "latchkey.dev/namespace": "shop", "latchkey.dev/name": "store" },
        },
        "data": { "keys.json": secret },
    })
}

/// Runs the release of the appID `shop`. Its key Secret names the App `shop/store`. The script must contain every call
/// that the release sends to the API server.
async fn run_release(script: &MockApi, stored: Option<Value>) -> ReleaseOutcome {
    let (context, mut apps) = context(script.client());
    apps.apply_watcher_event(&Event::Init);
    if let Some(stored) = stored {
        apps.apply_watcher_event(&Event::InitApply(serde_json::from_value(stored).unwrap()));
    }
    apps.apply_watcher_event(&Event::InitDone);
    let owner = AppIdOwner { namespace: "shop".into(), name: "store".into() };
    context.objects.quotas.record_keys(&shop(), Some(owner));
    let guard = context.releases.try_begin(&shop()).unwrap();
    release(&context, &shop(), &guard, &Semaphore::new(1)).await.unwrap()
}

#[tokio::test]
async fn keys_of_an_existing_app_are_not_deleted() {
    let with_stored_app = MockApi::default();
    assert!(matches!(run_release(&with_stored_app, Some(app("store"))).await, ReleaseOutcome::Done));
    with_stored_app.finish();
    // The watch has not reported the App yet.
    let with_unreported_app =
        MockApi::default()
            .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
            .expect(Method::GET, APP, |_| (StatusCode::OK, app("store")));
    assert!(matches!(run_release(&with_unreported_app, None).await, ReleaseOutcome::Done));
    with_unreported_app.finish();
}

#[tokio::test]
async fn nothing_is_written_without_a_serving_pod() {
    let with_deleted_app =
        MockApi::default()
            .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
            .expect(Method::GET, APP, |_| not_found("store"));
    assert!(matches!(run_release(&with_deleted_app, None).await, ReleaseOutcome::Unanswered));
    with_deleted_app.finish();
}

fn published(document: &[u8], version: &str) -> PublishedApp {
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

#[tokio::test(start_paused = true)]
async fn the_keys_stay_until_every_request_of_the_deleted_app_has_ended() {
    let (context, _apps) = context(MockApi::default().client());
    let secret = rendered_app_secret(&shop());
    context.objects.published.record_write(&secret, published(b"released", "1"));
    let owner = AppIdOwner { namespace: "shop".into(), name: "store".into() };
    let revision = Revision::of(b"released");
    let id = shop();
    let release = Release::new(&context, &id, owner);
    let wait = async || {
        let began = Instant::now();
        (release.wait_for_requests(&revision).await, began.elapsed())
    };
    assert_eq!(wait().await, (true, Duration::from_secs(120)));
    // The wait ends as soon as the document of an App with this appID is published, even if that document is deleted
    // again.
    let publish_again = async {
        sleep(Duration::from_secs(7)).await;
        context.objects.published.record_write(&secret, published(b"served", "2"));
    };
    let ((ended, waited), ()) = tokio::join!(wait(), publish_again);
    assert!(!ended && waited <= Duration::from_secs(8), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_deletion_waits_for_requests_once_for_each_document() {
    let releases = Releases::default();
    let drain = Duration::from_secs(120);
    let left = |document: &[u8]| releases.request_drain_left(&shop(), &Revision::of(document), drain);
    assert_eq!(left(b"1"), Some(drain));
    sleep(Duration::from_secs(100)).await;
    assert_eq!(left(b"1"), Some(Duration::from_secs(20)));
    assert_eq!(left(b"2"), Some(drain), "the App was served again meanwhile");
    sleep(drain).await;
    assert_eq!(left(b"2"), None);
    releases.forget_deletion(&shop());
    assert_eq!(left(b"2"), Some(drain));
}

#[tokio::test]
async fn a_step_of_a_release_and_a_reconcile_of_its_app_id_do_not_overlap() {
    let releases = Releases::default();
    let (first, second) = (releases.lock_shared(&shop()).await, releases.lock_shared(&shop()).await);
    let shop = shop();
    let step = releases.lock_exclusive(&shop);
    tokio::pin!(step);
    assert!(futures::poll!(&mut step).is_pending());
    drop(first);
    assert!(futures::poll!(&mut step).is_pending());
    drop(second);
    let step = step.await;
    let reconcile = releases.lock_shared(&shop);
    tokio::pin!(reconcile);
    assert!(futures::poll!(&mut reconcile).is_pending());
    let _other_app_id = releases.lock_shared(&"other".parse().unwrap()).await;
    drop(step);
    reconcile.await;
}

#[test]
fn an_app_id_has_one_release_at_a_time_and_the_document_of_a_release_is_no_orphan() {
    let releases = Releases::default();
    let guard = releases.try_begin(&shop()).unwrap();
    assert!(releases.try_begin(&shop()).is_none() && !releases.is_asking_servers(&shop()));
    guard.set_asking();
    assert!(releases.is_asking_servers(&shop()));
    let state = guard.end();
    assert!(state.asking && state.requeued, "it is checked once more");
    assert!(!releases.is_asking_servers(&shop()) && releases.try_begin(&shop()).is_some());
}
