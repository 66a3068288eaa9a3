//! An account with an email address and a password, from registration to a new password.

use http::StatusCode;
use latchkey_tests::{
    builders::App,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

use crate::support::MAIL_LIMIT;

#[tokio::test]
async fn an_account_works_from_registration_to_a_new_password() {
    let app = App::new("shop");
    let stack = Stack::with(&app).await;
    let (client, app, email) = (stack.client(), app.id(), "Ada.Lovelace@example.com");

    let registered = client.register(app, "Ada Lovelace", email, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(registered.string("email"), email);
    assert_eq!(registered.string("name"), "Ada Lovelace");
    let local_id = registered.string("local_id").to_owned();
    let lifetime = registered.integer("expires_in");
    assert!((1..=86_400).contains(&lifetime), "the code is valid for {lifetime} s");
    assert!(registered.integer("expires_at") > lifetime);
    assert_eq!(registered.header("cache-control"), Some("no-store"));

    let mail = stack.mails().wait_for(|mail| mail.is_to(email), MAIL_LIMIT).await;
    assert!(!mail.text.contains("Ada Lovelace"), "a mail to an unverified address has no text of the client");

    let confirmed = client.confirm(app, &mail.code()).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("email"), email);
    assert_eq!(confirmed.string("name"), "Ada Lovelace");
    assert_eq!(confirmed.string("local_id"), local_id, "a new account keeps the id that register returned");
    assert!(confirmed.string("refresh_token").starts_with("lkr_"));
    assert_eq!(confirmed.string("access_token").split('.').count(), 3);
    assert!((1..=900).contains(&confirmed.integer("expires_in")));
    client.confirm(app, &mail.code()).await.expect_error(StatusCode::BAD_REQUEST, "invalid_code");

    let wrong = client.login(app, email, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    // Email addresses are case-insensitive.
    let login = client.login(app, "ada.lovelace@EXAMPLE.com", PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(login.body["user"]["id"], local_id);
    assert_eq!(login.body["user"]["email"], email);
    assert_eq!(login.body["user"]["name"], "Ada Lovelace");

    let signed_in = client.with_token(app, login.string("token"));
    let verified = signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verified.string("email"), email);

    let forgot = client.forgot_password(app, email).await.expect(StatusCode::OK);
    assert_eq!(forgot.string("email"), email);
    let reset = stack.mails().wait_for(|later| later.id > mail.id && later.is_to(email), MAIL_LIMIT).await;
    let confirm_password = client.confirm_password(app, email, &reset.code(), NEW_PASSWORD).await;
    assert_eq!(confirm_password.expect(StatusCode::OK).string("email"), email);

    client.login(app, email, PASSWORD).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    client.login(app, email, NEW_PASSWORD).await.expect(StatusCode::OK);
    // The third mail is the notice of the new password. *verify* has sent no mail, because the email address was
    // verified.
    stack.mails().wait_for(|later| later.id > reset.id && later.is_to(email), MAIL_LIMIT).await;
    assert_eq!(stack.mails().to(email).len(), 3);
}
