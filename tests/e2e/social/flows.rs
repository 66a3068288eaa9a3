//! A flow from *redirect* to *callback*: once, by one browser, for one App and Provider.

use std::{collections::BTreeMap, sync::Arc};

use futures::future::join_all;
use http::{Method, StatusCode};
use latchkey_tests::{builders::Provider, client::Answer, stack::Stack};
use serde_json::json;
use tokio::sync::Barrier;

use super::{Asked, Browser, DONE, Landed, Person, Social, app, provider::Upstream, seven};
use crate::support::Shop;

const EMAIL: &str = "grace@example.com";

fn grace() -> Person {
    Person::verified("1", EMAIL)
}

#[track_caller]
fn invalid_state(answer: Answer) {
    let answer = answer.expect_error(StatusCode::BAD_REQUEST, "invalid_state");
    assert_eq!(answer.header("location"), None);
}

#[tokio::test]
async fn a_user_goes_to_the_provider_and_comes_back_with_the_seven_parameters() {
    let social = Social::open().await;
    let mut browser = social.browser();
    let state = "the app's own é&=?#+%20\"'";
    let query = url::form_urlencoded::Serializer::new(String::new()).append_pair("state", state).finish();
    let answer = browser.go(&format!("{}?{query}", social.path("redirect"))).await.expect(StatusCode::FOUND);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
    let cookie = answer.header("set-cookie").expect("a cookie");
    assert!(cookie.contains("HttpOnly") && cookie.contains("Path=/"), "{cookie}");
    let asked = Asked::of(answer.header("location").expect("an address"));
    assert!(!asked.url.as_str().contains("the%20app"), "the app's state stays here");
    assert_eq!(asked.parameter("client_id"), "client-of-local");
    let callback = format!("{}/{}", social.shop.stack.base_url(), social.path("callback"));
    assert_eq!(asked.parameter("redirect_uri"), callback);

    let code = social.upstream.log_in(&asked, &grace());
    let answer = browser.come_back(&social.path("callback"), &asked, &code).await;
    assert!(browser.cookies.is_empty(), "the cookie went with the flow");
    let landed = Landed::session(&answer);
    assert!(landed.location.starts_with(&format!("{DONE}?")), "{}", landed.location);
    assert_eq!(landed.get("state"), state);
    assert_eq!(landed.get("email_verified"), "true");
    assert_eq!(landed.parameters.len(), 8);
    social.assert_alive(&social.shop.look(landed.get("access_token")).await);

    let again = Landed::session(&social.sign_in(&grace()).await);
    assert_eq!(again.get("local_id"), landed.get("local_id"), "one user for one identity");
    assert!(!again.parameters.contains_key("state"));
    assert_eq!(social.made().await, (1, 1, 2));
}

#[tokio::test]
async fn json_tells_the_providers_address() {
    let social = Social::open().await;
    let answer = social.browser().go(&format!("{}?format=json", social.path("redirect"))).await;
    let answer = answer.expect(StatusCode::OK);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("set-cookie"), None);
    let asked = Asked::of(answer.string("url"));
    assert_eq!(asked.parameter("client_id"), "client-of-local");
    assert!(asked.parameter("redirect_uri").ends_with(&social.path("callback")));
    for bad in ["format=xml", "format=", "format=json&format=json", "state=%00", "code_challenge=plain"] {
        let answer = social.browser().go(&format!("{}?{bad}", social.path("redirect"))).await;
        answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let long = "x".repeat(513);
    let answer = social.browser().go(&format!("{}?state={long}", social.path("redirect"))).await;
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    social.browser().begin(&format!("{}?state={}", social.path("redirect"), &long[1..])).await;
}

#[tokio::test]
async fn a_state_that_is_missing_wrong_or_anothers_leads_nowhere() {
    let other_app = app();
    let social = Social::of(app(), Stack::builder().app(&other_app)).await;
    let mut browser = social.browser();
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    let callback = social.path("callback");
    let state = asked.state();
    let changed = format!("{}{}", if state.starts_with('A') { "B" } else { "A" }, &state[1..]);
    for query in [
        String::new(),
        format!("?code={code}"),
        format!("?code={code}&state="),
        format!("?code={code}&state=x"),
        format!("?code={code}&state={changed}"),
        format!("?code={code}&state={state}&state={state}"),
        format!("?code={code}&state={state}%20"),
        format!("?error=access_denied&state={changed}"),
    ] {
        invalid_state(browser.go(&format!("{callback}{query}")).await);
    }
    // Another Provider of the App, another App, another browser.
    invalid_state(browser.come_back(&social.path_of("other", "callback"), &asked, &code).await);
    let elsewhere = format!("{}/local/callback", other_app.id());
    invalid_state(browser.come_back(&elsewhere, &asked, &code).await);
    let mut stranger = social.browser();
    invalid_state(stranger.come_back(&callback, &asked, &code).await);
    stranger.begin(&social.path("redirect")).await;
    invalid_state(stranger.come_back(&callback, &asked, &code).await);
    assert_eq!(social.made().await, (0, 0, 0));
    assert_eq!(social.upstream.exchanges(), 0, "the provider was not asked");

    // None of this has used it.
    let cookies = browser.cookies.clone();
    Landed::session(&browser.come_back(&callback, &asked, &code).await);
    browser.cookies = cookies;
    invalid_state(browser.come_back(&callback, &asked, &code).await);
    assert_eq!(social.made().await, (1, 1, 1));
    assert_eq!(social.upstream.exchanges(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_callbacks_with_one_state_one_wins() {
    let social = Social::of(app(), Stack::builder().servers(2)).await;
    let mut browser = social.browser();
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    let answers = callbacks_at_once(&social, &[(&browser, &asked, code.as_str()); 8]).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == StatusCode::FOUND);
    assert_eq!(won.len(), 1);
    Landed::session(&won[0]);
    lost.into_iter().for_each(invalid_state);
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_callbacks_for_a_new_identity_make_one_user() {
    let social = Social::of(app(), Stack::builder().servers(2)).await;
    for (round, person) in [grace(), Person::unverified("2", EMAIL)].into_iter().enumerate() {
        let mut flows = Vec::new();
        for _ in 0..6 {
            let mut browser = social.browser();
            let asked = browser.begin(&social.path("redirect")).await;
            let code = social.upstream.log_in(&asked, &person);
            flows.push((browser, asked, code));
        }
        let flows: Vec<_> = flows.iter().map(|(browser, asked, code)| (browser, asked, code.as_str())).collect();
        let answers = callbacks_at_once(&social, &flows).await;
        let mut users: Vec<String> =
            answers.iter().map(|answer| Landed::session(answer).get("local_id").to_owned()).collect();
        users.dedup();
        assert_eq!(users.len(), 1);
        let round = round + 1;
        let rows = i64::try_from(round).expect("a small number");
        assert_eq!(social.made().await, (rows, rows, 6 * round));
    }
}

async fn callbacks_at_once(social: &Social, flows: &[(&Browser, &Asked, &str)]) -> Vec<Answer> {
    let start = Arc::new(Barrier::new(flows.len()));
    let servers = social.shop.stack.servers().len();
    let calls = flows.iter().enumerate().map(|(number, (browser, asked, code))| {
        let mut browser =
            Browser { client: social.shop.stack.client_of(number % servers), cookies: browser.cookies.clone() };
        let path = format!("{}?state={}&code={code}", social.path("callback"), asked.state());
        let start = Arc::clone(&start);
        tokio::spawn(async move {
            start.wait().await;
            browser.go(&path).await
        })
    });
    join_all(calls).await.into_iter().map(|call| call.expect("a call does not panic")).collect()
}

#[tokio::test]
async fn redis_gone_between_redirect_and_callback_is_told_to_the_app() {
    let social = Social::of(app(), Stack::builder().proxied()).await;
    let mut browser = social.browser();
    let asked = browser.begin(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.log_in(&asked, &grace());
    let proxy = social.shop.stack.redis_proxy.as_ref().expect("a proxy");
    proxy.refuse().await;
    let answer = browser.come_back(&social.path("callback"), &asked, &code).await;
    let landed = Landed::error(&answer, "temporarily_unavailable");
    assert_eq!(landed.get("state"), "mine");
    assert_eq!(social.upstream.exchanges(), 0);
    // A flow that begins while it is away is none that Redis would have to know of yet.
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    proxy.restore().expect("the port is free");
    let answer = social
        .shop
        .recovers("a login by mail", async || {
            social.shop.client().forgot_password(social.shop.id(), "nobody@example.com").await
        })
        .await;
    assert_eq!(answer.status, StatusCode::OK);
    Landed::session(&browser.come_back(&social.path("callback"), &asked, &code).await);
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn what_the_provider_says_no_with_is_told_to_the_app_and_nothing_else_of_it() {
    let social = Social::open().await;
    let mut browser = social.browser();
    for (said, told) in [
        ("access_denied", "access_denied"),
        ("invalid_request", "invalid_request"),
        ("unauthorized_client", "unauthorized_client"),
        ("unsupported_response_type", "unsupported_response_type"),
        ("invalid_scope", "invalid_scope"),
        ("server_error", "server_error"),
        ("temporarily_unavailable", "temporarily_unavailable"),
        ("user_cancelled_authorize", "access_denied"),
        ("login_required", "provider_error"),
        ("tell-tale", "provider_error"),
        ("", "provider_error"),
    ] {
        let asked = browser.begin(&format!("{}?state=mine", social.path("redirect"))).await;
        let query = format!("state={}&error={said}&error_description=tell-tale&error_uri=tell-tale", asked.state());
        let answer = browser.go(&format!("{}?{query}", social.path("callback"))).await;
        let landed = Landed::error(&answer, told);
        assert_eq!(landed.get("state"), "mine");
        assert!(!landed.location.contains("tell-tale"), "{}", landed.location);
        assert!(landed.location.contains("error_description=") && !landed.location.contains(' '));
        invalid_state(browser.go(&format!("{}?{query}", social.path("callback"))).await);
    }
    // Nothing at all, an empty code, a wrong code, a provider that is down.
    for query in ["", "&code=", "&code=wrong"] {
        let asked = browser.begin(&social.path("redirect")).await;
        let answer = browser.go(&format!("{}?state={}{query}", social.path("callback"), asked.state())).await;
        Landed::error(&answer, "provider_error");
    }
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    social.upstream.break_down(true);
    let answer = browser.come_back(&social.path("callback"), &asked, &code).await;
    let landed = Landed::error(&answer, "temporarily_unavailable");
    assert!(!landed.location.contains("tell-tale"));
    assert!(browser.cookies.is_empty());
    assert_eq!(social.made().await, (0, 0, 0));
}

#[tokio::test]
async fn link_scanners_get_405_and_use_nothing_up() {
    let social = Social::open().await;
    let mut browser = social.browser();
    let head = browser.request(Method::HEAD, &social.path("redirect"));
    let answer = browser.send(head).await.expect(StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.header("allow"), Some("GET, OPTIONS"));
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    let path = format!("{}?state={}&code={code}", social.path("callback"), asked.state());
    let answer = browser.client.send(browser.request(Method::HEAD, &path)).await;
    let answer = answer.expect(StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.header("allow"), Some("GET, POST, OPTIONS"));
    Landed::session(&browser.go(&path).await);
    let answer = browser.go("nobody/local/redirect").await;
    answer.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    for operation in ["redirect", "callback"] {
        let answer = browser.go(&social.path_of("nobody", operation)).await;
        answer.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    }
}

#[tokio::test]
async fn a_provider_may_come_back_by_post() {
    let social = Social::open().await;
    let mut browser = social.browser();
    let asked = browser.begin(&social.path("redirect")).await;
    let code = social.upstream.log_in(&asked, &grace());
    let post = browser
        .request(Method::POST, &social.path("callback"))
        // The provider's own page sends the form.
        .header("origin", "https://provider.example")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(format!("state={}&code={code}&user=%7B%7D", asked.state()));
    Landed::session(&browser.send(post).await);
    let json = browser.request(Method::POST, &social.path("callback")).json(&json!({ "state": asked.state() }));
    browser.send(json).await.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn two_tabs_do_not_meet_and_the_oldest_of_five_goes() {
    let social = Social::open().await;
    let mut browser = social.browser();
    let mut flows = Vec::new();
    for _ in 0..5 {
        flows.push(browser.begin(&social.path("redirect")).await);
        // The next one is younger by the clock that tells them apart.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    assert_eq!(browser.cookies.len(), 4);
    for (number, asked) in flows.iter().enumerate().rev() {
        let code = social.upstream.log_in(asked, &grace());
        let answer = browser.come_back(&social.path("callback"), asked, &code).await;
        if number == 0 { invalid_state(answer) } else { drop(Landed::session(&answer)) }
    }
    assert!(browser.cookies.is_empty());
}

#[tokio::test]
async fn a_page_of_the_same_site_gets_a_flow_of_its_browser() {
    let social = Social::with(app().set("/browserBinding", "Required")).await;
    let json = format!("{}?format=json", social.path("redirect"));
    for site in ["same-origin", "same-site"] {
        let mut browser = social.browser();
        let request = browser.request(Method::GET, &json).header("sec-fetch-site", site);
        let answer = browser.send(request).await.expect(StatusCode::OK);
        assert_eq!(browser.cookies.len(), 1);
        let asked = Asked::of(answer.string("url"));
        let code = social.upstream.log_in(&asked, &grace());
        invalid_state(social.browser().come_back(&social.path("callback"), &asked, &code).await);
        Landed::session(&browser.come_back(&social.path("callback"), &asked, &code).await);
    }
    for site in [None, Some("cross-site"), Some("none")] {
        let mut browser = social.browser();
        let request = browser.request(Method::GET, &json);
        let request = site.into_iter().fold(request, |request, site| request.header("sec-fetch-site", site));
        browser.send(request).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    assert_eq!(social.shop.flows().await, 0);
}

#[tokio::test]
async fn a_flow_of_no_browser_is_kept_in_redis_and_used_once() {
    let social = Social::open().await;
    let client = social.browser();
    let json = format!("{}?format=json&state=mine", social.path("redirect"));
    let answer = social.browser().go(&json).await.expect(StatusCode::OK);
    assert_eq!(social.shop.flows().await, 1);
    let asked = Asked::of(answer.string("url"));
    let code = social.upstream.log_in(&asked, &grace());
    invalid_state(social.browser().come_back(&social.path_of("other", "callback"), &asked, &code).await);
    let path = format!("{}?state={}&code={code}", social.path("callback"), asked.state());
    let (first, second) = tokio::join!(client.client.get(&path), client.client.get(&path));
    let (won, lost) = if first.status == StatusCode::FOUND { (first, second) } else { (second, first) };
    assert_eq!(Landed::session(&won).get("state"), "mine");
    invalid_state(lost);
    assert_eq!(social.shop.flows().await, 0);
    assert_eq!(social.made().await, (1, 1, 1));
}

#[tokio::test]
async fn a_client_address_begins_thirty_unbound_flows_a_minute() {
    let social = Social::open().await;
    let mut browser = social.browser();
    let json = format!("{}?format=json", social.path("redirect"));
    for _ in 0..30 {
        browser.go(&json).await.expect(StatusCode::OK);
    }
    let answer = browser.go(&json).await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(answer.header("ratelimit-policy"), Some("\"unboundFlowsPerClient\";q=30;w=60"));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(social.shop.flows().await, 30);
    social.browser().go(&json).await.expect(StatusCode::OK);
    browser.begin(&social.path("redirect")).await;
}

#[tokio::test]
async fn a_page_of_a_foreign_origin_begins_no_flow_that_a_cookie_holds() {
    let origin = "https://shop.example.com";
    let social = Social::with(app().set("/allowedOrigins", json!([origin]))).await;
    let ask = async |origin: &str, query: &str| {
        let mut browser = social.browser();
        let request = browser.request(Method::GET, &format!("{}?{query}", social.path("redirect")));
        let request = request.header("origin", origin).header("sec-fetch-site", "same-site");
        browser.send(request).await
    };
    for query in ["format=json", ""] {
        for foreign in ["https://evil.example", "null"] {
            let answer = ask(foreign, query).await.expect_error(StatusCode::FORBIDDEN, "origin_not_allowed");
            assert_eq!(answer.header("set-cookie"), None);
        }
    }
    let answer = ask(origin, "format=json").await.expect(StatusCode::OK);
    assert_eq!(answer.header("access-control-allow-origin"), Some(origin));
    assert_eq!(answer.header("access-control-allow-credentials"), Some("true"));
    // Where no cookie takes part, it is answered without CORS headers.
    let mut browser = social.browser();
    let request = browser.request(Method::GET, &format!("{}?format=json", social.path("redirect")));
    let answer = browser.send(request.header("origin", "https://evil.example")).await.expect(StatusCode::OK);
    assert_eq!(answer.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn an_app_may_want_its_parameters_in_the_fragment() {
    let social = Social::with(app().set("/callbackMode", "Fragment")).await;
    let landed = Landed::session(&social.sign_in(&grace()).await);
    assert!(landed.location.starts_with(&format!("{DONE}#access_token=")), "{}", landed.location);
    let mut browser = social.browser();
    let asked = browser.begin(&social.path("redirect")).await;
    let answer = browser.go(&format!("{}?state={}&error=access_denied", social.path("callback"), asked.state())).await;
    let landed = Landed::error(&answer, "access_denied");
    assert!(landed.location.starts_with(&format!("{DONE}#error=")), "{}", landed.location);
}

#[tokio::test]
async fn a_provider_without_its_secret_is_away() {
    let upstream = Upstream::start().await;
    let nothing = json!({ "name": "nobody", "key": "client-secret" });
    let provider = upstream.provider("local").set("clientSecretRef", nothing);
    let app = app();
    let shop = Shop::of(app, Stack::builder().provider(&provider)).await;
    let path = format!("{}/local/redirect", shop.id());
    let answer = shop.client().get(&path).await;
    answer.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    let login = shop.client().post(&format!("{}/local/login", shop.id()), &json!({ "token": "x" })).await;
    login.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
}

#[tokio::test]
async fn a_login_with_the_providers_token_answers_the_seven_fields() {
    let social = Social::open().await;
    let answer = social.login(&grace()).await.expect(StatusCode::OK);
    seven(&answer.body);
    assert_eq!(answer.body["email_verified"], true);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    social.assert_alive(&social.shop.look(answer.string("access_token")).await);
    // The same identity as by way of the browser.
    let landed = Landed::session(&social.sign_in(&grace()).await);
    assert_eq!(landed.get("local_id"), answer.string("local_id"));

    let client = social.shop.client();
    let wrong = client.post(&social.path("login"), &json!({ "token": "wrong" })).await;
    let wrong = wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_provider_token");
    assert!(wrong.header("www-authenticate").is_some());
    for body in [json!({}), json!({ "token": "" }), json!({ "token": 1 }), json!({ "token": "x", "nonce": 1 })] {
        let answer = client.post(&social.path("login"), &body).await;
        answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let answer = client.post(&social.path_of("nobody", "login"), &json!({ "token": "x" })).await;
    answer.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    assert_eq!(social.made().await, (1, 1, 2));
}

/// RFC 9207, 2.4: an attacker's server must not be able to speak for the provider by an error either.
#[tokio::test]
async fn an_error_of_another_issuer_is_not_the_providers() {
    let github = Provider::new("github", "github");
    let app = app().set("/providerRefs", json!([{ "name": "github" }]));
    let shop = Shop::of(app, Stack::builder().provider(&github)).await;
    let come_back = async |query: &str| {
        let mut browser = Browser { client: shop.client(), cookies: BTreeMap::new() };
        let asked = browser.begin(&format!("{}/github/redirect", shop.id())).await;
        browser.go(&format!("{}/github/callback?state={}&{query}", shop.id(), asked.state())).await
    };
    Landed::error(&come_back("error=access_denied").await, "access_denied");
    let own = "https%3A%2F%2Fgithub.com%2Flogin%2Foauth";
    Landed::error(&come_back(&format!("error=access_denied&iss={own}")).await, "access_denied");
    for other in ["https%3A%2F%2Fevil.example", "", "https%3A%2F%2Fgithub.com"] {
        Landed::error(&come_back(&format!("error=access_denied&iss={other}")).await, "provider_error");
    }
}

#[tokio::test]
async fn an_app_that_wants_bound_flows_ends_the_unbound_ones_too() {
    let social = Social::open().await;
    let begin = async || {
        let answer = social.browser().go(&format!("{}?format=json", social.path("redirect"))).await;
        let asked = Asked::of(answer.expect(StatusCode::OK).string("url"));
        let code = social.upstream.log_in(&asked, &grace());
        format!("{}?state={}&code={code}", social.path("callback"), asked.state())
    };
    let (one, other) = (begin().await, begin().await);
    Landed::session(&social.browser().go(&one).await);
    social.shop.edit_rendered(|document| document["browserBinding"] = json!("Required")).await;
    let answer = social.browser().go(&format!("{}?format=json", social.path("redirect"))).await;
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    invalid_state(social.browser().go(&other).await);
}
