//! An OpenTelemetry collector that accepts OTLP over HTTP and gRPC and keeps the received spans.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Result;
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use crate::{eventually, process, tls::ServerTls};

/// Time limit for a span to arrive. By default a server sends a batch every five seconds, later on a loaded machine.
const SPAN_LIMIT: Duration = Duration::from_secs(30);

/// A running collector. It ends when this value is dropped.
pub struct Collector {
    addr: SocketAddr,
    tls: Option<ServerTls>,
    received: Arc<Mutex<Received>>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct Received {
    /// The request bodies.
    bytes: Vec<u8>,
    headers: Vec<HeaderMap>,
    spans: Vec<ReceivedSpan>,
}

/// A span with the resource that reported it.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    pub span: Span,
    pub resource: HashMap<String, String>,
}

// === impl Collector ===

impl Collector {
    pub async fn start() -> Result<Self> {
        Self::start_at(process::free_addr(), None).await
    }

    pub async fn start_at(addr: SocketAddr, tls: Option<ServerTls>) -> Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let acceptor = tls.as_ref().map(ServerTls::server_config).transpose()?.map(TlsAcceptor::from);
        let received = Arc::new(Mutex::new(Received::default()));
        let serving = tokio::spawn(accept(listener, acceptor, Arc::clone(&received)));
        Ok(Self { addr, tls, received, serving })
    }

    /// The value for `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.addr)
    }

    /// The bytes of all request bodies.
    pub fn bytes(&self) -> Vec<u8> {
        process::lock(&self.received).bytes.clone()
    }

    /// The headers of each export request.
    pub fn headers(&self) -> Vec<HeaderMap> {
        process::lock(&self.received).headers.clone()
    }

    pub fn spans(&self) -> Vec<ReceivedSpan> {
        process::lock(&self.received).spans.clone()
    }

    /// The spans of the trace with this id (hexadecimal).
    pub fn trace(&self, id: &str) -> Vec<ReceivedSpan> {
        let mut spans = self.spans();
        spans.retain(|span| span.trace_id() == id);
        spans
    }

    /// Waits for a span that matches.
    pub async fn wait_for(&self, what: &str, fits: impl Fn(&ReceivedSpan) -> bool) -> ReceivedSpan {
        eventually(what, SPAN_LIMIT, || async { self.spans().into_iter().find(&fits) }).await
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

// === impl ReceivedSpan ===

impl ReceivedSpan {
    pub fn name(&self) -> &str {
        &self.span.name
    }

    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    pub fn id(&self) -> String {
        hex(&self.span.span_id)
    }

    /// The id of the parent span; empty for a root span.
    pub fn parent(&self) -> String {
        hex(&self.span.parent_span_id)
    }

    /// An attribute, as text.
    pub fn attribute(&self, key: &str) -> Option<String> {
        self.span.attributes.iter().find(|attribute| attribute.key == key).map(attribute_text)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute_text(attribute: &KeyValue) -> String {
    match &attribute.value {
        Some(AnyValue { value: Some(Value::StringValue(text)) }) => text.clone(),
        Some(AnyValue { value: Some(Value::IntValue(number)) }) => number.to_string(),
        Some(AnyValue { value: Some(Value::BoolValue(truth)) }) => truth.to_string(),
        other => format!("{other:?}"),
    }
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, received: Arc<Mutex<Received>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, received) = (acceptor.clone(), Arc::clone(&received));
        tokio::spawn(async move {
            match acceptor {
                None => serve(stream, received).await,
                Some(acceptor) => {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        serve(stream, received).await;
                    }
                }
            }
        });
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin + 'static>(stream: S, received: Arc<Mutex<Received>>) {
    let service = service_fn(|request| respond(request, Arc::clone(&received)));
    drop(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await);
}

async fn respond(
    request: Request<Incoming>,
    received: Arc<Mutex<Received>>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let (message, frames) = match head.uri.path() {
        // The path for traces in OTLP over HTTP.
        "/v1/traces" => (body.clone(), Vec::new()),
        "/opentelemetry.proto.collector.trace.v1.TraceService/Export" => {
            // gRPC over HTTP/2: a message starts with a header of five bytes, and the status is in the trailers. An
            // empty message means that everything was accepted.
            let mut empty = BytesMut::new();
            empty.put_bytes(0, 5);
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            (body.slice(body.len().min(5)..), vec![Frame::data(empty.freeze()), Frame::trailers(trailers)])
        }
        _ => return Ok(empty_response(StatusCode::NOT_FOUND)),
    };
    let Ok(export) = ExportTraceServiceRequest::decode(message) else {
        return Ok(empty_response(StatusCode::BAD_REQUEST));
    };
    let is_grpc = !frames.is_empty();
    {
        let mut received = process::lock(&received);
        received.bytes.extend_from_slice(&body);
        received.headers.push(head.headers);
        for resource_spans in export.resource_spans {
            let resource = resource_spans.resource.unwrap_or_default();
            let resource: HashMap<_, _> = resource
                .attributes
                .iter()
                .map(|attribute| (attribute.key.clone(), attribute_text(attribute)))
                .collect();
            let spans = resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.spans.extend(spans.map(|span| ReceivedSpan { span, resource: resource.clone() }));
        }
    }
    let mut response = Response::new(StreamBody::new(stream::iter(frames.into_iter().map(Ok))).boxed());
    let kind = if is_grpc { "application/grpc" } else { "application/x-protobuf" };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

fn empty_response(status: StatusCode) -> Response<BoxBody<Bytes, Infallible>> {
    let mut response = Response::new(StreamBody::new(stream::iter([])).boxed());
    *response.status_mut() = status;
    response
}
