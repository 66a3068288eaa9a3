//! `callbackMode: Code`: a one-time code in place of tokens, exchanged with a verifier.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use latchkey_tests::client::Answer;
use serde_json::json;

use super::{DONE, Landed, OTHER, Person, Social, app};

const VERIFIER: &str = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";

fn challenge() -> String {
    URL_SAFE_NO_PAD.encode(digest(&SHA256, VERIFIER.as_bytes()))
}

impl Social {
    async fn coded() -> Self {
        Self::with(app().set("/callbackMode", "Code")).await
    }

    /// A code, after the whole way.
    async fn code(&self) -> String {
        let mut browser = self.browser();
        let query = format!("code_challenge={}&code_challenge_method=S256&state=mine", challenge());
        let asked = browser.begin(&format!("{}?{query}", self.path("redirect"))).await;
        let code = self.upstream.log_in(&asked, &Person::verified("1", "grace@example.com"));
        let landed = Landed::of(&browser.come_back(&self.path("callback"), &asked, &code).await);
        assert!(landed.location.starts_with(&format!("{DONE}?code=")), "{}", landed.location);
        assert_eq!(landed.get("state"), "mine");
        assert_eq!(landed.parameters.len(), 2, "no token is in an address: {}", landed.location);
        landed.get("code").to_owned()
    }

    async fn exchange(&self, code: &str, verifier: &str) -> Answer {
        let body = json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier });
        self.shop.client().post(&format!("v1/{}/token", self.shop.id()), &body).await
    }
}

#[track_caller]
fn invalid_grant(answer: Answer) {
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
}

#[tokio::test]
async fn a_code_is_exchanged_once_and_a_second_use_ends_its_session() {
    let social = Social::coded().await;
    let code = social.code().await;
    assert_eq!(social.made().await, (1, 1, 0), "the session opens at the exchange");
    let session = social.exchange(&code, VERIFIER).await.expect(StatusCode::OK);
    assert_eq!(session.header("cache-control"), Some("no-store"));
    assert_eq!(session.string("token_type"), "Bearer");
    for name in ["access_token", "refresh_token", "session_id", "local_id"] {
        assert!(!session.string(name).is_empty());
    }
    assert!((1..=900).contains(&session.integer("expires_in")));
    social.assert_alive(&social.shop.look(session.string("access_token")).await);

    invalid_grant(social.exchange(&code, VERIFIER).await);
    let look = social.shop.look(session.string("access_token")).await;
    look.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert_eq!(social.shop.sessions().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_exchanged_twice_at_once_leaves_no_session() {
    let social = Social::coded().await;
    for _ in 0..5 {
        let code = social.code().await;
        let (first, second) = tokio::join!(social.exchange(&code, VERIFIER), social.exchange(&code, VERIFIER));
        let won = [&first, &second].into_iter().filter(|answer| answer.status == StatusCode::OK).count();
        assert!(won <= 1, "{} {}", first.text, second.text);
        assert_eq!(social.shop.sessions().await, 0);
    }
}

#[tokio::test]
async fn a_code_is_bound_to_its_verifier_address_and_app() {
    let other_app = app().set("/callbackMode", "Code");
    let social =
        Social::of(app().set("/callbackMode", "Code"), latchkey_tests::stack::Stack::builder().app(&other_app)).await;
    let code = social.code().await;
    let body = |verifier: &str, address: &str| {
        json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier, "redirect_url": address })
    };
    let client = social.shop.client();
    let token = format!("v1/{}/token", social.shop.id());
    invalid_grant(client.post(&token, &body(&VERIFIER.replace('d', "e"), DONE)).await);
    invalid_grant(client.post(&token, &body(&challenge(), DONE)).await);
    invalid_grant(client.post(&token, &body(VERIFIER, OTHER)).await);
    invalid_grant(client.post(&format!("v1/{}/token", other_app.id()), &body(VERIFIER, DONE)).await);
    for nothing in ["", "x", "lkc_", "lkc_AAAA"] {
        let wrong = json!({ "grant_type": "authorization_code", "code": nothing, "code_verifier": VERIFIER });
        let answer = client.post(&token, &wrong).await.expect(StatusCode::BAD_REQUEST);
        assert!(["invalid_grant", "invalid_request"].contains(&answer.string("error")), "{}", answer.text);
    }
    let answer = client.post(&token, &json!({ "grant_type": "authorization_code" })).await;
    let answer = answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(answer.body["fields"].as_array().map(Vec::len), Some(2), "{}", answer.text);
    assert_eq!(social.shop.sessions().await, 0);
    client.post(&token, &body(VERIFIER, DONE)).await.expect(StatusCode::OK);
    assert_eq!(social.shop.sessions().await, 1);
}

#[tokio::test]
async fn a_code_may_be_exchanged_by_a_form() {
    let social = Social::coded().await;
    let code = social.code().await;
    let client = social.shop.client();
    let form = format!("grant_type=authorization_code&code={code}&code_verifier={VERIFIER}");
    let request = client.request(http::Method::POST, &format!("v1/{}/token", social.shop.id()));
    let request = request.header("content-type", "application/x-www-form-urlencoded").body(form);
    client.send(request).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_code_is_dead_once_the_users_epoch_has_moved() {
    let social = Social::coded().await;
    let code = social.code().await;
    let (epoch, _) = social.shop.user("grace@example.com").await;
    let reset = social.shop.reset_code("grace@example.com", 1).await;
    let password = crate::support::NEW_PASSWORD;
    let confirm = social.shop.client().confirm_password(social.shop.id(), "grace@example.com", &reset, password).await;
    confirm.expect(StatusCode::OK);
    assert_eq!(social.shop.user("grace@example.com").await.0, epoch + 1);
    invalid_grant(social.exchange(&code, VERIFIER).await);
    assert_eq!(social.shop.sessions().await, 0);
}

#[tokio::test]
async fn codes_demand_a_challenge_and_a_challenge_is_answered_by_a_code() {
    let social = Social::coded().await;
    for query in ["", "?code_challenge=x", &format!("?code_challenge={}&code_challenge_method=plain", challenge())] {
        let answer = social.browser().go(&format!("{}{query}", social.path("redirect"))).await;
        let answer = answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(answer.header("location"), None);
    }
    assert_eq!(social.made().await, (0, 0, 0));

    let social = Social::open().await;
    let code = social.code().await;
    social.exchange(&code, VERIFIER).await.expect(StatusCode::OK);
}
