//! `rdma-ipam pools`: how full the pools are.

use super::{Global, Outcome, complain, confirmed, say, say_json};
use crate::pool_usage::{Usage, usage};
use crate::store::{Pool, Store};
use anyhow::{Result, bail};
use clap::Args;
use ipnetwork::IpNetwork;
use node::table::{age, cell, table};
use serde_json::{Value, json};
use std::time::Duration;

#[derive(Debug, Args)]
pub(super) struct Pools {
    /// Drop an unused pool from the list, as in 10.0.0.0/24; the next ADD that asks
    /// for it brings it back
    #[arg(long, value_name = "RANGE")]
    drop: Option<IpNetwork>,
    /// The network name of the pool to drop, if it has one
    #[arg(long, requires = "drop")]
    network_name: Option<String>,
    /// Do not ask
    #[arg(long, short, requires = "drop")]
    yes: bool,
}

impl Pools {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (plugin, store) = global.open_used()?;
        let Some(store) = store else {
            if global.json && self.drop.is_none() {
                say_json(json!({"store": null, "pools": []}));
            }
            return Ok(match self.drop {
                None => Outcome::Done,
                Some(_) => Outcome::Found,
            });
        };
        let cooldown = plugin.policy().ipam.cooldown;
        let pools = store.pools()?;
        if let Some(range) = self.drop {
            return self.drop_pool(global, &store, range);
        }
        let counts = usage(&store, &pools, cooldown)?;
        if global.json {
            let pools: Vec<_> = pools
                .iter()
                .zip(&counts)
                .map(|(p, c)| as_json(p, c))
                .collect();
            let place = json!({
                "directory": store.directory(),
                "id": store.id(),
                "filesystem": store.file_system(),
            });
            say_json(json!({"store": place, "pools": pools}));
            return Ok(Outcome::Done);
        }
        say(&format!(
            "store {} in {} ({})\n",
            store.id(),
            store.directory().display(),
            store.file_system()
        ));
        let now = jiff::Timestamp::now().as_second();
        let rows: Vec<Vec<String>> = pools
            .iter()
            .zip(&counts)
            .map(|(p, c)| row(p, c, now))
            .collect();
        let header = [
            "RANGE",
            "NETWORK NAME",
            "FROM",
            "TO",
            "SIZE",
            "USED",
            "BY OTHERS",
            "COOLING DOWN",
            "FREE",
            "LAST ADD",
        ];
        say(&table(&header, &rows));
        Ok(Outcome::Done)
    }

    fn drop_pool(&self, global: &Global, store: &Store, range: IpNetwork) -> Result<Outcome> {
        let network_name = self.network_name.as_deref().filter(|name| !name.is_empty());
        let mut pools = store.pools()?;
        pools.retain(|pool| pool.range == range && pool.network_name.as_deref() == network_name);
        if pools.is_empty() {
            complain(&format!(
                "the store has no pool {range} of that network name"
            ));
            return Ok(Outcome::Found);
        }
        let used: u128 = usage(store, &pools, Duration::ZERO)?
            .iter()
            .map(|c| c.used)
            .sum();
        if used > 0 {
            bail!("pool {range} has {used} leases; see rdma-ipam list --pool {range}");
        }
        if !confirmed(self.yes, &format!("drop pool {range} from the list?"))? {
            return Ok(Outcome::Found);
        }
        let dropped = store.drop_pool(range, network_name)?;
        if global.json {
            say_json(json!({"dropped": range, "sets": dropped}));
        } else {
            say(&format!("pool {range} dropped\n"));
        }
        Ok(Outcome::Done)
    }
}

fn ends(pool: &Pool) -> (String, String) {
    let first = pool.spans.first().map(|span| span.0.to_string());
    let last = pool.spans.last().map(|span| span.1.to_string());
    (first.unwrap_or_default(), last.unwrap_or_default())
}

fn as_json(pool: &Pool, counts: &Usage) -> Value {
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
        "usedByOtherRanges": number(counts.used_by_others),
        "coolingDown": number(counts.cooling_down),
        "free": number(counts.free(pool)),
        "lastAdd": jiff::Timestamp::from_second(pool.used).ok(),
    })
}

fn row(pool: &Pool, counts: &Usage, now: i64) -> Vec<String> {
    let (first, last) = ends(pool);
    vec![
        pool.range.to_string(),
        cell(pool.network_name.as_deref().unwrap_or_default()),
        first,
        last,
        rounded(pool.size()),
        counts.used.to_string(),
        counts.used_by_others.to_string(),
        counts.cooling_down.to_string(),
        rounded(counts.free(pool)),
        age(now.saturating_sub(pool.used)),
    ]
}

/// Beyond a million million, the power of two it nearly is.
fn rounded(count: u128) -> String {
    if count < 1_000_000_000_000 {
        return count.to_string();
    }
    format!("2^{}", 128 - (count - 1).leading_zeros())
}
