//! Entry points for fuzz targets and test vectors: the validation of ServiceAccount tokens.

use time::OffsetDateTime;

use super::{KeySet, ServiceAccount, TokenError};

/// The ServiceAccount of a token, if the token is valid under these keys at this time.
pub fn validate_token(keys: &KeySet, now: OffsetDateTime, token: &str) -> Result<ServiceAccount, TokenError> {
    let header = jsonwebtoken::decode_header(token).map_err(|_| TokenError::Malformed)?;
    let id = header.kid.as_deref().ok_or(TokenError::Malformed)?;
    super::validate_token(keys, id, header.alg, now, token)
}

/// Whether a signature over `message` is valid under the key with this id. Test vectors need this, because the messages
/// that they sign are not tokens.
pub fn verifies(keys: &KeySet, id: &str, message: &[u8], signature: &str) -> bool {
    keys.get(id).is_some_and(|key| {
        jsonwebtoken::crypto::verify(signature, message, &key.decoding_key, key.algorithm).unwrap_or(false)
    })
}
