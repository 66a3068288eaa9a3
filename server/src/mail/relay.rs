//! Sending one mail through a relay, over connections that are kept a while.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use latchkey_crds::{rendered::SmtpRelay, types::AppId};
use lettre::{
    Message,
    message::{
        Mailbox, MultiPart,
        header::{HeaderName, HeaderValue},
    },
    transport::smtp::{
        authentication::{Credentials, Mechanism},
        client::AsyncSmtpConnection,
        commands::{Data, Mail, Rcpt},
        extension::ClientId,
    },
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    MailSettings, guard,
    templates::Rendered,
    wire::{self, Trust},
};

/// The whole of one mail: name look-up, connection, TLS, login and SMTP (design, Server).
const WHOLE: Duration = Duration::from_secs(10);
/// Relays end connections that are silent for longer; Postfix after 300 s, some after 30.
const MOST_IDLE: Duration = Duration::from_secs(20);
/// Many relays take a hundred mails on one connection, some fewer.
const MOST_MAILS: u32 = 50;
/// As many connections of one relay as one App may have in flight.
const MOST_PARKED: usize = 4;

/// Where the talk with a relay was when it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Greeting,
    Tls,
    Login,
    Sender,
    Recipient,
    Content,
}

/// Why a mail was not taken, in our words: what a peer wrote is never kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SendError {
    #[error("the relay's port {0} is not one of mail")]
    PortRefused(u16),
    #[error("the relay's name does not resolve")]
    NameUnknown,
    #[error("the relay's address is private or reserved")]
    AddressRefused,
    #[error("the relay does not take the connection")]
    Unreachable,
    #[error("the relay does not offer STARTTLS")]
    NoStarttls,
    #[error("TLS with the relay failed, or its certificate is not for its name")]
    Tls,
    #[error("the relay offers no login that is known here")]
    NoLogin,
    #[error("the relay refused {what} ({code})", what = .stage.what())]
    Refused { stage: Stage, code: u16 },
    #[error("the relay broke the connection off at {stage}", stage = .0.what())]
    Broken(Stage),
    #[error("the relay's answer to {stage} is not SMTP", stage = .0.what())]
    NotSmtp(Stage),
    #[error("the relay took longer than ten seconds")]
    TooSlow,
    #[error("the mail cannot be written as a message")]
    NotAMessage,
}

/// Through what a mail leaves, and as whose.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) relay: SmtpRelay,
    /// Whose relay it is; none: the install's, which may stand anywhere.
    pub(super) owner: Option<AppId>,
    pub(super) from: Mailbox,
    pub(super) reply_to: Option<Mailbox>,
}

/// A mail, ready to be sent.
pub(super) struct Letter {
    /// The row's: a second try has the same Message-ID, so that most clients show one mail.
    pub(super) id: Uuid,
    pub(super) to: Mailbox,
    pub(super) at: OffsetDateTime,
    pub(super) content: Rendered,
}

/// The relays in use.
pub(super) struct Relays {
    settings: MailSettings,
    trust: Trust,
    parked: Mutex<HashMap<Key, Vec<Parked>>>,
}

/// One App's use of one relay with one login.
type Key = (Option<AppId>, [u8; SHA256_OUTPUT_LEN]);

struct Parked {
    connection: AsyncSmtpConnection,
    since: Instant,
    mails: u32,
}

// === impl Stage ===

impl Stage {
    const fn what(self) -> &'static str {
        match self {
            Self::Greeting => "the greeting",
            Self::Tls => "STARTTLS",
            Self::Login => "the login",
            Self::Sender => "the sender",
            Self::Recipient => "the recipient",
            Self::Content => "the message",
        }
    }
}

// === impl SendError ===

impl SendError {
    pub(super) fn at(stage: Stage, error: &lettre::transport::smtp::Error) -> Self {
        if let Some(code) = error.status() {
            Self::Refused { stage, code: code.into() }
        } else if error.is_response() {
            Self::NotSmtp(stage)
        } else if error.is_client() && stage == Stage::Login {
            Self::NoLogin
        } else {
            Self::Broken(stage)
        }
    }

    /// Whether trying again is of no use: this recipient or this message is refused for good (RFC 5321, 4.2.1). What
    /// the operator of the App or of the relay can mend (login, sender, TLS, network) is tried again, and so is a
    /// recipient refused only for want of a login (530) or out of order (503).
    pub(super) fn is_final(self) -> bool {
        match self {
            Self::Refused { stage: Stage::Recipient | Stage::Content, code } => {
                (500..600).contains(&code) && !matches!(code, 503 | 530)
            }
            Self::NotAMessage => true,
            Self::Refused { stage: Stage::Greeting | Stage::Tls | Stage::Login | Stage::Sender, .. }
            | Self::PortRefused(_)
            | Self::NameUnknown
            | Self::AddressRefused
            | Self::Unreachable
            | Self::NoStarttls
            | Self::Tls
            | Self::NoLogin
            | Self::Broken(_)
            | Self::NotSmtp(_)
            | Self::TooSlow => false,
        }
    }
}

// === impl Relays ===

impl Relays {
    pub(super) fn new(settings: MailSettings) -> Self {
        Self { settings, trust: Trust::default(), parked: Mutex::default() }
    }

    pub(super) fn settings(&self) -> &MailSettings {
        &self.settings
    }

    /// Sends, or tells why not, within [`WHOLE`].
    pub(super) async fn send(&self, route: &Route, letter: Letter) -> Result<(), SendError> {
        let message = message(route, letter)?;
        let envelope = message.envelope();
        let (Some(from), [to]) = (envelope.from(), envelope.to()) else { return Err(SendError::NotAMessage) };
        let octets = message.formatted();
        let sending = async {
            let key = key(route);
            let (mut connection, mails) = match self.take(&key).await {
                Some(parked) => parked,
                None => (self.connect(route).await?, 0),
            };
            let at = |stage| move |error| SendError::at(stage, &error);
            connection.command(Mail::new(Some(from.clone()), Vec::new())).await.map_err(at(Stage::Sender))?;
            connection.command(Rcpt::new(to.clone(), Vec::new())).await.map_err(at(Stage::Recipient))?;
            connection.command(Data).await.map_err(at(Stage::Content))?;
            connection.message(&octets).await.map_err(at(Stage::Content))?;
            self.park(key, connection, mails + 1);
            Ok(())
        };
        tokio::time::timeout(WHOLE, sending).await.unwrap_or(Err(SendError::TooSlow))
    }

    /// Ends connections that were not used for a while.
    pub(super) fn close_idle(&self) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        parked.retain(|_, connections| {
            connections.retain(|parked| parked.since.elapsed() < MOST_IDLE);
            !connections.is_empty()
        });
    }

    async fn take(&self, key: &Key) -> Option<(AsyncSmtpConnection, u32)> {
        loop {
            let parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner).get_mut(key)?.pop()?;
            let Parked { mut connection, since, mails } = parked;
            if since.elapsed() < MOST_IDLE && connection.test_connected().await {
                return Some((connection, mails));
            }
        }
    }

    fn park(&self, key: Key, connection: AsyncSmtpConnection, mails: u32) {
        if mails >= MOST_MAILS || connection.has_broken() {
            return;
        }
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = parked.entry(key).or_default();
        if connections.len() < MOST_PARKED {
            connections.push(Parked { connection, since: Instant::now(), mails });
        }
    }

    async fn connect(&self, route: &Route) -> Result<AsyncSmtpConnection, SendError> {
        let relay = &route.relay;
        let addresses = self.resolve(route).await?;
        let (stream, peer) = wire::connect(&addresses).await?;
        let hello = ClientId::Domain(route.from.email.domain().to_owned());
        let mut connection = wire::open(stream, peer, host(relay), relay.tls, &hello, &self.trust).await?;
        if let (Some(username), Some(password)) = (&relay.username, &relay.password) {
            let login = Credentials::new(username.expose().to_owned(), password.expose().to_owned());
            let login = connection.auth(&[Mechanism::Plain, Mechanism::Login], &login).await;
            login.map_err(|error| SendError::at(Stage::Login, &error))?;
        }
        Ok(connection)
    }

    /// The addresses that may be connected to. They are looked up once: a name that leads elsewhere at the second
    /// look-up (DNS rebinding) finds no second look-up.
    async fn resolve(&self, route: &Route) -> Result<Vec<SocketAddr>, SendError> {
        let guarded = route.owner.is_some();
        let (host, port) = (host(&route.relay), route.relay.port);
        if guarded && !guard::allows_port(&self.settings, port) {
            return Err(SendError::PortRefused(port));
        }
        let found: Vec<SocketAddr> = match host.parse::<IpAddr>() {
            Ok(address) => vec![(address, port).into()],
            Err(_) => tokio::net::lookup_host((host, port)).await.map_err(|_| SendError::NameUnknown)?.collect(),
        };
        if found.is_empty() {
            return Err(SendError::NameUnknown);
        }
        let allowed: Vec<SocketAddr> = found
            .into_iter()
            .filter(|address| !guarded || guard::allows_address(&self.settings, address.ip()))
            .collect();
        if allowed.is_empty() { Err(SendError::AddressRefused) } else { Ok(allowed) }
    }
}

/// The host as an address or a name: a final dot, which a certificate never has, and brackets are taken away.
fn host(relay: &SmtpRelay) -> &str {
    let host = relay.host.strip_suffix('.').unwrap_or(&relay.host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// A relay whose Secret changed is another one; the login itself is not kept here.
fn key(route: &Route) -> Key {
    let relay = serde_json::to_vec(&route.relay).expect("a relay is strings and a number");
    let mut hash = [0; SHA256_OUTPUT_LEN];
    hash.copy_from_slice(digest(&SHA256, &relay).as_ref());
    (route.owner.clone(), hash)
}

fn message(route: &Route, letter: Letter) -> Result<Message, SendError> {
    let Letter { id, to, at, content } = letter;
    let header =
        |name: &'static str, value: &str| HeaderValue::new(HeaderName::new_from_ascii_str(name), value.to_owned());
    let mut message = Message::builder()
        .from(route.from.clone())
        .to(to)
        .subject(content.subject)
        .date(at.into())
        .message_id(Some(format!("<{id}@{}>", route.from.email.domain())))
        // RFC 3834: no out-of-office reply to this; Exchange asks for the second.
        .raw_header(header("Auto-Submitted", "auto-generated"))
        .raw_header(header("X-Auto-Response-Suppress", "All"));
    if let Some(reply_to) = &route.reply_to {
        message = message.reply_to(reply_to.clone());
    }
    message.multipart(MultiPart::alternative_plain_html(content.text, content.html)).map_err(|_| SendError::NotAMessage)
}
