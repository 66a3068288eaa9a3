//! Converts the password hashes of other login services into the forms that the administration API accepts.
//!
//! The server decides whether a hash is too costly. A hash for which the server has no equivalent form is not imported.
//! Only the name of its kind is kept, for the report.

use std::fmt;

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    prelude::BASE64_STANDARD_NO_PAD,
};
use serde::Serialize;

/// A password hash in PHC or MCF form: text such as `$argon2id$…` or `$2a$…`. It can be serialized, but not printed.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct PasswordHash(String);

/// The kind of a hash that is not imported. Its name is from a fixed list, so that it never contains a part of the
/// hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnsupportedKind(pub &'static str);

pub(crate) type Converted = Result<PasswordHash, UnsupportedKind>;

/// What `ln` of `$scrypt$ln=…` means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScryptCost {
    /// The logarithm of N, as the PHC form defines it.
    Logarithm,
    /// N itself, as Kratos writes it.
    Value,
}

/// Converts the hashes of one import.
#[derive(Default)]
pub(crate) struct Converter {
    /// Signer key and salt separator of the first Firebase hash that has them. An App can have only one such pair, so
    /// hashes with another pair cannot be used.
    signer: Option<[Vec<u8>; 2]>,
}

const OTHER: UnsupportedKind = UnsupportedKind("other form");
/// The names of kinds of hashes. In a hash, the name follows the first `$`.
const KNOWN_KINDS: [&str; 28] = [
    "1",
    "2",
    "2a",
    "2b",
    "2x",
    "2y",
    "5",
    "6",
    "argon2",
    "argon2d",
    "argon2i",
    "argon2id",
    "bcrypt-sha256",
    "fbscrypt",
    "firebase-scrypt",
    "firescrypt",
    "hmac-md5",
    "hmac-sha1",
    "hmac-sha256",
    "hmac-sha512",
    "md5",
    "md5-crypt",
    "pbkdf2-sha1",
    "pbkdf2-sha256",
    "pbkdf2-sha512",
    "scrypt",
    "sha256-crypt",
    "sha512-crypt",
];
const OTHER_SIGNER: UnsupportedKind = UnsupportedKind("firebase-scrypt with a second signer key");

/// The kind of a hash in PHC or MCF form, for the report.
pub(crate) fn kind(hash: &str) -> &'static str {
    let name = hash.strip_prefix('$').and_then(|rest| rest.split('$').next()).unwrap_or_default();
    let known = KNOWN_KINDS.iter().find(|known| **known == name).copied();
    match known {
        Some("2" | "2a" | "2b" | "2x" | "2y") => "bcrypt",
        Some(known) => known,
        None => OTHER.0,
    }
}

/// The hash of a Keycloak credential: `secretData` has `value` and `salt`, `credentialData` has the parameters.
pub(crate) struct KeycloakHash<'a> {
    pub algorithm: &'a str,
    pub iterations: u32,
    pub value: &'a str,
    pub salt: &'a str,
    /// `additionalParameters` of Argon2.
    pub argon2: Argon2Parameters<'a>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Argon2Parameters<'a> {
    pub kind: Option<&'a str>,
    pub version: Option<&'a str>,
    pub memory: Option<&'a str>,
    pub parallelism: Option<&'a str>,
}

impl KeycloakHash<'_> {
    pub(crate) fn convert(&self) -> Converted {
        let (Some(value), Some(salt)) = (decode(self.value), decode(self.salt)) else { return Err(OTHER) };
        let (value_text, salt) = (encode(&value), encode(&salt));
        let digest = match self.algorithm {
            "pbkdf2" => "sha1",
            "pbkdf2-sha256" => "sha256",
            "pbkdf2-sha512" => "sha512",
            "argon2" => return self.argon2(&value_text, &salt),
            "bcrypt" => return Err(UnsupportedKind("bcrypt")),
            _ => return Err(OTHER),
        };
        let (iterations, length) = (self.iterations, value.len());
        Ok(PasswordHash(format!("$pbkdf2-{digest}$i={iterations},l={length}${salt}${value_text}")))
    }

    fn argon2(&self, value: &str, salt: &str) -> Converted {
        let version = match self.argon2.version {
            Some("1.3") => 19,
            Some("1.0") => 16,
            _ => return Err(UnsupportedKind("argon2")),
        };
        let kind = self.argon2.kind.filter(|kind| matches!(*kind, "id" | "i" | "d"));
        let numbers = [self.argon2.memory, self.argon2.parallelism].map(|text| text?.parse::<u32>().ok());
        let (Some(kind), [Some(memory), Some(parallelism)]) = (kind, numbers) else {
            return Err(UnsupportedKind("argon2"));
        };
        let iterations = self.iterations;
        Ok(PasswordHash(format!("$argon2{kind}$v={version}$m={memory},t={iterations},p={parallelism}${salt}${value}")))
    }
}

/// Converts the hash of a Firebase account. The result contains no signer key and no salt separator: these are in a
/// Secret of the App.
pub(crate) fn firebase(hash: &str, salt: &str, rounds: u32, memory_cost: u32) -> Converted {
    let (Some(hash), Some(salt)) = (decode(hash), decode(salt)) else { return Err(UnsupportedKind("firebase-scrypt")) };
    Ok(PasswordHash(format!("$firebase-scrypt$ln={memory_cost},r={rounds}${}${}", encode(&salt), encode(&hash))))
}

// === impl PasswordHash ===

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordHash(…)")
    }
}

// === impl Converter ===

impl Converter {
    /// Converts a hash in a text form such as `$2a$10$…`.
    pub(crate) fn convert(&mut self, hash: &str, cost: ScryptCost) -> Converted {
        let unsupported = UnsupportedKind(kind(hash));
        let fields: Vec<_> = hash.split('$').collect();
        match fields.as_slice() {
            ["", "2a" | "2b" | "2y", rounds, rest] if rounds.len() == 2 && rest.len() == 53 => {
                Ok(PasswordHash(hash.to_owned()))
            }
            ["", "argon2id" | "argon2i" | "argon2d", .., parameters, salt, value]
                if matches!(fields.len(), 5 | 6)
                    && parse_numbers(parameters, ["m", "t", "p"]).is_some()
                    && (fields.len() == 5 || matches!(fields[2], "v=16" | "v=19"))
                    && is_base64([salt, value]) =>
            {
                Ok(PasswordHash(hash.to_owned()))
            }
            ["", "pbkdf2-sha1" | "pbkdf2-sha256" | "pbkdf2-sha512", parameters, salt, value] => {
                let [iterations, length] = parse_numbers(parameters, ["i", "l"]).ok_or(unsupported)?;
                let (salt, value) = decode(salt).zip(decode(value)).ok_or(unsupported)?;
                // Kratos ignores the parameter `l` and uses the length of the value.
                let length = if cost == ScryptCost::Value { value.len() as u64 } else { length };
                let (name, salt, value) = (fields[1], encode(&salt), encode(&value));
                Ok(PasswordHash(format!("${name}$i={iterations},l={length}${salt}${value}")))
            }
            ["", "scrypt", parameters, salt, value] => {
                let [ln, r, p] = parse_numbers(parameters, ["ln", "r", "p"]).ok_or(unsupported)?;
                let ln = match cost {
                    ScryptCost::Logarithm => ln,
                    ScryptCost::Value if ln.is_power_of_two() => ln.ilog2().into(),
                    ScryptCost::Value => return Err(unsupported),
                };
                let (salt, value) = decode(salt).zip(decode(value)).ok_or(unsupported)?;
                Ok(PasswordHash(format!("$scrypt$ln={ln},r={r},p={p}${}${}", encode(&salt), encode(&value))))
            }
            ["", "fbscrypt", parameters, salt, value] => {
                let (parameters, signer) = split_signer(parameters);
                let [version, ln, r, p] = parse_numbers(parameters, ["v", "n", "r", "p"]).ok_or(unsupported)?;
                if version != 1 || p != 1 {
                    return Err(unsupported);
                }
                self.check_signer(signer)?;
                firebase_form(salt, value, ln, r).ok_or(unsupported)
            }
            ["", "firescrypt", parameters, salt, value, separator, key] => {
                let [ln, r, p] = parse_numbers(parameters, ["ln", "r", "p"]).ok_or(unsupported)?;
                if p != 1 {
                    return Err(unsupported);
                }
                self.check_signer([separator, key])?;
                firebase_form(salt, value, ln, r).ok_or(unsupported)
            }
            _ => Err(unsupported),
        }
    }

    fn check_signer(&mut self, signer: [&str; 2]) -> Result<(), UnsupportedKind> {
        let [Some(separator), Some(key)] = signer.map(decode) else { return Err(OTHER_SIGNER) };
        let signer = [separator, key];
        if *self.signer.get_or_insert_with(|| signer.clone()) == signer { Ok(()) } else { Err(OTHER_SIGNER) }
    }
}

fn firebase_form(salt: &str, value: &str, ln: u64, r: u64) -> Option<PasswordHash> {
    firebase(value, salt, r.try_into().ok()?, ln.try_into().ok()?).ok()
}

/// Splits `v=1,n=14,r=8,p=1,ss=…,sk=…` into the numbers, the salt separator and the signer key.
fn split_signer(parameters: &str) -> (&str, [&str; 2]) {
    let (numbers, signer) = match parameters.find(",ss=").or_else(|| parameters.find(",sk=")) {
        Some(at) => parameters.split_at(at),
        None => (parameters, ""),
    };
    let member = |name: &str| signer.split(',').find_map(|member| member.strip_prefix(name)).unwrap_or_default();
    (numbers, [member("ss="), member("sk=")])
}

/// Returns the numbers in parameters such as `m=1,t=2`, if the parameters have exactly these names in this order.
fn parse_numbers<const N: usize>(parameters: &str, names: [&str; N]) -> Option<[u64; N]> {
    let mut members = parameters.split(',');
    let mut numbers = [0; N];
    for (number, name) in numbers.iter_mut().zip(names) {
        let digits = members.next()?.strip_prefix(name)?.strip_prefix('=')?;
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        *number = digits.parse().ok().filter(|_| is_number)?;
    }
    members.next().is_none().then_some(numbers)
}

fn is_base64(parts: [&str; 2]) -> bool {
    parts.iter().all(|part| BASE64_STANDARD_NO_PAD.decode(part).is_ok())
}

/// Decodes base64 with or without padding, in the standard or in the URL-safe alphabet.
fn decode(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    LENIENT.decode(text.replace('-', "+").replace('_', "/")).ok()
}

fn encode(bytes: &[u8]) -> String {
    BASE64_STANDARD_NO_PAD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(hash: &str, cost: ScryptCost) -> Result<String, &'static str> {
        Converter::default().convert(hash, cost).map(|hash| hash.0).map_err(|kind| kind.0)
    }

    fn keycloak(algorithm: &str) -> KeycloakHash<'_> {
        KeycloakHash {
            algorithm,
            iterations: 5,
            value: "//8AAAAAAAAAAAAAAAAAAA==",
            salt: "MDEyMzQ1Njc=",
            argon2: Argon2Parameters {
                kind: Some("id"),
                version: Some("1.3"),
                memory: Some("7168"),
                parallelism: Some("1"),
            },
        }
    }

    #[test]
    fn the_length_in_a_converted_keycloak_hash_is_the_length_of_its_value() {
        let hash = keycloak("pbkdf2-sha512").convert().unwrap().0;
        assert_eq!(hash, "$pbkdf2-sha512$i=5,l=16$MDEyMzQ1Njc$//8AAAAAAAAAAAAAAAAAAA");
        assert!(keycloak("pbkdf2").convert().unwrap().0.starts_with("$pbkdf2-sha1$i=5,"));
        let hash = keycloak("argon2").convert().unwrap().0;
        assert_eq!(hash, "$argon2id$v=19$m=7168,t=5,p=1$MDEyMzQ1Njc$//8AAAAAAAAAAAAAAAAAAA");
        let old = Argon2Parameters { kind: Some("i"), version: Some("1.0"), ..keycloak("").argon2 };
        let hash = KeycloakHash { argon2: old, ..keycloak("argon2") }.convert().unwrap().0;
        assert!(hash.starts_with("$argon2i$v=16$m=7168,t=5,p=1$"));
    }

    #[test]
    fn keycloak_hashes_without_an_equivalent_are_not_converted() {
        assert_eq!(keycloak("bcrypt").convert(), Err(UnsupportedKind("bcrypt")));
        assert_eq!(keycloak("a secret").convert(), Err(OTHER));
        let unknown = Argon2Parameters { version: Some("2"), ..keycloak("").argon2 };
        assert_eq!(KeycloakHash { argon2: unknown, ..keycloak("argon2") }.convert(), Err(UnsupportedKind("argon2")));
        assert_eq!(KeycloakHash { value: "?", ..keycloak("pbkdf2") }.convert(), Err(OTHER));
    }

    #[test]
    fn hashes_in_supported_text_forms_do_not_change() {
        let bcrypt = format!("$2b$10${}", "a".repeat(53));
        for hash in [
            bcrypt.as_str(),
            "$argon2id$v=19$m=64,t=1,p=1$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA",
            "$argon2d$m=64,t=1,p=1$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA",
            "$pbkdf2-sha256$i=1000,l=16$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA",
            "$scrypt$ln=14,r=8,p=1$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA",
        ] {
            assert_eq!(convert(hash, ScryptCost::Logarithm).as_deref(), Ok(hash));
        }
    }

    #[test]
    fn ln_in_a_kratos_scrypt_hash_is_n_itself() {
        let hash = "$scrypt$ln=16384,r=8,p=1$MDEyMzQ1Njc=$AAAAAAAAAAAAAAAAAAAAAA==";
        let expected = "$scrypt$ln=14,r=8,p=1$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA";
        assert_eq!(convert(hash, ScryptCost::Value).as_deref(), Ok(expected));
        assert_eq!(convert(&hash.replace("16384", "16383"), ScryptCost::Value), Err("scrypt"));
        assert_eq!(convert(&hash.replace("16384", "0"), ScryptCost::Value), Err("scrypt"));
        let pbkdf2 = "$pbkdf2-sha256$i=1000,l=128$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA";
        assert_eq!(convert(pbkdf2, ScryptCost::Value).unwrap(), pbkdf2.replace("128", "16"));
    }

    #[test]
    fn firebase_hashes_with_a_second_signer_key_are_not_converted() {
        let expected = "$firebase-scrypt$ln=14,r=8$MDEyMzQ1Njc$AAAAAAAAAAAAAAAAAAAAAA";
        assert_eq!(firebase("AAAAAAAAAAAAAAAAAAAAAA==", "MDEyMzQ1Njc=", 8, 14).unwrap().0, expected);
        let mut converter = Converter::default();
        let mut convert = |hash: &str| converter.convert(hash, ScryptCost::Value).map(|hash| hash.0);
        let fbscrypt = "$fbscrypt$v=1,n=14,r=8,p=1,ss=Bw==,sk=AAECAw==$MDEyMzQ1Njc=$AAAAAAAAAAAAAAAAAAAAAA==";
        assert_eq!(convert(fbscrypt).as_deref(), Ok(expected));
        let firescrypt = "$firescrypt$ln=14,r=8,p=1$MDEyMzQ1Njc=$AAAAAAAAAAAAAAAAAAAAAA==$Bw==$AAECAw==";
        assert_eq!(convert(firescrypt).as_deref(), Ok(expected));
        assert_eq!(convert(&firescrypt.replace("AAECAw", "AAECBA")), Err(OTHER_SIGNER));
        assert_eq!(convert(&fbscrypt.replace("ss=Bw==", "ss=CA==")), Err(OTHER_SIGNER));
        assert_eq!(convert(&fbscrypt.replace("v=1", "v=2")), Err(UnsupportedKind("fbscrypt")));
        assert_eq!(convert(&firescrypt.replace("p=1", "p=2")), Err(UnsupportedKind("firescrypt")));
    }

    #[test]
    fn the_kind_of_a_hash_never_contains_a_part_of_it() {
        for (hash, kind) in [
            ("$md5$c2VjcmV0", "md5"),
            ("$2a$10$short", "bcrypt"),
            ("$argon2id$v=19$m=1,t=1,p=1,keyid=c2VjcmV0$MDEy$AAAA", "argon2id"),
            ("$argon2id$v=18$m=1,t=1,p=1$MDEy$AAAA", "argon2id"),
            ("$pbkdf2-sha256$i=+1,l=1$MDEy$AAAA", "pbkdf2-sha256"),
            ("$secret$secret", "other form"),
            ("{SSHA}c2VjcmV0", "other form"),
            ("plain secret", "other form"),
            ("", "other form"),
        ] {
            assert_eq!(convert(hash, ScryptCost::Logarithm), Err(kind), "{hash}");
        }
        assert_eq!(format!("{:?}", keycloak("argon2").convert()), "Ok(PasswordHash(…))");
    }
}
