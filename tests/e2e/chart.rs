//! The chart: the API server accepts its objects, the documentation lists its values, and the programs know the flags
//! that the chart passes.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use anyhow::Result;
use http::StatusCode;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use latchkey_tests::{
    builders::{App, Provider},
    cluster::{
        TestCluster, apply,
        chart::{self, template},
    },
    passwords::PASSWORD,
    process,
    stack::Stack,
    tools,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// API groups that are optional in a cluster.
const OPTIONAL_GROUPS: [&str; 2] = ["monitoring.coreos.com", "gateway.networking.k8s.io"];

/// The programs and the API server apply a change within one or two seconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(60);

fn minimal_values() -> Vec<String> {
    vec!["--values".to_owned(), chart::folder().join("ci/minimal-values.yaml").display().to_string()]
}

/// Renders the chart with the minimal values and further arguments for Helm.
async fn render(helm_args: &[&str]) -> Result<Vec<Value>> {
    let args: Vec<String> = minimal_values().into_iter().chain(helm_args.iter().map(|arg| (*arg).to_owned())).collect();
    template("latchkey", "latchkey", args).await
}

async fn render_with_values(namespace: &str, values_file: &Path) -> Vec<Value> {
    template("latchkey", namespace, [Path::new("--values"), values_file]).await.unwrap()
}

fn objects_of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn deployment<'a>(objects: &'a [Value], component: &str) -> &'a Value {
    let found = objects_of_kind(objects, "Deployment")
        .into_iter()
        .find(|object| object["metadata"]["labels"]["app.kubernetes.io/component"] == component);
    found.unwrap_or_else(|| panic!("no Deployment of the {component}"))
}

/// Works like `kubectl apply --server-side --dry-run=server --validate=strict` with one object.
async fn dry_run(client: &Client, object: &Value) -> Result<DynamicObject, kube::Error> {
    let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(object.types.as_ref().unwrap()).unwrap());
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let params = PatchParams::apply("dry-run").force().dry_run().validation_strict();
    api.patch(object.metadata.name.as_deref().unwrap(), &params, &Patch::Apply(&object)).await
}

#[tokio::test]
async fn the_api_server_accepts_the_objects_of_every_value_file() {
    let cluster = TestCluster::shared().await;
    let client = cluster.admin().await;
    let files = chart::value_files().unwrap();
    assert!(files.len() >= 4, "{files:?}");
    for file in files {
        let namespace = cluster.plane().namespace("dry-run").await.unwrap();
        let objects = render_with_values(&namespace, &file).await;
        assert!(objects.len() > 15, "{}: {}", file.display(), objects.len());
        for object in objects {
            let group = object["apiVersion"].as_str().unwrap().split('/').next().unwrap();
            if OPTIONAL_GROUPS.contains(&group) {
                continue;
            }
            let accepted = dry_run(&client, &object).await;
            accepted.unwrap_or_else(|error| panic!("{}: {} of {object:#}", file.display(), error));
        }
    }
}

#[tokio::test]
async fn the_dry_run_refuses_an_invalid_object() {
    let cluster = TestCluster::shared().await;
    let namespace = cluster.plane().namespace("dry-run").await.unwrap();
    let objects = template("latchkey", &namespace, minimal_values()).await.unwrap();
    let mut wrong = deployment(&objects, "server").clone();
    wrong["spec"]["template"]["spec"]["containers"][0]["preStop"] = json!({});
    dry_run(&cluster.admin().await, &wrong).await.unwrap_err();
}

/// The pod templates of the Deployments, and the pods of `helm test`.
async fn pods(namespace: &str, file: &Path) -> Vec<Value> {
    let mut pods = Vec::new();
    for object in render_with_values(namespace, file).await {
        if object["kind"] == "Deployment" {
            let mut pod = object["spec"]["template"].clone();
            pod["metadata"]["name"] = object["metadata"]["name"].clone();
            pods.push(pod);
        }
    }
    let with_test = chart::template_with_tests("latchkey", namespace, [Path::new("--values"), file]).await.unwrap();
    pods.extend(with_test.into_iter().filter(|object| object["kind"] == "Pod"));
    pods
}

#[tokio::test]
async fn pods_are_admitted_under_restricted_pod_security() {
    let cluster = TestCluster::shared().await;
    let client = cluster.admin().await;
    for file in chart::value_files().unwrap() {
        let namespace = cluster.plane().namespace("restricted").await.unwrap();
        let labels = json!({ "metadata": { "labels": { "pod-security.kubernetes.io/enforce": "restricted" } } });
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.patch(&namespace, &PatchParams::default(), &Patch::Merge(labels)).await.unwrap();
        for object in render_with_values(&namespace, &file).await {
            if object["kind"] == "ServiceAccount" {
                apply(&client, &object).await.unwrap();
            }
        }
        // Without a controller, the namespace has no default ServiceAccount.
        let default = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
                              "metadata": { "name": "default", "namespace": namespace } });
        apply(&client, &default).await.unwrap();
        let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let pods = pods(&namespace, &file).await;
        assert_eq!(pods.len(), 3, "{}", file.display());
        for pod in pods {
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let refused = {
                let mut pod = pod.clone();
                pod.spec.as_mut().unwrap().containers[0].security_context = None;
                api.create(&dry_run, &pod).await.unwrap_err()
            };
            assert!(refused.to_string().contains("violates PodSecurity"), "{refused}");
            api.create(&dry_run, &pod).await.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
}

#[tokio::test]
async fn the_refusal_of_an_unknown_or_wrong_value_names_the_value() {
    for (value, message) in [
        ("server.replcas=3", "replcas"),
        ("sever.replicas=3", "sever"),
        ("server.autoscaling.max=3", "max"),
        ("server.image.tga=1", "tga"),
        ("limitCeilings.loginsPerYear[0].count=1", "loginsPerYear"),
        ("networkPolicy.egress.smtp.ports[0]=25", "smtp"),
        ("server.replicas=many", "/server/replicas"),
        ("server.connectionsPerClient=1000000", "/server/connectionsPerClient"),
        ("server.passwordHashing.memoryMiB=18", "/server/passwordHashing/memoryMiB"),
        ("server.passwordHashing.memoryMiB=129", "/server/passwordHashing/memoryMiB"),
        ("server.passwordHashing.iterations=1", "/server/passwordHashing/iterations"),
        ("server.passwordHashing.parallelism=2", "parallelism"),
        ("server.image.digest=sha256:abc", "/server/image/digest"),
        ("service.type=ExternalName", "/service/type"),
        ("trustedProxies[0]=proxy.example.com", "/trustedProxies/0"),
        ("httpRoute.enabled=true", "/httpRoute"),
        ("httpRoute.extraHostnames[0]=Login.example.com", "/httpRoute/extraHostnames/0"),
        ("httpRoute.referenceGrant.namespace=shop", "namespace"),
        ("ingress.extraHosts[0].tlsSecret=login", "/ingress/extraHosts/0"),
        ("ingress.extraHosts[0].host=*.example.com", "/ingress/extraHosts/0/host"),
        ("tracing.url=http://collector:4318", "url"),
        ("tracing.endpoint=collector:4318", "/tracing/endpoint"),
        ("tracing.samplerArgument=2", "/tracing/samplerArgument"),
        ("caBundle.configMap=authorities,caBundle.secret=authorities", "/caBundle"),
        // Credentials belong in a Secret.
        ("proxy.httpsProxy=http://someone:hush@proxy.example.com", "/proxy/httpsProxy"),
        ("baseURL=auth.example.com", "/baseURL"),
        // `http` is for development only.
        ("baseURL=http://auth.example.com", "/baseURL"),
        // These values are required.
        ("baseURL=", "/baseURL"),
        ("database.existingSecret=", "/database/existingSecret"),
        ("redis.existingSecret=", "/redis/existingSecret"),
    ] {
        let refused = render(&["--set", value]).await.expect_err(value).to_string();
        assert!(refused.contains(message) && refused.contains("schema"), "{value}: {refused}");
    }
    render(&["--set", "server.replicas=3"]).await.unwrap();
    let with_maximum = render(&["--set", "server.connectionsPerClient=10000"]).await.unwrap();
    assert!(deployment(&with_maximum, "server").to_string().contains("--connections-per-client=10000\""));
    render(&["--set", "baseURL=http://auth.example.com", "--set", "server.allowInsecure=true"]).await.unwrap();
}

#[tokio::test]
async fn the_servers_get_the_parameters_for_password_hashes() {
    for (values, expected) in [
        (&[][..], ["--hashing-memory-mib=19", "--hashing-iterations=2"]),
        (
            &["--set", "server.passwordHashing.memoryMiB=64", "--set", "server.passwordHashing.iterations=3"][..],
            ["--hashing-memory-mib=64", "--hashing-iterations=3"],
        ),
    ] {
        let objects = render(values).await.unwrap();
        let args = deployment(&objects, "server")["spec"]["template"]["spec"]["containers"][0]["args"].clone();
        for arg in expected {
            assert!(args.as_array().unwrap().contains(&json!(arg)), "{arg} in {args}");
        }
    }
}

/// Collects the paths of all values, and asserts that the schema has exactly these values. A list or a free-form map is
/// one value.
fn collect_value_paths(values: &Value, schema: &Value, root: &Value, path: &str, paths: &mut BTreeSet<String>) {
    let schema = match schema["$ref"].as_str() {
        Some(reference) => root.pointer(reference.trim_start_matches('#')).unwrap(),
        None => schema,
    };
    match (values, schema.get("properties")) {
        (Value::Object(values), Some(properties)) if !values.is_empty() => {
            assert_eq!(schema["additionalProperties"], false, "{path} accepts unknown values");
            for (name, value) in values {
                let property = &properties[name];
                assert!(!property.is_null(), "the schema does not know {path}{name}");
                collect_value_paths(value, property, root, &format!("{path}{name}."), paths);
            }
            for name in properties.as_object().unwrap().keys() {
                let is_expected =
                    values.contains_key(name) || (path.is_empty() && ["global", "enabled"].contains(&name.as_str()));
                assert!(is_expected, "values.yaml does not show {path}{name}");
            }
        }
        _ => {
            paths.insert(path.trim_end_matches('.').to_owned());
        }
    }
}

fn read(path: impl AsRef<Path>) -> String {
    let path = process::root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn value_paths() -> BTreeSet<String> {
    let values: Value = serde_yaml::from_str(&read("charts/latchkey/values.yaml")).unwrap();
    let schema: Value = serde_json::from_str(&read("charts/latchkey/values.schema.json")).unwrap();
    let mut found = BTreeSet::new();
    collect_value_paths(&values, &schema, &schema, "", &mut found);
    found
}

#[test]
fn the_schema_has_exactly_the_values_of_values_yaml() {
    let found = value_paths();
    assert!(found.contains("server.image.digest") && found.contains("networkPolicy.egress.dns.ports"), "{found:?}");
}

/// A value of the chart, with its default and with the comment above it in values.yaml.
struct DocumentedValue {
    path: String,
    default: String,
    text: String,
}

/// The values in the order of values.yaml.
fn documented_values() -> Vec<DocumentedValue> {
    let known_paths = value_paths();
    let mut documented: Vec<DocumentedValue> = Vec::new();
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut comment: Vec<String> = Vec::new();
    // A comment belongs only to the line below it.
    for line in read("charts/latchkey/values.yaml").lines() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        if line.is_empty() {
            comment.clear();
        } else if let Some(text) = line.strip_prefix('#') {
            comment.push(text.trim().to_owned());
        } else if let Some((name, default)) = line.split_once(':') {
            path.retain(|(parent_indent, _)| *parent_indent < indent);
            path.push((indent, name.to_owned()));
            let dotted_path = path.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(".");
            if known_paths.contains(&dotted_path) {
                let default = match default.trim() {
                    "" => "see values.yaml".to_owned(),
                    literal => format!("`{}`", literal.replace('|', "\\|")),
                };
                documented.push(DocumentedValue { path: dotted_path, default, text: comment.join(" ") });
            }
            comment.clear();
        }
    }
    documented
}

const TABLE_MARKER: &str = "<!-- Generated from values.yaml by the tests with UPDATE_DOCS=1. -->\n";

#[test]
fn the_charts_readme_lists_the_values_of_values_yaml() {
    let mut table = String::from("| value | default | |\n|---|---|---|\n");
    let documented = documented_values();
    for DocumentedValue { path, default, text } in &documented {
        table.push_str(&format!("| `{path}` | {default} | {} |\n", text.replace('|', "\\|")));
    }
    let listed: BTreeSet<_> = documented.iter().map(|value| value.path.clone()).collect();
    let missing: Vec<_> = value_paths().into_iter().filter(|path| !listed.contains(path)).collect();
    assert!(missing.iter().all(|path| path.contains("resources.")), "{missing:?}");
    let page = "charts/latchkey/README.md";
    let current = read(page);
    let (head, _) = current.split_once(TABLE_MARKER).expect("the README has a place for the values");
    let expected = format!("{head}{TABLE_MARKER}\n{table}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(process::root().join(page), &expected).unwrap();
    }
    assert!(read(page) == expected, "{page} differs from values.yaml; run the tests with UPDATE_DOCS=1");
}

#[tokio::test]
async fn an_autoscaler_replaces_the_fixed_number_of_replicas() {
    let fixed = render(&[]).await.unwrap();
    assert_eq!(deployment(&fixed, "server")["spec"]["replicas"], 2);
    assert!(objects_of_kind(&fixed, "HorizontalPodAutoscaler").is_empty());
    let scaled = render(&["--set", "server.autoscaling.enabled=true"]).await.unwrap();
    let server = deployment(&scaled, "server");
    assert_eq!(server["spec"]["replicas"], Value::Null);
    let autoscalers = objects_of_kind(&scaled, "HorizontalPodAutoscaler");
    assert_eq!(autoscalers[0]["spec"]["scaleTargetRef"]["name"], server["metadata"]["name"]);
    let unmanaged = render(&["--set", "server.replicas=null"]).await.unwrap();
    assert_eq!(deployment(&unmanaged, "server")["spec"]["replicas"], Value::Null);
}

#[tokio::test]
async fn a_rollout_or_a_node_drain_stops_no_server_before_another_serves() {
    let objects = render(&[]).await.unwrap();
    let server = deployment(&objects, "server");
    assert_eq!(server["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"], 0);
    let pod = &server["spec"]["template"]["spec"];
    let pre_stop = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64().unwrap();
    let drain = pod["containers"][0]["args"]
        .as_array()
        .unwrap()
        .iter()
        .find_map(|arg| arg.as_str()?.strip_prefix("--drain-seconds=")?.parse::<i64>().ok());
    // A request can run for 35 s after the drain of the server (`--drain-seconds`).
    assert!(pod["terminationGracePeriodSeconds"].as_i64().unwrap() >= pre_stop + drain.unwrap() + 35);
    for budget in objects_of_kind(&objects, "PodDisruptionBudget") {
        assert_eq!(budget["spec"]["maxUnavailable"], 1);
        assert_eq!(budget["spec"]["unhealthyPodEvictionPolicy"], "AlwaysAllow");
    }
    assert_eq!(objects_of_kind(&objects, "PodDisruptionBudget").len(), 2);
}

#[tokio::test]
async fn the_programs_know_every_flag_that_the_chart_passes() {
    let mut commands = 0;
    for file in chart::value_files().unwrap() {
        for pod in pods("latchkey", &file).await {
            let spec = &pod["spec"];
            let containers =
                ["initContainers", "containers"].iter().flat_map(|list| spec[list].as_array().into_iter().flatten());
            for container in containers {
                let image = container["image"].as_str().unwrap();
                let program = if image.contains("operator") { "latchkey-operator" } else { "latchkey-server" };
                let args = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
                let args: Vec<String> = args.map(|arg| arg.replace("$(POD_NAME)", "pod")).collect();
                let mut command = std::process::Command::new(process::find_built_program(program).unwrap());
                // The program checks the other arguments before it prints the help.
                let output = command.args(&args).arg("--help").output().unwrap();
                assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
                commands += 1;
            }
        }
    }
    assert!(commands >= 16, "{commands}");
    let unknown = ["--drain-second=1", "--help"];
    let mut command = std::process::Command::new(process::find_built_program("latchkey-server").unwrap());
    assert!(!command.args(unknown).output().unwrap().status.success());
}

#[tokio::test]
async fn the_chart_renders_no_secret() {
    let secrets = render(&[]).await.unwrap();
    assert!(
        objects_of_kind(&secrets, "Secret").is_empty(),
        "the chart creates no Secret: the operator and the user do"
    );
}

#[tokio::test]
async fn an_ingress_routes_the_hosts_for_hosted_pages_to_the_public_api() {
    let plain = render(&["--set", "ingress.enabled=true"]).await.unwrap();
    assert_eq!(objects_of_kind(&plain, "Ingress")[0]["spec"]["rules"].as_array().unwrap().len(), 1);
    let hosts = "ingress.extraHosts[0].host=login.a.example,ingress.extraHosts[0].tlsSecret=login-a,\
                 ingress.extraHosts[1].host=login.b.example";
    let objects = render(&["--set", "ingress.enabled=true,ingress.tlsSecret=main", "--set", hosts]).await.unwrap();
    let spec = &objects_of_kind(&objects, "Ingress")[0]["spec"];
    let [base, first, second] = &spec["rules"].as_array().unwrap()[..] else { panic!("{spec:#}") };
    assert_eq!((&first["host"], &second["host"]), (&json!("login.a.example"), &json!("login.b.example")));
    for rule in [first, second] {
        assert_eq!(rule["http"], base["http"], "the backend is the public API");
    }
    let expected = json!([
        { "hosts": [base["host"]], "secretName": "main" },
        { "hosts": ["login.a.example"], "secretName": "login-a" },
        { "hosts": ["login.b.example"] },
    ]);
    assert_eq!(spec["tls"], expected);
}

#[tokio::test]
async fn an_http_route_has_the_hosts_for_hosted_pages_and_other_namespaces_can_route_only_to_the_public_api() {
    let parent = "httpRoute.enabled=true,httpRoute.parentRefs[0].name=gateway";
    let plain = render(&["--set", parent]).await.unwrap();
    let hostnames = |objects: &[Value]| objects_of_kind(objects, "HTTPRoute")[0]["spec"]["hostnames"].clone();
    assert_eq!(hostnames(&plain).as_array().unwrap().len(), 1);
    assert!(objects_of_kind(&plain, "ReferenceGrant").is_empty());
    let extra = "httpRoute.extraHostnames={login.a.example,login.b.example}";
    let objects = render(&["--set", parent, "--set", extra]).await.unwrap();
    let base_host = hostnames(&plain)[0].clone();
    assert_eq!(hostnames(&objects), json!([base_host, "login.a.example", "login.b.example"]));

    // Teams can use HTTPRoutes of their own even if the chart creates no HTTPRoute.
    let objects = render(&["--set", "httpRoute.referenceGrant.namespaces={shop,blog}"]).await.unwrap();
    assert!(objects_of_kind(&objects, "HTTPRoute").is_empty());
    let grants = objects_of_kind(&objects, "ReferenceGrant");
    let from =
        |namespace: &str| json!({ "group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": namespace });
    assert_eq!(grants[0]["spec"]["from"], json!([from("shop"), from("blog")]));
    let service = json!([{ "group": "", "kind": "Service", "name": "latchkey-server" }]);
    assert_eq!((grants.len(), &grants[0]["spec"]["to"]), (1, &service));
    let services = objects_of_kind(&objects, "Service");
    let granted = services.iter().find(|service| service["metadata"]["name"] == "latchkey-server").unwrap();
    let ports: Vec<_> = granted["spec"]["ports"].as_array().unwrap().iter().map(|port| &port["targetPort"]).collect();
    assert_eq!(ports, ["http"], "neither the administration API nor the operations port");
}

#[tokio::test]
async fn the_sample_policy_restricts_app_ids_page_hosts_and_loose_limits() {
    let cluster = TestCluster::shared().await;
    let client = cluster.admin().await;
    let namespace = cluster.plane().namespace("policy").await.unwrap();
    for document in serde_yaml::Deserializer::from_str(&read("charts/latchkey/samples/admission-policy.yaml")) {
        let mut object = Value::deserialize(document).unwrap();
        // The policy gets a unique name and applies only to this namespace, because other tests use the same cluster.
        object["metadata"]["name"] = json!(namespace);
        if object["kind"] == "ValidatingAdmissionPolicyBinding" {
            object["spec"]["policyName"] = json!(namespace);
            object["spec"]["matchResources"] =
                json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace } } });
        }
        apply(&client, &object).await.unwrap();
    }
    let dry_run_app =
        async |app: &App| dry_run(&client, &app.objects(&namespace)[0]).await.map(|_| ()).map_err(|e| e.to_string());
    let own = App::with_id(&namespace);
    let other = App::new("shop");
    // A policy takes effect a moment after its creation.
    let error =
        latchkey_tests::eventually("the policy applies", LIMIT, || async { dry_run_app(&other).await.err() }).await;
    assert!(error.contains(&format!("cannot claim the appID {}", other.id())), "{error}");
    dry_run_app(&own).await.unwrap();
    let named = App::with_id("another-name").set("/appID", namespace.clone());
    dry_run_app(&named).await.unwrap();
    let loose = own.clone().limit("loginFailuresPerClient", &[(11, 900)]);
    let error = dry_run_app(&loose).await.unwrap_err();
    assert!(error.contains("loginFailuresPerClient is looser"), "{error}");
    dry_run_app(&own.clone().limit("loginFailuresPerClient", &[(1000, 86_400), (5, 900)])).await.unwrap();
    dry_run_app(&own.clone().limit("codesPerClient", &[(11, 60)])).await.unwrap_err();
    let with_host = own.clone().set("/pages/host", "login.shop.example.com");
    let error = dry_run_app(&with_host).await.unwrap_err();
    assert!(error.contains("cannot have the host login.shop.example.com"), "{error}");
    dry_run_app(&own.clone().set("/pages/mode", "Enabled")).await.unwrap();

    let allowed = json!({ "metadata": {
        "annotations": {
            "latchkey.dev/app-ids": format!("elsewhere, {}", other.id()),
            "latchkey.dev/pages-hosts": "login.example.com, login.shop.example.com",
        },
        "labels": { "latchkey.dev/loose-limits": "allowed" },
    } });
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.patch(&namespace, &PatchParams::default(), &Patch::Merge(allowed)).await.unwrap();
    latchkey_tests::eventually_ok("the namespace's annotation takes effect", LIMIT, || dry_run_app(&other)).await;
    latchkey_tests::eventually_ok("the namespace's label takes effect", LIMIT, || dry_run_app(&loose)).await;
    dry_run_app(&with_host).await.unwrap();
    dry_run_app(&own.set("/pages/host", "login.other.example.com")).await.unwrap_err();
}

// --- Metrics

/// The name and the type of each metric family on a page in the OpenMetrics format.
fn metric_families(page: &str) -> Vec<(String, String)> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.map(|line| line.split_once(' ').map(|(name, kind)| (name.to_owned(), kind.to_owned())).unwrap()).collect()
}

/// The names of the time series of these metric families.
fn series_names(families: &[(String, String)]) -> BTreeSet<String> {
    let names_of_family = |(name, kind): &(String, String)| match kind.as_str() {
        "counter" => vec![format!("{name}_total")],
        "histogram" => ["bucket", "sum", "count"].map(|part| format!("{name}_{part}")).to_vec(),
        _ => vec![name.clone()],
    };
    families.iter().flat_map(names_of_family).collect()
}

/// The metric families of the server and the operator.
async fn all_metric_families() -> Vec<(String, String)> {
    let unreachable = Provider::new("gone", "oidc").set("issuer", format!("http://{}", process::free_addr()));
    let app = App::new("shop").provider(&unreachable);
    let stack = Stack::builder().app(&app).provider(&unreachable).start().await;
    // The first call to Redis and to a provider creates their metrics.
    let redirect = stack.client().get(&format!("{}/gone/redirect", app.id())).await;
    redirect.expect(StatusCode::SERVICE_UNAVAILABLE);
    stack.client().register(app.id(), "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    let server_page = stack.server().get_ops("metrics").await.text;
    let install = TestCluster::shared().await.install().await;
    let operator = install.start_operator().await;
    // The last of the operator's metrics appears when the operator starts to reconcile.
    let operator_page = latchkey_tests::eventually_ok("the operator's metrics", LIMIT, || async {
        let page = reqwest::get(format!("http://{}/metrics", operator.ops)).await?.text().await?;
        anyhow::ensure!(page.contains("controller_runtime_max_concurrent_reconciles"), "{page}");
        Ok(page)
    })
    .await;
    metric_families(&server_page).into_iter().chain(metric_families(&operator_page)).collect()
}

/// The names of the metrics in PromQL expressions.
fn metric_names(expressions: &str) -> BTreeSet<String> {
    let words = expressions.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let prefixes = ["latchkey_", "controller_runtime_", "leader_election_", "rest_client_"];
    words.filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix))).map(str::to_owned).collect()
}

async fn alerts() -> Vec<Value> {
    let objects = render(&["--set", "metrics.prometheusRule.enabled=true"]).await.unwrap();
    let rules = objects_of_kind(&objects, "PrometheusRule")[0]["spec"]["groups"][0]["rules"].clone();
    let Value::Array(rules) = rules else { panic!("no rules") };
    rules
}

fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read("charts/latchkey/dashboards/latchkey.json")).unwrap();
    let panels = dashboard["panels"].as_array().expect("the dashboard has panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    targets.map(|target| target["expr"].as_str().expect("an expression").to_owned()).collect()
}

#[tokio::test]
async fn alerts_and_dashboard_use_existing_metrics_and_the_docs_list_every_metric() {
    let families = all_metric_families().await;
    let series = series_names(&families);
    let expressions: String = alerts().await.iter().map(|alert| format!("{} ", alert["expr"])).collect();
    let dashboard = dashboard_expressions().join(" ");
    for (place, expressions) in [("an alert", expressions), ("the dashboard", dashboard)] {
        let used = metric_names(&expressions);
        assert!(used.len() > 10, "{place}: {used:?}");
        let missing: Vec<_> = used.difference(&series).collect();
        assert!(missing.is_empty(), "{place} names unknown metrics: {missing:?}, known are {series:?}");
    }
    let docs = read("docs/operations.md");
    for (name, kind) in &families {
        let name = if kind == "counter" { format!("{name}_total") } else { name.clone() };
        assert!(docs.contains(&format!("`{name}")), "docs/operations.md does not explain {name}");
    }
}

#[tokio::test]
async fn each_alert_has_a_runbook() {
    let docs = read("docs/operations.md");
    let alerts = alerts().await;
    assert!(alerts.len() > 10);
    for alert in alerts {
        let name = alert["alert"].as_str().unwrap();
        assert!(docs.contains(&format!("### {name}\n")), "docs/operations.md does not say what to do for {name}");
        let runbook = alert["annotations"]["runbook_url"].as_str().unwrap();
        assert!(runbook.ends_with(&format!("#{}", name.to_lowercase())), "{runbook}");
    }
}

// --- Expressions

/// The samples of healthy servers and operators, one every 30 s for an hour. In promtool's notation, `0+300x120` is 0
/// and then 120 samples that each add 300. The test replaces `SERVERS` and `OPERATORS` with labels.
const HEALTHY_SAMPLES: [(&str, &str); 16] = [
    ("up{SERVERS}", "1x120"),
    ("latchkey_http_requests_total{SERVERS,listener=\"public\",status=\"200\"}", "0+300x120"),
    ("latchkey_http_requests_total{SERVERS,listener=\"public\",status=\"503\"}", "0+3x120"),
    ("latchkey_http_request_duration_seconds_bucket{SERVERS,listener=\"public\",le=\"0.5\"}", "0+300x120"),
    ("latchkey_http_request_duration_seconds_bucket{SERVERS,listener=\"public\",le=\"+Inf\"}", "0+303x120"),
    ("latchkey_postgres_errors_total{SERVERS,kind=\"conflict\"}", "0+300x120"),
    ("latchkey_redis_evicts{SERVERS}", "0x120"),
    ("latchkey_outbox_oldest_due_seconds{SERVERS}", "30x120"),
    ("latchkey_mails_total{SERVERS,outcome=\"dead\"}", "0x60 4x60"),
    ("latchkey_audit_lost_total{SERVERS}", "0x120"),
    ("latchkey_audit_refusals_lost_total{SERVERS}", "0x120"),
    ("latchkey_config_refused_total{SERVERS,reason=\"format\"}", "1x120"),
    ("latchkey_config_apps{SERVERS}", "7x120"),
    ("leader_election_master_status{OPERATORS}", "1x120"),
    ("controller_runtime_reconcile_errors_total{OPERATORS,controller=\"app\"}", "3x120"),
    ("latchkey_operator_server_pods{OPERATORS,state=\"silent\"}", "0x120"),
];

/// Samples of an installation in which everything is wrong. The test adds one more series, about server pods that
/// report nothing. Then every alert must fire.
const UNHEALTHY_SAMPLES: [(&str, &str); 19] = [
    ("up{SERVERS}", "0x120"),
    ("latchkey_http_requests_total{SERVERS,listener=\"public\",status=\"200\"}", "0+300x120"),
    ("latchkey_http_requests_total{SERVERS,listener=\"public\",status=\"503\"}", "0+30x120"),
    ("latchkey_http_request_duration_seconds_bucket{SERVERS,listener=\"public\",le=\"1\"}", "0+100x120"),
    ("latchkey_http_request_duration_seconds_bucket{SERVERS,listener=\"public\",le=\"5\"}", "0+300x120"),
    ("latchkey_http_request_duration_seconds_bucket{SERVERS,listener=\"public\",le=\"+Inf\"}", "0+300x120"),
    ("latchkey_hashing_refused_total{SERVERS,reason=\"full\"}", "0+1x120"),
    ("latchkey_postgres_errors_total{SERVERS,kind=\"away\"}", "0+30x120"),
    ("latchkey_redis_errors_total{SERVERS,kind=\"full\"}", "0+30x120"),
    ("latchkey_redis_evicts{SERVERS}", "1x120"),
    ("latchkey_outbox_oldest_due_seconds{SERVERS}", "0+30x120"),
    ("latchkey_mails_total{SERVERS,outcome=\"dead\"}", "0+1x120"),
    ("latchkey_audit_lost_total{SERVERS}", "0x118 1x2"),
    ("latchkey_audit_refusals_lost_total{SERVERS}", "0x120"),
    ("latchkey_config_refused_total{SERVERS,reason=\"format\"}", "0x118 1x2"),
    ("latchkey_config_source_failures_total{SERVERS}", "0+1x120"),
    ("latchkey_config_apps{SERVERS,pod=\"a\"}", "7x120"),
    ("latchkey_config_apps{SERVERS,pod=\"b\"}", "6x120"),
    ("controller_runtime_reconcile_errors_total{OPERATORS,controller=\"app\"}", "0+1x120"),
];

/// Runs `promtool` in a folder, and asserts that it succeeds.
fn promtool(folder: &Path, args: &[&str]) {
    let output =
        std::process::Command::new(tools::promtool().unwrap()).current_dir(folder).args(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "promtool {args:?}: {}", String::from_utf8_lossy(&text));
}

#[tokio::test]
async fn no_alert_fires_for_healthy_samples_and_every_alert_fires_for_unhealthy_samples() {
    let alerts = alerts().await;
    let mut alert_names: Vec<&str> = alerts.iter().map(|alert| alert["alert"].as_str().unwrap()).collect();
    alert_names.sort_unstable();
    let silent = ("latchkey_operator_server_pods{OPERATORS,state=\"silent\"}", "2x120");
    let unhealthy = [&UNHEALTHY_SAMPLES[..], &[silent]].concat();
    let test = |name: &str, series: &[(&str, &str)], firing: &[&str]| {
        let series = series.iter().map(|(series, values)| {
            let series = series.replace("SERVERS", "namespace=\"latchkey\",job=\"latchkey-server-ops\"");
            json!({ "series": series.replace("OPERATORS", "namespace=\"latchkey\",job=\"latchkey-operator-ops\""), "values": values })
        });
        let firing = firing.iter().map(|alert| json!({ "labels": format!("{{alertname=\"{alert}\"}}"), "value": 1 }));
        let query = "max by (alertname) (ALERTS{alertstate=\"firing\"})";
        json!({
            "name": name,
            "interval": "30s",
            "input_series": series.collect::<Vec<_>>(),
            "promql_expr_test": [{ "expr": query, "eval_time": "1h", "exp_samples": firing.collect::<Vec<_>>() }],
        })
    };
    let dir = process::fresh_dir("promtool");
    let rules = json!({ "groups": [{ "name": "latchkey", "rules": alerts }] });
    fs::write(dir.join("rules.json"), rules.to_string()).unwrap();
    let tests = [test("well", &HEALTHY_SAMPLES, &[]), test("ill", &unhealthy, &alert_names)];
    let tests = json!({ "rule_files": ["rules.json"], "evaluation_interval": "30s", "tests": tests });
    fs::write(dir.join("tests.json"), tests.to_string()).unwrap();
    promtool(&dir, &["check", "rules", "--lint=all", "--lint-fatal", "rules.json"]);
    promtool(&dir, &["test", "rules", "tests.json"]);
}

#[test]
fn prometheus_accepts_the_expressions_of_the_dashboard() {
    let rules: Vec<Value> = dashboard_expressions()
        .iter()
        .enumerate()
        .map(|(number, expression)| {
            json!({ "record": format!("panel:{number}"), "expr": expression.replace("$__rate_interval", "5m") })
        })
        .collect();
    let dir = process::fresh_dir("promtool");
    let rules = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    fs::write(dir.join("rules.json"), rules.to_string()).unwrap();
    promtool(&dir, &["check", "rules", "rules.json"]);
}
