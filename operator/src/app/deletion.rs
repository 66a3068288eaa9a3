//! The end of an App. `Retain` holds nothing back. `Delete` sets a finalizer, so that the servers can delete the users
//! before the App goes; its document says `Deleted` meanwhile.

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
            secret::{self as key_secret, Found, Holder, Kept, Unusable},
        },
        render::Rendered,
        status::names,
    },
    context::Context,
    error::Error,
    probe::Verdict,
};

/// Progress is told no more often than this (design, Operator).
pub(crate) const PROGRESS: Duration = Duration::from_secs(10);

/// What the finalizer is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finalizer {
    /// Nothing: it is where it should be.
    Stay,
    Set,
    Drop,
    /// The App is to go, and its users before it.
    DeleteUsers,
}

/// From what the deletion of an App's users begins.
pub(crate) enum Going {
    /// The document that tells the servers, and the keys where they are not lost.
    Ours(DeletedApp, Option<Box<Kept>>),
    /// The appID, and so its users, are another's, or nobody's.
    NotOurs,
    /// The keys are not there any more as they were read.
    Changed,
    /// The keys that say whose the users are cannot be used.
    Stuck(Unusable),
}

/// Pure: what follows from the App alone.
pub(crate) fn finalizer(app: &App) -> Finalizer {
    let set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    let going = app.metadata.deletion_timestamp.is_some();
    match (app.spec.deletion_policy, set, going) {
        (DeletionPolicy::Delete, true, true) => Finalizer::DeleteUsers,
        (DeletionPolicy::Delete, false, false) => Finalizer::Set,
        (DeletionPolicy::Retain, true, _) => Finalizer::Drop,
        (DeletionPolicy::Delete, true, false)
        | (DeletionPolicy::Delete, false, true)
        | (DeletionPolicy::Retain, false, _) => Finalizer::Stay,
    }
}

/// Whether an App that does not decode is held back by this finalizer alone, though its owner wants it gone at once: of
/// such an App only the policy's text is read.
pub(crate) fn is_let_go(app: &DynamicObject) -> bool {
    let policy = app.data.pointer("/spec/deletionPolicy").and_then(|policy| policy.as_str());
    let set = app.finalizers().iter().any(|finalizer| finalizer == DELETE_USERS_FINALIZER);
    set && app.metadata.deletion_timestamp.is_some() && policy != Some("Delete")
}

/// Sets or drops the finalizer, and no other's.
pub(crate) async fn write_finalizer(context: &Context, app: &ObjectMeta, set: bool) -> Result<(), Error> {
    let name = app.name.as_deref().unwrap_or_default();
    let api: Api<App> = Api::namespaced(context.client.clone(), app.namespace.as_deref().unwrap_or_default());
    let finalizers = if set { vec![DELETE_USERS_FINALIZER] } else { Vec::new() };
    let body = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        // With the uid it cannot make an App that has gone meanwhile.
        "metadata": { "name": name, "uid": app.uid, "finalizers": finalizers },
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_metadata(name, &parameters, &Patch::Apply(&body)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || (!set && status.code == 409) => Ok(()),
        Err(error) => Err(Error::api("write the finalizer of an App")(error)),
    }
}

/// The document of an App that is not served any more: it follows from the appID and its holder alone.
pub(crate) fn render_gone(app: &DeletedApp) -> Rendered {
    let bytes = app.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, revision }
}

/// Looks whether the appID is this App's, and by what its users are told from those of another App of the appID.
pub(crate) async fn begin(secrets: &Api<Secret>, app_id: &AppId, us: &Holder) -> Result<Going, Error> {
    let going = match key_secret::read(secrets, app_id).await? {
        Found::Kept(kept) if kept.holder != *us => Going::NotOurs,
        // The servers have to be told of it, or they do not believe that the users are ours.
        Found::Kept(kept) if kept.are_handed_over() => {
            match key_secret::replace(secrets, &kept, &kept.document, us).await? {
                Some(kept) => Going::Ours(of_keys(us, &kept.document), Some(Box::new(kept))),
                None => Going::Changed,
            }
        }
        Found::Kept(kept) => Going::Ours(of_keys(us, &kept.document), Some(kept)),
        Found::Unusable(why, Some(holder)) if holder == *us => Going::Stuck(why),
        Found::Unusable(_, Some(_)) => Going::NotOurs,
        Found::Unusable(why, None) => match of_rendered(secrets, app_id, us).await? {
            Some(_) => Going::Stuck(why),
            None => Going::NotOurs,
        },
        Found::Missing => match of_rendered(secrets, app_id, us).await? {
            Some(document) => Going::Ours(document, None),
            None => Going::NotOurs,
        },
    };
    Ok(going)
}

fn of_keys(us: &Holder, keys: &KeyDocument) -> DeletedApp {
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

/// The same from the rendered Secret of this App, where the keys are lost.
async fn of_rendered(secrets: &Api<Secret>, app_id: &AppId, us: &Holder) -> Result<Option<DeletedApp>, Error> {
    let read = secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))?;
    let Some(secret) = read.filter(|secret| key_secret::holder(&secret.metadata).as_ref() == Some(us)) else {
        return Ok(None);
    };
    let document = secret.data.and_then(|mut data| data.remove(RENDERED_APP_KEY));
    // What a document of a served App has beyond this is passed over.
    let document: Option<DeletedApp> = document.and_then(|document| serde_json::from_slice(&document.0).ok());
    let ours = document.filter(|document| document.app_id == *app_id && document.namespace == us.namespace);
    Ok(ours.map(|document| DeletedApp { format: FORMAT, name: us.name.clone(), state: AppState::Deleted, ..document }))
}

/// What the condition says while users are deleted.
pub(crate) fn progress(verdict: &Verdict, left: Option<u64>) -> String {
    let doing = match (verdict, left) {
        (Verdict::NoServers, _) => "no server pod is there that could delete the users".to_owned(),
        (Verdict::All { .. }, Some(left)) => format!("{left} left"),
        (Verdict::All { .. }, None) => {
            "the servers have not begun; where that stays so, see whether they reach Postgres".to_owned()
        }
        (Verdict::Refused { pod, reason }, _) => format!("server pod {pod} refuses to: {reason}"),
        (Verdict::KeysLost { pod }, _) => format!("server pod {pod} refuses to: they have other keys, which are lost"),
        (Verdict::Silent { pods }, _) => format!("{} told nothing for 15 s; look at its log", names(pods)),
        (Verdict::Behind { pods } | Verdict::Undecided { pods }, _) => {
            format!("waiting for {} to stop serving the App", names(pods))
        }
    };
    with_way_out(&doing)
}

/// What it says where the keys that tell whose the users are cannot be used.
pub(crate) fn stuck(why: &Unusable) -> String {
    with_way_out(&format!("the key Secret of the App cannot be used: {why}; put it back from a copy"))
}

fn with_way_out(doing: &str) -> String {
    format!(
        "deleting the users: {doing}; to keep those that are left and let the App go at once, set \
         spec.deletionPolicy to Retain"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(policy: DeletionPolicy, set: bool, going: bool) -> App {
        let mut app = App::new("shop", latchkey_crds::app::AppSpec { deletion_policy: policy, ..Default::default() });
        app.metadata.finalizers = set.then(|| vec![DELETE_USERS_FINALIZER.to_owned(), "another".to_owned()]);
        app.metadata.deletion_timestamp = going.then(|| crate::app::status::time(time::OffsetDateTime::UNIX_EPOCH));
        app
    }

    #[test]
    fn only_delete_holds_an_app_back() {
        use DeletionPolicy::{Delete, Retain};
        for going in [false, true] {
            assert_eq!(finalizer(&app(Retain, false, going)), Finalizer::Stay);
            // The way out of a deletion that does not come to its end.
            assert_eq!(finalizer(&app(Retain, true, going)), Finalizer::Drop);
        }
        assert_eq!(finalizer(&app(Delete, false, false)), Finalizer::Set);
        assert_eq!(finalizer(&app(Delete, true, false)), Finalizer::Stay);
        assert_eq!(finalizer(&app(Delete, true, true)), Finalizer::DeleteUsers);
        // The API server refuses a new finalizer on what is going.
        assert_eq!(finalizer(&app(Delete, false, true)), Finalizer::Stay);
    }

    #[test]
    fn an_app_that_does_not_decode_can_be_let_go() {
        let app = |policy: &str, going: bool| -> DynamicObject {
            let mut metadata = json!({ "name": "shop", "finalizers": [DELETE_USERS_FINALIZER] });
            if going {
                metadata["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
            }
            let app = json!({ "metadata": metadata, "spec": { "deletionPolicy": policy, "signUp": 7 } });
            serde_json::from_value(app).unwrap()
        };
        assert!(is_let_go(&app("Retain", true)));
        assert!(!is_let_go(&app("Retain", false)) && !is_let_go(&app("Delete", true)));
    }

    #[test]
    fn progress_names_the_way_out() {
        for verdict in [Verdict::NoServers, Verdict::All { servers: 2 }, Verdict::Undecided { pods: Vec::new() }] {
            assert!(progress(&verdict, Some(7)).contains("set spec.deletionPolicy to Retain"));
        }
        assert!(stuck(&Unusable::NotKeys).contains("set spec.deletionPolicy to Retain"));
        let refused = Verdict::Refused { pod: "server-1".into(), reason: "they are another's".into() };
        assert!(progress(&refused, None).contains("server pod server-1 refuses to: they are another's"));
        assert!(progress(&Verdict::All { servers: 2 }, Some(7)).contains("deleting the users: 7 left"));
    }
}
