//! Names an input of the build that cargo does not track itself.

fn main() {
    // `sqlx::migrate!` reads this folder when the crate is compiled. Cargo would not notice new files in it.
    println!("cargo:rerun-if-changed=migrations");
}
