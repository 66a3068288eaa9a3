//! What servers find when they look whether a provider can be reached and knows its client.

use std::{sync::Arc, time::Duration};

use latchkey_crds::{
    conditions::Reason,
    rendered::{ProviderReport, RenderedApp, SecretString},
};
use latchkey_server::{config::Apps, providers::Reports};
use latchkey_tests::upstream::{PRESETS, Place, Reply};
use serde_json::json;
use tokio::{sync::broadcast, time::timeout};

use super::Fixture;

const LIMIT: Duration = Duration::from_secs(60);

async fn found(fixture: &Fixture) -> Option<Reason> {
    let namespace = &fixture.app.doc.namespace;
    fixture.providers.check(namespace, fixture.provider(), &fixture.redirect_uri()).await
}

#[tokio::test]
async fn every_provider_is_found_as_it_is() {
    for preset in PRESETS.each_ref().map(|shape| shape.preset) {
        let fixture = Fixture::new(preset).await;
        let upstream = &fixture.upstream;
        assert_eq!(found(&fixture).await, Some(Reason::Reachable), "{preset}");
        if upstream.shape().issuer.is_some() {
            // What was read a moment ago is no answer to whether it can be read.
            for (place, reason) in [(Place::Keys, Reason::KeysUnreadable), (Place::Discovery, Reason::DiscoveryFailed)]
            {
                for reply in [Reply::status(503, &json!({})), Reply::html(), Reply::json(&json!({}))] {
                    upstream.script(place, reply);
                    assert_eq!(found(&fixture).await, Some(reason), "{preset}");
                }
                upstream.unscript();
            }
        }
        upstream.script(Place::Token, Reply::status(502, &json!({})));
        assert_eq!(found(&fixture).await, Some(Reason::TokenEndpointFailed), "{preset}");
        upstream.unscript();

        let mut client = upstream.known_client();
        client.id = "forgotten".to_owned();
        upstream.client(client);
        assert_eq!(found(&fixture).await, Some(Reason::ClientRefused), "{preset}");
        assert!(upstream.seen_at(Place::UserInfo).is_empty());
    }
}

#[tokio::test]
async fn without_a_secret_there_is_nothing_to_find() {
    let fixture = Fixture::changed("oidc", |provider| provider.settings.secret = None).await;
    assert_eq!(found(&fixture).await, None);
    let broken = Fixture::changed("apple", |provider| {
        provider.settings.secret = Some(SecretString::new("not a key"));
    })
    .await;
    assert_eq!(found(&broken).await, Some(Reason::ClientRefused));
    assert!(fixture.upstream.seen().is_empty() && broken.upstream.seen_at(Place::Token).is_empty());
}

async fn news(news: &mut broadcast::Receiver<ProviderReport>) -> (String, String) {
    let report = timeout(LIMIT, news.recv()).await.expect("a report").unwrap();
    assert_eq!(report.namespace, "tests");
    (report.name, report.reason)
}

#[tokio::test]
async fn a_provider_is_checked_when_it_comes_and_when_it_changes() {
    let fixture = Fixture::new("github").await;
    let only = |secret: &str| -> RenderedApp {
        let mut doc = fixture.app.doc.clone();
        doc.providers = vec![fixture.provider().clone()];
        doc.providers[0].settings.secret = Some(SecretString::new(secret));
        doc
    };
    let right = fixture.provider().settings.secret.clone().unwrap();
    let (apps, reports) = (Arc::new(Apps::default()), Arc::new(Reports::default()));
    let (known, mut told) = reports.subscribe();
    assert!(known.is_empty());
    let checks = fixture.providers.clone().run_checks(Arc::clone(&apps), Arc::clone(&reports));
    let checks = tokio::spawn(checks);
    let id = fixture.app.id();
    for (secret, reason) in [("wrong", "ClientRefused"), (right.expose(), "Reachable"), ("wrong", "ClientRefused")] {
        apps.put(id, &only(secret).to_bytes());
        assert_eq!(news(&mut told).await, ("github".to_owned(), reason.to_owned()));
    }
    let (known, _) = reports.subscribe();
    assert_eq!(known.len(), 1, "who comes late hears what is known");
    apps.remove(id);
    latchkey_tests::eventually("nothing is known of what nobody names", LIMIT, || async {
        reports.subscribe().0.is_empty().then_some(())
    })
    .await;
    checks.abort();
}
