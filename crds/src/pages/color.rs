//! Contrast between colors, as WCAG 2.2 defines it.

use crate::types::Color;

/// The lowest allowed contrast between an accent and its background. WCAG 2.2 (1.4.3) requires it for text.
pub const MIN_CONTRAST: f64 = 4.5;

/// The color of text: black or white.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextColor {
    Black,
    White,
}

// === impl TextColor ===

impl TextColor {
    /// The color in CSS.
    pub const fn as_css(self) -> &'static str {
        match self {
            Self::Black => "#000000",
            Self::White => "#ffffff",
        }
    }
}

// === impl Color ===

impl Color {
    /// The contrast between two colors, from 1 to 21. The order of the colors does not matter.
    pub fn contrast(&self, other: &Self) -> f64 {
        contrast(self.luminance(), other.luminance())
    }

    /// The color of text on this color: black or white, whichever has more contrast. The contrast is at least 4.5.
    pub fn text_color(&self) -> TextColor {
        let luminance = self.luminance();
        if contrast(luminance, 0.0) >= contrast(luminance, 1.0) { TextColor::Black } else { TextColor::White }
    }

    /// The relative luminance, from 0 (black) to 1 (white).
    fn luminance(&self) -> f64 {
        let channel = |start: usize| {
            // A color has six hexadecimal digits after `#`, so the conversion never fails.
            let value = u8::from_str_radix(&self.as_str()[start..start + 2], 16).unwrap_or(0);
            let value = f64::from(value) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }
}

fn contrast(one: f64, other: f64) -> f64 {
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn color(text: &str) -> Color {
        text.parse().unwrap()
    }

    #[test]
    fn the_contrast_is_computed_as_wcag_defines_it() {
        // The first grey is the lightest that is allowed on white, according to the checker of WebAIM.
        for (one, other, expected) in [
            ("#000000", "#ffffff", 21.0),
            ("#ffffff", "#ffffff", 1.0),
            ("#767676", "#ffffff", 4.54),
            ("#777777", "#FFFFFF", 4.48),
            ("#ff0000", "#ffffff", 4.0),
            ("#0000ff", "#ffffff", 8.59),
        ] {
            let found = color(one).contrast(&color(other));
            assert!((found - expected).abs() < 0.005, "{one} on {other}: {found}");
            assert!((found - color(other).contrast(&color(one))).abs() < f64::EPSILON);
        }
    }

    #[test]
    fn text_is_black_or_white_and_always_readable() {
        for (background, expected) in [
            ("#ffffff", TextColor::Black),
            ("#000000", TextColor::White),
            ("#ffff00", TextColor::Black),
            ("#1a56db", TextColor::White),
        ] {
            assert_eq!(color(background).text_color(), expected, "{background}");
        }
        for grey in 0..=255 {
            let background = color(&format!("#{grey:02x}{grey:02x}{grey:02x}"));
            let text = color(background.text_color().as_css());
            assert!(background.contrast(&text) >= MIN_CONTRAST, "{background}");
        }
    }
}
