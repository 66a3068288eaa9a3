//! One client that keeps the exchanges of a shared provider busy.
//!
//! 64 times at once one client begins a flow and comes back with a code that the provider takes nine seconds to refuse.
//! Four users of the same App sign in at that provider, beside the eight who log in by password to another App.
//!
//! Attacks the places for calls to a provider: one client must not have them all, nor cause more calls than its share.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;
use tokio::time::sleep;

use super::{
    outsiders::{Tally, address, ask},
    provider::{HELD, Provider},
    trial::{Trial, loose},
    users::{DONE, Errand, User, begin, callback},
};
use crate::{
    figures::Bound,
    logins::{self, connect},
};

/// Twice the places that a Provider has.
const IN_FLIGHT: u32 = 64;
const SIGN_INS: u32 = 4;
/// The addresses of the users who sign in follow those of the users who log in.
const FIRST: u32 = 100;
const NAME: &str = "shared";
const RETRY: Duration = Duration::from_millis(10);

pub(super) async fn run(lasts: Duration) -> Result<Vec<Bound>> {
    // It is slow for the attacker alone; its other users are served as ever.
    let provider = Provider::start().await?;
    let shared = provider.oauth2(NAME);
    let app = loose(App::new("social")).set("/redirectURLs", json!([DONE])).provider(&shared);
    let mut trial = Trial::start(Stack::builder().app(&app).provider(&shared), lasts).await?;
    let sign_in = |number| User {
        from: logins::address(FIRST + number),
        errand: Errand::SignIn {
            app: app.id().to_owned(),
            provider: NAME.to_owned(),
            person: format!("person-{number}"),
        },
    };
    trial.beside((0..SIGN_INS).map(sign_in).collect());
    trial.calm().await?;
    let (server, tally, id) = (trial.server(), trial.tally.clone(), app.id().to_owned());
    trial
        .attack(async move {
            for number in 0..IN_FLIGHT {
                tokio::spawn(come_back(server, number, id.clone(), tally.clone()));
            }
        })
        .await
}

/// Begins a flow and comes back with a code that is held, again and again, whatever is answered.
async fn come_back(server: SocketAddr, number: u32, app: String, tally: Tally) -> Infallible {
    let code = format!("{HELD}{number}");
    loop {
        let Ok(mut connection) = connect(server, address(0)).await else {
            tally.count("no connection");
            sleep(RETRY).await;
            continue;
        };
        loop {
            let (cookie, state) = match begin(&mut connection, server, &app, NAME).await {
                Ok(flow) => flow,
                Err(failure) => {
                    tally.count(format_args!("{failure} at redirect"));
                    break;
                }
            };
            let Some(status) = ask(&mut connection, callback(server, &app, NAME, (&cookie, &state), &code)).await
            else {
                tally.count("connection ended");
                break;
            };
            tally.count(status);
        }
        sleep(RETRY).await;
    }
}
