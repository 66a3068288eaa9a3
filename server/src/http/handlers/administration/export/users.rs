//! `GET /v1/{APPID}/export`.

use std::{collections::VecDeque, convert::Infallible, sync::Arc};

use bytes::Bytes;
use futures::stream;
use http::{
    HeaderValue, Uri,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use latchkey_crds::types::AppId;
use schemars::json_schema;
use serde::Serialize;
use serde_json::{json, value::RawValue};
use tracing::warn;

use crate::{
    domain::{
        administration::{self, AdminUser},
        app::App,
        rights::Right,
        user::UserId,
    },
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::Problem,
        handlers::administration::{actor, administrator_call, parse_uuid},
        openapi::operation::{Content, Operation, Parameter},
        parameters::Parameters,
        request::InboundRequest,
        response::{NDJSON, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// Number of users that are read at a time. A page has at most about 1 MiB of metadata.
const PAGE_SIZE: u16 = 100;

/// A line of the export: the fields of an import line, plus the id and the state of the user. Fields without a value
/// are left out.
#[derive(Serialize)]
struct Line<'a> {
    id: String,
    state: &'static str,
    external_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    email: Option<&'a str>,
    #[serde(skip_serializing_if = "is_false")]
    email_verified: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'a str,
    created_at: i64,
    #[serde(skip_serializing_if = "is_false")]
    disabled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    identities: Vec<LineIdentity<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct LineIdentity<'a> {
    provider: &'a str,
    subject: &'a str,
    authority: &'a str,
}

/// An export that is being sent.
struct Export<S> {
    state: Arc<State<S>>,
    app: AppId,
    with_hashes: bool,
    page: VecDeque<AdminUser>,
    /// The last user of the page that was read. `None` after the last page.
    last: Option<UserId>,
    sent: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

pub fn operation() -> Operation {
    Operation::new(
        "Export all users",
        "One JSON object per line, sorted by `id`: an import line with `id` and `state`. Contested accounts have no \
         `password_hash`. The last line is `{\"end\":true,\"users\":N}`; if it is missing, continue with `after`. The \
         export is not a snapshot.",
    )
    .requires_right(RIGHT)
    .query([
        Parameter::new(
            "after",
            "The id of the last user that was received.",
            json_schema!({ "type": "string", "format": "uuid" }),
        ),
        Parameter::flag("hashes", "`true` adds the password hashes. Needs the role `UserAdmin`."),
    ])
    .response(Content::ndjson(
        |_| json_schema!({ "type": "string" }),
        json!(
            "{\"id\":\"019a8452-5d8c-7a0e-9b1f-2c3d4e5f6071\",\"state\":\"active\",\"external_id\":\"crm:1815\",…}\n\
               {\"end\":true,\"users\":1}\n"
        ),
    ))
}

/// Whether the call requests password hashes, which needs the right to manage users. Called before the query is
/// validated, so that a missing right is reported before an error in another parameter. Returns false for a query that
/// cannot be parsed; the handler refuses it later.
pub fn requests_hashes(uri: &Uri) -> bool {
    Parameters::parse(uri.query().unwrap_or_default()).is_ok_and(|query| query.contains("hashes", "true"))
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["after", "hashes"])?;
    let after = query.parse_value("after", "is not a UUID", |text| parse_uuid(text).map(UserId))?;
    let with_hashes = query.flag("hashes")?;
    let actor = actor(caller);
    administration::record_export(administrator_call(state, app, &request.client, &actor), with_hashes, after).await?;
    let mut export = Export {
        state: Arc::clone(state),
        app: app.id().clone(),
        with_hashes,
        page: VecDeque::new(),
        last: after,
        sent: 0,
    };
    // The first page is read before the response begins, so that an outage of Postgres is a 503.
    export.read_page().await?;
    let lines = stream::unfold(Some(export), |export| async {
        let (chunk, rest) = export?.next_chunk().await?;
        Some((Ok::<_, Infallible>(Frame::data(chunk)), rest))
    });
    let mut response = Response::new(StreamBody::new(lines).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(NDJSON));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

// === impl Export ===

impl<S: Ports> Export<S> {
    async fn read_page(&mut self) -> Result<(), Problem> {
        let users = self.state.stores.export_users(&self.app, self.last, PAGE_SIZE).await?;
        self.last = if users.len() < usize::from(PAGE_SIZE) { None } else { users.last().map(|user| user.id) };
        self.page = users.into();
        Ok(())
    }

    /// Returns the lines of the current page, and the rest of the export, if there is one. After a failure, the export
    /// ends without the line `{"end":true,…}`. From this, the client notices the failure.
    async fn next_chunk(mut self) -> Option<(Bytes, Option<Self>)> {
        let mut chunk = Vec::new();
        for user in std::mem::take(&mut self.page) {
            serde_json::to_writer(&mut chunk, &line(&user, self.with_hashes)).ok()?;
            chunk.push(b'\n');
            self.sent += 1;
        }
        if self.last.is_none() {
            chunk.extend_from_slice(format!("{{\"end\":true,\"users\":{}}}\n", self.sent).as_bytes());
            return Some((chunk.into(), None));
        }
        if let Err(problem) = self.read_page().await {
            let error = problem.cause.as_deref().map(tracing::field::display);
            warn!(app = %self.app, error, "an export ended before its last line");
            return Some((chunk.into(), None));
        }
        Some((chunk.into(), Some(self)))
    }
}

fn line(user: &AdminUser, with_hashes: bool) -> Line<'_> {
    // The hash of a contested account is not exported, because a stranger may have set the password. An import ignores
    // `state`, so the imported account would not be contested, and the stranger could log in.
    let has_usable_password = with_hashes && !user.contested;
    Line {
        id: user.id.to_string(),
        state: user.state().as_str(),
        external_id: user
            .external_id
            .as_ref()
            .map_or_else(|| format!("latchkey:{}", user.id), |id| id.as_str().to_owned()),
        email: user.email.as_ref().map(|email| email.as_str()),
        email_verified: user.email_verified,
        name: &user.name,
        created_at: user.created_at.unix_timestamp(),
        disabled: user.disabled,
        password_hash: user.password_hash.as_ref().filter(|_| has_usable_password).map(|hash| hash.expose()),
        identities: user
            .identities
            .iter()
            .map(|identity| LineIdentity {
                provider: &identity.provider,
                subject: &identity.subject,
                authority: &identity.authority,
            })
            .collect(),
        metadata: user.metadata.as_ref().map(|metadata| metadata.as_json()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_hashes_is_recognized_in_any_query() {
        let requests = |query: &str| requests_hashes(&format!("/v1/shop/export{query}").parse().unwrap());
        for query in ["?hashes=true", "?%68ashes=tru%65", "?after=x&hashes=true", "?hashes=false&hashes=true&sort=1"] {
            assert!(requests(query), "{query}");
        }
        for query in ["", "?", "?hashes=false", "?hashes=", "?hashes=TRUE", "?after=true"] {
            assert!(!requests(query), "{query}");
        }
    }
}
