//! The ports that an App's own relay can have.

use super::settings::MailSettings;

/// Ports for mail: relay (RFC 5321), submission with and without implicit TLS (RFC 8314), and the common alternative
/// 2525.
const MAIL_PORTS: [u16; 4] = [25, 465, 587, 2525];

/// Whether an App's own relay can have this port. Even in an allowed private network, only mail ports are allowed,
/// because the network can also contain, for example, Redis.
pub(super) fn is_port_allowed(settings: &MailSettings, port: u16) -> bool {
    settings.reach.allow_insecure || MAIL_PORTS.contains(&port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::OutboundPolicy;

    #[test]
    fn only_mail_ports_are_allowed_even_in_a_listed_network() {
        let listed = vec!["10.1.0.0/16".parse().unwrap()];
        let reach = OutboundPolicy { private_cidrs: listed, ..OutboundPolicy::default() };
        let settings = MailSettings { reach, ..MailSettings::default() };
        for port in MAIL_PORTS {
            assert!(is_port_allowed(&settings, port), "{port}");
        }
        for port in [0, 22, 80, 443, 1025, 5432, 6379, 10_250] {
            assert!(!is_port_allowed(&settings, port), "{port}");
        }
    }

    #[test]
    fn insecure_mode_allows_every_port() {
        let reach = OutboundPolicy { allow_insecure: true, ..OutboundPolicy::default() };
        assert!(is_port_allowed(&MailSettings { reach, ..MailSettings::default() }, 1025));
    }
}
