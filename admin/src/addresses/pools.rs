//! How full the ranges are that this node leases from.

use std::time::Duration;

use ipam::leases::{LeaseError, Leases, Pool};
use ipam::pool_usage::{Usage, usage};
use serde_json::{Value, json};

use crate::output::Columns;

/// Columns of [`read`].
pub(crate) const COLUMNS: Columns = &[
    ("RANGE", "/range"),
    ("STORE", "/store"),
    ("NETWORK NAME", "/networkName"),
    ("SIZE", "/size"),
    ("USED", "/used"),
    ("BY OTHERS", "/usedByOtherRanges"),
    ("COOLING DOWN", "/coolingDown"),
    ("FREE", "/free"),
];

/// Those of a store, or of all.
pub(crate) fn read(
    leases: &Leases,
    store: Option<&str>,
    cooldown: Duration,
) -> Result<Vec<Value>, LeaseError> {
    let mut pools = leases.pools()?;
    pools.retain(|pool| store.is_none_or(|store| pool.space.space.store == store));
    let counts = usage(leases, &pools, cooldown)?;
    Ok(pools.iter().zip(&counts).map(document).collect())
}

fn document((pool, counts): (&Pool, &Usage)) -> Value {
    json!({
        "range": pool.range,
        "store": pool.space.space.store,
        "networkName": pool.space.space.network_name,
        "overlapping": pool.space.alone.is_none(),
        "network": pool.network,
        "spans": pool.spans,
        "size": count(pool.size()),
        "used": count(counts.used),
        "usedByOtherRanges": count(counts.used_by_others),
        "coolingDown": count(counts.cooling_down),
        "free": count(counts.free(pool)),
    })
}

/// A number; beyond a million million the next power of two, as text.
fn count(count: u128) -> Value {
    match u64::try_from(count) {
        Ok(count) if count < 1_000_000_000_000 => json!(count),
        _ => json!(format!("2^{}", 128 - (count - 1).leading_zeros())),
    }
}
