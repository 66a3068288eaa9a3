//! Tests every preset against a scripted provider that behaves like the real provider. Each preset fills one row of a
//! table. Every cell of the table must be filled.

use std::{collections::HashMap, io::Write};

use latchkey_server::domain::identity::{
    InvalidCallback, InvalidProviderToken, InvalidResponse, ProviderEndpoint as At, ProviderError,
};
use latchkey_tests::mock_provider::{ClientSecret, ProviderEndpoint, ProviderUser, RegisteredClient, ScriptedResponse};
use serde_json::json;
use url::Url;

use super::{CHALLENGE, Fixture, NONCE, STATE, VERIFIER, client_id, other_client_id};

/// The expected behaviour of a preset, from the provider's documentation and not from the presets in the server's code.
struct Expected {
    preset: &'static str,
    scope: &'static str,
    authority: &'static str,
    /// The values among `none`, `login`, `consent` and `select_account` that the provider supports.
    prompts: &'static str,
    login_hint: &'static str,
    /// Whether the provider reports that email addresses are verified.
    reports_verified: bool,
    access_tokens: AccessTokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AccessTokens {
    /// The server accepts access tokens of `clientID` and of `additionalClientIDs`.
    AllClients,
    /// The server accepts only access tokens of `clientID`.
    OwnClient,
    /// The server rejects access tokens and accepts ID tokens.
    Rejected,
    /// The provider has no endpoint to check tokens: the login is rejected with 400.
    NoCheck,
}

const STANDARD_PROMPTS: &str = "none login consent select_account";
const MICROSOFT_AUTHORITY: &str = "https://login.microsoftonline.com/72f988bf-86f1-41af-91ab-2d7cd011db47/v2.0";

#[rustfmt::skip]
const EXPECTED: [Expected; 15] = {
    use AccessTokens::{AllClients, Rejected, NoCheck, OwnClient};
    [
        Expected { preset: "google", scope: "openid email profile", authority: "https://accounts.google.com", prompts: "none consent select_account", login_hint: "login_hint", reports_verified: true, access_tokens: AllClients },
        Expected { preset: "apple", scope: "openid email name", authority: "https://appleid.apple.com", prompts: "", login_hint: "", reports_verified: true, access_tokens: Rejected },
        Expected { preset: "github", scope: "read:user user:email", authority: "github:https://github.com", prompts: "select_account", login_hint: "login", reports_verified: true, access_tokens: OwnClient },
        Expected { preset: "gitlab", scope: "openid email profile", authority: "https://gitlab.com", prompts: "", login_hint: "", reports_verified: true, access_tokens: AllClients },
        Expected { preset: "microsoft", scope: "openid email profile", authority: MICROSOFT_AUTHORITY, prompts: STANDARD_PROMPTS, login_hint: "login_hint", reports_verified: true, access_tokens: Rejected },
        Expected { preset: "facebook", scope: "openid email public_profile", authority: "facebook:https://www.facebook.com", prompts: "", login_hint: "", reports_verified: false, access_tokens: OwnClient },
        Expected { preset: "discord", scope: "identify email", authority: "discord:https://discord.com", prompts: "none consent", login_hint: "", reports_verified: true, access_tokens: AllClients },
        Expected { preset: "linkedin", scope: "openid email profile", authority: "https://www.linkedin.com/oauth", prompts: "", login_hint: "", reports_verified: true, access_tokens: OwnClient },
        Expected { preset: "x", scope: "users.read tweet.read users.email", authority: "x:https://x.com", prompts: "", login_hint: "", reports_verified: true, access_tokens: NoCheck },
        Expected { preset: "slack", scope: "openid email profile", authority: "https://slack.com", prompts: "", login_hint: "", reports_verified: true, access_tokens: Rejected },
        Expected { preset: "bitbucket", scope: "account email", authority: "bitbucket:https://bitbucket.org", prompts: "", login_hint: "", reports_verified: true, access_tokens: NoCheck },
        Expected { preset: "twitch", scope: "user:read:email", authority: "twitch:https://www.twitch.tv", prompts: "", login_hint: "", reports_verified: true, access_tokens: AllClients },
        Expected { preset: "spotify", scope: "user-read-email", authority: "spotify:https://accounts.spotify.com", prompts: "", login_hint: "", reports_verified: false, access_tokens: NoCheck },
        Expected { preset: "oidc", scope: "openid email profile", authority: "https://id.provider.test", prompts: STANDARD_PROMPTS, login_hint: "login_hint", reports_verified: true, access_tokens: AllClients },
        Expected { preset: "oauth2", scope: "", authority: "https://oauth.provider.test/me", prompts: "", login_hint: "", reports_verified: true, access_tokens: AllClients },
    ]
};

/// The table row of one preset, which the test fills.
struct PresetRow {
    fixture: Fixture,
    expected: &'static Expected,
    cells: Vec<(&'static str, String)>,
}

/// A person with a subject in the format of the preset's provider.
fn person(preset: &str) -> ProviderUser {
    let subject = if preset == "bitbucket" { "{d301aafa-d676-4ee0-88be-962be7417567}" } else { "5278442198" };
    ProviderUser::new(subject)
}

fn query_parameters(url: &str) -> HashMap<String, String> {
    Url::parse(url).unwrap().query_pairs().into_owned().collect()
}

impl PresetRow {
    async fn new(expected: &'static Expected) -> Self {
        let fixture = Fixture::new(expected.preset).await;
        fixture.upstream.set_user(person(expected.preset).verified("Ada@example.com").named("Ada Lovelace"));
        Self { fixture, expected, cells: Vec::new() }
    }

    fn add_cell(&mut self, check: &'static str, found: impl Into<String>) {
        self.cells.push((check, found.into()));
    }

    fn is_oidc(&self) -> bool {
        self.fixture.upstream.profile().issuer.is_some()
    }

    async fn check_authorization_request(&mut self) {
        let url = self.fixture.authorization_url(None, None).await;
        let query = query_parameters(&url);
        assert_eq!(query["client_id"], client_id(self.expected.preset));
        assert_eq!(query["redirect_uri"], self.fixture.redirect_uri());
        assert_eq!((query["response_type"].as_str(), query["state"].as_str()), ("code", STATE));
        assert_eq!(query.get("scope").map(String::as_str).unwrap_or_default(), self.expected.scope, "{url}");
        assert!(!url.contains("hush") && !query.contains_key("client_secret"));
        self.add_cell("scope", if self.expected.scope.is_empty() { "as configured" } else { self.expected.scope });

        let has_form_post = query.get("response_mode").is_some_and(|mode| mode == "form_post");
        assert_eq!(has_form_post, self.expected.preset == "apple");
        assert_eq!(self.fixture.providers.capabilities(self.fixture.provider()).uses_form_post, has_form_post);
        self.add_cell("callback", if has_form_post { "POST" } else { "GET" });
    }

    async fn check_prompt_and_login_hint(&mut self) {
        let mut accepted = Vec::new();
        for prompt in ["none", "login", "consent", "select_account", "nonsense", "login nonsense"] {
            let url = self.fixture.authorization_url(Some(prompt), None).await;
            if query_parameters(&url).get("prompt").is_some_and(|sent| sent == prompt) {
                accepted.push(prompt);
            } else {
                assert!(!url.contains("prompt"), "{url}");
            }
        }
        assert_eq!(accepted.join(" "), self.expected.prompts, "{}", self.expected.preset);
        self.add_cell("prompt", if accepted.is_empty() { "left out".to_owned() } else { accepted.join(" ") });

        let url = self.fixture.authorization_url(None, Some("ada@example.com&scope=evil")).await;
        let parameters = query_parameters(&url);
        let hint_name =
            parameters.iter().find(|(_, value)| *value == "ada@example.com&scope=evil").map(|(name, _)| name.as_str());
        assert_eq!(hint_name.unwrap_or_default(), self.expected.login_hint, "{url}");
        self.add_cell("login_hint", hint_name.unwrap_or("left out"));
    }

    async fn check_pkce_and_nonce(&mut self) {
        let pkce = self.fixture.upstream.profile().pkce;
        let query = query_parameters(&self.fixture.authorization_url(None, None).await);
        let challenge = query.get("code_challenge").map(String::as_str);
        assert_eq!(challenge, pkce.then_some(CHALLENGE));
        assert_eq!(query.get("code_challenge_method").map(String::as_str), pkce.then_some("S256"));
        let approved = self.fixture.approve().await;
        let with_wrong_verifier = self.fixture.exchange_code(&approved.code, &"x".repeat(43), None).await;
        if pkce {
            assert_refused_at(with_wrong_verifier, At::Token);
            self.add_cell("PKCE", "S256");
        } else {
            with_wrong_verifier.unwrap();
            let sent = self.fixture.upstream.requests_to(ProviderEndpoint::Token);
            assert!(sent.iter().all(|request| !request.form().contains_key("code_verifier")));
            self.add_cell("PKCE", "not sent, breaks the login");
        }

        let returns_nonce = self.fixture.upstream.profile().nonce;
        assert_eq!(query.get("nonce").map(String::as_str), returns_nonce.then_some(NONCE));
        assert_eq!(self.fixture.providers.capabilities(self.fixture.provider()).has_nonce, returns_nonce);
        if returns_nonce {
            for nonce in [json!("another"), json!(null), json!(7)] {
                self.fixture.upstream.edit_claims(move |claims| claims["nonce"] = nonce.clone());
                assert_bad_id_token(self.fixture.log_in().await, InvalidProviderToken::Nonce);
            }
            self.fixture.upstream.clear_scripts();
        }
        self.add_cell("nonce", if returns_nonce { "checked" } else { "not returned" });
    }

    async fn check_client_secret(&mut self) {
        self.fixture.upstream.clear_requests();
        self.fixture.log_in().await.unwrap();
        let request = self.fixture.upstream.requests_to(ProviderEndpoint::Token).pop().unwrap();
        let in_body = request.form().contains_key("client_secret");
        assert_ne!(in_body, request.header("authorization").starts_with("Basic "));
        let authentication = match (self.expected.preset, in_body) {
            ("apple", _) => "JWT in body",
            (_, true) => "in body",
            (_, false) => "Basic",
        };
        let id = client_id(self.expected.preset);
        self.fixture.upstream.set_client(RegisteredClient { id, secret: ClientSecret::Shared("another".to_owned()) });
        assert_refused_at(self.fixture.log_in().await, At::Token);
        self.replace_fixture().await;
        self.add_cell("client secret", authentication);
    }

    /// Replaces the fixture. The new provider knows the client, and the new server has nothing in its caches.
    async fn replace_fixture(&mut self) {
        self.fixture = Fixture::new(self.expected.preset).await;
        self.fixture.upstream.set_user(person(self.expected.preset).verified("Ada@example.com").named("Ada Lovelace"));
    }

    async fn check_code_reuse(&mut self) {
        let approved = self.fixture.approve().await;
        self.fixture.exchange_code(&approved.code, VERIFIER, None).await.unwrap();
        for code in [approved.code.as_str(), "made-up", ""] {
            assert_refused_at(self.fixture.exchange_code(code, VERIFIER, None).await, At::Token);
        }
        self.add_cell("code again", "refused");
    }

    async fn check_identity(&mut self) {
        let preset = self.expected.preset;
        let identity = self.fixture.log_in().await.unwrap();
        assert_eq!(identity.authority, self.expected.authority);
        let subject = person(preset).subject;
        let subject = if preset == "slack" { format!("T0RR-{subject}") } else { subject };
        assert_eq!(identity.subject, subject);
        assert_eq!(identity.name.as_ref().map(|name| name.as_str()), Some("Ada Lovelace"));
        self.add_cell("authority", self.expected.authority);

        let email = identity.email.unwrap();
        assert_eq!(email.email.as_str(), "Ada@example.com", "the primary address, as the provider writes it");
        assert_eq!(email.is_verified, self.expected.reports_verified);
        self.add_cell("verified address", if email.is_verified { "trusted" } else { "never trusted" });

        self.fixture.upstream.set_user(person(preset).unverified("eve@example.com"));
        let identity = self.fixture.log_in().await.unwrap();
        let reported = identity.email.as_ref().map(|email| (email.email.as_str(), email.is_verified));
        assert!(reported.is_none_or(|email| email == ("eve@example.com", false)), "{reported:?}");
        self.add_cell("unverified address", if reported.is_some() { "unverified" } else { "not reported" });

        self.fixture.upstream.set_user(person(preset));
        let identity = self.fixture.log_in().await.unwrap();
        assert_eq!((identity.subject, identity.email), (subject, None));
        self.add_cell("no address", "none");
        self.fixture.upstream.set_user(person(preset).verified("Ada@example.com").named("Ada Lovelace"));
    }

    async fn check_callback_issuer(&mut self) {
        let issuer = match self.expected.preset {
            "github" => Some("https://github.com/login/oauth"),
            _ => self.fixture.upstream.profile().issuer,
        };
        let first_login = self.fixture.approve().await;
        self.fixture.exchange_code(&first_login.code, VERIFIER, issuer).await.unwrap();
        let second_login = self.fixture.approve().await;
        self.fixture.upstream.clear_requests();
        let refused = self.fixture.exchange_code(&second_login.code, VERIFIER, Some("https://evil.example")).await;
        if issuer.is_some() {
            assert_eq!(refused, Err(ProviderError::InvalidCallback(InvalidCallback::IssuerMismatch)));
            assert_eq!(self.fixture.upstream.requests_to(ProviderEndpoint::Token).len(), 0, "the code is not sent");
            self.add_cell("iss of another", "refused");
        } else {
            refused.unwrap();
            self.add_cell("iss of another", "no iss is sent");
        }
    }

    async fn check_id_tokens(&mut self) {
        let id = client_id(self.expected.preset);
        if !self.is_oidc() {
            self.add_cell("ID token at login", "no ID tokens");
            return;
        }
        let upstream = &self.fixture.upstream;
        for client in [id.clone(), other_client_id(self.expected.preset)] {
            let identity = self.fixture.check_token(&upstream.id_token(&client, None).unwrap(), None).await.unwrap();
            assert_eq!(identity.authority, self.expected.authority);
        }
        let foreign_token = upstream.id_token("theirs", None).unwrap();
        assert_invalid_token(self.fixture.check_token(&foreign_token, None).await);
        let returns_nonce = upstream.profile().nonce;
        let with_nonce = upstream.id_token(&id, Some("n")).unwrap();
        assert_eq!(self.fixture.check_token(&with_nonce, Some("n")).await.is_ok(), returns_nonce);
        assert_invalid_token(self.fixture.check_token(&with_nonce, Some("m")).await);
        self.add_cell("ID token at login", "ours");
    }

    async fn check_access_tokens(&mut self) {
        let preset = self.expected.preset;
        let token = |client: &str| self.fixture.upstream.access_token(client);
        let (own, other, foreign) = (token(&client_id(preset)), token(&other_client_id(preset)), token("theirs"));
        let found = match self.expected.access_tokens {
            AccessTokens::NoCheck => {
                for token in [&own, &other, &foreign] {
                    assert_eq!(self.fixture.check_token(token, None).await, Err(ProviderError::NoTokenCheck));
                }
                assert!(self.fixture.upstream.requests_to(ProviderEndpoint::TokenCheck).is_empty());
                "400: no check"
            }
            AccessTokens::Rejected => {
                for token in [&own, &other, &foreign] {
                    assert_invalid_token(self.fixture.check_token(token, None).await);
                }
                "401: ID tokens only"
            }
            accepted @ (AccessTokens::OwnClient | AccessTokens::AllClients) => {
                let identity = self.fixture.check_token(&own, None).await.unwrap();
                assert_eq!(identity.authority, self.expected.authority);
                assert_eq!(identity.subject, person(preset).subject);
                assert_eq!(identity.email.map(|email| email.is_verified), Some(self.expected.reports_verified));
                assert_invalid_token(self.fixture.check_token(&foreign, None).await);
                assert_invalid_token(self.fixture.check_token(&own, Some("n")).await);
                match accepted {
                    AccessTokens::AllClients => {
                        self.fixture.check_token(&other, None).await.unwrap();
                        "ours"
                    }
                    AccessTokens::OwnClient | AccessTokens::Rejected | AccessTokens::NoCheck => {
                        assert_invalid_token(self.fixture.check_token(&other, None).await);
                        "our own client's"
                    }
                }
            }
        };
        self.add_cell("access token at login", found);

        for nonsense in ["", "made-up", "a b", "a\r\nb", "ü", "a.b.c", &"x".repeat(20_000)] {
            match self.fixture.check_token(nonsense, None).await {
                Err(ProviderError::InvalidToken(_) | ProviderError::NoTokenCheck) => {}
                other => panic!("{preset}: {other:?} for {nonsense:?}"),
            }
        }
        self.add_cell("made-up token", "refused");
    }

    /// Scripts every invalid response at every endpoint that a login calls.
    async fn check_invalid_responses(&mut self) {
        let mut refused = 0;
        let replies = [
            ScriptedResponse::html(),
            ScriptedResponse::redirect("https://evil.example/"),
            ScriptedResponse::text(200, "application/json", "{\"access_token\":"),
            ScriptedResponse::text(200, "application/json", ""),
            ScriptedResponse::json(&json!({})),
            ScriptedResponse::json(&json!(null)),
            ScriptedResponse::json(&json!("text")),
            ScriptedResponse::status(401, &json!({ "error": "x", "error_description": "<b>peer text</b>" })),
            ScriptedResponse::status(500, &json!({})),
        ];
        let profile = self.fixture.upstream.profile();
        for endpoint in [
            ProviderEndpoint::Discovery,
            ProviderEndpoint::Keys,
            ProviderEndpoint::Token,
            ProviderEndpoint::UserInfo,
            ProviderEndpoint::Emails,
        ] {
            for response in replies.iter().filter(|_| profile.has(endpoint)) {
                // Uses a new fixture, so that nothing is cached.
                self.replace_fixture().await;
                let outcome = if endpoint == ProviderEndpoint::Discovery {
                    self.fixture.upstream.script(endpoint, response.clone());
                    self.fixture.exchange_code("code", VERIFIER, None).await
                } else {
                    let approved = self.fixture.approve().await;
                    self.fixture.upstream.script(endpoint, response.clone());
                    self.fixture.exchange_code(&approved.code, VERIFIER, None).await
                };
                if self.fixture.upstream.requests_to(endpoint).is_empty() {
                    // The login did not call this endpoint, because the ID token contained all data of the user.
                    outcome.unwrap();
                    continue;
                }
                let error = outcome.expect_err("an invalid response is refused");
                match error {
                    ProviderError::Unavailable(_) | ProviderError::InvalidResponse { .. } => {}
                    other => panic!("{}: {other:?}", self.expected.preset),
                }
                assert!(!format!("{error} {error:?}").contains("peer"));
                refused += 1;
            }
        }
        self.replace_fixture().await;
        self.add_cell("invalid responses", format!("{refused} refused"));
    }
}

fn assert_refused_at<T: std::fmt::Debug>(outcome: Result<T, ProviderError>, at: At) {
    match outcome {
        Err(ProviderError::InvalidResponse { endpoint, .. }) if endpoint == at => {}
        other => panic!("{other:?}, not refused at {at:?}"),
    }
}

fn assert_bad_id_token<T: std::fmt::Debug>(outcome: Result<T, ProviderError>, expected: InvalidProviderToken) {
    let reason = InvalidResponse::IdToken(expected);
    match outcome {
        Err(error) => assert_eq!(error, ProviderError::InvalidResponse { endpoint: At::Token, reason }),
        Ok(accepted) => panic!("{accepted:?}"),
    }
}

fn assert_invalid_token<T: std::fmt::Debug>(outcome: Result<T, ProviderError>) {
    match outcome {
        Err(ProviderError::InvalidToken(_)) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn every_preset_conforms_to_its_providers_documentation() {
    let mut table: Vec<PresetRow> = Vec::new();
    for expected in &EXPECTED {
        let mut row = PresetRow::new(expected).await;
        row.check_authorization_request().await;
        row.check_prompt_and_login_hint().await;
        row.check_pkce_and_nonce().await;
        row.check_client_secret().await;
        row.check_code_reuse().await;
        row.check_identity().await;
        row.check_callback_issuer().await;
        row.check_id_tokens().await;
        row.check_access_tokens().await;
        row.check_invalid_responses().await;
        table.push(row);
    }
    let checks: Vec<&str> = table[0].cells.iter().map(|(check, _)| *check).collect();
    let mut text = format!("\n| preset | {} |\n|---|{}\n", checks.join(" | "), "---|".repeat(checks.len()));
    for row in &table {
        let row_checks: Vec<&str> = row.cells.iter().map(|(check, _)| *check).collect();
        assert_eq!(row_checks, checks, "every cell of {} is filled", row.expected.preset);
        assert!(row.cells.iter().all(|(_, found)| !found.is_empty()));
        let cells: Vec<&str> = row.cells.iter().map(|(_, found)| found.as_str()).collect();
        text.push_str(&format!("| {} | {} |\n", row.expected.preset, cells.join(" | ")));
    }
    // Writes to standard error directly, because the test harness shows the output of `println!` only for failed tests.
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}
