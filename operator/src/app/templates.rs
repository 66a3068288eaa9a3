//! The rules for an App's own mail templates: they are compiled and tried before they are published.

use std::{collections::BTreeMap, io};

use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value, filters};

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
    fn samples(self) -> [BTreeMap<&'static str, &'static str>; 2] {
        const ALWAYS: [(&str, &str); 2] = [("app", "The Shop"), ("registered_at", "1 February 2026, 09:30 UTC")];
        const CODE: [(&str, &str); 2] = [("code", "7K3QX-9M2PT"), ("expires_at", "2 February 2026, 09:30 UTC")];
        let with = |own: &[(&'static str, &'static str)]| ALWAYS.into_iter().chain(own.iter().copied()).collect();
        let with_code = |url| with(&[CODE[0], CODE[1], ("name", ""), ("url", url)]);
        match self {
            Self::Confirm | Self::Reset => ["", "https://shop.example.com/?code=7K3QX-9M2PT"].map(with_code),
            Self::AccountExists | Self::PasswordChanged | Self::AddressChanged | Self::NewSignIn => {
                ["", "Ada <Lovelace> & \"Byron\""].map(|name| with(&[("name", name)]))
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

/// The frame of the default mails, which an App's own may extend.
const LAYOUT: &str = "layout.html";

/// The statements of the language; the others could make a value grow in memory, which neither fuel nor the limit of
/// the output counts.
const STATEMENTS: [&str; 9] = ["if", "elif", "else", "endif", "block", "endblock", "extends", "raw", "endraw"];

fn try_out(mail: Mail, part: Part, key: &str, source: &str) -> Result<(), Fault> {
    let blocks = plain_language(source)?;
    let layout: String = blocks.iter().map(|name| format!("{{% block {name} %}}{{% endblock %}}")).collect();
    let mut environment = Environment::empty();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(move |_| match part {
        Part::Subject | Part::Text => AutoEscape::None,
        Part::Html => AutoEscape::Html,
    });
    environment.add_filter("upper", filters::upper);
    environment.add_filter("lower", filters::lower);
    environment.add_filter("title", filters::title);
    environment.add_filter("capitalize", filters::capitalize);
    environment.add_filter("trim", filters::trim);
    environment.add_filter("default", filters::default);
    environment.add_filter("d", filters::default);
    environment.add_filter("escape", filters::escape);
    environment.add_filter("e", filters::escape);
    if part == Part::Html {
        // Stands for the servers' own: every block of the template has its place in it.
        environment.add_template(LAYOUT, &layout).map_err(|error| fault(&error))?;
    }
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
        if part == Part::Subject && (text.trim().is_empty() || text.trim().contains(char::is_control)) {
            return Err(Fault { line: 1, what: "must make one line that is not empty".into() });
        }
    }
    Ok(())
}

/// Looks into every tag, in branches that are not taken too, and tells the names of the blocks.
fn plain_language(source: &str) -> Result<Vec<String>, Fault> {
    let mut blocks = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        let (opening, inside) = rest[start..].split_at(2);
        let line = source.len() - inside.len();
        let line = source[..line].matches('\n').count() + 1;
        let closing = match opening {
            "{%" => "%}",
            "{{" => "}}",
            _ => "#}",
        };
        // That a tag does not end is the engine's to tell.
        let Some(end) = inside.find(closing) else { break };
        let tag = inside[..end].trim_matches(['-', '+']).trim();
        rest = &inside[end + closing.len()..];
        if opening == "{#" {
            continue;
        }
        if opening == "{%" {
            let mut words = tag.split_ascii_whitespace();
            let word = words.next().unwrap_or_default();
            if !STATEMENTS.contains(&word) {
                return Err(Fault { line, what: format!("{word} is not available in mail templates") });
            }
            if word == "block" {
                blocks.extend(words.next().map(str::to_owned));
            }
        }
        if let Some(operator) = tag.chars().find(|symbol| ['*', '~', '+'].contains(symbol)) {
            return Err(Fault { line, what: format!("{operator} is not available in mail templates") });
        }
    }
    Ok(blocks)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(key: &str, source: &str) -> Checked {
        let text = [(key.to_owned(), source.to_owned())].into();
        check("shop-mail", &ConfigMapValues { text, binary: Vec::new() })
    }

    #[track_caller]
    fn good(key: &str, source: &str) {
        let checked = check_one(key, source);
        assert_eq!(checked.faults, Vec::<String>::new());
        assert_eq!(checked.good[key], source);
    }

    #[track_caller]
    fn bad(key: &str, source: &str, place: &str, what: &str) {
        let checked = check_one(key, source);
        assert!(checked.good.is_empty(), "{key} is published");
        assert_eq!(checked.faults.len(), 1);
        assert!(checked.faults[0].starts_with(&format!("shop-mail/{key}{place}")), "{}", checked.faults[0]);
        assert!(checked.faults[0].contains(what), "{}", checked.faults[0]);
    }

    #[test]
    fn every_part_of_every_mail_can_be_worded_anew() {
        for mail in Mail::ALL {
            for part in ["subject", "txt", "html"] {
                good(
                    &format!("{}.{part}", mail.as_str()),
                    "Hello{% if name %} {{ name | title }}{% endif %} of {{ app }}",
                );
            }
        }
    }

    #[test]
    fn each_mail_has_its_variables_and_no_other() {
        for mail in Mail::ALL {
            let has_code = matches!(mail, Mail::Confirm | Mail::Reset);
            for variable in ["app", "name", "registered_at", "code", "url", "expires_at", "email", "password"] {
                let key = format!("{}.txt", mail.as_str());
                let source = format!("\n{{{{ {variable} }}}}");
                match variable {
                    "app" | "name" | "registered_at" => good(&key, &source),
                    "code" | "url" | "expires_at" if has_code => good(&key, &source),
                    _ => bad(&key, &source, ":2: ", "undefined"),
                }
            }
        }
    }

    #[test]
    fn a_layout_is_extended_and_its_blocks_are_tried() {
        good("confirm.html", "{% extends \"layout.html\" %}{% block body %}<p>{{ code }}</p>{% endblock %}");
        let broken = "{% extends \"layout.html\" %}\n{% block body %}{{ cod }}{% endblock %}";
        bad("confirm.html", broken, ":2: ", "undefined");
        bad("confirm.txt", "{% extends \"layout.html\" %}", ":1: ", "template not found");
    }

    #[test]
    fn what_does_not_compile_is_told_by_line() {
        bad("reset.html", "<p>\n\n{% if code %}</p>", ":3: ", "syntax error");
        bad("reset.html", "{{ code", ":1: ", "syntax error");
    }

    #[test]
    fn what_could_grow_is_no_part_of_the_language() {
        for (source, what) in [
            ("\n{% for x in code %}{{ x }}{% endfor %}", "for is not"),
            ("\n{% set x = code %}", "set is not"),
            ("\n{% macro x() %}{% endmacro %}", "macro is not"),
            ("\n{%- include \"x\" -%}", "include is not"),
            ("\n{{ code * 1000000000 }}", "* is not"),
            ("\n{{ code ~ code }}", "~ is not"),
            ("\n{% if false %}{{ code + code }}{% endif %}", "+ is not"),
        ] {
            bad("confirm.txt", source, ":2: ", what);
        }
        bad("confirm.txt", "{{ code | replace('7', '77') }}", ":1: ", "unknown filter");
        bad("confirm.txt", "{{ range(9) }}", ":1: ", "unknown function");
        good("confirm.txt", "{# * ~ + #}{{- code -}} * ~ +");
    }

    #[test]
    fn a_subject_is_one_line() {
        good("confirm.subject", "Your code for {{ app }}\n");
        bad("confirm.subject", "{% if url %}\nx{% endif %}", ":1: ", "one line that is not empty");
        bad("confirm.subject", "a\nb", ":1: ", "one line that is not empty");
    }

    #[test]
    fn an_output_ends_at_its_limit() {
        good("confirm.txt", &"a".repeat(MAX_OUTPUT));
        bad("confirm.txt", &"a".repeat(MAX_OUTPUT + 1), ":1: ", "makes more than 64 KiB");
    }

    #[test]
    fn a_config_map_ends_at_its_limit() {
        let of = |length: usize| {
            let text = (0..4).map(|index| (format!("k{index}.txt"), "a".repeat(length / 4 - 6))).collect();
            check("shop-mail", &ConfigMapValues { text, binary: Vec::new() }).faults
        };
        assert_eq!(of(MAX_TOTAL).len(), 4, "four unknown names, and no word of the size");
        assert_eq!(of(MAX_TOTAL + 4), ["ConfigMap shop-mail is over 256 KiB; shorten it"]);
    }

    #[test]
    fn unknown_names_are_told_and_the_others_go_on() {
        let text = [("confirm.txt", "{{ code }}"), ("confirm.md", "x"), ("welcome.txt", "x"), ("confirm", "x")];
        let text = text.map(|(key, source)| (key.to_owned(), source.to_owned())).into();
        let checked = check("shop-mail", &ConfigMapValues { text, binary: vec!["logo.png".into()] });
        assert_eq!(checked.good.keys().collect::<Vec<_>>(), ["confirm.txt"]);
        assert_eq!(checked.faults.len(), 4);
        assert!(checked.faults[0].starts_with("shop-mail/logo.png: is under binaryData"));
        assert!(checked.faults[1..].iter().all(|fault| fault.contains("is not a template's name; use <mail>.subject")));
    }
}
