//! Password hashes from other services: their text form, their limits, and the cost of checking them (specification:
//! Accounts, Foreign hashes).

use std::{fmt, str::FromStr};

use zeroize::Zeroizing;

pub use self::{
    argon2::{Argon2Class, Argon2Variant, Argon2Version},
    bcrypt::BcryptClass,
    firebase::{FirebaseScrypt, InvalidFirebaseKey},
    pbkdf2::{Pbkdf2Class, Pbkdf2Digest},
    scrypt::ScryptClass,
};

mod argon2;
mod bcrypt;
mod firebase;
mod pbkdf2;
mod scrypt;
mod text;

/// The maximum weight (see [`HashClass::weight`]) of one foreign hash, and the maximum sum of the weights of all
/// foreign classes of an App.
pub const MAX_WEIGHT: f64 = 32.0;
/// The maximum number of foreign classes (see [`HashClass`]) of an App.
pub const MAX_CLASSES: usize = 4;
/// The longest text of a hash that is parsed, in bytes. The database column of the hash has the same limit.
const MAX_TEXT_BYTES: usize = 1024;

/// The cost of checking a password: the function and its cost parameters. All hashes of one class cost the same.
///
/// The text form of a class is canonical and has no salt and no hash, for example `bcrypt$10` or
/// `argon2id$v=19$m=65536,t=3,p=4`. The cost parameters of a class never exceed the ceilings (maximum values) of its
/// function, and its weight is at most [`MAX_WEIGHT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HashClass {
    Argon2(Argon2Class),
    Bcrypt(BcryptClass),
    FirebaseScrypt(ScryptClass),
    Pbkdf2(Pbkdf2Class),
    Scrypt(ScryptClass),
}

/// A parsed hash of a password, made by the servers or imported from another service. `Debug` shows only the class.
/// Salt and output are erased when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct ParsedHash {
    class: HashClass,
    salt: Zeroizing<Vec<u8>>,
    output: Zeroizing<Vec<u8>>,
}

/// Why a hash cannot be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    /// An import reports this error as the field code `hash_not_supported`.
    #[error("is not a hash of a supported form")]
    NotSupported,
    /// An import reports this error as the field code `hash_too_costly`.
    #[error("costs more than the maximum")]
    TooCostly,
}

// === impl HashClass ===

impl HashClass {
    /// The class of the hashes that servers make with the default parameters.
    pub const DEFAULT_NATIVE: Self = Self::Argon2(Argon2Class::DEFAULT_NATIVE);

    /// Returns the name of the function as it appears in the text of a hash: `argon2id`, `pbkdf2-sha1`, …. For `$2…`,
    /// returns `bcrypt`.
    pub const fn algorithm(self) -> &'static str {
        match self {
            Self::Argon2(class) => class.variant.name(),
            Self::Bcrypt(_) => "bcrypt",
            Self::FirebaseScrypt(_) => "firebase-scrypt",
            Self::Pbkdf2(class) => class.digest.algorithm(),
            Self::Scrypt(_) => "scrypt",
        }
    }

    /// Returns the CPU time of a check, divided by that of a hash with the default parameters: greater than 0, at most
    /// [`MAX_WEIGHT`]. The numbers are from the table in the specification. The parameters that the installation has
    /// chosen do not change them, and therefore do not change which hashes can be imported.
    pub fn weight(self) -> f64 {
        match self {
            Self::Argon2(class) => class.weight(),
            Self::Bcrypt(class) => class.weight(),
            Self::FirebaseScrypt(class) | Self::Scrypt(class) => class.weight(),
            Self::Pbkdf2(class) => class.weight(),
        }
    }

    /// Returns the memory in bytes that the hash function needs for its blocks during a check.
    pub const fn memory_bytes(self) -> u64 {
        match self {
            Self::Argon2(class) => class.memory_bytes(),
            Self::Bcrypt(_) => bcrypt::MEMORY_BYTES,
            Self::FirebaseScrypt(class) | Self::Scrypt(class) => class.memory_bytes(),
            Self::Pbkdf2(_) => 0,
        }
    }

    /// Builds a hash of this class from a salt and an output.
    pub fn hash(self, salt: &[u8; 16], output: &[u8; 32]) -> ParsedHash {
        let length = match self {
            Self::Argon2(_) | Self::FirebaseScrypt(_) | Self::Scrypt(_) => output.len(),
            Self::Bcrypt(_) => bcrypt::OUTPUT_BYTES,
            // The longest output that the class can have. If `output` is shorter, it is repeated.
            Self::Pbkdf2(class) => class.max_output_bytes(),
        };
        let output = output.iter().copied().cycle().take(length).collect();
        ParsedHash { class: self, salt: Zeroizing::new(salt.to_vec()), output: Zeroizing::new(output) }
    }

    fn check_weight(self) -> Result<Self, HashError> {
        if self.weight() > MAX_WEIGHT { Err(HashError::TooCostly) } else { Ok(self) }
    }
}

impl fmt::Display for HashClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.algorithm();
        match self {
            Self::Argon2(class) => write!(f, "{name}$v={}${}", class.version.number(), class.params()),
            Self::Bcrypt(class) => write!(f, "{name}${}", class.cost()),
            Self::FirebaseScrypt(class) => write!(f, "{name}${}", class.firebase_params()),
            Self::Pbkdf2(class) => write!(f, "{name}${}", class.params()),
            Self::Scrypt(class) => write!(f, "{name}${}", class.params()),
        }
    }
}

impl FromStr for HashClass {
    type Err = HashError;

    fn from_str(text: &str) -> Result<Self, HashError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(HashError::NotSupported);
        }
        let fields: Vec<&str> = text.split('$').collect();
        let class = match fields[..] {
            ["bcrypt", cost] => Self::Bcrypt(BcryptClass::from_cost(cost)?),
            ["scrypt", params] => Self::Scrypt(ScryptClass::from_params(params)?),
            ["firebase-scrypt", params] => Self::FirebaseScrypt(ScryptClass::from_firebase_params(params)?),
            [name, params] => {
                let digest = Pbkdf2Digest::from_algorithm(name).ok_or(HashError::NotSupported)?;
                Self::Pbkdf2(Pbkdf2Class::from_class_params(digest, params)?)
            }
            [name, version, params] => {
                let variant = Argon2Variant::from_name(name).ok_or(HashError::NotSupported)?;
                Self::Argon2(Argon2Class::from_params(variant, Argon2Version::parse(version)?, params)?)
            }
            _ => return Err(HashError::NotSupported),
        };
        class.check_weight()
    }
}

// === impl ParsedHash ===

impl ParsedHash {
    /// Parses a hash in PHC or MCF form.
    ///
    /// # Errors
    ///
    /// The text has none of the forms that the specification lists, or the hash costs more than the ceilings allow.
    pub fn parse(text: &str) -> Result<Self, HashError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(HashError::NotSupported);
        }
        let fields: Vec<&str> = text.strip_prefix('$').ok_or(HashError::NotSupported)?.split('$').collect();
        let (class, salt, output) = match fields[..] {
            ["2a" | "2b" | "2y", cost, tail] => {
                let (salt, output) = bcrypt::parse_tail(tail)?;
                (HashClass::Bcrypt(BcryptClass::from_two_digits(cost)?), salt, output)
            }
            ["scrypt", params, salt, output] => {
                let (salt, output) = text::salt_and_output(salt, output)?;
                (HashClass::Scrypt(ScryptClass::from_params(params)?), salt, output)
            }
            ["firebase-scrypt", params, salt, output] => {
                let (salt, output) = text::salt_and_output(salt, output)?;
                (HashClass::FirebaseScrypt(ScryptClass::from_firebase_params(params)?), salt, output)
            }
            [name, version, params, salt, output] => {
                let variant = Argon2Variant::from_name(name).ok_or(HashError::NotSupported)?;
                let version = Argon2Version::parse(version)?;
                let (salt, output) = argon2::salt_and_output(salt, output)?;
                (HashClass::Argon2(Argon2Class::from_params(variant, version, params)?), salt, output)
            }
            [name, params, salt, output] => {
                match (Argon2Variant::from_name(name), Pbkdf2Digest::from_algorithm(name)) {
                    // The first release of Argon2 (version 1.0) wrote no version into the hash.
                    (Some(variant), _) => {
                        let (salt, output) = argon2::salt_and_output(salt, output)?;
                        (
                            HashClass::Argon2(Argon2Class::from_params(variant, Argon2Version::V16, params)?),
                            salt,
                            output,
                        )
                    }
                    (None, Some(digest)) => {
                        let (salt, output) = text::salt_and_output(salt, output)?;
                        let class = Pbkdf2Class::from_hash_params(digest, params, output.len())?;
                        (HashClass::Pbkdf2(class), salt, output)
                    }
                    (None, None) => return Err(HashError::NotSupported),
                }
            }
            _ => return Err(HashError::NotSupported),
        };
        Ok(Self { class: class.check_weight()?, salt, output })
    }

    pub const fn class(&self) -> HashClass {
        self.class
    }

    /// Returns the class of the hash, or `None` if it is `native`, the class of the hashes that the servers make now.
    pub fn foreign_class(&self, native: HashClass) -> Option<HashClass> {
        (self.class != native).then_some(self.class)
    }

    pub fn salt(&self) -> &[u8] {
        &self.salt
    }

    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Returns the canonical text of the hash. Parsing the text returns an equal value. `$2a$` and `$2y$` become
    /// `$2b$`, which is the same function.
    pub fn to_text(&self) -> Zeroizing<String> {
        let name = self.class.algorithm();
        let tail = || Zeroizing::new(format!("{}${}", text::encode(&self.salt), text::encode(&self.output)));
        Zeroizing::new(match self.class {
            HashClass::Argon2(class) => {
                format!("${name}$v={}${}${}", class.version.number(), class.params(), *tail())
            }
            HashClass::Bcrypt(class) => {
                format!("$2b${:02}${}", class.cost(), *bcrypt::print_tail(&self.salt, &self.output))
            }
            HashClass::FirebaseScrypt(class) => format!("${name}${}${}", class.firebase_params(), *tail()),
            HashClass::Pbkdf2(class) => {
                format!("${name}$i={},l={}${}", class.iterations(), self.output.len(), *tail())
            }
            HashClass::Scrypt(class) => format!("${name}${}${}", class.params(), *tail()),
        })
    }
}

impl fmt::Debug for ParsedHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParsedHash").field("class", &self.class).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The salt and the output of the hashes in these tests: 16 bytes in base64.
    const BYTES: &str = "AAECAwQFBgcICQoLDA0ODw";
    const BCRYPT_TAIL: &str = "......................AesgC8c2NCv6R248WVftVw.gqvWdlCq";

    fn parse(text: &str) -> Result<ParsedHash, HashError> {
        let bytes = format!("${BYTES}");
        ParsedHash::parse(&text.replace("$S", &bytes).replace("$H", &bytes))
    }

    fn class(text: &str) -> HashClass {
        text.parse().unwrap()
    }

    #[test]
    fn a_parsed_hash_has_the_expected_class_and_weight() {
        for (text, class, algorithm, weight) in [
            ("$argon2id$v=19$m=65536,t=3,p=4$S$H", "argon2id$v=19$m=65536,t=3,p=4", "argon2id", 196_608.0 / 38_912.0),
            ("$argon2i$m=4096,t=3,p=1$S$H", "argon2i$v=16$m=4096,t=3,p=1", "argon2i", 12_288.0 / 38_912.0),
            ("$argon2d$v=16$m=8,t=1,p=1$S$H", "argon2d$v=16$m=8,t=1,p=1", "argon2d", 8.0 / 38_912.0),
            ("$pbkdf2-sha1$i=30000,l=16$S$H", "pbkdf2-sha1$i=30000,b=1", "pbkdf2-sha1", 1.0),
            ("$pbkdf2-sha256$i=90000,l=16$S$H", "pbkdf2-sha256$i=90000,b=1", "pbkdf2-sha256", 2.0),
            ("$pbkdf2-sha512$i=8500,l=16$S$H", "pbkdf2-sha512$i=8500,b=1", "pbkdf2-sha512", 0.5),
            ("$scrypt$ln=14,r=8,p=1$S$H", "scrypt$ln=14,r=8,p=1", "scrypt", 4.0),
            ("$firebase-scrypt$ln=14,r=8$S$H", "firebase-scrypt$ln=14,r=8", "firebase-scrypt", 4.0),
        ] {
            let hash = parse(text).unwrap();
            assert_eq!(hash.foreign_class(HashClass::DEFAULT_NATIVE).unwrap().to_string(), class);
            assert_eq!(hash.class(), class.parse().unwrap());
            assert_eq!(hash.class().algorithm(), algorithm);
            assert!((hash.class().weight() - weight).abs() < 1e-9, "{text}: {}", hash.class().weight());
            assert_eq!(ParsedHash::parse(&hash.to_text()), Ok(hash), "{text}");
        }
        for prefix in ["2a", "2b", "2y"] {
            let hash = parse(&format!("${prefix}$10${BCRYPT_TAIL}")).unwrap();
            assert_eq!((hash.class(), hash.class().weight()), (class("bcrypt$10"), 4.0), "the same class");
            assert_eq!(hash.class().algorithm(), "bcrypt");
            assert_eq!(ParsedHash::parse(&hash.to_text()), Ok(hash));
        }
    }

    #[test]
    fn a_hash_with_the_parameters_of_new_hashes_is_native() {
        let foreign_class = |text, native| parse(text).unwrap().foreign_class(native);
        let (default, stronger) = (HashClass::DEFAULT_NATIVE, class("argon2id$v=19$m=20480,t=3,p=1"));
        assert_eq!(foreign_class("$argon2id$v=19$m=19456,t=2,p=1$S$H", default), None);
        assert_eq!(foreign_class("$argon2id$v=19$m=20480,t=3,p=1$S$H", stronger), None);
        assert_eq!(foreign_class("$argon2id$v=19$m=19456,t=2,p=1$S$H", stronger), Some(default));
        for foreign in [
            "$argon2id$v=16$m=19456,t=2,p=1$S$H",
            "$argon2id$m=19456,t=2,p=1$S$H",
            "$argon2i$v=19$m=19456,t=2,p=1$S$H",
            "$argon2id$v=19$m=19456,t=2,p=2$S$H",
            "$argon2id$v=19$m=19457,t=2,p=1$S$H",
        ] {
            assert!(foreign_class(foreign, default).is_some(), "{foreign}");
        }
        assert!((HashClass::DEFAULT_NATIVE.weight() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_hash_above_a_ceiling_or_the_maximum_weight_is_too_costly() {
        for (text, too_costly) in [
            ("$argon2id$v=19$m=131072,t=9,p=16$S$H", "$argon2id$v=19$m=131072,t=10,p=16$S$H"),
            ("$argon2id$v=19$m=131072,t=1,p=1$S$H", "$argon2id$v=19$m=131073,t=1,p=1$S$H"),
            ("$argon2id$v=19$m=1024,t=16,p=1$S$H", "$argon2id$v=19$m=1024,t=17,p=1$S$H"),
            ("$argon2id$v=19$m=1024,t=1,p=16$S$H", "$argon2id$v=19$m=1024,t=1,p=17$S$H"),
            ("$pbkdf2-sha1$i=960000,l=16$S$H", "$pbkdf2-sha1$i=960001,l=16$S$H"),
            ("$pbkdf2-sha256$i=1440000,l=16$S$H", "$pbkdf2-sha256$i=1440001,l=16$S$H"),
            ("$pbkdf2-sha512$i=544000,l=16$S$H", "$pbkdf2-sha512$i=544001,l=16$S$H"),
            ("$pbkdf2-sha512$i=544000,l=16$S$H", "$pbkdf2-sha512$i=99999999999999999999,l=16$S$H"),
            ("$scrypt$ln=17,r=8,p=1$S$H", "$scrypt$ln=18,r=8,p=1$S$H"),
            ("$scrypt$ln=17,r=8,p=1$S$H", "$scrypt$ln=17,r=8,p=2$S$H"),
            ("$scrypt$ln=17,r=8,p=1$S$H", "$scrypt$ln=64,r=1,p=1$S$H"),
            ("$scrypt$ln=1,r=8,p=65536$S$H", "$scrypt$ln=1,r=8,p=4294967295$S$H"),
            ("$firebase-scrypt$ln=17,r=8$S$H", "$firebase-scrypt$ln=17,r=9$S$H"),
        ] {
            assert!(parse(text).is_ok(), "{text}");
            assert_eq!(parse(too_costly), Err(HashError::TooCostly), "{too_costly}");
        }
        // PBKDF2 runs the iterations once per block of output; the ceiling applies to the total.
        let four_blocks = |iterations: u32| {
            let output = "A".repeat(86);
            ParsedHash::parse(&format!("$pbkdf2-sha1$i={iterations},l=64${BYTES}${output}"))
        };
        assert!(four_blocks(240_000).is_ok());
        assert_eq!(four_blocks(240_001), Err(HashError::TooCostly));
        for (cost, expected) in [
            ("03", Err(HashError::NotSupported)),
            ("04", Ok(0.0625)),
            ("13", Ok(32.0)),
            ("14", Err(HashError::TooCostly)),
            ("31", Err(HashError::TooCostly)),
            ("32", Err(HashError::NotSupported)),
        ] {
            let hash = ParsedHash::parse(&format!("$2b${cost}${BCRYPT_TAIL}"));
            assert_eq!(hash.map(|hash| hash.class().weight()), expected, "{cost}");
        }
    }

    #[test]
    fn text_in_an_unsupported_form_is_rejected() {
        let long_salt = "A".repeat(87);
        for text in [
            "",
            "$",
            "x",
            "argon2id$v=19$m=1024,t=1,p=1$S$H",
            "$argon2id$v=19$m=1024,t=1,p=1$S",
            "$argon2id$v=19$m=1024,t=1,p=1$S$H$",
            "$argon2id$v=18$m=1024,t=1,p=1$S$H",
            "$argon2id$v=19$t=1,m=1024,p=1$S$H",
            "$argon2id$v=19$m=1024,t=1,p=1,keyid=AA$S$H",
            "$argon2id$v=19$m=1024,t=1$S$H",
            "$argon2id$v=19$m=+1024,t=1,p=1$S$H",
            "$argon2id$v=19$m=01024,t=1,p=1$S$H",
            "$argon2id$v=19$m=,t=1,p=1$S$H",
            "$argon2id$v=19$m=1024,t=0,p=1$S$H",
            "$argon2id$v=19$m=1024,t=1,p=0$S$H",
            "$argon2id$v=19$m=15,t=1,p=2$S$H",
            "$argon2id$v=19$m=1024,t=1,p=1$c2FsdA$H",
            "$argon2id$v=19$m=1024,t=1,p=1$S==$H",
            "$argon2id$v=19$m=1024,t=1,p=1$S$AAECAwQFBgcICQoLDA0ODx",
            "$argon2id$v=19$m=1024,t=1,p=1$S$AAECAwQFBgcICQoLDA0O",
            "$argon2ID$v=19$m=1024,t=1,p=1$S$H",
            "$pbkdf2-sha256$i=1000,l=32$S$H",
            "$pbkdf2-sha256$i=0,l=16$S$H",
            "$pbkdf2-sha256$1000$S$H",
            "$pbkdf2-sha384$i=1000,l=16$S$H",
            "$pbkdf2$i=1000,l=16$S$H",
            "$scrypt$ln=0,r=8,p=1$S$H",
            "$scrypt$ln=16,r=1,p=1$S$H",
            "$scrypt$ln=14,r=8$S$H",
            "$firebase-scrypt$ln=14,r=8,p=1$S$H",
            "$5$rounds=5000$S$H",
            "$6$S$H",
            "$1$S$H",
            "$2x$10$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2$10$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2b$+9$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2b$4$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2b$010$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2b$10$......................AesgC8c2NCv6R248WVftVw.gqvWdlC",
            "$2b$10$......................AesgC8c2NCv6R248WVftVw.gqvWdlCr",
            "$2b$10$.....................+AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "$2b$10$é.....................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
            "{SSHA}S",
        ] {
            assert_eq!(parse(text), Err(HashError::NotSupported), "{text}");
        }
        let text = format!("$scrypt$ln=14,r=8,p=1${long_salt}${BYTES}");
        assert_eq!(ParsedHash::parse(&text), Err(HashError::NotSupported));
        let text = format!("$scrypt$ln=14,r=8,p=1${BYTES}${}", "A".repeat(2000));
        assert_eq!(ParsedHash::parse(&text), Err(HashError::NotSupported));
    }

    #[test]
    fn unused_bits_of_a_bcrypt_salt_are_ignored() {
        let parse = |last: char| ParsedHash::parse(&format!("$2b$10${}{last}{}", ".".repeat(21), &BCRYPT_TAIL[22..]));
        assert_eq!(parse('.'), parse('/'));
        assert!(parse('/').is_ok());
    }

    #[test]
    fn a_class_has_exactly_one_text_form() {
        for text in ["bcrypt$10", "scrypt$ln=14,r=8,p=1", "argon2i$v=16$m=4096,t=3,p=1", "pbkdf2-sha1$i=1,b=4"] {
            assert_eq!(class(text).to_string(), text);
        }
        for text in [
            "",
            "bcrypt",
            "bcrypt$",
            "bcrypt$3",
            "bcrypt$04",
            "$bcrypt$10",
            "2b$10",
            "scrypt$ln=14,r=8",
            "pbkdf2-sha1$i=1,b=0",
            "pbkdf2-sha1$i=1,b=5",
            "pbkdf2-sha1$i=1,l=20",
            "argon2id$m=4096,t=3,p=1",
        ] {
            assert_eq!(text.parse::<HashClass>(), Err(HashError::NotSupported), "{text}");
        }
        assert_eq!("bcrypt$14".parse::<HashClass>(), Err(HashError::TooCostly));
    }

    #[test]
    fn the_memory_of_a_class_follows_from_its_function_and_parameters() {
        assert_eq!(HashClass::DEFAULT_NATIVE.memory_bytes(), 19 << 20);
        assert_eq!(class("scrypt$ln=17,r=8,p=1").memory_bytes(), (128 << 20) + 2 * 1024);
        assert_eq!(class("bcrypt$10").memory_bytes(), 4168);
        assert_eq!(class("pbkdf2-sha1$i=1,b=1").memory_bytes(), 0);
    }

    #[test]
    fn debug_output_has_no_salt_hash_or_key() {
        let hash = parse("$scrypt$ln=14,r=8,p=1$S$H").unwrap();
        assert_eq!(format!("{hash:?}"), "ParsedHash { class: Scrypt(ScryptClass { log_n: 14, r: 8, p: 1 }), .. }");
        let firebase = FirebaseScrypt::parse("AAECAwQFBgcICQoLDA0ODw==", "Bw==").unwrap();
        assert_eq!(format!("{firebase:?}"), "FirebaseScrypt(…)");
        for (key, separator) in
            [("AAECAwQFBgcICQoLDA0ODw", "Bw=="), ("Bw==", "Bw=="), ("AAECAwQFBgcICQoLDA0ODw==", "!")]
        {
            assert!(FirebaseScrypt::parse(key, separator).is_err(), "{key} {separator}");
        }
    }
}
