//! Patterns that schemas share. They use only syntax that ECMAScript, Python and Rust all support.

/// Text without control characters, as `char::is_control` defines them.
pub const NO_CONTROL_CHARACTERS: &str = r"^[^\x00-\x1f\x7f-\x9f]*$";
/// A display name. The pattern allows the control characters that are white space, because the ends of a name are
/// trimmed before it is checked.
pub const NAME: &str = r"^[^\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]*$";
/// Text without U+0000, which Postgres cannot store.
pub const NO_NUL: &str = r"^[^\x00]*$";
/// Base64url without padding.
pub const BASE64URL: &str = "^[A-Za-z0-9_-]+$";
/// 32 bytes in base64url without padding. The last character encodes only the last four bits.
pub const BASE64URL_OF_32_BYTES: &str = "^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$";
