//! Responses if a store fails, if a limit is reached, and if the App forbids a request.

use latchkey_crds::rendered::SignUp;

use super::{EMAIL_ENDPOINTS, FailingStores, TestServer};

#[tokio::test]
async fn a_store_outage_is_503() {
    let server = TestServer::new(FailingStores::Unavailable);
    for (operation, body) in EMAIL_ENDPOINTS {
        let reply = server.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert_eq!(reply.header("retry-after"), Some("5"), "{operation}");
        assert!(!reply.body.contains("secret-host"), "{operation}");
    }
}

#[tokio::test]
async fn internal_errors_are_500_and_reveal_nothing() {
    for stores in [FailingStores::Broken, FailingStores::Panicking] {
        let server = TestServer::new(stores);
        for (operation, body) in EMAIL_ENDPOINTS {
            let reply = server.post(&format!("/v1/shop/email/{operation}"), "", body).await;
            reply.assert_refused(500, "server_error");
            assert!(!reply.body.contains("secret-host") && !reply.body.contains("panics"), "{operation}");
        }
    }
}

#[tokio::test]
async fn a_reached_limit_says_when_to_retry() {
    let server = TestServer::new(FailingStores::Limited);
    for (operation, body) in EMAIL_ENDPOINTS {
        if operation == "forgot-password" {
            // The limit applies only to the mail that this call requests, and the response does not reveal the limit.
            continue;
        }
        let reply = server.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(429, "rate_limited");
        assert_eq!(reply.header("retry-after"), Some("9"), "{operation}");
        assert_eq!(reply.header("ratelimit-policy"), Some("\"loginsPerClient\";q=60;w=60"));
        assert_eq!(reply.header("ratelimit"), Some("\"loginsPerClient\";r=0;t=9"));
    }
}

#[tokio::test]
async fn hashing_at_capacity_is_503() {
    let server = TestServer::new(FailingStores::Overloaded);
    for (operation, body) in [EMAIL_ENDPOINTS[0], EMAIL_ENDPOINTS[1], EMAIL_ENDPOINTS[4]] {
        let reply = server.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert_eq!(reply.header("retry-after"), Some("3"), "{operation}");
    }
}

#[tokio::test]
async fn a_registration_that_the_app_forbids_gets_a_specific_error() {
    let closed = TestServer::with_app(FailingStores::Panicking, |app| app.sign_up = SignUp::Closed);
    let (_, body) = EMAIL_ENDPOINTS[1];
    closed.post("/v1/shop/email/register", "", body).await.assert_refused(403, "registration_disabled");
    let one_domain = TestServer::with_app(FailingStores::Panicking, |app| {
        app.allowed_email_domains = vec!["example.org".parse().unwrap()]
    });
    let refused = one_domain.post("/v1/shop/email/register", "", body).await.assert_refused(400, "invalid_request");
    assert_eq!(refused["fields"][0]["field"], "email");
    assert_eq!(refused["fields"][0]["code"], "domain_not_allowed");
    let server = TestServer::new(FailingStores::Overloaded);
    let short = r#"{"name": "Ada", "email": "ada@example.com", "password": "1234567"}"#;
    let refused = server.post("/v1/shop/email/register", "", short).await.assert_refused(400, "weak_password");
    assert_eq!(refused["fields"][0]["field"], "password");
    assert_eq!(refused["fields"][0]["code"], "too_short");
}
