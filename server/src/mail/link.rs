//! The link in a mail: the App's own page, with the code filled in.

use latchkey_crds::types::LinkTemplate;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// All but the unreserved characters (RFC 3986, 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Opening it changes nothing: the page posts the code. Scanners open links before people do.
pub(super) fn fill(template: &LinkTemplate, code: &str, email: &str) -> String {
    let encoded = |text| utf8_percent_encode(text, RESERVED).to_string();
    // What is filled in has no brace left, so the order does not matter.
    template.as_str().replace("{code}", &encoded(code)).replace("{email}", &encoded(email))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(template: &str, code: &str, email: &str) -> String {
        fill(&template.parse().unwrap(), code, email)
    }

    #[test]
    fn unreserved_characters_stay_and_all_others_are_encoded() {
        assert_eq!(
            filled("https://shop.example.com/confirm?code={code}&mail={email}", "ABCDE-01XYZ", "a.b_c~d-e@example.com"),
            "https://shop.example.com/confirm?code=ABCDE-01XYZ&mail=a.b_c~d-e%40example.com"
        );
        assert_eq!(
            filled("https://shop.example.com/{code}#{email}", "ABCDE-01XYZ", "a+b&c=d/e?f#g%h'i{code}@example.com"),
            "https://shop.example.com/ABCDE-01XYZ#a%2Bb%26c%3Dd%2Fe%3Ff%23g%25h%27i%7Bcode%7D%40example.com"
        );
    }

    #[test]
    fn a_placeholder_may_come_twice_or_not_at_all() {
        assert_eq!(
            filled("com.example.app:/c/{code}/{code}", "AAAAA-BBBBB", "x@y.z"),
            "com.example.app:/c/AAAAA-BBBBB/AAAAA-BBBBB"
        );
    }
}
