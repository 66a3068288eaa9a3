//! Whose account a provider's user gets: by identity, by verified address, and never by one that nobody has shown to be
//! theirs (contract 5, "Who is it" and "Linking").

use http::StatusCode;
use latchkey_tests::client::Answer;
use serde_json::json;

use super::{DONE, Landed, Person, Social, app};
use crate::{
    support::{NAME, PASSWORD},
    trouble::invalid_credentials,
};

const EMAIL: &str = "grace@example.com";

/// The provider's user of that address, whom it vouches for.
fn owner() -> Person {
    Person::verified("owner", EMAIL)
}

impl Social {
    /// Somebody registers the address with a password and never confirms it.
    async fn plant_password(&self) -> Answer {
        self.shop.register(EMAIL).await;
        self.shop.client().login(self.shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK)
    }

    /// A refusal that is told to the app, after which there is as much as before.
    async fn refused(&self, person: &Person, status: StatusCode, error: &str) {
        let before = self.made().await;
        let mails = self.shop.count("SELECT count(*) FROM outbox").await;
        Landed::error(&self.sign_in(person).await, error);
        self.login(person).await.expect_error(status, error);
        assert_eq!(self.made().await, before);
        assert_eq!(self.shop.count("SELECT count(*) FROM outbox").await, mails);
    }
}

// === the known attacks ===

#[tokio::test]
async fn pre_hijacking_a_planted_password_goes_when_the_owner_comes_by_a_provider() {
    let social = Social::open().await;
    social.plant_password().await;
    let landed = Landed::session(&social.sign_in(&owner()).await);
    assert_eq!(landed.get("email_verified"), "true");
    invalid_credentials(social.shop.client().login(social.shop.id(), EMAIL, PASSWORD).await);
    let row = "SELECT count(*) FROM users WHERE password_hash IS NULL AND name = 'Grace Hopper' AND epoch = 2";
    assert_eq!(social.shop.count(row).await, 1, "nor does the attacker's name stay");
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn pre_hijacking_a_planted_session_ends_when_the_owner_comes_by_a_provider() {
    let social = Social::open().await;
    let planted = social.plant_password().await;
    social.assert_alive(&social.shop.look(planted.string("token")).await);
    let login = social.login(&owner()).await.expect(StatusCode::OK);
    assert_eq!(login.string("local_id"), planted.body["user"]["id"]);
    let look = social.shop.look(planted.string("token")).await;
    look.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    social.assert_alive(&social.shop.look(login.string("access_token")).await);
    // The code that was mailed to the address for the attacker's registration is dead.
    let code = social.shop.code(EMAIL, 1).await;
    let confirm = social.shop.client().confirm(social.shop.id(), &code).await;
    confirm.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    social.assert_alive(&social.shop.look(login.string("access_token")).await);
}

#[tokio::test]
async fn pre_hijacking_an_unverified_provider_address_gets_no_account_of_it() {
    let social = Social::open().await;
    // The owner has an account.
    social.shop.confirmed(EMAIL).await;
    let attacker = Landed::session(&social.sign_in(&Person::unverified("attacker", EMAIL)).await);
    assert_eq!(attacker.get("email_verified"), "false");
    assert_eq!(social.shop.count("SELECT count(*) FROM users WHERE email IS NULL").await, 1);
    let owner = social.shop.client().login(social.shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_ne!(owner.body["user"]["id"], attacker.get("local_id"));
    // The owner hears of it, and gets no code.
    assert_eq!(social.shop.mails_in_the_end(EMAIL).await, 2);
    let mail = social.shop.mail(EMAIL, 2).await;
    assert!(!mail.text.contains("Grace Hopper"), "{}", mail.text);

    // And the other way round: the attacker comes first, the owner afterwards.
    let other = "ada@example.com";
    let attacker = Landed::session(&social.sign_in(&Person::unverified("attacker-2", other)).await);
    let owner = Landed::session(&social.sign_in(&Person::verified("owner-2", other)).await);
    assert_ne!(owner.get("local_id"), attacker.get("local_id"));
    assert_eq!(owner.get("email_verified"), "true");
    let again = Landed::session(&social.sign_in(&Person::unverified("attacker-2", other)).await);
    assert_eq!(again.get("email_verified"), "false");
    assert_eq!(again.get("local_id"), attacker.get("local_id"));
}

#[tokio::test]
async fn pre_hijacking_a_trojan_identity_goes_when_the_owner_comes_or_confirms() {
    let social = Social::open().await;
    let planted = social.plant_password().await;
    // It cannot be linked while the address is unverified…
    let signed_in = social.shop.client().signed_in(social.shop.id(), planted.string("token"));
    let trojan = Person::verified("trojan", "attacker@example.com");
    let body = json!({ "token": social.upstream.token(&trojan) });
    let link = signed_in.post("user/identities/local", &body).await;
    link.expect_error(StatusCode::FORBIDDEN, "email_not_verified");
    // …and one that is there all the same goes with the rest.
    social
        .shop
        .sql(
            "INSERT INTO identities SELECT app_id, 'https://evil.example', 'trojan', id, 'other', NULL, now() FROM users",
        )
        .await;
    let landed = Landed::session(&social.sign_in(&owner()).await);
    assert_eq!(social.shop.count("SELECT count(*) FROM identities").await, 1);
    assert_eq!(social.shop.count("SELECT count(*) FROM identities WHERE subject = 'owner'").await, 1);
    assert_eq!(landed.get("local_id"), planted.body["user"]["id"]);
}

// === linking by address ===

#[tokio::test]
async fn a_verified_address_of_a_verified_account_links_and_its_owner_is_told() {
    let social = Social::open().await;
    let (_, token) = social.shop.session(EMAIL).await;
    let (epoch, _) = social.shop.user(EMAIL).await;
    let landed = Landed::session(&social.sign_in(&Person::verified("owner", "Grace@Example.COM")).await);
    assert_eq!(landed.get("email_verified"), "true");
    assert_eq!(social.made().await.0, 1);
    social.assert_alive(&social.shop.look(&token).await);
    assert_eq!(social.shop.user(EMAIL).await, (epoch, true), "nothing else of it changed");
    social.shop.client().login(social.shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(social.shop.mails_in_the_end(EMAIL).await, 2, "the code, and the notice");
    Landed::session(&social.sign_in(&owner()).await);
    assert_eq!(social.shop.mails_in_the_end(EMAIL).await, 2, "only of a new way to sign in");
}

#[tokio::test]
async fn a_provider_that_anybody_may_run_links_by_address_only_where_the_app_says_so() {
    let social = Social::open().await;
    social.shop.confirmed(EMAIL).await;
    let landed = Landed::session(&social.sign_in_by("other", &owner()).await);
    assert_eq!(landed.get("email_verified"), "false", "the provider's word is not taken");
    assert_eq!(social.made().await.0, 2);
    // Of a new address neither.
    let landed = Landed::session(&social.sign_in_by("other", &Person::verified("new", "new@example.com")).await);
    assert_eq!(landed.get("email_verified"), "false");
    assert_eq!(social.shop.count("SELECT count(*) FROM users WHERE email IS NULL").await, 2);
}

#[tokio::test]
async fn an_unverified_address_waits_for_its_code_and_known_and_unknown_look_alike() {
    let social = Social::open().await;
    social.shop.confirmed(EMAIL).await;
    let unknown = Landed::session(&social.sign_in(&Person::unverified("1", "new@example.com")).await);
    let known = Landed::session(&social.sign_in(&Person::unverified("2", EMAIL)).await);
    for landed in [&unknown, &known] {
        assert_eq!(landed.get("email_verified"), "false");
        let mut names: Vec<_> = landed.parameters.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["access_token", "email_verified", "expires_at", "expires_in", "local_id", "refresh_token", "session_id"]
        );
    }
    // The one gets a code, the other the word that there is an account.
    let mail = social.shop.mail("new@example.com", 1).await;
    assert_eq!(mail.code().len(), 11);
    assert!(!mail.text.contains("Grace Hopper"), "nothing of what the provider told: {}", mail.text);
    assert_eq!(social.shop.mails_in_the_end(EMAIL).await, 2);
    // verify names the address that waits.
    let verify = social.shop.look(unknown.get("access_token")).await.expect(StatusCode::OK);
    assert_eq!(verify.string("email"), "new@example.com");
}

#[tokio::test]
async fn without_enumeration_protection_a_known_unverified_address_is_told() {
    let social = Social::with(app().set("/enumerationProtection", "Off")).await;
    social.shop.confirmed(EMAIL).await;
    social.refused(&Person::unverified("1", EMAIL), StatusCode::CONFLICT, "account_link_required").await;
    Landed::session(&social.sign_in(&Person::unverified("2", "new@example.com")).await);
}

#[tokio::test]
async fn an_app_that_demands_a_verified_address_takes_no_other() {
    let social = Social::with(app().set("/requireVerifiedEmail", true).set("/allowUsersWithoutEmail", true)).await;
    social.refused(&Person::unverified("1", EMAIL), StatusCode::FORBIDDEN, "email_not_verified").await;
    social.refused(&Person::without_email("2"), StatusCode::FORBIDDEN, "email_not_verified").await;
    Landed::session(&social.sign_in(&owner()).await);
    assert_eq!(social.made().await, (1, 1, 1));
    assert_eq!(social.shop.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn a_user_without_an_address_is_taken_where_the_app_says_so() {
    let social = Social::open().await;
    social.refused(&Person::without_email("1"), StatusCode::FORBIDDEN, "access_denied").await;
    assert_eq!(social.made().await, (0, 0, 0));
    social.shop.edit_rendered(|document| document["allowUsersWithoutEmail"] = json!(true)).await;
    let landed = Landed::session(&social.sign_in(&Person::without_email("1")).await);
    assert_eq!(landed.get("email_verified"), "false");
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn closed_sign_up_lets_in_whom_it_knows() {
    let social = Social::open().await;
    social.shop.confirmed(EMAIL).await;
    Landed::session(&social.sign_in(&Person::verified("known", "known@example.com")).await);
    social.shop.edit_rendered(|document| document["signUp"] = json!("Closed")).await;
    social.refused(&Person::verified("new", "new@example.com"), StatusCode::FORBIDDEN, "registration_disabled").await;
    social.refused(&Person::unverified("new", "new@example.com"), StatusCode::FORBIDDEN, "registration_disabled").await;
    Landed::session(&social.sign_in(&Person::verified("known", "known@example.com")).await);
    Landed::session(&social.sign_in(&owner()).await);
    assert_eq!(social.made().await.0, 2);
}

#[tokio::test]
async fn only_addresses_of_the_apps_domains_come_in() {
    let social = Social::with(app().set("/allowedEmailDomains", json!(["example.com"]))).await;
    social.refused(&Person::verified("1", "grace@example.org"), StatusCode::FORBIDDEN, "access_denied").await;
    social.refused(&Person::unverified("2", "grace@example.com"), StatusCode::FORBIDDEN, "email_not_verified").await;
    Landed::session(&social.sign_in(&Person::verified("3", "grace@EXAMPLE.com")).await);
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn a_disabled_user_gets_no_session_by_any_provider() {
    let social = Social::open().await;
    social.shop.confirmed(EMAIL).await;
    Landed::session(&social.sign_in(&owner()).await);
    social.shop.sql("UPDATE users SET disabled_at = now()").await;
    social.refused(&owner(), StatusCode::FORBIDDEN, "user_disabled").await;
    // Nor by a new identity of the same address.
    social.refused(&Person::verified("2", EMAIL), StatusCode::FORBIDDEN, "user_disabled").await;
}

#[tokio::test]
async fn a_federated_login_says_so_in_its_token() {
    let social = Social::open().await;
    let landed = Landed::session(&social.sign_in(&owner()).await);
    assert!(landed.location.starts_with(DONE));
    let claims = landed.get("access_token").split('.').nth(1).expect("a JWT").to_owned();
    let claims = base64::Engine::decode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, claims).expect("base64");
    let claims: serde_json::Value = serde_json::from_slice(&claims).expect("JSON");
    assert_eq!(claims["amr"], json!(["fed"]));
    assert_eq!(claims["email"], EMAIL);
    assert_eq!(claims["name"], "Grace Hopper");
    assert_eq!(claims["sub"], landed.get("local_id"));
    assert_eq!(claims["sid"], landed.get("session_id"));
    assert_ne!(claims["name"], NAME);
}
