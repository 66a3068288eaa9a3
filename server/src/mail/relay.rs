//! Sends mails through relays, over connections that are reused.

use std::{
    collections::HashMap,
    net::SocketAddr,
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
use parking_lot::Mutex;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    relay_ports, relay_stream,
    send_error::{SendError, Stage},
    settings::MailSettings,
    templates::MailContent,
};
use crate::outbound::{ResolveError, lookup_host, tls_roots::TlsRoots};

/// Timeout for sending one mail: DNS lookup, connection, TLS, authentication and SMTP.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection can be idle before it is closed. Relays also close idle connections: Postfix after 300 s,
/// other relays after 30 s.
const MAX_IDLE_TIME: Duration = Duration::from_secs(20);
/// The maximum number of mails that are sent over one connection. Many relays accept a hundred, and some accept fewer.
const MAX_MAILS_PER_CONNECTION: u32 = 50;
/// The maximum number of idle connections per relay and App. It is also the maximum number of mails of an App that are
/// sent at the same time.
const MAX_IDLE_CONNECTIONS: usize = 4;

/// The relay and the sender of a mail.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) relay: SmtpRelay,
    /// The App that owns the relay. `None` for the relay of the installation, which can have any IP address.
    pub(super) owner: Option<AppId>,
    pub(super) from: Mailbox,
    pub(super) reply_to: Option<Mailbox>,
}

/// A mail, ready to be sent.
pub(super) struct OutgoingMail {
    /// The id of the outbox row, which becomes part of the Message-ID. A second attempt has the same Message-ID, so
    /// that most mail clients show only one mail.
    pub(super) id: Uuid,
    pub(super) to: Mailbox,
    pub(super) date: OffsetDateTime,
    pub(super) content: MailContent,
}

/// The connections to relays.
pub(super) struct RelayPool {
    settings: MailSettings,
    trust: TlsRoots,
    idle: Mutex<HashMap<ConnectionKey, Vec<IdleConnection>>>,
}

/// The App that owns the relay, and the SHA-256 of the relay's settings and credentials.
type ConnectionKey = (Option<AppId>, [u8; SHA256_OUTPUT_LEN]);

struct IdleConnection {
    connection: AsyncSmtpConnection,
    idle_since: Instant,
    mails_sent: u32,
}

// === impl RelayPool ===

impl RelayPool {
    pub(super) fn new(settings: MailSettings) -> Self {
        Self { settings, trust: TlsRoots::default(), idle: Mutex::default() }
    }

    pub(super) fn settings(&self) -> &MailSettings {
        &self.settings
    }

    /// Sends a mail, or fails after [`SEND_TIMEOUT`].
    pub(super) async fn send(&self, route: &Route, mail: OutgoingMail) -> Result<(), SendError> {
        let message = build_message(route, mail)?;
        let envelope = message.envelope();
        let (Some(from), [to]) = (envelope.from(), envelope.to()) else { return Err(SendError::InvalidMessage) };
        let bytes = message.formatted();
        let sending = async {
            let key = connection_key(route);
            let (mut connection, mails_sent) = match self.acquire(&key).await {
                Some(idle) => idle,
                None => (self.connect(route).await?, 0),
            };
            let at = |stage| move |error| SendError::from_smtp(stage, &error);
            connection.command(Mail::new(Some(from.clone()), Vec::new())).await.map_err(at(Stage::Sender))?;
            connection.command(Rcpt::new(to.clone(), Vec::new())).await.map_err(at(Stage::Recipient))?;
            connection.command(Data).await.map_err(at(Stage::Content))?;
            connection.message(&bytes).await.map_err(at(Stage::Content))?;
            self.release(key, connection, mails_sent + 1);
            Ok(())
        };
        tokio::time::timeout(SEND_TIMEOUT, sending).await.unwrap_or(Err(SendError::Timeout))
    }

    /// Closes connections that were idle for too long.
    pub(super) fn close_idle(&self) {
        let mut idle = self.idle.lock();
        idle.retain(|_, connections| {
            connections.retain(|idle| idle.idle_since.elapsed() < MAX_IDLE_TIME);
            !connections.is_empty()
        });
    }

    /// Returns an idle connection that still works, and the number of mails that were sent over it.
    async fn acquire(&self, key: &ConnectionKey) -> Option<(AsyncSmtpConnection, u32)> {
        loop {
            let idle = self.idle.lock().get_mut(key)?.pop()?;
            let IdleConnection { mut connection, idle_since, mails_sent } = idle;
            if idle_since.elapsed() < MAX_IDLE_TIME && connection.test_connected().await {
                return Some((connection, mails_sent));
            }
        }
    }

    /// Keeps a connection for the next mail.
    fn release(&self, key: ConnectionKey, connection: AsyncSmtpConnection, mails_sent: u32) {
        if mails_sent >= MAX_MAILS_PER_CONNECTION || connection.has_broken() {
            return;
        }
        let mut idle = self.idle.lock();
        let connections = idle.entry(key).or_default();
        if connections.len() < MAX_IDLE_CONNECTIONS {
            connections.push(IdleConnection { connection, idle_since: Instant::now(), mails_sent });
        }
    }

    async fn connect(&self, route: &Route) -> Result<AsyncSmtpConnection, SendError> {
        let relay = &route.relay;
        let addresses = self.resolve(route).await?;
        let (stream, peer) = relay_stream::connect(&addresses).await?;
        let hello = ClientId::Domain(route.from.email.domain().to_owned());
        let mut connection = relay_stream::open(stream, peer, host(relay), relay.tls, &hello, &self.trust).await?;
        if let (Some(username), Some(password)) = (&relay.username, &relay.password) {
            let credentials = Credentials::new(username.expose().to_owned(), password.expose().to_owned());
            let login = connection.auth(&[Mechanism::Plain, Mechanism::Login], &credentials).await;
            login.map_err(|error| SendError::from_smtp(Stage::Login, &error))?;
        }
        Ok(connection)
    }

    /// The IP addresses to connect to. An App's own relay must have an allowed port and IP address.
    async fn resolve(&self, route: &Route) -> Result<Vec<SocketAddr>, SendError> {
        let is_restricted = route.owner.is_some();
        let (host, port) = (host(&route.relay), route.relay.port);
        if is_restricted && !relay_ports::is_port_allowed(&self.settings, port) {
            return Err(SendError::PortNotAllowed(port));
        }
        let addresses =
            if is_restricted { self.settings.reach.resolve(host, port).await } else { lookup_host(host, port).await };
        addresses.map_err(|error| match error {
            ResolveError::NameUnknown => SendError::NameNotResolved,
            ResolveError::AddressNotAllowed => SendError::AddressNotAllowed,
        })
    }
}

/// The host as an IP address or a name, without brackets and without a final dot: names in certificates have no final
/// dot.
fn host(relay: &SmtpRelay) -> &str {
    let host = relay.host.strip_suffix('.').unwrap_or(&relay.host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The key under which the pool keeps the connections of this route. If the Secret of a relay changes, the key changes,
/// too. The key contains a hash, so that the pool does not keep credentials.
fn connection_key(route: &Route) -> ConnectionKey {
    let relay = serde_json::to_vec(&route.relay).expect("a relay is strings and a number");
    let mut hash = [0; SHA256_OUTPUT_LEN];
    hash.copy_from_slice(digest(&SHA256, &relay).as_ref());
    (route.owner.clone(), hash)
}

pub(super) fn build_message(route: &Route, mail: OutgoingMail) -> Result<Message, SendError> {
    let OutgoingMail { id, to, date, content } = mail;
    let header =
        |name: &'static str, value: &str| HeaderValue::new(HeaderName::new_from_ascii_str(name), value.to_owned());
    let mut message = Message::builder()
        .from(route.from.clone())
        .to(to)
        // Mail clients decode text that looks like an encoded word (RFC 2047, section 2). Without this replacement, the
        // name of an account could put unchecked text into the subject.
        .subject(content.subject.replace("=?", "= ?"))
        .date(date.into())
        .message_id(Some(format!("<{id}@{}>", route.from.email.domain())))
        // RFC 3834: no out-of-office replies. Exchange needs the second header.
        .raw_header(header("Auto-Submitted", "auto-generated"))
        .raw_header(header("X-Auto-Response-Suppress", "All"));
    if let Some(reply_to) = &route.reply_to {
        message = message.reply_to(reply_to.clone());
    }
    message
        .multipart(MultiPart::alternative_plain_html(normalize_body(&content.text), normalize_body(&content.html)))
        .map_err(|_| SendError::InvalidMessage)
}

/// Makes LF the only line end, and removes NUL. lettre sends each LF as CR LF. A CR alone and NUL are not allowed in a
/// message (RFC 5322, sections 2.3 and 4): a relay that reads a CR as a line end could find an SMTP command in a
/// template.
fn normalize_body(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n").replace('\0', "")
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
    use crate::outbound::OutboundPolicy;

    /// Each entry is the first word of a command, and the response to the command.
    type Replies = &'static [(&'static str, &'static str)];

    /// Responds to each command by its first word; commands that are not listed are accepted. Returns what it received.
    async fn serve_smtp(stream: TcpStream, script: &[(&str, &str)]) -> Vec<String> {
        let (mut received, mut stream) = (Vec::new(), BufReader::new(stream));
        let reply_to = |word: &str, default: &str| {
            script.iter().find(|(command, _)| *command == word).map_or(default, |(_, reply)| *reply).to_owned()
        };
        let greeting = reply_to("greeting", "220 relay.example\r\n");
        stream.write_all(greeting.as_bytes()).await.unwrap();
        let mut line = String::new();
        while stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
            let word = line.split([' ', '\r', ':']).next().unwrap_or_default().to_owned();
            let default = if word == "DATA" { "354 go on\r\n" } else { "250 fine\r\n" };
            let reply = reply_to(&word, default);
            received.push(std::mem::take(&mut line).trim_end().to_owned());
            if stream.write_all(reply.as_bytes()).await.is_err() {
                break;
            }
            if word == "DATA" && reply.starts_with('3') {
                let mut content = String::new();
                while !content.ends_with("\r\n.\r\n") {
                    assert_ne!(stream.read_line(&mut content).await.unwrap(), 0);
                }
                received.push(content);
                stream.write_all(b"250 taken\r\n").await.unwrap();
            }
        }
        received
    }

    /// Starts a relay that serves one connection. Returns its port and what it receives.
    pub(in crate::mail) async fn test_relay(script: Replies) -> (u16, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            drop(listener);
            serve_smtp(stream, script).await
        });
        (port, received)
    }

    fn route(port: u16, tls: SmtpTls) -> Route {
        Route {
            relay: SmtpRelay { host: "127.0.0.1".to_owned(), port, tls, username: None, password: None },
            owner: Some("shop".parse().unwrap()),
            from: Mailbox::new(Some("The \"Shop\" <x>".to_owned()), "hello@shop.example.com".parse().unwrap()),
            reply_to: None,
        }
    }

    fn test_mail() -> OutgoingMail {
        OutgoingMail {
            id: Uuid::from_u128(7),
            to: Mailbox::new(None, "Ada@Example.com".parse().unwrap()),
            date: datetime!(2026-02-01 09:30 UTC),
            content: MailContent {
                subject: "Grüße".to_owned(),
                text: "text\n.\nmore".to_owned(),
                html: "<p>html</p>".to_owned(),
            },
        }
    }

    fn relays() -> RelayPool {
        let reach = OutboundPolicy { allow_insecure: true, ..OutboundPolicy::default() };
        RelayPool::new(MailSettings { reach, ..MailSettings::default() })
    }

    #[tokio::test]
    async fn a_mail_is_sent_and_the_connection_is_reused() {
        let (port, received) = test_relay(&[]).await;
        let (relays, route) = (relays(), route(port, SmtpTls::None));
        relays.send(&route, test_mail()).await.unwrap();
        relays.send(&route, test_mail()).await.unwrap();
        drop(relays);
        let received = received.await.unwrap();
        let words: Vec<_> = received.iter().filter_map(|line| line.split([' ', ':']).next()).collect();
        assert_eq!(words[..4], ["EHLO", "MAIL", "RCPT", "DATA"]);
        assert_eq!(words[5..9], ["NOOP", "MAIL", "RCPT", "DATA"]);
        assert_eq!(received[0], "EHLO shop.example.com");
        assert_eq!(received[1], "MAIL FROM:<hello@shop.example.com>");
        assert_eq!(received[2], "RCPT TO:<Ada@Example.com>");
        let content = &received[4];
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
    fn a_subject_is_not_decoded_as_an_encoded_word() {
        let mut mail = test_mail();
        mail.content.subject = "Hello =?utf-8?q?evil?=".to_owned();
        let message = build_message(&route(25, SmtpTls::None), mail).unwrap().formatted();
        let message = String::from_utf8(message).unwrap();
        assert!(message.contains("\r\nSubject: Hello = ?utf-8?q?evil?=\r\n"), "{message}");
    }

    #[test]
    fn a_carriage_return_is_sent_only_with_a_line_feed_and_nul_is_never_sent() {
        let mut mail = test_mail();
        mail.content.text = "one\r\0two\r\nthree\n\r.\rMAIL FROM:<evil@example.com>".to_owned();
        mail.content.html = "<p>\r</p>".to_owned();
        let message = build_message(&route(25, SmtpTls::None), mail).unwrap().formatted();
        let message = String::from_utf8(message).unwrap();
        assert!(message.contains("one\r\ntwo\r\nthree\r\n\r\n.\r\nMAIL FROM:"), "{message}");
        assert!(!message.replace("\r\n", "").contains(['\r', '\n']), "{message}");
    }

    #[tokio::test]
    async fn a_rejection_names_the_stage_and_the_code_but_contains_no_text_of_the_peer() {
        let cases: [(Replies, SendError, &str); 6] = [
            (
                &[("greeting", "554 go away\r\n")],
                SendError::Rejected { stage: Stage::Greeting, code: 554 },
                "the relay refused the greeting (554)",
            ),
            (
                &[("MAIL", "550 not you\r\n")],
                SendError::Rejected { stage: Stage::Sender, code: 550 },
                "the relay refused the sender (550)",
            ),
            (
                &[("RCPT", "550 no such user Ada\r\n")],
                SendError::Rejected { stage: Stage::Recipient, code: 550 },
                "the relay refused the recipient (550)",
            ),
            (
                &[("RCPT", "451 later\r\n")],
                SendError::Rejected { stage: Stage::Recipient, code: 451 },
                "the relay refused the recipient (451)",
            ),
            (
                &[("DATA", "554 spam\r\n")],
                SendError::Rejected { stage: Stage::Content, code: 554 },
                "the relay refused the message (554)",
            ),
            (
                &[("MAIL", "hello?\r\n")],
                SendError::InvalidReply(Stage::Sender),
                "the relay's answer to the sender is not SMTP",
            ),
        ];
        for (script, expected, text) in cases {
            let (port, received) = test_relay(script).await;
            let error = relays().send(&route(port, SmtpTls::None), test_mail()).await.unwrap_err();
            assert_eq!((error, error.to_string().as_str()), (expected, text));
            received.await.unwrap();
        }
    }

    #[tokio::test]
    async fn starttls_is_never_skipped() {
        let (port, received) = test_relay(&[("EHLO", "250-relay.example\r\n250 SIZE\r\n")]).await;
        let error = relays().send(&route(port, SmtpTls::Starttls), test_mail()).await.unwrap_err();
        assert_eq!(error, SendError::NoStarttls);
        assert_eq!(received.await.unwrap(), ["EHLO shop.example.com"]);
    }

    #[tokio::test]
    async fn plaintext_after_starttls_is_not_trusted() {
        let (port, received) = test_relay(&[
            ("EHLO", "250-relay.example\r\n250 starttls\r\n"),
            ("STARTTLS", "220 go on\r\n250 AUTH PLAIN\r\n"),
        ])
        .await;
        let error = relays().send(&route(port, SmtpTls::Starttls), test_mail()).await.unwrap_err();
        assert_eq!(error, SendError::InvalidReply(Stage::Tls));
        assert_eq!(received.await.unwrap(), ["EHLO shop.example.com", "STARTTLS"]);
    }

    #[tokio::test]
    async fn nothing_is_sent_without_a_valid_certificate() {
        for tls in [SmtpTls::Implicit, SmtpTls::Starttls] {
            let (port, received) = test_relay(&[("EHLO", "250 STARTTLS\r\n"), ("STARTTLS", "220 go on\r\n")]).await;
            let error = relays().send(&route(port, tls), test_mail()).await.unwrap_err();
            assert_eq!(error, SendError::Tls);
            assert!(!received.await.unwrap().iter().any(|line| line.starts_with("MAIL")));
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
        let error = relays().send(&route(port, SmtpTls::None), test_mail()).await.unwrap_err();
        assert_eq!(error, SendError::ConnectionClosed(Stage::Greeting));
    }

    #[tokio::test]
    async fn a_missing_auth_mechanism_is_reported() {
        let (port, received) = test_relay(&[("EHLO", "250-relay.example\r\n250 AUTH GSSAPI\r\n")]).await;
        let mut route = route(port, SmtpTls::None);
        route.relay.username = Some(SecretString::new("shop"));
        route.relay.password = Some(SecretString::new("secret"));
        assert_eq!(relays().send(&route, test_mail()).await.unwrap_err(), SendError::NoAuthMechanism);
        received.await.unwrap();
    }

    #[tokio::test]
    async fn a_rejected_login_is_reported_as_an_error_that_is_not_permanent() {
        let (port, received) = test_relay(&[("EHLO", "250 AUTH PLAIN\r\n"), ("AUTH", "535 who?\r\n")]).await;
        let mut route = route(port, SmtpTls::None);
        route.relay.username = Some(SecretString::new("shop"));
        route.relay.password = Some(SecretString::new("secret"));
        let error = relays().send(&route, test_mail()).await.unwrap_err();
        assert_eq!((error, error.is_permanent()), (SendError::Rejected { stage: Stage::Login, code: 535 }, false));
        assert!(!format!("{route:?}{error:?}").contains("secret"));
        received.await.unwrap();
    }

    #[tokio::test]
    async fn only_relays_of_apps_are_restricted_to_public_addresses_and_mail_ports() {
        let (port, received) = test_relay(&[]).await;
        let relays = RelayPool::new(MailSettings::default());
        let with_host = |mut route: Route, host: &str, port| {
            route.relay.host = host.to_owned();
            route.relay.port = port;
            route
        };
        let outcome = relays.send(&with_host(route(port, SmtpTls::None), "127.0.0.1", port), test_mail()).await;
        assert_eq!(outcome, Err(SendError::PortNotAllowed(port)));
        for host in ["127.0.0.1", "localhost", "localhost.", "[::1]", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254"]
        {
            let outcome = relays.send(&with_host(route(port, SmtpTls::None), host, 25), test_mail()).await;
            assert_eq!(outcome, Err(SendError::AddressNotAllowed), "{host}");
        }
        let install_route = Route { owner: None, ..route(port, SmtpTls::None) };
        relays.send(&install_route, test_mail()).await.unwrap();
        drop(relays);
        assert!(received.await.unwrap().iter().any(|line| line.starts_with("RCPT")));
    }

    #[test]
    fn another_app_or_another_relay_password_gets_separate_connections() {
        let shop = route(25, SmtpTls::None);
        let other_app = Route { owner: Some("blog".parse().unwrap()), ..route(25, SmtpTls::None) };
        let mut other_password = route(25, SmtpTls::None);
        other_password.relay.password = Some(SecretString::new("x"));
        assert!(connection_key(&shop) == connection_key(&route(25, SmtpTls::None)));
        assert!(
            connection_key(&shop) != connection_key(&other_app)
                && connection_key(&shop) != connection_key(&other_password)
        );
    }
}
