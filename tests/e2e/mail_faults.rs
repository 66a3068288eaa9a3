//! Relays that are down, reject mails or hang, and servers that die before they send: requests do not wait, mails are
//! sent in the end, and dead letters are kept (specification: Accounts, Emails and the outbox).

use std::{
    fs,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    builders::Relay,
    eventually,
    passwords::PASSWORD,
    process::{self, Program},
    smtp::{self, Behavior, Smtp, Step},
    stack::Stack,
};
use sqlx::Row;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, TestApp},
};

const EMAIL: &str = "ada@example.com";
const DELIVERY_LIMIT: Duration = Duration::from_secs(30);
/// Sets the number of failed attempts so that the next failure makes the mail a dead letter.
const SET_LAST_ATTEMPT: &str =
    "UPDATE outbox SET attempts = 53, due_at = statement_timestamp() WHERE lease_until IS NULL";

async fn start_app() -> TestApp {
    TestApp::from_builder(unlimited_app("mail"), Stack::builder()).await
}

fn refusal(step: Step, code: u16) -> Behavior {
    Behavior::Refuse(step, code, "not today".to_owned())
}

/// Runs a command of `latchkey-server` with the service's database. Returns whether it succeeded, and its output.
async fn run_command(test_app: &TestApp, args: &[&str]) -> (bool, String) {
    let dir = process::fresh_dir("command");
    let log = dir.join("output");
    let program = process::find_built_program("latchkey-server").expect("the server's program is built");
    let program = Program::new("latchkey-server", program, &log)
        .args(args)
        .path_arg("--database-url-file", &test_app.stack.dir().join("database-url"));
    let result = tokio::task::spawn_blocking(move || program.run(DELIVERY_LIMIT)).await.expect("no panic");
    (result.is_ok(), fs::read_to_string(&log).unwrap_or_default())
}

/// Waits until the outbox has this number of mails with a failed attempt.
async fn wait_for_failed_attempts(test_app: &TestApp, rows: i64) {
    let failed = "SELECT count(*) FROM outbox WHERE attempts > 0 AND lease_until IS NULL AND dead_at IS NULL";
    eventually("attempts that fail", DELIVERY_LIMIT, || async {
        (test_app.query_number(failed).await == rows).then_some(())
    })
    .await;
}

async fn wait_for_dead_letters(test_app: &TestApp, rows: i64) {
    let dead = "SELECT count(*) FROM outbox WHERE dead_at IS NOT NULL";
    eventually("dead letters", DELIVERY_LIMIT, || async { (test_app.query_number(dead).await == rows).then_some(()) })
        .await;
}

#[tokio::test]
async fn mail_waits_for_a_relay_that_is_down_and_is_sent_when_the_relay_is_up() {
    let test_app = start_app().await;
    test_app.stack.smtp.stop().await;
    let emails: Vec<String> = (0..5).map(|number| format!("user-{number}@example.com")).collect();
    for email in &emails {
        test_app.register(email).await;
    }
    wait_for_failed_attempts(&test_app, 5).await;
    let row = test_app.query_row("SELECT error, due_at > statement_timestamp() AS later FROM outbox LIMIT 1").await;
    let row = row.expect("a row");
    assert!(row.get::<bool, _>("later"), "it is tried again later");
    assert!(!row.get::<String, _>("error").is_empty(), "the row says why it waits");
    assert!(test_app.stack.mails().all().is_empty());

    test_app.stack.smtp.listen().expect("the relay's port is free");
    for email in &emails {
        let code = test_app.expedited_code(email, 1).await;
        test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    }
    for email in &emails {
        assert_eq!(test_app.settled_mail_count(email).await, 1, "sent once");
    }
}

#[tokio::test]
async fn mail_that_is_temporarily_refused_at_any_step_is_sent_later() {
    let test_app = start_app().await;
    for (number, step) in
        [Step::Connect, Step::MailFrom, Step::RcptTo, Step::Data, Step::EndOfData].into_iter().enumerate()
    {
        test_app.stack.smtp.set_behavior(refusal(step, 451));
        let email = format!("user-{number}@example.com");
        test_app.register(&email).await;
        wait_for_failed_attempts(&test_app, 1).await;
        assert!(test_app.stack.mails().to(&email).is_empty(), "{step:?}");
        test_app.stack.smtp.set_behavior(Behavior::Accept);
        let code = test_app.expedited_code(&email, 1).await;
        test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
        assert_eq!(test_app.settled_mail_count(&email).await, 1, "{step:?}");
    }
    // The relay accepts the mail, but its reply is lost. So the server sends the mail again.
    test_app.stack.smtp.set_behavior(Behavior::Cut(Step::EndOfData));
    test_app.register(EMAIL).await;
    wait_for_failed_attempts(&test_app, 1).await;
    test_app.stack.smtp.set_behavior(Behavior::Accept);
    test_app.make_outbox_due().await;
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
    let code = test_app.code(EMAIL, 2).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn dead_letters_are_kept_and_listed_and_sent_again_on_request() {
    let test_app = start_app().await;
    // Creates two dead letters: the mailbox of the first does not exist, and the second has too many failed attempts.
    test_app.stack.smtp.set_behavior(Behavior::RefuseRecipient(EMAIL.to_owned(), 550));
    test_app.register(EMAIL).await;
    test_app.sql(SET_LAST_ATTEMPT).await;
    wait_for_dead_letters(&test_app, 1).await;
    test_app.stack.smtp.set_behavior(refusal(Step::MailFrom, 451));
    test_app.register("grace@example.com").await;
    wait_for_failed_attempts(&test_app, 1).await;
    test_app.sql(SET_LAST_ATTEMPT).await;
    wait_for_dead_letters(&test_app, 2).await;

    // The dead letters stay when later mails are sent.
    test_app.stack.smtp.set_behavior(Behavior::Accept);
    test_app.register("eve@example.com").await;
    test_app.code("eve@example.com", 1).await;
    assert!(test_app.stack.mails().to(EMAIL).is_empty());
    let (succeeded, list) = run_command(&test_app, &["outbox", "list"]).await;
    assert!(succeeded, "{list}");
    let ids = test_app.query_row("SELECT string_agg(id::text, ' ') AS ids FROM outbox WHERE dead_at IS NOT NULL").await;
    let ids: String = ids.expect("a row").get("ids");
    for id in ids.split(' ') {
        let line = list.lines().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{id} in {list}"));
        assert!(line.contains(test_app.id()) && line.contains("confirm"), "{line}");
        assert!(!line.contains("example.com") && !line.contains("not today"), "no address, no relay text: {line}");
    }

    for id in ids.split(' ') {
        let (succeeded, output) = run_command(&test_app, &["outbox", "retry", id]).await;
        assert!(succeeded, "{output}");
    }
    for email in [EMAIL, "grace@example.com"] {
        let code = test_app.code(email, 1).await;
        test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    }
    let (_, list) = run_command(&test_app, &["outbox", "list"]).await;
    assert!(ids.split(' ').all(|id| !list.contains(id)), "{list}");
    let (succeeded, output) = run_command(&test_app, &["outbox", "retry", ids.split(' ').next().expect("an id")]).await;
    assert!(!succeeded, "a sent mail is no dead letter: {output}");
}

#[tokio::test]
async fn requests_do_not_wait_for_a_relay_that_hangs() {
    let test_app = start_app().await;
    let median_registration = async |round: &str| {
        let mut durations = Vec::new();
        for number in 0..15 {
            let email = format!("{round}-{number}@example.com");
            let client = test_app.client();
            let started = Instant::now();
            client.register(test_app.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
            durations.push(started.elapsed());
        }
        durations.sort_unstable();
        durations[durations.len() / 2]
    };
    let good_median = median_registration("good").await;
    test_app.stack.smtp.set_behavior(Behavior::Hang(Step::MailFrom));
    let hanging_median = median_registration("hanging").await;
    assert!(test_app.stack.mails().to("hanging-0@example.com").is_empty());
    // The timeout for a relay is ten seconds. The margin is for a loaded machine.
    assert!(
        hanging_median < good_median * 4 + Duration::from_millis(50),
        "{hanging_median:?} with a hanging relay, {good_median:?} with a good one"
    );
}

#[tokio::test]
async fn a_hanging_relay_of_one_app_does_not_delay_another_apps_mail() {
    let hanging_relay = Smtp::start(smtp::Options::plain()).await.expect("a relay");
    hanging_relay.set_behavior(Behavior::Hang(Step::Data));
    let delayed_app = unlimited_app("held").relay(Relay::of(&hanging_relay));
    let test_app = TestApp::from_builder(unlimited_app("free"), Stack::builder().app(&delayed_app)).await;
    let client = test_app.client();
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        client.register(delayed_app.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
    }
    eventually("the relay hangs", DELIVERY_LIMIT, || async { (hanging_relay.open_sessions() > 0).then_some(()) }).await;
    for number in 0..4 {
        let email = format!("free-{number}@example.com");
        test_app.register(&email).await;
        test_app.code(&email, 1).await;
        assert!(hanging_relay.mails().all().is_empty(), "the other relay still hangs");
        assert!(hanging_relay.open_sessions() <= 4, "{} mails of one App are in flight", hanging_relay.open_sessions());
    }
    let waiting = format!("SELECT count(*) FROM outbox WHERE app_id = '{}'", delayed_app.id());
    assert_eq!(test_app.query_number(&waiting).await, 12);

    hanging_relay.set_behavior(Behavior::Accept);
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        eventually("the delayed mail", 2 * DELIVERY_LIMIT, || async {
            test_app.make_outbox_due().await;
            (!hanging_relay.mails().to(&email).is_empty()).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_registration_mail_is_sent_after_a_redis_outage() {
    let test_app = TestApp::from_builder(unlimited_app("later"), Stack::builder().proxied()).await;
    test_app.stack.smtp.stop().await;
    test_app.register(EMAIL).await;
    wait_for_failed_attempts(&test_app, 1).await;
    let redis = test_app.stack.redis_proxy.as_ref().expect("the service has proxies");
    redis.refuse().await;
    test_app.stack.smtp.listen().expect("the relay's port is free");
    // Without Redis the server cannot store a code, so it sends no mail. This does not count as a failed attempt.
    for _ in 0..2 {
        test_app.make_outbox_due().await;
        let tried = "SELECT count(*) FROM outbox WHERE lease_until IS NULL AND due_at > statement_timestamp()";
        eventually("another attempt", DELIVERY_LIMIT, || async {
            (test_app.query_number(tried).await == 1).then_some(())
        })
        .await;
    }
    assert_eq!(test_app.query_number("SELECT attempts::bigint FROM outbox").await, 1);
    assert!(test_app.stack.mails().all().is_empty());
    redis.restore().expect("the proxy's port is free");
    let code = eventually("the mail", DELIVERY_LIMIT, || async {
        test_app.make_outbox_due().await;
        test_app.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    });
    let code = code.await;
    test_app.wait_until_ok("confirming", async || test_app.client().confirm(test_app.id(), &code).await).await;
}

// === Servers that die ===

#[tokio::test]
async fn a_mail_is_sent_after_a_restart_if_the_server_was_killed_before_it_sent_the_mail() {
    let test_app = start_app().await;
    // The relay hangs, so that the mail is not sent before the kill.
    test_app.stack.smtp.set_behavior(Behavior::Hang(Step::EndOfData));
    test_app.register(EMAIL).await;
    test_app.stack.server().kill();
    assert!(test_app.stack.mails().all().is_empty());
    test_app.stack.smtp.set_behavior(Behavior::Accept);
    // Ends the lease of the killed server, before the next server starts.
    test_app.expire_leases().await;
    test_app.stack.server().start_ready().await.expect("the server starts again");
    let code = test_app.code(EMAIL, 1).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
}

#[tokio::test]
async fn another_server_sends_the_mail_of_a_killed_server() {
    let test_app = TestApp::from_builder(unlimited_app("heir"), Stack::builder().servers(2)).await;
    test_app.stack.smtp.set_behavior(Behavior::Hang(Step::EndOfData));
    test_app.register(EMAIL).await;
    test_app.stack.server().kill();
    test_app.stack.smtp.set_behavior(Behavior::Accept);
    let leased = "SELECT count(*) FROM outbox WHERE lease_until > statement_timestamp()";
    if test_app.query_number(leased).await == 1 && test_app.stack.smtp.open_sessions() == 0 {
        // Ends the lease of the killed server, which would last a minute.
        test_app.expire_leases().await;
    }
    let code = eventually("the mail", DELIVERY_LIMIT, || async {
        test_app.make_outbox_due().await;
        test_app.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    })
    .await;
    let survivor = test_app.stack.client_of(1);
    survivor.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}
