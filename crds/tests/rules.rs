//! For each validation rule: objects that it accepts, and objects that it refuses with its message.

use std::{collections::BTreeSet, sync::LazyLock};

use latchkey_crds::validation::{Validator, Violation};
use serde_json::{Value, json};

static APP: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::app::definition()).expect("the definition is valid"));
static PROVIDER: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::provider::definition()).expect("the definition is valid"));

static CLIENT: LazyLock<Validator> =
    LazyLock::new(|| Validator::new(&latchkey_crds::client::definition()).expect("the definition is valid"));

fn app(spec: Value) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": "shop", "namespace": "shop" },
        "spec": spec,
    })
}

fn app_named(name: &str, spec: Value) -> Value {
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

fn with_fields(mut client: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().into_iter().flatten() {
        client[name] = value.clone();
    }
    client
}

fn oauth2_provider(fields: Value) -> Value {
    let endpoints = json!({
        "authorizationURL": "https://id.example.com/authorize",
        "tokenURL": "https://id.example.com/token",
        "userInfoURL": "https://id.example.com/me",
        "claims": { "subject": "id" },
    });
    provider(json!({ "oauth2": with_fields(with_fields(client(), endpoints), fields) }))
}

#[track_caller]
fn assert_accepted(validator: &Validator, object: Value) {
    assert_eq!(validator.validate(&object, None), [], "{object}");
}

/// Asserts that the object is refused only for this reason.
#[track_caller]
fn assert_refused(validator: &Validator, object: Value, field: &str, reason: &str) {
    let found = validator.validate(&object, None);
    assert_eq!(found.len(), 1, "{object}: {found:?}");
    assert_eq!(found[0].field, field, "{found:?}");
    assert!(found[0].reason.contains(reason), "{:?} does not contain {reason:?}", found[0].reason);
}

#[test]
fn the_smallest_app_is_accepted() {
    assert_accepted(&APP, app(json!({})));
}

#[test]
fn an_app_with_every_field_is_accepted() {
    let windows = json!([{ "count": 5, "windowSeconds": 60 }, { "count": 9, "windowSeconds": 600 }]);
    assert_accepted(
        &APP,
        app(json!({
            "appID": "shop",
            "displayName": "Łódź – The Shop",
            "redirectURLs": ["https://shop.example.com/auth/done", "com.example.shop:/done", "http://127.0.0.1/done"],
            "allowedOrigins": ["https://shop.example.com"],
            "providerRefs": [
                { "name": "github" },
                {
                    "name": "corp",
                    "alias": "sso",
                    "linkByEmail": false,
                    "groups": { "claim": "/realm_access/roles", "prefix": "", "only": ["eng-*", "Platform Team"] },
                },
            ],
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
                "authorizationsPerClientAddress": windows,
                "tokenRequestsPerClientID": windows,
                "clientFailuresPerClientAddress": windows,
            },
            "administrators": [
                { "serviceAccount": { "namespace": "shop", "name": "backoffice" }, "role": "UserAdmin" },
                { "serviceAccount": { "namespace": "shop", "name": "loader" }, "role": "Importer" },
            ],
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
                "session": { "idleSeconds": 43200, "lifetimeSeconds": 1209600 },
            },
            "clients": { "namespaces": { "from": "Selector", "selector": {
                "matchLabels": { "team": "platform", "empty": "" },
                "matchExpressions": [
                    { "key": "env", "operator": "In", "values": ["production"] },
                    { "key": "example.com/open", "operator": "Exists" },
                ],
            } } },
            "unverifiedRetentionDays": 30,
            "auditRetentionDays": 365,
            "deletionPolicy": "Delete",
        })),
    );
}

#[test]
fn the_former_name_of_disabled_enumeration_protection_is_still_accepted() {
    use latchkey_crds::rendered::EnumerationProtection::{Disabled, Strict};
    for name in ["Strict", "Disabled", "Off"] {
        assert_accepted(&APP, app(json!({ "enumerationProtection": name })));
    }
    let read =
        |name: &str| serde_json::from_value::<latchkey_crds::rendered::EnumerationProtection>(json!(name)).unwrap();
    assert_eq!(["Strict", "Disabled", "Off"].map(read), [Strict, Disabled, Disabled]);
    // Documents contain the former name, because servers of an earlier version read only this name.
    assert_eq!(json!(Disabled), json!("Off"));
}

#[test]
fn a_name_that_is_not_an_app_id_requires_spec_app_id() {
    let label = format!("{}b", "a".repeat(62));
    assert_accepted(&APP, app_named(&label, json!({})));
    assert_accepted(&APP, app_named("shop.example", json!({ "appID": "shop" })));
    assert_refused(&APP, app_named("shop.example", json!({})), "spec.appID", "set spec.appID");
    assert_refused(&APP, app_named(&format!("{label}c"), json!({})), "spec.appID", "set spec.appID");
}

#[test]
fn reserved_paths_cannot_be_app_ids() {
    for reserved in ["v1", "healthz", "livez", "readyz", "metrics", "openapi", "docs", "assets", "well-known"] {
        assert_refused(&APP, app_named(reserved, json!({})), "spec.appID", "reserved for the service");
        assert_refused(&APP, app(json!({ "appID": reserved })), "spec.appID", "reserved for the service");
        assert_accepted(&APP, app_named(reserved, json!({ "appID": "shop" })));
    }
}

#[test]
fn an_app_id_cannot_change() {
    let changes = [
        // Old spec, new spec, whether the appID differs.
        (json!({}), json!({ "appID": "shop" }), false),
        (json!({ "appID": "shop" }), json!({}), false),
        (json!({}), json!({ "appID": "other" }), true),
        (json!({ "appID": "other" }), json!({}), true),
        (json!({ "appID": "one" }), json!({ "appID": "two" }), true),
        (json!({ "appID": "one" }), json!({ "appID": "one", "signUp": "Closed" }), false),
    ];
    for (old, new, differs) in changes {
        let found = APP.validate(&app(new.clone()), Some(&app(old.clone())));
        assert_eq!(!found.is_empty(), differs, "{old} -> {new}: {found:?}");
        if differs {
            assert!(found[0].reason.contains("the appID cannot change"), "{found:?}");
        }
    }
}

#[test]
fn redirect_urls_are_https_or_loopback_or_private_use() {
    let app_with = |url: &str| app(json!({ "redirectURLs": [url] }));
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
        assert_accepted(&APP, app_with(url));
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
        assert_refused(&APP, app_with(url), "spec.redirectURLs[0]", reason);
    }
    for url in ["https://shop.example.com/a b", "https://shop.example.com/\n", "https://łódź.example.com/"] {
        assert_refused(&APP, app_with(url), "spec.redirectURLs[0]", "must match");
    }
}

#[test]
fn redirect_urls_are_unique() {
    let app = app(json!({ "redirectURLs": ["https://a.example", "https://b.example", "https://a.example"] }));
    assert_refused(&APP, app, "spec.redirectURLs[2]", "is a duplicate");
}

#[test]
fn allowed_origins_are_written_as_browsers_write_them() {
    let app_with = |origin: &str| app(json!({ "allowedOrigins": [origin] }));
    for origin in
        ["https://shop.example.com", "https://shop.example.com:8443", "http://localhost:3000", "https://[2001:db8::1]"]
    {
        assert_accepted(&APP, app_with(origin));
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
        assert_refused(&APP, app_with(origin), "spec.allowedOrigins[0]", "write an origin as browsers do");
    }
    for origin in ["https://shop.example.com:443", "http://localhost:80"] {
        assert_refused(&APP, app_with(origin), "spec.allowedOrigins[0]", "remove the default port");
    }
}

#[test]
fn provider_refs_have_unique_names_that_fit_in_paths() {
    let app_with = |refs: Value| app(json!({ "providerRefs": refs }));
    assert_accepted(&APP, app_with(json!([{ "name": "google" }, { "name": "corp.example", "alias": "corp" }])));
    assert_refused(&APP, app_with(json!([{ "name": "corp.example" }])), "spec.providerRefs[0]", "set alias");
    assert_refused(&APP, app_with(json!([{ "name": "email" }])), "spec.providerRefs[0]", "set another alias");
    assert_refused(
        &APP,
        app_with(json!([{ "name": "corp", "alias": "email" }])),
        "spec.providerRefs[0]",
        "set another alias",
    );
    assert_accepted(&APP, app_with(json!([{ "name": "email", "alias": "mail" }])));
    let same_name = json!([{ "name": "google" }, { "name": "corp", "alias": "google" }]);
    assert_refused(&APP, app_with(same_name), "spec.providerRefs", "give each its own alias");
    assert_accepted(&APP, app_with(json!([{ "name": "google" }, { "name": "google", "alias": "google-two" }])));
}

#[test]
fn link_templates_have_the_code_outside_of_the_host() {
    for field in ["confirmURL", "resetURL"] {
        let app_with = |url: &str| app(json!({ "mail": { field: url } }));
        let path = format!("spec.mail.{field}");
        for url in [
            "https://shop.example.com/confirm?code={code}",
            "https://shop.example.com/#/confirm/{code}/{email}",
            "http://localhost:3000/confirm?code={code}",
            "com.example.shop:/confirm?code={code}",
        ] {
            assert_accepted(&APP, app_with(url));
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
            assert_refused(&APP, app_with(url), &path, reason);
        }
    }
}

#[test]
fn senders_have_one_email_address() {
    let app_with = |from: &str| app(json!({ "mail": { "from": from } }));
    for from in ["hello@shop.example.com", "The Shop <hello@shop.example.com>", "<hello@shop.example.com>"] {
        assert_accepted(&APP, app_with(from));
    }
    for from in ["hello", "The Shop hello@shop.example.com", "a@b@c", "The Shop <hello>", "Shop <a@b.example> x"] {
        assert_refused(&APP, app_with(from), "spec.mail.from", "write an address, or Name <address>");
    }
    assert_refused(&APP, app_with("a@b.example\r\nBcc: c@d.example"), "spec.mail.from", "must match");
}

#[test]
fn the_idle_time_is_within_the_session_lifetime() {
    let app_with =
        |idle: i32, life: i32| app(json!({ "tokens": { "refreshIdleSeconds": idle, "sessionLifetimeSeconds": life } }));
    assert_accepted(&APP, app_with(600, 600));
    assert_refused(&APP, app_with(601, 600), "spec.tokens.refreshIdleSeconds", "shorten it");
    assert_accepted(&APP, app(json!({ "tokens": { "sessionLifetimeSeconds": 600 } })));
}

#[test]
fn limits_have_one_to_three_windows() {
    let window = json!({ "count": 1, "windowSeconds": 60 });
    let app_with = |windows: Vec<Value>| app(json!({ "limits": { "loginsPerClient": windows } }));
    assert_refused(&APP, app_with(vec![]), "spec.limits.loginsPerClient", "1 entries or more");
    assert_accepted(&APP, app_with(vec![window.clone()]));
    assert_accepted(&APP, app_with(vec![window.clone(); 3]));
    assert_refused(&APP, app_with(vec![window; 4]), "spec.limits.loginsPerClient", "3 entries or fewer");
}

#[test]
fn numbers_are_accepted_at_their_bounds_and_refused_beyond() {
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
        ("/pages/session/idleSeconds", 300, 31_536_000),
        ("/pages/session/lifetimeSeconds", 300, 63_072_000),
        ("/unverifiedRetentionDays", 1, 3650),
        ("/auditRetentionDays", 1, 3650),
    ] {
        let app_with = |number: i64| {
            let names: Vec<_> = pointer[1..].split('/').rev().collect();
            app(names.iter().fold(json!(number), |value, name| json!({ *name: value })))
        };
        let field = format!("spec{}", pointer.replace('/', "."));
        assert_accepted(&APP, app_with(minimum));
        assert_accepted(&APP, app_with(maximum));
        assert_refused(&APP, app_with(minimum - 1), &field, &format!("must be {minimum} or more"));
        assert_refused(&APP, app_with(maximum + 1), &field, &format!("must be {maximum} or less"));
    }
    let window = |count: i64, seconds: i64| {
        app(json!({ "limits": { "codesPerClient": [{ "count": count, "windowSeconds": seconds }] } }))
    };
    assert_accepted(&APP, window(10_000_000, 86_400));
    assert_refused(&APP, window(10_000_001, 1), "spec.limits.codesPerClient[0].count", "or less");
    assert_refused(&APP, window(0, 1), "spec.limits.codesPerClient[0].count", "or more");
    assert_refused(&APP, window(1, 86_401), "spec.limits.codesPerClient[0].windowSeconds", "or less");
}

#[test]
fn unknown_fields_and_wrong_types_are_reported() {
    assert_refused(&APP, app(json!({ "redirectUrls": [] })), "spec.redirectUrls", "unknown field");
    assert_refused(&APP, app(json!({ "mail": { "form": "a@b.example" } })), "spec.mail.form", "unknown field");
    assert_refused(
        &APP,
        app(json!({ "redirectURLs": "https://a.example" })),
        "spec.redirectURLs",
        "must be of type array",
    );
    assert_refused(&APP, app(json!({ "signUp": "open" })), "spec.signUp", "must be one of Open, Closed");
    let violations = APP.validate(&app(json!({ "enumerationProtection": false })), None);
    let reasons: Vec<_> = violations.iter().map(|violation| violation.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "must be of type string, not boolean; YAML reads on, off, yes, no, true and false as booleans unless they are quoted",
            "must be one of Strict, Disabled, Off",
        ]
    );
    let without_namespace = json!({ "administrators": [{ "serviceAccount": { "name": "a" }, "role": "Reader" }] });
    assert_refused(&APP, app(without_namespace), "spec.administrators[0].serviceAccount.namespace", "is required");
    let mut without_spec = app(json!({}));
    without_spec.as_object_mut().unwrap().remove("spec");
    assert_refused(&APP, without_spec, "spec", "is required");
    let mut with_unknown_field = app(json!({}));
    with_unknown_field["sepc"] = json!({});
    assert_refused(&APP, with_unknown_field, "sepc", "unknown field");
}

#[test]
fn a_webhook_has_events_exactly_one_delivery_and_a_unique_name() {
    let push = json!({ "url": "https://crm.example.com/hook", "secretRef": { "name": "crm-hook" } });
    let pull = json!({ "serviceAccount": { "namespace": "shop", "name": "sync" } });
    let webhook = |change: fn(&mut Value)| {
        let mut webhook = json!({ "name": "crm", "events": ["user.created"], "push": push.clone() });
        change(&mut webhook);
        app(json!({ "webhooks": [webhook] }))
    };
    assert_accepted(&APP, webhook(|_| {}));
    let names = |one: &str, other: &str| {
        let webhook = |name: &str| json!({ "name": name, "events": ["user.created"], "pull": pull.clone() });
        app(json!({ "webhooks": [webhook(one), webhook(other)] }))
    };
    assert_accepted(&APP, names("one", "other"));
    assert_refused(&APP, names("one", "one"), "spec.webhooks", "two webhooks have the same name");
    let neither = webhook(|webhook| drop(webhook.as_object_mut().unwrap().remove("push")));
    assert_refused(&APP, neither, "spec.webhooks[0]", "set exactly one of push, pull");
    let both = json!({ "name": "crm", "events": ["user.created"], "push": push, "pull": pull });
    assert_refused(&APP, app(json!({ "webhooks": [both] })), "spec.webhooks[0]", "set exactly one of push, pull");
    for (pointer, value, field, reason) in [
        ("/name", json!("C R M"), "spec.webhooks[0].name", "must match"),
        ("/events", json!([]), "spec.webhooks[0].events", "must have 1 entries or more"),
        ("/events", json!(["user.created", "user.created"]), "spec.webhooks[0].events[1]", "is a duplicate"),
        ("/events", json!(["user.unknown"]), "spec.webhooks[0].events[0]", "must be one of user.created"),
        ("/push/url", json!("http://crm.example.com"), "spec.webhooks[0].push.url", "use https"),
        ("/push/url", json!("https://a@crm.example.com"), "spec.webhooks[0].push.url", "has user info"),
        ("/push/url", json!("https://crm.example.com/#a"), "spec.webhooks[0].push.url", "has a fragment"),
    ] {
        let mut webhook = json!({ "name": "crm", "events": ["user.created"], "push": push });
        *webhook.pointer_mut(pointer).unwrap() = value;
        assert_refused(&APP, app(json!({ "webhooks": [webhook] })), field, reason);
    }
}

#[test]
fn pages_have_a_host_name_known_languages_and_colors_with_six_digits() {
    let pages = |pages: Value| app(json!({ "pages": pages }));
    assert_accepted(&APP, pages(json!({})));
    assert_accepted(&APP, pages(json!({ "mode": "Disabled", "theme": { "light": {} }, "links": {}, "session": {} })));
    assert_refused(&APP, pages(json!({ "mode": "On" })), "spec.pages.mode", "must be one of Disabled, Enabled");
    let host = |host: &str| pages(json!({ "host": host }));
    assert_accepted(&APP, host("login.shop.example.com"));
    for wrong in ["localhost", "Login.example.com", "login.example.com:443", "192.0.2.1", "*.example.com"] {
        assert_refused(&APP, host(wrong), "spec.pages.host", "must match");
    }
    let languages = |languages: Value| pages(json!({ "languages": languages }));
    assert_accepted(&APP, languages(json!(["de", "en"])));
    assert_refused(&APP, languages(json!(["fr"])), "spec.pages.languages[0]", "must be one of en, de");
    assert_refused(&APP, languages(json!(["en", "en"])), "spec.pages.languages[1]", "is a duplicate");
    for theme in ["light", "dark"] {
        for color in ["accent", "background"] {
            let theme_with = |value: &str| pages(json!({ "theme": { theme: { color: value } } }));
            assert_accepted(&APP, theme_with("#1A56db"));
            assert_refused(&APP, theme_with("#1a56d"), &format!("spec.pages.theme.{theme}.{color}"), "must match");
        }
    }
    let logo = pages(json!({ "theme": { "logoRef": { "name": "brand" } } }));
    assert_refused(&APP, logo, "spec.pages.theme.logoRef.key", "is required");
}

#[test]
fn links_of_pages_are_https_and_the_link_to_help_can_be_mailto() {
    let link = |name: &str, url: &str| app(json!({ "pages": { "links": { name: url } } }));
    for name in ["home", "terms", "privacy", "support"] {
        let field = format!("spec.pages.links.{name}");
        assert_accepted(&APP, link(name, "https://shop.example.com/a#b"));
        assert_refused(&APP, link(name, "http://shop.example.com"), &field, "use https");
        assert_refused(&APP, link(name, "javascript:alert(1)"), &field, "use https");
        assert_refused(&APP, link(name, "https://user@shop.example.com"), &field, "has user info");
    }
    assert_accepted(&APP, link("support", "mailto:help@shop.example.com?subject=Help"));
    assert_refused(&APP, link("support", "mailto:help"), "spec.pages.links.support", "mailto: with an email address");
    assert_refused(&APP, link("home", "mailto:help@shop.example.com"), "spec.pages.links.home", "use https");
}

#[test]
fn the_idle_time_of_a_browser_session_is_within_its_lifetime() {
    let app_with =
        |idle: i32, life: i32| app(json!({ "pages": { "session": { "idleSeconds": idle, "lifetimeSeconds": life } } }));
    assert_accepted(&APP, app_with(600, 600));
    assert_refused(&APP, app_with(601, 600), "spec.pages.session.idleSeconds", "shorten it");
}

#[test]
fn all_errors_are_reported_together() {
    let found = APP.validate(&app(json!({ "signUp": "open", "x": 1, "password": { "minimumLength": 7 } })), None);
    let fields: Vec<_> = found.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(fields, ["spec.password.minimumLength", "spec.signUp", "spec.x"]);
}

#[test]
fn null_counts_as_absent_and_the_status_is_ignored() {
    assert_accepted(&APP, app(json!({ "tokens": null, "signUp": null, "mail": { "from": null } })));
    let mut object = app(json!({}));
    object["status"] = json!({ "conditions": [] });
    assert_accepted(&APP, object);
}

#[test]
fn a_provider_has_exactly_one_member() {
    for member in
        ["google", "github", "facebook", "discord", "linkedin", "x", "slack", "bitbucket", "twitch", "spotify"]
    {
        assert_accepted(&PROVIDER, provider(json!({ member: client() })));
    }
    assert_accepted(&PROVIDER, provider(json!({ "gitlab": client() })));
    assert_accepted(&PROVIDER, provider(json!({ "microsoft": client() })));
    assert_refused(&PROVIDER, provider(json!({})), "spec", "set exactly one of google, apple");
    let two_members = json!({ "google": client(), "github": client() });
    assert_refused(&PROVIDER, provider(two_members), "spec", "set exactly one of google, apple");
    assert_refused(
        &PROVIDER,
        provider(json!({ "google": client(), "gihtub": client() })),
        "spec.gihtub",
        "unknown field",
    );
}

#[test]
fn apples_team_and_key_ids_are_upper_case_letters_and_digits() {
    let provider_with = |team: &str, key: &str| {
        let key_ref = json!({ "name": "apple", "key": "key.p8" });
        let apple = json!({ "clientID": "dev.example", "teamID": team, "keyID": key, "privateKeyRef": key_ref });
        provider(json!({ "apple": apple }))
    };
    assert_accepted(&PROVIDER, provider_with("ABCDE12345", "12345ABCDE"));
    assert_refused(&PROVIDER, provider_with("ABCDE-2345", "12345ABCDE"), "spec.apple.teamID", "must match");
    assert_refused(&PROVIDER, provider_with("ABCDE12345", "12345abcde"), "spec.apple.keyID", "must match");
}

#[test]
fn provider_urls_are_https() {
    let oidc = |issuer: &str| provider(json!({ "oidc": with_fields(client(), json!({ "issuer": issuer })) }));
    let gitlab = |url: &str| provider(json!({ "gitlab": with_fields(client(), json!({ "baseURL": url })) }));
    for (provider_with, field) in
        [(&oidc as &dyn Fn(&str) -> Value, "spec.oidc.issuer"), (&gitlab, "spec.gitlab.baseURL")]
    {
        assert_accepted(&PROVIDER, provider_with("https://id.example.com/realms/a"));
        assert_refused(&PROVIDER, provider_with("http://id.example.com"), field, "use https");
        assert_refused(&PROVIDER, provider_with("https://user@id.example.com"), field, "has user info");
        assert_refused(&PROVIDER, provider_with("https://id.example.com?a"), field, "has a query or a fragment");
        assert_refused(&PROVIDER, provider_with("https://id.example.com#a"), field, "has a query or a fragment");
    }
    for field in ["authorizationURL", "tokenURL", "userInfoURL", "introspectionURL"] {
        let provider_with = |url: &str| oauth2_provider(json!({ field: url }));
        let path = format!("spec.oauth2.{field}");
        assert_accepted(&PROVIDER, provider_with("https://id.example.com/x?tenant=a"));
        assert_refused(&PROVIDER, provider_with("http://id.example.com/x"), &path, "use https");
        assert_refused(&PROVIDER, provider_with("https://user@id.example.com/x"), &path, "has user info");
        assert_refused(&PROVIDER, provider_with("https://id.example.com/x#a"), &path, "has a fragment");
    }
}

#[test]
fn only_https_is_a_policy_rule() {
    let http = provider(json!({ "oidc": with_fields(client(), json!({ "issuer": "http://127.0.0.1:5556" })) }));
    assert!(PROVIDER.validate(&http, None).iter().all(|violation| violation.is_policy));
    let others = [
        APP.validate(&app(json!({ "redirectURLs": ["http://shop.example.com"] })), None),
        APP.validate(&app_named("v1", json!({})), None),
        PROVIDER.validate(&provider(json!({})), None),
    ];
    assert!(others.iter().flatten().all(|violation: &Violation| !violation.is_policy));
}

#[test]
fn texts_are_accepted_at_their_bounds_and_refused_beyond() {
    let url = |length: usize| format!("https://a.example/{}", "a".repeat(length - 18));
    assert_accepted(&APP, app(json!({ "redirectURLs": [url(2048)] })));
    assert_refused(
        &APP,
        app(json!({ "redirectURLs": [url(2049)] })),
        "spec.redirectURLs[0]",
        "2048 characters or fewer",
    );
    assert_accepted(&APP, app(json!({ "displayName": "é".repeat(100) })));
    assert_refused(&APP, app(json!({ "displayName": "é".repeat(101) })), "spec.displayName", "100 characters or fewer");
    assert_refused(&APP, app(json!({ "displayName": "" })), "spec.displayName", "must not be empty");
    assert_refused(&APP, app(json!({ "displayName": "a\nb" })), "spec.displayName", "must match");
    let many = |count: usize| (0..count).map(|index| format!("https://a.example/{index}")).collect::<Vec<_>>();
    assert_accepted(&APP, app(json!({ "redirectURLs": many(100) })));
    assert_refused(&APP, app(json!({ "redirectURLs": many(101) })), "spec.redirectURLs", "100 entries or fewer");
}

#[test]
fn client_namespaces_have_a_selector_exactly_if_from_is_selector() {
    let app_with = |namespaces: Value| app(json!({ "clients": { "namespaces": namespaces } }));
    let selector = json!({ "matchLabels": { "team": "a" } });
    assert_accepted(&APP, app_with(json!({ "from": "All" })));
    assert_accepted(&APP, app_with(json!({})));
    assert_accepted(&APP, app_with(json!({ "from": "Selector", "selector": selector })));
    for wrong in
        [json!({ "from": "Selector" }), json!({ "from": "All", "selector": selector }), json!({ "selector": {} })]
    {
        assert_refused(&APP, app_with(wrong), "spec.clients.namespaces", "set selector if from is Selector");
    }
}

#[test]
fn a_label_requirement_has_values_exactly_for_the_operators_in_and_not_in() {
    let app_with = |requirement: Value| {
        let selector = json!({ "matchExpressions": [requirement] });
        app(json!({ "clients": { "namespaces": { "from": "Selector", "selector": selector } } }))
    };
    for operator in ["In", "NotIn"] {
        assert_accepted(&APP, app_with(json!({ "key": "a", "operator": operator, "values": [""] })));
    }
    for operator in ["Exists", "DoesNotExist"] {
        assert_accepted(&APP, app_with(json!({ "key": "a", "operator": operator })));
    }
    let field = "spec.clients.namespaces.selector.matchExpressions[0]";
    for wrong in [
        json!({ "key": "a", "operator": "In" }),
        json!({ "key": "a", "operator": "NotIn", "values": [] }),
        json!({ "key": "a", "operator": "Exists", "values": ["b"] }),
    ] {
        assert_refused(&APP, app_with(wrong), field, "set values with In and NotIn");
    }
}

fn client_of_app(spec: Value) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Client",
        "metadata": { "name": "grafana", "namespace": "monitoring" },
        "spec": with_fields(json!({ "appRef": { "name": "platform" } }), spec),
    })
}

fn web_client(fields: Value) -> Value {
    let web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
    client_of_app(json!({ "web": with_fields(web, fields) }))
}

fn public_client(urls: &[&str]) -> Value {
    client_of_app(json!({ "public": { "redirectURLs": urls } }))
}

#[test]
fn the_smallest_client_is_accepted() {
    assert_accepted(&CLIENT, web_client(json!({})));
    assert_accepted(&CLIENT, public_client(&["com.example.app:/done", "http://127.0.0.1/done"]));
}

#[test]
fn a_client_with_every_field_is_accepted() {
    assert_accepted(
        &CLIENT,
        client_of_app(json!({
            "appRef": { "name": "platform", "namespace": "identity" },
            "clientID": "grafana",
            "displayName": "Grafana",
            "web": {
                "redirectURLs": ["https://grafana.example.com/login", "http://localhost:3000/login"],
                "postLogoutRedirectURLs": ["https://grafana.example.com/"],
                "authentication": "Secret",
                "secret": { "name": "grafana-oidc", "rotationOverlapSeconds": 604_800 },
                "pkce": "Required",
            },
            "pushedAuthorization": "Required",
            "scopes": ["openid", "profile", "email", "groups", "offline_access"],
            "consent": "Once",
            "allow": { "groups": ["admins", "corp:Platform Team"] },
            "groups": { "only": ["argo:*"], "max": 500 },
            "tokens": {
                "idTokenAlgorithm": "ES256",
                "idTokenLifetimeSeconds": 60,
                "audiences": ["https://api.example.com"],
            },
        })),
    );
    assert_accepted(
        &CLIENT,
        web_client(json!({
            "secretRef": { "name": "own", "key": "secret" }, "previousSecretRef": { "name": "own", "key": "previous" },
        })),
    );
    let keys = json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" } });
    assert_accepted(&CLIENT, web_client(keys));
}

#[test]
fn a_client_is_either_web_or_public() {
    assert_refused(&CLIENT, client_of_app(json!({})), "spec", "set exactly one of web, public");
    let mut both = web_client(json!({}));
    both["spec"]["public"] = json!({ "redirectURLs": ["com.example.app:/done"] });
    assert_refused(&CLIENT, both, "spec", "set exactly one of web, public");
}

#[test]
fn app_ref_and_client_id_of_a_client_cannot_change() {
    let client = |app_ref: Value, client_id: Option<&str>| {
        let mut client = web_client(json!({ "pkce": "Required" }));
        client["spec"]["appRef"] = app_ref;
        if let Some(client_id) = client_id {
            client["spec"]["clientID"] = json!(client_id);
        }
        client
    };
    let app_ref = || json!({ "name": "platform", "namespace": "identity" });
    let before = client(app_ref(), Some("grafana"));
    let field_of_change = |old: &Value, new: &Value| {
        CLIENT.validate(new, Some(old)).into_iter().map(|violation| violation.field).collect::<Vec<_>>()
    };
    let mut edited = before.clone();
    edited["spec"]["displayName"] = json!("Grafana");
    assert_eq!(field_of_change(&before, &edited), [""; 0]);
    for other in [json!({ "name": "other", "namespace": "identity" }), json!({ "name": "platform" })] {
        assert_eq!(field_of_change(&before, &client(other, Some("grafana"))), ["spec.appRef"]);
    }
    for other in [Some("other"), None] {
        assert_eq!(field_of_change(&before, &client(app_ref(), other)), ["spec.clientID"]);
    }
    assert_eq!(field_of_change(&client(app_ref(), None), &before), ["spec.clientID"]);
}

#[test]
fn client_ids_have_letters_digits_hyphens_and_underscores_and_are_not_uuids() {
    let with_id = |id: &str| with_spec(web_client(json!({})), "clientID", json!(id));
    for id in ["grafana", "Grafana_2", "-", &"a".repeat(64)] {
        assert_accepted(&CLIENT, with_id(id));
    }
    for id in ["monitoring.grafana", "a b", "a:b", "\u{e9}"] {
        assert_refused(&CLIENT, with_id(id), "spec.clientID", "must match");
    }
    assert_refused(&CLIENT, with_id(&"a".repeat(65)), "spec.clientID", "64 characters or fewer");
    for id in ["01890a5d-ac96-774b-bcce-b302099a8057", "01890A5D-AC96-774B-BCCE-B302099A8057"] {
        assert_refused(&CLIENT, with_id(id), "spec.clientID", "is a UUID");
    }
}

fn with_spec(mut object: Value, field: &str, value: Value) -> Value {
    object["spec"][field] = value;
    object
}

#[test]
fn a_client_with_a_long_name_must_name_its_secret() {
    let named = |length: usize, mut client: Value| {
        client["metadata"]["name"] = json!("a".repeat(length));
        client
    };
    assert_accepted(&CLIENT, named(248, web_client(json!({}))));
    assert_refused(&CLIENT, named(249, web_client(json!({}))), "spec.web", "set spec.web.secret.name");
    let overlap = web_client(json!({ "secret": { "rotationOverlapSeconds": 0 } }));
    assert_refused(&CLIENT, named(249, overlap), "spec.web", "set spec.web.secret.name");
    assert_accepted(&CLIENT, named(249, web_client(json!({ "secret": { "name": "short" } }))));
    assert_accepted(&CLIENT, named(249, web_client(json!({ "secretRef": { "name": "a", "key": "b" } }))));
    assert_accepted(&CLIENT, named(253, public_client(&["com.example.app:/done"])));
}

#[test]
fn only_a_public_client_can_have_redirect_urls_with_private_use_schemes() {
    let private = "com.example.app:/done";
    let message = "only a public client can have a private-use scheme";
    assert_refused(&CLIENT, web_client(json!({ "redirectURLs": [private] })), "spec.web.redirectURLs", message);
    let logout = web_client(json!({ "postLogoutRedirectURLs": ["https://a.example", private] }));
    assert_refused(&CLIENT, logout, "spec.web.postLogoutRedirectURLs", message);
    assert_accepted(&CLIENT, public_client(&[private]));
    assert_refused(&CLIENT, public_client(&["http://a.example"]), "spec.public.redirectURLs[0]", "use https");
}

#[test]
fn a_client_has_1_to_20_redirect_urls() {
    let many = |count: usize| (0..count).map(|number| format!("https://a.example/{number}")).collect::<Vec<_>>();
    assert_accepted(&CLIENT, web_client(json!({ "redirectURLs": many(20), "postLogoutRedirectURLs": many(20) })));
    let field = "spec.web.redirectURLs";
    assert_refused(&CLIENT, web_client(json!({ "redirectURLs": many(21) })), field, "20 entries or fewer");
    assert_refused(&CLIENT, web_client(json!({ "redirectURLs": [] })), field, "1 entries or more");
    assert_refused(&CLIENT, client_of_app(json!({ "web": {} })), field, "is required");
}

#[test]
fn a_client_has_either_a_secret_or_keys() {
    let reference = json!({ "name": "a", "key": "b" });
    let keys =
        |more: Value| web_client(with_fields(json!({ "authentication": "PrivateKeyJWT", "jwksRef": reference }), more));
    for wrong in [json!({ "jwksRef": reference }), json!({ "authentication": "PrivateKeyJWT" })] {
        assert_refused(&CLIENT, web_client(wrong), "spec.web", "set jwksRef if authentication is PrivateKeyJWT");
    }
    for secret in [json!({ "secret": {} }), json!({ "secretRef": reference })] {
        assert_refused(&CLIENT, keys(secret), "spec.web", "a client with PrivateKeyJWT has no secret");
    }
    let both = json!({ "secret": {}, "secretRef": reference });
    assert_refused(&CLIENT, web_client(both), "spec.web", "not both");
    let previous = json!({ "previousSecretRef": reference });
    assert_refused(&CLIENT, web_client(previous), "spec.web", "set secretRef too");
}

#[test]
fn a_client_refers_to_secrets_and_config_maps_by_valid_names() {
    for (name, is_accepted) in
        [("a", true), ("0.a-b", true), ("a b", false), ("A", false), ("a/b", false), ("..", false)]
    {
        let reference = json!({ "name": name, "key": "k" });
        let own = json!({ "name": "own", "key": "k" });
        for (field, fields) in [
            ("secretRef", json!({ "secretRef": reference })),
            ("previousSecretRef", json!({ "secretRef": own, "previousSecretRef": reference })),
            ("jwksRef", json!({ "authentication": "PrivateKeyJWT", "jwksRef": reference })),
        ] {
            if is_accepted {
                assert_accepted(&CLIENT, web_client(fields));
            } else {
                assert_refused(&CLIENT, web_client(fields), "spec.web", &format!("{field}.name is not the name"));
            }
        }
    }
}

#[test]
fn the_scopes_of_a_client_contain_openid() {
    let with_scopes = |scopes: Value| with_spec(web_client(json!({})), "scopes", scopes);
    assert_accepted(&CLIENT, with_scopes(json!([])));
    assert_accepted(&CLIENT, with_scopes(json!(["groups", "openid"])));
    assert_refused(&CLIENT, with_scopes(json!(["email"])), "spec.scopes", "add openid");
    assert_refused(&CLIENT, with_scopes(json!(["openid", "phone"])), "spec.scopes[1]", "must be one of openid");
}

#[test]
fn groups_of_a_client_are_printable_ascii_and_only_patterns_end_with_an_asterisk() {
    let allowing = |group: &str| with_spec(web_client(json!({})), "allow", json!({ "groups": [group] }));
    let showing = |pattern: &str| with_spec(web_client(json!({})), "groups", json!({ "only": [pattern] }));
    for name in ["admins", "corp:Platform Team", "~"] {
        assert_accepted(&CLIENT, allowing(name));
        assert_accepted(&CLIENT, showing(name));
    }
    for pattern in ["*", "argo:*"] {
        assert_accepted(&CLIENT, showing(pattern));
    }
    for name in ["\u{e9}", "a\tb"] {
        assert_refused(&CLIENT, allowing(name), "spec.allow.groups[0]", "must match");
    }
    for pattern in ["a*b", "**", "\u{e9}*"] {
        assert_refused(&CLIENT, showing(pattern), "spec.groups.only[0]", "must match");
    }
}

/// Fails if a rule is added. Then write a test for the new rule in this file, and raise the number below.
#[test]
fn no_rule_was_added_without_a_test() {
    let mut messages = BTreeSet::new();
    for definition in latchkey_crds::definitions() {
        let definition = serde_json::to_value(definition).unwrap();
        collect_messages(&definition, &mut messages);
    }
    assert_eq!(messages.len(), 40, "{messages:#?}");
}

fn collect_messages(value: &Value, messages: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            for rule in members.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                messages.insert(rule["message"].as_str().unwrap_or_default().to_owned());
            }
            members.values().for_each(|member| collect_messages(member, messages));
        }
        Value::Array(items) => items.iter().for_each(|item| collect_messages(item, messages)),
        _ => {}
    }
}
