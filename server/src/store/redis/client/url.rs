//! The URL of Redis. Its scheme names the topology: one server, a primary that sentinels name, or a cluster.

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use zeroize::Zeroizing;

use crate::store::source::{UrlReadError, UrlSource};

/// The port of a server, unless the URL names another port.
const SERVER_PORT: u16 = 6379;
/// The port of a sentinel, unless the URL names another port.
const SENTINEL_PORT: u16 = 26379;

/// A parsed URL. `Debug` of its contents hides passwords.
#[derive(Clone, Debug)]
pub(super) enum RedisUrl {
    Single(Box<ConnectionInfo>),
    Sentinel {
        /// The master name that the sentinels use.
        master_name: String,
        sentinels: Vec<ConnectionInfo>,
        /// The settings of the primary; only its address comes from the sentinels.
        primary_settings: Box<ConnectionInfo>,
    },
    Cluster {
        /// Some nodes of the cluster. They report the other nodes.
        seeds: Vec<ConnectionInfo>,
        /// The settings of every node; only the address differs.
        node_settings: Box<ConnectionInfo>,
    },
}

/// The URL cannot be read or is not a Redis URL. The message does not contain the URL.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    UnreadableUrl(#[from] UrlReadError),
    #[error("the URL of Redis cannot be used: {0}")]
    InvalidUrl(#[from] RedisUrlError),
}

/// Why a URL is not a Redis URL. The message does not quote the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisUrlError {
    #[error(
        "it does not begin with redis://, rediss://, redis-sentinel://, rediss-sentinel://, redis-cluster:// or \
         rediss-cluster://"
    )]
    Scheme,
    #[error("it does not have the form redis://user:password@host:port/database, with percent-encoding")]
    InvalidServer,
    #[error("a host does not have the form name, name:port or [address]:port; commas separate hosts")]
    Host,
    #[error("its user or password is not percent-encoded")]
    Credentials,
    #[error("it does not end with the primary's name, as in redis-sentinel://host:26379,host:26379/name/database")]
    PrimaryName,
    #[error("its database is not a number")]
    Database,
    #[error("a cluster has only database 0")]
    ClusterDatabase,
    #[error("it has an unknown parameter; redis-sentinel:// accepts sentinel_username and sentinel_password")]
    Parameter,
}

/// The parts of a URL with several hosts.
struct UrlParts<'a> {
    uses_tls: bool,
    /// User and password, including the `@`.
    credentials: &'a str,
    hosts: Vec<&'a str>,
    path: Vec<&'a str>,
    parameters: Vec<(&'a str, &'a str)>,
}

/// Reads and parses the URL, so that a server with an invalid URL does not start.
pub(in crate::store::redis) fn check_url(url: &UrlSource) -> Result<(), ConnectError> {
    RedisUrl::parse(&url.read()?)?;
    Ok(())
}

// === impl RedisUrl ===

impl RedisUrl {
    pub(super) fn parse(url: &str) -> Result<Self, RedisUrlError> {
        let (scheme, after_scheme) = url.split_once("://").ok_or(RedisUrlError::Scheme)?;
        let parsed = match scheme.to_ascii_lowercase().as_str() {
            "redis-sentinel" | "redis+sentinel" => parse_sentinel(&UrlParts::split(after_scheme, false)?)?,
            "rediss-sentinel" | "rediss+sentinel" => parse_sentinel(&UrlParts::split(after_scheme, true)?)?,
            "redis-cluster" | "redis+cluster" => parse_cluster(&UrlParts::split(after_scheme, false)?)?,
            "rediss-cluster" | "rediss+cluster" => parse_cluster(&UrlParts::split(after_scheme, true)?)?,
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" | "redis+unix" | "valkey+unix" => {
                Self::Single(Box::new(url.into_connection_info().map_err(|_| RedisUrlError::InvalidServer)?))
            }
            _ => return Err(RedisUrlError::Scheme),
        };
        if parsed.has_tls() {
            // `install_default` fails only if a crypto provider of rustls is installed already, which is harmless.
            drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        }
        Ok(parsed)
    }

    fn has_tls(&self) -> bool {
        let settings = match self {
            Self::Single(server) => server,
            Self::Sentinel { primary_settings, .. } => primary_settings,
            Self::Cluster { node_settings, .. } => node_settings,
        };
        matches!(settings.addr(), ConnectionAddr::TcpTls { .. })
    }
}

fn parse_sentinel(parts: &UrlParts<'_>) -> Result<RedisUrl, RedisUrlError> {
    let (name, database) = match parts.path.as_slice() {
        [name] => (*name, ""),
        [name, database] => (*name, *database),
        _ => return Err(RedisUrlError::PrimaryName),
    };
    let name = percent_decoded(name).filter(|name| !name.is_empty()).ok_or(RedisUrlError::PrimaryName)?;
    let (mut user, mut password) = (None, None);
    for (parameter, value) in &parts.parameters {
        let setting = match *parameter {
            "sentinel_username" => &mut user,
            "sentinel_password" => &mut password,
            _ => return Err(RedisUrlError::Parameter),
        };
        *setting = Some(Zeroizing::new(percent_decoded(value).ok_or(RedisUrlError::Credentials)?));
    }
    // The URL's user and password are for the Redis servers. Sentinels have their own user and password, or none.
    let mut credentials = RedisConnectionInfo::default();
    if let Some(user) = user {
        credentials = credentials.set_username(user.as_str());
    }
    if let Some(password) = password {
        credentials = credentials.set_password(password.as_str());
    }
    let servers = parts.servers(SENTINEL_PORT, database)?;
    let primary = servers.first().cloned().ok_or(RedisUrlError::Host)?;
    let sentinels = servers.into_iter().map(|server| server.set_redis_settings(credentials.clone())).collect();
    Ok(RedisUrl::Sentinel { master_name: name, sentinels, primary_settings: Box::new(primary) })
}

fn parse_cluster(parts: &UrlParts<'_>) -> Result<RedisUrl, RedisUrlError> {
    match parts.path.as_slice() {
        [] | ["" | "0"] => {}
        _ => return Err(RedisUrlError::ClusterDatabase),
    }
    if !parts.parameters.is_empty() {
        return Err(RedisUrlError::Parameter);
    }
    let seeds = parts.servers(SERVER_PORT, "")?;
    let node = seeds.first().cloned().ok_or(RedisUrlError::Host)?;
    Ok(RedisUrl::Cluster { seeds, node_settings: Box::new(node) })
}

fn percent_decoded(text: &str) -> Option<String> {
    // `+` is literal: this is not form encoding.
    percent_decode_str(text).decode_utf8().ok().map(|text| text.into_owned())
}

// === impl UrlParts ===

impl<'a> UrlParts<'a> {
    /// Splits the part of a URL after `://`.
    fn split(after_scheme: &'a str, uses_tls: bool) -> Result<Self, RedisUrlError> {
        if after_scheme.contains('#') {
            return Err(RedisUrlError::Parameter);
        }
        let (before_query, query) = after_scheme.split_once('?').unwrap_or((after_scheme, ""));
        let (authority, path) =
            before_query.split_once('/').map_or((before_query, None), |(authority, path)| (authority, Some(path)));
        let (credentials, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Ok(Self {
            uses_tls,
            credentials,
            hosts: hosts.split(',').collect(),
            path: path.map(|path| path.split('/').collect()).unwrap_or_default(),
            parameters: query
                .split('&')
                .filter(|parameter| !parameter.is_empty())
                .map(|parameter| parameter.split_once('=').unwrap_or((parameter, "")))
                .collect(),
        })
    }

    /// Returns connection settings for each host, with the user, password and database.
    fn servers(&self, default_port: u16, database: &str) -> Result<Vec<ConnectionInfo>, RedisUrlError> {
        if !database.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(RedisUrlError::Database);
        }
        let scheme = if self.uses_tls { "rediss" } else { "redis" };
        let credentials = self.credentials;
        let is_valid = percent_decoded(credentials).is_some()
            && format!("{scheme}://{credentials}host/").into_connection_info().is_ok();
        if !is_valid {
            return Err(RedisUrlError::Credentials);
        }
        let server = |host: &&str| {
            let has_port = !host.ends_with(']') && host.contains(':');
            let port = if has_port { String::new() } else { format!(":{default_port}") };
            if host.is_empty() || host.starts_with(':') || host.ends_with(':') {
                return Err(RedisUrlError::Host);
            }
            let with_port =
                format!("{scheme}://{host}{port}/").into_connection_info().map_err(|_| RedisUrlError::Host)?;
            let url = Zeroizing::new(format!("{scheme}://{credentials}{host}{port}/{database}"));
            let info = url.as_str().into_connection_info().map_err(|_| RedisUrlError::Database)?;
            Ok(info.set_addr(with_port.addr().clone()))
        };
        self.hosts.iter().map(server).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::address::ServerAddress, *};

    fn addresses(servers: &[ConnectionInfo]) -> Vec<String> {
        servers.iter().map(|server| server.addr().to_string()).collect()
    }

    fn is_tls(server: &ConnectionInfo) -> bool {
        matches!(server.addr(), ConnectionAddr::TcpTls { insecure: false, .. })
    }

    fn login(server: &ConnectionInfo) -> (Option<&str>, Option<&str>, i64) {
        let settings = server.redis_settings();
        (settings.username(), settings.password(), settings.db())
    }

    #[test]
    fn one_server_is_reached_with_user_password_and_database() {
        for (url, tls) in
            [("redis://ada:p%40ss@redis.test:6380/3", false), ("rediss://ada:p%40ss@redis.test:6380/3", true)]
        {
            let Ok(RedisUrl::Single(server)) = RedisUrl::parse(url) else { panic!("{url}") };
            assert_eq!(server.addr().to_string(), "redis.test:6380");
            assert_eq!(is_tls(&server), tls);
            assert_eq!(login(&server), (Some("ada"), Some("p@ss"), 3));
        }
        let Ok(RedisUrl::Single(server)) = RedisUrl::parse("redis://:secret@[::1]") else { panic!("an IPv6 address") };
        assert_eq!(login(&server), (None, Some("secret"), 0));
    }

    #[test]
    fn sentinels_have_their_own_credentials() {
        let url = "rediss-sentinel://ada:p%2C%2F@s1.test,s2.test:26380,[::1],[::2]:7/my%20primary/5\
                   ?sentinel_username=eve&sentinel_password=a%26b+c";
        let Ok(RedisUrl::Sentinel { master_name: name, sentinels, primary_settings: primary }) = RedisUrl::parse(url)
        else {
            panic!("{url}")
        };
        assert_eq!(name, "my primary");
        assert_eq!(addresses(&sentinels), ["s1.test:26379", "s2.test:26380", "::1:26379", "::2:7"]);
        assert!(sentinels.iter().all(is_tls) && is_tls(&primary));
        assert!(sentinels.iter().all(|sentinel| login(sentinel) == (Some("eve"), Some("a&b+c"), 0)));
        assert_eq!(login(&primary), (Some("ada"), Some("p,/"), 5));
        let moved = ServerAddress { host: "10.0.0.7".to_owned(), port: 6379 }.with_settings_of(&primary);
        assert_eq!(moved.addr().to_string(), "10.0.0.7:6379");
        assert!(is_tls(&moved));
        assert_eq!(login(&moved), (Some("ada"), Some("p,/"), 5));

        let Ok(RedisUrl::Sentinel { sentinels, primary_settings: primary, .. }) =
            RedisUrl::parse("redis+sentinel://:pw@one/main")
        else {
            panic!("the other spelling")
        };
        assert_eq!(login(&sentinels[0]), (None, None, 0), "a sentinel does not get the password of the servers");
        assert_eq!(login(&primary), (None, Some("pw"), 0));
        assert!(!is_tls(&primary));
    }

    #[test]
    fn a_cluster_is_reached_over_any_of_its_nodes() {
        let url = "redis-cluster://ada:pw@n1.test,n2.test:7001/0";
        let Ok(RedisUrl::Cluster { seeds, .. }) = RedisUrl::parse(url) else { panic!("{url}") };
        assert_eq!(addresses(&seeds), ["n1.test:6379", "n2.test:7001"]);
        assert!(seeds.iter().all(|seed| !is_tls(seed) && login(seed) == (Some("ada"), Some("pw"), 0)));
        for (url, tls) in [("rediss-cluster://n1", true), ("redis+cluster://n1/", false)] {
            let Ok(RedisUrl::Cluster { seeds, .. }) = RedisUrl::parse(url) else { panic!("{url}") };
            assert_eq!(is_tls(&seeds[0]), tls);
        }
    }

    #[test]
    fn url_errors_do_not_quote_the_url() {
        for (url, expected) in [
            ("", RedisUrlError::Scheme),
            ("localhost:6379", RedisUrlError::Scheme),
            ("http://hidden", RedisUrlError::Scheme),
            ("redis://", RedisUrlError::InvalidServer),
            ("redis://hidden:port", RedisUrlError::InvalidServer),
            ("redis://hidden/x", RedisUrlError::InvalidServer),
            ("redis-sentinel://hidden", RedisUrlError::PrimaryName),
            ("redis-sentinel://hidden/", RedisUrlError::PrimaryName),
            ("redis-sentinel://hidden/%ff", RedisUrlError::PrimaryName),
            ("redis-sentinel://hidden/a/1/2", RedisUrlError::PrimaryName),
            ("redis-sentinel://hidden/a/b", RedisUrlError::Database),
            ("redis-sentinel://hidden/a/-1", RedisUrlError::Database),
            ("redis-sentinel://hidden/a?db=1", RedisUrlError::Parameter),
            ("redis-sentinel://hidden/a#b", RedisUrlError::Parameter),
            ("redis-sentinel://u:hidden%ff@h/a", RedisUrlError::Credentials),
            ("redis-sentinel://h/a?sentinel_password=hidden%ff", RedisUrlError::Credentials),
            ("redis-sentinel:///a", RedisUrlError::Host),
            ("redis-sentinel://hidden,/a", RedisUrlError::Host),
            ("redis-sentinel://hidden:x/a", RedisUrlError::Host),
            ("redis-sentinel://hidden:/a", RedisUrlError::Host),
            ("redis-sentinel://:5/a", RedisUrlError::Host),
            ("redis-cluster://", RedisUrlError::Host),
            ("redis-cluster://hidden:70000", RedisUrlError::Host),
            ("redis-cluster://hidden/1", RedisUrlError::ClusterDatabase),
            ("redis-cluster://hidden?x=1", RedisUrlError::Parameter),
        ] {
            let error = RedisUrl::parse(url).map(|_| ()).unwrap_err();
            assert_eq!(error, expected, "{url}");
            assert!(!error.to_string().contains("hidden"), "{error}");
        }
    }

    #[test]
    fn passwords_are_not_printed() {
        for url in [
            "redis://ada:hidden@h",
            "redis-sentinel://ada:hidden@h/a?sentinel_password=hidden",
            "redis-cluster://ada:hidden@h",
        ] {
            assert!(!format!("{:?}", RedisUrl::parse(url)).contains("hidden"));
        }
    }
}
