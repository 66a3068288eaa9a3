//! The texts of mails: default templates, which an App can replace with its own templates.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use latchkey_crds::templates::{MailPart, MailTemplate, TemplateError, TemplateSet, TemplateValues, to_one_line};
use tracing::warn;

use crate::domain::mail::MailKind;

/// Maximum characters of a subject. RFC 5322, section 2.1.1 allows lines of 998 characters, but no mail client shows
/// more than 200 of a subject.
const MAX_SUBJECT_CHARS: usize = 200;

macro_rules! defaults {
    ($($name:literal),* $(,)?) => {
        [$(
            (concat!($name, ".subject"), include_str!(concat!("templates/", $name, ".subject"))),
            (concat!($name, ".txt"), include_str!(concat!("templates/", $name, ".txt"))),
            (concat!($name, ".html"), include_str!(concat!("templates/", $name, ".html"))),
        )*]
    };
}

const DEFAULTS: [(&str, &str); 24] = defaults![
    "confirm",
    "reset",
    "invitation",
    "account-exists",
    "password-changed",
    "address-changing",
    "address-changed",
    "new-sign-in",
];

static BUILT_IN: LazyLock<TemplateSet> = LazyLock::new(|| {
    let mut set = TemplateSet::default();
    for (name, source) in DEFAULTS {
        set.add(name, source).expect("the default templates are tested");
    }
    set
});

/// The three parts of a mail.
#[derive(Clone, Debug)]
pub(super) struct MailContent {
    pub(super) subject: String,
    pub(super) text: String,
    pub(super) html: String,
}

/// The templates of one App.
pub(super) struct AppTemplates {
    own: TemplateSet,
}

/// The template of a kind of mail.
const fn template_of(kind: MailKind) -> MailTemplate {
    match kind {
        MailKind::Confirm => MailTemplate::Confirm,
        MailKind::Reset => MailTemplate::Reset,
        MailKind::Invitation => MailTemplate::Invitation,
        MailKind::AccountExists => MailTemplate::AccountExists,
        MailKind::PasswordChanged => MailTemplate::PasswordChanged,
        MailKind::AddressChanging => MailTemplate::AddressChanging,
        MailKind::AddressChanged => MailTemplate::AddressChanged,
        MailKind::NewSignIn => MailTemplate::NewSignIn,
    }
}

// === impl AppTemplates ===

impl AppTemplates {
    /// Compiles the templates of an App. An invalid template is logged, and the default is used instead.
    pub(super) fn new(app: &str, own: &BTreeMap<String, Arc<String>>) -> Self {
        let mut set = TemplateSet::default();
        for (name, source) in own {
            if let Err(TemplateError { line, reason }) = set.add(name, source) {
                warn!(app, template = name, line, reason, "a mail template is invalid; the default is used");
            }
        }
        Self { own: set }
    }

    pub(super) fn render(
        &self,
        app: &str,
        kind: MailKind,
        values: TemplateValues<'_>,
    ) -> Result<MailContent, TemplateError> {
        let mail = template_of(kind);
        let subject = |text: String| {
            let start: String = to_one_line(&text).chars().take(MAX_SUBJECT_CHARS).collect();
            start.trim_end().to_owned()
        };
        let mut subject_line = subject(self.render_part(app, mail, MailPart::Subject, values)?);
        if subject_line.is_empty() {
            subject_line = subject(BUILT_IN.render(mail, MailPart::Subject, values)?);
        }
        Ok(MailContent {
            subject: subject_line,
            text: self.render_part(app, mail, MailPart::Text, values)?,
            html: self.render_part(app, mail, MailPart::Html, values)?,
        })
    }

    fn render_part(
        &self,
        app: &str,
        mail: MailTemplate,
        part: MailPart,
        values: TemplateValues<'_>,
    ) -> Result<String, TemplateError> {
        if self.own.contains(mail, part) {
            match self.own.render(mail, part, values) {
                Ok(text) => return Ok(text),
                Err(TemplateError { line, reason }) => {
                    let template = mail.template_name(part);
                    warn!(app, template, line, reason, "a mail template failed; the default is used");
                }
            }
        }
        BUILT_IN.render(mail, part, values)
    }
}

#[cfg(test)]
#[path = "../../../crds/src/templates/bombs.rs"]
mod bombs;
#[cfg(test)]
#[path = "../../../crds/src/templates/samples.rs"]
mod sample_templates;

#[cfg(test)]
mod tests {
    use latchkey_crds::templates::check;

    use super::*;

    const HOSTILE: &str = "<script>alert(\"1\")</script>\r\nBcc: victim@example.com\u{2028}'&";

    const SAMPLE: TemplateValues<'static> = TemplateValues {
        app: "The Shop",
        name: "Ada",
        code: "ABCDE-01XYZ",
        url: "https://shop.example.com/c?code=ABCDE-01XYZ&email=a%40b.example",
        registered_at: "1 February 2026, 09:30 UTC",
        expires_at: "2 February 2026, 10:31 UTC",
    };

    fn app_templates(own: &[(&str, &str)]) -> AppTemplates {
        let own = own.iter().map(|(name, source)| ((*name).to_owned(), Arc::new((*source).to_owned()))).collect();
        AppTemplates::new("shop", &own)
    }

    fn rendered(own: &[(&str, &str)], kind: MailKind, values: TemplateValues<'_>) -> MailContent {
        app_templates(own).render("shop", kind, values).unwrap()
    }

    #[test]
    fn every_default_renders_all_three_parts() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, SAMPLE);
            assert!(mail.subject.contains("The Shop"), "{kind:?}: {}", mail.subject);
            for body in [&mail.text, &mail.html] {
                assert!(body.contains("Hello Ada,"), "{kind:?}: {body}");
                assert!(body.contains(SAMPLE.registered_at), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.code), template_of(kind).has_code(), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.expires_at), template_of(kind).has_code(), "{kind:?}: {body}");
            }
            assert_eq!(mail.text.contains(SAMPLE.url), template_of(kind).has_code(), "{kind:?}: {}", mail.text);
            let link = format!("href=\"{}\"", SAMPLE.url.replace('&', "&amp;"));
            assert_eq!(mail.html.contains(&link), template_of(kind).has_code(), "{kind:?}: {}", mail.html);
            for external in ["src=", "http://", "url(", "<link", "<script"] {
                assert!(!mail.html.contains(external), "{kind:?} loads from outside: {external}");
            }
        }
    }

    #[test]
    fn every_default_renders_without_a_name_or_a_link() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, TemplateValues { name: "", url: "", ..SAMPLE });
            for body in [&mail.text, &mail.html] {
                assert!(body.contains("Hello,"), "{kind:?}: {body}");
                assert!(!body.contains("https://"), "{kind:?}: {body}");
                assert_eq!(body.contains(SAMPLE.code), template_of(kind).has_code(), "{kind:?}: {body}");
            }
        }
    }

    #[test]
    fn every_default_passes_the_check_of_an_apps_own_templates() {
        for (name, source) in DEFAULTS {
            assert_eq!(check(name, source), Ok(()), "{name}");
        }
    }

    #[test]
    fn user_input_is_escaped_in_html_and_adds_no_line() {
        for kind in MailKind::ALL {
            let mail = rendered(&[], kind, TemplateValues { app: HOSTILE, name: HOSTILE, ..SAMPLE });
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
        let subject = |source: &str, values| rendered(&[("reset.subject", source)], MailKind::Reset, values).subject;
        let default = "Set a new password for The Shop";
        assert_eq!(subject("{{ name }} of\t{{ app }}", SAMPLE), default, "a control character");
        let hostile = TemplateValues { name: "a\r\nBcc: b@example.com\n\n c\t\u{85}d\u{0}", ..SAMPLE };
        assert_eq!(subject(" Hi {{ name }}\n", hostile), "Hi a Bcc: b@example.com c d");
        assert_eq!(subject(&"ä".repeat(500), SAMPLE).chars().count(), 200);
        assert_eq!(subject("{% if app == 'The Shop' %}x{% endif %}", SAMPLE), "x");
        assert_eq!(
            subject("{% if app == 'The Shop' %}x{% endif %}", TemplateValues { app: "Other", ..SAMPLE }),
            "Set a new password for Other"
        );
    }

    #[test]
    fn an_apps_own_template_replaces_the_default() {
        let own = [("confirm.txt", "Code: {{ code }} for {{ name|default('you', true) }}"), ("confirm.subject", "Hi")];
        let mail = rendered(&own, MailKind::Confirm, TemplateValues { name: "", ..SAMPLE });
        assert_eq!((mail.subject.as_str(), mail.text.as_str()), ("Hi", "Code: ABCDE-01XYZ for you"));
        assert!(mail.html.contains("<h1"), "{}", mail.html);
        assert!(rendered(&own, MailKind::Reset, SAMPLE).subject.starts_with("Set a new password"));
    }

    #[test]
    fn an_apps_own_html_can_extend_the_layout_and_is_escaped() {
        let own = [("reset.html", "{% extends \"layout.html\" %}{% block content %}<p>{{ name }}</p>{% endblock %}")];
        let mail = rendered(&own, MailKind::Reset, TemplateValues { name: "<b>", ..SAMPLE });
        assert!(mail.html.contains("<p>&lt;b&gt;</p>") && mail.html.contains("</html>"), "{}", mail.html);
    }

    #[test]
    fn an_invalid_template_is_replaced_by_the_default() {
        for bad in ["{{ code", "{{ nothing }}", "{{ app ~ app }}"] {
            let mail = rendered(&[("confirm.txt", bad)], MailKind::Confirm, SAMPLE);
            assert!(mail.text.contains("Hello Ada,"), "{bad}: {}", mail.text);
        }
    }

    #[test]
    fn a_template_that_fails_only_with_the_real_values_is_replaced_by_the_default() {
        let own = "{{ name }}".repeat(2_000);
        assert_eq!(check("reset.txt", &own), Ok(()));
        let name = "n".repeat(200);
        let mail = rendered(&[("reset.txt", &own)], MailKind::Reset, TemplateValues { name: &name, ..SAMPLE });
        assert!(mail.text.starts_with("Hello nnn"), "{}", &mail.text[..40]);
    }

    /// The operator's tests use the same samples. So the server accepts exactly the templates that the operator
    /// publishes.
    #[test]
    fn templates_that_the_operator_publishes_are_accepted_and_no_others() {
        let accepted = |name: &str, source: &str| {
            let own = app_templates(&[(name, source)]).own;
            let parts = MailTemplate::ALL.into_iter().flat_map(|mail| MailPart::ALL.map(|part| (mail, part)));
            parts
                .filter(|(mail, part)| own.contains(*mail, *part))
                .map(|(mail, part)| mail.template_name(part))
                .collect::<Vec<_>>()
        };
        for (name, source) in sample_templates::valid_templates() {
            assert_eq!(accepted(name, &source), [name], "{source:.80}");
        }
        for sample_templates::InvalidTemplate { name, source, line, reason } in sample_templates::invalid_templates() {
            assert_eq!(accepted(name, &source), Vec::<String>::new(), "{name}: {source:.80}");
            let error = check(name, &source).expect_err(&source);
            assert_eq!((error.line, error.reason.contains(reason)), (line, true), "{name}: {error}");
        }
    }

    #[test]
    fn a_template_bomb_is_replaced_by_the_default_or_rendered_in_time() {
        for bombs::Bomb { name, template, source, refusal } in bombs::bombs() {
            let started = std::time::Instant::now();
            let mail = rendered(&[(template, &source)], MailKind::Confirm, SAMPLE);
            let took = started.elapsed();
            assert!(took < bombs::LIMIT, "{name}: {took:?}");
            let default = rendered(&[], MailKind::Confirm, SAMPLE);
            let is_default = (mail.text, mail.html) == (default.text, default.html);
            assert_eq!(is_default, refusal.is_some(), "{name}");
        }
    }

    #[test]
    fn a_mail_kind_and_its_templates_have_the_same_name() {
        assert_eq!(MailKind::ALL.map(template_of), MailTemplate::ALL);
        assert_eq!(MailKind::ALL.map(MailKind::as_str), MailTemplate::ALL.map(MailTemplate::as_str));
    }
}
