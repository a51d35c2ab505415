//! What of the node's blocks is leased, read from the local store when that changed; and claiming
//! ahead of need.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::grants::MAX_BLOCKS;
use ipam::block::size;
use ipam::leases::{LeaseError, Noted};
use ipam::range::Range;
use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{Failure, FailureKind};
use serde_json::json;
use tokio::time::Instant;

use super::Worker;
use super::claim::Effort;
use crate::api::document::Metadata;
use crate::api::{ApiError, Changed};
use crate::decide::supply::{OwnBlock, RangeUse};
use crate::leases::{BlockUse, SpaceLeases};

/// Of how long ago the use of a range is compared with.
const GROWTH_TIME: Duration = Duration::from_secs(10);
/// How often the ranges in use are read from the store.
const RANGES_INTERVAL: Duration = Duration::from_secs(30);
/// How long nothing is claimed ahead for a range that has no free block.
const NONE_FREE_TIME: Duration = Duration::from_secs(60);
/// How often the API is told how full a block is, at most.
const NOTE_INTERVAL: Duration = Duration::from_secs(300);

/// Ranges that ADDs of this node use.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    read: Option<Instant>,
    in_use: Vec<Range>,
    history: BTreeMap<Range, VecDeque<(Instant, u128)>>,
    none_free_until: BTreeMap<Range, Instant>,
    refused: BTreeMap<Range, (Instant, Failure)>,
}

impl Ranges {
    pub(super) fn refused(&self, range: &Range) -> Option<(Instant, &Failure)> {
        let (at, failure) = self.refused.get(range)?;
        Some((*at, failure))
    }

    pub(super) fn note_refused(&mut self, range: &Range, failure: Failure) {
        let now = Instant::now();
        self.refused
            .retain(|_, (at, _)| now.duration_since(*at) < GROWTH_TIME);
        self.refused.insert(range.clone(), (now, failure));
    }

    /// How many ranges have no free block, of which the node would claim one before it is needed.
    pub(super) fn without_free_block(&self) -> u64 {
        let ranges = self.none_free_until.keys();
        ranges.filter(|range| self.in_use.contains(range)).count() as u64
    }

    fn used_before(&mut self, range: &Range, used: u128) -> u128 {
        let history = self.history.entry(range.clone()).or_default();
        history.push_back((Instant::now(), used));
        while history
            .get(1)
            .is_some_and(|(at, _)| at.elapsed() >= GROWTH_TIME)
        {
            history.pop_front();
        }
        history.front().map_or(used, |(_, used)| *used)
    }
}

/// The range that a pool notes.
fn range_of(pool: &Noted) -> Option<Range> {
    let range = Range::of_parts(pool.range, &pool.spans).ok()?;
    range.divided(pool.per_node).ok()
}

impl Worker {
    /// Reads what of the blocks is leased.
    pub(super) fn refresh(&mut self, store: Option<&SpaceLeases>) -> Result<(), LeaseError> {
        for (network, own) in &mut self.blocks.own {
            let Some(store) = store else {
                own.usage = Some(BlockUse::default());
                own.empty_since.get_or_insert_with(Instant::now);
                continue;
            };
            let used = store.block_use(*network)?;
            let is_empty = used.held.is_empty() && used.cooling_down == 0;
            own.usage = Some(used);
            match is_empty {
                true => drop(own.empty_since.get_or_insert_with(Instant::now)),
                false => own.empty_since = None,
            }
        }
        if self
            .ranges
            .read
            .is_none_or(|read| read.elapsed() >= RANGES_INTERVAL)
            && let Some(store) = store
        {
            self.ranges.in_use = store.pools()?.iter().filter_map(range_of).collect();
            self.ranges.read = Some(Instant::now());
        }
        let lost: Vec<IpNetwork> = self.blocks.lost.keys().copied().collect();
        for network in lost {
            let held = match store {
                Some(store) => store.block_use(network)?.held.len(),
                None => 0,
            };
            match held {
                0 => drop(self.blocks.lost.remove(&network)),
                held => drop(self.blocks.lost.insert(network, held)),
            }
        }
        Ok(())
    }

    /// The ranges of the space that ADDs of this node noted.
    pub(super) fn noted_ranges(
        &self,
        store: Option<&SpaceLeases>,
    ) -> Result<Vec<Range>, LeaseError> {
        let pools = store.map_or(Ok(Vec::new()), SpaceLeases::pools)?;
        Ok(pools.iter().filter_map(range_of).collect())
    }

    /// What the node has of each range in use whose blocks come and go.
    pub(super) fn range_uses(&mut self) -> Vec<(Range, RangeUse)> {
        let mut ranges = self.ranges.in_use.clone();
        ranges.retain(|range| range.per_node().is_none());
        let mut uses = Vec::new();
        for range in ranges {
            let granted = self.grants.networks();
            let own = granted
                .iter()
                .map(|network| (*network, self.room(&range, *network)));
            let own: Vec<(IpNetwork, u128)> = own.filter(|(_, size)| *size > 0).collect();
            let held = own
                .iter()
                .filter_map(|(network, _)| self.blocks.own.get(network)?.usage.as_ref())
                .flat_map(|used| &used.held)
                .filter(|address| range.gives(**address))
                .count() as u128;
            let block_size = own.iter().map(|(network, _)| size(*network)).max();
            let block_size = block_size.map_or(1, u128::from);
            uses.push((
                range.clone(),
                RangeUse {
                    blocks: own,
                    used: held,
                    used_before: self.ranges.used_before(&range, held),
                    block_size,
                },
            ));
        }
        uses
    }

    /// The node's blocks, for the decision which to give back. A network of its own it keeps.
    pub(super) fn own_blocks(&self) -> Vec<OwnBlock> {
        let crowded = self.blocks.own.len() > MAX_BLOCKS / 2;
        let settled = self
            .blocks
            .own
            .iter()
            .filter(|(_, own)| own.doubt.is_none() && own.object.spec.per_node.is_none());
        settled
            .map(|(network, own)| OwnBlock {
                block: *network,
                empty_for: own
                    .empty_since
                    .filter(|_| own.granted.elapsed() >= self.shared.timing.new)
                    .map(|since| since.elapsed()),
                // A static address is nobody's once its pod has ended; and a node that has very many
                // blocks keeps none that is empty.
                wanted: own.object.spec.wanted_by.is_some()
                    || (own.empty_since.is_some() && (crowded || self.is_static(*network))),
            })
            .collect()
    }

    /// Claims blocks for ranges that are nearly full.
    pub(super) async fn claim_ahead(&mut self) -> Result<(), Failure> {
        for (range, used) in self.range_uses() {
            let ahead = used.ahead();
            if ahead == 0 {
                self.ranges.none_free_until.remove(&range);
                continue;
            }
            let paused = self.ranges.none_free_until.get(&range);
            if paused.is_some_and(|until| *until > Instant::now()) {
                continue;
            }
            for _ in 0..ahead {
                let deadline = Instant::now() + self.shared.timing.question;
                let claimed = match self.claim(&range, Effort::Free, deadline).await {
                    Err(failure) if failure.kind == FailureKind::Exhausted => None,
                    other => other?,
                };
                if claimed.is_none() {
                    let jitter = Duration::from_millis(random64() % 30_000);
                    let until = Instant::now() + NONE_FREE_TIME + jitter;
                    self.ranges.none_free_until.insert(range.clone(), until);
                    break;
                }
                self.ranges.none_free_until.remove(&range);
            }
        }
        Ok(())
    }

    /// Tells the API how full the blocks are, where that changed by more than an eighth.
    pub(super) async fn note_usage(&mut self) -> Result<(), ApiError> {
        let mut due = Vec::new();
        for (network, own) in &self.blocks.own {
            let Some(known) = own.usage.as_ref().filter(|_| own.doubt.is_none()) else {
                continue;
            };
            let used = known.held.len() as u64;
            let is_due = match own.noted {
                None => own.granted.elapsed() >= self.shared.timing.new,
                Some((noted, at)) => {
                    at.elapsed() >= NOTE_INTERVAL
                        && (used.abs_diff(noted) > size(*network) / 8
                            || (used == 0) != (noted == 0))
                }
            };
            if is_due {
                due.push((*network, used));
            }
        }
        for (network, used) in due {
            let Some(own) = self.blocks.own.get(&network) else {
                continue;
            };
            let grant = own.grant(self.leased_before(network), self.grants.boot());
            let free = grant
                .size()
                .saturating_sub(used + grant.except.len() as u64);
            let status = json!({"used": used, "free": free});
            // Nobody else writes it, and it decides nothing.
            let metadata = Metadata {
                resource_version: String::new(),
                ..own.object.metadata.clone()
            };
            let noted = self.shared.client.note(&metadata, status).await?;
            if let Some(own) = self.blocks.own.get_mut(&network) {
                own.noted = Some((used, Instant::now()));
                if let Changed::Done(object) = noted {
                    own.object = object;
                }
            }
        }
        Ok(())
    }
}
