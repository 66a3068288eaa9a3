//! Quotas: a fixed number of units that all clients share, with a limit per client address and per IPv6 site (/48).

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    sync::Arc,
};

use parking_lot::Mutex;

use crate::domain::client::{ClientAddress, Ipv6Site};

/// A number of units, for example of bytes, that client addresses acquire and release. The memory of the quota itself
/// is bounded: a client address or site is stored only while it holds units.
#[derive(Debug)]
pub struct Quota {
    total: usize,
    per_client: usize,
    /// The limit for an IPv6 /48: the owner of a /48 has 65,536 client addresses.
    per_site: usize,
    state: Mutex<QuotaState>,
}

#[derive(Debug, Default)]
struct QuotaState {
    used: usize,
    units_per_client: HashMap<ClientAddress, usize>,
    units_per_site: HashMap<Ipv6Site, usize>,
}

/// Units of a quota, released when this is dropped.
#[derive(Debug)]
pub struct QuotaPermit {
    quota: Arc<Quota>,
    client: Option<ClientAddress>,
    units: usize,
}

/// Not enough units are left: in total, for the client address, or for its IPv6 site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no units are left")]
pub struct Exhausted;

// === impl Quota ===

impl Quota {
    pub fn new(total: usize, per_client: usize, per_site: usize) -> Arc<Self> {
        Arc::new(Self { total, per_client, per_site, state: Mutex::default() })
    }

    /// A permit that has no units yet and can grow. Without a client address, only the limit `total` applies.
    pub fn empty_permit(self: &Arc<Self>, client: Option<ClientAddress>) -> QuotaPermit {
        QuotaPermit { quota: Arc::clone(self), client, units: 0 }
    }

    /// Acquires units: all of them or none. Without a client address, only the limit `total` applies.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if not enough units are left: in total, for the client address, or for its IPv6 site.
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
        self.state.lock().used
    }
}

// === impl QuotaPermit ===

impl QuotaPermit {
    /// Acquires more units: all of them or none.
    ///
    /// # Errors
    ///
    /// The same as for [`Quota::try_acquire`].
    pub fn try_grow(&mut self, units: usize) -> Result<(), Exhausted> {
        if units == 0 {
            return Ok(());
        }
        let mut state = self.quota.state.lock();
        let used = state.used.saturating_add(units);
        if used > self.quota.total {
            return Err(Exhausted);
        }
        if let Some(client) = self.client {
            let held = state.units_per_client.get(&client).copied().unwrap_or(0).saturating_add(units);
            if held > self.quota.per_client {
                return Err(Exhausted);
            }
            if let Some(site) = client.ipv6_site() {
                let held_by_site = state.units_per_site.get(&site).copied().unwrap_or(0).saturating_add(units);
                if held_by_site > self.quota.per_site {
                    return Err(Exhausted);
                }
                state.units_per_site.insert(site, held_by_site);
            }
            state.units_per_client.insert(client, held);
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
        let mut state = self.quota.state.lock();
        state.used -= self.units;
        if let Some(client) = self.client {
            release(&mut state.units_per_client, client, self.units);
            if let Some(site) = client.ipv6_site() {
                release(&mut state.units_per_site, site, self.units);
            }
        }
    }
}

/// Subtracts units from a holder (a client address or site), and removes a holder that has no units left.
fn release<K: Eq + Hash>(held: &mut HashMap<K, usize>, holder: K, units: usize) {
    if let Entry::Occupied(mut entry) = held.entry(holder) {
        let remaining = entry.get().saturating_sub(units);
        if remaining == 0 {
            entry.remove();
        } else {
            entry.insert(remaining);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(last: u8) -> Option<ClientAddress> {
        Some(ClientAddress::from_ip([192, 0, 2, last].into()))
    }

    #[test]
    fn one_client_cannot_hold_more_units_than_its_limit() {
        let quota = Quota::new(100, 40, 50);
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
        assert!(quota.state.lock().units_per_client.is_empty(), "a client without units is not stored");
        quota.try_acquire(client(1), 40).unwrap();
    }

    #[test]
    fn the_addresses_of_an_ipv6_64_share_one_limit() {
        let quota = Quota::new(100, 10, 100);
        let of = |text: &str| Some(ClientAddress::from_ip(text.parse().unwrap()));
        let _held = quota.try_acquire(of("2001:db8::1"), 10).unwrap();
        assert!(quota.try_acquire(of("2001:db8::2"), 1).is_err());
        assert!(quota.try_acquire(of("2001:db8:0:1::1"), 1).is_ok());
    }

    #[test]
    fn the_addresses_of_an_ipv6_48_hold_at_most_half() {
        let quota = Quota::new(100, 10, 50);
        let of = |net: usize| Some(ClientAddress::from_ip(format!("2001:db8:7:{net:x}::1").parse().unwrap()));
        let held: Vec<_> = (0..20).filter_map(|net| quota.try_acquire(of(net), 10).ok()).collect();
        assert_eq!(held.len(), 5);
        assert!(quota.state.lock().units_per_client.len() == 5, "a refused client is not stored");
        let other = Some(ClientAddress::from_ip("2001:db8:8::1".parse().unwrap()));
        assert!(quota.try_acquire(other, 10).is_ok());
        assert!(quota.try_acquire(client(1), 10).is_ok(), "IPv4 addresses have no site");
        drop(held);
        let state = quota.state.lock();
        assert!(state.used == 0 && state.units_per_client.is_empty() && state.units_per_site.is_empty());
    }
}
