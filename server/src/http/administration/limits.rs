//! Limits for the calls in flight. Each server counts only its own calls.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use latchkey_crds::types::AppId;
use parking_lot::Mutex;

use crate::{
    callers::ServiceAccount,
    http::{
        error::{ErrorCode, Problem},
        response::{Body, Response},
        routes::AdministrationRoute,
    },
};

/// Maximum numbers of calls in flight (specification: Administration, Rules for all calls).
const MAX_PER_CALLER: usize = 8;
const MAX_PER_APP: usize = 32;
const MAX_IMPORTS_PER_APP: usize = 2;
const MAX_EXPORTS_PER_APP: usize = 2;
/// Maximum number of large responses in flight, over all callers and Apps. A page of 500 users has up to 4 MiB of
/// metadata.
const MAX_LARGE_RESPONSES: usize = 8;
/// Maximum number of large responses in flight to all callers of one namespace together.
const MAX_LARGE_RESPONSES_PER_NAMESPACE: usize = 4;
const RETRY_AFTER_SECONDS: u64 = 1;

/// Counts the calls in flight.
#[derive(Clone)]
pub struct CallLimits {
    counts: Arc<Mutex<HashMap<Key, usize>>>,
    /// Maximum number of concurrent calls that fetch webhook events. Most of these calls are waiting for an event.
    max_fetches: usize,
}

/// The calls that are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// The calls of a ServiceAccount to all Apps.
    Caller {
        namespace: String,
        name: String,
    },
    App(AppId),
    Imports(AppId),
    Exports(AppId),
    LargeResponses,
    Fetches,
    /// The large responses to the callers of a namespace. A limit per App would not be enough: a tenant can have many
    /// Apps.
    LargeResponsesOf(String),
}

/// Counts a call as in flight until the permit is dropped.
pub(super) struct CallPermit {
    limits: CallLimits,
    keys: Vec<Key>,
}

/// A body that keeps the permit of its call until the last byte is sent.
struct PermitBody {
    inner: Body,
    _permit: CallPermit,
}

// === impl CallLimits ===

impl CallLimits {
    /// Limits for a listener with this number of connections. Calls that wait for events use at most half of the
    /// connections. The other half stays for other calls.
    pub(super) fn new(connections: usize) -> Self {
        Self { counts: Arc::default(), max_fetches: (connections / 2).max(1) }
    }

    /// Counts a call.
    ///
    /// # Errors
    ///
    /// 429 if one of the limits for this call is reached. In that case, nothing is counted.
    pub(super) fn admit(
        &self,
        app: &AppId,
        caller: &ServiceAccount,
        route: AdministrationRoute,
    ) -> Result<CallPermit, Problem> {
        let (namespace, name) = (caller.namespace().to_owned(), caller.name().to_owned());
        let mut limits = vec![(Key::Caller { namespace, name }, MAX_PER_CALLER)];
        // Calls that wait for events do not count against the limit of the App. Otherwise such calls could block the
        // administrators of the App.
        if route == AdministrationRoute::FetchEvents {
            limits.push((Key::Fetches, self.max_fetches));
        } else {
            limits.push((Key::App(app.clone()), MAX_PER_APP));
        }
        match route {
            AdministrationRoute::ImportUsers => limits.push((Key::Imports(app.clone()), MAX_IMPORTS_PER_APP)),
            AdministrationRoute::ExportUsers => limits.push((Key::Exports(app.clone()), MAX_EXPORTS_PER_APP)),
            _ => {}
        }
        let has_large_response = matches!(
            route,
            AdministrationRoute::ListUsers
                | AdministrationRoute::ExportUsers
                | AdministrationRoute::ExportUser
                | AdministrationRoute::Events
        );
        if has_large_response {
            limits.push((Key::LargeResponses, MAX_LARGE_RESPONSES));
            limits.push((Key::LargeResponsesOf(caller.namespace().to_owned()), MAX_LARGE_RESPONSES_PER_NAMESPACE));
        }
        let mut counts = self.counts.lock();
        if limits.iter().any(|(key, limit)| counts.get(key).copied().unwrap_or(0) >= *limit) {
            return Err(too_many_calls());
        }
        for (key, _) in &limits {
            *counts.entry(key.clone()).or_insert(0) += 1;
        }
        drop(counts);
        Ok(CallPermit { limits: self.clone(), keys: limits.into_iter().map(|(key, _)| key).collect() })
    }
}

fn too_many_calls() -> Problem {
    let description = "too many calls are in flight; end one, or try again after the time in Retry-After";
    let problem =
        Problem::new(ErrorCode::RateLimited, description).with_header(RETRY_AFTER, RETRY_AFTER_SECONDS.into());
    Problem { refusal_retry_after: Some(Duration::from_secs(RETRY_AFTER_SECONDS)), ..problem }
}

// === impl CallPermit ===

impl CallPermit {
    /// Keeps the call in flight until its response is sent or its connection ends.
    pub(super) fn hold_until_sent(self, response: Response) -> Response {
        response.map(|inner| PermitBody { inner, _permit: self }.boxed_unsync())
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let mut counts = self.limits.counts.lock();
        for key in &self.keys {
            if let Some(count) = counts.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(key);
                }
            }
        }
    }
}

// === impl PermitBody ===

impl HttpBody for PermitBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    /// Never reports the end: hyper drops a body that has reported its end, even if not all bytes are sent yet.
    fn is_end_stream(&self) -> bool {
        false
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::response;

    fn admit(limits: &CallLimits, app: &str, caller: &str, route: AdministrationRoute) -> Option<CallPermit> {
        admit_from("shop", limits, app, caller, route)
    }

    fn admit_from(
        namespace: &str,
        limits: &CallLimits,
        app: &str,
        caller: &str,
        route: AdministrationRoute,
    ) -> Option<CallPermit> {
        limits.admit(&app.parse().unwrap(), &ServiceAccount::named(namespace, caller), route).ok()
    }

    #[test]
    fn a_caller_can_have_eight_calls_in_flight_over_all_apps() {
        let limits = CallLimits::new(80);
        let apps = ["one", "two"].into_iter().cycle();
        let mut permits: Vec<_> =
            apps.take(8).map(|app| admit(&limits, app, "a", AdministrationRoute::ReadUser).unwrap()).collect();
        assert!(admit(&limits, "three", "a", AdministrationRoute::ReadUser).is_none());
        assert!(admit(&limits, "one", "b", AdministrationRoute::ReadUser).is_some());
        permits.pop();
        assert!(admit(&limits, "three", "a", AdministrationRoute::ReadUser).is_some());
    }

    #[test]
    fn at_most_eight_large_responses_are_in_flight_and_at_most_four_of_a_namespace() {
        let limits = CallLimits::new(80);
        let numbers: Vec<_> = (0..8).map(|number| (format!("app-{number}"), format!("caller-{number}"))).collect();
        let list = |namespace: &str, (app, caller): &(String, String)| {
            admit_from(namespace, &limits, app, caller, AdministrationRoute::ListUsers)
        };
        let mut permits: Vec<_> = numbers[..4].iter().map(|names| list("one", names).unwrap()).collect();
        assert!(list("one", &numbers[4]).is_none(), "a namespace can have four");
        permits.extend(numbers[4..].iter().map(|names| list("two", names).unwrap()));
        for route in [AdministrationRoute::ListUsers, AdministrationRoute::ExportUsers, AdministrationRoute::Events] {
            assert!(admit(&limits, "shop", "a", route).is_none());
        }
        assert!(admit(&limits, "shop", "a", AdministrationRoute::ReadUser).is_some());
        permits.pop();
        assert!(admit(&limits, "shop", "a", AdministrationRoute::ListUsers).is_some());
    }

    #[test]
    fn an_app_can_have_two_imports_two_exports_and_32_calls_in_flight() {
        let limits = CallLimits::new(80);
        let mut permits = Vec::new();
        for route in [AdministrationRoute::ImportUsers, AdministrationRoute::ExportUsers] {
            permits.extend(["a", "b"].map(|caller| admit(&limits, "shop", caller, route).unwrap()));
            assert!(admit(&limits, "shop", "c", route).is_none());
            assert!(admit(&limits, "blog", "c", route).is_some());
        }
        let callers = (0..28).map(|number| format!("caller-{number}"));
        permits.extend(callers.map(|name| admit(&limits, "shop", &name, AdministrationRoute::ReadUser).unwrap()));
        assert!(admit(&limits, "shop", "another", AdministrationRoute::ReadUser).is_none());
        permits.clear();
        assert!(limits.counts.lock().is_empty());
    }

    #[test]
    fn fetches_do_not_count_against_their_app_and_use_at_most_half_of_the_connections() {
        let limits = CallLimits::new(80);
        let consumers = (0..4).map(|number| format!("consumer-{number}"));
        let fetch = |name: &str| admit(&limits, "shop", name, AdministrationRoute::FetchEvents);
        let _waiting: Vec<_> = consumers.flat_map(|name| [(); 8].map(|()| fetch(&name).unwrap())).collect();
        assert!(fetch("consumer-0").is_none());
        let further: Vec<_> = (4..).map_while(|number| fetch(&format!("consumer-{number}"))).collect();
        assert_eq!(further.len(), 8, "40 calls can fetch: half of the connections");
        assert!(admit(&limits, "shop", "a", AdministrationRoute::ReadUser).is_some());
    }

    #[test]
    fn a_call_is_in_flight_until_its_response_is_dropped() {
        let limits = CallLimits::new(80);
        let permit = admit(&limits, "shop", "a", AdministrationRoute::ReadUser).unwrap();
        let response = permit.hold_until_sent(response::empty_object().unwrap());
        assert_eq!(limits.counts.lock().len(), 2);
        drop(response);
        assert!(limits.counts.lock().is_empty());
    }
}
