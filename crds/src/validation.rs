//! Validates an object like an API server: unknown fields, structural schema, then CEL rules.

use std::{collections::HashMap, fmt, sync::Arc};

use cel::{Context, Program, objects::Key};
use jsonschema::{
    PatternOptions,
    error::ValidationErrorKind,
    paths::{Location, LocationSegment},
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value};

use crate::schema::POLICY_REASON;

/// Validates objects of one kind.
pub struct Validator {
    schema: Value,
    schema_validator: jsonschema::Validator,
    /// The compiled rules, by expression.
    programs: HashMap<String, Program>,
}

/// An error in an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// The field as kubectl writes it: `spec.redirectURLs[1]`.
    pub field: String,
    /// What is wrong or what to do. Never quotes the value.
    pub reason: String,
    /// Whether the violated rule is a policy rule, which forbids insecure values ([`POLICY_REASON`]).
    pub is_policy: bool,
}

/// Why a definition cannot be used. The definitions of this crate never cause such an error, as tests show.
#[derive(Debug, thiserror::Error)]
pub enum InvalidDefinition {
    #[error("the definition has no schema")]
    NoSchema,
    #[error("the schema does not compile")]
    Schema(#[source] Box<jsonschema::ValidationError<'static>>),
    #[error("the rule does not compile: {rule}")]
    Rule {
        rule: String,
        #[source]
        source: cel::ParseErrors,
    },
}

// === impl Violation ===

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.reason)
        } else {
            write!(f, "field {}: {}", self.field, self.reason)
        }
    }
}

// === impl Validator ===

impl Validator {
    pub fn new(definition: &CustomResourceDefinition) -> Result<Self, InvalidDefinition> {
        let schema = definition
            .spec
            .versions
            .first()
            .and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref())
            .and_then(|schema| serde_json::to_value(schema).ok())
            .ok_or(InvalidDefinition::NoSchema)?;
        let schema_validator = jsonschema::options()
            .with_pattern_options(PatternOptions::regex())
            .build(&schema)
            .map_err(|error| InvalidDefinition::Schema(Box::new(error)))?;
        let mut programs = HashMap::new();
        compile_rules(&schema, &mut programs)?;
        Ok(Self { schema, schema_validator, programs })
    }

    /// Returns all violations of an object. `old` is the object before an update, for transition rules.
    pub fn validate(&self, object: &Value, old: Option<&Value>) -> Vec<Violation> {
        let object = self.normalize(object);
        let old = old.map(|old| self.normalize(old));
        let mut found = Vec::new();
        for (name, value) in object.as_object().into_iter().flatten() {
            // The API server validates metadata itself.
            if name != "metadata" {
                match property(&self.schema, name) {
                    Some(schema) => find_unknown_fields(schema, value, name, &mut found),
                    None => found.push(Violation::new(name, "unknown field".into())),
                }
            }
        }
        let mut is_invalid = false;
        for error in self.schema_validator.iter_errors(&object) {
            is_invalid = true;
            let (field, reason) = describe_error(error.instance_path(), error.kind(), error.instance());
            found.push(Violation::new(&field, reason));
        }
        find_duplicate_entries(&self.schema, &object, "", &mut found);
        // Like the API server, evaluates the rules only if the object matches the schema.
        if !is_invalid {
            self.check_rules(&self.schema, &object, old.as_ref(), "", &mut found);
        }
        found.sort();
        found.dedup();
        found
    }

    fn check_rules(&self, schema: &Value, value: &Value, old: Option<&Value>, path: &str, found: &mut Vec<Violation>) {
        for rule in rules_of(schema) {
            // A transition rule (one with `oldSelf`) is evaluated only if there is an old value.
            if rule.expression.contains("oldSelf") && old.is_none() {
                continue;
            }
            let holds = self.evaluate(rule.expression, value, old);
            let reason = match holds {
                Some(true) => continue,
                Some(false) => rule.message.to_owned(),
                None => format!("cannot be checked against the rule: {}", rule.message),
            };
            let field = format!("{path}{}", rule.field).trim_start_matches('.').to_owned();
            found.push(Violation { field, reason, is_policy: rule.is_policy && holds.is_some() });
        }
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    if let Some(schema) = property(schema, name) {
                        self.check_rules(schema, member, old.and_then(|old| old.get(name)), &join(path, name), found);
                    }
                }
            }
            Value::Array(items) => {
                if let Some(schema) = schema.get("items") {
                    for (index, item) in items.iter().enumerate() {
                        // Entries of sets and atomic lists have no old value (Kubernetes: not "correlatable").
                        self.check_rules(schema, item, None, &format!("{path}[{index}]"), found);
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    /// Whether a value satisfies the rule with this expression. `None` if the rule cannot be evaluated.
    fn evaluate(&self, expression: &str, value: &Value, old: Option<&Value>) -> Option<bool> {
        let program = self.programs.get(expression)?;
        let mut context = Context::default();
        context.add_variable_from_value("self", to_cel(value));
        if let Some(old) = old {
            context.add_variable_from_value("oldSelf", to_cel(old));
        }
        match program.execute(&context) {
            Ok(cel::Value::Bool(satisfied)) => Some(satisfied),
            Ok(_) | Err(_) => None,
        }
    }

    /// Returns the object as the API server stores it (without nulls, with defaults), but without a status.
    pub fn normalize(&self, object: &Value) -> Value {
        let mut object = object.clone();
        prune_nulls(&mut object);
        if let (Some(object), Some(properties)) = (object.as_object_mut(), properties(&self.schema)) {
            // Users do not write the status.
            object.remove("status");
            for (name, schema) in properties {
                if let Some(value) = object.get_mut(name) {
                    apply_defaults(schema, value);
                }
            }
        }
        object
    }
}

impl Violation {
    fn new(field: &str, reason: String) -> Self {
        Self { field: field.into(), reason, is_policy: false }
    }
}

fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties")?.as_object()
}

fn property<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    properties(schema)?.get(name)
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

fn prune_nulls(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(prune_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(prune_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn apply_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, schema) in properties(schema).into_iter().flatten() {
                if let (None, Some(default)) = (members.get(name), schema.get("default")) {
                    members.insert(name.clone(), default.clone());
                }
                if let Some(member) = members.get_mut(name) {
                    apply_defaults(schema, member);
                }
            }
        }
        Value::Array(items) => {
            if let Some(schema) = schema.get("items") {
                items.iter_mut().for_each(|item| apply_defaults(schema, item));
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn find_unknown_fields(schema: &Value, value: &Value, path: &str, found: &mut Vec<Violation>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let path = join(path, name);
                match property(schema, name) {
                    Some(schema) => find_unknown_fields(schema, member, &path, found),
                    None if properties(schema).is_some() => found.push(Violation::new(&path, "unknown field".into())),
                    None => {}
                }
            }
        }
        Value::Array(items) => {
            if let Some(schema) = schema.get("items") {
                for (index, item) in items.iter().enumerate() {
                    find_unknown_fields(schema, item, &format!("{path}[{index}]"), found);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn find_duplicate_entries(schema: &Value, value: &Value, path: &str, found: &mut Vec<Violation>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                if let Some(schema) = property(schema, name) {
                    find_duplicate_entries(schema, member, &join(path, name), found);
                }
            }
        }
        Value::Array(items) => {
            let is_set = schema.get("x-kubernetes-list-type").and_then(Value::as_str) == Some("set");
            for (index, item) in items.iter().enumerate() {
                let path = format!("{path}[{index}]");
                if is_set && items[..index].contains(item) {
                    found.push(Violation::new(&path, "is a duplicate; remove it".into()));
                }
                if let Some(schema) = schema.get("items") {
                    find_duplicate_entries(schema, item, &path, found);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns the field and the reason of a schema error.
fn describe_error(path: &Location, kind: &ValidationErrorKind, value: &Value) -> (String, String) {
    let mut field = String::new();
    for segment in path.iter() {
        field = match segment {
            LocationSegment::Property(name) => join(&field, &name),
            LocationSegment::Index(index) => format!("{field}[{index}]"),
        };
    }
    let reason = match kind {
        ValidationErrorKind::Required { property } => {
            field = join(&field, property.as_str().unwrap_or_default());
            "is required".into()
        }
        ValidationErrorKind::Type { kind: jsonschema::error::TypeKind::Single(wanted) } => {
            let hint = match value {
                Value::Bool(_) => "; YAML reads on, off, yes, no, true and false as booleans unless they are quoted",
                _ => "",
            };
            format!("must be of type {wanted}, not {}{hint}", type_name(value))
        }
        ValidationErrorKind::Enum { options } => {
            let options = options.as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>();
            format!("must be one of {}", options.join(", "))
        }
        ValidationErrorKind::Minimum { limit } => format!("must be {} or more", format_bound(limit)),
        ValidationErrorKind::Maximum { limit } => format!("must be {} or less", format_bound(limit)),
        ValidationErrorKind::MinLength { limit } => match limit {
            1 => "must not be empty".into(),
            _ => format!("must have {limit} characters or more"),
        },
        ValidationErrorKind::MaxLength { limit } => format!("must have {limit} characters or fewer"),
        ValidationErrorKind::MinItems { limit } => format!("must have {limit} entries or more"),
        ValidationErrorKind::MaxItems { limit } => format!("must have {limit} entries or fewer"),
        ValidationErrorKind::Pattern { pattern } => format!("must match {pattern}"),
        other => format!("violates {} of the schema", other.keyword()),
    };
    (field, reason)
}

/// Returns a bound without `.0`, because the definition stores every number as a float.
fn format_bound(limit: &Value) -> String {
    let text = limit.to_string();
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Compiles all rules of a schema. Stops at the first rule that does not compile.
fn compile_rules(schema: &Value, programs: &mut HashMap<String, Program>) -> Result<(), InvalidDefinition> {
    for rule in rules_of(schema) {
        let program = Program::compile(rule.expression)
            .map_err(|source| InvalidDefinition::Rule { rule: rule.expression.into(), source })?;
        programs.insert(rule.expression.into(), program);
    }
    for inner in properties(schema).into_iter().flat_map(Map::values).chain(schema.get("items")) {
        compile_rules(inner, programs)?;
    }
    Ok(())
}

struct RuleRef<'a> {
    expression: &'a str,
    message: &'a str,
    /// The path of the invalid field, relative to the field with the rule. Empty if the field with the rule is invalid.
    field: &'a str,
    is_policy: bool,
}

fn rules_of(schema: &Value) -> impl Iterator<Item = RuleRef<'_>> {
    let rules = schema.get("x-kubernetes-validations").and_then(Value::as_array);
    rules.into_iter().flatten().filter_map(|rule| {
        Some(RuleRef {
            expression: rule.get("rule")?.as_str()?,
            message: rule.get("message").and_then(Value::as_str).unwrap_or("violates a rule"),
            field: rule.get("fieldPath").and_then(Value::as_str).unwrap_or_default(),
            is_policy: rule.get("reason").and_then(Value::as_str) == Some(POLICY_REASON),
        })
    })
}

/// Converts a value for CEL. Integers become `int`, never `uint`, as in Kubernetes; integers above the range of
/// `int` become `double`.
fn to_cel(value: &Value) -> cel::Value {
    match value {
        Value::Null => cel::Value::Null,
        Value::Bool(value) => cel::Value::Bool(*value),
        Value::Number(number) => match number.as_i64() {
            Some(number) => cel::Value::Int(number),
            None => cel::Value::Float(number.as_f64().unwrap_or(f64::MAX)),
        },
        Value::String(text) => cel::Value::String(Arc::new(text.clone())),
        Value::Array(items) => cel::Value::List(Arc::new(items.iter().map(to_cel).collect())),
        Value::Object(members) => {
            let members: HashMap<Key, cel::Value> =
                members.iter().map(|(name, member)| (Key::from(name.as_str()), to_cel(member))).collect();
            cel::Value::Map(members.into())
        }
    }
}
