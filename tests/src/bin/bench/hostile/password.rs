//! Passwords that take long to judge.
//!
//! *confirm-password* and *register* judge a password before they look at anything else. This one is 76 characters that
//! each stand for a letter, some of them for more than one, and is the address itself: every reading of every part of it
//! is looked up. One client sends it to *confirm-password*, where a weak password is no wrong code; another sends it to
//! *register*, from a new address after each hundred, the default limit.
//!
//! Attacks the bound on the cost of judging a password: less than one hash.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::{Value, json};

use super::{
    outsiders::{Tally, address, ask, post, storm},
    trial::Trial,
};
use crate::{figures::Bound, logins::connect};

/// Requests in flight at each of the two endpoints.
const IN_FLIGHT: u32 = 4;
/// `registrationsPerClient` by default, in an hour.
const REGISTRATIONS: u32 = 100;

pub(super) async fn run(lasts: Duration) -> Result<Vec<Bound>> {
    let app = App::new("attacked").namespace("attacker");
    let mut trial = Trial::start(Stack::builder().app(&app), lasts).await?;
    trial.calm().await?;
    let (server, tally, id) = (trial.server(), trial.tally.clone(), app.id().to_owned());
    trial
        .attack(async move {
            for number in 0..IN_FLIGHT {
                let path = format!("/v1/{id}/email/confirm-password");
                let body = json!({ "email": text(), "code": "00000-00000", "password": text() });
                let request = move || post(server, &path, &body);
                tokio::spawn(storm(server, address(0), tally.clone(), request));
                tokio::spawn(register(server, number, id.clone(), tally.clone()));
            }
        })
        .await
}

/// Registers again and again, from the next address when the limit of one is used up.
async fn register(server: SocketAddr, number: u32, app: String, tally: Tally) -> Infallible {
    let body: Value = json!({ "name": "Ada", "email": text(), "password": text() });
    let mut from = number;
    loop {
        from += IN_FLIGHT;
        let Ok(mut connection) = connect(server, address(from)).await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        for _ in 0..REGISTRATIONS {
            match ask(&mut connection, post(server, &format!("/v1/{app}/email/register"), &body)).await {
                Some(status) => tally.count(status),
                None => break,
            }
        }
    }
}

/// An address that is a password: 64 characters are the most before the `@`, which stands for a letter too.
fn text() -> String {
    format!("{}@4836107.com", "483{691!|70$5+%2".repeat(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_has_76_characters() {
        assert_eq!(text().len(), 76);
    }
}
