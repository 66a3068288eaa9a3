//! The hosted pages, which users see. Views, texts, colors and templates become HTML here. These are pure functions;
//! handlers read requests, call use cases and choose the view.

mod assets;
mod branding;
mod errors;
mod language;
mod providers;
mod render;
mod texts;
mod theme;
mod values;
pub mod views;

pub use assets::{Asset, FoundAsset};
pub use branding::Branding;
pub use errors::PageError;
pub use language::choose_language;
pub use providers::{LinkedProvider, ProviderButton};
pub use render::{PageContext, render};
pub use texts::PageTexts;
pub use theme::theme_css;
pub use values::{Timestamp, device_label};
