//! Paths: a path that has routes is what one of their templates spells, and no other.

use http::Method;
use latchkey_crds::types::ProviderName;
use latchkey_server::http::routes::Route;

use crate::{
    draw::{Draw, texts},
    harness,
};

const TOKENS: [&str; 40] = [
    "/",
    "/",
    "/",
    "/v1",
    "/shop",
    "/email",
    "/login",
    "/register",
    "/confirm",
    "/token",
    "/user",
    "/password",
    "/userinfo",
    "/sessions",
    "/identities",
    "/github",
    "/redirect",
    "/callback",
    "/authorize",
    "/.well-known",
    "/jwks.json",
    "/openid-configuration",
    "/oauth-authorization-server",
    "/openapi.json",
    "//",
    "/..",
    "/%2e",
    "%2F",
    "?",
    ";",
    "A",
    "a",
    "-",
    "é",
    " ",
    "/v1/shop",
    "/shop/github",
    "/activity",
    "/introspect",
    "\\",
];

#[test]
fn route() {
    harness::run("route", 2_000, |input| {
        for text in texts(input, &TOKENS) {
            judge(&text);
        }
        let mut draw = Draw::new(input);
        judge(&draw.text(&TOKENS));
        let template = draw.pick(Route::ALL).template();
        let filled = template
            .replace("{APPID}", draw.pick(&["shop", "v1", "", "Shop", "a/b"]))
            .replace("{PROVIDER}", draw.pick(&["github", "email", "", "A"]))
            .replace("{SESSION}", draw.pick(&["1", "", "a b"]))
            .replace("{SUFFIX}", draw.pick(&["", "a/b", "/"]));
        judge(&filled);
    });
}

/// Whether a path is this template with something in place of each placeholder.
fn spells(template: &str, path: &str) -> bool {
    let (template, path) = match template.strip_suffix("/{SUFFIX}") {
        // All that is left of the path belongs to it.
        Some(front) => {
            let segments = front.split('/').count();
            let Some((end, _)) = path.match_indices('/').nth(segments - 1) else { return false };
            (front, &path[..end])
        }
        None => (template, path),
    };
    let (expected, segments): (Vec<_>, Vec<_>) = (template.split('/').collect(), path.split('/').collect());
    expected.len() == segments.len()
        && expected.iter().zip(segments).all(|(expected, segment)| match *expected {
            "{PROVIDER}" => segment.parse::<ProviderName>().is_ok(),
            placeholder if placeholder.starts_with('{') => !segment.is_empty(),
            literal => literal == segment,
        })
}

fn judge(path: &str) {
    let matched = harness::bounded(1, 16 * 1024, || Route::of(path));
    let spelled: Vec<Route> = Route::ALL.iter().copied().filter(|route| spells(route.template(), path)).collect();
    assert_eq!(matched.is_some(), !spelled.is_empty(), "{path:?}");
    let Some(matched) = matched else { return };
    assert!(spelled.contains(&matched.first()), "{path:?}");
    for method in [Method::GET, Method::HEAD, Method::POST, Method::PATCH, Method::DELETE, Method::TRACE] {
        if let Some(route) = matched.route(&method) {
            assert!(spelled.contains(&route) && route.verb().admits(&method), "{method} {path:?}");
        }
    }
    // `{APPID}` of a path is never a reserved word that leads elsewhere.
    let template = matched.first().template();
    if template.starts_with("/v1/") {
        assert_eq!(matched.app, path.split('/').nth(2), "{path:?}");
    }
}
