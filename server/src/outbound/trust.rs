//! Whose certificates are believed.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs, pki_types::CertificateDer};
use tokio::sync::OnceCell;

/// The roots that the machine trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` where they are set), read once.
#[derive(Debug, Default)]
pub(crate) struct Trust {
    more: Vec<CertificateDer<'static>>,
    config: OnceCell<Arc<ClientConfig>>,
}

/// The roots cannot be used.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the machine's trusted certificates cannot be used")]
pub(crate) struct NoRoots;

// === impl Trust ===

impl Trust {
    /// These roots beside the machine's.
    pub(crate) fn with(more: Vec<CertificateDer<'static>>) -> Self {
        Self { more, config: OnceCell::new() }
    }

    pub(crate) async fn config(&self) -> Result<Arc<ClientConfig>, NoRoots> {
        let load = || async {
            let more = self.more.clone();
            // Files are read: not on a thread that serves requests.
            let roots = tokio::task::spawn_blocking(|| {
                let mut roots = RootCertStore::empty();
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                roots.add_parsable_certificates(more);
                roots
            });
            let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|_| NoRoots)?
                .with_root_certificates(roots.await.map_err(|_| NoRoots)?)
                .with_no_client_auth();
            Ok(Arc::new(config))
        };
        self.config.get_or_try_init(load).await.cloned()
    }
}
