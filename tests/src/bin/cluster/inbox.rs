//! The pod `inbox`: an SMTP relay with an inbox, because the test cluster has no relay.

use std::{
    future::pending,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::Result;
use latchkey_tests::{
    inbox::Inbox,
    mail::Mailbox,
    smtp::{self, Smtp},
};

pub(crate) async fn run() -> Result<()> {
    let mails = Mailbox::default();
    let on_all_interfaces = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let options = smtp::Options { addr: on_all_interfaces(2525), mails: mails.clone(), ..smtp::Options::plain() };
    let _smtp = Smtp::start(options).await?;
    let _inbox = Inbox::start(on_all_interfaces(8025), mails)?;
    pending().await
}
