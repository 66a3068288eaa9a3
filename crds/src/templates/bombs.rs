//! Templates that are designed to use too much time or memory, for the tests of the checks.

/// A template that must be rejected or rendered within [`LIMIT`].
pub(super) struct Bomb {
    /// The name of the bomb in messages.
    pub(super) name: &'static str,
    /// The name of the template.
    pub(super) template: &'static str,
    pub(super) source: String,
    /// A text that the error contains. `None` if the template is valid.
    pub(super) refusal: Option<&'static str>,
}

/// Maximum time for one template, also in a debug build.
pub(super) const LIMIT: std::time::Duration = std::time::Duration::from_secs(2);

// Texts that the errors contain.
const WORDS: &str = "a tag has more than 100 words and signs";
const NESTING: &str = "a tag nests more than 8 parentheses";
const FILTERS: &str = "a tag has more than 8 filters";
const LENGTH: &str = "a tag has more than 2000 characters";
/// The start of both FILTERS and NESTING, for a bomb that exceeds both bounds.
const FILTERS_OR_NESTING: &str = "a tag ";
const BLOCKS: &str = "has more than 20 blocks";
const DEPTH: &str = "nests if and block more than 16 deep";
const LINE: &str = "the line has more than 60000 characters";
const TOKENS: &str = "all templates together can have at most 20000 words and signs";
const ARITHMETIC: &str = "+ - * / % ** ~ are not available";

/// The length of most bombs, in characters: short enough for one line, and long enough to overflow the stack if there
/// were no bounds.
const BOMB_LENGTH: usize = 50_000;

/// Repeats `part` up to [`BOMB_LENGTH`] characters.
fn repeat_to_length(part: &str) -> String {
    part.repeat(BOMB_LENGTH / part.len())
}

/// Nests `open` and `close` around `inner`, up to [`BOMB_LENGTH`] characters.
fn nested(open: &str, inner: &str, close: &str) -> String {
    let times = BOMB_LENGTH / (open.len() + close.len());
    format!("{}{inner}{}", open.repeat(times), close.repeat(times))
}

/// Puts an expression into a tag.
fn tag(expression: &str) -> String {
    format!("{{{{ {expression} }}}}")
}

pub(super) fn bombs() -> Vec<Bomb> {
    let text = |name, source: String, refusal| Bomb { name, template: "confirm.txt", source, refusal };
    let html = |name, source: String, refusal| Bomb { name, template: "confirm.html", source, refusal };
    // `{{ app + app + app … }}`.
    let chain = |operator: &str| tag(&format!("app{}", repeat_to_length(&format!(" {operator} app"))));
    // `{{ not not not … 1 }}`.
    let prefix = |operator: &str| tag(&format!("{}1", repeat_to_length(operator)));
    let suffix = |operator: &str| tag(&format!("app{}", repeat_to_length(operator)));
    let deep = |open: &str, close: &str| tag(&nested(open, "1", close));
    vec![
        // Deep nesting.
        text("minus signs", prefix("-"), Some(WORDS)),
        text("minus signs on lines of their own", tag(&format!("{}1", "-\n".repeat(100_000))), Some(WORDS)),
        text("nots", prefix("not "), Some(WORDS)),
        text("parentheses", deep("(", ")"), Some(NESTING)),
        text("brackets", deep("[", "]"), Some(NESTING)),
        text("braces", deep("{1:", "}"), Some(NESTING)),
        text("open parentheses", format!("{{{{ {}", repeat_to_length("(")), Some(NESTING)),
        text("calls in calls", deep("app(", ")"), Some(NESTING)),
        text("filters in arguments", deep("app|d(", ")"), Some(FILTERS_OR_NESTING)),
        text("subscripts in subscripts", deep("app[", "]"), Some(NESTING)),
        text("conditional expressions", tag(&format!("{}app", repeat_to_length("app if app else "))), Some(WORDS)),
        text("conditions of conditions", suffix(" if app"), Some(WORDS)),
        text("ifs in ifs", nested("{% if app %}", "x", "{% endif %}"), Some(DEPTH)),
        text("ifs that stay open", repeat_to_length("{% if app %}"), Some(DEPTH)),
        text("elifs", format!("{{% if app %}}{}{{% endif %}}", repeat_to_length("{% elif app %}")), Some(DEPTH)),
        text("ifs in elses", nested("{% if app %}{% else %}", "x", "{% endif %}"), Some(DEPTH)),
        html("blocks in blocks", nested_blocks(1_200, "x"), Some(DEPTH)),
        html("loops in loops", nested("{% for x in app %}", "x", "{% endfor %}"), Some("for is not")),
        html("with in with", nested("{% with %}", "x", "{% endwith %}"), Some("with is not")),
        html("filter blocks", nested("{% filter upper %}", "x", "{% endfilter %}"), Some("filter blocks are")),
        html("autoescape", nested("{% autoescape 1 %}", "x", "{% endautoescape %}"), Some("autoescape is")),
        html("set blocks", nested("{% set x %}", "x", "{% endset %}"), Some("set is not")),
        html("macros in macros", nested("{% macro f() %}", "x", "{% endmacro %}"), Some("macro is not")),
        html("calls of calls", nested("{% call f() %}", "x", "{% endcall %}"), Some("call is not")),
        html("assignments in assignments", format!("{{% set {}", repeat_to_length("(")), Some("set is not")),
        // Long tags.
        text("ors", chain("or"), Some(WORDS)),
        text("ands", chain("and"), Some(WORDS)),
        text("comparisons", chain("<"), Some(WORDS)),
        text("equalities", chain("=="), Some(WORDS)),
        text("memberships", chain("in"), Some(WORDS)),
        text("negated memberships", chain("not in"), Some(WORDS)),
        text("sums", chain("+"), Some(WORDS)),
        text("differences", chain("-"), Some(WORDS)),
        text("products", chain("*"), Some(WORDS)),
        text("quotients", chain("//"), Some(WORDS)),
        text("remainders", chain("%"), Some(WORDS)),
        text("powers", chain("**"), Some(WORDS)),
        text("concatenations", chain("~"), Some(WORDS)),
        text("filters", suffix("|e"), Some(FILTERS)),
        text("filters with dots", suffix("|a.b.c"), Some(FILTERS)),
        text("tests", suffix(" is string"), Some(WORDS)),
        text("attributes", suffix(".a"), Some(WORDS)),
        text("subscripts", suffix("[0]"), Some(WORDS)),
        text("calls", suffix("()"), Some(WORDS)),
        text("arguments", tag(&format!("app|d({})", repeat_to_length("1,"))), Some(WORDS)),
        text("a list", tag(&format!("[{}]", repeat_to_length("1,"))), Some(WORDS)),
        text("a map", tag(&format!("{{{}}}", repeat_to_length("1:1,"))), Some(WORDS)),
        text("strings side by side", tag(&repeat_to_length("'a' ")), Some(WORDS)),
        text("a long string", tag(&format!("'{}'", repeat_to_length("a"))), Some(LENGTH)),
        text("a long string of escapes", tag(&format!("'{}'", repeat_to_length("\\u0041"))), Some(LENGTH)),
        text("a long name", tag(&repeat_to_length("a")), Some(LENGTH)),
        text("a long number", tag(&repeat_to_length("1")), Some("syntax error")),
        text("a long fraction", tag(&format!("1.{}", repeat_to_length("1"))), Some(LENGTH)),
        text("a tag of spaces", tag(&repeat_to_length(" ")), Some(LENGTH)),
        text("a tag that stays open", format!("{{{{ (\n{}", "word\n".repeat(40_000)), Some(WORDS)),
        text("a string that stays open", format!("{{{{ '\n{}", "word\n".repeat(40_000)), Some("syntax error")),
        // Long lines and long sources.
        text("comment marks in one line", "{#".repeat(33_000), Some(LINE)),
        text("comment marks on the second line", format!("{{#\n{}", "{#".repeat(33_000)), Some(LINE)),
        text("a string in a long line", format!("{{{{ '{}", "a".repeat(70_000)), Some(LINE)),
        text("raw marks in one line", "{% raw %}".repeat(10_000), Some(LINE)),
        text("comments that stay open", "{#\n".repeat(40_000), Some("syntax error")),
        text("raws that stay open", "{% raw %}\n".repeat(20_000), Some("syntax error")),
        text("lines", "\n".repeat(250_000), Some("renders to more than 64 KiB")),
        text("more than the length", "a\n".repeat(150_000), Some("is over 256 KiB")),
        // Many tags.
        text("tags", "{{ app }}\n".repeat(20_000), Some(TOKENS)),
        text("empty strings", "{{''}}\n".repeat(30_000), Some(TOKENS)),
        text("ifs", "{% if app %}{% endif %}\n".repeat(10_000), Some(TOKENS)),
        text("full tags", (tag(&format!("app{}", " < app".repeat(48))) + "\n").repeat(800), Some(TOKENS)),
        text("lines of comments", "{##}\n".repeat(50_000), Some(TOKENS)),
        text("comments", "{#-#}".repeat(10_000), None),
        html("blocks", (0..5_000).map(|n| format!("{{% block b{n} %}}{{% endblock %}}\n")).collect(), Some(BLOCKS)),
        html("parents", "{% extends 'layout.html' %}\n".repeat(2_000), Some("tried to extend a second time")),
        // Growing values.
        text("a multiplied string", tag("'x' * 1000000000"), Some(ARITHMETIC)),
        text("a multiplied list", tag("[1] * 1000000000"), Some(ARITHMETIC)),
        text("a power", tag("9 ** 9 ** 9 ** 9"), Some(ARITHMETIC)),
        text("a range", tag("range(1000000000)"), Some("there are no functions")),
        text("a padded string", tag("app|center(1000000000)"), Some("there is no filter center")),
        text("an indented string", tag("app|indent(1000000000)"), Some("there is no filter indent")),
        text("a formatted string", tag("'%1000000000d'|format(1)"), Some("there is no filter format")),
        text("a replaced string", tag("app|replace('', app)"), Some("there is no filter replace")),
        text("a method", tag("app.center(1000000000)"), Some("there are no functions")),
        text("a slice", tag("app[::-1]"), Some("slices are not")),
        html(
            "a block of itself",
            "{% block x %}{{ self.x() }}{% endblock %}".to_owned(),
            Some("there are no functions"),
        ),
        html(
            "a block of its parent",
            "{% block x %}{{ super() }}{% endblock %}".to_owned(),
            Some("there are no functions"),
        ),
        html(
            "a loop of itself",
            "{% for x in app recursive %}{{ loop(x) }}{% endfor %}".to_owned(),
            Some("for is not"),
        ),
        html("a macro of itself", "{% macro f() %}{{ f() }}{% endmacro %}".to_owned(), Some("macro is not")),
        html("an inclusion", "{% include 'confirm.html' %}".to_owned(), Some("include is not")),
        html("a parent of itself", "{% extends 'confirm.html' %}".to_owned(), Some("extends can name only")),
        // Valid templates at the bounds.
        text("escapes of escapes", costly_filters(), None),
        html("the deepest blocks", nested_blocks(16, &expressions()), None),
        html(
            "the deepest ifs",
            format!("{}{}{}", "{% if app %}".repeat(16), expressions(), "{% endif %}".repeat(16)),
            None,
        ),
        html("the deepest elifs", chained_elifs(&expressions()), None),
        html("the most expressions", (expressions() + "\n").repeat(60), None),
    ]
}

/// Returns nested blocks with different names, because two blocks of a template cannot have the same name.
fn nested_blocks(depth: usize, inner: &str) -> String {
    let open: String = (0..depth).map(|n| format!("{{% block b{n} %}}")).collect();
    format!("{open}{inner}{}", "{% endblock %}".repeat(depth))
}

fn chained_elifs(inner: &str) -> String {
    format!("{{% if not app %}}{}{{% else %}}{inner}{{% endif %}}", "{% elif not app %}".repeat(15))
}

/// Returns tags that render to nothing. In their strings, every second filter makes each `&` four characters longer.
fn costly_filters() -> String {
    let tag = format!("{{% if '{}'|e|upper|e|upper|e|upper|e|upper == app %}}{{% endif %}}\n", "&".repeat(1_900));
    tag.repeat(130)
}

/// Returns the deepest valid expressions of each kind.
fn expressions() -> String {
    let conditional = format!("{}app", "app if app else ".repeat(14));
    let filters = tag(&format!("{}{conditional}{}", "app|d(".repeat(8), ")".repeat(8)));
    let nots = tag(&format!("{}((((((((app))))))))", "not ".repeat(80)));
    let ors = tag(&format!("app{}", " or app".repeat(49)));
    filters + &nots + &ors
}
