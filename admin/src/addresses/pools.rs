//! How full the ranges are that this node leases from.

use std::time::Duration;

use ipam::leases::{LeaseError, Leases, Pool};
use ipam::pool_usage::{Usage, usage};
use serde_json::{Value, json};

use crate::output::{self, optional};
use crate::status::rounded;

/// A range and what is used of it.
pub(crate) type Used = (Pool, Usage);

/// Those of a store, or of all.
pub(crate) fn read(
    leases: &Leases,
    store: Option<&str>,
    cooldown: Duration,
) -> Result<Vec<Used>, LeaseError> {
    let mut pools = leases.pools()?;
    pools.retain(|pool| store.is_none_or(|store| pool.space.space.store == store));
    let counts = usage(leases, &pools, cooldown)?;
    Ok(pools.into_iter().zip(counts).collect())
}

pub(super) fn documents(pools: &[Used]) -> Vec<Value> {
    pools.iter().map(as_json).collect()
}

pub(super) fn table(pools: &[Used]) -> String {
    let header = "RANGE  NETWORK NAME  FROM  TO  SIZE  USED  BY OTHERS  COOLING DOWN  FREE";
    output::table(header, pools.iter().map(row))
}

fn as_json((pool, counts): &Used) -> Value {
    // Numbers beyond 64 bits are texts: few readers of JSON keep them whole.
    let number = |n: u128| u64::try_from(n).map_or_else(|_| json!(n.to_string()), |n| json!(n));
    json!({
        "range": pool.range,
        "networkName": pool.space.space.network_name,
        "overlapping": pool.space.alone.is_none(),
        "network": pool.network,
        "spans": pool.spans,
        "size": number(pool.size()),
        "used": number(counts.used),
        "usedByOtherRanges": number(counts.used_by_others),
        "coolingDown": number(counts.cooling_down),
        "free": number(counts.free(pool)),
    })
}

fn row((pool, counts): &Used) -> Vec<String> {
    let first = pool.spans.first().map(|span| span.0.to_string());
    let last = pool.spans.last().map(|span| span.1.to_string());
    vec![
        pool.range.to_string(),
        optional(pool.space.space.network_name.as_deref()),
        first.unwrap_or_default(),
        last.unwrap_or_default(),
        rounded(pool.size()),
        counts.used.to_string(),
        counts.used_by_others.to_string(),
        counts.cooling_down.to_string(),
        rounded(counts.free(pool)),
    ]
}
