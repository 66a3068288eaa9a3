//! The field `csrf` in the forms that are sent to a page: another site cannot read this field, so it cannot send such a
//! form. Also the field `user` in the account forms: it ensures that a form changes only the account that it shows.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use super::browser::BrowserId;
use crate::domain::{app::App, keys::mac_for_app, user::UserId};

/// The length of each field: an HMAC-SHA-256 in base64url.
const CHARS: usize = 43;

/// The value of the field `csrf` for the forms of this App in this browser. It does not depend on a session, so that
/// the login form is protected, too.
pub fn csrf_token(app: &App, browser: &BrowserId) -> String {
    token(app, browser.as_bytes())
}

/// Whether the text is a value of the field `csrf` of this App in this browser, made with any HMAC key that the App
/// still has.
pub fn is_valid_csrf_token(app: &App, browser: &BrowserId, text: &str) -> bool {
    is_valid(app, browser.as_bytes(), text)
}

/// The value of the field `user` for the forms of this user's account. The same browser can log in as another user
/// while a form is open.
pub fn user_token(app: &App, user: UserId) -> String {
    token(app, &user_content(user))
}

/// Whether the text is a value of the field `user` of this user's forms, made with any HMAC key that the App still has.
pub fn is_valid_user_token(app: &App, user: UserId, text: &str) -> bool {
    is_valid(app, &user_content(user), text)
}

/// The bytes from which the field `user` is computed. They are longer than a browser id, so a value of one field is
/// never valid in the other field.
fn user_content(user: UserId) -> Vec<u8> {
    [&b"user\n"[..], user.0.as_bytes()].concat()
}

fn token(app: &App, content: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(mac_for_app(&app.keys.active_hmac().pages.csrf(), app.id(), content))
}

fn is_valid(app: &App, content: &[u8], text: &str) -> bool {
    if text.len() != CHARS {
        return false;
    }
    let Ok(sent) = URL_SAFE_NO_PAD.decode(text) else { return false };
    app.keys.all_hmac().any(|key| {
        let expected = mac_for_app(&key.pages.csrf(), app.id(), content);
        verify_slices_are_equal(expected.as_ref(), &sent).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::{KeyState, RenderedApp};
    use uuid::Uuid;

    use super::*;
    use crate::{domain::clock::Env, fixtures};

    #[test]
    fn a_form_is_valid_only_in_its_browser_and_app() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&Env::system());
        let token = csrf_token(&app, &browser);
        assert!(is_valid_csrf_token(&app, &browser, &token));
        assert!(!is_valid_csrf_token(&app, &BrowserId::generate(&Env::system()), &token));
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert!(!is_valid_csrf_token(&other, &browser, &token));
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(!is_valid_csrf_token(&app, &browser, std::str::from_utf8(&changed).unwrap()), "character {at}");
        }
        for bad in ["", "x", &token[1..], &format!("{token}A"), &browser.encode()] {
            assert!(!is_valid_csrf_token(&app, &browser, bad), "{bad}");
        }
    }

    #[test]
    fn a_form_of_the_account_is_valid_only_for_its_user_and_app() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let (ada, eve) = (UserId(Uuid::from_u128(7)), UserId(Uuid::from_u128(8)));
        let token = user_token(&app, ada);
        assert!(is_valid_user_token(&app, ada, &token) && !is_valid_user_token(&app, eve, &token));
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert!(!is_valid_user_token(&other, ada, &token));
        // A browser can send any value in its cookie, also the bytes of a user id.
        let browser = BrowserId::parse(&URL_SAFE_NO_PAD.encode(ada.0.as_bytes())).unwrap();
        assert!(!is_valid_csrf_token(&app, &browser, &token));
        assert!(!is_valid_user_token(&app, ada, &csrf_token(&app, &browser)));
        for bad in ["", "x", &token[1..]] {
            assert!(!is_valid_user_token(&app, ada, bad), "{bad}");
        }
    }

    #[test]
    fn a_form_stays_valid_while_its_key_is_retired() {
        let mut doc = fixtures::rendered("shop");
        let old = fixtures::app(doc.clone());
        let browser = BrowserId::generate(&Env::system());
        let token = csrf_token(&old, &browser);
        doc.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        assert!(is_valid_csrf_token(&fixtures::app(doc.clone()), &browser, &token));
        doc.keys.hmac.remove(0);
        assert!(!is_valid_csrf_token(&fixtures::app(doc), &browser, &token), "the key was dropped");
    }
}
