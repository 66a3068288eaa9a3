//! An App becomes Ready after `kubectl apply`, and kubectl shows its status.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{ObjectMeta, PostParams},
};
use latchkey_crds::conditions::{Condition, ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Endpoint, Installation, TestCluster},
    control_plane::audit,
    eventually,
    passwords::PASSWORD,
};
use serde_json::{Value, json};

use super::helpers::{
    LIMIT, conditions_of, events_of, get_object, key_secret, kubectl, objects_named, register_user,
    rendered_secret_name, secret_object, secret_values, wait_for_condition,
};

/// After `kubectl apply`, nothing else is needed: every server serves the App, and users can register.
#[tokio::test]
async fn an_applied_app_becomes_ready_on_every_server() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let github = Provider::new("github", "github");
    let app = App::new("shop").relay(Relay::of(&install.smtp)).provider(&github);
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;

    for server in &servers {
        let response = install.client_of(server).register(app.id(), "Ada", "ada@example.com", PASSWORD).await;
        response.expect(http::StatusCode::OK);
    }
    let status = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!(status.app_id.as_deref(), Some(app.id()));
    assert_eq!(status.issuer, Some(format!("{}/{}", install.base_url(), app.id())));
    assert_eq!(status.providers[0].callback_url, format!("{}/{}/github/callback", install.base_url(), app.id()));
    assert_eq!(status.signing_keys[0].id, "s1");
    assert_eq!(status.hmac_keys[0].id, "h1");
    for type_ in ConditionType::APP {
        let condition = install.condition(&app, type_).await.unwrap();
        assert_eq!(condition.status, ConditionStatus::True, "{type_}: {condition:?}");
    }
}

/// Waits until the condition Reachable reports that the provider's token endpoint cannot be reached. After that, the
/// condition does not change.
async fn wait_until_provider_unreachable(install: &Installation<'_>, name: &str) {
    let provider = ("Provider", install.tenant(), name);
    wait_for_condition(install, provider, ConditionType::Reachable, ConditionStatus::False, "TokenEndpointFailed")
        .await;
}

/// The words of each line of a table that kubectl prints. The first line is the header.
fn table_words(printed: &str) -> Vec<Vec<&str>> {
    printed.lines().map(|line| line.split_whitespace().collect()).collect()
}

/// Returns the API server's time: the creation timestamp of a new object.
async fn api_server_time(install: &Installation<'_>) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    let maps: Api<ConfigMap> = Api::namespaced(install.admin(), install.namespace());
    let metadata = ObjectMeta { generate_name: Some("now-".to_owned()), ..ObjectMeta::default() };
    let created = maps.create(&PostParams::default(), &ConfigMap { metadata, ..ConfigMap::default() }).await.unwrap();
    created.metadata.creation_timestamp.unwrap()
}

async fn conditions_now(install: &Installation<'_>, kind: &str, name: &str) -> Vec<Condition> {
    conditions_of(&get_object(install, kind, install.tenant(), name).await.unwrap()).unwrap()
}

#[tokio::test]
async fn kubectl_shows_the_state_of_an_app_and_can_wait_for_it() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let github = Provider::new("github", "github");
    let app = App::new("columns").set("/providerRefs", json!([{ "name": "github", "alias": "hub" }]));
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();

    // Before an operator has reconciled the objects, no tool must consider them healthy.
    for (kind, name, types) in [("App", app.id(), ConditionType::APP), ("Provider", "github", ConditionType::PROVIDER)]
    {
        let first = get_object(&install, kind, install.tenant(), name).await.unwrap();
        assert_eq!(first.data["status"]["observedGeneration"], -1);
        let initial = conditions_of(&first).unwrap();
        assert_eq!(
            initial.iter().map(|condition| condition.type_.as_str()).collect::<Vec<_>>(),
            types.map(ConditionType::as_str)
        );
        for condition in initial {
            assert_eq!((condition.status, condition.reason.as_str()), (ConditionStatus::Unknown, "Pending"));
            assert_eq!(
                (condition.observed_generation, condition.message.as_str()),
                (Some(-1), "Waiting for the operator")
            );
        }
    }
    let printed = kubectl(&install, &["get", "lkapp"]).await;
    let rows = table_words(&printed);
    assert_eq!(rows[0], ["NAME", "READY", "REASON", "APPID", "AGE"]);
    assert_eq!(rows[1][..3], [app.id(), "Unknown", "Pending"]);

    let _operator = install.start_operator().await;
    let name = format!("lkapp/{}", app.id());
    kubectl(&install, &["wait", "--for=condition=Ready", &name, "--timeout=60s"]).await;
    kubectl(&install, &["wait", "--for=condition=Ready", "lkprov/github", "--timeout=60s"]).await;
    wait_until_provider_unreachable(&install, "github").await;
    let printed = kubectl(&install, &["get", "lkapp"]).await;
    assert_eq!(table_words(&printed)[1][..4], [app.id(), "True", "Ready", app.id()]);
    let printed = kubectl(&install, &["get", "lkprov"]).await;
    assert_eq!(table_words(&printed)[0], ["NAME", "READY", "REASON", "REACHABLE", "AGE"]);
    assert_eq!(table_words(&printed)[1][..4], ["github", "True", "Ready", "False"]);
    let all = kubectl(&install, &["get", "latchkey", "--output=name"]).await;
    assert_eq!(all, format!("app.latchkey.dev/{}\nprovider.latchkey.dev/github\n", app.id()));
    let status = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!(status.providers[0].name, "hub");
    assert_eq!(status.providers[0].callback_url, format!("{}/{}/hub/callback", install.base_url(), app.id()));

    let missing = app.clone().provider(&Provider::new("missing", "github"));
    install.apply(&missing).await.unwrap();
    let message =
        install.wait_for_condition(&missing, ConditionType::Ready, ConditionStatus::False, "ProviderNotFound").await;
    let wide = kubectl(&install, &["get", "lkapp", "--output=wide"]).await;
    assert!(wide.lines().next().unwrap().ends_with("MESSAGE") && wide.contains(&message), "{wide}");
}

#[tokio::test]
async fn condition_times_change_only_with_their_status() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let app = App::new("times");
    let before = api_server_time(&install).await;
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let after = api_server_time(&install).await;
    let transition_time = |conditions: &[Condition], type_: ConditionType| {
        conditions.iter().find(|condition| condition.type_ == type_.as_str()).unwrap().last_transition_time.clone()
    };
    let initial = conditions_now(&install, "App", app.id()).await;
    for condition in &initial {
        let changed_at = &condition.last_transition_time;
        assert!(before.0 <= changed_at.0 && changed_at.0 <= after.0, "{condition:?}: between {before:?} and {after:?}");
    }
    // Times are in whole seconds. Waits for the next second, so that a changed time is visible.
    eventually("the next second", LIMIT, || async { (api_server_time(&install).await.0 > after.0).then_some(()) })
        .await;
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;
    let after_edit = conditions_now(&install, "App", app.id()).await;
    for type_ in [ConditionType::Accepted, ConditionType::ResolvedRefs] {
        assert_eq!(transition_time(&after_edit, type_), transition_time(&initial, type_), "{type_}");
    }
    let generation = install.get(&app).await.unwrap().metadata.generation;
    assert_eq!(generation, Some(2));
    assert!(after_edit.iter().all(|condition| condition.observed_generation == generation));
    assert_eq!(install.get(&app).await.unwrap().status.unwrap().observed_generation, generation);

    let broken = edited.clone().provider(&Provider::new("missing", "github"));
    install.apply(&broken).await.unwrap();
    install.wait_for_condition(&broken, ConditionType::Ready, ConditionStatus::False, "ProviderNotFound").await;
    install.wait_for_condition(&broken, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    let after_error = conditions_now(&install, "App", app.id()).await;
    assert_eq!(
        transition_time(&after_error, ConditionType::Accepted),
        transition_time(&initial, ConditionType::Accepted)
    );
    for type_ in [ConditionType::ResolvedRefs, ConditionType::Ready] {
        assert!(transition_time(&after_error, type_).0 > transition_time(&after_edit, type_).0, "{type_}");
    }
}

#[tokio::test]
async fn events_report_the_effects_of_an_app_and_nothing_about_the_servers() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let other_namespace = install.tenants()[1].as_str();
    let app = App::new("events");
    let event_texts = async |namespace: &str, name: &str| -> Vec<String> {
        let mut found = events_of(&install, namespace, name).await;
        found.sort();
        found.into_iter().map(|(type_, reason, note)| format!("{type_} {reason}: {note}")).collect()
    };
    let wait_for_events = async |namespace: &str, name: &str, expected: &[String]| {
        let mut expected = expected.to_vec();
        expected.sort();
        eventually(&format!("the Events of {name} are {expected:#?}"), LIMIT, || async {
            (event_texts(namespace, name).await == expected).then_some(())
        })
        .await;
    };
    let programmed_event = async || {
        let revision = install.get(&app).await.unwrap().status.unwrap().revision.unwrap();
        format!("Normal Programmed: every server pod serves revision {}", &revision[..12])
    };
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let mut expected = vec![programmed_event().await];
    wait_for_events(install.tenant(), app.id(), &expected).await;
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;
    expected.push(programmed_event().await);
    wait_for_events(install.tenant(), app.id(), &expected).await;
    let broken = edited.clone().provider(&Provider::new("missing", "github"));
    install.apply(&broken).await.unwrap();
    let message = install
        .wait_for_condition(&broken, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderNotFound")
        .await;
    expected.push(format!("Warning ProviderNotFound: {message}"));
    wait_for_events(install.tenant(), app.id(), &expected).await;
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;

    install.apply_all(&objects_named(&app, "second", other_namespace)).await.unwrap();
    let second = ("App", other_namespace, "second");
    let message =
        wait_for_condition(&install, second, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    wait_for_events(other_namespace, "second", &[format!("Warning AppIDConflict: {message}")]).await;

    // Servers start, stop and return. The App is not the cause, so there is no Event about the App.
    let new_servers = install.start_servers(1).await;
    for server in servers.iter().chain(&new_servers) {
        server.set_endpoint(Endpoint::NOT_READY).await.unwrap();
    }
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::Unknown, "NoServers").await;
    for server in servers.iter().chain(&new_servers) {
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
    }
    install.wait_until_ready(&app).await;
    assert_eq!(event_texts(other_namespace, "second").await.len(), 1);
    expected.sort();
    assert_eq!(event_texts(install.tenant(), app.id()).await, expected);
}

#[tokio::test]
async fn no_secret_is_in_a_status_an_event_or_a_log() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(1).await;
    let operator = install.start_operator_as(install.operator_account(), &["--log", "debug"]);
    let github = Provider::new("github", "github");
    // One App is valid. The other one has invalid values in the Secrets of its relay and its Provider.
    let mut relay = Relay::of(&install.smtp);
    relay.login = Some(("user-of-the-relay".to_owned(), "password-of-the-relay".to_owned()));
    let app = App::new("secrets").relay(relay.clone()).provider(&github);
    relay.login = Some(("user-of-the-relay".to_owned(), "password\nof-the-relay".to_owned()));
    let broken = App::new("broken").relay(relay).provider(&Provider::new("apple", "apple"));
    let pem = "-----BEGIN PRIVATE KEY-----\ncHJpdmF0ZS1rZXktb2YtYXBwbGU=\n-----END PRIVATE KEY-----\n";
    let apple = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "apple", "namespace": install.tenant() },
        "spec": { "apple": {
            "clientID": "com.example.shop",
            "teamID": "TEAM123456",
            "keyID": "KEY1234567",
            "privateKeyRef": { "name": "apple", "key": "AuthKey.p8" },
        }},
    });
    install.apply_all(&[secret_object(install.tenant(), "apple", &[("AuthKey.p8", pem)]), apple]).await.unwrap();
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.apply(&broken).await.unwrap();
    install.wait_until_ready(&app).await;
    let message = install
        .wait_for_condition(&broken, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretKeyInvalid")
        .await;
    assert!(message.contains("apple") && message.contains("key password"), "{message}");
    register_user(&install, &servers[0], &app, "ada").await;

    // Damages the keys, so that there are also messages about keys.
    let stored_keys = key_secret(&install, &app).await.unwrap();
    let document: Value = serde_json::from_slice(&secret_values(&stored_keys)["keys.json"]).unwrap();
    let private_key = document["signing"][0]["privateKey"].as_str().unwrap();
    let private_key = private_key.lines().nth(1).unwrap();
    let hmac = document["hmac"][0]["secret"].as_str().unwrap();
    let mut damaged = document.clone();
    damaged["signing"][0]["state"] = json!(private_key);
    let patch = json!({ "stringData": { "keys.json": damaged.to_string() } });
    let secrets = super::helpers::operator_secrets(&install);
    let patch = kube::api::Patch::Merge(&patch);
    secrets.patch(&stored_keys.name_any(), &Default::default(), &patch).await.unwrap();
    install.wait_for_condition(&app, ConditionType::Accepted, ConditionStatus::False, "KeysInvalid").await;

    let mut outputs = vec![("the operator's log".to_owned(), operator.read_log())];
    outputs.push(("the server's log".to_owned(), servers[0].read_log()));
    for (kind, name) in [("App", app.id()), ("App", broken.id()), ("Provider", "github"), ("Provider", "apple")] {
        let object = get_object(&install, kind, install.tenant(), name).await.unwrap();
        outputs.push((format!("{kind} {name}"), serde_json::to_string(&object).unwrap()));
    }
    for name in [app.id(), broken.id()] {
        let found = events_of(&install, install.tenant(), name).await;
        assert!(!found.is_empty());
        outputs.push((format!("the Events of {name}"), format!("{found:?}")));
    }
    let apple = "cHJpdmF0ZS1rZXktb2YtYXBwbGU=";
    for secret in [github.secret(), "of-the-relay", apple, private_key, hmac] {
        for (what, text) in &outputs {
            assert!(!text.contains(secret), "{what} shows {secret}");
        }
    }
}

#[tokio::test]
async fn applying_an_equivalent_object_writes_nothing() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(2).await;
    let operator = install.start_operator().await;
    let github = Provider::new("github", "github");
    let app = App::new("same").relay(Relay::of(&install.smtp)).provider(&github).template("confirm.txt", "{{ code }}");
    let mut second = objects_named(&app, "second", install.tenant()).swap_remove(0);
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    install.apply_all(&[second.clone()]).await.unwrap();
    let conflict = ("App", install.tenant(), "second");
    wait_for_condition(&install, conflict, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    wait_until_provider_unreachable(&install, "github").await;

    let plane = install.cluster().plane();
    let mark = plane.audit_mark();
    for round in 0..3 {
        install.apply_provider(&github).await.unwrap();
        install.apply(&app).await.unwrap();
        install.apply_all(&[second.clone()]).await.unwrap();
        // The operator reconciles because of the following changes, but it has nothing to write.
        let annotations = json!({ "metadata": { "annotations": { "example.com/round": round.to_string() } } });
        let patch = kube::api::Patch::Merge(&annotations);
        install.apps().patch_metadata(app.id(), &Default::default(), &patch).await.unwrap();
        install.providers().patch_metadata("github", &Default::default(), &patch).await.unwrap();
        second["metadata"]["labels"] = json!({ "example.com/round": round.to_string() });
        let unused = json!({ "stringData": { "unused": round.to_string() } });
        let patch = kube::api::Patch::Merge(&unused);
        let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(install.admin(), install.tenant());
        secrets.patch("github", &Default::default(), &patch).await.unwrap();
        secrets.patch(&format!("{}-smtp", app.id()), &Default::default(), &patch).await.unwrap();
    }
    let mut other_apps = vec![apply_another_app(&install).await];
    // After its start, an operator reconciles every object.
    operator.kill();
    operator.start().unwrap();
    other_apps.push(apply_another_app(&install).await);
    other_apps.push(apply_another_app(&install).await);

    let user = install.operator_account().user_name();
    let requests = plane.audit_since(mark).unwrap();
    let is_about_others = |event: &audit::AuditEvent| other_apps.iter().any(|other| event.name.contains(other.id()));
    let writes: Vec<_> = requests
        .iter()
        .filter(|event| event.user == user && event.is_write() && event.resource != "leases")
        // Leaves out Events. Those about this App are checked below.
        .filter(|event| !is_about_others(event) && event.resource != "events")
        .collect();
    assert!(writes.is_empty(), "{writes:#?}");
    let events = events_of(&install, install.tenant(), app.id()).await;
    assert_eq!(events.len(), 1, "{events:#?}");
    let published =
        |other: &App| requests.iter().any(|event| event.name == rendered_secret_name(other) && event.user == user);
    assert!(other_apps.iter().all(published), "the audit log contains the operator's writes");
}

/// Applies another App and waits until it is Ready. Then the operator has reconciled all earlier changes.
async fn apply_another_app(install: &Installation<'_>) -> App {
    let app = App::new("later");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    app
}
