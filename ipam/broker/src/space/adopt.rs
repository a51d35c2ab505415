//! Leases from before this store was the cluster's: their blocks are claimed, before another node
//! has them.
//!
//! A store that gave out addresses by itself may have leases anywhere. Each node's broker claims the
//! blocks around its own when it starts, so a pod that runs keeps its address. Where another node has
//! such a block the address may be in use twice, as it was before: it is said, and counted as a
//! conflict until its pod ends.
//!
//! It is done when a broker starts, after the API's first list, and from then on only as often as the
//! space is swept, while another node has such a block: its node may be gone by then. An ADD leases in
//! the node's blocks only. A broker that is killed on its way begins again; a block that it had claimed
//! is this node's.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam::block::{network_around, single};
use ipam::leases::LeaseError;

use crate::leases::SpaceLeases;
use ipnetwork::IpNetwork;
use node_wire::FailureKind;
use tokio::time::Instant;

use super::Worker;
use crate::api::RangeObject;
use ipam::range::Range;

impl Worker {
    /// Claims the blocks of leases that are in none of this node's.
    pub(super) async fn adopt(&mut self, store: Option<&SpaceLeases>) -> anyhow::Result<()> {
        if self.pace.adopt_at.is_none_or(|at| at > Instant::now()) {
            return Ok(());
        }
        let mut conflicts: BTreeMap<IpNetwork, usize> = BTreeMap::new();
        let mut failed = false;
        let outside = match store {
            Some(store) => {
                let known = self.known_ranges().await?;
                self.outside(store, &known)?
            }
            None => Vec::new(),
        };
        for (address, range) in outside {
            // It may have come with its neighbour's.
            if self.grants.has(address) {
                continue;
            }
            let single = self.is_static(IpNetwork::from(address));
            let deadline = Instant::now() + self.shared.timing.question;
            match self.claim_address(&range, address, single, deadline).await {
                Ok(block) => tracing::info!(
                    space = %self.space, %address, %block,
                    "a lease was in no block of this node; the node has the block now"
                ),
                Err(failure)
                    if matches!(
                        failure.kind,
                        FailureKind::HeldByAnotherNode | FailureKind::Mismatch
                    ) =>
                {
                    tracing::error!(
                        space = %self.space, %address, error = failure.message,
                        "a lease from before is in a block that this node cannot have: a pod of another node may \
                         have the address, too; let the pod that has it here end"
                    );
                    failed = true;
                    let around = network_around(address, self.policy_prefix(address));
                    if let Some(around) = around {
                        *conflicts.entry(around).or_default() += 1;
                    }
                }
                Err(failure) => anyhow::bail!(failure.message),
            }
        }
        // Counted anew as pods end.
        self.blocks.lost.extend(conflicts);
        self.pace.adopt_at = failed.then(|| Instant::now() + self.shared.timing.sweep);
        Ok(())
    }

    /// The addresses, ascending, each with the range that it is of.
    fn outside(
        &self,
        store: &SpaceLeases,
        known: &[RangeObject],
    ) -> Result<Vec<(IpAddr, Range)>, LeaseError> {
        let noted = self.noted_ranges(Some(store))?;
        let outside = store.list()?.into_iter();
        let is_granted = |address| {
            let mut blocks = self.grants.blocks.iter();
            blocks.any(|grant| grant.block.contains(address))
        };
        let outside = outside.filter(|lease| !is_granted(lease.address));
        let mut outside: Vec<(IpAddr, Range)> = outside
            .map(|lease| {
                (
                    lease.address,
                    self.range_around(known, &noted, single(lease.address)),
                )
            })
            .collect();
        outside.sort_by_key(|(address, _)| *address);
        Ok(outside)
    }
}
