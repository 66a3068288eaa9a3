//! The static files of the pages. The name of a file contains a hash of its content, so browsers can keep it forever.

use std::sync::LazyLock;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

const STYLESHEET_SOURCE: &str = include_str!("assets/pages.css");

/// The style of all pages.
pub(super) static STYLESHEET: LazyLock<Asset> = LazyLock::new(|| Asset {
    name: format!("pages.{}.css", content_hash(STYLESHEET_SOURCE.as_bytes())),
    content_type: "text/css; charset=utf-8",
    body: STYLESHEET_SOURCE,
});

/// A file below `/assets/`.
#[derive(Debug)]
pub struct Asset {
    /// `{FILE}` in `/assets/{FILE}`.
    pub name: String,
    pub content_type: &'static str,
    pub body: &'static str,
}

/// The file for a name.
#[derive(Clone, Copy, Debug)]
pub struct FoundAsset {
    pub asset: &'static Asset,
    /// False if the name has the hash of another version. A page of an older or newer server can ask for it while
    /// servers are replaced. The response must not be cached.
    pub is_current: bool,
}

/// 12 characters that change with the content.
pub(super) fn content_hash(content: &[u8]) -> String {
    // 72 bits: different versions of a file never have the same hash.
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, content).as_ref()[..9])
}

// === impl Asset ===

impl Asset {
    /// The asset with this name, or the current version of it.
    pub fn find(name: &str) -> Option<FoundAsset> {
        let hash = name.strip_prefix("pages.")?.strip_suffix(".css")?;
        let is_hash = hash.len() == 12 && hash.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        let asset: &'static Asset = &STYLESHEET;
        is_hash.then(|| FoundAsset { asset, is_current: asset.name == name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_asset_is_found_by_the_name_of_any_version() {
        assert!(Asset::find(&STYLESHEET.name).unwrap().is_current);
        assert!(!Asset::find("pages.AAAAAAAAAAAA.css").unwrap().is_current);
        for name in ["", "pages.css", "pages..css", "pages.AAAAAAAAAAA/.css", "other.AAAAAAAAAAAA.css", "../pages.css"]
        {
            assert!(Asset::find(name).is_none(), "{name}");
        }
    }

    #[test]
    fn the_stylesheet_needs_no_other_file() {
        assert!(!STYLESHEET_SOURCE.contains("url(") && !STYLESHEET_SOURCE.contains("@import"));
    }
}
