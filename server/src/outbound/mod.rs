//! Outgoing connections: the IP addresses to which a server connects for an App. The server connects to the IP address
//! that was checked, without a second lookup.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub(crate) mod client;
pub mod proxy;
pub(crate) mod tls_roots;

/// The networks to which the server connects for Apps. Public networks are always allowed.
#[derive(Clone, Debug, Default)]
pub struct OutboundPolicy {
    /// The only private networks that are allowed.
    pub private_cidrs: Vec<IpNet>,
    /// For development: allows loopback, any port of an App's own relay, and providers and receivers of webhooks
    /// without TLS.
    pub allow_insecure: bool,
}

/// Why there is no IP address to connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResolveError {
    NameUnknown,
    AddressNotAllowed,
}

/// IPv4 networks outside the public Internet (IANA special-purpose address registry, RFC 6890, and multicast).
const RESERVED_V4: [Ipv4Net; 15] = [
    v4(0, 0, 0, 0, 8),       // "this network" (RFC 791)
    v4(10, 0, 0, 0, 8),      // private
    v4(100, 64, 0, 0, 10),   // shared address space of carriers
    v4(127, 0, 0, 0, 8),     // loopback
    v4(169, 254, 0, 0, 16),  // link-local, metadata services of clouds
    v4(172, 16, 0, 0, 12),   // private
    v4(192, 0, 0, 0, 24),    // protocol assignments
    v4(192, 0, 2, 0, 24),    // documentation
    v4(192, 88, 99, 0, 24),  // 6to4 relays
    v4(192, 168, 0, 0, 16),  // private
    v4(198, 18, 0, 0, 15),   // benchmarks
    v4(198, 51, 100, 0, 24), // documentation
    v4(203, 0, 113, 0, 24),  // documentation
    v4(224, 0, 0, 0, 4),     // multicast
    v4(240, 0, 0, 0, 4),     // reserved, broadcast
];

/// Global unicast (RFC 4291, section 2.4): the only public IPv6 network, except for its parts in [`RESERVED_V6`].
const GLOBAL_V6: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// Networks of [`GLOBAL_V6`] that are not public.
const RESERVED_V6: [Ipv6Net; 4] = [
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),     // protocol assignments, Teredo
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), // documentation
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),     // 6to4: contains any IPv4 address
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),     // documentation
];
/// NAT64 (RFC 6052): the embedded IPv4 address is checked, because the gateway connects to that address.
const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(s: [u16; 8], prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]), prefix)
}

fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => !RESERVED_V4.iter().any(|net| net.contains(&address)),
        IpAddr::V6(address) if NAT64.contains(&address) => {
            let [.., a, b, c, d] = address.octets();
            is_public(IpAddr::V4(Ipv4Addr::new(a, b, c, d)))
        }
        IpAddr::V6(address) => GLOBAL_V6.contains(&address) && !RESERVED_V6.iter().any(|net| net.contains(&address)),
    }
}

// === impl OutboundPolicy ===

impl OutboundPolicy {
    pub(crate) fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        is_public(address)
            || self.private_cidrs.iter().any(|net| net.contains(&address))
            || (self.allow_insecure && address.is_loopback())
    }

    /// Looks up a host. Returns only the IP addresses to which connections are allowed.
    pub(crate) async fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, ResolveError> {
        let mut addresses = lookup_host(host, port).await?;
        addresses.retain(|address| self.allows(address.ip()));
        if addresses.is_empty() { Err(ResolveError::AddressNotAllowed) } else { Ok(addresses) }
    }
}

/// Every IP address of a host, which is a name or an IP address. Connections use this result without another lookup, so
/// DNS rebinding, which changes the result of a second lookup, has no effect.
pub(crate) async fn lookup_host(host: &str, port: u16) -> Result<Vec<SocketAddr>, ResolveError> {
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(address) => vec![(address, port).into()],
        Err(_) => tokio::net::lookup_host((host, port)).await.map_err(|_| ResolveError::NameUnknown)?.collect(),
    };
    if addresses.is_empty() { Err(ResolveError::NameUnknown) } else { Ok(addresses) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(policy: &OutboundPolicy, address: &str) -> bool {
        policy.allows(address.parse().unwrap())
    }

    #[test]
    fn public_addresses_are_allowed() {
        let policy = OutboundPolicy::default();
        for public in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.1",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2a00:1450:4001::1a",
            "2001:4860:4860::8888",
            "64:ff9b::1.1.1.1",
            "::ffff:1.1.1.1",
        ] {
            assert!(allowed(&policy, public), "{public}");
        }
    }

    #[test]
    fn every_reserved_range_is_rejected_at_both_ends() {
        let policy = OutboundPolicy::default();
        for net in RESERVED_V4 {
            assert!(!policy.allows(net.network().into()), "{net}");
            assert!(!policy.allows(net.broadcast().into()), "{net}");
            assert!(!policy.allows(net.network().to_ipv6_mapped().into()), "mapped {net}");
        }
        for net in RESERVED_V6 {
            assert!(!policy.allows(net.network().into()), "{net}");
            assert!(!policy.allows(net.broadcast().into()), "{net}");
        }
        for private in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.168.1.1",
            "198.19.255.255",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "fc00::1",
            "fd12:3456::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "100::1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::1.1.1.1",
            "::ffff:127.0.0.1",
            "2001::1",
            "2002:a00:1::1",
            "5f00::1",
        ] {
            assert!(!allowed(&policy, private), "{private}");
        }
    }

    #[test]
    fn only_listed_private_networks_are_allowed() {
        let policy = OutboundPolicy {
            private_cidrs: vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/32".parse().unwrap()],
            ..OutboundPolicy::default()
        };
        for listed in ["10.1.2.3", "::ffff:10.1.2.3", "fd00:1::9"] {
            assert!(allowed(&policy, listed), "{listed}");
        }
        for other in ["10.2.0.1", "127.0.0.1", "fd00:2::9"] {
            assert!(!allowed(&policy, other), "{other}");
        }
    }

    #[test]
    fn development_allows_loopback_but_no_private_network() {
        let policy = OutboundPolicy { allow_insecure: true, ..OutboundPolicy::default() };
        assert!(allowed(&policy, "127.0.0.1") && allowed(&policy, "::1"));
        assert!(!allowed(&policy, "10.0.0.1") && !allowed(&policy, "169.254.169.254"));
    }
}
