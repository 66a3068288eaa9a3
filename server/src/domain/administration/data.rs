//! Imports and exports users, and removes their identities.

use time::Duration;

use super::{AdminUser, AdministratorCall, AuditRow};
use crate::domain::{
    audit::{Detail, EventKind, ExportRange, ImportCounts},
    ports::{
        EventFilter, IdentityRemoval, ImportOutcome, NewAdministeredUser, Sessions, StoreError, UserAdministration,
    },
    session::SessionInfo,
    user::UserId,
};

/// Number of events that are read at a time.
const EVENTS_PAGE: u16 = 500;
/// Maximum number of events in the export of a user.
const MAX_EXPORTED_EVENTS: usize = 10_000;

/// All data of a user.
pub struct UserExport {
    pub user: AdminUser,
    pub sessions: Vec<SessionInfo>,
    /// Sorted from the newest to the oldest.
    pub events: Vec<AuditRow>,
    /// Whether the user has more events than `events` contains.
    pub events_truncated: bool,
}

/// Imports a batch of users in one transaction. `refused` is the number of lines of the batch that were refused before
/// this call. `users` does not contain these lines.
pub async fn import_users<S: UserAdministration>(
    admin: AdministratorCall<'_, S>,
    users: Vec<NewAdministeredUser>,
    source: &str,
    refused: usize,
    dry_run: bool,
) -> Result<Vec<ImportOutcome>, StoreError> {
    let event = admin.event(EventKind::UsersImported, None);
    // The store adds the number of created and of unchanged users.
    let import = ImportCounts { source: source.to_owned(), created: 0, unchanged: 0, refused };
    let detail = Detail { import: Some(import), ..event.detail.clone() };
    admin.stores().import_users(admin.app_id(), users, dry_run, event.with_detail(detail)).await
}

/// Returns all data of a user, or `None` if there is no such user.
pub async fn export_user<S: UserAdministration + Sessions>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
) -> Result<Option<UserExport>, StoreError> {
    let (stores, app) = (admin.stores(), admin.app_id());
    let Some(found) = stores.administered_user(app, user).await? else { return Ok(None) };
    let sessions = stores.sessions(app, user).await?;
    let retention = Duration::days(i64::from(admin.call.app.doc.audit_retention_days));
    let filter =
        EventFilter { user: Some(user), after: Some(admin.call.env.now() - retention), ..EventFilter::default() };
    let (mut events, mut position) = (Vec::new(), None);
    loop {
        let page = stores.events(app, &filter, position, EVENTS_PAGE).await?;
        events.extend(page.rows);
        position = page.next;
        if position.is_none() || events.len() >= MAX_EXPORTED_EVENTS {
            break;
        }
    }
    let events_truncated = position.is_some() || events.len() > MAX_EXPORTED_EVENTS;
    events.truncate(MAX_EXPORTED_EVENTS);
    stores.record_administration(app, admin.event(EventKind::Exported, user)).await?;
    Ok(Some(UserExport { user: found, sessions, events, events_truncated }))
}

/// Records in the audit log that an export begins: of all users or, if `after` is set, only of the users after that
/// user. `hashes`: whether the export contains password hashes. Must be called before the first line of the export is
/// sent.
pub async fn record_export<S: UserAdministration>(
    admin: AdministratorCall<'_, S>,
    hashes: bool,
    after: Option<UserId>,
) -> Result<(), StoreError> {
    let event = admin.event(EventKind::Exported, None);
    let detail = Detail { export: Some(ExportRange { hashes, after }), ..event.detail.clone() };
    admin.stores().record_administration(admin.app_id(), event.with_detail(detail)).await
}

/// Removes from the user the identities that belong to one Provider.
pub async fn remove_identities<S: UserAdministration>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
    provider: &str,
) -> Result<IdentityRemoval, StoreError> {
    let event = admin.event(EventKind::IdentityUnlinked, user);
    let provider_detail = Detail { provider: provider.parse().ok(), ..event.detail.clone() };
    admin.stores().remove_identities(admin.app_id(), user, provider, event.with_detail(provider_detail)).await
}
