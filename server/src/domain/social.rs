//! Social login, from *redirect* to a session, in the contract's order (5).

use latchkey_crds::{
    rendered::{BrowserBinding, CallbackMode, EnumerationProtection, RenderedProvider, SignUp},
    types::ProviderName,
};
use time::{Duration, OffsetDateTime};
use tracing::warn;

use super::{
    accounts::{self, Trouble},
    app::App,
    audit::{Detail, Event, EventKind},
    client::Caller,
    clock::Env,
    email::Email,
    flow::{
        Binding, Challenge, FLOW_SECONDS, Flow, FlowState, LOGIN_CODE_SECONDS, LoginCode, NotAChallenge, PendingLogin,
        TooManyFlows,
    },
    identity::{Authorization, AuthorizationError, Grant, Identity, Operation, ProviderError, Vouched},
    limits::{self, MailPurpose},
    mail::{Mail, MailKind},
    ports::{
        Audit, FederatedUser, Flows, Identities, KeepError, Limits, Linked, Linking, NewIdentity, Outbox, Providers,
        Sessions, StoreError, TakeOver, Unlinked, Unlinking, Users,
    },
    redirect::{self, NotAllowed, Place, Target},
    session::{Amr, NewSession, SessionId},
    signed_in::SignedIn,
    token::Tokens,
    user::{Epoch, User, UserId},
};

/// The longest `state` of an app (contract, 5), in characters.
const MAX_APP_STATE: usize = 512;
/// The longest `prompt` and `login_hint` that are passed on: an address fits.
const MAX_HINT: usize = 254;
/// How recent a login must be for what needs one (contract, 4).
const RECENT: Duration = Duration::minutes(5);
/// How often a sign-in looks again when somebody else was faster. Each time somebody else got something done.
const ATTEMPTS: u32 = 5;

/// The App's provider of that name.
pub fn provider<'a>(app: &'a App, name: &str) -> Option<&'a RenderedProvider> {
    app.doc.providers.iter().find(|provider| provider.name.as_str() == name)
}

/// Our callback for an App and a Provider: what is registered at the provider.
fn callback_url(app: &App, provider: &RenderedProvider) -> String {
    format!("{}/{}/callback", app.doc.issuer, provider.name)
}

// === redirect ===

/// What *redirect* was asked for.
pub struct Begin<'a> {
    pub redirect_url: Option<&'a str>,
    pub state: Option<&'a str>,
    pub prompt: Option<&'a str>,
    pub login_hint: Option<&'a str>,
    pub code_challenge: Option<&'a str>,
    pub binding: Binding,
}

pub struct Begun {
    /// Where the browser is to go: the provider's authorization address.
    pub url: String,
    pub state: FlowState,
    /// What the browser is to keep, where the flow is bound to it.
    pub sealed: Option<String>,
    pub seconds: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    #[error(transparent)]
    RedirectUrl(#[from] NotAllowed),
    #[error("state {0}")]
    State(BadText),
    #[error("prompt {0}")]
    Prompt(BadText),
    #[error("login_hint {0}")]
    LoginHint(BadText),
    #[error("code_challenge {0}")]
    Challenge(#[from] NotAChallenge),
    /// The App answers with codes, which need one.
    #[error("code_challenge is missing, which this App demands")]
    NoChallenge,
    /// The App demands flows that are bound to a browser.
    #[error("format=json is for pages of the same site alone")]
    Unbound,
    #[error(transparent)]
    TooMany(#[from] TooManyFlows),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<KeepError> for BeginError {
    fn from(error: KeepError) -> Self {
        match error {
            KeepError::TooMany(too_many) => Self::TooMany(too_many),
            KeepError::Store(error) => Self::Trouble(error.into()),
        }
    }
}

/// Why a text is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadText {
    #[error("is longer than {0} characters")]
    TooLong(usize),
    #[error("has a control character")]
    ControlCharacter,
}

fn checked(text: Option<&str>, most: usize) -> Result<Option<&str>, BadText> {
    let Some(text) = text else { return Ok(None) };
    if text.chars().count() > most {
        return Err(BadText::TooLong(most));
    }
    if text.chars().any(char::is_control) { Err(BadText::ControlCharacter) } else { Ok(Some(text)) }
}

/// Begins a flow. Nothing is kept before all of the request is right.
pub async fn begin<S: Flows + Providers>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &Caller,
    request: Begin<'_>,
) -> Result<Begun, BeginError> {
    let target = redirect::choose(&app.doc.redirect_urls, request.redirect_url)?;
    let app_state = checked(request.state, MAX_APP_STATE).map_err(BeginError::State)?;
    let prompt = checked(request.prompt, MAX_HINT).map_err(BeginError::Prompt)?;
    let login_hint = checked(request.login_hint, MAX_HINT).map_err(BeginError::LoginHint)?;
    let code_challenge = request.code_challenge.map(Challenge::parse).transpose()?;
    if code_challenge.is_none() && app.doc.callback_mode == CallbackMode::Code {
        return Err(BeginError::NoChallenge);
    }
    if request.binding == Binding::None && app.doc.browser_binding == BrowserBinding::Required {
        return Err(BeginError::Unbound);
    }

    let state = FlowState::generate(env);
    let flow = Flow {
        target: target.as_ref().map(|target| target.mark().clone()),
        app_state: app_state.map(str::to_owned),
        code_challenge,
        ..Flow::begin(env)
    };
    let authorization = Authorization {
        redirect_uri: &callback_url(app, provider),
        state: state.as_str(),
        code_challenge: &flow.provider_challenge(),
        nonce: stores.traits_of(provider).nonce.then_some(flow.nonce.as_str()),
        prompt,
        login_hint,
    };
    let permit = stores.try_acquire(Operation::Redirect, app, provider, caller.address())?;
    let url = stores.authorization_url(&permit, provider, &authorization).await?;
    drop(permit);
    let sealed = flow.seal(env, app, &provider.name, &state, request.binding);
    let sealed = match request.binding {
        Binding::Browser => Some(sealed),
        Binding::None => {
            stores.keep_flow(app.id(), &state.id(), &sealed, caller.address()).await?;
            None
        }
    };
    Ok(Begun { url, state, sealed, seconds: FLOW_SECONDS })
}

// === callback ===

/// What the provider sent to *callback* by way of the browser.
pub struct Returned<'a> {
    pub state: FlowState,
    pub code: Option<&'a str>,
    pub iss: Option<&'a str>,
    pub error: Option<&'a str>,
    pub posted_user: Option<&'a str>,
    /// What the browser keeps for that state.
    pub sealed: Vec<&'a str>,
}

/// How a flow ends, and where.
pub struct Ended {
    /// None: the App has no addresses, and gets JSON.
    pub target: Option<Target>,
    pub place: Place,
    pub app_state: Option<String>,
    /// Whether the state is used. It is not where the call was not admitted: the same callback may come again.
    pub used: bool,
    pub outcome: Result<Given, SignInError>,
}

/// What an app is given for its user.
pub enum Given {
    Session(Box<SignedUp>),
    /// To be exchanged for a session.
    Code(LoginCode),
}

/// A user with a new session.
pub struct SignedUp {
    pub user: User,
    pub tokens: Tokens,
}

/// Why a callback leads nowhere: there is no address that the answer may be sent to.
#[derive(Debug, thiserror::Error)]
pub enum CallbackError {
    #[error("the state is missing, used, expired or another's")]
    InvalidState,
    /// It has left the list since.
    #[error(transparent)]
    RedirectUrl(#[from] NotAllowed),
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// Why a provider's user gets no session.
#[derive(Debug, thiserror::Error)]
pub enum SignInError {
    /// The provider, or the user at the provider's page, said so; none: in words that are not passed on.
    #[error("the provider answered with an error")]
    Refused(Option<AuthorizationError>),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error("sign-up is closed")]
    Closed,
    #[error("addresses of this domain are not taken")]
    DomainNotAllowed,
    #[error("the address is not verified")]
    EmailNotVerified,
    /// Only without enumeration protection.
    #[error("the address has an account that this provider may not be linked to by address")]
    LinkRequired,
    #[error("the provider tells no address")]
    NoEmail,
    #[error("the user is disabled")]
    Disabled,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// Ends a flow. Its state is used, whatever comes of it, once the call is admitted.
pub async fn callback<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &Caller,
    returned: Returned<'_>,
) -> Result<Ended, CallbackError>
where
    S: Users + Identities + Limits + Outbox + Sessions + Flows + Providers + Audit,
{
    let id = returned.state.id();
    let now = env.now();
    let open = |binding, sealed: &str| Flow::open(app, &provider.name, &returned.state, binding, sealed, now);
    let held = returned.sealed.iter().find_map(|sealed| open(Binding::Browser, sealed));
    let (flow, binding) = match held {
        Some(flow) => (flow, Binding::Browser),
        None => {
            if app.doc.browser_binding == BrowserBinding::Required {
                return Err(CallbackError::InvalidState);
            }
            let kept = stores.find_flow(app.id(), &id).await.map_err(Trouble::from)?;
            let flow = kept.and_then(|sealed| open(Binding::None, &sealed)).ok_or(CallbackError::InvalidState)?;
            (flow, Binding::None)
        }
    };
    // An address that has left the list gets nothing, not even an error.
    let target = flow.target.as_ref().map(|mark| redirect::find(&app.doc.redirect_urls, mark)).transpose()?;
    let place = match app.doc.callback_mode {
        CallbackMode::Query | CallbackMode::Code => Place::Query,
        CallbackMode::Fragment => Place::Fragment,
    };
    // Before the state is used, so that a call that finds no room may be made again.
    let permit = match admit(stores, Operation::Callback, app, provider, caller).await {
        Ok(permit) => permit,
        Err(error) => return Ok(Ended { target, place, app_state: flow.app_state, used: false, outcome: Err(error) }),
    };
    let outcome = match stores.use_flow(app.id(), &id, binding).await {
        Ok(true) => finish(stores, env, app, provider, caller, permit, &returned, &flow, target.as_ref()).await,
        Ok(false) => return Err(CallbackError::InvalidState),
        Err(error) => Err(Trouble::from(error).into()),
    };
    Ok(Ended { target, place, app_state: flow.app_state, used: true, outcome })
}

/// Admits a call that asks the provider: there is room for it now, and its client has not made too many.
///
/// Room comes first: a call that finds none counts nothing. Each callback counts as a login, since anybody can begin
/// flows and make up codes that we then ask the provider about.
async fn admit<S: Limits + Providers>(
    stores: &S,
    operation: Operation,
    app: &App,
    provider: &RenderedProvider,
    caller: &Caller,
) -> Result<S::Permit, SignInError> {
    let permit = stores.try_acquire(operation, app, provider, caller.address())?;
    stores.take(app.id(), limits::provider_login(app, caller)).await.map_err(Trouble::from)?;
    Ok(permit)
}

/// What remains once the flow is known to be this browser's, and used by nobody else.
#[expect(
    clippy::too_many_arguments,
    reason = "the second half of `callback`, apart so that its failure has one way out"
)]
async fn finish<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &Caller,
    permit: S::Permit,
    returned: &Returned<'_>,
    flow: &Flow,
    target: Option<&Target>,
) -> Result<Given, SignInError>
where
    S: Users + Identities + Limits + Outbox + Sessions + Flows + Providers + Audit,
{
    let code = match (returned.error, returned.code) {
        (Some(error), _) => {
            // What another issuer says of it is not this provider's word (RFC 9207, 2.4).
            stores.judge_issuer(&permit, provider, returned.iss).await?;
            return Err(SignInError::Refused(refusal(error)));
        }
        (None, Some(code)) if !code.is_empty() => code,
        (None, _) => return Err(SignInError::Refused(None)),
    };
    let grant = Grant {
        redirect_uri: &callback_url(app, provider),
        code,
        code_verifier: &flow.code_verifier,
        nonce: stores.traits_of(provider).nonce.then_some(flow.nonce.as_str()),
        iss: returned.iss,
        posted_user: returned.posted_user,
    };
    let vouched = stores.exchange(&permit, provider, &grant).await?;
    drop(permit);
    let signing_in = SigningIn { stores, env, app, provider, caller };
    match &flow.code_challenge {
        None => signing_in.session(&vouched).await.map(|session| Given::Session(Box::new(session))),
        Some(challenge) => {
            let user = signing_in.user(&vouched).await?;
            let code = LoginCode::generate(env);
            let now = env.now().unix_timestamp();
            let login = PendingLogin {
                user: user.id,
                epoch: user.epoch,
                profile: user.profile(),
                redirect_url: target.map(|target| target.as_str().to_owned()),
                challenge: challenge.clone(),
                auth_time: now,
                ip: caller.ip.to_string(),
                user_agent: caller.user_agent.clone(),
                expires_at: now + LOGIN_CODE_SECONDS,
            };
            stores.put_login(app.id(), &code.key(), &login).await.map_err(Trouble::from)?;
            accounts::remember(stores, app, caller, &user).await;
            Ok(Given::Code(code))
        }
    }
}

/// What a provider may say, and what some say instead where their user pressed *cancel* (Apple, LinkedIn).
fn refusal(error: &str) -> Option<AuthorizationError> {
    match error {
        "user_cancelled_authorize" | "user_cancelled_login" => Some(AuthorizationError::AccessDenied),
        other => AuthorizationError::parse(other),
    }
}

// === login with a provider's token ===

/// Signs in whom a provider's token is about.
pub async fn log_in<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &Caller,
    token: &str,
    nonce: Option<&str>,
) -> Result<SignedUp, SignInError>
where
    S: Users + Identities + Limits + Outbox + Sessions + Providers + Audit,
{
    let permit = admit(stores, Operation::Login, app, provider, caller).await?;
    let vouched = stores.check_token(&permit, provider, token, nonce).await?;
    drop(permit);
    SigningIn { stores, env, app, provider, caller }.session(&vouched).await
}

// === who is it ===

/// A sign-in under way: what its steps have in common.
struct SigningIn<'a, S> {
    stores: &'a S,
    env: &'a Env,
    app: &'a App,
    provider: &'a RenderedProvider,
    caller: &'a Caller,
}

/// What is to be done for a new identity.
#[derive(Debug)]
enum Plan {
    /// The address is that of an account which has shown that it is its own.
    Link(User),
    /// The address is that of an account which has not.
    TakeOver(User, Email),
    Create {
        email: Option<Email>,
        pending: Option<Email>,
    },
}

impl<S: Users + Identities + Limits + Outbox + Sessions + Audit> SigningIn<'_, S> {
    /// A session for whom the provider vouches for.
    async fn session(&self, vouched: &Vouched) -> Result<SignedUp, SignInError> {
        for _ in 0..ATTEMPTS {
            let user = self.user(vouched).await?;
            let opened = accounts::open(self.stores, self.env, self.app, self.caller, &user, Amr::Federated).await?;
            if let Some(tokens) = opened {
                accounts::remember(self.stores, self.app, self.caller, &user).await;
                return Ok(SignedUp { user, tokens });
            }
            // The user changed since it was read: it is looked at again.
        }
        Err(Trouble::from(contended()).into())
    }

    /// The user, by identity first; made or linked where the identity is new.
    async fn user(&self, vouched: &Vouched) -> Result<User, SignInError> {
        for _ in 0..ATTEMPTS {
            let (authority, subject) = (&vouched.authority, &vouched.subject);
            let known = self.stores.user_by_identity(self.app.id(), authority, subject).await.map_err(Trouble::from)?;
            let user = match known {
                Some(user) => Some(user),
                None => {
                    let find = |email| self.stores.user_by_email(self.app.id(), email);
                    self.carry_out(plan(self.app, self.provider, vouched, find).await?, vouched).await?
                }
            };
            let Some(user) = user else { continue };
            if user.disabled {
                return Err(SignInError::Disabled);
            }
            if self.app.doc.require_verified_email && !user.email_verified {
                return Err(SignInError::EmailNotVerified);
            }
            return Ok(user);
        }
        Err(Trouble::from(contended()).into())
    }

    /// None: somebody was faster, and all is to be looked at again; nothing was written.
    async fn carry_out(&self, plan: Plan, vouched: &Vouched) -> Result<Option<User>, Trouble> {
        let now = self.env.now();
        let identity = new_identity(self.provider, vouched, now);
        match plan {
            Plan::Link(user) => {
                let address = user.email.as_ref().map(|email| email.canonical().to_owned());
                let event = self.event(EventKind::IdentityLinked, user.id);
                let linking = Linking { user: user.id, epoch: user.epoch, address, identity, event };
                match self.stores.link_identity(self.app.id(), linking).await? {
                    Linked::Done => Ok(Some(user)),
                    Linked::Taken(_) | Linked::Moved => Ok(None),
                }
            }
            Plan::TakeOver(user, email) => {
                let change = TakeOver {
                    user: user.id,
                    epoch: user.epoch,
                    address: email.canonical().to_owned(),
                    name: name(vouched),
                    identity,
                    event: self.event(EventKind::IdentityLinked, user.id),
                };
                let changed = self.stores.take_over(self.app.id(), change).await?;
                if let Some(user) = &changed {
                    accounts::carry_epoch(self.stores, self.app, user, None).await;
                }
                Ok(changed)
            }
            Plan::Create { email, pending } => self.create(email, pending, vouched, identity, now).await,
        }
    }

    async fn create(
        &self,
        email: Option<Email>,
        pending: Option<Email>,
        vouched: &Vouched,
        identity: NewIdentity,
        now: OffsetDateTime,
    ) -> Result<Option<User>, Trouble> {
        let id = UserId(self.env.uuid());
        let mut mailing = None;
        let mut mail = None;
        if let Some(address) = &pending {
            mailing = accounts::may_mail(self.stores, self.app, self.caller, address, MailPurpose::Confirm).await?;
            if mailing.is_some() {
                mail = Some(self.mail_to_pending(address, id, now).await?);
            }
        }
        let user = FederatedUser {
            id,
            email: email.clone(),
            pending_email: pending.clone(),
            name: name(vouched),
            created_at: now,
            event: self.event(EventKind::Registered, id),
        };
        let made = self.stores.create_federated(self.app.id(), user, identity, mail).await;
        if !matches!(made, Ok(true)) {
            accounts::not_mailed(self.stores, self.app, mailing).await;
        }
        if !made? {
            return Ok(None);
        }
        Ok(Some(User {
            id,
            email_verified: email.is_some(),
            email,
            pending_email: pending,
            name: name(vouched),
            password_hash: None,
            password_session: None,
            contested: false,
            disabled: false,
            epoch: Epoch(1),
            version: 1,
            created_at: now,
            updated_at: now,
        }))
    }

    /// The mail that an address gets which a provider told and did not verify: its code or, where it is the verified
    /// address of another account, the word that it has one.
    async fn mail_to_pending(&self, address: &Email, id: UserId, now: OffsetDateTime) -> Result<Mail, Trouble> {
        let owner = self.stores.user_by_email(self.app.id(), address).await?.filter(|owner| owner.email_verified);
        Ok(match owner {
            None => Mail { kind: MailKind::Confirm, user: Some(id), requested_at: now },
            // A disabled account's owner is not bothered; the row is there all the same, and sends nothing.
            Some(owner) => {
                Mail { kind: MailKind::AccountExists, user: (!owner.disabled).then_some(owner.id), requested_at: now }
            }
        })
    }

    fn event(&self, kind: EventKind, user: UserId) -> Event {
        Event::new(self.env, self.caller, kind, user).with(by(&self.provider.name))
    }
}

/// What to do for a new identity, or why nothing is done. `find` looks up whose an address is, once at most.
async fn plan<'a, F>(
    app: &App,
    provider: &RenderedProvider,
    vouched: &'a Vouched,
    find: impl FnOnce(&'a Email) -> F,
) -> Result<Plan, SignInError>
where
    F: Future<Output = Result<Option<User>, StoreError>>,
{
    let doc = &app.doc;
    let Some(told) = &vouched.email else {
        if !doc.allow_users_without_email {
            return Err(SignInError::NoEmail);
        }
        return creation(app, None, None);
    };
    if !app.allows(&told.email) {
        return Err(SignInError::DomainNotAllowed);
    }
    if told.verified && provider.link_by_email {
        let email = told.email.clone();
        return match find(&told.email).await.map_err(Trouble::from)? {
            Some(user) if user.disabled => Err(SignInError::Disabled),
            Some(user) if user.email_verified => Ok(Plan::Link(user)),
            Some(user) => Ok(Plan::TakeOver(user, email)),
            None => creation(app, Some(email), None),
        };
    }
    if doc.enumeration_protection == EnumerationProtection::Disabled
        && find(&told.email).await.map_err(Trouble::from)?.is_some()
    {
        return Err(SignInError::LinkRequired);
    }
    creation(app, None, Some(told.email.clone()))
}

fn creation(app: &App, email: Option<Email>, pending: Option<Email>) -> Result<Plan, SignInError> {
    if app.doc.require_verified_email && email.is_none() {
        return Err(SignInError::EmailNotVerified);
    }
    if app.doc.sign_up == SignUp::Closed {
        return Err(SignInError::Closed);
    }
    Ok(Plan::Create { email, pending })
}

/// By which Provider it was done.
fn by(provider: &ProviderName) -> Detail {
    Detail { provider: Some(provider.clone()), ..Detail::default() }
}

fn new_identity(provider: &RenderedProvider, vouched: &Vouched, at: OffsetDateTime) -> NewIdentity {
    NewIdentity {
        authority: vouched.authority.clone(),
        subject: vouched.subject.clone(),
        provider: provider.name.clone(),
        email: vouched.email.as_ref().map(|told| told.email.clone()),
        at,
    }
}

fn name(vouched: &Vouched) -> String {
    vouched.name.as_ref().map_or_else(String::new, |name| name.as_str().to_owned())
}

/// Others were faster each time.
fn contended() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: "the account is being changed".into() }
}

// === exchange of a code ===

/// A code and what shows that it is in the right hands.
pub struct Exchange<'a> {
    pub code: &'a str,
    pub code_verifier: &'a str,
    /// Where it is sent, it must be that of the flow.
    pub redirect_url: Option<&'a str>,
}

pub struct Exchanged {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// Unknown, expired or used, or the verifier or the address is another.
    #[error("the code is not valid")]
    InvalidGrant,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// Exchanges a one-time code for a session. A second use ends the session of the first (RFC 6749, 4.1.2).
pub async fn exchange<S: Flows + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    exchange: Exchange<'_>,
) -> Result<Exchanged, ExchangeError> {
    let key = LoginCode::parse(exchange.code).ok_or(ExchangeError::InvalidGrant)?.key();
    let found = stores.find_login(app.id(), &key).await.map_err(Trouble::from)?;
    let found = found.ok_or(ExchangeError::InvalidGrant)?;
    let login = found.login;
    if let Some(session) = found.session {
        stores.end_session(app.id(), login.user, session).await.map_err(Trouble::from)?;
        return Err(ExchangeError::InvalidGrant);
    }
    let right_place = exchange.redirect_url.is_none_or(|url| login.redirect_url.as_deref() == Some(url));
    let in_time = env.now().unix_timestamp() < login.expires_at;
    if !in_time || !right_place || !login.challenge.admits(exchange.code_verifier) {
        return Err(ExchangeError::InvalidGrant);
    }
    let opened_at = OffsetDateTime::from_unix_timestamp(login.auth_time).map_err(|_| ExchangeError::InvalidGrant)?;
    let tokens = &app.doc.tokens;
    // That of the browser, whoever exchanges its code.
    let ip = login.ip.parse().map_err(|_| ExchangeError::InvalidGrant)?;
    let caller = Caller { ip, user_agent: login.user_agent.clone() };
    let new = NewSession {
        id: SessionId(env.uuid()),
        user: login.user,
        epoch: login.epoch,
        profile: login.profile,
        amr: Amr::Federated,
        auth_time: opened_at,
        ip: login.ip,
        user_agent: login.user_agent,
        ends_at: opened_at + Duration::seconds(i64::from(tokens.session_lifetime_seconds)),
        idle_seconds: tokens.refresh_idle_seconds,
    };
    // Opened before it is noted: whoever comes second finds a session that can be ended.
    let tokens = match accounts::open_new(stores, env, app, &caller, &new).await? {
        Some(tokens) => tokens,
        // The user's password was reset since, or the user disabled.
        None => return Err(ExchangeError::InvalidGrant),
    };
    match stores.take_login(app.id(), &key, new.id).await {
        Ok(None) => Ok(Exchanged { user: login.user, tokens }),
        Ok(Some(first)) => {
            for session in [first, new.id] {
                stores.end_session(app.id(), login.user, session).await.map_err(Trouble::from)?;
            }
            Err(ExchangeError::InvalidGrant)
        }
        Err(error) => {
            if let Err(error) = stores.end_session(app.id(), login.user, new.id).await {
                warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a session that nobody has stays open");
            }
            Err(Trouble::from(error).into())
        }
    }
}

// === a user's identities ===

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the login was too long ago")]
    ReauthenticationRequired,
    #[error("the account's address is not verified")]
    EmailNotVerified,
    /// It is linked to another account.
    #[error("somebody else signs in with it")]
    Taken,
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// Gives a signed-in user one more way to sign in. Linking again what is linked already changes nothing.
#[expect(clippy::too_many_arguments, reason = "what every use-case has, the provider and its token")]
pub async fn link<S: Users + Identities + Limits + Providers>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    provider: &RenderedProvider,
    token: &str,
    nonce: Option<&str>,
) -> Result<(), LinkError> {
    if env.now() - signed_in.session.auth_time > RECENT {
        return Err(LinkError::ReauthenticationRequired);
    }
    let permit = stores.try_acquire(Operation::Login, app, provider, caller.address())?;
    stores.take(app.id(), limits::provider_login(app, caller)).await.map_err(Trouble::from)?;
    let user = stores.user(app.id(), signed_in.user()).await.map_err(Trouble::from)?;
    let user = user.filter(|user| !user.disabled && user.epoch == signed_in.session.epoch);
    let user = user.ok_or(LinkError::InvalidToken)?;
    // Whoever plants an identity in an account that somebody else confirms would have a way in (contract, 4).
    if user.email.is_some() && !user.email_verified {
        return Err(LinkError::EmailNotVerified);
    }
    let vouched = stores.check_token(&permit, provider, token, nonce).await?;
    drop(permit);
    let identity = new_identity(provider, &vouched, env.now());
    let event = Event::new(env, caller, EventKind::IdentityLinked, user.id);
    let event = event.in_session(signed_in.session.id).with(by(&provider.name));
    let linking = Linking { user: user.id, epoch: user.epoch, address: None, identity, event };
    match stores.link_identity(app.id(), linking).await.map_err(Trouble::from)? {
        Linked::Done => Ok(()),
        Linked::Taken(owner) if owner == user.id => Ok(()),
        Linked::Taken(_) => Err(LinkError::Taken),
        Linked::Moved => Err(LinkError::InvalidToken),
    }
}

/// The ways to sign in that a user has beside a password.
pub async fn identities<S: Identities>(stores: &S, app: &App, signed_in: &SignedIn) -> Result<Vec<Identity>, Trouble> {
    Ok(stores.identities(app.id(), signed_in.user()).await?)
}

/// Takes a Provider's identities from their user, but never the last way in.
pub async fn unlink<S: Identities>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    provider: &ProviderName,
) -> Result<Unlinked, Trouble> {
    let event = Event::new(env, caller, EventKind::IdentityUnlinked, signed_in.user());
    let unlinking = Unlinking {
        user: signed_in.user(),
        provider: provider.clone(),
        usable: app.doc.providers.iter().map(|provider| provider.name.clone()).collect(),
        event: event.in_session(signed_in.session.id).with(by(provider)),
    };
    Ok(stores.unlink_identity(app.id(), unlinking).await?)
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::ready};

    use futures::FutureExt;
    use latchkey_crds::rendered::RenderedApp;
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::{domain::identity::VouchedEmail, fixtures};

    const EMAIL: &str = "Ada@Example.com";

    fn vouched(email: Option<&str>, verified: bool) -> Vouched {
        let email = email.map(|email| VouchedEmail { email: Email::parse(email).unwrap(), verified });
        Vouched { authority: "https://id.example".to_owned(), subject: "1".to_owned(), email, name: None }
    }

    fn account(verified: bool, disabled: bool) -> User {
        User {
            id: UserId(Uuid::from_u128(7)),
            email: Some(Email::parse(EMAIL).unwrap()),
            email_verified: verified,
            pending_email: None,
            name: "Ada".to_owned(),
            password_hash: None,
            password_session: None,
            contested: false,
            disabled,
            epoch: Epoch(1),
            version: 1,
            created_at: OffsetDateTime::UNIX_EPOCH,
            updated_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    /// What is planned in short words, and how often an account was looked for.
    fn planned(
        change: impl FnOnce(&mut RenderedApp),
        link_by_email: bool,
        who: &Vouched,
        known: Option<User>,
    ) -> (&'static str, u32) {
        let mut doc = fixtures::rendered("shop");
        change(&mut doc);
        let provider = json!({
            "name": "id", "resource": "id", "linkByEmail": link_by_email,
            "settings": { "preset": "google", "clientID": "ours", "secret": null },
        });
        let provider = serde_json::from_value(provider).unwrap();
        let looks = Cell::new(0);
        let find = |email: &Email| {
            assert_eq!(email.as_str(), EMAIL);
            looks.set(looks.get() + 1);
            ready(Ok(known))
        };
        let plan = plan(&fixtures::app(doc), &provider, who, find).now_or_never().unwrap();
        let told = match plan {
            Ok(Plan::Link(_)) => "link",
            Ok(Plan::TakeOver(_, email)) if email.as_str() == EMAIL => "take over",
            Ok(Plan::Create { email: Some(_), pending: None }) => "create",
            Ok(Plan::Create { email: None, pending: Some(_) }) => "create, pending",
            Ok(Plan::Create { email: None, pending: None }) => "create, no address",
            Ok(other) => panic!("{other:?}"),
            Err(SignInError::Closed) => "closed",
            Err(SignInError::DomainNotAllowed) => "domain",
            Err(SignInError::EmailNotVerified) => "not verified",
            Err(SignInError::LinkRequired) => "link required",
            Err(SignInError::NoEmail) => "no address",
            Err(SignInError::Disabled) => "disabled",
            Err(error) => panic!("{error}"),
        };
        (told, looks.get())
    }

    fn nothing(_: &mut RenderedApp) {}

    #[test]
    fn a_verified_address_finds_its_account() {
        let who = vouched(Some(EMAIL), true);
        for (known, told) in [
            (None, "create"),
            (Some(account(true, false)), "link"),
            (Some(account(false, false)), "take over"),
            (Some(account(true, true)), "disabled"),
            (Some(account(false, true)), "disabled"),
        ] {
            assert_eq!(planned(nothing, true, &who, known), (told, 1));
        }
    }

    #[test]
    fn what_the_app_forbids_to_link_is_no_match_whatever_the_provider_is() {
        for (known, who) in [
            (None, vouched(Some(EMAIL), true)),
            (Some(account(true, false)), vouched(Some(EMAIL), true)),
            (Some(account(false, false)), vouched(Some(EMAIL), true)),
        ] {
            assert_eq!(planned(nothing, false, &who, known), ("create, pending", 0));
        }
    }

    #[test]
    fn an_address_that_is_not_verified_is_looked_up_only_where_an_app_protects_nobody() {
        let who = vouched(Some(EMAIL), false);
        let off = |doc: &mut RenderedApp| doc.enumeration_protection = EnumerationProtection::Disabled;
        for known in [None, Some(account(true, false)), Some(account(false, false))] {
            assert_eq!(planned(nothing, true, &who, known.clone()), ("create, pending", 0));
            let told = if known.is_some() { "link required" } else { "create, pending" };
            assert_eq!(planned(off, true, &who, known), (told, 1));
        }
    }

    #[test]
    fn where_addresses_must_be_verified_nothing_is_made_of_another() {
        let required = |doc: &mut RenderedApp| doc.require_verified_email = true;
        assert_eq!(planned(required, true, &vouched(Some(EMAIL), false), None), ("not verified", 0));
        assert_eq!(planned(required, false, &vouched(Some(EMAIL), true), None), ("not verified", 0));
        assert_eq!(planned(required, true, &vouched(Some(EMAIL), true), None), ("create", 1));
        let both = |doc: &mut RenderedApp| {
            doc.require_verified_email = true;
            doc.allow_users_without_email = true;
        };
        assert_eq!(planned(both, true, &vouched(None, false), None), ("not verified", 0));
    }

    #[test]
    fn who_has_no_address_is_let_in_where_the_app_says_so() {
        let allowed = |doc: &mut RenderedApp| doc.allow_users_without_email = true;
        assert_eq!(planned(nothing, true, &vouched(None, false), None), ("no address", 0));
        assert_eq!(planned(allowed, true, &vouched(None, false), None), ("create, no address", 0));
    }

    #[test]
    fn an_address_of_another_domain_is_refused_before_anything_is_looked_up() {
        let only = |doc: &mut RenderedApp| doc.allowed_email_domains = vec!["example.org".parse().unwrap()];
        for verified in [true, false] {
            let who = vouched(Some(EMAIL), verified);
            assert_eq!(planned(only, true, &who, Some(account(true, false))), ("domain", 0));
        }
    }

    #[test]
    fn closed_sign_up_keeps_out_who_has_no_account() {
        let closed = |doc: &mut RenderedApp| {
            doc.sign_up = SignUp::Closed;
            doc.allow_users_without_email = true;
        };
        for who in [vouched(Some(EMAIL), true), vouched(Some(EMAIL), false), vouched(None, false)] {
            assert_eq!(planned(closed, true, &who, None).0, "closed");
        }
        assert_eq!(planned(closed, true, &vouched(Some(EMAIL), true), Some(account(true, false))), ("link", 1));
    }

    #[test]
    fn a_users_cancel_is_one_in_every_providers_words() {
        for cancelled in ["access_denied", "user_cancelled_authorize", "user_cancelled_login"] {
            assert_eq!(refusal(cancelled), Some(AuthorizationError::AccessDenied));
        }
        assert_eq!(refusal("server_error"), Some(AuthorizationError::ServerError));
        for other in ["", "cancelled", "access_denied\r\n", "invalid_token"] {
            assert_eq!(refusal(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_passed_on_has_an_end_and_no_control_characters() {
        assert_eq!(checked(None, 3), Ok(None));
        assert_eq!(checked(Some("äöü"), 3), Ok(Some("äöü")), "characters count, not octets");
        assert_eq!(checked(Some("äöüß"), 3), Err(BadText::TooLong(3)));
        for control in ["\0", "\r\n", "\u{7f}", "\u{85}"] {
            assert_eq!(checked(Some(control), 3), Err(BadText::ControlCharacter));
        }
    }
}
