//! Time and randomness, which the rules take as arguments.

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use time::OffsetDateTime;

/// Tells the time.
pub trait Clock: Send + Sync {
    fn now(&self) -> OffsetDateTime;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    fn now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc()
    }
}

/// The two sources of what no input determines.
pub struct Env {
    pub clock: Box<dyn Clock>,
    pub random: Box<dyn SecureRandom + Send + Sync>,
}

// === impl Env ===

impl Env {
    /// The machine's own clock and random numbers.
    pub fn system() -> Self {
        Self { clock: Box::new(SystemClock), random: Box::new(SystemRandom::new()) }
    }

    pub fn now(&self) -> OffsetDateTime {
        self.clock.now()
    }

    /// Random octets; they cannot fail to come on the systems that the server runs on.
    pub fn random<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.random.fill(&mut bytes).expect("the system's random number generator answers");
        bytes
    }

    /// A number from 0 to 1, both included, to spread waits with.
    pub fn unit(&self) -> f64 {
        f64::from(u16::from_ne_bytes(self.random())) / f64::from(u16::MAX)
    }

    /// A new identifier: UUIDv7 (RFC 9562, 5.7), so that rows made one after the other lie side by side.
    pub fn uuid(&self) -> uuid::Uuid {
        let millis = self.now().unix_timestamp_nanos() / 1_000_000;
        uuid::Builder::from_unix_timestamp_millis(u64::try_from(millis).unwrap_or(0), &self.random()).into_uuid()
    }
}
