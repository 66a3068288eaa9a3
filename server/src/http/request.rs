//! Requests: a bounded body, strict JSON, and fields that are parsed into domain values.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode, Uri,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE},
};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use schemars::{JsonSchema, Schema, json_schema};
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use super::{
    budgets::RequestMemory,
    error::{ErrorCode, FieldCode, FieldProblem, Problem},
    openapi::patterns,
    quota::Exhausted,
    response::NDJSON,
    serve::IncomingBody,
};
use crate::{
    domain::{
        client::ClientInfo,
        email::{Email, MAX_ADDRESS_BYTES},
        password::Password,
        user::{InvalidName, Name},
    },
    json::{self, Bounds, JsonError},
};

/// Maximum size of a body in bytes (specification: HTTP API, Request bodies).
pub const MAX_BODY: usize = 64 * 1024;
/// Maximum depth of arrays and objects; the outermost object has depth 1 (specification: HTTP API, Request bodies).
pub const MAX_DEPTH: usize = 16;
/// Maximum number of values in a JSON body. The operations with this maximum have at most five fields. A body of 64 KiB
/// such as `[0,0,…` would take 1 MiB as a tree of values.
pub const MAX_VALUES: usize = 1000;
/// Maximum number of parameters of a form. An authorization request has fewer than thirty known parameters, and a
/// provider sends fewer than twenty. A form of 64 KiB such as `a&b&c…` would take 2 MiB as a map (specification: HTTP
/// API, Request bodies).
pub const MAX_PARAMETERS: usize = 64;
const BOUNDS: Bounds = Bounds { depth: MAX_DEPTH, values: MAX_VALUES };
/// Bounds of bodies with metadata: 8 KiB of metadata has at most 4,096 values.
pub const METADATA_BOUNDS: Bounds = Bounds { depth: MAX_DEPTH, values: 5000 };

/// Number of bytes that a body of unknown length initially acquires from the memory budget. Each further step doubles
/// the number of acquired bytes.
const FIRST_RESERVATION: usize = 4 * 1024;

/// The media type of forms (RFC 6749, appendix B).
const FORM_MEDIA_TYPE: &str = "application/x-www-form-urlencoded";

/// A request after routing.
pub struct InboundRequest {
    pub method: Method,
    pub headers: HeaderMap,
    pub uri: Uri,
    /// The value of `X-Request-Id` in the response.
    pub id: String,
    /// The texts at the placeholders of the path except `{APPID}`, in their order.
    pub path_parameters: Vec<String>,
    pub body: IncomingBody,
    /// The memory that the request occupies until the response.
    pub memory: RequestMemory,
    /// Timeout for the complete body.
    pub body_timeout: Duration,
    pub client: ClientInfo,
}

/// A body that was JSON or a form.
pub struct SentBody {
    /// The members of the object, or the parameters of the form, which are all strings.
    pub fields: Map<String, Value>,
    pub is_form: bool,
}

/// The body of an operation: an object with known fields.
pub trait RequestBody: Sized + JsonSchema {
    /// Parses the fields. Returns `None` if a field is invalid. All invalid fields are recorded in `fields`.
    fn read(fields: &mut Fields) -> Option<Self>;
}

/// A type that is parsed from one field of a request.
pub trait FromField: Sized {
    /// Parses the text of the field. The text is not empty.
    fn from_text(text: &str) -> Result<Self, InvalidField>;

    fn schema() -> Schema;
}

/// The declared type of a field in a body: a value, or an `Option` of a value if the field is optional.
pub trait Field: Sized {
    const REQUIRED: bool;

    /// Takes the field `name`. Returns `None` if the field is invalid. The error is recorded in `fields`.
    fn take(fields: &mut Fields, name: &'static str) -> Option<Self>;

    fn schema() -> Schema;
}

/// Why a text is not a valid value of its field.
pub struct InvalidField {
    pub code: FieldCode,
    pub message: Cow<'static, str>,
}

/// Takes the fields of an object one by one, and records every invalid field.
pub struct Fields {
    object: Map<String, Value>,
    invalid: Vec<FieldProblem>,
}

/// Declares the body of an operation: its fields, how they are parsed, and their schema.
macro_rules! request_body {
    ($(#[$doc:meta])* $visibility:vis struct $name:ident as $schema:literal { $($(#[doc = $about:literal])+ $field:ident: $type:ty,)+ }) => {
        $(#[$doc])*
        $visibility struct $name {
            $($(#[doc = $about])+ $visibility $field: $type,)+
        }

        impl $crate::http::request::RequestBody for $name {
            fn read(fields: &mut $crate::http::request::Fields) -> Option<Self> {
                // Parse all fields before any `?`, so that every invalid field is recorded.
                $(let $field = <$type as $crate::http::request::Field>::take(fields, stringify!($field));)+
                Some(Self { $($field: $field?,)+ })
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $schema.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $crate::http::request::object_schema([
                    $((
                        stringify!($field),
                        concat!($($about),+).trim_ascii(),
                        <$type as $crate::http::request::Field>::schema(),
                        <$type as $crate::http::request::Field>::REQUIRED,
                    )),+
                ])
            }
        }
    };
}
pub(crate) use request_body;

/// The schema of an object. Each field is given by its name, its description, its schema, and whether it is required.
pub fn object_schema<const N: usize>(fields: [(&'static str, &'static str, Schema, bool); N]) -> Schema {
    let required: Vec<_> = fields.iter().filter(|(.., required)| *required).map(|(name, ..)| *name).collect();
    let mut properties = Map::new();
    for (name, about, mut schema, _) in fields {
        schema.insert("description".to_owned(), about.into());
        properties.insert(name.to_owned(), schema.into());
    }
    json_schema!({ "type": "object", "properties": properties, "required": required })
}

/// Text that only the domain can check, such as a token. Malformed text gets the same error as any other wrong value.
pub struct RawText(pub String);

/// A code as it was typed. A malformed code is handled like any other wrong code.
pub struct CodeText(pub String);

// === reading bodies ===

impl InboundRequest {
    /// The text at a placeholder of the path. `index` does not count `{APPID}`. Empty if the route has no such
    /// placeholder.
    pub fn path_parameter(&self, index: usize) -> &str {
        self.path_parameters.get(index).map_or("", String::as_str)
    }

    /// Drops what refers to the bytes of the request, so that the buffer of the connection can be reused while the request
    /// waits. The body must have been read.
    pub fn release_bytes(&mut self) {
        self.headers = HeaderMap::new();
        self.uri = Uri::default();
    }

    /// Reads a JSON body and parses its fields.
    pub async fn read_json<T: RequestBody>(&mut self) -> Result<T, Problem> {
        parse_fields(self.read_object().await?)
    }

    /// Reads a body that is JSON or a form (RFC 6749, appendix B).
    pub async fn read_json_or_form<T: RequestBody>(&mut self) -> Result<T, Problem> {
        parse_fields(self.read_sent_body().await?.fields)
    }

    /// Like [`Self::read_json_or_form`], for an endpoint that gets different fields from different callers.
    pub async fn read_sent_body(&mut self) -> Result<SentBody, Problem> {
        let is_form = self.has_form();
        let fields = if is_form {
            require_no_content_coding(&self.headers)?;
            parse_form(&self.read_bytes().await?)?
        } else {
            self.read_object().await?
        };
        Ok(SentBody { fields, is_form })
    }

    /// Reads a body that must be a form. Without a body, the form is empty.
    pub async fn read_optional_form(&mut self) -> Result<Map<String, Value>, Problem> {
        if self.body.is_end_stream() && !self.headers.contains_key(CONTENT_TYPE) {
            return Ok(Map::new());
        }
        parse_form(self.read_form_text().await?.as_bytes())
    }

    fn has_form(&self) -> bool {
        media_type(&self.headers).is_some_and(|essence| essence.eq_ignore_ascii_case(FORM_MEDIA_TYPE))
    }

    /// Reads a JSON body; a missing body is the same as `{}`.
    pub async fn read_optional_json<T: RequestBody>(&mut self) -> Result<T, Problem> {
        if self.body.is_end_stream() { parse_fields(Map::new()) } else { self.read_json().await }
    }

    /// Reads the text of a form, for an operation that accepts only a form.
    pub async fn read_form_text(&mut self) -> Result<String, Problem> {
        if !self.has_form() {
            let why = "send one Content-Type: application/x-www-form-urlencoded";
            return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
        }
        require_no_content_coding(&self.headers)?;
        let bytes = self.read_bytes().await?;
        let text = String::from_utf8(bytes.into()).map_err(|_| Problem::invalid_request("the body is not UTF-8"))?;
        require_few_parameters(&text)?;
        Ok(text)
    }

    /// Ensures that there is no data: no body, or `{}`.
    pub async fn expect_no_data(&mut self) -> Result<(), Problem> {
        if self.body.is_end_stream() {
            return Ok(());
        }
        if self.headers.contains_key(CONTENT_TYPE) {
            require_json(&self.headers)?;
        }
        let bytes = self.read_bytes().await?;
        if bytes.is_empty() {
            return Ok(());
        }
        require_json(&self.headers)?;
        if parse_object(&bytes)?.is_empty() {
            return Ok(());
        }
        Err(Problem::invalid_request("this call accepts no data: send no body, or {}"))
    }

    /// Reads a JSON object whose fields the handler parses itself.
    pub async fn read_json_object(&mut self) -> Result<Map<String, Value>, Problem> {
        if !self.body.is_end_stream() || self.headers.contains_key(CONTENT_TYPE) {
            require_json(&self.headers)?;
        }
        parse_object_within(&self.read_bytes().await?, METADATA_BOUNDS)
    }

    /// Like [`Self::read_json_object`]; a missing body is the same as `{}`.
    pub async fn read_optional_json_object(&mut self) -> Result<Map<String, Value>, Problem> {
        if self.body.is_end_stream() { Ok(Map::new()) } else { self.read_json_object().await }
    }

    /// Reads lines of JSON, and calls `read` with the number (from 1) and the text of each line that is not blank.
    ///
    /// # Errors
    ///
    /// 413 if the body has more than `max_bytes` bytes or `max_lines` lines, or a line has more than `max_line` bytes;
    /// 415 for another media type; 408 if the body is not received in time; 400 if it is incomplete; 503 if the server
    /// has no memory for it.
    pub async fn read_lines(
        &mut self,
        max_bytes: usize,
        max_line: usize,
        max_lines: usize,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<(), Problem> {
        if !media_type(&self.headers).is_some_and(|essence| essence.eq_ignore_ascii_case(NDJSON)) {
            let why = "send one Content-Type: application/x-ndjson";
            return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
        }
        require_no_content_coding(&self.headers)?;
        let deadline = Instant::now() + self.body_timeout;
        let (mut buffer, mut total, mut lines) = (Vec::new(), 0, 0);
        // The buffer has no line break before this index. So each byte is searched only once, even if the frames are
        // small.
        let mut searched = 0;
        let mut take_lines = |buffer: &mut Vec<u8>, is_last: bool| -> Result<(), Problem> {
            let mut begin = 0;
            loop {
                let from = begin.max(searched);
                let end = buffer[from..].iter().position(|byte| *byte == b'\n').map(|length| from + length);
                let (end, next) = match end {
                    Some(end) => (end, end + 1),
                    None if is_last && begin < buffer.len() => (buffer.len(), buffer.len()),
                    None => break,
                };
                lines += 1;
                if lines > max_lines {
                    return Err(too_large(format!("the body has more than {max_lines} lines")));
                }
                if end - begin > max_line {
                    return Err(too_large(format!("line {lines} is larger than {max_line} bytes")));
                }
                let line = buffer[begin..end].trim_ascii();
                if !line.is_empty() {
                    read(lines, line);
                }
                begin = next;
            }
            buffer.drain(..begin);
            searched = buffer.len();
            if buffer.len() > max_line {
                return Err(too_large(format!("line {} is larger than {max_line} bytes", lines + 1)));
            }
            Ok(())
        };
        while !self.body.is_end_stream() {
            let Ok(frame) = timeout_at(deadline, self.body.frame()).await else {
                let problem = Problem::invalid_request("the body was not received in time");
                return Err(problem.with_status(StatusCode::REQUEST_TIMEOUT));
            };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| Problem::invalid_request("the body is incomplete").with_cause(error))?;
            let Ok(data) = frame.into_data() else { continue };
            total += data.len();
            if total > max_bytes {
                return Err(too_large(format!("the body is larger than {max_bytes} bytes")));
            }
            self.memory.try_acquire_import(data.len()).map_err(|Exhausted| Problem::over_budget())?;
            buffer.extend_from_slice(&data);
            take_lines(&mut buffer, false)?;
        }
        take_lines(&mut buffer, true)
    }

    async fn read_object(&mut self) -> Result<Map<String, Value>, Problem> {
        if !self.body.is_end_stream() || self.headers.contains_key(CONTENT_TYPE) {
            require_json(&self.headers)?;
        }
        parse_object(&self.read_bytes().await?)
    }

    async fn read_bytes(&mut self) -> Result<Bytes, Problem> {
        let declared_length =
            self.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared_length.is_some_and(|length| length > MAX_BODY as u64) {
            return Err(payload_too_large());
        }
        // The memory for the declared length is acquired before any of the body is read.
        let declared_length = declared_length.and_then(|length| usize::try_from(length).ok());
        let too_late =
            || Problem::invalid_request("the body was not received in time").with_status(StatusCode::REQUEST_TIMEOUT);
        let collecting = collect_body(&mut self.body, declared_length, &mut self.memory);
        tokio::time::timeout(self.body_timeout, collecting).await.map_err(|_| too_late())?
    }
}

/// Parses the fields of an object. The error names every invalid field.
pub fn parse_fields<T: RequestBody>(object: Map<String, Value>) -> Result<T, Problem> {
    let mut fields = Fields { object, invalid: Vec::new() };
    match T::read(&mut fields) {
        Some(value) if fields.invalid.is_empty() => Ok(value),
        _ => Err(Problem::invalid_fields(fields.invalid)),
    }
}

/// The media type of the body without its parameters, if there is exactly one `Content-Type`.
fn media_type(headers: &HeaderMap) -> Option<&str> {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(only), None) = (types.next(), types.next()) else { return None };
    only.to_str().ok()?.split(';').next().map(str::trim)
}

/// Refuses a form or a query with too many parameters, before any of them takes memory of its own.
pub fn require_few_parameters(text: &str) -> Result<(), Problem> {
    if text.split('&').filter(|pair| !pair.is_empty()).nth(MAX_PARAMETERS).is_some() {
        return Err(Problem::invalid_request(format!("there are more than {MAX_PARAMETERS} parameters")));
    }
    Ok(())
}

/// Parses a form into an object of strings. A parameter must not occur twice (RFC 6749, 3.2). An empty parameter counts
/// as missing.
pub fn parse_form(bytes: &[u8]) -> Result<Map<String, Value>, Problem> {
    let not_utf8 = || Problem::invalid_request("the body is not UTF-8");
    // The parser joins raw and decoded bytes, so it could turn a body that is not UTF-8 into valid text.
    let text = str::from_utf8(bytes).map_err(|_| not_utf8())?;
    require_few_parameters(text)?;
    let mut object = Map::new();
    for (name, value) in url::form_urlencoded::parse(text.as_bytes()) {
        // The parser replaces bytes that are not UTF-8 with this character. No valid value of our forms contains this
        // character.
        if name.contains(char::REPLACEMENT_CHARACTER) || value.contains(char::REPLACEMENT_CHARACTER) {
            return Err(not_utf8());
        }
        if object.insert(name.into_owned(), value.into_owned().into()).is_some() {
            return Err(Problem::invalid_request("the body has a parameter twice"));
        }
    }
    object.retain(|_, value| value != "");
    Ok(object)
}

async fn collect_body(
    body: &mut IncomingBody,
    declared_length: Option<usize>,
    memory: &mut RequestMemory,
) -> Result<Bytes, Problem> {
    let over_budget = |Exhausted| Problem::over_budget();
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let mut reserved = declared_length.unwrap_or(FIRST_RESERVATION);
    memory.try_acquire(reserved).map_err(over_budget)?;
    let mut bytes = Vec::with_capacity(reserved);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::invalid_request("the body is incomplete").with_cause(error))?;
        // Trailers are ignored.
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > MAX_BODY {
            return Err(payload_too_large());
        }
        let needed = bytes.len() + data.len();
        if needed > reserved {
            let new_reserved = needed.max(2 * reserved).min(MAX_BODY);
            memory.try_acquire(new_reserved - reserved).map_err(over_budget)?;
            reserved = new_reserved;
            bytes.reserve_exact(reserved - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.into())
}

fn payload_too_large() -> Problem {
    too_large("the body is larger than 64 KiB")
}

fn too_large(description: impl Into<Cow<'static, str>>) -> Problem {
    Problem::new(ErrorCode::PayloadTooLarge, description)
}

/// Requires exactly one `Content-Type`, which must be `application/json`. A `charset` must be UTF-8; other parameters
/// are ignored. A content coding is not allowed.
fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let unsupported = |why| Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(only), None) = (types.next(), types.next()) else {
        return unsupported("send one Content-Type: application/json");
    };
    let Ok(text) = only.to_str() else { return unsupported("send Content-Type: application/json") };
    let mut parts = text.split(';');
    if !parts.next().is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/json")) {
        return unsupported("send Content-Type: application/json");
    }
    for parameter in parts {
        let Some((name, value)) = parameter.split_once('=') else { continue };
        let value = value.trim().trim_matches('"');
        if name.trim().eq_ignore_ascii_case("charset") && !value.eq_ignore_ascii_case("utf-8") {
            return unsupported("send JSON in UTF-8");
        }
    }
    require_no_content_coding(headers)
}

fn require_no_content_coding(headers: &HeaderMap) -> Result<(), Problem> {
    let coded =
        headers.get_all(CONTENT_ENCODING).iter().any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if coded {
        let why = "send the body without Content-Encoding";
        return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
    }
    Ok(())
}

// === strict JSON ===

/// Parses a JSON object in UTF-8, without duplicate keys at any depth, within [`BOUNDS`]. Errors never quote the input.
pub fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, Problem> {
    parse_object_within(bytes, BOUNDS)
}

fn parse_object_within(bytes: &[u8], bounds: Bounds) -> Result<Map<String, Value>, Problem> {
    if bytes.is_empty() {
        return Err(Problem::invalid_request("the body is empty; send a JSON object"));
    }
    match json::parse(bytes, bounds) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Problem::invalid_request("the body is not a JSON object")),
        Err(JsonError::TooDeep) => {
            Err(Problem::invalid_request(format!("the body nests deeper than {MAX_DEPTH} levels")))
        }
        Err(JsonError::TooManyValues) => {
            Err(Problem::invalid_request(format!("the body has more than {} values", bounds.values)))
        }
        Err(error @ (JsonError::NotUtf8 | JsonError::Syntax { .. } | JsonError::DuplicateKey { .. })) => {
            Err(Problem::invalid_request(format!("the body {error}")))
        }
    }
}

// === impl Fields ===

impl Fields {
    /// Takes the value of the field. Returns `None` if the field is missing, empty, of the wrong type or malformed; the
    /// error is recorded.
    pub fn take<T: FromField>(&mut self, field: &'static str) -> Option<T> {
        let read = match self.object.get(field) {
            None => Err(InvalidField::new(FieldCode::Missing, "is missing")),
            Some(Value::String(text)) if text.is_empty() => Err(InvalidField::new(FieldCode::Empty, "is empty")),
            Some(Value::String(text)) => T::from_text(text),
            Some(_) => Err(InvalidField::new(FieldCode::Invalid, "is not a string")),
        };
        read.map_err(|InvalidField { code, message }| {
            self.invalid.push(FieldProblem { field: field.into(), code, message })
        })
        .ok()
    }
}

impl<T: FromField> Field for T {
    const REQUIRED: bool = true;

    fn take(fields: &mut Fields, name: &'static str) -> Option<Self> {
        fields.take(name)
    }

    fn schema() -> Schema {
        <T as FromField>::schema()
    }
}

impl<T: FromField> Field for Option<T> {
    const REQUIRED: bool = false;

    fn take(fields: &mut Fields, name: &'static str) -> Option<Self> {
        if fields.object.contains_key(name) { fields.take(name).map(Some) } else { Some(None) }
    }

    fn schema() -> Schema {
        T::schema()
    }
}

impl InvalidField {
    pub fn new(code: FieldCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
    }
}

// === impl FromField ===

impl FromField for Email {
    fn from_text(text: &str) -> Result<Self, InvalidField> {
        if text.len() > MAX_ADDRESS_BYTES {
            return Err(InvalidField::new(FieldCode::TooLong, format!("is longer than {MAX_ADDRESS_BYTES} bytes")));
        }
        Self::parse(text).map_err(|error| InvalidField::new(FieldCode::Invalid, error.to_string()))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "format": "email", "minLength": 1, "maxLength": MAX_ADDRESS_BYTES })
    }
}

impl FromField for Name {
    fn from_text(text: &str) -> Result<Self, InvalidField> {
        Self::parse(text).map_err(|error| {
            let code = match error {
                InvalidName::Empty => FieldCode::Empty,
                InvalidName::TooLong => FieldCode::TooLong,
                InvalidName::ControlCharacter => FieldCode::Invalid,
            };
            InvalidField::new(code, error.to_string())
        })
    }

    fn schema() -> Schema {
        json_schema!({
            "type": "string",
            "minLength": 1,
            "maxLength": Name::MAX_CHARS,
            "pattern": patterns::NAME,
        })
    }
}

/// Accepts a password of any length. The domain checks the length, because only new passwords have limits.
impl FromField for Password {
    fn from_text(text: &str) -> Result<Self, InvalidField> {
        Ok(Self::new(text))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "format": "password", "minLength": 1 })
    }
}

impl FromField for RawText {
    fn from_text(text: &str) -> Result<Self, InvalidField> {
        Ok(Self(text.to_owned()))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "minLength": 1 })
    }
}

impl FromField for CodeText {
    fn from_text(text: &str) -> Result<Self, InvalidField> {
        Ok(Self(text.to_owned()))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "minLength": 1 })
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn error_of(bytes: &[u8]) -> String {
        let problem = parse_object(bytes).unwrap_err();
        assert_eq!(problem.status, StatusCode::BAD_REQUEST);
        problem.description.into_owned()
    }

    fn nested(depth: usize) -> String {
        // The outermost object has depth 1.
        format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1))
    }

    #[test]
    fn a_body_nests_at_most_sixteen_levels_deep() {
        assert!(parse_object(nested(16).as_bytes()).is_ok());
        assert_eq!(error_of(nested(17).as_bytes()), "the body nests deeper than 16 levels");
        // Deep enough to overflow the stack of a recursive parser.
        assert_eq!(error_of(nested(30_000).as_bytes()), "the body nests deeper than 16 levels");
    }

    #[test]
    fn a_body_has_at_most_a_thousand_values() {
        let wide = |values: usize| format!("{{\"a\":[{}]}}", vec!["0"; values - 2].join(","));
        assert!(parse_object(wide(1000).as_bytes()).is_ok());
        assert_eq!(error_of(wide(1001).as_bytes()), "the body has more than 1000 values");
    }

    #[test]
    fn a_duplicate_key_is_rejected_at_any_depth() {
        assert_eq!(error_of(br#"{"email": "a", "email": "b"}"#), "the body has a duplicate key, at line 1");
        assert_eq!(error_of(br#"{"x": [{"y": 1, "y": 1}]}"#), "the body has a duplicate key, at line 1");
        // The same key in another spelling.
        assert_eq!(error_of(br#"{"email": 1, "\u0065mail": 2}"#), "the body has a duplicate key, at line 1");
        assert!(parse_object(br#"{"x": {"y": 1}, "y": 2}"#).is_ok());
    }

    #[test]
    fn a_body_must_be_an_object_in_utf_8() {
        assert_eq!(error_of(b"{\"name\": \"\xff\"}"), "the body is not UTF-8");
        assert_eq!(error_of(b"{\"name\": \"\xed\xa0\x80\"}"), "the body is not UTF-8");
        assert_eq!(error_of(b""), "the body is empty; send a JSON object");
        // The raw byte 0xD9 alone is not valid UTF-8. The raw byte and the decoded byte 0xBD together would be.
        assert!(parse_form(b"a=\xd9%BD").is_err() && parse_form(b"a=%D9%BD").is_ok());
        for not_an_object in ["[]", "\"x\"", "1", "null", "true"] {
            assert_eq!(error_of(not_an_object.as_bytes()), "the body is not a JSON object");
        }
        for not_json in
            ["{", "{}{}", "{} x", "{a: 1}", "{'a': 1}", "{\"a\": 1,}", "{\"a\": \"\\ud800\"}", "{\"a\": NaN}"]
        {
            assert!(error_of(not_json.as_bytes()).starts_with("the body is not JSON"), "{not_json}");
        }
        assert!(parse_object(b" {\"a\": [1, -2, 3.5, null, true]} \n").is_ok());
    }

    #[test]
    fn a_form_has_at_most_64_parameters() {
        let form = |count: usize| (0..count).map(|number| format!("f{number}=x&&")).collect::<String>();
        assert_eq!(parse_form(form(MAX_PARAMETERS).as_bytes()).unwrap().len(), MAX_PARAMETERS);
        for too_many in [form(MAX_PARAMETERS + 1), "a&".repeat(MAX_PARAMETERS + 1), "&=".repeat(MAX_PARAMETERS + 1)] {
            let problem = parse_form(too_many.as_bytes()).unwrap_err();
            assert_eq!(problem.description, "there are more than 64 parameters");
            assert_eq!(problem.status, StatusCode::BAD_REQUEST);
        }
    }

    fn is_accepted(headers: &[(http::HeaderName, &'static str)]) -> bool {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect::<HeaderMap>();
        require_json(&headers).is_ok()
    }

    #[test]
    fn a_body_must_be_declared_as_json() {
        for good in ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/json;x=y"]
        {
            assert!(is_accepted(&[(CONTENT_TYPE, good)]), "{good}");
        }
        assert!(is_accepted(&[(CONTENT_TYPE, "application/json; charset=\"UTF-8\""), (CONTENT_ENCODING, "identity")]));
        for bad in [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json+x",
            "application/json; charset=latin1",
        ] {
            assert!(!is_accepted(&[(CONTENT_TYPE, bad)]), "{bad}");
        }
        assert!(!is_accepted(&[]));
        assert!(!is_accepted(&[(CONTENT_TYPE, "application/json"), (CONTENT_TYPE, "application/json")]));
        assert!(!is_accepted(&[(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "gzip")]));
    }

    request_body! {
        struct Sample as "Sample" {
            /// A name.
            name: Name,
            /// An email address.
            email: Email,
            /// A password.
            password: Password,
            /// A code.
            code: CodeText,
        }
    }

    fn invalid_fields(body: &str) -> Vec<(&'static str, FieldCode)> {
        let mut fields = Fields { object: parse_object(body.as_bytes()).unwrap(), invalid: Vec::new() };
        let read = Sample::read(&mut fields);
        assert_eq!(read.is_none(), !fields.invalid.is_empty());
        let name = |field| match field {
            Cow::Borrowed(name) => name,
            Cow::Owned(name) => panic!("{name} is not a declared field"),
        };
        fields.invalid.into_iter().map(|bad| (name(bad.field), bad.code)).collect()
    }

    #[test]
    fn every_invalid_field_is_named() {
        use FieldCode::{Empty, Invalid, Missing, TooLong};
        assert_eq!(
            invalid_fields("{}"),
            [("name", Missing), ("email", Missing), ("password", Missing), ("code", Missing)]
        );
        assert_eq!(
            invalid_fields(r#"{"name": "  ", "email": "", "password": 12345678, "code": null}"#),
            [("name", Empty), ("email", Empty), ("password", Invalid), ("code", Invalid)]
        );
        assert_eq!(
            invalid_fields(r#"{"name": "a\u0000b", "email": "nobody", "password": ["x"], "code": {"a": 1}}"#),
            [("name", Invalid), ("email", Invalid), ("password", Invalid), ("code", Invalid)]
        );
        let email =
            format!("{}@{}.example", "a".repeat(64), ["d".repeat(60), "e".repeat(60), "f".repeat(60)].join("."));
        assert_eq!(email.len(), 255);
        let body = |name: usize, email: &str| {
            serde_json::json!({ "name": "é".repeat(name), "email": email, "password": "p", "code": "c", "other": 1 })
                .to_string()
        };
        assert_eq!(invalid_fields(&body(201, &email)), [("name", TooLong), ("email", TooLong)]);
        assert_eq!(invalid_fields(&body(200, &email[1..])), []);
    }

    #[test]
    fn only_the_name_is_trimmed() {
        let body = r#"{"name": " Ada ", "email": "Ada@Example.com", "password": " p ", "code": " c "}"#;
        let mut fields = Fields { object: parse_object(body.as_bytes()).unwrap(), invalid: Vec::new() };
        let sample = Sample::read(&mut fields).unwrap();
        assert_eq!(sample.name.as_str(), "Ada");
        assert_eq!(sample.email.as_str(), "Ada@Example.com");
        assert_eq!(sample.password.expose(), " p ");
        assert_eq!(sample.code.0, " c ");
    }
}
