//! The hosted pages of an App, as the servers read them.

use std::{collections::BTreeMap, fmt, sync::Arc};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    pages::{PageLinks, ThemeMode, texts::Texts},
    types::{Color, HostName},
};

/// The pages of an App with `spec.pages.mode: Enabled`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedPages {
    /// The host in `spec.pages.host`, unless another App has it. `None`: the pages are only on the host of the
    /// installation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub host: Option<HostName>,
    /// Language tags, at least one. The first is the default. A server ignores languages that it does not know, so that
    /// a later version can add languages.
    pub languages: Vec<String>,
    pub theme: RenderedTheme,
    /// The App's own texts. The outer key is the language tag, the inner key is the ID of the default text that the
    /// text replaces.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub texts: BTreeMap<String, Arc<Texts>>,
    #[serde(skip_serializing_if = "PageLinks::is_default", default)]
    pub links: PageLinks,
    pub session: RenderedPagesSession,
}

/// The appearance of the pages, with every default filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedTheme {
    pub mode: ThemeMode,
    pub light: RenderedColors,
    pub dark: RenderedColors,
    /// `None` if the App names no logo, or if its logo cannot be used. The pages then show the display name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub logo: Option<RenderedLogo>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenderedColors {
    pub accent: Color,
    pub background: Color,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedLogo {
    /// The media type: `image/png`, `image/webp` or `image/svg+xml`.
    pub content_type: String,
    pub data: Base64Bytes,
}

/// The lifetimes of the browser session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedPagesSession {
    pub idle_seconds: u32,
    pub lifetime_seconds: u32,
}

/// Bytes that are base64 in the document. Clones share the bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Base64Bytes(pub Arc<[u8]>);

// === impl Base64Bytes ===

impl fmt::Debug for Base64Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Base64Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).map_err(serde::de::Error::custom)?;
        Ok(Self(bytes.into()))
    }
}
