//! Tests of every rule of the decision, with stores in memory.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};

use latchkey_crds::{
    client::Consent,
    rendered::{ClientLimitName, RenderedClient, RenderedClientAuthentication, Window},
    types::{AppId, GroupName},
};
use time::macros::datetime;
use uuid::Uuid;

use super::*;
use crate::{
    domain::{
        app::App,
        audit::{ActivityEntry, Event, Refusal},
        client::{ClientAddress, ClientInfo},
        clock::{Clock, Env},
        email::AccountKey,
        groups::Membership,
        openid::{
            authorization_request::{Delivery, RequestParameters, find_client},
            code::{ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
            consent::shown_consent,
            par::{PushedRequest, PushedRequestKey},
            scope::Scopes,
        },
        pages::SessionCookie,
        ports::{NewConsent, RateLimitPermit, StoredConsent},
        rate_limits::{RateLimitCheck, RateLimited},
        session::{Amr, NO_REFRESH_TOKEN, Profile, Session, SessionId},
        user::{Epoch, UserId},
    },
    fixtures,
};

const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05 UTC);
const USER: UserId = UserId(Uuid::from_u128(7));
const OTHER_USER: UserId = UserId(Uuid::from_u128(8));

struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> OffsetDateTime {
        NOW
    }
}

/// An implementation of the ports in memory.
#[derive(Default)]
struct FakeStores {
    groups: Vec<GroupName>,
    consent: Mutex<Scopes>,
    codes: Mutex<Vec<ClientCodeRecord>>,
    events: Mutex<Vec<(EventKind, Option<String>)>>,
    used_requests: Mutex<usize>,
    acquired: Mutex<i32>,
    is_limited: bool,
    is_postgres_unavailable: bool,
    is_redis_unavailable: bool,
    is_user_deleted: bool,
}

impl FakeStores {
    fn check_postgres(&self) -> Result<(), StoreError> {
        if self.is_postgres_unavailable { Err(unavailable_error("postgres")) } else { Ok(()) }
    }

    fn check_redis(&self) -> Result<(), StoreError> {
        if self.is_redis_unavailable { Err(unavailable_error("redis")) } else { Ok(()) }
    }

    fn record_event(&self, event: &Event) {
        let client = event.detail.client.as_ref().map(|client| client.as_str().to_owned());
        self.events.lock().unwrap().push((event.kind, client));
    }

    fn event_kinds(&self) -> Vec<EventKind> {
        self.events.lock().unwrap().iter().map(|(kind, _)| *kind).collect()
    }
}

fn unavailable_error(store: &'static str) -> StoreError {
    StoreError::Unavailable { store, source: "gone".into() }
}

impl Groups for FakeStores {
    async fn of_user(&self, _: &AppId, _: UserId) -> Result<Arc<[Membership]>, StoreError> {
        let membership = |name: &GroupName| Membership { name: name.clone(), source: String::new() };
        Ok(self.groups.iter().map(membership).collect())
    }
}

impl Consents for FakeStores {
    async fn consented_scopes(&self, _: &AppId, user: UserId, client_uid: &str) -> Result<Scopes, StoreError> {
        self.check_postgres()?;
        assert_eq!((user, client_uid), (USER, "uid-grafana"));
        Ok(*self.consent.lock().unwrap())
    }

    async fn consents(&self, _: &AppId, _: UserId) -> Result<Vec<StoredConsent>, StoreError> {
        unreachable!("only the list of applications needs it")
    }

    async fn add_consent(&self, _: &AppId, consent: NewConsent) -> Result<bool, StoreError> {
        self.check_postgres()?;
        if self.is_user_deleted {
            return Ok(false);
        }
        *self.consent.lock().unwrap() = consent.scopes;
        self.record_event(&consent.event);
        Ok(true)
    }

    async fn remove_consent(&self, _: &AppId, _: UserId, _: &str, _: Event) -> Result<bool, StoreError> {
        unreachable!("only the list of applications needs it")
    }
}

impl RateLimits for FakeStores {
    async fn acquire(&self, _: &AppId, checks: Vec<RateLimitCheck>) -> Result<RateLimitPermit, AcquireError> {
        if self.is_limited {
            return Err(AcquireError::RateLimited(RateLimited {
                limit: ClientLimitName::AuthorizationsPerClientAddress.into(),
                window: Window { count: 120, window_seconds: 60 },
                retry_after: Duration::from_secs(9),
            }));
        }
        *self.acquired.lock().unwrap() += 1;
        Ok(RateLimitPermit(checks.into_iter().map(|check| (check, 0)).collect()))
    }

    async fn check_limits(&self, _: &AppId, _: Vec<RateLimitCheck>) -> Result<(), AcquireError> {
        unreachable!("no client authenticates")
    }

    async fn release(&self, _: &AppId, _: RateLimitPermit) {
        *self.acquired.lock().unwrap() -= 1;
    }

    async fn is_known_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) -> Result<bool, StoreError> {
        unreachable!("no password is checked")
    }

    async fn remember_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) {}
}

impl ClientCodes for FakeStores {
    async fn store_client_code(
        &self,
        _: &AppId,
        _: &ClientCodeKey,
        record: &ClientCodeRecord,
    ) -> Result<(), StoreError> {
        self.check_redis()?;
        self.codes.lock().unwrap().push(record.clone());
        Ok(())
    }

    async fn find_client_code(&self, _: &AppId, _: &ClientCodeKey) -> Result<Option<StoredClientCode>, StoreError> {
        unreachable!("no code is exchanged")
    }

    async fn redeem_client_code(
        &self,
        _: &AppId,
        _: &ClientCodeKey,
        _: &ExchangedCode,
        _: SessionId,
    ) -> Result<Redemption, StoreError> {
        unreachable!("no code is exchanged")
    }

    async fn use_assertion(&self, _: &AppId, _: &str, _: &str, _: i64) -> Result<bool, StoreError> {
        unreachable!("no client authenticates")
    }
}

impl PushedRequests for FakeStores {
    async fn store_pushed_request(
        &self,
        _: &AppId,
        _: &PushedRequestKey,
        _: &PushedRequest,
        _: ClientAddress,
    ) -> Result<(), StoreError> {
        unreachable!("nothing is pushed")
    }

    async fn find_pushed_request(&self, _: &AppId, _: &PushedRequestKey) -> Result<Option<PushedRequest>, StoreError> {
        unreachable!("the request was found before")
    }

    async fn use_pushed_request(&self, _: &AppId, _: &PushedRequestKey) -> Result<bool, StoreError> {
        self.check_redis()?;
        assert!(self.codes.lock().unwrap().len() <= *self.used_requests.lock().unwrap(), "a code comes later");
        *self.used_requests.lock().unwrap() += 1;
        Ok(*self.used_requests.lock().unwrap() == 1)
    }
}

impl AuditLog for FakeStores {
    async fn record(&self, _: &AppId, event: Event) {
        self.record_event(&event);
    }

    fn record_later(&self, _: &AppId, event: Event) {
        self.record_event(&event);
    }

    fn count_refusal(&self, _: &AppId, _: Refusal) {}

    async fn activity(&self, _: &AppId, _: UserId, _: OffsetDateTime) -> Result<Vec<ActivityEntry>, StoreError> {
        unreachable!("no page shows events")
    }
}

/// An App with one client, and the browser of a user.
struct Scenario {
    app: App,
    stores: FakeStores,
    /// The session of the browser.
    session: Option<AuthenticatedSession>,
    is_session_unavailable: bool,
    login: Option<TransactionLogin>,
    parameters: Vec<(&'static str, String)>,
    /// Whether the user has allowed what the consent page showed.
    allows: bool,
    request_uri: Option<&'static str>,
}

fn session_of(user: UserId, login_before: i64) -> AuthenticatedSession {
    AuthenticatedSession {
        session: Session {
            id: SessionId(Uuid::from_u128(9)),
            user,
            epoch: Epoch(3),
            generation: NO_REFRESH_TOKEN,
            amr: Amr::Password,
            auth_time: NOW - time::Duration::seconds(login_before),
        },
        profile: Profile { version: 1, email: None, email_verified: true, name: "Ada".to_owned() },
    }
}

// === impl Scenario ===

impl Scenario {
    /// A scenario in which the user logged in an hour ago, for another purpose than this request.
    fn new(edit: impl FnOnce(&mut RenderedClient)) -> Self {
        let mut client = fixtures::client("grafana");
        edit(&mut client);
        Self {
            app: fixtures::provider(vec![client]),
            stores: FakeStores::default(),
            session: Some(session_of(USER, 3600)),
            is_session_unavailable: false,
            login: None,
            parameters: vec![
                ("client_id", "grafana".to_owned()),
                ("redirect_uri", "https://grafana.example.com/callback".to_owned()),
                ("response_type", "code".to_owned()),
                ("scope", "openid email".to_owned()),
            ],
            allows: false,
            request_uri: None,
        }
    }

    fn plain() -> Self {
        Self::new(|_| {})
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.parameters.retain(|(known, _)| *known != name);
        self.parameters.push((name, value.to_owned()));
        self
    }

    fn logged_in_seconds_ago(mut self, seconds: i64) -> Self {
        self.session = Some(session_of(USER, seconds));
        self
    }

    /// Changes the scenario: the last login of the session was made for this request.
    fn logged_in_for_request(mut self) -> Self {
        let session = &self.session.as_ref().unwrap().session;
        let issued_ms = u64::try_from(session.auth_time.unix_timestamp_nanos() / 1_000_000).unwrap();
        let cookie = SessionCookie { issued_ms, user: session.user, session: session.id };
        self.login = Some(TransactionLogin::new(&cookie));
        self
    }

    fn allowing(self) -> Self {
        Self { allows: true, ..self }
    }

    async fn run(&self) -> Result<AuthorizationOutcome, CommonError> {
        let parameters = RequestParameters::new(self.parameters.iter().map(|(name, value)| (*name, value)));
        let client = find_client(&self.app, &parameters).unwrap();
        let request = AuthorizationRequest::check(&self.app, client, &parameters, Delivery::Browser);
        let request = request.unwrap_or_else(|error| panic!("{error}"));
        let env = Env { clock: Box::new(FixedClock), ..Env::system() };
        let client = ClientInfo { ip: Ipv4Addr::LOCALHOST.into(), user_agent: None };
        let call = Call { stores: &self.stores, env: &env, app: &self.app, client: &client };
        let shown = self.session.as_ref().map(|session| shown_consent(&request, session));
        let attempt = AuthorizationAttempt {
            request: &request,
            request_uri: self.request_uri,
            login: self.login,
            allowed: shown.as_ref().filter(|_| self.allows),
        };
        let is_unavailable = self.is_session_unavailable;
        let session = self.session.clone().map(|session| async move {
            if is_unavailable { Err(unavailable_error("redis")) } else { Ok(Some(session)) }
        });
        authorize(call, attempt, session).await
    }

    async fn outcome(&self) -> AuthorizationOutcome {
        self.run().await.unwrap()
    }

    /// The code of the error for the client.
    async fn error(&self) -> &'static str {
        match self.outcome().await {
            AuthorizationOutcome::Refused(error) => error.code.as_str(),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn assert_no_code_and_nothing_counted(&self) {
        assert!(self.stores.codes.lock().unwrap().is_empty());
        assert!(self.stores.events.lock().unwrap().is_empty());
        assert_eq!(*self.stores.acquired.lock().unwrap(), 0, "nothing counts towards the limit");
    }

    async fn assert_issued(&self) {
        let outcome = self.outcome().await;
        assert!(matches!(outcome, AuthorizationOutcome::Issued(_)), "{outcome:?}");
        assert_eq!(*self.stores.acquired.lock().unwrap(), 1);
    }

    async fn assert_login_needed(&self) {
        assert_eq!(self.outcome().await, AuthorizationOutcome::LoginNeeded);
        self.assert_no_code_and_nothing_counted();
    }

    async fn assert_consent_needed(&self) {
        assert_eq!(self.outcome().await, AuthorizationOutcome::ConsentNeeded);
        self.assert_no_code_and_nothing_counted();
    }
}

#[tokio::test]
async fn the_record_of_a_code_names_the_client_the_user_and_the_session() {
    let scenario = Scenario::plain().with("nonce", "n-1");
    scenario.assert_issued().await;
    let record = scenario.stores.codes.lock().unwrap()[0].clone();
    let Authorization { client_uid, client_id, redirect_uri, user, browser_session, epoch, .. } = record.authorization;
    assert_eq!((client_uid.as_str(), client_id.as_str()), ("uid-grafana", "grafana"));
    assert_eq!(redirect_uri, "https://grafana.example.com/callback");
    assert_eq!((user, browser_session, epoch), (USER, SessionId(Uuid::from_u128(9)), Epoch(3)));
    assert_eq!(record.expires_at, NOW.unix_timestamp() + 60);
    let events = scenario.stores.events.lock().unwrap().clone();
    assert_eq!(events, [(EventKind::ClientAuthorized, Some("grafana".to_owned()))]);
    assert_eq!(*scenario.stores.used_requests.lock().unwrap(), 0);
}

#[tokio::test]
async fn a_pushed_request_is_used_up_by_the_code() {
    let scenario = Scenario { request_uri: Some("urn:ietf:params:oauth:request_uri:x"), ..Scenario::plain() };
    scenario.assert_issued().await;
    assert_eq!(*scenario.stores.used_requests.lock().unwrap(), 1);
    // Another browser, or the same browser after the user presses Back, sends the request again in its `tx` parameter.
    assert_eq!(scenario.outcome().await, AuthorizationOutcome::RequestUsed);
    assert_eq!(scenario.stores.codes.lock().unwrap().len(), 1);
    assert_eq!(*scenario.stores.acquired.lock().unwrap(), 1, "only the code counts");
    let waiting = Scenario { session: None, request_uri: scenario.request_uri, ..Scenario::plain() };
    waiting.assert_login_needed().await;
    assert_eq!(*waiting.stores.used_requests.lock().unwrap(), 0);
}

#[tokio::test]
async fn the_user_must_log_in_if_the_browser_has_no_session() {
    let logged_out = |scenario: Scenario| Scenario { session: None, ..scenario };
    logged_out(Scenario::plain()).assert_login_needed().await;
    let silent = logged_out(Scenario::plain().with("prompt", "none"));
    assert_eq!(silent.error().await, "login_required");
    silent.assert_no_code_and_nothing_counted();
}

#[tokio::test]
async fn prompt_login_needs_a_login_for_this_request() {
    for login_before in [3600, 60, 0, -5] {
        let scenario = || Scenario::plain().with("prompt", "login").logged_in_seconds_ago(login_before);
        scenario().assert_login_needed().await;
        scenario().logged_in_for_request().assert_issued().await;
        // After the login for this request, the user has logged in again for another purpose.
        scenario().logged_in_for_request().logged_in_seconds_ago(login_before - 1).assert_login_needed().await;
    }
    Scenario::plain().with("prompt", "create").assert_issued().await;
}

#[tokio::test]
async fn the_user_must_log_in_again_if_the_login_is_older_than_max_age() {
    Scenario::plain().with("max_age", "3600").assert_issued().await;
    Scenario::plain().with("max_age", "3599").assert_login_needed().await;
    for login_before in [1, 0, -5] {
        let scenario = || Scenario::plain().with("max_age", "0").logged_in_seconds_ago(login_before);
        scenario().assert_login_needed().await;
        scenario().logged_in_for_request().assert_issued().await;
    }
    let silent = Scenario::plain().with("max_age", "10").with("prompt", "none");
    assert_eq!(silent.error().await, "login_required");
}

#[tokio::test]
async fn the_user_must_log_in_again_if_the_request_names_another_user() {
    let claims = |user: UserId| format!(r#"{{"id_token": {{"sub": {{"value": "{user}"}}}}}}"#);
    Scenario::plain().with("claims", &claims(USER)).assert_issued().await;
    // A login for this request does not help if another user than the named one has logged in.
    Scenario::plain().with("claims", &claims(OTHER_USER)).logged_in_for_request().assert_login_needed().await;
    let silent = Scenario::plain().with("claims", &claims(OTHER_USER)).with("prompt", "none");
    assert_eq!(silent.error().await, "login_required");
}

#[tokio::test]
async fn only_members_of_an_allowed_group_are_admitted() {
    let restricted =
        || Scenario::new(|client| client.allowed_groups = vec!["admins".parse().unwrap(), "ops".parse().unwrap()]);
    assert_eq!(restricted().error().await, "access_denied");
    let mut member = restricted();
    member.stores.groups = vec!["staff".parse().unwrap(), "ops".parse().unwrap()];
    member.assert_issued().await;
    let mut other = restricted().with("prompt", "none");
    other.stores.groups = vec!["Ops".parse().unwrap(), "ops2".parse().unwrap()];
    assert_eq!(other.error().await, "access_denied");
    other.assert_no_code_and_nothing_counted();
}

#[tokio::test]
async fn a_required_email_address_must_be_verified() {
    let mut scenario = Scenario::plain();
    scenario.app.doc.require_verified_email = true;
    scenario.assert_issued().await;
    let mut scenario = Scenario::plain();
    scenario.app.doc.require_verified_email = true;
    scenario.session.as_mut().unwrap().profile.email_verified = false;
    assert_eq!(scenario.error().await, "access_denied");
    scenario.app.doc.require_verified_email = false;
    scenario.assert_issued().await;
}

#[tokio::test]
async fn the_user_must_give_consent_if_the_client_setting_or_the_request_requires_it() {
    let always = || Scenario::new(|client| client.consent = Consent::Always);
    for scenario in [
        always(),
        Scenario::plain().with("prompt", "consent"),
        Scenario::plain().with("prompt", "select_account"),
        Scenario::plain().with("prompt", "login select_account").logged_in_for_request(),
        Scenario::new(|client| client.consent = Consent::Once),
    ] {
        scenario.assert_consent_needed().await;
        let allowing = scenario.allowing();
        allowing.assert_issued().await;
        assert_eq!(allowing.stores.event_kinds(), [EventKind::ConsentGiven, EventKind::ClientAuthorized]);
    }
    assert_eq!(always().with("prompt", "none").error().await, "consent_required");
    Scenario::plain().with("prompt", "none").assert_issued().await;
}

#[tokio::test]
async fn a_stored_consent_suffices_for_its_scopes() {
    let once = |stored: &str| {
        let mut scenario = Scenario::new(|client| client.consent = Consent::Once);
        scenario.stores.consent = Mutex::new(Scopes::parse_known(stored));
        scenario
    };
    once("openid email").assert_issued().await;
    once("openid email groups").with("prompt", "none").assert_issued().await;
    for missing in ["", "openid", "openid profile groups offline_access"] {
        once(missing).assert_consent_needed().await;
        assert_eq!(once(missing).with("prompt", "none").error().await, "consent_required");
    }
    // A request for a single claim needs the same consent as a request for the scope of the claim.
    let claims = r#"{"userinfo": {"groups": null}}"#;
    once("openid email").with("claims", claims).assert_consent_needed().await;
    once("openid email").with("prompt", "consent").assert_consent_needed().await;
}

#[tokio::test]
async fn a_consent_is_stored_only_for_a_client_with_consent_once() {
    let once = Scenario::new(|client| client.consent = Consent::Once).allowing();
    once.assert_issued().await;
    assert_eq!(once.stores.consent.lock().unwrap().to_string(), "openid email");
    let mut always = Scenario::new(|client| client.consent = Consent::Always).allowing();
    always.stores.is_postgres_unavailable = true;
    always.assert_issued().await;
    assert!(always.stores.consent.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_program_on_the_device_gets_no_code_without_an_action_by_the_user() {
    let native = |url: &'static str| {
        let scenario = Scenario::new(|client| {
            client.authentication = RenderedClientAuthentication::None;
            client.redirect_urls = vec![url.parse().unwrap(), "https://app.example.com/cb".parse().unwrap()];
        });
        let challenge = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM";
        scenario.with("redirect_uri", url).with("code_challenge", challenge).with("code_challenge_method", "S256")
    };
    for url in ["com.example.app:/done", "http://127.0.0.1/done"] {
        native(url).assert_consent_needed().await;
        assert_eq!(native(url).with("prompt", "none").error().await, "interaction_required");
        native(url).logged_in_seconds_ago(0).assert_consent_needed().await;
        native(url).logged_in_for_request().assert_issued().await;
        native(url).logged_in_for_request().logged_in_seconds_ago(0).assert_consent_needed().await;
        native(url).allowing().assert_issued().await;
    }
    native("com.example.app:/done").with("redirect_uri", "https://app.example.com/cb").assert_issued().await;
    let confidential = Scenario::new(|client| client.redirect_urls.push("http://localhost/done".parse().unwrap()));
    confidential.with("redirect_uri", "http://localhost/done").assert_issued().await;
}

#[tokio::test]
async fn a_consent_is_valid_only_for_the_account_and_the_scopes_that_the_page_showed() {
    let scenario = Scenario::new(|client| client.consent = Consent::Always);
    let parameters = RequestParameters::new(scenario.parameters.iter().map(|(name, value)| (*name, value)));
    let client = find_client(&scenario.app, &parameters).unwrap();
    let request = AuthorizationRequest::check(&scenario.app, client, &parameters, Delivery::Browser);
    let request = request.unwrap_or_else(|error| panic!("{error}"));
    let session = scenario.session.as_ref().unwrap();
    let shown = |user, scopes| ShownConsent { user, scopes: Scopes::parse_known(scopes) };
    assert!(is_allowed(Some(&shown(USER, "openid email")), &request, session));
    assert!(is_allowed(Some(&shown(USER, "openid email groups")), &request, session));
    assert!(!is_allowed(Some(&shown(OTHER_USER, "openid email")), &request, session));
    assert!(!is_allowed(Some(&shown(USER, "openid")), &request, session));
    assert!(!is_allowed(None, &request, session));
}

#[tokio::test]
async fn no_code_and_no_consent_is_stored_if_the_limit_is_reached() {
    let mut scenario = Scenario::new(|client| client.consent = Consent::Once).allowing();
    scenario.stores.is_limited = true;
    assert!(matches!(scenario.run().await, Err(CommonError::RateLimited(_))));
    scenario.assert_no_code_and_nothing_counted();
    assert!(scenario.stores.consent.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_reached_limit_refuses_only_requests_that_could_get_a_code() {
    let limited = |mut scenario: Scenario| {
        scenario.stores.is_limited = true;
        scenario
    };
    limited(Scenario::plain().with("prompt", "login")).assert_login_needed().await;
    limited(Scenario::plain().with("max_age", "60")).assert_login_needed().await;
    limited(Scenario::new(|client| client.consent = Consent::Always)).assert_consent_needed().await;
    let silent = limited(Scenario::new(|client| client.consent = Consent::Always).with("prompt", "none"));
    assert_eq!(silent.error().await, "consent_required");
}

#[tokio::test]
async fn a_request_does_not_count_if_its_session_cannot_be_read() {
    let mut scenario = Scenario::plain();
    scenario.is_session_unavailable = true;
    assert!(matches!(scenario.run().await, Err(CommonError::Store(_))));
    scenario.assert_no_code_and_nothing_counted();
}

#[tokio::test]
async fn no_code_is_issued_while_a_store_that_the_request_needs_is_unavailable() {
    let mut without_redis = Scenario::plain();
    without_redis.stores.is_redis_unavailable = true;
    assert!(matches!(without_redis.run().await, Err(CommonError::Store(_))));
    without_redis.assert_no_code_and_nothing_counted();

    let mut once = Scenario::new(|client| client.consent = Consent::Once);
    once.stores.is_postgres_unavailable = true;
    assert!(matches!(once.run().await, Err(CommonError::Store(_))));
    once.assert_no_code_and_nothing_counted();
    let mut never = Scenario::plain();
    never.stores.is_postgres_unavailable = true;
    never.assert_issued().await;
}

#[tokio::test]
async fn a_deleted_user_gets_no_code() {
    let mut scenario = Scenario::new(|client| client.consent = Consent::Once).allowing();
    scenario.stores.is_user_deleted = true;
    scenario.assert_login_needed().await;
}
