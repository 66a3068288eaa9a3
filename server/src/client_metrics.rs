//! Metrics of the endpoints for OpenID clients. No label contains the name of a client, because an installation can
//! have thousands of clients.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::domain::openid::authenticate::AuthenticationMethod;

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct ClientMetrics {
    tokens: Family<TokenLabels, Counter>,
    authentications: Family<AuthenticationLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenLabels {
    grant: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AuthenticationLabels {
    method: &'static str,
    outcome: &'static str,
}

/// A grant type of the token endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientGrantType {
    AuthorizationCode,
    RefreshToken,
}

/// The outcome of a request or of an authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientOutcome {
    Succeeded,
    /// The request, the code, the token or the secret was wrong.
    Refused,
    Limited,
    /// The service failed, or a store was unavailable.
    Failed,
}

// === impl ClientMetrics ===

impl ClientMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        // Create all series at the start, so that the first increase of each is visible.
        for outcome in ClientOutcome::ALL.map(ClientOutcome::as_str) {
            for grant in ClientGrantType::ALL.map(ClientGrantType::as_str) {
                drop(metrics.tokens.get_or_create(&TokenLabels { grant, outcome }));
            }
            for method in AuthenticationMethod::ALL.map(AuthenticationMethod::as_str) {
                drop(metrics.authentications.get_or_create(&AuthenticationLabels { method, outcome }));
            }
        }
        registry.register("client_tokens", "Token requests of clients, by grant and outcome", metrics.tokens.clone());
        registry.register(
            "client_authentications",
            "Authentications of clients, by method and outcome",
            metrics.authentications.clone(),
        );
        metrics
    }

    pub fn count_token_request(&self, grant: ClientGrantType, outcome: ClientOutcome) {
        let labels = TokenLabels { grant: grant.as_str(), outcome: outcome.as_str() };
        self.tokens.get_or_create(&labels).inc();
    }

    pub fn count_authentication(&self, method: AuthenticationMethod, outcome: ClientOutcome) {
        let labels = AuthenticationLabels { method: method.as_str(), outcome: outcome.as_str() };
        self.authentications.get_or_create(&labels).inc();
    }
}

// === impl ClientGrantType ===

impl ClientGrantType {
    const ALL: [Self; 2] = [Self::AuthorizationCode, Self::RefreshToken];

    /// Returns the value of the parameter `grant_type` for this grant type.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AuthorizationCode => "authorization_code",
            Self::RefreshToken => "refresh_token",
        }
    }

    /// Returns the grant type with this name, or `None` if it is not supported.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|grant| grant.as_str() == name)
    }
}

// === impl ClientOutcome ===

impl ClientOutcome {
    const ALL: [Self; 4] = [Self::Succeeded, Self::Refused, Self::Limited, Self::Failed];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "success",
            Self::Refused => "refused",
            Self::Limited => "limited",
            Self::Failed => "error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_series_exist_from_the_start() {
        let mut registry = Registry::default();
        let metrics = ClientMetrics::register(&mut registry);
        metrics.count_token_request(ClientGrantType::RefreshToken, ClientOutcome::Refused);
        metrics.count_authentication(AuthenticationMethod::PrivateKeyJwt, ClientOutcome::Succeeded);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"client_tokens_total{grant="refresh_token",outcome="refused"} 1"#,
            r#"client_tokens_total{grant="authorization_code",outcome="success"} 0"#,
            r#"client_authentications_total{method="private_key_jwt",outcome="success"} 1"#,
            r#"client_authentications_total{method="none",outcome="limited"} 0"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert_eq!(text.matches("outcome=").count(), 4 * (2 + 4), "{text}");
    }
}
