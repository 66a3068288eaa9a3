//! The bounded queue in front of the hashing threads. It is fair to namespaces, to the Apps of a namespace, and to the
//! client addresses of an App.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    time::Duration,
};

/// The owner of a job: the App with its namespace, and the client address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JobOwner<N, A, C> {
    pub(super) namespace: N,
    pub(super) app: A,
    pub(super) client: C,
}

/// Which limits apply to a job. A limit on one kind of jobs must not delay jobs of other kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JobKind {
    /// The job takes much longer than making a new hash.
    pub(super) is_heavy: bool,
    /// The job needs more memory than making a new hash.
    pub(super) is_large: bool,
}

/// The kinds of jobs that can start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StartableKinds {
    pub(super) heavy: bool,
    pub(super) large: bool,
}

/// The number of waiting jobs of each kind.
#[derive(Clone, Copy, Default)]
struct KindCounts([usize; 4]);

/// Queues that take turns according to the time that their jobs used (start-time fair queueing; Goyal, Vin and Cheng,
/// 1996).
struct FairScheduler<K, V> {
    /// The virtual time: when the queue was due that was served most recently. It advances with the time that jobs use,
    /// not with a clock.
    virtual_time: Duration,
    next_sequence: u64,
    /// The queues that have jobs, in the order in which they are due. Queues that are due at the same time are in order
    /// of arrival.
    schedule: BTreeMap<(Duration, u64), K>,
    queues: HashMap<K, SubQueue<V>>,
}

struct SubQueue<V> {
    /// The virtual time at which the last turn of the queue ends. A queue that was idle starts again at the current
    /// virtual time, so idle time gives no credit.
    finish_time: Duration,
    /// The queue's position in the schedule. `None` if no job waits.
    position: Option<(Duration, u64)>,
    /// The number of waiting jobs, including those in the queues of the next level (the Apps of a namespace, the
    /// clients of an App).
    waiting: usize,
    /// The number of waiting jobs by kind.
    waiting_by_kind: KindCounts,
    /// The queues of the next level or, for a client address, the jobs.
    content: V,
}

/// The waiting jobs of a client address in an App, in the order of arrival.
type ClientJobs<T> = Vec<(JobKind, T)>;

/// A queue of jobs of type `T`. The types of an owner's namespace, App and client address are `N`, `A` and `C`.
pub(super) struct FairQueue<N, A, C, T> {
    capacity: usize,
    length: usize,
    namespaces: FairScheduler<N, FairScheduler<A, FairScheduler<C, ClientJobs<T>>>>,
    /// The waiting jobs of each client address, over all Apps. Client addresses without waiting jobs have no entry.
    waiting_per_client: HashMap<C, ClientLoad>,
    /// The number of clients' queues, including queues without jobs, which only record how much time their jobs used.
    client_queues: usize,
}

/// The waiting jobs of a client address.
#[derive(Default)]
struct ClientLoad {
    jobs: usize,
    /// The number of Apps in which the jobs wait.
    apps: usize,
}

/// The outcome of [`FairQueue::push`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PushOutcome<T> {
    Queued,
    /// The new job is queued, and this job of another owner ([`FairQueue::displaced_owner`]) was removed for it.
    Displaced(T),
    /// There is no slot. Either the queue is full and there is no other owner from which it takes a slot
    /// ([`FairQueue::displaced_owner`]), or the queue is at least half full and the client address already has two
    /// waiting jobs.
    Refused(T),
}

/// The next job. Its expected time is charged in advance, so that other threads take jobs from other queues while the
/// job runs.
#[derive(Debug)]
pub(super) struct ScheduledJob<N, A, C, T> {
    pub(super) job: T,
    pub(super) kind: JobKind,
    pub(super) charge: Charge<N, A, C>,
}

/// The expected time of a job. It was charged to the owner in advance. When the job has ended, the charge is corrected.
#[derive(Debug)]
pub(super) struct Charge<N, A, C> {
    owner: JobOwner<N, A, C>,
    expected: Duration,
}

/// The maximum number of slots of a client address, over all Apps, while the queue is at least half full.
const MAX_CLIENT_SLOTS_WHEN_CROWDED: usize = 2;
/// How many turns a namespace gets for one turn of a client that waits in many Apps. A user logs in to one App at a
/// time, so such a client is a program, which must not get as many turns as a namespace.
const TURNS_PER_MULTI_APP_TURN: u32 = 4;
/// How far a queue can be behind the virtual time. A queue with jobs that could not start gets at most this much time
/// in a row before other queues take turns again: enough for a few heavy jobs, and well below the 2 s after which a
/// waiting job is refused.
const MAX_CREDIT: Duration = Duration::from_millis(500);
/// The maximum number of clients' queues per slot, including queues without jobs, which only record how much time their
/// jobs used. A queue takes about 150 bytes.
const CLIENT_QUEUES_PER_SLOT: usize = 4;

// === impl JobKind ===

impl JobKind {
    const fn index(self) -> usize {
        self.is_heavy as usize + 2 * self.is_large as usize
    }
}

// === impl StartableKinds ===

impl StartableKinds {
    #[cfg(test)]
    const ALL: Self = Self { heavy: true, large: true };

    const fn contains(self, kind: JobKind) -> bool {
        (self.heavy || !kind.is_heavy) && (self.large || !kind.is_large)
    }
}

// === impl KindCounts ===

impl KindCounts {
    fn has_startable(&self, startable: StartableKinds) -> bool {
        [false, true].into_iter().any(|is_heavy| {
            [false, true].into_iter().any(|is_large| {
                let kind = JobKind { is_heavy, is_large };
                startable.contains(kind) && self.0[kind.index()] > 0
            })
        })
    }
}

// === impl FairScheduler ===

impl<K: Clone + Eq + Hash, V> FairScheduler<K, V> {
    fn new() -> Self {
        Self { virtual_time: Duration::ZERO, next_sequence: 0, schedule: BTreeMap::new(), queues: HashMap::new() }
    }

    fn waiting_jobs(&self, key: &K) -> usize {
        self.queues.get(key).map_or(0, |queue| queue.waiting)
    }

    /// Returns the queue with the most waiting jobs. If there are several such queues, returns any of them.
    fn longest_queue(&self) -> Option<(&K, &SubQueue<V>)> {
        self.queues.iter().filter(|(_, queue)| queue.waiting > 0).max_by_key(|(_, queue)| queue.waiting)
    }

    /// Counts one more job in a queue, and returns the content of the queue. The job is due `delay` after the end of
    /// the queue's last turn, or `delay` after the current virtual time if that is later.
    fn enqueue(&mut self, key: &K, kind: JobKind, delay: Duration, new: impl FnOnce() -> V) -> &mut V {
        let queue = self.queues.entry(key.clone()).or_insert_with(|| SubQueue {
            finish_time: Duration::ZERO,
            position: None,
            waiting: 0,
            waiting_by_kind: KindCounts::default(),
            content: new(),
        });
        queue.waiting += 1;
        queue.waiting_by_kind.0[kind.index()] += 1;
        let due = queue.finish_time.max(self.virtual_time) + delay;
        if queue.position.is_none_or(|(other, _)| due < other) {
            queue.reposition(due, &mut self.next_sequence, &mut self.schedule, key);
        }
        &mut queue.content
    }

    /// Takes a job from the first due queue that has a startable job, and charges this queue. `take` returns the job
    /// with its kind and its expected time. A queue without a startable job keeps its position, but gets at most
    /// `MAX_CREDIT` for the wait.
    fn dequeue<T>(
        &mut self,
        startable: StartableKinds,
        take: impl FnOnce(&mut V) -> Option<(JobKind, Duration, T)>,
    ) -> Option<(JobKind, Duration, (K, T))> {
        let has_startable = |key| {
            self.queues.get(key).is_some_and(|queue: &SubQueue<V>| queue.waiting_by_kind.has_startable(startable))
        };
        let position = *self.schedule.iter().find(|(_, key)| has_startable(key))?.0;
        let key = self.schedule.remove(&position)?;
        let queue = self.queues.get_mut(&key)?;
        let due = position.0.max(self.virtual_time.saturating_sub(MAX_CREDIT));
        queue.position = None;
        self.virtual_time = self.virtual_time.max(due);
        let (kind, expected, taken) = take(&mut queue.content)?;
        queue.finish_time = due + expected;
        queue.waiting -= 1;
        queue.waiting_by_kind.0[kind.index()] -= 1;
        if queue.waiting > 0 {
            queue.reposition(queue.finish_time, &mut self.next_sequence, &mut self.schedule, &key);
        }
        Some((kind, expected, (key, taken)))
    }

    /// Removes a job before the turn of its queue. The queue is not charged for the job.
    fn remove_out_of_turn<T>(
        &mut self,
        key: &K,
        take: impl FnOnce(&mut V) -> Option<(JobKind, T)>,
    ) -> Option<(JobKind, T)> {
        let queue = self.queues.get_mut(key)?;
        let (kind, taken) = take(&mut queue.content)?;
        queue.waiting -= 1;
        queue.waiting_by_kind.0[kind.index()] -= 1;
        if queue.waiting == 0
            && let Some(position) = queue.position.take()
        {
            self.schedule.remove(&position);
        }
        Some((kind, taken))
    }

    /// Replaces the expected time of a job, which was charged to its queue, with the time that the job took.
    fn correct_charge(&mut self, key: &K, expected: Duration, took: Duration) -> Option<&mut V> {
        let queue = self.queues.get_mut(key)?;
        let corrected = |charged: Duration| charged.saturating_sub(expected) + took;
        queue.finish_time = corrected(queue.finish_time);
        if let Some((due, _)) = queue.position {
            queue.reposition(corrected(due), &mut self.next_sequence, &mut self.schedule, key);
        }
        Some(&mut queue.content)
    }
}

impl<V> SubQueue<V> {
    /// Puts the queue into the schedule, behind queues that are due at the same time.
    fn reposition<K: Clone>(
        &mut self,
        due: Duration,
        next_sequence: &mut u64,
        schedule: &mut BTreeMap<(Duration, u64), K>,
        key: &K,
    ) {
        if let Some(position) = self.position.take() {
            schedule.remove(&position);
        }
        *next_sequence += 1;
        self.position = Some((due, *next_sequence));
        schedule.insert((due, *next_sequence), key.clone());
    }
}

// === impl FairQueue ===

impl<N: Clone + Eq + Hash, A: Clone + Eq + Hash, C: Clone + Eq + Hash, T> FairQueue<N, A, C, T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            length: 0,
            namespaces: FairScheduler::new(),
            waiting_per_client: HashMap::new(),
            client_queues: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Changes the number of slots. If more jobs wait than there are slots, all these jobs stay in the queue.
    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    /// Whether a push would be accepted now.
    pub(super) fn has_slot(&self, owner: &JobOwner<N, A, C>) -> bool {
        !self.is_client_limit_reached(&owner.client)
            && (self.length < self.capacity || self.displaced_owner(owner).is_some())
    }

    /// Queues a job if there is a slot for it. `expected`: the expected time of the job.
    pub(super) fn push(
        &mut self,
        owner: &JobOwner<N, A, C>,
        kind: JobKind,
        expected: Duration,
        job: T,
    ) -> PushOutcome<T> {
        if self.is_client_limit_reached(&owner.client) {
            return PushOutcome::Refused(job);
        }
        if self.length < self.capacity {
            self.insert(owner, kind, expected, job);
            return PushOutcome::Queued;
        }
        match self.displaced_owner(owner).and_then(|victim| self.remove_newest(&victim)) {
            Some(displaced) => {
                self.insert(owner, kind, expected, job);
                PushOutcome::Displaced(displaced)
            }
            None => PushOutcome::Refused(job),
        }
    }

    /// Takes the next job that can start. `expected`: the expected time of a job.
    pub(super) fn pop(
        &mut self,
        startable: StartableKinds,
        expected: impl Fn(&T) -> Duration,
    ) -> Option<ScheduledJob<N, A, C, T>> {
        let take = |jobs: &mut ClientJobs<T>| {
            let index = jobs.iter().position(|(kind, _)| startable.contains(*kind))?;
            let (kind, job) = jobs.remove(index);
            Some((kind, expected(&job), job))
        };
        let (kind, expected, (namespace, (app, (client, job)))) = self
            .namespaces
            .dequeue(startable, |apps| apps.dequeue(startable, |clients| clients.dequeue(startable, take)))?;
        let owner = JobOwner { namespace, app, client };
        self.count_removed_job(&owner);
        Some(ScheduledJob { job, kind, charge: Charge { owner, expected } })
    }

    /// Replaces the charged time of a job with the time that it took.
    pub(super) fn correct_charge(&mut self, charge: &Charge<N, A, C>, took: Duration) {
        let Charge { owner, expected } = charge;
        // A queue without jobs may have been dropped. Then there is no charge to correct.
        let _ = self
            .namespaces
            .correct_charge(&owner.namespace, *expected, took)
            .and_then(|apps| apps.correct_charge(&owner.app, *expected, took))
            .and_then(|clients| clients.correct_charge(&owner.client, *expected, took));
    }

    fn insert(&mut self, owner: &JobOwner<N, A, C>, kind: JobKind, expected: Duration, job: T) {
        let is_first_in_app = self.waiting_jobs_in_app(owner) == 0;
        let load = self.waiting_per_client.entry(owner.client.clone()).or_default();
        // A client gains little by waiting in many Apps: each other App in which it waits delays the new job.
        let other_apps = load.apps - usize::from(!is_first_in_app);
        let delay = expected * TURNS_PER_MULTI_APP_TURN * u32::try_from(other_apps).unwrap_or(u32::MAX);
        load.jobs += 1;
        load.apps += usize::from(is_first_in_app);
        self.length += 1;
        let apps = self.namespaces.enqueue(&owner.namespace, kind, delay, FairScheduler::new);
        let clients = apps.enqueue(&owner.app, kind, delay, FairScheduler::new);
        let queues_before = clients.queues.len();
        clients.enqueue(&owner.client, kind, delay, Vec::new).push((kind, job));
        self.client_queues += clients.queues.len() - queues_before;
        if self.client_queues > self.capacity * CLIENT_QUEUES_PER_SLOT {
            self.drop_idle_queues();
        }
    }

    fn remove_newest(&mut self, owner: &JobOwner<N, A, C>) -> Option<T> {
        let (_, job) = self.namespaces.remove_out_of_turn(&owner.namespace, |apps| {
            apps.remove_out_of_turn(&owner.app, |clients| clients.remove_out_of_turn(&owner.client, Vec::pop))
        })?;
        self.count_removed_job(owner);
        Some(job)
    }

    /// The number of waiting jobs of the owner's client in the owner's App.
    fn waiting_jobs_in_app(&self, owner: &JobOwner<N, A, C>) -> usize {
        let apps = self.namespaces.queues.get(&owner.namespace);
        let clients = apps.and_then(|apps| apps.content.queues.get(&owner.app));
        clients.map_or(0, |clients| clients.content.waiting_jobs(&owner.client))
    }

    fn count_removed_job(&mut self, owner: &JobOwner<N, A, C>) {
        self.length -= 1;
        let was_last_in_app = self.waiting_jobs_in_app(owner) == 0;
        if let Some(load) = self.waiting_per_client.get_mut(&owner.client) {
            load.jobs -= 1;
            load.apps -= usize::from(was_last_in_app);
            if load.jobs == 0 {
                self.waiting_per_client.remove(&owner.client);
            }
        }
    }

    /// Drops the queues without jobs, to bound memory. The time that these queues used is forgotten.
    fn drop_idle_queues(&mut self) {
        let mut remaining_queues = 0;
        self.namespaces.queues.retain(|_, namespace| {
            namespace.content.queues.retain(|_, app| {
                app.content.queues.retain(|_, client| client.waiting > 0);
                remaining_queues += app.content.queues.len();
                app.waiting > 0
            });
            namespace.waiting > 0
        });
        self.client_queues = remaining_queues;
    }

    fn is_client_limit_reached(&self, client: &C) -> bool {
        let slots = self.waiting_per_client.get(client).map_or(0, |load| load.jobs);
        self.length * 2 >= self.capacity && slots >= MAX_CLIENT_SLOTS_WHEN_CROWDED
    }

    /// Returns the owner that must lose its newest job when `owner` adds a job to the full queue. Finds this owner in
    /// three steps: the namespace with the most waiting jobs, its App with the most waiting jobs, and the client with
    /// the most waiting jobs in this App.
    ///
    /// Returns `None` if the found owner is `owner` itself. Otherwise compares the waiting jobs of the two at the first
    /// level (namespace, App, client) at which they differ. Returns `None` if `owner`, with the new job, would have at
    /// least as many jobs as the found owner.
    fn displaced_owner(&self, owner: &JobOwner<N, A, C>) -> Option<JobOwner<N, A, C>> {
        let (namespace, apps) = self.namespaces.longest_queue()?;
        let mut is_same_so_far = *namespace == owner.namespace;
        if !is_same_so_far && apps.waiting <= self.namespaces.waiting_jobs(&owner.namespace) + 1 {
            return None;
        }
        let (app, clients) = apps.content.longest_queue()?;
        if is_same_so_far && *app != owner.app {
            if clients.waiting <= apps.content.waiting_jobs(&owner.app) + 1 {
                return None;
            }
            is_same_so_far = false;
        }
        let (client, jobs) = clients.content.longest_queue()?;
        if is_same_so_far
            && (*client == owner.client || jobs.waiting <= clients.content.waiting_jobs(&owner.client) + 1)
        {
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
    const LIGHT: JobKind = JobKind { is_heavy: false, is_large: false };
    const HEAVY: JobKind = JobKind { is_heavy: true, is_large: false };
    const LARGE: JobKind = JobKind { is_heavy: false, is_large: true };

    fn owner(namespace: &'static str, app: &'static str, client: u8) -> JobOwner<&'static str, &'static str, u8> {
        JobOwner { namespace, app, client }
    }

    /// The owner of a job in an App that is alone in its namespace.
    fn only_app_owner(app: &'static str, client: u8) -> JobOwner<&'static str, &'static str, u8> {
        owner(app, app, client)
    }

    /// A distinct name per number.
    fn name(number: u8) -> &'static str {
        Box::leak(format!("n{number}").into_boxed_str())
    }

    impl Queue {
        fn add(&mut self, owner: JobOwner<&'static str, &'static str, u8>, item: u32) -> PushOutcome<u32> {
            self.push(&owner, LIGHT, JOB, item)
        }

        /// Removes the next job, which runs as long as expected.
        fn next(&mut self) -> Option<u32> {
            self.pop(StartableKinds::ALL, |_| JOB).map(|next| next.job)
        }

        /// Removes the next job, which runs for `took`.
        fn next_that_takes(&mut self, took: Duration) -> Option<u32> {
            let next = self.pop(StartableKinds::ALL, |_| JOB)?;
            self.correct_charge(&next.charge, took);
            Some(next.job)
        }
    }

    fn drain(queue: &mut Queue) -> Vec<u32> {
        std::iter::from_fn(|| queue.next()).collect()
    }

    #[test]
    fn apps_take_turns_and_so_do_the_clients_of_an_app() {
        let mut queue = Queue::new(100);
        for item in 0..4 {
            assert_eq!(queue.add(only_app_owner("a", 1), item), PushOutcome::Queued);
        }
        queue.add(only_app_owner("a", 2), 10);
        queue.add(only_app_owner("b", 3), 20);
        queue.add(only_app_owner("b", 3), 21);
        assert_eq!(drain(&mut queue), [0, 20, 10, 21, 1, 2, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn namespaces_take_turns_and_so_do_the_apps_of_a_namespace() {
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
    fn a_tenant_with_many_apps_gets_the_share_of_one_namespace() {
        let mut queue = Queue::new(128);
        for number in 0..130 {
            queue.add(owner("tenant", name(number), number), number.into());
        }
        assert_eq!(queue.len(), 128);
        // The new job displaces a job of the tenant, and runs as the second job.
        assert!(matches!(queue.add(owner("other", "shop", 200), 1000), PushOutcome::Displaced(_)));
        let order = drain(&mut queue);
        assert_eq!(order.len(), 128);
        assert_eq!(order.iter().position(|item| *item == 1000), Some(1));
    }

    #[test]
    fn a_client_gets_at_most_two_slots_while_the_queue_is_at_least_half_full() {
        let mut queue = Queue::new(8);
        for item in 0..4 {
            assert_eq!(queue.add(only_app_owner("a", 1), item), PushOutcome::Queued);
        }
        assert_eq!(queue.add(only_app_owner("a", 1), 4), PushOutcome::Refused(4));
        assert_eq!(queue.add(only_app_owner("a", 2), 5), PushOutcome::Queued);
        assert_eq!(queue.add(only_app_owner("a", 2), 6), PushOutcome::Queued);
        assert_eq!(queue.add(only_app_owner("a", 2), 7), PushOutcome::Refused(7));
        assert_eq!(queue.add(only_app_owner("b", 2), 8), PushOutcome::Refused(8), "slots count over all Apps");
        assert_eq!(queue.add(only_app_owner("b", 3), 9), PushOutcome::Queued);
    }

    #[test]
    fn one_client_with_a_request_in_each_of_128_apps_neither_fills_the_queue_nor_delays_others() {
        let mut queue = Queue::new(128);
        let queued = (0..128)
            .filter(|app| queue.add(only_app_owner(name(*app), 1), (*app).into()) == PushOutcome::Queued)
            .count();
        assert_eq!(queued, 64);
        // Client 2 is in an App in which client 1 waits, too. Client 3 is in an App in which nobody waits.
        assert_eq!(queue.add(only_app_owner(name(60), 2), 1000), PushOutcome::Queued);
        assert_eq!(queue.add(only_app_owner(name(200), 3), 1001), PushOutcome::Queued);
        let order = drain(&mut queue);
        for item in [1000, 1001] {
            let position = order.iter().position(|other| *other == item);
            assert!(position.is_some_and(|position| position <= 3), "{item}: {order:?}");
        }
    }

    #[test]
    fn a_client_in_many_apps_gets_a_small_share_of_the_time() {
        let mut queue = Queue::new(256);
        for app in 0..64 {
            queue.add(only_app_owner(name(app), 1), u32::from(app));
        }
        for client in 100..108 {
            queue.add(only_app_owner("shop", client), client.into());
        }
        // After each job, its owner queues another one.
        let mut multi_app_turns = 0;
        for _ in 0..1000 {
            let job = queue.pop(StartableKinds::ALL, |_| JOB).unwrap();
            queue.correct_charge(&job.charge, JOB);
            multi_app_turns += u32::from(job.job < 64);
            assert_eq!(queue.add(job.charge.owner, job.job), PushOutcome::Queued);
        }
        assert!((150..=250).contains(&multi_app_turns), "{multi_app_turns} of 1000");
    }

    #[test]
    fn several_waiting_jobs_of_one_client_in_an_app_do_not_delay_the_app() {
        let mut queue = Queue::new(128);
        for item in 0..20 {
            queue.add(only_app_owner("office", 1), item);
        }
        for item in 100..120 {
            queue.add(only_app_owner("shop", 2), item);
        }
        let office_turns = (0..20).filter(|_| queue.next().is_some_and(|item| item < 100)).count();
        assert_eq!(office_turns, 10);
    }

    #[test]
    fn an_app_is_charged_for_the_time_that_its_job_took() {
        let mut queue = Queue::new(100);
        let (slow, quick) = (JOB * 10, JOB);
        for number in 0..20 {
            queue.add(only_app_owner("slow", 1), number);
            queue.add(only_app_owner("quick", 2), 100 + number);
        }
        let mut used = [Duration::ZERO; 2];
        for _ in 0..22 {
            let next = queue.pop(StartableKinds::ALL, |_| JOB).unwrap();
            let (owner, took) = if next.job < 100 { (0, slow) } else { (1, quick) };
            used[owner] += took;
            queue.correct_charge(&next.charge, took);
        }
        assert!(used[0].abs_diff(used[1]) <= slow, "{used:?}");
    }

    #[test]
    fn used_time_counts_after_a_queue_was_empty_and_idle_time_gives_no_credit() {
        let mut queue = Queue::new(100);
        // Both Apps have jobs. The only job of `slow` takes ten times as long as expected.
        queue.add(only_app_owner("slow", 1), 0);
        for number in 0..30 {
            queue.add(only_app_owner("busy", 2), 100 + number);
        }
        assert_eq!(queue.next_that_takes(JOB * 10), Some(0));
        queue.add(only_app_owner("slow", 1), 1);
        let order: Vec<_> = (0..11).map_while(|_| queue.next_that_takes(JOB)).collect();
        let position = order.iter().position(|item| *item == 1);
        assert!(
            position.is_some_and(|position| position >= 9),
            "the second job waits as long as the first job took: {order:?}"
        );
        // A queue that starts late gets one turn, not the turns that it missed.
        queue.add(only_app_owner("late", 3), 200);
        queue.add(only_app_owner("late", 3), 201);
        queue.add(only_app_owner("late", 3), 202);
        let order: Vec<_> = (0..6).map_while(|_| queue.next_that_takes(JOB)).collect();
        let is_late: Vec<_> = order.iter().map(|item| *item >= 200).collect();
        assert!(!is_late.windows(2).any(|pair| pair == [true, true]), "{order:?}");
    }

    #[test]
    fn the_number_of_idle_client_queues_is_bounded() {
        let mut queue = FairQueue::<u8, u32, u32, u32>::new(8);
        for client in 0..10_000 {
            let owner = JobOwner { namespace: 0, app: client % 100, client };
            assert_eq!(queue.push(&owner, LIGHT, JOB, client), PushOutcome::Queued);
            let next = queue.pop(StartableKinds::ALL, |_| JOB).unwrap();
            queue.correct_charge(&next.charge, JOB);
            let kept: usize =
                queue.namespaces.queues[&0].content.queues.values().map(|app| app.content.queues.len()).sum();
            assert_eq!(kept, queue.client_queues);
            assert!(kept <= 8 * CLIENT_QUEUES_PER_SLOT + 1, "{kept}");
        }
        assert!(queue.waiting_per_client.is_empty());
    }

    #[test]
    fn a_full_queue_displaces_a_job_of_the_longest_queue() {
        let mut queue = Queue::new(4);
        for client in 0..4 {
            assert_eq!(queue.add(only_app_owner("storm", client), u32::from(client)), PushOutcome::Queued);
        }
        assert!(matches!(queue.add(only_app_owner("quiet", 11), 100), PushOutcome::Displaced(0..=3)));
        assert_eq!(
            queue.add(only_app_owner("storm", 9), 101),
            PushOutcome::Refused(101),
            "its own queue is the longest"
        );
        assert!(matches!(queue.add(only_app_owner("quiet", 12), 102), PushOutcome::Displaced(0..=3)));
        assert_eq!(queue.add(only_app_owner("quiet", 13), 103), PushOutcome::Refused(103), "now the queues are equal");
        assert_eq!(queue.len(), 4);
        assert_eq!(drain(&mut queue).len(), 4);
    }

    #[test]
    fn has_slot_agrees_with_push() {
        let mut queue = Queue::new(6);
        let mut refused = 0;
        // Goes through all 18 owners of two namespaces, three Apps and three clients, many times.
        for step in 0..2000_u32 {
            let namespace = ["x", "y"][(step * 5 % 7 % 2) as usize];
            let (app, client) = (["a", "b", "c"][(step * 7 % 3) as usize], (step * step % 5) as u8);
            let owner = owner(namespace, app, client);
            let has_slot = queue.has_slot(&owner);
            let pushed = queue.add(owner, step);
            assert_eq!(has_slot, !matches!(pushed, PushOutcome::Refused(_)), "step {step}");
            assert!(queue.len() <= 6);
            refused += u32::from(!has_slot);
            if step % 4 == 3 {
                queue.next_that_takes(JOB * (step % 3));
            }
        }
        assert!(refused > 200 && refused < 1800, "{refused}");
        let remaining = queue.len();
        assert_eq!(drain(&mut queue).len(), remaining);
    }

    #[test]
    fn a_job_of_the_longest_client_queue_in_an_app_is_displaced() {
        let mut queue = Queue::new(4);
        for item in 0..2 {
            queue.add(only_app_owner("a", 1), item);
        }
        queue.add(only_app_owner("a", 2), 10);
        queue.add(only_app_owner("a", 3), 11);
        assert_eq!(queue.add(only_app_owner("a", 4), 12), PushOutcome::Displaced(1));
        assert_eq!(queue.add(only_app_owner("a", 5), 13), PushOutcome::Refused(13));
        assert_eq!(drain(&mut queue), [0, 10, 11, 12]);
    }

    #[test]
    fn a_job_that_cannot_start_lets_the_next_queue_pass_and_keeps_its_turn() {
        let mut queue = Queue::new(100);
        queue.push(&only_app_owner("imported", 1), HEAVY, JOB, 1);
        queue.push(&only_app_owner("imported", 2), LARGE, JOB, 2);
        queue.push(&only_app_owner("imported", 3), LIGHT, JOB, 3);
        queue.push(&only_app_owner("native", 4), LIGHT, JOB, 4);
        let mut pop = |heavy, large| queue.pop(StartableKinds { heavy, large }, |_| JOB).map(|next| next.job);
        assert_eq!(pop(false, false), Some(3), "the App's own light job");
        assert_eq!(pop(false, false), Some(4));
        assert_eq!(pop(false, false), None, "the remaining jobs wait");
        assert_eq!(pop(false, true), Some(2));
        assert_eq!(pop(false, true), None);
        assert_eq!(pop(true, false), Some(1));
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_queue_with_jobs_that_had_to_wait_gets_at_most_half_a_second_of_credit() {
        let mut queue = Queue::new(1000);
        for number in 0..150 {
            queue.push(&only_app_owner("imported", 1), HEAVY, JOB, number);
        }
        for number in 0..300 {
            queue.push(&only_app_owner("native", 2), LIGHT, JOB, 1000 + number);
        }
        // The heavy jobs wait for 2 s. The virtual time never goes back.
        let mut before = Duration::ZERO;
        for _ in 0..200 {
            let startable = StartableKinds { heavy: false, large: true };
            assert!(queue.pop(startable, |_| JOB).is_some_and(|next| next.job >= 1000));
            assert!(queue.namespaces.virtual_time >= before);
            before = queue.namespaces.virtual_time;
        }
        let order: Vec<_> = (0..150).map_while(|_| queue.next()).collect();
        assert!(queue.namespaces.virtual_time >= before);
        let in_a_row = order.iter().take_while(|item| **item < 1000).count();
        assert!((40..=52).contains(&in_a_row), "{in_a_row} heavy jobs of 10 ms in a row");
        let rest = &order[in_a_row..];
        let heavy = rest.iter().filter(|item| **item < 1000).count();
        assert!(heavy.abs_diff(rest.len() - heavy) <= 2, "then the Apps take turns: {rest:?}");
    }

    #[test]
    fn a_startable_job_overtakes_jobs_of_the_same_client_that_cannot_start() {
        let mut queue = Queue::new(100);
        let client = only_app_owner("a", 1);
        let both = JobKind { is_heavy: true, is_large: true };
        for (item, kind) in [(1, both), (2, HEAVY), (3, LIGHT), (4, both)] {
            queue.push(&client, kind, JOB, item);
        }
        let mut pop = |heavy, large| queue.pop(StartableKinds { heavy, large }, |_| JOB).map(|next| next.job);
        assert_eq!(pop(true, false), Some(2));
        assert_eq!(pop(false, true), Some(3));
        assert_eq!(pop(false, true), None, "a heavy and large job starts only if both kinds can start");
        assert_eq!([pop(true, true), pop(true, true), pop(true, true)], [Some(1), Some(4), None]);
    }

    #[test]
    fn a_displaced_job_is_removed_from_the_count_of_its_kind() {
        let mut queue = Queue::new(3);
        for client in 1..=3 {
            queue.push(&only_app_owner("storm", client), HEAVY, JOB, client.into());
        }
        assert!(matches!(queue.push(&only_app_owner("quiet", 4), LIGHT, JOB, 4), PushOutcome::Displaced(_)));
        let mut pop = |heavy| queue.pop(StartableKinds { heavy, large: true }, |_| JOB).map(|next| next.job);
        assert_eq!(pop(false), Some(4));
        assert_eq!(pop(false), None);
        assert!(pop(true).is_some() && pop(true).is_some());
        assert_eq!(pop(true), None);
    }

    #[test]
    fn turns_follow_the_expected_time_of_running_jobs() {
        let mut queue = Queue::new(200);
        for number in 0..40 {
            queue.push(&only_app_owner("heavy", 1), HEAVY, JOB * 10, number);
            queue.push(&only_app_owner("light", 2), LIGHT, JOB, 100 + number);
        }
        // The jobs are still running, so their expected times are not corrected yet.
        let expected = |job: &u32| if *job < 100 { JOB * 10 } else { JOB };
        let order: Vec<_> =
            (0..22).map_while(|_| queue.pop(StartableKinds::ALL, expected).map(|next| next.job)).collect();
        let heavy = order.iter().filter(|item| **item < 100).count();
        assert_eq!(heavy, 2, "ten light jobs for each heavy one: {order:?}");
    }
}
