//! Equal texts of documents, held once: many Apps can name one ConfigMap of templates.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// Entries below which texts that are gone are not looked for: 64 KiB of memory.
const MIN_SWEEP: usize = 1024;

/// The texts of all documents that are held. A text is freed with the last document that has it.
#[derive(Default)]
pub(super) struct SharedTexts {
    hasher: RandomState,
    known: Mutex<KnownTexts>,
}

#[derive(Default)]
struct KnownTexts {
    /// By hash; a `Weak` keeps no text, only 40 bytes until the next sweep.
    texts: HashMap<u64, Vec<Weak<String>>>,
    sweep_at: usize,
}

// === impl SharedTexts ===

impl SharedTexts {
    /// Gives the copy of this text that is held already, or remembers this one.
    pub(super) fn share(&self, text: Arc<String>) -> Arc<String> {
        let hash = self.hasher.hash_one(&*text);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.known.lock().unwrap_or_else(PoisonError::into_inner).texts.len()
    }
}

// === impl KnownTexts ===

impl KnownTexts {
    /// Removes the entries of texts that are gone. The next sweep comes when as many were added as are left, so that a
    /// text costs a constant number of looks.
    fn sweep(&mut self) {
        self.texts.retain(|_, same_hash| {
            same_hash.retain(|text| text.strong_count() > 0);
            !same_hash.is_empty()
        });
        self.sweep_at = (2 * self.texts.len()).max(MIN_SWEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_one_and_others_are_not() {
        let texts = SharedTexts::default();
        let share = |text: &str| texts.share(Arc::new(text.to_owned()));
        let (one, other, equal) = (share("one"), share("other"), share("one"));
        assert!(Arc::ptr_eq(&one, &equal) && !Arc::ptr_eq(&one, &other));
        assert_eq!((one.as_str(), other.as_str()), ("one", "other"));
    }

    #[test]
    fn a_text_is_freed_with_its_last_holder_and_its_entry_with_a_sweep() {
        let texts = SharedTexts::default();
        let kept = texts.share(Arc::new("kept".to_owned()));
        for number in 0..10 * MIN_SWEEP {
            let gone = Arc::downgrade(&texts.share(Arc::new(number.to_string())));
            assert!(gone.upgrade().is_none());
        }
        assert!(texts.len() <= MIN_SWEEP, "{}", texts.len());
        assert!(Arc::ptr_eq(&kept, &texts.share(Arc::new("kept".to_owned()))));
    }
}
