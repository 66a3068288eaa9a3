//! What the test does, in order. Each step ends with a line of what was seen.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, EvictParams, ListParams, LogParams};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    process,
    tls::Authority,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    install::{Cluster, until},
    journey::{DONE, PROVIDER},
    load::Counts,
};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Where the images are: `PREFIX/latchkey-server:VERSION` and the others.
    #[arg(long, default_value = "localhost/latchkey")]
    image_prefix: String,
    #[arg(long)]
    version: String,
    /// The version to begin with, of which there are images too: then the first upgrade is from it.
    #[arg(long, requires = "from_chart")]
    from_version: Option<String>,
    /// Its chart.
    #[arg(long)]
    from_chart: Option<PathBuf>,
    /// The version to upgrade to, which has one more migration.
    #[arg(long)]
    next_version: Option<String>,
    /// Postgres, Redis and what else is around are images of that place and version too, not those of a registry.
    #[arg(long)]
    own_stores: bool,
    /// A folder with the images' archives, whose sizes are printed.
    #[arg(long)]
    archives: Option<PathBuf>,
    /// One thing alone, after the install.
    #[arg(long, value_enum)]
    only: Option<Step>,
}

/// What happens under load, in this order, and in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    Scale,
    Deletion,
    Evictions,
    OperatorAway,
    Migration,
    Autoscaler,
    Kill,
    Reinstall,
}

/// Of the install, of the application, and of what stands around them.
const HOME: &str = "latchkey-cluster-test";
const TENANT: &str = "latchkey-cluster-test-shop";
const AROUND: &str = "latchkey-cluster-test-around";
const RELEASE: &str = "latchkey";
const OTHER_RELEASE: &str = "again-latchkey";
const HOST: &str = "auth.example.com";
const EMAIL: &str = "load@example.com";
const PASSWORD: &str = "a quiet harbour at noon";

const READY_LIMIT: Duration = Duration::from_secs(180);
const POD_LIMIT: Duration = Duration::from_secs(180);
/// Load before a change, and after it.
const AROUND_A_STEP: Duration = Duration::from_secs(3);

/// What stands before the Service: the address of its own Service, and the network of its pod.
struct Front {
    address: String,
    network: String,
}

struct Test<'a> {
    options: &'a Options,
    cluster: Cluster,
    app: App,
    /// What NOTES of the first install say.
    notes: String,
    /// Requests that had failed when the last step ended.
    failed: u64,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let cluster = Cluster::connect().await?;
    // Windows that a test of minutes does not fill.
    let app = App::with_id("cluster-test-shop")
        .set("/redirectURLs", json!([DONE]))
        .limit("loginsPerClient", &[(100_000, 60)])
        .limit("registrationsPerClient", &[(100_000, 60)])
        .limit("mailsPerRecipient", &[(100, 60)])
        .limit("codesPerClient", &[(100, 60)]);
    let mut test = Test { options, cluster, app, notes: String::new(), failed: 0 };
    test.clean().await?;
    let outcome = test.steps().await;
    if let Err(error) = &outcome {
        println!("FAILED {error:#}");
        test.show().await;
        return outcome;
    }
    test.clean().await
}

// === impl Test ===

impl Test<'_> {
    async fn steps(&mut self) -> Result<()> {
        let only = self.options.only;
        self.sizes()?;
        self.stores().await?;
        self.install().await?;
        self.ready().await?;
        if only.is_none() {
            self.journey("first", RELEASE, &[]).await?;
            self.helm_test(RELEASE).await?;
            self.figures().await?;
        }
        let inbox = self.inbox().await?;
        let front = self.front().await?;
        self.start_load().await?;
        self.settings(&front).await?;
        if only.is_none() {
            let inbox = ["--inbox", &inbox];
            self.journey("mails", RELEASE, &inbox).await?;
            let by_front = ["--front", &front.address];
            self.journey("front", RELEASE, &[&inbox[..], &by_front].concat()).await?;
            self.policies().await?;
        }
        for step in Step::value_variants() {
            if only.is_none_or(|only| only == *step) {
                self.step(*step).await?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Scale => self.scale().await,
            Step::Deletion => self.deletion().await,
            Step::Evictions => self.evictions().await,
            Step::OperatorAway => self.operator_away().await,
            Step::Migration => self.migration().await,
            Step::Autoscaler => self.autoscaler().await,
            Step::Kill => self.killed().await,
            Step::Reinstall => self.uninstall_and_again().await,
        }
    }

    // --- Before

    /// What an earlier run left.
    async fn clean(&self) -> Result<()> {
        for release in [RELEASE, OTHER_RELEASE] {
            // Not there: nothing to do.
            drop(self.cluster.helm(["uninstall", release, "--namespace", HOME, "--wait", "--ignore-not-found"]).await);
        }
        for namespace in [TENANT, AROUND, HOME] {
            self.cluster.remove("v1", "Namespace", None, namespace).await?;
        }
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            self.cluster.remove(version, kind, None, definition).await?;
        }
        Ok(())
    }

    fn sizes(&self) -> Result<()> {
        for program in ["latchkey-operator", "latchkey-server"] {
            if let Some(folder) = &self.options.archives {
                let bytes = folder.join(format!("{program}.tar")).metadata()?.len();
                println!("figure the image of {program}: {:.1} MB", bytes as f64 / 1e6);
            }
        }
        Ok(())
    }

    async fn stores(&self) -> Result<()> {
        for namespace in [HOME, TENANT, AROUND] {
            let labels = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
            let metadata = json!({ "name": namespace, "labels": labels });
            self.cluster.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata })).await?;
        }
        let (postgres, redis) = (self.image("postgres"), self.image("redis"));
        let replaced = [("docker.io/library/postgres:17", &*postgres), ("docker.io/library/redis:8", &*redis)];
        let replaced = if self.options.own_stores { replaced.as_slice() } else { &[] };
        self.cluster.apply_file(Path::new("tests/manifests/stores.yaml"), HOME, replaced).await?;
        for store in ["latchkey-postgres", "latchkey-redis"] {
            self.cluster.rolled_out(HOME, store, Some(1)).await?;
        }
        println!("ok     Postgres and Redis of tests/manifests/stores.yaml run under `restricted`");
        Ok(())
    }

    // --- The install

    fn image(&self, name: &str) -> String {
        format!("{}/{name}:{}", self.options.image_prefix, self.options.version)
    }

    /// What has no default, and where the images of that version are.
    fn least(&self, version: &str) -> Vec<String> {
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
        args.chain(repositories).chain(tags(version)).collect()
    }

    async fn install(&mut self) -> Result<()> {
        let began = Instant::now();
        let chart = match &self.options.from_chart {
            Some(chart) => chart.display().to_string(),
            None => Cluster::chart(),
        };
        let version = self.options.from_version.as_ref().unwrap_or(&self.options.version);
        let args = ["install", RELEASE, &chart, "--namespace", HOME, "--wait", "--timeout", "5m"].map(String::from);
        self.notes = self.cluster.helm(args.into_iter().chain(self.least(version))).await?;
        ensure!(self.notes.contains("What to do next"), "{}", self.notes);
        let took = began.elapsed().as_secs_f32();
        println!("ok     helm install of {version} with baseURL, Postgres and Redis only ({took:.0} s)");
        Ok(())
    }

    async fn helm_upgrade<S: AsRef<str>>(&self, more: &[S]) -> Result<()> {
        let chart = Cluster::chart();
        let args = ["upgrade", RELEASE, &*chart, "--namespace", HOME, "--reset-then-reuse-values"];
        self.cluster.helm(args.into_iter().chain(more.iter().map(AsRef::as_ref))).await?;
        Ok(())
    }

    async fn rolled_out(&self, replicas: Option<i64>) -> Result<()> {
        self.cluster.rolled_out(HOME, &format!("{RELEASE}-server"), replicas).await
    }

    async fn helm_test(&self, release: &str) -> Result<()> {
        self.cluster.helm(["test", release, "--namespace", HOME, "--timeout", "3m"]).await?;
        println!("ok     helm test {release}");
        Ok(())
    }

    async fn ready(&self) -> Result<()> {
        let began = Instant::now();
        for object in self.app.objects(TENANT) {
            self.cluster.apply(&object).await?;
        }
        self.app_is_ready().await?;
        println!("ok     the App is Ready ({:.1} s)", began.elapsed().as_secs_f32());
        Ok(())
    }

    async fn app_is_ready(&self) -> Result<Value> {
        until("the App is Ready", READY_LIMIT, || async {
            let app = self.app_object().await?;
            ensure!(condition(&app, "Ready") == "True", "{}", app["status"]);
            ensure!(app["status"]["observedGeneration"] == app["metadata"]["generation"], "not seen yet");
            Ok(app)
        })
        .await
    }

    async fn app_object(&self) -> Result<Value> {
        let app = self.cluster.get("latchkey.dev/v1alpha1", "App", Some(TENANT), self.app.id()).await?;
        ensure!(app.is_object(), "the App is gone");
        Ok(app)
    }

    // --- Pods of our own

    /// A pod under `restricted` that runs this program.
    async fn pod(&self, name: &str, args: &[&str]) -> Result<()> {
        self.pod_of(name, "latchkey-cluster-test", args).await
    }

    async fn pod_of(&self, name: &str, program: &str, args: &[&str]) -> Result<()> {
        self.cluster.remove("v1", "Pod", Some(AROUND), name).await?;
        let image = self.image(program);
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
        let metadata = json!({ "name": name, "namespace": AROUND, "labels": { "app": name } });
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        // A namespace is there before its ServiceAccount.
        until(&format!("the pod {name} is made"), POD_LIMIT, || self.cluster.apply(&pod)).await
    }

    /// Waits for its end: whether it was a good one, and what it said.
    async fn finished(&self, name: &str) -> Result<(bool, String)> {
        let phase = until(&format!("the pod {name} ends"), POD_LIMIT, || async {
            let pod = self.cluster.get("v1", "Pod", Some(AROUND), name).await?;
            match pod["status"]["phase"].as_str() {
                Some(phase @ ("Succeeded" | "Failed")) => Ok(phase.to_owned()),
                _ => bail!("{}", pod["status"]),
            }
        })
        .await?;
        let log = self.cluster.pods(AROUND).logs(name, &LogParams::default()).await.unwrap_or_default();
        Ok((phase == "Succeeded", log))
    }

    /// One user's way, by the Service or, with `--front`, by what stands before it.
    async fn journey(&self, name: &str, release: &str, more: &[&str]) -> Result<()> {
        let pod = format!("journey-{name}");
        let front = more.contains(&"--front");
        let url = if front { format!("http://{HOST}") } else { service(release) };
        let args = ["journey", "--url", &*url, "--app", self.app.id()];
        self.pod(&pod, &[&args, more].concat()).await?;
        let (well, log) = self.finished(&pod).await?;
        ensure!(well, "the pod {pod} failed: {log}");
        let mut way = "register, log in, refresh, JWKS, sessions, gate, logout".to_owned();
        if more.contains(&"--inbox") {
            way += ", mail, confirm, verify, forgotten password, mail, new password, log in";
        }
        if front {
            way += ", social login";
        }
        let by = if front { "NGINX and the Service" } else { "the Service" };
        println!("ok     through {by} of {release}, in a pod: {way}");
        Ok(())
    }

    /// What stands before the Service: a proxy that is trusted, and the provider behind it, by TLS with a certificate of an
    /// authority that the chart is told of.
    async fn front(&mut self) -> Result<Front> {
        let own = format!("front.{AROUND}.svc");
        let authority = Authority::new()?;
        let identity = authority.server(&[&own])?;
        let metadata = json!({ "name": "front", "namespace": AROUND });
        let data = json!({ "tls.crt": identity.certificate, "tls.key": identity.key });
        self.cluster
            .apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data }))
            .await?;
        let metadata = json!({ "name": "authority", "namespace": HOME });
        let data = json!({ "ca.crt": authority.certificate() });
        self.cluster
            .apply(&json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data }))
            .await?;
        let (nginx, dex) = (self.image("nginx"), self.image("dex"));
        let replaced = [("docker.io/library/nginx:1.29", &*nginx), ("ghcr.io/dexidp/dex:v2.45.1", &*dex)];
        let replaced = if self.options.own_stores { replaced.as_slice() } else { &[] };
        self.cluster.apply_file(Path::new("tests/manifests/front.yaml"), AROUND, replaced).await?;
        for name in ["dex", "front"] {
            self.cluster.rolled_out(AROUND, name, Some(1)).await?;
        }

        let provider = Provider::new(PROVIDER, "oidc").set("issuer", format!("https://{own}/dex"));
        let provider = provider.with_secret("only-for-the-cluster-test");
        self.app = self.app.clone().provider(&provider);
        for object in [provider.secret_object(TENANT), provider.object(TENANT)].iter().chain(&self.app.objects(TENANT))
        {
            self.cluster.apply(object).await?;
        }
        self.app_is_ready().await?;

        let pods = self.cluster.pods(AROUND).list(&ListParams::default().labels("app=front")).await?.items;
        let pod = pods.into_iter().find_map(|pod| pod.status?.pod_ip).context("the front has an address")?;
        let length = if pod.contains(':') { 128 } else { 32 };
        let service = self.cluster.get("v1", "Service", Some(AROUND), "front").await?;
        let address = service["spec"]["clusterIP"].as_str().context("a Service has an address")?.to_owned();
        Ok(Front { address, network: format!("{pod}/{length}") })
    }

    /// The address of an inbox, whose relay the App uses from then on.
    async fn inbox(&mut self) -> Result<String> {
        self.pod("inbox", &["inbox"]).await?;
        let ports = json!([{ "name": "smtp", "port": 2525 }, { "name": "inbox", "port": 8025 }]);
        let spec = json!({ "selector": { "app": "inbox" }, "ports": ports });
        let metadata = json!({ "name": "inbox", "namespace": AROUND });
        self.cluster
            .apply(&json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec }))
            .await?;
        let service = self.cluster.get("v1", "Service", Some(AROUND), "inbox").await?;
        let address = service["spec"]["clusterIP"].as_str().context("a Service has an address")?.to_owned();
        let relay = Relay { host: format!("inbox.{AROUND}.svc"), port: 2525, tls: "none", login: None };
        self.app = self.app.clone().relay(relay);
        for object in self.app.objects(TENANT) {
            self.cluster.apply(&object).await?;
        }
        self.app_is_ready().await?;
        let host = if address.contains(':') { format!("[{address}]") } else { address };
        Ok(format!("http://{host}:8025"))
    }

    // --- Load

    async fn start_load(&self) -> Result<()> {
        let (service, front) = (service(RELEASE), format!("http://front.{AROUND}"));
        let args = ["load", "--url", &service, "--front", &front, "--app", self.app.id()];
        self.pod("load", &[&args[..], &["--email", EMAIL, "--password", PASSWORD]].concat()).await?;
        until("the load runs", POD_LIMIT, || async {
            let counts = self.counts().await?;
            ensure!(counts.sent.values().sum::<u64>() > 200, "{counts:?}");
            Ok(())
        })
        .await
    }

    async fn counts(&self) -> Result<Counts> {
        let path = format!("/api/v1/namespaces/{AROUND}/pods/load:8000/proxy/counts");
        Ok(serde_json::from_value(self.cluster.raw(&path).await?)?)
    }

    /// Nothing failed since the last step.
    async fn unharmed(&mut self, what: &str) -> Result<()> {
        sleep(AROUND_A_STEP).await;
        let counts = self.counts().await?;
        let failed = counts.failed - self.failed;
        ensure!(failed == 0, "{what}: {failed} requests failed: {:#?}", counts.failures);
        let sent: u64 = counts.sent.values().sum();
        println!("ok     {what}: 0 failed, of {sent} requests so far");
        Ok(())
    }

    // --- What happens

    async fn servers(&self, release: &str) -> Result<Vec<Pod>> {
        let labels = format!("app.kubernetes.io/instance={release},app.kubernetes.io/component=server");
        let pods = self.cluster.pods(HOME).list(&ListParams::default().labels(&labels)).await?.items;
        ensure!(!pods.is_empty(), "there are no servers");
        Ok(pods)
    }

    /// All that the chart was told so far is told anew, with what the tests ahead need.
    async fn settings(&mut self, front: &Front) -> Result<()> {
        let values = [
            // The inbox and the provider have private addresses.
            "privateCIDRs={10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7}",
            "caBundle.configMap=authority",
            &*format!("trustedProxies={{{}}}", front.network),
            // Five servers are to fit on a small node.
            "server.resources.requests.cpu=100m",
            "networkPolicy.egress.enabled=true",
        ];
        let values = values.iter().flat_map(|value| ["--set".to_owned(), (*value).to_owned()]);
        let nobody = ["--set-json", "networkPolicy.metricsFrom=[]"].map(String::from);
        self.helm_upgrade(&values.chain(nobody).chain(tags(&self.options.version)).collect::<Vec<_>>()).await?;
        self.rolled_out(Some(2)).await?;
        let from = self.options.from_version.as_ref().map_or(String::new(), |from| format!("upgraded from {from}, "));
        self.unharmed(&format!("{from}new settings, all pods replaced")).await
    }

    /// Whether somebody whom no policy names reaches the servers.
    async fn policies(&self) -> Result<()> {
        let url = format!("http://{RELEASE}-server-ops.{HOME}:9090/readyz");
        self.pod_of("stranger", "latchkey-server", &["check", "--within=5", &url]).await?;
        let (reached, _) = self.finished("stranger").await?;
        let said = if reached { "accepts NetworkPolicy without enforcing it" } else { "enforces NetworkPolicy" };
        println!("figure this cluster {said}");
        Ok(())
    }

    async fn scale(&mut self) -> Result<()> {
        for (from, to) in [(2, 4), (4, 2)] {
            self.helm_upgrade(&["--set", &format!("server.replicas={to}")]).await?;
            self.rolled_out(Some(to)).await?;
            self.unharmed(&format!("scaled from {from} to {to}")).await?;
        }
        Ok(())
    }

    async fn deletion(&mut self) -> Result<()> {
        let before: Vec<String> = self.servers(RELEASE).await?.iter().map(name).collect();
        self.cluster.pods(HOME).delete(&before[0], &DeleteParams::default()).await?;
        let made = Cell::new(None);
        let took = until("a new server is ready", POD_LIMIT, || async {
            let pods = self.servers(RELEASE).await?;
            let new = pods.iter().find(|pod| !before.contains(&name(pod))).context("there is none yet")?;
            let since = made.get().unwrap_or_else(Instant::now);
            made.set(Some(since));
            let new = serde_json::to_value(new)?;
            ensure!(condition(&new, "Ready") == "True", "{}", new["status"]);
            Ok(since.elapsed())
        })
        .await?;
        println!("figure a server under load: ready {:.1} s after its pod was made", took.as_secs_f32());
        self.rolled_out(Some(2)).await?;
        self.unharmed("a pod deleted").await
    }

    async fn evictions(&mut self) -> Result<()> {
        let pods = self.servers(RELEASE).await?;
        let api = self.cluster.pods(HOME);
        api.evict(&name(&pods[0]), &EvictParams::default()).await?;
        match api.evict(&name(&pods[1]), &EvictParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 429 => {}
            other => bail!("a second eviction at once is not held back: {other:?}"),
        }
        self.rolled_out(Some(2)).await?;
        until("the second eviction", POD_LIMIT, || async {
            api.evict(&name(&pods[1]), &EvictParams::default()).await?;
            Ok(())
        })
        .await?;
        self.rolled_out(Some(2)).await?;
        self.unharmed("one server after another evicted; two at once are held back").await
    }

    async fn operator_away(&mut self) -> Result<()> {
        let operator = format!("{RELEASE}-operator");
        self.cluster.merge("apps/v1", "Deployment", (HOME, &operator), &json!({ "spec": { "replicas": 0 } })).await?;
        self.cluster.rolled_out(HOME, &operator, Some(0)).await?;
        self.journey("alone", RELEASE, &[]).await?;
        let before = self.app_object().await?;
        // A new server serves without it too.
        let pods = self.servers(RELEASE).await?;
        self.cluster.pods(HOME).delete(&name(&pods[0]), &DeleteParams::default()).await?;
        self.rolled_out(Some(2)).await?;
        ensure!(condition(&before, "Ready") == "True", "{}", before["status"]);
        self.cluster.merge("apps/v1", "Deployment", (HOME, &operator), &json!({ "spec": { "replicas": 2 } })).await?;
        self.cluster.rolled_out(HOME, &operator, Some(2)).await?;
        let after = self.app_is_ready().await?;
        ensure!(before["status"] == after["status"], "the status moved: {} to {}", before["status"], after["status"]);
        self.unharmed("the operator away and back, a server replaced meanwhile").await
    }

    async fn migration(&mut self) -> Result<()> {
        let Some(version) = &self.options.next_version else { return Ok(()) };
        self.helm_upgrade(&tags(version).collect::<Vec<_>>()).await?;
        self.rolled_out(Some(2)).await?;
        self.cluster.rolled_out(HOME, &format!("{RELEASE}-operator"), None).await?;
        let image = format!("{}/latchkey-server:{version}", self.options.image_prefix);
        for pod in self.servers(RELEASE).await? {
            let spec = pod.spec.context("a pod has a spec")?;
            ensure!(spec.containers[0].image.as_deref() == Some(&*image), "{:?}", spec.containers[0].image);
        }
        self.app_is_ready().await?;
        self.unharmed(&format!("upgraded to {version}, which has one more migration")).await
    }

    async fn autoscaler(&mut self) -> Result<()> {
        let server = format!("{RELEASE}-server");
        let watch = async {
            let mut least = i64::MAX;
            loop {
                let deployment = self.cluster.get("apps/v1", "Deployment", Some(HOME), &server).await?;
                least = least.min(deployment["spec"]["replicas"].as_i64().unwrap_or(0));
                ensure!(least >= 2, "the autoscaler's coming took servers away: {least} were asked for");
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
            self.rolled_out(Some(3)).await?;
            // Now it is the autoscaler's number: another upgrade leaves it alone.
            self.helm_upgrade::<&str>(&[]).await?;
            self.rolled_out(Some(3)).await
        };
        tokio::select! {
            never = watch => never,
            changed = change => changed,
        }?;
        self.unharmed("an autoscaler in place of the number, never fewer than 2").await
    }

    /// A process that dies at once takes what it was answering with it: only that may fail.
    async fn killed(&mut self) -> Result<()> {
        let pods = self.servers(RELEASE).await?;
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.cluster.pods(HOME).delete(&name(&pods[0]), &at_once).await?;
        self.rolled_out(None).await?;
        sleep(AROUND_A_STEP).await;
        let counts = self.counts().await?;
        println!("figure a pod killed with SIGKILL: {} requests failed with it", counts.failed - self.failed);
        self.failed = counts.failed;
        sleep(AROUND_A_STEP).await;
        self.unharmed("after the kill").await?;
        println!("figure slowest answers, ms: {:?}; load of {} s", counts.slowest_ms, counts.seconds);
        Ok(())
    }

    async fn uninstall_and_again(&mut self) -> Result<()> {
        self.cluster.remove("v1", "Pod", Some(AROUND), "load").await?;
        let jwks = self.keys().await?;
        self.cluster.helm(["uninstall", RELEASE, "--namespace", HOME, "--wait"]).await?;
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            let left = self.cluster.get(version, kind, None, definition).await?;
            ensure!(left.is_object(), "{definition} went with the install");
        }
        self.app_object().await?;
        ensure!(self.keys().await? == jwks, "the keys changed");
        let rendered = self.cluster.list("v1", "Secret", HOME, "type=latchkey.dev/rendered-app").await?;
        ensure!(rendered.len() == 1, "{} rendered Apps are left", rendered.len());
        let lease = format!("{RELEASE}-operator");
        ensure!(self.cluster.get("coordination.k8s.io/v1", "Lease", Some(HOME), &lease).await?.is_object(), "no Lease");
        ensure!(self.cluster.list("apps/v1", "Deployment", HOME, "").await?.len() == 2, "more than the stores is left");
        println!("ok     helm uninstall leaves definitions, App, keys, rendered App and Lease, and nothing else");
        self.restore_keys().await?;

        let chart = Cluster::chart();
        let args = ["install", OTHER_RELEASE, &chart, "--namespace", HOME, "--wait", "--take-ownership"];
        let version = self.options.next_version.as_ref().unwrap_or(&self.options.version);
        let notes = self.cluster.helm(args.map(String::from).into_iter().chain(self.least(version))).await?;
        self.app_is_ready().await?;
        ensure!(self.keys().await? == jwks, "the keys changed");
        self.journey("again", OTHER_RELEASE, &[]).await?;
        self.helm_test(OTHER_RELEASE).await?;
        println!("ok     installed again under another name, with the same keys");
        self.remove_all(&notes).await
    }

    /// The keys from a copy, as docs/operations.md has it, once all that the operator made is gone.
    async fn restore_keys(&self) -> Result<()> {
        let of = |type_| ["-n", HOME, "get", "secret", "--field-selector", type_];
        let (keys, rendered) = (of("type=latchkey.dev/app-keys"), of("type=latchkey.dev/rendered-app"));
        let copy = tempfile::NamedTempFile::new()?;
        std::fs::write(copy.path(), self.cluster.kubectl([&keys[..], &["-o", "yaml"]].concat()).await?)?;
        for mut delete in [keys, rendered] {
            delete[2] = "delete";
            self.cluster.kubectl(delete).await?;
        }
        self.cluster.kubectl(["-n", HOME, "apply", "-f", &copy.path().display().to_string()]).await?;
        println!("ok     the keys are put back from a copy");
        Ok(())
    }

    /// As NOTES say, and docs/install.md.
    async fn remove_all(&self, notes: &str) -> Result<()> {
        self.cluster.helm(["uninstall", OTHER_RELEASE, "--namespace", HOME, "--wait"]).await?;
        let docs = std::fs::read_to_string(process::root().join("docs/install.md"))?;
        for command in removals(&self.notes) {
            let documented = command.replace(HOME, "latchkey");
            ensure!(docs.contains(&documented), "docs/install.md does not say {documented}");
        }
        let lease_of_the_first = removals(&self.notes).filter(|command| command.contains(" lease "));
        for command in removals(notes).chain(lease_of_the_first) {
            self.cluster.kubectl(command.split_whitespace().skip(1)).await?;
        }
        for type_ in ["latchkey.dev/rendered-app", "latchkey.dev/app-keys"] {
            let left = self.cluster.list("v1", "Secret", HOME, &format!("type={type_}")).await?;
            ensure!(left.is_empty(), "{} Secrets {type_} are left", left.len());
        }
        let left = self.cluster.list("coordination.k8s.io/v1", "Lease", HOME, "").await?;
        ensure!(left.is_empty(), "{} Leases are left", left.len());
        for definition in ["apps.latchkey.dev", "providers.latchkey.dev"] {
            let (version, kind) = ("apiextensions.k8s.io/v1", "CustomResourceDefinition");
            ensure!(self.cluster.get(version, kind, None, definition).await?.is_null(), "{definition} is left");
        }
        println!("ok     the commands of NOTES and docs/install.md remove what is left");
        Ok(())
    }

    /// The data of the keys' Secret.
    async fn keys(&self) -> Result<Value> {
        let keys = self.cluster.list("v1", "Secret", HOME, "type=latchkey.dev/app-keys").await?;
        ensure!(keys.len() == 1, "{} keys' Secrets are there", keys.len());
        Ok(keys[0]["data"].clone())
    }

    // --- Figures

    async fn figures(&self) -> Result<()> {
        // What starting takes is given back.
        sleep(Duration::from_secs(15)).await;
        for pod in self.cluster.pods(HOME).list(&ListParams::default()).await?.items {
            let pod = serde_json::to_value(pod)?;
            let labels = &pod["metadata"]["labels"];
            let Some(component @ ("server" | "operator")) = labels["app.kubernetes.io/component"].as_str() else {
                continue;
            };
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            println!(
                "figure {component} {name}: ready {} after its container began, {}",
                cold_start(&pod)?,
                self.memory(&pod, name, component).await?
            );
        }
        Ok(())
    }

    /// As the kubelet sees it.
    async fn memory(&self, pod: &Value, name: &str, container: &str) -> Result<String> {
        let node = pod["spec"]["nodeName"].as_str().context("a pod is on a node")?;
        let summary = self.cluster.raw(&format!("/api/v1/nodes/{node}/proxy/stats/summary")).await?;
        let pods = summary["pods"].as_array().context("the kubelet tells of pods")?;
        let found = pods.iter().find(|pod| pod["podRef"]["name"] == name).context("the kubelet knows the pod")?;
        let containers = found["containers"].as_array().context("a pod has containers")?;
        let memory = &containers.iter().find(|one| one["name"] == container).context("its container")?["memory"];
        let mib = |field: &str| memory[field].as_f64().unwrap_or(0.0) / 1024.0 / 1024.0;
        Ok(format!("idle: {:.1} MiB working set, {:.1} MiB RSS", mib("workingSetBytes"), mib("rssBytes")))
    }

    /// Where the test stopped.
    async fn show(&self) {
        for namespace in [HOME, AROUND] {
            let Ok(pods) = self.cluster.pods(namespace).list(&ListParams::default()).await else { continue };
            for pod in pods.items {
                println!("--- {namespace}/{}: {}", name(&pod), json!(pod.status));
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

/// Where a release's public API is.
fn service(release: &str) -> String {
    format!("http://{release}-server.{HOME}")
}

/// Arguments for Helm: both programs of that version.
fn tags(version: &str) -> impl Iterator<Item = String> {
    let tag = move |component| ["--set-string".to_owned(), format!("{component}.image.tag={version}")];
    ["operator", "server"].into_iter().flat_map(tag)
}

/// The commands in NOTES that delete.
fn removals(notes: &str) -> impl Iterator<Item = &str> {
    notes.lines().map(str::trim).filter(|line| line.starts_with("kubectl ") && line.contains(" delete "))
}

fn name(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

fn condition(object: &Value, type_: &str) -> String {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|condition| condition["type"] == type_);
    found.and_then(|condition| condition["status"].as_str()).unwrap_or_default().to_owned()
}

/// From the start of the container until the pod was ready, to the second, as the kubelet noted it.
fn cold_start(pod: &Value) -> Result<String> {
    let at = |text: &Value| -> Result<time::OffsetDateTime> {
        let text = text.as_str().context("a time")?;
        Ok(time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339)?)
    };
    let started = at(&pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"])?;
    let conditions = pod["status"]["conditions"].as_array().context("a pod has conditions")?;
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready").context("Ready")?;
    Ok(format!("{} s", (at(&ready["lastTransitionTime"])? - started).whole_seconds()))
}
