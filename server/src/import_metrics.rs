//! Metrics of imports.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// The sources (systems or formats) from which `latchkey-server import` reads users. A caller can send any name as the
/// source of an import. Every name that is not in this list is counted as [`OTHER_SOURCE`].
const SOURCES: [&str; 7] = ["keycloak", "gotrue", "kratos", "firebase", "auth0", "cognito", "ndjson"];
const OTHER_SOURCE: &str = "other";

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct ImportMetrics {
    users: Family<Labels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    source: &'static str,
    outcome: &'static str,
}

/// The number of lines of a batch for each outcome.
#[derive(Clone, Copy, Debug)]
pub struct ImportedLines {
    pub created: usize,
    pub unchanged: usize,
    pub refused: usize,
}

// === impl ImportMetrics ===

impl ImportMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        // Create all series at the start, so that the first increase of each is visible.
        for source in SOURCES.into_iter().chain([OTHER_SOURCE]) {
            metrics.count(source, ImportedLines { created: 0, unchanged: 0, refused: 0 });
        }
        registry.register("imported_users", "Lines of imports, by source and outcome", metrics.users.clone());
        metrics
    }

    /// Counts the lines of a batch. Must not be called for a dry run. `source` is the name that the caller sent.
    pub fn count(&self, source: &str, lines: ImportedLines) {
        let source = SOURCES.into_iter().find(|known| *known == source).unwrap_or(OTHER_SOURCE);
        let ImportedLines { created, unchanged, refused } = lines;
        for (outcome, number) in [("created", created), ("unchanged", unchanged), ("refused", refused)] {
            self.users.get_or_create(&Labels { source, outcome }).inc_by(number as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_that_callers_invent_create_no_time_series() {
        let mut registry = Registry::default();
        let metrics = ImportMetrics::register(&mut registry);
        metrics.count("keycloak", ImportedLines { created: 5, unchanged: 1, refused: 2 });
        for number in 0..100 {
            metrics.count(&format!("crm-{number}"), ImportedLines { created: 1, unchanged: 0, refused: 0 });
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"imported_users_total{source="keycloak",outcome="created"} 5"#,
            r#"imported_users_total{source="keycloak",outcome="unchanged"} 1"#,
            r#"imported_users_total{source="keycloak",outcome="refused"} 2"#,
            r#"imported_users_total{source="other",outcome="created"} 100"#,
            r#"imported_users_total{source="auth0",outcome="created"} 0"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert_eq!(text.matches("outcome=").count(), (SOURCES.len() + 1) * 3, "{text}");
    }
}
