//! `rdma-ipam-broker release`: take a block from its node.

use anyhow::{Context as _, bail};
use clap::Args;
use cni_wire::text::printable;
use ipam::block::AddressSpace;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use node::table::table;
use serde_json::json;

use super::{Outcome, blocks, complain, say, say_json};
use crate::api::document::Over;
use crate::api::{BlockObject, Changed, Client, NodeObject};
use crate::cli::Global;
use crate::decide::release::{self, Danger};

/// How often it is decided anew because the object was changed meanwhile.
const MOST_ATTEMPTS: usize = 5;

#[derive(Debug, Args)]
pub(crate) struct Release {
    /// The block, as 10.0.0.16/28. It rests for the cool-down; then other nodes may have it
    #[arg(long, value_name = "CIDR")]
    block: IpNetwork,
    /// Its store
    #[arg(long, value_name = "NAME", default_value = "default")]
    store: String,
    /// Its network name; none if left out
    #[arg(long, value_name = "NAME")]
    network_name: Option<String>,
    /// Also if its node is there and Ready
    #[arg(long)]
    force: bool,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Release {
    pub(super) async fn run(self, global: &Global) -> anyhow::Result<Outcome> {
        if self.block.ip() != self.block.network() {
            bail!(
                "{} is no block: the one of this length around it is {}/{}",
                self.block,
                self.block.network(),
                self.block.prefix()
            );
        }
        let name = self.network_name.as_deref().filter(|name| !name.is_empty());
        let space = AddressSpace::new(&self.store, name);
        let client = global.client()?;
        let name = space.block_name(self.block);
        let mut confirmed = self.yes;
        for _ in 0..MOST_ATTEMPTS {
            let Some((block, node)) = read(&client, &name).await? else {
                complain(&format!(
                    "no AddressBlock {name} in namespace {}; rdma-ipam-broker blocks --all-nodes lists all",
                    client.namespace()
                ));
                return Ok(Outcome::Found);
            };
            let (over, danger) = match release::release(&block, node.as_ref(), Timestamp::now()) {
                release::Release::Refused(why) => bail!("{why}"),
                release::Release::Taken(_) => {
                    self.done(&block);
                    return Ok(Outcome::Done);
                }
                release::Release::Take { over, danger } => (over, danger),
            };
            let owner = block.spec.node.clone().unwrap_or_default();
            if danger == Some(Danger::Ready) && !self.force {
                bail!(
                    "node {owner} is there and Ready, and its pods may use addresses of {}: other nodes would give \
                     them, too. Drain the node, whose broker then gives the block back to whoever needs it; or \
                     delete its Node object; or say --force",
                    self.block
                );
            }
            if !confirmed {
                self.show(&block);
                let question = printable(&question(self.block, &owner, danger));
                if !node::terminal::confirm("rdma-ipam-broker", &question)? {
                    return Ok(Outcome::Found);
                }
                confirmed = true;
            }
            if let Some(taken) = take(&client, &block, &over).await? {
                self.done(&taken);
                return Ok(Outcome::Done);
            }
        }
        bail!("AddressBlock {name} is changed all the time; try again")
    }

    /// What is about to be taken; standard output is for the document alone.
    fn show(&self, block: &BlockObject) {
        if !self.json {
            let row = blocks::row(block, Timestamp::now());
            say(&table(&blocks::HEADER, &[row]));
        }
    }

    fn done(&self, block: &BlockObject) {
        if self.json {
            say_json(json!({"released": blocks::as_json(block)}));
            return;
        }
        let since = block.spec.over.as_ref().map(|over| over.since.to_string());
        say(&format!(
            "{} is taken from node {}. It rests since {}; after the cool-down of the nodes' policy, and five minutes at \
             least, another node may have it.\n",
            block.spec.block,
            printable(block.spec.node.as_deref().unwrap_or_default()),
            since.unwrap_or_default(),
        ));
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
async fn read(
    client: &Client,
    name: &str,
) -> anyhow::Result<Option<(BlockObject, Option<NodeObject>)>> {
    let Some(block) = client.block(name).await? else {
        return Ok(None);
    };
    let node = match &block.spec.node {
        Some(node) => client.node(node).await?,
        None => None,
    };
    Ok(Some((block, node)))
}

/// `None` when the object was changed since it was read.
async fn take(
    client: &Client,
    block: &BlockObject,
    over: &Over,
) -> anyhow::Result<Option<BlockObject>> {
    let changed = client
        .change_block(&block.metadata, json!({}), json!({"over": over}))
        .await
        .context("whether the block is taken is not known; try again")?;
    match changed {
        Changed::Done(taken) => Ok(Some(taken)),
        Changed::Conflict | Changed::Gone => Ok(None),
    }
}
