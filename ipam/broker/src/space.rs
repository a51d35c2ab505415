//! One address space on this node: its blocks in the API, its grants on disk, and the questions for
//! more, each by one task, one after the other.
//!
//! # What may be granted
//! A block is granted when the API has acknowledged that it is this node's: by the answer to a
//! creation or change, by the first consistent list, or by an event behind it. What this node itself
//! gave back is not believed to be its own again by an event that comes late: a creation has another
//! UID.
//!
//! # What is in doubt
//! A request without an answer may have been done. Until the object was read again its block is in
//! doubt: it is not granted anew, and nothing is given back.
//!
//! - [`claim`]: getting a block;
//! - [`give`]: giving one back, losing one;
//! - [`usage`]: what of the blocks is leased;
//! - [`sweep`]: blocks of nodes that are gone;
//! - [`adopt`]: leases from before the store was the cluster's.

mod adopt;
mod claim;
mod give;
mod sweep;
mod usage;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use ipam::block::AddressSpace;
use ipam::grants::{Grant, Grants};
use ipam::store::{Store, StoreError};
use ipnetwork::IpNetwork;
use node::identity::NodeIdentity;
use node::policy::{BlockLength, Policy};
use node_wire::{Answer, BlockNeed, Failure, FailureKind};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use crate::api::document::{BlockObject, Metadata, NodeId};
use crate::api::{ApiError, Client, Created, NodeObject, SpaceObject};
use crate::decide::standing::{self, NodeState};
use crate::metrics::Metrics;

/// How long an event of an object that this node removed may come late.
const LATE_EVENTS: Duration = Duration::from_secs(3600);
/// The longest wait before work in the background is tried again, in ticks.
const LONGEST_PAUSE_TICKS: u32 = 30;

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
    /// How long the length of a space's blocks is believed: an administrator may begin a space anew
    /// with another one.
    pub agreed: Duration,
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
        }
    }
}

/// What all address spaces of a broker have in common.
#[derive(Debug)]
pub struct Shared {
    /// The API.
    pub client: Client,
    /// The node's policy.
    pub policy: Policy,
    /// Prefix of `/proc` and `/etc`.
    pub root: PathBuf,
    /// This node's name.
    pub name: String,
    /// This node by name and UID, once it was read.
    pub me: RefCell<Option<NodeId>>,
    /// Nodes of the cluster as last listed.
    pub(crate) nodes: RefCell<Option<(Instant, Rc<std::collections::BTreeSet<NodeId>>)>>,
    /// How long things take.
    pub timing: Timing,
    /// Counts.
    pub metrics: RefCell<Metrics>,
}

impl Shared {
    /// Reads this node's object, whose UID may be another one than before.
    ///
    /// # Errors
    /// The failure to answer with.
    pub async fn read_me(&self) -> Result<NodeId, Failure> {
        let read: Option<NodeObject> = self
            .client
            .node(&self.name)
            .await
            .map_err(|e| failure(&e))?;
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

    /// A store of this node, if it was made.
    ///
    /// # Errors
    /// It may be there, and cannot be read.
    pub fn open_store(&self, name: &str) -> Result<Option<Store>, StoreError> {
        let node = NodeIdentity::read(&self.root, &self.policy.node_name(Some(&self.name)))?;
        Store::open_existing(&self.policy, name, node)
    }

    async fn me(&self) -> Result<NodeId, Failure> {
        let known = self.me.borrow().clone();
        match known {
            Some(me) => Ok(me),
            None => self.read_me().await,
        }
    }

    /// What the cluster says of a node now.
    async fn node_state(&self, name: &str) -> Result<NodeState, ApiError> {
        Ok(NodeState::of(self.client.node(name).await?.as_ref()))
    }
}

/// The failure to answer an ADD with.
pub(crate) fn failure(error: &ApiError) -> Failure {
    let kind = match error {
        ApiError::Refused { code, .. } if *code < 500 && *code != 429 => FailureKind::Other,
        _ => FailureKind::ClusterUnavailable,
    };
    Failure::new(kind, error.to_string())
}

/// A question for a block, and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    /// What is wanted.
    pub need: BlockNeed,
    /// When it came.
    pub at: Instant,
    /// Where the answer goes.
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

/// What is not known of a block, because a request had no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// Whether it is this node's. Its object has to be read.
    Whose,
    /// Whether it was removed. It is no longer granted, and the removal is asked for until there is an
    /// answer: the first request may still be on its way, so a block that is there may go.
    Removed,
}

/// An object that this node removed, or that another node has: what came before is late news.
#[derive(Debug)]
struct Removed {
    at: Instant,
    uid: String,
    /// Up to which `resourceVersion`; `None` of an object that is no more.
    until: Option<String>,
}

impl Removed {
    fn is_of(&self, object: &Metadata) -> bool {
        self.uid == object.uid
            && self
                .until
                .as_ref()
                .is_none_or(|until| !is_newer(&object.resource_version, until))
    }
}

/// A block of this node.
#[derive(Debug)]
struct Own {
    object: BlockObject,
    doubt: Option<Doubt>,
    granted: Instant,
    usage: Option<usage::Known>,
    empty_since: Option<Instant>,
    noted: Option<(u64, Instant)>,
}

impl Own {
    fn new(object: BlockObject) -> Self {
        let noted = object.status.map(|status| (status.used, Instant::now()));
        Self {
            object,
            doubt: None,
            granted: Instant::now(),
            usage: None,
            empty_since: None,
            noted,
        }
    }

    fn grant(&self) -> Grant {
        Grant {
            block: self.object.spec.block,
            uid: self.object.metadata.uid.clone(),
            epoch: self.object.spec.epoch,
        }
    }
}

/// The task of one address space.
#[derive(Debug)]
pub struct Worker {
    shared: Rc<Shared>,
    space: AddressSpace,
    length: BlockLength,
    /// Networks that are not cut into blocks: each of their addresses is one.
    static_networks: Vec<IpNetwork>,
    directory: PathBuf,
    grants: Grants,
    own: BTreeMap<IpNetwork, Own>,
    /// Blocks of another machine that had this node's name.
    foreign: BTreeMap<IpNetwork, BlockObject>,
    removed: VecDeque<Removed>,
    /// Objects that came before it was known which node this is.
    unread: Vec<BlockObject>,
    /// Blocks that this node lost while it had leases in them.
    lost: BTreeMap<IpNetwork, usize>,
    asked: VecDeque<Asked>,
    /// Whether the API's list was read once.
    listed: bool,
    /// Whether leases from before have their blocks, as far as they can.
    adopted: bool,
    /// When the space's object was found to agree with the policy.
    agreed: Option<Instant>,
    /// Cells that were found to be split.
    split: std::collections::BTreeSet<IpNetwork>,
    leftover: Option<claim::Leftover>,
    ranges: usage::Ranges,
    failures: u32,
    paused_until: Option<Instant>,
    /// Not before then marks on this node's blocks are looked into again.
    deny_at: Instant,
    sweep_at: Instant,
}

impl Worker {
    /// Reads the grants on disk.
    ///
    /// # Errors
    /// They cannot be read, which must not be taken for none.
    pub fn new(
        shared: Rc<Shared>,
        space: AddressSpace,
        length: BlockLength,
        static_networks: Vec<IpNetwork>,
    ) -> Result<Self, ipam::grants::GrantsError> {
        let directory = ipam::grants::directory(&shared.policy.state_dir, &space.store);
        let grants = Grants::read(&directory, &space)?;
        Ok(Self {
            shared,
            space,
            length,
            static_networks,
            directory,
            grants,
            own: BTreeMap::new(),
            foreign: BTreeMap::new(),
            removed: VecDeque::new(),
            unread: Vec::new(),
            lost: BTreeMap::new(),
            asked: VecDeque::new(),
            listed: false,
            adopted: false,
            agreed: None,
            split: std::collections::BTreeSet::new(),
            leftover: None,
            ranges: usage::Ranges::default(),
            failures: 0,
            paused_until: None,
            deny_at: Instant::now(),
            sweep_at: Instant::now() + sweep::first_wait(),
        })
    }

    /// Serves until the sender is dropped.
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
            }
        }
    }

    async fn take(&mut self, message: Message) {
        match message {
            Message::Asked(asked) => self.asked.push_back(asked),
            Message::Listed(blocks) => self.all_listed(blocks).await,
            Message::Changed(block) => self.changed(*block).await,
            Message::Gone(block) => {
                let network = block.spec.block;
                let own = self.own.get(&network);
                if own.is_some_and(|own| own.object.metadata.uid == block.metadata.uid) {
                    Box::pin(self.gone(network, block.metadata.resource_version.clone())).await;
                }
                self.foreign.remove(&network);
            }
        }
    }

    /// Background work.
    async fn tick(&mut self) {
        self.shared
            .metrics
            .borrow_mut()
            .space(&self.space, self.summary());
        self.removed.retain(|one| one.at.elapsed() < LATE_EVENTS);
        if !self.listed
            || self
                .paused_until
                .is_some_and(|until| until > Instant::now())
        {
            return;
        }
        match self.background().await {
            Ok(()) => {
                self.failures = 0;
                self.paused_until = None;
            }
            Err(why) => {
                self.failures = self.failures.saturating_add(1);
                let ticks = (1u32 << self.failures.min(6)).min(LONGEST_PAUSE_TICKS);
                self.paused_until = Some(Instant::now() + self.shared.timing.tick * ticks);
                tracing::warn!(space = %self.space, error = why, "cannot care for the node's blocks of addresses");
            }
        }
    }

    async fn background(&mut self) -> Result<(), String> {
        self.settle().await.map_err(|error| error.to_string())?;
        let store = self.open_store().map_err(|error| error.to_string())?;
        self.adopt(store.as_ref()).await?;
        self.refresh(store.as_ref())
            .map_err(|error| error.to_string())?;
        self.deny_ends().await;
        self.return_foreign()
            .await
            .map_err(|error| error.to_string())?;
        self.claim_ahead()
            .await
            .map_err(|failure| failure.message)?;
        self.give_spare().await.map_err(|error| error.to_string())?;
        self.note_usage().await.map_err(|error| error.to_string())?;
        self.sweep_if_due().await.map_err(|error| error.to_string())
    }

    /// The local store, opened anew: a directory that was open may be another one by now.
    fn open_store(&self) -> Result<Option<Store>, StoreError> {
        self.shared.open_store(&self.space.store)
    }

    fn is_static(&self, block: IpNetwork) -> bool {
        let mut networks = self.static_networks.iter();
        networks.any(|network| network.contains(block.network()))
    }

    /// What there is to say of the space.
    fn summary(&self) -> crate::metrics::SpaceSummary {
        let used = self.own.values().filter_map(|own| own.usage.as_ref());
        crate::metrics::SpaceSummary {
            blocks: self.grants.blocks.len() as u64,
            addresses: self
                .grants
                .blocks
                .iter()
                .map(|grant| size(grant.block))
                .sum(),
            used: used.map(|known| known.held.len() as u64).sum(),
            conflicts: self.lost.values().map(|count| *count as u64).sum(),
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
        // An object that is not in the list may have been made behind it.
        for own in self.own.values_mut() {
            if own.doubt.is_none() && !listed.contains(&own.object.metadata.uid) {
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
        let unread = std::mem::take(&mut self.unread);
        for block in unread {
            self.changed(block).await;
        }
        let orphans: Vec<Grant> = self
            .grants
            .blocks
            .iter()
            .filter(|grant| !self.own.contains_key(&grant.block))
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

    async fn changed(&mut self, block: BlockObject) {
        let network = block.spec.block;
        if self.removed.iter().any(|one| one.is_of(&block.metadata)) {
            return;
        }
        let me = match self.shared.me().await {
            Ok(me) => me,
            Err(failure) => {
                tracing::error!(error = failure.message, "cannot read this node's object");
                return self.unread.push(block);
            }
        };
        match standing::own(&block, &me, &self.grants.blocks) {
            standing::Own::Grant if !self.is_of_grid(network) && !self.is_granted(network) => {
                tracing::warn!(
                    object = block.metadata.name, block = %network,
                    "an AddressBlock has another length than the blocks of its space, and may overlap \
                     those of other nodes: it is not believed; remove it"
                );
            }
            standing::Own::Grant if block.spec.over.is_some() => self.deny_end(block).await,
            standing::Own::Grant => self.keep(block),
            standing::Own::Renew => self.renew(block, &me).await,
            standing::Own::Taken => self.obey(&block),
            standing::Own::Foreign => {
                // Perhaps it is this node that has a new UID.
                match self.shared.read_me().await {
                    Ok(now) if now != me => Box::pin(self.changed(block)).await,
                    _ => drop(self.foreign.insert(network, block)),
                }
            }
            standing::Own::Not => {
                if self.own.contains_key(&network) {
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

    fn is_granted(&self, network: IpNetwork) -> bool {
        let mut grants = self.grants.blocks.iter();
        grants.any(|grant| grant.block == network)
    }

    /// Takes note of an object of this node's, and grants it.
    fn keep(&mut self, block: BlockObject) {
        let network = block.spec.block;
        match self.own.get_mut(&network) {
            Some(own) if own.object.metadata.uid == block.metadata.uid => {
                if is_newer(
                    &block.metadata.resource_version,
                    &own.object.metadata.resource_version,
                ) {
                    own.object = block;
                }
            }
            _ => drop(self.own.insert(network, Own::new(block))),
        }
        if let Err(error) = self.grant(network) {
            tracing::error!(space = %self.space, block = %network, %error, "cannot note that the node has a block");
        }
    }

    /// Writes that the node has a block, unless that is written.
    fn grant(&mut self, network: IpNetwork) -> std::io::Result<()> {
        let Some(own) = self.own.get(&network).filter(|own| own.doubt.is_none()) else {
            return Ok(());
        };
        let grant = own.grant();
        if self.grants.blocks.contains(&grant) {
            return Ok(());
        }
        let mut grants = self.grants.clone();
        grants.blocks.retain(|other| other.block != network);
        grants.blocks.push(grant);
        grants.write(&self.directory, &self.space)?;
        self.grants = grants;
        self.lost.remove(&network);
        tracing::info!(space = %self.space, block = %network, "this node has the block");
        Ok(())
    }

    /// Writes that the node has the blocks of which that could not be written before.
    fn grant_all(&mut self) -> std::io::Result<()> {
        let ungranted: Vec<IpNetwork> = self
            .own
            .iter()
            .filter(|(_, own)| own.doubt.is_none() && !self.grants.blocks.contains(&own.grant()))
            .map(|(network, _)| *network)
            .collect();
        ungranted
            .into_iter()
            .try_for_each(|network| self.grant(network))
    }

    /// Writes that the node does not have a block.
    fn revoke(&mut self, network: IpNetwork) -> std::io::Result<()> {
        let mut grants = self.grants.clone();
        grants.blocks.retain(|grant| grant.block != network);
        if grants.blocks.len() == self.grants.blocks.len() {
            return Ok(());
        }
        grants.write(&self.directory, &self.space)?;
        self.grants = grants;
        Ok(())
    }

    /// Makes the space's object, or checks that it agrees with the policy.
    async fn agree(&mut self) -> Result<(), Failure> {
        if self
            .agreed
            .is_some_and(|at| at.elapsed() < self.shared.timing.agreed)
        {
            return Ok(());
        }
        let wanted = SpaceObject::new(&self.space, self.length);
        let client = &self.shared.client;
        let name = &wanted.metadata.name;
        let read = client.space(name).await.map_err(|e| failure(&e))?;
        let object = match read {
            Some(object) => object,
            None => match client
                .create_space(&wanted)
                .await
                .map_err(|e| failure(&e))?
            {
                Created::New(object) => object,
                Created::Taken => match client.space(name).await.map_err(|e| failure(&e))? {
                    Some(object) => object,
                    None => {
                        let why = format!("AddressSpace {name} comes and goes");
                        return Err(Failure::new(FailureKind::ClusterUnavailable, why));
                    }
                },
            },
        };
        let (theirs, ours) = (&object.spec, &wanted.spec);
        if theirs.block_prefix != ours.block_prefix {
            let why = format!(
                "{} is cut into blocks of {} in the cluster (AddressSpace {name}), and this node's policy says {}: \
                 give all nodes one policy",
                self.space, theirs.block_prefix, ours.block_prefix
            );
            return Err(Failure::new(FailureKind::Mismatch, why));
        }
        if (&theirs.store, &theirs.network_name) != (&ours.store, &ours.network_name) {
            let why = format!("AddressSpace {name} is of another store or network_name; remove it");
            return Err(Failure::new(FailureKind::Mismatch, why));
        }
        self.agreed = Some(Instant::now());
        Ok(())
    }
}

/// Addresses of a network, first and last of a subnet included.
fn size(network: IpNetwork) -> u64 {
    let longest = if network.is_ipv4() { 32 } else { 128 };
    1u64.checked_shl(longest - u32::from(network.prefix()))
        .unwrap_or(u64::MAX)
}

/// Whether one `resourceVersion` is not older than another. They are numbers that ascend; where one is
/// not, the later message is the newer one.
fn is_newer(one: &str, other: &str) -> bool {
    match (one.parse::<u64>(), other.parse::<u64>()) {
        (Ok(one), Ok(other)) => one >= other,
        _ => true,
    }
}

async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
