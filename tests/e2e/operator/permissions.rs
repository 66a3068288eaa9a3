//! The operator has each permission of the chart because something breaks without it, and it says which one it lacks.

use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use latchkey_crds::{app::App as Resource, names::ROTATE_KEYS_ANNOTATION};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Cluster, Install, Operator, Permission},
    eventually,
};
use serde_json::json;

/// For one step of the scene; a permission that is missing is told within a second or two.
const LIMIT: Duration = Duration::from_secs(60);
/// The Lease's own time.
const RENEWAL: Duration = Duration::from_secs(15);
/// Installs in which permissions are tried at the same time.
const INSTALLS: usize = 4;

#[tokio::test]
async fn the_operator_needs_each_of_its_permissions_and_says_which_it_lacks() {
    let cluster = Cluster::start().await.unwrap();
    let mut installs = Vec::new();
    for _ in 0..INSTALLS {
        installs.push(cluster.install().await);
    }
    let permissions = installs[0].permissions("operator");
    assert!(permissions.len() > 20, "{permissions:?}");
    // Roles are named alike in each install, but for the namespaces.
    let tries = installs.iter().enumerate().map(|(number, install)| async move {
        let mut unneeded = Vec::new();
        let own = install.permissions("operator");
        for permission in own.into_iter().skip(number).step_by(INSTALLS) {
            if !is_missed(install, &permission).await {
                unneeded.push(permission);
            }
        }
        unneeded
    });
    let unneeded: Vec<_> = join_all(tries).await.into_iter().flatten().collect();
    assert!(unneeded.is_empty(), "nothing broke without {unneeded:#?}");
}

/// Plays a whole life of an App without the permission, until the operator says that it lacks it.
async fn is_missed(install: &Install<'_>, permission: &Permission) -> bool {
    install.take(permission).await.unwrap();
    // So that it has to be made anew.
    let leases: Api<Lease> = Api::namespaced(install.admin(), install.namespace());
    drop(leases.delete(install.lease(), &DeleteParams::default()).await);
    let server = install.server().await;
    let provider = Provider::new(&format!("p{:08x}", rand::random::<u32>()), "github");
    let app = App::new("shop")
        .relay(Relay::to(&install.smtp))
        .template("confirm.txt", "{{ code }}")
        .provider(&provider)
        .set("/deletionPolicy", "Delete");
    install.apply_provider(&provider).await.unwrap();
    install.apply(&app).await.unwrap();
    let operator = install.operator().await;
    let missed = tokio::select! {
        () = told(&operator, permission) => true,
        // The Lease is renewed every two seconds; a whole life may be over by then.
        () = live(install, &app) => tokio::time::timeout(RENEWAL, told(&operator, permission)).await.is_ok(),
    };
    operator.terminate().await;
    install.give_back(permission).await.unwrap();
    server.remove().await.unwrap();
    forget(install, &app).await;
    missed
}

fn lack(permission: &Permission) -> String {
    // As the API server says it, in a line of JSON.
    format!("cannot {} resource \\\"{}\\\"", permission.verb, permission.resource)
}

async fn told(operator: &Operator, permission: &Permission) {
    let lack = lack(permission);
    eventually(&lack, LIMIT * 4, || async { operator.logged().contains(&lack).then_some(()) }).await;
}

/// Ready, keys rotated twice, kept and gone, deleted and gone.
async fn live(install: &Install<'_>, app: &App) {
    install.ready(app).await;
    let apps = install.apps();
    for rotation in ["one", "two"] {
        let annotation = json!({ "metadata": { "annotations": { ROTATE_KEYS_ANNOTATION: rotation } } });
        let before = keys(&apps.get(app.id()).await.unwrap());
        apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(annotation)).await.unwrap();
        eventually("the keys changed", LIMIT, || async {
            let now = keys(&apps.get(app.id()).await.ok()?);
            (now != before).then_some(())
        })
        .await;
        // The Active HMAC key follows as soon as the server has the new one.
        install.ready(app).await;
    }
    install.delete(app).await.unwrap();
    gone(&apps, app).await;

    let kept = App::new("kept");
    install.apply(&kept).await.unwrap();
    install.ready(&kept).await;
    install.delete(&kept).await.unwrap();
    gone(&apps, &kept).await;
    let document = latchkey_crds::names::rendered_app_secret(&kept.id().parse().unwrap());
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(install.admin(), install.namespace());
    eventually("the rendered App is taken away", LIMIT, || async {
        secrets.get_opt(&document).await.ok()?.is_none().then_some(())
    })
    .await;
}

fn keys(app: &Resource) -> Vec<String> {
    let status = app.status.clone().unwrap_or_default();
    status.signing_keys.iter().chain(&status.hmac_keys).map(|key| format!("{} {:?}", key.id, key.state)).collect()
}

async fn gone(apps: &Api<Resource>, app: &App) {
    eventually("the App is gone", LIMIT, || async { apps.get_opt(app.id()).await.ok()?.is_none().then_some(()) }).await;
}

/// Nothing of this App is left for the next operator to fail at.
async fn forget(install: &Install<'_>, app: &App) {
    let apps = install.apps();
    let no_finalizers = json!({ "metadata": { "finalizers": [] } });
    drop(apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(no_finalizers)).await);
    drop(apps.delete(app.id(), &DeleteParams::default()).await);
    gone(&apps, app).await;
}
