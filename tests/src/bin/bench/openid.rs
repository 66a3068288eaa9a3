//! Latchkey as an OpenID provider, compared with Dex and Keycloak in the same run: code exchanges with a session, and
//! refreshes. Also the latency of `authorize`, the effect of Clients on refreshes through the App's JSON API, and the
//! memory of Clients.
//!
//! A code exchange is what a program does for a user who is logged in already: an authorization request with the
//! cookies of the browser, then the exchange of the code. Dex keeps no session of a user: its authorization request is
//! redirected to a connector that logs in everybody, so an exchange needs one more request.

mod latency;
mod own_refresh;
mod peers;
mod user;

use std::{thread, time::Duration};

use anyhow::Result;
use latchkey_tests::{
    builders::{App, Client},
    stack::Stack,
};
use serde_json::json;

use self::peers::{Contestant, Peer};
use crate::{
    logins,
    measurements::{Bound, format_millis},
    operator,
};

/// The redirect URL, to which codes are sent. Nobody opens it.
const REDIRECT_URL: &str = "https://app.example.com/callback";
/// Number of rounds of the comparison with Dex and Keycloak. Each round measures all providers, because the speed of
/// the machine can change between rounds.
const ROUNDS: u32 = 5;
/// Duration of the exchanges of one provider in one round, and also of its refreshes.
const ROUND_TIME: Duration = Duration::from_secs(3);
/// How long the providers that are compiled ahead of time run before the first round.
const WARM_UP: Duration = Duration::from_secs(2);
/// How long Keycloak runs before the first round, until the JVM has compiled it.
const JVM_WARM_UP: Duration = Duration::from_secs(20);
/// Number of concurrent users.
const IN_FLIGHT: u32 = 8;
const CLIENTS_PER_APP: usize = 5;

const MIN_RATIO_TO_DEX: f64 = 1.0;
const MIN_RATIO_TO_KEYCLOAK: f64 = 3.0;
/// Minimum rate of exchanges with ES256 for ID tokens, relative to exchanges with RS256.
const MIN_ES256_RATIO: f64 = 1.5;
const MIN_REFRESH_RATIO_TO_KEYCLOAK: f64 = 1.5;

/// The rate limits that the benchmark raises, so that it does not reach them.
const LIMITS: [&str; 9] = [
    "loginsPerClient",
    "loginFailuresPerClient",
    "loginFailuresPerAccount",
    "loginFailuresPerClientOverall",
    "registrationsPerClient",
    "refreshesPerSession",
    "authorizationsPerClientAddress",
    "tokenRequestsPerClientID",
    "clientFailuresPerClientAddress",
];

#[derive(clap::Args)]
#[group(id = "openid")]
pub(crate) struct OpenIdArgs {
    /// For `openid`: measure the memory of Clients with this number of Apps and five Clients for each App. 0: do not
    /// measure this memory.
    #[arg(long, default_value_t = 10_000)]
    client_apps: usize,
}

/// An operation that a user of a provider repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Exchange,
    Refresh,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run(options: &OpenIdArgs) -> Result<Vec<Bound>> {
    let cores = thread::available_parallelism()?;
    println!("OpenID Connect, on {cores} cores shared by all processes\n");
    let (app, plain) = (app("bench").set("/pages/mode", "Enabled"), app("plain"));
    let stack = Stack::builder().app(&app).app(&plain).try_start().await?;
    for app in [&app, &plain] {
        logins::add_users(&stack, app.id()).await?;
    }
    let [rs256, es256] = ["RS256", "ES256"].map(|algorithm| client(&app, &algorithm.to_lowercase(), algorithm));
    let others = (2..CLIENTS_PER_APP).map(|number| client(&app, &format!("other-{number}"), "RS256"));
    for client in [rs256.clone(), es256.clone()].into_iter().chain(others) {
        stack.apply_client(&client)?;
    }
    stack.wait_until_served(&app).await?;

    let with_rs256 = peers::sign_in_users("Latchkey, RS256", &stack, &app, &rs256, IN_FLIGHT).await?;
    let with_es256 = peers::sign_in_users("Latchkey, ES256", &stack, &app, &es256, IN_FLIGHT).await?;
    let mut bounds = compare_providers(with_rs256, with_es256).await?;
    let one_user = peers::sign_in_users("Latchkey", &stack, &app, &rs256, 1).await?;
    bounds.push(latency::compare(one_user, app.id()).await?);
    bounds.push(own_refresh::compare(stack.server().public, app.id(), plain.id()).await?);
    drop(stack);
    bounds.extend(match options.client_apps {
        0 => vec![Bound::not_measured("the memory of Clients", "--client-apps is 0")],
        apps => operator::measure_client_cost(apps, CLIENTS_PER_APP).await?,
    });
    Ok(bounds)
}

/// An App with limits that the benchmark does not reach.
fn app(prefix: &str) -> App {
    LIMITS.into_iter().fold(App::new(prefix), |app, limit| app.limit(limit, &[(10_000_000, 60)]))
}

/// A Client with this signing algorithm for ID tokens. The App signs the access tokens with ES256.
fn client(app: &App, name: &str, algorithm: &str) -> Client {
    Client::web(name, app, REDIRECT_URL)
        .set("/scopes", json!(["openid", "profile", "email", "offline_access"]))
        .set("/tokens/idTokenAlgorithm", algorithm)
}

async fn compare_providers(mut rs256: Contestant, mut es256: Contestant) -> Result<Vec<Bound>> {
    for latchkey in [&mut rs256, &mut es256] {
        latchkey.warm_up(WARM_UP).await?;
    }
    let mut dex = Peer::prepare("Dex", WARM_UP, peers::start_dex(IN_FLIGHT)).await;
    let mut keycloak = Peer::prepare("Keycloak", JVM_WARM_UP, peers::start_keycloak(IN_FLIGHT)).await;
    for _ in 0..ROUNDS {
        for contestant in [Some(&mut rs256), Some(&mut es256), dex.contestant(), keycloak.contestant()] {
            let Some(contestant) = contestant else { continue };
            contestant.run(Operation::Exchange, ROUND_TIME).await?;
            if contestant.can_refresh() {
                contestant.run(Operation::Refresh, ROUND_TIME).await?;
            }
        }
    }
    println!(
        "{IN_FLIGHT} concurrent users   exchanges/s         p50         p99   refreshes/s         p50         p99"
    );
    for contestant in
        [Some(&mut rs256), Some(&mut es256), dex.contestant(), keycloak.contestant()].into_iter().flatten()
    {
        print_row(contestant);
    }
    println!();

    let rate = |contestant: &Contestant| contestant.exchanges.per_second();
    let mut bounds = vec![
        dex.bound("code exchanges with a session, RS256, relative to Dex", MIN_RATIO_TO_DEX, |dex| {
            rate(&rs256) / rate(dex)
        }),
        keycloak.bound(
            "code exchanges with a session, RS256, relative to Keycloak",
            MIN_RATIO_TO_KEYCLOAK,
            |keycloak| rate(&rs256) / rate(keycloak),
        ),
    ];
    bounds.push(Bound::at_least(
        "code exchanges with ES256, relative to RS256",
        MIN_ES256_RATIO,
        rate(&es256) / rate(&rs256),
    ));
    bounds.push(keycloak.bound(
        "refreshes of a client, RS256, relative to Keycloak",
        MIN_REFRESH_RATIO_TO_KEYCLOAK,
        |keycloak| rs256.refreshes.per_second() / keycloak.refreshes.per_second(),
    ));
    Ok(bounds)
}

fn print_row(contestant: &Contestant) {
    let columns = [&contestant.exchanges, &contestant.refreshes].map(|measured| {
        if measured.latency.is_empty() {
            return format!("{:>13} {:>11} {:>11}", "-", "-", "-");
        }
        let [p50, p99] = [0.5, 0.99].map(|quantile| format_millis(&measured.latency, quantile));
        format!("{:>13.0} {p50:>11} {p99:>11}", measured.per_second())
    });
    println!("{:<18}{} {}", contestant.name, columns[0], columns[1]);
}
