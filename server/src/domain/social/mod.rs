//! Social login, from *redirect* to a session (specification: Social login).

use latchkey_crds::{
    rendered::{BrowserBinding, CallbackMode, EnumerationProtection, RenderedProvider, SignUp},
    types::ProviderName,
};
use time::{Duration, OffsetDateTime};
use tracing::warn;

use super::{
    app::App,
    audit::{Detail, Event, EventKind},
    authentication::AuthenticatedSession,
    client::ClientInfo,
    clock::Env,
    email::Email,
    email_account::{self, CommonError},
    flow::{
        CodeChallenge, FLOW_SECONDS, Flow, FlowBinding, FlowState, InvalidChallenge, LOGIN_CODE_SECONDS, LoginCode,
        PendingLogin, TooManyFlows,
    },
    identity::{
        AuthorizationCodeGrant, AuthorizationError, AuthorizationRequest, Identity, ProviderError, ProviderOperation,
        VerifiedIdentity,
    },
    mail::{Mail, MailKind},
    ports::{
        AccountTransfer, AuditLog, Flows, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity, Outbox,
        Providers, RateLimits, Sessions, StoreError, StoreFlowError, UnlinkOutcome, UnlinkRequest, Users,
    },
    rate_limits::{self, MailPurpose},
    redirect::{self, ParameterLocation, RedirectNotAllowed, RedirectTarget},
    session::{Amr, NewSession, SessionId},
    token::Tokens,
    user::{Epoch, User, UserId},
};

/// The longest `state` of an app, in characters (specification: Social login, Redirect).
const MAX_APP_STATE_CHARS: usize = 512;
/// The longest `prompt` and `login_hint` that are passed on, in characters: an email address fits.
const MAX_HINT_CHARS: usize = 254;
/// How recent the login must be to link an identity (specification: Social login, Identities).
const RECENT_LOGIN: Duration = Duration::minutes(5);
/// How often a login starts again after a concurrent change. Each time another request succeeded.
const MAX_ATTEMPTS: u32 = 5;

/// The App's provider with that name.
pub fn find_provider<'a>(app: &'a App, name: &str) -> Option<&'a RenderedProvider> {
    app.doc.providers.iter().find(|provider| provider.name.as_str() == name)
}

/// Our callback URL for an App and a Provider, as registered at the provider.
fn callback_url(app: &App, provider: &RenderedProvider) -> String {
    format!("{}/{}/callback", app.doc.issuer, provider.name)
}

// === redirect ===

/// The parameters of *redirect*.
pub struct StartFlowInput<'a> {
    pub redirect_url: Option<&'a str>,
    pub state: Option<&'a str>,
    pub prompt: Option<&'a str>,
    pub login_hint: Option<&'a str>,
    pub code_challenge: Option<&'a str>,
    pub binding: FlowBinding,
}

pub struct StartedFlow {
    /// The provider's authorization URL, to which the browser goes.
    pub url: String,
    pub state: FlowState,
    /// The sealed flow for the browser's cookie, if the flow is bound to it.
    pub sealed: Option<String>,
    pub seconds: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum StartFlowError {
    #[error(transparent)]
    RedirectUrl(#[from] RedirectNotAllowed),
    #[error("state {0}")]
    State(InvalidText),
    #[error("prompt {0}")]
    Prompt(InvalidText),
    #[error("login_hint {0}")]
    LoginHint(InvalidText),
    #[error("code_challenge {0}")]
    Challenge(#[from] InvalidChallenge),
    /// The App's callback mode is `Code`, which requires a challenge.
    #[error("code_challenge is missing, which this App requires")]
    MissingChallenge,
    /// The App accepts only flows that are bound to a browser.
    #[error("format=json is only for pages of the same site")]
    Unbound,
    #[error(transparent)]
    TooMany(#[from] TooManyFlows),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Common(#[from] CommonError),
}

impl From<StoreFlowError> for StartFlowError {
    fn from(error: StoreFlowError) -> Self {
        match error {
            StoreFlowError::TooManyFlows(too_many) => Self::TooMany(too_many),
            StoreFlowError::Store(error) => Self::Common(error.into()),
        }
    }
}

/// Why a text is not passed on to the provider or the app.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidText {
    #[error("is longer than {0} characters")]
    TooLong(usize),
    #[error("has a control character")]
    ControlCharacter,
}

fn validate_text(text: Option<&str>, most: usize) -> Result<Option<&str>, InvalidText> {
    let Some(text) = text else { return Ok(None) };
    if text.chars().count() > most {
        return Err(InvalidText::TooLong(most));
    }
    if text.chars().any(char::is_control) { Err(InvalidText::ControlCharacter) } else { Ok(Some(text)) }
}

/// Starts a flow. Nothing is stored before the whole request is valid.
pub async fn start_flow<S: Flows + Providers>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
    request: StartFlowInput<'_>,
) -> Result<StartedFlow, StartFlowError> {
    let target = redirect::choose_target(&app.doc.redirect_urls, request.redirect_url)?;
    let app_state = validate_text(request.state, MAX_APP_STATE_CHARS).map_err(StartFlowError::State)?;
    let prompt = validate_text(request.prompt, MAX_HINT_CHARS).map_err(StartFlowError::Prompt)?;
    let login_hint = validate_text(request.login_hint, MAX_HINT_CHARS).map_err(StartFlowError::LoginHint)?;
    let code_challenge = request.code_challenge.map(CodeChallenge::parse).transpose()?;
    if code_challenge.is_none() && app.doc.callback_mode == CallbackMode::Code {
        return Err(StartFlowError::MissingChallenge);
    }
    if request.binding == FlowBinding::Unbound && app.doc.browser_binding == BrowserBinding::Required {
        return Err(StartFlowError::Unbound);
    }

    let state = FlowState::generate(env);
    let flow = Flow {
        target: target.as_ref().map(|target| target.reference().clone()),
        app_state: app_state.map(str::to_owned),
        code_challenge,
        ..Flow::start(env)
    };
    let authorization = AuthorizationRequest {
        redirect_uri: &callback_url(app, provider),
        state: state.as_str(),
        code_challenge: &flow.provider_challenge(),
        nonce: stores.capabilities(provider).has_nonce.then_some(flow.nonce.as_str()),
        prompt,
        login_hint,
    };
    let permit = stores.try_acquire(ProviderOperation::Redirect, app, provider, caller.client_address())?;
    let url = stores.authorization_url(&permit, provider, &authorization).await?;
    drop(permit);
    let sealed = flow.seal(env, app, &provider.name, &state, request.binding);
    let sealed = match request.binding {
        FlowBinding::Browser => Some(sealed),
        FlowBinding::Unbound => {
            stores.store_flow(app.id(), &state.id(), &sealed, caller.client_address()).await?;
            None
        }
    };
    Ok(StartedFlow { url, state, sealed, seconds: FLOW_SECONDS })
}

// === callback ===

/// What the provider sent to *callback* through the browser.
pub struct CallbackInput<'a> {
    pub state: FlowState,
    pub code: Option<&'a str>,
    pub iss: Option<&'a str>,
    pub error: Option<&'a str>,
    pub posted_user: Option<&'a str>,
    /// The sealed flows in the browser's cookies for that state.
    pub sealed: Vec<&'a str>,
}

/// How a flow ends, and where the browser goes.
pub struct FinishedFlow {
    /// `None`: the App has no redirect addresses and gets JSON.
    pub target: Option<RedirectTarget>,
    pub parameter_location: ParameterLocation,
    pub app_state: Option<String>,
    /// Whether the state is used. It is not if the call was not admitted: the same callback can be sent again.
    pub is_state_used: bool,
    pub outcome: Result<FlowResult, ProviderLoginError>,
}

/// What the app gets for its user.
pub enum FlowResult {
    Session(Box<ProviderLogin>),
    /// A one-time code that the app exchanges for a session.
    Code(LoginCode),
}

/// A user with a new session.
pub struct ProviderLogin {
    pub user: User,
    pub tokens: Tokens,
}

/// Why a callback cannot be answered with a redirect: there is no address that may get the response.
#[derive(Debug, thiserror::Error)]
pub enum CallbackError {
    #[error("the state is missing, used, expired or of another flow")]
    InvalidState,
    /// The address has been removed from the list.
    #[error(transparent)]
    RedirectUrl(#[from] RedirectNotAllowed),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Why a provider's user gets no session.
#[derive(Debug, thiserror::Error)]
pub enum ProviderLoginError {
    /// The provider reported an error, or the user refused there. `None`: an error that is not passed on.
    #[error("the provider answered with an error")]
    ProviderReported(Option<AuthorizationError>),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error("sign-up is closed")]
    Closed,
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    #[error("the address is not verified")]
    EmailNotVerified,
    /// Only without enumeration protection.
    #[error("the address has an account, and this provider must not be linked by address")]
    LinkRequired,
    #[error("the provider sent no email address")]
    MissingEmail,
    #[error("the user is disabled")]
    Disabled,
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Ends a flow. Once the call is admitted, its state is used, whatever the outcome.
pub async fn finish_flow<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
    returned: CallbackInput<'_>,
) -> Result<FinishedFlow, CallbackError>
where
    S: Users + Identities + RateLimits + Outbox + Sessions + Flows + Providers + AuditLog,
{
    let id = returned.state.id();
    let now = env.now();
    let open = |binding, sealed: &str| Flow::open(app, &provider.name, &returned.state, binding, sealed, now);
    let held = returned.sealed.iter().find_map(|sealed| open(FlowBinding::Browser, sealed));
    let (flow, binding) = match held {
        Some(flow) => (flow, FlowBinding::Browser),
        None => {
            if app.doc.browser_binding == BrowserBinding::Required {
                return Err(CallbackError::InvalidState);
            }
            let kept = stores.find_flow(app.id(), &id).await.map_err(CommonError::from)?;
            let flow =
                kept.and_then(|sealed| open(FlowBinding::Unbound, &sealed)).ok_or(CallbackError::InvalidState)?;
            (flow, FlowBinding::Unbound)
        }
    };
    // An address that is no longer on the list gets nothing, not even an error.
    let target = flow.target.as_ref().map(|mark| redirect::find_target(&app.doc.redirect_urls, mark)).transpose()?;
    let place = match app.doc.callback_mode {
        CallbackMode::Query | CallbackMode::Code => ParameterLocation::Query,
        CallbackMode::Fragment => ParameterLocation::Fragment,
    };
    // Before the state is used, so that a call that finds no capacity can be repeated.
    let permit = match acquire_provider_permit(stores, ProviderOperation::Callback, app, provider, caller).await {
        Ok(permit) => permit,
        Err(error) => {
            return Ok(FinishedFlow {
                target,
                parameter_location: place,
                app_state: flow.app_state,
                is_state_used: false,
                outcome: Err(error),
            });
        }
    };
    let outcome = match stores.consume_flow(app.id(), &id, binding).await {
        Ok(true) => complete_login(stores, env, app, provider, caller, permit, &returned, &flow, target.as_ref()).await,
        Ok(false) => return Err(CallbackError::InvalidState),
        Err(error) => Err(CommonError::from(error).into()),
    };
    Ok(FinishedFlow { target, parameter_location: place, app_state: flow.app_state, is_state_used: true, outcome })
}

/// Admits a call to the provider if there is capacity for it and its client has not reached the rate limit.
///
/// Capacity comes first: a call that finds none is not counted. Each callback counts as a login, since anybody can
/// start flows and invent codes about which we then ask the provider.
async fn acquire_provider_permit<S: RateLimits + Providers>(
    stores: &S,
    operation: ProviderOperation,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
) -> Result<S::Permit, ProviderLoginError> {
    let permit = stores.try_acquire(operation, app, provider, caller.client_address())?;
    stores.acquire(app.id(), rate_limits::provider_logins(app, caller)).await.map_err(CommonError::from)?;
    Ok(permit)
}

/// The rest of a callback, once the flow belongs to this browser and nobody else has used it.
#[expect(
    clippy::too_many_arguments,
    reason = "the second half of `callback`, separate so that its failures are handled in one place"
)]
async fn complete_login<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
    permit: S::Permit,
    returned: &CallbackInput<'_>,
    flow: &Flow,
    target: Option<&RedirectTarget>,
) -> Result<FlowResult, ProviderLoginError>
where
    S: Users + Identities + RateLimits + Outbox + Sessions + Flows + Providers + AuditLog,
{
    let code = match (returned.error, returned.code) {
        (Some(error), _) => {
            // An error from another issuer is not this provider's (RFC 9207, 2.4).
            stores.validate_issuer(&permit, provider, returned.iss).await?;
            return Err(ProviderLoginError::ProviderReported(authorization_error(error)));
        }
        (None, Some(code)) if !code.is_empty() => code,
        (None, _) => return Err(ProviderLoginError::ProviderReported(None)),
    };
    let grant = AuthorizationCodeGrant {
        redirect_uri: &callback_url(app, provider),
        code,
        code_verifier: &flow.code_verifier,
        nonce: stores.capabilities(provider).has_nonce.then_some(flow.nonce.as_str()),
        iss: returned.iss,
        posted_user: returned.posted_user,
    };
    let vouched = stores.exchange_code(&permit, provider, &grant).await?;
    drop(permit);
    let signing_in = LoginAttempt { stores, env, app, provider, caller };
    match &flow.code_challenge {
        None => signing_in.log_in(&vouched).await.map(|session| FlowResult::Session(Box::new(session))),
        Some(challenge) => {
            let user = signing_in.find_or_create_user(&vouched).await?;
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
            stores.store_login(app.id(), &code.key(), &login).await.map_err(CommonError::from)?;
            email_account::remember_client(stores, app, caller, &user).await;
            Ok(FlowResult::Code(code))
        }
    }
}

/// The error of a provider. Some use codes of their own if the user cancels (Apple, LinkedIn).
fn authorization_error(error: &str) -> Option<AuthorizationError> {
    match error {
        "user_cancelled_authorize" | "user_cancelled_login" => Some(AuthorizationError::AccessDenied),
        other => AuthorizationError::parse(other),
    }
}

// === login with a provider's token ===

/// Logs in the user of a provider's token.
pub async fn log_in_with_token<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
    token: &str,
    nonce: Option<&str>,
) -> Result<ProviderLogin, ProviderLoginError>
where
    S: Users + Identities + RateLimits + Outbox + Sessions + Providers + AuditLog,
{
    let permit = acquire_provider_permit(stores, ProviderOperation::Login, app, provider, caller).await?;
    let vouched = stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    LoginAttempt { stores, env, app, provider, caller }.log_in(&vouched).await
}

// === identification ===

/// A login with a provider in progress: the parameters of its steps.
struct LoginAttempt<'a, S> {
    stores: &'a S,
    env: &'a Env,
    app: &'a App,
    provider: &'a RenderedProvider,
    caller: &'a ClientInfo,
}

/// What to do for a new identity.
#[derive(Debug)]
enum Plan {
    /// The address belongs to an account that has verified it.
    Link(User),
    /// The address belongs to an account that has not verified it.
    Transfer(User, Email),
    Create {
        email: Option<Email>,
        pending: Option<Email>,
    },
}

impl<S: Users + Identities + RateLimits + Outbox + Sessions + AuditLog> LoginAttempt<'_, S> {
    /// Opens a session for the user of a verified identity.
    async fn log_in(&self, vouched: &VerifiedIdentity) -> Result<ProviderLogin, ProviderLoginError> {
        for _ in 0..MAX_ATTEMPTS {
            let user = self.find_or_create_user(vouched).await?;
            let opened =
                email_account::open_session(self.stores, self.env, self.app, self.caller, &user, Amr::Federated)
                    .await?;
            if let Some(tokens) = opened {
                email_account::remember_client(self.stores, self.app, self.caller, &user).await;
                return Ok(ProviderLogin { user, tokens });
            }
            // The user has changed since it was read: start again.
        }
        Err(CommonError::from(contention_error()).into())
    }

    /// The user, found by identity first. A new identity is linked, or its user is created.
    async fn find_or_create_user(&self, vouched: &VerifiedIdentity) -> Result<User, ProviderLoginError> {
        for _ in 0..MAX_ATTEMPTS {
            let (authority, subject) = (&vouched.authority, &vouched.subject);
            let known =
                self.stores.user_by_identity(self.app.id(), authority, subject).await.map_err(CommonError::from)?;
            let user = match known {
                Some(user) => Some(user),
                None => {
                    let find = |email| self.stores.user_by_email(self.app.id(), email);
                    self.execute(plan_new_identity(self.app, self.provider, vouched, find).await?, vouched).await?
                }
            };
            let Some(user) = user else { continue };
            if user.disabled {
                return Err(ProviderLoginError::Disabled);
            }
            if self.app.doc.require_verified_email && !user.email_verified {
                return Err(ProviderLoginError::EmailNotVerified);
            }
            return Ok(user);
        }
        Err(CommonError::from(contention_error()).into())
    }

    /// Returns `None` if a concurrent request came first: nothing was written, and the caller starts again.
    async fn execute(&self, plan: Plan, vouched: &VerifiedIdentity) -> Result<Option<User>, CommonError> {
        let now = self.env.now();
        let identity = new_identity(self.provider, vouched, now);
        match plan {
            Plan::Link(user) => {
                let address = user.email.as_ref().map(|email| email.canonical().to_owned());
                let event = self.event(EventKind::IdentityLinked, user.id);
                let linking = LinkRequest { user: user.id, epoch: user.epoch, address, identity, event };
                match self.stores.link_identity(self.app.id(), linking).await? {
                    LinkOutcome::Done => Ok(Some(user)),
                    LinkOutcome::AlreadyLinked(_) | LinkOutcome::UserChanged => Ok(None),
                }
            }
            Plan::Transfer(user, email) => {
                let change = AccountTransfer {
                    user: user.id,
                    epoch: user.epoch,
                    address: email.canonical().to_owned(),
                    name: name_or_empty(vouched),
                    identity,
                    event: self.event(EventKind::IdentityLinked, user.id),
                };
                let changed = self.stores.transfer_account(self.app.id(), change).await?;
                if let Some(user) = &changed {
                    email_account::propagate_epoch(self.stores, self.app, user, None).await;
                }
                Ok(changed)
            }
            Plan::Create { email, pending } => self.create_user(email, pending, vouched, identity, now).await,
        }
    }

    async fn create_user(
        &self,
        email: Option<Email>,
        pending: Option<Email>,
        vouched: &VerifiedIdentity,
        identity: NewIdentity,
        now: OffsetDateTime,
    ) -> Result<Option<User>, CommonError> {
        let id = UserId(self.env.new_uuid());
        let mut mailing = None;
        let mut mail = None;
        if let Some(address) = &pending {
            mailing =
                email_account::acquire_mail_limit(self.stores, self.app, self.caller, address, MailPurpose::Confirm)
                    .await?;
            if mailing.is_some() {
                mail = Some(self.mail_to_pending(address, id, now).await?);
            }
        }
        let user = NewFederatedUser {
            id,
            email: email.clone(),
            pending_email: pending.clone(),
            name: name_or_empty(vouched),
            created_at: now,
            event: self.event(EventKind::Registered, id),
        };
        let made = self.stores.create_federated_user(self.app.id(), user, identity, mail).await;
        if !matches!(made, Ok(true)) {
            email_account::release_mail_limit(self.stores, self.app, mailing).await;
        }
        if !made? {
            return Ok(None);
        }
        Ok(Some(User {
            id,
            email_verified: email.is_some(),
            email,
            pending_email: pending,
            name: name_or_empty(vouched),
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

    /// The mail to an address that the provider has not verified: its code or, if it is the verified address of another
    /// account, the notice that the account exists.
    async fn mail_to_pending(&self, address: &Email, id: UserId, now: OffsetDateTime) -> Result<Mail, CommonError> {
        let owner = self.stores.user_by_email(self.app.id(), address).await?.filter(|owner| owner.email_verified);
        Ok(match owner {
            None => Mail { kind: MailKind::Confirm, recipient: Some(id), requested_at: now },
            // The owner of a disabled account gets no mail. The row is written all the same, and sends nothing.
            Some(owner) => Mail {
                kind: MailKind::AccountExists,
                recipient: (!owner.disabled).then_some(owner.id),
                requested_at: now,
            },
        })
    }

    fn event(&self, kind: EventKind, user: UserId) -> Event {
        Event::new(self.env, self.caller, kind, user).with_detail(provider_detail(&self.provider.name))
    }
}

/// What to do for a new identity, or why nothing is done. `find` looks up the user of an address; called at most once.
async fn plan_new_identity<'a, F>(
    app: &App,
    provider: &RenderedProvider,
    vouched: &'a VerifiedIdentity,
    find: impl FnOnce(&'a Email) -> F,
) -> Result<Plan, ProviderLoginError>
where
    F: Future<Output = Result<Option<User>, StoreError>>,
{
    let doc = &app.doc;
    let Some(provider_email) = &vouched.email else {
        if !doc.allow_users_without_email {
            return Err(ProviderLoginError::MissingEmail);
        }
        return plan_creation(app, None, None);
    };
    if !app.allows_email_domain(&provider_email.email) {
        return Err(ProviderLoginError::DomainNotAllowed);
    }
    if provider_email.is_verified && provider.link_by_email {
        let email = provider_email.email.clone();
        return match find(&provider_email.email).await.map_err(CommonError::from)? {
            Some(user) if user.disabled => Err(ProviderLoginError::Disabled),
            Some(user) if user.email_verified => Ok(Plan::Link(user)),
            Some(user) => Ok(Plan::Transfer(user, email)),
            None => plan_creation(app, Some(email), None),
        };
    }
    if doc.enumeration_protection == EnumerationProtection::Disabled
        && find(&provider_email.email).await.map_err(CommonError::from)?.is_some()
    {
        return Err(ProviderLoginError::LinkRequired);
    }
    plan_creation(app, None, Some(provider_email.email.clone()))
}

fn plan_creation(app: &App, email: Option<Email>, pending: Option<Email>) -> Result<Plan, ProviderLoginError> {
    if app.doc.require_verified_email && email.is_none() {
        return Err(ProviderLoginError::EmailNotVerified);
    }
    if app.doc.sign_up == SignUp::Closed {
        return Err(ProviderLoginError::Closed);
    }
    Ok(Plan::Create { email, pending })
}

/// The detail of an event that names the Provider.
fn provider_detail(provider: &ProviderName) -> Detail {
    Detail { provider: Some(provider.clone()), ..Detail::default() }
}

fn new_identity(provider: &RenderedProvider, vouched: &VerifiedIdentity, at: OffsetDateTime) -> NewIdentity {
    NewIdentity {
        authority: vouched.authority.clone(),
        subject: vouched.subject.clone(),
        provider: provider.name.clone(),
        email: vouched.email.as_ref().map(|told| told.email.clone()),
        at,
    }
}

fn name_or_empty(vouched: &VerifiedIdentity) -> String {
    vouched.name.as_ref().map_or_else(String::new, |name| name.as_str().to_owned())
}

/// Concurrent requests came first each time.
fn contention_error() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: "the account is being changed".into() }
}

// === code exchange ===

/// A one-time code with the proof that its sender may use it.
pub struct CodeExchangeInput<'a> {
    pub code: &'a str,
    pub code_verifier: &'a str,
    /// If it is sent, it must equal that of the flow.
    pub redirect_url: Option<&'a str>,
}

pub struct ExchangedSession {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum CodeExchangeError {
    /// The code is unknown, expired or used, or the verifier or the redirect address does not match.
    #[error("the code is not valid")]
    InvalidGrant,
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Exchanges a one-time code for a session. A second use ends the session of the first (RFC 6749, 4.1.2).
pub async fn exchange_code<S: Flows + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    exchange: CodeExchangeInput<'_>,
) -> Result<ExchangedSession, CodeExchangeError> {
    let key = LoginCode::parse(exchange.code).ok_or(CodeExchangeError::InvalidGrant)?.key();
    let found = stores.find_login(app.id(), &key).await.map_err(CommonError::from)?;
    let found = found.ok_or(CodeExchangeError::InvalidGrant)?;
    let login = found.login;
    if let Some(session) = found.session {
        stores.end_session(app.id(), login.user, session).await.map_err(CommonError::from)?;
        return Err(CodeExchangeError::InvalidGrant);
    }
    let right_place = exchange.redirect_url.is_none_or(|url| login.redirect_url.as_deref() == Some(url));
    let in_time = env.now().unix_timestamp() < login.expires_at;
    if !in_time || !right_place || !login.challenge.is_satisfied_by(exchange.code_verifier) {
        return Err(CodeExchangeError::InvalidGrant);
    }
    let opened_at =
        OffsetDateTime::from_unix_timestamp(login.auth_time).map_err(|_| CodeExchangeError::InvalidGrant)?;
    let tokens = &app.doc.tokens;
    // The address of the browser, whichever client exchanges its code.
    let ip = login.ip.parse().map_err(|_| CodeExchangeError::InvalidGrant)?;
    let caller = ClientInfo { ip, user_agent: login.user_agent.clone() };
    let new = NewSession {
        id: SessionId(env.new_uuid()),
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
    // Opened before the exchange is recorded: a second exchange then finds a session that it can end.
    let tokens = match email_account::open_prepared_session(stores, env, app, &caller, &new).await? {
        Some(tokens) => tokens,
        // The user's password was reset since, or the user was disabled.
        None => return Err(CodeExchangeError::InvalidGrant),
    };
    match stores.redeem_login(app.id(), &key, new.id).await {
        Ok(None) => Ok(ExchangedSession { user: login.user, tokens }),
        Ok(Some(first)) => {
            for session in [first, new.id] {
                stores.end_session(app.id(), login.user, session).await.map_err(CommonError::from)?;
            }
            Err(CodeExchangeError::InvalidGrant)
        }
        Err(error) => {
            if let Err(error) = stores.end_session(app.id(), login.user, new.id).await {
                warn!(app = %app.id(), error = &error as &dyn std::error::Error, "an unused session stays open");
            }
            Err(CommonError::from(error).into())
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
    /// The identity is linked to another account.
    #[error("the identity belongs to another account")]
    AlreadyLinked,
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Links an identity to a logged-in user. Does nothing if it is already linked to that user.
#[expect(clippy::too_many_arguments, reason = "the parameters of every use case, the provider and its token")]
pub async fn link_identity<S: Users + Identities + RateLimits + Providers>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    provider: &RenderedProvider,
    token: &str,
    nonce: Option<&str>,
) -> Result<(), LinkError> {
    if env.now() - signed_in.session.auth_time > RECENT_LOGIN {
        return Err(LinkError::ReauthenticationRequired);
    }
    let permit = stores.try_acquire(ProviderOperation::Login, app, provider, caller.client_address())?;
    stores.acquire(app.id(), rate_limits::provider_logins(app, caller)).await.map_err(CommonError::from)?;
    let user = stores.user(app.id(), signed_in.user_id()).await.map_err(CommonError::from)?;
    let user = user.filter(|user| !user.disabled && user.epoch == signed_in.session.epoch);
    let user = user.ok_or(LinkError::InvalidToken)?;
    // Otherwise somebody could add an identity to an account that somebody else confirms later, and get in with it.
    if user.email.is_some() && !user.email_verified {
        return Err(LinkError::EmailNotVerified);
    }
    let vouched = stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    let identity = new_identity(provider, &vouched, env.now());
    let event = Event::new(env, caller, EventKind::IdentityLinked, user.id);
    let event = event.in_session(signed_in.session.id).with_detail(provider_detail(&provider.name));
    let linking = LinkRequest { user: user.id, epoch: user.epoch, address: None, identity, event };
    match stores.link_identity(app.id(), linking).await.map_err(CommonError::from)? {
        LinkOutcome::Done => Ok(()),
        LinkOutcome::AlreadyLinked(owner) if owner == user.id => Ok(()),
        LinkOutcome::AlreadyLinked(_) => Err(LinkError::AlreadyLinked),
        LinkOutcome::UserChanged => Err(LinkError::InvalidToken),
    }
}

/// The identities of a user: the ways to log in other than a password.
pub async fn list_identities<S: Identities>(
    stores: &S,
    app: &App,
    signed_in: &AuthenticatedSession,
) -> Result<Vec<Identity>, CommonError> {
    Ok(stores.identities(app.id(), signed_in.user_id()).await?)
}

/// Removes a Provider's identities from their user, but never the last way to log in.
pub async fn unlink_identity<S: Identities>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    provider: &ProviderName,
) -> Result<UnlinkOutcome, CommonError> {
    let event = Event::new(env, caller, EventKind::IdentityUnlinked, signed_in.user_id());
    let unlinking = UnlinkRequest {
        user: signed_in.user_id(),
        provider: provider.clone(),
        usable: app.doc.providers.iter().map(|provider| provider.name.clone()).collect(),
        event: event.in_session(signed_in.session.id).with_detail(provider_detail(provider)),
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
    use crate::{domain::identity::ProviderEmail, fixtures};

    const EMAIL: &str = "Ada@Example.com";

    fn verified_identity(email: Option<&str>, verified: bool) -> VerifiedIdentity {
        let email = email.map(|email| ProviderEmail { email: Email::parse(email).unwrap(), is_verified: verified });
        VerifiedIdentity { authority: "https://id.example".to_owned(), subject: "1".to_owned(), email, name: None }
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

    /// The plan in short words, and how often an account was looked up.
    fn plan_summary(
        change: impl FnOnce(&mut RenderedApp),
        link_by_email: bool,
        who: &VerifiedIdentity,
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
        let plan = plan_new_identity(&fixtures::app(doc), &provider, who, find).now_or_never().unwrap();
        let told = match plan {
            Ok(Plan::Link(_)) => "link",
            Ok(Plan::Transfer(_, email)) if email.as_str() == EMAIL => "take over",
            Ok(Plan::Create { email: Some(_), pending: None }) => "create",
            Ok(Plan::Create { email: None, pending: Some(_) }) => "create, pending",
            Ok(Plan::Create { email: None, pending: None }) => "create, no address",
            Ok(other) => panic!("{other:?}"),
            Err(ProviderLoginError::Closed) => "closed",
            Err(ProviderLoginError::DomainNotAllowed) => "domain",
            Err(ProviderLoginError::EmailNotVerified) => "not verified",
            Err(ProviderLoginError::LinkRequired) => "link required",
            Err(ProviderLoginError::MissingEmail) => "no address",
            Err(ProviderLoginError::Disabled) => "disabled",
            Err(error) => panic!("{error}"),
        };
        (told, looks.get())
    }

    fn unchanged(_: &mut RenderedApp) {}

    #[test]
    fn a_verified_address_finds_its_account() {
        let who = verified_identity(Some(EMAIL), true);
        for (known, told) in [
            (None, "create"),
            (Some(account(true, false)), "link"),
            (Some(account(false, false)), "take over"),
            (Some(account(true, true)), "disabled"),
            (Some(account(false, true)), "disabled"),
        ] {
            assert_eq!(plan_summary(unchanged, true, &who, known), (told, 1));
        }
    }

    #[test]
    fn an_address_is_no_match_if_the_app_forbids_linking() {
        for (known, who) in [
            (None, verified_identity(Some(EMAIL), true)),
            (Some(account(true, false)), verified_identity(Some(EMAIL), true)),
            (Some(account(false, false)), verified_identity(Some(EMAIL), true)),
        ] {
            assert_eq!(plan_summary(unchanged, false, &who, known), ("create, pending", 0));
        }
    }

    #[test]
    fn an_unverified_address_is_looked_up_only_without_enumeration_protection() {
        let who = verified_identity(Some(EMAIL), false);
        let off = |doc: &mut RenderedApp| doc.enumeration_protection = EnumerationProtection::Disabled;
        for known in [None, Some(account(true, false)), Some(account(false, false))] {
            assert_eq!(plan_summary(unchanged, true, &who, known.clone()), ("create, pending", 0));
            let told = if known.is_some() { "link required" } else { "create, pending" };
            assert_eq!(plan_summary(off, true, &who, known), (told, 1));
        }
    }

    #[test]
    fn an_unverified_address_is_rejected_if_verification_is_required() {
        let required = |doc: &mut RenderedApp| doc.require_verified_email = true;
        assert_eq!(plan_summary(required, true, &verified_identity(Some(EMAIL), false), None), ("not verified", 0));
        assert_eq!(plan_summary(required, false, &verified_identity(Some(EMAIL), true), None), ("not verified", 0));
        assert_eq!(plan_summary(required, true, &verified_identity(Some(EMAIL), true), None), ("create", 1));
        let both = |doc: &mut RenderedApp| {
            doc.require_verified_email = true;
            doc.allow_users_without_email = true;
        };
        assert_eq!(plan_summary(both, true, &verified_identity(None, false), None), ("not verified", 0));
    }

    #[test]
    fn a_user_without_an_address_is_admitted_if_the_app_allows_it() {
        let allowed = |doc: &mut RenderedApp| doc.allow_users_without_email = true;
        assert_eq!(plan_summary(unchanged, true, &verified_identity(None, false), None), ("no address", 0));
        assert_eq!(plan_summary(allowed, true, &verified_identity(None, false), None), ("create, no address", 0));
    }

    #[test]
    fn an_address_of_another_domain_is_rejected_before_any_lookup() {
        let only = |doc: &mut RenderedApp| doc.allowed_email_domains = vec!["example.org".parse().unwrap()];
        for verified in [true, false] {
            let who = verified_identity(Some(EMAIL), verified);
            assert_eq!(plan_summary(only, true, &who, Some(account(true, false))), ("domain", 0));
        }
    }

    #[test]
    fn closed_sign_up_rejects_users_without_an_account() {
        let closed = |doc: &mut RenderedApp| {
            doc.sign_up = SignUp::Closed;
            doc.allow_users_without_email = true;
        };
        for who in [
            verified_identity(Some(EMAIL), true),
            verified_identity(Some(EMAIL), false),
            verified_identity(None, false),
        ] {
            assert_eq!(plan_summary(closed, true, &who, None).0, "closed");
        }
        assert_eq!(
            plan_summary(closed, true, &verified_identity(Some(EMAIL), true), Some(account(true, false))),
            ("link", 1)
        );
    }

    #[test]
    fn a_cancelled_login_is_recognized_for_every_provider() {
        for cancelled in ["access_denied", "user_cancelled_authorize", "user_cancelled_login"] {
            assert_eq!(authorization_error(cancelled), Some(AuthorizationError::AccessDenied));
        }
        assert_eq!(authorization_error("server_error"), Some(AuthorizationError::ServerError));
        for other in ["", "cancelled", "access_denied\r\n", "invalid_token"] {
            assert_eq!(authorization_error(other), None, "{other}");
        }
    }

    #[test]
    fn passed_on_text_is_bounded_and_has_no_control_characters() {
        assert_eq!(validate_text(None, 3), Ok(None));
        assert_eq!(validate_text(Some("äöü"), 3), Ok(Some("äöü")), "characters count, not bytes");
        assert_eq!(validate_text(Some("äöüß"), 3), Err(InvalidText::TooLong(3)));
        for control in ["\0", "\r\n", "\u{7f}", "\u{85}"] {
            assert_eq!(validate_text(Some(control), 3), Err(InvalidText::ControlCharacter));
        }
    }
}
