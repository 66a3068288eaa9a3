//! A server with a clock that jumps. Sessions use Redis's clock, so no session ends. Retries of webhooks use Postgres's
//! clock, so their delays do not change.

use std::{fs, path::PathBuf, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    client::{ApiClient, ApiResponse},
    passwords::PASSWORD,
    process,
    stack::{Builder, Stack},
    webhook_receiver::{Reply, WebhookReceiver},
};

use crate::support::{TestApp, app};

const EMAIL: &str = "ada@example.com";
/// Maximum time in seconds between a read of the clock in the server and a read in the test, on a loaded machine.
const CLOCK_TOLERANCE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
/// The first retry of a webhook comes 5 s ±20 % after the failure.
const SHORTEST_FIRST_RETRY: Duration = Duration::from_secs(4);

/// The file with the offset of the server's clock. The test can change the offset while the server runs.
struct ClockOffset(PathBuf);

impl ClockOffset {
    fn new() -> Self {
        let this = Self(process::fresh_dir("clock").join("offset"));
        this.set(0);
        this
    }

    fn set(&self, seconds: i64) {
        let new = self.0.with_extension("new");
        fs::write(&new, format!("{seconds:+}\n")).unwrap();
        fs::rename(new, &self.0).unwrap();
    }

    /// A builder of a service in which all programs have this clock.
    fn builder(&self) -> Builder {
        self.envs().into_iter().fold(Stack::builder(), |builder, (name, value)| builder.env(name, &value))
    }

    /// The environment variables that shift the clock of a program by the offset. The program's timers are not shifted,
    /// because they use the monotonic clock.
    fn envs(&self) -> [(&'static str, String); 4] {
        let library = format!("/usr/lib/{}-linux-gnu/faketime/libfaketime.so.1", std::env::consts::ARCH);
        assert!(fs::exists(&library).unwrap(), "libfaketime is not installed: run `make tools`, or `make test`");
        [
            ("LD_PRELOAD", library),
            ("FAKETIME_TIMESTAMP_FILE", self.0.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
    }
}

async fn get_sessions(test_app: &TestApp, client: &ApiClient, token: &str) -> ApiResponse {
    client.with_token(test_app.id(), token).get("sessions").await
}

#[tokio::test]
async fn a_clock_that_jumps_ends_no_session() {
    let offset = ClockOffset::new();
    let app = app();
    let test_app = TestApp::from_builder(app, offset.builder()).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let mut refresh_token = login.string("refresh_token").to_owned();
    let mut access_token = login.string("token").to_owned();
    let mut before = 0;
    for jump in [0, HOUR, -HOUR, 400 * DAY, -400 * DAY, 0] {
        offset.set(jump);
        let response = client.refresh(test_app.id(), &refresh_token).await.expect(StatusCode::OK);
        assert_eq!(response.string("session_id"), login.string("session_id"));
        let now = i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap();
        let deviation = response.integer("expires_at") - response.integer("expires_in") - now - jump;
        assert!(deviation.abs() < CLOCK_TOLERANCE, "the server's clock is off by {deviation} s more than {jump} s");
        // A client that lost the response sends the same token again. Redis's clock decides whether the grace
        // period of the token has ended.
        let again = client.refresh(test_app.id(), &refresh_token).await.expect(StatusCode::OK);
        assert_eq!(again.string("refresh_token"), response.string("refresh_token"));
        get_sessions(&test_app, &client, response.string("access_token")).await.expect(StatusCode::OK);
        // The server checks the `exp` of an access token by its own clock.
        let expected = if jump > before { StatusCode::UNAUTHORIZED } else { StatusCode::OK };
        let status = get_sessions(&test_app, &client, &access_token).await.status;
        assert_eq!(status, expected, "from {before} s to {jump} s");
        before = jump;
        response.string("refresh_token").clone_into(&mut refresh_token);
        response.string("access_token").clone_into(&mut access_token);
    }
    let sessions = get_sessions(&test_app, &client, &access_token).await.expect(StatusCode::OK);
    let is_own = |session: &&serde_json::Value| session["id"] == login.string("session_id");
    assert_eq!(sessions.body["sessions"].as_array().unwrap().iter().filter(is_own).count(), 1);
    let activity = client.with_token(test_app.id(), &access_token).get("user/activity").await.expect(StatusCode::OK);
    assert!(activity.text.contains("logged_in") && !activity.text.contains("refresh_"), "{}", activity.text);
}

#[tokio::test]
async fn a_clock_that_jumps_does_not_shorten_the_delay_of_a_retry() {
    let offset = ClockOffset::new();
    let receiver = WebhookReceiver::start().unwrap();
    let app = app().webhook(&Webhook::push("crm", &receiver.url(), &["user.created"]));
    let test_app = TestApp::from_builder(app, offset.builder()).await;
    for (number, jump) in [HOUR, -HOUR].into_iter().enumerate() {
        offset.set(jump);
        receiver.script([Reply::status(500)]);
        test_app.register(&format!("user{number}@example.com")).await;
        let events = receiver.wait_for(2 * (number + 1)).await;
        let [first, second] = &events[2 * number..] else { panic!("{} requests", events.len()) };
        assert_eq!(first.id(), second.id());
        let pause = second.at - first.at;
        assert!(pause >= SHORTEST_FIRST_RETRY, "{pause:?} with a clock that is off by {jump} s");
    }
}
