//! Logos: an accepted SVG contains no script and no reference to another file.

use latchkey_operator::fuzzing::logo_media_type;

use crate::{draw::texts, harness};

const FRAGMENTS: [&str; 64] = [
    "<svg xmlns=\"http://www.w3.org/2000/svg\">",
    "<svg xmlns=\"http://www.w3.org/2000/svg\" ",
    "</svg>",
    "<svg>",
    "<?xml version=\"1.0\"?>",
    "<?xml version=\"1.0\" encoding=\"utf-16\"?>",
    "<?xml-stylesheet href=\"a.css\"?>",
    "<!DOCTYPE svg>",
    "<!ENTITY a \"b\">",
    "<!-- ",
    " -->",
    "<![CDATA[",
    "]]>",
    "<script>",
    "</script>",
    "<script/>",
    "<g>",
    "</g>",
    "<g ",
    "<path ",
    "<use ",
    "<style>",
    "</style>",
    "<text>",
    "</text>",
    "<a ",
    "<image ",
    "<foreignObject>",
    "<set ",
    "<x:script/>",
    "/>",
    ">",
    "<",
    "</",
    "/",
    " ",
    "\n",
    "onload=\"alert(1)\"",
    " onload=\"alert(1)\" ",
    "ONLOAD='a'",
    "href=\"",
    "xlink:href=\"",
    "href=\"#a\" ",
    "href='https://a.example'",
    "xmlns=\"http://www.w3.org/1999/xhtml\"",
    "xmlns:xlink=\"http://www.w3.org/1999/xlink\" ",
    "xmlns:x=\"http://www.w3.org/1999/xlink\" ",
    "x:href=\"a\"",
    "fill=\"url(#a)\" ",
    "fill=\"url(a.svg)\"",
    "style=\"",
    "url(",
    "#a)",
    "\\75rl(a)",
    "@import 'a'",
    "&#117;",
    "&amp;",
    "&a;",
    "javascript:alert(1)",
    "data:text/html,x",
    "\"",
    "'",
    "=",
    "\u{feff}",
];

#[test]
fn logo() {
    harness::run("logo", 1000, |input| {
        check_logo(input);
        for text in texts(input, &FRAGMENTS) {
            check_logo(text.as_bytes());
            let wrapped = format!("<svg xmlns=\"http://www.w3.org/2000/svg\">{text}</svg>");
            check_logo(wrapped.as_bytes());
        }
    });
}

fn check_logo(logo: &[u8]) {
    let media_type = harness::assert_bounded(2, 16 * 1024 * 1024, || logo_media_type(logo));
    assert!(media_type.is_none() || logo.len() <= 32 * 1024);
    if media_type != Some("image/svg+xml") {
        return;
    }
    let text = std::str::from_utf8(logo).expect("an accepted SVG is UTF-8");
    let text = without_comments(text).to_ascii_lowercase();
    for forbidden in ["<script", "<foreignobject", "<image", "<set", "<a ", "<!", "<x:", "xml-stylesheet"] {
        assert!(!text.contains(forbidden), "{forbidden}: {text}");
    }
    // Checks only the tags. The text between the tags is shown unchanged, so it can contain anything.
    for tag in text.split('<').skip(1).map(|tag| tag.split('>').next().unwrap_or_default()) {
        let references = tag.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "");
        for forbidden in ["//", "javascript:", "data:", "&#", "&a;", "url(a", "\\"] {
            assert!(!references.contains(forbidden), "{forbidden}: {text}");
        }
        let names = without_values(tag);
        assert!(!names.contains("xmlns:x="), "{text}");
        assert!(!names.split_whitespace().any(|name| name.starts_with("on")), "{text}");
    }
}

/// A tag without the values of its attributes.
fn without_values(tag: &str) -> String {
    let mut quote = None;
    let is_outside = |c: &char| match quote {
        None if matches!(*c, '"' | '\'') => {
            quote = Some(*c);
            false
        }
        None => true,
        Some(end) => {
            quote = quote.filter(|_| *c != end);
            false
        }
    };
    tag.chars().filter(is_outside).collect()
}

fn without_comments(mut text: &str) -> String {
    let mut kept = String::new();
    while let Some((before, comment)) = text.split_once("<!--") {
        kept.push_str(before);
        text = comment.split_once("-->").map_or("", |(_, after)| after);
    }
    kept + text
}
