//! Lists inputs of the build that cargo does not track itself.

fn main() {
    // `sqlx::migrate!` reads the folder when the crate is compiled; cargo does not notice new files in it.
    println!("cargo:rerun-if-changed=migrations");
}
