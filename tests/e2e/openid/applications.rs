//! The list of applications that have access to an account.

use http::StatusCode;
use latchkey_tests::{page_browser::LoadedPage, stack::Stack};

use super::provider_test::{EMAIL, OTHER_EMAIL, ProviderTest, app, reply};
use crate::support::TestApp;

/// Asserts that the list of applications reports a removal. Returns the list.
fn expect_removed(test: &ProviderTest, page: LoadedPage) -> LoadedPage {
    let page = page.expect_at(&test.path("account/applications"));
    assert!(page.text().contains("no longer has access"), "{}", page.html);
    page
}

#[tokio::test]
async fn withdrawing_a_consent_ends_its_sessions() {
    let test = ProviderTest::with_client(|client| client.set("/consent", "Once")).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let list = test.path("account/applications");
    let empty = browser.open(&list).await.expect_at(&list);
    assert!(empty.forms().is_empty() && empty.text().contains("No application can use your account"));
    let scopes = [("scope", "openid offline_access")];
    let consent = test.authorize(&mut browser, &scopes).await.expect_at(&test.path("consent"));
    let code = reply(&test.decide(&mut browser, &consent, "allow").await)["code"].clone();
    let tokens = test.exchange(&code).await.expect(StatusCode::OK);
    let refresh = tokens.string("refresh_token").to_owned();
    // Another user's access stays.
    let mut other = test.logged_in_browser(OTHER_EMAIL).await;
    let consent = test.authorize(&mut other, &[]).await.expect_at(&test.path("consent"));
    test.decide(&mut other, &consent, "allow").await;

    let page = browser.open(&list).await.expect_at(&list);
    assert!(page.text().contains("Our Grafana"), "{}", page.html);
    assert_eq!(page.form(&list).value("client"), test.client.client_id());
    let page = expect_removed(&test, browser.submit(&page, &list, &[]).await);
    assert!(page.forms().is_empty(), "{}", page.html);
    test.refresh(&refresh).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    assert_eq!(test.consent_count().await, 1, "that of the other user");
    test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    test.code(&mut other, &[("prompt", "none")]).await;
    test.wait_for_event(EMAIL, "consent_withdrawn").await;
}

#[tokio::test]
async fn a_session_without_a_consent_is_listed_if_it_outlives_the_logout() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let list = test.path("account/applications");
    let code = test.code(&mut browser, &[]).await;
    test.exchange(&code).await.expect(StatusCode::OK);
    assert!(browser.open(&list).await.expect_at(&list).forms().is_empty(), "it ends with the logout");
    let code = test.code(&mut browser, &[("scope", "openid offline_access")]).await;
    let tokens = test.exchange(&code).await.expect(StatusCode::OK);
    let sessions = browser.open(&test.path("account/sessions")).await;
    assert!(sessions.text().contains("Our Grafana · "), "{}", sessions.html);
    let page = browser.open(&list).await.expect_at(&list);
    expect_removed(&test, browser.submit(&page, &list, &[]).await);
    let refused = test.refresh(tokens.string("refresh_token")).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    test.wait_for_event(EMAIL, "consent_withdrawn").await;
}

#[tokio::test]
async fn an_application_without_access_cannot_be_removed() {
    let test = ProviderTest::with_client(|client| client.set("/consent", "Once")).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let consent = test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    test.decide(&mut browser, &consent, "allow").await;
    let list = test.path("account/applications");
    let page = browser.open(&list).await.expect_at(&list);
    for client in ["", "other", "uid", test.test_app.id()] {
        let refused = browser.submit(&page, &list, &[("client", client)]).await;
        refused.expect_error(404, "not_found");
    }
    assert_eq!(test.consent_count().await, 1);
    // Without a session, the list leads to the login page, and the login leads back to the list.
    let mut stranger = test.new_browser();
    let login = stranger.open(&list).await.expect_at(&test.path("login"));
    test.log_in_at(&mut stranger, &login, EMAIL).await.expect_at(&list);
}

#[tokio::test]
async fn the_access_of_a_removed_client_is_listed_and_withdrawn_by_uid() {
    let test = ProviderTest::with_client(|client| client.set("/consent", "Once")).await;
    let (list, account) = (test.path("account/applications"), test.path("account"));
    let mut browser = test.logged_in_browser(EMAIL).await;
    let mut never = test.logged_in_browser(OTHER_EMAIL).await;
    let scopes = [("scope", "openid offline_access")];
    let consent = test.authorize(&mut browser, &scopes).await.expect_at(&test.path("consent"));
    let code = reply(&test.decide(&mut browser, &consent, "allow").await)["code"].clone();
    test.exchange(&code).await.expect(StatusCode::OK);
    let mut connection = test.test_app.stack.database.connect().await.expect("the database is reachable");
    let uid: String =
        sqlx::query_scalar("SELECT client_uid FROM consents").fetch_one(&mut connection).await.expect("one consent");

    // Another Client now has the name of the first Client.
    test.test_app.edit_rendered(|document| document["clients"][0]["uid"] = "another".into()).await;
    let page = browser.open(&list).await.expect_at(&list);
    assert_eq!(page.form(&list).value("client"), uid);
    assert!(page.text().contains(&test.client.client_id()), "{}", page.html);
    let refused = browser.submit(&page, &list, &[("client", "another")]).await;
    refused.expect_error(404, "not_found");

    // The App now has no Client.
    test.test_app.edit_rendered(|document| document["clients"] = serde_json::json!([])).await;
    assert!(browser.open(&account).await.expect_at(&account).links().contains(&list));
    let sessions = browser.open(&test.path("account/sessions")).await;
    assert!(sessions.text().contains(&format!("{} · ", test.client.client_id())), "{}", sessions.html);
    let page = browser.open(&list).await.expect_at(&list);
    let removed = browser.submit(&page, &list, &[]).await.expect_at(&account);
    assert!(removed.text().contains("no longer has access"), "{}", removed.html);
    assert_eq!(test.consent_count().await, 0);
    let sessions = browser.open(&test.path("account/sessions")).await;
    assert!(!sessions.text().contains(&test.client.client_id()), "{}", sessions.html);
    test.wait_for_event(EMAIL, "consent_withdrawn").await;

    // If the App has no Client and the list would be empty, the list page does not exist.
    for browser in [&mut browser, &mut never] {
        assert!(!browser.open(&account).await.expect_at(&account).links().contains(&list));
        assert_eq!(browser.open(&list).await.status, StatusCode::NOT_FOUND);
    }
}

#[tokio::test]
async fn the_account_page_links_to_the_applications_only_if_the_app_has_clients() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let list = test.path("account/applications");
    assert!(browser.open(&test.path("account")).await.links().contains(&list));
    let without = ProviderTest {
        test_app: TestApp::from_builder(app(), Stack::builder()).await,
        client: test.client.clone(),
        callback: test.callback,
    };
    let mut browser = without.logged_in_browser(EMAIL).await;
    let account = browser.open(&without.path("account")).await.expect_at(&without.path("account"));
    assert!(!account.links().contains(&without.path("account/applications")), "{}", account.html);
    without.authorize(&mut browser, &[]).await.expect_error(400, "invalid_client");
}
