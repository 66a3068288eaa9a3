//! Postgres and Redis gone, slow, cut or emptied, and servers that die or drain: 503 with `Retry-After` within a bounded
//! time, nothing half-done, recovery without restart.

use std::{
    fs,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    client::{Anonymous, Answer},
    eventually, postgres,
    proxy::{Proxy, Trap},
    redis,
    stack::{Server, Stack},
    tls::Tls,
    wire::Wire,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    support::{NAME, NEW_PASSWORD, PASSWORD, Shop},
    trouble::{Snapshot, invalid_code, invalid_credentials, loose, unavailable},
};

/// As it is stored; in capitals, so that it can be told from the canonical form in what goes to Postgres.
const EMAIL: &str = "ADA@example.com";
const CANONICAL: &str = "ada@example.com";
const OTHER: &str = "grace@example.com";
/// What the longest refusal may take: the stores' own limits one after the other, on a loaded machine.
const BOUNDED: Duration = Duration::from_secs(15);
const SOON: Duration = Duration::from_secs(30);

/// A service behind proxies.
async fn behind_proxies() -> Shop {
    Shop::of(loose("fault"), Stack::builder().proxied()).await
}

fn to_postgres(shop: &Shop) -> &Proxy {
    shop.stack.postgres_proxy.as_ref().expect("the service is behind proxies")
}

fn to_redis(shop: &Shop) -> &Proxy {
    shop.stack.redis_proxy.as_ref().expect("the service is behind proxies")
}

/// The answer, which must come in time.
async fn bounded(call: impl Future<Output = Answer>) -> Answer {
    let started = Instant::now();
    let answer = call.await;
    assert!(started.elapsed() < BOUNDED, "the answer took {:?}: {}", started.elapsed(), answer.text);
    answer
}

/// What needs no store goes on, and the service stays in its load balancer.
async fn goes_on_without_stores(shop: &Shop) {
    let client = shop.client();
    for path in ["jwks.json", "openid-configuration"] {
        client.get(&format!("{}/.well-known/{path}", shop.id())).await.expect(StatusCode::OK);
    }
    for path in ["livez", "readyz"] {
        shop.stack.server().ops(path).await.expect(StatusCode::OK);
    }
}

async fn try_login(shop: &Shop, email: &str, password: &str) -> Answer {
    shop.client().login(shop.id(), email, password).await
}

async fn logs_in(shop: &Shop, email: &str) {
    shop.recovers("a log-in", async || try_login(shop, email, PASSWORD).await).await;
}

/// Waits until the service has noticed what was cut: a few calls in a row are answered.
async fn settles(shop: &Shop) {
    for _ in 0..3 {
        shop.recovers("the service", async || shop.client().forgot_password(shop.id(), "nobody@example.com").await)
            .await;
    }
}

// === Postgres ===

#[tokio::test]
async fn a_call_that_was_refused_counts_no_mail_so_the_next_try_is_mailed() {
    let app = loose("counted").limit("mailsPerRecipient", &[(1, 3600)]);
    let shop = Shop::of(app, Stack::builder().proxied()).await;
    let proxy = to_postgres(&shop);

    // Only the statement that makes the user carries the name.
    proxy.set_trap(Trap::Before(NAME.as_bytes().to_vec()));
    unavailable(bounded(shop.try_register(EMAIL)).await);
    shop.recovers("a registration", async || shop.try_register(EMAIL).await).await;
    shop.code(EMAIL, 1).await;

    proxy.refuse().await;
    unavailable(bounded(shop.client().forgot_password(shop.id(), EMAIL)).await);
    proxy.restore().expect("the proxy's port is free");
    shop.recovers("a reset", async || shop.client().forgot_password(shop.id(), EMAIL).await).await;
    shop.code(EMAIL, 2).await;
}

#[tokio::test]
async fn without_postgres_all_that_needs_it_is_unavailable_and_comes_back_by_itself() {
    let shop = behind_proxies().await;
    let (client, token) = shop.session(EMAIL).await;
    shop.register(OTHER).await;
    let code = shop.code(OTHER, 1).await;
    let reset = shop.reset_code(EMAIL, 2).await;
    let users = shop.count("SELECT count(*) FROM users").await;

    for fault in ["gone", "silent"] {
        let proxy = to_postgres(&shop);
        match fault {
            "gone" => proxy.refuse().await,
            _ => proxy.stall(),
        }
        let new = "new@example.com";
        let id = shop.id();
        let refused = futures::future::join_all([
            Box::pin(bounded(try_login(&shop, EMAIL, PASSWORD))) as std::pin::Pin<Box<dyn Future<Output = Answer>>>,
            Box::pin(bounded(shop.try_register(new))),
            Box::pin(bounded(async { shop.client().confirm(id, &code).await })),
            Box::pin(bounded(async { shop.client().forgot_password(id, EMAIL).await })),
            Box::pin(bounded(async { shop.client().confirm_password(id, EMAIL, &reset, NEW_PASSWORD).await })),
            Box::pin(bounded(async { client.signed_in(id, &token).verify().await })),
        ]);
        let ((), refused) = tokio::join!(goes_on_without_stores(&shop), refused);
        for answer in refused {
            unavailable(answer);
        }
        proxy.restore().expect("the proxy's port is free");
        logs_in(&shop, EMAIL).await;
        // What was refused was not done.
        assert_eq!(shop.count("SELECT count(*) FROM users").await, users, "after {fault}");
        assert_eq!(shop.user(OTHER).await, (1, false), "after {fault}");
        assert_eq!(shop.user(EMAIL).await, (2, true), "after {fault}");
    }
    // Codes that were refused are good still.
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn slow_stores_make_slow_answers_not_wrong_ones() {
    let shop = behind_proxies().await;
    for proxy in [to_postgres(&shop), to_redis(&shop)] {
        proxy.delay(Duration::from_millis(60));
        bounded(shop.recovers("registration", async || shop.try_register(EMAIL).await)).await;
        proxy.restore().expect("the proxy's port is free");
    }
    // A connection that is cut while it rests costs at most a refusal.
    shop.code(EMAIL, 1).await;
    for proxy in [to_postgres(&shop), to_redis(&shop)] {
        proxy.cut();
        logs_in(&shop, EMAIL).await;
    }
}

#[tokio::test]
async fn a_registration_cut_off_is_whole_or_not_there() {
    let shop = behind_proxies().await;
    let proxy = to_postgres(&shop);
    // Only the statement that makes the user carries the address as it was given.
    proxy.set_trap(Trap::Before(EMAIL.into()));
    unavailable(bounded(shop.try_register(EMAIL)).await);
    proxy.sprung().await;
    assert_eq!(shop.count("SELECT count(*) FROM users").await, 0);
    assert_eq!(shop.count("SELECT count(*) FROM outbox").await, 0, "no mail without a user");

    // A connection may still be found broken by the cut before; that refusal does not come from the next trap.
    settles(&shop).await;
    proxy.set_trap(Trap::After(EMAIL.into()));
    unavailable(bounded(shop.try_register(EMAIL)).await);
    proxy.sprung().await;
    // It was carried out, only the answer was lost: the user is there, and so is the mail.
    let code = shop.code(EMAIL, 1).await;
    assert_eq!(shop.count("SELECT count(*) FROM users").await, 1);
    shop.recovers("confirming", async || shop.client().confirm(shop.id(), &code).await).await;
    logs_in(&shop, CANONICAL).await;
}

#[tokio::test]
async fn a_confirmation_cut_before_it_arrives_leaves_its_code_good() {
    let shop = behind_proxies().await;
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    let proxy = to_postgres(&shop);
    proxy.set_trap(Trap::Before(CANONICAL.into()));
    unavailable(bounded(shop.client().confirm(shop.id(), &code)).await);
    proxy.sprung().await;
    assert_eq!(shop.user(EMAIL).await, (1, false));
    shop.recovers("the same code", async || shop.client().confirm(shop.id(), &code).await).await;
    assert_eq!(shop.user(EMAIL).await, (2, true));

    let reset = shop.reset_code(EMAIL, 2).await;
    proxy.set_trap(Trap::Before(CANONICAL.into()));
    unavailable(bounded(shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD)).await);
    proxy.sprung().await;
    assert_eq!(shop.user(EMAIL).await, (2, true));
    logs_in(&shop, EMAIL).await;
    let again = async || shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD).await;
    shop.recovers("the same code", again).await;
    try_login(&shop, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_reset_whose_answer_is_lost_has_ended_sessions_and_codes_all_the_same() {
    let shop = behind_proxies().await;
    let (_, token) = shop.session(EMAIL).await;
    shop.look(&token).await.expect(StatusCode::OK);
    let reset = shop.reset_code(EMAIL, 2).await;
    let proxy = to_postgres(&shop);
    proxy.set_trap(Trap::After(CANONICAL.into()));
    unavailable(bounded(shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD)).await);
    proxy.sprung().await;
    // The transaction was carried out. The server does not know: it put the code back, which is dead.
    assert_eq!(shop.user(EMAIL).await, (3, true));
    let again = eventually("an answer to the code", SOON, || async {
        let answer = shop.client().confirm_password(shop.id(), EMAIL, &reset, PASSWORD).await;
        (answer.status != StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
    });
    invalid_code(again.await);
    invalid_credentials(try_login(&shop, EMAIL, PASSWORD).await);
    try_login(&shop, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    // Redis hears of the epoch from the outbox; the log-in's session is the one that is left.
    eventually("the end of the old sessions", SOON, || async {
        shop.hurry().await;
        (shop.sessions().await == 1).then_some(())
    })
    .await;
    shop.look(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    shop.mail(EMAIL, 3).await;
}

// === Redis ===

#[tokio::test]
async fn without_redis_nothing_is_half_done_and_all_comes_back_by_itself() {
    let shop = behind_proxies().await;
    let (client, token) = shop.session(EMAIL).await;
    shop.register(OTHER).await;
    let code = shop.code(OTHER, 1).await;
    let mails = shop.mails_in_the_end(EMAIL).await;

    for fault in ["gone", "silent"] {
        let proxy = to_redis(&shop);
        match fault {
            "gone" => proxy.refuse().await,
            _ => proxy.stall(),
        }
        let new = "new@example.com";
        let id = shop.id();
        let refused = futures::future::join_all([
            Box::pin(bounded(try_login(&shop, EMAIL, PASSWORD))) as std::pin::Pin<Box<dyn Future<Output = Answer>>>,
            Box::pin(bounded(shop.try_register(new))),
            Box::pin(bounded(async { shop.client().confirm(id, &code).await })),
            Box::pin(bounded(async { shop.client().forgot_password(id, EMAIL).await })),
            Box::pin(bounded(async { shop.client().confirm_password(id, EMAIL, &code, NEW_PASSWORD).await })),
            Box::pin(bounded(async { client.signed_in(id, &token).verify().await })),
        ]);
        let ((), refused) = tokio::join!(goes_on_without_stores(&shop), refused);
        for answer in refused {
            unavailable(answer);
        }
        proxy.restore().expect("the proxy's port is free");
        logs_in(&shop, EMAIL).await;
        assert_eq!(shop.user(OTHER).await, (1, false), "after {fault}");
        assert_eq!(shop.count("SELECT count(*) FROM users").await, 2, "after {fault}");
        shop.look(&token).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.mails_in_the_end(EMAIL).await, mails, "what was refused sends nothing");
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_epoch_reaches_redis_by_the_outbox_when_redis_is_cut_after_the_transaction() {
    let shop = behind_proxies().await;
    let (_, token) = shop.session(EMAIL).await;
    let reset = shop.reset_code(EMAIL, 2).await;
    let before = Snapshot::take(&shop).await;
    // Postgres takes its time, so that Redis can go between the taking of the code and the telling of the epoch.
    to_postgres(&shop).delay(Duration::from_millis(500));
    let call = shop.client();
    let answer = async { call.confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD).await };
    let cut = async {
        let taken = || async { (!before.gone().await.is_empty()).then_some(()) };
        eventually("the taking of the code", SOON, taken).await;
        to_redis(&shop).refuse().await;
    };
    let (answer, ()) = tokio::join!(bounded(answer), cut);
    answer.expect(StatusCode::OK);
    assert_eq!(shop.user(EMAIL).await, (3, true));
    assert_eq!(shop.count("SELECT count(*) FROM outbox WHERE kind = 'epoch' AND epoch = 3").await, 1);
    assert!(shop.sessions().await > 0, "Redis has not heard of it");
    unavailable(bounded(shop.look(&token)).await);

    to_postgres(&shop).restore().expect("the proxy's port is free");
    to_redis(&shop).restore().expect("the proxy's port is free");
    // Nobody calls anything that would tell it: only the outbox does.
    eventually("the epoch's row is carried out", SOON, || async {
        shop.hurry().await;
        (shop.count("SELECT count(*) FROM outbox WHERE kind = 'epoch'").await == 0).then_some(())
    })
    .await;
    assert_eq!(shop.sessions().await, 0);
    shop.look(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    try_login(&shop, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_running_server_goes_on_with_an_emptied_redis() {
    let shop = Shop::of(loose("empty"), Stack::builder().own_redis(redis::Options::for_tests())).await;
    let (_, token) = shop.session(EMAIL).await;
    shop.register(OTHER).await;
    let code = shop.code(OTHER, 1).await;
    let mut redis = shop.stack.redis().connect().await.expect("Redis is there");
    // As a new one in its place: no keys, no scripts.
    ::redis::cmd("FLUSHALL").query_async::<()>(&mut redis).await.expect("Redis is emptied");
    ::redis::cmd("SCRIPT").arg("FLUSH").query_async::<()>(&mut redis).await.expect("Redis forgets scripts");

    shop.look(&token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    invalid_code(shop.client().confirm(shop.id(), &code).await);
    let login = try_login(&shop, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    shop.look(login.string("token")).await.expect(StatusCode::OK);
    // A new code is a registration away.
    shop.register(OTHER).await;
    let code = shop.code(OTHER, 2).await;
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn without_both_stores_the_keys_are_served_and_the_service_stays_ready() {
    let shop = behind_proxies().await;
    let (_, token) = shop.session(EMAIL).await;
    to_postgres(&shop).refuse().await;
    to_redis(&shop).refuse().await;
    goes_on_without_stores(&shop).await;
    unavailable(bounded(try_login(&shop, EMAIL, PASSWORD)).await);
    to_postgres(&shop).restore().expect("the proxy's port is free");
    to_redis(&shop).restore().expect("the proxy's port is free");
    logs_in(&shop, EMAIL).await;
    shop.look(&token).await.expect(StatusCode::OK);
}

// === Starting ===

/// Starts a server that is not to become ready yet, and waits until it says why.
async fn started_but_not_ready(server: &Server, why: &str) {
    server.start().expect("the server starts");
    let says = eventually("a server that answers", SOON, || async {
        assert!(server.ended().is_none(), "the server ended: {}", server.logged());
        let client = Anonymous::new(server.ops);
        let answer = client.try_send(client.request(http::Method::GET, "readyz")).await.ok()?;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text);
        answer.text.contains(why).then_some(answer)
    });
    says.await;
    server.ops("livez").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_server_started_without_its_stores_serves_when_they_come() {
    let shop = behind_proxies().await;
    shop.confirmed(EMAIL).await;
    let server = shop.stack.server();
    server.kill();
    to_postgres(&shop).refuse().await;
    to_redis(&shop).refuse().await;
    started_but_not_ready(server, "schema").await;
    shop.client().get(&format!("{}/.well-known/jwks.json", shop.id())).await.expect(StatusCode::OK);
    unavailable(bounded(try_login(&shop, EMAIL, PASSWORD)).await);
    to_postgres(&shop).restore().expect("the proxy's port is free");
    server.ready().await.expect("the server becomes ready once it has seen the schema");
    unavailable(bounded(try_login(&shop, EMAIL, PASSWORD)).await);
    to_redis(&shop).restore().expect("the proxy's port is free");
    logs_in(&shop, EMAIL).await;
}

#[tokio::test]
async fn a_server_is_not_ready_with_too_old_a_schema_until_it_is_migrated() {
    let shop = Shop::of(loose("old"), Stack::builder()).await;
    let server = shop.stack.server();
    server.kill();
    let empty = shop.stack.postgres().empty_database().await.expect("a database");
    postgres::write_private(&shop.stack.dir().join("database-url"), &empty.url).expect("the file can be written");
    started_but_not_ready(server, "latchkey-server migrate").await;
    assert!(server.logged().contains("latchkey-server migrate"), "the log says what to do");

    tokio::task::spawn_blocking(move || postgres::migrate(&empty)).await.expect("no panic").expect("it is migrated");
    server.ready().await.expect("the server becomes ready without a restart");
    shop.register(EMAIL).await;
    shop.code(EMAIL, 1).await;
}

// === What is our own fault ===

#[tokio::test]
async fn a_server_error_tells_nothing_of_its_cause() {
    let shop = Shop::of(loose("own"), Stack::builder()).await;
    shop.register(EMAIL).await;
    shop.code(EMAIL, 1).await;
    shop.sql("ALTER TABLE users RENAME COLUMN email_canonical TO hidden_column").await;
    let answer = try_login(&shop, EMAIL, PASSWORD).await;
    let answer = answer.expect_error(StatusCode::INTERNAL_SERVER_ERROR, "server_error");
    for inside in ["column", "hidden", "users", "SELECT", "42703", "ostgres", "sqlx", CANONICAL] {
        assert!(!answer.text.contains(inside), "{inside:?} in {}", answer.text);
    }
    let id = answer.string("request_id");
    let logged = server_lines(shop.stack.server(), id);
    assert!(logged.contains("42703"), "the log has the cause with the request's id: {logged}");
    assert!(!logged.contains(PASSWORD) && !logged.to_lowercase().contains(CANONICAL), "{logged}");
    shop.sql("ALTER TABLE users RENAME COLUMN hidden_column TO email_canonical").await;
    try_login(&shop, EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

fn server_lines(server: &Server, with: &str) -> String {
    server.logged().lines().filter(|line| line.contains(with)).collect::<Vec<_>>().join("\n")
}

// === Servers that end ===

#[tokio::test]
async fn a_draining_server_refuses_nobody_and_finishes_what_runs() {
    let shop = Shop::of(loose("drain"), Stack::builder().args(["--drain-seconds", "2"])).await;
    shop.register(EMAIL).await;
    shop.code(EMAIL, 1).await;
    let server = shop.stack.server();
    let path = format!("v1/{}/email/login", shop.id());
    let body = serde_json::json!({ "email": EMAIL, "password": PASSWORD }).to_string();

    // A request of which half is there when the draining begins, and the rest when no connection is taken any more.
    let mut half = TcpStream::connect(server.public).await.expect("the server accepts");
    let head = format!(
        "POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
        body.len(),
        &body[..10]
    );
    half.write_all(head.as_bytes()).await.expect("the server reads");
    // A connection that was kept alive, and log-ins in flight.
    let kept = shop.client();
    kept.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let in_flight: Vec<_> = (0..8)
        .map(|_| {
            let (client, app) = (shop.client(), shop.id().to_owned());
            tokio::spawn(async move { client.login(&app, EMAIL, PASSWORD).await })
        })
        .collect();
    server.begin_drain();
    let begun = Instant::now();
    for login in in_flight {
        login.await.expect("no panic").expect(StatusCode::OK);
    }
    eventually("it says that it drains", SOON, || async {
        (server.ops("readyz").await.status == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    server.ops("livez").await.expect(StatusCode::OK);

    // Old connections and new ones are served, and told to go elsewhere.
    let answer = kept.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(answer.header("connection"), Some("close"));
    let mut served = 0;
    while begun.elapsed() < Duration::from_millis(1500) {
        let mut wire = Wire::connect(server.public, latchkey_tests::client::own_address()).await.expect("it accepts");
        let (path, body) = (path.clone(), body.clone());
        let reply = tokio::task::spawn_blocking(move || wire.post(&path, &body)).await.expect("no panic");
        let reply = reply.expect("it answers");
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.header("connection"), Some("close"), "{}", reply.head);
        served += 1;
    }
    assert!(served > 0);

    eventually("no more connections are taken", SOON, || async {
        TcpStream::connect(server.public).await.is_err().then_some(())
    })
    .await;
    assert!(begun.elapsed() >= Duration::from_secs(2), "it went on accepting for {:?} only", begun.elapsed());
    assert_eq!(server.ended(), None, "a request is not finished");
    half.write_all(&body.as_bytes()[10..]).await.expect("the server reads on");
    let mut answer = String::new();
    half.read_to_string(&mut answer).await.expect("the server answers and closes");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let status = eventually("the end", SOON, || async { server.ended() }).await;
    assert!(status.success(), "it ended with {status}");
}

#[tokio::test]
async fn a_server_killed_in_the_middle_of_a_confirmation_leaves_it_whole_or_undone() {
    let shop = behind_proxies().await;
    let server = shop.stack.server();
    // Long enough that the kills fall before, between and after what the confirmation does.
    to_postgres(&shop).delay(Duration::from_millis(15));
    let mut done = Vec::new();
    for (round, wait) in [5_u64, 25, 45, 90].into_iter().enumerate() {
        let email = format!("user-{round}@example.com");
        shop.recovers("registration", async || shop.try_register(&email).await).await;
        let code = shop.code(&email, 1).await;
        let client = shop.client();
        let request = client.request(http::Method::POST, &format!("v1/{}/email/confirm", shop.id()));
        let request = request.json(&serde_json::json!({ "code": code }));
        let kill = async {
            tokio::time::sleep(Duration::from_millis(wait)).await;
            server.kill();
        };
        let (answer, ()) = tokio::join!(client.try_send(request), kill);
        server.start_ready().await.expect("the server starts again");
        let (epoch, verified) = shop.user(&email).await;
        assert_eq!(epoch, if verified { 2 } else { 1 }, "{email}");
        assert!(verified || answer.is_err(), "what was answered is done: {answer:?}");
        done.push(verified);
        // Whichever it is, the user gets in: with a new code where the old one went down with the server.
        if !verified {
            shop.recovers("registration", async || shop.try_register(&email).await).await;
            let code = shop.code(&email, 2).await;
            shop.recovers("confirming", async || shop.client().confirm(shop.id(), &code).await).await;
        }
        logs_in(&shop, &email).await;
        assert_eq!(shop.user(&email).await, (2, true));
    }
    assert!(!done[0], "the first kill came before anything was done");
}

// === TLS and passwords ===

#[tokio::test]
async fn both_stores_are_reached_by_tls_whose_authority_is_checked() {
    let tls = || Some(Tls::new().expect("an authority"));
    let redis = redis::Options { tls: tls(), password: Some("s3cret".to_owned()), ..redis::Options::for_tests() };
    let postgres = postgres::Options { tls: tls(), ..postgres::Options::for_tests() };
    let shop = Shop::of(loose("tls"), Stack::builder().own_postgres(postgres).own_redis(redis)).await;
    shop.session(EMAIL).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE application_name = 'latchkey' AND ssl";
    assert!(shop.count(encrypted).await > 0);

    // Somebody else's authority vouches for nobody.
    let server = shop.stack.server();
    server.kill();
    let stranger = shop.stack.dir().join("stranger.pem");
    fs::write(&stranger, &Tls::new().expect("an authority").ca).expect("the file can be written");
    let url = &shop.stack.database.url;
    let (head, _) = url.split_once("sslrootcert=").expect("the URL names its authority");
    let url = format!("{head}sslrootcert={}", stranger.display());
    postgres::write_private(&shop.stack.dir().join("database-url"), &url).expect("the file can be written");
    started_but_not_ready(server, "schema").await;
    unavailable(bounded(try_login(&shop, EMAIL, PASSWORD)).await);
}

#[tokio::test]
async fn a_rotated_password_is_read_from_its_file_again() {
    let options = redis::Options { password: Some("first".to_owned()), ..redis::Options::for_tests() };
    let shop = Shop::of(loose("rotate"), Stack::builder().own_redis(options)).await;
    shop.confirmed(EMAIL).await;
    let role = format!("r_{:016x}", rand::random::<u64>());
    let name = &shop.stack.database.name;
    let execute = async |sql: String| {
        shop.stack.postgres().execute(name, &sql).await.expect("the SQL is right");
    };
    execute(format!("CREATE ROLE {role} LOGIN PASSWORD 'first' SUPERUSER")).await;
    let url = |password: &str| format!("postgres://{role}:{password}@{}/{name}", shop.stack.postgres().addr());
    let file = shop.stack.dir().join("database-url");
    let server = shop.stack.server();
    server.kill();
    postgres::write_private(&file, &url("first")).expect("the file can be written");
    server.start_ready().await.expect("the server starts");
    logs_in(&shop, EMAIL).await;

    // Rotated as tools do it: the store first, the mounted file a moment later; then old connections end.
    execute(format!("ALTER ROLE {role} PASSWORD 'second'")).await;
    postgres::write_private(&file, &url("second")).expect("the file can be written");
    execute(format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")).await;
    logs_in(&shop, EMAIL).await;

    let mut redis = shop.stack.redis().connect().await.expect("Redis is there");
    let set = ::redis::cmd("CONFIG").arg(&["SET", "requirepass", "second"]).clone();
    set.query_async::<()>(&mut redis).await.expect("Redis takes a password");
    let redis_url = shop.stack.redis().url().replace(":first@", ":second@");
    postgres::write_private(&shop.stack.dir().join("redis-url"), &redis_url).expect("the file can be written");
    let kill = ::redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).clone();
    kill.query_async::<()>(&mut redis).await.expect("Redis ends its clients");
    logs_in(&shop, EMAIL).await;
}

// === Clients that are slow or many ===

#[tokio::test]
async fn a_flood_of_silent_connections_is_bounded_and_does_not_hold_up_others() {
    let shop = Shop::of(loose("flood"), Stack::builder()).await;
    shop.register(EMAIL).await;
    shop.code(EMAIL, 1).await;
    let server = shop.stack.server();
    let before = resident(server);
    let mut flood = Vec::new();
    for number in 0..1500 {
        let mut stream = TcpStream::connect(server.public).await.expect("the server accepts");
        // A third says nothing, a third half a head, a third half a body.
        let said = match number % 3 {
            0 => "",
            1 => "POST /v1/x/email/login HTTP/1.1\r\nHost: x\r\nX-Slow: ",
            _ => {
                "POST /v1/x/email/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            }
        };
        stream.write_all(said.as_bytes()).await.expect("the server reads");
        flood.push(stream);
    }
    for _ in 0..3 {
        try_login(&shop, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let grown = resident(server).saturating_sub(before);
    assert!(grown < 96 * 1024, "{grown} KiB for 1500 connections that say nothing");
    // Headers that are not whole in ten seconds end a connection.
    let mut silent = flood.swap_remove(0);
    let mut answer = Vec::new();
    let closed = tokio::time::timeout(SOON, silent.read_to_end(&mut answer)).await;
    closed.expect("a silent connection is closed").ok();
}

/// `VmRSS` of proc(5), in KiB.
fn resident(server: &Server) -> u64 {
    let pid = server.pid().expect("the server runs");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}
