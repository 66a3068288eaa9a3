//! Providers that misbehave.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use futures::{StreamExt, stream::FuturesUnordered};
use latchkey_server::{
    domain::{
        clock::Env,
        identity::{
            InvalidCallback, InvalidProviderToken, InvalidResponse, ProviderEndpoint as At, ProviderError,
            ProviderOperation, UnavailableReason, UnusableReason,
        },
    },
    providers::{ProviderOptions, SocialProviders},
};
use latchkey_tests::mock_provider::{ProviderEndpoint, ProviderUser, ScriptedResponse, SigningKey};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Fixture, NONCE, VERIFIER, client_id, new_client_address, other_client_id, provider_options};

const MEBIBYTE: usize = 1024 * 1024;
/// The largest response that a server reads, in bytes (docs/decisions/0024).
const MAX_RESPONSE_BYTES: usize = 64 * 1024;

fn response_error(endpoint: At, reason: InvalidResponse) -> ProviderError {
    ProviderError::InvalidResponse { endpoint, reason }
}

fn id_token_error(reason: InvalidProviderToken) -> ProviderError {
    response_error(At::Token, InvalidResponse::IdToken(reason))
}

#[tokio::test]
async fn a_response_of_ten_mebibytes_is_not_read_to_its_end() {
    for (provider_endpoint, endpoint) in [(ProviderEndpoint::Token, At::Token), (ProviderEndpoint::Keys, At::Keys)] {
        let fixture = Fixture::new("oidc").await;
        let approved = fixture.approve().await;
        fixture.upstream.script(provider_endpoint, ScriptedResponse::huge(10 * MEBIBYTE));
        let refused = fixture.exchange_code(&approved.code, VERIFIER, None).await;
        assert_eq!(refused, Err(response_error(endpoint, InvalidResponse::TooLarge)));
    }
}

#[tokio::test]
async fn a_hanging_provider_times_out_after_ten_seconds_and_delays_no_other() {
    let (slow, other) = tokio::join!(Fixture::new("github"), Fixture::new("discord"));
    let approved = slow.approve().await;
    slow.upstream.script(ProviderEndpoint::Token, ScriptedResponse::stalled());
    let begun = Instant::now();
    let hanging = async {
        let outcome = slow.exchange_code(&approved.code, VERIFIER, None).await;
        (outcome, begun.elapsed())
    };
    let other_logins = async {
        let mut logins = 0;
        while begun.elapsed() < Duration::from_secs(5) {
            other.log_in().await.unwrap();
            logins += 1;
        }
        logins
    };
    let ((outcome, took), logins) = tokio::join!(hanging, other_logins);
    assert_eq!(outcome, Err(ProviderError::Unavailable(UnavailableReason::Timeout)));
    assert!(took >= Duration::from_secs(9), "{took:?}");
    assert!(logins > 5, "{logins}");
}

#[tokio::test]
async fn a_thirty_third_concurrent_call_at_one_provider_is_refused() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.script(ProviderEndpoint::UserInfo, ScriptedResponse::silent());
    let mut tokens = Vec::new();
    for _ in 0..33 {
        let token = fixture.upstream.access_token(&client_id("github"));
        tokens.push(token);
    }
    let outcomes = futures::future::join_all(tokens.iter().map(|token| fixture.check_token(token, None))).await;
    let refused = outcomes
        .iter()
        .filter(|outcome| **outcome == Err(ProviderError::Unavailable(UnavailableReason::TooManyCalls)))
        .count();
    assert_eq!(refused, 1, "{outcomes:?}");
    fixture.upstream.clear_scripts();
    let token = fixture.upstream.access_token(&client_id("github"));
    fixture.check_token(&token, None).await.expect("the permits are free again");
}

#[tokio::test]
async fn a_provider_needs_a_known_host_name_and_a_trusted_certificate() {
    let fixture = Fixture::new("oidc").await;
    let authority = CertificateDer::from_pem_slice(fixture.upstream.ca().as_bytes()).unwrap();
    // These options override no host names. So the server looks up the name in DNS, and does not find it.
    let unknown_host = ProviderOptions { test_roots: vec![authority], ..ProviderOptions::default() };
    // These options override the host names, but do not trust the CA.
    let without_ca = ProviderOptions { test_roots: Vec::new(), ..provider_options(&fixture.upstream) };
    // These options trust a CA that did not sign this provider's certificate.
    let mut with_other_ca = provider_options(&Fixture::new("oauth2").await.upstream);
    with_other_ca.test_hosts = fixture.upstream.hosts();
    for (options, reason) in [
        (unknown_host, UnavailableReason::NameUnknown),
        (without_ca, UnavailableReason::Tls),
        (with_other_ca, UnavailableReason::Tls),
    ] {
        let providers = SocialProviders::new(options, Env::system());
        let refused = fixture.check_token_with(&providers, "a.b.c", None, new_client_address()).await;
        assert_eq!(refused, Err(ProviderError::Unavailable(reason)));
    }
    assert!(fixture.upstream.requests().is_empty());
}

#[tokio::test]
async fn discovered_urls_with_a_private_address_or_without_tls_are_not_called() {
    for url in
        ["https://169.254.169.254/latest/meta-data", "https://[::ffff:10.0.0.1]/token", "https://localhost/token"]
    {
        let fixture = Fixture::new("oidc").await;
        let mut discovery = fixture.upstream.profile().discovery();
        discovery["token_endpoint"] = json!(url);
        fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::json(&discovery));
        let refused = fixture.exchange_code("code", VERIFIER, None).await;
        assert_eq!(refused, Err(ProviderError::Unavailable(UnavailableReason::AddressNotAllowed)), "{url}");
    }
    for name in ["token_endpoint", "jwks_uri", "userinfo_endpoint", "authorization_endpoint", "introspection_endpoint"]
    {
        let fixture = Fixture::new("oidc").await;
        let mut discovery = fixture.upstream.profile().discovery();
        discovery[name] = json!("http://id.provider.test/clear");
        fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::json(&discovery));
        assert_eq!(
            fixture.exchange_code("code", VERIFIER, None).await,
            Err(response_error(At::Discovery, InvalidResponse::NotHttps)),
            "{name}"
        );
    }
}

#[tokio::test]
async fn a_discovery_document_from_another_issuer_is_rejected() {
    for issuer in ["https://evil.example", "https://id.provider.test/", "http://id.provider.test", ""] {
        let fixture = Fixture::new("oidc").await;
        let mut discovery = fixture.upstream.profile().discovery();
        discovery["issuer"] = json!(issuer);
        fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::json(&discovery));
        let refused = fixture.exchange_code("code", VERIFIER, None).await;
        assert_eq!(refused, Err(response_error(At::Discovery, InvalidResponse::IssuerMismatch)), "{issuer}");
    }
    for issuer in ["https://login.microsoftonline.com/evil/v2.0", "https://evil.example/{tenantid}/v2.0"] {
        let fixture = Fixture::new("microsoft").await;
        let mut discovery = fixture.upstream.profile().discovery();
        discovery["issuer"] = json!(issuer);
        fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::json(&discovery));
        let refused = fixture.exchange_code("code", VERIFIER, None).await;
        assert_eq!(refused, Err(response_error(At::Discovery, InvalidResponse::IssuerMismatch)), "{issuer}");
    }
}

#[tokio::test]
async fn a_callback_must_have_the_issuer_parameter_that_discovery_announces() {
    let fixture = Fixture::new("oidc").await;
    let mut discovery = fixture.upstream.profile().discovery();
    discovery["authorization_response_iss_parameter_supported"] = json!(true);
    fixture.upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::json(&discovery));
    let approved = fixture.approve().await;
    let missing = fixture.exchange_code(&approved.code, VERIFIER, None).await;
    assert_eq!(missing, Err(ProviderError::InvalidCallback(InvalidCallback::MissingIssuer)));
    fixture
        .exchange_code(&approved.code, VERIFIER, Some("https://id.provider.test"))
        .await
        .expect("the code is still valid");
}

#[tokio::test]
async fn an_id_token_that_is_not_for_this_login_is_rejected() {
    type ClaimEdit = fn(&mut Value);
    let cases: [(ClaimEdit, InvalidProviderToken); 12] = [
        (|claims| claims["iss"] = json!("https://evil.example"), InvalidProviderToken::Issuer),
        (|claims| claims["aud"] = json!("theirs"), InvalidProviderToken::Audience),
        (|claims| claims["aud"] = json!(["client-of-oidc", "theirs"]), InvalidProviderToken::Audience),
        (|claims| claims["aud"] = json!("mobile-of-oidc"), InvalidProviderToken::Audience),
        (|claims| claims["azp"] = json!("theirs"), InvalidProviderToken::AuthorizedParty),
        (|claims| claims["exp"] = json!(claims["iat"].as_i64().unwrap() - 120), InvalidProviderToken::Expired),
        (|claims| claims["nbf"] = json!(claims["iat"].as_i64().unwrap() + 300), InvalidProviderToken::NotYetValid),
        (|claims| claims["iat"] = json!(claims["iat"].as_i64().unwrap() + 300), InvalidProviderToken::NotYetValid),
        (|claims| claims["nonce"] = json!("another"), InvalidProviderToken::Nonce),
        (|claims| claims["nonce"] = json!(null), InvalidProviderToken::Nonce),
        (|claims| claims["at_hash"] = json!("AAAAAAAAAAAAAAAAAAAAAA"), InvalidProviderToken::AccessTokenHash),
        (|claims| claims["sub"] = json!(""), InvalidProviderToken::Malformed),
    ];
    let fixture = Fixture::new("oidc").await;
    for (edit, reason) in cases {
        fixture.upstream.edit_claims(edit);
        assert_eq!(fixture.log_in().await, Err(id_token_error(reason)));
        assert_eq!(fixture.upstream.requests_to(ProviderEndpoint::UserInfo).len(), 0, "no further call is made");
    }
    fixture.upstream.clear_scripts();
    fixture.log_in().await.expect("the right token is accepted");
}

#[tokio::test]
async fn a_response_without_a_valid_id_token_is_rejected() {
    let fixture = Fixture::new("oidc").await;
    let script_token_response = |id_token: Value| {
        let body = json!({ "access_token": "t", "token_type": "Bearer", "id_token": id_token });
        fixture.upstream.script(ProviderEndpoint::Token, ScriptedResponse::json(&body));
    };
    script_token_response(json!(null));
    assert_eq!(
        fixture.exchange_code("code", VERIFIER, None).await,
        Err(response_error(At::Token, InvalidResponse::MissingIdToken))
    );
    for text in ["", "x", "a.b.c", "eyJhbGciOiJub25lIn0.e30."] {
        script_token_response(json!(text));
        match fixture.exchange_code("code", VERIFIER, None).await {
            Err(ProviderError::InvalidResponse { endpoint: At::Token, reason: InvalidResponse::IdToken(_) }) => {}
            other => panic!("{other:?} for {text:?}"),
        }
    }
    // An ID token that another key with the same `kid` has signed.
    let now = i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap();
    let forged = SigningKey::new("k1").sign(&json!({
        "iss": "https://id.provider.test", "aud": client_id("oidc"), "sub": "1", "nonce": NONCE,
        "iat": now, "exp": now + 300,
    }));
    script_token_response(json!(forged));
    assert_eq!(
        fixture.exchange_code("code", VERIFIER, None).await,
        Err(id_token_error(InvalidProviderToken::Signature))
    );
}

#[tokio::test]
async fn userinfo_is_accepted_only_for_the_subject_of_the_id_token() {
    let fixture = Fixture::new("oidc").await;
    // Removes the email address from the ID token, so that the server calls userinfo.
    fixture.upstream.edit_claims(|claims| {
        let claims = claims.as_object_mut().unwrap();
        claims.remove("email");
    });
    let script_userinfo = |subject: Value| {
        let body = json!({ "sub": subject, "email": "ada@example.com", "email_verified": true });
        fixture.upstream.script(ProviderEndpoint::UserInfo, ScriptedResponse::json(&body));
    };
    for subject in [json!("2"), json!(null), json!(1), json!("")] {
        script_userinfo(subject.clone());
        assert_eq!(
            fixture.log_in().await,
            Err(response_error(At::UserInfo, InvalidResponse::SubjectMismatch)),
            "{subject}"
        );
    }
    script_userinfo(json!("1"));
    let identity = fixture.log_in().await.unwrap();
    assert!(identity.email.unwrap().is_verified);
}

#[tokio::test]
async fn a_token_check_for_another_user_is_rejected() {
    let fixture = Fixture::new("github").await;
    let token = fixture.upstream.access_token(&client_id("github"));
    let body = json!({ "app": { "client_id": client_id("github") }, "user": { "id": 2 } });
    fixture.upstream.script(ProviderEndpoint::TokenCheck, ScriptedResponse::json(&body));
    assert_eq!(
        fixture.check_token(&token, None).await,
        Err(response_error(At::UserInfo, InvalidResponse::SubjectMismatch))
    );
}

#[tokio::test]
async fn a_token_check_that_is_incomplete_or_for_another_client_is_rejected() {
    for preset in ["google", "github", "discord", "linkedin", "twitch", "facebook", "oidc", "oauth2", "gitlab"] {
        let fixture = Fixture::new(preset).await;
        let token = fixture.upstream.access_token(&client_id(preset));
        for body in [
            json!({ "active": true, "data": { "is_valid": true } }),
            json!({ "active": "true", "client_id": client_id(preset), "data": { "is_valid": "true" } }),
            json!({ "active": true, "client_id": "theirs", "aud": client_id(preset), "azp": "theirs",
                "app": { "client_id": "theirs" }, "application": { "id": "theirs" },
                "data": { "is_valid": true, "app_id": "theirs" } }),
            json!({ "active": true, "client_id": "", "aud": [], "azp": null }),
        ] {
            fixture.upstream.script(ProviderEndpoint::TokenCheck, ScriptedResponse::json(&body));
            match fixture.check_token(&token, None).await {
                Err(
                    ProviderError::InvalidToken(_) | ProviderError::InvalidResponse { endpoint: At::TokenCheck, .. },
                ) => {}
                other => panic!("{preset}: {other:?} for {body}"),
            }
            assert!(fixture.upstream.requests_to(ProviderEndpoint::UserInfo).is_empty());
        }
    }
}

/// `aud` names the recipients of a token and not the client that got the token. So another client can have a token with
/// our `aud` (RFC 7662, section 2.2).
#[tokio::test]
async fn an_audience_does_not_prove_the_client_of_a_token() {
    for preset in ["oidc", "oauth2", "gitlab"] {
        let fixture = Fixture::new(preset).await;
        let token = fixture.upstream.access_token("theirs");
        let introspected = async |mut body: Value| {
            body["active"] = json!(true);
            fixture.upstream.script(ProviderEndpoint::TokenCheck, ScriptedResponse::json(&body));
            fixture.check_token(&token, None).await.map(drop)
        };
        let (ours, other) = (client_id(preset), other_client_id(preset));
        for audience in [json!(ours), json!([ours]), json!([other, "api"]), json!("api")] {
            let refused = introspected(json!({ "aud": audience })).await;
            assert_eq!(
                refused,
                Err(response_error(At::TokenCheck, InvalidResponse::Incomplete)),
                "{preset}: {audience}"
            );
            for party in ["client_id", "azp"] {
                let refused = introspected(json!({ "aud": audience, party: "theirs" })).await;
                assert_eq!(
                    refused,
                    Err(ProviderError::InvalidToken(InvalidProviderToken::Audience)),
                    "{preset}: {audience}"
                );
            }
        }
        assert!(fixture.upstream.requests_to(ProviderEndpoint::UserInfo).is_empty(), "{preset}");
        for (party, client) in [("client_id", &ours), ("azp", &ours), ("client_id", &other), ("azp", &other)] {
            introspected(json!({ "aud": "api", party: client })).await.unwrap();
        }
    }
}

/// JSON documents of about `size` bytes that are expensive to parse. Each has a name, a text, and the error that is
/// expected.
fn hostile_documents(size: usize) -> Vec<(&'static str, String, InvalidResponse)> {
    let fill = |piece: &str| format!("[{}0]", piece.repeat((size - 3) / piece.len()));
    let keys: Vec<String> = (0..size / 10).map(|number| format!("\"{number}\":0")).collect();
    vec![
        ("deep arrays", "[".repeat(size), InvalidResponse::TooComplex),
        ("deep objects", "{\"\":".repeat(size / 5), InvalidResponse::TooComplex),
        ("wide numbers", fill("0,"), InvalidResponse::TooComplex),
        ("wide arrays", fill("[],"), InvalidResponse::TooComplex),
        ("wide objects", fill("{\"\":{}},"), InvalidResponse::TooComplex),
        ("wide texts", fill("\"\","), InvalidResponse::TooComplex),
        ("many keys", format!("{{{}}}", keys.join(",")), InvalidResponse::TooComplex),
        ("one key twice", "{\"active\":true,\"active\":true}".to_owned(), InvalidResponse::NotJson),
        ("a huge number", format!("{{\"keys\":1{}}}", "0".repeat(size - 100)), InvalidResponse::NotJson),
        ("a long text", format!("{{\"keys\":\"{}\"}}", "x".repeat(size - 100)), InvalidResponse::Incomplete),
    ]
}

#[tokio::test]
async fn hostile_documents_are_rejected_at_every_endpoint() {
    let script = |fixture: &Fixture, endpoint, text: &str| {
        fixture.upstream.script(endpoint, ScriptedResponse::text(200, "application/json", text.to_owned()));
    };
    let oidc = Fixture::new("oidc").await;
    let github = Fixture::new("github").await;
    let mut documents = hostile_documents(MAX_RESPONSE_BYTES);
    documents.push(("a mebibyte", format!("[{}0]", "{\"\":{}},".repeat(MEBIBYTE / 8)), InvalidResponse::TooLarge));
    for (what, text, reason) in documents {
        // Uses a new fixture, because the server of `oidc` has cached the valid discovery document.
        let new_fixture = Fixture::new("oidc").await;
        script(&new_fixture, ProviderEndpoint::Discovery, &text);
        assert_eq!(
            new_fixture.exchange_code("code", VERIFIER, None).await,
            Err(response_error(At::Discovery, reason)),
            "{what}"
        );
        new_fixture.upstream.clear_scripts();
        script(&new_fixture, ProviderEndpoint::Keys, &text);
        assert_eq!(new_fixture.log_in().await, Err(response_error(At::Keys, reason)), "{what}");

        script(&oidc, ProviderEndpoint::TokenCheck, &text);
        assert_eq!(oidc.check_token("token", None).await, Err(response_error(At::TokenCheck, reason)), "{what}");
        oidc.upstream.clear_scripts();
        script(&oidc, ProviderEndpoint::Token, &text);
        assert_eq!(oidc.exchange_code("code", VERIFIER, None).await, Err(response_error(At::Token, reason)), "{what}");
        oidc.upstream.clear_scripts();

        script(&github, ProviderEndpoint::UserInfo, &text);
        assert_eq!(github.log_in().await, Err(response_error(At::UserInfo, reason)), "{what}");
        github.upstream.clear_scripts();
        script(&github, ProviderEndpoint::Emails, &text);
        assert_eq!(github.log_in().await, Err(response_error(At::Emails, reason)), "{what}");
        github.upstream.clear_scripts();
    }
    oidc.log_in().await.expect("the right responses are accepted");
    github.log_in().await.expect("the right responses are accepted");
}

#[tokio::test]
async fn hostile_tokens_are_rejected_without_a_request_for_keys() {
    let fixture = Fixture::new("microsoft").await;
    let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let (header, claims) = (part(r#"{"alg":"RS256","kid":"k1"}"#), part(r#"{"sub":"1"}"#));
    let long = "x".repeat(256);
    // In base64, documents of 22,000 bytes have nearly the maximum length of a token. The filter leaves out one document,
    // `a long text`: a token can have a long unknown claim, so such a token is not malformed.
    let documents: Vec<String> = hostile_documents(22_000)
        .into_iter()
        .filter(|(.., fault)| *fault != InvalidResponse::Incomplete)
        .map(|(_, text, _)| text)
        .collect();
    let mut tokens: Vec<String> = documents.iter().map(|text| format!("{header}.{}.AAAA", part(text))).collect();
    tokens.extend(documents.iter().map(|text| format!("{}.{claims}.AAAA", part(text))));
    tokens.push(format!("{}.{claims}.AAAA", part(&format!(r#"{{"alg":"RS256","kid":"{long}"}}"#))));
    tokens.push(format!("{header}.{claims}.{}", "A".repeat(32 * 1024)));
    for token in tokens {
        let refused = fixture.check_token(&token, None).await;
        assert_eq!(refused, Err(ProviderError::InvalidToken(InvalidProviderToken::Malformed)), "{}", &token[..80]);
    }
    assert!(fixture.upstream.requests_to(ProviderEndpoint::Keys).is_empty(), "no key was requested");
}

#[tokio::test]
async fn a_fifth_concurrent_call_from_one_client_address_is_refused_immediately() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.script(ProviderEndpoint::TokenCheck, ScriptedResponse::silent());
    let client = new_client_address();
    let mut calls: FuturesUnordered<_> =
        (0..5).map(|_| fixture.check_token_with(&fixture.providers, "token", None, client)).collect();
    assert_eq!(calls.next().await, Some(Err(ProviderError::Unavailable(UnavailableReason::TooManyCalls))));
    assert!(fixture.permit(ProviderOperation::Login).is_ok(), "other clients still get permits");
    let waiting_calls: Vec<_> = calls.collect().await;
    assert_eq!(waiting_calls, vec![Err(ProviderError::Unavailable(UnavailableReason::Timeout)); 4]);
    fixture.upstream.clear_scripts();
    let token = fixture.upstream.access_token(&client_id("github"));
    fixture.check_token_with(&fixture.providers, &token, None, client).await.expect("its permits are free again");
}

#[tokio::test]
async fn a_provider_without_an_introspection_endpoint_accepts_no_access_tokens() {
    let fixture = Fixture::with_changed_provider("oauth2", |provider| {
        provider.settings.options.remove("introspectionURL");
    })
    .await;
    let token = fixture.upstream.access_token(&client_id("oauth2"));
    assert_eq!(fixture.check_token(&token, None).await, Err(ProviderError::NoTokenCheck));
    assert!(fixture.upstream.requests().is_empty());
}

#[tokio::test]
async fn a_provider_without_its_secret_is_not_called() {
    let fixture = Fixture::with_changed_provider("oidc", |provider| provider.settings.secret = None).await;
    let no_secret = ProviderError::Unusable(UnusableReason::MissingSecret);
    assert_eq!(fixture.exchange_code("code", VERIFIER, None).await, Err(no_secret));
    assert_eq!(fixture.check_token("token", None).await, Err(no_secret));
    assert!(fixture.upstream.requests().is_empty());
}

#[tokio::test]
async fn a_preset_of_a_later_version_is_unusable() {
    let fixture = Fixture::new("oidc").await;
    let mut provider = fixture.provider().clone();
    provider.settings.preset = "mastodon".to_owned();
    let refused =
        fixture.providers.try_acquire(ProviderOperation::Login, &fixture.app, &provider, new_client_address());
    assert_eq!(refused.err(), Some(ProviderError::Unusable(UnusableReason::UnknownPreset)));
}

#[tokio::test]
async fn only_the_primary_address_at_github_is_used() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.set_user(ProviderUser::new("1").verified("ada@example.com"));
    for (emails, expected) in [
        (json!([]), None),
        (json!([{ "email": "a@example.com", "primary": false, "verified": true }]), None),
        (
            json!([
                { "email": "a@example.com", "primary": false, "verified": true },
                { "email": "b@example.com", "primary": true, "verified": false },
            ]),
            Some(("b@example.com", false)),
        ),
        (json!([{ "email": "b@example.com", "primary": true, "verified": true }]), Some(("b@example.com", true))),
        (json!([{ "email": "b@example.com", "primary": true }]), Some(("b@example.com", false))),
    ] {
        fixture.upstream.script(ProviderEndpoint::Emails, ScriptedResponse::json(&emails));
        let found = fixture.log_in().await.unwrap().email;
        assert_eq!(found.as_ref().map(|found| (found.email.as_str(), found.is_verified)), expected, "{emails}");
    }
}
