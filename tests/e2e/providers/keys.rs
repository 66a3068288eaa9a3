//! Keys and documents that change, and providers that go away.

use latchkey_server::domain::identity::{Away, BadToken, Fault, Place as At, ProviderError};
use latchkey_tests::upstream::{Place, Reply};
use serde_json::json;

use super::{Fixture, client_id};

fn unknown_key<T: std::fmt::Debug>(outcome: Result<T, ProviderError>) {
    match outcome {
        Err(ProviderError::Token(BadToken::UnknownKey)) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn documents_and_keys_are_read_once_for_many_logins() {
    let fixture = Fixture::new("oidc").await;
    for _ in 0..3 {
        fixture.log_in().await.unwrap();
    }
    assert_eq!(fixture.upstream.seen_at(Place::Discovery).len(), 1);
    assert_eq!(fixture.upstream.seen_at(Place::Keys).len(), 1);
    assert_eq!(fixture.upstream.seen_at(Place::Token).len(), 3);
}

#[tokio::test]
async fn a_key_that_is_unknown_and_then_known_is_taken_and_asked_for_once_a_minute() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    fixture.upstream.rotate("k2", true);
    fixture.log_in().await.expect("the new key is read");
    assert_eq!(fixture.upstream.seen_at(Place::Keys).len(), 2);

    fixture.upstream.rotate("k3", false);
    for _ in 0..5 {
        let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
        unknown_key(fixture.check(&token, None).await);
    }
    assert_eq!(fixture.upstream.seen_at(Place::Keys).len(), 2, "the minute is not over");
}

#[tokio::test]
async fn many_who_meet_an_unknown_key_share_one_question() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    fixture.upstream.rotate("k2", true);
    let tokens: Vec<_> = (0..20).map(|_| fixture.upstream.id_token(&client_id("oidc"), None).unwrap()).collect();
    let all = futures::future::join_all(tokens.iter().map(|token| fixture.check(token, None))).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    assert_eq!(fixture.upstream.seen_at(Place::Keys).len(), 2);
}

#[tokio::test]
async fn what_was_read_serves_while_the_provider_is_away() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    for place in [Place::Discovery, Place::Keys] {
        fixture.upstream.script(place, Reply::status(503, &json!({})));
    }
    fixture.log_in().await.unwrap();
    let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
    fixture.check(&token, None).await.unwrap();
}

#[tokio::test]
async fn a_provider_that_was_away_at_first_is_asked_again() {
    let fixture = Fixture::new("oidc").await;
    fixture.upstream.script(Place::Discovery, Reply::status(503, &json!({})));
    let away = Err(ProviderError::Away(Away::Status(503)));
    assert_eq!(fixture.check("token", None).await, away);
    fixture.upstream.unscript();
    fixture.upstream.script(Place::Keys, Reply::status(404, &json!({})));
    let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
    let refused = Err(ProviderError::Answer { place: At::Keys, fault: Fault::Status(404) });
    assert_eq!(fixture.check(&token, None).await, refused);
    fixture.upstream.unscript();
    fixture.check(&token, None).await.unwrap();
}
