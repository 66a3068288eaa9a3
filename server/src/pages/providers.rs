//! The buttons of providers. The logos are part of the page, so a page with any number of providers needs no further
//! request. A logo with only one color has the color of the button's text, so it fits light and dark pages.

use latchkey_crds::types::ProviderName;
use serde::Serialize;

use super::values::Timestamp;

/// A button for a provider of the App.
#[derive(Serialize)]
pub struct ProviderButton<'a> {
    /// The name of the provider in the App.
    pub name: &'a str,
    /// The preset of the provider. It selects the colors of the button in the stylesheet.
    kind: &'a str,
    /// The brand, or the name of the provider if it has no brand.
    pub label: &'a str,
    /// The template with the logo.
    icon: &'static str,
}

/// An identity of the user.
#[derive(Serialize)]
pub struct LinkedProvider<'a> {
    pub provider: ProviderButton<'a>,
    pub since: Timestamp,
}

/// The logo of providers without a brand: a picture of a key.
const OTHER_ICON: &str = "icons/other.svg";

// === impl ProviderButton ===

impl<'a> ProviderButton<'a> {
    /// `preset` is the member of the Provider's spec: `github`, `oidc`, …
    pub fn new(name: &'a ProviderName, preset: &'a str) -> Self {
        let name = name.as_str();
        let (label, icon) = brand(preset).unwrap_or((name, OTHER_ICON));
        Self { name, kind: preset, label, icon }
    }
}

/// The name and the logo of a brand.
fn brand(preset: &str) -> Option<(&'static str, &'static str)> {
    Some(match preset {
        "google" => ("Google", "icons/google.svg"),
        "apple" => ("Apple", "icons/apple.svg"),
        "github" => ("GitHub", "icons/github.svg"),
        "gitlab" => ("GitLab", "icons/gitlab.svg"),
        "microsoft" => ("Microsoft", "icons/microsoft.svg"),
        "facebook" => ("Facebook", "icons/facebook.svg"),
        "discord" => ("Discord", "icons/discord.svg"),
        "linkedin" => ("LinkedIn", "icons/linkedin.svg"),
        "x" => ("X", "icons/x.svg"),
        "slack" => ("Slack", "icons/slack.svg"),
        "bitbucket" => ("Bitbucket", "icons/bitbucket.svg"),
        "twitch" => ("Twitch", "icons/twitch.svg"),
        "spotify" => ("Spotify", "icons/spotify.svg"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use latchkey_crds::provider::ProviderClient;

    use super::*;

    #[test]
    fn every_preset_except_oidc_and_oauth2_has_a_brand() {
        for preset in ProviderClient::MEMBER_NAMES {
            assert_eq!(brand(preset).is_none(), matches!(preset, "oidc" | "oauth2"), "{preset}");
        }
        let name: ProviderName = "staff".parse().unwrap();
        let button = ProviderButton::new(&name, "oidc");
        assert_eq!((button.label, button.icon), ("staff", OTHER_ICON));
        let button = ProviderButton::new(&name, "github");
        assert_eq!((button.name, button.label), ("staff", "GitHub"));
    }
}
