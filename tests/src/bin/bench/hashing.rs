//! The speed of the argon2 kernels relative to the crate `argon2`, on one thread and on all cores. If the program of
//! the reference implementation in C is installed, also measures its speed.

use std::{
    io::Write,
    process::{Child, Command, Stdio},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use argon2::{Argon2, Block};
use argon2_simd::{Algorithm, Function, Hasher, Kernel, Params, Version};

use crate::measurements::Bound;

/// Number of rounds. A round measures each implementation once, because the speed of the machine can change.
const ROUNDS: usize = 15;
/// Number of hashes that one thread computes with one implementation in one round.
const HASHES: u32 = 16;
/// The ranks of two ratios (the smallest has rank 0). The true median is between the two with a probability of 96 %:
/// with 15 rounds, at least 4 and at most 11 ratios are below the true median (binomial distribution with p = 1/2).
const INTERVAL: [usize; 2] = [3, 11];
const PASSWORD: &[u8] = b"correct horse battery staple";
const SALT: &str = "0123456789abcdef";

/// An implementation that is measured.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Implementation {
    /// The crate `argon2`, with memory that is reused. All others are compared with it.
    Crate,
    Kernel(Kernel),
    /// The program `argon2`, which is built from the reference implementation.
    Reference,
}

// === impl Implementation ===

impl Implementation {
    fn name(self) -> String {
        match self {
            Self::Crate => "crate argon2".to_owned(),
            Self::Kernel(kernel) => kernel.name().to_owned(),
            Self::Reference => "reference in C".to_owned(),
        }
    }

    /// The minimum speed relative to the crate `argon2`.
    fn min_speed(self) -> Option<f64> {
        match self {
            Self::Kernel(kernel) if kernel.name() == "avx512" => Some(2.5),
            Self::Kernel(kernel) if kernel.name() == "avx2" => Some(1.6),
            _ => None,
        }
    }
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) fn run() -> Result<Vec<Bound>> {
    let cores = thread::available_parallelism()?.get();
    let mut implementations = vec![Implementation::Crate];
    implementations.extend(Kernel::supported().into_iter().map(Implementation::Kernel));
    if Command::new("argon2").arg("-h").stdout(Stdio::null()).status().is_ok() {
        implementations.push(Implementation::Reference);
    }
    println!("Argon2id, m = 19 MiB, t = 2, p = 1. Speed relative to the crate argon2: median of {ROUNDS} alternating");
    println!("rounds, and the interval that contains the true median with a probability of 96 %\n");
    println!("threads   implementation     ms/hash   hashes/s   relative speed");
    let mut bounds = Vec::new();
    for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
        let mut seconds = vec![Vec::new(); implementations.len()];
        for _ in 0..ROUNDS {
            for (implementation, seconds) in implementations.iter().zip(&mut seconds) {
                seconds.push(seconds_per_hash(*implementation, threads)?);
            }
        }
        let base = seconds[0].clone();
        for (implementation, seconds) in implementations.iter().zip(seconds) {
            let mut ratios: Vec<f64> = base.iter().zip(&seconds).map(|(base, seconds)| base / seconds).collect();
            ratios.sort_by(f64::total_cmp);
            let speed = ratios[ROUNDS / 2];
            let median = median(seconds);
            let name = implementation.name();
            println!(
                "{threads:>7}   {name:<14}   {:>9.2}   {:>8.1}   {speed:>5.2} ({:.2} to {:.2})",
                median * 1000.0,
                f64::from(u32::try_from(threads)?) / median,
                ratios[INTERVAL[0]],
                ratios[INTERVAL[1]],
            );
            if let Some(least) = implementation.min_speed() {
                bounds.push(Bound::new(
                    format!(
                        "{name} on {threads} threads is at least {least} times as fast as the crate argon2: {speed:.2}"
                    ),
                    speed >= least,
                ));
            }
        }
    }
    println!();
    Ok(bounds)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time of one hash, while all threads compute hashes.
fn seconds_per_hash(implementation: Implementation, threads: usize) -> Result<f64> {
    if implementation == Implementation::Reference {
        return reference_seconds_per_hash(threads);
    }
    let barrier = Barrier::new(threads);
    let took: Vec<Duration> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut hash = hash_function(implementation);
                    // The first hash allocates the memory.
                    hash();
                    barrier.wait();
                    let started = Instant::now();
                    for _ in 0..HASHES {
                        hash();
                    }
                    started.elapsed()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("a hash does not panic")).collect()
    });
    let total: Duration = took.iter().sum();
    Ok(total.as_secs_f64() / f64::from(HASHES) / f64::from(u32::try_from(threads)?))
}

/// A function that computes one hash, with its own memory.
pub(crate) fn hash_function(implementation: Implementation) -> Box<dyn FnMut()> {
    let params = &Params::DEFAULT;
    let mut output = [0; 32];
    match implementation {
        Implementation::Kernel(kernel) => {
            let mut hasher = Hasher::with_kernel(kernel);
            Box::new(move || {
                let function =
                    Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params, secret: b"" };
                hasher.hash(&function, PASSWORD, SALT.as_bytes(), &mut output).expect("valid input");
            })
        }
        _ => {
            let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params.clone());
            let mut memory = vec![Block::new(); params.block_count()];
            Box::new(move || {
                argon2
                    .hash_password_into_with_memory(PASSWORD, SALT.as_bytes(), &mut output, &mut memory)
                    .expect("valid input");
            })
        }
    }
}

/// Measures the time of a hash (two passes) of the reference implementation. Its program computes one hash per process.
/// So this function runs one process that makes many passes and one that makes two, and takes the difference: every two
/// additional passes count as one hash.
fn reference_seconds_per_hash(threads: usize) -> Result<f64> {
    let passes = 2 + 2 * HASHES;
    let long = reference_seconds(threads, passes)?;
    let short = reference_seconds(threads, 2)?;
    Ok((long - short) / f64::from(HASHES))
}

/// The time until `threads` concurrent processes have each computed a hash with this number of passes.
fn reference_seconds(threads: usize, passes: u32) -> Result<f64> {
    let started = Instant::now();
    let children: Vec<Child> = (0..threads).map(|_| start_reference(passes)).collect::<Result<_>>()?;
    for mut child in children {
        ensure!(child.wait()?.success(), "the program argon2 failed");
    }
    Ok(started.elapsed().as_secs_f64())
}

fn start_reference(passes: u32) -> Result<Child> {
    let memory = Params::DEFAULT_M_COST.to_string();
    let mut child = Command::new("argon2")
        .args([SALT, "-id", "-r", "-p", "1", "-k", &memory, "-t", &passes.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(PASSWORD)?;
    Ok(child)
}
