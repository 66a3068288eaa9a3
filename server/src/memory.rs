//! How much memory this process can use: the memory limit of its cgroup or the memory of the machine, whichever is
//! smaller.

use std::{fs, path::Path};

/// The limit in bytes if neither the cgroup's limit nor the machine's memory can be read.
const DEFAULT_LIMIT: u64 = 256 * 1024 * 1024;

/// Returns the smallest memory limit, in bytes, of the process's cgroup and its ancestors, but at most the memory of
/// the machine.
pub fn limit() -> u64 {
    limit_at(Path::new("/"))
}

fn limit_at(root: &Path) -> u64 {
    let read = |path: &str| fs::read_to_string(root.join(path.trim_start_matches('/'))).ok();
    let cgroups = read("proc/self/cgroup").unwrap_or_default();
    let limits = cgroups.lines().filter_map(|line| {
        // A line is `hierarchy:controllers:path` (cgroups(7)). Cgroup version 2 is hierarchy 0 without controllers.
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (base, file) = if hierarchy == "0" && controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        } else {
            return None;
        };
        // In a container, the path can be a path on the host, but only the container's own cgroup is mounted, at the
        // root of the cgroup file system. Therefore the files in the folder and in all its ancestors are read,
        // including the root.
        let folders = Path::new(path.trim_start_matches('/')).ancestors();
        // `max`, which means no limit, does not parse as a number.
        folders.filter_map(|folder| read(Path::new(base).join(folder).join(file).to_str()?)?.trim().parse().ok()).min()
    });
    let machine = read("proc/meminfo").and_then(|meminfo| {
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    limits.chain(machine).min().unwrap_or(DEFAULT_LIMIT)
}

/// Parses a whole number of bytes, optionally with one of the Kubernetes units `Ki`, `Mi` and `Gi`: `268435456`,
/// `256Mi`.
///
/// # Errors
///
/// If the text does not have this format, the error names the expected format.
pub fn parse(text: &str) -> Result<u64, String> {
    let units = [("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30)];
    let unit = units.into_iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "is not a number of bytes such as 268435456 or 256Mi".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit_with_files(files: &[(&str, &str)]) -> u64 {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        limit_at(root.path())
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:        1048576 kB\nMemFree:         12 kB\n");

    #[test]
    fn the_smallest_limit_of_the_cgroups_applies() {
        let cgroup = ("proc/self/cgroup", "0::/pod/server\n");
        let limits = |pod: &'static str, server: &'static str| {
            limit_with_files(&[
                cgroup,
                MEMINFO,
                ("sys/fs/cgroup/pod/memory.max", pod),
                ("sys/fs/cgroup/pod/server/memory.max", server),
            ])
        };
        assert_eq!(limits("268435456\n", "max\n"), 256 << 20);
        assert_eq!(limits("max\n", "134217728\n"), 128 << 20);
        assert_eq!(limits("max\n", "max\n"), 1 << 30, "the machine has no more");
        assert_eq!(limits("9223372036854771712\n", "max\n"), 1 << 30);
    }

    #[test]
    fn a_container_reads_its_limit_at_the_root() {
        assert_eq!(
            limit_with_files(&[("proc/self/cgroup", "0::/\n"), MEMINFO, ("sys/fs/cgroup/memory.max", "268435456\n")]),
            256 << 20
        );
        let version_1 = ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/kubepods/server\n0::/\n");
        let file = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "67108864\n");
        assert_eq!(limit_with_files(&[version_1, MEMINFO, file]), 64 << 20);
    }

    #[test]
    fn the_limit_without_a_cgroup_is_the_memory_of_the_machine_or_a_default() {
        assert_eq!(limit_with_files(&[MEMINFO]), 1 << 30);
        assert_eq!(limit_with_files(&[]), 256 << 20);
    }

    #[test]
    fn a_size_is_a_whole_number_of_bytes_or_of_binary_units() {
        assert_eq!(parse("268435456"), Ok(256 << 20));
        assert_eq!(parse("256Mi"), Ok(256 << 20));
        assert_eq!(parse("1Gi"), Ok(1 << 30));
        for bad in ["", "0", "0Mi", "-1", "256M", "Mi", "1.5Gi", "18446744073709551615Gi"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
