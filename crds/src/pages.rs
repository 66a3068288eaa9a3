//! The hosted pages of an App: their configuration, colors and texts.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    refs::{ConfigMapKeyRef, LocalRef},
    types::{Color, HostName, Invalid, PageUrl, SupportUrl},
};

pub mod color;
pub mod texts;

/// PagesSpec configures the hosted pages for login, registration and the account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PagesSpec {
    /// mode controls whether the servers render pages for the App. With `Disabled`, the paths of the pages do not
    /// exist, and the other fields have no effect.
    #[serde(default)]
    pub mode: PagesMode,
    /// host is the App's own host for the pages, for example `login.shop.example.com`. It must not be the host of the
    /// installation, and only one App can have it. Without it, the pages are on the host of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostName>,
    /// languages are the languages of the pages. The first is the default. Defaults to `en`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), extend("x-kubernetes-list-type" = "set"))]
    pub languages: Vec<Language>,
    /// theme is the appearance of the pages.
    #[serde(default, skip_serializing_if = "ThemeSpec::is_default")]
    pub theme: ThemeSpec,
    /// textsRef refers to a ConfigMap (at most 64 KiB) with texts of the App, in the syntax of Fluent. Its keys are
    /// `en.ftl` and `de.ftl`. A text replaces the default text with the same ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub texts_ref: Option<LocalRef>,
    /// links are the links in the footer of every page.
    #[serde(default, skip_serializing_if = "PageLinks::is_default")]
    pub links: PageLinks,
    /// session configures the session of the browser.
    #[serde(default, skip_serializing_if = "PagesSessionSpec::is_default")]
    pub session: PagesSessionSpec,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PagesMode {
    #[default]
    Disabled,
    Enabled,
}

// A language that YAML 1.1 reads as a boolean, such as `no`, needs another name.
/// Language is a language of the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    #[default]
    En,
    De,
}

/// ThemeSpec is the appearance of the pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ThemeSpec {
    /// mode controls which colors are used. `Auto` uses those that the user's system prefers.
    #[serde(default)]
    pub mode: ThemeMode,
    /// light are the light colors. The accent defaults to `#1a56db`, the background to `#ffffff`.
    #[serde(default, skip_serializing_if = "ColorsSpec::is_default")]
    pub light: ColorsSpec,
    /// dark are the dark colors. The accent defaults to `#8ab4f8`, the background to `#121212`.
    #[serde(default, skip_serializing_if = "ColorsSpec::is_default")]
    pub dark: ColorsSpec,
    /// logoRef refers to a key of a ConfigMap with the logo: PNG, WebP or SVG, at most 32 KiB. Without it, the pages
    /// show the display name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logo_ref: Option<ConfigMapKeyRef>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ThemeMode {
    #[default]
    Auto,
    Light,
    Dark,
}

/// ColorsSpec are the colors of the pages. The contrast between accent and background must be 4.5:1 or more (WCAG 2.2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ColorsSpec {
    /// accent is the color of buttons and links, for example `#1a56db`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accent: Option<Color>,
    /// background is the color behind the content. Text is black or white, whichever has more contrast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub background: Option<Color>,
}

/// PageLinks are the links in the footer of every page.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PageLinks {
    /// home is the application itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub home: Option<PageUrl>,
    /// terms are the terms of service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<PageUrl>,
    /// privacy is the privacy policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PageUrl>,
    /// support is where users get help: a page, or an email address as `mailto:help@shop.example.com`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub support: Option<SupportUrl>,
}

/// PagesSessionSpec configures the session of the browser.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = session_rules()))]
pub struct PagesSessionSpec {
    /// idleSeconds is the number of seconds without a visit after which the session ends, 300–31536000. Defaults to
    /// 43200 (12 hours).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 31_536_000))]
    pub idle_seconds: Option<i32>,
    /// lifetimeSeconds is the maximum lifetime of the session in seconds, 300–63072000. Defaults to 1209600 (14 days).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 300, max = 63_072_000))]
    pub lifetime_seconds: Option<i32>,
}

// === impl Language ===

impl Language {
    pub const ALL: [Self; 2] = [Self::En, Self::De];

    /// The language tag (BCP 47), as in manifests, documents and HTML.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::En => "en",
            Self::De => "de",
        }
    }

    /// The key of the App's own texts in its ConfigMap.
    pub const fn texts_key(self) -> &'static str {
        match self {
            Self::En => "en.ftl",
            Self::De => "de.ftl",
        }
    }
}

impl FromStr for Language {
    type Err = Invalid;

    fn from_str(tag: &str) -> Result<Self, Invalid> {
        Self::ALL.into_iter().find(|language| language.as_str() == tag).ok_or(Invalid("is not a language of the pages"))
    }
}

// === impl PagesSpec, ThemeSpec, ColorsSpec, PageLinks, PagesSessionSpec ===

impl PagesSpec {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    pub fn is_enabled(&self) -> bool {
        self.mode == PagesMode::Enabled
    }

    /// The host in `spec.pages.host`, if the pages are enabled.
    pub fn enabled_host(&self) -> Option<&HostName> {
        self.host.as_ref().filter(|_| self.is_enabled())
    }

    /// The names of the ConfigMaps that enabled pages reference.
    pub fn config_maps(&self) -> impl Iterator<Item = &str> {
        let logo = self.theme.logo_ref.iter().map(|reference| reference.name.as_str());
        let texts = self.texts_ref.iter().map(|reference| reference.name.as_str());
        logo.chain(texts).filter(|_| self.is_enabled())
    }
}

impl ThemeSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl ColorsSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl PageLinks {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl PagesSessionSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

fn session_rules() -> serde_json::Value {
    json!([{
        "fieldPath": ".idleSeconds",
        "rule": "!has(self.idleSeconds) || !has(self.lifetimeSeconds) || self.idleSeconds <= self.lifetimeSeconds",
        "message": "idleSeconds is longer than lifetimeSeconds, after which the session ends anyway; shorten it",
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_is_written_as_its_tag() {
        for language in Language::ALL {
            assert_eq!(json!(language), json!(language.as_str()));
            assert_eq!(language.as_str().parse(), Ok(language));
            assert_eq!(language.texts_key(), format!("{}.ftl", language.as_str()));
        }
        assert!("fr".parse::<Language>().is_err());
    }

    #[test]
    fn disabled_pages_have_no_host_and_reference_nothing() {
        let pages = |mode: &str| -> PagesSpec {
            serde_json::from_value(json!({
                "mode": mode,
                "host": "login.shop.example.com",
                "theme": { "logoRef": { "name": "brand", "key": "logo.svg" } },
                "textsRef": { "name": "texts" },
            }))
            .unwrap()
        };
        let enabled = pages("Enabled");
        assert_eq!(enabled.enabled_host().map(HostName::as_str), Some("login.shop.example.com"));
        assert_eq!(enabled.config_maps().collect::<Vec<_>>(), ["brand", "texts"]);
        let disabled = pages("Disabled");
        assert_eq!((disabled.enabled_host(), disabled.config_maps().count()), (None, 0));
    }
}
