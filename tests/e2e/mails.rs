//! Mails: the relay that sends them, their content, and their links (specification: Accounts, Emails and the outbox).

use std::fs;

use http::StatusCode;
use latchkey_tests::{
    builders::{App, Relay},
    mail::Mail,
    passwords::{NEW_PASSWORD, PASSWORD},
    process,
    smtp::{self, Security, Smtp},
    stack::Stack,
};
use serde_json::json;
use url::Url;

use crate::support::{MAIL_LIMIT, NAME, TestApp, app};

const EMAIL: &str = "ada@example.com";

fn relay_credentials() -> Option<(String, String)> {
    Some(("shop".to_owned(), "pa\u{df}wort mit Raum".to_owned()))
}

async fn start_relay(security: Security, login: Option<(String, String)>) -> Smtp {
    Smtp::start(smtp::Options { security, login, ..smtp::Options::plain() }).await.expect("the relay starts")
}

/// The links in the text of a mail.
fn links(mail: &Mail) -> Vec<Url> {
    let words = mail.text.split_whitespace().filter(|word| word.starts_with("http"));
    words.map(|word| word.parse().unwrap_or_else(|_| panic!("{word:?} is no link"))).collect()
}

#[tokio::test]
async fn each_app_sends_through_its_own_relay_with_its_own_security_and_credentials() {
    let relays = [
        start_relay(Security::None, None).await,
        start_relay(Security::None, relay_credentials()).await,
        start_relay(Security::StartTls, None).await,
        start_relay(Security::StartTls, relay_credentials()).await,
        start_relay(Security::Implicit, None).await,
        start_relay(Security::Implicit, relay_credentials()).await,
    ];
    let authorities: String = relays.iter().filter_map(Smtp::ca).collect();
    let bundle = process::fresh_dir("authorities").join("all.pem");
    fs::write(&bundle, authorities).unwrap();
    let apps: Vec<App> = relays.iter().map(|smtp| app().relay(Relay::of(smtp))).collect();
    let builder = Stack::builder().env("SSL_CERT_FILE", &bundle.display().to_string());
    let stack = apps.iter().fold(builder, |builder, app| builder.app(app)).start().await;
    for (app, smtp) in apps.iter().zip(&relays) {
        stack.client().register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
        let mail = smtp.mails().wait_for(|mail| mail.is_to(EMAIL), MAIL_LIMIT).await;
        // If an App has its own relay, the App sets the email address of the sender.
        assert!(mail.from.contains(&format!("hello@{}.test", app.id())), "{}", mail.from);
        assert!(mail.from.contains("The Shop"), "{}", mail.from);
        assert_eq!(mail.envelope_from, format!("hello@{}.test", app.id()));
        stack.client().confirm(app.id(), &mail.code()).await.expect(StatusCode::OK);
    }
    assert!(stack.mails().all().is_empty(), "no mail used the default relay");
}

#[tokio::test]
async fn the_default_relay_can_require_tls_and_credentials() {
    for security in [Security::StartTls, Security::Implicit] {
        let app = app();
        let options = smtp::Options { security, login: relay_credentials(), ..smtp::Options::plain() };
        let stack = Stack::builder().app(&app).smtp(options).start().await;
        stack.client().register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
        stack.mails().wait_for(|mail| mail.is_to(EMAIL), MAIL_LIMIT).await;
    }
}

#[tokio::test]
async fn an_app_with_the_default_relay_sets_only_the_sender_name_and_reply_to() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let mail = test_app.mail(EMAIL, 1).await;
    assert_eq!(mail.envelope_from, "hello@latchkey.test");
    assert!(mail.from.contains("The Shop") && mail.from.contains("<hello@latchkey.test>"), "{}", mail.from);
    let reply_to = mail.header("reply-to").unwrap();
    assert!(reply_to.contains(&format!("hello@{}.test", test_app.id())), "{reply_to}");
}

#[tokio::test]
async fn a_relay_with_an_untrusted_certificate_gets_no_mail() {
    let smtp = start_relay(Security::StartTls, relay_credentials()).await;
    let app = app().relay(Relay::of(&smtp));
    let test_app = TestApp::start_with(app).await;
    test_app.register(EMAIL).await;
    let mut connection = test_app.stack.database.connect().await.unwrap();
    let tried = latchkey_tests::eventually("an attempt", MAIL_LIMIT, || async {
        let mut connection = test_app.stack.database.connect().await.ok()?;
        let tried: Option<i32> =
            sqlx::query_scalar("SELECT attempts FROM outbox").fetch_optional(&mut connection).await.ok()?;
        tried.filter(|attempts| *attempts > 0)
    });
    tried.await;
    assert!(smtp.mails().all().is_empty());
    let error: Option<String> =
        sqlx::query_scalar("SELECT error FROM outbox").fetch_one(&mut connection).await.unwrap();
    assert!(error.is_none_or(|error| !error.contains("wort mit Raum")), "it does not show the password");
}

#[tokio::test]
async fn links_carry_the_code_and_the_address_percent_encoded() {
    let email = "o'brien+tag&x=y#z@example.com";
    let app = app()
        .set("/mail/confirmURL", "https://shop.example.com/confirm?code={code}&email={email}")
        .set("/mail/resetURL", "https://shop.example.com/#/reset/{code}?to={email}");
    let test_app = TestApp::start_with(app).await;
    test_app.register(email).await;
    let mail = test_app.mail(email, 1).await;
    let link = links(&mail).into_iter().find(|link| link.path() == "/confirm").expect("a link to the App's page");
    let query: Vec<(String, String)> = link.query_pairs().into_owned().collect();
    let code = mail.code();
    assert_eq!(query, [("code".to_owned(), code.clone()), ("email".to_owned(), email.to_owned())]);
    let html = mail.html.replace("&amp;", "&").replace("&#x2f;", "/");
    assert!(html.contains(&format!("href=\"{link}\"")), "{link} in {html}");
    // The code in the link is valid.
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);

    test_app.request_reset_code(email, 2).await;
    let mail = test_app.mail(email, 2).await;
    let code = mail.code();
    let link = links(&mail).into_iter().find(|link| link.fragment().is_some()).expect("a link to the App's page");
    let fragment = link.fragment().unwrap();
    assert!(fragment.starts_with(&format!("/reset/{code}?to=")), "{fragment}");
    for unencoded in ["&", "=y", "#", "+"] {
        assert!(!fragment.contains(unencoded), "{unencoded} in {fragment}");
    }
    test_app.client().confirm_password(test_app.id(), email, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_app_can_replace_parts_of_a_mail_and_the_other_parts_are_the_default() {
    let app = app()
        .set("/displayName", "Tom & <Jerry>")
        .set("/mail/confirmURL", "https://shop.example.com/confirm?code={code}")
        .template("confirm.subject", "Welcome to {{ app }}")
        .template(
            "confirm.html",
            "<p>{{ app }}|{{ code }}|<a href=\"{{ url }}\">{{ expires_at }}</a>|{{ registered_at }}</p>",
        )
        .template("password-changed.txt", "Dear {{ name }}, all new.");
    let test_app = TestApp::start_with(app).await;
    let client = test_app.client();
    client.register(test_app.id(), "Ada <b>Lovelace", EMAIL, PASSWORD).await;
    let mail = test_app.mail(EMAIL, 1).await;
    let code = mail.code();
    assert_eq!(mail.subject, "Welcome to Tom & <Jerry>");
    assert!(mail.html.contains(&format!("<p>Tom &amp; &lt;Jerry&gt;|{code}|<a href=\"https:")), "{}", mail.html);
    assert!(mail.text.contains("Tom & <Jerry>") && mail.text.contains("https://shop.example.com/confirm?code="));

    let code = test_app.request_reset_code(EMAIL, 2).await;
    client.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    let notice = test_app.mail(EMAIL, 3).await;
    assert_eq!(notice.text.trim(), "Dear Ada <b>Lovelace, all new.");
    assert!(notice.html.contains("<html") || notice.html.contains("<p"), "the default is used: {}", notice.html);
    assert!(!notice.html.contains("<b>Lovelace"), "escaped for HTML: {}", notice.html);
}

/// Invalid templates: wrong syntax, an unknown name, an unknown file, a loop with too many iterations.
const BROKEN_TEMPLATES: [(&str, &str); 4] = [
    ("confirm.subject", "{{ code"),
    ("confirm.txt", "{{ code }} {{ nothing.at.all }}"),
    ("confirm.html", "{% include 'x' %}"),
    ("confirm.txt", "{% for i in range(9999) %}{% for j in range(9999) %}{{ j }}{% endfor %}{% endfor %}"),
];

#[tokio::test]
async fn rendering_a_manifest_reports_broken_templates_and_mails_use_the_defaults() {
    let app = app().template("confirm.subject", "Welcome");
    let test_app = TestApp::start_with(app.clone()).await;
    for (part, template) in BROKEN_TEMPLATES {
        let error = test_app.stack.apply(&app.clone().template(part, template)).unwrap_err().to_string();
        assert!(error.contains(test_app.id()) && error.contains("templatesRef") && error.contains(part), "{error}");
    }
    test_app.register(EMAIL).await;
    let mail = test_app.mail(EMAIL, 1).await;
    assert!(!mail.subject.is_empty() && mail.text.contains("The Shop") && mail.html.contains(&mail.code()));
}

#[tokio::test]
async fn the_default_template_is_used_if_a_template_fails_when_a_mail_is_made() {
    let test_app = TestApp::start().await;
    for (index, (part, template)) in BROKEN_TEMPLATES.into_iter().enumerate() {
        test_app.edit_rendered(|document| document["mail"]["templates"] = json!({ part: template })).await;
        let email = format!("ada{index}@example.com");
        test_app.register(&email).await;
        let mail = test_app.mail(&email, 1).await;
        assert!(!mail.subject.is_empty() && mail.text.contains("The Shop"), "{part}: {}", mail.text);
        assert!(mail.text.len() < 20_000 && mail.html.contains(&mail.code()), "{part}: {}", mail.html);
        test_app.client().confirm(test_app.id(), &mail.code()).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn a_mail_has_text_and_html_and_prevents_automatic_replies() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let mail = test_app.mail(EMAIL, 1).await;
    let content_type = mail.header("content-type").unwrap();
    assert!(content_type.starts_with("multipart/alternative"), "{content_type}");
    for name in ["date", "message-id", "subject", "to", "from", "mime-version"] {
        assert!(mail.header(name).is_some(), "{name}");
    }
    // The header is defined in RFC 3834, section 5.
    assert_eq!(mail.header("auto-submitted"), Some("auto-generated"));
    assert!(mail.raw.is_ascii(), "every relay accepts ASCII");
    assert!(mail.raw.lines().all(|line| line.len() <= 998), "RFC 5322, 2.1.1");
}
