//! What is written for units that are delivered by CDI, and removed after the last pod.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::container_runtime::{self, Cdi};

use super::Daemon;
use crate::binding::places::directory_obstacle;
use crate::config::{Delivery, PoolConfig, Sharing};
use crate::deliver::{cdi, device_info};
use crate::snapshot::Snapshot;

/// Whether containers get HCAs of a pool by the pool's CDI file. Slots have files of their own.
fn is_by_pool_file(snapshot: &Snapshot) -> bool {
    snapshot.pool().delivery == Delivery::Cdi && snapshot.late().is_none()
}

/// Why containers may not get what CDI files say.
fn doubt(runtime: &Cdi) -> Option<String> {
    Some(match runtime {
        Cdi::On(_) => return None,
        Cdi::NoRuntime => "no container runtime is in sight".to_owned(),
        Cdi::Off(place) => format!("{place} has CDI switched off"),
        Cdi::Silent(place) => format!(
            "whether the runtime reads CDI files is not known: {place} says neither enable_cdi nor \
             version = 3"
        ),
        Cdi::OutOfSight(place) => format!(
            "whether the runtime reads CDI files is not known: its configuration {place} is not in \
             sight"
        ),
        Cdi::CriO => {
            "whether the runtime reads CDI names is not known: CRI-O's configuration does \
                      not state its version"
                .to_owned()
        }
    })
}

impl Daemon {
    /// Whether containers are known not to get what CDI files say: pools with binding late, and those
    /// that state delivery by CDI, have nothing to offer then. What is not known is no obstacle: a
    /// container without its CDI file does not start, and one whose runtime passes CDI over has no
    /// device node.
    pub(super) async fn know_cdi_obstacle(&mut self) {
        let is_by_cdi = |pool: &PoolConfig| pool.delivery == Delivery::Cdi;
        if !self.has_late_pool() && !self.config.pools.iter().any(is_by_cdi) {
            self.cdi_doubt.clear();
            self.runtime_obstacle = None;
            return;
        }
        let host = self.settings.paths.host.clone();
        let read = move || {
            let root = host.sys.parent().unwrap_or(Path::new("/"));
            container_runtime::of_running_runtime(root, &host.proc)
        };
        // What takes longer stays as it was known.
        let Ok(runtime) = self.readers.runtime.run(read).await else {
            return;
        };
        let doubt = doubt(&runtime);
        let is_known = matches!(runtime, Cdi::Off(_));
        let obstacle = doubt.clone().filter(|_| is_known);
        if obstacle != self.runtime_obstacle {
            match &obstacle {
                Some(reason) => tracing::error!(
                    reason,
                    "units of pools by CDI are withheld: containers would be without their device \
                     nodes"
                ),
                None => tracing::info!("the container runtime gives devices by CDI now"),
            }
        }
        self.runtime_obstacle = obstacle;
        let doubt = doubt.filter(|_| self.has_late_pool()).map(|doubt| {
            format!("binding late needs CDI, and containers may be without device nodes: {doubt}")
        });
        self.cdi_doubt = doubt.into_iter().collect();
    }

    fn has_late_pool(&self) -> bool {
        let is_late = |pool: &PoolConfig| matches!(pool.sharing, Sharing::Late(_));
        self.config.pools.iter().any(is_late)
    }

    /// The bindings of slots, and whether their CDI files can be written, before each scan is taken
    /// in.
    pub(super) async fn read_bindings(&mut self) {
        let paths = self.settings.paths.clone();
        let directory = self
            .has_late_pool()
            .then(|| self.settings.paths.cdi_dir.clone());
        let read = self.readers.bindings.run(move || {
            let obstacle = directory.and_then(|directory| {
                hca::host::show(&directory);
                directory_obstacle(&directory)
            });
            (obstacle, paths.store().read())
        });
        let Ok((obstacle, bindings)) = read.await else {
            return;
        };
        let obstacle = self.runtime_obstacle.clone().or(obstacle);
        self.pool_states.set_cdi_obstacle(obstacle);
        match bindings {
            Ok(bindings) => self.pool_states.set_bindings(bindings),
            Err(error) => {
                tracing::error!(%error, "cannot read the bindings of slots; what was known stays in force")
            }
        }
    }

    /// Puts CDI specifications in place, before the kubelet hears of the units in them. A pool
    /// whose specification cannot be written has nothing to give.
    pub(super) async fn write_specifications(&self) -> Vec<Arc<Snapshot>> {
        let snapshots = self.pool_states.snapshots().to_vec();
        let directory = self.settings.paths.cdi_dir.clone();
        let passed_over = self.runtime_obstacle.clone();
        let write = move |snapshots: Vec<Arc<Snapshot>>| {
            hca::host::show(&directory);
            let written = snapshots.into_iter().map(|snapshot| {
                let by_cdi = is_by_pool_file(&snapshot);
                // Of a pool that was delivered by CDI before, pods may still hold names.
                if !by_cdi && !cdi::exists(&directory, snapshot.resource()) {
                    return snapshot;
                }
                match (cdi::write(&directory, &snapshot), &passed_over) {
                    (Ok(_), Some(why)) if by_cdi => Arc::new(snapshot.undeliverable(why)),
                    (Ok(_), _) => snapshot,
                    // Containers would start without a device node.
                    (Err(error), _) if by_cdi => {
                        tracing::error!(resource = %snapshot.resource(), %error, "units cannot be delivered");
                        Arc::new(snapshot.undeliverable(&error.to_string()))
                    }
                    (Err(error), _) => {
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
    pub(super) fn tidy(&self) {
        // What is no news is in the newest answer alone, and says until when it is none.
        let newest = self.known.held.borrow().clone();
        let known = [newest, self.allocated.clone()].into_iter().flatten();
        let Some(allocated) = known.max_by_key(|allocated| allocated.asked()) else {
            return;
        };
        let asked = allocated.asked();
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
