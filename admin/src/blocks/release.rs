//! `rdmactl blocks release`: take a block from its node.

mod decide;

use anyhow::bail;
use clap::Args;
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use rdma_ipam_broker::api::document::{BlockObject, NodeObject, Over};
use serde_json::json;

use self::decide::Danger;
use super::{as_json, text};
use crate::global::{Global, Kubectl};
use crate::kubectl::{BLOCKS, NODES};
use crate::output::{Ended, Outcome, complain, confirmed, say};

/// How often it is decided anew because the object was changed meanwhile.
const MOST_ATTEMPTS: usize = 5;

#[derive(Debug, Args)]
pub(super) struct Release {
    /// The block, as 10.0.0.16/28. It cools down before another node gets it
    #[arg(long, value_name = "CIDR")]
    block: IpNetwork,
    /// Its store
    #[arg(long, value_name = "NAME", default_value = "default")]
    store: String,
    /// Its network name [default: none]
    #[arg(long, value_name = "NAME")]
    network_name: Option<String>,
    /// Release it even if its node is Ready
    #[arg(long)]
    force: bool,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

impl Release {
    pub(super) fn run(&self, kubectl: &Kubectl, global: &Global) -> Ended {
        if self.block.ip() != self.block.network() {
            bail!(
                "{} is not a block: the one of this length around it is {}/{}",
                self.block,
                self.block.network(),
                self.block.prefix()
            );
        }
        let name = self.network_name.as_deref().filter(|name| !name.is_empty());
        let space = AddressSpace::new(&self.store, name);
        let name = space.block_name(self.block);
        // Whose block it was, and how dangerous that is, when it was agreed to take it.
        let mut agreed: Option<(String, Option<Danger>)> = None;
        for _ in 0..MOST_ATTEMPTS {
            let Some((block, node)) = read(kubectl, &name)? else {
                complain(&format!(
                    "no AddressBlock {name} in namespace {}; rdmactl blocks lists all",
                    kubectl.namespace()
                ));
                return Ok(Outcome::Found);
            };
            let (over, danger) = match decide::release(&block, node.as_ref(), Timestamp::now()) {
                decide::Release::Refused(why) => bail!("{why}"),
                decide::Release::Taken(_) => {
                    self.done(&block, global);
                    return Ok(Outcome::Good);
                }
                decide::Release::Take { over, danger } => (over, danger),
            };
            let owner = block.spec.node.clone();
            if danger == Some(Danger::Ready) && !self.force {
                bail!(
                    "node {owner} is there and Ready, and its pods may use addresses of {}: other nodes would give \
                     them, too. Drain the node, whose broker then gives the block back to whoever needs it; or \
                     delete its Node object; or say --force",
                    self.block
                );
            }
            let now = (owner.clone(), danger);
            match &agreed {
                Some(before) if *before != now => bail!(
                    "AddressBlock {name} or its node changed meanwhile: it is node {owner}'s now, which was not \
                     agreed to; nothing was taken, look at it and try again"
                ),
                None if !self.yes => {
                    // Standard output is for the document alone.
                    if !global.json {
                        say(&text(std::slice::from_ref(&block)));
                    }
                    if !confirmed(false, &question(self.block, &owner, danger))? {
                        return Ok(Outcome::Found);
                    }
                    // A person takes time, in which the node may have come back.
                    agreed = Some(now);
                    continue;
                }
                _ => agreed = Some(now),
            }
            if let Some(taken) = take(kubectl, &block, &over)? {
                self.done(&taken, global);
                return Ok(Outcome::Good);
            }
        }
        bail!("AddressBlock {name} is changed all the time; try again")
    }

    fn done(&self, block: &BlockObject, global: &Global) {
        let since = block.spec.over.as_ref().map(|over| over.since.to_string());
        global.say(json!({"released": as_json(block)}), || {
            format!(
                "{} is taken from node {}. It rests since {}; after the cool-down of the nodes' policy, and five minutes at \
                 least, another node may have it.\n",
                block.spec.block,
                printable(&block.spec.node),
                since.unwrap_or_default(),
            )
        });
    }
}

fn question(block: IpNetwork, node: &str, danger: Option<Danger>) -> String {
    let state = match danger {
        None => format!("the cluster says that node {node} is gone or out of service."),
        Some(Danger::NotReady) => format!(
            "the Node object of {node} is there, and not Ready: make sure that the machine is off, or its pods will \
             share addresses with others."
        ),
        Some(Danger::Ready) => format!(
            "node {node} is Ready: its pods that have addresses of the block will share them with others."
        ),
    };
    format!("take {block} from node {node}? {state}")
}

/// The block, and the Node object of the name of its node.
fn read(
    kubectl: &Kubectl,
    name: &str,
) -> anyhow::Result<Option<(BlockObject, Option<NodeObject>)>> {
    let Some(block) = kubectl.get::<BlockObject>(BLOCKS, name)? else {
        return Ok(None);
    };
    let node = kubectl.get(NODES, &block.spec.node)?;
    Ok(Some((block, node)))
}

/// `None` when the object was changed since it was read.
fn take(
    kubectl: &Kubectl,
    block: &BlockObject,
    over: &Over,
) -> anyhow::Result<Option<BlockObject>> {
    let metadata = &block.metadata;
    let patch = json!({
        "metadata": {"uid": metadata.uid, "resourceVersion": metadata.resource_version},
        "spec": {"over": over},
    });
    kubectl.patch(BLOCKS, &metadata.name, &patch)
}
