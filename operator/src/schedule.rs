//! Decides when each object of a controller is reconciled. Pure: the callers pass the time.

use std::collections::BTreeMap;

use tokio::time::Instant;

use crate::watch::NamespacedName;

/// The objects that wait for a reconcile, and the objects that are being reconciled. Other objects need no memory. The
/// maps are B-trees, because a hash map would not release its memory after a burst.
#[derive(Default)]
pub(crate) struct Schedule {
    states: BTreeMap<NamespacedName, State>,
    /// The waiting objects, in the order in which they are reconciled.
    waiting: BTreeMap<Turn, NamespacedName>,
    last_number: u64,
}

/// The time from which an object can be reconciled, and a number: of the objects with the same time, the one with the
/// lower number is first.
type Turn = (Instant, u64);

enum State {
    Waiting(Turn),
    /// `queued_at`: when the object was queued during its reconcile. It is then reconciled once more.
    Running {
        queued_at: Option<Instant>,
    },
}

// === impl Schedule ===

impl Schedule {
    /// Queues an object, which can be reconciled now. If the object is being reconciled, it is reconciled once more
    /// afterwards. If it waits for a time after `now`, this wait ends. If it already waits for its turn, it keeps its
    /// turn.
    pub(crate) fn queue(&mut self, object: NamespacedName, now: Instant) {
        match self.states.get_mut(&object) {
            None => self.wait(object, now),
            Some(State::Running { queued_at }) => *queued_at = queued_at.or(Some(now)),
            Some(State::Waiting(turn)) if turn.0 > now => {
                let later = *turn;
                self.waiting.remove(&later);
                self.wait(object, now);
            }
            Some(State::Waiting(_)) => {}
        }
    }

    /// Returns the object that is reconciled next, if any can be reconciled now. The caller must pass it to
    /// [`Self::finish`] after its reconcile.
    pub(crate) fn start_next(&mut self, now: Instant) -> Option<NamespacedName> {
        let next = self.waiting.first_entry().filter(|next| next.key().0 <= now)?;
        let object = next.remove();
        self.states.insert(object.clone(), State::Running { queued_at: None });
        Some(object)
    }

    /// Ends the reconcile of an object. If the object was queued during its reconcile, it can be reconciled again, and
    /// has waited since it was queued. Otherwise it waits until the time `next` or, if `next` is `None`, until it is
    /// queued.
    pub(crate) fn finish(&mut self, object: NamespacedName, next: Option<Instant>) {
        let next = match self.states.remove(&object) {
            Some(State::Running { queued_at: Some(queued_at) }) => Some(queued_at),
            Some(State::Running { queued_at: None } | State::Waiting(_)) | None => next,
        };
        if let Some(next) = next {
            self.wait(object, next);
        }
    }

    /// Returns the time from which the next waiting object can be reconciled. It can be in the past.
    pub(crate) fn next_time(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(turn, _)| turn.0)
    }

    fn wait(&mut self, object: NamespacedName, time: Instant) {
        self.last_number += 1;
        let turn = (time, self.last_number);
        self.states.insert(object.clone(), State::Waiting(turn));
        self.waiting.insert(turn, object);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn object(name: &str) -> NamespacedName {
        NamespacedName::new("shop", name)
    }

    /// Starts everything that can be reconciled now, and returns the names.
    fn start_all(schedule: &mut Schedule, now: Instant) -> Vec<String> {
        std::iter::from_fn(|| schedule.start_next(now)).map(|object| object.name().to_owned()).collect()
    }

    #[test]
    fn objects_are_reconciled_in_the_order_of_their_times_and_each_once() {
        let (mut schedule, begin) = (Schedule::default(), Instant::now());
        assert_eq!((schedule.next_time(), start_all(&mut schedule, begin).len()), (None, 0));
        for name in ["c", "a", "b", "a", "c"] {
            schedule.queue(object(name), begin);
        }
        schedule.queue(object("d"), begin + SECOND);
        assert_eq!(schedule.next_time(), Some(begin));
        assert_eq!(start_all(&mut schedule, begin), ["c", "a", "b"]);
        assert_eq!(schedule.next_time(), Some(begin + SECOND));
        assert_eq!(start_all(&mut schedule, begin + SECOND), ["d"]);
    }

    #[test]
    fn an_object_that_is_queued_during_its_reconcile_is_reconciled_once_more() {
        let (mut schedule, begin) = (Schedule::default(), Instant::now());
        schedule.queue(object("a"), begin);
        assert_eq!(start_all(&mut schedule, begin), ["a"]);
        schedule.queue(object("b"), begin);
        schedule.queue(object("a"), begin);
        schedule.queue(object("a"), begin);
        assert_eq!(start_all(&mut schedule, begin), ["b"], "at most one reconcile of an object runs");
        schedule.queue(object("c"), begin + SECOND);
        schedule.finish(object("a"), Some(begin + SECOND * 60));
        let started = start_all(&mut schedule, begin + SECOND);
        assert_eq!(
            started,
            ["a", "c"],
            "it does not wait for its next time, and it was queued before the other object"
        );
        schedule.finish(object("a"), None);
        assert_eq!((schedule.next_time(), start_all(&mut schedule, begin + SECOND * 99).len()), (None, 0));
    }

    #[test]
    fn an_object_that_waits_for_a_later_time_is_reconciled_when_it_is_queued() {
        let (mut schedule, begin) = (Schedule::default(), Instant::now());
        schedule.queue(object("a"), begin);
        start_all(&mut schedule, begin);
        schedule.finish(object("a"), Some(begin + SECOND * 60));
        assert_eq!((schedule.next_time(), start_all(&mut schedule, begin).len()), (Some(begin + SECOND * 60), 0));
        schedule.queue(object("a"), begin + SECOND);
        assert_eq!(start_all(&mut schedule, begin + SECOND), ["a"]);
        schedule.finish(object("a"), None);
        assert_eq!(start_all(&mut schedule, begin + SECOND * 99), [""; 0], "it does not wait for the later time, too");
    }

    #[test]
    fn an_object_that_waits_keeps_its_turn() {
        let (mut schedule, begin) = (Schedule::default(), Instant::now());
        schedule.queue(object("a"), begin);
        schedule.queue(object("b"), begin + SECOND);
        schedule.queue(object("a"), begin + SECOND * 2);
        assert_eq!(start_all(&mut schedule, begin + SECOND * 2), ["a", "b"]);
    }

    #[test]
    fn nothing_is_stored_of_objects_that_do_not_wait() {
        let (mut schedule, begin) = (Schedule::default(), Instant::now());
        for number in 0..100 {
            schedule.queue(object(&number.to_string()), begin);
        }
        while let Some(object) = schedule.start_next(begin) {
            schedule.finish(object, None);
        }
        assert!(schedule.states.is_empty() && schedule.waiting.is_empty());
    }
}
