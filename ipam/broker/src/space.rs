//! One address space on this node: its blocks in the API, its grants on disk, and the questions for
//! more, each by one task, one after the other.
//!
//! A block is granted when the API has acknowledged that it is this node's: by the answer to a
//! creation or change, by the first consistent list, or by a later event. A block that this node gave
//! back is not its own again by an event that comes late: a creation has another UID.
//!
//! A grant of an earlier boot stays on disk, and ADDs do not use it until the API has acknowledged the
//! block again: another node may have taken it while this machine was off.
//!
//! A request without an answer may have been done. Until the object was read again its block is in
//! doubt: it is not granted anew, and nothing is given back.

mod adopt;
mod before;
mod blocks;
mod claim;
mod give;
mod granted;
mod grid;
mod others;
mod usage;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use crate::grants::Grant;
use anyhow::bail;
use ipam::block::{AddressSpace, overlap};
use ipam::leases::{LeaseError, Leases};
use ipnetwork::IpNetwork;
use node::identity::{IdentityError, NodeIdentity};
use node::policy::{BlockLength, Policy, StoreKind};
use node::random::random64;
use node_wire::{Answer, BlockNeed, Failure, FailureKind};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use crate::leases::SpaceLeases;
use before::Before;
use blocks::{Doubt, NodeBlocks, Own, Removed, is_newer};
use granted::GrantsFile;

use crate::api::document::{BlockObject, NodeId};
use crate::api::whereabouts::WhereaboutsObjects;
use crate::api::{ApiError, Client, NodeObject, RangeObject};
use crate::decide::standing::{self, Claim, NodeState};
use crate::metrics::Metrics;

/// The longest wait before work in the background is tried again, in ticks.
const LONGEST_PAUSE_TICKS: u32 = 30;

/// How often an object is read again that others change meanwhile.
const MOST_READ: usize = 4;

/// What is wrong with a block that is not one of the blocks of its range.
const CONTRADICTS: &str = "an AddressBlock is not one of the blocks of its AddressRange, and may overlap those of \
    other nodes: it is not used; end its pods and remove it";

/// How long a mark of a block is remembered that this broker has seen.
const MARKS_AGE: Duration = Duration::from_secs(86_400);

/// How long things take; shorter in tests.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How often the local store is checked for changes.
    pub tick: Duration,
    /// A block that came so short a time ago is not given back, though it is empty: an ADD waits for
    /// it.
    pub new: Duration,
    /// How long a block is empty before the node gives it back unasked.
    pub empty: Duration,
    /// How long other nodes have to give a block back that they were asked for.
    pub ask: Duration,
    /// How long a question may take. An ADD waits five seconds for all of its questions.
    pub question: Duration,
    /// The longest wait before the API is tried again.
    pub retry: Duration,
    /// How long it is believed how ranges are cut: an administrator may begin one anew with another
    /// length.
    pub agreed: Duration,
    /// How long a block of a node that is gone, or a range without blocks, rests by this broker's own
    /// clock, from when it first saw the mark, whatever the cool-down is.
    pub rest: Duration,
    /// How often this node's UID is read again.
    pub identity: Duration,
    /// How often a space is swept.
    pub sweep: Duration,
    /// How long a space that comes after whereabouts waits for whereabouts' ADDs: each of them ends
    /// within two minutes.
    pub settle: Duration,
    /// How long it is believed what is leased by whereabouts.
    pub reread: Duration,
    /// How long an event of an object that this node removed may come late.
    pub late_events: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            tick: Duration::from_secs(2),
            new: Duration::from_secs(10),
            empty: Duration::from_secs(600),
            ask: Duration::from_secs(2),
            question: Duration::from_millis(4500),
            retry: Duration::from_secs(30),
            agreed: Duration::from_secs(60),
            rest: Duration::from_secs(300),
            identity: Duration::from_secs(60),
            sweep: Duration::from_secs(3600),
            settle: Duration::from_secs(150),
            reread: Duration::from_secs(300),
            late_events: Duration::from_secs(3600),
        }
    }
}

/// What all address spaces of a broker have in common.
#[derive(Debug)]
pub struct Shared {
    pub client: Client,
    pub policy: Policy,
    /// Prefix of `/proc` and `/etc`.
    pub root: PathBuf,
    pub name: String,
    /// This node by name and UID, once it was read.
    pub me: RefCell<Option<NodeId>>,
    /// Nodes of the cluster as last listed.
    pub(crate) nodes: RefCell<Option<(Instant, Rc<std::collections::BTreeSet<NodeId>>)>>,
    /// Blocks that are marked as nobody's, by UID: the mark's time, and when this broker first saw it.
    pub(crate) marks: RefCell<BTreeMap<String, (jiff::Timestamp, Instant)>>,
    pub timing: Timing,
    pub metrics: RefCell<Metrics>,
}

impl Shared {
    /// Reads this node's object, whose UID may be another one than before.
    pub async fn read_me(&self) -> Result<NodeId, Failure> {
        let read: Option<NodeObject> = self.client.node(&self.name).await?;
        let Some(read) = read else {
            let why = format!(
                "the cluster has no Node {:?}; name it as the cluster does: node in the policy, --node, or \
                 RDMA_NODE_NAME",
                self.name
            );
            return Err(Failure::new(FailureKind::Other, why));
        };
        let boot = node::identity::boot_id(&self.root.join("proc"));
        if node::identity::is_other_boot(read.boot(), &boot) {
            let why = format!(
                "Node {:?} of the cluster is another machine, or has not said yet that it was started anew: its \
                 boot ID is {}, this machine's is {boot}. Two machines of one name would give the same \
                 addresses: name the node as the cluster does (node in the policy, --node, or RDMA_NODE_NAME)",
                self.name,
                read.boot()
            );
            return Err(Failure::new(FailureKind::Other, why));
        }
        let me = read.id();
        *self.me.borrow_mut() = Some(me.clone());
        Ok(me)
    }

    /// The leases of this node.
    ///
    /// # Errors
    /// They cannot be opened.
    pub fn leases(&self) -> Result<Leases, LeaseError> {
        Leases::open(&self.root, &self.identity()?.boot)
    }

    fn identity(&self) -> Result<NodeIdentity, IdentityError> {
        NodeIdentity::read(&self.root, &self.policy.node_name(Some(&self.name)))
    }

    async fn me(&self) -> Result<NodeId, Failure> {
        let known = self.me.borrow().clone();
        match known {
            Some(me) => Ok(me),
            None => self.read_me().await,
        }
    }

    /// Reads this node's UID again and again: who deletes the Node of a machine that runs has it
    /// registered anew, while its pods run.
    pub(crate) async fn reread_me(self: Rc<Self>) {
        loop {
            let jitter = Duration::from_millis(random64() % 1000);
            tokio::time::sleep(self.timing.identity + jitter).await;
            // Without one yet, or with another machine's, the first ADD says why.
            let known = self.me.borrow().is_some();
            if known && let Err(failure) = self.read_me().await {
                tracing::warn!(
                    error = failure.message,
                    "cannot read this node's object again"
                );
            }
        }
    }

    /// What may be done with a block of a node, by what the cluster says of that node now.
    pub(crate) fn judge(&self, block: &BlockObject, node: &NodeId, state: &NodeState) -> Claim {
        let (now, cooldown) = (jiff::Timestamp::now(), self.policy.ipam.cooldown);
        standing::claim(block, node, state, now, cooldown, self.rest_of(block))
    }

    /// How much longer a block rests by this broker's own clock.
    fn rest_of(&self, block: &BlockObject) -> Duration {
        let rest = self.timing.rest;
        let over = block.spec.over.as_ref();
        over.map_or(rest, |over| {
            rest.saturating_sub(self.known_for(&block.metadata.uid, over.since))
        })
    }

    /// How long this broker has known a note of this time on an object, by its own clock: the clock of
    /// the one that wrote it may be off. What was forgotten is known from now on.
    pub(crate) fn known_for(&self, uid: &str, since: jiff::Timestamp) -> Duration {
        let mut marks = self.marks.borrow_mut();
        let known = marks.get(uid).filter(|(noted, _)| *noted == since);
        if let Some((_, seen)) = known {
            return seen.elapsed();
        }
        marks.retain(|_, (_, seen)| seen.elapsed() < MARKS_AGE);
        marks.insert(uid.to_owned(), (since, Instant::now()));
        Duration::ZERO
    }

    /// What the cluster says of a node now.
    pub(crate) async fn node_state(&self, name: &str) -> Result<NodeState, ApiError> {
        Ok(NodeState::of(self.client.node(name).await?.as_ref()))
    }

    /// The same, asked once of each node.
    pub(crate) async fn node_state_once(
        &self,
        name: &str,
        known: &mut BTreeMap<String, NodeState>,
    ) -> Result<NodeState, ApiError> {
        if let Some(state) = known.get(name) {
            return Ok(state.clone());
        }
        let state = self.node_state(name).await?;
        known.insert(name.to_owned(), state.clone());
        Ok(state)
    }
}

/// What an ADD is answered with.
impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let kind = match &error {
            ApiError::Refused { code, .. } if *code < 500 && *code != 429 => FailureKind::Other,
            _ => FailureKind::ClusterUnavailable,
        };
        Self::new(kind, error.to_string())
    }
}

/// A question for a block, and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    pub need: BlockNeed,
    pub at: Instant,
    pub reply: oneshot::Sender<Result<Answer, Failure>>,
}

/// What a space's task is told.
#[derive(Debug)]
pub enum Message {
    /// An ADD needs a block.
    Asked(Asked),
    /// All blocks of this node in the space, as they are now.
    Listed(Vec<BlockObject>),
    /// One came or was changed.
    Changed(Box<BlockObject>),
    /// One was removed, or is another node's.
    Gone(Box<BlockObject>),
}

/// When the task does what nobody asks for.
#[derive(Debug)]
struct Pace {
    /// How often in a row it failed, and until when it pauses for that.
    failures: u32,
    paused_until: Instant,
    /// When leases that are in no block of this node get theirs; `None` once all have.
    adopt_at: Option<Instant>,
    /// Not before then marks on this node's blocks are looked into again.
    deny_at: Instant,
    /// Since when there is nothing to care for.
    idle_since: Option<Instant>,
}

impl Pace {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            failures: 0,
            paused_until: now,
            adopt_at: Some(now),
            deny_at: now,
            idle_since: None,
        }
    }

    fn is_paused(&self) -> bool {
        self.failures > 0 && self.paused_until > Instant::now()
    }

    fn failed(&mut self, tick: Duration) {
        self.failures = self.failures.saturating_add(1);
        let ticks = (1u32 << self.failures.min(6)).min(LONGEST_PAUSE_TICKS);
        self.paused_until = Instant::now() + tick * ticks;
    }
}

/// The task of one address space.
#[derive(Debug)]
pub struct Worker {
    shared: Rc<Shared>,
    space: AddressSpace,
    /// How long the blocks of a new range are.
    length: BlockLength,
    /// Networks that are not cut into blocks: each of their addresses is one.
    static_networks: Vec<IpNetwork>,
    /// Where its networks used whereabouts before.
    before: Option<Before>,
    grants: GrantsFile,
    blocks: NodeBlocks,
    asked: VecDeque<Asked>,
    /// Whether the API's list was read once.
    listed: bool,
    /// The space's ranges, as read last.
    grids: Option<(Instant, Rc<Vec<RangeObject>>)>,
    leftover: Option<claim::Leftover>,
    /// When a block of an earlier boot was granted anew last: an ADD that had asked before has room in it.
    regained: Option<Instant>,
    ranges: usage::Ranges,
    pace: Pace,
}

impl Worker {
    /// Reads the grants on disk.
    ///
    /// # Errors
    /// They cannot be read, which must not be taken for none; or the policy has no such store.
    pub fn new(shared: Rc<Shared>, space: AddressSpace) -> anyhow::Result<Self> {
        let store = shared.policy.stores.get(&space.store);
        let Some(StoreKind::Kubernetes {
            blocks,
            static_networks,
            after,
        }) = store.map(|store| &store.kind)
        else {
            let name = &space.store;
            bail!("the node's policy has no store {name:?} of type kubernetes");
        };
        let boot = shared.identity()?.boot;
        let state_dir = &shared.policy.state_dir;
        let grants = GrantsFile::read(state_dir, &space, boot, &shared.name, shared.leases()?)?;
        let before = after.as_ref().map(|namespace| {
            let objects = WhereaboutsObjects::new(shared.client.transport().clone(), namespace);
            Before::new(objects, grants.networks())
        });
        Ok(Self {
            length: *blocks,
            static_networks: static_networks.clone(),
            shared,
            space,
            before,
            grants,
            blocks: NodeBlocks::default(),
            asked: VecDeque::new(),
            listed: false,
            grids: None,
            leftover: None,
            regained: None,
            ranges: usage::Ranges::default(),
            pace: Pace::new(),
        })
    }

    /// Serves until the sender is dropped, or there was nothing to care for long enough.
    pub async fn run(mut self, mut messages: mpsc::UnboundedReceiver<Message>) {
        let mut ticks = tokio::time::interval(self.shared.timing.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ticked = Instant::now();
        loop {
            if self.next_group_is_due() {
                self.serve_group().await;
            } else {
                let next = self
                    .asked
                    .iter()
                    .map(|asked| asked.at + self.shared.timing.question)
                    .min();
                tokio::select! {
                    message = messages.recv() => match message {
                        Some(message) => self.take(message).await,
                        None => return,
                    },
                    _ = ticks.tick() => {}
                    () = until(next) => self.expire(),
                }
            }
            while let Ok(message) = messages.try_recv() {
                self.take(message).await;
            }
            if ticked.elapsed() >= self.shared.timing.tick {
                self.tick().await;
                ticked = Instant::now();
                // Nothing is awaited between the two, so no message is lost.
                if self.is_idle() && messages.is_empty() {
                    messages.close();
                    return self.end();
                }
            }
        }
    }

    /// Whether there was nothing to care for long enough. Any author of a network can name a space;
    /// one that nobody uses any longer costs nothing. What was removed is remembered for its time: its
    /// events may come late.
    fn is_idle(&mut self) -> bool {
        let is_busy = !self.listed
            || self.pace.adopt_at.is_some()
            || !self.blocks.is_empty()
            || !self.grants.blocks.is_empty()
            || !self.asked.is_empty();
        if is_busy {
            self.pace.idle_since = None;
            return false;
        }
        let since = *self.pace.idle_since.get_or_insert_with(Instant::now);
        since.elapsed() >= self.shared.timing.empty
    }

    /// Leaves nothing of the space.
    fn end(self) {
        self.shared.metrics.borrow_mut().forget(&self.space);
        if let Err(error) = self.grants.remove() {
            tracing::warn!(space = %self.space, %error, "cannot remove the file of a space that is not used");
        }
    }

    async fn take(&mut self, message: Message) {
        match message {
            Message::Asked(asked) => self.asked.push_back(asked),
            Message::Listed(blocks) => self.all_listed(blocks).await,
            Message::Changed(block) => self.changed(*block).await,
            Message::Gone(block) => {
                let network = block.spec.block;
                let own = self.blocks.own.get(&network);
                if own.is_some_and(|own| own.object.metadata.uid == block.metadata.uid) {
                    Box::pin(self.gone(network, block.metadata.resource_version.clone())).await;
                }
                self.blocks.foreign.remove(&network);
                self.blocks
                    .unread
                    .retain(|one| one.metadata.uid != block.metadata.uid);
            }
        }
    }

    async fn tick(&mut self) {
        self.shared
            .metrics
            .borrow_mut()
            .space(&self.space, self.summary());
        self.blocks
            .removed
            .retain(|one| one.at.elapsed() < self.shared.timing.late_events);
        if !self.listed || self.pace.is_paused() {
            return;
        }
        match self.background().await {
            Ok(()) => self.pace.failures = 0,
            Err(error) => {
                self.pace.failed(self.shared.timing.tick);
                tracing::warn!(space = %self.space, %error, "cannot care for the node's blocks of addresses");
            }
        }
    }

    async fn background(&mut self) -> anyhow::Result<()> {
        self.settle().await?;
        // Blocks that the node has are cared for, though it cannot get another one.
        let before = self.refresh_before().await;
        let checked = self.check_grants().await;
        self.grant_all()?;
        let store = self.open_store()?;
        self.renew_all().await;
        let adopted = self.adopt(store.as_ref()).await;
        self.refresh(store.as_ref())?;
        self.deny_ends().await;
        self.return_foreign().await?;
        let ahead = self.claim_ahead().await;
        self.give_spare().await?;
        self.note_usage().await?;
        checked?;
        adopted?;
        ahead
            .and(before)
            .map_err(|failure| anyhow::anyhow!(failure.message))
    }

    /// The leases of the space.
    fn open_store(&self) -> Result<Option<SpaceLeases>, LeaseError> {
        Ok(Some(SpaceLeases {
            leases: self.shared.leases()?,
            space: self.space.clone(),
            cooldown: self.shared.policy.ipam.cooldown,
        }))
    }

    fn is_static(&self, block: IpNetwork) -> bool {
        let mut networks = self.static_networks.iter();
        networks.any(|network| network.contains(block.network()))
    }

    /// What there is to say of the space.
    fn summary(&self) -> crate::metrics::SpaceSummary {
        let used = self
            .blocks
            .own
            .values()
            .filter_map(|own| own.usage.as_ref());
        crate::metrics::SpaceSummary {
            blocks: self.grants.blocks.len() as u64,
            addresses: self.grants.blocks.iter().map(Grant::size).sum(),
            used: used.map(|known| known.held.len() as u64).sum(),
            conflicts: self.blocks.lost.values().map(|count| *count as u64).sum(),
            ranges_without_free_block: self.ranges.without_free_block(),
        }
    }

    /// Reconciles what the API has with what is on disk.
    async fn all_listed(&mut self, blocks: Vec<BlockObject>) {
        let listed: std::collections::BTreeSet<String> = blocks
            .iter()
            .map(|block| block.metadata.uid.clone())
            .collect();
        for block in blocks {
            self.changed(block).await;
        }
        self.note_own();
        // An object that is not in the list may have been made behind it.
        for own in self.blocks.own.values_mut() {
            if own.doubt != Some(Doubt::Removed) && !listed.contains(&own.object.metadata.uid) {
                own.doubt = Some(Doubt::Whose);
            }
        }
        if let Err(error) = self.settle().await {
            tracing::warn!(space = %self.space, %error, "cannot read the node's blocks again");
        }
        // What could not be decided now is tried again in the background.
        if !self.listed {
            self.listed = true;
            self.claim_again().await;
        }
    }

    /// Grants on disk that the API does not have as this node's: their leases may be in use, so they
    /// are claimed again, unless another node has them.
    async fn claim_again(&mut self) {
        let is_own = |grant: &Grant| self.blocks.own.contains_key(&grant.block);
        if self.blocks.unread.is_empty() && self.grants.blocks.iter().all(is_own) {
            return;
        }
        // Asked once, not for each block.
        if let Err(failure) = self.shared.me().await {
            return tracing::error!(error = failure.message, "cannot read this node's object");
        }
        let unread = std::mem::take(&mut self.blocks.unread);
        for block in unread {
            self.changed(block).await;
        }
        self.note_own();
        let orphans: Vec<Grant> = self
            .grants
            .blocks
            .iter()
            .filter(|grant| !self.blocks.own.contains_key(&grant.block))
            .cloned()
            .collect();
        for grant in orphans {
            self.claim_orphan(&grant).await;
        }
    }

    async fn claim_orphan(&mut self, grant: &Grant) {
        if let Err(error) = self.claim_granted(grant).await {
            tracing::error!(
                space = %self.space, block = %grant.block, error = error.message,
                "a block that this node has is not its own in the API, and cannot be claimed; trying again"
            );
        }
    }

    pub(super) async fn changed(&mut self, block: BlockObject) {
        let network = block.spec.block;
        if self.blocks.is_late_news(&block.metadata) {
            return;
        }
        let me = match self.shared.me().await {
            Ok(me) => me,
            Err(failure) => {
                tracing::error!(error = failure.message, "cannot read this node's object");
                return self.blocks.unread.push(block);
            }
        };
        let standing = standing::ownership(&block, &me, &self.grants.blocks);
        if standing == standing::Ownership::Grant
            && !self.grants.has_block(network)
            && let Err(error) = self.known_ranges().await
        {
            tracing::warn!(space = %self.space, %error, "cannot read how ranges are cut into blocks");
            return self.blocks.unread.push(block);
        }
        match standing {
            standing::Ownership::Grant if block.spec.over.is_some() => self.deny_end(block).await,
            // A request to remove it may still be on its way from before this program was started anew.
            // It is of this version.
            standing::Ownership::Grant
                if !self.blocks.own.contains_key(&network) && !self.grants.has_block(network) =>
            {
                self.renew(block, &me).await;
            }
            standing::Ownership::Grant => self.keep(block),
            standing::Ownership::Renew => self.renew(block, &me).await,
            standing::Ownership::Taken => self.obey(&block),
            standing::Ownership::Foreign => {
                // Perhaps it is this node that has a new UID.
                match self.shared.read_me().await {
                    Ok(now) if now != me => Box::pin(self.changed(block)).await,
                    _ => self.keep_or_return(block, &me).await,
                }
            }
            standing::Ownership::Not => {
                if block.is_well_named() && self.blocks.own.contains_key(&network) {
                    let until = Some(block.metadata.resource_version.clone());
                    self.lose(network, "the API has it as another node's", until);
                }
                if !block.is_well_named() {
                    tracing::warn!(
                        object = block.metadata.name, block = %network,
                        "an AddressBlock's name is not the one of its block: it is not believed; remove it"
                    );
                }
            }
        }
    }

    /// Takes note of an object of this node's, and grants it.
    fn keep(&mut self, block: BlockObject) {
        let network = block.spec.block;
        match self.blocks.own.get_mut(&network) {
            Some(own) if own.object.metadata.uid == block.metadata.uid => {
                if is_newer(
                    &block.metadata.resource_version,
                    &own.object.metadata.resource_version,
                ) {
                    own.object = block;
                }
            }
            _ => drop(self.blocks.own.insert(network, Own::new(block))),
        }
        if let Some(range) = self
            .contradiction(network)
            .filter(|_| !self.grants.has_block(network))
        {
            tracing::warn!(space = %self.space, block = %network, range, "{CONTRADICTS}");
        }
        // Those of an earlier boot are noted together, once the list was gone through.
        let is_earlier = self.grants.has_block(network) && !self.grants.is_usable(network);
        if !is_earlier && let Err(error) = self.grant(network) {
            tracing::error!(space = %self.space, block = %network, %error, "cannot note that the node has a block");
        }
    }

    /// What is to be on disk of a block of this node; `None` while leases of the store before could be in
    /// it that were not read, or while the block contradicts a range. One that is marked as over is not
    /// granted anew: another node may take it.
    fn grant_of(&self, network: IpNetwork) -> Option<Grant> {
        let own = self
            .blocks
            .own
            .get(&network)
            .filter(|own| own.doubt.is_none())?;
        let except = match self.knows_before() {
            true => self.leased_before(network),
            // As it was granted: leases of the store before only end.
            false => self.grant_on_disk(network)?.except,
        };
        let is_over = own.object.spec.over.is_some() && !self.grants.is_usable(network);
        let may_be = !is_over && self.contradiction(network).is_none();
        may_be.then(|| own.grant(except, self.grants.boot()))
    }

    /// Writes that the node has a block, unless that is written.
    fn grant(&mut self, network: IpNetwork) -> std::io::Result<()> {
        self.grant_these(&[network])
    }

    /// Writes that the node has the blocks of which that could not be written before.
    fn grant_all(&mut self) -> std::io::Result<()> {
        let own: Vec<IpNetwork> = self.blocks.own.keys().copied().collect();
        self.grant_these(&own)
    }

    fn note_own(&mut self) {
        if let Err(error) = self.grant_all() {
            tracing::error!(space = %self.space, %error, "cannot note which blocks the node has");
        }
    }

    fn grant_these(&mut self, networks: &[IpNetwork]) -> std::io::Result<()> {
        let due = networks
            .iter()
            .filter_map(|network| self.grant_of(*network));
        let due: Vec<Grant> = due.filter(|grant| !self.grants.has_grant(grant)).collect();
        if due.is_empty() {
            return Ok(());
        }
        let blocks = due.iter().map(|grant| grant.block);
        let (there, new): (Vec<_>, Vec<_>) =
            blocks.partition(|block| self.grants.has_block(*block));
        let is_regained = there.iter().any(|block| !self.grants.is_usable(*block));
        self.grants.add(due)?;
        if is_regained {
            self.regained = Some(Instant::now());
        }
        for block in there.iter().chain(&new) {
            self.blocks.lost.retain(|lost, _| !overlap(*lost, *block));
        }
        for block in new {
            tracing::info!(space = %self.space, %block, "this node has the block");
        }
        Ok(())
    }
}

async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
