//! Which server pods there are, by the EndpointSlices of the ops Service.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use latchkey_crds::names::OPS_PORT_NAME;

/// What the EndpointSlices say of a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    /// It is serving, and not about to end.
    pub(super) counts: bool,
}

/// The pods in all slices together, by uid.
pub(super) fn seen<'a>(slices: impl Iterator<Item = &'a EndpointSlice>) -> HashMap<String, Seen> {
    let mut pods: HashMap<String, Seen> = HashMap::new();
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref() == Some(OPS_PORT_NAME)).and_then(|port| port.port);
        let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { continue };
        for endpoint in &slice.endpoints {
            let Some(target) = &endpoint.target_ref else { continue };
            let Some(uid) = target.uid.clone() else { continue };
            let Some(Ok(ip)) = endpoint.addresses.first().map(|address| address.parse::<IpAddr>()) else { continue };
            let conditions = endpoint.conditions.as_ref();
            // What is not said counts as serving and not terminating, as Kubernetes has it.
            let serving = conditions.and_then(|c| c.serving.or(c.ready)).unwrap_or(true);
            let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
            let name = target.name.clone().unwrap_or_else(|| uid.clone());
            let one = Seen { name, address: SocketAddr::new(ip, port), counts: serving && !terminating };
            match pods.get_mut(&uid) {
                // A dual-stack Service has the pod in a slice of each family, and while a controller moves it from one
                // slice to another it may be in two. Any address that stays the same will do.
                Some(known) => {
                    known.address = known.address.min(one.address);
                    known.counts = known.counts || one.counts;
                }
                None => {
                    pods.insert(uid, one);
                }
            }
        }
    }
    pods
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(endpoints: &Value) -> EndpointSlice {
        let slice = json!({
            "addressType": "IPv4",
            "metadata": { "name": "one" },
            "ports": [{ "name": "other", "port": 1 }, { "name": "ops", "port": 9090 }],
            "endpoints": endpoints,
        });
        serde_json::from_value(slice).unwrap()
    }

    fn endpoint(uid: &str, address: &str, conditions: &Value) -> Value {
        let target = json!({ "kind": "Pod", "name": format!("server-{uid}"), "uid": uid });
        json!({ "addresses": [address], "conditions": conditions, "targetRef": target })
    }

    fn counts(conditions: &Value) -> bool {
        seen([slice(&json!([endpoint("a", "10.0.0.1", conditions)]))].iter())["a"].counts
    }

    #[test]
    fn a_pod_counts_while_it_serves_and_does_not_end() {
        assert!(counts(&json!({ "ready": true, "serving": true, "terminating": false })));
        assert!(counts(&json!({})), "what is not said counts as serving");
        assert!(!counts(&json!({ "ready": false, "serving": false, "terminating": false })));
        assert!(!counts(&json!({ "ready": false, "serving": true, "terminating": true })), "it drains");
        assert!(!counts(&json!({ "ready": false })), "serving follows ready where it is not said");
    }

    #[test]
    fn all_slices_together_are_the_pods() {
        let slices = [
            slice(&json!([endpoint("a", "10.0.0.1", &json!({})), endpoint("b", "10.0.0.2", &json!({}))])),
            slice(&json!([endpoint("c", "10.0.0.3", &json!({})), endpoint("a", "fd00::1", &json!({}))])),
        ];
        let forth = seen(slices.iter());
        assert_eq!(forth.len(), 3);
        let a = Seen { name: "server-a".into(), address: "10.0.0.1:9090".parse().unwrap(), counts: true };
        assert_eq!(forth["a"], a);
        assert_eq!(forth, seen(slices.iter().rev()), "the order of the slices does not move a stream");
    }

    #[test]
    fn what_is_no_pod_is_passed_over() {
        let mut nameless = slice(&json!([endpoint("a", "10.0.0.1", &json!({}))]));
        nameless.ports = None;
        let broken = slice(&json!([
            { "addresses": ["10.0.0.1"] },
            { "addresses": [], "targetRef": { "uid": "b" } },
            { "addresses": ["an.fqdn"], "targetRef": { "uid": "c" } },
        ]));
        assert!(seen([nameless, broken].iter()).is_empty());
    }
}
