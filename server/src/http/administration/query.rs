//! Query parameters, parsed strictly: an unknown or repeated parameter is an error.

use std::borrow::Cow;

use http::Uri;
use schemars::json_schema;

use crate::http::{
    error::{FieldCode, FieldProblem, Problem},
    openapi::operation::Parameter,
    parameters::Parameters,
};

/// The parameter `limit`, the size of a page.
const LIMIT: NumberParameter = NumberParameter { name: "limit", min: 1, max: 500, default: 100 };

/// The query parameters of a call. All of them are known and not empty.
pub struct Query<'a> {
    parameters: Parameters<'a>,
}

/// A parameter that is a whole number. The parser and the OpenAPI document use the same limits.
pub struct NumberParameter {
    pub name: &'static str,
    pub min: u16,
    pub max: u16,
    pub default: u16,
}

// === impl Query ===

impl<'a> Query<'a> {
    /// Parses the query of a call. `known`: the names of the call's parameters.
    ///
    /// # Errors
    ///
    /// 400 if a parameter is not in `known`, is repeated or is empty.
    pub fn parse(uri: &'a Uri, known: &[&'static str]) -> Result<Self, Problem> {
        let parameters = Parameters::parse(uri.query().unwrap_or_default())?;
        if let Some(unknown) = parameters.names().find(|name| !known.contains(name)) {
            // The error repeats the name only if it is a short word.
            let is_short_word = unknown.len() <= 32 && unknown.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            let named = if is_short_word { format!("{unknown} is") } else { "a query parameter is".to_owned() };
            let known = known.join(", ");
            let known = if known.is_empty() { "this call has none".to_owned() } else { format!("known are {known}") };
            return Err(Problem::invalid_request(format!("{named} unknown; {known}")));
        }
        for name in known {
            if parameters.get_once(name)? == Some("") {
                return Err(invalid_parameter(name, "is empty"));
            }
        }
        Ok(Self { parameters })
    }

    pub fn get(&self, name: &'static str) -> Option<&str> {
        self.parameters.get_once(name).ok().flatten()
    }

    /// Parses a parameter. `message` is the text after the name of the parameter in the error, for example `is not a
    /// UUID`.
    pub fn parse_value<T>(
        &self,
        name: &'static str,
        message: impl Into<Cow<'static, str>>,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Problem> {
        self.get(name).map(|text| parse(text).ok_or_else(|| invalid_parameter(name, message))).transpose()
    }

    /// Parses a parameter that is `true` or `false`. The default is `false`.
    pub fn flag(&self, name: &'static str) -> Result<bool, Problem> {
        let flag = self.parse_value(name, "is neither true nor false", |text| text.parse::<bool>().ok())?;
        Ok(flag.unwrap_or(false))
    }

    pub fn number(&self, parameter: &NumberParameter) -> Result<u16, Problem> {
        let NumberParameter { name, min, max, default } = *parameter;
        let parse = |text: &str| text.parse::<u16>().ok().filter(|number| (min..=max).contains(number));
        let number = self.parse_value(name, format!("is not a number from {min} to {max}"), parse)?;
        Ok(number.unwrap_or(default))
    }

    /// Returns the size of a page.
    pub fn limit(&self) -> Result<u16, Problem> {
        self.number(&LIMIT)
    }

    /// Describes the parameter that [`Self::limit`] parses.
    pub fn limit_parameter() -> Parameter {
        LIMIT.describe("The size of the page.")
    }
}

// === impl NumberParameter ===

impl NumberParameter {
    pub fn describe(&self, description: &'static str) -> Parameter {
        let Self { name, min, max, default } = *self;
        let schema = json_schema!({ "type": "integer", "minimum": min, "maximum": max, "default": default });
        Parameter::new(name, description, schema)
    }
}

/// Returns the error 400 for one invalid query parameter.
pub(super) fn invalid_parameter(name: &'static str, message: impl Into<Cow<'static, str>>) -> Problem {
    Problem::invalid_fields(vec![FieldProblem {
        field: name.into(),
        code: FieldCode::Invalid,
        message: message.into(),
    }])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(query: &str) -> Option<String> {
        let uri: Uri = format!("/v1/shop/users{query}").parse().unwrap();
        Query::parse(&uri, &["limit", "email"])
            .and_then(|query| query.limit())
            .err()
            .map(|problem| problem.description.into_owned())
    }

    #[test]
    fn a_number_is_parsed_with_the_limits_in_its_description() {
        let uri: Uri = "/v1/shop/webhooks/sync/events?wait=20".parse().unwrap();
        let query = Query::parse(&uri, &["limit", "wait"]).unwrap();
        let parameter = |name, max| NumberParameter { name, min: 0, max, default: 7 };
        assert_eq!(query.number(&parameter("wait", 20)).unwrap(), 20);
        assert_eq!(query.number(&parameter("limit", 20)).unwrap(), 7);
        let refused = query.number(&parameter("wait", 19)).unwrap_err();
        assert_eq!(refused.description, "wait is not a number from 0 to 19");
        let schema = parameter("wait", 19).describe("How long.").schema;
        assert_eq!(schema, json!({ "type": "integer", "minimum": 0, "maximum": 19, "default": 7 }));
    }

    #[test]
    fn a_flag_must_be_true_or_false_and_is_false_by_default() {
        let flag = |query: &str| {
            let uri: Uri = format!("/v1/shop/imports{query}").parse().unwrap();
            let flag = Query::parse(&uri, &["dry_run"]).and_then(|query| query.flag("dry_run"));
            flag.map_err(|problem| problem.description.into_owned())
        };
        assert_eq!([flag("?dry_run=true"), flag("?dry_run=false"), flag("")], [Ok(true), Ok(false), Ok(false)]);
        for bad in ["1", "True", "yes"] {
            assert_eq!(flag(&format!("?dry_run={bad}")), Err("dry_run is neither true nor false".to_owned()));
        }
    }

    #[test]
    fn a_parameter_must_be_known_and_given_once() {
        for good in ["", "?", "?limit=1", "?limit=500&email=a%40b.example"] {
            assert_eq!(error(good), None, "{good}");
        }
        assert_eq!(error("?sort=1").unwrap(), "sort is unknown; known are limit, email");
        assert_eq!(error("?%3Cscript%3E=1").unwrap(), "a query parameter is unknown; known are limit, email");
        assert_eq!(error("?limit=1&limit=1").unwrap(), "limit is given more than once");
        assert_eq!(error("?email=").unwrap(), "email is empty");
        for bad in ["0", "501", "-1", "1.0", "x", "99999999999"] {
            assert_eq!(error(&format!("?limit={bad}")).unwrap(), "limit is not a number from 1 to 500");
        }
    }
}
