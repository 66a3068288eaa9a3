#![doc = include_str!("../README.md")]

pub use argon2::{Algorithm, Error, Params, Version};

pub use self::{
    hasher::{Function, Hasher},
    kernel::Kernel,
};

mod blake2b;
mod block;
mod hasher;
mod kernel;
mod memory;
mod segment;
#[cfg(test)]
mod tests;
