//! Authorization requests and responses that are sent as forms, in Chromium.

use latchkey_tests::{browser::Browser, builders::Client, passwords::PASSWORD};

use super::OtherSite;
use crate::pages::{EMAIL, PagesTest};

/// A page on another site with a form that requests an authorization code. The service must send its response as a
/// form, too.
fn form(pages: &PagesTest, client: &Client, callback: &str) -> String {
    let fields = [
        ("client_id", client.client_id()),
        ("redirect_uri", callback.to_owned()),
        ("response_type", "code".to_owned()),
        ("response_mode", "form_post".to_owned()),
        ("scope", "openid".to_owned()),
        ("state", "state-1".to_owned()),
    ];
    let inputs = fields.map(|(name, value)| format!("<input type=\"hidden\" name=\"{name}\" value=\"{value}\">"));
    format!("<form method=\"post\" action=\"{}\">{}<button>Go</button></form>", pages.url("authorize"), inputs.concat())
}

/// Logs in on the pages, and then sends the form on the other site. This must not need another login, and the browser
/// must send the response to the other site.
async fn send_form_of_other_site(browser: &Browser, has_scripts: bool) {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let client = Client::web("site", &pages.test_app.app, "http://localhost/callback");
    pages.test_app.stack.apply_client(&client).unwrap();
    pages.test_app.stack.wait_until_served(&pages.test_app.app).await.unwrap();
    let callback = OtherSite::start(vec![("/callback", "<p id=\"done\">done</p>".to_owned())]).await;
    let start = OtherSite::start(vec![("/start", form(&pages, &client, &callback.url("/callback")))]).await;

    browser.open(&pages.url("login")).await;
    pages.log_in_here(browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(browser, "account").await;
    let before = browser.cookies().await.len();
    browser.open(&start.url("/start")).await;
    browser.click("button").await;
    if !has_scripts {
        pages.wait_for_page(browser, "authorize").await;
        browser.click("main .primary").await;
    }
    let url = browser.wait_for_url("the callback", |url| url.path() == "/callback").await;
    assert_eq!(url.query(), None, "the code is in the form");
    assert_eq!(browser.text_of("#done").await, "done");
    // The cookies of the pages are as before: the browser sent none of them with the POST, and the response replaced
    // none.
    browser.open(&pages.url("account")).await;
    pages.wait_for_page(browser, "account").await;
    assert_eq!(browser.cookies().await.len(), before);
}

#[tokio::test]
async fn a_request_form_on_another_site_gets_a_response_form_without_a_new_login() {
    send_form_of_other_site(&Browser::start().await.unwrap(), true).await;
}

#[tokio::test]
async fn the_user_sends_the_response_form_with_its_button_if_scripts_are_off() {
    send_form_of_other_site(&Browser::start_without_scripts().await.unwrap(), false).await;
}
