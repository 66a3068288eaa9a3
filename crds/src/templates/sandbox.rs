//! The constructs that an App's own templates can use: text, the variables, conditions, a few filters and the layout.
//!
//! Fuel bounds instructions and [`super::MAX_RENDERED_SIZE`] bounds output, but neither bounds the intermediate values
//! that `x ~ x`, a captured block or a filter such as `replace` can create: thirty doublings make a gigabyte, in a
//! process that serves every App. So constructs that can grow a value are not available, and neither are constructs
//! that disable escaping.

use minijinja::{
    Environment, filters,
    machinery::{
        ast::{BinOpKind, CallArg, Expr, Stmt, UnaryOpKind},
        parse,
    },
    syntax::SyntaxConfig,
};

use super::{LAYOUT, MailPart, TemplateError, VARIABLES, error_at};

/// The available filters. Each lengthens a value at most by a small factor, and [`super::bounds::MAX_FILTERS`] bounds
/// their chains.
const FILTERS: [&str; 9] = ["upper", "lower", "title", "capitalize", "trim", "default", "d", "escape", "e"];

/// The blocks of the layout.
const BLOCKS: [&str; 5] = ["title", "preheader", "heading", "content", "footer"];

const ARITHMETIC: &str = "+ - * / % ** ~ are not available in mail templates";

/// Adds the available filters, [`FILTERS`].
pub(super) fn add_filters(env: &mut Environment<'_>) {
    env.add_filter("upper", filters::upper);
    env.add_filter("lower", filters::lower);
    env.add_filter("title", filters::title);
    env.add_filter("capitalize", filters::capitalize);
    env.add_filter("trim", filters::trim);
    env.add_filter("default", filters::default);
    env.add_filter("d", filters::default);
    env.add_filter("escape", filters::escape);
    env.add_filter("e", filters::escape);
}

/// Rejects a template with a construct that is not available, even in a branch that is not taken.
pub(super) fn check(source: &str, part: MailPart) -> Result<(), TemplateError> {
    let template = parse(source, part.as_str(), SyntaxConfig::default())
        .map_err(|error| TemplateError::new(&error, error.detail()))?;
    check_statement(&template, part == MailPart::Html)?;
    match &template {
        Stmt::Template(template) if template.children.iter().any(|stmt| matches!(stmt, Stmt::Extends(_))) => {
            template.children.iter().try_for_each(check_block)
        }
        _ => Ok(()),
    }
}

/// Rejects blocks that the layout does not have, because their content would be dropped silently.
fn check_block(stmt: &Stmt<'_>) -> Result<(), TemplateError> {
    match stmt {
        Stmt::Block(block) if !BLOCKS.contains(&block.name) => {
            let available = BLOCKS.join(", ");
            error_at(block.span(), &format!("the layout has no block {}; it has {available}", block.name))
        }
        Stmt::IfCond(cond) => cond.true_body.iter().chain(&cond.false_body).try_for_each(check_block),
        _ => Ok(()),
    }
}

fn check_statement(stmt: &Stmt<'_>, is_html: bool) -> Result<(), TemplateError> {
    let check_all = |stmts: &[Stmt<'_>]| stmts.iter().try_for_each(|stmt| check_statement(stmt, is_html));
    match stmt {
        Stmt::Template(template) => check_all(&template.children),
        Stmt::EmitRaw(_) => Ok(()),
        Stmt::EmitExpr(emit) => check_expression(&emit.expr),
        Stmt::IfCond(cond) => {
            check_expression(&cond.expr)?;
            check_all(&cond.true_body)?;
            check_all(&cond.false_body)
        }
        Stmt::Block(block) => check_all(&block.body),
        Stmt::Extends(extends) => match &extends.name {
            Expr::Const(name) if is_html && name.value.as_str() == Some(LAYOUT) => Ok(()),
            _ => error_at(extends.span(), "extends can name only \"layout.html\", and only in an .html template"),
        },
        Stmt::ForLoop(_)
        | Stmt::WithBlock(_)
        | Stmt::Set(_)
        | Stmt::SetBlock(_)
        | Stmt::AutoEscape(_)
        | Stmt::FilterBlock(_)
        | Stmt::Import(_)
        | Stmt::FromImport(_)
        | Stmt::Include(_)
        | Stmt::Do(_) => {
            // `bounds` has already rejected the keywords of these statements.
            let reason = "has a statement that is not available in mail templates".to_owned();
            Err(TemplateError { line: None, reason })
        }
    }
}

fn check_expression(expr: &Expr<'_>) -> Result<(), TemplateError> {
    match expr {
        Expr::Const(_) => Ok(()),
        Expr::Var(var) if VARIABLES.contains(&var.id) => Ok(()),
        Expr::Var(var) => {
            let available = VARIABLES.join(", ");
            error_at(var.span(), &format!("there is no variable {}; there are {available}", var.id))
        }
        Expr::UnaryOp(op) => match op.op {
            UnaryOpKind::Not => check_expression(&op.expr),
            UnaryOpKind::Neg => error_at(op.span(), ARITHMETIC),
        },
        Expr::BinOp(op) => {
            match op.op {
                BinOpKind::Eq
                | BinOpKind::Ne
                | BinOpKind::Lt
                | BinOpKind::Lte
                | BinOpKind::Gt
                | BinOpKind::Gte
                | BinOpKind::ScAnd
                | BinOpKind::ScOr
                | BinOpKind::In => {}
                BinOpKind::Add
                | BinOpKind::Sub
                | BinOpKind::Mul
                | BinOpKind::Div
                | BinOpKind::FloorDiv
                | BinOpKind::Rem
                | BinOpKind::Pow
                | BinOpKind::Concat => {
                    return error_at(op.span(), ARITHMETIC);
                }
            }
            check_expression(&op.left)?;
            check_expression(&op.right)
        }
        Expr::Compare(compare) => {
            check_expression(&compare.expr)?;
            compare.ops.iter().try_for_each(|op| check_expression(&op.expr))
        }
        Expr::IfExpr(expr) => {
            check_expression(&expr.test_expr)?;
            check_expression(&expr.true_expr)?;
            expr.false_expr.as_ref().map_or(Ok(()), check_expression)
        }
        Expr::Filter(filter) => {
            if !FILTERS.contains(&filter.name) {
                let available = FILTERS.join(", ");
                return error_at(filter.span(), &format!("there is no filter {}; there are {available}", filter.name));
            }
            filter.expr.as_ref().map_or(Ok(()), check_expression)?;
            filter.args.iter().try_for_each(check_argument)
        }
        Expr::Test(test) => error_at(test.span(), "tests with is are not available in mail templates"),
        Expr::Slice(expr) => error_at(expr.span(), "slices are not available in mail templates"),
        Expr::GetAttr(expr) => error_at(expr.span(), "the variables have no attributes"),
        Expr::GetItem(expr) => error_at(expr.span(), "the variables have no items"),
        Expr::Call(call) => error_at(call.span(), "there are no functions in mail templates"),
        Expr::List(expr) => error_at(expr.span(), "lists are not available in mail templates"),
        Expr::Tuple(expr) => error_at(expr.span(), "tuples are not available in mail templates"),
        Expr::Map(expr) => error_at(expr.span(), "maps are not available in mail templates"),
    }
}

fn check_argument(argument: &CallArg<'_>) -> Result<(), TemplateError> {
    match argument {
        CallArg::Pos(expr) | CallArg::Kwarg(_, expr) | CallArg::PosSplat(expr) | CallArg::KwargSplat(expr) => {
            check_expression(expr)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_names_match_the_layout() {
        let layout = include_str!("layout.html");
        let named: Vec<_> = layout.split("{% block ").skip(1).filter_map(|rest| rest.split(' ').next()).collect();
        assert_eq!(named, BLOCKS);
    }
}
