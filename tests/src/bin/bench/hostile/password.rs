//! Passwords that are expensive to validate.
//!
//! *confirm-password* and *register* validate a password before anything else. The attackers' password has 76
//! characters. Almost all of them are digits and signs that can be read as a letter, some as more than one. The email
//! address is the same text. So the strength check looks up every interpretation of every part of the password. One
//! client sends this password to *confirm-password*, which does not count a weak password as a wrong code. Four other
//! clients send it to *register*. Each of the four changes its client address after a hundred requests, the default
//! limit for one client address.
//!
//! Attacks the bound on the cost of password validation: it must cost less than one password hash.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::{Value, json};

use super::{
    attack::ServerAttack,
    attackers::{ResponseCounts, address, flood, post_request, send},
};
use crate::{logins::connect, measurements::Bound};

/// Concurrent requests at each of the two endpoints.
const IN_FLIGHT: u32 = 4;
/// Default of `registrationsPerClient`, per hour.
const REGISTRATIONS: u32 = 100;

pub(super) async fn run(duration: Duration) -> Result<Vec<Bound>> {
    let app = App::new("attacked").namespace("attacker");
    let mut trial = ServerAttack::start(Stack::builder().app(&app), duration).await?;
    trial.measure_baseline().await?;
    let (server, counts, id) = (trial.server(), trial.counts.clone(), app.id().to_owned());
    trial
        .run_attack(async move {
            for number in 0..IN_FLIGHT {
                let path = format!("/v1/{id}/email/confirm-password");
                let body = json!({ "email": password(), "code": "00000-00000", "password": password() });
                let request = move || post_request(server, &path, &body);
                tokio::spawn(flood(server, address(0), counts.clone(), request));
                tokio::spawn(register_in_loop(server, number, id.clone(), counts.clone()));
            }
        })
        .await
}

/// Registers in a loop. Changes its client address after [`REGISTRATIONS`] requests, the limit for one client address.
async fn register_in_loop(server: SocketAddr, number: u32, app: String, counts: ResponseCounts) -> Infallible {
    let body: Value = json!({ "name": "Ada", "email": password(), "password": password() });
    let mut from = number;
    loop {
        from += IN_FLIGHT;
        let Ok(mut connection) = connect(server, address(from)).await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        for _ in 0..REGISTRATIONS {
            match send(&mut connection, post_request(server, &format!("/v1/{app}/email/register"), &body)).await {
                Some(status) => counts.count(status),
                None => break,
            }
        }
    }
}

/// An email address that is also the password. The part before the `@` has 64 characters, the maximum. The `@` too can
/// be read as a letter.
fn password() -> String {
    format!("{}@4836107.com", "483{691!|70$5+%2".repeat(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_has_76_characters() {
        assert_eq!(password().len(), 76);
    }
}
