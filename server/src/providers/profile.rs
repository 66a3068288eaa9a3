//! The user's identity, read from a provider's claims.

use aws_lc_rs::hmac;
use http::{HeaderValue, Request, header::AUTHORIZATION};
use latchkey_crds::types::GroupName;
use serde_json::Value;
use url::Url;

use super::{
    Inner,
    client::{ClaimMapping, EmailVerification, ProviderConfig},
    groups::read_groups,
    id_token::MAX_SUBJECT_LENGTH,
    parse,
    preset::{AddressList, ProfileCredential, ProfileSource},
    send_request,
};
use crate::domain::{
    email::Email,
    identity::{
        InvalidProviderToken, InvalidResponse, ProviderEmail, ProviderEndpoint, ProviderError, VerifiedIdentity,
    },
    user::Name,
};

/// What one source (a response or a token) states about its user. Contains only small values, because the source itself
/// can be large.
#[derive(Debug, Default)]
pub(super) struct SourceClaims {
    subject: Option<String>,
    /// The member `sub`, the subject in OpenID Connect, if it is text of an allowed length.
    pub(super) sub: Option<String>,
    email: ClaimValue<Email>,
    /// Whether the source states that the email address is verified. `None` if the source has no such claim.
    verified: Option<bool>,
    name: ClaimValue<Name>,
    /// The groups in the source that the App's settings select. Also `Missing` if the App selects no groups.
    groups: ClaimValue<Vec<GroupName>>,
}

/// The value of a claim.
#[derive(Clone, Debug, Default)]
enum ClaimValue<T> {
    #[default]
    Missing,
    /// Present, but not a valid `T`.
    Invalid,
    Valid(T),
}

/// The member `name` of a response or token, or `None` if it is missing or null. The module [`super::preset`] explains
/// the form of `name`.
pub(super) fn find_claim<'a>(source: &'a Value, name: &str) -> Option<&'a Value> {
    let found = if name.starts_with('/') { source.pointer(name) } else { source.get(name) };
    found.filter(|value| !value.is_null())
}

/// The value as text, if it is a non-empty string or an integer.
pub(super) fn claim_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        Value::String(_) | Value::Number(_) | Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

pub(super) fn find_claim_text(source: &Value, name: &str) -> Option<String> {
    find_claim(source, name).and_then(claim_text)
}

// === impl SourceClaims ===

impl SourceClaims {
    /// Claims that contain only a name.
    fn with_name(name: Name) -> Self {
        Self { name: ClaimValue::Valid(name), ..Self::default() }
    }
}

// === impl ClaimValue ===

impl<T> ClaimValue<T> {
    fn is_missing(&self) -> bool {
        matches!(self, Self::Missing)
    }
}

// === impl ClaimMapping ===

impl ClaimMapping {
    /// Reads the mapped claims of a source.
    pub(super) fn read_claims(&self, source: &Value) -> SourceClaims {
        let email = match self.email.as_deref().and_then(|name| find_claim(source, name)) {
            None => ClaimValue::Missing,
            Some(value) => match value.as_str().and_then(|text| Email::parse(text).ok()) {
                Some(email) => ClaimValue::Valid(email),
                None => ClaimValue::Invalid,
            },
        };
        let verified = match &self.verified {
            EmailVerification::Claim { name, accepts_one } => {
                find_claim(source, name).map(|claim| is_true(claim, *accepts_one))
            }
            EmailVerification::Never | EmailVerification::Documented | EmailVerification::AddressList => None,
        };
        let mut names = self.name.iter().filter_map(|name| find_claim(source, name)).peekable();
        let name = match names.peek() {
            None => ClaimValue::Missing,
            Some(_) => match names.filter_map(claim_text).find_map(|name| Name::parse(&name).ok()) {
                Some(name) => ClaimValue::Valid(name),
                None => ClaimValue::Invalid,
            },
        };
        let sub = source.get("sub").and_then(Value::as_str);
        let sub = sub.filter(|sub| sub.len() <= MAX_SUBJECT_LENGTH).map(str::to_owned);
        SourceClaims { subject: self.subject(source), sub, email, verified, name, groups: self.groups(source) }
    }

    fn groups(&self, source: &Value) -> ClaimValue<Vec<GroupName>> {
        let Some(groups) = &self.groups else { return ClaimValue::Missing };
        match find_claim(source, &groups.claim) {
            None => ClaimValue::Missing,
            Some(claim) => read_groups(claim, groups).map_or(ClaimValue::Invalid, ClaimValue::Valid),
        }
    }

    /// The subject. `None` if a part of the subject is missing, or if the subject is too long.
    fn subject(&self, source: &Value) -> Option<String> {
        let parts: Option<Vec<String>> = self.subject.iter().map(|name| find_claim_text(source, name)).collect();
        let subject = parts?.join("-");
        (!subject.is_empty() && subject.len() <= MAX_SUBJECT_LENGTH).then_some(subject)
    }

    /// Whether `statement` lacks a claim that another source (the userinfo endpoint) can have.
    pub(super) fn has_missing_claims(&self, statement: &SourceClaims) -> bool {
        let is_verified_by_claim = matches!(self.verified, EmailVerification::Claim { .. });
        self.email.is_some() && statement.email.is_missing()
            || is_verified_by_claim && statement.verified.is_none()
            || statement.name.is_missing()
            || self.groups.is_some() && statement.groups.is_missing()
    }

    /// The email address and whether it is verified. Both come from one statement: the first statement that has both,
    /// otherwise the first statement that has an email address.
    fn email(&self, statements: &[&SourceClaims]) -> Option<ProviderEmail> {
        let is_verified = |statement: &SourceClaims| match &self.verified {
            EmailVerification::Never | EmailVerification::AddressList => Some(false),
            EmailVerification::Documented => Some(true),
            EmailVerification::Claim { .. } => statement.verified,
        };
        let with_email = || statements.iter().filter(|statement| !statement.email.is_missing());
        let statement =
            with_email().find(|statement| is_verified(statement).is_some()).or_else(|| with_email().next())?;
        match &statement.email {
            ClaimValue::Valid(email) => {
                Some(ProviderEmail { email: email.clone(), is_verified: is_verified(statement).unwrap_or(false) })
            }
            ClaimValue::Missing | ClaimValue::Invalid => None,
        }
    }

    /// Combines what several sources (responses and tokens) state about one user. `None` if the first statement has no
    /// subject.
    pub(super) fn verified_identity(
        &self,
        authority: String,
        statements: &[&SourceClaims],
    ) -> Option<VerifiedIdentity> {
        let subject = statements.first()?.subject.clone()?;
        let name = statements.iter().find_map(|statement| match &statement.name {
            ClaimValue::Valid(name) => Some(name.clone()),
            ClaimValue::Missing | ClaimValue::Invalid => None,
        });
        // The first source that has the claim decides, even if the claim is invalid there.
        let groups = statements.iter().find(|statement| !statement.groups.is_missing());
        let groups = match groups.map(|statement| &statement.groups) {
            Some(ClaimValue::Valid(groups)) => groups.clone(),
            Some(ClaimValue::Missing | ClaimValue::Invalid) | None => Vec::new(),
        };
        Some(VerifiedIdentity { authority, subject, email: self.email(statements), name, groups })
    }
}

/// Whether the claim is `true` or `"true"` (specification: Social login, Identities). With `accepts_one`, `1` and `"1"`
/// count as true, too.
fn is_true(claim: &Value, accepts_one: bool) -> bool {
    match claim {
        Value::Bool(claim) => *claim,
        Value::String(claim) => claim == "true" || accepts_one && claim == "1",
        Value::Number(claim) => accepts_one && claim.as_i64() == Some(1),
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// The name in the form field `user`. Apple posts the field with the code, but only at the user's first login. The user
/// has confirmed this name on Apple's page.
pub(super) fn posted_name(posted_user: &str) -> Option<SourceClaims> {
    let posted = parse(posted_user.as_bytes()).ok()?;
    let part = |name| posted.pointer(name).and_then(Value::as_str).map(str::trim).unwrap_or_default();
    let name = format!("{} {}", part("/name/firstName"), part("/name/lastName"));
    Name::parse(name.trim()).ok().map(SourceClaims::with_name)
}

// === impl Inner ===

impl Inner {
    /// Reads the profile endpoint with this access token.
    pub(super) async fn fetch_profile(
        &self,
        client: &ProviderConfig<'_>,
        url: &str,
        access_token: &str,
    ) -> Result<SourceClaims, ProviderError> {
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::UserInfo, reason };
        let mut url = Url::parse(url).map_err(|_| invalid(InvalidResponse::Incomplete))?;
        let (headers, proof): (&[(&str, &str)], ProfileCredential) = match &client.preset.profile {
            ProfileSource::Endpoint { headers, proof, .. } => (headers, *proof),
            ProfileSource::IdToken | ProfileSource::Configured => (&[], ProfileCredential::None),
        };
        let mut request = Request::builder();
        match proof {
            ProfileCredential::None => {}
            ProfileCredential::ClientId => request = request.header("client-id", &client.settings.client_id),
            ProfileCredential::AppSecret => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, client.secret()?.expose().as_bytes());
                let tag = hmac::sign(&key, access_token.as_bytes());
                let proof: String = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
                url.query_pairs_mut().append_pair("appsecret_proof", &proof);
            }
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.uri(url.as_str()).header(AUTHORIZATION, authorization_header("Bearer", access_token)?);
        let response = send_request(&self.http, client.call_target(ProviderEndpoint::UserInfo), request).await?;
        response.json().map(|profile| client.mapping.read_claims(&profile)).map_err(invalid)
    }

    /// The user's primary email address, from the provider's list of email addresses.
    async fn fetch_primary_email(
        &self,
        client: &ProviderConfig<'_>,
        addresses: &AddressList,
        headers: &[(&str, &str)],
        access_token: &str,
    ) -> Result<Option<ProviderEmail>, ProviderError> {
        let mut request =
            Request::get(addresses.url).header(AUTHORIZATION, authorization_header("Bearer", access_token)?);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Emails, reason };
        let body = send_request(&self.http, client.call_target(ProviderEndpoint::Emails), request)
            .await?
            .json()
            .map_err(invalid)?;
        let list =
            body.pointer(addresses.list).and_then(Value::as_array).ok_or(invalid(InvalidResponse::Incomplete))?;
        let is_claim_true = |entry: &Value, name| find_claim(entry, name).is_some_and(|claim| is_true(claim, false));
        let primary = list.iter().find(|entry| is_claim_true(entry, addresses.primary));
        Ok(primary.and_then(|entry| {
            let email = Email::parse(find_claim(entry, addresses.address)?.as_str()?).ok()?;
            Some(ProviderEmail { email, is_verified: is_claim_true(entry, addresses.verified) })
        }))
    }

    /// The owner of this access token. Reads the profile endpoint. If the preset has a list of email addresses, also
    /// reads this list.
    pub(super) async fn fetch_identity(
        &self,
        client: &ProviderConfig<'_>,
        url: &str,
        access_token: &str,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let profile = self.fetch_profile(client, url, access_token).await?;
        let incomplete = ProviderError::InvalidResponse {
            endpoint: ProviderEndpoint::UserInfo,
            reason: InvalidResponse::Incomplete,
        };
        let mut identity = client.mapping.verified_identity(client.authority()?, &[&profile]).ok_or(incomplete)?;
        if let ProfileSource::Endpoint { headers, addresses: Some(addresses), .. } = &client.preset.profile {
            identity.email = self.fetch_primary_email(client, addresses, headers, access_token).await?;
        }
        Ok(identity)
    }
}

/// An `Authorization` header. Fails if the token, which can come from a client, has characters that no header can have.
pub(super) fn authorization_header(scheme: &str, token: &str) -> Result<HeaderValue, ProviderError> {
    let mut value = HeaderValue::try_from(format!("{scheme} {token}"))
        .map_err(|_| ProviderError::InvalidToken(InvalidProviderToken::Malformed))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::RenderedProviderGroups;
    use serde_json::json;

    use super::*;
    use crate::providers::client::tests::{test_client, test_settings};

    fn identity(preset: &str, options: Value, sources: &[&Value]) -> Option<VerifiedIdentity> {
        let settings = test_settings(preset, options);
        let client = test_client(&settings).unwrap();
        let statements: Vec<_> = sources.iter().map(|source| client.mapping.read_claims(source)).collect();
        client.mapping.verified_identity("a".to_owned(), &statements.iter().collect::<Vec<_>>())
    }

    /// Whether the email address in this response is verified. `None` if there is no email address.
    fn is_email_verified(preset: &str, source: Value) -> Option<bool> {
        identity(preset, json!({}), &[&source]).unwrap().email.map(|email| email.is_verified)
    }

    #[test]
    fn only_the_value_true_means_verified() {
        let google = |claim: Value| {
            is_email_verified("google", json!({ "sub": "1", "email": "ada@example.com", "email_verified": claim }))
        };
        for claim in [json!(true), json!("true")] {
            assert_eq!(google(claim), Some(true));
        }
        for claim in [json!(false), json!("false"), json!(1), json!("1"), json!("TRUE"), json!(null), json!([true])] {
            assert_eq!(google(claim.clone()), Some(false), "{claim}");
        }
        assert_eq!(is_email_verified("google", json!({ "sub": "1", "email": "ada@example.com" })), Some(false));
    }

    #[test]
    fn a_microsoft_email_address_is_verified_only_with_xms_edov() {
        let microsoft = |more: Value| {
            let mut claims = json!({ "sub": "1", "email": "ada@example.com" });
            claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            is_email_verified("microsoft", claims)
        };
        for yes in [json!(true), json!("true"), json!(1), json!("1")] {
            assert_eq!(microsoft(json!({ "xms_edov": yes })), Some(true));
        }
        for no in [json!({}), json!({ "email_verified": true }), json!({ "xms_edov": false }), json!({ "xms_edov": 0 })]
        {
            assert_eq!(microsoft(no.clone()), Some(false), "{no}");
        }
    }

    #[test]
    fn email_addresses_of_facebook_and_spotify_and_of_oauth2_without_a_claim_are_never_verified() {
        let claims = json!({ "id": "1", "email": "ada@example.com", "email_verified": true, "verified": true });
        assert_eq!(is_email_verified("facebook", claims.clone()), Some(false));
        assert_eq!(is_email_verified("spotify", claims.clone()), Some(false));
        let without_claim = identity("oauth2", json!({ "claims": { "subject": "id", "email": "email" } }), &[&claims]);
        assert!(!without_claim.unwrap().email.unwrap().is_verified);
    }

    #[test]
    fn invalid_email_addresses_and_names_are_ignored() {
        for email in [json!("ada"), json!("ada@bücher.example"), json!("Ada <ada@example.com>"), json!(7), json!("")] {
            assert_eq!(
                is_email_verified("discord", json!({ "id": "1", "email": email, "verified": true })),
                None,
                "{email}"
            );
        }
        let source = json!({ "id": "1", "global_name": "a\u{0}b", "username": " ada " });
        assert_eq!(identity("discord", json!({}), &[&source]).unwrap().name.unwrap().as_str(), "ada");
        let source = json!({ "id": "1", "global_name": "", "username": "x".repeat(201) });
        assert_eq!(identity("discord", json!({}), &[&source]).unwrap().name, None);
    }

    #[test]
    fn an_email_address_and_its_verification_come_from_one_source() {
        let claims = json!({ "claims": { "email": "email", "emailVerified": "email_verified", "name": "name" } });
        let email_alone = json!({ "sub": "1", "email": "ada@example.com" });
        let other_email_and_claim = json!({ "sub": "1", "email": "eve@example.com", "email_verified": false });
        let claim_alone = json!({ "sub": "1", "email_verified": true });
        let email = |sources: &[&Value]| {
            let email = identity("oidc", claims.clone(), sources).unwrap().email.unwrap();
            (email.email.as_str().to_owned(), email.is_verified)
        };
        assert_eq!(email(&[&email_alone, &claim_alone]), ("ada@example.com".to_owned(), false));
        assert_eq!(email(&[&email_alone, &other_email_and_claim]), ("eve@example.com".to_owned(), false));
        let email_and_claim = json!({ "sub": "1", "email": "ada@example.com", "email_verified": true });
        assert_eq!(email(&[&email_and_claim, &other_email_and_claim]), ("ada@example.com".to_owned(), true));
    }

    #[test]
    fn a_subject_is_text_or_an_integer() {
        let subject =
            |value: Value| identity("discord", json!({}), &[&json!({ "id": value })]).map(|identity| identity.subject);
        assert_eq!(subject(json!("80351110224678912")).as_deref(), Some("80351110224678912"));
        assert_eq!(subject(json!(18_446_744_073_709_551_615_u64)).as_deref(), Some("18446744073709551615"));
        for bad in [json!(""), json!(1.5), json!(true), json!(null), json!({}), json!(["1"]), json!("x".repeat(256))] {
            assert_eq!(subject(bad.clone()), None, "{bad}");
        }
    }

    #[test]
    fn slack_users_are_identified_by_team_and_user() {
        let claims = json!({ "sub": "U1", "https://slack.com/team_id": "T1" });
        assert_eq!(identity("slack", json!({}), &[&claims]).unwrap().subject, "T1-U1");
        assert_eq!(identity("slack", json!({}), &[&json!({ "sub": "U1" })]), None);
    }

    #[test]
    fn claim_names_can_be_pointers() {
        let options = json!({ "claims": { "subject": "/user/id", "name": "/user/names/0" } });
        let source = json!({ "user": { "id": 7, "names": ["Ada"] } });
        let identity = identity("oauth2", options, &[&source]).unwrap();
        assert_eq!((identity.subject.as_str(), identity.name.unwrap().as_str()), ("7", "Ada"));
    }

    #[test]
    fn only_the_name_is_read_from_apples_posted_user() {
        let name = |posted: &str| match posted_name(posted) {
            Some(SourceClaims {
                subject: None,
                sub: None,
                email: ClaimValue::Missing,
                verified: None,
                name: ClaimValue::Valid(name),
                groups: ClaimValue::Missing,
            }) => Some(name.as_str().to_owned()),
            None => None,
            other => panic!("{other:?}"),
        };
        let posted = r#"{"name":{"firstName":"Ada","lastName":"Lovelace"},"email":"eve@example.com","sub":"x"}"#;
        assert_eq!(name(posted).as_deref(), Some("Ada Lovelace"));
        assert_eq!(name(r#"{"name":{"lastName":"Lovelace"}}"#).as_deref(), Some("Lovelace"));
        assert_eq!(name("nonsense"), None);
        assert_eq!(name(&format!(r#"{{"name":{{"lastName":"Lovelace"}},"x":{}}}"#, "[".repeat(60_000))), None);
    }

    #[test]
    fn values_that_are_too_long_are_not_kept_and_do_not_count_as_missing() {
        let claims = json!({ "claims": { "email": "email", "emailVerified": "email_verified", "name": "name" } });
        let settings = test_settings("oidc", claims);
        let client = test_client(&settings).unwrap();
        let long = "x".repeat(60_000);
        let statement =
            client.mapping.read_claims(&json!({ "sub": long, "email": long, "email_verified": long, "name": long }));
        assert!(statement.subject.is_none() && statement.sub.is_none());
        assert!(matches!((&statement.email, &statement.name), (ClaimValue::Invalid, ClaimValue::Invalid)));
        assert!(client.mapping.verified_identity("a".to_owned(), &[&statement]).is_none());
        // Values that are present but unusable do not count as missing, so no other source is read for them.
        assert!(!client.mapping.has_missing_claims(&statement));
        assert!(
            client
                .mapping
                .has_missing_claims(&client.mapping.read_claims(&json!({ "sub": "1", "email": "ada@example.com" })))
        );
    }

    /// Reads an identity from these sources, and returns its groups.
    fn groups(sources: &[&Value]) -> Vec<String> {
        let settings = test_settings("oidc", json!({ "issuer": "https://id.example", "claims": {} }));
        let mut client = test_client(&settings).unwrap();
        client.mapping.groups = Some(RenderedProviderGroups {
            claim: "/realm_access/roles".to_owned(),
            prefix: "corp:".to_owned(),
            only: Vec::new(),
        });
        let statements: Vec<_> = sources.iter().map(|source| client.mapping.read_claims(source)).collect();
        let identity = client.mapping.verified_identity("a".to_owned(), &statements.iter().collect::<Vec<_>>());
        identity.unwrap().groups.iter().map(|group| group.as_str().to_owned()).collect()
    }

    #[test]
    fn groups_come_from_the_first_source_that_has_the_claim() {
        let source = |roles: Value| json!({ "sub": "1", "realm_access": { "roles": roles } });
        let without = json!({ "sub": "1", "groups": ["other"] });
        let (staff, admins) = (source(json!(["staff"])), source(json!(["admins"])));
        assert_eq!(groups(&[&staff, &admins]), ["corp:staff"]);
        assert_eq!(groups(&[&without, &admins]), ["corp:admins"]);
        assert!(groups(&[&source(json!([])), &admins]).is_empty());
        assert!(groups(&[&source(json!("staff")), &admins]).is_empty(), "a claim that is not an array");
        assert!(groups(&[&without, &without]).is_empty());
    }

    #[test]
    fn a_missing_groups_claim_is_looked_up_elsewhere_only_if_the_app_uses_groups() {
        let settings = test_settings("oidc", json!({ "issuer": "https://id.example", "claims": { "name": "name" } }));
        let mut client = test_client(&settings).unwrap();
        let complete = json!({ "sub": "1", "name": "Ada" });
        assert!(!client.mapping.has_missing_claims(&client.mapping.read_claims(&complete)));
        client.mapping.groups =
            Some(RenderedProviderGroups { claim: "groups".to_owned(), prefix: String::new(), only: Vec::new() });
        assert!(client.mapping.has_missing_claims(&client.mapping.read_claims(&complete)));
        let with_groups = json!({ "sub": "1", "name": "Ada", "groups": [] });
        assert!(!client.mapping.has_missing_claims(&client.mapping.read_claims(&with_groups)));
    }

    #[test]
    fn no_groups_are_read_without_the_setting_for_groups() {
        let source = json!({ "sub": "1", "groups": ["staff"] });
        let oidc = json!({ "issuer": "https://id.example", "claims": {} });
        assert!(identity("oidc", oidc, &[&source]).unwrap().groups.is_empty());
    }
}
