//! Delivers one row of the outbox.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use latchkey_crds::{
    rendered::{RenderedMail, RenderedSmtp},
    templates::{TemplateValues, to_one_line},
    types::AppId,
};
use lettre::message::Mailbox;
use time::{OffsetDateTime, macros::format_description};
use tracing::{debug, error, info, warn};

use super::{
    backoff,
    deliverer::Deliverer,
    link,
    metrics::{AttemptOutcome, MailMetrics},
    relay::{OutgoingMail, RelayPool, Route},
    settings::MailSettings,
    template_cache::TemplateCache,
};
use crate::{
    config::Apps,
    domain::{
        app::App,
        clock::Env,
        code::{Code, CodePurpose, CodeRecord},
        email::Email,
        mail::{EpochChange, Mail, MailKind},
        pages::PagesUrl,
        ports::{
            ClaimedRow, Codes, DeliveryOutcome, GroupChanges, OutboxTask, Replication, Sessions, StoreError, Users,
        },
        session::Profile,
        user::{User, UserId},
    },
};

/// Delivers rows. For a mail: reads the recipient, generates the code, renders the mail and sends it.
pub(super) struct OutboxDeliverer<S> {
    stores: Arc<S>,
    apps: Arc<Apps>,
    env: Arc<Env>,
    relays: RelayPool,
    metrics: MailMetrics,
    templates: TemplateCache,
}

/// The recipient of a mail, and what the mail can contain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Recipient {
    address: Email,
    /// Empty if the email address is not verified: a mail to an unverified address contains nothing that a client
    /// wrote.
    name: String,
    /// The purpose of the code in the mail. `None` if the mail has no code.
    code: Option<CodePurpose>,
}

// === impl OutboxDeliverer ===

impl<S: Users + Codes + Sessions + GroupChanges + Send + Sync + 'static> OutboxDeliverer<S> {
    pub(super) fn new(
        stores: Arc<S>,
        apps: Arc<Apps>,
        env: Arc<Env>,
        settings: MailSettings,
        metrics: MailMetrics,
    ) -> Self {
        Self { stores, apps, env, relays: RelayPool::new(settings), metrics, templates: TemplateCache::default() }
    }

    /// `former`: a former email address of the user. If it is set, this address gets the mail.
    async fn deliver_mail(&self, claimed: &ClaimedRow, mail: &Mail, former: Option<&Email>) -> DeliveryOutcome {
        let (outcome, attempt) = match self.try_deliver_mail(claimed, mail, former).await {
            Ok(outcomes) => outcomes,
            // Nothing was sent, so this does not count as an attempt.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(app = %claimed.app, row = %claimed.id, error, "a store is unavailable; the mail waits");
                self.postpone(mail)
            }
        };
        self.metrics.count_mail(mail.kind, attempt);
        outcome
    }

    async fn try_deliver_mail(
        &self,
        claimed: &ClaimedRow,
        mail: &Mail,
        former: Option<&Email>,
    ) -> Result<(DeliveryOutcome, AttemptOutcome), StoreError> {
        let Some(user) = mail.recipient else { return Ok((DeliveryOutcome::Done, AttemptOutcome::Skipped)) };
        let Some(app) = self.apps.get(claimed.app.as_str()) else {
            return Ok(self.postpone(mail));
        };
        if let Some(lifetime) = code_lifetime(&app, mail.kind)
            && self.env.now() - mail.requested_at > lifetime
        {
            return Ok(self.dead_letter(claimed, mail, "the mail is older than the lifetime of its code".to_owned()));
        }
        let route = route(app.id(), &app.doc.display_name, &app.doc.mail, self.relays.settings());
        let Some(route) = route else { return Ok(self.postpone(mail)) };
        let user = self.stores.user(app.id(), user).await?;
        let Some(user) = user else { return Ok((DeliveryOutcome::Done, AttemptOutcome::Skipped)) };
        let (user, kind) = self.recipient_and_kind(&app, user, mail.kind).await?;
        let mail = &Mail { kind, ..mail.clone() };
        let Some(recipient) = recipient(&user, mail.kind, former) else {
            return Ok((DeliveryOutcome::Done, AttemptOutcome::Skipped));
        };
        let outgoing = self.render(&app, claimed, mail, &user, &recipient).await?;
        let outgoing = match outgoing {
            Ok(outgoing) => outgoing,
            Err(reason) => return Ok(self.retry_or_give_up(claimed, mail, reason, false)),
        };
        let started = Instant::now();
        let span = latchkey_telemetry::child_span!("client", "send mail");
        let sent = self.relays.send(&route, outgoing).await;
        if sent.is_err() {
            latchkey_telemetry::record_error(&span, "not_sent");
        }
        drop(span);
        self.metrics.observe_send(started.elapsed());
        Ok(match sent {
            Ok(()) => {
                debug!(app = %app.id(), row = %claimed.id, mail = mail.kind.as_str(), "sent");
                (DeliveryOutcome::Done, AttemptOutcome::Sent)
            }
            Err(error) => self.retry_or_give_up(claimed, mail, error.to_string(), error.is_permanent()),
        })
    }

    /// The user who gets the mail, and the kind of the mail. If another user has verified the pending email address,
    /// that user gets the "you already have an account" mail instead of a code. The decision is made at delivery, so
    /// that the response to the request cannot depend on it.
    async fn recipient_and_kind(&self, app: &App, user: User, kind: MailKind) -> Result<(User, MailKind), StoreError> {
        let pending = user.pending_email.as_ref().filter(|_| kind == MailKind::Confirm && !user.disabled);
        let Some(pending) = pending else { return Ok((user, kind)) };
        let owner = self.stores.user_by_email(app.id(), pending).await?;
        let owner = owner.filter(|owner| owner.id != user.id && owner.email_verified);
        Ok(owner.map_or((user, kind), |owner| (owner, MailKind::AccountExists)))
    }

    /// Renders the mail, and stores its code before the mail is sent. The inner error says why there is no mail.
    async fn render(
        &self,
        app: &App,
        claimed: &ClaimedRow,
        mail: &Mail,
        user: &User,
        recipient: &Recipient,
    ) -> Result<Result<OutgoingMail, String>, StoreError> {
        let now = self.env.now();
        let (mut code, mut url, mut expires_at) = (String::new(), String::new(), String::new());
        if let Some(purpose) = recipient.code {
            let end = now + code_lifetime(app, mail.kind).unwrap_or(Duration::ZERO);
            let new_code = Code::generate(&self.env);
            let record = CodeRecord {
                user: user.id,
                purpose,
                epoch: user.epoch,
                address: recipient.address.canonical().to_owned(),
                expires_at: end.unix_timestamp(),
            };
            self.stores.store_code(app.id(), &new_code.key_to_store(app), &record).await?;
            code = new_code.display_form();
            let template = match mail.kind {
                MailKind::Reset => app.doc.mail.reset_url.as_ref(),
                MailKind::Invitation => app.doc.mail.invitation_url(),
                MailKind::Confirm
                | MailKind::AccountExists
                | MailKind::PasswordChanged
                | MailKind::AddressChanging
                | MailKind::AddressChanged
                | MailKind::NewSignIn => app.doc.mail.confirm_url.as_ref(),
            };
            let template = template.map(|url| url.as_str().to_owned()).or_else(|| self.page_template(app, mail.kind));
            url = template.map_or_else(String::new, |url| link::fill_template(&url, &code, recipient.address.as_str()));
            expires_at = format_time(end);
        }
        let values = TemplateValues {
            app: &app.doc.display_name,
            name: &recipient.name,
            code: &code,
            url: &url,
            registered_at: &format_time(mail.requested_at),
            expires_at: &expires_at,
        };
        let id = app.id().as_str();
        let content = match self.templates.get(id, &app.doc.mail.templates).render(id, mail.kind, values) {
            Ok(content) => content,
            Err(error) => return Ok(Err(format!("a default template failed: {error}"))),
        };
        Ok(match recipient.address.as_str().parse() {
            Ok(address) => Ok(OutgoingMail { id: claimed.id, to: Mailbox::new(None, address), date: now, content }),
            Err(_) => Err("the address is not one that mail can be sent to".to_owned()),
        })
    }

    /// The link to the hosted page, with placeholders. It is used if the App names no page of its own. `None` if the
    /// App has no hosted pages.
    fn page_template(&self, app: &App, kind: MailKind) -> Option<String> {
        app.pages.as_ref()?;
        let path = match kind {
            MailKind::Reset | MailKind::Invitation => "reset?code={code}&email={email}",
            MailKind::Confirm
            | MailKind::AccountExists
            | MailKind::PasswordChanged
            | MailKind::AddressChanging
            | MailKind::AddressChanged
            | MailKind::NewSignIn => "confirm?code={code}",
        };
        Some(PagesUrl::new(app, self.apps.held_pages_host(app)).page(path))
    }

    fn retry_or_give_up(
        &self,
        claimed: &ClaimedRow,
        mail: &Mail,
        error: String,
        is_permanent: bool,
    ) -> (DeliveryOutcome, AttemptOutcome) {
        match backoff::after_failure(claimed.attempts, self.env.random_unit()) {
            Some(wait) if !is_permanent => {
                info!(
                    app = %claimed.app,
                    row = %claimed.id,
                    mail = mail.kind.as_str(),
                    attempts = claimed.attempts + 1,
                    error,
                    "a mail was not sent and will be tried again"
                );
                (DeliveryOutcome::Retry { at: self.env.now() + wait, error }, AttemptOutcome::Retried)
            }
            Some(_) | None => self.dead_letter(claimed, mail, error),
        }
    }

    fn dead_letter(&self, claimed: &ClaimedRow, mail: &Mail, error: String) -> (DeliveryOutcome, AttemptOutcome) {
        error!(
            app = %claimed.app,
            row = %claimed.id,
            mail = mail.kind.as_str(),
            attempts = claimed.attempts + 1,
            error,
            "a mail became a dead letter"
        );
        (DeliveryOutcome::Dead { error }, AttemptOutcome::Dead)
    }

    fn postpone(&self, mail: &Mail) -> (DeliveryOutcome, AttemptOutcome) {
        let now = self.env.now();
        let age = Duration::try_from(now - mail.requested_at).unwrap_or_default();
        (
            DeliveryOutcome::Wait { at: now + backoff::while_waiting(age, self.env.random_unit()) },
            AttemptOutcome::Waited,
        )
    }

    async fn propagate_epoch(&self, claimed: &ClaimedRow, change: &EpochChange) -> DeliveryOutcome {
        let profile = match self.profile(claimed, change.user).await {
            Ok(profile) => profile,
            Err(error) => return self.retry_propagation(claimed, store_error_text(&error)),
        };
        match self.stores.raise_epoch(&claimed.app, change, profile.as_ref()).await {
            Ok(Replication::Complete) => {
                self.metrics.count_propagation(AttemptOutcome::Sent);
                DeliveryOutcome::Done
            }
            Ok(Replication::Unconfirmed) => {
                self.retry_propagation(claimed, "no replica of Redis has acknowledged it yet")
            }
            Err(error) => self.retry_propagation(claimed, store_error_text(&error)),
        }
    }

    async fn propagate_profile(&self, claimed: &ClaimedRow, user: UserId) -> DeliveryOutcome {
        let stored = match self.profile(claimed, user).await {
            Ok(Some(profile)) => self.stores.store_profile(&claimed.app, user, &profile).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match stored {
            Ok(()) => {
                self.metrics.count_propagation(AttemptOutcome::Sent);
                DeliveryOutcome::Done
            }
            Err(error) => self.retry_propagation(claimed, store_error_text(&error)),
        }
    }

    async fn propagate_groups(&self, claimed: &ClaimedRow, user: UserId) -> DeliveryOutcome {
        let stored = match self.stores.current_groups(&claimed.app, user).await {
            Ok(Some(groups)) => self.stores.store_groups(&claimed.app, user, &groups).await,
            // The user was deleted.
            Ok(None) => Ok(Replication::Complete),
            Err(error) => Err(error),
        };
        match stored {
            Ok(Replication::Complete) => {
                self.metrics.count_propagation(AttemptOutcome::Sent);
                DeliveryOutcome::Done
            }
            Ok(Replication::Unconfirmed) => {
                self.retry_propagation(claimed, "no replica of Redis has acknowledged it yet")
            }
            Err(error) => self.retry_propagation(claimed, store_error_text(&error)),
        }
    }

    /// The current profile of the user, which new tokens contain. `None` if the user was deleted.
    async fn profile(&self, claimed: &ClaimedRow, user: UserId) -> Result<Option<Profile>, StoreError> {
        Ok(self.stores.user(&claimed.app, user).await?.map(|user| user.profile()))
    }

    fn retry_propagation(&self, claimed: &ClaimedRow, error: &str) -> DeliveryOutcome {
        self.metrics.count_propagation(AttemptOutcome::Retried);
        let wait = backoff::for_propagation(claimed.attempts, self.env.random_unit());
        DeliveryOutcome::Retry { at: self.env.now() + wait, error: error.to_owned() }
    }
}

impl<S: Users + Codes + Sessions + GroupChanges + Send + Sync + 'static> Deliverer for OutboxDeliverer<S> {
    async fn deliver(&self, claimed: &ClaimedRow) -> DeliveryOutcome {
        match &claimed.task {
            OutboxTask::Mail(mail) => self.deliver_mail(claimed, mail, None).await,
            OutboxTask::MailToFormerAddress(mail, address) => self.deliver_mail(claimed, mail, Some(address)).await,
            OutboxTask::PropagateEpoch(change) => self.propagate_epoch(claimed, change).await,
            OutboxTask::PropagateProfile(user) => self.propagate_profile(claimed, *user).await,
            OutboxTask::PropagateGroups(user) => self.propagate_groups(claimed, *user).await,
        }
    }

    fn close_idle(&self) {
        self.relays.close_idle();
    }
}

fn store_error_text(error: &StoreError) -> &'static str {
    match error {
        StoreError::Unavailable { .. } => "a store is unavailable",
        StoreError::Unexpected { .. } => "a store gave an unexpected answer",
    }
}

/// The lifetime of the code in this kind of mail. `None` if the mail has no code. Such a mail does not expire.
fn code_lifetime(app: &App, kind: MailKind) -> Option<Duration> {
    let seconds = match kind {
        MailKind::Confirm => app.doc.mail.confirm_code_lifetime_seconds,
        MailKind::Reset => app.doc.mail.reset_code_lifetime_seconds,
        MailKind::Invitation => app.doc.mail.invitation_code_lifetime_seconds(),
        MailKind::AccountExists
        | MailKind::PasswordChanged
        | MailKind::AddressChanging
        | MailKind::AddressChanged
        | MailKind::NewSignIn => return None,
    };
    Some(Duration::from_secs(seconds.into()))
}

/// The recipient of this kind of mail. `None` if nothing needs to be sent. `former`: a former verified email address of
/// the user.
fn recipient(user: &User, kind: MailKind, former: Option<&Email>) -> Option<Recipient> {
    if user.disabled {
        return None;
    }
    let verified = user.email_verified;
    let to_current_address = |code| {
        let name = if verified { user.name.clone() } else { String::new() };
        user.email.clone().map(|address| Recipient { address, name, code })
    };
    match kind {
        MailKind::Confirm => match &user.pending_email {
            Some(pending) => {
                Some(Recipient { address: pending.clone(), name: String::new(), code: Some(CodePurpose::Change) })
            }
            None if verified => None,
            None => to_current_address(Some(CodePurpose::Confirm)),
        },
        // The user has set a password since the request, for example with an earlier invitation.
        MailKind::Invitation if user.password_hash.is_some() => None,
        MailKind::Reset | MailKind::Invitation => to_current_address(Some(CodePurpose::Reset)),
        MailKind::AccountExists | MailKind::PasswordChanged | MailKind::AddressChanging | MailKind::NewSignIn => {
            to_current_address(None).filter(|_| verified)
        }
        MailKind::AddressChanged => {
            former.map(|address| Recipient { address: address.clone(), name: user.name.clone(), code: None })
        }
    }
}

/// Returns the relay and the sender for mails of the App, or `None` if one of them is currently missing. The mail then
/// waits.
pub(super) fn route(app: &AppId, display_name: &str, mail: &RenderedMail, settings: &MailSettings) -> Option<Route> {
    let own_sender = mail.from.as_ref().and_then(|from| parse_mailbox(from.as_str()));
    // Uses the display name of the App if the mailbox has no name.
    let named = |mailbox: &Mailbox| {
        let name = mailbox.name.as_deref().map(to_one_line).filter(|name| !name.is_empty());
        name.unwrap_or_else(|| to_one_line(display_name))
    };
    match &mail.smtp {
        RenderedSmtp::Unresolved => None,
        RenderedSmtp::Install => {
            let install = settings.install.as_ref()?;
            let mut from = parse_mailbox(install.from.as_str())?;
            from.name = Some(own_sender.as_ref().map_or_else(|| to_one_line(display_name), named));
            Some(Route { relay: install.relay.clone(), owner: None, from, reply_to: own_sender })
        }
        RenderedSmtp::Own(relay) => {
            let from = match own_sender {
                Some(from) => Mailbox::new(Some(named(&from)), from.email),
                None => {
                    let install = parse_mailbox(settings.install.as_ref()?.from.as_str())?;
                    Mailbox::new(Some(to_one_line(display_name)), install.email)
                }
            };
            Some(Route { relay: relay.clone(), owner: Some(app.clone()), from, reply_to: None })
        }
    }
}

/// Parses a mailbox from a manifest: an email address, or `Name <address>`, with the name optionally in quotes.
fn parse_mailbox(mailbox: &str) -> Option<Mailbox> {
    let (name, address) = match mailbox.trim_end().strip_suffix('>') {
        Some(rest) => rest.rsplit_once('<')?,
        None => ("", mailbox),
    };
    let name = name.trim();
    let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name);
    let name = Some(to_one_line(name)).filter(|name| !name.is_empty());
    Some(Mailbox::new(name, address.parse().ok()?))
}

/// Formats a time for a mail: in UTC, with the time zone.
fn format_time(time: OffsetDateTime) -> String {
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
            groups::{GroupsChange, Membership, ReportedGroups, UserGroups},
            password::PasswordHash,
            ports::{ChangedUser, Confirmation, CreateUserOutcome, LoginCandidate, NewUser, PasswordReset},
            session::{LiveSession, NewSession, OpenOutcome, RefreshOutcome, RefreshRules, SessionId, SessionInfo},
            token::RefreshToken,
            user::Epoch,
        },
        fixtures,
        mail::{relay::tests::test_relay as listener, settings::InstallRelay},
        outbound::OutboundPolicy,
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

    fn recipient_of(address: &str, name: &str, code: Option<CodePurpose>) -> Option<Recipient> {
        Some(Recipient { address: Email::parse(address).unwrap(), name: name.to_owned(), code })
    }

    #[test]
    fn a_mail_to_an_unverified_address_carries_no_name() {
        let user = user();
        assert_eq!(
            recipient(&user, MailKind::Confirm, None),
            recipient_of("Ada@Example.com", "", Some(CodePurpose::Confirm))
        );
        assert_eq!(
            recipient(&user, MailKind::Reset, None),
            recipient_of("Ada@Example.com", "", Some(CodePurpose::Reset))
        );
        for notice in NOTICES {
            assert_eq!(recipient(&user, notice, None), None, "{notice:?}");
        }
    }

    #[test]
    fn a_verified_address_gets_notices_and_resets_but_nothing_to_confirm() {
        let user = User { email_verified: true, ..user() };
        assert_eq!(recipient(&user, MailKind::Confirm, None), None);
        assert_eq!(
            recipient(&user, MailKind::Reset, None),
            recipient_of("Ada@Example.com", "Ada <Click> here", Some(CodePurpose::Reset))
        );
        for notice in NOTICES {
            assert_eq!(
                recipient(&user, notice, None),
                recipient_of("Ada@Example.com", "Ada <Click> here", None),
                "{notice:?}"
            );
        }
    }

    #[test]
    fn a_confirmation_goes_to_the_pending_address_and_a_reset_to_the_current_one() {
        let pending_email = Some(Email::parse("new@example.org").unwrap());
        let user = User { email_verified: true, pending_email, ..user() };
        assert_eq!(
            recipient(&user, MailKind::Confirm, None),
            recipient_of("new@example.org", "", Some(CodePurpose::Change))
        );
        assert_eq!(recipient(&user, MailKind::Reset, None).unwrap().address.as_str(), "Ada@Example.com");
        let user = User { email: None, email_verified: false, ..user };
        assert_eq!(recipient(&user, MailKind::Reset, None), None);
    }

    #[test]
    fn an_invitation_goes_only_to_a_user_without_a_password() {
        let user = User { password_hash: None, ..user() };
        let expected = recipient_of("Ada@Example.com", "", Some(CodePurpose::Reset));
        assert_eq!(recipient(&user, MailKind::Invitation, None), expected);
        let password_hash = PasswordHash::new("$argon2id$stored");
        assert_eq!(recipient(&User { password_hash: Some(password_hash), ..user }, MailKind::Invitation, None), None);
    }

    #[test]
    fn only_the_former_address_gets_the_notice_of_a_change() {
        let user = User { email_verified: true, ..user() };
        let former = Email::parse("old@example.org").unwrap();
        let expected = recipient_of("old@example.org", "Ada <Click> here", None);
        assert_eq!(recipient(&user, MailKind::AddressChanged, Some(&former)), expected);
        assert_eq!(recipient(&user, MailKind::AddressChanged, None), None);
    }

    #[test]
    fn a_disabled_user_gets_nothing() {
        for email_verified in [false, true] {
            let user = User { disabled: true, email_verified, ..user() };
            for kind in MailKind::ALL {
                assert_eq!(recipient(&user, kind, None), None, "{kind:?}");
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
            own_invitation_url: None,
            own_invitation_code_lifetime_seconds: None,
            templates: BTreeMap::new(),
            smtp,
        }
    }

    fn route_summary(mail: &RenderedMail, install: bool) -> Option<(String, String, Option<String>, bool)> {
        let from = "Install <noreply@auth.example.net>".parse().unwrap();
        let install = install.then(|| InstallRelay { relay: relay("install"), from });
        let settings = MailSettings { install, ..MailSettings::default() };
        let route = route(&"shop".parse().unwrap(), "The\r\nShop", mail, &settings)?;
        let reply_to = route.reply_to.map(|reply_to| reply_to.to_string());
        Some((route.relay.host, route.from.to_string(), reply_to, route.owner.is_some()))
    }

    #[test]
    fn the_relay_of_the_installation_sends_as_the_installation_with_the_name_of_the_app() {
        let route = |from| route_summary(&mail(from, RenderedSmtp::Install), true);
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
    fn the_relay_of_an_app_sends_as_the_app() {
        let route = |from| route_summary(&mail(from, RenderedSmtp::Own(relay("own"))), true);
        let expected = |from: &str| Some(("own".to_owned(), from.to_owned(), None, true));
        assert_eq!(route(Some("hello@shop.example.com")), expected("The Shop <hello@shop.example.com>"));
        assert_eq!(route(Some("\"Our Shop\" <hello@shop.example.com>")), expected("Our Shop <hello@shop.example.com>"));
        assert_eq!(route(None), expected("The Shop <noreply@auth.example.net>"));
    }

    #[test]
    fn there_is_no_route_without_a_relay_or_a_sender() {
        assert!(route_summary(&mail(None, RenderedSmtp::Unresolved), true).is_none());
        assert!(route_summary(&mail(Some("a@b.example"), RenderedSmtp::Install), false).is_none());
        assert!(route_summary(&mail(None, RenderedSmtp::Own(relay("own"))), false).is_none());
    }

    #[test]
    fn times_are_shown_in_utc_with_the_zone() {
        assert_eq!(format_time(datetime!(2026-11-02 00:05 +02:00)), "1 November 2026, 22:05 UTC");
    }

    /// Stores that support only the calls that the tested deliveries make.
    #[derive(Default)]
    struct FakeStores {
        user: Option<User>,
        /// `None`: Redis is unavailable for codes.
        codes: Option<Mutex<Vec<(CodeKey, CodeRecord)>>>,
        /// `None`: Redis is unavailable for epochs, profiles and groups.
        replication: Option<Replication>,
    }

    fn unavailable<T>() -> Result<T, StoreError> {
        Err(StoreError::Unavailable { store: "Redis", source: "gone".into() })
    }

    impl Users for FakeStores {
        async fn user(&self, _: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
            Ok(self.user.clone().filter(|user| user.id == id))
        }

        async fn user_by_email(&self, _: &AppId, _: &Email) -> Result<Option<User>, StoreError> {
            unreachable!("a delivery reads its user by id")
        }

        async fn login_candidate(&self, _: &AppId, _: &Email) -> Result<LoginCandidate, StoreError> {
            unreachable!("a delivery is not a login")
        }

        async fn create_user(&self, _: &AppId, _: NewUser, _: Option<Mail>) -> Result<CreateUserOutcome, StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn record_repeated_registration(
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

        async fn replace_hash(
            &self,
            _: &AppId,
            _: UserId,
            _: &PasswordHash,
            _: PasswordHash,
        ) -> Result<(), StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn confirm_address(&self, _: &AppId, _: Confirmation) -> Result<Option<ChangedUser>, StoreError> {
            unreachable!("a mail changes no user")
        }

        async fn reset_password(&self, _: &AppId, _: PasswordReset) -> Result<Option<ChangedUser>, StoreError> {
            unreachable!("a mail changes no user")
        }
    }

    impl Codes for FakeStores {
        async fn store_code(&self, _: &AppId, key: &CodeKey, record: &CodeRecord) -> Result<(), StoreError> {
            let Some(codes) = &self.codes else { return unavailable() };
            codes.lock().unwrap().push((key.clone(), record.clone()));
            Ok(())
        }

        async fn find_code(&self, _: &AppId, _: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
            unreachable!("a mail redeems no code")
        }

        async fn consume_code(&self, _: &AppId, _: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
            unreachable!("a mail redeems no code")
        }
    }

    impl Sessions for FakeStores {
        async fn open_session(&self, _: &AppId, _: &NewSession) -> Result<OpenOutcome, StoreError> {
            unreachable!("a mail opens no session")
        }

        async fn session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Option<LiveSession>, StoreError> {
            unreachable!("a mail reads no session")
        }

        async fn browser_session(
            &self,
            _: &AppId,
            _: UserId,
            _: SessionId,
            _: Option<u64>,
        ) -> Result<Option<LiveSession>, StoreError> {
            unreachable!("a mail reads no session")
        }

        async fn renew_browser_session(&self, _: &AppId, _: &NewSession) -> Result<bool, StoreError> {
            unreachable!("a mail renews no session")
        }

        async fn sessions(&self, _: &AppId, _: UserId) -> Result<Vec<SessionInfo>, StoreError> {
            unreachable!("a mail reads no session")
        }

        async fn refresh(&self, _: &AppId, _: &RefreshToken, _: &RefreshRules) -> Result<RefreshOutcome, StoreError> {
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
            _: &EpochChange,
            profile: Option<&Profile>,
        ) -> Result<Replication, StoreError> {
            assert_eq!(profile.map(|profile| profile.version), self.user.as_ref().map(|user| user.version));
            self.replication.map_or_else(unavailable, Ok)
        }

        async fn store_profile(&self, _: &AppId, user: UserId, profile: &Profile) -> Result<(), StoreError> {
            let stored_user = self.user.as_ref().unwrap();
            assert_eq!((user, profile), (stored_user.id, &stored_user.profile()));
            self.replication.map_or_else(unavailable, |_| Ok(()))
        }
    }

    impl GroupChanges for FakeStores {
        async fn current_groups(&self, _: &AppId, user: UserId) -> Result<Option<UserGroups>, StoreError> {
            Ok(self.user.as_ref().filter(|stored| stored.id == user).map(|_| groups()))
        }

        async fn store_groups(&self, _: &AppId, _: UserId, stored: &UserGroups) -> Result<Replication, StoreError> {
            assert_eq!(*stored, groups());
            self.replication.map_or_else(unavailable, Ok)
        }

        async fn remove_groups_rows(&self, _: &AppId, _: &[Uuid]) -> Result<(), StoreError> {
            unreachable!("the worker finishes the row")
        }

        async fn replace_reported_groups(
            &self,
            _: &AppId,
            _: ReportedGroups,
            _: Event,
        ) -> Result<Option<GroupsChange>, StoreError> {
            unreachable!("a delivery changes no groups")
        }
    }

    fn groups() -> UserGroups {
        let membership = Membership { name: "staff".parse().unwrap(), source: "corp".to_owned() };
        UserGroups { version: 3, memberships: Arc::new([membership]) }
    }

    /// A deliverer for two Apps: `shop` with its own relay on this loopback port, and `unresolved` without a relay.
    fn deliverer(stores: FakeStores, port: u16) -> OutboxDeliverer<FakeStores> {
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
        let reach = OutboundPolicy { allow_insecure: true, ..OutboundPolicy::default() };
        let settings = MailSettings { reach, ..MailSettings::default() };
        let metrics = MailMetrics::register(&mut Registry::default());
        OutboxDeliverer::new(Arc::new(stores), Arc::new(apps), Arc::new(Env::system()), settings, metrics)
    }

    fn row(app: &str, task: OutboxTask) -> ClaimedRow {
        let lease_until = datetime!(2026-02-01 09:30 UTC);
        ClaimedRow { id: Uuid::from_u128(1), app: app.parse().unwrap(), attempts: 0, task, lease_until, trace: None }
    }

    fn reset_task(requested_at: OffsetDateTime) -> OutboxTask {
        OutboxTask::Mail(Mail { kind: MailKind::Reset, recipient: Some(user().id), requested_at })
    }

    #[tokio::test]
    async fn the_code_in_the_mail_is_the_stored_code() {
        let (port, received) = listener(&[]).await;
        let stores = FakeStores { user: Some(user()), codes: Some(Mutex::default()), replication: None };
        let delivery = deliverer(stores, port);
        let now = delivery.env.now();
        assert!(matches!(delivery.deliver(&row("shop", reset_task(now))).await, DeliveryOutcome::Done));
        let stores = delivery.stores.clone();
        let app = delivery.apps.get("shop").unwrap();
        drop(delivery);
        // Decodes quoted-printable (RFC 2045, section 6.7), as far as these texts need it.
        let content = received.await.unwrap().pop().unwrap().replace("=\r\n", "").replace("=3D", "=");
        let code = content.lines().find_map(|line| Code::parse(line).ok()).expect("a line with the code");
        let stored = stores.codes.as_ref().unwrap().lock().unwrap();
        let [(key, record)] = &stored[..] else { panic!("one code is stored") };
        assert_eq!(*key, code.key_to_store(&app));
        assert_eq!(
            (record.purpose, record.epoch, record.address.as_str()),
            (CodePurpose::Reset, Epoch(3), "ada@example.com")
        );
        assert!((1_799..1_830).contains(&(record.expires_at - now.unix_timestamp())));
        let link = format!("https://shop.example.com/reset?code={}&email=Ada%40Example.com", code.display_form());
        assert!(content.contains(&link), "{content}");
        assert!(!content.contains("Click"), "{content}");
    }

    #[tokio::test]
    async fn an_invitation_has_a_reset_code_with_the_lifetime_and_the_link_of_invitations() {
        let (port, received) = listener(&[]).await;
        let invited = User { password_hash: None, ..user() };
        let stores = FakeStores { user: Some(invited), codes: Some(Mutex::default()), replication: None };
        let delivery = deliverer(stores, port);
        let now = delivery.env.now();
        let mail = Mail { kind: MailKind::Invitation, recipient: Some(user().id), requested_at: now };
        assert!(matches!(delivery.deliver(&row("shop", OutboxTask::Mail(mail))).await, DeliveryOutcome::Done));
        let stores = delivery.stores.clone();
        drop(delivery);
        let content = received.await.unwrap().pop().unwrap().replace("=\r\n", "").replace("=3D", "=");
        let code = content.lines().find_map(|line| Code::parse(line).ok()).expect("a line with the code");
        let stored = stores.codes.as_ref().unwrap().lock().unwrap();
        let [(_, record)] = &stored[..] else { panic!("one code is stored") };
        assert_eq!(record.purpose, CodePurpose::Reset);
        assert!((604_799..604_830).contains(&(record.expires_at - now.unix_timestamp())));
        // The App sets no page for invitations, so the link opens the page for password resets.
        let link = format!("https://shop.example.com/reset?code={}&email=Ada%40Example.com", code.display_form());
        assert!(content.contains(&link), "{content}");
    }

    #[tokio::test]
    async fn a_permanent_rejection_of_the_recipient_makes_a_dead_letter_and_a_temporary_rejection_is_retried() {
        let deliver = async |replies: &'static [(&'static str, &'static str)]| {
            let (port, _received) = listener(replies).await;
            let stores = FakeStores { user: Some(user()), codes: Some(Mutex::default()), replication: None };
            let delivery = deliverer(stores, port);
            let now = delivery.env.now();
            delivery.deliver(&row("shop", reset_task(now))).await
        };
        let outcome = deliver(&[("RCPT", "550 Ada@Example.com is unknown\r\n")]).await;
        assert!(
            matches!(&outcome, DeliveryOutcome::Dead { error } if error == "the relay refused the recipient (550)"),
            "{outcome:?}"
        );
        let outcome = deliver(&[("RCPT", "451 later\r\n")]).await;
        assert!(
            matches!(&outcome, DeliveryOutcome::Retry { error, .. } if error == "the relay refused the recipient (451)"),
            "{outcome:?}"
        );
    }

    #[tokio::test]
    async fn a_mail_that_cannot_be_attempted_waits_without_using_up_an_attempt() {
        // Nothing listens on port 9. These deliveries never connect to it.
        let delivery = deliverer(FakeStores { user: Some(user()), codes: None, replication: None }, 9);
        let now = delivery.env.now();
        for app in ["shop", "unresolved", "not-served"] {
            let outcome = delivery.deliver(&row(app, reset_task(now))).await;
            assert!(matches!(outcome, DeliveryOutcome::Wait { at } if at > now), "{app}: {outcome:?}");
        }
    }

    #[tokio::test]
    async fn a_reset_mail_older_than_the_lifetime_of_its_code_becomes_a_dead_letter() {
        let delivery = deliverer(FakeStores::default(), 9);
        let old = delivery.env.now() - Duration::from_secs(1_801);
        let outcome = delivery.deliver(&row("shop", reset_task(old))).await;
        assert!(matches!(&outcome, DeliveryOutcome::Dead { error } if error.contains("older")), "{outcome:?}");
    }

    #[tokio::test]
    async fn a_row_without_a_user_sends_nothing() {
        let delivery = deliverer(FakeStores::default(), 9);
        let now = delivery.env.now();
        let mail = Mail { kind: MailKind::Reset, recipient: None, requested_at: now };
        assert!(matches!(delivery.deliver(&row("shop", OutboxTask::Mail(mail))).await, DeliveryOutcome::Done));
        assert!(
            matches!(delivery.deliver(&row("shop", reset_task(now))).await, DeliveryOutcome::Done),
            "the user does not exist"
        );
    }

    #[tokio::test]
    async fn an_epoch_is_propagated_until_a_replica_has_it() {
        let change = EpochChange { user: user().id, epoch: Epoch(4), kept_session: None };
        let propagate = async |replication| {
            let delivery = deliverer(FakeStores { replication, ..FakeStores::default() }, 9);
            let row = ClaimedRow { attempts: 1_000, ..row("not-served", OutboxTask::PropagateEpoch(change.clone())) };
            let deadline = delivery.env.now() + Duration::from_secs(60);
            (delivery.deliver(&row).await, deadline)
        };
        assert!(matches!(propagate(Some(Replication::Complete)).await.0, DeliveryOutcome::Done));
        for replication in [Some(Replication::Unconfirmed), None] {
            let (outcome, deadline) = propagate(replication).await;
            assert!(
                matches!(outcome, DeliveryOutcome::Retry { at, .. } if at < deadline),
                "{replication:?}: {outcome:?}"
            );
        }
    }

    #[tokio::test]
    async fn changed_groups_are_propagated_until_a_replica_has_them() {
        let propagate = async |user: Option<User>, replication| {
            let delivery = deliverer(FakeStores { user, replication, ..FakeStores::default() }, 9);
            let task = OutboxTask::PropagateGroups(self::user().id);
            delivery.deliver(&ClaimedRow { attempts: 1_000, ..row("not-served", task) }).await
        };
        assert!(matches!(propagate(Some(user()), Some(Replication::Complete)).await, DeliveryOutcome::Done));
        for replication in [Some(Replication::Unconfirmed), None] {
            let outcome = propagate(Some(user()), replication).await;
            assert!(matches!(outcome, DeliveryOutcome::Retry { .. }), "{replication:?}: {outcome:?}");
        }
        assert!(matches!(propagate(None, None).await, DeliveryOutcome::Done), "the user was deleted");
    }
}
