//! The probe against servers that say what a test wants.

use std::{collections::HashSet, convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use futures::stream;
use http_body_util::StreamBody;
use hyper::{body::Frame, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_crds::{conditions::Reason, rendered::ProviderReport};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    stream::{Dial, Socket},
    *,
};

/// Server pods of which a test says each word, on paused time: no socket is a real one.
struct Fleet {
    probe: Probe,
    wakes: mpsc::UnboundedReceiver<Wake>,
    talks: mpsc::UnboundedReceiver<Talk>,
    waiting: Vec<Talk>,
    /// Pods that take no connection.
    deaf: Arc<Mutex<HashSet<SocketAddr>>>,
    stop: CancellationToken,
}

/// A stream that a server has begun to answer. Dropped, it is cut.
struct Talk {
    address: SocketAddr,
    words: mpsc::UnboundedSender<Bytes>,
}

fn app() -> AppId {
    "shop".parse().unwrap()
}

fn revision(of: u8) -> Revision {
    Revision::of(&[of])
}

/// A pod's uid is its number.
fn address(pod: u8) -> SocketAddr {
    ([10, 0, 0, pod], 9090).into()
}

fn pods(counting: &[u8], others: &[u8]) -> HashMap<String, Seen> {
    let seen =
        |pod: u8, counts| (pod.to_string(), Seen { name: format!("server-{pod}"), address: address(pod), counts });
    counting.iter().map(|pod| seen(*pod, true)).chain(others.iter().map(|pod| seen(*pod, false))).collect()
}

fn names(pods: &[u8]) -> Vec<String> {
    pods.iter().map(|pod| format!("server-{pod}")).collect()
}

fn all(servers: usize) -> Verdict {
    Verdict::All { servers }
}

fn silent(pods: &[u8]) -> Verdict {
    Verdict::Silent { pods: names(pods) }
}

fn behind(pods: &[u8]) -> Verdict {
    Verdict::Behind { pods: names(pods) }
}

fn undecided(pods: &[u8]) -> Verdict {
    Verdict::Undecided { pods: names(pods) }
}

fn woken() -> Vec<Wake> {
    vec![Wake::Apps(vec![app()])]
}

fn woken_provider() -> Vec<Wake> {
    vec![Wake::Provider { namespace: "shop".to_owned(), name: "github".to_owned() }]
}

// === impl Fleet ===

impl Fleet {
    fn new() -> Self {
        let (talking, talks) = mpsc::unbounded_channel();
        let deaf: Arc<Mutex<HashSet<SocketAddr>>> = Arc::default();
        let is_deaf = Arc::clone(&deaf);
        let dial: Dial = Arc::new(move |address| {
            let (talking, is_deaf) = (talking.clone(), is_deaf.lock().unwrap().contains(&address));
            Box::pin(async move {
                if is_deaf {
                    std::future::pending::<()>().await;
                }
                let (ours, theirs) = tokio::io::duplex(64 * 1024);
                tokio::spawn(answer(address, theirs, talking));
                Ok(Box::new(ours) as Box<dyn Socket>)
            })
        });
        let (woken, wakes) = mpsc::unbounded_channel();
        let probe = Probe::new(woken, dial);
        let ticking = probe.clone();
        tokio::spawn(async move { ticking.tick().await });
        Self { probe, wakes, talks, waiting: Vec::new(), deaf, stop: CancellationToken::new() }
    }

    /// These pods count, each has told that it serves the App's revision, and the operator knows it.
    async fn serving(serving: &[u8]) -> (Self, Vec<Talk>) {
        let mut fleet = Self::new();
        fleet.see(serving, &[]);
        let mut talks = Vec::new();
        for pod in serving {
            let talk = fleet.talk(*pod).await;
            talk.hello(*pod, revision(1));
            talks.push(talk);
        }
        rest().await;
        assert_eq!(fleet.probe.expect(&app(), &revision(1)), all(serving.len()));
        fleet.wakes();
        (fleet, talks)
    }

    fn see(&self, counting: &[u8], others: &[u8]) {
        self.probe.endpoints(pods(counting, others), &self.stop);
    }

    /// The next stream to a pod that is not cut yet.
    async fn talk(&mut self, pod: u8) -> Talk {
        loop {
            self.waiting.retain(|talk| !talk.is_cut());
            if let Some(at) = self.waiting.iter().position(|talk| talk.address == address(pod)) {
                return self.waiting.swap_remove(at);
            }
            self.waiting.push(self.talks.recv().await.unwrap());
        }
    }

    fn verdict(&self) -> Verdict {
        self.probe.table().verdict(&app())
    }

    /// What is found of the one Provider.
    fn finding(&self) -> Option<Reason> {
        self.probe.finding("shop", "github")
    }

    /// Who was woken since the last look.
    fn wakes(&mut self) -> Vec<Wake> {
        std::iter::from_fn(|| self.wakes.try_recv().ok()).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// As a server does: the request is answered with lines that come when they come.
async fn answer(address: SocketAddr, socket: tokio::io::DuplexStream, talking: mpsc::UnboundedSender<Talk>) {
    let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
        assert_eq!(request.uri().path(), "/revisions");
        let (words, mut said) = mpsc::unbounded_channel();
        let _ = talking.send(Talk { address, words });
        let said = stream::poll_fn(move |cx| said.poll_recv(cx)).map(|word| Ok::<_, Infallible>(Frame::data(word)));
        async move { Ok::<_, Infallible>(http::Response::new(StreamBody::new(said))) }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
}

// === impl Talk ===

impl Talk {
    fn say(&self, line: &Value) {
        self.part(format!("{line}\n"));
    }

    fn part(&self, part: impl Into<Bytes>) {
        let _ = self.words.send(part.into());
    }

    fn hello(&self, pod: u8, serves: Revision) {
        self.hello_of(pod, 1, &json!({ app().as_str(): serves }));
    }

    fn hello_of(&self, pod: u8, format: u32, revisions: &Value) {
        self.say(&json!({ "hello": { "podUID": pod.to_string(), "format": format, "revisions": revisions } }));
    }

    fn change(&self, serves: Revision) {
        self.say(&json!({ "app": app(), "revision": serves }));
    }

    fn refuse(&self, goes_on: Revision, refused: Revision) {
        let refused = json!({ "revision": refused, "reason": "it is too new" });
        self.say(&json!({ "app": app(), "revision": goes_on, "refused": refused }));
    }

    fn found(&self, reason: &str) {
        self.say(&json!({ "provider": { "namespace": "shop", "name": "github", "reason": reason } }));
    }

    fn beat(&self) {
        self.say(&json!({ "heartbeat": 1 }));
    }

    fn is_cut(&self) -> bool {
        self.words.is_closed()
    }
}

/// Until everybody waits.
async fn rest() {
    sleep(Duration::from_millis(1)).await;
}

/// So many seconds, in which only these say something.
async fn pass(seconds: u64, beating: &[&Talk]) {
    for _ in 0..seconds {
        beating.iter().for_each(|talk| talk.beat());
        sleep(Duration::from_secs(1)).await;
    }
    rest().await;
}

#[tokio::test(start_paused = true)]
async fn every_pod_that_counts_must_tell_the_revision() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    assert_eq!(fleet.probe.expect(&app(), &revision(2)), behind(&[1, 2]));
    talks[0].change(revision(2));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (behind(&[2]), woken()));
    talks[1].change(revision(2));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), woken()));
    talks[1].say(&json!({ "app": app(), "revision": null }));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (behind(&[2]), woken()));
}

#[tokio::test(start_paused = true)]
async fn silence_wakes_once_and_so_does_its_end() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    pass(14, &[&talks[1]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), vec![]));
    pass(3, &[&talks[1]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (silent(&[1]), woken()));
    assert_eq!(fleet.probe.pods(), (2, 1));
    pass(30, &[&talks[1]]).await;
    assert_eq!(fleet.wakes(), []);
    // Its stream was cut meanwhile: one that comes back tells its whole set.
    fleet.talk(1).await.hello(1, revision(1));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_silence_that_was_told_wakes_when_it_ends_however_soon() {
    // At each moment about the end of the 15 s: a verdict of silence is one that is woken for when it ends.
    for after in 14_500..16_500 {
        if after % 50 != 0 {
            continue;
        }
        let (mut fleet, talks) = Fleet::serving(&[1]).await;
        sleep(Duration::from_millis(after)).await;
        let verdict = fleet.probe.expect(&app(), &revision(1));
        fleet.wakes();
        if talks[0].is_cut() {
            fleet.talk(1).await.hello(1, revision(1));
        } else {
            talks[0].beat();
        }
        rest().await;
        let expected = if verdict == silent(&[1]) { woken() } else { vec![] };
        assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), expected), "after {after} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_cut_and_comes_back_is_no_news() {
    let (mut fleet, mut talks) = Fleet::serving(&[1, 2]).await;
    for _ in 0..5 {
        let other = talks.pop().unwrap();
        talks.clear();
        let talk = fleet.talk(1).await;
        assert_eq!(fleet.verdict(), all(2));
        talk.hello(1, revision(1));
        pass(5, &[&other, &talk]).await;
        assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), vec![]));
        talks = vec![talk, other];
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_dropped_in_silence_is_no_news() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    pass(7, &[&talks[1]]).await;
    assert!(talks[0].is_cut(), "it is not waited for until the pod is silent");
    let again = fleet.talk(1).await;
    pass(4, &[&talks[1]]).await;
    again.hello(1, revision(1));
    pass(14, &[&talks[1], &again]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_not_told_is_no_evidence() {
    let (mut fleet, talks) = Fleet::serving(&[1]).await;
    fleet.see(&[1, 2], &[]);
    let new = fleet.talk(2).await;
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (undecided(&[2]), vec![]));
    new.hello(2, revision(1));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), vec![]), "it serves what the others serve");
    fleet.see(&[1, 2, 3], &[]);
    let behind_others = fleet.talk(3).await;
    behind_others.hello(3, revision(9));
    pass(1, &talks.iter().collect::<Vec<_>>()).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (behind(&[3]), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_never_tells_is_silent_in_the_end() {
    let (mut fleet, talks) = Fleet::serving(&[1]).await;
    fleet.deaf.lock().unwrap().insert(address(2));
    fleet.see(&[1, 2], &[]);
    pass(17, &[&talks[0]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (silent(&[2]), woken()));
    // It can be reached after all.
    fleet.deaf.lock().unwrap().clear();
    let late = fleet.talk(2).await;
    late.hello(2, revision(1));
    pass(1, &[&talks[0]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_makes_no_sense_is_cut_and_begun_again() {
    let mut fleet = Fleet::new();
    fleet.see(&[1], &[]);
    fleet.probe.expect(&app(), &revision(1));
    let nonsense: [&dyn Fn(&Talk); 5] = [
        // The pod before it had the address.
        &|talk| talk.hello(7, revision(1)),
        &|talk| talk.part("{\"hello\": \n"),
        &|talk| talk.part("\n"),
        &|talk| talk.change(revision(1)),
        &|talk| talk.beat(),
    ];
    for nonsense in nonsense {
        let talk = fleet.talk(1).await;
        nonsense(&talk);
        talk.hello(1, revision(1));
        rest().await;
        assert!(talk.is_cut());
        assert_eq!(fleet.verdict(), undecided(&[1]));
        assert!(!fleet.probe.settled());
    }
    fleet.talk(1).await.hello(1, revision(1));
    rest().await;
    assert_eq!(fleet.verdict(), all(1));
    assert!(fleet.probe.settled());
}

#[tokio::test(start_paused = true)]
async fn a_line_has_a_bound() {
    let mut fleet = Fleet::new();
    fleet.see(&[1], &[]);
    let talk = fleet.talk(1).await;
    let mib = Bytes::from(vec![b' '; 1024 * 1024]);
    for _ in 0..65 {
        talk.part(mib.clone());
    }
    fleet.talk(1).await.hello(1, revision(1));
    rest().await;
    assert!(talk.is_cut() && fleet.probe.settled());
}

#[tokio::test(start_paused = true)]
async fn a_long_line_that_keeps_coming_is_a_sign_of_life_and_one_that_hangs_is_not() {
    let (mut fleet, talks) = Fleet::serving(&[1]).await;
    talks[0].part("{\"hello\":");
    for _ in 0..10 {
        sleep(Duration::from_secs(5)).await;
        talks[0].part(" ");
        assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), vec![]));
    }
    talks[0].part(format!("{}}}\n", json!({ "podUID": "1", "format": 1, "revisions": { "shop": revision(1) } })));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), vec![]));

    talks[0].part("{\"hello\":");
    pass(17, &[]).await;
    assert!(talks[0].is_cut());
    assert_eq!((fleet.verdict(), fleet.wakes()), (silent(&[1]), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_line_without_an_end_is_silence() {
    let (mut fleet, mut talks) = Fleet::serving(&[1]).await;
    let mut talk = talks.remove(0);
    // Beginnings of lines, on one stream after another.
    for _ in 0..9 {
        talk.part("{\"hello\":");
        sleep(Duration::from_secs(10)).await;
        if talk.is_cut() {
            talk = fleet.talk(1).await;
        }
    }
    assert_eq!((fleet.verdict(), fleet.wakes()), (silent(&[1]), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_goes_or_counts_no_more_is_not_waited_for() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2, 3]).await;
    talks[1].change(revision(9));
    pass(17, &[&talks[0], &talks[1]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes().len()), (silent(&[3]), 2));
    // The silent one goes.
    fleet.see(&[1, 2], &[]);
    assert_eq!((fleet.verdict(), fleet.wakes()), (behind(&[2]), woken()));
    rest().await;
    assert!(talks[2].is_cut() && fleet.probe.pods() == (2, 0));
    // The one behind begins to end, and says so: it does not count.
    fleet.see(&[1], &[2]);
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), woken()));
    assert_eq!(fleet.probe.pods(), (1, 0));
    // It comes back with what it told last.
    fleet.see(&[1, 2], &[]);
    assert_eq!((fleet.verdict(), fleet.wakes()), (behind(&[2]), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_begins_to_count_again_has_its_time_to_tell() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    fleet.see(&[1], &[2]);
    pass(60, &[&talks[0]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), vec![]), "who does not count is not silent");
    fleet.see(&[1, 2], &[]);
    pass(14, &[&talks[0]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(2), vec![]));
    pass(3, &[&talks[0]]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (silent(&[2]), woken()));
    fleet.see(&[1], &[2]);
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), woken()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_at_another_address_tells_anew_and_its_old_stream_says_nothing() {
    let (mut fleet, talks) = Fleet::serving(&[1]).await;
    let moved = Seen { name: "server-1".into(), address: address(2), counts: true };
    fleet.probe.endpoints(HashMap::from([("1".into(), moved)]), &fleet.stop);
    assert_eq!(fleet.verdict(), undecided(&[1]));
    talks[0].hello(1, revision(1));
    rest().await;
    assert_eq!(fleet.verdict(), undecided(&[1]));
    fleet.talk(2).await.hello(1, revision(1));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), vec![]));
}

#[tokio::test(start_paused = true)]
async fn no_server_is_told_after_15_s_and_ends_with_a_server() {
    let (mut fleet, _talks) = Fleet::serving(&[1]).await;
    fleet.see(&[], &[1]);
    pass(14, &[]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (undecided(&[]), vec![]));
    pass(3, &[]).await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (Verdict::NoServers, woken()));
    pass(30, &[]).await;
    assert_eq!(fleet.wakes(), []);
    fleet.see(&[2], &[]);
    assert_eq!((fleet.verdict(), fleet.wakes()), (undecided(&[2]), vec![]));
    fleet.talk(2).await.hello(2, revision(1));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (all(1), woken()));
}

#[tokio::test(start_paused = true)]
async fn only_the_refusal_of_what_is_published_is_one() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    let refused = Verdict::Refused { pod: "server-1".into(), reason: "it is too new".into() };
    assert_eq!(fleet.probe.expect(&app(), &revision(2)), behind(&[1, 2]));
    talks[0].refuse(revision(1), revision(2));
    rest().await;
    assert_eq!((fleet.verdict(), fleet.wakes()), (refused.clone(), woken()));
    // Mended: what was refused before says nothing of it.
    assert_eq!(fleet.probe.expect(&app(), &revision(3)), behind(&[1, 2]));
    talks[0].change(revision(3));
    talks[1].change(revision(3));
    rest().await;
    assert_eq!(fleet.verdict(), all(2));
    // A pod that goes on with the old revision, and this is published again, serves it.
    talks[0].refuse(revision(3), revision(4));
    rest().await;
    assert_eq!(fleet.verdict(), all(2));
    // Refused though it is what goes on: the deletion of the users.
    talks[0].refuse(revision(3), revision(3));
    rest().await;
    assert_eq!(fleet.verdict(), refused);
    // Told of before the operator knows what is published.
    fleet.probe.forget(&app());
    assert_eq!(fleet.probe.expect(&app(), &revision(3)), refused);
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_told_at_once_when_it_is_decided() {
    let (fleet, talks) = Fleet::serving(&[1]).await;
    let (app_id, limit) = (app(), Duration::from_secs(1));
    let began = Instant::now();
    assert_eq!(fleet.probe.wait(&app(), limit).await, all(1));
    fleet.probe.expect(&app(), &revision(2));
    let (verdict, ()) = tokio::join!(fleet.probe.wait(&app_id, limit), async { talks[0].change(revision(2)) });
    assert_eq!((verdict, began.elapsed()), (all(1), Duration::ZERO));
    fleet.probe.expect(&app(), &revision(3));
    let (verdict, ()) = tokio::join!(fleet.probe.wait(&app_id, limit), async {
        talks[0].refuse(revision(2), revision(3));
    });
    assert!(matches!(verdict, Verdict::Refused { .. }) && began.elapsed() == Duration::ZERO);
    fleet.probe.expect(&app(), &revision(4));
    assert_eq!(fleet.probe.wait(&app(), limit).await, behind(&[1]));
    assert_eq!(began.elapsed(), limit, "no answer within the limit is no yes");
    fleet.see(&[], &[]);
    assert_eq!(fleet.probe.wait(&app(), limit).await, undecided(&[]));
    fleet.probe.forget(&app());
    assert_eq!(fleet.probe.wait(&app(), limit).await, undecided(&[]), "nothing is expected");
    assert_eq!(began.elapsed(), limit, "nobody is there who could tell");
}

#[tokio::test(start_paused = true)]
async fn the_worst_word_is_the_verdict() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2, 3, 4]).await;
    fleet.see(&[1, 2, 3, 4, 5], &[]);
    rest().await;
    assert_eq!(fleet.verdict(), undecided(&[5]));
    talks[1].change(revision(9));
    rest().await;
    assert_eq!(fleet.verdict(), behind(&[2]));
    let fifth = fleet.talk(5).await;
    fifth.hello(5, revision(1));
    pass(17, &[&talks[0], &talks[1], &talks[3], &fifth]).await;
    assert_eq!(fleet.verdict(), silent(&[3]));
    talks[3].refuse(revision(1), revision(1));
    rest().await;
    let refused = Verdict::Refused { pod: "server-4".into(), reason: "it is too new".into() };
    assert_eq!(fleet.verdict(), refused);
}

#[tokio::test(start_paused = true)]
async fn many_pods_are_named_in_part() {
    let (fleet, _talks) = Fleet::serving(&[1, 2, 3, 4, 5]).await;
    let Verdict::Behind { pods } = fleet.probe.expect(&app(), &revision(2)) else { panic!() };
    assert_eq!(pods, ["server-1", "server-2", "server-3", "2 more"]);
}

#[tokio::test(start_paused = true)]
async fn the_lowest_format_counts_and_everything_is_rendered_anew_when_it_changes() {
    let mut fleet = Fleet::new();
    fleet.see(&[1, 2], &[]);
    assert_eq!(fleet.probe.format(), 1, "what this operator writes, while nobody has told");
    let (one, two) = (fleet.talk(1).await, fleet.talk(2).await);
    one.hello_of(1, 99, &json!({}));
    rest().await;
    assert_eq!((fleet.probe.format(), fleet.wakes()), (1, vec![]), "a newer server honours ours");
    two.hello_of(2, 0, &json!({}));
    rest().await;
    assert_eq!((fleet.probe.format(), fleet.wakes()), (0, vec![Wake::All]));
    assert_eq!(fleet.probe.pods_at_format(0), names(&[2]));
    fleet.see(&[1], &[2]);
    assert_eq!((fleet.probe.format(), fleet.wakes()), (1, vec![Wake::All]), "the old one drains");
    fleet.see(&[], &[]);
    assert_eq!(fleet.wakes(), []);
}

#[tokio::test(start_paused = true)]
async fn the_furthest_word_of_a_deletion_counts() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    let progress = |left: u64, done| json!({ "usersLeft": left, "done": done });
    let line = |left, done| json!({ "app": app(), "revision": revision(1), "deletion": progress(left, done) });
    assert_eq!(fleet.probe.deletion(&app()), None);
    talks[0].say(&line(7, false));
    talks[1].say(&line(5, false));
    rest().await;
    assert_eq!(fleet.probe.deletion(&app()), Some(Deletion { users_left: 5, done: false }));
    assert_eq!(fleet.wakes(), [woken(), woken()].concat());
    talks[0].say(&line(9, true));
    talks[1].say(&line(5, false));
    rest().await;
    assert!(fleet.probe.deletion(&app()).unwrap().done);
    assert_eq!(fleet.wakes(), woken(), "the same again is no news");
}

#[tokio::test(start_paused = true)]
async fn a_leader_begins_when_all_have_told_or_after_15_s() {
    let mut fleet = Fleet::new();
    assert!(!fleet.probe.settled(), "nothing was read");
    fleet.see(&[1, 2], &[3]);
    fleet.talk(1).await.hello(1, revision(1));
    let two = fleet.talk(2).await;
    rest().await;
    assert!(!fleet.probe.settled());
    let began = Instant::now();
    let (probe, waited) = (fleet.probe.clone(), Instant::now());
    let waiting = tokio::spawn(async move {
        probe.wait_settled().await;
        waited.elapsed()
    });
    rest().await;
    two.hello(2, revision(1));
    assert!(waiting.await.unwrap() < Duration::from_secs(1));

    let mut hanging = Fleet::new();
    hanging.see(&[1], &[]);
    let _says_nothing = hanging.talk(1).await;
    hanging.probe.wait_settled().await;
    assert!((15..17).contains(&began.elapsed().as_secs()));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_tells_of_too_many_apps_is_cut() {
    let mut fleet = Fleet::new();
    fleet.see(&[1], &[]);
    let talk = fleet.talk(1).await;
    let many: serde_json::Map<_, _> = (0..=200_000).map(|app| (format!("a{app}"), json!(""))).collect();
    talk.hello_of(1, 1, &many.into());
    rest().await;
    assert!(talk.is_cut() && !fleet.probe.settled());
}

/// Judging every App is linear in the Apps, and judging one does not depend on how many there are.
#[test]
fn judging_many_apps_is_linear() {
    let cost = |apps: usize| {
        let (wakes, _woken) = mpsc::unbounded_channel();
        let mut table = Table::new(wakes, watch::Sender::new(()));
        let stop = CancellationToken::new();
        let serving: HashMap<AppId, Revision> =
            (0..apps).map(|app| (format!("app-{app}").parse().unwrap(), revision(1))).collect();
        for Stream { uid, stop, .. } in table.endpoints(pods(&[1, 2, 3, 4, 5, 6], &[]), &stop) {
            let hello = json!({ "podUID": uid, "format": 1, "revisions": serving });
            assert!(table.hello(&uid, &stop, serde_json::from_value(hello).unwrap()).is_ok());
        }
        serving.iter().for_each(|(app, revision)| assert_eq!(table.expect(app, revision), all(6)));
        let least = (0..10).map(|_| {
            let began = std::time::Instant::now();
            drop(table.endpoints(pods(&[1, 2, 3, 4, 5, 6], &[]), &stop));
            began.elapsed()
        });
        least.min().unwrap()
    };
    let (few, many) = (cost(1_000), cost(10_000));
    assert!(many < few * 60, "1,000 Apps: {few:?}, 10,000: {many:?}");
}

#[tokio::test(start_paused = true)]
async fn what_servers_find_of_a_provider_wakes_it_when_the_worst_of_it_changes() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    assert_eq!(fleet.finding(), None);
    for (pod, reason, worst, wakes) in [
        (0, "Reachable", Reason::Reachable, woken_provider()),
        (1, "Reachable", Reason::Reachable, vec![]),
        (1, "ClientRefused", Reason::ClientRefused, woken_provider()),
        (0, "ClientRefused", Reason::ClientRefused, vec![]),
        (0, "Reachable", Reason::ClientRefused, vec![]),
        (1, "OfALaterVersion", Reason::ClientRefused, vec![]),
        (1, "TokenEndpointFailed", Reason::TokenEndpointFailed, woken_provider()),
        (1, "Reachable", Reason::Reachable, woken_provider()),
    ] {
        talks[pod].found(reason);
        rest().await;
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(worst), wakes), "{pod}: {reason}");
    }
    assert_eq!(fleet.probe.finding("blog", "github"), None);
}

#[tokio::test(start_paused = true)]
async fn who_begins_or_ceases_to_count_changes_what_is_found() {
    let (mut fleet, talks) = Fleet::serving(&[1, 2, 3]).await;
    talks[0].found("Reachable");
    rest().await;
    assert_eq!(fleet.wakes(), woken_provider());
    // A server that is not ready yet has looked already.
    fleet.see(&[1, 3], &[2]);
    talks[1].found("DiscoveryFailed");
    rest().await;
    assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), vec![]));
    fleet.see(&[1, 2, 3], &[]);
    assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::DiscoveryFailed), woken_provider()));
    // One that has told nothing makes no difference.
    fleet.see(&[1, 2], &[3]);
    assert_eq!(fleet.wakes(), []);
    // The one that cannot reach it goes.
    fleet.see(&[1], &[3]);
    assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), woken_provider()));
    // What nobody tells any more stands as it was told.
    fleet.see(&[], &[1]);
    assert_eq!((fleet.finding(), fleet.wakes()), (None, vec![]));
}

/// Two pods, of which the second finds that it is refused, and what was woken for that is forgotten.
async fn one_is_refused() -> (Fleet, Vec<Talk>) {
    let (mut fleet, talks) = Fleet::serving(&[1, 2]).await;
    talks[0].found("Reachable");
    talks[1].found("ClientRefused");
    rest().await;
    assert_eq!((fleet.finding(), fleet.wakes().len()), (Some(Reason::ClientRefused), 2));
    (fleet, talks)
}

/// As before, and the second begins another stream, on which it has told nothing but its hello.
async fn one_says_hello_again() -> (Fleet, Talk, Talk) {
    let (mut fleet, mut talks) = one_is_refused().await;
    drop(talks.pop());
    let again = fleet.talk(2).await;
    again.hello(2, revision(1));
    rest().await;
    assert_eq!(fleet.wakes(), []);
    (fleet, talks.remove(0), again)
}

#[tokio::test(start_paused = true)]
async fn a_container_on_another_stream_tells_what_it_knows_and_nothing_has_happened() {
    let (mut fleet, _first, talk) = one_says_hello_again().await;
    talk.found("ClientRefused");
    talk.beat();
    rest().await;
    assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::ClientRefused), vec![]));
}

#[tokio::test(start_paused = true)]
async fn what_a_container_found_goes_with_it() {
    for ends_with_a_change in [false, true] {
        let (mut fleet, _first, next) = one_says_hello_again().await;
        // It knows of nothing yet.
        if ends_with_a_change {
            next.change(revision(1))
        } else {
            next.beat()
        }
        rest().await;
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), woken_provider()));
        next.found("ClientRefused");
        rest().await;
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::ClientRefused), woken_provider()));
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_container_found_does_not_come_back_with_the_next() {
    // Its stream ends before the pod ceases to count, or after it.
    for is_cut_first in [false, true] {
        let (mut fleet, mut talks) = one_is_refused().await;
        let talk = talks.pop().unwrap();
        if is_cut_first {
            drop(talk);
            rest().await;
            assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::ClientRefused), vec![]));
            fleet.see(&[1], &[2]);
        } else {
            fleet.see(&[1], &[2]);
            drop(talk);
            rest().await;
        }
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), woken_provider()));
        // The next one serves before the operator has reached it.
        fleet.see(&[1, 2], &[]);
        let next = fleet.talk(2).await;
        next.hello(2, revision(1));
        next.beat();
        rest().await;
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), vec![]));
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_container_found_goes_with_a_pod_that_goes_before_the_next_has_told() {
    for is_gone in [false, true] {
        let (mut fleet, _first, next) = one_says_hello_again().await;
        fleet.see(&[1], if is_gone { &[] } else { &[2] });
        drop(next);
        rest().await;
        assert_eq!((fleet.finding(), fleet.wakes()), (Some(Reason::Reachable), woken_provider()));
    }
}

#[tokio::test]
async fn what_is_kept_of_findings_is_bounded_however_often_a_server_says_hello() {
    const MOST: usize = 200_000;
    let (wakes, _woken) = mpsc::unbounded_channel();
    let mut table = Table::new(wakes, watch::Sender::new(()));
    let begun = table.endpoints(pods(&[1], &[]), &CancellationToken::new());
    let Stream { uid, stop, .. } = &begun[0];
    for round in 0..3 {
        let hello = json!({ "podUID": uid, "format": 1, "revisions": {} });
        assert!(table.hello(uid, stop, serde_json::from_value(hello).unwrap()).is_ok());
        for number in 0..=MOST {
            let name = format!("{round}-{number}");
            table.found(uid, stop, ProviderReport { namespace: "shop".into(), name, reason: "Reachable".into() });
        }
        assert_eq!(table.kept(uid), (MOST, if round == 0 { 0 } else { MOST }));
    }
    table.beat(uid, stop);
    assert_eq!(table.kept(uid), (MOST, 0));
}
