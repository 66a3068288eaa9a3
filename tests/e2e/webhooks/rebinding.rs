//! A receiver with a host that gets a private IP address after the first lookup (DNS rebinding).

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use latchkey_tests::{
    builders::Webhook,
    eventually,
    process::{self, Program},
    stack::Stack,
    webhook_receiver::{Reply, WebhookReceiver},
};

use super::{CREATED, EMAIL, LIMIT, app, create_user};
use crate::administration::AdministrationTest;

const COMPILE_LIMIT: Duration = Duration::from_secs(60);
/// `rebinding.c` replaces the lookups of this host: the first one returns [`ALLOWED`], every later one [`PRIVATE`].
const HOST: &str = "rebinding.test";
const ALLOWED: &str = "127.0.0.1";
const PRIVATE: &str = "10.0.0.1";

/// Compiles the library that replaces the lookups of [`HOST`] in a server.
fn build_library(dir: &Path) -> PathBuf {
    let library = dir.join("rebinding.so");
    Program::new("cc", "cc", dir.join("cc.log"))
        .args(["-shared", "-fPIC", "-Wall", "-Werror"])
        .path_arg("-o", &library)
        .arg(process::root().join("tests/e2e/webhooks/rebinding.c").display().to_string())
        .arg("-ldl")
        .run(COMPILE_LIMIT)
        .unwrap();
    library
}

#[tokio::test]
async fn an_event_is_sent_to_the_address_that_was_checked_and_never_to_a_private_one() {
    let dir = process::fresh_dir("rebinding");
    let (library, log) = (build_library(&dir), dir.join("log"));
    let receiver = WebhookReceiver::start().unwrap();
    // This response closes the connection, so the next event needs another connection and another lookup.
    receiver.script([Reply::status(204).with_header("connection", "close")]);
    let url = format!("http://{HOST}:{}/hook", receiver.addr().port());
    let builder = Stack::builder()
        .env("LD_PRELOAD", &library.display().to_string())
        .env("REBINDING_LOG", &log.display().to_string());
    let test = AdministrationTest::start_on(builder, app().webhook(&Webhook::push("crm", &url, CREATED)), &[]).await;
    let addresses = |of: &str| -> Vec<String> {
        let log = fs::read_to_string(&log).unwrap();
        log.lines().filter_map(|line| line.strip_prefix(of)?.strip_prefix(' ')).map(str::to_owned).collect()
    };

    create_user(&test.admin(), EMAIL).await;
    receiver.wait_for(1).await;
    assert_eq!(addresses("lookup"), [ALLOWED], "the address is looked up once, not once more for the connection");

    create_user(&test.admin(), "grace@example.com").await;
    let refused = "SELECT count(*) FROM webhook_events WHERE attempts > 0 AND error LIKE '%private or reserved%'";
    eventually("the next event is not sent", LIMIT, || async {
        (test.test_app.query_number(refused).await == 1).then_some(())
    })
    .await;
    // Retries look up the host again.
    let lookups = addresses("lookup");
    assert!(lookups.len() > 1 && lookups[1..].iter().all(|address| address == PRIVATE), "{lookups:?}");
    let connections = addresses("connect");
    assert!(connections.iter().any(|address| address == ALLOWED), "the library records connections");
    assert!(!connections.iter().any(|address| address == PRIVATE), "{connections:?}");
    assert_eq!(receiver.events().len(), 1);
}
