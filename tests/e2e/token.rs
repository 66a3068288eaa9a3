//! Refresh, revocation and the session list, as a client sees them.

use std::collections::BTreeSet;

use futures::future::join_all;
use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    eventually,
    passwords::PASSWORD,
    redis,
    stack::Stack,
};
use serde_json::json;

use crate::support::{LIVE_LIMIT, NAME, TestApp, app, claims_of};

const EMAIL: &str = "ada@example.com";

/// A session of a confirmed user.
struct Session {
    client: ApiClient,
    login: ApiResponse,
}

impl Session {
    async fn open(test_app: &TestApp) -> Self {
        let client = test_app.register_and_confirm(EMAIL).await;
        Self::open_another(test_app, client).await
    }

    /// Logs the same user in again, with this client.
    async fn open_another(test_app: &TestApp, client: ApiClient) -> Self {
        let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        Self { client, login }
    }

    fn refresh_token(&self) -> &str {
        self.login.string("refresh_token")
    }

    async fn refresh(&self, test_app: &TestApp, token: &str) -> ApiResponse {
        self.client.refresh(test_app.id(), token).await
    }

    /// Whether the session is live: its access token is still accepted.
    async fn is_live(&self, test_app: &TestApp) -> bool {
        let response = self.client.with_token(test_app.id(), self.login.string("token")).get("sessions").await;
        match response.status {
            StatusCode::OK => true,
            StatusCode::UNAUTHORIZED => false,
            _ => panic!("unexpected response: {}", response.text),
        }
    }
}

#[tokio::test]
async fn a_refresh_returns_new_tokens_for_the_same_session() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let response = session.refresh(&test_app, session.refresh_token()).await.expect(StatusCode::OK);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!(response.string("token_type"), "Bearer");
    assert_eq!(response.string("session_id"), session.login.string("session_id"));
    assert_eq!(response.string("local_id"), session.login.body["user"]["id"].as_str().unwrap());
    assert_ne!(response.string("refresh_token"), session.refresh_token());
    let (old, new) = (claims_of(session.login.string("token")), claims_of(response.string("access_token")));
    for claim in ["iss", "aud", "sub", "sid", "client_id", "auth_time", "amr", "email", "email_verified", "name"] {
        assert_eq!(new[claim], old[claim], "{claim}");
    }
    assert_ne!(new["jti"], old["jti"]);
    assert_eq!(new["exp"], response.integer("expires_at"));
    assert_eq!(new["name"], NAME);
    session
        .client
        .with_token(test_app.id(), response.string("access_token"))
        .get("sessions")
        .await
        .expect(StatusCode::OK);
}

#[tokio::test]
async fn a_refresh_can_be_sent_as_a_form_or_as_json() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let path = format!("v1/{}/token", test_app.id());
    let form = [("grant_type", "refresh_token"), ("refresh_token", session.refresh_token()), ("client_id", "x")];
    let first = session.client.post_form(&path, &form).await.expect(StatusCode::OK);
    let json_body = json!({ "grant_type": "refresh_token", "refresh_token": session.refresh_token() });
    let again = session.client.post(&path, &json_body).await.expect(StatusCode::OK);
    assert_eq!(again.string("refresh_token"), first.string("refresh_token"));
}

#[tokio::test]
async fn an_invalid_refresh_token_is_refused_and_ends_nothing() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let good = session.refresh_token().to_owned();
    let other = App::new("other");
    test_app.stack.apply(&other).unwrap();
    eventually("the other App is served", LIVE_LIMIT, || async {
        let response = test_app.client().get(&format!("{}/.well-known/jwks.json", other.id())).await;
        (response.status == StatusCode::OK).then_some(())
    })
    .await;
    test_app.client().refresh(other.id(), &good).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let mut tampered = good.clone().into_bytes();
    let position = tampered.len() - 3;
    tampered[position] = if tampered[position] == b'A' { b'B' } else { b'A' };
    let tampered = String::from_utf8(tampered).unwrap();
    for bad in [&tampered, &good[..good.len() - 1], &good[4..], "lkr_", "x", session.login.string("token")] {
        session.refresh(&test_app, bad).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    }
    let path = format!("v1/{}/token", test_app.id());
    let empty_body = json!({});
    session
        .client
        .post(&format!("{path}?refresh_token={good}"), &empty_body)
        .await
        .expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let password_grant = json!({ "grant_type": "password", "refresh_token": good });
    session.client.post(&path, &password_grant).await.expect_error(StatusCode::BAD_REQUEST, "unsupported_grant_type");
    let repeated_token = [("refresh_token", good.as_str()), ("refresh_token", good.as_str())];
    session.client.post_form(&path, &repeated_token).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert!(session.is_live(&test_app).await);
    let response = session.refresh(&test_app, &good).await.expect(StatusCode::OK);
    assert_ne!(response.string("refresh_token"), good, "nothing was consumed");
}

#[tokio::test]
async fn sixty_four_concurrent_refreshes_with_one_token_get_the_same_new_token() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let responses = join_all((0..64).map(|_| session.refresh(&test_app, session.refresh_token()))).await;
    let tokens: BTreeSet<String> = responses
        .into_iter()
        .map(|response| response.expect(StatusCode::OK).string("refresh_token").to_owned())
        .collect();
    assert_eq!(tokens.len(), 1, "{tokens:?}");
    let next = tokens.first().unwrap();
    session.refresh(&test_app, next).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_token_two_generations_old_ends_the_session() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let second = session.refresh(&test_app, session.refresh_token()).await.expect(StatusCode::OK);
    let third = session.refresh(&test_app, second.string("refresh_token")).await.expect(StatusCode::OK);
    let stolen = session.refresh(&test_app, session.refresh_token()).await;
    stolen.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    session
        .refresh(&test_app, third.string("refresh_token"))
        .await
        .expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    assert!(!session.is_live(&test_app).await);
}

#[tokio::test]
async fn new_token_generations_are_limited_and_a_refusal_consumes_nothing() {
    let test_app = TestApp::start_with(app().limit("refreshesPerSession", &[(2, 600)])).await;
    let session = Session::open(&test_app).await;
    let second = session.refresh(&test_app, session.refresh_token()).await.expect(StatusCode::OK);
    session.refresh(&test_app, session.refresh_token()).await.expect(StatusCode::OK);
    let third = session.refresh(&test_app, second.string("refresh_token")).await.expect(StatusCode::OK);
    let limited = session.refresh(&test_app, third.string("refresh_token")).await;
    let limited = limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert!(limited.header("retry-after").is_some_and(|seconds| seconds.parse::<u32>().is_ok_and(|s| s > 0)));
    assert!(session.is_live(&test_app).await);
    let again = session.refresh(&test_app, second.string("refresh_token")).await.expect(StatusCode::OK);
    assert_eq!(again.string("refresh_token"), third.string("refresh_token"));
}

#[tokio::test]
async fn revoking_a_token_ends_its_session_and_a_wrong_token_gets_the_same_response() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let path = format!("v1/{}/revoke", test_app.id());
    for wrong_token in ["x", "lkr_AAAA", "a.b.c"] {
        let response = session.client.post(&path, &json!({ "token": wrong_token })).await.expect(StatusCode::OK);
        assert_eq!(response.text, "{}");
    }
    assert!(session.is_live(&test_app).await);
    let form = [("token", session.refresh_token()), ("token_type_hint", "refresh_token")];
    session.client.post_form(&path, &form).await.expect(StatusCode::OK);
    assert!(!session.is_live(&test_app).await);
    session.refresh(&test_app, session.refresh_token()).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");

    let session = Session::open_another(&test_app, session.client).await;
    let body = json!({ "token": session.login.string("token") });
    session.client.post(&path, &body).await.expect(StatusCode::OK);
    assert!(!session.is_live(&test_app).await);
    session.client.post(&path, &json!({})).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn logging_out_while_another_tab_refreshes_ends_the_session() {
    let test_app = TestApp::start().await;
    for _ in 0..5 {
        let client = test_app.client();
        if test_app.stack.mails().to(EMAIL).is_empty() {
            test_app.register(EMAIL).await;
            client.confirm(test_app.id(), &test_app.code(EMAIL, 1).await).await.expect(StatusCode::OK);
        }
        let session = Session::open_another(&test_app, client).await;
        let signed_in = session.client.with_token(test_app.id(), session.login.string("token"));
        let empty_body = json!({});
        let (logout, refreshed) =
            tokio::join!(signed_in.post("logout", &empty_body), session.refresh(&test_app, session.refresh_token()));
        logout.expect(StatusCode::OK);
        let next = match refreshed.status {
            StatusCode::OK => refreshed.string("refresh_token").to_owned(),
            _ => {
                refreshed.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
                session.refresh_token().to_owned()
            }
        };
        session.refresh(&test_app, &next).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
        assert!(!session.is_live(&test_app).await);
    }
}

#[tokio::test]
async fn a_user_can_list_the_sessions_and_end_one_or_all_others() {
    let test_app = TestApp::start().await;
    let first = Session::open(&test_app).await;
    let second = Session::open_another(&test_app, test_app.client()).await;
    let third = Session::open_another(&test_app, test_app.client()).await;
    let signed_in = first.client.with_token(test_app.id(), first.login.string("token"));
    let listed = signed_in.get("sessions").await.expect(StatusCode::OK);
    let sessions = listed.body["sessions"].as_array().unwrap();
    // There are four sessions, because the confirmation has also opened one.
    assert_eq!(sessions.len(), 4, "{}", listed.text);
    let current: Vec<_> = sessions.iter().filter(|session| session["current"] == true).collect();
    assert_eq!(current.len(), 1);
    assert_eq!(current[0]["id"].as_str().unwrap(), first.login.string("session_id"));
    assert_eq!(current[0]["ip"].as_str().unwrap(), first.client.address().to_string());
    assert_eq!(current[0]["amr"], json!(["pwd"]));
    assert!(sessions.iter().any(|session| session["amr"] == json!(["otp"])));
    for time in ["created_at", "last_used_at"] {
        assert!(sessions.iter().all(|session| session[time].as_i64().is_some_and(|at| at > 1_700_000_000)), "{time}");
    }

    signed_in.delete(&format!("sessions/{}", second.login.string("session_id"))).await.expect(StatusCode::OK);
    assert!(!second.is_live(&test_app).await);
    assert!(third.is_live(&test_app).await);
    for unknown in [second.login.string("session_id"), "x", "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00"] {
        signed_in.delete(&format!("sessions/{unknown}")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    signed_in.delete("sessions").await.expect(StatusCode::OK);
    assert!(!third.is_live(&test_app).await);
    assert!(first.is_live(&test_app).await);
    let listed = signed_in.get("sessions").await.expect(StatusCode::OK);
    assert_eq!(listed.body["sessions"].as_array().unwrap().len(), 1);
    signed_in.send(signed_in.request(Method::POST, "logout")).await.expect(StatusCode::OK);
    signed_in.get("sessions").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn another_users_session_cannot_be_ended() {
    let test_app = TestApp::start().await;
    let session = Session::open(&test_app).await;
    let other_client = test_app.client();
    test_app.register("eve@example.com").await;
    let eve = other_client.authenticate(test_app.id(), "eve@example.com", PASSWORD).await;
    let path = format!("sessions/{}", session.login.string("session_id"));
    eve.delete(&path).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    assert!(session.is_live(&test_app).await);
}

#[tokio::test]
async fn a_refresh_needs_redis_but_not_postgres() {
    let app = app();
    let stack = Stack::builder().app(&app).proxied().start().await;
    let test_app = TestApp { stack, app };
    let session = Session::open(&test_app).await;
    let postgres = test_app.stack.postgres_proxy.as_ref().unwrap();
    postgres.refuse().await;
    let next = session.refresh(&test_app, session.refresh_token()).await.expect(StatusCode::OK);
    assert!(session.is_live(&test_app).await);
    let redis = test_app.stack.redis_proxy.as_ref().unwrap();
    redis.refuse().await;
    let unavailable = session.refresh(&test_app, next.string("refresh_token")).await;
    let unavailable = unavailable.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(unavailable.header("retry-after").is_some());
    redis.restore().unwrap();
    eventually("Redis is reached again", LIVE_LIMIT, || async {
        let response = session.refresh(&test_app, next.string("refresh_token")).await;
        match response.status {
            StatusCode::OK => Some(()),
            StatusCode::SERVICE_UNAVAILABLE => None,
            _ => panic!("unexpected response: {}", response.text),
        }
    })
    .await;
    postgres.restore().unwrap();
}

#[tokio::test]
async fn a_refresh_calls_redis_once() {
    const TIMES: u64 = 20;
    let app = app();
    let stack = Stack::builder().app(&app).own_redis(redis::Options::for_tests()).start().await;
    let test_app = TestApp { stack, app };
    let session = Session::open(&test_app).await;
    let calls = async || {
        let mut connection = test_app.stack.redis().connect().await.unwrap();
        let stats: String = ::redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")).unwrap().to_owned();
        line.split(',').next().unwrap().parse::<u64>().unwrap()
    };
    let mut token = session.refresh_token().to_owned();
    let before = calls().await;
    for _ in 0..TIMES {
        let response = session.refresh(&test_app, &token).await.expect(StatusCode::OK);
        token = response.string("refresh_token").to_owned();
    }
    assert_eq!(calls().await - before, TIMES);
}

#[tokio::test]
async fn only_the_100_most_recently_used_of_150_sessions_stay() {
    const MAX_SESSIONS: usize = 100;
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(1000, 60)])).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let mut logins = Vec::new();
    for number in 0..150 {
        logins.push(client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK));
        if number == 60 {
            // The first session is used again.
            client.refresh(test_app.id(), logins[0].string("refresh_token")).await.expect(StatusCode::OK);
        }
    }
    let id = |login: &ApiResponse| login.string("session_id").to_owned();
    // The newest 99 sessions, and the first session, because it was used after the 61st login.
    let expected: BTreeSet<String> = logins[51..].iter().chain(&logins[..1]).map(id).collect();
    assert_eq!(expected.len(), MAX_SESSIONS);
    let newest = client.with_token(test_app.id(), logins[149].string("token"));
    let listed = newest.get("sessions").await.expect(StatusCode::OK);
    let listed: BTreeSet<String> =
        listed.body["sessions"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(listed, expected);
    for login in &logins {
        let response = client.with_token(test_app.id(), login.string("token")).get("user").await;
        let wanted = if expected.contains(&id(login)) { StatusCode::OK } else { StatusCode::UNAUTHORIZED };
        assert_eq!(response.status, wanted, "{}", response.text);
    }
    for ended in [1, 25, 50] {
        let response = client.refresh(test_app.id(), logins[ended].string("refresh_token")).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    }
}
