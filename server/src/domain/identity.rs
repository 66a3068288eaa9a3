//! Who somebody is, as a social provider vouches for them, and what can go wrong when it is asked.

use time::OffsetDateTime;

use super::{email::Email, user::Name};

/// One way to sign in, as its user sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The Provider's name when it was linked.
    pub provider: String,
    pub subject: String,
    /// The address that the provider told then.
    pub email: Option<String>,
    pub linked_at: OffsetDateTime,
}

/// What a provider says of somebody who logged in there for us. An identity is (authority, subject); the Provider's name
/// is a label only (contract, 5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vouched {
    /// `iss` of the ID token; else the preset with its base URL; for `oauth2` its `userInfoURL`.
    pub authority: String,
    /// Never changes, and is never given to another user of that authority.
    pub subject: String,
    /// None: the provider tells none, or what it tells is not an address as we take them.
    pub email: Option<VouchedEmail>,
    /// None: the provider tells none, or what it tells is not a name as we take them.
    pub name: Option<Name>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VouchedEmail {
    pub email: Email,
    /// Whether the provider's own source says that the address is the user's.
    pub verified: bool,
}

/// What a flow must know of a provider before anybody is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderTraits {
    /// It speaks OpenID Connect: a flow has a nonce, which its ID token repeats.
    pub nonce: bool,
    /// Its callback is a POST from its own site (`response_mode=form_post`), so a cookie must be `SameSite=None`.
    pub form_post: bool,
}

/// What a browser is to carry to a provider.
#[derive(Clone, Copy, Debug)]
pub struct Authorization<'a> {
    /// Our callback for this App and Provider.
    pub redirect_uri: &'a str,
    pub state: &'a str,
    /// S256 (RFC 7636, 4.2).
    pub code_challenge: &'a str,
    /// Given where [`ProviderTraits::nonce`] says so.
    pub nonce: Option<&'a str>,
    /// As the caller of *redirect* gave it; left out where the provider does not know it or the value.
    pub prompt: Option<&'a str>,
    /// Likewise.
    pub login_hint: Option<&'a str>,
}

/// What came back by the browser, and what the flow remembered.
#[derive(Clone, Copy)]
pub struct Grant<'a> {
    /// As at the beginning of the flow.
    pub redirect_uri: &'a str,
    pub code: &'a str,
    pub code_verifier: &'a str,
    /// That of the flow, where it had one.
    pub nonce: Option<&'a str>,
    /// `iss` of the callback (RFC 9207), where it was sent.
    pub iss: Option<&'a str>,
    /// `user` of Apple's `form_post`: JSON, of which only the name is believed.
    pub posted_user: Option<&'a str>,
}

/// What a provider may say in `error` of a callback (RFC 6749, 4.1.2.1); nothing else of it is passed on.
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

/// What a provider is asked for on behalf of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The address that a browser is sent to.
    Redirect,
    /// Who came back with a code.
    Callback,
    /// Who a token is about: a login, or an identity that is linked.
    Login,
}

/// Whom a provider is asked for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    Discovery,
    Keys,
    Token,
    UserInfo,
    Emails,
    TokenCheck,
}

/// Why a provider vouches for nobody. What a peer wrote is in none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// 503.
    #[error("the provider is away: {0}")]
    Away(Away),
    /// 502.
    #[error("the provider's {place} {fault}", place = .place.what())]
    Answer { place: Place, fault: Fault },
    /// The callback is not what this provider sends for this flow: 502.
    #[error("the callback {0}")]
    Callback(BadCallback),
    /// 401: the token is not valid, or not one for our client.
    #[error("the provider's token {0}")]
    Token(BadToken),
    /// 400: there is no way to tell for which client its tokens were issued.
    #[error("this provider offers no check of whose client a token was issued to")]
    NoTokenCheck,
    /// 503: the configuration is to be mended.
    #[error("the provider cannot be used: {0}")]
    Unusable(Unusable),
}

/// The provider cannot be asked now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Away {
    /// For it, for its namespace, for the client or for the whole server.
    #[error("the limit of calls in flight is reached")]
    TooMany,
    #[error("its name does not resolve")]
    NameUnknown,
    #[error("its address is private or reserved")]
    AddressRefused,
    #[error("it does not take the connection")]
    Unreachable,
    #[error("the proxy does not answer, or does not lead there")]
    Proxy,
    #[error("TLS with it failed, or its certificate is not for its name")]
    Tls,
    #[error("it broke the connection off")]
    Broken,
    #[error("it took longer than ten seconds")]
    TooSlow,
    /// 429 or 5xx.
    #[error("it answered with status {0}")]
    Status(u16),
}

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Fault {
    #[error("answered with status {0}")]
    Status(u16),
    #[error("answered with more than 64 KiB")]
    TooLarge,
    #[error("answered with more values, or nested deeper, than a provider needs")]
    TooComplex,
    #[error("did not answer with JSON")]
    NotJson,
    #[error("answered without what must be there")]
    Incomplete,
    #[error("refused the code")]
    CodeRefused,
    #[error("refused the request")]
    Refused,
    #[error("does not know the client, or not with this secret")]
    ClientRefused,
    #[error("gave no ID token")]
    NoIdToken,
    #[error("gave an ID token that {0}")]
    IdToken(BadToken),
    #[error("told of another subject than the ID token")]
    OtherSubject,
    #[error("told of another issuer than its own")]
    OtherIssuer,
    #[error("names an address that is not https")]
    NotHttps,
    #[error("names an address of more than 2,048 bytes")]
    LongAddress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum BadCallback {
    /// RFC 9207, 2.4.
    #[error("is another issuer's")]
    OtherIssuer,
    #[error("lacks the issuer that this provider promises to send")]
    NoIssuer,
}

/// What is wrong with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum BadToken {
    #[error("is not one of this provider's form")]
    Malformed,
    #[error("is signed by an algorithm that is not allowed")]
    Algorithm,
    #[error("is signed by no key of the provider")]
    UnknownKey,
    #[error("has a wrong signature")]
    Signature,
    #[error("is another issuer's")]
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
    #[error("does not belong to the access token beside it")]
    AccessTokenHash,
    #[error("is not known to the provider")]
    Unknown,
}

/// Why a provider's configuration cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Unusable {
    #[error("its secret does not resolve")]
    NoSecret,
    #[error("its key is not one")]
    BadKey,
    /// A newer operator's document.
    #[error("this server does not know its preset")]
    UnknownPreset,
    #[error("its options are not what the preset wants")]
    BadOptions,
}

// === impl ProviderError ===

impl From<Away> for ProviderError {
    fn from(away: Away) -> Self {
        Self::Away(away)
    }
}

// === impl Operation ===

impl Operation {
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

    /// None: something else, which is not passed on.
    pub fn parse(input: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|error| error.as_str() == input)
    }
}

// === impl Place ===

impl Place {
    pub const fn what(self) -> &'static str {
        match self {
            Self::Discovery => "discovery document",
            Self::Keys => "key set",
            Self::Token => "token endpoint",
            Self::UserInfo => "userinfo endpoint",
            Self::Emails => "list of addresses",
            Self::TokenCheck => "check of tokens",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_rfc_lists_is_passed_on() {
        for error in AuthorizationError::ALL {
            assert_eq!(AuthorizationError::parse(error.as_str()), Some(error));
        }
        for other in ["", "Access_Denied", "access_denied ", "user_cancelled_login", "<script>"] {
            assert_eq!(AuthorizationError::parse(other), None, "{other}");
        }
    }

    #[test]
    fn an_error_reads_as_a_sentence() {
        let error = ProviderError::Answer { place: Place::Token, fault: Fault::IdToken(BadToken::Audience) };
        assert_eq!(
            error.to_string(),
            "the provider's token endpoint gave an ID token that was issued for another client"
        );
        assert_eq!(
            ProviderError::from(Away::Status(503)).to_string(),
            "the provider is away: it answered with status 503"
        );
    }
}
