//! The keys of an App in a cluster (design, Keys): made, rotated, revoked, lost, and what users feel of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use k8s_openapi::api::{core::v1::Secret, events::v1::Event};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use latchkey_crds::{
    app::KeyStatus,
    conditions::{ConditionStatus, ConditionType},
    names::{
        APP_KEYS_KEY, NEW_KEYS_ANNOTATION, REVOKE_KEY_ANNOTATION, ROTATE_KEYS_ANNOTATION, app_keys_secret,
        rendered_app_secret,
    },
    types::AppId,
};
use latchkey_tests::{
    builders::App,
    client::Anonymous,
    cluster::{Cluster, Endpoint, Install, Operator, PodServer},
    eventually_ok,
    proxy::Proxy,
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{MAIL_LIMIT, NAME, PASSWORD, app};

const EMAIL: &str = "ada@example.com";
/// What the operator does, it does within a second or two; a loaded machine takes longer, and a watch that was cut too.
const LIMIT: Duration = Duration::from_secs(90);

/// Two servers, one operator, and an App that is Ready.
struct Shop {
    install: Install<'static>,
    servers: Vec<PodServer>,
    operator: Operator,
    app: App,
}

/// Log-ins at each server, one after the other, and one session that is refreshed at each, until asked for what came of
/// them.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<(usize, Vec<String>)>,
}

fn states(keys: &[KeyStatus]) -> Vec<String> {
    keys.iter().map(|key| format!("{} {:?}", key.id, key.state)).collect()
}

/// The key under which an access token is.
fn kid(token: &str) -> String {
    let head = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap()).unwrap();
    serde_json::from_slice::<Value>(&head).unwrap()["kid"].as_str().unwrap().to_owned()
}

// === impl Shop ===

impl Shop {
    async fn open() -> Self {
        let install = Cluster::shared().await.install().await;
        let servers = install.serve(2).await;
        Self::with(install, servers).await
    }

    async fn with(install: Install<'static>, servers: Vec<PodServer>) -> Self {
        let operator = install.operator().await;
        let app = app().limit("refreshesPerSession", &[(1_000_000, 60)]);
        install.apply(&app).await.unwrap();
        install.ready(&app).await;
        Self { install, servers, operator, app }
    }

    fn id(&self) -> &str {
        self.app.id()
    }

    fn app_id(&self) -> AppId {
        self.id().parse().unwrap()
    }

    /// Somebody new, at a server.
    fn client(&self, server: usize) -> Anonymous {
        self.install.client_of(&self.servers[server])
    }

    /// Registers at a server, and takes the code of the mail.
    async fn code(&self, server: usize, email: &str) -> String {
        self.client(server).register(self.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK);
        self.install.smtp.mails().wait_for(|mail| mail.is_to(email), MAIL_LIMIT).await.code()
    }

    async fn annotate(&self, name: &str, value: &str) {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: value } } }));
        self.install.apps().patch(self.id(), &PatchParams::default(), &patch).await.unwrap();
    }

    /// Signing and HMAC keys as the status has them.
    async fn keys(&self) -> (Vec<KeyStatus>, Vec<KeyStatus>) {
        let status = self.install.get(&self.app).await.unwrap().status.unwrap();
        (status.signing_keys, status.hmac_keys)
    }

    /// Waits until the status has these keys in these states.
    async fn until(&self, signing: &[&str], hmac: &[&str]) {
        eventually_ok(&format!("the keys are {signing:?} and {hmac:?}"), LIMIT, || async {
            let keys = self.keys().await;
            let found = (states(&keys.0), states(&keys.1));
            if found.0 == signing && found.1 == hmac { Ok(()) } else { Err(found) }
        })
        .await;
    }

    /// The ids of the keys that a server's JWKS lists.
    async fn listed(&self, server: usize) -> Vec<String> {
        let jwks = self.client(server).get(&format!("{}/.well-known/jwks.json", self.id())).await;
        let jwks = jwks.expect(StatusCode::OK);
        jwks.body["keys"].as_array().unwrap().iter().map(|key| key["kid"].as_str().unwrap().to_owned()).collect()
    }

    /// Edits the App's spec, and waits until the operator has judged that: by then it has seen all before it too.
    async fn edit(&self, name: &str) {
        let patch = Patch::Merge(json!({ "spec": { "displayName": name } }));
        let apps = self.install.apps();
        let edited = apps.patch(self.id(), &PatchParams::default(), &patch).await.unwrap();
        eventually_ok("the edit is judged", LIMIT, || async {
            let observed = apps.get(self.id()).await.unwrap().status.unwrap().observed_generation;
            if observed == edited.metadata.generation { Ok(()) } else { Err(observed) }
        })
        .await;
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.install.admin(), self.install.namespace())
    }

    fn load(&self) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let (ends, app) = (Arc::clone(&stop), self.id().to_owned());
        let addresses: Vec<_> = self.servers.iter().map(|server| server.public).collect();
        let task = tokio::spawn(async move {
            let (mut passed, mut failed) = (0, Vec::new());
            let mut kept: Option<String> = None;
            for address in addresses.into_iter().cycle() {
                if ends.load(Ordering::Relaxed) {
                    break;
                }
                let client = Anonymous::new(address);
                let answer = client.login(&app, EMAIL, PASSWORD).await;
                // A refresh token of the one server is good at the other, whichever key is whose.
                let token = kept.get_or_insert_with(|| answer.string("refresh_token").to_owned());
                let refreshed = client.refresh(&app, token).await;
                match refreshed.status {
                    StatusCode::OK => refreshed.string("refresh_token").clone_into(token),
                    _ => failed.push(refreshed.text),
                }
                let verified = match answer.status {
                    StatusCode::OK => client.signed_in(&app, answer.string("token")).verify().await,
                    _ => answer,
                };
                match verified.status {
                    StatusCode::OK => passed += 1,
                    _ => failed.push(verified.text),
                }
            }
            (passed, failed)
        });
        Load { stop, task }
    }
}

// === impl Load ===

impl Load {
    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let (passed, failed) = self.task.await.unwrap();
        assert!(
            failed.is_empty(),
            "{} of {} log-ins or refreshes failed: {}",
            failed.len(),
            failed.len() + passed,
            failed[0]
        );
        assert!(passed > 0, "nobody logged in");
    }
}

#[tokio::test]
async fn first_keys_are_active_at_once_and_the_status_says_until_when() {
    let shop = Shop::open().await;
    shop.until(&["s1 Active"], &["h1 Active"]).await;
    let (signing, hmac) = shop.keys().await;
    assert!(signing[0].not_after.is_some() && signing[0].not_after == hmac[0].not_after, "{signing:?} {hmac:?}");
    for server in 0..2 {
        assert_eq!(shop.listed(server).await, ["s1"]);
    }
    let secret = shop.secrets().get(&app_keys_secret(&shop.app_id())).await.unwrap();
    assert_eq!(secret.type_.as_deref(), Some("latchkey.dev/app-keys"));
}

#[tokio::test]
async fn a_rotation_that_is_asked_for_is_done_once_and_nobody_feels_it() {
    let shop = Shop::open().await;
    let code = shop.code(0, EMAIL).await;
    let before = shop.client(0).sign_in(shop.id(), EMAIL, PASSWORD).await;
    let load = shop.load();

    shop.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    // The signing key waits until every JWKS that somebody keeps has it: minutes.
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    for server in 0..2 {
        assert_eq!(shop.listed(server).await, ["s1", "s2"]);
    }
    let after = shop.client(1).sign_in(shop.id(), EMAIL, PASSWORD).await;
    assert_eq!((kid(before.token()), kid(after.token())), ("s1".to_owned(), "s1".to_owned()));
    let (signing, hmac) = shop.keys().await;
    let ends = |keys: &[KeyStatus]| keys.iter().map(|key| key.not_after.is_some()).collect::<Vec<_>>();
    assert_eq!((ends(&signing), ends(&hmac)), (vec![true, false], vec![true, true]), "{signing:?} {hmac:?}");

    // What was made before is as good as ever, at the other server too.
    before.verify().await.expect(StatusCode::OK);
    shop.client(1).signed_in(shop.id(), before.token()).verify().await.expect(StatusCode::OK);
    load.end().await;
    shop.client(1).confirm(shop.id(), &code).await.expect(StatusCode::OK);
    shop.install.ready(&shop.app).await;

    let events: Api<Event> = Api::namespaced(shop.install.admin(), shop.install.tenant());
    eventually_ok("an Event tells of the new key", LIMIT, || async {
        let list = events.list(&ListParams::default()).await.unwrap();
        let notes: Vec<_> =
            list.items.into_iter().map(|event| (event.reason, event.note.unwrap_or_default())).collect();
        let tells = notes
            .iter()
            .any(|(reason, note)| reason.as_deref() == Some("KeysChanged") && note.contains("h2 is Active"));
        if tells { Ok(()) } else { Err(notes) }
    })
    .await;

    // The same value asks for nothing more, also of an operator that starts anew; another value does.
    shop.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    shop.operator.terminate().await.expect("the operator ends");
    shop.operator.start().unwrap();
    shop.edit("The Other Shop").await;
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    shop.annotate(ROTATE_KEYS_ANNOTATION, "2").await;
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]).await;
}

#[tokio::test]
async fn no_key_is_active_before_every_pod_that_counts_knows_it() {
    let install = Cluster::shared().await.install().await;
    let plane = install.cluster().plane();
    let proxy = Proxy::start(plane.addr()).unwrap();
    let account = plane.account_at(install.server_account(), proxy.addr()).unwrap();
    let behind = install.server_as(&account, &[]).await.unwrap();
    behind.start_ready().await.unwrap();
    behind.set_endpoint(Endpoint::SERVING).await.unwrap();
    let current = install.server().await;
    let shop = Shop::with(install, vec![behind, current]).await;
    let name = shop.servers[0].name().to_owned();
    shop.code(0, EMAIL).await;
    let load = shop.load();

    proxy.stall();
    shop.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    shop.until(&["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]).await;
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let told = shop.install.until(&shop.app, type_, status, "WaitingForServers").await;
    assert!(told.contains(&name), "{told}");
    // A code of the pod that is behind is good at the other, and the other way round.
    for (from, to) in [(0, 1), (1, 0)] {
        let code = shop.code(from, &format!("from-{from}@example.com")).await;
        shop.client(to).confirm(shop.id(), &code).await.expect(StatusCode::OK);
    }
    shop.edit("The Other Shop").await;
    shop.until(&["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]).await;
    proxy.restore().unwrap();
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    load.end().await;

    // A pod that counts no more holds nobody up.
    proxy.stall();
    shop.annotate(ROTATE_KEYS_ANNOTATION, "2").await;
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active", "h3 Published"]).await;
    shop.servers[0].set_endpoint(Endpoint::TERMINATING).await.unwrap();
    shop.until(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]).await;
}

#[tokio::test]
async fn a_revoked_key_is_dropped_at_once_with_all_that_was_made_under_it() {
    let shop = Shop::open().await;
    let code = shop.code(0, EMAIL).await;
    let before = shop.client(0).sign_in(shop.id(), EMAIL, PASSWORD).await;
    before.verify().await.expect(StatusCode::OK);

    shop.annotate(REVOKE_KEY_ANNOTATION, "s1").await;
    shop.until(&["s2 Active"], &["h1 Active"]).await;
    shop.install.ready(&shop.app).await;
    for server in 0..2 {
        assert_eq!(shop.listed(server).await, ["s2"]);
        let refused = shop.client(server).signed_in(shop.id(), before.token()).verify().await;
        refused.expect(StatusCode::UNAUTHORIZED);
        let after = shop.client(server).sign_in(shop.id(), EMAIL, PASSWORD).await;
        assert_eq!(kid(after.token()), "s2");
        after.verify().await.expect(StatusCode::OK);
    }

    shop.annotate(REVOKE_KEY_ANNOTATION, "h1").await;
    shop.until(&["s2 Active"], &["h2 Active"]).await;
    shop.install.ready(&shop.app).await;
    shop.client(0).confirm(shop.id(), &code).await.expect_error(StatusCode::BAD_REQUEST, "invalid_code");

    shop.annotate(REVOKE_KEY_ANNOTATION, "s9").await;
    let (type_, status) = (ConditionType::ResolvedRefs, ConditionStatus::False);
    let told = shop.install.until(&shop.app, type_, status, "InvalidSpec").await;
    assert!(told.contains("latchkey.dev/revoke-key names no key of this App"), "{told}");
    shop.until(&["s2 Active"], &["h2 Active"]).await;
}

#[tokio::test]
async fn another_signing_algorithm_is_a_rotation_of_the_signing_keys() {
    let shop = Shop::open().await;
    let app = shop.app.clone().set("/tokens/signingAlgorithm", "EdDSA");
    shop.install.apply(&app).await.unwrap();
    shop.until(&["s1 Active", "s2 Published"], &["h1 Active"]).await;
    shop.install.ready(&shop.app).await;
    for server in 0..2 {
        let jwks = shop.client(server).get(&format!("{}/.well-known/jwks.json", shop.id())).await;
        let algorithms: Vec<_> = jwks.body["keys"].as_array().unwrap().iter().map(|key| key["alg"].clone()).collect();
        assert_eq!(algorithms, ["ES256", "EdDSA"], "{}", jwks.text);
    }
}

#[tokio::test]
async fn lost_keys_are_made_of_the_rendered_secret_and_where_both_are_lost_the_users_are_not_taken_over() {
    let shop = Shop::open().await;
    let code = shop.code(0, EMAIL).await;
    let before = shop.client(0).sign_in(shop.id(), EMAIL, PASSWORD).await;
    let (secrets, id) = (shop.secrets(), shop.app_id());
    let keys = |secret: Secret| {
        let document = &secret.data.unwrap()[APP_KEYS_KEY].0;
        let document: Value = serde_json::from_slice(document).unwrap();
        let secrets = (document["signing"][0]["privateKey"].clone(), document["hmac"][0]["secret"].clone());
        assert!(secrets.0.is_string() && secrets.1.is_string());
        secrets
    };

    let first = secrets.get(&app_keys_secret(&id)).await.unwrap();
    secrets.delete(&app_keys_secret(&id), &DeleteParams::default()).await.unwrap();
    let name = app_keys_secret(&id);
    let again = eventually_ok("the key Secret is back", LIMIT, || secrets.get(&name)).await;
    assert_ne!(again.metadata.uid, first.metadata.uid);
    assert_eq!(keys(again), keys(first.clone()));
    before.verify().await.expect(StatusCode::OK);
    shop.client(1).confirm(shop.id(), &code).await.expect(StatusCode::OK);
    let before = shop.client(0).sign_in(shop.id(), EMAIL, PASSWORD).await;

    // With an operator at work the one would be made of the other.
    shop.operator.terminate().await.expect("the operator ends");
    for secret in [app_keys_secret(&id), rendered_app_secret(&id)] {
        secrets.delete(&secret, &DeleteParams::default()).await.unwrap();
    }
    shop.operator.start().unwrap();
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let told = shop.install.until(&shop.app, type_, status, "KeysLost").await;
    assert!(told.contains("put the key Secret back") && told.contains(NEW_KEYS_ANNOTATION), "{told}");
    shop.install.until(&shop.app, ConditionType::Ready, status, "KeysLost").await;
    eventually_ok("no server serves the users under other keys", LIMIT, || async {
        for server in 0..2 {
            let answer = shop.client(server).login(shop.id(), EMAIL, PASSWORD).await;
            if answer.status != StatusCode::NOT_FOUND {
                return Err(answer.text);
            }
        }
        Ok(())
    })
    .await;

    shop.annotate(NEW_KEYS_ANNOTATION, "1").await;
    shop.install.ready(&shop.app).await;
    let after = shop.client(1).sign_in(shop.id(), EMAIL, PASSWORD).await;
    after.verify().await.expect(StatusCode::OK);
    shop.client(0).signed_in(shop.id(), after.token()).verify().await.expect(StatusCode::OK);
    before.verify().await.expect(StatusCode::UNAUTHORIZED);

    // It is done once: an operator that starts anew leaves the keys.
    let anew = secrets.get(&app_keys_secret(&id)).await.unwrap();
    shop.operator.terminate().await.expect("the operator ends");
    shop.operator.start().unwrap();
    shop.edit("The Other Shop").await;
    assert_eq!(keys(secrets.get(&app_keys_secret(&id)).await.unwrap()), keys(anew));
}

/// The other way out: the Secret from a copy.
#[tokio::test]
async fn lost_keys_that_are_put_back_from_a_copy_sign_nobody_out() {
    let shop = Shop::open().await;
    shop.code(0, EMAIL).await;
    let before = shop.client(0).sign_in(shop.id(), EMAIL, PASSWORD).await;
    let (secrets, id) = (shop.secrets(), shop.app_id());
    let copy = secrets.get(&app_keys_secret(&id)).await.unwrap();
    shop.operator.terminate().await.expect("the operator ends");
    for secret in [app_keys_secret(&id), rendered_app_secret(&id)] {
        secrets.delete(&secret, &DeleteParams::default()).await.unwrap();
    }
    shop.operator.start().unwrap();
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    shop.install.until(&shop.app, type_, status, "KeysLost").await;

    let patch = Patch::Merge(json!({ "data": copy.data }));
    secrets.patch(&app_keys_secret(&id), &PatchParams::default(), &patch).await.unwrap();
    shop.install.ready(&shop.app).await;
    for server in 0..2 {
        shop.client(server).signed_in(shop.id(), before.token()).verify().await.expect(StatusCode::OK);
    }
}
