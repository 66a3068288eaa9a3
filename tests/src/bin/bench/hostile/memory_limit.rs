//! A memory limit for a server, enforced by a cgroup as in a pod, or by setrlimit if no cgroup is writable.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};

/// Default of `server.resources.limits.memory` in the chart, in bytes.
pub(super) const LIMIT_BYTES: u64 = 256 * 1024 * 1024;

const CGROUP_V1: &str = "/sys/fs/cgroup/memory";
const CGROUP_V2: &str = "/sys/fs/cgroup";
/// Name prefix of this benchmark's cgroups.
const CGROUP_PREFIX: &str = "latchkey-bench-";

/// A memory limit for one server. Dropping this value removes the cgroup, so the server must be dropped first.
pub(super) enum MemoryLimit {
    /// A cgroup of version 1, with the memory controller.
    V1(PathBuf),
    /// A cgroup of version 2.
    V2(PathBuf),
    /// No memory controller is writable: setrlimit(2) limits the data segment instead.
    Data,
}

// === impl MemoryLimit ===

impl MemoryLimit {
    pub(super) fn new() -> Result<Self> {
        remove_stale_cgroups(Path::new(CGROUP_V1));
        remove_stale_cgroups(Path::new(CGROUP_V2));
        if let Ok(group) = create_cgroup(Path::new(CGROUP_V1), "memory.limit_in_bytes") {
            // This file exists only if the kernel counts swap.
            let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), LIMIT_BYTES.to_string());
            return Ok(Self::V1(group));
        }
        if let Ok(group) = create_cgroup(Path::new(CGROUP_V2), "memory.max") {
            let _ = fs::write(group.join("memory.swap.max"), "0");
            return Ok(Self::V2(group));
        }
        Ok(Self::Data)
    }

    /// A prefix for a command line. With the prefix, the command runs under the limit.
    pub(super) fn wrapper(&self) -> Vec<String> {
        match self {
            Self::V1(group) | Self::V2(group) => {
                // The shell joins the cgroup and then executes the program, so that the cgroup counts all memory of the
                // program.
                let script = r#"echo $$ > "$0" && exec "$@""#;
                let procs = group.join("cgroup.procs").display().to_string();
                vec!["sh".to_owned(), "-c".to_owned(), script.to_owned(), procs]
            }
            Self::Data => vec!["prlimit".to_owned(), format!("--data={LIMIT_BYTES}"), "--".to_owned()],
        }
    }

    pub(super) fn describe(&self) -> String {
        let mib = LIMIT_BYTES / 1024 / 1024;
        match self {
            Self::V1(_) => format!("{mib} MiB, by a cgroup (version 1): the kernel kills a process that exceeds it"),
            Self::V2(_) => format!("{mib} MiB, by a cgroup (version 2): the kernel kills a process that exceeds it"),
            Self::Data => format!(
                "{mib} MiB of data by setrlimit, and of anonymous memory by sampling: no memory cgroup is writable here"
            ),
        }
    }

    /// Whether a running server stayed within the limit: its maximum memory without mapped files (`peak`, in bytes) was
    /// below the limit, and the kernel killed no process in the cgroup.
    pub(super) fn is_met(&self, peak: u64) -> bool {
        peak < LIMIT_BYTES && self.oom_kills().is_none_or(|kills| kills == 0)
    }

    /// How many processes the kernel killed for exceeding the limit; `None` if the kernel does not report it.
    pub(super) fn oom_kills(&self) -> Option<u64> {
        let file = match self {
            Self::V1(group) => group.join("memory.oom_control"),
            Self::V2(group) => group.join("memory.events"),
            Self::Data => return None,
        };
        let text = fs::read_to_string(file).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// The maximum memory of the cgroup, in bytes, including cached files.
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
            // The removal fails if a process is still in the cgroup. The next run then removes the cgroup.
            Self::V1(group) | Self::V2(group) => drop(fs::remove_dir(group)),
            Self::Data => {}
        }
    }
}

/// Creates a cgroup in the folder `root`, and writes the limit to the file `limit_file` of the cgroup.
fn create_cgroup(root: &Path, limit_file: &str) -> Result<PathBuf> {
    static CREATED: AtomicU32 = AtomicU32::new(0);
    let mut name = CGROUP_PREFIX.to_owned();
    write!(name, "{}-{}", std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed))?;
    // The existence of `root` is not enough: without the controller, `root` can be an ordinary folder.
    anyhow::ensure!(root.join("cgroup.procs").is_file(), "{} is no cgroup", root.display());
    let group = root.join(name);
    fs::create_dir(&group)?;
    let limited = fs::write(group.join(limit_file), LIMIT_BYTES.to_string()).context("setting the limit");
    if limited.is_err() || !group.join("cgroup.procs").is_file() {
        drop(fs::remove_dir(&group));
    }
    limited.map(|()| group)
}

/// Removes the cgroups of runs that were killed. The kernel does not remove a cgroup that contains a process.
fn remove_stale_cgroups(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(CGROUP_PREFIX) {
            drop(fs::remove_dir(entry.path()));
        }
    }
}
