//! Every preset against a scripted provider that speaks as the real one: one table, and every cell is filled.

use std::{collections::HashMap, io::Write};

use latchkey_server::domain::identity::{BadCallback, BadToken, Fault, Place as At, ProviderError};
use latchkey_tests::upstream::{Client, Person, Place, Reply, Secret};
use serde_json::json;
use url::Url;

use super::{CHALLENGE, Fixture, NONCE, STATE, VERIFIER, client_id, other_client_id};

/// What a preset is to do; from the providers' documentation, not from the server's table.
struct Expected {
    preset: &'static str,
    scope: &'static str,
    authority: &'static str,
    /// Of `none`, `login`, `consent`, `select_account`.
    prompts: &'static str,
    login_hint: &'static str,
    /// It says which addresses are verified.
    verifies: bool,
    access_tokens: AccessTokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AccessTokens {
    /// Ours, and those of `additionalClientIDs`.
    AllOurs,
    /// Those of our own client.
    Own,
    /// Not taken; ID tokens are.
    No,
    /// There is no check at all: 400.
    NoCheck,
}

const STANDARD_PROMPTS: &str = "none login consent select_account";
const MICROSOFT: &str = "https://login.microsoftonline.com/72f988bf-86f1-41af-91ab-2d7cd011db47/v2.0";

#[rustfmt::skip]
const EXPECTED: [Expected; 15] = {
    use AccessTokens::{AllOurs, No, NoCheck, Own};
    [
        Expected { preset: "google", scope: "openid email profile", authority: "https://accounts.google.com", prompts: "none consent select_account", login_hint: "login_hint", verifies: true, access_tokens: AllOurs },
        Expected { preset: "apple", scope: "openid email name", authority: "https://appleid.apple.com", prompts: "", login_hint: "", verifies: true, access_tokens: No },
        Expected { preset: "github", scope: "read:user user:email", authority: "github:https://github.com", prompts: "select_account", login_hint: "login", verifies: true, access_tokens: Own },
        Expected { preset: "gitlab", scope: "openid email profile", authority: "https://gitlab.com", prompts: "", login_hint: "", verifies: true, access_tokens: AllOurs },
        Expected { preset: "microsoft", scope: "openid email profile", authority: MICROSOFT, prompts: STANDARD_PROMPTS, login_hint: "login_hint", verifies: true, access_tokens: No },
        Expected { preset: "facebook", scope: "openid email public_profile", authority: "facebook:https://www.facebook.com", prompts: "", login_hint: "", verifies: false, access_tokens: Own },
        Expected { preset: "discord", scope: "identify email", authority: "discord:https://discord.com", prompts: "none consent", login_hint: "", verifies: true, access_tokens: AllOurs },
        Expected { preset: "linkedin", scope: "openid email profile", authority: "https://www.linkedin.com/oauth", prompts: "", login_hint: "", verifies: true, access_tokens: Own },
        Expected { preset: "x", scope: "users.read tweet.read users.email", authority: "x:https://x.com", prompts: "", login_hint: "", verifies: true, access_tokens: NoCheck },
        Expected { preset: "slack", scope: "openid email profile", authority: "https://slack.com", prompts: "", login_hint: "", verifies: true, access_tokens: No },
        Expected { preset: "bitbucket", scope: "account email", authority: "bitbucket:https://bitbucket.org", prompts: "", login_hint: "", verifies: true, access_tokens: NoCheck },
        Expected { preset: "twitch", scope: "user:read:email", authority: "twitch:https://www.twitch.tv", prompts: "", login_hint: "", verifies: true, access_tokens: AllOurs },
        Expected { preset: "spotify", scope: "user-read-email", authority: "spotify:https://accounts.spotify.com", prompts: "", login_hint: "", verifies: false, access_tokens: NoCheck },
        Expected { preset: "oidc", scope: "openid email profile", authority: "https://id.provider.test", prompts: STANDARD_PROMPTS, login_hint: "login_hint", verifies: true, access_tokens: AllOurs },
        Expected { preset: "oauth2", scope: "", authority: "https://oauth.provider.test/me", prompts: "", login_hint: "", verifies: true, access_tokens: AllOurs },
    ]
};

/// One preset's row, as it comes to be.
struct Row {
    fixture: Fixture,
    expected: &'static Expected,
    cells: Vec<(&'static str, String)>,
}

/// A subject as this provider has it.
fn person(preset: &str) -> Person {
    let subject = if preset == "bitbucket" { "{d301aafa-d676-4ee0-88be-962be7417567}" } else { "5278442198" };
    Person::new(subject)
}

fn query(url: &str) -> HashMap<String, String> {
    Url::parse(url).unwrap().query_pairs().into_owned().collect()
}

impl Row {
    async fn new(expected: &'static Expected) -> Self {
        let fixture = Fixture::new(expected.preset).await;
        fixture.upstream.person(person(expected.preset).verified("Ada@example.com").named("Ada Lovelace"));
        Self { fixture, expected, cells: Vec::new() }
    }

    fn cell(&mut self, check: &'static str, found: impl Into<String>) {
        self.cells.push((check, found.into()));
    }

    fn is_oidc(&self) -> bool {
        self.fixture.upstream.shape().issuer.is_some()
    }

    async fn asks(&mut self) {
        let url = self.fixture.authorization_url(None, None).await;
        let query = query(&url);
        assert_eq!(query["client_id"], client_id(self.expected.preset));
        assert_eq!(query["redirect_uri"], self.fixture.redirect_uri());
        assert_eq!((query["response_type"].as_str(), query["state"].as_str()), ("code", STATE));
        assert_eq!(query.get("scope").map(String::as_str).unwrap_or_default(), self.expected.scope, "{url}");
        assert!(!url.contains("hush") && !query.contains_key("client_secret"));
        self.cell("scope", if self.expected.scope.is_empty() { "as configured" } else { self.expected.scope });

        let has_form_post = query.get("response_mode").is_some_and(|mode| mode == "form_post");
        assert_eq!(has_form_post, self.expected.preset == "apple");
        assert_eq!(self.fixture.providers.traits_of(self.fixture.provider()).form_post, has_form_post);
        self.cell("callback", if has_form_post { "POST" } else { "GET" });
    }

    async fn passes_hints_on(&mut self) {
        let mut passed = Vec::new();
        for prompt in ["none", "login", "consent", "select_account", "nonsense", "login nonsense"] {
            let url = self.fixture.authorization_url(Some(prompt), None).await;
            if query(&url).get("prompt").is_some_and(|told| told == prompt) {
                passed.push(prompt);
            } else {
                assert!(!url.contains("prompt"), "{url}");
            }
        }
        assert_eq!(passed.join(" "), self.expected.prompts, "{}", self.expected.preset);
        self.cell("prompt", if passed.is_empty() { "left out".to_owned() } else { passed.join(" ") });

        let url = self.fixture.authorization_url(None, Some("ada@example.com&scope=evil")).await;
        let told = query(&url);
        let told = told.iter().find(|(_, value)| *value == "ada@example.com&scope=evil").map(|(name, _)| name.as_str());
        assert_eq!(told.unwrap_or_default(), self.expected.login_hint, "{url}");
        self.cell("login_hint", told.unwrap_or("left out"));
    }

    async fn proves_the_code_is_its_own(&mut self) {
        let pkce = self.fixture.upstream.shape().pkce;
        let query = query(&self.fixture.authorization_url(None, None).await);
        let challenge = query.get("code_challenge").map(String::as_str);
        assert_eq!(challenge, pkce.then_some(CHALLENGE));
        assert_eq!(query.get("code_challenge_method").map(String::as_str), pkce.then_some("S256"));
        let approved = self.fixture.approve().await;
        let stolen = self.fixture.redeem(&approved.code, &"x".repeat(43), None).await;
        if pkce {
            refused_at(stolen, At::Token);
            self.cell("PKCE", "S256");
        } else {
            stolen.unwrap();
            let sent = self.fixture.upstream.seen_at(Place::Token);
            assert!(sent.iter().all(|seen| !seen.form().contains_key("code_verifier")));
            self.cell("PKCE", "it breaks with it");
        }

        let repeats = self.fixture.upstream.shape().nonce;
        assert_eq!(query.get("nonce").map(String::as_str), repeats.then_some(NONCE));
        assert_eq!(self.fixture.providers.traits_of(self.fixture.provider()).nonce, repeats);
        if repeats {
            for nonce in [json!("another"), json!(null), json!(7)] {
                self.fixture.upstream.tweak(move |claims| claims["nonce"] = nonce.clone());
                bad_id_token(self.fixture.log_in().await, BadToken::Nonce);
            }
            self.fixture.upstream.unscript();
        }
        self.cell("nonce", if repeats { "checked" } else { "not repeated by it" });
    }

    async fn shows_its_secret(&mut self) {
        self.fixture.upstream.forget();
        self.fixture.log_in().await.unwrap();
        let seen = self.fixture.upstream.seen_at(Place::Token).pop().unwrap();
        let in_body = seen.form().contains_key("client_secret");
        assert_ne!(in_body, seen.header("authorization").starts_with("Basic "));
        let way = match (self.expected.preset, in_body) {
            ("apple", _) => "JWT in body",
            (_, true) => "in body",
            (_, false) => "Basic",
        };
        let right = self.fixture.upstream.shape().preset;
        let id = client_id(right);
        self.fixture.upstream.client(Client { id, secret: Secret::Shared("another".to_owned()) });
        refused_at(self.fixture.log_in().await, At::Token);
        self.restart().await;
        self.cell("client secret", way);
    }

    /// With a provider that knows the client again.
    async fn restart(&mut self) {
        self.fixture = Fixture::new(self.expected.preset).await;
        self.fixture.upstream.person(person(self.expected.preset).verified("Ada@example.com").named("Ada Lovelace"));
    }

    async fn takes_a_code_once(&mut self) {
        let approved = self.fixture.approve().await;
        self.fixture.redeem(&approved.code, VERIFIER, None).await.unwrap();
        for code in [approved.code.as_str(), "made-up", ""] {
            refused_at(self.fixture.redeem(code, VERIFIER, None).await, At::Token);
        }
        self.cell("code again", "refused");
    }

    async fn tells_who_it_is(&mut self) {
        let preset = self.expected.preset;
        let who = self.fixture.log_in().await.unwrap();
        assert_eq!(who.authority, self.expected.authority);
        let subject = person(preset).subject;
        let subject = if preset == "slack" { format!("T0RR-{subject}") } else { subject };
        assert_eq!(who.subject, subject);
        assert_eq!(who.name.as_ref().map(|name| name.as_str()), Some("Ada Lovelace"));
        self.cell("authority", self.expected.authority);

        let email = who.email.unwrap();
        assert_eq!(email.email.as_str(), "Ada@example.com", "the primary one, as it is written");
        assert_eq!(email.verified, self.expected.verifies);
        self.cell("verified address", if email.verified { "believed" } else { "never believed" });

        self.fixture.upstream.person(person(preset).unverified("eve@example.com"));
        let who = self.fixture.log_in().await.unwrap();
        let told = who.email.as_ref().map(|email| (email.email.as_str(), email.verified));
        assert!(told.is_none_or(|told| told == ("eve@example.com", false)), "{told:?}");
        self.cell("unverified address", if told.is_some() { "unverified" } else { "not told" });

        self.fixture.upstream.person(person(preset));
        let who = self.fixture.log_in().await.unwrap();
        assert_eq!((who.subject, who.email), (subject, None));
        self.cell("no address", "none");
        self.fixture.upstream.person(person(preset).verified("Ada@example.com").named("Ada Lovelace"));
    }

    async fn judges_the_callbacks_issuer(&mut self) {
        let issuer = match self.expected.preset {
            "github" => Some("https://github.com/login/oauth"),
            _ => self.fixture.upstream.shape().issuer,
        };
        let right = self.fixture.approve().await;
        self.fixture.redeem(&right.code, VERIFIER, issuer).await.unwrap();
        let wrong = self.fixture.approve().await;
        self.fixture.upstream.forget();
        let refused = self.fixture.redeem(&wrong.code, VERIFIER, Some("https://evil.example")).await;
        if issuer.is_some() {
            assert_eq!(refused, Err(ProviderError::Callback(BadCallback::OtherIssuer)));
            assert_eq!(self.fixture.upstream.seen_at(Place::Token).len(), 0, "the code is not sent anywhere");
            self.cell("iss of another", "refused");
        } else {
            refused.unwrap();
            self.cell("iss of another", "it sends none");
        }
    }

    async fn judges_id_tokens(&mut self) {
        let id = client_id(self.expected.preset);
        if !self.is_oidc() {
            self.cell("ID token at login", "it has none");
            return;
        }
        let upstream = &self.fixture.upstream;
        for client in [id.clone(), other_client_id(self.expected.preset)] {
            let who = self.fixture.check(&upstream.id_token(&client, None).unwrap(), None).await.unwrap();
            assert_eq!(who.authority, self.expected.authority);
        }
        let theirs = upstream.id_token("theirs", None).unwrap();
        invalid(self.fixture.check(&theirs, None).await);
        let repeats = upstream.shape().nonce;
        let with = upstream.id_token(&id, Some("n")).unwrap();
        assert_eq!(self.fixture.check(&with, Some("n")).await.is_ok(), repeats);
        invalid(self.fixture.check(&with, Some("m")).await);
        self.cell("ID token at login", "ours");
    }

    async fn judges_access_tokens(&mut self) {
        let preset = self.expected.preset;
        let token = |client: &str| self.fixture.upstream.access_token(client);
        let (own, other, theirs) = (token(&client_id(preset)), token(&other_client_id(preset)), token("theirs"));
        let found = match self.expected.access_tokens {
            AccessTokens::NoCheck => {
                for token in [&own, &other, &theirs] {
                    assert_eq!(self.fixture.check(token, None).await, Err(ProviderError::NoTokenCheck));
                }
                assert!(self.fixture.upstream.seen_at(Place::TokenCheck).is_empty());
                "400: no check"
            }
            AccessTokens::No => {
                for token in [&own, &other, &theirs] {
                    invalid(self.fixture.check(token, None).await);
                }
                "401: ID tokens only"
            }
            taken @ (AccessTokens::Own | AccessTokens::AllOurs) => {
                let who = self.fixture.check(&own, None).await.unwrap();
                assert_eq!(who.authority, self.expected.authority);
                assert_eq!(who.subject, person(preset).subject);
                assert_eq!(who.email.map(|email| email.verified), Some(self.expected.verifies));
                invalid(self.fixture.check(&theirs, None).await);
                invalid(self.fixture.check(&own, Some("n")).await);
                match taken {
                    AccessTokens::AllOurs => {
                        self.fixture.check(&other, None).await.unwrap();
                        "ours"
                    }
                    AccessTokens::Own | AccessTokens::No | AccessTokens::NoCheck => {
                        invalid(self.fixture.check(&other, None).await);
                        "our own client's"
                    }
                }
            }
        };
        self.cell("access token at login", found);

        for nonsense in ["", "made-up", "a b", "a\r\nb", "ü", "a.b.c", &"x".repeat(20_000)] {
            match self.fixture.check(nonsense, None).await {
                Err(ProviderError::Token(_) | ProviderError::NoTokenCheck) => {}
                other => panic!("{preset}: {other:?} for {nonsense:?}"),
            }
        }
        self.cell("made-up token", "refused");
    }

    /// At each place that a login asks, each answer that is none.
    async fn refuses_what_is_no_answer(&mut self) {
        let mut refused = 0;
        let replies = [
            Reply::html(),
            Reply::redirect("https://evil.example/"),
            Reply::text(200, "application/json", "{\"access_token\":"),
            Reply::text(200, "application/json", ""),
            Reply::json(&json!({})),
            Reply::json(&json!(null)),
            Reply::json(&json!("text")),
            Reply::status(401, &json!({ "error": "x", "error_description": "<b>peer text</b>" })),
            Reply::status(500, &json!({})),
        ];
        let shape = self.fixture.upstream.shape();
        for place in [Place::Discovery, Place::Keys, Place::Token, Place::UserInfo, Place::Emails] {
            for reply in replies.iter().filter(|_| shape.has(place)) {
                // Nothing is remembered from before.
                self.restart().await;
                let outcome = if place == Place::Discovery {
                    self.fixture.upstream.script(place, reply.clone());
                    self.fixture.redeem("code", VERIFIER, None).await
                } else {
                    let approved = self.fixture.approve().await;
                    self.fixture.upstream.script(place, reply.clone());
                    self.fixture.redeem(&approved.code, VERIFIER, None).await
                };
                if self.fixture.upstream.seen_at(place).is_empty() {
                    // The ID token had it all.
                    outcome.unwrap();
                    continue;
                }
                let error = outcome.expect_err("an answer that is none");
                match error {
                    ProviderError::Away(_) | ProviderError::Answer { .. } => {}
                    other => panic!("{}: {other:?}", self.expected.preset),
                }
                assert!(!format!("{error} {error:?}").contains("peer"));
                refused += 1;
            }
        }
        self.restart().await;
        self.cell("broken answers", format!("{refused} refused"));
    }
}

fn refused_at<T: std::fmt::Debug>(outcome: Result<T, ProviderError>, at: At) {
    match outcome {
        Err(ProviderError::Answer { place, .. }) if place == at => {}
        other => panic!("{other:?}, not refused at {at:?}"),
    }
}

fn bad_id_token<T: std::fmt::Debug>(outcome: Result<T, ProviderError>, bad: BadToken) {
    let fault = Fault::IdToken(bad);
    match outcome {
        Err(error) => assert_eq!(error, ProviderError::Answer { place: At::Token, fault }),
        Ok(taken) => panic!("{taken:?}"),
    }
}

fn invalid<T: std::fmt::Debug>(outcome: Result<T, ProviderError>) {
    match outcome {
        Err(ProviderError::Token(_)) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn every_preset_does_what_its_provider_documents() {
    let mut table: Vec<Row> = Vec::new();
    for expected in &EXPECTED {
        let mut row = Row::new(expected).await;
        row.asks().await;
        row.passes_hints_on().await;
        row.proves_the_code_is_its_own().await;
        row.shows_its_secret().await;
        row.takes_a_code_once().await;
        row.tells_who_it_is().await;
        row.judges_the_callbacks_issuer().await;
        row.judges_id_tokens().await;
        row.judges_access_tokens().await;
        row.refuses_what_is_no_answer().await;
        table.push(row);
    }
    let checks: Vec<&str> = table[0].cells.iter().map(|(check, _)| *check).collect();
    let mut text = format!("\n| preset | {} |\n|---|{}\n", checks.join(" | "), "---|".repeat(checks.len()));
    for row in &table {
        let named: Vec<&str> = row.cells.iter().map(|(check, _)| *check).collect();
        assert_eq!(named, checks, "every cell of {} is filled", row.expected.preset);
        assert!(row.cells.iter().all(|(_, found)| !found.is_empty()));
        let cells: Vec<&str> = row.cells.iter().map(|(_, found)| found.as_str()).collect();
        text.push_str(&format!("| {} | {} |\n", row.expected.preset, cells.join(" | ")));
    }
    // Not by a macro: what those print is only shown of tests that fail.
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}
