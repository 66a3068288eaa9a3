//! The public listener's endpoints: (method, path) → route, and route → URL.

use std::sync::LazyLock;

use http::Method;
use latchkey_crds::types::{AppId, IssuerUrl, ProviderName};

/// Declares the endpoints: how each is called, its name in metrics, logs and the OpenAPI document, and its path.
macro_rules! routes {
    ($($(#[$doc:meta])* $route:ident = $verb:ident $name:literal $template:literal;)+) => {
        /// The endpoints of the public listener.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Route {
            $($(#[$doc])* $route,)+
        }

        impl Route {
            pub const ALL: &[Self] = &[$(Self::$route,)+];

            pub const fn verb(self) -> Verb {
                match self {
                    $(Self::$route => Verb::$verb,)+
                }
            }

            /// In metrics, logs and the OpenAPI document.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$route => $name,)+
                }
            }

            /// The path with `{APPID}` and other placeholders in it, as the OpenAPI document has it.
            pub const fn template(self) -> &'static str {
                match self {
                    $(Self::$route => $template,)+
                }
            }
        }
    };
}

routes! {
    Login = Post "login" "/v1/{APPID}/email/login";
    Register = Post "register" "/v1/{APPID}/email/register";
    Verify = Post "verify" "/v1/{APPID}/email/verify";
    Confirm = Post "confirm" "/v1/{APPID}/email/confirm";
    ForgotPassword = Post "forgot-password" "/v1/{APPID}/email/forgot-password";
    ConfirmPassword = Post "confirm-password" "/v1/{APPID}/email/confirm-password";
    Token = Post "token" "/v1/{APPID}/token";
    Revoke = Post "revoke" "/v1/{APPID}/revoke";
    User = Get "user" "/v1/{APPID}/user";
    RenameUser = Patch "rename-user" "/v1/{APPID}/user";
    DeleteUser = Delete "delete-user" "/v1/{APPID}/user";
    ChangePassword = Post "change-password" "/v1/{APPID}/user/password";
    ChangeAddress = Post "change-address" "/v1/{APPID}/user/email";
    UserInfo = Get "userinfo" "/v1/{APPID}/userinfo";
    Logout = Post "logout" "/v1/{APPID}/logout";
    Sessions = Get "sessions" "/v1/{APPID}/sessions";
    EndOtherSessions = Delete "end-other-sessions" "/v1/{APPID}/sessions";
    EndSession = Delete "end-session" "/v1/{APPID}/sessions/{SESSION}";
    Identities = Get "identities" "/v1/{APPID}/user/identities";
    LinkIdentity = Post "link-identity" "/v1/{APPID}/user/identities/{PROVIDER}";
    UnlinkIdentity = Delete "unlink-identity" "/v1/{APPID}/user/identities/{PROVIDER}";
    SocialRedirect = GetOnly "social-redirect" "/{APPID}/{PROVIDER}/redirect";
    SocialCallback = GetOnly "social-callback" "/{APPID}/{PROVIDER}/callback";
    /// From providers that send their users back by a form.
    SocialCallbackForm = Post "social-callback-form" "/{APPID}/{PROVIDER}/callback";
    SocialLogin = Post "social-login" "/{APPID}/{PROVIDER}/login";
    Introspect = Post "introspect" "/v1/{APPID}/introspect";
    Authorize = Any "authorize" "/v1/{APPID}/authorize";
    /// The same for ingresses that put the path of what they ask about behind it.
    AuthorizeBelow = Any "authorize-below" "/v1/{APPID}/authorize/{SUFFIX}";
    Activity = Get "activity" "/v1/{APPID}/user/activity";
    Jwks = Get "jwks" "/{APPID}/.well-known/jwks.json";
    OpenIdConfiguration = Get "openid-configuration" "/{APPID}/.well-known/openid-configuration";
    /// Where RFC 8414, 3.1 puts it: before the issuer's path.
    AuthorizationServer = Get "oauth-authorization-server" "/.well-known/oauth-authorization-server/{APPID}";
    /// The same behind the issuer's path, where many look for it.
    AuthorizationServerOfApp =
        Get "oauth-authorization-server-of-app" "/{APPID}/.well-known/oauth-authorization-server";
    OpenApi = Get "openapi" "/openapi.json";
}

/// How an endpoint is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET, and so HEAD.
    Get,
    /// GET alone: a link scanner's HEAD must use nothing up.
    GetOnly,
    Post,
    Patch,
    Delete,
    /// Whatever it is, OPTIONS too.
    Any,
}

/// A path, and the routes that it has, one for each verb.
struct Path {
    segments: Vec<Segment>,
    routes: Vec<Route>,
    /// `Allow`; OPTIONS answers a preflight.
    allow: String,
}

enum Segment {
    Literal(&'static str),
    App,
    /// `{PROVIDER}`: a label, and not `email`, which is our own.
    Provider,
    /// Whatever the route is about.
    Item,
    /// All that is left of the path, be it nothing.
    Rest,
}

static PATHS: LazyLock<Vec<Path>> = LazyLock::new(|| {
    let mut paths: Vec<Path> = Vec::new();
    for route in Route::ALL {
        let same = |path: &&mut Path| path.routes.iter().any(|other| other.template() == route.template());
        match paths.iter_mut().find(same) {
            Some(path) => path.routes.push(*route),
            None => paths.push(Path::of(*route)),
        }
    }
    for path in &mut paths {
        let methods = path.routes.iter().flat_map(|route| route.verb().methods()).copied();
        path.allow = methods.chain(["OPTIONS"]).collect::<Vec<_>>().join(", ");
    }
    paths
});

/// A path that has routes. `{APPID}` is as it stands there, not yet known to be an App.
#[derive(Clone, Copy)]
pub struct Matched<'a> {
    path: &'static Path,
    pub app: Option<&'a str>,
    /// What stands for the path's other placeholder.
    pub item: Option<&'a str>,
}

// === impl Route ===

impl Route {
    /// The routes of a path. Nothing is decoded or normalized: every path has one spelling.
    pub fn of(path: &str) -> Option<Matched<'_>> {
        PATHS.iter().find_map(|known| known.matches(path))
    }

    /// The path of a route that is about the App alone.
    pub fn path(self, app: &AppId) -> String {
        self.template().replace("{APPID}", app.as_str())
    }

    pub fn url(self, base: &IssuerUrl, app: &AppId) -> String {
        format!("{}{}", base.as_str().trim_end_matches('/'), self.path(app))
    }
}

// === impl Path ===

impl Path {
    fn of(route: Route) -> Self {
        let segments = route.template().split('/').map(|segment| match segment {
            "{APPID}" => Segment::App,
            "{PROVIDER}" => Segment::Provider,
            "{SUFFIX}" => Segment::Rest,
            placeholder if placeholder.starts_with('{') => Segment::Item,
            literal => Segment::Literal(literal),
        });
        Self { segments: segments.collect(), routes: vec![route], allow: String::new() }
    }

    fn matches<'a>(&'static self, path: &'a str) -> Option<Matched<'a>> {
        let mut matched = Matched { path: self, app: None, item: None };
        let mut segments = path.split('/');
        for expected in &self.segments {
            let segment = segments.next()?;
            match expected {
                Segment::Literal(literal) if *literal == segment => {}
                Segment::App if !segment.is_empty() => matched.app = Some(segment),
                Segment::Provider if segment.parse::<ProviderName>().is_ok() => matched.item = Some(segment),
                Segment::Item if !segment.is_empty() => matched.item = Some(segment),
                Segment::Rest => return Some(matched),
                Segment::Literal(_) | Segment::App | Segment::Provider | Segment::Item => return None,
            }
        }
        segments.next().is_none().then_some(matched)
    }
}

// === impl Matched ===

impl Matched<'_> {
    /// The one that takes the method.
    pub fn route(&self, method: &Method) -> Option<Route> {
        self.path.routes.iter().copied().find(|route| route.verb().admits(method))
    }

    /// Any, where none takes the method.
    pub fn first(&self) -> Route {
        self.path.routes[0]
    }

    /// The methods that the path takes.
    pub fn allow(&self) -> &'static str {
        &self.path.allow
    }
}

// === impl Verb ===

impl Verb {
    const fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Get => &["GET", "HEAD"],
            Self::GetOnly => &["GET"],
            Self::Post => &["POST"],
            Self::Patch => &["PATCH"],
            Self::Delete => &["DELETE"],
            Self::Any => &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
        }
    }

    pub fn admits(self, method: &Method) -> bool {
        self == Self::Any || self.methods().contains(&method.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_found_under_its_own_path() {
        let app: AppId = "shop".parse().unwrap();
        for route in Route::ALL {
            let path = route.path(&app).replace("{SESSION}", "an-item").replace("{SUFFIX}", "a/suffix");
            let path = path.replace("{PROVIDER}", "an-item");
            let found = Route::of(&path).unwrap();
            let methods = route.verb().methods();
            assert_eq!(found.route(&methods[0].parse().unwrap()), Some(*route), "{path}");
            assert_eq!(found.app, route.template().contains("{APPID}").then_some("shop"), "{path}");
            assert_eq!(found.item.is_some(), path.contains("an-item"), "{path}");
            assert!(methods.iter().all(|method| found.allow().contains(method)), "{path}");
        }
        assert_eq!(Route::of("/shop/github/callback").unwrap().allow(), "GET, POST, OPTIONS");
        assert_eq!(Route::of("/shop/github/redirect").unwrap().allow(), "GET, OPTIONS");
        let sessions = Route::of("/v1/shop/sessions").unwrap();
        assert_eq!(sessions.allow(), "GET, HEAD, DELETE, OPTIONS");
        assert_eq!(sessions.route(&Method::POST), None);
        let base = "https://auth.example.com".parse().unwrap();
        assert_eq!(Route::Jwks.url(&base, &app), "https://auth.example.com/shop/.well-known/jwks.json");
    }

    #[test]
    fn a_path_has_one_spelling() {
        for path in [
            "",
            "/",
            "*",
            "//",
            "/v1",
            "/v1/shop/email",
            "/v1/shop/email/",
            "/v1/shop/email/login/",
            "/v1//email/login",
            "//v1/shop/email/login",
            "/v1/shop//email/login",
            "/V1/shop/email/login",
            "/v1/shop/email/Login",
            "/v1/shop/email/%6Cogin",
            "/v1/shop/email/login/more",
            "/v1/shop/./email/login",
            "/shop/email/login",
            "/shop/email/redirect",
            "/shop/GitHub/redirect",
            "/shop/git%68ub/redirect",
            "/shop//redirect",
            "/shop/github/redirect/",
            "/shop/github",
            "/v1/shop/user/identities/",
            "/v2/shop/email/login",
            "/.well-known/jwks.json",
            "//.well-known/jwks.json",
            "/shop/.well-known/jwks.json/",
            "/.well-known/oauth-authorization-server",
            "/.well-known/oauth-authorization-server/",
            "/v1/shop/sessions/",
            "/v1/shop/sessions/1/2",
            "/v1/shop/authorized",
            "/v1//authorize",
            "/openapi.json/",
            "/openapi",
        ] {
            assert!(Route::of(path).is_none(), "{path}");
        }
    }

    #[test]
    fn the_gate_takes_any_suffix_and_any_method() {
        for path in [
            "/v1/shop/authorize",
            "/v1/shop/authorize/",
            "/v1/shop/authorize//",
            "/v1/shop/authorize/a/b/c/d/e",
            "/v1/shop/authorize/..%2f../email/login",
        ] {
            let found = Route::of(path).unwrap();
            assert_eq!(found.app, Some("shop"), "{path}");
            for method in ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE", "PROPFIND"] {
                let route = found.route(&method.parse().unwrap()).map(Route::name).unwrap();
                assert!(route.starts_with("authorize"), "{method} {path}");
            }
        }
    }

    #[test]
    fn an_app_id_is_not_decoded() {
        assert_eq!(Route::of("/v1/sh%6Fp/email/login").unwrap().app, Some("sh%6Fp"));
        assert!("sh%6Fp".parse::<AppId>().is_err());
    }

    #[test]
    fn head_works_where_get_does() {
        assert!(Verb::Get.admits(&Method::HEAD));
        assert!(!Verb::Post.admits(&Method::HEAD));
        assert!(!Verb::Post.admits(&Method::GET));
        assert!(!Verb::Get.admits(&Method::OPTIONS));
    }
}
