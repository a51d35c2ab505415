//! `rdmactl blocks fsck`: what of the API, the cluster's nodes and this node's files does not agree.
//!
//! Brokers claim and give back meanwhile, so what is found of this node is printed only if it is found
//! again a while later.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipam::grants::{self, Grant};
use ipam::store::Store;
use node::identity::NodeIdentity;
use node::policy::Policy;
use rdma_ipam_broker::api::document::{
    BlockObject, NODE_LABEL, NodeObject, RangeObject, label_hash,
};
use rdma_ipam_broker::decide::standing::NodeState;
use serde_json::{Value, json};

use super::agreement::{self, Finding};
use crate::global::{Global, Kubectl};
use crate::kubectl::{BLOCKS, NODES, RANGES};
use crate::output::{Ended, Outcome};

/// Longer than a broker takes from a change in the API to the one on disk, or the other way round.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(2);

pub(super) fn run(kubectl: &Kubectl, global: &Global) -> Ended {
    let policy = global.policy()?;
    let (blocks, mut findings) = cluster(kubectl)?;
    let stores = policy.kubernetes_stores();
    let node = match stores.is_empty() {
        true => None,
        false => policy.node.clone().or(global.node_name()),
    };
    if let Some(node) = &node {
        let mut found = grants_of(kubectl, &policy, &stores, node)?;
        if !found.is_empty() {
            thread::sleep(CONFIRM_INTERVAL);
            let again = grants_of(kubectl, &policy, &stores, node)?;
            found.retain(|finding| again.contains(finding));
        }
        findings.extend(found);
        let identity = NodeIdentity::read(&global.host_root, node)?;
        findings.extend(leases(&policy, &stores, &identity)?);
    }
    let found = findings.iter();
    let found = found.map(|finding| json!({"object": finding.object, "what": finding.what}));
    let found: Vec<Value> = found.collect();
    let document = json!({"blocks": blocks, "node": node, "findings": found});
    global.say(document, || {
        let line = |finding: &Finding| {
            format!(
                "{}: {}\n",
                printable(&finding.object),
                printable(&finding.what)
            )
        };
        let text: String = findings.iter().map(line).collect();
        let whose = match &node {
            Some(node) => format!("and the grants and leases of node {}", printable(node)),
            None => "and no node's files: this is not a node of a store of type kubernetes".into(),
        };
        let (namespace, count) = (printable(&kubectl.namespace), findings.len());
        text + &format!("{blocks} blocks in namespace {namespace} {whose}; {count} findings\n")
    });
    Ok(Outcome::good_if(findings.is_empty()))
}

/// How many objects there are, and what is wrong with them. Blocks are read before nodes: a block
/// whose node comes meanwhile is not one of a node that is gone.
fn cluster(kubectl: &Kubectl) -> anyhow::Result<(usize, Vec<Finding>)> {
    let blocks: Vec<BlockObject> = kubectl.list(BLOCKS)?;
    let ranges: Vec<RangeObject> = kubectl.list(RANGES)?;
    let nodes: Vec<NodeObject> = kubectl.list(NODES)?;
    let states = nodes
        .iter()
        .map(|node| (node.metadata.name.clone(), NodeState::of(Some(node))));
    let states: BTreeMap<String, NodeState> = states.collect();
    let findings = agreement::of_cluster(&blocks, &ranges, &states);
    Ok((blocks.len(), findings))
}

/// What is wrong with the grants of this node.
fn grants_of(
    kubectl: &Kubectl,
    policy: &Policy,
    stores: &[String],
    node: &str,
) -> anyhow::Result<Vec<Finding>> {
    let me: NodeObject = kubectl.get(NODES, node)?.with_context(|| {
        format!(
            "the cluster has no Node {node:?}; name it as the cluster does: --node-name, or node in \
             the policy"
        )
    })?;
    let mut granted: Vec<(AddressSpace, Grant)> = Vec::new();
    for store in stores {
        let directory = grants::directory(&policy.state_dir, store);
        for (space, grants) in grants::read_all(&directory, store)? {
            let of_space = grants.blocks.into_iter();
            granted.extend(of_space.map(|grant| (space.clone(), grant)));
        }
    }
    let mut blocks: Vec<BlockObject> = kubectl.list(BLOCKS)?;
    // As its broker selects them.
    let label = label_hash(node);
    blocks.retain(|block| block.metadata.labels.get(NODE_LABEL) == Some(&label));
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
