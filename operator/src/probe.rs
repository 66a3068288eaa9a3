//! What the server pods say they serve, and what follows from it for each App.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::TryStreamExt;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api,
    runtime::watcher::{self, Event},
};
use latchkey_crds::{
    names::OPS_PORT_NAME,
    rendered::{Change, Deletion, Hello, Revision, RevisionsLine},
    types::AppId,
};
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, interval, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// A pod that says nothing for so long is silent.
const SILENCE: Duration = Duration::from_secs(15);
const CONNECT: Duration = Duration::from_secs(3);
const MAX_BACKOFF_MS: u64 = 2000;
const MAX_LINE: usize = 64 * 1024 * 1024;
/// A server that tells of more Apps is out of its mind; its stream is dropped.
const MAX_APPS: usize = 200_000;
const MAX_REASON: usize = 1024;

/// What has changed, and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    App(AppId),
    All,
    Formats,
    Deletion(AppId),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    All {
        servers: usize,
    },
    /// A counting pod tells another revision, or none.
    Behind {
        pods: Vec<String>,
    },
    /// A counting pod refuses the published document.
    Refused {
        pod: String,
        reason: String,
    },
    /// No line for 15 s while serving.
    Silent {
        pods: Vec<String>,
    },
    /// Some have not told yet: no evidence.
    Undecided {
        pods: Vec<String>,
    },
    /// No pod counts, for 15 s.
    NoServers,
}

/// A cheap handle.
#[derive(Clone)]
pub(crate) struct Probe {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    turns: watch::Sender<()>,
    wakes: mpsc::UnboundedSender<Wake>,
}

struct State {
    pods: BTreeMap<String, Pod>,
    expected: HashMap<AppId, Expected>,
    read_at: Option<Instant>,
    none_since: Instant,
    format: Option<u32>,
}

struct Expected {
    revision: [u8; 32],
    /// The verdict that was last given or woken for; none where it was undecided.
    last: Option<Verdict>,
}

struct Pod {
    name: String,
    address: SocketAddr,
    counts: bool,
    heard: Instant,
    silent: bool,
    told: Option<Told>,
    stop: CancellationToken,
}

struct Told {
    format: u32,
    apps: HashMap<AppId, Known>,
}

#[derive(Default, PartialEq)]
struct Known {
    revision: Option<[u8; 32]>,
    refused: Option<Box<str>>,
    deletion: Option<Deletion>,
}

/// What an EndpointSlice says of a pod.
struct Seen {
    name: String,
    address: SocketAddr,
    counts: bool,
}

#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error("timed out")]
    Timeout(#[from] tokio::time::error::Elapsed),
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Request(#[from] http::Error),
    #[error("answered {0}")]
    Status(http::StatusCode),
    #[error("a line is not valid")]
    Line(#[from] serde_json::Error),
    #[error("a line is too long, or too many Apps")]
    TooMuch,
    #[error("another pod answers at its address")]
    OtherPod,
    #[error("a line came before the hello")]
    NoHello,
    #[error("the stream ended")]
    End,
}

// === impl Probe ===

impl Probe {
    /// Follows the EndpointSlices of the ops Service and keeps one stream to each server pod until `stop`.
    pub(crate) fn start(
        client: kube::Client,
        namespace: &str,
        service: &str,
        wakes: mpsc::UnboundedSender<Wake>,
        stop: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let probe = Self::new(wakes);
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}")).timeout(30);
        let follower = probe.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follower.follow(api, config, &stop) => {}
                () = follower.tick() => {}
            }
        });
        (probe, task)
    }

    pub(crate) fn new(wakes: mpsc::UnboundedSender<Wake>) -> Self {
        let state = State {
            pods: BTreeMap::new(),
            expected: HashMap::new(),
            read_at: None,
            none_since: Instant::now(),
            format: None,
        };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), turns: watch::Sender::new(()), wakes }) }
    }

    /// Every counting pod has told its set, or 15 s have passed since the EndpointSlices were first read.
    pub(crate) fn settled(&self) -> bool {
        let state = self.state();
        state.read_at.is_some_and(|at| at.elapsed() >= SILENCE || state.counting().all(|pod| pod.told.is_some()))
    }

    pub(crate) async fn wait_settled(&self) {
        let mut turns = self.shared.turns.subscribe();
        while !self.settled() {
            let _ = timeout(Duration::from_secs(1), turns.changed()).await;
        }
    }

    /// Remembers which revision is published, so that only a change of the verdict wakes it; gives the verdict now.
    pub(crate) fn expect(&self, app: &AppId, revision: Option<&Revision>) -> Verdict {
        let mut state = self.state();
        let Some(revision) = revision.and_then(octets) else {
            state.expected.remove(app);
            return state.verdict(app);
        };
        state.expected.insert(app.clone(), Expected { revision, last: None });
        let verdict = state.verdict(app);
        if let Some(expected) = state.expected.get_mut(app) {
            expected.last = decided(&verdict);
        }
        verdict
    }

    pub(crate) fn verdict(&self, app: &AppId) -> Verdict {
        self.state().verdict(app)
    }

    /// Waits until the verdict is decided or the limit is over.
    pub(crate) async fn wait(&self, app: &AppId, limit: Duration) -> Verdict {
        let mut turns = self.shared.turns.subscribe();
        let end = Instant::now() + limit;
        loop {
            let verdict = self.verdict(app);
            match &verdict {
                // Nobody is there who could tell.
                Verdict::Undecided { pods } if pods.is_empty() => return verdict,
                Verdict::Behind { .. } | Verdict::Undecided { .. } if Instant::now() < end => {}
                _ => return verdict,
            }
            let _ = tokio::time::timeout_at(end, turns.changed()).await;
        }
    }

    /// The lowest format that all counting pods honour; none while none has told.
    pub(crate) fn format(&self) -> Option<u32> {
        self.state().lowest_format()
    }

    /// The counting pods that honour no more than this format.
    pub(crate) fn pods_at_format(&self, format: u32) -> Vec<String> {
        let state = self.state();
        let at = |pod: &&Pod| pod.told.as_ref().is_some_and(|told| told.format <= format);
        named(state.counting().filter(at).map(|pod| pod.name.as_str()))
    }

    /// How many pods count, and how many of them are silent.
    pub(crate) fn pods(&self) -> (usize, usize) {
        let state = self.state();
        (state.counting().count(), state.counting().filter(|pod| pod.silent).count())
    }

    /// The furthest that any counting pod tells of the deletion of its users.
    pub(crate) fn deletion(&self, app: &AppId) -> Option<Deletion> {
        let state = self.state();
        let told = state.counting().filter_map(|pod| pod.told.as_ref()?.apps.get(app)?.deletion);
        told.min_by_key(|deletion| (!deletion.done, deletion.users_left))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, wake: Wake) {
        // Nobody listens any more: the process is about to end.
        let _ = self.shared.wakes.send(wake);
    }

    /// Wakes the Apps whose verdict is another one now.
    fn judge(&self, state: &mut State, apps: impl Iterator<Item = AppId>) {
        for app in apps {
            let Some(now) = decided(&state.verdict(&app)) else { continue };
            if let Some(expected) = state.expected.get_mut(&app)
                && !expected.last.as_ref().is_some_and(|last| same(last, &now))
            {
                expected.last = Some(now);
                self.wake(Wake::App(app));
            }
        }
        let format = state.lowest_format();
        if format != state.format {
            state.format = format;
            self.wake(Wake::Formats);
        }
        self.shared.turns.send_replace(());
    }

    async fn follow(&self, api: Api<EndpointSlice>, config: watcher::Config, stop: &CancellationToken) {
        let mut slices = BTreeMap::new();
        let mut fresh = BTreeMap::new();
        loop {
            let mut events = pin!(watcher::watcher(api.clone(), config.clone()));
            let error = loop {
                match events.try_next().await {
                    Ok(Some(event)) => {
                        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
                        match event {
                            Event::Init => {
                                fresh.clear();
                                continue;
                            }
                            Event::InitApply(slice) => {
                                fresh.insert(name(&slice), slice);
                                continue;
                            }
                            Event::InitDone => slices = std::mem::take(&mut fresh),
                            Event::Apply(slice) => {
                                slices.insert(name(&slice), slice);
                            }
                            Event::Delete(slice) => {
                                slices.remove(&name(&slice));
                            }
                        }
                        self.endpoints(seen(slices.values()), stop);
                    }
                    Ok(None) => break None,
                    // The watcher goes on where it was when it is asked again.
                    Err(error) => {
                        tracing::warn!(%error, "cannot watch the EndpointSlices of the servers");
                        sleep(Duration::from_millis(rand::random_range(1000..5000))).await;
                    }
                }
            };
            let _: Option<()> = error;
        }
    }

    fn endpoints(&self, mut seen: HashMap<String, Seen>, stop: &CancellationToken) {
        let now = Instant::now();
        let mut state = self.state();
        let counted = state.counting().count() > 0;
        state.read_at.get_or_insert(now);
        state.pods.retain(|uid, pod| {
            let stays = seen.get(uid).is_some_and(|seen| seen.address == pod.address);
            if !stays {
                pod.stop.cancel();
            }
            stays
        });
        for (uid, seen) in seen.drain() {
            if let Some(pod) = state.pods.get_mut(&uid) {
                if seen.counts && !pod.counts {
                    pod.heard = now;
                    pod.silent = false;
                }
                pod.counts = seen.counts;
                continue;
            }
            let stop = stop.child_token();
            let probe = self.clone();
            let (task_uid, task_stop, address) = (uid.clone(), stop.clone(), seen.address);
            tokio::spawn(async move {
                tokio::select! {
                    () = task_stop.cancelled() => {}
                    () = probe.keep(&task_uid, address, &task_stop) => {}
                }
            });
            let Seen { name, address, counts } = seen;
            state.pods.insert(uid, Pod { name, address, counts, heard: now, silent: false, told: None, stop });
        }
        if counted && state.counting().count() == 0 {
            state.none_since = now;
        }
        let apps: Vec<_> = state.expected.keys().cloned().collect();
        self.judge(&mut state, apps.into_iter());
    }

    /// Looks at the clock: who became silent, and whether there is no pod for long.
    async fn tick(&self) {
        let mut ticks = interval(Duration::from_secs(1));
        let mut nobody = false;
        loop {
            ticks.tick().await;
            let mut state = self.state();
            let mut turned = false;
            for pod in state.pods.values_mut() {
                if pod.counts && !pod.silent && pod.heard.elapsed() >= SILENCE {
                    pod.silent = true;
                    turned = true;
                }
            }
            let none = state.nobody();
            if turned || none && !nobody {
                self.wake(Wake::All);
            }
            if turned || none != nobody {
                self.shared.turns.send_replace(());
            }
            nobody = none;
        }
    }

    /// One stream to one pod, again and again.
    async fn keep(&self, uid: &str, address: SocketAddr, stop: &CancellationToken) {
        let mut backoff = 100;
        loop {
            let before = Instant::now();
            let Err(cut) = self.listen(uid, address, stop).await;
            tracing::debug!(%address, uid, %cut, "the stream of a server was cut");
            if before.elapsed() > SILENCE {
                backoff = 100;
            }
            sleep(Duration::from_millis(rand::random_range(backoff / 2..=backoff))).await;
            backoff = (backoff * 2).min(MAX_BACKOFF_MS);
        }
    }

    async fn listen(&self, uid: &str, address: SocketAddr, stop: &CancellationToken) -> Result<Never, Cut> {
        let socket = timeout(CONNECT, TcpStream::connect(address)).await??;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = http::Request::get("/revisions").header(http::header::HOST, address.to_string());
        let response = timeout(SILENCE, sender.send_request(request.body(Empty::<Bytes>::new())?)).await??;
        if response.status() != http::StatusCode::OK {
            return Err(Cut::Status(response.status()));
        }
        let mut body = response.into_body();
        let (mut buffer, mut greeted) = (Vec::new(), false);
        loop {
            // A whole line in time: one that drips is as good as silent.
            let line = timeout(SILENCE, next_line(&mut body, &mut buffer)).await??;
            match serde_json::from_slice(&line)? {
                RevisionsLine::Hello { hello } if hello.pod_uid == uid => {
                    self.hello(uid, hello, stop)?;
                    greeted = true;
                }
                RevisionsLine::Hello { .. } => return Err(Cut::OtherPod),
                _ if !greeted => return Err(Cut::NoHello),
                RevisionsLine::Change(change) => self.change(uid, change, stop)?,
                RevisionsLine::Provider { .. } | RevisionsLine::Heartbeat { .. } => self.heard(uid, stop),
            }
        }
    }

    fn heard(&self, uid: &str, stop: &CancellationToken) {
        let mut state = self.state();
        // The uid may stand at another address by now, with a stream of its own.
        if stop.is_cancelled() {
            return;
        }
        if let Some(pod) = state.pods.get_mut(uid) {
            pod.heard = Instant::now();
            if std::mem::take(&mut pod.silent) {
                self.wake(Wake::All);
                self.shared.turns.send_replace(());
            }
        }
    }

    fn hello(&self, uid: &str, hello: Hello, stop: &CancellationToken) -> Result<(), Cut> {
        let mut apps: HashMap<AppId, Known> = HashMap::with_capacity(hello.revisions.len().min(MAX_APPS));
        for (app, revision) in &hello.revisions {
            apps.entry(app.clone()).or_default().revision = octets(revision);
        }
        for (app, reason) in hello.refused {
            apps.entry(app).or_default().refused = Some(short(&reason));
        }
        let deletions: Vec<_> = hello.deletions.keys().cloned().collect();
        for (app, deletion) in hello.deletions {
            apps.entry(app).or_default().deletion = Some(deletion);
        }
        if apps.len() > MAX_APPS {
            return Err(Cut::TooMuch);
        }
        self.heard(uid, stop);
        let mut state = self.state();
        if let Some(pod) = state.pods.get_mut(uid).filter(|_| !stop.is_cancelled()) {
            pod.told = Some(Told { format: hello.format, apps });
            let apps: Vec<_> = state.expected.keys().cloned().collect();
            self.judge(&mut state, apps.into_iter());
            deletions.into_iter().for_each(|app| self.wake(Wake::Deletion(app)));
        }
        Ok(())
    }

    fn change(&self, uid: &str, change: Change, stop: &CancellationToken) -> Result<(), Cut> {
        self.heard(uid, stop);
        let Change { app, revision, refused, deletion } = change;
        let known =
            Known { revision: revision.as_ref().and_then(octets), refused: refused.as_deref().map(short), deletion };
        let mut state = self.state();
        let pod = state.pods.get_mut(uid).filter(|_| !stop.is_cancelled());
        let Some(told) = pod.and_then(|pod| pod.told.as_mut()) else { return Ok(()) };
        let before =
            if known == Known::default() { told.apps.remove(&app) } else { told.apps.insert(app.clone(), known) };
        if told.apps.len() > MAX_APPS {
            return Err(Cut::TooMuch);
        }
        if before.and_then(|known| known.deletion) != deletion {
            self.wake(Wake::Deletion(app.clone()));
        }
        self.judge(&mut state, std::iter::once(app));
        Ok(())
    }
}

// === impl State ===

impl State {
    fn counting(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values().filter(|pod| pod.counts)
    }

    fn nobody(&self) -> bool {
        self.read_at.is_some() && self.counting().next().is_none() && self.none_since.elapsed() >= SILENCE
    }

    fn lowest_format(&self) -> Option<u32> {
        self.counting().filter_map(|pod| Some(pod.told.as_ref()?.format)).min()
    }

    fn verdict(&self, app: &AppId) -> Verdict {
        let expected = self.expected.get(app).map(|expected| expected.revision);
        let (mut silent, mut behind, mut untold, mut servers) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for pod in self.counting() {
            let name = pod.name.as_str();
            if pod.heard.elapsed() >= SILENCE {
                silent.push(name);
                continue;
            }
            let Some(told) = &pod.told else {
                untold.push(name);
                continue;
            };
            let known = told.apps.get(app);
            if let Some(reason) = known.and_then(|known| known.refused.as_deref()) {
                return Verdict::Refused { pod: name.to_owned(), reason: reason.to_owned() };
            }
            if known.and_then(|known| known.revision) == expected {
                servers += 1;
            } else {
                behind.push(name);
            }
        }
        if !silent.is_empty() {
            Verdict::Silent { pods: named(silent) }
        } else if !behind.is_empty() {
            Verdict::Behind { pods: named(behind) }
        } else if !untold.is_empty() {
            Verdict::Undecided { pods: named(untold) }
        } else if servers > 0 {
            Verdict::All { servers }
        } else if self.nobody() {
            Verdict::NoServers
        } else {
            Verdict::Undecided { pods: Vec::new() }
        }
    }
}

enum Never {}

async fn next_line(body: &mut Incoming, buffer: &mut Vec<u8>) -> Result<Vec<u8>, Cut> {
    let mut looked = 0;
    loop {
        if let Some(end) = buffer[looked..].iter().position(|byte| *byte == b'\n') {
            let rest = buffer.split_off(looked + end + 1);
            return Ok(std::mem::replace(buffer, rest));
        }
        looked = buffer.len();
        let frame = body.frame().await.ok_or(Cut::End)??;
        if let Ok(data) = frame.into_data() {
            if buffer.len() + data.len() > MAX_LINE {
                return Err(Cut::TooMuch);
            }
            buffer.extend_from_slice(&data);
        }
    }
}

/// The pods in all slices together, by uid.
fn seen<'a>(slices: impl Iterator<Item = &'a EndpointSlice>) -> HashMap<String, Seen> {
    let mut pods = HashMap::new();
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref() == Some(OPS_PORT_NAME)).and_then(|port| port.port);
        let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { continue };
        for endpoint in &slice.endpoints {
            let Some(target) = &endpoint.target_ref else { continue };
            let Some(uid) = target.uid.clone() else { continue };
            let Some(Ok(ip)) = endpoint.addresses.first().map(|address| address.parse::<IpAddr>()) else { continue };
            let conditions = endpoint.conditions.as_ref();
            // What is not said counts as serving and not terminating, as Kubernetes has it.
            let serving = conditions.and_then(|c| c.serving.or(c.ready)).unwrap_or(true);
            let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
            let name = target.name.clone().unwrap_or_else(|| uid.clone());
            let seen = Seen { name, address: SocketAddr::new(ip, port), counts: serving && !terminating };
            // A dual-stack Service has the pod in a slice of each family; any address that stays the same will do.
            let entry: &mut Seen = pods.entry(uid).or_insert_with(|| Seen { name: seen.name.clone(), ..seen });
            entry.counts = entry.counts || seen.counts;
        }
    }
    pods
}

fn octets(revision: &Revision) -> Option<[u8; 32]> {
    let text = revision.as_str().as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut octets = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (octet, pair) in octets.iter_mut().zip(text.chunks_exact(2)) {
        *octet = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(octets)
}

fn short(reason: &str) -> Box<str> {
    reason[..reason.floor_char_boundary(MAX_REASON)].into()
}

/// At most three by name.
fn named<'a>(pods: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let pods: Vec<_> = pods.into_iter().collect();
    let mut named: Vec<_> = pods.iter().take(3).map(|pod| (*pod).to_owned()).collect();
    if pods.len() > 3 {
        named.push(format!("and {} more", pods.len() - 3));
    }
    named
}

fn decided(verdict: &Verdict) -> Option<Verdict> {
    (!matches!(verdict, Verdict::Undecided { .. })).then(|| verdict.clone())
}

/// Whether nothing changed that is worth a look: how many serve it is not.
fn same(one: &Verdict, other: &Verdict) -> bool {
    matches!((one, other), (Verdict::All { .. }, Verdict::All { .. })) || one == other
}
