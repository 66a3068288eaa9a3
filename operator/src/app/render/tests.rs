use std::collections::BTreeSet;

use latchkey_crds::{
    client::IdTokenAlgorithm,
    rendered::{FORMAT, RenderedClientAuthentication},
    types::RedirectUrl,
};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::*;
use crate::{
    app::{
        resolve::{Ownership, resolve},
        validate::validate,
    },
    client::fixtures::{app as app_with, client_with},
    facts::Settings,
    manifests::Manifests,
};

const ROOM: Room = Room { document: MAX_DOCUMENT_SIZE, clients: usize::MAX };
const ROOM_OF_OLDER_SERVERS: Room = Room { document: MAX_APP_SIZE, clients: usize::MAX };

/// The App `identity/platform` with these fields.
fn app(fields: Value) -> ValidatedApp {
    let facts = resolve(app_with(fields), Ownership::Ours, false, &Manifests::default());
    let settings = Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false };
    validate(&facts, &settings).unwrap()
}

/// The first keys of an App, and an RS256 key for ID tokens.
fn keys() -> KeyDocument {
    let first = first_keys();
    let algorithms = BTreeSet::from([IdTokenAlgorithm::RS256]);
    first.changed_to_id_token_algorithms(&algorithms, OffsetDateTime::UNIX_EPOCH).unwrap().unwrap()
}

fn first_keys() -> KeyDocument {
    let algorithm = latchkey_crds::rendered::SigningAlgorithm::ES256;
    KeyDocument::first(&"platform".parse().unwrap(), algorithm, OffsetDateTime::UNIX_EPOCH).unwrap()
}

/// Returns clients with about 10 KiB each.
fn clients(count: usize) -> Vec<RenderedClient> {
    let url = |number: usize| -> RedirectUrl {
        format!("https://grafana.example.com/{number}/{}", "a".repeat(984)).parse().unwrap()
    };
    let client = |number: usize| {
        let client = client_with("identity", &format!("c{number}"), json!({}));
        let client_id = client.client_id().unwrap();
        let rendered = crate::client::render::render(&client, client_id, RenderedClientAuthentication::Unresolved);
        RenderedClient { redirect_urls: (0..10).map(url).collect(), ..rendered }
    };
    (0..count).map(client).collect()
}

fn document(rendered: &Rendered) -> RenderedApp {
    std::str::from_utf8(&rendered.bytes).unwrap().parse().unwrap()
}

/// Adds templates, so that the document without clients has this size.
fn grow(app: &mut ValidatedApp, size: usize) {
    let before = render(app, &first_keys(), ROOM).unwrap().bytes.len();
    let text = "a".repeat(size - before - "\"reset.txt\":\"\"".len());
    app.mail.templates.insert("reset.txt".to_owned(), text.into());
    assert_eq!(render(app, &first_keys(), ROOM).unwrap().bytes.len(), size);
}

#[test]
fn a_document_without_clients_has_no_new_fields_and_an_earlier_format() {
    for (fields, format) in [(json!({}), 3), (json!({ "pages": { "mode": "Disabled" } }), 1)] {
        let rendered = render(&app(fields), &first_keys(), ROOM).unwrap();
        assert_eq!(document(&rendered).format, format);
        let text = String::from_utf8(rendered.bytes).unwrap();
        for field in ["clients", "clientLimits", "idTokens", "groups"] {
            assert!(!text.contains(&format!("\"{field}\"")), "{field}");
        }
    }
}

#[test]
fn limits_of_clients_need_no_new_format() {
    let limits = json!({ "clientFailuresPerClientAddress": [{ "count": 1, "windowSeconds": 60 }] });
    let rendered = document(&render(&app(json!({ "limits": limits })), &first_keys(), ROOM).unwrap());
    assert_eq!((rendered.format, rendered.client_limits.len()), (3, 1));
}

#[test]
fn clients_and_their_keys_need_format_4_but_the_app_does_not() {
    let mut app = app(json!({}));
    app.clients = clients(2);
    let rendered = render(&app, &keys(), ROOM).unwrap();
    assert_eq!(rendered.client_count, 2);
    let rendered = document(&rendered);
    assert_eq!((rendered.format, rendered.clients.len(), rendered.keys.id_tokens.len()), (FORMAT, 2, 1));
    assert_eq!(needed_format(&app).0, 3);
    app.clients.clear();
    let keys_only = document(&render(&app, &keys(), ROOM).unwrap());
    assert_eq!((keys_only.format, keys_only.keys.id_tokens.len()), (FORMAT, 1), "tokens of these keys are still valid");
}

#[test]
fn the_revision_without_clients_depends_neither_on_clients_nor_on_their_keys() {
    let mut app = app(json!({}));
    let keys = keys();
    let without_keys = KeyDocument { id_tokens: Vec::new(), ..keys.clone() };
    let alone = render(&app, &without_keys, ROOM).unwrap();
    assert_eq!(alone.app_part, alone.revision);
    app.clients = clients(2);
    let with_clients = render(&app, &keys, ROOM).unwrap();
    assert_ne!(with_clients.revision, alone.revision);
    assert_eq!(with_clients.app_part, alone.app_part);
    app.display_name.push('a');
    assert_ne!(render(&app, &keys, ROOM).unwrap().app_part, alone.app_part);
}

#[test]
fn an_app_without_its_clients_has_at_most_512_kib() {
    let mut app = app(json!({}));
    grow(&mut app, MAX_APP_SIZE);
    app.clients = clients(20);
    let rendered = render(&app, &keys(), ROOM).unwrap();
    assert_eq!(rendered.client_count, 20);
    assert!(rendered.bytes.len() > MAX_APP_SIZE && rendered.bytes.len() <= MAX_DOCUMENT_SIZE);
    app.display_name.push('a');
    assert_eq!(render(&app, &keys(), ROOM).err(), Some(TooLarge));
}

#[test]
fn the_newest_clients_that_do_not_fit_are_left_out() {
    // The same keys are used for all documents, because the sizes of two RSA keys can differ by some bytes.
    let (mut app, keys) = (app(json!({})), keys());
    app.clients = clients(10);
    let all = render(&app, &keys, ROOM).unwrap().bytes.len();
    let exact = Room { document: all, ..ROOM };
    assert_eq!(render(&app, &keys, exact).unwrap().client_count, 10);
    let rendered = render(&app, &keys, Room { document: all - 1, ..ROOM }).unwrap();
    assert_eq!((rendered.client_count, document(&rendered).clients), (9, app.clients[..9].to_vec()));
    // The quota of the namespace leaves room for three clients.
    let three = Room { clients: 3 * (size(&app.clients[0]) + 1), ..ROOM };
    assert_eq!(render(&app, &keys, three).unwrap().client_count, 3);
}

#[test]
fn servers_that_do_not_know_clients_get_at_most_512_kib() {
    let mut app = app(json!({}));
    grow(&mut app, MAX_APP_SIZE - 25 * 1024);
    app.clients = clients(5);
    let rendered = render(&app, &keys(), ROOM_OF_OLDER_SERVERS).unwrap();
    assert_eq!(rendered.client_count, 2);
    assert!(rendered.bytes.len() <= MAX_APP_SIZE);
    assert_eq!(document(&rendered).clients[0].client_id.as_str(), "identity.c0", "the oldest");

    // The App itself fills the document, so there is no room for clients, nor for the keys for their ID tokens.
    let without_clients = render(&app, &first_keys(), Room::APP_ONLY).unwrap().bytes.len();
    grow_by(&mut app, MAX_APP_SIZE - without_clients);
    let rendered = render(&app, &keys(), ROOM_OF_OLDER_SERVERS).unwrap();
    assert_eq!((rendered.client_count, rendered.bytes.len()), (0, MAX_APP_SIZE));
    assert_eq!(document(&rendered).format, 3);
}

/// Makes the document larger by this number of bytes.
fn grow_by(app: &mut ValidatedApp, bytes: usize) {
    let text = app.mail.templates["reset.txt"].to_string() + &"a".repeat(bytes);
    app.mail.templates.insert("reset.txt".to_owned(), text.into());
}

#[test]
fn the_room_depends_on_the_oldest_server() {
    assert_eq!(Room::new(3, 7), Room { document: MAX_APP_SIZE, clients: 7 });
    assert_eq!(Room::new(FORMAT, u64::MAX), ROOM);
}
