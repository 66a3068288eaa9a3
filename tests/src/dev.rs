//! `make run`: the whole service on this machine, as real processes with their data in `target/dev`.

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
    client::Anonymous,
    dev::{manifests::Manifests, provider::Local},
    dex,
    inbox::Inbox,
    mail::Mailbox,
    postgres::{self, Postgres},
    process::{self, Process, Program},
    redis::{self, Redis},
    service_account::{AUDIENCE, Issuer},
    smtp::{self, Security, Smtp},
    stack::write_smtp_file,
};

/// A schema change of a big database takes a while.
const MIGRATE_LIMIT: Duration = Duration::from_secs(300);
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How long the first manifests may take: the making of keys, on a slow machine.
const RENDER_LIMIT: Duration = Duration::from_secs(30);
/// The administrator's token is made anew at each start.
const TOKEN_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Who that is.
const ADMINISTRATOR: (&str, &str) = ("latchkey-dev", "admin");
/// Ctrl-C is not to keep anybody waiting: who has not ended by then is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// How often the logs are looked at for something to tell.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// A fault that repeats is not to fill the terminal: so many lines each look, the rest is counted.
const LINES_AT_ONCE: usize = 8;

/// The addresses where nothing else is set, which manifests may name.
const PUBLIC: &str = "127.0.0.1:8080";
const INBOX: &str = "127.0.0.1:8025";
const PROVIDER: &str = "127.0.0.1:5556";

/// What the environment says.
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

/// Everything that was started, in the order in which it is stopped.
#[derive(Default)]
struct Started {
    server: Option<Process>,
    operator: Option<Process>,
    provider: Option<Local>,
    inbox: Option<Inbox>,
    smtp: Option<Smtp>,
    redis: Option<Redis>,
    postgres: Option<Postgres>,
}

/// A log, read on from where it was left.
struct Follower {
    who: &'static str,
    path: PathBuf,
    at: u64,
    /// From which level on its lines are told.
    from: Level,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Info,
    Warn,
}

/// Lines on the terminal, coloured where it is one.
#[derive(Clone, Copy)]
struct Terminal {
    colours: bool,
}

/// Starts everything, tells how to use it, and stops everything when it is told to or when a part ends.
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
        // The terminal is gone.
        signal(SignalKind::hangup())?,
    ];
    let mut started = Started::default();
    let outcome = tokio::select! {
        outcome = serve(&settings, &mut started, terminal) => outcome,
        () = any(&mut signals) => Ok(()),
    };
    // At once: stopping the rest may take a while where a store is gone. What is said last is the short form.
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
    // A second Ctrl-C does not wait.
    tokio::select! {
        () = started.stop() => {}
        () = any(&mut signals) => {}
    }
    outcome
}

async fn any(signals: &mut [tokio::signal::unix::Signal; 3]) {
    let [interrupt, terminate, hangup] = signals;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// Comes back only with what went wrong.
async fn serve(settings: &Settings, started: &mut Started, terminal: Terminal) -> Result<()> {
    start_stores(settings, started, terminal).await?;
    start_inbox(settings, started, terminal).await?;
    write_service_account(settings)?;

    // What an earlier run rendered may be of manifests that are gone; the keys stay.
    let rendered = settings.data.join("rendered");
    if rendered.exists() {
        fs::remove_dir_all(&rendered)?;
    }
    fs::create_dir_all(&rendered)?;
    let mut operator_log = Follower::at_end("manifests", settings.log("operator"), Level::Info);
    let mut server_log = Follower::at_end("server", settings.log("server"), Level::Warn);
    let step = terminal.step(&format!("Rendering {}", settings.manifests.display()));
    let mut manifests = settings.manifests()?;
    let operator = started.operator.insert(start_operator(settings, manifests.folder(), &rendered)?);
    let apps = first_apps(operator, &rendered).await?;
    step.done(&count(apps.len(), "App"));
    operator_log.tell(terminal)?;

    let step = terminal.step("Starting the local provider");
    let (data, log) = (settings.data.join("provider"), settings.log("provider"));
    started.provider = Some(Local::start(settings.provider, &data, log, &rendered).await?);
    step.done(&format!("on {}", settings.provider));

    let step = terminal.step("Starting the server");
    started.server = Some(start_server(settings, &rendered)?);
    ready(settings, started).await?;
    step.done("ready");
    println!("\n{}", welcome(settings, &apps, &rendered, terminal)?);

    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // First of all: what fails below may only follow from it.
        started.all_run()?;
        manifests.follow()?;
        if let Some(local) = &mut started.provider {
            local.follow().await?;
        }
        operator_log.tell(terminal)?;
        server_log.tell(terminal)?;
    }
}

async fn start_stores(settings: &Settings, started: &mut Started, terminal: Terminal) -> Result<()> {
    let step = terminal.step("Starting Postgres");
    let options = postgres::Options {
        data: settings.data.join("postgres"),
        log: settings.log("postgres"),
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
        log: settings.log("redis"),
        addr: process::free_addr(),
        durable: true,
        // On a machine that others use too, the sessions are not for them.
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

    let step = terminal.step("Bringing the database up to date");
    let migrate =
        Program::new("latchkey-server migrate", process::our_program("latchkey-server")?, settings.log("migrate"))
            .arg("migrate")
            .path_arg("--database-url-file", &settings.data.join("database-url"));
    tokio::task::spawn_blocking(move || migrate.run(MIGRATE_LIMIT)).await??;
    step.done("done");
    Ok(())
}

async fn start_inbox(settings: &Settings, started: &mut Started, terminal: Terminal) -> Result<()> {
    let step = terminal.step("Opening the inbox");
    let mails = Mailbox::open(&settings.data.join("inbox"))?;
    let options = smtp::Options { addr: settings.smtp, security: Security::None, login: None, mails: mails.clone() };
    let smtp = started.smtp.insert(Smtp::start(options).await?);
    write_smtp_file(&settings.data.join("smtp.json"), smtp, "Latchkey <hello@latchkey.test>")?;
    let kept = mails.all().len();
    started.inbox = Some(Inbox::start(settings.inbox, mails)?);
    step.done(&format!("{} from before", count(kept, "mail")));
    Ok(())
}

/// A key as a cluster has one for the tokens of its ServiceAccounts, and the token of an administrator.
fn write_service_account(settings: &Settings) -> Result<()> {
    let issuer = Issuer::kept_in(&settings.data.join("serviceaccount-key.pem"))?;
    postgres::write_private(&settings.service_account_keys(), &issuer.jwks()?.to_string())?;
    let (namespace, name) = ADMINISTRATOR;
    postgres::write_private(&settings.service_account_token(), &issuer.token(namespace, name, AUDIENCE, TOKEN_LIFE)?)
}

fn start_operator(settings: &Settings, manifests: &Path, rendered: &Path) -> Result<Process> {
    Program::new("latchkey-operator render", process::our_program("latchkey-operator")?, settings.log("operator"))
        .arg("render")
        .path_arg("--from", manifests)
        .path_arg("--to", rendered)
        .path_arg("--keys", &settings.data.join("keys"))
        .args(["--base-url", &settings.base_url(), "--allow-insecure", "--watch"])
        .start()
}

fn start_server(settings: &Settings, rendered: &Path) -> Result<Process> {
    let file = |name: &str| settings.data.join(name);
    Program::new("latchkey-server", process::our_program("latchkey-server")?, settings.log("server"))
        .path_arg("--config-dir", rendered)
        .args(["--public-addr", &settings.public.to_string()])
        .args(["--admin-addr", &settings.admin.to_string()])
        .args(["--ops-addr", &settings.ops.to_string()])
        .args(["--base-url", &settings.base_url()])
        .path_arg("--database-url-file", &file("database-url"))
        .path_arg("--redis-url-file", &file("redis-url"))
        .path_arg("--smtp-file", &file("smtp.json"))
        .path_arg("--service-account-keys", &settings.service_account_keys())
        // No load balancer has to catch up.
        .args(["--allow-insecure", "--drain-seconds", "0"])
        .start()
}

/// The Apps of the first rendering; none where every manifest was refused.
async fn first_apps(operator: &Process, rendered: &Path) -> Result<Vec<String>> {
    let end = Instant::now() + RENDER_LIMIT;
    let mut before = Vec::new();
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut now: Vec<String> = fs::read_dir(rendered)?
            .flatten()
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .collect();
        now.sort();
        if let Some(status) = operator.ended() {
            bail!("rendering the manifests ended with {status}:\n\n{}", process::tail(operator.log(), 25));
        }
        // Not while more are being written.
        if !now.is_empty() && now == before {
            return Ok(now);
        }
        if Instant::now() > end {
            return Ok(now);
        }
        before = now;
    }
}

async fn ready(settings: &Settings, started: &Started) -> Result<()> {
    let client = Anonymous::from_address(settings.ops, settings.ops.ip());
    let end = Instant::now() + READY_LIMIT;
    loop {
        started.all_run()?;
        let said = match client.try_send(client.request(http::Method::GET, "readyz")).await {
            Ok(answer) if answer.status.is_success() => return Ok(()),
            Ok(answer) => answer.text,
            Err(error) => format!("{error:#}"),
        };
        ensure!(
            Instant::now() < end,
            "the server is not ready ({}). Its log's end:\n\n{}",
            said.trim(),
            process::tail(&settings.log("server"), 25)
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn welcome(settings: &Settings, apps: &[String], rendered: &Path, terminal: Terminal) -> Result<String> {
    let mut text = String::new();
    let rows = [
        ("Public API", settings.base_url()),
        ("Administration", format!("http://{}", settings.admin)),
        ("Health, metrics", format!("http://{}", settings.ops)),
        ("Inbox", format!("http://{}", settings.inbox)),
        ("SMTP", settings.smtp.to_string()),
        ("Local provider", dex::issuer(settings.provider)),
        ("Manifests", format!("{}   (edit them: live at once)", settings.manifests.display())),
        ("Admin's token", format!("{}", settings.service_account_token().display())),
        ("Logs", format!("{}", settings.data.join("logs").display())),
    ];
    text += &terminal.bold("Latchkey is running.\n\n");
    for (name, value) in rows {
        text += &format!("  {name:<16} {value}\n");
    }
    let Some(app) = apps.iter().find(|app| *app == "shop").or(apps.first()) else {
        text += &format!("\n  No App yet: put a manifest into {}.\n", settings.manifests.display());
        text += "\nCtrl-C stops everything.\n";
        return Ok(text);
    };
    let session = session(settings, app, &introspection(settings, app)?);
    let script = settings.data.join("session.sh");
    fs::write(&script, &session)?;
    text += &format!("  {:<16} {}\n", "Apps", apps.join(", "));
    if let Some(link) = provider::link(rendered, settings.provider, &format!("http://{}/done", settings.inbox)) {
        let (person, unverified, password) = (provider::PERSON, provider::UNVERIFIED, dex::PASSWORD);
        text += &format!("\nLog in with the local provider, in a browser:\n\n  {link}\n\n");
        text += &format!(
            "as {person} with the password {password} (or as {unverified}, an address that is not verified).\n"
        );
    }
    text += &format!("\nPaste this into a bash, or run: bash {}\n\n{session}\n", script.display());
    text += "Ctrl-C stops everything; the data stays.\n";
    Ok(text)
}

/// The whole way of an account, for curl. It makes a new address each time, so it can be pasted again.
fn session(settings: &Settings, app: &str, introspection: &str) -> String {
    let (api, inbox) = (settings.base_url(), settings.inbox);
    format!(
        r#"# Where it is, and who comes.
APP={api}/v1/{app}/email INBOX=http://{inbox}/api/messages
EMAIL="ada.$(date +%s).$RANDOM@example.com" PASSWORD=violet-Anchor-mills-27
JSON='Content-Type: application/json'

# Register: the answer is the same whether or not the address was known.
curl -sS -H "$JSON" $APP/register -d '{{"name": "Ada Lovelace", "email": "'$EMAIL'", "password": "'$PASSWORD'"}}'; echo

# The mail with the code; it is on the inbox page too.
MAIL=$(curl -sS "$INBOX/latest?to=$EMAIL&wait=30"); CODE=$(sed 's/.*"code":"\([^"]*\)".*/\1/' <<< "$MAIL"); echo "The code is $CODE"

# Confirm the address with it.
curl -sS -H "$JSON" $APP/confirm -d '{{"code": "'$CODE'"}}'; echo

# Log in.
LOGIN=$(curl -sS -H "$JSON" $APP/login -d '{{"email": "'$EMAIL'", "password": "'$PASSWORD'"}}'); echo "$LOGIN"
TOKEN=$(sed 's/.*"token":"\([^"]*\)".*/\1/' <<< "$LOGIN")

# Ask for the confirmation again: verified already, so no mail.
curl -sS -X POST $APP/verify -H "Authorization: Bearer $TOKEN"; echo
{introspection}
# The password is forgotten: the next mail brings another code.
SEEN=$(sed 's/^{{"id":\([0-9]*\).*/\1/' <<< "$MAIL")
curl -sS -H "$JSON" $APP/forgot-password -d '{{"email": "'$EMAIL'"}}'; echo
MAIL=$(curl -sS "$INBOX/latest?to=$EMAIL&after=$SEEN&wait=30"); CODE=$(sed 's/.*"code":"\([^"]*\)".*/\1/' <<< "$MAIL"); echo "The code is $CODE"

# Set a new one, and log in with it.
PASSWORD=copper-Lantern-drift-58
curl -sS -H "$JSON" $APP/confirm-password -d '{{"email": "'$EMAIL'", "code": "'$CODE'", "password": "'$PASSWORD'"}}'; echo
curl -sS -H "$JSON" $APP/login -d '{{"email": "'$EMAIL'", "password": "'$PASSWORD'"}}'; echo
"#
    )
}

/// What a program of the cluster does, where the App lists the administrator.
fn introspection(settings: &Settings, app: &str) -> Result<String> {
    let document = fs::read(settings.data.join("rendered").join(format!("{app}.json")))?;
    let document: Value = serde_json::from_slice(&document)?;
    let (namespace, name) = ADMINISTRATOR;
    let listed = document["administrators"]
        .as_array()
        .is_some_and(|listed| listed.iter().any(|one| one["namespace"] == namespace && one["serviceAccount"] == name));
    if !listed {
        return Ok(String::new());
    }
    let (api, token) = (settings.base_url(), settings.service_account_token());
    let token = token.display();
    Ok(format!(
        r#"
# A program in the cluster asks whose token this is; it shows its own, that of its ServiceAccount.
curl -sS {api}/v1/{app}/introspect -H "Authorization: Bearer $(<'{token}')" -d "token=$TOKEN"; echo
"#
    ))
}

fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

// === impl Settings ===

impl Settings {
    fn from_env() -> Result<Self> {
        let manifests = absolute("MANIFESTS", "tests/examples");
        ensure!(manifests.is_dir(), "MANIFESTS: {} is no folder", manifests.display());
        Ok(Self {
            manifests,
            data: absolute("DEV_DATA", "target/dev"),
            public: address("PUBLIC_ADDR", PUBLIC)?,
            admin: address("ADMIN_ADDR", "127.0.0.1:8081")?,
            ops: address("OPS_ADDR", "127.0.0.1:9090")?,
            inbox: address("INBOX_ADDR", INBOX)?,
            smtp: address("SMTP_ADDR", "127.0.0.1:1025")?,
            provider: address("PROVIDER_ADDR", PROVIDER)?,
        })
    }

    fn base_url(&self) -> String {
        format!("http://{}", self.public)
    }

    fn manifests(&self) -> Result<Manifests> {
        let addresses = [(PUBLIC, self.public), (INBOX, self.inbox), (PROVIDER, self.provider)];
        Manifests::new(&self.manifests, self.data.join("manifests"), &addresses)
    }

    fn service_account_keys(&self) -> PathBuf {
        self.data.join("serviceaccount-keys.json")
    }

    fn service_account_token(&self) -> PathBuf {
        self.data.join("serviceaccount-token")
    }

    fn log(&self, name: &str) -> PathBuf {
        self.data.join("logs").join(format!("{name}.log"))
    }

    /// Says of every port that is taken how to choose another.
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

fn absolute(variable: &str, default: &str) -> PathBuf {
    let given = env::var_os(variable).filter(|value| !value.is_empty());
    match given {
        // As the caller sees it, which is where make was called.
        Some(path) => env::current_dir().unwrap_or_default().join(path),
        None => process::root().join(default),
    }
}

fn address(variable: &str, default: &str) -> Result<SocketAddr> {
    let text = env::var(variable).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned());
    let addr: SocketAddr =
        text.parse().with_context(|| format!("{variable}={text} is not an IP address with a port, as in {default}"))?;
    ensure!(addr.port() != 0, "{variable}={text}: a port is needed, as in {default}");
    Ok(addr)
}

// === impl Started ===

impl Started {
    fn processes(&self) -> impl Iterator<Item = &Process> {
        let stores = [self.redis.as_ref().map(Redis::process), self.postgres.as_ref().map(Postgres::process)];
        let provider = self.provider.as_ref().and_then(Local::process);
        stores.into_iter().chain([self.server.as_ref(), self.operator.as_ref(), provider]).flatten()
    }

    /// An error if a part has ended, with its name and the end of its log. A store before what depends on it.
    fn all_run(&self) -> Result<()> {
        let Some((process, status)) = self.processes().find_map(|process| Some((process, process.ended()?))) else {
            return Ok(());
        };
        let (name, log) = (process.name(), process.log());
        bail!("{name} ended by itself ({status}). The end of {}:\n\n{}", log.display(), process::tail(log, 25));
    }

    /// The server first, so that what it still has to write finds its stores.
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
        // A panic there has killed them all.
        drop(stopped.await);
        drop(self.smtp);
    }
}

// === impl Follower ===

impl Follower {
    fn at_end(who: &'static str, path: PathBuf, from: Level) -> Self {
        let at = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        Self { who, path, at, from }
    }

    /// Prints what has come since.
    fn tell(&mut self, terminal: Terminal) -> Result<()> {
        let lines = self.new_lines()?;
        let told: Vec<String> = lines.iter().filter_map(|line| short(line, self.from)).collect();
        for line in told.iter().take(LINES_AT_ONCE) {
            terminal.note(&format!("{}: {line}", self.who));
        }
        if told.len() > LINES_AT_ONCE {
            terminal.note(&format!("{}: … and {} more lines", self.who, told.len() - LINES_AT_ONCE));
        }
        Ok(())
    }

    fn new_lines(&mut self) -> Result<Vec<String>> {
        let Ok(mut file) = File::open(&self.path) else { return Ok(Vec::new()) };
        file.seek(SeekFrom::Start(self.at))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // A line that is not whole yet is read the next time.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.at += u64::try_from(whole)?;
        Ok(String::from_utf8_lossy(&bytes[..whole]).lines().map(str::to_owned).collect())
    }
}

/// A log line for the eye, where it is grave enough.
fn short(line: &str, from: Level) -> Option<String> {
    let Ok(Value::Object(record)) = serde_json::from_str(line) else {
        let grave = ["WARN", "ERROR", "panicked"].iter().any(|word| line.contains(word));
        return (grave || from == Level::Info).then(|| line.trim().to_owned()).filter(|line| !line.is_empty());
    };
    let level = record.get("level").and_then(Value::as_str).unwrap_or("INFO");
    let grave = match level {
        "ERROR" | "WARN" => true,
        "INFO" => from == Level::Info,
        _ => false,
    };
    if !grave {
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
    let mut told: String = format!("{level} {}", text.trim()).chars().take(400).collect();
    if told.len() == 400 {
        told.push('…');
    }
    Some(told)
}

// === impl Terminal ===

/// A line that tells of a step, and then how it went.
struct Step {
    began: Instant,
    terminal: Terminal,
}

impl Terminal {
    fn new() -> Self {
        Self { colours: io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none() }
    }

    fn step(self, what: &str) -> Step {
        use std::io::Write;
        print!("{what} … ");
        // Nobody who reads is no reason to stop.
        drop(io::stdout().flush());
        Step { began: Instant::now(), terminal: self }
    }

    fn note(self, text: &str) {
        println!("{text}");
    }

    fn bold(self, text: &str) -> String {
        if self.colours { format!("\u{1b}[1m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    fn faint(self, text: &str) -> String {
        if self.colours { format!("\u{1b}[2m{text}\u{1b}[0m") } else { text.to_owned() }
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
    fn a_log_line_is_told_short_where_it_is_grave() {
        let warning = r#"{"timestamp":"…","level":"WARN","fields":{"message":"refused","file":"a.yaml"},"target":"x"}"#;
        assert_eq!(short(warning, Level::Warn), Some("WARN refused file=a.yaml".to_owned()));
        let flat = r#"{"timestamp":"…","level":"ERROR","message":"no","target":"x"}"#;
        assert_eq!(short(flat, Level::Warn), Some("ERROR no".to_owned()));
        assert_eq!(short(r#"{"level":"INFO","message":"m"}"#, Level::Warn), None);
        assert_eq!(short("thread 'main' panicked at", Level::Warn), Some("thread 'main' panicked at".to_owned()));
        assert_eq!(short("rendered shop", Level::Warn), None);
        assert_eq!(short("rendered shop", Level::Info), Some("rendered shop".to_owned()));
    }
}
