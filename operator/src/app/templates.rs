//! The rules for an App's own mail templates: they are compiled and tried before they are published.

use std::{collections::BTreeMap, io};

use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};

use crate::facts::ConfigMapValues;

/// The largest ConfigMap, in octets of keys and values.
pub(crate) const MAX_TOTAL: usize = 256 * 1024;
/// The steps that a template may take.
pub(crate) const FUEL: u64 = 50_000;
/// The longest mail part that a template may make, in octets.
pub(crate) const MAX_OUTPUT: usize = 64 * 1024;

/// The mails that an App may word itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mail {
    Confirm,
    Reset,
    AccountExists,
    PasswordChanged,
    AddressChanged,
    NewSignIn,
}

/// A part of a mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Subject,
    Text,
    Html,
}

/// The templates that can be published, and what is wrong with the others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) good: BTreeMap<String, String>,
    /// Each names the ConfigMap, the key, the line and what to do.
    pub(crate) faults: Vec<String>,
}

/// Judges each template of a ConfigMap. What is broken is left out, and its default is sent instead.
pub(crate) fn check(config_map: &str, values: &ConfigMapValues) -> Checked {
    let total: usize = values.text.iter().map(|(key, value)| key.len() + value.len()).sum();
    if total > MAX_TOTAL {
        let fault = format!("ConfigMap {config_map} is over {} KiB; shorten it", MAX_TOTAL / 1024);
        return Checked { good: BTreeMap::new(), faults: vec![fault] };
    }
    let mut checked = Checked::default();
    for key in &values.binary {
        checked.faults.push(format!("{config_map}/{key}: is under binaryData; put the template under data"));
    }
    for (key, source) in &values.text {
        let Some((mail, part)) = parse_key(key) else {
            checked.faults.push(format!(
                "{config_map}/{key}: is not a template's name; use <mail>.subject, <mail>.txt or <mail>.html with {} as <mail>",
                Mail::ALL.map(Mail::as_str).join(", ")
            ));
            continue;
        };
        match try_out(mail, part, key, source) {
            Ok(()) => {
                checked.good.insert(key.clone(), source.clone());
            }
            Err(Fault { line, what }) => checked.faults.push(format!("{config_map}/{key}:{line}: {what}")),
        }
    }
    checked
}

// === impl Mail ===

impl Mail {
    pub(crate) const ALL: [Self; 6] =
        [Self::Confirm, Self::Reset, Self::AccountExists, Self::PasswordChanged, Self::AddressChanged, Self::NewSignIn];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Confirm => "confirm",
            Self::Reset => "reset",
            Self::AccountExists => "account-exists",
            Self::PasswordChanged => "password-changed",
            Self::AddressChanged => "address-changed",
            Self::NewSignIn => "new-sign-in",
        }
    }

    /// The variables of the mail, each with a sample, in sets that must all do. `confirm` and `reset` go to addresses
    /// that may be unverified, so the name is empty there: they carry nothing that a caller wrote. `url` is empty where
    /// the App names no page.
    fn samples(self) -> Vec<BTreeMap<&'static str, &'static str>> {
        const APP: (&str, &str) = ("app", "The Shop");
        const CODE: (&str, &str) = ("code", "7K3QX-9M2PT");
        const EXPIRES: (&str, &str) = ("expires_at", "2026-01-03 10:00 UTC");
        const REGISTERED: (&str, &str) = ("registered_at", "2026-01-02 10:00 UTC");
        let urls = ["", "https://shop.example.com/confirm?code=7K3QX-9M2PT"];
        match self {
            Self::Confirm => {
                urls.map(|url| BTreeMap::from([APP, ("name", ""), CODE, ("url", url), REGISTERED, EXPIRES])).to_vec()
            }
            Self::Reset => urls.map(|url| BTreeMap::from([APP, ("name", ""), CODE, ("url", url), EXPIRES])).to_vec(),
            Self::AccountExists | Self::PasswordChanged | Self::AddressChanged | Self::NewSignIn => {
                ["", "Ada <Lovelace> & \"Byron\""].map(|name| BTreeMap::from([APP, ("name", name)])).to_vec()
            }
        }
    }
}

fn parse_key(key: &str) -> Option<(Mail, Part)> {
    let (mail, part) = key.split_once('.')?;
    let mail = Mail::ALL.into_iter().find(|known| known.as_str() == mail)?;
    match part {
        "subject" => Some((mail, Part::Subject)),
        "txt" => Some((mail, Part::Text)),
        "html" => Some((mail, Part::Html)),
        _ => None,
    }
}

struct Fault {
    line: usize,
    what: String,
}

fn try_out(mail: Mail, part: Part, key: &str, source: &str) -> Result<(), Fault> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(move |_| match part {
        Part::Subject | Part::Text => AutoEscape::None,
        Part::Html => AutoEscape::Html,
    });
    let template = environment.template_from_named_str(key, source).map_err(|error| fault(&error))?;
    for sample in mail.samples() {
        let mut output = Bounded::default();
        template.render_captured_to(Value::from_pairs(sample), &mut output).map_err(|error| {
            if output.full {
                Fault { line: 1, what: format!("makes more than {} KiB; shorten it", MAX_OUTPUT / 1024) }
            } else {
                fault(&error)
            }
        })?;
        let text = String::from_utf8_lossy(&output.octets);
        if matches!(part, Part::Subject) && (text.trim().is_empty() || text.trim().contains(char::is_control)) {
            return Err(Fault { line: 1, what: "must make one line that is not empty".into() });
        }
    }
    Ok(())
}

/// The engine's own words, without the source of the template.
fn fault(error: &minijinja::Error) -> Fault {
    let what = match error.kind() {
        ErrorKind::OutOfFuel => "takes too many steps; make it simpler".into(),
        kind => match error.detail() {
            Some(detail) => format!("{kind}: {detail}"),
            None => kind.to_string(),
        },
    };
    Fault { line: error.line().unwrap_or(1), what }
}

/// A writer that takes [`MAX_OUTPUT`] octets and no more.
#[derive(Default)]
struct Bounded {
    octets: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if self.octets.len() + octets.len() > MAX_OUTPUT {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.octets.extend_from_slice(octets);
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
