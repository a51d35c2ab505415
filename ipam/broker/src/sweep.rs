//! About once an hour one broker of the cluster goes through each address space.
//!
//! - Blocks of nodes that are gone are marked, and removed once they have rested
//!   ([`crate::decide::standing`]), by the same broker.
//! - A range that had no block for an hour is removed once it has rested, too: any author of a network
//!   can name a new one. A claim takes the note of emptiness off before it makes a block, and believes
//!   what it read of the range for [`Timing::agreed`], which is less than the rest.
//!
//! The hour of a range begins anew with the note of who sweeps it, on the condition that nobody else
//! noted that; with it the blocks of its whole space are swept. Killed on its way, a sweep leaves the
//! rest to the next one.
//!
//! [`Timing::agreed`]: crate::space::Timing::agreed

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ipam::block::{AddressSpace, overlap};
use ipnetwork::IpNetwork;
use jiff::{SignedDuration, Timestamp};
use node::random::random64;
use serde_json::json;

use crate::api::document::{BlockObject, NodeId, Over};
use crate::api::{ApiError, Changed, RangeObject};
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

/// Sweeps the spaces with a range that nobody swept for long.
async fn round(shared: &Shared) -> Result<(), ApiError> {
    let client = &shared.client;
    let interval = SignedDuration::try_from(shared.timing.sweep).unwrap_or(SignedDuration::MAX);
    let now = Timestamp::now();
    let is_recent = |at: Timestamp| now.duration_since(at).abs() < interval;
    let mut due: Vec<RangeObject> = Vec::new();
    let each = |object: RangeObject| {
        let swept = object.status.as_ref().and_then(|status| status.swept);
        if object.is_well_named() && !swept.is_some_and(is_recent) {
            due.push(object);
        }
    };
    client.ranges(each).await?;
    let mut noted: BTreeMap<AddressSpace, Vec<RangeObject>> = BTreeMap::new();
    for object in due {
        let note = client.note::<RangeObject>(&object.metadata, json!({"swept": now}));
        // Unless another broker is at it.
        if let Changed::Done(object) = note.await? {
            noted.entry(object.spec.space()).or_default().push(object);
        }
    }
    if noted.is_empty() {
        return Ok(());
    }
    let nodes = list_nodes(shared).await?;
    let mut resting: Vec<(AddressSpace, Vec<RangeObject>)> = Vec::new();
    for (space, mut ranges) in noted {
        if try_sweep(shared, &space, &ranges, &nodes).await {
            ranges.retain(|range| range.empty_since().is_some());
            resting.push((space, ranges));
        }
    }
    if !resting.is_empty() {
        // Only who has known a mark for so long removes its object; the next sweep may be another's.
        tokio::time::sleep(shared.timing.rest).await;
        let nodes = list_nodes(shared).await?;
        for (space, ranges) in resting {
            try_sweep(shared, &space, &ranges, &nodes).await;
        }
    }
    Ok(())
}

/// Whether objects of a space rest. One space with an object that cannot be changed does not keep the
/// others from being swept.
async fn try_sweep(
    shared: &Shared,
    space: &AddressSpace,
    ranges: &[RangeObject],
    nodes: &Nodes,
) -> bool {
    let swept = sweep(shared, space, ranges, nodes).await;
    swept.unwrap_or_else(|error| {
        tracing::warn!(%space, %error, "cannot sweep an address space");
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

async fn sweep(
    shared: &Shared,
    space: &AddressSpace,
    ranges: &[RangeObject],
    nodes: &Nodes,
) -> Result<bool, ApiError> {
    let mut due: Vec<(BlockObject, NodeId)> = Vec::new();
    let mut rests = false;
    let mut blocks: Vec<IpNetwork> = Vec::new();
    let each = |block: BlockObject| {
        blocks.push(block.spec.block);
        if !block.is_well_named() {
            return;
        }
        let node = block.node();
        let state = nodes.get(&node.name).unwrap_or(&NodeState::Gone);
        let claim = shared.judge(&block, &node, state);
        rests |= matches!(claim, Claim::Mark(_) | Claim::Rests(_));
        if matches!(claim, Claim::Mark(_) | Claim::Take | Claim::Unmark) && due.len() < MOST_CHANGED
        {
            due.push((block, node));
        }
    };
    shared.client.blocks_of_space(space, each).await?;
    sweep_blocks(shared, space, due).await?;
    for range in ranges {
        let is_empty = !blocks.iter().any(|block| overlap(*block, range.spec.range));
        rests |= sweep_range(shared, range, is_empty, Timestamp::now()).await?;
    }
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
        let state = shared.node_state_once(&node.name, &mut sure).await?;
        match shared.judge(&block, &node, &state) {
            Claim::Mark(why) => {
                shared.mark_over(&block, &why).await?;
                marked += 1;
            }
            Claim::Take => {
                shared.client.delete::<BlockObject>(&block.metadata).await?;
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

/// Notes that a range has no block, or has one again; removes it when it had none for an interval and
/// this broker has known that for the rest. Whether it has to rest.
async fn sweep_range(
    shared: &Shared,
    object: &RangeObject,
    is_empty: bool,
    now: Timestamp,
) -> Result<bool, ApiError> {
    let client = &shared.client;
    let metadata = &object.metadata;
    let interval = SignedDuration::try_from(shared.timing.sweep).unwrap_or(SignedDuration::MAX);
    let note = match (is_empty, object.empty_since()) {
        (true, Some(since)) if now.duration_since(since) >= interval => {
            if shared.known_for(&metadata.uid, since) < shared.timing.rest {
                return Ok(true);
            }
            if let Changed::Done(()) = client.delete::<RangeObject>(metadata).await? {
                tracing::info!(
                    range = metadata.name,
                    "removed an AddressRange without blocks"
                );
            }
            return Ok(false);
        }
        // Also where a clock was ahead.
        (true, since) if since.is_none_or(|since| since > now) => json!({"emptySince": now}),
        (false, Some(_)) => json!({"emptySince": null}),
        _ => return Ok(false),
    };
    client.note::<RangeObject>(metadata, note).await?;
    Ok(false)
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
            .change::<BlockObject>(&block.metadata, spec)
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
            .change::<BlockObject>(block, json!({"over": null}))
            .await
            .map(drop)
    }
}
