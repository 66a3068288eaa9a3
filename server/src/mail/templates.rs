//! The texts of mails: a default for each, in which an App may put its own in place.

use std::{collections::BTreeMap, io, sync::LazyLock};

use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value, context};
use tracing::warn;

use super::sandbox;
use crate::domain::mail::MailKind;

/// What `{% extends %}` may name.
pub(super) const LAYOUT: &str = "layout.html";
/// What templates may use.
pub(super) const VARIABLES: [&str; 6] = ["app", "name", "code", "url", "registered_at", "expires_at"];

/// Instructions of one rendering; the largest default takes a fiftieth.
const FUEL: u64 = 50_000;
/// Octets of one rendered part.
const MOST_OUTPUT: usize = 64 * 1024;
/// Characters of a subject; RFC 5322, 2.1.1 allows lines of 998 octets, and no client shows more than this.
const MOST_SUBJECT: usize = 200;

macro_rules! defaults {
    ($($name:literal),* $(,)?) => {
        [$(
            (concat!($name, ".subject"), include_str!(concat!("templates/", $name, ".subject"))),
            (concat!($name, ".txt"), include_str!(concat!("templates/", $name, ".txt"))),
            (concat!($name, ".html"), include_str!(concat!("templates/", $name, ".html"))),
        )*]
    };
}

const DEFAULTS: [(&str, &str); 18] =
    defaults!["confirm", "reset", "account-exists", "password-changed", "address-changed", "new-sign-in"];
const LAYOUT_SOURCE: &str = include_str!("templates/layout.html");

static BUILT_IN: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut env = environment();
    for (name, source) in DEFAULTS {
        env.add_template(name, source).expect("the default templates are tested");
    }
    env
});

/// A template that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TemplateError {
    /// 0 where no line is to blame.
    pub line: u32,
    pub reason: String,
}

/// What a template may show. A value that does not apply is empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values<'a> {
    pub(super) app: &'a str,
    pub(super) name: &'a str,
    pub(super) code: &'a str,
    pub(super) url: &'a str,
    pub(super) registered_at: &'a str,
    pub(super) expires_at: &'a str,
}

/// A mail's three parts.
#[derive(Clone, Debug)]
pub(super) struct Rendered {
    pub(super) subject: String,
    pub(super) text: String,
    pub(super) html: String,
}

/// The templates of one App.
pub(super) struct Templates {
    own: Environment<'static>,
}

/// Collects output up to a limit.
#[derive(Default)]
struct Output(Vec<u8>);

/// Whether a template file of this name, `<mail>.subject`, `<mail>.txt` or `<mail>.html`, can be used: it is parsed,
/// held against what templates may do, and rendered with sample values, once with all of them and once with those alone
/// that a mail to an unverified address has.
pub fn check(name: &str, source: &str) -> Result<(), TemplateError> {
    if !DEFAULTS.iter().any(|(known, _)| *known == name) {
        let kinds = MailKind::ALL.map(MailKind::as_str).join(", ");
        let reason = format!("is not the name of a template: <mail>.subject, .txt or .html, with a mail of {kinds}");
        return Err(TemplateError { line: 0, reason });
    }
    sandbox::check(name, source)?;
    let mut env = environment();
    env.add_template_owned(name.to_owned(), source.to_owned()).map_err(|error| TemplateError::of(&error))?;
    let full = Values {
        app: "The Shop",
        name: "Ada Lovelace",
        code: "ABCDE-01XYZ",
        url: "https://shop.example.com/confirm?code=ABCDE-01XYZ",
        registered_at: "1 February 2026, 09:30 UTC",
        expires_at: "2 February 2026, 09:30 UTC",
    };
    for values in [full, Values { name: "", url: "", ..full }] {
        let output = render(&env, name, values).map_err(|error| TemplateError::of(&error))?;
        if name.ends_with(".subject") && one_line(&output).is_empty() {
            return Err(TemplateError { line: 0, reason: "renders to an empty subject".to_owned() });
        }
    }
    Ok(())
}

fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|name| if name.ends_with(".html") { AutoEscape::Html } else { AutoEscape::None });
    env.set_fuel(Some(FUEL));
    sandbox::add_filters(&mut env);
    env.add_template(LAYOUT, LAYOUT_SOURCE).expect("the layout is tested");
    env
}

fn render(env: &Environment<'_>, name: &str, values: Values<'_>) -> Result<String, minijinja::Error> {
    // No variable may break a line: text and subject are read line by line.
    let value = |text: &str| Value::from(one_line(text));
    let Values { app, name: user, code, url, registered_at, expires_at } = values;
    let context = context! {
        app => value(app),
        name => value(user),
        code => value(code),
        url => value(url),
        registered_at => value(registered_at),
        expires_at => value(expires_at),
    };
    let mut output = Output::default();
    env.get_template(name)?.render_captured_to(context, &mut output)?;
    String::from_utf8(output.0).map_err(|_| minijinja::Error::new(ErrorKind::WriteFailure, "is not UTF-8"))
}

/// White space and control characters, the line and paragraph separators among them, become single spaces.
pub(super) fn one_line(text: &str) -> String {
    let breaks = |c: char| c.is_whitespace() || c.is_control();
    text.split(breaks).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

// === impl Templates ===

impl Templates {
    /// Those of an App. What cannot be used is told in the log and left out: its default stands in.
    pub(super) fn new(app: &str, own: &BTreeMap<String, String>) -> Self {
        let mut env = environment();
        for (name, source) in own {
            let added = check(name, source).and_then(|()| {
                env.add_template_owned(name.clone(), source.clone()).map_err(|error| TemplateError::of(&error))
            });
            if let Err(TemplateError { line, reason }) = added {
                warn!(app, template = name, line, reason, "a mail template cannot be used; the default stands in");
            }
        }
        Self { own: env }
    }

    pub(super) fn render(&self, app: &str, kind: MailKind, values: Values<'_>) -> Result<Rendered, TemplateError> {
        let kind = kind.as_str();
        let subject = |text: String| one_line(&text).chars().take(MOST_SUBJECT).collect::<String>();
        let mut head = subject(self.part(app, &format!("{kind}.subject"), values)?);
        if head.is_empty() {
            head = subject(default_part(&format!("{kind}.subject"), values)?);
        }
        Ok(Rendered {
            subject: head,
            text: self.part(app, &format!("{kind}.txt"), values)?,
            html: self.part(app, &format!("{kind}.html"), values)?,
        })
    }

    fn part(&self, app: &str, name: &str, values: Values<'_>) -> Result<String, TemplateError> {
        if self.own.get_template(name).is_ok() {
            match render(&self.own, name, values) {
                Ok(text) => return Ok(text),
                // The error's own text may quote values.
                Err(error) => warn!(
                    app,
                    template = name,
                    line = error.line(),
                    reason = %error.kind(),
                    "a mail template failed; the default stands in"
                ),
            }
        }
        default_part(name, values)
    }
}

fn default_part(name: &str, values: Values<'_>) -> Result<String, TemplateError> {
    render(&BUILT_IN, name, values).map_err(|error| TemplateError {
        line: error.line().and_then(|line| u32::try_from(line).ok()).unwrap_or(0),
        reason: error.kind().to_string(),
    })
}

// === impl TemplateError ===

impl TemplateError {
    pub(super) fn of(error: &minijinja::Error) -> Self {
        let reason = match (error.kind(), error.detail()) {
            (ErrorKind::OutOfFuel, _) => "takes too long to render".to_owned(),
            (ErrorKind::WriteFailure, _) => "renders to more than 64 KiB".to_owned(),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        Self { line: error.line().and_then(|line| u32::try_from(line).ok()).unwrap_or(0), reason }
    }
}

// === impl Output ===

impl io::Write for Output {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if self.0.len() + octets.len() > MOST_OUTPUT {
            return Err(io::Error::other("too much output"));
        }
        self.0.extend_from_slice(octets);
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
