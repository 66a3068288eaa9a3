//! What an App's own template may be made of: text, the variables, conditions, a few filters and the layout.
//!
//! Fuel counts instructions and the limit of output counts octets, but neither counts what `x ~ x`, a captured block or
//! a filter such as `replace` makes in between: thirty doublings are a gigabyte, in a process that serves every App. So
//! whatever could grow a value is no part of the language here; nor is what would switch escaping off.

use minijinja::{
    Environment, filters,
    machinery::{
        ast::{BinOpKind, CallArg, Expr, Stmt, UnaryOpKind},
        parse,
    },
    syntax::SyntaxConfig,
};

use super::{LAYOUT, Part, TemplateError, VARIABLES, refuse};

/// None of them makes a value longer than a few times its input, and none can be chained to do so more than that.
const FILTERS: [&str; 9] = ["upper", "lower", "title", "capitalize", "trim", "default", "d", "escape", "e"];

/// The blocks of the layout.
const BLOCKS: [&str; 5] = ["title", "preheader", "heading", "content", "footer"];

const ARITHMETIC: &str = "+ - * / % ** ~ are not available in mail templates";

/// Adds the filters that templates may name.
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

/// Refuses a template that has anything else, in a branch not taken as well.
pub(super) fn check(source: &str, part: Part) -> Result<(), TemplateError> {
    let template = parse(source, part.as_str(), SyntaxConfig::default())
        .map_err(|error| TemplateError::new(&error, error.detail()))?;
    statement(&template, part == Part::Html)?;
    match &template {
        Stmt::Template(template) if template.children.iter().any(|stmt| matches!(stmt, Stmt::Extends(_))) => {
            template.children.iter().try_for_each(known_block)
        }
        _ => Ok(()),
    }
}

/// What a template with the layout puts into a block that the layout does not have would be left out without a word.
fn known_block(stmt: &Stmt<'_>) -> Result<(), TemplateError> {
    match stmt {
        Stmt::Block(block) if !BLOCKS.contains(&block.name) => {
            let known = BLOCKS.join(", ");
            refuse(block.span(), &format!("the layout has no block {}; it has {known}", block.name))
        }
        Stmt::IfCond(cond) => cond.true_body.iter().chain(&cond.false_body).try_for_each(known_block),
        _ => Ok(()),
    }
}

fn statement(stmt: &Stmt<'_>, html: bool) -> Result<(), TemplateError> {
    let each = |stmts: &[Stmt<'_>]| stmts.iter().try_for_each(|stmt| statement(stmt, html));
    match stmt {
        Stmt::Template(template) => each(&template.children),
        Stmt::EmitRaw(_) => Ok(()),
        Stmt::EmitExpr(emit) => expression(&emit.expr),
        Stmt::IfCond(cond) => {
            expression(&cond.expr)?;
            each(&cond.true_body)?;
            each(&cond.false_body)
        }
        Stmt::Block(block) => each(&block.body),
        Stmt::Extends(extends) => match &extends.name {
            Expr::Const(name) if html && name.value.as_str() == Some(LAYOUT) => Ok(()),
            _ => refuse(extends.span(), "extends can name only \"layout.html\", and only in an .html template"),
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
            // Their keywords are refused before they are parsed.
            let reason = "has a statement that is not available in mail templates".to_owned();
            Err(TemplateError { line: None, reason })
        }
    }
}

fn expression(expr: &Expr<'_>) -> Result<(), TemplateError> {
    match expr {
        Expr::Const(_) => Ok(()),
        Expr::Var(var) if VARIABLES.contains(&var.id) => Ok(()),
        Expr::Var(var) => {
            let known = VARIABLES.join(", ");
            refuse(var.span(), &format!("there is no variable {}; there are {known}", var.id))
        }
        Expr::UnaryOp(op) => match op.op {
            UnaryOpKind::Not => expression(&op.expr),
            UnaryOpKind::Neg => refuse(op.span(), ARITHMETIC),
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
                    return refuse(op.span(), ARITHMETIC);
                }
            }
            expression(&op.left)?;
            expression(&op.right)
        }
        Expr::Compare(compare) => {
            expression(&compare.expr)?;
            compare.ops.iter().try_for_each(|op| expression(&op.expr))
        }
        Expr::IfExpr(expr) => {
            expression(&expr.test_expr)?;
            expression(&expr.true_expr)?;
            expr.false_expr.as_ref().map_or(Ok(()), expression)
        }
        Expr::Filter(filter) => {
            if !FILTERS.contains(&filter.name) {
                let known = FILTERS.join(", ");
                return refuse(filter.span(), &format!("there is no filter {}; there are {known}", filter.name));
            }
            filter.expr.as_ref().map_or(Ok(()), expression)?;
            filter.args.iter().try_for_each(argument)
        }
        Expr::Test(test) => refuse(test.span(), "tests with is are not available in mail templates"),
        Expr::Slice(expr) => refuse(expr.span(), "slices are not available in mail templates"),
        Expr::GetAttr(expr) => refuse(expr.span(), "the variables have no attributes"),
        Expr::GetItem(expr) => refuse(expr.span(), "the variables have no items"),
        Expr::Call(call) => refuse(call.span(), "there are no functions in mail templates"),
        Expr::List(expr) => refuse(expr.span(), "lists are not available in mail templates"),
        Expr::Tuple(expr) => refuse(expr.span(), "tuples are not available in mail templates"),
        Expr::Map(expr) => refuse(expr.span(), "maps are not available in mail templates"),
    }
}

fn argument(argument: &CallArg<'_>) -> Result<(), TemplateError> {
    match argument {
        CallArg::Pos(expr) | CallArg::Kwarg(_, expr) | CallArg::PosSplat(expr) | CallArg::KwargSplat(expr) => {
            expression(expr)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_are_those_of_the_layout() {
        let layout = include_str!("layout.html");
        let named: Vec<_> = layout.split("{% block ").skip(1).filter_map(|rest| rest.split(' ').next()).collect();
        assert_eq!(named, BLOCKS);
    }
}
