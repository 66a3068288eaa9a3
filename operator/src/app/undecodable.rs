//! Reconciles an App that the API server stores but this operator cannot decode. The servers continue to serve the last
//! published document of the App, without the Clients that no longer exist.

use kube::core::DeserializeGuard;
use latchkey_crds::{
    app::{App, AppStatus},
    conditions::Reason,
};

use crate::{
    app::{
        admission, finalizer,
        requeue::RESYNC,
        status::{Outcome, is_same_except_times},
        validate::Rejection,
    },
    client::prune::remove_deleted_clients,
    context::Context,
    controller::Action,
    error::Error,
    status::write::write_status,
    undecodable,
    watch::NamespacedName,
};

/// Reports the error of the decoder in the conditions, and does not change the other fields of the status. If the App
/// is being deleted and its policy is not `Delete`, only removes the finalizer. If the removal of deleted Clients from
/// the last document fails, the error is returned after the write of the status.
pub(crate) async fn reconcile(
    guarded: &DeserializeGuard<App>,
    error: &str,
    context: &Context,
) -> Result<Action, Error> {
    admission::stop_waiting(guarded, context);
    let Some(object) = undecodable::read::<App>(context, guarded).await? else {
        return Ok(Action::await_change());
    };
    if finalizer::is_removable(&object) {
        finalizer::remove(&object.metadata, context).await?;
        return Ok(Action::await_change());
    }
    let removed = remove_deleted_clients(&NamespacedName::from_metadata(&object.metadata), context).await;
    let old: AppStatus =
        object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let rejection = Rejection::new(Reason::InvalidSpec, "", undecodable::message::<App>(&object, error));
    let outcome = Outcome { rejection: Some(rejection), ..Outcome::default() };
    let reported = outcome.status(&old, object.metadata.generation.unwrap_or(0), context.now());
    let new =
        AppStatus { conditions: reported.conditions, observed_generation: reported.observed_generation, ..old.clone() };
    if !is_same_except_times(&old, &new) {
        write_status(context, guarded, &new).await?;
    }
    Ok(Action::requeue(removed?.unwrap_or(RESYNC)))
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use latchkey_crds::rendered::RenderedClientAuthentication;
    use serde_json::json;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, api_error, context},
        client::{
            fixtures::{client_with, record_document, rendered_secret},
            render::render,
        },
        error::ErrorKind,
    };

    #[tokio::test]
    async fn the_status_is_written_even_if_the_document_cannot_be_published() {
        const APPS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/identity/apps";
        const STATUS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/identity/apps/platform/status";
        const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-platform";
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": "identity", "name": "platform", "uid": "2", "generation": 3 },
            "spec": { "signUp": 7 },
        });
        let list = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "AppList", "metadata": {}, "items": [app.clone()],
        });
        let deleted = client_with("monitoring", "grafana", json!({}));
        let client_id = deleted.client_id().unwrap();
        let deleted = render(&deleted, client_id, RenderedClientAuthentication::Unresolved);
        let secret = rendered_secret(vec![deleted.clone()]);
        let script = MockApi::default()
            .expect(Method::GET, APPS, move |_| (StatusCode::OK, list))
            .expect(Method::GET, RENDERED, move |_| (StatusCode::OK, secret))
            .expect(Method::PATCH, RENDERED, |_| api_error(StatusCode::FORBIDDEN, "Forbidden", "latchkey-app-platform"))
            .expect(Method::PATCH, STATUS, |call| {
                let mut stored = call.body.clone();
                stored["metadata"]["resourceVersion"] = json!("8");
                (StatusCode::OK, stored)
            });
        let context = context(script.client()).0;
        record_document(&context, vec![deleted]);
        let guarded: DeserializeGuard<App> = serde_json::from_value(app).unwrap();
        assert!(guarded.0.is_err());
        let result = reconcile(&guarded, "invalid type", &context).await;
        assert_eq!(result.map_err(|error| error.kind()), Err(ErrorKind::Forbidden), "so the reconcile is retried");
        let calls = script.finish();
        let conditions = calls[3].body["status"]["conditions"].as_array().unwrap();
        let accepted = conditions.iter().find(|condition| condition["type"] == "Accepted").unwrap();
        assert_eq!((&accepted["status"], &accepted["reason"]), (&json!("False"), &json!("InvalidSpec")));
    }
}
