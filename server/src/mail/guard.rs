//! To which ports of a relay an App's mail may go.

use super::MailSettings;

/// Ports on which mail is taken in: relay, submission with and without TLS (RFC 5321, 8314), and the usual other one.
const PORTS: [u16; 4] = [25, 465, 587, 2525];

/// Whether an App's own relay may have this port. A listed network opens no other port: Redis may stand there too.
pub(super) fn allows_port(settings: &MailSettings, port: u16) -> bool {
    settings.reach.allow_insecure || PORTS.contains(&port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::Reach;

    #[test]
    fn only_ports_of_mail_are_allowed() {
        let listed = vec!["10.1.0.0/16".parse().unwrap()];
        let reach = Reach { private_cidrs: listed, ..Reach::default() };
        let settings = MailSettings { reach, ..MailSettings::default() };
        for port in PORTS {
            assert!(allows_port(&settings, port), "{port}");
        }
        for port in [0, 22, 80, 443, 1025, 5432, 6379, 10_250] {
            assert!(!allows_port(&settings, port), "{port}");
        }
    }

    #[test]
    fn development_opens_every_port() {
        let reach = Reach { allow_insecure: true, ..Reach::default() };
        assert!(allows_port(&MailSettings { reach, ..MailSettings::default() }, 1025));
    }
}
