//! The error of a call to a store.

/// A call to a store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store is unavailable, slow or at capacity: the client can try again (503).
    #[error("{store} is unavailable")]
    Unavailable {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store returned something that it must not return: a bug (500).
    #[error("{store} returned an unexpected response")]
    Unexpected {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

pub(super) type StoreResult<T> = Result<T, StoreError>;
