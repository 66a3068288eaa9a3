//! Unit tests of behavior that the hashes do not show, such as the order of memory accesses.

use std::cell::RefCell;

use crate::{Algorithm, Function, Hasher, Kernel, Params, Version};

/// What a kernel does with reference blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Event {
    /// The kernel starts to fill consecutive blocks.
    Run,
    /// The kernel finds the index of a reference block with data-independent addressing.
    Independent(usize),
    /// The kernel finds the index of a reference block with data-dependent addressing.
    Dependent(usize),
    Prefetch,
}

thread_local! {
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn record(event: Event) {
    EVENTS.with_borrow_mut(|events| events.push(event));
}

/// The events of one hash, in order.
fn events(hasher: &mut Hasher, function: &Function<'_>, password: &[u8]) -> Vec<Event> {
    EVENTS.take();
    hasher.hash(function, password, b"saltsalt", &mut [0; 32]).expect("valid input");
    EVENTS.take()
}

/// Returns the reference blocks of one hash, in order: first those with data-independent addressing, then those with
/// data-dependent addressing.
fn references(hasher: &mut Hasher, function: &Function<'_>, password: &[u8]) -> (Vec<usize>, Vec<usize>) {
    let (mut independent, mut dependent) = (Vec::new(), Vec::new());
    for event in events(hasher, function, password) {
        match event {
            Event::Independent(index) => independent.push(index),
            Event::Dependent(index) => dependent.push(index),
            Event::Run | Event::Prefetch => {}
        }
    }
    (independent, dependent)
}

#[test]
fn data_independent_addressing_reads_the_same_blocks_for_every_password() {
    for kernel in Kernel::supported() {
        let mut hasher = Hasher::with_kernel(kernel);
        for lanes in [1, 2] {
            let params = Params::new(1000, 2, lanes, None).expect("valid parameters");
            let function = |algorithm| Function { algorithm, version: Version::V0x13, params: &params, secret: b"" };

            let (independent, dependent) = references(&mut hasher, &function(Algorithm::Argon2id), b"first password");
            let (other_independent, other_dependent) =
                references(&mut hasher, &function(Algorithm::Argon2id), b"other password");
            assert_eq!(independent, other_independent, "{kernel:?}");
            assert_ne!(dependent, other_dependent, "the record contains the references");
            // Argon2id uses data-independent addressing only in the first half of the first pass. This hash has two
            // passes, so this half is a quarter of all blocks. Each of these blocks has one reference, and each address
            // block has two references.
            assert!(independent.len() >= 1000 / 2 - 4 && independent.len() < 1000 / 2 + 40, "{}", independent.len());
            // The other blocks, with data-dependent addressing, have one reference each.
            assert!(dependent.len() > 3 * 1000 / 2 - 20, "{}", dependent.len());

            let (independent, dependent) = references(&mut hasher, &function(Algorithm::Argon2i), b"first password");
            let (other_independent, _) = references(&mut hasher, &function(Algorithm::Argon2i), b"other password");
            assert_eq!(independent, other_independent, "{kernel:?}");
            assert!(dependent.is_empty());
        }
    }
}

#[test]
fn every_reference_block_is_prefetched_except_the_first_of_a_run() {
    let params = Params::new(1000, 2, 1, None).expect("valid parameters");
    let function = Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params: &params, secret: b"" };
    for kernel in Kernel::supported() {
        let events = events(&mut Hasher::with_kernel(kernel), &function, b"password");
        let mut is_first = false;
        for (event, next) in events.iter().zip(&events[1..]) {
            match event {
                Event::Run => is_first = true,
                Event::Independent(_) | Event::Dependent(_) => {
                    assert_eq!(*next == Event::Prefetch, !is_first, "{kernel:?}");
                    is_first = false;
                }
                Event::Prefetch => {}
            }
        }
        assert!(events.len() > 2 * 2 * 1000 - 200, "{}", events.len());
    }
}

#[test]
fn the_memory_is_kept_and_can_be_released() {
    let function = |params| Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params, secret: b"" };
    let small = Params::new(64, 1, 1, None).expect("valid parameters");
    let large = Params::new(4096, 1, 1, None).expect("valid parameters");
    let mut hasher = Hasher::new();
    assert_eq!(hasher.memory_bytes(), 0);
    hasher.hash(&function(&small), b"password", b"saltsalt", &mut [0; 32]).expect("valid input");
    assert_eq!(hasher.memory_bytes(), 64 << 10);
    hasher.hash(&function(&large), b"password", b"saltsalt", &mut [0; 32]).expect("valid input");
    hasher.hash(&function(&small), b"password", b"saltsalt", &mut [0; 32]).expect("valid input");
    assert_eq!(hasher.memory_bytes(), 4096 << 10);
    hasher.release();
    assert_eq!(hasher.memory_bytes(), 0);
}
