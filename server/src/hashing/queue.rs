//! The queue in front of the hashing threads: bounded, and fair to namespaces, inside one to its Apps, and inside an App
//! to client addresses.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    time::Duration,
};

/// Who a job is for: the App with its namespace, and the client address that asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JobOwner<N, A, C> {
    pub(super) namespace: N,
    pub(super) app: A,
    pub(super) client: C,
}

/// Lines that take turns by the time that they used (start-time fair queueing, Goyal, Vin and Cheng, 1996).
struct Rotation<K, V> {
    /// When the line was due that had the last turn. Like `due` no time of a clock: it advances with what lines use.
    now: Duration,
    turns: u64,
    /// The lines that have jobs, by when they are due, then by who came first.
    order: BTreeMap<(Duration, u64), K>,
    lines: HashMap<K, Line<V>>,
}

struct Line<V> {
    /// Where the time that its jobs took ends. A line that was idle starts at `now` nevertheless: it saved no credit.
    used: Duration,
    /// Its place in the order; none if no job waits.
    place: Option<(Duration, u64)>,
    waiting: usize,
    inner: V,
}

/// A queue of `T` of namespaces `N`, Apps `A` and client addresses `C`.
pub(super) struct FairQueue<N, A, C, T> {
    capacity: usize,
    length: usize,
    namespaces: Rotation<N, Rotation<A, Rotation<C, Vec<T>>>>,
    /// How many jobs of a client address wait, for all Apps.
    clients: HashMap<C, usize>,
    /// Lines of clients, with those that have no job but used time.
    client_lines: usize,
}

/// What became of a push.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Push<T> {
    Queued,
    /// Queued, and the newest of the longest line had to go.
    Displaced(T),
    /// There is no place: the newcomer's own line is the longest, or its client has its two places.
    Refused(T),
}

/// A job whose turn it is. Its time is charged in advance, so that other threads take jobs of other lines meanwhile.
#[derive(Debug)]
pub(super) struct Turn<N, A, C, T> {
    pub(super) job: T,
    pub(super) charge: Charge<N, A, C>,
}

/// What a turn is expected to take, to be corrected by [`FairQueue::settle`].
#[derive(Debug)]
pub(super) struct Charge<N, A, C> {
    owner: JobOwner<N, A, C>,
    expected: Duration,
}

/// Once the queue is half full, a client address has at most so many places, over all Apps.
const PLACES_WHEN_CROWDED: usize = 2;
/// For each place so many lines of clients are kept, with those that only have used time. A line takes about 150 bytes.
const LINES_PER_PLACE: usize = 4;

// === impl Rotation ===

impl<K: Clone + Eq + Hash, V> Rotation<K, V> {
    fn new() -> Self {
        Self { now: Duration::ZERO, turns: 0, order: BTreeMap::new(), lines: HashMap::new() }
    }

    fn waiting(&self, key: &K) -> usize {
        self.lines.get(key).map_or(0, |line| line.waiting)
    }

    /// The longest line; of equal ones any.
    fn longest(&self) -> Option<(&K, &Line<V>)> {
        self.lines.iter().filter(|(_, line)| line.waiting > 0).max_by_key(|(_, line)| line.waiting)
    }

    /// Counts one more job of the line, which is due that much later than its used time says.
    fn enter(&mut self, key: &K, delay: Duration, new: impl FnOnce() -> V) -> &mut V {
        let line = self.lines.entry(key.clone()).or_insert_with(|| Line {
            used: Duration::ZERO,
            place: None,
            waiting: 0,
            inner: new(),
        });
        line.waiting += 1;
        let due = line.used.max(self.now) + delay;
        if line.place.is_none_or(|(other, _)| due < other) {
            line.stand(due, &mut self.turns, &mut self.order, key);
        }
        &mut line.inner
    }

    /// Takes from the line that is due first, and charges it.
    fn turn<T>(&mut self, expected: Duration, take: impl FnOnce(&mut V) -> Option<T>) -> Option<(K, T)> {
        let ((due, _), key) = self.order.pop_first()?;
        let line = self.lines.get_mut(&key)?;
        line.place = None;
        self.now = self.now.max(due);
        line.used = due + expected;
        let taken = take(&mut line.inner)?;
        line.waiting -= 1;
        if line.waiting > 0 {
            line.stand(line.used, &mut self.turns, &mut self.order, &key);
        }
        Some((key, taken))
    }

    /// Takes from a line out of turn; nothing is charged.
    fn withdraw<T>(&mut self, key: &K, take: impl FnOnce(&mut V) -> Option<T>) -> Option<T> {
        let line = self.lines.get_mut(key)?;
        let taken = take(&mut line.inner)?;
        line.waiting -= 1;
        if line.waiting == 0
            && let Some(place) = line.place.take()
        {
            self.order.remove(&place);
        }
        Some(taken)
    }

    /// Charges a line what its turn took in place of what was expected.
    fn settle(&mut self, key: &K, expected: Duration, took: Duration) -> Option<&mut V> {
        let line = self.lines.get_mut(key)?;
        let settled = |charged: Duration| charged.saturating_sub(expected) + took;
        line.used = settled(line.used);
        if let Some((due, _)) = line.place {
            line.stand(settled(due), &mut self.turns, &mut self.order, key);
        }
        Some(&mut line.inner)
    }
}

impl<V> Line<V> {
    /// Takes a place in the order, behind those that are due at the same time.
    fn stand<K: Clone>(&mut self, due: Duration, turns: &mut u64, order: &mut BTreeMap<(Duration, u64), K>, key: &K) {
        if let Some(place) = self.place.take() {
            order.remove(&place);
        }
        *turns += 1;
        self.place = Some((due, *turns));
        order.insert((due, *turns), key.clone());
    }
}

// === impl FairQueue ===

impl<N: Clone + Eq + Hash, A: Clone + Eq + Hash, C: Clone + Eq + Hash, T> FairQueue<N, A, C, T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, length: 0, namespaces: Rotation::new(), clients: HashMap::new(), client_lines: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Whether a push would be queued now.
    pub(super) fn has_place(&self, owner: &JobOwner<N, A, C>) -> bool {
        !self.is_crowded_by(&owner.client) && (self.length < self.capacity || self.victim(owner).is_some())
    }

    /// `expected`: what a job takes, on average.
    pub(super) fn push(&mut self, owner: &JobOwner<N, A, C>, expected: Duration, job: T) -> Push<T> {
        if self.is_crowded_by(&owner.client) {
            return Push::Refused(job);
        }
        if self.length < self.capacity {
            self.append(owner, expected, job);
            return Push::Queued;
        }
        match self.victim(owner).and_then(|victim| self.withdraw(&victim)) {
            Some(displaced) => {
                self.append(owner, expected, job);
                Push::Displaced(displaced)
            }
            None => Push::Refused(job),
        }
    }

    pub(super) fn pop(&mut self, expected: Duration) -> Option<Turn<N, A, C, T>> {
        let (namespace, (app, (client, job))) = self.namespaces.turn(expected, |apps| {
            apps.turn(expected, |clients| clients.turn(expected, |jobs| (!jobs.is_empty()).then(|| jobs.remove(0))))
        })?;
        self.forget_one(&client);
        let owner = JobOwner { namespace, app, client };
        Some(Turn { job, charge: Charge { owner, expected } })
    }

    /// Corrects what a turn was charged, once it is known what it took.
    pub(super) fn settle(&mut self, charge: &Charge<N, A, C>, took: Duration) {
        let Charge { owner, expected } = charge;
        // A line may be gone that had no more jobs.
        let _ = self
            .namespaces
            .settle(&owner.namespace, *expected, took)
            .and_then(|apps| apps.settle(&owner.app, *expected, took))
            .and_then(|clients| clients.settle(&owner.client, *expected, took));
    }

    fn append(&mut self, owner: &JobOwner<N, A, C>, expected: Duration, job: T) {
        // A client that waits in many Apps has the share of one: what waits already comes first.
        let places = self.clients.entry(owner.client.clone()).or_default();
        let delay = expected * u32::try_from(*places).unwrap_or(u32::MAX);
        *places += 1;
        self.length += 1;
        let apps = self.namespaces.enter(&owner.namespace, delay, Rotation::new);
        let clients = apps.enter(&owner.app, delay, Rotation::new);
        let known = clients.lines.len();
        clients.enter(&owner.client, delay, Vec::new).push(job);
        self.client_lines += clients.lines.len() - known;
        if self.client_lines > self.capacity * LINES_PER_PLACE {
            self.forget_idle_lines();
        }
    }

    fn withdraw(&mut self, owner: &JobOwner<N, A, C>) -> Option<T> {
        let job = self.namespaces.withdraw(&owner.namespace, |apps| {
            apps.withdraw(&owner.app, |clients| clients.withdraw(&owner.client, Vec::pop))
        })?;
        self.forget_one(&owner.client);
        Some(job)
    }

    fn forget_one(&mut self, client: &C) {
        self.length -= 1;
        if let Some(places) = self.clients.get_mut(client) {
            *places -= 1;
            if *places == 0 {
                self.clients.remove(client);
            }
        }
    }

    /// Bounds memory: what they used is forgotten.
    fn forget_idle_lines(&mut self) {
        let mut left = 0;
        self.namespaces.lines.retain(|_, namespace| {
            namespace.inner.lines.retain(|_, app| {
                app.inner.lines.retain(|_, client| client.waiting > 0);
                left += app.inner.lines.len();
                app.waiting > 0
            });
            namespace.waiting > 0
        });
        self.client_lines = left;
    }

    fn is_crowded_by(&self, client: &C) -> bool {
        let places = self.clients.get(client).copied().unwrap_or(0);
        self.length * 2 >= self.capacity && places >= PLACES_WHEN_CROWDED
    }

    /// Whose newest job goes for this newcomer: that of the longest namespace, in it of the longest App, in it of the
    /// longest client. None if the newcomer's line would be as long, at the first of these that it does not share.
    fn victim(&self, owner: &JobOwner<N, A, C>) -> Option<JobOwner<N, A, C>> {
        let (namespace, apps) = self.namespaces.longest()?;
        let mut shared = *namespace == owner.namespace;
        if !shared && apps.waiting <= self.namespaces.waiting(&owner.namespace) + 1 {
            return None;
        }
        let (app, clients) = apps.inner.longest()?;
        if shared && *app != owner.app {
            if clients.waiting <= apps.inner.waiting(&owner.app) + 1 {
                return None;
            }
            shared = false;
        }
        let (client, jobs) = clients.inner.longest()?;
        if shared && (*client == owner.client || jobs.waiting <= clients.inner.waiting(&owner.client) + 1) {
            return None;
        }
        Some(JobOwner { namespace: namespace.clone(), app: app.clone(), client: client.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = FairQueue<&'static str, &'static str, u8, u32>;

    const JOB: Duration = Duration::from_millis(10);

    fn owner(namespace: &'static str, app: &'static str, client: u8) -> JobOwner<&'static str, &'static str, u8> {
        JobOwner { namespace, app, client }
    }

    /// An App that is alone in its namespace.
    fn alone(app: &'static str, client: u8) -> JobOwner<&'static str, &'static str, u8> {
        owner(app, app, client)
    }

    /// As many names as a test needs.
    fn name(number: u8) -> &'static str {
        Box::leak(format!("n{number}").into_boxed_str())
    }

    impl Queue {
        fn add(&mut self, owner: JobOwner<&'static str, &'static str, u8>, item: u32) -> Push<u32> {
            self.push(&owner, JOB, item)
        }

        /// A job that takes as long as is expected.
        fn next(&mut self) -> Option<u32> {
            self.pop(JOB).map(|turn| turn.job)
        }

        /// A job that takes this long.
        fn next_taking(&mut self, took: Duration) -> Option<u32> {
            let turn = self.pop(JOB)?;
            self.settle(&turn.charge, took);
            Some(turn.job)
        }
    }

    fn drain(queue: &mut Queue) -> Vec<u32> {
        std::iter::from_fn(|| queue.next()).collect()
    }

    #[test]
    fn apps_take_turns_and_inside_one_its_clients() {
        let mut queue = Queue::new(100);
        for item in 0..4 {
            assert_eq!(queue.add(alone("a", 1), item), Push::Queued);
        }
        queue.add(alone("a", 2), 10);
        queue.add(alone("b", 3), 20);
        queue.add(alone("b", 3), 21);
        assert_eq!(drain(&mut queue), [0, 20, 10, 21, 1, 2, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn namespaces_take_turns_and_inside_one_its_apps() {
        let mut queue = Queue::new(100);
        for client in 0..4 {
            queue.add(owner("tenant", name(client), client), client.into());
        }
        for client in 10..13 {
            queue.add(owner("other", "shop", client), client.into());
        }
        assert_eq!(drain(&mut queue), [0, 10, 1, 11, 2, 12, 3]);
    }

    #[test]
    fn a_tenant_with_many_apps_has_one_namespaces_share() {
        let mut queue = Queue::new(128);
        for number in 0..130 {
            queue.add(owner("tenant", name(number), number), number.into());
        }
        assert_eq!(queue.len(), 128);
        // It displaces one of the tenant's, and is next but one.
        assert!(matches!(queue.add(owner("other", "shop", 200), 1000), Push::Displaced(_)));
        let order = drain(&mut queue);
        assert_eq!(order.len(), 128);
        assert_eq!(order.iter().position(|item| *item == 1000), Some(1));
    }

    #[test]
    fn once_half_full_a_client_has_two_places() {
        let mut queue = Queue::new(8);
        for item in 0..4 {
            assert_eq!(queue.add(alone("a", 1), item), Push::Queued);
        }
        assert_eq!(queue.add(alone("a", 1), 4), Push::Refused(4));
        assert_eq!(queue.add(alone("a", 2), 5), Push::Queued);
        assert_eq!(queue.add(alone("a", 2), 6), Push::Queued);
        assert_eq!(queue.add(alone("a", 2), 7), Push::Refused(7));
        assert_eq!(queue.add(alone("b", 2), 8), Push::Refused(8), "places count over all Apps");
        assert_eq!(queue.add(alone("b", 3), 9), Push::Queued);
    }

    #[test]
    fn one_client_with_a_request_in_each_of_128_apps_neither_fills_the_queue_nor_delays_others() {
        let mut queue = Queue::new(128);
        let queued = (0..128).filter(|app| queue.add(alone(name(*app), 1), (*app).into()) == Push::Queued).count();
        assert_eq!(queued, 64);
        // Somebody else in an App where the client waits too, and in another one.
        assert_eq!(queue.add(alone(name(60), 2), 1000), Push::Queued);
        assert_eq!(queue.add(alone(name(200), 3), 1001), Push::Queued);
        let order = drain(&mut queue);
        for item in [1000, 1001] {
            let before = order.iter().position(|other| *other == item);
            assert!(before.is_some_and(|before| before <= 3), "{item}: {order:?}");
        }
    }

    #[test]
    fn turns_are_charged_by_the_time_that_they_took() {
        let mut queue = Queue::new(100);
        let (slow, quick) = (JOB * 10, JOB);
        for number in 0..20 {
            queue.add(alone("slow", 1), number);
            queue.add(alone("quick", 2), 100 + number);
        }
        let mut used = [Duration::ZERO; 2];
        for _ in 0..22 {
            let turn = queue.pop(JOB).unwrap();
            let (line, took) = if turn.job < 100 { (0, slow) } else { (1, quick) };
            used[line] += took;
            queue.settle(&turn.charge, took);
        }
        assert!(used[0].abs_diff(used[1]) <= slow, "{used:?}");
    }

    #[test]
    fn what_a_line_used_counts_after_it_was_empty_and_idleness_is_no_credit() {
        let mut queue = Queue::new(100);
        // Both are busy; the first line's only job takes long.
        queue.add(alone("slow", 1), 0);
        for number in 0..30 {
            queue.add(alone("busy", 2), 100 + number);
        }
        assert_eq!(queue.next_taking(JOB * 10), Some(0));
        queue.add(alone("slow", 1), 1);
        let order: Vec<_> = (0..11).map_while(|_| queue.next_taking(JOB)).collect();
        let turn = order.iter().position(|item| *item == 1);
        assert!(turn.is_some_and(|turn| turn >= 9), "it waits as long as it took: {order:?}");
        // Who comes after a long time has one turn, not those of the time before.
        queue.add(alone("late", 3), 200);
        queue.add(alone("late", 3), 201);
        queue.add(alone("late", 3), 202);
        let order: Vec<_> = (0..6).map_while(|_| queue.next_taking(JOB)).collect();
        let late: Vec<_> = order.iter().map(|item| *item >= 200).collect();
        assert!(!late.windows(2).any(|pair| pair == [true, true]), "{order:?}");
    }

    #[test]
    fn lines_of_clients_that_are_gone_are_forgotten() {
        let mut queue = FairQueue::<u8, u32, u32, u32>::new(8);
        for client in 0..10_000 {
            let owner = JobOwner { namespace: 0, app: client % 100, client };
            assert_eq!(queue.push(&owner, JOB, client), Push::Queued);
            let turn = queue.pop(JOB).unwrap();
            queue.settle(&turn.charge, JOB);
            let kept: usize = queue.namespaces.lines[&0].inner.lines.values().map(|app| app.inner.lines.len()).sum();
            assert_eq!(kept, queue.client_lines);
            assert!(kept <= 8 * LINES_PER_PLACE + 1, "{kept}");
        }
        assert!(queue.clients.is_empty());
    }

    #[test]
    fn a_full_queue_drops_from_the_longest_line() {
        let mut queue = Queue::new(4);
        for client in 0..4 {
            assert_eq!(queue.add(alone("storm", client), u32::from(client)), Push::Queued);
        }
        assert!(matches!(queue.add(alone("quiet", 11), 100), Push::Displaced(0..=3)));
        assert_eq!(queue.add(alone("storm", 9), 101), Push::Refused(101), "the longest line is its own");
        assert!(matches!(queue.add(alone("quiet", 12), 102), Push::Displaced(0..=3)));
        assert_eq!(queue.add(alone("quiet", 13), 103), Push::Refused(103), "now the lines are equal");
        assert_eq!(queue.len(), 4);
        assert_eq!(drain(&mut queue).len(), 4);
    }

    #[test]
    fn whether_there_is_a_place_is_what_a_push_finds() {
        let mut queue = Queue::new(6);
        let mut refused = 0;
        // A walk over every mix of namespaces, Apps and clients that six places allow, many times over.
        for step in 0..2000_u32 {
            let namespace = ["x", "y"][(step * 5 % 7 % 2) as usize];
            let (app, client) = (["a", "b", "c"][(step * 7 % 3) as usize], (step * step % 5) as u8);
            let owner = owner(namespace, app, client);
            let place = queue.has_place(&owner);
            let pushed = queue.add(owner, step);
            assert_eq!(place, !matches!(pushed, Push::Refused(_)), "step {step}");
            assert!(queue.len() <= 6);
            refused += u32::from(!place);
            if step % 4 == 3 {
                queue.next_taking(JOB * (step % 3));
            }
        }
        assert!(refused > 200 && refused < 1800, "{refused}");
        let left = queue.len();
        assert_eq!(drain(&mut queue).len(), left);
    }

    #[test]
    fn inside_an_app_the_longest_client_gives_way() {
        let mut queue = Queue::new(4);
        for item in 0..2 {
            queue.add(alone("a", 1), item);
        }
        queue.add(alone("a", 2), 10);
        queue.add(alone("a", 3), 11);
        assert_eq!(queue.add(alone("a", 4), 12), Push::Displaced(1));
        assert_eq!(queue.add(alone("a", 5), 13), Push::Refused(13));
        assert_eq!(drain(&mut queue), [0, 10, 11, 12]);
    }
}
