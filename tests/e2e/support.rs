//! What many tests do: users and their mails, requests that no HTTP client sends, and a look at what a server serves.

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{Method, StatusCode};
use latchkey_crds::rendered::{Change, Hello, Revision, RevisionsLine};
use latchkey_tests::{
    builders::App,
    client::{Anonymous, Answer},
    eventually,
    mail::Mail,
    stack::{Server, Stack},
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Mail goes out within a second or two; a loaded machine takes longer.
pub(crate) const MAIL_LIMIT: Duration = Duration::from_secs(30);
/// An edit is live within two seconds; a loaded machine takes longer.
pub(crate) const LIVE_LIMIT: Duration = Duration::from_secs(20);
/// Longer than any answer to a raw request takes, those to half-sent ones included.
const RAW_LIMIT: Duration = Duration::from_secs(60);

pub(crate) const PASSWORD: &str = "violet-Anchor-mills-27";
pub(crate) const NEW_PASSWORD: &str = "copper-Lantern-drift-58";
pub(crate) const WRONG_PASSWORD: &str = "not-The-password-91";
pub(crate) const NAME: &str = "Ada Lovelace";

/// A code of the right form that nobody was sent.
pub(crate) const WRONG_CODE: &str = "00000-00000";

/// A service with one App.
pub(crate) struct Shop {
    pub(crate) stack: Stack,
    pub(crate) app: App,
}

/// A server's stream of what it serves.
pub(crate) struct Revisions {
    response: reqwest::Response,
    unread: Vec<u8>,
}

/// What a JWT says, unchecked.
pub(crate) fn claims_of(token: &str) -> Value {
    let claims = token.split('.').nth(1).expect("a token is a JWT");
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).expect("claims are base64url");
    serde_json::from_slice(&claims).expect("claims are JSON")
}

/// An App whose users may get mail after mail.
pub(crate) fn app() -> App {
    App::new("shop").limit("mailsPerRecipient", &[(1000, 60)])
}

/// Sends octets as they are, and reads until the server closes.
pub(crate) async fn raw(server: SocketAddr, request: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(server).await.expect("the server accepts");
    // A server that refuses early may close before all is written; its answer is there to read all the same.
    drop(stream.write_all(request.as_ref()).await);
    read_all(&mut stream).await
}

/// What the server still says on this connection until it closes it.
pub(crate) async fn read_all(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(RAW_LIMIT, stream.read_to_end(&mut answer)).await;
    drop(read.expect("the server answers or closes in time"));
    String::from_utf8_lossy(&answer).into_owned()
}

/// The status of a raw answer; none where the server closed without one.
pub(crate) fn status_of(raw: &str) -> Option<u16> {
    raw.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// The head of a POST of JSON to a path, without an end: more headers may follow.
pub(crate) fn post_head(path: &str) -> String {
    format!("POST /{path} HTTP/1.1\r\nHost: latchkey.test\r\nContent-Type: application/json\r\nConnection: close\r\n")
}

/// An answer without what may differ between two of one kind: ids, times, tokens.
pub(crate) fn shape(answer: &Answer) -> Value {
    let mut headers: Vec<&str> = answer.headers.keys().map(http::HeaderName::as_str).collect();
    headers.sort_unstable();
    let mut body = answer.body.clone();
    for name in ["request_id", "local_id", "expires_at"] {
        if let Some(value) = body.get_mut(name) {
            assert!(value.is_string() || value.is_i64(), "{name} in {}", answer.text);
            *value = "…".into();
        }
    }
    serde_json::json!({ "status": answer.status.as_u16(), "headers": headers, "body": body })
}

// === impl Shop ===

impl Shop {
    /// With an App whose users may get mail after mail.
    pub(crate) async fn open() -> Self {
        Self::with(app()).await
    }

    pub(crate) async fn with(app: App) -> Self {
        Self { stack: Stack::with(&app).await, app }
    }

    pub(crate) fn id(&self) -> &str {
        self.app.id()
    }

    /// Somebody new, at a client address of their own.
    pub(crate) fn client(&self) -> Anonymous {
        self.stack.client()
    }

    /// The path of an email endpoint.
    pub(crate) fn path(&self, operation: &str) -> String {
        format!("v1/{}/email/{operation}", self.id())
    }

    /// Registers an address with [`PASSWORD`].
    pub(crate) async fn register(&self, email: &str) -> Answer {
        self.client().register(self.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK)
    }

    /// The code that came with the nth mail to an address, counted from one.
    pub(crate) async fn code(&self, email: &str, nth: usize) -> String {
        self.mail(email, nth).await.code()
    }

    /// The nth mail to an address, counted from one.
    pub(crate) async fn mail(&self, email: &str, nth: usize) -> Arc<Mail> {
        let found = || async { self.stack.mails().to(email).get(nth - 1).cloned() };
        eventually(&format!("mail {nth} to {email}"), MAIL_LIMIT, found).await
    }

    /// Registers and confirms; the client address is then known to the account.
    pub(crate) async fn confirmed(&self, email: &str) -> Anonymous {
        self.register(email).await;
        let code = self.code(email, 1).await;
        let client = self.client();
        client.confirm(self.id(), &code).await.expect(StatusCode::OK);
        client
    }

    /// Asks for a reset once the mails before have come, and takes its code; `nth` as in [`Shop::code`].
    pub(crate) async fn reset_code(&self, email: &str, nth: usize) -> String {
        if nth > 1 {
            self.mail(email, nth - 1).await;
        }
        self.client().forgot_password(self.id(), email).await.expect(StatusCode::OK);
        self.code(email, nth).await
    }

    /// Waits until everything that was to be sent has been, and tells how many mails there are to an address.
    pub(crate) async fn mails_in_the_end(&self, email: &str) -> usize {
        let database = &self.stack.database;
        let mut connection = database.connect().await.expect("the database is there");
        let emptied = async {
            let waiting = "SELECT count(*) FROM outbox WHERE dead_at IS NULL";
            while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut connection).await.expect("a count") > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(MAIL_LIMIT, emptied).await.expect("the outbox is emptied in time");
        connection.close().await.expect("the database is there");
        self.stack.mails().to(email).len()
    }

    /// Runs SQL of the test's own making.
    pub(crate) async fn sql(&self, sql: &str) {
        let mut connection = self.stack.database.connect().await.expect("the database is there");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.expect("the SQL is right");
    }

    /// The epoch and whether the address is verified, as Postgres has them.
    pub(crate) async fn user(&self, email: &str) -> (i64, bool) {
        let mut connection = self.stack.database.connect().await.expect("the database is there");
        sqlx::query_as("SELECT epoch, email_verified_at IS NOT NULL FROM users WHERE email_canonical = lower($1)")
            .bind(email)
            .fetch_one(&mut connection)
            .await
            .expect("the user is there")
    }

    /// Changes the rendered document itself, past what a manifest may say, and waits until it is served.
    pub(crate) async fn edit_rendered(&self, edit: impl FnOnce(&mut Value)) {
        let path = self.stack.rendered().join(format!("{}.json", self.id()));
        let before = fs::read(&path).expect("the document is there");
        let mut document: Value = serde_json::from_slice(&before).expect("the document is JSON");
        edit(&mut document);
        let after = document.to_string();
        let (mut revisions, _) = Revisions::of(self.stack.server()).await;
        fs::write(&path, &after).expect("the document can be written");
        let wanted = Revision::of(after.as_bytes());
        revisions.change_that(|change| change.revision.as_ref() == Some(&wanted)).await;
    }

    /// Waits until Redis's clock is past this time, in Unix seconds.
    pub(crate) async fn past(&self, unix_seconds: u64) {
        let mut redis = self.stack.redis().connect().await.expect("Redis is there");
        while redis::cmd("TIME").query_async::<(u64, u64)>(&mut redis).await.expect("Redis tells the time").0
            <= unix_seconds
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

// === impl Revisions ===

impl Revisions {
    /// The stream of a server, and its first line.
    pub(crate) async fn of(server: &Server) -> (Self, Hello) {
        let request = Anonymous::new(server.ops).request(Method::GET, "revisions");
        let response = request.send().await.expect("the server answers");
        assert_eq!(response.status(), StatusCode::OK);
        let mut this = Self { response, unread: Vec::new() };
        match this.next().await {
            RevisionsLine::Hello { hello } => (this, hello),
            other => panic!("a stream begins with a hello, not with {other:?}"),
        }
    }

    /// The next change that fits.
    pub(crate) async fn change_that(&mut self, fits: impl Fn(&Change) -> bool) -> Change {
        let found = async {
            loop {
                if let RevisionsLine::Change(change) = self.next().await
                    && fits(&change)
                {
                    return change;
                }
            }
        };
        tokio::time::timeout(LIVE_LIMIT, found).await.expect("the server tells the change in time")
    }

    pub(crate) async fn next(&mut self) -> RevisionsLine {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return serde_json::from_slice(&line).expect("a line is one of the known sorts");
            }
            let more = self.response.chunk().await.expect("the stream goes on").expect("the stream does not end");
            self.unread.extend_from_slice(&more);
        }
    }
}
