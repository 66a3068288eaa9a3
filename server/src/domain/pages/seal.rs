//! Seals state that pages give to a browser. Only the servers can read it, and nobody can change it or use it for
//! another purpose.

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, NONCE_LEN, Nonce};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;
use serde::{Serialize, de::DeserializeOwned};

use crate::domain::{app::App, clock::Env};

/// The purpose of a sealed text. A text that was sealed for one purpose cannot be opened for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SealedPurpose {
    Transaction,
    /// A transaction that is not bound to a browser: the request of a POST from another site.
    UnboundTransaction,
    Registration,
    SocialLogin,
    SocialState,
    Address,
}

// === impl SealedPurpose ===

impl SealedPurpose {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Transaction => "transaction",
            Self::UnboundTransaction => "unbound transaction",
            Self::Registration => "registration",
            Self::SocialLogin => "social login",
            Self::SocialState => "social state",
            Self::Address => "address",
        }
    }
}

/// Seals the content with the App's active key. The text can be opened only with the same `bound_to`, for example the
/// browser.
pub(super) fn seal(env: &Env, app: &App, purpose: SealedPurpose, bound_to: &str, content: &impl Serialize) -> String {
    let nonce: [u8; NONCE_LEN] = env.random_bytes();
    let mut sealed = serde_json::to_vec(content).expect("the content is strings and numbers");
    app.keys
        .active_hmac()
        .pages
        .sealed()
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(associated_data(app.id(), purpose, bound_to)),
            &mut sealed,
        )
        .expect("the content is far shorter than what can be sealed");
    URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat())
}

/// The number of characters of the sealed content.
pub(super) fn sealed_chars(content: &impl Serialize) -> usize {
    let json = serde_json::to_vec(content).expect("the content is strings and numbers");
    base64::encoded_len(NONCE_LEN + json.len() + AES_256_GCM_SIV.tag_len(), false).unwrap_or(usize::MAX)
}

/// Opens a sealed text with any HMAC key that the App still has. Returns `None` if the text has more than `max_chars`
/// characters, or was sealed for another App, purpose or `bound_to`, or was changed.
pub(super) fn open<T: DeserializeOwned>(
    app: &App,
    purpose: SealedPurpose,
    bound_to: &str,
    sealed: &str,
    max_chars: usize,
) -> Option<T> {
    if sealed.len() > max_chars {
        return None;
    }
    let sealed = URL_SAFE_NO_PAD.decode(sealed).ok()?;
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
    let associated = associated_data(app.id(), purpose, bound_to);
    app.keys.all_hmac().find_map(|key| {
        let mut buffer = sealed.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = key.pages.sealed().open_in_place(nonce, Aad::from(&associated), &mut buffer).ok()?;
        serde_json::from_slice(opened).ok()
    })
}

fn associated_data(app: &AppId, purpose: SealedPurpose, bound_to: &str) -> Vec<u8> {
    // The purpose and the appID contain no newline.
    format!("{}\n{app}\n{bound_to}", purpose.as_str()).into_bytes()
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::{KeyState, RenderedApp};

    use super::*;
    use crate::fixtures;

    const MAX: usize = 200;

    fn open_text(app: &App, purpose: SealedPurpose, bound_to: &str, sealed: &str) -> Option<String> {
        open(app, purpose, bound_to, sealed, MAX)
    }

    #[test]
    fn a_sealed_text_opens_only_for_its_app_purpose_and_browser() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let env = Env::system();
        let sealed = seal(&env, &app, SealedPurpose::Transaction, "browser", &"content");
        let open_here = |sealed: &str| open_text(&app, SealedPurpose::Transaction, "browser", sealed);
        assert_eq!(open_here(&sealed).as_deref(), Some("content"));
        assert!(!sealed.contains("content"));
        assert_ne!(seal(&env, &app, SealedPurpose::Transaction, "browser", &"content"), sealed, "a new nonce");
        assert_eq!(sealed_chars(&"content"), sealed.len());
        for other in [
            SealedPurpose::UnboundTransaction,
            SealedPurpose::Registration,
            SealedPurpose::SocialLogin,
            SealedPurpose::SocialState,
            SealedPurpose::Address,
        ] {
            assert_eq!(open_text(&app, other, "browser", &sealed), None, "{other:?}");
        }
        assert_eq!(open_text(&app, SealedPurpose::Transaction, "other browser", &sealed), None);
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert_eq!(open_text(&other, SealedPurpose::Transaction, "browser", &sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(open_here(std::str::from_utf8(&changed).unwrap()), None, "character {at}");
        }
        for truncated in ["", "A", "AAAA", &sealed[..16], &sealed[1..]] {
            assert_eq!(open_here(truncated), None, "{truncated}");
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_not_opened() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let sealed = seal(&Env::system(), &app, SealedPurpose::Transaction, "", &"x".repeat(MAX));
        assert_eq!(open_text(&app, SealedPurpose::Transaction, "", &sealed), None);
        assert!(open::<String>(&app, SealedPurpose::Transaction, "", &sealed, sealed.len()).is_some());
    }

    #[test]
    fn a_sealed_text_opens_while_its_key_is_retired() {
        let mut doc = fixtures::rendered("shop");
        let old = fixtures::app(doc.clone());
        let sealed = seal(&Env::system(), &old, SealedPurpose::Transaction, "", &"content");
        doc.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        assert!(open_text(&fixtures::app(doc.clone()), SealedPurpose::Transaction, "", &sealed).is_some());
        doc.keys.hmac.remove(0);
        assert!(open_text(&fixtures::app(doc), SealedPurpose::Transaction, "", &sealed).is_none());
    }
}
