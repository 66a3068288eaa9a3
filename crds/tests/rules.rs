//! Each rule of the resources: one object that it accepts, one that it refuses, by message.

use latchkey_crds::validation::Validator;
use serde_json::{Value, json};

fn app() -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": "shop", "namespace": "shop" },
        "spec": {},
    })
}

#[test]
fn the_smallest_app_is_accepted() {
    let validator = Validator::new(&latchkey_crds::app::definition()).unwrap();
    assert_eq!(validator.check(&app(), None), []);
}
