//! The public listener's endpoints: (method, path) → route, and route → URL.

use http::Method;
use latchkey_crds::types::{AppId, IssuerUrl};

/// The endpoints of the public listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    Login,
    Register,
    Verify,
    Confirm,
    ForgotPassword,
    ConfirmPassword,
    Jwks,
    OpenIdConfiguration,
    /// Where RFC 8414, 3.1 puts it: before the issuer's path.
    AuthorizationServer,
    /// The same behind the issuer's path, where many look for it.
    AuthorizationServerOfApp,
    OpenApi,
}

/// How an endpoint is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET, and so HEAD.
    Get,
    Post,
}

/// A route, and the `{APPID}` of the path where the route has one: as it stands there, not yet known to be an App.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matched<'a> {
    pub route: Route,
    pub app: Option<&'a str>,
}

// === impl Route ===

impl Route {
    pub const ALL: [Self; 11] = [
        Self::Login,
        Self::Register,
        Self::Verify,
        Self::Confirm,
        Self::ForgotPassword,
        Self::ConfirmPassword,
        Self::Jwks,
        Self::OpenIdConfiguration,
        Self::AuthorizationServer,
        Self::AuthorizationServerOfApp,
        Self::OpenApi,
    ];

    /// The route of a path. Nothing is decoded or normalized: every path has one spelling.
    pub fn of(path: &str) -> Option<Matched<'_>> {
        let mut segments = path.strip_prefix('/')?.split('/');
        let segments = [segments.next(), segments.next(), segments.next(), segments.next(), segments.next()];
        let (route, app) = match segments {
            [Some("v1"), Some(app), Some("email"), Some(operation), None] => {
                let route = match operation {
                    "login" => Self::Login,
                    "register" => Self::Register,
                    "verify" => Self::Verify,
                    "confirm" => Self::Confirm,
                    "forgot-password" => Self::ForgotPassword,
                    "confirm-password" => Self::ConfirmPassword,
                    _ => return None,
                };
                (route, Some(app))
            }
            [Some(".well-known"), Some("oauth-authorization-server"), Some(app), None, None] => {
                (Self::AuthorizationServer, Some(app))
            }
            [Some(app), Some(".well-known"), Some("jwks.json"), None, None] => (Self::Jwks, Some(app)),
            [Some(app), Some(".well-known"), Some("openid-configuration"), None, None] => {
                (Self::OpenIdConfiguration, Some(app))
            }
            [Some(app), Some(".well-known"), Some("oauth-authorization-server"), None, None] => {
                (Self::AuthorizationServerOfApp, Some(app))
            }
            [Some("openapi.json"), None, None, None, None] => (Self::OpenApi, None),
            _ => return None,
        };
        (app != Some("")).then_some(Matched { route, app })
    }

    pub const fn verb(self) -> Verb {
        match self {
            Self::Login
            | Self::Register
            | Self::Verify
            | Self::Confirm
            | Self::ForgotPassword
            | Self::ConfirmPassword => Verb::Post,
            Self::Jwks
            | Self::OpenIdConfiguration
            | Self::AuthorizationServer
            | Self::AuthorizationServerOfApp
            | Self::OpenApi => Verb::Get,
        }
    }

    /// In metrics, logs and the OpenAPI document.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Login => "login",
            Self::Register => "register",
            Self::Verify => "verify",
            Self::Confirm => "confirm",
            Self::ForgotPassword => "forgot-password",
            Self::ConfirmPassword => "confirm-password",
            Self::Jwks => "jwks",
            Self::OpenIdConfiguration => "openid-configuration",
            Self::AuthorizationServer => "oauth-authorization-server",
            Self::AuthorizationServerOfApp => "oauth-authorization-server-of-app",
            Self::OpenApi => "openapi",
        }
    }

    /// The path with `{APPID}` in it, as the OpenAPI document has it.
    pub const fn template(self) -> &'static str {
        match self {
            Self::Login => "/v1/{APPID}/email/login",
            Self::Register => "/v1/{APPID}/email/register",
            Self::Verify => "/v1/{APPID}/email/verify",
            Self::Confirm => "/v1/{APPID}/email/confirm",
            Self::ForgotPassword => "/v1/{APPID}/email/forgot-password",
            Self::ConfirmPassword => "/v1/{APPID}/email/confirm-password",
            Self::Jwks => "/{APPID}/.well-known/jwks.json",
            Self::OpenIdConfiguration => "/{APPID}/.well-known/openid-configuration",
            Self::AuthorizationServer => "/.well-known/oauth-authorization-server/{APPID}",
            Self::AuthorizationServerOfApp => "/{APPID}/.well-known/oauth-authorization-server",
            Self::OpenApi => "/openapi.json",
        }
    }

    pub fn path(self, app: &AppId) -> String {
        self.template().replace("{APPID}", app.as_str())
    }

    pub fn url(self, base: &IssuerUrl, app: &AppId) -> String {
        format!("{}{}", base.as_str().trim_end_matches('/'), self.path(app))
    }
}

// === impl Verb ===

impl Verb {
    pub fn admits(self, method: &Method) -> bool {
        match self {
            Self::Get => method == Method::GET || method == Method::HEAD,
            Self::Post => method == Method::POST,
        }
    }

    /// `Allow` on the public listener, where OPTIONS answers a preflight.
    pub const fn allow(self) -> &'static str {
        match self {
            Self::Get => "GET, HEAD, OPTIONS",
            Self::Post => "POST, OPTIONS",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_found_under_its_own_path() {
        let app: AppId = "shop".parse().unwrap();
        for route in Route::ALL {
            let path = route.path(&app);
            let found = Route::of(&path).unwrap();
            assert_eq!(found.route, route, "{path}");
            assert_eq!(found.app, route.template().contains("{APPID}").then_some("shop"), "{path}");
        }
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
            "/v2/shop/email/login",
            "/.well-known/jwks.json",
            "//.well-known/jwks.json",
            "/shop/.well-known/jwks.json/",
            "/.well-known/oauth-authorization-server",
            "/.well-known/oauth-authorization-server/",
            "/openapi.json/",
            "/openapi",
        ] {
            assert_eq!(Route::of(path), None, "{path}");
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
