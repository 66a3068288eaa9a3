//! What becomes of one row of the outbox.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use latchkey_crds::{
    rendered::{RenderedSmtp, Revision},
    types::AppId,
};
use lettre::message::Mailbox;
use time::{OffsetDateTime, macros::format_description};
use tracing::{debug, error, info, warn};

use super::{
    MailMetrics, MailSettings, backoff, link,
    metrics::Fate,
    relay::{Letter, Relays, Route},
    templates::{Templates, Values, one_line},
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
        user::User,
    },
};

/// Carries out rows: reads who the mail goes to, makes its code, writes it and sends it.
pub(super) struct Delivery<S> {
    stores: Arc<S>,
    apps: Arc<Apps>,
    env: Arc<Env>,
    relays: Relays,
    metrics: MailMetrics,
    templates: Mutex<HashMap<AppId, (Revision, Arc<Templates>)>>,
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
        Self { stores, apps, env, relays: Relays::new(settings), metrics, templates: Mutex::default() }
    }

    async fn mail(&self, claimed: &Claimed, mail: &Mail) -> Outcome {
        let (outcome, fate) = match self.try_mail(claimed, mail).await {
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

    async fn try_mail(&self, claimed: &Claimed, mail: &Mail) -> Result<(Outcome, Fate), StoreError> {
        let Some(user) = mail.user else { return Ok((Outcome::Done, Fate::Skipped)) };
        let Some(app) = self.apps.get(claimed.app.as_str()) else {
            self.templates.lock().unwrap_or_else(PoisonError::into_inner).remove(&claimed.app);
            return Ok(self.wait(mail));
        };
        if let Some(lifetime) = lifetime(&app, mail.kind)
            && self.env.now() - mail.requested_at > lifetime
        {
            return Ok(self.dead(claimed, mail, "the mail is older than its code would live".to_owned()));
        }
        let Some(route) = route(&app, self.relays.settings()) else { return Ok(self.wait(mail)) };
        let user = self.stores.user(app.id(), user).await?;
        let Some(user) = user else { return Ok((Outcome::Done, Fate::Skipped)) };
        let Some(addressee) = addressee(&user, mail.kind) else { return Ok((Outcome::Done, Fate::Skipped)) };
        let letter = self.write(&app, claimed, mail, &user, &addressee).await?;
        let letter = match letter {
            Ok(letter) => letter,
            Err(reason) => return Ok(self.failed(claimed, mail, reason, false)),
        };
        let begun = Instant::now();
        let sent = self.relays.send(&route, letter).await;
        self.metrics.sent_in(begun.elapsed());
        Ok(match sent {
            Ok(()) => {
                debug!(app = %app.id(), row = %claimed.id, mail = mail.kind.as_str(), "sent");
                (Outcome::Done, Fate::Sent)
            }
            Err(error) => self.failed(claimed, mail, error.to_string(), error.is_final()),
        })
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
        let content = match self.templates(app).render(app.id().as_str(), mail.kind, values) {
            Ok(content) => content,
            Err(error) => return Ok(Err(format!("a default template failed: {error}"))),
        };
        Ok(match addressee.address.as_str().parse() {
            Ok(address) => Ok(Letter { id: claimed.id, to: Mailbox::new(None, address), at: now, content }),
            Err(_) => Err("the address is not one that mail can be sent to".to_owned()),
        })
    }

    /// The App's templates, compiled once for each revision.
    fn templates(&self, app: &App) -> Arc<Templates> {
        let mut cache = self.templates.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((revision, templates)) = cache.get(app.id())
            && *revision == app.revision
        {
            return templates.clone();
        }
        let templates = Arc::new(Templates::new(app.id().as_str(), &app.doc.mail.templates));
        cache.insert(app.id().clone(), (app.revision.clone(), templates.clone()));
        templates
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
        let error = match self.stores.raise_epoch(&claimed.app, news).await {
            Ok(Carried::Safely) => {
                self.metrics.epoch(Fate::Sent);
                return Outcome::Done;
            }
            Ok(Carried::Unconfirmed) => "no replica of Redis has it yet",
            Err(StoreError::Unavailable { .. }) => "Redis is away",
            Err(StoreError::Unexpected { .. }) => "Redis answered something unexpected",
        };
        self.metrics.epoch(Fate::Retried);
        let wait = backoff::for_epoch(claimed.attempts, self.env.unit());
        Outcome::Retry { at: self.env.now() + wait, error: error.to_owned() }
    }
}

impl<S: Users + Codes + Sessions + Send + Sync + 'static> Courier for Delivery<S> {
    async fn deliver(&self, claimed: &Claimed) -> Outcome {
        match &claimed.task {
            Task::Mail(mail) => self.mail(claimed, mail).await,
            Task::CarryEpoch(news) => self.carry_epoch(claimed, news).await,
        }
    }

    fn tidy(&self) {
        self.relays.close_idle();
    }
}

/// How long the code of such a mail lives; none: it has no code, and is of use at any age.
fn lifetime(app: &App, kind: MailKind) -> Option<Duration> {
    let seconds = match kind {
        MailKind::Confirm => app.doc.mail.confirm_code_lifetime_seconds,
        MailKind::Reset => app.doc.mail.reset_code_lifetime_seconds,
        MailKind::AccountExists | MailKind::PasswordChanged | MailKind::AddressChanged | MailKind::NewSignIn => {
            return None;
        }
    };
    Some(Duration::from_secs(seconds.into()))
}

/// Whom such a mail goes to; none: there is nothing to send any more.
fn addressee(user: &User, kind: MailKind) -> Option<Addressee> {
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
        MailKind::AccountExists | MailKind::PasswordChanged | MailKind::AddressChanged | MailKind::NewSignIn => {
            own(None).filter(|_| verified)
        }
    }
}

/// Through what the App's mail leaves now; none: through nothing, so it waits.
fn route(app: &App, settings: &MailSettings) -> Option<Route> {
    let mail = &app.doc.mail;
    let own_sender = mail.from.as_ref().and_then(|from| sender(from.as_str()));
    // The App's name where the mailbox has none.
    let named = |mailbox: &Mailbox| {
        let name = mailbox.name.as_deref().map(one_line).filter(|name| !name.is_empty());
        name.unwrap_or_else(|| one_line(&app.doc.display_name))
    };
    match &mail.smtp {
        RenderedSmtp::Unresolved => None,
        RenderedSmtp::Install => {
            let install = settings.install.as_ref()?;
            let mut from = sender(install.from.as_str())?;
            from.name = Some(own_sender.as_ref().map_or_else(|| one_line(&app.doc.display_name), named));
            Some(Route { relay: install.relay.clone(), owner: None, from, reply_to: own_sender })
        }
        RenderedSmtp::Own(relay) => {
            let from = match own_sender {
                Some(from) => Mailbox::new(Some(named(&from)), from.email),
                None => {
                    let install = sender(settings.install.as_ref()?.from.as_str())?;
                    Mailbox::new(Some(one_line(&app.doc.display_name)), install.email)
                }
            };
            Some(Route { relay: relay.clone(), owner: Some(app.id().clone()), from, reply_to: None })
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
