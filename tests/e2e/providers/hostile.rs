//! Providers that do what they must not.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use futures::{StreamExt, stream::FuturesUnordered};
use latchkey_server::{
    domain::{
        clock::Env,
        identity::{Away, BadCallback, BadToken, Fault, Operation, Place as At, ProviderError, Unusable},
    },
    providers::{ProviderOptions, SocialProviders},
};
use latchkey_tests::upstream::{Person, Place, Reply, Signer};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Fixture, NONCE, VERIFIER, client_id, options, other_client_id, somebody};

const MEBIBYTE: usize = 1024 * 1024;
/// The largest answer that is read (docs/decisions/0024).
const MAX_ANSWER: usize = 64 * 1024;

fn at(place: At, fault: Fault) -> ProviderError {
    ProviderError::Answer { place, fault }
}

fn id_token(bad: BadToken) -> ProviderError {
    at(At::Token, Fault::IdToken(bad))
}

#[tokio::test]
async fn an_answer_of_ten_mebibytes_is_not_read_to_its_end() {
    for (place, asked) in [(Place::Token, At::Token), (Place::Keys, At::Keys)] {
        let fixture = Fixture::new("oidc").await;
        let approved = fixture.approve().await;
        fixture.upstream.script(place, Reply::huge(10 * MEBIBYTE));
        let refused = fixture.redeem(&approved.code, VERIFIER, None).await;
        assert_eq!(refused, Err(at(asked, Fault::TooLarge)));
    }
}

#[tokio::test]
async fn a_provider_that_hangs_is_given_up_after_ten_seconds_and_no_other_waits_for_it() {
    let (slow, other) = tokio::join!(Fixture::new("github"), Fixture::new("discord"));
    let approved = slow.approve().await;
    slow.upstream.script(Place::Token, Reply::stalled());
    let begun = Instant::now();
    let hanging = async {
        let outcome = slow.redeem(&approved.code, VERIFIER, None).await;
        (outcome, begun.elapsed())
    };
    let meanwhile = async {
        let mut logins = 0;
        while begun.elapsed() < Duration::from_secs(5) {
            other.log_in().await.unwrap();
            logins += 1;
        }
        logins
    };
    let ((outcome, took), logins) = tokio::join!(hanging, meanwhile);
    assert_eq!(outcome, Err(ProviderError::Away(Away::TooSlow)));
    assert!(took >= Duration::from_secs(9), "{took:?}");
    assert!(logins > 5, "{logins}");
}

#[tokio::test]
async fn more_than_thirty_two_calls_at_once_are_turned_away_at_once() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.script(Place::UserInfo, Reply::silent());
    let mut logins = Vec::new();
    for _ in 0..33 {
        let token = fixture.upstream.access_token(&client_id("github"));
        logins.push(token);
    }
    let all = futures::future::join_all(logins.iter().map(|token| fixture.check(token, None))).await;
    let turned_away = all.iter().filter(|outcome| **outcome == Err(ProviderError::Away(Away::TooMany))).count();
    assert_eq!(turned_away, 1, "{all:?}");
    fixture.upstream.unscript();
    let token = fixture.upstream.access_token(&client_id("github"));
    fixture.check(&token, None).await.expect("the places are free again");
}

#[tokio::test]
async fn a_provider_stands_where_the_install_allows_it_and_shows_a_certificate_for_its_name() {
    let fixture = Fixture::new("oidc").await;
    let authority = CertificateDer::from_pem_slice(fixture.upstream.ca().as_bytes()).unwrap();
    // Not known by a name of the tests: it is looked up, and there is none.
    let unknown = ProviderOptions { authorities: vec![authority], ..ProviderOptions::default() };
    // Known, and its authority is not.
    let untrusted = ProviderOptions { authorities: Vec::new(), ..options(&fixture.upstream) };
    // Another host than the certificate is for.
    let mut elsewhere = options(&Fixture::new("oauth2").await.upstream);
    elsewhere.hosts = fixture.upstream.hosts();
    for (options, away) in [(unknown, Away::NameUnknown), (untrusted, Away::Tls), (elsewhere, Away::Tls)] {
        let providers = SocialProviders::new(options, Env::system());
        let refused = fixture.check_by(&providers, "a.b.c", None, somebody()).await;
        assert_eq!(refused, Err(ProviderError::Away(away)));
    }
    assert!(fixture.upstream.seen().is_empty());
}

#[tokio::test]
async fn a_document_that_leads_to_a_private_address_leads_nowhere() {
    for address in
        ["https://169.254.169.254/latest/meta-data", "https://[::ffff:10.0.0.1]/token", "https://localhost/token"]
    {
        let fixture = Fixture::new("oidc").await;
        let mut document = fixture.upstream.shape().discovery();
        document["token_endpoint"] = json!(address);
        fixture.upstream.script(Place::Discovery, Reply::json(&document));
        let refused = fixture.redeem("code", VERIFIER, None).await;
        assert_eq!(refused, Err(ProviderError::Away(Away::AddressRefused)), "{address}");
    }
    for name in ["token_endpoint", "jwks_uri", "userinfo_endpoint", "authorization_endpoint", "introspection_endpoint"]
    {
        let fixture = Fixture::new("oidc").await;
        let mut document = fixture.upstream.shape().discovery();
        document[name] = json!("http://id.provider.test/clear");
        fixture.upstream.script(Place::Discovery, Reply::json(&document));
        assert_eq!(fixture.redeem("code", VERIFIER, None).await, Err(at(At::Discovery, Fault::NotHttps)), "{name}");
    }
}

#[tokio::test]
async fn a_document_of_another_issuer_is_refused() {
    for issuer in ["https://evil.example", "https://id.provider.test/", "http://id.provider.test", ""] {
        let fixture = Fixture::new("oidc").await;
        let mut document = fixture.upstream.shape().discovery();
        document["issuer"] = json!(issuer);
        fixture.upstream.script(Place::Discovery, Reply::json(&document));
        let refused = fixture.redeem("code", VERIFIER, None).await;
        assert_eq!(refused, Err(at(At::Discovery, Fault::OtherIssuer)), "{issuer}");
    }
    for issuer in ["https://login.microsoftonline.com/evil/v2.0", "https://evil.example/{tenantid}/v2.0"] {
        let fixture = Fixture::new("microsoft").await;
        let mut document = fixture.upstream.shape().discovery();
        document["issuer"] = json!(issuer);
        fixture.upstream.script(Place::Discovery, Reply::json(&document));
        let refused = fixture.redeem("code", VERIFIER, None).await;
        assert_eq!(refused, Err(at(At::Discovery, Fault::OtherIssuer)), "{issuer}");
    }
}

#[tokio::test]
async fn a_promised_issuer_must_come_back() {
    let fixture = Fixture::new("oidc").await;
    let mut document = fixture.upstream.shape().discovery();
    document["authorization_response_iss_parameter_supported"] = json!(true);
    fixture.upstream.script(Place::Discovery, Reply::json(&document));
    let approved = fixture.approve().await;
    let missing = fixture.redeem(&approved.code, VERIFIER, None).await;
    assert_eq!(missing, Err(ProviderError::Callback(BadCallback::NoIssuer)));
    fixture.redeem(&approved.code, VERIFIER, Some("https://id.provider.test")).await.expect("the code is still good");
}

#[tokio::test]
async fn an_id_token_that_is_not_for_this_login_is_refused() {
    type Tweak = fn(&mut Value);
    let cases: [(Tweak, BadToken); 12] = [
        (|claims| claims["iss"] = json!("https://evil.example"), BadToken::Issuer),
        (|claims| claims["aud"] = json!("theirs"), BadToken::Audience),
        (|claims| claims["aud"] = json!(["client-of-oidc", "theirs"]), BadToken::Audience),
        (|claims| claims["aud"] = json!("mobile-of-oidc"), BadToken::Audience),
        (|claims| claims["azp"] = json!("theirs"), BadToken::AuthorizedParty),
        (|claims| claims["exp"] = json!(claims["iat"].as_i64().unwrap() - 120), BadToken::Expired),
        (|claims| claims["nbf"] = json!(claims["iat"].as_i64().unwrap() + 300), BadToken::NotYetValid),
        (|claims| claims["iat"] = json!(claims["iat"].as_i64().unwrap() + 300), BadToken::NotYetValid),
        (|claims| claims["nonce"] = json!("another"), BadToken::Nonce),
        (|claims| claims["nonce"] = json!(null), BadToken::Nonce),
        (|claims| claims["at_hash"] = json!("AAAAAAAAAAAAAAAAAAAAAA"), BadToken::AccessTokenHash),
        (|claims| claims["sub"] = json!(""), BadToken::Malformed),
    ];
    let fixture = Fixture::new("oidc").await;
    for (tweak, bad) in cases {
        fixture.upstream.tweak(tweak);
        assert_eq!(fixture.log_in().await, Err(id_token(bad)));
        assert_eq!(fixture.upstream.seen_at(Place::UserInfo).len(), 0, "nothing more is asked");
    }
    fixture.upstream.unscript();
    fixture.log_in().await.expect("the right one is taken");
}

#[tokio::test]
async fn an_answer_without_an_id_token_is_no_login() {
    let fixture = Fixture::new("oidc").await;
    let answer = |id_token: Value| {
        let answer = json!({ "access_token": "t", "token_type": "Bearer", "id_token": id_token });
        fixture.upstream.script(Place::Token, Reply::json(&answer));
    };
    answer(json!(null));
    assert_eq!(fixture.redeem("code", VERIFIER, None).await, Err(at(At::Token, Fault::NoIdToken)));
    for text in ["", "x", "a.b.c", "eyJhbGciOiJub25lIn0.e30."] {
        answer(json!(text));
        match fixture.redeem("code", VERIFIER, None).await {
            Err(ProviderError::Answer { place: At::Token, fault: Fault::IdToken(_) }) => {}
            other => panic!("{other:?} for {text:?}"),
        }
    }
    // Signed by a key of the same name that is not the provider's.
    let now = i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap();
    let forged = Signer::new("k1").sign(&json!({
        "iss": "https://id.provider.test", "aud": client_id("oidc"), "sub": "1", "nonce": NONCE,
        "iat": now, "exp": now + 300,
    }));
    answer(json!(forged));
    assert_eq!(fixture.redeem("code", VERIFIER, None).await, Err(id_token(BadToken::Signature)));
}

#[tokio::test]
async fn userinfo_is_believed_only_of_the_id_tokens_subject() {
    let fixture = Fixture::new("oidc").await;
    // So that the ID token lacks the address, and userinfo is asked.
    fixture.upstream.tweak(|claims| {
        let claims = claims.as_object_mut().unwrap();
        claims.remove("email");
    });
    let told = |subject: Value| {
        let answer = json!({ "sub": subject, "email": "ada@example.com", "email_verified": true });
        fixture.upstream.script(Place::UserInfo, Reply::json(&answer));
    };
    for other in [json!("2"), json!(null), json!(1), json!("")] {
        told(other.clone());
        assert_eq!(fixture.log_in().await, Err(at(At::UserInfo, Fault::OtherSubject)), "{other}");
    }
    told(json!("1"));
    let who = fixture.log_in().await.unwrap();
    assert!(who.email.unwrap().verified);
}

#[tokio::test]
async fn a_check_that_speaks_of_another_user_is_not_believed() {
    let fixture = Fixture::new("github").await;
    let token = fixture.upstream.access_token(&client_id("github"));
    let answer = json!({ "app": { "client_id": client_id("github") }, "user": { "id": 2 } });
    fixture.upstream.script(Place::TokenCheck, Reply::json(&answer));
    assert_eq!(fixture.check(&token, None).await, Err(at(At::UserInfo, Fault::OtherSubject)));
}

#[tokio::test]
async fn a_check_that_names_no_client_is_not_believed() {
    for preset in ["google", "github", "discord", "linkedin", "twitch", "facebook", "oidc", "oauth2", "gitlab"] {
        let fixture = Fixture::new(preset).await;
        let token = fixture.upstream.access_token(&client_id(preset));
        for answer in [
            json!({ "active": true, "data": { "is_valid": true } }),
            json!({ "active": "true", "client_id": client_id(preset), "data": { "is_valid": "true" } }),
            json!({ "active": true, "client_id": "theirs", "aud": client_id(preset), "azp": "theirs",
                "app": { "client_id": "theirs" }, "application": { "id": "theirs" },
                "data": { "is_valid": true, "app_id": "theirs" } }),
            json!({ "active": true, "client_id": "", "aud": [], "azp": null }),
        ] {
            fixture.upstream.script(Place::TokenCheck, Reply::json(&answer));
            match fixture.check(&token, None).await {
                Err(ProviderError::Token(_) | ProviderError::Answer { place: At::TokenCheck, .. }) => {}
                other => panic!("{preset}: {other:?} for {answer}"),
            }
            assert!(fixture.upstream.seen_at(Place::UserInfo).is_empty());
        }
    }
}

/// `aud` names who may be shown a token: another client can have one that is meant for us (RFC 7662, 2.2).
#[tokio::test]
async fn an_audience_does_not_show_to_which_client_a_token_was_issued() {
    for preset in ["oidc", "oauth2", "gitlab"] {
        let fixture = Fixture::new(preset).await;
        let token = fixture.upstream.access_token("theirs");
        let introspected = async |mut answer: Value| {
            answer["active"] = json!(true);
            fixture.upstream.script(Place::TokenCheck, Reply::json(&answer));
            fixture.check(&token, None).await.map(drop)
        };
        let (ours, other) = (client_id(preset), other_client_id(preset));
        for audience in [json!(ours), json!([ours]), json!([other, "api"]), json!("api")] {
            let refused = introspected(json!({ "aud": audience })).await;
            assert_eq!(refused, Err(at(At::TokenCheck, Fault::Incomplete)), "{preset}: {audience}");
            for party in ["client_id", "azp"] {
                let refused = introspected(json!({ "aud": audience, party: "theirs" })).await;
                assert_eq!(refused, Err(ProviderError::Token(BadToken::Audience)), "{preset}: {audience}");
            }
        }
        assert!(fixture.upstream.seen_at(Place::UserInfo).is_empty(), "{preset}");
        for (party, client) in [("client_id", &ours), ("azp", &ours), ("client_id", &other), ("azp", &other)] {
            introspected(json!({ "aud": "api", party: client })).await.unwrap();
        }
    }
}

/// Documents of about that size that are to cost much: their text, and why they are refused.
fn hostile(size: usize) -> Vec<(&'static str, String, Fault)> {
    let fill = |piece: &str| format!("[{}0]", piece.repeat((size - 3) / piece.len()));
    let keys: Vec<String> = (0..size / 10).map(|number| format!("\"{number}\":0")).collect();
    vec![
        ("deep arrays", "[".repeat(size), Fault::TooComplex),
        ("deep objects", "{\"\":".repeat(size / 5), Fault::TooComplex),
        ("wide numbers", fill("0,"), Fault::TooComplex),
        ("wide arrays", fill("[],"), Fault::TooComplex),
        ("wide objects", fill("{\"\":{}},"), Fault::TooComplex),
        ("wide texts", fill("\"\","), Fault::TooComplex),
        ("many keys", format!("{{{}}}", keys.join(",")), Fault::TooComplex),
        ("one key twice", "{\"active\":true,\"active\":true}".to_owned(), Fault::NotJson),
        ("a huge number", format!("{{\"keys\":1{}}}", "0".repeat(size - 100)), Fault::NotJson),
        ("a long text", format!("{{\"keys\":\"{}\"}}", "x".repeat(size - 100)), Fault::Incomplete),
    ]
}

#[tokio::test]
async fn hostile_documents_are_refused_wherever_a_provider_sends_them() {
    let scripted = |fixture: &Fixture, place, text: &str| {
        fixture.upstream.script(place, Reply::text(200, "application/json", text.to_owned()));
    };
    let oidc = Fixture::new("oidc").await;
    let github = Fixture::new("github").await;
    let mut documents = hostile(MAX_ANSWER);
    documents.push(("a mebibyte", format!("[{}0]", "{\"\":{}},".repeat(MEBIBYTE / 8)), Fault::TooLarge));
    for (what, text, fault) in documents {
        // Nothing of a document that is refused is kept, so each is read anew.
        let fresh = Fixture::new("oidc").await;
        scripted(&fresh, Place::Discovery, &text);
        assert_eq!(fresh.redeem("code", VERIFIER, None).await, Err(at(At::Discovery, fault)), "{what}");
        fresh.upstream.unscript();
        scripted(&fresh, Place::Keys, &text);
        assert_eq!(fresh.log_in().await, Err(at(At::Keys, fault)), "{what}");

        scripted(&oidc, Place::TokenCheck, &text);
        assert_eq!(oidc.check("token", None).await, Err(at(At::TokenCheck, fault)), "{what}");
        oidc.upstream.unscript();
        scripted(&oidc, Place::Token, &text);
        assert_eq!(oidc.redeem("code", VERIFIER, None).await, Err(at(At::Token, fault)), "{what}");
        oidc.upstream.unscript();

        scripted(&github, Place::UserInfo, &text);
        assert_eq!(github.log_in().await, Err(at(At::UserInfo, fault)), "{what}");
        github.upstream.unscript();
        scripted(&github, Place::Emails, &text);
        assert_eq!(github.log_in().await, Err(at(At::Emails, fault)), "{what}");
        github.upstream.unscript();
    }
    oidc.log_in().await.expect("the right answers are taken");
    github.log_in().await.expect("the right answers are taken");
}

#[tokio::test]
async fn hostile_tokens_are_refused_before_anything_is_asked_about_them() {
    let fixture = Fixture::new("microsoft").await;
    let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let (header, claims) = (part(r#"{"alg":"RS256","kid":"k1"}"#), part(r#"{"sub":"1"}"#));
    let long = "x".repeat(256);
    // As long as a token may be, in base64. A long text alone is no reason to refuse one.
    let documents: Vec<String> = hostile(22_000)
        .into_iter()
        .filter(|(.., fault)| *fault != Fault::Incomplete)
        .map(|(_, text, _)| text)
        .collect();
    let mut tokens: Vec<String> = documents.iter().map(|text| format!("{header}.{}.AAAA", part(text))).collect();
    tokens.extend(documents.iter().map(|text| format!("{}.{claims}.AAAA", part(text))));
    tokens.push(format!("{}.{claims}.AAAA", part(&format!(r#"{{"alg":"RS256","kid":"{long}"}}"#))));
    tokens.push(format!("{header}.{claims}.{}", "A".repeat(32 * 1024)));
    for token in tokens {
        let refused = fixture.check(&token, None).await;
        assert_eq!(refused, Err(ProviderError::Token(BadToken::Malformed)), "{}", &token[..80]);
    }
    assert!(fixture.upstream.seen_at(Place::Keys).is_empty(), "no key was looked for");
}

#[tokio::test]
async fn a_fifth_call_of_one_client_is_turned_away_at_once() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.script(Place::TokenCheck, Reply::silent());
    let client = somebody();
    let mut calls: FuturesUnordered<_> =
        (0..5).map(|_| fixture.check_by(&fixture.providers, "token", None, client)).collect();
    assert_eq!(calls.next().await, Some(Err(ProviderError::Away(Away::TooMany))));
    assert!(fixture.permit(Operation::Login).is_ok(), "there is room for others");
    let held: Vec<_> = calls.collect().await;
    assert_eq!(held, vec![Err(ProviderError::Away(Away::TooSlow)); 4]);
    fixture.upstream.unscript();
    let token = fixture.upstream.access_token(&client_id("github"));
    fixture.check_by(&fixture.providers, &token, None, client).await.expect("its places are free again");
}

#[tokio::test]
async fn a_provider_without_an_introspection_address_takes_no_access_tokens() {
    let fixture = Fixture::changed("oauth2", |provider| {
        provider.settings.options.remove("introspectionURL");
    })
    .await;
    let token = fixture.upstream.access_token(&client_id("oauth2"));
    assert_eq!(fixture.check(&token, None).await, Err(ProviderError::NoTokenCheck));
    assert!(fixture.upstream.seen().is_empty());
}

#[tokio::test]
async fn a_provider_whose_secret_is_gone_is_asked_nothing() {
    let fixture = Fixture::changed("oidc", |provider| provider.settings.secret = None).await;
    let gone = ProviderError::Unusable(Unusable::NoSecret);
    assert_eq!(fixture.redeem("code", VERIFIER, None).await, Err(gone));
    assert_eq!(fixture.check("token", None).await, Err(gone));
    assert!(fixture.upstream.seen().is_empty());
}

#[tokio::test]
async fn a_preset_of_a_later_version_is_told_as_such() {
    let fixture = Fixture::new("oidc").await;
    let mut provider = fixture.provider().clone();
    provider.settings.preset = "mastodon".to_owned();
    let refused = fixture.providers.try_acquire(Operation::Login, &fixture.app, &provider, somebody());
    assert_eq!(refused.err(), Some(ProviderError::Unusable(Unusable::UnknownPreset)));
}

#[tokio::test]
async fn of_githubs_addresses_the_primary_one_counts() {
    let fixture = Fixture::new("github").await;
    fixture.upstream.person(Person::new("1").verified("ada@example.com"));
    for (list, email) in [
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
        fixture.upstream.script(Place::Emails, Reply::json(&list));
        let told = fixture.log_in().await.unwrap().email;
        assert_eq!(told.as_ref().map(|told| (told.email.as_str(), told.verified)), email, "{list}");
    }
}
