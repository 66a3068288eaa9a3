//! Every view in every language, with ordinary and with hostile values.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use latchkey_crds::{
    pages::{
        PageLinks, ThemeMode,
        texts::{Text, Texts, default_texts},
    },
    rendered::{
        Base64Bytes, RenderedApp, RenderedColors, RenderedLogo, RenderedPages, RenderedPagesSession, RenderedTheme,
    },
    types::ProviderName,
};
use time::macros::datetime;

use super::*;
use crate::{
    domain::{app::App, audit::EventKind},
    fixtures,
    http::error::{ErrorCode, FieldCode},
    pages::{
        LinkedProvider, ProviderButton, Timestamp,
        assets::{Asset, FORM_SCRIPT, PASSWORD_SCRIPT, STYLESHEET},
        theme_css,
        views::{
            AccountNotice, AccountPage, ActivityPage, ActivityRow, ApplicationRow, ApplicationsPage, ConfirmNoticePage,
            ConfirmPage, ConsentPage, DeletePage, EmailPage, ErrorPage, ForgotNoticePage, ForgotPage, FormPostField,
            FormPostPage, IdentitiesPage, LoginNotice, LoginPage, LogoutDonePage, LogoutPage, PasswordPage,
            RegisterPage, ResetPage, ScopeRow, SessionRow, SessionsPage,
        },
    },
};

/// Closes an attribute, a tag, an element and a comment, and starts elements and templates.
const HOSTILE: &str = "\"'><script>alert(1)</script><!-- </title></main> javascript:alert(1) {{ csrf }} &quot;";
const ORDINARY: &str = "Ada";
const FIELDS: [&str; 5] = ["name", "email", "code", "password", "current_password"];

/// A view of any type.
trait AnyView {
    fn name(&self) -> &'static str;
    fn render(&self, context: &PageContext<'_>) -> String;
}

impl<V: View> AnyView for V {
    fn name(&self) -> &'static str {
        V::TEMPLATE
    }

    fn render(&self, context: &PageContext<'_>) -> String {
        render(self, context)
    }
}

fn pages() -> RenderedPages {
    let colors = |accent: &str, background: &str| RenderedColors {
        accent: accent.parse().unwrap(),
        background: background.parse().unwrap(),
    };
    let link = || Some("https://shop.example.com/?a=1&b=2".parse().unwrap());
    RenderedPages {
        host: None,
        languages: vec!["en".to_owned(), "de".to_owned(), "tlh".to_owned()],
        theme: RenderedTheme {
            mode: ThemeMode::Auto,
            light: colors("#1a56db", "#ffffff"),
            dark: colors("#8ab4f8", "#121212"),
            logo: None,
        },
        texts: BTreeMap::new(),
        links: PageLinks {
            home: link(),
            terms: link(),
            privacy: link(),
            support: Some("mailto:help@shop.example.com".parse().unwrap()),
        },
        session: RenderedPagesSession { idle_seconds: 43_200, lifetime_seconds: 1_209_600 },
    }
}

fn app(display_name: &str, with_logo: bool) -> App {
    let mut pages = pages();
    if with_logo {
        let data = Base64Bytes(Vec::from(&b"<svg/>"[..]).into());
        pages.theme.logo = Some(RenderedLogo { content_type: "image/svg+xml".to_owned(), data });
    }
    let display_name = display_name.to_owned();
    fixtures::app(RenderedApp { display_name, pages: Some(Box::new(pages)), ..fixtures::rendered("shop") })
}

fn branding(display_name: &str, with_logo: bool) -> Branding {
    let app = app(display_name, with_logo);
    Branding::new(&app, app.pages.as_ref().unwrap())
}

fn provider_names() -> Vec<ProviderName> {
    ["google", "apple", "staff"].map(|name| name.parse::<ProviderName>().unwrap()).into()
}

fn context<'a>(branding: &'a Branding, texts: &'a PageTexts) -> PageContext<'a> {
    PageContext { branding, texts, error: None, csrf: "c", user: None, tx: None, login_tx: None, request_id: "r" }
}

/// Every view, in each of its variants. `text` is used for every value that a user, a provider or a Client chooses.
fn views<'a>(text: &'a str, names: &'a [ProviderName], language: Language) -> Vec<Box<dyn AnyView + 'a>> {
    let at = || Timestamp::new(datetime!(2026-11-23 13:38 UTC), language);
    let button = |index: usize| ProviderButton::new(&names[index], ["google", "apple", "oidc"][index]);
    let buttons = || (0..names.len()).map(&button).collect::<Vec<_>>();
    let mut views: Vec<Box<dyn AnyView + 'a>> = vec![
        Box::new(RegisterPage { name: text, email: text, providers: buttons() }),
        Box::new(ConfirmNoticePage { email: text }),
        Box::new(ForgotPage { email: text }),
        Box::new(ForgotNoticePage { email: text, address: "sealed" }),
        Box::new(LogoutPage),
        Box::new(LogoutDonePage),
        Box::new(ConsentPage {
            client: text,
            host: text,
            on_device: false,
            account: text,
            scopes: ["openid", "profile", "email", "groups", "offline_access", text].map(ScopeRow::new).into(),
        }),
        Box::new(ConsentPage {
            client: text,
            host: text,
            on_device: true,
            account: text,
            scopes: vec![ScopeRow::new("openid")],
        }),
        Box::new(FormPostPage {
            // A redirect URL cannot contain markup, because its type accepts none.
            action: "https://shop.example.com/callback?a=b&c=d",
            host: text,
            fields: vec![FormPostField { name: "code", value: text }, FormPostField { name: "state", value: text }],
        }),
        Box::new(ActivityPage {
            events: EventKind::ALL.iter().map(|kind| ActivityRow::new(*kind, 2, at(), Some(text.to_owned()))).collect(),
        }),
        Box::new(ActivityPage { events: Vec::new() }),
    ];
    let notices =
        [LoginNotice::PasswordReset, LoginNotice::AccountDeleted, LoginNotice::LoginAgain, LoginNotice::OtherAccount];
    for notice in [None].into_iter().chain(notices.map(Some)) {
        views.push(Box::new(LoginPage { email: text, providers: buttons(), registration_open: true, notice }));
    }
    views.push(Box::new(LoginPage { email: "", providers: Vec::new(), registration_open: false, notice: None }));
    let notices = [
        AccountNotice::NameSaved,
        AccountNotice::EmailSent(text),
        AccountNotice::EmailConfirmed,
        AccountNotice::PasswordSaved,
        AccountNotice::Linked(text),
        AccountNotice::Unlinked(text),
        AccountNotice::SessionEnded,
        AccountNotice::OthersEnded,
        AccountNotice::ApplicationRemoved,
    ];
    let account = |email: Option<&'a str>, flag, notice| AccountPage {
        name: text,
        email,
        email_verified: flag,
        pending_email: email.filter(|_| flag),
        has_password: flag,
        has_providers: flag,
        linked_providers: text,
        has_applications: flag,
        notice,
    };
    views.push(Box::new(AccountPage { linked_providers: "", ..account(Some(text), true, None) }));
    views.push(Box::new(account(None, false, None)));
    for notice in notices {
        views.push(Box::new(account(Some(text), false, Some(notice))));
    }
    let notice = Some(AccountNotice::Linked(text));
    views.push(Box::new(IdentitiesPage {
        linked: vec![LinkedProvider { provider: button(0), since: at() }],
        available: vec![button(1), button(2)],
        login_needed: false,
        notice,
    }));
    let session = |current| SessionRow {
        id: text.to_owned(),
        device: text.to_owned(),
        ip: text.to_owned(),
        last_used: at(),
        current,
    };
    views.push(Box::new(SessionsPage { sessions: vec![session(true), session(false)], has_others: true, notice }));
    let applications = vec![ApplicationRow { client: text, name: text, since: at() }];
    views.push(Box::new(ApplicationsPage { applications, notice }));
    views.push(Box::new(SessionsPage { sessions: Vec::new(), has_others: false, notice: None }));
    views.push(Box::new(ApplicationsPage { applications: Vec::new(), notice: None }));
    for (first, second) in [(false, false), (false, true), (true, false), (true, true)] {
        views.push(Box::new(ConfirmPage { code: text, hides_code: first, asks_password: second, login_needed: false }));
        views.push(Box::new(ConfirmPage { code: "", hides_code: false, asks_password: first, login_needed: second }));
        views.push(Box::new(ResetPage { email: text, address: text.to_owned(), code: text, hides_code: first }));
        views.push(Box::new(PasswordPage { email: text, has_password: first, required: !first, login_needed: second }));
        let current = first.then_some(text);
        views.push(Box::new(EmailPage { current, email: text, asks_password: first, login_needed: second }));
        views.push(Box::new(DeletePage { asks_password: first, login_needed: second }));
        views.push(Box::new(IdentitiesPage {
            linked: Vec::new(),
            available: if second { Vec::new() } else { vec![button(2)] },
            login_needed: first,
            notice: None,
        }));
    }
    views
}

/// Every error that a page can show.
fn errors() -> Vec<PageError> {
    const FIELD_CODES: [FieldCode; 7] = [
        FieldCode::Missing,
        FieldCode::Empty,
        FieldCode::Invalid,
        FieldCode::TooShort,
        FieldCode::TooLong,
        FieldCode::Guessable,
        FieldCode::DomainNotAllowed,
    ];
    let limited = PageError { retry_after: Some(Duration::from_secs(61)), ..PageError::new(ErrorCode::RateLimited) };
    let of_codes = ErrorCode::ALL.iter().map(|code| PageError::new(*code));
    of_codes.chain(FIELD_CODES.map(invalid_fields)).chain([limited]).collect()
}

fn invalid_fields(code: FieldCode) -> PageError {
    let fields = FIELDS.into_iter().map(|field| (Cow::Borrowed(field), code)).collect();
    PageError { fields, ..PageError::new(ErrorCode::InvalidRequest) }
}

/// Calls `check` for each page, with the name of the template, the error and the HTML. Renders every view without an
/// error and with all fields refused, and two views with every error.
fn for_each_page(text: &str, mut check: impl FnMut(&str, Option<&PageError>, &str)) {
    let names = provider_names();
    for (with_logo, tx) in [(false, None), (true, Some(text))] {
        let branding = branding(text, with_logo);
        for language in Language::ALL {
            let texts = PageTexts::new(language, None);
            let context = PageContext {
                branding: &branding,
                texts: &texts,
                error: None,
                csrf: text,
                user: tx,
                tx,
                login_tx: None,
                request_id: "0192f1c4-7d3e-7a51-9f0a-3f1f0f6f7a10",
            };
            let refused = invalid_fields(FieldCode::TooShort);
            for view in views(text, &names, language) {
                for error in [None, Some(&refused)] {
                    check(view.name(), error, &view.render(&PageContext { error, ..context }));
                }
            }
            for error in &errors() {
                let context = PageContext { error: Some(error), ..context };
                let reset = ResetPage { email: text, address: String::new(), code: text, hides_code: false };
                let error_page = ErrorPage { code: error.code };
                let views: [&dyn AnyView; 2] = [&reset, &error_page];
                for view in views {
                    check(view.name(), Some(error), &view.render(&context));
                }
            }
        }
    }
}

/// The tags of a page, without `<` and `>`.
fn tags(html: &str) -> Vec<&str> {
    html.split('<').skip(1).map(|rest| rest.split('>').next().unwrap_or_default()).collect()
}

/// The value of a tag's attribute. Supports only the form in which the templates write attributes.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
    rest.split('"').next()
}

fn count(html: &str, part: &str) -> usize {
    html.matches(part).count()
}

#[test]
fn every_template_is_parsed_and_rendered() {
    let mut rendered = BTreeSet::new();
    for_each_page(ORDINARY, |name, _, html| {
        assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>"), "{name}");
        rendered.insert(name.to_owned());
    });
    let parts = ["layout.html", "back.html", "field.html", "hidden.html", "providers.html"];
    let all = TEMPLATES.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".html") && !parts.contains(name));
    assert!(all.eq(rendered.iter().map(String::as_str)), "{rendered:?}");
    for (name, _) in TEMPLATES {
        assert!(ENVIRONMENT.get_template(name).is_ok(), "{name}");
    }
}

#[test]
fn a_page_has_its_language_title_and_error() {
    let mut shown = BTreeSet::new();
    for_each_page(ORDINARY, |name, error, html| {
        assert!(html.contains("<html lang=\"en\" dir=\"ltr\">") || html.contains("<html lang=\"de\" dir=\"ltr\">"));
        assert!(!html.contains("<h1></h1>") && !html.contains("<p></p>"), "{name}: a text is empty");
        let code = attribute(tags(html).into_iter().find(|tag| tag.starts_with("main")).unwrap(), "data-error");
        assert_eq!(code, error.map(|error| error.code.as_str()), "{name}");
        if let Some(error) = error {
            shown.insert(error.code.as_str());
            assert_eq!(count(html, "role=\"alert\" tabindex=\"-1\" autofocus"), 1, "{name}: {code:?}");
            assert_eq!(count(html, " autofocus"), 1, "{name}: {code:?}");
        }
    });
    assert_eq!(shown.len(), ErrorCode::ALL.len());
}

#[test]
fn hostile_values_never_become_markup() {
    let mut ordinary = Vec::new();
    for_each_page(ORDINARY, |name, _, html| ordinary.push((name.to_owned(), html.to_owned())));
    let mut ordinary = ordinary.into_iter();
    for_each_page(HOSTILE, |name, _, html| {
        let (ordinary_name, ordinary) = ordinary.next().unwrap();
        assert_eq!(name, ordinary_name);
        // The markup is the same as with ordinary values: no value adds a tag or an attribute, or ends one.
        for part in ["<", ">", "\"", "'", "<script", "<!--"] {
            assert_eq!(count(html, part), count(&ordinary, part), "{name}: {part}: {html}");
        }
        for tag in tags(html) {
            for link in ["href", "src", "action"].into_iter().filter_map(|name| attribute(tag, name)) {
                let is_path = link.starts_with("/shop/") || link.starts_with("/assets/");
                let is_link = link.starts_with("https://shop.example.com/") || link == "mailto:help@shop.example.com";
                assert!(is_path || is_link, "{name}: {link}");
            }
        }
        assert!(html.contains("&lt;script&gt;"), "{name}");
    });
    assert!(ordinary.next().is_none());
}

#[test]
fn an_apps_own_texts_never_become_markup() {
    let hostile = |(id, text): (&String, &Text)| (id.clone(), format!("{HOSTILE}{text}").parse().unwrap());
    let (branding, names) = (branding("The Shop", false), provider_names());
    let refused = invalid_fields(FieldCode::Invalid);
    for language in Language::ALL {
        let own: Texts = default_texts(language).iter().map(hostile).collect();
        let (own, default) = (PageTexts::new(language, Some(Arc::new(own))), PageTexts::new(language, None));
        for view in views(ORDINARY, &names, language) {
            for error in [None, Some(&refused)] {
                let html = |texts| view.render(&PageContext { error, ..context(&branding, texts) });
                let (own, default) = (html(&own), html(&default));
                assert!(own.contains("&lt;script&gt;"), "{}", view.name());
                for part in ["<", ">", "\"", "'"] {
                    assert_eq!(count(&own, part), count(&default, part), "{}: {part}: {own}", view.name());
                }
            }
        }
    }
}

#[test]
fn only_password_pages_and_responses_to_clients_have_a_script_and_no_page_has_an_inline_style() {
    let tag = |script: &Asset| format!("script src=\"/assets/{}\" defer", script.name);
    for_each_page(ORDINARY, |name, _, html| {
        let scripts: Vec<&str> = tags(html).into_iter().filter(|tag| tag.starts_with("script")).collect();
        let expected: Vec<String> = if name == FormPostPage::TEMPLATE {
            vec![tag(&FORM_SCRIPT)]
        } else if html.contains(" type=\"password\"") {
            vec![tag(&PASSWORD_SCRIPT)]
        } else {
            Vec::new()
        };
        assert_eq!(scripts, expected, "{name}");
        for tag in tags(html) {
            assert!(!tag.starts_with("style"), "{name}: {tag}");
            assert!(!tag.contains(" style=") && !tag.contains(" on"), "{name}: {tag}");
            if tag.starts_with("link") || tag.starts_with("img") {
                let source = attribute(tag, "href").or_else(|| attribute(tag, "src")).unwrap();
                assert!(source.starts_with('/'), "{name}: {tag}");
            }
        }
    });
}

#[test]
fn ids_are_unique_and_every_field_has_a_label() {
    for_each_page(ORDINARY, |name, _, html| {
        let tags = tags(html);
        let ids: Vec<&str> = tags.iter().filter_map(|tag| attribute(tag, "id")).collect();
        let unique: BTreeSet<&str> = ids.iter().copied().collect();
        assert_eq!(ids.len(), unique.len(), "{name}: {ids:?}");
        for reference in ["for", "aria-controls", "aria-describedby", "aria-labelledby"] {
            for id in tags.iter().filter_map(|tag| attribute(tag, reference)).flat_map(|ids| ids.split(' ')) {
                assert!(unique.contains(id), "{name}: {reference}={id}");
            }
        }
        let labelled: BTreeSet<&str> = tags.iter().filter_map(|tag| attribute(tag, "for")).collect();
        for input in tags.iter().filter(|tag| tag.starts_with("input ") && !tag.contains(" hidden")) {
            if attribute(input, "type") != Some("hidden") {
                assert!(attribute(input, "id").is_some_and(|id| labelled.contains(id)), "{name}: {input}");
                assert!(attribute(input, "autocomplete").is_some(), "{name}: {input}");
            }
        }
    });
}

#[test]
fn a_refused_field_is_marked_and_described() {
    for_each_page(ORDINARY, |name, error, html| {
        let has_fields = error.is_some_and(|error| !error.fields.is_empty());
        for input in tags(html).iter().filter(|tag| tag.starts_with("input ")) {
            if let Some(id) = attribute(input, "id") {
                assert_eq!(input.contains(" aria-invalid=\"true\""), has_fields, "{name}: {input}");
                assert_eq!(html.contains(&format!(" id=\"{id}-error\"")), has_fields, "{name}: {input}");
            }
        }
    });
}

#[test]
fn passwords_are_never_filled_in() {
    for_each_page(ORDINARY, |name, _, html| {
        for input in tags(html).iter().filter(|tag| attribute(tag, "type") == Some("password")) {
            assert!(attribute(input, "value").is_none(), "{name}: {input}");
            let token = attribute(input, "autocomplete");
            assert!(matches!(token, Some("current-password" | "new-password")), "{name}: {input}");
        }
    });
}

#[test]
fn every_password_field_has_a_button_that_is_hidden_without_scripts() {
    let mut with_fields = BTreeSet::new();
    for_each_page(ORDINARY, |name, _, html| {
        let tags = tags(html);
        let of_type = |wanted: &'static str| tags.iter().filter(move |tag| attribute(tag, "type") == Some(wanted));
        let fields: Vec<&str> = of_type("password").filter_map(|tag| attribute(tag, "id")).collect();
        let controlled: Vec<&str> = of_type("button").filter_map(|tag| attribute(tag, "aria-controls")).collect();
        assert_eq!(fields, controlled, "{name}");
        assert!(of_type("button").all(|tag| tag.ends_with(" hidden")), "{name}");
        let texts = if html.contains("<html lang=\"de\"") { ["Anzeigen", "Verbergen"] } else { ["Show", "Hide"] };
        let texts = format!(" hidden><span>{}</span><span hidden>{}</span></button>\n</div>", texts[0], texts[1]);
        assert_eq!(count(html, &texts), fields.len(), "{name}: {html}");
        if !fields.is_empty() {
            with_fields.insert(name.to_owned());
        }
    });
    let expected = ["account_delete", "account_email", "account_password", "confirm", "login", "register", "reset"];
    assert!(with_fields.iter().map(String::as_str).eq(expected.map(|name| format!("{name}.html"))), "{with_fields:?}");
}

/// While a password is shown, its field is a text field. Browsers can send the content of a text field to a service
/// that checks the spelling or completes sentences, and phones can change the content.
#[test]
fn no_browser_corrects_or_completes_a_password() {
    for_each_page(ORDINARY, |name, _, html| {
        for input in tags(html).iter().filter(|tag| attribute(tag, "type") == Some("password")) {
            for (help, value) in [
                ("spellcheck", "false"),
                ("autocapitalize", "none"),
                ("autocorrect", "off"),
                ("writingsuggestions", "false"),
            ] {
                assert_eq!(attribute(input, help), Some(value), "{name}: {input}");
            }
        }
    });
}

#[test]
fn every_form_that_posts_carries_csrf_and_tx() {
    for_each_page(ORDINARY, |name, _, html| {
        if name == FormPostPage::TEMPLATE {
            // This form goes to the client, which must get neither `csrf` nor `tx`.
            assert!(!html.contains("csrf") && !html.contains("\"tx\""), "{html}");
            return;
        }
        let forms = count(html, "<form ");
        assert_eq!(count(html, " method=\"post\" action=\"/shop/"), forms, "{name}");
        assert_eq!(count(html, "name=\"csrf\""), forms, "{name}");
        assert!([0, forms].contains(&count(html, "name=\"tx\"")), "{name}");
        assert!([0, forms].contains(&count(html, "name=\"user\"")), "{name}");
    });
}

#[test]
fn the_transaction_of_a_new_login_is_only_in_the_link_to_the_login() {
    let branding = branding("The Shop", false);
    let texts = PageTexts::new(Language::En, None);
    let context = PageContext { login_tx: Some("LOGIN"), ..context(&branding, &texts) };
    let confirm = |login_needed| ConfirmPage { code: "", hides_code: false, asks_password: true, login_needed };
    let asks_password = render(&confirm(false), &context);
    assert!(asks_password.contains("name=\"csrf\"") && !asks_password.contains("LOGIN"), "{asks_password}");
    let login_needed = render(&confirm(true), &context);
    assert!(login_needed.contains("href=\"/shop/login?tx=LOGIN\""), "{login_needed}");
    let names = provider_names();
    let identities = IdentitiesPage {
        linked: Vec::new(),
        available: vec![ProviderButton::new(&names[0], "google")],
        login_needed: true,
        notice: None,
    };
    let html = render(&identities, &context);
    assert!(html.contains("href=\"/shop/login?tx=LOGIN\"") && !html.contains("name=\"tx\""), "{html}");
}

#[test]
fn the_pages_of_a_reset_keep_the_transaction() {
    let branding = branding("The Shop", false);
    let texts = PageTexts::new(Language::En, None);
    let context = PageContext { tx: Some("a+b"), ..context(&branding, &texts) };
    let notice = render(&ForgotNoticePage { email: "ada@example.com", address: "sealed" }, &context);
    assert!(notice.contains("href=\"/shop/reset?address=sealed&amp;tx=a%2Bb\""), "{notice}");
    assert!(notice.contains("/shop/forgot?lang=de&amp;notice=sent&amp;address=sealed&amp;tx=a%2Bb"), "{notice}");
    let view = ResetPage { email: "ada@example.com", address: "sealed".to_owned(), code: "", hides_code: false };
    let reset = render(&view, &context);
    assert!(reset.contains("href=\"/shop/login?tx=a%2Bb\""), "{reset}");
    assert!(!reset.contains("email=ada"), "no link has the address: {reset}");
}

#[test]
fn a_page_links_to_itself_in_the_other_languages() {
    let branding = branding("The Shop", false);
    let texts = PageTexts::new(Language::De, None);
    let context = PageContext { tx: Some("a+b"), ..context(&branding, &texts) };
    let view = ConfirmPage { code: "7H2KM-Q4VXD", hides_code: true, asks_password: false, login_needed: false };
    let html = render(&view, &context);
    let link = "href=\"/shop/confirm?lang=en&amp;code=7H2KM-Q4VXD&amp;tx=a%2Bb\" lang=\"en\" hreflang=\"en\">English";
    assert!(html.contains(link), "{html}");
    assert!(html.contains("lang=\"de\" hreflang=\"de\" aria-current=\"true\">Deutsch"));
    assert!(!html.contains("lang=tlh"), "a language of a later version is left out");
    let html = render(&LogoutDonePage, &context);
    assert!(!html.contains("hreflang"));
}

#[test]
fn a_page_with_its_style_and_script_is_at_most_30_kb() {
    let style = STYLESHEET.body.len() + theme_css(&app("The Shop", false).pages.unwrap().theme).len();
    let files = style + FORM_SCRIPT.body.len().max(PASSWORD_SCRIPT.body.len());
    for_each_page(ORDINARY, |name, _, html| {
        // The page `account_activity` has no limit: it grows with the events of the account, and lists every kind of
        // event here.
        if name != "account_activity.html" {
            assert!(html.len() + files <= 30_000, "{name}: {} bytes", html.len() + files);
        }
    });
}

#[test]
fn every_text_is_used() {
    let sources = [
        include_str!("../errors.rs"),
        include_str!("../render.rs"),
        include_str!("../values.rs"),
        include_str!("../views.rs"),
    ];
    let sources: String = TEMPLATES.iter().map(|(_, source)| *source).chain(sources).collect();
    for id in default_texts(Language::En).keys() {
        assert!(sources.contains(&format!("\"{id}\"")), "{id} is not used");
    }
}
