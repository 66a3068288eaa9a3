//! Renders a Client as the servers read it, with every default filled in. Infallible and deterministic.

use latchkey_crds::{
    client::{Client, ClientKind, ClientScope, DEFAULT_ID_TOKEN_LIFETIME_SECONDS, DEFAULT_MAX_GROUPS, Requirement},
    rendered::{RenderedClient, RenderedClientAuthentication, RenderedClientGroups, RenderedClientTokens},
    types::ClientId,
};

/// Renders a Client that passed all checks. The UID in its metadata identifies it.
pub(crate) fn render(
    client: &Client,
    client_id: ClientId,
    authentication: RenderedClientAuthentication,
) -> RenderedClient {
    let (metadata, spec) = (&client.metadata, &client.spec);
    let pkce_required = match &spec.kind {
        ClientKind::Web(web) => web.pkce == Requirement::Required,
        ClientKind::Public(_) => true,
    };
    RenderedClient {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        uid: metadata.uid.clone().unwrap_or_default(),
        generation: metadata.generation.unwrap_or(0),
        display_name: spec.display_name.clone().unwrap_or_else(|| client_id.to_string()),
        client_id,
        authentication,
        redirect_urls: spec.redirect_urls().to_vec(),
        post_logout_redirect_urls: spec.post_logout_redirect_urls().to_vec(),
        pkce_required,
        pushed_authorization_required: spec.pushed_authorization == Requirement::Required,
        scopes: match spec.scopes.as_slice() {
            [] => ClientScope::DEFAULT.to_vec(),
            scopes => scopes.to_vec(),
        },
        consent: spec.consent,
        allowed_groups: spec.allow.groups.clone(),
        groups: RenderedClientGroups {
            only: spec.groups.only.clone(),
            max: number_or_default(spec.groups.max, DEFAULT_MAX_GROUPS),
        },
        tokens: RenderedClientTokens {
            id_token_algorithm: spec.tokens.id_token_algorithm,
            id_token_lifetime_seconds: number_or_default(
                spec.tokens.id_token_lifetime_seconds,
                DEFAULT_ID_TOKEN_LIFETIME_SECONDS,
            ),
            audiences: spec.tokens.audiences.clone(),
        },
    }
}

/// Returns the size of a rendered client in a document, in bytes.
pub(crate) fn size(client: &RenderedClient) -> usize {
    serde_json::to_vec(client).expect("a rendered client has only string keys").len()
}

/// Returns a number of the spec, or the default. The schema rejects negative numbers.
fn number_or_default(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::client::fixtures::{client_with, web};

    fn rendered(fields: Value) -> Value {
        let client = client_with("monitoring", "grafana", fields);
        json!(render(&client, client.client_id().unwrap(), RenderedClientAuthentication::Unresolved))
    }

    #[test]
    fn a_client_with_few_fields_gets_the_defaults() {
        assert_eq!(
            rendered(json!({})),
            json!({
                "clientID": "monitoring.grafana",
                "namespace": "monitoring",
                "name": "grafana",
                "uid": "uid-of-monitoring/grafana",
                "generation": 1,
                "displayName": "monitoring.grafana",
                "authentication": { "method": "unresolved" },
                "redirectURLs": ["https://grafana.example.com/login"],
                "pkceRequired": false,
                "pushedAuthorizationRequired": false,
                "scopes": ["openid", "profile", "email"],
                "consent": "Never",
                "groups": { "max": 100 },
                "tokens": { "idTokenAlgorithm": "RS256", "idTokenLifetimeSeconds": 3600 },
            })
        );
    }

    #[test]
    fn every_field_of_the_spec_is_rendered() {
        let mut fields = web(json!({
            "pkce": "Required",
            "postLogoutRedirectURLs": ["https://grafana.example.com/"],
        }));
        let more = json!({
            "clientID": "grafana",
            "displayName": "Grafana",
            "pushedAuthorization": "Required",
            "scopes": ["openid", "groups", "offline_access"],
            "consent": "Once",
            "allow": { "groups": ["admins"] },
            "groups": { "only": ["argo:*"], "max": 5 },
            "tokens": { "idTokenAlgorithm": "ES256", "idTokenLifetimeSeconds": 60, "audiences": ["ops"] },
        });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let rendered = rendered(fields);
        for (pointer, value) in [
            ("/clientID", json!("grafana")),
            ("/displayName", json!("Grafana")),
            ("/pkceRequired", json!(true)),
            ("/postLogoutRedirectURLs", json!(["https://grafana.example.com/"])),
            ("/pushedAuthorizationRequired", json!(true)),
            ("/scopes", json!(["openid", "groups", "offline_access"])),
            ("/consent", json!("Once")),
            ("/allowedGroups", json!(["admins"])),
            ("/groups", json!({ "only": ["argo:*"], "max": 5 })),
            ("/tokens", json!({ "idTokenAlgorithm": "ES256", "idTokenLifetimeSeconds": 60, "audiences": ["ops"] })),
        ] {
            assert_eq!(rendered.pointer(pointer), Some(&value), "{pointer}");
        }
    }

    #[test]
    fn a_public_client_always_needs_pkce() {
        let public = json!({ "web": null, "public": { "redirectURLs": ["com.example.app:/done"] } });
        let rendered = rendered(public);
        assert_eq!(rendered["pkceRequired"], true);
        assert_eq!(rendered["redirectURLs"], json!(["com.example.app:/done"]));
    }
}
