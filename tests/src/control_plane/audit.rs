//! The API server's audit log: who sent which request.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Seek, SeekFrom},
    path::Path,
};

use anyhow::{Context, Result};
use serde::Deserialize;
use time::OffsetDateTime;

/// The log field that contains the id of a token.
const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// A moment of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The end of the log at this moment.
    offset: u64,
    at: OffsetDateTime,
}

/// A request and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// The user name as in RBAC; a ServiceAccount is `system:serviceaccount:<namespace>:<name>`.
    pub user: String,
    /// The id of the token, if the request used one; see
    /// [`ServiceAccountToken::credential`](super::ServiceAccountToken::credential).
    pub credential: Option<String>,
    /// get, list, watch, create, update, patch, delete, deletecollection.
    pub verb: String,
    /// `apps`, or `apps/status` with a subresource.
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub status: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LogLine {
    stage: String,
    verb: String,
    user: User,
    #[serde(with = "time::serde::rfc3339")]
    request_received_timestamp: OffsetDateTime,
    object_ref: Option<ObjectRef>,
    response_status: Option<ResponseStatus>,
}

#[derive(Deserialize)]
struct User {
    username: String,
    #[serde(default)]
    extra: BTreeMap<String, Vec<String>>,
}

#[derive(Default, Deserialize)]
struct ObjectRef {
    #[serde(default)]
    resource: String,
    #[serde(default)]
    subresource: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

/// How often each verb was used on each resource: `("patch", "apps/status") → 3`.
pub fn count<'a>(events: impl IntoIterator<Item = &'a AuditEvent>) -> BTreeMap<(String, String), usize> {
    let mut counts = BTreeMap::new();
    for event in events {
        *counts.entry((event.verb.clone(), event.resource.clone())).or_default() += 1;
    }
    counts
}

#[expect(clippy::disallowed_methods, reason = "the API server logs times of the machine's clock")]
pub(super) fn mark(log: &Path) -> Mark {
    Mark { offset: log.metadata().map_or(0, |metadata| metadata.len()), at: OffsetDateTime::now_utc() }
}

pub(super) fn since(log: &Path, mark: Mark) -> Result<Vec<AuditEvent>> {
    let mut file = File::open(log).with_context(|| format!("opening {}", log.display()))?;
    file.seek(SeekFrom::Start(mark.offset))?;
    let mut reader = BufReader::new(file);
    let (mut events, mut line) = (Vec::new(), String::new());
    // The last line can be incomplete, because the API server is still writing it.
    while reader.read_line(&mut line)? > 0 && line.ends_with('\n') {
        let parsed: LogLine = serde_json::from_str(&line).context("a line of the audit log")?;
        // The API server logs a request after it has sent the response. So the line of a request can follow the mark
        // although the test had seen the result before the mark.
        if parsed.request_received_timestamp > mark.at {
            events.extend(event(parsed));
        }
        line.clear();
    }
    Ok(events)
}

/// The event of a log line, if the line completes a request. A watch has one event: when it starts or is rejected.
fn event(line: LogLine) -> Option<AuditEvent> {
    let expected_stage = if line.verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
    let status = line.response_status.map_or(0, |status| status.code);
    // A rejected watch never starts.
    let is_rejected = line.verb == "watch" && line.stage == "ResponseComplete" && status >= 400;
    if line.stage != expected_stage && !is_rejected {
        return None;
    }
    let object = line.object_ref.unwrap_or_default();
    let resource = match object.subresource.as_str() {
        "" => object.resource,
        sub => format!("{}/{sub}", object.resource),
    };
    let (namespace, name) = (object.namespace, object.name);
    let credential = line.user.extra.get(CREDENTIAL).and_then(|values| values.first().cloned());
    Some(AuditEvent { user: line.user.username, credential, verb: line.verb, resource, namespace, name, status })
}

// === impl AuditEvent ===

impl AuditEvent {
    /// Whether the request creates, changes or deletes objects. This is also true for a denied request.
    pub fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }

    /// Whether the API server denied the request: status 403.
    pub fn is_forbidden(&self) -> bool {
        self.status == 403
    }
}
