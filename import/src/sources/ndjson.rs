//! Lines in the format of the administration API, for example those of an export.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    convert::{Context, MAX_LINE},
    error::ImportError,
    input::Input,
    json::{self, Line},
};

/// The external ID of the user in a line that is refused. The log names the user by this ID.
#[derive(Deserialize)]
struct Identified {
    external_id: Option<String>,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    for input in inputs {
        json::read_lines(&input.name, input.reader, |number, line| {
            let place = format!("{}, line {number}", input.name);
            let text = match line {
                Line::Text(text) => std::str::from_utf8(text).ok(),
                Line::TooLong => return context.count_long_line(&place),
            };
            match text {
                // A long line is not parsed into a tree, because the tree would be large.
                Some(text) if text.len() > MAX_LINE => match json::parse::<Identified>(text) {
                    Some(user) => context.count_long_line(&user.external_id.unwrap_or(place)),
                    None => context.count_unreadable(&place),
                },
                Some(text) => match json::parse::<Map<String, Value>>(text) {
                    Some(user) => send(text, user, context),
                    None => context.count_unreadable(&place),
                },
                None => context.count_unreadable(&place),
            }
        })?;
    }
    Ok(())
}

fn send(text: &str, mut user: Map<String, Value>, context: &mut Context<'_>) -> Result<(), ImportError> {
    // An export ends with the line `{"end": true, …}`, which is not a user.
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
