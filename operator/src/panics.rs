//! A panic is reported in one line, and is the fault of the object that was worked on, not of the process.

use std::{
    cell::RefCell,
    fmt,
    panic::{self, AssertUnwindSafe, PanicHookInfo},
};

use futures::FutureExt;

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must unwind: it is the fault of one object, not of the process");

/// A step that panicked. Only the place is kept: the text of a panic can quote a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a panic at {0}")]
pub(crate) struct Panicked(String);

thread_local! {
    /// Where this thread panicked last.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Reports every panic of the process by `report`, with its place and, if it stands in the code, its text.
pub(crate) fn install_hook(report: fn(&dyn fmt::Display, Option<&str>)) {
    panic::set_hook(Box::new(move |info| {
        note(info);
        let place = info.location().map_or::<&dyn fmt::Display, _>(&UNKNOWN, |location| location);
        report(place, info.payload().downcast_ref::<&'static str>().copied());
    }));
}

const UNKNOWN: &str = "an unknown place";

fn note(info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string);
    LAST.with_borrow_mut(|last| *last = place);
}

/// Runs a step. What it borrows must not be used afterwards if it can be left half changed.
pub(crate) fn catch<T>(step: impl FnOnce() -> T) -> Result<T, Panicked> {
    panic::catch_unwind(AssertUnwindSafe(step)).map_err(|_| Panicked::last())
}

/// The same for a future, which is dropped if it panics.
pub(crate) async fn catch_async<T>(step: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(step).catch_unwind().await.map_err(|_| Panicked::last())
}

// === impl Panicked ===

impl Panicked {
    /// The hook ran on this thread just now, if one is installed.
    pub(crate) fn last() -> Self {
        Self(LAST.take().unwrap_or_else(|| UNKNOWN.to_owned()))
    }

    /// The message in the object's condition. A panic is a bug: its owner can only report it.
    pub(crate) fn advice(&self) -> String {
        format!("the operator failed on this object: {self}; this is a bug, please report it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_caught_with_its_place_and_without_its_text() {
        // Other tests that fail meanwhile still say why.
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            note(info);
            usual(info);
        }));
        let caught = catch(|| panic!("{}", "hush")).unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert!(!caught.advice().contains("hush"));
        let caught = catch_async(async { panic!("{}", "hush") }).await.unwrap_err();
        assert!(caught.to_string().starts_with("a panic at operator/src/panics.rs:"), "{caught}");
        assert_eq!(catch(|| 1), Ok(1));
    }
}
