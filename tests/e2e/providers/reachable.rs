//! How a server checks that a provider is reachable and knows the client, and what the server reports.

use std::{sync::Arc, time::Duration};

use latchkey_crds::{
    conditions::Reason,
    rendered::{ProviderReport, RenderedApp, SecretString},
};
use latchkey_server::{config::Apps, providers::ProviderReports};
use latchkey_tests::mock_provider::{PRESETS, ProviderEndpoint, ScriptedResponse};
use serde_json::json;
use tokio::{sync::broadcast, time::timeout};

use super::Fixture;

const LIMIT: Duration = Duration::from_secs(60);

async fn check_provider(fixture: &Fixture) -> Option<Reason> {
    let namespace = &fixture.app.doc.namespace;
    fixture.providers.check(namespace, fixture.provider(), &fixture.redirect_uri()).await
}

#[tokio::test]
async fn the_check_finds_the_state_of_every_provider() {
    for preset in PRESETS.each_ref().map(|profile| profile.preset) {
        let fixture = Fixture::new(preset).await;
        let upstream = &fixture.upstream;
        assert_eq!(check_provider(&fixture).await, Some(Reason::Reachable), "{preset}");
        if upstream.profile().issuer.is_some() {
            // The check does not use cached documents.
            for (endpoint, reason) in [
                (ProviderEndpoint::Keys, Reason::KeysUnreadable),
                (ProviderEndpoint::Discovery, Reason::DiscoveryFailed),
            ] {
                for response in [
                    ScriptedResponse::status(503, &json!({})),
                    ScriptedResponse::html(),
                    ScriptedResponse::json(&json!({})),
                ] {
                    upstream.script(endpoint, response);
                    assert_eq!(check_provider(&fixture).await, Some(reason), "{preset}");
                }
                upstream.clear_scripts();
            }
        }
        upstream.script(ProviderEndpoint::Token, ScriptedResponse::status(502, &json!({})));
        assert_eq!(check_provider(&fixture).await, Some(Reason::TokenEndpointFailed), "{preset}");
        upstream.clear_scripts();

        let mut client = upstream.known_client();
        client.id = "forgotten".to_owned();
        upstream.set_client(client);
        assert_eq!(check_provider(&fixture).await, Some(Reason::ClientRefused), "{preset}");
        assert!(upstream.requests_to(ProviderEndpoint::UserInfo).is_empty());
    }
}

#[tokio::test]
async fn the_check_has_no_result_without_a_secret_and_reports_an_invalid_key_as_a_refused_client() {
    let without_secret = Fixture::with_changed_provider("oidc", |provider| provider.settings.secret = None).await;
    assert_eq!(check_provider(&without_secret).await, None);
    let with_invalid_key = Fixture::with_changed_provider("apple", |provider| {
        provider.settings.secret = Some(SecretString::new("not a key"));
    })
    .await;
    assert_eq!(check_provider(&with_invalid_key).await, Some(Reason::ClientRefused));
    assert!(
        without_secret.upstream.requests().is_empty()
            && with_invalid_key.upstream.requests_to(ProviderEndpoint::Token).is_empty()
    );
}

async fn next_report(reports: &mut broadcast::Receiver<ProviderReport>) -> (String, String) {
    let report = timeout(LIMIT, reports.recv()).await.expect("a report").unwrap();
    assert_eq!(report.namespace, "tests");
    (report.name, report.reason)
}

#[tokio::test]
async fn a_provider_is_checked_when_it_is_added_and_when_it_changes() {
    let fixture = Fixture::new("github").await;
    let doc_with_secret = |secret: &str| -> RenderedApp {
        let mut doc = fixture.app.doc.clone();
        doc.providers = vec![fixture.provider().clone()];
        doc.providers[0].settings.secret = Some(SecretString::new(secret));
        doc
    };
    let right_secret = fixture.provider().settings.secret.clone().unwrap();
    let (apps, reports) = (Arc::new(Apps::default()), Arc::new(ProviderReports::default()));
    let (known_reports, mut changes) = reports.subscribe();
    assert!(known_reports.is_empty());
    let checks = fixture.providers.clone().run_checks(Arc::clone(&apps), Arc::clone(&reports));
    let checks = tokio::spawn(checks);
    let id = fixture.app.id();
    for (secret, reason) in
        [("wrong", "ClientRefused"), (right_secret.expose(), "Reachable"), ("wrong", "ClientRefused")]
    {
        apps.put(id, &doc_with_secret(secret).to_bytes());
        assert_eq!(next_report(&mut changes).await, ("github".to_owned(), reason.to_owned()));
    }
    let (known_reports, _) = reports.subscribe();
    assert_eq!(known_reports.len(), 1, "a late subscriber gets the known reports");
    apps.remove(id);
    latchkey_tests::eventually("a report without a Provider is removed", LIMIT, || async {
        reports.subscribe().0.is_empty().then_some(())
    })
    .await;
    checks.abort();
}
