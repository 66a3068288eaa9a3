//! The queue in front of the hashing threads: bounded, and fair to Apps and, inside one, to client addresses.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
};

/// Lines in a rotation: each turn takes one from the line at the front, which then goes to the end.
struct Rotation<K, V> {
    order: VecDeque<K>,
    lines: HashMap<K, V>,
}

/// A queue of `T` of Apps `A` and clients `C`.
pub(super) struct FairQueue<A, C, T> {
    capacity: usize,
    length: usize,
    apps: Rotation<A, AppLine<C, T>>,
}

struct AppLine<C, T> {
    length: usize,
    clients: Rotation<C, VecDeque<T>>,
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

/// Once the queue is half full, a client address has at most so many places.
const PLACES_WHEN_CROWDED: usize = 2;

// === impl Rotation ===

impl<K: Clone + Eq + Hash, V> Rotation<K, V> {
    fn new() -> Self {
        Self { order: VecDeque::new(), lines: HashMap::new() }
    }

    fn line(&mut self, key: &K, new: impl FnOnce() -> V) -> &mut V {
        if !self.lines.contains_key(key) {
            self.order.push_back(key.clone());
        }
        self.lines.entry(key.clone()).or_insert_with(new)
    }

    fn remove(&mut self, key: &K) {
        self.lines.remove(key);
        self.order.retain(|other| other != key);
    }

    /// The longest line; of equal ones any.
    fn longest(&self, length: impl Fn(&V) -> usize) -> Option<K> {
        self.lines.iter().max_by_key(|(_, line)| length(line)).map(|(key, _)| key.clone())
    }

    /// Takes from the line at the front, which goes to the end, or away when it is empty.
    fn turn<T>(&mut self, take: impl FnOnce(&mut V) -> (Option<T>, bool)) -> Option<T> {
        let key = self.order.pop_front()?;
        let (taken, empty) = take(self.lines.get_mut(&key)?);
        if empty {
            self.lines.remove(&key);
        } else {
            self.order.push_back(key);
        }
        taken
    }
}

// === impl FairQueue ===

impl<A: Clone + Eq + Hash, C: Clone + Eq + Hash, T> FairQueue<A, C, T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, length: 0, apps: Rotation::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Whether a push would be queued now.
    pub(super) fn has_place(&self, app: &A, client: &C) -> bool {
        !self.is_crowded_by(app, client) && (self.length < self.capacity || self.victim(app, client).is_some())
    }

    pub(super) fn push(&mut self, app: &A, client: &C, item: T) -> Push<T> {
        if self.is_crowded_by(app, client) {
            return Push::Refused(item);
        }
        if self.length < self.capacity {
            self.append(app, client, item);
            return Push::Queued;
        }
        match self.displace(app, client) {
            Some(displaced) => {
                self.append(app, client, item);
                Push::Displaced(displaced)
            }
            None => Push::Refused(item),
        }
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        let item = self.apps.turn(|line| {
            let item = line.clients.turn(|jobs| {
                let job = jobs.pop_front();
                (job, jobs.is_empty())
            });
            line.length -= usize::from(item.is_some());
            (item, line.length == 0)
        })?;
        self.length -= 1;
        Some(item)
    }

    fn append(&mut self, app: &A, client: &C, item: T) {
        let line = self.apps.line(app, || AppLine { length: 0, clients: Rotation::new() });
        line.clients.line(client, VecDeque::new).push_back(item);
        line.length += 1;
        self.length += 1;
    }

    /// How many an App and a client of it have in the queue.
    fn places(&self, app: &A, client: &C) -> (usize, usize) {
        match self.apps.lines.get(app) {
            Some(line) => (line.length, line.clients.lines.get(client).map_or(0, VecDeque::len)),
            None => (0, 0),
        }
    }

    fn is_crowded_by(&self, app: &A, client: &C) -> bool {
        self.length * 2 >= self.capacity && self.places(app, client).1 >= PLACES_WHEN_CROWDED
    }

    /// The longest line, whose newest would go for this newcomer; none where the newcomer's would be as long or longer.
    fn victim(&self, app: &A, client: &C) -> Option<(A, C)> {
        let (of_app, of_client) = self.places(app, client);
        let longest = self.apps.longest(|line| line.length)?;
        let line = self.apps.lines.get(&longest)?;
        let same_app = longest == *app;
        if !same_app && line.length <= of_app + 1 {
            return None;
        }
        let victim = line.clients.longest(VecDeque::len)?;
        let jobs = line.clients.lines.get(&victim)?;
        if same_app && (victim == *client || jobs.len() <= of_client + 1) {
            return None;
        }
        Some((longest, victim))
    }

    fn displace(&mut self, app: &A, client: &C) -> Option<T> {
        let (longest, victim) = self.victim(app, client)?;
        let line = self.apps.lines.get_mut(&longest)?;
        let jobs = line.clients.lines.get_mut(&victim)?;
        let displaced = jobs.pop_back()?;
        if jobs.is_empty() {
            line.clients.remove(&victim);
        }
        line.length -= 1;
        self.length -= 1;
        if line.length == 0 {
            self.apps.remove(&longest);
        }
        Some(displaced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = FairQueue<&'static str, u8, u32>;

    fn drain(queue: &mut Queue) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn apps_take_turns_and_inside_one_its_clients() {
        let mut queue = Queue::new(100);
        for item in 0..4 {
            assert_eq!(queue.push(&"a", &1, item), Push::Queued);
        }
        queue.push(&"a", &2, 10);
        queue.push(&"b", &1, 20);
        queue.push(&"b", &1, 21);
        assert_eq!(drain(&mut queue), [0, 20, 10, 21, 1, 2, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn once_half_full_a_client_has_two_places() {
        let mut queue = Queue::new(8);
        for item in 0..4 {
            assert_eq!(queue.push(&"a", &1, item), Push::Queued);
        }
        assert_eq!(queue.push(&"a", &1, 4), Push::Refused(4));
        assert_eq!(queue.push(&"a", &2, 5), Push::Queued);
        assert_eq!(queue.push(&"a", &2, 6), Push::Queued);
        assert_eq!(queue.push(&"a", &2, 7), Push::Refused(7));
        assert_eq!(queue.push(&"b", &2, 8), Push::Queued, "places count inside an App");
    }

    #[test]
    fn a_full_queue_drops_from_the_longest_line() {
        let mut queue = Queue::new(4);
        for client in 0..4 {
            assert_eq!(queue.push(&"storm", &client, u32::from(client)), Push::Queued);
        }
        assert!(matches!(queue.push(&"quiet", &1, 100), Push::Displaced(0..=3)));
        assert_eq!(queue.push(&"storm", &9, 101), Push::Refused(101), "the longest line is its own");
        assert!(matches!(queue.push(&"quiet", &2, 102), Push::Displaced(0..=3)));
        assert_eq!(queue.push(&"quiet", &3, 103), Push::Refused(103), "now the lines are equal");
        assert_eq!(queue.len(), 4);
        assert_eq!(drain(&mut queue).len(), 4);
    }

    #[test]
    fn whether_there_is_a_place_is_what_a_push_finds() {
        let mut queue = Queue::new(6);
        let mut refused = 0;
        // A walk over every mix of Apps and clients that six places allow, many times over.
        for step in 0..500_u32 {
            let (app, client) = (["a", "b", "c"][(step * 7 % 3) as usize], (step * step % 5) as u8);
            let place = queue.has_place(&app, &client);
            let pushed = queue.push(&app, &client, step);
            assert_eq!(place, !matches!(pushed, Push::Refused(_)), "step {step}");
            refused += u32::from(!place);
            if step % 4 == 3 {
                queue.pop();
            }
        }
        assert!(refused > 50 && refused < 450, "{refused}");
    }

    #[test]
    fn inside_an_app_the_longest_client_gives_way() {
        let mut queue = Queue::new(4);
        for item in 0..2 {
            queue.push(&"a", &1, item);
        }
        queue.push(&"a", &2, 10);
        queue.push(&"a", &3, 11);
        assert_eq!(queue.push(&"a", &4, 12), Push::Displaced(1));
        assert_eq!(queue.push(&"a", &5, 13), Push::Refused(13));
        assert_eq!(drain(&mut queue), [0, 10, 11, 12]);
    }
}
