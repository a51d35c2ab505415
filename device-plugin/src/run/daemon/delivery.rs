//! How units are delivered: chosen, written for containers, removed after the last pod.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use diagnostics::container_runtime;

use super::Daemon;
use crate::binding::places::directory_obstacle;
use crate::config::{Delivery, PoolConfig, Sharing};
use crate::deliver::{cdi, choice, device_info};
use crate::snapshot::{Shape, Snapshot};

/// Whether containers get HCAs of a pool by the pool's CDI file. Slots have files of their own.
fn is_by_pool_file(snapshot: &Snapshot) -> bool {
    snapshot.terms().delivery == Delivery::Cdi && snapshot.shape() != Shape::Late
}

impl Daemon {
    /// Chooses how pools are delivered that state nothing, when the kubelet or the configuration is
    /// another one, and on SIGHUP. True if it is another delivery than before.
    ///
    /// What pods have stays as it is: the kubelet keeps its answers, CDI files of pods stay in place
    /// and true, and a start with nodes is compared with the nodes of now.
    pub(super) async fn choose_delivery(&mut self) -> bool {
        self.know_cdi_obstacle().await;
        let kubelet = self.known.client.borrow_and_update().clone();
        let (host, directory) = (self.settings.host.clone(), self.settings.cdi_dir.clone());
        let program = self.program.clone();
        let read = move || {
            let root = host.sys.parent().unwrap_or(Path::new("/"));
            choice::choose(&choice::Facts {
                kubelet,
                runtime: container_runtime::of_running_runtime(root, &host.proc, &program),
                directory: choice::directory_obstacle(&directory, root == Path::new("/")),
            })
        };
        let Ok(chosen) = self.readers.runtime.run(read).await else {
            return false;
        };
        let is_another = chosen.delivery != self.choice.delivery;
        if chosen != self.choice && self.config.pools.iter().any(|pool| pool.delivery.is_none()) {
            tracing::info!(
                delivery = chosen.delivery.word(),
                reason = chosen.reason,
                "delivery of exclusive pools that state none"
            );
        }
        self.choice = chosen;
        self.pool_states
            .set_automatic_delivery(self.choice.delivery);
        is_another
    }

    /// Whether containers are known not to get what CDI files say: pools with binding late, and those
    /// that state delivery by CDI, have nothing to offer then. What is not known is no obstacle: a
    /// container without its CDI file does not start, and one whose runtime passes CDI over has no
    /// device node.
    pub(super) async fn know_cdi_obstacle(&mut self) {
        let is_by_cdi = |pool: &PoolConfig| pool.delivery == Some(Delivery::Cdi);
        if !self.has_late_pool() && !self.config.pools.iter().any(is_by_cdi) {
            self.cdi_doubt.clear();
            self.runtime_obstacle = None;
            return;
        }
        let host = self.settings.host.clone();
        let kubelet = self.known.client.borrow().clone();
        let program = self.program.clone();
        let read = move || {
            let root = host.sys.parent().unwrap_or(Path::new("/"));
            let runtime = container_runtime::of_running_runtime(root, &host.proc, &program);
            let obstacle = choice::known_obstacle(&runtime);
            let facts = choice::Facts {
                kubelet,
                runtime,
                directory: None,
            };
            (obstacle, choice::doubt(&facts))
        };
        // What takes longer stays as it was known.
        if let Ok((obstacle, doubt)) = self.readers.runtime.run(read).await {
            if obstacle != self.runtime_obstacle {
                match &obstacle {
                    Some(reason) => tracing::error!(
                        reason,
                        "units of pools by CDI are withheld: containers would be without their \
                             device nodes"
                    ),
                    None => tracing::info!("the container runtime gives devices by CDI now"),
                }
            }
            self.runtime_obstacle = obstacle;
            let doubt = doubt.filter(|_| self.has_late_pool()).map(|doubt| {
                format!(
                    "binding late needs CDI, and containers may be without device nodes: {doubt}"
                )
            });
            self.cdi_doubt = doubt.into_iter().collect();
        }
    }

    fn has_late_pool(&self) -> bool {
        let is_late = |pool: &PoolConfig| matches!(pool.sharing, Sharing::Late(_));
        self.config.pools.iter().any(is_late)
    }

    /// The bindings of slots, and whether their CDI files can be written, before each scan is taken
    /// in.
    pub(super) async fn read_bindings(&mut self) {
        let places = self.settings.binding_places();
        let directory = self.has_late_pool().then(|| self.settings.cdi_dir.clone());
        let read = self.readers.bindings.run(move || {
            let obstacle = directory.and_then(|directory| {
                hca::host::show(&directory);
                directory_obstacle(&directory)
            });
            (obstacle, places.store().read())
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
        let directory = self.settings.cdi_dir.clone();
        let stated: BTreeSet<_> = self
            .config
            .pools
            .iter()
            .filter(|pool| pool.delivery.is_some())
            .map(|pool| pool.resource.clone())
            .collect();
        let passed_over = self.runtime_obstacle.clone();
        let write = move |snapshots: Vec<Arc<Snapshot>>| {
            hca::host::show(&directory);
            let written = snapshots.into_iter().map(|snapshot| {
                let by_cdi = is_by_pool_file(&snapshot);
                // Of a pool that was delivered by CDI before, pods may still hold names.
                if !by_cdi && !cdi::exists(&directory, snapshot.resource()) {
                    return snapshot;
                }
                match cdi::write(&directory, &snapshot) {
                    // Containers would start without a device node.
                    Ok(_) if by_cdi && stated.contains(snapshot.resource()) => {
                        match &passed_over {
                            Some(why) => Arc::new(snapshot.undeliverable(why)),
                            None => snapshot,
                        }
                    }
                    Ok(_) => snapshot,
                    Err(error) if by_cdi && stated.contains(snapshot.resource()) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "units cannot be delivered");
                        Arc::new(snapshot.undeliverable(&error.to_string()))
                    }
                    Err(error) => {
                        tracing::error!(resource = %snapshot.resource(), %error, "device nodes are delivered instead");
                        Arc::new(snapshot.by_device_nodes())
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
            .filter(|pool| pool.delivery != Some(Delivery::DeviceSpecs));
        let used: BTreeSet<_> = of_cdi
            .map(|pool| pool.resource.clone())
            .chain(allocated.resources())
            .collect();
        let pools = self.config.pools.iter();
        let held: Vec<_> = pools
            .map(|pool| (pool.resource.clone(), allocated.units(&pool.resource)))
            .collect();
        let (cdi_dir, info_dir) = (
            self.settings.cdi_dir.clone(),
            self.settings.device_info_dir.clone(),
        );
        self.readers.leftovers.start(move || {
            hca::host::show(&cdi_dir);
            cdi::remove_unused(&cdi_dir, &used);
            hca::host::show(&info_dir);
            device_info::remove_unallocated(&info_dir, &held, asked);
        });
    }
}
