//! The pod `administrator`: finds, creates, invites, disables and deletes users of the App.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use latchkey_tests::passwords::{NEW_PASSWORD, PASSWORD};
use reqwest::{Method, StatusCode};
use serde_json::json;
use url::Url;

use super::{Api, CallerArgs, PublicApi};
use crate::{
    events::{self, Event},
    inbox,
    scenario::string_field,
};

#[derive(clap::Args)]
pub(crate) struct AdministratorArgs {
    #[command(flatten)]
    caller: CallerArgs,
    /// URL of the public API.
    #[arg(long)]
    public_url: Url,
    /// URL of the inbox, with an IP address.
    #[arg(long)]
    inbox: Url,
}

/// How many calls use each token of an ended session, each over a new connection. The Service chooses a server for each
/// connection at random, so the probability that one of two servers gets no connection is 2^-19.
const NEW_CONNECTIONS: usize = 20;
/// Page size for the list of users. It is so small that the few users of the App need several pages.
const PAGE: u32 = 2;

struct Administrator<'a> {
    options: &'a AdministratorArgs,
    api: Api,
    public: PublicApi,
}

pub(crate) async fn run(options: &AdministratorArgs) -> Result<()> {
    let public = PublicApi::new(&options.public_url, &options.caller.app)?;
    let administrator = Administrator { options, api: Api::connect(&options.caller).await?, public };
    let disabled = administrator.disable_user().await?;
    let invited = administrator.invite_user().await?;
    administrator.list_users(&[&*disabled, &*invited]).await?;
    administrator.delete_user(&disabled).await
}

/// A new email address that begins with this name.
fn new_email(name: &str) -> String {
    format!("{name}-{:08x}@example.com", rand::random::<u32>())
}

// === impl Administrator ===

impl Administrator<'_> {
    /// Creates a user, logs in as this user, and disables the user. Returns the id.
    async fn disable_user(&self) -> Result<String> {
        let email = new_email("grace");
        let external_id = format!("crm:{:08x}", rand::random::<u32>());
        let user = json!({
            "email": email, "email_verified": true, "external_id": external_id, "name": "Grace", "password": PASSWORD,
        });
        let user = self.api.expect(Method::POST, "users", Some(&user), StatusCode::OK).await?;
        let id = string_field(&user, "id")?.to_owned();
        self.log_event("user.created", &id)?;
        let found = format!("users?external_id={external_id}");
        let found = self.api.expect(Method::GET, &found, None, StatusCode::OK).await?;
        ensure!(found["users"][0]["id"] == *id, "the user {id} is not found: {found}");

        let login = self.public.log_in(&email, PASSWORD).await?.expect_ok()?;
        let refresh = json!({ "refresh_token": string_field(&login, "refresh_token")? });
        let tokens = self.public.post("token", &refresh).await?.expect_ok()?;
        let (access, refresh) = (string_field(&tokens, "access_token")?, string_field(&tokens, "refresh_token")?);
        let own = self.public.get("user", access).await?.expect_ok()?;
        ensure!(own["id"] == *id, "the access token of {id} belongs to {own}");
        let disabled = json!({ "disabled": true });
        let path = format!("users/{id}");
        let disabled = self.api.expect(Method::PATCH, &path, Some(&disabled), StatusCode::OK).await?;
        // Every server must refuse the tokens immediately, so the calls below do not wait and are not repeated.
        try_join_all((0..NEW_CONNECTIONS).map(|_| self.expect_ended(access, refresh))).await?;
        ensure!(disabled["state"] == "disabled", "{disabled}");
        self.log_event("user.disabled", &id)?;
        self.public.log_in(&email, PASSWORD).await?.expect_error(StatusCode::FORBIDDEN, "user_disabled")?;
        println!("a user was disabled: {NEW_CONNECTIONS} new connections for each token, each refused at once");
        Ok(id)
    }

    /// Asserts that a server refuses both tokens of an ended session, each over a new connection.
    async fn expect_ended(&self, access_token: &str, refresh_token: &str) -> Result<()> {
        let (url, app) = (&self.options.public_url, &self.options.caller.app);
        let [accessing, refreshing] = [PublicApi::new(url, app)?, PublicApi::new(url, app)?];
        let refresh = json!({ "refresh_token": refresh_token });
        let (accessed, refreshed) =
            tokio::try_join!(accessing.get("user", access_token), refreshing.post("token", &refresh))?;
        accessed.expect_error(StatusCode::UNAUTHORIZED, "invalid_token").context("the access token")?;
        refreshed.expect_error(StatusCode::BAD_REQUEST, "invalid_grant").context("the refresh token")
    }

    /// Invites a user, who sets a password with the code in the mail. Returns the id.
    async fn invite_user(&self) -> Result<String> {
        let email = new_email("joan");
        let user = json!({ "email": email, "name": "Joan", "mail": "invitation" });
        let user = self.api.expect(Method::POST, "users", Some(&user), StatusCode::OK).await?;
        let id = string_field(&user, "id")?.to_owned();
        self.log_event("user.created", &id)?;
        ensure!(user["has_password"] == false && user["email_verified"] == false, "{user}");
        let (code, _) = inbox::wait_for_code(&self.public.http, &self.options.inbox, &email, 0).await?;
        let change = json!({ "email": email, "code": code, "password": NEW_PASSWORD });
        self.public.post("email/confirm-password", &change).await?.expect_ok()?;
        self.log_event("user.password_changed", &id)?;
        let login = self.public.log_in(&email, NEW_PASSWORD).await?.expect_ok()?;
        ensure!(login["user"]["id"] == *id, "the invited user is {id}, the login belongs to {}", login["user"]);
        let user = self.api.expect(Method::GET, &format!("users/{id}"), None, StatusCode::OK).await?;
        ensure!(user["state"] == "active" && user["has_password"] == true, "{user}");
        println!("a user was invited, set a password with the code of the mail, and logged in");
        Ok(id)
    }

    /// Lists all users page by page, and asserts that the list contains these users.
    async fn list_users(&self, wanted: &[&str]) -> Result<()> {
        let (users, pages) = self.api.list_users(PAGE).await?;
        ensure!(pages >= 2, "the {} users of the App are on one page", users.len());
        let ids = users.iter().map(|user| string_field(user, "id")).collect::<Result<BTreeSet<_>>>()?;
        ensure!(ids.len() == users.len(), "the {pages} pages have {} users, {} different ones", users.len(), ids.len());
        for id in wanted {
            ensure!(ids.contains(id), "the {pages} pages do not have the user {id}");
        }
        println!("{} users are listed on {pages} pages", users.len());
        Ok(())
    }

    async fn delete_user(&self, id: &str) -> Result<()> {
        let path = format!("users/{id}");
        self.api.expect(Method::DELETE, &path, None, StatusCode::OK).await?;
        self.log_event("user.deleted", id)?;
        self.api.expect(Method::GET, &path, None, StatusCode::NOT_FOUND).await?;
        println!("a user was deleted");
        Ok(())
    }

    fn log_event(&self, event_type: &str, user_id: &str) -> Result<()> {
        let event = Event {
            app: self.options.caller.app.clone(),
            event_type: event_type.to_owned(),
            user_id: Some(user_id.to_owned()),
        };
        println!("{}", events::caused_line(&event)?);
        Ok(())
    }
}
