//! How each provider speaks: where it is asked what, and what its answers look like. Written from the providers'
//! documentation and not from the server's table, so that one may catch the other's mistakes.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use url::form_urlencoded;

use super::{Person, Place, Reply, Seen, State};

/// A provider as it is met from outside.
#[derive(Debug)]
pub struct Shape {
    pub preset: &'static str,
    /// Of an OpenID provider: what its ID tokens say.
    pub issuer: Option<&'static str>,
    pub authorization: &'static str,
    /// `host/path`; `{client_id}` is filled in.
    pub(super) places: &'static [(Place, &'static str)],
    pub(super) authentication: Authentication,
    pub pkce: bool,
    pub nonce: bool,
    /// Its ID tokens alone say whose address it is; there is no userinfo endpoint.
    pub(super) id_token_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Authentication {
    Basic,
    Post,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Client,
    Code,
}

/// The directory that Microsoft's scripted people are in.
pub const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

const PLAIN: Shape = Shape {
    preset: "",
    issuer: None,
    authorization: "",
    places: &[],
    authentication: Authentication::Post,
    pkce: true,
    nonce: false,
    id_token_only: false,
};

const OIDC: Shape = Shape { nonce: true, ..PLAIN };

pub static PRESETS: [Shape; 15] = [
    Shape {
        preset: "google",
        issuer: Some("https://accounts.google.com"),
        authorization: "https://accounts.google.com/o/oauth2/v2/auth",
        places: &[
            (Place::Discovery, "accounts.google.com/.well-known/openid-configuration"),
            (Place::Keys, "www.googleapis.com/oauth2/v3/certs"),
            (Place::Token, "oauth2.googleapis.com/token"),
            (Place::UserInfo, "openidconnect.googleapis.com/v1/userinfo"),
            (Place::TokenCheck, "oauth2.googleapis.com/tokeninfo"),
        ],
        ..OIDC
    },
    Shape {
        preset: "apple",
        issuer: Some("https://appleid.apple.com"),
        authorization: "https://appleid.apple.com/auth/authorize",
        places: &[
            (Place::Discovery, "appleid.apple.com/.well-known/openid-configuration"),
            (Place::Keys, "appleid.apple.com/auth/keys"),
            (Place::Token, "appleid.apple.com/auth/token"),
        ],
        id_token_only: true,
        ..OIDC
    },
    Shape {
        preset: "github",
        authorization: "https://github.com/login/oauth/authorize",
        places: &[
            (Place::Token, "github.com/login/oauth/access_token"),
            (Place::UserInfo, "api.github.com/user"),
            (Place::Emails, "api.github.com/user/emails"),
            (Place::TokenCheck, "api.github.com/applications/{client_id}/token"),
        ],
        ..PLAIN
    },
    Shape {
        preset: "gitlab",
        issuer: Some("https://gitlab.com"),
        authorization: "https://gitlab.com/oauth/authorize",
        places: &[
            (Place::Discovery, "gitlab.com/.well-known/openid-configuration"),
            (Place::Keys, "gitlab.com/oauth/discovery/keys"),
            (Place::Token, "gitlab.com/oauth/token"),
            (Place::UserInfo, "gitlab.com/oauth/userinfo"),
            (Place::TokenCheck, "gitlab.com/oauth/introspect"),
        ],
        authentication: Authentication::Basic,
        ..OIDC
    },
    Shape {
        preset: "microsoft",
        issuer: Some("https://login.microsoftonline.com/72f988bf-86f1-41af-91ab-2d7cd011db47/v2.0"),
        authorization: "https://login.microsoftonline.com/common/oauth2/v2.0/authorize",
        places: &[
            (Place::Discovery, "login.microsoftonline.com/common/v2.0/.well-known/openid-configuration"),
            (Place::Keys, "login.microsoftonline.com/common/discovery/v2.0/keys"),
            (Place::Token, "login.microsoftonline.com/common/oauth2/v2.0/token"),
            (Place::UserInfo, "graph.microsoft.com/oidc/userinfo"),
        ],
        ..OIDC
    },
    Shape {
        preset: "facebook",
        authorization: "https://www.facebook.com/v24.0/dialog/oauth",
        places: &[
            (Place::Token, "graph.facebook.com/v24.0/oauth/access_token"),
            (Place::UserInfo, "graph.facebook.com/v24.0/me"),
            (Place::TokenCheck, "graph.facebook.com/v24.0/debug_token"),
        ],
        ..PLAIN
    },
    Shape {
        preset: "discord",
        authorization: "https://discord.com/oauth2/authorize",
        places: &[
            (Place::Token, "discord.com/api/oauth2/token"),
            (Place::UserInfo, "discord.com/api/v10/users/@me"),
            (Place::TokenCheck, "discord.com/api/v10/oauth2/@me"),
        ],
        ..PLAIN
    },
    Shape {
        preset: "linkedin",
        issuer: Some("https://www.linkedin.com/oauth"),
        authorization: "https://www.linkedin.com/oauth/v2/authorization",
        places: &[
            (Place::Discovery, "www.linkedin.com/oauth/.well-known/openid-configuration"),
            (Place::Keys, "www.linkedin.com/oauth/openid/jwks"),
            (Place::Token, "www.linkedin.com/oauth/v2/accessToken"),
            (Place::UserInfo, "api.linkedin.com/v2/userinfo"),
            (Place::TokenCheck, "www.linkedin.com/oauth/v2/introspectToken"),
        ],
        pkce: false,
        nonce: false,
        ..OIDC
    },
    Shape {
        preset: "x",
        authorization: "https://x.com/i/oauth2/authorize",
        places: &[(Place::Token, "api.x.com/2/oauth2/token"), (Place::UserInfo, "api.x.com/2/users/me")],
        authentication: Authentication::Basic,
        ..PLAIN
    },
    Shape {
        preset: "slack",
        issuer: Some("https://slack.com"),
        authorization: "https://slack.com/openid/connect/authorize",
        places: &[
            (Place::Discovery, "slack.com/.well-known/openid-configuration"),
            (Place::Keys, "slack.com/openid/connect/keys"),
            (Place::Token, "slack.com/api/openid.connect.token"),
            (Place::UserInfo, "slack.com/api/openid.connect.userInfo"),
        ],
        ..OIDC
    },
    Shape {
        preset: "bitbucket",
        authorization: "https://bitbucket.org/site/oauth2/authorize",
        places: &[
            (Place::Token, "bitbucket.org/site/oauth2/access_token"),
            (Place::UserInfo, "api.bitbucket.org/2.0/user"),
            (Place::Emails, "api.bitbucket.org/2.0/user/emails"),
        ],
        authentication: Authentication::Basic,
        ..PLAIN
    },
    Shape {
        preset: "twitch",
        authorization: "https://id.twitch.tv/oauth2/authorize",
        places: &[
            (Place::Token, "id.twitch.tv/oauth2/token"),
            (Place::UserInfo, "api.twitch.tv/helix/users"),
            (Place::TokenCheck, "id.twitch.tv/oauth2/validate"),
        ],
        ..PLAIN
    },
    Shape {
        preset: "spotify",
        authorization: "https://accounts.spotify.com/authorize",
        places: &[(Place::Token, "accounts.spotify.com/api/token"), (Place::UserInfo, "api.spotify.com/v1/me")],
        authentication: Authentication::Basic,
        ..PLAIN
    },
    Shape {
        preset: "oidc",
        issuer: Some("https://id.provider.test"),
        authorization: "https://id.provider.test/authorize",
        places: &[
            (Place::Discovery, "id.provider.test/.well-known/openid-configuration"),
            (Place::Keys, "id.provider.test/keys"),
            (Place::Token, "id.provider.test/token"),
            (Place::UserInfo, "id.provider.test/userinfo"),
            (Place::TokenCheck, "id.provider.test/introspect"),
        ],
        authentication: Authentication::Basic,
        ..OIDC
    },
    Shape {
        preset: "oauth2",
        authorization: "https://oauth.provider.test/authorize",
        places: &[
            (Place::Token, "oauth.provider.test/token"),
            (Place::UserInfo, "oauth.provider.test/me"),
            (Place::TokenCheck, "oauth.provider.test/introspect"),
        ],
        ..PLAIN
    },
];

// === impl Shape ===

impl Shape {
    /// Every name under which it is asked, once.
    pub(super) fn hosts(&self) -> Vec<&'static str> {
        let mut hosts: Vec<&str> = self.places.iter().filter_map(|(_, at)| at.split('/').next()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    pub(super) fn place(&self, host: &str, path: &str, client: &str) -> Place {
        let at = format!("{host}{path}");
        let found = self.places.iter().find(|(_, place)| place.replace("{client_id}", client) == at);
        found.map_or(Place::Elsewhere, |(place, _)| *place)
    }

    pub fn has(&self, place: Place) -> bool {
        self.places.iter().any(|(one, _)| *one == place)
    }

    fn url(&self, place: Place) -> Option<String> {
        self.places.iter().find(|(one, _)| *one == place).map(|(_, at)| format!("https://{at}"))
    }

    /// Its discovery document.
    pub fn discovery(&self) -> Value {
        let issuer = match self.preset {
            "microsoft" => "https://login.microsoftonline.com/{tenantid}/v2.0",
            _ => self.issuer.unwrap_or_default(),
        };
        let method = match self.authentication {
            Authentication::Basic => "client_secret_basic",
            Authentication::Post => "client_secret_post",
        };
        let mut document = json!({
            "issuer": issuer,
            "authorization_endpoint": self.authorization,
            "token_endpoint": self.url(Place::Token),
            "jwks_uri": self.url(Place::Keys),
            "response_types_supported": ["code"],
            "id_token_signing_alg_values_supported": ["ES256", "RS256", "HS256", "none"],
            "token_endpoint_auth_methods_supported": [method],
        });
        if !self.id_token_only {
            document["userinfo_endpoint"] = json!(self.url(Place::UserInfo));
        }
        if matches!(self.preset, "gitlab" | "oidc") {
            document["introspection_endpoint"] = json!(self.url(Place::TokenCheck));
        }
        document
    }
}

/// What its ID tokens say of a person.
pub(super) fn add_claims(shape: &Shape, person: &Person, claims: &mut Value) {
    claims["sub"] = json!(person.subject);
    let email = person.email.as_ref();
    match shape.preset {
        "google" | "oidc" => {
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                claims["email_verified"] = json!(verified);
            }
            claims["name"] = json!(person.name);
        }
        "apple" => {
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                // Apple has written both text and booleans.
                claims["email_verified"] = json!(verified.to_string());
            }
        }
        // The rest is at its userinfo endpoint.
        "gitlab" => {
            claims["sub_legacy"] = json!("x");
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                claims["email_verified"] = json!(verified);
            }
        }
        "microsoft" => {
            claims["tid"] = json!(TENANT);
            claims["ver"] = json!("2.0");
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                if *verified {
                    claims["xms_edov"] = json!("1");
                }
            }
            claims["name"] = json!(person.name);
        }
        "linkedin" => {
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                claims["email_verified"] = json!(verified.to_string());
            }
            claims["name"] = json!(person.name);
        }
        "slack" => {
            claims["https://slack.com/team_id"] = json!("T0RR");
            claims["https://slack.com/user_id"] = json!(person.subject);
            if let Some((email, verified)) = email {
                claims["email"] = json!(email);
                claims["email_verified"] = json!(verified);
            }
            claims["name"] = json!(person.name);
        }
        other => unreachable!("{other} gives no ID tokens"),
    }
}

/// What it tells who has the person's access token.
pub(super) fn user_info(shape: &Shape, person: &Person) -> Value {
    let (email, verified) = match &person.email {
        Some((email, verified)) => (Some(email), *verified),
        None => (None, false),
    };
    let (id, name) = (&person.subject, &person.name);
    match shape.preset {
        "github" => json!({ "login": "ada", "id": id.parse::<u64>().ok(), "name": name, "email": null }),
        "facebook" => match email {
            Some(email) => json!({ "id": id, "name": name, "email": email }),
            None => json!({ "id": id, "name": name }),
        },
        "discord" => json!({
            "id": id, "username": "ada", "discriminator": "0", "global_name": name, "email": email, "verified": verified,
        }),
        // It tells confirmed addresses alone.
        "x" => match email.filter(|_| verified) {
            Some(email) => json!({ "data": { "id": id, "name": name, "username": "ada", "confirmed_email": email } }),
            None => json!({ "data": { "id": id, "name": name, "username": "ada" } }),
        },
        "bitbucket" => json!({ "type": "user", "uuid": id, "display_name": name, "nickname": "ada" }),
        // Likewise.
        "twitch" => match email.filter(|_| verified) {
            Some(email) => json!({ "data": [{ "id": id, "login": "ada", "display_name": name, "email": email }] }),
            None => json!({ "data": [{ "id": id, "login": "ada", "display_name": name }] }),
        },
        "spotify" => json!({ "id": id, "display_name": name, "email": email, "type": "user" }),
        "oauth2" => json!({ "id": id, "mail": email, "mail_confirmed": verified, "full_name": name }),
        "slack" => json!({
            "ok": true, "sub": id, "https://slack.com/team_id": "T0RR", "email": email, "email_verified": verified,
            "name": name,
        }),
        _ => json!({ "sub": id, "email": email, "email_verified": verified, "name": name }),
    }
}

/// The list of the person's addresses, the primary one not the first.
pub(super) fn emails(shape: &Shape, person: &Person) -> Value {
    let (primary, verified) =
        if shape.preset == "github" { ("primary", "verified") } else { ("is_primary", "is_confirmed") };
    let mut list = Vec::new();
    if let Some((email, is_verified)) = &person.email {
        list.push(json!({ "email": "other@example.com", primary: false, verified: true }));
        list.push(json!({ "email": email, primary: true, verified: is_verified }));
    }
    if shape.preset == "github" { json!(list) } else { json!({ "pagelen": 10, "values": list }) }
}

/// A successful answer of its token endpoint.
pub(super) fn tokens(shape: &Shape, access_token: &str, id_token: Option<&str>) -> Value {
    let mut tokens = json!({ "access_token": access_token, "token_type": "Bearer", "expires_in": 3600 });
    match shape.preset {
        "github" | "facebook" => tokens["token_type"] = json!("bearer"),
        "twitch" => {
            tokens["token_type"] = json!("bearer");
            tokens["scope"] = json!(["user:read:email"]);
        }
        "slack" => tokens["ok"] = json!(true),
        "bitbucket" => tokens["scopes"] = json!("account email"),
        _ => tokens["scope"] = json!("openid"),
    }
    if let Some(id_token) = id_token {
        tokens["id_token"] = json!(id_token);
    }
    tokens
}

/// How its token endpoint says no.
pub(super) fn refuse(shape: &Shape, refusal: Refusal) -> Reply {
    match (shape.preset, refusal) {
        ("github", Refusal::Client) => Reply::json(&json!({
            "error": "incorrect_client_credentials",
            "error_description": "The client_id and/or client_secret passed are incorrect.",
        })),
        ("github", Refusal::Code) => Reply::json(&json!({
            "error": "bad_verification_code", "error_description": "The code passed is incorrect or expired.",
        })),
        ("slack", Refusal::Client) => Reply::json(&json!({ "ok": false, "error": "bad_client_secret" })),
        ("slack", Refusal::Code) => Reply::json(&json!({ "ok": false, "error": "invalid_code" })),
        ("facebook", Refusal::Client) => Reply::status(
            400,
            &json!({ "error": { "message": "Error validating client secret.", "type": "OAuthException", "code": 1 } }),
        ),
        ("facebook", Refusal::Code) => Reply::status(
            400,
            &json!({ "error": { "message": "Invalid verification code format.", "type": "OAuthException", "code": 100 } }),
        ),
        ("twitch", Refusal::Client) => {
            Reply::status(403, &json!({ "status": 403, "message": "invalid client secret" }))
        }
        ("twitch", Refusal::Code) => {
            Reply::status(400, &json!({ "status": 400, "message": "Invalid authorization code" }))
        }
        (_, Refusal::Client) => Reply::status(401, &json!({ "error": "invalid_client", "error_description": "who?" })),
        (_, Refusal::Code) => Reply::status(400, &json!({ "error": "invalid_grant", "error_description": "no" })),
    }
}

/// RFC 7617, with both parts form-encoded (RFC 6749, 2.3.1).
pub(super) fn basic(seen: &Seen) -> Option<(String, String)> {
    let encoded = seen.header("authorization").strip_prefix("Basic ")?;
    let pair = String::from_utf8(STANDARD.decode(encoded).ok()?).ok()?;
    let (id, secret) = pair.split_once(':')?;
    let plain = |part: &str| form_urlencoded::parse(format!("v={part}").as_bytes()).next().map(|(_, v)| v.into_owned());
    Some((plain(id)?, plain(secret)?))
}

/// What it says of an access token to who asks.
pub(super) fn token_check(state: &State, seen: &Seen) -> Reply {
    let form = seen.form();
    let in_query = |name: &str| seen.query.get(name).cloned().unwrap_or_default();
    let in_form = |name: &str| form.get(name).cloned().unwrap_or_default();
    let token = match state.shape.preset {
        "google" => in_query("access_token"),
        "facebook" => in_query("input_token"),
        "github" => serde_json::from_slice::<Value>(&seen.body)
            .ok()
            .and_then(|body| body["access_token"].as_str().map(str::to_owned))
            .unwrap_or_default(),
        "discord" | "twitch" => seen.credential().to_owned(),
        _ => in_form("token"),
    };
    let issued = state.tokens.get(&token);
    let now = state.now();
    match state.shape.preset {
        "google" => match issued {
            Some(issued) => Reply::json(&json!({
                "azp": issued.client, "aud": issued.client, "sub": issued.person.subject, "scope": "openid",
                "exp": (now + 3000).to_string(), "expires_in": "3000", "access_type": "online",
            })),
            None => Reply::status(400, &json!({ "error": "invalid_token", "error_description": "Invalid Value" })),
        },
        "github" => {
            let is_caller = basic(seen) == Some((state.client.id.clone(), state.shared()));
            match issued.filter(|issued| is_caller && issued.client == state.client.id) {
                Some(issued) => Reply::json(&json!({
                    "app": { "client_id": issued.client }, "user": { "id": issued.person.subject.parse::<u64>().ok() },
                    "scopes": ["read:user"],
                })),
                None => Reply::status(404, &json!({ "message": "Not Found" })),
            }
        }
        "facebook" if in_query("access_token") != format!("{}|{}", state.client.id, state.shared()) => {
            Reply::status(400, &json!({ "error": { "type": "OAuthException", "code": 190 } }))
        }
        "facebook" => match issued {
            Some(issued) => Reply::json(&json!({ "data": {
                "app_id": issued.client, "type": "USER", "is_valid": true, "user_id": issued.person.subject,
            } })),
            None => Reply::json(&json!({ "data": { "is_valid": false, "error": { "code": 190 } } })),
        },
        "discord" => match issued {
            Some(issued) => Reply::json(&json!({
                "application": { "id": issued.client, "name": "shop" }, "scopes": ["identify"],
                "user": { "id": issued.person.subject, "username": "ada" },
            })),
            None => Reply::status(401, &json!({ "message": "401: Unauthorized", "code": 0 })),
        },
        "twitch" if !seen.header("authorization").starts_with("OAuth ") => {
            Reply::status(401, &json!({ "status": 401, "message": "missing authorization token" }))
        }
        "twitch" => match issued {
            Some(issued) => Reply::json(&json!({
                "client_id": issued.client, "login": "ada", "scopes": [], "user_id": issued.person.subject,
                "expires_in": 5000,
            })),
            None => Reply::status(401, &json!({ "status": 401, "message": "invalid access token" })),
        },
        // RFC 7662.
        _ if !state.is_client(seen) => Reply::status(401, &json!({ "error": "invalid_client" })),
        _ => match issued {
            Some(issued) => Reply::json(&json!({
                "active": true, "client_id": issued.client, "token_type": "Bearer", "exp": now + 3000,
            })),
            None => Reply::json(&json!({ "active": false })),
        },
    }
}

impl State {
    fn shared(&self) -> String {
        match &self.client.secret {
            super::Secret::Shared(secret) => secret.clone(),
            super::Secret::Key { .. } => String::new(),
        }
    }
}
