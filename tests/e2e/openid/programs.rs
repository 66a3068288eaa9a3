//! Third-party libraries and proxies sign in users, get the users' groups, refresh and log out, also after the signing
//! key and the secret have rotated.

use latchkey_tests::{
    openid::{
        GROUP, OpenIdProvider,
        application::{Application, Peer},
        scenario,
    },
    passwords::PASSWORD,
    process,
};

async fn run(peer: Peer) {
    let provider = OpenIdProvider::start().await.unwrap();
    scenario::run(&provider, peer).await.unwrap_or_else(|error| panic!("{}: {error:#}", peer.name()));
}

#[tokio::test]
async fn openid_client_signs_in_users() {
    run(Peer::OpenidClient).await;
}

#[tokio::test]
async fn go_oidc_signs_in_users() {
    run(Peer::GoOidc).await;
}

#[tokio::test]
async fn oauth2_proxy_signs_in_users() {
    run(Peer::Oauth2Proxy).await;
}

#[tokio::test]
async fn oauth2_proxy_lets_only_members_of_a_group_through() {
    let provider = OpenIdProvider::start().await.unwrap();
    let member = provider.create_user("ada@example.com", &[GROUP]).await.unwrap();
    let other = provider.create_user("eve@example.com", &["sales"]).await.unwrap();
    let addr = process::free_addr();
    let client = Peer::Oauth2Proxy.client(&provider, addr);
    provider.apply_client(&client).await.unwrap();
    let mut proxy = Application::new(&provider, Peer::Oauth2Proxy, addr, &client).await.unwrap();
    proxy.start(&provider.client_secret(&client).unwrap()).await.unwrap();
    let mut browser = provider.browser().unwrap();
    let page = browser.sign_in(&proxy.url("/"), &other.email, PASSWORD).await.unwrap();
    assert_eq!(page.status.as_u16(), 403, "{}", page.html);
    assert!(proxy.signed_in(&mut browser).await.is_err());
    proxy.sign_in(&mut provider.browser().unwrap(), &member.email, PASSWORD).await.unwrap();
}
