//! The administration API, an import and webhooks: each caller is a pod with the token of its own ServiceAccount.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::api::LogParams;
use latchkey_tests::{
    builders::{App, Webhook},
    dex::DEX_PASSWORD_HASH,
    process,
    service_account::AUDIENCE,
};
use serde_json::{Value, json};

use super::{APP_NAMESPACE, ClusterTest, INSTALL_NAMESPACE, RELEASE, TOOLS_NAMESPACE, condition_status, service_url};
use crate::{callers::TOKEN_FOLDER, cluster_client::retry_until_ok, receiver};

/// The label of the pods that the NetworkPolicy allows to call the administration API.
const CALLER_LABEL: &str = "calls-administration";

/// ServiceAccounts. The importer has the name that docs/import.md uses.
const ADMINISTRATOR: &str = "backoffice";
const IMPORTER: &str = "importer";
const CONSUMER: &str = "sync";
const UNLISTED: &str = "unlisted";

/// `external_id` of the imported user.
const IMPORTED: &str = "crm:1815";
const PUSHED_EVENTS: [&str; 3] = ["user.created", "user.disabled", "user.deleted"];
const PULLED_EVENTS: [&str; 4] = ["users.imported", "user.created", "user.disabled", "user.deleted"];

/// Limit for the delivery of events, and for the report of a server about a webhook, which it makes every 10 s.
const EVENT_LIMIT: Duration = Duration::from_secs(60);

/// Helm arguments: only the pods of this step can call the administration API, and the servers can connect to the
/// receiver, through the proxy. Some networks compare the port of the Service, others that of the pod.
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
        let push = format!("https://front.{TOOLS_NAMESPACE}.svc/events");
        let push = Webhook::push("crm", &push, &PUSHED_EVENTS).include_profile();
        let pull = Webhook::pull("sync", TOOLS_NAMESPACE, CONSUMER, &PULLED_EVENTS);
        self.run_pod("receiver", &["receiver", "--key", push.key()]).await?;
        for account in [ADMINISTRATOR, IMPORTER, CONSUMER, UNLISTED] {
            let metadata = json!({ "name": account, "namespace": TOOLS_NAMESPACE });
            let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata });
            self.cluster.apply(&account).await?;
        }
        let administrator = |name: &str, role: &str| {
            let account = json!({ "namespace": TOOLS_NAMESPACE, "name": name });
            json!({ "serviceAccount": account, "role": role })
        };
        let administrators = json!([administrator(ADMINISTRATOR, "UserAdmin"), administrator(IMPORTER, "Importer")]);
        self.apply_app(&self.app.clone().set("/administrators", administrators).webhook(&push).webhook(&pull)).await?;

        let (url, public_url) = (admin_url(), service_url(RELEASE));
        let api = ["--url", &*url, "--app", self.app.id()];
        let events = PULLED_EVENTS.join(",");
        let consume = [&["consumer"][..], &api, &["--webhook", "sync", "--events", &events]].concat();
        self.run_pod_as("consumer", CONSUMER, &consume).await?;
        self.run_pod_as("unlisted", UNLISTED, &[&["unlisted"][..], &api].concat()).await?;
        self.import().await?;
        let administer =
            [&["administrator"][..], &api, &["--public-url", &public_url, "--imported", IMPORTED]].concat();
        self.run_pod_as("administrator", ADMINISTRATOR, &administer).await?;
        for (pod, what) in [
            ("administrator", "an administrator finds, creates, disables and deletes users; an imported user logs in"),
            ("unlisted", "an account that is not listed gets 401"),
            ("consumer", "a consumer fetches and acknowledges the events of a pull webhook"),
        ] {
            let (succeeded, log) = self.wait_for_pod_end(pod).await?;
            ensure!(succeeded, "the pod {pod} failed: {log}");
            println!("ok     through the Service of the administration API, in a pod: {what}");
        }
        self.wait_for_pushed_events().await?;

        // The App needs only documents of format 1 again.
        self.apply_app(&self.app).await?;
        let app = self.app_object().await?;
        ensure!(condition_status(&app, "Delivering").is_empty(), "{}", app["status"]);
        self.cluster.delete("v1", "Pod", Some(TOOLS_NAMESPACE), "receiver").await?;
        self.assert_no_failures("administrators and webhooks added to the App and removed").await
    }

    /// Applies the Secrets of an App and then the App, and waits until it is Ready.
    async fn apply_app(&self, app: &App) -> Result<()> {
        for object in app.objects(APP_NAMESPACE).iter().rev() {
            self.cluster.apply(object).await?;
        }
        self.wait_until_app_ready().await?;
        Ok(())
    }

    /// Creates a pod with the token of a ServiceAccount, as docs/callers.md describes.
    async fn run_pod_as(&self, name: &str, account: &str, args: &[&str]) -> Result<()> {
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

    /// Imports a user with `kubectl run`, and with the pod that docs/import.md shows.
    async fn import(&self) -> Result<()> {
        let docs = std::fs::read_to_string(process::root().join("docs/import.md"))?;
        let mut blocks = docs.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next());
        let pod = blocks.find(|block| block.contains("serviceAccountName")).context("docs/import.md has a pod")?;
        let mut overrides = pod.to_owned();
        for (word, replacement) in [
            ("\"keycloak\"", "\"ndjson\"".to_owned()),
            ("\"shop\"", format!("\"{}\"", self.app.id())),
            ("http://latchkey-server-admin.latchkey.svc:8081", admin_url()),
        ] {
            ensure!(overrides.contains(word), "the pod in docs/import.md does not contain {word}");
            overrides = overrides.replace(word, &replacement);
        }
        self.cluster.delete_and_wait("v1", "Pod", Some(TOOLS_NAMESPACE), "import").await?;
        let command = ["-n", TOOLS_NAMESPACE, "run", "import", "--rm", "--stdin", "--restart=Never"].map(String::from);
        let options = [
            format!("--image={}", self.image("latchkey-server")),
            format!("--labels={CALLER_LABEL}=true"),
            format!("--overrides={overrides}"),
            "--override-type=strategic".to_owned(),
        ];
        let user: Value = json!({
            "external_id": IMPORTED, "email": "imported@example.com", "email_verified": true, "name": "Ada",
            "password_hash": DEX_PASSWORD_HASH,
        });
        // The exit status is that of the import. Its output can be incomplete, because the pod ends at once.
        self.cluster.kubectl_with_input(command.into_iter().chain(options), &format!("{user}\n")).await?;
        println!("ok     an import with the pod of docs/import.md");
        Ok(())
    }

    /// Waits until the receiver has got the events, and the App reports that they are delivered.
    async fn wait_for_pushed_events(&self) -> Result<()> {
        retry_until_ok("the receiver gets the events", EVENT_LIMIT, || async {
            let log = self.cluster.pods(TOOLS_NAMESPACE).logs("receiver", &LogParams::default()).await?;
            let missing: Vec<_> =
                PUSHED_EVENTS.into_iter().filter(|type_| !log.contains(&receiver::signed(type_))).collect();
            ensure!(missing.is_empty() && !log.contains("INVALID"), "no {missing:?} in {log}");
            Ok(())
        })
        .await?;
        retry_until_ok("the condition Delivering is True", EVENT_LIMIT, || async {
            let app = self.app_object().await?;
            ensure!(condition_status(&app, "Delivering") == "True", "{}", app["status"]);
            Ok(())
        })
        .await?;
        println!(
            "ok     a push webhook delivers signed events to a pod, through TLS of the test's CA: Delivering is True"
        );
        Ok(())
    }
}

/// URL of the administration API.
fn admin_url() -> String {
    format!("http://{RELEASE}-server-admin.{INSTALL_NAMESPACE}.svc:8081")
}
