//! A queue in which namespaces take turns. A namespace that changes thousands of Clients does not delay the changes of
//! other namespaces.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::index::NamespacedName;

/// A change that affects a Client and its App.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ClientChange {
    pub(crate) client: NamespacedName,
    pub(crate) app: NamespacedName,
}

/// The changes that wait. Equal changes wait only once, so there are at most as many as Clients.
#[derive(Default)]
pub(crate) struct FairQueue {
    waiting: Mutex<Waiting>,
    added: Notify,
}

#[derive(Default)]
struct Waiting {
    by_namespace: HashMap<String, VecDeque<Arc<ClientChange>>>,
    /// The namespaces with waiting changes, in the order of their next turns.
    turns: VecDeque<String>,
    all: HashSet<Arc<ClientChange>>,
}

// === impl FairQueue ===

impl FairQueue {
    /// Adds a change of a Client, unless an equal change is waiting.
    pub(crate) fn push(&self, change: ClientChange) {
        let change = Arc::new(change);
        let mut waiting = self.waiting.lock();
        if !waiting.all.insert(Arc::clone(&change)) {
            return;
        }
        let namespace = change.client.namespace().to_owned();
        let changes = waiting.by_namespace.entry(namespace.clone()).or_default();
        changes.push_back(change);
        if changes.len() == 1 {
            waiting.turns.push_back(namespace);
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Waits for the next change: the oldest of the namespace that has waited longest for its turn.
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
        let namespace = waiting.turns.pop_front()?;
        let changes = waiting.by_namespace.get_mut(&namespace)?;
        let change = changes.pop_front()?;
        if changes.is_empty() {
            waiting.by_namespace.remove(&namespace);
        } else {
            waiting.turns.push_back(namespace);
        }
        waiting.all.remove(&change);
        Some(Arc::unwrap_or_clone(change))
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
        // A namespace without waiting changes is at the end of the order again.
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
