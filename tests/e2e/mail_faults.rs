//! Relays that are down, refuse or hang, and servers that die before they mailed: requests do not wait, mail goes out
//! in the end, dead letters are kept (contract 3).

use std::{
    fs,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    builders::Relay,
    eventually,
    process::{self, Program},
    smtp::{self, Behaviour, Smtp, Step},
    stack::Stack,
};
use sqlx::Row;

use crate::{
    support::{NAME, PASSWORD, Shop},
    trouble::loose,
};

const EMAIL: &str = "ada@example.com";
const SOON: Duration = Duration::from_secs(30);
/// Failures that make a mail a dead letter, one less.
const ALMOST_DEAD: &str = "UPDATE outbox SET attempts = 53, due_at = statement_timestamp() WHERE lease_until IS NULL";

async fn shop() -> Shop {
    Shop::of(loose("mail"), Stack::builder()).await
}

fn refuse(step: Step, code: u16) -> Behaviour {
    Behaviour::Refuse(step, code, "not today".to_owned())
}

/// A command of the server's program over this service's database: whether it succeeded, and what it printed.
async fn command(shop: &Shop, args: &[&str]) -> (bool, String) {
    let dir = process::fresh_dir("command");
    let log = dir.join("output");
    let program = process::our_program("latchkey-server").expect("the server's program is built");
    let program = Program::new("latchkey-server", program, &log)
        .args(args)
        .path_arg("--database-url-file", &shop.stack.dir().join("database-url"));
    let done = tokio::task::spawn_blocking(move || program.run(SOON)).await.expect("no panic");
    (done.is_ok(), fs::read_to_string(&log).unwrap_or_default())
}

/// Waits until so many mails wait in the outbox after an attempt that failed.
async fn failed_once(shop: &Shop, rows: i64) {
    let failed = "SELECT count(*) FROM outbox WHERE attempts > 0 AND lease_until IS NULL AND dead_at IS NULL";
    eventually("attempts that fail", SOON, || async { (shop.count(failed).await == rows).then_some(()) }).await;
}

async fn dead(shop: &Shop, rows: i64) {
    let dead = "SELECT count(*) FROM outbox WHERE dead_at IS NOT NULL";
    eventually("dead letters", SOON, || async { (shop.count(dead).await == rows).then_some(()) }).await;
}

#[tokio::test]
async fn mail_waits_for_a_relay_that_is_down_and_goes_out_when_it_is_back() {
    let shop = shop().await;
    shop.stack.smtp.down().await;
    let emails: Vec<String> = (0..5).map(|number| format!("user-{number}@example.com")).collect();
    for email in &emails {
        shop.register(email).await;
    }
    failed_once(&shop, 5).await;
    let row = shop.row("SELECT error, due_at > statement_timestamp() AS later FROM outbox LIMIT 1").await;
    let row = row.expect("a row");
    assert!(row.get::<bool, _>("later"), "it is tried again later");
    assert!(!row.get::<String, _>("error").is_empty(), "the row says why it waits");
    assert!(shop.stack.mails().all().is_empty());

    shop.stack.smtp.up().expect("the relay's port is free");
    for email in &emails {
        let code = shop.hurried_code(email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    }
    for email in &emails {
        assert_eq!(shop.mails_in_the_end(email).await, 1, "sent once");
    }
}

#[tokio::test]
async fn mail_that_a_relay_refuses_for_now_is_tried_again_at_every_step() {
    let shop = shop().await;
    for (number, step) in
        [Step::Connect, Step::MailFrom, Step::RcptTo, Step::Data, Step::EndOfData].into_iter().enumerate()
    {
        shop.stack.smtp.behave(refuse(step, 451));
        let email = format!("user-{number}@example.com");
        shop.register(&email).await;
        failed_once(&shop, 1).await;
        assert!(shop.stack.mails().to(&email).is_empty(), "{step:?}");
        shop.stack.smtp.behave(Behaviour::Accept);
        let code = shop.hurried_code(&email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
        assert_eq!(shop.mails_in_the_end(&email).await, 1, "{step:?}");
    }
    // An answer that is lost may send a mail twice, never not at all.
    shop.stack.smtp.behave(Behaviour::Cut(Step::EndOfData));
    shop.register(EMAIL).await;
    failed_once(&shop, 1).await;
    shop.stack.smtp.behave(Behaviour::Accept);
    shop.hurry().await;
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 2);
    let code = shop.code(EMAIL, 2).await;
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn dead_letters_are_kept_listed_and_sent_again() {
    let shop = shop().await;
    // One dies because nobody has this mailbox, one because it was tried too often.
    shop.stack.smtp.behave(Behaviour::RefuseRecipient(EMAIL.to_owned(), 550));
    shop.register(EMAIL).await;
    shop.sql(ALMOST_DEAD).await;
    dead(&shop, 1).await;
    shop.stack.smtp.behave(refuse(Step::MailFrom, 451));
    shop.register("grace@example.com").await;
    failed_once(&shop, 1).await;
    shop.sql(ALMOST_DEAD).await;
    dead(&shop, 2).await;

    // They stay, whatever comes after them.
    shop.stack.smtp.behave(Behaviour::Accept);
    shop.register("eve@example.com").await;
    shop.code("eve@example.com", 1).await;
    assert!(shop.stack.mails().to(EMAIL).is_empty());
    let (listed, list) = command(&shop, &["outbox", "list"]).await;
    assert!(listed, "{list}");
    let ids = shop.row("SELECT string_agg(id::text, ' ') AS ids FROM outbox WHERE dead_at IS NOT NULL").await;
    let ids: String = ids.expect("a row").get("ids");
    for id in ids.split(' ') {
        let line = list.lines().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{id} in {list}"));
        assert!(line.contains(shop.id()) && line.contains("confirm"), "{line}");
        assert!(!line.contains("example.com") && !line.contains("not today"), "no address, no relay's words: {line}");
    }

    for id in ids.split(' ') {
        let (sent, said) = command(&shop, &["outbox", "retry", id]).await;
        assert!(sent, "{said}");
    }
    for email in [EMAIL, "grace@example.com"] {
        let code = shop.code(email, 1).await;
        shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    }
    let (_, list) = command(&shop, &["outbox", "list"]).await;
    assert!(ids.split(' ').all(|id| !list.contains(id)), "{list}");
    let (again, said) = command(&shop, &["outbox", "retry", ids.split(' ').next().expect("an id")]).await;
    assert!(!again, "what was sent is no dead letter: {said}");
}

#[tokio::test]
async fn requests_do_not_wait_for_a_relay_that_hangs() {
    let shop = shop().await;
    let registrations = async |round: &str| {
        let mut took = Vec::new();
        for number in 0..15 {
            let email = format!("{round}-{number}@example.com");
            let client = shop.client();
            let started = Instant::now();
            client.register(shop.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
            took.push(started.elapsed());
        }
        took.sort_unstable();
        took[took.len() / 2]
    };
    let good = registrations("good").await;
    shop.stack.smtp.behave(Behaviour::Hang(Step::MailFrom));
    let hanging = registrations("hanging").await;
    assert!(shop.stack.mails().to("hanging-0@example.com").is_empty());
    // The relay's time limit is ten seconds; the noise of the machine is the rest.
    assert!(
        hanging < good * 4 + Duration::from_millis(50),
        "{hanging:?} with a hanging relay, {good:?} with a good one"
    );
}

#[tokio::test]
async fn a_hanging_relay_of_one_app_does_not_hold_up_another_apps_mail() {
    let hanging = Smtp::start(smtp::Options::plain()).await.expect("a relay");
    hanging.behave(Behaviour::Hang(Step::Data));
    let held_up = loose("held").relay(Relay::to(&hanging));
    let shop = Shop::of(loose("free"), Stack::builder().app(&held_up)).await;
    let client = shop.client();
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        client.register(held_up.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
    }
    eventually("the relay hangs", SOON, || async { (hanging.open_sessions() > 0).then_some(()) }).await;
    for number in 0..4 {
        let email = format!("free-{number}@example.com");
        shop.register(&email).await;
        shop.code(&email, 1).await;
        assert!(hanging.mails().all().is_empty(), "the other relay hangs all the while");
        assert!(hanging.open_sessions() <= 4, "{} mails of one App are in flight", hanging.open_sessions());
    }
    let waiting = format!("SELECT count(*) FROM outbox WHERE app_id = '{}'", held_up.id());
    assert_eq!(shop.count(&waiting).await, 12);

    hanging.behave(Behaviour::Accept);
    for number in 0..12 {
        let email = format!("user-{number}@example.com");
        eventually("the mail that was held up", 2 * SOON, || async {
            shop.hurry().await;
            (!hanging.mails().to(&email).is_empty()).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn mail_of_a_registration_goes_out_though_redis_was_away() {
    let shop = Shop::of(loose("later"), Stack::builder().proxied()).await;
    shop.stack.smtp.down().await;
    shop.register(EMAIL).await;
    failed_once(&shop, 1).await;
    let redis = shop.stack.redis_proxy.as_ref().expect("it is behind proxies");
    redis.refuse().await;
    shop.stack.smtp.up().expect("the relay's port is free");
    // Without Redis no code can be kept, so none is sent, and that is not an attempt at mailing.
    for _ in 0..2 {
        shop.hurry().await;
        let tried = "SELECT count(*) FROM outbox WHERE lease_until IS NULL AND due_at > statement_timestamp()";
        eventually("another attempt", SOON, || async { (shop.count(tried).await == 1).then_some(()) }).await;
    }
    assert_eq!(shop.count("SELECT attempts::bigint FROM outbox").await, 1);
    assert!(shop.stack.mails().all().is_empty());
    redis.restore().expect("the proxy's port is free");
    let code = eventually("the mail", SOON, || async {
        shop.hurry().await;
        shop.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    });
    let code = code.await;
    shop.recovers("confirming", async || shop.client().confirm(shop.id(), &code).await).await;
}

// === Servers that die ===

#[tokio::test]
async fn the_mail_comes_though_the_server_was_killed_before_it_mailed() {
    let shop = shop().await;
    // The mail cannot be sent before the kill.
    shop.stack.smtp.behave(Behaviour::Hang(Step::EndOfData));
    shop.register(EMAIL).await;
    shop.stack.server().kill();
    assert!(shop.stack.mails().all().is_empty());
    shop.stack.smtp.behave(Behaviour::Accept);
    // Of the one that was killed, not of its successor.
    shop.outlast_leases().await;
    shop.stack.server().start_ready().await.expect("the server starts again");
    let code = shop.code(EMAIL, 1).await;
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 1);
}

#[tokio::test]
async fn the_mail_of_a_server_that_was_killed_comes_from_another() {
    let shop = Shop::of(loose("heir"), Stack::builder().servers(2)).await;
    shop.stack.smtp.behave(Behaviour::Hang(Step::EndOfData));
    shop.register(EMAIL).await;
    shop.stack.server().kill();
    shop.stack.smtp.behave(Behaviour::Accept);
    let held = "SELECT count(*) FROM outbox WHERE lease_until > statement_timestamp()";
    if shop.count(held).await == 1 && shop.stack.smtp.open_sessions() == 0 {
        // The dead one held it; its lease would last a minute.
        shop.outlast_leases().await;
    }
    let code = eventually("the mail", SOON, || async {
        shop.hurry().await;
        shop.stack.mails().to(EMAIL).first().map(|mail| mail.code())
    })
    .await;
    let survivor = shop.stack.client_of(1);
    survivor.confirm(shop.id(), &code).await.expect(StatusCode::OK);
}
