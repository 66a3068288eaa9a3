//! Where users may be sent: to an address on the App's list, byte for byte, and nowhere else.

use http::StatusCode;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;

use super::{DONE, Landed, OTHER, Person, Social, app};

/// What is no address on the list, as it stands in the query before encoding.
const HOSTILE: [&str; 84] = [
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
async fn no_hostile_address_is_redirected_to_or_accepted() {
    let social = Social::open().await;
    for address in HOSTILE {
        let encoded = utf8_percent_encode(address, NON_ALPHANUMERIC).to_string();
        for query in [format!("redirect_url={encoded}"), format!("format=json&redirect_url={encoded}")] {
            let mut browser = social.browser();
            let answer = browser.go(&format!("{}?{query}", social.path("redirect"))).await;
            let answer = answer.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
            assert_eq!(answer.header("location"), None, "{address:?}");
            assert!(browser.cookies.is_empty(), "{address:?} begins no flow");
            assert!(!answer.text.contains("evil.example"), "nothing of it is repeated: {}", answer.text);
        }
    }
    assert_eq!(social.made().await, (0, 0, 0));
    assert_eq!(social.shop.flows().await, 0, "none is kept in Redis either");
    assert_eq!(social.upstream.exchanges(), 0);
}

#[tokio::test]
async fn an_address_that_is_given_twice_or_raw_is_refused() {
    let social = Social::open().await;
    for query in [
        format!("redirect_url={DONE}&redirect_url={DONE}"),
        format!("redirect_url={DONE}&redirect_url=https://evil.example"),
        format!("redirect_url={DONE}&redirect%5Furl={DONE}"),
        "redirect_url".to_owned(),
        "redirect_url=".to_owned(),
        "redirect_url[]=https://shop.example.com/auth/done".to_owned() + "&redirect_url=x",
    ] {
        let answer = social.browser().go(&format!("{}?{query}", social.path("redirect"))).await;
        let answer = answer.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
        assert_eq!(answer.header("location"), None);
        assert_eq!(answer.header("set-cookie"), None);
    }
    let answer = social.browser().go(&format!("{}?redirect_url=%ff%fe", social.path("redirect"))).await;
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(social.made().await, (0, 0, 0));
}

#[tokio::test]
async fn every_address_on_the_list_is_one_and_the_first_is_the_default() {
    let social = Social::open().await;
    let person = Person::verified("1", "grace@example.com");
    let encoded = |address: &str| utf8_percent_encode(address, NON_ALPHANUMERIC).to_string();
    for (asked_for, lands_at) in [
        (None, DONE),
        (Some(DONE), DONE),
        (Some(OTHER), OTHER),
        (Some("http://127.0.0.1/done"), "http://127.0.0.1/done"),
        (Some("http://127.0.0.1:51004/done"), "http://127.0.0.1:51004/done"),
    ] {
        let query = asked_for.map(|address| format!("?redirect_url={}", encoded(address))).unwrap_or_default();
        let mut browser = social.browser();
        let asked = browser.begin(&format!("{}{query}", social.path("redirect"))).await;
        let code = social.upstream.log_in(&asked, &person);
        let answer = browser.come_back(&social.path("callback"), &asked, &code).await;
        let landed = Landed::session(&answer);
        let rest = landed.location.strip_prefix(lands_at).unwrap_or_else(|| panic!("{}", landed.location));
        assert!(rest.starts_with(if lands_at.contains('?') { "&access_token=" } else { "?access_token=" }));
    }
    assert_eq!(social.made().await, (1, 1, 5));
}

#[tokio::test]
async fn an_address_that_has_left_the_list_gets_nothing_not_even_an_error() {
    let social = Social::open().await;
    let person = Person::verified("1", "grace@example.com");
    for error in [false, true] {
        social.shop.edit_rendered(|document| document["redirectURLs"] = json!([DONE, OTHER])).await;
        let mut browser = social.browser();
        let asked = browser.begin(&format!("{}?redirect_url={DONE}", social.path("redirect"))).await;
        let code = social.upstream.log_in(&asked, &person);
        social.shop.edit_rendered(|document| document["redirectURLs"] = json!([OTHER])).await;
        let answer = if error {
            browser.go(&format!("{}?state={}&error=access_denied", social.path("callback"), asked.state())).await
        } else {
            browser.come_back(&social.path("callback"), &asked, &code).await
        };
        let answer = answer.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");
        assert_eq!(answer.header("location"), None);
    }
    assert_eq!(social.made().await, (0, 0, 0));
    assert_eq!(social.upstream.exchanges(), 0, "the provider was not asked");
}

#[tokio::test]
async fn an_app_without_addresses_gets_json_and_takes_none() {
    let social = Social::with(app().set("/redirectURLs", json!([]))).await;
    let answer = social.browser().go(&format!("{}?redirect_url={DONE}", social.path("redirect"))).await;
    answer.expect_error(StatusCode::BAD_REQUEST, "redirect_url_not_allowed");

    let mut browser = social.browser();
    let asked = browser.begin(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.log_in(&asked, &Person::verified("1", "grace@example.com"));
    let answer = browser.come_back(&social.path("callback"), &asked, &code).await.expect(StatusCode::OK);
    super::seven(&answer.body);
    assert_eq!(answer.string("state"), "mine");
    assert_eq!(answer.header("cache-control"), Some("no-store"));

    let asked = browser.begin(&social.path("redirect")).await;
    let refused = browser.go(&format!("{}?state={}&error=access_denied", social.path("callback"), asked.state())).await;
    refused.expect_error(StatusCode::FORBIDDEN, "access_denied");
    assert_eq!(social.made().await, (1, 1, 1));
}
