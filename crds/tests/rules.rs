//! Each rule of the resources: objects that it accepts, and one that it refuses, by message.

use std::{collections::BTreeSet, sync::LazyLock};

use latchkey_crds::validation::{Validator, Violation};
use serde_json::{Value, json};

static APP: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::app::definition()).expect("it can be used"));
static PROVIDER: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::provider::definition()).expect("it can be used"));

fn app(spec: Value) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": "shop", "namespace": "shop" },
        "spec": spec,
    })
}

fn named(name: &str, spec: Value) -> Value {
    let mut app = app(spec);
    app["metadata"]["name"] = json!(name);
    app
}

fn provider(spec: Value) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "corp", "namespace": "shop" },
        "spec": spec,
    })
}

fn client() -> Value {
    json!({ "clientID": "id", "clientSecretRef": { "name": "corp", "key": "client-secret" } })
}

fn with(mut client: Value, more: Value) -> Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        client[name] = value.clone();
    }
    client
}

fn oauth2(more: Value) -> Value {
    let endpoints = json!({
        "authorizationURL": "https://id.example.com/authorize",
        "tokenURL": "https://id.example.com/token",
        "userInfoURL": "https://id.example.com/me",
        "claims": { "subject": "id" },
    });
    provider(json!({ "oauth2": with(with(client(), endpoints), more) }))
}

#[track_caller]
fn accepted(validator: &Validator, object: Value) {
    assert_eq!(validator.check(&object, None), [], "{object}");
}

/// The object is refused for this and nothing else.
#[track_caller]
fn refused(validator: &Validator, object: Value, field: &str, reason: &str) {
    let found = validator.check(&object, None);
    assert_eq!(found.len(), 1, "{object}: {found:?}");
    assert_eq!(found[0].field, field, "{found:?}");
    assert!(found[0].reason.contains(reason), "{:?} does not say {reason:?}", found[0].reason);
}

#[test]
fn the_smallest_app_is_accepted() {
    accepted(&APP, app(json!({})));
}

#[test]
fn a_whole_app_is_accepted() {
    let windows = json!([{ "count": 5, "windowSeconds": 60 }, { "count": 9, "windowSeconds": 600 }]);
    accepted(
        &APP,
        app(json!({
            "appID": "shop",
            "displayName": "Łódź – The Shop",
            "redirectURLs": ["https://shop.example.com/auth/done", "com.example.shop:/done", "http://127.0.0.1/done"],
            "allowedOrigins": ["https://shop.example.com"],
            "providerRefs": [{ "name": "github" }, { "name": "corp", "alias": "sso", "linkByEmail": false }],
            "signUp": "Closed",
            "allowedEmailDomains": ["example.com"],
            "requireVerifiedEmail": true,
            "enumerationProtection": "Disabled",
            "allowUsersWithoutEmail": true,
            "browserBinding": "Required",
            "callbackMode": "Code",
            "password": { "minimumLength": 12, "minimumStrength": 3 },
            "mail": {
                "from": "The Shop <hello@shop.example.com>",
                "confirmURL": "https://shop.example.com/confirm?code={code}",
                "resetURL": "https://shop.example.com/reset?code={code}&email={email}",
                "confirmCodeLifetimeSeconds": 86400,
                "resetCodeLifetimeSeconds": 1800,
                "templatesRef": { "name": "shop-mail" },
                "smtpSecretRef": { "name": "shop-smtp" },
            },
            "tokens": {
                "signingAlgorithm": "EdDSA",
                "accessLifetimeSeconds": 900,
                "refreshIdleSeconds": 2592000,
                "sessionLifetimeSeconds": 7776000,
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
            },
            "administrators": [
                { "serviceAccount": { "namespace": "shop", "name": "backoffice" }, "role": "UserAdmin" },
            ],
            "unverifiedRetentionDays": 30,
            "auditRetentionDays": 365,
            "deletionPolicy": "Delete",
        })),
    );
}

#[test]
fn enumeration_protection_keeps_its_former_name() {
    use latchkey_crds::rendered::EnumerationProtection::{Disabled, Strict};
    for name in ["Strict", "Disabled", "Off"] {
        accepted(&APP, app(json!({ "enumerationProtection": name })));
    }
    let read =
        |name: &str| serde_json::from_value::<latchkey_crds::rendered::EnumerationProtection>(json!(name)).unwrap();
    assert_eq!(["Strict", "Disabled", "Off"].map(read), [Strict, Disabled, Disabled]);
    // A server of the version before reads no other.
    assert_eq!(json!(Disabled), json!("Off"));
}

#[test]
fn a_name_that_is_no_app_id_needs_the_field() {
    let label = format!("{}b", "a".repeat(62));
    accepted(&APP, named(&label, json!({})));
    accepted(&APP, named("shop.example", json!({ "appID": "shop" })));
    refused(&APP, named("shop.example", json!({})), "spec.appID", "set spec.appID");
    refused(&APP, named(&format!("{label}c"), json!({})), "spec.appID", "set spec.appID");
}

#[test]
fn an_app_id_is_not_a_path_of_the_service() {
    for reserved in ["v1", "healthz", "livez", "readyz", "metrics", "openapi", "docs", "assets", "well-known"] {
        refused(&APP, named(reserved, json!({})), "spec.appID", "keeps for itself");
        refused(&APP, app(json!({ "appID": reserved })), "spec.appID", "keeps for itself");
        accepted(&APP, named(reserved, json!({ "appID": "shop" })));
    }
}

#[test]
fn an_app_id_cannot_change() {
    let changes = [
        // From, to, whether that is another appID.
        (json!({}), json!({ "appID": "shop" }), false),
        (json!({ "appID": "shop" }), json!({}), false),
        (json!({}), json!({ "appID": "other" }), true),
        (json!({ "appID": "other" }), json!({}), true),
        (json!({ "appID": "one" }), json!({ "appID": "two" }), true),
        (json!({ "appID": "one" }), json!({ "appID": "one", "signUp": "Closed" }), false),
    ];
    for (old, new, differs) in changes {
        let found = APP.check(&app(new.clone()), Some(&app(old.clone())));
        assert_eq!(!found.is_empty(), differs, "{old} -> {new}: {found:?}");
        if differs {
            assert!(found[0].reason.contains("the appID cannot change"), "{found:?}");
        }
    }
}

#[test]
fn redirect_urls() {
    let of = |url: &str| app(json!({ "redirectURLs": [url] }));
    for url in [
        "https://shop.example.com",
        "https://shop.example.com:8443/auth/done?a=b",
        "http://localhost/done",
        "http://localhost:3000/done",
        "http://127.0.0.1",
        "http://127.8.9.1:1/done",
        "http://[::1]:9/done",
        "com.example.shop:/done",
        "com.example.shop://done",
    ] {
        accepted(&APP, of(url));
    }
    for (url, reason) in [
        ("https://shop.example.com/#done", "has a fragment"),
        ("https://user@shop.example.com/", "has user info"),
        ("https://user:pass@shop.example.com/", "has user info"),
        ("http://shop.example.com/", "use https"),
        ("http://localhost.example.com/", "use https"),
        ("http://127.0.0.1.example.com/", "use https"),
        ("https:///done", "use https"),
        ("javascript:alert(1)", "use https"),
        ("shop:/done", "use https"),
        ("//shop.example.com", "use https"),
        ("/done", "use https"),
    ] {
        refused(&APP, of(url), "spec.redirectURLs[0]", reason);
    }
    for url in ["https://shop.example.com/a b", "https://shop.example.com/\n", "https://łódź.example.com/"] {
        refused(&APP, of(url), "spec.redirectURLs[0]", "must match");
    }
}

#[test]
fn a_redirect_url_is_there_once() {
    let app = app(json!({ "redirectURLs": ["https://a.example", "https://b.example", "https://a.example"] }));
    refused(&APP, app, "spec.redirectURLs[2]", "is there twice");
}

#[test]
fn allowed_origins() {
    let of = |origin: &str| app(json!({ "allowedOrigins": [origin] }));
    for origin in
        ["https://shop.example.com", "https://shop.example.com:8443", "http://localhost:3000", "https://[2001:db8::1]"]
    {
        accepted(&APP, of(origin));
    }
    for origin in [
        "https://shop.example.com/",
        "https://Shop.example.com",
        "http://shop.example.com",
        "*",
        "null",
        "https://*.example.com",
        "https://user@shop.example.com",
    ] {
        refused(&APP, of(origin), "spec.allowedOrigins[0]", "write an origin as browsers do");
    }
    for origin in ["https://shop.example.com:443", "http://localhost:80"] {
        refused(&APP, of(origin), "spec.allowedOrigins[0]", "leave the usual port away");
    }
}

#[test]
fn provider_refs() {
    let of = |refs: Value| app(json!({ "providerRefs": refs }));
    accepted(&APP, of(json!([{ "name": "google" }, { "name": "corp.example", "alias": "corp" }])));
    refused(&APP, of(json!([{ "name": "corp.example" }])), "spec.providerRefs[0]", "set alias");
    refused(&APP, of(json!([{ "name": "email" }])), "spec.providerRefs[0]", "set another alias");
    refused(&APP, of(json!([{ "name": "corp", "alias": "email" }])), "spec.providerRefs[0]", "set another alias");
    accepted(&APP, of(json!([{ "name": "email", "alias": "mail" }])));
    let same = json!([{ "name": "google" }, { "name": "corp", "alias": "google" }]);
    refused(&APP, of(same), "spec.providerRefs", "give each its own alias");
    accepted(&APP, of(json!([{ "name": "google" }, { "name": "google", "alias": "google-two" }])));
}

#[test]
fn link_templates() {
    for field in ["confirmURL", "resetURL"] {
        let of = |url: &str| app(json!({ "mail": { field: url } }));
        let path = format!("spec.mail.{field}");
        for url in [
            "https://shop.example.com/confirm?code={code}",
            "https://shop.example.com/#/confirm/{code}/{email}",
            "http://localhost:3000/confirm?code={code}",
            "com.example.shop:/confirm?code={code}",
        ] {
            accepted(&APP, of(url));
        }
        for (url, reason) in [
            ("https://shop.example.com/confirm", "write {code}"),
            ("https://shop.example.com/{code}/{name}", "has braces other"),
            ("https://shop.example.com/{code}}", "has braces other"),
            ("https://{code}.example.com/", "into the path or the query"),
            ("https://{code}@shop.example.com/", "into the path or the query"),
            ("http://shop.example.com/?code={code}", "use https"),
            ("javascript:alert('{code}')", "use https"),
        ] {
            refused(&APP, of(url), &path, reason);
        }
    }
}

#[test]
fn senders() {
    let of = |from: &str| app(json!({ "mail": { "from": from } }));
    for from in ["hello@shop.example.com", "The Shop <hello@shop.example.com>", "<hello@shop.example.com>"] {
        accepted(&APP, of(from));
    }
    for from in ["hello", "The Shop hello@shop.example.com", "a@b@c", "The Shop <hello>", "Shop <a@b.example> x"] {
        refused(&APP, of(from), "spec.mail.from", "write an address, or Name <address>");
    }
    refused(&APP, of("a@b.example\r\nBcc: c@d.example"), "spec.mail.from", "must match");
}

#[test]
fn a_session_outlives_its_idleness() {
    let of =
        |idle: i32, life: i32| app(json!({ "tokens": { "refreshIdleSeconds": idle, "sessionLifetimeSeconds": life } }));
    accepted(&APP, of(600, 600));
    refused(&APP, of(601, 600), "spec.tokens.refreshIdleSeconds", "shorten it");
    accepted(&APP, app(json!({ "tokens": { "sessionLifetimeSeconds": 600 } })));
}

#[test]
fn limits_have_one_to_three_windows() {
    let window = json!({ "count": 1, "windowSeconds": 60 });
    let of = |windows: Vec<Value>| app(json!({ "limits": { "loginsPerClient": windows } }));
    refused(&APP, of(vec![]), "spec.limits.loginsPerClient", "1 entries or more");
    accepted(&APP, of(vec![window.clone()]));
    accepted(&APP, of(vec![window.clone(); 3]));
    refused(&APP, of(vec![window; 4]), "spec.limits.loginsPerClient", "3 entries or fewer");
}

#[test]
fn numbers_hold_at_their_bounds_and_not_one_past() {
    for (pointer, minimum, maximum) in [
        ("/password/minimumLength", 8, 128),
        ("/password/minimumStrength", 0, 4),
        ("/mail/confirmCodeLifetimeSeconds", 300, 604_800),
        ("/mail/resetCodeLifetimeSeconds", 300, 86_400),
        ("/tokens/accessLifetimeSeconds", 60, 86_400),
        ("/tokens/refreshIdleSeconds", 300, 31_536_000),
        ("/tokens/sessionLifetimeSeconds", 300, 63_072_000),
        ("/tokens/refreshGraceSeconds", 0, 300),
        ("/tokens/keyRotationDays", 7, 3650),
        ("/unverifiedRetentionDays", 1, 3650),
        ("/auditRetentionDays", 1, 3650),
    ] {
        let of = |number: i64| {
            let names: Vec<_> = pointer[1..].split('/').rev().collect();
            app(names.iter().fold(json!(number), |value, name| json!({ *name: value })))
        };
        let field = format!("spec{}", pointer.replace('/', "."));
        accepted(&APP, of(minimum));
        accepted(&APP, of(maximum));
        refused(&APP, of(minimum - 1), &field, &format!("must be {minimum} or more"));
        refused(&APP, of(maximum + 1), &field, &format!("must be {maximum} or less"));
    }
    let window = |count: i64, seconds: i64| {
        app(json!({ "limits": { "codesPerClient": [{ "count": count, "windowSeconds": seconds }] } }))
    };
    accepted(&APP, window(10_000_000, 86_400));
    refused(&APP, window(10_000_001, 1), "spec.limits.codesPerClient[0].count", "or less");
    refused(&APP, window(0, 1), "spec.limits.codesPerClient[0].count", "or more");
    refused(&APP, window(1, 86_401), "spec.limits.codesPerClient[0].windowSeconds", "or less");
}

#[test]
fn unknown_fields_and_wrong_types_are_told() {
    refused(&APP, app(json!({ "redirectUrls": [] })), "spec.redirectUrls", "unknown field");
    refused(&APP, app(json!({ "mail": { "form": "a@b.example" } })), "spec.mail.form", "unknown field");
    refused(&APP, app(json!({ "redirectURLs": "https://a.example" })), "spec.redirectURLs", "must be of type array");
    refused(&APP, app(json!({ "signUp": "open" })), "spec.signUp", "must be one of Open, Closed");
    let bare = APP.check(&app(json!({ "enumerationProtection": false })), None);
    let reasons: Vec<_> = bare.iter().map(|violation| violation.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "must be of type string, not boolean; YAML reads on, off, yes, no, true and false as booleans unless they have quotes",
            "must be one of Strict, Disabled, Off",
        ]
    );
    let nested = json!({ "administrators": [{ "serviceAccount": { "name": "a" }, "role": "Reader" }] });
    refused(&APP, app(nested), "spec.administrators[0].serviceAccount.namespace", "is required");
    let mut without = app(json!({}));
    without.as_object_mut().unwrap().remove("spec");
    refused(&APP, without, "spec", "is required");
    let mut more = app(json!({}));
    more["sepc"] = json!({});
    refused(&APP, more, "sepc", "unknown field");
}

#[test]
fn every_fault_is_told_at_once() {
    let found = APP.check(&app(json!({ "signUp": "open", "x": 1, "password": { "minimumLength": 7 } })), None);
    let fields: Vec<_> = found.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(fields, ["spec.password.minimumLength", "spec.signUp", "spec.x"]);
}

#[test]
fn null_is_as_if_not_there_and_a_status_is_not_looked_at() {
    accepted(&APP, app(json!({ "tokens": null, "signUp": null, "mail": { "from": null } })));
    let mut object = app(json!({}));
    object["status"] = json!({ "conditions": [] });
    accepted(&APP, object);
}

#[test]
fn a_provider_has_exactly_one_member() {
    for member in
        ["google", "github", "facebook", "discord", "linkedin", "x", "slack", "bitbucket", "twitch", "spotify"]
    {
        accepted(&PROVIDER, provider(json!({ member: client() })));
    }
    accepted(&PROVIDER, provider(json!({ "gitlab": client() })));
    accepted(&PROVIDER, provider(json!({ "microsoft": client() })));
    refused(&PROVIDER, provider(json!({})), "spec", "set exactly one of google, apple");
    let two = json!({ "google": client(), "github": client() });
    refused(&PROVIDER, provider(two), "spec", "set exactly one of google, apple");
    refused(&PROVIDER, provider(json!({ "google": client(), "gihtub": client() })), "spec.gihtub", "unknown field");
}

#[test]
fn apple_ids() {
    let of = |team: &str, key: &str| {
        let key_ref = json!({ "name": "apple", "key": "key.p8" });
        let apple = json!({ "clientID": "dev.example", "teamID": team, "keyID": key, "privateKeyRef": key_ref });
        provider(json!({ "apple": apple }))
    };
    accepted(&PROVIDER, of("ABCDE12345", "12345ABCDE"));
    refused(&PROVIDER, of("ABCDE-2345", "12345ABCDE"), "spec.apple.teamID", "must match");
    refused(&PROVIDER, of("ABCDE12345", "12345abcde"), "spec.apple.keyID", "must match");
}

#[test]
fn addresses_of_providers_are_https() {
    let oidc = |issuer: &str| provider(json!({ "oidc": with(client(), json!({ "issuer": issuer })) }));
    let gitlab = |url: &str| provider(json!({ "gitlab": with(client(), json!({ "baseURL": url })) }));
    for (of, field) in [(&oidc as &dyn Fn(&str) -> Value, "spec.oidc.issuer"), (&gitlab, "spec.gitlab.baseURL")] {
        accepted(&PROVIDER, of("https://id.example.com/realms/a"));
        refused(&PROVIDER, of("http://id.example.com"), field, "use https");
        refused(&PROVIDER, of("https://user@id.example.com"), field, "has user info");
        refused(&PROVIDER, of("https://id.example.com?a"), field, "has a query or a fragment");
        refused(&PROVIDER, of("https://id.example.com#a"), field, "has a query or a fragment");
    }
    for field in ["authorizationURL", "tokenURL", "userInfoURL", "introspectionURL"] {
        let of = |url: &str| oauth2(json!({ field: url }));
        let path = format!("spec.oauth2.{field}");
        accepted(&PROVIDER, of("https://id.example.com/x?tenant=a"));
        refused(&PROVIDER, of("http://id.example.com/x"), &path, "use https");
        refused(&PROVIDER, of("https://user@id.example.com/x"), &path, "has user info");
        refused(&PROVIDER, of("https://id.example.com/x#a"), &path, "has a fragment");
    }
}

#[test]
fn that_addresses_are_https_is_policy_and_nothing_else_is() {
    let http = provider(json!({ "oidc": with(client(), json!({ "issuer": "http://127.0.0.1:5556" })) }));
    assert!(PROVIDER.check(&http, None).iter().all(|violation| violation.policy));
    let others = [
        APP.check(&app(json!({ "redirectURLs": ["http://shop.example.com"] })), None),
        APP.check(&named("v1", json!({})), None),
        PROVIDER.check(&provider(json!({})), None),
    ];
    assert!(others.iter().flatten().all(|violation: &Violation| !violation.policy));
}

#[test]
fn texts_hold_at_their_bounds_and_not_one_past() {
    let url = |length: usize| format!("https://a.example/{}", "a".repeat(length - 18));
    accepted(&APP, app(json!({ "redirectURLs": [url(2048)] })));
    refused(&APP, app(json!({ "redirectURLs": [url(2049)] })), "spec.redirectURLs[0]", "2048 characters or fewer");
    accepted(&APP, app(json!({ "displayName": "é".repeat(100) })));
    refused(&APP, app(json!({ "displayName": "é".repeat(101) })), "spec.displayName", "100 characters or fewer");
    refused(&APP, app(json!({ "displayName": "" })), "spec.displayName", "must not be empty");
    refused(&APP, app(json!({ "displayName": "a\nb" })), "spec.displayName", "must match");
    let many = |count: usize| (0..count).map(|index| format!("https://a.example/{index}")).collect::<Vec<_>>();
    accepted(&APP, app(json!({ "redirectURLs": many(100) })));
    refused(&APP, app(json!({ "redirectURLs": many(101) })), "spec.redirectURLs", "100 entries or fewer");
}

/// A rule that is added has to be tried here too.
#[test]
fn there_are_as_many_rules_as_are_tried_above() {
    let mut messages = BTreeSet::new();
    for definition in latchkey_crds::all() {
        let definition = serde_json::to_value(definition).unwrap();
        collect(&definition, &mut messages);
    }
    assert_eq!(messages.len(), 20, "{messages:#?}");
}

fn collect(value: &Value, messages: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            for rule in members.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                messages.insert(rule["message"].as_str().unwrap_or_default().to_owned());
            }
            members.values().for_each(|member| collect(member, messages));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, messages)),
        _ => {}
    }
}
