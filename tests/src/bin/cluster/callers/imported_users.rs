//! The pod `imported-users`: the users of the former login service, who log in with their old passwords.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use reqwest::StatusCode;
use serde_json::Value;
use tokio::time::{Instant, sleep};
use url::Url;

use super::{Api, CallerArgs, PublicApi};
use crate::{
    events::{self, Event},
    keycloak::old_password,
    scenario::string_field,
};

#[derive(clap::Args)]
pub(crate) struct ImportedUsersArgs {
    #[command(flatten)]
    caller: CallerArgs,
    /// URL of the public API.
    #[arg(long)]
    public_url: Url,
    /// The number of imported users of the App.
    #[arg(long)]
    users: usize,
    /// The number of imported users with a password.
    #[arg(long)]
    with_password: usize,
}

/// The maximum page size for the list of users.
const PAGE: u32 = 500;
/// The maximum number of concurrent logins.
const CONCURRENCY: usize = 16;
/// Time limit for the login of a user, including its repetitions.
const LOGIN_LIMIT: Duration = Duration::from_secs(120);
/// The delay before a login is repeated if the response does not say when.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The login of a user.
struct Login {
    user_id: String,
    /// Whether the login was refused because the user is disabled.
    is_disabled: bool,
    /// How often the login was repeated because the service was at capacity, or because of a limit.
    repetitions: u64,
}

/// Logs in every imported user who has a password.
pub(crate) async fn run(options: &ImportedUsersArgs) -> Result<()> {
    let api = Api::connect(&options.caller).await?;
    let (users, pages) = api.list_users(PAGE).await?;
    let imported: Vec<&Value> = users.iter().filter(|user| user["created_by"] == "import").collect();
    println!("{} of {} users on {pages} pages are imported", imported.len(), users.len());
    ensure!(imported.len() == options.users, "{} instead of {} users", imported.len(), options.users);
    let with_password: Vec<&Value> = imported.into_iter().filter(|user| user["has_password"] == true).collect();
    let expected = options.with_password;
    ensure!(with_password.len() == expected, "{} instead of {expected} users have a password", with_password.len());

    let public = PublicApi::new(&options.public_url, &options.caller.app)?;
    let began = Instant::now();
    let logins: Vec<Login> = stream::iter(with_password)
        .map(|user| log_in(&public, user))
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await?;
    let seconds = began.elapsed().as_secs_f64();
    let disabled = logins.iter().filter(|login| login.is_disabled).count();
    let repetitions: u64 = logins.iter().map(|login| login.repetitions).sum();
    let (logged_in, rate) = (logins.len() - disabled, logins.len() as f64 / seconds);
    for login in logins.into_iter().filter(|login| !login.is_disabled) {
        let (app, user_id) = (options.caller.app.clone(), Some(login.user_id));
        println!("{}", events::caused_line(&Event { app, event_type: "session.created".to_owned(), user_id })?);
    }
    println!(
        "figure {logged_in} users logged in with their old passwords, {disabled} disabled ones were refused: \
         {seconds:.0} s, {rate:.1} per second; {repetitions} calls were repeated after 429 or 503"
    );
    Ok(())
}

/// Logs in a user with the password that the user had at the former service. While the service is at capacity, or a
/// limit is reached, waits for the time that the response states, and repeats the call.
async fn log_in(public: &PublicApi, user: &Value) -> Result<Login> {
    let (user_id, email) = (string_field(user, "id")?, string_field(user, "email")?);
    let password = old_password(email).with_context(|| format!("the old password of {email} is not known"))?;
    let is_disabled = user["state"] == "disabled";
    let end = Instant::now() + LOGIN_LIMIT;
    let mut repetitions = 0;
    loop {
        let response = public.log_in(email, &password).await.with_context(|| email.to_owned())?;
        let is_passing = matches!(response.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        if is_passing && Instant::now() < end {
            repetitions += 1;
            sleep(response.retry_after.unwrap_or(DEFAULT_RETRY_AFTER)).await;
            continue;
        }
        if is_disabled {
            response.expect_error(StatusCode::FORBIDDEN, "user_disabled").with_context(|| email.to_owned())?;
        } else {
            let login = response.expect_ok().with_context(|| email.to_owned())?;
            ensure!(login["user"]["id"] == *user_id, "{email} is {user_id}, the login belongs to {}", login["user"]);
        }
        return Ok(Login { user_id: user_id.to_owned(), is_disabled, repetitions });
    }
}
