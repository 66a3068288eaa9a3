//! The inbox of `make run`: a page that shows incoming mails, the same mails as JSON for scripts, and the pages that
//! end a social login and a login with OpenID Connect.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, uri::Authority};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::task::JoinHandle;
use url::form_urlencoded;

use crate::{
    mail::{Mail, Mailbox},
    smtp::listen,
};

const INBOX_PAGE: &str = include_str!("inbox/page.html");
const DONE_PAGE: &str = include_str!("inbox/done.html");
const SIGNED_IN_PAGE: &str = include_str!("inbox/signed_in.html");
/// The code verifier of the demo of `make run` (RFC 7636, section 4.1). It protects nothing, because it is known.
pub(crate) const DEMO_VERIFIER: &str = "the-demo-of-make-run-has-the-same-verifier-for-each-login";
/// The path of the page that exchanges a code for tokens.
pub(crate) const SIGNED_IN_PATH: &str = "/signed-in";
/// Maximum of the query parameter `wait`, in seconds.
const MAX_WAIT_SECONDS: u64 = 300;
/// Interval of comments in the event stream. The comments keep the stream open, and a failed write shows that the page
/// was closed.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Content security policy of a mail's HTML in its frame. It allows inline styles, `data:` images, and links to new
/// tabs; scripts and everything else are forbidden.
const MAIL_CSP: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; \
                           sandbox allow-popups allow-popups-to-escape-sandbox";

/// A running inbox. It ends when this value is dropped.
pub struct Inbox {
    addr: SocketAddr,
    accepting: JoinHandle<()>,
}

type Body = BoxBody<Bytes, Infallible>;

/// The routes of the inbox.
enum Route {
    Page,
    Done,
    SignedIn,
    Events,
    Messages,
    Latest,
    Message(u64),
    Html(u64),
}

// === impl Inbox ===

impl Inbox {
    pub fn start(addr: SocketAddr, mails: Mailbox) -> io::Result<Self> {
        let listener = listen(addr)?;
        let addr = listener.local_addr()?;
        let accepting = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let mails = mails.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| {
                        let mails = mails.clone();
                        async move { Ok::<_, Infallible>(respond(&request, &mails).await) }
                    });
                    // A browser that disconnects is not an error.
                    drop(
                        http1::Builder::new()
                            .timer(TokioTimer::new())
                            .header_read_timeout(Duration::from_secs(10))
                            .serve_connection(TokioIo::new(stream), service)
                            .await,
                    );
                });
            }
        });
        Ok(Self { addr, accepting })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn respond(request: &Request<Incoming>, mails: &Mailbox) -> Response<Body> {
    if !is_host_allowed(request) {
        return text_response(StatusCode::MISDIRECTED_REQUEST, "call the inbox by its IP address or as localhost\n");
    }
    let Some(route) = route(request.uri().path()) else { return text_response(StatusCode::NOT_FOUND, "not found\n") };
    match (request.method(), route) {
        (&Method::GET | &Method::HEAD, Route::Page) => html_page(INBOX_PAGE, "'self'"),
        (&Method::GET | &Method::HEAD, Route::Done) => html_page(DONE_PAGE, "'self'"),
        // The page calls endpoints of the App, which have another port. So the policy of the page allows `http` URLs.
        (&Method::GET | &Method::HEAD, Route::SignedIn) => {
            html_page(&SIGNED_IN_PAGE.replace("{verifier}", DEMO_VERIFIER), "http:")
        }
        (&Method::GET, Route::Events) => events(mails),
        (&Method::GET | &Method::HEAD, Route::Messages) => {
            let query = Query::parse(request);
            let matching: Vec<_> = mails.all().into_iter().rev().filter(|mail| query.matches(mail)).collect();
            json_response(StatusCode::OK, &json!({ "messages": matching }))
        }
        (&Method::DELETE, Route::Messages) => {
            mails.clear();
            json_response(StatusCode::OK, &json!({}))
        }
        (&Method::GET, Route::Latest) => {
            let query = Query::parse(request);
            match mails.find(|mail| query.matches(mail), query.wait).await {
                Some(mail) => json_response(StatusCode::OK, &*mail),
                None => json_response(StatusCode::NOT_FOUND, &json!({ "error": "no such mail has arrived" })),
            }
        }
        (&Method::GET | &Method::HEAD, Route::Message(id)) => match mails.get(id) {
            Some(mail) => json_response(StatusCode::OK, &*mail),
            None => json_response(StatusCode::NOT_FOUND, &json!({ "error": "no such mail" })),
        },
        (&Method::GET | &Method::HEAD, Route::Html(id)) => match mails.get(id) {
            Some(mail) => mail_html(&mail),
            None => text_response(StatusCode::NOT_FOUND, "no such mail\n"),
        },
        _ => text_response(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n"),
    }
}

fn route(path: &str) -> Option<Route> {
    Some(match path {
        "/" => Route::Page,
        "/done" => Route::Done,
        SIGNED_IN_PATH => Route::SignedIn,
        "/api/events" => Route::Events,
        "/api/messages" => Route::Messages,
        "/api/messages/latest" => Route::Latest,
        other => {
            let id_path = other.strip_prefix("/api/messages/")?;
            match id_path.strip_suffix("/html") {
                Some(id) => Route::Html(id.parse().ok()?),
                None => Route::Message(id_path.parse().ok()?),
            }
        }
    })
}

/// Whether the `Host` header is an IP address or `localhost`. With DNS rebinding, a foreign web page can reach the
/// inbox, but then the `Host` header has the host name of that web page.
fn is_host_allowed(request: &Request<Incoming>) -> bool {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    host.and_then(|host| host.parse::<Authority>().ok()).is_some_and(|authority| {
        let host = authority.host();
        host.eq_ignore_ascii_case("localhost") || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    })
}

/// The query parameters: `to` and `after` (an id) select mails, and `wait` is the maximum time to wait, in seconds.
struct Query {
    to: Option<String>,
    after: u64,
    wait: Duration,
}

impl Query {
    fn parse(request: &Request<Incoming>) -> Self {
        let mut this = Self { to: None, after: 0, wait: Duration::ZERO };
        for (name, value) in form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes()) {
            match &*name {
                "to" => this.to = Some(value.into_owned()),
                "after" => this.after = value.parse().unwrap_or(0),
                "wait" => this.wait = Duration::from_secs(value.parse().unwrap_or(0).min(MAX_WAIT_SECONDS)),
                _ => {}
            }
        }
        this
    }

    fn matches(&self, mail: &Mail) -> bool {
        mail.id > self.after && self.to.as_ref().is_none_or(|to| mail.is_to(to))
    }
}

/// The response with an HTML page. `connect` is the `connect-src` of its content security policy: what the page's
/// scripts can call.
fn html_page(html: &str, connect: &str) -> Response<Body> {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let mut response = full_response(StatusCode::OK, "text/html; charset=utf-8", html.replace("{nonce}", &nonce));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src {connect}; \
         frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    set_header(&mut response, header::CONTENT_SECURITY_POLICY, &policy);
    response
}

/// Server-sent events: one immediately, and one after each change of the mailbox. After each event, the page requests
/// the list of mails.
fn events(mails: &Mailbox) -> Response<Body> {
    let frames = stream::unfold((mails.watch(), true), |(mut changes, first)| async move {
        let event = if first {
            Bytes::from_static(b"retry: 500\ndata: changed\n\n")
        } else {
            match tokio::time::timeout(HEARTBEAT, changes.changed()).await {
                Ok(Ok(())) => Bytes::from_static(b"data: changed\n\n"),
                Ok(Err(_)) => return None,
                Err(_) => Bytes::from_static(b": heartbeat\n\n"),
            }
        };
        changes.borrow_and_update();
        Some((Ok::<_, Infallible>(Frame::data(event)), (changes, false)))
    });
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(frames)));
    set_header(&mut response, header::CONTENT_TYPE, "text/event-stream");
    set_header(&mut response, header::CACHE_CONTROL, "no-store");
    response
}

fn mail_html(mail: &Arc<Mail>) -> Response<Body> {
    // Makes links open in a new tab, because the browser would block their targets inside the frame.
    let html = format!("<base target=\"_blank\">{}", mail.html);
    let mut response = full_response(StatusCode::OK, "text/html; charset=utf-8", html);
    set_header(&mut response, header::CONTENT_SECURITY_POLICY, MAIL_CSP);
    response
}

fn json_response(status: StatusCode, value: &impl serde::Serialize) -> Response<Body> {
    let mut text = serde_json::to_string(value).expect("mails are JSON");
    text.push('\n');
    full_response(status, "application/json", text)
}

fn text_response(status: StatusCode, text: &str) -> Response<Body> {
    full_response(status, "text/plain; charset=utf-8", text.to_owned())
}

fn full_response(status: StatusCode, content_type: &str, content: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(content)).boxed());
    *response.status_mut() = status;
    set_header(&mut response, header::CONTENT_TYPE, content_type);
    set_header(&mut response, header::CACHE_CONTROL, "no-store");
    set_header(&mut response, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set_header(&mut response, header::REFERRER_POLICY, "no-referrer");
    response
}

fn set_header(response: &mut Response<Body>, name: header::HeaderName, value: &str) {
    let value = HeaderValue::from_str(value).expect("our header values are ASCII");
    response.headers_mut().insert(name, value);
}
