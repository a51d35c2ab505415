//! `rdmactl blocks fsck`: what of the API and this node's grants does not agree. Leases in no block of
//! the node are found by `rdmactl addresses fsck`.
//!
//! Brokers claim and give back meanwhile, so what is found of this node is printed only if it is found
//! again a while later.

use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipam::grants::{self, Grant};
use node::policy::Policy;
use rdma_ipam_broker::api::document::{
    BlockObject, NODE_LABEL, NodeObject, RangeObject, label_hash,
};
use serde_json::json;

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
    }
    let document = json!({"blocks": blocks, "node": node, "findings": findings});
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
            Some(node) => format!("and the grants of node {}", printable(node)),
            None => "and no node's grants: this is not a node of a store of type kubernetes".into(),
        };
        let (namespace, count) = (printable(kubectl.namespace()), findings.len());
        text + &format!("{blocks} blocks in namespace {namespace} {whose}; {count} findings\n")
    });
    Ok(Outcome::good_if(findings.is_empty()))
}

/// How many blocks there are, and what is wrong with them and their ranges.
fn cluster(kubectl: &Kubectl) -> anyhow::Result<(usize, Vec<Finding>)> {
    let blocks: Vec<BlockObject> = kubectl.list(BLOCKS)?;
    let ranges: Vec<RangeObject> = kubectl.list(RANGES)?;
    Ok((blocks.len(), agreement::of_cluster(&blocks, &ranges)))
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
