//! Finds a code that a user sent back, and stores a consumed code again if the transaction that uses it failed.

use tracing::warn;

use super::{
    call::Call,
    code::{Code, CodeKey, CodePurpose, CodeRecord},
    error::CommonError,
    ports::Codes,
};

/// Finds a code of one of these purposes. Returns `None` for a malformed, unknown or expired code, and for a code of
/// another purpose.
pub(super) async fn find_code<S: Codes>(
    call: Call<'_, S>,
    code: &str,
    purposes: &[CodePurpose],
) -> Result<Option<(CodeKey, CodeRecord)>, CommonError> {
    let Ok(code) = Code::parse(code) else { return Ok(None) };
    let found = call.stores.find_code(call.app_id(), &code.keys_to_try(call.app)).await?;
    let now = call.env.now().unix_timestamp();
    Ok(found.filter(|(_, record)| purposes.contains(&record.purpose) && now < record.expires_at))
}

/// Stores a consumed code again, because the transaction that uses it failed. If the transaction was committed despite
/// its error, the user's epoch has risen, which makes the code invalid.
pub(super) async fn restore_code<S: Codes>(call: Call<'_, S>, key: &CodeKey, record: &CodeRecord) {
    if let Err(error) = call.stores.store_code(call.app_id(), key, record).await {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "an unused code could not be stored again"
        );
    }
}
