//! Mails as recipients see them, and the mailbox that contains them.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use mailparse::{MailHeaderMap, ParsedMail};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::process;

/// Maximum number of mails in a mailbox. If more arrive, the oldest are removed.
const MAX_MAILS: usize = 500;
/// Characters of a code: Crockford's base32 (specification: Sessions and tokens, Codes).
const CODE_SYMBOLS: &str = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/// A mail with its envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mail {
    /// A number that increases with each accepted mail.
    pub id: u64,
    /// The first code in the text.
    pub code: Option<String>,
    /// Unix time in seconds.
    pub received_at: u64,
    /// The sender of the envelope.
    pub envelope_from: String,
    /// The recipients of the envelope.
    pub to: Vec<String>,
    /// The `From` header, with the display name.
    pub from: String,
    pub subject: String,
    pub text: String,
    pub html: String,
    /// All headers in their order, decoded.
    pub headers: Vec<(String, String)>,
    /// The raw mail, with U+FFFD instead of bytes that are not UTF-8.
    pub raw: String,
}

/// The mails that an SMTP server accepted. Clones share the same mailbox.
#[derive(Clone)]
pub struct Mailbox {
    inner: Arc<Inner>,
}

struct Inner {
    mails: Mutex<Vec<Arc<Mail>>>,
    /// The id of the newest mail. A change wakes waiting tasks.
    newest: watch::Sender<u64>,
    /// The folder with one file per mail, if the mails must survive a restart.
    folder: Option<PathBuf>,
}

/// The first code (`XXXXX-XXXXX`) in a text.
pub fn find_code(text: &str) -> Option<String> {
    let is_symbols = |part: &str| part.len() == 5 && part.chars().all(|symbol| CODE_SYMBOLS.contains(symbol));
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
        .find(|word| word.split_once('-').is_some_and(|(left, right)| is_symbols(left) && is_symbols(right)))
        .map(str::to_owned)
}

// === impl Mail ===

impl Mail {
    pub fn parse(id: u64, envelope_from: &str, to: &[String], raw: &[u8]) -> Result<Self> {
        let parsed = mailparse::parse_mail(raw).context("a mail that is not a MIME message")?;
        let (mut text, mut html) = (String::new(), String::new());
        collect_bodies(&parsed, &mut text, &mut html)?;
        let header = |name: &str| parsed.headers.get_first_value(name).unwrap_or_default();
        Ok(Self {
            id,
            received_at: now(),
            envelope_from: envelope_from.to_owned(),
            to: to.to_vec(),
            from: header("From"),
            subject: header("Subject"),
            headers: parsed.headers.iter().map(|header| (header.get_key(), header.get_value())).collect(),
            code: find_code(&text),
            text,
            html,
            raw: String::from_utf8_lossy(raw).into_owned(),
        })
    }

    /// The code in the mail. Panics if there is none.
    pub fn code(&self) -> String {
        self.code.clone().unwrap_or_else(|| panic!("no code in the mail {:?}:\n{}", self.subject, self.text))
    }

    pub fn is_to(&self, email: &str) -> bool {
        self.to.iter().any(|to| to.eq_ignore_ascii_case(email))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

fn collect_bodies(part: &ParsedMail<'_>, text: &mut String, html: &mut String) -> Result<()> {
    match part.ctype.mimetype.as_str() {
        "text/plain" if text.is_empty() => *text = part.get_body()?.replace("\r\n", "\n"),
        "text/html" if html.is_empty() => *html = part.get_body()?.replace("\r\n", "\n"),
        _ => {}
    }
    part.subparts.iter().try_for_each(|part| collect_bodies(part, text, html))
}

#[expect(clippy::disallowed_methods, reason = "an inbox shows when a mail came")]
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

// === impl Mailbox ===

impl Default for Mailbox {
    fn default() -> Self {
        Self::new(None, Vec::new())
    }
}

impl Mailbox {
    /// A mailbox that keeps its mails in a folder. It starts with the mails that the folder contains.
    pub fn open(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let mut mails: Vec<Arc<Mail>> = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            // A file that does not parse was left incomplete by a crash.
            if let Ok(mail) = serde_json::from_slice(&fs::read(&path)?) {
                mails.push(Arc::new(mail));
            }
        }
        mails.sort_by_key(|mail| mail.id);
        Ok(Self::new(Some(folder.to_owned()), mails))
    }

    fn new(folder: Option<PathBuf>, mails: Vec<Arc<Mail>>) -> Self {
        let newest = watch::Sender::new(mails.last().map_or(0, |mail| mail.id));
        Self { inner: Arc::new(Inner { mails: Mutex::new(mails), newest, folder }) }
    }

    /// Adds a mail that an SMTP server accepted.
    pub fn deliver(&self, envelope_from: &str, to: &[String], raw: &[u8]) -> Result<()> {
        let mut mails = process::lock(&self.inner.mails);
        let id = *self.inner.newest.borrow() + 1;
        let mail = Arc::new(Mail::parse(id, envelope_from, to, raw)?);
        if let Some(folder) = &self.inner.folder {
            crate::postgres::write_private(&mail_path(folder, id), &serde_json::to_string(&*mail)?)?;
        }
        mails.push(mail);
        let too_many = mails.len().saturating_sub(MAX_MAILS);
        for removed in mails.drain(..too_many) {
            self.remove_file(removed.id);
        }
        drop(mails);
        self.inner.newest.send_replace(id);
        Ok(())
    }

    /// All mails, oldest first.
    pub fn all(&self) -> Vec<Arc<Mail>> {
        process::lock(&self.inner.mails).clone()
    }

    pub fn get(&self, id: u64) -> Option<Arc<Mail>> {
        process::lock(&self.inner.mails).iter().find(|mail| mail.id == id).cloned()
    }

    /// All mails to one email address, oldest first.
    pub fn to(&self, email: &str) -> Vec<Arc<Mail>> {
        self.all().into_iter().filter(|mail| mail.is_to(email)).collect()
    }

    pub fn clear(&self) {
        for removed in process::lock(&self.inner.mails).drain(..) {
            self.remove_file(removed.id);
        }
        // Wakes the inbox pages, so that they remove the mails.
        self.inner.newest.send_modify(|_| {});
    }

    /// A receiver that is notified about every change.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.inner.newest.subscribe()
    }

    /// The newest mail that matches. If there is none, waits for one up to the limit.
    pub async fn find(&self, fits: impl Fn(&Mail) -> bool, limit: Duration) -> Option<Arc<Mail>> {
        let mut changes = self.watch();
        tokio::time::timeout(limit, async {
            loop {
                changes.borrow_and_update();
                if let Some(mail) = self.all().into_iter().rev().find(|mail| fits(mail)) {
                    return mail;
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        })
        .await
        .ok()
    }

    /// Like [`Mailbox::find`], but if no mail matches within the limit, panics with a list of the mails.
    pub async fn wait_for(&self, fits: impl Fn(&Mail) -> bool, limit: Duration) -> Arc<Mail> {
        self.find(fits, limit).await.unwrap_or_else(|| {
            let arrived: Vec<String> =
                self.all().iter().map(|mail| format!("{} to {}", mail.subject, mail.to.join(", "))).collect();
            panic!("no such mail within {limit:?}; there are {}: {arrived:#?}", arrived.len())
        })
    }

    fn remove_file(&self, id: u64) {
        if let Some(folder) = &self.inner.folder {
            drop(fs::remove_file(mail_path(folder, id)));
        }
    }
}

fn mail_path(folder: &Path, id: u64) -> PathBuf {
    folder.join(format!("{id:08}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MULTIPART: &str = "From: =?utf-8?q?The_Sh=C3=B6p?= <hello@shop.test>\r\nTo: ada@example.com\r\n\
        Subject: Confirm\r\nMIME-Version: 1.0\r\nContent-Type: multipart/alternative; boundary=b\r\n\r\n\
        --b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n\
        Your code: 7K3MQ-W0=\r\nZ9X, for you.\r\n--b\r\nContent-Type: text/html; charset=utf-8\r\n\r\n\
        <p>hi</p>\r\n--b--\r\n";

    #[test]
    fn a_mail_is_parsed() {
        let mail = Mail::parse(1, "bounce@shop.test", &["ada@example.com".to_owned()], MULTIPART.as_bytes()).unwrap();
        assert_eq!(mail.from, "The Shöp <hello@shop.test>");
        assert_eq!(mail.subject, "Confirm");
        assert_eq!(mail.code(), "7K3MQ-W0Z9X");
        assert_eq!(mail.html.trim(), "<p>hi</p>");
        assert_eq!(mail.header("mime-version"), Some("1.0"));
        assert!(mail.is_to("Ada@Example.com"));
    }

    #[test]
    fn only_a_complete_code_is_found() {
        assert_eq!(find_code("call 555-0100 or use https://x.test/?code=ABCDE-12345."), Some("ABCDE-12345".to_owned()));
        for incomplete in ["ABCDE-1234", "ABCDE-123456", "ABCDU-12345", "abcde-12345", ""] {
            assert_eq!(find_code(incomplete), None, "{incomplete}");
        }
    }

    #[test]
    fn mails_survive_in_a_folder_and_the_oldest_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mails = Mailbox::open(folder.path()).unwrap();
        for _ in 0..MAX_MAILS + 2 {
            mails.deliver("a@x.test", &["b@x.test".to_owned()], b"Subject: s\r\n\r\nt\r\n").unwrap();
        }
        let reopened = Mailbox::open(folder.path()).unwrap().all();
        assert_eq!(reopened.len(), MAX_MAILS);
        assert_eq!((reopened[0].id, reopened[MAX_MAILS - 1].id), (3, MAX_MAILS as u64 + 2));
    }
}
