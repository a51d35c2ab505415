//! `rdma-ipam-broker blocks`: which node has which block of addresses.

use clap::Args;
use jiff::Timestamp;
use node::table::{age, cell, table};
use serde_json::{Value, json};

use super::{Outcome, complain, say, say_json};
use crate::api::BlockObject;
use crate::cli::Global;

#[derive(Debug, Args)]
pub(crate) struct Blocks {
    /// Those of all nodes, and cells that are split into single addresses; without it those of this
    /// node, or of --node
    #[arg(long)]
    all_nodes: bool,
    /// Only of this store
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Only of this network name; "" for those without one
    #[arg(long, value_name = "NAME")]
    network_name: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Blocks {
    pub(super) async fn run(self, global: &Global) -> anyhow::Result<Outcome> {
        let node = match self.all_nodes {
            true => None,
            false => Some(global.node_name(&global.policy()?)?),
        };
        let client = global.client()?;
        let mut blocks: Vec<BlockObject> = Vec::new();
        let each = |block: BlockObject| {
            let of_node = node.is_none() || block.spec.node == node;
            if of_node && self.means(&block) {
                blocks.push(block);
            }
        };
        match &node {
            None => client.blocks(each).await?,
            Some(node) => drop(client.blocks_of_node(node, each).await?),
        }
        blocks.sort_by_cached_key(|block| {
            let spec = &block.spec;
            (
                spec.store.clone(),
                spec.network_name.clone(),
                spec.block.network(),
                spec.block.prefix(),
            )
        });
        if self.json {
            let blocks: Vec<Value> = blocks.iter().map(as_json).collect();
            say_json(json!({"namespace": client.namespace(), "blocks": blocks}));
        } else {
            let now = Timestamp::now();
            let rows: Vec<Vec<String>> = blocks.iter().map(|block| row(block, now)).collect();
            say(&table(&HEADER, &rows));
        }
        if blocks.is_empty() {
            let whose = node.map_or_else(String::new, |node| format!(" of node {node}"));
            complain(&format!(
                "no AddressBlock{whose} in namespace {}; --namespace names another one",
                client.namespace()
            ));
            return Ok(Outcome::Found);
        }
        Ok(Outcome::Done)
    }

    fn means(&self, block: &BlockObject) -> bool {
        let network_name = block.spec.network_name.as_deref().unwrap_or_default();
        (self.store.as_ref()).is_none_or(|store| *store == block.spec.store)
            && (self.network_name.as_deref()).is_none_or(|name| name == network_name)
    }
}

pub(super) const HEADER: [&str; 8] = [
    "BLOCK",
    "STORE",
    "NETWORK NAME",
    "NODE",
    "USED",
    "FREE",
    "AGE",
    "STATE",
];

/// USED and FREE are what the node's broker noted some minutes ago; AGE is since the block came to it.
pub(super) fn row(block: &BlockObject, now: Timestamp) -> Vec<String> {
    let spec = &block.spec;
    let ago = |then: Timestamp| age(now.as_second() - then.as_second());
    let noted =
        |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    vec![
        spec.block.to_string(),
        cell(&spec.store),
        cell(spec.network_name.as_deref().unwrap_or_default()),
        cell(spec.node.as_deref().unwrap_or_default()),
        noted(block.status.map(|status| status.used)),
        noted(block.status.map(|status| status.free)),
        spec.since.map_or_else(|| "-".to_owned(), ago),
        state(block, ago),
    ]
}

fn state(block: &BlockObject, ago: impl Fn(Timestamp) -> String) -> String {
    let spec = &block.spec;
    if !block.is_well_named() {
        return "its name is not the one of its block".to_owned();
    }
    match (&spec.over, &spec.wanted_by) {
        (Some(over), _) => format!("rests for {}: {}", ago(over.since), cell(&over.why)),
        (None, Some(node)) => format!("wanted by {}", cell(node)),
        (None, None) if spec.split => "split into single addresses".to_owned(),
        (None, None) => "-".to_owned(),
    }
}

pub(super) fn as_json(block: &BlockObject) -> Value {
    let spec = &block.spec;
    json!({
        "name": block.metadata.name,
        "uid": block.metadata.uid,
        "store": spec.store,
        "networkName": spec.network_name,
        "block": spec.block,
        "node": spec.node,
        "nodeUID": spec.node_uid,
        "epoch": spec.epoch,
        "since": spec.since,
        "split": spec.split,
        "used": block.status.map(|status| status.used),
        "free": block.status.map(|status| status.free),
        "wantedBy": spec.wanted_by,
        "over": spec.over,
    })
}
