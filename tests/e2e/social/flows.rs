//! A flow from *redirect* to *callback*: it can be used once, and only at one App and Provider. A bound flow can be
//! used only by the browser that started it.

use std::{collections::BTreeMap, sync::Arc};

use futures::future::join_all;
use http::{Method, StatusCode};
use latchkey_tests::{builders::Provider, client::ApiResponse, stack::Stack};
use serde_json::json;
use tokio::sync::Barrier;

use super::{
    AppRedirect, AuthorizationRequest, CookieClient, Person, REDIRECT_URL, SocialTest, app, assert_session_fields,
    scripted_provider::ScriptedProvider,
};
use crate::support::TestApp;

const EMAIL: &str = "grace@example.com";

fn grace() -> Person {
    Person::verified("1", EMAIL)
}

#[track_caller]
fn assert_invalid_state(response: ApiResponse) {
    let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_state");
    assert_eq!(response.header("location"), None);
}

#[tokio::test]
async fn a_user_returns_from_the_provider_with_a_session() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    let state = "the app's own é&=?#+%20\"'";
    let query = url::form_urlencoded::Serializer::new(String::new()).append_pair("state", state).finish();
    let response = browser.get(&format!("{}?{query}", social.path("redirect"))).await.expect(StatusCode::FOUND);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!(response.header("referrer-policy"), Some("no-referrer"));
    let cookie = response.header("set-cookie").expect("a cookie");
    assert!(cookie.contains("HttpOnly") && cookie.contains("Path=/"), "{cookie}");
    let authorization = AuthorizationRequest::of(response.header("location").expect("an address"));
    assert!(!authorization.url.as_str().contains("the%20app"), "the app's state is not sent to the provider");
    assert_eq!(authorization.parameter("client_id"), "client-of-local");
    let callback = format!("{}/{}", social.test_app.stack.base_url(), social.path("callback"));
    assert_eq!(authorization.parameter("redirect_uri"), callback);

    let code = social.upstream.approve(&authorization, &grace());
    let response = browser.callback(&social.path("callback"), &authorization, &code).await;
    assert!(browser.cookies.is_empty(), "the cookie is removed with the flow");
    let redirect = AppRedirect::expect_session(&response);
    assert!(redirect.location.starts_with(&format!("{REDIRECT_URL}?")), "{}", redirect.location);
    assert_eq!(redirect.parameter("state"), state);
    assert_eq!(redirect.parameter("email_verified"), "true");
    assert_eq!(redirect.parameters.len(), 8);
    social.assert_ok(&social.test_app.verify(redirect.parameter("access_token")).await);

    let second_login = AppRedirect::expect_session(&social.log_in(&grace()).await);
    assert_eq!(second_login.parameter("local_id"), redirect.parameter("local_id"), "one user for one identity");
    assert!(!second_login.parameters.contains_key("state"));
    assert_eq!(social.counts().await, (1, 1, 2));
}

#[tokio::test]
async fn format_json_returns_the_authorization_url_and_invalid_parameters_are_rejected() {
    let social = SocialTest::start().await;
    let response = social.new_client().get(&format!("{}?format=json", social.path("redirect"))).await;
    let response = response.expect(StatusCode::OK);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!(response.header("set-cookie"), None);
    let authorization = AuthorizationRequest::of(response.string("url"));
    assert_eq!(authorization.parameter("client_id"), "client-of-local");
    assert!(authorization.parameter("redirect_uri").ends_with(&social.path("callback")));
    for bad in ["format=xml", "format=", "format=json&format=json", "state=%00", "code_challenge=plain"] {
        let response = social.new_client().get(&format!("{}?{bad}", social.path("redirect"))).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let long = "x".repeat(513);
    let response = social.new_client().get(&format!("{}?state={long}", social.path("redirect"))).await;
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    social.new_client().start_flow(&format!("{}?state={}", social.path("redirect"), &long[1..])).await;
}

#[tokio::test]
async fn a_state_that_is_missing_wrong_or_used_elsewhere_is_refused() {
    let other_app = app();
    let social = SocialTest::of(app(), Stack::builder().app(&other_app)).await;
    let mut browser = social.new_client();
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    let callback = social.path("callback");
    let state = authorization.state();
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
        assert_invalid_state(browser.get(&format!("{callback}{query}")).await);
    }
    // The flow is invalid at another Provider of the App, at another App, and in another browser.
    assert_invalid_state(browser.callback(&social.path_of("other", "callback"), &authorization, &code).await);
    let other_callback = format!("{}/local/callback", other_app.id());
    assert_invalid_state(browser.callback(&other_callback, &authorization, &code).await);
    let mut stranger = social.new_client();
    assert_invalid_state(stranger.callback(&callback, &authorization, &code).await);
    stranger.start_flow(&social.path("redirect")).await;
    assert_invalid_state(stranger.callback(&callback, &authorization, &code).await);
    assert_eq!(social.counts().await, (0, 0, 0));
    assert_eq!(social.upstream.exchange_count(), 0, "the provider was not called");

    // None of these calls has used the flow up.
    let cookies = browser.cookies.clone();
    AppRedirect::expect_session(&browser.callback(&callback, &authorization, &code).await);
    browser.cookies = cookies;
    assert_invalid_state(browser.callback(&callback, &authorization, &code).await);
    assert_eq!(social.counts().await, (1, 1, 1));
    assert_eq!(social.upstream.exchange_count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_several_concurrent_callbacks_with_the_same_state_succeeds() {
    let social = SocialTest::of(app(), Stack::builder().servers(2)).await;
    let mut browser = social.new_client();
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    let responses = concurrent_callbacks(&social, &[(&browser, &authorization, code.as_str()); 8]).await;
    let (won, lost): (Vec<_>, Vec<_>) =
        responses.into_iter().partition(|response| response.status == StatusCode::FOUND);
    assert_eq!(won.len(), 1);
    AppRedirect::expect_session(&won[0]);
    lost.into_iter().for_each(assert_invalid_state);
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_callbacks_for_a_new_identity_create_one_user() {
    let social = SocialTest::of(app(), Stack::builder().servers(2)).await;
    for (round, person) in [grace(), Person::unverified("2", EMAIL)].into_iter().enumerate() {
        let mut flows = Vec::new();
        for _ in 0..6 {
            let mut browser = social.new_client();
            let authorization = browser.start_flow(&social.path("redirect")).await;
            let code = social.upstream.approve(&authorization, &person);
            flows.push((browser, authorization, code));
        }
        let flows: Vec<_> =
            flows.iter().map(|(browser, authorization, code)| (browser, authorization, code.as_str())).collect();
        let responses = concurrent_callbacks(&social, &flows).await;
        let mut users: Vec<String> = responses
            .iter()
            .map(|response| AppRedirect::expect_session(response).parameter("local_id").to_owned())
            .collect();
        users.dedup();
        assert_eq!(users.len(), 1);
        let round = round + 1;
        let rows = i64::try_from(round).expect("a small number");
        assert_eq!(social.counts().await, (rows, rows, 6 * round));
    }
}

async fn concurrent_callbacks(
    social: &SocialTest,
    flows: &[(&CookieClient, &AuthorizationRequest, &str)],
) -> Vec<ApiResponse> {
    let start = Arc::new(Barrier::new(flows.len()));
    let servers = social.test_app.stack.servers().len();
    let calls = flows.iter().enumerate().map(|(number, (browser, authorization, code))| {
        let mut browser = CookieClient {
            client: social.test_app.stack.client_of(number % servers),
            cookies: browser.cookies.clone(),
        };
        let path = format!("{}?state={}&code={code}", social.path("callback"), authorization.state());
        let start = Arc::clone(&start);
        tokio::spawn(async move {
            start.wait().await;
            browser.get(&path).await
        })
    });
    join_all(calls).await.into_iter().map(|call| call.expect("a call does not panic")).collect()
}

#[tokio::test]
async fn a_redis_outage_between_redirect_and_callback_is_reported_to_the_app() {
    let social = SocialTest::of(app(), Stack::builder().proxied()).await;
    let mut browser = social.new_client();
    let authorization = browser.start_flow(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.approve(&authorization, &grace());
    let proxy = social.test_app.stack.redis_proxy.as_ref().expect("a proxy");
    proxy.refuse().await;
    let response = browser.callback(&social.path("callback"), &authorization, &code).await;
    let redirect = AppRedirect::expect_error(&response, "temporarily_unavailable");
    assert_eq!(redirect.parameter("state"), "mine");
    assert_eq!(social.upstream.exchange_count(), 0);
    // A bound flow can start without Redis, because only its callback needs Redis.
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    proxy.restore().expect("the port is free");
    let response = social
        .test_app
        .wait_until_ok("a request that needs Redis", async || {
            social.test_app.client().forgot_password(social.test_app.id(), "nobody@example.com").await
        })
        .await;
    assert_eq!(response.status, StatusCode::OK);
    AppRedirect::expect_session(&browser.callback(&social.path("callback"), &authorization, &code).await);
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn only_the_error_code_from_the_provider_is_reported_to_the_app() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    for (sent, reported) in [
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
        let authorization = browser.start_flow(&format!("{}?state=mine", social.path("redirect"))).await;
        let query =
            format!("state={}&error={sent}&error_description=tell-tale&error_uri=tell-tale", authorization.state());
        let response = browser.get(&format!("{}?{query}", social.path("callback"))).await;
        let redirect = AppRedirect::expect_error(&response, reported);
        assert_eq!(redirect.parameter("state"), "mine");
        assert!(!redirect.location.contains("tell-tale"), "{}", redirect.location);
        assert!(redirect.location.contains("error_description=") && !redirect.location.contains(' '));
        assert_invalid_state(browser.get(&format!("{}?{query}", social.path("callback"))).await);
    }
    // Callbacks without a code, with an empty code, and with a wrong code.
    for query in ["", "&code=", "&code=wrong"] {
        let authorization = browser.start_flow(&social.path("redirect")).await;
        let response =
            browser.get(&format!("{}?state={}{query}", social.path("callback"), authorization.state())).await;
        AppRedirect::expect_error(&response, "provider_error");
    }
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    social.upstream.set_broken(true);
    let response = browser.callback(&social.path("callback"), &authorization, &code).await;
    let redirect = AppRedirect::expect_error(&response, "temporarily_unavailable");
    assert!(!redirect.location.contains("tell-tale"));
    assert!(browser.cookies.is_empty());
    assert_eq!(social.counts().await, (0, 0, 0));
}

#[tokio::test]
async fn link_scanners_get_405_and_consume_nothing() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    let head = browser.request(Method::HEAD, &social.path("redirect"));
    let response = browser.send(head).await.expect(StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(response.header("allow"), Some("GET, OPTIONS"));
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    let path = format!("{}?state={}&code={code}", social.path("callback"), authorization.state());
    let response = browser.client.send(browser.request(Method::HEAD, &path)).await;
    let response = response.expect(StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(response.header("allow"), Some("GET, POST, OPTIONS"));
    AppRedirect::expect_session(&browser.get(&path).await);
    let response = browser.get("nobody/local/redirect").await;
    response.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    for operation in ["redirect", "callback"] {
        let response = browser.get(&social.path_of("nobody", operation)).await;
        response.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    }
}

#[tokio::test]
async fn a_provider_can_return_the_browser_by_post() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let code = social.upstream.approve(&authorization, &grace());
    let post = browser
        .request(Method::POST, &social.path("callback"))
        // The form comes from a page of the provider.
        .header("origin", "https://provider.example")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(format!("state={}&code={code}&user=%7B%7D", authorization.state()));
    AppRedirect::expect_session(&browser.send(post).await);
    let json_post =
        browser.request(Method::POST, &social.path("callback")).json(&json!({ "state": authorization.state() }));
    browser.send(json_post).await.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn tabs_have_separate_flows_and_the_fifth_flow_replaces_the_oldest() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    let mut flows = Vec::new();
    for _ in 0..5 {
        flows.push(browser.start_flow(&social.path("redirect")).await);
        // Flows are ordered by their start times, so the next flow must start at least a millisecond later.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    assert_eq!(browser.cookies.len(), 4);
    for (number, authorization) in flows.iter().enumerate().rev() {
        let code = social.upstream.approve(authorization, &grace());
        let response = browser.callback(&social.path("callback"), authorization, &code).await;
        if number == 0 { assert_invalid_state(response) } else { drop(AppRedirect::expect_session(&response)) }
    }
    assert!(browser.cookies.is_empty());
}

#[tokio::test]
async fn a_page_on_the_same_site_gets_a_bound_flow() {
    let social = SocialTest::with_app(app().set("/browserBinding", "Required")).await;
    let json_path = format!("{}?format=json", social.path("redirect"));
    for site in ["same-origin", "same-site"] {
        let mut browser = social.new_client();
        let request = browser.request(Method::GET, &json_path).header("sec-fetch-site", site);
        let response = browser.send(request).await.expect(StatusCode::OK);
        assert_eq!(browser.cookies.len(), 1);
        let authorization = AuthorizationRequest::of(response.string("url"));
        let code = social.upstream.approve(&authorization, &grace());
        assert_invalid_state(social.new_client().callback(&social.path("callback"), &authorization, &code).await);
        AppRedirect::expect_session(&browser.callback(&social.path("callback"), &authorization, &code).await);
    }
    for site in [None, Some("cross-site"), Some("none")] {
        let mut browser = social.new_client();
        let request = browser.request(Method::GET, &json_path);
        let request = site.into_iter().fold(request, |request, site| request.header("sec-fetch-site", site));
        browser.send(request).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    assert_eq!(social.test_app.flow_count().await, 0);
}

#[tokio::test]
async fn an_unbound_flow_is_stored_in_redis_and_used_once() {
    let social = SocialTest::start().await;
    let client = social.new_client();
    let json_path = format!("{}?format=json&state=mine", social.path("redirect"));
    let response = social.new_client().get(&json_path).await.expect(StatusCode::OK);
    assert_eq!(social.test_app.flow_count().await, 1);
    let authorization = AuthorizationRequest::of(response.string("url"));
    let code = social.upstream.approve(&authorization, &grace());
    assert_invalid_state(
        social.new_client().callback(&social.path_of("other", "callback"), &authorization, &code).await,
    );
    let path = format!("{}?state={}&code={code}", social.path("callback"), authorization.state());
    let (first, second) = tokio::join!(client.client.get(&path), client.client.get(&path));
    let (won, lost) = if first.status == StatusCode::FOUND { (first, second) } else { (second, first) };
    assert_eq!(AppRedirect::expect_session(&won).parameter("state"), "mine");
    assert_invalid_state(lost);
    assert_eq!(social.test_app.flow_count().await, 0);
    assert_eq!(social.counts().await, (1, 1, 1));
}

#[tokio::test]
async fn a_client_address_can_start_thirty_unbound_flows_per_minute() {
    let social = SocialTest::start().await;
    let mut browser = social.new_client();
    let json_path = format!("{}?format=json", social.path("redirect"));
    for _ in 0..30 {
        browser.get(&json_path).await.expect(StatusCode::OK);
    }
    let response = browser.get(&json_path).await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(response.header("ratelimit-policy"), Some("\"unboundFlowsPerClient\";q=30;w=60"));
    assert!(response.header("retry-after").is_some());
    assert_eq!(social.test_app.flow_count().await, 30);
    social.new_client().get(&json_path).await.expect(StatusCode::OK);
    browser.start_flow(&social.path("redirect")).await;
}

#[tokio::test]
async fn a_page_from_a_foreign_origin_cannot_start_a_bound_flow() {
    let origin = "https://shop.example.com";
    let social = SocialTest::with_app(app().set("/allowedOrigins", json!([origin]))).await;
    let request_flow = async |origin: &str, query: &str| {
        let mut browser = social.new_client();
        let request = browser.request(Method::GET, &format!("{}?{query}", social.path("redirect")));
        let request = request.header("origin", origin).header("sec-fetch-site", "same-site");
        browser.send(request).await
    };
    for query in ["format=json", ""] {
        for foreign in ["https://evil.example", "null"] {
            let response = request_flow(foreign, query).await.expect_error(StatusCode::FORBIDDEN, "origin_not_allowed");
            assert_eq!(response.header("set-cookie"), None);
        }
    }
    let response = request_flow(origin, "format=json").await.expect(StatusCode::OK);
    assert_eq!(response.header("access-control-allow-origin"), Some(origin));
    assert_eq!(response.header("access-control-allow-credentials"), Some("true"));
    // Without `Sec-Fetch-Site` the flow is not bound to the browser, and the response has no CORS headers.
    let mut browser = social.new_client();
    let request = browser.request(Method::GET, &format!("{}?format=json", social.path("redirect")));
    let response = browser.send(request.header("origin", "https://evil.example")).await.expect(StatusCode::OK);
    assert_eq!(response.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn callback_mode_fragment_puts_the_parameters_into_the_fragment() {
    let social = SocialTest::with_app(app().set("/callbackMode", "Fragment")).await;
    let redirect = AppRedirect::expect_session(&social.log_in(&grace()).await);
    assert!(redirect.location.starts_with(&format!("{REDIRECT_URL}#access_token=")), "{}", redirect.location);
    let mut browser = social.new_client();
    let authorization = browser.start_flow(&social.path("redirect")).await;
    let response =
        browser.get(&format!("{}?state={}&error=access_denied", social.path("callback"), authorization.state())).await;
    let redirect = AppRedirect::expect_error(&response, "access_denied");
    assert!(redirect.location.starts_with(&format!("{REDIRECT_URL}#error=")), "{}", redirect.location);
}

#[tokio::test]
async fn a_provider_without_its_secret_is_unavailable() {
    let upstream = ScriptedProvider::start().await;
    let missing_secret = json!({ "name": "nobody", "key": "client-secret" });
    let provider = upstream.provider("local").set("clientSecretRef", missing_secret);
    let app = app();
    let test_app = TestApp::from_builder(app, Stack::builder().provider(&provider)).await;
    let path = format!("{}/local/redirect", test_app.id());
    let response = test_app.client().get(&path).await;
    response.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    let login = test_app.client().post(&format!("{}/local/login", test_app.id()), &json!({ "token": "x" })).await;
    login.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
}

#[tokio::test]
async fn a_login_with_a_provider_token_returns_a_session() {
    let social = SocialTest::start().await;
    let response = social.log_in_by_token(&grace()).await.expect(StatusCode::OK);
    assert_session_fields(&response.body);
    assert_eq!(response.body["email_verified"], true);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    social.assert_ok(&social.test_app.verify(response.string("access_token")).await);
    // A login in the browser finds the same user for the same identity.
    let redirect = AppRedirect::expect_session(&social.log_in(&grace()).await);
    assert_eq!(redirect.parameter("local_id"), response.string("local_id"));

    let client = social.test_app.client();
    let wrong = client.post(&social.path("login"), &json!({ "token": "wrong" })).await;
    let wrong = wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_provider_token");
    assert!(wrong.header("www-authenticate").is_some());
    for body in [json!({}), json!({ "token": "" }), json!({ "token": 1 }), json!({ "token": "x", "nonce": 1 })] {
        let response = client.post(&social.path("login"), &body).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let response = client.post(&social.path_of("nobody", "login"), &json!({ "token": "x" })).await;
    response.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    assert_eq!(social.counts().await, (1, 1, 2));
}

/// RFC 9207, section 2.4: without the check of `iss`, an attacker's server could send an error in the name of the
/// provider.
#[tokio::test]
async fn an_error_from_another_issuer_is_not_accepted() {
    let github = Provider::new("github", "github");
    let app = app().set("/providerRefs", json!([{ "name": "github" }]));
    let test_app = TestApp::from_builder(app, Stack::builder().provider(&github)).await;
    let call_callback = async |query: &str| {
        let mut browser = CookieClient { client: test_app.client(), cookies: BTreeMap::new() };
        let authorization = browser.start_flow(&format!("{}/github/redirect", test_app.id())).await;
        browser.get(&format!("{}/github/callback?state={}&{query}", test_app.id(), authorization.state())).await
    };
    AppRedirect::expect_error(&call_callback("error=access_denied").await, "access_denied");
    let own_issuer = "https%3A%2F%2Fgithub.com%2Flogin%2Foauth";
    AppRedirect::expect_error(&call_callback(&format!("error=access_denied&iss={own_issuer}")).await, "access_denied");
    for other_issuer in ["https%3A%2F%2Fevil.example", "", "https%3A%2F%2Fgithub.com"] {
        AppRedirect::expect_error(
            &call_callback(&format!("error=access_denied&iss={other_issuer}")).await,
            "provider_error",
        );
    }
}

#[tokio::test]
async fn an_app_that_begins_to_require_bound_flows_refuses_unbound_flows() {
    let social = SocialTest::start().await;
    let start_unbound_flow = async || {
        let response = social.new_client().get(&format!("{}?format=json", social.path("redirect"))).await;
        let authorization = AuthorizationRequest::of(response.expect(StatusCode::OK).string("url"));
        let code = social.upstream.approve(&authorization, &grace());
        format!("{}?state={}&code={code}", social.path("callback"), authorization.state())
    };
    let (first_callback, second_callback) = (start_unbound_flow().await, start_unbound_flow().await);
    AppRedirect::expect_session(&social.new_client().get(&first_callback).await);
    social.test_app.edit_rendered(|document| document["browserBinding"] = json!("Required")).await;
    let response = social.new_client().get(&format!("{}?format=json", social.path("redirect"))).await;
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_invalid_state(social.new_client().get(&second_callback).await);
}
