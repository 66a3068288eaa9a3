//! The HTTP client for the import endpoint of the administration API.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderMap, Request, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER},
};
use http_body_util::{BodyExt, Collected, Full, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{
    net::TcpStream,
    runtime::Runtime,
    time::{sleep, timeout},
};
use url::{Position, Url};

use crate::error::ImportError;

/// Timeout for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for one attempt, from the connection to the end of the response.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of a response, in bytes. Even a response with 1,000 results that report every field as invalid is
/// smaller.
const MAX_RESPONSE_BYTES: usize = 4 * 1024 * 1024;
/// Maximum size of a token file, in bytes. Tokens of ServiceAccounts have one or two kilobytes.
const MAX_TOKEN_BYTES: usize = 16 * 1024;

/// How often, and after which delays, an attempt is repeated. Batches can be repeated safely, so every temporary
/// failure is retried.
#[derive(Clone, Copy)]
pub(crate) struct Retries {
    pub attempts: u32,
    /// Delay before the second attempt. It doubles with each attempt.
    pub first_delay: Duration,
    pub max_delay: Duration,
    /// A longer `Retry-After` is shortened to this time.
    pub max_retry_after: Duration,
}

/// The delays add up to about two minutes, which is longer than a restart of all servers.
pub(crate) const RETRIES: Retries = Retries {
    attempts: 10,
    first_delay: Duration::from_millis(500),
    max_delay: Duration::from_secs(30),
    max_retry_after: Duration::from_secs(300),
};

/// The token of a ServiceAccount. It cannot be printed.
struct Token(String);

/// Sends batches, one at a time.
pub(crate) struct Client {
    runtime: Runtime,
    host: String,
    port: u16,
    /// `HOST:PORT` for the header Host.
    authority: String,
    /// Path and query of every request.
    target: String,
    token_file: PathBuf,
    token: Token,
    retries: Retries,
}

/// The response to one batch.
#[derive(Debug, Deserialize)]
pub(crate) struct BatchResponse {
    pub results: Vec<LineResult>,
    #[serde(default)]
    pub ignored_fields: std::collections::BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct LineResult {
    /// Number of the line in the batch, from 1.
    pub line: usize,
    pub outcome: LineOutcome,
    #[serde(default)]
    pub error: Option<String>,
    #[serde(default)]
    pub fields: Vec<FieldError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LineOutcome {
    Created,
    Unchanged,
    Refused,
}

#[derive(Debug, Deserialize)]
pub(crate) struct FieldError {
    pub field: String,
    pub code: String,
}

/// Why an attempt failed.
enum Failure {
    /// The attempt can succeed later.
    Temporary {
        reason: String,
        retry_after: Option<Duration>,
    },
    Unauthorized,
    Final(ImportError),
}

// === impl Token ===

impl Token {
    fn read(path: &Path) -> Result<Self, ImportError> {
        let name = || path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| ImportError::TokenFile { name: name(), error })?;
        let token = text.trim();
        let is_token =
            !token.is_empty() && token.len() <= MAX_TOKEN_BYTES && token.bytes().all(|byte| byte.is_ascii_graphic());
        if is_token { Ok(Self(token.to_owned())) } else { Err(ImportError::NoToken { name: name() }) }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

// === impl Client ===

impl Client {
    pub(crate) fn new(
        server: &Url,
        app: &str,
        source: &str,
        dry_run: bool,
        token_file: &Path,
        retries: Retries,
    ) -> Result<Self, ImportError> {
        let host = server.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let base = server.path().trim_end_matches('/');
        let dry_run = if dry_run { "&dry_run=true" } else { "" };
        Ok(Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ImportError::Start)?,
            host,
            port: server.port_or_known_default().unwrap_or(80),
            authority: server[Position::BeforeHost..Position::AfterPort].to_owned(),
            target: format!("{base}/v1/{app}/imports?source={source}{dry_run}"),
            token_file: token_file.to_owned(),
            token: Token::read(token_file)?,
            retries,
        })
    }

    /// Checks that the caller can import into the App, before the input is read. Sends an empty batch, because a server
    /// can close the connection after a refusal, and then the response to a large request can be lost.
    pub(crate) fn check(&mut self) -> Result<(), ImportError> {
        self.send(&Bytes::new()).map(|_| ())
    }

    /// Sends a batch. Repeats it after temporary failures.
    pub(crate) fn send(&mut self, batch: &Bytes) -> Result<BatchResponse, ImportError> {
        let mut delay = self.retries.first_delay;
        let mut has_reread_token = false;
        let mut attempt = 1;
        loop {
            let result = self.runtime.block_on(async {
                timeout(ATTEMPT_TIMEOUT, self.attempt(batch.clone()))
                    .await
                    .unwrap_or_else(|_| Err(Failure::temporary("no response within two minutes")))
            });
            let (reason, retry_after) = match result {
                Ok(response) => return Ok(response),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Unauthorized) if has_reread_token => return Err(ImportError::Unauthorized),
                Err(Failure::Unauthorized) => {
                    // The kubelet may have written a newer token to the file.
                    self.token = Token::read(&self.token_file)?;
                    has_reread_token = true;
                    continue;
                }
                Err(Failure::Temporary { reason, retry_after }) => (reason, retry_after),
            };
            // Reads the token again before the next attempt: if a response was lost, it could have been a 401.
            if let Ok(token) = Token::read(&self.token_file) {
                self.token = token;
            }
            if attempt == self.retries.attempts {
                return Err(ImportError::Unavailable { attempts: attempt, last: reason });
            }
            attempt += 1;
            let wait = retry_after.map_or(delay, |wait| wait.min(self.retries.max_retry_after).max(delay));
            self.runtime.block_on(async { sleep(wait).await });
            delay = (delay * 2).min(self.retries.max_delay);
        }
    }

    async fn attempt(&self, batch: Bytes) -> Result<BatchResponse, Failure> {
        let connect = timeout(CONNECT_TIMEOUT, TcpStream::connect((self.host.as_str(), self.port)));
        let stream = connect.await.map_err(|_| Failure::temporary("no connection within ten seconds"))?;
        let stream = stream.map_err(|error| Failure::temporary(&format!("no connection: {error}")))?;
        let network = |error: hyper::Error| Failure::temporary(&format!("the connection broke: {error}"));
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(network)?;
        // The task ends when the sender is dropped. Errors of the connection appear in the result of the request.
        tokio::spawn(connection);
        let mut authorization = http::HeaderValue::from_str(&format!("Bearer {}", self.token.0))
            .map_err(|_| Failure::Final(ImportError::NoToken { name: self.token_file.display().to_string() }))?;
        authorization.set_sensitive(true);
        let request = Request::post(&self.target)
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/x-ndjson")
            .header(AUTHORIZATION, authorization)
            .body(Full::new(batch))
            .map_err(|error| Failure::Final(ImportError::Usage(format!("--server: {error}"))))?;
        let response = sender.send_request(request).await.map_err(network)?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await.map(Collected::to_bytes);
        if let Some(failure) = status_failure(head.status, &head.headers, body.as_deref().ok()) {
            return Err(failure);
        }
        let body = match body {
            Ok(body) => body,
            Err(error) if error.is::<LengthLimitError>() => return Err(Failure::Final(ImportError::BadResponse)),
            Err(_) => return Err(Failure::temporary("the response broke off")),
        };
        serde_json::from_slice(&body).map_err(|_| Failure::Final(ImportError::BadResponse))
    }
}

// === impl Failure ===

impl Failure {
    fn temporary(reason: &str) -> Self {
        Self::Temporary { reason: reason.to_owned(), retry_after: None }
    }
}

fn status_failure(status: StatusCode, headers: &HeaderMap, body: Option<&[u8]>) -> Option<Failure> {
    if status == StatusCode::OK {
        return None;
    }
    let code = body.and_then(error_code).unwrap_or_default();
    Some(match status {
        StatusCode::UNAUTHORIZED => Failure::Unauthorized,
        StatusCode::FORBIDDEN => Failure::Final(ImportError::Forbidden),
        StatusCode::NOT_FOUND => Failure::Final(ImportError::UnknownApp),
        // 408: the connection was too slow or stalled.
        status
            if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
                || status.is_server_error() =>
        {
            let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
            let reason = format!("{} {code}", status.as_u16());
            Failure::Temporary { reason: reason.trim_end().to_owned(), retry_after: seconds.map(Duration::from_secs) }
        }
        status => Failure::Final(ImportError::Rejected { status: status.as_u16(), code }),
    })
}

/// The error code of an error response. Other text of the response is not printed.
fn error_code(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct ErrorBody {
        error: String,
    }
    let ErrorBody { error } = serde_json::from_slice(body).ok()?;
    is_code(&error).then_some(error)
}

/// Whether a text from the server is a code such as `email_taken`, which can be printed.
pub(crate) fn is_code(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use std::{io::Write, net::TcpListener, time::Instant};

    use super::*;

    const FAST: Retries = Retries {
        attempts: 4,
        first_delay: Duration::from_millis(20),
        max_delay: Duration::from_millis(40),
        max_retry_after: Duration::from_secs(1),
    };

    fn client(port: u16, retries: Retries) -> Client {
        let mut token = tempfile::NamedTempFile::new().unwrap();
        token.write_all(b"header.claims.signature\n").unwrap();
        let server = Url::parse(&format!("http://127.0.0.1:{port}/base/")).unwrap();
        let client = Client::new(&server, "shop", "ndjson", true, token.path(), retries).unwrap();
        assert_eq!(client.target, "/base/v1/shop/imports?source=ndjson&dry_run=true");
        client
    }

    #[test]
    fn attempts_end_after_a_limit() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut client = client(port, FAST);
        let began = Instant::now();
        let error = client.send(&Bytes::from_static(b"{}\n")).unwrap_err().to_string();
        assert!(error.starts_with("4 attempts failed, the last one with: no connection"), "{error}");
        assert!(began.elapsed() >= Duration::from_millis(20 + 40 + 40));
    }

    #[test]
    fn only_the_error_code_of_a_response_is_printed() {
        assert_eq!(error_code(br#"{"error":"not_ready"}"#).as_deref(), Some("not_ready"));
        assert_eq!(error_code(br#"{"error":"$2a$10$secret"}"#), None);
        assert_eq!(error_code(b"<html>"), None);
    }

    #[test]
    fn a_token_file_has_one_token_that_is_never_printed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        for bad in ["", " \n", "two tokens", "é", &"x".repeat(MAX_TOKEN_BYTES + 1)] {
            fs::write(&path, bad).unwrap();
            assert!(matches!(Token::read(&path), Err(ImportError::NoToken { .. })));
        }
        assert!(matches!(Token::read(folder.path()), Err(ImportError::TokenFile { .. })));
        fs::write(&path, " secret\n").unwrap();
        let token = Token::read(&path).unwrap();
        assert_eq!((token.0.as_str(), format!("{token:?}").as_str()), ("secret", "Token(…)"));
    }
}
