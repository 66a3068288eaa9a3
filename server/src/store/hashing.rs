//! Password hashing, handed on to its threads, so that use-cases find it beside the stores.

use super::Stores;
use crate::domain::{
    app::App,
    client::ClientAddress,
    password::{Busy, Password, PasswordHash},
    ports::Hasher,
};

impl Hasher for Stores {
    fn admit(&self, app: &App, client: ClientAddress) -> Result<(), Busy> {
        self.hashing.admit(app, client)
    }

    async fn hash(&self, app: &App, client: ClientAddress, password: &Password) -> Result<PasswordHash, Busy> {
        self.hashing.hash(app, client, password).await
    }

    async fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> Result<bool, Busy> {
        self.hashing.verify(app, client, password, hash).await
    }

    fn is_outdated(&self, hash: &PasswordHash) -> bool {
        self.hashing.is_outdated(hash)
    }

    async fn strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> Result<bool, Busy> {
        self.hashing.strong_enough(app, client, password, guesses).await
    }
}
