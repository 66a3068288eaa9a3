//! The pod `stranger`: which addresses a pod can connect to.

use std::time::Duration;

use tokio::{net::TcpStream, time::timeout};

#[derive(clap::Args)]
pub(crate) struct ReachArgs {
    /// Addresses to connect to, each as `HOST:PORT`.
    addresses: Vec<String>,
}

/// Time limit for a connection. Packets that a NetworkPolicy drops get no response at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// What the program logs for an address that accepts connections.
pub(crate) fn accepts_line(address: &str) -> String {
    format!("{address} accepts connections")
}

pub(crate) async fn run(options: &ReachArgs) {
    for address in &options.addresses {
        match timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
            Ok(Ok(_)) => println!("{}", accepts_line(address)),
            Ok(Err(error)) => println!("{address}: {error}"),
            Err(_) => println!("{address}: no connection within {CONNECT_LIMIT:?}"),
        }
    }
}
