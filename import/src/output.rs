//! Writes the lines to a file instead of sending them.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::{convert::Sink, error::ImportError, report::Report};

/// A file that only its owner can read. It is removed if the import does not run to its end.
pub(crate) struct OutputFile {
    path: PathBuf,
    writer: BufWriter<File>,
    is_complete: bool,
}

impl OutputFile {
    /// Creates the file. An existing file is used only if it is empty and only its owner can open it, such as a file
    /// from `mktemp`.
    pub(crate) fn create(path: &Path) -> Result<Self, ImportError> {
        let file = create(path).map_err(|error| Self::error(path, error))?;
        Ok(Self { path: path.to_owned(), writer: BufWriter::new(file), is_complete: false })
    }

    fn error(path: &Path, error: io::Error) -> ImportError {
        ImportError::Output { name: path.display().to_string(), error }
    }
}

fn create(path: &Path) -> io::Result<File> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => return result,
    }
    // A link is not opened, because it could lead to a file of another user.
    let is_regular = fs::symlink_metadata(path)?.is_file();
    let file = is_regular.then(|| OpenOptions::new().write(true).open(path)).transpose()?;
    let is_safe = |file: &File| -> io::Result<bool> {
        let metadata = file.metadata()?;
        // The file must belong to this user: another user could have created it to read what is written.
        let is_own = metadata.uid() == fs::metadata("/proc/self")?.uid() && metadata.nlink() == 1;
        Ok(is_own && metadata.is_file() && metadata.len() == 0 && metadata.permissions().mode() & 0o077 == 0)
    };
    match file {
        Some(file) if is_safe(&file)? => Ok(file),
        _ => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the file exists, and is not an empty file that only its owner can open",
        )),
    }
}

impl Sink for OutputFile {
    fn line(&mut self, line: &[u8], report: &mut Report, _: &mut dyn Write) -> Result<(), ImportError> {
        let result = self.writer.write_all(line).and_then(|()| self.writer.write_all(b"\n"));
        result.map_err(|error| Self::error(&self.path, error))?;
        report.written += 1;
        Ok(())
    }

    fn finish(&mut self, _: &mut Report, _: &mut dyn Write) -> Result<(), ImportError> {
        self.writer.flush().map_err(|error| Self::error(&self.path, error))?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.is_complete {
            // The error of the import is reported. A file that cannot be removed is incomplete, but not harmful.
            let _removed = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, finish: bool) -> Result<(), ImportError> {
        let (mut report, mut log) = (Report::default(), Vec::new());
        let mut file = OutputFile::create(path)?;
        file.line(b"{}", &mut report, &mut log)?;
        if finish { file.finish(&mut report, &mut log) } else { Ok(()) }
    }

    #[test]
    fn only_the_owner_can_read_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.ndjson");
        write(&path, true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}\n");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_is_overwritten_only_if_it_is_empty_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.ndjson");
        fs::write(&path, "content").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(write(&path, true), Err(ImportError::Output { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "content");
        fs::write(&path, "").unwrap();
        write(&path, true).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(write(&path, true).is_err());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(write(&link, true).is_err());
        assert!(write(folder.path(), true).is_err());
    }

    #[test]
    fn an_incomplete_output_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.ndjson");
        write(&path, false).unwrap();
        assert!(!path.exists());
    }
}
