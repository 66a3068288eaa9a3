//! Sign-in with a provider's token: only one that was issued for our own client.

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{
    Request,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE},
};
use http_body_util::Full;
use oauth2::AuthType;
use serde_json::{Value, json};
use url::{Url, form_urlencoded};

use super::{
    Inner,
    client::Client,
    discovery::Endpoints,
    id_token::{Expected, MAX_TOKEN},
    preset::{Caller, Check, Method, Profile, TokenIn},
    profile::{bearer, find, text},
};
use crate::domain::identity::{BadToken, Fault, Place, ProviderError, Unusable, Vouched};

/// A question whose client a token was issued to; see [`Check::Ask`].
struct Question<'a> {
    method: Method,
    url: String,
    token: TokenIn,
    caller: Caller,
    valid: Option<&'a str>,
    clients: &'a [&'a str],
    subject: Option<&'a str>,
    /// It always tells the subject.
    tells_subject: bool,
    unknown: &'a [u16],
    caller_only: bool,
}

impl Inner {
    pub(super) async fn check_token(
        &self,
        client: &Client<'_>,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        if token.is_empty() || token.len() > MAX_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ProviderError::Token(BadToken::Malformed));
        }
        let endpoints = self.endpoints(client).await?;
        let judged = match &endpoints.keys {
            Some(_) => self.id_token(client, &endpoints, token, Expected::Login { nonce }).await?,
            None => Err(BadToken::Malformed),
        };
        let bad = match judged {
            Ok(id_token) => {
                return client
                    .mapping
                    .vouched(id_token.authority, &[&id_token.statement])
                    .ok_or(ProviderError::Token(BadToken::Malformed));
            }
            Err(bad) => bad,
        };
        match bad {
            // Not an ID token, or one that does not say that it is for us: it may be an access token.
            BadToken::Malformed | BadToken::Audience | BadToken::AuthorizedParty | BadToken::Algorithm => {}
            BadToken::UnknownKey
            | BadToken::Signature
            | BadToken::Issuer
            | BadToken::Expired
            | BadToken::NotYetValid
            | BadToken::Nonce
            | BadToken::AccessTokenHash
            | BadToken::Unknown => return Err(ProviderError::Token(bad)),
        }
        let Some(question) = question(client, &endpoints)? else {
            // Where ID tokens are taken, what is no ID token is a bad token; where there are none, nothing is taken.
            return Err(if endpoints.keys.is_some() { ProviderError::Token(bad) } else { ProviderError::NoTokenCheck });
        };
        if nonce.is_some() {
            // An access token has none.
            return Err(ProviderError::Token(BadToken::Nonce));
        }
        let subject = self.ask(client, question, token).await?;
        self.owner(client, &endpoints, token, subject).await
    }

    /// Whose token it is that passed the check.
    async fn owner(
        &self,
        client: &Client<'_>,
        endpoints: &Endpoints,
        token: &str,
        checked: Option<String>,
    ) -> Result<Vouched, ProviderError> {
        let at = |fault| ProviderError::Answer { place: Place::UserInfo, fault };
        // An OpenID provider that has no such endpoint: nothing says who the user is.
        let url = endpoints.user_info.as_deref().ok_or(ProviderError::NoTokenCheck)?;
        let vouched = match &client.preset.profile {
            Profile::IdToken => {
                let profile = self.profile(client, url, token).await?;
                client.mapping.vouched(client.authority()?, &[&profile]).ok_or(at(Fault::Incomplete))?
            }
            Profile::Endpoint { .. } | Profile::Given => self.vouched_by_profile(client, url, token).await?,
        };
        if checked.is_some_and(|subject| subject != vouched.subject) {
            return Err(at(Fault::OtherSubject));
        }
        Ok(vouched)
    }

    /// Asks whose client the token is for; the answer is the token's subject, where it tells one.
    async fn ask(
        &self,
        client: &Client<'_>,
        question: Question<'_>,
        token: &str,
    ) -> Result<Option<String>, ProviderError> {
        let at = |fault| ProviderError::Answer { place: Place::TokenCheck, fault };
        let request = request(client, &question, token)?;
        let answer =
            self.http.call(client.at(Place::TokenCheck), request).await.map_err(|error| error.at(Place::TokenCheck))?;
        if question.unknown.contains(&answer.status.as_u16()) {
            return Err(ProviderError::Token(BadToken::Unknown));
        }
        let answer = answer.json().map_err(at)?;
        if let Some(valid) = question.valid {
            match find(&answer, valid) {
                Some(Value::Bool(true)) => {}
                Some(Value::Bool(false)) => return Err(ProviderError::Token(BadToken::Unknown)),
                Some(_) | None => return Err(at(Fault::Incomplete)),
            }
        }
        let is_ours = |id: &str| {
            if question.caller_only { id == client.settings.client_id } else { client.is_ours(id) }
        };
        let told: Vec<&Value> = question.clients.iter().filter_map(|name| find(&answer, name)).collect();
        if told.is_empty() {
            return Err(at(Fault::Incomplete));
        }
        let ours = told.into_iter().all(|id| text(id).is_some_and(|id| is_ours(&id)));
        if !ours {
            return Err(ProviderError::Token(BadToken::Audience));
        }
        let subject = question.subject.and_then(|name| find(&answer, name)).and_then(text);
        if subject.is_none() && question.tells_subject {
            return Err(at(Fault::Incomplete));
        }
        Ok(subject)
    }
}

/// How this provider is asked; none: there is no way.
fn question<'a>(client: &Client<'_>, endpoints: &Endpoints) -> Result<Option<Question<'a>>, Unusable> {
    let introspection = |subject| {
        endpoints.introspection.clone().map(|url| Question {
            method: Method::Post,
            url,
            token: TokenIn::Form("token"),
            caller: match endpoints.authentication {
                AuthType::RequestBody => Caller::Form,
                // The enum is open; Basic is what every server must know (RFC 6749, 2.3.1).
                _ => Caller::Basic,
            },
            valid: Some("active"),
            // Not `aud`: it names who may be shown the token, not who it was issued to. Another client can ask for
            // tokens that are meant for us (RFC 7662, 2.2; RFC 8707, 2).
            clients: &["client_id", "azp"],
            subject,
            // RFC 7662, 2.2: optional.
            tells_subject: false,
            unknown: &[],
            caller_only: false,
        })
    };
    Ok(match &client.preset.check {
        Check::None => None,
        Check::Discovered => introspection(Some("sub")),
        // Its `sub` need not be what `claims.subject` names.
        Check::Given => introspection(None),
        Check::Ask { method, url, token, caller, valid, clients, subject, unknown, caller_only } => {
            let id: String = form_urlencoded::byte_serialize(client.settings.client_id.as_bytes()).collect();
            Some(Question {
                method: *method,
                url: url.replace("{client_id}", &id),
                token: *token,
                caller: *caller,
                valid: *valid,
                clients,
                subject: *subject,
                tells_subject: subject.is_some(),
                unknown,
                caller_only: *caller_only,
            })
        }
    })
}

fn request(client: &Client<'_>, question: &Question<'_>, token: &str) -> Result<Request<Full<Bytes>>, ProviderError> {
    let incomplete = ProviderError::Answer { place: Place::TokenCheck, fault: Fault::Incomplete };
    let (id, secret) = (client.settings.client_id.as_str(), client.secret()?.expose());
    let mut url = Url::parse(&question.url).map_err(|_| incomplete)?;
    let mut form: Vec<(&str, &str)> = Vec::new();
    let mut request = Request::builder().header(ACCEPT, "application/json");
    let mut body = None;
    match question.token {
        TokenIn::Query(name) => drop(url.query_pairs_mut().append_pair(name, token)),
        TokenIn::Form(name) => form.push((name, token)),
        TokenIn::Json(name) => body = Some(("application/json", json!({ name: token }).to_string())),
        TokenIn::Header(scheme) => request = request.header(AUTHORIZATION, bearer(scheme, token)?),
    }
    match question.caller {
        Caller::Anybody => {}
        Caller::Basic => request = request.header(AUTHORIZATION, basic(id, secret)?),
        Caller::Form => form.extend([("client_id", id), ("client_secret", secret)]),
        Caller::AppToken => drop(url.query_pairs_mut().append_pair("access_token", &format!("{id}|{secret}"))),
    }
    if !form.is_empty() {
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(form).finish();
        body = Some(("application/x-www-form-urlencoded", form));
    }
    request = match question.method {
        Method::Get => request.method(http::Method::GET),
        Method::Post => request.method(http::Method::POST),
    };
    let body = match body {
        Some((kind, body)) => {
            request = request.header(CONTENT_TYPE, kind);
            Full::new(Bytes::from(body))
        }
        None => Full::default(),
    };
    request.uri(url.as_str()).body(body).map_err(|_| incomplete)
}

/// RFC 7617; for OAuth endpoints each part is form-encoded first (RFC 6749, 2.3.1). An id and a secret of plain letters
/// are the same either way.
fn basic(id: &str, secret: &str) -> Result<http::HeaderValue, ProviderError> {
    let encoded = |part: &str| form_urlencoded::byte_serialize(part.as_bytes()).collect::<String>();
    bearer("Basic", &STANDARD.encode(format!("{}:{}", encoded(id), encoded(secret))))
}
