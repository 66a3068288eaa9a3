//! The texts of the pages: plain text with variables, in a subset of Fluent (<https://projectfluent.org>).
//!
//! The files in `texts/` have the default texts. They are the only list of IDs and variables. The operator checks the
//! texts of Apps against this list. The servers show the default texts that an App does not replace.

use std::{borrow::Cow, collections::BTreeMap, fmt, str::FromStr, sync::LazyLock};

use fluent_syntax::{
    ast::{Entry, Expression, InlineExpression, Message, Pattern, PatternElement},
    parser,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Language;
use crate::types::Invalid;

/// The maximum length of a text, in characters. A variable counts as `{ $name }`.
pub const MAX_TEXT_LENGTH: usize = 500;

const ONLY_VARIABLES: &str = "use only text and variables such as { $app }";

/// A text: plain text with variables. It is written as in Fluent: `Log in to { $app }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(Box<[Part]>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(Box<str>),
    /// The name of a variable, without `$`.
    Variable(Box<str>),
}

/// Texts by their ID.
pub type Texts = BTreeMap<String, Text>;

/// The usable texts of a file, and the errors in its other texts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ParsedTexts {
    pub texts: Texts,
    pub errors: Vec<TextError>,
}

/// A text that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {}{reason}", id.as_ref().map(|id| format!("{id}: ")).unwrap_or_default())]
pub struct TextError {
    /// The number of the first line of the text, counted from 1.
    pub line: usize,
    /// The ID of the text. `None` if the line does not begin with an ID.
    pub id: Option<String>,
    pub reason: Cow<'static, str>,
}

/// The default texts of a language.
pub fn default_texts(language: Language) -> &'static Texts {
    static ENGLISH: LazyLock<Texts> = LazyLock::new(|| parse(include_str!("texts/en.ftl")).texts);
    static GERMAN: LazyLock<Texts> = LazyLock::new(|| parse(include_str!("texts/de.ftl")).texts);
    match language {
        Language::En => &ENGLISH,
        Language::De => &GERMAN,
    }
}

/// Checks the texts of an App for a language. Each text must have the ID of a default text, and can use only the
/// variables of this default text. The time is proportional to the length of the file.
pub fn check(language: Language, file: &str) -> ParsedTexts {
    let defaults = default_texts(language);
    let mut checked = ParsedTexts::default();
    for (line, parsed) in parse_entries(file) {
        let accepted = parsed.and_then(|(id, text)| {
            let reason = match defaults.get(&id) {
                None => "there is no text with this ID".into(),
                Some(default) => match unknown_variable(&text, default) {
                    Some(reason) => reason,
                    None => return Ok((id, text)),
                },
            };
            Err((Some(id), reason))
        });
        checked.add(line, accepted);
    }
    checked
}

fn parse(file: &str) -> ParsedTexts {
    let mut parsed = ParsedTexts::default();
    for (line, entry) in parse_entries(file) {
        parsed.add(line, entry);
    }
    parsed
}

/// An entry of a file: the ID and the text. If the entry is invalid: its ID, if it has one, and the reason.
type ParsedEntry = Result<(String, Text), (Option<String>, Cow<'static, str>)>;

fn parse_entries(file: &str) -> impl Iterator<Item = (usize, ParsedEntry)> {
    let file = file.strip_prefix('\u{feff}').unwrap_or(file);
    entries(file)
        .into_iter()
        .filter(|(_, entry)| !entry.starts_with('#') && !entry.trim().is_empty())
        .map(|(line, entry)| (line, parse_entry(entry)))
}

/// Splits a file into messages and comments, each with the number of its first line. Each is parsed separately, so that
/// a broken message does not affect the others.
fn entries(file: &str) -> Vec<(usize, &str)> {
    let mut starts: Vec<(usize, usize)> = Vec::new();
    let mut offset = 0;
    for (index, line) in file.split_inclusive('\n').enumerate() {
        // A line that begins with one of these characters continues the message above (Fluent EBNF: block text,
        // attributes, variants). Nothing continues a comment.
        let continues = line.starts_with([' ', '\r', '\n', '.', '}', '[', '*']);
        let can_continue = starts.last().is_some_and(|(_, start)| !file[*start..].starts_with('#'));
        if !(continues && can_continue) {
            starts.push((index + 1, offset));
        }
        offset += line.len();
    }
    let ends: Vec<usize> = starts.iter().skip(1).map(|(_, start)| *start).chain([file.len()]).collect();
    starts.into_iter().zip(ends).map(|((line, start), end)| (line, &file[start..end])).collect()
}

fn parse_entry(entry: &str) -> ParsedEntry {
    let id_length = entry.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))).unwrap_or(entry.len());
    let id = entry[..id_length].to_owned();
    if !id.starts_with(|c: char| c.is_ascii_alphabetic()) {
        let reason = if entry.starts_with('-') { "terms cannot be used" } else { "begin the line with ID =" };
        return Err((None, reason.into()));
    }
    match parse_message(entry) {
        Ok(text) => Ok((id, text)),
        Err(reason) => Err((Some(id), reason)),
    }
}

fn parse_message(entry: &str) -> Result<Text, Cow<'static, str>> {
    // This check comes before the parser, because the parser recurses into nested expressions without a limit.
    if has_expression(entry) {
        return Err(ONLY_VARIABLES.into());
    }
    let entry = entry.replace("\r\n", "\n");
    let resource = parser::parse_runtime(entry.as_str()).map_err(|(_, errors)| {
        let error = errors.first().map(ToString::to_string).unwrap_or_default();
        Cow::from(format!("is not a message of Fluent: {error}"))
    })?;
    match resource.body.as_slice() {
        [Entry::Message(Message { attributes, .. })] if !attributes.is_empty() => {
            Err("attributes cannot be used".into())
        }
        [Entry::Message(Message { value: Some(pattern), .. })] => Text::from_pattern(pattern),
        _ => Err("is not a message of Fluent".into()),
    }
}

/// Whether braces contain more than a variable: another brace, a call or a literal.
fn has_expression(entry: &str) -> bool {
    let mut in_braces = false;
    entry.chars().any(|c| match (in_braces, c) {
        (true, '{' | '(' | '"' | '>') => true,
        (_, '{' | '}') => {
            in_braces = c == '{';
            false
        }
        _ => false,
    })
}

/// Returns the reason why the text is invalid, if it has a variable that the default text does not have.
fn unknown_variable(text: &Text, default: &Text) -> Option<Cow<'static, str>> {
    let known: Vec<&str> = default.variables().collect();
    let unknown = text.variables().find(|variable| !known.contains(variable))?;
    Some(match known.as_slice() {
        [] => format!("there is no variable ${unknown}; this text has none").into(),
        _ => format!("there is no variable ${unknown}; this text has ${}", known.join(", $")).into(),
    })
}

// === impl ParsedTexts ===

impl ParsedTexts {
    fn add(&mut self, line: usize, entry: ParsedEntry) {
        match entry {
            Ok((id, _)) if self.texts.contains_key(&id) => {
                self.errors.push(TextError {
                    line,
                    id: Some(id),
                    reason: "is defined twice; the first one counts".into(),
                });
            }
            Ok((id, text)) => {
                self.texts.insert(id, text);
            }
            Err((id, reason)) => self.errors.push(TextError { line, id, reason }),
        }
    }
}

// === impl Text ===

impl Text {
    /// The names of the variables, in order, without `$`. A variable that is used twice is returned twice.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Literal(_) => None,
            Part::Variable(name) => Some(&**name),
        })
    }

    /// The text with the values of its variables.
    pub fn format<'a>(&self, value: impl Fn(&str) -> &'a str) -> String {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Literal(literal) => text.push_str(literal),
                Part::Variable(name) => text.push_str(value(name)),
            }
        }
        text
    }

    fn from_pattern(pattern: &Pattern<&str>) -> Result<Self, Cow<'static, str>> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        for element in &pattern.elements {
            match element {
                PatternElement::TextElement { value } => literal.push_str(value),
                PatternElement::Placeable {
                    expression: Expression::Inline(InlineExpression::VariableReference { id }),
                } => {
                    push_literal(&mut parts, &std::mem::take(&mut literal));
                    parts.push(Part::Variable(id.name.into()));
                }
                PatternElement::Placeable { .. } => return Err(ONLY_VARIABLES.into()),
            }
        }
        push_literal(&mut parts, &literal);
        let text = Self(parts.into());
        text.check_bounds()?;
        Ok(text)
    }

    fn check_bounds(&self) -> Result<(), Cow<'static, str>> {
        let written = self.to_string();
        if written.chars().any(|c| c.is_control() && c != '\n') {
            return Err("has a control character".into());
        }
        if written.chars().count() > MAX_TEXT_LENGTH {
            return Err(format!("is longer than {MAX_TEXT_LENGTH} characters").into());
        }
        Ok(())
    }
}

fn push_literal(parts: &mut Vec<Part>, literal: &str) {
    if !literal.is_empty() {
        parts.push(Part::Literal(literal.into()));
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Literal(literal) => f.write_str(literal),
            Part::Variable(name) => write!(f, "{{ ${name} }}"),
        })
    }
}

impl FromStr for Text {
    type Err = Invalid;

    /// Parses what `Display` writes. Plain text has no braces, so the parts are unambiguous.
    fn from_str(written: &str) -> Result<Self, Invalid> {
        let mut parts = Vec::new();
        let mut rest = written;
        while let Some((literal, after)) = rest.split_once("{ $") {
            let (name, after) = after.split_once(" }").ok_or(Invalid("has a variable that does not end"))?;
            push_literal(&mut parts, literal);
            parts.push(Part::Variable(name.into()));
            rest = after;
        }
        push_literal(&mut parts, rest);
        Ok(Self(parts.into()))
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = Cow::<'de, str>::deserialize(deserializer)?;
        written.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        time::{Duration, Instant},
    };

    use super::*;

    fn only_text(file: &str) -> Text {
        let mut parsed = parse(file);
        assert_eq!((parsed.texts.len(), &parsed.errors[..]), (1, &[][..]), "{file:?}");
        parsed.texts.pop_first().unwrap().1
    }

    #[track_caller]
    fn assert_error(file: &str, line: usize, id: &str, reason: &str) {
        let parsed = parse(file);
        assert_eq!(parsed.errors.len(), 1, "{file:?}: {parsed:?}");
        let error = &parsed.errors[0];
        assert_eq!((error.line, error.id.as_deref().unwrap_or_default()), (line, id), "{file:?}: {error}");
        assert!(error.reason.contains(reason), "{file:?}: {error}");
    }

    #[test]
    fn the_default_texts_have_the_same_ids_and_variables_in_every_language() {
        for (language, file) in
            [(Language::En, include_str!("texts/en.ftl")), (Language::De, include_str!("texts/de.ftl"))]
        {
            assert_eq!(parse(file).errors, [], "{language:?}");
            assert_eq!(check(language, file), ParsedTexts { texts: default_texts(language).clone(), errors: vec![] });
        }
        let variables = |language: Language| -> BTreeMap<&'static str, BTreeSet<&'static str>> {
            let texts = default_texts(language).iter();
            texts.map(|(id, text)| (id.as_str(), text.variables().collect())).collect()
        };
        assert!(!variables(Language::En).is_empty());
        assert_eq!(variables(Language::En), variables(Language::De));
    }

    #[test]
    fn a_text_is_plain_text_with_variables() {
        let text = only_text("title = Log in to {$app}, { $name }!\n");
        assert_eq!(text.to_string(), "Log in to { $app }, { $name }!");
        assert_eq!(text.variables().collect::<Vec<_>>(), ["app", "name"]);
        let formatted = text.format(|name| if name == "app" { "The <Shop>" } else { "Ada" });
        assert_eq!(formatted, "Log in to The <Shop>, Ada!");
    }

    #[test]
    fn a_text_is_unchanged_after_it_is_written_and_read() {
        for written in ["Hello", "{ $app }", "A { $a }{ $b } c", "A\nb { $c }", "1 < 2 & $3 (é)"] {
            let text: Text = written.parse().unwrap();
            assert_eq!(text.to_string(), written);
            assert_eq!(serde_json::from_str::<Text>(&serde_json::to_string(&text).unwrap()).unwrap(), text);
        }
        assert!("A { $b".parse::<Text>().is_err());
    }

    #[test]
    fn comments_line_ends_and_continued_lines_are_read_as_in_fluent() {
        for file in [
            "### File\n\n## Group\n\n# One\none = A\n    b\n\n# end\n",
            "\u{feff}one = A\r\n    b\r\n",
            "\n\none =\n    A\n    b\n",
        ] {
            assert_eq!(only_text(file).to_string(), "A\nb", "{file:?}");
        }
        assert_eq!(parse(""), ParsedTexts::default());
    }

    #[test]
    fn anything_other_than_plain_text_and_variables_is_an_error_with_line_and_id() {
        for (file, line, id, reason) in [
            ("a = b\n\nc\n", 3, "c", "is not a message"),
            ("a =\n", 1, "a", "is not a message"),
            ("a = b\n c d =\n1a = b\n", 3, "", "begin the line with ID"),
            ("# x\n  a = b\n", 2, "", "begin the line with ID"),
            ("-brand = Shop\n", 1, "", "terms cannot be used"),
            ("a = b\n    .title = c\n", 1, "a", "attributes cannot be used"),
            ("a =\n    .title = c\n", 1, "a", "attributes cannot be used"),
            ("a = { -brand }\n", 1, "a", ONLY_VARIABLES),
            ("a = { other }\n", 1, "a", ONLY_VARIABLES),
            ("a = { \"x\" }\n", 1, "a", ONLY_VARIABLES),
            ("a = { 7 }\n", 1, "a", ONLY_VARIABLES),
            ("a = { NUMBER($n) }\n", 1, "a", ONLY_VARIABLES),
            ("a = { $n ->\n    [one] b\n   *[other] c\n}\n", 1, "a", ONLY_VARIABLES),
            ("a = {{ $app }}\n", 1, "a", ONLY_VARIABLES),
            ("a = { $app\n", 1, "a", "is not a message"),
            ("a = b }\n", 1, "a", "is not a message"),
            ("a = b\tc\n", 1, "a", "has a control character"),
            ("a = b\na = c\n", 2, "a", "is defined twice"),
        ] {
            assert_error(file, line, id, reason);
        }
    }

    #[test]
    fn a_text_has_at_most_500_characters() {
        assert_eq!(only_text(&format!("a = {}\n", "é".repeat(500))).to_string().chars().count(), 500);
        assert_error(&format!("a = {}\n", "é".repeat(501)), 1, "a", "longer than 500");
        assert_error(&format!("a = {}{{$app}}\n", "é".repeat(493)), 1, "a", "longer than 500");
    }

    #[test]
    fn a_broken_text_does_not_affect_the_others() {
        let parsed = parse("a = b\nbroken = { $x ->\nc = d\n  e\n");
        assert_eq!(parsed.texts.keys().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(parsed.errors[0].to_string(), format!("2: broken: {ONLY_VARIABLES}"));
    }

    #[test]
    fn the_texts_of_an_app_have_the_ids_and_variables_of_the_default_texts() {
        let with_variable = default_texts(Language::De).iter().find(|(_, text)| text.variables().next().is_some());
        let (id, text) = with_variable.expect("a default text has a variable");
        let variable = text.variables().next().unwrap();
        let checked = check(Language::De, &format!("{id} = Willkommen bei {{ ${variable} }}\n"));
        assert_eq!(checked.texts[id].to_string(), format!("Willkommen bei {{ ${variable} }}"));
        assert_eq!(check(Language::De, &format!("{id} = Willkommen\n")).errors, [], "no variable must be used");

        let unknown = check(Language::De, &format!("no-such-text = x\n{id} = {{ $nobody }}\n"));
        assert!(unknown.texts.is_empty());
        let errors: Vec<String> = unknown.errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors[0], "1: no-such-text: there is no text with this ID");
        let expected = format!("2: {id}: there is no variable $nobody; this text has ${variable}");
        assert!(errors[1].starts_with(&expected), "{errors:?}");
    }

    #[test]
    fn hostile_files_are_checked_within_five_seconds() {
        const SIZE: usize = 64 * 1024;
        for pattern in ["{", "(", "a={\n", "a={A(\n", "A(\n", "{\"", "a = {$b}", "}", "*\n", "a=\n.b=", "#", "\n"] {
            for start in ["", "a = ", "a = {"] {
                let file = format!("{start}{}", pattern.repeat(SIZE / pattern.len()));
                let began = Instant::now();
                drop(check(Language::En, &file));
                assert!(began.elapsed() < Duration::from_secs(5), "{start:?} {pattern:?}: {:?}", began.elapsed());
            }
        }
    }
}
