//! Determines the authority (who issued the subject) of identities that do not come from the provider, for example
//! those of imported users.

use latchkey_crds::rendered::ProviderSettings;
use serde_json::Value;

use super::{
    client::{MICROSOFT_BASE_URL, MICROSOFT_CONSUMERS_TENANT, configured_authority},
    discovery::is_tenant_id,
    preset::{EndpointSource, IssuerSource, find_preset},
};

/// Returns the authority of an identity that an administrator or an import names. `given` is the authority in the
/// request. Implements [`Providers::identity_authority`](crate::domain::ports::Providers::identity_authority).
pub fn identity_authority(settings: &ProviderSettings, given: Option<&str>) -> Option<String> {
    let preset = find_preset(&settings.preset)?;
    let is_microsoft =
        matches!(preset.endpoints, EndpointSource::Discovered { issuer: IssuerSource::MicrosoftTenant, .. });
    if is_microsoft {
        return microsoft_authority(settings.options.get("tenant").and_then(Value::as_str)?, given);
    }
    let authority = configured_authority(preset, settings).ok()?;
    given.is_none_or(|given| given == authority).then_some(authority)
}

/// Returns the authority of a Microsoft identity. `tenant` is a tenant ID, a domain of the tenant, `common`,
/// `organizations` or `consumers`.
fn microsoft_authority(tenant: &str, given: Option<&str>) -> Option<String> {
    let fixed = if tenant == "consumers" { MICROSOFT_CONSUMERS_TENANT } else { tenant };
    if is_tenant_id(fixed) {
        let authority = format!("{MICROSOFT_BASE_URL}{fixed}/v2.0");
        return given.is_none_or(|given| given == authority).then_some(authority);
    }
    let given = given?;
    let of_user = given.strip_prefix(MICROSOFT_BASE_URL)?.strip_suffix("/v2.0")?;
    let is_accepted = is_tenant_id(of_user) && (tenant == "common" || of_user != MICROSOFT_CONSUMERS_TENANT);
    is_accepted.then(|| given.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

    fn authority(options: serde_json::Value, given: Option<&str>) -> Option<String> {
        let mut settings = json!({ "clientID": "x", "secret": "hush", "preset": options["preset"] });
        settings["options"] = options;
        identity_authority(&serde_json::from_value(settings).unwrap(), given)
    }

    #[test]
    fn the_provider_determines_the_authority() {
        let github = authority(json!({ "preset": "github" }), None).unwrap();
        assert!(github.starts_with("github:https://"), "{github}");
        assert_eq!(authority(json!({ "preset": "github" }), Some(&github)), Some(github));
        assert_eq!(authority(json!({ "preset": "github" }), Some("https://github.com")), None);
        let oidc = json!({ "preset": "oidc", "issuer": "https://id.example/" });
        assert_eq!(authority(oidc, None).as_deref(), Some("https://id.example/"));
        assert_eq!(authority(json!({ "preset": "of-tomorrow" }), None), None);
    }

    #[test]
    fn microsoft_without_a_fixed_tenant_needs_the_issuer_of_the_user() {
        let issuer = |tenant: &str| format!("{MICROSOFT_BASE_URL}{tenant}/v2.0");
        let of =
            |tenant: &str, given: Option<&str>| authority(json!({ "preset": "microsoft", "tenant": tenant }), given);
        assert_eq!(of(TENANT, None), Some(issuer(TENANT)));
        assert_eq!(of("consumers", None), Some(issuer(MICROSOFT_CONSUMERS_TENANT)));
        assert_eq!(of(TENANT, Some(&issuer(MICROSOFT_CONSUMERS_TENANT))), None);
        for tenant in ["common", "organizations", "contoso.onmicrosoft.com"] {
            assert_eq!(of(tenant, None), None);
            assert_eq!(of(tenant, Some(&issuer(TENANT))), Some(issuer(TENANT)));
            for bad in ["https://evil.example/v2.0", &issuer("../evil"), TENANT] {
                assert_eq!(of(tenant, Some(bad)), None, "{tenant} {bad}");
            }
        }
        let consumers = issuer(MICROSOFT_CONSUMERS_TENANT);
        assert_eq!(of("common", Some(&consumers)), Some(consumers.clone()));
        assert_eq!(of("organizations", Some(&consumers)), None);
    }
}
