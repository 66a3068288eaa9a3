//! The administration API, an import and webhooks: each caller is a pod with the token of its own ServiceAccount.

mod keycloak;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, ensure};
use kube::api::LogParams;
use latchkey_tests::{
    builders::{App, Webhook},
    service_account::AUDIENCE,
};
use serde_json::{Value, json};

use super::{APP_NAMESPACE, ClusterTest, INSTALL_NAMESPACE, RELEASE, TOOLS_NAMESPACE, condition_status, service_url};
use crate::{
    callers::TOKEN_FOLDER,
    cluster_client::{ClusterClient, retry_until_ok},
    events::{self, Event},
    receiver,
};

/// The label of the pods that the NetworkPolicy allows to call the administration API.
const CALLER_LABEL: &str = "calls-administration";

/// The names of the ServiceAccounts that call the administration API. The importer has the name that docs/import.md
/// uses.
const ADMINISTRATOR: &str = "backoffice";
const IMPORTER: &str = "importer";
const CONSUMER: &str = "sync";
const UNLISTED: &str = "unlisted";

/// The types of the events that the App's webhooks deliver. Only the administrator causes such events. Events of
/// sessions are not delivered, because the load logs in all the time.
const EVENTS: [&str; 4] = ["user.created", "user.password_changed", "user.disabled", "user.deleted"];
/// The types of the events that are delivered for the App with the imported Keycloak users.
const IMPORT_EVENTS: [&str; 2] = [IMPORTED, "session.created"];
const IMPORTED: &str = "users.imported";

/// Time limit for the delivery of events, and for a server's report about a webhook. Servers report every 10 s.
const EVENT_LIMIT: Duration = Duration::from_secs(300);
/// The maximum number of events that an error message lists.
const MAX_PRINTED: usize = 10;

/// The events that the step causes.
struct ExpectedEvents {
    /// The events about one user.
    of_users: Vec<Event>,
    /// The number of imported users. Each batch of the import causes one event, with the number of users in the batch.
    imported: u64,
}

/// Helm arguments: only the pods of this step can call the administration API, and the servers can connect to the
/// receiver, through the proxy. Some network plugins compare the port of the Service, others the port of the pod.
pub(super) fn network_policy_values() -> Vec<String> {
    let tools_namespace = json!({ "matchLabels": { "kubernetes.io/metadata.name": TOOLS_NAMESPACE } });
    let callers = json!({ "matchLabels": { CALLER_LABEL: "true" } });
    let admin_from = json!([{ "namespaceSelector": tools_namespace, "podSelector": callers }]);
    let webhooks = json!({ "to": [{ "namespaceSelector": tools_namespace }], "ports": [443, 8443] });
    [format!("networkPolicy.adminFrom={admin_from}"), format!("networkPolicy.egress.webhooks={webhooks}")]
        .into_iter()
        .flat_map(|value| ["--set-json".to_owned(), value])
        .collect()
}

// === impl ClusterTest ===

impl ClusterTest<'_> {
    pub(super) async fn administer(&mut self) -> Result<()> {
        let export = self.keycloak_export()?;
        let url = format!("https://front.{TOOLS_NAMESPACE}.svc/events");
        let push = Webhook::push("crm", &url, &EVENTS).include_profile();
        let import_push = Webhook::push("crm", &url, &IMPORT_EVENTS).include_profile();
        self.run_pod("receiver", &["receiver", "--key", push.key(), "--key", import_push.key()]).await?;
        for account in [ADMINISTRATOR, IMPORTER, CONSUMER, UNLISTED] {
            let metadata = json!({ "name": account, "namespace": TOOLS_NAMESPACE });
            let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata });
            self.cluster.apply(&account).await?;
        }

        let mut expected = ExpectedEvents { of_users: self.manage_users(&push).await?, imported: 0 };
        let import_app = self.import_users(&export, &import_push, &mut expected).await?;
        self.wait_for_pushed_events(&[&self.app, &import_app], &expected).await?;

        // Removes the administrators and webhooks, so the App needs only documents of format 1 again.
        self.apply_app(&self.app).await?;
        let app = self.app_object().await?;
        ensure!(condition_status(&app, "Delivering").is_empty(), "{}", app["status"]);
        self.assert_no_failures("administrators and webhooks added to the App and removed").await?;
        self.delete_app_with_users(&import_app).await?;
        // Checks again, because an event could have arrived late or a second time since the check above.
        self.check_received_events(&expected).await?;
        self.cluster.delete("v1", "Pod", Some(TOOLS_NAMESPACE), "receiver").await?;
        self.assert_no_failures("another App created, filled with imported users, and deleted with them").await
    }

    /// Adds administrators and webhooks to the App, and calls the administration API. Returns the events that the calls
    /// cause.
    async fn manage_users(&self, push: &Webhook) -> Result<Vec<Event>> {
        let pull = Webhook::pull("sync", TOOLS_NAMESPACE, CONSUMER, &EVENTS);
        let administrators = json!([administrator(ADMINISTRATOR, "UserAdmin")]);
        self.apply_app(&self.app.clone().set("/administrators", administrators).webhook(push).webhook(&pull)).await?;

        let (url, public_url) = (admin_url(), service_url(RELEASE));
        let api = ["--url", &*url, "--app", self.app.id()];
        let events = EVENTS.join(",");
        let consume = [&["consumer"][..], &api, &["--webhook", "sync", "--events", &events]].concat();
        self.run_pod_as("consumer", CONSUMER, &consume).await?;
        self.run_pod_as("unlisted", UNLISTED, &[&["unlisted"][..], &api].concat()).await?;
        let public = ["--public-url", &*public_url, "--inbox", &*self.inbox];
        self.run_pod_as("administrator", ADMINISTRATOR, &[&["administrator"][..], &api, &public].concat()).await?;
        let mut caused = Vec::new();
        for (pod, what) in [
            (
                "administrator",
                "an administrator lists, creates, invites and deletes users; the session of a disabled user ends at \
                 once on every server; an invited user sets a password and logs in",
            ),
            ("unlisted", "an account that is not listed gets 401"),
            ("consumer", "a consumer fetches and acknowledges the events of a pull webhook"),
        ] {
            let (succeeded, log) = self.wait_for_pod_end(pod).await?;
            ensure!(succeeded, "the pod {pod} failed: {log}");
            caused.extend(events::read_caused(&log)?);
            println!("ok     through the Service of the administration API, in a pod: {what}");
        }
        Ok(caused)
    }

    /// Applies the Secrets of an App and then the App, and waits until it is Ready.
    async fn apply_app(&self, app: &App) -> Result<()> {
        for object in app.objects(APP_NAMESPACE).iter().rev() {
            self.cluster.apply(object).await?;
        }
        self.wait_until_ready(app).await?;
        Ok(())
    }

    /// Creates a pod with the token of a ServiceAccount, as docs/callers.md describes.
    pub(super) async fn run_pod_as(&self, name: &str, account: &str, args: &[&str]) -> Result<()> {
        let mut pod = self.pod(name, args);
        pod["metadata"]["labels"][CALLER_LABEL] = json!("true");
        let token = json!({ "path": "token", "audience": AUDIENCE, "expirationSeconds": 3600 });
        let sources = json!([{ "serviceAccountToken": token }]);
        pod["spec"]["serviceAccountName"] = json!(account);
        pod["spec"]["volumes"] = json!([{ "name": "token", "projected": { "sources": sources } }]);
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{ "name": "token", "mountPath": TOKEN_FOLDER, "readOnly": true }]);
        self.create_pod(&pod).await
    }

    /// Waits until the receiver has got the events, and the Apps report the delivery.
    async fn wait_for_pushed_events(&self, apps: &[&App], expected: &ExpectedEvents) -> Result<()> {
        let received =
            retry_until_ok("the receiver gets the events", EVENT_LIMIT, || self.check_received_events(expected))
                .await?;
        for app in apps {
            retry_until_ok("the condition Delivering is True", EVENT_LIMIT, || async {
                let app = self.object_of(app).await?;
                ensure!(condition_status(&app, "Delivering") == "True", "{}", app["status"]);
                Ok(())
            })
            .await?;
        }
        println!(
            "ok     push webhooks deliver {received} events to a pod, signed, each id once, through TLS of the test's \
             CA: Delivering is True"
        );
        Ok(())
    }

    /// Asserts that the receiver has got these events and no other, each of them once. Returns their number.
    ///
    /// A webhook delivers an event at least once: if the response of the receiver is lost, the webhook delivers the
    /// event again. This test loses no responses, so here each id arrives once.
    async fn check_received_events(&self, expected: &ExpectedEvents) -> Result<usize> {
        let log = self.cluster.pods(TOOLS_NAMESPACE).logs("receiver", &LogParams::default()).await?;
        let invalid: Vec<_> = log.lines().filter(|line| line.contains(receiver::INVALID)).take(MAX_PRINTED).collect();
        ensure!(invalid.is_empty(), "{invalid:#?}");
        let received = events::read_accepted(&log)?;
        // How much more often an event was received than expected.
        let mut excess: BTreeMap<&Event, i64> = BTreeMap::new();
        for event in &expected.of_users {
            *excess.entry(event).or_default() -= 1;
        }
        for received in received.iter().filter(|received| received.event.event_type != IMPORTED) {
            *excess.entry(&received.event).or_default() += 1;
        }
        excess.retain(|_, excess| *excess != 0);
        let some: Vec<_> = excess.iter().take(MAX_PRINTED).collect();
        ensure!(some.is_empty(), "{} events are missing (below 0) or unexpected, such as {some:#?}", excess.len());
        let imports = received.iter().filter(|received| received.event.event_type == IMPORTED);
        let imported: u64 = imports.map(|received| received.created).sum();
        ensure!(imported == expected.imported, "the events {IMPORTED} count {imported} of {} users", expected.imported);
        Ok(received.len())
    }
}

/// Removes the finalizer from the App that got the imported users. An earlier run that failed can have left the
/// finalizer. Only an operator would remove it, and the clean-up has uninstalled the operator.
pub(super) async fn remove_finalizers(cluster: &ClusterClient) {
    let change = json!({ "metadata": { "finalizers": null } });
    // Usually the App, or even its definition, does not exist.
    drop(cluster.merge_patch("latchkey.dev/v1alpha1", "App", (APP_NAMESPACE, keycloak::APP_ID), &change).await);
}

/// An entry of `spec.administrators`.
fn administrator(account: &str, role: &str) -> Value {
    json!({ "serviceAccount": { "namespace": TOOLS_NAMESPACE, "name": account }, "role": role })
}

/// URL of the administration API.
pub(super) fn admin_url() -> String {
    format!("http://{RELEASE}-server-admin.{INSTALL_NAMESPACE}.svc:8081")
}
