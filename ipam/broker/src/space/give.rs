//! Giving a block back, losing one, and finding out what became of one.
//!
//! Giving back has three steps: the grant goes, durably; then the local store is read, and a lease that
//! is there keeps the block; then the object is removed. [`ipam::grants`] has why an ADD cannot cross
//! that. Killed after the first step, the broker finds at its next start an object without a grant,
//! and grants it.

use ipam::store::{Store, StoreError};
use ipnetwork::IpNetwork;
use serde_json::json;
use tokio::time::Instant;

use super::claim::metadata_of;
use super::{Doubt, Own, Worker};
use crate::api::document::{BlockObject, NodeId};
use crate::api::{ApiError, Changed};
use crate::decide::standing::{self, Claim};
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
        let returns = supply::returns(&own, &ranges);
        for network in returns.give_back {
            self.give_back(network).await?;
        }
        for network in returns.unmark {
            let Some(own) = self.own.get(&network) else {
                continue;
            };
            let metadata = own.object.metadata.clone();
            let client = &self.shared.client;
            let changed = client
                .change_block(&metadata, json!({}), json!({"wantedBy": null}))
                .await?;
            if let (Changed::Done(object), Some(own)) = (changed, self.own.get_mut(&network)) {
                own.object = object;
            }
        }
        Ok(())
    }

    async fn give_back(&mut self, network: IpNetwork) -> Result<(), GiveError> {
        self.revoke(network)?;
        let store = self.open_store();
        let name = self.space.network_name.clone();
        let used = store.and_then(|store| match store {
            Some(store) => store
                .block_use(name.as_deref(), network)
                .map(|used| !used.held.is_empty()),
            None => Ok(false),
        });
        match used {
            Ok(false) => {}
            Ok(true) => {
                if let Some(own) = self.own.get_mut(&network) {
                    own.empty_since = None;
                    own.usage = None;
                }
                return Ok(self.grant(network)?);
            }
            Err(error) => {
                self.grant(network)?;
                return Err(error.into());
            }
        }
        self.remove(network).await
    }

    /// Removes the object of a block that is not granted.
    async fn remove(&mut self, network: IpNetwork) -> Result<(), GiveError> {
        let Some(own) = self.own.get_mut(&network) else {
            return Ok(());
        };
        // Until there is an answer.
        own.doubt = Some(Doubt::Removed);
        let metadata = own.object.metadata.clone();
        match self.shared.client.delete_block(&metadata).await {
            Ok(Changed::Done(()) | Changed::Gone) => {
                self.removed.push_back((Instant::now(), metadata.uid));
                self.own.remove(&network);
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
        if let Some(own) = self.own.get_mut(&network) {
            own.doubt = Some(doubt);
        }
    }

    /// Finds out what became of the blocks that are in doubt.
    pub(super) async fn settle(&mut self) -> Result<(), GiveError> {
        let doubts: Vec<(IpNetwork, Doubt)> = self
            .own
            .iter()
            .filter_map(|(network, own)| Some((*network, own.doubt?)))
            .collect();
        for (network, doubt) in doubts {
            match doubt {
                Doubt::Whose => self.settle_one(network).await?,
                Doubt::Removed => Box::pin(self.remove(network)).await?,
            }
        }
        // Where writing failed before.
        let ungranted: Vec<IpNetwork> = self
            .own
            .iter()
            .filter(|(_, own)| own.doubt.is_none() && !self.grants.blocks.contains(&own.grant()))
            .map(|(network, _)| *network)
            .collect();
        for network in ungranted {
            self.grant(network)?;
        }
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
            (Some(object), Some(me)) => match standing::own(&object, &me, &self.grants.blocks) {
                standing::Own::Grant => {
                    self.own.insert(network, Own::new(object.clone()));
                    self.keep(object);
                }
                standing::Own::Renew => Box::pin(self.renew(object, &me)).await,
                standing::Own::Foreign | standing::Own::Not => {
                    let node = object.node().map_or_else(String::new, |node| node.name);
                    self.lose(network, &format!("the API has it as that of node {node:?}"));
                }
            },
            // Not known yet.
            (Some(_), None) => {}
            (None, _) => self.lose(network, "the API no longer has it"),
        }
        Ok(())
    }

    /// The block is not this node's. Leases in it are in conflict from now on.
    pub(super) fn lose(&mut self, network: IpNetwork, why: &str) {
        if let Some(own) = self.own.remove(&network) {
            self.removed
                .push_back((Instant::now(), own.object.metadata.uid));
        }
        let was_granted = self
            .grants
            .blocks
            .iter()
            .any(|grant| grant.block == network);
        if let Err(error) = self.revoke(network) {
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
        self.lost.insert(network, leases.len());
        self.shared.metrics.borrow_mut().lost_blocks += 1;
    }

    /// The leases of a block, for people.
    fn leases_in(&self, network: IpNetwork) -> Vec<String> {
        let named = |store: &Store| -> Result<Vec<String>, StoreError> {
            let held = store
                .block_use(self.space.network_name.as_deref(), network)?
                .held;
            let mut leases = Vec::new();
            for address in held {
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
        match self.open_store() {
            Ok(None) => Vec::new(),
            Ok(Some(store)) => named(&store).unwrap_or_else(|error| vec![error.to_string()]),
            Err(error) => vec![error.to_string()],
        }
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
        match client.change_block(&block.metadata, json!({}), spec).await {
            Ok(Changed::Done(renewed)) => {
                tracing::info!(space = %self.space, block = %network, "the node has a new UID, and its block, too");
                self.own.insert(network, Own::new(renewed.clone()));
                self.keep(renewed);
            }
            Ok(Changed::Conflict | Changed::Gone) | Err(_) => {
                // Whoever has it now; a grant stays until that is known.
                let doubt = Some(Doubt::Whose);
                self.own.insert(
                    network,
                    Own {
                        doubt,
                        ..Own::new(block)
                    },
                );
            }
        }
    }

    /// Somebody marked that this node is gone, and it is there.
    pub(super) async fn deny_end(&mut self, block: BlockObject) {
        let before = self.shared.me.borrow().clone();
        let state = match self.shared.node_state(&self.shared.name).await {
            Ok(state) => state,
            Err(error) => {
                tracing::warn!(space = %self.space, %error, "cannot read this node's object");
                return self.keep(block);
            }
        };
        let Some(node) = block.node() else { return };
        match state.end_of(&node) {
            None => {
                let client = &self.shared.client;
                let changed = client
                    .change_block(&block.metadata, json!({}), json!({"over": null}))
                    .await;
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
                self.keep(block.clone());
                match self.shared.read_me().await {
                    Ok(now) if Some(&now) != before.as_ref() => self.renew(block, &now).await,
                    _ => {}
                }
            }
        }
    }

    /// Blocks of another machine that had this node's name are those of a node that is gone: they rest,
    /// and go.
    pub(super) async fn return_foreign(&mut self) -> Result<(), GiveError> {
        if self.foreign.is_empty() {
            return Ok(());
        }
        let state = self.shared.node_state(&self.shared.name).await?;
        let blocks: Vec<BlockObject> = self.foreign.values().cloned().collect();
        let cooldown = self.shared.policy.ipam.cooldown;
        for block in blocks {
            let network = block.spec.block;
            let Some(node) = block.node() else { continue };
            let now = jiff::Timestamp::now();
            match standing::claim(&block, &node, &state, now, cooldown) {
                Claim::Mark(why) => self.mark_object(block, node, &why).await?,
                Claim::Take => {
                    self.shared.client.delete_block(metadata_of(&block)).await?;
                    self.foreign.remove(&network);
                }
                Claim::Held | Claim::Rests(_) | Claim::Unmark => {}
            }
        }
        Ok(())
    }
}
