//! The operator in a real cluster, with real servers: what people see of an App and its Providers.

mod acknowledgement;
mod apps;
mod deletion;
mod drift;
mod faults;
mod keys;
mod leader;
mod look;
mod permissions;
mod quota;
mod reachable;
mod references;
mod release;
mod status;
