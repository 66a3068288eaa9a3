//! Mail templates made to cost too much: the programs that check and render them live, and say what is wrong.

use std::{fs, process::Command};

use http::StatusCode;
use latchkey_tests::{builders::App, process};
use serde_json::{Value, json};

use crate::{
    bombs::{Bomb, LIMIT, bombs},
    support::{MAIL_LIMIT, NAME, PASSWORD, Shop},
};

/// Bytes of the templates of one document: a Secret's document may have 512 KiB, in JSON.
const MAX_TEMPLATES: usize = 200 * 1024;

/// An App with this template.
fn objects(name: &str, key: &str, source: &str) -> Value {
    let config_map = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "shop" },
        "data": { key: source },
    });
    let app = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": name, "namespace": "shop" },
        "spec": { "mail": { "templatesRef": { "name": name } } },
    });
    json!({ "apiVersion": "v1", "kind": "List", "items": [config_map, app] })
}

#[test]
fn render_check_refuses_each_bomb_by_name_and_goes_on() {
    let bombs = bombs();
    let dir = process::fresh_dir("bombs");
    for (number, bomb) in bombs.iter().enumerate() {
        let text = objects(&format!("b{number}"), bomb.key, &bomb.source).to_string();
        fs::write(dir.join(format!("b{number}.json")), text).unwrap();
    }
    fs::write(dir.join("good.json"), objects("good", "confirm.txt", "{{ code }}").to_string()).unwrap();
    let began = std::time::Instant::now();
    let program = process::our_program("latchkey-operator").unwrap();
    let output = Command::new(program).args(["render", "--check", "--from"]).arg(&dir).output().unwrap();
    let took = began.elapsed();
    let said = String::from_utf8(output.stderr).unwrap();
    // Some are refused. A process that was ended by a signal has no code.
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(took < LIMIT * u32::try_from(bombs.len()).unwrap(), "{took:?}");
    for (number, Bomb { what, key, source, refusal }) in bombs.iter().enumerate() {
        let reasons: Vec<&str> = said.lines().filter(|line| line.contains(&format!("App shop/b{number}: "))).collect();
        match (refusal, reasons.as_slice()) {
            (None, []) => {}
            (Some(_), [reason]) if source.len() + key.len() > 256 * 1024 => {
                assert!(reason.contains(&format!("ConfigMap b{number} is over 256 KiB")), "{what}: {reason}");
            }
            (Some(refusal), [reason]) => {
                assert!(reason.contains(&format!("b{number}/{key}:")) && reason.contains(refusal), "{what}: {reason}");
            }
            (refusal, reasons) => panic!("{what}: {reasons:?}, not {refusal:?}"),
        }
        // Its App is served all the same, with the default.
        assert!(said.lines().any(|line| line == format!("b{number}: valid")), "{what}");
    }
    assert!(said.lines().any(|line| line == "good: valid"), "{said}");
}

#[tokio::test]
async fn a_server_that_is_given_bombs_sends_the_default_and_goes_on() {
    let shop = Shop::open().await;
    let mut round = 0;
    let mut left = bombs();
    left.retain(|bomb| bomb.refusal.is_some() && bomb.key == "confirm.txt");
    while !left.is_empty() {
        // As many as one document holds, each as the template of another mail: a server checks all of an App at once.
        let mut templates = serde_json::Map::new();
        let mut bytes = 0;
        for mail in ["confirm", "reset", "account-exists", "password-changed", "address-changing", "new-sign-in"] {
            if let Some(bomb) = left.pop_if(|bomb| bytes == 0 || bytes + bomb.source.len() < MAX_TEMPLATES) {
                bytes += bomb.source.len();
                templates.insert(format!("{mail}.txt"), json!(bomb.source));
            }
        }
        shop.edit_rendered(|document| document["mail"]["templates"] = Value::Object(templates)).await;
        round += 1;
        let email = format!("ada{round}@example.com");
        shop.client().register(shop.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
        let mail = shop.stack.mails().wait_for(|mail| mail.is_to(&email), MAIL_LIMIT).await;
        assert!(mail.text.starts_with("Hello,"), "{}", mail.text);
    }
    assert!(shop.stack.server().logged().contains("a mail template cannot be used; the default stands in"));
}

/// The App with these bombs as its templates.
pub(crate) fn with_bombs(app: &App, bombs: &[Bomb]) -> App {
    let keys = ["confirm.txt", "reset.txt", "account-exists.txt", "password-changed.txt"];
    bombs.iter().zip(keys).fold(app.clone(), |app, (bomb, key)| app.template(key, &bomb.source))
}
