//! From `kubectl apply` to Ready, and what the status says on the way.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{ObjectMeta, PostParams},
};
use latchkey_crds::conditions::{Condition, ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Cluster, Endpoint, Install},
    control_plane::audit,
    eventually,
};
use serde_json::{Value, json};

use super::look::{
    LIMIT, conditions, events, keys, kubectl, named, object, register, rendered_name, secret_object, told, values,
};

/// A manifest, applied, is all that it takes: every server has the App, and its users can register.
#[tokio::test]
async fn an_app_that_is_applied_becomes_ready_on_every_server() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let github = Provider::new("github", "github");
    let app = App::new("shop").relay(Relay::to(&install.smtp)).provider(&github);
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.ready(&app).await;

    for server in &servers {
        let answer =
            install.client_of(server).register(app.id(), "Ada", "ada@example.com", "a quiet harbour at noon").await;
        answer.expect(http::StatusCode::OK);
    }
    let status = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!(status.app_id.as_deref(), Some(app.id()));
    assert_eq!(status.issuer, Some(format!("{}/{}", install.base_url(), app.id())));
    assert_eq!(status.providers[0].callback_url, format!("{}/{}/github/callback", install.base_url(), app.id()));
    assert_eq!(status.signing_keys[0].id, "s1");
    assert_eq!(status.hmac_keys[0].id, "h1");
    for type_ in ConditionType::APP {
        let told = install.condition(&app, type_).await.unwrap();
        assert_eq!(told.status, ConditionStatus::True, "{type_}: {told:?}");
    }
}

/// Waits until the servers have found that nobody answers for the Provider: after it they find nothing else.
async fn nobody_there(install: &Install<'_>, name: &str) {
    let provider = ("Provider", install.tenant(), name);
    told(install, provider, ConditionType::Reachable, ConditionStatus::False, "TokenEndpointFailed").await;
}

/// What a table of kubectl shows: its columns, then its rows, by words.
fn table(printed: &str) -> Vec<Vec<&str>> {
    printed.lines().map(|line| line.split_whitespace().collect()).collect()
}

/// The time of the API server, in the words of the objects that it makes.
async fn now(install: &Install<'_>) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    let maps: Api<ConfigMap> = Api::namespaced(install.admin(), install.namespace());
    let metadata = ObjectMeta { generate_name: Some("now-".to_owned()), ..ObjectMeta::default() };
    let made = maps.create(&PostParams::default(), &ConfigMap { metadata, ..ConfigMap::default() }).await.unwrap();
    made.metadata.creation_timestamp.unwrap()
}

async fn told_of(install: &Install<'_>, kind: &str, name: &str) -> Vec<Condition> {
    conditions(&object(install, kind, install.tenant(), name).await.unwrap()).unwrap()
}

#[tokio::test]
async fn kubectl_shows_and_awaits_what_becomes_of_an_app() {
    let install = Cluster::shared().await.install().await;
    let _servers = install.serve(1).await;
    let github = Provider::new("github", "github");
    let app = App::new("columns").set("/providerRefs", json!([{ "name": "github", "alias": "hub" }]));
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();

    // Nobody has looked at it yet, and no tool may call it healthy.
    for (kind, name, types) in [("App", app.id(), ConditionType::APP), ("Provider", "github", ConditionType::PROVIDER)]
    {
        let first = object(&install, kind, install.tenant(), name).await.unwrap();
        assert_eq!(first.data["status"]["observedGeneration"], -1);
        let told = conditions(&first).unwrap();
        assert_eq!(told.iter().map(|one| one.type_.as_str()).collect::<Vec<_>>(), types.map(ConditionType::as_str));
        for one in told {
            assert_eq!((one.status, one.reason.as_str()), (ConditionStatus::Unknown, "Pending"));
            assert_eq!((one.observed_generation, one.message.as_str()), (Some(-1), "Waiting for the operator"));
        }
    }
    let printed = kubectl(&install, &["get", "lkapp"]).await;
    let rows = table(&printed);
    assert_eq!(rows[0], ["NAME", "READY", "REASON", "APPID", "AGE"]);
    assert_eq!(rows[1][..3], [app.id(), "Unknown", "Pending"]);

    let _operator = install.operator().await;
    let name = format!("lkapp/{}", app.id());
    kubectl(&install, &["wait", "--for=condition=Ready", &name, "--timeout=60s"]).await;
    kubectl(&install, &["wait", "--for=condition=Ready", "lkprov/github", "--timeout=60s"]).await;
    nobody_there(&install, "github").await;
    let printed = kubectl(&install, &["get", "lkapp"]).await;
    assert_eq!(table(&printed)[1][..4], [app.id(), "True", "Ready", app.id()]);
    let printed = kubectl(&install, &["get", "lkprov"]).await;
    assert_eq!(table(&printed)[0], ["NAME", "READY", "REASON", "REACHABLE", "AGE"]);
    assert_eq!(table(&printed)[1][..4], ["github", "True", "Ready", "False"]);
    let all = kubectl(&install, &["get", "latchkey", "--output=name"]).await;
    assert_eq!(all, format!("app.latchkey.dev/{}\nprovider.latchkey.dev/github\n", app.id()));
    let status = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!(status.providers[0].name, "hub");
    assert_eq!(status.providers[0].callback_url, format!("{}/{}/hub/callback", install.base_url(), app.id()));

    let missing = app.clone().provider(&Provider::new("missing", "github"));
    install.apply(&missing).await.unwrap();
    let said = install.until(&missing, ConditionType::Ready, ConditionStatus::False, "ProviderNotFound").await;
    let wide = kubectl(&install, &["get", "lkapp", "--output=wide"]).await;
    assert!(wide.lines().next().unwrap().ends_with("MESSAGE") && wide.contains(&said), "{wide}");
}

#[tokio::test]
async fn the_times_of_conditions_move_with_their_status_alone() {
    let install = Cluster::shared().await.install().await;
    let _servers = install.serve(1).await;
    let _operator = install.operator().await;
    let app = App::new("times");
    let before = now(&install).await;
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let after = now(&install).await;
    let time = |told: &[Condition], type_: ConditionType| {
        told.iter().find(|one| one.type_ == type_.as_str()).unwrap().last_transition_time.clone()
    };
    let first = told_of(&install, "App", app.id()).await;
    for one in &first {
        let at = &one.last_transition_time;
        assert!(before.0 <= at.0 && at.0 <= after.0, "{one:?}: between {before:?} and {after:?}");
    }
    // Times are in whole seconds: an edit in the next one, so that a time that moves is seen.
    eventually("the next second", LIMIT, || async { (now(&install).await.0 > after.0).then_some(()) }).await;
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;
    let second = told_of(&install, "App", app.id()).await;
    for type_ in [ConditionType::Accepted, ConditionType::ResolvedRefs] {
        assert_eq!(time(&second, type_), time(&first, type_), "{type_}");
    }
    let generation = install.get(&app).await.unwrap().metadata.generation;
    assert_eq!(generation, Some(2));
    assert!(second.iter().all(|one| one.observed_generation == generation));
    assert_eq!(install.get(&app).await.unwrap().status.unwrap().observed_generation, generation);

    let broken = edited.clone().provider(&Provider::new("missing", "github"));
    install.apply(&broken).await.unwrap();
    install.until(&broken, ConditionType::Ready, ConditionStatus::False, "ProviderNotFound").await;
    install.until(&broken, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    let third = told_of(&install, "App", app.id()).await;
    assert_eq!(time(&third, ConditionType::Accepted), time(&first, ConditionType::Accepted));
    for type_ in [ConditionType::ResolvedRefs, ConditionType::Ready] {
        assert!(time(&third, type_).0 > time(&second, type_).0, "{type_}");
    }
}

#[tokio::test]
async fn events_tell_what_an_app_led_to_and_nothing_of_the_fleet() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let there = install.tenants()[1].as_str();
    let app = App::new("events");
    let reasons = async |namespace: &str, name: &str| -> Vec<String> {
        let mut told = events(&install, namespace, name).await;
        told.sort();
        told.into_iter().map(|(type_, reason, note)| format!("{type_} {reason}: {note}")).collect()
    };
    let until = async |namespace: &str, name: &str, wanted: &[String]| {
        let mut wanted = wanted.to_vec();
        wanted.sort();
        eventually(&format!("the Events of {name} are {wanted:#?}"), LIMIT, || async {
            (reasons(namespace, name).await == wanted).then_some(())
        })
        .await;
    };
    let programmed = async || {
        let revision = install.get(&app).await.unwrap().status.unwrap().revision.unwrap();
        format!("Normal Programmed: every server pod serves revision {}", &revision[..12])
    };
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let mut wanted = vec![programmed().await];
    until(install.tenant(), app.id(), &wanted).await;
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;
    wanted.push(programmed().await);
    until(install.tenant(), app.id(), &wanted).await;
    let broken = edited.clone().provider(&Provider::new("missing", "github"));
    install.apply(&broken).await.unwrap();
    let said = install.until(&broken, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderNotFound").await;
    wanted.push(format!("Warning ProviderNotFound: {said}"));
    until(install.tenant(), app.id(), &wanted).await;
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;

    install.apply_all(&named(&app, "second", there)).await.unwrap();
    let second = ("App", there, "second");
    let said = told(&install, second, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    until(there, "second", &[format!("Warning AppIDConflict: {said}")]).await;

    // Servers come, go and come back: that is not of this App's doing.
    let more = install.serve(1).await;
    for server in servers.iter().chain(&more) {
        server.set_endpoint(Endpoint::NOT_READY).await.unwrap();
    }
    install.until(&app, ConditionType::Programmed, ConditionStatus::Unknown, "NoServers").await;
    for server in servers.iter().chain(&more) {
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
    }
    install.ready(&app).await;
    assert_eq!(reasons(there, "second").await.len(), 1);
    wanted.sort();
    assert_eq!(reasons(install.tenant(), app.id()).await, wanted);
}

#[tokio::test]
async fn no_secret_is_in_a_status_an_event_or_a_log() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(1).await;
    let operator = install.operator_as(install.operator_account(), &["--log", "debug"]);
    let github = Provider::new("github", "github");
    // One with a login in order, and two whose Secrets cannot be used for what is in them.
    let mut relay = Relay::to(&install.smtp);
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
    install.ready(&app).await;
    let said = install.until(&broken, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretKeyInvalid").await;
    assert!(said.contains("apple") && said.contains("key password"), "{said}");
    register(&install, &servers[0], &app, "ada").await;

    // Keys that are damaged, so that something is said of them too.
    let kept = keys(&install, &app).await.unwrap();
    let document: Value = serde_json::from_slice(&values(&kept)["keys.json"]).unwrap();
    let private = document["signing"][0]["privateKey"].as_str().unwrap();
    let private = private.lines().nth(1).unwrap();
    let hmac = document["hmac"][0]["secret"].as_str().unwrap();
    let mut damaged = document.clone();
    damaged["signing"][0]["state"] = json!(private);
    let patch = json!({ "stringData": { "keys.json": damaged.to_string() } });
    let secrets = super::look::own_secrets(&install);
    let patch = kube::api::Patch::Merge(&patch);
    secrets.patch(&kept.name_any(), &Default::default(), &patch).await.unwrap();
    install.until(&app, ConditionType::Accepted, ConditionStatus::False, "KeysInvalid").await;

    let mut shown = vec![("the operator's log".to_owned(), operator.logged())];
    shown.push(("the server's log".to_owned(), servers[0].logged()));
    for (kind, name) in [("App", app.id()), ("App", broken.id()), ("Provider", "github"), ("Provider", "apple")] {
        let object = object(&install, kind, install.tenant(), name).await.unwrap();
        shown.push((format!("{kind} {name}"), serde_json::to_string(&object).unwrap()));
    }
    for name in [app.id(), broken.id()] {
        let told = events(&install, install.tenant(), name).await;
        assert!(!told.is_empty());
        shown.push((format!("the Events of {name}"), format!("{told:?}")));
    }
    let apple = "cHJpdmF0ZS1rZXktb2YtYXBwbGU=";
    for secret in [github.secret(), "of-the-relay", apple, private, hmac] {
        for (what, text) in &shown {
            assert!(!text.contains(secret), "{what} shows {secret}");
        }
    }
}

#[tokio::test]
async fn what_is_applied_unchanged_or_means_the_same_writes_nothing() {
    let install = Cluster::shared().await.install().await;
    let _servers = install.serve(2).await;
    let operator = install.operator().await;
    let github = Provider::new("github", "github");
    let app = App::new("same").relay(Relay::to(&install.smtp)).provider(&github).template("confirm.txt", "{{ code }}");
    let mut second = named(&app, "second", install.tenant()).swap_remove(0);
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    install.apply_all(&[second.clone()]).await.unwrap();
    let conflict = ("App", install.tenant(), "second");
    told(&install, conflict, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    nobody_there(&install, "github").await;

    let plane = install.cluster().plane();
    let mark = plane.audit_mark();
    for round in 0..3 {
        install.apply_provider(&github).await.unwrap();
        install.apply(&app).await.unwrap();
        install.apply_all(&[second.clone()]).await.unwrap();
        // What the operator looks at anew, to find that all is as it was.
        let more = json!({ "metadata": { "annotations": { "example.com/round": round.to_string() } } });
        let patch = kube::api::Patch::Merge(&more);
        install.apps().patch_metadata(app.id(), &Default::default(), &patch).await.unwrap();
        install.providers().patch_metadata("github", &Default::default(), &patch).await.unwrap();
        second["metadata"]["labels"] = json!({ "example.com/round": round.to_string() });
        let unused = json!({ "stringData": { "unused": round.to_string() } });
        let patch = kube::api::Patch::Merge(&unused);
        let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(install.admin(), install.tenant());
        secrets.patch("github", &Default::default(), &patch).await.unwrap();
        secrets.patch(&format!("{}-smtp", app.id()), &Default::default(), &patch).await.unwrap();
    }
    let mut others = vec![later(&install).await];
    // One that starts looks at everything.
    operator.kill();
    operator.start().unwrap();
    others.push(later(&install).await);
    others.push(later(&install).await);

    let user = install.operator_account().user_name();
    let asked = plane.audit_since(mark).unwrap();
    let of_others = |event: &audit::Event| others.iter().any(|other| event.name.contains(other.id()));
    let writes: Vec<_> = asked
        .iter()
        .filter(|event| event.user == user && event.is_write() && event.resource != "leases")
        // Events have names of their own: there is one that tells that the other App is programmed.
        .filter(|event| !of_others(event) && event.resource != "events")
        .collect();
    assert!(writes.is_empty(), "{writes:#?}");
    let events = events(&install, install.tenant(), app.id()).await;
    assert_eq!(events.len(), 1, "{events:#?}");
    let published = |other: &App| asked.iter().any(|event| event.name == rendered_name(other) && event.user == user);
    assert!(others.iter().all(published), "what the operator writes is in the log");
}

/// Applies another App and waits until it is Ready: by then the operator has looked at what was changed before.
async fn later(install: &Install<'_>) -> App {
    let app = App::new("later");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    app
}
