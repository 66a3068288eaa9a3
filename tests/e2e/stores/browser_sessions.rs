//! Browser sessions: which calls open, keep and end them. No token works for them, and older servers tolerate them.

use std::net::{IpAddr, Ipv4Addr};

use latchkey_server::{
    domain::{
        app::App,
        authentication::{AuthenticatedSession, AuthenticationError},
        call::Call,
        client::ClientInfo,
        clock::Env,
        email_account::{self, LoginError, LoginInput},
        error::CommonError,
        mail::EpochChange,
        pages::{
            self, BrowserId, BrowserLogin, BrowserSessionTimes, SessionCookie, SocialPurpose, SocialState,
            open_returned_login, start_social_login,
        },
        password::Password,
        ports::{NewUser, PasswordHasher, Replication, Sessions, StoreFlowError, Users},
        session::{
            Amr, NO_REFRESH_TOKEN, NewSession, OpenOutcome, Profile, RefreshOutcome, RefreshRules, SessionId,
            SessionKind,
        },
        sessions::{self, RefreshError},
        token::{self, RefreshToken},
        user::{Epoch, UserId},
    },
    store::Stores,
};
use latchkey_tests::redis;
use time::Duration;
use uuid::Uuid;

use super::{Fixture, a_new_user, a_user_id, an_email, codes::loaded_app, now};

const IDLE_SECONDS: u32 = 3600;
const TIMES: BrowserSessionTimes = BrowserSessionTimes { idle_seconds: IDLE_SECONDS, lifetime_seconds: 3 * 3600 };
const PASSWORD: &str = "correct horse battery staple";

/// One App, and one client that calls it.
struct PagesFixture {
    fixture: Fixture,
    app: App,
    env: Env,
    client: ClientInfo,
}

impl PagesFixture {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let app = loaded_app(&fixture);
        let client = ClientInfo { ip: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), user_agent: Some("Firefox".to_owned()) };
        Self { fixture, app, env: Env::system(), client }
    }

    fn call(&self) -> Call<'_, Stores> {
        self.call_at(&self.fixture.stores)
    }

    /// A call with other stores, for example with a later clock of Redis.
    fn call_at<'a>(&'a self, stores: &'a Stores) -> Call<'a, Stores> {
        Call { stores, env: &self.env, app: &self.app, client: &self.client }
    }

    /// Opens the browser session of a login. Returns `None` if the epoch has risen.
    async fn try_log_in(&self, login: BrowserLogin, previous: Option<SessionCookie>) -> Option<SessionCookie> {
        pages::open_browser_session(self.call(), login, previous, TIMES).await.unwrap()
    }

    async fn log_in(&self, user: UserId, previous: Option<SessionCookie>) -> SessionCookie {
        self.try_log_in(a_login(user, 1), previous).await.unwrap()
    }

    async fn find(&self, cookie: &SessionCookie) -> Option<AuthenticatedSession> {
        pages::find_session(self.call(), cookie).await.unwrap()
    }

    async fn is_live_after(&self, cookie: &SessionCookie, time: Duration) -> bool {
        let stores = self.fixture.with_later_clock(time).await;
        pages::find_session(self.call_at(&stores), cookie).await.unwrap().is_some()
    }

    async fn raise_epoch(&self, user: UserId, epoch: i64, keep: Option<SessionCookie>) {
        let change = EpochChange { user, epoch: Epoch(epoch), kept_session: keep.map(|cookie| cookie.session) };
        let raised = self.fixture.stores.raise_epoch(&self.fixture.app, &change, Some(&a_profile())).await.unwrap();
        assert_eq!(raised, Replication::Complete, "there is no replica");
    }

    async fn open_app_session(&self, user: UserId) -> NewSession {
        let session = an_app_session(user);
        let opened = self.fixture.stores.open_session(&self.fixture.app, &session).await.unwrap();
        assert_eq!(opened, OpenOutcome::Opened);
        session
    }

    fn session_key(&self, cookie: &SessionCookie) -> String {
        format!("lk:{{{}:{}}}:session:{}", self.fixture.app, cookie.user, cookie.session)
    }
}

fn a_profile() -> Profile {
    Profile { version: 1, email: Some("ada@example.com".to_owned()), email_verified: true, name: "Ada".to_owned() }
}

fn a_login(user: UserId, epoch: i64) -> BrowserLogin {
    BrowserLogin {
        user,
        epoch: Epoch(epoch),
        profile: a_profile(),
        amr: Amr::Password,
        auth_time: now(),
        session: None,
    }
}

fn an_app_session(user: UserId) -> NewSession {
    NewSession {
        kind: None,
        id: SessionId(Uuid::from_u128(rand::random())),
        user,
        epoch: Epoch(1),
        profile: a_profile(),
        amr: Amr::Password,
        auth_time: now(),
        ip: "192.0.2.1".to_owned(),
        user_agent: None,
        ends_at: now() + Duration::hours(3),
        idle_seconds: IDLE_SECONDS,
    }
}

#[tokio::test]
async fn a_login_opens_a_browser_session_that_only_its_cookie_finds() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let cookie = pages.log_in(user, None).await;
    let found = pages.find(&cookie).await.unwrap();
    assert_eq!((found.session.id, found.session.user, found.session.epoch), (cookie.session, user, Epoch(1)));
    assert_eq!((found.session.kind(), found.session.amr), (Some(SessionKind::Browser), Amr::Password));
    assert_eq!(found.profile, a_profile());
    assert!(pages.find(&SessionCookie { user: a_user_id(), ..cookie }).await.is_none());
    let app_session = pages.open_app_session(user).await;
    let as_browser = SessionCookie { session: app_session.id, ..cookie };
    assert!(pages.find(&as_browser).await.is_none(), "a session of the App is no browser session");
}

#[tokio::test]
async fn a_second_login_of_the_same_user_keeps_the_session_and_changes_its_login_time_and_method() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let first_login = BrowserLogin { auth_time: now() - Duration::hours(1), ..a_login(user, 1) };
    let first = pages.try_log_in(first_login.clone(), None).await.unwrap();
    let before = pages.find(&first).await.unwrap().session;
    let second_login = BrowserLogin { amr: Amr::Federated, ..a_login(user, 1) };
    let second = pages.try_log_in(second_login.clone(), Some(first)).await.unwrap();
    assert_eq!(second.session, first.session);
    let after = pages.find(&second).await.unwrap().session;
    assert_eq!((before.amr, after.amr), (Amr::Password, Amr::Federated));
    assert_eq!(before.auth_time.unix_timestamp(), first_login.auth_time.unix_timestamp());
    assert_eq!(after.auth_time.unix_timestamp(), second_login.auth_time.unix_timestamp());
    // A copy of the first cookie is not valid after the second login.
    assert!(pages.find(&first).await.is_none());
    assert_eq!(pages.fixture.stores.sessions(&pages.fixture.app, user).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_second_login_restarts_the_lifetime_and_the_idle_time() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let first_login = BrowserLogin { auth_time: now() - Duration::hours(2), ..a_login(user, 1) };
    let first = pages.try_log_in(first_login, None).await.unwrap();
    let second = pages.log_in(user, Some(first)).await;
    // Without the second login, the session would end after an hour. Each lookup is a use.
    for minutes in [45, 90, 135, 175] {
        assert!(pages.is_live_after(&second, Duration::minutes(minutes)).await, "after {minutes} min");
    }
    assert!(!pages.is_live_after(&second, Duration::minutes(181)).await);
}

#[tokio::test]
async fn a_session_that_has_ended_does_not_come_back_with_its_id() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let first = pages.log_in(user, None).await;
    sessions::log_out(pages.call(), &pages.find(&first).await.unwrap()).await.unwrap();
    assert!(pages.find(&first).await.is_none());
    let second = pages.log_in(user, Some(first)).await;
    assert_ne!(second.session, first.session);
    assert!(pages.find(&first).await.is_none());
    // A session of an older epoch has ended, even if Redis does not have the epoch yet.
    let third = pages.try_log_in(a_login(user, 2), Some(second)).await.unwrap();
    assert_ne!(third.session, second.session);
    assert!(pages.find(&second).await.is_none());
    assert!(pages.find(&third).await.is_some());
}

#[tokio::test]
async fn a_login_by_another_user_ends_only_the_session_in_this_browser() {
    let pages = PagesFixture::new().await;
    let (ada, eve) = (a_user_id(), a_user_id());
    let (here, elsewhere) = (pages.log_in(ada, None).await, pages.log_in(ada, None).await);
    let tokens = pages.open_app_session(ada).await;
    let cookie = pages.log_in(eve, Some(here)).await;
    assert_ne!(cookie.session, here.session);
    assert!(pages.find(&here).await.is_none());
    assert!(pages.find(&elsewhere).await.is_some());
    assert!(pages.find(&cookie).await.is_some());
    let live = pages.fixture.stores.session(&pages.fixture.app, ada, tokens.id).await.unwrap();
    assert!(live.is_some(), "sessions with tokens continue");
}

#[tokio::test]
async fn a_replaced_cookie_neither_ends_nor_renews_the_session() {
    let pages = PagesFixture::new().await;
    let (ada, eve) = (a_user_id(), a_user_id());
    let first_login = BrowserLogin { auth_time: now() - Duration::minutes(10), ..a_login(ada, 1) };
    let stolen = pages.try_log_in(first_login, None).await.unwrap();
    let current = pages.log_in(ada, Some(stolen)).await;
    assert_eq!(current.session, stolen.session);

    // A login with the replaced cookie does not end the session, and does not make the cookie valid again.
    pages.log_in(eve, Some(stolen)).await;
    assert!(pages.find(&current).await.is_some());
    let other = pages.log_in(ada, Some(stolen)).await;
    assert_ne!(other.session, stolen.session);
    assert!(pages.find(&stolen).await.is_none());

    // A request with the replaced cookie does not count as a use of the session.
    let idle = Duration::seconds(IDLE_SECONDS.into());
    assert!(!pages.is_live_after(&stolen, idle / 2).await);
    assert!(!pages.is_live_after(&current, idle + Duration::minutes(1)).await);
}

#[tokio::test]
async fn a_login_that_opens_no_session_ends_none() {
    let pages = PagesFixture::new().await;
    let (ada, eve) = (a_user_id(), a_user_id());
    let here = pages.log_in(ada, None).await;
    pages.raise_epoch(eve, 2, None).await;
    assert!(pages.try_log_in(a_login(eve, 1), Some(here)).await.is_none());
    assert!(pages.find(&here).await.is_some());
}

#[tokio::test]
async fn a_renewal_never_changes_a_session_of_the_app() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let app_session = pages.open_app_session(user).await;
    let stores = &pages.fixture.stores;
    let renewed = NewSession { kind: Some(SessionKind::Browser), amr: Amr::Code, ..app_session.clone() };
    assert!(!stores.renew_browser_session(&pages.fixture.app, &renewed).await.unwrap());
    let live = stores.session(&pages.fixture.app, user, app_session.id).await.unwrap().unwrap();
    assert_eq!((live.session.amr, live.session.generation), (Amr::Password, 1));
}

#[tokio::test]
async fn a_browser_session_ends_when_idle_and_at_the_end_of_its_lifetime() {
    let pages = PagesFixture::new().await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    let cookie = pages.log_in(a_user_id(), None).await;
    assert!(pages.is_live_after(&cookie, idle / 2).await);
    assert!(pages.is_live_after(&cookie, idle + Duration::minutes(20)).await, "a lookup is a use");
    assert!(!pages.is_live_after(&cookie, idle * 2 + Duration::minutes(21)).await);
    assert!(pages.find(&cookie).await.is_none(), "ended for good");

    let cookie = pages.log_in(a_user_id(), None).await;
    for minutes in (30..180).step_by(30) {
        assert!(pages.is_live_after(&cookie, Duration::minutes(minutes)).await, "after {minutes} min");
    }
    assert!(!pages.is_live_after(&cookie, Duration::minutes(181)).await);
}

#[tokio::test]
async fn a_raised_epoch_ends_browser_sessions_except_the_one_that_made_the_change() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let (kept, ended) = (pages.log_in(user, None).await, pages.log_in(user, None).await);
    pages.raise_epoch(user, 2, Some(kept)).await;
    assert!(pages.find(&ended).await.is_none());
    let found = pages.find(&kept).await.unwrap().session;
    assert_eq!((found.epoch, found.kind()), (Epoch(2), Some(SessionKind::Browser)));
    // A login that read the password before the change opens nothing, and leaves the session as it is.
    assert!(pages.try_log_in(a_login(user, 1), Some(kept)).await.is_none());
    assert!(pages.try_log_in(a_login(user, 1), None).await.is_none());
    assert_eq!(pages.fixture.stores.sessions(&pages.fixture.app, user).await.unwrap().len(), 1);
    pages.raise_epoch(user, 3, None).await;
    assert!(pages.find(&kept).await.is_none());
}

#[tokio::test]
async fn a_user_has_at_most_100_browser_sessions_and_app_sessions_together() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let oldest = pages.log_in(user, None).await;
    for number in 1..100 {
        let stores = pages.fixture.with_later_clock(Duration::seconds(number)).await;
        let opened = stores.open_session(&pages.fixture.app, &an_app_session(user)).await.unwrap();
        assert_eq!(opened, OpenOutcome::Opened);
    }
    let count = async |stores: &Stores| stores.sessions(&pages.fixture.app, user).await.unwrap().len();
    assert_eq!(count(&pages.fixture.stores).await, 100);
    let later = pages.fixture.with_later_clock(Duration::minutes(5)).await;
    let login = pages::open_browser_session(pages.call_at(&later), a_login(user, 1), None, TIMES).await.unwrap();
    assert_eq!(count(&later).await, 100);
    assert!(pages.find(&oldest).await.is_none(), "the least recently used session");
    let newest = login.unwrap();
    // A second login that renews a session opens no further session.
    pages::open_browser_session(pages.call_at(&later), a_login(user, 1), Some(newest), TIMES).await.unwrap().unwrap();
    assert_eq!(count(&later).await, 100);
}

#[tokio::test]
async fn the_list_shows_the_kind_of_a_session_and_a_browser_session_can_be_ended_there() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let (stores, app) = (&pages.fixture.stores, &pages.fixture.app);
    let tokens = pages.open_app_session(user).await;
    let (here, elsewhere) = (pages.log_in(user, None).await, pages.log_in(user, None).await);
    let signed_in = pages.find(&here).await.unwrap();
    let listed = sessions::list_sessions(pages.call(), &signed_in).await.unwrap();
    let mut kinds: Vec<_> = listed.iter().map(|info| (info.id.0, info.kind)).collect();
    kinds.sort_by_key(|(id, _)| *id);
    let browser = Some(SessionKind::Browser);
    let mut expected = [(tokens.id.0, None), (here.session.0, browser), (elsewhere.session.0, browser)];
    expected.sort_by_key(|(id, _)| *id);
    assert_eq!(kinds, expected);
    let info = listed.iter().find(|info| info.id == here.session).unwrap();
    assert_eq!((info.ip.as_str(), info.user_agent.as_deref()), ("192.0.2.1", Some("Firefox")));
    assert!(sessions::end_session(pages.call(), &signed_in, elsewhere.session).await.unwrap());
    assert!(pages.find(&elsewhere).await.is_none());
    sessions::end_other_sessions(pages.call(), &signed_in).await.unwrap();
    assert!(stores.session(app, user, tokens.id).await.unwrap().is_none());
    assert!(pages.find(&here).await.is_some());
}

#[tokio::test]
async fn neither_an_access_token_nor_a_refresh_token_works_for_a_browser_session() {
    let pages = PagesFixture::new().await;
    let cookie = pages.log_in(a_user_id(), None).await;
    let found = pages.find(&cookie).await.unwrap();
    // The service never issues such tokens. They have valid signatures.
    let tokens = token::issue_tokens(&pages.app, &pages.env, &found.profile, &found.session).unwrap();
    let bearer = AuthenticatedSession::authenticate(pages.call(), &tokens.access_token).await;
    assert!(matches!(bearer, Err(AuthenticationError::InvalidToken)), "{bearer:?}");
    for token in [&tokens.access_token, &tokens.refresh_token] {
        assert!(sessions::introspect(pages.call(), token).await.unwrap().is_none());
    }
    let refreshed = sessions::refresh(pages.call(), &tokens.refresh_token).await;
    assert!(matches!(refreshed, Err(RefreshError::InvalidGrant)));
    assert!(pages.find(&cookie).await.is_some(), "nothing has changed");

    // No refresh token can have the generation of a browser session.
    for generation in [1, 2, NO_REFRESH_TOKEN - 2] {
        let cookie = pages.log_in(a_user_id(), None).await;
        let token = RefreshToken { user: cookie.user, session: cookie.session, generation };
        let rules = RefreshRules { grace_seconds: 300, windows: Vec::new() };
        let outcome = pages.fixture.stores.refresh(&pages.fixture.app, &token, &rules).await.unwrap();
        assert_eq!(outcome, RefreshOutcome::ReuseDetected, "generation {generation}");
    }
}

/// The script list_sessions.lua of the last version without browser sessions. The other scripts of that version that
/// read sessions are the same as today.
const PREVIOUS_LIST_SCRIPT: &str = "
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local sessions = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local s = redis.call('HMGET', ARGV[2] .. id, 'epoch', 'created', 'used', 'ip', 'user_agent', 'amr', 'ends', 'idle')
  if s[1] and tonumber(s[1]) >= epoch and now < tonumber(s[7]) and now < tonumber(s[3]) + tonumber(s[8]) then
    table.insert(sessions, {id, s[2], s[3], s[4], s[5], s[6]})
  end
end
table.sort(sessions, function(a, b) return tonumber(a[3]) > tonumber(b[3]) end)
return sessions";

#[tokio::test]
async fn the_previous_version_of_the_server_tolerates_a_browser_session() {
    let pages = PagesFixture::new().await;
    let user = a_user_id();
    let cookie = pages.log_in(user, None).await;
    let app = &pages.fixture.app;
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let user_key = format!("lk:{{{app}:{user}}}");
    let rows: Vec<Vec<String>> = ::redis::cmd("EVAL")
        .arg(PREVIOUS_LIST_SCRIPT)
        .arg(2)
        .arg(format!("{user_key}:user"))
        .arg(format!("{user_key}:sessions"))
        .arg(0)
        .arg(format!("{user_key}:session:"))
        .query_async(&mut redis)
        .await
        .unwrap();
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((row.len(), row[0].as_str(), row[5].as_str()), (6, cookie.session.to_string().as_str(), "pwd"));
    // The previous version parses the generation as a number, and accepts only numbers that Lua represents exactly.
    let generation: u64 =
        ::redis::cmd("HGET").arg(pages.session_key(&cookie)).arg("n").query_async(&mut redis).await.unwrap();
    assert_eq!(generation, NO_REFRESH_TOKEN);

    // A session that the previous version has opened has no field `kind`, and stays a session of the App.
    let app_session = pages.open_app_session(user).await;
    let key = format!("{user_key}:session:{}", app_session.id);
    let has_kind: bool = ::redis::cmd("HEXISTS").arg(key).arg("kind").query_async(&mut redis).await.unwrap();
    assert!(!has_kind);
}

#[tokio::test]
async fn a_session_of_a_kind_that_only_newer_servers_know_is_listed_without_a_kind() {
    let pages = PagesFixture::new().await;
    let cookie = pages.log_in(a_user_id(), None).await;
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let _: i64 = ::redis::cmd("HSET")
        .arg(pages.session_key(&cookie))
        .arg("kind")
        .arg("device")
        .query_async(&mut redis)
        .await
        .unwrap();
    let listed = pages.fixture.stores.sessions(&pages.fixture.app, cookie.user).await.unwrap();
    assert_eq!(listed.iter().map(|info| info.kind).collect::<Vec<_>>(), [None]);
}

#[tokio::test]
async fn all_keys_of_a_browser_session_expire_in_redis() {
    let pages = PagesFixture::new().await;
    let cookie = pages.log_in(a_user_id(), None).await;
    pages.log_in(cookie.user, Some(cookie)).await;
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let pattern = format!("lk:{{{}:{}}}:*", pages.fixture.app, cookie.user);
    let keys: Vec<String> = ::redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in keys {
        let ttl: i64 = ::redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(ttl > 0, "{key} has a TTL of {ttl} s");
    }
}

#[tokio::test]
async fn failures_of_the_login_page_and_of_the_json_login_count_for_the_same_limit() {
    let pages = PagesFixture::new().await;
    let address = pages.client.client_address();
    let password_hash = pages.fixture.stores.hash(&pages.app, address, &Password::new(PASSWORD)).await.unwrap();
    let user = NewUser { password_hash, ..a_new_user("ada@example.com") };
    let id = user.id;
    pages.fixture.stores.create_user(&pages.fixture.app, user, None).await.unwrap();
    let input = |password: &str| LoginInput { email: an_email("ada@example.com"), password: Password::new(password) };
    let log_in = async |password: &str| pages::log_in(pages.call(), input(password), None, TIMES).await;

    let cookie = log_in(PASSWORD).await.unwrap();
    assert_eq!(pages.find(&cookie).await.unwrap().session.user, id);
    // `loginFailuresPerClient` allows 10 wrong passwords. Both kinds of login count.
    for attempt in 0..10 {
        let refused = match attempt % 2 {
            0 => log_in("wrong").await.map(|_| ()),
            _ => email_account::log_in(pages.call(), input("wrong")).await.map(|_| ()),
        };
        assert!(matches!(refused, Err(LoginError::InvalidCredentials)), "attempt {attempt}: {refused:?}");
    }
    let limited = log_in(PASSWORD).await.map(|_| ());
    assert!(matches!(limited, Err(LoginError::Common(CommonError::RateLimited(_)))), "{limited:?}");
    let limited = email_account::log_in(pages.call(), input(PASSWORD)).await.map(|_| ());
    assert!(matches!(limited, Err(LoginError::Common(CommonError::RateLimited(_)))), "{limited:?}");
    let sessions = pages.fixture.stores.sessions(&pages.fixture.app, id).await.unwrap();
    assert_eq!(sessions.len(), 1, "a refused login opens no session");
}

#[tokio::test]
async fn a_social_login_returns_only_to_its_browser_and_keeps_a_long_authorization_request_in_redis() {
    let pages = PagesFixture::new().await;
    let (browser, other_browser) = (BrowserId::generate(&pages.env), BrowserId::generate(&pages.env));
    for (transaction, is_stored) in [(None, false), (Some("t".repeat(1_024)), false), (Some("t".repeat(6_000)), true)] {
        let started = start_social_login(pages.call(), &browser, SocialPurpose::LogIn, transaction.as_deref());
        let started = started.await.unwrap();
        assert!(started.cookie_value.len() < 3_500, "{}", started.cookie_value.len());
        let state = SocialState::open(&pages.app, &started.state, now()).unwrap();
        assert_eq!((state.purpose, &state.cookie), (SocialPurpose::LogIn, &started.cookie));
        let finish = async |browser: &BrowserId| {
            open_returned_login(pages.call(), browser, &state, &started.cookie_value).await.unwrap()
        };
        assert!(finish(&other_browser).await.is_none());
        let finished = finish(&browser).await.unwrap();
        assert_eq!(finished.transaction, transaction);
        assert!(started.code_challenge.is_satisfied_by(&finished.code_verifier));
        assert_eq!(finish(&browser).await.is_none(), is_stored, "a stored transaction is read once");
        let another = start_social_login(pages.call(), &browser, SocialPurpose::LogIn, None).await.unwrap();
        let another = SocialState::open(&pages.app, &another.state, now()).unwrap();
        let swapped = open_returned_login(pages.call(), &browser, &another, &started.cookie_value).await.unwrap();
        assert!(swapped.is_none(), "the cookie of another login");
    }
}

#[tokio::test]
async fn long_authorization_requests_have_the_limits_of_unbound_flows() {
    let pages = PagesFixture::new().await;
    let browser = BrowserId::generate(&pages.env);
    let start = async |transaction: &str| {
        start_social_login(pages.call(), &browser, SocialPurpose::LogIn, Some(transaction)).await.map(drop)
    };
    let long = "t".repeat(1_025);
    for number in 0..30 {
        assert!(start(&long).await.is_ok(), "number {number}");
    }
    let limited = start(&long).await;
    assert!(matches!(limited, Err(StoreFlowError::TooManyFlows(_))), "{limited:?}");
    assert!(start("short").await.is_ok(), "a short one needs no Redis");
}
