//! Who calls, as far as the network tells: the client address.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// A client address as limits see it: an IPv4 address, or the /64 of an IPv6 address (contract, preface).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientAddress(IpAddr);

/// The one who calls.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The whole address, for the owner's list of sessions.
    pub ip: IpAddr,
    pub user_agent: Option<String>,
}

// === impl ClientAddress ===

impl ClientAddress {
    pub fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(v4) => Self(IpAddr::V4(v4)),
            IpAddr::V6(v6) => Self(IpAddr::V6(masked(v6, 64))),
        }
    }

    /// The /48 of an IPv6 address, which has limits of its own (contract, 7).
    pub fn site(self) -> Option<Site> {
        match self.0 {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(Site(masked(v6, 48))),
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
pub struct Site(Ipv6Addr);

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/48", self.0)
    }
}

fn masked(address: Ipv6Addr, bits: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - bits)))
}

// === impl Caller ===

impl Caller {
    pub fn address(&self) -> ClientAddress {
        ClientAddress::of(self.ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_counts_by_its_64() {
        let of = |text: &str| ClientAddress::of(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("2001:db8:1:2::1").site(), of("2001:db8:1:3::1").site());
        assert_ne!(of("2001:db8:1::1").site(), of("2001:db8:2::1").site());
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
