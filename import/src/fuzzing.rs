//! For the fuzz targets: conversion of an input to lines, without files and without a server.

use std::io::Write;

use crate::{
    ImportArgs,
    convert::{Context, Sink},
    error::ImportError,
    input::Input,
    report::Report,
    sources,
};

/// The result of [`convert`].
#[derive(Debug, Default)]
pub struct Converted {
    /// The lines for the server.
    pub lines: Vec<Vec<u8>>,
    /// The number of users in the report: the users of the input without unreadable records, and without users that are
    /// only counted as omitted, such as deleted users.
    pub users: u64,
    /// What is logged about users that are not imported.
    pub log: Vec<u8>,
    /// The error message, if an error ends the import early.
    pub error: Option<String>,
}

#[derive(Default)]
struct Lines(Vec<Vec<u8>>);

impl Sink for Lines {
    fn line(&mut self, line: &[u8], _: &mut Report, _: &mut dyn Write) -> Result<(), ImportError> {
        self.0.push(line.to_owned());
        Ok(())
    }

    fn finish(&mut self, _: &mut Report, _: &mut dyn Write) -> Result<(), ImportError> {
        Ok(())
    }
}

/// Converts `files` at the time `now` (Unix seconds). Does not read the files in `args`.
pub fn convert(args: &ImportArgs, now: i64, files: &[&[u8]]) -> Converted {
    let inputs = files.iter().map(|bytes| {
        let reader = Box::new(std::io::Cursor::new(bytes.to_vec()));
        Input { name: "input".to_owned(), reader }
    });
    let (mut sink, mut report, mut log) = (Lines::default(), Report::default(), Vec::new());
    let result = sources::read(inputs.collect(), &mut Context::new(args, &mut sink, &mut report, &mut log, now));
    Converted { lines: sink.0, users: report.users, log, error: result.err().map(|error| error.to_string()) }
}
