//! Files of other login services, for `latchkey-server import`: the server can import every converted line, no error
//! quotes the input, and the memory is limited.

use latchkey_import::{
    Format, ImportArgs,
    fuzzing::{Converted, convert},
};
use serde_json::Value;
use url::Url;

use crate::{
    draw::{Draw, texts},
    harness,
};

/// The server's limit for one line of an import, in bytes.
const MAX_LINE: usize = 64 * 1024;
/// A text that must not appear in any message. It stands for the secrets in the fragments.
const SECRET: &str = "c2VjcmV0";
const NOW: i64 = 1_800_000_000;
const FORMATS: [Format; 7] = [
    Format::Keycloak,
    Format::Gotrue,
    Format::Kratos,
    Format::Firebase,
    Format::Auth0,
    Format::Cognito,
    Format::Ndjson,
];
const FRAGMENTS: [&str; 64] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    "\n",
    "null",
    "1",
    "true",
    "\"\"",
    "{\"realm\":\"shop\",\"users\":[",
    "{\"users\":[",
    "{\"identities\":[",
    "{\"Users\":[",
    "]}",
    "{\"id\":\"1\"",
    "{\"localId\":\"1\"",
    "{\"user_id\":\"auth0|1\"",
    "{\"Username\":\"1\"",
    "{\"external_id\":\"1\"",
    ",\"email\":\"a@example.com\"",
    ",\"emailVerified\":true",
    ",\"email_verified\":false",
    ",\"enabled\":false",
    ",\"disabled\":true",
    ",\"createdTimestamp\":1704164645678",
    ",\"createdAt\":\"1704164645678\"",
    ",\"created_at\":\"2024-01-02T03:04:05+00:00\"",
    ",\"credentials\":[{\"type\":\"password\",\"secretData\":\"{\\\"value\\\":\\\"c2VjcmV0\\\",\\\"salt\\\":\\\"c2VjcmV0\\\"}\",",
    "\"credentialData\":\"{\\\"hashIterations\\\":5,\\\"algorithm\\\":\\\"pbkdf2-sha256\\\"}\"}]",
    ",\"credentials\":{\"password\":{\"config\":{\"hashed_password\":\"$scrypt$ln=16384,r=8,p=1$c2VjcmV0$c2VjcmV0\"}}}",
    ",\"credentials\":{\"oidc\":{\"identifiers\":[\"google:1\"]}}",
    ",\"traits\":{\"email\":\"a@example.com\",\"name\":{\"first\":\"A\"}}",
    ",\"verifiable_addresses\":[{\"value\":\"a@example.com\",\"verified\":true,\"via\":\"email\"}]",
    ",\"federatedIdentities\":[{\"identityProvider\":\"google\",\"userId\":\"1\"}]",
    ",\"attributes\":{\"a\":[\"\\u0000\"]}",
    ",\"Attributes\":[{\"Name\":\"sub\",\"Value\":\"1\"},{\"Name\":\"email\",\"Value\":\"a@example.com\"}]",
    ",\"UserCreateDate\":1704164645.678",
    ",\"encrypted_password\":\"$2a$10$c2VjcmV0\"",
    ",\"encrypted_password\":\"$fbscrypt$v=1,n=14,r=8,p=1,ss=c2VjcmV0,sk=c2VjcmV0$c2VjcmV0$c2VjcmV0\"",
    ",\"identity_data\":{\"iss\":\"https://login.microsoftonline.com/t/v2.0\"}",
    ",\"user_id\":\"1\",\"provider\":\"google\",\"provider_id\":\"7\"",
    ",\"passwordHash\":\"c2VjcmV0\",\"salt\":\"c2VjcmV0\"",
    ",\"passwordHash\":\"$md5$c2VjcmV0\"",
    ",\"password_hash\":\"$c2VjcmV0\"",
    "{\"_id\":{\"$oid\":\"1\"}",
    ",\"alt_id\":\"1\"",
    ",\"providerUserInfo\":[{\"providerId\":\"google\",\"rawId\":\"1\"}]",
    ",\"identities\":[{\"provider\":\"google\",\"subject\":\"1\",\"user_id\":1}]",
    ",\"metadata\":{}",
    ",\"app_metadata\":{\"a\":1}",
    ",\"raw_user_meta_data\":{\"name\":\"A\"}",
    "}\n",
    "},",
    "}]}",
    "sub,email,email_verified,cognito:username\n",
    "1,a@example.com,true,a\n",
    ",,,\"a\n\"\n",
    "\"",
    "\\",
    "\u{feff}",
    "\u{1b}",
    "{\"end\":true}",
    ",\"clientRoles\":{\"a\":[\"b\"]}",
];

#[test]
fn import_files() {
    harness::run("import_files", 2000, |input| {
        let mut draw = Draw::new(input);
        let format = draw.pick(&FORMATS);
        let mut args = args(format);
        args.metadata = draw.flag();
        args.addresses_verified = draw.flag();
        let [text, joined] = texts(draw.rest(), &FRAGMENTS);
        check_input(&args, &text);
        let messages = check_input(&args, &joined);
        // The messages about `text` are not checked: they can quote an ID from `text`, and this ID can contain `SECRET`
        // by chance. The same holds for the fields of a CSV file. A file from Cognito contains no secrets.
        assert!(!messages.contains(SECRET) || matches!(format, Format::Cognito), "{messages}");
    });
}

fn args(format: Format) -> ImportArgs {
    ImportArgs {
        format,
        files: Vec::new(),
        app: None,
        token_file: None,
        server: Url::parse("http://127.0.0.1:8081").unwrap(),
        mappings: vec![("google".to_owned(), "google".to_owned())],
        email_trait: "/email".to_owned(),
        name_trait: "/name".to_owned(),
        rounds: 8,
        memory_cost: 14,
        addresses_verified: false,
        metadata: false,
        dry_run: false,
        output: None,
    }
}

/// Checks an input, and returns all messages of the import.
fn check_input(args: &ImportArgs, text: &str) -> String {
    let heap = 32 * 1024 * 1024 + 64 * text.len() as u64;
    let Converted { lines, users, log, error } =
        harness::assert_bounded(20, heap, || convert(args, NOW, &[text.as_bytes()]));
    assert!(lines.len() as u64 <= users, "{} lines for {users} users", lines.len());
    let messages = String::from_utf8(log).unwrap() + error.as_deref().unwrap_or_default();
    assert!(!messages.contains('\u{1b}'), "{messages:?}");
    for line in &lines {
        check_line(args, line);
    }
    // A truncated input gives a prefix of the lines, and at most one more line from the truncated record. Formats that
    // join records are excluded, because a join needs the whole input.
    if !matches!(args.format, Format::Gotrue | Format::Auth0) && error.is_none() {
        let cut: String = text.chars().take(text.chars().count() / 2).collect();
        let part = convert(args, NOW, &[cut.as_bytes()]).lines;
        assert!(part.len() <= lines.len() + 1, "{} lines of a part, {} of the whole", part.len(), lines.len());
    }
    messages
}

fn check_line(args: &ImportArgs, line: &[u8]) {
    assert!(line.len() <= MAX_LINE && !line.contains(&b'\n'), "{} bytes", line.len());
    let user: Value = serde_json::from_slice(line).unwrap();
    let user = user.as_object().unwrap();
    if args.format == Format::Ndjson {
        return;
    }
    let prefix = format!("{:?}:", args.format).to_lowercase();
    assert!(user["external_id"].as_str().unwrap().starts_with(&prefix), "{user:?}");
    let identities = user.get("identities").map_or(0, |identities| identities.as_array().unwrap().len());
    assert!(identities <= 10 && (identities > 0 || user.contains_key("email")), "{user:?}");
    if let Some(hash) = user.get("password_hash") {
        assert!(hash.as_str().unwrap().starts_with('$'), "{user:?}");
    }
    if let Some(metadata) = user.get("metadata") {
        assert!(args.metadata && metadata.to_string().len() <= 8 * 1024, "{user:?}");
    }
    if let Some(created_at) = user.get("created_at") {
        assert!((0..=NOW).contains(&created_at.as_i64().unwrap()), "{user:?}");
    }
    assert!(!args.addresses_verified || !user.contains_key("email") || user["email_verified"] == true, "{user:?}");
}
