//! The hosted pages (specification: Hosted pages) in Chromium, with and without scripts.

mod accessibility;
mod hostile;
mod openid;
mod pages;
mod passwords;

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::StatusCode;
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::browser::Browser;

use crate::pages::PagesTest;

/// Another site: `http://localhost`, while the pages are at `http://127.0.0.1`.
struct OtherSite {
    addr: SocketAddr,
}

// === impl OtherSite ===

impl OtherSite {
    /// Serves these HTML pages, each at its path.
    async fn start(pages: Vec<(&'static str, String)>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let pages = Arc::new(pages);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let pages = Arc::clone(&pages);
                let service = service_fn(move |request: http::Request<Incoming>| {
                    let page = pages.iter().find(|(path, _)| *path == request.uri().path()).cloned();
                    async move { html_response(page.map(|(_, html)| html)) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { addr }
    }

    fn url(&self, path: &str) -> String {
        format!("http://localhost:{}{path}", self.addr.port())
    }
}

fn html_response(html: Option<String>) -> http::Result<http::Response<Full<Bytes>>> {
    let status = if html.is_some() { StatusCode::OK } else { StatusCode::NOT_FOUND };
    let response = http::Response::builder().status(status).header("content-type", "text/html; charset=utf-8");
    response.body(Full::new(html.unwrap_or_default().into()))
}

// === impl PagesTest ===

impl PagesTest {
    /// The URL of a page.
    fn url(&self, page: &str) -> String {
        format!("{}{}", self.test_app.stack.base_url(), self.path(page))
    }

    /// Logs in on the page that the browser shows.
    async fn log_in_here(&self, browser: &Browser, email: &str, password: &str) {
        browser.fill("#email", email).await;
        browser.fill("#password", password).await;
        browser.click("main .primary").await;
    }

    /// Waits until the browser shows this page.
    async fn wait_for_page(&self, browser: &Browser, page: &str) {
        let path = self.path(page);
        browser.wait_for_url(&format!("the page {page}"), |url| url.path() == path).await;
    }
}
