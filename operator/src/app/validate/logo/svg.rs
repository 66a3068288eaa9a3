//! Checks an SVG against a list of what is allowed: shapes, text, gradients, filters, styles. Entities, scripts, event
//! handlers, HTML, animations and references to other files are not on the list. The check reads a subset of XML and
//! refuses a file that it cannot read. So a browser never reads anything that was not checked.

use std::{borrow::Cow, collections::BTreeSet};

const NAMESPACE: &str = "http://www.w3.org/2000/svg";
const XLINK_NAMESPACE: &str = "http://www.w3.org/1999/xlink";

/// The elements that a logo can have: shapes, text, gradients, filters, styles, and groups of elements.
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
/// The maximum depth of nested elements. Browsers process them recursively.
const MAX_DEPTH: usize = 32;
/// The maximum number of `use` elements. Each `use` can draw all other `use` elements again, so the number of drawn
/// shapes can grow exponentially with the number of `use` elements.
const MAX_USES: usize = 16;
/// The *containers*: a browser draws the content of such an element again for each reference to the element. The
/// content can itself refer to containers. The content of gradients and filters cannot, so they are not containers.
const CONTAINERS: [&str; 3] = ["clipPath", "mask", "pattern"];
/// The maximum number of references that are inside a container and refer to a container. The number of drawn shapes
/// can grow exponentially with the number of these references.
const MAX_NESTED_REFERENCES: usize = 16;
/// The maximum length of a name, in bytes. There is a maximum, because error messages contain names.
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

/// Collects the references between containers ([`CONTAINERS`]). Ids are in lower case, so ids that differ only in case
/// count as the same.
#[derive(Default)]
struct References {
    /// The ids of the containers.
    containers: BTreeSet<String>,
    elements: Vec<ReferringElement>,
    /// The ids to which styles refer.
    in_styles: Vec<String>,
    /// Whether a style has selectors other than class selectors, so that it can apply to elements without a class.
    has_other_selectors: bool,
    /// Whether a container has a `use`, which can bring any element into the container.
    has_inner_use: bool,
}

struct ReferringElement {
    ids: Vec<String>,
    is_inner: bool,
    has_class: bool,
}

/// Returns why the SVG cannot be used.
pub(super) fn check(svg: &str) -> Result<(), Refusal> {
    let mut rest = skip_declaration(svg.trim_start_matches('\u{feff}').trim_start_matches(WHITE_SPACE))?;
    let mut open: Vec<&str> = Vec::new();
    let mut has_root = false;
    let mut uses = 0;
    let mut references = References::default();
    while let Some((text, after)) = rest.split_once('<') {
        check_text(text, open.last().copied())?;
        if open.last() == Some(&"style") {
            // The text of a style must be in one piece, because it is checked as a whole. A comment would split the
            // text.
            if !after.starts_with("/style") {
                return Err("has a style with a comment, CDATA or an element; remove it".into());
            }
            references.add_style(text);
        }
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
            // There must be one root, in the namespace of SVG.
            if open.is_empty() && (has_root || tag.name != "svg" || !tag.attributes.contains(&("xmlns", NAMESPACE))) {
                return Err(format!("has no root element svg with xmlns=\"{NAMESPACE}\"").into());
            }
            has_root = true;
            uses += usize::from(tag.name == "use");
            if uses > MAX_USES {
                return Err(format!("has more than {MAX_USES} elements use; draw the shapes instead").into());
            }
            references.add_element(&tag, &open);
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
    if references.count_inner() > MAX_NESTED_REFERENCES {
        let most = MAX_NESTED_REFERENCES;
        return Err(format!("has more than {most} references inside of {}; simplify it", CONTAINERS.join(", ")).into());
    }
    if has_root && open.is_empty() { Ok(()) } else { Err(NOT_READABLE.into()) }
}

// === impl References ===

impl References {
    /// Records an element and its references. `open` are the elements around the tag.
    fn add_element(&mut self, tag: &Tag<'_>, open: &[&str]) {
        let is_container = CONTAINERS.contains(&tag.name);
        let is_inner = is_container || open.iter().any(|name| CONTAINERS.contains(name));
        if is_container {
            let ids = tag.attributes.iter().filter(|(name, _)| *name == "id");
            self.containers.extend(ids.map(|(_, id)| id.to_ascii_lowercase()));
        }
        self.has_inner_use |= is_inner && tag.name == "use";
        let ids = tag.attributes.iter().flat_map(|(_, value)| referenced_ids(value)).collect();
        let has_class = tag.attributes.iter().any(|(name, _)| *name == "class");
        self.elements.push(ReferringElement { ids, is_inner, has_class });
    }

    fn add_style(&mut self, style: &str) {
        self.in_styles.extend(referenced_ids(style));
        self.has_other_selectors |= !has_only_class_selectors(style);
    }

    /// Counts the references that are inside a container and refer to a container.
    fn count_inner(&self) -> usize {
        let in_styles = self.count_containers(&self.in_styles);
        let inner = self.elements.iter().filter(|element| element.is_inner || self.has_inner_use);
        let count = |element: &ReferringElement| {
            let has_style = element.has_class || self.has_other_selectors;
            self.count_containers(&element.ids) + if has_style { in_styles } else { 0 }
        };
        inner.map(count).sum()
    }

    /// Counts how many of these ids are ids of containers. An id with special characters can be written in several
    /// ways, so it always counts as the id of a container.
    fn count_containers(&self, ids: &[String]) -> usize {
        let is_simple = |id: &str| id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte));
        ids.iter().filter(|id| !is_simple(id.as_str()) || self.containers.contains(id.as_str())).count()
    }
}

/// Whether every rule has the form `.a,.b{…}`. Returns false for a style that is not understood.
fn has_only_class_selectors(style: &str) -> bool {
    let is_class = |selector: &str| {
        let selector = selector.trim_matches(WHITE_SPACE);
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        selector.starts_with('.') && selector.bytes().all(is_name)
    };
    let mut rules = style.split('}').filter(|rule| !rule.trim_matches(WHITE_SPACE).is_empty());
    rules.all(|rule| match rule.split_once('{') {
        Some((selectors, declarations)) => !declarations.contains('{') && selectors.split(',').all(is_class),
        None => false,
    })
}

/// The ids in the references `url(#id)` of a value or a style, in lower case.
fn referenced_ids(text: &str) -> Vec<String> {
    let text = text.to_ascii_lowercase();
    let id = |argument: &str| {
        let argument = argument.trim_start_matches([' ', '\t', '\r', '\n', '\'', '"', '#']);
        let end = argument.find([' ', '\t', '\r', '\n', '\'', '"', ')']).unwrap_or(argument.len());
        argument[..end].to_owned()
    };
    text.split("url(").skip(1).map(id).collect()
}

/// Returns the text after the XML declaration, which can be missing. Refuses encodings other than UTF-8: with another
/// encoding, a browser would read another text than this check.
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
    let (name, mut rest) = split_name(text)?;
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
        let (attribute, after) = split_name(trimmed)?;
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

fn split_name(text: &str) -> Option<(&str, &str)> {
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

/// Whether a style or the value of an attribute refers to anything other than a part of the same file, or has a CSS
/// escape, which could hide such a reference.
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
    fn svgs_from_drawing_programs_are_accepted() {
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
    fn svgs_that_run_or_load_something_are_refused() {
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
            // Animations, which can change a link or add an event handler.
            ("<set attributeName=\"onclick\" to=\"alert(1)\"/>", "element set"),
            ("<animate attributeName=\"href\" values=\"javascript:alert(1)\"/>", "element animate"),
            ("<handler type=\"application/ecmascript\"/>", "element handler"),
            // Elements of HTML.
            ("<foreignObject><p>x</p></foreignObject>", "element foreignObject"),
            ("<iframe src=\"https://a.example\"/>", "element iframe"),
            ("<g xmlns=\"http://www.w3.org/1999/xhtml\"/>", "attribute xmlns"),
            ("<style xmlns=\"http://www.w3.org/1999/xhtml\"/>", "attribute xmlns"),
            ("<g xmlns:x=\"http://www.w3.org/1999/xlink\" x:href=\"https://a.example\"/>", "attribute xmlns:x"),
            ("<g xml:base=\"https://a.example/\"/>", "attribute xml:base"),
            ("<sodipodi:namedview/>", "element sodipodi:namedview"),
            // References to other files.
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
            // A browser joins the texts around a comment.
            ("<style>.a{fill:u<!-- -->rl(https://a.example/#a)}</style>", "has a style"),
            ("<style>.a{fill:url(<!-- -->https://a.example)}</style>", "has a style"),
            ("<style>.a{fill:url(#a<!---->) url(b.svg)}</style>", "has a style"),
            ("<style>.a{fill:ur<title/>l(b.svg)}</style>", "has a style"),
            ("<style>.a{}<style>.b{}</style></style>", "has a style"),
            ("<style>.a{}</stylex>", NOT_READABLE),
            // Entities, CDATA, processing instructions.
            ("<![CDATA[<script>alert(1)</script>]]>", "has a DOCTYPE, an entity"),
            ("<style><![CDATA[@import 'a']]></style>", "has a style"),
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

    #[test]
    fn references_between_masks_patterns_and_clip_paths_are_bounded() {
        let is_bounded = |content: String| match check(&svg(&content)) {
            Ok(()) => true,
            Err(refusal) => {
                assert!(refusal.contains("more than 16 references inside"), "{refusal}");
                false
            }
        };
        // Each of `levels` masks draws the next one `count` times.
        let nested = |levels: usize, count: usize, name: &str, attribute: &str| -> String {
            let shape = |level: usize| format!("<rect {attribute}=\" URL( '#M{}' )\"/>", level + 1);
            let one = |level| format!("<{name} id=\"m{level}\">{}</{name}>", shape(level).repeat(count));
            (0..levels).map(one).collect::<String>() + "<rect mask=\"url(#m0)\"/>"
        };
        for (name, attribute) in
            [("mask", "mask"), ("pattern", "fill"), ("clipPath", "clip-path"), ("mask", "style"), ("pattern", "filter")]
        {
            // The references of the last level lead to an element that does not exist, so they do not count: 9 levels
            // have 8 times 2 references.
            assert!(is_bounded(nested(9, 2, name, attribute)), "{name}");
            assert!(!is_bounded(nested(10, 2, name, attribute)), "{name}");
            assert!(!is_bounded(nested(3, 9, name, attribute)), "{name}");
        }
        // A style can make the elements in a mask refer to a container. A class selector affects only elements with a
        // class. Other selectors can affect all elements.
        let styled = |style: &str, shape: &str, count: usize| {
            format!("<style>{style}</style><mask id=\"m\">{}</mask>", shape.repeat(count))
        };
        let (rule, class) = (".a, .b{fill:red}\n.c{mask:url(#m)}", "<rect class=\"a\"/>");
        assert!(is_bounded(styled(rule, class, 16)) && !is_bounded(styled(rule, class, 17)));
        assert!(is_bounded(styled(rule, "<rect/>", 100)));
        for other in [
            "rect{mask:url(#m)}",
            "*{mask:url(#m)}",
            ".a rect{mask:url(#m)}",
            ".a{}.a>*{mask:url(#m)}",
            ".a{rect{mask:url(#m)}}",
            ".a{}/*}.b{*/rect{mask:url(#m)}",
            ".a:hover,#b{mask:url(#m)}",
        ] {
            assert!(!is_bounded(styled(other, "<rect/>", 17)), "{other}");
        }
        // A `use` in a mask can draw any element.
        let used = |inner: &str| {
            let group = "<rect mask=\"url(#m)\"/>".repeat(17);
            format!("<g id=\"g\">{group}</g><mask id=\"m\">{inner}</mask>")
        };
        assert!(is_bounded(used("<rect/>")) && !is_bounded(used("<use href=\"#g\"/>")));
        // The same id can be written in several ways: `%6D` is `m`.
        let encoded = "<rect mask=\"url(#%6D)\"/>".repeat(17);
        assert!(!is_bounded(format!("<mask id=\"m\">{encoded}</mask>")));
        // References to gradients do not count, because gradients contain nothing that is drawn.
        let gradients = "<rect fill=\"url(#g)\"/>".repeat(100);
        assert!(is_bounded(format!("<linearGradient id=\"g\"/><mask id=\"m\">{gradients}</mask>")));
        assert!(is_bounded(format!("<mask id=\"m\"/>{}", "<rect mask=\"url(#m)\"/>".repeat(100))));
    }
}
