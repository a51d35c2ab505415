//! `rdmactl blocks`: blocks of addresses in the cluster. The API is asked by `kubectl`, with its
//! kubeconfig and its user's rights.
//!
//! Only `release` writes, and that is one change of one object: killed before or after it, nothing is
//! half done.

mod agreement;
mod fsck;
mod release;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use node::table::{age, cell};
use rdma_ipam_broker::api::document::BlockObject;
use serde_json::{Value, json};

use crate::global::{Global, Kubectl};
use crate::kubectl;
use crate::output::{Ended, Outcome, complain, filters_before_command, optional, table};

/// Shows which node has which block of addresses, and how much of each is used.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 good, 1 failed, nothing found, or fsck found something, 2 wrong usage."
)]
pub(crate) struct Blocks {
    #[command(flatten)]
    kubectl: Kubectl,
    /// Only blocks of this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Only blocks of this store
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Only blocks of this network name; "" for none
    #[arg(long, value_name = "NAME")]
    network_name: Option<String>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Release a block of a node that is gone for good
    Release(release::Release),
    /// Compare the blocks with each other and their ranges; on a node also with the blocks stored there
    Fsck,
}

impl Blocks {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let is_filtered =
            self.node.is_some() || self.store.is_some() || self.network_name.is_some();
        if self.command.is_some() && is_filtered {
            return Err(filters_before_command("--node, --store and --network-name"));
        }
        match &self.command {
            None => self.list(global),
            Some(Command::Release(command)) => command.run(&self.kubectl, global),
            Some(Command::Fsck) => fsck::run(&self.kubectl, global),
        }
    }

    fn list(&self, global: &Global) -> Ended {
        let mut blocks: Vec<BlockObject> = self.kubectl.list(kubectl::BLOCKS)?;
        blocks.retain(|block| self.means(block));
        blocks.sort_by_cached_key(|BlockObject { spec, .. }| {
            let block = (spec.block.network(), spec.block.prefix());
            (spec.store.clone(), spec.network_name.clone(), block)
        });
        let documents: Vec<Value> = blocks.iter().map(as_json).collect();
        let document = json!({"namespace": self.kubectl.namespace(), "blocks": documents});
        global.say(document, || text(&blocks));
        if blocks.is_empty() {
            complain(&format!(
                "no such AddressBlock in namespace {}; --namespace names another one",
                self.kubectl.namespace()
            ));
            return Ok(Outcome::Found);
        }
        Ok(Outcome::Good)
    }

    fn means(&self, block: &BlockObject) -> bool {
        let network_name = block.spec.network_name.as_deref().unwrap_or_default();
        (self.node.as_ref()).is_none_or(|node| *node == block.spec.node)
            && (self.store.as_ref()).is_none_or(|store| *store == block.spec.store)
            && (self.network_name.as_deref()).is_none_or(|name| name == network_name)
    }
}

fn text(blocks: &[BlockObject]) -> String {
    let header = "BLOCK  STORE  NETWORK NAME  NODE  USED  FREE  AGE  STATE";
    table(header, blocks.iter().map(row))
}

fn row(block: &BlockObject) -> Vec<String> {
    let spec = &block.spec;
    vec![
        spec.block.to_string(),
        cell(&spec.store),
        optional(spec.network_name.as_deref()),
        cell(&spec.node),
        optional(block.status.map(|status| status.used)),
        optional(block.status.map(|status| status.free)),
        optional(spec.since.map(ago)),
        state(block),
    ]
}

fn ago(then: Timestamp) -> String {
    age(Timestamp::now().as_second() - then.as_second())
}

fn state(block: &BlockObject) -> String {
    let spec = &block.spec;
    if !block.is_well_named() {
        return "its name is not the one of its block".to_owned();
    }
    match (&spec.over, &spec.wanted_by) {
        (Some(over), _) => format!("cooling down for {}: {}", ago(over.since), cell(&over.why)),
        (None, Some(node)) => format!("requested by {}", cell(node)),
        (None, None) => "-".to_owned(),
    }
}

fn as_json(block: &BlockObject) -> Value {
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
        "used": block.status.map(|status| status.used),
        "free": block.status.map(|status| status.free),
        "wantedBy": spec.wanted_by,
        "over": spec.over,
    })
}
