//! Parameters of a query or a form (`application/x-www-form-urlencoded`, URL standard, 5.1), parsed strictly.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::error::Problem;

/// The decoded names and values, in the order in which they were sent.
#[derive(Debug, Default)]
pub struct Parameters<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

/// A parameter occurs more than once, which RFC 6749, 3.1 forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is given more than once")]
pub struct RepeatedParameter(pub &'static str);

// === impl Parameters ===

impl<'a> Parameters<'a> {
    /// Parses the parameters. Rejects text that is not UTF-8 after decoding, instead of replacing the invalid bytes.
    pub fn parse(text: &'a str) -> Result<Self, Problem> {
        let decode = |text: &'a str| {
            let spaced: Cow<'a, str> = if text.contains('+') { text.replace('+', " ").into() } else { text.into() };
            match spaced {
                Cow::Borrowed(text) => percent_decode(text.as_bytes()).decode_utf8(),
                Cow::Owned(text) => {
                    percent_decode(text.as_bytes()).decode_utf8().map(|text| Cow::Owned(text.into_owned()))
                }
            }
            .map_err(|_| Problem::invalid_request("a parameter is not UTF-8"))
        };
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(name)?, decode(value)?))
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }

    /// The names, in the order in which they were sent.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_ref())
    }

    /// The names and values, in the order in which they were sent.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value.as_ref()))
    }

    /// Whether a parameter with this name and value was sent.
    pub fn contains(&self, name: &str, value: &str) -> bool {
        self.0.iter().any(|(sent_name, sent_value)| sent_name == name && sent_value == value)
    }

    /// The value of a parameter that can occur at most once.
    pub fn get_once(&self, name: &'static str) -> Result<Option<&str>, RepeatedParameter> {
        let mut values = self.0.iter().filter(|(named, _)| named == name).map(|(_, value)| value.as_ref());
        match (values.next(), values.next()) {
            (value, None) => Ok(value),
            (_, Some(_)) => Err(RepeatedParameter(name)),
        }
    }
}

impl From<RepeatedParameter> for Problem {
    fn from(repeated: RepeatedParameter) -> Self {
        Self::invalid_request(repeated.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_decoded_once() {
        let parameters = Parameters::parse("a=b+c%2Bd%252B&&e&f==&%67=%C3%A9").unwrap();
        for (name, value) in [("a", "b c+d%2B"), ("e", ""), ("f", "="), ("g", "é")] {
            assert_eq!(parameters.get_once(name), Ok(Some(value)));
        }
        assert_eq!(parameters.get_once("h"), Ok(None));
        assert_eq!(Parameters::parse("").unwrap().get_once("a"), Ok(None));
    }

    #[test]
    fn a_repeated_parameter_is_detected_in_any_spelling() {
        let parameters = Parameters::parse("a=1&%61=1&b=2").unwrap();
        assert_eq!(parameters.get_once("a"), Err(RepeatedParameter("a")));
        assert_eq!(parameters.get_once("b"), Ok(Some("2")));
    }

    #[test]
    fn parameters_that_are_not_utf_8_are_rejected() {
        assert!(Parameters::parse("a=%FF").is_err());
        assert!(Parameters::parse("%C3=a").is_err());
        assert_eq!(Parameters::parse("a=%zz%").unwrap().get_once("a"), Ok(Some("%zz%")));
    }
}
