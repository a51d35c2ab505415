//! `rdmactl blocks release`: takes a block of addresses from its node. The API is asked by `kubectl`,
//! with its kubeconfig and its user's rights. It changes one object, once.

mod decide;

use anyhow::bail;
use clap::{Args, Subcommand};
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use rdma_ipam_broker::api::document::{BlockObject, NodeObject, Over};
use serde_json::json;

use crate::global::{Global, Kubectl};
use crate::kubectl::{BLOCKS, NODES};
use crate::output::{Ended, Exit, complain, confirmed};
use decide::Danger;

/// Releases blocks of addresses in the cluster. "kubectl get addressblocks" lists them.
#[derive(Debug, Args)]
pub(crate) struct Blocks {
    #[command(flatten)]
    kubectl: Kubectl,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Release a block of a node that is gone for good
    Release(Release),
}

#[derive(Debug, Args)]
struct Release {
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

impl Blocks {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let Command::Release(release) = &self.command;
        release.run(&self.kubectl, global)
    }
}

impl Release {
    fn run(&self, kubectl: &Kubectl, global: &Global) -> Ended {
        if self.block.ip() != self.block.network() {
            bail!(
                "{} is not a block: the one of this length around it is {}/{}",
                self.block,
                self.block.network(),
                self.block.prefix()
            );
        }
        let name = self.network_name.as_deref().filter(|name| !name.is_empty());
        let name = AddressSpace::new(&self.store, name).block_name(self.block);
        let Some((mut block, release)) = read(kubectl, &name)? else {
            complain(&format!(
                "no AddressBlock {name} in namespace {}; \"kubectl get addressblocks -A\" lists all",
                kubectl.namespace()
            ));
            return Ok(Exit::Found);
        };
        let (mut over, danger) = match release {
            decide::Release::Refused(why) => bail!("{why}"),
            decide::Release::Taken => return Ok(done(&block, global)),
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
        let changed = format!(
            "AddressBlock {name} or its node changed meanwhile; nothing was released, try again"
        );
        if !self.yes {
            if !confirmed(false, &question(self.block, &owner, danger))? {
                return Ok(Exit::Found);
            }
            // A person takes time, in which the node can come back.
            match read(kubectl, &name)? {
                Some((
                    now,
                    decide::Release::Take {
                        over: of_now,
                        danger: then,
                    },
                )) if now.spec == block.spec && then == danger => {
                    (block, over) = (now, of_now);
                }
                _ => bail!(changed),
            }
        }
        match take(kubectl, &block, &over)? {
            Some(taken) => Ok(done(&taken, global)),
            None => bail!(changed),
        }
    }
}

fn done(block: &BlockObject, global: &Global) -> Exit {
    let spec = &block.spec;
    global.say(json!({"released": spec}), || {
        let node = printable(&spec.node);
        format!(
            "released {} from node {node}; another node can claim it after the cooldown (at least 5 min)\n",
            spec.block
        )
    });
    Exit::Good
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

/// The block, and whether it can be released, by the Node object of its node's name.
fn read(kubectl: &Kubectl, name: &str) -> anyhow::Result<Option<(BlockObject, decide::Release)>> {
    let Some(block) = kubectl.get::<BlockObject>(BLOCKS, name)? else {
        return Ok(None);
    };
    let node: Option<NodeObject> = kubectl.get(NODES, &block.spec.node)?;
    let release = decide::release(&block, node.as_ref(), Timestamp::now());
    Ok(Some((block, release)))
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
