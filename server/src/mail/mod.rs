//! Mail: the outbox worker, the templates and the relays.
