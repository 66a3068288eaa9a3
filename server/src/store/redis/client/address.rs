//! The address of a Redis server, as sentinels and cluster nodes report it.

use redis::{ConnectionAddr, ConnectionInfo};

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ServerAddress {
    pub(super) host: String,
    pub(super) port: u16,
}

// === impl ServerAddress ===

impl ServerAddress {
    /// Parses `host:port` from a node's redirection. An empty host means the host of the redirecting node, `node_host`.
    pub(super) fn parse(text: &str, node_host: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some(Self { host: if host.is_empty() { node_host } else { host }.to_owned(), port: port.parse().ok()? })
    }

    /// Returns the address in connection settings. `None` for a Unix socket.
    pub(super) fn of(server: &ConnectionInfo) -> Option<Self> {
        match server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(Self { host: host.clone(), port: *port })
            }
            _ => None,
        }
    }

    /// Returns the settings of `server`, but with this address.
    pub(super) fn with_settings_of(&self, server: &ConnectionInfo) -> ConnectionInfo {
        let (host, port) = (self.host.clone(), self.port);
        let addr = match server.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        server.clone().set_addr(addr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirection_without_a_host_names_the_host_of_the_redirecting_node() {
        let parse = |text| ServerAddress::parse(text, "asked").map(|address| (address.host, address.port));
        assert_eq!(parse("10.0.0.1:6379"), Some(("10.0.0.1".to_owned(), 6379)));
        assert_eq!(parse("::1:6379"), Some(("::1".to_owned(), 6379)));
        assert_eq!(parse("[::1]:6379"), Some(("::1".to_owned(), 6379)));
        assert_eq!(parse(":6379"), Some(("asked".to_owned(), 6379)));
        assert_eq!(parse("10.0.0.1"), None);
        assert_eq!(parse("10.0.0.1:"), None);
    }
}
