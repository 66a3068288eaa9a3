//! Published documents (keys, discovery, OpenAPI, revisions), and how edits of a manifest take effect.

use std::fs;

use base64::{Engine, prelude::BASE64_STANDARD};
use http::{Method, StatusCode};
use jsonwebtoken::{DecodingKey, Validation, jwk::Jwk};
use latchkey_crds::rendered::Revision;
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{LIVE_LIMIT, NAME, RevisionStream, TestApp, WRONG_CODE, app};

const EMAIL: &str = "ada@example.com";

/// Verifies a token as a resource server does: with the published keys, for this issuer and audience. Returns the
/// claims.
fn verify_token(jwks: &Value, token: &str, issuer: &str, audience: &str) -> jsonwebtoken::errors::Result<Value> {
    let header = jsonwebtoken::decode_header(token)?;
    assert_eq!(header.typ.as_deref(), Some("at+jwt"));
    let keys = jwks["keys"].as_array().expect("a key set");
    let key = keys.iter().find(|key| key["kid"].as_str() == header.kid.as_deref()).expect("the key is published");
    let key: Jwk = serde_json::from_value(key.clone()).expect("a JWK");
    let mut validation = Validation::new(header.alg);
    validation.set_issuer(&[issuer]);
    validation.set_audience(&[audience]);
    validation.set_required_spec_claims(&["iss", "aud", "sub", "exp"]);
    Ok(jsonwebtoken::decode::<Value>(token, &DecodingKey::from_jwk(&key)?, &validation)?.claims)
}

// === tokens and keys ===

#[tokio::test]
async fn access_tokens_follow_rfc_9068_and_verify_with_the_published_keys() {
    let apps = [
        (app(), "ES256", "EC"),
        (app().set("/tokens/signingAlgorithm", "EdDSA"), "EdDSA", "OKP"),
        (app().set("/tokens/signingAlgorithm", "RS256"), "RS256", "RSA"),
    ];
    let builder = apps.iter().fold(Stack::builder(), |builder, (app, _, _)| builder.app(app));
    let stack = builder.start().await;
    for (app, algorithm, key_type) in &apps {
        let client = stack.client();
        client.register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
        let login = client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        let jwks = client.get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK).body;
        for key in jwks["keys"].as_array().unwrap() {
            assert_eq!((key["alg"].as_str(), key["kty"].as_str()), (Some(*algorithm), Some(*key_type)));
            assert_eq!(key["use"], "sig");
            assert!(key["kid"].as_str().is_some_and(|kid| kid.starts_with('s')));
            for private in ["d", "p", "q", "dp", "dq", "qi", "k"] {
                assert!(key.get(private).is_none(), "a private part is published");
            }
        }

        let (issuer, token) = (stack.issuer(app), login.string("token"));
        let claims = verify_token(&jwks, token, &issuer, app.id()).unwrap();
        assert_eq!(claims["sub"], login.body["user"]["id"]);
        assert_eq!(claims["client_id"], app.id());
        assert_eq!(claims["sid"], login.body["session_id"]);
        assert_eq!(claims["exp"], login.body["expires_at"]);
        let lifetime = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
        assert_eq!(lifetime, login.integer("expires_in"));
        assert!((855..=900).contains(&lifetime));
        assert!(claims["jti"].is_string());
        assert_eq!(claims["auth_time"], claims["iat"]);
        assert_eq!(claims["amr"], json!(["pwd"]));
        assert_eq!(claims["name"], NAME);
        assert_eq!(claims["email_verified"], false);
        assert_eq!(claims.get("email"), None, "only when verified");

        let (head, signature) = token.rsplit_once('.').unwrap();
        let forged = format!("{head}.{}", signature.chars().rev().collect::<String>());
        assert!(self::verify_token(&jwks, &forged, &issuer, app.id()).is_err());
        client.with_token(app.id(), &forged).verify().await.expect(StatusCode::UNAUTHORIZED);
    }
}

#[tokio::test]
async fn a_token_has_the_verified_address_and_the_apps_audiences() {
    let audiences = json!(["https://api.example.com", "reports"]);
    let app = app().set("/tokens/audiences", audiences.clone()).set("/tokens/accessLifetimeSeconds", 600);
    let test_app = TestApp::start_with(app).await;
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let client = test_app.client();
    let confirmed = client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let jwks = client.get(&format!("{}/.well-known/jwks.json", test_app.id())).await.body;
    let issuer = test_app.stack.issuer(&test_app.app);
    let claims = verify_token(&jwks, confirmed.string("access_token"), &issuer, "reports").unwrap();
    assert_eq!(claims["aud"], audiences);
    assert_eq!((&claims["email"], &claims["email_verified"]), (&json!(EMAIL), &json!(true)));
    assert_eq!(claims["sub"], confirmed.body["local_id"]);
    assert_eq!(claims["sid"], confirmed.body["session_id"]);
    assert!((570..=600).contains(&confirmed.integer("expires_in")));
    assert_eq!(claims["exp"], confirmed.body["expires_at"]);
    client.with_token(test_app.id(), confirmed.string("access_token")).verify().await.expect(StatusCode::OK);
}

#[tokio::test]
async fn codes_and_tokens_stay_valid_after_a_rotation_until_their_key_is_dropped() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    test_app.register("grace@example.com").await;
    let codes = [test_app.code(EMAIL, 1).await, test_app.code("grace@example.com", 1).await];
    let client = test_app.client();
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let old_session = client.with_token(test_app.id(), login.string("token"));
    let kids = async || -> Vec<String> {
        let jwks = client.get(&format!("{}/.well-known/jwks.json", test_app.id())).await.body;
        jwks["keys"].as_array().unwrap().iter().map(|key| key["kid"].as_str().unwrap().to_owned()).collect()
    };
    let kids_before = kids().await;

    test_app
        .edit_rendered(|document| {
            for kind in ["signing", "hmac"] {
                document["keys"][kind][0]["state"] = json!("Retired");
            }
            let pem = rcgen::KeyPair::generate().unwrap().serialize_pem();
            for (id, state) in [("s8", "Active"), ("s9", "Published")] {
                let key = json!({ "id": id, "state": state, "algorithm": "ES256", "privateKey": pem });
                document["keys"]["signing"].as_array_mut().unwrap().push(key);
            }
            let key = json!({ "id": "h8", "state": "Active", "secret": BASE64_STANDARD.encode([7; 32]) });
            document["keys"]["hmac"].as_array_mut().unwrap().push(key);
        })
        .await;
    let all_kids = kids().await;
    assert!(
        all_kids.contains(&kids_before[0])
            && all_kids.contains(&"s8".to_owned())
            && all_kids.contains(&"s9".to_owned()),
        "{all_kids:?}"
    );
    let new_login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(jsonwebtoken::decode_header(new_login.string("token")).unwrap().kid.as_deref(), Some("s8"));
    old_session.verify().await.expect(StatusCode::OK);
    // Waits for the mail of *verify* before the confirmation, because a confirmed address gets no code.
    test_app.code(EMAIL, 2).await;
    client.confirm(test_app.id(), &codes[0]).await.expect(StatusCode::OK);

    let reset_code = test_app.request_reset_code(EMAIL, 3).await;
    let last_login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let revoked = client.login(test_app.id(), "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
    test_app
        .edit_rendered(|document| {
            for kind in ["signing", "hmac"] {
                document["keys"][kind].as_array_mut().unwrap().remove(0);
            }
            document["keys"]["signing"][0]["privateKey"] = json!(rcgen::KeyPair::generate().unwrap().serialize_pem());
        })
        .await;
    assert_eq!(kids().await, ["s8", "s9"]);
    for token in [last_login.string("token"), revoked.string("token")] {
        let refused = client.with_token(test_app.id(), token).verify().await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    let refused = client.confirm(test_app.id(), &codes[1]).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    client.confirm_password(test_app.id(), EMAIL, &reset_code, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn keys_and_discovery_can_be_cached_for_five_minutes_and_revalidated() {
    let test_app = TestApp::start().await;
    let (id, client) = (test_app.id(), test_app.client());
    for path in [
        format!("{id}/.well-known/jwks.json"),
        format!("{id}/.well-known/openid-configuration"),
        format!(".well-known/oauth-authorization-server/{id}"),
        format!("{id}/.well-known/oauth-authorization-server"),
    ] {
        let response = client.get(&path).await.expect(StatusCode::OK);
        assert_eq!(response.header("cache-control"), Some("public, max-age=300"), "{path}");
        assert!(response.header("content-type").unwrap().contains("json"), "{path}");
        let etag = response.header("etag").unwrap().to_owned();
        assert!(etag.ends_with('"'), "{etag}");

        let send_with_etags = async |method: Method, etags: &str| {
            client.send(client.request(method, &path).header("if-none-match", etags)).await
        };
        for etags in [etag.clone(), format!("\"other\", {etag}"), "*".to_owned()] {
            let response = send_with_etags(Method::GET, &etags).await.expect(StatusCode::NOT_MODIFIED);
            assert_eq!(response.text, "");
            assert_eq!(response.header("etag"), Some(etag.as_str()));
            assert_eq!(response.header("cache-control"), Some("public, max-age=300"));
        }
        send_with_etags(Method::GET, "\"other\"").await.expect(StatusCode::OK);

        let head = client.send(client.request(Method::HEAD, &path)).await.expect(StatusCode::OK);
        assert_eq!(head.text, "");
        for name in ["etag", "cache-control", "content-type", "content-length", "x-content-type-options"] {
            assert_eq!(head.header(name), response.header(name), "{path}: {name}");
        }
    }
}

#[tokio::test]
async fn discovery_says_where_the_keys_are() {
    let test_app = TestApp::start().await;
    let (id, client) = (test_app.id(), test_app.client());
    let issuer = test_app.stack.issuer(&test_app.app);
    for path in [
        format!("{id}/.well-known/openid-configuration"),
        format!(".well-known/oauth-authorization-server/{id}"),
        format!("{id}/.well-known/oauth-authorization-server"),
    ] {
        let document = client.get(&path).await.expect(StatusCode::OK).body;
        assert_eq!(document["issuer"], issuer, "{path}");
        assert_eq!(document["jwks_uri"], format!("{issuer}/.well-known/jwks.json"), "{path}");
        for field in ["authorization_endpoint", "scopes_supported", "registration_endpoint"] {
            assert_eq!(document.get(field), None, "{path}");
        }
        for (field, endpoint) in
            [("token_endpoint", "token"), ("revocation_endpoint", "revoke"), ("introspection_endpoint", "introspect")]
        {
            let url = format!("{}/v1/{id}/{endpoint}", test_app.stack.base_url());
            assert_eq!(document[field], url, "{path}");
            let response =
                client.post(&format!("v1/{id}/{endpoint}"), &json!({ "token": "x", "refresh_token": "x" })).await;
            assert_ne!(response.status, StatusCode::NOT_FOUND, "{field}");
        }
        let none = json!(["none"]);
        for list in ["response_types", "token_endpoint_auth_methods"] {
            assert_eq!(document[format!("{list}_supported")], none, "{path}");
        }
        assert_eq!(document["revocation_endpoint_auth_methods_supported"], none, "{path}");
        let grants = document["grant_types_supported"].as_array().unwrap();
        assert!(grants.contains(&json!("refresh_token")), "{path}");
        // RFC 8414, section 3.2: a metadata document contains no empty lists.
        assert!(document.as_object().unwrap().values().all(|value| *value != json!([])), "{path}");
    }
    let keys = client.get(&format!("{id}/.well-known/jwks.json")).await.body;
    assert!(!keys["keys"].as_array().unwrap().is_empty());

    let openid = client.get(&format!("{id}/.well-known/openid-configuration")).await.body;
    assert_eq!(openid["userinfo_endpoint"], format!("{}/v1/{id}/userinfo", test_app.stack.base_url()));
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    let claims = client.with_token(id, &token).get("userinfo").await.expect(StatusCode::OK).body;
    let supported = openid["claims_supported"].as_array().unwrap();
    assert!(claims.as_object().unwrap().keys().all(|claim| supported.contains(&json!(claim))), "{claims}");
}

// === OpenAPI ===

/// The OpenAPI document, for comparison with responses.
struct OpenApiDocument(Value);

impl OpenApiDocument {
    /// Asserts that the body of a response matches the schema of its operation and status.
    #[track_caller]
    fn assert_matches(&self, path: &str, method: &str, response: &ApiResponse) {
        let operation = &self.0["paths"][path][method];
        assert!(operation.is_object(), "{method} {path} is not in the document");
        let documented = &operation["responses"][response.status.as_str()];
        let documented = self.resolve_reference(documented);
        assert!(documented.is_object(), "{method} {path} does not document {}: {}", response.status, response.text);
        let schema = &documented["content"]["application/json"]["schema"];
        assert!(schema.is_object(), "{method} {path} {} has no schema", response.status);
        let full_schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "allOf": [schema],
            "components": self.0["components"],
        });
        let validator = jsonschema::validator_for(&full_schema).expect("the schema is valid");
        let errors: Vec<String> = validator.iter_errors(&response.body).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{method} {path} {}: {errors:?} in {}", response.status, response.text);
        // Checks the schema itself: it must reject a wrong body.
        let invalid = json!({ "error": 5, "email": 5, "keys": 5, "issuer": 5 });
        assert!(!validator.is_valid(&invalid), "the schema of {method} {path} {} accepts anything", response.status);
    }

    fn resolve_reference<'a>(&'a self, object: &'a Value) -> &'a Value {
        match object["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.trim_start_matches('#')).expect("the reference resolves"),
            None => object,
        }
    }
}

#[tokio::test]
async fn responses_match_the_openapi_document() {
    let (open, closed) = (app().limit("codesPerClient", &[(2, 3600)]), app().set("/signUp", "Closed"));
    let revealing = app().set("/enumerationProtection", "Off").set("/requireVerifiedEmail", true);
    let stack = Stack::builder().app(&open).app(&closed).app(&revealing).start().await;
    let test_app = TestApp { stack, app: open };
    let (id, client) = (test_app.id(), test_app.client());
    let document = client.get("openapi.json").await.expect(StatusCode::OK);
    assert!(document.header("content-type").unwrap().starts_with("application/json"));
    assert!(document.string("openapi").starts_with("3.1."));
    let openapi = OpenApiDocument(document.body);
    let check = |operation: &str, response: &ApiResponse| {
        openapi.assert_matches(&format!("/v1/{{APPID}}/email/{operation}"), "post", response);
    };

    check("register", &test_app.register(EMAIL).await);
    check("register", &client.register(id, "", "x", "").await);
    check("register", &client.register(id, NAME, EMAIL, "password").await);
    check("register", &client.register(closed.id(), NAME, EMAIL, PASSWORD).await);
    check("register", &client.register("nowhere", NAME, EMAIL, PASSWORD).await);
    client.register(revealing.id(), NAME, "off@example.com", PASSWORD).await.expect(StatusCode::OK);
    check("login", &client.login(revealing.id(), "off@example.com", PASSWORD).await);
    let code = test_app.code("off@example.com", 1).await;
    client.confirm(revealing.id(), &code).await.expect(StatusCode::OK);
    check("register", &client.register(revealing.id(), NAME, "off@example.com", PASSWORD).await);

    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    check("login", &login);
    check("login", &client.login(id, EMAIL, WRONG_PASSWORD).await);
    check("login", &client.post(&test_app.email_path("login"), &json!(" ".repeat(70_000))).await);
    check("login", &client.send(client.request(Method::POST, &test_app.email_path("login")).body("x")).await);
    check("verify", &client.with_token(id, login.string("token")).verify().await);
    check("verify", &client.with_token(id, "x").verify().await);
    check("verify", &client.post(&test_app.email_path("verify"), &json!({ "x": 1 })).await);
    check("forgot-password", &client.forgot_password(id, EMAIL).await);
    check("forgot-password", &client.forgot_password(id, "x").await);
    // Two codes to confirm the email address, and the reset code.
    let codes = [test_app.code(EMAIL, 1).await, test_app.code(EMAIL, 2).await, test_app.code(EMAIL, 3).await];
    for code in codes {
        check("confirm-password", &test_app.client().confirm_password(id, EMAIL, &code, NEW_PASSWORD).await);
    }
    client.login(id, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.register("grace@example.com").await;
    let second = client.register(id, NAME, "grace@example.com", NEW_PASSWORD).await;
    second.expect(StatusCode::OK);
    let code = test_app.code("grace@example.com", 2).await;
    let confirmed = client.confirm(id, &code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.body["password_required"], true);
    check("confirm", &confirmed);
    for _ in 0..3 {
        check("confirm", &client.confirm(id, WRONG_CODE).await);
    }
    check("confirm-password", &client.confirm_password(id, EMAIL, WRONG_CODE, NEW_PASSWORD).await);

    // The endpoints of the user's own account. The login is recent, so the account can be deleted without the password.
    let owner = test_app.log_in(client.clone(), EMAIL, NEW_PASSWORD).await;
    let check_own = |path: &str, method: &str, response: &ApiResponse| {
        openapi.assert_matches(&format!("/v1/{{APPID}}/{path}"), method, response);
    };
    check_own("user", "get", &owner.get_user().await.expect(StatusCode::OK));
    check_own("userinfo", "get", &owner.signed_in.get("userinfo").await.expect(StatusCode::OK));
    check_own("user", "patch", &owner.rename_user("Grace").await.expect(StatusCode::OK));
    check_own("user", "patch", &owner.rename_user("").await.expect(StatusCode::BAD_REQUEST));
    let response = owner.change_address(Some(NEW_PASSWORD), "new@example.com").await;
    check_own("user/email", "post", &response.expect(StatusCode::OK));
    check_own(
        "user/email",
        "post",
        &owner.change_address(None, "new@example.com").await.expect(StatusCode::UNAUTHORIZED),
    );
    check_own("user/email", "post", &owner.change_address(None, "new").await.expect(StatusCode::BAD_REQUEST));
    check_own("user/password", "post", &owner.change_password(None, "password").await.expect(StatusCode::BAD_REQUEST));
    let wrong = owner.change_password(Some(WRONG_PASSWORD), PASSWORD).await;
    check_own("user/password", "post", &wrong.expect(StatusCode::UNAUTHORIZED));
    check_own(
        "user",
        "delete",
        &owner.delete_user(&json!({ "password": WRONG_PASSWORD })).await.expect(StatusCode::UNAUTHORIZED),
    );
    check_own("user", "delete", &owner.delete_user(&json!({ "password": 5 })).await.expect(StatusCode::BAD_REQUEST));
    owner.delete_user(&json!({})).await.expect(StatusCode::OK);
    check_own("user", "get", &owner.get_user().await.expect(StatusCode::UNAUTHORIZED));

    for (template, path) in [
        ("/{APPID}/.well-known/jwks.json", format!("{id}/.well-known/jwks.json")),
        ("/{APPID}/.well-known/openid-configuration", format!("{id}/.well-known/openid-configuration")),
        ("/.well-known/oauth-authorization-server/{APPID}", format!(".well-known/oauth-authorization-server/{id}")),
    ] {
        openapi.assert_matches(template, "get", &client.get(&path).await.expect(StatusCode::OK));
        openapi.assert_matches(template, "get", &client.get(&path.replace(id, "nowhere")).await);
    }
}

// === live edits ===

#[tokio::test]
async fn edits_additions_and_removals_of_apps_take_effect() {
    let app = app();
    let stack = Stack::builder().app(&app).watch().start().await;
    let client = stack.client();
    let (mut revisions, hello) = RevisionStream::open(stack.server()).await;
    let document = fs::read(stack.rendered().join(format!("{}.json", app.id()))).unwrap();
    let reported = hello.revisions.iter().find(|(id, _)| id.as_str() == app.id()).map(|(_, revision)| revision.clone());
    assert_eq!(reported, Some(Revision::of(&document)));
    let keys = client.get(&format!("{}/.well-known/jwks.json", app.id())).await.text;

    stack.apply(&app.clone().set("/signUp", "Closed")).unwrap();
    let change = revisions.next_change_where(|change| change.app.as_str() == app.id()).await;
    assert_ne!(change.revision, reported);
    let refused = client.register(app.id(), NAME, EMAIL, PASSWORD).await;
    refused.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
    assert_eq!(client.get(&format!("{}/.well-known/jwks.json", app.id())).await.text, keys, "the keys do not change");

    let another = App::new("another");
    stack.apply(&another).unwrap();
    revisions.next_change_where(|change| change.app.as_str() == another.id() && change.revision.is_some()).await;
    client.login(another.id(), EMAIL, PASSWORD).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");

    stack.delete(&another).unwrap();
    revisions.next_change_where(|change| change.app.as_str() == another.id() && change.revision.is_none()).await;
    client.login(another.id(), EMAIL, PASSWORD).await.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    client.login(app.id(), EMAIL, PASSWORD).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
}

#[tokio::test]
async fn an_invalid_manifest_changes_nothing_and_does_not_affect_other_manifests() {
    let (broken, other) = (app(), app());
    let stack = Stack::builder().app(&broken).app(&other).watch().start().await;
    let client = stack.client();
    let (mut revisions, _) = RevisionStream::open(stack.server()).await;
    stack.apply(&broken.clone().set("/signUp", "Sometimes").set("/displayName", "Broken")).unwrap();
    stack.apply(&other.clone().set("/signUp", "Closed")).unwrap();
    let change = revisions.next_change_where(|_| true).await;
    assert_eq!(change.app.as_str(), other.id());
    let refused = client.register(other.id(), NAME, EMAIL, PASSWORD).await;
    refused.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
    client.register(broken.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_invalid_document_is_rejected_and_the_earlier_document_stays_in_use() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let path = test_app.stack.rendered().join(format!("{}.json", test_app.id()));
    let good = fs::read(&path).unwrap();
    let served = Revision::of(&good);
    let (mut revisions, _) = RevisionStream::open(test_app.stack.server()).await;
    let mut keyless: Value = serde_json::from_slice(&good).unwrap();
    keyless["keys"]["signing"] = json!([]);
    keyless["signUp"] = json!("Closed");
    for bad in [&good[..good.len() / 2], b"{}", b"\xff\xfe", keyless.to_string().as_bytes()] {
        fs::write(&path, bad).unwrap();
        // While the file is being written, the server can read and reject it more than once.
        let change = revisions.next_change_where(|change| change.refused.is_some()).await;
        assert_eq!(change.app.as_str(), test_app.id());
        assert_eq!(change.revision, Some(served.clone()), "the serving revision is reported");
        assert!(!change.refused.unwrap().reason.contains("PRIVATE"));
        let (_, hello) = RevisionStream::open(test_app.stack.server()).await;
        assert!(hello.revisions.values().any(|revision| *revision == served));
        client.register(test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    eventually("the rejection in the log", LIVE_LIMIT, || async {
        let log = test_app.stack.server().read_log();
        log.lines().any(|line| line.contains("rejected") && line.contains(test_app.id())).then_some(())
    })
    .await;
    assert!(!test_app.stack.server().read_log().contains("PRIVATE KEY"));

    test_app
        .edit_rendered(|document| {
            *document = serde_json::from_slice(&good).unwrap();
            document["signUp"] = json!("Closed");
        })
        .await;
    let refused = client.register(test_app.id(), NAME, EMAIL, PASSWORD).await;
    refused.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
}

#[tokio::test]
async fn a_document_in_a_later_format_is_served_with_its_known_fields() {
    let test_app = TestApp::start().await;
    test_app
        .edit_rendered(|document| {
            document["format"] = json!(99);
            document["somethingNew"] = json!({ "deep": [1, 2, 3] });
            document["mail"]["somethingNew"] = json!(true);
            document["signUp"] = json!("Closed");
        })
        .await;
    let refused = test_app.client().register(test_app.id(), NAME, EMAIL, PASSWORD).await;
    refused.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
}

#[tokio::test]
async fn the_operations_listener_reports_health_and_its_paths_are_not_public() {
    let test_app = TestApp::start().await;
    let server = test_app.stack.server();
    for path in ["livez", "readyz", "metrics"] {
        server.get_ops(path).await.expect(StatusCode::OK);
        test_app.client().get(path).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    let ops = ApiClient::new(server.ops);
    let login = ops.login(test_app.id(), EMAIL, PASSWORD).await;
    assert_eq!(login.status, StatusCode::NOT_FOUND, "{}", login.text);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let metrics = server.get_ops("metrics").await.text;
    assert!(metrics.contains("login"), "{metrics}");
    let (_, hello) = RevisionStream::open(server).await;
    assert!(hello.pod_uid.parse::<Uuid>().is_ok_and(|uid| !uid.is_nil()), "{}", hello.pod_uid);
}
