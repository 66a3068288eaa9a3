//! Validation of Apps, Providers and Clients by the API server: every bound, every rule with its message, the defaults,
//! and the initial status. `render --check`, which checks manifests without an API server, must reject the same fields.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::{Command, Output},
    sync::LazyLock,
};

use futures::{StreamExt, stream};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, PostParams},
};
use latchkey_crds::{app::App, client::Client, conditions::ConditionType, provider::Provider, validation::Validator};
use latchkey_tests::{
    cluster::TestCluster,
    control_plane::{self, ControlPlane},
    process,
};
use serde_json::{Value, json};

static APP_VALIDATOR: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::app::definition()).expect("the schema is valid"));
static PROVIDER_VALIDATOR: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::provider::definition()).expect("the schema is valid"));
static CLIENT_VALIDATOR: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::client::definition()).expect("the schema is valid"));

/// The number of concurrent requests to the API server.
const CONCURRENCY: usize = 8;

/// The namespace of one test on the real API server.
struct AdmissionTest {
    plane: &'static ControlPlane,
    namespace: String,
    apps: Api<DynamicObject>,
    providers: Api<DynamicObject>,
    clients: Api<DynamicObject>,
}

/// An invalid field, as the API server reports it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FieldError {
    field: String,
    message: String,
}

// === impl AdmissionTest ===

impl AdmissionTest {
    async fn start() -> Self {
        let plane = TestCluster::shared().await.plane();
        let namespace = plane.namespace("admission").await.unwrap();
        let client = plane.admin().await;
        let namespaced_api = |resource| Api::namespaced_with(client.clone(), &namespace, &resource);
        let apps = namespaced_api(ApiResource::erase::<App>(&()));
        let providers = namespaced_api(ApiResource::erase::<Provider>(&()));
        let clients = namespaced_api(ApiResource::erase::<Client>(&()));
        Self { plane, namespace, apps, providers, clients }
    }

    fn api(&self, object: &Value) -> &Api<DynamicObject> {
        match object["kind"].as_str().unwrap() {
            "App" => &self.apps,
            "Provider" => &self.providers,
            "Client" => &self.clients,
            other => panic!("unknown kind {other}"),
        }
    }

    /// Sends this object to the API server in a dry run. Returns the errors of the API server.
    async fn dry_run(&self, object: &Value) -> Vec<FieldError> {
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let parsed = serde_json::from_value(object.clone()).unwrap();
        field_errors(self.api(object).create(&params, &parsed).await)
    }

    async fn create(&self, object: &Value) -> Value {
        let parsed = serde_json::from_value(object.clone()).unwrap();
        let created = self.api(object).create(&PostParams::default(), &parsed).await.unwrap();
        serde_json::to_value(created).unwrap()
    }

    async fn assert_accepted(&self, object: &Value) {
        assert_eq!(self.dry_run(object).await, [], "{object}");
    }

    /// Asserts that the API server rejects this field with this message, and that the validator of `render --check`
    /// rejects the field, too. Returns all errors of the API server.
    async fn assert_refused(&self, object: &Value, field: &str, message: &str) -> Vec<FieldError> {
        let found = self.dry_run(object).await;
        let is_reported = found.iter().any(|fault| fault.field == field && fault.message.contains(message));
        assert!(is_reported, "{field} {message:?}: {found:?} of {object}");
        let validator = match object["kind"].as_str().unwrap() {
            "App" => &APP_VALIDATOR,
            "Provider" => &PROVIDER_VALIDATOR,
            _ => &CLIENT_VALIDATOR,
        };
        let violations = validator.validate(object, None);
        assert!(violations.iter().any(|violation| violation.field == field), "{field}: {violations:?} of {object}");
        found
    }

    fn kubectl(&self, arguments: &[&str]) -> Output {
        Command::new(control_plane::kubectl().unwrap())
            .args(["--namespace", &self.namespace])
            .args(arguments)
            .env("KUBECONFIG", self.plane.admin_kubeconfig())
            // kubectl caches data of the API server in its home directory.
            .env("HOME", process::run_dir())
            .output()
            .unwrap()
    }
}

fn field_errors<T>(result: kube::Result<T>) -> Vec<FieldError> {
    match result {
        Ok(_) => Vec::new(),
        Err(kube::Error::Api(status)) if status.code == 422 => {
            let causes = status.details.expect("a refusal has details").causes;
            assert!(!causes.is_empty(), "a refusal without a cause");
            causes.into_iter().map(|cause| FieldError { field: cause.field, message: cause.message }).collect()
        }
        Err(error) => panic!("neither accepted nor refused: {error}"),
    }
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "latchkey.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

fn app(spec: Value) -> Value {
    object("App", "shop", spec)
}

fn provider(spec: Value) -> Value {
    object("Provider", "corp", spec)
}

/// A Client of the App `shop`, with these further fields.
fn client_of_shop(fields: Value) -> Value {
    let mut spec = json!({ "appRef": { "name": "shop" } });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object("Client", "grafana", spec)
}

/// A client with a redirect URL and these further fields of `web`.
fn web_client(fields: Value) -> Value {
    let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
    web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    client_of_shop(json!({ "web": web }))
}

/// An App with every field set. If one number is changed to an end of its range, the App is still valid.
fn full_app() -> Value {
    let windows = json!([{ "count": 5, "windowSeconds": 60 }]);
    app(json!({
        "appID": "shop",
        "displayName": "Łódź – The Shop",
        "redirectURLs": ["https://shop.example.com/auth/done"],
        "allowedOrigins": ["https://shop.example.com"],
        "providerRefs": [{
            "name": "corp",
            "alias": "sso",
            "linkByEmail": false,
            "groups": { "claim": "roles", "prefix": "corp:", "only": ["team-*"] },
        }],
        "signUp": "Closed",
        "allowedEmailDomains": ["example.com"],
        "requireVerifiedEmail": true,
        "enumerationProtection": "Disabled",
        "allowUsersWithoutEmail": true,
        "browserBinding": "Required",
        "callbackMode": "Code",
        "password": {
            "minimumLength": 12,
            "minimumStrength": 3,
            "foreignHashRetentionDays": 365,
            "firebaseScryptRef": { "name": "firebase" },
        },
        "mail": {
            "from": "The Shop <hello@shop.example.com>",
            "confirmURL": "https://shop.example.com/confirm?code={code}",
            "resetURL": "https://shop.example.com/reset?code={code}&email={email}",
            "invitationURL": "https://shop.example.com/welcome?code={code}",
            "confirmCodeLifetimeSeconds": 86400,
            "resetCodeLifetimeSeconds": 1800,
            "invitationCodeLifetimeSeconds": 604800,
            "templatesRef": { "name": "shop-mail" },
            "smtpSecretRef": { "name": "shop-smtp" },
        },
        "tokens": {
            "signingAlgorithm": "EdDSA",
            "accessLifetimeSeconds": 900,
            "refreshIdleSeconds": 300,
            "sessionLifetimeSeconds": 63_072_000,
            "refreshGraceSeconds": 0,
            "audiences": ["https://api.example.com"],
            "keyRotationDays": 90,
        },
        "limits": {
            "loginFailuresPerClient": windows,
            "loginFailuresPerAccount": windows,
            "loginFailuresPerClientOverall": windows,
            "loginsPerClient": windows,
            "registrationsPerClient": windows,
            "mailsPerRecipient": windows,
            "mailsPerClient": windows,
            "codesPerClient": windows,
            "refreshesPerSession": windows,
            "authorizationsPerClientAddress": windows,
            "tokenRequestsPerClientID": windows,
            "clientFailuresPerClientAddress": windows,
        },
        "administrators": [{ "serviceAccount": { "namespace": "shop", "name": "backoffice" }, "role": "UserAdmin" }],
        "webhooks": [
            {
                "name": "crm",
                "events": ["user.created", "session.stolen"],
                "include": ["Profile"],
                "push": { "url": "https://crm.example.com/hook", "secretRef": { "name": "crm-hook" } },
            },
            {
                "name": "sync",
                "events": ["user.deleted"],
                "pull": { "serviceAccount": { "namespace": "shop", "name": "sync" } },
            },
        ],
        "pages": {
            "mode": "Enabled",
            "host": "login.shop.example.com",
            "languages": ["en", "de"],
            "theme": {
                "mode": "Auto",
                "light": { "accent": "#1a56db", "background": "#ffffff" },
                "dark": { "accent": "#8ab4f8", "background": "#121212" },
                "logoRef": { "name": "brand", "key": "logo.svg" },
            },
            "textsRef": { "name": "shop-texts" },
            "links": {
                "home": "https://shop.example.com",
                "terms": "https://shop.example.com/terms",
                "privacy": "https://shop.example.com/privacy",
                "support": "mailto:help@shop.example.com",
            },
            "session": { "idleSeconds": 300, "lifetimeSeconds": 63_072_000 },
        },
        "clients": { "namespaces": { "from": "Selector", "selector": {
            "matchLabels": { "env": "live" },
            "matchExpressions": [{ "key": "team", "operator": "In", "values": ["monitoring"] }],
        } } },
        "unverifiedRetentionDays": 30,
        "auditRetentionDays": 365,
        "deletionPolicy": "Delete",
    }))
}

/// Clients that together have every field. No Client can have every field, because each Client authenticates in one
/// way: with a secret that the operator creates, with a Secret that the team creates, with keys, or not at all.
fn full_clients() -> Vec<Value> {
    let urls = json!({
        "redirectURLs": ["https://grafana.example.com/login"],
        "postLogoutRedirectURLs": ["https://grafana.example.com/"],
    });
    let reference = |key: &str| json!({ "name": "grafana", "key": key });
    let web = |fields: Value| {
        let mut client = web_client(fields);
        client["spec"]["web"]["postLogoutRedirectURLs"] = urls["postLogoutRedirectURLs"].clone();
        client
    };
    let mut first = web(json!({
        "authentication": "Secret",
        "secret": { "name": "grafana-oidc", "rotationOverlapSeconds": 3600 },
        "pkce": "Required",
    }));
    let shared = json!({
        "appRef": { "name": "shop", "namespace": "identity" },
        "clientID": "grafana",
        "displayName": "Grafana",
        "pushedAuthorization": "Required",
        "scopes": ["openid", "profile", "email", "groups", "offline_access"],
        "consent": "Once",
        "allow": { "groups": ["admins"] },
        "groups": { "only": ["argo:*"], "max": 100 },
        "tokens": {
            "idTokenAlgorithm": "ES256", "idTokenLifetimeSeconds": 3600, "audiences": ["https://api.example.com"],
        },
    });
    first["spec"].as_object_mut().unwrap().extend(shared.as_object().unwrap().clone());
    vec![
        first,
        web(json!({ "secretRef": reference("secret"), "previousSecretRef": reference("previous") })),
        web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": reference("jwks.json") })),
        client_of_shop(json!({ "public": urls })),
    ]
}

/// All objects that together have every field.
fn full_objects() -> Vec<Value> {
    [full_app(), app_with_pull_webhook()].into_iter().chain(full_providers()).chain(full_clients()).collect()
}

/// Returns an App with a pull webhook. [`full_app`] has a push webhook, and one webhook cannot be both.
fn app_with_pull_webhook() -> Value {
    app(json!({ "webhooks": [{
        "name": "sync",
        "events": ["user.deleted"],
        "pull": { "serviceAccount": { "namespace": "shop", "name": "sync" } },
    }]}))
}

/// The fields of an OAuth client at a provider.
fn client() -> Value {
    json!({
        "clientID": "id",
        "clientSecretRef": { "name": "corp", "key": "client-secret" },
        "scopes": ["email"],
        "additionalClientIDs": ["other-id"],
    })
}

/// For each preset, a Provider with every field set.
fn full_providers() -> Vec<Value> {
    latchkey_crds::provider::ProviderClient::MEMBER_NAMES
        .iter()
        .map(|member| {
            let mut spec = client();
            let preset_fields = match *member {
                "apple" => json!({
                    "teamID": "ABCDE12345",
                    "keyID": "12345ABCDE",
                    "privateKeyRef": { "name": "apple", "key": "key.p8" },
                }),
                "gitlab" => json!({ "baseURL": "https://gitlab.example.com" }),
                "microsoft" => json!({ "tenant": "common" }),
                "oidc" => json!({
                    "issuer": "https://id.example.com/realms/a",
                    "claims": { "email": "mail", "emailVerified": "verified", "name": "called" },
                }),
                "oauth2" => json!({
                    "authorizationURL": "https://id.example.com/authorize",
                    "tokenURL": "https://id.example.com/token",
                    "userInfoURL": "https://id.example.com/me",
                    "introspectionURL": "https://id.example.com/introspect",
                    "clientAuthentication": "Post",
                    "claims": { "subject": "id", "email": "mail", "emailVerified": "verified", "name": "called" },
                }),
                _ => json!({}),
            };
            for (name, value) in preset_fields.as_object().unwrap() {
                spec[name] = value.clone();
            }
            if *member == "apple" {
                spec.as_object_mut().unwrap().remove("clientSecretRef");
            }
            provider(json!({ *member: spec }))
        })
        .collect()
}

fn schema_of(kind: &str) -> Value {
    let mut definitions = latchkey_crds::definitions().into_iter();
    let definition = definitions.find(|definition| definition.spec.names.kind == kind).unwrap();
    serde_json::to_value(&definition.spec.versions[0].schema).unwrap()["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Calls `visitor` for `value`, and recursively for its fields and for the first item of each array. `visitor` gets the
/// schema, the JSON pointer, and the field path as in errors of the API server.
fn visit(schema: &Value, value: &Value, pointer: &str, field: &str, visitor: &mut impl FnMut(&Value, &str, &str)) {
    visitor(schema, pointer, field);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        if let Some(value) = value.get(name) {
            visit(property, value, &format!("{pointer}/{name}"), &format!("{field}.{name}"), visitor);
        }
    }
    if let (Some(items), Some(first)) = (schema.get("items"), value.get(0)) {
        visit(items, first, &format!("{pointer}/0"), &format!("{field}[0]"), visitor);
    }
}

/// Returns invalid and valid variants of `object`. Each invalid variant has one field that is just beyond a bound,
/// breaks a pattern or an enum, or is missing although it is required. It comes with the path of this field. Each valid
/// variant has a number at a bound.
fn bound_cases(object: &Value) -> (Vec<(Value, String)>, Vec<Value>) {
    let (mut invalid, mut valid) = (Vec::new(), Vec::new());
    let schema = schema_of(object["kind"].as_str().unwrap());
    visit(&schema, &object["spec"], "/spec", "spec", &mut |schema, pointer, field| {
        let with = |value: Value| {
            let mut object = object.clone();
            *object.pointer_mut(pointer).unwrap() = value;
            object
        };
        let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_f64).map(|bound| bound as i64);
        let mut add_invalid = |value| invalid.push((with(value), field.to_owned()));
        if let Some(maximum) = bound("maxLength") {
            add_invalid(json!("a".repeat(maximum as usize + 1)));
        }
        if let Some(1..) = bound("minLength") {
            add_invalid(json!(""));
        }
        if schema.get("pattern").is_some() {
            add_invalid(json!("\u{1}"));
        }
        if schema.get("enum").is_some() {
            add_invalid(json!("Neither"));
        }
        if let Some(maximum) = bound("maxItems") {
            let first = object.pointer(pointer).unwrap()[0].clone();
            add_invalid(json!(vec![first; maximum as usize + 1]));
        }
        if let Some(1..) = bound("minItems") {
            add_invalid(json!([]));
        }
        for (keyword, step) in [("minimum", -1), ("maximum", 1)] {
            if let Some(bound) = bound(keyword) {
                add_invalid(json!(bound + step));
                valid.push(with(json!(bound)));
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let mut object = object.clone();
            object.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(name);
            invalid.push((object, format!("{field}.{name}")));
        }
    });
    (invalid, valid)
}

/// The messages of all validation rules of the CRDs.
fn rule_messages() -> BTreeSet<String> {
    fn collect(value: &Value, messages: &mut BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                for rule in members.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                    messages.insert(rule["message"].as_str().unwrap().to_owned());
                }
                members.values().for_each(|member| collect(member, messages));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, messages)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let mut messages = BTreeSet::new();
    latchkey_crds::definitions()
        .iter()
        .for_each(|definition| collect(&serde_json::to_value(definition).unwrap(), &mut messages));
    messages
}

/// For each validation rule that applies to new objects: an object that breaks the rule, the field, and the beginning
/// of the message.
fn rule_violations() -> Vec<(Value, &'static str, &'static str)> {
    let redirect = |url: &str| app(json!({ "redirectURLs": [url] }));
    let origin = |origin: &str| app(json!({ "allowedOrigins": [origin] }));
    let confirm = |url: &str| app(json!({ "mail": { "confirmURL": url } }));
    let oidc = |issuer: &str| {
        let mut spec = client();
        spec["issuer"] = json!(issuer);
        provider(json!({ "oidc": spec }))
    };
    let same_names = json!([{ "name": "google" }, { "name": "corp", "alias": "google" }]);
    let webhook = app_with_pull_webhook()["spec"]["webhooks"][0].clone();
    let tokens = json!({ "refreshIdleSeconds": 601, "sessionLifetimeSeconds": 600 });
    let reference = json!({ "name": "grafana", "key": "secret" });
    let no_name = json!({ "name": "a b", "key": "secret" });
    let with_spec = |field: &str, value: Value| {
        let mut client = web_client(json!({}));
        client["spec"][field] = value;
        client
    };
    let mut long_named = web_client(json!({}));
    long_named["metadata"]["name"] = json!("a".repeat(249));
    vec![
        (object("App", "shop.example", json!({})), "spec.appID", "metadata.name is not an appID"),
        (object("App", "metrics", json!({})), "spec.appID", "this appID is a path"),
        (app(json!({ "appID": "v1" })), "spec.appID", "this appID is a path"),
        (redirect("https://shop.example.com/#done"), "spec.redirectURLs[0]", "has a fragment (#…)"),
        (redirect("https://user@shop.example.com/"), "spec.redirectURLs[0]", "has user info"),
        (
            redirect("http://shop.example.com/"),
            "spec.redirectURLs[0]",
            "use https, or http on a loopback host (localhost",
        ),
        (origin("https://shop.example.com/"), "spec.allowedOrigins[0]", "write an origin as browsers do"),
        (origin("https://shop.example.com:443"), "spec.allowedOrigins[0]", "remove the default port"),
        (
            app(json!({ "providerRefs": [{ "name": "a.b" }] })),
            "spec.providerRefs[0]",
            "the name cannot be used in a path",
        ),
        (app(json!({ "providerRefs": [{ "name": "email" }] })), "spec.providerRefs[0]", "email is a path"),
        (app(json!({ "providerRefs": same_names })), "spec.providerRefs", "two entries have the same name"),
        (confirm("https://shop.example.com/confirm"), "spec.mail.confirmURL", "write {code}"),
        (confirm("https://shop.example.com/{code}/{name}"), "spec.mail.confirmURL", "has braces other"),
        (confirm("https://{code}.example.com/"), "spec.mail.confirmURL", "has a placeholder or user info"),
        (
            confirm("http://shop.example.com/?code={code}"),
            "spec.mail.confirmURL",
            "use https, or http on a loopback host, or",
        ),
        (app(json!({ "mail": { "from": "hello" } })), "spec.mail.from", "write an address"),
        (app(json!({ "webhooks": [webhook, webhook] })), "spec.webhooks", "two webhooks have the same name"),
        (
            app(json!({ "webhooks": [{ "name": "crm", "events": ["user.created"] }] })),
            "spec.webhooks[0]",
            "set exactly one of push, pull",
        ),
        (app(json!({ "tokens": tokens })), "spec.tokens.refreshIdleSeconds", "refreshIdleSeconds is longer"),
        (
            app(json!({ "pages": { "session": { "idleSeconds": 601, "lifetimeSeconds": 600 } } })),
            "spec.pages.session.idleSeconds",
            "idleSeconds is longer",
        ),
        (
            app(json!({ "pages": { "links": { "support": "mailto:help" } } })),
            "spec.pages.links.support",
            "use https, or mailto: with an email address",
        ),
        (
            app(json!({ "clients": { "namespaces": { "from": "Selector" } } })),
            "spec.clients.namespaces",
            "set selector if from is Selector",
        ),
        (
            app(json!({ "clients": { "namespaces": { "from": "Selector", "selector": {
                "matchExpressions": [{ "key": "env", "operator": "In" }],
            } } } })),
            "spec.clients.namespaces.selector.matchExpressions[0]",
            "set values with In and NotIn",
        ),
        (client_of_shop(json!({})), "spec", "set exactly one of web, public"),
        (with_spec("clientID", json!("01890a5d-ac96-774b-bcce-b302099a8057")), "spec.clientID", "is a UUID"),
        (with_spec("scopes", json!(["email"])), "spec.scopes", "add openid"),
        (long_named, "spec.web", "the name with -oidc is too long"),
        (
            web_client(json!({ "redirectURLs": ["com.example.app:/done"] })),
            "spec.web.redirectURLs",
            "only a public client can have a private-use scheme",
        ),
        (web_client(json!({ "jwksRef": reference })), "spec.web", "set jwksRef if authentication is PrivateKeyJWT"),
        (
            web_client(json!({ "authentication": "PrivateKeyJWT", "jwksRef": reference, "secretRef": reference })),
            "spec.web",
            "a client with PrivateKeyJWT has no secret",
        ),
        (web_client(json!({ "secret": {}, "secretRef": reference })), "spec.web", "set secret, so that the operator"),
        (web_client(json!({ "previousSecretRef": reference })), "spec.web", "previousSecretRef is the former value"),
        (web_client(json!({ "secretRef": no_name })), "spec.web", "secretRef.name is not the name of a Secret"),
        (
            web_client(json!({ "secretRef": reference, "previousSecretRef": no_name })),
            "spec.web",
            "previousSecretRef.name is not the name of a Secret",
        ),
        (
            web_client(json!({ "authentication": "PrivateKeyJWT", "jwksRef": no_name })),
            "spec.web",
            "jwksRef.name is not the name of a ConfigMap",
        ),
        (provider(json!({})), "spec", "set exactly one of google, apple"),
        (provider(json!({ "google": client(), "github": client() })), "spec", "set exactly one of google, apple"),
        (oidc("http://id.example.com"), "spec.oidc.issuer", "use https"),
        (oidc("https://user@id.example.com"), "spec.oidc.issuer", "has user info"),
        (oidc("https://id.example.com?a"), "spec.oidc.issuer", "has a query or a fragment"),
    ]
}

#[tokio::test]
async fn minimal_and_full_objects_are_accepted() {
    let admission = AdmissionTest::start().await;
    admission.assert_accepted(&app(json!({}))).await;
    admission.assert_accepted(&web_client(json!({}))).await;
    for full_object in full_objects() {
        admission.assert_accepted(&full_object).await;
    }
}

#[test]
fn the_full_objects_have_every_field() {
    // For each field of a kind, whether any object of the kind has it. No object has all fields, because some exclude
    // each other.
    let mut fields = BTreeMap::new();
    for full_object in full_objects() {
        let kind = full_object["kind"].as_str().unwrap();
        visit(&schema_of(kind), &full_object["spec"], "/spec", "spec", &mut |schema, pointer, field| {
            for (name, _) in schema["properties"].as_object().into_iter().flatten() {
                let is_set = full_object.pointer(&format!("{pointer}/{name}")).is_some();
                *fields.entry(format!("{kind}: {field}.{name}")).or_insert(false) |= is_set;
            }
        });
    }
    let missing: Vec<_> = fields.iter().filter(|(_, is_set)| !**is_set).map(|(field, _)| field).collect();
    assert!(missing.is_empty(), "not set: {missing:?}");
}

#[tokio::test]
async fn every_bound_is_enforced() {
    let admission = &AdmissionTest::start().await;
    let (mut invalid, mut valid) = (Vec::new(), Vec::new());
    for full_object in full_objects() {
        let (more_invalid, more_valid) = bound_cases(&full_object);
        invalid.extend(more_invalid);
        valid.extend(more_valid);
    }
    assert!(invalid.len() > 300 && valid.len() > 50, "{} invalid, {} valid", invalid.len(), valid.len());
    let checks =
        stream::iter(invalid).map(|(object, field)| async move { admission.assert_refused(&object, &field, "").await });
    checks.buffer_unordered(CONCURRENCY).collect::<Vec<_>>().await;
    let checks = stream::iter(valid).map(|object| async move { admission.assert_accepted(&object).await });
    checks.buffer_unordered(CONCURRENCY).collect::<Vec<()>>().await;
}

#[tokio::test]
async fn every_validation_rule_refuses_with_its_message() {
    let admission = AdmissionTest::start().await;
    let mut untested = rule_messages();
    // These rules apply only to changes. The tests below check them.
    let change_rules = ["the appID cannot change", "appRef cannot change", "the client ID cannot change"];
    untested.retain(|message| !change_rules.iter().any(|beginning| message.starts_with(beginning)));
    for (object, field, message) in rule_violations() {
        let errors = admission.assert_refused(&object, field, message).await;
        untested.retain(|rule| !errors.iter().any(|fault| fault.message.ends_with(rule)));
    }
    assert!(untested.is_empty(), "rules without a test object: {untested:#?}");
}

/// The API server limits the cost of validation rules when a CRD is created and when the rules run. The rules for the
/// largest App must stay within both limits.
#[tokio::test]
async fn the_largest_app_is_accepted() {
    let admission = AdmissionTest::start().await;
    let url = |index: usize, length: usize| {
        let start = format!("https://a.example/{index}/");
        format!("{start}{}", "a".repeat(length - start.len()))
    };
    let host = |index: usize| format!("h{index}.{0}.{0}.{0}.example", "b".repeat(60));
    let windows = json!([
        { "count": 5, "windowSeconds": 60 },
        { "count": 50, "windowSeconds": 3600 },
        { "count": 500, "windowSeconds": 86400 },
    ]);
    let mut largest = full_app();
    largest["spec"]["redirectURLs"] = (0..100).map(|index| url(index, 2048)).collect();
    largest["spec"]["allowedOrigins"] = (0..100).map(|index| format!("https://{}", host(index))).collect();
    largest["spec"]["allowedEmailDomains"] = (0..100).map(host).collect();
    largest["spec"]["providerRefs"] =
        (0..32).map(|index| json!({ "name": "n".repeat(253), "alias": format!("alias-{index}") })).collect();
    largest["spec"]["administrators"] = vec![full_app()["spec"]["administrators"][0].clone(); 50].into();
    largest["spec"]["webhooks"] = (0..8)
        .map(|index| {
            let mut webhook = full_app()["spec"]["webhooks"][0].clone();
            webhook["name"] = json!(format!("{}{index}", "n".repeat(62)));
            webhook["push"]["url"] = json!(url(index, 2048));
            webhook
        })
        .collect();
    largest["spec"]["pages"]["host"] = json!(host(0));
    for (index, link) in largest["spec"]["pages"]["links"].as_object_mut().unwrap().values_mut().enumerate() {
        *link = json!(url(index, 2048));
    }
    for limit in largest["spec"]["limits"].as_object_mut().unwrap().values_mut() {
        *limit = windows.clone();
    }
    admission.assert_accepted(&largest).await;
}

#[tokio::test]
async fn an_app_id_cannot_change() {
    let admission = AdmissionTest::start().await;
    for (index, (old, new, differs)) in [
        // The old spec, the new spec, and whether their appIDs differ. `NAME` stands for the name of the App.
        (json!({}), json!({ "appID": "NAME" }), false),
        (json!({ "appID": "NAME" }), json!({}), false),
        (json!({}), json!({ "appID": "other" }), true),
        (json!({ "appID": "other" }), json!({}), true),
        (json!({ "appID": "one" }), json!({ "appID": "two" }), true),
        (json!({ "appID": "one" }), json!({ "appID": "one", "signUp": "Closed" }), false),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("app-{index}");
        let with_name = |spec: &Value| serde_json::from_str(&spec.to_string().replace("NAME", &name)).unwrap();
        let before = admission.create(&object("App", &name, with_name(&old))).await;
        let mut after = before.clone();
        after["spec"] = with_name(&new);
        let after: DynamicObject = serde_json::from_value(after).unwrap();
        let found = field_errors(admission.apps.replace(&name, &PostParams::default(), &after).await);
        if differs {
            assert_eq!(found.len(), 1, "{old} -> {new}: {found:?}");
            assert_eq!(found[0].field, "spec.appID");
            assert!(found[0].message.contains("the appID cannot change"), "{found:?}");
            let stored = serde_json::to_value(admission.apps.get(&name).await.unwrap()).unwrap();
            assert_eq!(stored["spec"], before["spec"], "a refused change changes nothing");
        } else {
            assert_eq!(found, [], "{old} -> {new}");
        }
    }
}

#[tokio::test]
async fn the_app_and_the_id_of_a_client_cannot_change() {
    let admission = AdmissionTest::start().await;
    let before = admission.create(&full_clients()[0]).await;
    for (field, value) in [("appRef", json!({ "name": "blog" })), ("clientID", json!("other"))] {
        let mut after = before.clone();
        after["spec"][field] = value;
        let after: DynamicObject = serde_json::from_value(after).unwrap();
        let found = field_errors(admission.clients.replace("grafana", &PostParams::default(), &after).await);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].field, format!("spec.{field}"));
        assert!(found[0].message.contains("cannot change"), "{found:?}");
    }
}

#[tokio::test]
async fn unset_enums_get_their_defaults_and_unset_numbers_do_not() {
    let admission = AdmissionTest::start().await;
    let created = admission.create(&app(json!({ "tokens": {}, "pages": { "theme": {} } }))).await;
    let expected = json!({
        "signUp": "Open",
        "enumerationProtection": "Strict",
        "browserBinding": "Auto",
        "callbackMode": "Query",
        "tokens": { "signingAlgorithm": "ES256" },
        "pages": { "mode": "Disabled", "theme": { "mode": "Auto" } },
        "deletionPolicy": "Retain",
    });
    assert_eq!(created["spec"], expected);
}

#[tokio::test]
async fn a_new_object_has_a_status_with_unknown_conditions() {
    let admission = AdmissionTest::start().await;
    let provider = provider(json!({ "github": client() }));
    for (object, types) in [
        (app(json!({})), ConditionType::APP.as_slice()),
        (
            provider,
            &[ConditionType::Accepted, ConditionType::ResolvedRefs, ConditionType::Reachable, ConditionType::Ready],
        ),
        (web_client(json!({})), ConditionType::CLIENT.as_slice()),
    ] {
        let mut object = object;
        // The API server drops this status, because only requests to the subresource `status` can write a status.
        object["status"] = json!({ "observedGeneration": 7 });
        let status = admission.create(&object).await["status"].clone();
        assert_eq!(status["observedGeneration"], -1);
        let conditions = status["conditions"].as_array().unwrap();
        let found: Vec<_> = conditions.iter().map(|condition| condition["type"].as_str().unwrap()).collect();
        let expected: Vec<_> = types.iter().map(|type_| type_.as_str()).collect();
        assert_eq!(found, expected);
        for condition in conditions {
            assert_eq!(condition["status"], "Unknown");
            assert_eq!(condition["reason"], "Pending");
            assert_eq!(condition["observedGeneration"], -1);
        }
    }
}

#[tokio::test]
async fn kubectl_shows_the_main_columns_and_refuses_unknown_fields() {
    let admission = AdmissionTest::start().await;
    admission.create(&app(json!({}))).await;
    let shown = admission.kubectl(&["get", "lkapp"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "READY", "REASON", "APPID", "AGE"], "{shown}");
    assert_eq!(lines[1][..3], ["shop", "Unknown", "Pending"], "{shown}");
    let wide = String::from_utf8(admission.kubectl(&["get", "latchkey", "-o", "wide"]).stdout).unwrap();
    assert!(wide.contains("MESSAGE") && wide.contains("Waiting for the operator"), "{wide}");

    let misspelled = app(json!({ "redirectUrls": [] }));
    let file = process::fresh_dir("misspelt").join("app.json");
    fs::write(&file, misspelled.to_string()).unwrap();
    let refused = admission.kubectl(&["apply", "-f", file.to_str().unwrap()]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains(r#"unknown field "spec.redirectUrls""#), "{error}");
}
