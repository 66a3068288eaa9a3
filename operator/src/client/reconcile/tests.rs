use http::{Method, StatusCode};
use serde_json::json;

use super::*;
use crate::{
    app::mock_api::{MockApi, context, not_found},
    client::{
        fixtures::{app, client_with},
        outcomes::Programmed,
    },
};

fn client(fields: serde_json::Value) -> Client {
    client_with("monitoring", "grafana", fields)
}

fn outcome(refusal: Option<FieldError>, is_served: bool) -> ClientOutcome {
    ClientOutcome {
        name: NamespacedName::new("monitoring", "grafana"),
        generation: 1,
        issuer: "https://auth.example.com/platform".into(),
        refusal: refusal.map(Box::new),
        unresolved: None,
        is_served,
        programmed: Programmed::Yes,
    }
}

fn conflict() -> FieldError {
    FieldError::new(Reason::ClientIDConflict, "spec.clientID", "choose another one")
}

#[test]
fn an_accepted_client_reports_how_to_use_it() {
    let report = outcome_report(&client(json!({})), &outcome(None, true), StatusDigest::default());
    assert_eq!(report.client_id.as_deref(), Some("monitoring.grafana"));
    assert_eq!(report.issuer.as_deref(), Some("https://auth.example.com/platform"));
    assert_eq!(report.secret_name.as_deref(), Some("grafana-oidc"));
    let statuses = [&report.accepted, &report.resolved_refs, &report.programmed].map(|condition| condition.status);
    assert_eq!(statuses, [ConditionStatus::True; 3]);

    let own = json!({ "web": {
        "redirectURLs": ["https://grafana.example.com/login"], "secretRef": { "name": "own", "key": "secret" },
    }});
    let report = outcome_report(&client(own), &outcome(None, true), StatusDigest::default());
    assert_eq!(report.secret_name.as_deref(), Some("own"));
    let public = json!({ "web": null, "public": { "redirectURLs": ["com.example.app:/done"] } });
    let report = outcome_report(&client(public), &outcome(None, true), StatusDigest::default());
    assert_eq!(report.secret_name, None);
}

#[test]
fn a_refused_client_reports_why_and_whether_its_last_accepted_form_is_served() {
    for is_served in [false, true] {
        let report = outcome_report(&client(json!({})), &outcome(Some(conflict()), is_served), StatusDigest::default());
        assert_eq!(
            (report.accepted.status, report.accepted.reason, report.accepted.message.as_str()),
            (ConditionStatus::False, Reason::ClientIDConflict, "spec.clientID: choose another one")
        );
        assert_eq!(report.resolved_refs.status, ConditionStatus::Unknown);
        assert_eq!((report.programmed.status, report.programmed.reason), (ConditionStatus::Unknown, Reason::Pending));
        assert_eq!(report.programmed.message.contains("still served"), is_served);
        assert_eq!((report.client_id.is_some(), report.issuer.is_some()), (is_served, is_served));
    }
}

#[test]
fn a_reference_that_cannot_be_used_does_not_affect_accepted() {
    let missing = FieldError::new(Reason::SecretConflict, "spec.web.secret", "delete it");
    let outcome = ClientOutcome { unresolved: Some(Box::new(missing)), ..outcome(None, true) };
    let report = outcome_report(&client(json!({})), &outcome, StatusDigest::default());
    assert_eq!(report.accepted.status, ConditionStatus::True);
    assert_eq!(
        (report.resolved_refs.status, report.resolved_refs.reason, report.resolved_refs.message.as_str()),
        (ConditionStatus::False, Reason::SecretConflict, "spec.web.secret: delete it")
    );
    assert_eq!(report.programmed.status, ConditionStatus::True);
}

#[test]
fn a_client_of_an_app_that_is_not_accepted_reports_this_and_names_the_app() {
    let report = waiting_report(&client(json!({})));
    assert_eq!((report.accepted.status, report.accepted.reason), (ConditionStatus::Unknown, Reason::Pending));
    assert!(report.accepted.message.contains("App platform is not accepted"), "{}", report.accepted.message);
}

#[test]
fn an_app_is_ending_only_if_it_is_deleted_together_with_its_users() {
    let mut app = app(json!({ "deletionPolicy": "Delete" }));
    assert!(!is_ending(&app));
    app.metadata.deletion_timestamp = Some(crate::status::to_k8s_time(time::OffsetDateTime::UNIX_EPOCH));
    assert!(is_ending(&app));
    app.spec.deletion_policy = DeletionPolicy::Retain;
    assert!(!is_ending(&app), "with finalizers of others, the App is served until it is gone");
}

#[tokio::test(start_paused = true)]
async fn writes_of_client_statuses_do_not_delay_writes_for_apps() {
    let script = MockApi::default();
    let context = context(script.client()).0;
    tokio::time::advance(Duration::from_secs(60)).await;
    let is_exhausted = (0..1000).any(|number| context.client_rate_limiter.try_acquire(&number.to_string()).is_err());
    assert!(is_exhausted);
    let reported = ClientStatus { observed_generation: Some(1), ..ClientStatus::default() };
    let watched = WatchedClient { client: Ok(Arc::new(client(json!({})))), status: StatusDigest::of(&reported) };
    let action = report(&watched, &refusal_report(conflict()), &context).await.unwrap();
    assert_ne!(action, Action::await_change(), "the Client waits for its turn");
    assert_eq!(context.rate_limiter.try_acquire("App identity/platform"), Ok(()), "the App does not wait");
    assert!(script.finish().is_empty());
}

#[tokio::test]
async fn the_missing_secret_of_a_refused_client_that_is_served_is_created() {
    const SECRETS: &str = "/api/v1/namespaces/monitoring/secrets";
    let script = MockApi::default()
        .expect(Method::GET, &format!("{SECRETS}/grafana-oidc"), |_| not_found("grafana-oidc"))
        .expect(Method::POST, SECRETS, |call| {
            let mut secret = call.body.clone();
            secret["metadata"]["resourceVersion"] = json!("7");
            (StatusCode::OK, secret)
        });
    let context = context(script.client()).0;
    let client = client(json!({}));
    let watched = WatchedClient { client: Ok(Arc::new(client.clone())), status: StatusDigest::default() };
    let app = NamespacedName::new("identity", "platform");
    let refused_but_served = outcome(Some(conflict()), true);
    let action = report_outcome(&watched, &client, &app, &refused_but_served, &context).await.unwrap();
    assert_eq!(action, Action::requeue(OUTCOME_WAIT), "the App publishes the new secret");
    script.finish();
}
