//! Declares an input of the build that cargo does not track itself, and an option of the linker.

use std::env;

fn main() {
    // `sqlx::migrate!` reads the folder `migrations` when the crate is compiled. Without this line, cargo would not
    // notice a new file there.
    println!("cargo:rerun-if-changed=migrations");
    // Compact relocations: the dynamic loader reads 16 KB instead of 1.2 MB at the start, and this memory stays in use
    // (docs/decisions/0011-memory-of-the-servers.md). Needs glibc 2.36 at run time, or a musl of 2023.
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
