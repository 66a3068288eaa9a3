//! Query parameters, parsed strictly: an unknown or repeated parameter is an error.

use http::Uri;

use crate::http::{
    error::{FieldCode, FieldProblem, Problem},
    parameters::Parameters,
};

/// The known query parameters of a call. An empty parameter is an error, too.
pub struct Query<'a> {
    parameters: Parameters<'a>,
}

// === impl Query ===

impl<'a> Query<'a> {
    /// # Errors
    ///
    /// 400 if a parameter is not in `known`, is repeated or is empty.
    pub fn parse(uri: &'a Uri, known: &[&'static str]) -> Result<Self, Problem> {
        let parameters = Parameters::parse(uri.query().unwrap_or_default())?;
        if let Some(unknown) = parameters.names().find(|name| !known.contains(name)) {
            // A name that is not a short word is not repeated in the error.
            let is_short_word = unknown.len() <= 32 && unknown.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            let named = if is_short_word { format!("{unknown} is") } else { "a query parameter is".to_owned() };
            let known = known.join(", ");
            let known = if known.is_empty() { "this call has none".to_owned() } else { format!("known are {known}") };
            return Err(Problem::invalid_request(format!("{named} unknown; {known}")));
        }
        for name in known {
            if parameters.get_once(name)? == Some("") {
                return Err(invalid(name, "is empty"));
            }
        }
        Ok(Self { parameters })
    }

    pub fn get(&self, name: &'static str) -> Option<&str> {
        self.parameters.get_once(name).ok().flatten()
    }

    /// Parses a parameter. `expected` completes the error "name …", for example `is not a UUID`.
    pub fn parse_value<T>(
        &self,
        name: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Problem> {
        self.get(name).map(|text| parse(text).ok_or_else(|| invalid(name, expected))).transpose()
    }

    /// The size of a page: 1–500, by default 100.
    pub fn limit(&self) -> Result<u16, Problem> {
        let parse = |text: &str| text.parse::<u16>().ok().filter(|limit| (1..=500).contains(limit));
        Ok(self.parse_value("limit", "is not a number from 1 to 500", parse)?.unwrap_or(100))
    }
}

/// 400 because of one query parameter.
pub(super) fn invalid(name: &'static str, message: &'static str) -> Problem {
    Problem::invalid_fields(vec![FieldProblem {
        field: name.into(),
        code: FieldCode::Invalid,
        message: message.into(),
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(query: &str) -> Option<String> {
        let uri: Uri = format!("/v1/shop/users{query}").parse().unwrap();
        Query::parse(&uri, &["limit", "email"])
            .and_then(|query| query.limit())
            .err()
            .map(|problem| problem.description.into_owned())
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
