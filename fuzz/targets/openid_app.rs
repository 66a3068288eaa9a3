//! An App with Clients of every kind, rendered by the operator's code and loaded by the server's code.

use std::sync::LazyLock;

use latchkey_crds::client::IdTokenAlgorithm;
use latchkey_server::domain::app::App;
use serde_json::{Value, json};

use crate::app::{RENDERER, app_manifest, load};

/// A Client with a secret and with default values, except for its URLs, scopes and ID token algorithm.
pub(crate) const WEB: &str = "web";
/// A public Client, with redirect URLs on the user's device.
pub(crate) const CLI: &str = "cli";
/// A Client that must push its authorization requests and use PKCE.
pub(crate) const STRICT: &str = "strict";
/// A Client with an ID token algorithm for which the App has no key.
pub(crate) const WITHOUT_KEY: &str = "without-key";
/// A Client with a secret that cannot be read.
pub(crate) const UNRESOLVED: &str = "unresolved";
pub(crate) const CLIENTS: [&str; 5] = [WEB, CLI, STRICT, WITHOUT_KEY, UNRESOLVED];

/// The redirect URLs of all Clients except [`CLI`].
pub(crate) const WEB_URLS: [&str; 2] = ["https://web.example.com/done?from=login", "http://127.0.0.1:3000/done"];
pub(crate) const CLI_URLS: [&str; 3] = ["http://127.0.0.1/done", "http://[::1]/", "com.example.cli:/done"];
pub(crate) const POST_LOGOUT_URLS: [&str; 2] = ["https://web.example.com/bye", "http://localhost/bye"];

/// The App `shop`. It signs all tokens with ES256, including ID tokens.
pub(crate) fn openid_app() -> &'static App {
    static APP: LazyLock<App> = LazyLock::new(|| {
        let mut app = app_manifest("shop", "ES256");
        app["spec"]["pages"] = json!({ "mode": "Enabled" });
        let items = [
            app,
            client(WEB, "ES256", "web", json!({ "postLogoutRedirectURLs": POST_LOGOUT_URLS })),
            client(CLI, "ES256", "public", json!({ "redirectURLs": CLI_URLS })),
            requiring_push(client(STRICT, "ES256", "web", json!({ "pkce": "Required" }))),
            client(WITHOUT_KEY, "RS256", "web", json!({})),
            client(UNRESOLVED, "ES256", "web", json!({ "secretRef": { "name": "gone", "key": "secret" } })),
        ];
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        let output = RENDERER.render("app.json", &list.to_string());
        let [document] = &output.documents[..] else { panic!("the App is not rendered: {:?}", output.rejected) };
        let app = load(&document.1);
        for id in CLIENTS {
            assert!(app.client(id).is_some(), "the App has no client {id}: {:?}", output.rejected);
        }
        app
    });
    &APP
}

/// An ID token with these claims, signed by the App.
pub(crate) fn id_token(claims: &Value) -> String {
    openid_app().keys.id_token_signer(IdTokenAlgorithm::ES256).unwrap().sign_id_token(claims).unwrap()
}

/// The manifest of a Client. `kind` is the field of the spec that contains the redirect URLs and `members`: `web` or
/// `public`.
fn client(id: &str, algorithm: &str, kind: &str, members: Value) -> Value {
    let mut own = json!({ "redirectURLs": WEB_URLS });
    for (name, value) in members.as_object().unwrap() {
        own[name] = value.clone();
    }
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Client",
        "metadata": { "name": id, "namespace": "shop" },
        "spec": {
            "appRef": { "name": "shop", "namespace": "shop" },
            "clientID": id,
            kind: own,
            "scopes": ["openid", "profile", "email", "offline_access"],
            "tokens": { "idTokenAlgorithm": algorithm },
        },
    })
}

fn requiring_push(mut client: Value) -> Value {
    client["spec"]["pushedAuthorization"] = json!("Required");
    client
}
