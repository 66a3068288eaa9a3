//! The condition messages while the users of an App are being deleted.

use crate::{
    app::{keys::secret::UnusableReason, status::pod_names},
    monitor::RolloutState,
};

/// Returns the condition message about the progress of the deletion. `users_left` is `None` until a server reports a
/// number.
pub(super) fn progress_message(rollout: &RolloutState, users_left: Option<u64>) -> String {
    let progress = match (rollout, users_left) {
        (RolloutState::NoServers, _) => "no server pod is running that could delete the users".to_owned(),
        (RolloutState::Complete { .. }, Some(left)) => format!("{left} left"),
        (RolloutState::Complete { .. }, None) => {
            "the servers have not started; if this does not change, check that they can reach Postgres".to_owned()
        }
        (RolloutState::Rejected { pod, reason }, _) => format!("server pod {pod} rejects it: {reason}"),
        (RolloutState::KeysLost { pod }, _) => {
            format!("server pod {pod} rejects it: the users have other keys, which are lost")
        }
        (RolloutState::Silent { pods }, _) => format!("{} sent nothing for 15 s; check its log", pod_names(pods)),
        (RolloutState::Behind { pods } | RolloutState::Undecided { pods }, _) => {
            format!("waiting for {} to stop serving the App", pod_names(pods))
        }
    };
    with_advice(&progress)
}

/// Returns the condition message of a deletion that waits because the key Secret of the App cannot be used.
pub(super) fn stuck_message(why: &UnusableReason) -> String {
    with_advice(&format!("the key Secret of the App cannot be used: {why}; restore it from a backup"))
}

fn with_advice(progress: &str) -> String {
    format!(
        "deleting the users: {progress}; to keep the remaining users and delete the App at once, set \
         spec.deletionPolicy to Retain"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_says_how_to_keep_the_remaining_users() {
        for rollout in [
            RolloutState::NoServers,
            RolloutState::Complete { servers: 2 },
            RolloutState::Undecided { pods: Vec::new() },
        ] {
            assert!(progress_message(&rollout, Some(7)).contains("set spec.deletionPolicy to Retain"));
        }
        assert!(stuck_message(&UnusableReason::NotKeyDocument).contains("set spec.deletionPolicy to Retain"));
        let rejected = RolloutState::Rejected { pod: "server-1".into(), reason: "they belong to another App".into() };
        assert!(
            progress_message(&rejected, None).contains("server pod server-1 rejects it: they belong to another App")
        );
        assert!(
            progress_message(&RolloutState::Complete { servers: 2 }, Some(7)).contains("deleting the users: 7 left")
        );
    }
}
