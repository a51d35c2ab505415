//! `rdma-ipam blocks`: which blocks of addresses this node has.

use super::{Global, Outcome, complain, say, say_json};
use crate::block::size;
use crate::store::{NodeBlock, Store};
use anyhow::{Result, bail};
use clap::Args;
use node::table::{cell, table};
use serde_json::{Value, json};

#[derive(Debug, Args)]
pub(super) struct Blocks {}

impl Blocks {
    #[expect(clippy::unused_self, reason = "as each command has it")]
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (blocks, outside) = match global.open_used()?.1 {
            Some(store) => read(&store, &global.store)?,
            None => (Vec::new(), Vec::new()),
        };
        if global.json {
            let blocks: Vec<Value> = blocks.iter().map(as_json).collect();
            say_json(json!({"blocks": blocks, "leasesOutside": outside}));
        } else {
            let rows: Vec<Vec<String>> = blocks.iter().map(row).collect();
            let header = [
                "BLOCK",
                "NETWORK NAME",
                "SIZE",
                "USED",
                "COOLING DOWN",
                "LEASED BEFORE",
                "FREE",
                "EPOCH",
            ];
            say(&table(&header, &rows));
        }
        for lease in &outside {
            complain(lease);
        }
        Ok(match outside.is_empty() {
            true => Outcome::Done,
            false => Outcome::Found,
        })
    }
}

/// The blocks, and what is said of leases that are in none.
fn read(store: &Store, name: &str) -> Result<(Vec<NodeBlock>, Vec<String>)> {
    let Some(blocks) = store.node_blocks()? else {
        bail!("store {name:?} is of type file, which has no blocks; see rdma-ipam pools");
    };
    let outside = store
        .outside_blocks()?
        .into_iter()
        .map(|lease| lease.finding().what);
    Ok((blocks, outside.collect()))
}

/// Those that are neither leased, here or in the store before, nor cooling down; first and last address
/// of a range count, too.
fn free(block: &NodeBlock) -> u64 {
    let used = block.used.held.len() + block.used.cooling_down + block.grant.except.len();
    size(block.grant.block).saturating_sub(used as u64)
}

fn as_json(block: &NodeBlock) -> Value {
    json!({
        "block": block.grant.block,
        "networkName": block.network_name,
        "size": size(block.grant.block),
        "used": block.used.held.len(),
        "coolingDown": block.used.cooling_down,
        "free": free(block),
        "leasedBefore": block.grant.except.len(),
        "epoch": block.grant.epoch,
        "uid": block.grant.uid,
    })
}

fn row(block: &NodeBlock) -> Vec<String> {
    vec![
        block.grant.block.to_string(),
        cell(block.network_name.as_deref().unwrap_or_default()),
        size(block.grant.block).to_string(),
        block.used.held.len().to_string(),
        block.used.cooling_down.to_string(),
        block.grant.except.len().to_string(),
        free(block).to_string(),
        block.grant.epoch.to_string(),
    ]
}
