//! Caches the results of one run of the renderer for the next run, so that a run computes only what has changed since
//! the previous run.

use std::{collections::HashMap, fmt, mem, sync::Arc};

use parking_lot::{Mutex, MutexGuard};

/// The results of the previous and the current run, by the name of the object or document. A result is reused as long
/// as its input is the same.
pub(crate) struct RunCache<I, R>(Mutex<Runs<I, R>>);

struct Runs<I, R> {
    previous: Results<I, R>,
    current: Results<I, R>,
    /// How many results this run computed.
    computed: usize,
}

type Results<I, R> = HashMap<String, (I, Arc<R>)>;

// === impl RunCache ===

impl<I, R> Default for RunCache<I, R> {
    fn default() -> Self {
        Self(Mutex::new(Runs { previous: HashMap::new(), current: HashMap::new(), computed: 0 }))
    }
}

impl<I, R> fmt::Debug for RunCache<I, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunCache(…)")
    }
}

impl<I: PartialEq, R> RunCache<I, R> {
    /// Begins a run. Results that the last run did not use are dropped.
    pub(crate) fn begin_run(&self) {
        let mut runs = self.runs();
        runs.previous = mem::take(&mut runs.current);
        runs.computed = 0;
    }

    /// Returns how many results this run computed.
    #[cfg(test)]
    pub(crate) fn computed(&self) -> usize {
        self.runs().computed
    }

    /// Returns the result for this input: from the previous run if the input is equal, otherwise from `compute`.
    pub(crate) fn get_or_compute(&self, name: &str, input: I, compute: impl FnOnce(&I) -> R) -> Arc<R> {
        let previous = self.runs().previous.remove(name);
        let (input, result) = match previous {
            Some(previous) if previous.0 == input => previous,
            Some(_) | None => {
                let result = Arc::new(compute(&input));
                self.runs().computed += 1;
                (input, result)
            }
        };
        self.runs().current.insert(name.to_owned(), (input, Arc::clone(&result)));
        result
    }

    fn runs(&self) -> MutexGuard<'_, Runs<I, R>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_reused_while_its_input_is_equal_and_every_run_requests_it() {
        let cache = RunCache::default();
        let get = |name: &str, input: usize| *cache.get_or_compute(name, input, |input| input * 2);
        cache.begin_run();
        assert_eq!((get("a", 1), get("b", 2), cache.computed()), (2, 4, 2));
        cache.begin_run();
        assert_eq!((get("a", 1), get("b", 3), cache.computed()), (2, 6, 1));
        cache.begin_run();
        assert_eq!((get("a", 1), cache.computed()), (2, 0));
        cache.begin_run();
        assert_eq!((get("a", 1), get("b", 3), cache.computed()), (2, 6, 1));
    }
}
