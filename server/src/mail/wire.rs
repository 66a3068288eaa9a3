//! A connection to a relay: TCP to the address that was judged, TLS to the name that was asked for, and a limit on what
//! the peer may say.

use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use latchkey_crds::rendered::SmtpTls;
use lettre::transport::smtp::{
    client::{AsyncSmtpConnection, AsyncTokioStream},
    extension::ClientId,
};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadBuf},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::relay::{SendError, Stage};
use crate::outbound::trust::Trust;

/// What a peer may send on one connection. lettre reads a line to its end however long it is, and this peer may be
/// anybody's; fifty mails need a hundredth of it.
const MOST_READ: usize = 1024 * 1024;
/// One of several addresses of a relay that answers nothing must leave time for the next.
const CONNECT: Duration = Duration::from_secs(4);

/// A byte stream as lettre wants it.
struct Wire<T> {
    stream: T,
    peer: SocketAddr,
    /// Read before the stream: the greeting, where it was taken from the stream already.
    greeting: io::Cursor<Vec<u8>>,
}

/// Ends with an error once the peer has said too much.
struct Bounded {
    stream: TcpStream,
    left: usize,
}

/// Connects to the first address that takes the connection.
pub(super) async fn connect(addresses: &[SocketAddr]) -> Result<(TcpStream, SocketAddr), SendError> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(CONNECT, TcpStream::connect(address)).await {
            // Commands are short and each waits for its answer.
            let _ = stream.set_nodelay(true);
            return Ok((stream, *address));
        }
    }
    Err(SendError::Unreachable)
}

/// Greets the relay, under TLS where that is asked for: then nothing but the greeting and STARTTLS is said in clear.
pub(super) async fn open(
    stream: TcpStream,
    peer: SocketAddr,
    host: &str,
    tls: SmtpTls,
    hello: &ClientId,
    trust: &Trust,
) -> Result<AsyncSmtpConnection, SendError> {
    let stream = Bounded { stream, left: MOST_READ };
    let stream: Box<dyn AsyncTokioStream> = match tls {
        SmtpTls::None => Box::new(Wire::new(stream, peer, Vec::new())),
        SmtpTls::Implicit => Box::new(Wire::new(secure(stream, host, trust).await?, peer, Vec::new())),
        SmtpTls::Starttls => {
            let (stream, greeting) = starttls(stream, hello).await?;
            Box::new(Wire::new(secure(stream, host, trust).await?, peer, greeting))
        }
    };
    AsyncSmtpConnection::connect_with_transport(stream, hello)
        .await
        .map_err(|error| SendError::at(Stage::Greeting, &error))
}

/// RFC 3207. Answers the greeting too, since lettre reads one first and after STARTTLS there is none.
async fn starttls(stream: Bounded, hello: &ClientId) -> Result<(Bounded, Vec<u8>), SendError> {
    let mut stream = BufReader::new(stream);
    let greeting = reply(&mut stream, Stage::Greeting).await?;
    let offers = {
        say(&mut stream, &format!("EHLO {hello}\r\n")).await?;
        reply(&mut stream, Stage::Greeting).await?
    };
    let offered = |line: &str| line.get(4..).is_some_and(|word| word.trim().eq_ignore_ascii_case("STARTTLS"));
    if !String::from_utf8_lossy(&offers).lines().any(offered) {
        return Err(SendError::NoStarttls);
    }
    say(&mut stream, "STARTTLS\r\n").await?;
    reply(&mut stream, Stage::Tls).await?;
    // What was sent in clear behind the answer must not be taken for an answer under TLS.
    if !stream.buffer().is_empty() {
        return Err(SendError::NotSmtp(Stage::Tls));
    }
    Ok((stream.into_inner(), greeting))
}

async fn say(stream: &mut BufReader<Bounded>, line: &str) -> Result<(), SendError> {
    stream.write_all(line.as_bytes()).await.map_err(|_| SendError::Broken(Stage::Greeting))?;
    stream.flush().await.map_err(|_| SendError::Broken(Stage::Greeting))
}

/// One positive answer, of as many lines as it has (RFC 5321, 4.2).
async fn reply(stream: &mut BufReader<Bounded>, stage: Stage) -> Result<Vec<u8>, SendError> {
    let mut answer = Vec::new();
    loop {
        let start = answer.len();
        stream.read_until(b'\n', &mut answer).await.map_err(|_| SendError::Broken(stage))?;
        let line = &answer[start..];
        if line.last() != Some(&b'\n') {
            return Err(SendError::Broken(stage));
        }
        let code =
            line.get(..3).and_then(|code| std::str::from_utf8(code).ok()).and_then(|code| code.parse::<u16>().ok());
        match (code, line.get(3)) {
            (Some(200..400), Some(b'-')) => {}
            (Some(200..400), Some(_)) => return Ok(answer),
            (Some(code @ 400..600), _) => return Err(SendError::Refused { stage, code }),
            (Some(_) | None, _) => return Err(SendError::NotSmtp(stage)),
        }
    }
}

async fn secure(
    stream: Bounded,
    host: &str,
    trust: &Trust,
) -> Result<tokio_rustls::client::TlsStream<Bounded>, SendError> {
    let name = ServerName::try_from(host.to_owned()).map_err(|_| SendError::Tls)?;
    let config = trust.config().await.map_err(|_| SendError::Tls)?;
    TlsConnector::from(config).connect(name, stream).await.map_err(|_| SendError::Tls)
}

// === impl Wire ===

impl<T> Wire<T> {
    fn new(stream: T, peer: SocketAddr, greeting: Vec<u8>) -> Self {
        Self { stream, peer, greeting: io::Cursor::new(greeting) }
    }
}

impl<T> fmt::Debug for Wire<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wire(…)")
    }
}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AsyncTokioStream for Wire<T> {
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Wire<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.greeting).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Wire<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

// === impl Bounded ===

impl AsyncRead for Bounded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let read = buf.filled().len() - before;
        match self.left.checked_sub(read) {
            Some(left) => {
                self.left = left;
                Poll::Ready(Ok(()))
            }
            None => Poll::Ready(Err(io::Error::other("the peer said too much"))),
        }
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
