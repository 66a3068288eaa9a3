//! The colors of an App's pages, as CSS custom properties. An App chooses accent and background; the other colors are
//! computed, so that they are readable on every background (WCAG 2.2: 1.4.3 for text, 1.4.11 for controls).

use std::sync::LazyLock;

use latchkey_crds::{pages::ThemeMode, rendered::RenderedColors, types::Color};

use crate::domain::pages::settings::Theme;

/// The lowest contrast of text (WCAG 2.2, 1.4.3).
const TEXT_CONTRAST: f64 = 4.5;
/// The lowest contrast of the border of a control, and of an icon (WCAG 2.2, 1.4.11).
const CONTROL_CONTRAST: f64 = 3.0;
/// The lowest contrast of text on the page around the card. The page is a little darker than the card only if text on
/// it still has this contrast.
const CANVAS_CONTRAST: f64 = 7.0;

const BLACK: Rgb = Rgb([0, 0, 0]);
const WHITE: Rgb = Rgb([255, 255, 255]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rgb([u8; 3]);

/// Names of custom properties, without `--`, and their colors.
type Palette = Vec<(&'static str, Rgb)>;

/// `theme.css` of an App.
pub fn theme_css(theme: &Theme) -> String {
    let block = |scheme: &str, colors: &RenderedColors| {
        let mut css = format!(":root{{color-scheme:{scheme}");
        for (name, color) in palette(Rgb::from(&colors.accent), Rgb::from(&colors.background)) {
            css.push_str(&format!(";--{name}:{}", color.to_css()));
        }
        css.push('}');
        css
    };
    match theme.mode {
        ThemeMode::Light => block("light", &theme.light),
        ThemeMode::Dark => block("dark", &theme.dark),
        ThemeMode::Auto => {
            let light = block("light", &theme.light);
            format!("{light}@media(prefers-color-scheme:dark){{{}}}", block("dark", &theme.dark))
        }
    }
}

/// Every color of a page with this accent and background.
fn palette(accent: Rgb, background: Rgb) -> Palette {
    let text = background.text_color();
    let is_dark = text == WHITE;
    let canvas = canvas(accent, background, text);
    let status = |light, dark| Rgb(if is_dark { dark } else { light }).toward(text, 0, &[background], TEXT_CONTRAST);
    let soft = |color| background.tint(color, if is_dark { 14 } else { 8 }, &[text]);
    let danger = status([0xc6, 0x28, 0x28], [0xff, 0x8a, 0x80]);
    let done = status([0x1b, 0x7f, 0x3b], [0x81, 0xc9, 0x95]);
    let open = status([0x8a, 0x5a, 0x00], [0xfd, 0xd6, 0x63]);
    let mut palette = vec![
        ("background", background),
        ("canvas", canvas),
        ("text", text),
        ("muted", background.toward(text, if is_dark { 66 } else { 60 }, &[background, canvas], TEXT_CONTRAST)),
        ("border", background.toward(text, 30, &[background], CONTROL_CONTRAST)),
        ("line", background.mix(text, 12)),
        ("hover", background.tint(text, 6, &[text, accent])),
        ("accent", accent),
        ("on-accent", accent.text_color()),
        ("accent-hover", accent.hover_color()),
        ("danger", danger),
        ("on-danger", danger.text_color()),
        ("danger-hover", danger.hover_color()),
        ("danger-soft", soft(danger)),
        ("done", done),
        ("done-soft", soft(done)),
        ("open", open),
    ];
    palette.extend(if is_dark { PROVIDERS_ON_DARK } else { PROVIDERS_ON_LIGHT });
    palette
}

/// The color of the page around the card. It is a little darker than the card, if text on it stays easy to read and the
/// accent, which marks the focus, stays visible.
fn canvas(accent: Rgb, background: Rgb, text: Rgb) -> Rgb {
    let canvas = background.mix(BLACK, if text == WHITE { 35 } else { 4 });
    let is_readable = canvas.contrast(text) >= CANVAS_CONTRAST && canvas.contrast(accent) >= CONTROL_CONTRAST;
    if is_readable { canvas } else { background }
}

/// The colors of the providers' buttons on a light background. Google's, Apple's and Microsoft's colors are those of
/// their brand guidelines; the buttons of all other providers look like Google's.
const PROVIDERS_ON_LIGHT: [(&str, Rgb); 9] = [
    ("provider", WHITE),
    ("provider-border", Rgb([0x74, 0x77, 0x75])),
    ("provider-text", Rgb([0x1f, 0x1f, 0x1f])),
    ("apple", WHITE),
    ("apple-border", BLACK),
    ("apple-text", BLACK),
    ("microsoft", WHITE),
    ("microsoft-border", Rgb([0x8c, 0x8c, 0x8c])),
    ("microsoft-text", Rgb([0x5e, 0x5e, 0x5e])),
];

/// The colors of the providers' buttons on a dark background. There, Apple allows only its white button.
const PROVIDERS_ON_DARK: [(&str, Rgb); 9] = [
    ("provider", Rgb([0x13, 0x13, 0x14])),
    ("provider-border", Rgb([0x8e, 0x91, 0x8f])),
    ("provider-text", Rgb([0xe3, 0xe3, 0xe3])),
    ("apple", WHITE),
    ("apple-border", WHITE),
    ("apple-text", BLACK),
    ("microsoft", Rgb([0x2f, 0x2f, 0x2f])),
    ("microsoft-border", Rgb([0x8c, 0x8c, 0x8c])),
    ("microsoft-text", WHITE),
];

// === impl Rgb ===

impl From<&Color> for Rgb {
    fn from(color: &Color) -> Self {
        let digits = color.as_str().trim_start_matches('#');
        // A color has six hexadecimal digits, so the conversion never fails.
        let value = u32::from_str_radix(digits, 16).unwrap_or_default();
        let [_, red, green, blue] = value.to_be_bytes();
        Self([red, green, blue])
    }
}

impl Rgb {
    fn to_css(self) -> String {
        let [red, green, blue] = self.0;
        format!("#{red:02x}{green:02x}{blue:02x}")
    }

    /// Relative luminance, from 0 (black) to 1 (white), as WCAG 2.2 defines it.
    fn luminance(self) -> f64 {
        // A table is fast, and a server computes the theme of every App when it starts.
        static LINEAR: LazyLock<[f64; 256]> = LazyLock::new(|| {
            std::array::from_fn(|value| {
                let value = value as f64 / 255.0;
                if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
            })
        });
        let [red, green, blue] = self.0.map(|value| LINEAR[usize::from(value)]);
        0.2126 * red + 0.7152 * green + 0.0722 * blue
    }

    /// The contrast with another color, from 1 to 21, as WCAG 2.2 defines it.
    fn contrast(self, other: Self) -> f64 {
        let (one, other) = (self.luminance(), other.luminance());
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    /// Black or white, whichever has more contrast: at least 4.58.
    fn text_color(self) -> Self {
        if self.contrast(BLACK) >= self.contrast(WHITE) { BLACK } else { WHITE }
    }

    fn mix(self, other: Self, percent: u16) -> Self {
        let mix = |a: u8, b: u8| (u16::from(a) * (100 - percent) + u16::from(b) * percent + 50) / 100;
        let [red, green, blue] = [0, 1, 2].map(|i| u8::try_from(mix(self.0[i], other.0[i])).unwrap_or(u8::MAX));
        Self([red, green, blue])
    }

    /// Mixes the color with `percent` of `other`, or with more if needed, so that the mix has this contrast on every
    /// background.
    fn toward(self, other: Self, percent: u16, backgrounds: &[Self], contrast: f64) -> Self {
        (percent..=100)
            .map(|percent| self.mix(other, percent))
            .find(|mixed| backgrounds.iter().all(|background| mixed.contrast(*background) >= contrast))
            .unwrap_or(other)
    }

    /// Mixes up to `percent` of a color into this background, but only so much that all these texts stay readable.
    fn tint(self, color: Self, percent: u16, texts: &[Self]) -> Self {
        (1..=percent)
            .rev()
            .map(|percent| self.mix(color, percent))
            .find(|tinted| texts.iter().all(|text| text.contrast(*tinted) >= TEXT_CONTRAST))
            .unwrap_or(self)
    }

    /// The color of a button under the mouse pointer: mixed with white if the text of the button is black, otherwise
    /// with black, so that the text does not lose contrast.
    fn hover_color(self) -> Self {
        self.mix(if self.text_color() == BLACK { WHITE } else { BLACK }, 12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn theme(mode: ThemeMode) -> Theme {
        let colors = |accent: &str, background: &str| RenderedColors {
            accent: accent.parse().unwrap(),
            background: background.parse().unwrap(),
        };
        Theme { mode, light: colors("#1A56DB", "#ffffff"), dark: colors("#8ab4f8", "#121212"), logo: None }
    }

    /// Random colors, the same in each run (Numerical Recipes, linear congruential generator).
    fn colors() -> impl Iterator<Item = Rgb> {
        let mut state: u32 = 1;
        std::iter::repeat_with(move || {
            let mut byte = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state.to_be_bytes()[0]
            };
            Rgb([byte(), byte(), byte()])
        })
    }

    #[test]
    fn every_color_is_readable_on_every_allowed_background() {
        // The names of the foreground and of the background, and their lowest contrast.
        const RULES: [(&str, &str, f64); 20] = [
            ("text", "background", 4.5),
            ("text", "canvas", 4.5),
            ("text", "hover", 4.5),
            ("text", "danger-soft", 4.5),
            ("text", "done-soft", 4.5),
            ("muted", "background", 4.5),
            ("muted", "canvas", 4.5),
            ("accent", "background", 4.5),
            ("accent", "hover", 4.5),
            ("accent", "canvas", 3.0),
            ("on-accent", "accent", 4.5),
            ("on-accent", "accent-hover", 4.5),
            ("danger", "background", 4.5),
            ("danger", "danger-soft", 3.0),
            ("on-danger", "danger", 4.5),
            ("on-danger", "danger-hover", 4.5),
            ("done", "background", 4.5),
            ("done", "done-soft", 3.0),
            ("open", "background", 4.5),
            ("border", "background", 3.0),
        ];
        let grey = (0..=255).flat_map(|value| [(BLACK, Rgb([value; 3])), (WHITE, Rgb([value; 3]))]);
        let random = colors().zip(colors().skip(7)).take(20_000);
        let mut checked = 0;
        for (accent, background) in grey.chain(random) {
            if accent.contrast(background) < TEXT_CONTRAST {
                continue;
            }
            checked += 1;
            let palette = palette(accent, background);
            let color = |name| palette.iter().find(|(known, _)| *known == name).unwrap().1;
            for (foreground, behind, minimum) in RULES {
                let contrast = color(foreground).contrast(color(behind));
                let pair = (foreground, behind, accent.to_css(), background.to_css());
                assert!(contrast >= minimum, "{pair:?}: {contrast}");
            }
        }
        assert!(checked > 2_000, "{checked}");
    }

    #[test]
    fn the_buttons_of_providers_are_readable() {
        for palette in [PROVIDERS_ON_LIGHT, PROVIDERS_ON_DARK] {
            let color = |name: &str| palette.iter().find(|(known, _)| *known == name).unwrap().1;
            for kind in ["provider", "apple", "microsoft"] {
                assert!(color(&format!("{kind}-text")).contrast(color(kind)) >= TEXT_CONTRAST, "{kind}");
            }
        }
    }

    #[test]
    fn the_stylesheet_uses_only_colors_of_the_theme() {
        let stylesheet = include_str!("assets/pages.css");
        let palette = palette(BLACK, WHITE);
        for used in stylesheet.split("var(--").skip(1).filter_map(|rest| rest.split(')').next()) {
            assert!(palette.iter().any(|(name, _)| *name == used), "{used}");
        }
        for (name, _) in &palette {
            assert!(stylesheet.contains(&format!("var(--{name})")), "{name} is not used");
        }
    }

    #[test]
    fn the_mode_selects_the_colors() {
        let light = theme_css(&theme(ThemeMode::Light));
        assert!(light.starts_with(":root{color-scheme:light;--background:#ffffff;"), "{light}");
        assert!(light.contains("--accent:#1a56db;") && light.ends_with('}') && !light.contains("@media"));
        let dark = theme_css(&theme(ThemeMode::Dark));
        assert!(dark.starts_with(":root{color-scheme:dark;--background:#121212;") && !dark.contains("@media"));
        assert_eq!(theme_css(&theme(ThemeMode::Auto)), format!("{light}@media(prefers-color-scheme:dark){{{dark}}}"));
    }
}
