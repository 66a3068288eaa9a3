//! Relays that are down, refuse or hang, and servers that die before they send: requests do not wait, mail is sent in
//! the end, and dead letters are kept (specification: Accounts, Emails and the outbox).

use std::{
    fs,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    builders::Relay,
    eventually,
    process::{self, Program},
    smtp::{self, Behavior, Smtp, Step},
    stack::Stack,
};
use sqlx::Row;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, PASSWORD, TestApp},
};

const EMAIL: &str = "ada@example.com";
const DELIVERY_LIMIT: Duration = Duration::from_secs(30);
/// Sets one failure less than the number that makes a mail a dead letter.
const SET_LAST_ATTEMPT: &str =
    "UPDATE outbox SET attempts = 53, due_at = statement_timestamp() WHERE lease_until IS NULL";

async fn start_app() -> TestApp {
    TestApp::from_builder(unlimited_app("mail"), Stack::builder()).await
}

fn refuse(step: Step, code: u16) -> Behavior {
    Behavior::Refuse(step, code, "not today".to_owned())
}

/// Runs a command of the server program on this service's database. Returns whether it succeeded, and its output.
async fn run_command(shop: &TestApp, args: &[&str]) -> (bool, String) {
    let dir = process::fresh_dir("command");
    let log = dir.join("output");
    let program = process::find_built_program("latchkey-server").expect("the server's program is built");
    let program = Program::new("latchkey-server", program, &log)
        .args(args)
        .path_arg("--database-url-file", &shop.stack.dir().join("database-url"));
    let done = tokio::task::spawn_blocking(move || program.run(DELIVERY_LIMIT)).await.expect("no panic");
    (done.is_ok(), fs::read_to_string(&log).unwrap_or_default())
}

/// Waits until this number of mails waits in the outbox after a failed attempt.
async fn wait_for_failed_attempts(shop: &TestApp, rows: i64) {
    let failed = "SELECT count(*) FROM outbox WHERE attempts > 0 AND lease_until IS NULL AND dead_at IS NULL";
    eventually("attempts that fail", DELIVERY_LIMIT, || async {
        (shop.query_number(failed).await == rows).then_some(())
    })
    .await;
}

async fn wait_for_dead_letters(shop: &TestApp, rows: i64) {
    let dead = "SELECT count(*) FROM outbox WHERE dead_at IS NOT NULL";
    eventually("dead letters", DELIVERY_LIMIT, || async { (shop.query_number(dead).await == rows).then_some(()) })
        .await;
}

#[tokio::test]
async fn mail_waits_for_a_relay_that_is_down_and_is_sent_when_it_is_up() {
    let shop = start_app().await;
    shop.stack.smtp.stop().await;
    let emails: Vec<String> = (0..5).map(|number| format!("user-{number}@example.com")).collect();
    for email in &emails {
        shop.register(email).await;
    }
    wait_for_failed_attempts(&shop, 5).await;
    let row = shop.query_row("SELECT error, due_at > statement_timestamp() AS later FROM outbox LIMIT 1").await;
    let row = row.expect("a row");
    assert!(row.get::<bool, _>("later"), "it is tried again later");
    assert!(!row.get::<String, _>("error").is_empty(), "the row says why it waits");
    assert!(shop.stack.mails().all().is_empty());

    shop.stack.smtp.listen().expect("the relay's port is free");
    for email in &emails {
        let code = shop.expedited_code(email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    }
    for email in &emails {
        assert_eq!(shop.settled_mail_count(email).await, 1, "sent once");
    }
}

#[tokio::test]
async fn mail_with_a_temporary_refusal_is_retried_at_every_step() {
    let shop = start_app().await;
    for (number, step) in
        [Step::Connect, Step::MailFrom, Step::RcptTo, Step::Data, Step::EndOfData].into_iter().enumerate()
    {
        shop.stack.smtp.set_behavior(refuse(step, 451));
        let email = format!("user-{number}@example.com");
        shop.register(&email).await;
        wait_for_failed_attempts(&shop, 1).await;
        assert!(shop.stack.mails().to(&email).is_empty(), "{step:?}");
        shop.stack.smtp.set_behavior(Behavior::Accept);
        let code = shop.expedited_code(&email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
        assert_eq!(shop.settled_mail_count(&email).await, 1, "{step:?}");
    }
    // If a response is lost, a mail can be sent twice, but it is always sent.
    shop.stack.smtp.set_behavior(Behavior::Cut(Step::EndOfData));
    shop.register(EMAIL).await;
    wait_for_failed_attempts(&shop, 1).await;
    shop.stack.smtp.set_behavior(Behavior::Accept);
    shop.make_outbox_due().await;
    assert_eq!(shop.settled_mail_count(EMAIL).await, 2);
    let code = shop.code(EMAIL, 2).await;
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn dead_letters_are_kept_listed_and_sent_again() {
    let shop = start_app().await;
    // One is dead because the mailbox does not exist, one because of too many attempts.
    shop.stack.smtp.set_behavior(Behavior::RefuseRecipient(EMAIL.to_owned(), 550));
    shop.register(EMAIL).await;
    shop.sql(SET_LAST_ATTEMPT).await;
    wait_for_dead_letters(&shop, 1).await;
    shop.stack.smtp.set_behavior(refuse(Step::MailFrom, 451));
    shop.register("grace@example.com").await;
    wait_for_failed_attempts(&shop, 1).await;
    shop.sql(SET_LAST_ATTEMPT).await;
    wait_for_dead_letters(&shop, 2).await;

    // They stay, whatever mails follow.
    shop.stack.smtp.set_behavior(Behavior::Accept);
    shop.register("eve@example.com").await;
    shop.code("eve@example.com", 1).await;
    assert!(shop.stack.mails().to(EMAIL).is_empty());
    let (listed, list) = run_command(&shop, &["outbox", "list"]).await;
    assert!(listed, "{list}");
    let ids = shop.query_row("SELECT string_agg(id::text, ' ') AS ids FROM outbox WHERE dead_at IS NOT NULL").await;
    let ids: String = ids.expect("a row").get("ids");
    for id in ids.split(' ') {
        let line = list.lines().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{id} in {list}"));
        assert!(line.contains(shop.id()) && line.contains("confirm"), "{line}");
        assert!(!line.contains("example.com") && !line.contains("not today"), "no address, no relay text: {line}");
    }

    for id in ids.split(' ') {
        let (sent, output) = run_command(&shop, &["outbox", "retry", id]).await;
        assert!(sent, "{output}");
    }
    for email in [EMAIL, "grace@example.com"] {
        let code = shop.code(email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    }
    let (_, list) = run_command(&shop, &["outbox", "list"]).await;
    assert!(ids.split(' ').all(|id| !list.contains(id)), "{list}");
    let (again, output) = run_command(&shop, &["outbox", "retry", ids.split(' ').next().expect("an id")]).await;
    assert!(!again, "a sent mail is no dead letter: {output}");
}

#[tokio::test]
async fn requests_do_not_wait_for_a_relay_that_hangs() {
    let shop = start_app().await;
    let registrations = async |round: &str| {
        let mut durations = Vec::new();
        for number in 0..15 {
            let email = format!("{round}-{number}@example.com");
            let client = shop.client();
            let started = Instant::now();
            client.register(shop.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
            durations.push(started.elapsed());
        }
        durations.sort_unstable();
        durations[durations.len() / 2]
    };
    let good = registrations("good").await;
    shop.stack.smtp.set_behavior(Behavior::Hang(Step::MailFrom));
    let hanging = registrations("hanging").await;
    assert!(shop.stack.mails().to("hanging-0@example.com").is_empty());
    // The timeout for a relay is ten seconds; the margin is the noise of the machine.
    assert!(
        hanging < good * 4 + Duration::from_millis(50),
        "{hanging:?} with a hanging relay, {good:?} with a good one"
    );
}

#[tokio::test]
async fn a_hanging_relay_of_one_app_does_not_delay_another_apps_mail() {
    let hanging = Smtp::start(smtp::Options::plain()).await.expect("a relay");
    hanging.set_behavior(Behavior::Hang(Step::Data));
    let delayed = unlimited_app("held").relay(Relay::of(&hanging));
    let shop = TestApp::from_builder(unlimited_app("free"), Stack::builder().app(&delayed)).await;
    let client = shop.client();
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        client.register(delayed.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
    }
    eventually("the relay hangs", DELIVERY_LIMIT, || async { (hanging.open_sessions() > 0).then_some(()) }).await;
    for number in 0..4 {
        let email = format!("free-{number}@example.com");
        shop.register(&email).await;
        shop.code(&email, 1).await;
        assert!(hanging.mails().all().is_empty(), "the other relay still hangs");
        assert!(hanging.open_sessions() <= 4, "{} mails of one App are in flight", hanging.open_sessions());
    }
    let waiting = format!("SELECT count(*) FROM outbox WHERE app_id = '{}'", delayed.id());
    assert_eq!(shop.query_number(&waiting).await, 12);

    hanging.set_behavior(Behavior::Accept);
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        eventually("the delayed mail", 2 * DELIVERY_LIMIT, || async {
            shop.make_outbox_due().await;
            (!hanging.mails().to(&email).is_empty()).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn mail_of_a_registration_is_sent_after_a_redis_outage() {
    let shop = TestApp::from_builder(unlimited_app("later"), Stack::builder().proxied()).await;
    shop.stack.smtp.stop().await;
    shop.register(EMAIL).await;
    wait_for_failed_attempts(&shop, 1).await;
    let redis = shop.stack.redis_proxy.as_ref().expect("it is behind proxies");
    redis.refuse().await;
    shop.stack.smtp.listen().expect("the relay's port is free");
    // Without Redis no code can be stored, so no mail is sent, and this does not count as an attempt.
    for _ in 0..2 {
        shop.make_outbox_due().await;
        let tried = "SELECT count(*) FROM outbox WHERE lease_until IS NULL AND due_at > statement_timestamp()";
        eventually("another attempt", DELIVERY_LIMIT, || async { (shop.query_number(tried).await == 1).then_some(()) })
            .await;
    }
    assert_eq!(shop.query_number("SELECT attempts::bigint FROM outbox").await, 1);
    assert!(shop.stack.mails().all().is_empty());
    redis.restore().expect("the proxy's port is free");
    let code = eventually("the mail", DELIVERY_LIMIT, || async {
        shop.make_outbox_due().await;
        shop.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    });
    let code = code.await;
    shop.wait_until_ok("confirming", async || shop.client().confirm(shop.id(), &code).await).await;
}

// === Servers that die ===

#[tokio::test]
async fn a_server_killed_before_sending_sends_the_mail_after_its_restart() {
    let shop = start_app().await;
    // The mail cannot be sent before the kill.
    shop.stack.smtp.set_behavior(Behavior::Hang(Step::EndOfData));
    shop.register(EMAIL).await;
    shop.stack.server().kill();
    assert!(shop.stack.mails().all().is_empty());
    shop.stack.smtp.set_behavior(Behavior::Accept);
    // The lease of the killed server, not of its successor.
    shop.expire_leases().await;
    shop.stack.server().start_ready().await.expect("the server starts again");
    let code = shop.code(EMAIL, 1).await;
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 1);
}

#[tokio::test]
async fn another_server_sends_the_mail_of_a_killed_server() {
    let shop = TestApp::from_builder(unlimited_app("heir"), Stack::builder().servers(2)).await;
    shop.stack.smtp.set_behavior(Behavior::Hang(Step::EndOfData));
    shop.register(EMAIL).await;
    shop.stack.server().kill();
    shop.stack.smtp.set_behavior(Behavior::Accept);
    let leased = "SELECT count(*) FROM outbox WHERE lease_until > statement_timestamp()";
    if shop.query_number(leased).await == 1 && shop.stack.smtp.open_sessions() == 0 {
        // The dead server had the lease, which would last a minute.
        shop.expire_leases().await;
    }
    let code = eventually("the mail", DELIVERY_LIMIT, || async {
        shop.make_outbox_due().await;
        shop.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    })
    .await;
    let survivor = shop.stack.client_of(1);
    survivor.confirm(shop.id(), &code).await.expect(StatusCode::OK);
}
