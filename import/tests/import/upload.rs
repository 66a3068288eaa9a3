//! Tests of imports into a mock server: batches, retries, tokens, refusals.

use std::{
    collections::HashSet,
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use latchkey_import::Outcome;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{MockServer, NOW, Reply, Request, Run, reply_created, results, run};

const TOKEN: &str = "header.claims.signature";
const HASH: &str = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

/// An input file and a token file.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new(input: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("input"), input).unwrap();
        fs::write(folder.path().join("token"), format!("{TOKEN}\n")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Imports the input as ndjson. Asserts that neither the token nor a hash is printed.
    fn import(&self, server: &MockServer, options: &[&str]) -> Run {
        let (input, token) = (self.path("input"), self.path("token"));
        let mut arguments = vec!["ndjson", &input, "--app", "shop", "--token-file", &token, "--server", &server.url];
        arguments.extend(options);
        let run = run(&arguments);
        for text in [&run.out, &run.log] {
            assert!(!text.contains(TOKEN) && !text.contains("signature"), "{text}");
            assert!(!text.contains("N9qo8uLOickgx2ZMRZoMye"), "{text}");
        }
        run
    }
}

fn line(number: usize) -> String {
    json!({ "external_id": format!("crm-{number}"), "email": format!("user-{number}@example.com"), "password_hash": HASH })
        .to_string()
}

fn lines(number: usize) -> String {
    (0..number).map(|number| line(number) + "\n").collect()
}

fn error(status: u16, headers: &'static str, code: &str) -> Reply {
    Reply::Response(
        status,
        headers,
        json!({ "error": code, "error_description": format!("{HASH} {TOKEN}") }).to_string(),
    )
}

#[test]
fn a_batch_has_at_most_a_thousand_lines() {
    let (server, files) = (MockServer::creates_all(), Files::new(&lines(2001)));
    let run = files.import(&server, &[]);
    assert_eq!((run.outcome, run.log.as_str()), (Outcome::Complete, ""));
    assert_eq!(run.out, "Users in the input: 2001\n  created: 2001\n  unchanged: 0\n  refused: 0\n");
    let requests = server.requests();
    assert_eq!(requests.iter().map(|request| request.lines().len()).collect::<Vec<_>>(), [1000, 1000, 1]);
    let sent: Vec<Value> = requests.iter().flat_map(Request::lines).collect();
    assert_eq!(sent[2000]["external_id"], "crm-2000");
    for request in requests {
        assert_eq!(request.target.trim_end(), "POST /v1/shop/imports?source=ndjson HTTP/1.1");
        assert_eq!(request.content_type, "application/x-ndjson");
        assert_eq!(request.authorization, format!("Bearer {TOKEN}"));
    }
}

#[test]
fn a_batch_has_at_most_half_a_mebibyte() {
    let name = "x".repeat(60_000);
    let input: String =
        (0..150).map(|number| format!("{{\"external_id\":\"{number}\",\"name\":\"{name}\"}}\n")).collect();
    let (server, files) = (MockServer::creates_all(), Files::new(&input));
    assert_eq!(files.import(&server, &[]).outcome, Outcome::Complete);
    let sizes: Vec<usize> = server.requests().iter().map(|request| request.body.len()).collect();
    assert!(sizes.len() == 19 && sizes.iter().all(|size| *size <= 512 * 1024), "{sizes:?}");
    assert_eq!(sizes.iter().sum::<usize>(), input.len());
}

/// If a batch contained a line above 64 KiB, the server would refuse the whole batch with 413.
#[test]
fn a_line_above_64_kib_is_refused_and_the_others_are_imported() {
    let user = |id: &str, name: usize| {
        json!({ "external_id": id, "email": "ada@example.com", "name": "x".repeat(name) }).to_string()
    };
    let at_limit = 64 * 1024 - user("crm-limit", 0).len();
    let long_id = "i".repeat(70_000);
    let input = [
        line(0),
        user("crm-limit", at_limit),
        user("crm-above", at_limit + 1),
        user(&long_id, 0),
        user("crm-large", 3 * 1024 * 1024),
        format!("[{}]", "1,".repeat(40_000)),
        line(1),
    ];
    let (server, files) = (MockServer::creates_all(), Files::new(&input.join("\n")));
    let run = files.import(&server, &[]);
    assert_eq!(run.outcome, Outcome::SomeRefused);
    let expected = "Users in the input: 7\n  created: 3\n  unchanged: 0\n  refused: 3\n  not readable as a user: 1\n";
    assert_eq!(run.out, expected);
    let (short_id, file) = ("i".repeat(255), files.path("input"));
    let reason = "too_long (the line for the server is above 64 KiB)";
    let expected = format!(
        "crm-above: {reason}\n{short_id}…: {reason}\n{file}, line 5: {reason}\n{file}, line 6: is not a user in the expected form\n"
    );
    assert_eq!(run.log, expected);
    let requests = server.requests();
    assert_eq!(requests.len(), 1);
    let sent: Vec<Value> = requests[0].lines().iter().map(|line| line["external_id"].clone()).collect();
    assert_eq!(sent, ["crm-0", "crm-limit", "crm-1"]);
}

#[test]
fn a_line_does_not_grow_when_its_hash_is_dropped() {
    // If each number were parsed and written again, it would become 1000000000000000.0.
    let numbers = vec!["1e15"; 12_000].join(",");
    let input =
        format!(r#"{{"external_id":"1","email":"ada@example.com","other":[{numbers}],"password_hash":"{HASH}"}}"#);
    let server = MockServer::start(|number, request| match number {
        1 => results(&[Err(("invalid_request", json!([{ "field": "password_hash", "code": "hash_too_costly" }])))]),
        _ => reply_created(request),
    });
    let run = Files::new(&input).import(&server, &[]);
    assert_eq!(run.outcome, Outcome::Complete, "{}", run.log);
    let sizes: Vec<usize> = server.requests().iter().map(|request| request.body.len()).collect();
    assert!(sizes.len() == 2 && sizes[1] < sizes[0] && sizes[0] <= 64 * 1024, "{sizes:?}");
}

#[test]
fn every_request_of_a_dry_run_has_the_parameter_dry_run() {
    let (server, files) = (MockServer::creates_all(), Files::new(&lines(1)));
    let run = files.import(&server, &["--dry-run"]);
    assert!(run.out.contains("would be created: 1"), "{}", run.out);
    assert!(server.requests()[0].target.contains("/v1/shop/imports?source=ndjson&dry_run=true "));
}

#[test]
fn retry_after_is_honoured() {
    let server = MockServer::start(|number, request| match number {
        1 => error(429, "retry-after: 2\r\n", "too_many_requests"),
        _ => reply_created(request),
    });
    let began = Instant::now();
    assert_eq!(Files::new(&lines(1)).import(&server, &[]).outcome, Outcome::Complete);
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn temporary_failures_are_retried() {
    let server = MockServer::start(|number, request| match number {
        1 => Reply::Drop,
        2 => error(503, "", "temporarily_unavailable"),
        _ => reply_created(request),
    });
    assert_eq!(Files::new(&lines(3)).import(&server, &[]).outcome, Outcome::Complete);
    let requests = server.requests();
    assert_eq!(requests.len(), 3);
    assert!(requests.iter().all(|request| request.body == requests[0].body));
}

#[test]
fn the_token_is_read_again_after_401() {
    let files = Files::new(&lines(1500));
    let token = files.path("token");
    let server = MockServer::start(move |number, request| match number {
        0 | 1 => reply_created(request),
        _ if request.authorization == "Bearer renewed" => reply_created(request),
        _ => {
            fs::write(&token, "renewed").unwrap();
            error(401, "", "invalid_client")
        }
    });
    let run = files.import(&server, &[]);
    assert_eq!(run.outcome, Outcome::Complete, "{}", run.log);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn no_user_is_sent_if_the_server_refuses_the_import() {
    for (status, code, expected) in [
        (401, "invalid_client", "does not accept the token"),
        (403, "access_denied", "Importer"),
        (404, "app_not_found", "does not serve the App"),
        (400, "invalid_request", "400 invalid_request"),
        (413, "$2a$10$N9qo8uLOickgx2ZMRZoMye", "rejects the request: 413"),
    ] {
        let server = MockServer::start(move |_, _| error(status, "", code));
        let run = Files::new(&lines(3000)).import(&server, &[]);
        assert_eq!(run.outcome, Outcome::Aborted, "{status}");
        assert!(run.log.contains(expected), "{status}: {}", run.log);
        assert_eq!(server.requests().len(), 0, "{status}");
    }
}

#[test]
fn a_token_that_becomes_invalid_ends_the_import() {
    let server = MockServer::start(|number, request| match number {
        0 | 1 => reply_created(request),
        _ => error(401, "", "invalid_client"),
    });
    let run = Files::new(&lines(3000)).import(&server, &[]);
    assert_eq!(run.outcome, Outcome::Aborted);
    assert!(run.out.contains("  created: 1000\n"), "{}", run.out);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn a_refused_hash_is_dropped_and_the_user_imported() {
    let server = MockServer::start(|number, request| {
        let refused =
            |code| Err(("invalid_request", json!([{ "field": "password_hash", "code": code, "message": "-" }])));
        match number {
            1 => results(&[
                Ok("created"),
                refused("hash_too_costly"),
                refused("hash_not_supported"),
                refused("too_many_hash_kinds"),
            ]),
            2 => {
                assert!(request.lines().iter().all(|line| line.get("password_hash").is_none()));
                results(&[Ok("created"), Ok("unchanged"), Err(("email_taken", json!([])))])
            }
            _ => reply_created(request),
        }
    });
    let run = Files::new(&lines(4)).import(&server, &[]);
    assert_eq!(run.outcome, Outcome::SomeRefused);
    assert_eq!(run.log, "crm-3: email_taken\n");
    for expected in [
        "  created: 2\n  unchanged: 1\n  refused: 1\n",
        "  password hashes, bcrypt, refused by the server (hash_too_costly): 1\n",
        "  password hashes, bcrypt, refused by the server (hash_not_supported): 1\n",
        "  password hashes, bcrypt, refused by the server (too_many_hash_kinds): 1\n",
    ] {
        assert!(run.out.contains(expected), "{}", run.out);
    }
    let sent: Vec<Value> = server.requests()[1].lines().iter().map(|line| line["external_id"].clone()).collect();
    assert_eq!(sent, ["crm-1", "crm-2", "crm-3"]);
}

#[test]
fn a_hash_error_for_a_user_without_a_hash_causes_no_loop() {
    let server = MockServer::start(|_, request| {
        let refused = Err(("invalid_request", json!([{ "field": "password_hash", "code": "hash_too_costly" }])));
        results(&vec![refused; request.lines().len()])
    });
    let run = Files::new(&lines(2)).import(&server, &[]);
    assert_eq!(run.outcome, Outcome::SomeRefused);
    assert_eq!(
        run.log,
        "crm-0: invalid_request (password_hash hash_too_costly)\ncrm-1: invalid_request (password_hash hash_too_costly)\n"
    );
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn refused_users_are_listed_with_their_fields() {
    let server = MockServer::start(|_, _| {
        let fields = json!([{ "field": "identities[0].provider", "code": "unknown_provider" }, { "field": "email", "code": HASH }]);
        results(&[Err(("invalid_request", fields)), Err((HASH, json!([])))])
    });
    let run = Files::new(&lines(2)).import(&server, &[]);
    assert_eq!(run.outcome, Outcome::SomeRefused);
    let expected = "crm-0: invalid_request (identities[0].provider unknown_provider, email invalid)\ncrm-1: refused\n";
    assert_eq!(run.log, expected);
    assert!(run.out.contains("  refused: 2\n"));
}

#[test]
fn ignored_fields_are_reported() {
    let server = MockServer::start(|_, _| {
        let body =
            json!({ "results": [{ "line": 1, "outcome": "created", "id": "1" }], "ignored_fields": { "totp": 3 } });
        Reply::Response(200, "", body.to_string())
    });
    let run = Files::new(&lines(1)).import(&server, &[]);
    assert!(run.out.contains("  fields that the server ignored: totp: 3\n"), "{}", run.out);
}

#[test]
fn the_ignored_fields_of_a_line_are_counted_once() {
    let server = MockServer::start(|number, _| {
        let result = match number {
            0 => return Reply::Response(200, "", json!({ "results": [] }).to_string()),
            1 => json!({
                "line": 1, "outcome": "refused", "error": "invalid_request",
                "fields": [{ "field": "password_hash", "code": "hash_too_costly" }],
            }),
            _ => json!({ "line": 1, "outcome": "created", "id": "1" }),
        };
        let body = json!({ "results": [result], "ignored_fields": { "totp": 1 } });
        Reply::Response(200, "", body.to_string())
    });
    let run = Files::new(&lines(1)).import(&server, &[]);
    assert_eq!(server.requests().len(), 2);
    assert!(run.out.contains("  fields that the server ignored: totp: 1\n"), "{}", run.out);
}

#[test]
fn a_response_without_a_result_for_each_line_ends_the_import() {
    for results in [
        "[]",
        r#"[{"line":0,"outcome":"created"}]"#,
        r#"[{"line":3,"outcome":"created"}]"#,
        r#"[{"line":1,"outcome":"created"},{"line":1,"outcome":"created"}]"#,
    ] {
        let server = MockServer::start(move |_, _| Reply::Response(200, "", format!("{{\"results\":{results}}}")));
        let run = Files::new(&lines(2)).import(&server, &[]);
        assert_eq!(run.outcome, Outcome::Aborted, "{results}");
        assert!(run.log.contains("not that of an import"), "{}", run.log);
    }
}

#[test]
fn a_repeated_import_resumes() {
    let users = Arc::new(Mutex::new(HashSet::new()));
    let fails_at = Arc::new(AtomicUsize::new(3));
    let (stored, limit) = (Arc::clone(&users), Arc::clone(&fails_at));
    let server = MockServer::start(move |number, request| {
        if number == limit.load(Ordering::Relaxed) {
            return error(403, "", "access_denied");
        }
        let mut stored = stored.lock().unwrap();
        let lines = request.lines();
        let outcome =
            |line: &Value| if stored.insert(line["external_id"].to_string()) { "created" } else { "unchanged" };
        let outcomes: Vec<_> = lines.iter().map(outcome).map(Ok).collect();
        results(&outcomes)
    });
    let files = Files::new(&lines(2500));
    let run = files.import(&server, &[]);
    assert_eq!(run.outcome, Outcome::Aborted);
    assert!(run.out.contains("  created: 2000\n"), "{}", run.out);
    fails_at.store(usize::MAX, Ordering::Relaxed);
    let run = files.import(&server, &[]);
    assert_eq!(run.outcome, Outcome::Complete);
    assert!(run.out.contains("  created: 500\n  unchanged: 2000\n"), "{}", run.out);
    assert_eq!(users.lock().unwrap().len(), 2500);
}

#[test]
fn nothing_is_sent_if_a_file_cannot_be_read() {
    let (server, files) = (MockServer::creates_all(), Files::new(&lines(1)));
    let (input, token) = (files.path("input"), files.path("token"));
    let missing = files.path("missing");
    let folder = files.path("");
    for (inputs, token, expected) in [
        ([&input, &missing], &token, "cannot read"),
        ([&input, &folder], &token, "cannot read"),
        ([&input, &input], &missing, "cannot read the token file"),
    ] {
        let run =
            run(&["ndjson", inputs[0], inputs[1], "--app", "shop", "--token-file", token, "--server", &server.url]);
        assert_eq!((run.outcome, run.out.as_str()), (Outcome::Aborted, ""));
        assert!(run.log.contains(expected), "{}", run.log);
    }
    let run = run(&["ndjson", "-", "-", "--app", "shop", "--token-file", &token, "--server", &server.url]);
    assert_eq!(run.outcome, Outcome::Aborted);
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn a_time_in_the_future_is_left_out() {
    let files = Files::new(&format!(
        r#"{{"users":[{{"localId":"1","email":"a@example.com","createdAt":"{}"}},{{"localId":"2","email":"b@example.com","createdAt":"{}"}}]}}"#,
        (NOW + 60) * 1000,
        NOW * 1000,
    ));
    let (input, token, server) = (files.path("input"), files.path("token"), MockServer::creates_all());
    run(&["firebase", &input, "--app", "shop", "--token-file", &token, "--server", &server.url]);
    let lines = server.requests()[0].lines();
    assert_eq!((lines[0].get("created_at"), lines[1].get("created_at")), (None, Some(&json!(NOW))));
}
