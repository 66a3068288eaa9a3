//! The server's calls to social providers. The operator renders the documents, and scripted providers use the host
//! names of the real providers.

mod conformance;
mod examples;
mod hostile;
mod keys;
mod proxied;
mod reachable;

use std::{
    collections::HashMap,
    fs,
    net::Ipv4Addr,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use latchkey_crds::rendered::{RenderedApp, RenderedProvider, Revision};
use latchkey_server::{
    domain::{
        app::App,
        client::ClientAddress,
        clock::Env,
        identity::{AuthorizationCodeGrant, AuthorizationRequest, ProviderError, ProviderOperation, VerifiedIdentity},
    },
    outbound::{OutboundPolicy, proxy::OutboundProxy},
    providers::{Permit, ProviderOptions, SocialProviders},
};
use latchkey_tests::{
    builders::{self, Provider},
    mock_provider::{AuthorizationResponse, ClientSecret, MockProvider, PRESETS, RegisteredClient},
    process::{self, Program},
};
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// The code verifier of RFC 7636, appendix B.
pub(crate) const VERIFIER: &str = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
/// The code challenge for [`VERIFIER`].
pub(crate) const CHALLENGE: &str = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM";
const NONCE: &str = "n-0S6_WzA2Mj";
const STATE: &str = "af0ifjsldkj";
const APPLE_TEAM_ID: &str = "ABCDE12345";
const APPLE_KEY_ID: &str = "12345ABCDE";
const RENDER_LIMIT: Duration = Duration::from_secs(60);

/// The rendered document of an App with a Provider of every preset, and the secret of each Provider's client, by
/// preset.
static RENDERED: OnceCell<(RenderedApp, HashMap<String, String>)> = OnceCell::const_new();

/// A Provider of one preset, as a server loads it, and the scripted provider that this Provider names.
pub(crate) struct Fixture {
    pub(crate) upstream: MockProvider,
    pub(crate) app: App,
    pub(crate) providers: SocialProviders,
    preset: &'static str,
}

// === impl Fixture ===

impl Fixture {
    pub(crate) async fn new(preset: &'static str) -> Self {
        let (doc, secrets) = RENDERED.get_or_init(render).await;
        let revision = Revision::of(&doc.to_bytes());
        let app = App::new(doc.clone(), revision).unwrap();
        let client = RegisteredClient { id: client_id(preset), secret: client_secret(preset, &secrets[preset]) };
        let upstream = MockProvider::start(preset, client).await.unwrap();
        let providers = SocialProviders::new(provider_options(&upstream), Env::system());
        Self { upstream, app, providers, preset }
    }

    pub(crate) fn provider(&self) -> &RenderedProvider {
        self.app.doc.providers.iter().find(|provider| provider.settings.preset == self.preset).unwrap()
    }

    fn redirect_uri(&self) -> String {
        format!("{}/{}/callback", self.app.doc.issuer.as_str(), self.provider().name.as_str())
    }

    async fn authorization_url(&self, prompt: Option<&str>, login_hint: Option<&str>) -> String {
        let redirect_uri = self.redirect_uri();
        let request = AuthorizationRequest {
            redirect_uri: &redirect_uri,
            state: STATE,
            code_challenge: CHALLENGE,
            nonce: Some(NONCE),
            prompt,
            login_hint,
        };
        let permit = self.permit(ProviderOperation::Redirect).unwrap();
        self.providers.authorization_url(&permit, self.provider(), &request).await.unwrap()
    }

    /// Authorizes the login at the provider, as a user does in a browser.
    async fn approve(&self) -> AuthorizationResponse {
        let approved = self.upstream.authorize(&self.authorization_url(None, None).await);
        assert_eq!(approved.state, STATE);
        approved
    }

    async fn exchange_code(
        &self,
        code: &str,
        verifier: &str,
        iss: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let redirect_uri = self.redirect_uri();
        let grant = AuthorizationCodeGrant {
            redirect_uri: &redirect_uri,
            code,
            code_verifier: verifier,
            nonce: Some(NONCE).filter(|_| self.providers.capabilities(self.provider()).has_nonce),
            iss,
            posted_user: Some(r#"{"name":{"firstName":"Ada","lastName":"Lovelace"}}"#),
        };
        let permit = self.permit(ProviderOperation::Callback)?;
        self.providers.exchange_code(&permit, self.provider(), &grant).await
    }

    /// Runs the whole login.
    async fn log_in(&self) -> Result<VerifiedIdentity, ProviderError> {
        let approved = self.approve().await;
        self.exchange_code(&approved.code, VERIFIER, None).await
    }

    async fn check_token(&self, token: &str, nonce: Option<&str>) -> Result<VerifiedIdentity, ProviderError> {
        self.check_token_with(&self.providers, token, nonce, new_client_address()).await
    }

    async fn check_token_with(
        &self,
        providers: &SocialProviders,
        token: &str,
        nonce: Option<&str>,
        client: ClientAddress,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let permit = providers.try_acquire(ProviderOperation::Login, &self.app, self.provider(), client)?;
        providers.validate_token(&permit, self.provider(), token, nonce).await
    }

    /// A permit for a provider call. Each permit is for a new client address.
    fn permit(&self, operation: ProviderOperation) -> Result<Permit, ProviderError> {
        self.providers.try_acquire(operation, &self.app, self.provider(), new_client_address())
    }

    /// Like [`Self::new`], with a change to the Provider in the rendered document.
    async fn with_changed_provider(preset: &'static str, change: impl FnOnce(&mut RenderedProvider)) -> Self {
        let fixture = Self::new(preset).await;
        let mut doc = fixture.app.doc.clone();
        change(doc.providers.iter_mut().find(|provider| provider.settings.preset == preset).unwrap());
        let revision = Revision::of(&doc.to_bytes());
        Self { app: App::new(doc, revision).unwrap(), ..fixture }
    }
}

fn provider_options(upstream: &MockProvider) -> ProviderOptions {
    ProviderOptions {
        reach: OutboundPolicy::default(),
        proxy: OutboundProxy::default(),
        test_hosts: upstream.hosts(),
        test_roots: vec![CertificateDer::from_pem_slice(upstream.ca().as_bytes()).unwrap()],
    }
}

/// A client address that no earlier call has returned.
fn new_client_address() -> ClientAddress {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    ClientAddress::from_ip(Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number).into())
}

fn client_id(preset: &str) -> String {
    format!("client-of-{preset}")
}

/// The ID of another client of the same owner, listed in `additionalClientIDs`.
fn other_client_id(preset: &str) -> String {
    format!("mobile-of-{preset}")
}

fn client_secret(preset: &str, secret: &str) -> ClientSecret {
    if preset == "apple" {
        ClientSecret::Key { team: APPLE_TEAM_ID.to_owned(), id: APPLE_KEY_ID.to_owned(), pem: secret.to_owned() }
    } else {
        ClientSecret::Shared(secret.to_owned())
    }
}

/// The fields that a Provider of this preset has in addition to those that [`Provider::new`] sets. For Apple,
/// [`render`] sets the additional fields.
fn preset_fields(preset: &str) -> Value {
    match preset {
        "oidc" => json!({ "issuer": "https://id.provider.test" }),
        "oauth2" => json!({
            "authorizationURL": "https://oauth.provider.test/authorize",
            "tokenURL": "https://oauth.provider.test/token",
            "userInfoURL": "https://oauth.provider.test/me",
            "introspectionURL": "https://oauth.provider.test/introspect",
            "clientAuthentication": "Post",
            "claims": { "subject": "id", "email": "mail", "emailVerified": "mail_confirmed", "name": "full_name" },
        }),
        _ => json!({}),
    }
}

async fn render() -> (RenderedApp, HashMap<String, String>) {
    let dir = process::fresh_dir("providers");
    for folder in ["manifests", "rendered", "keys"] {
        fs::create_dir_all(dir.join(folder)).unwrap();
    }
    let mut app = builders::App::new("social");
    let (mut objects, mut secrets) = (Vec::new(), HashMap::new());
    for preset in PRESETS.each_ref().map(|profile| profile.preset) {
        let mut provider = Provider::new(preset, preset).set("additionalClientIDs", vec![other_client_id(preset)]);
        if preset == "apple" {
            provider = provider.with_secret(&KeyPair::generate().unwrap().serialize_pem());
        }
        for (field, value) in preset_fields(preset).as_object().unwrap() {
            provider = provider.set(field, value.clone());
        }
        let mut object = provider.object("tests");
        if preset == "apple" {
            let apple = object["spec"]["apple"].as_object_mut().unwrap();
            let reference = apple.remove("clientSecretRef").unwrap();
            apple.extend([
                ("privateKeyRef".to_owned(), reference),
                ("teamID".to_owned(), json!(APPLE_TEAM_ID)),
                ("keyID".to_owned(), json!(APPLE_KEY_ID)),
            ]);
        }
        secrets.insert(preset.to_owned(), provider.secret().to_owned());
        objects.extend([object, provider.secret_object("tests")]);
        app = app.provider(&provider);
    }
    objects.extend(app.objects("tests"));
    for (number, object) in objects.iter().enumerate() {
        fs::write(dir.join(format!("manifests/{number}.yaml")), object.to_string()).unwrap();
    }
    let operator = process::find_built_program("latchkey-operator").unwrap();
    Program::new("render", operator, dir.join("render.log"))
        .arg("render")
        .path_arg("--from", &dir.join("manifests"))
        .path_arg("--to", &dir.join("rendered"))
        .path_arg("--keys", &dir.join("keys"))
        .args(["--base-url", "https://auth.example.com"])
        .run(RENDER_LIMIT)
        .unwrap();
    let document = fs::read_to_string(dir.join(format!("rendered/{}.json", app.id()))).unwrap();
    drop(fs::remove_dir_all(&dir));
    (document.parse().unwrap(), secrets)
}
