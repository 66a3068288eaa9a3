//! The texts of a page: the App's own texts, and the default for each text that the App does not replace.

use std::{borrow::Cow, sync::Arc};

use latchkey_crds::pages::{
    Language,
    texts::{Text, Texts, default_texts},
};
use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, Object, ObjectRepr, from_args},
};

/// The variables that contain the name of a Client. Their values get the two isolating characters below, because
/// another team chooses the name, and the name stands within sentences. In the list of devices, the variable `device`
/// begins with the name of a Client.
const WITH_CLIENT_NAMES: [&str; 2] = ["client", "device"];
/// These two characters isolate the direction of the text between them (Unicode Standard Annex 9, 2.4): a right-to-left
/// name cannot change the order of the words around it. Unlike `<bdi>`, the characters also work in titles and
/// attributes.
const FIRST_STRONG_ISOLATE: char = '\u{2068}';
const POP_DIRECTIONAL_ISOLATE: char = '\u{2069}';

/// The texts of an App in one language. Clones share the texts.
#[derive(Clone, Debug)]
pub struct PageTexts {
    language: Language,
    /// The App's own texts.
    own: Option<Arc<Texts>>,
}

/// The function `t` of templates: `t("id")`, or `t("id", variable=value)`.
#[derive(Debug)]
pub(super) struct TextFunction(pub(super) PageTexts);

// === impl PageTexts ===

impl PageTexts {
    pub fn new(language: Language, own: Option<Arc<Texts>>) -> Self {
        Self { language, own }
    }

    pub fn language(&self) -> Language {
        self.language
    }

    /// The value of the attribute `dir`.
    pub(super) fn direction(&self) -> &'static str {
        match self.language {
            Language::En | Language::De => "ltr",
        }
    }

    /// Returns a text with the values of its variables. If the text does not exist, returns an empty text. Tests check
    /// that no page has an empty text.
    pub(super) fn format(&self, id: &str, values: &[(&str, &str)]) -> String {
        self.try_format(id, values).unwrap_or_default()
    }

    fn try_format(&self, id: &str, values: &[(&str, &str)]) -> Result<String, Error> {
        let invalid = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
        let text = self.find(id).ok_or_else(|| invalid(format!("there is no text {id}")))?;
        let isolated: Vec<(&str, Cow<'_, str>)> =
            values.iter().map(|(name, value)| (*name, isolate_client_name(name, value))).collect();
        let value = |variable: &str| isolated.iter().find(|(name, _)| *name == variable).map(|(_, value)| &**value);
        if let Some(variable) = text.variables().find(|variable| value(variable).is_none()) {
            return Err(invalid(format!("the text {id} needs the variable {variable}")));
        }
        Ok(text.format(|variable| value(variable).unwrap_or_default()))
    }

    /// The App's own text, or the default text. An own text with a variable that the default text does not have is
    /// ignored: such a text can come from an operator of another version.
    fn find(&self, id: &str) -> Option<&Text> {
        let default = default_texts(self.language).get(id)?;
        let is_known = |variable: &str| default.variables().any(|known| known == variable);
        let own = self.own.as_ref().and_then(|own| own.get(id));
        own.filter(|own| own.variables().all(is_known)).or(Some(default))
    }
}

// === impl TextFunction ===

impl Object for TextFunction {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (id, variables): (&str, Kwargs) = from_args(args)?;
        let mut values = Vec::new();
        for name in variables.args() {
            values.push((name, variables.get::<Value>(name)?));
        }
        let values: Vec<(&str, Cow<'_, str>)> = values.iter().map(|(name, value)| (*name, as_text(value))).collect();
        let values: Vec<(&str, &str)> = values.iter().map(|(name, value)| (*name, &**value)).collect();
        Ok(self.0.try_format(id, &values)?.into())
    }
}

/// The value of a variable. If it contains the name of a Client, it gets the isolating characters. The name itself
/// never contains them.
fn isolate_client_name<'v>(variable: &str, value: &'v str) -> Cow<'v, str> {
    if WITH_CLIENT_NAMES.contains(&variable) {
        format!("{FIRST_STRONG_ISOLATE}{value}{POP_DIRECTIONAL_ISOLATE}").into()
    } else {
        value.into()
    }
}

fn as_text(value: &Value) -> Cow<'_, str> {
    value.as_str().map_or_else(|| value.to_string().into(), Cow::Borrowed)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fmt::Write};

    use super::*;

    fn variables(text: &Text) -> BTreeSet<&str> {
        text.variables().collect()
    }

    #[test]
    fn both_languages_have_the_same_texts_and_variables() {
        let english = default_texts(Language::En);
        let german = default_texts(Language::De);
        assert!(english.keys().eq(german.keys()));
        for (id, text) in english {
            assert_eq!(variables(text), variables(&german[id]), "{id}");
        }
    }

    /// The parser leaves out texts that it cannot parse, so this test compares its result with the lines of the files.
    #[test]
    fn every_text_of_the_files_is_parsed() {
        for (language, file) in [
            (Language::En, include_str!("../../../crds/src/pages/texts/en.ftl")),
            (Language::De, include_str!("../../../crds/src/pages/texts/de.ftl")),
        ] {
            let written = file.lines().filter_map(|line| line.split_once(" = ")).map(|(id, _)| id);
            let written: Vec<&str> = written.filter(|id| !id.starts_with('#')).collect();
            let parsed: BTreeSet<&str> = default_texts(language).keys().map(String::as_str).collect();
            assert_eq!(written.iter().copied().collect::<BTreeSet<_>>(), parsed);
            assert_eq!(written.len(), parsed.len(), "a text is there twice");
        }
    }

    #[test]
    fn the_texts_of_an_app_replace_the_default_texts() {
        let own = Texts::from([
            ("link-home".to_owned(), "Back to { $app }!".parse().unwrap()),
            ("cancel".to_owned(), "Cancel { $everything }".parse().unwrap()),
        ]);
        let texts = PageTexts::new(Language::En, Some(Arc::new(own)));
        assert_eq!(texts.format("link-home", &[("app", "<b>")]), "Back to <b>!");
        assert_eq!(texts.format("save", &[]), "Save");
        assert_eq!(texts.format("cancel", &[]), "Cancel", "there is no such variable");
        assert!(texts.try_format("no-such-text", &[]).is_err());
        assert!(texts.try_format("link-home", &[]).is_err());
    }

    #[test]
    fn the_name_of_a_client_does_not_change_the_direction_of_the_sentence() {
        let texts = PageTexts::new(Language::En, None);
        let title = texts.format("consent-title", &[("client", "\u{5d0}\u{5d1}")]);
        assert_eq!(title, "\u{2068}\u{5d0}\u{5d1}\u{2069} wants to use your account");
        let label = texts.format("sessions-end-label", &[("device", "\u{5d0}\u{5d1} · Firefox")]);
        assert_eq!(label, "Log out \u{2068}\u{5d0}\u{5d1} · Firefox\u{2069}");
        assert!(!texts.format("link-home", &[("app", "Shop")]).contains('\u{2068}'));
    }

    #[test]
    fn the_list_in_the_docs_is_up_to_date() {
        let mut page = String::from(
            "# Texts of the pages\n\n\
             The texts of the hosted pages, in English and German. An App can replace each of them: `spec.pages.textsRef`\n\
             refers to a ConfigMap with the keys `en.ftl` and `de.ftl` in the syntax of [Fluent](https://projectfluent.org).\n\
             A text is plain text of at most 500 characters, with the variables of the default text. HTML has no effect.\n\n\
             ```yaml\n\
             apiVersion: v1\n\
             kind: ConfigMap\n\
             metadata:\n\
             \x20 name: shop-texts\n\
             data:\n\
             \x20 en.ftl: |\n\
             \x20   login-title = Welcome back\n\
             \x20   link-home = Back to { $app }\n\
             ```\n\n\
             | ID | English | German |\n|---|---|---|\n",
        );
        for (id, text) in default_texts(Language::En) {
            writeln!(page, "| `{id}` | {text} | {} |", default_texts(Language::De)[id]).unwrap();
        }
        crate::http::docs::assert_up_to_date("pages-texts.md", &page);
    }
}
