//! The definitions as they are installed, so that every change of the API is seen in review.

use std::{collections::BTreeSet, fs, path::Path};

use latchkey_crds::{
    conditions::Reason,
    provider::ProviderClient,
    schema::{YAML_BOOLEANS, to_chart_template, to_yaml},
};
use serde_json::Value;

fn schemas() -> Vec<(String, Value)> {
    let definitions = latchkey_crds::all().into_iter();
    definitions
        .map(|definition| {
            let schema = definition.spec.versions[0].schema.clone().and_then(|schema| schema.open_api_v3_schema);
            (definition.spec.names.kind, serde_json::to_value(schema).expect("a schema is JSON"))
        })
        .collect()
}

/// Calls `see` with each schema below this one and its path.
fn walk(path: &str, schema: &Value, see: &mut impl FnMut(&str, &Value)) {
    see(path, schema);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        walk(&format!("{path}.{name}"), property, see);
    }
    if let Some(items) = schema.get("items") {
        walk(&format!("{path}[]"), items, see);
    }
}

#[test]
fn the_kept_yaml_is_what_the_code_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("yaml");
    let mut names = BTreeSet::new();
    for definition in latchkey_crds::all() {
        let name = format!("{}.yaml", definition.metadata.name.as_deref().unwrap());
        let kept = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert_eq!(kept, to_yaml(&definition).unwrap(), "{name} is not what the code says: run `make generate`");
        names.insert(name);
    }
    let there = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(there.collect::<BTreeSet<_>>(), names, "files that no definition makes");
}

#[test]
fn no_value_is_a_boolean_to_yaml_1_1() {
    let mut former_names = BTreeSet::new();
    for (kind, schema) in schemas() {
        walk(&kind, &schema, &mut |path, schema| {
            // Conditions are written by the operator.
            let values = schema["enum"].as_array().into_iter().flatten().filter(|_| !path.contains(".status."));
            for value in values.filter_map(Value::as_str) {
                if YAML_BOOLEANS.contains(&value) || ["true", "false"].contains(&value.to_ascii_lowercase().as_str()) {
                    former_names.insert(format!("{path}: {value}"));
                }
            }
        });
    }
    // It has another name by now.
    assert_eq!(former_names, BTreeSet::from(["App.spec.enumerationProtection: Off".to_owned()]));
    for definition in latchkey_crds::all() {
        for yaml in [to_yaml(&definition).unwrap(), to_chart_template(&definition).unwrap()] {
            assert_eq!(yaml.contains("- 'Off'\n"), definition.spec.names.kind == "App");
            for boolean in YAML_BOOLEANS {
                assert!(!yaml.contains(&format!("- {boolean}\n")), "{boolean} has no quotes");
            }
        }
    }
}

#[test]
fn the_charts_definitions_are_what_the_code_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/latchkey/templates");
    let mut names = BTreeSet::new();
    for definition in latchkey_crds::all() {
        let name = format!("crd-{}.yaml", definition.spec.names.plural);
        let kept = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        let made = to_chart_template(&definition).unwrap();
        assert_eq!(kept, made, "{name} is not what the code says: run `make generate`");
        names.insert(name);
    }
    let there = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let there: BTreeSet<_> = there.filter(|name| name.starts_with("crd-")).collect();
    assert_eq!(there, names, "templates that no definition makes");
}

#[test]
fn the_kept_reference_is_what_the_code_says() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/resources.md");
    let kept = fs::read_to_string(kept).unwrap_or_default();
    let made = latchkey_crds::reference::to_markdown(&latchkey_crds::all());
    assert_eq!(kept, made, "docs/resources.md is not what the code says: run `make generate`");
}

#[test]
fn every_reason_is_in_the_docs() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api-conventions.md");
    let page = fs::read_to_string(page).unwrap();
    for reason in Reason::ALL {
        assert!(page.contains(&format!("| `{reason}` |")), "docs/api-conventions.md does not tell of {reason}");
    }
}

#[test]
fn every_list_and_string_is_bounded() {
    for (kind, schema) in schemas() {
        for part in ["spec", "status"] {
            walk(&format!("{kind}.{part}"), &schema["properties"][part], &mut |path, schema| match schema["type"]
                .as_str()
            {
                Some("string") => {
                    let bounded = ["maxLength", "enum", "format"].iter().any(|bound| schema.get(bound).is_some());
                    assert!(bounded, "{path} is an unbounded string");
                }
                Some("array") => assert!(schema.get("maxItems").is_some(), "{path} is an unbounded list"),
                Some("object") => assert!(schema.get("properties").is_some(), "{path} is an open map"),
                Some("integer" | "boolean") => {}
                other => panic!("{path} is of type {other:?}"),
            });
        }
    }
}

#[test]
fn every_number_of_a_spec_has_bounds_and_tells_them() {
    for (kind, schema) in schemas() {
        walk(&format!("{kind}.spec"), &schema["properties"]["spec"], &mut |path, schema| {
            if schema["type"] == "integer" {
                assert_eq!(schema["format"], "int32", "{path}");
                let description = schema["description"].as_str().unwrap();
                for bound in ["minimum", "maximum"] {
                    let bound = schema[bound].as_f64().unwrap_or_else(|| panic!("{path} has no {bound}"));
                    assert!(description.contains(&bound.to_string()), "{path}: the description does not tell {bound}");
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
                walk(&format!("{kind}.{part}.{name}"), property, &mut |path, schema| {
                    let described = schema["description"].as_str().is_some_and(|text| !text.is_empty());
                    assert!(described || path.ends_with("[]"), "{path} has no description");
                });
            }
        }
    }
}

#[test]
fn only_modes_are_defaults_of_a_spec() {
    for (kind, schema) in schemas() {
        walk(&format!("{kind}.spec"), &schema["properties"]["spec"], &mut |path, schema| {
            assert!(schema.get("default").is_none() || schema.get("enum").is_some(), "{path} has a stored default");
        });
    }
}

#[test]
fn schemas_are_structural() {
    for (kind, schema) in schemas() {
        walk(&kind, &schema, &mut |path, schema| {
            for keyword in ["oneOf", "anyOf", "allOf", "not", "$ref", "nullable", "additionalProperties", "const"] {
                assert!(schema.get(keyword).is_none(), "{path} has {keyword}");
            }
            assert!(schema["type"].is_string(), "{path} has no type");
        });
    }
}

#[test]
fn a_first_status_says_that_nothing_is_known() {
    for ((kind, schema), third) in schemas().into_iter().zip(["Programmed", "Reachable"]) {
        let status = &schema["properties"]["status"]["default"];
        assert_eq!(status["observedGeneration"], -1, "{kind}");
        let conditions = status["conditions"].as_array().unwrap();
        let types = conditions.iter().map(|condition| condition["type"].as_str().unwrap());
        assert_eq!(types.collect::<Vec<_>>(), ["Accepted", "ResolvedRefs", third, "Ready"], "{kind}");
        for condition in conditions {
            assert_eq!(condition["status"], "Unknown");
            assert_eq!(condition["reason"], "Pending");
            assert_eq!(condition["observedGeneration"], -1);
        }
    }
}

#[test]
fn the_schema_has_every_member_of_a_provider_and_no_other() {
    let (_, schema) = schemas().pop().unwrap();
    let members = schema["properties"]["spec"]["properties"].as_object().unwrap();
    assert_eq!(
        members.keys().map(String::as_str).collect::<BTreeSet<_>>(),
        ProviderClient::MEMBERS.into_iter().collect::<BTreeSet<_>>()
    );
    for (name, member) in members {
        assert!(member["properties"]["clientID"].is_object(), "{name} has no clientID");
    }
}

#[test]
fn definitions_are_small_enough_for_a_chart() {
    for definition in latchkey_crds::all() {
        assert!(to_yaml(&definition).unwrap().len() < 256 * 1024);
    }
}

#[test]
fn resources_have_their_names_and_columns() {
    for (definition, short) in latchkey_crds::all().into_iter().zip(["lkapp", "lkprov"]) {
        assert_eq!(definition.spec.group, "latchkey.dev");
        assert_eq!(definition.spec.scope, "Namespaced");
        assert_eq!(definition.spec.names.categories.as_deref(), Some(&["latchkey".to_owned()][..]));
        assert_eq!(definition.spec.names.short_names.as_deref(), Some(&[short.to_owned()][..]));
        let version = &definition.spec.versions[0];
        assert_eq!(version.name, "v1alpha1");
        assert!(version.subresources.as_ref().unwrap().status.is_some());
        let columns = version.additional_printer_columns.as_ref().unwrap();
        let ordinary = columns.iter().filter(|column| column.priority.is_none_or(|priority| priority == 0));
        let names = ordinary.map(|column| column.name.as_str()).collect::<Vec<_>>();
        assert_eq!((names[0], names[1], names[3], names.len()), ("Ready", "Reason", "Age", 4));
    }
}
