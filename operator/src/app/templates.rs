//! An App's own mail templates: judged by the servers' rules before they are published.

use std::collections::BTreeMap;

use latchkey_crds::templates::{TemplateError, TemplateSet};

use crate::facts::ConfigMapValues;

/// The largest ConfigMap, in octets of keys and values.
pub(crate) const MAX_TOTAL: usize = 256 * 1024;
/// Keys of a ConfigMap: three times as many as there are templates. Each that is none is named in the status.
const MAX_KEYS: usize = 64;

/// The templates that can be published, and what is wrong with the others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) good: BTreeMap<String, String>,
    /// Each names the ConfigMap, the key, the line and what to do.
    pub(crate) faults: Vec<String>,
}

/// Judges each template of a ConfigMap. What is broken is left out, and its default is sent instead.
pub(crate) fn check(config_map: &str, values: &ConfigMapValues) -> Checked {
    let total: usize = values.text.iter().map(|(key, value)| key.len() + value.len()).sum();
    if total > MAX_TOTAL {
        let fault = format!("ConfigMap {config_map} is over {} KiB; shorten it", MAX_TOTAL / 1024);
        return Checked { good: BTreeMap::new(), faults: vec![fault] };
    }
    if values.text.len() + values.binary.len() > MAX_KEYS {
        let fault = format!("ConfigMap {config_map} has more than {MAX_KEYS} keys; keep only templates in it");
        return Checked { good: BTreeMap::new(), faults: vec![fault] };
    }
    let mut checked = Checked::default();
    for key in &values.binary {
        checked.faults.push(format!("{config_map}/{key}: is under binaryData; put the template under data"));
    }
    let mut set = TemplateSet::default();
    for (key, source) in &values.text {
        match set.add(key, source) {
            Ok(()) => {
                checked.good.insert(key.clone(), source.clone());
            }
            Err(TemplateError { line: Some(line), reason }) => {
                checked.faults.push(format!("{config_map}/{key}:{line}: {reason}"));
            }
            Err(TemplateError { line: None, reason }) => checked.faults.push(format!("{config_map}/{key}: {reason}")),
        }
    }
    checked
}

#[cfg(test)]
#[path = "../../../crds/src/templates/bombs.rs"]
mod bombs;
#[cfg(test)]
#[path = "../../../crds/src/templates/samples.rs"]
mod samples;

#[cfg(test)]
mod tests {
    use latchkey_crds::templates::{Mail, Part, VARIABLES};

    use super::*;

    fn check_one(key: &str, source: &str) -> Checked {
        let text = [(key.to_owned(), source.to_owned())].into();
        check("shop-mail", &ConfigMapValues { text, binary: Vec::new() })
    }

    #[track_caller]
    fn good(key: &str, source: &str) {
        let checked = check_one(key, source);
        assert_eq!(checked.faults, Vec::<String>::new());
        assert_eq!(checked.good[key], source);
    }

    #[track_caller]
    fn bad(key: &str, source: &str, place: &str, what: &str) {
        let checked = check_one(key, source);
        assert!(checked.good.is_empty(), "{key} is published");
        assert_eq!(checked.faults.len(), 1);
        assert!(checked.faults[0].starts_with(&format!("shop-mail/{key}{place}")), "{}", checked.faults[0]);
        assert!(checked.faults[0].contains(what), "{}", checked.faults[0]);
    }

    /// The servers' tests run over the same samples: what is published here is taken there, what is refused is not.
    #[test]
    fn what_the_servers_take_is_published_and_nothing_else() {
        for (name, source) in samples::good() {
            good(name, &source);
        }
        for samples::Bad { name, source, line, reason } in samples::bad() {
            let place = line.map_or_else(|| ": ".to_owned(), |line| format!(":{line}: "));
            bad(name, &source, &place, reason);
        }
    }

    #[test]
    fn a_bomb_is_refused_by_name_or_published_within_its_time() {
        for bombs::Bomb { what, key, source, refusal } in bombs::bombs() {
            let began = std::time::Instant::now();
            let checked = check_one(key, &source);
            let took = began.elapsed();
            assert!(took < bombs::LIMIT, "{what}: {took:?}");
            match (refusal, checked.faults.as_slice()) {
                (None, []) => assert_eq!(checked.good[key], source, "{what}"),
                // More than a ConfigMap may hold.
                (Some(_), [fault]) if fault.starts_with("ConfigMap shop-mail is over 256 KiB") => {}
                (Some(refusal), [fault]) => {
                    assert!(
                        fault.starts_with(&format!("shop-mail/{key}:")) && fault.contains(refusal),
                        "{what}: {fault}"
                    );
                }
                (refusal, faults) => panic!("{what}: {faults:?}, not {refusal:?}"),
            }
        }
    }

    #[test]
    fn every_variable_is_there_in_every_mail() {
        let all = VARIABLES.map(|variable| format!("{{{{ {variable} }}}}")).concat();
        for mail in Mail::ALL {
            for part in Part::ALL {
                good(&mail.template(part), &all);
                bad(&mail.template(part), "\n{{ email }}", ":2: ", "there is no variable email; there are app, name");
            }
        }
    }

    #[test]
    fn a_config_map_ends_at_its_limit() {
        let of = |length: usize| {
            let text = (0..4).map(|index| (format!("k{index}.txt"), "a".repeat(length / 4 - 6))).collect();
            check("shop-mail", &ConfigMapValues { text, binary: Vec::new() }).faults
        };
        assert_eq!(of(MAX_TOTAL).len(), 4, "four unknown names, and no word of the size");
        assert_eq!(of(MAX_TOTAL + 4), ["ConfigMap shop-mail is over 256 KiB; shorten it"]);
    }

    #[test]
    fn a_config_map_of_many_keys_is_refused_as_a_whole() {
        let of = |keys: usize| {
            let text = (1..keys).map(|index| (format!("k{index}"), String::new())).collect();
            check("shop-mail", &ConfigMapValues { text, binary: vec!["logo.png".into()] }).faults
        };
        assert_eq!(of(MAX_KEYS).len(), MAX_KEYS);
        assert_eq!(of(MAX_KEYS + 1), ["ConfigMap shop-mail has more than 64 keys; keep only templates in it"]);
    }

    #[test]
    fn unknown_names_are_told_and_the_others_go_on() {
        let text = [("confirm.txt", "{{ code }}"), ("confirm.md", "x"), ("welcome.txt", "x"), ("confirm", "x")];
        let text = text.map(|(key, source)| (key.to_owned(), source.to_owned())).into();
        let checked = check("shop-mail", &ConfigMapValues { text, binary: vec!["logo.png".into()] });
        assert_eq!(checked.good.keys().collect::<Vec<_>>(), ["confirm.txt"]);
        assert_eq!(checked.faults.len(), 4);
        assert!(checked.faults[0].starts_with("shop-mail/logo.png: is under binaryData"));
        assert!(checked.faults[1..].iter().all(|fault| fault.contains("is not a template's name; use <mail>.subject")));
    }
}
