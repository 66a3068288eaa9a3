//! Renders again whenever a manifest changes, until a signal ends it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::Context;
use notify::{EventKind, RecursiveMode, Watcher};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::render::{Renderer, now};

/// How long after an event the folder is looked at, so that an editor's several writes are one change.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// How often the folder is looked at where no event says anything: network file systems send none.
const POLL: Duration = Duration::from_secs(1);

/// What of a file tells that it changed: length and time of the last write.
type Marks = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

pub(crate) fn run(renderer: &Renderer) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(watch(renderer))
}

async fn watch(renderer: &Renderer) -> anyhow::Result<()> {
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let (sender, mut events) = mpsc::channel(1);
    // Without events (too many watches, for one) the poll alone is enough.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading is an event too, and ours would wake us for ever.
        let counts = event.map_or(true, |event| !matches!(event.kind, EventKind::Access(_)));
        if counts {
            // Full: somebody is being woken already.
            let _already_told = sender.try_send(());
        }
    });
    if let Ok(watcher) = &mut watcher {
        let _polled_instead = watcher.watch(&renderer.args.from, RecursiveMode::Recursive);
    }

    let mut seen = marks(&renderer.args.from).ok();
    // The folder must be there at the start; later it may come and go.
    renderer.run(now())?.print();
    let mut failed = false;
    loop {
        tokio::select! {
            _ = interrupted.recv() => return Ok(()),
            _ = terminated.recv() => return Ok(()),
            // None: the watcher ended, and only the poll is left.
            _ = timeout(POLL, wake(&mut events)) => {}
        }
        let marks = marks(&renderer.args.from).ok();
        if marks == seen && !failed {
            continue;
        }
        let (outcome, error) = match renderer.run(now()) {
            Ok(outcome) => (Some(outcome), None),
            Err(error) => (None, Some(error)),
        };
        seen = marks;
        // A failure is tried again at each poll, and told once.
        if let (Some(error), false) = (&error, failed) {
            eprintln!("latchkey-operator: {error:#}; what was rendered goes on");
        }
        failed = error.is_some();
        if let Some(outcome) = outcome {
            outcome.print();
        }
    }
}

async fn wake(events: &mut mpsc::Receiver<()>) {
    if events.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
    sleep(DEBOUNCE).await;
    while events.try_recv().is_ok() {}
}

/// The marks of every file below a folder.
fn marks(folder: &Path) -> io::Result<Marks> {
    let mut marks = Marks::new();
    let mut open = vec![(folder.to_path_buf(), 0)];
    while let Some((folder, depth)) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            // A file may be gone since it was listed.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if metadata.is_dir() {
                // Links may go round.
                if depth < 16 {
                    open.push((path, depth + 1));
                }
            } else {
                marks.insert(path, (metadata.len(), metadata.modified().ok()));
            }
        }
    }
    Ok(marks)
}
