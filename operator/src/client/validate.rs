//! Checks the spec of a Client against its App, and resolves how the Client authenticates. Does no I/O and reads no
//! clock.

use latchkey_crds::{
    app::App,
    client::{Client, ClientNamespaces, ClientScope, WebAuthentication, WebClient},
    conditions::Reason,
    refs::{ConfigMapKeyRef, SecretKeyRef},
    rendered::{PreviousSecret, RenderedClient, RenderedClientAuthentication},
    types::{AppId, ClientId, is_subdomain},
};

use super::{
    jwks,
    secret_state::{SecretHashes, parse_secret, sha256},
};
use crate::{
    error::ErrorKind,
    facts::{ConfigMapValues, FieldError, Lookup, ObjectSource, SecretKeyLookup},
};

/// The maximum length of the name of a Secret, in characters.
const MAX_NAME_LENGTH: usize = 253;
/// The field with the reference to a key set.
const JWKS_REF: &str = "spec.web.jwksRef";

/// The settings of an App that restrict its Clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientPolicy {
    app_id: AppId,
    /// The namespace of the App.
    pub(super) namespace: String,
    /// `aud` of the App's own access tokens.
    audiences: Vec<String>,
    pub(super) grant: ClientNamespaces,
    pub(super) has_pages: bool,
}

/// The looked-up credentials of a Client: the hashes of its secrets, or its public keys. The Secrets and ConfigMaps
/// themselves are not kept, because those of all Clients of one App can have hundreds of MiB together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Credentials {
    /// A public client has no credentials.
    None,
    /// The Secret that the operator creates.
    Created(CreatedSecret),
    /// The hashes of the values that `secretRef` and `previousSecretRef` name, or why a value cannot be used.
    /// `previous` is `None` if `previousSecretRef` is not set.
    Own { current: Result<String, FieldError>, previous: Option<Result<String, FieldError>> },
    /// The key set that `jwksRef` names, or why it cannot be used.
    Keys(Result<String, FieldError>),
    /// The Secrets or the ConfigMap have not been read yet.
    NotRead,
    /// The Secrets or the ConfigMap are not read, because too many other Clients had to be read before.
    LeftUnread,
    /// A Secret or ConfigMap could not be read. The read is repeated.
    Unread(ErrorKind),
}

/// The Secret that the operator creates for a Client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CreatedSecret {
    /// The Secret does not exist yet.
    Pending,
    /// A Secret of this name exists, and the Client does not own it.
    Conflict,
    /// This operator must not write Secrets outside of the installation's namespace.
    Disabled,
    Stored(SecretHashes),
}

// === impl ClientPolicy ===

impl ClientPolicy {
    pub(crate) fn of_app(app: &App, app_id: &AppId) -> Self {
        Self {
            app_id: app_id.clone(),
            namespace: app.metadata.namespace.clone().unwrap_or_default(),
            audiences: match app.spec.tokens.audiences.as_slice() {
                [] => vec![app_id.to_string()],
                audiences => audiences.to_vec(),
            },
            grant: app.spec.clients.namespaces.clone(),
            has_pages: app.spec.pages.is_enabled(),
        }
    }

    /// Whether a client can have this ID. It must be neither the appID nor one of the App's audiences. Otherwise an ID
    /// token of the client could be mistaken for an access token of the App, because access tokens have these values in
    /// `aud`.
    fn can_have_id(&self, client_id: &ClientId) -> bool {
        let client_id = client_id.as_str();
        client_id != self.app_id.as_str() && self.audiences.iter().all(|audience| audience != client_id)
    }

    /// Returns a client as it was accepted last, without the settings that the App no longer allows. Returns `None` if
    /// the App no longer allows its client ID.
    pub(super) fn restrict(&self, mut last: RenderedClient) -> Option<RenderedClient> {
        last.tokens.audiences.retain(|audience| self.audiences.contains(audience));
        self.can_have_id(&last.client_id).then_some(last)
    }
}

// === impl Credentials ===

impl Credentials {
    /// Returns the kind of the error if a Secret or ConfigMap could not be read.
    pub(super) const fn read_error(&self) -> Option<ErrorKind> {
        match self {
            Self::Unread(kind) => Some(*kind),
            Self::None | Self::Created(_) | Self::Own { .. } | Self::Keys(_) | Self::NotRead | Self::LeftUnread => None,
        }
    }

    /// Whether a read failed for a temporary reason, so that it can succeed soon.
    pub(super) const fn is_read_interrupted(&self) -> bool {
        matches!(self, Self::Unread(ErrorKind::Unavailable | ErrorKind::Conflict))
    }

    /// Looks up the secrets or keys of a Client. `created` is the Secret that the operator creates. It is used only for
    /// a Client that has such a Secret ([`Client::created_secret`]).
    pub(crate) fn resolve(client: &Client, created: CreatedSecret, source: &impl ObjectSource) -> Self {
        let namespace = client.metadata.namespace.as_deref().unwrap_or_default();
        let hash = |field: &str, reference: &SecretKeyRef| {
            let lookup = SecretKeyLookup::resolve(source, namespace, &reference.name, &reference.key);
            hash_of_key(field, reference, &lookup)
        };
        let Some(web) = client.spec.web() else { return Self::None };
        match (web.authentication, &web.secret_ref, &web.jwks_ref) {
            (WebAuthentication::Secret, None, _) => Self::Created(created),
            (WebAuthentication::Secret, Some(reference), _) => {
                let previous = web.previous_secret_ref.as_ref();
                Self::Own {
                    current: hash("spec.web.secretRef", reference),
                    previous: previous.map(|reference| hash("spec.web.previousSecretRef", reference)),
                }
            }
            (WebAuthentication::PrivateKeyJwt, _, Some(reference)) => {
                Self::Keys(key_set(reference, source.config_map(namespace, &reference.name)))
            }
            (WebAuthentication::PrivateKeyJwt, _, None) => {
                Self::Keys(Err(FieldError::new(Reason::ConfigMapNotFound, JWKS_REF, "is required with PrivateKeyJWT")))
            }
        }
    }
}

/// Checks the spec of a Client, and returns its client ID. Repeats those rules of the schema that protect the App and
/// other Clients.
pub(crate) fn validate(client: &Client, policy: &ClientPolicy) -> Result<ClientId, FieldError> {
    let spec = &client.spec;
    let is_foreign = client.metadata.namespace.as_deref() != Some(policy.namespace.as_str());
    if is_foreign && spec.client_id.is_some() {
        return Err(invalid("spec.clientID", "only a Client in the namespace of the App can set it; remove it"));
    }
    let client_id = client.client_id().map_err(|error| invalid("metadata.name", error.to_string()))?;
    if !policy.can_have_id(&client_id) {
        let (field, advice) = match spec.client_id {
            Some(_) => ("spec.clientID", "create a Client with another clientID"),
            None => ("metadata.name", "create a Client with another name"),
        };
        return Err(invalid(field, format!("is the appID or an audience of the App; {advice}")));
    }
    if !spec.scopes.is_empty() && !spec.scopes.contains(&ClientScope::OpenId) {
        return Err(invalid("spec.scopes", "add openid, without which nobody can sign in"));
    }
    if let Some(web) = spec.web() {
        check_web(client, web)?;
    }
    check_audiences(client, policy, is_foreign)?;
    Ok(client_id)
}

fn check_web(client: &Client, web: &WebClient) -> Result<(), FieldError> {
    let urls = [("redirectURLs", &web.redirect_urls), ("postLogoutRedirectURLs", &web.post_logout_redirect_urls)];
    for (field, urls) in urls {
        if let Some(index) = urls.iter().position(|url| url.is_private_use()) {
            let message = "only a public client can have a private-use scheme; use https, or set public instead of web";
            return Err(invalid(format!("spec.web.{field}[{index}]"), message));
        }
    }
    let has_secret = web.secret.is_some() || web.secret_ref.is_some() || web.previous_secret_ref.is_some();
    match web.authentication {
        WebAuthentication::Secret if web.jwks_ref.is_some() => {
            return Err(invalid("spec.web.jwksRef", "only a client with PrivateKeyJWT has keys; remove it"));
        }
        WebAuthentication::Secret => {}
        WebAuthentication::PrivateKeyJwt if has_secret => {
            let message = "a client with PrivateKeyJWT has no secret; remove secret, secretRef and previousSecretRef";
            return Err(invalid("spec.web", message));
        }
        WebAuthentication::PrivateKeyJwt if web.jwks_ref.is_none() => {
            return Err(invalid("spec.web.jwksRef", "is required with PrivateKeyJWT"));
        }
        WebAuthentication::PrivateKeyJwt => {}
    }
    check_names(web)?;
    if web.secret.is_some() && web.secret_ref.is_some() {
        return Err(invalid("spec.web", "set secret or secretRef, not both"));
    }
    if web.previous_secret_ref.is_some() && web.secret_ref.is_none() {
        return Err(invalid("spec.web.previousSecretRef", "is the former value of an own Secret; set secretRef too"));
    }
    if client.created_secret().is_some_and(|name| name.len() > MAX_NAME_LENGTH) {
        return Err(invalid(
            "spec.web.secret.name",
            "the name of the Client with -oidc is too long for a Secret; set it",
        ));
    }
    Ok(())
}

fn check_names(web: &WebClient) -> Result<(), FieldError> {
    let names = [
        ("secretRef", web.secret_ref.as_ref().map(|reference| &reference.name)),
        ("previousSecretRef", web.previous_secret_ref.as_ref().map(|reference| &reference.name)),
        ("jwksRef", web.jwks_ref.as_ref().map(|reference| &reference.name)),
        ("secret", web.secret.as_ref().and_then(|secret| secret.name.as_ref())),
    ];
    match names.into_iter().find(|(_, name)| name.is_some_and(|name| !is_subdomain(name))) {
        Some((field, _)) => {
            let message = "no object can have this name; use lower-case letters, digits, hyphens and dots";
            Err(invalid(format!("spec.web.{field}.name"), message))
        }
        None => Ok(()),
    }
}

fn check_audiences(client: &Client, policy: &ClientPolicy, is_foreign: bool) -> Result<(), FieldError> {
    let audiences = &client.spec.tokens.audiences;
    if is_foreign && !audiences.is_empty() {
        let message = "only a Client in the namespace of the App can set it; remove it";
        return Err(invalid("spec.tokens.audiences", message));
    }
    match audiences.iter().position(|audience| !policy.audiences.contains(audience)) {
        Some(index) => {
            let message = "is not an audience of the App; add it to spec.tokens.audiences of the App, or remove it";
            Err(invalid(format!("spec.tokens.audiences[{index}]"), message))
        }
        None => Ok(()),
    }
}

fn invalid(field: impl Into<String>, message: impl Into<String>) -> FieldError {
    FieldError::new(Reason::InvalidSpec, field, message)
}

/// Returns how the Client authenticates. Adds an error to `unresolved` for each reference that cannot be used.
pub(crate) fn authentication(
    client: &Client,
    credentials: &Credentials,
    unresolved: &mut Vec<FieldError>,
) -> RenderedClientAuthentication {
    let resolved = match credentials {
        Credentials::None => Ok(RenderedClientAuthentication::None),
        Credentials::Created(created) => created_secret(client, created),
        Credentials::Own { current, previous } => own_secret(current, previous.as_ref(), unresolved),
        Credentials::Keys(jwks) => jwks.clone().map(|jwks| RenderedClientAuthentication::PrivateKeyJwt { jwks }),
        Credentials::NotRead => Err(unread(client, "has not been read yet")),
        Credentials::LeftUnread => Err(unread(client, "is not read, because the App has too many Clients")),
        Credentials::Unread(ErrorKind::Forbidden) => {
            Err(unread(client, "cannot be read, because the operator lacks the permission; it is read again"))
        }
        Credentials::Unread(
            ErrorKind::Conflict | ErrorKind::Unavailable | ErrorKind::Refused | ErrorKind::Internal,
        ) => Err(unread(client, "could not be read, because the API server responded with an error; it is read again")),
    };
    resolved.unwrap_or_else(|error| {
        unresolved.push(error);
        RenderedClientAuthentication::Unresolved
    })
}

fn unread(client: &Client, what: &str) -> FieldError {
    let (reason, field, object) = match client.spec.jwks_ref() {
        Some(_) => (Reason::ConfigMapNotFound, JWKS_REF, "ConfigMap"),
        None => (Reason::SecretNotFound, "spec.web.secretRef", "Secret"),
    };
    FieldError::new(reason, field, format!("the {object} {what}"))
}

fn created_secret(client: &Client, created: &CreatedSecret) -> Result<RenderedClientAuthentication, FieldError> {
    const FIELD: &str = "spec.web.secret";
    let name = client.created_secret().unwrap_or_default();
    match created {
        CreatedSecret::Stored(SecretHashes { current, previous }) => {
            Ok(RenderedClientAuthentication::Secret { sha256: current.clone(), previous: previous.clone() })
        }
        CreatedSecret::Pending => {
            let message = format!("the operator has not created Secret {name} yet");
            Err(FieldError::new(Reason::SecretNotFound, FIELD, message))
        }
        CreatedSecret::Conflict => {
            let message = format!(
                "Secret {name} exists, and is not that of this Client; delete it, set another spec.web.secret.name, or \
                 refer to it with spec.web.secretRef"
            );
            Err(FieldError::new(Reason::SecretConflict, FIELD, message))
        }
        CreatedSecret::Disabled => {
            let message = "this operator creates no Secrets; create one, and refer to it with spec.web.secretRef";
            Err(FieldError::new(Reason::SecretNotFound, FIELD, message))
        }
    }
}

/// Resolves the Secrets that the Client references itself. If only the previous secret cannot be used, the Client
/// authenticates with the current one.
fn own_secret(
    current: &Result<String, FieldError>,
    previous: Option<&Result<String, FieldError>>,
    unresolved: &mut Vec<FieldError>,
) -> Result<RenderedClientAuthentication, FieldError> {
    let sha256 = current.clone()?;
    let previous = match previous {
        Some(Ok(sha256)) => Some(PreviousSecret { sha256: sha256.clone(), expires_at: None }),
        Some(Err(error)) => {
            unresolved.push(error.clone());
            None
        }
        None => None,
    };
    Ok(RenderedClientAuthentication::Secret { sha256, previous })
}

/// Returns the hash of a client secret that was looked up.
fn hash_of_key(field: &str, reference: &SecretKeyRef, lookup: &SecretKeyLookup) -> Result<String, FieldError> {
    let SecretKeyRef { name, key } = reference;
    let (reason, message) = match lookup {
        SecretKeyLookup::NoSecret => (
            Reason::SecretNotFound,
            format!("Secret {name} does not exist in this namespace; create it, with the key {key}"),
        ),
        SecretKeyLookup::NoKey => (Reason::SecretKeyNotFound, format!("Secret {name} has no key {key}; add it")),
        SecretKeyLookup::Value(value) => match parse_secret(value) {
            Ok(secret) => return Ok(sha256(&secret)),
            Err(what) => (Reason::SecretKeyInvalid, format!("Secret {name}, key {key}: {what}")),
        },
    };
    Err(FieldError::new(reason, field, message))
}

/// Returns the key set of a ConfigMap that was looked up, with only the members that servers read.
fn key_set(reference: &ConfigMapKeyRef, config_map: Lookup<ConfigMapValues>) -> Result<String, FieldError> {
    let ConfigMapKeyRef { name, key } = reference;
    let invalid =
        |what: &str| FieldError::new(Reason::KeySetInvalid, JWKS_REF, format!("ConfigMap {name}, key {key}: {what}"));
    let values = match config_map {
        Lookup::Missing => {
            let message = format!("ConfigMap {name} does not exist in this namespace; create it, with the key {key}");
            return Err(FieldError::new(Reason::ConfigMapNotFound, JWKS_REF, message));
        }
        Lookup::Invalid => {
            let message = format!("ConfigMap {name} is not valid; see the message about it");
            return Err(FieldError::new(Reason::KeySetInvalid, JWKS_REF, message));
        }
        Lookup::Found(values) => values,
    };
    let binary = || values.binary.get(key).and_then(|bytes| std::str::from_utf8(bytes).ok());
    let text = values.text.get(key).map(String::as_str).or_else(binary);
    let text = text.ok_or_else(|| invalid("is missing or is not text; add it"))?;
    jwks::normalize(text).map_err(|what| invalid(&what))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use latchkey_crds::provider::Provider;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        client::fixtures::{app, client_with, policy, web},
        facts::{SecretBytes, SecretValues},
    };

    #[track_caller]
    fn assert_refused(client: &Client, field: &str, message: &str) {
        let error = validate(client, &policy()).unwrap_err();
        assert_eq!((error.reason, error.field.as_str()), (Reason::InvalidSpec, field), "{error:?}");
        assert!(error.message.contains(message), "{error:?} does not contain {message:?}");
    }

    fn own(fields: Value) -> Client {
        client_with("identity", "grafana", fields)
    }

    fn foreign(fields: Value) -> Client {
        client_with("monitoring", "grafana", fields)
    }

    #[test]
    fn only_a_client_in_the_namespace_of_the_app_sets_client_id_and_audiences() {
        let with_id = json!({ "clientID": "grafana" });
        assert_eq!(validate(&own(with_id.clone()), &policy()).unwrap().as_str(), "grafana");
        assert_refused(&foreign(with_id), "spec.clientID", "only a Client in the namespace");
        let with_audience = json!({ "tokens": { "audiences": ["https://api.example.com"] } });
        assert!(validate(&own(with_audience.clone()), &policy()).is_ok());
        assert_refused(&foreign(with_audience), "spec.tokens.audiences", "only a Client in the namespace");
        assert_eq!(validate(&foreign(json!({})), &policy()).unwrap().as_str(), "monitoring.grafana");
    }

    #[test]
    fn a_client_id_is_never_the_app_id_or_an_audience() {
        for id in ["platform", "ops"] {
            assert_refused(&own(json!({ "clientID": id })), "spec.clientID", "is the appID or an audience");
        }
        // The default client ID (namespace and name) is checked, too: it can be an audience of the App.
        let audiences = json!({ "tokens": { "audiences": ["monitoring.grafana"] } });
        let policy = ClientPolicy::of_app(&app(audiences), &"platform".parse().unwrap());
        let error = validate(&foreign(json!({})), &policy).unwrap_err();
        assert_eq!((error.reason, error.field.as_str()), (Reason::InvalidSpec, "metadata.name"));
        // Without audiences, `aud` is the appID.
        let policy = ClientPolicy::of_app(&app(json!({})), &"platform".parse().unwrap());
        assert!(validate(&own(json!({ "clientID": "ops" })), &policy).is_ok());
        assert!(validate(&own(json!({ "clientID": "platform" })), &policy).is_err());
    }

    #[test]
    fn the_audiences_of_a_client_are_audiences_of_the_app() {
        let client = own(json!({ "tokens": { "audiences": ["ops", "other"] } }));
        assert_refused(&client, "spec.tokens.audiences[1]", "is not an audience of the App");
    }

    #[test]
    fn the_rules_of_the_schema_are_checked_again() {
        let url = "https://grafana.example.com/login";
        for (fields, field, message) in [
            (json!({ "scopes": ["email"] }), "spec.scopes", "add openid"),
            (
                web(json!({ "redirectURLs": [url, "com.example:/"] })),
                "spec.web.redirectURLs[1]",
                "only a public client",
            ),
            (
                web(json!({ "postLogoutRedirectURLs": ["com.example:/"] })),
                "spec.web.postLogoutRedirectURLs[0]",
                "only a public client",
            ),
            (web(json!({ "jwksRef": { "name": "a", "key": "b" } })), "spec.web.jwksRef", "remove it"),
            (web(json!({ "authentication": "PrivateKeyJWT" })), "spec.web.jwksRef", "is required"),
            (
                web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "a", "key": "b" }, "secret": {} })),
                "spec.web",
                "has no secret",
            ),
            (web(json!({ "secret": {}, "secretRef": { "name": "a", "key": "b" } })), "spec.web", "not both"),
            (
                web(json!({ "previousSecretRef": { "name": "a", "key": "b" } })),
                "spec.web.previousSecretRef",
                "set secretRef too",
            ),
        ] {
            assert_refused(&own(fields), field, message);
        }
        for field in ["secretRef", "previousSecretRef", "jwksRef", "secret"] {
            let mut fields = json!({ "secretRef": { "name": "own", "key": "k" } });
            if field == "jwksRef" || field == "secret" {
                fields = json!({});
            }
            if field == "jwksRef" {
                fields["authentication"] = json!("PrivateKeyJWT");
            }
            fields[field] = json!({ "name": "a b", "key": "k" });
            assert_refused(&own(web(fields)), &format!("spec.web.{field}.name"), "no object can have this name");
        }
        let long = client_with("identity", &"a".repeat(249), json!({}));
        assert_refused(&long, "spec.web.secret.name", "too long");
        let named = web(json!({ "secret": { "name": "short" } }));
        assert!(validate(&client_with("identity", &"a".repeat(249), named), &policy()).is_ok());
        let public = json!({ "web": null, "public": { "redirectURLs": ["com.example.app:/done"] } });
        assert!(validate(&own(public), &policy()).is_ok());
    }

    #[test]
    fn a_restricted_client_loses_what_the_app_no_longer_allows() {
        let client = own(json!({ "clientID": "grafana", "tokens": { "audiences": ["ops"] } }));
        let rendered = super::super::render::render(
            &client,
            validate(&client, &policy()).unwrap(),
            RenderedClientAuthentication::Unresolved,
        );
        assert_eq!(policy().restrict(rendered.clone()), Some(rendered.clone()));
        let other = |audiences: Value| {
            ClientPolicy::of_app(&app(json!({ "tokens": { "audiences": audiences } })), &"platform".parse().unwrap())
        };
        assert_eq!(other(json!(["other"])).restrict(rendered.clone()).unwrap().tokens.audiences, Vec::<String>::new());
        assert_eq!(other(json!(["grafana"])).restrict(rendered), None);
    }

    /// The only Secret and the only ConfigMap of a cluster.
    struct Objects {
        secret: Lookup<SecretValues>,
        config_map: Lookup<ConfigMapValues>,
    }

    impl ObjectSource for Objects {
        fn provider(&self, _: &str, _: &str) -> Lookup<Provider> {
            Lookup::Missing
        }

        fn secret(&self, _: &str, _: &str) -> Lookup<SecretValues> {
            self.secret.clone()
        }

        fn config_map(&self, _: &str, _: &str) -> Lookup<ConfigMapValues> {
            self.config_map.clone()
        }
    }

    /// Returns the credentials of a Client with these fields, if its Secret has these values.
    fn with_secret(fields: &Value, values: &[(&str, &[u8])]) -> Credentials {
        let values = values.iter().map(|(key, value)| ((*key).to_owned(), SecretBytes(value.to_vec())));
        let objects = Objects { secret: Lookup::Found(values.collect()), config_map: Lookup::Missing };
        Credentials::resolve(&own(fields.clone()), CreatedSecret::Pending, &objects)
    }

    fn without_objects(fields: Value) -> Credentials {
        let objects = Objects { secret: Lookup::Missing, config_map: Lookup::Missing };
        Credentials::resolve(&own(fields), CreatedSecret::Pending, &objects)
    }

    fn resolved(fields: Value, credentials: &Credentials) -> (RenderedClientAuthentication, Vec<FieldError>) {
        let mut unresolved = Vec::new();
        (authentication(&own(fields), credentials, &mut unresolved), unresolved)
    }

    #[track_caller]
    fn assert_unresolved(fields: Value, credentials: &Credentials, reason: Reason, field: &str) {
        let (authentication, unresolved) = resolved(fields, credentials);
        assert_eq!(authentication, RenderedClientAuthentication::Unresolved);
        assert_eq!(unresolved.len(), 1, "{unresolved:?}");
        assert_eq!((unresolved[0].reason, unresolved[0].field.as_str()), (reason, field));
    }

    #[test]
    fn documents_have_the_hash_of_a_referenced_secret() {
        let fields = || web(json!({ "secretRef": { "name": "own", "key": "k" } }));
        let with_value = |value: &[u8]| with_secret(&fields(), &[("k", value)]);
        let (authentication, unresolved) = resolved(fields(), &with_value(b"sixteen letters!\n"));
        // printf 'sixteen letters!' | openssl dgst -sha256 -binary | base64
        let expected = "aPsMVbDTfeCKbMuTri+kyp/NxtL983QXrzxVD245/Eo=".to_owned();
        assert_eq!(authentication, RenderedClientAuthentication::Secret { sha256: expected, previous: None });
        assert_eq!(unresolved, []);
        for (credentials, reason) in [
            (without_objects(fields()), Reason::SecretNotFound),
            (with_secret(&fields(), &[("other", b"sixteen letters!")]), Reason::SecretKeyNotFound),
            (with_value(b"fifteen letters"), Reason::SecretKeyInvalid),
            (with_value(&[b'a'; 513]), Reason::SecretKeyInvalid),
            (with_value(b"sixteen\tletters!"), Reason::SecretKeyInvalid),
            (with_value(&[0xff; 16]), Reason::SecretKeyInvalid),
        ] {
            assert_unresolved(fields(), &credentials, reason, "spec.web.secretRef");
        }
        assert_eq!(resolved(fields(), &with_value(&[b'a'; 512])).1, []);
    }

    #[test]
    fn a_previous_secret_that_cannot_be_used_does_not_stop_the_current_one() {
        let fields = web(json!({
            "secretRef": { "name": "own", "key": "k" }, "previousSecretRef": { "name": "own", "key": "old" },
        }));
        let now: (&str, &[u8]) = ("k", b"sixteen letters!");
        let credentials = with_secret(&fields, &[now, ("old", b"the one before it")]);
        let (both, unresolved) = resolved(fields.clone(), &credentials);
        let RenderedClientAuthentication::Secret { previous: Some(previous), .. } = both else { panic!("{both:?}") };
        assert_eq!((previous.expires_at, unresolved), (None, Vec::new()));
        let without_previous = with_secret(&fields, &[now]);
        let (current, unresolved) = resolved(fields, &without_previous);
        assert!(matches!(current, RenderedClientAuthentication::Secret { previous: None, .. }));
        assert_eq!(unresolved[0].reason, Reason::SecretKeyNotFound);
        assert_eq!(unresolved[0].field, "spec.web.previousSecretRef");
        assert!(unresolved[0].message.contains("Secret own has no key old"));
    }

    #[test]
    fn a_created_secret_is_pending_until_it_is_stored() {
        let created = |created: CreatedSecret| Credentials::Created(created);
        let hashes = SecretHashes { current: "hash".to_owned(), previous: None };
        let (stored, unresolved) = resolved(json!({}), &created(CreatedSecret::Stored(hashes)));
        assert_eq!(stored, RenderedClientAuthentication::Secret { sha256: "hash".to_owned(), previous: None });
        assert_eq!(unresolved, []);
        for (state, reason) in [
            (CreatedSecret::Pending, Reason::SecretNotFound),
            (CreatedSecret::Conflict, Reason::SecretConflict),
            (CreatedSecret::Disabled, Reason::SecretNotFound),
        ] {
            assert_unresolved(json!({}), &created(state), reason, "spec.web.secret");
        }
    }

    #[test]
    fn keys_come_from_a_config_map() {
        let fields =
            || web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" } }));
        let with_config_map = |config_map: Lookup<ConfigMapValues>| {
            let objects = Objects { secret: Lookup::Missing, config_map };
            Credentials::resolve(&own(fields()), CreatedSecret::Pending, &objects)
        };
        let config_map = |key: &str, text: &str| {
            let text = BTreeMap::from([(key.to_owned(), text.to_owned())]);
            with_config_map(Lookup::Found(ConfigMapValues { text, binary: BTreeMap::new() }))
        };
        let key = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
        let (authentication, unresolved) = resolved(fields(), &config_map("jwks.json", key));
        assert!(matches!(authentication, RenderedClientAuthentication::PrivateKeyJwt { .. }));
        assert_eq!(unresolved, []);
        for (credentials, reason) in [
            (with_config_map(Lookup::Missing), Reason::ConfigMapNotFound),
            (with_config_map(Lookup::Invalid), Reason::KeySetInvalid),
            (config_map("other", key), Reason::KeySetInvalid),
            (config_map("jwks.json", "{}"), Reason::KeySetInvalid),
            (config_map("jwks.json", &format!("{key}{}", " ".repeat(16 * 1024))), Reason::KeySetInvalid),
        ] {
            assert_unresolved(fields(), &credentials, reason, "spec.web.jwksRef");
        }
    }

    #[test]
    fn a_failed_read_is_reported_at_the_reference() {
        let secret = || web(json!({ "secretRef": { "name": "own", "key": "k" } }));
        let keys = web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" } }));
        let forbidden = Credentials::Unread(ErrorKind::Forbidden);
        assert_unresolved(secret(), &forbidden, Reason::SecretNotFound, "spec.web.secretRef");
        assert_unresolved(keys, &forbidden, Reason::ConfigMapNotFound, "spec.web.jwksRef");
        assert!(resolved(secret(), &forbidden).1[0].message.contains("lacks the permission"));
    }

    #[test]
    fn a_public_client_has_no_credentials() {
        assert_eq!(resolved(json!({}), &Credentials::None), (RenderedClientAuthentication::None, Vec::new()));
    }
}
