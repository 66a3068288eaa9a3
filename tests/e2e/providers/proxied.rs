//! Calls to providers through the outbound proxy of the installation.

use std::collections::HashMap;

use http::StatusCode;
use latchkey_server::{
    domain::{
        clock::Env,
        identity::{ProviderError, UnavailableReason},
    },
    outbound::proxy::OutboundProxy,
    providers::{ProviderOptions, SocialProviders},
};
use latchkey_tests::{
    builders::{self, App},
    mock_provider::{ClientSecret, MockProvider, RegisteredClient},
    process,
    stack::Stack,
    tunnel::TunnelProxy,
};
use serde_json::json;

use super::{Fixture, provider_options};

/// The providers of a server with an outbound proxy at `url`. The proxy resolves the host names. Hosts in `no_proxy`
/// are called without the proxy.
fn providers_via(fixture: &Fixture, url: &str, no_proxy: &str) -> SocialProviders {
    let hosts = if no_proxy.is_empty() { HashMap::new() } else { fixture.upstream.hosts() };
    let proxy = OutboundProxy::new(url, no_proxy).unwrap();
    SocialProviders::new(
        ProviderOptions { proxy, test_hosts: hosts, ..provider_options(&fixture.upstream) },
        Env::system(),
    )
}

#[tokio::test]
async fn a_provider_is_reached_through_a_tunnel_and_its_certificate_is_verified() {
    let mut fixture = Fixture::new("github").await;
    let proxy = TunnelProxy::start(fixture.upstream.hosts()).await.unwrap();
    fixture.providers = providers_via(&fixture, &format!("http://someone:h%40sh@{}", proxy.addr()), "");
    fixture.log_in().await.unwrap();
    let requests = proxy.requests();
    assert!(!requests.is_empty());
    for connect in requests {
        let (host, port_and_version) =
            connect.request_line.strip_prefix("CONNECT ").and_then(|line| line.split_once(':')).unwrap();
        assert!(fixture.upstream.hosts().contains_key(host), "{connect:?}");
        assert_eq!(port_and_version, "443 HTTP/1.1");
        // `someone:h@sh` in base64.
        assert_eq!(connect.headers["proxy-authorization"], "Basic c29tZW9uZTpoQHNo");
    }
    // The server verifies the provider's certificate through the tunnel. Without the CA, it rejects the certificate.
    let untrusted = ProviderOptions {
        proxy: OutboundProxy::new(&format!("http://{}", proxy.addr()), "").unwrap(),
        test_hosts: HashMap::new(),
        test_roots: Vec::new(),
        ..provider_options(&fixture.upstream)
    };
    fixture.providers = SocialProviders::new(untrusted, Env::system());
    assert_eq!(fixture.log_in().await, Err(ProviderError::Unavailable(UnavailableReason::Tls)));
}

#[tokio::test]
async fn hosts_on_the_no_proxy_list_are_reached_directly() {
    let mut fixture = Fixture::new("github").await;
    let proxy = TunnelProxy::start(HashMap::new()).await.unwrap();
    let no_proxy: Vec<String> = fixture.upstream.hosts().into_keys().collect();
    fixture.providers = providers_via(&fixture, &format!("http://{}", proxy.addr()), &no_proxy.join(","));
    fixture.log_in().await.unwrap();
    assert_eq!(proxy.requests(), []);
}

#[tokio::test]
async fn an_unavailable_or_refusing_proxy_is_reported_as_the_cause() {
    let mut fixture = Fixture::new("github").await;
    let refusing = TunnelProxy::start(HashMap::new()).await.unwrap();
    for proxy in [refusing.addr(), process::free_addr()] {
        fixture.providers = providers_via(&fixture, &format!("http://{proxy}"), "");
        assert_eq!(fixture.log_in().await, Err(ProviderError::Unavailable(UnavailableReason::Proxy)));
    }
    assert!(!refusing.requests().is_empty());
}

#[tokio::test]
async fn a_server_reads_its_proxy_from_the_variable_https_proxy() {
    let provider = builders::Provider::new("github", "github");
    let secret = ClientSecret::Shared(provider.secret().to_owned());
    let upstream =
        MockProvider::start("github", RegisteredClient { id: provider.client_id().to_owned(), secret }).await.unwrap();
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
    let response = stack.client().post(&format!("{}/github/login", app.id()), &json!({ "token": token })).await;
    response.expect(StatusCode::OK);
    assert!(
        proxy.requests().iter().any(|request| request.request_line == "CONNECT api.github.com:443 HTTP/1.1"),
        "{:?}",
        proxy.requests()
    );
}

#[tokio::test]
async fn a_server_does_not_start_with_an_unusable_proxy() {
    let started = Stack::builder()
        .app(&App::new("shop"))
        .env("HTTPS_PROXY", "https://someone:hush@proxy.example.com")
        .try_start()
        .await;
    let error = format!("{:#}", started.err().expect("the server does not start"));
    assert!(error.contains("HTTPS_PROXY is not a URL such as http://proxy.example.com:3128"), "{error}");
    assert!(!error.contains("hush"), "{error}");
}
