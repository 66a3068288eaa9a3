//! Child processes that cannot outlive this process, and the folders and ports that they use.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    io::retry_on_intr,
    process::{Pid, Signal, WaitId, WaitIdOptions, waitid},
};

/// A program to start, with its arguments and user.
pub struct Program {
    name: String,
    path: PathBuf,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    user: Option<String>,
    wrapper: Vec<String>,
    log: PathBuf,
}

/// A running child process. It is killed when this value is dropped. If this process dies first, the kernel kills the
/// child.
pub struct Process {
    name: String,
    log: PathBuf,
    pid: Pid,
    child: Mutex<Child>,
}

/// A folder for the files of this process. It is removed when this value is dropped. If this process is killed first, a
/// later run removes the folder.
pub struct RunDir {
    path: PathBuf,
    _lock: File,
}

/// The root of the repository, which contains `target`, `crds`, `server` and so on.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests crate is in the workspace").to_owned()
}

/// The path of one of Latchkey's programs. Cargo writes the program next to the test's executable or one folder above.
///
/// `LATCHKEY_BENCH_SERVER` and `LATCHKEY_BENCH_OPERATOR` select another build of a program, so that a benchmark can
/// compare two builds.
pub fn find_built_program(name: &str) -> Result<PathBuf> {
    let variable = match name {
        "latchkey-server" => Some("LATCHKEY_BENCH_SERVER"),
        "latchkey-operator" => Some("LATCHKEY_BENCH_OPERATOR"),
        _ => None,
    };
    if let Some((variable, path)) = variable.and_then(|variable| Some((variable, std::env::var_os(variable)?))) {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "{variable} is {}, which is not a file", path.display());
        return Ok(path);
    }
    let executable = std::env::current_exe().context("the path of this executable")?;
    executable.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file()).with_context(|| {
        format!(
            "{name} is not built (looked near {}): run `make build`, or `make test`, which does it",
            executable.display()
        )
    })
}

/// Whether this process runs as root. Postgres refuses to run as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An unused TCP port that no other call in this process has returned.
///
/// The port is below the range of ephemeral ports, so that no outgoing connection uses it.
pub fn free_port() -> u16 {
    static RETURNED_PORTS: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut returned_ports = lock(&RETURNED_PORTS);
    let returned_ports = returned_ports.get_or_insert_default();
    loop {
        let port = rand::random_range(10_240..32_000);
        if !returned_ports.contains(&port) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            returned_ports.insert(port);
            return port;
        }
    }
}

/// A socket address with a [`free_port`].
pub fn free_addr() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), free_port())
}

/// The folder for the files of this process, created on first use.
pub fn run_dir() -> &'static Path {
    static DIR: OnceLock<RunDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        // If this process is root, Postgres runs as another user. That user must reach the files, so they cannot be in
        // a checkout below root's private home folder.
        let base = if is_root() { std::env::temp_dir().join("latchkey-tests") } else { root().join("target/tmp") };
        RunDir::create(&base).expect("a folder for the files of this run")
    });
    &dir.path
}

/// A new, empty folder in [`run_dir`].
pub fn fresh_dir(name: &str) -> PathBuf {
    let path = run_dir().join(format!("{name}-{:08x}", rand::random::<u32>()));
    fs::create_dir_all(&path).expect("a folder in the folder of this run");
    path
}

/// The last `lines` lines of a text file, from its last 64 KiB.
pub fn tail(path: &Path, lines: usize) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(64 * 1024)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
        Err(error) => format!("({} cannot be read: {error})", path.display()),
    }
}

/// Locks a mutex even if it is poisoned. In tests, a panic leaves no partial changes behind a mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Program ===

impl Program {
    /// A program. Its standard output and error are appended to the file `log`.
    pub fn new(name: &str, path: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            path: path.into(),
            args: Vec::new(),
            envs: Vec::new(),
            user: None,
            wrapper: Vec::new(),
            log: log.into(),
        }
    }

    pub fn arg(mut self, arg: impl AsRef<str>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    pub fn args<I: IntoIterator<Item: AsRef<str>>>(mut self, args: I) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub fn path_arg(self, flag: &str, path: &Path) -> Self {
        self.arg(flag).arg(path.display().to_string())
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs the program as this user; requires root.
    pub fn user(mut self, user: Option<&str>) -> Self {
        self.user = user.map(str::to_owned);
        self
    }

    /// Runs the program through another command, such as `nice` or `prlimit --data=…`. The command's last arguments are
    /// the program and the program's arguments.
    pub fn wrapper(mut self, command: &[String]) -> Self {
        self.wrapper = command.to_vec();
        self
    }

    /// Starts the program and does not wait.
    pub fn start(self) -> Result<Process> {
        let child = self.spawn()?;
        let pid = Pid::from_child(&child);
        Ok(Process { name: self.name, log: self.log, pid, child: Mutex::new(child) })
    }

    /// Runs the program until it ends. Returns an error if the program has not ended within the limit. If the exit code
    /// is not 0, returns an error with the end of the log.
    pub fn run(self, limit: Duration) -> Result<()> {
        let (name, log) = (self.name.clone(), self.log.clone());
        let process = self.start()?;
        let Some(status) = process.wait_blocking(limit) else { bail!("{name} has not ended within {limit:?}") };
        if !status.success() {
            bail!("{name} ended with {status}; the end of {}:\n{}", log.display(), tail(&log, 20));
        }
        Ok(())
    }

    fn spawn(&self) -> Result<Child> {
        if let Some(folder) = self.log.parent() {
            fs::create_dir_all(folder)?;
        }
        let log = File::options().create(true).append(true).open(&self.log).context("opening its log")?;
        // `setpriv` of util-linux makes the kernel kill the child when the thread that started it ends. To set this
        // directly, between fork and exec, Rust needs `unsafe`.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(user) = &self.user {
            command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
        }
        command
            .arg("--")
            .args(&self.wrapper)
            .arg(&self.path)
            .args(&self.args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // The child gets its own process group: Ctrl-C goes to the whole group of the terminal, but the children
            // must end in the order in which this process stops them.
            .process_group(0);
        if self.user.is_some() {
            command.current_dir("/");
        }
        spawn_from_permanent_thread(command)
            .with_context(|| format!("starting {} ({})", self.name, self.path.display()))
    }
}

type SpawnRequest = (Command, mpsc::Sender<io::Result<Child>>);

/// Spawns from a thread that never ends. The kernel kills the child when the thread that spawned it ends
/// (`PR_SET_PDEATHSIG`), and a test thread ends before the processes that it shares with other tests.
fn spawn_from_permanent_thread(command: Command) -> Result<Child> {
    static SPAWNER: LazyLock<Mutex<mpsc::Sender<SpawnRequest>>> = LazyLock::new(|| {
        let (requests, request_receiver) = mpsc::channel::<SpawnRequest>();
        thread::spawn(move || {
            for (mut command, result_sender) in request_receiver {
                // Kills the child if the caller no longer waits, because nothing else can kill it then.
                if let Err(mpsc::SendError(Ok(mut orphan))) = result_sender.send(command.spawn()) {
                    drop(orphan.kill());
                }
            }
        });
        Mutex::new(requests)
    });
    let (result_sender, result) = mpsc::channel();
    lock(&SPAWNER).send((command, result_sender)).context("the thread that starts processes has ended")?;
    Ok(result.recv().context("the thread that starts processes has ended")??)
}

// === impl Process ===

impl Process {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The exit status, if the process has ended.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        lock(&self.child).try_wait().expect("this process can wait for its child")
    }

    /// Sends a signal. After SIGSTOP, waits until all threads have stopped, because they stop one by one.
    pub fn signal(&self, signal: Signal) {
        // While this lock is taken, nothing reaps the child, so its id cannot belong to another process.
        let mut child = lock(&self.child);
        if child.try_wait().is_ok_and(|ended| ended.is_none()) {
            rustix::process::kill_process(self.pid, signal).expect("this process can signal its child");
            if signal == Signal::STOP {
                let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                retry_on_intr(|| waitid(WaitId::Pid(self.pid), stopped)).expect("this process can wait for its child");
            }
        }
    }

    /// Waits until the process has exited; `None` after the limit. Blocks this thread.
    pub fn wait_blocking(&self, limit: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.exit_status() {
                return Some(status);
            }
            if Instant::now() >= end {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has exited, without blocking the thread.
    pub async fn wait_for_exit(&self) -> ExitStatus {
        loop {
            if let Some(status) = self.exit_status() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub fn kill(&self) {
        let mut child = lock(&self.child);
        drop(child.kill());
        drop(child.wait());
    }

    /// Sends a signal, and kills the process after the limit. Returns whether the process ended within the limit.
    pub fn stop(&self, signal: Signal, limit: Duration) -> bool {
        self.signal(signal);
        let ended = self.wait_blocking(limit).is_some();
        if !ended {
            self.kill();
        }
        ended
    }

    /// Whether the log contains this text.
    pub fn has_logged(&self, text: impl AsRef<str>) -> bool {
        fs::read(&self.log).is_ok_and(|log| String::from_utf8_lossy(&log).contains(text.as_ref()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

// === impl RunDir ===

impl RunDir {
    /// Creates a folder below `base` and removes the folders of processes that have ended.
    pub fn create(base: &Path) -> Result<Self> {
        fs::create_dir_all(base)?;
        for entry in fs::read_dir(base)?.flatten() {
            let is_stale = File::open(entry.path().join("lock")).is_ok_and(|lock| lock.try_lock().is_ok());
            if is_stale {
                drop(fs::remove_dir_all(entry.path()));
            }
        }
        let path = tempfile::Builder::new().prefix("run-").tempdir_in(base)?.keep();
        open_to_all(&path)?;
        let lock = File::create(path.join("lock"))?;
        lock.try_lock().context("locking a new folder")?;
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.path));
    }
}

/// Lets every user traverse the folder, because Postgres can run as another user and must reach its files.
fn open_to_all(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// The first of these programs that exists. Each is a path, or a name that is searched in `PATH`.
pub fn find_program<I: IntoIterator<Item: AsRef<OsStr>>>(candidates: I) -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    candidates.into_iter().find_map(|candidate| {
        let candidate = Path::new(candidate.as_ref());
        if candidate.is_absolute() {
            return candidate.is_file().then(|| candidate.to_owned());
        }
        std::env::split_paths(&search).map(|dir| dir.join(candidate)).find(|path| path.is_file())
    })
}
