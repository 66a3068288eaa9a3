//! The name, colors, logo and links that all pages of an App show.

use latchkey_crds::{
    pages::{Language, ThemeMode},
    types::Color,
};
use minijinja::{Value, value::Serde};
use serde::Serialize;

use super::{
    assets::{Asset, STYLESHEET, content_hash},
    theme::theme_css,
};
use crate::domain::{app::App, pages::settings::PagesSettings};

/// The values that all pages of an App share. Templates read them as `app`.
#[derive(Clone, Debug, Serialize)]
pub struct Branding {
    /// The display name of the App.
    name: String,
    /// The path of the App, `/{APPID}` below the path of the base URL.
    path: String,
    /// The path of the stylesheet.
    stylesheet: String,
    /// The path of the static files, with a slash at the end.
    #[serde(skip)]
    assets: String,
    /// The path of `theme.css`, with its hash.
    theme: String,
    /// The path of the logo, with its hash. Without a logo, pages show the name.
    logo: Option<String>,
    /// The colors of the browser's own bars.
    browser_colors: Vec<BrowserColor>,
    links: Links,
    minimum_password_length: u32,
    #[serde(skip)]
    languages: Vec<Language>,
    /// The serialized fields, which templates read as `app`.
    #[serde(skip)]
    value: Value,
}

#[derive(Clone, Debug, Serialize)]
struct BrowserColor {
    color: String,
    /// The media query for which the color applies. `None` if the color always applies.
    media: Option<&'static str>,
}

/// The App's links. Their types allow only `https`, and for support also `mailto`.
#[derive(Clone, Debug, Serialize)]
struct Links {
    home: Option<String>,
    terms: Option<String>,
    privacy: Option<String>,
    support: Option<String>,
}

// === impl Branding ===

impl Branding {
    pub fn new(app: &App, pages: &PagesSettings) -> Self {
        let path = issuer_path(app.doc.issuer.as_str());
        let prefix = path.strip_suffix(app.id().as_str()).unwrap_or("/");
        let theme = &pages.theme;
        let color = |color: &Color, media| BrowserColor { color: color.to_string(), media };
        let browser_colors = match theme.mode {
            ThemeMode::Light => vec![color(&theme.light.background, None)],
            ThemeMode::Dark => vec![color(&theme.dark.background, None)],
            ThemeMode::Auto => vec![
                color(&theme.light.background, Some("(prefers-color-scheme: light)")),
                color(&theme.dark.background, Some("(prefers-color-scheme: dark)")),
            ],
        };
        let mut branding = Self {
            name: app.doc.display_name.clone(),
            stylesheet: format!("{prefix}assets/{}", STYLESHEET.name),
            assets: format!("{prefix}assets/"),
            theme: format!("{path}/theme.css?v={}", content_hash(theme_css(theme).as_bytes())),
            logo: theme.logo.as_ref().map(|logo| format!("{path}/logo?v={}", content_hash(&logo.bytes))),
            browser_colors,
            links: Links {
                home: pages.links.home.as_ref().map(ToString::to_string),
                terms: pages.links.terms.as_ref().map(ToString::to_string),
                privacy: pages.links.privacy.as_ref().map(ToString::to_string),
                support: pages.links.support.as_ref().map(ToString::to_string),
            },
            minimum_password_length: app.doc.password.minimum_length,
            languages: pages.languages.clone(),
            path: path.to_owned(),
            value: Value::UNDEFINED,
        };
        branding.value = Value::from(Serde(&branding));
        branding
    }

    /// The value that templates read as `app`.
    pub(super) fn value(&self) -> Value {
        self.value.clone()
    }

    /// The path of the App, without a slash at the end.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The hash in the path of `theme.css`.
    pub fn theme_version(&self) -> &str {
        version(&self.theme)
    }

    /// The hash in the path of the logo. `None` if there is no logo.
    pub fn logo_version(&self) -> Option<&str> {
        self.logo.as_deref().map(version)
    }

    /// The languages of the App.
    pub fn languages(&self) -> &[Language] {
        &self.languages
    }

    /// The path of a static file.
    pub(super) fn asset_path(&self, asset: &Asset) -> String {
        format!("{}{}", self.assets, asset.name)
    }

    pub(super) fn minimum_password_length(&self) -> u32 {
        self.minimum_password_length
    }
}

/// The hash in the path of a file: the value of its query parameter `v`. Empty if the path has none.
fn version(path: &str) -> &str {
    path.rsplit_once("?v=").map_or("", |(_, version)| version)
}

/// The path of an issuer. The issuer is the base URL and the appID.
fn issuer_path(issuer: &str) -> &str {
    let after_scheme = issuer.find("://").map_or(0, |index| index + 3);
    issuer[after_scheme..].find('/').map_or("", |index| &issuer[after_scheme + index..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_an_app_is_the_path_of_its_issuer() {
        assert_eq!(issuer_path("https://auth.example.com/shop"), "/shop");
        assert_eq!(issuer_path("https://auth.example.com/base/path/shop"), "/base/path/shop");
        assert_eq!(issuer_path("http://127.0.0.1:8080/shop"), "/shop");
    }
}
