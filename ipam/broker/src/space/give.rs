//! Giving a block back, losing one, and finding out what became of one.
//!
//! Giving back has three steps: the grant goes, durably; then the local store is read, and a lease that
//! is there keeps the block; then the object is removed. [`crate::grants`] has why an ADD cannot cross
//! that. Killed after the first step, the broker finds at its next start an object without a grant.
//! The removal may still be on its way, so the object gets a new version before it is granted.
//! Leases in a block whose grant was gone at a kill get their block again by [`super::adopt`].

use crate::grants::Grant;
use ipam::leases::LeaseError;

use crate::leases::SpaceLeases;
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
    Store(#[from] LeaseError),
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
    /// revoking takes the lock of the leases, so an ADD that leased in the block has ended then.
    fn revoke_if_empty(&mut self, network: IpNetwork) -> Result<bool, GiveError> {
        let grant = self.grant_on_disk(network);
        self.grants.revoke(network)?;
        let leases = self.read_leases_in(network);
        if leases.as_ref().is_ok_and(Vec::is_empty) {
            return Ok(true);
        }
        if let Some(grant) = grant {
            self.grants.add(vec![grant])?;
        }
        Ok(leases.map(|_| false)?)
    }

    pub(super) fn grant_on_disk(&self, network: IpNetwork) -> Option<Grant> {
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

    fn read_leases_in(&self, network: IpNetwork) -> Result<Vec<String>, LeaseError> {
        let named = |store: &SpaceLeases| -> Result<Vec<String>, LeaseError> {
            let used = store.block_use(network)?;
            let mut leases = Vec::new();
            if used.cooling_down > 0 {
                leases.push(format!("{} addresses that cool down", used.cooling_down));
            }
            let listed = match used.held.is_empty() {
                true => Vec::new(),
                false => store.list()?,
            };
            for address in used.held {
                let mut listed = listed.iter().take(match leases.len() < MOST_NAMED {
                    true => usize::MAX,
                    false => 0,
                });
                let lease = listed.find(|lease| lease.address == address);
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

    /// Clears the mark that this node is gone, whose Node exists.
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
        let is_taken = block.taken().is_some();
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
mod tests;
