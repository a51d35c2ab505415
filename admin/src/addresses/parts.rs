//! What this node owns of a store's spaces.

use std::net::IpAddr;

use ipam::leases::{LeaseError, Leases, Use, since_boot};
use ipam::owned::{self, Owned};
use ipam::plugin::Plugin;
use ipam::space::size;
use serde_json::{Value, json};

use crate::output::Columns;

/// Columns of [`read`].
pub(super) const COLUMNS: Columns = &[
    ("PART", "/part"),
    ("NETWORK NAME", "/networkName"),
    ("SIZE", "/size"),
    ("USED", "/used"),
    ("COOLING DOWN", "/coolingDown"),
    ("FREE", "/free"),
];

/// None of a store that this node has alone.
pub(super) fn read(
    plugin: &Plugin,
    leases: &Leases,
    store: &str,
) -> Result<Vec<Value>, LeaseError> {
    let policy = plugin.policy();
    let now = since_boot();
    let cools = |used: Use| match used {
        Use::Freed(at) => now.saturating_sub(at) < policy.ipam.cooldown,
        Use::Leased => false,
    };
    let mut parts = Vec::new();
    for space in owned::spaces(&policy.state_dir)? {
        if space.store != store {
            continue;
        }
        for (cidr, part) in Owned::read(&policy.state_dir, &space)?.parts {
            let uses = leases.uses(&space, cidr)?;
            let used = uses.iter().filter(|(_, used)| *used == Use::Leased).count();
            let cooling_down = uses.iter().filter(|(_, used)| cools(*used)).count();
            let gateway: Option<IpAddr> = part.network.as_ref().and_then(|of| of.gateway);
            parts.push(json!({
                "part": cidr,
                "networkName": space.network_name,
                "size": size(cidr),
                "used": used,
                "coolingDown": cooling_down,
                // First and last address of a range count, too.
                "free": size(cidr).saturating_sub((used + cooling_down) as u64),
                "id": part.id,
                "network": part.network.is_some(),
                "gateway": gateway,
            }));
        }
    }
    Ok(parts)
}
