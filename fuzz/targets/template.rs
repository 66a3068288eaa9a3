//! Mail templates: one that is accepted renders within its bounds for every value, and lets no value break out.

use std::time::Duration;

use latchkey_crds::templates::{MAX_OUTPUT, Mail, Part, TemplateSet, Values, check};

use crate::{
    draw::{Draw, texts},
    harness,
};

const TOKENS: [&str; 64] = [
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
/// As much as a template can be: a ConfigMap holds 1 MiB, a rendered document half of it.
const LONGEST: usize = 256 * 1024;
/// What a check of one template may cost (contract of the operator: an edit is live within two seconds).
const CHECK: Duration = Duration::from_secs(2);
const HEAP: u64 = 32 * 1024 * 1024;
const MARK: &str = "<xss\"'&>\r\nBcc: victim@example.com\u{2028}";

#[test]
fn template() {
    harness::run("template", 300, |input| {
        let mut draw = Draw::new(input);
        let part = draw.pick(&Part::ALL);
        let mail = draw.pick(&Mail::ALL);
        // Some tokens again and again: depth, width and length are what breaks parsers.
        let mut long = String::new();
        for _ in 0..draw.byte() & 15 {
            let (token, times) = (draw.pick(&TOKENS), draw.byte());
            let times = if times < 192 { 1 } else { 1_usize << (times - 192).min(17) };
            long.push_str(&token.repeat(times.min((LONGEST - long.len()) / token.len())));
        }
        judge(mail, part, &long);
        let wrapped = format!("{{{{ {long} }}}}");
        judge(mail, part, &wrapped);
        for text in texts(input, &TOKENS) {
            judge(mail, part, &text);
        }
    });
}

fn judge(mail: Mail, part: Part, source: &str) {
    let name = mail.template(part);
    let hashes = u32::try_from(CHECK.as_micros() / harness::HASH.as_micros().max(1)).unwrap();
    let checked = harness::bounded(hashes, HEAP, || check(&name, source));
    let mut set = TemplateSet::default();
    let added = set.add(&name, source);
    assert_eq!(added, checked, "operator and server judge otherwise");
    assert_eq!(set.has(mail, part), checked.is_ok());
    let Err(refused) = checked else { return accepted(&set, mail, part, source) };
    assert!(refused.reason.len() < 1024, "the reason has {} bytes", refused.reason.len());
}

fn accepted(set: &TemplateSet, mail: Mail, part: Part, source: &str) {
    let values =
        Values { app: MARK, name: MARK, code: "ABCDE-01XYZ", url: MARK, registered_at: "now", expires_at: "then" };
    let rendered = harness::bounded(20, HEAP, || set.render(mail, part, values));
    match rendered {
        Ok(text) => {
            assert!(text.len() <= MAX_OUTPUT);
            // No value makes a line, or an element in HTML.
            assert!(
                !text.contains("\nBcc") && !text.contains('\u{2028}')
                    || source.contains("Bcc")
                    || source.contains('\u{2028}')
            );
            let of_source = source.to_ascii_lowercase().contains("<xss");
            assert!(part != Part::Html || of_source || !text.to_ascii_lowercase().contains("<xss"), "{text}");
        }
        Err(error) => assert!(!error.reason.contains("xss"), "the error quotes a value: {error}"),
    }
}
