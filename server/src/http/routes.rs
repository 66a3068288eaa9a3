//! The endpoints of the public listener and of the administration listener: maps method and path to a route, and a
//! route to its URL.

use std::sync::LazyLock;

use http::Method;
use latchkey_crds::types::{AppId, IssuerUrl, ProviderName};

/// Passes the table of the public endpoints to the macro `$define`. A row has the route, the verb, the name (in
/// metrics, logs and the OpenAPI document), the path, and the module in `handlers`. The module has the functions
/// `operation` and `handle`.
macro_rules! public_endpoints {
    ($define:ident) => {
        $define! {
            // The paths of an App.
            app {
                Login = Post "login" "/v1/{APPID}/email/login" => email::login;
                Register = Post "register" "/v1/{APPID}/email/register" => email::register;
                Verify = Post "verify" "/v1/{APPID}/email/verify" => email::verify;
                Confirm = Post "confirm" "/v1/{APPID}/email/confirm" => email::confirm;
                ForgotPassword = Post "forgot-password" "/v1/{APPID}/email/forgot-password" => email::forgot_password;
                ConfirmPassword = Post "confirm-password" "/v1/{APPID}/email/confirm-password"
                    => email::confirm_password;
                Token = Post "token" "/v1/{APPID}/token" => token;
                /// Only for an App with clients.
                Par = Post "pushed-authorization-request" "/v1/{APPID}/par" => par;
                Revoke = Post "revoke" "/v1/{APPID}/revoke" => revoke;
                User = Get "user" "/v1/{APPID}/user" => user::read;
                RenameUser = Patch "rename-user" "/v1/{APPID}/user" => user::rename;
                DeleteUser = Delete "delete-user" "/v1/{APPID}/user" => user::delete;
                ChangePassword = Post "change-password" "/v1/{APPID}/user/password" => user::password;
                ChangeAddress = Post "change-address" "/v1/{APPID}/user/email" => user::email;
                UserInfo = Get "userinfo" "/v1/{APPID}/userinfo" => user::userinfo;
                /// Only for an App with clients.
                UserInfoForm = Post "userinfo-form" "/v1/{APPID}/userinfo" => user::userinfo_form;
                Logout = Post "logout" "/v1/{APPID}/logout" => sessions::log_out;
                Sessions = Get "sessions" "/v1/{APPID}/sessions" => sessions::list;
                EndOtherSessions = Delete "end-other-sessions" "/v1/{APPID}/sessions" => sessions::end_others;
                EndSession = Delete "end-session" "/v1/{APPID}/sessions/{SESSION}" => sessions::end;
                Identities = Get "identities" "/v1/{APPID}/user/identities" => identities::list;
                LinkIdentity = Post "link-identity" "/v1/{APPID}/user/identities/{PROVIDER}" => identities::link;
                UnlinkIdentity = Delete "unlink-identity" "/v1/{APPID}/user/identities/{PROVIDER}"
                    => identities::unlink;
                SocialRedirect = GetOnly "social-redirect" "/{APPID}/{PROVIDER}/redirect" => social::redirect;
                SocialCallback = GetOnly "social-callback" "/{APPID}/{PROVIDER}/callback" => social::callback;
                /// For providers that send the user back with a form.
                SocialCallbackForm = Post "social-callback-form" "/{APPID}/{PROVIDER}/callback"
                    => social::callback_form;
                SocialLogin = Post "social-login" "/{APPID}/{PROVIDER}/login" => social::login;
                Introspect = Post "introspect" "/v1/{APPID}/introspect" => introspect;
                Authorize = Any "authorize" "/v1/{APPID}/authorize" => authorize;
                /// Like `Authorize`, for ingresses that append the path of the original request.
                AuthorizeBelow = Any "authorize-below" "/v1/{APPID}/authorize/{SUFFIX}" => authorize;
                Activity = Get "activity" "/v1/{APPID}/user/activity" => activity;
                Jwks = Get "jwks" "/{APPID}/.well-known/jwks.json" => jwks;
                OpenIdConfiguration = Get "openid-configuration" "/{APPID}/.well-known/openid-configuration"
                    => discovery::openid_configuration;
                /// The path of RFC 8414, 3.1: the well-known part is before the issuer's path.
                AuthorizationServer = Get "oauth-authorization-server" "/.well-known/oauth-authorization-server/{APPID}"
                    => discovery::authorization_server;
                /// Like `AuthorizationServer`, but the well-known part is after the issuer's path. Many clients request
                /// this path.
                AuthorizationServerOfApp = Get "oauth-authorization-server-of-app"
                    "/{APPID}/.well-known/oauth-authorization-server" => discovery::authorization_server;
            }
            // The paths that belong to no App.
            service {
                OpenApi = Get "openapi" "/openapi.json" => openapi_document;
            }
        }
    };
}
pub(super) use public_endpoints;

/// Passes the table of the administration endpoints to the macro `$define`. The rows are like those of
/// `public_endpoints!`. The module of a path with `{APPID}` also has the constant `RIGHT`.
macro_rules! administration_endpoints {
    ($define:ident) => {
        $define! {
            app {
                ListUsers = Get "list-users" "/v1/{APPID}/users" => administration::users::list;
                CreateUser = Post "create-user" "/v1/{APPID}/users" => administration::users::create;
                ReadUser = Get "read-user" "/v1/{APPID}/users/{USER}" => administration::users::read;
                ChangeUser = Patch "change-user" "/v1/{APPID}/users/{USER}" => administration::users::change;
                RemoveUser = Delete "remove-user" "/v1/{APPID}/users/{USER}" => administration::users::remove;
                UserSessions = Get "user-sessions" "/v1/{APPID}/users/{USER}/sessions"
                    => administration::sessions::list;
                EndUserSessions = Delete "end-user-sessions" "/v1/{APPID}/users/{USER}/sessions"
                    => administration::sessions::end_all;
                EndUserSession = Delete "end-user-session" "/v1/{APPID}/users/{USER}/sessions/{SESSION}"
                    => administration::sessions::end;
                RequestMail = Post "request-mail" "/v1/{APPID}/users/{USER}/mails" => administration::mails;
                RemoveIdentity = Delete "remove-identity" "/v1/{APPID}/users/{USER}/identities/{PROVIDER}"
                    => administration::identities;
                UserGroups = Get "user-groups" "/v1/{APPID}/users/{USER}/groups" => administration::users::groups;
                ListGroups = Get "list-groups" "/v1/{APPID}/groups" => administration::groups::list;
                PutGroup = Put "put-group" "/v1/{APPID}/groups/{GROUP}" => administration::groups::put;
                RemoveGroup = Delete "remove-group" "/v1/{APPID}/groups/{GROUP}" => administration::groups::remove;
                ListGroupMembers = Get "list-group-members" "/v1/{APPID}/groups/{GROUP}/members"
                    => administration::groups::members::list;
                AddGroupMember = Put "add-group-member" "/v1/{APPID}/groups/{GROUP}/members/{USER}"
                    => administration::groups::members::add;
                RemoveGroupMember = Delete "remove-group-member" "/v1/{APPID}/groups/{GROUP}/members/{USER}"
                    => administration::groups::members::remove;
                ExportUser = Get "export-user" "/v1/{APPID}/users/{USER}/export" => administration::export::user;
                ExportUsers = Get "export-users" "/v1/{APPID}/export" => administration::export::users;
                ImportUsers = Post "import-users" "/v1/{APPID}/imports" => administration::imports;
                Events = Get "events" "/v1/{APPID}/events" => administration::events;
                DeadLetters = Get "dead-letters" "/v1/{APPID}/dead-letters" => administration::dead_letters::list;
                RetryDeadLetters = Post "retry-dead-letters" "/v1/{APPID}/dead-letters/retry"
                    => administration::dead_letters::retry;
                FetchEvents = Get "fetch-events" "/v1/{APPID}/webhooks/{WEBHOOK}/events"
                    => administration::webhooks::events;
                AcknowledgeEvents = Post "acknowledge-events" "/v1/{APPID}/webhooks/{WEBHOOK}/acknowledge"
                    => administration::webhooks::acknowledge;
            }
            // The paths that belong to no App.
            service {
                OpenApi = Get "openapi" "/openapi.json" => openapi_document;
            }
        }
    };
}
pub(super) use administration_endpoints;

/// The routes of a listener.
pub trait RouteTable: Copy + Eq + Send + Sync + 'static {
    const ALL: &'static [Self];
    /// Whether the paths accept OPTIONS, for CORS preflights.
    const ACCEPTS_OPTIONS: bool;

    fn verb(self) -> Verb;

    /// The name of the route in metrics, logs and the OpenAPI document.
    fn name(self) -> &'static str;

    /// The path with `{APPID}` and other placeholders, as in the OpenAPI document.
    fn path_template(self) -> &'static str;

    /// The paths of all routes.
    fn paths() -> &'static [PathPattern<Self>];

    /// Finds the routes at the path of a request. Returns `None` if there is no route. Nothing is decoded or
    /// normalized: every path has exactly one spelling.
    fn find(path: &str) -> Option<MatchedPath<'_, Self>> {
        Self::paths().iter().find_map(|pattern| pattern.matches(path))
    }

    /// Returns the path of a route that has no placeholder except `{APPID}`.
    fn path(self, app: &AppId) -> String {
        self.path_template().replace("{APPID}", app.as_str())
    }

    fn url(self, base: &IssuerUrl, app: &AppId) -> String {
        format!("{}{}", base.as_str().trim_end_matches('/'), self.path(app))
    }
}

/// Declares the routes of a table.
macro_rules! declare_routes {
    ($enum:ident, $accepts_options:literal, $about:literal, $($section:ident {
        $($(#[$doc:meta])* $route:ident = $verb:ident $name:literal $template:literal => $($module:ident)::+;)+
    })+) => {
        #[doc = $about]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $enum {
            $($($(#[$doc])* $route,)+)+
        }

        impl RouteTable for $enum {
            const ALL: &'static [Self] = &[$($(Self::$route,)+)+];
            const ACCEPTS_OPTIONS: bool = $accepts_options;

            fn verb(self) -> Verb {
                match self {
                    $($(Self::$route => Verb::$verb,)+)+
                }
            }

            fn name(self) -> &'static str {
                match self {
                    $($(Self::$route => $name,)+)+
                }
            }

            fn path_template(self) -> &'static str {
                match self {
                    $($(Self::$route => $template,)+)+
                }
            }

            fn paths() -> &'static [PathPattern<Self>] {
                static PATHS: LazyLock<Vec<PathPattern<$enum>>> = LazyLock::new(PathPattern::all);
                &PATHS
            }
        }
    };
}

macro_rules! declare_public_routes {
    ($($rows:tt)+) => {
        declare_routes! { Route, true, "The endpoints of the public listener.", $($rows)+ }
    };
}

macro_rules! declare_administration_routes {
    ($($rows:tt)+) => {
        declare_routes! { AdministrationRoute, false, "The endpoints of the administration listener.", $($rows)+ }
    };
}

public_endpoints!(declare_public_routes);
administration_endpoints!(declare_administration_routes);

/// The methods that an endpoint accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET and HEAD.
    Get,
    /// GET only: a link scanner that sends HEAD must not start or finish a flow.
    GetOnly,
    Post,
    Put,
    Patch,
    Delete,
    /// Any method, including OPTIONS.
    Any,
}

/// A path with its routes, one per verb.
pub struct PathPattern<R> {
    segments: Vec<Segment>,
    routes: Vec<R>,
    /// The methods that the path accepts, as the value of the header `Allow`.
    allow: String,
}

enum Segment {
    Literal(&'static str),
    App,
    /// `{PROVIDER}`: the name of a provider. The reserved name `email` does not match.
    Provider,
    /// Another placeholder, such as `{SESSION}`: any text that is not empty.
    Parameter,
    /// `{SUFFIX}`: the rest of the path, which can be empty.
    Suffix,
}

/// A pattern that matches the path of a request, with the values of the placeholders.
pub struct MatchedPath<'a, R: 'static> {
    pattern: &'static PathPattern<R>,
    /// The text at `{APPID}`. There may be no App with this appID.
    pub app: Option<&'a str>,
    /// The texts at the other placeholders, in their order.
    pub path_parameters: Vec<&'a str>,
}

// === impl PathPattern ===

impl<R: RouteTable> PathPattern<R> {
    /// The paths of all routes of a table.
    fn all() -> Vec<Self> {
        let mut paths: Vec<Self> = Vec::new();
        for route in R::ALL {
            let has_same_template =
                |path: &&mut Self| path.routes.iter().any(|other| other.path_template() == route.path_template());
            match paths.iter_mut().find(has_same_template) {
                Some(path) => path.routes.push(*route),
                None => paths.push(Self::from_route(*route)),
            }
        }
        let options = if R::ACCEPTS_OPTIONS { Some("OPTIONS") } else { None };
        for path in &mut paths {
            let methods = path.routes.iter().flat_map(|route| route.verb().methods()).copied();
            path.allow = methods.chain(options).collect::<Vec<_>>().join(", ");
        }
        paths
    }

    fn from_route(route: R) -> Self {
        let segments = route.path_template().split('/').map(|segment| match segment {
            "{APPID}" => Segment::App,
            "{PROVIDER}" => Segment::Provider,
            "{SUFFIX}" => Segment::Suffix,
            placeholder if placeholder.starts_with('{') => Segment::Parameter,
            literal => Segment::Literal(literal),
        });
        Self { segments: segments.collect(), routes: vec![route], allow: String::new() }
    }

    fn matches<'a>(&'static self, path: &'a str) -> Option<MatchedPath<'a, R>> {
        let mut matched = MatchedPath { pattern: self, app: None, path_parameters: Vec::new() };
        let mut segments = path.split('/');
        for expected in &self.segments {
            let segment = segments.next()?;
            match expected {
                Segment::Literal(literal) if *literal == segment => {}
                Segment::App if !segment.is_empty() => matched.app = Some(segment),
                Segment::Provider if segment.parse::<ProviderName>().is_ok() => matched.path_parameters.push(segment),
                Segment::Parameter if !segment.is_empty() => matched.path_parameters.push(segment),
                Segment::Suffix => return Some(matched),
                Segment::Literal(_) | Segment::App | Segment::Provider | Segment::Parameter => return None,
            }
        }
        segments.next().is_none().then_some(matched)
    }
}

// === impl MatchedPath ===

impl<R: RouteTable> MatchedPath<'_, R> {
    /// The route that accepts the method.
    pub fn route_for(&self, method: &Method) -> Option<R> {
        self.pattern.routes.iter().copied().find(|route| route.verb().allows(method))
    }

    /// The first route of the path. Logs, metrics and CORS use it if no route accepts the method.
    pub fn any_route(&self) -> R {
        self.pattern.routes[0]
    }

    /// The methods that the path accepts, as the value of `Allow`.
    pub fn allow(&self) -> &'static str {
        &self.pattern.allow
    }
}

// === impl Verb ===

impl Verb {
    const fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Get => &["GET", "HEAD"],
            Self::GetOnly => &["GET"],
            Self::Post => &["POST"],
            Self::Put => &["PUT"],
            Self::Patch => &["PATCH"],
            Self::Delete => &["DELETE"],
            Self::Any => &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
        }
    }

    pub fn allows(self, method: &Method) -> bool {
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
            let found = Route::find(&path).unwrap();
            let methods = route.verb().methods();
            assert_eq!(found.route_for(&methods[0].parse().unwrap()), Some(*route), "{path}");
            assert_eq!(found.app, route.path_template().contains("{APPID}").then_some("shop"), "{path}");
            assert_eq!(!found.path_parameters.is_empty(), path.contains("an-item"), "{path}");
            assert!(methods.iter().all(|method| found.allow().contains(method)), "{path}");
        }
        assert_eq!(Route::find("/shop/github/callback").unwrap().allow(), "GET, POST, OPTIONS");
        assert_eq!(Route::find("/shop/github/redirect").unwrap().allow(), "GET, OPTIONS");
        let sessions = Route::find("/v1/shop/sessions").unwrap();
        assert_eq!(sessions.allow(), "GET, HEAD, DELETE, OPTIONS");
        assert_eq!(sessions.route_for(&Method::POST), None);
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
            assert!(Route::find(path).is_none(), "{path}");
        }
    }

    #[test]
    fn forward_auth_accepts_any_suffix_and_any_method() {
        for path in [
            "/v1/shop/authorize",
            "/v1/shop/authorize/",
            "/v1/shop/authorize//",
            "/v1/shop/authorize/a/b/c/d/e",
            "/v1/shop/authorize/..%2f../email/login",
        ] {
            let found = Route::find(path).unwrap();
            assert_eq!(found.app, Some("shop"), "{path}");
            for method in ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE", "PROPFIND"] {
                let route = found.route_for(&method.parse().unwrap()).map(Route::name).unwrap();
                assert!(route.starts_with("authorize"), "{method} {path}");
            }
        }
    }

    #[test]
    fn an_app_id_is_not_decoded() {
        assert_eq!(Route::find("/v1/sh%6Fp/email/login").unwrap().app, Some("sh%6Fp"));
        assert!("sh%6Fp".parse::<AppId>().is_err());
    }

    #[test]
    fn the_verb_get_includes_head() {
        assert!(Verb::Get.allows(&Method::HEAD));
        assert!(!Verb::Post.allows(&Method::HEAD));
        assert!(!Verb::Post.allows(&Method::GET));
        assert!(!Verb::Get.allows(&Method::OPTIONS));
    }
}
