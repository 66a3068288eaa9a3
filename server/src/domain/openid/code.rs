//! Authorization codes (RFC 6749, 4.1.2): what a user has granted to a client, until the client exchanges the code.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{claims_request::RequestedClaims, scope::Scopes};
use crate::domain::{
    call::Call,
    clock::Env,
    error::CommonError,
    flow::CodeChallenge,
    ports::ClientCodes,
    session::{Amr, SessionId},
    user::{Epoch, UserId},
};

/// The lifetime of a code, in seconds (specification: OpenID provider, Token endpoint).
pub const CODE_SECONDS: i64 = 60;
/// The prefix of codes. Secret scanners recognize leaked codes by it.
pub const CODE_PREFIX: &str = "lka_";

/// A code in clear text: 256 random bits. Never printed or stored.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientCode(Zeroizing<String>);

/// The key under which a code is stored: its SHA-256. The hash needs no secret, because a code has 256 random bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCodeKey(String);

/// What a user has granted to a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authorization {
    pub client_uid: String,
    pub client_id: String,
    /// The redirect URL to which the code is sent.
    pub redirect_uri: String,
    pub user: UserId,
    /// The session of the browser, which is `sid` of the ID token.
    pub browser_session: SessionId,
    /// The epoch of the browser session.
    pub epoch: Epoch,
    /// When the user logged in, in Unix seconds.
    pub auth_time: i64,
    pub amr: Amr,
    pub scopes: Scopes,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub nonce: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code_challenge: Option<CodeChallenge>,
    #[serde(default)]
    pub claims: RequestedClaims,
}

/// What is stored for a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientCodeRecord {
    pub authorization: Authorization,
    /// The IP address of the browser. It is stored here, because the client, not the browser, requests the exchange.
    pub ip: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user_agent: Option<String>,
    /// Unix seconds.
    pub expires_at: i64,
}

/// What is still stored for a code that was exchanged: enough to recognize a second exchange by the same client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangedCode {
    pub client_uid: String,
    pub user: UserId,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code_challenge: Option<CodeChallenge>,
}

/// A stored code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredClientCode {
    /// The code was not exchanged yet.
    New(Box<ClientCodeRecord>),
    /// The first exchange opened this session.
    Exchanged(ExchangedCode, SessionId),
}

/// The outcome of recording an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redemption {
    First,
    /// An earlier exchange opened this session.
    Again(SessionId),
    /// The code is no longer stored.
    Unknown,
}

/// Issues a code. The client must exchange it within 60 seconds. The IP address and user agent of the call are those of
/// the browser.
pub async fn issue_code<S: ClientCodes>(
    call: Call<'_, S>,
    authorization: Authorization,
) -> Result<ClientCode, CommonError> {
    let code = ClientCode::generate(call.env);
    let record = ClientCodeRecord {
        authorization,
        ip: call.client.ip.to_string(),
        user_agent: call.client.user_agent.clone(),
        expires_at: call.env.now().unix_timestamp() + CODE_SECONDS,
    };
    call.stores.store_client_code(call.app_id(), &code.key(), &record).await?;
    Ok(code)
}

// === impl ExchangedCode ===

impl From<&Authorization> for ExchangedCode {
    fn from(authorization: &Authorization) -> Self {
        Self {
            client_uid: authorization.client_uid.clone(),
            user: authorization.user,
            code_challenge: authorization.code_challenge.clone(),
        }
    }
}

// === impl ClientCode ===

impl ClientCode {
    pub fn generate(env: &Env) -> Self {
        Self(Zeroizing::new(format!("{CODE_PREFIX}{}", URL_SAFE_NO_PAD.encode(env.random_bytes::<32>()))))
    }

    /// `None` if the text does not have the format of a code.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(CODE_PREFIX)?).ok()?;
        (bytes.len() == 32).then(|| Self(Zeroizing::new(text.to_owned())))
    }

    /// Returns the code in clear text, only for the client that gets it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    pub fn key(&self) -> ClientCodeKey {
        ClientCodeKey(URL_SAFE_NO_PAD.encode(digest(&SHA256, self.0.as_bytes())))
    }
}

impl fmt::Debug for ClientCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientCode(…)")
    }
}

// === impl ClientCodeKey ===

impl ClientCodeKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_has_256_bits_and_is_never_printed() {
        let env = Env::system();
        let code = ClientCode::generate(&env);
        assert_eq!(code.expose().len(), 4 + 43);
        assert_eq!(ClientCode::parse(code.expose()), Some(code.clone()));
        assert_eq!(format!("{code:?}"), "ClientCode(…)");
        assert!(!code.key().as_str().contains(&code.expose()[4..]));
        assert_ne!(ClientCode::generate(&env), code);
        for bad in ["", "lka_", &code.expose()[1..], &code.expose()[..46], &format!("{}A", code.expose())] {
            assert_eq!(ClientCode::parse(bad), None, "{bad}");
        }
        assert_eq!(ClientCode::parse(&code.expose().replace("lka_", "lkc_")), None, "a code of a social login");
    }

    #[test]
    fn a_record_is_read_back_without_optional_members() {
        let minimal = r#"{"authorization": {"client_uid": "u", "client_id": "c", "redirect_uri": "https://a.example",
            "user": "00000000-0000-0000-0000-000000000007", "browser_session": "00000000-0000-0000-0000-000000000009",
            "epoch": 3, "auth_time": 5, "amr": "pwd", "scopes": "openid"}, "ip": "192.0.2.1", "expires_at": 65}"#;
        let record: ClientCodeRecord = serde_json::from_str(minimal).unwrap();
        assert_eq!((record.authorization.epoch, record.authorization.code_challenge.clone()), (Epoch(3), None));
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<ClientCodeRecord>(&text).unwrap(), record);
    }
}
