//! The errors that many use cases share.

use super::{
    keys::SignError,
    password::Overloaded,
    ports::{AcquireError, StoreError},
    rate_limits::RateLimited,
};

/// Errors that do not depend on the use case.
#[derive(Debug, thiserror::Error)]
pub enum CommonError {
    #[error(transparent)]
    RateLimited(#[from] RateLimited),
    #[error(transparent)]
    Overloaded(#[from] Overloaded),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("a token could not be signed")]
    Signing(#[from] SignError),
}

impl From<AcquireError> for CommonError {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::RateLimited(limited) => Self::RateLimited(limited),
            AcquireError::Store(store) => Self::Store(store),
        }
    }
}
