//! Compares the definitions with the committed files, so that a review shows every change to the API, and checks what
//! must hold for every field.

use std::{collections::BTreeSet, fs, path::Path};

use latchkey_crds::{
    conditions::Reason,
    provider::ProviderClient,
    schema::{YAML_BOOLEANS, to_chart_template, to_yaml},
};
use serde_json::Value;

fn schemas() -> Vec<(String, Value)> {
    let definitions = latchkey_crds::definitions().into_iter();
    definitions
        .map(|definition| {
            let schema = definition.spec.versions[0].schema.clone().and_then(|schema| schema.open_api_v3_schema);
            (definition.spec.names.kind, serde_json::to_value(schema).expect("a schema is JSON"))
        })
        .collect()
}

fn schema_of(kind: &str) -> Value {
    schemas().into_iter().find(|(found, _)| found == kind).expect("the kind has a definition").1
}

/// Calls `visit` with `path` and `schema`, and with the path and the schema of each field below.
fn visit_schemas(path: &str, schema: &Value, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, schema);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        visit_schemas(&format!("{path}.{name}"), property, visit);
    }
    if let Some(items) = schema.get("items") {
        visit_schemas(&format!("{path}[]"), items, visit);
    }
}

#[test]
fn the_committed_yaml_matches_the_code() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("yaml");
    let mut names = BTreeSet::new();
    for definition in latchkey_crds::definitions() {
        let name = format!("{}.yaml", definition.metadata.name.as_deref().unwrap());
        let committed = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert_eq!(committed, to_yaml(&definition).unwrap(), "{name} differs from the code: run `make generate`");
        names.insert(name);
    }
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), names, "the folder has files of no definition");
}

#[test]
fn no_enum_value_except_a_former_name_is_a_yaml_1_1_boolean() {
    let mut former_names = BTreeSet::new();
    for (kind, schema) in schemas() {
        visit_schemas(&kind, &schema, &mut |path, schema| {
            // Only the operator writes a status, so no user has to quote its values.
            let values = schema["enum"].as_array().into_iter().flatten().filter(|_| !path.contains(".status."));
            for value in values.filter_map(Value::as_str) {
                if YAML_BOOLEANS.contains(&value) || ["true", "false"].contains(&value.to_ascii_lowercase().as_str()) {
                    former_names.insert(format!("{path}: {value}"));
                }
            }
        });
    }
    // The former name of `Disabled`.
    assert_eq!(former_names, BTreeSet::from(["App.spec.enumerationProtection: Off".to_owned()]));
    for definition in latchkey_crds::definitions() {
        for yaml in [to_yaml(&definition).unwrap(), to_chart_template(&definition).unwrap()] {
            assert_eq!(yaml.contains("- 'Off'\n"), definition.spec.names.kind == "App");
            for boolean in YAML_BOOLEANS {
                assert!(!yaml.contains(&format!("- {boolean}\n")), "{boolean} is not quoted");
            }
        }
    }
}

#[test]
fn the_charts_definitions_match_the_code() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/latchkey/templates");
    let mut names = BTreeSet::new();
    for definition in latchkey_crds::definitions() {
        let name = format!("crd-{}.yaml", definition.spec.names.plural);
        let committed = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        let generated = to_chart_template(&definition).unwrap();
        assert_eq!(committed, generated, "{name} differs from the code: run `make generate`");
        names.insert(name);
    }
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let templates: BTreeSet<_> = files.filter(|name| name.starts_with("crd-")).collect();
    assert_eq!(templates, names, "the folder has templates of no definition");
}

#[test]
fn the_committed_reference_matches_the_code() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/resources.md");
    let committed = fs::read_to_string(page).unwrap_or_default();
    let generated = latchkey_crds::field_reference::to_markdown(&latchkey_crds::definitions());
    assert_eq!(committed, generated, "docs/resources.md differs from the code: run `make generate`");
}

#[test]
fn every_reason_is_in_the_docs() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api-conventions.md");
    let page = fs::read_to_string(page).unwrap();
    for reason in Reason::ALL {
        assert!(page.contains(&format!("| `{reason}` |")), "docs/api-conventions.md does not describe {reason}");
    }
}

#[test]
fn every_list_and_string_is_bounded() {
    for (kind, schema) in schemas() {
        for part in ["spec", "status"] {
            visit_schemas(&format!("{kind}.{part}"), &schema["properties"][part], &mut |path, schema| {
                match schema["type"].as_str() {
                    Some("string") => {
                        let bounded = ["maxLength", "enum", "format"].iter().any(|bound| schema.get(bound).is_some());
                        assert!(bounded, "{path} is an unbounded string");
                    }
                    Some("array") => assert!(schema.get("maxItems").is_some(), "{path} is an unbounded list"),
                    Some("object") if schema.get("additionalProperties").is_some() => {
                        let values = &schema["additionalProperties"];
                        assert!(schema["maxProperties"].is_number(), "{path} is an unbounded map");
                        assert!(values["maxLength"].is_number(), "{path} is a map of unbounded strings");
                    }
                    Some("object") => assert!(schema.get("properties").is_some(), "{path} is an open map"),
                    Some("integer" | "boolean") => {}
                    other => panic!("{path} is of type {other:?}"),
                }
            });
        }
    }
}

#[test]
fn every_number_in_a_spec_documents_its_bounds() {
    for (kind, schema) in schemas() {
        visit_schemas(&format!("{kind}.spec"), &schema["properties"]["spec"], &mut |path, schema| {
            if schema["type"] == "integer" {
                assert_eq!(schema["format"], "int32", "{path}");
                let description = schema["description"].as_str().unwrap();
                for bound in ["minimum", "maximum"] {
                    let bound = schema[bound].as_f64().unwrap_or_else(|| panic!("{path} has no {bound}"));
                    assert!(
                        description.contains(&bound.to_string()),
                        "{path}: the description does not contain {bound}"
                    );
                }
            }
        });
    }
}

#[test]
fn every_field_is_described() {
    for (kind, schema) in schemas() {
        for part in ["spec", "status"] {
            for (name, property) in schema["properties"][part]["properties"].as_object().unwrap() {
                visit_schemas(&format!("{kind}.{part}.{name}"), property, &mut |path, schema| {
                    let described = schema["description"].as_str().is_some_and(|text| !text.is_empty());
                    assert!(described || path.ends_with("[]"), "{path} has no description");
                });
            }
        }
    }
}

#[test]
fn only_enums_have_defaults_in_a_spec() {
    for (kind, schema) in schemas() {
        visit_schemas(&format!("{kind}.spec"), &schema["properties"]["spec"], &mut |path, schema| {
            assert!(schema.get("default").is_none() || schema.get("enum").is_some(), "{path} has a stored default");
        });
    }
}

#[test]
fn schemas_are_structural() {
    for (kind, schema) in schemas() {
        visit_schemas(&kind, &schema, &mut |path, schema| {
            for keyword in ["oneOf", "anyOf", "allOf", "not", "$ref", "nullable", "const"] {
                assert!(schema.get(keyword).is_none(), "{path} has {keyword}");
            }
            // An object has either named properties, or any keys with values of one type. Only `matchLabels` of a label
            // selector is of the second kind.
            let is_map = schema.get("additionalProperties").is_some();
            assert_eq!(is_map, path.ends_with(".matchLabels"), "{path}");
            assert!(!is_map || schema.get("properties").is_none(), "{path}");
            assert!(schema["type"].is_string(), "{path} has no type");
        });
    }
}

#[test]
fn the_initial_status_is_unknown() {
    let third_conditions = ["Programmed", "Reachable", "Programmed"];
    for ((kind, schema), third_condition) in schemas().into_iter().zip(third_conditions) {
        let status = &schema["properties"]["status"]["default"];
        assert_eq!(status["observedGeneration"], -1, "{kind}");
        let conditions = status["conditions"].as_array().unwrap();
        let types = conditions.iter().map(|condition| condition["type"].as_str().unwrap());
        assert_eq!(types.collect::<Vec<_>>(), ["Accepted", "ResolvedRefs", third_condition, "Ready"], "{kind}");
        for condition in conditions {
            assert_eq!(condition["status"], "Unknown");
            assert_eq!(condition["reason"], "Pending");
            assert_eq!(condition["observedGeneration"], -1);
        }
    }
}

#[test]
fn the_schema_has_exactly_the_members_of_a_provider() {
    let schema = schema_of("Provider");
    let members = schema["properties"]["spec"]["properties"].as_object().unwrap();
    assert_eq!(
        members.keys().map(String::as_str).collect::<BTreeSet<_>>(),
        ProviderClient::MEMBER_NAMES.into_iter().collect::<BTreeSet<_>>()
    );
    for (name, member) in members {
        assert!(member["properties"]["clientID"].is_object(), "{name} has no clientID");
    }
}

#[test]
fn definitions_are_small_enough_for_a_chart() {
    for definition in latchkey_crds::definitions() {
        assert!(to_yaml(&definition).unwrap().len() < 256 * 1024);
    }
}

#[test]
fn resources_have_their_names_and_columns() {
    for (definition, short_name) in latchkey_crds::definitions().into_iter().zip(["lkapp", "lkprov", "lkclient"]) {
        assert_eq!(definition.spec.group, "latchkey.dev");
        assert_eq!(definition.spec.scope, "Namespaced");
        assert_eq!(definition.spec.names.categories.as_deref(), Some(&["latchkey".to_owned()][..]));
        assert_eq!(definition.spec.names.short_names.as_deref(), Some(&[short_name.to_owned()][..]));
        let version = &definition.spec.versions[0];
        assert_eq!(version.name, "v1alpha1");
        assert!(version.subresources.as_ref().unwrap().status.is_some());
        let columns = version.additional_printer_columns.as_ref().unwrap();
        let ordinary = columns.iter().filter(|column| column.priority.is_none_or(|priority| priority == 0));
        let names = ordinary.map(|column| column.name.as_str()).collect::<Vec<_>>();
        assert_eq!((names[0], names[1], names[3], names.len()), ("Ready", "Reason", "Age", 4));
    }
}
