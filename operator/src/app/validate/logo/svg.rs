//! Checks an SVG against a list of what is allowed: shapes, text, gradients, filters, styles. There is no entity, no
//! script, no event handler, no HTML, no animation and no reference to another file.
//!
//! The check reads a subset of XML. What it cannot read, it refuses, so a browser never reads anything that the check
//! has not seen.

use std::borrow::Cow;

const NAMESPACE: &str = "http://www.w3.org/2000/svg";
const XLINK_NAMESPACE: &str = "http://www.w3.org/1999/xlink";

/// The elements that draw something or group other elements.
const ELEMENTS: [&str; 44] = [
    "circle",
    "clipPath",
    "defs",
    "desc",
    "ellipse",
    "feBlend",
    "feColorMatrix",
    "feComponentTransfer",
    "feComposite",
    "feConvolveMatrix",
    "feDiffuseLighting",
    "feDisplacementMap",
    "feDistantLight",
    "feDropShadow",
    "feFlood",
    "feFuncA",
    "feFuncB",
    "feFuncG",
    "feFuncR",
    "feGaussianBlur",
    "feMerge",
    "feMergeNode",
    "feMorphology",
    "feOffset",
    "fePointLight",
    "feTurbulence",
    "filter",
    "g",
    "line",
    "linearGradient",
    "mask",
    "path",
    "pattern",
    "polygon",
    "polyline",
    "radialGradient",
    "rect",
    "stop",
    "style",
    "svg",
    "text",
    "title",
    "tspan",
    "use",
];
/// Nested elements cost a browser stack.
const MAX_DEPTH: usize = 32;
/// Each `use` can repeat all others, so their number is the exponent of what a browser draws.
const MAX_USES: usize = 16;
/// Names appear in messages.
const MAX_NAME_LENGTH: usize = 64;

const NOT_READABLE: &str = "is not well-formed SVG";
const WHITE_SPACE: [char; 4] = [' ', '\t', '\r', '\n'];

type Refusal = Cow<'static, str>;

struct Tag<'a> {
    name: &'a str,
    attributes: Vec<(&'a str, &'a str)>,
    /// Whether the element ends with this tag: `<path/>`.
    is_empty: bool,
}

/// Returns why the SVG cannot be used.
pub(super) fn check(svg: &str) -> Result<(), Refusal> {
    let mut rest = skip_declaration(svg.trim_start_matches('\u{feff}').trim_start_matches(WHITE_SPACE))?;
    let mut open: Vec<&str> = Vec::new();
    let mut has_root = false;
    let mut uses = 0;
    while let Some((text, after)) = rest.split_once('<') {
        check_text(text, open.last().copied())?;
        if let Some(comment) = after.strip_prefix("!--") {
            rest = comment.split_once("-->").ok_or(NOT_READABLE)?.1;
        } else if after.starts_with(['!', '?']) {
            return Err("has a DOCTYPE, an entity, CDATA or a processing instruction; remove it".into());
        } else if let Some(end) = after.strip_prefix('/') {
            let (name, after) = end.split_once('>').ok_or(NOT_READABLE)?;
            if open.pop() != Some(name.trim_end_matches(WHITE_SPACE)) {
                return Err(NOT_READABLE.into());
            }
            rest = after;
        } else {
            let (tag, after) = parse_tag(after).ok_or(NOT_READABLE)?;
            check_tag(&tag)?;
            // One root, which is in the namespace of SVG.
            if open.is_empty() && (has_root || tag.name != "svg" || !tag.attributes.contains(&("xmlns", NAMESPACE))) {
                return Err(format!("has no root element svg with xmlns=\"{NAMESPACE}\"").into());
            }
            has_root = true;
            uses += usize::from(tag.name == "use");
            if uses > MAX_USES {
                return Err(format!("has more than {MAX_USES} elements use; draw the shapes instead").into());
            }
            if !tag.is_empty {
                open.push(tag.name);
            }
            if open.len() > MAX_DEPTH {
                return Err(format!("has elements that are nested more than {MAX_DEPTH} deep").into());
            }
            rest = after;
        }
    }
    check_text(rest, open.last().copied())?;
    if has_root && open.is_empty() { Ok(()) } else { Err(NOT_READABLE.into()) }
}

/// The text after the XML declaration, which can be missing. Another encoding would let a browser read other text.
fn skip_declaration(svg: &str) -> Result<&str, Refusal> {
    let Some(rest) = svg.strip_prefix("<?xml ") else { return Ok(svg) };
    let (declaration, rest) = rest.split_once("?>").ok_or(NOT_READABLE)?;
    let declaration = declaration.to_ascii_lowercase().replace('\'', "\"");
    let is_known = |word: &str| {
        matches!(word, "version=\"1.0\"" | "encoding=\"utf-8\"" | "standalone=\"no\"" | "standalone=\"yes\"")
    };
    if declaration.split_whitespace().all(is_known) {
        Ok(rest)
    } else {
        Err("has an XML declaration with something other than version 1.0 and UTF-8".into())
    }
}

/// Checks the text between two tags; `element` is the element around it.
fn check_text(text: &str, element: Option<&str>) -> Result<(), Refusal> {
    match element {
        None if !text.trim_matches(WHITE_SPACE).is_empty() => Err(NOT_READABLE.into()),
        // `&` could hide what the check looks for, and `@` begins an import.
        Some("style") if text.contains(['&', '@']) || refers_to_file(text) => {
            Err("has a style with an import, an escape or a reference to another file; remove it".into())
        }
        None | Some(_) => Ok(()),
    }
}

fn parse_tag(text: &str) -> Option<(Tag<'_>, &str)> {
    let (name, mut rest) = take_name(text)?;
    let mut attributes = Vec::new();
    loop {
        let trimmed = rest.trim_start_matches(WHITE_SPACE);
        if let Some(after) = trimmed.strip_prefix("/>") {
            return Some((Tag { name, attributes, is_empty: true }, after));
        }
        if let Some(after) = trimmed.strip_prefix('>') {
            return Some((Tag { name, attributes, is_empty: false }, after));
        }
        if trimmed.len() == rest.len() {
            return None;
        }
        let (attribute, after) = take_name(trimmed)?;
        let value = after.trim_start_matches(WHITE_SPACE).strip_prefix('=')?.trim_start_matches(WHITE_SPACE);
        let quote = value.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
        let (value, after) = value[1..].split_once(quote)?;
        if value.contains('<') {
            return None;
        }
        attributes.push((attribute, value));
        rest = after;
    }
}

fn take_name(text: &str) -> Option<(&str, &str)> {
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':'));
    let length = text.find(is_other).unwrap_or(text.len());
    (1..=MAX_NAME_LENGTH).contains(&length).then(|| text.split_at(length))
}

fn check_tag(tag: &Tag<'_>) -> Result<(), Refusal> {
    if !ELEMENTS.contains(&tag.name) {
        return Err(format!("has the element {}, which a logo cannot have; remove it", tag.name).into());
    }
    tag.attributes.iter().try_for_each(|(name, value)| check_attribute(name, value))
}

fn check_attribute(name: &str, value: &str) -> Result<(), Refusal> {
    if has_reference(value) {
        return Err(format!("has a character reference in the attribute {name}; write the character itself").into());
    }
    let lower = name.to_ascii_lowercase();
    match lower.as_str() {
        "xmlns" if value == NAMESPACE => Ok(()),
        "xmlns:xlink" if value == XLINK_NAMESPACE => Ok(()),
        "href" | "xlink:href" if !value.starts_with('#') => {
            Err(format!("refers to another file in the attribute {name}; remove it").into())
        }
        _ if refers_to_file(value) => {
            Err(format!("refers to another file, or has an escape, in the attribute {name}; remove it").into())
        }
        "href" | "xlink:href" | "xml:space" | "xml:lang" => Ok(()),
        _ if lower == "xmlns" || lower.contains(':') => {
            Err(format!("has the attribute {name}, which a logo cannot have; export it as plain SVG").into())
        }
        _ if lower.starts_with("on") => Err(format!("has the event handler {name}; remove it").into()),
        _ => Ok(()),
    }
}

/// Whether a value has a reference to a character or an entity, except those that XML needs for its own syntax.
fn has_reference(value: &str) -> bool {
    let is_needed = |rest: &str| ["amp;", "lt;", "gt;", "quot;", "apos;"].iter().any(|name| rest.starts_with(name));
    value.split('&').skip(1).any(|rest| !is_needed(rest))
}

/// Whether a style or the value of an attribute refers to anything other than a part of the same file, or has an escape
/// of CSS, which could hide such a reference.
fn refers_to_file(value: &str) -> bool {
    const FORBIDDEN: [&str; 9] =
        ["\\", "//", "javascript:", "data:", "image(", "image-set(", "cross-fade(", "element(", "src("];
    let value = value.to_ascii_lowercase();
    let is_local = |argument: &str| argument.trim_start_matches([' ', '\t', '\r', '\n', '\'', '"']).starts_with('#');
    FORBIDDEN.iter().any(|forbidden| value.contains(forbidden))
        || value.split("url(").skip(1).any(|argument| !is_local(argument))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn svg(content: &str) -> String {
        format!(r#"<svg xmlns="{NAMESPACE}" xmlns:xlink="{XLINK_NAMESPACE}" viewBox="0 0 9 9">{content}</svg>"#)
    }

    #[test]
    fn elements_are_listed_once_and_in_order() {
        assert!(ELEMENTS.is_sorted());
    }

    #[test]
    fn what_drawing_programs_export_is_accepted() {
        for content in [
            "",
            "<title>The &amp; Shop</title><desc>It's a \"logo\" @ home</desc>",
            "<!-- Generator: a program, https://example.com --><g id=\"a\"><path d=\"M0 0h9v9z\" fill='#1a56db' /></g>",
            "<style>.a{fill:#fff}.b{fill:url(#g);filter:url( '#f' )}</style><rect class=\"a\" width=\"9\" height=\"9\"/>",
            "<defs><linearGradient id=\"g\"><stop offset=\"0\" stop-color=\"red\"/></linearGradient></defs>",
            "<path style=\"fill:url('#g')\" d=\"M0 0\"/><use xlink:href=\"#a\"/>",
            "<use href=\"#a\"/><text xml:space=\"preserve\" data-name=\"x\">a<tspan>b</tspan></text>",
            "<filter id=\"f\"><feGaussianBlur stdDeviation=\"1\"/></filter>",
        ] {
            assert_eq!(check(&svg(content)), Ok(()), "{content}");
        }
        for declaration in [
            "<?xml version=\"1.0\"?>",
            "<?xml version=\"1.0\" encoding=\"UTF-8\" standalone=\"no\"?>\n",
            "<?xml version='1.0' encoding='utf-8'?><!-- c -->",
        ] {
            assert_eq!(check(&format!("{declaration}{}\n", svg(""))), Ok(()), "{declaration}");
        }
    }

    #[test]
    fn nothing_runs_and_nothing_is_loaded() {
        for (content, reason) in [
            // Scripts and event handlers.
            ("<script>alert(1)</script>", "element script"),
            ("<script href=\"#a\"/>", "element script"),
            ("<SCRIPT/>", "element SCRIPT"),
            ("<svg:script/>", "element svg:script"),
            ("<x:script xmlns:x=\"http://www.w3.org/1999/xhtml\"/>", "element x:script"),
            ("<g onload=\"alert(1)\"/>", "event handler onload"),
            ("<g ONCLICK='alert(1)'/>", "event handler ONCLICK"),
            ("<g a=\"b\"onload=\"alert(1)\"/>", NOT_READABLE),
            ("<g a=b onload=alert(1)/>", NOT_READABLE),
            ("<g/onload=\"alert(1)\"/>", NOT_READABLE),
            // Animations can change a link or add a handler.
            ("<set attributeName=\"onclick\" to=\"alert(1)\"/>", "element set"),
            ("<animate attributeName=\"href\" values=\"javascript:alert(1)\"/>", "element animate"),
            ("<handler type=\"application/ecmascript\"/>", "element handler"),
            // HTML.
            ("<foreignObject><p>x</p></foreignObject>", "element foreignObject"),
            ("<iframe src=\"https://a.example\"/>", "element iframe"),
            ("<g xmlns=\"http://www.w3.org/1999/xhtml\"/>", "attribute xmlns"),
            ("<style xmlns=\"http://www.w3.org/1999/xhtml\"/>", "attribute xmlns"),
            ("<g xmlns:x=\"http://www.w3.org/1999/xlink\" x:href=\"https://a.example\"/>", "attribute xmlns:x"),
            ("<g xml:base=\"https://a.example/\"/>", "attribute xml:base"),
            ("<sodipodi:namedview/>", "element sodipodi:namedview"),
            // Other files.
            ("<image href=\"https://a.example/a.png\"/>", "element image"),
            ("<feImage href=\"https://a.example/a.png\"/>", "element feImage"),
            ("<a href=\"https://a.example\"/>", "element a"),
            ("<use href=\"https://a.example/a.svg#a\"/>", "attribute href"),
            ("<use xlink:href=\"a.svg#a\"/>", "attribute xlink:href"),
            ("<use xlink:href=\"data:image/svg+xml,x\"/>", "attribute xlink:href"),
            ("<use href=\" javascript:alert(1)\"/>", "attribute href"),
            ("<use href=\"&#104;ttps://a.example\"/>", "character reference in the attribute href"),
            ("<path fill=\"url(https://a.example/#a)\"/>", "attribute fill"),
            ("<path fill=\"url( 'a.svg#a')\"/>", "attribute fill"),
            ("<path fill=\"URL(a.svg#a)\"/>", "attribute fill"),
            ("<path fill=\"url(#a) url(b.svg)\"/>", "attribute fill"),
            ("<path cursor=\"url(&quot;//a.example&quot;)\"/>", "attribute cursor"),
            ("<path style=\"fill:\\75rl(a.svg)\"/>", "attribute style"),
            ("<path style=\"fill:u&#114;l(a.svg)\"/>", "character reference in the attribute style"),
            ("<path style=\"fill:&bomb;\"/>", "character reference in the attribute style"),
            ("<path style=\"mask:image-set('a.png' 1x)\"/>", "attribute style"),
            ("<style>@import 'https://a.example';</style>", "has a style"),
            ("<style>@\\69mport 'a';</style>", "has a style"),
            ("<style>.a{fill:url(a.svg)}</style>", "has a style"),
            ("<style>.a{fill:u&#114;l(a.svg)}</style>", "has a style"),
            ("<style>.a{fill:red}<!-- -->.b{fill:url(b.svg)}</style>", "has a style"),
            // Entities, CDATA, processing instructions.
            ("<![CDATA[<script>alert(1)</script>]]>", "has a DOCTYPE, an entity"),
            ("<style><![CDATA[@import 'a']]></style>", "has a DOCTYPE, an entity"),
            ("<?xml-stylesheet href=\"https://a.example/a.css\"?>", "has a DOCTYPE, an entity"),
            ("<!ENTITY a \"b\">", "has a DOCTYPE, an entity"),
            // Not well-formed.
            ("<g>", NOT_READABLE),
            ("</g>", NOT_READABLE),
            ("<g></path>", NOT_READABLE),
            ("<g a=\"<script>\"/>", NOT_READABLE),
            ("<g a=\"b", NOT_READABLE),
            ("<!-- ", NOT_READABLE),
            ("< g/>", NOT_READABLE),
            ("<g\u{b}onload=\"a\"/>", NOT_READABLE),
            ("<gé/>", NOT_READABLE),
        ] {
            let refusal = check(&svg(content)).expect_err(content);
            assert!(refusal.contains(reason), "{content}: {refusal}");
        }
    }

    #[test]
    fn the_root_is_one_svg_without_a_doctype() {
        let valid = svg("");
        for (text, reason) in [
            ("<html/>".to_owned(), "element html"),
            ("<g/>".to_owned(), "has no root element svg"),
            ("<svg/>".to_owned(), "has no root element svg"),
            (format!("{valid}{valid}"), "has no root element svg"),
            (format!("{valid}<script/>"), "element script"),
            (format!("x{valid}"), NOT_READABLE),
            (format!("{valid}x"), NOT_READABLE),
            ("<!-- only a comment -->".to_owned(), NOT_READABLE),
            (format!("<!DOCTYPE svg [<!ENTITY a \"aaaa\">]>{valid}"), "has a DOCTYPE"),
            (format!("<!doctype html>{valid}"), "has a DOCTYPE"),
            (format!("<?xml version=\"1.0\" encoding=\"UTF-7\"?>{valid}"), "XML declaration"),
            (format!("<?xml version=\"1.0\" encoding=\"utf-7\" x=\"utf-8\"?>{valid}"), "XML declaration"),
            (format!("<?xml version=\"1.1\"?>{valid}"), "XML declaration"),
            (format!("<?xml-stylesheet href=\"a.css\"?>{valid}"), "processing instruction"),
        ] {
            let refusal = check(&text).expect_err(&text);
            assert!(refusal.contains(reason), "{text}: {refusal}");
        }
    }

    #[test]
    fn depth_repetition_and_names_are_bounded() {
        let nested = |depth: usize| svg(&format!("{}{}", "<g>".repeat(depth), "</g>".repeat(depth)));
        assert_eq!(check(&nested(MAX_DEPTH - 1)), Ok(()));
        assert!(check(&nested(MAX_DEPTH)).unwrap_err().contains("nested more than 32 deep"));
        let uses = |count: usize| svg(&"<use href=\"#a\"/>".repeat(count));
        assert_eq!(check(&uses(MAX_USES)), Ok(()));
        assert!(check(&uses(MAX_USES + 1)).unwrap_err().contains("more than 16 elements use"));
        let refusal = check(&svg(&format!("<{}/>", "a".repeat(1000)))).unwrap_err();
        assert!(refusal.len() < 100, "{refusal}");
    }
}
