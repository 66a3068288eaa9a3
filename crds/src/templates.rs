//! The rules for mail templates, by which the operator publishes and the servers render.

use std::{
    fmt::Write as _,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

use minijinja::{
    AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, Value, context, escape_formatter, machinery::Span,
};

#[cfg(test)]
mod bombs;
mod bounds;
#[cfg(test)]
mod samples;
mod sandbox;

/// What `{% extends %}` may name: the frame of the default mails.
pub const LAYOUT: &str = "layout.html";
/// What templates may use. All are there in every mail.
pub const VARIABLES: [&str; 6] = ["app", "name", "code", "url", "registered_at", "expires_at"];
/// Octets of one rendered part.
pub const MAX_OUTPUT: usize = 64 * 1024;

/// Instructions of one rendering; the largest default takes a fiftieth.
const FUEL: u64 = 50_000;
/// Blocks within blocks, of the template and of the layout: what has passed its check has no more than [`bounds`] allows.
const MAX_CALLS: usize = 2 * bounds::MAX_DEPTH;
const LAYOUT_SOURCE: &str = include_str!("templates/layout.html");

/// The mails that have templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mail {
    Confirm,
    Reset,
    AccountExists,
    PasswordChanged,
    AddressChanging,
    AddressChanged,
    NewSignIn,
}

/// A part of a mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Subject,
    Text,
    Html,
}

/// What a template may show. A value that does not apply is empty.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    pub app: &'a str,
    pub name: &'a str,
    pub code: &'a str,
    pub url: &'a str,
    pub registered_at: &'a str,
    pub expires_at: &'a str,
}

/// A template that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", line.map(|line| format!("line {line}: ")).unwrap_or_default())]
pub struct TemplateError {
    /// None where no line is to blame.
    pub line: Option<u32>,
    pub reason: String,
}

/// Templates that passed their check, ready to be rendered.
pub struct TemplateSet {
    env: Environment<'static>,
    tokens: usize,
}

/// Collects output up to a limit.
#[derive(Default)]
struct Output(Vec<u8>);

/// Whether a template of this name, `<mail>.subject`, `<mail>.txt` or `<mail>.html`, can be used: it is held against the
/// bounds, parsed, held against what templates may do, and rendered with every set of values, filled in or empty, that its
/// mail can have. Takes a bounded time and memory for any source, and does not panic.
pub fn check(name: &str, source: &str) -> Result<(), TemplateError> {
    count_and_check(name, source).map(drop)
}

/// Returns the number of tokens.
fn count_and_check(name: &str, source: &str) -> Result<usize, TemplateError> {
    let Some((mail, part)) = parse_name(name) else {
        let mails = Mail::ALL.map(Mail::as_str).join(", ");
        let reason =
            format!("is not a template's name; use <mail>.subject, <mail>.txt or <mail>.html with {mails} as <mail>");
        return Err(TemplateError { line: None, reason });
    };
    let tokens = bounds::check(source, part)?;
    unpanicked(|| check_bounded(name, source, mail, part))?;
    Ok(tokens)
}

/// The steps of [`check`] that need a bounded source.
fn check_bounded(name: &str, source: &str, mail: Mail, part: Part) -> Result<(), TemplateError> {
    sandbox::check(source, part)?;
    let mut env = environment();
    // Nothing but sample values is there to be quoted.
    let told = |error| TemplateError::new(&error, error.detail());
    env.add_template(name, source).map_err(told)?;
    for values in mail.samples() {
        let output = render(&env, name, values).map_err(told)?;
        match part {
            Part::Subject if !is_one_line(&output) => {
                let reason = "must make one line that is not empty".to_owned();
                return Err(TemplateError { line: Some(1), reason });
            }
            Part::Subject | Part::Text | Part::Html => {}
        }
    }
    Ok(())
}

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must unwind: it is the fault of one template, not of the process");

/// A template on which the engine panics cannot be used. Nothing else is affected.
fn unpanicked<T>(step: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    // The engine keeps nothing between two templates but buffers, which it clears.
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
        let reason = "the template engine failed on it, which is a bug; please report it".to_owned();
        Err(TemplateError { line: None, reason })
    })
}

fn refuse<T>(span: Span, reason: &str) -> Result<T, TemplateError> {
    Err(TemplateError { line: Some(span.start_line.into()), reason: reason.to_owned() })
}

/// White space and control characters, the line and paragraph separators among them, become single spaces.
pub fn one_line(text: &str) -> String {
    let breaks = |c: char| c.is_whitespace() || c.is_control();
    text.split(breaks).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn is_one_line(text: &str) -> bool {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    !text.trim().is_empty() && !text.trim().contains(breaks)
}

fn parse_name(name: &str) -> Option<(Mail, Part)> {
    let (mail, part) = name.split_once('.')?;
    let mail = Mail::ALL.into_iter().find(|known| known.as_str() == mail)?;
    let part = Part::ALL.into_iter().find(|known| known.as_str() == part)?;
    Some((mail, part))
}

fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|name| if name.ends_with(".html") { AutoEscape::Html } else { AutoEscape::None });
    env.set_formatter(write_value);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(MAX_CALLS);
    sandbox::add_filters(&mut env);
    env.add_template(LAYOUT, LAYOUT_SOURCE).expect("the layout is tested");
    env
}

/// Escapes as MiniJinja does but leaves `/` as it is: filters of spam look askance at links in character references.
fn write_value(
    out: &mut minijinja::Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), minijinja::Error> {
    let Some(text) = value.as_str().filter(|_| *state.auto_escape() == AutoEscape::Html && !value.is_safe()) else {
        return escape_formatter(out, state, value);
    };
    for c in text.chars() {
        match c {
            '&' => out.write_str("&amp;")?,
            '<' => out.write_str("&lt;")?,
            '>' => out.write_str("&gt;")?,
            '"' => out.write_str("&quot;")?,
            '\'' => out.write_str("&#39;")?,
            other => out.write_char(other)?,
        }
    }
    Ok(())
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
    String::from_utf8(output.0).map_err(|_| minijinja::Error::new(ErrorKind::InvalidOperation, "is not UTF-8"))
}

// === impl Mail ===

impl Mail {
    pub const ALL: [Self; 7] = [
        Self::Confirm,
        Self::Reset,
        Self::AccountExists,
        Self::PasswordChanged,
        Self::AddressChanging,
        Self::AddressChanged,
        Self::NewSignIn,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirm => "confirm",
            Self::Reset => "reset",
            Self::AccountExists => "account-exists",
            Self::PasswordChanged => "password-changed",
            Self::AddressChanging => "address-changing",
            Self::AddressChanged => "address-changed",
            Self::NewSignIn => "new-sign-in",
        }
    }

    /// The name of a part's template.
    pub fn template(self, part: Part) -> String {
        format!("{}.{}", self.as_str(), part.as_str())
    }

    /// Whether it carries a code; in the others `code`, `url` and `expires_at` are empty.
    pub const fn has_code(self) -> bool {
        match self {
            Self::Confirm | Self::Reset => true,
            Self::AccountExists
            | Self::PasswordChanged
            | Self::AddressChanging
            | Self::AddressChanged
            | Self::NewSignIn => false,
        }
    }

    /// The name is empty where the address is not verified, the URL where the App names no page.
    fn samples(self) -> Vec<Values<'static>> {
        let full = Values {
            app: "The Shop",
            name: "Ada <Lovelace> & \"Byron\"",
            code: "7K3QX-9M2PT",
            url: "https://shop.example.com/?code=7K3QX-9M2PT&email=ada%40example.com",
            registered_at: "1 February 2026, 09:30 UTC",
            expires_at: "2 February 2026, 09:30 UTC",
        };
        if self.has_code() {
            let with_name = [full, Values { name: "", ..full }];
            with_name.into_iter().flat_map(|values| [values, Values { url: "", ..values }]).collect()
        } else {
            let no_code = Values { code: "", url: "", expires_at: "", ..full };
            vec![no_code, Values { name: "", ..no_code }]
        }
    }
}

// === impl Part ===

impl Part {
    pub const ALL: [Self; 3] = [Self::Subject, Self::Text, Self::Html];

    /// What follows the mail in the name of a template.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Subject => "subject",
            Self::Text => "txt",
            Self::Html => "html",
        }
    }
}

// === impl TemplateError ===

impl TemplateError {
    fn new(error: &minijinja::Error, detail: Option<&str>) -> Self {
        let reason = match (error.kind(), detail) {
            (ErrorKind::OutOfFuel, _) => "takes too many steps; make it simpler".to_owned(),
            // Of all writers only ours fails, at its limit.
            (ErrorKind::WriteFailure, _) => format!("makes more than {} KiB; shorten it", MAX_OUTPUT / 1024),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        Self { line: Some(error.line().and_then(|line| u32::try_from(line).ok()).unwrap_or(1)), reason }
    }
}

// === impl TemplateSet ===

impl Default for TemplateSet {
    fn default() -> Self {
        Self { env: environment(), tokens: 0 }
    }
}

impl TemplateSet {
    /// Takes a template in, where it passes its [`check`] and all of them together are within their bound.
    pub fn add(&mut self, name: &str, source: &str) -> Result<(), TemplateError> {
        let tokens = self.tokens + count_and_check(name, source)?;
        if tokens > bounds::MAX_TOKENS {
            return Err(TemplateError { line: None, reason: bounds::too_many_tokens() });
        }
        self.env
            .add_template_owned(name.to_owned(), source.to_owned())
            .map_err(|error| TemplateError::new(&error, error.detail()))?;
        self.tokens = tokens;
        Ok(())
    }

    pub fn has(&self, mail: Mail, part: Part) -> bool {
        self.env.get_template(&mail.template(part)).is_ok()
    }

    /// The error quotes no value, so that it can be logged.
    pub fn render(&self, mail: Mail, part: Part, values: Values<'_>) -> Result<String, TemplateError> {
        let rendered = || render(&self.env, &mail.template(part), values);
        unpanicked(|| rendered().map_err(|error| TemplateError::new(&error, None)))
    }
}

// === impl Output ===

impl io::Write for Output {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if self.0.len() + octets.len() > MAX_OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(octets);
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_samples_are_judged_as_they_say() {
        for (name, source) in samples::good() {
            assert_eq!(check(name, &source), Ok(()), "{name}: {source:.80}");
        }
        for samples::Bad { name, source, line, reason } in samples::bad() {
            let refused = check(name, &source).expect_err(&source);
            assert_eq!(refused.line, line, "{name}: {source:.80}: {refused}");
            assert!(refused.reason.contains(reason), "{name}: {source:.80}: {refused}");
        }
    }

    #[test]
    fn every_part_of_every_mail_has_every_variable() {
        for mail in Mail::ALL {
            for part in Part::ALL {
                for variable in VARIABLES {
                    let source = format!("Hello {{{{ {variable} | title }}}}");
                    assert_eq!(check(&mail.template(part), &source), Ok(()), "{mail:?} {part:?} {variable}");
                }
            }
        }
    }

    #[test]
    fn a_subject_is_there_whatever_is_empty_in_its_mail() {
        for mail in Mail::ALL {
            for (variable, always) in [
                ("app", true),
                ("registered_at", true),
                ("code", mail.has_code()),
                ("expires_at", mail.has_code()),
                ("name", false),
                ("url", false),
            ] {
                let source = format!("{{{{ {variable} }}}}");
                let checked = check(&mail.template(Part::Subject), &source);
                assert_eq!(checked.is_ok(), always, "{mail:?} {variable}: {checked:?}");
            }
        }
    }

    #[test]
    fn the_error_of_a_mail_quotes_no_value() {
        let mut set = TemplateSet::default();
        set.add("reset.txt", &"\n{{ name }}".repeat(2_000)).unwrap();
        assert!(set.has(Mail::Reset, Part::Text) && !set.has(Mail::Reset, Part::Html));
        let name = "hush".repeat(50);
        let values = Values { name: &name, ..Mail::Reset.samples()[0] };
        let error = set.render(Mail::Reset, Part::Text, values).unwrap_err();
        assert_eq!(error.reason, "makes more than 64 KiB; shorten it");
        let missing = set.render(Mail::Reset, Part::Html, values).unwrap_err();
        assert_eq!(missing.reason, "template not found");
    }

    #[test]
    fn what_is_refused_is_not_taken_in() {
        let mut set = TemplateSet::default();
        set.add("confirm.subject", "{{ cod }}").unwrap_err();
        assert!(!set.has(Mail::Confirm, Part::Subject));
    }

    /// A quarter of what a thread of Tokio has. A debug build needs 300 to 400 KiB, a release build less.
    const STACK: usize = 512 * 1024;

    #[test]
    fn a_bomb_is_refused_by_name_or_rendered_within_its_time_on_a_small_stack() {
        let bombs = bombs::bombs();
        assert!(bombs.len() >= 24);
        let test = move || {
            for bombs::Bomb { what, key, source, refusal } in bombs {
                let began = std::time::Instant::now();
                let checked = check(key, &source);
                let took = began.elapsed();
                assert!(took < bombs::LIMIT, "{what}: {took:?}");
                match (&checked, refusal) {
                    (Ok(()), None) => {}
                    (Err(refused), Some(refusal)) if refused.reason.contains(refusal) => {}
                    _ => panic!("{what}: {checked:?}, not {refusal:?}"),
                }
            }
        };
        // Beyond its stack the process ends.
        std::thread::Builder::new().stack_size(STACK).spawn(test).unwrap().join().unwrap();
    }

    #[test]
    fn all_templates_of_an_app_are_within_one_bound() {
        let mut set = TemplateSet::default();
        let source = "\n{{ app }}".repeat(4_000);
        set.add("confirm.txt", &source).unwrap();
        let refused = set.add("reset.txt", &source).unwrap_err();
        assert_eq!((refused.line, refused.reason), (None, bounds::too_many_tokens()));
        assert!(!set.has(Mail::Reset, Part::Text));
        set.add("reset.txt", "{{ code }}").unwrap();
    }

    #[test]
    fn an_error_is_told_with_its_line() {
        assert_eq!(
            check("confirm.txt", "Hello\n{{ nmae }}").unwrap_err().to_string(),
            "line 2: there is no variable nmae; there are app, name, code, url, registered_at, expires_at"
        );
        assert_eq!(
            check("welcome.txt", "x").unwrap_err().to_string(),
            "is not a template's name; use <mail>.subject, <mail>.txt or <mail>.html with confirm, reset, \
             account-exists, password-changed, address-changing, address-changed, new-sign-in as <mail>"
        );
    }
}
