//! One persistent HTTP/1.1 connection without an HTTP library: for exact measurements, and for many concurrent clients
//! at low cost.

use std::{
    io::{Error, ErrorKind, Read, Result, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use tokio::net::TcpSocket;

/// Timeout of a read or write. Every response arrives earlier.
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of a response. Latchkey's responses are a few kilobytes.
const MAX_RESPONSE_BYTES: usize = 256 * 1024;

/// A connection. Requests block the thread.
pub struct RawConnection {
    stream: TcpStream,
    server: SocketAddr,
    buffer: Vec<u8>,
}

/// A response, and the time from the first sent byte to the last received byte.
#[derive(Clone, Debug)]
pub struct RawResponse {
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    pub body: String,
    pub took: Duration,
}

// === impl RawConnection ===

impl RawConnection {
    /// Connects from the client address `from`.
    pub async fn connect(server: SocketAddr, from: IpAddr) -> Result<Self> {
        // The standard library cannot connect from a chosen client address.
        let socket = if from.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(from, 0))?;
        let stream = socket.connect(server).await?.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        stream.set_write_timeout(Some(IO_TIMEOUT))?;
        Ok(Self { stream, server, buffer: Vec::with_capacity(16 * 1024) })
    }

    /// Sends a POST request with JSON and reads the whole response.
    pub fn post(&mut self, path: &str, body: &str) -> Result<RawResponse> {
        self.post_with(path, "Content-Type: application/json\r\n", body)
    }

    /// Like [`Self::post`], but with an access token.
    pub fn post_as(&mut self, token: &str, path: &str, body: &str) -> Result<RawResponse> {
        let headers = format!("Content-Type: application/json\r\nAuthorization: Bearer {token}\r\n");
        self.post_with(path, &headers, body)
    }

    /// Sends a form with cookies and reads the whole response.
    pub fn post_form(&mut self, path: &str, cookies: &str, body: &str) -> Result<RawResponse> {
        let headers = format!("Content-Type: application/x-www-form-urlencoded\r\nCookie: {cookies}\r\n");
        self.post_with(path, &headers, body)
    }

    fn post_with(&mut self, path: &str, headers: &str, body: &str) -> Result<RawResponse> {
        let path = path.trim_start_matches('/');
        let request = format!(
            "POST /{path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n{headers}\r\n{body}",
            self.server,
            body.len()
        );
        self.exchange(&request)
    }

    pub fn get(&mut self, path: &str) -> Result<RawResponse> {
        self.exchange(&format!("GET /{} HTTP/1.1\r\nHost: {}\r\n\r\n", path.trim_start_matches('/'), self.server))
    }

    fn exchange(&mut self, request: &str) -> Result<RawResponse> {
        let started = Instant::now();
        self.stream.write_all(request.as_bytes())?;
        self.buffer.clear();
        let mut chunk = [0; 16 * 1024];
        loop {
            let read = self.stream.read(&mut chunk)?;
            let took = started.elapsed();
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.buffer.extend_from_slice(&chunk[..read]);
            if let Some(reply) = parse(&self.buffer, took)? {
                return Ok(reply);
            }
            if self.buffer.len() > MAX_RESPONSE_BYTES {
                return Err(Error::new(ErrorKind::InvalidData, "a response that is too long"));
            }
        }
    }
}

// === impl RawResponse ===

impl RawResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// The response, if it is complete.
fn parse(bytes: &[u8], took: Duration) -> Result<Option<RawResponse>> {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let bad = |what: &str| Error::new(ErrorKind::InvalidData, what.to_owned());
    let head = String::from_utf8(bytes[..end].to_vec()).map_err(|_| bad("a head that is not text"))?;
    let status = head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let status = status.ok_or_else(|| bad("no status"))?;
    let mut reply = RawResponse { status, head, body: String::new(), took };
    let length = reply.header("content-length").and_then(|length| length.parse().ok());
    let length: usize = length.ok_or_else(|| bad("a response without a length"))?;
    let Some(body) = bytes.get(end + 4..end + 4 + length) else { return Ok(None) };
    reply.body = String::from_utf8_lossy(body).into_owned();
    Ok(Some(reply))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_read_to_its_end() {
        let response = b"HTTP/1.1 401 Unauthorized\r\nX-Request-Id: a\r\nContent-Length: 2\r\n\r\n{}";
        for cut in 0..response.len() {
            assert!(parse(&response[..cut], Duration::ZERO).unwrap().is_none(), "{cut} bytes");
        }
        let reply = parse(response, Duration::ZERO).unwrap().unwrap();
        assert_eq!((reply.status, reply.body.as_str()), (401, "{}"));
        assert_eq!(reply.header("x-request-id"), Some("a"));
        assert_eq!(reply.header("status"), None);
        parse(b"HTTP/1.1 200 OK\r\n\r\n", Duration::ZERO).unwrap_err();
    }
}
