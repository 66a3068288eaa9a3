//! What fuzz targets and test vectors call: the judge of ServiceAccount tokens.

use time::OffsetDateTime;

use super::{KeySet, Refusal, ServiceAccount};

/// The ServiceAccount of a token.
pub fn judge(keys: &KeySet, now: OffsetDateTime, token: &str) -> Result<ServiceAccount, Refusal> {
    let header = jsonwebtoken::decode_header(token).map_err(|_| Refusal::Malformed)?;
    let id = header.kid.as_deref().ok_or(Refusal::Malformed)?;
    super::judge(keys, id, header.alg, now, token)
}

/// Whether a signature over any bytes holds under the key of this id: test vectors sign no tokens.
pub fn verifies(keys: &KeySet, id: &str, message: &[u8], signature: &str) -> bool {
    keys.get(id).is_some_and(|key| {
        jsonwebtoken::crypto::verify(signature, message, &key.decoding, key.algorithm).unwrap_or(false)
    })
}
