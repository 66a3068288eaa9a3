//! The users of a Keycloak server are imported into their own App, and log in with their old passwords.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use latchkey_tests::{
    builders::{App, Webhook},
    process,
};
use serde_json::json;
use tokio::time::Instant;

use super::{ADMINISTRATOR, CALLER_LABEL, ExpectedEvents, IMPORTER, admin_url, administrator};
use crate::{
    cluster_client::retry_until_ok,
    events,
    keycloak::Export,
    steps::{APP_NAMESPACE, ClusterTest, RELEASE, TOOLS_NAMESPACE, service_url},
};

/// appID of the App that gets the users. In an App with foreign hashes, every login checks one hash of each kind. So
/// the App under load gets no imported users.
pub(super) const APP_ID: &str = "cluster-test-moved";

/// The export that the test imports without `--keycloak-export`.
const FIXTURE: &str = "import/tests/fixtures/keycloak/shop-realm-and-users.json";

/// Time limit for all logins together. [`LIMIT_PER_LOGIN`] is added to it for each user.
const LOGINS_LIMIT: Duration = Duration::from_secs(180);
/// Additional time for the login of each user. A login checks a hash of each kind and makes a new hash. For the kinds
/// of a large export, a login needs as much CPU time as about four of the server's own Argon2 hashes.
const LIMIT_PER_LOGIN: Duration = Duration::from_millis(500);
/// Time limit for deleting the App with its users. The operator waits two minutes before it frees an appID.
const DELETION_LIMIT: Duration = Duration::from_secs(600);

// === impl ClusterTest ===

impl ClusterTest<'_> {
    pub(super) fn keycloak_export(&self) -> Result<Export> {
        let fixture = process::root().join(FIXTURE);
        Export::read(self.options.keycloak_export.as_deref().unwrap_or(&fixture))
    }

    /// Creates an App, imports the users of the export, and logs them in. Adds the caused events to `expected`, and
    /// returns the App.
    pub(super) async fn import_users(
        &self,
        export: &Export,
        push: &Webhook,
        expected: &mut ExpectedEvents,
    ) -> Result<App> {
        let administrators = json!([administrator(ADMINISTRATOR, "Reader"), administrator(IMPORTER, "Importer")]);
        let app = App::with_id(APP_ID)
            .set("/deletionPolicy", "Delete")
            .set("/administrators", administrators)
            .limit("loginsPerClient", &[(100_000, 60)])
            .webhook(push);
        self.apply_app(&app).await?;
        self.run_import(&app, export).await?;
        expected.imported = u64::try_from(export.with_address)?;

        let (url, public_url) = (admin_url(), service_url(RELEASE));
        let [users, with_password] = [export.with_address, export.with_password].map(|number| number.to_string());
        let api = ["imported-users", "--url", &*url, "--app", app.id(), "--public-url", &*public_url];
        let numbers = ["--users", &*users, "--with-password", &*with_password];
        self.run_pod_as("imported-users", ADMINISTRATOR, &[&api[..], &numbers].concat()).await?;
        let limit = LOGINS_LIMIT + LIMIT_PER_LOGIN * u32::try_from(export.with_password)?;
        let (succeeded, log) = self.wait_for_pod_end_within("imported-users", limit).await?;
        ensure!(succeeded, "the pod imported-users failed: {log}");
        expected.of_users.extend(events::read_caused(&log)?);
        for figure in log.lines().filter(|line| line.starts_with("figure ")) {
            println!("{figure}");
        }
        println!("ok     all imported users log in with the passwords that they had in Keycloak");
        Ok(app)
    }

    /// Imports the export with `kubectl run`, and with the pod that docs/import.md shows.
    async fn run_import(&self, app: &App, export: &Export) -> Result<()> {
        let docs = std::fs::read_to_string(process::root().join("docs/import.md"))?;
        let mut blocks = docs.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next());
        let pod = blocks.find(|block| block.contains("serviceAccountName")).context("docs/import.md has a pod")?;
        ensure!(
            pod.contains("[\"import\", \"keycloak\", \"-\""),
            "the pod in docs/import.md does not import from Keycloak"
        );
        let mut overrides = pod.to_owned();
        for (word, replacement) in
            [("\"shop\"", format!("\"{}\"", app.id())), ("http://latchkey-server-admin.latchkey.svc:8081", admin_url())]
        {
            ensure!(overrides.contains(word), "the pod in docs/import.md does not contain {word}");
            overrides = overrides.replace(word, &replacement);
        }
        self.cluster.delete_and_wait("v1", "Pod", Some(TOOLS_NAMESPACE), "import").await?;
        // Runs without `--rm` to keep the log of the pod, which has the whole report. The output of kubectl can be
        // incomplete, because the pod ends immediately.
        let command = ["-n", TOOLS_NAMESPACE, "run", "import", "--stdin", "--restart=Never"].map(String::from);
        let options = [
            format!("--image={}", self.image("latchkey-server")),
            format!("--labels={CALLER_LABEL}=true"),
            format!("--overrides={overrides}"),
            "--override-type=strategic".to_owned(),
        ];
        let began = Instant::now();
        // The exit status is that of the import. It is 1 if the export has a user without an email address.
        let outcome = self.cluster.kubectl_with_input(command.into_iter().chain(options), &export.text).await;
        let took = began.elapsed();
        let (succeeded, report) =
            self.wait_for_pod_end("import").await.with_context(|| format!("kubectl run: {outcome:?}"))?;
        let (users, created) = (export.users, export.with_address);
        let totals = format!("Users in the input: {users}\n  created: {created}\n  unchanged: 0\n  refused: 0\n");
        ensure!(report.contains(&totals) && succeeded == (created == users), "{outcome:?}: {report}");
        for line in report.lines() {
            println!("       {line}");
        }
        println!("ok     an import from Keycloak with the pod of docs/import.md");
        println!("figure {:.1} MB imported in {:.0} s", export.text.len() as f64 / 1e6, took.as_secs_f64());
        self.cluster.delete("v1", "Pod", Some(TOOLS_NAMESPACE), "import").await
    }

    /// Deletes the App with its users, and waits until its keys are deleted, too.
    pub(in crate::steps) async fn delete_app_with_users(&self, app: &App) -> Result<()> {
        let began = Instant::now();
        let (version, kind) = ("latchkey.dev/v1alpha1", "App");
        self.cluster.delete(version, kind, Some(APP_NAMESPACE), app.id()).await?;
        retry_until_ok("the App and its users are deleted", DELETION_LIMIT, || async {
            let left = self.cluster.get(version, kind, Some(APP_NAMESPACE), app.id()).await?;
            ensure!(left.is_null(), "{}", left["status"]);
            Ok(())
        })
        .await?;
        // Fails if another key Secret is left besides that of the App under load.
        self.key_secret_data().await?;
        println!(
            "ok     an App with deletionPolicy Delete is deleted with its users ({:.0} s)",
            began.elapsed().as_secs_f32()
        );
        Ok(())
    }
}
