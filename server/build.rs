//! Declares an input of the build that cargo does not track itself.

fn main() {
    // `sqlx::migrate!` reads the folder `migrations` when the crate is compiled. Without this line, cargo would not
    // notice a new file there.
    println!("cargo:rerun-if-changed=migrations");
}
