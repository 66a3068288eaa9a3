//! A short run of the provider benchmark of `make bench`: an unavailable provider delays only logins with that
//! provider.

use latchkey_tests::provider_down::{Fault, OPERATIONS, Options, run};

/// The limit of the ratio of the medians, on a machine with other load. A call that waits for the provider's timeout of
/// ten seconds would be slower by a factor of a hundred and more.
const RATIO: f64 = 8.0;

#[tokio::test]
async fn email_login_refresh_and_other_providers_are_as_fast_while_a_provider_is_down() {
    let report = run(Options { rounds: 6, samples: 8 }).await.unwrap();
    println!("{report}");
    for fault in [Fault::Hanging, Fault::Unreachable] {
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            let ratio = report.ratio(fault, operation, 0.5);
            assert!(ratio > 0.0 && ratio < RATIO, "{name} while a provider {fault:?}: {ratio:.2}\n{report}");
        }
    }
}
