//! Tests complete runs over folders of manifests.

use std::{fs, os::unix::fs::PermissionsExt};

use clap::Parser;
use latchkey_crds::rendered::{KeyState, RenderedApp, RenderedClientAuthentication, RenderedSmtp, Revision};
use tempfile::TempDir;

use super::*;
use crate::args::{Args, Command};

/// Folders for manifests, documents and keys.
struct Folders(TempDir);

impl Folders {
    fn new() -> Self {
        let folders = Self(TempDir::new().unwrap());
        fs::create_dir(folders.0.path().join("from")).unwrap();
        folders
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.0.path().join("from").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.path().join("from").join(name)).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn renderer(&self, extra_args: &[&str]) -> anyhow::Result<Renderer> {
        let (from, to, keys) = (self.path("from"), self.path("to"), self.path("keys"));
        let mut words = vec!["latchkey-operator", "render", "--from", &from, "--to", &to, "--keys", &keys];
        if !extra_args.contains(&"--base-url") {
            words.extend(["--base-url", "https://auth.example.com/"]);
        }
        words.extend(extra_args);
        let Some(Command::Render(args)) = Args::try_parse_from(words)?.command else {
            panic!("render is a command");
        };
        Renderer::new(args)
    }

    fn run(&self) -> RenderSummary {
        self.run_with(&[])
    }

    fn run_with(&self, extra_args: &[&str]) -> RenderSummary {
        self.renderer(extra_args).unwrap().run(OffsetDateTime::UNIX_EPOCH).unwrap()
    }

    fn document(&self, app_id: &str) -> Option<RenderedApp> {
        let text = fs::read_to_string(self.path(&format!("to/{app_id}.json"))).ok()?;
        Some(text.parse().unwrap())
    }

    fn document_files(&self) -> Vec<String> {
        let names =
            fs::read_dir(self.path("to")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names = names.collect::<Vec<_>>();
        names.sort();
        names
    }
}

fn app(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "apiVersion: latchkey.dev/v1alpha1\nkind: App\nmetadata: {{ name: {name}, namespace: {namespace} }}\nspec: {spec}\n"
    )
}

fn shop() -> String {
    app("shop", "shop", "{}")
}

#[test]
fn an_app_is_rendered_once_and_then_unchanged() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    let first = folders.run();
    let bytes = fs::read(folders.path("to/shop.json")).unwrap();
    let revision = Revision::of(&bytes);
    assert_eq!(first.apps, [format!("shop: rendered, revision {}", &revision.as_str()[..12])]);
    assert_eq!((&first.rejected[..], &first.unresolved[..]), (&[][..], &[][..]));
    let document = folders.document("shop").unwrap();
    assert_eq!(document.issuer.as_str(), "https://auth.example.com/shop", "one slash, whatever the base URL ends with");
    assert_eq!(document.keys.signing[0].state, KeyState::Active);

    let inode = |name: &str| std::os::unix::fs::MetadataExt::ino(&fs::metadata(folders.path(name)).unwrap());
    let before = (inode("to/shop.json"), inode("keys/latchkey-keys-shop.json"));
    let second = folders.run();
    assert_eq!(second.apps, [format!("shop: unchanged, revision {}", &revision.as_str()[..12])]);
    assert_eq!((inode("to/shop.json"), inode("keys/latchkey-keys-shop.json")), before, "nothing is written");
}

#[test]
fn documents_and_keys_are_readable_only_by_their_owner() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.run();
    let mode = |name: &str| fs::metadata(folders.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("to/shop.json"), mode("keys/latchkey-keys-shop.json")), (0o600, 0o600));
    assert_eq!((mode("to"), mode("keys")), (0o700, 0o700));
    assert_eq!(folders.document_files(), ["shop.json"], "nothing is left beside it");
    let keys = folders.path("keys/latchkey-keys-shop.json");
    fs::set_permissions(keys, fs::Permissions::from_mode(0o644)).unwrap();
    folders.run();
    assert_eq!(mode("keys/latchkey-keys-shop.json"), 0o600, "also of a file that is restored from a backup");
}

#[test]
fn manifests_are_found_in_subfolders_and_in_every_format() {
    let folders = Folders::new();
    folders.write("a/b/one.yml", app("a", "one", "{}"));
    folders.write(
        "two.json",
        r#"{"apiVersion":"latchkey.dev/v1alpha1","kind":"App","metadata":{"name":"two"},"spec":{}}"#,
    );
    folders.write(
        "list.yaml",
        format!("apiVersion: v1\nkind: List\nitems:\n- {}", app("a", "three", "{}").replace('\n', "\n  ")),
    );
    folders.write("crlf.yaml", app("a", "four", "{}").replace('\n', "\r\n"));
    folders.write("bom.yaml", format!("\u{feff}{}", app("a", "five", "{}")));
    folders.write(
        "merge.yaml",
        format!("x: &x {{ signUp: Closed }}\n{}", app("a", "six", "\n  <<: *x")).replace("x: &x", "x-all: &x"),
    );
    folders.write(".hidden.yaml", app("a", "hidden", "{}"));
    folders.write("notes.txt", app("a", "notes", "{}"));
    let summary = folders.run();
    // An anchor must be in the same document as its aliases, so the schema sees the field with the anchor, too.
    assert_eq!(summary.rejected, ["merge.yaml (document 1): App a/six: field x-all: unknown field"]);
    assert_eq!(folders.document_files(), ["five.json", "four.json", "one.json", "three.json", "two.json"]);
    assert_eq!(folders.document("two").unwrap().namespace, "default");
}

#[test]
fn kinds_of_other_groups_are_ignored() {
    let folders = Folders::new();
    folders.write("deploy.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: { name: x }\n");
    folders.write("other.yaml", "apiVersion: example.com/v1\nkind: App\nmetadata: { name: x }\nspec: { a: 1 }\n");
    folders.write("values.yaml", "replicas: 2\n");
    folders.write("empty.yaml", "");
    folders.write("comments.yaml", "# nothing\n---\n---\n# here\n");
    assert_eq!(folders.run(), RenderSummary::default());
}

#[test]
fn unknown_kinds_of_our_group_are_reported() {
    let folders = Folders::new();
    folders.write("a.yaml", shop().replace("v1alpha1", "v1"));
    folders.write("b.yaml", shop().replace("kind: App", "kind: Tenant"));
    folders.write("c.yaml", "kind: App\nmetadata: { name: shop }\n");
    assert_eq!(
        folders.run().rejected,
        [
            "a.yaml (document 1): App: field apiVersion: must be latchkey.dev/v1alpha1",
            "b.yaml (document 1): Tenant: field kind: must be App, Provider or Client in latchkey.dev",
            "c.yaml (document 1): App: field apiVersion: must be latchkey.dev/v1alpha1",
        ]
    );
}

#[test]
fn a_bad_object_is_reported_by_file_object_field_and_reason_and_affects_no_other() {
    let folders = Folders::new();
    let bad = app("shop", "bad", "{ redirectURLs: [\"https://a.example\", \"http://a.example\"], sginUp: Open }");
    folders.write("shop.yaml", format!("{}---\n{bad}---\n{}", app("shop", "one", "{}"), app("shop", "two", "{}")));
    let summary = folders.run();
    assert_eq!(summary.rejected.len(), 2, "{:?}", summary.rejected);
    let start = "shop.yaml (document 2): App shop/bad: field ";
    assert!(
        summary.rejected[0].starts_with(&format!("{start}spec.redirectURLs[1]: use https")),
        "{:?}",
        summary.rejected
    );
    assert_eq!(summary.rejected[1], format!("{start}spec.sginUp: unknown field"));
    assert_eq!(folders.document_files(), ["one.json", "two.json"]);
}

#[test]
fn types_check_what_the_schema_cannot_express() {
    let folders = Folders::new();
    folders.write("shop.yaml", app("shop", "shop", "{ redirectURLs: [\"https://a.example:99999/\"] }"));
    assert_eq!(
        folders.run().rejected,
        ["shop.yaml (document 1): App shop/shop: field spec.redirectURLs[0]: is not an absolute URL"]
    );
}

#[test]
fn a_broken_document_affects_no_other() {
    let folders = Folders::new();
    folders.write(
        "shop.yaml",
        format!("{}---\n\tbroken: [\n---\n{}", app("shop", "one", "{}"), app("shop", "three", "{}")),
    );
    folders.write("bytes.yaml", b"apiVersion: \xff\n");
    folders.write("broken.json", "{");
    folders.write("text.yaml", "only text\n");
    let summary = folders.run();
    assert_eq!(folders.document_files(), ["one.json", "three.json"]);
    assert_eq!(summary.rejected.len(), 4, "{:?}", summary.rejected);
    assert!(summary.rejected[0].starts_with("broken.json (document 1): is not JSON: "));
    assert_eq!(summary.rejected[1], "bytes.yaml: is not UTF-8 at byte 12");
    let line = app("shop", "one", "{}").lines().count() + 2;
    assert!(summary.rejected[2].starts_with("shop.yaml (document 2): is not YAML: "), "{:?}", summary.rejected);
    assert!(summary.rejected[2].ends_with(&format!("(line {line})")), "{:?}", summary.rejected);
    assert_eq!(summary.rejected[3], "text.yaml (document 1): is not an object");
}

#[test]
fn the_first_of_two_apps_with_one_app_id_is_rendered() {
    let folders = Folders::new();
    folders.write("b.yaml", app("b", "shop", "{}"));
    folders.write("a.yaml", format!("{}---\n{}", app("a", "store", "{ appID: shop }"), app("c", "shop", "{}")));
    let summary = folders.run();
    assert_eq!(
        summary.rejected,
        [
            "a.yaml (document 2): App c/shop: field metadata.name: another App owns the appID shop; set another spec.appID",
            "b.yaml (document 1): App b/shop: field metadata.name: another App owns the appID shop; set another spec.appID",
        ]
    );
    assert_eq!(folders.document("shop").unwrap().namespace, "a");
}

#[test]
fn the_first_of_two_definitions_of_an_object_is_used() {
    let folders = Folders::new();
    folders.write("a.yaml", app("shop", "shop", "{ displayName: First }"));
    folders.write("b.yaml", app("shop", "shop", "{ displayName: Second }"));
    assert_eq!(
        folders.run().rejected,
        ["b.yaml (document 1): App shop/shop: is defined twice; the first one counts, remove this one"]
    );
    assert_eq!(folders.document("shop").unwrap().display_name, "First");
}

#[test]
fn a_deleted_app_is_removed_and_other_files_stay() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.write("other.yaml", app("a", "other", "{}"));
    folders.run();
    fs::write(folders.path("to/package.json"), "{}").unwrap();
    folders.remove("other.yaml");
    let summary = folders.run();
    assert_eq!(summary.apps[1..], ["other: removed".to_owned()]);
    assert_eq!(folders.document_files(), ["package.json", "shop.json"]);
    assert!(fs::exists(folders.path("keys/latchkey-keys-other.json")).unwrap(), "keys are never removed");
}

#[test]
fn a_broken_manifest_does_not_change_the_served_document() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.run();
    let good = fs::read(folders.path("to/shop.json")).unwrap();
    let broken = [
        app("shop", "shop", "{ signUp: Maybe }"),
        shop().replace("v1alpha1", "v1"),
        shop().replace("name: shop,", ""),
        shop().replace("name: shop,", "name: Not-A-Label,"),
        "{ broken".to_owned(),
    ];
    for manifest in broken {
        folders.write("shop.yaml", &manifest);
        let summary = folders.run();
        assert!(!summary.rejected.is_empty() && summary.apps.is_empty(), "{manifest}: {summary:?}");
        assert_eq!(fs::read(folders.path("to/shop.json")).unwrap(), good, "{manifest}");
    }
    folders.write("shop.yaml", b"\xff");
    assert_eq!((folders.run().rejected.len(), folders.document_files().len()), (1, 1));
    folders.remove("shop.yaml");
    folders.run();
    assert!(folders.document_files().is_empty());
}

#[test]
fn unresolved_references_are_reported_but_not_rejected() {
    let folders = Folders::new();
    folders.write(
        "shop.yaml",
        app("shop", "shop", "{ providerRefs: [{ name: gone }], mail: { smtpSecretRef: { name: gone } } }"),
    );
    let summary = folders.run();
    assert_eq!((summary.rejected.len(), summary.unresolved.len(), summary.apps.len()), (0, 2, 1));
    let start = "shop.yaml (document 1): App shop/shop: field ";
    assert!(summary.unresolved[0].starts_with(&format!("{start}spec.providerRefs[0]: Provider gone does not exist")));
    assert!(summary.unresolved[0].ends_with("(ProviderNotFound)"));
    assert_eq!(folders.document("shop").unwrap().mail.smtp, RenderedSmtp::Unresolved);
}

#[test]
fn secrets_are_read_from_data_and_string_data_and_never_printed() {
    let folders = Folders::new();
    let relay = |data: &str| {
        let secret = format!("apiVersion: v1\nkind: Secret\nmetadata: {{ name: relay, namespace: shop }}\n{data}\n");
        format!("{}---\n{secret}", app("shop", "shop", "{ mail: { smtpSecretRef: { name: relay } } }"))
    };
    folders.write(
        "shop.yaml",
        relay("data: { host: c210cC5leGFtcGxl, port: MjU= }\nstringData: { port: '587', tls: starttls }"),
    );
    assert_eq!(folders.run().rejected, [] as [String; 0]);
    let RenderedSmtp::Own(relay_of_shop) = folders.document("shop").unwrap().mail.smtp else { panic!("own relay") };
    assert_eq!((relay_of_shop.host.as_str(), relay_of_shop.port), ("smtp.example", 587));

    folders.write("shop.yaml", relay("data: { host: '***hush***' }"));
    let summary = folders.run();
    assert_eq!(summary.rejected.len(), 2);
    assert!(summary.rejected.iter().any(|line| {
        line == "shop.yaml (document 2): Secret shop/relay: field data.host: must be base64; plain text goes under stringData"
    }));
    assert!(!format!("{summary:?}").contains("hush"));

    folders.write("shop.yaml", relay("stringData: { port: 587 }"));
    let line = "shop.yaml (document 2): Secret shop/relay: field stringData.port: must be a string; put it in quotes";
    assert!(folders.run().rejected.contains(&line.to_owned()));
}

#[test]
fn the_flag_check_writes_nothing() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.write("bad.yaml", app("shop", "bad", "{ signUp: Maybe }"));
    let summary = folders.run_with(&["--check"]);
    assert_eq!((summary.apps, summary.rejected.len()), (vec!["shop: valid".to_owned()], 1));
    assert!(!fs::exists(folders.path("to")).unwrap() && !fs::exists(folders.path("keys")).unwrap());
}

#[test]
fn the_flag_check_needs_only_the_manifests() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    let from = folders.path("from");
    let words = ["latchkey-operator", "render", "--from", &from, "--check"];
    let Some(Command::Render(args)) = Args::parse_from(words).command else { panic!("render is a command") };
    let summary = Renderer::new(args).unwrap().run(OffsetDateTime::UNIX_EPOCH).unwrap();
    assert_eq!(summary.apps, ["shop: valid"]);
    assert!(Args::try_parse_from(["latchkey-operator", "render", "--from", &from]).is_err());
}

#[test]
fn unreadable_keys_are_never_overwritten() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.write("other.yaml", app("a", "other", "{}"));
    folders.run();
    let good = fs::read(folders.path("to/shop.json")).unwrap();
    let path = folders.path("keys/latchkey-keys-shop.json");
    for broken in ["", "{", "hush", r#"{"appID":"other","signing":[],"hmac":[]}"#] {
        fs::write(&path, broken).unwrap();
        folders.write("shop.yaml", app("shop", "shop", "{ signUp: Closed }"));
        let summary = folders.run();
        assert_eq!(summary.rejected.len(), 1, "{summary:?}");
        assert!(summary.rejected[0].contains("App shop/shop: its keys"), "{summary:?}");
        assert!(!summary.rejected[0].contains("hush"));
        assert_eq!(fs::read_to_string(&path).unwrap(), broken);
        assert_eq!(fs::read(folders.path("to/shop.json")).unwrap(), good, "the last good document is still served");
        assert_eq!(summary.apps.len(), 1, "the other App is rendered");
    }
}

#[test]
fn lost_keys_are_recovered_from_the_document() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.run();
    let keys = folders.document("shop").unwrap().keys;
    fs::remove_file(folders.path("keys/latchkey-keys-shop.json")).unwrap();
    folders.run();
    assert_eq!(folders.document("shop").unwrap().keys, keys);
    assert!(fs::exists(folders.path("keys/latchkey-keys-shop.json")).unwrap());
}

#[test]
fn a_new_algorithm_adds_a_key_and_retires_the_old_one() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    folders.run();
    folders.write("shop.yaml", app("shop", "shop", "{ tokens: { signingAlgorithm: EdDSA } }"));
    folders.run();
    let keys = folders.document("shop").unwrap().keys;
    let states = keys.signing.iter().map(|key| (key.id.as_str(), key.state)).collect::<Vec<_>>();
    assert_eq!(states, [("s1", KeyState::Retired), ("s2", KeyState::Active)]);
    assert!(folders.run().apps[0].contains("unchanged"));
}

#[test]
fn two_concurrent_runs_store_the_same_first_keys() {
    let folder = TempDir::new().unwrap();
    let app_id: AppId = "shop".parse().unwrap();
    let generate = || KeyDocument::first(&app_id, SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
    let first = files::store_first_keys(folder.path(), generate()).unwrap();
    let second = files::store_first_keys(folder.path(), generate()).unwrap();
    assert_eq!(first, second);
}

#[test]
fn a_document_over_the_limit_is_rejected() {
    let folders = Folders::new();
    let url = |index: usize| format!("https://a.example/{index}/{}", "a".repeat(2000));
    let urls = (0..100).map(url).collect::<Vec<_>>().join(", ");
    let template = |size: usize| format!("{{# {} #}}", "a".repeat(size));
    let mails = ["confirm.txt", "reset.txt", "confirm.html", "reset.html", "account-exists.txt"];
    let data = mails.map(|key| format!("  {key}: \"{}\"\n", template(50_400))).concat();
    let map = format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{ name: mail, namespace: shop }}\ndata:\n{data}");
    let refs = (0..32).map(|index| format!("{{ name: p{index} }}")).collect::<Vec<_>>().join(", ");
    let spec =
        format!("{{ redirectURLs: [{urls}], mail: {{ templatesRef: {{ name: mail }} }}, providerRefs: [{refs}] }}");
    let mut text = format!("{}---\n{map}", app("shop", "shop", &spec));
    let scopes = (0..32).map(|index| format!("s{index}{}", "x".repeat(250))).collect::<Vec<_>>().join(", ");
    for index in 0..32 {
        text += &format!(
            "---\napiVersion: latchkey.dev/v1alpha1\nkind: Provider\nmetadata: {{ name: p{index}, namespace: shop }}\n\
             spec: {{ google: {{ clientID: a, clientSecretRef: {{ name: s, key: s }}, scopes: [{scopes}] }} }}\n"
        );
    }
    folders.write("shop.yaml", text);
    let summary = folders.run();
    assert_eq!(
        summary.rejected,
        [
            "shop.yaml (document 1): App shop/shop: the rendered document is over 512 KiB; shorten the templates and lists"
        ]
    );
    assert!(folders.document_files().is_empty());
}

#[test]
fn http_is_allowed_only_in_development() {
    let folders = Folders::new();
    folders.write(
        "shop.yaml",
        "apiVersion: latchkey.dev/v1alpha1\nkind: Provider\nmetadata: { name: local }\nspec: { oidc: { issuer: \"http://127.0.0.1:5556\", clientID: a, clientSecretRef: { name: a, key: a } } }\n",
    );
    let rejected = folders.run().rejected;
    assert_eq!(rejected, ["shop.yaml (document 1): Provider default/local: field spec.oidc.issuer: use https"]);
    let development = ["--base-url", "http://127.0.0.1:8080", "--allow-insecure"];
    assert_eq!(folders.run_with(&development).rejected, [] as [String; 0]);
    assert!(folders.renderer(&["--base-url", "http://127.0.0.1:8080"]).is_err());
    assert!(folders.renderer(&["--base-url", "auth.example.com"]).is_err());
}

#[test]
fn a_missing_folder_removes_nothing() {
    let folders = Folders::new();
    folders.write("shop.yaml", shop());
    let renderer = folders.renderer(&[]).unwrap();
    renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    fs::rename(folders.path("from"), folders.path("away")).unwrap();
    assert!(renderer.run(OffsetDateTime::UNIX_EPOCH).is_err());
    assert_eq!(folders.document_files(), ["shop.json"]);
}

#[test]
fn the_examples_are_served_in_development() {
    let folders = Folders::new();
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/examples");
    for entry in fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        folders.write(path.file_name().unwrap().to_str().unwrap(), fs::read(&path).unwrap());
    }
    let summary = folders.run_with(&["--base-url", "http://127.0.0.1:8080", "--allow-insecure"]);
    assert_eq!((&summary.rejected[..], &summary.unresolved[..]), (&[][..], &[][..]));
    let shop = folders.document("shop").unwrap();
    assert_eq!(shop.mail.smtp, RenderedSmtp::Install);
}

/// Writes the manifests of fifty Apps, each in its own file together with its Provider and its templates.
fn fifty_apps() -> Folders {
    let folders = Folders::new();
    for number in 0..50 {
        folders.write(&format!("a{number}.yaml"), numbered_app(number, "One"));
    }
    folders
}

fn numbered_app(number: usize, display_name: &str) -> String {
    let name = format!("a{number}");
    let spec = format!(
        "{{ displayName: {display_name}, providerRefs: [{{ name: {name} }}], mail: {{ templatesRef: {{ name: {name} }} }} }}"
    );
    format!(
        "{}---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{ name: {name}, namespace: shop }}\n\
         data: {{ confirm.txt: \"{{{{ code }}}}\" }}\n\
         ---\napiVersion: latchkey.dev/v1alpha1\nkind: Provider\nmetadata: {{ name: {name}, namespace: shop }}\n\
         spec: {{ google: {{ clientID: a, clientSecretRef: {{ name: s, key: s }} }} }}\n",
        app("shop", &name, &spec)
    )
}

/// Returns how many Apps and Providers the last run parsed, how many Apps it validated, and how many Apps it rendered.
fn last_run_counts(renderer: &Renderer) -> (usize, usize, usize) {
    (renderer.parse_cache.parsed_count(), renderer.validated.computed(), renderer.rendered.computed())
}

#[test]
fn an_edit_renders_what_it_changes_and_nothing_else() {
    let folders = fifty_apps();
    let renderer = folders.renderer(&[]).unwrap();
    let run = || renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    let first = run();
    assert_eq!((first.apps.len(), first.rejected.len()), (50, 0), "{first:?}");
    assert_eq!(last_run_counts(&renderer), (100, 50, 50));
    folders.write("a7.yaml", numbered_app(7, "Another"));
    run();
    folders.write("a7.yaml", numbered_app(7, "Other"));
    let stamps = || {
        let stamp = |number| fs::metadata(folders.path(&format!("to/a{number}.json"))).unwrap().modified().unwrap();
        (0..50).map(stamp).collect::<Vec<_>>()
    };
    let before = stamps();
    run();
    assert_eq!(last_run_counts(&renderer), (1, 1, 1));
    let after = stamps();
    let changed: Vec<_> = (0..50).filter(|number| before[*number] != after[*number]).collect();
    assert_eq!(changed, [7]);
    assert_eq!(folders.document("a7").unwrap().display_name, "Other");
}

#[test]
fn a_change_to_a_referenced_object_is_rendered() {
    let folders = fifty_apps();
    let renderer = folders.renderer(&[]).unwrap();
    let run = || renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    run();
    let template = |source: &str| {
        format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {{ name: a3, namespace: shop }}\ndata: {{ confirm.txt: {source:?} }}\n"
        )
    };
    let without_config_map = numbered_app(3, "One").replace("ConfigMap", "Unknown");
    folders.write("a3.yaml", format!("{without_config_map}---\n{}", template("Code: {{ code }}")));
    run();
    assert_eq!(last_run_counts(&renderer), (0, 1, 1));
    assert_eq!(folders.document("a3").unwrap().mail.templates["confirm.txt"].as_str(), "Code: {{ code }}");
    folders.remove("a3.yaml");
    run();
    assert!(folders.document("a3").is_none());
    folders.write("a3.yaml", numbered_app(3, "One"));
    run();
    assert_eq!(folders.document("a3").unwrap().mail.templates["confirm.txt"].as_str(), "{{ code }}");
}

#[test]
fn an_app_with_a_panicking_step_is_rejected_and_the_others_are_rendered() {
    let folders = Folders::new();
    folders.write("a.yaml", app("shop", "bomb", "{}"));
    folders.write("b.yaml", app("shop", "good", "{}"));
    let mut renderer = folders.renderer(&[]).unwrap();
    renderer.before_validate = |facts| assert!(facts.app.metadata.name.as_deref() != Some("bomb"), "{}", "hush");
    let summary = renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    assert_eq!(summary.rejected.len(), 1);
    let start = "a.yaml (document 1): App shop/bomb: the operator failed on this object: a panic at ";
    assert!(summary.rejected[0].starts_with(start) && !summary.rejected[0].contains("hush"), "{:?}", summary.rejected);
    assert_eq!(folders.document_files(), ["good.json"]);
    // If a later run panics, the served document does not change.
    renderer.before_validate = |_| {};
    renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    folders.write("a.yaml", app("shop", "bomb", "{ displayName: Two }"));
    renderer.before_validate = |_| panic!("again");
    renderer.run(OffsetDateTime::UNIX_EPOCH).unwrap();
    assert_eq!(folders.document_files(), ["bomb.json", "good.json"]);
}

#[test]
fn a_new_version_of_the_operator_does_not_change_the_document_of_an_app_that_uses_nothing_new() {
    let folders = Folders::new();
    // Document and keys were written by an operator that knew only format 1.
    folders.write("shop.yaml", include_str!("format-1/shop.yaml"));
    for (folder, name, text) in [
        ("to", "shop.json", include_str!("format-1/document.json")),
        ("keys", "latchkey-keys-shop.json", include_str!("format-1/keys.json")),
    ] {
        fs::create_dir(folders.path(folder)).unwrap();
        fs::write(folders.path(&format!("{folder}/{name}")), text.trim_end()).unwrap();
    }
    let summary = folders.run();
    assert_eq!((&summary.rejected[..], &summary.unresolved[..]), (&[][..], &[][..]));
    assert!(summary.apps[0].starts_with("shop: unchanged, revision "), "{:?}", summary.apps);
}

#[test]
fn a_document_has_the_lowest_format_that_its_app_needs() {
    let folders = Folders::new();
    let listed = |role: &str| format!("{{ serviceAccount: {{ namespace: shop, name: loader }}, role: {role} }}");
    let administrators = |roles: &[&str]| {
        let entries: Vec<_> = roles.iter().map(|role| listed(role)).collect();
        format!("{{ administrators: [{}] }}", entries.join(", "))
    };
    folders.write("shop.yaml", app("shop", "shop", &administrators(&["UserAdmin", "Reader", "Introspector"])));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.administrators.len(), document.importers.len()), (1, 3, 0));

    let firebase = "{ password: { foreignHashRetentionDays: 9, firebaseScryptRef: { name: firebase } } }";
    folders.write("shop.yaml", app("shop", "shop", firebase));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.password.foreign_hash_retention_days), (1, Some(9)), "there is no Secret");
    folders.write(
        "firebase.yaml",
        "apiVersion: v1\nkind: Secret\nmetadata: { name: firebase, namespace: shop }\n\
         stringData: { signer-key: aHVzaGh1c2hodXNoaHVzaA==, salt-separator: Bw== }\n",
    );
    folders.run();
    assert_eq!(folders.document("shop").unwrap().format, 2);
    let pull = "pull: { serviceAccount: { namespace: shop, name: sync } }";
    let webhook = format!("{{ webhooks: [{{ name: sync, events: [user.deleted], {pull} }}] }}");
    folders.write("shop.yaml", app("shop", "shop", &webhook));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.webhooks.len()), (2, 1));

    folders.write("shop.yaml", app("shop", "shop", &administrators(&["Reader", "Importer"])));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.administrators.len(), document.importers.len()), (2, 1, 1));
    assert_eq!(document.importers[0].name, "loader");
    // Servers that know only format 1 can read the document, because `administrators` has only roles that they know.
    let with_importer = fs::read_to_string(folders.path("to/shop.json")).unwrap();
    assert!(!with_importer.contains("Importer"), "{with_importer}");

    let pages = |mode: &str| {
        format!("{{ webhooks: [{{ name: sync, events: [user.deleted], {pull} }}], pages: {{ mode: {mode} }} }}")
    };
    folders.write("shop.yaml", app("shop", "shop", &pages("Disabled")));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.pages), (2, None));
    folders.write("shop.yaml", app("shop", "shop", &pages("Enabled")));
    folders.run();
    let document = folders.document("shop").unwrap();
    assert_eq!((document.format, document.webhooks.len(), document.pages.is_some()), (3, 1, true));
}

#[test]
fn the_first_app_by_file_and_position_gets_the_pages_host() {
    let folders = Folders::new();
    let pages = "{ pages: { mode: Enabled, host: login.example.com } }";
    folders.write("b.yaml", app("b", "first", pages));
    folders.write("a.yaml", format!("{}---\n{}", app("a", "two", pages), app("a", "three", pages)));
    // Neither of these two Apps gets the host: the pages of the first are disabled, and the appID of the second (`off`)
    // belongs to the first.
    let disabled = "{ pages: { mode: Disabled, host: login.example.com } }";
    folders.write("0.yaml", format!("{}---\n{}", app("a", "off", disabled), app("c", "off", pages)));
    let summary = folders.run();
    let rejected: Vec<_> = summary.rejected.iter().filter(|line| line.contains("spec.pages.host")).collect();
    assert_eq!(rejected.len(), 2, "{:?}", summary.rejected);
    assert_eq!(
        *rejected[0],
        "a.yaml (document 2): App a/three: field spec.pages.host: another App has the host login.example.com; set \
         another host. The pages are on the host of the installation until then"
    );
    assert!(rejected[1].starts_with("b.yaml (document 1): App b/first: "), "{rejected:?}");
    let host = |app_id: &str| folders.document(app_id).unwrap().pages.unwrap().host;
    assert_eq!(host("two").unwrap().as_str(), "login.example.com");
    assert_eq!((host("three"), host("first")), (None, None));

    folders.remove("a.yaml");
    folders.run();
    assert!(host("first").is_some(), "the host is free");
}

#[test]
fn logo_and_texts_are_rendered_from_config_maps() {
    let folders = Folders::new();
    let pages =
        "{ pages: { mode: Enabled, theme: { logoRef: { name: brand, key: logo } }, textsRef: { name: texts } } }";
    folders.write("shop.yaml", app("shop", "shop", pages));
    let summary = folders.run();
    assert_eq!((summary.rejected.len(), summary.unresolved.len()), (0, 2), "the ConfigMaps can be elsewhere");
    let config_map = |name: &str, data: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{ name: {name}, namespace: shop }}\n{data}\n")
    };
    folders.write("brand.yaml", config_map("brand", "binaryData: { logo: iVBORw0KGgoAAAANSUhEUg== }"));
    folders.write("texts.yaml", config_map("texts", "data: { en.ftl: \"no-such-text = x\" }"));
    let summary = folders.run();
    assert_eq!((summary.rejected.len(), summary.unresolved.len()), (1, 0), "{summary:?}");
    assert!(summary.rejected[0].contains("spec.pages.textsRef: texts/en.ftl:1: no-such-text: "), "{summary:?}");
    let logo = folders.document("shop").unwrap().pages.unwrap().theme.logo.unwrap();
    assert_eq!((logo.content_type.as_str(), logo.data.0.len()), ("image/png", 16));

    folders.write("brand.yaml", config_map("brand", "binaryData: { logo: '***hush***' }"));
    let rejected = folders.run().rejected;
    let line = "brand.yaml (document 1): ConfigMap shop/brand: field binaryData.logo: must be base64; plain text goes \
                under data";
    assert!(rejected.contains(&line.to_owned()), "{rejected:?}");
    assert!(rejected.iter().any(|line| line.contains("field spec.pages.theme.logoRef: ConfigMap brand is not valid")));
}

const PLATFORM: &str =
    "{ pages: { mode: Enabled }, clients: { namespaces: { from: Selector, selector: { matchLabels: { team: a } } } } }";

fn client(namespace: &str, name: &str, annotations: &str, spec: &str) -> String {
    format!(
        "apiVersion: latchkey.dev/v1alpha1\nkind: Client\n\
         metadata: {{ name: {name}, namespace: {namespace}, annotations: {{ {annotations} }} }}\n\
         spec: {{ appRef: {{ name: platform, namespace: identity }}, {spec} }}\n"
    )
}

const WEB: &str = "web: { redirectURLs: [\"https://grafana.example.com/login\"] }";

fn secret_file(folders: &Folders, name: &str) -> Option<serde_json::Value> {
    let text = fs::read_to_string(folders.path(&format!("keys/latchkey-client-{name}.json"))).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

/// Returns the client IDs in the document of the App.
fn client_ids(folders: &Folders) -> Vec<String> {
    let document = folders.document("platform").unwrap();
    document.clients.iter().map(|client| client.client_id.to_string()).collect()
}

#[test]
fn clients_are_rendered_with_the_hash_of_a_secret_in_a_file() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "grafana", "", WEB));
    let summary = folders.run();
    assert_eq!((&summary.rejected[..], &summary.unresolved[..]), (&[][..], &[][..]));
    let file = secret_file(&folders, "identity.grafana").unwrap();
    assert_eq!(
        (&file["issuer"], &file["client-id"]),
        (&serde_json::json!("https://auth.example.com/platform"), &serde_json::json!("identity.grafana"),)
    );
    let secret = file["client-secret"].as_str().unwrap();
    assert!(secret.starts_with("lks_") && file["annotations"].is_object());
    let mode = fs::metadata(folders.path("keys/latchkey-client-identity.grafana.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let document = folders.document("platform").unwrap();
    assert_eq!((document.format, document.clients.len()), (4, 1));
    assert_eq!(document.clients[0].uid, "identity/grafana");
    let hash = crate::client::secret_state::sha256(&latchkey_crds::rendered::SecretString::new(secret));
    let expected = RenderedClientAuthentication::Secret { sha256: hash, previous: None };
    assert_eq!(document.clients[0].authentication, expected);
    assert!(!String::from_utf8(document.to_bytes()).unwrap().contains(secret), "documents have only hashes");
    // By default, ID tokens have another algorithm than access tokens, so they get a key of their own.
    let id_tokens: Vec<_> = document.keys.id_tokens.iter().map(|key| (key.algorithm, key.state)).collect();
    assert_eq!(id_tokens, [(SigningAlgorithm::RS256, KeyState::Active)]);

    assert!(folders.run().apps[0].starts_with("platform: unchanged"), "nothing is written");
}

#[test]
fn the_annotation_rotates_the_secret_of_a_client() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "grafana", "", WEB));
    folders.run();
    let before = secret_file(&folders, "identity.grafana").unwrap();
    folders.write("client.yaml", client("identity", "grafana", "latchkey.dev/rotate-secret: one", WEB));
    let end = OffsetDateTime::from_unix_timestamp(86_400).unwrap();
    assert_eq!(folders.run().next_due, Some(end), "the document must be rendered again at the end of the overlap");
    let after = secret_file(&folders, "identity.grafana").unwrap();
    assert_ne!(before["client-secret"], after["client-secret"]);
    let document = folders.document("platform").unwrap();
    let RenderedClientAuthentication::Secret { previous: Some(previous), .. } = &document.clients[0].authentication
    else {
        panic!("{:?}", document.clients[0].authentication)
    };
    assert_eq!(previous.expires_at, Some(86_400), "one day after the time of the test");
    assert!(folders.run().apps[0].starts_with("platform: unchanged"));
    assert_eq!(secret_file(&folders, "identity.grafana").unwrap(), after);
}

#[test]
fn a_broken_secret_file_is_not_overwritten() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "grafana", "", WEB));
    folders.run();
    let path = folders.path("keys/latchkey-client-identity.grafana.json");
    fs::write(&path, "hush").unwrap();
    let rejected = folders.run().rejected;
    assert_eq!(rejected.len(), 1, "{rejected:?}");
    assert!(rejected[0].contains("its file is not a JSON object") && !rejected[0].contains("hush"), "{rejected:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "hush");
    let document = folders.document("platform").unwrap();
    assert_eq!(document.clients[0].authentication, RenderedClientAuthentication::Unresolved);
}

#[test]
fn a_grant_by_label_needs_a_manifest_of_the_namespace() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("monitoring", "grafana", "", WEB));
    let summary = folders.run();
    assert_eq!(summary.rejected.len(), 1, "{summary:?}");
    assert!(summary.rejected[0].starts_with(
        "client.yaml (document 1): Client monitoring/grafana: field spec.appRef: names no App that grants clients"
    ));
    assert!(secret_file(&folders, "monitoring.grafana").is_none(), "a Client that is refused gets no secret");
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: { name: monitoring, labels: { team: a } }\n";
    folders.write("namespace.yaml", namespace);
    assert_eq!((folders.run().rejected, client_ids(&folders)), (Vec::new(), vec!["monitoring.grafana".to_owned()]));
    // If the App no longer accepts Clients of the namespace, this takes effect immediately.
    folders.remove("namespace.yaml");
    folders.run();
    assert_eq!(client_ids(&folders), [""; 0]);
}

#[test]
fn the_first_client_by_file_and_position_gets_the_client_id() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    let with_id = format!("clientID: grafana, {WEB}");
    folders.write("b.yaml", client("identity", "one", "", &with_id));
    folders.write(
        "a.yaml",
        format!("{}---\n{}", client("identity", "two", "", &with_id), client("identity", "three", "", &with_id)),
    );
    let rejected = folders.run().rejected;
    let starts: Vec<_> = rejected.iter().map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(": ")).collect();
    assert_eq!(starts, ["a.yaml (document 2): Client identity/three", "b.yaml (document 1): Client identity/one"]);
    assert_eq!(folders.document("platform").unwrap().clients[0].name, "two");
}

#[test]
fn an_invalid_client_stays_served_as_it_was() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "grafana", "", &format!("displayName: Old, {WEB}")));
    folders.run();
    // The first new spec is invalid according to the schema, the second according to the rules for Clients of the App.
    // After that, the whole file cannot be read.
    for spec in ["displayName: New, web: {}", &format!("displayName: New, clientID: platform, {WEB}")] {
        folders.write("client.yaml", client("identity", "grafana", "", spec));
        assert_eq!(folders.run().rejected.len(), 1, "{spec}");
        assert_eq!(folders.document("platform").unwrap().clients[0].display_name, "Old", "{spec}");
    }
    folders.write("client.yaml", "a: [");
    folders.run();
    assert_eq!(client_ids(&folders), ["identity.grafana"]);
    folders.remove("client.yaml");
    folders.run();
    assert_eq!(client_ids(&folders), [""; 0]);
}

#[test]
fn ended_clients_are_removed_while_the_app_is_broken() {
    let folders = Folders::new();
    let granting = "{ pages: { mode: Enabled }, clients: { namespaces: { from: All } } }";
    folders.write("app.yaml", app("identity", "platform", granting));
    for (namespace, name) in [("identity", "deleted"), ("identity", "kept"), ("monitoring", "foreign")] {
        folders.write(&format!("{name}.yaml"), client(namespace, name, "", WEB));
    }
    folders.run();
    let names = || folders.document("platform").unwrap().clients.into_iter().map(|client| client.name);
    assert_eq!(names().collect::<Vec<_>>(), ["deleted", "foreign", "kept"]);

    // The schema rejects the App, so it is not known which Clients the App accepts.
    folders.write("app.yaml", app("identity", "platform", "{ unknown: 1 }"));
    folders.remove("deleted.yaml");
    assert_eq!(folders.run().rejected.len(), 1);
    assert_eq!(names().collect::<Vec<_>>(), ["foreign", "kept"]);
    folders.write("broken.yaml", "{");
    folders.remove("foreign.yaml");
    folders.run();
    assert_eq!(names().collect::<Vec<_>>(), ["foreign", "kept"], "the broken file may have its manifest");
}

#[test]
fn a_client_of_an_app_that_is_defined_elsewhere_is_unresolved() {
    let folders = Folders::new();
    folders.write("client.yaml", client("identity", "grafana", "", WEB));
    let summary = folders.run();
    assert_eq!((summary.rejected.len(), summary.unresolved.len()), (0, 1), "{summary:?}");
    assert!(summary.unresolved[0].ends_with("(AppNotFound)"), "{summary:?}");
}

#[test]
fn the_flag_check_writes_no_secrets_of_clients() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "grafana", "", WEB));
    let summary = folders.run_with(&["--check"]);
    assert_eq!((&summary.rejected[..], &summary.unresolved[..]), (&[][..], &[][..]));
    assert!(!fs::exists(folders.path("keys")).unwrap() && !fs::exists(folders.path("to")).unwrap());
}

#[test]
fn a_client_cannot_name_a_file_outside_of_the_folder() {
    let folders = Folders::new();
    folders.write("app.yaml", app("identity", "platform", PLATFORM));
    folders.write("client.yaml", client("identity", "\"../../x\"", "", WEB));
    let rejected = folders.run().rejected;
    assert!(rejected[0].contains("namespace and name must be names of objects"), "{rejected:?}");
    assert_eq!(client_ids(&folders), [""; 0]);
}
