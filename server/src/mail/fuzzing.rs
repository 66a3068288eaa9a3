//! What fuzz targets call: a mail from its templates to the bytes that a relay gets.

use latchkey_crds::{
    rendered::{RenderedMail, SmtpRelay},
    templates::Values,
    types::{AppId, Mailbox},
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    InstallRelay, MailSettings, delivery,
    relay::{self, Letter},
    templates::Templates,
};
use crate::domain::mail::MailKind;

/// A mail as it was written.
#[derive(Debug)]
pub struct Written {
    pub subject: String,
    pub text: String,
    pub html: String,
    /// The whole message (RFC 5322).
    pub message: Vec<u8>,
}

/// The App that a mail is of.
#[derive(Clone, Copy, Debug)]
pub struct Sender<'a> {
    pub app: &'a AppId,
    pub display_name: &'a str,
    pub mail: &'a RenderedMail,
    /// The install's own relay and sender.
    pub relay: &'a SmtpRelay,
    pub from: &'a Mailbox,
}

/// Writes a mail to this address. None if it cannot be sent.
pub fn write(sender: Sender<'_>, to: &str, kind: MailKind, values: Values<'_>) -> Option<Written> {
    let install = InstallRelay { relay: sender.relay.clone(), from: sender.from.clone() };
    let settings = MailSettings { install: Some(install), ..MailSettings::default() };
    let route = delivery::route(sender.app, sender.display_name, sender.mail, &settings)?;
    let content = Templates::new("fuzz", &sender.mail.templates).render("fuzz", kind, values).ok()?;
    let (subject, text, html) = (content.subject.clone(), content.text.clone(), content.html.clone());
    let to = lettre::message::Mailbox::new(None, to.parse().ok()?);
    let letter = Letter { id: Uuid::nil(), to, at: OffsetDateTime::UNIX_EPOCH, content };
    let message = relay::message(&route, letter).ok()?.formatted();
    Some(Written { subject, text, html, message })
}
