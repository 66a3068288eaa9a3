//! The demo of OpenID Connect: a Client of an App, with a page of the inbox as its program.

use std::net::SocketAddr;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde_json::Value;
use url::Url;

use crate::inbox::{DEMO_VERIFIER, SIGNED_IN_PATH};

/// The URL of an authorization request of the demo Client, which begins a login. The demo Client is the first Client of
/// the App that redirects to [`SIGNED_IN_PATH`] of the inbox. `None` if there is no such Client.
pub(super) fn authorization_url(app: &Value, inbox: SocketAddr) -> Option<String> {
    let redirect_url = format!("http://{inbox}{SIGNED_IN_PATH}");
    let mut clients = app["clients"].as_array()?.iter();
    let client = clients.find(|client| {
        let urls = client["redirectURLs"].as_array();
        urls.is_some_and(|urls| urls.iter().any(|url| *url == redirect_url.as_str()))
    })?;
    let client_id = client["clientID"].as_str()?;
    let scopes: Vec<&str> = client["scopes"].as_array()?.iter().filter_map(Value::as_str).collect();
    let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, DEMO_VERIFIER.as_bytes()));
    let parameters = [
        ("client_id", client_id),
        ("redirect_uri", &redirect_url),
        ("response_type", "code"),
        ("scope", &scopes.join(" ")),
        ("code_challenge", &challenge),
        ("code_challenge_method", "S256"),
        // The page reads the client ID from the parameter `state`.
        ("state", client_id),
    ];
    let url = Url::parse_with_params(&format!("{}/authorize", app["issuer"].as_str()?), parameters).ok()?;
    Some(url.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_client_that_redirects_to_the_inbox_gets_an_authorization_url() {
        let inbox: SocketAddr = "127.0.0.1:8025".parse().unwrap();
        let client =
            |id: &str, url: &str| json!({ "clientID": id, "redirectURLs": [url], "scopes": ["openid", "email"] });
        let mut app = json!({ "issuer": "http://127.0.0.1:8080/shop" });
        assert_eq!(authorization_url(&app, inbox), None);
        app["clients"] = json!([
            client("grafana", "https://grafana.example.com/login"),
            client("demo", "http://127.0.0.1:8025/signed-in"),
        ]);
        let url: Url = authorization_url(&app, inbox).unwrap().parse().unwrap();
        assert_eq!(url.path(), "/shop/authorize");
        let value = |name: &str| url.query_pairs().find(|(known, _)| known == name).unwrap().1.into_owned();
        assert_eq!((value("client_id").as_str(), value("scope").as_str()), ("demo", "openid email"));
        // RFC 7636, section 4.1: 43 to 128 characters.
        assert!((43..=128).contains(&DEMO_VERIFIER.len()) && value("code_challenge").len() == 43);
    }
}
