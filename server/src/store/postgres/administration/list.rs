//! Pages of users. Each filter has its own index, so the cost of a page does not depend on the number of users.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::row::{AdminUserRow, admin_user_query};
use crate::{
    domain::{
        administration::UserState,
        ports::{Order, StoreError, SubjectOf, UserFilter, UserPage, UserPosition},
        user::UserId,
    },
    store::postgres::{CallError, PostgresStore},
};

/// The length in characters of a text that sorts after all names and all email addresses. Every name and every email
/// address is shorter.
const GREATEST_TEXT_CHARS: usize = 1000;

/// The values that a page needs in addition to its filter.
struct PageBounds {
    /// The last user of the previous page. For the first page, an id that no user has: the smallest or the greatest
    /// UUID.
    after: Uuid,
    /// One more than the maximum number of users of a page, to know whether more users follow.
    rows: i64,
}

/// Queries the users that match a condition, sorted by id.
macro_rules! page_by_id {
    ($connection:ident, $app:ident, $bounds:ident, $order:ident, $condition:tt) => {
        match $order {
            Order::Ascending => {
                admin_user_query!(
                    ["FROM users WHERE app_id = $1 AND id > $2" + $condition + " ORDER BY id LIMIT $3"],
                    $app.as_str(),
                    $bounds.after,
                    $bounds.rows,
                )
                .fetch_all($connection)
                .await
            }
            Order::Descending => {
                admin_user_query!(
                    ["FROM users WHERE app_id = $1 AND id < $2" + $condition + " ORDER BY id DESC LIMIT $3"],
                    $app.as_str(),
                    $bounds.after,
                    $bounds.rows,
                )
                .fetch_all($connection)
                .await
            }
        }
    };
}

impl PostgresStore {
    pub(super) async fn administered_users(
        &self,
        app: &AppId,
        filter: &UserFilter,
        after: Option<&UserPosition>,
        limit: u16,
    ) -> Result<UserPage, StoreError> {
        let mut call = self.begin_administration("users").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, read_page(connection, app, filter, after, limit)).await;
        let page = into_page(filter, call.end_call(rows)?, limit);
        page.map_err(|error| self.record_error(error))
    }
}

async fn read_page(
    connection: &mut PgConnection,
    app: &AppId,
    filter: &UserFilter,
    after: Option<&UserPosition>,
    limit: u16,
) -> Result<Vec<AdminUserRow>, sqlx::Error> {
    let order = match filter {
        UserFilter::All { order } | UserFilter::State { order, .. } => *order,
        _ => Order::Ascending,
    };
    let before_first = if order == Order::Ascending { Uuid::nil() } else { Uuid::max() };
    let bounds = PageBounds { after: after.map_or(before_first, |after| after.id.0), rows: i64::from(limit) + 1 };
    match filter {
        UserFilter::All { .. } => page_by_id!(connection, app, bounds, order, ""),
        UserFilter::State { state, .. } => match state {
            UserState::Disabled => page_by_id!(connection, app, bounds, order, " AND disabled_at IS NOT NULL"),
            UserState::Contested => {
                page_by_id!(connection, app, bounds, order, " AND contested AND disabled_at IS NULL")
            }
            UserState::Unverified => page_by_id!(
                connection,
                app,
                bounds,
                order,
                " AND email IS NOT NULL AND email_verified_at IS NULL AND NOT contested AND disabled_at IS NULL"
            ),
            // Never used: the API has no filter for active users, because nearly all users are active.
            UserState::Active => page_by_id!(
                connection,
                app,
                bounds,
                order,
                " AND (email IS NULL OR email_verified_at IS NOT NULL) AND NOT contested AND disabled_at IS NULL"
            ),
        },
        UserFilter::Email(email) => {
            admin_user_query!(
                ["FROM users WHERE app_id = $1 AND email_canonical = $2 AND id > $3"],
                app.as_str(),
                email.canonical(),
                bounds.after,
            )
            .fetch_all(connection)
            .await
        }
        UserFilter::ExternalId(external_id) => {
            admin_user_query!(
                ["FROM users WHERE app_id = $1 AND external_id = $2 AND id > $3"],
                app.as_str(),
                external_id.as_str(),
                bounds.after,
            )
            .fetch_all(connection)
            .await
        }
        UserFilter::Subject { subject, of: SubjectOf::Authority(authority) } => {
            admin_user_query!(
                ["FROM identities JOIN users ON users.app_id = identities.app_id AND users.id = identities.user_id
                  WHERE identities.app_id = $1 AND authority = $2 AND subject = $3 AND users.id > $4"],
                app.as_str(),
                authority,
                subject,
                bounds.after,
            )
            .fetch_all(connection)
            .await
        }
        UserFilter::Subject { subject, of: SubjectOf::Provider(provider) } => {
            // DISTINCT, because a Provider can have several authorities, and a user can have an identity at more than
            // one of them.
            admin_user_query!(
                ["FROM (
                    SELECT DISTINCT user_id FROM identities
                    WHERE app_id = $1 AND provider = $2 AND subject = $3 AND user_id > $4
                    ORDER BY user_id LIMIT $5
                 ) AS found
                 JOIN users ON users.app_id = $1 AND users.id = found.user_id
                 ORDER BY users.id"],
                app.as_str(),
                provider.as_str(),
                subject,
                bounds.after,
                bounds.rows,
            )
            .fetch_all(connection)
            .await
        }
        UserFilter::EmailPrefix(prefix) => {
            // The page begins after this key: the prefix itself or, after the first page, the key of the last user.
            let from = after.map_or(prefix.as_str(), |after| after.key.as_str());
            admin_user_query!(
                [r#"FROM users
                    WHERE app_id = $1 AND (email_canonical COLLATE "C", id) > ($2, $3)
                        AND email_canonical COLLATE "C" < $4 AND email_canonical IS NOT NULL
                    ORDER BY email_canonical COLLATE "C", id LIMIT $5"#],
                app.as_str(),
                from,
                bounds.after,
                after_prefix(prefix),
                bounds.rows,
            )
            .fetch_all(connection)
            .await
        }
        UserFilter::NamePrefix(prefix) => {
            let from = after.map_or(prefix.as_str(), |after| after.key.as_str());
            admin_user_query!(
                [r#"FROM users
                    WHERE app_id = $1 AND (lower(name) COLLATE "C", id) > ($2, $3)
                        AND lower(name) COLLATE "C" < $4
                    ORDER BY lower(name) COLLATE "C", id LIMIT $5"#],
                app.as_str(),
                from,
                bounds.after,
                after_prefix(prefix),
                bounds.rows,
            )
            .fetch_all(connection)
            .await
        }
    }
}

fn into_page(filter: &UserFilter, mut rows: Vec<AdminUserRow>, limit: u16) -> Result<UserPage, CallError> {
    let has_more = rows.len() > usize::from(limit);
    rows.truncate(usize::from(limit));
    let last = rows.last().filter(|_| has_more).map(|row| (UserId(row.id), row.lower_name.clone()));
    let users: Vec<_> = rows.into_iter().map(|row| row.into_user(Vec::new(), None)).collect::<Result<_, _>>()?;
    let next = last.map(|(id, lower_name)| {
        let email = users.last().and_then(|user| user.email.as_ref());
        let key = match filter {
            UserFilter::EmailPrefix(_) => email.map(|email| email.canonical().to_owned()).unwrap_or_default(),
            UserFilter::NamePrefix(_) => lower_name,
            _ => String::new(),
        };
        UserPosition { key, id }
    });
    Ok(UserPage { users, next })
}

/// Returns the smallest text after all texts with this prefix: the prefix with its last character replaced by the next
/// character. Texts are ordered by their UTF-8 bytes. The query uses this bound instead of LIKE, because LIKE with a
/// parameter as its pattern uses no index in a generic plan.
fn after_prefix(prefix: &str) -> String {
    let mut end = prefix.to_owned();
    while let Some(last) = end.pop() {
        if let Some(next) = (last..=char::MAX).nth(1) {
            end.push(next);
            return end;
        }
    }
    String::from(char::MAX).repeat(GREATEST_TEXT_CHARS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_a_prefix_is_after_all_texts_with_the_prefix() {
        for prefix in ["a", "az", "ada@", "é", "a\u{d7ff}", "a\u{10ffff}", "\u{10ffff}", ""] {
            let bound = after_prefix(prefix);
            assert!(bound.as_bytes() > prefix.as_bytes(), "{prefix:?}");
            assert!(bound > format!("{prefix}\u{10ffff}\u{10ffff}"), "{prefix:?}");
        }
        assert_eq!(after_prefix("az"), "a{");
        assert_eq!(after_prefix("a\u{d7ff}"), "a\u{e000}");
        assert_eq!(after_prefix("a\u{10ffff}"), "b");
    }
}
