//! The round that frees bindings of pods that ended, removes CDI files that no binding has, and finds
//! processes of ended pods that still use an HCA.
//!
//! A CDI file without a binding is removed at once: its container must not start with device nodes that
//! are not bound to its pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use attachment::cdi_file::{CdiDirectory, PREFIX};
use node_wire::Failure;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::binder::{Binder, free, placed};
use super::contexts;
use crate::node_paths::NodePaths;
use crate::report::Report;
use pools::binding::plan;
use pools::binding::record::Bindings;
use pools::binding::state::{Evidence, State, binding_state, ended};
use pools::deliver::slot::file_name;
use pools::gpus::Gpus;
use pools::holdings::Holdings;

/// Time between two rounds where nothing happens.
const INTERVAL: Duration = Duration::from_secs(15);
/// The same while bindings or the kubelet's word are not known.
const START_INTERVAL: Duration = Duration::from_secs(1);
/// How long the kubelet may take to say who has an HCA that a process uses.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(3);

/// Rounds until `stop`: at each list of the kubelet that has news, and every [`INTERVAL`]. `held` has the
/// kubelet's newest list, also where it is no news.
pub(crate) async fn keep_tidy(
    binder: Arc<Binder>,
    mut held: watch::Receiver<Option<Arc<Holdings>>>,
    stop: CancellationToken,
) {
    let mut logged = None;
    loop {
        let newest = held.borrow_and_update().clone();
        let is_known = newest.is_some();
        let failed = binder.tidy(newest).await.err();
        let failed = failed.map(|failure| failure.message);
        if let Some(error) = failed.as_ref().filter(|_| logged != failed) {
            tracing::warn!(error, "cannot find out which bindings are over");
        }
        logged = failed;
        let interval = match logged.is_none() && is_known {
            true => INTERVAL,
            false => START_INTERVAL,
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
            Ok(()) = held.changed() => {}
        }
    }
}

impl Binder {
    async fn tidy(&self, held: Option<Arc<Holdings>>) -> Result<(), Failure> {
        let read = self.evidence(held, None);
        let (store, paths) = (self.store.clone(), self.paths.clone());
        let (report, gpus) = (self.report(), self.known_gpus());
        let (hcas, holders) = (report.exclusive_hcas(), self.holders.clone());
        let round = move || -> Result<_, Failure> {
            // Files before bindings: each is made after its binding.
            let files = files_of_slots(&paths);
            let evidence = read()?;
            for why in evidence.bindings.unreadable.values() {
                tracing::warn!(
                    why,
                    "a binding cannot be read, and its HCA is given to no pod; remove the file"
                );
            }
            let removed = files.and_then(|files| remove_unbound(files, &evidence.bindings));
            if let Err(error) = removed {
                tracing::warn!(error, "cannot remove CDI files that no binding has");
            }
            for one in evidence.bindings.all.values() {
                if let State::Over(why) = binding_state(one, &evidence) {
                    free(&store, &paths, one, why)?;
                }
            }
            let free_aligned = gpus.map(|gpus| free_aligned(&report, &gpus, &paths, &evidence));
            let used = contexts::read(&paths.host, &hcas);
            let used = used.map(|used| holders.note(used, &evidence));
            Ok((ended(&evidence), used, free_aligned.unwrap_or_default()))
        };
        let (ended, used, free_aligned) = self.blocking(round).await??;
        let in_use = match used {
            None => None,
            Some(used) if used.is_empty() => Some(BTreeMap::new()),
            // A pod that has started since the last list may have them.
            Some(used) => {
                let listed = self.pods.holdings_of_now(KUBELET_TIMEOUT).await.ok();
                listed.map(|listed| contexts::in_use(&used, &listed.hcas(), &self.bindings()))
            }
        };
        self.store.note(ended, in_use, free_aligned);
        Ok(())
    }
}

/// For each pool with late binding, its HCAs that are free and near a GPU.
fn free_aligned(
    report: &Report,
    gpus: &Gpus,
    paths: &NodePaths,
    evidence: &Evidence,
) -> BTreeMap<String, usize> {
    let snapshots = report.snapshots().into_iter();
    let late = snapshots.filter(|snapshot| snapshot.late().is_some());
    let free = late.filter_map(|snapshot| {
        let machine = gpus.in_machine(snapshot.machine());
        let machine = placed(machine, &report.topology, paths).ok()?;
        let free = plan::free_aligned(&snapshot, &machine, evidence);
        (!gpus.all.is_empty()).then(|| (snapshot.resource().to_string(), free))
    });
    free.collect()
}

/// The CDI directory and the files of slots in it; none where it does not exist.
fn files_of_slots(paths: &NodePaths) -> Result<Option<(CdiDirectory, Vec<String>)>, String> {
    let directory = match CdiDirectory::open(&paths.cdi_dir) {
        Ok(directory) => directory,
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let names = directory.names(PREFIX).map_err(|error| error.to_string())?;
    Ok(Some((directory, names)))
}

/// Removes files of slots that no binding has: of an earlier boot, or of a process that was killed
/// between removing the two.
fn remove_unbound(
    files: Option<(CdiDirectory, Vec<String>)>,
    bindings: &Bindings,
) -> Result<(), String> {
    // Whose files they are is not known while a binding cannot be read.
    let Some((directory, names)) = files.filter(|_| bindings.unreadable.is_empty()) else {
        return Ok(());
    };
    let bound: BTreeSet<String> = bindings.all.values().map(file_name).collect();
    for name in names.into_iter().filter(|name| !bound.contains(name)) {
        directory.remove(&name).map_err(|error| error.to_string())?;
        tracing::info!(name, "removed a CDI file that no binding has");
    }
    Ok(())
}
