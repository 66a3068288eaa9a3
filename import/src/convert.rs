//! The code that the readers of all import formats share. It turns records into users, and passes the users on as
//! lines.

use std::{collections::HashMap, io::Write};

use serde_json::{Map, Value};

use crate::{
    args::ImportArgs,
    error::ImportError,
    hash::{Converted, Converter, PasswordHash, ScryptCost},
    report::{Omitted, Report, shorten_id, to_printable},
    user::{Identity, MAX_IDENTITIES, NewUser, metadata_fits},
};

/// Maximum size of a line for the server, in bytes.
pub(crate) const MAX_LINE: usize = 64 * 1024;

/// Receives the lines of all users, in the order of the users. Each line is one user in the format of the server.
pub(crate) trait Sink {
    fn line(&mut self, line: &[u8], report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError>;
    /// Sends the lines that are still buffered.
    fn finish(&mut self, report: &mut Report, log: &mut dyn Write) -> Result<(), ImportError>;
}

/// What the reader of an import format needs to convert records into users.
pub(crate) struct Context<'a> {
    pub args: &'a ImportArgs,
    mappings: HashMap<&'a str, &'a str>,
    pub report: &'a mut Report,
    hashes: Converter,
    sink: &'a mut dyn Sink,
    /// Receives a line for each user or record that is refused or cannot be imported, and the progress of the import.
    log: &'a mut dyn Write,
    /// The time of the import, in Unix seconds.
    pub now: i64,
}

impl<'a> Context<'a> {
    pub(crate) fn new(
        args: &'a ImportArgs,
        sink: &'a mut dyn Sink,
        report: &'a mut Report,
        log: &'a mut dyn Write,
        now: i64,
    ) -> Self {
        let mappings = args.mappings.iter().map(|(alias, provider)| (alias.as_str(), provider.as_str())).collect();
        Self { args, mappings, report, hashes: Converter::default(), sink, log, now }
    }

    /// Returns the App's Provider that `--map` assigns to `alias`, if any. `alias` is a provider's name in the input.
    pub(crate) fn provider(&self, alias: &str) -> Option<&'a str> {
        self.mappings.get(alias).copied()
    }

    /// Returns the identity, at the Provider that `--map` assigns to one of the aliases. The first alias with a
    /// Provider wins. If no alias has a Provider, counts the identity as unmapped and returns `None`.
    pub(crate) fn identity(&mut self, aliases: &[&str], subject: &str, authority: Option<&str>) -> Option<Identity> {
        let Some(provider) = aliases.iter().find_map(|alias| self.provider(alias)) else {
            self.report.unmapped_identities.add(&to_printable(aliases.first().copied().unwrap_or_default()), 1);
            return None;
        };
        let (provider, subject) = (provider.to_owned(), subject.to_owned());
        // Only Microsoft has a different authority (issuer) for each tenant. For other providers, the App knows the
        // authority, so the line does not contain it.
        let authority = authority.filter(|authority| authority.starts_with("https://login.microsoftonline.com/"));
        Some(Identity { provider, subject, authority: authority.map(str::to_owned) })
    }

    /// Returns the hash. If it cannot be imported, counts it for the report instead.
    pub(crate) fn hash_or_count(&mut self, converted: Converted) -> Option<PasswordHash> {
        converted.map_err(|kind| self.report.unsupported_hashes.add(kind.0, 1)).ok()
    }

    /// Converts a hash in text form. An empty text means that there is no hash.
    pub(crate) fn text_hash(&mut self, hash: Option<&str>, cost: ScryptCost) -> Option<PasswordHash> {
        let hash = hash.filter(|hash| !hash.is_empty())?;
        let converted = self.hashes.convert(hash, cost);
        self.hash_or_count(converted)
    }

    /// Returns the metadata of a user if `--metadata` is set. If the metadata of a user is not imported, counts the
    /// user.
    pub(crate) fn metadata(&mut self, has_attributes: bool, metadata: impl FnOnce() -> Value) -> Map<String, Value> {
        if !has_attributes {
            return Map::new();
        }
        if !self.args.metadata {
            self.report.count_omitted(Omitted::Attributes, 1);
            return Map::new();
        }
        match metadata() {
            Value::Object(mut metadata) => {
                metadata
                    .retain(|_, value| !value.is_null() && value.as_object().is_none_or(|members| !members.is_empty()));
                if !metadata.is_empty() && metadata_fits(&metadata) {
                    return metadata;
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {}
        }
        self.report.count_omitted(Omitted::UnusableMetadata, 1);
        Map::new()
    }

    /// Passes a user to the sink.
    pub(crate) fn user(&mut self, mut user: NewUser) -> Result<(), ImportError> {
        self.report.users += 1;
        user.email = user.email.filter(|email| !email.is_empty());
        user.email_verified = user.email.is_some() && (user.email_verified || self.args.addresses_verified);
        user.created_at = user.created_at.filter(|at| (0..=self.now).contains(at));
        self.report.count_omitted(Omitted::ExcessIdentities, user.identities.len().saturating_sub(MAX_IDENTITIES));
        user.identities.truncate(MAX_IDENTITIES);
        if user.email.is_none() && user.identities.is_empty() {
            self.report.without_address += 1;
            return self.log_reason(&user.external_id, "has neither an email address nor a mapped identity");
        }
        let line = serde_json::to_vec(&user).map_err(|error| ImportError::Usage(error.to_string()))?;
        self.send(&line, &user.external_id)
    }

    /// Passes a line to the sink. The line is already in the server's format.
    pub(crate) fn line(&mut self, line: &[u8], external_id: &str) -> Result<(), ImportError> {
        self.report.users += 1;
        self.send(line, external_id)
    }

    fn send(&mut self, line: &[u8], external_id: &str) -> Result<(), ImportError> {
        if line.len() > MAX_LINE {
            return self.refuse_long_line(external_id);
        }
        self.sink.line(line, self.report, self.log)
    }

    /// Counts a user as refused because the line in the input is larger than [`MAX_LINE`]. `user` is the name of the
    /// user in the log: the `external_id`, or the position of the line in the input.
    pub(crate) fn count_long_line(&mut self, user: &str) -> Result<(), ImportError> {
        self.report.users += 1;
        self.refuse_long_line(user)
    }

    /// Refuses a user whose line is larger than [`MAX_LINE`]. The line is not sent, because the server would refuse the
    /// whole batch with 413.
    fn refuse_long_line(&mut self, user: &str) -> Result<(), ImportError> {
        self.report.refused += 1;
        self.log_reason(user, "too_long (the line for the server is above 64 KiB)")
    }

    /// Counts a record or line that is not a user in the expected form. `place` is its position in the input.
    pub(crate) fn count_unreadable(&mut self, place: &str) -> Result<(), ImportError> {
        self.report.unreadable += 1;
        self.log_reason(place, "is not a user in the expected form")
    }

    pub(crate) fn finish(&mut self) -> Result<(), ImportError> {
        self.sink.finish(self.report, self.log)
    }

    /// Logs why a user, or the record at a position in the input, is not imported.
    fn log_reason(&mut self, subject: &str, reason: &str) -> Result<(), ImportError> {
        let text = format!("{}: {reason}", shorten_id(subject));
        writeln!(self.log, "{}", to_printable(&text)).map_err(ImportError::Print)
    }
}
