//! Hostile and malformed requests. Each bound is tested with its last valid and its first invalid value (specification:
//! HTTP API, Request bodies).

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use latchkey_tests::{client::ApiResponse, passwords::PASSWORD};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::support::{NAME, TestApp, WRONG_CODE, post_head, read_all, send_raw, status_of};

const EMAIL: &str = "ada@example.com";
const MAX_BODY_BYTES: usize = 64 * 1024;
const MAX_HEAD_BYTES: usize = 32 * 1024;

/// A body of *login* with an unknown email address. The response is 401 if the server has read the whole body.
fn login_body() -> String {
    json!({ "email": EMAIL, "password": PASSWORD }).to_string()
}

/// Posts bytes as JSON.
async fn post(test_app: &TestApp, operation: &str, body: impl Into<reqwest::Body>) -> ApiResponse {
    let client = test_app.client();
    let request =
        client.request(Method::POST, &test_app.email_path(operation)).header("content-type", "application/json");
    client.send(request.body(body)).await
}

/// The invalid fields that a response names, with their codes.
fn field_errors(response: &ApiResponse) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{}", response.text)).to_owned();
    let fields = response.body["fields"].as_array().unwrap_or_else(|| panic!("no fields in {}", response.text));
    fields.iter().map(|field| (text(&field["field"]), text(&field["code"]))).collect()
}

/// An email address of `total` bytes, `local` of them before the `@`.
fn email_address(local: usize, total: usize) -> String {
    let mut remaining = total - local - 1;
    let mut domain = String::new();
    while remaining > 64 {
        domain.push_str(&"d".repeat(60));
        domain.push('.');
        remaining -= 61;
    }
    format!("{}@{domain}{}.f", "l".repeat(local), "e".repeat(remaining - 2))
}

// === fields ===

#[tokio::test]
async fn a_refusal_names_every_invalid_field_and_not_only_the_first() {
    let test_app = TestApp::start().await;
    let all_fields = [
        ("login", vec!["email", "password"]),
        ("register", vec!["name", "email", "password"]),
        ("confirm", vec!["code"]),
        ("forgot-password", vec!["email"]),
        ("confirm-password", vec!["email", "code", "password"]),
    ];
    for (operation, names) in all_fields {
        let bodies = [Value::Null, json!(""), json!(5), json!(["x"]), json!({}), json!(true)];
        for bad in [None].into_iter().chain(bodies.iter().map(Some)) {
            let body: Value = names.iter().filter_map(|name| Some(((*name).to_owned(), bad?.clone()))).collect();
            let response = post(&test_app, operation, body.to_string()).await;
            let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
            let found = field_errors(&response);
            let mut expected = names.clone();
            expected.sort_unstable();
            assert_eq!(found.keys().collect::<Vec<_>>(), expected, "{operation} {bad:?}: {}", response.text);
        }
    }
    let response =
        post(&test_app, "register", json!({ "name": "\u{7}", "email": "x", "password": "" }).to_string()).await;
    assert_eq!(field_errors(&response).len(), 3, "{}", response.text);
    assert_eq!(test_app.settled_mail_count("x").await, 0);
}

#[tokio::test]
async fn unknown_fields_are_ignored() {
    let test_app = TestApp::start().await;
    let body =
        json!({ "name": NAME, "email": EMAIL, "password": PASSWORD, "admin": true, "x": { "y": [1] }, "": null });
    post(&test_app, "register", body.to_string()).await.expect(StatusCode::OK);
    let body = json!({ "email": EMAIL, "password": PASSWORD, "otp": "1" });
    post(&test_app, "login", body.to_string()).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_name_has_one_to_200_characters_and_no_control_characters() {
    let test_app = TestApp::start().await;
    let register = async |index: usize, name: &str| {
        test_app.client().register(test_app.id(), name, &format!("ada{index}@example.com"), PASSWORD).await
    };
    let longest = "\u{1f680}".repeat(200);
    for (index, good) in ["A", &longest, &format!(" {longest}  "), "d'Arc-\u{e9} (\u{627}) <b>"].iter().enumerate() {
        let response = register(index, good).await.expect(StatusCode::OK);
        assert_eq!(response.string("name"), good.trim());
    }
    for bad in [" ", "\t\n", &format!("{longest}x"), "a\u{0}b", "a\nb", "a\u{7f}b", "a\u{85}b"] {
        let response = register(99, bad).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(field_errors(&response).keys().collect::<Vec<_>>(), ["name"], "{bad:?}");
    }
}

#[tokio::test]
async fn an_address_has_at_most_254_bytes_and_is_a_dot_atom_at_a_host_name() {
    let test_app = TestApp::start().await;
    for good in [email_address(64, 254).as_str(), "a@b.cd", "o'brien+tag&x@xn--bcher-kva.example"] {
        let response = test_app.client().register(test_app.id(), NAME, good, PASSWORD).await.expect(StatusCode::OK);
        assert_eq!(response.string("email"), good);
        test_app.code(good, 1).await;
    }
    let too_long = email_address(64, 255);
    for bad in [
        too_long.as_str(),
        "ada",
        "ada@localhost",
        "ada@127.0.0.1",
        "ada@[127.0.0.1]",
        "\"a b\"@example.com",
        "a..b@example.com",
        "ada@example.com ",
        "Ada <ada@example.com>",
        "ada@example.com,eve@example.com",
        "ada@example.com\r\nBcc: eve@example.com",
        "ada\u{0}@example.com",
        "ada@b\u{fc}cher.example",
        "\u{e4}da@example.com",
    ] {
        for (operation, body) in [
            ("register", json!({ "name": NAME, "email": bad, "password": PASSWORD })),
            ("login", json!({ "email": bad, "password": PASSWORD })),
            ("forgot-password", json!({ "email": bad })),
            ("confirm-password", json!({ "email": bad, "code": WRONG_CODE, "password": PASSWORD })),
        ] {
            let response = post(&test_app, operation, body.to_string()).await;
            let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
            assert_eq!(field_errors(&response).keys().collect::<Vec<_>>(), ["email"], "{operation} {bad:?}");
        }
    }
}

#[tokio::test]
async fn a_password_has_8_to_128_characters() {
    let test_app = TestApp::start().await;
    let (shortest, longest) = ("q7\u{fc}#Vz!p", "\u{e9}q7#Vz!p".repeat(16));
    assert_eq!((shortest.chars().count(), longest.chars().count()), (8, 128));
    for (index, good) in [shortest, &longest].into_iter().enumerate() {
        let email = format!("ada{index}@example.com");
        test_app.client().register(test_app.id(), NAME, &email, good).await.expect(StatusCode::OK);
        test_app.client().login(test_app.id(), &email, good).await.expect(StatusCode::OK);
    }
    for (bad, code) in [("q7\u{fc}#Vz!", "too_short"), (&format!("{longest}x"), "too_long"), ("password", "guessable")]
    {
        let response = test_app.client().register(test_app.id(), NAME, EMAIL, bad).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "weak_password");
        assert_eq!(field_errors(&response), BTreeMap::from([("password".to_owned(), code.to_owned())]));
        assert!(!response.text.contains(bad) || bad == "password", "{}", response.text);
    }
    let client = test_app.client();
    let response =
        client.register(test_app.id(), "Xanthippe Wolkenstein", "zq@example.com", "xanthippewolkenstein").await;
    response.expect_error(StatusCode::BAD_REQUEST, "weak_password");
}

// === JSON ===

#[tokio::test]
async fn malformed_json_is_refused() {
    let test_app = TestApp::start().await;
    for bad in [
        "",
        " ",
        "{",
        "null",
        "[]",
        "\"x\"",
        "1",
        "{\"email\":\"ada@example.com\",\"password\":\"x\"} x",
        "{\"email\":\"ada@example.com\",\"password\":\"x\",}",
        "{'email':'ada@example.com'}",
        "{\"email\":\"ada@example.com\\ud800\",\"password\":\"x\"}",
        "{\"a\":01}",
        "{\"a\":1e999}",
        "{\"a\":NaN}",
        "{\"a\":\"\u{1}\"}",
        "\u{feff}{}",
        "/**/{}",
        "email=ada@example.com",
    ] {
        let response = post(&test_app, "login", bad).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert!(!response.text.contains("ada@"), "an error quotes no input: {}", response.text);
    }
}

#[tokio::test]
async fn a_duplicate_key_is_refused_at_any_depth() {
    let test_app = TestApp::start().await;
    for bad in [
        r#"{"email":"ada@example.com","email":"eve@example.com","password":"x"}"#,
        r#"{"email":"ada@example.com","password":"x","password":"x"}"#,
        r#"{"email":"ada@example.com","password":"x","\u0065mail":"eve@example.com"}"#,
        r#"{"email":"ada@example.com","password":"x","more":[{"a":1,"a":1}]}"#,
    ] {
        post(&test_app, "login", bad).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
}

#[tokio::test]
async fn nesting_is_limited_to_16_levels() {
    let test_app = TestApp::start().await;
    let nested = |open: &str, close: &str, depth: usize| {
        let (open, close) = (open.repeat(depth - 1), close.repeat(depth - 1));
        format!(r#"{{"email":"{EMAIL}","password":"x","more":{open}1{close}}}"#)
    };
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        post(&test_app, "login", nested(open, close, 16)).await.expect(StatusCode::UNAUTHORIZED);
        for depth in [17, 100, 9_000] {
            let response = post(&test_app, "login", nested(open, close, depth)).await;
            response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        }
    }
    let unclosed = "[".repeat(60_000);
    post(&test_app, "login", unclosed).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn invalid_utf_8_is_refused() {
    let test_app = TestApp::start().await;
    for bad in [&b"\xff"[..], b"\xc0\xae", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"caf\xe9"] {
        let body = [b"{\"email\":\"ada@example.com\",\"password\":\"", bad, b"\"}"].concat();
        post(&test_app, "login", body).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let utf_16: Vec<u8> = login_body().encode_utf16().flat_map(u16::to_le_bytes).collect();
    post(&test_app, "login", utf_16).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

// === media types ===

#[tokio::test]
async fn a_body_needs_the_json_content_type() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let send = async |content_type: Option<&str>| {
        let mut request = client.request(Method::POST, &test_app.email_path("login")).body(login_body());
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        client.send(request).await
    };
    for good in [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=\"UTF-8\"",
        "application/json; profile=\"x\"",
    ] {
        send(Some(good)).await.expect(StatusCode::UNAUTHORIZED);
    }
    for bad in [
        None,
        Some(""),
        Some("text/plain"),
        Some("text/json"),
        Some("application/x-www-form-urlencoded"),
        Some("multipart/form-data; boundary=x"),
        Some("application/json5"),
        Some("application/jsonx"),
        Some("application"),
        Some("*/*"),
    ] {
        let response = send(bad).await;
        response.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    }
    for (name, value) in [("content-encoding", "gzip"), ("content-type", "application/json; charset=utf-16")] {
        let request = client.request(Method::POST, &test_app.email_path("login")).header(name, value);
        let request = if name == "content-type" { request } else { request.header("content-type", "application/json") };
        let response = client.send(request.body(login_body())).await;
        response.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    }
}

// === sizes ===

#[tokio::test]
async fn a_body_has_at_most_64_kib_however_it_is_sent() {
    let test_app = TestApp::start().await;
    let body_of_size = |size: usize| {
        let body = login_body();
        let padding = " ".repeat(size - body.len());
        format!("{body}{padding}")
    };
    post(&test_app, "login", body_of_size(MAX_BODY_BYTES)).await.expect(StatusCode::UNAUTHORIZED);
    let response = post(&test_app, "login", body_of_size(MAX_BODY_BYTES + 1)).await;
    response.expect_error(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large");
    let response = post(&test_app, "login", body_of_size(4 * MAX_BODY_BYTES)).await;
    response.expect_error(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large");

    let server = test_app.stack.server().public;
    let chunked = |size: usize| {
        let body = body_of_size(size);
        let (first, second) = body.split_at(1000);
        let head = post_head(&test_app.email_path("login"));
        format!(
            "{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
            first.len(),
            second.len()
        )
    };
    assert_eq!(status_of(&send_raw(server, chunked(MAX_BODY_BYTES)).await), Some(401));
    assert_eq!(status_of(&send_raw(server, chunked(MAX_BODY_BYTES + 1)).await), Some(413));
    // The server rejects a request because of its announced length, before the body arrives.
    let announced = format!("{}Content-Length: 1000000000000\r\n\r\n{{", post_head(&test_app.email_path("login")));
    assert_eq!(status_of(&send_raw(server, announced).await), Some(413));
    post(&test_app, "login", body_of_size(100)).await.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_header_block_has_at_most_32_kib() {
    let test_app = TestApp::start().await;
    let server = test_app.stack.server().public;
    let body = login_body();
    // A request with a header block of `size` bytes, which consists of headers of `header_size` bytes.
    let padded = |size: usize, header_size: usize| {
        let mut head = format!("{}Content-Length: {}\r\n", post_head(&test_app.email_path("login")), body.len());
        let mut count = 0;
        while head.len() + 2 < size {
            let remaining = size - head.len() - 2;
            let length = if remaining < 2 * header_size { remaining } else { header_size };
            let name = format!("X-Pad-{count}: ");
            let value = "x".repeat(length.saturating_sub(name.len() + 2).max(1));
            head.push_str(&format!("{name}{value}\r\n"));
            count += 1;
        }
        format!("{head}\r\n{body}")
    };
    for header_size in [MAX_HEAD_BYTES, 1024] {
        let response = send_raw(server, padded(MAX_HEAD_BYTES - 1024, header_size)).await;
        assert_eq!(status_of(&response), Some(401), "{response}");
        for size in [MAX_HEAD_BYTES + 1024, 4 * MAX_HEAD_BYTES] {
            let response = send_raw(server, padded(size, header_size)).await;
            assert_eq!(status_of(&response), Some(431), "{size} bytes in headers of {header_size}: {response}");
        }
    }
    let many = (0..2000).map(|count| format!("X-{count}: x\r\n")).collect::<String>();
    let flood = send_raw(server, format!("{}{many}\r\n", post_head(&test_app.email_path("login")))).await;
    assert_eq!(status_of(&flood), Some(431), "{flood}");
    let long_path = format!("GET /{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "a".repeat(70_000));
    let response = send_raw(server, long_path).await;
    assert!(matches!(status_of(&response), Some(414 | 431)), "{response}");
    post(&test_app, "login", body).await.expect(StatusCode::UNAUTHORIZED);
}

// === time ===

#[tokio::test]
async fn headers_must_arrive_within_10_seconds_and_a_body_within_30() {
    let test_app = TestApp::start().await;
    let server = test_app.stack.server().public;
    let path = test_app.email_path("login");
    let head = post_head(&path);
    // Sends one byte every half second until the server closes the connection.
    let drip = async |start: String, byte: char| {
        let mut stream = TcpStream::connect(server).await.unwrap();
        let began = Instant::now();
        stream.write_all(start.as_bytes()).await.unwrap();
        let (mut reading, mut writing) = stream.into_split();
        let dripping = tokio::spawn(async move {
            let mut encoded = [0; 4];
            let encoded = byte.encode_utf8(&mut encoded).as_bytes();
            while writing.write_all(encoded).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
        let mut response = Vec::new();
        let read = tokio::io::AsyncReadExt::read_to_end(&mut reading, &mut response);
        drop(tokio::time::timeout(Duration::from_secs(60), read).await.expect("it is cut off in time"));
        dripping.abort();
        (status_of(&String::from_utf8_lossy(&response)), began.elapsed().as_secs())
    };
    let send_and_wait = async |start: String| {
        let mut stream = TcpStream::connect(server).await.unwrap();
        let began = Instant::now();
        stream.write_all(start.as_bytes()).await.unwrap();
        (status_of(&read_all(&mut stream).await), began.elapsed().as_secs())
    };
    let body = format!("{head}Content-Length: 1000\r\n\r\n{{");
    let chunk = format!("{head}Transfer-Encoding: chunked\r\n\r\n3e8\r\n{{");
    let (half_head, slow_head, nothing, half_body, slow_body, half_chunk, others) = tokio::join!(
        send_and_wait(head.clone()),
        drip(format!("{head}X: "), 'x'),
        send_and_wait(String::new()),
        send_and_wait(body.clone()),
        drip(body, ' '),
        send_and_wait(chunk),
        async {
            // In the meantime the server serves other requests.
            for _ in 0..20 {
                post(&test_app, "login", login_body()).await.expect(StatusCode::UNAUTHORIZED);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        },
    );
    let () = others;
    for (what, (status, seconds)) in [("half a head", half_head), ("a slow head", slow_head)] {
        assert_eq!(status, Some(408), "{what}");
        assert!((9..=20).contains(&seconds), "{what}: {seconds} s");
    }
    // A connection on which the client sends nothing is closed without a response, or with 408.
    assert!(matches!(nothing.0, None | Some(408)) && (9..=20).contains(&nothing.1), "nothing: {nothing:?}");
    for (what, (status, seconds)) in
        [("half a body", half_body), ("a slow body", slow_body), ("half a chunk", half_chunk)]
    {
        assert_eq!(status, Some(408), "{what}");
        assert!((29..=40).contains(&seconds), "{what}: {seconds} s");
    }
}

// === HTTP ===

#[tokio::test]
async fn malformed_http_is_refused_and_the_server_keeps_running() {
    let test_app = TestApp::start().await;
    let server = test_app.stack.server().public;
    let head = post_head(&test_app.email_path("login"));
    let two_lengths = format!("{head}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}} ");
    let bad_length = format!("{head}Content-Length: two\r\n\r\n{{}}");
    let bad_chunk = format!("{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n");
    let bad_coding = format!("{head}Transfer-Encoding: gzip\r\n\r\n{{}}");
    for bad in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET / HTTP/1.1\r\nbad header\r\n\r\n",
        "GET / HTTP/1.1\r\nX: a\0b\r\n\r\n",
        "GET / HTTP/1.1\r\nX : a\r\nConnection: close\r\n\r\n",
        &two_lengths,
        &bad_length,
        &bad_chunk,
        &bad_coding,
    ] {
        let response = send_raw(server, bad).await;
        let status = status_of(&response);
        assert!(status.is_none_or(|status| (400..500).contains(&status)), "{bad:?}: {response}");
    }
    // `Content-Length` together with `Transfer-Encoding` must not hide a second request (RFC 9112, section 6.3).
    let smuggled = format!(
        "{head}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    );
    let response = send_raw(server, smuggled).await;
    assert!(!response.contains("\"openapi\""), "{response}");
    post(&test_app, "login", login_body()).await.expect(StatusCode::UNAUTHORIZED);
    assert_eq!(test_app.stack.server().exit_status(), None);
}

#[tokio::test]
async fn repeated_headers_and_unusual_bytes_do_no_harm() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let request = client
        .request(Method::POST, &test_app.email_path("login"))
        .header("x-forwarded-for", "not an address")
        .header("x-forwarded-for", "1.2.3.4, 5.6.7.8")
        .header("user-agent", &b"\xff\xfe"[..])
        .header("cookie", "a=b; a=c")
        .header("origin", &b"\xff"[..])
        .header("if-none-match", "\"x\"")
        .header("authorization", &b"Bearer \xff"[..])
        .header("accept", "text/html")
        .json(&json!({ "email": EMAIL, "password": PASSWORD }));
    client.send(request).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    test_app.client().register(test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let long = "x".repeat(20_000);
    let request = client.request(Method::POST, &test_app.email_path("login")).header("user-agent", long);
    let request = request.json(&json!({ "email": EMAIL, "password": PASSWORD }));
    client.send(request).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn http_2_has_the_same_bounds() {
    let test_app = TestApp::start().await;
    let stream = TcpStream::connect(test_app.stack.server().public).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);
    let url = format!("http://{}/{}", test_app.stack.server().public, test_app.email_path("login"));
    let request = |padding: usize, body: Vec<u8>| {
        let request = hyper::Request::post(&url).header("content-type", "application/json");
        request.header("x-padding", "x".repeat(padding)).body(Full::new(Bytes::from(body))).unwrap()
    };
    let body = login_body().into_bytes();
    let padded = |size: usize| [body.clone(), vec![b' '; size - body.len()]].concat();
    for (padding, body, status) in [
        (10, body.clone(), StatusCode::UNAUTHORIZED),
        (MAX_HEAD_BYTES - 1024, body.clone(), StatusCode::UNAUTHORIZED),
        (10, padded(MAX_BODY_BYTES), StatusCode::UNAUTHORIZED),
        (10, padded(MAX_BODY_BYTES + 1), StatusCode::PAYLOAD_TOO_LARGE),
        (MAX_HEAD_BYTES, body.clone(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        (10, b"[]".to_vec(), StatusCode::BAD_REQUEST),
    ] {
        let response = sender.send_request(request(padding, body)).await.expect("the connection stays open");
        assert_eq!(response.status(), status, "{padding} bytes of padding");
        if status != StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE {
            assert!(response.headers().contains_key("x-request-id"));
        }
    }
}
