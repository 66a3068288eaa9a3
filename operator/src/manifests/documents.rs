//! Splits a file into its YAML or JSON documents, and parses each.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::parse_cache::ParseCache;
use crate::panics::catch;

/// Parses the documents of a file, except empty documents. Parses each document separately, so that a broken document
/// does not affect the others.
pub(super) fn parse_documents(file: &str, text: &str, cache: &ParseCache) -> Vec<Result<Value, String>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if Path::new(file).extension().is_some_and(|extension| extension == "json") {
        return vec![serde_json::from_str(text).map_err(|error| format!("is not JSON: {error}"))];
    }
    split_documents(text)
        .into_iter()
        .map(|(lines_before, document)| {
            let name = format!("{file}:{lines_before}");
            let parsed = cache.documents.get_or_compute(&name, document, |document| {
                let parsed = catch(|| parse_yaml(document)).map_err(|panicked| panicked.message())?;
                parsed.map_err(|error| yaml_error(&error, lines_before))
            });
            Result::clone(&parsed)
        })
        .filter(|document| !matches!(document, Ok(Value::Null)))
        .collect()
}

/// Splits a file at the lines `---`, which cannot occur inside a document (YAML 1.2, section 9.1.2). Returns each part
/// with the number of lines before it.
fn split_documents(text: &str) -> Vec<(usize, String)> {
    let mut parts = vec![(0, String::new())];
    for (number, line) in text.lines().enumerate() {
        let marker = line.strip_prefix("---").filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t']));
        match (marker, parts.last_mut()) {
            // Text after `---` on the same line belongs to the new document. Spaces replace `---`, so that the text
            // keeps its column.
            (Some(rest), _) => parts.push((number, format!("   {rest}\n"))),
            (None, Some((_, part))) => {
                // Directives (`%…`) and end markers (`...`) are left out, because they do not change the parsed value.
                if line.trim_end() != "..." && !(line.starts_with('%') && part.trim().is_empty()) {
                    part.push_str(line);
                }
                part.push('\n');
            }
            (None, None) => {}
        }
    }
    parts
}

fn parse_yaml(document: &str) -> Result<Value, serde_yaml::Error> {
    let mut value: serde_yaml::Value = serde_yaml::from_str(document)?;
    value.apply_merge()?;
    Value::deserialize(value)
}

/// Returns the parser's message, with the line number in the file.
fn yaml_error(error: &serde_yaml::Error, lines_before: usize) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    match error.location() {
        Some(location) => format!("is not YAML: {text} (line {})", lines_before + location.line()),
        None => format!("is not YAML: {text}"),
    }
}
