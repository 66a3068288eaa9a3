//! The panic hook.

use std::{fmt, panic};

/// Stands for the location of a panic that has none.
pub const UNKNOWN_LOCATION: &str = "an unknown place";

/// Calls `report` for each panic of the process, with its location and, if it is a string literal in the code, its
/// text. A text that is formatted at run time is left out, because it can contain a secret.
pub fn install_hook(report: impl Fn(&dyn fmt::Display, Option<&'static str>) + Send + Sync + 'static) {
    panic::set_hook(Box::new(move |info| {
        let location = info.location().map_or::<&dyn fmt::Display, _>(&UNKNOWN_LOCATION, |location| location);
        report(location, info.payload().downcast_ref::<&'static str>().copied());
    }));
}
