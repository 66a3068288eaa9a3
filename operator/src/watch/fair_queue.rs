//! A queue in which namespaces take turns. A namespace that changes thousands of Clients does not delay the changes of
//! other namespaces, nor its own deletions of Clients.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::index::NamespacedName;

/// A change that affects a Client and its App.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientChange {
    pub(crate) client: NamespacedName,
    /// The App of the Client. The name is empty if the App is not known.
    pub(crate) app: NamespacedName,
}

/// The changes that wait to be handled. Equal changes wait only once, so the queue is bounded by the number of existing
/// and just deleted Clients.
#[derive(Default)]
pub(crate) struct FairQueue {
    waiting: Mutex<Waiting>,
    added: Notify,
}

#[derive(Default)]
struct Waiting {
    by_namespace: HashMap<String, NamespaceChanges>,
    /// The namespaces with waiting changes, in the order of their next turns.
    turns: VecDeque<String>,
    /// All waiting changes, and whether each is a deletion. Not a hash map, which would keep its memory after a burst.
    all: BTreeMap<Arc<ClientChange>, bool>,
}

/// The waiting changes of one namespace. If a change waits and the Client is then deleted, the change is in both lists,
/// but is handled only once.
#[derive(Default)]
struct NamespaceChanges {
    /// Deletions have priority, so that a deleted Client does not stay served while many other changes are handled.
    deletions: VecDeque<Arc<ClientChange>>,
    others: VecDeque<Arc<ClientChange>>,
}

// === impl FairQueue ===

impl FairQueue {
    /// Adds a change of a Client, unless an equal change is waiting.
    pub(crate) fn push(&self, change: ClientChange) {
        self.add(change, false);
    }

    /// Adds the deletion of a Client. It is handled before the other changes of its namespace.
    pub(crate) fn push_deletion(&self, change: ClientChange) {
        self.add(change, true);
    }

    fn add(&self, change: ClientChange, is_deletion: bool) {
        let change = Arc::new(change);
        let mut waiting = self.waiting.lock();
        let Waiting { by_namespace, turns, all } = &mut *waiting;
        if all.get(&change).is_some_and(|is_known_deletion| *is_known_deletion || !is_deletion) {
            return;
        }
        all.insert(Arc::clone(&change), is_deletion);
        let namespace = change.client.namespace().to_owned();
        let changes = by_namespace.entry(namespace.clone()).or_default();
        if changes.is_empty() {
            turns.push_back(namespace);
        }
        if is_deletion {
            changes.deletions.push_back(change);
        } else {
            changes.others.push_back(change);
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Waits for the next change of the namespace that has waited longest for its turn: the oldest deletion or, without
    /// deletions, the oldest other change.
    pub(crate) async fn pop(&self) -> ClientChange {
        loop {
            if let Some(change) = self.try_pop() {
                return change;
            }
            // If a change is added between `try_pop` and here, `notified` returns immediately.
            self.added.notified().await;
        }
    }

    pub(crate) fn try_pop(&self) -> Option<ClientChange> {
        let mut waiting = self.waiting.lock();
        let Waiting { by_namespace, turns, all } = &mut *waiting;
        loop {
            let namespace = turns.pop_front()?;
            let changes = by_namespace.get_mut(&namespace)?;
            // A change that is in both lists may already have been handled as a deletion.
            let next = std::iter::from_fn(|| changes.pop()).find(|change| all.remove(change).is_some());
            if changes.is_empty() {
                by_namespace.remove(&namespace);
            } else {
                turns.push_back(namespace);
            }
            if let Some(change) = next {
                return Some(Arc::unwrap_or_clone(change));
            }
        }
    }
}

// === impl NamespaceChanges ===

impl NamespaceChanges {
    fn pop(&mut self) -> Option<Arc<ClientChange>> {
        self.deletions.pop_front().or_else(|| self.others.pop_front())
    }

    fn is_empty(&self) -> bool {
        self.deletions.is_empty() && self.others.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(namespace: &str, name: &str) -> ClientChange {
        ClientChange { client: NamespacedName::new(namespace, name), app: NamespacedName::new("identity", "platform") }
    }

    fn popped(queue: &FairQueue) -> Vec<String> {
        std::iter::from_fn(|| queue.try_pop())
            .map(|change| format!("{}/{}", change.client.namespace(), change.client.name()))
            .collect()
    }

    #[test]
    fn namespaces_take_turns() {
        let queue = FairQueue::default();
        for number in 0..4 {
            queue.push(change("storm", &number.to_string()));
        }
        queue.push(change("calm", "one"));
        queue.push(change("other", "one"));
        assert_eq!(popped(&queue), ["storm/0", "calm/one", "other/one", "storm/1", "storm/2", "storm/3"]);
        // A namespace without waiting changes has left the order. With its next change, it joins the order again.
        queue.push(change("calm", "two"));
        assert_eq!(popped(&queue), ["calm/two"]);
    }

    #[test]
    fn an_equal_change_waits_only_once() {
        let queue = FairQueue::default();
        for _ in 0..3 {
            queue.push(change("shop", "one"));
        }
        queue.push(ClientChange { app: NamespacedName::new("identity", "another"), ..change("shop", "one") });
        assert_eq!(popped(&queue), ["shop/one", "shop/one"]);
        queue.push(change("shop", "one"));
        assert_eq!(popped(&queue), ["shop/one"], "it can wait again");
    }

    #[test]
    fn deletions_are_handled_before_the_other_changes_of_a_namespace() {
        let queue = FairQueue::default();
        for number in 0..4 {
            queue.push(change("storm", &number.to_string()));
        }
        queue.push(change("calm", "one"));
        queue.push_deletion(change("storm", "2"));
        queue.push_deletion(change("storm", "gone"));
        queue.push(change("storm", "gone"));
        assert_eq!(popped(&queue), ["storm/2", "calm/one", "storm/gone", "storm/0", "storm/1", "storm/3"]);
        queue.push_deletion(change("storm", "2"));
        assert_eq!(popped(&queue), ["storm/2"], "it can wait again");
    }

    #[tokio::test]
    async fn a_waiting_reader_gets_a_change_that_is_added_later() {
        let queue = Arc::new(FairQueue::default());
        let reader = Arc::clone(&queue);
        let task = tokio::spawn(async move { reader.pop().await });
        tokio::task::yield_now().await;
        queue.push(change("shop", "one"));
        assert_eq!(task.await.unwrap(), change("shop", "one"));
    }
}
