//! The program of the operator; the library beside it is all of it, so that fuzz targets reach its parts.

use std::process::ExitCode;

fn main() -> ExitCode {
    latchkey_operator::run()
}
