//! `account/identities`: the providers with which the user can log in.

use latchkey_crds::types::ProviderName;

use super::provider_button;
use crate::{
    domain::{
        authentication::AuthenticatedSession,
        identity::Identity,
        pages::SocialPurpose,
        social::{self, LinkError},
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        handlers::identities::{
            link::link_problem,
            unlink::{not_linked, require_unlinked},
        },
        pages::{
            form::Form,
            page::{Page, encode_query},
            social as social_page,
        },
        response::Response,
    },
    pages::{
        LinkedProvider, Timestamp,
        views::{AccountNotice, IdentitiesPage},
    },
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let linked = linked_identities(page, &session).await?;
    let named: Option<ProviderName> = page.query("provider")?.and_then(|name| name.parse().ok());
    let mut view = view(page, &session, &linked);
    if let Some(error) = page.query("error")? {
        let code = ErrorCode::from_name(error).unwrap_or(ErrorCode::ProviderError);
        return page.show_error(&view, code);
    }
    // Any link can contain the parameter `notice`, so the page shows the notice only if it is true.
    view.notice = match (page.query("notice")?, &named) {
        (Some("linked"), Some(name)) if is_linked(&linked, name.as_str()) => {
            Some(AccountNotice::Linked(provider_button(page, name).label))
        }
        (Some("unlinked"), Some(name))
            if !is_linked(&linked, name.as_str()) && social::find_provider(page.app, name.as_str()).is_some() =>
        {
            Some(AccountNotice::Unlinked(provider_button(page, name).label))
        }
        _ => None,
    };
    if view.login_needed { page.show_before_login(&view) } else { page.show(&view) }
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let provider = form.text("provider");
    let done = match form.get("action") {
        Some("link") if session.is_recent(&page.state.env) => {
            let purpose = SocialPurpose::Link { user: session.user_id(), session: session.session.id };
            return social_page::start(page, provider, purpose, None).await;
        }
        Some("link") => Err(link_problem(page.app, LinkError::ReauthenticationRequired)),
        Some("unlink") => unlink(page, &session, provider).await,
        _ => Err(Problem::invalid_request("action must be link or unlink")),
    };
    match done {
        Ok(()) => {
            let query = encode_query([("notice", "unlinked"), ("provider", provider)]);
            page.redirect(&format!("account/identities{query}"), Vec::new())
        }
        Err(problem) => {
            let linked = linked_identities(page, &session).await?;
            page.refuse(&view(page, &session, &linked), problem)
        }
    }
}

async fn unlink<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession, name: &str) -> Result<(), Problem> {
    let name: ProviderName = name.parse().map_err(|_| not_linked())?;
    require_unlinked(social::unlink_identity(page.call(), session, &name).await?)
}

/// The identities of the user, with the names of their providers.
async fn linked_identities<S: Ports>(
    page: &Page<'_, S>,
    session: &AuthenticatedSession,
) -> Result<Vec<(ProviderName, Identity)>, Problem> {
    let identities = social::list_identities(page.call(), session).await?;
    let named = |identity: Identity| Some((identity.provider.parse().ok()?, identity));
    Ok(identities.into_iter().filter_map(named).collect())
}

fn is_linked(linked: &[(ProviderName, Identity)], name: &str) -> bool {
    linked.iter().any(|(linked, _)| linked.as_str() == name)
}

fn view<'v, S: Ports>(
    page: &Page<'v, S>,
    session: &AuthenticatedSession,
    linked: &'v [(ProviderName, Identity)],
) -> IdentitiesPage<'v> {
    let language = page.texts.language();
    IdentitiesPage {
        linked: linked
            .iter()
            .map(|(name, identity)| LinkedProvider {
                provider: provider_button(page, name),
                since: Timestamp::new(identity.linked_at, language),
            })
            .collect(),
        available: page.providers().into_iter().filter(|button| !is_linked(linked, button.name)).collect(),
        login_needed: !session.is_recent(&page.state.env),
        notice: None,
    }
}
