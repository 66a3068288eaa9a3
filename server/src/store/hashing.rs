//! The `PasswordHasher` port: forwards to `HashingPool`.

use super::stores::Stores;
use crate::domain::{
    app::App,
    client::ClientAddress,
    foreign_hash::HashClass,
    password::{Overloaded, Password, PasswordHash},
    ports::PasswordHasher,
};

impl PasswordHasher for Stores {
    fn class_of_new_hashes(&self) -> HashClass {
        self.hashing.class_of_new_hashes()
    }

    fn check_capacity(&self, app: &App, client: ClientAddress) -> Result<(), Overloaded> {
        self.hashing.check_capacity(app, client)
    }

    async fn hash(&self, app: &App, client: ClientAddress, password: &Password) -> Result<PasswordHash, Overloaded> {
        self.hashing.hash(app, client, password).await
    }

    async fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> Result<bool, Overloaded> {
        self.hashing.verify(app, client, password, hash).await
    }

    async fn verify_login(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
        classes: &[HashClass],
    ) -> Result<bool, Overloaded> {
        self.hashing.verify_login(app, client, password, hash, classes).await
    }

    async fn is_strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> Result<bool, Overloaded> {
        self.hashing.is_strong_enough(app, client, password, guesses).await
    }
}
