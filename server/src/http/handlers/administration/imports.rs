//! `POST /v1/{APPID}/imports`.

use std::{collections::BTreeMap, sync::Arc};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::{conflict_problem, users::create::new_user_properties};
use crate::{
    domain::{
        administration::{self, CreatedBy},
        app::App,
        clock::Env,
        ports::{ImportOutcome, NewAdministeredUser},
        rights::Right,
        user::UserId,
    },
    http::{
        Ports,
        administration::{NewUserFields, Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        handlers::administration::{actor, administrator_call},
        openapi::{
            examples,
            operation::{Content, Operation, Parameter},
        },
        request::{InboundRequest, InvalidField, METADATA_BOUNDS},
        response::{self, Response},
    },
    import_metrics::ImportedLines,
    json,
    state::State,
};

pub const RIGHT: Right = Right::Import;

/// Maximum number of lines in a batch, blank lines included.
pub const MAX_LINES: usize = 1000;
/// Maximum size of a body in bytes.
pub const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Maximum size of a line in bytes.
pub const MAX_LINE_BYTES: usize = 64 * 1024;
/// Maximum number of unknown field names that are counted separately. All further names are counted together as `…`.
const MAX_IGNORED_NAMES: usize = 100;
const MAX_SOURCE_BYTES: usize = 32;

/// The outcome of a batch.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ImportResponse")]
pub struct ImportResponse {
    /// One result for each line that is not blank, in the order of the lines.
    pub results: Vec<ImportResult>,
    pub created: usize,
    pub unchanged: usize,
    pub refused: usize,
    /// How often each field was ignored: unknown fields, and `password_hash` without an email address.
    pub ignored_fields: BTreeMap<String, u64>,
}

/// The outcome of a line.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ImportResult")]
pub struct ImportResult {
    /// The number of the line, from 1.
    pub line: usize,
    /// `created`, `unchanged` (a user with this `external_id` exists) or `refused`.
    pub outcome: &'static str,
    /// The id of the user. Left out for refused lines, and in a dry run for new users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why the line is refused: `invalid_request`, or the error code of a conflict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorCode>,
    /// The user with whom the line conflicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<FieldProblem>,
}

/// The lines of a batch, parsed one by one.
struct Batch<'a, S> {
    stores: &'a S,
    app: &'a App,
    now: OffsetDateTime,
    env: &'a Env,
    users: Vec<NewAdministeredUser>,
    results: Vec<ImportResult>,
    /// For each user in `users`: the index in `results` of the result for the user's line.
    result_indices: Vec<usize>,
    ignored_fields: BTreeMap<String, u64>,
}

pub fn operation() -> Operation {
    Operation::new(
        "Import users",
        "One JSON object per line; at most 1,000 lines, 4 MiB, and 64 KiB per line. One transaction per call; a \
         repeated call changes nothing. No mails are sent. A refused line does not prevent the others. Of duplicates, \
         the first wins.",
    )
    .requires_right(RIGHT)
    .query([
        Parameter::new(
            "source",
            "Where the users come from, in the event and in metrics.",
            json_schema!({ "type": "string", "maxLength": MAX_SOURCE_BYTES, "pattern": "^[a-z0-9-]+$" }),
        )
        .required()
        .example("crm"),
        Parameter::flag("dry_run", "`true`: reports what would happen, and writes nothing."),
    ])
    .request(Content::ndjson(
        schema,
        json!(
            "{\"external_id\":\"crm:1815\",\"email\":\"ada@example.com\",\"email_verified\":true,\"name\":\"Ada\"}\n"
        ),
    ))
    .response(Content::json::<ImportResponse>(json!({
        "results": [
            { "line": 1, "outcome": "created", "id": examples::USER_ID },
            { "line": 2, "outcome": "refused", "error": "invalid_request", "fields": [
                { "field": "email", "code": "invalid", "message": "is not an email address" },
            ] },
        ],
        "created": 1,
        "unchanged": 0,
        "refused": 1,
        "ignored_fields": { "totp": 1 },
    })))
}

fn schema(schemas: &mut SchemaGenerator) -> Schema {
    let mut properties = new_user_properties(schemas);
    properties["created_at"] =
        json!({ "type": "integer", "minimum": 0, "description": "Unix seconds, not after now." });
    json_schema!({
        "type": "object",
        "description": "One line. Unknown fields are counted and ignored.",
        "required": ["external_id"],
        "properties": properties,
    })
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["source", "dry_run"])?;
    let source = query.parse_value("source", "is not 1 to 32 characters of a-z, 0-9 and -", |text| {
        let is_source = text.len() <= MAX_SOURCE_BYTES
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        is_source.then(|| text.to_owned())
    })?;
    let source = source.ok_or_else(|| Problem::invalid_request("source is missing; name where the users come from"))?;
    let dry_run = query.flag("dry_run")?;
    let mut batch = Batch {
        stores: &state.stores,
        app,
        now: state.env.now(),
        env: &state.env,
        users: Vec::new(),
        results: Vec::new(),
        result_indices: Vec::new(),
        ignored_fields: BTreeMap::new(),
    };
    request
        .read_lines(MAX_BATCH_BYTES, MAX_LINE_BYTES, MAX_LINES, |number, line| batch.read_line(number, line))
        .await?;
    let Batch { users, mut results, result_indices, ignored_fields, .. } = batch;
    let refused = results.len() - result_indices.len();
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    let outcomes = administration::import_users(admin, users, &source, refused, dry_run).await?;
    for (index, outcome) in result_indices.into_iter().zip(outcomes) {
        results[index].complete(outcome, dry_run);
    }
    let count = |outcome| results.iter().filter(|result| result.outcome == outcome).count();
    let (created, unchanged, refused) = (count("created"), count("unchanged"), count("refused"));
    if !dry_run {
        state.import_metrics.count(&source, ImportedLines { created, unchanged, refused });
    }
    response::json(&ImportResponse { created, unchanged, refused, results, ignored_fields })
}

// === impl Batch ===

impl<S: Ports> Batch<'_, S> {
    /// Parses a line that is not blank.
    fn read_line(&mut self, number: usize, line: &[u8]) {
        let Ok(Value::Object(object)) = json::parse(line, METADATA_BOUNDS) else {
            let problem = FieldProblem {
                field: "".into(),
                code: FieldCode::Invalid,
                message: "the line is not a JSON object without duplicate keys".into(),
            };
            self.results.push(ImportResult::refused(number, vec![problem]));
            return;
        };
        let mut body = StrictBody::new(object);
        let NewUserFields {
            external_id,
            email,
            email_verified,
            name,
            disabled,
            mut password_hash,
            metadata,
            identities,
        } = body.new_user(self.stores, self.app);
        // Without an email address, nobody can log in with the password, so its hash is ignored.
        if email.is_none() && password_hash.take().is_some() {
            self.count_ignored("password_hash");
        }
        let created_at = body.past_time("created_at", self.now);
        body.require("external_id", external_id.is_some());
        // A line of an export also has these fields. An import ignores them.
        let is_text = |_: &str| Ok::<(), InvalidField>(());
        body.text("id", is_text);
        body.text("state", is_text);
        body.unknown_fields().for_each(|name| self.count_ignored(name));
        let problems = body.into_problems();
        if !problems.is_empty() {
            self.results.push(ImportResult::refused(number, problems));
            return;
        }
        let native = self.stores.class_of_new_hashes();
        let foreign_class = password_hash.as_ref().and_then(|hash| hash.foreign_class(native));
        self.result_indices.push(self.results.len());
        self.results.push(ImportResult::refused(number, Vec::new()));
        self.users.push(NewAdministeredUser {
            id: UserId(self.env.new_uuid()),
            external_id,
            email,
            email_verified,
            name,
            disabled,
            password_hash,
            foreign_class,
            metadata,
            identities,
            created_by: CreatedBy::Import,
            created_at: created_at.unwrap_or(self.now),
        });
    }

    fn count_ignored(&mut self, name: &str) {
        let is_known = self.ignored_fields.contains_key(name);
        let name = if is_known || self.ignored_fields.len() < MAX_IGNORED_NAMES { name } else { "…" };
        let name: String = name.chars().take(64).collect();
        *self.ignored_fields.entry(name).or_insert(0) += 1;
    }
}

// === impl ImportResult ===

impl ImportResult {
    fn refused(line: usize, fields: Vec<FieldProblem>) -> Self {
        Self { line, outcome: "refused", id: None, error: Some(ErrorCode::InvalidRequest), user_id: None, fields }
    }

    /// Replaces the preliminary outcome with the outcome that the store reported.
    fn complete(&mut self, outcome: ImportOutcome, dry_run: bool) {
        match outcome {
            ImportOutcome::Created(id) => {
                (self.outcome, self.error) = ("created", None);
                self.id = (!dry_run).then(|| id.to_string());
            }
            ImportOutcome::Unchanged(id) => {
                (self.outcome, self.error, self.id) = ("unchanged", None, Some(id.to_string()));
            }
            ImportOutcome::Conflict(conflict) => {
                let problem = conflict_problem(conflict);
                (self.error, self.user_id, self.fields) =
                    (Some(problem.code), problem.user_id.map(|user| user.to_string()), problem.fields);
            }
        }
    }
}
