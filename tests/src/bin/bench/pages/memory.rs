//! The memory of a server with many Apps, with pages and without.
//!
//! Two servers, one after the other, read the same number of documents: copies of one App with pages, or of one App
//! without. The memory is measured after the start, and again after every App has got one request: its login page, or
//! its JWKS document.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result, ensure};
use http::StatusCode;
use latchkey_tests::{builders::App, process, stack::Stack};
use serde_json::{Value, json};

use super::with_pages;
use crate::{
    http_client::{exchange, get},
    logins::{client_address, connect},
    measurements::{Bound, anonymous_bytes, mib},
};

/// Maximum additional memory of a server for the pages of all Apps.
const MAX_GROWTH_MIB: f64 = 10.0;
/// How often a server is started with each folder. The result is the median over these starts.
const ROUNDS: usize = 3;
/// How long a server is left alone before its memory is read. Longer than the interval at which it polls the folder.
const SETTLE_TIME: Duration = Duration::from_secs(5);

/// The memory of a server in bytes.
#[derive(Clone, Copy)]
struct Memory {
    started: u64,
    used: u64,
}

/// A folder with documents, and the path of the request to each App.
struct Documents {
    folder: PathBuf,
    ids: Vec<String>,
    /// The path of the request, relative to the path of the App.
    page: &'static str,
    memory: Vec<Memory>,
}

pub(super) async fn measure(apps: usize) -> Result<Vec<Bound>> {
    let (plain, paged) = (App::new("plain"), with_pages(App::new("paged")));
    let stack = Stack::builder().app(&plain).app(&paged).try_start().await?;
    let mut plain = Documents::copy(&stack, &plain, apps, ".well-known/jwks.json")?;
    let mut paged = Documents::copy(&stack, &paged, apps, "login")?;
    for _ in 0..ROUNDS {
        plain.measure(&stack).await?;
        paged.measure(&stack).await?;
    }
    let mut bounds = Vec::new();
    type MemoryField = fn(&Memory) -> u64;
    let moments: [(&str, MemoryField); 2] =
        [("after the start", |memory| memory.started), ("after one request for each App", |memory| memory.used)];
    for (when, of) in moments {
        let (plain, paged) = (plain.median(of), paged.median(of));
        println!("{apps} Apps, {when}: {:.1} MiB without pages, {:.1} MiB with pages", mib(plain), mib(paged));
        let growth = (mib(paged) - mib(plain)).max(0.0);
        bounds.push(Bound::new(
            format!("{apps} Apps with pages, {when}: at most {MAX_GROWTH_MIB} MiB more: {growth:.1} MiB"),
            growth <= MAX_GROWTH_MIB,
        ));
    }
    println!();
    Ok(bounds)
}

// === impl Documents ===

impl Documents {
    /// Writes copies of the rendered document of an App, with other appIDs.
    fn copy(stack: &Stack, app: &App, count: usize, page: &'static str) -> Result<Self> {
        let document = fs::read(stack.rendered().join(format!("{}.json", app.id())))?;
        let mut document: Value = serde_json::from_slice(&document)?;
        let base = stack.base_url();
        ensure!(document["appID"] == app.id(), "a document has its appID");
        ensure!(document["issuer"] == format!("{base}/{}", app.id()), "a document has its issuer");
        // All ids have the same length, so that only the pages can make a difference.
        let ids: Vec<String> = (0..count).map(|number| format!("{}-{number:06}", &app.id()[..5])).collect();
        let folder = process::fresh_dir("documents");
        for id in &ids {
            document["appID"] = json!(id);
            document["issuer"] = json!(format!("{base}/{id}"));
            fs::write(folder.join(format!("{id}.json")), document.to_string())?;
        }
        Ok(Self { folder, ids, page, memory: Vec::new() })
    }

    async fn measure(&mut self, stack: &Stack) -> Result<()> {
        let server = stack.start_server_with_documents(&self.folder).await?;
        let pid = server.pid().context("the server runs")?;
        tokio::time::sleep(SETTLE_TIME).await;
        let started = anonymous_bytes(pid)?;
        let mut connection = connect(server.public, client_address(0)).await?;
        for id in &self.ids {
            let path = format!("/{id}/{}", self.page);
            let response = exchange(&mut connection, get(server.public, &path, "")?).await?;
            ensure!(response.status == StatusCode::OK, "{path} returned {}", response.status);
        }
        tokio::time::sleep(SETTLE_TIME).await;
        let used = anonymous_bytes(pid)?;
        drop(connection);
        server.terminate().await.context("the server ends after SIGTERM")?;
        self.memory.push(Memory { started, used });
        Ok(())
    }

    fn median(&self, of: fn(&Memory) -> u64) -> u64 {
        let mut values: Vec<u64> = self.memory.iter().map(of).collect();
        values.sort_unstable();
        values[values.len() / 2]
    }
}
