//! Mail templates: with hostile values, an accepted template renders within its limits and escapes the values.

use std::time::Duration;

use latchkey_crds::templates::{MAX_RENDERED_SIZE, MailPart, MailTemplate, TemplateSet, TemplateValues, check};

use crate::{
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 64] = [
    "{{ ",
    " }}",
    "{% ",
    " %}",
    "{#",
    "#}",
    "{{ app }}",
    "{{ name }}",
    "{{ code }}",
    "{{ url }}",
    "{{ nothing }}",
    "name",
    "app",
    "code",
    "{% if name %}",
    "{% elif app %}",
    "{% else %}",
    "{% endif %}",
    "{% if ",
    "{% elif ",
    "not ",
    "-",
    "+",
    "~",
    " and ",
    " or ",
    " in ",
    " == ",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    ".",
    " if ",
    " else ",
    " | ",
    "|upper",
    "|title",
    "|default('x', true)",
    "|trim",
    "|escape",
    "|safe",
    "'",
    "\"",
    "1",
    "99999999999999999999",
    "1.5e308",
    "none",
    "true",
    "\n",
    "text ",
    "<b>",
    "é",
    "{% extends \"layout.html\" %}",
    "{% block content %}",
    "{% endblock %}",
    "{% raw %}",
    "{% endraw %}",
    "{%- ",
    " -%}",
];
/// Length of the longest template in this target, in bytes: the maximum that the operator accepts.
const MAX_SOURCE_BYTES: usize = 256 * 1024;
/// Maximum CPU time to check one template: an edit must take effect within two seconds (specification: Delivery of
/// configuration, Local files).
const MAX_CHECK_TIME: Duration = Duration::from_secs(2);
/// Maximum heap to check or render one template, in bytes.
const MAX_HEAP: u64 = 32 * 1024 * 1024;
/// A value that would add an element to HTML, or a line to a text, if it were not escaped.
const HOSTILE: &str = "<xss\"'&>\r\nBcc: victim@example.com\u{2028}";

#[test]
fn template() {
    harness::run("template", 300, |input| {
        let mut draw = Draw::new(input);
        let part = draw.pick(&MailPart::ALL);
        let mail = draw.pick(&MailTemplate::ALL);
        // Repeats some tokens many times, because parsers often fail on great depth, width or length.
        let mut long_source = String::new();
        for _ in 0..draw.byte() & 15 {
            let (token, times) = (draw.pick(&FRAGMENTS), draw.byte());
            let times = if times < 192 { 1 } else { 1_usize << (times - 192).min(17) };
            long_source.push_str(&token.repeat(times.min((MAX_SOURCE_BYTES - long_source.len()) / token.len())));
        }
        check_input(mail, part, &long_source);
        let as_expression = format!("{{{{ {long_source} }}}}");
        check_input(mail, part, &as_expression);
        for text in texts(input, &FRAGMENTS) {
            check_input(mail, part, &text);
        }
    });
}

fn check_input(mail: MailTemplate, part: MailPart, source: &str) {
    let name = mail.template_name(part);
    let max_hashes = u32::try_from(MAX_CHECK_TIME.as_micros() / harness::HASH_TIME.as_micros().max(1)).unwrap();
    let checked = harness::assert_bounded(max_hashes, MAX_HEAP, || check(&name, source));
    let mut set = TemplateSet::default();
    let added = set.add(&name, source);
    assert_eq!(added, checked, "operator and server disagree");
    assert_eq!(set.contains(mail, part), checked.is_ok());
    let Err(template_error) = checked else { return check_accepted(&set, mail, part, source) };
    assert!(template_error.reason.len() < 1024, "the reason has {} bytes", template_error.reason.len());
}

fn check_accepted(set: &TemplateSet, mail: MailTemplate, part: MailPart, source: &str) {
    let values = TemplateValues {
        app: HOSTILE,
        name: HOSTILE,
        code: "ABCDE-01XYZ",
        url: HOSTILE,
        registered_at: "now",
        expires_at: "then",
    };
    let rendered = harness::assert_bounded(20, MAX_HEAP, || set.render(mail, part, values));
    match rendered {
        Ok(text) => {
            assert!(text.len() <= MAX_RENDERED_SIZE);
            // A value cannot add a line to a text, or an element to HTML.
            assert!(
                !text.contains("\nBcc") && !text.contains('\u{2028}')
                    || source.contains("Bcc")
                    || source.contains('\u{2028}')
            );
            let is_in_source = source.to_ascii_lowercase().contains("<xss");
            assert!(part != MailPart::Html || is_in_source || !text.to_ascii_lowercase().contains("<xss"), "{text}");
        }
        Err(error) => assert!(!error.reason.contains("xss"), "the error quotes a value: {error}"),
    }
}
