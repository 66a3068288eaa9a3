//! The operator in a real cluster, with real servers: what people see of an App and its Providers.

mod apps;
mod deletion;
mod drift;
mod look;
mod references;
mod status;
