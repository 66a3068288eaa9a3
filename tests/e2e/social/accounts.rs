//! Which account a provider's user gets: by identity or by verified email address, and never by an address that the
//! provider has not verified (specification: Social login, Account linking).

use http::StatusCode;
use latchkey_tests::{client::ApiResponse, passwords::PASSWORD, proxy::Trap, stack::Stack};
use serde_json::json;

use super::{AppRedirect, Person, REDIRECT_URL, SocialTest, app};
use crate::{
    fault_support::{expect_invalid_credentials, expect_unavailable},
    support::NAME,
};

const EMAIL: &str = "grace@example.com";

/// The person who owns [`EMAIL`], which the provider has verified.
fn owner() -> Person {
    Person::verified("owner", EMAIL)
}

impl SocialTest {
    /// Registers [`EMAIL`] and logs in with the password. Does not confirm the email address.
    async fn register_without_confirming(&self) -> ApiResponse {
        self.test_app.register(EMAIL).await;
        self.test_app.client().login(self.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK)
    }

    /// Asserts that a login in a browser and a login with a provider token are rejected with this error, and that
    /// nothing is created.
    async fn assert_refused(&self, person: &Person, status: StatusCode, error: &str) {
        let before = self.counts().await;
        let mails = self.test_app.query_number("SELECT count(*) FROM outbox").await;
        AppRedirect::expect_error(&self.log_in(person).await, error);
        self.log_in_by_token(person).await.expect_error(status, error);
        assert_eq!(self.counts().await, before);
        assert_eq!(self.test_app.query_number("SELECT count(*) FROM outbox").await, mails);
    }
}

// === the known attacks ===

#[tokio::test]
async fn the_planted_password_of_a_pre_hijacker_is_removed_when_the_owner_logs_in() {
    let social = SocialTest::start().await;
    social.register_without_confirming().await;
    let redirect = AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert_eq!(redirect.parameter("email_verified"), "true");
    expect_invalid_credentials(social.test_app.client().login(social.test_app.id(), EMAIL, PASSWORD).await);
    let row = "SELECT count(*) FROM users WHERE password_hash IS NULL AND name = 'Grace Hopper' AND epoch = 2";
    assert_eq!(social.test_app.query_number(row).await, 1, "the attacker's name is replaced");
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn the_planted_session_of_a_pre_hijacker_ends_when_the_owner_logs_in() {
    let social = SocialTest::start().await;
    let planted_login = social.register_without_confirming().await;
    social.assert_ok(&social.test_app.verify(planted_login.string("token")).await);
    let login = social.log_in_by_token(&owner()).await.expect(StatusCode::OK);
    assert_eq!(login.string("local_id"), planted_login.body["user"]["id"]);
    let response = social.test_app.verify(planted_login.string("token")).await;
    response.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    social.assert_ok(&social.test_app.verify(login.string("access_token")).await);
    // The code of the attacker's registration is now invalid.
    let code = social.test_app.code(EMAIL, 1).await;
    let confirm = social.test_app.client().confirm(social.test_app.id(), &code).await;
    confirm.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    social.assert_ok(&social.test_app.verify(login.string("access_token")).await);
}

#[tokio::test]
async fn the_unverified_provider_address_of_a_pre_hijacker_gets_no_existing_account() {
    let social = SocialTest::start().await;
    // First case: the owner's account is older than the attacker's account.
    social.test_app.register_and_confirm(EMAIL).await;
    let attacker = AppRedirect::expect_session(&social.log_in(&Person::unverified("attacker", EMAIL)).await);
    assert_eq!(attacker.parameter("email_verified"), "false");
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM users WHERE email IS NULL").await, 1);
    let owner = social.test_app.client().login(social.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_ne!(owner.body["user"]["id"], attacker.parameter("local_id"));
    // The owner gets a mail without a code.
    assert_eq!(social.test_app.settled_mail_count(EMAIL).await, 2);
    let mail = social.test_app.mail(EMAIL, 2).await;
    assert!(!mail.text.contains("Grace Hopper"), "{}", mail.text);

    // Second case: the attacker's account is older than the owner's account.
    let other_email = "ada@example.com";
    let attacker = AppRedirect::expect_session(&social.log_in(&Person::unverified("attacker-2", other_email)).await);
    let owner = AppRedirect::expect_session(&social.log_in(&Person::verified("owner-2", other_email)).await);
    assert_ne!(owner.parameter("local_id"), attacker.parameter("local_id"));
    assert_eq!(owner.parameter("email_verified"), "true");
    let attacker_again =
        AppRedirect::expect_session(&social.log_in(&Person::unverified("attacker-2", other_email)).await);
    assert_eq!(attacker_again.parameter("email_verified"), "false");
    assert_eq!(attacker_again.parameter("local_id"), attacker.parameter("local_id"));
}

#[tokio::test]
async fn the_trojan_identity_of_a_pre_hijacker_is_removed_when_the_owner_logs_in() {
    let social = SocialTest::start().await;
    let planted_login = social.register_without_confirming().await;
    // The attacker cannot link an identity while the email address is unverified.
    let signed_in = social.test_app.client().with_token(social.test_app.id(), planted_login.string("token"));
    let trojan = Person::verified("trojan", "attacker@example.com");
    let body = json!({ "token": social.upstream.access_token(&trojan) });
    let link = signed_in.post("user/identities/local", &body).await;
    link.expect_error(StatusCode::FORBIDDEN, "email_not_verified");
    // If an identity exists nevertheless, it is removed when the owner logs in.
    social
        .test_app
        .sql(
            "INSERT INTO identities SELECT app_id, 'https://evil.example', 'trojan', id, 'other', NULL, now() FROM users",
        )
        .await;
    let redirect = AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM identities").await, 1);
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM identities WHERE subject = 'owner'").await, 1);
    assert_eq!(redirect.parameter("local_id"), planted_login.body["user"]["id"]);
}

// === linking by address ===

#[tokio::test]
async fn an_identity_with_the_verified_address_of_a_verified_account_is_linked_and_the_owner_is_notified() {
    let social = SocialTest::start().await;
    let (_, token) = social.test_app.register_and_log_in(EMAIL).await;
    let (epoch, _) = social.test_app.epoch_and_verified(EMAIL).await;
    let redirect = AppRedirect::expect_session(&social.log_in(&Person::verified("owner", "Grace@Example.COM")).await);
    assert_eq!(redirect.parameter("email_verified"), "true");
    assert_eq!(social.counts().await.0, 1);
    social.assert_ok(&social.test_app.verify(&token).await);
    assert_eq!(social.test_app.epoch_and_verified(EMAIL).await, (epoch, true), "nothing else of the account changed");
    social.test_app.client().login(social.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(social.test_app.settled_mail_count(EMAIL).await, 2, "the code and the notice");
    AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert_eq!(social.test_app.settled_mail_count(EMAIL).await, 2, "only a new identity causes a notice");
}

#[tokio::test]
async fn verified_addresses_of_a_provider_are_not_trusted_without_link_by_email() {
    let social = SocialTest::start().await;
    social.test_app.register_and_confirm(EMAIL).await;
    let redirect = AppRedirect::expect_session(&social.log_in_with("other", &owner()).await);
    assert_eq!(redirect.parameter("email_verified"), "false", "the provider's claim is not trusted");
    assert_eq!(social.counts().await.0, 2);
    // The provider's claim is not trusted for a new email address either.
    let redirect =
        AppRedirect::expect_session(&social.log_in_with("other", &Person::verified("new", "new@example.com")).await);
    assert_eq!(redirect.parameter("email_verified"), "false");
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM users WHERE email IS NULL").await, 2);
}

#[tokio::test]
async fn an_unverified_address_stays_pending_and_responses_do_not_show_whether_it_is_known() {
    let social = SocialTest::start().await;
    social.test_app.register_and_confirm(EMAIL).await;
    let with_unused_email =
        AppRedirect::expect_session(&social.log_in(&Person::unverified("1", "new@example.com")).await);
    let with_taken_email = AppRedirect::expect_session(&social.log_in(&Person::unverified("2", EMAIL)).await);
    for redirect in [&with_unused_email, &with_taken_email] {
        assert_eq!(redirect.parameter("email_verified"), "false");
        let mut names: Vec<_> = redirect.parameters.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["access_token", "email_verified", "expires_at", "expires_in", "local_id", "refresh_token", "session_id"]
        );
    }
    // The unused email address gets a code. The taken email address gets a notice that an account exists.
    let mail = social.test_app.mail("new@example.com", 1).await;
    assert_eq!(mail.code().len(), 11);
    assert!(!mail.text.contains("Grace Hopper"), "nothing from the provider is repeated: {}", mail.text);
    assert_eq!(social.test_app.settled_mail_count(EMAIL).await, 2);
    // *verify* returns the pending email address.
    let verify = social.test_app.verify(with_unused_email.parameter("access_token")).await.expect(StatusCode::OK);
    assert_eq!(verify.string("email"), "new@example.com");
}

#[tokio::test]
async fn a_login_that_fails_does_not_count_towards_the_mail_limit() {
    let app = app().limit("mailsPerRecipient", &[(1, 3600)]);
    let social = SocialTest::of(app, Stack::builder().proxied()).await;
    let person = Person::unverified("1", EMAIL);
    // The first statement with the email address looks for another account that has verified the address.
    let proxy = social.test_app.stack.postgres_proxy.as_ref().expect("the service has proxies");
    proxy.set_trap(Trap::Before(EMAIL.into()));
    expect_unavailable(social.log_in_by_token(&person).await);
    proxy.trap_triggered().await;
    assert_eq!(social.counts().await, (0, 0, 0));
    social.test_app.wait_until_ok("a login", async || social.log_in_by_token(&person).await).await;
    social.test_app.code(EMAIL, 1).await;
}

#[tokio::test]
async fn a_known_unverified_address_is_reported_without_enumeration_protection() {
    let social = SocialTest::with_app(app().set("/enumerationProtection", "Off")).await;
    social.test_app.register_and_confirm(EMAIL).await;
    social.assert_refused(&Person::unverified("1", EMAIL), StatusCode::CONFLICT, "account_link_required").await;
    AppRedirect::expect_session(&social.log_in(&Person::unverified("2", "new@example.com")).await);
}

#[tokio::test]
async fn an_app_that_requires_a_verified_address_accepts_no_unverified_address() {
    let social =
        SocialTest::with_app(app().set("/requireVerifiedEmail", true).set("/allowUsersWithoutEmail", true)).await;
    social.assert_refused(&Person::unverified("1", EMAIL), StatusCode::FORBIDDEN, "email_not_verified").await;
    social.assert_refused(&Person::without_email("2"), StatusCode::FORBIDDEN, "email_not_verified").await;
    AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert_eq!(social.counts().await, (1, 1, 1));
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn a_user_without_an_address_is_accepted_if_the_app_allows_it() {
    let social = SocialTest::start().await;
    social.assert_refused(&Person::without_email("1"), StatusCode::FORBIDDEN, "access_denied").await;
    assert_eq!(social.counts().await, (0, 0, 0));
    social.test_app.edit_rendered(|document| document["allowUsersWithoutEmail"] = json!(true)).await;
    let redirect = AppRedirect::expect_session(&social.log_in(&Person::without_email("1")).await);
    assert_eq!(redirect.parameter("email_verified"), "false");
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn closed_sign_up_admits_only_known_users() {
    let social = SocialTest::start().await;
    social.test_app.register_and_confirm(EMAIL).await;
    AppRedirect::expect_session(&social.log_in(&Person::verified("known", "known@example.com")).await);
    social.test_app.edit_rendered(|document| document["signUp"] = json!("Closed")).await;
    social
        .assert_refused(&Person::verified("new", "new@example.com"), StatusCode::FORBIDDEN, "registration_disabled")
        .await;
    social
        .assert_refused(&Person::unverified("new", "new@example.com"), StatusCode::FORBIDDEN, "registration_disabled")
        .await;
    AppRedirect::expect_session(&social.log_in(&Person::verified("known", "known@example.com")).await);
    AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert_eq!(social.counts().await.0, 2);
}

#[tokio::test]
async fn only_addresses_of_allowed_domains_are_accepted() {
    let social = SocialTest::with_app(app().set("/allowedEmailDomains", json!(["example.com"]))).await;
    social.assert_refused(&Person::verified("1", "grace@example.org"), StatusCode::FORBIDDEN, "access_denied").await;
    social
        .assert_refused(&Person::unverified("2", "grace@example.com"), StatusCode::FORBIDDEN, "email_not_verified")
        .await;
    AppRedirect::expect_session(&social.log_in(&Person::verified("3", "grace@EXAMPLE.com")).await);
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn a_disabled_user_gets_no_session_with_any_identity() {
    let social = SocialTest::start().await;
    social.test_app.register_and_confirm(EMAIL).await;
    AppRedirect::expect_session(&social.log_in(&owner()).await);
    social.test_app.sql("UPDATE users SET disabled_at = now()").await;
    social.assert_refused(&owner(), StatusCode::FORBIDDEN, "user_disabled").await;
    // With another identity and the same email address, the user is still disabled.
    social.assert_refused(&Person::verified("2", EMAIL), StatusCode::FORBIDDEN, "user_disabled").await;
}

#[tokio::test]
async fn a_federated_login_is_marked_in_its_token() {
    let social = SocialTest::start().await;
    let redirect = AppRedirect::expect_session(&social.log_in(&owner()).await);
    assert!(redirect.location.starts_with(REDIRECT_URL));
    let claims = redirect.parameter("access_token").split('.').nth(1).expect("a JWT").to_owned();
    let claims = base64::Engine::decode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, claims).expect("base64");
    let claims: serde_json::Value = serde_json::from_slice(&claims).expect("JSON");
    assert_eq!(claims["amr"], json!(["fed"]));
    assert_eq!(claims["email"], EMAIL);
    assert_eq!(claims["name"], "Grace Hopper");
    assert_eq!(claims["sub"], redirect.parameter("local_id"));
    assert_eq!(claims["sid"], redirect.parameter("session_id"));
    assert_ne!(claims["name"], NAME);
}
