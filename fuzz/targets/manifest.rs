//! Manifests: a server accepts every document that the operator renders, and serializes it to the same bytes.

use latchkey_crds::{rendered::RenderedApp, types::AppId};
use latchkey_server::config::{Apps, Ceilings};
use serde_json::{Value, json};

use crate::{
    app::{RENDERER, app_manifest},
    draw::{Draw, texts},
    harness,
};

/// Fields of an App manifest or, if the path begins with `/client`, of a Client manifest. Each field has valid, invalid
/// and borderline values.
const FIELDS: [(&str, &[&str]); 60] = [
    ("/metadata/name", &["\"shop\"", "\"v1\"", "\"a.b\"", "\"\""]),
    ("/metadata/namespace", &["\"shop\"", "\"default\"", "7"]),
    ("/spec/appID", &["\"shop\"", "\"login\"", "\"healthz\"", "\"Shop\"", "null"]),
    ("/spec/displayName", &["\"Shop\"", "\"\"", "\" \"", "\"é\"", "\"a\\nb\"", "7"]),
    (
        "/spec/redirectURLs",
        &[
            "[]",
            "[\"https://shop.example.com/done\"]",
            "[\"http://127.0.0.1/x\",\"com.example:/y\"]",
            "[\"http://evil.example\"]",
            "[\"https://a/\",\"https://a/\"]",
            "[1]",
        ],
    ),
    (
        "/spec/allowedOrigins",
        &[
            "[]",
            "[\"https://shop.example.com\"]",
            "[\"https://shop.example.com/\"]",
            "[\"*\"]",
            "[\"http://localhost:3000\"]",
        ],
    ),
    ("/spec/signUp", &["\"Open\"", "\"Closed\"", "\"open\"", "true"]),
    ("/spec/allowedEmailDomains", &["[]", "[\"example.com\"]", "[\"EXAMPLE.com\"]", "[\"example\"]"]),
    ("/spec/requireVerifiedEmail", &["true", "false", "\"true\"", "null"]),
    ("/spec/enumerationProtection", &["\"Strict\"", "\"Off\"", "false"]),
    ("/spec/allowUsersWithoutEmail", &["true", "false"]),
    ("/spec/browserBinding", &["\"Auto\"", "\"Required\"", "\"\""]),
    ("/spec/callbackMode", &["\"Query\"", "\"Fragment\"", "\"Code\"", "\"code\""]),
    ("/spec/password/minimumLength", &["8", "0", "1", "128", "129", "-1", "8.5", "\"8\"", "4294967296"]),
    ("/spec/password/minimumStrength", &["0", "2", "4", "5", "-1"]),
    ("/spec/password/firebaseScryptRef", &["{\"name\":\"firebase\"}", "{\"name\":\"gone\"}", "{}"]),
    ("/spec/mail/invitationURL", &["\"https://a.example/{code}\"", "\"https://a.example\""]),
    (
        "/spec/webhooks",
        &[
            "[]",
            "[{\"name\":\"a\",\"events\":[\"user.created\"],\"push\":{\"url\":\"https://a.example\",\"secretRef\":{\"name\":\"smtp\"}}}]",
            "[{\"name\":\"a\",\"events\":[\"user.deleted\"],\"pull\":{\"serviceAccount\":{\"namespace\":\"a\",\"name\":\"b\"}}}]",
            "[{\"name\":\"a\",\"events\":[],\"push\":{},\"pull\":{}}]",
        ],
    ),
    ("/spec/mail/from", &["\"a@example.com\"", "\"Shop <a@example.com>\"", "\"a\"", "\"\\\"S\\\" <a@localhost>\""]),
    (
        "/spec/mail/confirmURL",
        &[
            "\"https://a.example/{code}\"",
            "\"https://a.example\"",
            "\"https://{code}.example/\"",
            "\"com.example:/{code}\"",
        ],
    ),
    ("/spec/mail/resetURL", &["\"https://a.example/{code}?{email}\"", "\"https://a.example/{x}\""]),
    ("/spec/mail/smtpSecretRef", &["{\"name\":\"smtp\"}", "{\"name\":\"gone\"}", "{}"]),
    ("/spec/tokens/keyRotationDays", &["0", "1", "90", "99999"]),
    ("/spec/mail/templatesRef", &["{\"name\":\"mails\"}", "{\"name\":\"gone\"}"]),
    ("/spec/mail/confirmCodeLifetimeSeconds", &["86400", "0", "60", "999999999"]),
    ("/spec/tokens/signingAlgorithm", &["\"ES256\"", "\"EdDSA\"", "\"RS256\"", "\"HS256\""]),
    ("/spec/tokens/accessLifetimeSeconds", &["60", "900", "3600", "0", "86401"]),
    ("/spec/tokens/refreshIdleSeconds", &["60", "2592000", "0", "99999999999"]),
    ("/spec/tokens/sessionLifetimeSeconds", &["60", "7776000", "0"]),
    ("/spec/tokens/refreshGraceSeconds", &["0", "30", "300", "301"]),
    ("/spec/tokens/audiences", &["[]", "[\"a\"]", "[\"a\",\"a\"]", "[\"\"]", "[\"https://api.example\"]"]),
    (
        "/spec/limits/loginsPerClient",
        &["[]", "[{\"count\":1,\"windowSeconds\":60}]", "[{\"count\":0,\"windowSeconds\":0}]", "7"],
    ),
    (
        "/spec/limits/mailsPerRecipient",
        &[
            "[{\"count\":1,\"windowSeconds\":60},{\"count\":8,\"windowSeconds\":3600}]",
            "[{\"count\":4294967295,\"windowSeconds\":4294967295}]",
        ],
    ),
    (
        "/spec/administrators",
        &[
            "[]",
            "[{\"serviceAccount\":{\"namespace\":\"shop\",\"name\":\"admin\"},\"role\":\"UserAdmin\"}]",
            "[{\"serviceAccount\":{\"namespace\":\"shop\",\"name\":\"loader\"},\"role\":\"Importer\"}]",
            "[{\"role\":\"Nobody\"}]",
        ],
    ),
    ("/spec/pages/mode", &["\"Enabled\"", "\"Enabled\"", "\"Disabled\"", "true"]),
    ("/spec/pages/host", &["\"login.example.com\"", "\"auth.example.com\"", "\"192.0.2.1\"", "\"a\""]),
    ("/spec/pages/languages", &["[]", "[\"de\"]", "[\"de\",\"en\"]", "[\"en\",\"en\"]", "[\"fr\"]"]),
    (
        "/spec/pages/theme",
        &[
            "{}",
            "{\"mode\":\"Dark\",\"light\":{\"accent\":\"#000000\"}}",
            "{\"light\":{\"accent\":\"#ffffff\"}}",
            "{\"dark\":{\"background\":\"red\"}}",
            "{\"logoRef\":{\"name\":\"mails\",\"key\":\"other\"}}",
            "{\"logoRef\":{\"name\":\"mails\",\"key\":\"logo.svg\"}}",
        ],
    ),
    ("/spec/pages/textsRef", &["{\"name\":\"mails\"}", "{\"name\":\"texts\"}", "{\"name\":\"gone\"}"]),
    (
        "/spec/pages/links",
        &[
            "{}",
            "{\"home\":\"https://a.example/#b\",\"support\":\"mailto:a@b.example?c=d\"}",
            "{\"terms\":\"javascript:a\"}",
            "{\"support\":\"mailto:a\"}",
        ],
    ),
    ("/spec/unverifiedRetentionDays", &["0", "1", "30", "99999"]),
    ("/spec/auditRetentionDays", &["0", "1", "365", "99999"]),
    ("/spec/deletionPolicy", &["\"Retain\"", "\"Delete\"", "\"Orphan\""]),
    (
        "/spec/providerRefs",
        &[
            "[]",
            "[{\"name\":\"google\"}]",
            "[{\"name\":\"oidc\",\"alias\":\"corp\",\"linkByEmail\":true}]",
            "[{\"name\":\"google\"},{\"name\":\"google\"}]",
            "[{\"name\":\"gone\"}]",
            "[{\"name\":\"google\",\"alias\":\"email\"}]",
        ],
    ),
    (
        "/spec/clients/namespaces",
        &[
            "{}",
            "{\"from\":\"All\"}",
            "{\"from\":\"Selector\",\"selector\":{\"matchLabels\":{\"kubernetes.io/metadata.name\":\"other\"}}}",
            "{\"from\":\"Selector\"}",
        ],
    ),
    ("/client/metadata/namespace", &["\"shop\"", "\"other\"", "\"..\"", "7"]),
    ("/client/spec/clientID", &["\"c\"", "\"shop\"", "\"a.b\"", "\"01890a5d-ac96-774b-bcce-b302099a8057\"", "null"]),
    (
        "/client/spec/web/redirectURLs",
        &["[\"https://a.example\"]", "[]", "[\"com.example:/\"]", "[\"http://127.0.0.1/\",\"https://b.example/?a\"]"],
    ),
    ("/client/spec/web/authentication", &["\"Secret\"", "\"PrivateKeyJWT\"", "\"None\""]),
    (
        "/client/spec/web/secretRef",
        &["{\"name\":\"smtp\",\"key\":\"long\"}", "{\"name\":\"smtp\",\"key\":\"secret\"}", "null"],
    ),
    (
        "/client/spec/web/jwksRef",
        &[
            "{\"name\":\"mails\",\"key\":\"jwks.json\"}",
            "{\"name\":\"mails\",\"key\":\"other\"}",
            "{\"name\":\"gone\",\"key\":\"a\"}",
        ],
    ),
    ("/client/spec/public", &["{\"redirectURLs\":[\"com.example:/\"]}", "{}", "null"]),
    ("/client/spec/scopes", &["[]", "[\"openid\",\"groups\"]", "[\"email\"]", "[\"openid\",\"openid\"]"]),
    ("/client/spec/groups", &["{\"only\":[\"a:*\",\"b\"],\"max\":1}", "{\"only\":[\"*a\"]}", "{\"max\":0}"]),
    (
        "/client/spec/tokens",
        &[
            "{\"idTokenAlgorithm\":\"ES256\"}",
            "{\"audiences\":[\"shop\"]}",
            "{\"audiences\":[\"a\"]}",
            "{\"idTokenLifetimeSeconds\":1}",
        ],
    ),
    ("/spec/unknownField", &["1", "{}"]),
    ("/spec", &["{}", "null", "[]"]),
    ("/apiVersion", &["\"latchkey.dev/v1alpha1\"", "\"v1\"", "\"latchkey.dev/v2\""]),
    ("/kind", &["\"App\"", "\"Provider\"", "\"List\""]),
    ("/metadata/annotations", &["{\"latchkey.dev/rotate-keys\":\"1\"}", "{}"]),
];
const FRAGMENTS: [&str; 40] = [
    "apiVersion: latchkey.dev/v1alpha1\n",
    "kind: App\n",
    "kind: Provider\n",
    "metadata:\n",
    "  name: shop\n",
    "spec:\n",
    "  displayName: Shop\n",
    "---\n",
    "- ",
    "  ",
    "\n",
    ": ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "&a ",
    "*a\n",
    "<<: *a\n",
    "!!str ",
    "| \n",
    "> \n",
    "\"",
    "'",
    "#",
    "%YAML 1.2\n",
    "...\n",
    "true",
    "null",
    "~",
    "0x1F",
    "1e3",
    "Off",
    "\t",
    "? ",
    "é",
    "\u{feff}",
    "  tokens:\n",
    "kind: List\nitems:\n",
];

#[test]
fn manifest() {
    harness::run("manifest", 120, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_input("app.yaml", &text);
        }
        let (mut app, mut client) = (app_manifest("shop", "ES256"), client());
        let mut draw = Draw::new(input);
        while !draw.is_empty() {
            let (field, values) = draw.pick(&FIELDS);
            let value: Value = serde_json::from_str(draw.pick(values)).expect("the values are JSON");
            match field.strip_prefix("/client") {
                Some(field) => set_field(&mut client, field, value),
                None => set_field(&mut app, field, value),
            }
        }
        let items = json!({ "apiVersion": "v1", "kind": "List", "items": [app, client, secret(), config_map(), google(), oidc()] });
        check_input("app.json", &items.to_string());
    });
}

/// Sets a field, and creates its parents if they are missing. Does nothing if a parent is not an object.
fn set_field(object: &mut Value, pointer: &str, value: Value) {
    let mut parent_object = object;
    let (parents, field) = pointer.rsplit_once('/').unwrap();
    for parent in parents.split('/').skip(1) {
        let Some(members) = parent_object.as_object_mut() else { return };
        parent_object = members.entry(parent).or_insert_with(|| json!({}));
    }
    if let Some(members) = parent_object.as_object_mut() {
        members.insert(field.to_owned(), value);
    }
}

fn secret() -> Value {
    let data = json!({ "host": "relay.example.com", "port": "587", "tls": "starttls", "username": "u", "password": "p", "secret": "s", "long": "a secret of a client" });
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "smtp", "namespace": "shop" }, "stringData": data })
}

fn config_map() -> Value {
    let jwks = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
    let data = json!({ "jwks.json": jwks, "confirm.txt": "{{ code }}", "reset.subject": "{{ nothing }}", "other": "x", "logo.svg": "<svg xmlns=\"http://www.w3.org/2000/svg\"/>" });
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "mails", "namespace": "shop" }, "data": data })
}

fn client() -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client", "metadata": { "name": "client", "namespace": "shop" },
        "spec": {
            "appRef": { "name": "shop", "namespace": "shop" },
            "web": { "redirectURLs": ["https://client.example.com/done"] },
        },
    })
}

fn google() -> Value {
    let member = json!({ "clientID": "c", "clientSecretRef": { "name": "smtp", "key": "secret" } });
    json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "Provider", "metadata": { "name": "google", "namespace": "shop" },
        "spec": { "google": member },
    })
}

fn oidc() -> Value {
    let member = json!({ "issuer": "https://id.example", "clientID": "c", "clientSecretRef": { "name": "smtp", "key": "gone" } });
    json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "Provider", "metadata": { "name": "oidc", "namespace": "shop" },
        "spec": { "oidc": member },
    })
}

fn check_input(file: &str, text: &str) {
    // An edit must take effect within two seconds. A hundred password hashes take less.
    let rendered = harness::assert_bounded(100, 64 * 1024 * 1024, || RENDERER.render(file, text));
    for (id, document) in rendered.documents {
        check_document(&id, &document);
    }
}

fn check_document(id: &AppId, document: &[u8]) {
    let text = std::str::from_utf8(document).expect("a document is UTF-8");
    let app: RenderedApp = text.parse().unwrap_or_else(|error| panic!("a server cannot parse {id}: {error}"));
    assert_eq!(app.app_id, *id);
    assert_eq!(app.to_bytes(), document, "a document has one serialization");
    let apps = Apps::new(Ceilings::default());
    apps.put(id, document);
    let served = apps.get(id.as_str()).unwrap_or_else(|| panic!("a server rejects {text}"));
    // The server keeps pages and clients in forms of their own.
    assert_eq!(served.pages.is_some(), app.pages.is_some());
    for client in &app.clients {
        let served = served.client(client.client_id.as_str()).unwrap_or_else(|| panic!("no {}", client.client_id));
        assert_eq!(*served.uid, *client.uid);
    }
    assert_eq!(served.doc, RenderedApp { pages: None, clients: Vec::new(), ..app.clone() });
    // The server accepts every mail template that the operator publishes.
    let mut set = latchkey_crds::templates::TemplateSet::default();
    for (name, source) in &app.mail.templates {
        assert_eq!(set.add(name, source), Ok(()), "{name}");
    }
    for provider in &app.providers {
        assert!(latchkey_server::providers::fuzzing::is_usable(&provider.settings), "{:?}", provider.settings.preset);
    }
}
