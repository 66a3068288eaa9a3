//! Values of views that depend on the language: times and devices.

use latchkey_crds::pages::Language;
use serde::Serialize;
use time::{Month, OffsetDateTime, UtcOffset};

use super::texts::PageTexts;

/// A time, as text for people and in ISO 8601 for programs.
#[derive(Clone, Debug, Serialize)]
pub struct Timestamp {
    text: String,
    /// The day without the time of day.
    date: String,
    /// The time for the HTML attribute `datetime`.
    iso: String,
}

/// Texts in a `User-Agent`, and the browsers that they mean. The order matters, because most browsers also send the
/// names of other browsers.
const BROWSERS: [(&str, &str); 9] = [
    ("Edg", "Edge"),
    ("OPR/", "Opera"),
    ("SamsungBrowser/", "Samsung Internet"),
    ("Firefox/", "Firefox"),
    ("FxiOS/", "Firefox"),
    ("CriOS/", "Chrome"),
    ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
    ("curl/", "curl"),
];

/// Texts in a `User-Agent`, and the systems that they mean. The order matters, because Android also sends `Linux`.
const SYSTEMS: [(&str, &str); 8] = [
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Android", "Android"),
    ("CrOS", "ChromeOS"),
    ("Windows", "Windows"),
    ("Mac OS X", "Mac"),
    ("Macintosh", "Mac"),
    ("Linux", "Linux"),
];

/// A short name for a device, such as "Firefox on Windows". Never quotes the `User-Agent`, which the client chooses.
pub fn device_label(user_agent: Option<&str>, texts: &PageTexts) -> String {
    let find = |known: &[(&str, &'static str)]| {
        let user_agent = user_agent?;
        known.iter().find(|(part, _)| user_agent.contains(part)).map(|(_, name)| *name)
    };
    match (find(&BROWSERS), find(&SYSTEMS)) {
        (Some(browser), Some(system)) => texts.format("device", &[("browser", browser), ("system", system)]),
        (Some(name), None) | (None, Some(name)) => name.to_owned(),
        (None, None) => texts.format("device-unknown", &[]),
    }
}

// === impl Timestamp ===

impl Timestamp {
    /// The time in UTC: the server does not know the time zone of the user.
    pub fn new(at: OffsetDateTime, language: Language) -> Self {
        let at = at.to_offset(UtcOffset::UTC);
        let (year, month, day) = (at.year(), at.month(), at.day());
        let (hour, minute, second) = (at.hour(), at.minute(), at.second());
        let month_name = month_name(month, language);
        let date = match language {
            Language::En => format!("{day} {month_name} {year}"),
            Language::De => format!("{day}. {month_name} {year}"),
        };
        let text = format!("{date}, {hour:02}:{minute:02} UTC");
        let iso = format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", u8::from(month));
        Self { text, date, iso }
    }
}

fn month_name(month: Month, language: Language) -> &'static str {
    let names = match language {
        Language::En => [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ],
        Language::De => [
            "Januar",
            "Februar",
            "März",
            "April",
            "Mai",
            "Juni",
            "Juli",
            "August",
            "September",
            "Oktober",
            "November",
            "Dezember",
        ],
    };
    names[usize::from(u8::from(month)) - 1]
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn times_are_written_in_the_language() {
        let at = datetime!(2026-03-04 01:02:03 +02:00);
        let english = Timestamp::new(at, Language::En);
        assert_eq!((&*english.text, &*english.iso), ("3 March 2026, 23:02 UTC", "2026-03-03T23:02:03Z"));
        let german = Timestamp::new(at, Language::De);
        assert_eq!((&*german.text, &*german.date), ("3. März 2026, 23:02 UTC", "3. März 2026"));
    }

    #[test]
    fn devices_have_short_names() {
        let label = |language, user_agent| device_label(user_agent, &PageTexts::new(language, None));
        let windows = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) \
                       Chrome/140.0.0.0 Safari/537.36 Edg/140.0.0.0";
        let phone = "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) \
                     Version/18.0 Mobile/15E148 Safari/604.1";
        assert_eq!(label(Language::En, Some(windows)), "Edge on Windows");
        assert_eq!(label(Language::De, Some(phone)), "Safari auf iPhone");
        assert_eq!(label(Language::En, Some("curl/8.5.0")), "curl");
        assert_eq!(label(Language::En, Some("<script>")), "Unknown device");
        assert_eq!(label(Language::De, None), "Unbekanntes Gerät");
    }
}
