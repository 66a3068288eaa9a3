//! A mock server that responds like the import endpoint, and functions that run imports.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

use clap::{Args, Command, FromArgMatches};
use latchkey_import::{ImportArgs, Outcome};
use serde_json::{Value, json};

/// The time of each import, in Unix seconds. It is later than all times in the fixtures.
pub(crate) const NOW: i64 = 4_000_000_000;

pub(crate) struct Request {
    /// Method, path and query.
    pub(crate) target: String,
    pub(crate) authorization: String,
    pub(crate) content_type: String,
    pub(crate) body: Vec<u8>,
}

pub(crate) enum Reply {
    /// Status, extra header lines, body.
    Response(u16, &'static str, String),
    /// Closes the connection without a response.
    Drop,
}

pub(crate) struct MockServer {
    pub(crate) url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

/// What an import printed, and how it ended.
pub(crate) struct Run {
    pub(crate) outcome: Outcome,
    pub(crate) out: String,
    pub(crate) log: String,
}

impl MockServer {
    /// Starts a server. `reply` gets the number of the request, from 1. The empty request at the start of an import has
    /// the number 0, and is not recorded.
    pub(crate) fn start(reply: impl Fn(usize, &Request) -> Reply + Send + 'static) -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&requests);
        let url = listen(move |number, request| {
            let reply = reply(number, &request);
            if !request.body.is_empty() {
                recorded.lock().unwrap().push(request);
            }
            reply
        });
        Self { url, requests }
    }

    /// A server that creates every user.
    pub(crate) fn creates_all() -> Self {
        Self::start(|_, request| reply_created(request))
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

impl Request {
    pub(crate) fn lines(&self) -> Vec<Value> {
        let lines = self.body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
    }
}

/// Starts a server that does not record its requests, and returns its URL. `reply` gets the request's number, as in
/// `MockServer::start`.
pub(crate) fn listen(reply: impl Fn(usize, Request) -> Reply + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut number = 0;
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let request = read_request(&stream);
            number += usize::from(!request.body.is_empty());
            let number = if request.body.is_empty() { 0 } else { number };
            if let Reply::Response(status, headers, body) = reply(number, request) {
                let length = body.len();
                let head =
                    format!("HTTP/1.1 {status} -\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n");
                // The client may have disconnected.
                let _sent = (&stream).write_all(head.as_bytes()).and_then(|()| (&stream).write_all(body.as_bytes()));
            }
        }
    });
    url
}

fn read_request(stream: &TcpStream) -> Request {
    let mut reader = BufReader::new(stream);
    let mut request =
        Request { target: String::new(), authorization: String::new(), content_type: String::new(), body: Vec::new() };
    reader.read_line(&mut request.target).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => value.clone_into(&mut request.authorization),
            "content-type" => value.clone_into(&mut request.content_type),
            "content-length" => length = value.parse().unwrap(),
            _ => {}
        }
    }
    request.body.resize(length, 0);
    reader.read_exact(&mut request.body).unwrap();
    request
}

/// Returns the response of a server that created every user of the request.
pub(crate) fn reply_created(request: &Request) -> Reply {
    let lines = request.body.iter().filter(|byte| **byte == b'\n').count();
    let mut body = String::from(r#"{"results":["#);
    for line in 1..=lines {
        let comma = if line == 1 { "" } else { "," };
        body.push_str(&format!(
            r#"{comma}{{"line":{line},"outcome":"created","id":"019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88"}}"#
        ));
    }
    body.push_str(&format!(r#"],"created":{lines},"unchanged":0,"refused":0,"ignored_fields":{{}}}}"#));
    Reply::Response(200, "", body)
}

/// A response with a result for each line. `Ok` has the outcome; `Err` has the error and the fields of a refusal.
pub(crate) fn results(results: &[Result<&str, (&str, Value)>]) -> Reply {
    let result = |(index, result): (usize, &Result<&str, (&str, Value)>)| match result {
        Ok(outcome) => json!({ "line": index + 1, "outcome": outcome, "id": "019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88" }),
        Err((error, fields)) => json!({ "line": index + 1, "outcome": "refused", "error": error, "fields": fields }),
    };
    let results: Vec<Value> = results.iter().enumerate().map(result).collect();
    Reply::Response(200, "", json!({ "results": results, "ignored_fields": {} }).to_string())
}

pub(crate) fn args(arguments: &[&str]) -> ImportArgs {
    let command = ImportArgs::augment_args(Command::new("import"));
    let matches = command.try_get_matches_from(["import"].iter().chain(arguments)).unwrap();
    ImportArgs::from_arg_matches(&matches).unwrap()
}

pub(crate) fn run(arguments: &[&str]) -> Run {
    let (mut out, mut log) = (Vec::new(), Vec::new());
    let outcome = latchkey_import::import(&args(arguments), NOW, &mut out, &mut log);
    let [out, log] = [out, log].map(|text| String::from_utf8(text).unwrap());
    Run { outcome, out, log }
}

pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}
