//! Providers that change their keys, or are unavailable.

use latchkey_server::domain::identity::{
    InvalidProviderToken, InvalidResponse, ProviderEndpoint as At, ProviderError, UnavailableReason,
};
use latchkey_tests::mock_provider::{ProviderEndpoint, ScriptedResponse};
use serde_json::json;

use super::{Fixture, client_id};

fn assert_unknown_key<T: std::fmt::Debug>(outcome: Result<T, ProviderError>) {
    match outcome {
        Err(ProviderError::InvalidToken(InvalidProviderToken::UnknownKey)) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn discovery_and_keys_are_read_once_for_many_logins() {
    let fixture = Fixture::new("oidc").await;
    for _ in 0..3 {
        fixture.log_in().await.unwrap();
    }
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Discovery).len(), 1);
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Keys).len(), 1);
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Token).len(), 3);
}

#[tokio::test]
async fn keys_are_requested_again_for_an_unknown_key_at_most_once_a_minute() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    fixture.upstream.rotate_key("k2", true);
    fixture.log_in().await.expect("the new key is read");
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Keys).len(), 2);

    fixture.upstream.rotate_key("k3", false);
    for _ in 0..5 {
        let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
        assert_unknown_key(fixture.check_token(&token, None).await);
    }
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Keys).len(), 2, "the minute is not over");
}

#[tokio::test]
async fn concurrent_calls_with_an_unknown_key_share_one_request() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    fixture.upstream.rotate_key("k2", true);
    let tokens: Vec<_> = (0..20).map(|_| fixture.upstream.id_token(&client_id("oidc"), None).unwrap()).collect();
    let outcomes = futures::future::join_all(tokens.iter().map(|token| fixture.check_token(token, None))).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::Keys).len(), 2);
}

#[tokio::test]
async fn cached_discovery_and_keys_are_used_while_the_provider_is_unavailable() {
    let fixture = Fixture::new("oidc").await;
    fixture.log_in().await.unwrap();
    for endpoint in [ProviderEndpoint::Discovery, ProviderEndpoint::Keys] {
        fixture.upstream.script(endpoint, ScriptedResponse::status(503, &json!({})));
    }
    fixture.log_in().await.unwrap();
    let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
    fixture.check_token(&token, None).await.unwrap();
}

#[tokio::test]
async fn a_provider_that_was_unavailable_at_first_is_called_again() {
    let fixture = Fixture::new("oidc").await;
    fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::status(503, &json!({})));
    let unavailable = Err(ProviderError::Unavailable(UnavailableReason::Status(503)));
    assert_eq!(fixture.check_token("token", None).await, unavailable);
    fixture.upstream.clear_scripts();
    fixture.upstream.script(ProviderEndpoint::Keys, ScriptedResponse::status(404, &json!({})));
    let token = fixture.upstream.id_token(&client_id("oidc"), None).unwrap();
    let refused = Err(ProviderError::InvalidResponse { endpoint: At::Keys, reason: InvalidResponse::Status(404) });
    assert_eq!(fixture.check_token(&token, None).await, refused);
    fixture.upstream.clear_scripts();
    fixture.check_token(&token, None).await.unwrap();
}
