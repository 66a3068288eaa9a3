//! The bounds of a template, checked on its tokens before MiniJinja parses it.
//!
//! MiniJinja's parser, its compiler and the destructor of its syntax tree recurse: a few hundred `-` in one tag overflow the
//! stack, which ends the process. Its tokenizer does not recurse, and the parser sees the same tokens. So whatever makes the
//! parser recurse or allocate is counted here first. The counters cover every construct, also those that the language of
//! mails does not have, because the parser reads them before they can be refused.

use minijinja::{
    machinery::{Span, Token, Tokenizer},
    syntax::SyntaxConfig,
};

use super::{Part, TemplateError, refuse};

/// Bytes of a template. The ConfigMap of an App has the same bound. A part shows 64 KiB at most; comments and branches that
/// are not taken come on top.
pub(super) const MAX_SOURCE: usize = 256 * 1024;

/// Characters of a line. The tokenizer counts columns in 16 bits and adds one to the last of them: beyond 65,534 characters
/// an error overflows. A whole mail may stand in one line, as tools that shrink HTML write it.
pub(super) const MAX_LINE: usize = 60_000;

/// Tokens of all templates of an App together, with one for each piece of text. Compiled they take up to 3 MB, and a server
/// keeps those of several Apps. All default mails together have 900.
pub(super) const MAX_TOKENS: usize = 20_000;

/// Characters of a tag. Bounds the strings in it, and so what a filter has to copy.
pub(super) const MAX_TAG: usize = 2_000;

/// Tokens of a tag. The longest chain of operators recurses once for each.
pub(super) const MAX_TAG_TOKENS: usize = 100;

/// Filters of a tag. Each can make a text longer (`escape` and `upper` in turn: four characters for each `&`), and the next
/// one copies it.
pub(super) const MAX_FILTERS: usize = 8;

/// Depth of parentheses, brackets and braces in a tag. The parser calls itself 15 times for each.
pub(super) const MAX_NESTING: usize = 8;

/// Depth of `if` and `block`. An `elif` counts as one more, since the parser reads it as an `if` inside of its `if`.
pub(super) const MAX_DEPTH: usize = 16;

/// Blocks of a template. Each is a program of its own, of 14 KB before its first instruction; the layout has five.
pub(super) const MAX_BLOCKS: usize = 20;

/// The tag that is being read.
#[derive(Default)]
struct Tag {
    start: u32,
    tokens: usize,
    filters: usize,
    nesting: usize,
    is_statement: bool,
}

/// The statements that are open.
#[derive(Default)]
struct Statements {
    /// For each how deep it is, with its `elif`s.
    open: Vec<usize>,
    depth: usize,
    blocks: usize,
}

/// Refuses a template that could cost more than a mail may. Returns its number of tokens.
pub(super) fn check(source: &str, part: Part) -> Result<usize, TemplateError> {
    if source.len() > MAX_SOURCE {
        let reason = format!("is over {} KiB; shorten it", MAX_SOURCE / 1024);
        return Err(TemplateError { line: None, reason });
    }
    if let Some(index) = source.split('\n').position(|line| line.chars().count() > MAX_LINE) {
        let reason = format!("the line has more than {MAX_LINE} characters; break it");
        return Err(TemplateError { line: u32::try_from(index + 1).ok(), reason });
    }
    let mut tokenizer = Tokenizer::new(source, part.as_str(), false, SyntaxConfig::default());
    let mut tokens = 0;
    let mut tag = Tag::default();
    let mut statements = Statements::default();
    // The parser stops where the tokenizer fails, if not before, and says why.
    while let Ok(Some((token, span))) = tokenizer.next_token() {
        tokens += 1;
        if tokens > MAX_TOKENS {
            return refuse(span, &too_many_tokens());
        }
        match token {
            Token::TemplateData(_) => {}
            Token::VariableStart | Token::BlockStart => {
                let is_statement = matches!(token, Token::BlockStart);
                tag = Tag { start: span.start_offset, is_statement, ..Tag::default() };
            }
            token => {
                let text = source.get(tag.start as usize..span.end_offset as usize).unwrap_or_default();
                tag.add(&token, text, span)?;
                if let (true, 1, Token::Ident(keyword)) = (tag.is_statement, tag.tokens, &token) {
                    statements.add(keyword, span)?;
                }
            }
        }
    }
    Ok(tokens)
}

pub(super) fn too_many_tokens() -> String {
    format!("all templates together may have {MAX_TOKENS} words and signs in their tags; make them simpler")
}

// === impl Tag ===

impl Tag {
    /// `text` is the tag up to the end of this token.
    fn add(&mut self, token: &Token<'_>, text: &str, span: Span) -> Result<(), TemplateError> {
        if text.len() > MAX_TAG && text.chars().count() > MAX_TAG {
            return refuse(span, &format!("a tag has more than {MAX_TAG} characters; close it, or shorten it"));
        }
        self.tokens += 1;
        if self.tokens > MAX_TAG_TOKENS {
            return refuse(span, &format!("a tag has more than {MAX_TAG_TOKENS} words and signs; make it simpler"));
        }
        match token {
            Token::Pipe => self.filters += 1,
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => self.nesting += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                self.nesting = self.nesting.saturating_sub(1);
            }
            _ => {}
        }
        if self.filters > MAX_FILTERS {
            return refuse(span, &format!("a tag has more than {MAX_FILTERS} filters; take some away"));
        }
        if self.nesting > MAX_NESTING {
            return refuse(span, &format!("a tag nests more than {MAX_NESTING} parentheses; make it simpler"));
        }
        Ok(())
    }
}

// === impl Statements ===

impl Statements {
    fn add(&mut self, keyword: &str, span: Span) -> Result<(), TemplateError> {
        match keyword {
            "if" | "block" => {
                self.open.push(1);
                self.depth += 1;
                self.blocks += usize::from(keyword == "block");
            }
            "elif" => {
                if let Some(depth) = self.open.last_mut() {
                    *depth += 1;
                    self.depth += 1;
                }
            }
            "endif" | "endblock" => self.depth -= self.open.pop().unwrap_or(0),
            "else" | "extends" => {}
            "filter" => return refuse(span, "filter blocks are not available in mail templates"),
            "from" => return refuse(span, "import is not available in mail templates"),
            other => return refuse(span, &format!("{other} is not available in mail templates")),
        }
        if self.depth > MAX_DEPTH {
            let reason =
                format!("nests if and block more than {MAX_DEPTH} deep, where each elif counts; make it simpler");
            return refuse(span, &reason);
        }
        if self.blocks > MAX_BLOCKS {
            return refuse(span, &format!("has more than {MAX_BLOCKS} blocks; take some away"));
        }
        Ok(())
    }
}
