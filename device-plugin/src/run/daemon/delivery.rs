//! Which files there should be for other programs of the node and for the next daemon, and what it means
//! for a pool that one cannot be written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::Metadata;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use attachment::cdi_file;
use attachment::node::{EXCLUSIVE_HCAS, NODE_ADDRESSES};
use pools::config::{Delivery, PoolConfig, ResourceName};
use pools::deliver::cdi;
use pools::deliver::device_info::{self, ALLOCATION_GRACE_PERIOD};
use pools::history;

use super::Daemon;
use crate::files::{Directory, File, IsStale, Wanted};
use crate::last_good;

/// Whether containers get HCAs of a pool by CDI; those of slots always do.
fn is_by_cdi(pool: &PoolConfig) -> bool {
    pool.delivery == Delivery::Cdi
}

/// One value a line.
fn lines<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let lines = values.into_iter().map(|value| format!("{value}\n"));
    lines.collect()
}

fn file(name: impl Into<String>, content: String, consequence: &'static str) -> (String, File) {
    let file = File {
        content,
        only_if_present: false,
        consequence,
    };
    (name.into(), file)
}

impl Daemon {
    /// Has the files of the plan written before the kubelet hears of its units. Returns whether it is
    /// another one than before by which pools containers get nothing.
    pub(super) async fn write_files(&mut self) -> bool {
        self.take_newest_allocated();
        self.want_files();
        self.files.settle().await;
        self.note_undelivered()
    }

    /// Has the files compared again. Returns whether it is another one than before by which pools
    /// containers get nothing.
    pub(super) fn compare_files(&mut self) -> bool {
        self.take_newest_allocated();
        self.want_files();
        self.files.compare();
        self.note_undelivered()
    }

    fn want_files(&mut self) {
        self.want_state();
        self.want_specifications();
        self.want_device_information();
    }

    /// Takes note of the pools whose CDI file cannot be written. Returns whether they are others than
    /// before.
    fn note_undelivered(&mut self) -> bool {
        let faults = self.files.faults_in(&Directory::Cdi);
        let pools = self.config.pools.iter();
        let undelivered = pools.filter_map(|pool| {
            let resource = &pool.resource;
            let of_file = || faults.files.get(&cdi::file_name(resource));
            let fault = faults.directory.as_ref().filter(|_| is_by_cdi(pool));
            let fault = fault.or_else(|| of_file().filter(|_| pool.has_file()));
            Some((resource.clone(), fault?.clone()))
        });
        let undelivered: BTreeMap<_, _> = undelivered.collect();
        let is_new = self.world.undelivered != undelivered;
        self.world.undelivered = undelivered;
        is_new
    }

    fn want_state(&mut self) {
        let mut files = BTreeMap::from([file(
            EXCLUSIVE_HCAS,
            lines(self.plan.exclusive()),
            "the CNI plugin does not know which HCAs are of exclusive pools, and may give a pod a child \
             of one that another pod will have",
        )]);
        files.extend(self.history.memory.text().map(|content| {
            let consequence = "after a restart of the daemon an HCA in a pod may leave its pool";
            file(history::FILE, content, consequence)
        }));
        // Without them the CNI plugin finds uplinks by the routes alone.
        if !self.settings.node_addresses.is_empty() {
            files.extend([file(
                NODE_ADDRESSES,
                lines(&self.settings.node_addresses),
                "the CNI plugin does not know which addresses are the node's",
            )]);
        }
        let wanted = Wanted::of(files);
        self.files.want(Directory::State, wanted);
        if let (Some(directory), Some(good)) = (&self.settings.state_dir, &self.config_file.keep) {
            let good = file(
                last_good::FILE,
                good.clone(),
                "should the configuration be wrong at the next start, the daemon has none",
            );
            let directory = Directory::Own(directory.clone());
            self.files.want(directory, Wanted::of([good].into()));
        }
    }

    /// Files of pools that are delivered by CDI, and of others as long as pods may hold names in them.
    fn want_specifications(&mut self) {
        let configured = self.config.pools.iter();
        let configured = configured.filter(|pool| pool.has_file());
        let mut used: BTreeSet<_> = configured.map(|pool| pool.resource.clone()).collect();
        let allocated = self.world.allocated.as_ref();
        used.extend(allocated.iter().flat_map(|allocated| allocated.resources()));
        let is_known = allocated.is_some();
        let files = self.plan.pools.iter().filter_map(|snapshot| {
            let resource = snapshot.resource();
            if is_known && !used.contains(resource) {
                return None;
            }
            let consequence = "containers of pods that have units of the pool do not start";
            let (name, file) = file(cdi::file_name(resource), cdi::text(snapshot)?, consequence);
            let file = File {
                only_if_present: !snapshot.pool().has_file(),
                ..file
            };
            Some((name, file))
        });
        let files = files.collect();
        let used: BTreeSet<String> = used.iter().map(cdi::file_name).collect();
        let stale =
            move |name: &str, _: &Metadata| cdi_file::is_of_pool(name) && !used.contains(name);
        let wanted = Wanted {
            files,
            stale: is_known.then(|| Arc::new(stale) as IsStale),
            needs_directory: self.config.pools.iter().any(is_by_cdi),
        };
        self.files.want(Directory::Cdi, wanted);
    }

    /// One file for each unit that a pod holds or was just allocated: what the next list does not have
    /// yet, and what an earlier daemon could not write.
    fn want_device_information(&mut self) {
        self.allocated
            .retain(|_, (_, at)| at.elapsed() < ALLOCATION_GRACE_PERIOD);
        let mut all: BTreeMap<String, String> = BTreeMap::new();
        let mut stale = None;
        if let Some(allocated) = &self.world.allocated {
            for snapshot in &self.plan.pools {
                let units: Vec<String> = allocated.units(snapshot.resource()).into_iter().collect();
                all.extend(device_info::files(snapshot, &units));
            }
            let configured = self.config.pools.iter().map(|pool| pool.resource.clone());
            let ours: BTreeSet<ResourceName> =
                configured.chain(self.history.memory.resources()).collect();
            let held = ours.into_iter().map(|resource| {
                let units = allocated.units(&resource);
                (resource, units)
            });
            let held: Vec<_> = held.collect();
            let asked = SystemTime::now() - allocated.asked().elapsed();
            stale = Some(Arc::new(move |name: &str, meta: &Metadata| {
                is_older(meta, asked) && device_info::is_unallocated(name, &held)
            }) as IsStale);
        }
        let recent = self.allocated.iter();
        all.extend(recent.map(|(name, (content, _))| (name.clone(), content.clone())));
        let consequence = "Multus does not show which device the unit is";
        let files = all.into_iter();
        let files = files.map(|(name, content)| file(name, content, consequence));
        let files = files.collect();
        let wanted = Wanted {
            stale,
            ..Wanted::of(files)
        };
        self.files.want(Directory::DeviceInfo, wanted);
    }

    /// Takes note of device information of units that were just allocated.
    pub(super) fn note_allocated(&mut self, files: device_info::Files) {
        let now = Instant::now();
        let files = files.into_iter();
        self.allocated
            .extend(files.map(|(name, content)| (name, (content, now))));
        self.want_device_information();
        self.files.compare();
    }
}

/// Whether a file was there when the kubelet was asked, and long enough before: the kubelet names a unit
/// only some time after it was allocated.
fn is_older(file: &Metadata, asked: SystemTime) -> bool {
    let written = file.modified().ok();
    let age = written.and_then(|written| asked.duration_since(written).ok());
    age.is_some_and(|age| age >= ALLOCATION_GRACE_PERIOD)
}
