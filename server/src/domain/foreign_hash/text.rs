//! Parsers that several hash formats share: numbers, parameters, base64.

use std::ops::RangeInclusive;

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use zeroize::Zeroizing;

use super::HashError;

/// The length of a salt, in bytes.
const SALT_BYTES: RangeInclusive<usize> = 1..=64;
/// The length of the output of the hash function, in bytes.
const OUTPUT_BYTES: RangeInclusive<usize> = 16..=64;

pub(super) type Secret = Zeroizing<Vec<u8>>;

/// Parses a decimal number without a sign and without leading zeros. A number beyond `u32` becomes `u32::MAX`, which is
/// above every ceiling.
pub(super) fn number(digits: &str) -> Result<u32, HashError> {
    let is_canonical = digits == "0" || !digits.starts_with('0');
    if digits.is_empty() || !is_canonical || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(HashError::NotSupported);
    }
    // Here the parser fails only if the number does not fit into `u32`.
    Ok(digits.parse().unwrap_or(u32::MAX))
}

/// Parses the values of the parameters `names`. The text must contain all of them in this order and nothing more, for
/// example `m=65536,t=3,p=4` for the names `m`, `t` and `p`.
pub(super) fn params<const N: usize>(text: &str, names: [&str; N]) -> Result<[u32; N], HashError> {
    let mut values = [0; N];
    let mut parts = text.split(',');
    for (value, name) in values.iter_mut().zip(names) {
        let part = parts.next().and_then(|part| part.strip_prefix(name)?.strip_prefix('='));
        *value = number(part.ok_or(HashError::NotSupported)?)?;
    }
    if parts.next().is_some() { Err(HashError::NotSupported) } else { Ok(values) }
}

/// Parses the salt and the output of a hash in PHC form: base64 without padding, in its canonical form.
pub(super) fn salt_and_output(salt: &str, output: &str) -> Result<(Secret, Secret), HashError> {
    Ok((decode(salt, SALT_BYTES)?, decode(output, OUTPUT_BYTES)?))
}

pub(super) fn decode(text: &str, length: RangeInclusive<usize>) -> Result<Secret, HashError> {
    let bytes = Zeroizing::new(STANDARD_NO_PAD.decode(text).map_err(|_| HashError::NotSupported)?);
    if length.contains(&bytes.len()) { Ok(bytes) } else { Err(HashError::NotSupported) }
}

pub(super) fn encode(bytes: &[u8]) -> String {
    STANDARD_NO_PAD.encode(bytes)
}
