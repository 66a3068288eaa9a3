//! Checks that a template and its tokens are within bounds, before MiniJinja parses it.
//!
//! MiniJinja's parser, its compiler and the destructor of its syntax tree recurse: a few hundred `-` in one tag
//! overflow the stack, which ends the process. Its tokenizer does not recurse, and the parser gets the same tokens. So
//! everything that makes the parser recurse or allocate is counted here first. The counters cover every construct, even
//! those that email templates cannot use, because the parser reads them before [`super::sandbox`] can reject them.

use minijinja::{
    machinery::{Span, Token, Tokenizer},
    syntax::SyntaxConfig,
};

use super::{MailPart, TemplateError, error_at};

/// Maximum bytes of a template. All templates of an App together (its ConfigMap) have the same bound. A rendered part
/// has at most 64 KiB, but a source also contains comments and branches that are not taken.
pub(super) const MAX_SOURCE_BYTES: usize = 256 * 1024;

/// Maximum characters of a line. The tokenizer counts columns in 16 bits, and an error adds one to the last column,
/// which overflows beyond 65,534 characters. A whole mail can be one line, for example from an HTML minifier.
pub(super) const MAX_LINE_CHARS: usize = 60_000;

/// Maximum tokens of all templates of an App together; each piece of text is one token. Compiled templates need up to 3
/// MB, and a server has the compiled templates of several Apps in memory. All default mails together have 900 tokens.
pub(super) const MAX_TOKENS: usize = 20_000;

/// Maximum characters of a tag. This also bounds the strings in the tag, and so the bytes that a filter copies.
pub(super) const MAX_TAG_CHARS: usize = 2_000;

/// Maximum tokens of a tag. A chain of operators makes the parser recurse once per token.
pub(super) const MAX_TAG_TOKENS: usize = 100;

/// Maximum filters of a tag. Each can lengthen a text, and the next one copies the text: if `escape` and `upper`
/// alternate, each `&` becomes four characters longer with every `escape`.
pub(super) const MAX_FILTERS: usize = 8;

/// Maximum depth of parentheses, brackets and braces in a tag. The parser recurses 15 calls deep for each level.
pub(super) const MAX_NESTING: usize = 8;

/// Maximum depth of `if` and `block`. An `elif` adds one, because the parser reads it as an `if` inside its `if`.
pub(super) const MAX_DEPTH: usize = 16;

/// Maximum blocks of a template. Each is compiled to a separate program, which needs 14 KB even without instructions.
/// The layout has five blocks.
pub(super) const MAX_BLOCKS: usize = 20;

/// The tag that is being read, with counts of what it contains so far.
#[derive(Default)]
struct Tag {
    start: u32,
    tokens: usize,
    filters: usize,
    nesting: usize,
    is_statement: bool,
}

/// The open `if` and `block` statements, and the number of all blocks.
#[derive(Default)]
struct Statements {
    /// How much each open statement adds to `depth`: 1, and 1 for each of its `elif`s.
    open: Vec<usize>,
    depth: usize,
    blocks: usize,
}

/// Rejects a template that exceeds a bound. Returns its number of tokens.
pub(super) fn check(source: &str, part: MailPart) -> Result<usize, TemplateError> {
    if source.len() > MAX_SOURCE_BYTES {
        let reason = format!("is over {} KiB; shorten it", MAX_SOURCE_BYTES / 1024);
        return Err(TemplateError { line: None, reason });
    }
    if let Some(index) = source.split('\n').position(|line| line.chars().count() > MAX_LINE_CHARS) {
        let reason = format!("the line has more than {MAX_LINE_CHARS} characters; break it");
        return Err(TemplateError { line: u32::try_from(index + 1).ok(), reason });
    }
    let mut tokenizer = Tokenizer::new(source, part.as_str(), false, SyntaxConfig::default());
    let mut tokens = 0;
    let mut tag = Tag::default();
    let mut statements = Statements::default();
    // If the tokenizer fails, the parser fails at the same token or earlier, and reports the error.
    while let Ok(Some((token, span))) = tokenizer.next_token() {
        tokens += 1;
        if tokens > MAX_TOKENS {
            return error_at(span, &too_many_tokens());
        }
        match token {
            Token::TemplateData(_) => {}
            Token::VariableStart | Token::BlockStart => {
                let is_statement = matches!(token, Token::BlockStart);
                tag = Tag { start: span.start_offset, is_statement, ..Tag::default() };
            }
            token => {
                let text = source.get(tag.start as usize..span.end_offset as usize).unwrap_or_default();
                tag.add_token(&token, text, span)?;
                if let (true, 1, Token::Ident(keyword)) = (tag.is_statement, tag.tokens, &token) {
                    statements.add_statement(keyword, span)?;
                }
            }
        }
    }
    Ok(tokens)
}

pub(super) fn too_many_tokens() -> String {
    format!("all templates together can have at most {MAX_TOKENS} words and signs in their tags; simplify them")
}

// === impl Tag ===

impl Tag {
    /// Counts a token of this tag. `text` is the text of the tag up to the end of the token.
    fn add_token(&mut self, token: &Token<'_>, text: &str, span: Span) -> Result<(), TemplateError> {
        if text.len() > MAX_TAG_CHARS && text.chars().count() > MAX_TAG_CHARS {
            return error_at(span, &format!("a tag has more than {MAX_TAG_CHARS} characters; close it, or shorten it"));
        }
        self.tokens += 1;
        if self.tokens > MAX_TAG_TOKENS {
            return error_at(span, &format!("a tag has more than {MAX_TAG_TOKENS} words and signs; simplify it"));
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
            return error_at(span, &format!("a tag has more than {MAX_FILTERS} filters; remove some"));
        }
        if self.nesting > MAX_NESTING {
            return error_at(span, &format!("a tag nests more than {MAX_NESTING} parentheses; simplify it"));
        }
        Ok(())
    }
}

// === impl Statements ===

impl Statements {
    fn add_statement(&mut self, keyword: &str, span: Span) -> Result<(), TemplateError> {
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
            "filter" => return error_at(span, "filter blocks are not available in mail templates"),
            "from" => return error_at(span, "import is not available in mail templates"),
            other => return error_at(span, &format!("{other} is not available in mail templates")),
        }
        if self.depth > MAX_DEPTH {
            let reason = format!("nests if and block more than {MAX_DEPTH} deep, and each elif counts; simplify it");
            return error_at(span, &reason);
        }
        if self.blocks > MAX_BLOCKS {
            return error_at(span, &format!("has more than {MAX_BLOCKS} blocks; remove some"));
        }
        Ok(())
    }
}
