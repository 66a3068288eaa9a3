//! Requests with complete responses, on connections with their own client addresses.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use anyhow::{Result, ensure};
use bytes::Bytes;
use hdrhistogram::Histogram;
use http::{HeaderMap, Request, StatusCode, request::Builder};
use http_body_util::{BodyExt, Full};

use crate::{
    logins::{Connection, connect},
    measurements::{histogram, micros_of},
};

/// A response with its complete body.
pub(crate) struct FullResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A GET request. `cookie` is the value of the header `Cookie`; empty: without this header.
pub(crate) fn get(server: SocketAddr, path: &str, cookie: &str) -> Result<Request<Full<Bytes>>> {
    Ok(with_cookie(Request::get(path), cookie).header("host", server.to_string()).body(Full::default())?)
}

/// A POST request with a form, without a body yet. Pass the result of [`encode_form`] as body.
pub(crate) fn post_form(server: SocketAddr, path: &str, cookie: &str) -> Builder {
    with_cookie(Request::post(path), cookie)
        .header("host", server.to_string())
        .header("content-type", "application/x-www-form-urlencoded")
}

pub(crate) fn encode_form(fields: &[(&str, &str)]) -> String {
    url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish()
}

fn with_cookie(request: Builder, cookie: &str) -> Builder {
    if cookie.is_empty() { request } else { request.header("cookie", cookie) }
}

pub(crate) async fn exchange(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<FullResponse> {
    connection.ready().await?;
    let (head, body) = connection.send_request(request).await?.into_parts();
    Ok(FullResponse { status: head.status, headers: head.headers, body: body.collect().await?.to_bytes() })
}

/// Sends GET requests for a path until the time `end`, each after the response to the previous one. Returns their
/// latencies.
pub(crate) async fn read_until(
    end: Instant,
    server: SocketAddr,
    from: IpAddr,
    path: String,
    cookie: String,
) -> Result<((), Histogram<u64>)> {
    let mut latency = histogram();
    let mut connection = connect(server, from).await?;
    while Instant::now() < end {
        let request = get(server, &path, &cookie)?;
        let started = Instant::now();
        let response = exchange(&mut connection, request).await?;
        ensure!(response.status == StatusCode::OK, "{path} returned {}", response.status);
        latency.record(micros_of(started.elapsed()))?;
    }
    Ok(((), latency))
}

// === impl FullResponse ===

impl FullResponse {
    /// The value of a header; empty if the response does not have it.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The cookies that the response sets, as the value of the header `Cookie`.
    pub(crate) fn cookies(&self) -> String {
        let fields = self.headers.get_all("set-cookie").iter().filter_map(|field| field.to_str().ok());
        let pairs: Vec<&str> = fields.filter_map(|field| field.split(';').next()).collect();
        pairs.join("; ")
    }
}
