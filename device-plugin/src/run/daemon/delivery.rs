//! What is written for units that are delivered by CDI, and removed after the last pod.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Daemon;
use crate::binding::slot_specification::directory_obstacle;
use crate::config::{Delivery, PoolConfig, Sharing};
use crate::deliver::{cdi, device_info};
use crate::snapshot::Snapshot;

/// Whether containers get HCAs of a pool by the pool's CDI file. Slots have files of their own.
fn is_by_pool_file(snapshot: &Snapshot) -> bool {
    snapshot.pool().delivery == Delivery::Cdi && snapshot.late().is_none()
}

impl Daemon {
    /// The bindings of slots, and whether their CDI files can be written.
    pub(super) async fn read_bindings(&mut self) {
        let paths = self.settings.paths.clone();
        let is_late = |pool: &PoolConfig| matches!(pool.sharing, Sharing::Late(_));
        let has_late_pool = self.config.pools.iter().any(is_late);
        let read = self.readers.cdi.run(move || {
            has_late_pool.then(|| {
                hca::host::show(&paths.cdi_dir);
                directory_obstacle(&paths.cdi_dir)
            })
        });
        if let Ok(obstacle) = read.await {
            self.world.cdi_obstacle = obstacle.flatten();
        }
        let bindings = self.inputs.bindings.borrow_and_update().clone();
        self.world.bindings_unread = bindings.is_none();
        self.world.bindings = bindings.unwrap_or_default();
    }

    /// Puts CDI specifications in place, before the kubelet hears of the units in them. A pool
    /// whose specification cannot be written has nothing to give.
    pub(super) async fn write_specifications(&self) -> Vec<Arc<Snapshot>> {
        let snapshots = self.plan.pools.clone();
        let directory = self.settings.paths.cdi_dir.clone();
        let write = move |snapshots: Vec<Arc<Snapshot>>| {
            hca::host::show(&directory);
            let written = snapshots.into_iter().map(|snapshot| {
                let by_cdi = is_by_pool_file(&snapshot);
                // Of a pool that was delivered by CDI before, pods may still hold names.
                if !by_cdi && !cdi::exists(&directory, snapshot.resource()) {
                    return snapshot;
                }
                match cdi::write(&directory, &snapshot) {
                    Ok(_) => snapshot,
                    // Containers would start without a device node.
                    Err(error) if by_cdi => {
                        tracing::error!(resource = %snapshot.resource(), %error, "units cannot be delivered");
                        Arc::new(snapshot.undeliverable(&error))
                    }
                    Err(error) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "CDI file of pods is not kept");
                        snapshot
                    }
                }
            });
            written.collect()
        };
        let unwritten = snapshots.clone();
        let written = self.readers.cdi.run(move || write(snapshots)).await;
        written.unwrap_or_else(|late| {
            let why = format!("{} has not ended", late.what);
            let withheld = |snapshot: Arc<Snapshot>| match is_by_pool_file(&snapshot) {
                true => Arc::new(snapshot.undeliverable(&why)),
                false => snapshot,
            };
            unwritten.into_iter().map(withheld).collect()
        })
    }

    /// Removes what was put in place for units that no pod holds any more.
    pub(super) fn tidy(&mut self) {
        self.take_newest_allocated();
        let Some(allocated) = self.world.allocated.clone() else {
            return;
        };
        let asked = allocated.asked().time;
        let of_cdi = self
            .config
            .pools
            .iter()
            .filter(|pool| pool.delivery == Delivery::Cdi);
        let used: BTreeSet<_> = of_cdi
            .map(|pool| pool.resource.clone())
            .chain(allocated.resources())
            .collect();
        let pools = self.config.pools.iter();
        let held: Vec<_> = pools
            .map(|pool| (pool.resource.clone(), allocated.units(&pool.resource)))
            .collect();
        let (cdi_dir, info_dir) = (
            self.settings.paths.cdi_dir.clone(),
            self.settings.paths.device_info_dir.clone(),
        );
        self.readers.leftovers.start(move || {
            hca::host::show(&cdi_dir);
            cdi::remove_unused(&cdi_dir, &used);
            hca::host::show(&info_dir);
            device_info::remove_unallocated(&info_dir, &held, asked);
        });
    }
}
