//! Getting a block: a free one; else one that another node has ([`super::others`]).

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;

use crate::grants::{Grant, MAX_BLOCKS};
use ipam::block::{Blocks, network_around, overlap};
use ipam::range::Range;

use crate::leases::SpaceLeases;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use node::random::random64;
use node_wire::{Answer, BlockNeed, BlocksGranted, Failure, FailureKind, PerNode};
use tokio::time::Instant;

use super::{Asked, Own, Worker};
use crate::api::document::{BlockObject, NodeId, RangeSpec};
use crate::api::{ApiError, RangeObject};
use crate::decide::choice;
use crate::decide::standing;

/// After so many names that are taken the broker asks which are.
const MOST_BLIND: usize = 3;
/// Names drawn from those that were free, which others may take meanwhile.
pub(super) const MOST_DRAWN: usize = 16;
/// How many blocks one group of questions may bring.
const MOST_BLOCKS: usize = 64;
/// The range of a lease that no ADD noted has so many blocks of the policy's length: 2 to this.
const UNKNOWN_RANGE_BITS: u8 = 4;

/// Addresses of blocks that were granted for others, and that nobody was told of.
#[derive(Debug)]
pub(super) struct Leftover {
    range: Range,
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
pub(super) enum Attempt {
    Got,
    Taken,
}

/// The range that a question is for.
fn range_of(need: &BlockNeed) -> Result<Range, Failure> {
    let subnet = need.range.parse().map_err(|_| "it is not a network");
    let range = subnet.and_then(|subnet| Range::of_parts(subnet, &need.spans));
    let range = range.map_err(str::to_owned);
    let range = range.and_then(|range| range.divided(need.per_node));
    range.map_err(|why| {
        let why = format!("block is malformed: range {}: {why}", need.range);
        Failure::new(FailureKind::Malformed, why)
    })
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
        // Who gave up waiting asks again.
        if first.reply.is_closed() {
            return;
        }
        let range = match range_of(&first.need) {
            Ok(range) => range,
            Err(failure) => return drop(first.reply.send(Err(failure))),
        };
        if !self.grants.are_usable() {
            // Where it fails, getting another block says why.
            drop(self.settle().await);
        }
        let deadline = first.at + self.shared.timing.question;
        if let Some(address) = first.need.address {
            let single = first.need.single;
            let result = self.claim_address(&range, address, single, deadline).await;
            self.shared.metrics.borrow_mut().claim(&result);
            let answer = result.map(|block| granted(&[block]));
            return drop(first.reply.send(answer));
        }
        let mut group = vec![first];
        for asked in std::mem::take(&mut self.asked) {
            let alike = asked.need.address.is_none()
                && range_of(&asked.need).is_ok_and(|other| other == range);
            match alike {
                true => group.push(asked),
                false => self.asked.push_back(asked),
            }
        }
        group.retain(|asked| !asked.reply.is_closed());
        self.count_regained(&range, &group);
        let group = self.serve_leftover(&range, group);
        if group.is_empty() {
            return;
        }
        let wanted: u128 = group.iter().map(count).sum();
        let (blocks, mut result) = self.claim_addresses(&range, wanted, deadline).await;
        let mut left: u128 = blocks.iter().map(|block| self.room(&range, *block)).sum();
        if let (Some(_), [network]) = (range.per_node(), blocks.as_slice()) {
            let free = self.free_in(&range, *network);
            left = free.as_ref().copied().unwrap_or(0);
            result = result.and(free.map(drop));
        }
        for asked in group {
            let answer = match &result {
                Err(failure) if left < count(&asked) => Err(failure.clone()),
                Ok(()) if range.per_node().is_some() && left < count(&asked) => {
                    let network = blocks.first().copied().unwrap_or(range.subnet());
                    Err(self.too_small(&range, network, left, count(&asked)))
                }
                _ => Ok(granted(&blocks)),
            };
            if answer.is_ok() {
                left = left.saturating_sub(count(&asked));
            }
            let _ = asked.reply.send(answer);
        }
        self.shared.metrics.borrow_mut().claim(&result);
        self.leftover = Some(Leftover {
            range,
            granted: Instant::now(),
            left,
            blocks,
        });
    }

    /// Those that asked before blocks of an earlier boot were granted anew get the room of these, not
    /// another block.
    fn count_regained(&mut self, range: &Range, group: &[Asked]) {
        let asked = group.iter().map(|asked| asked.at).min();
        let Some(regained) = self
            .regained
            .filter(|at| asked.is_some_and(|asked| asked < *at))
        else {
            return;
        };
        let leftover = self.leftover.as_ref();
        if leftover.is_some_and(|one| one.range == *range && one.granted >= regained) {
            return;
        }
        let own = self.grants.usable();
        let own = own.filter(|grant| grant.per_node == range.per_node());
        let own = own.filter(|grant| self.room(range, grant.block) > 0);
        let own = own.map(|grant| (grant.block, self.free_in(range, grant.block)));
        // Each ADD says that the store cannot be read.
        let own = own.filter_map(|(block, free)| Some((block, free.ok()?)));
        let own: Vec<(IpNetwork, u128)> = own
            .filter(|(_, free)| *free > 0)
            .take(MOST_BLOCKS)
            .collect();
        self.leftover = Some(Leftover {
            range: range.clone(),
            granted: regained,
            left: own.iter().map(|(_, free)| free).sum(),
            blocks: own.into_iter().map(|(block, _)| block).collect(),
        });
    }

    /// Answers those that asked before a block came that has room for them, too.
    fn serve_leftover(&mut self, range: &Range, group: Vec<Asked>) -> Vec<Asked> {
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
        range: &Range,
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
                    // A node has no other network of the range.
                    if range.per_node().is_some() {
                        break;
                    }
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
        range: &Range,
        effort: Effort,
        deadline: Instant,
    ) -> Result<Option<IpNetwork>, Failure> {
        self.settle_before(range).await?;
        if let Some((at, failure)) = self.ranges.refused(range)
            && at.elapsed() < self.shared.timing.ask / 2
        {
            return Err(failure.clone());
        }
        let grid = match self.grid(range).await {
            Err(failure) if failure.kind == FailureKind::Mismatch => {
                self.ranges.note_refused(range, failure.clone());
                return Err(failure);
            }
            grid => grid?,
        };
        self.grant_claimed_before()?;
        self.read_own_network(range).await?;
        if let Some(network) = self.node_network(range) {
            return self.has_room(range, network).await.map(|()| Some(network));
        }
        let (v4, fixed) = (range.subnet().is_ipv4(), &grid.static_networks);
        let blocks = Blocks::cut(v4, range.spans(), grid.block_prefix, fixed);
        let mut taken = BTreeSet::new();
        let first: Vec<IpNetwork> = choice::from_own_place(&blocks, &self.shared.name)
            .filter(|block| !self.blocks.own.contains_key(block) && self.room(range, *block) > 0)
            .take(MOST_BLIND)
            .collect();
        for block in first {
            match self.attempt(block).await? {
                Attempt::Got => return Ok(Some(block)),
                Attempt::Taken => drop(taken.insert(block)),
            }
        }
        let client = self.shared.client.clone();
        let names = client.block_names(&self.space).await?;
        for _ in 0..MOST_DRAWN {
            let is_taken = |block| {
                taken.contains(&block)
                    || self.blocks.own.contains_key(&block)
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
        let got = self.claim_of_others(range, &grid, &blocks, deadline).await;
        if let Err(failure) = &got
            && failure.kind == FailureKind::Exhausted
        {
            self.ranges.note_refused(range, failure.clone());
        }
        got.map(Some)
    }

    /// The block that has one address.
    pub(super) async fn claim_address(
        &mut self,
        range: &Range,
        address: IpAddr,
        single: bool,
        deadline: Instant,
    ) -> Result<IpNetwork, Failure> {
        self.settle_before(range).await?;
        self.check_before(address)?;
        if let Some(gateway) = range.gateway_of(address) {
            self.check_before(gateway)?;
        }
        let grid = self.grid(range).await?;
        self.grant_claimed_before()?;
        let block = self.block_around(address, single, range, &grid)?;
        self.read_own_network(range).await?;
        let network = self.node_network(range);
        if let Some(network) = network.filter(|network| *network != block) {
            let why = format!(
                "{address} is not in {network}, the network of range {} that this node has",
                range.subnet()
            );
            return Err(Failure::new(FailureKind::HeldByAnotherNode, why));
        }
        // It came while the question was on its way.
        if self.blocks.own.contains_key(&block) {
            self.settle_for_add().await?;
            self.check_division(range, block)?;
            if self.grants.usable().any(|grant| grant.has(address)) {
                return Ok(block);
            }
            if self.blocks.own.contains_key(&block) {
                return Err(self.in_doubt(block));
            }
        }
        if let Attempt::Got = self.attempt(block).await? {
            return Ok(block);
        }
        self.claim_of_other(address, block, single, deadline).await
    }

    async fn settle_for_add(&mut self) -> Result<(), Failure> {
        let settled = self.settle().await;
        settled.map_err(|error| Failure::new(FailureKind::ClusterUnavailable, error.to_string()))
    }

    fn in_doubt(&self, block: IpNetwork) -> Failure {
        let why = format!(
            "whether this node has AddressBlock {} is not known yet: a request for it had no answer, or it is \
             marked as over",
            self.space.block_name(block)
        );
        Failure::new(FailureKind::ClusterUnavailable, why)
    }

    /// The only block that this node can have of a range with networks of nodes; also one of which it is
    /// not known yet whether it is this node's.
    fn node_network(&self, range: &Range) -> Option<IpNetwork> {
        range.per_node()?;
        let unread = self.blocks.unread.iter().map(|block| block.spec.block);
        let own = self.blocks.own.keys().copied().chain(unread);
        let mut own = own.chain(self.grants.networks());
        own.find(|block| overlap(*block, range.subnet()))
    }

    /// Refuses a question for a further address of this node's network of a range, if none is free.
    async fn has_room(&mut self, range: &Range, network: IpNetwork) -> Result<(), Failure> {
        self.settle_for_add().await?;
        if !self.grants.is_usable(network) {
            return Err(self.in_doubt(network));
        }
        self.check_division(range, network)?;
        match self.free_in(range, network)? {
            0 => Err(self.too_small(range, network, 0, 1)),
            _ => Ok(()),
        }
    }

    /// Refuses a block of this node that is divided otherwise than a range: no address of it is leased
    /// for that range.
    fn check_division(&self, range: &Range, network: IpNetwork) -> Result<(), Failure> {
        let mut granted = self.grants.blocks.iter();
        let granted = granted.find(|grant| grant.block == network);
        if granted.is_none_or(|grant| grant.per_node == range.per_node()) {
            return Ok(());
        }
        let why = format!(
            "AddressBlock {} of this node does not have the perNode of range {}: end the pods that have its \
             addresses, and delete it",
            self.space.block_name(network),
            range.subnet()
        );
        Err(Failure::new(FailureKind::Mismatch, why))
    }

    /// How many addresses of a range in a block are not leased.
    fn free_in(&self, range: &Range, network: IpNetwork) -> Result<u128, Failure> {
        let used = |store: SpaceLeases| store.block_use(network);
        let used = self
            .open_store()
            .and_then(|store| store.map(used).transpose());
        let used = used.map_err(|error| Failure::new(FailureKind::Other, error.to_string()))?;
        let held = used.map(|used| used.held).unwrap_or_default();
        let held = held.iter().filter(|address| range.gives(**address)).count();
        Ok(self.room(range, network).saturating_sub(held as u128))
    }

    /// That this node's network of a range has fewer free addresses than an order wants.
    fn too_small(&self, range: &Range, network: IpNetwork, free: u128, wanted: u128) -> Failure {
        let room = self.room(range, network);
        let lack = match free {
            0 => format!("all {room} addresses for pods in {network} are leased"),
            _ => format!(
                "{wanted} addresses are wanted at once, and {free} of {room} for pods in {network} are free"
            ),
        };
        let why = format!(
            "{lack}, and a node has one network of range {}: end one of their pods, or use a shorter prefix in \
             perNode of a new range{}",
            range.subnet(),
            self.explain_before(range)
        );
        Failure::new(FailureKind::Exhausted, why)
    }

    /// The block that has an address, if a node can have it as the question wants it.
    fn block_around(
        &self,
        address: IpAddr,
        single: bool,
        range: &Range,
        grid: &RangeSpec,
    ) -> Result<IpNetwork, Failure> {
        if !single && !range.gives(address) {
            let why = format!("block is malformed: {address} is not in the range's spans");
            return Err(Failure::new(FailureKind::Malformed, why));
        }
        let name = self.space.block_name(grid.range);
        let store = &self.space.store;
        let why = match grid.block_of(address) {
            Some(block) if grid.per_node.is_some() && block.prefix() != grid.block_prefix => {
                format!(
                    "{address} is static (stores.{store}.static of the policy), and AddressRange {name} has networks of \
                 nodes only: ask for another address, or leave perNode out"
                )
            }
            Some(block) if !single || block == ipam::block::single(address) => return Ok(block),
            Some(_) => format!(
                "{address} is static in this node's policy (stores.{store}.static), and was not when AddressRange \
                 {name} was made: end the pods of that range, and delete its AddressBlocks and AddressRange {name}"
            ),
            None => format!(
                "{address} would be in a block of /{} with static addresses of AddressRange {name}: ask for another \
                 address",
                grid.block_prefix
            ),
        };
        Err(Failure::new(FailureKind::Mismatch, why))
    }

    /// The prefix length of blocks, by the node's policy.
    pub(super) fn policy_prefix(&self, address: IpAddr) -> u8 {
        match address {
            IpAddr::V4(_) => self.length.ipv4,
            IpAddr::V6(_) => self.length.ipv6,
        }
    }

    /// The range of a block of this node or of a lease in it: one that is in force, or else one that
    /// ADDs noted.
    pub(super) fn range_around(
        &self,
        known: &[RangeObject],
        noted: &[Range],
        block: IpNetwork,
    ) -> Range {
        let around = known.iter().map(|range| &range.spec);
        let around: Vec<Range> = around
            .filter(|range| range.confirmed && overlap(range.range, block))
            .filter_map(|range| Range::whole(range.range).divided(range.per_node).ok())
            .collect();
        let mut noted = noted.iter().filter(|range| range.size_within(block) > 0);
        let prefix = self.policy_prefix(block.network()) - UNKNOWN_RANGE_BITS;
        let unknown = network_around(block.network(), prefix.min(block.prefix()));
        let first_noted = noted.clone().next().cloned();
        let alike = |range: &&Range| {
            let mut around = around.iter();
            around.any(|known| {
                (known.subnet(), known.per_node()) == (range.subnet(), range.per_node())
            })
        };
        noted
            .find(alike)
            .or(around.first())
            .cloned()
            .or(first_noted)
            .unwrap_or_else(|| Range::whole(unknown.unwrap_or(block)))
    }

    /// How the range of a block is divided, by what was read last.
    fn per_node_of(&self, block: IpNetwork) -> Option<PerNode> {
        let (_, ranges) = self.grids.as_ref()?;
        let mut ranges = ranges.iter().filter(|range| range.spec.confirmed);
        ranges.find_map(|range| range.spec.per_node.filter(|_| range.spec.overlaps(block)))
    }

    /// Makes a block's object.
    pub(super) async fn attempt(&mut self, block: IpNetwork) -> Result<Attempt, Failure> {
        if self.blocks.own.len() >= MAX_BLOCKS {
            let why = format!(
                "this node has {MAX_BLOCKS} blocks of {}, and may have no more",
                self.space
            );
            return Err(Failure::new(FailureKind::Exhausted, why));
        }
        let me = self.shared.me().await?;
        let object = BlockObject::new(&self.space, block, &me, 1, Timestamp::now());
        let object = object.divided(self.per_node_of(block));
        match self.create(object).await? {
            Attempt::Taken if self.per_node_of(block).is_some() => self.take_up(block).await,
            attempt => Ok(attempt),
        }
    }

    /// Reads this node's blocks before it takes a network of a range: one can be there by a request that
    /// arrived late, and a node has no second network.
    async fn read_own_network(&mut self, range: &Range) -> Result<(), Failure> {
        if range.per_node().is_none() || self.node_network(range).is_some() {
            return Ok(());
        }
        let mut own = Vec::new();
        let client = self.shared.client.clone();
        client
            .blocks_of_node(&self.shared.name, |block| own.push(block))
            .await?;
        own.retain(|block| block.space() == self.space);
        for block in own {
            self.changed(block).await;
        }
        Ok(())
    }

    /// Reads an object that is there: it may be this node's for the same reason.
    async fn take_up(&mut self, block: IpNetwork) -> Result<Attempt, Failure> {
        let name = self.space.block_name(block);
        let object = match self.shared.client.block(&name).await {
            // Written by hand or by a newer version. Nothing of this node's is unreadable.
            Err(ApiError::Malformed { .. }) => None,
            object => object?,
        };
        let is_of_block =
            |object: &BlockObject| object.is_well_named() && object.spec.block == block;
        if let Some(object) = object.filter(is_of_block) {
            self.changed(object).await;
        }
        let is_unread = self
            .blocks
            .unread
            .iter()
            .any(|object| object.spec.block == block);
        if self.blocks.own.contains_key(&block) || is_unread {
            self.grant_claimed_before()?;
            return match self.grants.is_usable(block) {
                true => Ok(Attempt::Got),
                false => Err(self.in_doubt(block)),
            };
        }
        Ok(Attempt::Taken)
    }

    async fn create(&mut self, object: BlockObject) -> Result<Attempt, Failure> {
        let block = object.spec.block;
        match self.shared.client.create(&object).await {
            Ok(Some(made)) => self.accept(made),
            Ok(None) => Ok(Attempt::Taken),
            Err(error) => {
                if error.is_uncertain() && !self.blocks.own.contains_key(&block) {
                    self.blocks.own.insert(block, Own::in_doubt(object));
                }
                Err(error.into())
            }
        }
    }

    /// Takes what the API has acknowledged as this node's, and grants it.
    pub(super) fn accept(&mut self, object: BlockObject) -> Result<Attempt, Failure> {
        let block = object.spec.block;
        self.blocks.own.insert(block, Own::new(object));
        self.grant_claimed_before()?;
        Ok(Attempt::Got)
    }

    /// Claims a block anew that is granted on disk, and of which the API has no object of this node.
    pub(super) async fn claim_granted(&mut self, grant: &Grant) -> Result<(), Failure> {
        let me = self.shared.me().await?;
        let store = self.open_store();
        let noted = store.and_then(|store| self.noted_ranges(store.as_ref()));
        let noted = noted.map_err(|error| Failure::new(FailureKind::Other, error.to_string()))?;
        let known = self.known_ranges().await?;
        let range = self.range_around(&known, &noted, grant.block);
        match self.grid(&range).await {
            Ok(grid) if !grid.contradicts(grant.block) => {}
            Err(failure) if failure.kind != FailureKind::Mismatch => return Err(failure),
            cut_otherwise => {
                let why = cut_otherwise.map_or_else(
                    |failure| failure.message,
                    |grid| format!("its range has blocks of /{} now", grid.block_prefix),
                );
                self.lose(grant.block, &why, None);
                return Ok(());
            }
        }
        let epoch = grant.epoch.saturating_add(1);
        let object = BlockObject::new(&self.space, grant.block, &me, epoch, Timestamp::now())
            .divided(grant.per_node);
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
                if let Some(there) = there? {
                    self.decide(there, &me).await;
                }
            }
        }
        Ok(())
    }

    /// What an object says that was read just now of a block which is granted.
    pub(super) async fn decide(&mut self, object: BlockObject, me: &NodeId) {
        let network = object.spec.block;
        match standing::ownership(&object, me, &self.grants.blocks) {
            standing::Ownership::Grant => {
                self.blocks.own.insert(network, Own::new(object.clone()));
                self.keep(object);
            }
            standing::Ownership::Renew => self.renew(object, me).await,
            standing::Ownership::Taken => self.obey(&object),
            // It was this machine's, and getting the new UID failed; or it is another machine's.
            standing::Ownership::Foreign if !self.grants.has_block(network) => {
                self.blocks.own.remove(&network);
                self.keep_or_return(object, me).await;
            }
            standing::Ownership::Foreign | standing::Ownership::Not => {
                let why = format!("the API has it as that of node {:?}", object.spec.node);
                self.lose(network, &why, Some(object.metadata.resource_version));
            }
        }
    }

    /// Grants what was claimed before, or no more is claimed: a node whose disk is full would take one
    /// block after the other, and use none.
    fn grant_claimed_before(&mut self) -> Result<(), Failure> {
        self.grant_all().map_err(|error| {
            let directory = self.grants.directory().display();
            let why =
                format!("the node has blocks that cannot be written below {directory}: {error}");
            Failure::new(FailureKind::Other, why)
        })
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
            per_node: None,
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
            &[("10.0.0.1", "10.0.1.1")],
        ] {
            let failure = range_of(&need(spans)).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Malformed);
        }
    }

    #[test]
    fn addresses_of_a_range_in_a_block_are_counted() {
        let range = range_of(&need(&[
            ("10.0.0.1", "10.0.0.7"),
            ("10.0.0.9", "10.0.0.254"),
        ]))
        .unwrap();
        assert_eq!(range.size_within("10.0.0.0/28".parse().unwrap()), 14);
        assert_eq!(range.size_within("10.0.0.240/28".parse().unwrap()), 15);
        assert_eq!(range.size_within("10.0.1.0/28".parse().unwrap()), 0);
        assert_eq!(range.size_within("fd00::/122".parse().unwrap()), 0);
        assert!(
            range.gives("10.0.0.7".parse().unwrap()) && !range.gives("10.0.0.8".parse().unwrap())
        );
    }
}
