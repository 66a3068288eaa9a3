//! Checks that the guide to webhooks shows the tested programs, and names every event.

use std::{fs, path::Path};

use latchkey_crds::webhook::WebhookEvent;

const GUIDE: &str = "docs/webhooks.md";
const FOLDER: &str = "clients/webhooks";
/// The tested programs in [`FOLDER`], each with the language of its code block in the guide.
const PROGRAMS: [(&str, &str); 3] = [("receive.ts", "ts"), ("receive.py", "python"), ("receive.go", "go")];

/// The code blocks of a Markdown document in this language, without those that are indented.
fn code_blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let start = format!("\n```{language}\n");
    let blocks = text.split(start.as_str()).skip(1);
    blocks.map(|rest| rest.split_once("\n```\n").map_or(rest, |(block, _)| block)).collect()
}

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn the_guide_to_webhooks_shows_the_tested_programs() {
    let guide = read(GUIDE);
    for (file, language) in PROGRAMS {
        let program = read(&format!("{FOLDER}/{file}"));
        let blocks = code_blocks(&guide, language);
        assert_eq!(blocks.len(), 1, "code blocks of {language} in {GUIDE}");
        assert_eq!(format!("{}\n", blocks[0]), program, "{GUIDE} differs from {FOLDER}/{file}: copy the file");
    }
}

#[test]
fn the_guide_to_webhooks_names_every_event() {
    let guide = read(GUIDE);
    let (_, section) = guide.split_once("\n## Events\n").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| `")).collect();
    for event in WebhookEvent::ALL {
        let name = format!("`{}`", event.as_str());
        let is_named = rows.iter().any(|row| row.split('|').nth(1).is_some_and(|types| types.contains(&name)));
        assert!(is_named, "{GUIDE} has no row for {name}");
    }
}

#[test]
fn a_code_block_is_read_without_its_fences() {
    let text = "text\n```go\na\n\nb\n```\n\n```ts\nc\n```\n   ```go\n   d\n   ```\n";
    assert_eq!(code_blocks(text, "go"), ["a\n\nb"]);
    assert_eq!(code_blocks(text, "ts"), ["c"]);
}
