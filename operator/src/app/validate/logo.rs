//! Checks the logo of the pages. The content of the file determines its type. An SVG must neither run anything nor
//! refer to other files.

use std::borrow::Cow;

mod svg;

/// The maximum size of a logo, in bytes.
const MAX_BYTES: usize = 32 * 1024;

/// Returns the media type of a logo, or why the logo cannot be used.
pub(crate) fn media_type(logo: &[u8]) -> Result<&'static str, Cow<'static, str>> {
    if logo.len() > MAX_BYTES {
        return Err(format!("is over {} KiB; make it smaller", MAX_BYTES / 1024).into());
    }
    if logo.starts_with(b"\x89PNG\r\n\x1a\n") {
        return Ok("image/png");
    }
    if logo.starts_with(b"RIFF") && logo.get(8..12) == Some(&b"WEBP"[..]) {
        return Ok("image/webp");
    }
    match std::str::from_utf8(logo) {
        Ok(text) if text.trim_start_matches(['\u{feff}', ' ', '\t', '\r', '\n']).starts_with('<') => {
            svg::check(text)?;
            Ok("image/svg+xml")
        }
        Ok(_) | Err(_) => Err("is neither PNG nor WebP nor SVG".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SVG: &str = r##"<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0h9v9z"/></svg>"##;

    #[test]
    fn the_content_decides_the_type() {
        let png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR";
        let webp = b"RIFF\x24\0\0\0WEBPVP8 ";
        assert_eq!(media_type(png), Ok("image/png"));
        assert_eq!(media_type(webp), Ok("image/webp"));
        assert_eq!(media_type(SVG.as_bytes()), Ok("image/svg+xml"));
        assert_eq!(media_type(format!("\u{feff}\n{SVG}").as_bytes()), Ok("image/svg+xml"));
        for other in [&b""[..], b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WAVE", b"RIFF", b"%PDF-1.7", b"hello"] {
            assert_eq!(media_type(other), Err("is neither PNG nor WebP nor SVG".into()));
        }
        assert!(media_type(b"<!doctype html><script>alert(1)</script>").is_err());
        // This check and a browser would read text in UTF-16 differently.
        let utf_16: Vec<u8> = SVG.encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(media_type(&utf_16).is_err());
    }

    #[test]
    fn a_logo_has_at_most_32_kib() {
        let with_size = |size: usize| format!("{SVG}{}", " ".repeat(size - SVG.len()));
        assert_eq!(media_type(with_size(MAX_BYTES).as_bytes()), Ok("image/svg+xml"));
        let error = media_type(with_size(MAX_BYTES + 1).as_bytes()).unwrap_err();
        assert_eq!(error, "is over 32 KiB; make it smaller");
    }
}
