//! Settings of the installation for all Apps.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use latchkey_crds::types::IssuerUrl;

#[derive(Clone, Debug)]
pub struct Settings {
    /// External URL of the public listener, without a trailing slash.
    pub base_url: IssuerUrl,
    /// Networks of trusted proxies. `X-Forwarded-For` is used only in requests from these networks.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether the sampled flag of a `traceparent` from a trusted proxy is used.
    pub trusts_traceparent: bool,
    /// Identifies this process in the stream of revisions that it sends to the operator: the UID of the pod, or a
    /// random UUID.
    pub pod_uid: String,
}

// === impl Settings ===

impl Settings {
    /// Whether this peer is a trusted proxy.
    pub fn is_trusted_proxy(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted_proxies.iter().any(|net| net.contains(&peer))
    }

    /// Whether the sampled flag of a `traceparent` from this peer is used.
    pub fn trusts_sampling(&self, peer: IpAddr) -> bool {
        self.trusts_traceparent && self.is_trusted_proxy(peer)
    }

    /// Returns the IP address of the client. If the peer is not a trusted proxy, the peer is the client. Otherwise the
    /// entries of the `X-Forwarded-For` fields are read from right to left: the first IP address that is not a trusted
    /// proxy is the client. If an entry does not parse, or no entry is left, the client is the trusted proxy that was
    /// read last.
    pub fn client_ip<'a>(&self, peer: IpAddr, forwarded_for: impl DoubleEndedIterator<Item = &'a str>) -> IpAddr {
        let mut client = peer.to_canonical();
        let mut hops = forwarded_for.rev().flat_map(|field| field.split(',').rev());
        while self.is_trusted_proxy(client) {
            let Some(hop) = hops.next().and_then(|hop| parse_hop(hop.trim())) else { break };
            client = hop.to_canonical();
        }
        client
    }
}

/// Parses the IP address in an entry of `X-Forwarded-For`. Some proxies add the port, or put an IPv6 address in
/// brackets.
fn parse_hop(hop: &str) -> Option<IpAddr> {
    let bracketed = || hop.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok();
    hop.parse()
        .ok()
        .or_else(|| hop.parse::<SocketAddr>().ok().map(|address| address.ip()))
        .or_else(|| bracketed().map(IpAddr::V6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(peer: &str, forwarded_for: &[&str]) -> String {
        let settings = Settings {
            base_url: "https://auth.example.com".parse().unwrap(),
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap()],
            trusts_traceparent: false,
            pod_uid: String::new(),
        };
        settings.client_ip(peer.parse().unwrap(), forwarded_for.iter().copied()).to_string()
    }

    #[test]
    fn only_a_trusted_proxy_can_set_the_client_address() {
        assert_eq!(client("192.0.2.9", &["198.51.100.1"]), "192.0.2.9");
        assert_eq!(client("10.0.0.1", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn the_header_is_read_from_the_right_past_trusted_proxies() {
        assert_eq!(client("10.0.0.1", &["6.6.6.6, 198.51.100.1, 10.0.0.2"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["6.6.6.6", "198.51.100.1", "10.0.0.2"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["198.51.100.1, nonsense"]), "10.0.0.1");
        assert_eq!(client("::ffff:10.0.0.1", &["::ffff:198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn an_entry_can_have_a_port_or_brackets_but_must_be_well_formed() {
        assert_eq!(client("10.0.0.1", &["198.51.100.1:4711"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["198.51.100.1:4711, 10.0.0.2:80"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["[2001:db8::1]:4711"]), "2001:db8::1");
        assert_eq!(client("10.0.0.1", &["[2001:db8::1]"]), "2001:db8::1");
        assert_eq!(client("10.0.0.1", &["2001:db8::1"]), "2001:db8::1");
        assert_eq!(client("10.0.0.1", &["[::ffff:198.51.100.1]:80"]), "198.51.100.1");
        for hostile in [
            "198.51.100.1:",
            "198.51.100.1:99999",
            "198.51.100.1:x",
            ":80",
            "[198.51.100.1]",
            "[198.51.100.1]:80",
            "[]",
            "[2001:db8::1",
            "2001:db8::1]",
            "[2001:db8::1]80",
            "[[2001:db8::1]]",
            "unknown",
            "_hidden:80",
            "",
        ] {
            assert_eq!(client("10.0.0.1", &[&format!("198.51.100.7, {hostile}")]), "10.0.0.1", "{hostile}");
        }
    }
}
