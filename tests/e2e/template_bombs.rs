//! Bombs: mail templates that are designed to use too much time or memory. The programs that check and render them
//! survive and report the errors.

use std::{fs, process::Command};

use http::StatusCode;
use latchkey_tests::{builders::App, passwords::PASSWORD, process};
use serde_json::{Value, json};

use crate::{
    bombs::{Bomb, LIMIT, bombs},
    support::{MAIL_LIMIT, NAME, TestApp},
};

/// Maximum total size of the bombs that the test puts into one rendered document, in bytes. Such a document can have
/// 512 KiB of JSON.
const MAX_TEMPLATE_BYTES: usize = 200 * 1024;

/// A List with a ConfigMap that contains this template, and an App that uses the template.
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
fn render_check_names_each_rejected_bomb_and_continues() {
    let bombs = bombs();
    let dir = process::fresh_dir("bombs");
    for (number, bomb) in bombs.iter().enumerate() {
        let text = objects(&format!("b{number}"), bomb.template, &bomb.source).to_string();
        fs::write(dir.join(format!("b{number}.json")), text).unwrap();
    }
    fs::write(dir.join("good.json"), objects("good", "confirm.txt", "{{ code }}").to_string()).unwrap();
    let began = std::time::Instant::now();
    let program = process::find_built_program("latchkey-operator").unwrap();
    let output = Command::new(program).args(["render", "--check", "--from"]).arg(&dir).output().unwrap();
    let duration = began.elapsed();
    let errors = String::from_utf8(output.stderr).unwrap();
    // Exit code 1, because some bombs are rejected. A process that a signal has ended has no exit code.
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(duration < LIMIT * u32::try_from(bombs.len()).unwrap(), "{duration:?}");
    for (number, Bomb { name, template, source, refusal }) in bombs.iter().enumerate() {
        let reasons: Vec<&str> =
            errors.lines().filter(|line| line.contains(&format!("App shop/b{number}: "))).collect();
        match (refusal, reasons.as_slice()) {
            (None, []) => {}
            (Some(_), [reason]) if source.len() + template.len() > 256 * 1024 => {
                assert!(reason.contains(&format!("ConfigMap b{number} is over 256 KiB")), "{name}: {reason}");
            }
            (Some(refusal), [reason]) => {
                assert!(
                    reason.contains(&format!("b{number}/{template}:")) && reason.contains(refusal),
                    "{name}: {reason}"
                );
            }
            (refusal, reasons) => panic!("{name}: {reasons:?}, not {refusal:?}"),
        }
        // The App is still rendered, with the default template.
        assert!(errors.lines().any(|line| line == format!("b{number}: valid")), "{name}");
    }
    assert!(errors.lines().any(|line| line == "good: valid"), "{errors}");
}

#[tokio::test]
async fn a_server_with_bombs_sends_the_default_mail_and_keeps_running() {
    let test_app = TestApp::start().await;
    let mut round = 0;
    let mut remaining = bombs();
    remaining.retain(|bomb| bomb.refusal.is_some() && bomb.template == "confirm.txt");
    while !remaining.is_empty() {
        // One document with as many bombs as fit, each as the template of a different mail, because a server checks all
        // templates of an App together.
        let mut templates = serde_json::Map::new();
        let mut bytes = 0;
        for mail in ["confirm", "reset", "account-exists", "password-changed", "address-changing", "new-sign-in"] {
            if let Some(bomb) = remaining.pop_if(|bomb| bytes == 0 || bytes + bomb.source.len() < MAX_TEMPLATE_BYTES) {
                bytes += bomb.source.len();
                templates.insert(format!("{mail}.txt"), json!(bomb.source));
            }
        }
        test_app.edit_rendered(|document| document["mail"]["templates"] = Value::Object(templates)).await;
        round += 1;
        let email = format!("ada{round}@example.com");
        test_app.client().register(test_app.id(), NAME, &email, PASSWORD).await.expect(StatusCode::OK);
        let mail = test_app.stack.mails().wait_for(|mail| mail.is_to(&email), MAIL_LIMIT).await;
        assert!(mail.text.starts_with("Hello,"), "{}", mail.text);
    }
    assert!(test_app.stack.server().read_log().contains("a mail template is invalid; the default is used"));
}

/// The App with these bombs, at most four, as its templates.
pub(crate) fn with_bombs(app: &App, bombs: &[Bomb]) -> App {
    let keys = ["confirm.txt", "reset.txt", "account-exists.txt", "password-changed.txt"];
    bombs.iter().zip(keys).fold(app.clone(), |app, (bomb, key)| app.template(key, &bomb.source))
}
