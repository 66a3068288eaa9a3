//! A connection to a relay: TCP to an IP address that was resolved before, TLS for the configured name, and a limit on
//! the bytes that the peer can send.

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

use super::send_error::{SendError, Stage};
use crate::outbound::tls_roots::TlsRoots;

/// The maximum number of bytes that a peer can send on one connection. lettre reads lines of any length, and the peer
/// is untrusted. The responses to fifty mails need a hundredth of this limit.
const MAX_READ_BYTES: usize = 1024 * 1024;
/// Timeout per IP address. It leaves time for the next IP address if one does not respond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// Adapts a byte stream to lettre.
struct RelayStream<T> {
    stream: T,
    peer: SocketAddr,
    /// The greeting, if [`starttls`] has already read it from `stream`. Otherwise empty. lettre reads these bytes
    /// before the bytes of `stream`.
    greeting: io::Cursor<Vec<u8>>,
}

/// A stream that fails when the peer has sent more bytes than its limit.
struct LimitedStream {
    stream: TcpStream,
    remaining_bytes: usize,
}

/// Connects to the first IP address that accepts the connection.
pub(super) async fn connect(addresses: &[SocketAddr]) -> Result<(TcpStream, SocketAddr), SendError> {
    for address in addresses {
        if let Ok(Ok(stream)) = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            // TCP_NODELAY, because commands are short, and the next command waits for the response to the previous one.
            let _ = stream.set_nodelay(true);
            return Ok((stream, *address));
        }
    }
    Err(SendError::Unreachable)
}

/// Opens an SMTP session, with TLS if configured. With STARTTLS, only the greeting, EHLO and STARTTLS are sent in
/// plaintext.
pub(super) async fn open(
    stream: TcpStream,
    peer: SocketAddr,
    host: &str,
    tls: SmtpTls,
    hello: &ClientId,
    trust: &TlsRoots,
) -> Result<AsyncSmtpConnection, SendError> {
    let stream = LimitedStream { stream, remaining_bytes: MAX_READ_BYTES };
    let stream: Box<dyn AsyncTokioStream> = match tls {
        SmtpTls::None => Box::new(RelayStream::new(stream, peer, Vec::new())),
        SmtpTls::Implicit => Box::new(RelayStream::new(tls_handshake(stream, host, trust).await?, peer, Vec::new())),
        SmtpTls::Starttls => {
            let (stream, greeting) = starttls(stream, hello).await?;
            Box::new(RelayStream::new(tls_handshake(stream, host, trust).await?, peer, greeting))
        }
    };
    AsyncSmtpConnection::connect_with_transport(stream, hello)
        .await
        .map_err(|error| SendError::from_smtp(Stage::Greeting, &error))
}

/// Negotiates STARTTLS (RFC 3207). Also returns the relay's greeting, because lettre expects a greeting, and the relay
/// sends no second greeting after STARTTLS.
async fn starttls(stream: LimitedStream, hello: &ClientId) -> Result<(LimitedStream, Vec<u8>), SendError> {
    let mut stream = BufReader::new(stream);
    let greeting = read_reply(&mut stream, Stage::Greeting).await?;
    send_line(&mut stream, &format!("EHLO {hello}\r\n")).await?;
    let extensions = read_reply(&mut stream, Stage::Greeting).await?;
    let is_starttls = |line: &str| line.get(4..).is_some_and(|word| word.trim().eq_ignore_ascii_case("STARTTLS"));
    if !String::from_utf8_lossy(&extensions).lines().any(is_starttls) {
        return Err(SendError::NoStarttls);
    }
    send_line(&mut stream, "STARTTLS\r\n").await?;
    read_reply(&mut stream, Stage::Tls).await?;
    // Plaintext after this response must not be treated as a response inside TLS.
    if !stream.buffer().is_empty() {
        return Err(SendError::InvalidReply(Stage::Tls));
    }
    Ok((stream.into_inner(), greeting))
}

async fn send_line(stream: &mut BufReader<LimitedStream>, line: &str) -> Result<(), SendError> {
    stream.write_all(line.as_bytes()).await.map_err(|_| SendError::ConnectionClosed(Stage::Greeting))?;
    stream.flush().await.map_err(|_| SendError::ConnectionClosed(Stage::Greeting))
}

/// Reads one positive response, which can have several lines (RFC 5321, section 4.2).
async fn read_reply(stream: &mut BufReader<LimitedStream>, stage: Stage) -> Result<Vec<u8>, SendError> {
    let mut reply = Vec::new();
    loop {
        let start = reply.len();
        stream.read_until(b'\n', &mut reply).await.map_err(|_| SendError::ConnectionClosed(stage))?;
        let line = &reply[start..];
        if line.last() != Some(&b'\n') {
            return Err(SendError::ConnectionClosed(stage));
        }
        let code =
            line.get(..3).and_then(|code| std::str::from_utf8(code).ok()).and_then(|code| code.parse::<u16>().ok());
        match (code, line.get(3)) {
            (Some(200..400), Some(b'-')) => {}
            (Some(200..400), Some(_)) => return Ok(reply),
            (Some(code @ 400..600), _) => return Err(SendError::Rejected { stage, code }),
            (Some(_) | None, _) => return Err(SendError::InvalidReply(stage)),
        }
    }
}

async fn tls_handshake(
    stream: LimitedStream,
    host: &str,
    trust: &TlsRoots,
) -> Result<tokio_rustls::client::TlsStream<LimitedStream>, SendError> {
    let name = ServerName::try_from(host.to_owned()).map_err(|_| SendError::Tls)?;
    let config = trust.tls_config().await.map_err(|_| SendError::Tls)?;
    TlsConnector::from(config).connect(name, stream).await.map_err(|_| SendError::Tls)
}

// === impl RelayStream ===

impl<T> RelayStream<T> {
    fn new(stream: T, peer: SocketAddr, greeting: Vec<u8>) -> Self {
        Self { stream, peer, greeting: io::Cursor::new(greeting) }
    }
}

impl<T> fmt::Debug for RelayStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RelayStream(…)")
    }
}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AsyncTokioStream for RelayStream<T> {
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for RelayStream<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.greeting).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RelayStream<T> {
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

// === impl LimitedStream ===

impl AsyncRead for LimitedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let read = buf.filled().len() - before;
        match self.remaining_bytes.checked_sub(read) {
            Some(remaining_bytes) => {
                self.remaining_bytes = remaining_bytes;
                Poll::Ready(Ok(()))
            }
            None => Poll::Ready(Err(io::Error::other("the peer sent too much"))),
        }
    }
}

impl AsyncWrite for LimitedStream {
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
