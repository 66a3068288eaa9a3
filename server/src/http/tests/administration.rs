//! The administration listener without stores: the checks that come before a store is used.

use std::sync::Arc;

use super::{FailingStores, Reply, TestServer, exchange, get_request};
use crate::http::{
    admin_service,
    routes::{AdministrationRoute, RouteTable, Verb},
};

const USER: &str = "019a8452-5d8c-7a0e-9b1f-2c3d4e5f6071";

async fn send(server: &TestServer, request: &str) -> Reply {
    let admin = admin_service(Arc::clone(&server.state), server.metrics.clone(), Arc::clone(&server.budgets));
    exchange(server.connect(admin.with_timeouts(server.timeouts)), request.as_bytes()).await
}

fn method(route: AdministrationRoute) -> &'static str {
    match route.verb() {
        Verb::Get | Verb::GetOnly | Verb::Any => "GET",
        Verb::Post => "POST",
        Verb::Put => "PUT",
        Verb::Patch => "PATCH",
        Verb::Delete => "DELETE",
    }
}

fn path(route: AdministrationRoute, app: &str) -> String {
    let path = route.path_template().replace("{APPID}", app).replace("{USER}", USER).replace("{SESSION}", USER);
    path.replace("{PROVIDER}", "github").replace("{WEBHOOK}", "sync").replace("{GROUP}", "staff")
}

/// The stores panic, so the test fails if a call uses a store before the caller is authenticated.
#[tokio::test]
async fn every_call_is_401_without_a_valid_token_whatever_its_query_and_body() {
    let server = TestServer::new(FailingStores::Panicking);
    for route in AdministrationRoute::ALL.iter().copied().filter(|route| route.path_template().contains("{APPID}")) {
        for headers in ["", "Authorization: Bearer a.b.c\r\n"] {
            let head = format!("{} {}?sort=%ff HTTP/1.1\r\nHost: a\r\n", method(route), path(route, "shop"));
            let request = format!("{head}Connection: close\r\n{headers}Content-Length: 1\r\n\r\n{{");
            let reply = send(&server, &request).await;
            reply.assert_refused(401, "invalid_client");
            assert!(reply.header("www-authenticate").unwrap().starts_with("Bearer realm=\"shop\""));
        }
        let request = get_request(&path(route, "nobody"), "").replacen("GET", method(route), 1);
        send(&server, &request).await.assert_refused(404, "app_not_found");
    }
}

#[tokio::test]
async fn the_listener_refuses_options_and_sends_no_cors_headers() {
    let server = TestServer::new(FailingStores::Panicking);
    let headers = "Origin: https://shop.example.com\r\nAccess-Control-Request-Method: GET\r\n";
    for route in AdministrationRoute::ALL.iter().copied() {
        let request = get_request(&path(route, "shop"), headers).replacen("GET", "OPTIONS", 1);
        let reply = send(&server, &request).await;
        reply.assert_refused(405, "method_not_allowed");
        assert!(!reply.headers.keys().any(|name| name.starts_with("access-control") || name == "vary"));
        assert!(!reply.header("allow").unwrap().contains("OPTIONS"));
    }
}

#[tokio::test]
async fn the_openapi_document_needs_no_token() {
    let server = TestServer::new(FailingStores::Panicking);
    let reply = send(&server, &get_request("/openapi.json", "")).await;
    assert_eq!((reply.status, reply.json()["info"]["title"].as_str()), (200, Some("Latchkey administration")));
}
