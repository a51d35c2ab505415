//! What of a space is leased on this node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ipam::block::AddressSpace;
use ipam::lease::Lease;
use ipam::leases::{LeaseError, Leases, Noted, Use, since_boot};
use ipnetwork::IpNetwork;

use crate::grants::Grants;

/// The leases of this node, as a space's task reads them.
#[derive(Debug)]
pub(crate) struct SpaceLeases {
    pub(crate) leases: Leases,
    pub(crate) space: AddressSpace,
    pub(crate) cooldown: Duration,
}

/// How much of a block is in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BlockUse {
    /// Addresses that are leased, ascending.
    pub(crate) held: Vec<IpAddr>,
    /// How many addresses were released and cool down.
    pub(crate) cooling_down: usize,
}

impl SpaceLeases {
    /// What of a block is in use. A lease that is there from before the call until after it is seen.
    pub(crate) fn block_use(&self, block: IpNetwork) -> Result<BlockUse, LeaseError> {
        let now = since_boot();
        let mut all = BlockUse::default();
        for (address, used) in self.leases.uses(&self.space, block)? {
            match used {
                Use::Leased => all.held.push(address),
                Use::Freed(at) if now.saturating_sub(at) < self.cooldown => all.cooling_down += 1,
                Use::Freed(_) => {}
            }
        }
        Ok(all)
    }

    /// The ranges in use.
    pub(crate) fn pools(&self) -> Result<Vec<Noted>, LeaseError> {
        let mut pools = self.leases.pools()?;
        pools.retain(|pool| pool.space.space == self.space);
        Ok(pools.into_iter().map(|pool| pool.noted).collect())
    }

    /// The leases of the space.
    pub(crate) fn list(&self) -> Result<Vec<Lease>, LeaseError> {
        let mut leases = self.leases.list()?.leases;
        leases.retain(|lease| space_of(lease) == self.space);
        Ok(leases)
    }
}

/// Leased addresses that are in no granted block of their space.
pub(crate) fn outside(
    leases: &Leases,
    granted: &BTreeMap<AddressSpace, Grants>,
) -> Result<Vec<(AddressSpace, IpAddr)>, LeaseError> {
    let mut outside = Vec::new();
    for lease in leases.list()?.leases {
        let space = space_of(&lease);
        let blocks = granted.get(&space);
        let mut blocks = blocks.iter().flat_map(|grants| &grants.blocks);
        if !blocks.any(|grant| grant.block.contains(lease.address)) {
            outside.push((space, lease.address));
        }
    }
    Ok(outside)
}

fn space_of(lease: &Lease) -> AddressSpace {
    AddressSpace::new(&lease.store, lease.network_name.as_deref())
}
