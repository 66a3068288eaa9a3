//! Shared helpers: an App under test, its users and mails, raw requests, and a server's revision stream.

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{Method, StatusCode};
use latchkey_crds::rendered::{Hello, Revision, RevisionChange, RevisionsMessage};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    eventually,
    mail::Mail,
    passwords::PASSWORD,
    stack::{ServerProcess, Stack},
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// A mail arrives within one or two seconds; a loaded machine takes longer.
pub(crate) const MAIL_LIMIT: Duration = Duration::from_secs(30);
/// An edit takes effect within two seconds; a loaded machine takes longer.
pub(crate) const LIVE_LIMIT: Duration = Duration::from_secs(20);
/// Time limit for a response to a raw request. A server rejects an incomplete request in less time.
const RAW_LIMIT: Duration = Duration::from_secs(60);

pub(crate) const NAME: &str = "Ada Lovelace";

/// A well-formed code that no mail contains.
pub(crate) const WRONG_CODE: &str = "00000-00000";

/// A running service with one App, by default the App that [`app`] returns.
pub(crate) struct TestApp {
    pub(crate) stack: Stack,
    pub(crate) app: App,
}

/// The stream `revisions` on the operations port of a server.
pub(crate) struct RevisionStream {
    response: reqwest::Response,
    unread: Vec<u8>,
}

/// The claims of a JWT, without verification.
pub(crate) fn claims_of(token: &str) -> Value {
    let claims = token.split('.').nth(1).expect("a token is a JWT");
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).expect("claims are base64url");
    serde_json::from_slice(&claims).expect("claims are JSON")
}

/// An App with a mail limit per recipient that no test reaches.
pub(crate) fn app() -> App {
    App::new("shop").limit("mailsPerRecipient", &[(1000, 60)])
}

/// Sends bytes unchanged and reads until the server closes the connection.
pub(crate) async fn send_raw(server: SocketAddr, request: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(server).await.expect("the server accepts");
    // A server that responds early can close the connection before everything is written. Its response can still be
    // read.
    drop(stream.write_all(request.as_ref()).await);
    read_all(&mut stream).await
}

/// Reads from the connection until the server closes it.
pub(crate) async fn read_all(stream: &mut TcpStream) -> String {
    let mut response = Vec::new();
    let read = tokio::time::timeout(RAW_LIMIT, stream.read_to_end(&mut response)).await;
    drop(read.expect("the server responds or closes in time"));
    String::from_utf8_lossy(&response).into_owned()
}

/// The status of a raw response; `None` if the server closed the connection without a response.
pub(crate) fn status_of(raw: &str) -> Option<u16> {
    raw.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// The head of a POST request with JSON, without its end: the caller can add headers, and must add the empty line.
pub(crate) fn post_head(path: &str) -> String {
    format!("POST /{path} HTTP/1.1\r\nHost: latchkey.test\r\nContent-Type: application/json\r\nConnection: close\r\n")
}

/// The status, the header names and the body of a response, with placeholders for ids and times, so that responses can
/// be compared.
pub(crate) fn shape(response: &ApiResponse) -> Value {
    let mut headers: Vec<&str> = response.headers.keys().map(http::HeaderName::as_str).collect();
    headers.sort_unstable();
    let mut body = response.body.clone();
    for name in ["request_id", "local_id", "expires_at"] {
        if let Some(value) = body.get_mut(name) {
            assert!(value.is_string() || value.is_i64(), "{name} in {}", response.text);
            *value = "…".into();
        }
    }
    serde_json::json!({ "status": response.status.as_u16(), "headers": headers, "body": body })
}

// === impl TestApp ===

impl TestApp {
    /// Starts a service with [`app`].
    pub(crate) async fn start() -> Self {
        Self::start_with(app()).await
    }

    pub(crate) async fn start_with(app: App) -> Self {
        Self { stack: Stack::with(&app).await, app }
    }

    pub(crate) fn id(&self) -> &str {
        self.app.id()
    }

    /// A client with its own client address.
    pub(crate) fn client(&self) -> ApiClient {
        self.stack.client()
    }

    /// The path of an email endpoint.
    pub(crate) fn email_path(&self, operation: &str) -> String {
        format!("v1/{}/email/{operation}", self.id())
    }

    /// Registers an email address with [`PASSWORD`].
    pub(crate) async fn register(&self, email: &str) -> ApiResponse {
        self.client().register(self.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK)
    }

    /// Waits for the mail with this number to an email address (the first is 1) and returns its code.
    pub(crate) async fn code(&self, email: &str, mail_number: usize) -> String {
        self.mail(email, mail_number).await.code()
    }

    /// Waits for the mail with this number to an email address (the first is 1).
    pub(crate) async fn mail(&self, email: &str, mail_number: usize) -> Arc<Mail> {
        let found = || async { self.stack.mails().to(email).get(mail_number - 1).cloned() };
        eventually(&format!("mail {mail_number} to {email}"), MAIL_LIMIT, found).await
    }

    /// Registers and confirms an email address. Returns the client that confirmed it. The account now knows the
    /// client's address.
    pub(crate) async fn register_and_confirm(&self, email: &str) -> ApiClient {
        self.register(email).await;
        let code = self.code(email, 1).await;
        let client = self.client();
        client.confirm(self.id(), &code).await.expect(StatusCode::OK);
        client
    }

    /// Waits for the earlier mails to this email address, then requests a password reset. Returns the code in the reset
    /// mail. `mail_number` is the number of this mail among the mails to the address; the first is 1.
    pub(crate) async fn request_reset_code(&self, email: &str, mail_number: usize) -> String {
        if mail_number > 1 {
            self.mail(email, mail_number - 1).await;
        }
        self.client().forgot_password(self.id(), email).await.expect(StatusCode::OK);
        self.code(email, mail_number).await
    }

    /// Waits until the outbox contains nothing but dead letters. Returns the number of mails to an email address.
    pub(crate) async fn settled_mail_count(&self, email: &str) -> usize {
        let database = &self.stack.database;
        let mut connection = database.connect().await.expect("the database is reachable");
        let emptied = async {
            let waiting = "SELECT count(*) FROM outbox WHERE dead_at IS NULL";
            while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut connection).await.expect("a count") > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(MAIL_LIMIT, emptied).await.expect("the outbox is emptied in time");
        connection.close().await.expect("the database is reachable");
        self.stack.mails().to(email).len()
    }

    /// Executes SQL in the service's database.
    pub(crate) async fn sql(&self, sql: &str) {
        let mut connection = self.stack.database.connect().await.expect("the database is reachable");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.expect("the SQL is valid");
    }

    /// The user's epoch in Postgres, and whether the email address is verified.
    pub(crate) async fn epoch_and_verified(&self, email: &str) -> (i64, bool) {
        let mut connection = self.stack.database.connect().await.expect("the database is reachable");
        sqlx::query_as("SELECT epoch, email_verified_at IS NOT NULL FROM users WHERE email_canonical = lower($1)")
            .bind(email)
            .fetch_one(&mut connection)
            .await
            .expect("the user exists")
    }

    /// Changes the rendered document, also in ways that a manifest does not allow. Waits until the server serves the
    /// changed document.
    pub(crate) async fn edit_rendered(&self, edit: impl FnOnce(&mut Value)) {
        let path = self.stack.rendered().join(format!("{}.json", self.id()));
        let before = fs::read(&path).expect("the document exists");
        let mut document: Value = serde_json::from_slice(&before).expect("the document is JSON");
        edit(&mut document);
        let after = document.to_string();
        let (mut revisions, _) = RevisionStream::open(self.stack.server()).await;
        fs::write(&path, &after).expect("the document can be written");
        let wanted = Revision::of(after.as_bytes());
        revisions.next_change_where(|change| change.revision.as_ref() == Some(&wanted)).await;
    }

    /// Replaces the App with an App that has the same appID and another document. Waits until every server serves it.
    pub(crate) async fn apply(&mut self, app: App) {
        let mut streams = Vec::new();
        for server in self.stack.servers() {
            streams.push(RevisionStream::open(server).await.0);
        }
        self.stack.apply(&app).expect("the App is rendered");
        let document = fs::read(self.stack.rendered().join(format!("{}.json", app.id()))).expect("it is rendered");
        let wanted = Revision::of(&document);
        for revisions in &mut streams {
            revisions.next_change_where(|change| change.revision.as_ref() == Some(&wanted)).await;
        }
        self.app = app;
    }

    /// Waits until Redis's clock is past this time (Unix time in seconds).
    pub(crate) async fn wait_until_past(&self, unix_seconds: u64) {
        let mut redis = self.stack.redis().connect().await.expect("Redis is reachable");
        while redis::cmd("TIME").query_async::<(u64, u64)>(&mut redis).await.expect("Redis returns the time").0
            <= unix_seconds
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

// === impl RevisionStream ===

impl RevisionStream {
    /// Opens the stream of a server. Returns it with the first message (hello).
    pub(crate) async fn open(server: &ServerProcess) -> (Self, Hello) {
        let request = ApiClient::new(server.ops).request(Method::GET, "revisions");
        let response = request.send().await.expect("the server responds");
        assert_eq!(response.status(), StatusCode::OK);
        let mut this = Self { response, unread: Vec::new() };
        match this.next().await {
            RevisionsMessage::Hello { hello } => (this, hello),
            other => panic!("a stream begins with a hello, not with {other:?}"),
        }
    }

    /// Waits for the next change for which `fits` returns true.
    pub(crate) async fn next_change_where(&mut self, fits: impl Fn(&RevisionChange) -> bool) -> RevisionChange {
        let found = async {
            loop {
                if let RevisionsMessage::Change(change) = self.next().await
                    && fits(&change)
                {
                    return change;
                }
            }
        };
        tokio::time::timeout(LIVE_LIMIT, found).await.expect("the server reports the change in time")
    }

    pub(crate) async fn next(&mut self) -> RevisionsMessage {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return serde_json::from_slice(&line).expect("a line is of a known kind");
            }
            let more = self.response.chunk().await.expect("the stream can be read").expect("the stream does not end");
            self.unread.extend_from_slice(&more);
        }
    }
}
