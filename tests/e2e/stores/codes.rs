//! Codes: a lookup does not use up a code, a code can be used once, and it expires.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::rendered::{
    AppState, BrowserBinding, CallbackMode, EnumerationProtection, FORMAT, HmacKey, KeyState, PasswordPolicy,
    RenderedApp, RenderedKeys, RenderedMail, RenderedSmtp, RenderedTokens, Revision, SecretString, SignUp,
    SigningAlgorithm, SigningKey,
};
use latchkey_server::domain::{
    app::App,
    clock::Env,
    code::{Code, CodeKey, CodePurpose, CodeRecord},
    ports::Codes,
    user::Epoch,
};
use latchkey_tests::redis::Redis;
use tokio::task::JoinSet;

use super::{Fixture, a_user_id, an_app, now};

fn a_record() -> CodeRecord {
    CodeRecord {
        user: a_user_id(),
        purpose: CodePurpose::Confirm,
        epoch: Epoch(3),
        address: "ada@example.com".to_owned(),
        expires_at: now().unix_timestamp() + 600,
    }
}

/// Returns a loaded App, which can compute the keys of codes.
pub(super) fn loaded_app(fixture: &Fixture) -> App {
    let id = fixture.app.clone();
    let doc = RenderedApp {
        format: FORMAT,
        issuer: format!("https://auth.example.com/{id}").parse().unwrap(),
        name: id.to_string(),
        namespace: "shop".to_owned(),
        state: AppState::Serving,
        incarnation: None,
        handover: None,
        display_name: "The Shop".to_owned(),
        redirect_urls: Vec::new(),
        allowed_origins: Vec::new(),
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
            audiences: Vec::new(),
        },
        limits: BTreeMap::new(),
        client_limits: BTreeMap::new(),
        administrators: Vec::new(),
        importers: Vec::new(),
        webhooks: Vec::new(),
        pages: None,
        clients: Vec::new(),
        unverified_retention_days: 30,
        audit_retention_days: 365,
        providers: Vec::new(),
        keys: RenderedKeys { signing: vec![signing_key()], hmac: vec![hmac_key()], id_tokens: Vec::new() },
        app_id: id,
    };
    let revision = Revision::of(&doc.to_bytes());
    App::new(doc, revision).unwrap()
}

fn a_code_key(fixture: &Fixture) -> CodeKey {
    Code::generate(&Env::system()).key_to_store(&loaded_app(fixture))
}

#[tokio::test]
async fn a_code_can_be_found_repeatedly_and_taken_once() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let (key, unknown, record) = (a_code_key(&fixture), a_code_key(&fixture), a_record());
    stores.store_code(app, &key, &record).await.unwrap();
    let keys = [unknown.clone(), key.clone()];
    for _ in 0..2 {
        assert_eq!(stores.find_code(app, &keys).await.unwrap(), Some((key.clone(), record.clone())));
    }
    assert_eq!(stores.find_code(app, &keys[..1]).await.unwrap(), None);
    assert_eq!(stores.find_code(app, &[]).await.unwrap(), None);
    assert_eq!(stores.find_code(&an_app(), &keys).await.unwrap(), None, "another App's code");
    assert_eq!(stores.consume_code(app, &unknown).await.unwrap(), None);
    assert_eq!(stores.consume_code(app, &key).await.unwrap(), Some(record));
    assert_eq!(stores.consume_code(app, &key).await.unwrap(), None);
    assert_eq!(stores.find_code(app, &keys).await.unwrap(), None);
}

#[tokio::test]
async fn only_one_of_fifty_concurrent_uses_takes_a_code() {
    let fixture = Fixture::new().await;
    let (key, record) = (a_code_key(&fixture), a_record());
    fixture.stores.store_code(&fixture.app, &key, &record).await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let (stores, app, key) = (fixture.stores.clone(), fixture.app.clone(), key.clone());
        tasks.spawn(async move { stores.consume_code(&app, &key).await.unwrap() });
    }
    let taken: Vec<CodeRecord> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(taken, [record]);
}

#[tokio::test]
async fn a_code_that_was_put_back_can_be_taken_again() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let (key, record) = (a_code_key(&fixture), a_record());
    stores.store_code(app, &key, &record).await.unwrap();
    let taken = stores.consume_code(app, &key).await.unwrap().unwrap();
    stores.store_code(app, &key, &taken).await.unwrap();
    assert_eq!(stores.consume_code(app, &key).await.unwrap(), Some(record));
}

#[tokio::test]
async fn a_code_expires_in_redis_soon_after_its_end() {
    let fixture = Fixture::new().await;
    let key = a_code_key(&fixture);
    let record = a_record();
    fixture.stores.store_code(&fixture.app, &key, &record).await.unwrap();
    let mut redis = Redis::shared().await.connect().await.unwrap();
    let redis_key = format!("lk:{{{}:{}}}:code", fixture.app, key.as_str());
    let expires_at: i64 = redis::cmd("EXPIRETIME").arg(redis_key).query_async(&mut redis).await.unwrap();
    assert!((record.expires_at..record.expires_at + 120).contains(&expires_at), "expires at {expires_at}");
}

fn signing_key() -> SigningKey {
    SigningKey {
        id: "s1".to_owned(),
        state: KeyState::Active,
        algorithm: SigningAlgorithm::ES256,
        private_key: SecretString::new(rcgen::KeyPair::generate().unwrap().serialize_pem()),
    }
}

fn hmac_key() -> HmacKey {
    let secret = SecretString::new(STANDARD.encode([7; 32]));
    HmacKey { id: "h1".to_owned(), state: KeyState::Active, secret }
}
