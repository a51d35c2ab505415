//! `rdma-ipam-broker fsck`: what of the API, the cluster's nodes and this node's files does not agree.
//!
//! Brokers claim and give back meanwhile, so what is found of this node is said only if it is found
//! once more a while later.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipam::grants::{self, Grant};
use ipam::store::Store;
use node::identity::NodeIdentity;
use node::policy::Policy;
use serde_json::{Value, json};

use super::{Outcome, say, say_json};
use crate::api::{BlockObject, Client, SpaceObject};
use crate::cli::Global;
use crate::decide::agreement::{self, Finding};
use crate::decide::standing::NodeState;

/// Longer than a broker takes from a change in the API to the one on disk, or the other way round.
const AGAIN: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct Fsck {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Fsck {
    pub(super) async fn run(self, global: &Global) -> anyhow::Result<Outcome> {
        let policy = global.policy()?;
        let client = global.client()?;
        let (blocks, mut findings) = cluster(&client).await?;
        let stores = policy.kubernetes_stores();
        let node = match stores.is_empty() {
            true => None,
            false => Some(global.node_name(&policy)?),
        };
        if let Some(node) = &node {
            let mut found = grants_of(&client, &policy, &stores, node).await?;
            if !found.is_empty() {
                tokio::time::sleep(AGAIN).await;
                let again = grants_of(&client, &policy, &stores, node).await?;
                found.retain(|finding| again.contains(finding));
            }
            findings.extend(found);
            let identity = NodeIdentity::read(&global.host_root, node)?;
            findings.extend(leases(&policy, &stores, &identity)?);
        }
        if self.json {
            let found = findings.iter();
            let found: Vec<Value> = found
                .map(|finding| json!({"object": finding.object, "what": finding.what}))
                .collect();
            say_json(json!({"blocks": blocks, "node": node, "findings": found}));
        } else {
            for finding in &findings {
                let (object, what) = (printable(&finding.object), printable(&finding.what));
                say(&format!("{object}: {what}\n"));
            }
            let whose = match &node {
                Some(node) => format!("and the grants and leases of node {}", printable(node)),
                None => "and no node's files: the policy here has no store of type kubernetes"
                    .to_owned(),
            };
            say(&format!(
                "{blocks} blocks in namespace {} {whose}; {} findings\n",
                printable(client.namespace()),
                findings.len()
            ));
        }
        Ok(match findings.is_empty() {
            true => Outcome::Done,
            false => Outcome::Found,
        })
    }
}

/// How many objects there are, and what is wrong with them. Blocks are read before nodes: a block
/// whose node comes meanwhile is not one of a node that is gone.
async fn cluster(client: &Client) -> anyhow::Result<(usize, Vec<Finding>)> {
    let mut blocks: Vec<BlockObject> = Vec::new();
    client.blocks(|block| blocks.push(block)).await?;
    let mut spaces: BTreeMap<String, SpaceObject> = BTreeMap::new();
    let names: BTreeSet<String> = blocks.iter().map(|b| b.space().object_name()).collect();
    for name in names {
        if let Some(space) = client.space(&name).await? {
            spaces.insert(name, space);
        }
    }
    let mut states: BTreeMap<String, NodeState> = BTreeMap::new();
    let listed = client.nodes(|node| {
        states.insert(node.metadata.name.clone(), NodeState::of(Some(&node)));
    });
    listed.await?;
    // The list may be some seconds old; what it does not have is asked for by itself.
    let gone: BTreeSet<String> = blocks
        .iter()
        .filter_map(BlockObject::node)
        .filter(|node| {
            let state = states.get(&node.name).unwrap_or(&NodeState::Gone);
            state.end_of(node).is_some() || state.is_anew(node)
        })
        .map(|node| node.name)
        .collect();
    for name in gone {
        let node = client.node(&name).await?;
        states.insert(name, NodeState::of(node.as_ref()));
    }
    let findings = agreement::of_cluster(&blocks, &spaces, &states);
    Ok((blocks.len(), findings))
}

/// What is wrong with the grants of this node.
async fn grants_of(
    client: &Client,
    policy: &Policy,
    stores: &[String],
    node: &str,
) -> anyhow::Result<Vec<Finding>> {
    let me = client.node(node).await?.with_context(|| {
        format!("the cluster has no Node {node:?}; name it as the cluster does: --node, or node in the policy")
    })?;
    let mut granted: Vec<(AddressSpace, Grant)> = Vec::new();
    for store in stores {
        for (space, grants) in
            grants::read_all(&grants::directory(&policy.state_dir, store), store)?
        {
            let of_space = grants.blocks.into_iter();
            granted.extend(of_space.map(|grant| (space.clone(), grant)));
        }
    }
    let mut blocks: Vec<BlockObject> = Vec::new();
    client
        .blocks_of_node(node, |block| blocks.push(block))
        .await?;
    Ok(agreement::of_node(&me.id(), &blocks, &granted))
}

/// Leases in no block of this node.
fn leases(
    policy: &Policy,
    stores: &[String],
    identity: &NodeIdentity,
) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for name in stores {
        let Some(store) = Store::open_existing(policy, name, identity.clone())? else {
            continue;
        };
        let outside = store.outside_blocks()?.into_iter();
        findings.extend(outside.map(|lease| {
            let finding = lease.finding();
            Finding {
                object: finding.path.display().to_string(),
                what: finding.what,
            }
        }));
    }
    Ok(findings)
}
