//! Checks an App's own mail templates against the servers' rules before the templates are published.

use std::collections::BTreeMap;

use latchkey_crds::templates::{TemplateError, TemplateSet};

use crate::facts::ConfigMapValues;

/// The maximum size of a ConfigMap with templates, in bytes of keys and values.
pub(crate) const MAX_CONFIG_MAP_BYTES: usize = 256 * 1024;
/// The maximum number of keys in a ConfigMap with templates: more than twice the 24 possible templates (8 mails with 3
/// parts each). The status names each key that is not a template, so the number of keys needs a bound.
const MAX_CONFIG_MAP_KEYS: usize = 64;

/// The templates that can be published, and the errors in the other templates.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckedTemplates {
    pub(crate) valid: BTreeMap<String, String>,
    /// Each message names the ConfigMap and says what to do. If possible, it also names the key and the line.
    pub(crate) errors: Vec<String>,
}

/// Checks each template of a ConfigMap. Leaves out an invalid template; the servers use the default template instead.
/// If the ConfigMap is over a limit, leaves out all templates.
pub(crate) fn check_templates(config_map: &str, values: &ConfigMapValues) -> CheckedTemplates {
    let total: usize = values.text.iter().map(|(key, value)| key.len() + value.len()).sum();
    if total > MAX_CONFIG_MAP_BYTES {
        let error = format!("ConfigMap {config_map} is over {} KiB; shorten it", MAX_CONFIG_MAP_BYTES / 1024);
        return CheckedTemplates { valid: BTreeMap::new(), errors: vec![error] };
    }
    if values.text.len() + values.binary.len() > MAX_CONFIG_MAP_KEYS {
        let error =
            format!("ConfigMap {config_map} has more than {MAX_CONFIG_MAP_KEYS} keys; keep only templates in it");
        return CheckedTemplates { valid: BTreeMap::new(), errors: vec![error] };
    }
    let mut checked = CheckedTemplates::default();
    for key in values.binary.keys() {
        checked.errors.push(format!("{config_map}/{key}: is under binaryData; put the template under data"));
    }
    let mut set = TemplateSet::default();
    for (key, source) in &values.text {
        match set.add(key, source) {
            Ok(()) => {
                checked.valid.insert(key.clone(), source.clone());
            }
            Err(TemplateError { line: Some(line), reason }) => {
                checked.errors.push(format!("{config_map}/{key}:{line}: {reason}"));
            }
            Err(TemplateError { line: None, reason }) => checked.errors.push(format!("{config_map}/{key}: {reason}")),
        }
    }
    checked
}

#[cfg(test)]
#[path = "../../../crds/src/templates/bombs.rs"]
mod bombs;
#[cfg(test)]
#[path = "../../../crds/src/templates/samples.rs"]
mod sample_templates;

#[cfg(test)]
mod tests {
    use latchkey_crds::templates::{MailPart, MailTemplate, VARIABLES};

    use super::*;

    fn check_one(key: &str, source: &str) -> CheckedTemplates {
        let text = [(key.to_owned(), source.to_owned())].into();
        check_templates("shop-mail", &ConfigMapValues { text, binary: BTreeMap::new() })
    }

    /// A binary value, which cannot be a template.
    fn logo() -> BTreeMap<String, Vec<u8>> {
        [("logo.png".to_owned(), Vec::new())].into()
    }

    #[track_caller]
    fn assert_valid(key: &str, source: &str) {
        let checked = check_one(key, source);
        assert_eq!(checked.errors, Vec::<String>::new());
        assert_eq!(checked.valid[key], source);
    }

    #[track_caller]
    fn assert_invalid(key: &str, source: &str, position: &str, reason: &str) {
        let checked = check_one(key, source);
        assert!(checked.valid.is_empty(), "{key} is published");
        assert_eq!(checked.errors.len(), 1);
        assert!(checked.errors[0].starts_with(&format!("shop-mail/{key}{position}")), "{}", checked.errors[0]);
        assert!(checked.errors[0].contains(reason), "{}", checked.errors[0]);
    }

    /// A test in the server crate checks that servers accept and reject the same sample templates.
    #[test]
    fn only_templates_that_servers_accept_are_published() {
        for (name, source) in sample_templates::valid_templates() {
            assert_valid(name, &source);
        }
        for sample_templates::InvalidTemplate { name, source, line, reason } in sample_templates::invalid_templates() {
            let position = line.map_or_else(|| ": ".to_owned(), |line| format!(":{line}: "));
            assert_invalid(name, &source, &position, reason);
        }
    }

    #[test]
    fn a_template_bomb_is_rejected_or_accepted_in_time() {
        for bombs::Bomb { name, template, source, refusal } in bombs::bombs() {
            let began = std::time::Instant::now();
            let checked = check_one(template, &source);
            let took = began.elapsed();
            assert!(took < bombs::LIMIT, "{name}: {took:?}");
            match (refusal, checked.errors.as_slice()) {
                (None, []) => assert_eq!(checked.valid[template], source, "{name}"),
                // The bomb is over the size limit of a ConfigMap, which is checked first.
                (Some(_), [error]) if error.starts_with("ConfigMap shop-mail is over 256 KiB") => {}
                (Some(reason), [error]) => {
                    assert!(
                        error.starts_with(&format!("shop-mail/{template}:")) && error.contains(reason),
                        "{name}: {error}"
                    );
                }
                (reason, errors) => panic!("{name}: {errors:?}, not {reason:?}"),
            }
        }
    }

    #[test]
    fn every_variable_exists_in_every_mail() {
        let all = VARIABLES.map(|variable| format!("{{{{ {variable} }}}}")).concat();
        for mail in MailTemplate::ALL {
            for part in MailPart::ALL {
                assert_valid(&mail.template_name(part), &all);
                assert_invalid(
                    &mail.template_name(part),
                    "\n{{ email }}",
                    ":2: ",
                    "there is no variable email; there are app, name",
                );
            }
        }
    }

    #[test]
    fn a_config_map_over_its_size_limit_is_rejected() {
        let errors_of = |length: usize| {
            let text = (0..4).map(|index| (format!("k{index}.txt"), "a".repeat(length / 4 - 6))).collect();
            check_templates("shop-mail", &ConfigMapValues { text, binary: BTreeMap::new() }).errors
        };
        assert_eq!(errors_of(MAX_CONFIG_MAP_BYTES).len(), 4, "four unknown names, and nothing about the size");
        assert_eq!(errors_of(MAX_CONFIG_MAP_BYTES + 4), ["ConfigMap shop-mail is over 256 KiB; shorten it"]);
    }

    #[test]
    fn a_config_map_with_too_many_keys_is_rejected_as_a_whole() {
        let errors_of = |keys: usize| {
            let text = (1..keys).map(|index| (format!("k{index}"), String::new())).collect();
            check_templates("shop-mail", &ConfigMapValues { text, binary: logo() }).errors
        };
        assert_eq!(errors_of(MAX_CONFIG_MAP_KEYS).len(), MAX_CONFIG_MAP_KEYS);
        assert_eq!(
            errors_of(MAX_CONFIG_MAP_KEYS + 1),
            ["ConfigMap shop-mail has more than 64 keys; keep only templates in it"]
        );
    }

    #[test]
    fn unknown_template_names_are_reported_and_valid_templates_are_published() {
        let text = [("confirm.txt", "{{ code }}"), ("confirm.md", "x"), ("welcome.txt", "x"), ("confirm", "x")];
        let text = text.map(|(key, source)| (key.to_owned(), source.to_owned())).into();
        let checked = check_templates("shop-mail", &ConfigMapValues { text, binary: logo() });
        assert_eq!(checked.valid.keys().collect::<Vec<_>>(), ["confirm.txt"]);
        assert_eq!(checked.errors.len(), 4);
        assert!(checked.errors[0].starts_with("shop-mail/logo.png: is under binaryData"));
        assert!(checked.errors[1..].iter().all(|error| error.contains("is not a template's name; use <mail>.subject")));
    }
}
