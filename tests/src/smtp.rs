//! An SMTP server (RFC 5321) that keeps what it is sent and misbehaves on request: the relay of tests and of
//! `make run`.

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

use crate::{mail::Mailbox, process, tls::Tls};

/// RFC 5321, 4.5.3.1.6 asks for 998 octets at least in a line of text; this only bounds memory.
const LINE_MAX: u64 = 64 * 1024;
/// A mail of ours is a few kilobytes.
const MAIL_MAX: usize = 4 * 1024 * 1024;
/// A client that says nothing for so long is gone (RFC 5321, 4.5.3.2.7 says five minutes).
const IDLE_LIMIT: Duration = Duration::from_secs(300);

/// How a session is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    None,
    /// TLS has to be asked for before anything else.
    StartTls,
    /// TLS from the first byte (RFC 8314).
    Implicit,
}

/// The steps of a session at which it can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Connect,
    Auth,
    MailFrom,
    RcptTo,
    Data,
    /// After the mail's last line, when it would be accepted.
    EndOfData,
}

/// What the server does with those who come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behaviour {
    Accept,
    /// Answers that step with a code (421, 450, 550 …) and a text.
    Refuse(Step, u16, String),
    /// Refuses one recipient and takes the others.
    RefuseRecipient(String, u16),
    /// Says nothing more from that step on and keeps the connection.
    Hang(Step),
    /// Cuts the connection at that step. At `EndOfData` the mail has been accepted, only the answer is lost.
    Cut(Step),
}

/// How to run one.
pub struct Options {
    pub addr: SocketAddr,
    pub security: Security,
    /// Demands AUTH with this name and password.
    pub login: Option<(String, String)>,
    pub mails: Mailbox,
}

/// A running server. It ends when this value is dropped.
pub struct Smtp {
    addr: SocketAddr,
    tls: Option<Tls>,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    security: Security,
    login: Option<(String, String)>,
    acceptor: Option<TlsAcceptor>,
    mails: Mailbox,
    behaviour: Mutex<Behaviour>,
    /// Raised to end every session that is open.
    epoch: watch::Sender<u64>,
    sessions: AtomicUsize,
    logins: AtomicUsize,
    open: AtomicUsize,
}

/// Where a session stands.
struct Session<'a> {
    shared: &'a Shared,
    secured: bool,
    authenticated: bool,
    greeted: bool,
    from: Option<String>,
    to: Vec<String>,
}

/// What follows a command.
enum Next {
    Reply(String),
    StartTls,
    /// AUTH goes on with what the client answers to this challenge.
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

enum Ended {
    Done,
    /// The client asked for TLS and was told to begin.
    Upgrade,
}

// === impl Options ===

impl Options {
    /// On a free port, without TLS and login.
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
            Security::StartTls | Security::Implicit => Some(Tls::new()?),
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
            behaviour: Mutex::new(Behaviour::Accept),
            epoch: watch::Sender::new(0),
            sessions: AtomicUsize::new(0),
            logins: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        });
        let addr = match options.addr.port() {
            0 => SocketAddr::new(options.addr.ip(), process::free_port()),
            _ => options.addr,
        };
        let this = Self { addr, tls, shared, accepting: Mutex::new(None) };
        this.up().context("the SMTP server")?;
        Ok(this)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The authority to trust, PEM.
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

    pub fn behave(&self, behaviour: Behaviour) {
        *process::lock(&self.shared.behaviour) = behaviour;
    }

    /// Sessions begun so far.
    pub fn sessions(&self) -> usize {
        self.shared.sessions.load(Ordering::Relaxed)
    }

    /// Sessions open now.
    pub fn open_sessions(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// Times that AUTH succeeded.
    pub fn logins(&self) -> usize {
        self.shared.logins.load(Ordering::Relaxed)
    }

    /// Closes the port and every session.
    pub async fn down(&self) {
        let accepting = process::lock(&self.accepting).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            // The port is closed when the task is gone.
            drop(accepting.await);
        }
        self.shared.epoch.send_modify(|epoch| *epoch += 1);
    }

    /// Opens the port again.
    pub fn up(&self) -> io::Result<()> {
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
        self.shared.epoch.send_modify(|epoch| *epoch += 1);
    }
}

/// A port that can be opened again while old connections linger.
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
        self.open.fetch_add(1, Ordering::Relaxed);
        let mut epoch = self.epoch.subscribe();
        tokio::select! {
            // A session that breaks is the client's to tell of.
            _ = self.session(stream) => {}
            _ = epoch.changed() => {}
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    async fn session(&self, stream: TcpStream) -> io::Result<()> {
        match (&self.acceptor, self.security) {
            (Some(acceptor), Security::Implicit) => {
                let mut stream = BufReader::new(acceptor.accept(stream).await?);
                Session::new(self, true).run(&mut stream, true).await?;
            }
            (Some(acceptor), Security::StartTls) => {
                let mut plain = BufReader::new(stream);
                if let Ended::Upgrade = Session::new(self, false).run(&mut plain, true).await? {
                    // What the client sent before the handshake is not to be believed (RFC 3207, 6): it goes with the
                    // buffer.
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

    /// What is to happen at a step instead of what should.
    fn fault(&self, step: Step) -> Option<Next> {
        match &*process::lock(&self.behaviour) {
            Behaviour::Refuse(at, 421, text) if *at == step => Some(Next::Close(format!("421 {text}"))),
            Behaviour::Refuse(at, code, text) if *at == step => Some(Next::Reply(format!("{code} {text}"))),
            Behaviour::Hang(at) if *at == step => Some(Next::Hang),
            Behaviour::Cut(at) if *at == step => Some(Next::Cut),
            Behaviour::Accept
            | Behaviour::Refuse(..)
            | Behaviour::RefuseRecipient(..)
            | Behaviour::Hang(_)
            | Behaviour::Cut(_) => None,
        }
    }

    fn refuses_recipient(&self, recipient: &str) -> Option<String> {
        if let Behaviour::RefuseRecipient(refused, code) = &*process::lock(&self.behaviour)
            && refused.eq_ignore_ascii_case(recipient)
        {
            return Some(format!("{code} no such mailbox"));
        }
        None
    }
}

// === impl Session ===

impl<'a> Session<'a> {
    fn new(shared: &'a Shared, secured: bool) -> Self {
        Self { shared, secured, authenticated: false, greeted: false, from: None, to: Vec::new() }
    }

    async fn run<S: AsyncRead + AsyncWrite + Unpin>(
        mut self,
        stream: &mut BufReader<S>,
        greet: bool,
    ) -> io::Result<Ended> {
        if greet {
            let next = self.shared.fault(Step::Connect).unwrap_or(Next::Reply("220 inbox ESMTP".to_owned()));
            let refused = matches!(&next, Next::Reply(reply) if !reply.starts_with("220"));
            if let Some(ended) = self.follow(stream, next).await? {
                return Ok(ended);
            }
            if refused {
                return Ok(Ended::Done);
            }
        }
        while let Some(line) = read_line(stream).await? {
            let next = self.command(&line);
            if let Some(ended) = self.follow(stream, next).await? {
                return Ok(ended);
            }
        }
        Ok(Ended::Done)
    }

    /// Does what follows; `Some` where the session is over.
    async fn follow<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut BufReader<S>,
        mut next: Next,
    ) -> io::Result<Option<Ended>> {
        loop {
            match next {
                Next::Reply(reply) => {
                    write_line(stream, &reply).await?;
                    return Ok(None);
                }
                Next::StartTls => {
                    write_line(stream, "220 go ahead").await?;
                    return Ok(Some(Ended::Upgrade));
                }
                Next::Challenge(challenge) => {
                    let asks = match &challenge {
                        Challenge::Plain => "334 ",
                        // "Username:" and "Password:", as every client of LOGIN expects.
                        Challenge::LoginName => "334 VXNlcm5hbWU6",
                        Challenge::LoginPassword(_) => "334 UGFzc3dvcmQ6",
                    };
                    write_line(stream, asks).await?;
                    let Some(answer) = read_line(stream).await? else { return Ok(Some(Ended::Done)) };
                    next = self.answer(challenge, &answer);
                }
                Next::ReadData => {
                    write_line(stream, "354 end with a line that is a dot").await?;
                    let Some(data) = read_data(stream).await? else { return Ok(Some(Ended::Done)) };
                    next = self.end_of_data(&data);
                }
                Next::Close(reply) => {
                    write_line(stream, &reply).await?;
                    return Ok(Some(Ended::Done));
                }
                Next::Cut => return Ok(Some(Ended::Done)),
                Next::Hang => std::future::pending().await,
            }
        }
    }

    fn command(&mut self, line: &str) -> Next {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let reply = |text: &str| Next::Reply(text.to_owned());
        match verb.to_ascii_uppercase().as_str() {
            "EHLO" => {
                self.reset();
                self.greeted = true;
                Next::Reply(self.capabilities())
            }
            "HELO" => {
                self.reset();
                self.greeted = true;
                reply("250 inbox")
            }
            "NOOP" => reply("250 ok"),
            "RSET" => {
                self.reset();
                reply("250 ok")
            }
            "QUIT" => Next::Close("221 bye".to_owned()),
            "VRFY" => reply("252 send some mail and see"),
            "STARTTLS" if self.shared.security == Security::StartTls && !self.secured => Next::StartTls,
            "AUTH" | "MAIL" | "RCPT" | "DATA" if !self.greeted => reply("503 greet first"),
            "AUTH" | "MAIL" if self.must_secure() => reply("530 5.7.0 STARTTLS first"),
            "AUTH" => self.auth(rest),
            "MAIL" if self.shared.login.is_some() && !self.authenticated => reply("530 5.7.0 log in first"),
            "MAIL" => self.mail(rest),
            "RCPT" => self.rcpt(rest),
            "DATA" if self.to.is_empty() => reply("503 to whom?"),
            "DATA" => self.shared.fault(Step::Data).unwrap_or(Next::ReadData),
            _ => reply("500 unknown command"),
        }
    }

    fn must_secure(&self) -> bool {
        self.shared.security == Security::StartTls && !self.secured
    }

    fn capabilities(&self) -> String {
        let mut lines = vec!["inbox", "8BITMIME", "SMTPUTF8"];
        if self.must_secure() {
            lines.push("STARTTLS");
        } else if self.shared.login.is_some() {
            lines.push("AUTH PLAIN LOGIN");
        }
        lines.push("ENHANCEDSTATUSCODES");
        let last = lines.len() - 1;
        let marked =
            lines.iter().enumerate().map(|(at, line)| format!("250{}{line}", if at < last { '-' } else { ' ' }));
        marked.collect::<Vec<_>>().join("\r\n")
    }

    fn auth(&mut self, rest: &str) -> Next {
        if self.shared.login.is_none() {
            return Next::Reply("502 no AUTH here".to_owned());
        }
        let (mechanism, initial) = rest.split_once(' ').unwrap_or((rest, ""));
        match (mechanism.to_ascii_uppercase().as_str(), initial) {
            ("PLAIN", "") => Next::Challenge(Challenge::Plain),
            ("PLAIN", initial) => self.answer(Challenge::Plain, initial),
            ("LOGIN", "") => Next::Challenge(Challenge::LoginName),
            ("LOGIN", initial) => self.answer(Challenge::LoginName, initial),
            _ => Next::Reply("504 5.5.4 PLAIN or LOGIN".to_owned()),
        }
    }

    fn answer(&mut self, challenge: Challenge, answer: &str) -> Next {
        let decoded = BASE64_STANDARD.decode(answer.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let Some(decoded) = decoded else { return Next::Reply("501 5.5.2 not base64".to_owned()) };
        match challenge {
            // RFC 4616: authorization id, name and password, apart by NUL.
            Challenge::Plain => {
                let mut parts = decoded.split('\0').skip(1);
                let (name, password) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                self.log_in(name, password)
            }
            Challenge::LoginName => Next::Challenge(Challenge::LoginPassword(decoded)),
            Challenge::LoginPassword(name) => self.log_in(&name, &decoded),
        }
    }

    fn log_in(&mut self, name: &str, password: &str) -> Next {
        if let Some(fault) = self.shared.fault(Step::Auth) {
            return fault;
        }
        let right = self.shared.login.as_ref().is_some_and(|(n, p)| n == name && p == password);
        if !right {
            return Next::Reply("535 5.7.8 wrong name or password".to_owned());
        }
        self.authenticated = true;
        self.shared.logins.fetch_add(1, Ordering::Relaxed);
        Next::Reply("235 2.7.0 welcome".to_owned())
    }

    fn mail(&mut self, rest: &str) -> Next {
        let Some(path) = path_after("FROM:", rest) else { return Next::Reply("501 5.5.4 MAIL FROM:<…>".to_owned()) };
        if let Some(fault) = self.shared.fault(Step::MailFrom) {
            return fault;
        }
        self.reset();
        self.from = Some(path.to_owned());
        Next::Reply("250 2.1.0 ok".to_owned())
    }

    fn rcpt(&mut self, rest: &str) -> Next {
        let Some(path) = path_after("TO:", rest).filter(|path| !path.is_empty()) else {
            return Next::Reply("501 5.5.4 RCPT TO:<…>".to_owned());
        };
        if self.from.is_none() {
            return Next::Reply("503 5.5.1 from whom?".to_owned());
        }
        if let Some(fault) = self.shared.fault(Step::RcptTo) {
            return fault;
        }
        if let Some(refusal) = self.shared.refuses_recipient(path) {
            return Next::Reply(refusal);
        }
        self.to.push(path.to_owned());
        Next::Reply("250 2.1.5 ok".to_owned())
    }

    fn end_of_data(&mut self, data: &[u8]) -> Next {
        let fault = self.shared.fault(Step::EndOfData);
        let accepted = match &fault {
            None | Some(Next::Cut) => true,
            Some(_) => false,
        };
        let (from, to) = (self.from.take().unwrap_or_default(), std::mem::take(&mut self.to));
        if accepted && let Err(error) = self.shared.mails.deliver(&from, &to, data) {
            return Next::Reply(format!("554 5.6.0 {error}"));
        }
        fault.unwrap_or(Next::Reply("250 2.0.0 kept".to_owned()))
    }

    fn reset(&mut self) {
        self.from = None;
        self.to.clear();
    }
}

/// The path of `FROM:<path> PARAMETERS`; empty for the null path.
fn path_after<'a>(keyword: &str, rest: &'a str) -> Option<&'a str> {
    let head = rest.get(..keyword.len())?;
    if !head.eq_ignore_ascii_case(keyword) {
        return None;
    }
    let (path, _) = rest[keyword.len()..].trim_start().strip_prefix('<')?.split_once('>')?;
    Some(path)
}

async fn write_line<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut BufReader<S>, line: &str) -> io::Result<()> {
    stream.write_all(format!("{line}\r\n").as_bytes()).await?;
    stream.flush().await
}

/// A line without its end; `None` where the client is gone.
async fn read_line<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<String>> {
    let line = read_raw_line(stream).await?;
    Ok(line.map(|line| String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()))
}

async fn read_raw_line<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let mut bounded = (&mut *stream).take(LINE_MAX);
    let read = timeout(IDLE_LIMIT, bounded.read_until(b'\n', &mut line)).await??;
    Ok((read > 0 && line.ends_with(b"\n")).then_some(line))
}

/// The mail up to the line that is a dot, with the dots that the client put in front taken away (RFC 5321, 4.5.2).
async fn read_data<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> io::Result<Option<Vec<u8>>> {
    let mut data = Vec::new();
    while let Some(line) = read_raw_line(stream).await? {
        if line == b".\r\n" {
            return Ok(Some(data));
        }
        if data.len() + line.len() > MAIL_MAX {
            return Ok(None);
        }
        data.extend_from_slice(line.strip_prefix(b".").unwrap_or(&line));
    }
    Ok(None)
}
