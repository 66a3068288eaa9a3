//! The example manifests of the provider guides.

use std::{fs, path::Path};

use latchkey_crds::rendered::RenderedApp;
use latchkey_server::{
    domain::{
        app::App,
        identity::{AuthorizationRequest, ProviderOperation},
    },
    providers::SocialProviders,
};
use latchkey_tests::{
    mock_provider::PRESETS,
    process::{self, Program},
};
use rcgen::KeyPair;

use super::{CHALLENGE, RENDER_LIMIT, new_client_address};

const GUIDES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/providers");

/// Renders a manifest with the operator's program and returns the rendered document.
fn render(dir: &Path, manifest: &str) -> RenderedApp {
    for folder in ["manifests", "rendered", "keys"] {
        fs::create_dir_all(dir.join(folder)).unwrap();
    }
    fs::write(dir.join("manifests/example.yaml"), manifest).unwrap();
    let operator = process::find_built_program("latchkey-operator").unwrap();
    Program::new("render", operator, dir.join("render.log"))
        .arg("render")
        .path_arg("--from", &dir.join("manifests"))
        .path_arg("--to", &dir.join("rendered"))
        .path_arg("--keys", &dir.join("keys"))
        .args(["--base-url", "https://auth.example.com"])
        .run(RENDER_LIMIT)
        .unwrap();
    fs::read_to_string(dir.join("rendered/shop.json")).unwrap().parse().unwrap()
}

#[tokio::test]
async fn every_preset_has_a_guide_and_an_example_that_renders() {
    let dir = process::fresh_dir("examples");
    for preset in PRESETS.each_ref().map(|profile| profile.preset) {
        let guide = fs::read_to_string(format!("{GUIDES}/{preset}.md")).unwrap();
        for part in ["## At the provider", "callback URL", "status.providers", "## What it gives", "address verified"] {
            assert!(guide.contains(part), "{preset}.md does not say {part}");
        }
        let mut manifest = fs::read_to_string(format!("{GUIDES}/{preset}.yaml")).unwrap();
        if preset == "apple" {
            // A user replaces this text with their key.
            let key = KeyPair::generate().unwrap().serialize_pem();
            let lines: Vec<&str> = key.lines().filter(|line| !line.starts_with("-----")).collect();
            manifest = manifest.replace("paste the lines of the .p8 file here", &lines.join("\n    "));
        }
        let doc = render(&dir.join(preset), &manifest);
        let [provider] = doc.providers.as_slice() else { panic!("{preset}.yaml has one Provider") };
        assert_eq!((provider.name.as_str(), provider.settings.preset.as_str()), (preset, preset));
        // By default, all presets of known providers except Slack link accounts by email address.
        assert_eq!(provider.link_by_email, !["slack", "oidc", "oauth2"].contains(&preset), "{preset}");
        assert!(provider.settings.secret.is_some(), "{preset}.yaml: the Secret resolves");
        let has_discovery = PRESETS.iter().any(|profile| profile.preset == preset && profile.issuer.is_some());
        if !has_discovery {
            // Without discovery, a server needs only the rendered document to compute the authorization URL.
            let app = App::new(doc.clone(), latchkey_crds::rendered::Revision::of(&doc.to_bytes())).unwrap();
            let request = AuthorizationRequest {
                redirect_uri: &format!("https://auth.example.com/shop/{preset}/callback"),
                state: "s",
                code_challenge: CHALLENGE,
                nonce: None,
                prompt: None,
                login_hint: None,
            };
            let providers = SocialProviders::default();
            let provider = &app.doc.providers[0];
            let permit =
                providers.try_acquire(ProviderOperation::Redirect, &app, provider, new_client_address()).unwrap();
            let url = providers.authorization_url(&permit, provider, &request).await.unwrap();
            assert!(url.starts_with("https://") && url.contains("client_id=paste-the-client-id-here"), "{url}");
        }
    }
    drop(fs::remove_dir_all(&dir));
}
