//! Dead letters: deliveries that were given up.

pub mod list;
pub mod retry;
