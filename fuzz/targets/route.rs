//! Paths: the server finds a route for a path if, and only if, the path matches the template of a route.

use http::Method;
use latchkey_crds::types::ProviderName;
use latchkey_server::http::routes::{Route, RouteTable};

use crate::{
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 40] = [
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
        for text in texts(input, &FRAGMENTS) {
            check_input(&text);
        }
        let mut draw = Draw::new(input);
        check_input(&draw.text(&FRAGMENTS));
        let template = draw.pick(Route::ALL).path_template();
        let filled = template
            .replace("{APPID}", draw.pick(&["shop", "v1", "", "Shop", "a/b"]))
            .replace("{PROVIDER}", draw.pick(&["github", "email", "", "A"]))
            .replace("{SESSION}", draw.pick(&["1", "", "a b"]))
            .replace("{SUFFIX}", draw.pick(&["", "a/b", "/"]));
        check_input(&filled);
    });
}

/// Whether a path matches this template.
fn matches_template(template: &str, path: &str) -> bool {
    let (template, path) = match template.strip_suffix("/{SUFFIX}") {
        // `{SUFFIX}` matches any text, including slashes. So only the segments before it are compared.
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

fn check_input(path: &str) {
    let matched = harness::assert_bounded(1, 16 * 1024, || Route::find(path));
    let matching_routes: Vec<Route> =
        Route::ALL.iter().copied().filter(|route| matches_template(route.path_template(), path)).collect();
    assert_eq!(matched.is_some(), !matching_routes.is_empty(), "{path:?}");
    let Some(matched) = matched else { return };
    assert!(matching_routes.contains(&matched.any_route()), "{path:?}");
    for method in [Method::GET, Method::HEAD, Method::POST, Method::PATCH, Method::DELETE, Method::TRACE] {
        if let Some(route) = matched.route_for(&method) {
            assert!(matching_routes.contains(&route) && route.verb().allows(&method), "{method} {path:?}");
        }
    }
    // In all templates that begin with `/v1/`, `{APPID}` is the second segment.
    let template = matched.any_route().path_template();
    if template.starts_with("/v1/") {
        assert_eq!(matched.app, path.split('/').nth(2), "{path:?}");
    }
}
