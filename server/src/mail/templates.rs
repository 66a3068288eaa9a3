//! The texts of mails: a default for each, in which an App may put its own in place.

use std::{collections::BTreeMap, fmt::Write as _, io, sync::LazyLock};

use minijinja::{AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, Value, context, escape_formatter};
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
    env.set_formatter(write_value);
    env.set_fuel(Some(FUEL));
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

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "<script>alert(\"1\")</script>\r\nBcc: victim@example.com\u{2028}'&";

    const SAMPLE: Values<'static> = Values {
        app: "The Shop",
        name: "Ada",
        code: "ABCDE-01XYZ",
        url: "https://shop.example.com/c?code=ABCDE-01XYZ&email=a%40b.example",
        registered_at: "1 February 2026, 09:30 UTC",
        expires_at: "2 February 2026, 10:31 UTC",
    };

    fn with(own: &[(&str, &str)]) -> Templates {
        let own = own.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned())).collect();
        Templates::new("shop", &own)
    }

    fn rendered(own: &[(&str, &str)], kind: MailKind, values: Values<'_>) -> Rendered {
        with(own).render("shop", kind, values).unwrap()
    }

    fn has_code(kind: MailKind) -> bool {
        match kind {
            MailKind::Confirm | MailKind::Reset => true,
            MailKind::AccountExists | MailKind::PasswordChanged | MailKind::AddressChanged | MailKind::NewSignIn => {
                false
            }
        }
    }

    #[test]
    fn every_default_renders_in_all_three_places() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, SAMPLE);
            assert!(mail.subject.contains("The Shop"), "{kind:?}: {}", mail.subject);
            for body in [&mail.text, &mail.html] {
                assert!(body.contains("Hello Ada,"), "{kind:?}: {body}");
                assert!(body.contains(SAMPLE.registered_at), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.code), has_code(kind), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.expires_at), has_code(kind), "{kind:?}: {body}");
            }
            assert_eq!(mail.text.contains(SAMPLE.url), has_code(kind), "{kind:?}: {}", mail.text);
            let link = format!("href=\"{}\"", SAMPLE.url.replace('&', "&amp;"));
            assert_eq!(mail.html.contains(&link), has_code(kind), "{kind:?}: {}", mail.html);
            for external in ["src=", "http://", "url(", "<link", "<script"] {
                assert!(!mail.html.contains(external), "{kind:?} loads from outside: {external}");
            }
        }
    }

    #[test]
    fn every_default_renders_for_an_unverified_address_without_a_page() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, Values { name: "", url: "", ..SAMPLE });
            for body in [&mail.text, &mail.html] {
                assert!(body.contains("Hello,"), "{kind:?}: {body}");
                assert!(!body.contains("https://"), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.code), has_code(kind), "{kind:?}: {body}");
            }
        }
    }

    #[test]
    fn every_default_passes_the_check_that_an_apps_own_must_pass() {
        for (name, source) in DEFAULTS {
            assert_eq!(check(name, source), Ok(()), "{name}");
        }
    }

    #[test]
    fn what_people_wrote_is_escaped_in_html_and_breaks_no_line() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, Values { app: HOSTILE, name: HOSTILE, ..SAMPLE });
            assert!(!mail.html.contains("<script"), "{}", mail.html);
            assert!(
                mail.html
                    .contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; Bcc: victim@example.com &#39;&amp;"),
                "{}",
                mail.html
            );
            assert!(mail.text.contains("<script>alert(\"1\")</script> Bcc: victim@example.com '&"), "{}", mail.text);
            assert!(!mail.subject.contains(|c: char| c.is_control() || c == '\u{2028}'), "{:?}", mail.subject);
            assert!(!mail.text.contains("\nBcc"), "{}", mail.text);
        }
    }

    #[test]
    fn a_subject_is_one_line_of_bounded_length_and_never_empty() {
        let subject = |source: &str| rendered(&[("reset.subject", source)], MailKind::Reset, SAMPLE).subject;
        assert_eq!(subject("a\r\nBcc: b@example.com\n\n c\t\u{85}d\u{0}"), "a Bcc: b@example.com c d");
        assert_eq!(subject(&"ä".repeat(500)).chars().count(), 200);
        assert_eq!(subject(" {% if not app %}x{% endif %}\n"), "Set a new password for The Shop");
    }

    #[test]
    fn an_apps_own_template_stands_in_for_the_default() {
        let own = [("confirm.txt", "Code: {{ code }} for {{ name|default('you', true) }}"), ("confirm.subject", "Hi")];
        let mail = rendered(&own, MailKind::Confirm, Values { name: "", ..SAMPLE });
        assert_eq!((mail.subject.as_str(), mail.text.as_str()), ("Hi", "Code: ABCDE-01XYZ for you"));
        assert!(mail.html.contains("<h1"), "{}", mail.html);
        assert!(rendered(&own, MailKind::Reset, SAMPLE).subject.starts_with("Set a new password"));
    }

    #[test]
    fn an_apps_own_html_may_fill_the_layout_and_is_escaped() {
        let own = [("reset.html", "{% extends \"layout.html\" %}{% block content %}<p>{{ name }}</p>{% endblock %}")];
        let mail = rendered(&own, MailKind::Reset, Values { name: "<b>", ..SAMPLE });
        assert!(mail.html.contains("<p>&lt;b&gt;</p>") && mail.html.contains("</html>"), "{}", mail.html);
    }

    #[test]
    fn a_template_that_cannot_be_used_leaves_the_default() {
        for bad in ["{{ code", "{{ nothing }}", "{{ app ~ app }}"] {
            let mail = rendered(&[("confirm.txt", bad)], MailKind::Confirm, SAMPLE);
            assert!(mail.text.contains("Hello Ada,"), "{bad}: {}", mail.text);
        }
    }

    #[test]
    fn a_template_that_fails_only_when_sent_falls_back_to_the_default() {
        let own = "{{ name }}".repeat(2_000);
        assert_eq!(check("reset.txt", &own), Ok(()));
        let name = "n".repeat(200);
        let mail = rendered(&[("reset.txt", &own)], MailKind::Reset, Values { name: &name, ..SAMPLE });
        assert!(mail.text.starts_with("Hello nnn"), "{}", &mail.text[..40]);
    }

    #[test]
    fn output_and_work_are_limited() {
        let much = format!("a{}", "\n{{ app }}".repeat(5_000));
        assert_eq!(check("reset.txt", &"x".repeat(MOST_OUTPUT)), Ok(()));
        let refused = check("reset.txt", &"x".repeat(MOST_OUTPUT + 1)).unwrap_err();
        assert_eq!(refused.reason, "renders to more than 64 KiB");
        assert_eq!(check("reset.txt", &much), Ok(()));
        let refused = check("reset.txt", &"{% if app %}{% endif %}".repeat(30_000)).unwrap_err();
        assert_eq!(refused.reason, "takes too long to render");
    }

    #[test]
    fn a_check_tells_line_and_reason() {
        let refused = |name, source| check(name, source).unwrap_err().to_string();
        assert_eq!(
            refused("confirm.txt", "Hello\n{{ nmae }}"),
            "line 2: there is no variable nmae; there are app, name, code, url, registered_at, expires_at"
        );
        assert!(refused("confirm.html", "{% if app %}").starts_with("line 1: syntax error"));
        assert!(refused("welcome.txt", "x").starts_with("line 0: is not the name of a template"));
        assert!(refused("layout.html", "x").starts_with("line 0: is not the name of a template"));
        assert_eq!(refused("confirm.subject", " \n"), "line 0: renders to an empty subject");
    }
}
