//! A number of units that all clients share, and of which one client address can hold a part at most.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::domain::client::ClientAddress;

/// Units that are lent to client addresses. Its memory is bounded: an address is listed only while it holds units.
#[derive(Debug)]
pub struct Quota {
    total: usize,
    per_client: usize,
    state: Mutex<QuotaState>,
}

#[derive(Debug, Default)]
struct QuotaState {
    used: usize,
    clients: HashMap<ClientAddress, usize>,
}

/// Units of a quota, given back when this is dropped.
#[derive(Debug)]
pub struct QuotaPermit {
    quota: Arc<Quota>,
    client: Option<ClientAddress>,
    units: usize,
}

/// No units are left, or the client address holds its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no units are left")]
pub struct Exhausted;

// === impl Quota ===

impl Quota {
    pub fn new(total: usize, per_client: usize) -> Arc<Self> {
        Arc::new(Self { total, per_client, state: Mutex::default() })
    }

    /// A permit without units, which can grow. Without a client address only the total counts.
    pub fn empty_permit(self: &Arc<Self>, client: Option<ClientAddress>) -> QuotaPermit {
        QuotaPermit { quota: Arc::clone(self), client, units: 0 }
    }

    /// # Errors
    ///
    /// [`Exhausted`] if so many units are not left, for all or for the client address.
    pub fn try_acquire(
        self: &Arc<Self>,
        client: Option<ClientAddress>,
        units: usize,
    ) -> Result<QuotaPermit, Exhausted> {
        let mut permit = self.empty_permit(client);
        permit.try_grow(units)?;
        Ok(permit)
    }

    /// The units in use.
    pub fn used(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).used
    }
}

// === impl QuotaPermit ===

impl QuotaPermit {
    /// Takes more units; all of them or none.
    ///
    /// # Errors
    ///
    /// As [`Quota::try_acquire`].
    pub fn try_grow(&mut self, units: usize) -> Result<(), Exhausted> {
        if units == 0 {
            return Ok(());
        }
        let mut state = self.quota.state.lock().unwrap_or_else(PoisonError::into_inner);
        let used = state.used.saturating_add(units);
        if used > self.quota.total {
            return Err(Exhausted);
        }
        if let Some(client) = self.client {
            let held = state.clients.get(&client).copied().unwrap_or(0).saturating_add(units);
            if held > self.quota.per_client {
                return Err(Exhausted);
            }
            state.clients.insert(client, held);
        }
        state.used = used;
        self.units += units;
        Ok(())
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        if self.units == 0 {
            return;
        }
        let mut state = self.quota.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.used -= self.units;
        if let Some(client) = self.client {
            let left = state.clients.get(&client).copied().unwrap_or(0).saturating_sub(self.units);
            if left == 0 {
                state.clients.remove(&client);
            } else {
                state.clients.insert(client, left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(last: u8) -> Option<ClientAddress> {
        Some(ClientAddress::of([192, 0, 2, last].into()))
    }

    #[test]
    fn one_client_cannot_hold_more_than_its_part() {
        let quota = Quota::new(100, 40);
        let mut first = quota.try_acquire(client(1), 30).unwrap();
        assert_eq!(first.try_grow(11), Err(Exhausted));
        first.try_grow(10).unwrap();
        assert!(quota.try_acquire(client(1), 1).is_err());
        let second = quota.try_acquire(client(2), 40).unwrap();
        assert_eq!(quota.used(), 80);
        assert!(quota.try_acquire(client(3), 21).is_err(), "only 20 are left");
        let proxy = quota.try_acquire(None, 20).unwrap();
        assert!(quota.try_acquire(None, 1).is_err());
        drop((first, second, proxy));
        assert_eq!(quota.used(), 0);
        assert!(quota.state.lock().unwrap().clients.is_empty(), "who holds nothing is not listed");
        quota.try_acquire(client(1), 40).unwrap();
    }

    #[test]
    fn the_addresses_of_an_ipv6_64_share_one_part() {
        let quota = Quota::new(100, 10);
        let of = |text: &str| Some(ClientAddress::of(text.parse().unwrap()));
        let _held = quota.try_acquire(of("2001:db8::1"), 10).unwrap();
        assert!(quota.try_acquire(of("2001:db8::2"), 1).is_err());
        assert!(quota.try_acquire(of("2001:db8:0:1::1"), 1).is_ok());
    }
}
