//! About once an hour one broker of the cluster goes through each address space.
//!
//! - Blocks of nodes that are gone are marked, and removed once they have rested
//!   ([`crate::decide::standing`]), by the same broker.
//! - Split cells without single addresses become free ([`split`]).
//! - A space that had no block for an hour is removed: any author of a network can name a new one. A
//!   claim takes the note of emptiness off before it makes a block, and believes what it read of the
//!   space for [`Timing::agreed`], which is far less than an hour.
//!
//! The hour of a space begins anew with the note of who sweeps it, on the condition that nobody else
//! noted that. Killed on its way, a sweep leaves the rest to the next one.
//!
//! [`Timing::agreed`]: crate::space::Timing::agreed

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ipam::block::AddressSpace;
use jiff::{SignedDuration, Timestamp};
use node::random::random64;
use serde_json::json;

use crate::api::document::{BlockObject, NodeId, Over};
use crate::api::{ApiError, Changed, SpaceObject};
use crate::decide::split::{CellStep, SplitCells};
use crate::decide::standing::{Claim, NodeState};
use crate::space::Shared;

/// Objects that one sweep of a space marks or removes at most; the next one goes on.
const MOST_CHANGED: usize = 256;

/// Nodes of the cluster by name, as listed once.
type Nodes = BTreeMap<String, NodeState>;

/// Serves until it is dropped.
pub(crate) async fn run(shared: Rc<Shared>) {
    let interval = shared.timing.sweep;
    // Brokers that start together do not sweep together.
    let mut wait = interval / 60 + part_of(interval / 15);
    loop {
        tokio::time::sleep(wait).await;
        wait = interval * 5 / 6 + part_of(interval / 3);
        if let Err(error) = round(&shared).await {
            tracing::warn!(%error, "cannot go through the blocks of nodes that are gone");
        }
    }
}

fn part_of(duration: Duration) -> Duration {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(random64() % millis.max(1))
}

/// Sweeps the spaces that nobody swept for long.
async fn round(shared: &Shared) -> Result<(), ApiError> {
    let client = &shared.client;
    let interval = SignedDuration::try_from(shared.timing.sweep).unwrap_or(SignedDuration::MAX);
    let now = Timestamp::now();
    let is_recent = |at: Timestamp| now.duration_since(at).abs() < interval;
    let mut due: Vec<SpaceObject> = Vec::new();
    let each = |object: SpaceObject| {
        let is_ours = object.metadata.name == object.space().object_name();
        let swept = object.status.as_ref().and_then(|status| status.swept);
        if is_ours && !swept.is_some_and(is_recent) {
            due.push(object);
        }
    };
    client.spaces(each).await?;
    let mut nodes: Option<Nodes> = None;
    let mut resting: Vec<SpaceObject> = Vec::new();
    for object in due {
        let noted = client
            .note_in_space(&object.metadata, json!({"swept": now}))
            .await?;
        let Changed::Done(object) = noted else {
            // Another broker is at it.
            continue;
        };
        if nodes.is_none() {
            nodes = Some(list_nodes(shared).await?);
        }
        if let Some(nodes) = &nodes
            && try_sweep(shared, &object, nodes).await
        {
            resting.push(object);
        }
    }
    if !resting.is_empty() {
        // Only who has known a mark for so long removes its block; the next sweep may be another's.
        tokio::time::sleep(shared.timing.rest).await;
        let nodes = list_nodes(shared).await?;
        for object in resting {
            try_sweep(shared, &object, &nodes).await;
        }
    }
    Ok(())
}

/// Whether blocks of a space rest. One space with an object that cannot be changed does not keep the
/// others from being swept.
async fn try_sweep(shared: &Shared, object: &SpaceObject, nodes: &Nodes) -> bool {
    sweep(shared, object, nodes).await.unwrap_or_else(|error| {
        tracing::warn!(space = %object.space(), %error, "cannot sweep an address space");
        false
    })
}

async fn list_nodes(shared: &Shared) -> Result<Nodes, ApiError> {
    let mut nodes = Nodes::new();
    let each = |node: crate::api::NodeObject| {
        let state = NodeState::of(Some(&node));
        nodes.insert(node.metadata.name, state);
    };
    shared.client.nodes(each).await?;
    Ok(nodes)
}

async fn sweep(shared: &Shared, object: &SpaceObject, nodes: &Nodes) -> Result<bool, ApiError> {
    let space = object.space();
    let mut due: Vec<(BlockObject, NodeId)> = Vec::new();
    let mut rests = false;
    let mut cells = SplitCells::default();
    let mut is_empty = true;
    let each = |block: BlockObject| {
        is_empty = false;
        cells.note(&block);
        let Some(node) = block.node().filter(|_| block.is_well_named()) else {
            return;
        };
        let state = nodes.get(&node.name).unwrap_or(&NodeState::Gone);
        let claim = shared.judge(&block, &node, state);
        rests |= matches!(claim, Claim::Mark(_) | Claim::Rests(_));
        if matches!(claim, Claim::Mark(_) | Claim::Take | Claim::Unmark) && due.len() < MOST_CHANGED
        {
            due.push((block, node));
        }
    };
    shared.client.blocks_of_space(&space, each).await?;
    sweep_blocks(shared, &space, due).await?;
    for (cell, step) in cells.steps().take(MOST_CHANGED) {
        shared.step_cell(cell, step).await?;
    }
    sweep_space(shared, object, is_empty, Timestamp::now()).await?;
    Ok(rests)
}

async fn sweep_blocks(
    shared: &Shared,
    space: &AddressSpace,
    due: Vec<(BlockObject, NodeId)>,
) -> Result<(), ApiError> {
    let (mut marked, mut removed) = (0usize, 0usize);
    let mut sure = Nodes::new();
    for (block, node) in due {
        // The list is some seconds old; a node may have come.
        let state = match sure.get(&node.name) {
            Some(state) => state.clone(),
            None => {
                let state = shared.node_state(&node.name).await?;
                sure.insert(node.name.clone(), state.clone());
                state
            }
        };
        match shared.judge(&block, &node, &state) {
            Claim::Mark(why) => {
                shared.mark_over(&block, &why).await?;
                marked += 1;
            }
            Claim::Take => {
                shared.client.delete_block(&block.metadata).await?;
                removed += 1;
            }
            Claim::Unmark => shared.unmark(&block.metadata).await?,
            Claim::Held | Claim::Rests(_) => {}
        }
    }
    if marked + removed > 0 {
        tracing::info!(%space, marked, deleted = removed, "orphaned blocks");
    }
    Ok(())
}

/// Notes that a space has no block, or has one again; removes it when it had none for an interval.
async fn sweep_space(
    shared: &Shared,
    object: &SpaceObject,
    is_empty: bool,
    now: Timestamp,
) -> Result<(), ApiError> {
    let client = &shared.client;
    let metadata = &object.metadata;
    let since = object.status.as_ref().and_then(|status| status.empty_since);
    let interval = SignedDuration::try_from(shared.timing.sweep).unwrap_or(SignedDuration::MAX);
    match (is_empty, since) {
        (true, Some(since)) if now.duration_since(since) >= interval => {
            if let Changed::Done(()) = client.delete_space(metadata).await? {
                tracing::info!(space = %object.space(), "removed an address space without blocks");
            }
        }
        (true, None) => {
            let note = json!({"emptySince": now});
            client.note_in_space(metadata, note).await?;
        }
        // A clock that was ahead.
        (true, Some(since)) if since > now => {
            let note = json!({"emptySince": now});
            client.note_in_space(metadata, note).await?;
        }
        (false, Some(_)) => {
            let note = json!({"emptySince": null});
            client.note_in_space(metadata, note).await?;
        }
        (true, Some(_)) | (false, None) => {}
    }
    Ok(())
}

impl Shared {
    /// Marks that a block's node is gone. Another node may have done so.
    pub(crate) async fn mark_over(&self, block: &BlockObject, why: &str) -> Result<(), ApiError> {
        let over = Over {
            since: Timestamp::now(),
            by: self.name.clone(),
            why: why.to_owned(),
            administrator: false,
        };
        tracing::info!(
            space = %block.space(), block = %block.spec.block, why,
            "a block is over and rests"
        );
        let spec = json!({"over": over});
        self.client
            .change_block(&block.metadata, json!({}), spec)
            .await
            .map(drop)
    }

    /// Takes the mark off a block whose node is there again. An old mark would let the block go
    /// without a rest the next time.
    pub(crate) async fn unmark(
        &self,
        block: &crate::api::document::Metadata,
    ) -> Result<(), ApiError> {
        self.client
            .change_block(block, json!({}), json!({"over": null}))
            .await
            .map(drop)
    }

    /// Takes a split cell one step towards being a block, or back.
    pub(crate) async fn step_cell(
        &self,
        cell: &BlockObject,
        step: CellStep,
    ) -> Result<(), ApiError> {
        match step {
            CellStep::Close => {
                self.mark_over(cell, "no single address of the cell is in use")
                    .await
            }
            CellStep::Open => self.unmark(&cell.metadata).await,
            CellStep::Remove => {
                let removed = self.client.delete_block(&cell.metadata).await?;
                if removed == Changed::Done(()) {
                    tracing::info!(
                        space = %cell.space(), cell = %cell.spec.block,
                        "a cell is no longer split into single addresses"
                    );
                }
                Ok(())
            }
        }
    }
}
