//! Renders again whenever a manifest changes, until a signal stops it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::Context;
use notify::{EventKind, RecursiveMode, Watcher};
use time::OffsetDateTime;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::render::{files::is_client_secret, renderer::Renderer};

/// The wait between an event and the check of the folder, so that several writes of an editor count as one change.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// How often the folder is checked without an event, because network file systems send no events.
const POLL: Duration = Duration::from_secs(1);

/// For each file, what shows that the file has changed: its length and the time of the last write.
type FileStamps = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

pub(crate) fn run(renderer: &Renderer, now: fn() -> OffsetDateTime) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(watch(renderer, now))
}

async fn watch(renderer: &Renderer, now: fn() -> OffsetDateTime) -> anyhow::Result<()> {
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let (sender, mut events) = mpsc::channel(1);
    // If there are no events (for example because there are too many watches on this machine), polling is enough.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading a file is an event too. It is ignored, because otherwise each run would trigger another run.
        let is_change = event.map_or(true, |event| !matches!(event.kind, EventKind::Access(_)));
        if is_change {
            // If the channel is full, a notification is already pending.
            let _already_notified = sender.try_send(());
        }
    });
    if let Ok(watcher) = &mut watcher {
        let _polled_instead = watcher.watch(&renderer.args.from, RecursiveMode::Recursive);
    }

    let mut rendered_stamps = stamps_of_input(renderer);
    // The folder must exist at the start. Later, it can be missing for a while.
    let summary = renderer.run(now())?;
    summary.print();
    let mut next_due = summary.next_due;
    let mut failed = false;
    loop {
        tokio::select! {
            _ = interrupted.recv() => return Ok(()),
            _ = terminated.recv() => return Ok(()),
            // After the timeout, the folder is checked, too, although there was no event.
            _ = timeout(POLL, wait_for_event(&mut events)) => {}
        }
        let stamps = stamps_of_input(renderer);
        let is_due = next_due.is_some_and(|due| due <= now());
        if stamps == rendered_stamps && !failed && !is_due {
            continue;
        }
        let (summary, error) = match renderer.run(now()) {
            Ok(summary) => (Some(summary), None),
            Err(error) => (None, Some(error)),
        };
        rendered_stamps = stamps;
        // A failure is retried at each poll, but reported once.
        if let (Some(error), false) = (&error, failed) {
            eprintln!("latchkey-operator: {error:#}; the rendered documents stay as they are");
        }
        failed = error.is_some();
        if let Some(summary) = summary {
            summary.print();
            next_due = summary.next_due;
        }
    }
}

/// Returns the stamps of the manifests and of the files with secrets of Clients, which people can also edit. A run that
/// writes such a secret causes one more run, which writes nothing.
fn stamps_of_input(renderer: &Renderer) -> (Option<FileStamps>, FileStamps) {
    let keys = renderer.args.keys.as_deref().and_then(|keys| file_stamps(keys).ok());
    let mut secrets = keys.unwrap_or_default();
    secrets.retain(|path, _| is_client_secret(path));
    (file_stamps(&renderer.args.from).ok(), secrets)
}

async fn wait_for_event(events: &mut mpsc::Receiver<()>) {
    if events.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
    sleep(DEBOUNCE).await;
    while events.try_recv().is_ok() {}
}

/// Returns the stamps of every file below a folder.
fn file_stamps(folder: &Path) -> io::Result<FileStamps> {
    let mut stamps = FileStamps::new();
    let mut folders = vec![(folder.to_path_buf(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            // A file may be deleted after it was listed.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if metadata.is_dir() {
                // Symbolic links can form cycles.
                if depth < 16 {
                    folders.push((path, depth + 1));
                }
            } else {
                stamps.insert(path, (metadata.len(), metadata.modified().ok()));
            }
        }
    }
    Ok(stamps)
}

#[cfg(test)]
mod tests {
    use std::{fs, future::Future};

    use clap::Parser;
    use tempfile::TempDir;

    use super::*;
    use crate::{
        args::{Args, Command},
        render::now,
    };

    const SHOP: &str =
        "apiVersion: latchkey.dev/v1alpha1\nkind: App\nmetadata: { name: shop }\nspec: { displayName: One }\n";

    /// Runs the command over a folder with one App until `test` ends.
    async fn with_render_running<F: Future<Output = ()>>(test: impl FnOnce(PathBuf) -> F) {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        fs::create_dir(path("from")).unwrap();
        fs::write(path("from/shop.yaml"), SHOP).unwrap();
        let (from, to, keys) = (path("from"), path("to"), path("keys"));
        let words = ["latchkey-operator", "render", "--watch", "--from", &from, "--to", &to, "--keys", &keys];
        let Some(Command::Render(args)) =
            Args::parse_from(words.into_iter().chain(["--base-url", "https://auth.example.com"])).command
        else {
            panic!("render is a command");
        };
        let renderer = Renderer::new(args).unwrap();
        tokio::select! {
            ended = watch(&renderer, now) => panic!("it ended: {ended:?}"),
            () = test(folder.path().to_owned()) => {}
        }
    }

    /// Waits until the condition is true, but at most for the time in which a change must take effect.
    async fn wait_until(mut condition: impl FnMut() -> bool) {
        let wait = async {
            while !condition() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(2), wait).await.expect("live within two seconds");
    }

    fn document_contains(folder: &Path, text: &str) -> bool {
        fs::read_to_string(folder.join("to/shop.json")).is_ok_and(|document| document.contains(text))
    }

    #[tokio::test]
    async fn a_changed_manifest_is_live_within_two_seconds() {
        with_render_running(|folder| async move {
            wait_until(|| document_contains(&folder, "\"One\"")).await;
            fs::write(folder.join("from/shop.yaml"), SHOP.replace("One", "Another")).unwrap();
            wait_until(|| document_contains(&folder, "\"Another\"")).await;
        })
        .await;
    }

    #[tokio::test]
    async fn an_edit_among_fifty_apps_is_live_within_two_seconds() {
        with_render_running(|folder| async move {
            let numbered_app = |number: usize| SHOP.replace("shop", &format!("a{number}"));
            for app in 0..50 {
                fs::write(folder.join(format!("from/a{app}.yaml")), numbered_app(app)).unwrap();
            }
            let all_rendered = async {
                while !(0..50).all(|app| folder.join(format!("to/a{app}.json")).exists()) {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(Duration::from_secs(60), all_rendered).await.expect("all are rendered");
            fs::write(folder.join("from/a7.yaml"), numbered_app(7).replace("One", "Another")).unwrap();
            wait_until(|| fs::read_to_string(folder.join("to/a7.json")).unwrap().contains("\"Another\"")).await;
        })
        .await;
    }

    #[tokio::test]
    async fn an_added_or_removed_app_is_live_within_two_seconds() {
        with_render_running(|folder| async move {
            fs::create_dir(folder.join("from/more")).unwrap();
            fs::write(folder.join("from/more/b.yaml"), SHOP.replace("shop", "store")).unwrap();
            wait_until(|| folder.join("to/store.json").exists()).await;
            fs::remove_file(folder.join("from/more/b.yaml")).unwrap();
            wait_until(|| !folder.join("to/store.json").exists()).await;
            assert!(document_contains(&folder, "\"One\""));
        })
        .await;
    }

    #[tokio::test]
    async fn an_edited_client_secret_is_live_within_two_seconds() {
        with_render_running(|folder| async move {
            let client = "apiVersion: latchkey.dev/v1alpha1\nkind: Client\nmetadata: { name: grafana }\nspec: \
                { appRef: { name: shop }, web: { redirectURLs: [\"https://grafana.example.com/login\"] } }\n";
            let app = SHOP.replace("One }", "One, pages: { mode: Enabled } }");
            fs::write(folder.join("from/shop.yaml"), format!("{app}---\n{client}")).unwrap();
            wait_until(|| document_contains(&folder, "sha256")).await;
            let before = fs::read_to_string(folder.join("to/shop.json")).unwrap();
            let secret = r#"{ "client-secret": "another-client-secret" }"#;
            fs::write(folder.join("keys/latchkey-client-default.grafana.json"), secret).unwrap();
            wait_until(|| fs::read_to_string(folder.join("to/shop.json")).unwrap() != before).await;
        })
        .await;
    }

    #[tokio::test]
    async fn rendering_continues_after_the_folder_was_missing() {
        with_render_running(|folder| async move {
            wait_until(|| document_contains(&folder, "\"One\"")).await;
            fs::rename(folder.join("from"), folder.join("away")).unwrap();
            sleep(POLL * 2).await;
            assert!(document_contains(&folder, "\"One\""), "nothing is removed");
            fs::write(folder.join("away/shop.yaml"), SHOP.replace("One", "Another")).unwrap();
            fs::rename(folder.join("away"), folder.join("from")).unwrap();
            wait_until(|| document_contains(&folder, "\"Another\"")).await;
        })
        .await;
    }
}
