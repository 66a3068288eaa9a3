//! Social login, from *redirect* to a session, with a scripted provider (contract, 5).

mod accounts;
mod codes;
mod flows;
mod identities;
mod provider;
mod redirects;
mod storm;

use std::collections::{BTreeMap, HashMap};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{Anonymous, Answer},
    stack::{Builder, Stack},
};
use serde_json::{Value, json};
use url::Url;

use crate::{support::Shop, trouble::loose};
use provider::{Asked, Person, Upstream};

/// Where the App's users go in the end.
const DONE: &str = "https://shop.example.com/auth/done";
/// Another address on the list.
const OTHER: &str = "com.example.shop:/done?from=login";

/// A service with one App and its providers, `local` and `other`, which are clients of one scripted provider.
struct Social {
    shop: Shop,
    upstream: Upstream,
}

/// A browser: it keeps cookies.
struct Browser {
    client: Anonymous,
    cookies: BTreeMap<String, String>,
}

/// What a redirect to the app carries.
#[derive(Debug)]
struct Landed {
    location: String,
    parameters: HashMap<String, String>,
}

/// An App that lets addresses link, with both addresses on its list.
fn app() -> App {
    let refs = json!([{ "name": "local", "linkByEmail": true }, { "name": "other" }]);
    loose("social").set("/redirectURLs", json!([DONE, OTHER, "http://127.0.0.1/done"])).set("/providerRefs", refs)
}

// === impl Social ===

impl Social {
    async fn open() -> Self {
        Self::with(app()).await
    }

    async fn with(app: App) -> Self {
        Self::of(app, Stack::builder()).await
    }

    async fn of(app: App, builder: Builder) -> Self {
        let upstream = Upstream::start().await;
        let builder = builder.provider(&upstream.provider("local")).provider(&upstream.provider("other"));
        Self { shop: Shop::of(app, builder).await, upstream }
    }

    fn path(&self, operation: &str) -> String {
        self.path_of("local", operation)
    }

    fn path_of(&self, provider: &str, operation: &str) -> String {
        format!("{}/{provider}/{operation}", self.shop.id())
    }

    fn browser(&self) -> Browser {
        Browser { client: self.shop.client(), cookies: BTreeMap::new() }
    }

    /// Somebody goes the whole way in a browser of their own.
    async fn sign_in(&self, person: &Person) -> Answer {
        self.sign_in_by("local", person).await
    }

    async fn sign_in_by(&self, provider: &str, person: &Person) -> Answer {
        let mut browser = self.browser();
        let asked = browser.begin(&self.path_of(provider, "redirect")).await;
        let code = self.upstream.log_in(&asked, person);
        browser.come_back(&self.path_of(provider, "callback"), &asked, &code).await
    }

    /// *login* with the provider's token.
    async fn login(&self, person: &Person) -> Answer {
        let body = json!({ "token": self.upstream.token(person) });
        self.shop.client().post(&self.path("login"), &body).await
    }

    /// How many users, identities and sessions there are.
    async fn made(&self) -> (i64, i64, usize) {
        (
            self.shop.count("SELECT count(*) FROM users").await,
            self.shop.count("SELECT count(*) FROM identities").await,
            self.shop.sessions().await,
        )
    }

    #[track_caller]
    fn assert_alive(&self, look: &Answer) {
        assert_eq!(look.status, StatusCode::OK, "{}", look.text);
    }
}

// === impl Browser ===

impl Browser {
    async fn go(&mut self, path: &str) -> Answer {
        let request = self.request(Method::GET, path);
        self.send(request).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.client.request(method, path);
        if self.cookies.is_empty() {
            return request;
        }
        let pairs: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        request.header("cookie", pairs.join("; "))
    }

    async fn send(&mut self, request: reqwest::RequestBuilder) -> Answer {
        let answer = self.client.send(request).await;
        for field in answer.headers.get_all("set-cookie") {
            let text = field.to_str().expect("a cookie is ASCII");
            let (name, value) = text.split(';').next().and_then(|pair| pair.split_once('=')).expect("a pair");
            if text.contains("Max-Age=0") {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        answer
    }

    /// *redirect*, which must lead to the provider.
    async fn begin(&mut self, path: &str) -> Asked {
        let answer = self.go(path).await.expect(StatusCode::FOUND);
        Asked::of(answer.header("location").expect("an address"))
    }

    /// *callback* with what the provider sends along.
    async fn come_back(&mut self, path: &str, asked: &Asked, code: &str) -> Answer {
        self.go(&format!("{path}?state={}&code={code}", asked.state())).await
    }
}

// === impl Landed ===

impl Landed {
    #[track_caller]
    fn of(answer: &Answer) -> Self {
        assert_eq!(answer.status, StatusCode::FOUND, "{}", answer.text);
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        let location = answer.header("location").expect("an address").to_owned();
        let url: Url = location.parse().expect("an absolute URL");
        let sent = if location.contains('#') { url.fragment() } else { url.query() };
        let parameters = url::form_urlencoded::parse(sent.unwrap_or_default().as_bytes()).into_owned().collect();
        Self { location, parameters }
    }

    #[track_caller]
    fn get(&self, name: &str) -> &str {
        self.parameters.get(name).unwrap_or_else(|| panic!("no {name} in {}", self.location))
    }

    /// A redirect with the seven parameters.
    #[track_caller]
    fn session(answer: &Answer) -> Self {
        let landed = Self::of(answer);
        assert!(!landed.parameters.contains_key("error"), "{}", landed.location);
        for name in ["access_token", "refresh_token", "session_id", "local_id", "email_verified", "expires_at"] {
            assert!(!landed.get(name).is_empty(), "{name} in {}", landed.location);
        }
        assert!((1..=900).contains(&landed.get("expires_in").parse::<i64>().expect("a number")));
        landed
    }

    /// A redirect with an error.
    #[track_caller]
    fn error(answer: &Answer, error: &str) -> Self {
        let landed = Self::of(answer);
        assert_eq!(landed.get("error"), error, "{}", landed.location);
        assert!(!landed.get("error_description").is_empty());
        assert!(!landed.parameters.contains_key("access_token"), "{}", landed.location);
        landed
    }
}

/// The seven fields of a session, as JSON.
#[track_caller]
fn seven(body: &Value) {
    for name in ["access_token", "refresh_token", "session_id", "local_id"] {
        assert!(body[name].is_string(), "{name} in {body}");
    }
    assert!(body["email_verified"].is_boolean(), "{body}");
    assert!(body["expires_at"].is_i64() && body["expires_in"].is_i64(), "{body}");
}
