//! Names of objects, keys, annotations and ports that the operator, the servers and users share.

use crate::types::AppId;

/// The type of the Secret with a rendered App. Servers select Secrets by this type, because the type of a Secret is
/// immutable.
pub const RENDERED_APP_TYPE: &str = "latchkey.dev/rendered-app";
/// The key in `data` of the Secret with a rendered App. Its value is the rendered document.
pub const RENDERED_APP_KEY: &str = "app.json";
/// The type of the Secret with an App's keys.
pub const APP_KEYS_TYPE: &str = "latchkey.dev/app-keys";
/// The key in `data` of the Secret with an App's keys. Its value contains these keys as JSON.
pub const APP_KEYS_KEY: &str = "keys.json";

/// On a rendered App and on a key Secret: the namespace of the App. To hand the appID and its users over to another
/// namespace, the platform team edits this annotation of the key Secret.
pub const NAMESPACE_ANNOTATION: &str = "latchkey.dev/namespace";
/// On a rendered App and on a key Secret: the name of the App.
pub const NAME_ANNOTATION: &str = "latchkey.dev/name";
/// On a rendered App: the host in `spec.pages.host`, unless another App has this host.
pub const PAGES_HOST_ANNOTATION: &str = "latchkey.dev/pages-host";
/// The type of the Secret that the operator creates for a Client, in the namespace of the Client.
pub const CLIENT_SECRET_TYPE: &str = "latchkey.dev/client";
/// The key in `data` of a Client's Secret with the issuer of the App.
pub const CLIENT_SECRET_ISSUER_KEY: &str = "issuer";
/// The key in `data` of a Client's Secret with the client ID.
pub const CLIENT_SECRET_ID_KEY: &str = "client-id";
/// The key in `data` of a Client's Secret with the client secret.
pub const CLIENT_SECRET_VALUE_KEY: &str = "client-secret";
/// On a Client: each new value rotates the client secret once.
pub const ROTATE_SECRET_ANNOTATION: &str = "latchkey.dev/rotate-secret";
/// On a Client's Secret: the value of [`ROTATE_SECRET_ANNOTATION`] that was handled last.
pub const HANDLED_ROTATION_ANNOTATION: &str = "latchkey.dev/handled-rotation";
/// On a Client's Secret: the SHA-256 of the previous client secret, in base64.
pub const PREVIOUS_SECRET_ANNOTATION: &str = "latchkey.dev/previous-secret-sha256";
/// On a Client's Secret: when the previous client secret stops working (RFC 3339).
pub const PREVIOUS_SECRET_END_ANNOTATION: &str = "latchkey.dev/previous-secret-end";

/// On an App: each new value rotates the App's keys once.
pub const ROTATE_KEYS_ANNOTATION: &str = "latchkey.dev/rotate-keys";
/// On an App: the ID of a key that is dropped immediately.
pub const REVOKE_KEY_ANNOTATION: &str = "latchkey.dev/revoke-key";
/// On an App: each new value replaces all keys of the App, even if no key was lost. This logs out every user.
pub const NEW_KEYS_ANNOTATION: &str = "latchkey.dev/new-keys";
/// On an App with `deletionPolicy: Delete`: its users are deleted before the App is removed.
pub const DELETE_USERS_FINALIZER: &str = "latchkey.dev/delete-users";

/// The field manager of the operator, for server-side apply.
pub const FIELD_MANAGER: &str = "latchkey-operator";
/// The name of the operations port in the headless Service of the servers.
pub const OPS_PORT_NAME: &str = "ops";

/// Returns the name of the Secret with the rendered App, in the installation's namespace.
pub fn rendered_app_secret(app_id: &AppId) -> String {
    format!("latchkey-app-{app_id}")
}

/// Returns the name of the Secret with the App's keys, in the installation's namespace.
pub fn app_keys_secret(app_id: &AppId) -> String {
    format!("latchkey-keys-{app_id}")
}
