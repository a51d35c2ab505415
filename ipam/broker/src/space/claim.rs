//! Getting a block: a free one; else one of a node that is gone; else one that another node gives back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ipam::block::{Blocks, cell_of};
use ipam::grants::{Grant, MAX_BLOCKS};
use ipam::range::{Span, bits};
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use node::random::random64;
use node_wire::{Answer, BlockNeed, BlocksGranted, Failure, FailureKind};
use serde_json::json;
use tokio::time::Instant;

use super::{Asked, Doubt, MOST_READ, Own, Worker, failure};
use crate::api::document::{BlockObject, Metadata, NODE_LABEL, NodeId, label_hash};
use crate::api::{ApiError, Changed, Created};
use crate::decide::choice;
use crate::decide::split::{CellStep, SplitCells};
use crate::decide::standing::{self, Claim, NodeState};

/// After so many names that are taken the broker asks which are.
const MOST_BLIND: usize = 3;
/// Names drawn from those that were free, which others may take meanwhile.
const MOST_DRAWN: usize = 16;
/// How many blocks one group of questions may bring.
const MOST_BLOCKS: usize = 64;
/// How many other nodes are asked for a block at one time.
const MOST_ASKED: usize = 4;
/// When it is tried whether one of them gave it back, in tenths of the time that they have.
const ASK_TENTHS: [u32; 4] = [1, 2, 2, 5];
/// How long a list of nodes is good for.
const NODES_AGE: Duration = Duration::from_secs(30);
/// What a range is, as a question says it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RangeKey {
    pub(super) v4: bool,
    pub(super) spans: Vec<Span>,
}

/// Addresses of blocks that were granted for others, and that nobody was told of.
#[derive(Debug)]
pub(super) struct Leftover {
    range: RangeKey,
    granted: Instant,
    left: u128,
    blocks: Vec<IpNetwork>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    Free,
    /// Also what others have and do not need.
    Full,
}

#[derive(Debug)]
enum Attempt {
    Got,
    Taken,
}

/// What is kept of another node's block while one is searched.
#[derive(Debug)]
struct Seen {
    object: BlockObject,
    node: NodeId,
    used: u64,
}

impl RangeKey {
    fn of(need: &BlockNeed) -> Result<Self, Failure> {
        let wrong = |why: &str| {
            let why = format!("block is malformed: spans of range {}: {why}", need.range);
            Failure::new(FailureKind::Malformed, why)
        };
        let v4 = match need.spans.first() {
            Some((first, _)) => first.is_ipv4(),
            None => return Err(wrong("there is none")),
        };
        let mut spans: Vec<Span> = Vec::new();
        for (first, last) in &need.spans {
            if first.is_ipv4() != v4 || last.is_ipv4() != v4 {
                return Err(wrong("two address families"));
            }
            let (first, last) = (bits(*first), bits(*last));
            if first > last || spans.last().is_some_and(|before| before.last >= first) {
                return Err(wrong("they do not ascend"));
            }
            spans.push(Span { first, last });
        }
        Ok(Self { v4, spans })
    }

    /// How many addresses of the range a network has.
    pub(super) fn within(&self, network: IpNetwork) -> u128 {
        if network.is_ipv4() != self.v4 {
            return 0;
        }
        let network = Span::of(network);
        let spans = self.spans.iter();
        spans
            .filter_map(|span| span.intersection(network))
            .map(Span::size)
            .fold(0, u128::saturating_add)
    }

    pub(super) fn has(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.v4 && {
            let address = bits(address);
            self.spans.iter().any(|span| span.contains(address))
        }
    }
}

impl Worker {
    /// Whether there is a question that can be served now.
    pub(super) fn next_group_is_due(&self) -> bool {
        self.listed && !self.asked.is_empty()
    }

    /// Answers questions that waited too long for the API.
    pub(super) fn expire(&mut self) {
        let (late, rest): (VecDeque<Asked>, VecDeque<Asked>) = std::mem::take(&mut self.asked)
            .into_iter()
            .partition(|asked| asked.at.elapsed() >= self.shared.timing.question);
        self.asked = rest;
        for asked in late {
            let why = format!(
                "which blocks of {} this node has was not read from the Kubernetes API yet; see the log of \
                 rdma-ipam-broker on this node",
                self.space
            );
            let _ = asked
                .reply
                .send(Err(Failure::new(FailureKind::ClusterUnavailable, why)));
        }
    }

    /// Serves the first question, and with it all others for the same range.
    pub(super) async fn serve_group(&mut self) {
        let Some(first) = self.asked.pop_front() else {
            return;
        };
        let started = Instant::now();
        let range = match RangeKey::of(&first.need) {
            Ok(range) => range,
            Err(failure) => return drop(first.reply.send(Err(failure))),
        };
        let deadline = first.at + self.shared.timing.question;
        if let Some(address) = first.need.address {
            let single = first.need.single;
            let result = self.claim_address(&range, address, single, deadline).await;
            self.shared
                .metrics
                .borrow_mut()
                .claim(&result, started.elapsed());
            let answer = result.map(|block| granted(&[block]));
            return drop(first.reply.send(answer));
        }
        let mut group = vec![first];
        for asked in std::mem::take(&mut self.asked) {
            let alike = asked.need.address.is_none()
                && RangeKey::of(&asked.need).is_ok_and(|other| other == range);
            match alike {
                true => group.push(asked),
                false => self.asked.push_back(asked),
            }
        }
        // Who gave up waiting asks again.
        group.retain(|asked| !asked.reply.is_closed());
        let group = self.serve_leftover(&range, group);
        if group.is_empty() {
            return;
        }
        let wanted: u128 = group.iter().map(count).sum();
        let (blocks, result) = self.claim_addresses(&range, wanted, deadline).await;
        let mut left: u128 = blocks.iter().map(|block| self.room(&range, *block)).sum();
        for asked in group {
            let answer = match &result {
                Err(failure) if left < count(&asked) => Err(failure.clone()),
                _ => Ok(granted(&blocks)),
            };
            if answer.is_ok() {
                left = left.saturating_sub(count(&asked));
            }
            let _ = asked.reply.send(answer);
        }
        self.shared
            .metrics
            .borrow_mut()
            .claim(&result, started.elapsed());
        self.leftover = Some(Leftover {
            range,
            granted: Instant::now(),
            left,
            blocks,
        });
    }

    /// Answers those that asked before a block came that has room for them, too.
    fn serve_leftover(&mut self, range: &RangeKey, group: Vec<Asked>) -> Vec<Asked> {
        let Some(leftover) = self.leftover.as_mut().filter(|one| one.range == *range) else {
            return group;
        };
        let mut rest = Vec::new();
        for asked in group {
            if asked.at < leftover.granted && count(&asked) <= leftover.left {
                leftover.left -= count(&asked);
                let _ = asked.reply.send(Ok(granted(&leftover.blocks)));
            } else {
                rest.push(asked);
            }
        }
        rest
    }

    /// Blocks with at least so many addresses of a range, as far as they can be had.
    async fn claim_addresses(
        &mut self,
        range: &RangeKey,
        wanted: u128,
        deadline: Instant,
    ) -> (Vec<IpNetwork>, Result<(), Failure>) {
        let mut blocks: Vec<IpNetwork> = Vec::new();
        let mut got = 0u128;
        while got < wanted && blocks.len() < MOST_BLOCKS {
            match self.claim(range, Effort::Full, deadline).await {
                Ok(Some(block)) => {
                    got = got.saturating_add(self.room(range, block));
                    blocks.push(block);
                }
                Ok(None) => {
                    let why = "no block is free".to_owned();
                    return (blocks, Err(Failure::new(FailureKind::Exhausted, why)));
                }
                Err(failure) => return (blocks, Err(failure)),
            }
        }
        (blocks, Ok(()))
    }

    /// One block of a range. `None` with [`Effort::Free`], if none is free.
    pub(super) async fn claim(
        &mut self,
        range: &RangeKey,
        effort: Effort,
        deadline: Instant,
    ) -> Result<Option<IpNetwork>, Failure> {
        self.settle_before(range).await?;
        self.agree().await?;
        self.grant_claimed_before()?;
        let blocks = self.blocks_of(range);
        if let Some((at, failure)) = self.ranges.exhausted(range)
            && at.elapsed() < self.shared.timing.ask / 2
        {
            return Err(failure.clone());
        }
        let mut taken = BTreeSet::new();
        let first: Vec<IpNetwork> = choice::from_own_place(&blocks, &self.shared.name)
            .filter(|block| !self.is_own(*block) && self.room(range, *block) > 0)
            .take(MOST_BLIND)
            .collect();
        for block in first {
            match self.attempt(block).await? {
                Attempt::Got => return Ok(Some(block)),
                Attempt::Taken => drop(taken.insert(block)),
            }
        }
        let client = self.shared.client.clone();
        let names = client
            .block_names(&self.space)
            .await
            .map_err(|e| failure(&e))?;
        for _ in 0..MOST_DRAWN {
            let is_taken = |block| {
                taken.contains(&block)
                    || self.is_own(block)
                    || self.room(range, block) == 0
                    || names.contains(&self.space.block_name(block))
            };
            let Some(block) = choice::draw(&blocks, is_taken, random64) else {
                break;
            };
            match self.attempt(block).await? {
                Attempt::Got => return Ok(Some(block)),
                Attempt::Taken => drop(taken.insert(block)),
            }
        }
        if effort == Effort::Free {
            return Ok(None);
        }
        let got = self.claim_of_others(range, &blocks, deadline).await;
        if let Err(failure) = &got
            && failure.kind == FailureKind::Exhausted
        {
            self.ranges.note_exhausted(range, failure.clone());
        }
        got.map(Some)
    }

    /// The block that has one address.
    pub(super) async fn claim_address(
        &mut self,
        range: &RangeKey,
        address: IpAddr,
        single: bool,
        deadline: Instant,
    ) -> Result<IpNetwork, Failure> {
        self.settle_before(range).await?;
        self.check_before(address)?;
        self.agree().await?;
        self.grant_claimed_before()?;
        let block = match single {
            true => Some(ipam::block::single(address)),
            false => self.blocks_of(range).around(address),
        };
        let Some(block) = block else {
            let why = format!("block is malformed: {address} is not in the range's spans");
            return Err(Failure::new(FailureKind::Malformed, why));
        };
        // It came while the question was on its way.
        if self.is_own(block) {
            self.settle().await.map_err(|error| {
                Failure::new(FailureKind::ClusterUnavailable, error.to_string())
            })?;
            if self.grants.has(address) {
                return Ok(block);
            }
            if self.is_own(block) {
                let why = format!(
                    "whether this node has AddressBlock {} is not known yet: a request for it had no answer",
                    self.space.block_name(block)
                );
                return Err(Failure::new(FailureKind::ClusterUnavailable, why));
            }
        }
        if let Attempt::Got = self.attempt(block).await? {
            return Ok(block);
        }
        let mut name = self.space.block_name(block);
        let client = self.shared.client.clone();
        let mut object = client.block(&name).await.map_err(|e| failure(&e))?;
        if object.is_none()
            && let Some(cell) = cell_of(address, self.length)
        {
            name = self.space.block_name(cell);
            object = client.block(&name).await.map_err(|e| failure(&e))?;
        }
        let Some(object) = object else {
            let why = format!("AddressBlock {name} comes and goes");
            return Err(Failure::new(FailureKind::ClusterUnavailable, why));
        };
        let network = object.spec.block;
        let Some(node) = object.node() else {
            if !single {
                return Box::pin(self.claim_address(range, address, true, deadline)).await;
            }
            let why = format!("AddressBlock {name} is split and opened at one time");
            return Err(Failure::new(FailureKind::ClusterUnavailable, why));
        };
        let seen = Seen {
            used: 0,
            node,
            object,
        };
        let mut rests = String::new();
        match self.judge(&seen).await.map_err(|e| failure(&e))? {
            Claim::Take => {
                if let Attempt::Got = self.take_over(&seen, deadline).await? {
                    return Ok(network);
                }
                // Another node takes it, or a sweep removes it: whose it is now is not known.
                let why = format!(
                    "AddressBlock {name} of node {} was changed by another node at the same time",
                    seen.node.name
                );
                return Err(Failure::new(FailureKind::ClusterUnavailable, why));
            }
            Claim::Mark(why) => {
                let marked = self.shared.mark_over(&seen.object, &why).await;
                marked.map_err(|e| failure(&e))?;
                rests = format!("; {why}, so it can be had after the cool-down");
            }
            Claim::Rests(until) => {
                rests = format!("; that node is gone, and it rests until {until}")
            }
            // Of a pod that came to this node and takes its address along.
            Claim::Held if single && network == block => {
                let spec = json!({"wantedBy": self.shared.name});
                let asked = client.change_block(&seen.object.metadata, json!({}), spec);
                asked.await.map_err(|e| failure(&e))?;
                if self.await_this(block, deadline).await? {
                    return Ok(block);
                }
                rests = "; it gives it back once the address is free and cooled down".to_owned();
            }
            Claim::Unmark => {
                let metadata = &seen.object.metadata;
                let unmarked = self.shared.unmark(metadata).await;
                unmarked.map_err(|e| failure(&e))?;
            }
            Claim::Held => {}
        }
        let why = format!(
            "{address} is in block {network} of node {} (AddressBlock {name}){rests}",
            seen.node.name
        );
        Err(Failure::new(FailureKind::HeldByAnotherNode, why))
    }

    /// The blocks that a range can have.
    pub(super) fn blocks_of(&self, range: &RangeKey) -> Blocks {
        Blocks::of_spans(range.v4, &range.spans, self.length, &self.static_networks)
    }

    pub(super) fn is_cell(&self, block: IpNetwork) -> bool {
        cell_of(block.network(), self.length) == Some(block)
    }

    /// Whether a block is one of those that the space is cut into: a cell, or a single address.
    pub(super) fn is_of_grid(&self, block: IpNetwork) -> bool {
        self.is_cell(block) || block == ipam::block::single(block.network())
    }

    fn is_own(&self, block: IpNetwork) -> bool {
        let cell = cell_of(block.network(), self.length);
        self.own.contains_key(&block) || cell.is_some_and(|cell| self.own.contains_key(&cell))
    }

    /// Makes a block's object, below a cell that is split where it is a single address.
    async fn attempt(&mut self, block: IpNetwork) -> Result<Attempt, Failure> {
        if self.own.len() >= MAX_BLOCKS {
            let why = format!(
                "this node has {MAX_BLOCKS} blocks of {}, and may have no more",
                self.space
            );
            return Err(Failure::new(FailureKind::Exhausted, why));
        }
        if !self.is_cell(block) && !self.split_cell(block).await? {
            return Ok(Attempt::Taken);
        }
        let me = self.shared.me().await?;
        let object = BlockObject::new(&self.space, block, &me, 1, Timestamp::now());
        self.create(object).await
    }

    async fn create(&mut self, object: BlockObject) -> Result<Attempt, Failure> {
        let block = object.spec.block;
        match self.shared.client.create_block(&object).await {
            Ok(Created::New(made)) => self.accept(made).await,
            Ok(Created::Taken) => Ok(Attempt::Taken),
            Err(error) => {
                if error.is_uncertain() && !self.own.contains_key(&block) {
                    let doubt = Some(Doubt::Whose);
                    self.own.insert(
                        block,
                        Own {
                            doubt,
                            ..Own::new(object)
                        },
                    );
                }
                Err(failure(&error))
            }
        }
    }

    /// Takes what the API has acknowledged as this node's, and grants it. A single address whose cell is
    /// another node's block goes back.
    async fn accept(&mut self, object: BlockObject) -> Result<Attempt, Failure> {
        let block = object.spec.block;
        let own = self.own_of(object);
        self.own.insert(block, own);
        if self.confirm_cell(block).await.map_err(|e| failure(&e))? {
            self.grant_claimed(block)?;
            return Ok(Attempt::Got);
        }
        if let Err(error) = Box::pin(self.remove(block)).await {
            tracing::warn!(
                space = %self.space, %block, %error,
                "cannot remove the object of an address whose cell is a block; trying again"
            );
        }
        Ok(Attempt::Taken)
    }

    /// Claims a block anew that is granted on disk, and of which the API has no object of this node.
    pub(super) async fn claim_granted(&mut self, grant: &Grant) -> Result<(), Failure> {
        let me = self.shared.me().await?;
        self.agree().await?;
        if !self.is_of_grid(grant.block) {
            let why = "blocks of its space have another length now";
            self.lose(grant.block, why, None);
            return Ok(());
        }
        if !self.is_cell(grant.block) && !self.split_cell(grant.block).await? {
            self.lose(
                grant.block,
                "its cell is not split into single addresses",
                None,
            );
            return Ok(());
        }
        let epoch = grant.epoch.saturating_add(1);
        let object = BlockObject::new(&self.space, grant.block, &me, epoch, Timestamp::now());
        match self.create(object).await? {
            Attempt::Got => {
                tracing::warn!(
                    space = %self.space, block = %grant.block,
                    "the API had no object of a block that this node has; it was made again"
                );
            }
            Attempt::Taken => {
                let name = self.space.block_name(grant.block);
                let there = self.shared.client.block(&name).await;
                // It is gone again: the next time decides.
                if let Some(there) = there.map_err(|e| failure(&e))? {
                    self.decide(there, &me).await;
                }
            }
        }
        Ok(())
    }

    /// What an object says that was read just now of a block which is granted.
    pub(super) async fn decide(&mut self, object: BlockObject, me: &NodeId) {
        let network = object.spec.block;
        match standing::own(&object, me, &self.grants.blocks) {
            standing::Own::Grant => {
                let own = self.own_of(object.clone());
                self.own.insert(network, own);
                self.keep(object);
            }
            standing::Own::Renew => self.renew(object, me).await,
            standing::Own::Taken => self.obey(&object),
            // It was this machine's, and getting the new UID failed; or it is another machine's.
            standing::Own::Foreign if !self.is_granted(network) => {
                self.own.remove(&network);
                self.keep_or_return(object, me).await;
            }
            standing::Own::Foreign | standing::Own::Not => {
                let node = object.node().map_or_else(String::new, |node| node.name);
                let why = format!("the API has it as that of node {node:?}");
                self.lose(network, &why, Some(object.metadata.resource_version));
            }
        }
    }

    /// Grants what was claimed before, or no more is claimed: a node whose disk is full would take one
    /// block after the other, and use none.
    fn grant_claimed_before(&mut self) -> Result<(), Failure> {
        self.grant_all().map_err(|error| {
            let why = format!(
                "the node has blocks that cannot be written below {}: {error}",
                self.directory.display()
            );
            Failure::new(FailureKind::Other, why)
        })
    }

    fn grant_claimed(&mut self, block: IpNetwork) -> Result<(), Failure> {
        self.grant(block).map_err(|error| {
            let why = format!(
                "the node has block {block}, but that cannot be written below {}: {error}",
                self.directory.display()
            );
            Failure::new(FailureKind::Other, why)
        })
    }

    /// Whether the cell of a single address is split, after splitting it if no node has it. Only a
    /// first look, which spares objects of addresses that cannot be had: [`Self::confirm_cell`] decides.
    async fn split_cell(&mut self, block: IpNetwork) -> Result<bool, Failure> {
        let Some(cell) = cell_of(block.network(), self.length) else {
            return Ok(false);
        };
        if self.split.contains(&cell) {
            return Ok(true);
        }
        let object = BlockObject::split(&self.space, cell, Timestamp::now());
        let made = self.shared.client.create_block(&object).await;
        let is_split = match made.map_err(|e| failure(&e))? {
            Created::New(_) => true,
            Created::Taken => self.open_cell(cell).await.map_err(|e| failure(&e))?,
        };
        if is_split {
            self.split.insert(cell);
        }
        Ok(is_split)
    }

    /// Reads whether the cell of a single address that this node has is split and open, unless that is
    /// known. Then the address may be granted.
    pub(super) async fn confirm_cell(&mut self, block: IpNetwork) -> Result<bool, ApiError> {
        let is_doubted = |own: &Own| own.doubt == Some(Doubt::Cell);
        if !self.own.get(&block).is_some_and(is_doubted) {
            return Ok(true);
        }
        let Some(cell) = cell_of(block.network(), self.length) else {
            return Ok(false);
        };
        if !self.open_cell(cell).await? {
            self.split.remove(&cell);
            return Ok(false);
        }
        self.split.insert(cell);
        if let Some(own) = self.own.get_mut(&block).filter(|own| is_doubted(own)) {
            own.doubt = None;
        }
        Ok(true)
    }

    /// Whether a cell is split and open, after splitting it if no node has it, or opening it.
    async fn open_cell(&self, cell: IpNetwork) -> Result<bool, ApiError> {
        let client = &self.shared.client;
        let object = BlockObject::split(&self.space, cell, Timestamp::now());
        for _ in 0..MOST_READ {
            match client.block(&object.metadata.name).await? {
                None => {
                    if let Created::New(_) = client.create_block(&object).await? {
                        return Ok(true);
                    }
                }
                Some(there) if !there.spec.split => return Ok(false),
                Some(there) if there.spec.over.is_none() => return Ok(true),
                Some(closed) => {
                    let open = json!({"over": null});
                    let changed = client
                        .change_block(&closed.metadata, json!({}), open)
                        .await?;
                    if let Changed::Done(_) = changed {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    /// What may be done with another node's block, asked of the cluster now.
    async fn judge(&self, seen: &Seen) -> Result<Claim, ApiError> {
        let state = self.shared.node_state(&seen.node.name).await?;
        Ok(self.judge_by(seen, &state))
    }

    fn judge_by(&self, seen: &Seen, state: &NodeState) -> Claim {
        self.shared.judge(&seen.object, &seen.node, state)
    }

    /// Takes a block whose node is gone and that has rested.
    async fn take_over(&mut self, seen: &Seen, _deadline: Instant) -> Result<Attempt, Failure> {
        let me = self.shared.me().await?;
        let block = seen.object.spec.block;
        let spec = json!({
            "node": me.name,
            "nodeUID": me.uid,
            "epoch": seen.object.spec.epoch.saturating_add(1),
            "since": Timestamp::now(),
            "over": null,
            "wantedBy": null,
        });
        let labels = json!({NODE_LABEL: label_hash(&me.name)});
        let client = &self.shared.client;
        match client
            .change_block(&seen.object.metadata, labels, spec)
            .await
        {
            Ok(Changed::Done(taken)) => {
                tracing::info!(
                    space = %self.space, %block, node = seen.node.name,
                    "took over a block of a node that is gone"
                );
                self.accept(taken).await
            }
            Ok(Changed::Conflict | Changed::Gone) => Ok(Attempt::Taken),
            Err(error) => {
                if error.is_uncertain() {
                    let doubt = Some(Doubt::Whose);
                    let own = Own::new(seen.object.clone());
                    self.own.insert(block, Own { doubt, ..own });
                }
                Err(failure(&error))
            }
        }
    }

    /// A block of a node that is gone, or that its node gives back when asked.
    async fn claim_of_others(
        &mut self,
        range: &RangeKey,
        blocks: &Blocks,
        deadline: Instant,
    ) -> Result<IpNetwork, Failure> {
        let api = |error: ApiError| failure(&error);
        let client = self.shared.client.clone();
        let mut seen: Vec<Seen> = Vec::new();
        let mut cells = SplitCells::default();
        let mut split = 0usize;
        let own: BTreeSet<IpNetwork> = self.own.keys().copied().collect();
        let each = |object: BlockObject| {
            let network = object.spec.block;
            cells.note(&object);
            // One of the blocks, or a single address of one that is split.
            let around = blocks.around(network.network());
            let is_single = network == ipam::block::single(network.network()) && around.is_some();
            if (around != Some(network) && !is_single) || own.contains(&network) {
                return;
            }
            split += usize::from(object.spec.split);
            // What is not well named is not believed.
            let is_of_use = object.is_well_named() && self.room(range, network) > 0;
            if let Some(node) = object.node().filter(|_| is_of_use) {
                let used = object.status.map_or(0, |status| status.used);
                seen.push(Seen { object, node, used });
            }
        };
        client
            .blocks_of_space(&self.space, each)
            .await
            .map_err(api)?;
        let is_block = |cell: IpNetwork| blocks.around(cell.network()) == Some(cell);
        let empty: Vec<(&BlockObject, CellStep)> = cells
            .steps()
            .filter(|(cell, _)| is_block(cell.spec.block))
            .filter(|(cell, _)| self.room(range, cell.spec.block) > 0)
            .take(MOST_DRAWN)
            .collect();
        let mut closed = 0usize;
        for (cell, step) in empty {
            self.shared.step_cell(cell, step).await.map_err(api)?;
            if step == CellStep::Remove
                && let Attempt::Got = self.attempt(cell.spec.block).await?
            {
                return Ok(cell.spec.block);
            }
            closed += usize::from(step == CellStep::Close);
        }
        // Those that rested longest first.
        let mut over: Vec<&Seen> = seen
            .iter()
            .filter(|one| one.object.spec.over.is_some())
            .collect();
        over.sort_by_key(|one| one.object.spec.over.as_ref().map(|over| over.since));
        let mut rests: Option<Timestamp> = None;
        for one in over.into_iter().take(MOST_DRAWN) {
            match self.judge(one).await.map_err(api)? {
                Claim::Take => {
                    if let Attempt::Got = self.take_over(one, deadline).await? {
                        return Ok(one.object.spec.block);
                    }
                }
                Claim::Rests(until) => rests = Some(rests.map_or(until, |first| first.min(until))),
                Claim::Unmark => {
                    let unmarked = self.shared.unmark(&one.object.metadata).await;
                    unmarked.map_err(api)?;
                }
                _ => {}
            }
        }
        // Single addresses of cells that stay split, before other nodes are asked for theirs.
        let free: Vec<IpNetwork> = cells
            .free_singles(blocks, 1, random64)
            .filter(|single| !own.contains(single) && self.leased_before(*single).is_empty())
            .take(MOST_DRAWN)
            .collect();
        for single in free {
            if let Attempt::Got = self.attempt(single).await? {
                return Ok(single);
            }
        }
        let nodes = self.nodes().await.map_err(api)?;
        let mut states: BTreeMap<String, NodeState> = BTreeMap::new();
        let mut asked: Vec<IpNetwork> = Vec::new();
        let mut asked_nodes: BTreeSet<String> = BTreeSet::new();
        let mut marked = 0usize;
        let mut held: Vec<&Seen> = seen
            .iter()
            .filter(|one| one.object.spec.over.is_none())
            .collect();
        // Nodes that seem gone first, and then those that have least in a block; of equals any.
        held.sort_by_cached_key(|one| (nodes.contains(&one.node), one.used, random64()));
        for one in held {
            let seems_gone = !nodes.contains(&one.node);
            let enough = asked_nodes.len() >= MOST_ASKED || deadline <= Instant::now();
            let new = !asked_nodes.contains(&one.node.name);
            if enough || (!seems_gone && !new) || marked >= MOST_DRAWN {
                continue;
            }
            let state = match states.get(&one.node.name) {
                Some(state) => state.clone(),
                None => {
                    let state = self.shared.node_state(&one.node.name).await.map_err(api)?;
                    states.insert(one.node.name.clone(), state.clone());
                    state
                }
            };
            match self.judge_by(one, &state) {
                Claim::Mark(why) => {
                    let done = self.shared.mark_over(&one.object, &why).await;
                    done.map_err(api)?;
                    marked += 1;
                }
                Claim::Held => {
                    let spec = json!({"wantedBy": self.shared.name});
                    let metadata = &one.object.metadata;
                    client
                        .change_block(metadata, json!({}), spec)
                        .await
                        .map_err(api)?;
                    asked.push(one.object.spec.block);
                    asked_nodes.insert(one.node.name.clone());
                }
                _ => {}
            }
        }
        if !asked.is_empty()
            && let Some(block) = self.await_return(range, &asked, blocks, deadline).await?
        {
            return Ok(block);
        }
        let owners: BTreeSet<&str> = seen.iter().map(|one| one.node.name.as_str()).collect();
        let mut why = format!(
            "none of the {} blocks of the range is free: this node has {}, {} other nodes have {}",
            blocks.count(),
            own.iter()
                .filter(|block| blocks.around(block.network()) == Some(**block))
                .count(),
            owners.len(),
            seen.len(),
        );
        if split > 0 {
            why += &format!(", {split} are split into single addresses for smaller ranges");
        }
        if closed > 0 {
            why += &format!("; {closed} of these have no address in use and can be had next");
        }
        why += &self.explain_before(range);
        if let Some(until) = rests {
            why += &format!(", the first one of a node that is gone rests until {until}");
        } else if marked > 0 {
            why += &format!(", {marked} of nodes that are gone rest from now on for the cool-down");
        }
        if !asked_nodes.is_empty() {
            let names: Vec<&str> = asked_nodes.iter().map(String::as_str).collect();
            why += &format!("; no block came back yet from {}", names.join(", "));
        }
        Err(Failure::new(FailureKind::Exhausted, why))
    }

    /// Waits until one of the blocks, or another one, was given back. Not while other questions wait:
    /// they may be of ranges with room. The mark stays, and the runtime asks again.
    async fn await_return(
        &mut self,
        range: &RangeKey,
        asked: &[IpNetwork],
        blocks: &Blocks,
        deadline: Instant,
    ) -> Result<Option<IpNetwork>, Failure> {
        for tenths in ASK_TENTHS {
            let at = Instant::now() + self.shared.timing.ask * tenths / 10;
            if at > deadline || !self.asked.is_empty() {
                break;
            }
            tokio::time::sleep_until(at).await;
            let names = self.shared.client.block_names(&self.space).await;
            let names = names.map_err(|e| failure(&e))?;
            let taken = |block: IpNetwork| {
                self.is_own(block)
                    || self.room(range, block) == 0
                    || names.contains(&self.space.block_name(block))
            };
            let free = asked.iter().copied().find(|block| !taken(*block));
            let Some(block) = free.or_else(|| choice::draw(blocks, taken, random64)) else {
                continue;
            };
            if let Attempt::Got = self.attempt(block).await? {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Waits until one block was given back, as [`Self::await_return`].
    async fn await_this(&mut self, block: IpNetwork, deadline: Instant) -> Result<bool, Failure> {
        for tenths in ASK_TENTHS {
            let at = Instant::now() + self.shared.timing.ask * tenths / 10;
            if at > deadline || !self.asked.is_empty() {
                break;
            }
            tokio::time::sleep_until(at).await;
            if let Attempt::Got = self.attempt(block).await? {
                return Ok(true);
            }
        }
        Ok(false)
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

fn count(asked: &Asked) -> u128 {
    u128::from(asked.need.count.max(1))
}

fn granted(blocks: &[IpNetwork]) -> Answer {
    Answer::Block(BlocksGranted {
        blocks: blocks.iter().map(ToString::to_string).collect(),
    })
}

/// A precondition of a removal or change.
pub(super) fn metadata_of(object: &BlockObject) -> &Metadata {
    &object.metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(spans: &[(&str, &str)]) -> BlockNeed {
        BlockNeed {
            store: "default".into(),
            network_name: None,
            range: "10.0.0.0/24".into(),
            spans: spans
                .iter()
                .map(|(first, last)| (first.parse().unwrap(), last.parse().unwrap()))
                .collect(),
            address: None,
            single: false,
            count: 1,
        }
    }

    #[test]
    fn spans_that_make_no_sense_are_refused() {
        for spans in [
            &[][..],
            &[("10.0.0.9", "10.0.0.1")],
            &[("10.0.0.1", "10.0.0.9"), ("10.0.0.9", "10.0.0.12")],
            &[("10.0.0.1", "fd00::1")],
        ] {
            let failure = RangeKey::of(&need(spans)).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Malformed);
        }
    }

    #[test]
    fn addresses_of_a_range_in_a_block_are_counted() {
        let range = RangeKey::of(&need(&[
            ("10.0.0.1", "10.0.0.7"),
            ("10.0.0.9", "10.0.0.254"),
        ]))
        .unwrap();
        assert_eq!(range.within("10.0.0.0/28".parse().unwrap()), 14);
        assert_eq!(range.within("10.0.0.240/28".parse().unwrap()), 15);
        assert_eq!(range.within("10.0.1.0/28".parse().unwrap()), 0);
        assert_eq!(range.within("fd00::/122".parse().unwrap()), 0);
        assert!(range.has("10.0.0.7".parse().unwrap()) && !range.has("10.0.0.8".parse().unwrap()));
    }
}
