//! Entry point for fuzz targets: renders a mail, from its templates to the bytes for the relay.

use latchkey_crds::{
    rendered::{RenderedMail, SmtpRelay},
    templates::TemplateValues,
    types::{AppId, Mailbox},
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    delivery,
    relay::{self, OutgoingMail},
    settings::{InstallRelay, MailSettings},
    templates::AppTemplates,
};
use crate::domain::mail::MailKind;

/// A rendered mail.
#[derive(Debug)]
pub struct RenderedMessage {
    pub subject: String,
    pub text: String,
    pub html: String,
    /// The whole message (RFC 5322).
    pub message: Vec<u8>,
}

/// The App that sends a mail, and the installation.
#[derive(Clone, Copy, Debug)]
pub struct Sender<'a> {
    pub app: &'a AppId,
    pub display_name: &'a str,
    pub mail: &'a RenderedMail,
    /// The relay of the installation.
    pub relay: &'a SmtpRelay,
    /// The sender of the installation.
    pub from: &'a Mailbox,
}

/// Renders a mail to this email address. `None` if the mail cannot be sent.
pub fn render(sender: Sender<'_>, to: &str, kind: MailKind, values: TemplateValues<'_>) -> Option<RenderedMessage> {
    let install = InstallRelay { relay: sender.relay.clone(), from: sender.from.clone() };
    let settings = MailSettings { install: Some(install), ..MailSettings::default() };
    let route = delivery::route(sender.app, sender.display_name, sender.mail, &settings)?;
    let content = AppTemplates::new("fuzz", &sender.mail.templates).render("fuzz", kind, values).ok()?;
    let (subject, text, html) = (content.subject.clone(), content.text.clone(), content.html.clone());
    let to = lettre::message::Mailbox::new(None, to.parse().ok()?);
    let mail = OutgoingMail { id: Uuid::nil(), to, date: OffsetDateTime::UNIX_EPOCH, content };
    let message = relay::build_message(&route, mail).ok()?.formatted();
    Some(RenderedMessage { subject, text, html, message })
}
