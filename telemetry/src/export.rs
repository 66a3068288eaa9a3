//! Exports spans in batches, from separate threads, so that no request waits for the collector.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use http::{Request, Response};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry::{Key, KeyValue, global, trace::TracerProvider};
use opentelemetry_http::{Bytes, HttpClient, HttpError, hyper::HyperClient};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    propagation::TraceContextPropagator,
    trace::{BatchSpanProcessor, SdkTracerProvider, SpanData},
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, pem::PemObject},
};
use tokio::runtime::{Builder, Handle, Runtime};
use tracing::{Subscriber, info, level_filters::LevelFilter, warn};
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};

use crate::{
    TARGET,
    settings::{InvalidSetting, Protocol, Settings},
};

/// Timeout of the last export when the process ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Exports spans. [`TraceExporter::shutdown`] sends the remaining spans.
pub(crate) struct TraceExporter {
    provider: SdkTracerProvider,
    /// A separate runtime, so that exports and requests do not wait for each other.
    runtime: Runtime,
}

/// Why spans cannot be exported as configured.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    InvalidSetting(#[from] InvalidSetting),
    #[error("the root certificates in {} (OTEL_EXPORTER_OTLP_CERTIFICATE) cannot be used", path.display())]
    InvalidRoots { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("TLS to the collector cannot be used")]
    Tls(#[from] rustls::Error),
    #[error("spans cannot be exported")]
    Exporter(#[from] ExporterBuildError),
    #[error("the threads for the export of spans cannot be started")]
    Runtime(#[from] io::Error),
}

/// Sends requests on the runtime of the export, because the SDK calls the client from a thread without a runtime.
#[derive(Clone, Debug)]
struct RuntimeClient {
    http: HyperClient<HttpsConnector<HttpConnector>>,
    runtime: Handle,
}

/// Logs once when the collector becomes unavailable, and once when it is available again.
#[derive(Debug)]
struct OutageLogger {
    exporter: SpanExporter,
    is_unavailable: AtomicBool,
}

// === impl TraceExporter ===

impl TraceExporter {
    /// Creates the exporter that the environment configures. `None` if the environment names no collector or disables
    /// the export. `service` is the default of `service.name`.
    pub(crate) fn from_env(service: &'static str, version: &'static str) -> Result<Option<Self>, ExportError> {
        let Some(settings) = Settings::from_variables(|name| std::env::var(name).ok())? else { return Ok(None) };
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("spans").enable_all().build()?;
        let exporter =
            OutageLogger { exporter: exporter(&settings, runtime.handle())?, is_unavailable: AtomicBool::new(false) };
        let provider = SdkTracerProvider::builder()
            .with_resource(resource(service, version))
            .with_sampler(settings.sampler.clone())
            .with_span_processor(BatchSpanProcessor::builder(exporter).build())
            .build();
        if settings.propagates_context {
            global::set_text_map_propagator(TraceContextPropagator::new());
        }
        Ok(Some(Self { provider, runtime }))
    }

    /// The layer that exports spans with [`TARGET`] and nothing else, because log events can be confidential.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("latchkey"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO))
    }

    /// Sends the remaining spans, within 3 seconds, and ends the export.
    pub(crate) fn shutdown(self) {
        if self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT).is_err() {
            warn!("the last spans were not exported");
        }
        self.runtime.shutdown_background();
    }
}

fn exporter(settings: &Settings, runtime: &Handle) -> Result<SpanExporter, ExportError> {
    match settings.protocol {
        Protocol::Http => {
            let http = HyperClient::new(connector(settings, &[])?, settings.timeout, None);
            let exporter = SpanExporter::builder()
                .with_http()
                .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                .with_http_client(RuntimeClient { http, runtime: runtime.clone() });
            Ok(exporter.build()?)
        }
        Protocol::Grpc => {
            // While this guard exists, the channel starts its task on the runtime of the export.
            let _runtime = runtime.enter();
            let channel = tonic::transport::Endpoint::from(settings.endpoint.clone())
                .timeout(settings.timeout)
                .connect_with_connector_lazy(connector(settings, &[b"h2"])?);
            Ok(SpanExporter::builder().with_tonic().with_channel(channel).build()?)
        }
    }
}

/// Connects with TLS if the endpoint is `https`.
fn connector(settings: &Settings, protocols: &[&[u8]]) -> Result<HttpsConnector<HttpConnector>, ExportError> {
    let mut roots = RootCertStore::empty();
    match &settings.root_certificates {
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(path) => {
            let unusable = |source| ExportError::InvalidRoots { path: path.clone(), source };
            for certificate in CertificateDer::pem_file_iter(path).map_err(unusable)? {
                roots.add(certificate.map_err(unusable)?)?;
            }
        }
    }
    let mut tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_nodelay(true);
    Ok(HttpsConnector::from((tcp, tls)))
}

/// The resource attributes: those of the environment (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`), the version,
/// and `service` as the default of `service.name`.
fn resource(service: &'static str, version: &'static str) -> Resource {
    let from_env = Resource::builder().build();
    let name = from_env.get(&Key::from_static_str("service.name"));
    // Without a name in the environment, the SDK chooses one that starts with `unknown_service`.
    let has_name = name.is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    let resource = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.version", version))
        .with_attributes(from_env.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
    if has_name { resource.build() } else { resource.with_service_name(service).build() }
}

// === impl RuntimeClient ===

#[async_trait]
impl HttpClient for RuntimeClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let http = self.http.clone();
        self.runtime.spawn(async move { http.send_bytes(request).await }).await?
    }
}

// === impl OutageLogger ===

impl opentelemetry_sdk::trace::SpanExporter for OutageLogger {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.exporter.export(batch).await;
        // The error is not logged: it can quote the collector's response.
        match (self.is_unavailable.swap(exported.is_err(), Ordering::Relaxed), exported.is_err()) {
            (false, true) => warn!(spans, "spans cannot be exported and are lost until the collector accepts them"),
            (true, false) => info!("spans are exported again"),
            (false, false) | (true, true) => {}
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
