//! Decides what a login does for an identity that is not linked yet (specification: Social login, Account linking).

use latchkey_crds::rendered::{EnumerationProtection, RenderedProvider, SignUp};

use super::error::ProviderLoginError;
use crate::domain::{app::App, email::Email, identity::VerifiedIdentity, ports::StoreError, user::User};

/// What to do for a new identity.
#[derive(Debug)]
pub(super) enum Plan {
    /// Link the identity to this account, which has verified the email address.
    Link(User),
    /// Give this account to the user of the provider, because the account has not verified the email address, but the
    /// provider has.
    Transfer(User, Email),
    /// Create a user with a verified email address (`email`), with a pending email address, or without one.
    Create { email: Option<Email>, pending: Option<Email> },
}

/// Decides what to do for a new identity, or why the login fails. `find_user` finds the user of an email address, and
/// is called at most once.
pub(super) async fn plan_new_identity<'a, F>(
    app: &App,
    provider: &RenderedProvider,
    identity: &'a VerifiedIdentity,
    find_user: impl FnOnce(&'a Email) -> F,
) -> Result<Plan, ProviderLoginError>
where
    F: Future<Output = Result<Option<User>, StoreError>>,
{
    let doc = &app.doc;
    let Some(provider_email) = &identity.email else {
        if !doc.allow_users_without_email {
            return Err(ProviderLoginError::MissingEmail);
        }
        return plan_creation(app, None, None);
    };
    if !app.allows_email_domain(&provider_email.email) {
        return Err(ProviderLoginError::DomainNotAllowed);
    }
    if provider_email.is_verified && provider.link_by_email {
        let email = provider_email.email.clone();
        return match find_user(&provider_email.email).await? {
            Some(user) if user.disabled => Err(ProviderLoginError::Disabled),
            Some(user) if user.email_verified => Ok(Plan::Link(user)),
            Some(user) => Ok(Plan::Transfer(user, email)),
            None => plan_creation(app, Some(email), None),
        };
    }
    if doc.enumeration_protection == EnumerationProtection::Disabled
        && find_user(&provider_email.email).await?.is_some()
    {
        return Err(ProviderLoginError::LinkRequired);
    }
    plan_creation(app, None, Some(provider_email.email.clone()))
}

fn plan_creation(app: &App, email: Option<Email>, pending: Option<Email>) -> Result<Plan, ProviderLoginError> {
    if app.doc.require_verified_email && email.is_none() {
        return Err(ProviderLoginError::EmailNotVerified);
    }
    if app.doc.sign_up == SignUp::Closed {
        return Err(ProviderLoginError::Closed);
    }
    Ok(Plan::Create { email, pending })
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::ready};

    use futures::FutureExt;
    use latchkey_crds::rendered::RenderedApp;
    use serde_json::json;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{
            identity::ProviderEmail,
            user::{Epoch, UserId},
        },
        fixtures,
    };

    const EMAIL: &str = "Ada@Example.com";

    fn verified_identity(email: Option<&str>, verified: bool) -> VerifiedIdentity {
        let email = email.map(|email| ProviderEmail { email: Email::parse(email).unwrap(), is_verified: verified });
        VerifiedIdentity {
            authority: "https://id.example".to_owned(),
            subject: "1".to_owned(),
            email,
            name: None,
            groups: Vec::new(),
        }
    }

    fn account(verified: bool, disabled: bool) -> User {
        User {
            id: UserId(Uuid::from_u128(7)),
            email: Some(Email::parse(EMAIL).unwrap()),
            email_verified: verified,
            pending_email: None,
            name: "Ada".to_owned(),
            password_hash: None,
            password_session: None,
            contested: false,
            disabled,
            epoch: Epoch(1),
            version: 1,
            created_at: OffsetDateTime::UNIX_EPOCH,
            updated_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    /// Returns the plan in short words, and how often an account was looked up.
    fn plan_summary(
        change: impl FnOnce(&mut RenderedApp),
        link_by_email: bool,
        identity: &VerifiedIdentity,
        known: Option<User>,
    ) -> (&'static str, u32) {
        let mut doc = fixtures::rendered("shop");
        change(&mut doc);
        let provider = json!({
            "name": "id", "resource": "id", "linkByEmail": link_by_email,
            "settings": { "preset": "google", "clientID": "ours", "secret": null },
        });
        let provider = serde_json::from_value(provider).unwrap();
        let lookups = Cell::new(0);
        let find_user = |email: &Email| {
            assert_eq!(email.as_str(), EMAIL);
            lookups.set(lookups.get() + 1);
            ready(Ok(known))
        };
        let plan = plan_new_identity(&fixtures::app(doc), &provider, identity, find_user).now_or_never().unwrap();
        let summary = match plan {
            Ok(Plan::Link(_)) => "link",
            Ok(Plan::Transfer(_, email)) if email.as_str() == EMAIL => "transfer",
            Ok(Plan::Create { email: Some(_), pending: None }) => "create",
            Ok(Plan::Create { email: None, pending: Some(_) }) => "create, pending",
            Ok(Plan::Create { email: None, pending: None }) => "create, no address",
            Ok(other) => panic!("{other:?}"),
            Err(ProviderLoginError::Closed) => "closed",
            Err(ProviderLoginError::DomainNotAllowed) => "domain",
            Err(ProviderLoginError::EmailNotVerified) => "not verified",
            Err(ProviderLoginError::LinkRequired) => "link required",
            Err(ProviderLoginError::MissingEmail) => "no address",
            Err(ProviderLoginError::Disabled) => "disabled",
            Err(error) => panic!("{error}"),
        };
        (summary, lookups.get())
    }

    fn leave_unchanged(_: &mut RenderedApp) {}

    #[test]
    fn a_verified_address_finds_its_account() {
        let identity = verified_identity(Some(EMAIL), true);
        for (known, expected) in [
            (None, "create"),
            (Some(account(true, false)), "link"),
            (Some(account(false, false)), "transfer"),
            (Some(account(true, true)), "disabled"),
            (Some(account(false, true)), "disabled"),
        ] {
            assert_eq!(plan_summary(leave_unchanged, true, &identity, known), (expected, 1));
        }
    }

    #[test]
    fn a_verified_address_is_not_looked_up_if_the_app_forbids_linking() {
        for (known, identity) in [
            (None, verified_identity(Some(EMAIL), true)),
            (Some(account(true, false)), verified_identity(Some(EMAIL), true)),
            (Some(account(false, false)), verified_identity(Some(EMAIL), true)),
        ] {
            assert_eq!(plan_summary(leave_unchanged, false, &identity, known), ("create, pending", 0));
        }
    }

    #[test]
    fn an_unverified_address_is_looked_up_only_without_enumeration_protection() {
        let identity = verified_identity(Some(EMAIL), false);
        let without_protection = |doc: &mut RenderedApp| doc.enumeration_protection = EnumerationProtection::Disabled;
        for known in [None, Some(account(true, false)), Some(account(false, false))] {
            assert_eq!(plan_summary(leave_unchanged, true, &identity, known.clone()), ("create, pending", 0));
            let expected = if known.is_some() { "link required" } else { "create, pending" };
            assert_eq!(plan_summary(without_protection, true, &identity, known), (expected, 1));
        }
    }

    #[test]
    fn an_unverified_address_is_rejected_if_verification_is_required() {
        let required = |doc: &mut RenderedApp| doc.require_verified_email = true;
        assert_eq!(plan_summary(required, true, &verified_identity(Some(EMAIL), false), None), ("not verified", 0));
        assert_eq!(plan_summary(required, false, &verified_identity(Some(EMAIL), true), None), ("not verified", 0));
        assert_eq!(plan_summary(required, true, &verified_identity(Some(EMAIL), true), None), ("create", 1));
        let verified_or_no_email = |doc: &mut RenderedApp| {
            doc.require_verified_email = true;
            doc.allow_users_without_email = true;
        };
        assert_eq!(
            plan_summary(verified_or_no_email, true, &verified_identity(None, false), None),
            ("not verified", 0)
        );
    }

    #[test]
    fn a_user_without_an_address_is_admitted_if_the_app_allows_it() {
        let allowed = |doc: &mut RenderedApp| doc.allow_users_without_email = true;
        assert_eq!(plan_summary(leave_unchanged, true, &verified_identity(None, false), None), ("no address", 0));
        assert_eq!(plan_summary(allowed, true, &verified_identity(None, false), None), ("create, no address", 0));
    }

    #[test]
    fn an_address_of_another_domain_is_rejected_before_any_lookup() {
        let only_example_org = |doc: &mut RenderedApp| doc.allowed_email_domains = vec!["example.org".parse().unwrap()];
        for verified in [true, false] {
            let identity = verified_identity(Some(EMAIL), verified);
            assert_eq!(plan_summary(only_example_org, true, &identity, Some(account(true, false))), ("domain", 0));
        }
    }

    #[test]
    fn closed_sign_up_rejects_users_without_an_account() {
        let closed = |doc: &mut RenderedApp| {
            doc.sign_up = SignUp::Closed;
            doc.allow_users_without_email = true;
        };
        for identity in [
            verified_identity(Some(EMAIL), true),
            verified_identity(Some(EMAIL), false),
            verified_identity(None, false),
        ] {
            assert_eq!(plan_summary(closed, true, &identity, None).0, "closed");
        }
        assert_eq!(
            plan_summary(closed, true, &verified_identity(Some(EMAIL), true), Some(account(true, false))),
            ("link", 1)
        );
    }
}
