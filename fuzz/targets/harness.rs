//! Runs a target, and limits its CPU time and memory.

use std::{
    env,
    panic::RefUnwindSafe,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use argon2_simd::{Algorithm, Function, Hasher, Params, Version};
use rustix::time::{ClockId, clock_gettime};

/// Runs a target. `check` panics on a finding. `make test` runs the committed inputs and `iterations` random inputs,
/// which should take one or two seconds. The variable `LATCHKEY_FUZZ_ITERATIONS` overrides the number of random inputs.
pub(crate) fn run(name: &'static str, iterations: usize, check: impl Fn(&[u8]) + RefUnwindSafe) {
    let iterations = env::var("LATCHKEY_FUZZ_ITERATIONS").map_or(iterations, |number| number.parse().unwrap());
    bolero::check!(name = name).with_iterations(iterations).for_each(|input: &[u8]| check(input));
    let slowest = Duration::from_nanos(SLOWEST.load(Ordering::Relaxed));
    if !slowest.is_zero() {
        let count = MEASURED.load(Ordering::Relaxed);
        println!(
            "{name}: the slowest of {count} measurements took {slowest:?} of CPU time, a password hash takes {:?}",
            *HASH_TIME
        );
    }
}

/// The longest CPU time that [`assert_bounded`] has measured, in nanoseconds.
static SLOWEST: AtomicU64 = AtomicU64::new(0);
/// The number of calls of [`assert_bounded`] without a finding.
static MEASURED: AtomicU64 = AtomicU64::new(0);

/// The CPU time of one password hash. Limits on CPU time are multiples of it, because every login costs one hash.
pub(crate) static HASH_TIME: LazyLock<Duration> = LazyLock::new(|| {
    let function =
        Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params: &Params::DEFAULT, secret: b"" };
    let mut hasher = Hasher::new();
    min_cpu_time(5, || hasher.hash(&function, b"correct horse", &[7; 16], &mut [0; 32]).unwrap())
});

/// The factor by which the limit on CPU time is higher in coverage-guided runs. Their instrumentation slows down code with
/// many branches much more than a hash: judging a password takes 1.7 times as long, relative to a hash.
const INSTRUMENTED_FACTOR: u32 = if cfg!(fuzzing) { 2 } else { 1 };
/// The maximum number of additional measurements if the work seems too slow.
const MAX_EXTRA_MEASUREMENTS: usize = 20;

/// Runs `work`. Panics if the work needs more CPU time than `hashes` password hashes, or more than `bytes` of heap at
/// any time.
#[track_caller]
pub(crate) fn assert_bounded<T>(hashes: u32, bytes: u64, work: impl Fn() -> T) -> T {
    let max_time = *HASH_TIME * hashes * INSTRUMENTED_FACTOR;
    let measure = || {
        let mut result = None;
        let began = cpu_time();
        let allocated = allocation_counter::measure(|| result = Some(work()));
        (cpu_time() - began, allocated.bytes_max, result.unwrap())
    };
    let (mut time, mut heap, result) = measure();
    if time > max_time / 2 || heap > bytes {
        // Measures again, because the first run can include cold caches or lazy initialization. Other load on the
        // machine can only increase the time, through shared caches and cores. So the minimum of several measurements
        // is the cost of the work.
        let again = [measure(), measure(), measure()];
        (time, heap) = (again.iter().map(|(time, ..)| *time).min().unwrap(), again[2].1);
        for _ in 0..MAX_EXTRA_MEASUREMENTS {
            if time <= max_time {
                break;
            }
            time = time.min(measure().0);
        }
        assert!(time <= max_time, "takes {time:?} of CPU time, the limit for {hashes} hashes is {max_time:?}");
        assert!(heap <= bytes, "takes {heap} bytes of heap, {bytes} are allowed");
    }
    MEASURED.fetch_add(1, Ordering::Relaxed);
    SLOWEST.fetch_max(time.as_nanos().try_into().unwrap(), Ordering::Relaxed);
    result
}

fn min_cpu_time(times: usize, mut work: impl FnMut()) -> Duration {
    let mut timed = || {
        let began = cpu_time();
        work();
        cpu_time() - began
    };
    (0..times).map(|_| timed()).min().unwrap()
}

/// The CPU time of this thread, independent of other load on the machine.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}
