//! The guides in docs/clients: their manifests are valid, and the App in the guides accepts all their Clients.

use std::{collections::BTreeSet, fs, process::Command};

use latchkey_tests::process;
use serde::Deserialize;
use serde_json::Value;

/// The appID in the guides.
const APP_ID: &str = "platform";
const BASE_URL: &str = "https://auth.example.com";

/// The YAML code blocks of a Markdown document.
fn yaml_blocks(text: &str) -> impl Iterator<Item = &str> {
    text.split("\n```yaml\n").skip(1).filter_map(|rest| rest.split("\n```\n").next())
}

#[test]
fn the_manifests_of_the_guides_are_accepted() {
    let dir = process::fresh_dir("guides");
    let [from, to, keys] = ["from", "to", "keys"].map(|name| dir.join(name));
    for folder in [&from, &to, &keys] {
        fs::create_dir(folder).unwrap();
    }
    let mut clients = BTreeSet::new();
    for entry in fs::read_dir(process::root().join("docs/clients")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for (number, block) in yaml_blocks(&text).enumerate() {
            for document in serde_yaml::Deserializer::from_str(block) {
                let object = Value::deserialize(document).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                if object["kind"] == "Client" {
                    clients.insert(object["metadata"]["name"].as_str().expect("a name").to_owned());
                }
            }
            if block.contains("apiVersion: latchkey.dev/") {
                let name = path.file_stem().unwrap().to_str().unwrap();
                fs::write(from.join(format!("{name}-{number}.yaml")), block).unwrap();
            }
        }
    }
    assert!(clients.len() >= 6, "{clients:?}");
    let operator = process::find_built_program("latchkey-operator").unwrap();
    let folders = [("--from", &from), ("--to", &to), ("--keys", &keys)];
    let mut render = Command::new(operator);
    render.args(["render", "--base-url", BASE_URL]);
    for (flag, folder) in folders {
        render.arg(flag).arg(folder);
    }
    let output = render.output().unwrap();
    let report = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{report}");
    let document = fs::read(to.join(format!("{APP_ID}.json"))).unwrap_or_else(|error| panic!("{error}: {report}"));
    let document: Value = serde_json::from_slice(&document).unwrap();
    let rendered = document["clients"].as_array().expect("clients").iter();
    let rendered: BTreeSet<String> = rendered.map(|client| client["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(rendered, clients, "{report}");
}
