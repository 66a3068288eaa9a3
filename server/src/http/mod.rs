//! The door: bytes in, bytes out; the only place that knows HTTP.
