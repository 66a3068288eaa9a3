//! The OpenID Connect clients of an App, parsed from its document.

use std::{fmt, sync::Arc};

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    digest::{SHA256, digest},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    client::{Consent, IdTokenAlgorithm},
    rendered::{RenderedClient, RenderedClientAuthentication},
    types::{ClientId, GroupName, GroupPattern, RedirectUrl},
};
use url::Url;

use super::{client_assertion::AssertionKey, scope::Scopes};

/// A client of an App, as the document has it. The texts are boxed, because an installation can have 50,000 clients.
pub struct OpenIdClient {
    pub client_id: ClientId,
    /// The Kubernetes UID of the Client resource. Codes, sessions and consents are bound to it.
    pub uid: Box<str>,
    pub display_name: Box<str>,
    pub authentication: ClientAuthentication,
    pub redirect_urls: Box<[RedirectUrl]>,
    pub post_logout_redirect_urls: Box<[RedirectUrl]>,
    /// Whether every authorization request needs a `code_challenge`.
    pub pkce_required: bool,
    /// Whether every authorization request must come through the PAR endpoint (RFC 9126).
    pub pushed_authorization_required: bool,
    pub scopes: Scopes,
    pub consent: Consent,
    /// Only members of one of these groups can sign in. If the list is empty, every user can.
    pub allowed_groups: Box<[GroupName]>,
    pub groups: GroupFilter,
    pub id_token_algorithm: IdTokenAlgorithm,
    pub id_token_lifetime_seconds: u32,
    /// The audiences of access tokens in addition to the issuer.
    pub audiences: Box<[String]>,
    /// The web origins of the redirect URLs.
    origins: Box<[ClientOrigin]>,
}

/// How a client authenticates.
pub enum ClientAuthentication {
    /// A public client, which has no secret.
    None,
    /// `client_secret_basic` and `client_secret_post`.
    Secret(Box<ClientSecrets>),
    /// `private_key_jwt` (RFC 7523).
    PrivateKeyJwt(Box<[AssertionKey]>),
    /// The Secret or ConfigMap of the client does not exist or is invalid.
    Unresolved,
}

/// The SHA-256 digests of a client's secrets.
pub struct ClientSecrets {
    current: SecretDigest,
    /// Boxed, because few clients have one.
    previous: Option<Box<PreviousDigest>>,
}

type SecretDigest = [u8; 32];

/// A replaced secret that still works.
struct PreviousDigest {
    digest: SecretDigest,
    /// When the secret stops working, in Unix seconds. `None`: it works as long as the document contains it.
    expires_at: Option<i64>,
}

/// Which groups of a user a client sees.
pub struct GroupFilter {
    /// The client sees only groups that match one of these patterns. If the list is empty, the client sees every group.
    only: Box<[GroupPattern]>,
    max: usize,
}

/// The groups of a user that one client sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VisibleGroups<'a> {
    Listed(Vec<&'a str>),
    /// The user has more groups than the client accepts.
    TooMany,
}

/// The web origin of a redirect URL.
#[derive(Debug, PartialEq, Eq)]
enum ClientOrigin {
    /// An `https` origin, as browsers write it.
    Exact(Box<str>),
    /// `http` and a loopback host, with any port (RFC 8252, 7.3).
    Loopback(Box<str>),
}

/// Why the clients of a document cannot be used. The text contains no secret.
#[derive(Debug, thiserror::Error)]
pub enum InvalidClient {
    #[error("the secret of client {0} is not a SHA-256 in base64")]
    Secret(ClientId),
    #[error("the keys of client {0} are not a JWK Set")]
    Keys(ClientId),
    #[error("there are two clients with the ID {0}")]
    Duplicate(ClientId),
}

/// The clients of an App, ordered by their ids.
#[derive(Debug, Default)]
pub struct Clients(Box<[Arc<OpenIdClient>]>);

// === impl Clients ===

impl Clients {
    pub fn new(rendered: Vec<RenderedClient>) -> Result<Self, InvalidClient> {
        let mut clients = rendered
            .into_iter()
            .map(|client| OpenIdClient::new(client).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        clients.sort_by(|one, other| one.client_id.cmp(&other.client_id));
        let duplicate = clients.windows(2).find(|pair| pair[0].client_id == pair[1].client_id);
        if let Some(pair) = duplicate {
            return Err(InvalidClient::Duplicate(pair[0].client_id.clone()));
        }
        Ok(Self(clients.into()))
    }

    pub fn get(&self, client_id: &str) -> Option<&Arc<OpenIdClient>> {
        let index = self.0.binary_search_by(|client| client.client_id.as_str().cmp(client_id)).ok()?;
        self.0.get(index)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<OpenIdClient>> {
        self.0.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

// === impl OpenIdClient ===

impl OpenIdClient {
    fn new(rendered: RenderedClient) -> Result<Self, InvalidClient> {
        let authentication = ClientAuthentication::new(&rendered)?;
        let mut origins = Vec::new();
        for origin in rendered.redirect_urls.iter().filter_map(ClientOrigin::of) {
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        let visible = visible_text(&rendered.display_name);
        let display_name = if visible.trim().is_empty() { rendered.client_id.to_string() } else { visible };
        Ok(Self {
            pkce_required: rendered.pkce_required || matches!(authentication, ClientAuthentication::None),
            authentication,
            client_id: rendered.client_id,
            uid: rendered.uid.into(),
            display_name: display_name.into(),
            redirect_urls: rendered.redirect_urls.into(),
            post_logout_redirect_urls: rendered.post_logout_redirect_urls.into(),
            pushed_authorization_required: rendered.pushed_authorization_required,
            scopes: rendered.scopes.into_iter().collect(),
            consent: rendered.consent,
            allowed_groups: rendered.allowed_groups.into(),
            groups: GroupFilter {
                only: rendered.groups.only.into(),
                max: usize::try_from(rendered.groups.max).unwrap_or(usize::MAX),
            },
            id_token_algorithm: rendered.tokens.id_token_algorithm,
            id_token_lifetime_seconds: rendered.tokens.id_token_lifetime_seconds,
            audiences: rendered.tokens.audiences.into(),
            origins: origins.into(),
        })
    }

    /// Whether the client has no secret and no key.
    pub fn is_public(&self) -> bool {
        matches!(self.authentication, ClientAuthentication::None)
    }

    /// Whether the client's secret or keys cannot be read. Requests of such a client get 503.
    pub fn is_unresolved(&self) -> bool {
        matches!(self.authentication, ClientAuthentication::Unresolved)
    }

    /// Whether a user with these groups can sign in at the client.
    pub fn allows(&self, groups: &[GroupName]) -> bool {
        self.allowed_groups.is_empty() || groups.iter().any(|group| self.allowed_groups.contains(group))
    }

    /// Whether a page of this origin can call the endpoints for clients.
    pub fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|listed| listed.matches(origin))
    }
}

/// The output contains no secret, no key and no URL.
impl fmt::Debug for OpenIdClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenIdClient")
            .field("client_id", &self.client_id)
            .field("uid", &self.uid)
            .finish_non_exhaustive()
    }
}

// === impl ClientAuthentication ===

impl ClientAuthentication {
    fn new(rendered: &RenderedClient) -> Result<Self, InvalidClient> {
        let invalid_secret = || InvalidClient::Secret(rendered.client_id.clone());
        let parse_digest = |text: &str| {
            let bytes = STANDARD.decode(text).map_err(|_| invalid_secret())?;
            SecretDigest::try_from(bytes).map_err(|_| invalid_secret())
        };
        Ok(match &rendered.authentication {
            RenderedClientAuthentication::None => Self::None,
            RenderedClientAuthentication::Unresolved => Self::Unresolved,
            RenderedClientAuthentication::Secret { sha256, previous } => Self::Secret(Box::new(ClientSecrets {
                current: parse_digest(sha256)?,
                previous: match previous {
                    None => None,
                    Some(previous) => Some(Box::new(PreviousDigest {
                        digest: parse_digest(&previous.sha256)?,
                        expires_at: previous.expires_at,
                    })),
                },
            })),
            RenderedClientAuthentication::PrivateKeyJwt { jwks } => {
                let keys = AssertionKey::parse_set(jwks).ok_or_else(|| InvalidClient::Keys(rendered.client_id.clone()));
                Self::PrivateKeyJwt(keys?.into())
            }
        })
    }
}

// === impl ClientSecrets ===

impl ClientSecrets {
    /// Whether the secret is the current one, or the previous one while it still works. Takes the same time for every
    /// wrong secret.
    pub fn accept(&self, secret: &str, unix_seconds: i64) -> bool {
        let shown = digest(&SHA256, secret.as_bytes());
        let is_current = verify_slices_are_equal(shown.as_ref(), &self.current).is_ok();
        let is_previous = self.previous.as_ref().is_some_and(|previous| {
            let is_equal = verify_slices_are_equal(shown.as_ref(), &previous.digest).is_ok();
            is_equal && previous.expires_at.is_none_or(|expires_at| unix_seconds < expires_at)
        });
        is_current | is_previous
    }
}

// === impl GroupFilter ===

impl GroupFilter {
    /// Returns the groups that the client sees, in the order of `groups`.
    pub fn visible<'a>(&self, groups: &'a [GroupName]) -> VisibleGroups<'a> {
        let names = groups.iter().map(GroupName::as_str);
        let is_visible = |name: &&str| self.only.is_empty() || self.only.iter().any(|pattern| pattern.matches(name));
        let visible: Vec<&str> = names.filter(is_visible).collect();
        if visible.len() > self.max { VisibleGroups::TooMany } else { VisibleGroups::Listed(visible) }
    }
}

// === impl ClientOrigin ===

impl ClientOrigin {
    /// The origin of a redirect URL. `None` for a private-use scheme, which no web page has.
    fn of(url: &RedirectUrl) -> Option<Self> {
        let url = Url::parse(url.as_str()).ok()?;
        match url.scheme() {
            "https" => Some(Self::Exact(url.origin().ascii_serialization().into())),
            // `http` redirect URLs have only loopback hosts.
            "http" => Some(Self::Loopback(format!("http://{}", url.host_str()?).into())),
            _ => None,
        }
    }

    fn matches(&self, origin: &str) -> bool {
        match self {
            Self::Exact(listed) => **listed == *origin,
            Self::Loopback(listed) => origin.strip_prefix(&**listed).is_some_and(|port| {
                port.is_empty()
                    || port.strip_prefix(':').is_some_and(|port| {
                        (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit())
                    })
            }),
        }
    }
}

/// The name without invisible characters, because pages show it within sentences. Such characters can change the
/// direction of the text around them, or make two names look the same (Unicode Standard Annex 9, 2;
/// `Default_Ignorable_Code_Point`).
fn visible_text(text: &str) -> String {
    let is_invisible = |character: &char| {
        matches!(character, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    text.chars().filter(|character| !is_invisible(character)).collect()
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::PreviousSecret;

    use super::*;
    use crate::fixtures::{self, secret_digest};

    fn client(edit: impl FnOnce(&mut RenderedClient)) -> OpenIdClient {
        let mut rendered = fixtures::client("grafana");
        edit(&mut rendered);
        OpenIdClient::new(rendered).unwrap()
    }

    fn names(texts: &[&str]) -> Vec<GroupName> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_name_has_no_invisible_characters() {
        assert_eq!(visible_text("Our \u{202e}anafarG\u{202c}\u{200b}"), "Our anafarG");
        assert_eq!(visible_text("\u{2067}\u{feff}Grafana é 東京"), "Grafana é 東京");
        assert_eq!(&*client(|client| client.display_name = "\u{200b} \u{2067}".to_owned()).display_name, "grafana");
    }

    #[test]
    fn clients_are_found_by_their_exact_id() {
        let ids = ["b", "monitoring.grafana", "a", "B"];
        let clients = Clients::new(ids.map(fixtures::client).into()).unwrap();
        for id in ids {
            assert_eq!(clients.get(id).unwrap().client_id.as_str(), id);
        }
        for unknown in ["", "A", "monitoring", "monitoring.grafan", "monitoring.grafana."] {
            assert!(clients.get(unknown).is_none(), "{unknown}");
        }
        let twice = Clients::new(vec![fixtures::client("a"), fixtures::client("a")]).unwrap_err();
        assert!(matches!(twice, InvalidClient::Duplicate(_)));
    }

    #[test]
    fn the_current_secret_works_and_the_previous_one_until_it_expires() {
        let client = client(|client| {
            client.authentication = RenderedClientAuthentication::Secret {
                sha256: secret_digest("new"),
                previous: Some(PreviousSecret { sha256: secret_digest("old"), expires_at: Some(100) }),
            };
        });
        let ClientAuthentication::Secret(secrets) = &client.authentication else { panic!("a secret") };
        assert!(secrets.accept("new", 1000) && secrets.accept("old", 99));
        assert!(!secrets.accept("old", 100));
        for wrong in ["", "ne", "newer", "NEW", "new "] {
            assert!(!secrets.accept(wrong, 0), "{wrong}");
        }
    }

    #[test]
    fn a_document_with_an_unusable_secret_or_key_set_is_refused() {
        let with = |authentication| {
            let client = RenderedClient { authentication, ..fixtures::client("grafana") };
            Clients::new(vec![client]).map(drop)
        };
        for sha256 in ["", "x", "c2hvcnQ=", "%%%%"] {
            let secret = RenderedClientAuthentication::Secret { sha256: sha256.to_owned(), previous: None };
            assert!(matches!(with(secret), Err(InvalidClient::Secret(_))), "{sha256}");
        }
        for jwks in ["", "{}", "[]", r#"{"keys": 1}"#] {
            let keys = RenderedClientAuthentication::PrivateKeyJwt { jwks: jwks.to_owned() };
            let error = with(keys).unwrap_err();
            assert_eq!(error.to_string(), "the keys of client grafana are not a JWK Set", "{jwks}");
        }
    }

    #[test]
    fn only_members_of_an_allowed_group_can_sign_in() {
        let open = client(|_| {});
        assert!(open.allows(&[]) && open.allows(&names(&["any"])));
        let closed = client(|client| client.allowed_groups = names(&["ops", "corp:dev"]));
        assert!(closed.allows(&names(&["a", "corp:dev"])));
        assert!(!closed.allows(&[]) && !closed.allows(&names(&["corp", "Ops", "ops2"])));
    }

    #[test]
    fn a_client_sees_the_groups_that_match_its_patterns_unless_they_are_too_many() {
        let client = client(|client| {
            client.groups.only = ["argo:*", "ops"].map(|pattern| pattern.parse::<GroupPattern>().unwrap()).into();
            client.groups.max = 2;
        });
        let groups = names(&["argo:admin", "corp", "ops"]);
        assert_eq!(client.groups.visible(&groups), VisibleGroups::Listed(vec!["argo:admin", "ops"]));
        let groups = names(&["argo:admin", "argo:dev", "ops"]);
        assert_eq!(client.groups.visible(&groups), VisibleGroups::TooMany);
        assert_eq!(client.groups.visible(&[]), VisibleGroups::Listed(Vec::new()));
    }

    #[test]
    fn web_pages_with_the_origin_of_a_redirect_url_can_call_the_endpoints() {
        let client = client(|client| {
            let urls =
                ["https://Shop.example.com:443/cb?x", "http://127.0.0.1/cb", "http://[::1]:8000/", "com.example:/x"];
            client.redirect_urls = urls.map(|url| url.parse::<RedirectUrl>().unwrap()).into();
        });
        for origin in ["https://shop.example.com", "http://127.0.0.1", "http://127.0.0.1:51004", "http://[::1]:1"] {
            assert!(client.has_origin(origin), "{origin}");
        }
        for origin in [
            "",
            "null",
            "https://shop.example.com:443",
            "https://shop.example.com.evil.example",
            "http://shop.example.com",
            "https://127.0.0.1",
            "http://127.0.0.1.evil.example",
            "http://127.0.0.1:",
            "http://127.0.0.1:80x",
            "http://127.0.0.1:123456",
            "http://127.0.0.1@evil.example",
            "http://localhost",
            "com.example:/x",
        ] {
            assert!(!client.has_origin(origin), "{origin}");
        }
    }

    #[test]
    fn a_public_client_always_needs_pkce_and_debug_output_has_no_secret() {
        let public = client(|client| client.authentication = RenderedClientAuthentication::None);
        assert!(public.is_public() && public.pkce_required);
        let web = client(|_| {});
        assert!(!web.is_public() && !web.pkce_required);
        assert_eq!(format!("{web:?}"), "OpenIdClient { client_id: ClientId(\"grafana\"), uid: \"uid-grafana\", .. }");
    }
}
