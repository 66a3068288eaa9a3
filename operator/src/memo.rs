//! Results of the run before, so that a run works only on what changed since.

use std::{
    collections::HashMap,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Results by the name of what they are made for. A result is used again while its input is equal.
pub(crate) struct Memo<I, R>(Mutex<Runs<I, R>>);

struct Runs<I, R> {
    before: Results<I, R>,
    now: Results<I, R>,
    /// How many results this run made.
    made: usize,
}

type Results<I, R> = HashMap<String, (I, Arc<R>)>;

// === impl Memo ===

impl<I, R> Default for Memo<I, R> {
    fn default() -> Self {
        Self(Mutex::new(Runs { before: HashMap::new(), now: HashMap::new(), made: 0 }))
    }
}

impl<I, R> fmt::Debug for Memo<I, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memo(…)")
    }
}

impl<I: PartialEq, R> Memo<I, R> {
    /// Begins a run. Results that the last run did not use are dropped.
    pub(crate) fn begin(&self) {
        let mut runs = self.runs();
        runs.before = mem::take(&mut runs.now);
        runs.made = 0;
    }

    /// How many results this run made.
    #[cfg(test)]
    pub(crate) fn made(&self) -> usize {
        self.runs().made
    }

    /// The result for this input.
    pub(crate) fn get(&self, name: &str, input: I, make: impl FnOnce(&I) -> R) -> Arc<R> {
        let before = self.runs().before.remove(name);
        let (input, result) = match before {
            Some(before) if before.0 == input => before,
            Some(_) | None => {
                let result = Arc::new(make(&input));
                self.runs().made += 1;
                (input, result)
            }
        };
        self.runs().now.insert(name.to_owned(), (input, Arc::clone(&result)));
        result
    }

    fn runs(&self) -> MutexGuard<'_, Runs<I, R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_used_again_while_its_input_is_equal_and_somebody_asks_for_it() {
        let memo = Memo::default();
        let get = |name: &str, input: usize| *memo.get(name, input, |input| input * 2);
        memo.begin();
        assert_eq!((get("a", 1), get("b", 2), memo.made()), (2, 4, 2));
        memo.begin();
        assert_eq!((get("a", 1), get("b", 3), memo.made()), (2, 6, 1));
        memo.begin();
        assert_eq!((get("a", 1), memo.made()), (2, 0));
        memo.begin();
        assert_eq!((get("a", 1), get("b", 3), memo.made()), (2, 6, 1));
    }
}
