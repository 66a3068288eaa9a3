//! `make run` as a user at a terminal sees it: printed commands, live edits of manifests, Ctrl-C, and the next start.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use http::{Method, StatusCode};
use latchkey_tests::{
    browser::Browser,
    builders::App,
    client::ApiClient,
    dex, eventually,
    passwords::{NEW_PASSWORD, PASSWORD},
    process::{self, Process, Program},
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Time limit for the first start, which creates a database.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Maximum time until all processes have ended.
const STOP_LIMIT: Duration = Duration::from_secs(15);
/// An edit takes effect within two seconds; a loaded machine takes longer.
const LIVE_LIMIT: Duration = Duration::from_secs(4);

const EMAIL: &str = "grace@example.com";

/// A `make run` with its own folders and ports.
struct MakeRun {
    dir: PathBuf,
    addrs: BTreeMap<&'static str, SocketAddr>,
    starts: usize,
}

impl MakeRun {
    fn new() -> Self {
        let dir = process::fresh_dir("make-run");
        fs::create_dir(dir.join("manifests")).unwrap();
        let variables = ["PUBLIC_ADDR", "ADMIN_ADDR", "OPS_ADDR", "INBOX_ADDR", "SMTP_ADDR", "PROVIDER_ADDR"];
        let addrs = variables.into_iter().map(|variable| (variable, process::free_addr())).collect();
        Self { dir, addrs, starts: 0 }
    }

    fn write_manifest(&self, app: &App) {
        fs::write(self.dir.join("manifests").join(format!("{}.yaml", app.id())), app.manifest()).unwrap();
    }

    fn start(&mut self) -> Process {
        self.starts += 1;
        let log = self.dir.join(format!("terminal-{}.log", self.starts));
        let mut program = Program::new("make run", process::find_built_program("latchkey-dev").unwrap(), log)
            .env("MANIFESTS", &self.dir.join("manifests").display().to_string())
            .env("DEV_DATA", &self.data().display().to_string());
        for (variable, addr) in &self.addrs {
            program = program.env(variable, &addr.to_string());
        }
        program.start().unwrap()
    }

    async fn start_ready(&mut self) -> Process {
        let process = self.start();
        eventually("the printed session", START_LIMIT, || async {
            if let Some(status) = process.exit_status() {
                panic!("it ended with {status}:\n{}", process::tail(process.log_path(), 60));
            }
            process.has_logged("Ctrl-C stops everything").then_some(())
        })
        .await;
        process
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The introspection response for a token.
    async fn introspect(&self, caller: &Path, token: &str) -> Value {
        let client = self.client();
        let request = client.request(Method::POST, "v1/shop/introspect").json(&json!({ "token": token }));
        let request = request.bearer_auth(fs::read_to_string(caller).unwrap());
        client.send(request).await.expect(StatusCode::OK).body
    }

    fn client(&self) -> ApiClient {
        ApiClient::new(self.addrs["PUBLIC_ADDR"])
    }
}

#[tokio::test]
async fn the_printed_commands_work_and_data_survives_a_restart() {
    let mut run = MakeRun::new();
    let administrator = json!({ "namespace": "latchkey-dev", "name": "admin" });
    let administrators = json!([{ "serviceAccount": administrator, "role": "UserAdmin" }]);
    let app = App::with_id("shop").set("/administrators", administrators);
    run.write_manifest(&app);
    let process = run.start_ready().await;
    let token_file = run.data().join("serviceaccount-token");
    assert!(process.has_logged(token_file.display().to_string()), "the path of the administrator's token is printed");

    // Pastes the printed commands unchanged, twice.
    let session = fs::read_to_string(run.data().join("session.sh")).unwrap();
    assert!(process::tail(process.log_path(), 200).contains(session.trim()), "the file is what is printed");
    let mut email = String::new();
    for _ in 0..2 {
        let output = run_bash(&format!("{session}echo \"$EMAIL\"\n")).await;
        let responses: Vec<Value> = output.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        let [registered, confirmed, login, verified, introspected, found, forgot, changed, second_login] =
            &responses[..]
        else {
            panic!("nine responses are expected:\n{output}");
        };
        email = registered["email"].as_str().unwrap().to_owned();
        assert!(confirmed["access_token"].is_string(), "{output}");
        assert!(login["token"].is_string() && second_login["token"].is_string(), "{output}");
        for response in [verified, forgot, changed] {
            assert_eq!(response["email"], email.as_str(), "{output}");
        }
        assert_eq!(introspected["email"], email.as_str(), "{output}");
        assert_eq!(found["users"][0]["email"], email.as_str(), "{output}");
        // The reset has ended the first session.
        let introspect = async |login: &Value| run.introspect(&token_file, login["token"].as_str().unwrap()).await;
        assert_eq!(introspect(login).await, json!({ "active": false }));
        assert_eq!(introspect(second_login).await["active"], true);
        assert_eq!(output.lines().last(), Some(email.as_str()));
    }

    // A new manifest and the deletion of a manifest take effect without a restart.
    let blog = App::with_id("blog");
    let wait_for_status = async |expected: StatusCode| {
        let client = run.client();
        eventually(&format!("the blog's {expected}"), LIVE_LIMIT, || async {
            let response = client.get("blog/.well-known/jwks.json").await;
            (response.status == expected).then_some(())
        })
        .await;
    };
    wait_for_status(StatusCode::NOT_FOUND).await;
    run.write_manifest(&blog);
    wait_for_status(StatusCode::OK).await;
    fs::remove_file(run.dir.join("manifests/blog.yaml")).unwrap();
    wait_for_status(StatusCode::NOT_FOUND).await;

    let children = descendants(process.pid());
    assert!(children.len() >= 5, "server, operator, provider, Postgres and Redis: {children:?}");
    process.signal(Signal::INT);
    let status = tokio::time::timeout(STOP_LIMIT, process.wait_for_exit()).await.expect("Ctrl-C ends it");
    assert!(status.success(), "it ended with {status}:\n{}", process::tail(process.log_path(), 30));
    wait_until_ended(&children).await;

    // The account still exists, with its new password, and so do the mails.
    let process = run.start_ready().await;
    run.client().login("shop", &email, NEW_PASSWORD).await.expect(StatusCode::OK);
    let inbox = ApiClient::new(run.addrs["INBOX_ADDR"]);
    inbox.get(&format!("api/messages/latest?to={email}")).await.expect(StatusCode::OK);

    // After `kill -9` no process is left, and the next start works.
    let children = descendants(process.pid());
    process.kill();
    wait_until_ended(&children).await;
    let process = run.start_ready().await;
    run.client().login("shop", &email, NEW_PASSWORD).await.expect(StatusCode::OK);

    // If a server crashes, `make run` reports it and ends.
    let server = descendant_named(process.pid(), "latchkey-server");
    rustix::process::kill_process(server, Signal::KILL).unwrap();
    let status = tokio::time::timeout(STOP_LIMIT, process.wait_for_exit()).await.expect("it ends with its server");
    assert!(!status.success());
    let output = process::tail(process.log_path(), 60);
    assert!(output.contains("latchkey-server ended by itself"), "{output}");
}

#[tokio::test]
async fn the_printed_link_leads_through_the_local_provider_to_a_page_with_the_seven_parameters() {
    let mut run = MakeRun::new();
    let example = |name: &str| process::root().join("tests/examples").join(name);
    let manifest = |name: &str| run.dir.join("manifests").join(name);
    for name in ["shop.yaml", "local.yaml"] {
        fs::copy(example(name), manifest(name)).unwrap();
    }
    let local = manifest("local.yaml");
    let process = run.start_ready().await;
    let output = process::tail(process.log_path(), 200);
    let link = output.lines().map(str::trim).find(|line| line.contains("/redirect?")).expect("a link");
    let (public, inbox) = (run.addrs["PUBLIC_ADDR"], run.addrs["INBOX_ADDR"]);
    assert_eq!(link, format!("http://{public}/shop/local/redirect?redirect_url=http://{inbox}/done"));
    let email = output.lines().find_map(|line| line.strip_prefix("as ")?.split(' ').next()).expect("the user's line");
    assert!(output.contains(&format!("with the password {}", dex::DEX_PASSWORD)), "{output}");

    let browser = Browser::start().await.unwrap();
    browser.open(link).await;
    assert_eq!(browser.url().await.port(), Some(run.addrs["PROVIDER_ADDR"].port()));
    dex::log_in(&browser, email).await;
    let url = browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
    assert_eq!(url.port(), Some(inbox.port()));
    assert_eq!(browser.text_of("#title").await, "Logged in");
    for name in
        ["access_token", "refresh_token", "session_id", "local_id", "email_verified", "expires_at", "expires_in"]
    {
        assert!(!browser.text_of(&format!("td[data-place=query][data-name={name}]")).await.is_empty(), "{name}");
    }
    assert_eq!(browser.text_of("td[data-name=email_verified]").await, "true");

    // After an edit of the client ID, both the server and Dex use the new ID.
    let edited = fs::read_to_string(&local).unwrap().replace("clientID: shop", "clientID: shop-two");
    fs::write(&local, edited).unwrap();
    let provider = ApiClient::new(run.addrs["PROVIDER_ADDR"]);
    eventually("the other client, at both ends", Duration::from_secs(60), || async {
        let response = run.client().get("shop/local/redirect").await;
        let (_, path) = response.header("location")?.split_once("/dex/").filter(|(_, it)| it.contains("shop-two"))?;
        // Dex restarts with the new client. Dex's page `auth` does not check the client. So the test requests the next
        // page, which Dex refuses to an unknown client.
        let path = path.replacen("auth?", "auth/local?", 1);
        let response = provider.try_send(provider.request(Method::GET, &format!("dex/{path}"))).await.ok()?;
        response.status.is_redirection().then_some(())
    })
    .await;
    browser.open(link).await;
    dex::log_in(&browser, email).await;
    browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
    assert_eq!(browser.text_of("#title").await, "Logged in");

    let children = descendants(process.pid());
    process.signal(Signal::INT);
    let status = tokio::time::timeout(STOP_LIMIT, process.wait_for_exit()).await.expect("Ctrl-C ends it");
    assert!(status.success(), "it ended with {status}:\n{}", process::tail(process.log_path(), 30));
    wait_until_ended(&children).await;
}

#[tokio::test]
async fn the_printed_address_leads_from_the_registration_to_the_account() {
    let mut run = MakeRun::new();
    for name in ["shop.yaml", "local.yaml"] {
        let example = process::root().join("tests/examples").join(name);
        fs::copy(example, run.dir.join("manifests").join(name)).unwrap();
    }
    let process = run.start_ready().await;
    let output = process::tail(process.log_path(), 200);
    let (public, inbox) = (run.addrs["PUBLIC_ADDR"], run.addrs["INBOX_ADDR"]);
    let register = format!("http://{public}/shop/register");
    assert!(output.lines().any(|line| line.trim() == register), "{output}");

    let browser = Browser::start().await.unwrap();
    browser.open(&register).await;
    browser.fill("#name", "Grace Hopper").await;
    browser.fill("#email", EMAIL).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("main .primary").await;
    browser.wait_for_text(EMAIL).await;
    // The inbox page shows the newest mail, with its links above the text.
    browser.open(&format!("http://{inbox}/")).await;
    let link = browser.text_of("ul.links a").await;
    assert!(link.starts_with(&format!("http://{public}/shop/confirm?code=")), "{link}");
    browser.open(&link).await;
    browser.click("main .primary").await;
    browser.wait_for_url("the account", |url| url.path() == "/shop/account").await;
    browser.click("main .actions button").await;
    browser.wait_for_url("the page after the logout", |url| url.path() == "/shop/logout").await;
    browser.click("main a.primary").await;
    browser.fill("#email", EMAIL).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("main .primary").await;
    browser.wait_for_url("the account", |url| url.path() == "/shop/account").await;
    browser.wait_for_text(EMAIL).await;
}

#[tokio::test]
async fn the_printed_authorization_url_leads_to_tokens() {
    let mut run = MakeRun::new();
    for name in ["shop.yaml", "local.yaml", "demo.yaml"] {
        let example = process::root().join("tests/examples").join(name);
        fs::copy(example, run.dir.join("manifests").join(name)).unwrap();
    }
    let process = run.start_ready().await;
    let output = process::tail(process.log_path(), 200);
    let link = output.lines().map(str::trim).find(|line| line.contains("/shop/authorize?")).expect("a link");
    let inbox = ApiClient::new(run.addrs["INBOX_ADDR"]);
    run.client().register("shop", "Grace Hopper", EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let mail = inbox.get(&format!("api/messages/latest?to={EMAIL}&wait=30")).await.expect(StatusCode::OK);
    run.client().confirm("shop", mail.string("code")).await.expect(StatusCode::OK);

    let browser = Browser::start().await.unwrap();
    browser.open(link).await;
    browser.fill("#email", EMAIL).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("main .primary").await;
    browser.wait_for_text("Signed in").await;
    assert_eq!(browser.url().await.port(), Some(run.addrs["INBOX_ADDR"].port()));
    for name in ["access_token", "id_token", "refresh_token", "expires_in", "scope", "token_type"] {
        assert!(!browser.text_of(&format!("td[data-name={name}]")).await.is_empty(), "{name}");
    }
    let claims: Value = serde_json::from_str(&browser.text_of("#claims").await).unwrap();
    assert_eq!((&claims["aud"], &claims["email"]), (&json!("demo"), &json!(EMAIL)), "{claims}");
    // A code works once.
    let again = browser.url().await;
    browser.open(again.as_str()).await;
    browser.wait_for_text("Not signed in").await;
}

#[tokio::test]
async fn a_killed_store_is_reported_with_the_end_of_its_log() {
    let mut run = MakeRun::new();
    run.write_manifest(&App::with_id("shop"));
    for (store, log) in [("postgres", "postgres.log"), ("redis-server", "redis.log")] {
        let process = run.start_ready().await;
        let children = descendants(process.pid());
        rustix::process::kill_process(descendant_named(process.pid(), store), Signal::KILL).unwrap();
        let status = tokio::time::timeout(STOP_LIMIT, process.wait_for_exit()).await.expect("it ends with its store");
        assert!(!status.success());
        let text = process::tail(process.log_path(), 60);
        let log = run.data().join("logs").join(log);
        let report = format!("error: {store} ended by itself (signal: 9 (SIGKILL)). The end of {}:\n", log.display());
        let (_, after_report) = text.split_once(&report).unwrap_or_else(|| panic!("no {report:?} in {text}"));
        let (shown_log, final_output) =
            after_report.split_once("\n\nStopping the rest …\n").unwrap_or_else(|| panic!("{text}"));
        assert!(final_output.trim_start().starts_with(&format!("error: {store} ended by itself")), "{text}");
        let logged = fs::read_to_string(&log).unwrap();
        assert!(shown_log.lines().any(|line| !line.is_empty()), "{text}");
        assert!(shown_log.lines().all(|line| logged.contains(line)), "{text}");
        wait_until_ended(&children).await;
    }
}

#[tokio::test]
async fn a_port_in_use_is_reported_with_its_variable() {
    let mut run = MakeRun::new();
    let _taken = std::net::TcpListener::bind(run.addrs["OPS_ADDR"]).unwrap();
    let process = run.start();
    let status = tokio::time::timeout(STOP_LIMIT, process.wait_for_exit()).await.expect("it does not start");
    assert!(!status.success());
    let output = process::tail(process.log_path(), 10);
    assert!(output.contains("is in use: set OPS_ADDR, as in `OPS_ADDR=127.0.0.1:"), "{output}");
    assert!(!output.contains("PUBLIC_ADDR"), "{output}");
}

async fn run_bash(script: &str) -> String {
    let output = tokio::process::Command::new("bash").args(["-c", script]).output();
    let output = tokio::time::timeout(Duration::from_secs(120), output).await.expect("the session ends").unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success() && err.is_empty(), "{out}\n{err}");
    out
}

/// The process ids of all descendants of a process.
fn descendants(root_pid: u32) -> BTreeSet<u32> {
    let parents: BTreeMap<u32, u32> = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, status_line(pid, "PPid:")?.parse().ok()?)))
        .collect();
    let mut descendants = BTreeSet::new();
    let mut next = vec![root_pid];
    while let Some(parent) = next.pop() {
        let children = parents.iter().filter(|(_, ppid)| **ppid == parent).map(|(pid, _)| *pid);
        for child in children {
            descendants.insert(child);
            next.push(child);
        }
    }
    descendants
}

fn descendant_named(root_pid: u32, name: &str) -> rustix::process::Pid {
    let pid = descendants(root_pid)
        .into_iter()
        // The kernel keeps only 15 characters of a process name.
        .find(|pid| status_line(*pid, "Name:").as_deref() == Some(&name[..name.len().min(15)]))
        .unwrap_or_else(|| panic!("no {name} runs"));
    rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// Waits until the processes have ended. A zombie can still have running threads, which keep its ports in use.
async fn wait_until_ended(pids: &BTreeSet<u32>) {
    eventually("the end of all processes", STOP_LIMIT, || async {
        let alive = |pid: &&u32| {
            status_line(**pid, "State:").is_some_and(|state| !state.starts_with('Z'))
                || status_line(**pid, "Threads:").is_some_and(|threads| threads.parse().is_ok_and(|left: u32| left > 1))
        };
        pids.iter().find(alive).is_none().then_some(())
    })
    .await;
}

fn status_line(pid: u32, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
}
