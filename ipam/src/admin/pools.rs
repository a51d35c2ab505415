//! `rdma-ipam pools`: how full the pools are.

use super::{Global, Outcome, say, say_json};
use crate::store::{Pool, Store};
use anyhow::Result;
use clap::Args;
use node::table::{cell, table};
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct Pools {}

#[derive(Default)]
struct Counts {
    used: u128,
    resting: u128,
}

impl Pools {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (plugin, store) = global.open()?;
        let cooldown = plugin.policy().ipam.cooldown.as_millis();
        let pools = store.pools()?;
        let counts = count(&store, &pools, cooldown)?;
        let slices = store.slices()?;
        if global.json {
            let pools: Vec<_> = pools
                .iter()
                .zip(&counts)
                .map(|(p, c)| as_json(p, c))
                .collect();
            let place = json!({"directory": store.directory(), "id": store.id(), "filesystem": store.file_system()});
            say_json(&json!({"store": place, "pools": pools, "slices": slices}))?;
            return Ok(Outcome::Done);
        }
        say(&format!(
            "store {} in {} ({})\n",
            store.id(),
            store.directory().display(),
            store.file_system()
        ));
        let rows: Vec<Vec<String>> = pools.iter().zip(&counts).map(|(p, c)| row(p, c)).collect();
        let header = [
            "RANGE",
            "NETWORK NAME",
            "FROM",
            "TO",
            "SIZE",
            "USED",
            "RESTING",
            "FREE",
        ];
        say(&table(&header, &rows));
        if !slices.is_empty() {
            let rows: Vec<Vec<String>> = slices
                .iter()
                .map(|slice| {
                    vec![
                        slice.slice.to_string(),
                        slice.range.to_string(),
                        cell(slice.network_name.as_deref().unwrap_or_default()),
                        cell(&slice.node),
                    ]
                })
                .collect();
            say("\n");
            say(&table(&["SLICE", "RANGE", "NETWORK NAME", "NODE"], &rows));
        }
        Ok(Outcome::Done)
    }
}

fn count(store: &Store, pools: &[Pool], cooldown: u128) -> Result<Vec<Counts>> {
    let now = u128::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0);
    let mut counts: Vec<Counts> = pools.iter().map(|_| Counts::default()).collect();
    store.seats(false, |entry| {
        for (pool, counts) in pools.iter().zip(&mut counts) {
            if pool.network_name != entry.network_name
                || pool.overlapping != entry.in_shared_class()
                || !pool.contains(entry.address)
            {
                continue;
            }
            match entry.freed {
                None => counts.used += 1,
                Some(freed) if u128::from(freed).abs_diff(now) < cooldown => counts.resting += 1,
                Some(_) => {}
            }
        }
        Ok(())
    })?;
    Ok(counts)
}

fn free(pool: &Pool, counts: &Counts) -> u128 {
    pool.size()
        .saturating_sub(counts.used)
        .saturating_sub(counts.resting)
}

fn ends(pool: &Pool) -> (String, String) {
    let first = pool.spans.first().map(|span| span.0.to_string());
    let last = pool.spans.last().map(|span| span.1.to_string());
    (first.unwrap_or_default(), last.unwrap_or_default())
}

fn as_json(pool: &Pool, counts: &Counts) -> serde_json::Value {
    // Numbers beyond 64 bits are texts: few readers of JSON keep them whole.
    let number = |n: u128| u64::try_from(n).map_or_else(|_| json!(n.to_string()), |n| json!(n));
    json!({
        "range": pool.range,
        "networkName": pool.network_name,
        "overlapping": pool.overlapping,
        "network": pool.network,
        "spans": pool.spans,
        "size": number(pool.size()),
        "used": number(counts.used),
        "resting": number(counts.resting),
        "free": number(free(pool, counts)),
    })
}

fn row(pool: &Pool, counts: &Counts) -> Vec<String> {
    let (first, last) = ends(pool);
    vec![
        pool.range.to_string(),
        cell(pool.network_name.as_deref().unwrap_or_default()),
        first,
        last,
        rounded(pool.size()),
        counts.used.to_string(),
        counts.resting.to_string(),
        rounded(free(pool, counts)),
    ]
}

/// Beyond a million million, the power of two it nearly is.
fn rounded(count: u128) -> String {
    if count < 1_000_000_000_000 {
        return count.to_string();
    }
    format!("2^{}", 128 - (count - 1).leading_zeros())
}
