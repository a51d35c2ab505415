//! From observations to what each resource's session tells the kubelet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::candidate::gather::{self, Unusable};
use crate::candidate::memory::Memory;
use crate::config::{Config, ResourceName};
use crate::health::Damper;
use crate::kubelet::service::Feed;
use crate::observe::Observation;
use crate::pool::{self, LeftOut, Reason};
use crate::snapshot::{Health, Snapshot};

/// How long after the start a pool without HCAs tells the kubelet nothing at all.
///
/// Drivers may still be loading. An empty list would set the node's capacity to zero at once,
/// while a stream without a message leaves what the kubelet knew from before.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Makes snapshots and hands them to the sessions.
#[derive(Debug)]
pub struct Publisher {
    started: Instant,
    memory: Memory,
    damper: Damper,
    current: Vec<Snapshot>,
    told: Told,
    feeds: Vec<(ResourceName, watch::Sender<Option<Arc<Snapshot>>>)>,
}

/// What was logged already, and is not again while it stays true.
#[derive(Debug, Default)]
struct Told {
    remarks: Vec<String>,
    left_out: Vec<LeftOut>,
    unusable: Vec<Unusable>,
}

impl Publisher {
    /// A publisher with one feed for each pool of the configuration.
    pub fn new(config: &Config, started: Instant) -> Self {
        let feeds = config
            .pools
            .iter()
            .map(|pool| (pool.resource.clone(), watch::Sender::new(None)));
        Self {
            started,
            memory: Memory::default(),
            damper: Damper::default(),
            current: Vec::new(),
            told: Told::default(),
            feeds: feeds.collect(),
        }
    }

    /// The feed of a resource.
    pub fn feed(&self, resource: &ResourceName) -> Option<Feed> {
        self.feeds
            .iter()
            .find(|(name, _)| name == resource)
            .map(|(_, feed)| feed.subscribe())
    }

    /// Works out the pools from a new observation and tells those whose pool changed. Returns when
    /// to look again, at the latest.
    pub fn publish(
        &mut self,
        config: &Config,
        seen: &Observation,
        now: Instant,
    ) -> Option<Instant> {
        let (mut candidates, unusable) = gather::list(&seen.inventory, &seen.functions);
        self.memory.complete(&mut candidates);
        let mut pools = pool::assemble(config, &candidates, seen, &self.current);
        let mut again: Option<Instant> = None;
        for snapshot in &mut pools.snapshots {
            let due = self.damper.damp(snapshot, &config.damping, now);
            again = again.into_iter().chain(due).min();
        }
        for snapshot in &pools.snapshots {
            let before = self
                .current
                .iter()
                .find(|old| old.resource() == snapshot.resource());
            log_changes(before, snapshot);
            let Some((_, feed)) = self
                .feeds
                .iter()
                .find(|(name, _)| name == snapshot.resource())
            else {
                continue;
            };
            feed.send_if_modified(|shown| {
                let late = snapshot.members().is_empty() && self.started.elapsed() < PATIENCE;
                if (shown.is_none() && late) || shown.as_deref() == Some(snapshot) {
                    return false;
                }
                *shown = Some(Arc::new(snapshot.clone()));
                true
            });
        }
        self.current = pools.snapshots;
        self.told.tell(pools.remarks, pools.left_out, unusable);
        again
    }
}

impl Told {
    fn tell(&mut self, remarks: Vec<String>, left_out: Vec<LeftOut>, unusable: Vec<Unusable>) {
        for remark in remarks
            .iter()
            .filter(|remark| !self.remarks.contains(remark))
        {
            tracing::warn!("{remark}");
        }
        for one in left_out.iter().filter(|one| !self.left_out.contains(one)) {
            match one.reason {
                Reason::Claimed(_) => tracing::error!("{one}"),
                Reason::HasVfs(_) | Reason::Uplink(_) => tracing::info!("{one}"),
            }
        }
        for one in unusable.iter().filter(|one| !self.unusable.contains(one)) {
            tracing::warn!(
                rdma_device = one.rdma_device,
                reason = one.reason,
                "cannot be offered"
            );
        }
        *self = Self {
            remarks,
            left_out,
            unusable,
        };
    }
}

/// Says what became of each HCA, once for each change.
fn log_changes(before: Option<&Snapshot>, after: &Snapshot) {
    let resource = after.resource();
    if after.members().is_empty() && before.is_none() {
        tracing::warn!(%resource, "no HCA of this host is in the pool yet");
    }
    for member in after.members() {
        let old = before.and_then(|old| old.members().iter().find(|m| m.id == member.id));
        let devices = member.rdma_devices.join(",");
        match (&member.health, old.map(|old| &old.health)) {
            (now, Some(before)) if now == before => {}
            (Health::Healthy, None) => {
                tracing::info!(%resource, hca = %member.id, devices, "HCA in the pool");
            }
            (Health::Healthy, Some(_)) => {
                tracing::info!(%resource, hca = %member.id, devices, "HCA is healthy again");
            }
            (Health::Unhealthy(ailment), _) => {
                tracing::warn!(%resource, hca = %member.id, devices, reason = %ailment, "HCA is unhealthy");
            }
        }
    }
}
