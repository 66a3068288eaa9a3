//! `callbackMode: Code`: the application gets a one-time code instead of tokens. It exchanges the code for tokens, and
//! must send the PKCE verifier.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::StatusCode;
use latchkey_tests::client::ApiResponse;
use serde_json::json;

use super::{AppRedirect, OTHER_REDIRECT_URL, Person, REDIRECT_URL, SocialTest, app};

const VERIFIER: &str = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";

fn challenge() -> String {
    URL_SAFE_NO_PAD.encode(digest(&SHA256, VERIFIER.as_bytes()))
}

impl SocialTest {
    async fn with_code_mode() -> Self {
        Self::with_app(app().set("/callbackMode", "Code")).await
    }

    /// Logs in and returns the code in the redirect to the application.
    async fn obtain_code(&self) -> String {
        let mut browser = self.new_client();
        let query = format!("code_challenge={}&code_challenge_method=S256&state=mine", challenge());
        let authorization = browser.start_flow(&format!("{}?{query}", self.path("redirect"))).await;
        let code = self.upstream.approve(&authorization, &Person::verified("1", "grace@example.com"));
        let redirect = AppRedirect::of(&browser.callback(&self.path("callback"), &authorization, &code).await);
        assert!(redirect.location.starts_with(&format!("{REDIRECT_URL}?code=")), "{}", redirect.location);
        assert_eq!(redirect.parameter("state"), "mine");
        assert_eq!(redirect.parameters.len(), 2, "the address has no token: {}", redirect.location);
        redirect.parameter("code").to_owned()
    }

    async fn exchange(&self, code: &str, verifier: &str) -> ApiResponse {
        let body = json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier });
        self.test_app.client().post(&format!("v1/{}/token", self.test_app.id()), &body).await
    }
}

#[track_caller]
fn assert_invalid_grant(response: ApiResponse) {
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
}

#[tokio::test]
async fn a_code_is_exchanged_once_and_a_second_use_ends_its_session() {
    let social = SocialTest::with_code_mode().await;
    let code = social.obtain_code().await;
    assert_eq!(social.counts().await, (1, 1, 0), "the session opens at the exchange");
    let session = social.exchange(&code, VERIFIER).await.expect(StatusCode::OK);
    assert_eq!(session.header("cache-control"), Some("no-store"));
    assert_eq!(session.string("token_type"), "Bearer");
    for name in ["access_token", "refresh_token", "session_id", "local_id"] {
        assert!(!session.string(name).is_empty());
    }
    assert!((1..=900).contains(&session.integer("expires_in")));
    social.assert_ok(&social.test_app.verify(session.string("access_token")).await);

    assert_invalid_grant(social.exchange(&code, VERIFIER).await);
    let refused = social.test_app.verify(session.string("access_token")).await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert_eq!(social.test_app.session_count().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_that_is_exchanged_twice_concurrently_leaves_no_session() {
    let social = SocialTest::with_code_mode().await;
    for _ in 0..5 {
        let code = social.obtain_code().await;
        let (first, second) = tokio::join!(social.exchange(&code, VERIFIER), social.exchange(&code, VERIFIER));
        let won = [&first, &second].into_iter().filter(|response| response.status == StatusCode::OK).count();
        assert!(won <= 1, "{} {}", first.text, second.text);
        assert_eq!(social.test_app.session_count().await, 0);
    }
}

#[tokio::test]
async fn a_code_is_bound_to_its_verifier_redirect_url_and_app() {
    let other_app = app().set("/callbackMode", "Code");
    let social =
        SocialTest::of(app().set("/callbackMode", "Code"), latchkey_tests::stack::Stack::builder().app(&other_app))
            .await;
    let code = social.obtain_code().await;
    let body = |verifier: &str, redirect_url: &str| {
        json!({
            "grant_type": "authorization_code",
            "code": code,
            "code_verifier": verifier,
            "redirect_url": redirect_url,
        })
    };
    let client = social.test_app.client();
    let token_path = format!("v1/{}/token", social.test_app.id());
    assert_invalid_grant(client.post(&token_path, &body(&VERIFIER.replace('d', "e"), REDIRECT_URL)).await);
    assert_invalid_grant(client.post(&token_path, &body(&challenge(), REDIRECT_URL)).await);
    assert_invalid_grant(client.post(&token_path, &body(VERIFIER, OTHER_REDIRECT_URL)).await);
    assert_invalid_grant(client.post(&format!("v1/{}/token", other_app.id()), &body(VERIFIER, REDIRECT_URL)).await);
    for invalid_code in ["", "x", "lkc_", "lkc_AAAA"] {
        let wrong = json!({ "grant_type": "authorization_code", "code": invalid_code, "code_verifier": VERIFIER });
        let response = client.post(&token_path, &wrong).await.expect(StatusCode::BAD_REQUEST);
        assert!(["invalid_grant", "invalid_request"].contains(&response.string("error")), "{}", response.text);
    }
    let response = client.post(&token_path, &json!({ "grant_type": "authorization_code" })).await;
    let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(response.body["fields"].as_array().map(Vec::len), Some(2), "{}", response.text);
    assert_eq!(social.test_app.session_count().await, 0);
    client.post(&token_path, &body(VERIFIER, REDIRECT_URL)).await.expect(StatusCode::OK);
    assert_eq!(social.test_app.session_count().await, 1);
}

#[tokio::test]
async fn a_code_can_be_exchanged_with_a_form() {
    let social = SocialTest::with_code_mode().await;
    let code = social.obtain_code().await;
    let client = social.test_app.client();
    let form = format!("grant_type=authorization_code&code={code}&code_verifier={VERIFIER}");
    let request = client.request(http::Method::POST, &format!("v1/{}/token", social.test_app.id()));
    let request = request.header("content-type", "application/x-www-form-urlencoded").body(form);
    client.send(request).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_code_is_invalid_after_the_users_epoch_rises() {
    let social = SocialTest::with_code_mode().await;
    let code = social.obtain_code().await;
    let (epoch, _) = social.test_app.epoch_and_verified("grace@example.com").await;
    let reset_code = social.test_app.request_reset_code("grace@example.com", 1).await;
    let password = latchkey_tests::passwords::NEW_PASSWORD;
    let reset = social
        .test_app
        .client()
        .confirm_password(social.test_app.id(), "grace@example.com", &reset_code, password)
        .await;
    reset.expect(StatusCode::OK);
    assert_eq!(social.test_app.epoch_and_verified("grace@example.com").await.0, epoch + 1);
    assert_invalid_grant(social.exchange(&code, VERIFIER).await);
    assert_eq!(social.test_app.session_count().await, 0);
}

#[tokio::test]
async fn code_mode_requires_a_challenge_and_a_challenge_gives_a_code_in_other_modes() {
    let social = SocialTest::with_code_mode().await;
    for query in ["", "?code_challenge=x", &format!("?code_challenge={}&code_challenge_method=plain", challenge())] {
        let response = social.new_client().get(&format!("{}{query}", social.path("redirect"))).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(response.header("location"), None);
    }
    assert_eq!(social.counts().await, (0, 0, 0));

    let social = SocialTest::start().await;
    let code = social.obtain_code().await;
    social.exchange(&code, VERIFIER).await.expect(StatusCode::OK);
}
