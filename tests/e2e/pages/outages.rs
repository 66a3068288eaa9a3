//! Pages while a store is unavailable.

use latchkey_tests::{page_browser::LoadedPage, passwords::PASSWORD, stack::Stack};

use super::{EMAIL, PagesTest, app};

#[track_caller]
fn expect_unavailable(page: LoadedPage) {
    let page = page.expect_error(503, "temporarily_unavailable");
    assert!(page.headers.contains_key("retry-after"), "{:?}", page.headers);
}

#[tokio::test]
async fn pages_that_need_no_session_are_shown_without_redis_but_no_form_can_be_sent() {
    let pages = PagesTest::of(app(), Stack::builder().proxied()).await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let mut stranger = pages.new_browser();
    let login = pages.open(&mut stranger, "login").await;
    pages.test_app.stack.redis_proxy.as_ref().expect("a proxy").refuse().await;
    for page in ["login", "register", "confirm?code=x", "forgot", "reset"] {
        let path = page.split('?').next().unwrap();
        pages.open(&mut stranger, page).await.expect_at(&pages.path(path));
        pages.open(&mut browser, page).await.expect_at(&pages.path(path));
    }
    let fields = [("email", EMAIL), ("password", PASSWORD)];
    expect_unavailable(stranger.submit(&login, &pages.path("login"), &fields).await);
    expect_unavailable(pages.fill_in(&mut stranger, "forgot", &[("email", EMAIL)]).await);
    expect_unavailable(pages.open(&mut browser, "account").await);
}

#[tokio::test]
async fn a_user_can_list_sessions_and_log_out_without_postgres() {
    let pages = PagesTest::of(app(), Stack::builder().proxied()).await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    pages.test_app.stack.postgres_proxy.as_ref().expect("a proxy").refuse().await;
    expect_unavailable(pages.open(&mut browser, "account").await);
    expect_unavailable(pages.log_in(&mut pages.new_browser(), EMAIL, PASSWORD).await);
    pages.open(&mut browser, "account/sessions").await.expect_at(&pages.path("account/sessions"));
    pages.fill_in(&mut browser, "logout", &[]).await.expect_at(&pages.path("logout"));
    assert!(!pages.is_logged_in(&mut browser).await);
}
