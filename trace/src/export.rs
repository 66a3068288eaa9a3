//! The way out: a batch of spans now and then, from threads of its own, so that no request waits for a collector.

use std::{
    fmt, io,
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
    settings::{BadSetting, Protocol, Settings},
};

/// What the last spans may take when the process ends.
const LAST: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(5);

/// Spans are exported while this lives, and [`Export::finish`] sends the last ones.
pub struct Export {
    provider: SdkTracerProvider,
    /// A thread of its own: exporting neither waits for requests nor holds them up.
    runtime: Runtime,
}

/// Spans cannot be exported as the variables say.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error(transparent)]
    Setting(#[from] BadSetting),
    #[error("the authorities in {} (OTEL_EXPORTER_OTLP_CERTIFICATE) cannot be used", path.display())]
    Authorities { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("TLS to the collector cannot be used")]
    Tls(#[from] rustls::Error),
    #[error("spans cannot be exported")]
    Exporter(#[from] ExporterBuildError),
    #[error("spans have no thread to be exported from")]
    Thread(#[from] io::Error),
}

/// Sends from the export's own runtime: the SDK calls from a thread without one.
#[derive(Clone, Debug)]
struct Client {
    http: HyperClient<HttpsConnector<HttpConnector>>,
    runtime: Handle,
}

/// Says once that the collector is away, and once that it is there again.
#[derive(Debug)]
struct Told {
    exporter: SpanExporter,
    away: AtomicBool,
}

// === impl Export ===

impl Export {
    /// Nothing where the environment names no collector, or turns this off. `service` is the `service.name` where the
    /// environment gives none.
    pub fn from_env(service: &'static str, version: &'static str) -> Result<Option<Self>, Unusable> {
        let Some(settings) = Settings::read(|name| std::env::var(name).ok())? else { return Ok(None) };
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("spans").enable_all().build()?;
        let exporter = Told { exporter: exporter(&settings, runtime.handle())?, away: AtomicBool::new(false) };
        let provider = SdkTracerProvider::builder()
            .with_resource(resource(service, version))
            .with_sampler(settings.sampler.clone())
            .with_span_processor(BatchSpanProcessor::builder(exporter).build())
            .build();
        if settings.propagates {
            global::set_text_map_propagator(TraceContextPropagator::new());
        }
        Ok(Some(Self { provider, runtime }))
    }

    /// Hands on our own spans, and nothing else: what is logged may be for the operators' eyes alone.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
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

    /// Sends what is left, for a short time at most.
    pub fn finish(self) {
        if self.provider.shutdown_with_timeout(LAST).is_err() {
            warn!("the last spans were not exported");
        }
        self.runtime.shutdown_background();
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Export(…)")
    }
}

fn exporter(settings: &Settings, runtime: &Handle) -> Result<SpanExporter, Unusable> {
    match settings.protocol {
        Protocol::Http => {
            let http = HyperClient::new(connector(settings, &[])?, settings.timeout, None);
            let exporter = SpanExporter::builder()
                .with_http()
                .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                .with_http_client(Client { http, runtime: runtime.clone() });
            Ok(exporter.build()?)
        }
        Protocol::Grpc => {
            // The channel's own task runs there.
            let _runtime = runtime.enter();
            let channel = tonic::transport::Endpoint::from(settings.endpoint.clone())
                .timeout(settings.timeout)
                .connect_with_connector_lazy(connector(settings, &[b"h2"])?);
            Ok(SpanExporter::builder().with_tonic().with_channel(channel).build()?)
        }
    }
}

/// By TLS where the endpoint is `https`.
fn connector(settings: &Settings, protocols: &[&[u8]]) -> Result<HttpsConnector<HttpConnector>, Unusable> {
    let mut roots = RootCertStore::empty();
    match &settings.authorities {
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(path) => {
            let unusable = |source| Unusable::Authorities { path: path.clone(), source };
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
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_nodelay(true);
    Ok(HttpsConnector::from((tcp, tls)))
}

/// Who we are: what the environment says (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`), else the program's name.
fn resource(service: &'static str, version: &'static str) -> Resource {
    let given = Resource::builder().build();
    let name = given.get(&Key::from_static_str("service.name"));
    let named = name.is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    let resource = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.version", version))
        .with_attributes(given.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
    if named { resource.build() } else { resource.with_service_name(service).build() }
}

// === impl Client ===

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let http = self.http.clone();
        self.runtime.spawn(async move { http.send_bytes(request).await }).await?
    }
}

// === impl Told ===

impl opentelemetry_sdk::trace::SpanExporter for Told {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.exporter.export(batch).await;
        // The error is not told: it could quote what the collector said.
        match (self.away.swap(exported.is_err(), Ordering::Relaxed), exported.is_err()) {
            (false, true) => warn!(spans, "spans cannot be exported, and are lost until the collector takes them"),
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
