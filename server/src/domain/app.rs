//! A loaded App: its rendered document, and the values that were parsed from it.

use std::sync::Arc;

use latchkey_crds::{
    rendered::{ClientLimitName, LimitName, RenderedApp, Revision, Window},
    types::{AppId, HostName},
};

use super::{
    email::Email,
    foreign_hash::InvalidFirebaseKey,
    keys::{AppKeys, KeyError},
    openid::client::{Clients, InvalidClient, OpenIdClient},
    pages::settings::PagesSettings,
    password_settings::PasswordSettings,
    rights::Rights,
    webhook::{InvalidSigningKey, Webhook},
};

/// A loaded App. It never changes: for a new document, the server creates a new `App`.
#[derive(Debug)]
pub struct App {
    /// The document without its pages and clients, which are in `pages` and `clients`.
    pub doc: RenderedApp,
    pub revision: Revision,
    pub keys: AppKeys,
    pub password: PasswordSettings,
    pub webhooks: Arc<[Webhook]>,
    /// `None`: the App has no hosted pages.
    pub pages: Option<Box<PagesSettings>>,
    clients: Clients,
}

/// Why a document cannot be loaded. The text contains no secret of the document.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error(transparent)]
    FirebaseKeys(#[from] InvalidFirebaseKey),
    #[error(transparent)]
    WebhookKeys(#[from] InvalidSigningKey),
    #[error(transparent)]
    Clients(#[from] InvalidClient),
}

// === impl App ===

impl App {
    pub fn new(mut doc: RenderedApp, revision: Revision) -> Result<Self, LoadError> {
        let keys = AppKeys::new(&doc)?;
        let password = PasswordSettings::new(&doc.password)?;
        let webhooks = doc.webhooks.iter().map(Webhook::new).collect::<Result<_, _>>()?;
        // The pages and the clients are moved out of the document, because a second copy of them would need much memory
        // for 10,000 Apps.
        let pages = doc.pages.take().map(|pages| Box::new(PagesSettings::new(*pages)));
        // Without pages, the App has no clients: their users log in on the pages.
        let rendered = std::mem::take(&mut doc.clients);
        let clients = if pages.is_some() { Clients::new(rendered)? } else { Clients::default() };
        Ok(Self { doc, revision, keys, password, webhooks, pages, clients })
    }

    pub fn id(&self) -> &AppId {
        &self.doc.app_id
    }

    /// Returns the windows of a rate limit, or its default windows if an older operator wrote the document without this
    /// limit.
    pub fn windows(&self, limit: LimitName) -> Vec<Window> {
        match self.doc.limits.get(&limit) {
            Some(windows) => windows.clone(),
            None => limit.default_windows(),
        }
    }

    /// Returns the windows of a rate limit on clients.
    pub fn client_windows(&self, limit: ClientLimitName) -> Vec<Window> {
        self.doc.client_limit(limit)
    }

    /// The client with this `client_id`.
    pub fn client(&self, client_id: &str) -> Option<&Arc<OpenIdClient>> {
        self.clients.get(client_id)
    }

    /// The client of the Client resource with this UID.
    pub fn client_by_uid(&self, uid: &str) -> Option<&Arc<OpenIdClient>> {
        self.clients.iter().find(|client| *client.uid == *uid)
    }

    /// Whether the App has at least one client, and so is an OpenID provider. Only an App with hosted pages has
    /// clients.
    pub fn has_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Whether this web origin is the origin of a redirect URL of a client.
    pub fn is_client_origin(&self, origin: &str) -> bool {
        self.clients.iter().any(|client| client.has_origin(origin))
    }

    /// The App's own host for its pages. `None` if the App has no pages, or if they are only on the host of the
    /// installation.
    pub fn pages_host(&self) -> Option<&HostName> {
        self.pages.as_ref()?.host.as_ref()
    }

    /// Whether the App counts group memberships from this source. `source` is empty for memberships that administrators
    /// added: these always count. Otherwise `source` is the name of a Provider. Memberships from a Provider count
    /// only while the App takes over groups from it: a Provider that has reported groups can later be removed or
    /// renamed, or lose `groups`.
    pub fn takes_groups_from(&self, source: &str) -> bool {
        let mut providers = self.doc.providers.iter();
        source.is_empty() || providers.any(|provider| provider.name.as_str() == source && provider.groups.is_some())
    }

    pub fn webhook(&self, name: &str) -> Option<&Webhook> {
        self.webhooks.iter().find(|webhook| webhook.name.as_str() == name)
    }

    /// Returns the union of the rights of all roles of a ServiceAccount. The union is empty for an account that only
    /// fetches the events of a webhook. Returns `None` if the App lists the account nowhere.
    pub fn rights_of(&self, namespace: &str, service_account: &str) -> Option<Rights> {
        let roles = self
            .doc
            .administrators
            .iter()
            .filter(|listed| listed.namespace == namespace && listed.service_account == service_account)
            .map(|listed| Rights::of_role(listed.role));
        let importers = self.doc.importers.iter();
        let is_importer = importers
            .filter(|listed| listed.namespace == namespace && listed.name == service_account)
            .map(|_| Rights::IMPORTER);
        let is_consumer = self.webhooks.iter().filter(|webhook| webhook.is_pulled_by(namespace, service_account));
        roles.chain(is_importer).chain(is_consumer.map(|_| Rights::default())).reduce(Rights::union)
    }

    /// Whether the App accepts the domain of the email address.
    pub fn allows_email_domain(&self, email: &Email) -> bool {
        let allowed = &self.doc.allowed_email_domains;
        allowed.is_empty() || allowed.iter().any(|domain| domain.as_str() == email.domain())
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::{
        refs::ServiceAccountRef,
        rendered::{Administrator, AdministratorRole, RenderedDelivery, RenderedWebhook},
    };

    use super::{super::rights::Right, *};
    use crate::fixtures;

    fn app_with(administrators: &[(&str, &str, AdministratorRole)], importers: &[(&str, &str)]) -> App {
        let mut doc = fixtures::rendered("shop");
        for (namespace, name, role) in administrators {
            let (namespace, service_account) = ((*namespace).to_owned(), (*name).to_owned());
            doc.administrators.push(Administrator { namespace, service_account, role: *role });
        }
        for (namespace, name) in importers {
            doc.importers.push(ServiceAccountRef { namespace: (*namespace).to_owned(), name: (*name).to_owned() });
        }
        fixtures::app(doc)
    }

    fn listed_rights(app: &App, name: &str) -> Vec<Right> {
        let rights = app.rights_of("shop", name).unwrap();
        let all = [Right::Introspect, Right::Read, Right::Import, Right::ManageUsers];
        all.into_iter().filter(|right| rights.contains(*right)).collect()
    }

    #[test]
    fn each_role_has_its_rights() {
        let app = app_with(
            &[
                ("shop", "asks", AdministratorRole::Introspector),
                ("shop", "reads", AdministratorRole::Reader),
                ("shop", "runs", AdministratorRole::UserAdmin),
            ],
            &[("shop", "imports")],
        );
        assert_eq!(listed_rights(&app, "asks"), [Right::Introspect]);
        assert_eq!(listed_rights(&app, "reads"), [Right::Introspect, Right::Read]);
        assert_eq!(listed_rights(&app, "imports"), [Right::Import]);
        let all = [Right::Introspect, Right::Read, Right::Import, Right::ManageUsers];
        assert_eq!(listed_rights(&app, "runs"), all);
    }

    #[test]
    fn an_account_with_several_entries_has_the_rights_of_all_its_roles() {
        let app = app_with(
            &[("shop", "one", AdministratorRole::Introspector), ("shop", "two", AdministratorRole::Reader)],
            &[("shop", "one"), ("shop", "two")],
        );
        assert_eq!(listed_rights(&app, "one"), [Right::Introspect, Right::Import]);
        assert_eq!(listed_rights(&app, "two"), [Right::Introspect, Right::Read, Right::Import]);
    }

    #[test]
    fn an_account_that_only_fetches_events_is_known_and_has_no_rights() {
        let mut doc = fixtures::rendered("shop");
        let consumer = ServiceAccountRef { namespace: "shop".to_owned(), name: "sync".to_owned() };
        doc.webhooks.push(RenderedWebhook {
            name: "events".parse().unwrap(),
            events: vec!["user.created".to_owned()],
            include_profile: false,
            delivery: RenderedDelivery::Pull(consumer),
        });
        let app = fixtures::app(doc);
        assert!(listed_rights(&app, "sync").is_empty());
        assert!(app.webhook("events").is_some_and(|webhook| webhook.is_pulled_by("shop", "sync")));
        assert!(app.webhook("other").is_none());
    }

    #[test]
    fn an_app_without_pages_has_no_clients() {
        let mut doc = fixtures::rendered("shop");
        doc.clients = vec![fixtures::client("grafana"), fixtures::client("argocd")];
        assert!(!fixtures::app(doc.clone()).has_clients(), "no pages");
        doc.pages = Some(fixtures::pages());
        let app = fixtures::app(doc.clone());
        assert!(app.has_clients() && app.doc.clients.is_empty());
        assert_eq!(&*app.client("grafana").unwrap().uid, "uid-grafana");
        assert_eq!(app.client_by_uid("uid-argocd").unwrap().client_id.as_str(), "argocd");
        assert!(app.client("shop").is_none() && app.client_by_uid("grafana").is_none());
        doc.clients[1] = fixtures::client("grafana");
        let revision = Revision::of(&doc.to_bytes());
        assert!(matches!(App::new(doc, revision), Err(LoadError::Clients(_))));
    }

    #[test]
    fn an_account_that_is_not_listed_has_no_rights() {
        let app = app_with(&[("blog", "one", AdministratorRole::Reader)], &[("shop", "two")]);
        for (namespace, name) in [("shop", "one"), ("blog", "two"), ("blog", "On"), ("", "one"), ("shop", "tw")] {
            assert_eq!(app.rights_of(namespace, name), None, "{namespace}/{name}");
        }
    }
}
