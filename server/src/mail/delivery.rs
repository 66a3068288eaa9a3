//! What becomes of one row of the outbox.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use latchkey_crds::{
    rendered::{RenderedMail, RenderedSmtp},
    templates::{Values, one_line},
    types::AppId,
};
use lettre::message::Mailbox;
use time::{OffsetDateTime, macros::format_description};
use tracing::{debug, error, info, warn};

use super::{
    MailMetrics, MailSettings, backoff,
    compiled::CompiledTemplates,
    link,
    metrics::Fate,
    relay::{Letter, Relays, Route},
    worker::Courier,
};
use crate::{
    config::Apps,
    domain::{
        app::App,
        clock::Env,
        code::{Code, CodeRecord, Purpose},
        email::Email,
        mail::{EpochNews, Mail, MailKind},
        ports::{Carried, Claimed, Codes, Outcome, Sessions, StoreError, Task, Users},
        session::Profile,
        user::{User, UserId},
    },
};

/// Carries out rows: reads who the mail goes to, makes its code, writes it and sends it.
pub(super) struct Delivery<S> {
    stores: Arc<S>,
    apps: Arc<Apps>,
    env: Arc<Env>,
    relays: Relays,
    metrics: MailMetrics,
    templates: CompiledTemplates,
}

/// Whom a mail goes to and what it may tell.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Addressee {
    address: Email,
    /// Empty where the address is not verified: such a mail carries nothing that a caller wrote.
    name: String,
    code: Option<Purpose>,
}

// === impl Delivery ===

impl<S: Users + Codes + Sessions + Send + Sync + 'static> Delivery<S> {
    pub(super) fn new(
        stores: Arc<S>,
        apps: Arc<Apps>,
        env: Arc<Env>,
        settings: MailSettings,
        metrics: MailMetrics,
    ) -> Self {
        Self { stores, apps, env, relays: Relays::new(settings), metrics, templates: CompiledTemplates::default() }
    }

    /// `former`: the address it goes to, where that is the user's no more.
    async fn mail(&self, claimed: &Claimed, mail: &Mail, former: Option<&Email>) -> Outcome {
        let (outcome, fate) = match self.try_mail(claimed, mail, former).await {
            Ok(ended) => ended,
            // No attempt at mailing was made, so none is counted.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(app = %claimed.app, row = %claimed.id, error, "a store is away; the mail waits");
                self.wait(mail)
            }
        };
        self.metrics.mail(mail.kind, fate);
        outcome
    }

    async fn try_mail(
        &self,
        claimed: &Claimed,
        mail: &Mail,
        former: Option<&Email>,
    ) -> Result<(Outcome, Fate), StoreError> {
        let Some(user) = mail.user else { return Ok((Outcome::Done, Fate::Skipped)) };
        let Some(app) = self.apps.get(claimed.app.as_str()) else {
            return Ok(self.wait(mail));
        };
        if let Some(lifetime) = lifetime(&app, mail.kind)
            && self.env.now() - mail.requested_at > lifetime
        {
            return Ok(self.dead(claimed, mail, "the mail is older than its code would live".to_owned()));
        }
        let route = route(app.id(), &app.doc.display_name, &app.doc.mail, self.relays.settings());
        let Some(route) = route else { return Ok(self.wait(mail)) };
        let user = self.stores.user(app.id(), user).await?;
        let Some(user) = user else { return Ok((Outcome::Done, Fate::Skipped)) };
        let (user, kind) = self.owner(&app, user, mail.kind).await?;
        let mail = &Mail { kind, ..mail.clone() };
        let Some(addressee) = addressee(&user, mail.kind, former) else { return Ok((Outcome::Done, Fate::Skipped)) };
        let letter = self.write(&app, claimed, mail, &user, &addressee).await?;
        let letter = match letter {
            Ok(letter) => letter,
            Err(reason) => return Ok(self.failed(claimed, mail, reason, false)),
        };
        let begun = Instant::now();
        let span = latchkey_trace::child!("client", "send mail");
        let sent = self.relays.send(&route, letter).await;
        if sent.is_err() {
            latchkey_trace::fail(&span, "not_sent");
        }
        drop(span);
        self.metrics.sent_in(begun.elapsed());
        Ok(match sent {
            Ok(()) => {
                debug!(app = %app.id(), row = %claimed.id, mail = mail.kind.as_str(), "sent");
                (Outcome::Done, Fate::Sent)
            }
            Err(error) => self.failed(claimed, mail, error.to_string(), error.is_final()),
        })
    }

    /// Whose mail it is, and which. A code for a pending address goes to nobody who has that address confirmed: they
    /// hear that they have an account. It is decided here, so that the request need not know.
    async fn owner(&self, app: &App, user: User, kind: MailKind) -> Result<(User, MailKind), StoreError> {
        let pending = user.pending_email.as_ref().filter(|_| kind == MailKind::Confirm && !user.disabled);
        let Some(pending) = pending else { return Ok((user, kind)) };
        let owner = self.stores.user_by_email(app.id(), pending).await?;
        let owner = owner.filter(|owner| owner.id != user.id && owner.email_verified);
        Ok(owner.map_or((user, kind), |owner| (owner, MailKind::AccountExists)))
    }

    /// Writes the mail; its code is kept before it is told to anybody.
    async fn write(
        &self,
        app: &App,
        claimed: &Claimed,
        mail: &Mail,
        user: &User,
        addressee: &Addressee,
    ) -> Result<Result<Letter, String>, StoreError> {
        let now = self.env.now();
        let (mut code, mut url, mut expires_at) = (String::new(), String::new(), String::new());
        if let Some(purpose) = addressee.code {
            let end = now + lifetime(app, mail.kind).unwrap_or(Duration::ZERO);
            let made = Code::generate(&self.env);
            let record = CodeRecord {
                user: user.id,
                purpose,
                epoch: user.epoch,
                address: addressee.address.canonical().to_owned(),
                expires_at: end.unix_timestamp(),
            };
            self.stores.put_code(app.id(), &made.key_to_store(app), &record).await?;
            code = made.shown();
            let template = match mail.kind {
                MailKind::Reset => &app.doc.mail.reset_url,
                MailKind::Confirm
                | MailKind::AccountExists
                | MailKind::PasswordChanged
                | MailKind::AddressChanging
                | MailKind::AddressChanged
                | MailKind::NewSignIn => &app.doc.mail.confirm_url,
            };
            url = template.as_ref().map_or_else(String::new, |url| link::fill(url, &code, addressee.address.as_str()));
            expires_at = shown(end);
        }
        let values = Values {
            app: &app.doc.display_name,
            name: &addressee.name,
            code: &code,
            url: &url,
            registered_at: &shown(mail.requested_at),
            expires_at: &expires_at,
        };
        let id = app.id().as_str();
        let content = match self.templates.get(id, &app.doc.mail.templates).render(id, mail.kind, values) {
            Ok(content) => content,
            Err(error) => return Ok(Err(format!("a default template failed: {error}"))),
        };
        Ok(match addressee.address.as_str().parse() {
            Ok(address) => Ok(Letter { id: claimed.id, to: Mailbox::new(None, address), at: now, content }),
            Err(_) => Err("the address is not one that mail can be sent to".to_owned()),
        })
    }

    fn failed(&self, claimed: &Claimed, mail: &Mail, error: String, last: bool) -> (Outcome, Fate) {
        match backoff::after_failure(claimed.attempts, self.env.unit()) {
            Some(wait) if !last => {
                info!(
                    app = %claimed.app,
                    row = %claimed.id,
                    mail = mail.kind.as_str(),
                    attempts = claimed.attempts + 1,
                    error,
                    "a mail was not sent and will be tried again"
                );
                (Outcome::Retry { at: self.env.now() + wait, error }, Fate::Retried)
            }
            Some(_) | None => self.dead(claimed, mail, error),
        }
    }

    fn dead(&self, claimed: &Claimed, mail: &Mail, error: String) -> (Outcome, Fate) {
        error!(
            app = %claimed.app,
            row = %claimed.id,
            mail = mail.kind.as_str(),
            attempts = claimed.attempts + 1,
            error,
            "a mail is not tried any more"
        );
        (Outcome::Dead { error }, Fate::Dead)
    }

    fn wait(&self, mail: &Mail) -> (Outcome, Fate) {
        let now = self.env.now();
        let age = Duration::try_from(now - mail.requested_at).unwrap_or_default();
        (Outcome::Wait { at: now + backoff::while_waiting(age, self.env.unit()) }, Fate::Waited)
    }

    async fn carry_epoch(&self, claimed: &Claimed, news: &EpochNews) -> Outcome {
        let profile = match self.profile(claimed, news.user).await {
            Ok(profile) => profile,
            Err(error) => return self.carry_again(claimed, unreached(&error)),
        };
        match self.stores.raise_epoch(&claimed.app, news, profile.as_ref()).await {
            Ok(Carried::Safely) => {
                self.metrics.epoch(Fate::Sent);
                Outcome::Done
            }
            Ok(Carried::Unconfirmed) => self.carry_again(claimed, "no replica of Redis has it yet"),
            Err(error) => self.carry_again(claimed, unreached(&error)),
        }
    }

    async fn carry_profile(&self, claimed: &Claimed, user: UserId) -> Outcome {
        let carried = match self.profile(claimed, user).await {
            Ok(Some(profile)) => self.stores.put_profile(&claimed.app, user, &profile).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match carried {
            Ok(()) => {
                self.metrics.epoch(Fate::Sent);
                Outcome::Done
            }
            Err(error) => self.carry_again(claimed, unreached(&error)),
        }
    }

    /// What tokens say of the user now; none where the user is gone.
    async fn profile(&self, claimed: &Claimed, user: UserId) -> Result<Option<Profile>, StoreError> {
        Ok(self.stores.user(&claimed.app, user).await?.map(|user| user.profile()))
    }

    fn carry_again(&self, claimed: &Claimed, error: &str) -> Outcome {
        self.metrics.epoch(Fate::Retried);
        let wait = backoff::for_epoch(claimed.attempts, self.env.unit());
        Outcome::Retry { at: self.env.now() + wait, error: error.to_owned() }
    }
}

impl<S: Users + Codes + Sessions + Send + Sync + 'static> Courier for Delivery<S> {
    async fn deliver(&self, claimed: &Claimed) -> Outcome {
        match &claimed.task {
            Task::Mail(mail) => self.mail(claimed, mail, None).await,
            Task::MailToFormer(mail, address) => self.mail(claimed, mail, Some(address)).await,
            Task::CarryEpoch(news) => self.carry_epoch(claimed, news).await,
            Task::CarryProfile(user) => self.carry_profile(claimed, *user).await,
        }
    }

    fn tidy(&self) {
        self.relays.close_idle();
    }
}

fn unreached(error: &StoreError) -> &'static str {
    match error {
        StoreError::Unavailable { .. } => "a store is away",
        StoreError::Unexpected { .. } => "a store answered something unexpected",
    }
}

/// How long the code of such a mail lives; none: it has no code, and is of use at any age.
fn lifetime(app: &App, kind: MailKind) -> Option<Duration> {
    let seconds = match kind {
        MailKind::Confirm => app.doc.mail.confirm_code_lifetime_seconds,
        MailKind::Reset => app.doc.mail.reset_code_lifetime_seconds,
        MailKind::AccountExists
        | MailKind::PasswordChanged
        | MailKind::AddressChanging
        | MailKind::AddressChanged
        | MailKind::NewSignIn => return None,
    };
    Some(Duration::from_secs(seconds.into()))
}

/// Whom such a mail goes to; none: there is nothing to send any more. `former`: an address that was the user's, and
/// verified.
fn addressee(user: &User, kind: MailKind, former: Option<&Email>) -> Option<Addressee> {
    if user.disabled {
        return None;
    }
    let verified = user.email_verified;
    let own = |code| {
        let name = if verified { user.name.clone() } else { String::new() };
        user.email.clone().map(|address| Addressee { address, name, code })
    };
    match kind {
        MailKind::Confirm => match &user.pending_email {
            Some(pending) => {
                Some(Addressee { address: pending.clone(), name: String::new(), code: Some(Purpose::Change) })
            }
            None if verified => None,
            None => own(Some(Purpose::Confirm)),
        },
        MailKind::Reset => own(Some(Purpose::Reset)),
        MailKind::AccountExists | MailKind::PasswordChanged | MailKind::AddressChanging | MailKind::NewSignIn => {
            own(None).filter(|_| verified)
        }
        MailKind::AddressChanged => {
            former.map(|address| Addressee { address: address.clone(), name: user.name.clone(), code: None })
        }
    }
}

/// Through what the App's mail leaves now; none: through nothing, so it waits.
pub(super) fn route(app: &AppId, display_name: &str, mail: &RenderedMail, settings: &MailSettings) -> Option<Route> {
    let own_sender = mail.from.as_ref().and_then(|from| sender(from.as_str()));
    // The App's name where the mailbox has none.
    let named = |mailbox: &Mailbox| {
        let name = mailbox.name.as_deref().map(one_line).filter(|name| !name.is_empty());
        name.unwrap_or_else(|| one_line(display_name))
    };
    match &mail.smtp {
        RenderedSmtp::Unresolved => None,
        RenderedSmtp::Install => {
            let install = settings.install.as_ref()?;
            let mut from = sender(install.from.as_str())?;
            from.name = Some(own_sender.as_ref().map_or_else(|| one_line(display_name), named));
            Some(Route { relay: install.relay.clone(), owner: None, from, reply_to: own_sender })
        }
        RenderedSmtp::Own(relay) => {
            let from = match own_sender {
                Some(from) => Mailbox::new(Some(named(&from)), from.email),
                None => {
                    let install = sender(settings.install.as_ref()?.from.as_str())?;
                    Mailbox::new(Some(one_line(display_name)), install.email)
                }
            };
            Some(Route { relay: relay.clone(), owner: Some(app.clone()), from, reply_to: None })
        }
    }
}

/// A mailbox of a manifest: an address, or `Name <address>`, where the name may stand in quotes.
fn sender(mailbox: &str) -> Option<Mailbox> {
    let (name, address) = match mailbox.trim_end().strip_suffix('>') {
        Some(rest) => rest.rsplit_once('<')?,
        None => ("", mailbox),
    };
    let name = name.trim();
    let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name);
    let name = Some(one_line(name)).filter(|name| !name.is_empty());
    Some(Mailbox::new(name, address.parse().ok()?))
}

/// A time as people read it, in UTC and saying so.
fn shown(time: OffsetDateTime) -> String {
    let format = format_description!("[day padding:none] [month repr:long] [year], [hour]:[minute] UTC");
    time.to_offset(time::UtcOffset::UTC).format(&format).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Mutex};

    use latchkey_crds::rendered::{SmtpRelay, SmtpTls};
    use prometheus_client::registry::Registry;
    use time::macros::datetime;
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{
            audit::Event,
            code::CodeKey,
            password::PasswordHash,
            ports::{Changed, Confirmation, Creation, NewUser, PasswordReset},
            session::{LiveSession, NewSession, Opening, RefreshRules, Refreshed, SessionId, SessionInfo},
            token::RefreshToken,
            user::Epoch,
        },
        fixtures,
        mail::{InstallRelay, relay::tests::relay as listener},
        outbound::Reach,
    };

    const NOTICES: [MailKind; 4] =
        [MailKind::AccountExists, MailKind::PasswordChanged, MailKind::AddressChanging, MailKind::NewSignIn];

    fn user() -> User {
        User {
            id: UserId(Uuid::nil()),
            email: Some(Email::parse("Ada@Example.com").unwrap()),
            email_verified: false,
            pending_email: None,
            name: "Ada <Click> here".to_owned(),
            password_hash: None,
            password_session: None,
            contested: false,
            disabled: false,
            epoch: Epoch(3),
            version: 1,
            created_at: datetime!(2026-02-01 09:30 UTC),
            updated_at: datetime!(2026-02-01 09:30 UTC),
        }
    }

    fn to(address: &str, name: &str, code: Option<Purpose>) -> Option<Addressee> {
        Some(Addressee { address: Email::parse(address).unwrap(), name: name.to_owned(), code })
    }

    #[test]
    fn a_mail_to_an_unverified_address_carries_no_name() {
        let user = user();
        assert_eq!(addressee(&user, MailKind::Confirm, None), to("Ada@Example.com", "", Some(Purpose::Confirm)));
        assert_eq!(addressee(&user, MailKind::Reset, None), to("Ada@Example.com", "", Some(Purpose::Reset)));
        for notice in NOTICES {
            assert_eq!(addressee(&user, notice, None), None, "{notice:?}");
        }
    }

    #[test]
    fn a_verified_address_gets_notices_and_resets_but_nothing_to_confirm() {
        let user = User { email_verified: true, ..user() };
        assert_eq!(addressee(&user, MailKind::Confirm, None), None);
        assert_eq!(
            addressee(&user, MailKind::Reset, None),
            to("Ada@Example.com", "Ada <Click> here", Some(Purpose::Reset))
        );
        for notice in NOTICES {
            assert_eq!(addressee(&user, notice, None), to("Ada@Example.com", "Ada <Click> here", None), "{notice:?}");
        }
    }

    #[test]
    fn a_pending_address_is_confirmed_there_and_everything_else_goes_to_the_old_one() {
        let pending_email = Some(Email::parse("new@example.org").unwrap());
        let user = User { email_verified: true, pending_email, ..user() };
        assert_eq!(addressee(&user, MailKind::Confirm, None), to("new@example.org", "", Some(Purpose::Change)));
        assert_eq!(addressee(&user, MailKind::Reset, None).unwrap().address.as_str(), "Ada@Example.com");
        let user = User { email: None, email_verified: false, ..user };
        assert_eq!(addressee(&user, MailKind::Reset, None), None);
    }

    #[test]
    fn the_former_address_alone_hears_that_it_was_changed() {
        let user = User { email_verified: true, ..user() };
        let former = Email::parse("old@example.org").unwrap();
        let expected = to("old@example.org", "Ada <Click> here", None);
        assert_eq!(addressee(&user, MailKind::AddressChanged, Some(&former)), expected);
        assert_eq!(addressee(&user, MailKind::AddressChanged, None), None);
    }

    #[test]
    fn a_disabled_user_gets_nothing() {
        for email_verified in [false, true] {
            let user = User { disabled: true, email_verified, ..user() };
            for kind in MailKind::ALL {
                assert_eq!(addressee(&user, kind, None), None, "{kind:?}");
            }
        }
    }

    fn relay(host: &str) -> SmtpRelay {
        SmtpRelay { host: host.to_owned(), port: 587, tls: SmtpTls::Starttls, username: None, password: None }
    }

    fn mail(from: Option<&str>, smtp: RenderedSmtp) -> RenderedMail {
        RenderedMail {
            from: from.map(|from| from.parse().unwrap()),
            confirm_url: None,
            reset_url: None,
            confirm_code_lifetime_seconds: 86_400,
            reset_code_lifetime_seconds: 1_800,
            templates: BTreeMap::new(),
            smtp,
        }
    }

    fn routed(mail: &RenderedMail, install: bool) -> Option<(String, String, Option<String>, bool)> {
        let from = "Install <noreply@auth.example.net>".parse().unwrap();
        let install = install.then(|| InstallRelay { relay: relay("install"), from });
        let settings = MailSettings { install, ..MailSettings::default() };
        let route = route(&"shop".parse().unwrap(), "The\r\nShop", mail, &settings)?;
        let reply_to = route.reply_to.map(|reply_to| reply_to.to_string());
        Some((route.relay.host, route.from.to_string(), reply_to, route.owner.is_some()))
    }

    #[test]
    fn over_the_install_the_sender_is_the_install_under_the_name_of_the_app() {
        let route = |from| routed(&mail(from, RenderedSmtp::Install), true);
        let expected = |name: &str, reply_to: Option<&str>| {
            let from = format!("{name} <noreply@auth.example.net>");
            Some(("install".to_owned(), from, reply_to.map(str::to_owned), false))
        };
        assert_eq!(route(None), expected("The Shop", None));
        assert_eq!(
            route(Some("Our Shop <hello@shop.example.com>")),
            expected("Our Shop", Some("Our Shop <hello@shop.example.com>"))
        );
        assert_eq!(route(Some("hello@shop.example.com")), expected("The Shop", Some("hello@shop.example.com")));
    }

    #[test]
    fn over_its_own_relay_the_sender_is_the_apps() {
        let route = |from| routed(&mail(from, RenderedSmtp::Own(relay("own"))), true);
        let expected = |from: &str| Some(("own".to_owned(), from.to_owned(), None, true));
        assert_eq!(route(Some("hello@shop.example.com")), expected("The Shop <hello@shop.example.com>"));
        assert_eq!(route(Some("\"Our Shop\" <hello@shop.example.com>")), expected("Our Shop <hello@shop.example.com>"));
        assert_eq!(route(None), expected("The Shop <noreply@auth.example.net>"));
    }

    #[test]
    fn without_a_relay_or_a_sender_there_is_no_route() {
        assert!(routed(&mail(None, RenderedSmtp::Unresolved), true).is_none());
        assert!(routed(&mail(Some("a@b.example"), RenderedSmtp::Install), false).is_none());
        assert!(routed(&mail(None, RenderedSmtp::Own(relay("own"))), false).is_none());
    }

    #[test]
    fn times_are_in_utc_and_say_so() {
        assert_eq!(shown(datetime!(2026-11-02 00:05 +02:00)), "1 November 2026, 22:05 UTC");
    }

    /// Answers what a delivery may ask, and nothing else.
    #[derive(Default)]
    struct Script {
        user: Option<User>,
        /// None: Redis is away.
        codes: Option<Mutex<Vec<(CodeKey, CodeRecord)>>>,
        carried: Option<Carried>,
    }

    fn away<T>() -> Result<T, StoreError> {
        Err(StoreError::Unavailable { store: "Redis", source: "gone".into() })
    }

    impl Users for Script {
        async fn user(&self, _: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
            Ok(self.user.clone().filter(|user| user.id == id))
        }

        async fn user_by_email(&self, _: &AppId, _: &Email) -> Result<Option<User>, StoreError> {
            unreachable!("a mail goes to a user")
        }

        async fn create_user(&self, _: &AppId, _: NewUser, _: Option<Mail>) -> Result<Creation, StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn registered_again(
            &self,
            _: &AppId,
            _: UserId,
            _: Epoch,
            _: bool,
            _: Option<Mail>,
            _: Event,
        ) -> Result<(), StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn renew_hash(&self, _: &AppId, _: UserId, _: &PasswordHash, _: PasswordHash) -> Result<(), StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn confirm_address(&self, _: &AppId, _: Confirmation) -> Result<Option<Changed>, StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn reset_password(&self, _: &AppId, _: PasswordReset) -> Result<Option<Changed>, StoreError> {
            unreachable!("a mail changes no user")
        }
    }

    impl Codes for Script {
        async fn put_code(&self, _: &AppId, key: &CodeKey, record: &CodeRecord) -> Result<(), StoreError> {
            let Some(codes) = &self.codes else { return away() };
            codes.lock().unwrap().push((key.clone(), record.clone()));
            Ok(())
        }

        async fn find_code(&self, _: &AppId, _: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
            unreachable!("a mail redeems no code")
        }

        async fn take_code(&self, _: &AppId, _: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
            unreachable!("a mail redeems no code")
        }
    }

    impl Sessions for Script {
        async fn open_session(&self, _: &AppId, _: &NewSession) -> Result<Opening, StoreError> {
            unreachable!("a mail opens no session")
        }

        async fn session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Option<LiveSession>, StoreError> {
            unreachable!("a mail reads no session")
        }

        async fn sessions(&self, _: &AppId, _: UserId) -> Result<Vec<SessionInfo>, StoreError> {
            unreachable!("a mail reads no session")
        }

        async fn refresh(&self, _: &AppId, _: &RefreshToken, _: &RefreshRules) -> Result<Refreshed, StoreError> {
            unreachable!("a mail refreshes nothing")
        }

        async fn end_session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<bool, StoreError> {
            unreachable!("a mail ends no session")
        }

        async fn end_other_sessions(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Vec<SessionId>, StoreError> {
            unreachable!("a mail ends no session")
        }

        async fn raise_epoch(
            &self,
            _: &AppId,
            _: &EpochNews,
            profile: Option<&Profile>,
        ) -> Result<Carried, StoreError> {
            assert_eq!(profile.map(|profile| profile.version), self.user.as_ref().map(|user| user.version));
            self.carried.map_or_else(away, Ok)
        }

        async fn put_profile(&self, _: &AppId, user: UserId, profile: &Profile) -> Result<(), StoreError> {
            let known = self.user.as_ref().unwrap();
            assert_eq!((user, profile), (known.id, &known.profile()));
            self.carried.map_or_else(away, |_| Ok(()))
        }
    }

    /// An App `shop` with its own relay on this port of loopback.
    fn delivery(script: Script, port: u16) -> Delivery<Script> {
        let mut doc = fixtures::rendered("shop");
        doc.mail.from = Some("hello@shop.example.com".parse().unwrap());
        doc.mail.reset_url = Some("https://shop.example.com/reset?code={code}&email={email}".parse().unwrap());
        let relay = SmtpRelay { port, tls: SmtpTls::None, ..relay("127.0.0.1") };
        doc.mail.smtp = RenderedSmtp::Own(relay);
        let apps = Apps::default();
        apps.put(&doc.app_id.clone(), &doc.to_bytes());
        let mut unresolved = fixtures::rendered("unresolved");
        unresolved.mail.smtp = RenderedSmtp::Unresolved;
        apps.put(&unresolved.app_id.clone(), &unresolved.to_bytes());
        let reach = Reach { allow_insecure: true, ..Reach::default() };
        let settings = MailSettings { reach, ..MailSettings::default() };
        let metrics = MailMetrics::register(&mut Registry::default());
        Delivery::new(Arc::new(script), Arc::new(apps), Arc::new(Env::system()), settings, metrics)
    }

    fn row(app: &str, task: Task) -> Claimed {
        let lease_until = datetime!(2026-02-01 09:30 UTC);
        Claimed { id: Uuid::from_u128(1), app: app.parse().unwrap(), attempts: 0, task, lease_until, trace: None }
    }

    fn reset(requested_at: OffsetDateTime) -> Task {
        Task::Mail(Mail { kind: MailKind::Reset, user: Some(user().id), requested_at })
    }

    #[tokio::test]
    async fn the_code_in_the_mail_is_the_one_that_was_kept() {
        let (port, said) = listener(&[]).await;
        let script = Script { user: Some(user()), codes: Some(Mutex::default()), carried: None };
        let delivery = delivery(script, port);
        let now = delivery.env.now();
        assert!(matches!(delivery.deliver(&row("shop", reset(now))).await, Outcome::Done));
        let stores = delivery.stores.clone();
        let app = delivery.apps.get("shop").unwrap();
        drop(delivery);
        // Quoted-printable (RFC 2045, 6.7), as far as these texts have need of it.
        let content = said.await.unwrap().pop().unwrap().replace("=\r\n", "").replace("=3D", "=");
        let code = content.lines().find_map(|line| Code::parse(line).ok()).expect("the code stands on a line");
        let kept = stores.codes.as_ref().unwrap().lock().unwrap();
        let [(key, record)] = &kept[..] else { panic!("one code is kept") };
        assert_eq!(*key, code.key_to_store(&app));
        assert_eq!(
            (record.purpose, record.epoch, record.address.as_str()),
            (Purpose::Reset, Epoch(3), "ada@example.com")
        );
        assert!((1_799..1_830).contains(&(record.expires_at - now.unix_timestamp())));
        let link = format!("https://shop.example.com/reset?code={}&email=Ada%40Example.com", code.shown());
        assert!(content.contains(&link), "{content}");
        assert!(!content.contains("Click"), "{content}");
    }

    #[tokio::test]
    async fn a_refused_recipient_is_dead_and_one_refused_for_now_is_tried_again() {
        let refused = async |answer: &'static [(&'static str, &'static str)]| {
            let (port, _said) = listener(answer).await;
            let script = Script { user: Some(user()), codes: Some(Mutex::default()), carried: None };
            let delivery = delivery(script, port);
            let now = delivery.env.now();
            delivery.deliver(&row("shop", reset(now))).await
        };
        let outcome = refused(&[("RCPT", "550 Ada@Example.com is unknown\r\n")]).await;
        assert!(
            matches!(&outcome, Outcome::Dead { error } if error == "the relay refused the recipient (550)"),
            "{outcome:?}"
        );
        let outcome = refused(&[("RCPT", "451 later\r\n")]).await;
        assert!(
            matches!(&outcome, Outcome::Retry { error, .. } if error == "the relay refused the recipient (451)"),
            "{outcome:?}"
        );
    }

    #[tokio::test]
    async fn what_cannot_be_tried_waits_and_is_not_counted() {
        // Port 9 takes no connection; nothing gets so far.
        let delivery = delivery(Script { user: Some(user()), codes: None, carried: None }, 9);
        let now = delivery.env.now();
        for app in ["shop", "unresolved", "not-served"] {
            let outcome = delivery.deliver(&row(app, reset(now))).await;
            assert!(matches!(outcome, Outcome::Wait { at } if at > now), "{app}: {outcome:?}");
        }
    }

    #[tokio::test]
    async fn a_reset_older_than_its_code_would_live_is_dead() {
        let delivery = delivery(Script::default(), 9);
        let old = delivery.env.now() - Duration::from_secs(1_801);
        let outcome = delivery.deliver(&row("shop", reset(old))).await;
        assert!(matches!(&outcome, Outcome::Dead { error } if error.contains("older")), "{outcome:?}");
    }

    #[tokio::test]
    async fn a_row_for_nobody_sends_nothing() {
        let delivery = delivery(Script::default(), 9);
        let now = delivery.env.now();
        let mail = Mail { kind: MailKind::Reset, user: None, requested_at: now };
        assert!(matches!(delivery.deliver(&row("shop", Task::Mail(mail))).await, Outcome::Done));
        assert!(matches!(delivery.deliver(&row("shop", reset(now))).await, Outcome::Done), "the user is gone");
    }

    #[tokio::test]
    async fn an_epoch_is_carried_until_it_is_safe() {
        let news = EpochNews { user: user().id, epoch: Epoch(4), keep: None };
        let carry = async |carried| {
            let delivery = delivery(Script { carried, ..Script::default() }, 9);
            let row = Claimed { attempts: 1_000, ..row("not-served", Task::CarryEpoch(news.clone())) };
            let soon = delivery.env.now() + Duration::from_secs(60);
            (delivery.deliver(&row).await, soon)
        };
        assert!(matches!(carry(Some(Carried::Safely)).await.0, Outcome::Done));
        for carried in [Some(Carried::Unconfirmed), None] {
            let (outcome, soon) = carry(carried).await;
            assert!(matches!(outcome, Outcome::Retry { at, .. } if at < soon), "{carried:?}: {outcome:?}");
        }
    }
}
