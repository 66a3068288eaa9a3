//! Servers of an installation: real processes, each with the Pod and the EndpointSlice that controllers would create,
//! and the status that a kubelet would write.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    ops::Deref,
    path::Path,
    sync::atomic::Ordering,
};

use anyhow::{Context, Result};
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use latchkey_crds::names::OPS_PORT_NAME;
use serde_json::{Value, json};

use super::{Installation, apply};
use crate::{control_plane::ServiceAccountToken, process, stack::ServerProcess};

/// A `latchkey-server` process as the only container of a Pod.
pub struct ServerInPod {
    server: ServerProcess,
    pod: ServerPod,
}

/// A Pod of the servers' Service. A server, a scripted stream or nothing runs in it.
pub struct ServerPod {
    client: Client,
    namespace: String,
    service: String,
    name: String,
    uid: String,
    /// The socket address of the Pod's operations port.
    ops: SocketAddr,
}

/// Conditions of a Pod's endpoint in an EndpointSlice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
}

impl Deref for ServerInPod {
    type Target = ServerProcess;

    fn deref(&self) -> &ServerProcess {
        &self.server
    }
}

// === impl Installation ===

impl Installation<'_> {
    /// Starts a server with the chart's ServiceAccount, waits until it is ready, and makes it an endpoint.
    pub async fn start_server(&self) -> ServerInPod {
        let server = self.create_server(self.server_account(), &[]).await.expect("a server's Pod is created");
        server.start_ready().await.expect("the server is ready");
        server.set_endpoint(Endpoint::SERVING).await.expect("the server is an endpoint");
        server
    }

    /// Starts this number of servers, one after the other.
    pub async fn start_servers(&self, servers: usize) -> Vec<ServerInPod> {
        let mut started = Vec::new();
        for _ in 0..servers {
            started.push(self.start_server().await);
        }
        started
    }

    /// Creates a Pod without an endpoint. The server in the Pod is not started yet. With an account from
    /// [`crate::control_plane::ControlPlane::account_at`], the server reaches the API server through a proxy. Adds
    /// `extra_flags` to the server's command line.
    pub async fn create_server(&self, account: &ServiceAccountToken, extra_flags: &[&str]) -> Result<ServerInPod> {
        let index = self.server_count.fetch_add(1, Ordering::Relaxed);
        let public = if index == 0 { self.public } else { process::free_addr() };
        let pod = self.create_server_pod(&format!("{}-server-{index}", self.release)).await?;
        let cache = self.dir().join(format!("cache-{index}"));
        fs::create_dir_all(&cache)?;
        let mut args: Vec<String> = [
            ("--namespace", self.namespace().to_owned()),
            ("--cache-dir", cache.display().to_string()),
            ("--pod-uid", pod.uid.clone()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        args.extend(self.server_args.iter().cloned());
        args.extend(extra_flags.iter().map(|arg| (*arg).to_owned()));
        let mut envs = vec![
            ("KUBECONFIG".to_owned(), account.kubeconfig().display().to_string()),
            // Without a load balancer, a drain has nothing to wait for. A test can override this variable with a flag.
            ("LATCHKEY_DRAIN_SECONDS".to_owned(), "0".to_owned()),
        ];
        envs.extend(self.server_envs.iter().cloned());
        let server = ServerProcess::new(index, self.dir(), (public, pod.ops), &self.base_url(), &args, &envs);
        Ok(ServerInPod { server: server.wrapper(&self.server_wrapper), pod })
    }

    /// Creates a Pod without an endpoint, in which nothing runs.
    pub(super) async fn create_server_pod(&self, name: &str) -> Result<ServerPod> {
        let client = self.admin();
        let pods: Api<Pod> = Api::namespaced(client.clone(), self.namespace());
        let pod: Pod = serde_json::from_value(self.pod_manifest(name))?;
        let pod = pods.create(&PostParams::default(), &pod).await.context("creating the server's Pod")?;
        Ok(ServerPod {
            client,
            namespace: self.namespace().to_owned(),
            service: self.ops_service().to_owned(),
            name: name.to_owned(),
            uid: pod.metadata.uid.context("a Pod has a UID")?,
            ops: (machine_address()?, process::free_port()).into(),
        })
    }

    fn pod_manifest(&self, name: &str) -> Value {
        let service = self.objects().iter().find(|object| object["kind"] == "Service");
        json!({
            "metadata": {
                "name": name,
                "namespace": self.namespace(),
                "labels": service.map(|service| service["spec"]["selector"].clone()),
            },
            "spec": {
                "serviceAccountName": self.server_account().name(),
                "nodeName": "tests",
                "containers": [{ "name": "server", "image": "latchkey-server" }],
            },
        })
    }
}

// === impl ServerInPod ===

impl ServerInPod {
    /// The Pod's name.
    pub fn name(&self) -> &str {
        &self.pod.name
    }

    /// The Pod's UID, which the server reports on its revision stream.
    pub fn uid(&self) -> &str {
        &self.pod.uid
    }

    /// Writes the endpoint and the status of the server's Pod ([`ServerPod::set_endpoint`]).
    pub async fn set_endpoint(&self, endpoint: Endpoint) -> Result<()> {
        self.pod.set_endpoint(endpoint).await
    }

    /// Removes the endpoint of the server's Pod. The Pod and the process stay.
    pub async fn remove_endpoint(&self) -> Result<()> {
        self.pod.remove_endpoint().await
    }

    /// Removes the server as a rollout does: marks the endpoint as terminating, drains the server, and deletes the Pod.
    pub async fn remove(self) -> Result<()> {
        self.set_endpoint(Endpoint::TERMINATING).await?;
        self.terminate().await.context("the server drains")?;
        self.pod.remove().await
    }
}

// === impl ServerPod ===

impl ServerPod {
    /// The Pod's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The Pod's UID, which a server reports on its revision stream.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The socket address of the operations port.
    pub fn ops(&self) -> SocketAddr {
        self.ops
    }

    /// Writes the Pod's endpoint and status, as a kubelet and the EndpointSlice controller would.
    ///
    /// Each Pod has its own EndpointSlice. A slice has one port for all its endpoints, but the servers here have the
    /// same IP address and different ports.
    pub async fn set_endpoint(&self, endpoint: Endpoint) -> Result<()> {
        let condition = json!({ "type": "Ready", "status": if endpoint.serving { "True" } else { "False" } });
        let address = self.ops.ip().to_string();
        let status = json!({ "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{ "ip": address }],
            "conditions": [condition],
        }});
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        pods.patch_status(&self.name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": { "kubernetes.io/service-name": self.service },
            },
            "addressType": if self.ops.is_ipv4() { "IPv4" } else { "IPv6" },
            "endpoints": [{
                "addresses": [address],
                "conditions": {
                    "ready": endpoint.ready,
                    "serving": endpoint.serving,
                    "terminating": endpoint.terminating,
                },
                "targetRef": { "kind": "Pod", "namespace": self.namespace, "name": self.name, "uid": self.uid },
            }],
            "ports": [{ "name": OPS_PORT_NAME, "port": self.ops.port(), "protocol": "TCP" }],
        });
        apply(&self.client, &slice).await?;
        Ok(())
    }

    /// Removes the endpoint. The Pod and the process stay.
    pub async fn remove_endpoint(&self) -> Result<()> {
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &self.namespace);
        slices.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Removes the endpoint and the Pod.
    pub async fn remove(&self) -> Result<()> {
        self.remove_endpoint().await?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        pods.delete(&self.name, &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// A serving Pod.
    pub const SERVING: Self = Self { ready: true, serving: true, terminating: false };
    /// A Pod that is not ready.
    pub const NOT_READY: Self = Self { ready: false, serving: false, terminating: false };
    /// A Pod that drains and still serves.
    pub const TERMINATING: Self = Self { ready: false, serving: true, terminating: true };
}

/// An IP address of this machine other than loopback, because the API server rejects loopback addresses as endpoints.
fn machine_address() -> Result<IpAddr> {
    let table = fs::read_to_string(Path::new("/proc/net/fib_trie")).context("this machine's addresses")?;
    find_address(&table).context("this machine has no address except loopback, which an endpoint cannot have: add one")
}

/// The first IPv4 address of the machine that is neither loopback nor link-local. `table` is the content of
/// `/proc/net/fib_trie`, where a `host LOCAL` line follows the line of each of the machine's addresses.
fn find_address(table: &str) -> Option<IpAddr> {
    let mut previous_line = "";
    for line in table.lines() {
        if line.contains("/32 host LOCAL") {
            let address: Option<IpAddr> = previous_line.trim().trim_start_matches("|-- ").parse().ok();
            let usable = |address: &IpAddr| match address {
                IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
                IpAddr::V6(_) => false,
            };
            if let Some(address) = address.filter(usable) {
                return Some(address);
            }
        }
        previous_line = line;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_neither_loopback_nor_link_local_is_found() {
        let table = "\
Local:
  +-- 0.0.0.0/0 2 0 2
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 127.255.255.255
        /32 link BROADCAST
     |-- 169.254.0.1
        /32 host LOCAL
     |-- 198.51.100.7
        /32 host LOCAL
";
        assert_eq!(find_address(table), Some(IpAddr::from([198, 51, 100, 7])));
        assert_eq!(find_address("Local:\n"), None);
    }
}
