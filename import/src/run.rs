//! Runs an import.

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    time::SystemTime,
};

use crate::{
    args::ImportArgs,
    client::{Client, RETRIES},
    convert::{Context, Sink},
    error::ImportError,
    input::{self, Input},
    output::OutputFile,
    report::{Mode, Report},
    sources,
    upload::Uploader,
};

/// How an import ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No user that should be imported was left out.
    Complete = 0,
    /// At least one user was refused or could not be imported.
    SomeRefused = 1,
    /// The import did not run to its end.
    Aborted = 2,
}

/// Runs an import. Prints the report to standard output, and refused users, progress and errors to standard error.
#[must_use]
pub fn run(args: &ImportArgs) -> ExitCode {
    #[expect(clippy::disallowed_methods, reason = "the edge of the program, where time becomes an argument")]
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    ExitCode::from(import(args, now, &mut io::stdout().lock(), &mut io::stderr().lock()) as u8)
}

/// Runs an import at the time `now` (Unix seconds). The report goes to `out`; refused users, progress and errors go to
/// `log`.
pub fn import(args: &ImportArgs, now: i64, out: &mut dyn Write, log: &mut dyn Write) -> Outcome {
    let mode = match (&args.output, args.dry_run) {
        (Some(_), _) => Mode::Output,
        (None, true) => Mode::DryRun,
        (None, false) => Mode::Import,
    };
    let mut report = Report::default();
    let result = convert_files(args, now, &mut report, log);
    // An import that ends early reports what it did before it ended.
    let printed =
        if result.is_ok() || report.users > 0 { report.print(mode, out).and_then(|()| out.flush()) } else { Ok(()) };
    match result.and(printed.map_err(ImportError::Print)) {
        Ok(()) if report.is_complete() => Outcome::Complete,
        Ok(()) => Outcome::SomeRefused,
        Err(error) => {
            // If standard error is closed, the exit status still reports the failure.
            let _printed = writeln!(log, "latchkey-server import: {error}");
            Outcome::Aborted
        }
    }
}

fn convert_files(args: &ImportArgs, now: i64, report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError> {
    if args.files.iter().filter(|file| *file == Path::new("-")).count() > 1 {
        return Err(ImportError::Usage("standard input (-) can be read only once".to_owned()));
    }
    // All files are opened before the first user is sent.
    let inputs = args.files.iter().map(|file| input::open(file)).collect::<Result<Vec<Input>, _>>()?;
    let mut sink: Box<dyn Sink> = match (&args.output, &args.app, &args.token_file) {
        (Some(path), _, _) => Box::new(OutputFile::create(path)?),
        (None, Some(app), Some(token_file)) => {
            let source = args.format.name();
            Box::new(Uploader::new(Client::new(&args.server, app, source, args.dry_run, token_file, RETRIES)?)?)
        }
        (None, _, _) => return Err(ImportError::Usage("--app and --token-file are required".to_owned())),
    };
    let mut context = Context::new(args, sink.as_mut(), report, log, now);
    sources::read(inputs, &mut context)?;
    context.finish()
}
