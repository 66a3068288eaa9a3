//! A real Postgres in its own process. All tests of a process share one Postgres, and each test has its own database.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::sync::OnceCell;

use crate::{
    process::{self, Process, Program},
    tls::ServerTls,
};

/// The role that owns all databases.
const ROLE: &str = "latchkey";
/// The migrated database from which the databases of tests are copied.
const TEMPLATE: &str = "latchkey_template";
/// Time limit for the creation of a database cluster, on a loaded machine.
const INITDB_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for a previous server on the same data to exit. It exits a second or two after its parent has died.
const PREDECESSOR_LIMIT: Duration = Duration::from_secs(15);
/// A process id that Linux never assigns (the maximum is 2^22).
const UNUSED_PID: u32 = 2_147_483_646;
/// Time limit for a start, including recovery after a kill.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Settings of a server.
pub struct Options {
    /// The data folder; initialized if it is empty.
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// Whether commits survive a crash of the machine. Tests do not need that.
    pub durable: bool,
    /// If set, the server accepts only TLS connections, with this certificate.
    pub tls: Option<ServerTls>,
    /// Additional settings, `name=value`.
    pub settings: Vec<String>,
}

/// A running server.
pub struct Postgres {
    process: Process,
    addr: SocketAddr,
    password: String,
    /// The file of the CA certificate, if the server accepts only TLS.
    ca: Option<PathBuf>,
    template: OnceCell<()>,
}

/// A database of the server.
#[derive(Clone, Debug)]
pub struct Database {
    pub name: String,
    pub addr: SocketAddr,
    /// The URL, with role and password.
    pub url: String,
}

// === impl Options ===

impl Options {
    pub fn for_tests() -> Self {
        Self {
            data: process::fresh_dir("postgres").join("data"),
            log: process::fresh_dir("postgres-log").join("postgres.log"),
            addr: process::free_addr(),
            durable: false,
            tls: None,
            settings: Vec::new(),
        }
    }
}

// === impl Postgres ===

impl Postgres {
    /// The server that all tests of this process share.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        SHARED.get_or_init(|| async { Self::start(Options::for_tests()).await.expect("Postgres starts") }).await
    }

    /// Starts a server and initializes its data folder if necessary.
    pub async fn start(options: Options) -> Result<Self> {
        let user = system_user()?;
        let data = reachable_data_dir(&options.data, user.as_ref())?;
        let is_uninitialized = !data.join("PG_VERSION").exists();
        let programs = find_programs(&data)?;
        let password_file = options.data.with_extension("password");
        if is_uninitialized {
            init_data(&programs, &data, &options.log, &password_file, user.as_ref()).await?;
        }
        let password = fs::read_to_string(&password_file)
            .with_context(|| format!("the password of the database in {}", data.display()))?;
        await_predecessor(&data).await?;
        let ca = match &options.tls {
            Some(tls) => {
                tls.write_to(&data, user.as_ref().map(|user| user.uid))?;
                let hba = "hostssl all all 127.0.0.1/32 scram-sha-256\n";
                fs::write(data.join("pg_hba.conf"), hba)?;
                let ca = options.data.with_extension("ca.pem");
                fs::write(&ca, &tls.ca)?;
                Some(ca)
            }
            None => None,
        };
        let process = Program::new("postgres", programs.join("postgres"), &options.log)
            .user(user.as_ref().map(|user| user.name.as_str()))
            .path_arg("-D", &data)
            .args(settings(&options).iter().flat_map(|setting| ["-c", setting.as_str()]))
            // `make bench` and `make run` set this variable for the servers of Latchkey. Postgres uses the defaults of
            // glibc.
            .env("GLIBC_TUNABLES", "")
            .start()?;
        let this = Self { process, addr: options.addr, password, ca, template: OnceCell::new() };
        this.wait_until_ready().await?;
        Ok(this)
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The file of the CA certificate, if the server accepts only TLS.
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    /// The URL of a database. Does not check that the database exists. `addr` is the server's socket address or that of
    /// a proxy.
    pub fn url(&self, name: &str, addr: SocketAddr) -> String {
        let tls = self.ca.as_ref().map(|ca| format!("?sslmode=verify-full&sslrootcert={}", ca.display()));
        format!("postgres://{ROLE}:{}@{addr}/{name}{}", self.password, tls.unwrap_or_default())
    }

    /// Creates a migrated database for one test.
    pub async fn database(&self) -> Result<Database> {
        self.template.get_or_try_init(|| self.make_template()).await?;
        let name = format!("t_{:016x}", rand::random::<u64>());
        self.execute("postgres", &format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")).await?;
        Ok(self.database_info(name))
    }

    /// Creates an empty database.
    pub async fn empty_database(&self) -> Result<Database> {
        let name = format!("e_{:016x}", rand::random::<u64>());
        self.execute("postgres", &format!("CREATE DATABASE {name}")).await?;
        Ok(self.database_info(name))
    }

    /// The database of this name; created if it does not exist.
    pub async fn database_named(&self, name: &str) -> Result<Database> {
        let mut connection = self.connect("postgres").await?;
        let exists: bool = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
            .bind(name)
            .fetch_one(&mut connection)
            .await?;
        connection.close().await?;
        if !exists {
            self.execute("postgres", &format!("CREATE DATABASE {name}")).await?;
        }
        Ok(self.database_info(name.to_owned()))
    }

    /// Executes SQL statements in a database.
    pub async fn execute(&self, database: &str, sql: &str) -> Result<()> {
        let mut connection = self.connect(database).await?;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await?;
        Ok(connection.close().await?)
    }

    pub async fn connect(&self, database: &str) -> Result<PgConnection> {
        let options: PgConnectOptions = self.url(database, self.addr).parse()?;
        Ok(options.disable_statement_logging().connect().await?)
    }

    /// Stops the server with Postgres's fast shutdown, which closes sessions and writes commits to disk. Returns
    /// whether the server ended within the limit.
    pub fn stop(&self, limit: Duration) -> bool {
        self.process.stop(Signal::INT, limit)
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let end = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let error = match self.connect("postgres").await {
                Ok(connection) => return Ok(connection.close().await?),
                Err(error) => error,
            };
            let log = self.process.log_path();
            if let Some(status) = self.process.exit_status() {
                bail!("Postgres ended with {status}; the end of {}:\n{}", log.display(), process::tail(log, 20));
            }
            if tokio::time::Instant::now() > end {
                return Err(error.context(format!("Postgres is not ready; see {}", log.display())));
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    async fn make_template(&self) -> Result<()> {
        self.execute("postgres", &format!("CREATE DATABASE {TEMPLATE}")).await?;
        migrate(&self.database_info(TEMPLATE.to_owned()))
    }

    fn database_info(&self, name: String) -> Database {
        Database { url: self.url(&name, self.addr), addr: self.addr, name }
    }
}

// === impl Database ===

impl Database {
    pub async fn connect(&self) -> Result<PgConnection> {
        let options: PgConnectOptions = self.url.parse()?;
        Ok(options.disable_statement_logging().connect().await?)
    }
}

/// Migrates a database with `latchkey-server migrate`.
pub fn migrate(database: &Database) -> Result<()> {
    let dir = process::fresh_dir("migrate");
    let url_file = dir.join("database-url");
    write_private(&url_file, &database.url)?;
    Program::new("latchkey-server migrate", process::find_built_program("latchkey-server")?, dir.join("migrate.log"))
        .arg("migrate")
        .path_arg("--database-url-file", &url_file)
        .run(Duration::from_secs(60))
}

/// Writes a file that only the current user can read. The file appears with its complete content.
pub fn write_private(path: &Path, content: &str) -> Result<()> {
    let unfinished = path.with_extension("unfinished");
    drop(fs::remove_file(&unfinished));
    fs::File::create_new(&unfinished)?.set_permissions(fs::Permissions::from_mode(0o600))?;
    fs::write(&unfinished, content)?;
    Ok(fs::rename(&unfinished, path)?)
}

struct SystemUser {
    name: String,
    uid: u32,
}

/// The system user that runs the server; `None` for the current user. Postgres refuses to run as root, so root starts
/// it as the user `postgres`, or as `nobody` if the user `postgres` does not exist.
fn system_user() -> Result<Option<SystemUser>> {
    if !process::is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").context("the list of users")?;
    let find = |wanted: &str| {
        passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| *name == wanted)?;
            Some(SystemUser { name: name.to_owned(), uid: fields.nth(1)?.parse().ok()? })
        })
    };
    let user = find("postgres").or_else(|| find("nobody")).context("no user `postgres` or `nobody` to run Postgres")?;
    Ok(Some(user))
}

/// Creates the data folder, owned by the server's user. If that user cannot reach `wanted`, `wanted` becomes a link to
/// a folder in /var/tmp.
fn reachable_data_dir(wanted: &Path, user: Option<&SystemUser>) -> Result<PathBuf> {
    let parent = wanted.parent().context("the data folder has a parent")?;
    fs::create_dir_all(parent)?;
    let Some(user) = user else {
        make_private_dir(wanted)?;
        return Ok(wanted.to_owned());
    };
    let parent = parent.canonicalize()?;
    let mut is_reachable = true;
    for dir in parent.ancestors() {
        is_reachable &= fs::metadata(dir)?.mode() & 0o001 != 0;
    }
    let data = if is_reachable {
        wanted.to_owned()
    } else if wanted.is_symlink() {
        fs::read_link(wanted)?
    } else {
        let reachable_dir = tempfile::Builder::new().prefix("latchkey-postgres-").tempdir_in("/var/tmp")?.keep();
        fs::set_permissions(&reachable_dir, fs::Permissions::from_mode(0o755))?;
        std::os::unix::fs::symlink(reachable_dir.join("data"), wanted)?;
        reachable_dir.join("data")
    };
    if data.is_symlink() {
        return Ok(fs::read_link(data)?);
    }
    make_private_dir(&data)?;
    if fs::metadata(&data)?.uid() != user.uid {
        std::os::unix::fs::chown(&data, Some(user.uid), None)?;
    }
    Ok(data)
}

fn make_private_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o700))?)
}

/// Waits until the previous server has exited, in case it was killed a moment ago. While the process of the previous
/// server exists, a new server considers the lock file valid and does not start.
async fn await_predecessor(data: &Path) -> Result<()> {
    let lock = data.join("postmaster.pid");
    let end = tokio::time::Instant::now() + PREDECESSOR_LIMIT;
    loop {
        let Ok(text) = fs::read_to_string(&lock) else { return Ok(()) };
        let (pid, other_lines) = text.split_once('\n').unwrap_or((&text, ""));
        let process = Path::new("/proc").join(pid.trim());
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let Some(state) = status.lines().find_map(|line| line.strip_prefix("State:")) else {
            // The process does not exist. Postgres detects that itself.
            return Ok(());
        };
        let is_dead = state.trim_start().starts_with(['Z', 'X']);
        // The working directory of a Postgres is its data folder. If the working directory is another folder, the id
        // belongs to another process now.
        if is_dead || fs::read_link(process.join("cwd")).ok() != data.canonicalize().ok() {
            // Replaces only the process id, which is the first line. Postgres uses the other lines to check that the
            // old shared memory is unused.
            return Ok(fs::write(&lock, format!("{UNUSED_PID}\n{other_lines}"))?);
        }
        ensure!(
            tokio::time::Instant::now() < end,
            "another Postgres (process {}) uses the data in {}",
            pid.trim(),
            data.display()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The folder with the programs of the Postgres version that created the data. If there is no data, the folder of the
/// newest version.
fn find_programs(data: &Path) -> Result<PathBuf> {
    let mut installed: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").is_file() && bin.join("postgres").is_file())
        .collect();
    installed.sort();
    if let Ok(version) = fs::read_to_string(data.join("PG_VERSION")) {
        let matching_version = installed.iter().find(|(installed, _)| installed.to_string() == version.trim());
        if let Some((_, bin)) = matching_version {
            return Ok(bin.clone());
        }
        ensure!(
            installed.is_empty(),
            "the data in {} was made by Postgres {}, which is not installed: install postgresql-{0}, or delete the folder",
            data.display(),
            version.trim()
        );
    }
    if let Some((_, bin)) = installed.pop() {
        return Ok(bin);
    }
    process::find_program(["initdb"])
        .and_then(|initdb| initdb.parent().map(Path::to_owned))
        .context("Postgres is not installed: run `make tools`, or install Debian's package `postgresql`")
}

async fn init_data(
    programs: &Path,
    data: &Path,
    log: &Path,
    password_file: &Path,
    user: Option<&SystemUser>,
) -> Result<()> {
    let password = format!("{:032x}", rand::random::<u128>());
    write_private(password_file, &password)?;
    // initdb runs as the server's user, who cannot read the password file, so the password is copied.
    let password_copy = tempfile::Builder::new().prefix("latchkey-").tempfile()?;
    fs::write(password_copy.path(), &password)?;
    if let Some(user) = user {
        std::os::unix::fs::chown(password_copy.path(), Some(user.uid), None)?;
    }
    // Initializes another folder and then renames it. So the next run does not mistake the result of an interrupted
    // initialization for complete data.
    let unfinished = data.with_extension("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    make_private_dir(&unfinished)?;
    if let Some(user) = user {
        std::os::unix::fs::chown(&unfinished, Some(user.uid), None)?;
    }
    let initdb = Program::new("initdb", programs.join("initdb"), log)
        .user(user.map(|user| user.name.as_str()))
        .path_arg("--pgdata", &unfinished)
        .args(["--username", ROLE, "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"])
        .path_arg("--pwfile", password_copy.path());
    tokio::task::spawn_blocking(move || initdb.run(INITDB_LIMIT)).await??;
    fs::remove_dir(data)?;
    Ok(fs::rename(unfinished, data)?)
}

fn settings(options: &Options) -> Vec<String> {
    let mut settings = vec![
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={}", options.addr.port()),
        "unix_socket_directories=".to_owned(),
        "shared_buffers=64MB".to_owned(),
        "max_connections=400".to_owned(),
    ];
    if !options.durable {
        // The data is not needed after a crash of the machine; disk writes would only cost time.
        settings.extend(["fsync=off", "synchronous_commit=off", "full_page_writes=off"].map(str::to_owned));
        // Autovacuum would start a process for each of hundreds of unused databases.
        settings.push("autovacuum=off".to_owned());
    }
    if options.tls.is_some() {
        settings.extend(["ssl=on", "ssl_cert_file=server.pem", "ssl_key_file=server.key"].map(str::to_owned));
    }
    settings.extend(options.settings.iter().cloned());
    settings
}
