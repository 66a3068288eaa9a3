//! Validates a Provider: returns the settings that a server needs for it, or why it cannot be served. Does no I/O and
//! reads no clock.

use std::collections::BTreeMap;

use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use latchkey_crds::{
    conditions::Reason,
    provider::{OAuth2Client, OAuthClient, OidcClient, ProviderClient},
    rendered::{ProviderSettings, SecretString},
};
use serde_json::{Value, json};

use crate::{
    app::keys::from_pem,
    facts::{FieldError, SecretKeyLookup, Settings},
    provider::resolve::ProviderFacts,
};

/// The maximum size of a client secret, in bytes. The secrets that providers issue are much shorter. An App's document
/// has room for 32 Providers with secrets of this size.
const MAX_SECRET_BYTES: usize = 4 * 1024;

/// A Provider that can be served. If its secret is missing or invalid, servers respond with 503 to requests for this
/// Provider.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ValidatedProvider {
    pub(crate) settings: ProviderSettings,
    /// The default of `linkByEmail` for this Provider ([`ProviderClient::links_by_email_by_default`]).
    pub(crate) links_by_email: bool,
    /// Why the secret cannot be used. `None`: it can be used.
    pub(crate) field_error: Option<FieldError>,
}

/// Returns the settings of the Provider, or the first error in its spec.
pub(crate) fn validate(facts: &ProviderFacts, settings: &Settings) -> Result<ValidatedProvider, FieldError> {
    let client = &facts.provider.spec.client;
    if !settings.allow_insecure {
        check_https(client)?;
    }
    let (secret, field_error) = match client_secret(facts) {
        Ok(secret) => (Some(secret), None),
        Err(error) => (None, Some(error)),
    };
    Ok(ValidatedProvider {
        settings: provider_settings(client, secret),
        links_by_email: client.links_by_email_by_default(),
        field_error,
    })
}

fn check_https(client: &ProviderClient) -> Result<(), FieldError> {
    let urls: Vec<(&str, &str)> = match client {
        ProviderClient::GitLab(client) => client.base_url.iter().map(|url| ("baseURL", url.as_str())).collect(),
        ProviderClient::Oidc(client) => vec![("issuer", client.issuer.as_str())],
        ProviderClient::OAuth2(client) => {
            let introspection = client.introspection_url.as_ref().map(|url| ("introspectionURL", url.as_str()));
            [
                ("authorizationURL", client.authorization_url.as_str()),
                ("tokenURL", client.token_url.as_str()),
                ("userInfoURL", client.user_info_url.as_str()),
            ]
            .into_iter()
            .chain(introspection)
            .collect()
        }
        ProviderClient::Google(_)
        | ProviderClient::Apple(_)
        | ProviderClient::GitHub(_)
        | ProviderClient::Microsoft(_)
        | ProviderClient::Facebook(_)
        | ProviderClient::Discord(_)
        | ProviderClient::LinkedIn(_)
        | ProviderClient::X(_)
        | ProviderClient::Slack(_)
        | ProviderClient::Bitbucket(_)
        | ProviderClient::Twitch(_)
        | ProviderClient::Spotify(_) => Vec::new(),
    };
    match urls.iter().find(|(_, url)| !url.starts_with("https://")) {
        Some((field, _)) => {
            Err(FieldError::new(Reason::InvalidSpec, format!("spec.{}.{field}", client.member_name()), "use https"))
        }
        None => Ok(()),
    }
}

fn client_secret(facts: &ProviderFacts) -> Result<SecretString, FieldError> {
    let client = &facts.provider.spec.client;
    let reference = client.secret_ref();
    let is_apple = matches!(client, ProviderClient::Apple(_));
    let field = format!("spec.{}.{}", client.member_name(), if is_apple { "privateKeyRef" } else { "clientSecretRef" });
    let (name, key) = (&reference.name, &reference.key);
    let value = match &facts.secret {
        SecretKeyLookup::NoSecret => {
            let message = format!("Secret {name} does not exist in this namespace; create it, with the key {key}");
            return Err(FieldError::new(Reason::SecretNotFound, field, message));
        }
        SecretKeyLookup::NoKey => {
            let message = format!("Secret {name} has no key {key}; add it");
            return Err(FieldError::new(Reason::SecretKeyNotFound, field, message));
        }
        SecretKeyLookup::Value(value) => value,
    };
    let invalid = |what: &str| {
        FieldError::new(Reason::SecretKeyInvalid, field.clone(), format!("Secret {name}, key {key}: {what}"))
    };
    let text = value.to_trimmed_utf8().ok_or_else(|| invalid("is not text"))?;
    if text.expose().is_empty() {
        return Err(invalid("is empty"));
    }
    if text.expose().len() > MAX_SECRET_BYTES {
        return Err(invalid("is over 4 KiB; it must hold nothing but the secret"));
    }
    if is_apple && !is_p256_key(text.expose()) {
        return Err(invalid("is not a private key as issued by Apple (the .p8 file, PKCS#8 in PEM)"));
    }
    Ok(text)
}

fn is_p256_key(pem: &str) -> bool {
    from_pem(pem).is_some_and(|der| EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &der).is_ok())
}

fn provider_settings(client: &ProviderClient, secret: Option<SecretString>) -> ProviderSettings {
    let settings_with = |oauth: &OAuthClient, options: Vec<(&str, Value)>| ProviderSettings {
        preset: client.member_name().into(),
        client_id: oauth.client_id.clone(),
        additional_client_ids: oauth.additional_client_ids.clone(),
        scopes: oauth.scopes.clone(),
        secret: secret.clone(),
        options: options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<BTreeMap<_, _>>(),
    };
    match client {
        ProviderClient::Google(oauth)
        | ProviderClient::GitHub(oauth)
        | ProviderClient::Facebook(oauth)
        | ProviderClient::Discord(oauth)
        | ProviderClient::LinkedIn(oauth)
        | ProviderClient::X(oauth)
        | ProviderClient::Slack(oauth)
        | ProviderClient::Bitbucket(oauth)
        | ProviderClient::Twitch(oauth)
        | ProviderClient::Spotify(oauth) => settings_with(oauth, Vec::new()),
        ProviderClient::Apple(apple) => ProviderSettings {
            preset: client.member_name().into(),
            client_id: apple.client_id.clone(),
            additional_client_ids: apple.additional_client_ids.clone(),
            scopes: apple.scopes.clone(),
            secret,
            options: [("teamID", &apple.team_id), ("keyID", &apple.key_id)]
                .into_iter()
                .map(|(name, value)| (name.to_owned(), json!(value)))
                .collect(),
        },
        ProviderClient::GitLab(gitlab) => {
            let base_url = gitlab.base_url.as_ref().map_or("https://gitlab.com", |url| url.as_str());
            settings_with(&gitlab.client, vec![("baseURL", json!(base_url))])
        }
        ProviderClient::Microsoft(microsoft) => {
            let tenant = microsoft.tenant.as_deref().unwrap_or("common");
            settings_with(&microsoft.client, vec![("tenant", json!(tenant))])
        }
        ProviderClient::Oidc(OidcClient { client: oauth, issuer, claims }) => {
            let claims = json!({
                "email": claims.email.as_deref().unwrap_or("email"),
                "emailVerified": claims.email_verified.as_deref().unwrap_or("email_verified"),
                "name": claims.name.as_deref().unwrap_or("name"),
            });
            settings_with(oauth, vec![("issuer", json!(issuer)), ("claims", claims)])
        }
        ProviderClient::OAuth2(OAuth2Client {
            client: oauth,
            authorization_url,
            token_url,
            user_info_url,
            introspection_url,
            client_authentication,
            claims,
        }) => {
            let mut options = vec![
                ("authorizationURL", json!(authorization_url)),
                ("tokenURL", json!(token_url)),
                ("userInfoURL", json!(user_info_url)),
                ("clientAuthentication", json!(client_authentication)),
                ("claims", json!(claims)),
            ];
            if let Some(url) = introspection_url {
                options.push(("introspectionURL", json!(url)));
            }
            settings_with(oauth, options)
        }
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::provider::Provider;

    use super::*;
    use crate::{app::keys, facts::SecretBytes};

    fn facts(spec: Value, secret: &str) -> ProviderFacts {
        let provider: Provider = serde_json::from_value(json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "Provider",
            "metadata": { "name": "corp", "namespace": "shop" },
            "spec": spec,
        }))
        .unwrap();
        ProviderFacts { provider, secret: SecretKeyLookup::Value(SecretBytes(secret.as_bytes().to_vec())) }
    }

    fn validated(spec: Value, secret: &str) -> ValidatedProvider {
        let settings = Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false };
        validate(&facts(spec, secret), &settings).unwrap()
    }

    fn client(more: Value) -> Value {
        let mut client = json!({ "clientID": "abc", "clientSecretRef": { "name": "corp", "key": "secret" } });
        client.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client
    }

    fn options(spec: Value) -> Value {
        json!(validated(spec, "hush").settings.options)
    }

    #[test]
    fn options_that_a_spec_leaves_out_get_their_defaults() {
        assert_eq!(options(json!({ "google": client(json!({})) })), json!({}));
        assert_eq!(options(json!({ "gitlab": client(json!({})) })), json!({ "baseURL": "https://gitlab.com" }));
        assert_eq!(
            options(json!({ "gitlab": client(json!({ "baseURL": "https://git.example.com" })) })),
            json!({ "baseURL": "https://git.example.com" })
        );
        assert_eq!(options(json!({ "microsoft": client(json!({})) })), json!({ "tenant": "common" }));
        assert_eq!(
            options(
                json!({ "oidc": client(json!({ "issuer": "https://id.example.com", "claims": { "name": "nick" } })) })
            ),
            json!({
                "issuer": "https://id.example.com",
                "claims": { "email": "email", "emailVerified": "email_verified", "name": "nick" },
            })
        );
        let endpoints = json!({
            "authorizationURL": "https://id.example.com/a",
            "tokenURL": "https://id.example.com/t",
            "userInfoURL": "https://id.example.com/u",
            "claims": { "subject": "id" },
        });
        let mut expected = endpoints.clone();
        expected["clientAuthentication"] = json!("Basic");
        assert_eq!(options(json!({ "oauth2": client(endpoints) })), expected);
    }

    #[test]
    fn an_apple_secret_must_be_a_private_key() {
        let apple = json!({ "apple": {
            "clientID": "dev.example", "teamID": "ABCDE12345", "keyID": "12345ABCDE",
            "privateKeyRef": { "name": "corp", "key": "key.p8" },
        }});
        let keys = keys::KeyDocument::first(
            &"shop".parse().unwrap(),
            latchkey_crds::rendered::SigningAlgorithm::ES256,
            time::OffsetDateTime::UNIX_EPOCH,
        );
        let pem = keys.unwrap().signing[0].key.private_key.clone();
        let good = validated(apple.clone(), pem.expose());
        assert_eq!(good.field_error, None);
        assert_eq!(json!(good.settings.options), json!({ "teamID": "ABCDE12345", "keyID": "12345ABCDE" }));
        let bad = validated(apple, "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----");
        let error = bad.field_error.unwrap();
        assert_eq!((error.reason, error.field.as_str()), (Reason::SecretKeyInvalid, "spec.apple.privateKeyRef"));
        assert!(!error.message.contains("hush"));
        assert_eq!(bad.settings.secret, None);
    }

    #[test]
    fn providers_that_anybody_can_run_do_not_link_by_email_address_by_default() {
        let links = |spec| validated(spec, "hush").links_by_email;
        assert!(links(json!({ "google": client(json!({})) })));
        assert!(links(json!({ "gitlab": client(json!({})) })));
        assert!(!links(json!({ "gitlab": client(json!({ "baseURL": "https://git.example.com" })) })));
        assert!(!links(json!({ "oidc": client(json!({ "issuer": "https://id.example.com" })) })));
    }

    #[test]
    fn slack_does_not_link_by_email_address_by_default() {
        assert!(!validated(json!({ "slack": client(json!({})) }), "hush").links_by_email);
    }

    #[test]
    fn secrets_are_not_printed() {
        let facts = facts(json!({ "google": client(json!({})) }), "hush");
        let settings = Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false };
        assert!(!format!("{facts:?} {:?}", validate(&facts, &settings)).contains("hush"));
    }
}
