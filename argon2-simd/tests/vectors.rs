//! The test vectors of RFC 9106, 5, with every kernel.

use argon2_simd::{Algorithm, Function, Hasher, Kernel, Version};

#[test]
fn every_kernel_computes_the_vectors_of_the_rfc() {
    let params = argon2::ParamsBuilder::new()
        .m_cost(32)
        .t_cost(3)
        .p_cost(4)
        .data(argon2::AssociatedData::new(&[4; 12]).expect("12 bytes"))
        .build()
        .expect("valid parameters");
    let vectors = [
        (Algorithm::Argon2d, "512b391b6f1162975371d30919734294f868e3be3984f3c1a13a4db9fabe4acb"),
        (Algorithm::Argon2i, "c814d9d1dc7f37aa13f0d77f2494bda1c8de6b016dd388d29952a4c4672b6ce8"),
        (Algorithm::Argon2id, "0d640df58d78766c08c037a34a8b53c9d01ef0452d75b65eb52520e96b01e659"),
    ];
    for kernel in Kernel::supported() {
        for (algorithm, expected) in vectors {
            let function = Function { algorithm, version: Version::V0x13, params: &params, secret: &[3; 8] };
            let mut tag = [0; 32];
            Hasher::with_kernel(kernel).hash(&function, &[1; 32], &[2; 16], &mut tag).expect("valid input");
            let tag: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(tag, expected, "{algorithm} with {kernel:?}");
        }
    }
}
