//! Pages of the docs that are made from the code: a test compares them, and writes them where `UPDATE_DOCS` is set.

use std::{fs, path::Path};

pub(super) fn assert_kept(page: &str, made: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, made).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == made, "docs/{page} is not what the code makes; run the tests with UPDATE_DOCS=1");
}
