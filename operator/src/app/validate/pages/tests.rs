use latchkey_crds::pages::{PageLinks, ThemeMode, texts::default_texts};
use serde_json::{Value, json};

use crate::{
    app::{
        keys::policy::KeyPolicy,
        render::needed_format,
        resolve::AppFacts,
        validate::{
            ValidatedApp,
            tests::{facts_from, only_error, settings},
            validate,
        },
    },
    facts::{FieldError, Lookup},
};

use super::*;

const OBJECTS: &str = r##"
apiVersion: v1
kind: ConfigMap
metadata: { name: brand, namespace: shop }
data:
  logo.svg: <svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0h9v9z"/></svg>
  hostile.svg: <svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>
  note.txt: hello
binaryData:
  logo.png: iVBORw0KGgoAAAANSUhEUg==
"##;

/// The facts of an App with these pages, which are enabled.
fn facts(mut pages: Value, objects: &str) -> AppFacts {
    pages["mode"] = json!("Enabled");
    facts_from(json!({ "pages": pages }), objects)
}

fn valid(pages: Value) -> RenderedPages {
    let app = validate(&facts(pages, OBJECTS), &settings()).unwrap();
    assert_eq!(app.field_errors, []);
    app.pages.unwrap()
}

fn rejection(pages: Value) -> (String, String) {
    let rejection = validate(&facts(pages, OBJECTS), &settings()).unwrap_err();
    assert_eq!(rejection.reason, Reason::InvalidSpec);
    (rejection.field, rejection.message)
}

/// The manifest of a ConfigMap `texts` with these files, in JSON, which is also YAML.
fn texts_object(files: &[(&str, &str)]) -> String {
    let data: Value =
        files.iter().map(|(key, file)| ((*key).to_owned(), json!(file))).collect::<serde_json::Map<_, _>>().into();
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "texts", "namespace": "shop" }, "data": data })
        .to_string()
}

fn with_texts(languages: Value, files: &[(&str, &str)]) -> ValidatedApp {
    let pages = json!({ "languages": languages, "textsRef": { "name": "texts" } });
    validate(&facts(pages, &texts_object(files)), &settings()).unwrap()
}

#[test]
fn enabled_pages_get_the_defaults() {
    let pages = valid(json!({}));
    assert_eq!((pages.host, pages.languages), (None, vec!["en".to_owned()]));
    assert_eq!(pages.theme.mode, ThemeMode::Auto);
    assert_eq!((pages.theme.light.accent.as_str(), pages.theme.light.background.as_str()), ("#1a56db", "#ffffff"));
    assert_eq!((pages.theme.dark.accent.as_str(), pages.theme.dark.background.as_str()), ("#8ab4f8", "#121212"));
    assert_eq!((pages.theme.logo, pages.texts.len(), pages.links), (None, 0, PageLinks::default()));
    assert_eq!(pages.session, RenderedPagesSession { idle_seconds: 43_200, lifetime_seconds: 1_209_600 });
    let short = valid(json!({ "session": { "lifetimeSeconds": 600 } })).session;
    assert_eq!(short.idle_seconds, 600, "the default does not exceed the lifetime");
}

#[test]
fn disabled_pages_are_neither_rendered_nor_checked() {
    let pages = json!({
        "host": "auth.example.com",
        "theme": { "light": { "accent": "#ffffff" }, "logoRef": { "name": "gone", "key": "logo" } },
        "textsRef": { "name": "gone" },
    });
    for spec in [json!({}), json!({ "pages": pages })] {
        let app = validate(&facts_from(spec, OBJECTS), &settings()).unwrap();
        assert_eq!((app.pages.is_none(), &app.field_errors[..], needed_format(&app).0), (true, &[][..], 1));
    }
    let app = validate(&facts(json!({}), OBJECTS), &settings()).unwrap();
    assert_eq!(needed_format(&app), (3, "spec.pages"));
}

#[test]
fn hmac_keys_are_kept_as_long_as_the_session_of_a_browser() {
    let app = validate(&facts(json!({ "session": { "lifetimeSeconds": 63_072_000 } }), OBJECTS), &settings()).unwrap();
    assert_eq!(KeyPolicy::for_app(&app, &BTreeMap::new()).session_lifetime_seconds, 63_072_000);
}

#[test]
fn an_accent_needs_contrast_to_its_background() {
    let accent = |theme: &str, accent: &str| json!({ "theme": { theme: { "accent": accent } } });
    // On white, the first grey has 4.54:1, the second 4.48:1.
    assert_eq!(valid(accent("light", "#767676")).theme.light.accent.as_str(), "#767676");
    for (theme, color) in [("light", "#777777"), ("light", "#ffffff"), ("dark", "#121212"), ("dark", "#0000ff")] {
        let (field, message) = rejection(accent(theme, color));
        assert_eq!(field, format!("spec.pages.theme.{theme}.accent"));
        assert!(message.contains("set a color with 4.5:1 or more"), "{message}");
    }
    assert!(rejection(accent("light", "#777777")).1.starts_with("has a contrast of 4.47:1"));
    // The default accent can be too dark for another background.
    let (field, _) = rejection(json!({ "theme": { "light": { "background": "#000000" } } }));
    assert_eq!(field, "spec.pages.theme.light.accent");
}

#[test]
fn the_host_is_not_that_of_the_installation() {
    assert_eq!(valid(json!({ "host": "login.shop.example.com" })).host.unwrap().as_str(), "login.shop.example.com");
    let (field, message) = rejection(json!({ "host": "auth.example.com" }));
    assert_eq!((field.as_str(), message.starts_with("is the host of the installation")), ("spec.pages.host", true));
}

#[test]
fn a_host_of_another_app_is_left_out_without_naming_that_app() {
    let mut facts = facts(json!({ "host": "login.shop.example.com" }), OBJECTS);
    facts.holds_pages_host = false;
    let (app, error) = only_error(&facts);
    assert_eq!((error.reason, error.field.as_str()), (Reason::HostConflict, "spec.pages.host"));
    assert_eq!(
        error.message,
        "another App has the host login.shop.example.com; set another host. The pages are on the host of the \
         installation until then"
    );
    assert_eq!(app.pages.unwrap().host, None, "the pages are served");
}

#[test]
fn a_logo_is_served_from_data_and_from_binary_data() {
    let logo =
        |key: &str| valid(json!({ "theme": { "logoRef": { "name": "brand", "key": key } } })).theme.logo.unwrap();
    let svg = logo("logo.svg");
    assert_eq!((svg.content_type.as_str(), &svg.data.0[..4]), ("image/svg+xml", &b"<svg"[..]));
    let png = logo("logo.png");
    assert_eq!((png.content_type.as_str(), &png.data.0[1..4]), ("image/png", &b"PNG"[..]));
}

#[test]
fn an_app_without_a_usable_logo_is_served_with_its_name() {
    let error_for = |name: &str, key: &str| {
        let pages = json!({ "theme": { "logoRef": { "name": name, "key": key } } });
        let (app, error) = only_error(&facts(pages, OBJECTS));
        assert_eq!((app.pages.unwrap().theme.logo, error.field.as_str()), (None, "spec.pages.theme.logoRef"));
        assert!(error.message.ends_with(". The pages show the display name until then"), "{}", error.message);
        (error.reason, error.message)
    };
    let (reason, message) = error_for("gone", "logo.svg");
    assert_eq!(reason, Reason::ConfigMapNotFound);
    assert!(message.starts_with("ConfigMap gone does not exist in this namespace; create it"), "{message}");
    for (key, expected) in [
        ("gone.svg", "ConfigMap brand has no key gone.svg; add it"),
        ("note.txt", "brand/note.txt: is neither PNG nor WebP nor SVG"),
        ("hostile.svg", "brand/hostile.svg: has the element script"),
    ] {
        let (reason, message) = error_for("brand", key);
        assert_eq!(reason, Reason::LogoInvalid);
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn texts_of_the_apps_languages_replace_the_default_texts() {
    let id = default_texts(Language::De).keys().next().unwrap();
    let files = [("de.ftl", format!("{id} = Willkommen\n")), ("en.ftl", format!("{id} = Welcome\n"))];
    let files = files.each_ref().map(|(key, file)| (*key, file.as_str()));
    let texts = |languages: Value| {
        let app = with_texts(languages, &files);
        assert_eq!(app.field_errors, []);
        let texts = app.pages.unwrap().texts;
        texts.iter().map(|(language, texts)| format!("{language}: {}", texts[id])).collect::<Vec<_>>()
    };
    assert_eq!(texts(json!(["de", "en"])), ["de: Willkommen", "en: Welcome"]);
    assert_eq!(texts(json!(["de"])), ["de: Willkommen"]);
}

#[test]
fn bad_texts_are_left_out_and_reported_with_key_line_and_id() {
    let id = default_texts(Language::En).keys().next().unwrap();
    let file = format!("# Texts\n{id} = Welcome\n\nno-such-text = x\n{id} = twice\n");
    let app = with_texts(json!(["en"]), &[("en.ftl", file.as_str()), ("fr.ftl", "a = b")]);
    let repeated = format!("texts/en.ftl:5: {id}: is defined twice; the first one counts");
    let messages: Vec<&str> = app.field_errors.iter().map(|error| error.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "texts/en.ftl:4: no-such-text: there is no text with this ID",
            repeated.as_str(),
            "texts/fr.ftl: is not a key with texts; use en.ftl and de.ftl",
        ]
    );
    let is_expected = |error: &FieldError| error.reason == Reason::TextsInvalid && error.field == "spec.pages.textsRef";
    assert!(app.field_errors.iter().all(is_expected));
    assert_eq!(app.pages.unwrap().texts["en"][id].to_string(), "Welcome");
}

#[test]
fn texts_are_bounded_and_so_are_the_messages_about_them() {
    let comment = |size: usize| format!("#{}", "x".repeat(size - "#en.ftl".len()));
    assert_eq!(with_texts(json!(["en"]), &[("en.ftl", comment(MAX_TEXTS_BYTES).as_str())]).field_errors, []);
    let app = with_texts(json!(["en"]), &[("en.ftl", comment(MAX_TEXTS_BYTES + 1).as_str())]);
    assert_eq!(app.field_errors[0].message, "ConfigMap texts is over 64 KiB; shorten it");

    let app = with_texts(json!(["en"]), &[("en.ftl", "a\n".repeat(1000).as_str())]);
    assert_eq!(app.field_errors.len(), MAX_TEXT_ERRORS + 1);
    assert_eq!(app.field_errors[MAX_TEXT_ERRORS].message, "ConfigMap texts has 980 more errors");
}

#[test]
fn the_default_texts_are_used_if_the_config_map_of_texts_cannot_be_used() {
    let pages = json!({ "textsRef": { "name": "gone" } });
    let (app, error) = only_error(&facts(pages.clone(), OBJECTS));
    assert_eq!((error.reason, app.pages.unwrap().texts.len()), (Reason::ConfigMapNotFound, 0));
    let mut invalid = facts(pages, OBJECTS);
    invalid.texts = Some(Lookup::Invalid);
    assert_eq!(only_error(&invalid).1.reason, Reason::TextsInvalid);
    let binary = "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: texts, namespace: shop }\n\
                  binaryData: { en.ftl: YSA9IGI= }\n";
    let (_, error) = only_error(&facts(json!({ "textsRef": { "name": "texts" } }), binary));
    assert_eq!(error.message, "texts/en.ftl: is under binaryData; put the texts under data");
}
