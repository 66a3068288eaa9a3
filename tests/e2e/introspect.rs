//! Introspection: what a token is worth now, told to the ServiceAccounts that the App lists and to nobody else.

use std::{fs, path::PathBuf, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{Anonymous, Answer, SignedIn},
    eventually, process,
    service_account::{self, AUDIENCE, Issuer},
    stack::Stack,
};
use serde_json::{Value, json};

use crate::support::{NAME, PASSWORD, Shop, app, claims_of};

/// The file of keys is looked at each second; a loaded machine takes longer.
const SEEN_LIMIT: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);
const EMAIL: &str = "ada@example.com";

/// A service without a cluster, whose callers show tokens of this issuer.
struct House {
    shop: Shop,
    issuer: Issuer,
    keys: PathBuf,
}

/// An App that lists a ServiceAccount for each role.
fn listing(app: App) -> App {
    let one = |name: &str, role: &str| json!({ "serviceAccount": { "namespace": "shop", "name": name }, "role": role });
    app.set("/administrators", json!([one("asks", "Introspector"), one("reads", "Reader"), one("runs", "UserAdmin")]))
}

// === impl House ===

impl House {
    async fn open() -> Self {
        Self::with(listing(app())).await
    }

    async fn with(app: App) -> Self {
        Self::of(app, Stack::builder()).await
    }

    async fn of(app: App, builder: latchkey_tests::stack::Builder) -> Self {
        let issuer = Issuer::new().unwrap();
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks().unwrap().to_string()).unwrap();
        let builder = builder.args(["--service-account-keys", &keys.display().to_string()]);
        Self { shop: Shop::of(app, builder).await, issuer, keys }
    }

    /// The token of a ServiceAccount in the namespace `shop`.
    fn caller(&self, name: &str) -> String {
        self.issuer.token("shop", name, AUDIENCE, HOUR).unwrap()
    }

    /// Asks as a form, as RFC 7662 has it.
    async fn ask(&self, caller: Option<&str>, token: &str) -> Answer {
        let client = self.shop.client();
        let mut request = self.request(&client);
        if let Some(caller) = caller {
            request = request.bearer_auth(caller);
        }
        client.send(request.body(format!("token={token}&token_type_hint=refresh_token"))).await
    }

    fn request(&self, client: &Anonymous) -> reqwest::RequestBuilder {
        let path = format!("v1/{}/introspect", self.shop.id());
        client.request(Method::POST, &path).header("Content-Type", "application/x-www-form-urlencoded")
    }

    async fn is_inactive(&self, token: &str, why: &str) {
        let answer = self.ask(Some(&self.caller("asks")), token).await.expect(StatusCode::OK);
        assert_eq!(answer.body, json!({ "active": false }), "{why}");
    }

    async fn is_active(&self, token: &str) -> Value {
        let answer = self.ask(Some(&self.caller("asks")), token).await.expect(StatusCode::OK);
        assert_eq!(answer.body["active"], true, "{}", answer.text);
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        answer.body
    }
}

/// A session: who it is of, its access token and its refresh token.
async fn log_in(shop: &Shop) -> (SignedIn, String) {
    let client = shop.client();
    let login = client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    (client.signed_in(shop.id(), login.string("token")), login.string("refresh_token").to_owned())
}

async fn refresh(shop: &Shop, token: &str) -> String {
    let answer = shop.client().refresh(shop.id(), token).await.expect(StatusCode::OK);
    answer.string("refresh_token").to_owned()
}

#[tokio::test]
async fn a_live_token_tells_whose_it_is() {
    let house = House::open().await;
    house.shop.confirmed(EMAIL).await;
    let (user, refresh_token) = log_in(&house.shop).await;
    let claims = claims_of(user.token());
    let mut expected = claims.clone();
    expected["active"] = json!(true);
    expected["token_type"] = json!("Bearer");
    assert_eq!(house.is_active(user.token()).await, expected);
    assert_eq!(expected["email"], EMAIL);

    // Whoever takes access tokens must not take a refresh token for one.
    let mut expected = json!({ "active": true, "token_type": "refresh_token", "email": EMAIL });
    for claim in ["iss", "client_id", "sub", "sid", "email_verified", "name", "auth_time", "amr"] {
        expected[claim] = claims[claim].clone();
    }
    assert_eq!(house.is_active(&refresh_token).await, expected);

    // As JSON too; and no field is left out silently.
    let client = house.shop.client();
    let path = format!("v1/{}/introspect", house.shop.id());
    let ask = |body: Value| client.request(Method::POST, &path).bearer_auth(house.caller("asks")).json(&body);
    let answer = client.send(ask(json!({ "token": user.token() }))).await.expect(StatusCode::OK);
    assert_eq!(answer.body["sub"], claims["sub"]);
    let refused = client.send(ask(json!({}))).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(refused.body["fields"][0]["field"], "token");
    let empty = house.request(&client).bearer_auth(house.caller("asks")).body("token=");
    client.send(empty).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn what_is_no_live_token_of_this_app_is_inactive_and_no_more_is_told() {
    let (app, other) = (listing(app()), App::new("other"));
    let house = House::of(app, Stack::builder().app(&other)).await;
    house.shop.confirmed(EMAIL).await;
    let (user, refresh_token) = log_in(&house.shop).await;
    let stranger = house.shop.client();
    stranger.register(other.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let stranger = stranger.login(other.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);

    for (token, why) in [
        ("garbage".to_owned(), "garbage"),
        ("a.b.c".to_owned(), "the form of a JWT"),
        (format!("lkr_{}", "A".repeat(80)), "the form of a refresh token"),
        (user.token()[..user.token().len() - 4].to_owned(), "a part of a token"),
        (stranger.string("token").to_owned(), "another App's access token"),
        (stranger.string("refresh_token").to_owned(), "another App's refresh token"),
        (house.caller("asks"), "the caller's own token"),
    ] {
        house.is_inactive(&token, why).await;
    }

    // A refresh token that another has taken the place of.
    let newer = refresh(&house.shop, &refresh_token).await;
    house.is_inactive(&refresh_token, "a generation before").await;
    house.is_active(&newer).await;
    // To ask uses nothing up.
    let newest = refresh(&house.shop, &newer).await;

    user.send(user.request(Method::POST, "logout")).await.expect(StatusCode::OK);
    house.is_inactive(user.token(), "an ended session's access token").await;
    house.is_inactive(&newest, "an ended session's refresh token").await;
}

#[tokio::test]
async fn only_a_service_account_that_the_app_lists_is_answered() {
    let house = House::open().await;
    house.shop.confirmed(EMAIL).await;
    let (user, _) = log_in(&house.shop).await;
    for role in ["asks", "reads", "runs"] {
        let answer = house.ask(Some(&house.caller(role)), user.token()).await.expect(StatusCode::OK);
        assert_eq!(answer.body["active"], true, "{role}");
    }

    let stranger = Issuer::new().unwrap();
    let sign = |change: &dyn Fn(&mut Value)| {
        let mut claims = service_account::claims("shop", "asks", AUDIENCE, HOUR).unwrap();
        change(&mut claims);
        house.issuer.sign(&claims).unwrap()
    };
    house.ask(Some(&sign(&|_| {})), user.token()).await.expect(StatusCode::OK);
    for (who, token) in [
        ("nobody", None),
        ("garbage", Some("garbage".to_owned())),
        ("a user", Some(user.token().to_owned())),
        ("an account that is not listed", Some(house.caller("other"))),
        ("one of that name elsewhere", Some(house.issuer.token("blog", "asks", AUDIENCE, HOUR).unwrap())),
        ("a token for the API server", Some(house.issuer.token("shop", "asks", "https://kubernetes", HOUR).unwrap())),
        ("another cluster's", Some(stranger.token("shop", "asks", AUDIENCE, HOUR).unwrap())),
        ("an expired one", Some(sign(&|claims| claims["exp"] = claims["iat"].clone()))),
        ("one that is not of an account", Some(sign(&|claims| claims["sub"] = json!("system:node:shop")))),
        ("one that says two things", Some(sign(&|claims| claims["kubernetes.io"]["namespace"] = json!("blog")))),
    ] {
        let refused = house.ask(token.as_deref(), user.token()).await;
        let refused = refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
        assert!(refused.header("www-authenticate").is_some_and(|told| told.starts_with("Bearer ")), "{who}");
        assert_eq!(refused.body.get("active"), None, "{who}");
        // One answer for all: it tells nothing of who is listed.
        let description = refused.string("error_description");
        assert_eq!(description, "show the token of a ServiceAccount that the App lists as an administrator", "{who}");
    }
    // Neither in a cookie nor in the body: the caller's token has one place.
    let client = house.shop.client();
    let request = house.request(&client).body(format!("token={}&access_token={}", user.token(), house.caller("asks")));
    client.send(request).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}

#[tokio::test]
async fn an_app_that_lists_nobody_and_a_server_without_keys_answer_nobody() {
    let house = House::with(app()).await;
    let refused = house.ask(Some(&house.caller("asks")), "token").await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    // A change of the list counts at once.
    house.shop.stack.apply(&listing(house.shop.app.clone())).unwrap();
    eventually("the list is live", SEEN_LIMIT, || async {
        (house.ask(Some(&house.caller("asks")), "token").await.status == StatusCode::OK).then_some(())
    })
    .await;

    let shop = Shop::with(listing(app())).await;
    let client = shop.client();
    let request = client.request(Method::POST, &format!("v1/{}/introspect", shop.id()));
    let request = request.bearer_auth(house.caller("asks")).json(&json!({ "token": "token" }));
    client.send(request).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}

#[tokio::test]
async fn keys_are_read_again_when_their_file_changes() {
    let house = House::open().await;
    let newer = Issuer::new().unwrap();
    let token = newer.token("shop", "asks", AUDIENCE, HOUR).unwrap();
    house.ask(Some(&token), "token").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    house.ask(Some(&house.caller("asks")), "token").await.expect(StatusCode::OK);
    let unfinished = house.keys.with_extension("unfinished");
    fs::write(&unfinished, newer.jwks().unwrap().to_string()).unwrap();
    fs::rename(&unfinished, &house.keys).unwrap();
    eventually("the new key counts", SEEN_LIMIT, || async {
        (house.ask(Some(&token), "token").await.status == StatusCode::OK).then_some(())
    })
    .await;
    house.ask(Some(&house.caller("asks")), "token").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    // A broken file takes nobody's key away.
    fs::write(&house.keys, "{").unwrap();
    let read_again = || async {
        let told = house.shop.stack.server().logged().contains("has no keys of ServiceAccounts");
        house.ask(Some(&token), "token").await.expect(StatusCode::OK);
        told.then_some(())
    };
    eventually("the server tells that the file is broken", SEEN_LIMIT, read_again).await;
    house.ask(Some(&token), "token").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn without_redis_it_is_told_that_nobody_knows() {
    let house = House::of(listing(app()), Stack::builder().proxied()).await;
    house.shop.confirmed(EMAIL).await;
    let (user, refresh_token) = log_in(&house.shop).await;
    house.shop.stack.redis_proxy.as_ref().unwrap().refuse().await;
    for token in [user.token(), &refresh_token] {
        let answer = house.ask(Some(&house.caller("asks")), token).await;
        let answer = answer.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
        assert!(answer.header("retry-after").is_some());
    }
    // What needs no look is judged all the same.
    house.is_inactive("garbage", "garbage").await;
    house.ask(None, user.token()).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
}
