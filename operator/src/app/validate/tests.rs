use latchkey_crds::rendered::{RenderedDelivery, RenderedPush, SmtpTls};
use serde_json::{Value, json};

use super::*;
use crate::{
    app::{keys::policy::KeyPolicy, resolve},
    facts::{SecretBytes, SecretKeyLookup},
    manifests::{Manifests, Schemas},
};

pub(super) fn settings() -> Settings {
    Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false }
}

fn development_settings() -> Settings {
    Settings { base_url: "http://127.0.0.1:8080".parse().unwrap(), allow_insecure: true }
}

/// Returns the facts of the App `shop/shop` with this spec, which can reference the objects of [`MANIFESTS`].
fn facts(spec: Value) -> AppFacts {
    facts_from(spec, MANIFESTS)
}

/// The facts of the App `shop/shop` with this spec, which can reference these objects.
pub(super) fn facts_from(spec: Value, objects: &str) -> AppFacts {
    let app: App = serde_json::from_value(json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": "shop", "namespace": "shop" },
        "spec": spec,
    }))
    .unwrap();
    let mut manifests = Manifests::default();
    manifests.add_file("a.yaml", objects, &Schemas::new(true).unwrap());
    assert_eq!(manifests.rejected, []);
    resolve::resolve(app, Ownership::Ours, true, &manifests)
}

const MANIFESTS: &str = r#"
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: github, namespace: shop }
spec: { github: { clientID: abc, clientSecretRef: { name: github, key: secret }, scopes: [repo] } }
---
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: corp, namespace: shop }
spec: { oidc: { issuer: "https://id.example.com", clientID: abc, clientSecretRef: { name: corp, key: secret } } }
---
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: local, namespace: shop }
spec: { oidc: { issuer: "http://127.0.0.1:5556", clientID: abc, clientSecretRef: { name: github, key: secret } } }
---
apiVersion: v1
kind: Secret
metadata: { name: github, namespace: shop }
stringData: { secret: "hush\n" }
---
apiVersion: v1
kind: Secret
metadata: { name: relay, namespace: shop }
stringData: { host: smtp.example.com, port: "587", tls: starttls, username: shop, password: hush }
---
apiVersion: v1
kind: Secret
metadata: { name: firebase, namespace: shop }
stringData: { signer-key: "aHVzaGh1c2hodXNoaHVzaA==\n", salt-separator: Bw== }
---
apiVersion: v1
kind: Secret
metadata: { name: crm-hook, namespace: shop }
stringData: { current: "whsec_aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo\n", previous: whsec_bHVzaGh1c2hodXNoaHVzaGh1c2hodXNo }
---
apiVersion: v1
kind: ConfigMap
metadata: { name: mail, namespace: shop }
data: { confirm.subject: "Your code", confirm.txt: "{{ code }}", reset.txt: "{{ broken }}" }
"#;

fn valid(spec: Value) -> ValidatedApp {
    validate(&facts(spec), &settings()).unwrap()
}

/// Asserts that there is exactly one field error. Returns the App without the error, and the error.
#[track_caller]
pub(super) fn only_error(facts: &AppFacts) -> (ValidatedApp, FieldError) {
    let mut app = validate(facts, &settings()).unwrap();
    assert_eq!(app.field_errors.len(), 1, "{:?}", app.field_errors);
    let error = app.field_errors.remove(0);
    (app, error)
}

#[test]
fn an_app_with_an_empty_spec_gets_the_defaults() {
    let app = valid(json!({}));
    assert_eq!(app.field_errors, []);
    assert_eq!((app.app_id.as_str(), app.display_name.as_str()), ("shop", "shop"));
    assert_eq!(app.issuer.as_str(), "https://auth.example.com/shop");
    assert_eq!(
        app.password,
        PasswordPolicy {
            minimum_length: 8,
            minimum_strength: 2,
            foreign_hash_retention_days: None,
            firebase_scrypt: None
        }
    );
    assert_eq!(app.mail.smtp, RenderedSmtp::Install);
    assert_eq!((app.mail.confirm_code_lifetime_seconds, app.mail.reset_code_lifetime_seconds), (86_400, 1800));
    assert_eq!(
        app.tokens,
        RenderedTokens {
            signing_algorithm: SigningAlgorithm::ES256,
            access_lifetime_seconds: 900,
            refresh_idle_seconds: 2_592_000,
            session_lifetime_seconds: 7_776_000,
            refresh_grace_seconds: 30,
            audiences: vec!["shop".into()],
        }
    );
    assert!(!app.require_verified_email && !app.allow_users_without_email);
    assert_eq!((app.unverified_retention_days, app.audit_retention_days), (30, 365));
    for name in LimitName::ALL {
        assert_eq!(app.limits[&name], name.default_windows());
    }
}

#[test]
fn settings_of_an_app_replace_the_defaults() {
    let app = valid(json!({
        "displayName": "The Shop",
        "tokens": { "audiences": ["api"], "signingAlgorithm": "RS256", "accessLifetimeSeconds": 60 },
        "password": { "minimumLength": 12, "minimumStrength": 4, "foreignHashRetentionDays": 30 },
        "limits": { "codesPerClient": [{ "count": 2, "windowSeconds": 30 }] },
        "administrators": [
            { "serviceAccount": { "namespace": "ops", "name": "bot" }, "role": "Reader" },
            { "serviceAccount": { "namespace": "ops", "name": "loader" }, "role": "Importer" },
            { "serviceAccount": { "namespace": "ops", "name": "bot" }, "role": "UserAdmin" },
        ],
        "unverifiedRetentionDays": 7,
    }));
    assert_eq!(app.display_name, "The Shop");
    assert_eq!((app.tokens.audiences, app.tokens.access_lifetime_seconds), (vec!["api".to_owned()], 60));
    assert_eq!(app.tokens.signing_algorithm, SigningAlgorithm::RS256);
    assert_eq!(
        app.password,
        PasswordPolicy {
            minimum_length: 12,
            minimum_strength: 4,
            foreign_hash_retention_days: Some(30),
            firebase_scrypt: None
        }
    );
    assert_eq!(app.limits.len(), 9);
    assert_eq!(app.limits[&LimitName::CodesPerClient], [Window { count: 2, window_seconds: 30 }]);
    let administrator = |role| Administrator { namespace: "ops".into(), service_account: "bot".into(), role };
    assert_eq!(app.administrators, [AdministratorRole::Reader, AdministratorRole::UserAdmin].map(administrator));
    assert_eq!(app.importers, [ServiceAccountRef { namespace: "ops".into(), name: "loader".into() }]);
    assert_eq!(app.unverified_retention_days, 7);
}

#[test]
fn allowed_email_domains_imply_that_email_addresses_must_be_verified() {
    assert!(valid(json!({ "allowedEmailDomains": ["example.com"] })).require_verified_email);
    assert!(valid(json!({ "requireVerifiedEmail": true })).require_verified_email);
}

#[test]
fn the_default_idle_time_does_not_exceed_the_session_lifetime() {
    let app = valid(json!({ "tokens": { "sessionLifetimeSeconds": 600 } }));
    assert_eq!(app.tokens.refresh_idle_seconds, 600);
}

#[test]
fn an_app_id_of_another_app_is_rejected_without_naming_that_app() {
    let rejection = validate(&AppFacts { ownership: Ownership::Taken, ..facts(json!({})) }, &settings()).unwrap_err();
    assert_eq!((rejection.reason, rejection.field.as_str()), (Reason::AppIDConflict, "metadata.name"));
    assert_eq!(rejection.message, "another App owns the appID shop; set another spec.appID");
    let facts = AppFacts { ownership: Ownership::Taken, ..facts(json!({ "appID": "store" })) };
    assert_eq!(validate(&facts, &settings()).unwrap_err().field, "spec.appID");
}

#[test]
fn an_app_id_reserved_for_another_namespace_is_rejected_without_naming_that_namespace() {
    let facts = AppFacts { ownership: Ownership::Reserved, ..facts(json!({ "appID": "store" })) };
    let rejection = validate(&facts, &settings()).unwrap_err();
    assert_eq!((rejection.reason, rejection.field.as_str()), (Reason::AppIDReserved, "spec.appID"));
    assert_eq!(
        rejection.message,
        "the appID store belonged to an App of another namespace, which still has users; \
         set another spec.appID, or ask the platform team to hand it over"
    );
}

#[test]
fn the_key_policy_comes_from_the_spec_and_the_annotations() {
    let annotations = [("latchkey.dev/rotate-keys", "1"), ("latchkey.dev/revoke-key", "h1"), ("other", "x")];
    let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let policy = KeyPolicy::for_app(&valid(json!({})), &annotations);
    assert_eq!(
        (policy.access_lifetime_seconds, policy.session_lifetime_seconds, policy.rotation_days),
        (900, 7_776_000, 90)
    );
    let requests = (policy.rotate_request.as_deref(), policy.revoke_id.as_deref(), policy.new_keys_request.as_deref());
    assert_eq!(requests, (Some("1"), Some("h1"), None));
    // In this App an emailed code is valid for longer than a session, so the keys are kept for the lifetime of the
    // code.
    let spec = json!({
        "tokens": { "sessionLifetimeSeconds": 600, "keyRotationDays": 7, "signingAlgorithm": "EdDSA" },
        "mail": { "confirmCodeLifetimeSeconds": 604_800 },
    });
    let policy = KeyPolicy::for_app(&valid(spec), &[(String::from("latchkey.dev/revoke-key"), String::new())].into());
    assert_eq!((policy.session_lifetime_seconds, policy.rotation_days), (604_800, 7));
    assert_eq!((policy.algorithm, policy.revoke_id), (SigningAlgorithm::EdDSA, None));
}

#[test]
fn hmac_keys_are_kept_as_long_as_the_code_of_an_invitation() {
    let kept_seconds = |mail: Value| {
        let app = valid(json!({ "tokens": { "sessionLifetimeSeconds": 600 }, "mail": mail }));
        KeyPolicy::for_app(&app, &BTreeMap::new()).session_lifetime_seconds
    };
    assert_eq!(kept_seconds(json!({})), 604_800, "the default");
    assert_eq!(kept_seconds(json!({ "invitationCodeLifetimeSeconds": 2_592_000 })), 2_592_000);
    assert_eq!(kept_seconds(json!({ "invitationCodeLifetimeSeconds": 3600 })), 86_400, "a confirmation code");
}

#[test]
fn invitations_have_the_link_of_password_resets_unless_the_app_sets_another() {
    let reset = "https://shop.example.com/reset?code={code}";
    let mail = valid(json!({ "mail": { "resetURL": reset } })).mail;
    assert_eq!(mail.invitation_url().map(AsRef::as_ref), Some(reset));
    assert_eq!((mail.own_invitation_url, mail.own_invitation_code_lifetime_seconds), (None, None), "not rendered");
    let welcome = "https://shop.example.com/welcome?code={code}";
    let own = json!({ "resetURL": reset, "invitationURL": welcome, "invitationCodeLifetimeSeconds": 7200 });
    let mail = valid(json!({ "mail": own })).mail;
    assert_eq!(mail.invitation_url().map(AsRef::as_ref), Some(welcome));
    assert_eq!(mail.invitation_code_lifetime_seconds(), 7200);
}

#[test]
fn validation_repeats_the_rules_of_the_schema() {
    let rejected_field = |change: fn(&mut AppFacts)| {
        let mut facts = facts(json!({ "providerRefs": [{ "name": "github" }, { "name": "corp" }] }));
        change(&mut facts);
        let rejection = validate(&facts, &settings()).unwrap_err();
        assert_eq!(rejection.reason, Reason::InvalidSpec);
        rejection.field
    };
    assert_eq!(rejected_field(|facts| facts.app.metadata.name = Some("a.b".into())), "metadata.name");
    assert_eq!(rejected_field(|facts| facts.app.metadata.name = Some("v1".into())), "metadata.name");
    assert_eq!(
        rejected_field(|facts| facts.app.spec.provider_refs[1].name = "a.b".into()),
        "spec.providerRefs[1].name"
    );
    assert_eq!(
        rejected_field(|facts| facts.app.spec.provider_refs[1].alias = Some("github".parse().unwrap())),
        "spec.providerRefs[1]"
    );
    assert_eq!(
        rejected_field(|facts| {
            facts.app.spec.tokens.refresh_idle_seconds = Some(601);
            facts.app.spec.tokens.session_lifetime_seconds = Some(600);
        }),
        "spec.tokens.refreshIdleSeconds"
    );
    let mut same_names = facts(with_webhooks("crm-hook"));
    same_names.app.spec.webhooks[1].name = "crm".parse().unwrap();
    assert_eq!(validate(&same_names, &settings()).unwrap_err().field, "spec.webhooks[1].name");
}

#[test]
fn providers_are_served_with_their_resolved_references() {
    let app = valid(json!({ "providerRefs": [{ "name": "github", "alias": "code" }] }));
    let provider = &app.providers[0];
    assert_eq!((provider.name.as_str(), provider.resource.as_str(), provider.link_by_email), ("code", "github", true));
    assert_eq!(provider.settings.secret.as_ref().unwrap().expose(), "hush", "without the trailing line break");
    assert_eq!(
        (provider.settings.preset.as_str(), &provider.settings.scopes[..]),
        ("github", &["repo".to_owned()][..])
    );
}

#[test]
fn a_missing_provider_is_left_out() {
    let refs = json!({ "providerRefs": [{ "name": "gone" }, { "name": "github" }] });
    let (app, error) = only_error(&facts(refs));
    assert_eq!((error.reason, error.field.as_str()), (Reason::ProviderNotFound, "spec.providerRefs[0]"));
    assert!(error.message.contains("Provider gone does not exist"));
    assert_eq!(app.providers.len(), 1);
}

#[test]
fn an_invalid_provider_is_left_out() {
    let mut facts = facts(json!({ "providerRefs": [{ "name": "github" }] }));
    facts.providers[0] = Lookup::Invalid;
    let (app, error) = only_error(&facts);
    assert_eq!((error.reason, app.providers.len()), (Reason::ProviderInvalid, 0));
}

#[test]
fn a_provider_with_an_unusable_secret_is_served_without_a_secret() {
    let (app, error) = only_error(&facts(json!({ "providerRefs": [{ "name": "corp" }] })));
    assert_eq!(error.reason, Reason::SecretNotFound);
    assert!(error.message.contains("Secret corp does not exist"), "{}", error.message);
    assert_eq!(app.providers[0].settings.secret, None);
    assert!(!app.providers[0].link_by_email, "off for oidc unless the App says so");
    let linked = validate(&facts(json!({ "providerRefs": [{ "name": "corp", "linkByEmail": true }] })), &settings());
    assert!(linked.unwrap().providers[0].link_by_email);

    let mut facts = facts(json!({ "providerRefs": [{ "name": "corp" }] }));
    let Lookup::Found(provider) = &mut facts.providers[0] else { panic!("it exists") };
    provider.secret = SecretKeyLookup::NoKey;
    assert_eq!(validate(&facts, &settings()).unwrap().field_errors[0].reason, Reason::SecretKeyNotFound);
    for bytes in [&b""[..], b"\n", b"\xff"] {
        let Lookup::Found(provider) = &mut facts.providers[0] else { panic!("it exists") };
        provider.secret = SecretKeyLookup::Value(SecretBytes(bytes.to_vec()));
        assert_eq!(validate(&facts, &settings()).unwrap().field_errors[0].reason, Reason::SecretKeyInvalid);
    }
}

#[test]
fn http_providers_are_valid_only_in_development_mode() {
    let refs = json!({ "providerRefs": [{ "name": "local" }] });
    let (app, error) = only_error(&facts(refs.clone()));
    assert_eq!((error.reason, app.providers.len()), (Reason::ProviderInvalid, 0));
    assert!(error.message.contains("spec.oidc.issuer: use https"), "{}", error.message);
    assert_eq!(validate(&facts(refs), &development_settings()).unwrap().field_errors, []);
}

#[test]
fn the_relay_of_an_app_is_served() {
    let app = valid(json!({ "mail": { "smtpSecretRef": { "name": "relay" } } }));
    let RenderedSmtp::Own(relay) = app.mail.smtp else { panic!("{:?}", app.mail.smtp) };
    assert_eq!((relay.host.as_str(), relay.port, relay.tls), ("smtp.example.com", 587, SmtpTls::Starttls));
    assert_eq!(relay.username.unwrap().expose(), "shop");
}

#[test]
fn mail_waits_if_the_relay_secret_is_missing() {
    let (app, error) = only_error(&facts(json!({ "mail": { "smtpSecretRef": { "name": "gone" } } })));
    assert_eq!((error.reason, error.field.as_str()), (Reason::SecretNotFound, "spec.mail.smtpSecretRef"));
    assert_eq!(app.mail.smtp, RenderedSmtp::Unresolved);
}

#[test]
fn each_key_of_a_relay_secret_is_checked_and_no_value_is_reported() {
    let relay = json!({ "mail": { "smtpSecretRef": { "name": "relay" } } });
    let facts_with = |key: &str, value: Option<&str>| {
        let mut facts = facts(relay.clone());
        let Some(Lookup::Found(values)) = &mut facts.smtp else { panic!("it exists") };
        match value {
            Some(value) => drop(values.insert(key.into(), SecretBytes(value.as_bytes().to_vec()))),
            None => drop(values.remove(key)),
        }
        facts
    };
    let long = "é".repeat(513);
    for (key, value, message) in [
        ("host", "", "must be a host name"),
        ("host", "smtp.example.com:587", "must be a host name"),
        ("host", "smtp example com", "must be a host name"),
        ("port", "0", "must be a number from 1 to 65535"),
        ("port", "65536", "must be a number from 1 to 65535"),
        ("port", "smtp", "must be a number from 1 to 65535"),
        ("port", "6379", "must be 25, 465, 587 or 2525"),
        ("tls", "STARTTLS", "must be starttls, implicit or none"),
        ("tls", "none", "if there is a password"),
        ("username", "", "is empty"),
        ("password", "hu\tsh", "no control character"),
        ("password", long.as_str(), "at most 1024 bytes"),
    ] {
        let (app, error) = only_error(&facts_with(key, Some(value)));
        assert_eq!(error.reason, Reason::SecretKeyInvalid, "{key} {value:?}");
        assert!(error.message.starts_with(&format!("Secret relay, key {key}: ")), "{}", error.message);
        assert!(error.message.contains(message), "{}", error.message);
        assert_eq!(app.mail.smtp, RenderedSmtp::Unresolved);
    }
    for key in ["host", "port", "tls", "username", "password"] {
        let (_, error) = only_error(&facts_with(key, None));
        assert_eq!(error.reason, Reason::SecretKeyNotFound);
        assert!(error.message.contains(&format!("has no key {key}")), "{}", error.message);
    }
    for (key, value) in [("host", "192.0.2.1\n"), ("host", "2001:db8::1"), ("port", " 465 "), ("tls", "implicit")] {
        assert_eq!(validate(&facts_with(key, Some(value)), &settings()).unwrap().field_errors, [], "{key} {value:?}");
    }
    assert_eq!(validate(&facts_with("port", Some("1025")), &development_settings()).unwrap().field_errors, []);
    assert_eq!(validate(&facts_with("tls", Some("none")), &development_settings()).unwrap().field_errors, []);
}

#[test]
fn the_firebase_keys_of_an_app_are_served() {
    let app = valid(json!({ "password": { "firebaseScryptRef": { "name": "firebase" } } }));
    let firebase = app.password.firebase_scrypt.unwrap();
    assert_eq!(
        (firebase.signer_key.expose(), firebase.salt_separator.expose()),
        ("aHVzaGh1c2hodXNoaHVzaA==", "Bw=="),
        "without the trailing line break"
    );
}

#[test]
fn an_app_without_usable_firebase_keys_is_served_without_them() {
    let spec = |name: &str| json!({ "password": { "firebaseScryptRef": { "name": name } } });
    let (app, error) = only_error(&facts(spec("gone")));
    assert_eq!((error.reason, error.field.as_str()), (Reason::SecretNotFound, "spec.password.firebaseScryptRef"));
    assert_eq!(
        error.message,
        "Secret gone does not exist in this namespace; create it. Every password of a user with a Firebase hash counts \
         as wrong until then"
    );
    assert_eq!(app.password.firebase_scrypt, None);

    let facts_with = |key: &str, value: Option<&str>| {
        let mut facts = facts(spec("firebase"));
        let Some(Lookup::Found(values)) = &mut facts.firebase_scrypt else { panic!("it exists") };
        match value {
            Some(value) => drop(values.insert(key.into(), SecretBytes(value.as_bytes().to_vec()))),
            None => drop(values.remove(key)),
        }
        facts
    };
    for key in ["signer-key", "salt-separator"] {
        let (app, error) = only_error(&facts_with(key, None));
        assert_eq!((error.reason, app.password.firebase_scrypt), (Reason::SecretKeyNotFound, None));
        assert!(error.message.starts_with(&format!("Secret firebase has no key {key}; add it.")), "{}", error.message);
    }
    let too_long = "A".repeat(88);
    for (key, value) in [
        ("signer-key", ""),
        ("signer-key", "hush"),
        ("signer-key", "aHVzaGh1c2hodXNoaHVza!=="),
        ("signer-key", "aHVzaGh1c2hodXNoaHVzaA"),
        ("signer-key", too_long.as_str()),
        ("salt-separator", ""),
        ("salt-separator", "B w=="),
        ("salt-separator", too_long.as_str()),
    ] {
        let (app, error) = only_error(&facts_with(key, Some(value)));
        assert_eq!((error.reason, app.password.firebase_scrypt), (Reason::SecretKeyInvalid, None), "{key} {value}");
        assert!(error.message.starts_with(&format!("Secret firebase, key {key}: must be ")), "{}", error.message);
        assert!(value.len() < 2 || !error.message.contains(value), "{}", error.message);
    }
}

/// Returns an App with a push webhook that references this Secret, and a pull webhook.
fn with_webhooks(secret: &str) -> Value {
    json!({ "webhooks": [
        {
            "name": "crm",
            "events": ["user.created", "users.imported"],
            "include": ["Profile"],
            "push": { "url": "https://crm.example.com/hook", "secretRef": { "name": secret } },
        },
        {
            "name": "sync",
            "events": ["user.deleted"],
            "pull": { "serviceAccount": { "namespace": "jobs", "name": "sync" } },
        },
    ]})
}

#[test]
fn webhooks_are_served_with_their_keys() {
    let app = valid(with_webhooks("crm-hook"));
    let [push, pull] = &app.webhooks[..] else { panic!("{:?}", app.webhooks) };
    assert_eq!((push.name.as_str(), push.include_profile), ("crm", true));
    assert_eq!(push.events, ["user.created", "users.imported"]);
    let RenderedDelivery::Push(RenderedPush { url, keys: Some(keys) }) = &push.delivery else { panic!("{push:?}") };
    assert_eq!(url.as_str(), "https://crm.example.com/hook");
    assert_eq!(keys.current.expose(), "whsec_aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo", "without the trailing line break");
    assert_eq!(keys.previous.as_ref().unwrap().expose(), "whsec_bHVzaGh1c2hodXNoaHVzaGh1c2hodXNo");
    assert_eq!((pull.name.as_str(), pull.include_profile), ("sync", false));
    let consumer = ServiceAccountRef { namespace: "jobs".into(), name: "sync".into() };
    assert_eq!(pull.delivery, RenderedDelivery::Pull(consumer));
    assert!(!format!("{app:?}").contains("aHVz"), "secrets are not printed");
}

#[test]
fn the_events_of_a_webhook_without_usable_keys_wait() {
    let has_no_keys = |app: &ValidatedApp| {
        assert_eq!(app.webhooks.len(), 2);
        matches!(&app.webhooks[0].delivery, RenderedDelivery::Push(RenderedPush { keys: None, .. }))
    };
    let (app, error) = only_error(&facts(with_webhooks("gone")));
    assert_eq!((error.reason, error.field.as_str()), (Reason::SecretNotFound, "spec.webhooks[0].push.secretRef"));
    assert_eq!(
        error.message,
        "Secret gone does not exist in this namespace; create it. The events of this webhook wait until then"
    );
    assert!(has_no_keys(&app));

    let facts_with = |key: &str, value: Option<&str>| {
        let mut facts = facts(with_webhooks("crm-hook"));
        let Some(Lookup::Found(values)) = &mut facts.webhook_secrets[0] else { panic!("it exists") };
        match value {
            Some(value) => drop(values.insert(key.into(), SecretBytes(value.as_bytes().to_vec()))),
            None => drop(values.remove(key)),
        }
        facts
    };
    let (app, error) = only_error(&facts_with("current", None));
    assert!(has_no_keys(&app) && error.reason == Reason::SecretKeyNotFound, "{error:?}");
    assert_eq!(validate(&facts_with("previous", None), &settings()).unwrap().field_errors, []);
    let too_long = format!("whsec_{}", "A".repeat(88));
    for key in ["current", "previous"] {
        for value in ["", "whsec_", "aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo", "whsec_aHVzaA==", "whsec_?", too_long.as_str()]
        {
            let (app, error) = only_error(&facts_with(key, Some(value)));
            assert!(has_no_keys(&app) && error.reason == Reason::SecretKeyInvalid, "{error:?}");
            let expected = format!(
                "Secret crm-hook, key {key}: must be whsec_ and 24 to 64 bytes in base64. The events of this webhook \
                 wait until then"
            );
            assert_eq!(error.message, expected, "{value}");
        }
    }
}

#[test]
fn http_receivers_are_valid_only_in_development_mode() {
    let mut spec = with_webhooks("crm-hook");
    spec["webhooks"][0]["push"]["url"] = json!("http://127.0.0.1:9000/hook");
    let rejection = validate(&facts(spec.clone()), &settings()).unwrap_err();
    assert_eq!((rejection.field.as_str(), rejection.message.as_str()), ("spec.webhooks[0].push.url", "use https"));
    assert_eq!(validate(&facts(spec), &development_settings()).unwrap().field_errors, []);
}

#[test]
fn broken_templates_are_left_out_and_the_valid_ones_stay() {
    let (app, error) = only_error(&facts(json!({ "mail": { "templatesRef": { "name": "mail" } } })));
    assert_eq!((error.reason, error.field.as_str()), (Reason::TemplatesInvalid, "spec.mail.templatesRef"));
    assert!(error.message.starts_with("mail/reset.txt:1: "), "{}", error.message);
    assert_eq!(app.mail.templates.keys().collect::<Vec<_>>(), ["confirm.subject", "confirm.txt"]);
}

#[test]
fn the_default_templates_are_used_if_the_config_map_of_templates_is_missing() {
    let (app, error) = only_error(&facts(json!({ "mail": { "templatesRef": { "name": "gone" } } })));
    assert_eq!(error.reason, Reason::ConfigMapNotFound);
    assert!(app.mail.templates.is_empty());
}

#[test]
fn the_groups_of_a_provider_are_taken_over_with_a_prefix() {
    let groups = |reference: Value| {
        let app = valid(json!({ "providerRefs": [reference] }));
        assert_eq!(app.field_errors.len(), 1, "Secret corp does not exist: {:?}", app.field_errors);
        app.providers[0].groups.clone()
    };
    assert_eq!(groups(json!({ "name": "corp" })), None);
    let named = groups(json!({ "name": "corp", "alias": "sso", "groups": { "claim": "groups" } })).unwrap();
    assert_eq!((named.claim.as_str(), named.prefix.as_str(), named.only.len()), ("groups", "sso:", 0));
    let own = json!({ "name": "corp", "groups": { "claim": "/a/b", "prefix": "", "only": ["eng-*"] } });
    let own = groups(own).unwrap();
    assert_eq!((own.claim.as_str(), own.prefix.as_str()), ("/a/b", ""));
    assert!(own.only[0].matches("eng-one"));
}

#[test]
fn a_provider_that_reports_no_groups_is_served_without_them() {
    let (app, error) =
        only_error(&facts(json!({ "providerRefs": [{ "name": "github", "groups": { "claim": "groups" } }] })));
    assert_eq!((error.reason, error.field.as_str()), (Reason::ProviderInvalid, "spec.providerRefs[0].groups"));
    assert_eq!(error.message, "Provider github with github reports no groups; remove groups");
    assert_eq!((app.providers.len(), app.providers[0].groups.as_ref()), (1, None));
}

#[test]
fn only_overridden_limits_of_clients_are_rendered() {
    assert_eq!(valid(json!({})).client_limits, BTreeMap::new());
    let app = valid(json!({ "limits": { "tokenRequestsPerClientID": [{ "count": 7, "windowSeconds": 5 }] } }));
    let own = vec![Window { count: 7, window_seconds: 5 }];
    assert_eq!(app.client_limits, BTreeMap::from([(ClientLimitName::TokenRequestsPerClientId, own)]));
}
