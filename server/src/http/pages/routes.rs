//! The paths of the pages.

use http::Method;

use crate::domain::pages::AccountPage;

/// Declares the pages. A row has the page, its name in metrics, its path below the path of the App, and whether it
/// accepts POST.
macro_rules! page_routes {
    ($($route:ident = $name:literal $path:literal $accepts_post:literal;)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(in crate::http) enum PageRoute {
            $($route,)+
        }

        impl PageRoute {
            pub(in crate::http) const ALL: &[Self] = &[$(Self::$route,)+];

            /// The name of the page in the metric of pages.
            pub(in crate::http) const fn page_name(self) -> &'static str {
                match self {
                    $(Self::$route => $name,)+
                }
            }

            /// The name of the page in logs and in the metrics of all routes.
            pub(in crate::http) const fn name(self) -> &'static str {
                match self {
                    $(Self::$route => concat!("page-", $name),)+
                }
            }

            /// The path below the path of the App.
            pub(in crate::http) const fn path(self) -> &'static str {
                match self {
                    $(Self::$route => $path,)+
                }
            }

            pub(in crate::http) const fn path_template(self) -> &'static str {
                match self {
                    $(Self::$route => concat!("/{APPID}/", $path),)+
                }
            }

            /// Whether the page accepts POST.
            const fn accepts_post(self) -> bool {
                match self {
                    $(Self::$route => $accepts_post,)+
                }
            }
        }
    };
}

page_routes! {
    Login = "login" "login" true;
    Register = "register" "register" true;
    Confirm = "confirm" "confirm" true;
    Forgot = "forgot" "forgot" true;
    Reset = "reset" "reset" true;
    Continue = "continue" "continue" false;
    Authorize = "authorize" "authorize" true;
    Consent = "consent" "consent" true;
    Account = "account" "account" true;
    Password = "account-password" "account/password" true;
    Email = "account-email" "account/email" true;
    Delete = "account-delete" "account/delete" true;
    Identities = "account-identities" "account/identities" true;
    Sessions = "account-sessions" "account/sessions" true;
    Activity = "account-activity" "account/activity" false;
    Applications = "account-applications" "account/applications" true;
    Logout = "logout" "logout" true;
    Theme = "theme" "theme.css" false;
    Logo = "logo" "logo" false;
}

// === impl PageRoute ===

impl PageRoute {
    /// Returns the appID and the page that a path names. There may be no App with this appID.
    pub(in crate::http) fn find(path: &str) -> Option<(&str, Self)> {
        let (app, page) = path.strip_prefix('/')?.split_once('/')?;
        Self::ALL.iter().find(|route| route.path() == page).map(|route| (app, *route))
    }

    /// Whether only an App with clients has the page. Returns false for `account/applications`, which checks this
    /// itself.
    pub(in crate::http) const fn needs_clients(self) -> bool {
        matches!(self, Self::Consent)
    }

    pub(in crate::http) fn accepts(self, method: &Method) -> bool {
        match *method {
            Method::GET => true,
            // A link scanner that sends HEAD must not finish a social login, or use up an authorization request.
            Method::HEAD => !matches!(self, Self::Continue | Self::Authorize),
            Method::POST => self.accepts_post(),
            _ => false,
        }
    }

    /// The methods that the page accepts, as the value of the header `Allow`.
    pub(in crate::http) const fn allow(self) -> &'static str {
        match self {
            Self::Continue => "GET",
            Self::Authorize => "GET, POST",
            _ if self.accepts_post() => "GET, HEAD, POST",
            _ => "GET, HEAD",
        }
    }

    /// The account page to which a login leads back. `None` if the page needs no session.
    pub(in crate::http) const fn account_page(self) -> Option<AccountPage> {
        Some(match self {
            Self::Account => AccountPage::Overview,
            Self::Password => AccountPage::Password,
            Self::Email => AccountPage::Email,
            Self::Delete => AccountPage::Delete,
            Self::Identities => AccountPage::Identities,
            Self::Sessions => AccountPage::Sessions,
            Self::Activity => AccountPage::Activity,
            Self::Applications => AccountPage::Applications,
            Self::Login
            | Self::Register
            | Self::Confirm
            | Self::Forgot
            | Self::Reset
            | Self::Continue
            | Self::Authorize
            | Self::Consent
            | Self::Logout
            | Self::Theme
            | Self::Logo => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::routes::{Route, RouteTable};

    #[test]
    fn every_page_is_found_and_no_other_endpoint_has_its_path() {
        for route in PageRoute::ALL {
            let path = route.path_template().replace("{APPID}", "shop");
            assert_eq!(PageRoute::find(&path), Some(("shop", *route)));
            assert!(Route::find(&path).is_none(), "{path}");
            if let Some(page) = route.account_page() {
                assert_eq!(page.path(), route.path());
            }
        }
        for path in
            ["", "/", "/login", "/shop/login/", "/shop//login", "/shop/Login", "/shop/lo%67in", "/shop/account/x"]
        {
            assert_eq!(PageRoute::find(path), None, "{path}");
        }
    }

    #[test]
    fn head_does_not_continue_a_social_login_or_an_authorization() {
        for route in PageRoute::ALL {
            assert!(route.accepts(&Method::GET) && !route.accepts(&Method::OPTIONS));
            let is_refused = matches!(route, PageRoute::Continue | PageRoute::Authorize);
            assert_eq!(route.accepts(&Method::HEAD), !is_refused);
            assert_eq!(route.allow().contains("HEAD"), !is_refused);
            assert_eq!(route.allow().contains("POST"), route.accepts(&Method::POST));
        }
    }
}
