//! The revisions that servers report on their streams, with the time at which each report arrived.

use std::{collections::HashMap, time::Instant};

use anyhow::{Context, Result, ensure};
use latchkey_crds::rendered::{Revision, RevisionsMessage};
use latchkey_tests::cluster::ServerInPod;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// The revision streams of all servers.
pub(crate) struct RevisionStreams {
    /// The messages, each with the index of its server and the time at which it arrived.
    lines: mpsc::UnboundedReceiver<(usize, RevisionsMessage, Instant)>,
    /// For each server, the revision of each App that it serves.
    serving: Vec<HashMap<String, Revision>>,
    _streams: Vec<AbortOnDropHandle<Result<()>>>,
}

// === impl RevisionStreams ===

impl RevisionStreams {
    /// Connects to each server and reads the first message (hello), which lists all revisions that the server serves.
    pub(crate) async fn connect(servers: &[ServerInPod]) -> Result<Self> {
        let (sender, lines) = mpsc::unbounded_channel();
        let client = reqwest::Client::builder().no_proxy().build()?;
        let mut streams = Vec::new();
        for (number, server) in servers.iter().enumerate() {
            let stream =
                read_stream(client.clone(), format!("http://{}/revisions", server.ops), number, sender.clone());
            streams.push(AbortOnDropHandle::new(tokio::spawn(stream)));
        }
        let mut this = Self { lines, serving: vec![HashMap::new(); servers.len()], _streams: streams };
        for _ in servers {
            let is_hello = |line: &RevisionsMessage| matches!(line, RevisionsMessage::Hello { .. });
            while !is_hello(&this.next_line().await?.0) {}
        }
        Ok(this)
    }

    /// The revision of an App that each server serves, according to the reports so far.
    pub(crate) fn revisions_of(&self, app: &str) -> Vec<Option<Revision>> {
        self.serving.iter().map(|serving| serving.get(app).cloned()).collect()
    }

    /// Waits until all servers serve the same new revision of the App. Returns the time at which the last report
    /// arrived.
    pub(crate) async fn wait_for_change(&mut self, app: &str, before: &[Option<Revision>]) -> Result<Instant> {
        loop {
            let arrived_at = self.next_line().await?.1;
            let current = self.revisions_of(app);
            let is_new = current.iter().zip(before).all(|(current, before)| current.is_some() && current != before);
            if is_new && current.windows(2).all(|pair| pair[0] == pair[1]) {
                return Ok(arrived_at);
            }
        }
    }

    async fn next_line(&mut self) -> Result<(RevisionsMessage, Instant)> {
        let (server, line, arrived_at) = self.lines.recv().await.context("the servers' streams ended")?;
        let serving = &mut self.serving[server];
        match &line {
            RevisionsMessage::Hello { hello } => {
                *serving = hello.revisions.iter().map(|(app, revision)| (app.to_string(), revision.clone())).collect();
            }
            RevisionsMessage::Change(change) => {
                match &change.revision {
                    Some(revision) => serving.insert(change.app.to_string(), revision.clone()),
                    None => serving.remove(change.app.as_str()),
                };
            }
            RevisionsMessage::Provider { .. } | RevisionsMessage::Heartbeat { .. } => {}
        }
        Ok((line, arrived_at))
    }
}

async fn read_stream(
    client: reqwest::Client,
    url: String,
    server: usize,
    lines: mpsc::UnboundedSender<(usize, RevisionsMessage, Instant)>,
) -> Result<()> {
    let mut response = client.get(url).send().await?;
    ensure!(response.status().is_success(), "the revision stream returned {}", response.status());
    let mut buffer = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        let arrived_at = Instant::now();
        buffer.extend_from_slice(&chunk);
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            lines.send((server, serde_json::from_slice(&line)?, arrived_at))?;
        }
    }
    Ok(())
}
