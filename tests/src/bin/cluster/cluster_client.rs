//! Access to the cluster: Helm, kubectl, and objects of any kind.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use http::{Method, Request};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use latchkey_tests::{control_plane, process, tls};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, sleep},
};

const POLL_INTERVAL: Duration = Duration::from_millis(200);
const COMMAND_LIMIT: Duration = Duration::from_secs(600);

pub(crate) struct ClusterClient {
    pub(crate) client: Client,
    helm: PathBuf,
}

/// Calls `attempt` until it succeeds. After `limit`, returns an error that contains the error of the last attempt.
pub(crate) async fn retry_until_ok<T, F>(what: &str, limit: Duration, mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let end = Instant::now() + limit;
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > end => {
                return Err(error.context(format!("{what}: not within {limit:?}")));
            }
            Err(_) => sleep(POLL_INTERVAL).await,
        }
    }
}

/// Runs a command with this standard input, and returns its standard output.
async fn run_command<I>(program: &Path, args: I, input: &str) -> Result<String>
where
    I: IntoIterator<Item: AsRef<str>>,
{
    let args: Vec<String> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    let mut command = tokio::process::Command::new(program);
    command.args(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = async {
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take().context("standard input is a pipe")?;
        // Reads the output at the same time, because the command can stop reading its input until its output is read.
        let write = async move {
            let written = stdin.write_all(input.as_bytes()).await;
            // Closes standard input.
            drop(stdin);
            written
        };
        let (written, output) = tokio::join!(write, child.wait_with_output());
        anyhow::Ok((written, output?))
    };
    let output = tokio::time::timeout(COMMAND_LIMIT, output).await;
    let (written, output) = output.context("a command runs for too long")??;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{} {}: {stdout}{}", program.display(), args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    // This error is reported only if the command succeeded: the error of a failed command says more.
    written.with_context(|| format!("{} did not read its input", program.display()))?;
    Ok(stdout)
}

// === impl ClusterClient ===

impl ClusterClient {
    /// Connects to the cluster of `KUBECONFIG`.
    pub(crate) async fn connect() -> Result<Self> {
        tls::install_crypto_provider();
        let mut config = Config::infer().await.context("no cluster: set KUBECONFIG")?;
        // The client must not retry, so that the test sees every failed request.
        config.default_retry = false;
        Ok(Self { client: Client::try_from(config)?, helm: control_plane::helm()? })
    }

    pub(crate) async fn helm<I>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item: AsRef<str>>,
    {
        run_command(&self.helm, args, "").await
    }

    /// Runs the `kubectl` that the other tests use, whatever the version of the cluster.
    pub(crate) async fn kubectl<I>(&self, args: I) -> Result<String>
    where
        I: IntoIterator<Item: AsRef<str>>,
    {
        self.kubectl_with_input(args, "").await
    }

    /// As [`Self::kubectl`], with this standard input.
    pub(crate) async fn kubectl_with_input<I>(&self, args: I, input: &str) -> Result<String>
    where
        I: IntoIterator<Item: AsRef<str>>,
    {
        run_command(&control_plane::kubectl()?, args, input).await
    }

    pub(crate) fn chart() -> String {
        process::root().join("charts/latchkey").display().to_string()
    }

    /// Replaces words in the text of a manifest, and applies the manifest's objects in this namespace. `replacements`
    /// are pairs of a word and its replacement.
    pub(crate) async fn apply_file(&self, path: &Path, namespace: &str, replacements: &[(&str, &str)]) -> Result<()> {
        let mut text = std::fs::read_to_string(process::root().join(path))?;
        for (word, replacement) in replacements {
            ensure!(text.contains(word), "{} does not contain {word}", path.display());
            text = text.replace(word, replacement);
        }
        for document in serde_yaml::Deserializer::from_str(&text) {
            let mut object = Value::deserialize(document)?;
            object["metadata"]["namespace"] = json!(namespace);
            self.apply(&object).await?;
        }
        Ok(())
    }

    pub(crate) async fn apply(&self, object: &Value) -> Result<()> {
        latchkey_tests::cluster::apply(&self.client, object).await?;
        Ok(())
    }

    /// An object of any kind; null if it does not exist.
    pub(crate) async fn get(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Value> {
        let api = self.api(api_version, kind, namespace)?;
        Ok(serde_json::to_value(api.get_opt(name).await?)?)
    }

    pub(crate) async fn list(
        &self,
        api_version: &str,
        kind: &str,
        namespace: &str,
        fields: &str,
    ) -> Result<Vec<Value>> {
        let api = self.api(api_version, kind, Some(namespace))?;
        let found = api.list(&ListParams::default().fields(fields)).await?;
        Ok(found.items.into_iter().map(serde_json::to_value).collect::<Result<_, _>>()?)
    }

    pub(crate) async fn delete(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<()> {
        let api = self.api(api_version, kind, namespace)?;
        match api.delete(name, &Default::default()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes an object and waits until it no longer exists.
    pub(crate) async fn delete_and_wait(
        &self,
        api_version: &str,
        kind: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<()> {
        self.delete(api_version, kind, namespace, name).await?;
        retry_until_ok(&format!("{kind} {name} is deleted"), Duration::from_secs(180), || async {
            let object = self.get(api_version, kind, namespace, name).await?;
            ensure!(object.is_null(), "it still exists");
            Ok(())
        })
        .await
    }

    pub(crate) async fn merge_patch(
        &self,
        api_version: &str,
        kind: &str,
        (namespace, name): (&str, &str),
        patch: &Value,
    ) -> Result<()> {
        let api = self.api(api_version, kind, Some(namespace))?;
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    pub(crate) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Sends a GET request to the API server. For example, the path can lead to a port of a pod or to the statistics of
    /// a node.
    pub(crate) async fn get_path(&self, path: &str) -> Result<Value> {
        let request = Request::builder().method(Method::GET).uri(path).body(Vec::new())?;
        Ok(serde_json::from_str(&self.client.request_text(request).await?)?)
    }

    /// Waits until a Deployment is rolled out and no old pod is left. If `replicas` is set, also waits for this number
    /// of pods.
    pub(crate) async fn wait_for_rollout(&self, namespace: &str, name: &str, replicas: Option<i64>) -> Result<()> {
        retry_until_ok(&format!("the Deployment {name} is rolled out"), Duration::from_secs(300), || async {
            let deployment = self.get("apps/v1", "Deployment", Some(namespace), name).await?;
            let wanted = deployment["spec"]["replicas"].as_i64().context("the Deployment does not exist")?;
            let status = &deployment["status"];
            let count = |field: &str| status[field].as_i64().unwrap_or(0);
            ensure!(status["observedGeneration"] == deployment["metadata"]["generation"], "not observed yet");
            ensure!(replicas.is_none_or(|replicas| replicas == wanted), "its spec has {wanted} replicas");
            let counts =
                (count("replicas"), count("updatedReplicas"), count("availableReplicas"), count("terminatingReplicas"));
            ensure!(counts == (wanted, wanted, wanted, 0), "{status}");
            let labels = deployment["spec"]["selector"]["matchLabels"].as_object().context("labels")?;
            let labels: Vec<_> =
                labels.iter().map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default())).collect();
            let pods = self.pods(namespace).list(&ListParams::default().labels(&labels.join(","))).await?;
            ensure!(i64::try_from(pods.items.len())? == wanted, "{} pods exist", pods.items.len());
            let ending = pods.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
            ensure!(ending == 0, "{ending} pods are ending");
            Ok(())
        })
        .await
    }

    fn api(&self, api_version: &str, kind: &str, namespace: Option<&str>) -> Result<Api<DynamicObject>> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Ok(match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        })
    }
}
