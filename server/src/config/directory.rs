//! Rendered Apps from a directory, watched for changes.
