//! The choice of the language of a page.

use latchkey_crds::pages::Language;

/// The maximum number of entries of `Accept-Language` that are read. Browsers send fewer than ten.
const MAX_ENTRIES: usize = 32;

/// Of the App's languages, returns the one that the user prefers most, or the default if no preference matches. Each
/// item of `preferences` contains language tags separated by spaces. The most important item is the first: the
/// parameter `lang`, then `ui_locales`, then the cookie.
pub fn choose_language(
    languages: &[Language],
    preferences: impl IntoIterator<Item = impl AsRef<str>>,
    accept_language: Option<&str>,
) -> Language {
    let preferred =
        preferences.into_iter().find_map(|tags| tags.as_ref().split(' ').find_map(|tag| language_of(languages, tag)));
    preferred
        .or_else(|| highest_weighted_language(languages, accept_language?))
        .or_else(|| languages.first().copied())
        .unwrap_or_default()
}

/// The language with the highest weight in `Accept-Language` (RFC 9110, 12.5.4). If several languages have this weight,
/// returns the first of them.
fn highest_weighted_language(languages: &[Language], accept_language: &str) -> Option<Language> {
    let mut best: Option<(f32, Language)> = None;
    for entry in accept_language.split(',').take(MAX_ENTRIES) {
        let (tag, parameter) = entry.split_once(';').unwrap_or((entry, "q=1"));
        let weight: f32 = parameter.trim().strip_prefix("q=").and_then(|weight| weight.parse().ok()).unwrap_or(0.0);
        if let Some(language) = language_of(languages, tag.trim())
            && weight > best.map_or(0.0, |(weight, _)| weight)
        {
            best = Some((weight, language));
        }
    }
    best.map(|(_, language)| language)
}

/// The language of a tag. Only the first subtag counts: `de-AT` is German (RFC 4647, 3.4).
fn language_of(languages: &[Language], tag: &str) -> Option<Language> {
    let primary = tag.split('-').next()?;
    languages.iter().copied().find(|language| primary.eq_ignore_ascii_case(language.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(preferences: &[&str], accept_language: &str) -> &'static str {
        choose_language(&[Language::En, Language::De], preferences, Some(accept_language)).as_str()
    }

    #[test]
    fn the_first_known_preference_counts() {
        assert_eq!(chosen(&["de"], "en"), "de");
        assert_eq!(chosen(&["fr", "pt-BR DE-at en", "en"], "en"), "de");
        assert_eq!(chosen(&["", "deutsch", "../de"], "en"), "en");
    }

    #[test]
    fn the_highest_weight_of_accept_language_counts() {
        for (accept_language, expected) in [
            ("de-AT,de;q=0.9,en;q=0.8", "de"),
            ("fr, en;q=0.5, de;q=0.7", "de"),
            ("en;q=0.5,de;q=0.5", "en"),
            ("de;q=0,fr", "en"),
            ("de;q=NaN", "en"),
            ("de;q=x,*", "en"),
            (" ,;,;;q=1,", "en"),
            ("", "en"),
        ] {
            assert_eq!(chosen(&[], accept_language), expected, "{accept_language}");
        }
        assert_eq!(chosen(&[], &format!("{}de", "fr,".repeat(MAX_ENTRIES))), "en");
    }

    #[test]
    fn an_app_shows_only_its_languages() {
        let none: [&str; 0] = [];
        assert_eq!(choose_language(&[Language::De], ["en"], Some("en")), Language::De);
        assert_eq!(choose_language(&[Language::De, Language::En], none, None), Language::De);
    }
}
