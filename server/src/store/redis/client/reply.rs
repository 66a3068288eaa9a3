//! Replies of Redis.

use redis::{RedisError, Value};

use super::error::CallError;

/// The reply to one command.
pub(super) type Reply = Result<Value, RedisError>;

/// Returns the values of the replies, or the first error.
pub(super) fn values(replies: Vec<Reply>) -> Result<Vec<Value>, CallError> {
    replies.into_iter().map(|reply| reply.map_err(|error| CallError::from(&error))).collect()
}

/// Returns a value as text. `None` if it is not text.
pub(in crate::store::redis) fn text(value: Value) -> Option<String> {
    redis::from_redis_value(value).ok()
}

/// Returns the value of the line `name:value` in the reply to INFO.
pub(in crate::store::redis) fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}
