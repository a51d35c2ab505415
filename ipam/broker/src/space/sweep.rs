//! Once an hour one broker of the cluster goes through all blocks of a space: those of nodes that are
//! gone are marked, and removed once they have rested.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use node::random::random64;
use serde_json::json;
use tokio::time::Instant;

use super::Worker;
use super::claim::metadata_of;
use crate::api::document::{BlockObject, NodeId};
use crate::api::{ApiError, Changed};
use crate::decide::standing::{self, Claim, NodeState};

/// How often a space is swept.
const SWEEP_SECONDS: i64 = 3600;
/// Blocks that one sweep marks or removes at most; the next one goes on.
const MOST_CHANGED: usize = 256;

/// A while after the start, another one for each node.
pub(super) fn first_wait() -> Duration {
    Duration::from_millis(60_000 + random64() % 240_000)
}

fn next_wait() -> Duration {
    Duration::from_millis(3_000_000 + random64() % 1_200_000)
}

impl Worker {
    /// Sweeps the space, unless another broker did so within the hour.
    pub(super) async fn sweep_if_due(&mut self) -> Result<(), ApiError> {
        if self.sweep_at > Instant::now() {
            return Ok(());
        }
        self.sweep_at = Instant::now() + next_wait();
        let client = &self.shared.client;
        let name = self.space.object_name();
        let Some(space) = client.space(&name).await? else {
            // Made anew by the next claim.
            self.agreed = None;
            return Ok(());
        };
        let swept = space.status.and_then(|status| status.swept);
        let now = Timestamp::now();
        let recent = |swept: Timestamp| {
            now.duration_since(swept).abs() < SignedDuration::from_secs(SWEEP_SECONDS)
        };
        if swept.is_some_and(recent) {
            return Ok(());
        }
        match client
            .note_in_space(&space.metadata, json!({"swept": now}))
            .await?
        {
            Changed::Done(_) => self.sweep().await,
            // Another broker is at it.
            Changed::Conflict | Changed::Gone => Ok(()),
        }
    }

    async fn sweep(&mut self) -> Result<(), ApiError> {
        let client = self.shared.client.clone();
        let mut states: BTreeMap<String, NodeState> = BTreeMap::new();
        let each = |node: crate::api::NodeObject| {
            let state = NodeState::of(Some(&node));
            states.insert(node.metadata.name, state);
        };
        client.nodes(each).await?;
        let cooldown = self.shared.policy.ipam.cooldown;
        let now = Timestamp::now();
        let judge = |block: &BlockObject, node: &NodeId, state: &NodeState| {
            standing::claim(block, node, state, now, cooldown)
        };
        let mut due: Vec<(BlockObject, NodeId)> = Vec::new();
        let each = |block: BlockObject| {
            let Some(node) = block.node().filter(|_| block.is_well_named()) else {
                return;
            };
            let state = states.get(&node.name).unwrap_or(&NodeState::Gone);
            let judged = judge(&block, &node, state);
            if matches!(judged, Claim::Mark(_) | Claim::Take | Claim::Unmark)
                && due.len() < MOST_CHANGED
            {
                due.push((block, node));
            }
        };
        client.blocks_of_space(&self.space, each).await?;
        let (mut marked, mut removed) = (0usize, 0usize);
        let mut sure: BTreeMap<String, NodeState> = BTreeMap::new();
        for (block, node) in due {
            // The list is some seconds old; a node may have come.
            let state = match sure.get(&node.name) {
                Some(state) => state.clone(),
                None => {
                    let state = self.shared.node_state(&node.name).await?;
                    sure.insert(node.name.clone(), state.clone());
                    state
                }
            };
            match judge(&block, &node, &state) {
                Claim::Mark(why) => {
                    self.mark_object(block, node, &why).await?;
                    marked += 1;
                }
                Claim::Take => {
                    client.delete_block(metadata_of(&block)).await?;
                    removed += 1;
                }
                Claim::Unmark => self.unmark(metadata_of(&block)).await?,
                Claim::Held | Claim::Rests(_) => {}
            }
        }
        tracing::info!(
            space = %self.space, marked, removed,
            "went through the blocks of nodes that are gone"
        );
        Ok(())
    }
}
