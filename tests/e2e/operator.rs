//! The operator in a real cluster, with real servers: what people see of an App and its Providers.

mod acknowledgement;
mod apps;
mod drift;
mod faults;
mod leader;
mod look;
mod permissions;
mod references;
mod status;
