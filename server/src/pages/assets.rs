//! The static files of the pages. The name of a file contains a hash of its content, so browsers can cache the file
//! forever.

use std::sync::LazyLock;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

/// The style of all pages.
pub(super) static STYLESHEET: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("pages.", ".css", "text/css; charset=utf-8", include_str!("assets/pages.css")));

/// The script that submits the form with the response to a Client (`response_mode=form_post`).
pub(super) static FORM_SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("form-post.", ".js", "text/javascript; charset=utf-8", include_str!("assets/form-post.js"))
});

/// The script that shows and hides passwords.
pub(super) static PASSWORD_SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("show-password.", ".js", "text/javascript; charset=utf-8", include_str!("assets/show-password.js"))
});

/// A file below `/assets/`.
#[derive(Debug)]
pub struct Asset {
    /// `{FILE}` in `/assets/{FILE}`.
    pub name: String,
    /// The parts of `name` before and after the hash.
    prefix: &'static str,
    suffix: &'static str,
    pub content_type: &'static str,
    pub body: &'static str,
}

/// The file that was found for a name.
#[derive(Clone, Copy, Debug)]
pub struct FoundAsset {
    pub asset: &'static Asset,
    /// False if the name has the hash of another version of the file. While servers are replaced, a page from an older
    /// or newer server can request such a name. The response to such a request must not be cached.
    pub is_current: bool,
}

/// 12 characters that change with the content.
pub(super) fn content_hash(content: &[u8]) -> String {
    // 72 bits: different versions of a file never have the same hash.
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, content).as_ref()[..9])
}

// === impl Asset ===

impl Asset {
    fn new(prefix: &'static str, suffix: &'static str, content_type: &'static str, body: &'static str) -> Self {
        Self { name: format!("{prefix}{}{suffix}", content_hash(body.as_bytes())), prefix, suffix, content_type, body }
    }

    /// The asset with this name. If the name has the hash of another version, the current version is returned.
    pub fn find(name: &str) -> Option<FoundAsset> {
        let all: [&'static Asset; 3] = [&STYLESHEET, &FORM_SCRIPT, &PASSWORD_SCRIPT];
        all.into_iter()
            .find(|asset| asset.has_version(name))
            .map(|asset| FoundAsset { asset, is_current: asset.name == name })
    }

    /// Whether this is the name of any version of the file.
    fn has_version(&self, name: &str) -> bool {
        let hash = name.strip_prefix(self.prefix).and_then(|rest| rest.strip_suffix(self.suffix));
        hash.is_some_and(|hash| {
            hash.len() == 12 && hash.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_asset_is_found_by_the_name_of_any_version() {
        assert!(Asset::find(&STYLESHEET.name).unwrap().is_current);
        assert!(!Asset::find("pages.AAAAAAAAAAAA.css").unwrap().is_current);
        for script in [&FORM_SCRIPT, &PASSWORD_SCRIPT] {
            let found = Asset::find(&script.name).unwrap();
            assert!(found.is_current && found.asset.name == script.name);
            assert!(found.asset.content_type.starts_with("text/javascript"));
        }
        assert!(!Asset::find("form-post.AAAAAAAAAAAA.js").unwrap().is_current);
        assert!(!Asset::find("show-password.AAAAAAAAAAAA.js").unwrap().is_current);
        for name in [
            "",
            "pages.css",
            "pages..css",
            "pages.AAAAAAAAAAA/.css",
            "pages.AAAAAAAAAAAA.js",
            "form-post.AAAAAAAAAAAA.css",
            "form-post.js",
            "show-password.js",
            "other.AAAAAAAAAAAA.css",
            "../pages.css",
        ] {
            assert!(Asset::find(name).is_none(), "{name}");
        }
    }

    #[test]
    fn the_stylesheet_needs_no_other_file() {
        assert!(!STYLESHEET.body.contains("url(") && !STYLESHEET.body.contains("@import"));
    }

    #[test]
    fn the_script_of_password_fields_is_small_and_reads_no_password() {
        let script = PASSWORD_SCRIPT.body;
        assert!(script.len() <= 2_048, "{} bytes", script.len());
        for word in ["value", "FormData", "fetch", "XMLHttpRequest", "sendBeacon", "Storage", "cookie", "eval"] {
            assert!(!script.contains(word), "{word}");
        }
    }
}
