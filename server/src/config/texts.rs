//! Deduplicates equal texts of documents: many Apps can reference the same ConfigMap of templates.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

/// The minimum number of entries for a sweep. With fewer entries, the entries of freed texts are not removed, because
/// they need at most 64 KiB of memory.
const MIN_SWEEP_ENTRIES: usize = 1024;

/// The texts of all documents. A text is freed when the last document that contains it is dropped.
#[derive(Default)]
pub(super) struct SharedTexts {
    hasher: RandomState,
    known: Mutex<KnownTexts>,
}

#[derive(Default)]
struct KnownTexts {
    /// The texts by their hash. After a text is freed, its `Weak` keeps only 40 bytes in memory until the next sweep.
    texts: HashMap<u64, Vec<Weak<String>>>,
    /// The number of entries at which the next sweep happens.
    sweep_at: usize,
}

// === impl SharedTexts ===

impl SharedTexts {
    /// Returns the shared copy of this text. If there is none, this text becomes the shared copy.
    pub(super) fn share(&self, text: Arc<String>) -> Arc<String> {
        let hash = self.hasher.hash_one(&*text);
        let mut known = self.known.lock();
        let same_hash = known.texts.entry(hash).or_default();
        if let Some(shared) = same_hash.iter().filter_map(Weak::upgrade).find(|shared| *shared == text) {
            return shared;
        }
        same_hash.push(Arc::downgrade(&text));
        if known.texts.len() >= known.sweep_at {
            known.sweep();
        }
        text
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.known.lock().texts.len()
    }
}

// === impl KnownTexts ===

impl KnownTexts {
    /// Removes the entries of freed texts. The next sweep happens when the number of entries has doubled, so the
    /// amortized cost per text is constant.
    fn sweep(&mut self) {
        self.texts.retain(|_, same_hash| {
            same_hash.retain(|text| text.strong_count() > 0);
            !same_hash.is_empty()
        });
        self.sweep_at = (2 * self.texts.len()).max(MIN_SWEEP_ENTRIES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_texts_are_shared() {
        let texts = SharedTexts::default();
        let share = |text: &str| texts.share(Arc::new(text.to_owned()));
        let (one, other, equal) = (share("one"), share("other"), share("one"));
        assert!(Arc::ptr_eq(&one, &equal) && !Arc::ptr_eq(&one, &other));
        assert_eq!((one.as_str(), other.as_str()), ("one", "other"));
    }

    #[test]
    fn a_text_is_freed_with_its_last_reference_and_a_sweep_removes_its_entry() {
        let texts = SharedTexts::default();
        let kept = texts.share(Arc::new("kept".to_owned()));
        for number in 0..10 * MIN_SWEEP_ENTRIES {
            let gone = Arc::downgrade(&texts.share(Arc::new(number.to_string())));
            assert!(gone.upgrade().is_none());
        }
        assert!(texts.len() <= MIN_SWEEP_ENTRIES, "{}", texts.len());
        assert!(Arc::ptr_eq(&kept, &texts.share(Arc::new("kept".to_owned()))));
    }
}
