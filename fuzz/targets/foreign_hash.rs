//! Hashes of other services: every accepted text is within the ceilings, costs no more than its weight, and has one
//! canonical form.

use latchkey_server::{
    domain::foreign_hash::{HashClass, HashError, MAX_WEIGHT, ParsedHash},
    hashing::fuzzing::verify,
};

use crate::{
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 48] = [
    "$",
    "$",
    "$",
    "$",
    "$",
    "argon2id",
    "argon2i",
    "argon2d",
    "v=19",
    "v=16",
    "m=",
    "t=",
    "p=",
    ",",
    ",",
    "2a",
    "2b",
    "2y",
    "10",
    "04",
    "13",
    "14",
    "pbkdf2-sha1",
    "pbkdf2-sha256",
    "pbkdf2-sha512",
    "i=",
    "l=",
    "scrypt",
    "firebase-scrypt",
    "ln=",
    "r=",
    "0",
    "1",
    "2",
    "8",
    "16",
    "20",
    "32",
    "64",
    "1024",
    "131072",
    "4294967296",
    "AAECAwQFBgcICQoLDA0ODw",
    "......................AesgC8c2NCv6R248WVftVw.gqvWdlCq",
    "=",
    "+",
    "/",
    "é",
];

/// A check of weight 1 costs at most as much CPU time as this many native hashes. The number is larger than 1, because
/// the weights were measured with a slower native hash, and because a debug build is slower.
const HASHES_PER_WEIGHT: f64 = 16.0;
/// Checks of a greater weight are not run: they would take most of the time of the target.
const MAX_CHECKED_WEIGHT: f64 = 0.5;

#[test]
fn foreign_hash() {
    harness::run("foreign_hash", 2000, |input| {
        let [as_text, joined] = texts(input, &FRAGMENTS);
        let mut draw = Draw::new(input);
        let drawn = draw.text(&FRAGMENTS);
        let plausible = plausible_text(&mut Draw::new(input));
        for text in [as_text.as_ref(), joined.as_ref(), &drawn, &plausible] {
            check_text(text);
        }
    });
}

/// A text of a supported form, with parameters around the ceilings and a few wrong characters.
fn plausible_text(draw: &mut Draw<'_>) -> String {
    const NUMBERS: [u32; 16] = [0, 1, 2, 3, 7, 8, 10, 16, 20, 64, 1000, 1024, 19_456, 131_072, 1_000_000, u32::MAX];
    let bytes = |length: usize, draw: &mut Draw<'_>| {
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let text: String = (0..length).map(|_| char::from(ALPHABET[usize::from(draw.byte() % 64)])).collect();
        text
    };
    let kind = draw.byte() % 9;
    let [a, b, c] = [draw.pick(&NUMBERS), draw.pick(&NUMBERS), draw.pick(&NUMBERS)];
    let length = draw.below(90);
    let (salt, output) = (bytes(draw.below(90), draw), bytes(length, draw));
    match kind {
        0 => format!("$argon2id$v=19$m={a},t={b},p={c}${salt}${output}"),
        1 => format!("$argon2i$m={a},t={b},p={c}${salt}${output}"),
        2 => format!("$argon2d$v=16$m={a},t={b},p={c}${salt}${output}"),
        3 => format!("$2b${:02}${}", a % 40, bytes(53, draw)),
        4 => format!("$pbkdf2-sha1$i={a},l={}${salt}${output}", length * 3 / 4),
        5 => format!("$pbkdf2-sha256$i={a},l={}${salt}${output}", length * 3 / 4),
        6 => format!("$pbkdf2-sha512$i={a},l={}${salt}${output}", length * 3 / 4),
        7 => format!("$scrypt$ln={},r={b},p={c}${salt}${output}", a % 24),
        _ => format!("$firebase-scrypt$ln={},r={b}${salt}${output}", a % 24),
    }
}

fn check_text(text: &str) {
    let parsed = harness::assert_bounded(1, 64 * 1024, || ParsedHash::parse(text));
    let hash = match parsed {
        Ok(hash) => hash,
        Err(HashError::NotSupported | HashError::TooCostly) => return,
    };
    let class = hash.class();
    assert!(class.weight() > 0.0 && class.weight() <= MAX_WEIGHT, "{class}: {}", class.weight());
    // The limit is above 128 MiB, because a scrypt hash with few and large blocks needs more memory than its N blocks.
    assert!(class.memory_bytes() <= 130 << 20, "{class}");
    assert!((1..=64).contains(&hash.salt().len()) && (16..=64).contains(&hash.output().len()), "{class}");
    assert_eq!(ParsedHash::parse(&hash.to_text()).as_ref(), Ok(&hash), "a hash has one canonical text");
    assert_eq!(class.to_string().parse(), Ok::<HashClass, HashError>(class), "a class has one text");
    assert!(class.to_string().len() <= 100, "the class fits its column");
    assert!(!format!("{hash:?}").contains(text), "Debug shows no hash");
    if class.weight() <= MAX_CHECKED_WEIGHT && class.memory_bytes() <= 19 << 20 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
        let hashes = (class.weight() * HASHES_PER_WEIGHT).ceil() as u32;
        let max_memory = class.memory_bytes() + 64 * 1024;
        let is_match = harness::assert_bounded(hashes, max_memory, || verify("correct horse", &hash));
        assert!(!is_match, "a random hash matches no password");
    }
}
