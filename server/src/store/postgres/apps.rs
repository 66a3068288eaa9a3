//! Ownership of appIDs in the database, and the deletion of an App's users.

use latchkey_crds::{
    rendered::{DeletedApp, RenderedApp},
    types::AppId,
};

mod claim;
mod delete_users;
mod release;
mod row;

pub use claim::ClaimOutcome;
pub use delete_users::DeleteOutcome;
pub use release::ReleaseOutcome;
pub(super) use row::is_active;

/// The owner of an appID according to a document: the document of an App or of a deleted App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipClaim {
    pub app: AppId,
    pub namespace: String,
    /// A random ID, created with the App's keys: see [`DeletedApp::incarnation`].
    pub incarnation: Option<String>,
    /// A number that rises, for example when the appID is handed over to another namespace: see
    /// [`DeletedApp::handover`].
    pub handover: u32,
}

// === impl OwnershipClaim ===

impl From<&RenderedApp> for OwnershipClaim {
    fn from(doc: &RenderedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}

impl From<&DeletedApp> for OwnershipClaim {
    fn from(doc: &DeletedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}
