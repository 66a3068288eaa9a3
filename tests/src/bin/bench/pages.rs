//! The hosted pages: logins and reads compared with the JSON API in the same run, the size of a page, and the memory
//! of Apps with pages.

mod logins;
mod memory;
mod reads;
mod size;

use std::thread;

use anyhow::Result;
use latchkey_tests::{
    builders::{App, Provider},
    stack::Stack,
};
use serde_json::json;

use crate::{logins::add_users, measurements::Bound};

/// The rate limits that the benchmark raises, so that it does not reach them.
const LIMITS: [&str; 5] = [
    "loginsPerClient",
    "loginFailuresPerClient",
    "loginFailuresPerAccount",
    "loginFailuresPerClientOverall",
    "registrationsPerClient",
];

#[derive(clap::Args)]
#[group(id = "pages")]
pub(crate) struct PagesArgs {
    /// For `pages`: measure the memory of pages with this number of Apps. 0: do not measure this memory.
    #[arg(long, default_value_t = 10_000)]
    page_apps: usize,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run(options: &PagesArgs) -> Result<Vec<Bound>> {
    let cores = thread::available_parallelism()?;
    println!("Hosted pages, on {cores} cores shared by server, client, Postgres and Redis\n");
    let (github, google) = (Provider::new("github", "github"), Provider::new("google", "google"));
    let app = LIMITS.into_iter().fold(App::new("bench"), |app, limit| app.limit(limit, &[(10_000_000, 60)]));
    let app = with_pages(app).provider(&github).provider(&google);
    let stack = Stack::builder().app(&app).provider(&github).provider(&google).try_start().await?;
    add_users(&stack, app.id()).await?;
    let server = stack.server().public;
    let mut bounds = size::measure(server, app.id()).await?;
    bounds.push(reads::compare(server, app.id()).await?);
    bounds.push(logins::compare(server, app.id()).await?);
    bounds.extend(match options.page_apps {
        0 => vec![Bound::not_measured("the memory of pages", "--page-apps is 0")],
        apps => memory::measure(apps).await?,
    });
    Ok(bounds)
}

/// Enables the pages of an App, in both languages.
fn with_pages(app: App) -> App {
    app.set("/pages/mode", "Enabled").set("/pages/languages", json!(["en", "de"]))
}
