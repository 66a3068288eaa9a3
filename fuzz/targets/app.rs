//! Apps for the targets, rendered by the operator's code and loaded by the server's code.

use std::{collections::BTreeMap, sync::LazyLock};

use latchkey_crds::{
    rendered::{RenderedApp, Revision, SigningAlgorithm},
    types::AppId,
};
use latchkey_operator::fuzzing::FuzzRenderer;
use latchkey_server::domain::{
    app::App,
    clock::{Clock, Env},
};
use serde_json::{Value, json};
use time::{OffsetDateTime, macros::datetime};

pub(crate) const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

/// All targets share this renderer and its keys, because generating RSA keys is slow.
pub(crate) static RENDERER: LazyLock<FuzzRenderer> =
    LazyLock::new(|| FuzzRenderer::new("https://auth.example.com".parse().unwrap(), false));

/// Apps with keys of every algorithm, by appID.
static APPS: LazyLock<BTreeMap<String, App>> = LazyLock::new(|| {
    let apps = [("shop", "ES256"), ("other", "ES256"), ("eddsa", "EdDSA"), ("rsa", "RS256")];
    apps.into_iter()
        .map(|(id, algorithm)| {
            let [document] = &RENDERER.render("app.json", &app_manifest(id, algorithm).to_string()).documents[..]
            else {
                panic!("the App {id} is not rendered")
            };
            (id.to_owned(), load(&document.1))
        })
        .collect()
});

pub(crate) fn app(id: &str) -> &'static App {
    &APPS[id]
}

/// The App that signs with this algorithm.
pub(crate) fn app_signing_with(algorithm: SigningAlgorithm) -> &'static App {
    app(match algorithm {
        SigningAlgorithm::ES256 => "shop",
        SigningAlgorithm::EdDSA => "eddsa",
        SigningAlgorithm::RS256 => "rsa",
    })
}

/// The manifest of an App with this signing algorithm and default values for everything else.
pub(crate) fn app_manifest(id: &str, algorithm: &str) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": id, "namespace": "shop" },
        "spec": { "displayName": "The Shop", "tokens": { "signingAlgorithm": algorithm } },
    })
}

/// Loads a rendered document as a server does.
pub(crate) fn load(document: &[u8]) -> App {
    let text = std::str::from_utf8(document).unwrap();
    App::new(text.parse::<RenderedApp>().unwrap(), Revision::of(document)).unwrap()
}

pub(crate) fn app_id(id: &str) -> AppId {
    id.parse().unwrap()
}

/// An environment with a clock that always shows this time.
pub(crate) fn env_at(now: OffsetDateTime) -> Env {
    struct FixedClock(OffsetDateTime);
    impl Clock for FixedClock {
        fn now(&self) -> OffsetDateTime {
            self.0
        }
    }
    Env { clock: Box::new(FixedClock(now)), ..Env::system() }
}
