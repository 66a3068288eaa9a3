//! How each provider responds: its endpoints and its documents. This module was written from the providers'
//! documentation and not from the server's table of presets, so that a mistake in one of the two fails a test.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use url::form_urlencoded;

use super::{ProviderEndpoint, ProviderUser, RecordedRequest, ScriptedResponse, State};

/// The properties of a provider that its clients see.
#[derive(Debug)]
pub struct ProviderProfile {
    pub preset: &'static str,
    /// The issuer in the provider's ID tokens; `None` if the provider has no ID tokens.
    pub issuer: Option<&'static str>,
    pub authorization: &'static str,
    /// Each endpoint with its `host/path`, in which `{client_id}` stands for the client's id.
    pub(super) endpoints: &'static [(ProviderEndpoint, &'static str)],
    pub(super) authentication: Authentication,
    /// Whether the provider checks PKCE challenges.
    pub pkce: bool,
    /// Whether ID tokens repeat the `nonce` of the authorization request.
    pub nonce: bool,
    /// Whether only ID tokens contain the email address, because the provider has no userinfo endpoint.
    pub(super) id_token_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Authentication {
    Basic,
    Post,
}

/// What is wrong with a request to the token endpoint: the client's credentials, or the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenError {
    Client,
    Code,
}

/// The Microsoft tenant (directory) of the test users.
pub const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

const OAUTH2_DEFAULTS: ProviderProfile = ProviderProfile {
    preset: "",
    issuer: None,
    authorization: "",
    endpoints: &[],
    authentication: Authentication::Post,
    pkce: true,
    nonce: false,
    id_token_only: false,
};

const OIDC_DEFAULTS: ProviderProfile = ProviderProfile { nonce: true, ..OAUTH2_DEFAULTS };

pub static PRESETS: [ProviderProfile; 15] = [
    ProviderProfile {
        preset: "google",
        issuer: Some("https://accounts.google.com"),
        authorization: "https://accounts.google.com/o/oauth2/v2/auth",
        endpoints: &[
            (ProviderEndpoint::Discovery, "accounts.google.com/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "www.googleapis.com/oauth2/v3/certs"),
            (ProviderEndpoint::Token, "oauth2.googleapis.com/token"),
            (ProviderEndpoint::UserInfo, "openidconnect.googleapis.com/v1/userinfo"),
            (ProviderEndpoint::TokenCheck, "oauth2.googleapis.com/tokeninfo"),
        ],
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "apple",
        issuer: Some("https://appleid.apple.com"),
        authorization: "https://appleid.apple.com/auth/authorize",
        endpoints: &[
            (ProviderEndpoint::Discovery, "appleid.apple.com/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "appleid.apple.com/auth/keys"),
            (ProviderEndpoint::Token, "appleid.apple.com/auth/token"),
        ],
        id_token_only: true,
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "github",
        authorization: "https://github.com/login/oauth/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "github.com/login/oauth/access_token"),
            (ProviderEndpoint::UserInfo, "api.github.com/user"),
            (ProviderEndpoint::Emails, "api.github.com/user/emails"),
            (ProviderEndpoint::TokenCheck, "api.github.com/applications/{client_id}/token"),
        ],
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "gitlab",
        issuer: Some("https://gitlab.com"),
        authorization: "https://gitlab.com/oauth/authorize",
        endpoints: &[
            (ProviderEndpoint::Discovery, "gitlab.com/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "gitlab.com/oauth/discovery/keys"),
            (ProviderEndpoint::Token, "gitlab.com/oauth/token"),
            (ProviderEndpoint::UserInfo, "gitlab.com/oauth/userinfo"),
            (ProviderEndpoint::TokenCheck, "gitlab.com/oauth/introspect"),
        ],
        authentication: Authentication::Basic,
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "microsoft",
        issuer: Some("https://login.microsoftonline.com/72f988bf-86f1-41af-91ab-2d7cd011db47/v2.0"),
        authorization: "https://login.microsoftonline.com/common/oauth2/v2.0/authorize",
        endpoints: &[
            (ProviderEndpoint::Discovery, "login.microsoftonline.com/common/v2.0/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "login.microsoftonline.com/common/discovery/v2.0/keys"),
            (ProviderEndpoint::Token, "login.microsoftonline.com/common/oauth2/v2.0/token"),
            (ProviderEndpoint::UserInfo, "graph.microsoft.com/oidc/userinfo"),
        ],
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "facebook",
        authorization: "https://www.facebook.com/v24.0/dialog/oauth",
        endpoints: &[
            (ProviderEndpoint::Token, "graph.facebook.com/v24.0/oauth/access_token"),
            (ProviderEndpoint::UserInfo, "graph.facebook.com/v24.0/me"),
            (ProviderEndpoint::TokenCheck, "graph.facebook.com/v24.0/debug_token"),
        ],
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "discord",
        authorization: "https://discord.com/oauth2/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "discord.com/api/oauth2/token"),
            (ProviderEndpoint::UserInfo, "discord.com/api/v10/users/@me"),
            (ProviderEndpoint::TokenCheck, "discord.com/api/v10/oauth2/@me"),
        ],
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "linkedin",
        issuer: Some("https://www.linkedin.com/oauth"),
        authorization: "https://www.linkedin.com/oauth/v2/authorization",
        endpoints: &[
            (ProviderEndpoint::Discovery, "www.linkedin.com/oauth/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "www.linkedin.com/oauth/openid/jwks"),
            (ProviderEndpoint::Token, "www.linkedin.com/oauth/v2/accessToken"),
            (ProviderEndpoint::UserInfo, "api.linkedin.com/v2/userinfo"),
            (ProviderEndpoint::TokenCheck, "www.linkedin.com/oauth/v2/introspectToken"),
        ],
        pkce: false,
        nonce: false,
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "x",
        authorization: "https://x.com/i/oauth2/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "api.x.com/2/oauth2/token"),
            (ProviderEndpoint::UserInfo, "api.x.com/2/users/me"),
        ],
        authentication: Authentication::Basic,
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "slack",
        issuer: Some("https://slack.com"),
        authorization: "https://slack.com/openid/connect/authorize",
        endpoints: &[
            (ProviderEndpoint::Discovery, "slack.com/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "slack.com/openid/connect/keys"),
            (ProviderEndpoint::Token, "slack.com/api/openid.connect.token"),
            (ProviderEndpoint::UserInfo, "slack.com/api/openid.connect.userInfo"),
        ],
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "bitbucket",
        authorization: "https://bitbucket.org/site/oauth2/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "bitbucket.org/site/oauth2/access_token"),
            (ProviderEndpoint::UserInfo, "api.bitbucket.org/2.0/user"),
            (ProviderEndpoint::Emails, "api.bitbucket.org/2.0/user/emails"),
        ],
        authentication: Authentication::Basic,
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "twitch",
        authorization: "https://id.twitch.tv/oauth2/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "id.twitch.tv/oauth2/token"),
            (ProviderEndpoint::UserInfo, "api.twitch.tv/helix/users"),
            (ProviderEndpoint::TokenCheck, "id.twitch.tv/oauth2/validate"),
        ],
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "spotify",
        authorization: "https://accounts.spotify.com/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "accounts.spotify.com/api/token"),
            (ProviderEndpoint::UserInfo, "api.spotify.com/v1/me"),
        ],
        authentication: Authentication::Basic,
        ..OAUTH2_DEFAULTS
    },
    ProviderProfile {
        preset: "oidc",
        issuer: Some("https://id.provider.test"),
        authorization: "https://id.provider.test/authorize",
        endpoints: &[
            (ProviderEndpoint::Discovery, "id.provider.test/.well-known/openid-configuration"),
            (ProviderEndpoint::Keys, "id.provider.test/keys"),
            (ProviderEndpoint::Token, "id.provider.test/token"),
            (ProviderEndpoint::UserInfo, "id.provider.test/userinfo"),
            (ProviderEndpoint::TokenCheck, "id.provider.test/introspect"),
        ],
        authentication: Authentication::Basic,
        ..OIDC_DEFAULTS
    },
    ProviderProfile {
        preset: "oauth2",
        authorization: "https://oauth.provider.test/authorize",
        endpoints: &[
            (ProviderEndpoint::Token, "oauth.provider.test/token"),
            (ProviderEndpoint::UserInfo, "oauth.provider.test/me"),
            (ProviderEndpoint::TokenCheck, "oauth.provider.test/introspect"),
        ],
        ..OAUTH2_DEFAULTS
    },
];

// === impl ProviderProfile ===

impl ProviderProfile {
    /// The provider's host names, without duplicates.
    pub(super) fn hosts(&self) -> Vec<&'static str> {
        let mut hosts: Vec<&str> =
            self.endpoints.iter().filter_map(|(_, host_and_path)| host_and_path.split('/').next()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    pub(super) fn endpoint(&self, host: &str, path: &str, client: &str) -> ProviderEndpoint {
        let host_and_path = format!("{host}{path}");
        let found =
            self.endpoints.iter().find(|(_, endpoint)| endpoint.replace("{client_id}", client) == host_and_path);
        found.map_or(ProviderEndpoint::Unknown, |(endpoint, _)| *endpoint)
    }

    pub fn has(&self, endpoint: ProviderEndpoint) -> bool {
        self.endpoints.iter().any(|(one, _)| *one == endpoint)
    }

    fn endpoint_url(&self, endpoint: ProviderEndpoint) -> Option<String> {
        self.endpoints
            .iter()
            .find(|(one, _)| *one == endpoint)
            .map(|(_, host_and_path)| format!("https://{host_and_path}"))
    }

    /// The provider's discovery document.
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
            "token_endpoint": self.endpoint_url(ProviderEndpoint::Token),
            "jwks_uri": self.endpoint_url(ProviderEndpoint::Keys),
            "response_types_supported": ["code"],
            "id_token_signing_alg_values_supported": ["ES256", "RS256", "HS256", "none"],
            "token_endpoint_auth_methods_supported": [method],
        });
        if !self.id_token_only {
            document["userinfo_endpoint"] = json!(self.endpoint_url(ProviderEndpoint::UserInfo));
        }
        if matches!(self.preset, "gitlab" | "oidc") {
            document["introspection_endpoint"] = json!(self.endpoint_url(ProviderEndpoint::TokenCheck));
        }
        document
    }
}

/// Adds a user's claims to an ID token.
pub(super) fn add_claims(profile: &ProviderProfile, person: &ProviderUser, claims: &mut Value) {
    claims["sub"] = json!(person.subject);
    let email = person.email.as_ref();
    match profile.preset {
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
                // Apple has sent both strings and booleans for this claim.
                claims["email_verified"] = json!(verified.to_string());
            }
        }
        // GitLab's userinfo endpoint returns the other claims.
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

/// The response of the userinfo endpoint.
pub(super) fn user_info(profile: &ProviderProfile, person: &ProviderUser) -> Value {
    let (email, verified) = match &person.email {
        Some((email, verified)) => (Some(email), *verified),
        None => (None, false),
    };
    let (id, name) = (&person.subject, &person.name);
    match profile.preset {
        "github" => json!({ "login": "ada", "id": id.parse::<u64>().ok(), "name": name, "email": null }),
        "facebook" => match email {
            Some(email) => json!({ "id": id, "name": name, "email": email }),
            None => json!({ "id": id, "name": name }),
        },
        "discord" => json!({
            "id": id, "username": "ada", "discriminator": "0", "global_name": name, "email": email, "verified": verified,
        }),
        // X returns only verified email addresses.
        "x" => match email.filter(|_| verified) {
            Some(email) => json!({ "data": { "id": id, "name": name, "username": "ada", "confirmed_email": email } }),
            None => json!({ "data": { "id": id, "name": name, "username": "ada" } }),
        },
        "bitbucket" => json!({ "type": "user", "uuid": id, "display_name": name, "nickname": "ada" }),
        // Twitch also returns only verified email addresses.
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

/// The list of the user's email addresses. The primary email address is not the first in the list.
pub(super) fn emails(profile: &ProviderProfile, person: &ProviderUser) -> Value {
    let (primary, verified) =
        if profile.preset == "github" { ("primary", "verified") } else { ("is_primary", "is_confirmed") };
    let mut list = Vec::new();
    if let Some((email, is_verified)) = &person.email {
        list.push(json!({ "email": "other@example.com", primary: false, verified: true }));
        list.push(json!({ "email": email, primary: true, verified: is_verified }));
    }
    if profile.preset == "github" { json!(list) } else { json!({ "pagelen": 10, "values": list }) }
}

/// A successful response of the token endpoint.
pub(super) fn token_response(profile: &ProviderProfile, access_token: &str, id_token: Option<&str>) -> Value {
    let mut tokens = json!({ "access_token": access_token, "token_type": "Bearer", "expires_in": 3600 });
    match profile.preset {
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

/// The error response of the token endpoint.
pub(super) fn token_error(profile: &ProviderProfile, refusal: TokenError) -> ScriptedResponse {
    match (profile.preset, refusal) {
        ("github", TokenError::Client) => ScriptedResponse::json(&json!({
            "error": "incorrect_client_credentials",
            "error_description": "The client_id and/or client_secret passed are incorrect.",
        })),
        ("github", TokenError::Code) => ScriptedResponse::json(&json!({
            "error": "bad_verification_code", "error_description": "The code passed is incorrect or expired.",
        })),
        ("slack", TokenError::Client) => ScriptedResponse::json(&json!({ "ok": false, "error": "bad_client_secret" })),
        ("slack", TokenError::Code) => ScriptedResponse::json(&json!({ "ok": false, "error": "invalid_code" })),
        ("facebook", TokenError::Client) => ScriptedResponse::status(
            400,
            &json!({ "error": { "message": "Error validating client secret.", "type": "OAuthException", "code": 1 } }),
        ),
        ("facebook", TokenError::Code) => ScriptedResponse::status(
            400,
            &json!({ "error": { "message": "Invalid verification code format.", "type": "OAuthException", "code": 100 } }),
        ),
        ("twitch", TokenError::Client) => {
            ScriptedResponse::status(403, &json!({ "status": 403, "message": "invalid client secret" }))
        }
        ("twitch", TokenError::Code) => {
            ScriptedResponse::status(400, &json!({ "status": 400, "message": "Invalid authorization code" }))
        }
        (_, TokenError::Client) => {
            ScriptedResponse::status(401, &json!({ "error": "invalid_client", "error_description": "who?" }))
        }
        (_, TokenError::Code) => {
            ScriptedResponse::status(400, &json!({ "error": "invalid_grant", "error_description": "no" }))
        }
    }
}

/// HTTP Basic credentials (RFC 7617), with both parts form-encoded (RFC 6749, 2.3.1).
pub(super) fn basic_credentials(request: &RecordedRequest) -> Option<(String, String)> {
    let encoded = request.header("authorization").strip_prefix("Basic ")?;
    let pair = String::from_utf8(STANDARD.decode(encoded).ok()?).ok()?;
    let (id, secret) = pair.split_once(':')?;
    let plain = |part: &str| form_urlencoded::parse(format!("v={part}").as_bytes()).next().map(|(_, v)| v.into_owned());
    Some((plain(id)?, plain(secret)?))
}

/// The response of the endpoint that checks access tokens.
pub(super) fn token_check_response(state: &State, request: &RecordedRequest) -> ScriptedResponse {
    let form = request.form();
    let in_query = |name: &str| request.query.get(name).cloned().unwrap_or_default();
    let in_form = |name: &str| form.get(name).cloned().unwrap_or_default();
    let token = match state.profile.preset {
        "google" => in_query("access_token"),
        "facebook" => in_query("input_token"),
        "github" => serde_json::from_slice::<Value>(&request.body)
            .ok()
            .and_then(|body| body["access_token"].as_str().map(str::to_owned))
            .unwrap_or_default(),
        "discord" | "twitch" => request.credential().to_owned(),
        _ => in_form("token"),
    };
    let issued = state.tokens.get(&token);
    let now = state.now();
    match state.profile.preset {
        "google" => match issued {
            Some(issued) => ScriptedResponse::json(&json!({
                "azp": issued.client, "aud": issued.client, "sub": issued.person.subject, "scope": "openid",
                "exp": (now + 3000).to_string(), "expires_in": "3000", "access_type": "online",
            })),
            None => ScriptedResponse::status(
                400,
                &json!({ "error": "invalid_token", "error_description": "Invalid Value" }),
            ),
        },
        "github" => {
            let is_caller = basic_credentials(request) == Some((state.client.id.clone(), state.shared_secret()));
            match issued.filter(|issued| is_caller && issued.client == state.client.id) {
                Some(issued) => ScriptedResponse::json(&json!({
                    "app": { "client_id": issued.client }, "user": { "id": issued.person.subject.parse::<u64>().ok() },
                    "scopes": ["read:user"],
                })),
                None => ScriptedResponse::status(404, &json!({ "message": "Not Found" })),
            }
        }
        "facebook" if in_query("access_token") != format!("{}|{}", state.client.id, state.shared_secret()) => {
            ScriptedResponse::status(400, &json!({ "error": { "type": "OAuthException", "code": 190 } }))
        }
        "facebook" => match issued {
            Some(issued) => ScriptedResponse::json(&json!({ "data": {
                "app_id": issued.client, "type": "USER", "is_valid": true, "user_id": issued.person.subject,
            } })),
            None => ScriptedResponse::json(&json!({ "data": { "is_valid": false, "error": { "code": 190 } } })),
        },
        "discord" => match issued {
            Some(issued) => ScriptedResponse::json(&json!({
                "application": { "id": issued.client, "name": "shop" }, "scopes": ["identify"],
                "user": { "id": issued.person.subject, "username": "ada" },
            })),
            None => ScriptedResponse::status(401, &json!({ "message": "401: Unauthorized", "code": 0 })),
        },
        "twitch" if !request.header("authorization").starts_with("OAuth ") => {
            ScriptedResponse::status(401, &json!({ "status": 401, "message": "missing authorization token" }))
        }
        "twitch" => match issued {
            Some(issued) => ScriptedResponse::json(&json!({
                "client_id": issued.client, "login": "ada", "scopes": [], "user_id": issued.person.subject,
                "expires_in": 5000,
            })),
            None => ScriptedResponse::status(401, &json!({ "status": 401, "message": "invalid access token" })),
        },
        // Introspection (RFC 7662).
        _ if !state.is_client(request) => ScriptedResponse::status(401, &json!({ "error": "invalid_client" })),
        _ => match issued {
            Some(issued) => ScriptedResponse::json(&json!({
                "active": true, "client_id": issued.client, "token_type": "Bearer", "exp": now + 3000,
            })),
            None => ScriptedResponse::json(&json!({ "active": false })),
        },
    }
}

impl State {
    fn shared_secret(&self) -> String {
        match &self.client.secret {
            super::ClientSecret::Shared(secret) => secret.clone(),
            super::ClientSecret::Key { .. } => String::new(),
        }
    }
}
