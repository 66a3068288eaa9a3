//! The pod `inbox`: an SMTP relay with an inbox, because the test cluster has no relay. Other pods read the codes of
//! mails there.

use std::{
    future::pending,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context, Result};
use latchkey_tests::{
    inbox::Inbox,
    mail::Mailbox,
    smtp::{self, Smtp},
};
use serde_json::Value;
use url::Url;

/// Time limit for a mail to arrive, in seconds. Normally, a mail arrives within a few seconds.
const MAIL_SECONDS: u64 = 60;

pub(crate) async fn run() -> Result<()> {
    let mails = Mailbox::default();
    let on_all_interfaces = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let options = smtp::Options { addr: on_all_interfaces(2525), mails: mails.clone(), ..smtp::Options::plain() };
    let _smtp = Smtp::start(options).await?;
    let _inbox = Inbox::start(on_all_interfaces(8025), mails)?;
    pending().await
}

/// Waits for a mail to this address that is newer than the mail with the id `after`. Returns the code and the id of the
/// newest such mail. `inbox` is the URL of the inbox, with an IP address.
pub(crate) async fn wait_for_code(
    http: &reqwest::Client,
    inbox: &Url,
    email: &str,
    after: u64,
) -> Result<(String, u64)> {
    let mut url = inbox.join("api/messages/latest")?;
    let (after, wait) = (after.to_string(), MAIL_SECONDS.to_string());
    url.query_pairs_mut().extend_pairs([("to", email), ("after", &*after), ("wait", &*wait)]);
    let mail: Value = http.get(url).send().await?.error_for_status().context("the mail")?.json().await?;
    let code = mail["code"].as_str().with_context(|| format!("no code: {mail}"))?;
    Ok((code.to_owned(), mail["id"].as_u64().context("a mail has an id")?))
}
