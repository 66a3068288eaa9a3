//! Why a reconcile did not come to its end, and when it is tried again.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::{
    app::keys::{KeyNotMade, secret::KeysError},
    panics::Panicked,
};

/// A step that failed. What is wrong with a resource is no error: it is told in its status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("could not {doing}")]
    Api {
        doing: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error(transparent)]
    KeyNotMade(#[from] KeyNotMade),
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// A bug: the object is tried again, and the others go on.
    #[error("the reconcile failed: {0}")]
    Panicked(#[from] Panicked),
}

/// An error with its causes, for a log line. Of what the API server answers only its message, which names a permission
/// that is missing; nothing of an answer that does not parse, since it may be a Secret.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn std::error::Error + 'static));

/// How an error is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The object was changed meanwhile: look again at once.
    Conflict,
    /// A permission is missing: somebody has to give it.
    Forbidden,
    /// The API server is away or overloaded, or the network is broken.
    Unavailable,
    /// It refused what was sent.
    Refused,
    /// Nothing outside is wrong.
    Internal,
}

/// How often each object failed in a row.
#[derive(Default)]
pub(crate) struct Failures(Mutex<HashMap<String, u32>>);

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(60);

// === impl Error ===

impl Error {
    pub(crate) fn api(doing: &'static str) -> impl Fn(kube::Error) -> Self {
        move |source| Self::Api { doing, source }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Api { source, .. } => kind(source),
            Self::Keys(error) => kind(error.api()),
            Self::KeyNotMade(_) | Self::Panicked(_) => Kind::Internal,
        }
    }
}

/// The kind of an error of the API.
fn kind(error: &kube::Error) -> Kind {
    match error {
        kube::Error::Api(status) => match status.code {
            409 => Kind::Conflict,
            401 | 403 => Kind::Forbidden,
            429 | 500..=599 => Kind::Unavailable,
            _ => Kind::Refused,
        },
        _ => Kind::Unavailable,
    }
}

// === impl Chain ===

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut next = Some(self.0);
        let mut first = true;
        while let Some(error) = next {
            if !std::mem::take(&mut first) {
                f.write_str(": ")?;
            }
            next = error.source();
            match error.downcast_ref::<kube::Error>() {
                Some(kube::Error::Api(status)) => return f.write_str(&status.message),
                Some(kube::Error::SerdeError(_)) => return f.write_str("the answer of the API server does not parse"),
                // Their own text ends with their cause's.
                Some(kube::Error::HyperError(cause)) => write!(f, "{cause}")?,
                Some(kube::Error::Service(cause)) => {
                    write!(f, "{cause}")?;
                    next = cause.source();
                }
                Some(_) | None => write!(f, "{error}")?,
            }
        }
        Ok(())
    }
}

// === impl Kind ===

impl Kind {
    /// The label of the metric.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::Forbidden => "forbidden",
            Self::Unavailable => "unavailable",
            Self::Refused => "refused",
            Self::Internal => "internal",
        }
    }
}

// === impl Failures ===

impl Failures {
    /// Notes one more, and tells when to try again: soon and then ever later, but where a permission is missing, which
    /// nobody gives within a second.
    pub(crate) fn retry_after(&self, object: &str, kind: Kind) -> Duration {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let times = failures.entry(object.to_owned()).or_default();
        *times += 1;
        let exponential = FIRST_RETRY * 2_u32.saturating_pow((*times - 1).min(16));
        let wait = match kind {
            Kind::Conflict | Kind::Unavailable | Kind::Internal => exponential.min(LAST_RETRY),
            Kind::Forbidden | Kind::Refused => (exponential * 10).min(LAST_RETRY),
        };
        wait.mul_f64(rand::random_range(0.75..=1.0))
    }

    pub(crate) fn forget(&self, object: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_causes_are_told_and_the_missing_permission_is_named() {
        let message = "apps is forbidden: User \"x\" cannot patch resource \"apps\"";
        let status = kube::core::Status::failure(message, "Forbidden").with_code(403);
        let error = Error::api("write the finalizer of an App")(kube::Error::Api(Box::new(status)));
        assert_eq!(Chain(&error).to_string(), format!("could not write the finalizer of an App: {message}"));
        assert_eq!(error.kind(), Kind::Forbidden);
        let secret = serde_json::from_str::<u8>("\"hunter2\"").unwrap_err();
        let error = Error::api("read a Secret")(kube::Error::SerdeError(secret));
        assert!(!Chain(&error).to_string().contains("hunter2"));
    }

    #[test]
    fn retries_come_ever_later_and_start_anew_after_success() {
        let failures = Failures::default();
        let waits: Vec<_> = (0..20).map(|_| failures.retry_after("a", Kind::Unavailable)).collect();
        assert!(waits[0] <= FIRST_RETRY && waits[19] >= LAST_RETRY.mul_f64(0.75) && waits[19] <= LAST_RETRY);
        failures.forget("a");
        assert!(failures.retry_after("a", Kind::Unavailable) <= FIRST_RETRY);
        assert!(failures.retry_after("b", Kind::Forbidden) > FIRST_RETRY);
    }
}
