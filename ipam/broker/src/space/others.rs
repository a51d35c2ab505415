//! Getting a block that another node has: its node is gone and the block has rested, or its node gives
//! it back when asked.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ipam::block::{Blocks, MIN_BLOCKS};
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use node::random::random64;
use node_wire::{Failure, FailureKind};
use serde_json::json;
use tokio::time::Instant;

use super::claim::{Attempt, MOST_DRAWN};
use super::{Own, Worker};
use crate::api::document::{BlockObject, Metadata, NODE_LABEL, NodeId, RangeSpec, label_hash};
use crate::api::{ApiError, Changed};
use crate::decide::choice;
use crate::decide::standing::{Claim, NodeState};
use ipam::range::Range;

/// How many other nodes are asked for a block at one time.
const MOST_ASKED: usize = 4;
/// When it is tried whether one of them gave it back, in tenths of the time that they have.
const ASK_TENTHS: [u32; 4] = [1, 2, 2, 5];
/// How long a list of nodes is good for.
const NODES_AGE: Duration = Duration::from_secs(30);

/// What became of a search among the blocks of other nodes.
#[derive(Debug, Default)]
struct SearchOfOthers {
    /// When the first block of a node that is gone has rested.
    rests: Option<Timestamp>,
    /// Blocks found to be of nodes that are gone.
    marked: usize,
    /// Blocks that other nodes were asked for.
    asked: Vec<IpNetwork>,
    asked_nodes: BTreeSet<String>,
}

impl Worker {
    /// A block of a node that is gone, or that its node gives back when asked.
    pub(super) async fn claim_of_others(
        &mut self,
        range: &Range,
        grid: &RangeSpec,
        blocks: &Blocks,
        deadline: Instant,
    ) -> Result<IpNetwork, Failure> {
        let others = self.blocks_of_others(range, grid).await?;
        let mut search = SearchOfOthers::default();
        if let Some(block) = self.take_over_rested(&others, &mut search).await? {
            return Ok(block);
        }
        self.ask_nodes(&others, deadline, &mut search).await?;
        if !search.asked.is_empty() {
            let others = Some((range, blocks));
            let returned = self.await_return(&search.asked, others, deadline).await?;
            if let Some(block) = returned {
                return Ok(block);
            }
        }
        let why = self.explain(range, grid, blocks, &others, &search);
        Err(Failure::new(FailureKind::Exhausted, why))
    }

    /// The blocks of a range that other nodes have. What is not well named is not believed.
    async fn blocks_of_others(
        &self,
        range: &Range,
        grid: &RangeSpec,
    ) -> Result<Vec<BlockObject>, ApiError> {
        let mut others: Vec<BlockObject> = Vec::new();
        let each = |object: BlockObject| {
            let block = object.spec.block;
            let is_divided_so = object.spec.per_node == range.per_node();
            let is_block = object.is_well_named() && is_divided_so && !grid.contradicts(block);
            if is_block && !self.blocks.own.contains_key(&block) && self.room(range, block) > 0 {
                others.push(object);
            }
        };
        self.shared
            .client
            .blocks_of_space(&self.space, each)
            .await?;
        Ok(others)
    }

    /// A block whose node is gone and that has rested: of those the one that rested longest.
    async fn take_over_rested(
        &mut self,
        others: &[BlockObject],
        search: &mut SearchOfOthers,
    ) -> Result<Option<IpNetwork>, Failure> {
        let over = others
            .iter()
            .filter_map(|one| Some((one.spec.over.as_ref()?.since, one)));
        let mut over: Vec<(Timestamp, &BlockObject)> = over.collect();
        over.sort_by_key(|(since, _)| *since);
        for (_, object) in over.into_iter().take(MOST_DRAWN) {
            let claim = self.judge(object).await?;
            match claim {
                Claim::Take => {
                    if let Attempt::Got = self.take_over(object).await? {
                        return Ok(Some(object.spec.block));
                    }
                }
                Claim::Rests(until) => {
                    search.rests = Some(search.rests.map_or(until, |first| first.min(until)));
                }
                Claim::Unmark => self.shared.unmark(&object.metadata).await?,
                Claim::Held | Claim::Mark(_) => {}
            }
        }
        Ok(None)
    }

    /// Marks blocks of nodes that are gone, and asks some of the other nodes for one of theirs.
    async fn ask_nodes(
        &self,
        others: &[BlockObject],
        deadline: Instant,
        search: &mut SearchOfOthers,
    ) -> Result<(), ApiError> {
        let nodes = self.nodes().await?;
        let mut states: BTreeMap<String, NodeState> = BTreeMap::new();
        let held = others.iter().filter(|one| one.spec.over.is_none());
        let mut held: Vec<&BlockObject> = held.collect();
        // Nodes that seem gone first, and then those that have least in a block; of equals any.
        held.sort_by_cached_key(|one| {
            let used = one.status.map_or(0, |status| status.used);
            (nodes.contains(&one.node()), used, random64())
        });
        for one in held {
            let node = one.node();
            let seems_gone = !nodes.contains(&node);
            let enough = search.asked_nodes.len() >= MOST_ASKED || deadline <= Instant::now();
            let is_asked = search.asked_nodes.contains(&node.name);
            // What a question costs does not grow with the nodes: the next one asks others.
            let is_further = states.len() >= MOST_DRAWN && !states.contains_key(&node.name);
            let is_done = enough || is_further || search.marked >= MOST_DRAWN;
            if is_done || (!seems_gone && is_asked) {
                continue;
            }
            let state = self.shared.node_state_once(&node.name, &mut states);
            let state = state.await?;
            match self.shared.judge(one, &node, &state) {
                Claim::Mark(why) => {
                    self.shared.mark_over(one, &why).await?;
                    search.marked += 1;
                }
                // A node keeps its network.
                Claim::Held if one.spec.per_node.is_some() => {}
                Claim::Held => {
                    self.want(one).await?;
                    search.asked.push(one.spec.block);
                    search.asked_nodes.insert(node.name);
                }
                Claim::Rests(_) | Claim::Take | Claim::Unmark => {}
            }
        }
        Ok(())
    }

    /// Why no block could be had, for people.
    fn explain(
        &self,
        range: &Range,
        grid: &RangeSpec,
        blocks: &Blocks,
        others: &[BlockObject],
        search: &SearchOfOthers,
    ) -> String {
        let own = self
            .blocks
            .own
            .keys()
            .filter(|block| range.size_within(**block) > 0);
        let nodes: BTreeSet<&str> = others.iter().map(|one| one.spec.node.as_str()).collect();
        let mut why = format!(
            "none of the {} blocks of the range is free: this node has {}, {} other nodes have {}",
            blocks.count(),
            own.count(),
            nodes.len(),
            others.len(),
        );
        let is_of_blocks = grid.per_node.is_none() && !grid.is_of_single_addresses();
        if blocks.count() < MIN_BLOCKS && is_of_blocks {
            why += &format!(
                ", each with the addresses of a /{}, as AddressRange {} was cut when it was longer or for another \
                 network: to cut it anew, end the pods of {}, and delete its AddressBlocks and AddressRange",
                grid.block_prefix,
                self.space.block_name(grid.range),
                grid.range
            );
        }
        why += &self.explain_before(range);
        if let Some(until) = search.rests {
            why += &format!(", the first one of a node that is gone rests until {until}");
        } else if search.marked > 0 {
            let marked = search.marked;
            why += &format!(", {marked} of nodes that are gone rest from now on for the cool-down");
        }
        if !search.asked_nodes.is_empty() {
            let names: Vec<&str> = search.asked_nodes.iter().map(String::as_str).collect();
            why += &format!("; no block came back yet from {}", names.join(", "));
        }
        why
    }

    /// The block of one address that is another node's.
    pub(super) async fn claim_of_other(
        &mut self,
        address: IpAddr,
        block: IpNetwork,
        single: bool,
        deadline: Instant,
    ) -> Result<IpNetwork, Failure> {
        let name = self.space.block_name(block);
        let unsettled = |why: &str| {
            let why = format!("AddressBlock {name} {why}");
            Failure::new(FailureKind::ClusterUnavailable, why)
        };
        let object = self.shared.client.block(&name).await?;
        let object = object.ok_or_else(|| unsettled("comes and goes"))?;
        let node = &object.spec.node;
        let mut rests = String::new();
        match self.judge(&object).await? {
            Claim::Take => {
                return match self.take_over(&object).await? {
                    Attempt::Got => Ok(block),
                    // Another node takes it, or a sweep removes it: whose it is now is not known.
                    Attempt::Taken => Err(unsettled(&format!(
                        "of node {node} was changed by another node at the same time"
                    ))),
                };
            }
            Claim::Mark(why) => {
                self.shared.mark_over(&object, &why).await?;
                rests = format!("; {why}, so it can be had after the cool-down");
            }
            Claim::Rests(until) => {
                rests = format!("; that node is gone, and it rests until {until}")
            }
            // Of a pod that came to this node and takes its address along.
            Claim::Held if single => {
                self.want(&object).await?;
                if self.await_return(&[block], None, deadline).await?.is_some() {
                    return Ok(block);
                }
                rests = "; it gives it back once the address is free and cooled down".to_owned();
            }
            Claim::Unmark => self.shared.unmark(&object.metadata).await?,
            Claim::Held => {}
        }
        let why =
            format!("{address} is in block {block} of node {node} (AddressBlock {name}){rests}");
        Err(Failure::new(FailureKind::HeldByAnotherNode, why))
    }

    /// Notes in another node's block that this node asks for it.
    async fn want(&self, block: &BlockObject) -> Result<(), ApiError> {
        let spec = json!({"wantedBy": self.shared.name});
        let client = &self.shared.client;
        let wanted = client.change::<BlockObject>(&block.metadata, spec).await;
        wanted.map(drop)
    }

    /// What may be done with another node's block, asked of the cluster now.
    async fn judge(&self, block: &BlockObject) -> Result<Claim, ApiError> {
        let state = self.shared.node_state(&block.spec.node).await?;
        Ok(self.shared.judge(block, &block.node(), &state))
    }

    /// Takes a block whose node is gone and that has rested.
    async fn take_over(&mut self, object: &BlockObject) -> Result<Attempt, Failure> {
        let me = self.shared.me().await?;
        let block = object.spec.block;
        let spec = json!({
            "node": me.name,
            "nodeUID": me.uid,
            "epoch": object.spec.epoch.saturating_add(1),
            "since": Timestamp::now(),
            "over": null,
            "wantedBy": null,
        });
        let metadata = Metadata {
            labels: [(NODE_LABEL.to_owned(), label_hash(&me.name))].into(),
            ..object.metadata.clone()
        };
        let client = &self.shared.client;
        match client.change(&metadata, spec).await {
            Ok(Changed::Done(taken)) => {
                tracing::info!(
                    space = %self.space, %block, node = object.spec.node,
                    "took over a block of a node that is gone"
                );
                self.accept(taken)
            }
            Ok(Changed::Conflict | Changed::Gone) => Ok(Attempt::Taken),
            Err(error) => {
                if error.is_uncertain() {
                    self.blocks.own.insert(block, Own::in_doubt(object.clone()));
                }
                Err(error.into())
            }
        }
    }

    /// Waits until one of the blocks was given back, or another one of a range. Not while other
    /// questions wait: they may be of ranges with room. The mark stays, and the runtime asks again.
    async fn await_return(
        &mut self,
        asked: &[IpNetwork],
        others: Option<(&Range, &Blocks)>,
        deadline: Instant,
    ) -> Result<Option<IpNetwork>, Failure> {
        for tenths in ASK_TENTHS {
            let at = Instant::now() + self.shared.timing.ask * tenths / 10;
            if at > deadline || !self.asked.is_empty() {
                break;
            }
            tokio::time::sleep_until(at).await;
            let block = match others {
                None => asked.first().copied(),
                Some((range, blocks)) => {
                    let names = self.shared.client.block_names(&self.space).await;
                    let names = names?;
                    let taken = |block: IpNetwork| {
                        self.blocks.own.contains_key(&block)
                            || self.room(range, block) == 0
                            || names.contains(&self.space.block_name(block))
                    };
                    let free = asked.iter().copied().find(|block| !taken(*block));
                    free.or_else(|| choice::draw(blocks, taken, random64))
                }
            };
            if let Some(block) = block
                && let Attempt::Got = self.attempt(block).await?
            {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// The nodes of the cluster, some seconds old.
    async fn nodes(&self) -> Result<Rc<BTreeSet<NodeId>>, ApiError> {
        if let Some((at, nodes)) = &*self.shared.nodes.borrow()
            && at.elapsed() < NODES_AGE
        {
            return Ok(nodes.clone());
        }
        let mut nodes = BTreeSet::new();
        let listed = self.shared.client.node_names(|node| {
            nodes.insert(node.id());
        });
        listed.await?;
        let nodes = Rc::new(nodes);
        *self.shared.nodes.borrow_mut() = Some((Instant::now(), nodes.clone()));
        Ok(nodes)
    }
}
