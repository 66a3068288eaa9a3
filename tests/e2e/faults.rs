//! Postgres and Redis that are unavailable, slow, cut or emptied, and servers that die or drain: clients get 503 with
//! `Retry-After` within a bounded time, nothing is half-done, and the service recovers without a restart.

use std::{
    fs,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    client::{ApiClient, ApiResponse},
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD},
    postgres,
    proxy::{Proxy, Trap},
    raw_connection::RawConnection,
    redis,
    stack::{ServerProcess, Stack},
    tls::ServerTls,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    fault_support::{Snapshot, expect_invalid_code, expect_invalid_credentials, expect_unavailable, unlimited_app},
    support::{NAME, TestApp},
};

/// The email address as the user writes it. The capitals distinguish it from the canonical form in statements to
/// Postgres.
const EMAIL: &str = "ADA@example.com";
const CANONICAL_EMAIL: &str = "ada@example.com";
const OTHER_EMAIL: &str = "grace@example.com";
/// Time limit for a response during an outage: the timeouts of both stores one after the other, on a loaded machine.
const REFUSAL_LIMIT: Duration = Duration::from_secs(15);
const RECOVERY_LIMIT: Duration = Duration::from_secs(30);

/// An App on a service with proxies in front of Postgres and Redis.
async fn app_behind_proxies() -> TestApp {
    TestApp::from_builder(unlimited_app("fault"), Stack::builder().proxied()).await
}

fn postgres_proxy(test_app: &TestApp) -> &Proxy {
    test_app.stack.postgres_proxy.as_ref().expect("the service has proxies")
}

fn redis_proxy(test_app: &TestApp) -> &Proxy {
    test_app.stack.redis_proxy.as_ref().expect("the service has proxies")
}

/// The response to a call. Panics if it does not arrive in time.
async fn within_limit(call: impl Future<Output = ApiResponse>) -> ApiResponse {
    let started = Instant::now();
    let response = call.await;
    assert!(started.elapsed() < REFUSAL_LIMIT, "the response took {:?}: {}", started.elapsed(), response.text);
    response
}

/// Asserts that the service is ready, and serves requests that need no store.
async fn assert_serves_without_stores(test_app: &TestApp) {
    let client = test_app.client();
    for path in ["jwks.json", "openid-configuration"] {
        client.get(&format!("{}/.well-known/{path}", test_app.id())).await.expect(StatusCode::OK);
    }
    for path in ["livez", "readyz"] {
        test_app.stack.server().get_ops(path).await.expect(StatusCode::OK);
    }
}

async fn try_login(test_app: &TestApp, email: &str, password: &str) -> ApiResponse {
    test_app.client().login(test_app.id(), email, password).await
}

async fn wait_for_login(test_app: &TestApp, email: &str) {
    test_app.wait_until_ok("a login", async || try_login(test_app, email, PASSWORD).await).await;
}

/// Waits until three calls have succeeded. After them, no connection of the server is still broken by an earlier cut.
async fn wait_until_settled(test_app: &TestApp) {
    for _ in 0..3 {
        test_app
            .wait_until_ok("the service", async || {
                test_app.client().forgot_password(test_app.id(), "nobody@example.com").await
            })
            .await;
    }
}

// === Postgres ===

#[tokio::test]
async fn a_call_that_fails_without_postgres_does_not_count_towards_the_mail_limit() {
    let app = unlimited_app("counted").limit("mailsPerRecipient", &[(1, 3600)]);
    let test_app = TestApp::from_builder(app, Stack::builder().proxied()).await;
    let proxy = postgres_proxy(&test_app);

    // Only the statement that creates the user contains the name.
    proxy.set_trap(Trap::Before(NAME.as_bytes().to_vec()));
    expect_unavailable(within_limit(test_app.try_register(EMAIL)).await);
    test_app.wait_until_ok("a registration", async || test_app.try_register(EMAIL).await).await;
    test_app.code(EMAIL, 1).await;

    proxy.refuse().await;
    expect_unavailable(within_limit(test_app.client().forgot_password(test_app.id(), EMAIL)).await);
    proxy.restore().expect("the proxy's port is free");
    test_app.wait_until_ok("a reset", async || test_app.client().forgot_password(test_app.id(), EMAIL).await).await;
    test_app.code(EMAIL, 2).await;
}

#[tokio::test]
async fn calls_that_need_postgres_are_unavailable_without_it_and_recover() {
    let test_app = app_behind_proxies().await;
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    test_app.register(OTHER_EMAIL).await;
    let code = test_app.code(OTHER_EMAIL, 1).await;
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    let users = test_app.query_number("SELECT count(*) FROM users").await;

    for fault in ["refusing", "silent"] {
        let proxy = postgres_proxy(&test_app);
        match fault {
            "refusing" => proxy.refuse().await,
            _ => proxy.stall(),
        }
        let new_email = "new@example.com";
        let id = test_app.id();
        let refused = futures::future::join_all([
            Box::pin(within_limit(try_login(&test_app, EMAIL, PASSWORD)))
                as std::pin::Pin<Box<dyn Future<Output = ApiResponse>>>,
            Box::pin(within_limit(test_app.try_register(new_email))),
            Box::pin(within_limit(async { test_app.client().confirm(id, &code).await })),
            Box::pin(within_limit(async { test_app.client().forgot_password(id, EMAIL).await })),
            Box::pin(within_limit(async { test_app.client().confirm_password(id, EMAIL, &reset, NEW_PASSWORD).await })),
            Box::pin(within_limit(async { client.with_token(id, &token).verify().await })),
        ]);
        let ((), refused) = tokio::join!(assert_serves_without_stores(&test_app), refused);
        for response in refused {
            expect_unavailable(response);
        }
        proxy.restore().expect("the proxy's port is free");
        wait_for_login(&test_app, EMAIL).await;
        // The calls that failed have changed nothing.
        assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, users, "after {fault}");
        assert_eq!(test_app.epoch_and_verified(OTHER_EMAIL).await, (1, false), "after {fault}");
        assert_eq!(test_app.epoch_and_verified(EMAIL).await, (2, true), "after {fault}");
    }
    // The codes of the calls that failed are still valid.
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn slow_stores_cause_slow_responses_not_wrong_ones() {
    let test_app = app_behind_proxies().await;
    for proxy in [postgres_proxy(&test_app), redis_proxy(&test_app)] {
        proxy.delay(Duration::from_millis(60));
        within_limit(test_app.wait_until_ok("registration", async || test_app.try_register(EMAIL).await)).await;
        proxy.restore().expect("the proxy's port is free");
    }
    // The service also recovers after its idle connections were cut.
    test_app.code(EMAIL, 1).await;
    for proxy in [postgres_proxy(&test_app), redis_proxy(&test_app)] {
        proxy.cut();
        wait_for_login(&test_app, EMAIL).await;
    }
}

#[tokio::test]
async fn a_registration_that_is_cut_off_is_complete_or_absent() {
    let test_app = app_behind_proxies().await;
    let proxy = postgres_proxy(&test_app);
    // Only the statement that creates the user contains the email address in this spelling.
    proxy.set_trap(Trap::Before(EMAIL.into()));
    expect_unavailable(within_limit(test_app.try_register(EMAIL)).await);
    proxy.trap_triggered().await;
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 0);
    assert_eq!(test_app.query_number("SELECT count(*) FROM outbox").await, 0, "no mail without a user");

    // The earlier cut can have broken another connection, too. A call over that connection would fail before it reaches
    // the next trap.
    wait_until_settled(&test_app).await;
    proxy.set_trap(Trap::After(EMAIL.into()));
    expect_unavailable(within_limit(test_app.try_register(EMAIL)).await);
    proxy.trap_triggered().await;
    // The statement was executed and only the response was lost: the user exists, and so does the mail.
    let code = test_app.code(EMAIL, 1).await;
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 1);
    test_app.wait_until_ok("confirming", async || test_app.client().confirm(test_app.id(), &code).await).await;
    wait_for_login(&test_app, CANONICAL_EMAIL).await;
}

#[tokio::test]
async fn a_confirmation_that_is_cut_before_it_arrives_does_not_consume_its_code() {
    let test_app = app_behind_proxies().await;
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let proxy = postgres_proxy(&test_app);
    proxy.set_trap(Trap::Before(CANONICAL_EMAIL.into()));
    expect_unavailable(within_limit(test_app.client().confirm(test_app.id(), &code)).await);
    proxy.trap_triggered().await;
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (1, false));
    test_app.wait_until_ok("the same code", async || test_app.client().confirm(test_app.id(), &code).await).await;
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (2, true));

    let reset = test_app.request_reset_code(EMAIL, 2).await;
    proxy.set_trap(Trap::Before(CANONICAL_EMAIL.into()));
    expect_unavailable(
        within_limit(test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD)).await,
    );
    proxy.trap_triggered().await;
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (2, true));
    wait_for_login(&test_app, EMAIL).await;
    let again = async || test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await;
    test_app.wait_until_ok("the same code", again).await;
    try_login(&test_app, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_reset_with_a_lost_response_still_ends_sessions_and_codes() {
    let test_app = app_behind_proxies().await;
    let (_, token) = test_app.register_and_log_in(EMAIL).await;
    test_app.verify(&token).await.expect(StatusCode::OK);
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    let proxy = postgres_proxy(&test_app);
    proxy.set_trap(Trap::After(b"COMMIT".to_vec()));
    expect_unavailable(
        within_limit(test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD)).await,
    );
    proxy.trap_triggered().await;
    // The transaction was committed, but the server does not know that, and has put the code back into Redis. The
    // transaction has raised the user's epoch, so the code is invalid.
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (3, true));
    let again = eventually("a response to the code", RECOVERY_LIMIT, || async {
        let response = test_app.client().confirm_password(test_app.id(), EMAIL, &reset, PASSWORD).await;
        (response.status != StatusCode::SERVICE_UNAVAILABLE).then_some(response)
    });
    expect_invalid_code(again.await);
    expect_invalid_credentials(try_login(&test_app, EMAIL, PASSWORD).await);
    try_login(&test_app, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    // Redis gets the epoch through the outbox. Then only the session of the new login is left.
    eventually("the end of the old sessions", RECOVERY_LIMIT, || async {
        test_app.make_outbox_due().await;
        (test_app.session_count().await == 1).then_some(())
    })
    .await;
    test_app.verify(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    test_app.mail(EMAIL, 3).await;
}

#[tokio::test]
async fn each_failure_to_listen_for_outbox_rows_is_logged() {
    let test_app = app_behind_proxies().await;
    let proxy = postgres_proxy(&test_app);
    let logged = |text: &str| test_app.stack.server().read_log().matches(text).count();
    // The cut is repeated, because the server may not listen yet.
    eventually("the first failure", RECOVERY_LIMIT, || async {
        proxy.cut();
        (logged("cannot listen for new outbox rows and events") == 1).then_some(())
    })
    .await;
    eventually("the server listens again", RECOVERY_LIMIT, || async {
        (logged("listening for new outbox rows and events again") == 1).then_some(())
    })
    .await;
    proxy.cut();
    eventually("the second failure", RECOVERY_LIMIT, || async {
        (logged("cannot listen for new outbox rows and events") == 2).then_some(())
    })
    .await;
}

// === Redis ===

#[tokio::test]
async fn nothing_is_half_done_without_redis_and_everything_recovers() {
    let test_app = app_behind_proxies().await;
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    test_app.register(OTHER_EMAIL).await;
    let code = test_app.code(OTHER_EMAIL, 1).await;
    let mails = test_app.settled_mail_count(EMAIL).await;

    for fault in ["refusing", "silent"] {
        let proxy = redis_proxy(&test_app);
        match fault {
            "refusing" => proxy.refuse().await,
            _ => proxy.stall(),
        }
        let new_email = "new@example.com";
        let id = test_app.id();
        let refused = futures::future::join_all([
            Box::pin(within_limit(try_login(&test_app, EMAIL, PASSWORD)))
                as std::pin::Pin<Box<dyn Future<Output = ApiResponse>>>,
            Box::pin(within_limit(test_app.try_register(new_email))),
            Box::pin(within_limit(async { test_app.client().confirm(id, &code).await })),
            Box::pin(within_limit(async { test_app.client().forgot_password(id, EMAIL).await })),
            Box::pin(within_limit(async { test_app.client().confirm_password(id, EMAIL, &code, NEW_PASSWORD).await })),
            Box::pin(within_limit(async { client.with_token(id, &token).verify().await })),
        ]);
        let ((), refused) = tokio::join!(assert_serves_without_stores(&test_app), refused);
        for response in refused {
            expect_unavailable(response);
        }
        proxy.restore().expect("the proxy's port is free");
        wait_for_login(&test_app, EMAIL).await;
        assert_eq!(test_app.epoch_and_verified(OTHER_EMAIL).await, (1, false), "after {fault}");
        assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 2, "after {fault}");
        test_app.verify(&token).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, mails, "a refused call sends no mail");
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_epoch_reaches_redis_through_the_outbox_if_redis_is_cut_during_the_transaction() {
    let test_app = app_behind_proxies().await;
    let (_, token) = test_app.register_and_log_in(EMAIL).await;
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    let before = Snapshot::capture(&test_app).await;
    // Makes Postgres slow, so that the test can cut Redis after the server has removed the code and before it writes
    // the new epoch to Redis. The transaction takes 7 to 12 round trips, so it still ends before its deadline.
    postgres_proxy(&test_app).delay(Duration::from_millis(80));
    let client = test_app.client();
    let response = async { client.confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await };
    let cut = async {
        let code_removed = || async { (!before.removed_keys().await.is_empty()).then_some(()) };
        eventually("the removal of the code", RECOVERY_LIMIT, code_removed).await;
        redis_proxy(&test_app).refuse().await;
    };
    let (response, ()) = tokio::join!(within_limit(response), cut);
    response.expect(StatusCode::OK);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (3, true));
    assert_eq!(test_app.query_number("SELECT count(*) FROM outbox WHERE kind = 'epoch' AND epoch = 3").await, 1);
    assert!(test_app.session_count().await > 0, "Redis does not have the epoch");
    expect_unavailable(within_limit(test_app.verify(&token)).await);

    postgres_proxy(&test_app).restore().expect("the proxy's port is free");
    redis_proxy(&test_app).restore().expect("the proxy's port is free");
    // No client call brings the epoch to Redis; the outbox does.
    eventually("the outbox delivers the epoch", RECOVERY_LIMIT, || async {
        test_app.make_outbox_due().await;
        (test_app.query_number("SELECT count(*) FROM outbox WHERE kind = 'epoch'").await == 0).then_some(())
    })
    .await;
    assert_eq!(test_app.session_count().await, 0);
    test_app.verify(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    try_login(&test_app, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_running_server_works_with_an_emptied_redis() {
    let test_app =
        TestApp::from_builder(unlimited_app("empty"), Stack::builder().own_redis(redis::Options::for_tests())).await;
    let (_, token) = test_app.register_and_log_in(EMAIL).await;
    test_app.register(OTHER_EMAIL).await;
    let code = test_app.code(OTHER_EMAIL, 1).await;
    let mut redis = test_app.stack.redis().connect().await.expect("Redis is reachable");
    // Empties Redis, as if it had been replaced: no keys, no scripts.
    ::redis::cmd("FLUSHALL").query_async::<()>(&mut redis).await.expect("Redis is emptied");
    ::redis::cmd("SCRIPT").arg("FLUSH").query_async::<()>(&mut redis).await.expect("Redis forgets scripts");

    test_app.verify(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    expect_invalid_code(test_app.client().confirm(test_app.id(), &code).await);
    let login = try_login(&test_app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    test_app.verify(login.string("token")).await.expect(StatusCode::OK);
    // The next registration sends a new code.
    test_app.register(OTHER_EMAIL).await;
    let code = test_app.code(OTHER_EMAIL, 2).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_jwks_is_served_and_the_service_stays_ready_if_both_stores_are_unavailable() {
    let test_app = app_behind_proxies().await;
    let (_, token) = test_app.register_and_log_in(EMAIL).await;
    postgres_proxy(&test_app).refuse().await;
    redis_proxy(&test_app).refuse().await;
    assert_serves_without_stores(&test_app).await;
    expect_unavailable(within_limit(try_login(&test_app, EMAIL, PASSWORD)).await);
    postgres_proxy(&test_app).restore().expect("the proxy's port is free");
    redis_proxy(&test_app).restore().expect("the proxy's port is free");
    wait_for_login(&test_app, EMAIL).await;
    test_app.verify(&token).await.expect(StatusCode::OK);
}

// === Starting ===

/// Starts a server that cannot become ready yet, and waits until `readyz` reports this reason.
async fn start_not_ready(server: &ServerProcess, why: &str) {
    server.start().expect("the server starts");
    let not_ready = eventually("a response of the server", RECOVERY_LIMIT, || async {
        assert!(server.exit_status().is_none(), "the server ended: {}", server.read_log());
        let client = ApiClient::new(server.ops);
        let response = client.try_send(client.request(http::Method::GET, "readyz")).await.ok()?;
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{}", response.text);
        response.text.contains(why).then_some(response)
    });
    not_ready.await;
    server.get_ops("livez").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_server_that_starts_without_its_stores_serves_when_they_are_available() {
    let test_app = app_behind_proxies().await;
    test_app.register_and_confirm(EMAIL).await;
    let server = test_app.stack.server();
    server.kill();
    postgres_proxy(&test_app).refuse().await;
    redis_proxy(&test_app).refuse().await;
    start_not_ready(server, "schema").await;
    test_app.client().get(&format!("{}/.well-known/jwks.json", test_app.id())).await.expect(StatusCode::OK);
    expect_unavailable(within_limit(try_login(&test_app, EMAIL, PASSWORD)).await);
    postgres_proxy(&test_app).restore().expect("the proxy's port is free");
    server.wait_until_ready().await.expect("the server becomes ready once it has seen the schema");
    expect_unavailable(within_limit(try_login(&test_app, EMAIL, PASSWORD)).await);
    redis_proxy(&test_app).restore().expect("the proxy's port is free");
    wait_for_login(&test_app, EMAIL).await;
}

#[tokio::test]
async fn a_server_is_not_ready_until_the_schema_is_migrated() {
    let test_app = TestApp::from_builder(unlimited_app("old"), Stack::builder()).await;
    let server = test_app.stack.server();
    server.kill();
    let empty = test_app.stack.postgres().empty_database().await.expect("a database");
    postgres::write_private(&test_app.stack.dir().join("database-url"), &empty.url).expect("the file can be written");
    start_not_ready(server, "latchkey-server migrate").await;
    assert!(server.read_log().contains("latchkey-server migrate"), "the log says what to do");

    tokio::task::spawn_blocking(move || postgres::migrate(&empty)).await.expect("no panic").expect("it is migrated");
    server.wait_until_ready().await.expect("the server becomes ready without a restart");
    test_app.register(EMAIL).await;
    test_app.code(EMAIL, 1).await;
}

// === Errors of the server ===

#[tokio::test]
async fn a_server_error_does_not_reveal_its_cause() {
    let test_app = TestApp::from_builder(unlimited_app("own"), Stack::builder()).await;
    test_app.register(EMAIL).await;
    test_app.code(EMAIL, 1).await;
    test_app.sql("ALTER TABLE users RENAME COLUMN email_canonical TO hidden_column").await;
    let response = try_login(&test_app, EMAIL, PASSWORD).await;
    let response = response.expect_error(StatusCode::INTERNAL_SERVER_ERROR, "server_error");
    for detail in ["column", "hidden", "users", "SELECT", "42703", "ostgres", "sqlx", CANONICAL_EMAIL] {
        assert!(!response.text.contains(detail), "{detail:?} in {}", response.text);
    }
    let id = response.string("request_id");
    let logged = log_lines_with(test_app.stack.server(), id);
    assert!(logged.contains("42703"), "the log has the cause with the request's id: {logged}");
    assert!(!logged.contains(PASSWORD) && !logged.to_lowercase().contains(CANONICAL_EMAIL), "{logged}");
    test_app.sql("ALTER TABLE users RENAME COLUMN hidden_column TO email_canonical").await;
    try_login(&test_app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

fn log_lines_with(server: &ServerProcess, text: &str) -> String {
    server.read_log().lines().filter(|line| line.contains(text)).collect::<Vec<_>>().join("\n")
}

// === Servers that end ===

#[tokio::test]
async fn a_draining_server_refuses_no_request_and_finishes_running_requests() {
    let test_app = TestApp::from_builder(unlimited_app("drain"), Stack::builder().args(["--drain-seconds", "2"])).await;
    test_app.register(EMAIL).await;
    test_app.code(EMAIL, 1).await;
    let server = test_app.stack.server();
    let path = format!("v1/{}/email/login", test_app.id());
    let body = serde_json::json!({ "email": EMAIL, "password": PASSWORD }).to_string();

    // Half of this request arrives before the drain, and the rest when the server no longer accepts connections.
    let mut slow_connection = TcpStream::connect(server.public).await.expect("the server accepts");
    let head = format!(
        "POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
        body.len(),
        &body[..10]
    );
    slow_connection.write_all(head.as_bytes()).await.expect("the server reads");
    // When the drain starts, there are also an open connection and logins in flight.
    let kept_alive = test_app.client();
    kept_alive.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let in_flight: Vec<_> = (0..8)
        .map(|_| {
            let (client, app) = (test_app.client(), test_app.id().to_owned());
            tokio::spawn(async move { client.login(&app, EMAIL, PASSWORD).await })
        })
        .collect();
    server.begin_drain();
    let begun = Instant::now();
    for login in in_flight {
        login.await.expect("no panic").expect(StatusCode::OK);
    }
    eventually("the server reports the drain", RECOVERY_LIMIT, || async {
        (server.get_ops("readyz").await.status == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    server.get_ops("livez").await.expect(StatusCode::OK);

    // During the drain, requests on old and new connections are served, with `Connection: close`.
    let response = kept_alive.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(response.header("connection"), Some("close"));
    let mut served = 0;
    while begun.elapsed() < Duration::from_millis(1500) {
        let mut connection = RawConnection::connect(server.public, latchkey_tests::client::unique_client_address())
            .await
            .expect("it accepts");
        let (path, body) = (path.clone(), body.clone());
        let reply = tokio::task::spawn_blocking(move || connection.post(&path, &body)).await.expect("no panic");
        let reply = reply.expect("the server responds");
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.header("connection"), Some("close"), "{}", reply.head);
        served += 1;
    }
    assert!(served > 0);

    eventually("no more connections are accepted", RECOVERY_LIMIT, || async {
        TcpStream::connect(server.public).await.is_err().then_some(())
    })
    .await;
    assert!(begun.elapsed() >= Duration::from_secs(2), "it went on accepting for {:?} only", begun.elapsed());
    assert_eq!(server.exit_status(), None, "a request is not finished");
    slow_connection.write_all(&body.as_bytes()[10..]).await.expect("the server reads on");
    let mut response = String::new();
    slow_connection.read_to_string(&mut response).await.expect("the server responds and closes");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    let status = eventually("the end", RECOVERY_LIMIT, || async { server.exit_status() }).await;
    assert!(status.success(), "it ended with {status}");
}

#[tokio::test]
async fn a_confirmation_is_complete_or_undone_if_the_server_is_killed_during_it() {
    let test_app = app_behind_proxies().await;
    let server = test_app.stack.server();
    // Makes Postgres so slow that the kills happen before, between and after the steps of the confirmation.
    postgres_proxy(&test_app).delay(Duration::from_millis(15));
    let mut confirmed = Vec::new();
    for (round, kill_after_ms) in [5_u64, 25, 150, 700].into_iter().enumerate() {
        let email = format!("user-{round}@example.com");
        test_app.wait_until_ok("registration", async || test_app.try_register(&email).await).await;
        let code = test_app.code(&email, 1).await;
        let client = test_app.client();
        let request = client.request(http::Method::POST, &format!("v1/{}/email/confirm", test_app.id()));
        let request = request.json(&serde_json::json!({ "code": code }));
        let kill = async {
            tokio::time::sleep(Duration::from_millis(kill_after_ms)).await;
            server.kill();
        };
        let (response, ()) = tokio::join!(client.try_send(request), kill);
        server.start_ready().await.expect("the server starts again");
        let (epoch, verified) = test_app.epoch_and_verified(&email).await;
        assert_eq!(epoch, if verified { 2 } else { 1 }, "{email}");
        assert!(verified || response.is_err(), "a confirmation with a response is done: {response:?}");
        confirmed.push(verified);
        // If the confirmation was undone, the old code can be lost. The user then verifies the account with a new code.
        if !verified {
            test_app.wait_until_ok("registration", async || test_app.try_register(&email).await).await;
            let code = test_app.code(&email, 2).await;
            test_app.wait_until_ok("confirming", async || test_app.client().confirm(test_app.id(), &code).await).await;
        }
        wait_for_login(&test_app, &email).await;
        assert_eq!(test_app.epoch_and_verified(&email).await, (2, true));
    }
    assert!(!confirmed[0], "the first kill came before anything was done");
}

// === TLS and passwords ===

#[tokio::test]
async fn both_stores_are_used_over_tls_and_an_untrusted_postgres_certificate_is_refused() {
    let tls = || Some(ServerTls::new().expect("an authority"));
    let redis = redis::Options { tls: tls(), password: Some("s3cret".to_owned()), ..redis::Options::for_tests() };
    let postgres = postgres::Options { tls: tls(), ..postgres::Options::for_tests() };
    let test_app =
        TestApp::from_builder(unlimited_app("tls"), Stack::builder().own_postgres(postgres).own_redis(redis)).await;
    test_app.register_and_log_in(EMAIL).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE application_name = 'latchkey' AND ssl";
    assert!(test_app.query_number(encrypted).await > 0);

    // The server does not trust a certificate of another authority.
    let server = test_app.stack.server();
    server.kill();
    let unrelated_ca = test_app.stack.dir().join("stranger.pem");
    fs::write(&unrelated_ca, &ServerTls::new().expect("an authority").ca).expect("the file can be written");
    let url = &test_app.stack.database.url;
    let (head, _) = url.split_once("sslrootcert=").expect("the URL names its authority");
    let url = format!("{head}sslrootcert={}", unrelated_ca.display());
    postgres::write_private(&test_app.stack.dir().join("database-url"), &url).expect("the file can be written");
    start_not_ready(server, "schema").await;
    expect_unavailable(within_limit(try_login(&test_app, EMAIL, PASSWORD)).await);
}

#[tokio::test]
async fn a_rotated_password_is_read_from_its_file_again() {
    let options = redis::Options { password: Some("first".to_owned()), ..redis::Options::for_tests() };
    let test_app = TestApp::from_builder(unlimited_app("rotate"), Stack::builder().own_redis(options)).await;
    test_app.register_and_confirm(EMAIL).await;
    let role = format!("r_{:016x}", rand::random::<u64>());
    let name = &test_app.stack.database.name;
    let execute = async |sql: String| {
        test_app.stack.postgres().execute(name, &sql).await.expect("the SQL is valid");
    };
    execute(format!("CREATE ROLE {role} LOGIN PASSWORD 'first' SUPERUSER")).await;
    let url = |password: &str| format!("postgres://{role}:{password}@{}/{name}", test_app.stack.postgres().addr());
    let file = test_app.stack.dir().join("database-url");
    let server = test_app.stack.server();
    server.kill();
    postgres::write_private(&file, &url("first")).expect("the file can be written");
    server.start_ready().await.expect("the server starts");
    wait_for_login(&test_app, EMAIL).await;

    // Rotates the password as tools do: first in the store, a moment later in the mounted file. Then the old
    // connections end.
    execute(format!("ALTER ROLE {role} PASSWORD 'second'")).await;
    postgres::write_private(&file, &url("second")).expect("the file can be written");
    execute(format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")).await;
    wait_for_login(&test_app, EMAIL).await;

    let mut redis = test_app.stack.redis().connect().await.expect("Redis is reachable");
    let set = ::redis::cmd("CONFIG").arg(&["SET", "requirepass", "second"]).clone();
    set.query_async::<()>(&mut redis).await.expect("Redis accepts a password");
    let redis_url = test_app.stack.redis().url().replace(":first@", ":second@");
    postgres::write_private(&test_app.stack.dir().join("redis-url"), &redis_url).expect("the file can be written");
    let kill = ::redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).clone();
    kill.query_async::<()>(&mut redis).await.expect("Redis ends its clients");
    wait_for_login(&test_app, EMAIL).await;
}

// === Clients that are slow or many ===

#[tokio::test]
async fn a_flood_of_silent_connections_is_bounded_and_does_not_delay_others() {
    let test_app = TestApp::from_builder(unlimited_app("flood"), Stack::builder()).await;
    test_app.register(EMAIL).await;
    test_app.code(EMAIL, 1).await;
    let server = test_app.stack.server();
    let before = resident_kib(server);
    let mut flood = Vec::new();
    for number in 0..1500 {
        let mut stream = TcpStream::connect(server.public).await.expect("the server accepts");
        // A third of the connections send nothing, a third send half a head, and a third send half a body.
        let sent = match number % 3 {
            0 => "",
            1 => "POST /v1/x/email/login HTTP/1.1\r\nHost: x\r\nX-Slow: ",
            _ => {
                "POST /v1/x/email/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            }
        };
        stream.write_all(sent.as_bytes()).await.expect("the server reads");
        flood.push(stream);
    }
    for _ in 0..3 {
        try_login(&test_app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let growth = resident_kib(server).saturating_sub(before);
    assert!(growth < 96 * 1024, "{growth} KiB for 1500 connections that send nothing");
    // The server closes a connection if the headers are not complete within ten seconds.
    let mut silent = flood.swap_remove(0);
    let mut response = Vec::new();
    let closed = tokio::time::timeout(RECOVERY_LIMIT, silent.read_to_end(&mut response)).await;
    closed.expect("a silent connection is closed").ok();
}

/// The resident memory of the server (`VmRSS` in proc(5)), in KiB.
fn resident_kib(server: &ServerProcess) -> u64 {
    let pid = server.pid().expect("the server runs");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}
