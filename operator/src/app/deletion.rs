//! The end of an App. `Retain` holds nothing back. `Delete` sets a finalizer, so that the servers can delete the users
//! before the App goes; its document says `Deleted` meanwhile.

use std::time::Duration;

use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use latchkey_crds::{
    app::{App, DeletionPolicy},
    names::{DELETE_USERS_FINALIZER, FIELD_MANAGER},
    rendered::{AppState, DeletedApp, FORMAT, Revision},
};
use serde_json::json;

use crate::{
    app::{keys::KeyDocument, render::Rendered},
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

/// Sets or drops the finalizer, and no other's.
pub(crate) async fn write_finalizer(context: &Context, app: &App, set: bool) -> Result<(), Error> {
    let api: Api<App> = Api::namespaced(context.client.clone(), &app.namespace().unwrap_or_default());
    let finalizers = if set { vec![DELETE_USERS_FINALIZER] } else { Vec::new() };
    let body = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        // With the uid it cannot make an App that has gone meanwhile.
        "metadata": { "name": app.name_any(), "uid": app.uid(), "finalizers": finalizers },
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_metadata(&app.name_any(), &parameters, &Patch::Apply(&body)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || (!set && status.code == 409) => Ok(()),
        Err(error) => Err(Error::api("write the finalizer of an App")(error)),
    }
}

/// The document of an App whose users are to go: it follows from the appID and its holder alone.
pub(crate) fn render_deleted(app: DeletedApp) -> Rendered {
    let bytes = app.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, revision }
}

pub(crate) fn document(app: &App, keys: &KeyDocument) -> DeletedApp {
    DeletedApp {
        format: FORMAT,
        app_id: keys.app_id.clone(),
        namespace: app.namespace().unwrap_or_default(),
        name: app.name_any(),
        state: AppState::Deleted,
        incarnation: keys.incarnation.clone(),
        handover: (keys.handover > 0).then_some(keys.handover),
    }
}

/// What the condition says while users are deleted.
pub(crate) fn progress(verdict: &Verdict, left: Option<u64>) -> String {
    let doing = match (verdict, left) {
        (Verdict::NoServers, _) => "no server pod is there that could delete the users".to_owned(),
        (Verdict::All { .. }, Some(left)) => format!("{left} users are left"),
        (Verdict::All { .. }, None) => "the servers begin".to_owned(),
        (Verdict::Refused { pod, reason }, _) => format!("server pod {pod} refuses to: {reason}"),
        (Verdict::KeysLost { pod }, _) => format!("server pod {pod} refuses to: they have other keys, which are lost"),
        (Verdict::Behind { .. } | Verdict::Silent { .. } | Verdict::Undecided { .. }, _) => {
            "waiting until every server pod has stopped serving the App".to_owned()
        }
    };
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
    fn progress_names_the_way_out() {
        for verdict in [Verdict::NoServers, Verdict::All { servers: 2 }, Verdict::Undecided { pods: Vec::new() }] {
            assert!(progress(&verdict, Some(7)).contains("set spec.deletionPolicy to Retain"));
        }
        assert!(progress(&Verdict::All { servers: 2 }, Some(7)).contains("7 users are left"));
        let refused = Verdict::Refused { pod: "server-1".into(), reason: "it is another's".into() };
        assert!(progress(&refused, None).contains("server pod server-1 refuses to: it is another's; to keep"));
    }
}
