//! Documentation pages that are generated from the code. Tests compare the stored pages with the generated pages. If
//! the environment variable `UPDATE_DOCS` is set, the tests first store the generated pages.

use std::{fs, path::Path};

pub(crate) fn assert_up_to_date(page: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, generated).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap_or_default();
    assert!(stored == generated, "docs/{page} differs from what the code generates; run the tests with UPDATE_DOCS=1");
}
