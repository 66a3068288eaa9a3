//! Tells cargo what the program is built from beside its code.

fn main() {
    // `sqlx::migrate!` reads the folder when the crate is compiled; cargo does not see new files in it by itself.
    println!("cargo:rerun-if-changed=migrations");
}
