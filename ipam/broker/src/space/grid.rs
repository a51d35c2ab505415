//! How a range is cut into blocks: its object in the API says it, which the first use of the range makes.
//!
//! # Why two ranges that disagree are never both confirmed
//! Blocks are claimed in confirmed ranges only. A range is confirmed after a list of all ranges that has
//! it, unconfirmed, and none that disagrees with it, on the condition that it was not changed since (UID
//! and `resourceVersion`). A list is of one moment, not before its request. Let R and S disagree, and let
//! R's list be the earlier one. R was there from that list until it was confirmed, and from then until it
//! was removed: S's list has R, and S is not confirmed, or R is gone. Who does which step, how late, and
//! who is killed does not matter. Both may lose: whoever finds an unconfirmed range in the way removes it
//! with its own, and the next ADDs try again. A confirmed range goes when it had no block for an hour
//! ([`crate::sweep`]), or by an administrator.

use std::rc::Rc;

use ipam::block::{Blocks, overlap};
use ipnetwork::IpNetwork;
use node_wire::{Failure, FailureKind, PerNode};
use serde_json::json;
use tokio::time::Instant;

use super::{CONTRADICTS, MOST_READ, Worker};
use crate::api::document::RangeSpec;
use crate::api::{ApiError, BlockObject, RangeObject};
use ipam::range::Range;

impl Worker {
    /// How a range is cut. Creates and confirms its object if need be, and removes the note that it has
    /// no block: a sweep deletes an object with that note only if the object has not changed since.
    pub(super) async fn grid(&mut self, range: &Range) -> Result<RangeSpec, Failure> {
        if let Some((read, ranges)) = &self.grids
            && read.elapsed() < self.shared.timing.agreed
            && let Some(spec) = in_force(ranges, range.subnet())
            && spec.per_node == range.per_node()
        {
            return Ok(spec.clone());
        }
        let client = self.shared.client.clone();
        for _ in 0..MOST_READ {
            let ranges = self.read_ranges().await?;
            let own = ranges.iter().find(|one| one.spec.range == range.subnet());
            if let Some(object) = own.filter(|own| !own.spec.is_consistent()) {
                return Err(inconsistent(object));
            }
            if let Some(own) = own.filter(|own| own.spec.per_node != range.per_node()) {
                if own.spec.confirmed {
                    return Err(divided_otherwise(own, range));
                }
                client.delete::<RangeObject>(&own.metadata).await?;
                return Err(first_uses_differ(range));
            }
            if let Some(spec) = in_force(&ranges, range.subnet()) {
                return Ok(spec.clone());
            }
            let spec = match own {
                Some(own) => own.spec.clone(),
                None => self.new_range(range, &ranges).await?,
            };
            let mut others = ranges.iter().filter(|one| one.spec.disagrees(&spec));
            if let Some(other) = others.find(|one| one.spec.confirmed || !spec.confirmed) {
                let both = [own, Some(other)].into_iter().flatten();
                for unconfirmed in both.filter(|one| !one.spec.confirmed) {
                    client.delete::<RangeObject>(&unconfirmed.metadata).await?;
                }
                return Err(refusal(&spec, other));
            }
            match own {
                None => drop(client.create(&RangeObject::new(spec)).await?),
                Some(own) if !spec.confirmed => {
                    let confirmed = json!({"confirmed": true});
                    client
                        .change::<RangeObject>(&own.metadata, confirmed)
                        .await?;
                }
                Some(own) => {
                    let note = json!({"emptySince": null});
                    client.note::<RangeObject>(&own.metadata, note).await?;
                }
            }
        }
        let name = self.space.block_name(range.subnet());
        let why = format!("AddressRange {name} comes and goes");
        Err(Failure::new(FailureKind::ClusterUnavailable, why))
    }

    /// The confirmed range that a block contradicts, by what was read last; none if it is a block of
    /// another one. Two ranges that disagree take no block out of use.
    pub(super) fn contradiction(&self, block: IpNetwork) -> Option<&str> {
        let (_, ranges) = self.grids.as_ref()?;
        let confirmed = ranges.iter().filter(|range| range.spec.confirmed);
        let over: Vec<_> = confirmed
            .filter(|range| range.spec.overlaps(block))
            .collect();
        match over.iter().all(|range| range.spec.contradicts(block)) {
            true => over.first().map(|range| range.metadata.name.as_str()),
            false => None,
        }
    }

    /// No address is leased any longer from blocks that contradict a range.
    pub(super) async fn check_grants(&mut self) -> Result<(), ApiError> {
        let sweep = self.shared.timing.sweep;
        let is_old = self
            .grids
            .as_ref()
            .is_none_or(|(read, _)| read.elapsed() >= sweep);
        if is_old && !self.blocks.own.is_empty() {
            self.read_ranges().await?;
        }
        for network in self.grants.networks() {
            if self.contradiction(network).is_some() {
                self.withdraw(network, CONTRADICTS);
            }
        }
        Ok(())
    }

    /// The ranges of the space, as read some seconds ago.
    pub(super) async fn known_ranges(&mut self) -> Result<Rc<Vec<RangeObject>>, ApiError> {
        match &self.grids {
            Some((read, ranges)) if read.elapsed() < self.shared.timing.agreed => {
                Ok(ranges.clone())
            }
            _ => self.read_ranges().await,
        }
    }

    /// The ranges of the space, now. One of another name than its own is not believed.
    async fn read_ranges(&mut self) -> Result<Rc<Vec<RangeObject>>, ApiError> {
        let mut ranges = Vec::new();
        let each = |range: RangeObject| {
            if range.is_well_named() && range.spec.space() == self.space {
                ranges.push(range);
            }
        };
        self.shared.client.ranges(each).await?;
        let ranges = Rc::new(ranges);
        self.grids = Some((Instant::now(), ranges.clone()));
        Ok(ranges)
    }

    /// How a range without an object is to be cut: as blocks that are there already and in no other
    /// range, because the object was removed or lost; else by the node's policy.
    async fn new_range(&self, range: &Range, ranges: &[RangeObject]) -> Result<RangeSpec, Failure> {
        let granted = self.grants.blocks.iter();
        let mut blocks: Vec<(IpNetwork, Option<PerNode>)> =
            granted.map(|grant| (grant.block, grant.per_node)).collect();
        let each = |block: BlockObject| blocks.push((block.spec.block, block.spec.per_node));
        let client = &self.shared.client;
        client.blocks_of_space(&self.space, each).await?;
        let is_of = |range: &RangeObject, block| overlap(range.spec.range, block);
        blocks.retain(|(block, _)| {
            overlap(*block, range.subnet()) && !ranges.iter().any(|other| is_of(other, *block))
        });
        let there = blocks.iter().find(|(block, _)| !self.is_static(*block));
        let fixed = &self.static_networks;
        let prefix = match (range.per_node(), there) {
            (Some(per_node), _) => per_node.prefix,
            (None, Some((block, _))) => block.prefix(),
            (None, None) => {
                Blocks::prefix(range.subnet().is_ipv4(), range.spans(), self.length, fixed)
            }
        };
        let mut spec = RangeSpec::new(&self.space, range.subnet(), prefix, fixed);
        spec.per_node = range.per_node();
        let is_other = |(block, per_node): &(IpNetwork, Option<PerNode>)| {
            spec.contradicts(*block) || *per_node != spec.per_node
        };
        match blocks.into_iter().find(is_other) {
            None => Ok(spec),
            Some((block, _)) => {
                let why = format!(
                    "range {} cannot be cut into {}: AddressBlock {} is there; end the pods that \
                     have its addresses, and delete it",
                    range.subnet(),
                    division(spec.per_node, prefix),
                    self.space.block_name(block)
                );
                Err(Failure::new(FailureKind::Mismatch, why))
            }
        }
    }
}

/// How a range is cut, if its object is confirmed, without a note that it has no block, and no other
/// one, written by hand, disagrees.
fn in_force(ranges: &[RangeObject], subnet: IpNetwork) -> Option<&RangeSpec> {
    let mut confirmed = ranges.iter().filter(|range| range.spec.confirmed);
    let own = confirmed.clone().find(|range| range.spec.range == subnet)?;
    let is_alone = !confirmed.any(|other| other.spec.disagrees(&own.spec));
    let is_usable = is_alone && own.spec.is_consistent() && own.empty_since().is_none();
    is_usable.then_some(&own.spec)
}

/// How a range is divided, for people.
fn division(per_node: Option<PerNode>, prefix: u8) -> String {
    match per_node {
        Some(per_node) => format!("networks by perNode {per_node}"),
        None => format!("blocks of /{prefix}"),
    }
}

/// Its blocks would not be the networks that a pod's prefix length and gateway follow from.
fn inconsistent(object: &RangeObject) -> Failure {
    let (spec, name) = (&object.spec, &object.metadata.name);
    let prefix = spec.per_node.map_or(0, |per_node| per_node.prefix);
    let why = format!(
        "AddressRange {name} cannot be used: its blockPrefix is {}, and its perNode.prefix is {prefix}. End the pods \
         of the range, and delete its AddressBlocks and AddressRange {name}",
        spec.block_prefix
    );
    Failure::new(FailureKind::Mismatch, why)
}

fn first_uses_differ(range: &Range) -> Failure {
    let why = format!(
        "range {} is used for the first time with two different values of perNode: one of them is refused",
        range.subnet()
    );
    Failure::new(FailureKind::ClusterUnavailable, why)
}

fn divided_otherwise(object: &RangeObject, range: &Range) -> Failure {
    let (spec, name) = (&object.spec, &object.metadata.name);
    let wanted = match range.per_node() {
        Some(per_node) => format!("has perNode {per_node}"),
        None => "has no perNode".to_owned(),
    };
    let why = format!(
        "the network {wanted}, but range {} is cut into {} since its first use (AddressRange {name}): use the same \
         in all networks of the range; or end their pods, and delete its AddressBlocks and AddressRange {name}",
        spec.range,
        division(spec.per_node, spec.block_prefix)
    );
    Failure::new(FailureKind::Mismatch, why)
}

fn refusal(spec: &RangeSpec, other: &RangeObject) -> Failure {
    let (range, theirs) = (spec.range, other.spec.range);
    let name = &other.metadata.name;
    if !other.spec.confirmed {
        let why = format!(
            "ranges {range} and {theirs} overlap and are both used for the first time: one of them is refused"
        );
        return Failure::new(FailureKind::ClusterUnavailable, why);
    }
    let is_divided = spec.per_node.or(other.spec.per_node).is_some();
    let static_networks = match spec.block_prefix == other.spec.block_prefix && !is_divided {
        true => " and other static networks",
        false => "",
    };
    let why = format!(
        "range {range} overlaps range {theirs}, which is cut into {}{static_networks}, this one into {} \
         (AddressRange {name}): give both networks one range; or end the pods of {theirs}, and delete its \
         AddressBlocks and AddressRange {name}",
        division(other.spec.per_node, other.spec.block_prefix),
        division(spec.per_node, spec.block_prefix)
    );
    Failure::new(FailureKind::Mismatch, why)
}
