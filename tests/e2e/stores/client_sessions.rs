//! Sessions of OpenID Connect clients: which calls open and end them, and how many a user can have. They are not
//! sessions of the App.

use latchkey_server::{
    domain::{
        mail::EpochChange,
        openid::{
            claims_request::{ClaimSet, RequestedClaims, UserClaim},
            client_session::{ClientGrant, ClientSession, NewClientSession, SessionUse},
            scope::Scopes,
        },
        ports::{ClientSessions, Sessions},
        session::{
            Amr, NO_REFRESH_TOKEN, NewSession, OpenOutcome, Profile, RefreshKind, RefreshOutcome, RefreshRules,
            SessionId, SessionKind,
        },
        token::RefreshToken,
        user::{Epoch, UserId},
    },
    store::Stores,
};
use latchkey_tests::redis;
use time::Duration;
use uuid::Uuid;

use super::{Fixture, a_user_id, an_app, now};

const IDLE_SECONDS: u32 = 3600;
const SCOPES: &str = "openid profile";

fn a_session_id() -> SessionId {
    SessionId(Uuid::from_u128(rand::random()))
}

fn a_profile() -> Profile {
    Profile { version: 1, email: Some("ada@example.com".to_owned()), email_verified: true, name: "Ada".to_owned() }
}

/// Opens a browser session, which ends after `IDLE_SECONDS` without a use.
async fn open_browser(fixture: &Fixture, user: UserId, epoch: i64) -> SessionId {
    let session = NewSession {
        kind: Some(SessionKind::Browser),
        id: a_session_id(),
        user,
        epoch: Epoch(epoch),
        profile: a_profile(),
        amr: Amr::Password,
        auth_time: now(),
        ip: "192.0.2.1".to_owned(),
        user_agent: Some("Firefox".to_owned()),
        ends_at: now() + Duration::hours(30),
        idle_seconds: IDLE_SECONDS,
    };
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::Opened);
    session.id
}

fn a_client_session(user: UserId, browser: SessionId, scopes: &str) -> NewClientSession {
    let scopes = Scopes::parse_known(scopes);
    NewClientSession {
        id: a_session_id(),
        user,
        epoch: Epoch(1),
        grant: ClientGrant {
            client_uid: "uid-1".to_owned(),
            client_id: "tests.grafana".to_owned(),
            scopes,
            claims: RequestedClaims { id_token: ClaimSet::NONE.with(UserClaim::Email), ..RequestedClaims::default() },
            browser_session: browser,
            ends_with_browser: !scopes.to_string().contains("offline_access"),
        },
        amr: Amr::Federated,
        auth_time: now(),
        ip: "192.0.2.1".to_owned(),
        user_agent: Some("Firefox".to_owned()),
        ends_at: now() + Duration::hours(20),
        idle_seconds: 10 * IDLE_SECONDS,
        has_refresh_token: true,
    }
}

async fn open(fixture: &Fixture, session: &NewClientSession) {
    let opened = fixture.stores.open_client_session(&fixture.app, session).await.unwrap();
    assert_eq!(opened, OpenOutcome::Opened);
}

/// Opens sessions 10 ms after each other, so that their order of use is certain.
async fn open_one_by_one(fixture: &Fixture, sessions: &[NewClientSession]) {
    for (number, session) in (0_i64..).zip(sessions) {
        let stores = fixture.with_later_clock(Duration::milliseconds(10 * number)).await;
        let opened = stores.open_client_session(&fixture.app, session).await.unwrap();
        assert_eq!(opened, OpenOutcome::Opened);
    }
}

async fn find(stores: &Stores, fixture: &Fixture, session: &NewClientSession) -> Option<ClientSession> {
    stores.client_session(&fixture.app, session.user, session.id, SessionUse::Counted).await.unwrap()
}

async fn is_live(fixture: &Fixture, session: &NewClientSession) -> bool {
    find(&fixture.stores, fixture, session).await.is_some()
}

async fn refresh(stores: &Stores, fixture: &Fixture, session: &NewClientSession, generation: u64) -> RefreshOutcome {
    let token = RefreshToken { user: session.user, session: session.id, generation };
    let rules = RefreshRules { grace_seconds: 30, windows: Vec::new() };
    stores.refresh_client_session(&fixture.app, &token, &session.grant, &rules).await.unwrap()
}

fn is_rotated(outcome: &RefreshOutcome) -> bool {
    matches!(outcome, RefreshOutcome::Renewed(RefreshKind::Rotated, _))
}

#[tokio::test]
async fn a_client_session_is_found_with_its_grant_and_is_no_session_of_the_app() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let new = a_client_session(user, browser, SCOPES);
    open(&fixture, &new).await;
    let found = find(&fixture.stores, &fixture, &new).await.unwrap();
    assert_eq!((&found.grant, &found.profile), (&new.grant, &a_profile()));
    assert_eq!((found.session.generation, found.session.amr), (1, Amr::Federated));
    let stores = &fixture.stores;
    assert!(stores.session(&fixture.app, user, new.id).await.unwrap().is_none());
    assert!(stores.browser_session(&fixture.app, user, new.id, None).await.unwrap().is_none());
    assert!(stores.client_session(&fixture.app, user, browser, SessionUse::Counted).await.unwrap().is_none());
    assert!(stores.client_session(&an_app(), user, new.id, SessionUse::Counted).await.unwrap().is_none());
    let token = RefreshToken { user, session: new.id, generation: 1 };
    let rules = RefreshRules { grace_seconds: 30, windows: Vec::new() };
    assert_eq!(stores.refresh(&fixture.app, &token, &rules).await.unwrap(), RefreshOutcome::NotFound);
    assert!(is_live(&fixture, &new).await);
}

#[tokio::test]
async fn a_session_ends_with_its_browser_session_unless_it_is_offline() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let bound = a_client_session(user, browser, SCOPES);
    let offline = a_client_session(user, browser, "openid offline_access");
    open(&fixture, &bound).await;
    open(&fixture, &offline).await;
    assert!(fixture.stores.end_session(&fixture.app, user, browser).await.unwrap());
    assert_eq!(refresh(&fixture.stores, &fixture, &bound, 1).await, RefreshOutcome::NotFound);
    assert!(!is_live(&fixture, &bound).await);
    assert!(is_rotated(&refresh(&fixture.stores, &fixture, &offline, 1).await));
    assert!(is_live(&fixture, &offline).await);
    let listed = fixture.stores.sessions(&fixture.app, user).await.unwrap();
    assert_eq!(listed.iter().map(|info| info.id).collect::<Vec<_>>(), [offline.id]);
}

#[tokio::test]
async fn each_refresh_keeps_the_browser_session_alive_and_a_lookup_does_not() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let session = a_client_session(user, browser, SCOPES);
    open(&fixture, &session).await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    for generation in 1..4_u32 {
        let later = fixture.with_later_clock(idle / 2 * i32::try_from(generation).unwrap()).await;
        assert!(is_rotated(&refresh(&later, &fixture, &session, generation.into()).await), "{generation}");
    }
    let used_until = idle / 2 * 3 + idle;
    let almost = fixture.with_later_clock(used_until - Duration::minutes(2)).await;
    assert!(find(&almost, &fixture, &session).await.is_some());
    let after = fixture.with_later_clock(used_until + Duration::minutes(2)).await;
    assert!(find(&after, &fixture, &session).await.is_none(), "the lookup did not keep the browser session alive");
}

#[tokio::test]
async fn a_raised_epoch_ends_all_client_sessions_even_if_it_keeps_the_browser_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let bound = a_client_session(user, browser, SCOPES);
    let offline = a_client_session(user, browser, "openid offline_access");
    let unlisted = NewClientSession { has_refresh_token: false, ..a_client_session(user, browser, SCOPES) };
    for session in [&bound, &offline, &unlisted] {
        open(&fixture, session).await;
    }
    let change = EpochChange { user, epoch: Epoch(2), kept_session: Some(browser) };
    fixture.stores.raise_epoch(&fixture.app, &change, Some(&a_profile())).await.unwrap();
    assert!(fixture.stores.browser_session(&fixture.app, user, browser, None).await.unwrap().is_some());
    for session in [&bound, &offline, &unlisted] {
        assert!(!is_live(&fixture, session).await);
        assert_eq!(refresh(&fixture.stores, &fixture, session, 1).await, RefreshOutcome::NotFound);
    }
    assert!(fixture.stores.client_sessions(&fixture.app, user).await.unwrap().is_empty());
    let stale = fixture.stores.open_client_session(&fixture.app, &a_client_session(user, browser, SCOPES)).await;
    assert_eq!(stale.unwrap(), OpenOutcome::EpochRaised, "a login before the epoch was raised");
}

#[tokio::test]
async fn a_reused_refresh_token_ends_the_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let session = a_client_session(user, browser, SCOPES);
    open(&fixture, &session).await;
    for generation in 1..3 {
        assert!(is_rotated(&refresh(&fixture.stores, &fixture, &session, generation).await));
    }
    let repeated = refresh(&fixture.stores, &fixture, &session, 2).await;
    assert!(matches!(repeated, RefreshOutcome::Renewed(RefreshKind::Repeated, _)), "{repeated:?}");
    assert_eq!(refresh(&fixture.stores, &fixture, &session, 1).await, RefreshOutcome::ReuseDetected);
    assert!(!is_live(&fixture, &session).await);
    assert!(fixture.stores.browser_session(&fixture.app, user, browser, None).await.unwrap().is_some());
}

#[tokio::test]
async fn a_session_without_a_refresh_token_is_in_no_list_and_cannot_be_refreshed() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let session = NewClientSession {
        has_refresh_token: false,
        ends_at: now() + Duration::minutes(15),
        idle_seconds: 900,
        ..a_client_session(user, browser, SCOPES)
    };
    open(&fixture, &session).await;
    assert!(is_live(&fixture, &session).await);
    let listed = fixture.stores.sessions(&fixture.app, user).await.unwrap();
    assert_eq!(listed.iter().map(|info| info.id).collect::<Vec<_>>(), [browser]);
    assert!(fixture.stores.client_sessions(&fixture.app, user).await.unwrap().is_empty());
    for generation in [0, 1, 2, NO_REFRESH_TOKEN - 2] {
        let outcome = refresh(&fixture.stores, &fixture, &session, generation).await;
        assert!(!matches!(outcome, RefreshOutcome::Renewed(..)), "{generation}: {outcome:?}");
        open(&fixture, &session).await;
    }
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{}:{user}}}:client-session:{}", fixture.app, session.id);
    let ttl: i64 = ::redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
    assert!((1..=960).contains(&ttl), "{ttl}");
    let end = fixture.with_later_clock(Duration::minutes(16)).await;
    assert!(find(&end, &fixture, &session).await.is_none());
}

#[tokio::test]
async fn only_the_least_recently_used_session_of_the_same_client_ends_at_the_limit() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let sessions: Vec<_> = (0..20).map(|_| a_client_session(user, browser, SCOPES)).collect();
    open_one_by_one(&fixture, &sessions).await;
    let mut other = a_client_session(user, browser, SCOPES);
    other.grant.client_uid = "uid-2".to_owned();
    open(&fixture, &other).await;
    // The first session is used again, so the second one is the least recently used.
    let later = fixture.with_later_clock(Duration::seconds(5)).await;
    assert!(is_rotated(&refresh(&later, &fixture, &sessions[0], 1).await));
    let newest = a_client_session(user, browser, SCOPES);
    assert_eq!(later.open_client_session(&fixture.app, &newest).await.unwrap(), OpenOutcome::Opened);
    assert!(!is_live(&fixture, &sessions[1]).await);
    for live in sessions.iter().skip(2).chain([&sessions[0], &other, &newest]) {
        assert!(is_live(&fixture, live).await);
    }
    assert_eq!(fixture.stores.client_sessions(&fixture.app, user).await.unwrap().len(), 21);
    assert!(fixture.stores.browser_session(&fixture.app, user, browser, None).await.unwrap().is_some());
}

#[tokio::test]
async fn a_user_has_at_most_100_client_sessions() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let of_client = |number: usize| {
        let mut session = a_client_session(user, browser, SCOPES);
        session.grant.client_uid = format!("uid-{}", number % 10);
        session
    };
    let sessions: Vec<_> = (0..101).map(of_client).collect();
    open_one_by_one(&fixture, &sessions).await;
    assert!(!is_live(&fixture, &sessions[0]).await && is_live(&fixture, &sessions[1]).await);
    assert_eq!(fixture.stores.client_sessions(&fixture.app, user).await.unwrap().len(), 100);
    assert!(fixture.stores.browser_session(&fixture.app, user, browser, None).await.unwrap().is_some());
}

#[tokio::test]
async fn client_sessions_are_listed_and_ended_with_the_other_sessions_of_the_user() {
    let fixture = Fixture::new().await;
    let (user, stranger) = (a_user_id(), a_user_id());
    let browser = open_browser(&fixture, user, 1).await;
    let session = a_client_session(user, browser, SCOPES);
    open(&fixture, &session).await;
    let listed = fixture.stores.sessions(&fixture.app, user).await.unwrap();
    let of_client = listed.iter().find(|info| info.id == session.id).unwrap();
    assert_eq!((of_client.client_id.as_deref(), of_client.kind), (Some("tests.grafana"), None));
    assert_eq!((of_client.ip.as_str(), of_client.user_agent.as_deref()), ("192.0.2.1", Some("Firefox")));
    assert!(!fixture.stores.end_session(&fixture.app, stranger, session.id).await.unwrap());
    assert!(fixture.stores.end_session(&fixture.app, user, session.id).await.unwrap());
    assert!(!fixture.stores.end_session(&fixture.app, user, session.id).await.unwrap());
    assert!(!is_live(&fixture, &session).await);

    let session = a_client_session(user, browser, "openid offline_access");
    open(&fixture, &session).await;
    let ended = fixture.stores.end_other_sessions(&fixture.app, user, browser).await.unwrap();
    assert_eq!(ended, [session.id]);
    assert!(!is_live(&fixture, &session).await);
    assert!(fixture.stores.browser_session(&fixture.app, user, browser, None).await.unwrap().is_some());
}

#[tokio::test]
async fn the_sessions_of_one_client_can_be_ended() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let (session, mut other) = (a_client_session(user, browser, SCOPES), a_client_session(user, browser, SCOPES));
    other.grant.client_uid = "uid-2".to_owned();
    open(&fixture, &session).await;
    open(&fixture, &other).await;
    let ended = fixture.stores.end_client_sessions(&fixture.app, user, "uid-1").await.unwrap();
    assert_eq!(ended, [session.id]);
    assert!(!is_live(&fixture, &session).await && is_live(&fixture, &other).await);
    let listed = fixture.stores.client_sessions(&fixture.app, user).await.unwrap();
    assert_eq!(listed.iter().map(|listed| listed.client_uid.as_str()).collect::<Vec<_>>(), ["uid-2"]);
    assert_eq!(listed[0].scopes, Scopes::parse_known(SCOPES));
}

#[tokio::test]
async fn a_lookup_that_does_not_count_as_a_use_does_not_prolong_the_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let browser = open_browser(&fixture, user, 1).await;
    let session =
        NewClientSession { idle_seconds: IDLE_SECONDS, ..a_client_session(user, browser, "openid offline_access") };
    open(&fixture, &session).await;
    let half = fixture.with_later_clock(Duration::seconds(IDLE_SECONDS.into()) / 2).await;
    let found = half.client_session(&fixture.app, user, session.id, SessionUse::NotCounted).await.unwrap();
    assert!(found.is_some());
    let after_idle_time = fixture.with_later_clock(Duration::seconds(i64::from(IDLE_SECONDS) + 60)).await;
    assert!(find(&after_idle_time, &fixture, &session).await.is_none());
}
