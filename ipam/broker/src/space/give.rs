//! Giving a block back, losing one, and finding out what became of one.
//!
//! Giving back has three steps: the grant goes, durably; then the local store is read, and a lease that
//! is there keeps the block; then the object is removed. [`ipam::grants`] has why an ADD cannot cross
//! that. Killed after the first step, the broker finds at its next start an object without a grant.
//! The removal may still be on its way, so the object gets a new version before it is granted.

use ipam::grants::Grant;
use ipam::store::{Store, StoreError};
use ipnetwork::IpNetwork;
use serde_json::json;
use tokio::time::Instant;

use super::{Doubt, Own, Removed, Worker};
use crate::api::document::{BlockObject, NodeId};
use crate::api::{ApiError, Changed};
use crate::decide::standing::{Claim, NodeState};
use crate::decide::supply;

/// At most so many leases of a lost block are named in the log.
const MOST_NAMED: usize = 20;

/// Why a block was not given back.
#[derive(Debug, thiserror::Error)]
pub(super) enum GiveError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("write which blocks the node has: {0}")]
    Grants(#[from] std::io::Error),
}

impl Worker {
    /// Gives back what the node can do without, and what others ask for.
    pub(super) async fn give_spare(&mut self) -> Result<(), GiveError> {
        let own = self.own_blocks();
        if !own.iter().any(|one| one.wanted || one.empty_for.is_some()) {
            return Ok(());
        }
        let ranges: Vec<_> = self
            .range_uses()
            .into_iter()
            .map(|(_, used)| used)
            .collect();
        let returns = supply::returns(&own, &ranges, self.shared.timing.empty);
        for network in returns.give_back {
            self.give_back(network).await?;
        }
        for network in returns.unmark {
            let Some(own) = self.blocks.own.get(&network) else {
                continue;
            };
            let metadata = own.object.metadata.clone();
            let client = &self.shared.client;
            let changed = client.change(&metadata, json!({"wantedBy": null})).await?;
            if let (Changed::Done(object), Some(own)) = (changed, self.blocks.own.get_mut(&network))
            {
                own.object = object;
            }
        }
        Ok(())
    }

    async fn give_back(&mut self, network: IpNetwork) -> Result<(), GiveError> {
        if self.revoke_if_empty(network)? {
            return self.remove(network).await;
        }
        if let Some(own) = self.blocks.own.get_mut(&network) {
            own.empty_since = None;
            own.usage = None;
        }
        Ok(())
    }

    /// Gives no further address of a block, if it has no lease. The order is what makes the answer true:
    /// an ADD looks at the grant after its lease is there.
    fn revoke_if_empty(&mut self, network: IpNetwork) -> Result<bool, GiveError> {
        let grant = self.grant_on_disk(network);
        self.grants.revoke(network)?;
        let leases = self.read_leases_in(network);
        if leases.as_ref().is_ok_and(Vec::is_empty) {
            return Ok(true);
        }
        if let Some(grant) = grant {
            self.grants.add(grant)?;
        }
        Ok(leases.map(|_| false)?)
    }

    fn grant_on_disk(&self, network: IpNetwork) -> Option<Grant> {
        let mut grants = self.grants.blocks.iter();
        grants.find(|grant| grant.block == network).cloned()
    }

    /// Removes the object of a block that is not granted.
    pub(super) async fn remove(&mut self, network: IpNetwork) -> Result<(), GiveError> {
        let Some(own) = self.blocks.own.get_mut(&network) else {
            return Ok(());
        };
        // Until there is an answer.
        own.doubt = Some(Doubt::Removed);
        let metadata = own.object.metadata.clone();
        match self.shared.client.delete::<BlockObject>(&metadata).await {
            Ok(Changed::Done(()) | Changed::Gone) => {
                self.note_removed(metadata.uid, None);
                self.blocks.own.remove(&network);
                tracing::info!(space = %self.space, block = %network, "gave the block back");
                Ok(())
            }
            // Somebody asks for it, for instance. This request was the last one of its version, so
            // none that is on its way can remove the object any longer.
            Ok(Changed::Conflict) => {
                self.doubt(network, Doubt::Whose);
                Ok(self.settle_one(network).await?)
            }
            Err(error) => {
                if !error.is_uncertain() {
                    self.doubt(network, Doubt::Whose);
                }
                Err(error.into())
            }
        }
    }

    fn doubt(&mut self, network: IpNetwork, doubt: Doubt) {
        if let Some(own) = self.blocks.own.get_mut(&network) {
            own.doubt = Some(doubt);
        }
    }

    /// Finds out what became of the blocks that are in doubt.
    pub(super) async fn settle(&mut self) -> Result<(), GiveError> {
        let doubts: Vec<(IpNetwork, Doubt)> = self
            .blocks
            .own
            .iter()
            .filter_map(|(network, own)| Some((*network, own.doubt?)))
            .collect();
        for (network, doubt) in doubts {
            let settled = match doubt {
                Doubt::Whose => self.settle_one(network).await.map_err(GiveError::from),
                Doubt::Removed => Box::pin(self.remove(network)).await,
            };
            match settled {
                // One object that cannot be read does not keep the others from being cared for.
                Err(GiveError::Api(error @ ApiError::Malformed { .. })) => {
                    tracing::warn!(space = %self.space, block = %network, %error, "cannot read whose a block is");
                }
                other => other?,
            }
        }
        self.grant_all()?;
        if self.listed {
            self.claim_again().await;
        }
        Ok(())
    }

    async fn settle_one(&mut self, network: IpNetwork) -> Result<(), ApiError> {
        let name = self.space.block_name(network);
        let object = self.shared.client.block(&name).await?;
        let me = self.shared.me.borrow().clone();
        match (object, me) {
            (Some(object), Some(me)) => Box::pin(self.decide(object, &me)).await,
            // Not known yet.
            (Some(_), None) => {}
            (None, _) => self.missing(network).await,
        }
        Ok(())
    }

    /// The API has no object of a block: it was deleted, the cluster's data were restored from a
    /// backup, or a creation failed. Leases that are there may be in use, so a block that has some
    /// is claimed again before another node gives their addresses.
    async fn missing(&mut self, network: IpNetwork) {
        let grant = self.grant_on_disk(network);
        let Some(grant) = grant.filter(|_| !self.is_empty_now(network)) else {
            return self.lose(network, "the API no longer has it", None);
        };
        if let Some(own) = self.blocks.own.remove(&network) {
            self.note_removed(own.object.metadata.uid, None);
        }
        // A failure leaves the grant: the next tick tries again.
        self.claim_orphan(&grant).await;
    }

    /// An object was removed, or is another node's: the event does not say which.
    pub(super) async fn gone(&mut self, network: IpNetwork, version: String) {
        if self.is_empty_now(network) {
            let why = "the API no longer has it as this node's";
            return self.lose(network, why, Some(version));
        }
        // Until the object was read, which is tried again: its leases keep their block.
        self.doubt(network, Doubt::Whose);
        if let Err(error) = self.settle_one(network).await {
            tracing::warn!(
                space = %self.space, block = %network, %error,
                "cannot read whose a block is that has leases of this node; trying again"
            );
        }
    }

    /// [`Worker::revoke_if_empty`]; a block of which that cannot be done is kept.
    fn is_empty_now(&mut self, network: IpNetwork) -> bool {
        self.revoke_if_empty(network).unwrap_or_else(|error| {
            tracing::warn!(space = %self.space, block = %network, %error, "cannot read the leases of a block");
            false
        })
    }

    /// The block is not this node's.
    /// `until` is the `resourceVersion` of its object, by which that was seen.
    pub(super) fn lose(&mut self, network: IpNetwork, why: &str, until: Option<String>) {
        if let Some(own) = self.blocks.own.remove(&network) {
            self.note_removed(own.object.metadata.uid, until);
        }
        if let Some(before) = &mut self.before {
            before.unsettle(network);
        }
        self.withdraw(network, why);
    }

    /// Gives no further address of a block. Leases in it are in conflict from now on.
    pub(super) fn withdraw(&mut self, network: IpNetwork, why: &str) {
        let was_granted = self.grants.has_block(network);
        if let Err(error) = self.grants.revoke(network) {
            tracing::error!(
                space = %self.space, block = %network, %error,
                "the node lost a block, and that cannot be written: ADDs still give its addresses"
            );
        }
        if !was_granted {
            return;
        }
        let leases = self.leases_in(network);
        if leases.is_empty() {
            tracing::warn!(space = %self.space, block = %network, why, "the node lost a block that it had no lease in");
            return;
        }
        tracing::error!(
            space = %self.space, block = %network, why, leases = leases.join("; "),
            "the node lost a block with leases in it: another node may give these addresses to pods; let the \
             pods that have them here end"
        );
        self.blocks.lost.insert(network, leases.len());
        self.shared.metrics.borrow_mut().lost_blocks += 1;
    }

    /// An administrator took a block from this node: no further address of it is given. Its object rests
    /// for the cool-down, and is anybody's then.
    pub(super) fn obey(&mut self, block: &BlockObject) {
        let network = block.spec.block;
        // An object that rests is read again and again.
        if !self.blocks.own.contains_key(&network) && !self.grants.has_block(network) {
            return;
        }
        let until = Some(block.metadata.resource_version.clone());
        let why = "an administrator took it from this node";
        self.lose(network, why, until);
    }

    fn note_removed(&mut self, uid: String, until: Option<String>) {
        // A creation without an answer has none.
        if !uid.is_empty() {
            let at = Instant::now();
            self.blocks.removed.push_back(Removed { at, uid, until });
        }
    }

    /// The leases of a block and what cools down in it, for people; a store that cannot be read may have some.
    fn leases_in(&self, network: IpNetwork) -> Vec<String> {
        let leases = self.read_leases_in(network);
        leases.unwrap_or_else(|error| vec![error.to_string()])
    }

    fn read_leases_in(&self, network: IpNetwork) -> Result<Vec<String>, StoreError> {
        let named = |store: &Store| -> Result<Vec<String>, StoreError> {
            let used = store.block_use(self.space.network_name.as_deref(), network)?;
            let mut leases = Vec::new();
            if used.cooling_down > 0 {
                leases.push(format!("{} addresses that cool down", used.cooling_down));
            }
            for address in used.held {
                let entries = match leases.len() < MOST_NAMED {
                    true => store.entries_at(address)?,
                    false => Vec::new(),
                };
                let lease = entries
                    .into_iter()
                    .filter(|entry| entry.freed.is_none())
                    .filter(|entry| entry.network_name == self.space.network_name)
                    .find_map(|entry| entry.record.ok());
                leases.push(match lease {
                    Some(lease) => format!("{address} of {}", lease.holder),
                    None => address.to_string(),
                });
            }
            Ok(leases)
        };
        self.open_store()?.as_ref().map_or(Ok(Vec::new()), named)
    }

    /// An object of this machine under its previous UID gets the new one.
    pub(super) async fn renew(&mut self, block: BlockObject, me: &NodeId) {
        let network = block.spec.block;
        let spec = json!({
            "nodeUID": me.uid,
            "epoch": block.spec.epoch.saturating_add(1),
            "over": null,
        });
        let client = &self.shared.client;
        match client.change::<BlockObject>(&block.metadata, spec).await {
            Ok(Changed::Done(renewed)) => {
                tracing::info!(space = %self.space, block = %network, "the block's object has a new version of this node");
                self.blocks.own.insert(network, Own::new(renewed.clone()));
                self.keep(renewed);
            }
            Ok(Changed::Conflict | Changed::Gone) | Err(_) => {
                // Whoever has it now; a grant stays until that is known.
                self.blocks.own.insert(network, Own::in_doubt(block));
            }
        }
    }

    /// Blocks of this node that have a UID which it no longer has.
    pub(super) async fn renew_all(&mut self) {
        let Some(me) = self.shared.me.borrow().clone() else {
            return;
        };
        let own = self.blocks.own.values().filter(|own| own.doubt.is_none());
        let objects = own.map(|own| own.object.clone());
        let before: Vec<BlockObject> = objects.filter(|object| object.node() != me).collect();
        for block in before {
            Box::pin(self.changed(block)).await;
        }
    }

    /// Somebody marked that this node is gone, and it is there.
    pub(super) async fn deny_end(&mut self, block: BlockObject) {
        let state = match self.shared.node_state(&self.shared.name).await {
            Ok(state) => state,
            Err(error) => {
                tracing::warn!(space = %self.space, %error, "cannot read this node's object");
                return self.keep(block);
            }
        };
        let node = block.node();
        if state.is_anew(&node) {
            self.keep(block.clone());
            return match self.shared.read_me().await {
                Ok(now) if now != node => self.renew(block, &now).await,
                _ => {}
            };
        }
        match state.end_of(&node) {
            None => {
                let client = &self.shared.client;
                let changed = client.change(&block.metadata, json!({"over": null})).await;
                match changed {
                    Ok(Changed::Done(object)) => self.keep(object),
                    // A newer event is on its way, or this one comes again with the next list.
                    Ok(_) => self.keep(block),
                    Err(error) => {
                        tracing::warn!(space = %self.space, %error, "cannot take the mark off a block of this node");
                        self.keep(block);
                    }
                }
            }
            Some(why) => {
                tracing::warn!(space = %self.space, block = %block.spec.block, why, "a block of this node is over");
                self.keep(block);
            }
        }
    }

    /// The same again for blocks whose mark stayed, because this node was out of service when it was
    /// made: an old mark would let the block go without a rest.
    pub(super) async fn deny_ends(&mut self) {
        if self.pace.deny_at > Instant::now() {
            return;
        }
        let marked: Vec<BlockObject> = self
            .blocks
            .own
            .values()
            .filter(|own| own.doubt.is_none() && own.object.spec.over.is_some())
            .map(|own| own.object.clone())
            .collect();
        if !marked.is_empty() {
            self.pace.deny_at = Instant::now() + self.shared.timing.retry;
        }
        for block in marked {
            Box::pin(self.deny_end(block)).await;
        }
    }

    /// A block of this node's name under another UID, without a grant here. Leases in the local store
    /// show that it was this machine's, whose grants are lost: it stays. Otherwise it was another
    /// machine's ([`Self::return_foreign`]). One that an administrator took goes, whatever is in it.
    pub(super) async fn keep_or_return(&mut self, block: BlockObject, me: &NodeId) {
        let network = block.spec.block;
        let over = block.spec.over.as_ref();
        let is_taken = over.is_some_and(|over| over.administrator);
        match self.read_leases_in(network) {
            Ok(leases) if leases.is_empty() || is_taken => {
                self.blocks.foreign.insert(network, block);
            }
            Ok(_) => {
                self.blocks.foreign.remove(&network);
                self.renew(block, me).await;
            }
            Err(error) => {
                tracing::warn!(
                    space = %self.space, block = %network, %error,
                    "cannot read whether this node has leases in a block of its name; trying again"
                );
                self.blocks.unread.push(block);
            }
        }
    }

    /// Blocks of another machine that had this node's name are those of a node that is gone: they rest,
    /// and go.
    pub(super) async fn return_foreign(&mut self) -> Result<(), GiveError> {
        if self.blocks.foreign.is_empty() {
            return Ok(());
        }
        let state = self.shared.node_state(&self.shared.name).await?;
        let blocks: Vec<BlockObject> = self.blocks.foreign.values().cloned().collect();
        for block in blocks {
            let network = block.spec.block;
            let node = block.node();
            let replaced = state.is_anew(&node).then_some(NodeState::Replaced);
            let state = replaced.as_ref().unwrap_or(&state);
            match self.shared.judge(&block, &node, state) {
                Claim::Mark(why) => self.shared.mark_over(&block, &why).await?,
                Claim::Take => {
                    self.shared
                        .client
                        .delete::<BlockObject>(&block.metadata)
                        .await?;
                    self.blocks.foreign.remove(&network);
                }
                Claim::Held | Claim::Rests(_) | Claim::Unmark => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::net::IpAddr;
    use std::path::Path;
    use std::rc::Rc;

    use ipam::block::AddressSpace;
    use ipam::grants::{Grant, Grants, MAX_BLOCKS};
    use ipam::lease::Holder;
    use ipam::range::{Range, Spec};
    use ipam::store::{Order, Part, Space};
    use node::identity::NodeIdentity;
    use node::policy::{BlockLength, Policy, Profile, StoreBounds, StoreKind, StorePolicy};
    use node_wire::FailureKind;

    use super::*;
    use crate::api::document::RangeSpec;
    use crate::api::{Client, Endpoint, RangeObject, Transport};
    use crate::metrics::Metrics;
    use crate::space::{BlockStore, Shared, Timing};

    /// A node with one block, whose API does not answer.
    fn worker(place: &Path) -> Worker {
        std::fs::create_dir_all(place.join("leases")).unwrap();
        let blocks = BlockLength::default();
        let store = StorePolicy {
            directory: place.join("leases"),
            kind: StoreKind::Kubernetes {
                blocks,
                static_networks: Vec::new(),
                after: None,
            },
            bounds: StoreBounds::default(),
        };
        let policy = Policy {
            node: Some("n1".into()),
            state_dir: place.join("state"),
            stores: BTreeMap::from([("default".to_owned(), store)]),
            ..Policy::default()
        };
        let endpoint = Endpoint {
            base: "http://127.0.0.1:1".parse().unwrap(),
            namespace: None,
            authorities: Vec::new(),
            certificate: None,
            token: None,
        };
        let me = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let shared = Shared {
            client: Client::new(Transport::new(endpoint).unwrap(), "test"),
            policy,
            root: "/".into(),
            name: "n1".into(),
            me: RefCell::new(Some(me.clone())),
            nodes: RefCell::default(),
            marks: RefCell::default(),
            timing: Timing::default(),
            metrics: RefCell::new(Metrics::new()),
        };
        let space = AddressSpace::new("default", None);
        let store = BlockStore {
            length: blocks,
            static_networks: Vec::new(),
            before: None,
        };
        let mut worker = Worker::new(Rc::new(shared), space.clone(), store).unwrap();
        let now = jiff::Timestamp::now();
        let mut object = BlockObject::new(&space, block(), &me, 1, now);
        object.metadata.uid = "o1".into();
        worker.keep(object);
        worker
    }

    /// As after reading that a range is cut into blocks of 16.
    fn agree(worker: &mut Worker, range: &str) {
        agree_on(worker, range, 28);
    }

    fn agree_on(worker: &mut Worker, range: &str, prefix: u8) {
        let mut spec = RangeSpec::new(&worker.space, range.parse().unwrap(), prefix, &[]);
        spec.confirmed = true;
        let ranges = vec![RangeObject::new(spec)];
        worker.grids = Some((Instant::now(), Rc::new(ranges)));
    }

    fn block() -> IpNetwork {
        "10.0.0.0/28".parse().unwrap()
    }

    fn granted(worker: &Worker) -> Vec<Grant> {
        Grants::read(worker.grants.directory(), &worker.space)
            .unwrap()
            .blocks
    }

    fn store(worker: &Worker) -> Store {
        let node = NodeIdentity::read(Path::new("/"), "n1").unwrap();
        Store::open(&worker.shared.policy, "default", node, Path::new("/")).unwrap()
    }

    fn lease(worker: &Worker) {
        let store = store(worker);
        let boot = store.node().boot.clone();
        let spec = Spec {
            range: "10.0.0.0/24",
            ..Spec::default()
        };
        let part = Part {
            interface: None,
            range: Range::new(&spec, Profile::Strict).unwrap(),
            space: Space {
                network_name: None,
                overlapping: true,
            },
            like: None,
            requested: None,
        };
        let holder = Holder {
            network: "rail".into(),
            pod: None,
            container: "c1".into(),
            interface: "net1".into(),
            node: "n1".into(),
            machine: String::new(),
            boot,
            netns: None,
            netns_inode: None,
            device: None,
        };
        let order = Order {
            holder,
            profile: Profile::Strict,
            parts: vec![part],
        };
        store.take(&order).unwrap();
    }

    #[tokio::test]
    async fn a_lease_that_came_after_the_decision_keeps_the_block() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        worker.refresh(None).unwrap();
        assert!(worker.own_blocks().iter().all(|own| own.block == block()));
        lease(&worker);
        worker.give_back(block()).await.unwrap();
        assert_eq!(granted(&worker).len(), 1);
        assert!(
            worker.shared.client.transport().requests().is_empty(),
            "nothing was removed"
        );
        assert_eq!(worker.blocks.own[&block()].empty_since, None);
    }

    #[tokio::test]
    async fn a_block_is_not_given_back_while_an_address_cools_down() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        worker.refresh(None).unwrap();
        lease(&worker);
        store(&worker).give_back("c1", "net1", "rail").unwrap();
        worker.give_back(block()).await.unwrap();
        assert_eq!(granted(&worker).len(), 1);
        assert!(worker.shared.client.transport().requests().is_empty());
    }

    #[tokio::test]
    async fn a_grant_whose_write_failed_half_way_is_revoked_on_disk() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        let object = worker.blocks.own[&block()].object.clone();
        worker.grants.revoke(block()).unwrap();
        let file = worker
            .grants
            .directory()
            .join(worker.space.directory_name());
        // As where the directory cannot be synced after the rename.
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir_all(file.join("full")).unwrap();
        worker.grant(block()).unwrap_err();
        std::fs::remove_dir_all(&file).unwrap();
        let mut there = worker.grants.noted.clone();
        there.blocks.push(Own::new(object).grant(Vec::new()));
        there
            .write(worker.grants.directory(), &worker.space)
            .unwrap();
        worker.grants.revoke(block()).unwrap();
        assert_eq!(granted(&worker), []);
    }

    #[tokio::test]
    async fn a_block_that_contradicts_its_range_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        lease(&worker);
        let object = worker.blocks.own[&block()].object.clone();
        agree_on(&mut worker, "10.0.0.0/16", 27);
        worker.check_grants().await.unwrap();
        assert_eq!(granted(&worker), []);
        assert_eq!(
            worker.blocks.lost[&block()],
            1,
            "its leases are in conflict"
        );
        worker.changed(object.clone()).await;
        worker.all_listed(vec![object]).await;
        worker.grant_all().unwrap();
        assert_eq!(granted(&worker), []);
        // An administrator corrected the range.
        agree(&mut worker, "10.0.0.0/16");
        worker.grant_all().unwrap();
        assert_eq!(granted(&worker).len(), 1);
    }

    #[tokio::test]
    async fn a_range_that_disagrees_with_its_own_takes_no_block_out_of_use() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        lease(&worker);
        agree(&mut worker, "10.0.0.0/24");
        let own = worker.grids.clone().unwrap().1;
        agree_on(&mut worker, "10.0.0.0/16", 27);
        let (_, ranges) = worker.grids.as_mut().unwrap();
        *ranges = own
            .iter()
            .chain(ranges.iter())
            .cloned()
            .collect::<Vec<_>>()
            .into();
        worker.check_grants().await.unwrap();
        assert_eq!(granted(&worker).len(), 1);
        assert!(worker.blocks.lost.is_empty());
    }

    #[tokio::test]
    async fn a_block_in_doubt_is_not_answered_as_granted() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        agree(&mut worker, "10.0.0.0/24");
        let address: IpAddr = "10.0.0.5".parse().unwrap();
        let range = Range::whole("10.0.0.0/24".parse().unwrap());
        let late = Instant::now() + Timing::default().question;
        let granted = worker.claim_address(&range, address, false, late).await;
        assert_eq!(granted.unwrap(), block());
        worker.grants.revoke(block()).unwrap();
        worker.doubt(block(), Doubt::Whose);
        let doubted = worker.claim_address(&range, address, false, late).await;
        assert_eq!(doubted.unwrap_err().kind, FailureKind::ClusterUnavailable);
    }

    #[tokio::test]
    async fn a_block_whose_removal_has_no_answer_is_not_granted_until_there_is_one() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        worker.give_back(block()).await.unwrap_err();
        assert_eq!(granted(&worker), []);
        assert_eq!(worker.blocks.own[&block()].doubt, Some(Doubt::Removed));
        // An event from before, or the next list, does not change that.
        let object = worker.blocks.own[&block()].object.clone();
        worker.changed(object.clone()).await;
        worker.all_listed(vec![object]).await;
        assert_eq!(granted(&worker), []);
        assert_eq!(worker.blocks.own[&block()].doubt, Some(Doubt::Removed));
    }

    #[tokio::test]
    async fn late_news_of_a_block_that_was_given_back_is_not_believed() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        let object = worker.blocks.own[&block()].object.clone();
        worker.note_removed(object.metadata.uid.clone(), None);
        worker.blocks.own.remove(&block());
        worker.grants.revoke(block()).unwrap();
        worker.changed(object.clone()).await;
        assert_eq!(granted(&worker), []);
        // The same block under another object was claimed anew.
        agree(&mut worker, "10.0.0.0/24");
        let mut anew = object;
        anew.metadata.uid = "o2".into();
        worker.blocks.own.insert(block(), Own::new(anew.clone()));
        worker.changed(anew).await;
        assert_eq!(granted(&worker).len(), 1);
    }

    #[tokio::test]
    async fn a_foreign_block_is_neither_kept_nor_returned_while_the_store_cannot_be_read() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        let me = worker.shared.me.borrow().clone().unwrap();
        lease(&worker);
        std::fs::write(place.path().join("leases/FORMAT"), "of another program").unwrap();
        assert!(worker.open_store().is_err());
        let other = NodeId {
            name: "n1".into(),
            uid: "u0".into(),
        };
        let network = "10.0.0.16/28".parse().unwrap();
        let object = BlockObject::new(&worker.space, network, &other, 1, jiff::Timestamp::now());
        worker.keep_or_return(object.clone(), &me).await;
        assert!(worker.blocks.foreign.is_empty() && !worker.blocks.own.contains_key(&network));
        assert_eq!(worker.blocks.unread, [object]);
    }

    #[tokio::test]
    async fn a_node_has_no_more_blocks_than_can_be_noted() {
        let place = tempfile::tempdir().unwrap();
        let mut worker = worker(place.path());
        let me = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        *worker.shared.me.borrow_mut() = Some(me.clone());
        let now = jiff::Timestamp::now();
        for number in 1..u32::try_from(MAX_BLOCKS).unwrap() {
            let address = std::net::Ipv4Addr::from(0x0a01_0000 + number);
            let network = ipam::block::single(address.into());
            let object = BlockObject::new(&worker.space, network, &me, 1, now);
            worker.blocks.own.insert(network, Own::new(object));
        }
        // Noted, but for the file.
        worker.grants.noted.blocks = worker
            .blocks
            .own
            .values()
            .map(|own| own.grant(Vec::new()))
            .collect();
        agree(&mut worker, "10.9.0.0/24");
        let need = node_wire::BlockNeed {
            store: "default".into(),
            network_name: None,
            range: "10.9.0.0/24".into(),
            spans: vec![([10, 9, 0, 1].into(), [10, 9, 0, 254].into())],
            per_node: None,
            address: None,
            single: false,
            count: 1,
        };
        let (reply, answer) = tokio::sync::oneshot::channel();
        let at = Instant::now();
        worker
            .asked
            .push_back(super::super::Asked { need, at, reply });
        worker.serve_group().await;
        let refused = answer.await.unwrap().unwrap_err();
        assert_eq!(refused.kind, FailureKind::Exhausted, "{}", refused.message);
        // And those that are empty go back at once.
        worker.refresh(None).unwrap();
        assert!(worker.own_blocks().iter().all(|own| own.wanted));
    }
}
