//! Redirect URLs: users are redirected only to URLs on the App's list. URLs are compared byte for byte, except for the
//! ports of loopback URLs.

use http::StatusCode;
use serde_json::json;
use url::form_urlencoded::byte_serialize;

use super::{AppRedirect, OTHER_REDIRECT_URL, Person, REDIRECT_URL, SocialTest, app};

/// URLs that are not on the App's list of redirect URLs. The test percent-encodes them.
const HOSTILE_URLS: [&str; 84] = [
    "",
    " ",
    "/",
    "//",
    "/auth/done",
    "//shop.example.com/auth/done",
    "shop.example.com/auth/done",
    "https:",
    "https://",
    "https:///",
    "https://shop.example.com",
    "https://shop.example.com/",
    "https://shop.example.com/auth",
    "https://shop.example.com/auth/",
    "https://shop.example.com/auth/done/",
    "https://shop.example.com/auth/done/..",
    "https://shop.example.com/auth/done/../../evil",
    "https://shop.example.com/auth/./done",
    "https://shop.example.com/auth/x/../done",
    "https://shop.example.com/auth/%2e/done",
    "https://shop.example.com/auth/%2e%2e/auth/done",
    "https://shop.example.com//auth/done",
    "https://shop.example.com/auth//done",
    "https://shop.example.com/auth%2fdone",
    "https://shop.example.com/auth%2Fdone",
    "https://shop.example.com/auth%5cdone",
    "https://shop.example.com/auth\\done",
    "https:\\\\shop.example.com\\auth\\done",
    "https:/\\shop.example.com/auth/done",
    "https://shop.example.com\\@evil.example/auth/done",
    "https://evil.example\\.shop.example.com/auth/done",
    "https:/shop.example.com/auth/done",
    "https:shop.example.com/auth/done",
    "http://shop.example.com/auth/done",
    "HTTPS://shop.example.com/auth/done",
    "https://SHOP.example.com/auth/done",
    "https://shop.example.com/Auth/done",
    "https://shop.example.com/auth/done?",
    "https://shop.example.com/auth/done?x=y",
    "https://shop.example.com/auth/done#",
    "https://shop.example.com/auth/done#x",
    "https://shop.example.com/auth/done;x",
    "https://shop.example.com/auth/done%00",
    "https://shop.example.com/auth/done\0",
    "https://shop.example.com/auth/done ",
    " https://shop.example.com/auth/done",
    "https://shop.example.com/auth/done\r\nLocation: https://evil.example",
    "https://shop.example.com/auth/done\n",
    "https://shop.example.com/auth/done%0d%0aSet-Cookie:a=b",
    "\thttps://shop.example.com/auth/done",
    "https://shop.exa\tmple.com/auth/done",
    "https://shop.example.com:443/auth/done",
    "https://shop.example.com:8443/auth/done",
    "https://shop.example.com:/auth/done",
    "https://shop.example.com:0443/auth/done",
    "https://user@shop.example.com/auth/done",
    "https://user:password@shop.example.com/auth/done",
    "https://@shop.example.com/auth/done",
    "https://shop.example.com@evil.example/auth/done",
    "https://shop.example.com:443@evil.example/auth/done",
    "https://evil.example/https://shop.example.com/auth/done",
    "https://evil.example#https://shop.example.com/auth/done",
    "https://evil.example?https://shop.example.com/auth/done",
    "https://shop.example.com./auth/done",
    "https://shop.example.com.evil.example/auth/done",
    "https://evilshop.example.com/auth/done",
    "https://shop.example.co/auth/done",
    "https://shop。example。com/auth/done",
    "https://shop.example.com。evil.example/auth/done",
    "https://ѕhop.example.com/auth/done",
    "https://xn--hop-7dd.example.com/auth/done",
    "https://ｓhop.example.com/auth/done",
    "https://shop%2eexample.com/auth/done",
    "https://[::ffff:203.0.113.1]/auth/done",
    "http://[::1]/done",
    "http://127.0.0.1.evil.example/done",
    "http://127.0.0.1:80@evil.example/done",
    "http://127.1/done",
    "http://2130706433/done",
    "http://[::ffff:127.0.0.1]/done",
    "http://127.0.0.1:99999/done",
    "javascript:alert(document.domain)//https://shop.example.com/auth/done",
    "data:text/html,<script>location='https://evil.example'</script>",
    "com.example.shop:/done",
];

#[tokio::test]
async fn hostile_redirect_urls_are_rejected() {
    let social = SocialTest::start().await;
    for url in HOSTILE_URLS {
        let encoded: String = byte_serialize(url.as_bytes()).collect();
        for query in [format!("redirect_url={encoded}"), format!("format=json&redirect_url={encoded}")] {
            let mut browser = social.new_client();
            let response = browser.get(&format!("{}?{query}", social.path("redirect"))).await;
            let response = response.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
            assert_eq!(response.header("location"), None, "{url:?}");
            assert!(browser.cookies.is_empty(), "{url:?} starts no flow");
            assert!(!response.text.contains("evil.example"), "the response does not repeat the URL: {}", response.text);
        }
    }
    assert_eq!(social.counts().await, (0, 0, 0));
    assert_eq!(social.test_app.flow_count().await, 0, "Redis stores no flow either");
    assert_eq!(social.upstream.exchange_count(), 0);
}

#[tokio::test]
async fn a_repeated_or_malformed_redirect_url_is_rejected() {
    let social = SocialTest::start().await;
    for query in [
        format!("redirect_url={REDIRECT_URL}&redirect_url={REDIRECT_URL}"),
        format!("redirect_url={REDIRECT_URL}&redirect_url=https://evil.example"),
        format!("redirect_url={REDIRECT_URL}&redirect%5Furl={REDIRECT_URL}"),
        "redirect_url".to_owned(),
        "redirect_url=".to_owned(),
        "redirect_url[]=https://shop.example.com/auth/done".to_owned() + "&redirect_url=x",
    ] {
        let response = social.new_client().get(&format!("{}?{query}", social.path("redirect"))).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
        assert_eq!(response.header("location"), None);
        assert_eq!(response.header("set-cookie"), None);
    }
    let response = social.new_client().get(&format!("{}?redirect_url=%ff%fe", social.path("redirect"))).await;
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(social.counts().await, (0, 0, 0));
}

#[tokio::test]
async fn every_listed_redirect_url_is_accepted_and_the_first_is_the_default() {
    let social = SocialTest::start().await;
    let person = Person::verified("1", "grace@example.com");
    let encoded = |url: &str| byte_serialize(url.as_bytes()).collect::<String>();
    for (requested, target) in [
        (None, REDIRECT_URL),
        (Some(REDIRECT_URL), REDIRECT_URL),
        (Some(OTHER_REDIRECT_URL), OTHER_REDIRECT_URL),
        (Some("http://127.0.0.1/done"), "http://127.0.0.1/done"),
        (Some("http://127.0.0.1:51004/done"), "http://127.0.0.1:51004/done"),
    ] {
        let query = requested.map(|url| format!("?redirect_url={}", encoded(url))).unwrap_or_default();
        let mut browser = social.new_client();
        let authorization = browser.start_flow(&format!("{}{query}", social.path("redirect"))).await;
        let code = social.upstream.approve(&authorization, &person);
        let response = browser.callback(&social.path("callback"), &authorization, &code).await;
        let redirect = AppRedirect::expect_session(&response);
        let added_query = redirect.location.strip_prefix(target).unwrap_or_else(|| panic!("{}", redirect.location));
        assert!(added_query.starts_with(if target.contains('?') { "&access_token=" } else { "?access_token=" }));
    }
    assert_eq!(social.counts().await, (1, 1, 5));
}

#[tokio::test]
async fn a_redirect_url_that_was_removed_from_the_list_gets_nothing_not_even_an_error() {
    let social = SocialTest::start().await;
    let person = Person::verified("1", "grace@example.com");
    for is_error in [false, true] {
        social
            .test_app
            .edit_rendered(|document| document["redirectURLs"] = json!([REDIRECT_URL, OTHER_REDIRECT_URL]))
            .await;
        let mut browser = social.new_client();
        let authorization =
            browser.start_flow(&format!("{}?redirect_url={REDIRECT_URL}", social.path("redirect"))).await;
        let code = social.upstream.approve(&authorization, &person);
        social.test_app.edit_rendered(|document| document["redirectURLs"] = json!([OTHER_REDIRECT_URL])).await;
        let response = if is_error {
            browser
                .get(&format!("{}?state={}&error=access_denied", social.path("callback"), authorization.state()))
                .await
        } else {
            browser.callback(&social.path("callback"), &authorization, &code).await
        };
        let response = response.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
        assert_eq!(response.header("location"), None);
    }
    assert_eq!(social.counts().await, (0, 0, 0));
    assert_eq!(social.upstream.exchange_count(), 0, "the provider was not called");
}

#[tokio::test]
async fn callback_responds_with_json_and_redirect_accepts_no_url_if_the_app_has_no_redirect_urls() {
    let social = SocialTest::with_app(app().set("/redirectURLs", json!([]))).await;
    let response = social.new_client().get(&format!("{}?redirect_url={REDIRECT_URL}", social.path("redirect"))).await;
    response.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");

    let mut browser = social.new_client();
    let authorization = browser.start_flow(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.approve(&authorization, &Person::verified("1", "grace@example.com"));
    let response = browser.callback(&social.path("callback"), &authorization, &code).await.expect(StatusCode::OK);
    super::assert_session_fields(&response.body);
    assert_eq!(response.string("state"), "mine");
    assert_eq!(response.header("cache-control"), Some("no-store"));

    let authorization = browser.start_flow(&social.path("redirect")).await;
    let refused =
        browser.get(&format!("{}?state={}&error=access_denied", social.path("callback"), authorization.state())).await;
    refused.expect_error(StatusCode::FORBIDDEN, "access_denied");
    assert_eq!(social.counts().await, (1, 1, 1));
}
