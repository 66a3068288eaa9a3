//! Runs the operator and servers with a real control plane, and checks what users see of an App and its Providers.

mod acknowledgement;
mod apps;
mod clients;
mod deletion;
mod drift;
mod faults;
mod helpers;
mod keys;
mod leader;
mod pages;
mod permissions;
mod quota;
mod reachable;
mod references;
mod release;
mod status;
mod webhooks;
