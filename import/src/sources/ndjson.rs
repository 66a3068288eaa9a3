//! Lines in the form of the server, such as those of `GET export`.

use serde_json::{Map, Value};

use crate::{
    convert::Context,
    error::ImportError,
    input::Input,
    json::{self, Line},
};

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    for input in inputs {
        json::read_lines(&input.name, input.reader, |number, line| {
            let text = match line {
                // A line above the limit of the server is refused before it is parsed, because a tree of it is large.
                Line::Text(text) if text.len() <= crate::convert::MAX_LINE => std::str::from_utf8(text).ok(),
                Line::Text(_) | Line::TooLong => None,
            };
            let user = text.and_then(json::parse::<Map<String, Value>>);
            match (text, user) {
                (Some(text), Some(user)) => send(text, user, context),
                _ => context.unreadable(&format!("{}, line {number}", input.name)),
            }
        })?;
    }
    Ok(())
}

fn send(text: &str, mut user: Map<String, Value>, context: &mut Context<'_>) -> Result<(), ImportError> {
    // The last line of an export.
    if user.get("end") == Some(&Value::Bool(true)) && !user.contains_key("external_id") {
        return Ok(());
    }
    let mut is_changed = false;
    if context.args.addresses_verified && user.contains_key("email") {
        is_changed = user.insert("email_verified".to_owned(), Value::Bool(true)) != Some(Value::Bool(true));
    }
    for identity in user.get_mut("identities").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::String(provider)) = identity.get_mut("provider")
            && let Some(mapped) = context.provider(provider)
        {
            mapped.clone_into(provider);
            is_changed = true;
        }
    }
    let external_id =
        user.get("external_id").and_then(Value::as_str).unwrap_or("a line without external_id").to_owned();
    if is_changed {
        let line = serde_json::to_vec(&user).map_err(|error| ImportError::Usage(error.to_string()))?;
        return context.line(&line, &external_id);
    }
    context.line(text.as_bytes(), &external_id)
}
