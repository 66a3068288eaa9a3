//! Tests of the test harness itself.

use std::time::{Duration, Instant};

use http::StatusCode;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::{
    browser::Browser,
    client::ApiClient,
    dex::{self, Dex, User},
    eventually_ok,
    inbox::Inbox,
    mail::Mailbox,
    postgres::{self, Database, Postgres},
    process,
    proxy::{Proxy, Trap},
    redis::{self, Redis, RedisCluster},
    smtp::{self, Behavior, Security, Smtp, Step},
};
use lettre::{
    AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor,
    message::{MultiPart, SinglePart},
    transport::smtp::{
        authentication::{Credentials, Mechanism},
        client::{Certificate, Tls, TlsParameters},
    },
};
use sqlx::Connection;

/// Maximum time that a test waits for a condition.
const LIMIT: Duration = Duration::from_secs(20);
/// How long a test waits for something that must not happen.
const ABSENCE_WAIT: Duration = Duration::from_millis(300);

// === Postgres ===

#[tokio::test]
async fn each_test_has_its_own_database() {
    let postgres = Postgres::shared().await;
    let (one, other) = (postgres.empty_database().await.unwrap(), postgres.empty_database().await.unwrap());
    sqlx::raw_sql("CREATE TABLE t (n int)").execute(&mut one.connect().await.unwrap()).await.unwrap();
    assert_eq!(table_names(&one).await, ["t"]);
    assert!(table_names(&other).await.is_empty());
}

#[tokio::test]
async fn postgres_with_tls_refuses_plain_connections() {
    let options = postgres::Options {
        tls: Some(latchkey_tests::tls::ServerTls::new().unwrap()),
        ..postgres::Options::for_tests()
    };
    let postgres = Postgres::start(options).await.unwrap();
    let database = postgres.empty_database().await.unwrap();
    let mut connection = database.connect().await.unwrap();
    let (tls,): (bool,) = sqlx::query_as("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(tls);
    let without_tls = Database { url: database.url.replace("sslmode=verify-full", "sslmode=disable"), ..database };
    assert!(without_tls.connect().await.is_err());
}

#[tokio::test]
async fn a_commit_can_be_cut_before_or_after_it_arrives() {
    let postgres = Postgres::shared().await;
    let database = postgres.empty_database().await.unwrap();
    sqlx::raw_sql("CREATE TABLE t (n int)").execute(&mut database.connect().await.unwrap()).await.unwrap();
    let proxy = Proxy::start(postgres.addr()).unwrap();
    let proxied = Database { url: postgres.url(&database.name, proxy.addr()), ..database.clone() };

    for (trap, row, arrives) in
        [(Trap::Before(b"COMMIT".to_vec()), 1, false), (Trap::After(b"COMMIT".to_vec()), 2, true)]
    {
        let mut connection = proxied.connect().await.unwrap();
        let mut transaction = connection.begin().await.unwrap();
        sqlx::query("INSERT INTO t VALUES ($1)").bind(row).execute(&mut *transaction).await.unwrap();
        proxy.set_trap(trap);
        transaction.commit().await.unwrap_err();
        proxy.trap_triggered().await;
        let row_exists = eventually_ok("the end of the connection at the server", LIMIT, || async {
            // When no other connection is open, the transaction has ended, and it is certain whether the row exists.
            let mut direct = database.connect().await.map_err(|error| error.to_string())?;
            let others: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()",
            )
            .bind(&database.name)
            .fetch_one(&mut direct)
            .await
            .map_err(|error| error.to_string())?;
            if others > 0 {
                return Err(format!("{others} connections are open"));
            }
            sqlx::query_scalar::<_, bool>("SELECT EXISTS (SELECT FROM t WHERE n = $1)")
                .bind(row)
                .fetch_one(&mut direct)
                .await
                .map_err(|error| error.to_string())
        })
        .await;
        assert_eq!(row_exists, arrives, "row {row}");
    }
}

async fn table_names(database: &Database) -> Vec<String> {
    sqlx::query_scalar("SELECT tablename::text FROM pg_tables WHERE schemaname = 'public'")
        .fetch_all(&mut database.connect().await.unwrap())
        .await
        .unwrap()
}

// === Redis ===

#[tokio::test]
async fn a_proxy_can_refuse_stall_delay_and_recover() {
    let redis = Redis::shared().await;
    let proxy = Proxy::start(redis.addr()).unwrap();
    let client = ::redis::Client::open(redis.url_at(proxy.addr())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    ping(&mut connection).await.unwrap();

    proxy.cut();
    eventually_ok("the client notices the cut", LIMIT, || {
        let mut connection = connection.clone();
        async move { if ping(&mut connection).await.is_err() { Ok(()) } else { Err("Redis still responds") } }
    })
    .await;

    proxy.refuse().await;
    client.get_multiplexed_async_connection().await.unwrap_err();
    proxy.restore().unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();

    proxy.stall();
    tokio::time::timeout(ABSENCE_WAIT, ping(&mut connection.clone())).await.unwrap_err();
    proxy.restore().unwrap();
    ping(&mut connection).await.unwrap();

    let delay = Duration::from_millis(60);
    proxy.delay(delay);
    let before = Instant::now();
    ping(&mut connection).await.unwrap();
    assert!(before.elapsed() >= 2 * delay, "the round trip took {:?}", before.elapsed());

    proxy.restore().unwrap();
    proxy.set_trap(Trap::AfterBytes(3));
    ping(&mut connection).await.unwrap_err();
}

#[tokio::test]
async fn redis_runs_with_tls_and_a_password() {
    let options = redis::Options {
        tls: Some(latchkey_tests::tls::ServerTls::new().unwrap()),
        password: Some("secret".to_owned()),
        ..redis::Options::for_tests()
    };
    let redis = Redis::start(options).await.unwrap();
    ping(&mut redis.connect().await.unwrap()).await.unwrap();
    // Clients that trust only public authorities reject the certificate.
    latchkey_tests::tls::install_crypto_provider();
    ::redis::Client::open(redis.url()).unwrap().get_multiplexed_async_connection().await.unwrap_err();
}

#[tokio::test]
async fn a_replica_acknowledges_writes() {
    let master = Redis::start(redis::Options::for_tests()).await.unwrap();
    let options = redis::Options { replica_of: Some(master.addr()), ..redis::Options::for_tests() };
    let replica = Redis::start(options).await.unwrap();
    let mut connection = master.connect().await.unwrap();
    let acknowledged = eventually_ok("a replica that acknowledges", LIMIT, || {
        let mut connection = connection.clone();
        async move {
            let (): () = ::redis::cmd("SET").arg("k").arg("v").query_async(&mut connection).await.unwrap();
            let replicas: u32 = ::redis::cmd("WAIT").arg(1).arg(500).query_async(&mut connection).await.unwrap();
            if replicas > 0 { Ok(replicas) } else { Err(replicas) }
        }
    })
    .await;
    assert_eq!(acknowledged, 1);
    replica.process().kill();
    let (): () = ::redis::cmd("SET").arg("k").arg("w").query_async(&mut connection).await.unwrap();
    let replicas: u32 = ::redis::cmd("WAIT").arg(1).arg(50).query_async(&mut connection).await.unwrap();
    assert_eq!(replicas, 0);
}

#[tokio::test]
async fn a_redis_cluster_has_its_slots_on_three_masters() {
    let cluster = RedisCluster::start().await.unwrap();
    let mut refusals = 0;
    for master in &cluster.masters {
        let mut connection = master.connect().await.unwrap();
        let set: Result<(), _> = ::redis::cmd("SET").arg("lk:{a}:x").arg("1").query_async(&mut connection).await;
        if let Err(error) = set {
            assert_eq!(error.kind(), ::redis::ErrorKind::Server(::redis::ServerErrorKind::Moved), "{error}");
            refusals += 1;
        }
    }
    assert_eq!(refusals, 2);
}

async fn ping(connection: &mut ::redis::aio::MultiplexedConnection) -> Result<(), ::redis::RedisError> {
    ::redis::cmd("PING").query_async::<()>(connection).await
}

// === SMTP ===

type Transport = AsyncSmtpTransport<Tokio1Executor>;

fn transport(smtp: &Smtp) -> Transport {
    transport_with(smtp, Mechanism::Plain)
}

fn transport_with(smtp: &Smtp, mechanism: Mechanism) -> Transport {
    latchkey_tests::tls::install_crypto_provider();
    let mut builder = Transport::builder_dangerous("localhost").port(smtp.addr().port()).timeout(Some(LIMIT));
    if let Some(ca) = smtp.ca() {
        let parameters = TlsParameters::builder("localhost".to_owned())
            .add_root_certificate(Certificate::from_pem(ca.as_bytes()).unwrap())
            .build_rustls()
            .unwrap();
        builder = builder.tls(match smtp.security() {
            Security::Implicit => Tls::Wrapper(parameters),
            Security::StartTls | Security::None => Tls::Required(parameters),
        });
    }
    if let Some((name, password)) = smtp.login() {
        builder = builder.credentials(Credentials::new(name.clone(), password.clone())).authentication(vec![mechanism]);
    }
    builder.build()
}

fn message(to: &str) -> Message {
    Message::builder()
        .from("The Shöp <hello@shop.test>".parse().unwrap())
        .to(to.parse().unwrap())
        .subject("Bestätigen")
        .multipart(
            MultiPart::alternative()
                .singlepart(SinglePart::plain(".\r\nYour code: 7K3MQ-W0Z9X\r\n.hidden".to_owned()))
                .singlepart(SinglePart::html("<p>7K3MQ-W0Z9X</p>".to_owned())),
        )
        .unwrap()
}

#[tokio::test]
async fn mail_arrives_through_every_kind_of_relay() {
    for security in [Security::None, Security::StartTls, Security::Implicit] {
        for login in [None, Some(("ada".to_owned(), "s3cret ü".to_owned()))] {
            for mechanism in [Mechanism::Plain, Mechanism::Login] {
                let options = smtp::Options { security, login: login.clone(), ..smtp::Options::plain() };
                let smtp = Smtp::start(options).await.unwrap();
                transport_with(&smtp, mechanism).send(message("ada@example.com")).await.unwrap();
                let mail = smtp.mails().wait_for(|mail| mail.is_to("ada@example.com"), LIMIT).await;
                assert_eq!(mail.subject, "Bestätigen");
                assert_eq!(mail.from, "The Shöp <hello@shop.test>");
                assert_eq!(mail.envelope_from, "hello@shop.test");
                assert_eq!(mail.text, ".\nYour code: 7K3MQ-W0Z9X\n.hidden");
                assert_eq!(mail.code(), "7K3MQ-W0Z9X");
                assert_eq!(mail.html.trim(), "<p>7K3MQ-W0Z9X</p>");
                assert_eq!(smtp.sessions(), 1);
                assert_eq!(smtp.logins(), usize::from(login.is_some()));
            }
        }
    }
}

#[tokio::test]
async fn a_relay_with_credentials_refuses_unauthenticated_clients() {
    let login = Some(("ada".to_owned(), "right".to_owned()));
    let options = smtp::Options { security: Security::StartTls, login, ..smtp::Options::plain() };
    let smtp = Smtp::start(options).await.unwrap();
    let addr = smtp.addr();
    let refused_login = transport_with(&smtp, Mechanism::Login);
    smtp.set_behavior(Behavior::Refuse(Step::Auth, 454, "later".to_owned()));
    assert!(refused_login.send(message("ada@example.com")).await.unwrap_err().is_transient());
    smtp.set_behavior(Behavior::Accept);
    for builder in [
        // Neither client uses TLS, and without TLS the relay offers no authentication.
        Transport::builder_dangerous("127.0.0.1"),
        Transport::builder_dangerous("127.0.0.1")
            .credentials(Credentials::new("ada".to_owned(), "wrong".to_owned()))
            .authentication(vec![Mechanism::Plain]),
    ] {
        builder.port(addr.port()).build().send(message("ada@example.com")).await.unwrap_err();
    }
    assert!(smtp.mails().all().is_empty());
    assert_eq!(smtp.logins(), 0);
}

#[tokio::test]
async fn a_relay_can_refuse_hang_cut_and_recover() {
    let smtp = Smtp::start(smtp::Options::plain()).await.unwrap();
    let transport = || transport(&smtp);
    for step in [Step::Connect, Step::MailFrom, Step::RcptTo, Step::Data, Step::EndOfData] {
        smtp.set_behavior(Behavior::Refuse(step, 451, "later".to_owned()));
        let refusal = transport().send(message("a@example.com")).await.unwrap_err();
        assert!(refusal.is_transient(), "{step:?}: {refusal:?}");
        smtp.set_behavior(Behavior::Refuse(step, 550, "never".to_owned()));
        let refusal = transport().send(message("a@example.com")).await.unwrap_err();
        assert!(refusal.is_permanent(), "{step:?}: {refusal:?}");
        smtp.set_behavior(Behavior::Hang(step));
        tokio::time::timeout(ABSENCE_WAIT, transport().send(message("a@example.com"))).await.unwrap_err();
        assert!(smtp.mails().all().is_empty(), "{step:?}");
    }
    smtp.set_behavior(Behavior::Cut(Step::EndOfData));
    transport().send(message("b@example.com")).await.unwrap_err();
    assert_eq!(smtp.mails().to("b@example.com").len(), 1, "only the response is lost");

    smtp.set_behavior(Behavior::RefuseRecipient("c@example.com".to_owned(), 550));
    assert!(transport().send(message("c@example.com")).await.unwrap_err().is_permanent());
    transport().send(message("d@example.com")).await.unwrap();

    smtp.set_behavior(Behavior::Accept);
    smtp.stop().await;
    transport().send(message("e@example.com")).await.unwrap_err();
    smtp.listen().unwrap();
    transport().send(message("e@example.com")).await.unwrap();
    let order: Vec<String> = smtp.mails().all().iter().flat_map(|mail| mail.to.clone()).collect();
    assert_eq!(order, ["b@example.com", "d@example.com", "e@example.com"]);
}

// === The inbox page ===

#[tokio::test]
async fn the_inbox_reports_mails_as_they_arrive() {
    let mails = Mailbox::default();
    let inbox = Inbox::start(process::free_addr(), mails.clone()).unwrap();
    let client = ApiClient::new(inbox.addr());
    let deliver = |to: &str| {
        let raw = b"Subject: s\r\nContent-Type: text/html\r\n\r\n<script>alert(1)</script>\r\n";
        mails.deliver("a@x.test", &[to.to_owned()], raw).unwrap();
    };

    let latest = "api/messages/latest?to=b%2B1@x.test&wait=20";
    let (response, ()) = tokio::join!(client.get(latest), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        deliver("other@x.test");
        deliver("b+1@x.test");
    });
    let first = response.expect(StatusCode::OK);
    assert_eq!(first.integer("id"), 2);
    let none = client.get("api/messages/latest?to=b%2B1@x.test&after=2").await;
    none.expect(StatusCode::NOT_FOUND);

    let list = client.get("api/messages").await.expect(StatusCode::OK);
    let ids: Vec<i64> = list.body["messages"].as_array().unwrap().iter().map(|m| m["id"].as_i64().unwrap()).collect();
    assert_eq!(ids, [2, 1]);
    assert_eq!(client.get("api/messages/1").await.expect(StatusCode::OK).string("subject"), "s");

    // The HTML of a mail cannot run scripts and cannot load anything.
    let html = client.get("api/messages/2/html").await.expect(StatusCode::OK);
    let policy = html.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none';") && policy.contains("sandbox"), "{policy}");
    assert!(!policy.contains("script") && !policy.contains("same-origin"), "{policy}");

    let page = client.get("/").await.expect(StatusCode::OK);
    assert!(page.text.contains("<title>Inbox") && !page.text.contains("{nonce}"));

    let mut events = client.request(http::Method::GET, "api/events").send().await.unwrap();
    for _ in 0..2 {
        let event = events.chunk().await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&event).contains("data: changed"), "{event:?}");
        deliver("c@x.test");
    }

    client.send(client.request(http::Method::DELETE, "api/messages")).await.expect(StatusCode::OK);
    assert!(mails.all().is_empty());
}

#[tokio::test]
async fn the_inbox_page_shows_loading_until_the_mails_arrive() {
    let mails = Mailbox::default();
    let inbox = Inbox::start(process::free_addr(), mails.clone()).unwrap();
    let page = ApiClient::new(inbox.addr()).get("/").await.expect(StatusCode::OK).text;
    // The same page again, but from a server that responds to no other request.
    let silent_server = page_server(page).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&format!("http://{silent_server}/")).await;
    let text = browser.text().await;
    assert!(text.contains("Loading") && !text.contains("No mail yet"), "{text}");

    browser.open(&format!("http://{}/", inbox.addr())).await;
    let text = browser.wait_for_text("No mail yet").await;
    assert!(!text.contains("Loading"), "{text}");
    mails.deliver("a@x.test", &["b@x.test".to_owned()], b"Subject: hello\r\n\r\nhello\r\n").unwrap();
    browser.open(&format!("http://{}/", inbox.addr())).await;
    let text = browser.wait_for_text("hello").await;
    assert!(!text.contains("Loading") && !text.contains("No mail yet"), "{text}");
}

/// Serves a page at `/` and responds to no other request.
async fn page_server(page: String) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let page = page.clone();
            let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let page = page.clone();
                async move {
                    if request.uri().path() != "/" {
                        std::future::pending::<()>().await;
                    }
                    let response = http::Response::builder().header("content-type", "text/html; charset=utf-8");
                    response.body(http_body_util::Full::new(bytes::Bytes::from(page)))
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}

#[tokio::test]
async fn the_inbox_refuses_other_host_names() {
    let inbox = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let client = ApiClient::new(inbox.addr());
    for (host, status) in [
        ("localhost:8025", StatusCode::OK),
        ("127.0.0.1", StatusCode::OK),
        ("[::1]:8025", StatusCode::OK),
        ("rebound.example.com", StatusCode::MISDIRECTED_REQUEST),
        ("localhost.example.com:8025", StatusCode::MISDIRECTED_REQUEST),
    ] {
        let request = client.request(http::Method::GET, "api/messages").header("host", host);
        client.send(request).await.expect(status);
    }
}

/// Hostile parameters are shown as text, and not run as scripts.
#[tokio::test]
async fn the_page_after_a_login_shows_its_parameters_as_text() {
    let inbox = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let browser = Browser::start().await.unwrap();
    let done = format!("http://{}/done", inbox.addr());
    // The claims of this token are {"sub":"é"}.
    let token = "e30.eyJzdWIiOiLDqSJ9.c2ln";
    browser.open(&format!("{done}?access_token={token}&expires_in=900#session_id=s%201&local_id=l")).await;
    assert_eq!(browser.text_of("#title").await, "Logged in");
    for (place, name, value) in [
        ("query", "access_token", token),
        ("query", "expires_in", "900"),
        ("fragment", "session_id", "s 1"),
        ("fragment", "local_id", "l"),
    ] {
        let cell = format!("td[data-place={place}][data-name={name}]");
        assert_eq!(browser.text_of(&cell).await, value, "{cell}");
    }
    assert!(browser.text_of("#claims").await.contains("\"sub\": \"é\""));

    let hostile = "</td><img src=x onerror=document.title='gone'><script>document.title='gone'</script>";
    let encoded: String = url::form_urlencoded::byte_serialize(hostile.as_bytes()).collect();
    for separator in ['?', '#'] {
        // Opens another path first, because the browser does not load a page if only the fragment changes.
        browser.open(&format!("http://{}/", inbox.addr())).await;
        browser.open(&format!("{done}{separator}error=access_denied&error_description={encoded}")).await;
        assert_eq!(browser.text_of("#title").await, "Not logged in");
        assert_eq!(browser.text_of("td[data-name=error]").await, "access_denied");
        assert_eq!(browser.text_of("td[data-name=error_description]").await, hostile);
        assert_eq!(browser.title().await, "Back from login · Latchkey");
    }
    browser.open(&done).await;
    assert_eq!(browser.text_of("#title").await, "No parameters");
}

// === The provider and the browser ===

#[tokio::test]
async fn a_user_logs_in_at_dex_in_a_browser() {
    let inbox = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let done = format!("http://{}/done", inbox.addr());
    let client = dex::Client { id: "tests".to_owned(), secret: "s".to_owned(), callbacks: vec![done.clone()] };
    let options = dex::Options::for_tests().client(client).user(User::new("Ada", "ada@example.com"));
    let dex = Dex::start(options).await.unwrap();
    let login_url = |state: &str| {
        let query = format!("client_id=tests&response_type=code&scope=openid+email&redirect_uri={done}&state={state}");
        format!("{}/auth?{query}", dex::issuer(dex.addr()))
    };
    let browser = Browser::start().await.unwrap();
    browser.open(&login_url("one")).await;
    dex::log_in(&browser, "nobody@example.com").await;
    browser.wait_for_text("Invalid Email Address and password").await;
    dex::log_in(&browser, "ada@example.com").await;
    let url = browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
    assert!(url.query().unwrap().contains("code=") && url.query().unwrap().contains("state=one"), "{url}");

    // The next Dex listens at the same socket address and asks for consent. The user can grant the consent or cancel.
    let keys = async |dex: &Dex| ApiClient::new(dex.addr()).get("dex/keys").await.expect(StatusCode::OK).body;
    let before = keys(&dex).await;
    let options = dex.options().clone().with_consent_page();
    assert!(dex.stop(LIMIT), "Dex stops in time");
    let dex = Dex::start(options).await.unwrap();
    assert_ne!(keys(&dex).await, before, "the new Dex has new keys");
    browser.open(&login_url("two")).await;
    dex::log_in(&browser, "ada@example.com").await;
    dex::cancel(&browser).await;
    browser.wait_for_text("Approval rejected").await;
    browser.open(&login_url("three")).await;
    dex::log_in(&browser, "ada@example.com").await;
    dex::grant(&browser).await;
    let url = browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
    assert!(url.query().unwrap().contains("state=three"), "{url}");
}

#[tokio::test]
async fn tabs_share_cookies_and_browsers_do_not() {
    let server = cookie_server().await;
    let (one, other) = tokio::join!(Browser::start(), Browser::start());
    let (one, other) = (one.unwrap(), other.unwrap());
    one.open(&format!("http://{server}/set")).await;
    let [cookie] = &one.cookies().await[..] else { panic!("one cookie is expected") };
    assert_eq!((cookie.name.as_str(), cookie.value.as_str(), cookie.path.as_str()), ("flow", "1", "/"));
    assert_eq!((cookie.http_only, cookie.secure, cookie.same_site.as_deref()), (true, false, Some("Lax")));
    let first = one.tab().await;
    let second = one.new_tab().await;
    assert_ne!(first, second);
    for (browser, sent) in [(&one, "flow=1"), (&other, "none")] {
        browser.open(&format!("http://{server}/tell")).await;
        assert_eq!(browser.text().await, sent);
    }
    assert_eq!(one.url().await.path(), "/tell");
    one.switch_to(&first).await;
    assert_eq!(one.url().await.path(), "/set");
}

/// Starts a server that returns the cookies of a request. The path `/set` sets a cookie.
async fn cookie_server() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(|request: http::Request<hyper::body::Incoming>| async move {
                let cookies = request.headers().get("cookie").cloned();
                let body = cookies.map_or("none".to_owned(), |cookies| cookies.to_str().unwrap().to_owned());
                let response = http::Response::builder().header("content-type", "text/plain");
                let response = match request.uri().path() {
                    "/set" => response.header("set-cookie", "flow=1; Path=/; HttpOnly; SameSite=Lax"),
                    _ => response,
                };
                response.body(http_body_util::Full::new(bytes::Bytes::from(body)))
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}
