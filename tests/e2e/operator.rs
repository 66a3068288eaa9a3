//! The operator in a real cluster, with real servers: what people see of an App and its Providers.

mod acknowledgement;
mod leader;
mod status;
