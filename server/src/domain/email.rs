//! Email addresses: one strict input format, and a canonical form for matching.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;

use super::user::UserId;

/// The longest email address, in bytes (RFC 5321, 4.5.3.1.3, without the brackets).
pub const MAX_ADDRESS_BYTES: usize = 254;
/// The longest local part, in bytes (RFC 5321, 4.5.3.1.1).
pub const MAX_LOCAL_PART_BYTES: usize = 64;

/// An email address as given, and its canonical form for matching (domain and local part in lower case).
#[derive(Clone, PartialEq, Eq)]
pub struct Email {
    given: Box<str>,
    canonical: Box<str>,
}

/// The input is not an email address. The format is: a dot-atom in ASCII, `@`, a host name of two labels or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not an email address")]
pub struct InvalidEmail;

/// The key of an account in rate limits and refusals: a hash of the appID and the email address, whether or not the
/// account exists. For an account without an email address, it is a hash of the appID and the user id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AccountKey(String);

// === impl Email ===

impl Email {
    pub fn parse(input: &str) -> Result<Self, InvalidEmail> {
        let (local, domain) = input.rsplit_once('@').ok_or(InvalidEmail)?;
        let well_formed = input.len() <= MAX_ADDRESS_BYTES
            && local.len() <= MAX_LOCAL_PART_BYTES
            && is_dot_atom(local)
            && is_host_name(domain);
        if !well_formed {
            return Err(InvalidEmail);
        }
        Ok(Self { given: input.into(), canonical: input.to_ascii_lowercase().into() })
    }

    /// Returns the email address as it was given. Mails are sent to this form.
    pub fn as_str(&self) -> &str {
        &self.given
    }

    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// Returns the part after the `@`, in lower case.
    pub fn domain(&self) -> &str {
        self.canonical.rsplit_once('@').map_or("", |(_, domain)| domain)
    }

    /// Returns the part before the `@`, as given.
    pub fn local_part(&self) -> &str {
        self.given.rsplit_once('@').map_or("", |(local, _)| local)
    }

    pub fn account_key(&self, app: &AppId) -> AccountKey {
        AccountKey::hash(&format!("{app}\n{}", self.canonical))
    }
}

impl fmt::Debug for Email {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Email(…)")
    }
}

impl AccountKey {
    /// Returns the key of an account without an email address.
    pub fn for_user(app: &AppId, user: UserId) -> Self {
        Self::hash(&format!("{app}\nuser {user}"))
    }

    fn hash(text: &str) -> Self {
        let hash = digest(&SHA256, text.as_bytes());
        Self(URL_SAFE_NO_PAD.encode(&hash.as_ref()[..18]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether the text is a dot-atom (RFC 5322, 3.2.3) without comments and white space.
fn is_dot_atom(text: &str) -> bool {
    let is_atom = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-/=?^_`{|}~".contains(&b))
    };
    text.split('.').all(is_atom)
}

/// Whether the text is a host name of two labels or more (RFC 1123, 2.1). The last label must not be a number, so no IP
/// address passes.
fn is_host_name(text: &str) -> bool {
    let is_label = |part: &str| {
        !part.is_empty()
            && part.len() <= 63
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    let is_numeric = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    text.len() <= 253
        && text.split('.').count() >= 2
        && text.split('.').all(is_label)
        && !text.rsplit('.').next().is_some_and(is_numeric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_addresses_are_accepted() {
        for good in ["ada@example.com", "a.b+c@sub.example.org", "O'Brien@example.ie", "x@xn--bcher-kva.example"] {
            assert!(Email::parse(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        for bad in [
            "",
            "@",
            "ada",
            "ada@",
            "@example.com",
            "ada@localhost",
            "ada@example.com ",
            " ada@example.com",
            "a..b@example.com",
            ".a@example.com",
            "a.@example.com",
            "\"a b\"@example.com",
            "a b@example.com",
            "a@b@example.com",
            "ada@[127.0.0.1]",
            "ada@127.0.0.1",
            "ada@-x.com",
            "ada@x-.com",
            "ada@exa_mple.com",
            "ada@bücher.example",
            "ädä@example.com",
            "ada@example.com\n",
            "ada@example..com",
            "Ada <ada@example.com>",
        ] {
            assert_eq!(Email::parse(bad), Err(InvalidEmail), "{bad}");
        }
    }

    #[test]
    fn length_limits_are_exact() {
        let parse_with_lengths = |local: usize, total: usize| {
            let mut domain = String::new();
            let mut remaining = total - local - 1;
            while remaining > 64 {
                domain.push_str(&"d".repeat(60));
                domain.push('.');
                remaining -= 61;
            }
            domain.push_str(&"e".repeat(remaining - 2));
            domain.push_str(".f");
            Email::parse(&format!("{}@{domain}", "l".repeat(local)))
        };
        assert!(parse_with_lengths(64, 254).is_ok());
        assert!(parse_with_lengths(65, 254).is_err());
        assert!(parse_with_lengths(64, 255).is_err());
    }

    #[test]
    fn matching_ignores_case_and_keeps_the_given_form() {
        let email = Email::parse("Ada@Example.COM").unwrap();
        assert_eq!(email.as_str(), "Ada@Example.COM");
        assert_eq!(email.canonical(), "ada@example.com");
        assert_eq!(email.domain(), "example.com");
    }
}
