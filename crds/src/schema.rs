//! From Rust types to the structural schema of a resource definition, rules included.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceValidation,
};
use schemars::{JsonSchema, Schema, generate::SchemaSettings};
use serde::Serialize;
use serde_json::{Value, json};

/// A CEL rule: the expression, and what to do when it does not hold.
#[derive(Clone, Debug, Serialize)]
pub struct Rule {
    rule: std::borrow::Cow<'static, str>,
    message: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// The field that is to blame, below the one that has the rule.
    #[serde(rename = "fieldPath", skip_serializing_if = "Option::is_none")]
    field: Option<&'static str>,
}

/// The reason of a rule that is a matter of policy: `latchkey-operator render --allow-insecure` passes over it.
pub const POLICY_REASON: &str = "FieldValueForbidden";

/// The scope of a resource: its rules on the root, and the status it is born with.
pub(crate) struct Root {
    pub(crate) description: &'static str,
    pub(crate) rules: Vec<Rule>,
    pub(crate) first_status: Value,
}

// === impl Rule ===

impl Rule {
    pub const fn fixed(rule: &'static str, message: &'static str) -> Self {
        Self { rule: std::borrow::Cow::Borrowed(rule), message, reason: None, field: None }
    }

    pub fn new(rule: String, message: &'static str) -> Self {
        Self { rule: rule.into(), message, reason: None, field: None }
    }

    /// A rule that development mode passes over.
    pub const fn policy(rule: &'static str, message: &'static str) -> Self {
        Self { rule: std::borrow::Cow::Borrowed(rule), message, reason: Some(POLICY_REASON), field: None }
    }

    /// The same, blaming a field below.
    pub const fn on(mut self, field: &'static str) -> Self {
        self.field = Some(field);
        self
    }
}

/// Puts the whole schema into a definition that was derived without one.
pub(crate) fn complete<Spec: JsonSchema, Status: JsonSchema>(
    mut definition: CustomResourceDefinition,
    root: Root,
) -> CustomResourceDefinition {
    let mut status = schema_of::<Status>();
    status["default"] = root.first_status;
    // The API server knows apiVersion, kind and metadata; they are written out so that the rules on the name have a
    // bounded string, on which their cost is estimated.
    let schema = json!({
        "type": "object",
        "description": root.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": {
                "type": "object",
                "properties": {
                    "name": { "type": "string", "maxLength": 253 },
                    "generateName": { "type": "string" },
                },
            },
            "spec": schema_of::<Spec>(),
            "status": status,
        },
        "x-kubernetes-validations": root.rules,
    });
    let schema = serde_json::from_value(schema).expect("a structural schema is a JSONSchemaProps");
    let version = definition.spec.versions.first_mut().expect("a derived definition has its version");
    version.schema = Some(CustomResourceValidation { open_api_v3_schema: Some(schema) });
    definition
}

/// A definition as YAML, with the keys in an order that does not depend on the code's.
pub fn to_yaml(definition: &CustomResourceDefinition) -> Result<String, serde_yaml::Error> {
    let value = serde_yaml::to_value(definition)?;
    let yaml: String = serde_yaml::to_string(&value)?.lines().map(quoted).collect();
    Ok(format!("# Made by `make generate` from crds/src. Do not edit.\n{yaml}"))
}

/// The strings that YAML 1.1 reads as booleans if they have no quotes, as `kubectl` and Helm do. `true` and `false` get
/// quotes by YAML 1.2 already.
pub const YAML_BOOLEANS: [&str; 16] =
    ["y", "Y", "yes", "Yes", "YES", "n", "N", "no", "No", "NO", "on", "On", "ON", "off", "Off", "OFF"];

/// A line with quotes around such a string, if it is an entry of a list or the value of a key.
fn quoted(line: &str) -> String {
    let text = line.trim_start();
    let pair = text.split_once(": ").filter(|(key, _)| !key.contains(' '));
    let value = text.strip_prefix("- ").or(pair.map(|(_, value)| value)).unwrap_or_default();
    if YAML_BOOLEANS.contains(&value) {
        format!("{}'{value}'\n", &line[..line.len() - value.len()])
    } else {
        format!("{line}\n")
    }
}

/// A definition as a template of the Helm chart. Uninstalling keeps it: with it would go every App, and their users.
pub fn to_chart_template(definition: &CustomResourceDefinition) -> Result<String, serde_yaml::Error> {
    let mut kept = definition.clone();
    kept.metadata.annotations.get_or_insert_default().insert("helm.sh/resource-policy".into(), "keep".into());
    // What Helm would take for an action of a template is printed by one.
    Ok(to_yaml(&kept)?.replace("{{", r#"{{"{{"}}"#))
}

fn schema_of<T: JsonSchema>() -> Value {
    let generator = SchemaSettings::openapi3()
        .with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        })
        .into_generator();
    let mut schema = generator.into_root_schema_for::<T>().to_value();
    structural(&mut schema);
    schema
}

/// Rewrites what schemars says into what a structural schema may hold: enums of unit variants as `enum`, options as
/// fields that may be absent (null is never stored), no titles, no formats that the API server does not know.
fn structural(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    for keyword in ["title", "nullable", "$schema"] {
        object.remove(keyword);
    }
    if object.get("default").is_some_and(Value::is_null) {
        object.remove("default");
    }
    if object.get("additionalProperties") == Some(&Value::Bool(false)) {
        object.remove("additionalProperties");
    }
    if object.get("format").and_then(Value::as_str).is_some_and(|format| format.starts_with("uint")) {
        object.remove("format");
    }
    // Option<T> of something that is not a plain type: `anyOf: [T, null]`.
    if let Some(Value::Array(options)) = object.remove("anyOf") {
        let some = options.into_iter().find(|option| option.get("enum") != Some(&json!([null])));
        merge(object, some.unwrap_or_default());
    }
    // Unit variants with a description each: `oneOf: [{ const }, …]`.
    if let Some(Value::Array(variants)) = object.remove("oneOf") {
        let mut values = Vec::new();
        for variant in variants {
            match (variant.get("const"), variant.get("enum")) {
                (Some(value), _) => values.push(value.clone()),
                (None, Some(Value::Array(several))) => values.extend(several.iter().cloned()),
                _ => {}
            }
        }
        object.insert("type".into(), json!("string"));
        object.insert("enum".into(), Value::Array(values));
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if let Some(Value::Object(properties)) = object.get_mut("properties") {
        properties.values_mut().for_each(structural);
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(inner) = object.get_mut(keyword) {
            structural(inner);
        }
    }
}

fn merge(into: &mut serde_json::Map<String, Value>, from: Value) {
    if let Value::Object(from) = from {
        for (keyword, value) in from {
            into.entry(keyword).or_insert(value);
        }
    }
}

/// Turns the `oneOf` of a flattened enum into plain properties. Its error is one that nobody understands and hides
/// those of the rules; a rule says "exactly one of" instead.
pub(crate) fn strip_one_of(schema: &mut Schema) {
    let Some(Value::Array(variants)) = schema.remove("oneOf") else { return };
    let object = schema.ensure_object();
    object.insert("type".into(), json!("object"));
    object.remove("additionalProperties");
    object.remove("unevaluatedProperties");
    let properties = object.entry("properties").or_insert_with(|| json!({}));
    for variant in variants {
        let description = variant.get("description").cloned();
        let Some(members) = variant.get("properties").and_then(Value::as_object) else { continue };
        for (name, member) in members {
            let mut member = member.clone();
            if let (Some(description), Some(member)) = (&description, member.as_object_mut()) {
                member.insert("description".into(), description.clone());
            }
            properties[name.as_str()] = member;
        }
    }
}
