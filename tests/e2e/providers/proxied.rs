//! Providers behind the install's proxy.

use std::collections::HashMap;

use http::StatusCode;
use latchkey_server::{
    domain::{
        clock::Env,
        identity::{Away, ProviderError},
    },
    outbound::proxy::Proxy,
    providers::{ProviderOptions, SocialProviders},
};
use latchkey_tests::{
    builders::{self, App},
    process,
    stack::Stack,
    tunnel::TunnelProxy,
    upstream::{Client, Secret, Upstream},
};
use serde_json::json;

use super::{Fixture, options};

/// The same provider, for a server that reaches it through that proxy; the name is the proxy's to know.
fn through(fixture: &Fixture, url: &str, no: &str) -> SocialProviders {
    let hosts = if no.is_empty() { HashMap::new() } else { fixture.upstream.hosts() };
    let proxy = Proxy::new(url, no).unwrap();
    SocialProviders::new(ProviderOptions { proxy, hosts, ..options(&fixture.upstream) }, Env::system())
}

#[tokio::test]
async fn a_provider_is_reached_by_a_tunnel_in_which_its_own_certificate_is_judged() {
    let mut fixture = Fixture::new("github").await;
    let proxy = TunnelProxy::start(fixture.upstream.hosts()).await.unwrap();
    fixture.providers = through(&fixture, &format!("http://someone:h%40sh@{}", proxy.addr()), "");
    fixture.log_in().await.unwrap();
    let seen = proxy.seen();
    assert!(!seen.is_empty());
    for asked in seen {
        let (host, rest) = asked.line.strip_prefix("CONNECT ").and_then(|line| line.split_once(':')).unwrap();
        assert!(fixture.upstream.hosts().contains_key(host), "{asked:?}");
        assert_eq!(rest, "443 HTTP/1.1");
        // Of someone:h@sh.
        assert_eq!(asked.headers["proxy-authorization"], "Basic c29tZW9uZTpoQHNo");
    }
    // The same tunnel to somebody whose certificate is not believed.
    let untrusted = ProviderOptions {
        proxy: Proxy::new(&format!("http://{}", proxy.addr()), "").unwrap(),
        hosts: HashMap::new(),
        authorities: Vec::new(),
        ..options(&fixture.upstream)
    };
    fixture.providers = SocialProviders::new(untrusted, Env::system());
    assert_eq!(fixture.log_in().await, Err(ProviderError::Away(Away::Tls)));
}

#[tokio::test]
async fn what_needs_no_proxy_is_reached_directly() {
    let mut fixture = Fixture::new("github").await;
    let proxy = TunnelProxy::start(HashMap::new()).await.unwrap();
    let no: Vec<String> = fixture.upstream.hosts().into_keys().collect();
    fixture.providers = through(&fixture, &format!("http://{}", proxy.addr()), &no.join(","));
    fixture.log_in().await.unwrap();
    assert_eq!(proxy.seen(), []);
}

#[tokio::test]
async fn a_proxy_that_is_away_or_refuses_is_named() {
    let mut fixture = Fixture::new("github").await;
    let refusing = TunnelProxy::start(HashMap::new()).await.unwrap();
    for proxy in [refusing.addr(), process::free_addr()] {
        fixture.providers = through(&fixture, &format!("http://{proxy}"), "");
        assert_eq!(fixture.log_in().await, Err(ProviderError::Away(Away::Proxy)));
    }
    assert!(!refusing.seen().is_empty());
}

#[tokio::test]
async fn a_server_takes_its_proxy_from_the_usual_variable() {
    let provider = builders::Provider::new("github", "github");
    let secret = Secret::Shared(provider.secret().to_owned());
    let upstream = Upstream::start("github", Client { id: provider.client_id().to_owned(), secret }).await.unwrap();
    let proxy = TunnelProxy::start(upstream.hosts()).await.unwrap();
    let app = App::new("shop").provider(&provider);
    let authority = process::fresh_dir("authority").join("ca.pem");
    std::fs::write(&authority, upstream.ca()).unwrap();
    let stack = Stack::builder()
        .app(&app)
        .provider(&provider)
        .args(upstream.server_args())
        .env("SSL_CERT_FILE", &authority.display().to_string())
        .env("HTTPS_PROXY", &format!("http://{}", proxy.addr()))
        .env("NO_PROXY", "127.0.0.1")
        .start()
        .await;
    let token = upstream.access_token(provider.client_id());
    let answer = stack.client().post(&format!("{}/github/login", app.id()), &json!({ "token": token })).await;
    answer.expect(StatusCode::OK);
    assert!(proxy.seen().iter().any(|asked| asked.line == "CONNECT api.github.com:443 HTTP/1.1"), "{:?}", proxy.seen());
}

#[tokio::test]
async fn a_server_does_not_start_with_a_proxy_that_it_cannot_use() {
    let started = Stack::builder()
        .app(&App::new("shop"))
        .env("HTTPS_PROXY", "https://someone:hush@proxy.example.com")
        .try_start()
        .await;
    let error = format!("{:#}", started.err().expect("it does not start"));
    assert!(error.contains("HTTPS_PROXY is not a URL such as http://proxy.example.com:3128"), "{error}");
    assert!(!error.contains("hush"), "{error}");
}
