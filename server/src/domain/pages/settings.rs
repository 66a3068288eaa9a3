//! The configuration of an App's pages, as the servers use it.

use std::sync::Arc;

use latchkey_crds::{
    pages::{Language, PageLinks, ThemeMode, texts::Texts},
    rendered::{RenderedColors, RenderedLogo, RenderedPages},
    types::HostName,
};

use super::session::BrowserSessionTimes;

/// The settings of the hosted pages of an App. An App without hosted pages has none.
#[derive(Clone, Debug, PartialEq)]
pub struct PagesSettings {
    /// The App's own host name for the pages. It is not used while it belongs to another App. `None`: the pages are
    /// only on the host of the installation.
    pub host: Option<HostName>,
    /// At least one language. The first one is the default.
    pub languages: Vec<Language>,
    pub theme: Theme,
    pub links: PageLinks,
    pub session: BrowserSessionTimes,
    /// The App's own texts, which replace default texts.
    own_texts: Vec<(Language, Arc<Texts>)>,
}

/// The appearance of the pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Theme {
    pub mode: ThemeMode,
    pub light: RenderedColors,
    pub dark: RenderedColors,
    /// `None`: the pages show the display name.
    pub logo: Option<Logo>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logo {
    pub media_type: LogoType,
    pub bytes: Arc<[u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogoType {
    Png,
    WebP,
    Svg,
}

// === impl PagesSettings ===

impl PagesSettings {
    pub fn new(mut rendered: RenderedPages) -> Self {
        let mut languages: Vec<Language> = rendered.languages.iter().filter_map(|tag| tag.parse().ok()).collect();
        if languages.is_empty() {
            languages.push(Language::default());
        }
        let own_texts = |language: &Language| Some((*language, rendered.texts.remove(language.as_str())?));
        Self {
            own_texts: languages.iter().filter_map(own_texts).collect(),
            languages,
            host: rendered.host,
            theme: Theme {
                mode: rendered.theme.mode,
                light: rendered.theme.light,
                dark: rendered.theme.dark,
                logo: rendered.theme.logo.and_then(Logo::new),
            },
            links: rendered.links,
            session: BrowserSessionTimes {
                idle_seconds: rendered.session.idle_seconds,
                lifetime_seconds: rendered.session.lifetime_seconds,
            },
        }
    }

    pub fn default_language(&self) -> Language {
        self.languages.first().copied().unwrap_or_default()
    }

    /// The App's own texts in a language.
    pub fn own_texts(&self, language: Language) -> Option<Arc<Texts>> {
        self.own_texts.iter().find(|(own_language, _)| *own_language == language).map(|(_, texts)| Arc::clone(texts))
    }
}

// === impl Logo ===

impl Logo {
    /// `None` if a later version of the operator renders a type that this version does not know.
    fn new(rendered: RenderedLogo) -> Option<Self> {
        let known = [LogoType::Png, LogoType::WebP, LogoType::Svg];
        let media_type = known.into_iter().find(|known| known.as_str() == rendered.content_type)?;
        Some(Self { media_type, bytes: rendered.data.0 })
    }
}

// === impl LogoType ===

impl LogoType {
    /// The media type, for the header `Content-Type`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::WebP => "image/webp",
            Self::Svg => "image/svg+xml",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rendered(changes: &Value) -> RenderedPages {
        let mut document = json!({
            "languages": ["de", "en"],
            "theme": {
                "mode": "Auto",
                "light": { "accent": "#1a56db", "background": "#ffffff" },
                "dark": { "accent": "#8ab4f8", "background": "#121212" },
            },
            "session": { "idleSeconds": 43_200, "lifetimeSeconds": 1_209_600 },
        });
        for (pointer, value) in changes.as_object().into_iter().flatten() {
            *document.pointer_mut(pointer).unwrap() = value.clone();
        }
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn the_smallest_document_is_read() {
        let settings = PagesSettings::new(rendered(&json!({})));
        assert_eq!((&settings.host, settings.default_language()), (&None, Language::De));
        assert_eq!((settings.theme.mode, &settings.theme.logo), (ThemeMode::Auto, &None));
        assert_eq!((settings.session.idle_seconds, settings.session.lifetime_seconds), (43_200, 1_209_600));
    }

    #[test]
    fn languages_and_logos_of_a_later_version_are_ignored() {
        let logo = |content_type: &str| {
            json!({
                "mode": "Dark",
                "light": { "accent": "#1a56db", "background": "#ffffff" },
                "dark": { "accent": "#8ab4f8", "background": "#121212" },
                "logo": { "contentType": content_type, "data": "aHVzaA==" },
            })
        };
        let theme_with = |content_type: &str| {
            PagesSettings::new(rendered(&json!({ "/languages": ["fr"], "/theme": logo(content_type) })))
        };
        let later = theme_with("image/avif");
        assert_eq!((later.languages, later.theme.logo), (vec![Language::En], None));
        let logo = theme_with("image/webp").theme.logo.unwrap();
        assert_eq!((logo.media_type, &*logo.bytes), (LogoType::WebP, &b"hush"[..]));
    }

    #[test]
    fn own_texts_are_found_by_language() {
        let mut rendered = rendered(&json!({}));
        let own = Arc::new(Texts::from([("login-title".to_owned(), "Hallo { $app }".parse().unwrap())]));
        rendered.texts.insert("de".to_owned(), Arc::clone(&own));
        let settings = PagesSettings::new(rendered);
        assert_eq!(settings.own_texts(Language::De), Some(own));
        assert_eq!(settings.own_texts(Language::En), None);
    }
}
