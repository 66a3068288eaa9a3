//! Imports, user filters, foreign hashes and webhooks: their speed, and how much they slow down other requests.
//!
//! All parts run against one server, so that its peak memory after all parts can be compared with its peak memory under
//! logins only.

mod administrator;
mod filters;
mod imports;
mod load;
mod mails;
mod memory;
mod storm;
mod webhooks;

use std::{fs, net::SocketAddr, thread, time::Duration};

use anyhow::Result;
use latchkey_tests::{
    builders::{App, Webhook},
    postgres, process,
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
    webhook_receiver::WebhookReceiver,
};
use serde_json::json;

use self::{administrator::Administrator, memory::PeakMemory};
use crate::{logins, measurements::Bound};

/// The namespace and the name of the ServiceAccount that calls the administration API.
const NAMESPACE: &str = "shop";
const SERVICE_ACCOUNT: &str = "bench";
/// The lifetime of the ServiceAccount's token. The benchmark ends before the token expires.
const TOKEN_LIFETIME: Duration = Duration::from_secs(3600);
/// The name of the webhook of [`Apps::mails`].
const DEAD_WEBHOOK: &str = "dead";
/// Settings of Postgres that differ from those of tests. A million users fit into the shared buffers, as in a database
/// with enough memory. Queues depend on autovacuum, which tests disable.
const POSTGRES_SETTINGS: [&str; 2] = ["shared_buffers=1GB", "autovacuum=on"];

/// The service under test, with the Apps that all parts of this benchmark use.
struct Service {
    stack: Stack,
    apps: Apps,
    /// The receiver of the webhook of [`Apps::webhooks`].
    receiver: WebhookReceiver,
    token: String,
}

struct Apps {
    /// An App without foreign hashes. Its users log in.
    ordinary: App,
    /// The App into which users are imported. Its own users log in, too.
    imported: App,
    /// An App in which all users have bcrypt hashes.
    storm: App,
    /// An App with users who request mails. The receiver of its webhook refuses connections.
    mails: App,
    /// An App with a webhook. The receiver of the webhook accepts all events.
    webhooks: App,
    few_users: App,
    many_users: App,
    /// An App in which one user has a scrypt hash.
    scrypt: App,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    println!(
        "Administration, on {} cores shared by server, client, Postgres and Redis\n",
        thread::available_parallelism()?
    );
    let service = Service::start().await?;
    let mut memory = PeakMemory::start(&service).await?;
    let mut bounds = vec![imports::compare_with_inserts(&service).await?];
    bounds.extend(imports::measure_logins(&service).await?);
    memory.record("imports")?;
    bounds.push(storm::run(&service).await?);
    memory.record("a storm of bcrypt logins")?;
    bounds.push(mails::run(&service).await?);
    memory.record("mails during the outage of a receiver")?;
    bounds.extend(webhooks::run(&service).await?);
    memory.record("webhooks")?;
    bounds.extend(filters::run(&service).await?);
    memory.record("filters")?;
    bounds.push(memory.bound());
    memory.print_with_scrypt(&service).await?;
    Ok(bounds)
}

// === impl Service ===

impl Service {
    async fn start() -> Result<Self> {
        let issuer = ServiceAccountIssuer::new()?;
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks()?.to_string())?;
        let receiver = WebhookReceiver::start()?;
        let apps = Apps::new(&receiver);
        let settings = POSTGRES_SETTINGS.map(str::to_owned).to_vec();
        let builder = Stack::builder()
            .args(["--service-account-keys", &keys.display().to_string()])
            .own_postgres(postgres::Options { settings, ..postgres::Options::for_tests() });
        let stack = apps.all().into_iter().fold(builder, |builder, app| builder.app(app)).try_start().await?;
        for app in [&apps.ordinary, &apps.imported, &apps.mails] {
            logins::add_users(&stack, app.id()).await?;
        }
        let token = issuer.token(NAMESPACE, SERVICE_ACCOUNT, AUDIENCE, TOKEN_LIFETIME)?;
        Ok(Self { stack, apps, receiver, token })
    }

    /// The address of the public API.
    fn public(&self) -> SocketAddr {
        self.stack.server().public
    }

    /// A new connection to the administration API. The server closes it if it is idle for 75 s.
    async fn administrator(&self) -> Result<Administrator> {
        Administrator::connect(self.stack.server().admin, &self.token).await
    }
}

// === impl Apps ===

impl Apps {
    fn new(receiver: &WebhookReceiver) -> Self {
        // Nothing listens on this port, so connections are refused.
        let dead_url = format!("http://{}/hook", process::free_addr());
        let dead = Webhook::push(DEAD_WEBHOOK, &dead_url, &["user.deleted"]);
        let live = Webhook::push("live", &receiver.url(), &["user.created", "user.updated"]);
        Self {
            ordinary: app("ordinary"),
            imported: app("imported"),
            storm: app("storm"),
            mails: app("mails").webhook(&dead),
            webhooks: app("webhooks").webhook(&live),
            few_users: app("few"),
            many_users: app("many"),
            scrypt: app("scrypt"),
        }
    }

    fn all(&self) -> [&App; 8] {
        [
            &self.ordinary,
            &self.imported,
            &self.storm,
            &self.mails,
            &self.webhooks,
            &self.few_users,
            &self.many_users,
            &self.scrypt,
        ]
    }
}

/// An App with an administrator, and with limits that the benchmark does not reach.
fn app(prefix: &str) -> App {
    let service_account = json!({ "namespace": NAMESPACE, "name": SERVICE_ACCOUNT });
    [
        "loginsPerClient",
        "loginFailuresPerClient",
        "loginFailuresPerAccount",
        "loginFailuresPerClientOverall",
        "registrationsPerClient",
        "mailsPerRecipient",
        "mailsPerClient",
    ]
    .into_iter()
    .fold(App::new(prefix), |app, limit| app.limit(limit, &[(10_000_000, 60)]))
    .set("/administrators", json!([{ "serviceAccount": service_account, "role": "UserAdmin" }]))
}
