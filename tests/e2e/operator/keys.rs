//! The operator creates, rotates, revokes and restores the keys of an App
//! (specification: Keys, Rotation; Keys, Revoked and lost keys).

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
    client::ApiClient,
    cluster::{Endpoint, Installation, OperatorProcess, ServerInPod, TestCluster},
    eventually_ok,
    passwords::PASSWORD,
    proxy::Proxy,
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{MAIL_LIMIT, NAME, app};

const EMAIL: &str = "ada@example.com";
/// The operator reconciles within a second or two; on a loaded machine, or after a cut watch, it takes longer.
const LIMIT: Duration = Duration::from_secs(90);

/// Two servers, one operator, and an App that is Ready.
struct TestInstall {
    install: Installation<'static>,
    servers: Vec<ServerInPod>,
    operator: OperatorProcess,
    app: App,
}

/// Logs in at one server after another, and refreshes one session, until [`LoginLoad::stop_and_check`] is called.
struct LoginLoad {
    stop: Arc<AtomicBool>,
    task: JoinHandle<(usize, Vec<String>)>,
}

fn key_states(keys: &[KeyStatus]) -> Vec<String> {
    keys.iter().map(|key| format!("{} {:?}", key.id, key.state)).collect()
}

/// The id of the key that signed an access token.
fn key_id_of(token: &str) -> String {
    let head = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap()).unwrap();
    serde_json::from_slice::<Value>(&head).unwrap()["kid"].as_str().unwrap().to_owned()
}

// === impl TestInstall ===

impl TestInstall {
    async fn start() -> Self {
        let install = TestCluster::shared().await.install().await;
        let servers = install.start_servers(2).await;
        Self::start_with(install, servers).await
    }

    async fn start_with(install: Installation<'static>, servers: Vec<ServerInPod>) -> Self {
        let operator = install.start_operator().await;
        let app = app().limit("refreshesPerSession", &[(1_000_000, 60)]);
        install.apply(&app).await.unwrap();
        install.wait_until_ready(&app).await;
        Self { install, servers, operator, app }
    }

    fn id(&self) -> &str {
        self.app.id()
    }

    fn app_id(&self) -> AppId {
        self.id().parse().unwrap()
    }

    /// Returns an API client for this server. Each API client has a different client address.
    fn client(&self, server: usize) -> ApiClient {
        self.install.client_of(&self.servers[server])
    }

    /// Registers at a server, and returns the code from the mail.
    async fn register_for_code(&self, server: usize, email: &str) -> String {
        self.client(server).register(self.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK);
        self.install.smtp.mails().wait_for(|mail| mail.is_to(email), MAIL_LIMIT).await.code()
    }

    async fn annotate(&self, name: &str, value: &str) {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: value } } }));
        self.install.apps().patch(self.id(), &PatchParams::default(), &patch).await.unwrap();
    }

    /// The signing keys and the HMAC keys in the App's status.
    async fn keys(&self) -> (Vec<KeyStatus>, Vec<KeyStatus>) {
        let status = self.install.get(&self.app).await.unwrap().status.unwrap();
        (status.signing_keys, status.hmac_keys)
    }

    /// Waits until the App's status has these keys in these states.
    async fn wait_for_keys(&self, signing: &[&str], hmac: &[&str]) {
        eventually_ok(&format!("the keys are {signing:?} and {hmac:?}"), LIMIT, || async {
            let keys = self.keys().await;
            let found = (key_states(&keys.0), key_states(&keys.1));
            if found.0 == signing && found.1 == hmac { Ok(()) } else { Err(found) }
        })
        .await;
    }

    /// The ids of the keys in a server's JWKS document.
    async fn listed_key_ids(&self, server: usize) -> Vec<String> {
        let jwks = self.client(server).get(&format!("{}/.well-known/jwks.json", self.id())).await;
        let jwks = jwks.expect(StatusCode::OK);
        jwks.body["keys"].as_array().unwrap().iter().map(|key| key["kid"].as_str().unwrap().to_owned()).collect()
    }

    /// Edits the App's spec and waits until the operator has observed the edit, and therefore all earlier changes.
    async fn edit_and_wait(&self, name: &str) {
        let patch = Patch::Merge(json!({ "spec": { "displayName": name } }));
        let apps = self.install.apps();
        let edited = apps.patch(self.id(), &PatchParams::default(), &patch).await.unwrap();
        eventually_ok("the edit is observed", LIMIT, || async {
            let observed = apps.get(self.id()).await.unwrap().status.unwrap().observed_generation;
            if observed == edited.metadata.generation { Ok(()) } else { Err(observed) }
        })
        .await;
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.install.admin(), self.install.namespace())
    }

    fn start_load(&self) -> LoginLoad {
        let stop = Arc::new(AtomicBool::new(false));
        let (is_stopped, app) = (Arc::clone(&stop), self.id().to_owned());
        let addresses: Vec<_> = self.servers.iter().map(|server| server.public).collect();
        let task = tokio::spawn(async move {
            let (mut passed, mut failed) = (0, Vec::new());
            let mut refresh_token: Option<String> = None;
            for address in addresses.into_iter().cycle() {
                if is_stopped.load(Ordering::Relaxed) {
                    break;
                }
                let client = ApiClient::new(address);
                let response = client.login(&app, EMAIL, PASSWORD).await;
                // A refresh token from one server is valid at the other server, whichever key signed it.
                let token = refresh_token.get_or_insert_with(|| response.string("refresh_token").to_owned());
                let refreshed = client.refresh(&app, token).await;
                match refreshed.status {
                    StatusCode::OK => refreshed.string("refresh_token").clone_into(token),
                    _ => failed.push(refreshed.text),
                }
                let verified = match response.status {
                    StatusCode::OK => client.with_token(&app, response.string("token")).verify().await,
                    _ => response,
                };
                match verified.status {
                    StatusCode::OK => passed += 1,
                    _ => failed.push(verified.text),
                }
            }
            (passed, failed)
        });
        LoginLoad { stop, task }
    }
}

// === impl LoginLoad ===

impl LoginLoad {
    async fn stop_and_check(self) {
        self.stop.store(true, Ordering::Relaxed);
        let (passed, failed) = self.task.await.unwrap();
        assert!(
            failed.is_empty(),
            "{} of {} logins or refreshes failed: {}",
            failed.len(),
            failed.len() + passed,
            failed[0]
        );
        assert!(passed > 0, "no login succeeded");
    }
}

#[tokio::test]
async fn first_keys_are_active_immediately_and_the_status_has_their_expiry() {
    let test = TestInstall::start().await;
    test.wait_for_keys(&["s1 Active"], &["h1 Active"]).await;
    let (signing, hmac) = test.keys().await;
    assert!(signing[0].not_after.is_some() && signing[0].not_after == hmac[0].not_after, "{signing:?} {hmac:?}");
    for server in 0..2 {
        assert_eq!(test.listed_key_ids(server).await, ["s1"]);
    }
    let secret = test.secrets().get(&app_keys_secret(&test.app_id())).await.unwrap();
    assert_eq!(secret.type_.as_deref(), Some("latchkey.dev/app-keys"));
}

#[tokio::test]
async fn a_requested_rotation_happens_once_without_effect_on_users() {
    let test = TestInstall::start().await;
    let code = test.register_for_code(0, EMAIL).await;
    let before = test.client(0).authenticate(test.id(), EMAIL, PASSWORD).await;
    let load = test.start_load();

    test.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    // The new signing key stays Published for minutes, until every cached JWKS document contains it.
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    for server in 0..2 {
        assert_eq!(test.listed_key_ids(server).await, ["s1", "s2"]);
    }
    let after = test.client(1).authenticate(test.id(), EMAIL, PASSWORD).await;
    assert_eq!((key_id_of(before.token()), key_id_of(after.token())), ("s1".to_owned(), "s1".to_owned()));
    let (signing, hmac) = test.keys().await;
    let have_expiry = |keys: &[KeyStatus]| keys.iter().map(|key| key.not_after.is_some()).collect::<Vec<_>>();
    assert_eq!(
        (have_expiry(&signing), have_expiry(&hmac)),
        (vec![true, false], vec![true, true]),
        "{signing:?} {hmac:?}"
    );

    // Tokens and codes from before the rotation are still valid, also at the other server.
    before.verify().await.expect(StatusCode::OK);
    test.client(1).with_token(test.id(), before.token()).verify().await.expect(StatusCode::OK);
    load.stop_and_check().await;
    test.client(1).confirm(test.id(), &code).await.expect(StatusCode::OK);
    test.install.wait_until_ready(&test.app).await;

    let events: Api<Event> = Api::namespaced(test.install.admin(), test.install.tenant());
    eventually_ok("an Event reports the new key", LIMIT, || async {
        let list = events.list(&ListParams::default()).await.unwrap();
        let notes: Vec<_> =
            list.items.into_iter().map(|event| (event.reason, event.note.unwrap_or_default())).collect();
        let is_reported = notes
            .iter()
            .any(|(reason, note)| reason.as_deref() == Some("KeysChanged") && note.contains("h2 is Active"));
        if is_reported { Ok(()) } else { Err(notes) }
    })
    .await;

    // The same value of the annotation requests no second rotation, also after a restart of the operator. A new value
    // requests another rotation.
    test.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    test.operator.terminate().await.expect("the operator ends");
    test.operator.start().unwrap();
    test.edit_and_wait("The Other Shop").await;
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    test.annotate(ROTATE_KEYS_ANNOTATION, "2").await;
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]).await;
}

#[tokio::test]
async fn no_key_is_active_before_every_serving_pod_has_it() {
    let install = TestCluster::shared().await.install().await;
    let plane = install.cluster().plane();
    let proxy = Proxy::start(plane.addr()).unwrap();
    let account = plane.account_at(install.server_account(), proxy.addr()).unwrap();
    let proxied_server = install.create_server(&account, &[]).await.unwrap();
    proxied_server.start_ready().await.unwrap();
    proxied_server.set_endpoint(Endpoint::SERVING).await.unwrap();
    let direct_server = install.start_server().await;
    let test = TestInstall::start_with(install, vec![proxied_server, direct_server]).await;
    let name = test.servers[0].name().to_owned();
    test.register_for_code(0, EMAIL).await;
    let load = test.start_load();

    proxy.stall();
    test.annotate(ROTATE_KEYS_ANNOTATION, "1").await;
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]).await;
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let message = test.install.wait_for_condition(&test.app, type_, status, "WaitingForServers").await;
    assert!(message.contains(&name), "{message}");
    // One pod does not have the new keys. The codes of each pod are valid at the other pod.
    for (from, to) in [(0, 1), (1, 0)] {
        let code = test.register_for_code(from, &format!("from-{from}@example.com")).await;
        test.client(to).confirm(test.id(), &code).await.expect(StatusCode::OK);
    }
    test.edit_and_wait("The Other Shop").await;
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]).await;
    proxy.restore().unwrap();
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]).await;
    load.stop_and_check().await;

    // The rotation does not wait for a pod that is no longer a serving pod.
    proxy.stall();
    test.annotate(ROTATE_KEYS_ANNOTATION, "2").await;
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active", "h3 Published"]).await;
    test.servers[0].set_endpoint(Endpoint::TERMINATING).await.unwrap();
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]).await;
}

#[tokio::test]
async fn a_revoked_key_is_dropped_immediately_with_its_tokens_and_codes() {
    let test = TestInstall::start().await;
    let code = test.register_for_code(0, EMAIL).await;
    let before = test.client(0).authenticate(test.id(), EMAIL, PASSWORD).await;
    before.verify().await.expect(StatusCode::OK);

    test.annotate(REVOKE_KEY_ANNOTATION, "s1").await;
    test.wait_for_keys(&["s2 Active"], &["h1 Active"]).await;
    test.install.wait_until_ready(&test.app).await;
    for server in 0..2 {
        assert_eq!(test.listed_key_ids(server).await, ["s2"]);
        let refused = test.client(server).with_token(test.id(), before.token()).verify().await;
        refused.expect(StatusCode::UNAUTHORIZED);
        let after = test.client(server).authenticate(test.id(), EMAIL, PASSWORD).await;
        assert_eq!(key_id_of(after.token()), "s2");
        after.verify().await.expect(StatusCode::OK);
    }

    test.annotate(REVOKE_KEY_ANNOTATION, "h1").await;
    test.wait_for_keys(&["s2 Active"], &["h2 Active"]).await;
    test.install.wait_until_ready(&test.app).await;
    test.client(0).confirm(test.id(), &code).await.expect_error(StatusCode::BAD_REQUEST, "invalid_code");

    test.annotate(REVOKE_KEY_ANNOTATION, "s9").await;
    let (type_, status) = (ConditionType::ResolvedRefs, ConditionStatus::False);
    let message = test.install.wait_for_condition(&test.app, type_, status, "InvalidSpec").await;
    assert!(message.contains("latchkey.dev/revoke-key names no key of this App"), "{message}");
    test.wait_for_keys(&["s2 Active"], &["h2 Active"]).await;
}

#[tokio::test]
async fn changing_the_signing_algorithm_rotates_the_signing_keys() {
    let test = TestInstall::start().await;
    let app = test.app.clone().set("/tokens/signingAlgorithm", "EdDSA");
    test.install.apply(&app).await.unwrap();
    test.wait_for_keys(&["s1 Active", "s2 Published"], &["h1 Active"]).await;
    test.install.wait_until_ready(&test.app).await;
    for server in 0..2 {
        let jwks = test.client(server).get(&format!("{}/.well-known/jwks.json", test.id())).await;
        let algorithms: Vec<_> = jwks.body["keys"].as_array().unwrap().iter().map(|key| key["alg"].clone()).collect();
        assert_eq!(algorithms, ["ES256", "EdDSA"], "{}", jwks.text);
    }
}

#[tokio::test]
async fn lost_keys_are_rebuilt_from_the_rendered_secret_and_without_it_the_app_is_not_served() {
    let test = TestInstall::start().await;
    let code = test.register_for_code(0, EMAIL).await;
    let before = test.client(0).authenticate(test.id(), EMAIL, PASSWORD).await;
    let (secrets, id) = (test.secrets(), test.app_id());
    let keys = |secret: Secret| {
        let document = &secret.data.unwrap()[APP_KEYS_KEY].0;
        let document: Value = serde_json::from_slice(document).unwrap();
        let secrets = (document["signing"][0]["privateKey"].clone(), document["hmac"][0]["secret"].clone());
        assert!(secrets.0.is_string() && secrets.1.is_string());
        secrets
    };

    let first_secret = secrets.get(&app_keys_secret(&id)).await.unwrap();
    secrets.delete(&app_keys_secret(&id), &DeleteParams::default()).await.unwrap();
    let name = app_keys_secret(&id);
    let restored_secret = eventually_ok("the key Secret is restored", LIMIT, || secrets.get(&name)).await;
    assert_ne!(restored_secret.metadata.uid, first_secret.metadata.uid);
    assert_eq!(keys(restored_secret), keys(first_secret.clone()));
    before.verify().await.expect(StatusCode::OK);
    test.client(1).confirm(test.id(), &code).await.expect(StatusCode::OK);
    let before = test.client(0).authenticate(test.id(), EMAIL, PASSWORD).await;

    // Stops the operator, because it would restore one Secret from the other.
    test.operator.terminate().await.expect("the operator ends");
    for secret in [app_keys_secret(&id), rendered_app_secret(&id)] {
        secrets.delete(&secret, &DeleteParams::default()).await.unwrap();
    }
    test.operator.start().unwrap();
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let message = test.install.wait_for_condition(&test.app, type_, status, "KeysLost").await;
    assert!(message.contains("restore the key Secret") && message.contains(NEW_KEYS_ANNOTATION), "{message}");
    test.install.wait_for_condition(&test.app, ConditionType::Ready, status, "KeysLost").await;
    eventually_ok("no server serves the users under other keys", LIMIT, || async {
        for server in 0..2 {
            let response = test.client(server).login(test.id(), EMAIL, PASSWORD).await;
            if response.status != StatusCode::NOT_FOUND {
                return Err(response.text);
            }
        }
        Ok(())
    })
    .await;

    test.annotate(NEW_KEYS_ANNOTATION, "1").await;
    test.install.wait_until_ready(&test.app).await;
    let after = test.client(1).authenticate(test.id(), EMAIL, PASSWORD).await;
    after.verify().await.expect(StatusCode::OK);
    test.client(0).with_token(test.id(), after.token()).verify().await.expect(StatusCode::OK);
    before.verify().await.expect(StatusCode::UNAUTHORIZED);

    // The annotation requests new keys only once: after a restart, the operator keeps the new keys.
    let requested_keys = secrets.get(&app_keys_secret(&id)).await.unwrap();
    test.operator.terminate().await.expect("the operator ends");
    test.operator.start().unwrap();
    test.edit_and_wait("The Other Shop").await;
    assert_eq!(keys(secrets.get(&app_keys_secret(&id)).await.unwrap()), keys(requested_keys));
}

/// Instead of requesting new keys, an administrator restores the key Secret from a copy.
#[tokio::test]
async fn restoring_lost_keys_from_a_copy_ends_no_session() {
    let test = TestInstall::start().await;
    test.register_for_code(0, EMAIL).await;
    let before = test.client(0).authenticate(test.id(), EMAIL, PASSWORD).await;
    let (secrets, id) = (test.secrets(), test.app_id());
    let copy = secrets.get(&app_keys_secret(&id)).await.unwrap();
    test.operator.terminate().await.expect("the operator ends");
    for secret in [app_keys_secret(&id), rendered_app_secret(&id)] {
        secrets.delete(&secret, &DeleteParams::default()).await.unwrap();
    }
    test.operator.start().unwrap();
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    test.install.wait_for_condition(&test.app, type_, status, "KeysLost").await;

    let patch = Patch::Merge(json!({ "data": copy.data }));
    secrets.patch(&app_keys_secret(&id), &PatchParams::default(), &patch).await.unwrap();
    test.install.wait_until_ready(&test.app).await;
    for server in 0..2 {
        test.client(server).with_token(test.id(), before.token()).verify().await.expect(StatusCode::OK);
    }
}
