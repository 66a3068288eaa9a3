//! The error of a login with a provider.

use crate::domain::{
    error::CommonError,
    identity::{AuthorizationError, ProviderError},
};

/// Why a provider's user gets no session.
#[derive(Debug, thiserror::Error)]
pub enum ProviderLoginError {
    /// The provider reported an error, for example because the user cancelled. `None` if the error code is missing or
    /// not passed on.
    #[error("the provider answered with an error")]
    ProviderReported(Option<AuthorizationError>),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error("sign-up is closed")]
    Closed,
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    #[error("the email address is not verified")]
    EmailNotVerified,
    /// Returned only without enumeration protection.
    #[error("the email address has an account, and this provider must not be linked by address")]
    LinkRequired,
    #[error("the provider sent no email address")]
    MissingEmail,
    #[error("the user is disabled")]
    Disabled,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ProviderLoginError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}
