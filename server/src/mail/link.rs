//! The link in a mail: a page of the application or a hosted page, with the code in the URL.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The characters that are percent-encoded: all except the unreserved ones (RFC 3986, section 2.3).
const PERCENT_ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Inserts the code and the email address into the link. The page behind the link must post the code: opening the link
/// alone changes nothing, because link scanners open links before the user does.
pub(super) fn fill_template(template: &str, code: &str, email: &str) -> String {
    let encoded = |text| utf8_percent_encode(text, PERCENT_ENCODED).to_string();
    // The encoded values contain no braces, so the order of the two replacements does not matter.
    template.replace("{code}", &encoded(code)).replace("{email}", &encoded(email))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(template: &str, code: &str, email: &str) -> String {
        fill_template(template, code, email)
    }

    #[test]
    fn unreserved_characters_stay_and_all_others_are_encoded() {
        assert_eq!(
            fill("https://shop.example.com/confirm?code={code}&mail={email}", "ABCDE-01XYZ", "a.b_c~d-e@example.com"),
            "https://shop.example.com/confirm?code=ABCDE-01XYZ&mail=a.b_c~d-e%40example.com"
        );
        assert_eq!(
            fill("https://shop.example.com/{code}#{email}", "ABCDE-01XYZ", "a+b&c=d/e?f#g%h'i{code}@example.com"),
            "https://shop.example.com/ABCDE-01XYZ#a%2Bb%26c%3Dd%2Fe%3Ff%23g%25h%27i%7Bcode%7D%40example.com"
        );
    }

    #[test]
    fn a_placeholder_can_occur_twice_or_not_at_all() {
        assert_eq!(
            fill("com.example.app:/c/{code}/{code}", "AAAAA-BBBBB", "x@y.z"),
            "com.example.app:/c/AAAAA-BBBBB/AAAAA-BBBBB"
        );
    }
}
