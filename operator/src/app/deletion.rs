//! Deletion of an App. `Retain` delays nothing. `Delete` sets a finalizer, so that the servers can delete the users
//! before the App is removed; meanwhile its document has the state `Deleted`.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ObjectMeta, Patch, PatchParams},
};
use latchkey_crds::{
    app::{App, DeletionPolicy},
    names::{DELETE_USERS_FINALIZER, FIELD_MANAGER, RENDERED_APP_KEY, rendered_app_secret},
    rendered::{AppState, DeletedApp, FORMAT, Revision},
    types::AppId,
};
use serde_json::json;

use crate::{
    app::{
        keys::{
            KeyDocument,
            secret::{self as key_secret, AppIdOwner, KeyLookup, Stored, UnusableReason},
        },
        render::Rendered,
        status::pod_names,
    },
    context::Context,
    error::Error,
    monitor::RolloutState,
};

/// Progress is reported at most this often.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// What to do with the finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinalizerAction {
    /// Nothing: it is already set or absent as it should be.
    Unchanged,
    Add,
    Remove,
    /// The App is being deleted, and its users must be deleted first.
    DeleteUsers,
}

/// Where the deletion of an App's users starts from.
pub(crate) enum DeletionState {
    /// The document for the servers, and the keys unless they are lost.
    Owned(DeletedApp, Option<Box<Stored>>),
    /// The appID, and so its users, belong to another App or to none.
    NotOwned,
    /// The keys changed since they were read.
    KeysChanged,
    /// The keys that identify the owner of the users cannot be used.
    KeysUnusable(UnusableReason),
}

/// Decides from the App alone; pure.
pub(crate) fn finalizer_action(app: &App) -> FinalizerAction {
    let set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    let is_deleting = app.metadata.deletion_timestamp.is_some();
    match (app.spec.deletion_policy, set, is_deleting) {
        (DeletionPolicy::Delete, true, true) => FinalizerAction::DeleteUsers,
        (DeletionPolicy::Delete, false, false) => FinalizerAction::Add,
        (DeletionPolicy::Retain, true, _) => FinalizerAction::Remove,
        (DeletionPolicy::Delete, true, false)
        | (DeletionPolicy::Delete, false, true)
        | (DeletionPolicy::Retain, false, _) => FinalizerAction::Unchanged,
    }
}

/// Whether the finalizer of an App that does not decode can be removed: the App is being deleted, and its policy is not
/// `Delete`. Only the text of the policy is read.
pub(crate) fn is_finalizer_removable(app: &DynamicObject) -> bool {
    let policy = app.data.pointer("/spec/deletionPolicy").and_then(|policy| policy.as_str());
    let set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    set && app.metadata.deletion_timestamp.is_some() && policy != Some("Delete")
}

/// Sets or removes our finalizer, and leaves those of others alone.
pub(crate) async fn write_finalizer(context: &Context, app: &ObjectMeta, set: bool) -> Result<(), Error> {
    let name = app.name.as_deref().unwrap_or_default();
    let api: Api<App> = Api::namespaced(context.client.clone(), app.namespace.as_deref().unwrap_or_default());
    let finalizers = if set { vec![DELETE_USERS_FINALIZER] } else { Vec::new() };
    let body = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        // With the uid, the patch cannot create an App that was deleted meanwhile.
        "metadata": { "name": name, "uid": app.uid, "finalizers": finalizers },
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_metadata(name, &parameters, &Patch::Apply(&body)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || (!set && status.code == 409) => Ok(()),
        Err(error) => Err(Error::api("write the finalizer of an App")(error)),
    }
}

/// Renders the document of an App that is no longer served. It depends only on the appID and its owner.
pub(crate) fn render_unserved(app: &DeletedApp) -> Rendered {
    let bytes = app.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, revision }
}

/// Checks that this App owns the appID, and collects what identifies its users among those of other Apps with the same
/// appID.
pub(crate) async fn prepare_deletion(
    secrets: &Api<Secret>,
    app_id: &AppId,
    us: &AppIdOwner,
) -> Result<DeletionState, Error> {
    let state = match key_secret::read(secrets, app_id).await? {
        KeyLookup::Stored(kept) if kept.owner != *us => DeletionState::NotOwned,
        // The servers must know of the change of owner, or they do not accept that the users are ours.
        KeyLookup::Stored(kept) if kept.is_handed_over() => {
            match key_secret::replace(secrets, &kept, &kept.document, us).await? {
                Some(kept) => DeletionState::Owned(document_from_keys(us, &kept.document), Some(Box::new(kept))),
                None => DeletionState::KeysChanged,
            }
        }
        KeyLookup::Stored(kept) => DeletionState::Owned(document_from_keys(us, &kept.document), Some(kept)),
        KeyLookup::Unusable(why, Some(holder)) if holder == *us => DeletionState::KeysUnusable(why),
        KeyLookup::Unusable(_, Some(_)) => DeletionState::NotOwned,
        KeyLookup::Unusable(why, None) => match document_from_rendered(secrets, app_id, us).await? {
            Some(_) => DeletionState::KeysUnusable(why),
            None => DeletionState::NotOwned,
        },
        KeyLookup::Missing => match document_from_rendered(secrets, app_id, us).await? {
            Some(document) => DeletionState::Owned(document, None),
            None => DeletionState::NotOwned,
        },
    };
    Ok(state)
}

fn document_from_keys(us: &AppIdOwner, keys: &KeyDocument) -> DeletedApp {
    DeletedApp {
        format: FORMAT,
        app_id: keys.app_id.clone(),
        namespace: us.namespace.clone(),
        name: us.name.clone(),
        state: AppState::Deleted,
        incarnation: keys.incarnation.clone(),
        handover: (keys.handover > 0).then_some(keys.handover),
    }
}

/// The same from the rendered Secret of this App, if the keys are lost.
async fn document_from_rendered(
    secrets: &Api<Secret>,
    app_id: &AppId,
    us: &AppIdOwner,
) -> Result<Option<DeletedApp>, Error> {
    let read = secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))?;
    let Some(secret) = read.filter(|secret| key_secret::owner_of(&secret.metadata).as_ref() == Some(us)) else {
        return Ok(None);
    };
    let document = secret.data.and_then(|mut data| data.remove(RENDERED_APP_KEY));
    // A document with the state `ServedApps` has more fields; they are ignored.
    let document: Option<DeletedApp> = document.and_then(|document| serde_json::from_slice(&document.0).ok());
    let ours = document.filter(|document| document.app_id == *app_id && document.namespace == us.namespace);
    Ok(ours.map(|document| DeletedApp { format: FORMAT, name: us.name.clone(), state: AppState::Deleted, ..document }))
}

/// The condition message while users are being deleted.
pub(crate) fn progress_message(verdict: &RolloutState, left: Option<u64>) -> String {
    let doing = match (verdict, left) {
        (RolloutState::NoServers, _) => "no server pod is running that could delete the users".to_owned(),
        (RolloutState::Complete { .. }, Some(left)) => format!("{left} left"),
        (RolloutState::Complete { .. }, None) => {
            "the servers have not started; if this does not change, check that they can reach Postgres".to_owned()
        }
        (RolloutState::Rejected { pod, reason }, _) => format!("server pod {pod} rejects it: {reason}"),
        (RolloutState::KeysLost { pod }, _) => {
            format!("server pod {pod} rejects it: the users have other keys, which are lost")
        }
        (RolloutState::Silent { pods }, _) => format!("{} sent nothing for 15 s; check its log", pod_names(pods)),
        (RolloutState::Behind { pods } | RolloutState::Undecided { pods }, _) => {
            format!("waiting for {} to stop serving the App", pod_names(pods))
        }
    };
    with_advice(&doing)
}

/// The condition message if the keys that identify the owner of the users cannot be used.
pub(crate) fn stuck_message(why: &UnusableReason) -> String {
    with_advice(&format!("the key Secret of the App cannot be used: {why}; restore it from a backup"))
}

fn with_advice(doing: &str) -> String {
    format!(
        "deleting the users: {doing}; to keep the remaining users and delete the App at once, set \
         spec.deletionPolicy to Retain"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(policy: DeletionPolicy, set: bool, going: bool) -> App {
        let mut app = App::new("shop", latchkey_crds::app::AppSpec { deletion_policy: policy, ..Default::default() });
        app.metadata.finalizers = set.then(|| vec![DELETE_USERS_FINALIZER.to_owned(), "another".to_owned()]);
        app.metadata.deletion_timestamp =
            going.then(|| crate::app::status::to_k8s_time(time::OffsetDateTime::UNIX_EPOCH));
        app
    }

    #[test]
    fn only_delete_sets_a_finalizer() {
        use DeletionPolicy::{Delete, Retain};
        for going in [false, true] {
            assert_eq!(finalizer_action(&app(Retain, false, going)), FinalizerAction::Unchanged);
            // The way out of a deletion that does not finish.
            assert_eq!(finalizer_action(&app(Retain, true, going)), FinalizerAction::Remove);
        }
        assert_eq!(finalizer_action(&app(Delete, false, false)), FinalizerAction::Add);
        assert_eq!(finalizer_action(&app(Delete, true, false)), FinalizerAction::Unchanged);
        assert_eq!(finalizer_action(&app(Delete, true, true)), FinalizerAction::DeleteUsers);
        // The API server rejects a new finalizer on an object that is being deleted.
        assert_eq!(finalizer_action(&app(Delete, false, true)), FinalizerAction::Unchanged);
    }

    #[test]
    fn the_finalizer_of_an_undecodable_app_can_be_removed() {
        let app = |policy: &str, going: bool| -> DynamicObject {
            let mut metadata = json!({ "name": "shop", "finalizers": [DELETE_USERS_FINALIZER] });
            if going {
                metadata["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
            }
            let app = json!({ "metadata": metadata, "spec": { "deletionPolicy": policy, "signUp": 7 } });
            serde_json::from_value(app).unwrap()
        };
        assert!(is_finalizer_removable(&app("Retain", true)));
        assert!(!is_finalizer_removable(&app("Retain", false)) && !is_finalizer_removable(&app("Delete", true)));
    }

    #[test]
    fn progress_names_the_way_out() {
        for verdict in [
            RolloutState::NoServers,
            RolloutState::Complete { servers: 2 },
            RolloutState::Undecided { pods: Vec::new() },
        ] {
            assert!(progress_message(&verdict, Some(7)).contains("set spec.deletionPolicy to Retain"));
        }
        assert!(stuck_message(&UnusableReason::NotKeyDocument).contains("set spec.deletionPolicy to Retain"));
        let refused = RolloutState::Rejected { pod: "server-1".into(), reason: "they belong to another App".into() };
        assert!(
            progress_message(&refused, None).contains("server pod server-1 rejects it: they belong to another App")
        );
        assert!(
            progress_message(&RolloutState::Complete { servers: 2 }, Some(7)).contains("deleting the users: 7 left")
        );
    }
}
