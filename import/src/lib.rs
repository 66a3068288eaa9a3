//! `latchkey-server import`: reads the export of another login service and sends its users to the administration API of
//! Latchkey.
//!
//! The input is a stream: one user at a time is parsed ([`json`]), converted ([`sources`]) and written as one line
//! ([`user`]). Lines go to the server in batches ([`upload`]) or to a file ([`output`]). Memory does not depend on the
//! size of the input. If a format has the data of one user in two files, the rows of the files are sorted on disk
//! ([`join`]).

mod args;
mod client;
mod convert;
mod error;
mod hash;
mod input;
mod join;
mod json;
mod output;
mod report;
mod run;
mod sources;
mod timestamp;
mod upload;
mod user;

pub mod fuzzing;

pub use args::{Format, ImportArgs};
pub use run::{Outcome, import, run};
