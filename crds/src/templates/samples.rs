//! Valid and invalid templates for the tests of the checks.

/// The maximum size of a rendered part in bytes, as documented for users.
const MAX_PART_BYTES: usize = 64 * 1024;

/// A template that must be rejected, with its error.
pub(super) struct InvalidTemplate {
    pub(super) name: &'static str,
    pub(super) source: String,
    pub(super) line: Option<u32>,
    pub(super) reason: &'static str,
}

/// Returns a text of `length` bytes, in lines.
fn text_of_length(length: usize) -> String {
    let line = format!("{}\n", "a".repeat(1000));
    line.repeat(length.div_ceil(line.len()))[..length].to_owned()
}

pub(super) fn valid_templates() -> Vec<(&'static str, String)> {
    [
        ("new-sign-in.subject", "Hello{% if name %} {{ name | title }}{% endif %} of {{ app }}"),
        ("confirm.subject", "Your code for {{ app }}\n"),
        ("confirm.txt", "{# * ~ + #}{{- code -}} * ~ +"),
        (
            "confirm.html",
            "{# a comment #}Hello{% if name and not (app == 'x') %} {{ name|upper|default('you') }}{% elif url %}a{% else %}b{% endif %}",
        ),
        ("reset.html", "{{ 'there' if 'a' in name else code }} {{ 1 < 2 }}"),
        ("reset.html", "{% extends \"layout.html\" %}{% block content %}<p>{{ code }}</p>{% endblock %}"),
        ("reset.txt", "{% raw %}{{ anything(1 + 1) }}{% endraw %}"),
        ("password-changed.txt", "{% if code %}{{ code }}, until {{ expires_at }}, at {{ url }}{% endif %}"),
    ]
    .map(|(name, source)| (name, source.to_owned()))
    .into_iter()
    .chain([
        ("confirm.txt", text_of_length(MAX_PART_BYTES)),
        ("reset.txt", format!("a{}", "\n{{ app }}".repeat(5_000))),
        ("reset.txt", "{{ name }}".repeat(2_000)),
        ("reset.html", format!("<p>{}</p>", "a".repeat(59_993))),
        ("reset.html", format!("{}{{{{ app }}}}{}", "{% if app %}".repeat(16), "{% endif %}".repeat(16))),
        (
            "reset.html",
            format!("{{% if not app %}}{}{{% else %}}{{{{ app }}}}{{% endif %}}", "{% elif not app %}".repeat(15)),
        ),
        ("reset.txt", "{{ ((((((((app)))))))) }}{{ app|e|e|e|e|e|e|e|e }}".to_owned()),
        ("reset.txt", format!("{{{{ app{} }}}}{{{{ '{}' }}}}", " or app".repeat(49), "a".repeat(1_900))),
    ])
    .collect()
}

pub(super) fn invalid_templates() -> Vec<InvalidTemplate> {
    let arithmetic = "+ - * / % ** ~ are not available";
    let one_line = "must render to one line that is not empty";
    let not_a_template_name = "is not a template's name";
    [
        ("confirm.txt", "\n{{ email }}", 2, "there is no variable email"),
        ("confirm.txt", "\n{{ password }}", 2, "there is no variable password"),
        ("confirm.html", "{% if false %}\n{{ cod }}{% endif %}", 2, "there is no variable cod"),
        (
            "confirm.html",
            "{% extends \"layout.html\" %}\n{% block body %}{{ cod }}{% endblock %}",
            2,
            "there is no variable cod",
        ),
        ("confirm.txt", "{% extends \"layout.html\" %}", 1, "only in an .html template"),
        ("confirm.html", "{% extends 'confirm.html' %}", 1, "extends can name only \"layout.html\""),
        (
            "confirm.html",
            "{% extends \"layout.html\" %}\n{% block contents %}<p>{{ code }}</p>{% endblock %}",
            2,
            "the layout has no block contents",
        ),
        ("confirm.html", "{% extends name %}", 1, "extends can name only \"layout.html\""),
        ("reset.html", "<p>\n\n{% if code %}</p>", 3, "syntax error"),
        ("confirm.html", "{% if app %}", 1, "syntax error"),
        ("reset.html", "{{ code", 1, "syntax error"),
        ("confirm.txt", "a\n{{ app", 2, "syntax error"),
        ("confirm.txt", "a\nb\n{{ app ~ app }}", 3, arithmetic),
        ("confirm.html", "{{ app ~ app }}", 1, arithmetic),
        ("confirm.html", "{{ 'x' * 1000000000 }}", 1, arithmetic),
        ("confirm.html", "{{ 2 ** 60 }}", 1, arithmetic),
        ("confirm.html", "{{ 1 + 1 }}", 1, arithmetic),
        ("confirm.html", "\n{% if app == -1 %}{% endif %}", 2, arithmetic),
        ("confirm.html", "{{ not (app ~ app) }}", 1, arithmetic),
        ("confirm.html", "{{ 1 < (app ~ app) < 2 }}", 1, arithmetic),
        ("confirm.html", "{{ 'a' if name else app ~ app }}", 1, arithmetic),
        ("confirm.html", "{% if false %}{{ app ~ app }}{% endif %}", 1, arithmetic),
        ("confirm.html", "{% set x = app %}", 1, "set is not"),
        ("confirm.html", "{% set x %}{{ app }}{% endset %}", 1, "set is not"),
        ("confirm.html", "{% with x = app %}{% endwith %}", 1, "with is not"),
        ("confirm.html", "{% for x in app %}{% endfor %}", 1, "for is not"),
        ("confirm.html", "{% filter upper %}x{% endfilter %}", 1, "filter blocks are not"),
        ("confirm.html", "{% macro f(x) %}{{ f(x) }}{% endmacro %}", 1, "macro is not"),
        ("confirm.html", "{%- include 'layout.html' -%}", 1, "include is not"),
        ("confirm.html", "{% import 'layout.html' as x %}", 1, "import is not"),
        ("confirm.html", "{% from 'layout.html' import x %}", 1, "import is not"),
        ("confirm.html", "{% autoescape false %}{{ name }}{% endautoescape %}", 1, "autoescape is not"),
        ("confirm.html", "{% do app() %}", 1, "do is not"),
        ("confirm.html", "{{ name|safe }}", 1, "there is no filter safe"),
        ("confirm.html", "{{ name|replace('a', 'aaaa') }}", 1, "there is no filter replace"),
        ("confirm.html", "{{ name|default(app|indent(100000000)) }}", 1, "there is no filter indent"),
        ("confirm.html", "{{ range(1000000) }}", 1, "there are no functions"),
        ("confirm.html", "{% block x %}{{ super() }}{% endblock %}", 1, "there are no functions"),
        ("confirm.html", "{{ app.x }}", 1, "no attributes"),
        ("confirm.html", "{{ app[0] }}", 1, "no items"),
        ("confirm.html", "{{ app[1:] }}", 1, "slices are not"),
        ("confirm.html", "{{ [app, app] }}", 1, "lists are not"),
        ("confirm.html", "{{ (app, app) }}", 1, "tuples are not"),
        ("confirm.html", "{{ {'a': app} }}", 1, "maps are not"),
        ("confirm.html", "{{ app is string }}", 1, "tests with is are not"),
        ("confirm.subject", "{% if url %}\nx{% endif %}", 1, one_line),
        ("confirm.subject", " \n", 1, one_line),
        ("confirm.subject", "a\nb", 1, one_line),
        ("confirm.subject", "a\u{2028}b", 1, one_line),
        ("password-changed.subject", "{{ code }}", 1, one_line),
    ]
    .map(|(name, source, line, reason)| InvalidTemplate { name, source: source.to_owned(), line: Some(line), reason })
    .into_iter()
    .chain(["welcome.txt", "confirm.md", "confirm", "layout.html"].map(|unknown| InvalidTemplate {
        name: unknown,
        source: "x".to_owned(),
        line: None,
        reason: not_a_template_name,
    }))
    .chain([
        InvalidTemplate {
            name: "confirm.txt",
            source: text_of_length(MAX_PART_BYTES) + "a",
            line: Some(1),
            reason: "renders to more than 64 KiB; shorten it",
        },
        InvalidTemplate {
            name: "reset.txt",
            source: "{{''}}{#\n#}".repeat(20_000),
            line: Some(6_667),
            reason: "all templates together can have at most 20000 words and signs in their tags",
        },
    ])
    .collect()
}
