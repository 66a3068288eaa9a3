//! The monitor against mock servers.

use std::{collections::HashSet, convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use futures::stream;
use http_body_util::StreamBody;
use hyper::{body::Frame, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_crds::{
    conditions::Reason,
    rendered::{FORMAT, ProviderReport},
    webhook::WebhookState,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    pod_states::PodStream,
    stream::{Connector, Socket},
    *,
};

/// Mock server pods. Each test decides what they send. The time is paused, and there are no real sockets.
struct MockPods {
    monitor: Monitor,
    events: mpsc::UnboundedReceiver<MonitorEvent>,
    streams: mpsc::UnboundedReceiver<MockStream>,
    unclaimed_streams: Vec<MockStream>,
    /// Pods that accept no connection.
    unreachable: Arc<Mutex<HashSet<SocketAddr>>>,
    stop: CancellationToken,
}

/// The server's end of a stream on which a mock server has begun to respond. If the value is dropped, the stream is
/// cut.
struct MockStream {
    address: SocketAddr,
    lines: mpsc::UnboundedSender<Bytes>,
}

fn app() -> AppId {
    "shop".parse().unwrap()
}

fn revision(of: u8) -> Revision {
    Revision::of(&[of])
}

/// Returns the address of the pod with this number. The number is also the uid.
fn address(pod: u8) -> SocketAddr {
    ([10, 0, 0, pod], 9090).into()
}

fn pods(serving: &[u8], others: &[u8]) -> HashMap<String, PodEndpoint> {
    let endpoint = |pod: u8, is_serving| {
        (pod.to_string(), PodEndpoint { name: format!("server-{pod}"), address: address(pod), is_serving })
    };
    serving.iter().map(|pod| endpoint(*pod, true)).chain(others.iter().map(|pod| endpoint(*pod, false))).collect()
}

fn names(pods: &[u8]) -> Vec<String> {
    pods.iter().map(|pod| format!("server-{pod}")).collect()
}

fn complete(servers: usize) -> RolloutState {
    RolloutState::Complete { servers }
}

fn silent(pods: &[u8]) -> RolloutState {
    RolloutState::Silent { pods: names(pods) }
}

fn behind(pods: &[u8]) -> RolloutState {
    RolloutState::Behind { pods: names(pods) }
}

fn undecided(pods: &[u8]) -> RolloutState {
    RolloutState::Undecided { pods: names(pods) }
}

fn app_events() -> Vec<MonitorEvent> {
    vec![MonitorEvent::Apps(vec![app()])]
}

fn provider_events() -> Vec<MonitorEvent> {
    vec![MonitorEvent::Provider { namespace: "shop".to_owned(), name: "github".to_owned() }]
}

// === impl MockPods ===

impl MockPods {
    fn new() -> Self {
        let (stream_sender, streams) = mpsc::unbounded_channel();
        let unreachable: Arc<Mutex<HashSet<SocketAddr>>> = Arc::default();
        let unreachable_pods = Arc::clone(&unreachable);
        let connector: Connector = Arc::new(move |address| {
            let (stream_sender, is_unreachable) = (stream_sender.clone(), unreachable_pods.lock().contains(&address));
            Box::pin(async move {
                if is_unreachable {
                    std::future::pending::<()>().await;
                }
                let (operator_end, server_end) = tokio::io::duplex(64 * 1024);
                tokio::spawn(respond(address, server_end, stream_sender));
                Ok(Box::new(operator_end) as Box<dyn Socket>)
            })
        });
        let (event_sender, events) = mpsc::unbounded_channel();
        let monitor = Monitor::new(event_sender, connector);
        let ticking = monitor.clone();
        tokio::spawn(async move { ticking.run_ticks().await });
        Self { monitor, events, streams, unclaimed_streams: Vec::new(), unreachable, stop: CancellationToken::new() }
    }

    /// Creates mock pods that are serving, and waits until the monitor has read that each of them serves the App's
    /// revision.
    async fn serving(serving: &[u8]) -> (Self, Vec<MockStream>) {
        let mut mock = Self::new();
        mock.set_pods(serving, &[]);
        let mut streams = Vec::new();
        for pod in serving {
            let stream = mock.next_stream(*pod).await;
            stream.send_hello(*pod, revision(1));
            streams.push(stream);
        }
        settle_tasks().await;
        assert_eq!(mock.monitor.expect_revision(&app(), &revision(1)), complete(serving.len()));
        mock.drain_events();
        (mock, streams)
    }

    fn set_pods(&self, serving: &[u8], others: &[u8]) {
        self.monitor.update_endpoints(pods(serving, others), &self.stop);
    }

    /// Waits for the next open stream to a pod.
    async fn next_stream(&mut self, pod: u8) -> MockStream {
        loop {
            self.unclaimed_streams.retain(|stream| !stream.is_cut());
            if let Some(at) = self.unclaimed_streams.iter().position(|stream| stream.address == address(pod)) {
                return self.unclaimed_streams.swap_remove(at);
            }
            self.unclaimed_streams.push(self.streams.recv().await.unwrap());
        }
    }

    fn rollout(&self) -> RolloutState {
        self.monitor.states().rollout(&app())
    }

    /// Returns the finding on the Provider `shop/github`.
    fn finding(&self) -> Option<Reason> {
        self.monitor.finding("shop", "github")
    }

    /// Returns the events that the monitor has sent since the last call.
    fn drain_events(&mut self) -> Vec<MonitorEvent> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }
}

impl Drop for MockPods {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Responds like a server, with a stream of the lines that the test sends.
async fn respond(address: SocketAddr, socket: tokio::io::DuplexStream, streams: mpsc::UnboundedSender<MockStream>) {
    let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
        assert_eq!(request.uri().path(), "/revisions");
        let (lines, mut sent) = mpsc::unbounded_channel();
        let _ = streams.send(MockStream { address, lines });
        let sent = stream::poll_fn(move |cx| sent.poll_recv(cx)).map(|line| Ok::<_, Infallible>(Frame::data(line)));
        async move { Ok::<_, Infallible>(http::Response::new(StreamBody::new(sent))) }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
}

// === impl MockStream ===

impl MockStream {
    fn send_line(&self, line: &Value) {
        self.send_part(format!("{line}\n"));
    }

    fn send_part(&self, part: impl Into<Bytes>) {
        let _ = self.lines.send(part.into());
    }

    fn send_hello(&self, pod: u8, serves: Revision) {
        self.send_hello_of(pod, FORMAT, &json!({ app().as_str(): serves }));
    }

    fn send_hello_of(&self, pod: u8, format: u32, revisions: &Value) {
        self.send_line(&json!({ "hello": { "podUID": pod.to_string(), "format": format, "revisions": revisions } }));
    }

    fn send_change(&self, serves: Revision) {
        self.send_line(&json!({ "app": app(), "revision": serves }));
    }

    fn send_rejection(&self, served: Revision, rejected: Revision) {
        let rejected = json!({ "revision": rejected, "reason": "it is too new" });
        self.send_line(&json!({ "app": app(), "revision": served, "refused": rejected }));
    }

    fn send_finding(&self, reason: &str) {
        self.send_line(&json!({ "provider": { "namespace": "shop", "name": "github", "reason": reason } }));
    }

    fn send_heartbeat(&self) {
        self.send_line(&json!({ "heartbeat": 1 }));
    }

    fn is_cut(&self) -> bool {
        self.lines.is_closed()
    }
}

/// Lets all tasks run until each of them waits for something.
async fn settle_tasks() {
    sleep(Duration::from_millis(1)).await;
}

/// Lets this many seconds pass, in which only these streams send heartbeats.
async fn advance_seconds(seconds: u64, sending: &[&MockStream]) {
    for _ in 0..seconds {
        sending.iter().for_each(|stream| stream.send_heartbeat());
        sleep(Duration::from_secs(1)).await;
    }
    settle_tasks().await;
}

#[tokio::test(start_paused = true)]
async fn every_serving_pod_must_report_the_revision() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    assert_eq!(mock.monitor.expect_revision(&app(), &revision(2)), behind(&[1, 2]));
    streams[0].send_change(revision(2));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (behind(&[2]), app_events()));
    streams[1].send_change(revision(2));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), app_events()));
    streams[1].send_line(&json!({ "app": app(), "revision": null }));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (behind(&[2]), app_events()));
}

#[tokio::test(start_paused = true)]
async fn each_pod_can_serve_any_of_several_revisions() {
    let (mock, streams) = MockPods::serving(&[1, 2]).await;
    let any_of = |revisions: &[u8]| {
        let revisions: Vec<_> = revisions.iter().map(|of| revision(*of)).collect();
        mock.monitor.rollout_of_any(&app(), &revisions)
    };
    streams[0].send_change(revision(2));
    settle_tasks().await;
    assert_eq!(any_of(&[1, 2]), complete(2));
    assert_eq!([1, 2, 3].map(|of| mock.monitor.is_reported(&app(), &revision(of))), [true, true, false]);
    assert_eq!(any_of(&[2]), behind(&[2]));
    assert_eq!(any_of(&[]), behind(&[1, 2]));
    // The second pod serves revision 1, and rejects revision 2.
    streams[1].send_rejection(revision(1), revision(2));
    settle_tasks().await;
    assert_eq!(any_of(&[1, 2]), complete(2));
    let rejected = RolloutState::Rejected { pod: "server-2".to_owned(), reason: "it is too new".to_owned() };
    assert_eq!(any_of(&[2]), rejected);
    assert_eq!(any_of(&[2, 3]), rejected);
}

#[tokio::test(start_paused = true)]
async fn the_start_and_the_end_of_a_silence_are_each_notified_once() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    advance_seconds(14, &[&streams[1]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), vec![]));
    advance_seconds(3, &[&streams[1]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (silent(&[1]), app_events()));
    assert_eq!(mock.monitor.pod_counts(), (2, 1));
    advance_seconds(30, &[&streams[1]]).await;
    assert_eq!(mock.drain_events(), []);
    // The stream of the silent pod was cut. After a reconnect the pod reports all its revisions.
    mock.next_stream(1).await.send_hello(1, revision(1));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), app_events()));
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_silence_is_notified_if_the_silent_state_was_read() {
    // The state is read shortly before or shortly after the pod becomes silent. The end of the silence triggers a
    // reconcile only if the state that was read was `Silent`.
    for after in 14_500..16_500 {
        if after % 50 != 0 {
            continue;
        }
        let (mut mock, streams) = MockPods::serving(&[1]).await;
        sleep(Duration::from_millis(after)).await;
        let state = mock.monitor.expect_revision(&app(), &revision(1));
        mock.drain_events();
        if streams[0].is_cut() {
            mock.next_stream(1).await.send_hello(1, revision(1));
        } else {
            streams[0].send_heartbeat();
        }
        settle_tasks().await;
        let expected = if state == silent(&[1]) { app_events() } else { vec![] };
        assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), expected), "after {after} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reconnected_stream_changes_nothing() {
    let (mut mock, mut streams) = MockPods::serving(&[1, 2]).await;
    for _ in 0..5 {
        let stream_2 = streams.pop().unwrap();
        streams.clear();
        let stream_1 = mock.next_stream(1).await;
        assert_eq!(mock.rollout(), complete(2));
        stream_1.send_hello(1, revision(1));
        advance_seconds(5, &[&stream_2, &stream_1]).await;
        assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), vec![]));
        streams = vec![stream_1, stream_2];
    }
}

#[tokio::test(start_paused = true)]
async fn a_silently_dropped_connection_changes_nothing() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    advance_seconds(7, &[&streams[1]]).await;
    assert!(streams[0].is_cut(), "the stream is opened again before the pod is silent");
    let reopened = mock.next_stream(1).await;
    advance_seconds(4, &[&streams[1]]).await;
    reopened.send_hello(1, revision(1));
    advance_seconds(14, &[&streams[1], &reopened]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_new_pod_without_a_report_leaves_the_rollout_undecided() {
    let (mut mock, streams) = MockPods::serving(&[1]).await;
    mock.set_pods(&[1, 2], &[]);
    let new = mock.next_stream(2).await;
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (undecided(&[2]), vec![]));
    new.send_hello(2, revision(1));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), vec![]), "it serves what the others serve");
    mock.set_pods(&[1, 2, 3], &[]);
    let behind_others = mock.next_stream(3).await;
    behind_others.send_hello(3, revision(9));
    advance_seconds(1, &streams.iter().collect::<Vec<_>>()).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (behind(&[3]), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_never_reports_becomes_silent() {
    let (mut mock, streams) = MockPods::serving(&[1]).await;
    mock.unreachable.lock().insert(address(2));
    mock.set_pods(&[1, 2], &[]);
    advance_seconds(17, &[&streams[0]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (silent(&[2]), app_events()));
    // The new pod becomes reachable.
    mock.unreachable.lock().clear();
    let stream = mock.next_stream(2).await;
    stream.send_hello(2, revision(1));
    advance_seconds(1, &[&streams[0]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), app_events()));
}

#[tokio::test(start_paused = true)]
async fn an_invalid_stream_is_cut_and_opened_again() {
    let mut mock = MockPods::new();
    mock.set_pods(&[1], &[]);
    mock.monitor.expect_revision(&app(), &revision(1));
    let nonsense: [&dyn Fn(&MockStream); 5] = [
        // Another pod has the IP address now.
        &|stream| stream.send_hello(7, revision(1)),
        &|stream| stream.send_part("{\"hello\": \n"),
        &|stream| stream.send_part("\n"),
        &|stream| stream.send_change(revision(1)),
        &|stream| stream.send_heartbeat(),
    ];
    for nonsense in nonsense {
        let stream = mock.next_stream(1).await;
        nonsense(&stream);
        stream.send_hello(1, revision(1));
        settle_tasks().await;
        assert!(stream.is_cut());
        assert_eq!(mock.rollout(), undecided(&[1]));
        assert!(!mock.monitor.is_settled());
    }
    mock.next_stream(1).await.send_hello(1, revision(1));
    settle_tasks().await;
    assert_eq!(mock.rollout(), complete(1));
    assert!(mock.monitor.is_settled());
}

#[tokio::test(start_paused = true)]
async fn a_line_has_a_maximum_length() {
    let mut mock = MockPods::new();
    mock.set_pods(&[1], &[]);
    let stream = mock.next_stream(1).await;
    let mib = Bytes::from(vec![b' '; 1024 * 1024]);
    for _ in 0..65 {
        stream.send_part(mib.clone());
    }
    mock.next_stream(1).await.send_hello(1, revision(1));
    settle_tasks().await;
    assert!(stream.is_cut() && mock.monitor.is_settled());
}

#[tokio::test(start_paused = true)]
async fn a_long_line_is_a_sign_of_life_only_while_its_parts_arrive() {
    let (mut mock, streams) = MockPods::serving(&[1]).await;
    streams[0].send_part("{\"hello\":");
    for _ in 0..10 {
        sleep(Duration::from_secs(5)).await;
        streams[0].send_part(" ");
        assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), vec![]));
    }
    streams[0]
        .send_part(format!("{}}}\n", json!({ "podUID": "1", "format": FORMAT, "revisions": { "shop": revision(1) } })));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), vec![]));

    streams[0].send_part("{\"hello\":");
    advance_seconds(17, &[]).await;
    assert!(streams[0].is_cut());
    assert_eq!((mock.rollout(), mock.drain_events()), (silent(&[1]), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_completes_no_line_becomes_silent() {
    let (mut mock, mut streams) = MockPods::serving(&[1]).await;
    let mut stream = streams.remove(0);
    // The pod sends only unfinished lines, each on a new stream.
    for _ in 0..9 {
        stream.send_part("{\"hello\":");
        sleep(Duration::from_secs(10)).await;
        if stream.is_cut() {
            stream = mock.next_stream(1).await;
        }
    }
    assert_eq!((mock.rollout(), mock.drain_events()), (silent(&[1]), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_removed_or_terminating_pod_is_not_waited_for() {
    let (mut mock, streams) = MockPods::serving(&[1, 2, 3]).await;
    streams[1].send_change(revision(9));
    advance_seconds(17, &[&streams[0], &streams[1]]).await;
    assert_eq!((mock.rollout(), mock.drain_events().len()), (silent(&[3]), 2));
    // The third pod, which is silent, is removed.
    mock.set_pods(&[1, 2], &[]);
    assert_eq!((mock.rollout(), mock.drain_events()), (behind(&[2]), app_events()));
    settle_tasks().await;
    assert!(streams[2].is_cut() && mock.monitor.pod_counts() == (2, 0));
    // The second pod, which is behind, terminates, so its endpoint is no longer serving.
    mock.set_pods(&[1], &[2]);
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), app_events()));
    assert_eq!(mock.monitor.pod_counts(), (1, 0));
    // The second pod is serving again, and its last report counts again.
    mock.set_pods(&[1, 2], &[]);
    assert_eq!((mock.rollout(), mock.drain_events()), (behind(&[2]), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_serves_again_has_time_to_report() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    mock.set_pods(&[1], &[2]);
    advance_seconds(60, &[&streams[0]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), vec![]), "a pod that is not serving is not silent");
    mock.set_pods(&[1, 2], &[]);
    advance_seconds(14, &[&streams[0]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(2), vec![]));
    advance_seconds(3, &[&streams[0]]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (silent(&[2]), app_events()));
    mock.set_pods(&[1], &[2]);
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_at_another_address_reports_again_and_its_old_stream_is_ignored() {
    let (mut mock, streams) = MockPods::serving(&[1]).await;
    let moved = PodEndpoint { name: "server-1".into(), address: address(2), is_serving: true };
    mock.monitor.update_endpoints(HashMap::from([("1".into(), moved)]), &mock.stop);
    assert_eq!(mock.rollout(), undecided(&[1]));
    streams[0].send_hello(1, revision(1));
    settle_tasks().await;
    assert_eq!(mock.rollout(), undecided(&[1]));
    mock.next_stream(2).await.send_hello(1, revision(1));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), vec![]));
}

#[tokio::test(start_paused = true)]
async fn the_state_is_no_servers_after_15_s_without_a_serving_pod_until_one_appears() {
    let (mut mock, _streams) = MockPods::serving(&[1]).await;
    mock.set_pods(&[], &[1]);
    advance_seconds(14, &[]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (undecided(&[]), vec![]));
    advance_seconds(3, &[]).await;
    assert_eq!((mock.rollout(), mock.drain_events()), (RolloutState::NoServers, app_events()));
    advance_seconds(30, &[]).await;
    assert_eq!(mock.drain_events(), []);
    mock.set_pods(&[2], &[]);
    assert_eq!((mock.rollout(), mock.drain_events()), (undecided(&[2]), vec![]));
    mock.next_stream(2).await.send_hello(2, revision(1));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (complete(1), app_events()));
}

#[tokio::test(start_paused = true)]
async fn a_rejection_of_an_unpublished_revision_is_ignored() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    let rejected = RolloutState::Rejected { pod: "server-1".into(), reason: "it is too new".into() };
    assert_eq!(mock.monitor.expect_revision(&app(), &revision(2)), behind(&[1, 2]));
    streams[0].send_rejection(revision(1), revision(2));
    settle_tasks().await;
    assert_eq!((mock.rollout(), mock.drain_events()), (rejected.clone(), app_events()));
    // The App is repaired: the rejection of the earlier revision does not count against the new revision.
    assert_eq!(mock.monitor.expect_revision(&app(), &revision(3)), behind(&[1, 2]));
    streams[0].send_change(revision(3));
    streams[1].send_change(revision(3));
    settle_tasks().await;
    assert_eq!(mock.rollout(), complete(2));
    // A pod has rejected revision 4, which is not published, and serves the published revision 3.
    streams[0].send_rejection(revision(3), revision(4));
    settle_tasks().await;
    assert_eq!(mock.rollout(), complete(2));
    // A pod can also reject the revision that it reports, for example because the users belong to another App.
    streams[0].send_rejection(revision(3), revision(3));
    settle_tasks().await;
    assert_eq!(mock.rollout(), rejected);
    // The rejection also counts if the pod reported it before the operator knew the published revision.
    mock.monitor.forget(&app());
    assert_eq!(mock.monitor.expect_revision(&app(), &revision(3)), rejected);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_task_is_notified_as_soon_as_the_rollout_is_decided() {
    let (mock, streams) = MockPods::serving(&[1]).await;
    let (app_id, limit) = (app(), Duration::from_secs(1));
    let began = Instant::now();
    assert_eq!(mock.monitor.wait_for_rollout(&app(), limit).await, complete(1));
    mock.monitor.expect_revision(&app(), &revision(2));
    let (state, ()) =
        tokio::join!(mock.monitor.wait_for_rollout(&app_id, limit), async { streams[0].send_change(revision(2)) });
    assert_eq!((state, began.elapsed()), (complete(1), Duration::ZERO));
    mock.monitor.expect_revision(&app(), &revision(3));
    let (state, ()) = tokio::join!(mock.monitor.wait_for_rollout(&app_id, limit), async {
        streams[0].send_rejection(revision(2), revision(3));
    });
    assert!(matches!(state, RolloutState::Rejected { .. }) && began.elapsed() == Duration::ZERO);
    mock.monitor.expect_revision(&app(), &revision(4));
    assert_eq!(mock.monitor.wait_for_rollout(&app(), limit).await, behind(&[1]));
    assert_eq!(began.elapsed(), limit, "no report within the limit is not a decision");
    mock.set_pods(&[], &[]);
    assert_eq!(mock.monitor.wait_for_rollout(&app(), limit).await, undecided(&[]));
    mock.monitor.forget(&app());
    assert_eq!(mock.monitor.wait_for_rollout(&app(), limit).await, undecided(&[]), "nothing is expected");
    assert_eq!(began.elapsed(), limit, "no pod could report");
}

#[tokio::test(start_paused = true)]
async fn the_worst_report_determines_the_rollout_state() {
    let (mut mock, streams) = MockPods::serving(&[1, 2, 3, 4]).await;
    mock.set_pods(&[1, 2, 3, 4, 5], &[]);
    settle_tasks().await;
    assert_eq!(mock.rollout(), undecided(&[5]));
    streams[1].send_change(revision(9));
    settle_tasks().await;
    assert_eq!(mock.rollout(), behind(&[2]));
    let fifth = mock.next_stream(5).await;
    fifth.send_hello(5, revision(1));
    advance_seconds(17, &[&streams[0], &streams[1], &streams[3], &fifth]).await;
    assert_eq!(mock.rollout(), silent(&[3]));
    streams[3].send_rejection(revision(1), revision(1));
    settle_tasks().await;
    let rejected = RolloutState::Rejected { pod: "server-4".into(), reason: "it is too new".into() };
    assert_eq!(mock.rollout(), rejected);
}

#[tokio::test(start_paused = true)]
async fn at_most_three_pods_are_named() {
    let (mock, _streams) = MockPods::serving(&[1, 2, 3, 4, 5]).await;
    let RolloutState::Behind { pods } = mock.monitor.expect_revision(&app(), &revision(2)) else { panic!() };
    assert_eq!(pods, ["server-1", "server-2", "server-3", "2 more"]);
}

#[tokio::test(start_paused = true)]
async fn the_lowest_format_of_all_pods_is_used_and_its_change_reconciles_every_app() {
    let mut mock = MockPods::new();
    mock.set_pods(&[1, 2], &[]);
    assert_eq!(mock.monitor.format(), FORMAT, "without a report, the format that this operator writes");
    let (stream_1, stream_2) = (mock.next_stream(1).await, mock.next_stream(2).await);
    stream_1.send_hello_of(1, 99, &json!({}));
    settle_tasks().await;
    assert_eq!((mock.monitor.format(), mock.drain_events()), (FORMAT, vec![]), "a newer server supports ours");
    stream_2.send_hello_of(2, 1, &json!({}));
    settle_tasks().await;
    assert_eq!((mock.monitor.format(), mock.drain_events()), (1, vec![MonitorEvent::AllApps]));
    assert_eq!(mock.monitor.pods_limited_to_format(1), names(&[2]));
    mock.set_pods(&[1], &[2]);
    assert_eq!(
        (mock.monitor.format(), mock.drain_events()),
        (FORMAT, vec![MonitorEvent::AllApps]),
        "the old one is draining"
    );
    mock.set_pods(&[], &[]);
    assert_eq!(mock.drain_events(), []);
}

#[tokio::test(start_paused = true)]
async fn the_worst_reported_state_of_a_webhook_is_used_and_its_change_triggers_a_reconcile() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    let states = |states: &[(&str, WebhookState)]| -> WebhookStates {
        states.iter().map(|(name, state)| (name.parse().unwrap(), *state)).collect()
    };
    let line = |webhooks: Value| json!({ "app": app(), "revision": revision(1), "webhooks": webhooks });
    assert_eq!(mock.monitor.webhook_states(&app()), states(&[]));
    streams[0].send_line(&line(json!({ "crm": "Delivering", "sync": "ConsumerBehind", "later": "SomethingNew" })));
    settle_tasks().await;
    let reported = [("crm", WebhookState::Delivering), ("sync", WebhookState::ConsumerBehind)];
    assert_eq!(mock.monitor.webhook_states(&app()), states(&reported), "an unknown state is dropped");
    assert_eq!(mock.drain_events(), app_events());
    streams[1].send_line(&line(json!({ "crm": "ReceiverGone" })));
    settle_tasks().await;
    let reported = [("crm", WebhookState::ReceiverGone), ("sync", WebhookState::ConsumerBehind)];
    assert_eq!(mock.monitor.webhook_states(&app()), states(&reported));
    assert_eq!(mock.drain_events(), app_events());
    streams[0].send_line(&line(json!({ "crm": "ReceiverFails", "sync": "ConsumerBehind" })));
    settle_tasks().await;
    assert_eq!(mock.drain_events(), [], "the other pod reports a worse state");

    // When a pod stops serving, its report does not count any more.
    mock.set_pods(&[1], &[2]);
    let reported = [("crm", WebhookState::ReceiverFails), ("sync", WebhookState::ConsumerBehind)];
    assert_eq!(mock.monitor.webhook_states(&app()), states(&reported));
    assert_eq!(mock.drain_events(), app_events());
    // A new container has no state of a webhook to report yet. The status keeps the previous condition, so nothing is
    // reconciled.
    streams[0].send_hello_of(1, FORMAT, &json!({ "shop": revision(1) }));
    settle_tasks().await;
    assert_eq!((mock.monitor.webhook_states(&app()), mock.drain_events()), (states(&[]), vec![]));
    let hello = json!({
        "podUID": "1", "format": FORMAT, "revisions": { "shop": revision(1) }, "webhooks": { "shop": { "crm": "Delivering" } },
    });
    streams[0].send_line(&json!({ "hello": hello }));
    settle_tasks().await;
    assert_eq!(mock.monitor.webhook_states(&app()), states(&[("crm", WebhookState::Delivering)]));
    assert_eq!(mock.drain_events(), app_events());
}

#[tokio::test(start_paused = true)]
async fn the_furthest_reported_progress_of_a_deletion_is_used() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    let progress = |left: u64, done| json!({ "usersLeft": left, "done": done });
    let line = |left, done| json!({ "app": app(), "revision": revision(1), "deletion": progress(left, done) });
    assert_eq!(mock.monitor.deletion(&app()), None);
    streams[0].send_line(&line(7, false));
    streams[1].send_line(&line(5, false));
    settle_tasks().await;
    assert_eq!(mock.monitor.deletion(&app()), Some(DeletionProgress { users_left: 5, done: false }));
    assert_eq!(mock.drain_events(), [app_events(), app_events()].concat());
    streams[0].send_line(&line(9, true));
    streams[1].send_line(&line(5, false));
    settle_tasks().await;
    assert!(mock.monitor.deletion(&app()).unwrap().done);
    assert_eq!(mock.drain_events(), app_events(), "a repeated report is no change");
}

#[tokio::test(start_paused = true)]
async fn a_leader_starts_when_all_pods_have_reported_or_after_15_s() {
    let mut mock = MockPods::new();
    assert!(!mock.monitor.is_settled(), "nothing was read");
    mock.set_pods(&[1, 2], &[3]);
    mock.next_stream(1).await.send_hello(1, revision(1));
    let stream_2 = mock.next_stream(2).await;
    settle_tasks().await;
    assert!(!mock.monitor.is_settled());
    let began = Instant::now();
    let (monitor, waited) = (mock.monitor.clone(), Instant::now());
    let waiting = tokio::spawn(async move {
        monitor.wait_settled().await;
        waited.elapsed()
    });
    settle_tasks().await;
    stream_2.send_hello(2, revision(1));
    assert!(waiting.await.unwrap() < Duration::from_secs(1));

    let mut hanging = MockPods::new();
    hanging.set_pods(&[1], &[]);
    let _silent_stream = hanging.next_stream(1).await;
    hanging.monitor.wait_settled().await;
    assert!((15..17).contains(&began.elapsed().as_secs()));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_reports_too_many_apps_is_disconnected() {
    let mut mock = MockPods::new();
    mock.set_pods(&[1], &[]);
    let stream = mock.next_stream(1).await;
    let many: serde_json::Map<_, _> = (0..=200_000).map(|app| (format!("a{app}"), json!(""))).collect();
    stream.send_hello_of(1, 1, &many.into());
    settle_tasks().await;
    assert!(stream.is_cut() && !mock.monitor.is_settled());
}

#[test]
fn the_time_to_check_all_apps_is_linear_in_their_number() {
    let duration_of_check = |apps: usize| {
        let (events, _receiver) = mpsc::unbounded_channel();
        let mut states = PodStates::new(events, watch::Sender::new(()));
        let stop = CancellationToken::new();
        let serving: HashMap<AppId, Revision> =
            (0..apps).map(|app| (format!("app-{app}").parse().unwrap(), revision(1))).collect();
        for PodStream { uid, stop, .. } in states.update_endpoints(pods(&[1, 2, 3, 4, 5, 6], &[]), &stop) {
            let hello = json!({ "podUID": uid, "format": 1, "revisions": serving });
            assert!(states.record_hello(&uid, &stop, serde_json::from_value(hello).unwrap()).is_ok());
        }
        serving.iter().for_each(|(app, revision)| assert_eq!(states.expect_revision(app, revision), complete(6)));
        let durations = (0..10).map(|_| {
            let began = std::time::Instant::now();
            drop(states.update_endpoints(pods(&[1, 2, 3, 4, 5, 6], &[]), &stop));
            began.elapsed()
        });
        durations.min().unwrap()
    };
    let (few, many) = (duration_of_check(1_000), duration_of_check(10_000));
    assert!(many < few * 60, "1,000 Apps: {few:?}, 10,000: {many:?}");
}

#[tokio::test(start_paused = true)]
async fn a_provider_is_reconciled_when_the_worst_finding_changes() {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    assert_eq!(mock.finding(), None);
    for (pod, reason, worst, events) in [
        (0, "Reachable", Reason::Reachable, provider_events()),
        (1, "Reachable", Reason::Reachable, vec![]),
        (1, "ClientRefused", Reason::ClientRefused, provider_events()),
        (0, "ClientRefused", Reason::ClientRefused, vec![]),
        (0, "Reachable", Reason::ClientRefused, vec![]),
        (1, "OfALaterVersion", Reason::ClientRefused, vec![]),
        (1, "TokenEndpointFailed", Reason::TokenEndpointFailed, provider_events()),
        (1, "Reachable", Reason::Reachable, provider_events()),
    ] {
        streams[pod].send_finding(reason);
        settle_tasks().await;
        assert_eq!((mock.finding(), mock.drain_events()), (Some(worst), events), "{pod}: {reason}");
    }
    assert_eq!(mock.monitor.finding("blog", "github"), None);
}

#[tokio::test(start_paused = true)]
async fn pods_that_start_or_stop_serving_change_the_finding() {
    let (mut mock, streams) = MockPods::serving(&[1, 2, 3]).await;
    streams[0].send_finding("Reachable");
    settle_tasks().await;
    assert_eq!(mock.drain_events(), provider_events());
    // The finding of a pod that is not serving yet does not count.
    mock.set_pods(&[1, 3], &[2]);
    streams[1].send_finding("DiscoveryFailed");
    settle_tasks().await;
    assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), vec![]));
    mock.set_pods(&[1, 2, 3], &[]);
    assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::DiscoveryFailed), provider_events()));
    // If a pod without a report stops serving, the finding does not change.
    mock.set_pods(&[1, 2], &[3]);
    assert_eq!(mock.drain_events(), []);
    // The pod that reported `DiscoveryFailed` is removed.
    mock.set_pods(&[1], &[3]);
    assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), provider_events()));
    // If no serving pod reports a finding any more, no reconcile is triggered, so the status does not change.
    mock.set_pods(&[], &[1]);
    assert_eq!((mock.finding(), mock.drain_events()), (None, vec![]));
}

/// Starts two serving pods: the first reports `Reachable`, the second reports `ClientRefused`. Drains the
/// notifications.
async fn one_pod_reports_client_refused() -> (MockPods, Vec<MockStream>) {
    let (mut mock, streams) = MockPods::serving(&[1, 2]).await;
    streams[0].send_finding("Reachable");
    streams[1].send_finding("ClientRefused");
    settle_tasks().await;
    assert_eq!((mock.finding(), mock.drain_events().len()), (Some(Reason::ClientRefused), 2));
    (mock, streams)
}

/// Calls [`one_pod_reports_client_refused`], then lets the second pod open a new stream and send only its hello.
/// Returns the streams of both pods.
async fn one_pod_says_hello_again() -> (MockPods, MockStream, MockStream) {
    let (mut mock, mut streams) = one_pod_reports_client_refused().await;
    drop(streams.pop());
    let new_stream = mock.next_stream(2).await;
    new_stream.send_hello(2, revision(1));
    settle_tasks().await;
    assert_eq!(mock.drain_events(), []);
    (mock, streams.remove(0), new_stream)
}

#[tokio::test(start_paused = true)]
async fn a_container_that_reports_again_on_another_stream_changes_nothing() {
    let (mut mock, _first, stream) = one_pod_says_hello_again().await;
    stream.send_finding("ClientRefused");
    stream.send_heartbeat();
    settle_tasks().await;
    assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::ClientRefused), vec![]));
}

#[tokio::test(start_paused = true)]
async fn findings_of_a_container_end_when_the_next_container_has_reported() {
    for sends_a_change in [false, true] {
        let (mut mock, _first, next) = one_pod_says_hello_again().await;
        // A new container that has checked no provider yet sends no finding after its hello, but another line.
        if sends_a_change {
            next.send_change(revision(1))
        } else {
            next.send_heartbeat()
        }
        settle_tasks().await;
        assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), provider_events()));
        next.send_finding("ClientRefused");
        settle_tasks().await;
        assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::ClientRefused), provider_events()));
    }
}

#[tokio::test(start_paused = true)]
async fn findings_of_a_container_do_not_come_back_with_the_next_container() {
    // The stream of the container ends before or after the pod stops serving.
    for is_cut_first in [false, true] {
        let (mut mock, mut streams) = one_pod_reports_client_refused().await;
        let stream = streams.pop().unwrap();
        if is_cut_first {
            drop(stream);
            settle_tasks().await;
            assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::ClientRefused), vec![]));
            mock.set_pods(&[1], &[2]);
        } else {
            mock.set_pods(&[1], &[2]);
            drop(stream);
            settle_tasks().await;
        }
        assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), provider_events()));
        // The next container serves before the operator has connected to it.
        mock.set_pods(&[1, 2], &[]);
        let next = mock.next_stream(2).await;
        next.send_hello(2, revision(1));
        next.send_heartbeat();
        settle_tasks().await;
        assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), vec![]));
    }
}

#[tokio::test(start_paused = true)]
async fn findings_of_a_container_end_when_its_pod_stops_serving_before_the_next_container_has_reported() {
    for is_removed in [false, true] {
        let (mut mock, _first, next) = one_pod_says_hello_again().await;
        mock.set_pods(&[1], if is_removed { &[] } else { &[2] });
        drop(next);
        settle_tasks().await;
        assert_eq!((mock.finding(), mock.drain_events()), (Some(Reason::Reachable), provider_events()));
    }
}

#[tokio::test]
async fn stored_findings_are_bounded_however_often_a_server_says_hello() {
    const MAX_FINDINGS: usize = 200_000;
    let (events, _receiver) = mpsc::unbounded_channel();
    let mut states = PodStates::new(events, watch::Sender::new(()));
    let streams = states.update_endpoints(pods(&[1], &[]), &CancellationToken::new());
    let PodStream { uid, stop, .. } = &streams[0];
    for round in 0..3 {
        let hello = json!({ "podUID": uid, "format": 1, "revisions": {} });
        assert!(states.record_hello(uid, stop, serde_json::from_value(hello).unwrap()).is_ok());
        for number in 0..=MAX_FINDINGS {
            let name = format!("{round}-{number}");
            states.record_finding(
                uid,
                stop,
                ProviderReport { namespace: "shop".into(), name, reason: "Reachable".into() },
            );
        }
        assert_eq!(states.stored_findings(uid), (MAX_FINDINGS, if round == 0 { 0 } else { MAX_FINDINGS }));
    }
    states.record_heartbeat(uid, stop);
    assert_eq!(states.stored_findings(uid), (MAX_FINDINGS, 0));
}
