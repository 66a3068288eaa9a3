//! Readiness: whether this process can serve requests, and if not, why.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The state that `readyz` returns. `readyz` never asks the stores: a short outage of Redis must not remove all pods
/// from the Kubernetes Service.
#[derive(Debug, Default)]
pub struct Readiness {
    is_configuration_loaded: AtomicBool,
    is_schema_ready: AtomicBool,
    is_draining: AtomicBool,
    configuration_error: Mutex<Option<String>>,
    schema_error: Mutex<Option<String>>,
}

// === impl Readiness ===

impl Readiness {
    /// Records that the Apps were loaded.
    pub fn set_configuration_loaded(&self) {
        self.is_configuration_loaded.store(true, Ordering::Release);
    }

    /// Records that the Apps cannot be read; the reason says what to do.
    pub fn set_configuration_error(&self, reason: impl Into<String>) {
        *self.configuration_error.lock() = Some(reason.into());
    }

    /// Records that the database schema is new enough. A later failure of Postgres does not change this.
    pub fn set_schema_ready(&self) {
        self.is_schema_ready.store(true, Ordering::Release);
    }

    /// Records that the schema is too old; the reason says what to do.
    pub fn set_schema_error(&self, reason: impl Into<String>) {
        *self.schema_error.lock() = Some(reason.into());
    }

    /// Records that the process was asked to end.
    pub fn set_draining(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// The reasons why this process is not ready.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.is_configuration_loaded.load(Ordering::Acquire) {
            let error = self.configuration_error.lock();
            let reason = error.as_deref().unwrap_or("the Apps are not loaded yet");
            missing.push(format!("configuration: {reason}"));
        }
        if !self.is_schema_ready.load(Ordering::Acquire) {
            let error = self.schema_error.lock();
            let reason = error.as_deref().unwrap_or("the database schema was not checked yet");
            missing.push(format!("schema: {reason}"));
        }
        if self.is_draining.load(Ordering::Acquire) {
            missing.push("draining: the process is about to end".to_owned());
        }
        missing
    }
}
