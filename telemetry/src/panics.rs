//! The hook that reports each panic of the process.

use std::{fmt, panic};

/// The text for the location of a panic that has no location.
pub const UNKNOWN_LOCATION: &str = "an unknown place";

/// Calls `report` for each panic of the process, with the location and the text of the panic. A text that is formatted
/// at run time is left out, because it can contain a secret: only a string literal in the code is passed.
pub fn install_hook(report: impl Fn(&dyn fmt::Display, Option<&'static str>) + Send + Sync + 'static) {
    panic::set_hook(Box::new(move |info| {
        let location = info.location().map_or::<&dyn fmt::Display, _>(&UNKNOWN_LOCATION, |location| location);
        report(location, info.payload().downcast_ref::<&'static str>().copied());
    }));
}
