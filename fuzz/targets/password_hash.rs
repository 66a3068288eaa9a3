//! Argon2: every kernel that the CPU supports computes the same hash as the crate `argon2`.

use argon2::{Argon2, AssociatedData, ParamsBuilder};
use argon2_simd::{Algorithm, Function, Hasher, Kernel, Version};

use crate::{draw::Draw, harness};

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Argon2id, Algorithm::Argon2i, Algorithm::Argon2d];
const VERSIONS: [Version; 2] = [Version::V0x13, Version::V0x10];

/// Draws between `min` and `max` bytes.
fn bytes(draw: &mut Draw<'_>, min: usize, max: usize) -> Vec<u8> {
    let length = min + draw.below(max - min + 1);
    (0..length).map(|_| draw.byte()).collect()
}

#[test]
fn password_hash() {
    harness::run("password_hash", 1000, |input| {
        let mut draw = Draw::new(input);
        let (algorithm, version) = (draw.pick(&ALGORITHMS), draw.pick(&VERSIONS));
        let lanes = 1 + u32::from(draw.byte() % 4);
        let memory = 8 * lanes + u32::from(draw.byte());
        let passes = 1 + u32::from(draw.byte() % 3);
        let mut output = vec![0; 4 + draw.below(100)];
        let (password, salt) = (bytes(&mut draw, 0, 200), bytes(&mut draw, 8, 64));
        let (secret, data) = (bytes(&mut draw, 0, 32), bytes(&mut draw, 0, AssociatedData::MAX_LEN));
        let params = ParamsBuilder::new()
            .m_cost(memory)
            .t_cost(passes)
            .p_cost(lanes)
            .data(AssociatedData::new(&data).unwrap())
            .build()
            .unwrap();

        let mut expected = output.clone();
        Argon2::new_with_secret(&secret, algorithm, version, params.clone())
            .unwrap()
            .hash_password_into(&password, &salt, &mut expected)
            .unwrap();
        for kernel in Kernel::supported() {
            let function = Function { algorithm, version, params: &params, secret: &secret };
            Hasher::with_kernel(kernel).hash(&function, &password, &salt, &mut output).unwrap();
            assert_eq!(output, expected, "{kernel:?}");
        }
    });
}
