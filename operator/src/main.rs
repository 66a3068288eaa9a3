//! The operator's binary. All code is in the library, so that fuzz targets can call it.

use std::process::ExitCode;

fn main() -> ExitCode {
    latchkey_operator::run()
}
