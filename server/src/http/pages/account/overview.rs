//! `account`: the overview, the name, and the confirmation mail.

use std::collections::BTreeSet;

use latchkey_crds::types::ProviderName;

use super::{applications, load_user, provider_button};
use crate::{
    domain::{authentication::AuthenticatedSession, email::Email, email_account, own_account, social, user::User},
    http::{
        Ports,
        error::Problem,
        handlers::{
            email::verify::verify_problem,
            user::{account_problem, rename::RenameRequest},
        },
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::views::{AccountNotice, AccountPage},
};

/// The data of the account for the overview.
struct Account {
    user: User,
    /// The labels of the linked providers.
    linked: String,
    has_applications: bool,
}

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let account = load(page, &session).await?;
    let notice = match page.query("notice")? {
        Some("name_saved") => Some(AccountNotice::NameSaved),
        Some("email_sent") => account.unconfirmed_address().map(AccountNotice::EmailSent),
        Some("email_confirmed") => Some(AccountNotice::EmailConfirmed),
        Some("password_saved") => Some(AccountNotice::PasswordSaved),
        Some("application_removed") => Some(AccountNotice::ApplicationRemoved),
        _ => None,
    };
    page.show(&account.view(page, &account.user.name, notice))
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let (done, notice) = match form.get("action") {
        Some("verify") => {
            let queued = email_account::verify(page.call(), &session).await;
            (queued.map(drop).map_err(|error| verify_problem(page.app, error)), "email_sent")
        }
        Some(_) => return Err(Problem::invalid_request("action must be verify")),
        None => (rename(page, &session, form).await, "name_saved"),
    };
    match done {
        Ok(()) => page.redirect(&format!("account?notice={notice}"), Vec::new()),
        Err(problem) => {
            let account = load(page, &session).await?;
            let name = if form.get("action").is_some() { account.user.name.as_str() } else { form.text("name") };
            page.refuse(&account.view(page, name, None), problem)
        }
    }
}

async fn rename<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession, form: &Form) -> Result<(), Problem> {
    let RenameRequest { name } = form.read()?;
    let renamed = own_account::rename_user(page.call(), session, &name).await;
    renamed.map(drop).map_err(|error| account_problem(page.app, error))
}

async fn load<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<Account, Problem> {
    let user = load_user(page, session).await?;
    let identities = social::list_identities(page.call(), session).await?;
    let names: BTreeSet<ProviderName> =
        identities.into_iter().filter_map(|identity| identity.provider.parse().ok()).collect();
    let labels: Vec<&str> = names.iter().map(|name| provider_button(page, name).label).collect();
    let has_applications = applications::is_linked(page, session).await?;
    Ok(Account { user, linked: labels.join(", "), has_applications })
}

// === impl Account ===

impl Account {
    /// The unconfirmed address, to which the user can request a confirmation mail. `None` if there is no such address.
    fn unconfirmed_address(&self) -> Option<&str> {
        let unverified = self.user.email.as_ref().filter(|_| !self.user.email_verified);
        self.user.pending_email.as_ref().or(unverified).map(Email::as_str)
    }

    fn view<'v, S: Ports>(
        &'v self,
        page: &Page<'_, S>,
        name: &'v str,
        notice: Option<AccountNotice<'v>>,
    ) -> AccountPage<'v> {
        AccountPage {
            name,
            email: self.user.email.as_ref().map(Email::as_str),
            email_verified: self.user.email_verified,
            pending_email: self.user.pending_email.as_ref().map(Email::as_str),
            has_password: self.user.password_hash.is_some(),
            has_providers: !page.app.doc.providers.is_empty(),
            linked_providers: &self.linked,
            has_applications: self.has_applications,
            notice,
        }
    }
}
