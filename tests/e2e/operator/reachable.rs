//! What the servers find of a provider, as the status of its Provider says it.

use std::fs;

use http::Method;
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, Reason},
    rendered::RevisionsLine,
};
use latchkey_tests::{
    builders::{App, Provider},
    client::Anonymous,
    cluster::{Cluster, Endpoint, Install, Operator, PodServer},
    control_plane::audit,
    eventually, process,
    upstream::{Client, Place, Reply, Secret, Upstream},
};
use serde_json::json;
use tokio::time::timeout;

use super::look::{LIMIT, told};
use crate::support::Revisions;

/// The one Provider of these tests.
const NAME: &str = "corp";

fn provider() -> Provider {
    Provider::new(NAME, "oidc")
        .set("issuer", "https://id.provider.test")
        .set("claims", json!({ "email": "email", "emailVerified": "email_verified", "name": "name" }))
}

fn client_of(provider: &Provider) -> Client {
    Client { id: provider.client_id().to_owned(), secret: Secret::Shared(provider.secret().to_owned()) }
}

/// An install whose servers find the provider and trust its certificate.
async fn install(upstream: &Upstream) -> Install<'static> {
    let ca = process::fresh_dir("provider").join("ca.pem");
    fs::write(&ca, upstream.ca()).unwrap();
    let builder = Cluster::shared().await.builder().server_args(upstream.server_args());
    builder.server_env("SSL_CERT_FILE", &ca.display().to_string()).install().await
}

async fn found(install: &Install<'_>, status: ConditionStatus, reason: &str) -> String {
    told(install, ("Provider", install.tenant(), NAME), ConditionType::Reachable, status, reason).await
}

/// Two servers whose restarts the operator follows, one after the other.
struct Servers<'a> {
    install: &'a Install<'a>,
    operator: &'a Operator,
    both: Vec<PodServer>,
    /// An App without a provider: it is changed to learn that the operator has read so far of each server's stream.
    bell: App,
    rung: u32,
}

impl Servers<'_> {
    /// The server's next container, which looks anew and finds that. While it is away its Pod does not count. Returns
    /// when the operator has heard of it.
    async fn restart(&mut self, at: usize, finds: Reason) {
        let server = &self.both[at];
        server.set_endpoint(Endpoint::NOT_READY).await.unwrap();
        self.counting(1).await;
        server.terminate().await.expect("the server ends");
        server.start_ready().await.unwrap();
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
        self.counting(2).await;
        let (mut lines, _) = Revisions::of(server).await;
        let found = async {
            while !matches!(lines.next().await, RevisionsLine::Provider { provider } if provider.reason == finds.as_str())
            {
            }
        };
        timeout(LIMIT, found).await.unwrap_or_else(|_| panic!("server {at} does not find {}", finds.as_str()));
        self.rung += 1;
        self.bell = self.bell.clone().limit("loginsPerClient", &[(1_000 + self.rung, 60)]);
        self.install.apply(&self.bell).await.unwrap();
        self.install.ready(&self.bell).await;
    }

    async fn counting(&self, servers: usize) {
        let wanted = [("counting", servers), ("silent", 0)]
            .map(|(state, number)| format!("latchkey_operator_server_pods{{state=\"{state}\"}} {number}\n"));
        eventually(&format!("{servers} servers count"), LIMIT, || async {
            let page = Anonymous::new(self.operator.ops).request(Method::GET, "metrics").send().await.ok()?;
            let page = page.text().await.ok()?;
            wanted.iter().all(|line| page.contains(line)).then_some(())
        })
        .await;
    }
}

/// The operator's writes to a status of that resource.
fn status_writes<'a>(install: &Install<'_>, asked: &'a [audit::Event], resource: &str) -> Vec<&'a audit::Event> {
    let user = install.operator_account().user_name();
    let written = asked.iter().filter(|event| event.user == user && event.is_write() && event.resource == resource);
    written.filter(|event| event.namespace == install.tenant()).collect()
}

/// Nothing of the App or its Provider changes here: it is the provider that breaks, forgets its client and comes back.
#[tokio::test]
async fn reachable_follows_the_provider_and_the_app_stays_ready() {
    let corp = provider();
    let upstream = Upstream::start("oidc", client_of(&corp)).await.unwrap();
    let install = install(&upstream).await;
    let both = install.serve(2).await;
    let operator = install.operator().await;
    let app = App::new("shop").provider(&corp);
    install.apply_provider(&corp).await.unwrap();
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    assert_eq!(found(&install, ConditionStatus::True, "Reachable").await, "");

    let plane = install.cluster().plane();
    let mark = plane.audit_mark();
    let mut servers = Servers { install: &install, operator: &operator, both, bell: App::new("bell"), rung: 0 };
    upstream.script(Place::Discovery, Reply::status(503, &json!({})));
    servers.restart(0, Reason::DiscoveryFailed).await;
    let said = found(&install, ConditionStatus::False, "DiscoveryFailed").await;
    assert!(said.contains("check the issuer"), "{said}");
    // The other server finds the same, and there is nothing to write.
    servers.restart(1, Reason::DiscoveryFailed).await;

    upstream.unscript();
    upstream.client(Client { id: "another".to_owned(), ..client_of(&corp) });
    for at in 0..2 {
        servers.restart(at, Reason::ClientRefused).await;
    }
    let said = found(&install, ConditionStatus::False, "ClientRefused").await;
    assert!(said.contains("check the client's id and the Secret") && !said.contains(corp.secret()), "{said}");

    upstream.client(client_of(&corp));
    for at in 0..2 {
        servers.restart(at, Reason::Reachable).await;
    }
    found(&install, ConditionStatus::True, "Reachable").await;
    let asked = plane.audit_since(mark).unwrap();
    let of_apps = status_writes(&install, &asked, "apps/status");
    let of_apps: Vec<_> = of_apps.into_iter().filter(|event| event.name == app.id()).collect();
    assert!(of_apps.is_empty(), "{of_apps:#?}");
    // One for each that was found, whatever restarts: of two servers that found different things the worse counts.
    let written = status_writes(&install, &asked, "providers/status");
    assert_eq!(written.len(), 3, "{written:#?}");
    install.ready(&app).await;
}

#[tokio::test]
async fn a_made_up_client_and_an_issuer_that_is_not_there_are_told_until_they_are_mended() {
    let corp = provider();
    let upstream = Upstream::start("oidc", client_of(&corp)).await.unwrap();
    let install = install(&upstream).await;
    let _servers = install.serve(1).await;
    let _operator = install.operator().await;
    let app = App::new("shop").provider(&corp);
    let wrong_client = corp.clone().set("clientID", "made-up");
    let wrong_secret = corp.clone().with_secret("made-up");
    let wrong_issuer = corp.clone().set("issuer", "https://elsewhere.provider.test");
    install.apply_provider(&wrong_client).await.unwrap();
    install.apply(&app).await.unwrap();
    for (provider, status, reason) in [
        (&wrong_client, ConditionStatus::False, "ClientRefused"),
        (&corp, ConditionStatus::True, "Reachable"),
        (&wrong_secret, ConditionStatus::False, "ClientRefused"),
        (&wrong_issuer, ConditionStatus::False, "DiscoveryFailed"),
        (&corp, ConditionStatus::True, "Reachable"),
    ] {
        install.apply_provider(provider).await.unwrap();
        let said = found(&install, status, reason).await;
        assert!(!said.contains("made-up") && !said.contains("elsewhere"), "{said}");
        // It informs, and takes no App down.
        install.ready(&app).await;
    }
}
