//! A tour of the hosted pages in Chromium: every page of an App in each of its states, for pictures and for checks that
//! apply to all pages.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use http::StatusCode;
use serde_json::json;
use url::Url;

use crate::{
    browser::Browser,
    builders::{App, Client, Provider},
    eventually_ok,
    mail::Mail,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

/// The languages of the pages.
pub const LANGUAGES: [&str; 2] = ["en", "de"];

/// The rate limits that the tour raises. Most of them count per client address, and all browsers have the same client
/// address. `loginFailuresPerAccount` counts per account, and `mailsPerRecipient` counts per recipient.
const RAISED_LIMITS: [&str; 8] = [
    "loginFailuresPerClient",
    "loginFailuresPerAccount",
    "loginFailuresPerClientOverall",
    "loginsPerClient",
    "registrationsPerClient",
    "mailsPerRecipient",
    "mailsPerClient",
    "codesPerClient",
];
/// The raised count of these rate limits, which no tour reaches.
const UNREACHED_COUNT: u32 = 100_000;
const NAME: &str = "Ada Lovelace";
/// A well-formed code that no mail contains.
const WRONG_CODE: &str = "00000-00000";
/// Time limit for a mail to arrive. This takes a second, longer on a loaded machine.
const MAIL_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a page to be shown.
const PAGE_LIMIT: Duration = Duration::from_secs(60);

/// A service with an App that enables every part of the pages. Several browsers can take the tour at the same time, if
/// each uses a different language.
pub struct PageTour {
    stack: Stack,
    app: App,
    /// A Client that needs the consent of each user. Its redirect URL is a page of the App.
    client: Client,
}

/// The tour of one browser through all pages.
struct Walk<'a, V> {
    tour: &'a PageTour,
    browser: &'a Browser,
    language: &'a str,
    visit: V,
}

// === impl PageTour ===

impl PageTour {
    pub async fn start() -> Result<Self> {
        let providers = ["github", "google"].map(|preset| Provider::new(preset, preset));
        let links = json!({
            "home": "https://shop.example.com/",
            "terms": "https://shop.example.com/terms",
            "privacy": "https://shop.example.com/privacy",
            "support": "mailto:help@shop.example.com",
        });
        let mut app = App::new("tour")
            .set("/pages/mode", "Enabled")
            .set("/pages/languages", json!(LANGUAGES))
            .set("/pages/links", links);
        for limit in RAISED_LIMITS {
            app = app.limit(limit, &[(UNREACHED_COUNT, 60)]);
        }
        let mut builder = Stack::builder();
        for provider in &providers {
            app = app.provider(provider);
            builder = builder.provider(provider);
        }
        let stack = builder.app(&app).try_start().await?;
        let client = Client::web("grafana", &app, &format!("{}/{}/account", stack.base_url(), app.id()))
            .set("/displayName", "Our Grafana")
            .set("/scopes", json!(["openid", "profile", "email", "groups", "offline_access"]))
            .set("/consent", "Once");
        stack.apply_client(&client)?;
        stack.wait_until_served(&app).await?;
        Ok(Self { stack, app, client })
    }

    /// Walks a new browser through all pages. At each page, calls `visit` with a name for the page and its state. The
    /// name is unique within the walk. `visit` must not leave the page.
    pub async fn walk(&self, browser: &Browser, language: &str, visit: impl AsyncFnMut(&Browser, &str)) -> Result<()> {
        let mut walk = Walk { tour: self, browser, language, visit };
        walk.log_in().await?;
        walk.confirm_with_password().await?;
        walk.see_unverified_account().await?;
        walk.register().await?;
        walk.see_account().await?;
        walk.see_applications().await?;
        walk.reset_password().await?;
        walk.delete_account().await
    }

    fn url(&self, page: &str) -> String {
        format!("{}/{}/{page}", self.stack.base_url(), self.app.id())
    }

    /// Registers an email address through the JSON API, so that the browser of the tour is not the one that registered.
    async fn register(&self, email: &str) -> Result<()> {
        let response = self.stack.client().register(self.app.id(), NAME, email, PASSWORD).await;
        ensure!(response.status == StatusCode::OK, "the response was: {}", response.text);
        Ok(())
    }

    /// The link to this page in the newest mail to `email` that has such a link.
    async fn mailed_link(&self, email: &str, page: &str) -> Result<String> {
        let begin = format!("{}?", self.url(page));
        let has_link = |mail: &Mail| mail.is_to(email) && mail.text.contains(&begin);
        let mail = self.stack.mails().wait_for(has_link, MAIL_LIMIT).await;
        let (_, rest) = mail.text.split_once(&begin).context("a link")?;
        let query: String = rest.chars().take_while(|char| !char.is_whitespace() && *char != '>').collect();
        Ok(format!("{begin}{}", query.trim_end_matches(['.', ','])))
    }
}

// === impl Walk ===

impl<V: AsyncFnMut(&Browser, &str)> Walk<'_, V> {
    fn email(&self, name: &str) -> String {
        format!("{name}.{}@example.com", self.language)
    }

    async fn log_in(&mut self) -> Result<()> {
        // The choice of the language is kept in a cookie.
        self.open(&format!("login?lang={}", self.language)).await;
        self.see("login").await?;
        self.browser.fill("#email", &self.email("nobody")).await;
        self.browser.fill("#password", WRONG_PASSWORD).await;
        self.press_primary().await;
        self.wait_for("login", Some("invalid_credentials")).await;
        self.see("login-error").await?;
        self.open("login?error=access_denied").await;
        self.wait_for("login", Some("access_denied")).await;
        self.see("login-provider-error").await?;
        self.open("login?tx=forged").await;
        self.wait_for("login", Some("invalid_state")).await;
        self.see("error").await
    }

    /// Confirms an email address that was not registered in this browser, so the user must enter the password, too.
    async fn confirm_with_password(&mut self) -> Result<()> {
        let email = self.email("grace");
        self.tour.register(&email).await?;
        self.browser.open(&self.tour.mailed_link(&email, "confirm").await?).await;
        self.wait_for("confirm", None).await;
        self.see("confirm-password").await?;
        self.press_primary().await;
        self.wait_for("confirm", Some("reauthentication_required")).await;
        self.see("confirm-password-error").await?;
        self.browser.fill("#password", PASSWORD).await;
        self.press_primary().await;
        self.wait_for("account", None).await;
        self.open("logout").await;
        self.see("logout").await?;
        self.press_primary().await;
        // Waits for a link that only the page after the logout has.
        self.browser.text_of("main a.primary").await;
        self.see("logout-done").await
    }

    async fn see_unverified_account(&mut self) -> Result<()> {
        let email = self.email("edsger");
        self.tour.register(&email).await?;
        self.log_in_as(&email, PASSWORD).await;
        self.see("account-unverified").await?;
        self.log_out().await;
        Ok(())
    }

    async fn register(&mut self) -> Result<()> {
        let email = self.email("ada");
        self.open("register").await;
        self.see("register").await?;
        self.browser.fill("#name", NAME).await;
        self.browser.fill("#email", &email).await;
        self.browser.fill("#password", "x").await;
        self.press_primary().await;
        self.wait_for("register", Some("weak_password")).await;
        self.see("register-error").await?;
        self.browser.fill("#password", PASSWORD).await;
        self.press_primary().await;
        self.wait_for("confirm", None).await;
        self.see("confirm-notice").await?;
        self.browser.fill("#code", WRONG_CODE).await;
        self.press_primary().await;
        self.wait_for("confirm", Some("invalid_code")).await;
        self.see("confirm-error").await?;
        self.browser.open(&self.tour.mailed_link(&email, "confirm").await?).await;
        self.wait_for("confirm", None).await;
        self.see("confirm").await?;
        self.press_primary().await;
        self.wait_for("account", None).await;
        self.see("account-confirmed").await
    }

    /// Expects that Ada is logged in.
    async fn see_account(&mut self) -> Result<()> {
        let email = self.email("ada");
        self.link_github(&email).await?;
        self.tour.stack.client().login(self.tour.app.id(), &email, PASSWORD).await.expect(StatusCode::OK);
        for (page, stop) in [
            ("account", "account"),
            ("account/identities", "account-identities"),
            ("account/sessions", "account-sessions"),
            ("account/activity", "account-activity"),
            ("account/delete", "account-delete"),
            ("account/password", "account-password"),
        ] {
            self.open(page).await;
            self.wait_for(page, None).await;
            self.see(stop).await?;
        }
        self.browser.fill("#current_password", WRONG_PASSWORD).await;
        self.browser.fill("#password", NEW_PASSWORD).await;
        self.press_primary().await;
        self.wait_for("account/password", Some("invalid_credentials")).await;
        self.see("account-password-error").await?;
        self.open("account/email").await;
        self.see("account-email").await?;
        self.press_primary().await;
        self.wait_for("account/email", Some("invalid_request")).await;
        self.see("account-email-error").await?;
        self.browser.fill("#email", &self.email("countess")).await;
        self.browser.fill("#password", PASSWORD).await;
        self.press_primary().await;
        self.wait_for("account", None).await;
        self.see("account-email-sent").await
    }

    /// Expects that Ada is logged in.
    async fn see_applications(&mut self) -> Result<()> {
        let (client_id, redirect_url) = (self.tour.client.client_id(), self.tour.url("account"));
        let request = [
            ("client_id", client_id.as_str()),
            ("redirect_uri", redirect_url.as_str()),
            ("response_type", "code"),
            ("scope", "openid profile email groups offline_access"),
        ];
        let query = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(request).finish();
        self.open(&format!("authorize?{query}")).await;
        self.wait_for("consent", None).await;
        self.see("consent").await?;
        self.press_primary().await;
        self.wait_for("account", None).await;
        self.open("account/applications").await;
        self.browser.text_of("main .list").await;
        self.see("account-applications").await?;
        self.browser.click("main .list button").await;
        self.browser.text_of("main .alert-done").await;
        self.see("account-applications-removed").await?;
        self.open("authorize?client_id=unknown").await;
        self.wait_for("authorize", Some("invalid_client")).await;
        self.see("authorize-error").await
    }

    async fn reset_password(&mut self) -> Result<()> {
        let email = self.email("ada");
        self.open("forgot").await;
        self.see("forgot").await?;
        self.press_primary().await;
        self.wait_for("forgot", Some("invalid_request")).await;
        self.see("forgot-error").await?;
        self.browser.fill("#email", &email).await;
        self.press_primary().await;
        // Waits for a link that only the notice has: the form has a button instead.
        self.browser.text_of("main a.primary").await;
        self.see("forgot-notice").await?;
        self.press_primary().await;
        self.wait_for("reset", None).await;
        self.see("reset-code").await?;
        self.browser.open(&self.tour.mailed_link(&email, "reset").await?).await;
        self.wait_for("reset", None).await;
        self.see("reset").await?;
        self.browser.fill("#password", "x").await;
        self.press_primary().await;
        self.wait_for("reset", Some("weak_password")).await;
        self.see("reset-error").await?;
        self.browser.fill("#password", NEW_PASSWORD).await;
        self.press_primary().await;
        self.wait_for("login", None).await;
        self.see("login-password-reset").await
    }

    async fn delete_account(&mut self) -> Result<()> {
        self.log_in_as(&self.email("ada"), NEW_PASSWORD).await;
        self.open("account/delete").await;
        self.browser.click("main .danger").await;
        self.wait_for("login", None).await;
        self.see("login-account-deleted").await
    }

    /// Links an identity at GitHub to the user directly in the database, because the tour cannot log in at GitHub.
    async fn link_github(&self, email: &str) -> Result<()> {
        let stack = &self.tour.stack;
        let sql = format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             SELECT app_id, 'https://github.com', '{email}', id, 'github', now() FROM users
             WHERE email_canonical = '{email}'"
        );
        stack.postgres().execute(&stack.database.name, &sql).await
    }

    async fn log_in_as(&self, email: &str, password: &str) {
        self.open("login").await;
        self.browser.fill("#email", email).await;
        self.browser.fill("#password", password).await;
        self.press_primary().await;
        self.wait_for("account", None).await;
    }

    async fn log_out(&self) {
        self.open("logout").await;
        self.press_primary().await;
        self.browser.text_of("main a.primary").await;
    }

    async fn open(&self, page: &str) {
        self.browser.open(&self.tour.url(page)).await;
    }

    async fn press_primary(&self) {
        self.browser.click("main .primary").await;
    }

    /// Waits until the browser shows this page with this error.
    async fn wait_for(&self, page: &str, error: Option<&str>) {
        let expected: Url = self.tour.url(page).parse().expect("a URL");
        eventually_ok(&format!("the page {page} with the error {error:?}"), PAGE_LIMIT, || async {
            let url = self.browser.url().await;
            let found = self.browser.attribute("main", "data-error").await;
            ensure!((url.path(), found.as_deref()) == (expected.path(), error), "it is {url} with {found:?}");
            Ok(())
        })
        .await;
    }

    /// Calls `visit` for the page that the browser shows. `stop` is the name of the page and its state.
    async fn see(&mut self, stop: &str) -> Result<()> {
        let language = self.browser.attribute("html", "lang").await;
        ensure!(language.as_deref() == Some(self.language), "{stop} is in the language {language:?}");
        (self.visit)(self.browser, stop).await;
        Ok(())
    }
}
