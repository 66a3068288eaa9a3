//! The input files.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use crate::error::ImportError;

/// Size of the read buffer, in bytes.
const BUFFER_BYTES: usize = 64 * 1024;

/// An open file, with its name for messages.
pub(crate) struct Input {
    pub name: String,
    pub reader: Box<dyn Read>,
}

/// Opens a file. `-` is standard input.
pub(crate) fn open(path: &Path) -> Result<Input, ImportError> {
    if path == Path::new("-") {
        return Ok(Input { name: "standard input".to_owned(), reader: Box::new(io::stdin().lock()) });
    }
    let name = path.display().to_string();
    let open = || {
        let file = File::open(path)?;
        if file.metadata()?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok(file)
    };
    match open() {
        Ok(file) => Ok(Input { name, reader: Box::new(file) }),
        Err(error) => Err(ImportError::Input { name, error }),
    }
}

/// A buffered reader that begins after a byte order mark, if there is one.
pub(crate) fn buffer<R: Read>(reader: R) -> io::Result<BufReader<R>> {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
    if reader.fill_buf()?.starts_with(b"\xef\xbb\xbf") {
        reader.consume(3);
    }
    Ok(reader)
}
