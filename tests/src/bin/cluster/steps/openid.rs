//! An application behind oauth2-proxy: an App with pages, a Client in another namespace, and the operator's Secret in the
//! pods of oauth2-proxy.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use kube::api::LogParams;
use latchkey_tests::builders::{App, Client};
use serde_json::{Value, json};

use super::{
    APP_NAMESPACE, ClusterTest, HOST, READY_LIMIT, TOOLS_NAMESPACE, administration::admin_url, condition_status,
};
use crate::{
    callers::openid_users::{FAILED, SIGNED_IN},
    cluster_client::retry_until_ok,
};

const APP_ID: &str = "cluster-test-openid";
/// The name of the Client and of the Deployment.
const NAME: &str = "oauth2-proxy";
/// The name of the Secret that the operator creates for the Client.
const SECRET: &str = "oauth2-proxy-oidc";
const APPLICATION: &str = "https://behind.example.com/";
const ADMINISTRATOR: &str = "openid-administrator";
const USERS_POD: &str = "openid-users";
/// The number of logins to wait for: before the secret is rotated, before oauth2-proxy restarts, and after that.
const LOGINS: usize = 10;
/// Time limit for [`LOGINS`] logins.
const LOGINS_LIMIT: Duration = Duration::from_secs(120);
const ROTATE_SECRET_ANNOTATION: &str = "latchkey.dev/rotate-secret";

// === impl ClusterTest ===

impl ClusterTest<'_> {
    pub(super) async fn sign_in_with_openid(&mut self) -> Result<()> {
        let app = self.create_openid_app().await?;
        let client = Client::web(NAME, &app, &format!("{APPLICATION}oauth2/callback"))
            .namespace(TOOLS_NAMESPACE)
            .set("/appRef", json!({ "name": APP_ID, "namespace": APP_NAMESPACE }))
            .set("/scopes", json!(["openid", "email", "groups"]));
        self.cluster.apply(&client.object(TOOLS_NAMESPACE)).await?;
        self.wait_until_client_ready().await?;
        let first = self.client_secret().await?;
        println!("ok     a Client in another namespace is Ready, and the operator has made its Secret");

        self.install_oauth2_proxy().await?;
        let front = self.cluster.get("v1", "Service", Some(TOOLS_NAMESPACE), "front").await?;
        let front = front["spec"]["clusterIP"].as_str().context("a Service has an address")?;
        let (api, provider) = (admin_url(), format!("https://{HOST}"));
        let users = ["openid-users", "--url", &api, "--app", APP_ID, "--front", front];
        let urls = ["--application", APPLICATION, "--provider", &provider];
        self.run_pod_as(USERS_POD, ADMINISTRATOR, &[&users[..], &urls].concat()).await?;
        let log = self.wait_for_logins(0).await?;
        ensure!(log.contains("a user of another group is refused"), "{log}");
        println!("ok     oauth2-proxy lets a user of the group through to NGINX, and refuses a user of another group");

        // The pods of oauth2-proxy have the previous secret until they are replaced.
        self.cluster.apply(&client.annotate(ROTATE_SECRET_ANNOTATION, "1").object(TOOLS_NAMESPACE)).await?;
        retry_until_ok("the Secret has a new value", READY_LIMIT, || async {
            ensure!(self.client_secret().await? != first, "the value is the old one");
            Ok(())
        })
        .await?;
        self.wait_until_client_ready().await?;
        let log = self.wait_for_logins(login_count(&log)).await?;
        self.cluster.kubectl(["-n", TOOLS_NAMESPACE, "rollout", "restart", &format!("deployment/{NAME}")]).await?;
        self.cluster.wait_for_rollout(TOOLS_NAMESPACE, NAME, Some(2)).await?;
        let log = self.wait_for_logins(login_count(&log)).await?;
        let failed: Vec<&str> = log.lines().filter(|line| line.starts_with(FAILED)).collect();
        ensure!(failed.is_empty(), "{failed:#?}");
        println!("ok     the secret of a Client is rotated under load: 0 of {} logins failed", login_count(&log));

        self.cluster.delete("v1", "Pod", Some(TOOLS_NAMESPACE), USERS_POD).await?;
        for name in [NAME, "behind"] {
            self.cluster.delete("apps/v1", "Deployment", Some(TOOLS_NAMESPACE), name).await?;
        }
        self.cluster.delete_and_wait("latchkey.dev/v1alpha1", "Client", Some(TOOLS_NAMESPACE), NAME).await?;
        self.delete_app_with_users(&app).await?;
        self.assert_no_failures("an App with pages and a Client created and deleted").await
    }

    /// An App with pages, which accepts Clients of the namespace of the tools.
    async fn create_openid_app(&self) -> Result<App> {
        let metadata = json!({ "name": ADMINISTRATOR, "namespace": TOOLS_NAMESPACE });
        self.cluster.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata })).await?;
        let account = json!({ "namespace": TOOLS_NAMESPACE, "name": ADMINISTRATOR });
        let granted = json!({ "matchLabels": { "kubernetes.io/metadata.name": TOOLS_NAMESPACE } });
        let app = App::with_id(APP_ID)
            .set("/deletionPolicy", "Delete")
            .set("/pages/mode", "Enabled")
            .set("/administrators", json!([{ "serviceAccount": account, "role": "UserAdmin" }]))
            .set("/clients/namespaces", json!({ "from": "Selector", "selector": granted }))
            .limit("loginsPerClient", &[(100_000, 60)])
            .limit("authorizationsPerClientAddress", &[(100_000, 60)]);
        for object in app.objects(APP_NAMESPACE) {
            self.cluster.apply(&object).await?;
        }
        self.wait_until_ready(&app).await?;
        Ok(app)
    }

    async fn install_oauth2_proxy(&self) -> Result<()> {
        let front = self.cluster.get("v1", "Service", Some(TOOLS_NAMESPACE), "front").await?;
        let front = front["spec"]["clusterIP"].as_str().context("a Service has an address")?;
        let (nginx, proxy) = (self.image("nginx"), self.image(NAME));
        let images = [("docker.io/library/nginx:1.29", &*nginx), ("quay.io/oauth2-proxy/oauth2-proxy:v7.8.1", &*proxy)];
        let images = if self.options.own_stores { images.as_slice() } else { &[] };
        let replaced = [&[("192.0.2.1", front)][..], images].concat();
        self.cluster.apply_file(Path::new("tests/manifests/openid.yaml"), TOOLS_NAMESPACE, &replaced).await?;
        self.cluster.wait_for_rollout(TOOLS_NAMESPACE, "behind", Some(1)).await?;
        self.cluster.wait_for_rollout(TOOLS_NAMESPACE, NAME, Some(2)).await
    }

    async fn wait_until_client_ready(&self) -> Result<()> {
        retry_until_ok("the Client is Ready", READY_LIMIT, || async {
            let client = self.cluster.get("latchkey.dev/v1alpha1", "Client", Some(TOOLS_NAMESPACE), NAME).await?;
            ensure!(condition_status(&client, "Ready") == "True", "{}", client["status"]);
            ensure!(client["status"]["observedGeneration"] == client["metadata"]["generation"], "not observed yet");
            Ok(())
        })
        .await
    }

    /// The client secret in the Secret [`SECRET`], in base64.
    async fn client_secret(&self) -> Result<Value> {
        let secret = self.cluster.get("v1", "Secret", Some(TOOLS_NAMESPACE), SECRET).await?;
        ensure!(secret["type"] == "latchkey.dev/client", "the Secret is {}", secret["type"]);
        let value = secret["data"]["client-secret"].clone();
        ensure!(value.is_string(), "the Secret has no client-secret");
        Ok(value)
    }

    /// Waits until the log of the pod has [`LOGINS`] more logins than `before`. Returns the log.
    async fn wait_for_logins(&self, before: usize) -> Result<String> {
        retry_until_ok("more logins", LOGINS_LIMIT, || async {
            let log = self.cluster.pods(TOOLS_NAMESPACE).logs(USERS_POD, &LogParams::default()).await?;
            ensure!(login_count(&log) >= before + LOGINS, "the log is {log}");
            Ok(log)
        })
        .await
    }
}

/// The number of logins in the log of the pod [`USERS_POD`], including failed logins.
fn login_count(log: &str) -> usize {
    log.lines().filter(|line| *line == SIGNED_IN || line.starts_with(FAILED)).count()
}
