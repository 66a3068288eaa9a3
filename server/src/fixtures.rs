//! Rendered Apps for unit tests.

use std::{collections::BTreeMap, sync::LazyLock};

use aws_lc_rs::{
    encoding::AsDer,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    client::{ClientScope, Consent, IdTokenAlgorithm},
    pages::{PageLinks, ThemeMode},
    rendered::{
        AppState, BrowserBinding, CallbackMode, EnumerationProtection, FORMAT, HmacKey, KeyState, LimitName,
        PasswordPolicy, RenderedApp, RenderedClient, RenderedClientAuthentication, RenderedClientGroups,
        RenderedClientTokens, RenderedColors, RenderedKeys, RenderedMail, RenderedPages, RenderedPagesSession,
        RenderedSmtp, RenderedTheme, RenderedTokens, Revision, SecretString, SignUp, SigningAlgorithm, SigningKey,
    },
};

use crate::domain::app::App;

/// Builds the document of an App in state `Serving`, with default settings and one allowed origin.
pub(crate) fn rendered(id: &str) -> RenderedApp {
    RenderedApp {
        format: FORMAT,
        app_id: id.parse().unwrap(),
        namespace: "shop".to_owned(),
        name: id.to_owned(),
        state: AppState::Serving,
        incarnation: None,
        handover: None,
        issuer: format!("https://auth.example.com/{id}").parse().unwrap(),
        display_name: "The Shop".to_owned(),
        redirect_urls: Vec::new(),
        allowed_origins: vec!["https://shop.example.com".parse().unwrap()],
        sign_up: SignUp::Open,
        allowed_email_domains: Vec::new(),
        require_verified_email: false,
        enumeration_protection: EnumerationProtection::Strict,
        allow_users_without_email: false,
        browser_binding: BrowserBinding::Auto,
        callback_mode: CallbackMode::Query,
        password: PasswordPolicy {
            minimum_length: 8,
            minimum_strength: 2,
            foreign_hash_retention_days: None,
            firebase_scrypt: None,
        },
        mail: RenderedMail {
            from: None,
            confirm_url: None,
            reset_url: None,
            confirm_code_lifetime_seconds: 86_400,
            reset_code_lifetime_seconds: 1800,
            own_invitation_url: None,
            own_invitation_code_lifetime_seconds: None,
            templates: BTreeMap::new(),
            smtp: RenderedSmtp::Install,
        },
        tokens: RenderedTokens {
            signing_algorithm: SigningAlgorithm::ES256,
            access_lifetime_seconds: 900,
            refresh_idle_seconds: 2_592_000,
            session_lifetime_seconds: 7_776_000,
            refresh_grace_seconds: 30,
            audiences: vec![id.to_owned()],
        },
        limits: LimitName::ALL.into_iter().map(|limit| (limit, limit.default_windows())).collect(),
        client_limits: BTreeMap::new(),
        administrators: Vec::new(),
        importers: Vec::new(),
        webhooks: Vec::new(),
        pages: None,
        clients: Vec::new(),
        unverified_retention_days: 30,
        audit_retention_days: 365,
        providers: Vec::new(),
        keys: RenderedKeys {
            signing: vec![signing_key("s1", SigningAlgorithm::ES256, KeyState::Active)],
            hmac: vec![hmac_key("h1", 1, KeyState::Active)],
            id_tokens: Vec::new(),
        },
    }
}

/// Builds the pages of an App in English and German, without an own host.
pub(crate) fn pages() -> Box<RenderedPages> {
    let colors = |accent: &str, background: &str| RenderedColors {
        accent: accent.parse().unwrap(),
        background: background.parse().unwrap(),
    };
    Box::new(RenderedPages {
        host: None,
        languages: vec!["en".to_owned(), "de".to_owned()],
        theme: RenderedTheme {
            mode: ThemeMode::Auto,
            light: colors("#1a56db", "#ffffff"),
            dark: colors("#8ab4f8", "#121212"),
            logo: None,
        },
        texts: BTreeMap::new(),
        links: PageLinks::default(),
        session: RenderedPagesSession { idle_seconds: 43_200, lifetime_seconds: 1_209_600 },
    })
}

/// An RSA key. It is generated only once, because generating an RSA key takes long.
static RSA_KEY: LazyLock<SigningKey> = LazyLock::new(|| signing_key("s2", SigningAlgorithm::RS256, KeyState::Active));

/// Builds an App that is an OpenID provider: with pages, a key for RS256, and these clients.
pub(crate) fn provider(clients: Vec<RenderedClient>) -> App {
    let mut doc = rendered("shop");
    doc.pages = Some(pages());
    doc.keys.id_tokens = vec![RSA_KEY.clone()];
    doc.clients = clients;
    app(doc)
}

/// The secret of the clients that [`client`] builds.
pub(crate) const CLIENT_SECRET: &str = "lks_correct-horse-battery-staple";

/// The SHA-256 of a client's secret, encoded as in documents.
pub(crate) fn secret_digest(secret: &str) -> String {
    STANDARD.encode(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, secret.as_bytes()))
}

/// Builds a client with a secret and all scopes. Its ID tokens are signed with ES256.
pub(crate) fn client(id: &str) -> RenderedClient {
    RenderedClient {
        client_id: id.parse().unwrap(),
        namespace: "shop".to_owned(),
        name: id.to_owned(),
        uid: format!("uid-{id}"),
        generation: 1,
        display_name: id.to_owned(),
        authentication: RenderedClientAuthentication::Secret { sha256: secret_digest(CLIENT_SECRET), previous: None },
        redirect_urls: vec![format!("https://{id}.example.com/callback").parse().unwrap()],
        post_logout_redirect_urls: Vec::new(),
        pkce_required: false,
        pushed_authorization_required: false,
        scopes: vec![
            ClientScope::OpenId,
            ClientScope::Profile,
            ClientScope::Email,
            ClientScope::Groups,
            ClientScope::OfflineAccess,
        ],
        consent: Consent::Never,
        allowed_groups: Vec::new(),
        groups: RenderedClientGroups { only: Vec::new(), max: 100 },
        tokens: RenderedClientTokens {
            id_token_algorithm: IdTokenAlgorithm::ES256,
            id_token_lifetime_seconds: 3600,
            audiences: Vec::new(),
        },
    }
}

pub(crate) fn app(doc: RenderedApp) -> App {
    let revision = Revision::of(&doc.to_bytes());
    App::new(doc, revision).unwrap()
}

/// Builds a new random key for the algorithm.
pub(crate) fn signing_key(id: &str, algorithm: SigningAlgorithm, state: KeyState) -> SigningKey {
    let random = SystemRandom::new();
    let der = match algorithm {
        SigningAlgorithm::ES256 => {
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap().as_ref().to_vec()
        }
        SigningAlgorithm::EdDSA => Ed25519KeyPair::generate_pkcs8v1(&random).unwrap().as_ref().to_vec(),
        SigningAlgorithm::RS256 => {
            let pair = aws_lc_rs::rsa::KeyPair::generate(aws_lc_rs::rsa::KeySize::Rsa2048).unwrap();
            let der: aws_lc_rs::encoding::Pkcs8V1Der<'_> = pair.as_der().unwrap();
            der.as_ref().to_vec()
        }
    };
    let body = STANDARD.encode(der);
    let private_key = SecretString::new(format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n"));
    SigningKey { id: id.to_owned(), state, algorithm, private_key }
}

/// Builds an HMAC key of 32 bytes, each with the value `fill`.
pub(crate) fn hmac_key(id: &str, fill: u8, state: KeyState) -> HmacKey {
    HmacKey { id: id.to_owned(), state, secret: SecretString::new(STANDARD.encode([fill; 32])) }
}
