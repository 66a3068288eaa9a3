//! The chart installs its objects, and gives each program the permissions that it needs and no others.

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
    cluster::{Endpoint, Installation, ServerInPod, TestCluster},
    eventually,
    stack::Stack,
};
use serde_json::json;

/// A change to RBAC takes effect within milliseconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(30);

fn secret(name: &str) -> Secret {
    Secret { metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }, ..Secret::default() }
}

#[track_caller]
fn assert_forbidden<T: Debug>(result: kube::Result<T>) {
    match result {
        Err(kube::Error::Api(status)) if status.code == 403 => {}
        other => panic!("not forbidden: {other:?}"),
    }
}

async fn is_allowed(client: &Client, namespace: &str, group: &str, resource: &str, verb: &str) -> bool {
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
    let response = Api::all(client.clone()).create(&PostParams::default(), &review).await.unwrap();
    response.status.unwrap().allowed
}

#[tokio::test]
async fn servers_can_only_list_secrets_and_only_in_their_own_namespace() {
    let install = TestCluster::shared().await.install().await;
    let client = install.server_account().client().await;
    let own_secrets: Api<Secret> = Api::namespaced(client.clone(), install.namespace());
    own_secrets.list(&ListParams::default()).await.unwrap();
    assert_forbidden(own_secrets.get("one").await);
    assert_forbidden(own_secrets.create(&PostParams::default(), &secret("one")).await);
    assert_forbidden(own_secrets.delete("one", &DeleteParams::default()).await.map(|_| ()));
    let tenant_secrets: Api<Secret> = Api::namespaced(client.clone(), install.tenant());
    assert_forbidden(tenant_secrets.list(&ListParams::default()).await);
    assert_forbidden(tenant_secrets.get("one").await);
    assert_forbidden(Api::<Secret>::all(client).list(&ListParams::default()).await);
}

#[tokio::test]
async fn an_operator_that_watches_listed_namespaces_sees_no_other_namespaces() {
    let cluster = TestCluster::shared().await;
    let install = cluster.builder().tenants(2).install().await;
    let unlisted = cluster.plane().namespace("stranger").await.unwrap();
    let client = install.operator_account().client().await;
    for tenant in install.tenants() {
        assert!(is_allowed(&client, tenant, "", "secrets", "get").await);
        assert!(is_allowed(&client, tenant, "latchkey.dev", "apps", "watch").await);
        assert!(is_allowed(&client, tenant, "latchkey.dev", "apps/status", "patch").await);
        for verb in ["create", "update"] {
            assert!(is_allowed(&client, tenant, "", "secrets", verb).await, "{verb} the Secrets of Clients");
        }
        for verb in ["patch", "delete"] {
            assert!(!is_allowed(&client, tenant, "", "secrets", verb).await, "{verb}");
        }
        assert!(is_allowed(&client, tenant, "latchkey.dev", "clients/status", "patch").await);
        assert!(!is_allowed(&client, tenant, "latchkey.dev", "clients", "patch").await);
        assert!(!is_allowed(&client, tenant, "latchkey.dev", "apps", "delete").await);
        assert!(!is_allowed(&client, tenant, "latchkey.dev", "providers", "patch").await);
    }
    for (group, resource) in [("", "secrets"), ("", "configmaps"), ("latchkey.dev", "apps")] {
        for verb in ["get", "list", "watch"] {
            assert!(!is_allowed(&client, &unlisted, group, resource, verb).await, "{verb} {resource}");
        }
    }
    assert!(is_allowed(&client, install.namespace(), "", "secrets", "update").await);
    assert!(!is_allowed(&client, install.namespace(), "latchkey.dev", "apps", "list").await);
    assert!(!is_allowed(&client, "", "", "namespaces", "list").await, "namespaces are not listed");
}

#[tokio::test]
async fn an_operator_that_watches_all_namespaces_patches_and_deletes_secrets_only_in_its_own() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.builder().watch_all_namespaces().install().await;
    let client = install.operator_account().client().await;
    assert!(is_allowed(&client, install.tenant(), "", "secrets", "get").await);
    assert!(is_allowed(&client, install.tenant(), "latchkey.dev", "apps", "list").await);
    assert!(is_allowed(&client, install.tenant(), "", "secrets", "create").await, "the Secrets of Clients");
    assert!(is_allowed(&client, "", "", "namespaces", "watch").await);
    assert!(!is_allowed(&client, "", "", "namespaces", "get").await);
    assert!(!is_allowed(&client, install.tenant(), "", "secrets", "patch").await);
    assert!(!is_allowed(&client, install.tenant(), "", "secrets", "delete").await);
    assert!(!is_allowed(&client, install.tenant(), "coordination.k8s.io", "leases", "create").await);
    for verb in ["get", "list", "watch", "create", "update", "patch", "delete"] {
        assert!(is_allowed(&client, install.namespace(), "", "secrets", verb).await, "{verb}");
    }
}

/// Without `operator.clientSecrets`, the operator writes Secrets only in its own namespace, so there is no admission
/// policy.
#[tokio::test]
async fn an_operator_without_client_secrets_writes_secrets_only_in_its_own_namespace() {
    let cluster = TestCluster::start().await.unwrap();
    for watches_all in [false, true] {
        let builder = cluster.builder().value("operator.clientSecrets=false");
        let install = if watches_all { builder.watch_all_namespaces() } else { builder }.install().await;
        let client = install.operator_account().client().await;
        for verb in ["create", "update", "patch", "delete"] {
            assert!(!is_allowed(&client, install.tenant(), "", "secrets", verb).await, "{verb}");
            assert!(is_allowed(&client, install.namespace(), "", "secrets", verb).await, "{verb}");
        }
        assert!(is_allowed(&client, install.tenant(), "", "secrets", "get").await);
        assert!(!install.objects().iter().any(|object| object["kind"] == "ValidatingAdmissionPolicy"));
    }
}

#[tokio::test]
async fn each_permission_is_granted_once_and_can_be_revoked() {
    let cluster = TestCluster::start().await.unwrap();
    for watches_all in [false, true] {
        let builder = cluster.builder();
        let install = if watches_all { builder.watch_all_namespaces() } else { builder }.install().await;
        assert_each_permission_can_be_revoked(&install, "operator", &install.operator_account().client().await).await;
        assert_each_permission_can_be_revoked(&install, "server", &install.server_account().client().await).await;
    }
}

async fn assert_each_permission_can_be_revoked(install: &Installation<'_>, component: &str, client: &Client) {
    let permissions = install.permissions(component);
    assert!(!permissions.is_empty());
    for permission in permissions {
        let namespace = permission.namespace.clone().unwrap_or_else(|| install.namespace().to_owned());
        // These permissions apply only to one named Lease. `is_allowed` sends no object name, so it cannot check them.
        if permission.group == "coordination.k8s.io" && permission.verb != "create" {
            continue;
        }
        let allowed = || is_allowed(client, &namespace, &permission.group, &permission.resource, &permission.verb);
        assert!(allowed().await, "{permission:?}");
        install.revoke(&permission).await.unwrap();
        eventually(&format!("revoked: {permission:?}"), LIMIT, || async { (!allowed().await).then_some(()) }).await;
        install.grant(&permission).await.unwrap();
        eventually(&format!("granted again: {permission:?}"), LIMIT, || async { allowed().await.then_some(()) }).await;
    }
}

#[tokio::test]
async fn the_built_in_roles_include_every_resource() {
    let install = TestCluster::shared().await.install().await;
    let roles: Api<ClusterRole> = Api::all(install.admin());
    // No controller aggregates roles here. So the test itself selects the roles that match the aggregation rule of the
    // built-in role.
    for (built_in, verbs) in [
        ("admin", ["create", "update", "patch", "delete"].as_slice()),
        ("edit", &["create", "update", "patch", "delete"]),
        ("view", &["get", "list", "watch"]),
    ] {
        let selectors = roles.get(built_in).await.unwrap().aggregation_rule.unwrap().cluster_role_selectors.unwrap();
        let labels = selectors.into_iter().filter_map(|selector| selector.match_labels).flatten();
        let labels: Vec<_> = labels.map(|(label, value)| format!("{label}={value}")).collect();
        let found = roles.list(&ListParams::default().labels(&labels.join(","))).await.unwrap();
        let rules = found.items.into_iter().flat_map(|role| role.rules.unwrap_or_default());
        let latchkey_rules: Vec<_> =
            rules.filter(|rule| rule.api_groups.iter().flatten().any(|group| group == "latchkey.dev")).collect();
        for resource in ["apps", "providers", "clients"] {
            for verb in verbs {
                let is_granted = latchkey_rules.iter().any(|rule| {
                    rule.resources.iter().flatten().any(|name| name == resource)
                        && rule.verbs.iter().any(|name| name == verb)
                });
                assert!(is_granted, "{built_in}: {verb} {resource}");
            }
        }
    }
}

#[tokio::test]
async fn a_server_pod_gets_the_endpoint_that_a_controller_would_create() {
    let install = TestCluster::shared().await.install().await;
    let server = install.create_server(install.server_account(), &[]).await.unwrap();
    let slices: Api<EndpointSlice> = Api::namespaced(install.operator_account().client().await, install.namespace());
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={}", install.ops_service()));
    for wanted in [Endpoint::NOT_READY, Endpoint::SERVING, Endpoint::TERMINATING] {
        server.set_endpoint(wanted).await.unwrap();
        let found = slices.list(&of_service).await.unwrap().items;
        assert_eq!(found.len(), 1);
        let endpoint = &found[0].endpoints[0];
        assert_eq!(endpoint.target_ref.as_ref().unwrap().uid.as_deref(), Some(server.uid()));
        let conditions = endpoint.conditions.as_ref().unwrap();
        let reported = (conditions.ready, conditions.serving, conditions.terminating);
        assert_eq!(reported, (Some(wanted.ready), Some(wanted.serving), Some(wanted.terminating)));
    }
    let pods: Api<Pod> = Api::namespaced(install.admin(), install.namespace());
    let phase = pods.get(server.name()).await.unwrap().status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Running"));
    server.remove_endpoint().await.unwrap();
    assert!(slices.list(&of_service).await.unwrap().items.is_empty());
}

/// Writes the rendered document of an App to a Secret, as the operator does.
async fn publish(install: &Installation<'_>, app: &App) {
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

async fn wait_until_served(install: &Installation<'_>, server: &ServerInPod, app: &App) {
    let jwks = format!("{}/.well-known/jwks.json", app.id());
    eventually("the App is served", LIMIT, || async {
        install.client_of(server).get(&jwks).await.status.is_success().then_some(())
    })
    .await;
}

#[tokio::test]
async fn servers_serve_the_documents_in_the_namespace_of_their_installation() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let app = App::new("shop");
    publish(&install, &app).await;
    for server in servers {
        wait_until_served(&install, &server, &app).await;
        server.remove().await.unwrap();
    }
}

#[tokio::test]
async fn a_server_needs_each_of_its_permissions_and_logs_the_missing_one() {
    let install = TestCluster::shared().await.install().await;
    for permission in install.permissions("server") {
        install.revoke(&permission).await.unwrap();
        let server = install.create_server(install.server_account(), &[]).await.unwrap();
        server.start().unwrap();
        let error = format!("cannot {} resource", permission.verb);
        eventually(&error, LIMIT, || async { server.read_log().contains(&error).then_some(()) }).await;
        install.grant(&permission).await.unwrap();
        server.wait_until_ready().await.unwrap();
        let app = App::new("shop");
        publish(&install, &app).await;
        wait_until_served(&install, &server, &app).await;
    }
}
