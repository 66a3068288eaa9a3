//! Email templates: the checks that the operator makes before it publishes them, and the renderer for the servers.

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

/// The only template that `{% extends %}` can name: the layout of the default mails.
pub const LAYOUT: &str = "layout.html";
/// The variables of templates. Every mail has all of them.
pub const VARIABLES: [&str; 6] = ["app", "name", "code", "url", "registered_at", "expires_at"];
/// Maximum size of one rendered part, in bytes.
pub const MAX_RENDERED_SIZE: usize = 64 * 1024;

/// Maximum number of instructions in one rendering. The largest default template needs a fiftieth of this number.
const FUEL: u64 = 50_000;
/// MiniJinja's recursion limit, for the template and the layout together. Without the layout, a checked template needs
/// at most [`bounds::MAX_DEPTH`].
const MAX_RECURSION: usize = 2 * bounds::MAX_DEPTH;
const LAYOUT_SOURCE: &str = include_str!("templates/layout.html");

/// The mails that have templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailTemplate {
    Confirm,
    Reset,
    Invitation,
    AccountExists,
    PasswordChanged,
    AddressChanging,
    AddressChanged,
    NewSignIn,
}

/// A part of a mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailPart {
    Subject,
    Text,
    Html,
}

/// The values of the variables. If a variable does not apply to a mail, its value is empty.
#[derive(Clone, Copy, Debug)]
pub struct TemplateValues<'a> {
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
    /// The line with the error. `None` if the error belongs to no line.
    pub line: Option<u32>,
    pub reason: String,
}

/// Checked templates, ready to be rendered.
pub struct TemplateSet {
    env: Environment<'static>,
    tokens: usize,
}

/// Collects output up to [`MAX_RENDERED_SIZE`].
#[derive(Default)]
struct Output(Vec<u8>);

/// Checks a template with the name `<mail>.subject`, `<mail>.txt` or `<mail>.html`: its bounds, its syntax, the
/// permitted constructs, and its rendering with every combination of empty and non-empty values that its mail can have.
/// Takes bounded time and memory for any source, and does not panic.
pub fn check(name: &str, source: &str) -> Result<(), TemplateError> {
    check_and_count_tokens(name, source).map(drop)
}

/// Does the same as [`check`], and returns the number of tokens.
fn check_and_count_tokens(name: &str, source: &str) -> Result<usize, TemplateError> {
    let Some((mail, part)) = parse_name(name) else {
        let mails = MailTemplate::ALL.map(MailTemplate::as_str).join(", ");
        let reason =
            format!("is not a template's name; use <mail>.subject, <mail>.txt or <mail>.html with {mails} as <mail>");
        return Err(TemplateError { line: None, reason });
    };
    let tokens = bounds::check(source, part)?;
    catch_panic(|| check_bounded(name, source, mail, part))?;
    Ok(tokens)
}

/// Runs the steps of [`check`] after [`bounds::check`] has accepted the source.
fn check_bounded(name: &str, source: &str, mail: MailTemplate, part: MailPart) -> Result<(), TemplateError> {
    sandbox::check(source, part)?;
    let mut env = environment();
    // The detail of an error can quote values. Here this reveals nothing, because all values are samples.
    let template_error = |error| TemplateError::new(&error, error.detail());
    env.add_template(name, source).map_err(template_error)?;
    for values in mail.sample_values() {
        let output = render(&env, name, values).map_err(template_error)?;
        match part {
            MailPart::Subject if !is_one_line(&output) => {
                let reason = "must render to one line that is not empty".to_owned();
                return Err(TemplateError { line: Some(1), reason });
            }
            MailPart::Subject | MailPart::Text | MailPart::Html => {}
        }
    }
    Ok(())
}

#[cfg(not(panic = "unwind"))]
compile_error!("panics must unwind: a panic on one template must not end the process");

/// Turns a panic of the engine into an error of the template.
fn catch_panic<T>(step: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    // Unwind-safe: between two templates the engine keeps only buffers, which it clears.
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
        let reason = "the template engine panicked; this is a bug, please report it".to_owned();
        Err(TemplateError { line: None, reason })
    })
}

fn error_at<T>(span: Span, reason: &str) -> Result<T, TemplateError> {
    Err(TemplateError { line: Some(span.start_line.into()), reason: reason.to_owned() })
}

/// Replaces white space and control characters, including line and paragraph separators, with single spaces.
pub fn to_one_line(text: &str) -> String {
    let is_break = |c: char| c.is_whitespace() || c.is_control();
    text.split(is_break).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn is_one_line(text: &str) -> bool {
    let is_break = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    !text.trim().is_empty() && !text.trim().contains(is_break)
}

fn parse_name(name: &str) -> Option<(MailTemplate, MailPart)> {
    let (mail, part) = name.split_once('.')?;
    let mail = MailTemplate::ALL.into_iter().find(|known| known.as_str() == mail)?;
    let part = MailPart::ALL.into_iter().find(|known| known.as_str() == part)?;
    Some((mail, part))
}

fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|name| if name.ends_with(".html") { AutoEscape::Html } else { AutoEscape::None });
    env.set_formatter(write_value);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(MAX_RECURSION);
    sandbox::add_filters(&mut env);
    env.add_template(LAYOUT, LAYOUT_SOURCE).expect("the layout is valid");
    env
}

/// Escapes HTML like MiniJinja, but leaves `/` as it is, because spam filters suspect links with character references.
pub fn write_value(
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

fn render(env: &Environment<'_>, name: &str, values: TemplateValues<'_>) -> Result<String, minijinja::Error> {
    // Line breaks in values become spaces, so that no value starts a new line in the text part or in the subject.
    let value = |text: &str| Value::from(to_one_line(text));
    let TemplateValues { app, name: user, code, url, registered_at, expires_at } = values;
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

// === impl MailTemplate ===

impl MailTemplate {
    pub const ALL: [Self; 8] = [
        Self::Confirm,
        Self::Reset,
        Self::Invitation,
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
            Self::Invitation => "invitation",
            Self::AccountExists => "account-exists",
            Self::PasswordChanged => "password-changed",
            Self::AddressChanging => "address-changing",
            Self::AddressChanged => "address-changed",
            Self::NewSignIn => "new-sign-in",
        }
    }

    /// Returns the name of the template of a part.
    pub fn template_name(self, part: MailPart) -> String {
        format!("{}.{}", self.as_str(), part.as_str())
    }

    /// Whether the mail contains a code. In other mails `code`, `url` and `expires_at` are empty.
    pub const fn has_code(self) -> bool {
        match self {
            Self::Confirm | Self::Reset | Self::Invitation => true,
            Self::AccountExists
            | Self::PasswordChanged
            | Self::AddressChanging
            | Self::AddressChanged
            | Self::NewSignIn => false,
        }
    }

    /// Returns all combinations of empty and non-empty values that the mail can have. `name` is empty if the email
    /// address is not verified. `url` is empty if the App sets no URL.
    fn sample_values(self) -> Vec<TemplateValues<'static>> {
        let full = TemplateValues {
            app: "The Shop",
            name: "Ada <Lovelace> & \"Byron\"",
            code: "7K3QX-9M2PT",
            url: "https://shop.example.com/?code=7K3QX-9M2PT&email=ada%40example.com",
            registered_at: "1 February 2026, 09:30 UTC",
            expires_at: "2 February 2026, 09:30 UTC",
        };
        if self.has_code() {
            let with_name = [full, TemplateValues { name: "", ..full }];
            with_name.into_iter().flat_map(|values| [values, TemplateValues { url: "", ..values }]).collect()
        } else {
            let no_code = TemplateValues { code: "", url: "", expires_at: "", ..full };
            vec![no_code, TemplateValues { name: "", ..no_code }]
        }
    }
}

// === impl MailPart ===

impl MailPart {
    pub const ALL: [Self; 3] = [Self::Subject, Self::Text, Self::Html];

    /// Returns the suffix in the name of a template.
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
            (ErrorKind::OutOfFuel, _) => "needs too many steps; simplify it".to_owned(),
            // The only writer that can fail is `Output`, at its limit.
            (ErrorKind::WriteFailure, _) => {
                format!("renders to more than {} KiB; shorten it", MAX_RENDERED_SIZE / 1024)
            }
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
    /// Adds a template. Fails if it does not pass [`check`] or if all templates together have too many tokens.
    pub fn add(&mut self, name: &str, source: &str) -> Result<(), TemplateError> {
        let tokens = self.tokens + check_and_count_tokens(name, source)?;
        if tokens > bounds::MAX_TOKENS {
            return Err(TemplateError { line: None, reason: bounds::too_many_tokens() });
        }
        self.env
            .add_template_owned(name.to_owned(), source.to_owned())
            .map_err(|error| TemplateError::new(&error, error.detail()))?;
        self.tokens = tokens;
        Ok(())
    }

    pub fn contains(&self, mail: MailTemplate, part: MailPart) -> bool {
        self.env.get_template(&mail.template_name(part)).is_ok()
    }

    /// Renders a part of a mail. Errors quote no values, so they can be logged.
    pub fn render(
        &self,
        mail: MailTemplate,
        part: MailPart,
        values: TemplateValues<'_>,
    ) -> Result<String, TemplateError> {
        let rendered = || render(&self.env, &mail.template_name(part), values);
        catch_panic(|| rendered().map_err(|error| TemplateError::new(&error, None)))
    }
}

// === impl Output ===

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED_SIZE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_templates_pass_and_invalid_ones_are_refused() {
        for (name, source) in samples::valid_templates() {
            assert_eq!(check(name, &source), Ok(()), "{name}: {source:.80}");
        }
        for samples::InvalidTemplate { name, source, line, reason } in samples::invalid_templates() {
            let refused = check(name, &source).expect_err(&source);
            assert_eq!(refused.line, line, "{name}: {source:.80}: {refused}");
            assert!(refused.reason.contains(reason), "{name}: {source:.80}: {refused}");
        }
    }

    #[test]
    fn every_part_of_every_mail_has_every_variable() {
        for mail in MailTemplate::ALL {
            for part in MailPart::ALL {
                for variable in VARIABLES {
                    let source = format!("Hello {{{{ {variable} | title }}}}");
                    assert_eq!(check(&mail.template_name(part), &source), Ok(()), "{mail:?} {part:?} {variable}");
                }
            }
        }
    }

    #[test]
    fn a_subject_that_can_be_empty_is_refused() {
        for mail in MailTemplate::ALL {
            for (variable, is_never_empty) in [
                ("app", true),
                ("registered_at", true),
                ("code", mail.has_code()),
                ("expires_at", mail.has_code()),
                ("name", false),
                ("url", false),
            ] {
                let source = format!("{{{{ {variable} }}}}");
                let checked = check(&mail.template_name(MailPart::Subject), &source);
                assert_eq!(checked.is_ok(), is_never_empty, "{mail:?} {variable}: {checked:?}");
            }
        }
    }

    #[test]
    fn render_errors_quote_no_values() {
        let mut set = TemplateSet::default();
        set.add("reset.txt", &"\n{{ name }}".repeat(2_000)).unwrap();
        assert!(
            set.contains(MailTemplate::Reset, MailPart::Text) && !set.contains(MailTemplate::Reset, MailPart::Html)
        );
        let name = "hush".repeat(50);
        let values = TemplateValues { name: &name, ..MailTemplate::Reset.sample_values()[0] };
        let error = set.render(MailTemplate::Reset, MailPart::Text, values).unwrap_err();
        assert_eq!(error.reason, "renders to more than 64 KiB; shorten it");
        let missing = set.render(MailTemplate::Reset, MailPart::Html, values).unwrap_err();
        assert_eq!(missing.reason, "template not found");
    }

    #[test]
    fn a_refused_template_is_not_added() {
        let mut set = TemplateSet::default();
        set.add("confirm.subject", "{{ cod }}").unwrap_err();
        assert!(!set.contains(MailTemplate::Confirm, MailPart::Subject));
    }

    /// A quarter of the stack of a Tokio thread. For the bombs, a debug build needs 300 to 400 KiB.
    const STACK_BYTES: usize = 512 * 1024;

    #[test]
    fn a_bomb_is_refused_or_rendered_in_time_on_a_small_stack() {
        let bombs = bombs::bombs();
        assert!(bombs.len() >= 24);
        let test = move || {
            for bombs::Bomb { name: bomb, template, source, refusal } in bombs {
                let began = std::time::Instant::now();
                let checked = check(template, &source);
                let took = began.elapsed();
                assert!(took < bombs::LIMIT, "{bomb}: {took:?}");
                match (&checked, refusal) {
                    (Ok(()), None) => {}
                    (Err(refused), Some(refusal)) if refused.reason.contains(refusal) => {}
                    _ => panic!("{bomb}: {checked:?}, not {refusal:?}"),
                }
            }
        };
        // The thread has a small stack. If a bomb needed more, the stack would overflow, and the test process would
        // abort.
        std::thread::Builder::new().stack_size(STACK_BYTES).spawn(test).unwrap().join().unwrap();
    }

    #[test]
    fn the_bound_on_tokens_applies_to_all_templates_of_an_app_together() {
        let mut set = TemplateSet::default();
        let source = "\n{{ app }}".repeat(4_000);
        set.add("confirm.txt", &source).unwrap();
        let refused = set.add("reset.txt", &source).unwrap_err();
        assert_eq!((refused.line, refused.reason), (None, bounds::too_many_tokens()));
        assert!(!set.contains(MailTemplate::Reset, MailPart::Text));
        set.add("reset.txt", "{{ code }}").unwrap();
    }

    #[test]
    fn an_error_contains_its_line() {
        assert_eq!(
            check("confirm.txt", "Hello\n{{ nmae }}").unwrap_err().to_string(),
            "line 2: there is no variable nmae; there are app, name, code, url, registered_at, expires_at"
        );
        assert_eq!(
            check("welcome.txt", "x").unwrap_err().to_string(),
            "is not a template's name; use <mail>.subject, <mail>.txt or <mail>.html with confirm, reset, \
             invitation, account-exists, password-changed, address-changing, address-changed, new-sign-in as <mail>"
        );
    }
}
