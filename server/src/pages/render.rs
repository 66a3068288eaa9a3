//! Renders views as HTML.

use std::sync::LazyLock;

use latchkey_crds::{pages::Language, templates::write_value};
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, context, value::Serde};
use serde::Serialize;
use url::form_urlencoded;

use super::{
    branding::Branding,
    errors::{FieldErrors, PageError},
    texts::{PageTexts, TextFunction},
    views::View,
};

/// The values that every page needs in addition to its view. The type has no `Debug`, because logs must not contain
/// `csrf` or `tx`.
#[derive(Clone, Copy)]
pub struct PageContext<'a> {
    pub branding: &'a Branding,
    pub texts: &'a PageTexts,
    /// Why a form was refused. The error code is also in `<main data-error>`.
    pub error: Option<&'a PageError>,
    /// The value of the field `csrf`.
    pub csrf: &'a str,
    /// The value of the field `user` in the forms of the account.
    pub user: Option<&'a str>,
    /// The transaction that forms and links carry.
    pub tx: Option<&'a str>,
    /// The transaction in the link to a new login. After that login, the user returns to this page. `None`: the link
    /// has the same transaction as the other links.
    pub login_tx: Option<&'a str>,
    pub request_id: &'a str,
}

/// A link to the page in another language.
#[derive(Debug, Serialize)]
struct LanguageLink {
    code: &'static str,
    /// The ID of the text with the language's own name.
    text: &'static str,
    href: String,
    current: bool,
}

macro_rules! templates {
    ($($name:literal,)*) => {
        /// The name and the source of each template.
        pub(super) const TEMPLATES: &[(&str, &str)] = &[$(($name, include_str!(concat!("templates/", $name))),)*];
    };
}

templates! {
    "layout.html",
    "back.html",
    "field.html",
    "hidden.html",
    "providers.html",
    "account.html",
    "account_activity.html",
    "account_applications.html",
    "account_delete.html",
    "account_email.html",
    "account_identities.html",
    "account_password.html",
    "account_sessions.html",
    "confirm.html",
    "confirm_notice.html",
    "consent.html",
    "error.html",
    "forgot.html",
    "forgot_notice.html",
    "form_post.html",
    "login.html",
    "logout.html",
    "logout_done.html",
    "register.html",
    "reset.html",
    "icons/alert.svg",
    "icons/back.svg",
    "icons/check.svg",
    "icons/next.svg",
    "icons/apple.svg",
    "icons/bitbucket.svg",
    "icons/discord.svg",
    "icons/facebook.svg",
    "icons/github.svg",
    "icons/gitlab.svg",
    "icons/google.svg",
    "icons/linkedin.svg",
    "icons/microsoft.svg",
    "icons/other.svg",
    "icons/slack.svg",
    "icons/spotify.svg",
    "icons/twitch.svg",
    "icons/x.svg",
}

static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(write_value);
    for (name, source) in &*EXPANDED {
        environment.add_template(name, source).expect("the tests parse every template");
    }
    environment
});

/// The templates, with the sources of included templates inserted ([`expand`]).
static EXPANDED: LazyLock<Vec<(&str, String)>> =
    LazyLock::new(|| TEMPLATES.iter().map(|(name, source)| (*name, expand(source))).collect());

/// Replaces each `{% include "NAME" %}` by the source of the template NAME. MiniJinja would render the included
/// template separately, which takes longer. An include that names a variable stays.
fn expand(source: &str) -> String {
    let (before, included) = match source.split_once("{% include \"") {
        Some((before, rest)) => (before, rest.split_once("\" %}").expect("the tests expand every template")),
        None => return source.to_owned(),
    };
    let (name, after) = included;
    let (_, template) = TEMPLATES.iter().find(|(other, _)| *other == name).expect("the tests expand every template");
    let template = expand(template);
    // MiniJinja also leaves out the last line break of an included template.
    format!("{before}{}{}", template.strip_suffix('\n').unwrap_or(&template), expand(after))
}

/// The HTML of a page.
pub fn render<V: View>(view: &V, context: &PageContext<'_>) -> String {
    let PageContext { branding, texts, error, csrf, user, tx, login_tx, request_id } = *context;
    let minimum_password_length = branding.minimum_password_length();
    let shown_error = error.map(|error| error.show(view.error_text(error.code), texts));
    let errors = error.map(|error| FieldErrors::new(error, texts, minimum_password_length)).unwrap_or_default();
    let tx_query = |separator: &str, tx: Option<&str>| match tx {
        Some(tx) => format!("{separator}{}", encode([("tx", tx)])),
        None => String::new(),
    };
    let values = context! {
        t => Value::from_object(TextFunction(texts.clone())),
        lang => texts.language().as_str(),
        dir => texts.direction(),
        app => branding.value(),
        page => Value::from(Serde(view)),
        title => view.title(texts),
        notice => view.notice(texts),
        session_ended => view.session_ended(),
        script => view.script().map(|script| branding.asset_path(script)),
        error => Value::from(Serde(shown_error)),
        errors => Value::from(Serde(errors)),
        languages => Value::from(Serde(language_links(view, context))),
        csrf => csrf,
        user => user,
        tx => tx,
        query => tx_query("?", tx),
        and_query => tx_query("&", tx),
        login_query => tx_query("?", login_tx.or(tx)),
        request_id => request_id,
    };
    let template = ENVIRONMENT.get_template(V::TEMPLATE).expect("the tests render every view");
    template.render(values).expect("the tests render every view")
}

/// Links to the page in each language of the App. Empty if the App has only one language or the view has no path.
fn language_links<V: View>(view: &V, context: &PageContext<'_>) -> Vec<LanguageLink> {
    let PageContext { branding, texts, tx, .. } = *context;
    if V::PATH.is_empty() || branding.languages().len() < 2 {
        return Vec::new();
    }
    let link = |language: Language| {
        let query = [("lang", language.as_str())].into_iter().chain(view.query()).chain(tx.map(|tx| ("tx", tx)));
        LanguageLink {
            code: language.as_str(),
            text: match language {
                Language::En => "language-en",
                Language::De => "language-de",
            },
            href: format!("{}/{}?{}", branding.path(), V::PATH, encode(query)),
            current: language == texts.language(),
        }
    };
    branding.languages().iter().copied().map(link).collect()
}

fn encode<'a>(query: impl IntoIterator<Item = (&'static str, &'a str)>) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish()
}

#[cfg(test)]
mod tests;
