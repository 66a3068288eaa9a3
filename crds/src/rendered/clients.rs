//! The OpenID Connect clients of an App, as the servers read them.

use serde::{Deserialize, Serialize};

use crate::{
    client::{ClientScope, Consent, IdTokenAlgorithm},
    types::{ClientId, GroupName, GroupPattern, RedirectUrl},
};

/// A client that can sign in users of the App: an accepted `Client` resource, with every default filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedClient {
    #[serde(rename = "clientID")]
    pub client_id: ClientId,
    /// The namespace and the name of the Client resource, for status reports and logs.
    pub namespace: String,
    pub name: String,
    /// The identity of the Client: codes, sessions and consents are bound to it. It is the UID of the resource, so a
    /// new Client of the same name inherits nothing. `latchkey-operator render` knows no UID, and uses
    /// `<namespace>/<name>`.
    pub uid: String,
    /// The generation of the Client resource from which this client was rendered.
    pub generation: i64,
    pub display_name: String,
    pub authentication: RenderedClientAuthentication,
    #[serde(rename = "redirectURLs")]
    pub redirect_urls: Vec<RedirectUrl>,
    #[serde(rename = "postLogoutRedirectURLs", skip_serializing_if = "Vec::is_empty", default)]
    pub post_logout_redirect_urls: Vec<RedirectUrl>,
    /// Whether every authorization request must have a `code_challenge`. Always true for a public client.
    pub pkce_required: bool,
    /// Whether every authorization request must come through the PAR endpoint (RFC 9126).
    pub pushed_authorization_required: bool,
    /// Always contains `openid`.
    pub scopes: Vec<ClientScope>,
    pub consent: Consent,
    /// Only members of one of these groups can sign in. Empty admits every user.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub allowed_groups: Vec<GroupName>,
    pub groups: RenderedClientGroups,
    pub tokens: RenderedClientTokens,
}

/// How a client authenticates at the token endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "method")]
pub enum RenderedClientAuthentication {
    /// `none`: a public client, which has no secret.
    None,
    /// `client_secret_basic` and `client_secret_post`.
    Secret {
        /// The SHA-256 of the client secret, in base64.
        sha256: String,
        /// During a rotation: the previous client secret, which also works.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        previous: Option<PreviousSecret>,
    },
    /// `private_key_jwt` (RFC 7523).
    PrivateKeyJwt {
        /// The public keys of the client: a JWK Set (RFC 7517, section 5) in JSON, checked by the operator.
        jwks: String,
    },
    /// The Secret or ConfigMap of the client does not exist or is invalid. Requests from the client get 503.
    Unresolved,
}

/// A replaced secret that still works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreviousSecret {
    /// The SHA-256 of the secret, in base64.
    pub sha256: String,
    /// When the secret stops working, in seconds since the Unix epoch. `None`: it works until it is removed from the
    /// document.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub expires_at: Option<i64>,
}

/// Which groups of a user the client sees in `groups`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedClientGroups {
    /// The groups that the client sees. Empty shows every group.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub only: Vec<GroupPattern>,
    /// The maximum number of groups in the claim. If the client sees more groups, the claim is omitted.
    pub max: u32,
}

/// The tokens of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderedClientTokens {
    pub id_token_algorithm: IdTokenAlgorithm,
    pub id_token_lifetime_seconds: u32,
    /// Audiences of access tokens in addition to the issuer.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub audiences: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn assert_written(authentication: &RenderedClientAuthentication, expected: &Value) {
        assert_eq!(json!(authentication), *expected);
        assert_eq!(serde_json::from_value::<RenderedClientAuthentication>(expected.clone()).unwrap(), *authentication);
    }

    #[test]
    fn the_authentication_of_a_client_has_a_method() {
        use RenderedClientAuthentication as Authentication;
        assert_written(&Authentication::None, &json!({ "method": "none" }));
        assert_written(&Authentication::Unresolved, &json!({ "method": "unresolved" }));
        assert_written(
            &Authentication::PrivateKeyJwt { jwks: "{}".to_owned() },
            &json!({ "method": "privateKeyJwt", "jwks": "{}" }),
        );
        let previous = |expires_at| Some(PreviousSecret { sha256: "b".to_owned(), expires_at });
        for (previous, expected) in [
            (None, json!({ "method": "secret", "sha256": "a" })),
            (previous(None), json!({ "method": "secret", "sha256": "a", "previous": { "sha256": "b" } })),
            (
                previous(Some(7)),
                json!({ "method": "secret", "sha256": "a", "previous": { "sha256": "b", "expiresAt": 7 } }),
            ),
        ] {
            assert_written(&Authentication::Secret { sha256: "a".to_owned(), previous }, &expected);
        }
    }

    #[test]
    fn lists_that_are_empty_are_not_written() {
        let client = json!({
            "clientID": "grafana",
            "namespace": "monitoring",
            "name": "grafana",
            "uid": "1",
            "generation": 1,
            "displayName": "Grafana",
            "authentication": { "method": "none" },
            "redirectURLs": ["com.example.app:/done"],
            "pkceRequired": true,
            "pushedAuthorizationRequired": false,
            "scopes": ["openid", "offline_access"],
            "consent": "Never",
            "groups": { "max": 100 },
            "tokens": { "idTokenAlgorithm": "RS256", "idTokenLifetimeSeconds": 3600 },
        });
        let read: RenderedClient = serde_json::from_value(client.clone()).unwrap();
        assert_eq!(json!(read), client);
        // A later version can add fields.
        let mut later = client;
        later["novel"] = json!(1);
        assert_eq!(serde_json::from_value::<RenderedClient>(later).unwrap(), read);
    }
}
