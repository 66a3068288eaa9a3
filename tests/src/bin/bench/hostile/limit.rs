//! The memory limit of a server, as a kubelet sets it.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};

/// `server.resources.limits.memory` of the chart.
pub(super) const BYTES: u64 = 256 * 1024 * 1024;

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";
/// Groups of this benchmark.
const PREFIX: &str = "latchkey-bench-";

/// A limit for one server; a cgroup goes when this value is dropped, which must be after the server.
pub(super) enum MemoryLimit {
    /// The memory controller of cgroups version 1.
    V1(PathBuf),
    /// Cgroups version 2.
    V2(PathBuf),
    /// No controller is writable: the data segment is limited instead, by setrlimit(2).
    Data,
}

// === impl MemoryLimit ===

impl MemoryLimit {
    pub(super) fn new() -> Result<Self> {
        remove_stale(Path::new(V1));
        remove_stale(Path::new(V2));
        if let Ok(group) = make_group(Path::new(V1), "memory.limit_in_bytes") {
            // With swap accounting; elsewhere there is no such file.
            let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), BYTES.to_string());
            return Ok(Self::V1(group));
        }
        if let Ok(group) = make_group(Path::new(V2), "memory.max") {
            let _ = fs::write(group.join("memory.swap.max"), "0");
            return Ok(Self::V2(group));
        }
        Ok(Self::Data)
    }

    /// The command that starts a program under the limit.
    pub(super) fn wrapper(&self) -> Vec<String> {
        match self {
            Self::V1(group) | Self::V2(group) => {
                // The shell joins the group, and becomes the program: no memory is charged elsewhere.
                let script = r#"echo $$ > "$0" && exec "$@""#;
                let procs = group.join("cgroup.procs").display().to_string();
                vec!["sh".to_owned(), "-c".to_owned(), script.to_owned(), procs]
            }
            Self::Data => vec!["prlimit".to_owned(), format!("--data={BYTES}"), "--".to_owned()],
        }
    }

    pub(super) fn describe(&self) -> String {
        let mib = BYTES / 1024 / 1024;
        match self {
            Self::V1(_) => format!("{mib} MiB, by a cgroup (version 1), whose kernel ends what exceeds it"),
            Self::V2(_) => format!("{mib} MiB, by a cgroup (version 2), whose kernel ends what exceeds it"),
            Self::Data => format!(
                "{mib} MiB of data by setrlimit, and of its own memory by sampling: no memory cgroup is writable here"
            ),
        }
    }

    /// Whether a server that lives has kept to it, having had so many bytes of its own at the most. A cgroup ends what
    /// does not; without one the samples say so.
    pub(super) fn is_kept(&self, peak: u64) -> bool {
        peak < BYTES && self.kills().is_none_or(|kills| kills == 0)
    }

    /// How often the kernel ended a process for it; none where it does not say.
    pub(super) fn kills(&self) -> Option<u64> {
        let file = match self {
            Self::V1(group) => group.join("memory.oom_control"),
            Self::V2(group) => group.join("memory.events"),
            Self::Data => return None,
        };
        let text = fs::read_to_string(file).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// What the kernel charged to it at the most, in bytes; files that it has in memory among it.
    pub(super) fn peak(&self) -> Option<u64> {
        let file = match self {
            Self::V1(group) => group.join("memory.max_usage_in_bytes"),
            Self::V2(group) => group.join("memory.peak"),
            Self::Data => return None,
        };
        fs::read_to_string(file).ok()?.trim().parse().ok()
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        match self {
            // Where a process is left in it, the next run removes it.
            Self::V1(group) | Self::V2(group) => drop(fs::remove_dir(group)),
            Self::Data => {}
        }
    }
}

/// A group below `root` with that limit.
fn make_group(root: &Path, limit: &str) -> Result<PathBuf> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let mut name = PREFIX.to_owned();
    write!(name, "{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))?;
    // Without the controller there is such a folder all the same, or a file system that takes any folder.
    anyhow::ensure!(root.join("cgroup.procs").is_file(), "{} is no cgroup", root.display());
    let group = root.join(name);
    fs::create_dir(&group)?;
    let limited = fs::write(group.join(limit), BYTES.to_string()).context("setting the limit");
    if limited.is_err() || !group.join("cgroup.procs").is_file() {
        drop(fs::remove_dir(&group));
    }
    limited.map(|()| group)
}

/// Removes the groups of runs that were killed. One that has a process stays: the kernel refuses.
fn remove_stale(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            drop(fs::remove_dir(entry.path()));
        }
    }
}
