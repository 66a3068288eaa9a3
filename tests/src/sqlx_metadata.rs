//! The metadata of the server's SQL queries (`.sqlx`), which sqlx uses to check queries without a database.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use sqlx::Connection;

use crate::{
    postgres::{Options, Postgres},
    process,
};

/// Writes the metadata of every query. For the metadata, sqlx needs a Postgres with the schema of `server/migrations`.
pub async fn write_query_metadata() -> Result<()> {
    let root = process::root();
    let postgres = Postgres::start(Options::for_tests()).await?;
    let database = postgres.empty_database().await?;

    // `latchkey-server migrate` cannot apply the migrations: the server does not compile without the metadata of a new
    // query.
    let mut connection = database.connect().await?;
    for migration in migrations(&root.join("server/migrations"))? {
        let sql = fs::read_to_string(&migration)?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .with_context(|| format!("applying {}", migration.display()))?;
    }
    connection.close().await?;

    // The query macros of sqlx write one file per query when they are expanded, so the crate must be compiled again.
    let new_metadata = process::fresh_dir("sqlx");
    touch(&root.join("server/src/lib.rs"))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["check", "--quiet", "--workspace", "--lib"])
        .current_dir(&root)
        .env("DATABASE_URL", &database.url)
        .env("SQLX_OFFLINE", "false")
        .env("SQLX_OFFLINE_DIR", &new_metadata)
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "the server does not compile against the schema");

    let (written, removed) = sync_files(&new_metadata, &root.join(".sqlx"))?;
    if written + removed > 0 {
        println!(".sqlx: {written} written, {removed} removed");
    }
    Ok(())
}

/// The migrations in the order in which they are applied: by name.
fn migrations(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".sql") && !name.ends_with(".down.sql") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Makes `to` contain exactly the files of `from`. Does not write unchanged files, so that Cargo does not rebuild.
/// Returns the number of written files and the number of removed files.
fn sync_files(from: &Path, to: &Path) -> Result<(usize, usize)> {
    let new = read_files(from)?;
    fs::create_dir_all(to)?;
    let old = read_files(to)?;
    let (mut written, mut removed) = (0, 0);
    for (name, content) in &new {
        if old.get(name) != Some(content) {
            fs::write(to.join(name), content)?;
            written += 1;
        }
    }
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        fs::remove_file(to.join(name))?;
        removed += 1;
    }
    Ok((written, removed))
}

fn read_files(folder: &Path) -> Result<BTreeMap<OsString, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        files.insert(entry.file_name(), fs::read(entry.path())?);
    }
    Ok(files)
}

#[expect(clippy::disallowed_methods, reason = "cargo compares file times with the machine's clock")]
fn touch(file: &Path) -> Result<()> {
    let opened = File::options().append(true).open(file).with_context(|| format!("touching {}", file.display()))?;
    Ok(opened.set_modified(std::time::SystemTime::now())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_new_queries_are_copied_and_those_of_removed_queries_are_deleted() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(from.path().join("a"), "1").unwrap();
        fs::write(from.path().join("b"), "2").unwrap();
        fs::write(to.path().join("b"), "2").unwrap();
        fs::write(to.path().join("c"), "3").unwrap();
        assert_eq!(sync_files(from.path(), to.path()).unwrap(), (1, 1));
        assert_eq!(read_files(from.path()).unwrap(), read_files(to.path()).unwrap());
    }

    #[test]
    fn only_up_migrations_are_found_in_the_order_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["0002_b.sql", "0001_a.sql", "0001_a.down.sql", "README.md"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let names: Vec<_> = migrations(folder.path()).unwrap();
        assert_eq!(names, [folder.path().join("0001_a.sql"), folder.path().join("0002_b.sql")]);
    }
}
