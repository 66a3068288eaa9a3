//! Who the user is, as a provider's claims say it.

use aws_lc_rs::hmac;
use http::{HeaderValue, Request, header::AUTHORIZATION};
use serde_json::Value;
use url::Url;

use super::{
    Inner, ask,
    client::{Client, Mapping, Source},
    id_token::MAX_SUBJECT,
    parse,
    preset::{Addresses, Profile, Proof},
};
use crate::domain::{
    email::Email,
    identity::{BadToken, Fault, Place, ProviderError, Vouched, VouchedEmail},
    user::Name,
};

/// What one source, an answer or a token, says of its user, in a few small values: the source itself may be large.
#[derive(Debug, Default)]
pub(super) struct Statement {
    subject: Option<String>,
    /// The member that OpenID Connect calls the subject, if it is text.
    pub(super) sub: Option<String>,
    email: Stated<Email>,
    /// What the claim for it says; `None` if it is missing.
    verified: Option<bool>,
    name: Stated<Name>,
}

/// What stands under a name.
#[derive(Clone, Debug, Default)]
enum Stated<T> {
    #[default]
    Missing,
    /// Something that is not a value of ours.
    Unusable,
    Value(T),
}

/// A member of an answer; see [`super::preset`] for what names look like.
pub(super) fn find<'a>(source: &'a Value, name: &str) -> Option<&'a Value> {
    let found = if name.starts_with('/') { source.pointer(name) } else { source.get(name) };
    found.filter(|value| !value.is_null())
}

/// Text that is not empty, or a whole number as text.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        Value::String(_) | Value::Number(_) | Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

pub(super) fn find_text(source: &Value, name: &str) -> Option<String> {
    find(source, name).and_then(text)
}

// === impl Statement ===

impl Statement {
    /// The name alone.
    fn named(name: Name) -> Self {
        Self { name: Stated::Value(name), ..Self::default() }
    }
}

// === impl Stated ===

impl<T> Stated<T> {
    fn is_missing(&self) -> bool {
        matches!(self, Self::Missing)
    }
}

// === impl Mapping ===

impl Mapping {
    /// What a source says under the names of this mapping.
    pub(super) fn read(&self, source: &Value) -> Statement {
        let email = match self.email.as_deref().and_then(|name| find(source, name)) {
            None => Stated::Missing,
            Some(value) => match value.as_str().and_then(|text| Email::parse(text).ok()) {
                Some(email) => Stated::Value(email),
                None => Stated::Unusable,
            },
        };
        let verified = match &self.verified {
            Source::Claim { name, or_one } => find(source, name).map(|claim| is_true(claim, *or_one)),
            Source::Never | Source::Documented | Source::Listed => None,
        };
        let mut names = self.name.iter().filter_map(|name| find(source, name)).peekable();
        let name = match names.peek() {
            None => Stated::Missing,
            Some(_) => match names.filter_map(text).find_map(|name| Name::parse(&name).ok()) {
                Some(name) => Stated::Value(name),
                None => Stated::Unusable,
            },
        };
        let sub = source.get("sub").and_then(Value::as_str);
        let sub = sub.filter(|sub| sub.len() <= MAX_SUBJECT).map(str::to_owned);
        Statement { subject: self.subject(source), sub, email, verified, name }
    }

    /// Who the source is about.
    fn subject(&self, source: &Value) -> Option<String> {
        let parts: Option<Vec<String>> = self.subject.iter().map(|name| find_text(source, name)).collect();
        let subject = parts?.join("-");
        (!subject.is_empty() && subject.len() <= MAX_SUBJECT).then_some(subject)
    }

    /// Whether there is more to be asked for than this source has.
    pub(super) fn lacks(&self, statement: &Statement) -> bool {
        let has_claim = matches!(self.verified, Source::Claim { .. });
        self.email.is_some() && statement.email.is_missing()
            || has_claim && statement.verified.is_none()
            || statement.name.is_missing()
    }

    /// The address and its standing, both from one source: the first that has both, else the first that has an address.
    fn email(&self, statements: &[&Statement]) -> Option<VouchedEmail> {
        let standing = |statement: &Statement| match &self.verified {
            Source::Never | Source::Listed => Some(false),
            Source::Documented => Some(true),
            Source::Claim { .. } => statement.verified,
        };
        let having = || statements.iter().filter(|statement| !statement.email.is_missing());
        let statement = having().find(|statement| standing(statement).is_some()).or_else(|| having().next())?;
        match &statement.email {
            Stated::Value(email) => {
                Some(VouchedEmail { email: email.clone(), verified: standing(statement).unwrap_or(false) })
            }
            Stated::Missing | Stated::Unusable => None,
        }
    }

    /// What the statements, which are about one subject, come to.
    pub(super) fn vouched(&self, authority: String, statements: &[&Statement]) -> Option<Vouched> {
        let subject = statements.first()?.subject.clone()?;
        let name = statements.iter().find_map(|statement| match &statement.name {
            Stated::Value(name) => Some(name.clone()),
            Stated::Missing | Stated::Unusable => None,
        });
        Some(Vouched { authority, subject, email: self.email(statements), name })
    }
}

/// `true` or `"true"` (contract, 5); with `or_one` also `1` and `"1"`.
fn is_true(claim: &Value, or_one: bool) -> bool {
    match claim {
        Value::Bool(claim) => *claim,
        Value::String(claim) => claim == "true" || or_one && claim == "1",
        Value::Number(claim) => or_one && claim.as_i64() == Some(1),
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// The name that Apple posts beside the code, once, as the page that the user saw had it.
pub(super) fn posted_name(posted_user: &str) -> Option<Statement> {
    let posted = parse(posted_user.as_bytes()).ok()?;
    let part = |name| posted.pointer(name).and_then(Value::as_str).map(str::trim).unwrap_or_default();
    let name = format!("{} {}", part("/name/firstName"), part("/name/lastName"));
    Name::parse(name.trim()).ok().map(Statement::named)
}

// === impl Inner ===

impl Inner {
    /// What the profile endpoint says to who has this token.
    pub(super) async fn profile(
        &self,
        client: &Client<'_>,
        url: &str,
        access_token: &str,
    ) -> Result<Statement, ProviderError> {
        let at = |fault| ProviderError::Answer { place: Place::UserInfo, fault };
        let mut url = Url::parse(url).map_err(|_| at(Fault::Incomplete))?;
        let (headers, proof): (&[(&str, &str)], Proof) = match &client.preset.profile {
            Profile::Endpoint { headers, proof, .. } => (headers, *proof),
            Profile::IdToken | Profile::Given => (&[], Proof::None),
        };
        let mut request = Request::builder();
        match proof {
            Proof::None => {}
            Proof::ClientId => request = request.header("client-id", &client.settings.client_id),
            Proof::AppSecret => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, client.secret()?.expose().as_bytes());
                let proof = hmac::sign(&key, access_token.as_bytes());
                let proof: String = proof.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
                url.query_pairs_mut().append_pair("appsecret_proof", &proof);
            }
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.uri(url.as_str()).header(AUTHORIZATION, bearer("Bearer", access_token)?);
        let answer = ask(&self.http, client.at(Place::UserInfo), request).await?;
        answer.json().map(|profile| client.mapping.read(&profile)).map_err(at)
    }

    /// The user's primary address, from the provider's list of them.
    async fn listed(
        &self,
        client: &Client<'_>,
        addresses: &Addresses,
        headers: &[(&str, &str)],
        access_token: &str,
    ) -> Result<Option<VouchedEmail>, ProviderError> {
        let mut request = Request::get(addresses.url).header(AUTHORIZATION, bearer("Bearer", access_token)?);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let at = |fault| ProviderError::Answer { place: Place::Emails, fault };
        let answer = ask(&self.http, client.at(Place::Emails), request).await?.json().map_err(at)?;
        let list = answer.pointer(addresses.list).and_then(Value::as_array).ok_or(at(Fault::Incomplete))?;
        let is = |entry: &Value, name| find(entry, name).is_some_and(|claim| is_true(claim, false));
        let primary = list.iter().find(|entry| is(entry, addresses.primary));
        Ok(primary.and_then(|entry| {
            let email = Email::parse(find(entry, addresses.address)?.as_str()?).ok()?;
            Some(VouchedEmail { email, verified: is(entry, addresses.verified) })
        }))
    }

    /// Who has this access token, by the profile endpoint alone.
    pub(super) async fn vouched_by_profile(
        &self,
        client: &Client<'_>,
        url: &str,
        access_token: &str,
    ) -> Result<Vouched, ProviderError> {
        let profile = self.profile(client, url, access_token).await?;
        let incomplete = ProviderError::Answer { place: Place::UserInfo, fault: Fault::Incomplete };
        let mut vouched = client.mapping.vouched(client.authority()?, &[&profile]).ok_or(incomplete)?;
        if let Profile::Endpoint { headers, addresses: Some(addresses), .. } = &client.preset.profile {
            vouched.email = self.listed(client, addresses, headers, access_token).await?;
        }
        Ok(vouched)
    }
}

/// `Authorization` for a token that anybody may have made up.
pub(super) fn bearer(scheme: &str, token: &str) -> Result<HeaderValue, ProviderError> {
    let mut value =
        HeaderValue::try_from(format!("{scheme} {token}")).map_err(|_| ProviderError::Token(BadToken::Malformed))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::providers::client::tests::{client_of, settings};

    fn vouched(preset: &str, options: Value, sources: &[&Value]) -> Option<Vouched> {
        let settings = settings(preset, options);
        let client = client_of(&settings).unwrap();
        let statements: Vec<_> = sources.iter().map(|source| client.mapping.read(source)).collect();
        client.mapping.vouched("a".to_owned(), &statements.iter().collect::<Vec<_>>())
    }

    /// Whether the address of this answer is verified; none: there is no address.
    fn verified(preset: &str, source: Value) -> Option<bool> {
        vouched(preset, json!({}), &[&source]).unwrap().email.map(|email| email.verified)
    }

    #[test]
    fn only_true_is_verified() {
        let google = |claim: Value| {
            verified("google", json!({ "sub": "1", "email": "ada@example.com", "email_verified": claim }))
        };
        for claim in [json!(true), json!("true")] {
            assert_eq!(google(claim), Some(true));
        }
        for claim in [json!(false), json!("false"), json!(1), json!("1"), json!("TRUE"), json!(null), json!([true])] {
            assert_eq!(google(claim.clone()), Some(false), "{claim}");
        }
        assert_eq!(verified("google", json!({ "sub": "1", "email": "ada@example.com" })), Some(false));
    }

    #[test]
    fn microsofts_address_is_believed_only_with_xms_edov() {
        let microsoft = |more: Value| {
            let mut claims = json!({ "sub": "1", "email": "ada@example.com" });
            claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            verified("microsoft", claims)
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
    fn a_provider_without_such_a_claim_never_vouches_for_an_address() {
        let claims = json!({ "id": "1", "email": "ada@example.com", "email_verified": true, "verified": true });
        assert_eq!(verified("facebook", claims.clone()), Some(false));
        assert_eq!(verified("spotify", claims.clone()), Some(false));
        let given = vouched("oauth2", json!({ "claims": { "subject": "id", "email": "email" } }), &[&claims]);
        assert!(!given.unwrap().email.unwrap().verified);
    }

    #[test]
    fn what_is_no_address_or_no_name_is_none() {
        for email in [json!("ada"), json!("ada@bücher.example"), json!("Ada <ada@example.com>"), json!(7), json!("")] {
            assert_eq!(verified("discord", json!({ "id": "1", "email": email, "verified": true })), None, "{email}");
        }
        let source = json!({ "id": "1", "global_name": "a\u{0}b", "username": " ada " });
        assert_eq!(vouched("discord", json!({}), &[&source]).unwrap().name.unwrap().as_str(), "ada");
        let source = json!({ "id": "1", "global_name": "", "username": "x".repeat(201) });
        assert_eq!(vouched("discord", json!({}), &[&source]).unwrap().name, None);
    }

    #[test]
    fn an_address_and_its_standing_come_from_one_source() {
        let claims = json!({ "claims": { "email": "email", "emailVerified": "email_verified", "name": "name" } });
        let token = json!({ "sub": "1", "email": "ada@example.com" });
        let other = json!({ "sub": "1", "email": "eve@example.com", "email_verified": false });
        let claim_alone = json!({ "sub": "1", "email_verified": true });
        let email = |sources: &[&Value]| {
            let email = vouched("oidc", claims.clone(), sources).unwrap().email.unwrap();
            (email.email.as_str().to_owned(), email.verified)
        };
        assert_eq!(email(&[&token, &claim_alone]), ("ada@example.com".to_owned(), false));
        assert_eq!(email(&[&token, &other]), ("eve@example.com".to_owned(), false));
        let both = json!({ "sub": "1", "email": "ada@example.com", "email_verified": true });
        assert_eq!(email(&[&both, &other]), ("ada@example.com".to_owned(), true));
    }

    #[test]
    fn a_subject_is_text_or_a_whole_number() {
        let subject = |value: Value| vouched("discord", json!({}), &[&json!({ "id": value })]).map(|who| who.subject);
        assert_eq!(subject(json!("80351110224678912")).as_deref(), Some("80351110224678912"));
        assert_eq!(subject(json!(18_446_744_073_709_551_615_u64)).as_deref(), Some("18446744073709551615"));
        for bad in [json!(""), json!(1.5), json!(true), json!(null), json!({}), json!(["1"]), json!("x".repeat(256))] {
            assert_eq!(subject(bad.clone()), None, "{bad}");
        }
    }

    #[test]
    fn slacks_users_are_told_apart_by_their_team_too() {
        let claims = json!({ "sub": "U1", "https://slack.com/team_id": "T1" });
        assert_eq!(vouched("slack", json!({}), &[&claims]).unwrap().subject, "T1-U1");
        assert_eq!(vouched("slack", json!({}), &[&json!({ "sub": "U1" })]), None);
    }

    #[test]
    fn names_may_be_pointers() {
        let options = json!({ "claims": { "subject": "/user/id", "name": "/user/names/0" } });
        let source = json!({ "user": { "id": 7, "names": ["Ada"] } });
        let vouched = vouched("oauth2", options, &[&source]).unwrap();
        assert_eq!((vouched.subject.as_str(), vouched.name.unwrap().as_str()), ("7", "Ada"));
    }

    #[test]
    fn of_what_apple_posts_only_the_name_is_taken() {
        let name = |posted: &str| match posted_name(posted) {
            Some(Statement {
                subject: None,
                sub: None,
                email: Stated::Missing,
                verified: None,
                name: Stated::Value(name),
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
    fn of_a_large_answer_little_is_kept() {
        let claims = json!({ "claims": { "email": "email", "emailVerified": "email_verified", "name": "name" } });
        let settings = settings("oidc", claims);
        let client = client_of(&settings).unwrap();
        let long = "x".repeat(60_000);
        let statement =
            client.mapping.read(&json!({ "sub": long, "email": long, "email_verified": long, "name": long }));
        assert!(statement.subject.is_none() && statement.sub.is_none());
        assert!(matches!((&statement.email, &statement.name), (Stated::Unusable, Stated::Unusable)));
        assert!(client.mapping.vouched("a".to_owned(), &[&statement]).is_none());
        // Text that cannot be used is there all the same: nothing more is asked for.
        assert!(!client.mapping.lacks(&statement));
        assert!(client.mapping.lacks(&client.mapping.read(&json!({ "sub": "1", "email": "ada@example.com" }))));
    }
}
