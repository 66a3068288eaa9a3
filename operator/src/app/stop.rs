//! The reasons why a reconcile of an App stops before its last step.

use std::time::Duration;

use crate::{
    app::{
        keys::{KeyGenerationError, secret::KeySecretError},
        requeue::RETRY_SOON,
        validate::Rejection,
    },
    error::Error,
    facts::FieldError,
};

/// The error type of the steps of a reconcile. It says what happens after a step has stopped the reconcile.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The reconcile cannot continue now, and is repeated after this time.
    Requeue(Duration),
    /// The App cannot be served as it is. The status reports why.
    Rejected { rejection: Rejection, field_errors: Vec<FieldError> },
    /// A request to the API server failed, or a key could not be generated.
    Failed(Error),
}

// === impl Stop ===

impl Stop {
    /// The reconcile is repeated soon, because another writer changed the keys first, or because an older App can take
    /// the appID.
    pub(crate) const RETRY_SOON: Self = Self::Requeue(RETRY_SOON);

    /// Adds the field errors of the validation to a rejection by a later step, so that the status reports both.
    pub(crate) fn with_field_errors(self, field_errors: &[FieldError]) -> Self {
        match self {
            Self::Rejected { rejection, .. } => Self::Rejected { rejection, field_errors: field_errors.to_vec() },
            Self::Requeue(_) | Self::Failed(_) => self,
        }
    }
}

impl From<Rejection> for Stop {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected { rejection, field_errors: Vec::new() }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<KeyGenerationError> for Stop {
    fn from(error: KeyGenerationError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<KeySecretError> for Stop {
    fn from(error: KeySecretError) -> Self {
        Self::Failed(error.into())
    }
}
