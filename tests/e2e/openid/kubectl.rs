//! kubectl with kubelogin. The kube-apiserver trusts the provider, and a RoleBinding names a group.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use http::StatusCode;
use k8s_openapi::api::{core::v1::ConfigMap, rbac::v1::RoleBinding};
use kube::{Api, api::PostParams};
use latchkey_tests::{
    builders::Client,
    control_plane::{self, ControlPlane},
    eventually, eventually_ok,
    openid::{GROUP, OpenIdProvider, User, jwt_header},
    passwords::PASSWORD,
    process::{self, Process, Program},
    tools,
    web_browser::WebBrowser,
};
use serde_json::{Value, json};

/// The prefix that the API server puts before the names of the provider's users and groups.
const PREFIX: &str = "latchkey:";
const ROTATE_SECRET_ANNOTATION: &str = "latchkey.dev/rotate-secret";
/// Time limit for a call of kubectl, including the login. The API server reads the provider's keys within 10 s after
/// its start.
const LIMIT: Duration = Duration::from_secs(90);
const OPEN_LINE: &str = "Please visit the following URL in your browser: ";

/// A provider, a cluster that trusts it, and a user's kubectl.
struct KubectlTest {
    provider: OpenIdProvider,
    plane: ControlPlane,
    namespace: String,
    client: Client,
    /// The port at which kubelogin waits for the browser.
    port: u16,
}

/// A user's files: the kubeconfig and the cached tokens.
struct Home {
    dir: PathBuf,
}

// === impl KubectlTest ===

impl KubectlTest {
    /// Starts the provider and the cluster. `make_client` gets the provider and the redirect URL, and returns the
    /// Client.
    async fn start(make_client: impl FnOnce(&OpenIdProvider, &str) -> Client) -> Self {
        let provider = OpenIdProvider::start().await.unwrap();
        let port = process::free_port();
        let client = make_client(&provider, &format!("http://localhost:{port}"))
            .set("/scopes", json!(["openid", "email", "groups", "offline_access"]));
        provider.apply_client(&client).await.unwrap();
        let (issuer, ca) = (provider.issuer(), provider.ca().display().to_string());
        let plane = ControlPlane::start_with(&[
            &format!("--oidc-issuer-url={issuer}"),
            &format!("--oidc-client-id={}", client.client_id()),
            &format!("--oidc-ca-file={ca}"),
            "--oidc-username-claim=email",
            &format!("--oidc-username-prefix={PREFIX}"),
            "--oidc-groups-claim=groups",
            &format!("--oidc-groups-prefix={PREFIX}"),
        ])
        .await
        .unwrap();
        let namespace = plane.namespace("kubectl").await.unwrap();
        let config_maps: Api<ConfigMap> = Api::namespaced(plane.admin().await, &namespace);
        let config_map = json!({ "metadata": { "name": "settings" }, "data": { "color": "blue" } });
        let config_map = serde_json::from_value(config_map).unwrap();
        config_maps.create(&PostParams::default(), &config_map).await.unwrap();
        let bindings: Api<RoleBinding> = Api::namespaced(plane.admin().await, &namespace);
        let binding = json!({
            "metadata": { "name": "operations" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin" },
            "subjects": [{
                "apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": format!("{PREFIX}{GROUP}"),
            }],
        });
        bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
        Self { provider, plane, namespace, client, port }
    }

    /// The arguments of `kubelogin get-token`.
    fn kubelogin_args(&self, home: &Home, secret: Option<&str>) -> Vec<String> {
        let mut args = vec![
            "get-token".to_owned(),
            format!("--oidc-issuer-url={}", self.provider.issuer()),
            format!("--oidc-client-id={}", self.client.client_id()),
            "--oidc-extra-scope=email".to_owned(),
            "--oidc-extra-scope=groups".to_owned(),
            "--oidc-extra-scope=offline_access".to_owned(),
            format!("--certificate-authority={}", self.provider.ca().display()),
            format!("--listen-address=127.0.0.1:{}", self.port),
            format!("--token-cache-dir={}", home.dir.join("cache").display()),
            "--skip-open-browser".to_owned(),
        ];
        args.extend(secret.map(|secret| format!("--oidc-client-secret={secret}")));
        args
    }

    /// Writes a kubeconfig with kubelogin as the exec plugin.
    fn write_kubeconfig(&self, home: &Home, secret: Option<&str>) {
        let exec = json!({
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "interactiveMode": "Never",
            "command": tools::kubelogin().unwrap(),
            "args": self.kubelogin_args(home, secret),
        });
        let cluster = json!({
            "server": format!("https://{}", self.plane.addr()), "certificate-authority": self.plane.ca_path(),
        });
        let context = json!({ "cluster": "tests", "user": "oidc", "namespace": self.namespace });
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "tests", "cluster": cluster }],
            "users": [{ "name": "oidc", "user": { "exec": exec } }],
            "contexts": [{ "name": "tests", "context": context }],
            "current-context": "tests",
        });
        fs::write(home.kubeconfig(), kubeconfig.to_string()).unwrap();
    }

    /// Runs kubectl. Logs in if kubelogin waits for the browser. Returns whether kubectl succeeded, and its output.
    async fn kubectl(&self, home: &Home, user: Option<&User>, args: &[&str]) -> (bool, String) {
        let log = process::fresh_dir("kubectl").join("kubectl.log");
        let kubectl = Program::new("kubectl", control_plane::kubectl().unwrap(), &log)
            .env("KUBECONFIG", &home.kubeconfig().display().to_string())
            .env("HOME", &home.dir.display().to_string())
            .args(args)
            .start()
            .unwrap();
        self.finish(kubectl, user, &log).await
    }

    /// Runs `kubelogin get-token`. Returns the ID token.
    async fn get_token(&self, home: &Home, user: Option<&User>, flags: &[&str]) -> String {
        let log = process::fresh_dir("kubelogin").join("kubelogin.log");
        let kubelogin = Program::new("kubelogin", tools::kubelogin().unwrap(), &log)
            .env("HOME", &home.dir.display().to_string())
            .args(self.kubelogin_args(home, None))
            .args(flags)
            .start()
            .unwrap();
        let (succeeded, output) = self.finish(kubelogin, user, &log).await;
        assert!(succeeded, "{output}");
        let credential = output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
        credential.expect("an ExecCredential")["status"]["token"].as_str().expect("a token").to_owned()
    }

    async fn finish(&self, process: Process, user: Option<&User>, log: &Path) -> (bool, String) {
        let read = || fs::read_to_string(log).unwrap_or_default();
        let url = eventually("the end, or a login", LIMIT, || async {
            let text = read();
            // The last line can be incomplete.
            let (complete, _) = text.rsplit_once('\n').unwrap_or_default();
            let url =
                complete.lines().find_map(|line| line.split_once(OPEN_LINE).map(|(_, url)| url.trim().to_owned()));
            match url {
                Some(url) => Some(Some(url)),
                None => process.exit_status().map(|_| None),
            }
        })
        .await;
        if let Some(url) = url {
            let user = user.unwrap_or_else(|| panic!("no login is expected: {}", read()));
            let page = self.browser().sign_in(&url, &user.email, PASSWORD).await.unwrap();
            assert_eq!(page.status, StatusCode::OK, "{} {}", page.address, page.html);
        }
        let status = tokio::time::timeout(LIMIT, process.wait_for_exit()).await;
        (status.unwrap_or_else(|_| panic!("it does not end: {}", read())).success(), read())
    }

    fn browser(&self) -> WebBrowser {
        self.provider.browser().unwrap()
    }

    /// Waits until the API server accepts the provider's tokens. Before that, the API server must read the provider's
    /// keys, which it does within 10 s after its start.
    async fn wait_until_trusted(&self, home: &Home) {
        eventually_ok("the API server trusts the provider", LIMIT, || async {
            let (succeeded, output) = self.kubectl(home, None, &["auth", "whoami"]).await;
            if succeeded && output.contains(PREFIX) { Ok(()) } else { Err(output) }
        })
        .await;
    }
}

// === impl Home ===

impl Home {
    fn new() -> Self {
        Self { dir: process::fresh_dir("home") }
    }

    fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }
}

#[tokio::test]
async fn a_group_has_permissions_in_the_cluster_through_a_role_binding() {
    let public = |provider: &OpenIdProvider, url: &str| Client::public("kubectl", provider.app(), url);
    let test = KubectlTest::start(public).await;
    let member = test.provider.create_user("ada@example.com", &[GROUP]).await.unwrap();
    let other = test.provider.create_user("eve@example.com", &["sales"]).await.unwrap();
    test.provider.publish_next_keys().await.unwrap();
    let home = Home::new();
    test.write_kubeconfig(&home, None);
    let first = test.get_token(&home, Some(&member), &[]).await;
    test.wait_until_trusted(&home).await;

    // The token is cached, so no further login is needed.
    let (succeeded, output) = test.kubectl(&home, None, &["auth", "whoami", "-o", "json"]).await;
    assert!(succeeded, "{output}");
    let review: Value = serde_json::from_str(&output).unwrap();
    let info = &review["status"]["userInfo"];
    assert_eq!(info["username"], format!("{PREFIX}{}", member.email), "{info}");
    assert_eq!(info["groups"], json!([format!("{PREFIX}{GROUP}"), "system:authenticated"]), "{info}");
    let (succeeded, output) = test.kubectl(&home, None, &["get", "configmap", "settings", "-o", "yaml"]).await;
    assert!(succeeded && output.contains("color: blue"), "{output}");

    // A refresh gives another ID token, also after the key has changed.
    let refreshed = test.get_token(&home, None, &["--force-refresh"]).await;
    assert_ne!(refreshed, first);
    test.provider.use_next_keys().await.unwrap();
    let rotated = test.get_token(&home, None, &["--force-refresh"]).await;
    assert_ne!(jwt_header(&rotated).unwrap()["kid"], jwt_header(&first).unwrap()["kid"]);
    let (succeeded, output) = test.kubectl(&home, None, &["get", "configmap", "settings"]).await;
    assert!(succeeded, "with the new key: {output}");

    // A user without the group is known to the cluster, but has no permissions.
    let home = Home::new();
    test.write_kubeconfig(&home, None);
    let (succeeded, output) = test.kubectl(&home, Some(&other), &["get", "configmap", "settings"]).await;
    assert!(!succeeded, "{output}");
    let refusal = format!("User \"{PREFIX}{}\" cannot get resource \"configmaps\"", other.email);
    assert!(output.contains(&refusal), "{output}");
}

#[tokio::test]
async fn kubectl_works_with_a_rotated_client_secret() {
    let web = |provider: &OpenIdProvider, url: &str| Client::web("kubectl", provider.app(), url);
    let test = KubectlTest::start(web).await;
    let member = test.provider.create_user("ada@example.com", &[GROUP]).await.unwrap();
    let old = test.provider.client_secret(&test.client).unwrap();
    let client = test.client.clone().annotate(ROTATE_SECRET_ANNOTATION, "1");
    test.provider.apply_client(&client).await.unwrap();
    let new = test.provider.client_secret(&client).unwrap();
    assert_ne!(old, new);
    for secret in [&old, &new] {
        let home = Home::new();
        test.write_kubeconfig(&home, Some(secret));
        // The first call logs in. It can fail, because it is possible that the API server does not trust the provider
        // yet.
        test.kubectl(&home, Some(&member), &["auth", "whoami"]).await;
        test.wait_until_trusted(&home).await;
        let (succeeded, output) = test.kubectl(&home, None, &["get", "configmap", "settings"]).await;
        assert!(succeeded, "{output}");
    }
}
