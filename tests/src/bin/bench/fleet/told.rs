//! What the servers tell on their streams, with the time at which they told it.

use std::{collections::HashMap, time::Instant};

use anyhow::{Context, Result, ensure};
use latchkey_crds::rendered::{Revision, RevisionsLine};
use latchkey_tests::cluster::PodServer;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// A stream of each server.
pub(crate) struct Told {
    lines: mpsc::UnboundedReceiver<(usize, RevisionsLine, Instant)>,
    /// By App, what each server serves.
    serving: Vec<HashMap<String, Revision>>,
    _streams: Vec<AbortOnDropHandle<Result<()>>>,
}

// === impl Told ===

impl Told {
    /// Begins to listen to each; each has told all that it serves.
    pub(crate) async fn by(servers: &[PodServer]) -> Result<Self> {
        let (sender, lines) = mpsc::unbounded_channel();
        let client = reqwest::Client::builder().no_proxy().build()?;
        let mut streams = Vec::new();
        for (number, server) in servers.iter().enumerate() {
            let stream = listen(client.clone(), format!("http://{}/revisions", server.ops), number, sender.clone());
            streams.push(AbortOnDropHandle::new(tokio::spawn(stream)));
        }
        let mut told = Self { lines, serving: vec![HashMap::new(); servers.len()], _streams: streams };
        for _ in servers {
            let is_hello = |line: &RevisionsLine| matches!(line, RevisionsLine::Hello { .. });
            while !is_hello(&told.next().await?.0) {}
        }
        Ok(told)
    }

    /// What each server serves of an App, as far as was listened to.
    pub(crate) fn now(&self, app: &str) -> Vec<Option<Revision>> {
        self.serving.iter().map(|serving| serving.get(app).cloned()).collect()
    }

    /// Listens until every server serves another revision of the App than before, and all the same. Tells when the last
    /// of them told it.
    pub(crate) async fn changed(&mut self, app: &str, before: &[Option<Revision>]) -> Result<Instant> {
        loop {
            let at = self.next().await?.1;
            let now = self.now(app);
            let is_new = now.iter().zip(before).all(|(now, before)| now.is_some() && now != before);
            if is_new && now.windows(2).all(|pair| pair[0] == pair[1]) {
                return Ok(at);
            }
        }
    }

    async fn next(&mut self) -> Result<(RevisionsLine, Instant)> {
        let (server, line, at) = self.lines.recv().await.context("the servers' streams ended")?;
        let serving = &mut self.serving[server];
        match &line {
            RevisionsLine::Hello { hello } => {
                *serving = hello.revisions.iter().map(|(app, revision)| (app.to_string(), revision.clone())).collect();
            }
            RevisionsLine::Change(change) => {
                match &change.revision {
                    Some(revision) => serving.insert(change.app.to_string(), revision.clone()),
                    None => serving.remove(change.app.as_str()),
                };
            }
            RevisionsLine::Provider { .. } | RevisionsLine::Heartbeat { .. } => {}
        }
        Ok((line, at))
    }
}

async fn listen(
    client: reqwest::Client,
    url: String,
    server: usize,
    lines: mpsc::UnboundedSender<(usize, RevisionsLine, Instant)>,
) -> Result<()> {
    let mut response = client.get(url).send().await?;
    ensure!(response.status().is_success(), "a stream was answered {}", response.status());
    let mut buffer = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        let at = Instant::now();
        buffer.extend_from_slice(&chunk);
        while let Some(end) = buffer.iter().position(|octet| *octet == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            lines.send((server, serde_json::from_slice(&line)?, at))?;
        }
    }
    Ok(())
}
