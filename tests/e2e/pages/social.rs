//! Social logins that a page starts, and linked accounts.

use http::StatusCode;
use latchkey_tests::{
    client::ApiResponse,
    page_browser::{LoadedPage, PageBrowser},
    passwords::PASSWORD,
    stack::Stack,
};
use serde_json::json;
use url::Url;

use super::{EMAIL, PagesTest, app};
use crate::social::scripted_provider::{AuthorizationRequest, Person, ScriptedProvider};

const REDIRECT_URL: &str = "https://shop.example.com/done";

struct SocialPages {
    pages: PagesTest,
    upstream: ScriptedProvider,
}

// === impl SocialPages ===

impl SocialPages {
    async fn start() -> Self {
        let upstream = ScriptedProvider::start().await;
        let app = app()
            .set("/providerRefs", json!([{ "name": "local", "linkByEmail": true }]))
            .set("/redirectURLs", json!([REDIRECT_URL]));
        let pages = PagesTest::of(app, Stack::builder().provider(&upstream.provider("local"))).await;
        Self { pages, upstream }
    }

    fn path(&self, page: &str) -> String {
        self.pages.path(page)
    }

    /// Starts a login on the login page.
    async fn begin(&self, browser: &mut PageBrowser) -> AuthorizationRequest {
        let login = self.pages.open(browser, "login").await;
        let link = login.links().into_iter().find(|link| link.contains("provider=local")).expect("a button");
        authorization(&browser.open(&link).await)
    }

    /// The path of *callback* after the person has logged in at the provider.
    fn callback(&self, authorization: &AuthorizationRequest, person: &Person) -> String {
        let code = self.upstream.approve(authorization, person);
        format!("{}?state={}&code={code}", self.path("local/callback"), authorization.state())
    }

    async fn log_in(&self, browser: &mut PageBrowser, person: &Person) -> LoadedPage {
        let authorization = self.begin(browser).await;
        browser.open(&self.callback(&authorization, person)).await
    }

    /// Presses a button on the page of linked accounts.
    async fn press(&self, browser: &mut PageBrowser, action: &str) -> LoadedPage {
        let page = self.pages.open(browser, "account/identities").await;
        let form = page.forms().into_iter().find(|form| form.fields.iter().any(|(_, value)| value == action));
        browser.press(&form.unwrap_or_else(|| panic!("no {action} in {}", page.html))).await
    }

    /// The numbers of users, identities and sessions.
    async fn counts(&self) -> (i64, i64, usize) {
        (
            self.pages.test_app.query_number("SELECT count(*) FROM users").await,
            self.pages.test_app.query_number("SELECT count(*) FROM identities").await,
            self.pages.test_app.session_count().await,
        )
    }
}

fn authorization(page: &LoadedPage) -> AuthorizationRequest {
    AuthorizationRequest::of(page.external.as_deref().unwrap_or_else(|| panic!("the provider, not {}", page.html)))
}

fn grace() -> Person {
    Person::verified("1", "grace@example.com")
}

/// The target of a redirect, as a path with a query.
#[track_caller]
fn local_target(pages: &PagesTest, response: &ApiResponse) -> String {
    let location = response.header("location").expect("an address");
    location.strip_prefix(pages.test_app.stack.base_url()).expect("the pages").to_owned()
}

#[tokio::test]
async fn a_user_logs_in_with_a_provider() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let account = social.log_in(&mut browser, &grace()).await.expect_at(&social.path("account"));
    assert!(account.html.contains("grace@example.com"), "{}", account.html);
    assert!(!browser.cookies.keys().any(|name| name.starts_with("latchkey-tx.")), "{:?}", browser.cookies.keys());
    social.pages.fill_in(&mut browser, "logout", &[]).await;
    social.log_in(&mut browser, &grace()).await.expect_at(&social.path("account"));
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn a_social_login_leads_back_to_the_page_that_needs_it() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let login = social.pages.open(&mut browser, "account/activity").await;
    let link = login.links().into_iter().find(|link| link.contains("provider=local")).expect("a button");
    let authorization = authorization(&browser.open(&link).await);
    let done = browser.open(&social.callback(&authorization, &grace())).await;
    done.expect_at(&social.path("account/activity"));
}

#[tokio::test]
async fn a_social_login_ends_only_in_the_browser_that_began_it_and_only_once() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let authorization = social.begin(&mut browser).await;
    let returned = browser.get(&social.callback(&authorization, &grace())).await.expect(StatusCode::FOUND);
    let target = local_target(&social.pages, &returned);
    assert!(target.starts_with(&format!("{}?", social.path("continue"))), "{target}");

    let mut other = social.pages.new_browser();
    social.begin(&mut other).await;
    other.open(&target).await.expect_error(400, "invalid_state");
    let mut without_cookie = browser.clone();
    assert!(without_cookie.forget("latchkey-tx."));
    without_cookie.open(&target).await.expect_error(400, "invalid_state");
    for changed in [target.replace("state=", "state=A"), target.replace("state=", "x=")] {
        browser.open(&changed).await.expect_error(400, "invalid_state");
    }
    assert_eq!(social.counts().await.2, 0);

    let cookies = browser.cookies.clone();
    browser.open(&target).await.expect_at(&social.path("account"));
    let mut copy = browser.clone();
    copy.cookies = cookies;
    copy.open(&target).await.expect_error(400, "invalid_state");
    assert!(social.pages.is_logged_in(&mut browser).await);
    assert_eq!(social.counts().await.2, 1);
}

#[tokio::test]
async fn the_token_endpoint_refuses_the_code_of_a_page() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let authorization = social.begin(&mut browser).await;
    let returned = browser.get(&social.callback(&authorization, &grace())).await.expect(StatusCode::FOUND);
    let target = local_target(&social.pages, &returned);
    let url: Url = format!("http://pages{target}").parse().unwrap();
    let code = url.query_pairs().find(|(name, _)| name == "code").expect("a code").1.into_owned();
    let path = format!("v1/{}/token", social.pages.test_app.id());
    let verifier = "v".repeat(43);
    let body = json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier });
    let refused = social.pages.test_app.client().post(&path, &body).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    browser.open(&target).await.expect_at(&social.path("account"));
}

#[tokio::test]
async fn redirect_accepts_the_url_of_a_page_only_if_a_page_began_the_login() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let login = social.pages.open(&mut browser, "login").await;
    let link = login.links().into_iter().find(|link| link.contains("provider=local")).expect("a button");
    let started = browser.get(&link).await.expect(StatusCode::SEE_OTHER);
    assert_eq!(started.header("referrer-policy"), Some("no-referrer"));
    let redirect = local_target(&social.pages, &started);
    let parameter = |name: &str| {
        let url: Url = format!("http://pages{redirect}").parse().unwrap();
        let found = url.query_pairs().find(|(known, _)| known == name).expect("a parameter").1.into_owned();
        url::form_urlencoded::byte_serialize(found.as_bytes()).collect::<String>()
    };
    let (url, challenge, state) = (parameter("redirect_url"), parameter("code_challenge"), parameter("state"));
    let base = social.path("local/redirect");
    for bad in [
        format!("{base}?redirect_url={url}"),
        format!("{base}?redirect_url={url}&code_challenge={challenge}"),
        format!("{base}?redirect_url={url}&state={state}"),
        format!("{base}?redirect_url={url}&code_challenge={challenge}&state=x{state}"),
        format!("{base}?redirect_url={url}x&code_challenge={challenge}&state={state}"),
        format!("{redirect}&format=json"),
    ] {
        let response = browser.get(&bad).await;
        response.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
    }
    authorization(&browser.open(&redirect).await);
}

#[tokio::test]
async fn errors_of_a_social_login_are_shown_on_the_login_page() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    let cancelled = social.begin(&mut browser).await;
    let callback = format!("{}?state={}&error=access_denied", social.path("local/callback"), cancelled.state());
    browser.open(&callback).await.expect_error(200, "access_denied");
    let refused = social.log_in(&mut browser, &Person::without_email("2")).await;
    assert_eq!(refused.path(), social.path("login"));
    refused.expect_error(200, "access_denied");
    assert_eq!(social.counts().await, (0, 0, 0));
    let unknown = social.pages.open(&mut browser, "login?provider=nobody").await;
    unknown.expect_error(404, "provider_not_found");
}

#[tokio::test]
async fn a_user_links_and_unlinks_a_provider() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.logged_in_browser(EMAIL).await;
    let authorization = authorization(&social.press(&mut browser, "link").await);
    let linked = browser.open(&social.callback(&authorization, &grace())).await;
    let linked = linked.expect_at(&social.path("account/identities"));
    assert!(linked.text().contains("local is linked"), "{}", linked.html);
    // The query of the URL can name any notice, but the page shows only a notice that is true.
    for forged in ["linked&provider=evil", "unlinked&provider=evil", "unlinked&provider=local"] {
        let page = social.pages.open(&mut browser, &format!("account/identities?notice={forged}")).await;
        assert!(!page.html.contains("role=\"status\""), "{forged}: {}", page.html);
    }
    let (users, identities, _) = social.counts().await;
    assert_eq!((users, identities), (1, 1), "no account was created");
    let mut other = social.pages.new_browser();
    let account = social.log_in(&mut other, &grace()).await.expect_at(&social.path("account"));
    assert!(account.html.contains(EMAIL), "{}", account.html);

    let unlinked = social.press(&mut browser, "unlink").await.expect_at(&social.path("account/identities"));
    assert!(unlinked.text().contains("local is no longer linked"), "{}", unlinked.html);
    assert_eq!(social.counts().await.1, 0);
}

#[tokio::test]
async fn the_last_way_to_log_in_cannot_be_unlinked() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.new_browser();
    social.log_in(&mut browser, &grace()).await.expect_at(&social.path("account"));
    social.press(&mut browser, "unlink").await.expect_error(409, "last_identity");
    assert_eq!(social.counts().await.1, 1);
}

#[tokio::test]
async fn linking_needs_the_session_in_which_it_began() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.logged_in_browser(EMAIL).await;
    let started = authorization(&social.press(&mut browser, "link").await);
    let callback = social.callback(&started, &grace());
    social.pages.fill_in(&mut browser, "logout", &[]).await;
    browser.open(&callback).await.expect_error(400, "invalid_state");
    // Another login in the same browser has another session.
    social.pages.log_in(&mut browser, EMAIL, PASSWORD).await;
    let started = authorization(&social.press(&mut browser, "link").await);
    let callback = social.callback(&started, &grace());
    social.pages.fill_in(&mut browser, "logout", &[]).await;
    social.pages.log_in(&mut browser, EMAIL, PASSWORD).await;
    browser.open(&callback).await.expect_error(400, "invalid_state");
    assert_eq!(social.counts().await.1, 0);
}

#[tokio::test]
async fn an_identity_of_another_account_is_not_linked() {
    let social = SocialPages::start().await;
    social.log_in(&mut social.pages.new_browser(), &grace()).await.expect_at(&social.path("account"));
    let mut browser = social.pages.logged_in_browser(EMAIL).await;
    let started = authorization(&social.press(&mut browser, "link").await);
    let refused = browser.open(&social.callback(&started, &grace())).await;
    assert_eq!(refused.path(), social.path("account/identities"));
    refused.expect_error(200, "access_denied");
    assert_eq!(social.counts().await.1, 1);
}

#[tokio::test]
async fn linking_needs_a_recent_login() {
    let social = SocialPages::start().await;
    let mut browser = social.pages.logged_in_browser(EMAIL).await;
    let client = social.pages.test_app.client().authenticate(social.pages.test_app.id(), EMAIL, PASSWORD).await;
    let sessions = client.get("sessions").await.expect(StatusCode::OK);
    let own = sessions.body["sessions"].as_array().unwrap().iter().find(|session| session["kind"] == "browser");
    let session = own.expect("a browser session")["id"].as_str().unwrap().to_owned();
    let user = client.get("user").await.expect(StatusCode::OK).string("id").to_owned();
    social.pages.test_app.backdate_login(&user, &session, 301).await;
    let refused = social.press(&mut browser, "link").await.expect_error(401, "reauthentication_required");
    let login = refused.links().into_iter().find(|link| link.starts_with(&social.path("login?"))).expect("a link");
    let login = browser.open(&login).await.expect_at(&social.path("login"));
    let fields = [("email", EMAIL), ("password", PASSWORD)];
    let back = browser.submit(&login, &social.path("login"), &fields).await;
    back.expect_at(&social.path("account/identities"));
    authorization(&social.press(&mut browser, "link").await);
}
