//! `make screenshots`: a picture of every hosted page, in each language and color scheme, on a phone and on a desktop.

use std::fs;

use anyhow::Result;

use crate::{
    browser::Browser,
    page_tour::{LANGUAGES, PageTour},
    process,
};

/// The widths of the pages in CSS pixels: a phone and a desktop.
const WIDTHS: [u32; 2] = [360, 1280];

/// Writes the pictures to `target/screenshots/LANGUAGE/NN-STATE-SCHEME-WIDTH.png`, where `NN` is the position of the
/// page in the tour. Removes the pictures of an earlier call.
pub async fn write() -> Result<()> {
    let target = process::root().join("target/screenshots");
    if target.exists() {
        fs::remove_dir_all(&target)?;
    }
    let tour = PageTour::start().await?;
    let mut pictures = 0;
    for language in LANGUAGES {
        let folder = target.join(language);
        fs::create_dir_all(&folder)?;
        let browser = Browser::start().await?;
        let mut stops = 0;
        let mut outcome = Ok(());
        let walked = tour.walk(&browser, language, async |browser: &Browser, stop: &str| {
            stops += 1;
            for (scheme, is_dark) in [("light", false), ("dark", true)] {
                browser.set_dark(is_dark).await;
                for width in WIDTHS {
                    browser.set_width(Some(width)).await;
                    let path = folder.join(format!("{stops:02}-{stop}-{scheme}-{width}.png"));
                    if let Err(error) = browser.full_screenshot(&path).await {
                        outcome = Err(error);
                    }
                    pictures += 1;
                }
            }
            browser.set_width(None).await;
        });
        walked.await?;
        outcome?;
    }
    println!("{pictures} pictures in {}", target.display());
    Ok(())
}
