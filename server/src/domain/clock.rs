//! Time and randomness. The domain takes both as arguments.

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use time::OffsetDateTime;

/// A source of the current time.
pub trait Clock: Send + Sync {
    fn now(&self) -> OffsetDateTime;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "only this function reads the clock")]
    fn now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc()
    }
}

/// The sources of time and randomness.
pub struct Env {
    pub clock: Box<dyn Clock>,
    pub random: Box<dyn SecureRandom + Send + Sync>,
}

// === impl Env ===

impl Env {
    /// Returns the clock and the random number generator of the machine.
    pub fn system() -> Self {
        Self { clock: Box::new(SystemClock), random: Box::new(SystemRandom::new()) }
    }

    pub fn now(&self) -> OffsetDateTime {
        self.clock.now()
    }

    /// Returns random bytes. The generator cannot fail on the operating systems on which the server runs.
    pub fn random_bytes<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.random.fill(&mut bytes).expect("the system's random number generator works");
        bytes
    }

    /// Returns a random number from 0 to 1, both included, to spread waiting times.
    pub fn random_unit(&self) -> f64 {
        f64::from(u16::from_ne_bytes(self.random_bytes())) / f64::from(u16::MAX)
    }

    /// Returns a random number from 0 to `end - 1`, to start at a random element of a list. `end` must not be 0.
    pub fn random_below(&self, end: usize) -> usize {
        usize::from_ne_bytes(self.random_bytes()) % end
    }

    /// Returns a new UUIDv7 (RFC 9562, 5.7): rows that are created one after the other are stored close to each other.
    pub fn new_uuid(&self) -> uuid::Uuid {
        let millis = self.now().unix_timestamp_nanos() / 1_000_000;
        uuid::Builder::from_unix_timestamp_millis(u64::try_from(millis).unwrap_or(0), &self.random_bytes()).into_uuid()
    }
}
