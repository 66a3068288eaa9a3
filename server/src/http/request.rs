//! Requests: a bounded body, strict JSON, and fields that become values of the domain.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, StatusCode, Uri,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE},
};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use schemars::{JsonSchema, Schema, json_schema};
use serde_json::{Map, Value};

use super::{
    budgets::RequestMemory,
    error::{ErrorCode, FieldCode, FieldProblem, Problem},
    quota::Exhausted,
};
use crate::{
    domain::{
        client::Caller,
        email::{Email, MAX_ADDRESS},
        password::Password,
        user::{Name, NotAName},
    },
    json::{self, Bounds, Refusal},
};

/// The largest body (contract, 1).
pub const MAX_BODY: usize = 64 * 1024;
/// How deep arrays and objects may nest; the outermost object is 1 (contract, 1).
pub const MAX_DEPTH: usize = 16;
/// How many values a body may have. The largest body of ours has five; 64 KiB of `[0,0,…` would be 1 MiB as a tree.
pub const MAX_VALUES: usize = 1000;
const BOUNDS: Bounds = Bounds { depth: MAX_DEPTH, values: MAX_VALUES };

/// What is taken for a body of unknown length at first; then twice as much each time.
const FIRST_STEP: usize = 4 * 1024;

/// The media type of forms (RFC 6749, appendix B).
const FORM: &str = "application/x-www-form-urlencoded";

/// A request that has found its route.
pub struct Inbound {
    pub headers: HeaderMap,
    pub uri: Uri,
    /// What of the path says what it is about, beside the App.
    pub item: Option<String>,
    pub body: Incoming,
    /// What the request holds, until it is answered.
    pub memory: RequestMemory,
    /// The body must be whole in this time.
    pub body_time: Duration,
    pub caller: Caller,
}

/// The body of an operation: an object with known fields.
pub trait RequestBody: Sized + JsonSchema {
    /// None where a field is bad; `fields` has then noted all that are.
    fn read(fields: &mut Fields) -> Option<Self>;
}

/// A value of one field of a request.
pub trait FromField: Sized {
    /// Reads what was sent, which is not empty.
    fn read(text: &str) -> Result<Self, BadField>;

    fn schema() -> Schema;
}

/// A field as a body declares it: a value, or an `Option` of one where it may be left out.
pub trait Field: Sized {
    const REQUIRED: bool;

    /// None where what is there is bad, which `fields` has then noted.
    fn take(fields: &mut Fields, name: &'static str) -> Option<Self>;

    fn schema() -> Schema;
}

/// Why a text is not a value of its field.
pub struct BadField {
    pub code: FieldCode,
    pub message: Cow<'static, str>,
}

/// An object's fields, taken one by one; notes every bad one.
pub struct Fields {
    object: Map<String, Value>,
    bad: Vec<FieldProblem>,
}

/// Declares the body of an operation: its fields, how they are read and their schema, from one place.
macro_rules! request_body {
    ($(#[$doc:meta])* $visibility:vis struct $name:ident as $schema:literal { $($(#[doc = $about:literal])+ $field:ident: $type:ty,)+ }) => {
        $(#[$doc])*
        $visibility struct $name {
            $($(#[doc = $about])+ $visibility $field: $type,)+
        }

        impl $crate::http::request::RequestBody for $name {
            fn read(fields: &mut $crate::http::request::Fields) -> Option<Self> {
                // All are read before any is asked for, so that every bad one is noted.
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

/// The schema of an object whose fields must all be there.
pub fn object_schema<const N: usize>(fields: [(&'static str, &'static str, Schema, bool); N]) -> Schema {
    let required: Vec<_> = fields.iter().filter(|(.., required)| *required).map(|(name, ..)| *name).collect();
    let mut properties = Map::new();
    for (name, about, mut schema, _) in fields {
        schema.insert("description".to_owned(), about.into());
        properties.insert(name.to_owned(), schema.into());
    }
    json_schema!({ "type": "object", "properties": properties, "required": required })
}

/// Text that only the rules can judge, such as a token. What is wrong with it is told as of any other wrong value.
pub struct Text(pub String);

/// A code as it was typed. What has not the form of one is a wrong code like any other.
pub struct CodeText(pub String);

// === reading bodies ===

impl Inbound {
    /// The body's fields as the operation wants them.
    pub async fn read<T: RequestBody>(&mut self) -> Result<T, Problem> {
        fields(self.object().await?)
    }

    /// As [`Self::read`], and the body may be a form as well (RFC 6749, appendix B).
    pub async fn read_form<T: RequestBody>(&mut self) -> Result<T, Problem> {
        let form = match essence(&self.headers) {
            Some(essence) if essence.eq_ignore_ascii_case(FORM) => {
                uncoded(&self.headers)?;
                form(&self.bytes().await?)?
            }
            Some(_) | None => self.object().await?,
        };
        fields(form)
    }

    /// As [`Self::read`], where no body is as good as `{}`.
    pub async fn read_optional<T: RequestBody>(&mut self) -> Result<T, Problem> {
        if self.body.is_end_stream() { fields(Map::new()) } else { self.read().await }
    }

    /// A form as it was sent, where nothing else will do.
    pub async fn form_text(&mut self) -> Result<String, Problem> {
        if !essence(&self.headers).is_some_and(|essence| essence.eq_ignore_ascii_case(FORM)) {
            let why = "send one Content-Type: application/x-www-form-urlencoded";
            return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
        }
        uncoded(&self.headers)?;
        let bytes = self.bytes().await?;
        String::from_utf8(bytes.into()).map_err(|_| Problem::invalid_request("the body is not UTF-8"))
    }

    /// Makes sure that there is no data: no body, or `{}`.
    pub async fn read_nothing(&mut self) -> Result<(), Problem> {
        if self.body.is_end_stream() {
            return Ok(());
        }
        if self.headers.contains_key(CONTENT_TYPE) {
            content_type(&self.headers)?;
        }
        let bytes = self.bytes().await?;
        if bytes.is_empty() {
            return Ok(());
        }
        content_type(&self.headers)?;
        if parse(&bytes)?.is_empty() {
            return Ok(());
        }
        Err(Problem::invalid_request("this call takes no data: send no body, or {}"))
    }

    async fn object(&mut self) -> Result<Map<String, Value>, Problem> {
        if !self.body.is_end_stream() || self.headers.contains_key(CONTENT_TYPE) {
            content_type(&self.headers)?;
        }
        parse(&self.bytes().await?)
    }

    async fn bytes(&mut self) -> Result<Bytes, Problem> {
        let declared = self.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > MAX_BODY as u64) {
            return Err(too_large());
        }
        // What is declared is taken before any of it is read.
        let declared = declared.and_then(|length| usize::try_from(length).ok());
        let late =
            || Problem::invalid_request("the body did not come in time").with_status(StatusCode::REQUEST_TIMEOUT);
        let collecting = collect(&mut self.body, declared, &mut self.memory);
        tokio::time::timeout(self.body_time, collecting).await.map_err(|_| late())?
    }
}

fn fields<T: RequestBody>(object: Map<String, Value>) -> Result<T, Problem> {
    let mut fields = Fields { object, bad: Vec::new() };
    match T::read(&mut fields) {
        Some(value) if fields.bad.is_empty() => Ok(value),
        _ => Err(Problem::invalid_fields(fields.bad)),
    }
}

/// The one media type of the body, without its parameters.
fn essence(headers: &HeaderMap) -> Option<&str> {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(only), None) = (types.next(), types.next()) else { return None };
    only.to_str().ok()?.split(';').next().map(str::trim)
}

/// A form as an object of strings. A parameter must not come twice (RFC 6749, 3.2), and an empty one is as good as none.
pub fn form(bytes: &[u8]) -> Result<Map<String, Value>, Problem> {
    let mut object = Map::new();
    for (name, value) in url::form_urlencoded::parse(bytes) {
        // What is not UTF-8 has been replaced; nothing that a form of ours may hold has this character.
        if name.contains(char::REPLACEMENT_CHARACTER) || value.contains(char::REPLACEMENT_CHARACTER) {
            return Err(Problem::invalid_request("the body is not UTF-8"));
        }
        if object.insert(name.into_owned(), value.into_owned().into()).is_some() {
            return Err(Problem::invalid_request("the body has a parameter twice"));
        }
    }
    object.retain(|_, value| value != "");
    Ok(object)
}

async fn collect(body: &mut Incoming, declared: Option<usize>, memory: &mut RequestMemory) -> Result<Bytes, Problem> {
    let over_budget = |Exhausted| Problem::over_budget();
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let mut taken = declared.unwrap_or(FIRST_STEP);
    memory.take(taken).map_err(over_budget)?;
    let mut bytes = Vec::with_capacity(taken);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::invalid_request("the body broke off").because(error))?;
        // Trailers mean nothing here.
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > MAX_BODY {
            return Err(too_large());
        }
        let needed = bytes.len() + data.len();
        if needed > taken {
            let step = needed.max(2 * taken).min(MAX_BODY);
            memory.take(step - taken).map_err(over_budget)?;
            taken = step;
            bytes.reserve_exact(taken - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.into())
}

fn too_large() -> Problem {
    Problem::new(ErrorCode::PayloadTooLarge, "the body is over 64 KiB")
}

/// `application/json`, once, with any parameters; a `charset` must be UTF-8. No content coding.
fn content_type(headers: &HeaderMap) -> Result<(), Problem> {
    let refused = |why| Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(only), None) = (types.next(), types.next()) else {
        return refused("send one Content-Type: application/json");
    };
    let Ok(text) = only.to_str() else { return refused("send Content-Type: application/json") };
    let mut parts = text.split(';');
    if !parts.next().is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/json")) {
        return refused("send Content-Type: application/json");
    }
    for parameter in parts {
        let Some((name, value)) = parameter.split_once('=') else { continue };
        let value = value.trim().trim_matches('"');
        if name.trim().eq_ignore_ascii_case("charset") && !value.eq_ignore_ascii_case("utf-8") {
            return refused("send JSON in UTF-8");
        }
    }
    uncoded(headers)
}

fn uncoded(headers: &HeaderMap) -> Result<(), Problem> {
    let coded =
        headers.get_all(CONTENT_ENCODING).iter().any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if coded {
        let why = "send the body without Content-Encoding";
        return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
    }
    Ok(())
}

// === strict JSON ===

/// An object in UTF-8, without duplicate keys at any depth, within [`BOUNDS`]. Never quotes the input.
pub fn parse(bytes: &[u8]) -> Result<Map<String, Value>, Problem> {
    if bytes.is_empty() {
        return Err(Problem::invalid_request("the body is empty; send a JSON object"));
    }
    match json::parse(bytes, BOUNDS) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Problem::invalid_request("the body is not a JSON object")),
        Err(Refusal::TooDeep) => {
            Err(Problem::invalid_request(format!("the body nests deeper than {MAX_DEPTH} levels")))
        }
        Err(Refusal::TooManyValues) => {
            Err(Problem::invalid_request(format!("the body has more than {MAX_VALUES} values")))
        }
        Err(refusal @ (Refusal::NotUtf8 | Refusal::Syntax { .. } | Refusal::DuplicateKey { .. })) => {
            Err(Problem::invalid_request(format!("the body {refusal}")))
        }
    }
}

// === impl Fields ===

impl Fields {
    /// The field's value; none, and noted, where it is missing, empty, ill-typed or not of its form.
    pub fn take<T: FromField>(&mut self, field: &'static str) -> Option<T> {
        let read = match self.object.get(field) {
            None => Err(BadField::new(FieldCode::Missing, "is missing")),
            Some(Value::String(text)) if text.is_empty() => Err(BadField::new(FieldCode::Empty, "is empty")),
            Some(Value::String(text)) => T::read(text),
            Some(_) => Err(BadField::new(FieldCode::Invalid, "is not a string")),
        };
        read.map_err(|BadField { code, message }| self.bad.push(FieldProblem { field, code, message })).ok()
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

impl BadField {
    pub fn new(code: FieldCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
    }
}

// === the values ===

impl FromField for Email {
    fn read(text: &str) -> Result<Self, BadField> {
        if text.len() > MAX_ADDRESS {
            return Err(BadField::new(FieldCode::TooLong, format!("is longer than {MAX_ADDRESS} octets")));
        }
        Self::parse(text).map_err(|error| BadField::new(FieldCode::Invalid, error.to_string()))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "format": "email", "minLength": 1, "maxLength": MAX_ADDRESS })
    }
}

impl FromField for Name {
    fn read(text: &str) -> Result<Self, BadField> {
        Self::parse(text).map_err(|error| {
            let code = match error {
                NotAName::Empty => FieldCode::Empty,
                NotAName::TooLong => FieldCode::TooLong,
                NotAName::ControlCharacter => FieldCode::Invalid,
            };
            BadField::new(code, error.to_string())
        })
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "minLength": 1, "maxLength": Name::MAX_CHARS })
    }
}

/// Its length is judged by the rules, not here: a login takes any.
impl FromField for Password {
    fn read(text: &str) -> Result<Self, BadField> {
        Ok(Self::new(text))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "format": "password", "minLength": 1 })
    }
}

impl FromField for Text {
    fn read(text: &str) -> Result<Self, BadField> {
        Ok(Self(text.to_owned()))
    }

    fn schema() -> Schema {
        json_schema!({ "type": "string", "minLength": 1 })
    }
}

impl FromField for CodeText {
    fn read(text: &str) -> Result<Self, BadField> {
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

    fn refusal(bytes: &[u8]) -> String {
        let problem = parse(bytes).unwrap_err();
        assert_eq!(problem.status, StatusCode::BAD_REQUEST);
        problem.description.into_owned()
    }

    fn nested(depth: usize) -> String {
        // The outermost object is 1.
        format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1))
    }

    #[test]
    fn a_body_nests_sixteen_deep_and_no_deeper() {
        assert!(parse(nested(16).as_bytes()).is_ok());
        assert_eq!(refusal(nested(17).as_bytes()), "the body nests deeper than 16 levels");
        // Far deeper than any stack.
        assert_eq!(refusal(nested(30_000).as_bytes()), "the body nests deeper than 16 levels");
    }

    #[test]
    fn a_body_has_a_thousand_values_and_no_more() {
        let wide = |values: usize| format!("{{\"a\":[{}]}}", vec!["0"; values - 2].join(","));
        assert!(parse(wide(1000).as_bytes()).is_ok());
        assert_eq!(refusal(wide(1001).as_bytes()), "the body has more than 1000 values");
    }

    #[test]
    fn a_key_stands_once_at_any_depth() {
        assert_eq!(refusal(br#"{"email": "a", "email": "b"}"#), "the body has a key twice, at line 1");
        assert_eq!(refusal(br#"{"x": [{"y": 1, "y": 1}]}"#), "the body has a key twice, at line 1");
        // The same key, spelled otherwise.
        assert_eq!(refusal(br#"{"email": 1, "\u0065mail": 2}"#), "the body has a key twice, at line 1");
        assert!(parse(br#"{"x": {"y": 1}, "y": 2}"#).is_ok());
    }

    #[test]
    fn a_body_is_an_object_in_utf_8() {
        assert_eq!(refusal(b"{\"name\": \"\xff\"}"), "the body is not UTF-8");
        assert_eq!(refusal(b"{\"name\": \"\xed\xa0\x80\"}"), "the body is not UTF-8");
        assert_eq!(refusal(b""), "the body is empty; send a JSON object");
        for not_an_object in ["[]", "\"x\"", "1", "null", "true"] {
            assert_eq!(refusal(not_an_object.as_bytes()), "the body is not a JSON object");
        }
        for not_json in
            ["{", "{}{}", "{} x", "{a: 1}", "{'a': 1}", "{\"a\": 1,}", "{\"a\": \"\\ud800\"}", "{\"a\": NaN}"]
        {
            assert!(refusal(not_json.as_bytes()).starts_with("the body is not JSON"), "{not_json}");
        }
        assert!(parse(b" {\"a\": [1, -2, 3.5, null, true]} \n").is_ok());
    }

    fn judged(headers: &[(http::HeaderName, &'static str)]) -> bool {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect::<HeaderMap>();
        content_type(&headers).is_ok()
    }

    #[test]
    fn a_body_is_declared_as_json() {
        for good in ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/json;x=y"]
        {
            assert!(judged(&[(CONTENT_TYPE, good)]), "{good}");
        }
        assert!(judged(&[(CONTENT_TYPE, "application/json; charset=\"UTF-8\""), (CONTENT_ENCODING, "identity")]));
        for bad in [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json+x",
            "application/json; charset=latin1",
        ] {
            assert!(!judged(&[(CONTENT_TYPE, bad)]), "{bad}");
        }
        assert!(!judged(&[]));
        assert!(!judged(&[(CONTENT_TYPE, "application/json"), (CONTENT_TYPE, "application/json")]));
        assert!(!judged(&[(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "gzip")]));
    }

    request_body! {
        struct Sample as "Sample" {
            /// A name.
            name: Name,
            /// An address.
            email: Email,
            /// A password.
            password: Password,
            /// A code.
            code: CodeText,
        }
    }

    fn bad(body: &str) -> Vec<(&'static str, FieldCode)> {
        let mut fields = Fields { object: parse(body.as_bytes()).unwrap(), bad: Vec::new() };
        let read = Sample::read(&mut fields);
        assert_eq!(read.is_none(), !fields.bad.is_empty());
        fields.bad.into_iter().map(|bad| (bad.field, bad.code)).collect()
    }

    #[test]
    fn every_bad_field_is_named() {
        use FieldCode::{Empty, Invalid, Missing, TooLong};
        assert_eq!(bad("{}"), [("name", Missing), ("email", Missing), ("password", Missing), ("code", Missing)]);
        assert_eq!(
            bad(r#"{"name": "  ", "email": "", "password": 12345678, "code": null}"#),
            [("name", Empty), ("email", Empty), ("password", Invalid), ("code", Invalid)]
        );
        assert_eq!(
            bad(r#"{"name": "a\u0000b", "email": "nobody", "password": ["x"], "code": {"a": 1}}"#),
            [("name", Invalid), ("email", Invalid), ("password", Invalid), ("code", Invalid)]
        );
        let email =
            format!("{}@{}.example", "a".repeat(64), ["d".repeat(60), "e".repeat(60), "f".repeat(60)].join("."));
        assert_eq!(email.len(), 255);
        let body = |name: usize, email: &str| {
            serde_json::json!({ "name": "é".repeat(name), "email": email, "password": "p", "code": "c", "other": 1 })
                .to_string()
        };
        assert_eq!(bad(&body(201, &email)), [("name", TooLong), ("email", TooLong)]);
        assert_eq!(bad(&body(200, &email[1..])), []);
    }

    #[test]
    fn a_field_keeps_what_was_sent() {
        let body = r#"{"name": " Ada ", "email": "Ada@Example.com", "password": " p ", "code": " c "}"#;
        let mut fields = Fields { object: parse(body.as_bytes()).unwrap(), bad: Vec::new() };
        let sample = Sample::read(&mut fields).unwrap();
        assert_eq!(sample.name.as_str(), "Ada");
        assert_eq!(sample.email.as_str(), "Ada@Example.com");
        assert_eq!(sample.password.expose(), " p ");
        assert_eq!(sample.code.0, " c ");
    }
}
