//! Reads the server pods from the EndpointSlices of the Service of the servers' operations port.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use latchkey_crds::names::OPS_PORT_NAME;

/// A pod according to the EndpointSlices.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PodEndpoint {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    /// Whether the pod is serving and not terminating.
    pub(super) is_serving: bool,
}

/// Returns the pods of all slices, by uid.
pub(super) fn pods_of_slices<'a>(slices: impl Iterator<Item = &'a EndpointSlice>) -> HashMap<String, PodEndpoint> {
    let mut pods: HashMap<String, PodEndpoint> = HashMap::new();
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref() == Some(OPS_PORT_NAME)).and_then(|port| port.port);
        let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { continue };
        for endpoint in &slice.endpoints {
            let Some(target) = &endpoint.target_ref else { continue };
            let Some(uid) = target.uid.clone() else { continue };
            let Some(Ok(ip)) = endpoint.addresses.first().map(|address| address.parse::<IpAddr>()) else { continue };
            let conditions = endpoint.conditions.as_ref();
            // Missing conditions mean serving and not terminating (Kubernetes API, EndpointConditions).
            let serving = conditions.and_then(|c| c.serving.or(c.ready)).unwrap_or(true);
            let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
            let name = target.name.clone().unwrap_or_else(|| uid.clone());
            let found = PodEndpoint { name, address: SocketAddr::new(ip, port), is_serving: serving && !terminating };
            match pods.get_mut(&uid) {
                // In a dual-stack Service, the pod is in one slice for each IP family. A pod that is moved between
                // slices can be in both slices. Any of its IP addresses is fine, but the choice must be stable.
                Some(listed) => {
                    listed.address = listed.address.min(found.address);
                    listed.is_serving = listed.is_serving || found.is_serving;
                }
                None => {
                    pods.insert(uid, found);
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

    fn is_serving(conditions: &Value) -> bool {
        pods_of_slices([slice(&json!([endpoint("a", "10.0.0.1", conditions)]))].iter())["a"].is_serving
    }

    #[test]
    fn a_pod_is_serving_while_ready_and_not_terminating() {
        assert!(is_serving(&json!({ "ready": true, "serving": true, "terminating": false })));
        assert!(is_serving(&json!({})), "a missing condition means serving");
        assert!(!is_serving(&json!({ "ready": false, "serving": false, "terminating": false })));
        assert!(!is_serving(&json!({ "ready": false, "serving": true, "terminating": true })), "it is draining");
        assert!(!is_serving(&json!({ "ready": false })), "a missing serving condition follows ready");
    }

    #[test]
    fn all_slices_together_list_the_pods() {
        let slices = [
            slice(&json!([endpoint("a", "10.0.0.1", &json!({})), endpoint("b", "10.0.0.2", &json!({}))])),
            slice(&json!([endpoint("c", "10.0.0.3", &json!({})), endpoint("a", "fd00::1", &json!({}))])),
        ];
        let listed_pods = pods_of_slices(slices.iter());
        assert_eq!(listed_pods.len(), 3);
        let a = PodEndpoint { name: "server-a".into(), address: "10.0.0.1:9090".parse().unwrap(), is_serving: true };
        assert_eq!(listed_pods["a"], a);
        assert_eq!(listed_pods, pods_of_slices(slices.iter().rev()), "the order of the slices does not move a stream");
    }

    #[test]
    fn endpoints_without_a_pod_are_ignored() {
        let mut without_ports = slice(&json!([endpoint("a", "10.0.0.1", &json!({}))]));
        without_ports.ports = None;
        let broken = slice(&json!([
            { "addresses": ["10.0.0.1"] },
            { "addresses": [], "targetRef": { "uid": "b" } },
            { "addresses": ["an.fqdn"], "targetRef": { "uid": "c" } },
        ]));
        assert!(pods_of_slices([without_ports, broken].iter()).is_empty());
    }
}
