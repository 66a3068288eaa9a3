//! The pages of an App that are the same for all browsers, except for the field `csrf`. They are rendered once.

use std::{collections::HashMap, sync::Arc};

use latchkey_crds::pages::Language;
use parking_lot::Mutex;

use crate::pages::{PageContext, render, views::View};

/// The maximum length of a stored page, in bytes. A longer one, for example with 32 providers, is rendered for each
/// request, so that a namespace with many Apps cannot fill the memory of a server. An ordinary page has about 4 KiB.
const MAX_BYTES: usize = 8 * 1024;
/// Takes the place of the value of `csrf` in the HTML, until the HTML is split there.
const CSRF_MARK: &str = "{csrf}";

/// The template and the language of a page.
type PageKey = (&'static str, Language);

/// The shared pages of one revision of an App. `None`: the HTML is not stored.
#[derive(Debug, Default)]
pub(super) struct SharedPages(Mutex<HashMap<PageKey, Option<Arc<SplitHtml>>>>);

/// The HTML before and after the value of `csrf`.
#[derive(Debug)]
struct SplitHtml {
    before: Box<str>,
    after: Box<str>,
}

// === impl SharedPages ===

impl SharedPages {
    /// The HTML of a page.
    pub(super) fn render<V: View>(&self, view: &V, context: &PageContext<'_>) -> String {
        // The pattern names every field, so that a new field of the context is a compile error here. Otherwise its
        // value could get into the page of another user.
        let PageContext { error, user, tx, login_tx, branding: _, texts: _, csrf: _, request_id: _ } = *context;
        let is_for_everybody = error.is_none() && user.is_none() && tx.is_none() && login_tx.is_none();
        if !(view.is_shared() && is_for_everybody) {
            return render(view, context);
        }
        let key = (V::TEMPLATE, context.texts.language());
        let stored = self.0.lock().get(&key).cloned();
        // Render without the lock, because rendering takes much longer than the rest of the request.
        let split = stored.unwrap_or_else(|| {
            let html = render(view, &PageContext { csrf: CSRF_MARK, request_id: "", ..*context });
            let split = SplitHtml::new(&html).map(Arc::new);
            self.0.lock().insert(key, split.clone());
            split
        });
        match split {
            Some(html) => [&*html.before, context.csrf, &*html.after].concat(),
            None => render(view, context),
        }
    }
}

// === impl SplitHtml ===

impl SplitHtml {
    /// Splits the HTML at the mark. `None` if the HTML is too long, or if the mark does not occur exactly once, for
    /// example because the name of the App contains it, too.
    fn new(html: &str) -> Option<Self> {
        if html.len() > MAX_BYTES {
            return None;
        }
        let (before, after) = html.split_once(CSRF_MARK)?;
        (!after.contains(CSRF_MARK)).then(|| Self { before: before.into(), after: after.into() })
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::{rendered::RenderedApp, types::ProviderName};

    use super::*;
    use crate::{
        fixtures,
        http::error::ErrorCode,
        pages::{Branding, PageError, PageTexts, ProviderButton, views::LoginPage},
    };

    fn branding(display_name: &str) -> Branding {
        let display_name = display_name.to_owned();
        let doc = RenderedApp { display_name, pages: Some(fixtures::pages()), ..fixtures::rendered("shop") };
        let app = fixtures::app(doc);
        Branding::new(&app, app.pages.as_ref().unwrap())
    }

    fn context<'a>(branding: &'a Branding, texts: &'a PageTexts, csrf: &'a str) -> PageContext<'a> {
        PageContext { branding, texts, error: None, csrf, user: None, tx: None, login_tx: None, request_id: "r" }
    }

    fn login_page(email: &str) -> LoginPage<'_> {
        LoginPage { email, providers: Vec::new(), registration_open: true, notice: None }
    }

    #[test]
    fn only_the_empty_login_page_is_stored() {
        let (branding, pages) = (branding("The Shop"), SharedPages::default());
        let (english, german) = (PageTexts::new(Language::En, None), PageTexts::new(Language::De, None));
        let error = PageError::new(ErrorCode::InvalidCredentials);
        for (texts, stored) in [(&english, 1), (&german, 2), (&english, 2)] {
            for csrf in ["first", "second"] {
                let empty = (login_page(""), context(&branding, texts, csrf));
                let with_email = (login_page("ada@example.com"), context(&branding, texts, csrf));
                let with_error =
                    (login_page(""), PageContext { error: Some(&error), ..context(&branding, texts, csrf) });
                let with_tx = (login_page(""), PageContext { tx: Some("tx"), ..context(&branding, texts, csrf) });
                for (view, context) in [empty, with_email, with_error, with_tx] {
                    assert_eq!(pages.render(&view, &context), render(&view, &context));
                }
            }
            assert_eq!(pages.0.lock().len(), stored);
        }
    }

    #[test]
    fn the_name_of_an_app_can_contain_the_mark() {
        let (branding, pages) = (branding("{csrf}"), SharedPages::default());
        let texts = PageTexts::new(Language::En, None);
        for csrf in ["first", "second"] {
            let context = context(&branding, &texts, csrf);
            let html = pages.render(&login_page(""), &context);
            assert_eq!(html, render(&login_page(""), &context));
            assert_eq!(html.matches(csrf).count(), 1);
        }
    }
    #[test]
    fn a_long_page_is_not_stored() {
        let (branding, pages) = (branding("The Shop"), SharedPages::default());
        let names: Vec<ProviderName> = (0..32).map(|number| format!("p{number}").parse().unwrap()).collect();
        let providers = names.iter().map(|name| ProviderButton::new(name, "google")).collect();
        let view = LoginPage { email: "", providers, registration_open: true, notice: None };
        let texts = PageTexts::new(Language::En, None);
        for csrf in ["first", "second"] {
            let context = context(&branding, &texts, csrf);
            let html = pages.render(&view, &context);
            assert_eq!(html, render(&view, &context));
            assert!(html.len() > MAX_BYTES);
        }
        assert!(pages.0.lock().values().all(Option::is_none));
    }
}
