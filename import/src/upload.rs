//! Sends lines to the server in batches, and handles the result of each line.

use std::{collections::BTreeMap, io::Write};

use bytes::Bytes;
use serde_json::{Map, Value, value::RawValue};

use crate::{
    client::{Client, LineOutcome, LineResult, is_code},
    convert::Sink,
    error::ImportError,
    hash,
    report::{Report, shorten_id, to_printable},
};

/// Maximum number of lines in one request, as the server allows.
const MAX_LINES: usize = 1000;
/// Maximum size of a batch, in bytes: much less than the limit of the server, which is 4 MiB. The server waits 30 s for
/// a body, so a connection needs 17 kB/s for this size, and 140 kB/s for 4 MiB. 1,000 users without metadata have about
/// 400 kB, so larger batches save few requests.
const MAX_BATCH_BYTES: usize = 512 * 1024;
/// How often the progress is logged, in users.
const PROGRESS_INTERVAL: u64 = 10_000;
/// The error codes for a hash that the server does not accept. A user with such a hash is imported without the hash.
const HASH_CODES: [&str; 3] = ["hash_not_supported", "hash_too_costly", "too_many_hash_kinds"];

pub(crate) struct Uploader {
    client: Client,
    batch: Batch,
}

/// The lines of one request. Each line ends with a line feed.
#[derive(Default)]
struct Batch {
    text: Vec<u8>,
    /// Where each line ends.
    ends: Vec<usize>,
}

impl Uploader {
    /// Creates an uploader, after the server has confirmed that the caller can import.
    pub(crate) fn new(mut client: Client) -> Result<Self, ImportError> {
        client.check()?;
        Ok(Self { client, batch: Batch::default() })
    }

    fn send(&mut self, report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError> {
        let mut batch = std::mem::take(&mut self.batch);
        let before = report.created + report.unchanged + report.refused;
        let mut is_repeated = false;
        while !batch.ends.is_empty() {
            batch = self.send_batch(batch, is_repeated, report, log)?;
            is_repeated = true;
        }
        let after = report.created + report.unchanged + report.refused;
        if before / PROGRESS_INTERVAL < after / PROGRESS_INTERVAL {
            writeln!(log, "{after} users so far").map_err(ImportError::Print)?;
        }
        Ok(())
    }

    /// Sends a batch. Returns the lines that the server refused because of their hash, with the hash removed. If
    /// `is_repeated`, the lines were sent before, so their ignored fields are already counted.
    fn send_batch(
        &mut self,
        batch: Batch,
        is_repeated: bool,
        report: &mut Report,
        log: &mut dyn Write,
    ) -> Result<Batch, ImportError> {
        let Batch { text, ends } = batch;
        let text = Bytes::from(text);
        let response = self.client.send(&text)?;
        let mut is_done = vec![false; ends.len()];
        let mut again = Batch::default();
        for result in &response.results {
            let index = result.line.checked_sub(1).filter(|index| *index < ends.len());
            let index = index.filter(|index| !is_done[*index]).ok_or(ImportError::BadResponse)?;
            is_done[index] = true;
            let start = index.checked_sub(1).map_or(0, |previous| ends[previous]);
            let line = &text[start..ends[index]];
            match result.outcome {
                LineOutcome::Created => report.created += 1,
                LineOutcome::Unchanged => report.unchanged += 1,
                LineOutcome::Refused => {
                    if let Some(without_hash) = without_refused_hash(line, result, report)? {
                        again.push(&without_hash);
                    } else {
                        report.refused += 1;
                        let text = refusal(line, result);
                        writeln!(log, "{}", to_printable(&text)).map_err(ImportError::Print)?;
                    }
                }
            }
        }
        if is_done.contains(&false) {
            return Err(ImportError::BadResponse);
        }
        if !is_repeated {
            for (field, number) in &response.ignored_fields {
                report.ignored_fields.add(&to_printable(field), *number);
            }
        }
        Ok(again)
    }
}

impl Sink for Uploader {
    fn line(&mut self, line: &[u8], report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError> {
        if self.batch.ends.len() == MAX_LINES || self.batch.text.len() + line.len() + 1 > MAX_BATCH_BYTES {
            self.send(report, log)?;
        }
        self.batch.push(line);
        Ok(())
    }

    fn finish(&mut self, report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError> {
        self.send(report, log)
    }
}

impl Batch {
    fn push(&mut self, line: &[u8]) {
        self.text.extend_from_slice(line);
        self.text.push(b'\n');
        self.ends.push(self.text.len());
    }
}

/// If the server refused the hash of the line, counts the hash and returns the line without it. The other members are
/// copied as text, because a number that is parsed and written again can be longer, and the line must not grow above
/// the limit of the server.
fn without_refused_hash(line: &[u8], result: &LineResult, report: &mut Report) -> Result<Option<Vec<u8>>, ImportError> {
    let is_hash_code = |code: &str| HASH_CODES.iter().find(|known| **known == code).copied();
    let refused = result.fields.iter().filter(|error| error.field == "password_hash");
    let Some(code) = refused.filter_map(|error| is_hash_code(&error.code)).next() else { return Ok(None) };
    let mut user: BTreeMap<String, Box<RawValue>> =
        serde_json::from_slice(line).map_err(|_| ImportError::BadResponse)?;
    // A line that has no hash would be refused again, so it is not resent.
    let Some(hash) = user.remove("password_hash") else { return Ok(None) };
    let hash: String = serde_json::from_str(hash.get()).unwrap_or_default();
    let kind = hash::kind(&hash);
    report.refused_hashes.add(&format!("{kind}, refused by the server ({code})"), 1);
    serde_json::to_vec(&user).map(Some).map_err(|_| ImportError::BadResponse)
}

/// The log line about a user that the server refused: `external_id`, error, and the fields with their codes.
fn refusal(line: &[u8], result: &LineResult) -> String {
    let user: Map<String, Value> = serde_json::from_slice(line).unwrap_or_default();
    let external_id = user.get("external_id").and_then(Value::as_str).unwrap_or("a user without external_id");
    let error = result.error.as_deref().filter(|error| is_code(error)).unwrap_or("refused");
    let mut text = format!("{}: {error}", shorten_id(external_id));
    for (number, field) in result.fields.iter().take(10).enumerate() {
        let code = if is_code(&field.code) { &field.code } else { "invalid" };
        text.push_str(if number == 0 { " (" } else { ", " });
        text.push_str(&format!("{} {code}", field.field));
    }
    if !result.fields.is_empty() {
        text.push(')');
    }
    text
}
