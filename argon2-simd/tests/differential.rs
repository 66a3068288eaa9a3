//! With random inputs, every kernel has the same results as the crate `argon2` and the reference implementation in C.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use argon2::{Argon2, AssociatedData};
use argon2_simd::{Algorithm, Error, Function, Hasher, Kernel, Params, Version};
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Argon2id, Algorithm::Argon2i, Algorithm::Argon2d];
const VERSIONS: [Version; 2] = [Version::V0x13, Version::V0x10];

/// Random bytes of a random length.
fn bytes(random: &mut StdRng, lengths: std::ops::RangeInclusive<usize>) -> Vec<u8> {
    let mut bytes = vec![0; random.random_range(lengths)];
    random.fill_bytes(&mut bytes);
    bytes
}

/// Returns a memory cost in KiB: 8 to 80 for each lane or, rarely, up to 2,048 in total.
fn memory_cost(random: &mut StdRng, lanes: u32) -> u32 {
    if random.random_ratio(1, 20) { random.random_range(8 * lanes..=2048) } else { lanes * random.random_range(8..=80) }
}

#[test]
fn every_kernel_agrees_with_the_crate_argon2() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    // Each hasher is reused, so that the memory contains the blocks of other hashes.
    let mut hashers: Vec<_> = Kernel::supported().into_iter().map(Hasher::with_kernel).collect();
    for _ in 0..3000 {
        let lanes = random.random_range(1..=5);
        let memory = memory_cost(&mut random, lanes);
        let passes = random.random_range(1..=4);
        let data = bytes(&mut random, 0..=AssociatedData::MAX_LEN);
        let params = argon2::ParamsBuilder::new()
            .m_cost(memory)
            .t_cost(passes)
            .p_cost(lanes)
            .data(AssociatedData::new(&data).expect("short enough"))
            .build()
            .expect("valid parameters");
        let (algorithm, version) = (ALGORITHMS[random.random_range(0..3)], VERSIONS[random.random_range(0..2)]);
        let secret = bytes(&mut random, 0..=40);
        let (password, salt) = (bytes(&mut random, 0..=300), bytes(&mut random, 8..=70));
        let mut expected = bytes(&mut random, 4..=200);
        let mut output = expected.clone();

        Argon2::new_with_secret(&secret, algorithm, version, params.clone())
            .expect("short enough")
            .hash_password_into(&password, &salt, &mut expected)
            .expect("valid input");
        for hasher in &mut hashers {
            let function = Function { algorithm, version, params: &params, secret: &secret };
            hasher.hash(&function, &password, &salt, &mut output).expect("valid input");
            let input = format!("seed {seed}: {algorithm} {version:?} m={memory} t={passes} p={lanes}");
            assert_eq!(output, expected, "{:?}, {input}, {} bytes", hasher.kernel(), password.len());
        }
    }
}

#[test]
fn every_kernel_agrees_with_the_reference_implementation() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut hashers: Vec<_> = Kernel::supported().into_iter().map(Hasher::with_kernel).collect();
    for _ in 0..200 {
        let lanes = random.random_range(1..=4);
        let memory = memory_cost(&mut random, lanes);
        let passes = random.random_range(1..=4);
        let params = Params::new(memory, passes, lanes, None).expect("valid parameters");
        let (algorithm, version) = (ALGORITHMS[random.random_range(0..3)], VERSIONS[random.random_range(0..2)]);
        // The program `argon2` reads at most 127 bytes of the password, and takes the salt as an argument, so the salt
        // is text.
        let password = bytes(&mut random, 1..=127);
        let salt: String = (0..random.random_range(8..=40)).map(|_| random.random_range('a'..='z')).collect();
        let length = random.random_range(4..=100);

        let expected = reference_hash(&password, &salt, algorithm, version, &params, length);
        for hasher in &mut hashers {
            let mut output = vec![0; length];
            let function = Function { algorithm, version, params: &params, secret: b"" };
            hasher.hash(&function, &password, salt.as_bytes(), &mut output).expect("valid input");
            let output: String = output.iter().map(|byte| format!("{byte:02x}")).collect();
            let input = format!("seed {seed}: {algorithm} {version:?} m={memory} t={passes} p={lanes}");
            assert_eq!(output, expected, "{:?}, {input}", hasher.kernel());
        }
    }
}

/// Returns a hash in hexadecimal. The program `argon2`, which is built from
/// <https://github.com/P-H-C/phc-winner-argon2>, computes it.
fn reference_hash(
    password: &[u8],
    salt: &str,
    algorithm: Algorithm,
    version: Version,
    params: &Params,
    length: usize,
) -> String {
    let variant = match algorithm {
        Algorithm::Argon2d => "-d",
        Algorithm::Argon2i => "-i",
        Algorithm::Argon2id => "-id",
    };
    let version = if version == Version::V0x10 { "10" } else { "13" };
    let mut child = Command::new("argon2")
        .args([salt, variant, "-r", "-v", version])
        .args(["-k", &params.m_cost().to_string(), "-t", &params.t_cost().to_string()])
        .args(["-p", &params.p_cost().to_string(), "-l", &length.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program argon2 is installed (Debian: package argon2)");
    child.stdin.take().expect("a pipe").write_all(password).expect("the program reads its input");
    let result = child.wait_with_output().expect("the program ends");
    assert!(result.status.success());
    String::from_utf8(result.stdout).expect("hexadecimal digits").trim().to_owned()
}

#[test]
fn invalid_lengths_return_the_same_errors_as_the_crate_argon2() {
    let fixed = Params::new(64, 1, 1, Some(32)).expect("valid parameters");
    let any = Params::new(64, 1, 1, None).expect("valid parameters");
    let cases = [(&fixed, 8, 31), (&fixed, 8, 33), (&any, 8, 3), (&any, 7, 32), (&any, 0, 4), (&fixed, 8, 32)];
    for (params, salt, length) in cases {
        let (salt, mut output) = (vec![5; salt], vec![0; length]);
        let expected = Argon2::new(Algorithm::Argon2id, Version::V0x13, params.clone())
            .hash_password_into(b"password", &salt, &mut output)
            .map_err(|error: Error| error.to_string());
        let function = Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params, secret: b"" };
        let result = Hasher::new().hash(&function, b"password", &salt, &mut output).map_err(|error| error.to_string());
        assert_eq!(result, expected, "a salt of {} bytes, an output of {length} bytes", salt.len());
    }
}
