//! The client address from `X-Forwarded-For`: the server agrees with a simple implementation that reads the header from
//! the right.

use std::net::{IpAddr, SocketAddr};

use latchkey_server::settings::Settings;

use crate::{
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 32] = [
    "10.0.0.1",
    "10.255.0.9",
    "192.0.2.1",
    "198.51.100.7",
    "::1",
    "2001:db8::1",
    "::ffff:10.0.0.1",
    "::ffff:192.0.2.1",
    "[",
    "]",
    "[2001:db8::1]",
    "[2001:db8::1]:443",
    "192.0.2.1:443",
    "10.0.0.1:65536",
    "10.0.0.1:",
    ":",
    ":80",
    ",",
    ",",
    ", ",
    " ",
    "\t",
    "unknown",
    "_hidden",
    "fd00::1",
    "fe80::1%eth0",
    "010.0.0.1",
    "1.2.3",
    "",
    "\"",
    "300.0.0.1",
    "0",
];

#[test]
fn client_address() {
    let settings = Settings {
        base_url: "https://auth.example.com".parse().unwrap(),
        trusted_proxies: ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().unwrap()).to_vec(),
        trusts_traceparent: false,
        pod_uid: String::new(),
    };
    harness::run("client_address", 15_000, move |input| {
        let mut draw = Draw::new(input);
        let peer = draw.pick(&["10.0.0.1", "192.0.2.9", "::ffff:10.0.0.1", "fd00::2", "2001:db8::9"]);
        let peer: IpAddr = peer.parse().unwrap();
        let fields: Vec<String> = (0..draw.byte() & 3).map(|_| draw.text(&FRAGMENTS)).collect();
        check_input(&settings, peer, &fields);
        for text in texts(input, &FRAGMENTS) {
            check_input(&settings, peer, &[text.into_owned()]);
        }
    });
}

/// The IP address in an entry of the header. Proxies write the IP address with or without a port. An IPv6 address with
/// a port is in brackets (RFC 7239, section 6).
fn parse_hop(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse::<std::net::Ipv6Addr>().ok().map(IpAddr::from);
    let address = text.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|at| at.ip())).or_else(bracketed);
    address.map(|address: IpAddr| address.to_canonical())
}

fn check_input(settings: &Settings, peer: IpAddr, fields: &[String]) {
    let length: usize = fields.iter().map(String::len).sum();
    let max_heap = 16 * 1024 + 16 * length as u64;
    let found = harness::assert_bounded(1, max_heap, || settings.client_ip(peer, fields.iter().map(String::as_str)));

    let is_trusted = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets()[0] == 10,
        IpAddr::V6(ip) => ip.octets()[0] == 0xfd,
    };
    // All hops from the peer to the client. An entry that does not parse ends the list.
    let joined = fields.join(",");
    let mut hops: Vec<IpAddr> = Vec::new();
    if !fields.is_empty() {
        hops = joined.rsplit(',').map_while(parse_hop).collect();
    }
    hops.insert(0, peer.to_canonical());
    let last = *hops.last().unwrap();
    let expected = hops.into_iter().find(|ip| !is_trusted(ip)).unwrap_or(last);
    assert_eq!(found, expected, "{peer} {fields:?}");
}
