//! Password hashing.

use std::future::Future;

use crate::domain::{
    app::App,
    client::ClientAddress,
    foreign_hash::HashClass,
    password::{Overloaded, Password, PasswordHash},
};

/// Password hashing with a bounded queue, which is fair to namespaces, to the Apps of a namespace, and to the client
/// addresses of an App.
pub trait PasswordHasher: Sync {
    /// The class (function and cost parameters) of new hashes, which the configuration of the installation determines.
    /// Hashes of other classes are replaced at the next login.
    fn class_of_new_hashes(&self) -> HashClass;

    /// Fails if the queue has no slot for this client now. Must be called before the rate limits are acquired, so
    /// that a flood of logins costs only this check.
    fn check_capacity(&self, app: &App, client: ClientAddress) -> Result<(), Overloaded>;

    fn hash(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
    ) -> impl Future<Output = Result<PasswordHash, Overloaded>> + Send;

    /// Whether the password matches the hash. Without a hash, the call does the work of a check with the parameters of
    /// new hashes, and returns false.
    fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> impl Future<Output = Result<bool, Overloaded>> + Send;

    /// Whether the password of a login matches the hash. `classes` are the classes (hash functions with their costs) of
    /// the hashes of the App. If there are any besides the class of new hashes, every call does the same work: one
    /// check with the parameters of new hashes, and one check for each other class. The check of `hash` replaces the
    /// check of its class.
    fn verify_login(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
        classes: &[HashClass],
    ) -> impl Future<Output = Result<bool, Overloaded>> + Send;

    /// Whether the password has the App's minimum strength (zxcvbn). `guesses` are the words that an attacker would try
    /// first.
    fn is_strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> impl Future<Output = Result<bool, Overloaded>> + Send;
}
