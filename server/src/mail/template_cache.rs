//! A cache of compiled templates. Apps with the same template texts share the compiled templates.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::templates::AppTemplates;

/// The maximum size of all template sources in the cache, in bytes: as much as four ConfigMaps of 256 KiB contain. A
/// compiled template needs up to ten times the size of its source.
const MAX_SOURCE_BYTES: usize = 1024 * 1024;
/// The maximum number of sets in the cache. A set is the compiled templates of one App, or of Apps with the same texts.
/// Each set also contains the compiled layout, about 20 KiB.
const MAX_SETS: usize = 128;

/// The sources of an App's templates by template name, as in the App's rendered document.
type Sources = BTreeMap<String, Arc<String>>;

/// A bounded cache that evicts the least recently used set.
#[derive(Default)]
pub(super) struct TemplateCache(Mutex<VecDeque<CompiledSet>>);

struct CompiledSet {
    /// `Weak`, because the cache must not keep the texts of removed Apps in memory. Rendered documents share equal
    /// texts, so `matches` compares only memory addresses. While a `Weak` exists, its memory address is not reused.
    sources: BTreeMap<String, Weak<String>>,
    source_bytes: usize,
    templates: Arc<AppTemplates>,
}

// === impl TemplateCache ===

impl TemplateCache {
    /// Returns the compiled templates of these sources. `app` names the App in the log.
    pub(super) fn get(&self, app: &str, sources: &Sources) -> Arc<AppTemplates> {
        if let Some(templates) = self.find(sources) {
            return templates;
        }
        // Compile without the lock, because compiling takes milliseconds.
        let templates = Arc::new(AppTemplates::new(app, sources));
        let set = CompiledSet {
            sources: sources.iter().map(|(name, source)| (name.clone(), Arc::downgrade(source))).collect(),
            source_bytes: sources.values().map(|source| source.len()).sum(),
            templates: Arc::clone(&templates),
        };
        let mut sets = self.0.lock();
        sets.retain(CompiledSet::is_in_use);
        sets.push_front(set);
        let mut bytes = 0;
        let fitting = sets.iter().take(MAX_SETS).take_while(|set| {
            bytes += set.source_bytes;
            bytes <= MAX_SOURCE_BYTES
        });
        let count = fitting.count();
        sets.truncate(count);
        templates
    }

    fn find(&self, sources: &Sources) -> Option<Arc<AppTemplates>> {
        let mut sets = self.0.lock();
        let at = sets.iter().position(|set| set.matches(sources))?;
        let found = sets.remove(at)?;
        let templates = Arc::clone(&found.templates);
        sets.push_front(found);
        Some(templates)
    }
}

// === impl CompiledSet ===

impl CompiledSet {
    fn matches(&self, sources: &Sources) -> bool {
        self.sources.len() == sources.len()
            && self
                .sources
                .iter()
                .zip(sources)
                .all(|((name, source), (other, text))| name == other && source.as_ptr() == Arc::as_ptr(text))
    }

    fn is_in_use(&self) -> bool {
        self.sources.values().all(|source| source.strong_count() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(text: &Arc<String>) -> Sources {
        BTreeMap::from([("confirm.txt".to_owned(), Arc::clone(text))])
    }

    fn len(cache: &TemplateCache) -> usize {
        cache.0.lock().len()
    }

    #[test]
    fn apps_with_the_same_texts_share_their_compiled_templates() {
        let cache = TemplateCache::default();
        let (text, other) = (Arc::new("{{ code }}".to_owned()), Arc::new("Code: {{ code }}".to_owned()));
        let first = cache.get("shop", &sources(&text));
        assert!((0..700).all(|number| Arc::ptr_eq(&first, &cache.get(&number.to_string(), &sources(&text)))));
        assert!(!Arc::ptr_eq(&first, &cache.get("other", &sources(&other))));
        let none = cache.get("plain", &Sources::new());
        assert!(Arc::ptr_eq(&none, &cache.get("bare", &Sources::new())));
        assert_eq!(len(&cache), 3);
    }

    #[test]
    fn the_least_recently_used_set_is_evicted_and_unused_sets_are_dropped() {
        let cache = TemplateCache::default();
        let text = |number: usize| Arc::new(format!("{number} {{{{ code }}}}"));
        let texts: Vec<_> = (0..MAX_SETS + 1).map(text).collect();
        let first = cache.get("shop", &sources(&texts[0]));
        texts[1..MAX_SETS].iter().for_each(|text| drop(cache.get("shop", &sources(text))));
        assert!(Arc::ptr_eq(&first, &cache.get("shop", &sources(&texts[0]))));
        cache.get("shop", &sources(&texts[MAX_SETS]));
        assert_eq!(len(&cache), MAX_SETS);
        assert!(Arc::ptr_eq(&first, &cache.get("shop", &sources(&texts[0]))), "the first set was used more recently");
        drop(texts);
        cache.get("shop", &Sources::new());
        assert_eq!(len(&cache), 1);
    }

    #[test]
    fn the_sources_in_the_cache_are_bounded() {
        let cache = TemplateCache::default();
        let texts: Vec<_> = (0..10_usize).map(|number| Arc::new(number.to_string().repeat(250 * 1024))).collect();
        texts.iter().for_each(|text| drop(cache.get("shop", &sources(text))));
        assert_eq!(len(&cache), 4);
    }
}
