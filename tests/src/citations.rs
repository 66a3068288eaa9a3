//! Checks that every citation of the specification and every link between documents names a page that exists. If the
//! citation or link also names a heading, the page must have this heading.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The start of a citation. Code cites the specification as `(specification: Page, Heading)`, with `;` between several
/// citations. The documentation of a module can cite a page without a heading.
const CITATION_START: &str = "(specification: ";
/// The folder of the specification.
const SPECIFICATION: &str = "docs/specification";

/// The headings of a Markdown document, in order. Lines in code blocks are not headings.
fn headings(text: &str) -> Vec<&str> {
    let mut in_code = false;
    text.lines()
        .filter(|line| {
            in_code ^= line.trim_start().starts_with("```");
            !in_code && line.starts_with('#')
        })
        .map(|line| line.trim_start_matches('#').trim())
        .collect()
}

/// The anchors (the URL parts after `#`) that GitHub generates for a document's headings.
fn fragments(text: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let fragment = |heading: &str| {
        let kept = heading.to_lowercase().replace(' ', "-");
        let kept: String = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
        let count = seen.entry(kept.clone()).or_default();
        *count += 1;
        if *count == 1 { kept } else { format!("{kept}-{}", *count - 1) }
    };
    headings(text).into_iter().map(fragment).collect()
}

/// The headings of each page of the specification, by the page's title.
fn pages(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let files = files(&root.join(SPECIFICATION), &["md"]);
    let page = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let mut headings = headings(&text).into_iter().map(str::to_owned);
        (headings.next().expect("a title"), headings.collect())
    };
    files.iter().map(page).collect()
}

/// The citations in a text, as pairs of page and heading. A citation can be wrapped over comment lines.
fn citations(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().map(|line| line.trim_start().trim_start_matches(['/', '!', '#', '*', '-', ';']).trim());
    let text = lines.collect::<Vec<_>>().join(" ");
    let cited = text.split(CITATION_START).skip(1).filter_map(|rest| rest.split_once(')')).map(|(cited, _)| cited);
    cited
        .flat_map(|cited| cited.split(';'))
        .map(|cited| {
            let (page, heading) = cited.split_once(',').unwrap_or((cited, ""));
            (page.trim().to_owned(), heading.trim().to_owned())
        })
        .collect()
}

/// The targets of the links of a Markdown document: `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let ends = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    ends.map(|(target, _)| target.split_whitespace().next().unwrap_or_default().to_owned()).collect()
}

/// The files below a folder of the repository that have one of these extensions.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if !matches!(name, ".git" | "target" | "node_modules") {
                found.extend(files(&path, extensions));
            }
        } else if extensions.iter().any(|extension| path.extension().is_some_and(|own| own == *extension)) {
            found.push(path);
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn every_cited_heading_of_the_specification_exists() {
    let pages = pages(&root());
    let mut found = 0;
    for path in files(&root(), &["rs", "lua", "sql", "md", "yaml", "toml", "tpl"]) {
        if path.ends_with("tests/src/citations.rs") {
            continue;
        }
        for (page, heading) in citations(&fs::read_to_string(&path).unwrap()) {
            found += 1;
            let headings = pages.get(&page);
            let headings = headings.unwrap_or_else(|| panic!("{}: no page {page:?}", path.display()));
            let is_found = heading.is_empty() || headings.contains(&heading);
            assert!(is_found, "{}: {page:?} has no heading {heading:?}", path.display());
        }
    }
    assert!(found > 20, "{found} citations");
}

#[test]
fn every_link_between_documents_leads_to_an_existing_file_and_heading() {
    let mut found = 0;
    for path in files(&root(), &["md"]) {
        let text = fs::read_to_string(&path).unwrap();
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            found += 1;
            let (file, fragment) = link.split_once('#').map_or((&*link, None), |(file, part)| (file, Some(part)));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link}", path.display());
            if let (Some(fragment), true) = (fragment, target.extension().is_some_and(|own| own == "md")) {
                let fragments = fragments(&fs::read_to_string(&target).unwrap());
                assert!(fragments.contains(fragment), "{}: {link}: there are {fragments:?}", path.display());
            }
        }
    }
    assert!(found > 50, "{found} links");
}

#[test]
fn a_wrapped_citation_and_a_repeated_heading_are_read() {
    let text = "/// A rule (specification: Sessions and\n    /// tokens, Refresh; Limits, Rate limits).";
    let expected = [("Sessions and tokens", "Refresh"), ("Limits", "Rate limits")];
    assert_eq!(citations(text), expected.map(|(page, heading)| (page.to_owned(), heading.to_owned())));
    let fragments = fragments("# A `b` c?\n```\n# code\n```\n## D\n## D\n");
    assert_eq!(fragments.into_iter().collect::<Vec<_>>(), ["a-b-c", "d", "d-1"]);
}
