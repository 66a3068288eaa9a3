//! bcrypt: `$2b$10$`, followed by 22 characters of salt and 31 characters of hash, in bcrypt's base64 alphabet.

use base64::{
    Engine as _, alphabet,
    engine::general_purpose::{GeneralPurpose, NO_PAD},
};
use zeroize::Zeroizing;

use super::{
    HashError,
    text::{self, Secret},
};

const MIN_COST: u32 = 4;
const MAX_COST: u32 = 13;
/// The cost that has weight 1: a check with this cost takes as long as a hash with the default parameters.
const COST_OF_WEIGHT_1: u32 = 8;
/// The memory of a check: the state of Blowfish, which has 18 subkeys and four tables of 256 words.
pub(super) const MEMORY_BYTES: u64 = (18 + 4 * 256) * 4;
/// The length of the output: bcrypt computes 24 bytes and drops the last one.
pub(super) const OUTPUT_BYTES: usize = 23;
const SALT_BYTES: usize = 16;
const SALT_CHARS: usize = 22;

const BASE64: GeneralPurpose = GeneralPurpose::new(&alphabet::BCRYPT, NO_PAD);
/// The 22 characters of a salt have 4 bits more than its 16 bytes. Some services wrote random values into these 4 bits.
/// All implementations ignore them.
const SALT_BASE64: GeneralPurpose =
    GeneralPurpose::new(&alphabet::BCRYPT, NO_PAD.with_decode_allow_trailing_bits(true));

/// The cost of a bcrypt hash. `$2a$`, `$2b$` and `$2y$` are one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BcryptClass {
    cost: u32,
}

/// Parses the salt and the output, which follow the cost.
pub(super) fn parse_tail(tail: &str) -> Result<(Secret, Secret), HashError> {
    let (salt, output) = tail.split_at_checked(SALT_CHARS).ok_or(HashError::NotSupported)?;
    let salt = Zeroizing::new(SALT_BASE64.decode(salt).map_err(|_| HashError::NotSupported)?);
    let output = Zeroizing::new(BASE64.decode(output).map_err(|_| HashError::NotSupported)?);
    if salt.len() == SALT_BYTES && output.len() == OUTPUT_BYTES {
        Ok((salt, output))
    } else {
        Err(HashError::NotSupported)
    }
}

pub(super) fn print_tail(salt: &[u8], output: &[u8]) -> Zeroizing<String> {
    Zeroizing::new(BASE64.encode(salt) + &BASE64.encode(output))
}

// === impl BcryptClass ===

impl BcryptClass {
    /// Parses the cost that the text of a hash contains. There the cost always has two digits.
    pub(super) fn from_two_digits(text: &str) -> Result<Self, HashError> {
        if text.len() != 2 {
            return Err(HashError::NotSupported);
        }
        Self::from_cost(text.strip_prefix('0').unwrap_or(text))
    }

    /// Parses the cost that the text of a class contains, for example `10` in `bcrypt$10`.
    pub(super) fn from_cost(text: &str) -> Result<Self, HashError> {
        let cost = text::number(text)?;
        match cost {
            MIN_COST..=MAX_COST => Ok(Self { cost }),
            // bcrypt has no cost above 31.
            _ if cost > MAX_COST && cost <= 31 => Err(HashError::TooCostly),
            _ => Err(HashError::NotSupported),
        }
    }

    /// Returns the binary logarithm of the number of rounds.
    pub const fn cost(self) -> u32 {
        self.cost
    }

    pub(super) fn weight(self) -> f64 {
        f64::from(1 << self.cost) / f64::from(1 << COST_OF_WEIGHT_1)
    }
}
