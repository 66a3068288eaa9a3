//! The names by which operator, servers and people find what belongs to Latchkey in a cluster.

use crate::types::AppId;

/// The type of the Secret with a rendered App. Servers find theirs by it: a type cannot be edited away.
pub const RENDERED_APP_TYPE: &str = "latchkey.dev/rendered-app";
/// The key under which that Secret holds the document.
pub const RENDERED_APP_KEY: &str = "app.json";
/// The type of the Secret with an App's keys.
pub const APP_KEYS_TYPE: &str = "latchkey.dev/app-keys";
/// The key under which that Secret holds the keys.
pub const APP_KEYS_KEY: &str = "keys.json";

/// On a rendered App and on a key Secret: the namespace of the App. On the key Secret the platform team may edit it,
/// which hands the appID and its users to that namespace.
pub const NAMESPACE_ANNOTATION: &str = "latchkey.dev/namespace";
/// On a rendered App and on a key Secret: the name of the App.
pub const NAME_ANNOTATION: &str = "latchkey.dev/name";
/// On an App: a new value rotates its keys once.
pub const ROTATE_KEYS_ANNOTATION: &str = "latchkey.dev/rotate-keys";
/// On an App: the id of a key that is dropped at once.
pub const REVOKE_KEY_ANNOTATION: &str = "latchkey.dev/revoke-key";
/// On an App whose keys are lost: a new value starts anew, which logs out every user.
pub const NEW_KEYS_ANNOTATION: &str = "latchkey.dev/new-keys";
/// On an App with `deletionPolicy: Delete`: its users are deleted before it goes.
pub const DELETE_USERS_FINALIZER: &str = "latchkey.dev/delete-users";

/// Who writes, for server-side apply.
pub const FIELD_MANAGER: &str = "latchkey-operator";
/// The port of the servers' operations listener in the headless Service.
pub const OPS_PORT_NAME: &str = "ops";

/// The Secret with the rendered App, in the install's namespace.
pub fn rendered_app_secret(app_id: &AppId) -> String {
    format!("latchkey-app-{app_id}")
}

/// The Secret with the App's keys, in the install's namespace.
pub fn app_keys_secret(app_id: &AppId) -> String {
    format!("latchkey-keys-{app_id}")
}
