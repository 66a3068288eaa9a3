//! A real Keycloak in its own process. Benchmarks compare Latchkey with it. Keycloak's database is a file.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    client::ApiClient,
    process::{self, Process, Program},
    tools,
};

/// Time limit for copying Keycloak's folder.
const COPY_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a start. Keycloak first builds itself for its settings.
const START_LIMIT: Duration = Duration::from_secs(300);
/// The administrator, who exists only until the process ends.
const ADMINISTRATOR: &str = "admin";
/// The memory of the JVM. Keycloak's default maximum is half of this maximum.
const HEAP: &str = "-Xms512m -Xmx1g";
/// `kc.sh` starts Java as its child. This program makes the kernel kill Java when `kc.sh` is killed.
const JAVA: &str = "#!/bin/sh\nexec setpriv --pdeathsig KILL -- \"${JAVA_HOME:+$JAVA_HOME/bin/}java\" \"$@\"\n";

/// A running server in production mode, without TLS.
pub struct Keycloak {
    process: Process,
    addr: SocketAddr,
}

/// A client with a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    pub id: String,
    pub secret: String,
    pub redirect_url: String,
}

// === impl Keycloak ===

impl Keycloak {
    /// Starts a server without additional realms. This takes about a minute.
    pub async fn start() -> Result<Self> {
        let program = tools::keycloak()?;
        let dir = process::fresh_dir("keycloak");
        let home = dir.join("home");
        // Keycloak writes into its own folder.
        let copy = Program::new("cp", "cp", dir.join("copy.log")).arg("-r");
        copy.arg(program.display().to_string()).arg(home.display().to_string()).run(COPY_LIMIT)?;
        let java = dir.join("java");
        fs::write(&java, JAVA)?;
        fs::set_permissions(&java, fs::Permissions::from_mode(0o755))?;
        let addr = process::free_addr();
        let process = Self::program(home.join("bin/kc.sh"), addr, dir.join("keycloak.log"))
            .env("JAVA", &java.display().to_string())
            .start()?;
        let this = Self { process, addr };
        this.wait_until_ready().await?;
        Ok(this)
    }

    fn program(kc: PathBuf, addr: SocketAddr, log: PathBuf) -> Program {
        Program::new("keycloak", kc, log)
            .args(["start", "--db=dev-file", "--cache=local", "--http-enabled=true", "--hostname-strict=false"])
            .arg(format!("--http-host={}", addr.ip()))
            .arg(format!("--http-port={}", addr.port()))
            .env("JAVA_OPTS_KC_HEAP", HEAP)
            .env("KC_BOOTSTRAP_ADMIN_USERNAME", ADMINISTRATOR)
            .env("KC_BOOTSTRAP_ADMIN_PASSWORD", ADMINISTRATOR)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The path of an endpoint of a realm, such as `auth` and `token`.
    pub fn endpoint(realm: &str, name: &str) -> String {
        format!("/realms/{realm}/protocol/openid-connect/{name}")
    }

    /// Creates a realm with a client and with users who have this password.
    pub async fn create_realm(&self, realm: &str, client: &Client, emails: &[String], password: &str) -> Result<()> {
        let settings = json!({ "realm": realm, "enabled": true, "ssoSessionIdleTimeout": 36_000 });
        self.administer("admin/realms", &settings).await?;
        let settings = json!({
            "clientId": client.id,
            "enabled": true,
            "protocol": "openid-connect",
            "publicClient": false,
            "secret": client.secret,
            "standardFlowEnabled": true,
            "redirectUris": [client.redirect_url],
        });
        self.administer(&format!("admin/realms/{realm}/clients"), &settings).await?;
        for email in emails {
            let user = json!({
                "username": email,
                "email": email,
                "emailVerified": true,
                "enabled": true,
                "firstName": "Ada",
                "lastName": "Lovelace",
                "credentials": [{ "type": "password", "value": password }],
            });
            self.administer(&format!("admin/realms/{realm}/users"), &user).await?;
        }
        Ok(())
    }

    async fn administer(&self, path: &str, body: &Value) -> Result<()> {
        let client = self.client();
        let fields =
            format!("grant_type=password&client_id=admin-cli&username={ADMINISTRATOR}&password={ADMINISTRATOR}");
        let request = client.request(Method::POST, &Self::endpoint("master", "token"));
        let request = request.header("content-type", "application/x-www-form-urlencoded").body(fields);
        let response = client.try_send(request).await?;
        let token = response.body["access_token"].as_str();
        let token = token.with_context(|| format!("no token: {} {}", response.status, response.text))?;
        let request = client.request(Method::POST, path).bearer_auth(token).json(body);
        let response = client.try_send(request).await?;
        ensure!(response.status == StatusCode::CREATED, "{path}: {} {}", response.status, response.text);
        Ok(())
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let client = self.client();
        let end = Instant::now() + START_LIMIT;
        loop {
            let log = self.process.log_path();
            if let Some(status) = self.process.exit_status() {
                bail!("Keycloak ended with {status}:\n{}", process::tail(log, 20));
            }
            let reason = match client.try_send(client.request(Method::GET, "realms/master")).await {
                Ok(response) if response.status.is_success() => return Ok(()),
                Ok(response) => response.text,
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > end {
                bail!("Keycloak is not ready ({reason}):\n{}", process::tail(log, 20));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn client(&self) -> ApiClient {
        ApiClient::from_address(self.addr, self.addr.ip())
    }
}
