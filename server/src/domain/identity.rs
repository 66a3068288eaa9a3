//! Identities of social providers, and the errors of provider calls.

use latchkey_crds::types::GroupName;
use time::OffsetDateTime;

use super::{email::Email, name::Name};

/// A user's identity, as shown to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The Provider's name at the time of linking.
    pub provider: String,
    pub subject: String,
    /// The email address that the provider sent at the time of linking.
    pub email: Option<String>,
    pub linked_at: OffsetDateTime,
}

/// An identity that a provider has verified. An identity is the pair (authority, subject). The Provider's name is not
/// part of the identity (specification: Social login, Identities).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedIdentity {
    /// `iss` of the ID token. Without an ID token: `PRESET:BASE_URL`; for `oauth2`, only the `userInfoURL`.
    pub authority: String,
    /// The user's id at the authority. It never changes, and the authority never assigns it to another user.
    pub subject: String,
    /// `None` if the provider sends no email address, or one that Latchkey does not accept.
    pub email: Option<ProviderEmail>,
    /// `None` if the provider sends no name, or one that Latchkey does not accept.
    pub name: Option<Name>,
    /// The groups that the App takes over from the provider, each name with the prefix that the App sets for the
    /// provider; sorted, without duplicates. Empty if the App takes over none, or if there are more than a user can
    /// have.
    pub groups: Vec<GroupName>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderEmail {
    pub email: Email,
    /// Whether the provider has verified the email address, according to the preset or the claim mapping of the
    /// Provider.
    pub is_verified: bool,
}

/// What a flow must know about a provider before the flow calls the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderCapabilities {
    /// Whether the flow has a nonce, which the ID token must repeat.
    pub has_nonce: bool,
    /// Whether the callback is a cross-site POST (`response_mode=form_post`). If so, the cookie of the flow must be
    /// `SameSite=None`.
    pub uses_form_post: bool,
}

/// The authorization request that the browser sends to a provider.
#[derive(Clone, Copy, Debug)]
pub struct AuthorizationRequest<'a> {
    /// Latchkey's callback URL for this App and Provider.
    pub redirect_uri: &'a str,
    pub state: &'a str,
    /// A challenge of method S256 (RFC 7636, 4.2).
    pub code_challenge: &'a str,
    /// Set if the provider's capabilities include a nonce.
    pub nonce: Option<&'a str>,
    /// The `prompt` of *redirect*. Omitted if the provider does not know the parameter or the value.
    pub prompt: Option<&'a str>,
    /// The `login_hint` of *redirect*. Omitted if the provider does not know the parameter.
    pub login_hint: Option<&'a str>,
}

/// What a code exchange needs from the callback and from the flow.
#[derive(Clone, Copy)]
pub struct AuthorizationCodeGrant<'a> {
    /// The same `redirect_uri` as in the authorization request.
    pub redirect_uri: &'a str,
    pub code: &'a str,
    pub code_verifier: &'a str,
    /// The nonce of the flow, if the flow has one.
    pub nonce: Option<&'a str>,
    /// `iss` of the callback (RFC 9207), if the provider sent one.
    pub iss: Option<&'a str>,
    /// The form field `user`, which Apple sends: JSON. Only the name in it is used.
    pub posted_user: Option<&'a str>,
}

/// The only values of `error` in a callback (RFC 6749, 4.1.2.1) that are passed on to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthorizationError {
    InvalidRequest,
    UnauthorizedClient,
    AccessDenied,
    UnsupportedResponseType,
    InvalidScope,
    ServerError,
    TemporarilyUnavailable,
}

/// Why a provider is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderOperation {
    /// To make the authorization URL for a browser.
    Redirect,
    /// To get the identity for the code of a callback.
    Callback,
    /// To get the identity for a provider's token, either for *login* or to link the identity.
    Login,
}

/// The endpoints of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProviderEndpoint {
    Discovery,
    Keys,
    Token,
    UserInfo,
    Emails,
    TokenCheck,
}

/// Why a provider call failed. Contains no text from the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// 503: the provider cannot be called now.
    #[error("the provider is unavailable: {0}")]
    Unavailable(UnavailableReason),
    /// 502: the provider's response is not valid.
    #[error("the provider's {endpoint} {reason}", endpoint = .endpoint.as_str())]
    InvalidResponse { endpoint: ProviderEndpoint, reason: InvalidResponse },
    /// 502: the callback does not match the provider or the flow.
    #[error("the callback {0}")]
    InvalidCallback(InvalidCallback),
    /// 401: the token is not valid, or was issued for another client.
    #[error("the provider's token {0}")]
    InvalidToken(InvalidProviderToken),
    /// 400: the provider cannot show for which client a token was issued.
    #[error("this provider cannot check for which client a token was issued")]
    NoTokenCheck,
    /// 503: the configuration of the Provider must be corrected.
    #[error("the provider cannot be used: {0}")]
    Unusable(UnusableReason),
}

/// Why the provider cannot be called now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum UnavailableReason {
    /// The client address, the Provider, its namespace or the whole server has reached its limit on concurrent calls.
    #[error("the limit of concurrent calls is reached")]
    TooManyCalls,
    #[error("its name does not resolve")]
    NameUnknown,
    #[error("its address is private or reserved")]
    AddressNotAllowed,
    #[error("it does not accept connections")]
    Unreachable,
    #[error("the proxy does not respond, or cannot connect to it")]
    Proxy,
    #[error("TLS with it failed, or its certificate is not for its name")]
    Tls,
    #[error("it closed the connection")]
    ConnectionClosed,
    #[error("it took longer than 10 s")]
    Timeout,
    /// The status is 429 or 5xx.
    #[error("it answered with status {0}")]
    Status(u16),
}

/// What is wrong with a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum InvalidResponse {
    #[error("answered with status {0}")]
    Status(u16),
    #[error("answered with more than 64 KiB")]
    TooLarge,
    #[error("answered with more values, or nested deeper, than a provider needs")]
    TooComplex,
    #[error("did not answer with JSON")]
    NotJson,
    #[error("answered without a required value")]
    Incomplete,
    #[error("rejected the code")]
    CodeRejected,
    #[error("rejected the request")]
    RequestRejected,
    #[error("does not know the client, or rejected its secret")]
    ClientRejected,
    #[error("returned no ID token")]
    MissingIdToken,
    #[error("returned an ID token that {0}")]
    IdToken(InvalidProviderToken),
    #[error("returned another subject than the ID token")]
    SubjectMismatch,
    #[error("returned another issuer than its own")]
    IssuerMismatch,
    #[error("contains a URL that is not https")]
    NotHttps,
    #[error("contains a URL of more than 2,048 bytes")]
    UrlTooLong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum InvalidCallback {
    /// RFC 9207, 2.4.
    #[error("is from another issuer")]
    IssuerMismatch,
    #[error("lacks the issuer that this provider promises to send")]
    MissingIssuer,
}

/// What is wrong with a token of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum InvalidProviderToken {
    #[error("is malformed")]
    Malformed,
    #[error("is signed with an algorithm that is not allowed")]
    Algorithm,
    #[error("is signed with a key that the provider does not publish")]
    UnknownKey,
    #[error("has a wrong signature")]
    Signature,
    #[error("is from another issuer")]
    Issuer,
    #[error("was issued for another client")]
    Audience,
    #[error("was issued to another client")]
    AuthorizedParty,
    #[error("has expired")]
    Expired,
    #[error("is not valid yet")]
    NotYetValid,
    #[error("has another nonce")]
    Nonce,
    #[error("does not belong to the access token that came with it")]
    AccessTokenHash,
    #[error("is not known to the provider")]
    Unknown,
}

/// Why the configuration of a Provider cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum UnusableReason {
    #[error("its secret does not resolve")]
    MissingSecret,
    #[error("its key is not valid")]
    InvalidKey,
    /// A newer operator wrote the document.
    #[error("this server does not know its preset")]
    UnknownPreset,
    #[error("its options do not match the preset")]
    InvalidOptions,
}

// === impl ProviderError ===

impl From<UnavailableReason> for ProviderError {
    fn from(reason: UnavailableReason) -> Self {
        Self::Unavailable(reason)
    }
}

// === impl ProviderOperation ===

impl ProviderOperation {
    pub const ALL: [Self; 3] = [Self::Redirect, Self::Callback, Self::Login];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::Callback => "callback",
            Self::Login => "login",
        }
    }
}

// === impl AuthorizationError ===

impl AuthorizationError {
    pub const ALL: [Self; 7] = [
        Self::InvalidRequest,
        Self::UnauthorizedClient,
        Self::AccessDenied,
        Self::UnsupportedResponseType,
        Self::InvalidScope,
        Self::ServerError,
        Self::TemporarilyUnavailable,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::UnauthorizedClient => "unauthorized_client",
            Self::AccessDenied => "access_denied",
            Self::UnsupportedResponseType => "unsupported_response_type",
            Self::InvalidScope => "invalid_scope",
            Self::ServerError => "server_error",
            Self::TemporarilyUnavailable => "temporarily_unavailable",
        }
    }

    /// Parses the `error` of a callback. Returns `None` for a value that is not in [`Self::ALL`]. Such a value is not
    /// passed on.
    pub fn parse(input: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|error| error.as_str() == input)
    }
}

// === impl ProviderEndpoint ===

impl ProviderEndpoint {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Discovery => "discovery document",
            Self::Keys => "key set",
            Self::Token => "token endpoint",
            Self::UserInfo => "userinfo endpoint",
            Self::Emails => "list of addresses",
            Self::TokenCheck => "token check",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_rfc_6749_are_passed_on() {
        for error in AuthorizationError::ALL {
            assert_eq!(AuthorizationError::parse(error.as_str()), Some(error));
        }
        for other in ["", "Access_Denied", "access_denied ", "user_cancelled_login", "<script>"] {
            assert_eq!(AuthorizationError::parse(other), None, "{other}");
        }
    }

    #[test]
    fn an_error_reads_as_a_sentence() {
        let error = ProviderError::InvalidResponse {
            endpoint: ProviderEndpoint::Token,
            reason: InvalidResponse::IdToken(InvalidProviderToken::Audience),
        };
        assert_eq!(
            error.to_string(),
            "the provider's token endpoint returned an ID token that was issued for another client"
        );
        assert_eq!(
            ProviderError::from(UnavailableReason::Status(503)).to_string(),
            "the provider is unavailable: it answered with status 503"
        );
    }
}
