//! What this node owns of a store's spaces.

use std::net::IpAddr;

use ipam::leases::{LeaseError, Leases, Use, since_boot};
use ipam::owned::{self, Owned, OwnedPart};
use ipam::plugin::Plugin;
use ipam::space::{AddressSpace, size};
use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use crate::output::{optional, table};

/// A part that this node owns, and what is used of it.
pub(super) struct Part {
    space: AddressSpace,
    cidr: IpNetwork,
    part: OwnedPart,
    used: usize,
    cooling_down: usize,
}

/// None of a store that this node has alone.
pub(super) fn read(plugin: &Plugin, leases: &Leases, store: &str) -> Result<Vec<Part>, LeaseError> {
    let policy = plugin.policy();
    let mut parts = Vec::new();
    for space in owned::spaces(&policy.state_dir)? {
        if space.store != store {
            continue;
        }
        let owned = Owned::read(&policy.state_dir, &space)?;
        for (cidr, part) in owned.parts {
            let uses = leases.uses(&space, cidr)?;
            let count =
                |is: &dyn Fn(Use) -> bool| uses.iter().filter(|(_, used)| is(*used)).count();
            let now = since_boot();
            let cools = |used: Use| match used {
                Use::Freed(at) => now.saturating_sub(at) < policy.ipam.cooldown,
                Use::Leased => false,
            };
            parts.push(Part {
                space: space.clone(),
                cidr,
                part,
                used: count(&|used| used == Use::Leased),
                cooling_down: count(&cools),
            });
        }
    }
    Ok(parts)
}

impl Part {
    /// Those that are neither leased nor cooling down; first and last address of a range count, too.
    fn free(&self) -> u64 {
        size(self.cidr).saturating_sub((self.used + self.cooling_down) as u64)
    }

    fn document(&self) -> Value {
        let gateway: Option<IpAddr> = self.part.network.as_ref().and_then(|of| of.gateway);
        json!({
            "part": self.cidr,
            "networkName": self.space.network_name,
            "size": size(self.cidr),
            "used": self.used,
            "coolingDown": self.cooling_down,
            "free": self.free(),
            "id": self.part.id,
            "network": self.part.network.is_some(),
            "gateway": gateway,
        })
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.cidr.to_string(),
            optional(self.space.network_name.as_deref()),
            size(self.cidr).to_string(),
            self.used.to_string(),
            self.cooling_down.to_string(),
            self.free().to_string(),
        ]
    }
}

pub(super) fn documents(parts: &[Part]) -> Vec<Value> {
    parts.iter().map(Part::document).collect()
}

pub(super) fn as_table(parts: &[Part]) -> String {
    let header = "PART  NETWORK NAME  SIZE  USED  COOLING DOWN  FREE";
    table(header, parts.iter().map(Part::row))
}
