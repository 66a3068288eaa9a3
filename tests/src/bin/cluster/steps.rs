//! The steps of the cluster test, in order. Each step prints its result.

mod administration;
mod openid;

use std::{
    cell::Cell,
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use clap::ValueEnum;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, EvictParams, ListParams, LogParams};
use latchkey_crds::names::{RENDERED_APP_KEY, RENDERED_APP_TYPE};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    passwords::PASSWORD,
    process,
    tls::CertificateAuthority,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    cluster_client::{ClusterClient, retry_until_ok},
    load::Counts,
    reach,
    scenario::{PROVIDER_NAME, REDIRECT_URL},
};

#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// Prefix of the images: `PREFIX/latchkey-server:VERSION` and so on.
    #[arg(long, default_value = "localhost/latchkey")]
    image_prefix: String,
    #[arg(long)]
    version: String,
    /// Older version, which the test installs first and then upgrades. Its images must exist too.
    #[arg(long, requires = "from_chart")]
    from_version: Option<String>,
    /// The chart of the version in `--from-version`.
    #[arg(long)]
    from_chart: Option<PathBuf>,
    /// Version that the last upgrade installs. This version has one more migration.
    #[arg(long)]
    next_version: Option<String>,
    /// Instead of the public images of Postgres, Redis, NGINX and Dex, use images with `--image-prefix` and
    /// `--version`.
    #[arg(long)]
    own_stores: bool,
    /// Folder with the archives of the images. The test prints the sizes of the archives.
    #[arg(long)]
    archives: Option<PathBuf>,
    /// The export of Keycloak that the step `administration` imports, as import/tests/fixtures/keycloak/generate writes
    /// it. Default: the file of the realm in that folder.
    #[arg(long, value_name = "FILE")]
    keycloak_export: Option<PathBuf>,
    /// Run only this step after the installation.
    #[arg(long, value_enum)]
    only: Option<Step>,
}

/// The steps that run under load, in order, and then [`Step::Reinstall`], which stops the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    Administration,
    Openid,
    Scale,
    Deletion,
    Evictions,
    OperatorAway,
    Migration,
    Autoscaler,
    Kill,
    Reinstall,
}

/// Namespace of the installation.
const INSTALL_NAMESPACE: &str = "latchkey-cluster-test";
/// Namespace of the App and its Provider.
const APP_NAMESPACE: &str = "latchkey-cluster-test-shop";
/// Namespace of the other programs: the load, the users, the inbox, the proxy and the provider.
const TOOLS_NAMESPACE: &str = "latchkey-cluster-test-around";
const RELEASE: &str = "latchkey";
/// The name of the release after the reinstall.
const OTHER_RELEASE: &str = "again-latchkey";
const HOST: &str = "auth.example.com";
const EMAIL: &str = "load@example.com";

const READY_LIMIT: Duration = Duration::from_secs(180);
const POD_LIMIT: Duration = Duration::from_secs(180);
/// How long the load continues after a change before the failed requests are counted.
const SETTLE_TIME: Duration = Duration::from_secs(3);

/// The proxy in front of the servers' Service.
struct Proxy {
    /// IP address of the proxy's own Service.
    address: String,
    /// CIDR that contains only the IP address of the proxy's pod.
    network: String,
}

struct ClusterTest<'a> {
    options: &'a RunArgs,
    cluster: ClusterClient,
    app: App,
    /// The text (NOTES) that Helm printed after the first install.
    notes: String,
    /// URL of the inbox, with an IP address.
    inbox: String,
    /// Number of requests that failed because of [`Step::Kill`].
    kill_failures: u64,
}

pub(crate) async fn run(options: &RunArgs) -> Result<()> {
    let cluster = ClusterClient::connect().await?;
    // Raises the App's rate limits, so that the test does not reach them within its few minutes.
    let app = App::with_id("cluster-test-shop")
        .set("/redirectURLs", json!([REDIRECT_URL]))
        .limit("loginsPerClient", &[(100_000, 60)])
        .limit("registrationsPerClient", &[(100_000, 60)])
        .limit("mailsPerRecipient", &[(100, 60)])
        .limit("codesPerClient", &[(100, 60)]);
    let mut test = ClusterTest { options, cluster, app, notes: String::new(), inbox: String::new(), kill_failures: 0 };
    test.clean_up().await?;
    let outcome = test.run_steps().await;
    if let Err(error) = &outcome {
        println!("FAILED {error:#}");
        test.print_state().await;
        return outcome;
    }
    test.clean_up().await
}

// === impl ClusterTest ===

impl ClusterTest<'_> {
    async fn run_steps(&mut self) -> Result<()> {
        let only = self.options.only;
        self.print_image_sizes()?;
        self.install_stores().await?;
        self.install().await?;
        self.create_app().await?;
        if only.is_none() {
            self.run_scenario("first", RELEASE, &[]).await?;
            self.helm_test(RELEASE).await?;
            self.print_measurements().await?;
        }
        self.install_inbox().await?;
        let front = self.install_front().await?;
        self.start_load().await?;
        self.change_settings(&front).await?;
        if only.is_none() {
            let inbox = ["--inbox", &*self.inbox];
            self.run_scenario("mails", RELEASE, &inbox).await?;
            let front_args = ["--front", &front.address];
            self.run_scenario("front", RELEASE, &[&inbox[..], &front_args].concat()).await?;
            self.check_network_policies().await?;
        }
        for step in Step::value_variants() {
            if only.is_none_or(|only| only == *step) {
                self.run_step(*step).await?;
            }
        }
        Ok(())
    }

    async fn run_step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Administration => self.administer().await,
            Step::Openid => self.sign_in_with_openid().await,
            Step::Scale => self.scale_servers().await,
            Step::Deletion => self.delete_pod().await,
            Step::Evictions => self.evict_pods().await,
            Step::OperatorAway => self.scale_operator_to_zero().await,
            Step::Migration => self.upgrade_with_migration().await,
            Step::Autoscaler => self.enable_autoscaler().await,
            Step::Kill => self.kill_pod().await,
            Step::Reinstall => self.reinstall().await,
        }
    }

    // --- Preparation

    /// Removes everything that this run or an earlier one has created.
    async fn clean_up(&self) -> Result<()> {
        for release in [RELEASE, OTHER_RELEASE] {
            // An error is ignored: if the uninstall leaves something, the next install fails and reports it.
            drop(
                self.cluster
                    .helm(["uninstall", release, "--namespace", INSTALL_NAMESPACE, "--wait", "--ignore-not-found"])
                    .await,
            );
        }
        administration::remove_finalizers(&self.cluster).await;
        for namespace in [APP_NAMESPACE, TOOLS_NAMESPACE, INSTALL_NAMESPACE] {
            self.cluster.delete_and_wait("v1", "Namespace", None, namespace).await?;
        }
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev", "clients.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            self.cluster.delete_and_wait(version, kind, None, definition).await?;
        }
        Ok(())
    }

    fn print_image_sizes(&self) -> Result<()> {
        for program in ["latchkey-operator", "latchkey-server"] {
            if let Some(folder) = &self.options.archives {
                let bytes = folder.join(format!("{program}.tar")).metadata()?.len();
                println!("figure the image of {program}: {:.1} MB", bytes as f64 / 1e6);
            }
        }
        Ok(())
    }

    async fn install_stores(&self) -> Result<()> {
        for namespace in [INSTALL_NAMESPACE, APP_NAMESPACE, TOOLS_NAMESPACE] {
            let labels = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
            let metadata = json!({ "name": namespace, "labels": labels });
            self.cluster.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata })).await?;
        }
        let (postgres, redis) = (self.image("postgres"), self.image("redis"));
        let replaced = [("docker.io/library/postgres:17", &*postgres), ("docker.io/library/redis:8", &*redis)];
        let replaced = if self.options.own_stores { replaced.as_slice() } else { &[] };
        self.cluster.apply_file(Path::new("tests/manifests/stores.yaml"), INSTALL_NAMESPACE, replaced).await?;
        for store in ["latchkey-postgres", "latchkey-redis"] {
            self.cluster.wait_for_rollout(INSTALL_NAMESPACE, store, Some(1)).await?;
        }
        println!("ok     Postgres and Redis of tests/manifests/stores.yaml run under `restricted`");
        Ok(())
    }

    // --- Installation

    fn image(&self, name: &str) -> String {
        format!("{}/{name}:{}", self.options.image_prefix, self.options.version)
    }

    /// The Helm arguments for the values without a default, and for the images of this version.
    fn required_values(&self, version: &str) -> Vec<String> {
        let args = [format!("baseURL=https://{HOST}")]
            .into_iter()
            .chain(
                ["database.existingSecret=latchkey-postgres", "redis.existingSecret=latchkey-redis"].map(String::from),
            )
            .flat_map(|value| ["--set".to_owned(), value]);
        let repositories = ["operator", "server"].into_iter().flat_map(|component| {
            let repository = format!("{}/latchkey-{component}", self.options.image_prefix);
            ["--set".to_owned(), format!("{component}.image.repository={repository}")]
        });
        args.chain(repositories).chain(image_tags(version)).collect()
    }

    async fn install(&mut self) -> Result<()> {
        let began = Instant::now();
        let chart = match &self.options.from_chart {
            Some(chart) => chart.display().to_string(),
            None => ClusterClient::chart(),
        };
        let version = self.options.from_version.as_ref().unwrap_or(&self.options.version);
        let args = ["install", RELEASE, &chart, "--namespace", INSTALL_NAMESPACE, "--wait", "--timeout", "5m"]
            .map(String::from);
        self.notes = self.cluster.helm(args.into_iter().chain(self.required_values(version))).await?;
        ensure!(self.notes.contains("Next steps"), "{}", self.notes);
        let took = began.elapsed().as_secs_f32();
        println!("ok     helm install of {version} with baseURL, Postgres and Redis only ({took:.0} s)");
        Ok(())
    }

    async fn helm_upgrade<S: AsRef<str>>(&self, extra_args: &[S]) -> Result<()> {
        let chart = ClusterClient::chart();
        let args = ["upgrade", RELEASE, &*chart, "--namespace", INSTALL_NAMESPACE, "--reset-then-reuse-values"];
        self.cluster.helm(args.into_iter().chain(extra_args.iter().map(AsRef::as_ref))).await?;
        Ok(())
    }

    async fn wait_for_server_rollout(&self, replicas: Option<i64>) -> Result<()> {
        self.cluster.wait_for_rollout(INSTALL_NAMESPACE, &format!("{RELEASE}-server"), replicas).await
    }

    async fn helm_test(&self, release: &str) -> Result<()> {
        self.cluster.helm(["test", release, "--namespace", INSTALL_NAMESPACE, "--timeout", "3m"]).await?;
        println!("ok     helm test {release}");
        Ok(())
    }

    async fn create_app(&self) -> Result<()> {
        let began = Instant::now();
        for object in self.app.objects(APP_NAMESPACE) {
            self.cluster.apply(&object).await?;
        }
        self.wait_until_app_ready().await?;
        println!("ok     the App is Ready ({:.1} s)", began.elapsed().as_secs_f32());
        Ok(())
    }

    async fn wait_until_app_ready(&self) -> Result<Value> {
        self.wait_until_ready(&self.app).await
    }

    async fn wait_until_ready(&self, app: &App) -> Result<Value> {
        retry_until_ok(&format!("the App {} is Ready", app.id()), READY_LIMIT, || async {
            let app = self.object_of(app).await?;
            ensure!(condition_status(&app, "Ready") == "True", "{}", app["status"]);
            ensure!(app["status"]["observedGeneration"] == app["metadata"]["generation"], "not observed yet");
            Ok(app)
        })
        .await
    }

    async fn app_object(&self) -> Result<Value> {
        self.object_of(&self.app).await
    }

    async fn object_of(&self, app: &App) -> Result<Value> {
        let object = self.cluster.get("latchkey.dev/v1alpha1", "App", Some(APP_NAMESPACE), app.id()).await?;
        ensure!(object.is_object(), "the App {} does not exist", app.id());
        Ok(object)
    }

    // --- Pods of the test

    /// Creates a pod that runs this program, under the Pod Security Standard `restricted`.
    async fn run_pod(&self, name: &str, args: &[&str]) -> Result<()> {
        self.create_pod(&self.pod(name, args)).await
    }

    fn pod(&self, name: &str, args: &[&str]) -> Value {
        let image = self.image("latchkey-cluster-test");
        let security = json!({ "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                               "capabilities": { "drop": ["ALL"] } });
        let container = json!({ "name": "test", "image": image, "imagePullPolicy": "IfNotPresent", "args": args,
                                "securityContext": security });
        let spec = json!({
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "securityContext": { "runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [container],
        });
        let metadata = json!({ "name": name, "namespace": TOOLS_NAMESPACE, "labels": { "app": name } });
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec })
    }

    async fn create_pod(&self, pod: &Value) -> Result<()> {
        let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
        self.cluster.delete_and_wait("v1", "Pod", Some(TOOLS_NAMESPACE), name).await?;
        // Repeats the call, because Kubernetes creates the ServiceAccount of a namespace a moment after the namespace.
        retry_until_ok(&format!("the pod {name} is created"), POD_LIMIT, || self.cluster.apply(pod)).await
    }

    /// Waits until the pod ends. Returns whether it succeeded, and its log.
    async fn wait_for_pod_end(&self, name: &str) -> Result<(bool, String)> {
        self.wait_for_pod_end_within(name, POD_LIMIT).await
    }

    async fn wait_for_pod_end_within(&self, name: &str, limit: Duration) -> Result<(bool, String)> {
        let phase = retry_until_ok(&format!("the pod {name} ends"), limit, || async {
            let pod = self.cluster.get("v1", "Pod", Some(TOOLS_NAMESPACE), name).await?;
            match pod["status"]["phase"].as_str() {
                Some(phase @ ("Succeeded" | "Failed")) => Ok(phase.to_owned()),
                _ => bail!("{}", pod["status"]),
            }
        })
        .await?;
        let log = self.cluster.pods(TOOLS_NAMESPACE).logs(name, &LogParams::default()).await.unwrap_or_default();
        Ok((phase == "Succeeded", log))
    }

    /// Runs the user scenario through the Service or, with `--front`, through the proxy in front of the Service.
    async fn run_scenario(&self, name: &str, release: &str, extra_args: &[&str]) -> Result<()> {
        let pod = format!("journey-{name}");
        let through_proxy = extra_args.contains(&"--front");
        let url = if through_proxy { format!("http://{HOST}") } else { service_url(release) };
        let args = ["journey", "--url", &*url, "--app", self.app.id()];
        self.run_pod(&pod, &[&args, extra_args].concat()).await?;
        let (succeeded, log) = self.wait_for_pod_end(&pod).await?;
        ensure!(succeeded, "the pod {pod} failed: {log}");
        let mut steps = "register, log in, refresh, JWKS, sessions, forward auth, logout".to_owned();
        if extra_args.contains(&"--inbox") {
            steps += ", mail, confirm, verify, forgotten password, mail, new password, log in";
        }
        if through_proxy {
            steps += ", social login";
        }
        let by = if through_proxy { "NGINX and the Service" } else { "the Service" };
        println!("ok     through {by} of {release}, in a pod: {steps}");
        Ok(())
    }

    /// Installs a proxy in front of the Service, and a provider behind the same proxy. The proxy has a certificate of a
    /// new CA. `change_settings` makes the servers trust the proxy and the CA.
    async fn install_front(&mut self) -> Result<Proxy> {
        let proxy_host = format!("front.{TOOLS_NAMESPACE}.svc");
        let authority = CertificateAuthority::new()?;
        let identity = authority.server(&[&proxy_host, HOST])?;
        let metadata = json!({ "name": "front", "namespace": TOOLS_NAMESPACE });
        let data = json!({ "tls.crt": identity.certificate, "tls.key": identity.key });
        self.cluster
            .apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data }))
            .await?;
        for namespace in [INSTALL_NAMESPACE, TOOLS_NAMESPACE] {
            let metadata = json!({ "name": "authority", "namespace": namespace });
            let data = json!({ "ca.crt": authority.certificate() });
            self.cluster
                .apply(&json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data }))
                .await?;
        }
        let (nginx, dex) = (self.image("nginx"), self.image("dex"));
        let replaced = [("docker.io/library/nginx:1.29", &*nginx), ("ghcr.io/dexidp/dex:v2.45.1", &*dex)];
        let replaced = if self.options.own_stores { replaced.as_slice() } else { &[] };
        self.cluster.apply_file(Path::new("tests/manifests/front.yaml"), TOOLS_NAMESPACE, replaced).await?;
        for name in ["dex", "front"] {
            self.cluster.wait_for_rollout(TOOLS_NAMESPACE, name, Some(1)).await?;
        }

        let provider = Provider::new(PROVIDER_NAME, "oidc").set("issuer", format!("https://{proxy_host}/dex"));
        let provider = provider.with_secret("only-for-the-cluster-test");
        self.app = self.app.clone().provider(&provider);
        for object in [provider.secret_object(APP_NAMESPACE), provider.object(APP_NAMESPACE)]
            .iter()
            .chain(&self.app.objects(APP_NAMESPACE))
        {
            self.cluster.apply(object).await?;
        }
        self.wait_until_app_ready().await?;

        let pods = self.cluster.pods(TOOLS_NAMESPACE).list(&ListParams::default().labels("app=front")).await?.items;
        let pod_ip = pods.into_iter().find_map(|pod| pod.status?.pod_ip).context("the front has an address")?;
        let prefix_length = if pod_ip.contains(':') { 128 } else { 32 };
        let service = self.cluster.get("v1", "Service", Some(TOOLS_NAMESPACE), "front").await?;
        let address = service["spec"]["clusterIP"].as_str().context("a Service has an address")?.to_owned();
        Ok(Proxy { address, network: format!("{pod_ip}/{prefix_length}") })
    }

    /// Installs an inbox and makes the App send its mails there.
    async fn install_inbox(&mut self) -> Result<()> {
        self.run_pod("inbox", &["inbox"]).await?;
        let ports = json!([{ "name": "smtp", "port": 2525 }, { "name": "inbox", "port": 8025 }]);
        let spec = json!({ "selector": { "app": "inbox" }, "ports": ports });
        let metadata = json!({ "name": "inbox", "namespace": TOOLS_NAMESPACE });
        self.cluster
            .apply(&json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec }))
            .await?;
        let service = self.cluster.get("v1", "Service", Some(TOOLS_NAMESPACE), "inbox").await?;
        let address = service["spec"]["clusterIP"].as_str().context("a Service has an address")?.to_owned();
        let relay = Relay { host: format!("inbox.{TOOLS_NAMESPACE}.svc"), port: 2525, tls: "none", login: None };
        self.app = self.app.clone().relay(relay);
        for object in self.app.objects(APP_NAMESPACE) {
            self.cluster.apply(&object).await?;
        }
        self.wait_until_app_ready().await?;
        let host = if address.contains(':') { format!("[{address}]") } else { address };
        self.inbox = format!("http://{host}:8025");
        Ok(())
    }

    // --- Load

    async fn start_load(&self) -> Result<()> {
        let (service, front) = (service_url(RELEASE), format!("http://front.{TOOLS_NAMESPACE}"));
        let args = ["load", "--url", &service, "--front", &front, "--app", self.app.id()];
        self.run_pod("load", &[&args[..], &["--email", EMAIL, "--password", PASSWORD]].concat()).await?;
        retry_until_ok("the load runs", POD_LIMIT, || async {
            let counts = self.counts().await?;
            ensure!(counts.sent.values().sum::<u64>() > 200, "{counts:?}");
            Ok(())
        })
        .await
    }

    async fn counts(&self) -> Result<Counts> {
        let path = format!("/api/v1/namespaces/{TOOLS_NAMESPACE}/pods/load:8000/proxy/counts");
        Ok(serde_json::from_value(self.cluster.get_path(&path).await?)?)
    }

    /// Asserts that no request has failed, except those that [`Step::Kill`] has counted.
    async fn assert_no_failures(&mut self, what: &str) -> Result<()> {
        sleep(SETTLE_TIME).await;
        let counts = self.counts().await?;
        let failed = counts.failed - self.kill_failures;
        ensure!(failed == 0, "{what}: {failed} requests failed: {:#?}", counts.failures);
        let sent: u64 = counts.sent.values().sum();
        println!("ok     {what}: 0 failed, of {sent} requests so far");
        Ok(())
    }

    // --- Steps under load

    async fn servers(&self, release: &str) -> Result<Vec<Pod>> {
        let labels = format!("app.kubernetes.io/instance={release},app.kubernetes.io/component=server");
        let pods = self.cluster.pods(INSTALL_NAMESPACE).list(&ListParams::default().labels(&labels)).await?.items;
        ensure!(!pods.is_empty(), "there are no servers");
        Ok(pods)
    }

    /// Upgrades to the version under test. Keeps the values of the install, and sets those that later steps need.
    async fn change_settings(&mut self, front: &Proxy) -> Result<()> {
        let values = [
            // The inbox and the provider have private IP addresses.
            "privateCIDRs={10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7}",
            "caBundle.configMap=authority",
            &*format!("trustedProxies={{{}}}", front.network),
            // With so small a CPU request, five servers fit on a small node.
            "server.resources.requests.cpu=100m",
            "networkPolicy.egress.enabled=true",
        ];
        let values = values.iter().flat_map(|value| ["--set".to_owned(), (*value).to_owned()]);
        let no_metrics_clients = ["--set-json", "networkPolicy.metricsFrom=[]"].map(String::from);
        let values = values.chain(no_metrics_clients).chain(administration::network_policy_values());
        let documents = self.rendered_versions().await?;
        self.helm_upgrade(&values.chain(image_tags(&self.options.version)).collect::<Vec<_>>()).await?;
        self.wait_for_server_rollout(Some(2)).await?;
        self.assert_documents_not_written(&documents, 91).await?;
        let from = self.options.from_version.as_ref().map_or(String::new(), |from| format!("upgraded from {from}, "));
        self.assert_no_failures(&format!("{from}new settings, all pods replaced")).await
    }

    /// The `resourceVersion` of each rendered document, by the name of its Secret. Fails if the format of a document is
    /// not 1.
    async fn rendered_versions(&self) -> Result<BTreeMap<String, String>> {
        let secrets =
            self.cluster.list("v1", "Secret", INSTALL_NAMESPACE, &format!("type={RENDERED_APP_TYPE}")).await?;
        let mut versions = BTreeMap::new();
        for secret in secrets {
            let document = secret["data"][RENDERED_APP_KEY].as_str().context("a rendered App has a document")?;
            let document: Value = serde_json::from_slice(&BASE64_STANDARD.decode(document)?)?;
            ensure!(document["format"] == 1, "the document has format {}", document["format"]);
            let metadata = &secret["metadata"];
            let [name, version] = ["name", "resourceVersion"].map(|field| metadata[field].as_str().map(str::to_owned));
            versions.insert(name.context("a name")?, version.context("a resourceVersion")?);
        }
        ensure!(!versions.is_empty(), "there is no rendered App");
        Ok(versions)
    }

    /// Asserts that an upgraded operator has reconciled the App without writing a document again.
    async fn assert_documents_not_written(
        &self,
        before: &BTreeMap<String, String>,
        key_rotation_days: u32,
    ) -> Result<()> {
        self.cluster.wait_for_rollout(INSTALL_NAMESPACE, &format!("{RELEASE}-operator"), None).await?;
        // Changes a field of the App that its rendered document does not contain. When the status has the generation of
        // this change, the new operator has reconciled the App.
        let change = json!({ "spec": { "tokens": { "keyRotationDays": key_rotation_days } } });
        let app = (APP_NAMESPACE, self.app.id());
        self.cluster.merge_patch("latchkey.dev/v1alpha1", "App", app, &change).await?;
        self.wait_until_app_ready().await?;
        let after = self.rendered_versions().await?;
        ensure!(after == *before, "the upgraded operator has written a document: {before:?}, then {after:?}");
        println!("ok     the upgraded operator has written no rendered App again, because format 1 is enough for it");
        Ok(())
    }

    /// Reports whether a pod can connect to the servers' ports for operations and for the administration API although
    /// no network policy allows this.
    async fn check_network_policies(&self) -> Result<()> {
        let address = |service, port| format!("{RELEASE}-server-{service}.{INSTALL_NAMESPACE}:{port}");
        let addresses = [address("ops", 9090), address("admin", 8081)];
        let [ops, admin] = &addresses;
        self.run_pod("stranger", &["reach", ops, admin]).await?;
        let (succeeded, log) = self.wait_for_pod_end("stranger").await?;
        ensure!(succeeded, "the pod stranger failed: {log}");
        let [ops, admin] = addresses.map(|address| log.contains(&reach::accepts_line(&address)));
        ensure!(ops == admin, "NetworkPolicy protects only one of two ports: {log}");
        let result = if ops { "accepts NetworkPolicy without enforcing it" } else { "enforces NetworkPolicy" };
        println!("figure this cluster {result}");
        Ok(())
    }

    async fn scale_servers(&mut self) -> Result<()> {
        for (from, to) in [(2, 4), (4, 2)] {
            self.helm_upgrade(&["--set", &format!("server.replicas={to}")]).await?;
            self.wait_for_server_rollout(Some(to)).await?;
            self.assert_no_failures(&format!("scaled from {from} to {to}")).await?;
        }
        Ok(())
    }

    async fn delete_pod(&mut self) -> Result<()> {
        let before: Vec<String> = self.servers(RELEASE).await?.iter().map(pod_name).collect();
        self.cluster.pods(INSTALL_NAMESPACE).delete(&before[0], &DeleteParams::default()).await?;
        let first_seen = Cell::new(None);
        let took = retry_until_ok("a new server is ready", POD_LIMIT, || async {
            let pods = self.servers(RELEASE).await?;
            let new = pods.iter().find(|pod| !before.contains(&pod_name(pod))).context("it does not exist yet")?;
            let since = first_seen.get().unwrap_or_else(Instant::now);
            first_seen.set(Some(since));
            let new = serde_json::to_value(new)?;
            ensure!(condition_status(&new, "Ready") == "True", "{}", new["status"]);
            Ok(since.elapsed())
        })
        .await?;
        println!("figure a server under load: ready {:.1} s after its pod was created", took.as_secs_f32());
        self.wait_for_server_rollout(Some(2)).await?;
        self.assert_no_failures("a pod deleted").await
    }

    async fn evict_pods(&mut self) -> Result<()> {
        let pods = self.servers(RELEASE).await?;
        let api = self.cluster.pods(INSTALL_NAMESPACE);
        api.evict(&pod_name(&pods[0]), &EvictParams::default()).await?;
        match api.evict(&pod_name(&pods[1]), &EvictParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 429 => {}
            other => bail!("a second concurrent eviction is not refused: {other:?}"),
        }
        self.wait_for_server_rollout(Some(2)).await?;
        retry_until_ok("the second eviction", POD_LIMIT, || async {
            api.evict(&pod_name(&pods[1]), &EvictParams::default()).await?;
            Ok(())
        })
        .await?;
        self.wait_for_server_rollout(Some(2)).await?;
        self.assert_no_failures("servers evicted one after the other; a second concurrent eviction is refused").await
    }

    async fn scale_operator_to_zero(&mut self) -> Result<()> {
        let operator = format!("{RELEASE}-operator");
        self.cluster
            .merge_patch("apps/v1", "Deployment", (INSTALL_NAMESPACE, &operator), &json!({ "spec": { "replicas": 0 } }))
            .await?;
        self.cluster.wait_for_rollout(INSTALL_NAMESPACE, &operator, Some(0)).await?;
        self.run_scenario("alone", RELEASE, &[]).await?;
        let before = self.app_object().await?;
        // A new server must become ready without the operator.
        let pods = self.servers(RELEASE).await?;
        self.cluster.pods(INSTALL_NAMESPACE).delete(&pod_name(&pods[0]), &DeleteParams::default()).await?;
        self.wait_for_server_rollout(Some(2)).await?;
        ensure!(condition_status(&before, "Ready") == "True", "{}", before["status"]);
        self.cluster
            .merge_patch("apps/v1", "Deployment", (INSTALL_NAMESPACE, &operator), &json!({ "spec": { "replicas": 2 } }))
            .await?;
        self.cluster.wait_for_rollout(INSTALL_NAMESPACE, &operator, Some(2)).await?;
        let after = self.wait_until_app_ready().await?;
        ensure!(before["status"] == after["status"], "the status changed: {} to {}", before["status"], after["status"]);
        self.assert_no_failures("the operator scaled to zero and back, a server replaced meanwhile").await
    }

    async fn upgrade_with_migration(&mut self) -> Result<()> {
        let Some(version) = &self.options.next_version else { return Ok(()) };
        let documents = self.rendered_versions().await?;
        self.helm_upgrade(&image_tags(version).collect::<Vec<_>>()).await?;
        self.wait_for_server_rollout(Some(2)).await?;
        self.assert_documents_not_written(&documents, 92).await?;
        let image = format!("{}/latchkey-server:{version}", self.options.image_prefix);
        for pod in self.servers(RELEASE).await? {
            let spec = pod.spec.context("a pod has a spec")?;
            ensure!(spec.containers[0].image.as_deref() == Some(&*image), "{:?}", spec.containers[0].image);
        }
        self.wait_until_app_ready().await?;
        self.assert_no_failures(&format!("upgraded to {version}, which has one more migration")).await
    }

    async fn enable_autoscaler(&mut self) -> Result<()> {
        let server = format!("{RELEASE}-server");
        let watch = async {
            let mut min_replicas = i64::MAX;
            loop {
                let deployment = self.cluster.get("apps/v1", "Deployment", Some(INSTALL_NAMESPACE), &server).await?;
                min_replicas = min_replicas.min(deployment["spec"]["replicas"].as_i64().unwrap_or(0));
                ensure!(min_replicas >= 2, "enabling the autoscaler reduced the replicas to {min_replicas}");
                sleep(Duration::from_millis(100)).await;
            }
        };
        let change = async {
            self.helm_upgrade(&[
                "--set",
                "server.autoscaling.enabled=true",
                "--set",
                "server.autoscaling.minReplicas=3",
            ])
            .await?;
            self.wait_for_server_rollout(Some(3)).await?;
            // The autoscaler has set the number of replicas. An upgrade must not change this number.
            self.helm_upgrade::<&str>(&[]).await?;
            self.wait_for_server_rollout(Some(3)).await
        };
        tokio::select! {
            never = watch => never,
            changed = change => changed,
        }?;
        self.assert_no_failures("an autoscaler instead of a fixed number, never fewer than 2").await
    }

    /// Deletes a server's pod without a grace period, and prints how many requests fail until a new pod has replaced
    /// it. Later requests must not fail.
    async fn kill_pod(&mut self) -> Result<()> {
        let pods = self.servers(RELEASE).await?;
        let without_grace_period = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.cluster.pods(INSTALL_NAMESPACE).delete(&pod_name(&pods[0]), &without_grace_period).await?;
        self.wait_for_server_rollout(None).await?;
        sleep(SETTLE_TIME).await;
        let counts = self.counts().await?;
        println!("figure a pod killed with SIGKILL: {} requests failed", counts.failed - self.kill_failures);
        self.kill_failures = counts.failed;
        sleep(SETTLE_TIME).await;
        self.assert_no_failures("after the kill").await?;
        println!("figure slowest responses, ms: {:?}; load of {} s", counts.slowest_ms, counts.seconds);
        Ok(())
    }

    async fn reinstall(&mut self) -> Result<()> {
        self.cluster.delete_and_wait("v1", "Pod", Some(TOOLS_NAMESPACE), "load").await?;
        let keys_before = self.key_secret_data().await?;
        self.cluster.helm(["uninstall", RELEASE, "--namespace", INSTALL_NAMESPACE, "--wait"]).await?;
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev", "clients.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            let left = self.cluster.get(version, kind, None, definition).await?;
            ensure!(left.is_object(), "{definition} was removed with the install");
        }
        self.app_object().await?;
        ensure!(self.key_secret_data().await? == keys_before, "the keys changed");
        let rendered = self.cluster.list("v1", "Secret", INSTALL_NAMESPACE, "type=latchkey.dev/rendered-app").await?;
        ensure!(rendered.len() == 1, "{} rendered Apps are left", rendered.len());
        let lease = format!("{RELEASE}-operator");
        ensure!(
            self.cluster.get("coordination.k8s.io/v1", "Lease", Some(INSTALL_NAMESPACE), &lease).await?.is_object(),
            "no Lease"
        );
        ensure!(
            self.cluster.list("apps/v1", "Deployment", INSTALL_NAMESPACE, "").await?.len() == 2,
            "more than the stores is left"
        );
        println!("ok     helm uninstall leaves CRDs, App, keys, rendered App and Lease, and nothing else");
        self.restore_keys().await?;

        let chart = ClusterClient::chart();
        let args = ["install", OTHER_RELEASE, &chart, "--namespace", INSTALL_NAMESPACE, "--wait", "--take-ownership"];
        let version = self.options.next_version.as_ref().unwrap_or(&self.options.version);
        let notes = self.cluster.helm(args.map(String::from).into_iter().chain(self.required_values(version))).await?;
        self.wait_until_app_ready().await?;
        ensure!(self.key_secret_data().await? == keys_before, "the keys changed");
        self.run_scenario("again", OTHER_RELEASE, &[]).await?;
        self.helm_test(OTHER_RELEASE).await?;
        println!("ok     installed again under another name, with the same keys");
        self.remove_leftovers(&notes).await
    }

    /// Deletes the Secrets that the operator created, and restores the keys from a copy, as docs/operations.md
    /// describes.
    async fn restore_keys(&self) -> Result<()> {
        let get_secrets = |type_| ["-n", INSTALL_NAMESPACE, "get", "secret", "--field-selector", type_];
        let (keys, rendered) =
            (get_secrets("type=latchkey.dev/app-keys"), get_secrets("type=latchkey.dev/rendered-app"));
        let copy = tempfile::NamedTempFile::new()?;
        std::fs::write(copy.path(), self.cluster.kubectl([&keys[..], &["-o", "yaml"]].concat()).await?)?;
        for mut delete in [keys, rendered] {
            delete[2] = "delete";
            self.cluster.kubectl(delete).await?;
        }
        self.cluster.kubectl(["-n", INSTALL_NAMESPACE, "apply", "-f", &copy.path().display().to_string()]).await?;
        println!("ok     the keys are restored from a copy");
        Ok(())
    }

    /// Uninstalls the release, runs the delete commands that Helm printed after the install, and checks that nothing is
    /// left. docs/install.md must contain the same commands.
    async fn remove_leftovers(&self, notes: &str) -> Result<()> {
        self.cluster.helm(["uninstall", OTHER_RELEASE, "--namespace", INSTALL_NAMESPACE, "--wait"]).await?;
        let docs = std::fs::read_to_string(process::root().join("docs/install.md"))?;
        for command in delete_commands(&self.notes) {
            let documented = command.replace(INSTALL_NAMESPACE, "latchkey");
            ensure!(docs.contains(&documented), "docs/install.md does not contain {documented}");
        }
        let first_release_lease_command = delete_commands(&self.notes).filter(|command| command.contains(" lease "));
        for command in delete_commands(notes).chain(first_release_lease_command) {
            self.cluster.kubectl(command.split_whitespace().skip(1)).await?;
        }
        for type_ in ["latchkey.dev/rendered-app", "latchkey.dev/app-keys"] {
            let left = self.cluster.list("v1", "Secret", INSTALL_NAMESPACE, &format!("type={type_}")).await?;
            ensure!(left.is_empty(), "{} Secrets {type_} are left", left.len());
        }
        let left = self.cluster.list("coordination.k8s.io/v1", "Lease", INSTALL_NAMESPACE, "").await?;
        ensure!(left.is_empty(), "{} Leases are left", left.len());
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev", "clients.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            ensure!(self.cluster.get(version, kind, None, definition).await?.is_null(), "{definition} is left");
        }
        println!("ok     the commands of NOTES and docs/install.md remove what is left");
        Ok(())
    }

    /// The data of the only Secret with the keys of an App. Returns an error if there is not exactly one such Secret.
    async fn key_secret_data(&self) -> Result<Value> {
        let keys = self.cluster.list("v1", "Secret", INSTALL_NAMESPACE, "type=latchkey.dev/app-keys").await?;
        ensure!(keys.len() == 1, "{} key Secrets exist", keys.len());
        Ok(keys[0]["data"].clone())
    }

    // --- Measurements

    async fn print_measurements(&self) -> Result<()> {
        // After this time, the programs have released the memory that their start needed.
        sleep(Duration::from_secs(15)).await;
        for pod in self.cluster.pods(INSTALL_NAMESPACE).list(&ListParams::default()).await?.items {
            let pod = serde_json::to_value(pod)?;
            let labels = &pod["metadata"]["labels"];
            let Some(component @ ("server" | "operator")) = labels["app.kubernetes.io/component"].as_str() else {
                continue;
            };
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            println!(
                "figure {component} {name}: ready {} after its container started, {}",
                cold_start(&pod)?,
                self.memory(&pod, name, component).await?
            );
        }
        Ok(())
    }

    /// Memory of a pod's container, as the kubelet measures it.
    async fn memory(&self, pod: &Value, name: &str, container: &str) -> Result<String> {
        let node = pod["spec"]["nodeName"].as_str().context("a pod is on a node")?;
        let summary = self.cluster.get_path(&format!("/api/v1/nodes/{node}/proxy/stats/summary")).await?;
        let pods = summary["pods"].as_array().context("the kubelet lists pods")?;
        let found = pods.iter().find(|pod| pod["podRef"]["name"] == name).context("the kubelet knows the pod")?;
        let containers = found["containers"].as_array().context("a pod has containers")?;
        let memory = &containers.iter().find(|one| one["name"] == container).context("its container")?["memory"];
        let mib = |field: &str| memory[field].as_f64().unwrap_or(0.0) / 1024.0 / 1024.0;
        Ok(format!("idle: {:.1} MiB working set, {:.1} MiB RSS", mib("workingSetBytes"), mib("rssBytes")))
    }

    /// Prints the state of the cluster after a failure.
    async fn print_state(&self) {
        for namespace in [INSTALL_NAMESPACE, TOOLS_NAMESPACE] {
            let Ok(pods) = self.cluster.pods(namespace).list(&ListParams::default()).await else { continue };
            for pod in pods.items {
                println!("--- {namespace}/{}: {}", pod_name(&pod), json!(pod.status));
                let mut params = LogParams { tail_lines: Some(15), ..LogParams::default() };
                for container in pod
                    .spec
                    .into_iter()
                    .flat_map(|spec| spec.init_containers.into_iter().flatten().chain(spec.containers))
                {
                    params.container = Some(container.name);
                    let name = pod.metadata.name.as_deref().unwrap_or_default();
                    if let Ok(log) = self.cluster.pods(namespace).logs(name, &params).await {
                        println!("{log}");
                    }
                }
            }
        }
        if let Ok(app) = self.app_object().await {
            println!("--- App: {}", app["status"]);
        }
    }
}

/// URL of a release's public API.
fn service_url(release: &str) -> String {
    format!("http://{release}-server.{INSTALL_NAMESPACE}")
}

/// The Helm arguments that set the images of both programs to a version.
fn image_tags(version: &str) -> impl Iterator<Item = String> {
    let tag = move |component| ["--set-string".to_owned(), format!("{component}.image.tag={version}")];
    ["operator", "server"].into_iter().flat_map(tag)
}

/// The delete commands in the text that Helm printed.
fn delete_commands(notes: &str) -> impl Iterator<Item = &str> {
    notes.lines().map(str::trim).filter(|line| line.starts_with("kubectl ") && line.contains(" delete "))
}

fn pod_name(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

fn condition_status(object: &Value, type_: &str) -> String {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|condition| condition["type"] == type_);
    found.and_then(|condition| condition["status"].as_str()).unwrap_or_default().to_owned()
}

/// Time from the start of the container until the pod was ready, to the second, as the kubelet recorded it.
fn cold_start(pod: &Value) -> Result<String> {
    let parse_time = |text: &Value| -> Result<time::OffsetDateTime> {
        let text = text.as_str().context("a time")?;
        Ok(time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339)?)
    };
    let started = parse_time(&pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"])?;
    let conditions = pod["status"]["conditions"].as_array().context("a pod has conditions")?;
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready").context("Ready")?;
    Ok(format!("{} s", (parse_time(&ready["lastTransitionTime"])? - started).whole_seconds()))
}
