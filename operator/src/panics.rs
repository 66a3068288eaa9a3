//! Catches panics: one log line, and a failure of the object that was worked on, not of the process.

use std::{
    cell::RefCell,
    fmt,
    panic::{self, AssertUnwindSafe, PanicHookInfo},
};

use futures::FutureExt;

#[cfg(not(panic = "unwind"))]
compile_error!("panics must unwind: a panic fails one object, not the process");

/// A step that panicked. Only the location is stored: the text of a panic can quote a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a panic at {0}")]
pub(crate) struct Panicked(String);

thread_local! {
    /// Where this thread last panicked.
    static LAST_LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Reports every panic of the process with its location and, if it is a string literal in the code, its text.
pub(crate) fn install_hook(report: fn(&dyn fmt::Display, Option<&str>)) {
    panic::set_hook(Box::new(move |info| {
        record_location(info);
        let place = info.location().map_or::<&dyn fmt::Display, _>(&UNKNOWN_LOCATION, |location| location);
        report(place, info.payload().downcast_ref::<&'static str>().copied());
    }));
}

const UNKNOWN_LOCATION: &str = "an unknown place";

fn record_location(info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string);
    LAST_LOCATION.with_borrow_mut(|last| *last = place);
}

/// Runs a step. Do not use anything afterwards that it borrowed and may have left half changed.
pub(crate) fn catch<T>(step: impl FnOnce() -> T) -> Result<T, Panicked> {
    panic::catch_unwind(AssertUnwindSafe(step)).map_err(|_| Panicked::take_last())
}

/// The same for a future, which is dropped if it panics.
pub(crate) async fn catch_async<T>(step: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(step).catch_unwind().await.map_err(|_| Panicked::take_last())
}

// === impl Panicked ===

impl Panicked {
    /// The last panic of this thread, if the hook is installed.
    pub(crate) fn take_last() -> Self {
        Self(LAST_LOCATION.take().unwrap_or_else(|| UNKNOWN_LOCATION.to_owned()))
    }

    /// The message for the object's condition. A panic is a bug, so the owner of the object can only report it.
    pub(crate) fn message(&self) -> String {
        format!("the operator failed on this object: {self}; this is a bug, please report it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_caught_with_its_location_and_without_its_text() {
        // Other tests that fail meanwhile still report why.
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            record_location(info);
            usual(info);
        }));
        let caught = catch(|| panic!("{}", "hush")).unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert!(!caught.message().contains("hush"));
        let caught = catch_async(async { panic!("{}", "hush") }).await.unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert_eq!(catch(|| 1), Ok(1));
    }
}
