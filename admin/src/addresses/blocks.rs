//! Blocks of addresses that the cluster gave to this node.

use ipam::store::{NodeBlock, Store, StoreError};
use serde_json::{Value, json};

use crate::output::{optional, table};

/// The node's blocks, and leases in none of them.
pub(super) struct Blocks {
    blocks: Vec<NodeBlock>,
    pub(super) outside: Vec<String>,
}

/// `None` for a store without blocks.
pub(super) fn read(store: &Store) -> Result<Option<Blocks>, StoreError> {
    let Some(blocks) = store.node_blocks()? else {
        return Ok(None);
    };
    let outside = store.outside_blocks()?.into_iter();
    let outside = outside.map(|lease| lease.finding().what).collect();
    Ok(Some(Blocks { blocks, outside }))
}

impl Blocks {
    pub(super) fn documents(&self) -> Vec<Value> {
        self.blocks.iter().map(as_json).collect()
    }

    pub(super) fn table(&self) -> String {
        let header = "BLOCK  NETWORK NAME  SIZE  USED  COOLING DOWN  LEASED BEFORE  FREE  EPOCH";
        table(header, self.blocks.iter().map(row))
    }
}

/// Those that are neither leased, here or in the store before, nor cooling down; first and last address
/// of a range count, too.
fn free(block: &NodeBlock) -> u64 {
    let used = block.used.held.len() + block.used.cooling_down + block.grant.except.len();
    block.grant.size().saturating_sub(used as u64)
}

fn as_json(block: &NodeBlock) -> Value {
    json!({
        "block": block.grant.block,
        "networkName": block.network_name,
        "size": block.grant.size(),
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
        optional(block.network_name.as_deref()),
        block.grant.size().to_string(),
        block.used.held.len().to_string(),
        block.used.cooling_down.to_string(),
        block.grant.except.len().to_string(),
        free(block).to_string(),
        block.grant.epoch.to_string(),
    ]
}
