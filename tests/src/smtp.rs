//! The relay of tests and of `make run`: an SMTP server (RFC 5321) that keeps the mails it receives, and injects faults
//! if a test asks for them.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use crate::{mail::Mailbox, process, tls::ServerTls};

/// Maximum length of a line, to bound memory. RFC 5321, 4.5.3.1.6 requires servers to accept 998 bytes of text.
const MAX_LINE_BYTES: u64 = 64 * 1024;
/// Maximum size of a mail, to bound memory. Latchkey's mails are a few kilobytes.
const MAX_MAIL_BYTES: usize = 4 * 1024 * 1024;
/// The session of an idle client ends after five minutes (RFC 5321, 4.5.3.2.7).
const IDLE_LIMIT: Duration = Duration::from_secs(300);

/// How the server uses TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    None,
    /// The client must request TLS with STARTTLS before AUTH and MAIL.
    StartTls,
    /// TLS from the first byte (RFC 8314).
    Implicit,
}

/// The steps of a session at which a fault can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Connect,
    Auth,
    MailFrom,
    RcptTo,
    Data,
    /// After the last line of the mail, when the server would accept the mail.
    EndOfData,
}

/// How the server treats its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behavior {
    Accept,
    /// Rejects this step with a code (421, 450, 550 and so on) and a text. After 421, or at `Connect`, closes the
    /// connection.
    Refuse(Step, u16, String),
    /// Rejects one recipient and accepts the others.
    RefuseRecipient(String, u16),
    /// Does not reply at this step, and keeps the connection open.
    Hang(Step),
    /// Closes the connection at this step. At `EndOfData`, the server has accepted the mail, and only its reply is
    /// lost.
    Cut(Step),
}

/// Settings of a server.
pub struct Options {
    pub addr: SocketAddr,
    pub security: Security,
    /// If set, the server requires AUTH with this name and password.
    pub login: Option<(String, String)>,
    pub mails: Mailbox,
}

/// A running server. It ends when this value is dropped.
pub struct Smtp {
    addr: SocketAddr,
    tls: Option<ServerTls>,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    security: Security,
    login: Option<(String, String)>,
    acceptor: Option<TlsAcceptor>,
    mails: Mailbox,
    behavior: Mutex<Behavior>,
    /// How often the server was stopped. All open sessions end when this number changes.
    stops: watch::Sender<u64>,
    sessions: AtomicUsize,
    logins: AtomicUsize,
    open_sessions: AtomicUsize,
}

/// State of a session.
struct Session<'a> {
    shared: &'a Shared,
    is_encrypted: bool,
    is_authenticated: bool,
    has_greeted: bool,
    from: Option<String>,
    to: Vec<String>,
}

/// What the server does after a command.
enum NextAction {
    Reply(String),
    StartTls,
    /// AUTH continues with the client's response to this challenge.
    Challenge(Challenge),
    ReadData,
    Close(String),
    Cut,
    Hang,
}

enum Challenge {
    Plain,
    LoginName,
    LoginPassword(String),
}

enum SessionEnd {
    Done,
    /// The client requested TLS and must start the handshake.
    Upgrade,
}

// === impl Options ===

impl Options {
    /// A server on a free port, without TLS and without login.
    pub fn plain() -> Self {
        Self {
            addr: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            security: Security::None,
            login: None,
            mails: Mailbox::default(),
        }
    }
}

// === impl Smtp ===

impl Smtp {
    pub async fn start(options: Options) -> Result<Self> {
        let tls = match options.security {
            Security::None => None,
            Security::StartTls | Security::Implicit => Some(ServerTls::new()?),
        };
        let acceptor = match &tls {
            Some(tls) => Some(TlsAcceptor::from(tls.server_config()?)),
            None => None,
        };
        let shared = Arc::new(Shared {
            security: options.security,
            login: options.login,
            acceptor,
            mails: options.mails,
            behavior: Mutex::new(Behavior::Accept),
            stops: watch::Sender::new(0),
            sessions: AtomicUsize::new(0),
            logins: AtomicUsize::new(0),
            open_sessions: AtomicUsize::new(0),
        });
        let addr = match options.addr.port() {
            0 => SocketAddr::new(options.addr.ip(), process::free_port()),
            _ => options.addr,
        };
        let this = Self { addr, tls, shared, accepting: Mutex::new(None) };
        this.listen().context("the SMTP server")?;
        Ok(this)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The certificate of the server's CA (PEM), if the server uses TLS.
    pub fn ca(&self) -> Option<&str> {
        self.tls.as_ref().map(|tls| tls.ca.as_str())
    }

    pub fn security(&self) -> Security {
        self.shared.security
    }

    pub fn login(&self) -> Option<&(String, String)> {
        self.shared.login.as_ref()
    }

    pub fn mails(&self) -> &Mailbox {
        &self.shared.mails
    }

    pub fn set_behavior(&self, behavior: Behavior) {
        *process::lock(&self.shared.behavior) = behavior;
    }

    /// Number of SMTP sessions so far.
    pub fn sessions(&self) -> usize {
        self.shared.sessions.load(Ordering::Relaxed)
    }

    /// Number of open SMTP sessions.
    pub fn open_sessions(&self) -> usize {
        self.shared.open_sessions.load(Ordering::Relaxed)
    }

    /// Number of successful logins (AUTH).
    pub fn logins(&self) -> usize {
        self.shared.logins.load(Ordering::Relaxed)
    }

    /// Closes the port and all sessions.
    pub async fn stop(&self) {
        let accepting = process::lock(&self.accepting).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            // The port is closed when the task has ended.
            drop(accepting.await);
        }
        self.shared.stops.send_modify(|stops| *stops += 1);
    }

    /// Opens the port, at the start or after [`Smtp::stop`].
    pub fn listen(&self) -> io::Result<()> {
        let listener = listen(self.addr)?;
        let shared = Arc::clone(&self.shared);
        *process::lock(&self.accepting) = Some(tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { shared.serve(stream).await });
            }
        }));
        Ok(())
    }
}

impl Drop for Smtp {
    fn drop(&mut self) {
        if let Some(accepting) = process::lock(&self.accepting).take() {
            accepting.abort();
        }
        self.shared.stops.send_modify(|stops| *stops += 1);
    }
}

/// Listens on a port, even if old connections of this port still exist.
pub(crate) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(1024)
}

// === impl Shared ===

impl Shared {
    async fn serve(&self, stream: TcpStream) {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        self.open_sessions.fetch_add(1, Ordering::Relaxed);
        let mut stops = self.stops.subscribe();
        tokio::select! {
            // An error is not reported here, because the client sees it too.
            _ = self.session(stream) => {}
            _ = stops.changed() => {}
        }
        self.open_sessions.fetch_sub(1, Ordering::Relaxed);
    }

    async fn session(&self, stream: TcpStream) -> io::Result<()> {
        match (&self.acceptor, self.security) {
            (Some(acceptor), Security::Implicit) => {
                let mut stream = BufReader::new(acceptor.accept(stream).await?);
                Session::new(self, true).run(&mut stream, true).await?;
            }
            (Some(acceptor), Security::StartTls) => {
                let mut plain = BufReader::new(stream);
                if let SessionEnd::Upgrade = Session::new(self, false).run(&mut plain, true).await? {
                    // Discards the buffer, with everything that the client sent before the handshake (RFC 3207, 6).
                    let mut stream = BufReader::new(acceptor.accept(plain.into_inner()).await?);
                    Session::new(self, true).run(&mut stream, false).await?;
                }
            }
            _ => {
                Session::new(self, false).run(&mut BufReader::new(stream), true).await?;
            }
        }
        Ok(())
    }

    /// The action that replaces this step, if the test has set a fault for the step.
    fn fault(&self, step: Step) -> Option<NextAction> {
        match &*process::lock(&self.behavior) {
            Behavior::Refuse(at, 421, text) if *at == step => Some(NextAction::Close(format!("421 {text}"))),
            Behavior::Refuse(at, code, text) if *at == step => Some(NextAction::Reply(format!("{code} {text}"))),
            Behavior::Hang(at) if *at == step => Some(NextAction::Hang),
            Behavior::Cut(at) if *at == step => Some(NextAction::Cut),
            Behavior::Accept
            | Behavior::Refuse(..)
            | Behavior::RefuseRecipient(..)
            | Behavior::Hang(_)
            | Behavior::Cut(_) => None,
        }
    }

    /// The reply that rejects this recipient, if the test has set [`Behavior::RefuseRecipient`] for it.
    fn recipient_refusal(&self, recipient: &str) -> Option<String> {
        if let Behavior::RefuseRecipient(refused, code) = &*process::lock(&self.behavior)
            && refused.eq_ignore_ascii_case(recipient)
        {
            return Some(format!("{code} no such mailbox"));
        }
        None
    }
}

// === impl Session ===

impl<'a> Session<'a> {
    fn new(shared: &'a Shared, is_encrypted: bool) -> Self {
        Self { shared, is_encrypted, is_authenticated: false, has_greeted: false, from: None, to: Vec::new() }
    }

    async fn run<S: AsyncRead + AsyncWrite + Unpin>(
        mut self,
        stream: &mut BufReader<S>,
        sends_greeting: bool,
    ) -> io::Result<SessionEnd> {
        if sends_greeting {
            let next = self.shared.fault(Step::Connect).unwrap_or(NextAction::Reply("220 inbox ESMTP".to_owned()));
            let refused = matches!(&next, NextAction::Reply(reply) if !reply.starts_with("220"));
            if let Some(ended) = self.execute(stream, next).await? {
                return Ok(ended);
            }
            if refused {
                return Ok(SessionEnd::Done);
            }
        }
        while let Some(line) = read_line(stream).await? {
            let next = self.command(&line);
            if let Some(ended) = self.execute(stream, next).await? {
                return Ok(ended);
            }
        }
        Ok(SessionEnd::Done)
    }

    /// Executes an action. Returns `Some` if the session is over.
    async fn execute<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut BufReader<S>,
        mut next: NextAction,
    ) -> io::Result<Option<SessionEnd>> {
        loop {
            match next {
                NextAction::Reply(reply) => {
                    write_line(stream, &reply).await?;
                    return Ok(None);
                }
                NextAction::StartTls => {
                    write_line(stream, "220 go ahead").await?;
                    return Ok(Some(SessionEnd::Upgrade));
                }
                NextAction::Challenge(challenge) => {
                    let prompt = match &challenge {
                        Challenge::Plain => "334 ",
                        // "Username:" and "Password:" in base64, as clients of LOGIN expect.
                        Challenge::LoginName => "334 VXNlcm5hbWU6",
                        Challenge::LoginPassword(_) => "334 UGFzc3dvcmQ6",
                    };
                    write_line(stream, prompt).await?;
                    let Some(line) = read_line(stream).await? else { return Ok(Some(SessionEnd::Done)) };
                    next = self.challenge_response(challenge, &line);
                }
                NextAction::ReadData => {
                    write_line(stream, "354 end with a dot on a line").await?;
                    let Some(data) = read_data(stream).await? else { return Ok(Some(SessionEnd::Done)) };
                    next = self.end_of_data(&data);
                }
                NextAction::Close(reply) => {
                    write_line(stream, &reply).await?;
                    return Ok(Some(SessionEnd::Done));
                }
                NextAction::Cut => return Ok(Some(SessionEnd::Done)),
                NextAction::Hang => std::future::pending().await,
            }
        }
    }

    fn command(&mut self, line: &str) -> NextAction {
        let (verb, arguments) = line.split_once(' ').unwrap_or((line, ""));
        let reply = |text: &str| NextAction::Reply(text.to_owned());
        match verb.to_ascii_uppercase().as_str() {
            "EHLO" => {
                self.reset();
                self.has_greeted = true;
                NextAction::Reply(self.capabilities())
            }
            "HELO" => {
                self.reset();
                self.has_greeted = true;
                reply("250 inbox")
            }
            "NOOP" => reply("250 ok"),
            "RSET" => {
                self.reset();
                reply("250 ok")
            }
            "QUIT" => NextAction::Close("221 bye".to_owned()),
            "VRFY" => reply("252 cannot verify"),
            "STARTTLS" if self.shared.security == Security::StartTls && !self.is_encrypted => NextAction::StartTls,
            "AUTH" | "MAIL" | "RCPT" | "DATA" if !self.has_greeted => reply("503 send EHLO first"),
            "AUTH" | "MAIL" if self.requires_starttls() => reply("530 5.7.0 STARTTLS first"),
            "AUTH" => self.auth(arguments),
            "MAIL" if self.shared.login.is_some() && !self.is_authenticated => reply("530 5.7.0 log in first"),
            "MAIL" => self.mail(arguments),
            "RCPT" => self.rcpt(arguments),
            "DATA" if self.to.is_empty() => reply("503 no recipients"),
            "DATA" => self.shared.fault(Step::Data).unwrap_or(NextAction::ReadData),
            _ => reply("500 unknown command"),
        }
    }

    fn requires_starttls(&self) -> bool {
        self.shared.security == Security::StartTls && !self.is_encrypted
    }

    fn capabilities(&self) -> String {
        let mut lines = vec!["inbox", "8BITMIME", "SMTPUTF8"];
        if self.requires_starttls() {
            lines.push("STARTTLS");
        } else if self.shared.login.is_some() {
            lines.push("AUTH PLAIN LOGIN");
        }
        lines.push("ENHANCEDSTATUSCODES");
        let last = lines.len() - 1;
        let reply_lines =
            lines.iter().enumerate().map(|(index, line)| format!("250{}{line}", if index < last { '-' } else { ' ' }));
        reply_lines.collect::<Vec<_>>().join("\r\n")
    }

    fn auth(&mut self, arguments: &str) -> NextAction {
        if self.shared.login.is_none() {
            return NextAction::Reply("502 no AUTH here".to_owned());
        }
        let (mechanism, initial) = arguments.split_once(' ').unwrap_or((arguments, ""));
        match (mechanism.to_ascii_uppercase().as_str(), initial) {
            ("PLAIN", "") => NextAction::Challenge(Challenge::Plain),
            ("PLAIN", initial) => self.challenge_response(Challenge::Plain, initial),
            ("LOGIN", "") => NextAction::Challenge(Challenge::LoginName),
            ("LOGIN", initial) => self.challenge_response(Challenge::LoginName, initial),
            _ => NextAction::Reply("504 5.5.4 PLAIN or LOGIN".to_owned()),
        }
    }

    /// Checks the client's response to a challenge of AUTH (RFC 4954).
    fn challenge_response(&mut self, challenge: Challenge, response: &str) -> NextAction {
        let decoded = BASE64_STANDARD.decode(response.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let Some(decoded) = decoded else { return NextAction::Reply("501 5.5.2 not base64".to_owned()) };
        match challenge {
            // RFC 4616: authorization id, name and password, separated by NUL.
            Challenge::Plain => {
                let mut parts = decoded.split('\0').skip(1);
                let (name, password) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                self.log_in(name, password)
            }
            Challenge::LoginName => NextAction::Challenge(Challenge::LoginPassword(decoded)),
            Challenge::LoginPassword(name) => self.log_in(&name, &decoded),
        }
    }

    fn log_in(&mut self, name: &str, password: &str) -> NextAction {
        if let Some(fault) = self.shared.fault(Step::Auth) {
            return fault;
        }
        let is_right = self.shared.login.as_ref().is_some_and(|(n, p)| n == name && p == password);
        if !is_right {
            return NextAction::Reply("535 5.7.8 wrong name or password".to_owned());
        }
        self.is_authenticated = true;
        self.shared.logins.fetch_add(1, Ordering::Relaxed);
        NextAction::Reply("235 2.7.0 welcome".to_owned())
    }

    fn mail(&mut self, arguments: &str) -> NextAction {
        let Some(path) = path_after("FROM:", arguments) else {
            return NextAction::Reply("501 5.5.4 MAIL FROM:<…>".to_owned());
        };
        if let Some(fault) = self.shared.fault(Step::MailFrom) {
            return fault;
        }
        self.reset();
        self.from = Some(path.to_owned());
        NextAction::Reply("250 2.1.0 ok".to_owned())
    }

    fn rcpt(&mut self, arguments: &str) -> NextAction {
        let Some(path) = path_after("TO:", arguments).filter(|path| !path.is_empty()) else {
            return NextAction::Reply("501 5.5.4 RCPT TO:<…>".to_owned());
        };
        if self.from.is_none() {
            return NextAction::Reply("503 5.5.1 no sender".to_owned());
        }
        if let Some(fault) = self.shared.fault(Step::RcptTo) {
            return fault;
        }
        if let Some(refusal) = self.shared.recipient_refusal(path) {
            return NextAction::Reply(refusal);
        }
        self.to.push(path.to_owned());
        NextAction::Reply("250 2.1.5 ok".to_owned())
    }

    fn end_of_data(&mut self, data: &[u8]) -> NextAction {
        let fault = self.shared.fault(Step::EndOfData);
        let accepted = match &fault {
            None | Some(NextAction::Cut) => true,
            Some(_) => false,
        };
        let (from, to) = (self.from.take().unwrap_or_default(), std::mem::take(&mut self.to));
        if accepted && let Err(error) = self.shared.mails.deliver(&from, &to, data) {
            return NextAction::Reply(format!("554 5.6.0 {error}"));
        }
        fault.unwrap_or(NextAction::Reply("250 2.0.0 kept".to_owned()))
    }

    fn reset(&mut self) {
        self.from = None;
        self.to.clear();
    }
}

/// The email address in the arguments of a command: `FROM:<address> PARAMETERS` if the keyword is `FROM:`. Empty for
/// `<>`, and `None` if the syntax is wrong.
fn path_after<'a>(keyword: &str, arguments: &'a str) -> Option<&'a str> {
    let head = arguments.get(..keyword.len())?;
    if !head.eq_ignore_ascii_case(keyword) {
        return None;
    }
    let (path, _) = arguments[keyword.len()..].trim_start().strip_prefix('<')?.split_once('>')?;
    Some(path)
}

async fn write_line<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut BufReader<S>, line: &str) -> io::Result<()> {
    stream.write_all(format!("{line}\r\n").as_bytes()).await?;
    stream.flush().await
}

/// A line without its end; `None` if the client has disconnected or the line is too long.
async fn read_line<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<String>> {
    let line = read_raw_line(stream).await?;
    Ok(line.map(|line| String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()))
}

async fn read_raw_line<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let mut bounded = (&mut *stream).take(MAX_LINE_BYTES);
    let read = timeout(IDLE_LIMIT, bounded.read_until(b'\n', &mut line)).await??;
    Ok((read > 0 && line.ends_with(b"\n")).then_some(line))
}

/// The mail up to the line that is only a dot, without the dots that the client added at the start of lines (RFC 5321,
/// 4.5.2). `None` if the client has disconnected, or if the mail or one of its lines is too long.
async fn read_data<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<Vec<u8>>> {
    let mut data = Vec::new();
    while let Some(line) = read_raw_line(stream).await? {
        if line == b".\r\n" {
            return Ok(Some(data));
        }
        if data.len() + line.len() > MAX_MAIL_BYTES {
            return Ok(None);
        }
        data.extend_from_slice(line.strip_prefix(b".").unwrap_or(&line));
    }
    Ok(None)
}
