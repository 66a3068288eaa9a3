//! The HTTP client of a request: its IP address and its user agent.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// The address that identifies a client: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientAddress(IpAddr);

/// The HTTP client of a request.
#[derive(Clone, Debug)]
pub struct ClientInfo {
    /// The full IP address, for the user's list of sessions and for audit events.
    pub ip: IpAddr,
    pub user_agent: Option<String>,
}

// === impl ClientAddress ===

impl ClientAddress {
    pub fn from_ip(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(v4) => Self(IpAddr::V4(v4)),
            IpAddr::V6(v6) => Self(IpAddr::V6(network_prefix(v6, 64))),
        }
    }

    /// Returns the /48 of an IPv6 address. A /48 has separate rate limits (specification: Limits, Rate limits).
    pub fn ipv6_site(self) -> Option<Ipv6Site> {
        match self.0 {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(Ipv6Site(network_prefix(v6, 48))),
        }
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(v4) => write!(f, "{v4}"),
            IpAddr::V6(v6) => write!(f, "{v6}/64"),
        }
    }
}

/// An IPv6 /48.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv6Site(Ipv6Addr);

impl fmt::Display for Ipv6Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/48", self.0)
    }
}

fn network_prefix(address: Ipv6Addr, bits: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - bits)))
}

// === impl ClientInfo ===

impl ClientInfo {
    pub fn client_address(&self) -> ClientAddress {
        ClientAddress::from_ip(self.ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_addresses_with_the_same_64_bit_prefix_are_one_client_address() {
        let client = |text: &str| ClientAddress::from_ip(text.parse().unwrap());
        assert_eq!(client("2001:db8:1:2::1"), client("2001:db8:1:2:ffff::9"));
        assert_ne!(client("2001:db8:1:2::1"), client("2001:db8:1:3::1"));
        assert_eq!(client("2001:db8:1:2::1").ipv6_site(), client("2001:db8:1:3::1").ipv6_site());
        assert_ne!(client("2001:db8:1::1").ipv6_site(), client("2001:db8:2::1").ipv6_site());
        assert_eq!(client("::ffff:192.0.2.1"), client("192.0.2.1"));
    }
}
