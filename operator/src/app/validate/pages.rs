//! Validates the hosted pages of an App, with the logo and the texts from the ConfigMaps that the App references.

use std::{collections::BTreeMap, sync::Arc};

use latchkey_crds::{
    conditions::Reason,
    pages::{
        ColorsSpec, Language, PagesSpec, ThemeSpec,
        color::MIN_CONTRAST,
        texts::{self, Texts},
    },
    rendered::{Base64Bytes, RenderedColors, RenderedLogo, RenderedPages, RenderedPagesSession, RenderedTheme},
    types::{Color, HostName},
};
use url::Url;

use super::{Rejection, logo, number_or_default};
use crate::{
    app::resolve::AppFacts,
    facts::{ConfigMapValues, FieldError, Lookup, Settings},
};

const DEFAULT_LANGUAGES: &[Language] = &[Language::En];
/// The default accent and background of the light theme.
const LIGHT: [&str; 2] = ["#1a56db", "#ffffff"];
/// The default accent and background of the dark theme.
const DARK: [&str; 2] = ["#8ab4f8", "#121212"];
/// The maximum size of a ConfigMap with texts, in bytes of keys and values.
const MAX_TEXTS_BYTES: usize = 64 * 1024;
/// The maximum number of errors in texts that the status of an App lists.
const MAX_TEXT_ERRORS: usize = 20;

const HOST_FIELD: &str = "spec.pages.host";
const LOGO_FIELD: &str = "spec.pages.theme.logoRef";
const TEXTS_FIELD: &str = "spec.pages.textsRef";

/// Checks the rules that an accepted App must meet (specification: Hosted pages, Configuration).
pub(super) fn check(spec: &PagesSpec, settings: &Settings) -> Result<(), Rejection> {
    if !spec.is_enabled() {
        return Ok(());
    }
    let invalid = |field: String, message: String| Err(Rejection::new(Reason::InvalidSpec, field, message));
    if let Some(host) = &spec.host
        && base_host(settings).is_some_and(|base_host| base_host.eq_ignore_ascii_case(host.as_str()))
    {
        let message = "is the host of the installation, which needs no field; remove it, or set another host";
        return invalid(HOST_FIELD.into(), message.into());
    }
    for (name, colors) in [("light", light(&spec.theme)), ("dark", dark(&spec.theme))] {
        let contrast = colors.accent.contrast(&colors.background);
        if contrast < MIN_CONTRAST {
            // The contrast is rounded down. Otherwise the message could show 4.5 for a contrast that is too low.
            let contrast = (contrast * 100.0).floor() / 100.0;
            let message = format!(
                "has a contrast of {contrast:.2}:1 to the background; set a color with {MIN_CONTRAST}:1 or more (WCAG 2.2)"
            );
            return invalid(format!("spec.pages.theme.{name}.accent"), message);
        }
    }
    match (spec.session.idle_seconds, spec.session.lifetime_seconds) {
        (Some(idle), Some(lifetime)) if idle > lifetime => invalid(
            "spec.pages.session.idleSeconds".into(),
            "is longer than lifetimeSeconds, which ends the session anyway; shorten it".into(),
        ),
        _ => Ok(()),
    }
}

/// The pages, if they are enabled. A reference that cannot be used is left out and reported in `field_errors`.
pub(super) fn pages(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> Option<RenderedPages> {
    let spec = &facts.app.spec.pages;
    if !spec.is_enabled() {
        return None;
    }
    let languages = match spec.languages.as_slice() {
        [] => DEFAULT_LANGUAGES,
        languages => languages,
    };
    let lifetime_seconds = number_or_default(spec.session.lifetime_seconds, 1_209_600);
    Some(RenderedPages {
        host: held_host(facts, field_errors),
        languages: languages.iter().map(|language| language.as_str().to_owned()).collect(),
        theme: RenderedTheme {
            mode: spec.theme.mode,
            light: light(&spec.theme),
            dark: dark(&spec.theme),
            logo: logo(facts, field_errors),
        },
        texts: own_texts(facts, languages, field_errors),
        links: spec.links.clone(),
        session: RenderedPagesSession {
            // The default of the idle time must not exceed the session lifetime that the App sets.
            idle_seconds: number_or_default(spec.session.idle_seconds, 43_200).min(lifetime_seconds),
            lifetime_seconds,
        },
    })
}

/// The host of the base URL.
fn base_host(settings: &Settings) -> Option<String> {
    let url = Url::parse(settings.base_url.as_str()).ok()?;
    url.host_str().map(str::to_owned)
}

fn light(theme: &ThemeSpec) -> RenderedColors {
    colors(&theme.light, LIGHT)
}

fn dark(theme: &ThemeSpec) -> RenderedColors {
    colors(&theme.dark, DARK)
}

fn colors(spec: &ColorsSpec, [accent, background]: [&str; 2]) -> RenderedColors {
    let default = |color: &str| -> Color { color.parse().expect("the defaults are colors") };
    RenderedColors {
        accent: spec.accent.clone().unwrap_or_else(|| default(accent)),
        background: spec.background.clone().unwrap_or_else(|| default(background)),
    }
}

fn held_host(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> Option<HostName> {
    let host = facts.app.spec.pages.host.as_ref()?;
    if facts.holds_pages_host {
        return Some(host.clone());
    }
    // The message does not name the other App, because it may belong to another tenant.
    let message = format!(
        "another App has the host {host}; set another host. The pages are on the host of the installation until then"
    );
    field_errors.push(FieldError::new(Reason::HostConflict, HOST_FIELD, message));
    None
}

fn logo(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> Option<RenderedLogo> {
    const CONSEQUENCE: &str = "The pages show the display name until then";
    let reference = facts.app.spec.pages.theme.logo_ref.as_ref()?;
    let (name, key) = (&reference.name, &reference.key);
    let mut report = |reason, message: String| {
        field_errors.push(FieldError::new(reason, LOGO_FIELD, format!("{message}. {CONSEQUENCE}")));
        None
    };
    let values = match facts.logo.as_ref()? {
        Lookup::Found(values) => values,
        Lookup::Missing => return report(Reason::ConfigMapNotFound, missing(name)),
        Lookup::Invalid => return report(Reason::LogoInvalid, invalid(name)),
    };
    let bytes = match (values.binary.get(key), values.text.get(key)) {
        (Some(bytes), _) => bytes.as_slice(),
        (None, Some(text)) => text.as_bytes(),
        (None, None) => return report(Reason::LogoInvalid, format!("ConfigMap {name} has no key {key}; add it")),
    };
    match logo::media_type(bytes) {
        Ok(content_type) => {
            Some(RenderedLogo { content_type: content_type.to_owned(), data: Base64Bytes(bytes.into()) })
        }
        Err(reason) => report(Reason::LogoInvalid, format!("{name}/{key}: {reason}")),
    }
}

fn own_texts(
    facts: &AppFacts,
    languages: &[Language],
    field_errors: &mut Vec<FieldError>,
) -> BTreeMap<String, Arc<Texts>> {
    let name = facts.app.spec.pages.texts_ref.as_ref().map_or("", |reference| &reference.name);
    let mut report = |reason, message: String| field_errors.push(FieldError::new(reason, TEXTS_FIELD, message));
    match &facts.texts {
        None => BTreeMap::new(),
        Some(Lookup::Missing) => {
            report(Reason::ConfigMapNotFound, format!("{}. The pages have the default texts", missing(name)));
            BTreeMap::new()
        }
        Some(Lookup::Invalid) => {
            report(Reason::TextsInvalid, format!("{}. The pages have the default texts", invalid(name)));
            BTreeMap::new()
        }
        Some(Lookup::Found(values)) => {
            let (mut texts, mut errors) = check_texts(name, values);
            let further = errors.len().saturating_sub(MAX_TEXT_ERRORS);
            errors.truncate(MAX_TEXT_ERRORS);
            errors.extend((further > 0).then(|| format!("ConfigMap {name} has {further} more errors")));
            errors.into_iter().for_each(|error| report(Reason::TextsInvalid, error));
            texts.retain(|language, texts| languages.contains(language) && !texts.is_empty());
            texts.into_iter().map(|(language, texts)| (language.as_str().to_owned(), Arc::new(texts))).collect()
        }
    }
}

/// Returns the valid texts, and an error message for each invalid text. A message names the ConfigMap, its key, the
/// line and the ID of the text.
fn check_texts(config_map: &str, values: &ConfigMapValues) -> (BTreeMap<Language, Texts>, Vec<String>) {
    let total: usize = values.text.iter().map(|(key, value)| key.len() + value.len()).sum();
    if total > MAX_TEXTS_BYTES {
        let error = format!("ConfigMap {config_map} is over {} KiB; shorten it", MAX_TEXTS_BYTES / 1024);
        return (BTreeMap::new(), vec![error]);
    }
    let (mut texts, mut errors) = (BTreeMap::new(), Vec::new());
    for key in values.binary.keys() {
        errors.push(format!("{config_map}/{key}: is under binaryData; put the texts under data"));
    }
    for (key, file) in &values.text {
        let Some(language) = Language::ALL.into_iter().find(|language| language.texts_key() == key) else {
            let keys = Language::ALL.map(Language::texts_key).join(" and ");
            errors.push(format!("{config_map}/{key}: is not a key with texts; use {keys}"));
            continue;
        };
        let checked = texts::check(language, file);
        errors.extend(checked.errors.iter().map(|error| format!("{config_map}/{key}:{error}")));
        texts.insert(language, checked.texts);
    }
    (texts, errors)
}

fn missing(config_map: &str) -> String {
    format!("ConfigMap {config_map} does not exist in this namespace; create it")
}

fn invalid(config_map: &str) -> String {
    format!("ConfigMap {config_map} is not valid; see the message about it")
}

#[cfg(test)]
mod tests;
