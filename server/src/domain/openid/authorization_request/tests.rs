//! Tests of every check of an authorization request, also with hostile values.

use latchkey_crds::rendered::{RenderedClient, RenderedClientAuthentication};

use super::*;
use crate::fixtures;

const CALLBACK: &str = "https://grafana.example.com/callback";
const CHALLENGE: &str = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM";

/// A request with these parameters added, changed or (with an empty value) removed.
fn parameters(changes: &[(&str, &str)]) -> RequestParameters {
    let mut sent: Vec<(String, String)> = [
        ("client_id", "grafana"),
        ("redirect_uri", CALLBACK),
        ("response_type", "code"),
        ("scope", "openid profile"),
        ("state", "state-1"),
        ("nonce", "nonce-1"),
        ("code_challenge", CHALLENGE),
        ("code_challenge_method", "S256"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    for (name, value) in changes {
        sent.retain(|(known, _)| known != name);
        sent.push(((*name).to_owned(), (*value).to_owned()));
    }
    RequestParameters::new(sent)
}

/// The parameters of a valid request. One of them, `name`, is sent again with `value`.
fn parameters_with_repeated(name: &str, value: &str) -> RequestParameters {
    let parameters = parameters(&[]);
    RequestParameters::new(parameters.iter().chain([(name, value)]))
}

fn app(edit: impl FnOnce(&mut RenderedClient)) -> App {
    let mut client = fixtures::client("grafana");
    edit(&mut client);
    fixtures::provider(vec![client])
}

fn check_at(app: &App, parameters: &RequestParameters) -> Result<AuthorizationRequest, RequestError> {
    AuthorizationRequest::check(app, find_client(app, parameters)?, parameters, Delivery::Browser)
}

fn check(changes: &[(&str, &str)]) -> Result<AuthorizationRequest, RequestError> {
    check_at(&app(|_| {}), &parameters(changes))
}

#[track_caller]
fn accepted_request(changes: &[(&str, &str)]) -> AuthorizationRequest {
    check(changes).unwrap_or_else(|error| panic!("{changes:?}: {error}"))
}

/// Returns the code of the error. Fails unless the error is sent to the redirect URL.
#[track_caller]
fn redirected_error_code<T>(result: Result<T, RequestError>) -> &'static str {
    match result.err().expect("the request is refused") {
        RequestError::Reply { error, to } => {
            assert_eq!(to.target.as_str(), CALLBACK);
            assert!(!error.description.is_empty());
            error.code.as_str()
        }
        RequestError::Page(page) => panic!("{page}"),
    }
}

/// Returns the error. Fails unless the error is shown on a page.
#[track_caller]
fn error_on_page<T>(result: Result<T, RequestError>) -> UnsafeRequest {
    match result.err().expect("the request is refused") {
        RequestError::Page(page) => page,
        RequestError::Reply { error, .. } => panic!("{error}"),
    }
}

#[test]
fn the_parameters_of_a_request_are_parsed() {
    let request = accepted_request(&[
        ("scope", "openid email unknown"),
        ("prompt", "login consent"),
        ("max_age", "300"),
        ("login_hint", "ada@example.com"),
        ("response_mode", "form_post"),
        ("claims", r#"{"userinfo": {"groups": null}}"#),
    ]);
    assert_eq!(request.client.client_id.as_str(), "grafana");
    assert_eq!(request.scopes.to_string(), "openid email");
    assert_eq!(request.scopes_for_client().to_string(), "openid email groups");
    assert_eq!(request.nonce.as_deref(), Some("nonce-1"));
    assert_eq!(request.code_challenge.as_ref().map(CodeChallenge::as_str), Some(CHALLENGE));
    assert_eq!(request.prompts, Prompts { login: true, consent: true, ..Prompts::default() });
    assert_eq!((request.max_age, request.login_hint.as_deref()), (Some(300), Some("ada@example.com")));
    assert_eq!(request.reply.mode, ResponseMode::FormPost);
    assert_eq!(request.reply.state.as_deref(), Some("state-1"));
    let minimal =
        accepted_request(&[("state", ""), ("nonce", ""), ("code_challenge", ""), ("code_challenge_method", "")]);
    assert_eq!((minimal.reply.mode, minimal.reply.state.clone()), (ResponseMode::Query, None));
    assert!(minimal.code_challenge.is_none() && minimal.prompts == Prompts::default());
}

#[test]
fn a_client_has_only_its_own_scopes_and_claims() {
    let app = app(|client| client.scopes.retain(|scope| *scope != latchkey_crds::client::ClientScope::Email));
    let claims = r#"{"id_token": {"email": null, "groups": null}}"#;
    let sent = parameters(&[("scope", "openid email offline_access"), ("claims", claims)]);
    let request = check_at(&app, &sent).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(request.scopes.to_string(), "openid offline_access");
    assert_eq!(request.scopes_for_client().to_string(), "openid groups offline_access");
}

#[test]
fn the_error_for_a_missing_repeated_or_unknown_client_is_shown_on_a_page() {
    for id in ["", "Grafana", "grafana ", "grafan", "grafana.example", "shop", "uid-grafana", "grafana\0"] {
        assert_eq!(error_on_page(check(&[("client_id", id)])), UnsafeRequest::InvalidClient, "{id}");
    }
    let twice = check_at(&app(|_| {}), &parameters_with_repeated("client_id", "grafana"));
    assert_eq!(error_on_page(twice), UnsafeRequest::InvalidClient);
}

#[test]
fn the_error_for_a_missing_or_repeated_redirect_url_is_shown_on_a_page() {
    assert_eq!(error_on_page(check(&[("redirect_uri", "")])), UnsafeRequest::RedirectUrlNotAllowed);
    let twice = check_at(&app(|_| {}), &parameters_with_repeated("redirect_uri", CALLBACK));
    assert_eq!(error_on_page(twice), UnsafeRequest::RedirectUrlNotAllowed);
    // The result is the same if other parameters are also wrong, because no error can be sent to an unregistered URL.
    let all_wrong = check(&[("redirect_uri", "https://evil.example"), ("response_type", "token"), ("prompt", "x")]);
    assert_eq!(error_on_page(all_wrong), UnsafeRequest::RedirectUrlNotAllowed);
}

/// Redirect URLs that are similar to the registered URL, but not equal to it (RFC 9700, 4.1).
fn hostile_redirect_urls() -> Vec<String> {
    let registered = CALLBACK;
    let mut hostile: Vec<String> = Vec::new();
    // Every prefix of the URL, and the URL with each of its characters changed.
    hostile.extend((1..registered.len()).map(|end| registered[..end].to_owned()));
    for at in 0..registered.len() {
        let other = if registered.as_bytes()[at] == b'x' { "y" } else { "x" };
        hostile.push(format!("{}{other}{}", &registered[..at], &registered[at + 1..]));
    }
    // Texts that are put before, after and into the registered URL.
    for added in [
        "/",
        "//",
        "?",
        "?a=b",
        "#",
        "#a",
        "#@evil.example",
        "/..",
        "/../callback",
        "/.",
        "%2e",
        "%00",
        "\0",
        "\n",
        "\r\n",
        "\t",
        " ",
        "%20",
        ";",
        ";a",
        "&a=b",
        "@evil.example",
        ".evil.example",
        ":443",
        ":8443",
        "\\",
        "\\@evil.example",
        "/%2e%2e/x",
        "\u{202e}",
        "é",
        "*",
        "%",
        "%zz",
        "?code=stolen",
        "?state=x",
        "?iss=https://evil.example",
    ] {
        hostile.extend([format!("{registered}{added}"), format!("{added}{registered}")]);
        hostile.push(format!("https://grafana.example.com{added}/callback"));
    }
    for whole in [
        "https://evil.example/callback",
        "https://evil.example/grafana.example.com/callback",
        "https://evil.example?grafana.example.com/callback",
        "https://evil.example#grafana.example.com/callback",
        "https://grafana.example.com@evil.example/callback",
        "https://grafana.example.com:pass@evil.example/callback",
        "https://user@grafana.example.com/callback",
        "https://grafana.example.com.evil.example/callback",
        "https://evil-grafana.example.com/callback",
        "https://evil.grafana.example.com/callback",
        "https://example.com/callback",
        "https://grafana.example.com./callback",
        "https://GRAFANA.example.com/callback",
        "https://grafana.example.com/Callback",
        "https://grafana.example.com/CALLBACK",
        "https://grafana.example.com/call%62ack",
        "https://grafana.example.com//callback",
        "https://grafana.example.com/./callback",
        "https://grafana.example.com/x/../callback",
        "https:///grafana.example.com/callback",
        "https:/grafana.example.com/callback",
        "https:grafana.example.com/callback",
        "https:\\\\grafana.example.com\\callback",
        "http://grafana.example.com/callback",
        "HTTPS://grafana.example.com/callback",
        "ftp://grafana.example.com/callback",
        "wss://grafana.example.com/callback",
        "//grafana.example.com/callback",
        "/callback",
        "callback",
        "?",
        "#",
        "javascript:alert(1)",
        "javascript://grafana.example.com/callback%0aalert(1)",
        "data:text/html,<script>alert(1)</script>",
        "vbscript:x",
        "file:///etc/passwd",
        "about:blank",
        "blob:https://grafana.example.com/x",
        "com.example.grafana:/callback",
        "urn:ietf:wg:oauth:2.0:oob",
        "null",
        "undefined",
        "[object Object]",
        "https://grafana.example.com/callback,https://evil.example",
        "https://grafana.example.com/callback https://evil.example",
        "https%3A%2F%2Fgrafana.example.com%2Fcallback",
        "https://xn--grafana.example.com/callback",
        "https://grafana。example.com/callback",
        "https://grafana.example.com/callback/",
        "http://localhost/callback",
        "http://127.0.0.1/callback",
        "http://127.0.0.1:80@evil.example/cli",
        "http://127.0.0.1.evil.example/cli",
        "http://127.0.0.1:1/CLI",
        "http://127.0.0.1:/cli",
        "http://127.0.0.1:0/cli",
        "http://127.0.0.1:65536/cli",
        "http://127.0.0.1:99999/cli",
        "http://127.0.0.1:-1/cli",
        "http://127.0.0.1:+1/cli",
        "http://127.0.0.1:01/cli",
        "http://127.0.0.1:1/cli?x",
        "http://127.0.0.1:1/cli#x",
        "http://127.0.0.2:1/cli",
        "http://127.1:1/cli",
        "http://0177.0.0.1:1/cli",
        "http://2130706433:1/cli",
        "http://localhost:1/cli",
        "http://[::1]:1/cli",
        "https://127.0.0.1:1/cli",
        "http://[::ffff:127.0.0.1]:1/cli",
        "http://127.0.0.1:1\\@evil.example/cli",
    ] {
        hostile.push(whole.to_owned());
    }
    hostile.push("A".repeat(10_000));
    hostile
}

#[test]
fn no_hostile_redirect_url_is_accepted() {
    let app = app(|client| client.redirect_urls.push("http://127.0.0.1/cli".parse().unwrap()));
    let hostile = hostile_redirect_urls();
    assert!(hostile.len() >= 200, "{}", hostile.len());
    for url in &hostile {
        let result = check_at(&app, &parameters(&[("redirect_uri", url)]));
        assert_eq!(error_on_page(result), UnsafeRequest::RedirectUrlNotAllowed, "{url}");
    }
    for good in [CALLBACK, "http://127.0.0.1/cli", "http://127.0.0.1:51004/cli"] {
        let request = check_at(&app, &parameters(&[("redirect_uri", good)])).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(request.reply.target.as_str(), good);
    }
}

#[test]
fn errors_found_after_the_check_of_the_redirect_url_go_to_the_client() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[("request", "eyJ.e30.x")], "request_not_supported"),
        (&[("request_uri", "https://evil.example/request")], "request_uri_not_supported"),
        (&[("request_uri", "urn:ietf:params:oauth:other:1")], "request_uri_not_supported"),
        (&[("registration", "{}")], "registration_not_supported"),
        (&[("response_type", "token")], "unsupported_response_type"),
        (&[("response_type", "code id_token")], "unsupported_response_type"),
        (&[("response_type", "Code")], "unsupported_response_type"),
        (&[("scope", "")], "invalid_scope"),
        (&[("scope", "profile email")], "invalid_scope"),
        (&[("scope", "OpenID")], "invalid_scope"),
        (
            &[("claims", r#"{"id_token": {"acr": {"essential": true, "value": "urn:mfa"}}}"#)],
            "unmet_authentication_requirements",
        ),
        (&[("response_type", "")], "invalid_request"),
        (&[("response_mode", "fragment")], "invalid_request"),
        (&[("response_mode", "query form_post")], "invalid_request"),
        (&[("prompt", "other")], "invalid_request"),
        (&[("prompt", "none login")], "invalid_request"),
        (&[("prompt", "consent none")], "invalid_request"),
        (&[("prompt", "None")], "invalid_request"),
        (&[("max_age", "-1")], "invalid_request"),
        (&[("max_age", "1.5")], "invalid_request"),
        (&[("max_age", "one")], "invalid_request"),
        (&[("max_age", " 1")], "invalid_request"),
        (&[("claims", "[]")], "invalid_request"),
        (&[("claims", "{")], "invalid_request"),
        (&[("code_challenge", "too-short")], "invalid_request"),
        (&[("code_challenge", &CHALLENGE[..42])], "invalid_request"),
        (&[("code_challenge_method", "plain")], "invalid_request"),
        (&[("code_challenge_method", "s256")], "invalid_request"),
        (&[("code_challenge_method", "")], "invalid_request"),
        (&[("code_challenge", "")], "invalid_request"),
        (&[("id_token_hint", "x")], "invalid_request"),
        (&[("id_token_hint", "eyJhbGciOiJub25lIn0.e30.")], "invalid_request"),
    ];
    for (changes, code) in cases {
        assert_eq!(redirected_error_code(check(changes)), *code, "{changes:?}");
    }
    for text in ["nonce", "state", "login_hint", "claims"] {
        let long = format!("{{\"x\": \"{}\"}}", "x".repeat(MAX_CLAIMS_BYTES));
        assert_eq!(redirected_error_code(check(&[(text, &long)])), "invalid_request", "{text}");
    }
}

#[test]
fn the_longest_values_are_accepted() {
    let (state, nonce, hint) =
        ("s".repeat(MAX_STATE_BYTES), "n".repeat(MAX_NONCE_BYTES), "h".repeat(MAX_LOGIN_HINT_BYTES));
    let request = accepted_request(&[("state", &state), ("nonce", &nonce), ("login_hint", &hint)]);
    assert_eq!(request.reply.state, Some(state.clone()));
    for (name, value) in [("state", state), ("nonce", nonce), ("login_hint", hint)] {
        assert_eq!(redirected_error_code(check(&[(name, &format!("{value}x"))])), "invalid_request", "{name}");
    }
    assert_eq!(accepted_request(&[("max_age", "0")]).max_age, Some(0));
    assert_eq!(accepted_request(&[("max_age", "99999999999")]).max_age, Some(u32::MAX));
}

#[test]
fn a_repeated_parameter_is_refused_and_a_repeated_state_is_not_sent_back() {
    let app = app(|_| {});
    for (name, value) in parameters(&[("max_age", "1"), ("prompt", "login"), ("ui_locales", "de")]).iter() {
        if !matches!(name, "client_id" | "redirect_uri") {
            let again = RequestParameters::new(parameters(&[(name, value)]).iter().chain([(name, value)]));
            assert_eq!(redirected_error_code(check_at(&app, &again)), "invalid_request", "{name}");
        }
    }
    let Err(RequestError::Reply { to, .. }) = check_at(&app, &parameters_with_repeated("state", "other")) else {
        panic!("it is refused")
    };
    assert_eq!(to.state, None);
    // An empty value is no value, and an unknown parameter is ignored.
    assert!(check_at(&app, &parameters_with_repeated("state", "")).is_ok());
    let unknown = RequestParameters::new(parameters(&[]).iter().chain([("resource", "a"), ("resource", "b")]));
    assert!(check_at(&app, &unknown).is_ok() && unknown == parameters(&[]));
}

#[test]
fn errors_are_sent_in_the_response_mode_with_the_state_and_the_issuer() {
    let app = app(|_| {});
    let error = |changes: &[(&str, &str)]| match check_at(&app, &parameters(changes)) {
        Err(RequestError::Reply { error, to }) => (error, *to),
        _ => panic!("{changes:?}"),
    };
    let (refused, to) = error(&[("response_mode", "form_post"), ("prompt", "x")]);
    assert_eq!(to.mode, ResponseMode::FormPost);
    let sent = to.error_parameters(&app, &refused);
    assert_eq!(sent[0], ("error", "invalid_request"));
    assert_eq!(sent[2..], [("state", "state-1"), ("iss", "https://auth.example.com/shop")]);
    let (_, to) = error(&[("response_mode", "web_message"), ("state", "")]);
    assert_eq!((to.mode, to.state.as_deref()), (ResponseMode::Query, None));
    let code = to.success_parameters(&app, "lka_x");
    assert_eq!(code, [("code", "lka_x"), ("iss", "https://auth.example.com/shop")]);
    let (_, to) = error(&[("state", &"s".repeat(MAX_STATE_BYTES + 1))]);
    assert_eq!(to.state, None, "it is not valid");
}

#[test]
fn a_client_can_require_pkce_and_pushed_requests() {
    let no_challenge = parameters(&[("code_challenge", ""), ("code_challenge_method", "")]);
    let required = app(|client| client.pkce_required = true);
    assert_eq!(redirected_error_code(check_at(&required, &no_challenge)), "invalid_request");
    assert!(check_at(&required, &parameters(&[])).is_ok());
    let public = app(|client| client.authentication = RenderedClientAuthentication::None);
    assert_eq!(redirected_error_code(check_at(&public, &no_challenge)), "invalid_request");

    let pushed = app(|client| client.pushed_authorization_required = true);
    let sent = parameters(&[]);
    assert_eq!(redirected_error_code(check_at(&pushed, &sent)), "invalid_request");
    let client = find_client(&pushed, &sent).unwrap();
    assert!(AuthorizationRequest::check(&pushed, client, &sent, Delivery::Pushed).is_ok());
}

#[test]
fn a_client_that_cannot_get_tokens_now_must_try_again_later() {
    let unresolved = app(|client| client.authentication = RenderedClientAuthentication::Unresolved);
    assert_eq!(redirected_error_code(check_at(&unresolved, &parameters(&[]))), "temporarily_unavailable");
    let mut doc = fixtures::rendered("shop");
    doc.pages = Some(fixtures::pages());
    let mut client = fixtures::client("grafana");
    client.tokens.id_token_algorithm = latchkey_crds::client::IdTokenAlgorithm::RS256;
    doc.clients = vec![client];
    let without_key = fixtures::app(doc);
    assert_eq!(redirected_error_code(check_at(&without_key, &parameters(&[]))), "temporarily_unavailable");
}

#[test]
fn only_a_request_uri_from_the_par_endpoint_names_a_pushed_request() {
    let uri = |value: &str| {
        let parameters = parameters(&[("request_uri", value)]);
        parameters.pushed_request_uri().map(str::to_owned)
    };
    let own = format!("{REQUEST_URI_PREFIX}abc");
    assert_eq!(uri(&own), Some(own.clone()));
    for other in ["", "https://evil.example", "URN:ietf:params:oauth:request_uri:abc", &format!(" {own}")] {
        assert_eq!(uri(other), None, "{other}");
    }
    let twice = RequestParameters::new([("request_uri", own.as_str()), ("request_uri", own.as_str())]);
    assert_eq!(twice.pushed_request_uri(), None);
}

#[test]
fn a_request_can_name_the_user_who_must_log_in() {
    let user = UserId(uuid::Uuid::from_u128(7));
    let other = UserId(uuid::Uuid::from_u128(8));
    let claims = format!(r#"{{"id_token": {{"sub": {{"value": "{user}"}}}}}}"#);
    let request = accepted_request(&[("claims", &claims)]);
    assert!(request.allows_subject(user) && !request.allows_subject(other));
    let hinted = AuthorizationRequest { hinted_subject: Some(user), ..accepted_request(&[]) };
    assert!(hinted.allows_subject(user) && !hinted.allows_subject(other));
    assert!(accepted_request(&[]).allows_subject(other));
}

#[test]
fn parameters_are_kept_as_they_were_sent() {
    let sent = [("scope", "openid"), ("state", "a b"), ("unknown", "x"), ("nonce", ""), ("scope", "email")];
    let parameters = RequestParameters::new(sent);
    assert_eq!(parameters.iter().collect::<Vec<_>>(), [("scope", "openid"), ("state", "a b"), ("scope", "email")]);
    let text = serde_json::to_string(&parameters).unwrap();
    assert!(serde_json::from_str::<RequestParameters>(&text).unwrap() == parameters);
    assert!(KNOWN_PARAMETERS.is_sorted());
    let codes: std::collections::BTreeSet<&str> =
        AuthorizationErrorCode::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(codes.len(), AuthorizationErrorCode::ALL.len());
}
