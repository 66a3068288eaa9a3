//! Runs a target, and holds its work to bounds.

use std::{
    env,
    panic::RefUnwindSafe,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use argon2::{Argon2, Params};
use rustix::time::{ClockId, clock_gettime};

/// Runs a target: `judge` panics on a finding. `iterations` counts the random inputs of `make test`; it is chosen so that
/// they take a second or two; `LATCHKEY_FUZZ_ITERATIONS` overrides it. Committed inputs are always judged.
pub(crate) fn run(name: &'static str, iterations: usize, judge: impl Fn(&[u8]) + RefUnwindSafe) {
    let iterations = env::var("LATCHKEY_FUZZ_ITERATIONS").map_or(iterations, |number| number.parse().unwrap());
    bolero::check!(name = name).with_iterations(iterations).for_each(|input: &[u8]| judge(input));
    let slowest = Duration::from_nanos(SLOWEST.load(Ordering::Relaxed));
    if !slowest.is_zero() {
        println!("{name}: the slowest work took {slowest:?} of CPU time, a password hash takes {:?}", *HASH);
    }
}

/// The longest CPU time of bounded work, in nanoseconds.
static SLOWEST: AtomicU64 = AtomicU64::new(0);

/// The CPU time of one password hash, the unit of what one request may cost: a login pays it anyway.
pub(crate) static HASH: LazyLock<Duration> = LazyLock::new(|| {
    let mut output = [0; Params::DEFAULT_OUTPUT_LEN];
    let hash = || Argon2::default().hash_password_into(b"correct horse", &[7; 16], &mut output).unwrap();
    fastest(5, hash)
});

/// Does the work, and panics if it takes more than `hashes` times the CPU time of one password hash or more than `bytes`
/// of heap at one time.
#[track_caller]
pub(crate) fn bounded<T>(hashes: u32, bytes: u64, work: impl Fn() -> T) -> T {
    let most = *HASH * hashes;
    let measure = || {
        let mut result = None;
        let began = cpu_time();
        let allocated = allocation_counter::measure(|| result = Some(work()));
        (cpu_time() - began, allocated.bytes_max, result.unwrap())
    };
    let (mut time, mut heap, result) = measure();
    if time > most / 2 || heap > bytes {
        // Once may be bad luck: cold caches, a table that is made at first use.
        let again = [measure(), measure(), measure()];
        (time, heap) = (again.iter().map(|(time, ..)| *time).min().unwrap(), again[2].1);
        assert!(time <= most, "takes {time:?} of CPU time, {hashes} hashes take {most:?}");
        assert!(heap <= bytes, "takes {heap} bytes of heap, {bytes} are allowed");
    }
    SLOWEST.fetch_max(time.as_nanos().try_into().unwrap(), Ordering::Relaxed);
    result
}

fn fastest(times: usize, mut work: impl FnMut()) -> Duration {
    let mut timed = || {
        let began = cpu_time();
        work();
        cpu_time() - began
    };
    (0..times).map(|_| timed()).min().unwrap()
}

/// Of this thread: other processes of the machine do not count.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}
