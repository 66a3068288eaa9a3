//! The operator in a real cluster, with real servers: what people see of an App and its Providers.

mod apps;
mod drift;
mod faults;
mod look;
mod permissions;
mod references;
mod status;
