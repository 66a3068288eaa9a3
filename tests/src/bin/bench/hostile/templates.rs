//! Mail templates that are deeply nested, very long, or expensive to render.
//!
//! A tenant applies Apps with a ConfigMap each. Every template is within all size limits, but parsers and
//! compilers recurse over nested and chained input, and renderers repeat loops.
//!
//! Attacks the bounds that apply to a template before it is parsed. Also attacks the rule that a panic while the
//! operator reconciles one App affects only that App.

use std::time::Duration;

use anyhow::{Result, ensure};
use kube::Api;
use latchkey_crds::app;
use latchkey_tests::{
    builders::App,
    cluster::{TestCluster, apply},
};
use tokio::time::sleep;

use super::operator_attack::OperatorAttack;
use crate::measurements::Bound;

/// How long the operators are observed. Within this time, a standby can replace a failed operator, and fail as well.
const OBSERVATION_TIME: Duration = Duration::from_secs(25);

/// The name of a nested or chained construct, and a function that returns a template with this construct.
type Bomb = (&'static str, fn() -> String);

const BOMBS: [Bomb; 16] = [
    ("minus", || format!("{{{{ {}1 }}}}", "-".repeat(60_000))),
    ("not", || format!("{{{{ {}true }}}}", "not ".repeat(20_000))),
    ("parentheses", || format!("{{{{ {}1{} }}}}", "(".repeat(30_000), ")".repeat(30_000))),
    ("lists", || format!("{{{{ {}1{} }}}}", "[".repeat(30_000), "]".repeat(30_000))),
    ("maps", || format!("{{{{ {}1{} }}}}", "{\"a\":".repeat(10_000), "}".repeat(10_000))),
    ("filters", || format!("{{{{ name{} }}}}", "|upper".repeat(20_000))),
    ("attributes", || format!("{{{{ name{} }}}}", ".a".repeat(40_000))),
    ("sums", || format!("{{{{ 1{} }}}}", "+1".repeat(40_000))),
    ("powers", || format!("{{{{ 1{} }}}}", "**1".repeat(30_000))),
    ("conditions", || format!("{{{{ {}1 }}}}", "1 if name else ".repeat(8_000))),
    ("elif", || format!("{{% if name %}}{}{{% endif %}}", "{% elif name %}".repeat(8_000))),
    ("if", || format!("{}{}", "{% if name %}".repeat(5_000), "{% endif %}".repeat(5_000))),
    ("for", || format!("{}{}", "{% for i in range(9) %}".repeat(2_000), "{% endfor %}".repeat(2_000))),
    ("comments", || "{#".repeat(33_000)),
    ("range", || "{% for i in range(1000000000) %}x{% endfor %}".to_owned()),
    ("strings", || format!("{{{{ {} }}}}", "'x' * 1000000000".replace('x', &"x".repeat(1_000)))),
];

pub(super) async fn run() -> Result<Vec<Bound>> {
    let cluster = TestCluster::start().await?;
    let trial = OperatorAttack::start(&cluster).await?;
    let namespace = trial.hostile_namespace();
    let client = trial.install.admin();
    let attack = async {
        for (name, bomb) in BOMBS {
            let app = App::with_id(&format!("bomb-{name}")).template("confirm.txt", &bomb());
            for object in app.objects(namespace) {
                apply(&client, &object).await?;
            }
        }
        sleep(OBSERVATION_TIME).await;
        Ok(())
    };
    let ((), mut bounds) = trial.run_during(attack).await?;
    let apps: Api<app::App> = Api::namespaced(client, namespace);
    let apps = apps.list(&kube::api::ListParams::default()).await?.items;
    ensure!(apps.len() == BOMBS.len(), "all Apps with templates exist");
    let reconciled = apps.iter().filter(|app| {
        let mut conditions = app.status.iter().flat_map(|status| &status.conditions);
        // Before the operator reconciles an App, the App has the default conditions of the schema.
        conditions.any(|condition| condition.observed_generation == app.metadata.generation)
    });
    let reconciled = reconciled.count();
    bounds.push(Bound::new(
        format!("each App with such a template is reconciled: {reconciled} of {}", BOMBS.len()),
        reconciled == BOMBS.len(),
    ));
    Ok(bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_template_fits_into_a_config_map() {
        for (name, bomb) in BOMBS {
            assert!(bomb().len() <= 250 * 1024, "{name}");
        }
    }
}
