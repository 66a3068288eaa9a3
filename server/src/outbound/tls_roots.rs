//! The trusted root certificates of outgoing TLS connections.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs, pki_types::CertificateDer};
use tokio::sync::OnceCell;

/// The trusted root certificates of the machine (`SSL_CERT_FILE` and `SSL_CERT_DIR` if they are set), read once.
#[derive(Debug, Default)]
pub(crate) struct TlsRoots {
    extra_roots: Vec<CertificateDer<'static>>,
    config: OnceCell<Arc<ClientConfig>>,
}

/// The root certificates cannot be used.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the machine's trusted certificates cannot be used")]
pub(crate) struct RootsError;

// === impl TlsRoots ===

impl TlsRoots {
    /// Trusts these roots in addition to those of the machine.
    pub(crate) fn with_extra_roots(extra_roots: Vec<CertificateDer<'static>>) -> Self {
        Self { extra_roots, config: OnceCell::new() }
    }

    pub(crate) async fn tls_config(&self) -> Result<Arc<ClientConfig>, RootsError> {
        let load = || async {
            let extra_roots = self.extra_roots.clone();
            // This reads files, so it must not block a thread that serves requests.
            let roots = tokio::task::spawn_blocking(|| {
                let mut roots = RootCertStore::empty();
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                roots.add_parsable_certificates(extra_roots);
                roots
            });
            let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|_| RootsError)?
                .with_root_certificates(roots.await.map_err(|_| RootsError)?)
                .with_no_client_auth();
            Ok(Arc::new(config))
        };
        self.config.get_or_try_init(load).await.cloned()
    }
}
