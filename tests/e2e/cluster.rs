//! The chart's objects are there, and give each program what it needs and no more.

use std::{fmt::Debug, fs, time::Duration};

use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    core::v1::{Pod, Secret},
    discovery::v1::EndpointSlice,
    rbac::v1::ClusterRole,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, ObjectMeta, PostParams},
};
use latchkey_crds::names::{
    NAME_ANNOTATION, NAMESPACE_ANNOTATION, RENDERED_APP_KEY, RENDERED_APP_TYPE, rendered_app_secret,
};
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Endpoint, Install, PodServer},
    eventually,
    stack::Stack,
};
use serde_json::json;

/// RBAC follows a change within milliseconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(30);

fn secret(name: &str) -> Secret {
    Secret { metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }, ..Secret::default() }
}

#[track_caller]
fn forbidden<T: Debug>(answer: kube::Result<T>) {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => {}
        other => panic!("not forbidden: {other:?}"),
    }
}

async fn may(client: &Client, namespace: &str, group: &str, resource: &str, verb: &str) -> bool {
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (resource, None),
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                namespace: Some(namespace.to_owned()),
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                verb: Some(verb.to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await.unwrap();
    answer.status.unwrap().allowed
}

#[tokio::test]
async fn servers_list_the_secrets_of_their_namespace_and_no_others() {
    let install = Cluster::shared().await.install().await;
    let client = install.server_account().client().await;
    let here: Api<Secret> = Api::namespaced(client.clone(), install.namespace());
    here.list(&ListParams::default()).await.unwrap();
    forbidden(here.get("one").await);
    forbidden(here.create(&PostParams::default(), &secret("one")).await);
    forbidden(here.delete("one", &DeleteParams::default()).await.map(|_| ()));
    let elsewhere: Api<Secret> = Api::namespaced(client.clone(), install.tenant());
    forbidden(elsewhere.list(&ListParams::default()).await);
    forbidden(elsewhere.get("one").await);
    forbidden(Api::<Secret>::all(client).list(&ListParams::default()).await);
}

#[tokio::test]
async fn an_operator_of_listed_namespaces_sees_no_others() {
    let cluster = Cluster::shared().await;
    let install = cluster.builder().tenants(2).install().await;
    let stranger = cluster.plane().namespace("stranger").await.unwrap();
    let client = install.operator_account().client().await;
    for tenant in install.tenants() {
        assert!(may(&client, tenant, "", "secrets", "get").await);
        assert!(may(&client, tenant, "latchkey.dev", "apps", "watch").await);
        assert!(may(&client, tenant, "latchkey.dev", "apps/status", "patch").await);
        assert!(!may(&client, tenant, "", "secrets", "patch").await, "a tenant's Secrets are never written");
        assert!(!may(&client, tenant, "latchkey.dev", "apps", "delete").await);
        assert!(!may(&client, tenant, "latchkey.dev", "providers", "patch").await);
    }
    for (group, resource) in [("", "secrets"), ("", "configmaps"), ("latchkey.dev", "apps")] {
        for verb in ["get", "list", "watch"] {
            assert!(!may(&client, &stranger, group, resource, verb).await, "{verb} {resource}");
        }
    }
    assert!(may(&client, install.namespace(), "", "secrets", "update").await);
    assert!(!may(&client, install.namespace(), "latchkey.dev", "apps", "list").await);
}

#[tokio::test]
async fn an_operator_of_all_namespaces_writes_secrets_only_in_its_own() {
    let cluster = Cluster::start().await.unwrap();
    let install = cluster.builder().everywhere().install().await;
    let client = install.operator_account().client().await;
    assert!(may(&client, install.tenant(), "", "secrets", "get").await);
    assert!(may(&client, install.tenant(), "latchkey.dev", "apps", "list").await);
    assert!(!may(&client, install.tenant(), "", "secrets", "patch").await);
    assert!(!may(&client, install.tenant(), "coordination.k8s.io", "leases", "create").await);
    for verb in ["get", "list", "watch", "create", "update", "patch", "delete"] {
        assert!(may(&client, install.namespace(), "", "secrets", verb).await, "{verb}");
    }
}

#[tokio::test]
async fn each_permission_is_given_once_and_can_be_taken_away() {
    let cluster = Cluster::start().await.unwrap();
    for everywhere in [false, true] {
        let builder = cluster.builder();
        let install = if everywhere { builder.everywhere() } else { builder }.install().await;
        each_can_be_taken(&install, "operator", &install.operator_account().client().await).await;
        each_can_be_taken(&install, "server", &install.server_account().client().await).await;
    }
}

async fn each_can_be_taken(install: &Install<'_>, component: &str, client: &Client) {
    let permissions = install.permissions(component);
    assert!(!permissions.is_empty());
    for permission in permissions {
        let namespace = permission.namespace.clone().unwrap_or_else(|| install.namespace().to_owned());
        // A name, where only that name is allowed, is not asked for here.
        if permission.group == "coordination.k8s.io" && permission.verb != "create" {
            continue;
        }
        let allowed = || may(client, &namespace, &permission.group, &permission.resource, &permission.verb);
        assert!(allowed().await, "{permission:?}");
        install.take(&permission).await.unwrap();
        eventually(&format!("gone: {permission:?}"), LIMIT, || async { (!allowed().await).then_some(()) }).await;
        install.give_back(&permission).await.unwrap();
        eventually(&format!("back: {permission:?}"), LIMIT, || async { allowed().await.then_some(()) }).await;
    }
}

#[tokio::test]
async fn people_with_the_usual_roles_get_theirs_for_apps_and_providers() {
    let install = Cluster::shared().await.install().await;
    let roles: Api<ClusterRole> = Api::all(install.admin());
    // No controller adds them up here; the labels by which it does are the built-in roles' own.
    for (usual, verbs) in [
        ("admin", ["create", "update", "patch", "delete"].as_slice()),
        ("edit", &["create", "update", "patch", "delete"]),
        ("view", &["get", "list", "watch"]),
    ] {
        let selectors = roles.get(usual).await.unwrap().aggregation_rule.unwrap().cluster_role_selectors.unwrap();
        let labels = selectors.into_iter().filter_map(|selector| selector.match_labels).flatten();
        let labels: Vec<_> = labels.map(|(label, value)| format!("{label}={value}")).collect();
        let found = roles.list(&ListParams::default().labels(&labels.join(","))).await.unwrap();
        let rules = found.items.into_iter().flat_map(|role| role.rules.unwrap_or_default());
        let ours: Vec<_> =
            rules.filter(|rule| rule.api_groups.iter().flatten().any(|group| group == "latchkey.dev")).collect();
        for resource in ["apps", "providers"] {
            for verb in verbs {
                let given = ours.iter().any(|rule| {
                    rule.resources.iter().flatten().any(|of| of == resource) && rule.verbs.iter().any(|of| of == verb)
                });
                assert!(given, "{usual}: {verb} {resource}");
            }
        }
    }
}

#[tokio::test]
async fn a_pod_of_a_server_is_an_endpoint_as_a_controller_would_make_it() {
    let install = Cluster::shared().await.install().await;
    let server = install.server_as(install.server_account(), &[]).await.unwrap();
    let slices: Api<EndpointSlice> = Api::namespaced(install.operator_account().client().await, install.namespace());
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={}", install.ops_service()));
    for wanted in [Endpoint::NOT_READY, Endpoint::SERVING, Endpoint::TERMINATING] {
        server.set_endpoint(wanted).await.unwrap();
        let found = slices.list(&of_service).await.unwrap().items;
        assert_eq!(found.len(), 1);
        let endpoint = &found[0].endpoints[0];
        assert_eq!(endpoint.target_ref.as_ref().unwrap().uid.as_deref(), Some(server.uid()));
        let conditions = endpoint.conditions.as_ref().unwrap();
        let told = (conditions.ready, conditions.serving, conditions.terminating);
        assert_eq!(told, (Some(wanted.ready), Some(wanted.serving), Some(wanted.terminating)));
    }
    let pods: Api<Pod> = Api::namespaced(install.admin(), install.namespace());
    let phase = pods.get(server.name()).await.unwrap().status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Running"));
    server.remove_endpoint().await.unwrap();
    assert!(slices.list(&of_service).await.unwrap().items.is_empty());
}

/// A rendered App as the operator would publish it.
async fn publish(install: &Install<'_>, app: &App) {
    let stack = Stack::with(app).await;
    let document = fs::read_to_string(stack.rendered().join(format!("{}.json", app.id()))).unwrap();
    let rendered = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": rendered_app_secret(&app.id().parse().unwrap()),
            "namespace": install.namespace(),
            "annotations": { NAMESPACE_ANNOTATION: install.tenant(), NAME_ANNOTATION: app.id() },
        },
        "type": RENDERED_APP_TYPE,
        "stringData": { RENDERED_APP_KEY: document },
    });
    install.apply_all(&[rendered]).await.unwrap();
}

async fn served(install: &Install<'_>, server: &PodServer, app: &App) {
    let jwks = format!("{}/.well-known/jwks.json", app.id());
    eventually("the App is served", LIMIT, || async {
        install.client_of(server).get(&jwks).await.status.is_success().then_some(())
    })
    .await;
}

#[tokio::test]
async fn servers_of_an_install_serve_what_is_in_its_namespace() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let app = App::new("shop");
    publish(&install, &app).await;
    for server in servers {
        served(&install, &server, &app).await;
        server.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_server_needs_each_of_its_permissions_and_says_which_it_lacks() {
    let install = Cluster::shared().await.install().await;
    for permission in install.permissions("server") {
        install.take(&permission).await.unwrap();
        let server = install.server_as(install.server_account(), &[]).await.unwrap();
        server.start().unwrap();
        let lack = format!("cannot {} resource", permission.verb);
        eventually(&lack, LIMIT, || async { server.logged().contains(&lack).then_some(()) }).await;
        install.give_back(&permission).await.unwrap();
        server.ready().await.unwrap();
        let app = App::new("shop");
        publish(&install, &app).await;
        served(&install, &server, &app).await;
    }
}
