//! Pushed authorization requests (RFC 9126): the client sends the parameters of a request to the server before the
//! browser opens `authorize`.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

use super::{authorization_request::RequestParameters, client::OpenIdClient};
use crate::domain::{
    call::Call,
    error::CommonError,
    pages::{CarriedRequest, Target, Transaction},
    ports::PushedRequests,
};

/// How long after the push a browser can start with the request.
pub const PUSHED_REQUEST_SECONDS: i64 = 60;
/// How long a used request is remembered: twice the lifetime of a `tx`, the text in which the pages carry a request.
/// Twice, because a request from another site is first in an unbound `tx`, and then in a new `tx` that is bound to the
/// browser.
pub const USED_REQUEST_SECONDS: i64 = 2 * 60 * 60;
/// The prefix of every `request_uri` that the PAR endpoint returns (RFC 9126, 2.2).
pub const REQUEST_URI_PREFIX: &str = "urn:ietf:params:oauth:request_uri:";

/// The key under which a pushed request is stored: the SHA-256 of its `request_uri`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushedRequestKey {
    digest: String,
    is_public: bool,
}

/// What is stored for a pushed request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushedRequest {
    /// The UID of the client that pushed the request. Only this client can use it.
    pub client_uid: String,
    /// The parameters as they were sent, without those that authenticate the client.
    pub parameters: Vec<(String, String)>,
    /// Unix seconds.
    pub expires_at: i64,
}

/// The request does not fit into a `tx`, the text in which the pages carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request is too long")]
pub struct PushedRequestTooLong;

/// Why a request was not stored.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error(transparent)]
    TooLong(#[from] PushedRequestTooLong),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Stores the parameters that a client has pushed. The client has authenticated or is public. Returns the
/// `request_uri`, which contains 256 random bits.
pub async fn push_request<S: PushedRequests>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    parameters: Vec<(String, String)>,
) -> Result<String, PushError> {
    let uri = format!("{REQUEST_URI_PREFIX}{}", URL_SAFE_NO_PAD.encode(call.env.random_bytes::<32>()));
    let carried = carried_request(client, &uri, &parameters);
    if !Transaction::start(call.env, Target::Authorize(Box::new(carried))).fits() {
        return Err(PushedRequestTooLong.into());
    }
    let request = PushedRequest {
        client_uid: client.uid.to_string(),
        parameters,
        expires_at: call.env.now().unix_timestamp() + PUSHED_REQUEST_SECONDS,
    };
    let key = PushedRequestKey::of(client, &uri);
    let stored = call.stores.store_pushed_request(call.app_id(), &key, &request, call.client_address()).await;
    stored.map_err(CommonError::from)?;
    Ok(uri)
}

/// Builds the request with which the browser continues: the pushed parameters, and `client_id`.
pub fn carried_request(client: &OpenIdClient, request_uri: &str, pushed: &[(String, String)]) -> CarriedRequest {
    let others = pushed.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    // The pushed form need not contain `client_id`: a client that authenticates with Basic can omit it.
    let others = others.filter(|(name, _)| *name != "client_id");
    let parameters = RequestParameters::new(others.chain([("client_id", client.client_id.as_str())]));
    CarriedRequest::new(client, parameters, Some(request_uri.to_owned()))
}

/// Finds the parameters of a pushed request. Returns `None` if the request is unknown, has expired, or belongs to
/// another client. A request is found again until [`use_request`] removes it, so that a browser can reload the page.
pub async fn find_request<S: PushedRequests>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    request_uri: &str,
) -> Result<Option<Vec<(String, String)>>, CommonError> {
    if !request_uri.starts_with(REQUEST_URI_PREFIX) {
        return Ok(None);
    }
    let found = call.stores.find_pushed_request(call.app_id(), &PushedRequestKey::of(client, request_uri)).await?;
    let now = call.env.now().unix_timestamp();
    let found = found.filter(|request| *request.client_uid == *client.uid && now < request.expires_at);
    Ok(found.map(|request| request.parameters))
}

/// Marks a pushed request as used, because a code will be issued for it. Only the first call returns true. Later calls
/// return false, also after the stored request has expired, because the `tx` in which a browser carries the request is
/// valid for longer.
pub async fn use_request<S: PushedRequests>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    request_uri: &str,
) -> Result<bool, CommonError> {
    Ok(call.stores.use_pushed_request(call.app_id(), &PushedRequestKey::of(client, request_uri)).await?)
}

// === impl PushedRequestKey ===

impl PushedRequestKey {
    pub fn of(client: &OpenIdClient, request_uri: &str) -> Self {
        Self::new(request_uri, client.is_public())
    }

    /// The key of a request with this `request_uri`. `is_public`: whether its client is public.
    pub fn new(request_uri: &str, is_public: bool) -> Self {
        Self { digest: URL_SAFE_NO_PAD.encode(digest(&SHA256, request_uri.as_bytes())), is_public }
    }

    pub fn as_str(&self) -> &str {
        &self.digest
    }

    /// Whether the client is public: then anybody can have pushed the request.
    pub const fn is_public(&self) -> bool {
        self.is_public
    }
}
