//! scrypt: `$scrypt$ln=14,r=8,p=1$salt$hash`, with N = 2^ln. The variant of Firebase has no p, because its p is always
//! 1: `$firebase-scrypt$ln=14,r=8$salt$hash`.

use std::fmt::Display;

use super::{HashError, text};

/// The maximum memory of a check in bytes: 128 MiB for the N blocks of 128·r bytes ([`MAX_N_R`]), and 1 MiB for the
/// other blocks, which is enough for ordinary values of r and p.
const MAX_MEMORY_BYTES: u64 = (128 << 20) + (1 << 20);
/// The maximum of N·r. The N blocks take 128·N·r bytes: at most 128 MiB.
const MAX_N_R: u64 = 1 << 20;
const MAX_N_R_P: u64 = 1 << 21;
/// The product N·r·p that has weight 1: a check with this product takes as long as a hash with the default parameters.
const N_R_P_OF_WEIGHT_1: u32 = 32_768;
/// The largest ln for which N·r can be within [`MAX_N_R`].
const MAX_LOG_N: u32 = 20;

/// The cost of a scrypt hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScryptClass {
    log_n: u8,
    r: u32,
    p: u32,
}

// === impl ScryptClass ===

impl ScryptClass {
    pub(super) fn from_params(params: &str) -> Result<Self, HashError> {
        let [log_n, r, p] = text::params(params, ["ln", "r", "p"])?;
        Self::new(log_n, r, p)
    }

    pub(super) fn from_firebase_params(params: &str) -> Result<Self, HashError> {
        let [log_n, r] = text::params(params, ["ln", "r"])?;
        Self::new(log_n, r, 1)
    }

    fn new(log_n: u32, r: u32, p: u32) -> Result<Self, HashError> {
        if log_n == 0 || r == 0 || p == 0 {
            return Err(HashError::NotSupported);
        }
        if log_n > MAX_LOG_N {
            return Err(HashError::TooCostly);
        }
        let n_r = u64::from(r) << log_n;
        if n_r > MAX_N_R || n_r.saturating_mul(p.into()) > MAX_N_R_P {
            return Err(HashError::TooCostly);
        }
        // RFC 7914, 2: N must be less than 2^(128 * r / 8).
        if log_n >= r.saturating_mul(16) {
            return Err(HashError::NotSupported);
        }
        let log_n = u8::try_from(log_n).map_err(|_| HashError::TooCostly)?;
        let class = Self { log_n, r, p };
        if class.memory_bytes() > MAX_MEMORY_BYTES { Err(HashError::TooCostly) } else { Ok(class) }
    }

    /// Returns the binary logarithm of N.
    pub const fn log_n(self) -> u8 {
        self.log_n
    }

    pub const fn r(self) -> u32 {
        self.r
    }

    pub const fn p(self) -> u32 {
        self.p
    }

    pub(super) fn params(self) -> impl Display {
        format!("ln={},r={},p={}", self.log_n, self.r, self.p)
    }

    pub(super) fn firebase_params(self) -> impl Display {
        format!("ln={},r={}", self.log_n, self.r)
    }

    pub(super) fn weight(self) -> f64 {
        // The product is at most 2^21, see [`MAX_N_R_P`].
        f64::from((self.r << self.log_n) * self.p) / f64::from(N_R_P_OF_WEIGHT_1)
    }

    /// Returns the memory of the N blocks, the p blocks of the input and one working block, in bytes.
    pub(super) const fn memory_bytes(self) -> u64 {
        ((1 << self.log_n) + self.p as u64 + 1) * 128 * self.r as u64
    }
}
