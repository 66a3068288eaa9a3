//! Logins through the login page, compared with logins through the JSON API.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use http::StatusCode;
use http_body_util::Full;
use latchkey_tests::passwords::PASSWORD;

use crate::{
    http_client::{encode_form, exchange, get, post_form},
    logins::{RetryBehavior, client_address, connect, log_in_until, next_email},
    measurements::Bound,
};

/// Number of rounds. The order of the two kinds of logins alternates from round to round, so that a drift of the
/// machine's speed affects both kinds.
const ROUNDS: u32 = 20;
const ROUND_TIME: Duration = Duration::from_secs(3);
/// Number of concurrent logins.
const IN_FLIGHT: u32 = 8;
/// Minimum rate of logins through pages, relative to logins through the JSON API.
const MIN_RATIO: f64 = 0.95;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoginKind {
    Json,
    Page,
}

pub(super) async fn compare(server: SocketAddr, app: &str) -> Result<Bound> {
    // Warms up both kinds of logins.
    for kind in [LoginKind::Json, LoginKind::Page] {
        run_round(server, app, kind, Duration::from_secs(1)).await?;
    }
    let (mut json, mut page) = (0, 0);
    for round in 0..ROUNDS {
        let order =
            if round % 2 == 0 { [LoginKind::Json, LoginKind::Page] } else { [LoginKind::Page, LoginKind::Json] };
        for kind in order {
            let logins = run_round(server, app, kind, ROUND_TIME).await?;
            match kind {
                LoginKind::Json => json += logins,
                LoginKind::Page => page += logins,
            }
        }
    }
    let seconds = (ROUND_TIME * ROUNDS).as_secs_f64();
    let [json, page] = [json, page].map(|logins| f64::from(logins) / seconds);
    println!("{IN_FLIGHT} concurrent logins: {json:.1} per second through JSON, {page:.1} through pages\n");
    Ok(Bound::at_least("logins through pages, relative to logins through JSON", MIN_RATIO, page / json))
}

/// The number of logins in the given time.
async fn run_round(server: SocketAddr, app: &str, kind: LoginKind, duration: Duration) -> Result<u32> {
    let end = Instant::now() + duration;
    let clients = (0..IN_FLIGHT).map(|number| {
        let (from, app) = (client_address(number), app.to_owned());
        tokio::spawn(async move {
            match kind {
                LoginKind::Json => {
                    let measured = log_in_until(end, server, from, app, RetryBehavior::Patient).await?;
                    Ok(measured.logins_in_time)
                }
                LoginKind::Page => log_in_at_page_until(end, server, from, &app).await,
            }
        })
    });
    let logins: Result<Vec<u32>> = try_join_all(clients).await?.into_iter().collect();
    Ok(logins?.into_iter().sum())
}

/// Logs in until `end`. Each login is from a new browser, which opens the login page and sends its form.
async fn log_in_at_page_until(end: Instant, server: SocketAddr, from: IpAddr, app: &str) -> Result<u32> {
    let mut logins = 0;
    let mut connection = connect(server, from).await?;
    let path = format!("/{app}/login");
    let origin = format!("http://{server}");
    while Instant::now() < end {
        let page = exchange(&mut connection, get(server, &path, "")?).await?;
        ensure!(page.status == StatusCode::OK, "the login page returned {}", page.status);
        let html = page.text();
        let (_, rest) = html.split_once("name=\"csrf\" value=\"").context("the form has a field csrf")?;
        let csrf = rest.split('"').next().unwrap_or_default();
        let form = encode_form(&[("csrf", csrf), ("email", &next_email()), ("password", PASSWORD)]);
        let request = post_form(server, &path, &page.cookies()).header("origin", &origin).body(Full::from(form))?;
        let response = exchange(&mut connection, request).await?;
        ensure!(response.status == StatusCode::SEE_OTHER, "a login returned {} {}", response.status, response.text());
        logins += u32::from(Instant::now() < end);
    }
    Ok(logins)
}
