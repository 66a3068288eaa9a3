//! Computes the condition Delivering from what the servers report about the webhooks of an App.

use latchkey_crds::{
    app::AppStatus,
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason},
    types::WebhookName,
    webhook::WebhookState,
};

use super::{condition, to_desired};
use crate::monitor::WebhookStates;

/// Returns the condition, or `None` if the App has no webhooks. `without_keys` lists the webhooks with a Secret that
/// cannot be used; their events wait. `reported` is what the servers report now.
pub(super) fn delivering(
    webhooks: &[WebhookName],
    without_keys: &[WebhookName],
    reported: &WebhookStates,
    old: &AppStatus,
    generation: i64,
) -> Option<DesiredCondition> {
    if webhooks.is_empty() {
        return None;
    }
    let states = || webhooks.iter().filter_map(|name| Some((name, *reported.get(name)?)));
    let worst = states().map(|(_, state)| state).max();
    Some(match worst {
        None | Some(WebhookState::Delivering) if !without_keys.is_empty() => waiting_for_keys(without_keys),
        // Servers that have just started have not reported yet, so the previous condition does not change.
        None => previous_condition(old, generation).unwrap_or_else(|| pending(webhooks)),
        Some(WebhookState::Delivering) => {
            let unreported: Vec<_> = webhooks.iter().filter(|name| !reported.contains_key(*name)).cloned().collect();
            if unreported.is_empty() {
                DesiredCondition::new(ConditionType::Delivering, ConditionStatus::True, Reason::Delivering, "")
            } else {
                pending(&unreported)
            }
        }
        Some(worst) => {
            let messages: Vec<_> = states().filter_map(|(name, state)| message(name, state)).collect();
            DesiredCondition::new(
                ConditionType::Delivering,
                ConditionStatus::False,
                worst.reason(),
                messages.join("; "),
            )
        }
    })
}

/// Returns the previous condition, if it is about this generation of the App.
fn previous_condition(old: &AppStatus, generation: i64) -> Option<DesiredCondition> {
    let before = condition(old, ConditionType::Delivering)?;
    if before.observed_generation == Some(generation) { to_desired(ConditionType::Delivering, before) } else { None }
}

fn pending(webhooks: &[WebhookName]) -> DesiredCondition {
    let names: Vec<_> = webhooks.iter().map(WebhookName::as_str).collect();
    let message = format!("no server has reported on webhook {} yet", names.join(", "));
    DesiredCondition::new(ConditionType::Delivering, ConditionStatus::Unknown, Reason::Pending, message)
}

fn waiting_for_keys(webhooks: &[WebhookName]) -> DesiredCondition {
    let names: Vec<_> = webhooks.iter().map(WebhookName::as_str).collect();
    let message = format!("events wait: the Secret of webhook {} cannot be used (ResolvedRefs)", names.join(", "));
    DesiredCondition::new(ConditionType::Delivering, ConditionStatus::Unknown, Reason::Pending, message)
}

/// Returns what is wrong with the webhook and what to do, or `None` if nothing is wrong.
fn message(name: &WebhookName, state: WebhookState) -> Option<String> {
    let what = match state {
        WebhookState::Delivering => return None,
        WebhookState::ReceiverFails => "the last 10 deliveries failed; check the receiver",
        WebhookState::ReceiverGone => {
            "the receiver responded with 410, so nothing is sent to it; change the webhook or its Secret to start again"
        }
        WebhookState::ConsumerBehind => "its oldest event has waited for more than 24 hours; check the consumer",
    };
    Some(format!("webhook {name}: {what}"))
}

#[cfg(test)]
mod tests {
    use latchkey_crds::conditions::merge_conditions;
    use time::OffsetDateTime;

    use super::*;
    use crate::status::to_k8s_time;

    fn names(names: &[&str]) -> Vec<WebhookName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn states(states: &[(&str, WebhookState)]) -> WebhookStates {
        states.iter().map(|(name, state)| (name.parse().unwrap(), *state)).collect()
    }

    fn status_with(condition: &DesiredCondition, generation: i64) -> AppStatus {
        let now = to_k8s_time(OffsetDateTime::UNIX_EPOCH);
        let conditions = merge_conditions(&[], std::slice::from_ref(condition), generation, &now);
        AppStatus { conditions, ..AppStatus::default() }
    }

    fn of_new_app(webhooks: &[&str], reported: &[(&str, WebhookState)]) -> DesiredCondition {
        delivering(&names(webhooks), &[], &states(reported), &AppStatus::default(), 1).unwrap()
    }

    #[test]
    fn an_app_without_webhooks_has_no_condition() {
        let reported = states(&[("crm", WebhookState::ReceiverFails)]);
        assert_eq!(delivering(&[], &[], &reported, &AppStatus::default(), 1), None);
    }

    #[test]
    fn the_condition_is_true_if_every_webhook_delivers() {
        let all =
            of_new_app(&["crm", "sync"], &[("crm", WebhookState::Delivering), ("sync", WebhookState::Delivering)]);
        assert_eq!((all.status, all.reason), (ConditionStatus::True, Reason::Delivering));
        let some = of_new_app(&["crm", "sync"], &[("crm", WebhookState::Delivering)]);
        assert_eq!((some.status, some.reason), (ConditionStatus::Unknown, Reason::Pending));
        assert_eq!(some.message, "no server has reported on webhook sync yet");
    }

    #[test]
    fn the_condition_has_the_worst_reason_and_names_every_failing_webhook() {
        use WebhookState::{ConsumerBehind, Delivering, ReceiverFails, ReceiverGone};
        let webhooks = ["a", "b", "c", "d"];
        let condition = of_new_app(
            &webhooks,
            &[("a", Delivering), ("b", ConsumerBehind), ("c", ReceiverGone), ("d", ReceiverFails), ("e", ReceiverGone)],
        );
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::ReceiverGone));
        for name in ["webhook b: ", "webhook c: ", "webhook d: "] {
            assert!(condition.message.contains(name), "{}", condition.message);
        }
        assert!(!condition.message.contains("webhook a") && !condition.message.contains("webhook e"));
        for state in [ConsumerBehind, ReceiverFails] {
            let condition = of_new_app(&["a"], &[("a", state)]);
            assert_eq!((condition.status, condition.reason), (ConditionStatus::False, state.reason()));
        }
    }

    #[test]
    fn servers_that_have_just_started_do_not_change_the_condition() {
        let fails = of_new_app(&["crm"], &[("crm", WebhookState::ReceiverFails)]);
        let old = status_with(&fails, 1);
        let none = WebhookStates::new();
        assert_eq!(delivering(&names(&["crm"]), &[], &none, &old, 1), Some(fails));
        let edited = delivering(&names(&["crm"]), &[], &none, &old, 2).unwrap();
        assert_eq!((edited.status, edited.reason), (ConditionStatus::Unknown, Reason::Pending), "an edited App");
    }

    #[test]
    fn a_webhook_with_an_unusable_secret_does_not_deliver() {
        let without_keys = names(&["crm"]);
        let condition = |reported: &[(&str, WebhookState)], old: &AppStatus| {
            delivering(&names(&["crm", "sync"]), &without_keys, &states(reported), old, 1).unwrap()
        };
        let sync = [("sync", WebhookState::Delivering)];
        let waiting = condition(&sync, &AppStatus::default());
        assert_eq!((waiting.status, waiting.reason), (ConditionStatus::Unknown, Reason::Pending));
        assert_eq!(waiting.message, "events wait: the Secret of webhook crm cannot be used (ResolvedRefs)");
        // This is also the condition if the previous condition has the status `True`.
        let delivered = of_new_app(&["sync"], &sync);
        assert_eq!(condition(&[], &status_with(&delivered, 1)), waiting);
        let fails = condition(&[("sync", WebhookState::ConsumerBehind)], &AppStatus::default());
        assert_eq!(fails.reason, Reason::ConsumerBehind);
    }
}
