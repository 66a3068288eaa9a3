//! The hosted pages (specification: Hosted pages) in a browser without scripts, with real stores and mails.

mod account;
mod confirm;
mod enumeration;
mod flows;
mod forms;
mod groups;
mod outages;
mod social;

use latchkey_tests::{
    builders::App,
    page_browser::{LoadedPage, PageBrowser},
    passwords::PASSWORD,
    stack::{Builder, Stack},
};
use serde_json::json;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, TestApp},
};

pub(crate) const EMAIL: &str = "ada@example.com";

/// A service with one App that has pages.
pub(crate) struct PagesTest {
    pub(crate) test_app: TestApp,
}

/// An App with pages in both languages, and with limits that no test reaches.
pub(crate) fn app() -> App {
    unlimited_app("pages").set("/pages/mode", "Enabled").set("/pages/languages", json!(["en", "de"]))
}

// === impl PagesTest ===

impl PagesTest {
    pub(crate) async fn start() -> Self {
        Self::of(app(), Stack::builder()).await
    }

    pub(crate) async fn of(app: App, builder: Builder) -> Self {
        Self { test_app: TestApp::from_builder(app, builder).await }
    }

    /// The path of a page.
    pub(crate) fn path(&self, page: &str) -> String {
        format!("/{}/{page}", self.test_app.id())
    }

    pub(crate) fn new_browser(&self) -> PageBrowser {
        PageBrowser::new(self.test_app.client())
    }

    /// Opens a page of the App.
    pub(crate) async fn open(&self, browser: &mut PageBrowser, page: &str) -> LoadedPage {
        browser.open(&self.path(page)).await
    }

    /// Opens a page, and sends its form.
    pub(crate) async fn fill_in(&self, browser: &mut PageBrowser, page: &str, fields: &[(&str, &str)]) -> LoadedPage {
        let loaded = self.open(browser, page).await;
        browser.submit(&loaded, &self.path(page), fields).await
    }

    pub(crate) async fn register(&self, browser: &mut PageBrowser, email: &str, password: &str) -> LoadedPage {
        self.fill_in(browser, "register", &[("name", NAME), ("email", email), ("password", password)]).await
    }

    pub(crate) async fn log_in(&self, browser: &mut PageBrowser, email: &str, password: &str) -> LoadedPage {
        self.fill_in(browser, "login", &[("email", email), ("password", password)]).await
    }

    /// A browser that is logged in to a new account with [`PASSWORD`].
    pub(crate) async fn logged_in_browser(&self, email: &str) -> PageBrowser {
        self.test_app.register_and_confirm(email).await;
        let mut browser = self.new_browser();
        self.log_in(&mut browser, email, PASSWORD).await.expect_at(&self.path("account"));
        browser
    }

    /// The path and query of the link to a page in the nth mail to an address. `nth` is 1 for the first mail.
    pub(crate) async fn mailed_link(&self, email: &str, nth: usize, page: &str) -> String {
        let mail = self.test_app.mail(email, nth).await;
        let begin = format!("{}{}?", self.test_app.stack.base_url(), self.path(page));
        let (_, rest) = mail.text.split_once(&begin).unwrap_or_else(|| panic!("no {begin} in {}", mail.text));
        let query: String = rest.chars().take_while(|char| !char.is_whitespace() && *char != '>').collect();
        format!("{}?{}", self.path(page), query.trim_end_matches(['.', ',']))
    }

    /// Whether the browser is logged in to the pages.
    pub(crate) async fn is_logged_in(&self, browser: &mut PageBrowser) -> bool {
        self.open(browser, "account/sessions").await.path() == self.path("account/sessions")
    }
}
