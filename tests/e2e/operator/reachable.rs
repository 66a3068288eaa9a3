//! The condition Reachable of a Provider shows what the servers report after they have checked the provider.

use std::fs;

use http::Method;
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, Reason},
    rendered::RevisionsMessage,
};
use latchkey_tests::{
    builders::{App, Provider},
    client::ApiClient,
    cluster::{Endpoint, Installation, OperatorProcess, ServerInPod, TestCluster},
    control_plane::audit,
    eventually,
    mock_provider::{ClientSecret, MockProvider, ProviderEndpoint, RegisteredClient, ScriptedResponse},
    process,
};
use serde_json::json;
use tokio::time::timeout;

use super::helpers::{LIMIT, wait_for_condition};
use crate::support::RevisionStream;

/// The name of the Provider in these tests.
const NAME: &str = "corp";

fn provider() -> Provider {
    Provider::new(NAME, "oidc")
        .set("issuer", "https://id.provider.test")
        .set("claims", json!({ "email": "email", "emailVerified": "email_verified", "name": "name" }))
}

fn upstream_client(provider: &Provider) -> RegisteredClient {
    RegisteredClient { id: provider.client_id().to_owned(), secret: ClientSecret::Shared(provider.secret().to_owned()) }
}

/// An installation with servers that resolve the provider's host names and trust its certificate.
async fn install_with_upstream(upstream: &MockProvider) -> Installation<'static> {
    let ca = process::fresh_dir("provider").join("ca.pem");
    fs::write(&ca, upstream.ca()).unwrap();
    let builder = TestCluster::shared().await.builder().server_args(upstream.server_args());
    builder.server_env("SSL_CERT_FILE", &ca.display().to_string()).install().await
}

async fn wait_for_reachable(install: &Installation<'_>, status: ConditionStatus, reason: &str) -> String {
    wait_for_condition(install, ("Provider", install.tenant(), NAME), ConditionType::Reachable, status, reason).await
}

/// Two servers that restart one after the other, and the operator that reads their reports.
struct RestartingServers<'a> {
    install: &'a Installation<'a>,
    operator: &'a OperatorProcess,
    pods: Vec<ServerInPod>,
    /// An App without a provider. When an edit of this App is Ready, the operator has read all earlier reports of the
    /// servers.
    marker: App,
    marker_edits: u32,
}

impl RestartingServers<'_> {
    /// Restarts a server, which then checks the provider again. Waits until the server has reported the expected result
    /// and the operator has read the report. During the restart, the Pod is not a serving pod.
    async fn restart(&mut self, index: usize, expected: Reason) {
        let server = &self.pods[index];
        server.set_endpoint(Endpoint::NOT_READY).await.unwrap();
        self.wait_for_serving_pods(1).await;
        server.terminate().await.expect("the server ends");
        server.start_ready().await.unwrap();
        server.set_endpoint(Endpoint::SERVING).await.unwrap();
        self.wait_for_serving_pods(2).await;
        let (mut lines, _) = RevisionStream::open(server).await;
        let wait_for_report = async {
            while !matches!(lines.next().await, RevisionsMessage::Provider { provider } if provider.reason == expected.as_str())
            {
            }
        };
        timeout(LIMIT, wait_for_report)
            .await
            .unwrap_or_else(|_| panic!("server {index} does not report {}", expected.as_str()));
        self.marker_edits += 1;
        self.marker = self.marker.clone().limit("loginsPerClient", &[(1_000 + self.marker_edits, 60)]);
        self.install.apply(&self.marker).await.unwrap();
        self.install.wait_until_ready(&self.marker).await;
    }

    async fn wait_for_serving_pods(&self, servers: usize) {
        let wanted = [("counting", servers), ("silent", 0)]
            .map(|(state, number)| format!("latchkey_operator_server_pods{{state=\"{state}\"}} {number}\n"));
        eventually(&format!("{servers} servers are counted"), LIMIT, || async {
            let page = ApiClient::new(self.operator.ops).request(Method::GET, "metrics").send().await.ok()?;
            let page = page.text().await.ok()?;
            wanted.iter().all(|line| page.contains(line)).then_some(())
        })
        .await;
    }
}

/// The operator's writes to this resource (for example `apps/status`) in the tenant's namespace.
fn status_writes<'a>(
    install: &Installation<'_>,
    requests: &'a [audit::AuditEvent],
    resource: &str,
) -> Vec<&'a audit::AuditEvent> {
    let user = install.operator_account().user_name();
    let written = requests.iter().filter(|event| event.user == user && event.is_write() && event.resource == resource);
    written.filter(|event| event.namespace == install.tenant()).collect()
}

/// Nobody edits the App or the Provider while the provider fails, forgets the client, and recovers.
#[tokio::test]
async fn reachable_follows_the_provider_and_the_app_stays_ready() {
    let corp = provider();
    let upstream = MockProvider::start("oidc", upstream_client(&corp)).await.unwrap();
    let install = install_with_upstream(&upstream).await;
    let pods = install.start_servers(2).await;
    let operator = install.start_operator().await;
    let app = App::new("shop").provider(&corp);
    install.apply_provider(&corp).await.unwrap();
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    assert_eq!(wait_for_reachable(&install, ConditionStatus::True, "Reachable").await, "");

    let plane = install.cluster().plane();
    let mark = plane.audit_mark();
    let mut servers =
        RestartingServers { install: &install, operator: &operator, pods, marker: App::new("bell"), marker_edits: 0 };
    upstream.script(ProviderEndpoint::Discovery, ScriptedResponse::status(503, &json!({})));
    servers.restart(0, Reason::DiscoveryFailed).await;
    let message = wait_for_reachable(&install, ConditionStatus::False, "DiscoveryFailed").await;
    assert!(message.contains("check the issuer"), "{message}");
    // The other server reports the same result, so the operator writes nothing.
    servers.restart(1, Reason::DiscoveryFailed).await;

    upstream.clear_scripts();
    upstream.set_client(RegisteredClient { id: "another".to_owned(), ..upstream_client(&corp) });
    for index in 0..2 {
        servers.restart(index, Reason::ClientRefused).await;
    }
    let message = wait_for_reachable(&install, ConditionStatus::False, "ClientRefused").await;
    assert!(message.contains("check the client ID and the Secret") && !message.contains(corp.secret()), "{message}");

    upstream.set_client(upstream_client(&corp));
    for index in 0..2 {
        servers.restart(index, Reason::Reachable).await;
    }
    wait_for_reachable(&install, ConditionStatus::True, "Reachable").await;
    let requests = plane.audit_since(mark).unwrap();
    let app_writes = status_writes(&install, &requests, "apps/status");
    let app_writes: Vec<_> = app_writes.into_iter().filter(|event| event.name == app.id()).collect();
    assert!(app_writes.is_empty(), "{app_writes:#?}");
    // There is one write for each of the three results, although both servers report each result. While the reports
    // differ, the status contains the worse result.
    let written = status_writes(&install, &requests, "providers/status");
    assert_eq!(written.len(), 3, "{written:#?}\n{}", operator.read_log());
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn wrong_client_credentials_and_a_wrong_issuer_are_reported_until_corrected() {
    let corp = provider();
    let upstream = MockProvider::start("oidc", upstream_client(&corp)).await.unwrap();
    let install = install_with_upstream(&upstream).await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
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
        let message = wait_for_reachable(&install, status, reason).await;
        assert!(!message.contains("made-up") && !message.contains("elsewhere"), "{message}");
        // The condition Reachable does not affect the App's condition Ready.
        install.wait_until_ready(&app).await;
    }
}
