//! `make run`: the whole service on this machine, as real processes with their data in `target/dev`.

mod demo_client;
mod manifests;
mod provider;

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    io::{self, IsTerminal, Read, Seek, SeekFrom},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    client::ApiClient,
    dev::{manifests::Manifests, provider::LocalProvider},
    dex,
    inbox::Inbox,
    mail::Mailbox,
    passwords::{NEW_PASSWORD, PASSWORD},
    postgres::{self, Postgres},
    process::{self, Process, Program},
    redis::{self, Redis},
    service_account::{AUDIENCE, ServiceAccountIssuer},
    smtp::{self, Security, Smtp},
    stack::write_smtp_file,
};

/// Time limit for migrations. A schema change of a large database takes time.
const MIGRATE_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for the server to become ready.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the first rendering, including the creation of keys on a slow machine.
const RENDER_LIMIT: Duration = Duration::from_secs(30);
/// Lifetime of the administrator's token, which is created at each start.
const TOKEN_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// Namespace and name of the administrator's ServiceAccount.
const ADMINISTRATOR: (&str, &str) = ("latchkey-dev", "admin");
/// Time limit for a process to exit when `make run` stops. After this time, the process is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Interval of the checks for ended processes, changed manifests and new log lines.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Maximum number of lines printed per check of a log, so that a repeated error does not fill the terminal. If there
/// are more lines, only the number of the remaining lines is printed.
const MAX_LINES_PER_POLL: usize = 8;

/// Default socket addresses that manifests can contain in URLs.
const DEFAULT_PUBLIC_ADDR: &str = "127.0.0.1:8080";
const DEFAULT_INBOX_ADDR: &str = "127.0.0.1:8025";
const DEFAULT_PROVIDER_ADDR: &str = "127.0.0.1:5556";

/// Settings from the environment.
struct Settings {
    manifests: PathBuf,
    data: PathBuf,
    public: SocketAddr,
    admin: SocketAddr,
    ops: SocketAddr,
    inbox: SocketAddr,
    smtp: SocketAddr,
    provider: SocketAddr,
}

/// The processes and servers that `make run` has started so far. [`Processes::stop`] stops them.
#[derive(Default)]
struct Processes {
    server: Option<Process>,
    operator: Option<Process>,
    provider: Option<LocalProvider>,
    inbox: Option<Inbox>,
    smtp: Option<Smtp>,
    redis: Option<Redis>,
    postgres: Option<Postgres>,
}

/// Reads the lines that were added to a log file since the last read.
struct LogFollower {
    name: &'static str,
    path: PathBuf,
    offset: u64,
    /// Lines below this level are not printed.
    min_level: Level,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Info,
    Warn,
}

/// Standard output, with colors if it is a terminal.
#[derive(Clone, Copy)]
struct Terminal {
    colors: bool,
}

/// Starts everything and prints how to use it. Stops everything on a signal or an error. If a process ends by itself,
/// that is an error.
pub async fn run() -> Result<()> {
    let terminal = Terminal::new();
    let settings = Settings::from_env()?;
    fs::create_dir_all(settings.data.join("logs"))?;
    let lock = File::create(settings.data.join("lock"))?;
    ensure!(
        lock.try_lock().is_ok(),
        "another `make run` is using {}: stop it first, or set DEV_DATA to another folder",
        settings.data.display()
    );
    settings.check_ports()?;

    let mut signals = [
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        // Sent when the terminal is closed.
        signal(SignalKind::hangup())?,
    ];
    let mut started = Processes::default();
    let outcome = tokio::select! {
        outcome = serve(&settings, &mut started, terminal) => outcome,
        () = any_signal(&mut signals) => Ok(()),
    };
    // The error is printed before the processes are stopped, because stopping can take long if a store is down. After
    // that, the caller prints the first line of the error again.
    let outcome = match outcome {
        Ok(()) => {
            terminal.note("\nStopping …");
            Ok(())
        }
        Err(error) => {
            let text = format!("{error:#}");
            eprintln!("\nerror: {text}\n\nStopping the rest …");
            Err(anyhow!("{}", text.lines().next().unwrap_or_default().to_owned()))
        }
    };
    // If a second signal arrives, the processes that have not ended yet are killed.
    tokio::select! {
        () = started.stop() => {}
        () = any_signal(&mut signals) => {}
    }
    outcome
}

async fn any_signal(signals: &mut [tokio::signal::unix::Signal; 3]) {
    let [interrupt, terminate, hangup] = signals;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// Starts everything, and then runs until an error occurs.
async fn serve(settings: &Settings, started: &mut Processes, terminal: Terminal) -> Result<()> {
    start_stores(settings, started, terminal).await?;
    start_inbox(settings, started, terminal).await?;
    write_service_account(settings)?;

    // Removes the rendered documents of an earlier run, because they can belong to deleted manifests. Keeps the keys.
    let rendered = settings.data.join("rendered");
    if rendered.exists() {
        fs::remove_dir_all(&rendered)?;
    }
    fs::create_dir_all(&rendered)?;
    let mut operator_log = LogFollower::at_end("manifests", settings.log_path("operator"), Level::Info);
    let mut server_log = LogFollower::at_end("server", settings.log_path("server"), Level::Warn);
    let step = terminal.step(&format!("Rendering {}", settings.manifests.display()));
    let mut manifests = settings.manifests()?;
    let operator = started.operator.insert(start_operator(settings, manifests.folder(), &rendered)?);
    let apps = wait_for_first_apps(operator, &rendered).await?;
    step.done(&pluralize(apps.len(), "App"));
    operator_log.print_new_lines(terminal)?;

    let step = terminal.step("Starting the local provider");
    let (data, log) = (settings.data.join("provider"), settings.log_path("provider"));
    started.provider = Some(LocalProvider::start(settings.provider, &data, log, &rendered).await?);
    step.done(&format!("on {}", settings.provider));

    let step = terminal.step("Starting the server");
    started.server = Some(start_server(settings, &rendered)?);
    wait_until_ready(settings, started).await?;
    step.done("ready");
    println!("\n{}", welcome_text(settings, &apps, &rendered, terminal)?);

    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        // The processes are checked first, because the errors below can be consequences of a process that ended.
        started.check_all_running()?;
        manifests.update_copy()?;
        if let Some(local) = &mut started.provider {
            local.restart_if_changed().await?;
        }
        operator_log.print_new_lines(terminal)?;
        server_log.print_new_lines(terminal)?;
    }
}

async fn start_stores(settings: &Settings, started: &mut Processes, terminal: Terminal) -> Result<()> {
    let step = terminal.step("Starting Postgres");
    let options = postgres::Options {
        data: settings.data.join("postgres"),
        log: settings.log_path("postgres"),
        addr: process::free_addr(),
        durable: true,
        tls: None,
        settings: Vec::new(),
    };
    let postgres = started.postgres.insert(Postgres::start(options).await?);
    let database = postgres.database_named("latchkey").await?;
    postgres::write_private(&settings.data.join("database-url"), &database.url)?;
    step.done(&format!("on {}", database.addr));

    let step = terminal.step("Starting Redis");
    let options = redis::Options {
        data: settings.data.join("redis"),
        log: settings.log_path("redis"),
        addr: process::free_addr(),
        durable: true,
        // Other users of the machine must not be able to read the sessions.
        password: Some(format!("{:032x}", rand::random::<u128>())),
        user: None,
        tls: None,
        replica_of: None,
        cluster: false,
        settings: Vec::new(),
    };
    let redis = started.redis.insert(Redis::start(options).await?);
    postgres::write_private(&settings.data.join("redis-url"), &redis.url())?;
    step.done(&format!("on {}", redis.addr()));

    let step = terminal.step("Migrating the database");
    let migrate = Program::new(
        "latchkey-server migrate",
        process::find_built_program("latchkey-server")?,
        settings.log_path("migrate"),
    )
    .arg("migrate")
    .path_arg("--database-url-file", &settings.data.join("database-url"));
    tokio::task::spawn_blocking(move || migrate.run(MIGRATE_LIMIT)).await??;
    step.done("done");
    Ok(())
}

async fn start_inbox(settings: &Settings, started: &mut Processes, terminal: Terminal) -> Result<()> {
    let step = terminal.step("Opening the inbox");
    let mails = Mailbox::open(&settings.data.join("inbox"))?;
    let options = smtp::Options { addr: settings.smtp, security: Security::None, login: None, mails: mails.clone() };
    let smtp = started.smtp.insert(Smtp::start(options).await?);
    write_smtp_file(&settings.data.join("smtp.json"), smtp, "Latchkey <hello@latchkey.test>")?;
    let mail_count = mails.all().len();
    started.inbox = Some(Inbox::start(settings.inbox, mails)?);
    step.done(&format!("{} from earlier runs", pluralize(mail_count, "mail")));
    Ok(())
}

/// Writes the key that signs ServiceAccount tokens, its public key for the server, and a token of the administrator. In
/// a cluster, the API server signs such tokens.
fn write_service_account(settings: &Settings) -> Result<()> {
    let issuer = ServiceAccountIssuer::load_or_create(&settings.data.join("serviceaccount-key.pem"))?;
    postgres::write_private(&settings.service_account_keys(), &issuer.jwks()?.to_string())?;
    let (namespace, name) = ADMINISTRATOR;
    postgres::write_private(
        &settings.service_account_token(),
        &issuer.token(namespace, name, AUDIENCE, TOKEN_LIFETIME)?,
    )
}

fn start_operator(settings: &Settings, manifests: &Path, rendered: &Path) -> Result<Process> {
    Program::new(
        "latchkey-operator render",
        process::find_built_program("latchkey-operator")?,
        settings.log_path("operator"),
    )
    .arg("render")
    .path_arg("--from", manifests)
    .path_arg("--to", rendered)
    .path_arg("--keys", &settings.data.join("keys"))
    .args(["--base-url", &settings.base_url(), "--allow-insecure", "--watch"])
    .start()
}

fn start_server(settings: &Settings, rendered: &Path) -> Result<Process> {
    let file = |name: &str| settings.data.join(name);
    Program::new("latchkey-server", process::find_built_program("latchkey-server")?, settings.log_path("server"))
        .path_arg("--config-dir", rendered)
        .args(["--public-addr", &settings.public.to_string()])
        .args(["--admin-addr", &settings.admin.to_string()])
        .args(["--ops-addr", &settings.ops.to_string()])
        .args(["--base-url", &settings.base_url()])
        .path_arg("--database-url-file", &file("database-url"))
        .path_arg("--redis-url-file", &file("redis-url"))
        .path_arg("--smtp-file", &file("smtp.json"))
        .path_arg("--service-account-keys", &settings.service_account_keys())
        // A drain waits for load balancers, and here there is none.
        .args(["--allow-insecure", "--drain-seconds", "0"])
        .start()
}

/// Waits for the first rendering and returns the appIDs. If there are no documents within the limit, returns an empty
/// list, because the operator may have rejected every manifest.
async fn wait_for_first_apps(operator: &Process, rendered: &Path) -> Result<Vec<String>> {
    let end = Instant::now() + RENDER_LIMIT;
    let mut previous = Vec::new();
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut app_ids: Vec<String> = fs::read_dir(rendered)?
            .flatten()
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .collect();
        app_ids.sort();
        if let Some(status) = operator.exit_status() {
            bail!("rendering the manifests ended with {status}:\n\n{}", process::tail(operator.log_path(), 25));
        }
        // Waits until no more files appear.
        if !app_ids.is_empty() && app_ids == previous {
            return Ok(app_ids);
        }
        if Instant::now() > end {
            return Ok(app_ids);
        }
        previous = app_ids;
    }
}

async fn wait_until_ready(settings: &Settings, started: &Processes) -> Result<()> {
    let client = ApiClient::from_address(settings.ops, settings.ops.ip());
    let end = Instant::now() + READY_LIMIT;
    loop {
        started.check_all_running()?;
        let reason = match client.try_send(client.request(http::Method::GET, "readyz")).await {
            Ok(response) if response.status.is_success() => return Ok(()),
            Ok(response) => response.text,
            Err(error) => format!("{error:#}"),
        };
        ensure!(
            Instant::now() < end,
            "the server is not ready ({}). Its log's end:\n\n{}",
            reason.trim(),
            process::tail(&settings.log_path("server"), 25)
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn welcome_text(settings: &Settings, apps: &[String], rendered: &Path, terminal: Terminal) -> Result<String> {
    let mut text = String::new();
    let rows = [
        ("Public API", settings.base_url()),
        ("Administration", format!("http://{}", settings.admin)),
        ("Health, metrics", format!("http://{}", settings.ops)),
        ("Inbox", format!("http://{}", settings.inbox)),
        ("SMTP", settings.smtp.to_string()),
        ("Local provider", dex::issuer(settings.provider)),
        ("Manifests", format!("{}   (edits take effect immediately)", settings.manifests.display())),
        ("Admin token", format!("{}", settings.service_account_token().display())),
        ("Logs", format!("{}", settings.data.join("logs").display())),
    ];
    text += &terminal.bold("Latchkey is running.\n\n");
    for (name, value) in rows {
        text += &format!("  {name:<16} {value}\n");
    }
    let Some(app) = apps.iter().find(|app| *app == "shop").or(apps.first()) else {
        text += &format!("\n  No App yet: add a manifest to {}.\n", settings.manifests.display());
        text += "\nCtrl-C stops everything.\n";
        return Ok(text);
    };
    let session = session_script(settings, app, &administrator_commands(settings, app)?);
    let script = settings.data.join("session.sh");
    fs::write(&script, &session)?;
    text += &format!("  {:<16} {}\n", "Apps", apps.join(", "));
    let document = rendered_app(settings, app)?;
    text += &pages_text(settings, &document);
    if let Some(link) = demo_client::authorization_url(&document, settings.inbox) {
        text += &format!("\nSign in with OpenID Connect, in a browser. The last page shows the tokens:\n\n  {link}\n");
    }
    if let Some(link) = provider::login_link(rendered, settings.provider, &format!("http://{}/done", settings.inbox)) {
        let (person, unverified, password) = (provider::VERIFIED_USER, provider::UNVERIFIED_USER, dex::DEX_PASSWORD);
        text += &format!("\nLog in with the local provider, in a browser:\n\n  {link}\n\n");
        text += &format!(
            "as {person} with the password {password} (or as {unverified}, an address that is not verified).\n"
        );
    }
    text += &format!("\nPaste this into bash, or run: bash {}\n\n{session}\n", script.display());
    text += "Ctrl-C stops everything; the data is kept.\n";
    Ok(text)
}

/// The printed text about how to register on the hosted pages; empty if the App has no pages.
fn pages_text(settings: &Settings, app: &Value) -> String {
    if app["pages"].is_null() {
        return String::new();
    }
    let (issuer, inbox) = (app["issuer"].as_str().unwrap_or_default(), settings.inbox);
    format!(
        "\nRegister on the hosted pages, in a browser:\n\n  {issuer}/register\n\nThen open the link of the mail in the \
         inbox, http://{inbox}. The account is at {issuer}/account.\n"
    )
}

/// The rendered document of an App.
fn rendered_app(settings: &Settings, app: &str) -> Result<Value> {
    let document = fs::read(settings.data.join("rendered").join(format!("{app}.json")))?;
    Ok(serde_json::from_slice(&document)?)
}

/// A script of curl commands: an account from registration to a new password. Each run uses a new email address.
fn session_script(settings: &Settings, app: &str, administration: &str) -> String {
    let (api, inbox) = (settings.base_url(), settings.inbox);
    format!(
        r#"# The endpoints and a new user.
APP={api}/v1/{app}/email INBOX=http://{inbox}/api/messages
EMAIL="ada.$(date +%s).$RANDOM@example.com" PASSWORD={PASSWORD}
JSON='Content-Type: application/json'

# Register: the response is the same whether or not the address is known.
curl -sS -H "$JSON" $APP/register -d '{{"name": "Ada Lovelace", "email": "'$EMAIL'", "password": "'$PASSWORD'"}}'; echo

# Wait for the mail with the code; the inbox page shows it too.
MAIL=$(curl -sS "$INBOX/latest?to=$EMAIL&wait=30"); CODE=$(sed 's/.*"code":"\([^"]*\)".*/\1/' <<< "$MAIL"); echo "The code is $CODE"

# Confirm the address with the code.
curl -sS -H "$JSON" $APP/confirm -d '{{"code": "'$CODE'"}}'; echo

# Log in.
LOGIN=$(curl -sS -H "$JSON" $APP/login -d '{{"email": "'$EMAIL'", "password": "'$PASSWORD'"}}'); echo "$LOGIN"
TOKEN=$(sed 's/.*"token":"\([^"]*\)".*/\1/' <<< "$LOGIN")

# Request another confirmation: the address is verified already, so no mail is sent.
curl -sS -X POST $APP/verify -H "Authorization: Bearer $TOKEN"; echo
{administration}
# Reset the password: the next mail contains another code.
SEEN=$(sed 's/^{{"id":\([0-9]*\).*/\1/' <<< "$MAIL")
curl -sS -H "$JSON" $APP/forgot-password -d '{{"email": "'$EMAIL'"}}'; echo
MAIL=$(curl -sS "$INBOX/latest?to=$EMAIL&after=$SEEN&wait=30"); CODE=$(sed 's/.*"code":"\([^"]*\)".*/\1/' <<< "$MAIL"); echo "The code is $CODE"

# Set a new password, and log in with it.
PASSWORD={NEW_PASSWORD}
curl -sS -H "$JSON" $APP/confirm-password -d '{{"email": "'$EMAIL'", "code": "'$CODE'", "password": "'$PASSWORD'"}}'; echo
curl -sS -H "$JSON" $APP/login -d '{{"email": "'$EMAIL'", "password": "'$PASSWORD'"}}'; echo
"#
    )
}

/// The part of the script that introspects the token and finds the user; empty if the App does not list the
/// administrator.
fn administrator_commands(settings: &Settings, app: &str) -> Result<String> {
    let document = rendered_app(settings, app)?;
    let (namespace, name) = ADMINISTRATOR;
    let listed = document["administrators"]
        .as_array()
        .is_some_and(|listed| listed.iter().any(|one| one["namespace"] == namespace && one["serviceAccount"] == name));
    if !listed {
        return Ok(String::new());
    }
    let (api, admin, token) = (settings.base_url(), settings.admin, settings.service_account_token());
    let token = token.display();
    Ok(format!(
        r#"
# Introspect the token as a program in the cluster does, with the token of its ServiceAccount.
curl -sS {api}/v1/{app}/introspect -H "Authorization: Bearer $(<'{token}')" -d "token=$TOKEN"; echo

# Find the user as a support tool does, with the administration API.
curl -sS -G http://{admin}/v1/{app}/users -H "Authorization: Bearer $(<'{token}')" --data-urlencode "email=$EMAIL"; echo
"#
    ))
}

fn pluralize(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

// === impl Settings ===

impl Settings {
    fn from_env() -> Result<Self> {
        let manifests = path_from_env("MANIFESTS", "tests/examples");
        ensure!(manifests.is_dir(), "MANIFESTS: {} is not a folder", manifests.display());
        Ok(Self {
            manifests,
            data: path_from_env("DEV_DATA", "target/dev"),
            public: addr_from_env("PUBLIC_ADDR", DEFAULT_PUBLIC_ADDR)?,
            admin: addr_from_env("ADMIN_ADDR", "127.0.0.1:8081")?,
            ops: addr_from_env("OPS_ADDR", "127.0.0.1:9090")?,
            inbox: addr_from_env("INBOX_ADDR", DEFAULT_INBOX_ADDR)?,
            smtp: addr_from_env("SMTP_ADDR", "127.0.0.1:1025")?,
            provider: addr_from_env("PROVIDER_ADDR", DEFAULT_PROVIDER_ADDR)?,
        })
    }

    fn base_url(&self) -> String {
        format!("http://{}", self.public)
    }

    fn manifests(&self) -> Result<Manifests> {
        let addresses = [
            (DEFAULT_PUBLIC_ADDR, self.public),
            (DEFAULT_INBOX_ADDR, self.inbox),
            (DEFAULT_PROVIDER_ADDR, self.provider),
        ];
        Manifests::new(&self.manifests, self.data.join("manifests"), &addresses)
    }

    fn service_account_keys(&self) -> PathBuf {
        self.data.join("serviceaccount-keys.json")
    }

    fn service_account_token(&self) -> PathBuf {
        self.data.join("serviceaccount-token")
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.data.join("logs").join(format!("{name}.log"))
    }

    /// Checks that the ports are different and free. If not, the error names the variables that set them.
    fn check_ports(&self) -> Result<()> {
        let wanted = [
            ("PUBLIC_ADDR", self.public),
            ("ADMIN_ADDR", self.admin),
            ("OPS_ADDR", self.ops),
            ("INBOX_ADDR", self.inbox),
            ("SMTP_ADDR", self.smtp),
            ("PROVIDER_ADDR", self.provider),
        ];
        let mut seen = BTreeMap::new();
        let mut faults = Vec::new();
        for (variable, addr) in wanted {
            if let Some(other) = seen.insert(addr, variable) {
                faults.push(format!("{other} and {variable} are both {addr}: give one of them another port"));
            } else if let Err(error) = TcpListener::bind(addr) {
                let example = SocketAddr::new(addr.ip(), process::free_port());
                faults.push(match error.kind() {
                    io::ErrorKind::AddrInUse => {
                        format!("{addr} is in use: set {variable}, as in `{variable}={example} make run`")
                    }
                    _ => format!("{addr} cannot be listened on ({error}): set {variable}"),
                });
            }
        }
        ensure!(faults.is_empty(), "{}", faults.join("\n       "));
        Ok(())
    }
}

fn path_from_env(variable: &str, default: &str) -> PathBuf {
    let given = env::var_os(variable).filter(|value| !value.is_empty());
    match given {
        // A relative path is relative to the folder in which make was called.
        Some(path) => env::current_dir().unwrap_or_default().join(path),
        None => process::root().join(default),
    }
}

fn addr_from_env(variable: &str, default: &str) -> Result<SocketAddr> {
    let text = env::var(variable).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned());
    let addr: SocketAddr =
        text.parse().with_context(|| format!("{variable}={text} is not an IP address with a port, as in {default}"))?;
    ensure!(addr.port() != 0, "{variable}={text}: a port is needed, as in {default}");
    Ok(addr)
}

// === impl Processes ===

impl Processes {
    fn processes(&self) -> impl Iterator<Item = &Process> {
        let stores = [self.redis.as_ref().map(Redis::process), self.postgres.as_ref().map(Postgres::process)];
        let provider = self.provider.as_ref().and_then(LocalProvider::process);
        stores.into_iter().chain([self.server.as_ref(), self.operator.as_ref(), provider]).flatten()
    }

    /// Returns an error if a process has ended. The error contains the name of the process and the end of its log.
    /// Checks stores before the processes that need them.
    fn check_all_running(&self) -> Result<()> {
        let Some((process, status)) = self.processes().find_map(|process| Some((process, process.exit_status()?)))
        else {
            return Ok(());
        };
        let (name, log) = (process.name(), process.log_path());
        bail!("{name} ended by itself ({status}). The end of {}:\n\n{}", log.display(), process::tail(log, 25));
    }

    /// Stops all processes. The server is stopped first, so that its last writes reach the stores.
    async fn stop(self) {
        drop(self.inbox);
        let stopped = tokio::task::spawn_blocking(move || {
            if let Some(server) = &self.server {
                server.stop(Signal::TERM, STOP_LIMIT);
            }
            if let Some(operator) = &self.operator {
                operator.stop(Signal::TERM, STOP_LIMIT);
            }
            if let Some(provider) = &self.provider {
                provider.stop(STOP_LIMIT);
            }
            if let Some(redis) = &self.redis {
                redis.stop(STOP_LIMIT);
            }
            if let Some(postgres) = &self.postgres {
                postgres.stop(STOP_LIMIT);
            }
        });
        // If the task panicked, dropping the processes killed them.
        drop(stopped.await);
        drop(self.smtp);
    }
}

// === impl LogFollower ===

impl LogFollower {
    fn at_end(name: &'static str, path: PathBuf, min_level: Level) -> Self {
        let offset = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        Self { name, path, offset, min_level }
    }

    fn print_new_lines(&mut self, terminal: Terminal) -> Result<()> {
        let lines = self.new_lines()?;
        let printed: Vec<String> = lines.iter().filter_map(|line| format_log_line(line, self.min_level)).collect();
        for line in printed.iter().take(MAX_LINES_PER_POLL) {
            terminal.note(&format!("{}: {line}", self.name));
        }
        if printed.len() > MAX_LINES_PER_POLL {
            terminal.note(&format!("{}: … and {} more lines", self.name, printed.len() - MAX_LINES_PER_POLL));
        }
        Ok(())
    }

    fn new_lines(&mut self) -> Result<Vec<String>> {
        let Ok(mut file) = File::open(&self.path) else { return Ok(Vec::new()) };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // An incomplete line is read the next time.
        let complete_length = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        self.offset += u64::try_from(complete_length)?;
        Ok(String::from_utf8_lossy(&bytes[..complete_length]).lines().map(str::to_owned).collect())
    }
}

/// The short form of a log line; `None` if its level is lower than `min_level`. A line that is not JSON counts as a
/// warning if it contains `WARN`, `ERROR` or `panicked`.
fn format_log_line(line: &str, min_level: Level) -> Option<String> {
    let Ok(Value::Object(record)) = serde_json::from_str(line) else {
        let is_serious = ["WARN", "ERROR", "panicked"].iter().any(|word| line.contains(word));
        return (is_serious || min_level == Level::Info)
            .then(|| line.trim().to_owned())
            .filter(|line| !line.is_empty());
    };
    let level = record.get("level").and_then(Value::as_str).unwrap_or("INFO");
    let is_printed = match level {
        "ERROR" | "WARN" => true,
        "INFO" => min_level == Level::Info,
        _ => false,
    };
    if !is_printed {
        return None;
    }
    let fields = record.get("fields").and_then(Value::as_object).unwrap_or(&record);
    let mut text = fields.get("message").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (name, value) in fields {
        if !["message", "level", "timestamp", "target", "span", "spans"].contains(&name.as_str()) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text += &format!(" {name}={value}");
        }
    }
    let mut shortened: String = format!("{level} {}", text.trim()).chars().take(400).collect();
    if shortened.chars().count() == 400 {
        shortened.push('…');
    }
    Some(shortened)
}

// === impl Terminal ===

/// A step that is printed when it begins. When the step ends, its result is added to the same line.
struct Step {
    began: Instant,
    terminal: Terminal,
}

impl Terminal {
    fn new() -> Self {
        Self { colors: io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none() }
    }

    fn step(self, what: &str) -> Step {
        use std::io::Write;
        print!("{what} … ");
        // If nobody reads the output, it is lost. This is not an error.
        drop(io::stdout().flush());
        Step { began: Instant::now(), terminal: self }
    }

    fn note(self, text: &str) {
        println!("{text}");
    }

    fn bold(self, text: &str) -> String {
        if self.colors { format!("\u{1b}[1m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    fn faint(self, text: &str) -> String {
        if self.colors { format!("\u{1b}[2m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

impl Step {
    fn done(self, how: &str) {
        let seconds = self.began.elapsed().as_secs_f32();
        println!("{how} {}", self.terminal.faint(&format!("({seconds:.1} s)")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_shortened_and_those_below_the_minimum_level_are_left_out() {
        let warning = r#"{"timestamp":"…","level":"WARN","fields":{"message":"refused","file":"a.yaml"},"target":"x"}"#;
        assert_eq!(format_log_line(warning, Level::Warn), Some("WARN refused file=a.yaml".to_owned()));
        let flat = r#"{"timestamp":"…","level":"ERROR","message":"no","target":"x"}"#;
        assert_eq!(format_log_line(flat, Level::Warn), Some("ERROR no".to_owned()));
        assert_eq!(format_log_line(r#"{"level":"INFO","message":"m"}"#, Level::Warn), None);
        assert_eq!(
            format_log_line("thread 'main' panicked at", Level::Warn),
            Some("thread 'main' panicked at".to_owned())
        );
        assert_eq!(format_log_line("rendered shop", Level::Warn), None);
        assert_eq!(format_log_line("rendered shop", Level::Info), Some("rendered shop".to_owned()));
    }
}
