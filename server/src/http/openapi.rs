//! The OpenAPI 3.1 document. It consists of the operations that the files of the handlers declare, and the schemas of
//! their types.

use bytes::Bytes;
use latchkey_crds::types::IssuerUrl;
use schemars::{SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{
    endpoints,
    error::ErrorBody,
    openapi::operation::Operation,
    routes::{AdministrationRoute, Route, RouteTable, Verb},
};

mod components;
mod errors;
pub mod examples;
pub mod operation;
pub mod patterns;
mod webhooks;

/// The documents of both listeners, as JSON.
pub struct Documents {
    pub public: Bytes,
    pub administration: Bytes,
}

// === impl Documents ===

impl Documents {
    /// Renders both documents for a service at `base_url`. This takes 5 MB of the heap for a moment. A server does it
    /// before its other tasks allocate memory, because glibc can return only the top of its heap
    /// (docs/decisions/0011-memory-of-the-servers.md).
    pub fn render(base_url: &IssuerUrl) -> Self {
        Self {
            public: public_document(base_url).to_string().into(),
            administration: administration_document().to_string().into(),
        }
    }
}

/// Generates the document of the public listener for a service at `base_url`.
pub fn public_document(base_url: &IssuerUrl) -> Value {
    let description = "Every response carries `X-Request-Id` and `X-Content-Type-Options: nosniff`. Times are Unix \
        seconds. Bodies are JSON in UTF-8, at most 64 KiB. Unknown fields are ignored. A duplicate key, nesting deeper \
        than 16 or more than 1,000 values are rejected.";
    let summary = "Email and social login for the applications of a cluster";
    document::<Route>(endpoints::operation, "Latchkey", summary, description, base_url.as_str())
}

/// Generates the document of the administration listener.
pub fn administration_document() -> Value {
    let description = "For the ServiceAccounts that an App lists in `administrators`. Every response carries \
        `X-Request-Id` and `X-Content-Type-Options: nosniff`. Times are Unix seconds. Bodies are JSON in UTF-8, at most \
        64 KiB. Unknown fields and unknown query parameters are rejected. Eight calls of a caller and 32 calls to an App \
        can be in flight per server.";
    let summary = "Administration of the users of an App";
    let url = "http://latchkey-server-admin.latchkey.svc:8081";
    let mut document = document::<AdministrationRoute>(
        endpoints::administration::operation,
        "Latchkey administration",
        summary,
        description,
        url,
    );
    webhooks::add(&mut document);
    document
}

fn document<R: RouteTable>(
    operation: fn(R) -> Operation,
    title: &str,
    summary: &str,
    description: &str,
    url: &str,
) -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut schemas = settings.for_serialize().into_generator();
    let paths = paths(operation, &mut schemas);
    let parameters = components::path_parameters(&mut schemas, &paths);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "summary": summary,
            "description": description,
            "version": "1",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": url }],
        "paths": paths,
        "components": {
            "schemas": schemas.take_definitions(true),
            "parameters": parameters,
            "headers": components::response_headers(),
            "securitySchemes": components::security_schemes(),
        },
    })
}

/// Every path with its parameters and its operations, one per method.
fn paths<R: RouteTable>(operation: fn(R) -> Operation, schemas: &mut SchemaGenerator) -> Map<String, Value> {
    let error = schemas.subschema_for::<ErrorBody<'static>>();
    let mut paths = Map::new();
    for route in R::ALL.iter().copied() {
        let item = paths.entry(route.path_template()).or_insert_with(|| {
            let parameters = components::path_parameter_references(route.path_template());
            if parameters.is_empty() { json!({}) } else { json!({ "parameters": parameters }) }
        });
        item[method_name(route.verb())] = operation(route).render(route, schemas, &error);
    }
    paths
}

fn method_name(verb: Verb) -> &'static str {
    match verb {
        Verb::Get | Verb::GetOnly => "get",
        Verb::Post => "post",
        Verb::Put => "put",
        Verb::Patch => "patch",
        Verb::Delete => "delete",
        // OpenAPI has no "any method". The document lists GET, and the description of the operation says that any
        // method is accepted.
        Verb::Any => "get",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::error::ErrorCode;

    fn generated_document() -> Value {
        public_document(&"https://auth.example.com".parse().unwrap())
    }

    #[test]
    fn the_stored_document_is_up_to_date() {
        let text = serde_json::to_string_pretty(&generated_document()).unwrap() + "\n";
        crate::http::docs::assert_up_to_date("openapi.json", &text);
        let text = serde_json::to_string_pretty(&administration_document()).unwrap() + "\n";
        crate::http::docs::assert_up_to_date("openapi-administration.json", &text);
    }

    /// Adds every `$ref` of a document to `found`.
    fn collect_references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(object) => {
                if let Some(Value::String(reference)) = object.get("$ref") {
                    found.push(reference);
                }
                object.values().for_each(|inner| collect_references(inner, found));
            }
            Value::Array(items) => items.iter().for_each(|inner| collect_references(inner, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    #[test]
    fn every_reference_resolves() {
        for document in [generated_document(), administration_document()] {
            let mut found = Vec::new();
            collect_references(&document, &mut found);
            assert!(found.len() > 50);
            for reference in found {
                let pointer = reference.strip_prefix('#').unwrap();
                assert!(document.pointer(pointer).is_some(), "{reference}");
            }
        }
    }

    #[test]
    fn every_error_code_is_listed() {
        let document = generated_document();
        let listed = document.pointer("/components/schemas/ErrorCode").unwrap();
        for code in ErrorCode::ALL {
            assert!(listed.to_string().contains(&format!("\"{}\"", code.as_str())), "{}", code.as_str());
        }
    }

    /// The operation ids of a path.
    fn operation_ids(item: &Value) -> Vec<&str> {
        item.as_object().unwrap().values().filter_map(|operation| operation["operationId"].as_str()).collect()
    }

    #[test]
    fn every_route_is_described() {
        fn assert_complete<R: RouteTable>(document: &Value) {
            let paths = document["paths"].as_object().unwrap();
            let mut operations: Vec<_> = paths.values().flat_map(operation_ids).collect();
            operations.sort();
            let mut names: Vec<_> = R::ALL.iter().map(|route| route.name()).collect();
            names.sort();
            assert_eq!(operations, names);
        }
        assert_complete::<Route>(&generated_document());
        assert_complete::<AdministrationRoute>(&administration_document());
    }
}
