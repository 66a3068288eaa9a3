//! The forms in which Redis runs, as its URL tells them: one server, a primary that sentinels name, a cluster.

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use zeroize::Zeroizing;

/// Where servers and sentinels listen unless the URL says otherwise.
const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// What a URL leads to. `Debug` of what is in it hides passwords.
#[derive(Clone, Debug)]
pub(super) enum Form {
    Single(Box<ConnectionInfo>),
    Sentinel {
        /// What the sentinels call the primary.
        name: String,
        sentinels: Vec<ConnectionInfo>,
        /// The primary, but for its address.
        primary: Box<ConnectionInfo>,
    },
    Cluster {
        /// Some of its nodes; they tell of the others.
        seeds: Vec<ConnectionInfo>,
        /// Any node, but for its address.
        node: Box<ConnectionInfo>,
    },
}

/// Why a URL is not one of Redis. The text does not quote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error(
        "it begins with none of redis://, rediss://, redis-sentinel://, rediss-sentinel://, redis-cluster:// and \
         rediss-cluster://"
    )]
    Scheme,
    #[error("it is not of the form redis://user:password@host:port/database, percent-encoded where need be")]
    Single,
    #[error("a host is not of the form name, name:port or [address]:port, with commas between hosts")]
    Host,
    #[error("its user or password is not percent-encoded")]
    Login,
    #[error("it does not end with the primary's name, as in redis-sentinel://host:26379,host:26379/name/database")]
    PrimaryName,
    #[error("its database is not a number")]
    Database,
    #[error("a cluster has no database but 0")]
    ClusterDatabase,
    #[error("it has a parameter; known are sentinel_username and sentinel_password, with redis-sentinel://")]
    Parameter,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// A URL of several hosts, cut into its parts.
struct Parts<'a> {
    tls: bool,
    /// With its `@`.
    login: &'a str,
    hosts: Vec<&'a str>,
    path: Vec<&'a str>,
    parameters: Vec<(&'a str, &'a str)>,
}

// === impl Form ===

impl Form {
    pub(super) fn parse(url: &str) -> Result<Self, Malformed> {
        let (scheme, rest) = url.split_once("://").ok_or(Malformed::Scheme)?;
        let form = match scheme.to_ascii_lowercase().as_str() {
            "redis-sentinel" | "redis+sentinel" => sentinel(&Parts::cut(rest, false)?)?,
            "rediss-sentinel" | "rediss+sentinel" => sentinel(&Parts::cut(rest, true)?)?,
            "redis-cluster" | "redis+cluster" => cluster(&Parts::cut(rest, false)?)?,
            "rediss-cluster" | "rediss+cluster" => cluster(&Parts::cut(rest, true)?)?,
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" | "redis+unix" | "valkey+unix" => {
                Self::Single(Box::new(url.into_connection_info().map_err(|_| Malformed::Single)?))
            }
            _ => return Err(Malformed::Scheme),
        };
        if form.has_tls() {
            // Fails where there is one already, which is as good.
            drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        }
        Ok(form)
    }

    fn has_tls(&self) -> bool {
        let one = match self {
            Self::Single(server) => server,
            Self::Sentinel { primary, .. } => primary,
            Self::Cluster { node, .. } => node,
        };
        matches!(one.addr(), ConnectionAddr::TcpTls { .. })
    }
}

fn sentinel(parts: &Parts<'_>) -> Result<Form, Malformed> {
    let (name, database) = match parts.path.as_slice() {
        [name] => (*name, ""),
        [name, database] => (*name, *database),
        _ => return Err(Malformed::PrimaryName),
    };
    let name = decoded(name).filter(|name| !name.is_empty()).ok_or(Malformed::PrimaryName)?;
    let (mut user, mut password) = (None, None);
    for (parameter, value) in &parts.parameters {
        let place = match *parameter {
            "sentinel_username" => &mut user,
            "sentinel_password" => &mut password,
            _ => return Err(Malformed::Parameter),
        };
        *place = Some(Zeroizing::new(decoded(value).ok_or(Malformed::Login)?));
    }
    // The login of the URL is the servers'; sentinels have one of their own, or none.
    let mut login = RedisConnectionInfo::default();
    if let Some(user) = user {
        login = login.set_username(user.as_str());
    }
    if let Some(password) = password {
        login = login.set_password(password.as_str());
    }
    let servers = parts.servers(SENTINEL_PORT, database)?;
    let primary = servers.first().cloned().ok_or(Malformed::Host)?;
    let sentinels = servers.into_iter().map(|server| server.set_redis_settings(login.clone())).collect();
    Ok(Form::Sentinel { name, sentinels, primary: Box::new(primary) })
}

fn cluster(parts: &Parts<'_>) -> Result<Form, Malformed> {
    match parts.path.as_slice() {
        [] | ["" | "0"] => {}
        _ => return Err(Malformed::ClusterDatabase),
    }
    if !parts.parameters.is_empty() {
        return Err(Malformed::Parameter);
    }
    let seeds = parts.servers(SERVER_PORT, "")?;
    let node = seeds.first().cloned().ok_or(Malformed::Host)?;
    Ok(Form::Cluster { seeds, node: Box::new(node) })
}

fn decoded(text: &str) -> Option<String> {
    // A plus is a plus: this is no form.
    percent_decode_str(text).decode_utf8().ok().map(|text| text.into_owned())
}

// === impl Parts ===

impl<'a> Parts<'a> {
    /// Of what stands behind `://`.
    fn cut(rest: &'a str, tls: bool) -> Result<Self, Malformed> {
        if rest.contains('#') {
            return Err(Malformed::Parameter);
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').map_or((rest, None), |(authority, path)| (authority, Some(path)));
        let (login, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Ok(Self {
            tls,
            login,
            hosts: hosts.split(',').collect(),
            path: path.map(|path| path.split('/').collect()).unwrap_or_default(),
            parameters: query
                .split('&')
                .filter(|parameter| !parameter.is_empty())
                .map(|parameter| parameter.split_once('=').unwrap_or((parameter, "")))
                .collect(),
        })
    }

    /// Each host, with the login, as a URL of its own says it.
    fn servers(&self, default_port: u16, database: &str) -> Result<Vec<ConnectionInfo>, Malformed> {
        if !database.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(Malformed::Database);
        }
        let scheme = if self.tls { "rediss" } else { "redis" };
        let login = self.login;
        if decoded(login).is_none() || format!("{scheme}://{login}host/").into_connection_info().is_err() {
            return Err(Malformed::Login);
        }
        let server = |host: &&str| {
            let has_port = !host.ends_with(']') && host.contains(':');
            let port = if has_port { String::new() } else { format!(":{default_port}") };
            if host.is_empty() || host.starts_with(':') || host.ends_with(':') {
                return Err(Malformed::Host);
            }
            let with_port = format!("{scheme}://{host}{port}/").into_connection_info().map_err(|_| Malformed::Host)?;
            let url = Zeroizing::new(format!("{scheme}://{login}{host}{port}/{database}"));
            let info = url.as_str().into_connection_info().map_err(|_| Malformed::Database)?;
            Ok(info.set_addr(with_port.addr().clone()))
        };
        self.hosts.iter().map(server).collect()
    }
}

// === impl Address ===

impl Address {
    /// `host:port` as nodes write it; without a host it is that of the node that wrote it.
    pub(super) fn parse(text: &str, of: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some(Self { host: if host.is_empty() { of } else { host }.to_owned(), port: port.parse().ok()? })
    }

    pub(super) fn of(server: &ConnectionInfo) -> Option<Self> {
        match server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(Self { host: host.clone(), port: *port })
            }
            _ => None,
        }
    }

    /// The same in all but the address.
    pub(super) fn like(&self, server: &ConnectionInfo) -> ConnectionInfo {
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
            let Ok(Form::Single(server)) = Form::parse(url) else { panic!("{url}") };
            assert_eq!(server.addr().to_string(), "redis.test:6380");
            assert_eq!(is_tls(&server), tls);
            assert_eq!(login(&server), (Some("ada"), Some("p@ss"), 3));
        }
        let Ok(Form::Single(server)) = Form::parse("redis://:secret@[::1]") else { panic!("an IPv6 address") };
        assert_eq!(login(&server), (None, Some("secret"), 0));
    }

    #[test]
    fn sentinels_are_asked_with_a_login_of_their_own() {
        let url = "rediss-sentinel://ada:p%2C%2F@s1.test,s2.test:26380,[::1],[::2]:7/my%20primary/5\
                   ?sentinel_username=eve&sentinel_password=a%26b+c";
        let Ok(Form::Sentinel { name, sentinels, primary }) = Form::parse(url) else { panic!("{url}") };
        assert_eq!(name, "my primary");
        assert_eq!(addresses(&sentinels), ["s1.test:26379", "s2.test:26380", "::1:26379", "::2:7"]);
        assert!(sentinels.iter().all(is_tls) && is_tls(&primary));
        assert!(sentinels.iter().all(|sentinel| login(sentinel) == (Some("eve"), Some("a&b+c"), 0)));
        assert_eq!(login(&primary), (Some("ada"), Some("p,/"), 5));
        let there = Address { host: "10.0.0.7".to_owned(), port: 6379 }.like(&primary);
        assert_eq!(there.addr().to_string(), "10.0.0.7:6379");
        assert!(is_tls(&there));
        assert_eq!(login(&there), (Some("ada"), Some("p,/"), 5));

        let Ok(Form::Sentinel { sentinels, primary, .. }) = Form::parse("redis+sentinel://:pw@one/main") else {
            panic!("the other spelling")
        };
        assert_eq!(login(&sentinels[0]), (None, None, 0), "a sentinel is not told the password of the servers");
        assert_eq!(login(&primary), (None, Some("pw"), 0));
        assert!(!is_tls(&primary));
    }

    #[test]
    fn a_cluster_is_reached_over_any_of_its_nodes() {
        let url = "redis-cluster://ada:pw@n1.test,n2.test:7001/0";
        let Ok(Form::Cluster { seeds, .. }) = Form::parse(url) else { panic!("{url}") };
        assert_eq!(addresses(&seeds), ["n1.test:6379", "n2.test:7001"]);
        assert!(seeds.iter().all(|seed| !is_tls(seed) && login(seed) == (Some("ada"), Some("pw"), 0)));
        for (url, tls) in [("rediss-cluster://n1", true), ("redis+cluster://n1/", false)] {
            let Ok(Form::Cluster { seeds, .. }) = Form::parse(url) else { panic!("{url}") };
            assert_eq!(is_tls(&seeds[0]), tls);
        }
    }

    #[test]
    fn what_is_wrong_with_a_url_is_told_without_quoting_it() {
        for (url, wrong) in [
            ("", Malformed::Scheme),
            ("localhost:6379", Malformed::Scheme),
            ("http://hidden", Malformed::Scheme),
            ("redis://", Malformed::Single),
            ("redis://hidden:port", Malformed::Single),
            ("redis://hidden/x", Malformed::Single),
            ("redis-sentinel://hidden", Malformed::PrimaryName),
            ("redis-sentinel://hidden/", Malformed::PrimaryName),
            ("redis-sentinel://hidden/%ff", Malformed::PrimaryName),
            ("redis-sentinel://hidden/a/1/2", Malformed::PrimaryName),
            ("redis-sentinel://hidden/a/b", Malformed::Database),
            ("redis-sentinel://hidden/a/-1", Malformed::Database),
            ("redis-sentinel://hidden/a?db=1", Malformed::Parameter),
            ("redis-sentinel://hidden/a#b", Malformed::Parameter),
            ("redis-sentinel://u:hidden%ff@h/a", Malformed::Login),
            ("redis-sentinel://h/a?sentinel_password=hidden%ff", Malformed::Login),
            ("redis-sentinel:///a", Malformed::Host),
            ("redis-sentinel://hidden,/a", Malformed::Host),
            ("redis-sentinel://hidden:x/a", Malformed::Host),
            ("redis-sentinel://hidden:/a", Malformed::Host),
            ("redis-sentinel://:5/a", Malformed::Host),
            ("redis-cluster://", Malformed::Host),
            ("redis-cluster://hidden:70000", Malformed::Host),
            ("redis-cluster://hidden/1", Malformed::ClusterDatabase),
            ("redis-cluster://hidden?x=1", Malformed::Parameter),
        ] {
            let error = Form::parse(url).map(|_| ()).unwrap_err();
            assert_eq!(error, wrong, "{url}");
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
            assert!(!format!("{:?}", Form::parse(url)).contains("hidden"));
        }
    }

    #[test]
    fn a_node_that_does_not_tell_its_host_is_where_it_was_asked() {
        let parse = |text| Address::parse(text, "asked").map(|address| (address.host, address.port));
        assert_eq!(parse("10.0.0.1:6379"), Some(("10.0.0.1".to_owned(), 6379)));
        assert_eq!(parse("::1:6379"), Some(("::1".to_owned(), 6379)));
        assert_eq!(parse("[::1]:6379"), Some(("::1".to_owned(), 6379)));
        assert_eq!(parse(":6379"), Some(("asked".to_owned(), 6379)));
        assert_eq!(parse("10.0.0.1"), None);
        assert_eq!(parse("10.0.0.1:"), None);
    }
}
