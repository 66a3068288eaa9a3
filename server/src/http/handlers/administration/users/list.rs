//! `GET /v1/{APPID}/users`.

use std::sync::Arc;

use latchkey_crds::types::ProviderName;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use crate::{
    domain::{
        administration::{ExternalId, UserState},
        app::App,
        email::Email,
        ports::{Order, SubjectOf, UserFilter, UserPosition},
        rights::Right,
        user::UserId,
    },
    http::{
        Ports,
        administration::{Cursor, Query},
        authentication::Caller,
        error::Problem,
        handlers::administration::AdminUserResponse,
        openapi::{
            operation::{Content, Operation, Parameter},
            patterns,
        },
        request::{FromField, InboundRequest},
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// The parameters that are filters. A call can have at most one of them. `provider` and `authority` are not in this
/// list, because they belong to the filter `subject`.
const FILTERS: [&str; 6] = ["email", "external_id", "subject", "state", "email_prefix", "name_prefix"];
/// Maximum length of a prefix, in bytes. No email address and no name (at most 200 characters) is longer.
const MAX_PREFIX_BYTES: usize = 800;
/// The values of `order`.
const ORDERS: [(&str, Order); 2] = [("asc", Order::Ascending), ("desc", Order::Descending)];

/// A page of users.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UsersResponse")]
pub struct UsersResponse {
    pub users: Vec<AdminUserResponse>,
    /// The `cursor` of the next page; left out on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

pub fn operation() -> Operation {
    Operation::new(
        "List users",
        "Users by `id`, or by the field of a prefix filter. At most one filter: `email`, `external_id`, `subject` (with \
         `provider` or `authority`), `state`, `email_prefix` or `name_prefix`. Prefixes ignore case. There are no \
         totals.",
    )
    .requires_right(RIGHT)
    .query([
        Parameter::new("email", "The email address of the user; case is ignored.", Email::schema()),
        Parameter::new(
            "external_id",
            "The id of the user in another system.",
            json_schema!({
                "type": "string",
                "minLength": 1,
                "maxLength": ExternalId::MAX_BYTES,
                "pattern": patterns::NO_CONTROL_CHARACTERS,
            }),
        ),
        Parameter::new(
            "subject",
            "The subject of an identity; needs `provider` or `authority`.",
            storable_text_schema(),
        ),
        Parameter::new(
            "provider",
            "The name of the provider of `subject`.",
            SchemaGenerator::default().subschema_for::<ProviderName>(),
        ),
        Parameter::new("authority", "The authority of `subject`, for example the issuer.", storable_text_schema()),
        Parameter::new(
            "state",
            "The state of the user.",
            json_schema!({ "type": "string", "enum": filterable_states().map(UserState::as_str).collect::<Vec<_>>() }),
        ),
        Parameter::new(
            "email_prefix",
            "The beginning of the email address. The page is sorted by email address.",
            prefix_schema(),
        ),
        Parameter::new("name_prefix", "The beginning of the name. The page is sorted by name.", prefix_schema()),
        Parameter::new(
            "order",
            "The order of the ids. Only without a filter, or with `state`.",
            json_schema!({ "type": "string", "enum": ORDERS.map(|(name, _)| name), "default": "asc" }),
        ),
        Query::limit_parameter(),
        Cursor::parameter(),
    ])
    .response(Content::json::<UsersResponse>(json!({
        "users": [AdminUserResponse::listed_example()],
        "next": "nE6t0jDxvQ3WeyJpZCI6IjAxOWE4NDUyIn0",
    })))
}

/// The schema of a text that Postgres can store.
fn storable_text_schema() -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "pattern": patterns::NO_NUL })
}

/// The schema of a prefix. `maxLength` counts characters, so text that is not ASCII can match the schema and still have
/// too many bytes.
fn prefix_schema() -> Schema {
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_PREFIX_BYTES,
        "pattern": patterns::NO_NUL,
    })
}

/// The states by which users can be filtered. `active` is not among them, because most users are active.
fn filterable_states() -> impl Iterator<Item = UserState> {
    UserState::ALL.into_iter().filter(|state| *state != UserState::Active)
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(
        &request.uri,
        &[
            "email",
            "external_id",
            "subject",
            "provider",
            "authority",
            "state",
            "email_prefix",
            "name_prefix",
            "order",
            "limit",
            "cursor",
        ],
    )?;
    let filter = parse_filter(&query)?;
    let limit = query.limit()?;
    let cursor = Cursor::new(app.id(), "users", &filter);
    let position = cursor.position::<(String, Uuid)>(&query)?;
    if position.as_ref().is_some_and(|(key, _)| key.contains('\0')) {
        return Err(Problem::invalid_request("cursor is not a cursor of this call with these filters"));
    }
    let after = position.map(|(key, id)| UserPosition { key, id: UserId(id) });
    let page = state.stores.users(app.id(), &filter, after.as_ref(), limit).await?;
    response::json(&UsersResponse {
        users: page.users.into_iter().map(AdminUserResponse::listed).collect(),
        next: page.next.map(|position| cursor.encode(&(position.key, position.id.0))),
    })
}

fn parse_filter(query: &Query<'_>) -> Result<UserFilter, Problem> {
    let given: Vec<_> = FILTERS.into_iter().filter(|name| query.get(name).is_some()).collect();
    if given.len() > 1 {
        return Err(Problem::invalid_request(format!("give at most one filter, not {}", given.join(" and "))));
    }
    let order = query.parse_value("order", "is neither asc nor desc", |text| {
        ORDERS.into_iter().find(|(name, _)| *name == text).map(|(_, order)| order)
    })?;
    let is_sorted_by_id = matches!(given.first(), None | Some(&"state"));
    if order.is_some() && !is_sorted_by_id {
        return Err(Problem::invalid_request("order applies only without a filter, or with state"));
    }
    let order = order.unwrap_or_default();
    let provider =
        query.parse_value("provider", "is not the name of a provider", |text| text.parse::<ProviderName>().ok())?;
    let authority = query.get("authority").map(str::to_owned);
    if given.first() != Some(&"subject") && (provider.is_some() || authority.is_some()) {
        return Err(Problem::invalid_request("provider and authority apply only with subject"));
    }
    let prefix = |name| {
        query.parse_value(name, "is too long or contains the character U+0000", |text| {
            (text.len() <= MAX_PREFIX_BYTES && !text.contains('\0')).then(|| text.to_owned())
        })
    };
    if let Some(email) = query.parse_value("email", "is not an email address", |text| Email::parse(text).ok())? {
        return Ok(UserFilter::Email(email));
    }
    let external_id = query.parse_value("external_id", "is not an external_id", |text| ExternalId::parse(text).ok())?;
    if let Some(external_id) = external_id {
        return Ok(UserFilter::ExternalId(external_id));
    }
    let text_without_nul = |text: &str| (!text.contains('\0')).then(|| text.to_owned());
    if let Some(subject) = query.parse_value("subject", "contains the character U+0000", text_without_nul)? {
        let of = match (provider, authority) {
            (Some(provider), None) => SubjectOf::Provider(provider),
            (None, Some(authority)) if !authority.contains('\0') => SubjectOf::Authority(authority),
            _ => return Err(Problem::invalid_request("subject needs either provider or authority")),
        };
        return Ok(UserFilter::Subject { subject, of });
    }
    let state = query.parse_value("state", "is not disabled, contested or unverified", |text| {
        filterable_states().find(|state| state.as_str() == text)
    })?;
    if let Some(state) = state {
        return Ok(UserFilter::State { state, order });
    }
    if let Some(prefix) = prefix("email_prefix")? {
        return Ok(UserFilter::EmailPrefix(prefix.to_ascii_lowercase()));
    }
    if let Some(prefix) = prefix("name_prefix")? {
        // Each character is converted to lower case on its own, as in Postgres.
        return Ok(UserFilter::NamePrefix(prefix.chars().flat_map(char::to_lowercase).collect()));
    }
    Ok(UserFilter::All { order })
}

#[cfg(test)]
mod tests {
    use http::Uri;

    use super::*;

    const KNOWN: &[&str] =
        &["email", "external_id", "subject", "provider", "authority", "state", "email_prefix", "name_prefix", "order"];

    fn filter_of(text: &str) -> Result<UserFilter, String> {
        let uri: Uri = format!("/?{text}").parse().unwrap();
        let filter = Query::parse(&uri, KNOWN).and_then(|query| parse_filter(&query));
        filter.map_err(|problem| problem.description.into_owned())
    }

    #[test]
    fn at_most_one_filter_is_accepted() {
        assert_eq!(filter_of(""), Ok(UserFilter::All { order: Order::Ascending }));
        assert_eq!(filter_of("order=desc"), Ok(UserFilter::All { order: Order::Descending }));
        assert_eq!(
            filter_of("email=Ada%40Example.com"),
            Ok(UserFilter::Email(Email::parse("Ada@Example.com").unwrap()))
        );
        assert_eq!(filter_of("email_prefix=ADA"), Ok(UserFilter::EmailPrefix("ada".to_owned())));
        let unverified = UserFilter::State { state: UserState::Unverified, order: Order::Descending };
        assert_eq!(filter_of("state=unverified&order=desc"), Ok(unverified));
        let subject =
            UserFilter::Subject { subject: "1".to_owned(), of: SubjectOf::Authority("https://id.example".to_owned()) };
        assert_eq!(filter_of("subject=1&authority=https%3A%2F%2Fid.example"), Ok(subject));
        for (bad, error) in [
            ("email=a%40b.example&state=disabled", "give at most one filter, not email and state"),
            ("subject=1", "subject needs either provider or authority"),
            ("subject=1&provider=github&authority=x", "subject needs either provider or authority"),
            ("provider=github", "provider and authority apply only with subject"),
            ("state=active", "state is not disabled, contested or unverified"),
            ("email=ada", "email is not an email address"),
            ("name_prefix=a&order=asc", "order applies only without a filter, or with state"),
            ("order=up", "order is neither asc nor desc"),
            ("name_prefix=%00", "name_prefix is too long or contains the character U+0000"),
        ] {
            assert_eq!(filter_of(bad), Err(error.to_owned()), "{bad}");
        }
    }
}
