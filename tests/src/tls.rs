//! A certificate authority for one test, its certificates for servers (`localhost` and 127.0.0.1) and for clients, and
//! a TLS proxy in front of a server without TLS.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use crate::postgres::write_private;

/// The certificate of a TLS server, and the CA that the server's clients trust.
#[derive(Clone)]
pub struct ServerTls {
    /// The CA certificate, PEM.
    pub ca: String,
    /// The server's certificate, PEM.
    pub certificate: String,
    /// The server's private key, PEM.
    pub key: String,
}

/// Signs the certificates of servers and clients.
pub struct CertificateAuthority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its private key, both PEM.
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

/// A proxy that terminates TLS. It ends when this value is dropped.
pub struct TlsProxy {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

/// Installs aws-lc-rs as the crypto provider of rustls in this process; repeated calls have no effect.
pub fn install_crypto_provider() {
    // The call fails if a crypto provider is already installed.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}

// === impl ServerTls ===

impl ServerTls {
    pub fn new() -> Result<Self> {
        let authority = CertificateAuthority::new()?;
        let Identity { certificate, key } = authority.server(&["localhost", "127.0.0.1"])?;
        Ok(Self { ca: authority.certificate, certificate, key })
    }

    /// Writes `ca.pem`, `server.pem` and `server.key` (mode 0600). `owner` is the user that runs the server; `None` is
    /// the current user.
    pub fn write_to(&self, dir: &Path, owner: Option<u32>) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        for (name, content) in [("ca.pem", &self.ca), ("server.pem", &self.certificate), ("server.key", &self.key)] {
            let path = dir.join(name);
            if name == "server.key" {
                write_private(&path, content)?;
            } else {
                fs::write(&path, content)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
            }
            if let Some(owner) = owner {
                std::os::unix::fs::chown(&path, Some(owner), None)?;
            }
        }
        Ok(())
    }

    pub fn server_config(&self) -> Result<Arc<ServerConfig>> {
        install_crypto_provider();
        let chain = vec![CertificateDer::from_pem_slice(self.certificate.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())?;
        Ok(Arc::new(ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?))
    }

    /// A rustls root store with only this CA.
    pub fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca.as_bytes())?)?;
        Ok(roots)
    }
}

// === impl CertificateAuthority ===

impl CertificateAuthority {
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "Latchkey test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        Ok(Self { certificate, issuer: Issuer::new(params, key) })
    }

    /// The CA certificate, PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// A certificate for a server with these host names and IP addresses.
    pub fn server(&self, names: &[&str]) -> Result<Identity> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, "localhost");
        // Nodes of a Redis Cluster also use their server certificates as client certificates.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    /// A client certificate as Kubernetes reads it: the common name is the user, and the organization is the user's
    /// group.
    pub fn client(&self, user: &str, group: &str) -> Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Identity { certificate, key: key.serialize_pem() })
    }
}

// === impl TlsProxy ===

impl TlsProxy {
    pub async fn start(tls: &ServerTls, upstream: SocketAddr) -> Result<Self> {
        let acceptor = TlsAcceptor::from(tls.server_config()?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut outside = acceptor.accept(stream).await?;
                    let mut inside = TcpStream::connect(upstream).await?;
                    copy_bidirectional(&mut outside, &mut inside).await
                });
            }
        });
        Ok(Self { addr, task })
    }

    /// The proxy's URL. `name` is one of the names in the proxy's certificate.
    pub fn url(&self, name: &str) -> String {
        format!("https://{name}:{}", self.addr.port())
    }
}

impl Drop for TlsProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}
