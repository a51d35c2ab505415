//! Spaces of addresses, and networks as they lie in each other. Pure.

use crate::range::Span;
use fnv::FnvHasher;
use ipnetwork::IpNetwork;
use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;

/// Addresses that are unique: those of one store and one `network_name`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSpace {
    /// Name of the store in the policy.
    pub store: String,
    pub network_name: Option<String>,
}

impl AddressSpace {
    /// The space of a store and a `network_name`.
    #[must_use]
    pub fn new(store: &str, network_name: Option<&str>) -> Self {
        Self {
            store: store.to_owned(),
            network_name: network_name.map(str::to_owned),
        }
    }

    /// Name of a file that this node keeps of it: `default`, or `default+blue`.
    #[must_use]
    pub fn file_name(&self) -> String {
        match &self.network_name {
            None => self.store.clone(),
            Some(name) => format!("{}+{name}", self.store),
        }
    }

    /// The space whose file has a name.
    #[must_use]
    pub fn of_file_name(file: &str) -> Option<Self> {
        let (store, name) = match file.split_once('+') {
            None => (file, None),
            Some((store, name)) => (store, Some(name)),
        };
        let is_name = node::identity::is_name;
        (is_name(store) && name.is_none_or(is_name)).then(|| Self::new(store, name))
    }
}

impl fmt::Display for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {:?}", self.store)?;
        match &self.network_name {
            Some(name) => write!(f, ", network_name {name:?}"),
            None => Ok(()),
        }
    }
}

/// FNV-1a: equal on all machines and in all versions.
#[must_use]
pub fn hash(text: &str) -> u64 {
    let mut hasher = FnvHasher::default();
    hasher.write(text.as_bytes());
    hasher.finish()
}

/// An address as a network of its own.
#[must_use]
pub fn single(address: IpAddr) -> IpNetwork {
    IpNetwork::from(address)
}

/// Addresses of a network, first and last included.
#[must_use]
pub fn size(network: IpNetwork) -> u64 {
    u64::try_from(Span::of(network).size()).unwrap_or(u64::MAX)
}

/// The network of a prefix length around an address.
#[must_use]
pub fn network_around(address: IpAddr, prefix: u8) -> Option<IpNetwork> {
    let network = IpNetwork::new(address, prefix).ok()?.network();
    IpNetwork::new(network, prefix).ok()
}

/// Whether two networks have an address in common.
#[must_use]
pub fn overlap(one: IpNetwork, other: IpNetwork) -> bool {
    one.is_ipv4() == other.is_ipv4() && Span::of(one).intersection(Span::of(other)).is_some()
}

/// Prefix length of a single address.
#[must_use]
pub const fn longest(v4: bool) -> u8 {
    if v4 { 32 } else { 128 }
}
