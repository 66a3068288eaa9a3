//! No password, code, token or email address appears in a log line or in a metric, and the stores contain no password,
//! code or token in clear text.

use http::{Method, StatusCode};
use latchkey_tests::{
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

use crate::support::{TestApp, app};

const EMAIL: &str = "Ada.Lovelace@example.com";
const UNKNOWN_EMAIL: &str = "nobody.at.all@example.com";
const FOREIGN_TOKEN: &str = "stolenTokenOfNobody";
const GUESSED_CODE: &str = "GVESS-ABCDE";
const QUERY_SECRET: &str = "secretInTheQuery";

#[tokio::test]
async fn no_password_code_token_or_address_appears_in_the_log_or_a_metric() {
    let app = app().set("/mail/confirmURL", "https://shop.example.com/confirm?code={code}&email={email}");
    let stack = Stack::builder().app(&app).args(["--log", "debug,latchkey_server=trace"]).start().await;
    let test_app = TestApp { stack, app };
    let (id, client) = (test_app.id(), test_app.client());
    let name = "Augusta Unmistakable";
    client.register(id, name, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.register(id, name, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::OK);
    client.register(id, name, "not an address@", "short-secret").await.expect(StatusCode::BAD_REQUEST);
    client.register(id, name, EMAIL, "Password1").await.expect(StatusCode::BAD_REQUEST);
    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.login(id, UNKNOWN_EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let signed_in = client.with_token(id, login.string("token"));
    signed_in.verify().await.expect(StatusCode::OK);
    client.with_token(id, FOREIGN_TOKEN).verify().await.expect(StatusCode::UNAUTHORIZED);
    client.forgot_password(id, UNKNOWN_EMAIL).await.expect(StatusCode::OK);
    client.confirm(id, GUESSED_CODE).await.expect(StatusCode::BAD_REQUEST);
    client.confirm_password(id, UNKNOWN_EMAIL, GUESSED_CODE, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    let invalid_body = format!("{{\"email\":\"{EMAIL}\",\"password\":\"{PASSWORD}\",\"password\":\"{PASSWORD}\"}}");
    let request = client.request(Method::POST, &format!("{}?token={QUERY_SECRET}", test_app.email_path("login")));
    let request =
        request.header("content-type", "application/json").header("cookie", format!("session={QUERY_SECRET}"));
    client.send(request.body(invalid_body)).await.expect(StatusCode::BAD_REQUEST);
    client.get(&format!("{id}/.well-known/jwks.json?code={QUERY_SECRET}")).await.expect(StatusCode::OK);
    client.get(&format!("nowhere/{QUERY_SECRET}?code={QUERY_SECRET}")).await.expect(StatusCode::NOT_FOUND);

    let mut codes = Vec::new();
    for nth in 1..=3 {
        codes.push(test_app.code(EMAIL, nth).await);
    }
    let confirmed = signed_in.confirm(&codes[2]).await.expect(StatusCode::OK);
    codes.push(test_app.request_reset_code(EMAIL, 4).await);
    let reset = client.confirm_password(id, EMAIL, &codes[3].to_lowercase(), NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    let last_login = client.login(id, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    // Breaks the database, so that the server logs errors with their causes.
    test_app.settled_mail_count(EMAIL).await;
    test_app.sql("ALTER TABLE users RENAME TO elsewhere").await;
    client.login(id, EMAIL, NEW_PASSWORD).await.expect(StatusCode::INTERNAL_SERVER_ERROR);
    client.register(id, name, "late@example.com", NEW_PASSWORD).await.expect(StatusCode::INTERNAL_SERVER_ERROR);

    let mut secrets: Vec<String> = [
        PASSWORD,
        NEW_PASSWORD,
        WRONG_PASSWORD,
        "short-secret",
        "Password1",
        FOREIGN_TOKEN,
        GUESSED_CODE,
        QUERY_SECRET,
        name,
    ]
    .map(str::to_owned)
    .to_vec();
    secrets.extend([EMAIL, UNKNOWN_EMAIL, "late@example.com"].map(str::to_owned));
    for code in codes {
        secrets.extend([code.replace('-', ""), code]);
    }
    for token in [login.string("token"), confirmed.string("access_token"), last_login.string("token")] {
        let signature = token.rsplit('.').next().unwrap();
        secrets.extend([token.to_owned(), signature.to_owned()]);
    }
    for response in [&login, &confirmed, &last_login] {
        secrets.push(response.string("refresh_token").to_owned());
    }
    let log = test_app.stack.server().read_log();
    assert!(log.lines().count() > 10, "the log has lines:\n{log}");
    let metrics = test_app.stack.server().get_ops("metrics").await.expect(StatusCode::OK).text;
    let (log, metrics) = (log.to_lowercase(), metrics.to_lowercase());
    for secret in secrets.iter().map(|secret| secret.to_lowercase()) {
        for (place, text) in [("the log", &log), ("a metric", &metrics)] {
            let line = text.lines().find(|line| line.contains(&secret));
            assert_eq!(line, None, "{secret:?} is in {place}");
        }
    }
    assert!(!metrics.contains(id), "a metric names no user, and no App that a client can invent");
    assert!(!metrics.contains("nowhere"), "nor a path that a client invents");
}

#[tokio::test]
async fn stores_contain_no_password_code_or_token_in_clear_text() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let confirm = test_app.code(EMAIL, 1).await;
    let login = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let reset = test_app.request_reset_code(EMAIL, 2).await;

    let mut connection = test_app.stack.database.connect().await.unwrap();
    let mut stored: String = sqlx::query_scalar("SELECT coalesce(string_agg(users::text, ' '), '') FROM users")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(stored.contains("$argon2id$"), "{stored}");
    let mut redis = test_app.stack.redis().connect().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("*{}*", test_app.id())).query_async(&mut redis).await.unwrap();
    assert!(!keys.is_empty());
    for key in keys {
        assert!(key.starts_with(&format!("lk:{{{}:", test_app.id())), "{key}");
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(ttl > 0, "every key expires: {key}");
        let value: Vec<u8> = redis::cmd("DUMP").arg(&key).query_async(&mut redis).await.unwrap();
        stored.push_str(&key);
        stored.push_str(&String::from_utf8_lossy(&value));
    }
    let tokens = [login.string("token").to_owned(), login.string("refresh_token").to_owned()];
    let codes = [&confirm, &reset].into_iter().flat_map(|code| [code.clone(), code.replace('-', "")]);
    for secret in codes.chain(tokens).chain([PASSWORD.to_owned()]) {
        assert!(!stored.contains(&secret), "{secret} is stored");
    }
}
