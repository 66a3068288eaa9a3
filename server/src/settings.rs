//! What the install sets for all Apps.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use latchkey_crds::types::IssuerUrl;

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the public listener is reached from outside; no slash at the end.
    pub base_url: IssuerUrl,
    /// Proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether the sampled flag of a `traceparent` that comes from one of them is believed.
    pub trusts_traceparent: bool,
    /// This process, as its stream of revisions names it: the pod's UID, else a random one.
    pub pod_uid: String,
}

// === impl Settings ===

impl Settings {
    /// Whether that peer is a listed proxy.
    pub fn is_proxy(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted_proxies.iter().any(|net| net.contains(&peer))
    }

    /// Whether that peer decides which traces are sampled.
    pub fn trusts_sampling(&self, peer: IpAddr) -> bool {
        self.trusts_traceparent && self.is_proxy(peer)
    }

    /// The client's IP address: the peer's or, where the peer is a listed proxy, the right-most address of the
    /// `X-Forwarded-For` fields (in order, as received) that is not a listed proxy. What cannot be read ends the walk:
    /// the last proxy believed is then the client.
    pub fn client_ip<'a>(&self, peer: IpAddr, forwarded_for: impl DoubleEndedIterator<Item = &'a str>) -> IpAddr {
        let mut client = peer.to_canonical();
        let mut hops = forwarded_for.rev().flat_map(|field| field.split(',').rev());
        while self.is_proxy(client) {
            let Some(hop) = hops.next().and_then(|hop| address_of(hop.trim())) else { break };
            client = hop.to_canonical();
        }
        client
    }
}

/// The address of an entry of `X-Forwarded-For`: some proxies add the port, or put an IPv6 address in brackets.
fn address_of(hop: &str) -> Option<IpAddr> {
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
    fn only_a_listed_proxy_is_believed() {
        assert_eq!(client("192.0.2.9", &["198.51.100.1"]), "192.0.2.9");
        assert_eq!(client("10.0.0.1", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn the_header_is_read_from_the_right_past_listed_proxies() {
        assert_eq!(client("10.0.0.1", &["6.6.6.6, 198.51.100.1, 10.0.0.2"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["6.6.6.6", "198.51.100.1", "10.0.0.2"]), "198.51.100.1");
        assert_eq!(client("10.0.0.1", &["198.51.100.1, nonsense"]), "10.0.0.1");
        assert_eq!(client("::ffff:10.0.0.1", &["::ffff:198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn an_entry_with_a_port_is_read() {
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
