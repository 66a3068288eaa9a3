//! Catches panics: a panic ends only the work on one object, not the process.

use std::{
    cell::RefCell,
    fmt,
    panic::{self, AssertUnwindSafe},
};

use futures::FutureExt;

#[cfg(not(panic = "unwind"))]
compile_error!("panics must unwind: a panic fails one object, not the process");

/// The error of a step that panicked. It contains only the location of the panic, because the text of a panic can quote
/// a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a panic at {0}")]
pub(crate) struct Panicked(String);

thread_local! {
    /// The location in the code at which this thread last panicked.
    static LAST_LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// For each panic of the process, calls `report` with the location and, if the text is a string literal in the code,
/// with the text.
pub(crate) fn install_hook(report: fn(&dyn fmt::Display, Option<&str>)) {
    latchkey_telemetry::panics::install_hook(move |location, text| {
        record_location(location);
        report(location, text);
    });
}

fn record_location(location: &dyn fmt::Display) {
    LAST_LOCATION.set(Some(location.to_string()));
}

/// Runs a step, and returns an error if it panics. After an error, do not use what the step borrowed mutably, because
/// the step may be half done.
pub(crate) fn catch<T>(step: impl FnOnce() -> T) -> Result<T, Panicked> {
    panic::catch_unwind(AssertUnwindSafe(step)).map_err(|_| Panicked::take_last())
}

/// Runs a future like [`catch`]. Drops the future if it panics.
pub(crate) async fn catch_async<T>(step: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(step).catch_unwind().await.map_err(|_| Panicked::take_last())
}

// === impl Panicked ===

impl Panicked {
    /// Returns the last panic of this thread, and clears the stored location. The location is unknown if the hook is
    /// not installed.
    pub(crate) fn take_last() -> Self {
        Self(LAST_LOCATION.take().unwrap_or_else(|| latchkey_telemetry::panics::UNKNOWN_LOCATION.to_owned()))
    }

    /// Returns the message for the object's condition. A panic is a bug, so the owner of the object can only report it.
    pub(crate) fn message(&self) -> String {
        format!("the operator failed on this object: {self}; this is a bug, please report it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_caught_with_its_location_and_without_its_text() {
        // The default hook still runs, so that other tests that fail at the same time report why.
        let default_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            record_location(info.location().expect("the location is known"));
            default_hook(info);
        }));
        let caught = catch(|| panic!("{}", "hush")).unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert!(!caught.message().contains("hush"));
        let caught = catch_async(async { panic!("{}", "hush") }).await.unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert_eq!(catch(|| 1), Ok(1));
    }
}
