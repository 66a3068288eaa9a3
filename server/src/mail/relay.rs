//! Sending one mail through a relay, over connections that are kept a while.

use std::{
    collections::HashMap,
    net::SocketAddr,
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

use super::{MailSettings, guard, templates::Rendered, wire};
use crate::outbound::{Unresolved, look_up, trust::Trust};

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

    /// The addresses that may be connected to.
    async fn resolve(&self, route: &Route) -> Result<Vec<SocketAddr>, SendError> {
        let guarded = route.owner.is_some();
        let (host, port) = (host(&route.relay), route.relay.port);
        if guarded && !guard::allows_port(&self.settings, port) {
            return Err(SendError::PortRefused(port));
        }
        let found = if guarded { self.settings.reach.resolve(host, port).await } else { look_up(host, port).await };
        found.map_err(|unresolved| match unresolved {
            Unresolved::NameUnknown => SendError::NameUnknown,
            Unresolved::AddressRefused => SendError::AddressRefused,
        })
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

pub(super) fn message(route: &Route, letter: Letter) -> Result<Message, SendError> {
    let Letter { id, to, at, content } = letter;
    let header =
        |name: &'static str, value: &str| HeaderValue::new(HeaderName::new_from_ascii_str(name), value.to_owned());
    let mut message = Message::builder()
        .from(route.from.clone())
        .to(to)
        // Readers would decode what looks like an encoded word (RFC 2047, 2): by the name of an
        // account somebody could show text there that was not checked.
        .subject(content.subject.replace("=?", "= ?"))
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

#[cfg(test)]
pub(super) mod tests {
    use latchkey_crds::rendered::{SecretString, SmtpTls};
    use time::macros::datetime;
    use tokio::{
        io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
        net::{TcpListener, TcpStream},
        task::JoinHandle,
    };

    use super::*;
    use crate::outbound::Reach;

    /// By the first word of what is said.
    type Answers = &'static [(&'static str, &'static str)];

    /// Answers by the first word of each line; what is not listed is taken.
    async fn talk(stream: TcpStream, script: &[(&str, &str)]) -> Vec<String> {
        let (mut said, mut stream) = (Vec::new(), BufReader::new(stream));
        let answer = |word: &str, usual: &str| {
            script.iter().find(|(of, _)| *of == word).map_or(usual, |(_, answer)| *answer).to_owned()
        };
        let greeting = answer("greeting", "220 relay.example\r\n");
        stream.write_all(greeting.as_bytes()).await.unwrap();
        let mut line = String::new();
        while stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
            let word = line.split([' ', '\r', ':']).next().unwrap_or_default().to_owned();
            let usual = if word == "DATA" { "354 go on\r\n" } else { "250 fine\r\n" };
            let answer = answer(&word, usual);
            said.push(std::mem::take(&mut line).trim_end().to_owned());
            if stream.write_all(answer.as_bytes()).await.is_err() {
                break;
            }
            if word == "DATA" && answer.starts_with('3') {
                let mut content = String::new();
                while !content.ends_with("\r\n.\r\n") {
                    assert_ne!(stream.read_line(&mut content).await.unwrap(), 0);
                }
                said.push(content);
                stream.write_all(b"250 taken\r\n").await.unwrap();
            }
        }
        said
    }

    /// A relay for one connection.
    pub(in crate::mail) async fn relay(script: Answers) -> (u16, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let said = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            drop(listener);
            talk(stream, script).await
        });
        (port, said)
    }

    fn route(port: u16, tls: SmtpTls) -> Route {
        Route {
            relay: SmtpRelay { host: "127.0.0.1".to_owned(), port, tls, username: None, password: None },
            owner: Some("shop".parse().unwrap()),
            from: Mailbox::new(Some("The \"Shop\" <x>".to_owned()), "hello@shop.example.com".parse().unwrap()),
            reply_to: None,
        }
    }

    fn letter() -> Letter {
        Letter {
            id: Uuid::from_u128(7),
            to: Mailbox::new(None, "Ada@Example.com".parse().unwrap()),
            at: datetime!(2026-02-01 09:30 UTC),
            content: Rendered {
                subject: "Grüße".to_owned(),
                text: "text\n.\nmore".to_owned(),
                html: "<p>html</p>".to_owned(),
            },
        }
    }

    fn relays() -> Relays {
        let reach = Reach { allow_insecure: true, ..Reach::default() };
        Relays::new(MailSettings { reach, ..MailSettings::default() })
    }

    #[tokio::test]
    async fn a_mail_is_sent_and_the_connection_serves_the_next() {
        let (port, said) = relay(&[]).await;
        let (relays, route) = (relays(), route(port, SmtpTls::None));
        relays.send(&route, letter()).await.unwrap();
        relays.send(&route, letter()).await.unwrap();
        drop(relays);
        let said = said.await.unwrap();
        let words: Vec<_> = said.iter().filter_map(|line| line.split([' ', ':']).next()).collect();
        assert_eq!(words[..4], ["EHLO", "MAIL", "RCPT", "DATA"]);
        assert_eq!(words[5..9], ["NOOP", "MAIL", "RCPT", "DATA"]);
        assert_eq!(said[0], "EHLO shop.example.com");
        assert_eq!(said[1], "MAIL FROM:<hello@shop.example.com>");
        assert_eq!(said[2], "RCPT TO:<Ada@Example.com>");
        let content = &said[4];
        for header in [
            "From: =?utf-8?b?VGhlICJTaG9wIiA8eD4=?= <hello@shop.example.com>\r\n",
            "To: Ada@Example.com\r\n",
            "Subject: =?utf-8?b?",
            "Date: Sun, 01 Feb 2026 09:30:00 +0000\r\n",
            "Message-ID: <00000000-0000-0000-0000-000000000007@shop.example.com>\r\n",
            "Auto-Submitted: auto-generated\r\n",
            "X-Auto-Response-Suppress: All\r\n",
            "MIME-Version: 1.0\r\n",
            "Content-Type: multipart/alternative;",
            "Content-Type: text/plain; charset=utf-8\r\n",
            "Content-Type: text/html; charset=utf-8\r\n",
        ] {
            assert!(content.contains(header), "{header} is not in\n{content}");
        }
        assert!(content.contains("text\r\n..\r\nmore"), "{content}");
    }

    #[test]
    fn a_subject_is_shown_as_it_was_written_and_not_decoded() {
        let mut letter = letter();
        letter.content.subject = "Hello =?utf-8?q?evil?=".to_owned();
        let message = message(&route(25, SmtpTls::None), letter).unwrap().formatted();
        let message = String::from_utf8(message).unwrap();
        assert!(message.contains("\r\nSubject: Hello = ?utf-8?q?evil?=\r\n"), "{message}");
    }

    #[tokio::test]
    async fn a_refusal_tells_its_place_and_code_and_nothing_that_the_peer_wrote() {
        let cases: [(Answers, SendError, &str); 6] = [
            (
                &[("greeting", "554 go away\r\n")],
                SendError::Refused { stage: Stage::Greeting, code: 554 },
                "the relay refused the greeting (554)",
            ),
            (
                &[("MAIL", "550 not you\r\n")],
                SendError::Refused { stage: Stage::Sender, code: 550 },
                "the relay refused the sender (550)",
            ),
            (
                &[("RCPT", "550 no such user Ada\r\n")],
                SendError::Refused { stage: Stage::Recipient, code: 550 },
                "the relay refused the recipient (550)",
            ),
            (
                &[("RCPT", "451 later\r\n")],
                SendError::Refused { stage: Stage::Recipient, code: 451 },
                "the relay refused the recipient (451)",
            ),
            (
                &[("DATA", "554 spam\r\n")],
                SendError::Refused { stage: Stage::Content, code: 554 },
                "the relay refused the message (554)",
            ),
            (
                &[("MAIL", "hello?\r\n")],
                SendError::NotSmtp(Stage::Sender),
                "the relay's answer to the sender is not SMTP",
            ),
        ];
        for (script, expected, text) in cases {
            let (port, said) = relay(script).await;
            let error = relays().send(&route(port, SmtpTls::None), letter()).await.unwrap_err();
            assert_eq!((error, error.to_string().as_str()), (expected, text));
            said.await.unwrap();
        }
    }

    #[test]
    fn only_refusals_of_recipient_or_message_are_final() {
        let refused = |stage, code| SendError::Refused { stage, code }.is_final();
        for stage in [Stage::Recipient, Stage::Content] {
            assert!(refused(stage, 550) && refused(stage, 552) && refused(stage, 554), "{stage:?}");
            assert!(!refused(stage, 421) && !refused(stage, 451), "{stage:?}");
            assert!(!refused(stage, 530) && !refused(stage, 503), "{stage:?}");
        }
        for stage in [Stage::Greeting, Stage::Tls, Stage::Login, Stage::Sender] {
            assert!(!refused(stage, 535) && !refused(stage, 554) && !refused(stage, 421), "{stage:?}");
        }
        for error in [SendError::TooSlow, SendError::Tls, SendError::Unreachable, SendError::AddressRefused] {
            assert!(!error.is_final(), "{error}");
        }
    }

    #[tokio::test]
    async fn starttls_is_never_left_out() {
        let (port, said) = relay(&[("EHLO", "250-relay.example\r\n250 SIZE\r\n")]).await;
        let error = relays().send(&route(port, SmtpTls::Starttls), letter()).await.unwrap_err();
        assert_eq!(error, SendError::NoStarttls);
        assert_eq!(said.await.unwrap(), ["EHLO shop.example.com"]);
    }

    #[tokio::test]
    async fn what_comes_in_clear_behind_starttls_is_not_believed() {
        let (port, said) = relay(&[
            ("EHLO", "250-relay.example\r\n250 starttls\r\n"),
            ("STARTTLS", "220 go on\r\n250 AUTH PLAIN\r\n"),
        ])
        .await;
        let error = relays().send(&route(port, SmtpTls::Starttls), letter()).await.unwrap_err();
        assert_eq!(error, SendError::NotSmtp(Stage::Tls));
        assert_eq!(said.await.unwrap(), ["EHLO shop.example.com", "STARTTLS"]);
    }

    #[tokio::test]
    async fn without_a_valid_certificate_nothing_is_said() {
        for tls in [SmtpTls::Implicit, SmtpTls::Starttls] {
            let (port, said) = relay(&[("EHLO", "250 STARTTLS\r\n"), ("STARTTLS", "220 go on\r\n")]).await;
            let error = relays().send(&route(port, tls), letter()).await.unwrap_err();
            assert_eq!(error, SendError::Tls);
            assert!(!said.await.unwrap().iter().any(|line| line.starts_with("MAIL")));
        }
    }

    #[tokio::test]
    async fn a_peer_that_never_ends_its_line_is_cut_off() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            while stream.write_all(&[b'2'; 65_536]).await.is_ok() {}
        });
        let error = relays().send(&route(port, SmtpTls::None), letter()).await.unwrap_err();
        assert_eq!(error, SendError::Broken(Stage::Greeting));
    }

    #[tokio::test]
    async fn a_login_without_a_known_way_is_told_as_such() {
        let (port, said) = relay(&[("EHLO", "250-relay.example\r\n250 AUTH GSSAPI\r\n")]).await;
        let mut route = route(port, SmtpTls::None);
        route.relay.username = Some(SecretString::new("shop"));
        route.relay.password = Some(SecretString::new("secret"));
        assert_eq!(relays().send(&route, letter()).await.unwrap_err(), SendError::NoLogin);
        said.await.unwrap();
    }

    #[tokio::test]
    async fn a_refused_login_is_told_and_not_final() {
        let (port, said) = relay(&[("EHLO", "250 AUTH PLAIN\r\n"), ("AUTH", "535 who?\r\n")]).await;
        let mut route = route(port, SmtpTls::None);
        route.relay.username = Some(SecretString::new("shop"));
        route.relay.password = Some(SecretString::new("secret"));
        let error = relays().send(&route, letter()).await.unwrap_err();
        assert_eq!((error, error.is_final()), (SendError::Refused { stage: Stage::Login, code: 535 }, false));
        assert!(!format!("{route:?}{error:?}").contains("secret"));
        said.await.unwrap();
    }

    #[tokio::test]
    async fn an_apps_own_relay_is_judged_by_its_address_and_port_and_the_installs_is_not() {
        let (port, said) = relay(&[]).await;
        let relays = Relays::new(MailSettings::default());
        let error = |mut route: Route, host: &str, port| {
            route.relay.host = host.to_owned();
            route.relay.port = port;
            route
        };
        let refused = relays.send(&error(route(port, SmtpTls::None), "127.0.0.1", port), letter()).await;
        assert_eq!(refused, Err(SendError::PortRefused(port)));
        for host in ["127.0.0.1", "localhost", "localhost.", "[::1]", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254"]
        {
            let refused = relays.send(&error(route(port, SmtpTls::None), host, 25), letter()).await;
            assert_eq!(refused, Err(SendError::AddressRefused), "{host}");
        }
        let install = Route { owner: None, ..route(port, SmtpTls::None) };
        relays.send(&install, letter()).await.unwrap();
        drop(relays);
        assert!(said.await.unwrap().iter().any(|line| line.starts_with("RCPT")));
    }

    #[test]
    fn another_app_or_another_login_has_its_own_connections() {
        let one = route(25, SmtpTls::None);
        let other_app = Route { owner: Some("blog".parse().unwrap()), ..route(25, SmtpTls::None) };
        let mut other_login = route(25, SmtpTls::None);
        other_login.relay.password = Some(SecretString::new("x"));
        assert!(key(&one) == key(&route(25, SmtpTls::None)));
        assert!(key(&one) != key(&other_app) && key(&one) != key(&other_login));
    }
}
