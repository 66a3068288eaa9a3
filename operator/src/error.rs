//! The errors of a failed reconcile, and when the reconcile is retried.

use std::{collections::HashMap, fmt, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    app::keys::{KeyGenerationError, secret::KeySecretError},
    panics::Panicked,
};

/// The error of a failed step of a reconcile. A mistake in a resource is not an `Error`: the status reports it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("could not {action}")]
    Api {
        action: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error(transparent)]
    KeyGeneration(#[from] KeyGenerationError),
    #[error(transparent)]
    KeySecret(#[from] KeySecretError),
    /// A bug in the operator. The reconcile of the object is retried. Other objects are not affected.
    #[error("the reconcile failed: {0}")]
    Panicked(#[from] Panicked),
}

/// An error with its causes, for a log line. If the API server responded with an error, the log line has only the
/// message of the response, which can name a missing permission. A response that cannot be parsed is not logged,
/// because it may be a Secret.
pub(crate) struct ErrorChain<'a>(pub(crate) &'a (dyn std::error::Error + 'static));

/// The kind of an error. It is a label of the metric, and decides how long to wait before the retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum ErrorKind {
    /// Another writer changed the object first: retry soon.
    Conflict,
    /// A permission is missing and must be granted.
    Forbidden,
    /// The API server is unavailable or overloaded, or the network is broken.
    Unavailable,
    /// The API server rejected the request.
    Refused,
    /// The error is in the operator itself.
    Internal,
}

/// How often the work on each object failed in a row, for example its reconcile or the release of an appID.
#[derive(Default)]
pub(crate) struct Failures(Mutex<FailureCounts>);

#[derive(Default)]
struct FailureCounts {
    /// For each object, how often the work on it failed in a row, and when it failed last.
    by_object: HashMap<String, (u32, Instant)>,
    /// When old entries (see [`FAILURE_TTL`]) were last removed from `by_object`.
    cleaned_at: Option<Instant>,
}

const MIN_RETRY_DELAY: Duration = Duration::from_millis(200);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// How long the failures of an object are stored after the last one. The reconcile of an object that still exists fails
/// again much earlier, or succeeds and resets the failures. Nothing resets the failures of a deleted object.
const FAILURE_TTL: Duration = Duration::from_secs(10 * 60);

// === impl Error ===

impl Error {
    /// Returns the error of a failed request. `action` completes "could not …".
    pub(crate) fn api(action: &'static str) -> impl Fn(kube::Error) -> Self {
        move |source| Self::Api { action, source }
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Api { source, .. } => api_error_kind(source),
            Self::KeySecret(error) => api_error_kind(error.api_error()),
            Self::KeyGeneration(_) | Self::Panicked(_) => ErrorKind::Internal,
        }
    }
}

fn api_error_kind(error: &kube::Error) -> ErrorKind {
    match error {
        kube::Error::Api(status) => match status.code {
            409 => ErrorKind::Conflict,
            401 | 403 => ErrorKind::Forbidden,
            429 | 500..=599 => ErrorKind::Unavailable,
            _ => ErrorKind::Refused,
        },
        _ => ErrorKind::Unavailable,
    }
}

// === impl ErrorChain ===

impl fmt::Display for ErrorChain<'_> {
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
                Some(kube::Error::SerdeError(_)) => {
                    return f.write_str("the response of the API server does not parse");
                }
                // The text of these errors already includes their cause.
                Some(kube::Error::HyperError(cause)) => {
                    write!(f, "{cause}")?;
                    next = std::error::Error::source(cause);
                }
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

// === impl ErrorKind ===

impl ErrorKind {
    /// Returns the value of the metric's label.
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

// === impl Failures ===

impl Failures {
    /// Counts a failure and returns when to retry. The waits grow exponentially. They are ten times longer if a
    /// permission is missing or the request was rejected, because nobody fixes that within a second.
    pub(crate) fn retry_after(&self, object: &str, kind: ErrorKind) -> Duration {
        let count = self.0.lock().increment(object);
        let exponential = MIN_RETRY_DELAY * 2_u32.saturating_pow((count - 1).min(16));
        let wait = match kind {
            ErrorKind::Conflict | ErrorKind::Unavailable | ErrorKind::Internal => exponential.min(MAX_RETRY_DELAY),
            ErrorKind::Forbidden | ErrorKind::Refused => (exponential * 10).min(MAX_RETRY_DELAY),
        };
        wait.mul_f64(rand::random_range(0.75..=1.0))
    }

    pub(crate) fn reset(&self, object: &str) {
        self.0.lock().by_object.remove(object);
    }
}

// === impl FailureCounts ===

impl FailureCounts {
    /// Counts a failure and returns how often the object has failed in a row.
    fn increment(&mut self, object: &str) -> u32 {
        let now = Instant::now();
        // There can be thousands of entries, so they are not searched at each failure.
        if self.cleaned_at.is_none_or(|cleaned| now - cleaned >= FAILURE_TTL) {
            self.by_object.retain(|_, (_, failed)| now - *failed < FAILURE_TTL);
            self.cleaned_at = Some(now);
        }
        let (count, failed) = self.by_object.entry(object.to_owned()).or_insert((0, now));
        *count += 1;
        *failed = now;
        *count
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Empty;
    use hyper_util::rt::TokioIo;

    use super::*;

    #[test]
    fn the_causes_are_shown_and_the_missing_permission_is_named() {
        let message = "apps is forbidden: User \"x\" cannot patch resource \"apps\"";
        let status = kube::core::Status::failure(message, "Forbidden").with_code(403);
        let error = Error::api("write the finalizer of an App")(kube::Error::Api(Box::new(status)));
        assert_eq!(ErrorChain(&error).to_string(), format!("could not write the finalizer of an App: {message}"));
        assert_eq!(error.kind(), ErrorKind::Forbidden);
        let secret = serde_json::from_str::<u8>("\"hunter2\"").unwrap_err();
        let error = Error::api("read a Secret")(kube::Error::SerdeError(secret));
        assert!(!ErrorChain(&error).to_string().contains("hunter2"));
    }

    #[tokio::test]
    async fn each_cause_of_a_failed_connection_is_shown_once() {
        let socket = TokioIo::new(tokio::io::duplex(64).0);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(socket).await.unwrap();
        drop(connection);
        let cause = sender.send_request(http::Request::new(Empty::<Bytes>::new())).await.unwrap_err();
        let expected = format!("could not read a Secret: {}", ErrorChain(&cause));
        let error = Error::api("read a Secret")(kube::Error::HyperError(cause));
        assert_eq!(ErrorChain(&error).to_string(), expected);
        let error = Error::api("read a Secret")(kube::Error::Service("the connection is refused".into()));
        assert_eq!(ErrorChain(&error).to_string(), "could not read a Secret: the connection is refused");
    }

    #[tokio::test(start_paused = true)]
    async fn the_failures_of_a_deleted_object_are_forgotten() {
        let failures = Failures::default();
        let remembered = || failures.0.lock().by_object.len();
        failures.retry_after("deleted", ErrorKind::Forbidden);
        tokio::time::advance(FAILURE_TTL / 2).await;
        failures.retry_after("other", ErrorKind::Forbidden);
        assert_eq!(remembered(), 2);
        tokio::time::advance(FAILURE_TTL / 2).await;
        failures.retry_after("other", ErrorKind::Forbidden);
        assert_eq!(remembered(), 1);
        assert_eq!(failures.0.lock().by_object["other"].0, 2, "this object still fails");
    }

    #[test]
    fn retry_delays_grow_and_restart_after_success() {
        let failures = Failures::default();
        let waits: Vec<_> = (0..20).map(|_| failures.retry_after("a", ErrorKind::Unavailable)).collect();
        assert!(
            waits[0] <= MIN_RETRY_DELAY && waits[19] >= MAX_RETRY_DELAY.mul_f64(0.75) && waits[19] <= MAX_RETRY_DELAY
        );
        failures.reset("a");
        assert!(failures.retry_after("a", ErrorKind::Unavailable) <= MIN_RETRY_DELAY);
        assert!(failures.retry_after("b", ErrorKind::Forbidden) > MIN_RETRY_DELAY);
    }
}
