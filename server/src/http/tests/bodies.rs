//! Request bodies: media types, JSON and size.

use std::time::Duration;

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::{FailingStores, Reply, TestServer};

#[tokio::test]
async fn bad_bodies_are_refused_before_any_store_is_called() {
    let server = TestServer::new(FailingStores::Panicking);
    let login = "/v1/shop/email/login";
    let login_with = |headers: &str| {
        format!("POST {login} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}Content-Length: 2\r\n\r\n{{}}")
    };
    server.send_request(login_with("")).await.assert_refused(415, "unsupported_media_type");
    server.send_request(login_with("Content-Type: text/plain\r\n")).await.assert_refused(415, "unsupported_media_type");
    server
        .send_request(login_with("Content-Type: application/json\r\nContent-Encoding: gzip\r\n"))
        .await
        .assert_refused(415, "unsupported_media_type");
    server.post(login, "", "").await.assert_refused(400, "invalid_request");
    server.post(login, "", "{").await.assert_refused(400, "invalid_request");
    let body = server.post(login, "", r#"{"email": "ada", "name": 1}"#).await.assert_refused(400, "invalid_request");
    assert_eq!(
        body["fields"],
        json!([
            { "field": "email", "code": "invalid", "message": "is not an email address" },
            { "field": "password", "code": "missing", "message": "is missing" },
        ])
    );
    assert_eq!(body["error_description"], "email is not an email address; password is missing");
}

#[tokio::test]
async fn the_declared_and_the_sent_length_of_a_body_are_bounded() {
    let server = TestServer::new(FailingStores::Panicking);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n";
    // The request is refused immediately, although its body never arrives.
    let reply = server.send_request(format!("{head}Content-Length: 65537\r\n\r\n")).await;
    reply.assert_refused(413, "payload_too_large");
    assert_eq!(reply.header("connection"), Some("close"));
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    server
        .send_request(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}{chunk}0\r\n\r\n"))
        .await
        .assert_refused(413, "payload_too_large");
    // A body of the maximum size is read. It is refused because it is not JSON.
    let reply = server.post("/v1/shop/email/login", "", &" ".repeat(65_536)).await;
    reply.assert_refused(400, "invalid_request");
}

#[tokio::test]
async fn a_refusal_arrives_while_the_body_is_still_being_sent() {
    let server = TestServer::new(FailingStores::Panicking);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(crate::http::serve(listener, server.public(), server.drain.clone()));
    let body = "x".repeat(200 * 1024);
    let request = format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    Reply::parse(&reply).assert_refused(413, "payload_too_large");
}
