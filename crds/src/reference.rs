//! The fields of the resources as a page for people, made from the schema.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// A table of every field: its path, its type with bounds, what it is.
pub fn to_markdown(definitions: &[CustomResourceDefinition]) -> String {
    let mut page = String::from(
        "# Fields of the resources\n\n\
         Made by `make generate` from `crds/src`. Do not edit. What the fields are for stands in \
         [api-conventions.md](api-conventions.md).\n",
    );
    for definition in definitions {
        let names = &definition.spec.names;
        let version = definition.spec.versions.first();
        let schema = version.and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref());
        let schema = serde_json::to_value(schema).unwrap_or_default();
        page += &format!("\n## {} (`{}/{}`)\n", names.kind, definition.spec.group, version.map_or("", |v| &v.name));
        page += &format!("\n{}\n", text(&schema, "description"));
        rules(&schema, &mut page);
        for part in ["spec", "status"] {
            page += &format!("\n### {} {part}\n\n| field | type | what it is |\n|---|---|---|\n", names.kind);
            let part_schema = &schema["properties"][part];
            // A rule on the whole part, such as "exactly one of".
            if part_schema.get("x-kubernetes-validations").is_some() {
                row(part_schema, part, part == "spec", &mut page);
            }
            fields(part_schema, part, &mut page);
        }
    }
    page
}

fn text<'a>(schema: &'a Value, keyword: &str) -> &'a str {
    schema[keyword].as_str().unwrap_or_default()
}

fn rules(schema: &Value, page: &mut String) {
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    let messages: Vec<_> = rules.map(|rule| format!("- “{}”\n", text(rule, "message"))).collect();
    if !messages.is_empty() {
        *page += &format!("\nAs a whole it is refused with:\n\n{}", messages.concat());
    }
}

fn fields(schema: &Value, path: &str, page: &mut String) {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let is_required = required.iter().any(|required| required == name);
        row(field, &path, is_required, page);
        fields(field, &path, page);
        if let Some(items) = field.get("items") {
            fields(items, &format!("{path}[]"), page);
        }
    }
}

fn row(field: &Value, path: &str, is_required: bool, page: &mut String) {
    let mut words = vec![kind(field)];
    if is_required {
        words.push("required".into());
    }
    if let Some(default) = field.get("default").and_then(Value::as_str) {
        words.push(format!("default `{default}`"));
    }
    let mut what = text(field, "description").replace('\n', " ");
    // Rules of the field, and of each entry of a list.
    for of in [Some(field), field.get("items")].into_iter().flatten() {
        for rule in of["x-kubernetes-validations"].as_array().into_iter().flatten() {
            what += &format!("<br>Refused with: “{}”.", text(rule, "message"));
        }
    }
    *page += &format!("| `{path}` | {} | {} |\n", words.join(", "), what.replace('|', "\\|"));
}

fn kind(field: &Value) -> String {
    let number = |keyword: &str| field[keyword].as_f64();
    let count = |keyword: &str| field[keyword].as_u64();
    match text(field, "type") {
        "array" => {
            let items = field.get("items").map(kind).unwrap_or_default();
            format!("list of at most {}: {items}", count("maxItems").unwrap_or_default())
        }
        "integer" => match (number("minimum"), number("maximum")) {
            (Some(minimum), Some(maximum)) => format!("integer, {minimum}–{maximum}"),
            _ => "integer".into(),
        },
        "string" => match (field["enum"].as_array(), count("maxLength")) {
            (Some(values), _) => {
                let values = values.iter().filter_map(Value::as_str).map(|value| format!("`{value}`"));
                values.collect::<Vec<_>>().join(" or ")
            }
            (None, Some(most)) => format!("string, at most {most} characters"),
            (None, None) => text(field, "format").replace("date-time", "time"),
        },
        other => other.into(),
    }
}
