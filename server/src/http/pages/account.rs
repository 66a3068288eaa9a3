//! The pages of the user's own account. Each needs a browser session.

pub(super) mod activity;
pub(super) mod applications;
pub(super) mod delete;
pub(super) mod email;
pub(super) mod identities;
pub(super) mod overview;
pub(super) mod password;
pub(super) mod sessions;

use latchkey_crds::types::ProviderName;

use super::page::Page;
use crate::{
    domain::{authentication::AuthenticatedSession, own_account, social, user::User},
    http::{Ports, error::Problem, handlers::user::account_problem},
    pages::ProviderButton,
};

/// The preset for a provider that the App no longer has. With this preset, the button has the neutral colors and logo.
const NO_PRESET: &str = "oauth2";

/// Loads the user of the session from Postgres.
async fn load_user<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<User, Problem> {
    let user = own_account::load_user(page.call(), session).await;
    user.map_err(|error| account_problem(page.app, error))
}

/// The button of a provider, even if the App no longer has the provider.
fn provider_button<'p, S: Ports>(page: &Page<'p, S>, name: &'p ProviderName) -> ProviderButton<'p> {
    let provider = social::find_provider(page.app, name.as_str());
    ProviderButton::new(name, provider.map_or(NO_PRESET, |provider| provider.settings.preset.as_str()))
}
