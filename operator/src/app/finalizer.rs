//! The finalizer of `deletionPolicy: Delete`, which delays the removal of an App until its users are deleted. With
//! `Retain`, the App gets no finalizer.

use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ObjectMeta, Patch, PatchParams},
};
use latchkey_crds::{
    app::{App, DeletionPolicy},
    names::{DELETE_USERS_FINALIZER, FIELD_MANAGER},
};
use serde_json::json;

use crate::{app::rate_limit, context::Context, error::Error};

/// How the reconcile of an App continues after the update of the finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Serve the App.
    Serve,
    /// The App is being deleted: delete its users.
    DeleteUsers,
    /// Do nothing until the watch reports a change. The API server removes the App now, or later if the App has
    /// finalizers of other programs.
    AwaitChange,
}

/// What to do with the finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FinalizerAction {
    /// Do nothing: the finalizer is set or absent as the policy demands, or can no longer be set.
    Unchanged,
    Add,
    Remove,
    /// The App is being deleted: keep the finalizer until its users are deleted.
    DeleteUsers,
}

/// Sets or removes the finalizer as the App's policy demands.
pub(crate) async fn update(app: &App, context: &Context) -> Result<NextStep, Error> {
    let is_deleting = app.metadata.deletion_timestamp.is_some();
    match finalizer_action(app) {
        FinalizerAction::Unchanged => {}
        FinalizerAction::Add => write(&app.metadata, true, context).await?,
        FinalizerAction::Remove => {
            remove(&app.metadata, context).await?;
            if is_deleting {
                return Ok(NextStep::AwaitChange);
            }
        }
        FinalizerAction::DeleteUsers => return Ok(NextStep::DeleteUsers),
    }
    if is_deleting {
        // Only finalizers of other programs are left. The App is served until the API server removes it.
        rate_limit::cancel(app, context);
    }
    Ok(NextStep::Serve)
}

/// Removes the operator's finalizer. The finalizers of other programs stay.
pub(crate) async fn remove(app: &ObjectMeta, context: &Context) -> Result<(), Error> {
    write(app, false, context).await
}

/// Decides what to do with the finalizer. Depends only on the App. Pure.
fn finalizer_action(app: &App) -> FinalizerAction {
    let is_set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    let is_deleting = app.metadata.deletion_timestamp.is_some();
    match (app.spec.deletion_policy, is_set, is_deleting) {
        (DeletionPolicy::Delete, true, true) => FinalizerAction::DeleteUsers,
        (DeletionPolicy::Delete, false, false) => FinalizerAction::Add,
        (DeletionPolicy::Retain, true, _) => FinalizerAction::Remove,
        (DeletionPolicy::Delete, true, false)
        | (DeletionPolicy::Delete, false, true)
        | (DeletionPolicy::Retain, false, _) => FinalizerAction::Unchanged,
    }
}

/// Whether the finalizer of an App that cannot be decoded can be removed: the App is being deleted, and its policy is
/// not `Delete`. Of the spec, only `deletionPolicy` is read.
pub(crate) fn is_removable(app: &DynamicObject) -> bool {
    let policy = app.data.pointer("/spec/deletionPolicy").and_then(|policy| policy.as_str());
    let is_set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    is_set && app.metadata.deletion_timestamp.is_some() && policy != Some("Delete")
}

/// Sets the finalizer if `is_wanted`, otherwise removes it.
async fn write(app: &ObjectMeta, is_wanted: bool, context: &Context) -> Result<(), Error> {
    let name = app.name.as_deref().unwrap_or_default();
    let api: Api<App> = Api::namespaced(context.client.clone(), app.namespace.as_deref().unwrap_or_default());
    let finalizers = if is_wanted { vec![DELETE_USERS_FINALIZER] } else { Vec::new() };
    let body = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        // With the uid, the patch cannot recreate a deleted App.
        "metadata": { "name": name, "uid": app.uid, "finalizers": finalizers },
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_metadata(name, &parameters, &Patch::Apply(&body)).await {
        Ok(_) => Ok(()),
        // 409 on a removal: the App with this uid is gone, so there is no finalizer to remove.
        Err(kube::Error::Api(status)) if status.code == 404 || (!is_wanted && status.code == 409) => Ok(()),
        Err(error) => Err(Error::api("write the finalizer of an App")(error)),
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::app::AppSpec;
    use time::OffsetDateTime;

    use super::*;
    use crate::status::to_k8s_time;

    fn app(policy: DeletionPolicy, is_set: bool, is_deleting: bool) -> App {
        let mut app = App::new("shop", AppSpec { deletion_policy: policy, ..Default::default() });
        app.metadata.finalizers = is_set.then(|| vec![DELETE_USERS_FINALIZER.to_owned(), "another".to_owned()]);
        app.metadata.deletion_timestamp = is_deleting.then(|| to_k8s_time(OffsetDateTime::UNIX_EPOCH));
        app
    }

    #[test]
    fn only_the_policy_delete_sets_a_finalizer() {
        use DeletionPolicy::{Delete, Retain};
        for is_deleting in [false, true] {
            assert_eq!(finalizer_action(&app(Retain, false, is_deleting)), FinalizerAction::Unchanged);
            // To end a deletion that does not finish, somebody changes the policy to `Retain`.
            assert_eq!(finalizer_action(&app(Retain, true, is_deleting)), FinalizerAction::Remove);
        }
        assert_eq!(finalizer_action(&app(Delete, false, false)), FinalizerAction::Add);
        assert_eq!(finalizer_action(&app(Delete, true, false)), FinalizerAction::Unchanged);
        assert_eq!(finalizer_action(&app(Delete, true, true)), FinalizerAction::DeleteUsers);
        // The API server rejects a new finalizer on an object that is being deleted.
        assert_eq!(finalizer_action(&app(Delete, false, true)), FinalizerAction::Unchanged);
    }

    #[test]
    fn the_finalizer_of_an_undecodable_app_can_be_removed_unless_its_policy_is_delete() {
        let app = |policy: &str, is_deleting: bool| -> DynamicObject {
            let mut metadata = json!({ "name": "shop", "finalizers": [DELETE_USERS_FINALIZER] });
            if is_deleting {
                metadata["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
            }
            let app = json!({ "metadata": metadata, "spec": { "deletionPolicy": policy, "signUp": 7 } });
            serde_json::from_value(app).unwrap()
        };
        assert!(is_removable(&app("Retain", true)));
        assert!(!is_removable(&app("Retain", false)) && !is_removable(&app("Delete", true)));
    }
}
