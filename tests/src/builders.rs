//! Builders of manifests. Each test builds its own Apps and Providers, and sets the fields that matter to the test.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};

use crate::smtp::{Security, Smtp};

/// The namespace in [`App::manifest`], [`Provider::manifest`] and [`Client::manifest`], unless a test sets another.
const DEFAULT_NAMESPACE: &str = "tests";

/// The manifest of an App. If the App has its own relay, the manifest includes the Secret of the relay. If the App has
/// its own templates, the manifest includes the ConfigMap of the templates. If the App has push webhooks, the manifest
/// includes the Secrets of their keys.
#[derive(Clone, Debug)]
pub struct App {
    id: String,
    namespace: String,
    annotations: Map<String, Value>,
    spec: Map<String, Value>,
    smtp: Option<Relay>,
    templates: Map<String, Value>,
    /// The values of the Secret of each push webhook, by the name of the webhook.
    webhook_keys: BTreeMap<String, Map<String, Value>>,
}

/// The manifest of a Client: a program that signs in users of an App with OpenID Connect.
#[derive(Clone, Debug)]
pub struct Client {
    name: String,
    namespace: String,
    annotations: Map<String, Value>,
    /// The member of the spec with the redirect URLs: `web` or `public`.
    member: &'static str,
    spec: Map<String, Value>,
}

/// A webhook of an App. Each push webhook has its own key.
#[derive(Clone, Debug)]
pub struct Webhook {
    name: String,
    spec: Map<String, Value>,
    /// The keys of a push webhook.
    keys: Option<WebhookKeys>,
}

#[derive(Clone, Debug)]
struct WebhookKeys {
    current: String,
    previous: Option<String>,
}

/// The values of an SMTP Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relay {
    pub host: String,
    pub port: u16,
    /// `none`, `starttls` or `implicit`.
    pub tls: &'static str,
    pub login: Option<(String, String)>,
}

/// The manifest of a Provider, with the Secret of its client.
#[derive(Clone, Debug)]
pub struct Provider {
    name: String,
    namespace: String,
    preset: &'static str,
    settings: Map<String, Value>,
    secret: String,
}

// === impl App ===

impl App {
    /// An App with a unique appID that starts with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self::with_id(&format!("{prefix}-{:010x}", rand::random::<u64>() >> 24))
    }

    /// An App with this appID.
    pub fn with_id(id: &str) -> Self {
        let spec = json!({
            "displayName": "The Shop",
            "mail": { "from": format!("The Shop <hello@{id}.test>") },
        });
        let Value::Object(spec) = spec else { unreachable!("an object is written above") };
        Self {
            id: id.to_owned(),
            namespace: DEFAULT_NAMESPACE.to_owned(),
            annotations: Map::new(),
            spec,
            smtp: None,
            templates: Map::new(),
            webhook_keys: BTreeMap::new(),
        }
    }

    /// Sets the namespace in [`Self::manifest`].
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// Sets a field of the spec: `set("/tokens/accessLifetimeSeconds", 60)`. The pointer is relative to the spec.
    /// Creates missing parent objects.
    pub fn set(mut self, pointer: &str, value: impl Into<Value>) -> Self {
        set_field(&mut self.spec, pointer, value.into());
        self
    }

    /// Sets an annotation.
    pub fn annotate(mut self, name: &str, value: &str) -> Self {
        self.annotations.insert(name.to_owned(), json!(value));
        self
    }

    /// The value of a field of the spec; `None` if it is not set.
    pub fn spec_value(&self, pointer: &str) -> Option<Value> {
        Value::Object(self.spec.clone()).pointer(pointer).cloned()
    }

    /// Sets a rate limit: each window is `(count, windowSeconds)` (specification: Limits, Rate limits).
    pub fn limit(self, name: &str, windows: &[(u32, u32)]) -> Self {
        let windows: Vec<Value> =
            windows.iter().map(|(count, seconds)| json!({ "count": count, "windowSeconds": seconds })).collect();
        self.set(&format!("/limits/{name}"), windows)
    }

    /// Makes the App send its mails through this relay.
    pub fn relay(mut self, relay: Relay) -> Self {
        let name = format!("{}-smtp", self.id);
        self.smtp = Some(relay);
        self.set("/mail/smtpSecretRef", json!({ "name": name }))
    }

    /// Replaces a part of a mail, for example `confirm.txt`, by a template.
    pub fn template(mut self, part: &str, template: &str) -> Self {
        let name = format!("{}-mail", self.id);
        self.templates.insert(part.to_owned(), json!(template));
        self.set("/mail/templatesRef", json!({ "name": name }))
    }

    /// Adds a reference to a Provider, so that users of the App can log in with it.
    pub fn provider(mut self, provider: &Provider) -> Self {
        let refs = self.spec.entry("providerRefs").or_insert_with(|| json!([]));
        refs.as_array_mut().expect("providerRefs is a list").push(json!({ "name": provider.name }));
        self
    }

    /// Adds a webhook, or replaces the webhook of the same name.
    pub fn webhook(mut self, webhook: &Webhook) -> Self {
        let mut spec = webhook.spec.clone();
        self.webhook_keys.remove(&webhook.name);
        if let Some(keys) = &webhook.keys {
            spec["push"]["secretRef"] = json!({ "name": format!("{}-{}", self.id, webhook.name) });
            let mut values = Map::new();
            values.insert("current".to_owned(), json!(keys.current));
            if let Some(previous) = &keys.previous {
                values.insert("previous".to_owned(), json!(previous));
            }
            self.webhook_keys.insert(webhook.name.clone(), values);
        }
        let webhooks = self.spec.entry("webhooks").or_insert_with(|| json!([]));
        let webhooks = webhooks.as_array_mut().expect("webhooks is a list");
        match webhooks.iter_mut().find(|existing| existing["name"] == webhook.name.as_str()) {
            Some(existing) => *existing = Value::Object(spec),
            None => webhooks.push(Value::Object(spec)),
        }
        self
    }

    /// The App, its Secrets and its ConfigMap, as a YAML stream.
    pub fn manifest(&self) -> String {
        yaml_stream(&self.objects(&self.namespace))
    }

    /// The App, its Secrets and its ConfigMap, in this namespace.
    pub fn objects(&self, namespace: &str) -> Vec<Value> {
        let mut objects = vec![json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "App",
            "metadata": metadata(&self.id, namespace, &self.annotations),
            "spec": self.spec,
        })];
        if let Some(relay) = &self.smtp {
            let mut data = json!({ "host": relay.host, "port": relay.port.to_string(), "tls": relay.tls });
            if let Some((name, password)) = &relay.login {
                data["username"] = json!(name);
                data["password"] = json!(password);
            }
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": { "name": format!("{}-smtp", self.id), "namespace": namespace },
                "stringData": data,
            }));
        }
        if !self.templates.is_empty() {
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": { "name": format!("{}-mail", self.id), "namespace": namespace },
                "data": self.templates,
            }));
        }
        for (webhook, keys) in &self.webhook_keys {
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": { "name": format!("{}-{webhook}", self.id), "namespace": namespace },
                "stringData": keys,
            }));
        }
        objects
    }
}

// === impl Provider ===

impl Provider {
    /// A Provider of a preset (`github`, …) with a unique client secret.
    pub fn new(name: &str, preset: &'static str) -> Self {
        let settings = json!({
            "clientID": format!("client-of-{name}"),
            "clientSecretRef": { "name": name, "key": "client-secret" },
        });
        let Value::Object(settings) = settings else { unreachable!("an object is written above") };
        Self {
            name: name.to_owned(),
            namespace: DEFAULT_NAMESPACE.to_owned(),
            preset,
            settings,
            secret: format!("{:032x}", rand::random::<u128>()),
        }
    }

    /// Sets the namespace in [`Self::manifest`].
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a field of the preset's settings. For the preset `github`, `set("clientID", …)` sets
    /// `spec.github.clientID`.
    pub fn set(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.settings.insert(field.to_owned(), value.into());
        self
    }

    pub fn client_id(&self) -> &str {
        self.settings["clientID"].as_str().expect("a client's id is text")
    }

    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// Sets the client secret.
    pub fn with_secret(mut self, secret: &str) -> Self {
        secret.clone_into(&mut self.secret);
        self
    }

    /// The Provider and its Secret, as a YAML stream.
    pub fn manifest(&self) -> String {
        yaml_stream(&[self.object(&self.namespace), self.secret_object(&self.namespace)])
    }

    /// The Provider without its Secret.
    pub fn object(&self, namespace: &str) -> Value {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "Provider",
            "metadata": { "name": self.name, "namespace": namespace },
            "spec": { self.preset: self.settings },
        })
    }

    /// The Secret of the Provider's client.
    pub fn secret_object(&self, namespace: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": self.name, "namespace": namespace },
            "stringData": { "client-secret": self.secret },
        })
    }
}

// === impl Client ===

impl Client {
    /// A client of this App with a secret that the operator creates, in the namespace of the App.
    pub fn web(name: &str, app: &App, redirect_url: &str) -> Self {
        Self::with_member(name, app, "web", redirect_url)
    }

    /// A client of this App without a secret, in the namespace of the App.
    pub fn public(name: &str, app: &App, redirect_url: &str) -> Self {
        Self::with_member(name, app, "public", redirect_url)
    }

    fn with_member(name: &str, app: &App, member: &'static str, redirect_url: &str) -> Self {
        let mut spec = Map::new();
        spec.insert("appRef".to_owned(), json!({ "name": app.id, "namespace": app.namespace }));
        spec.insert(member.to_owned(), json!({ "redirectURLs": [redirect_url] }));
        let annotations = Map::new();
        Self { name: name.to_owned(), namespace: app.namespace.clone(), annotations, member, spec }
    }

    /// Sets the namespace in [`Self::manifest`].
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a field of the spec: `set("/tokens/idTokenLifetimeSeconds", 60)`. The pointer is relative to the spec.
    pub fn set(mut self, pointer: &str, value: impl Into<Value>) -> Self {
        set_field(&mut self.spec, pointer, value.into());
        self
    }

    /// Sets a field of `web` or `public`, for example `postLogoutRedirectURLs`.
    pub fn set_own(self, field: &str, value: impl Into<Value>) -> Self {
        let pointer = format!("/{}/{field}", self.member);
        self.set(&pointer, value)
    }

    /// Sets an annotation, for example to rotate the secret.
    pub fn annotate(mut self, name: &str, value: &str) -> Self {
        self.annotations.insert(name.to_owned(), json!(value));
        self
    }

    pub fn client_id(&self) -> String {
        match self.spec.get("clientID").and_then(Value::as_str) {
            Some(id) => id.to_owned(),
            None => format!("{}.{}", self.namespace, self.name),
        }
    }

    /// The name of the file to which `latchkey-operator render` writes the secret.
    pub(crate) fn secret_file(&self) -> String {
        format!("latchkey-client-{}.{}.json", self.namespace, self.name)
    }

    pub fn manifest(&self) -> String {
        yaml_stream(&[self.object(&self.namespace)])
    }

    pub fn object(&self, namespace: &str) -> Value {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "Client",
            "metadata": metadata(&self.name, namespace, &self.annotations),
            "spec": self.spec,
        })
    }
}

// === impl Webhook ===

impl Webhook {
    /// A webhook that sends these events to a URL, signed with a new key.
    pub fn push(name: &str, url: &str, events: &[&str]) -> Self {
        let keys = WebhookKeys { current: new_webhook_key(), previous: None };
        Self { keys: Some(keys), ..Self::with_delivery(name, events, "push", json!({ "url": url })) }
    }

    /// A pull webhook. Its events wait until the ServiceAccount fetches them.
    pub fn pull(name: &str, namespace: &str, service_account: &str, events: &[&str]) -> Self {
        let consumer = json!({ "serviceAccount": { "namespace": namespace, "name": service_account } });
        Self::with_delivery(name, events, "pull", consumer)
    }

    fn with_delivery(name: &str, events: &[&str], member: &str, delivery: Value) -> Self {
        let mut spec = Map::new();
        spec.insert("name".to_owned(), json!(name));
        spec.insert("events".to_owned(), json!(events));
        spec.insert(member.to_owned(), delivery);
        Self { name: name.to_owned(), spec, keys: None }
    }

    /// Adds the profile of the user to each event.
    pub fn include_profile(mut self) -> Self {
        self.spec.insert("include".to_owned(), json!(["Profile"]));
        self
    }

    /// Sets the URL of a push webhook.
    pub fn url(mut self, url: &str) -> Self {
        self.spec["push"]["url"] = json!(url);
        self
    }

    /// Replaces the key of a push webhook by a new key, and keeps the old key as the previous one.
    pub fn rotate_key(mut self) -> Self {
        let keys = self.keys.as_mut().expect("a push webhook");
        keys.previous = Some(std::mem::replace(&mut keys.current, new_webhook_key()));
        self
    }

    /// Removes the previous key of a push webhook.
    pub fn without_previous_key(mut self) -> Self {
        self.keys.as_mut().expect("a push webhook").previous = None;
        self
    }

    /// The current key of a push webhook.
    pub fn key(&self) -> &str {
        &self.keys.as_ref().expect("a push webhook").current
    }
}

fn metadata(name: &str, namespace: &str, annotations: &Map<String, Value>) -> Value {
    let mut metadata = json!({ "name": name, "namespace": namespace });
    if !annotations.is_empty() {
        metadata["annotations"] = json!(annotations);
    }
    metadata
}

/// Sets a field, and creates missing parent objects.
fn set_field(spec: &mut Map<String, Value>, pointer: &str, value: Value) {
    let mut names: Vec<&str> = pointer.trim_start_matches('/').split('/').collect();
    let field = names.pop().expect("a pointer names a field");
    let mut parent = spec;
    for name in names {
        let entry = parent.entry(name).or_insert_with(|| json!({}));
        parent = entry.as_object_mut().unwrap_or_else(|| panic!("{name} in {pointer} is not an object"));
    }
    parent.insert(field.to_owned(), value);
}

/// A random key in the format of Standard Webhooks.
fn new_webhook_key() -> String {
    format!("whsec_{}", BASE64_STANDARD.encode(rand::random::<[u8; 32]>()))
}

// === impl Relay ===

impl Relay {
    /// The values that make Latchkey send its mails through this SMTP server.
    pub fn of(smtp: &Smtp) -> Self {
        let tls = match smtp.security() {
            Security::None => "none",
            Security::StartTls => "starttls",
            Security::Implicit => "implicit",
        };
        // With TLS, the host must be a name in the certificate.
        let host = if smtp.ca().is_some() { "localhost".to_owned() } else { smtp.addr().ip().to_string() };
        Self { host, port: smtp.addr().port(), tls, login: smtp.login().cloned() }
    }
}

fn yaml_stream(objects: &[Value]) -> String {
    let documents: Vec<String> =
        objects.iter().map(|object| serde_yaml::to_string(object).expect("JSON is YAML")).collect();
    documents.join("---\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_belongs_to_an_app_and_has_an_id_its_own_fields_and_annotations() {
        let app = App::with_id("shop").annotate("latchkey.dev/rotate-keys", "1");
        assert_eq!(app.objects("tests")[0]["metadata"]["annotations"]["latchkey.dev/rotate-keys"], "1");
        let client = Client::web("grafana", &app, "https://grafana.example.com/login");
        assert_eq!((client.client_id().as_str(), client.name()), ("tests.grafana", "grafana"));
        assert_eq!(client.clone().set("/clientID", "grafana").client_id(), "grafana");
        let object = client.set_own("pkce", "Required").annotate("latchkey.dev/rotate-secret", "1").object("tests");
        assert_eq!(object["metadata"]["annotations"]["latchkey.dev/rotate-secret"], "1");
        let web = json!({ "redirectURLs": ["https://grafana.example.com/login"], "pkce": "Required" });
        assert_eq!(object["spec"], json!({ "appRef": { "name": "shop", "namespace": "tests" }, "web": web }));
    }

    #[test]
    fn a_webhook_replaces_the_webhook_of_the_same_name_and_only_a_push_webhook_has_a_secret() {
        let push = Webhook::push("crm", "http://127.0.0.1:1/hook", &["user.created"]);
        let pull = Webhook::pull("sync", "shop", "fetches", &["user.deleted"]);
        let rotated = push.clone().rotate_key();
        let app = App::with_id("shop").webhook(&push).webhook(&pull).webhook(&rotated);
        let webhooks = app.spec_value("/webhooks").unwrap();
        assert_eq!(webhooks.as_array().unwrap().len(), 2);
        assert_eq!(webhooks[0]["push"]["secretRef"]["name"], "shop-crm");
        let objects = app.objects("tests");
        assert_eq!(objects.len(), 2, "the App and the Secret of the push webhook");
        assert_eq!(objects[1]["stringData"], json!({ "current": rotated.key(), "previous": push.key() }));
    }

    #[test]
    fn the_builder_writes_an_app_and_the_secret_of_its_relay() {
        let app = App::with_id("shop").set("/tokens/accessLifetimeSeconds", 60).limit("loginsPerClient", &[(9, 60)]);
        let relay = Relay {
            host: "127.0.0.1".to_owned(),
            port: 2525,
            tls: "none",
            login: Some(("ada".to_owned(), "secret".to_owned())),
        };
        insta::assert_snapshot!(app.relay(relay).manifest(), @r"
        apiVersion: latchkey.dev/v1alpha1
        kind: App
        metadata:
          name: shop
          namespace: tests
        spec:
          displayName: The Shop
          limits:
            loginsPerClient:
            - count: 9
              windowSeconds: 60
          mail:
            from: The Shop <hello@shop.test>
            smtpSecretRef:
              name: shop-smtp
          tokens:
            accessLifetimeSeconds: 60
        ---
        apiVersion: v1
        kind: Secret
        metadata:
          name: shop-smtp
          namespace: tests
        stringData:
          host: 127.0.0.1
          password: secret
          port: '2525'
          tls: none
          username: ada
        ");
    }
}
