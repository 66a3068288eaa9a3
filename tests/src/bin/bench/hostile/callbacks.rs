//! One client that keeps a shared provider busy.
//!
//! In 64 concurrent loops, one client starts a login and calls *callback* with a code that the provider takes nine
//! seconds to reject. At the same time, four users of the same App log in at that provider, and eight users log in to
//! another App by password.
//!
//! Attacks the permits for provider calls: one client must not get all permits, and must not cause more calls than its
//! limit allows.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;
use tokio::time::sleep;

use super::{
    attack::{ServerAttack, with_raised_limits},
    attackers::{ResponseCounts, address, send},
    provider::{BenchProvider, DELAYED_CODE_PREFIX},
    users::{REDIRECT_URL, User, UserAction, begin_flow, callback_request},
};
use crate::{
    logins::{self, connect},
    measurements::Bound,
};

/// Number of concurrent loops: twice the number of permits of a Provider.
const IN_FLIGHT: u32 = 64;
const SOCIAL_USERS: u32 = 4;
/// The number of the first social user's client address. The client addresses of users who log in by password have
/// lower numbers.
const FIRST_SOCIAL_ADDRESS: u32 = 100;
const PROVIDER_NAME: &str = "shared";
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);

pub(super) async fn run(duration: Duration) -> Result<Vec<Bound>> {
    // The provider is slow only for the attacker's codes, and serves other users normally.
    let provider = BenchProvider::start().await?;
    let shared = provider.oauth2(PROVIDER_NAME);
    let app = with_raised_limits(App::new("social")).set("/redirectURLs", json!([REDIRECT_URL])).provider(&shared);
    let mut trial = ServerAttack::start(Stack::builder().app(&app).provider(&shared), duration).await?;
    let social_user = |number| User {
        from: logins::client_address(FIRST_SOCIAL_ADDRESS + number),
        action: UserAction::SocialLogin {
            app: app.id().to_owned(),
            provider: PROVIDER_NAME.to_owned(),
            person: format!("person-{number}"),
        },
    };
    trial.add_users((0..SOCIAL_USERS).map(social_user).collect());
    trial.measure_baseline().await?;
    let (server, counts, id) = (trial.server(), trial.counts.clone(), app.id().to_owned());
    trial
        .run_attack(async move {
            for number in 0..IN_FLIGHT {
                tokio::spawn(repeat_callback(server, number, id.clone(), counts.clone()));
            }
        })
        .await
}

/// Starts a login and calls *callback* with a code that the provider rejects late. Repeats this, whatever the responses
/// are.
async fn repeat_callback(server: SocketAddr, number: u32, app: String, counts: ResponseCounts) -> Infallible {
    let code = format!("{DELAYED_CODE_PREFIX}{number}");
    loop {
        let Ok(mut connection) = connect(server, address(0)).await else {
            counts.count("no connection");
            sleep(RECONNECT_PAUSE).await;
            continue;
        };
        loop {
            let (cookie, state) = match begin_flow(&mut connection, server, &app, PROVIDER_NAME).await {
                Ok(flow) => flow,
                Err(failure) => {
                    counts.count(format_args!("{failure} at redirect"));
                    break;
                }
            };
            let Some(status) =
                send(&mut connection, callback_request(server, &app, PROVIDER_NAME, (&cookie, &state), &code)).await
            else {
                counts.count("connection ended");
                break;
            };
            counts.count(status);
        }
        sleep(RECONNECT_PAUSE).await;
    }
}
