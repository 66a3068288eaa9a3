//! What every server pod has told, held against what is published. Nothing here waits or talks to anybody.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
};

use latchkey_crds::{
    conditions::Reason,
    rendered::{Change, Deletion, FORMAT, Hello, ProviderReport, RefusedDocument, Revision},
    types::AppId,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{LINE, SILENCE, Verdict, Wake, pods::Seen};

/// A server that tells of more Apps is out of its mind; its stream is dropped.
const MAX_APPS: usize = 200_000;
const MAX_REASON: usize = 1024;
/// What a server tells of more Providers is not kept.
const MAX_PROVIDERS: usize = 200_000;
/// What may be found of a Provider, the best first. What else is told, by a server of a later version, is not kept.
const FINDINGS: [Reason; 5] = [
    Reason::Reachable,
    Reason::TokenEndpointFailed,
    Reason::KeysUnreadable,
    Reason::DiscoveryFailed,
    Reason::ClientRefused,
];
/// As many pods are named; the rest is a number.
const NAMED: usize = 3;

pub(super) struct Table {
    fleet: Fleet,
    expected: HashMap<AppId, Expected>,
    /// When the EndpointSlices were read first.
    read_at: Option<Instant>,
    /// Since when no pod counts.
    none_since: Option<Instant>,
    /// The format that was last woken for.
    format: u32,
    wakes: mpsc::UnboundedSender<Wake>,
    /// Something may be another now, for who waits.
    turns: watch::Sender<()>,
}

/// The pods, and what the clock says of them. Only [`Table::look_at_the_clock`] changes the latter, so that nobody is
/// given a verdict that is not woken for when it changes.
#[derive(Default)]
struct Fleet {
    /// By uid.
    pods: BTreeMap<String, Pod>,
    /// No pod has counted for 15 s.
    nobody: bool,
}

struct Expected {
    revision: Octets,
    /// The verdict that was last given or woken for; none where it was undecided.
    last: Option<Verdict>,
}

struct Pod {
    name: String,
    address: SocketAddr,
    counts: bool,
    /// The last sign of life.
    heard: Instant,
    /// The last whole line.
    line: Instant,
    silent: bool,
    told: Option<Told>,
    /// It has said hello on a stream that was not cut since.
    connected: bool,
    /// Places in [`FINDINGS`].
    found: HashMap<ProviderKey, usize>,
    /// What was found of each Provider before the hello, until the server has told all that it knows.
    retelling: Findings,
    stream: CancellationToken,
}

struct Told {
    format: u32,
    apps: HashMap<AppId, Known>,
}

/// What a pod tells of an App.
#[derive(Default, PartialEq)]
struct Known {
    revision: Option<Octets>,
    refused: Option<Box<Refused>>,
    deletion: Option<Deletion>,
}

#[derive(PartialEq)]
struct Refused {
    revision: Option<Octets>,
    reason: String,
    keys_lost: bool,
}

/// A Provider, by namespace and name.
type ProviderKey = (String, String);

/// The worst place in [`FINDINGS`] that was told of each; none where nothing was.
type Findings = HashMap<ProviderKey, Option<usize>>;

/// A revision as its 32 octets: there are as many as Apps times pods.
type Octets = [u8; 32];

/// A pod whose stream is to be kept until it is cancelled.
pub(super) struct Stream {
    pub(super) uid: String,
    pub(super) address: SocketAddr,
    pub(super) stop: CancellationToken,
}

/// A server told of too many Apps.
#[derive(Debug, thiserror::Error)]
#[error("it tells of too many Apps")]
pub(super) struct TooManyApps;

// === impl Table ===

impl Table {
    pub(super) fn new(wakes: mpsc::UnboundedSender<Wake>, turns: watch::Sender<()>) -> Self {
        Self {
            fleet: Fleet::default(),
            expected: HashMap::new(),
            read_at: None,
            none_since: None,
            format: FORMAT,
            wakes,
            turns,
        }
    }

    // --- What is asked of it

    /// See [`super::Probe::settled`].
    pub(super) fn settled(&self) -> bool {
        self.read_at.is_some_and(|at| at.elapsed() >= SILENCE || self.fleet.counting().all(|pod| pod.told.is_some()))
    }

    pub(super) fn expect(&mut self, app: &AppId, revision: &Revision) -> Verdict {
        let Some(revision) = octets(revision) else { return Verdict::Undecided { pods: Vec::new() } };
        let verdict = self.fleet.verdict(app, &revision);
        self.expected.insert(app.clone(), Expected { revision, last: decided(&verdict) });
        verdict
    }

    pub(super) fn forget(&mut self, app: &AppId) {
        self.expected.remove(app);
    }

    /// Of an App of which nothing is expected nothing is decided either, and there is nobody to wait for.
    pub(super) fn verdict(&self, app: &AppId) -> Verdict {
        match self.expected.get(app) {
            Some(expected) => self.fleet.verdict(app, &expected.revision),
            None => Verdict::Undecided { pods: Vec::new() },
        }
    }

    /// The lowest format that all counting pods honour.
    pub(super) fn format(&self) -> u32 {
        let told = self.fleet.counting().filter_map(|pod| Some(pod.told.as_ref()?.format));
        told.min().map_or(FORMAT, |format| format.min(FORMAT))
    }

    pub(super) fn pods_at_format(&self, format: u32) -> Vec<String> {
        let at = |pod: &&Pod| pod.told.as_ref().is_some_and(|told| told.format <= format);
        named(&self.fleet.counting().filter(at).map(|pod| pod.name.as_str()).collect::<Vec<_>>())
    }

    pub(super) fn pods(&self) -> (usize, usize) {
        (self.fleet.counting().count(), self.fleet.counting().filter(|pod| pod.silent).count())
    }

    pub(super) fn deletion(&self, app: &AppId) -> Option<Deletion> {
        let told = self.fleet.counting().filter_map(|pod| pod.told.as_ref()?.apps.get(app)?.deletion);
        told.min_by_key(|deletion| (!deletion.done, deletion.users_left))
    }

    pub(super) fn finding(&self, provider: &ProviderKey) -> Option<Reason> {
        self.fleet.finding(provider).and_then(|at| FINDINGS.get(at).copied())
    }

    /// Of how many Providers a pod's findings are kept: of now, and of before its hello.
    #[cfg(test)]
    pub(super) fn kept(&self, uid: &str) -> (usize, usize) {
        self.fleet.pods.get(uid).map_or((0, 0), |pod| (pod.found.len(), pod.retelling.len()))
    }

    // --- What changes it

    /// The pods as they are now. Gives the streams that are to be begun; those of pods that went are cancelled.
    pub(super) fn endpoints(&mut self, seen: HashMap<String, Seen>, stop: &CancellationToken) -> Vec<Stream> {
        let now = Instant::now();
        self.read_at.get_or_insert(now);
        let turning = self.fleet.turning(&seen);
        self.fleet.pods.retain(|uid, pod| {
            let stays = seen.get(uid).is_some_and(|seen| seen.address == pod.address);
            if !stays {
                pod.stream.cancel();
            }
            stays
        });
        let mut begun = Vec::new();
        for (uid, Seen { name, address, counts }) in seen {
            if let Some(pod) = self.fleet.pods.get_mut(&uid) {
                if counts && !pod.counts {
                    // Its time to tell begins anew.
                    (pod.heard, pod.line, pod.silent) = (now, now, false);
                }
                pod.counts = counts;
                pod.forget_if_gone();
                continue;
            }
            let stream = stop.child_token();
            begun.push(Stream { uid: uid.clone(), address, stop: stream.clone() });
            let pod = Pod {
                name,
                address,
                counts,
                heard: now,
                line: now,
                silent: false,
                told: None,
                connected: false,
                found: HashMap::new(),
                retelling: Findings::new(),
                stream,
            };
            self.fleet.pods.insert(uid, pod);
        }
        if self.fleet.counting().next().is_some() {
            self.none_since = None;
            self.fleet.nobody = false;
        } else {
            self.none_since.get_or_insert(now);
        }
        self.judge_all();
        self.wake_turned(turning);
        begun
    }

    /// Who is silent by now, and whether nobody is there for long.
    pub(super) fn look_at_the_clock(&mut self) {
        let mut turned = false;
        for pod in self.fleet.pods.values_mut() {
            if pod.counts && !pod.silent && pod.heard.elapsed() >= SILENCE {
                pod.silent = true;
                turned = true;
            }
        }
        if !self.fleet.nobody && self.none_since.is_some_and(|since| since.elapsed() >= SILENCE) {
            self.fleet.nobody = true;
            turned = true;
        }
        if turned {
            self.judge_all();
        }
    }

    /// Part of a line came: a long one leaves no room for a heartbeat. Yet one that never ends says nothing, and only a
    /// whole one ends a silence.
    pub(super) fn part(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.fleet.pod(uid, stream).filter(|pod| !pod.silent && pod.line.elapsed() < LINE) {
            pod.heard = Instant::now();
        }
    }

    /// A heartbeat came.
    pub(super) fn beat(&mut self, uid: &str, stream: &CancellationToken) {
        self.heard(uid, stream);
        self.retold(uid, stream);
    }

    fn heard(&mut self, uid: &str, stream: &CancellationToken) {
        if self.fleet.pod(uid, stream).is_some_and(Pod::hear) {
            self.judge_all();
        }
    }

    /// What it found it tells anew, unless it is another container, which has not looked.
    fn forget_until_retold(&mut self, uid: &str, stream: &CancellationToken) {
        let Some(pod) = self.fleet.pods.get(uid) else { return };
        let providers = pod.found.keys().filter(|provider| !pod.retelling.contains_key(*provider));
        // A server that says hello again and again is no reason to keep more.
        let room = MAX_PROVIDERS.saturating_sub(pod.retelling.len());
        let before = providers.take(room).map(|provider| (provider.clone(), self.fleet.finding(provider)));
        let before: Vec<_> = before.collect();
        if let Some(pod) = self.fleet.pod(uid, stream) {
            pod.retelling.extend(before);
            pod.found.clear();
        }
    }

    /// After its hello a server tells all that it knows of Providers, and then something else.
    fn retold(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.fleet.pod(uid, stream) {
            let turning = std::mem::take(&mut pod.retelling);
            self.wake_turned(turning);
        }
    }

    /// The stream was cut; another is begun.
    pub(super) fn cut(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.fleet.pod(uid, stream) {
            pod.connected = false;
            pod.forget_if_gone();
        }
    }

    /// A server looked at a Provider's provider.
    pub(super) fn found(&mut self, uid: &str, stream: &CancellationToken, report: ProviderReport) {
        self.heard(uid, stream);
        let ProviderReport { namespace, name, reason } = report;
        let key = (namespace, name);
        let Some(at) = FINDINGS.iter().position(|known| known.as_str() == reason) else { return };
        let Some(pod) = self.fleet.pod(uid, stream) else { return };
        if pod.found.len() >= MAX_PROVIDERS && !pod.found.contains_key(&key) {
            return;
        }
        let before_hello = pod.retelling.remove(&key);
        let before = before_hello.unwrap_or_else(|| self.fleet.finding(&key));
        if let Some(pod) = self.fleet.pod(uid, stream) {
            pod.found.insert(key.clone(), at);
        }
        if self.fleet.finding(&key) != before {
            self.wake_provider(key);
        }
    }

    pub(super) fn hello(&mut self, uid: &str, stream: &CancellationToken, hello: Hello) -> Result<(), TooManyApps> {
        let mut apps: HashMap<AppId, Known> = HashMap::with_capacity(hello.revisions.len().min(MAX_APPS));
        for (app, revision) in &hello.revisions {
            apps.entry(app.clone()).or_default().revision = octets(revision);
        }
        for (app, refused) in hello.refused {
            apps.entry(app).or_default().refused = Some(Refused::new(refused));
        }
        let deletions: Vec<_> = hello.deletions.keys().cloned().collect();
        for (app, deletion) in hello.deletions {
            apps.entry(app).or_default().deletion = Some(deletion);
        }
        if apps.len() > MAX_APPS {
            return Err(TooManyApps);
        }
        if let Some(pod) = self.fleet.pod(uid, stream) {
            pod.told = Some(Told { format: hello.format, apps });
            pod.connected = true;
            pod.hear();
            self.forget_until_retold(uid, stream);
            self.judge_all();
            self.wake(deletions);
        }
        Ok(())
    }

    pub(super) fn change(&mut self, uid: &str, stream: &CancellationToken, change: Change) -> Result<(), TooManyApps> {
        self.retold(uid, stream);
        let Some(pod) = self.fleet.pod(uid, stream) else { return Ok(()) };
        let was_silent = pod.hear();
        let Some(told) = pod.told.as_mut() else { return Ok(()) };
        let Change { app, revision, refused, deletion } = change;
        let known =
            Known { revision: revision.as_ref().and_then(octets), refused: refused.map(Refused::new), deletion };
        let before =
            if known == Known::default() { told.apps.remove(&app) } else { told.apps.insert(app.clone(), known) };
        let too_many = told.apps.len() > MAX_APPS;
        let progressed = before.and_then(|known| known.deletion) != deletion;
        if was_silent {
            self.judge_all();
        } else {
            self.judge_one(&app);
        }
        if progressed {
            self.wake(vec![app]);
        }
        if too_many { Err(TooManyApps) } else { Ok(()) }
    }

    // --- What follows

    /// Wakes the Apps whose verdict is another one now.
    fn judge_all(&mut self) {
        let fleet = &self.fleet;
        let turned = self.expected.iter_mut().filter_map(|(app, expected)| expected.turned(fleet, app));
        let woken = turned.cloned().collect();
        self.wake(woken);
        let format = self.format();
        if std::mem::replace(&mut self.format, format) != format {
            self.send(Wake::All);
        }
        self.turns.send_replace(());
    }

    fn judge_one(&mut self, app: &AppId) {
        let turned = self.expected.get_mut(app).and_then(|expected| expected.turned(&self.fleet, app)).cloned();
        self.wake(turned.into_iter().collect());
        self.turns.send_replace(());
    }

    fn wake(&self, apps: Vec<AppId>) {
        if !apps.is_empty() {
            self.send(Wake::Apps(apps));
        }
    }

    /// Wakes the Providers of which something else is found now. Where nobody has looked, what was found before stands.
    fn wake_turned(&self, turning: Findings) {
        for (provider, before) in turning {
            let after = self.fleet.finding(&provider);
            if after.is_some() && after != before {
                self.wake_provider(provider);
            }
        }
    }

    fn wake_provider(&self, (namespace, name): ProviderKey) {
        self.send(Wake::Provider { namespace, name });
    }

    fn send(&self, wake: Wake) {
        // Nobody listens any more: the process is about to end.
        let _ = self.wakes.send(wake);
    }
}

// === impl Fleet ===

impl Fleet {
    fn counting(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values().filter(|pod| pod.counts)
    }

    /// The pod of a stream. None for a stream of the past: the uid may stand at another address by now.
    fn pod(&mut self, uid: &str, stream: &CancellationToken) -> Option<&mut Pod> {
        if stream.is_cancelled() { None } else { self.pods.get_mut(uid) }
    }

    /// What is found now, or was before its hello, of each Provider of which a pod has told that goes, or that begins or
    /// ceases to count.
    fn turning(&self, seen: &HashMap<String, Seen>) -> Findings {
        let stays = |uid: &String, pod: &Pod| {
            seen.get(uid).is_some_and(|seen| seen.address == pod.address && seen.counts == pod.counts)
        };
        let mut turning = Findings::new();
        for (_, pod) in self.pods.iter().filter(|(uid, pod)| !stays(uid, pod)) {
            for provider in pod.found.keys() {
                turning.entry(provider.clone()).or_insert_with(|| self.finding(provider));
            }
            turning.extend(pod.retelling.clone());
        }
        turning
    }

    /// The worst place in [`FINDINGS`] that a counting pod tells.
    fn finding(&self, provider: &ProviderKey) -> Option<usize> {
        self.counting().filter_map(|pod| pod.found.get(provider).copied()).max()
    }

    /// The worst that is known: refused, silent, behind, untold.
    fn verdict(&self, app: &AppId, revision: &Octets) -> Verdict {
        let (mut silent, mut behind, mut untold, mut servers) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut refused = None;
        for pod in self.counting() {
            let name = pod.name.as_str();
            if pod.silent {
                silent.push(name);
                continue;
            }
            let Some(told) = &pod.told else {
                untold.push(name);
                continue;
            };
            let known = told.apps.get(app);
            let refusal = known.and_then(|known| known.refused.as_ref());
            if let Some(refusal) = refusal.filter(|refusal| refusal.revision.as_ref() == Some(revision)) {
                refused.get_or_insert((name, refusal));
            } else if known.and_then(|known| known.revision.as_ref()) == Some(revision) {
                servers += 1;
            } else {
                behind.push(name);
            }
        }
        if let Some((pod, refusal)) = refused {
            let (pod, reason) = (pod.to_owned(), refusal.reason.clone());
            if refusal.keys_lost { Verdict::KeysLost { pod } } else { Verdict::Refused { pod, reason } }
        } else if !silent.is_empty() {
            Verdict::Silent { pods: named(&silent) }
        } else if !behind.is_empty() {
            Verdict::Behind { pods: named(&behind) }
        } else if !untold.is_empty() {
            Verdict::Undecided { pods: named(&untold) }
        } else if servers > 0 {
            Verdict::All { servers }
        } else if self.nobody {
            Verdict::NoServers
        } else {
            Verdict::Undecided { pods: Vec::new() }
        }
    }
}

// === impl Expected ===

impl Expected {
    /// The App, where its verdict is another one than was last given or woken for. An undecided one is no news.
    fn turned<'a>(&mut self, fleet: &Fleet, app: &'a AppId) -> Option<&'a AppId> {
        let now = decided(&fleet.verdict(app, &self.revision))?;
        if self.last.as_ref().is_some_and(|last| same(last, &now)) {
            return None;
        }
        self.last = Some(now);
        Some(app)
    }
}

// === impl Pod ===

impl Pod {
    /// Where a pod counts no more and says nothing either its container has ended, or soon will: the next one looks anew.
    fn forget_if_gone(&mut self) {
        if !self.counts && !self.connected {
            self.found.clear();
            self.retelling.clear();
        }
    }

    /// Notes a whole line; tells whether the pod was silent.
    fn hear(&mut self) -> bool {
        let now = Instant::now();
        (self.heard, self.line) = (now, now);
        std::mem::take(&mut self.silent)
    }
}

// === impl Refused ===

impl Refused {
    fn new(refused: RefusedDocument) -> Box<Self> {
        let RefusedDocument { revision, mut reason, keys_lost } = refused;
        reason.truncate(reason.floor_char_boundary(MAX_REASON));
        Box::new(Self { revision: octets(&revision), reason, keys_lost })
    }
}

/// None: what a server tells is no revision, so it is not one that is published.
fn octets(revision: &Revision) -> Option<Octets> {
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

fn named(pods: &[&str]) -> Vec<String> {
    let mut named: Vec<_> = pods.iter().take(NAMED).map(|pod| (*pod).to_owned()).collect();
    if pods.len() > NAMED {
        named.push(format!("{} more", pods.len() - NAMED));
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
