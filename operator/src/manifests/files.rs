//! Finds and reads the manifest files of a folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// The maximum size of a manifest file, in bytes. A Kubernetes object is much smaller.
const MAX_FILE_BYTES: u64 = 8 * 1024 * 1024;

/// Returns the manifest files in a folder and its subfolders. The key is the file name relative to the folder. The
/// value is the path, or why the file cannot be read.
pub(super) fn find(folder: &Path) -> io::Result<BTreeMap<String, Result<PathBuf, String>>> {
    let mut found = BTreeMap::new();
    let mut visited = BTreeSet::new();
    let mut folders_to_read = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, folder)) = folders_to_read.pop() {
        // A symbolic link can lead back to a parent folder, so each folder is visited only once.
        if !visited.insert(fs::canonicalize(&folder)?) {
            continue;
        }
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            // Hidden files usually belong to editors or version control.
            if name.starts_with('.') {
                continue;
            }
            let relative = format!("{prefix}{name}");
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_dir() => folders_to_read.push((format!("{relative}/"), entry.path())),
                Ok(metadata) if metadata.is_file() && is_manifest(&name) => {
                    found.insert(relative, Ok(entry.path()));
                }
                Ok(_) => {}
                Err(error) if is_manifest(&name) => {
                    found.insert(relative, Err(unreadable(&error)));
                }
                Err(_) => {}
            }
        }
    }
    Ok(found)
}

fn is_manifest(name: &str) -> bool {
    Path::new(name)
        .extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|extension| ["yaml", "yml", "json"].contains(&extension))
}

/// Returns the text of a manifest file, or why the file cannot be read.
pub(super) fn read_text(path: &Path) -> Result<String, String> {
    if fs::metadata(path).map_err(|error| unreadable(&error))?.len() > MAX_FILE_BYTES {
        return Err(format!("is over {} MiB", MAX_FILE_BYTES / 1024 / 1024));
    }
    let bytes = fs::read(path).map_err(|error| unreadable(&error))?;
    String::from_utf8(bytes).map_err(|error| format!("is not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
}

fn unreadable(error: &io::Error) -> String {
    format!("cannot be read: {error}")
}
