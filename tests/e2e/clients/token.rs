//! Exchange of codes, and client authentication.

use http::{Method, StatusCode};
use jsonwebtoken::{DecodingKey, Validation, jwk::JwkSet};
use latchkey_tests::{
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{
    ARGOCD, AS_GRAFANA, Auth, BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, CALLBACK, EMAIL, Engine, GRAFANA, OTHER_SECRET,
    OpenIdTest, SECRET, SHA256, SPA, VERIFIER, app, basic, challenge, default_clients, digest, expect_invalid_client,
    expect_invalid_grant, rendered_client,
};
use crate::support::{LIVE_LIMIT, claims_of};

#[tokio::test]
async fn a_code_is_exchanged_for_tokens_of_the_user() {
    let test = OpenIdTest::start().await;
    let response = test.tokens("openid profile email groups").await;
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!((response.string("token_type"), response.string("scope")), ("Bearer", "openid profile email groups"));
    assert!(response.body.get("refresh_token").is_none(), "no offline_access: {}", response.text);
    let access = claims_of(response.string("access_token"));
    assert_eq!((&access["iss"], &access["aud"]), (&json!(test.issuer()), &json!([test.issuer()])));
    assert_eq!((&access["client_id"], &access["scope"]), (&json!(GRAFANA), &json!("openid profile email groups")));
    assert_eq!((&access["email"], access.get("groups")), (&json!(EMAIL), None));

    // Verifies the ID token as a client does.
    let id_token = response.string("id_token");
    let jwks = test.client().get(&format!("{}/.well-known/jwks.json", test.test_app.id())).await;
    let jwks: JwkSet = serde_json::from_value(jwks.body).unwrap();
    let header = jsonwebtoken::decode_header(id_token).unwrap();
    assert_eq!(header.typ.as_deref(), Some("JWT"));
    let key = DecodingKey::from_jwk(jwks.find(&header.kid.unwrap()).unwrap()).unwrap();
    let mut validation = Validation::new(header.alg);
    validation.set_audience(&[GRAFANA]);
    validation.set_issuer(&[test.issuer()]);
    let claims = jsonwebtoken::decode::<Value>(id_token, &key, &validation).unwrap().claims;
    assert_eq!((&claims["sub"], &claims["nonce"]), (&access["sub"], &json!("n-1")));
    assert_eq!((&claims["acr"], &claims["amr"]), (&json!("urn:latchkey:aal:1"), &json!(["pwd"])));
    assert_eq!((&claims["email"], &claims["groups"]), (&json!(EMAIL), &json!([])));
    let hash = digest(&SHA256, response.string("access_token").as_bytes());
    assert_eq!(claims["at_hash"], BASE64_URL_SAFE_NO_PAD.encode(&hash.as_ref()[..16]));
    assert_ne!(claims["sid"], access["sid"], "the browser session and the client session");
}

#[tokio::test]
async fn a_refused_exchange_does_not_use_up_the_code() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let challenge = challenge(VERIFIER);
    let fields = [("scope", "openid"), ("code_challenge", challenge.as_str()), ("code_challenge_method", "S256")];
    let code = test.code(&mut browser, GRAFANA, &fields).await;
    let wrong = "9".repeat(43);
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, None).await);
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, Some(&wrong)).await);
    expect_invalid_grant(test.exchange(Auth::Basic(ARGOCD, OTHER_SECRET), &code, Some(VERIFIER)).await);
    expect_invalid_grant(test.exchange(Auth::Public(SPA), &code, Some(VERIFIER)).await);
    expect_invalid_client(test.exchange(Auth::Basic(GRAFANA, OTHER_SECRET), &code, Some(VERIFIER)).await);
    for redirect_uri in ["https://app.example.com/callback/", "https://evil.example/callback"] {
        let fields = [
            ("grant_type", "authorization_code"),
            ("code", code.as_str()),
            ("redirect_uri", redirect_uri),
            ("code_verifier", VERIFIER),
        ];
        expect_invalid_grant(test.post("token", AS_GRAFANA, &fields).await);
    }
    let without = [("grant_type", "authorization_code"), ("code", code.as_str()), ("code_verifier", VERIFIER)];
    test.post("token", AS_GRAFANA, &without).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    test.exchange(AS_GRAFANA, &code, Some(VERIFIER)).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_verifier_for_a_request_without_a_challenge_is_refused() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid")]).await;
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, Some(VERIFIER)).await);
    test.exchange(AS_GRAFANA, &code, None).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_second_exchange_ends_the_session_of_the_first() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid offline_access")]).await;
    let tokens = test.exchange(AS_GRAFANA, &code, None).await.expect(StatusCode::OK);
    let access_token = tokens.string("access_token");
    // Another client, or a wrong verifier, cannot end the session.
    expect_invalid_grant(test.exchange(Auth::Basic(ARGOCD, OTHER_SECRET), &code, None).await);
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, Some(VERIFIER)).await);
    test.userinfo(access_token).await.expect(StatusCode::OK);

    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, None).await);
    test.userinfo(access_token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    expect_invalid_grant(test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await);
    let user = test.client().authenticate(test.test_app.id(), EMAIL, PASSWORD).await;
    eventually("the event", LIVE_LIMIT, || async {
        let activity = user.get("user/activity").await.expect(StatusCode::OK);
        activity.text.contains("client_code_reused").then_some(())
    })
    .await;
}

#[tokio::test]
async fn at_most_one_of_eight_concurrent_exchanges_succeeds_and_its_session_ends() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    for _ in 0..5 {
        let code = test.code(&mut browser, GRAFANA, &[("scope", "openid offline_access")]).await;
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let (client, code, path) = (test.client(), code.clone(), test.endpoint("token"));
            tasks.spawn(async move {
                let fields =
                    [("grant_type", "authorization_code"), ("code", code.as_str()), ("redirect_uri", CALLBACK)];
                let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
                let request = client.request(Method::POST, &path).header("authorization", basic(GRAFANA, SECRET));
                client.send(request.header("content-type", "application/x-www-form-urlencoded").body(body)).await
            });
        }
        let mut succeeded = Vec::new();
        for response in tasks.join_all().await {
            if response.status == StatusCode::OK {
                succeeded.push(response);
            } else {
                expect_invalid_grant(response);
            }
        }
        assert!(succeeded.len() <= 1, "{}", succeeded.len());
        for tokens in succeeded {
            let refused = test.userinfo(tokens.string("access_token")).await;
            refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
            expect_invalid_grant(test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await);
        }
    }
}

#[tokio::test]
async fn a_code_is_invalid_after_the_browser_session_has_ended_or_the_epoch_has_risen() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid offline_access")]).await;
    test.log_out(&mut browser).await;
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, None).await);

    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid offline_access")]).await;
    let user = test.client().authenticate(test.test_app.id(), EMAIL, PASSWORD).await;
    let change = json!({ "current_password": PASSWORD, "password": NEW_PASSWORD });
    user.post("user/password", &change).await.expect(StatusCode::OK);
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, None).await);
}

#[tokio::test]
async fn a_user_who_is_no_longer_allowed_gets_no_tokens_and_the_code_stays_valid() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid")]).await;
    let mut closed = rendered_client(GRAFANA, Some(SECRET));
    closed["allowedGroups"] = json!(["ops"]);
    test.set_clients(vec![closed]).await;
    expect_invalid_grant(test.exchange(AS_GRAFANA, &code, None).await);
    test.set_clients(default_clients()).await;
    test.exchange(AS_GRAFANA, &code, None).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_replaced_secret_works_until_it_expires() {
    let with_previous = |expires_at: i64| {
        let mut client = rendered_client(GRAFANA, Some("lks_new"));
        let previous = BASE64_STANDARD.encode(digest(&SHA256, SECRET.as_bytes()));
        client["authentication"]["previous"] = json!({ "sha256": previous, "expiresAt": expires_at });
        client
    };
    let now = latchkey_server::domain::clock::Env::system().now().unix_timestamp();
    let test = OpenIdTest::start_with(app(), vec![with_previous(now + 3600)]).await;
    for secret in [SECRET, "lks_new"] {
        expect_invalid_grant(test.exchange(Auth::Basic(GRAFANA, secret), "lka_x", None).await);
    }
    test.set_clients(vec![with_previous(now - 1)]).await;
    expect_invalid_client(test.exchange(AS_GRAFANA, "lka_x", None).await);
    expect_invalid_grant(test.exchange(Auth::Basic(GRAFANA, "lks_new"), "lka_x", None).await);
}

#[tokio::test]
async fn metrics_count_the_requests_of_clients_without_naming_a_client() {
    let test = OpenIdTest::start().await;
    test.tokens("openid").await;
    expect_invalid_client(test.exchange(Auth::Basic(GRAFANA, "wrong"), "lka_x", None).await);
    expect_invalid_grant(test.exchange(Auth::Post(GRAFANA, SECRET), "lka_x", None).await);
    let metrics = test.test_app.stack.server().get_ops("metrics").await.expect(StatusCode::OK).text;
    for line in [
        "latchkey_client_tokens_total{grant=\"authorization_code\",outcome=\"success\"} 1",
        "latchkey_client_tokens_total{grant=\"authorization_code\",outcome=\"refused\"} 1",
        "latchkey_client_tokens_total{grant=\"refresh_token\",outcome=\"success\"} 0",
        "latchkey_client_authentications_total{method=\"client_secret_basic\",outcome=\"success\"} 1",
        "latchkey_client_authentications_total{method=\"client_secret_basic\",outcome=\"refused\"} 1",
        "latchkey_client_authentications_total{method=\"client_secret_post\",outcome=\"success\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert!(!metrics.contains(GRAFANA), "no metric names a client");
}

#[tokio::test]
async fn unknown_and_malformed_codes_are_refused() {
    let test = OpenIdTest::start().await;
    let unknown = format!("lka_{}", "A".repeat(43));
    for code in ["lka_", "lka_x", &unknown, "lkc_x", "x", &"x".repeat(10_000)] {
        expect_invalid_grant(test.exchange(AS_GRAFANA, code, None).await);
    }
}

#[tokio::test]
async fn a_client_sends_its_secret_in_the_form_or_in_the_header_but_not_in_both() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let code = test.code(&mut browser, GRAFANA, &[("scope", "openid")]).await;
    test.exchange(Auth::Post(GRAFANA, SECRET), &code, None).await.expect(StatusCode::OK);

    let fields = [("grant_type", "refresh_token"), ("refresh_token", "lkrc_x")];
    let with = |more: &[(&'static str, &'static str)]| [&fields[..], more].concat();
    expect_invalid_grant(test.post("token", AS_GRAFANA, &with(&[("client_id", GRAFANA)])).await);
    for more in [
        &[("client_id", ARGOCD)][..],
        &[("client_secret", SECRET)],
        &[("client_assertion", "x")],
        &[("scope", "openid"), ("scope", "openid")],
    ] {
        let response = test.post("token", AS_GRAFANA, &with(more)).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let client = test.client();
    let json = client.request(Method::POST, &test.endpoint("token")).header("authorization", basic(GRAFANA, SECRET));
    let response = client.send(json.json(&json!({ "grant_type": "refresh_token", "refresh_token": "lkrc_x" }))).await;
    response.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    let unsupported = test.post("token", AS_GRAFANA, &[("grant_type", "password")]).await;
    unsupported.expect_error(StatusCode::BAD_REQUEST, "unsupported_grant_type");
    test.post("token", AS_GRAFANA, &[]).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn every_failed_authentication_has_the_same_response() {
    let limits = app().limit("clientFailuresPerClientAddress", &[(1000, 60)]);
    let test = OpenIdTest::start_with(limits, default_clients()).await;
    let fields = [("grant_type", "refresh_token"), ("refresh_token", "lkrc_x")];
    let wrong = expect_invalid_client(test.post("token", Auth::Post(GRAFANA, "wrong"), &fields).await);
    for auth in [
        Auth::Post(GRAFANA, ""),
        Auth::Post("unknown", SECRET),
        Auth::Post(ARGOCD, SECRET),
        Auth::Post(SPA, SECRET),
        Auth::Public(GRAFANA),
        Auth::Public("unknown"),
        Auth::Nothing,
    ] {
        let other = expect_invalid_client(test.post("token", auth, &fields).await);
        assert_eq!(other.body["error_description"], wrong.body["error_description"]);
        assert_eq!(other.header("www-authenticate"), wrong.header("www-authenticate"));
    }
    let (wrong_basic, unknown) = (basic(GRAFANA, "wrong"), basic("unknown", SECRET));
    let no_colon = format!("Basic {}", BASE64_STANDARD.encode("grafana"));
    let not_utf8 = format!("Basic {}", BASE64_STANDARD.encode(b"tests.grafana:\xff"));
    let long = format!("Basic {}", BASE64_STANDARD.encode("x".repeat(9000)));
    for header in ["Basic", "Basic ", "Basic %", "basic Og==", &wrong_basic, &unknown, &no_colon, &not_utf8, &long] {
        let response = expect_invalid_client(test.post("token", Auth::Header(header), &fields).await);
        let challenge = response.header("www-authenticate").unwrap();
        assert!(challenge.starts_with("Basic realm="), "{header}: {challenge}");
        assert_eq!(response.body["error_description"], wrong.body["error_description"]);
    }
}

#[tokio::test]
async fn malformed_assertions_do_not_authenticate() {
    let mut client = rendered_client(GRAFANA, None);
    client["authentication"] = json!({ "method": "privateKeyJwt", "jwks": "{\"keys\": []}" });
    let test = OpenIdTest::start_with(app(), vec![client]).await;
    let none = BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#);
    let claims = BASE64_URL_SAFE_NO_PAD.encode(format!(r#"{{"iss":"{GRAFANA}","sub":"{GRAFANA}","jti":"1"}}"#));
    let unsigned = format!("{none}.{claims}.");
    let long = "a".repeat(20_000);
    for assertion in ["x", "..", "a.b.c", "e30.e30.e30", &unsigned, &long] {
        let fields = [
            ("grant_type", "refresh_token"),
            ("refresh_token", "lkrc_x"),
            ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"),
            ("client_assertion", assertion),
        ];
        expect_invalid_client(test.post("token", Auth::Nothing, &fields).await);
        expect_invalid_client(test.post("token", Auth::Public(GRAFANA), &fields).await);
    }
}

#[tokio::test]
async fn the_right_secret_is_refused_after_too_many_failures_from_one_client_address() {
    let limited = app().limit("clientFailuresPerClientAddress", &[(3, 600)]);
    let test = OpenIdTest::start_with(limited, default_clients()).await;
    let client = test.client();
    let fields = [("grant_type", "refresh_token"), ("refresh_token", "lkrc_x")];
    let wrong = Auth::Basic(GRAFANA, "wrong");
    for _ in 0..3 {
        expect_invalid_grant(test.post_as(&client, "token", AS_GRAFANA, &fields).await);
        expect_invalid_client(test.post_as(&client, "token", wrong, &fields).await);
    }
    for auth in [wrong, AS_GRAFANA] {
        let limited = test.post_as(&client, "token", auth, &fields).await;
        let limited = limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
        assert!(limited.header("ratelimit").unwrap().contains("clientFailuresPerClientAddress"));
    }
    // The limit counts each pair of OpenID Connect client and client address separately.
    expect_invalid_grant(test.post_as(&client, "token", Auth::Basic(ARGOCD, OTHER_SECRET), &fields).await);
    expect_invalid_grant(test.post("token", AS_GRAFANA, &fields).await);
}

#[tokio::test]
async fn a_client_with_an_unreadable_secret_gets_503() {
    let mut client = rendered_client(GRAFANA, Some(SECRET));
    client["authentication"] = json!({ "method": "unresolved" });
    let test = OpenIdTest::start_with(app(), vec![client]).await;
    let response = test.exchange(AS_GRAFANA, "lka_x", None).await;
    let response = response.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(response.header("retry-after").is_some());
}

#[tokio::test]
async fn an_app_without_clients_has_only_the_endpoints_for_its_own_sessions() {
    let test = OpenIdTest::start_with(app(), Vec::new()).await;
    let id = test.test_app.id();
    let client = test.client();
    let par = client.post_without_body(&test.endpoint("par")).await;
    par.expect_error(StatusCode::NOT_FOUND, "not_found");
    let userinfo = client.post_without_body(&test.endpoint("userinfo")).await;
    let userinfo = userinfo.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
    assert_eq!(userinfo.header("allow"), Some("GET, HEAD, OPTIONS"));
    // The token endpoint ignores the credentials of clients.
    let fields = [("grant_type", "refresh_token"), ("refresh_token", "lkrc_x"), ("client_secret", "x")];
    expect_invalid_grant(test.post("token", AS_GRAFANA, &fields).await);
    let metadata = client.get(&format!("{id}/.well-known/openid-configuration")).await.expect(StatusCode::OK);
    assert_eq!(metadata.body["response_types_supported"], json!(["none"]));
    for absent in ["authorization_endpoint", "scopes_supported", "pushed_authorization_request_endpoint"] {
        assert!(metadata.body.get(absent).is_none(), "{absent}");
    }
}

#[tokio::test]
async fn discovery_describes_the_provider() {
    let test = OpenIdTest::start().await;
    let id = test.test_app.id();
    let client = test.client();
    let metadata = client.get(&format!("{id}/.well-known/openid-configuration")).await.expect(StatusCode::OK).body;
    let oauth = client.get(&format!(".well-known/oauth-authorization-server/{id}")).await.expect(StatusCode::OK).body;
    assert_eq!(metadata, oauth);
    let base = test.test_app.stack.base_url();
    let urls = [
        ("issuer", test.issuer()),
        ("authorization_endpoint", format!("{}/authorize", test.issuer())),
        ("end_session_endpoint", format!("{}/logout", test.issuer())),
        ("token_endpoint", format!("{base}/v1/{id}/token")),
        ("pushed_authorization_request_endpoint", format!("{base}/v1/{id}/par")),
        ("userinfo_endpoint", format!("{base}/v1/{id}/userinfo")),
        ("revocation_endpoint", format!("{base}/v1/{id}/revoke")),
        ("introspection_endpoint", format!("{base}/v1/{id}/introspect")),
    ];
    for (name, url) in urls {
        assert_eq!(metadata[name], url, "{name}");
    }
    let methods = json!(["client_secret_basic", "client_secret_post", "private_key_jwt", "none"]);
    for (name, value) in [
        ("response_types_supported", json!(["code"])),
        ("response_modes_supported", json!(["query", "form_post"])),
        ("id_token_signing_alg_values_supported", json!(["RS256", "ES256"])),
        ("token_endpoint_auth_methods_supported", methods),
        ("acr_values_supported", json!(["urn:latchkey:aal:1"])),
        ("scopes_supported", json!(["openid", "profile", "email", "groups", "offline_access"])),
        ("claims_parameter_supported", json!(true)),
        ("authorization_response_iss_parameter_supported", json!(true)),
        ("request_parameter_supported", json!(false)),
        ("request_uri_parameter_supported", json!(false)),
    ] {
        assert_eq!(metadata[name], value, "{name}");
    }
}

#[tokio::test]
async fn cors_allows_pages_of_a_client_to_call_only_token_revoke_and_userinfo() {
    let test = OpenIdTest::start().await;
    let client = test.client();
    let origin = "https://app.example.com";
    let preflight = |path: &str| {
        let request = client.request(Method::OPTIONS, path).header("origin", origin);
        client.send(request.header("access-control-request-method", "POST"))
    };
    for endpoint in ["token", "revoke", "userinfo"] {
        let response = preflight(&test.endpoint(endpoint)).await.expect(StatusCode::NO_CONTENT);
        assert_eq!(response.header("access-control-allow-origin"), Some(origin), "{endpoint}");
        assert_eq!(response.header("access-control-allow-credentials"), None, "{endpoint}");
    }
    for endpoint in ["par", "introspect", "user", "sessions", "logout", "email/login"] {
        let response = preflight(&test.endpoint(endpoint)).await.expect(StatusCode::NO_CONTENT);
        assert_eq!(response.header("access-control-allow-origin"), None, "{endpoint}");
    }
}

#[tokio::test]
async fn an_authorization_request_can_be_pushed_and_is_checked_when_it_is_pushed() {
    let test = OpenIdTest::start().await;
    let fields = [("redirect_uri", CALLBACK), ("response_type", "code"), ("scope", "openid"), ("state", "s-1")];
    let pushed = test.post("par", AS_GRAFANA, &fields).await.expect(StatusCode::CREATED);
    assert_eq!(pushed.integer("expires_in"), 60);
    let request_uri = pushed.string("request_uri").to_owned();
    assert!(request_uri.starts_with("urn:ietf:params:oauth:request_uri:"), "{request_uri}");

    let mut browser = test.logged_in_browser().await;
    let query = url::form_urlencoded::Serializer::new(String::new())
        .extend_pairs([("client_id", GRAFANA), ("request_uri", request_uri.as_str())])
        .finish();
    let page = browser.open(&format!("/{}/authorize?{query}", test.test_app.id())).await;
    let location = page.external.expect("a redirect");
    assert!(location.starts_with(CALLBACK) && location.contains("state=s-1"), "{location}");

    expect_invalid_client(test.post("par", Auth::Basic(GRAFANA, "wrong"), &fields).await);
    let with = |name: &'static str, value: &'static str| {
        let mut fields: Vec<(&str, &str)> = fields.iter().copied().filter(|(known, _)| *known != name).collect();
        fields.push((name, value));
        fields
    };
    for (name, value, code) in [
        ("redirect_uri", "https://evil.example", "redirect_url_not_allowed"),
        ("response_type", "token", "unsupported_response_type"),
        ("scope", "email", "invalid_scope"),
        ("request_uri", "urn:ietf:params:oauth:request_uri:x", "invalid_request"),
        ("request", "x.y.z", "request_not_supported"),
        ("code_challenge", "short", "invalid_request"),
    ] {
        let refused = test.post("par", AS_GRAFANA, &with(name, value)).await;
        refused.expect_error(StatusCode::BAD_REQUEST, code);
    }
    // Each value is short enough, but together they would not fit into the URL of the login page.
    let (claims, state) = (format!("{{\"id_token\": {{\"{}\": null}}}}", "x".repeat(3_500)), "s".repeat(1_000));
    let long: Vec<(&str, &str)> = fields.iter().copied().chain([("claims", claims.as_str())]).collect();
    test.post("par", AS_GRAFANA, &long).await.expect(StatusCode::CREATED);
    let too_long: Vec<(&str, &str)> = long
        .into_iter()
        .map(|(name, value)| if name == "state" { (name, state.as_str()) } else { (name, value) })
        .collect();
    let refused = test.post("par", AS_GRAFANA, &too_long).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}
