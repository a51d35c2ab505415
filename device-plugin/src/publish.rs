//! From observations to what each resource's session tells the kubelet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::config::{Config, ResourceName};
use crate::kubelet::service::Feed;
use crate::observe::Observation;
use crate::pool;
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
    current: Vec<Snapshot>,
    remarks: Vec<String>,
    unusable: Vec<crate::candidate::Unusable>,
    feeds: Vec<(ResourceName, watch::Sender<Option<Arc<Snapshot>>>)>,
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
            current: Vec::new(),
            remarks: Vec::new(),
            unusable: Vec::new(),
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

    /// Works out the pools from a new observation and tells those whose pool changed.
    pub fn publish(&mut self, config: &Config, seen: &Observation) {
        let pools = pool::assemble(config, seen, &self.current);
        for remark in pools
            .remarks
            .iter()
            .filter(|remark| !self.remarks.contains(remark))
        {
            tracing::warn!("{remark}");
        }
        for unusable in pools
            .unusable
            .iter()
            .filter(|one| !self.unusable.contains(one))
        {
            tracing::warn!(
                rdma_device = unusable.rdma_device,
                reason = unusable.reason,
                "not usable"
            );
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
        self.remarks = pools.remarks;
        self.unusable = pools.unusable;
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
