//! The section `webhooks` of the OpenAPI document: the requests that receivers of events get.

use latchkey_crds::webhook::WebhookEvent;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::examples;
use crate::domain::webhook::EventBody;

/// Adds the section and its schemas to the document.
pub(super) fn add(document: &mut Value) {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut schemas = settings.for_serialize().into_generator();
    let body = schemas.subschema_for::<EventBody>();
    for (name, schema) in schemas.take_definitions(true) {
        document["components"]["schemas"][name] = schema;
    }
    let webhooks =
        WebhookEvent::ALL.iter().map(|event| (event.as_str().to_owned(), json!({ "post": post(*event, &body) })));
    document["webhooks"] = Value::Object(webhooks.collect::<Map<_, _>>());
}

fn post(event: WebhookEvent, body: &schemars::Schema) -> Value {
    let header = |name: &str, description: &str| {
        json!({
            "name": name,
            "in": "header",
            "required": true,
            "description": description,
            "schema": { "type": "string" },
        })
    };
    let is_about_one_user = event.is_about_one_user();
    let has_user = is_about_one_user || event.as_str().starts_with("session.");
    json!({
        "summary": summary(event),
        "description": "Sent to the `url` of a push webhook that lists the event, signed as Standard Webhooks \
            specifies. An event can come more than once, and in any order.",
        "security": [],
        "parameters": [
            header("webhook-id", "The id of the event, the same for each delivery."),
            header("webhook-timestamp", "When this delivery was signed, in Unix seconds."),
            header("webhook-signature", "`v1,` and the signature in base64; during a rotation one for each key."),
        ],
        "requestBody": {
            "required": true,
            "content": {
                "application/json": {
                    "schema": body,
                    "example": {
                        "type": event.as_str(),
                        "timestamp": "2026-11-05T10:46:40Z",
                        "data": {
                            "app": "shop",
                            "user_id": has_user.then_some(examples::USER_ID),
                            "session_id": event.as_str().starts_with("session.").then_some(examples::SESSION_ID),
                            "version": is_about_one_user.then_some(4),
                            "detail": null,
                        },
                    },
                },
            },
        },
        "responses": {
            "2XX": { "description": "The event is delivered." },
            "410": { "description": "Stops the webhook until its settings or its Secret change." },
            "default": { "description": "The delivery is tried again." },
        },
    })
}

const fn summary(event: WebhookEvent) -> &'static str {
    match event {
        WebhookEvent::UserCreated => "A user registered or was created",
        WebhookEvent::UserVerified => "A user confirmed the email address",
        WebhookEvent::UserUpdated => "A user changed",
        WebhookEvent::UserPasswordChanged => "The password of a user was changed, reset or removed",
        WebhookEvent::UserDisabled => "A user was disabled",
        WebhookEvent::UserEnabled => "A user was enabled",
        WebhookEvent::UserDeleted => "A user was deleted",
        WebhookEvent::UserIdentityLinked => "An identity was linked to a user",
        WebhookEvent::UserIdentityUnlinked => "An identity was removed from a user",
        WebhookEvent::SessionCreated => "A user logged in",
        WebhookEvent::SessionEnded => "One or all sessions of a user ended",
        WebhookEvent::SessionStolen => "A session ended because an old refresh token was used",
        WebhookEvent::UsersImported => "Users were imported",
        WebhookEvent::UsersExported => "The data of one user or of all users was exported",
    }
}
