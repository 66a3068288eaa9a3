//! What an import did, and which data it did not import.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, Write},
};

/// The kinds of data and of users that are not imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Omitted {
    Totp,
    WebAuthn,
    RecoveryCodes,
    OtherFactors,
    Groups,
    Roles,
    RequiredActions,
    Attributes,
    UnusableMetadata,
    ExcessIdentities,
    PhoneNumbers,
    FederatedPasswords,
    HashesWithoutUser,
    IdentitiesWithoutUser,
    FederatedUsers,
    ServiceAccounts,
    DeletedUsers,
}

/// Maximum number of different names in a count. The names come from the input, which can contain any number of them.
const MAX_NAMES: usize = 100;
/// Maximum number of characters of an id in a message. An `external_id` has at most 255 bytes.
const MAX_PRINTED_ID: usize = 255;
/// The name that stands for all names beyond [`MAX_NAMES`].
const OTHER_NAMES: &str = "others";

/// Counts by name.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<String, u64>);

/// The counts of an import.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Users of the input, except users that are counted in `omissions` instead, such as deleted users.
    pub users: u64,
    pub created: u64,
    pub unchanged: u64,
    pub refused: u64,
    /// Users that cannot be imported, because they have neither an email address nor an identity.
    pub without_address: u64,
    /// Lines and records that are not a user in the expected form.
    pub unreadable: u64,
    pub written: u64,
    omissions: BTreeMap<Omitted, u64>,
    /// Hashes in forms that cannot be imported, by kind.
    pub unsupported_hashes: Counts,
    /// Hashes that the server refused, by kind and error.
    pub refused_hashes: Counts,
    /// Identities without a matching `--map` option, by the name of their provider in the input.
    pub unmapped_identities: Counts,
    /// How often the server ignored a field, by the name of the field.
    pub ignored_fields: Counts,
}

/// What the import does with the users. The words of the report depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Import,
    DryRun,
    /// Lines were written to a file.
    Output,
}

/// Shortens a text, and replaces its control characters, which could change how a terminal shows the report.
pub(crate) fn to_printable(text: &str) -> String {
    text.chars().take(400).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Returns the beginning of an id. If the id were longer, [`to_printable`] would cut off the text after it.
pub(crate) fn shorten_id(id: &str) -> Cow<'_, str> {
    match id.char_indices().nth(MAX_PRINTED_ID) {
        Some((end, _)) => Cow::Owned(format!("{}…", &id[..end])),
        None => Cow::Borrowed(id),
    }
}

impl Counts {
    pub(crate) fn add(&mut self, name: &str, number: u64) {
        let is_new = !self.0.contains_key(name);
        let name = if is_new && self.0.len() >= MAX_NAMES { OTHER_NAMES } else { name };
        *self.0.entry(name.to_owned()).or_default() += number;
    }
}

impl Omitted {
    fn label(self) -> &'static str {
        match self {
            Self::Totp => "TOTP devices",
            Self::WebAuthn => "WebAuthn keys and passkeys",
            Self::RecoveryCodes => "users with recovery codes",
            Self::OtherFactors => "other second factors",
            Self::Groups => "memberships in groups",
            Self::Roles => "assigned roles",
            Self::RequiredActions => "required actions",
            Self::Attributes => "users with attributes, traits or metadata (--metadata brings them along)",
            Self::UnusableMetadata => "users with metadata above 8 KiB or with U+0000",
            Self::ExcessIdentities => "identities beyond ten for one user",
            Self::PhoneNumbers => "phone numbers",
            Self::FederatedPasswords => "users with their password in a user federation such as LDAP",
            Self::HashesWithoutUser => "password hashes of users that are not in the input",
            Self::IdentitiesWithoutUser => "identities of users that are not in the input",
            Self::FederatedUsers => "users of a user federation that Keycloak does not store",
            Self::ServiceAccounts => "service accounts",
            Self::DeletedUsers => "users that are marked as deleted",
        }
    }
}

impl Report {
    pub(crate) fn count_omitted(&mut self, omitted: Omitted, number: usize) {
        if number > 0 {
            *self.omissions.entry(omitted).or_default() += number as u64;
        }
    }

    /// Whether no user that should be imported was left out.
    pub(crate) fn is_complete(&self) -> bool {
        self.refused + self.without_address + self.unreadable == 0
    }

    pub(crate) fn print(&self, mode: Mode, out: &mut dyn Write) -> io::Result<()> {
        let rows = match mode {
            Mode::Import => vec![("created", self.created), ("unchanged", self.unchanged), ("refused", self.refused)],
            Mode::DryRun => {
                let (created, refused) = (self.created, self.refused);
                vec![("would be created", created), ("unchanged", self.unchanged), ("would be refused", refused)]
            }
            Mode::Output => vec![("written", self.written), ("refused", self.refused)],
        };
        writeln!(out, "Users in the input: {}", self.users + self.unreadable)?;
        for (label, number) in rows {
            writeln!(out, "  {label}: {number}")?;
        }
        for (label, number) in [
            ("without an email address or a mapped identity", self.without_address),
            ("not readable as a user", self.unreadable),
        ] {
            if number > 0 {
                writeln!(out, "  {label}: {number}")?;
            }
        }
        let mut left = Vec::new();
        for (kind, number) in &self.unsupported_hashes.0 {
            left.push((format!("password hashes, {kind}"), *number));
        }
        for (kind, number) in &self.refused_hashes.0 {
            left.push((format!("password hashes, {kind}"), *number));
        }
        for (omitted, number) in &self.omissions {
            left.push((omitted.label().to_owned(), *number));
        }
        for (alias, number) in &self.unmapped_identities.0 {
            left.push((format!("identities of {alias} (no --map for it)"), *number));
        }
        for (field, number) in &self.ignored_fields.0 {
            left.push((format!("fields that the server ignored: {field}"), *number));
        }
        if left.is_empty() {
            return Ok(());
        }
        writeln!(out, "Not brought along:")?;
        for (label, number) in left {
            writeln!(out, "  {label}: {number}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print_to_text(report: &Report, mode: Mode) -> String {
        let mut out = Vec::new();
        report.print(mode, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_report_lists_what_is_not_imported() {
        let mut report = Report { users: 4, created: 2, unchanged: 1, refused: 1, ..Report::default() };
        report.count_omitted(Omitted::Groups, 0);
        report.count_omitted(Omitted::Roles, 2);
        report.unsupported_hashes.add("md5", 1);
        report.unmapped_identities.add("github", 3);
        let expected = "Users in the input: 4\n  created: 2\n  unchanged: 1\n  refused: 1\nNot brought along:\n  password hashes, \
                        md5: 1\n  assigned roles: 2\n  identities of github (no --map for it): 3\n";
        assert_eq!(print_to_text(&report, Mode::Import), expected);
        assert!(print_to_text(&report, Mode::DryRun).contains("  would be created: 2\n"));
        assert!(!report.is_complete());
    }

    #[test]
    fn control_characters_are_not_printed() {
        assert_eq!(to_printable("a\u{1b}[2Jb\n"), "a?[2Jb?");
    }

    #[test]
    fn long_ids_are_shortened() {
        let id = "é".repeat(MAX_PRINTED_ID);
        assert_eq!(shorten_id(&id), id);
        assert_eq!(shorten_id(&format!("{id}x")), format!("{id}…"));
    }

    #[test]
    fn the_number_of_names_from_the_input_is_limited() {
        let mut counts = Counts::default();
        for number in 0..1000 {
            counts.add(&number.to_string(), 1);
        }
        assert_eq!((counts.0.len(), counts.0[OTHER_NAMES]), (MAX_NAMES + 1, 900));
    }
}
