//! The loop that frees bindings of pods that ended, and removes CDI files that no binding has.
//!
//! A binding is freed after two rounds showed that it ended, each by a list of the kubelet of its own,
//! and it did not change in between ([`super::evidence`]). A CDI file without a binding is removed at
//! once: its container must not start with device nodes that are not bound to its pod.

use std::sync::Arc;
use std::time::Duration;

use attachment::cdi_file::{CdiDirectory, PREFIX};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::binder::Binder;
use super::evidence::{Over, over};
use super::slot_specification::file_name;
use super::store::{Binding, Bindings};
use crate::kubelet::allocated::AllocatedUnits;
use crate::node_paths::NodePaths;
use crate::reader::Reader;

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(15);

/// Frees bindings until `stop`. `held` has the kubelet's newest list, also where it is no news.
pub(crate) async fn keep_releasing(
    binder: Arc<Binder>,
    held: watch::Receiver<Option<Arc<AllocatedUnits>>>,
    reader: Reader,
    stop: CancellationToken,
) {
    let mut before: Vec<(Binding, Over)> = Vec::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
        let (paths, held) = (binder.paths().clone(), held.borrow().clone());
        let round = reader.run(move || round(&paths, held.as_deref()));
        let seen = match round.await {
            Ok(Ok(seen)) => seen,
            Ok(Err(error)) => {
                tracing::warn!(error, "which bindings are over is not known");
                continue;
            }
            Err(_) => continue,
        };
        let is_confirmed = |(one, over): &&(Binding, Over)| {
            let mut earlier = before.iter();
            earlier.any(|(known, earlier)| known == one && over.confirms(earlier))
        };
        let confirmed = seen.iter().filter(is_confirmed);
        let twice: Vec<Binding> = confirmed.map(|(one, _)| one.clone()).collect();
        if !twice.is_empty() {
            for one in binder.free_all(twice).await {
                let why = seen.iter().find(|(known, _)| *known == one);
                let why = why.map_or("", |(_, over)| over.why);
                tracing::info!(pod = %one.pod, unit = one.unit, hca = one.hca, why, "slot unbound");
            }
        }
        before = seen;
    }
}

/// Bindings that are over as far as this round sees, and why.
fn round(paths: &NodePaths, held: Option<&AllocatedUnits>) -> Result<Vec<(Binding, Over)>, String> {
    // Files before bindings, bindings before the journal: each is made after the next one here.
    let files = files_of_slots(paths)?;
    let bindings = paths.store().read().map_err(|error| error.to_string())?;
    for why in bindings.unreadable.values() {
        tracing::warn!(
            why,
            "a binding cannot be read, and its HCA is given to no pod; remove the file"
        );
    }
    if let Some((directory, names)) = files {
        remove_unbound(&directory, names, &bindings)?;
    }
    let Some(held) = held.filter(|_| !bindings.all.is_empty()) else {
        return Ok(Vec::new());
    };
    let attached = paths.attached()?;
    let now = attachment::node::now();
    let over = bindings.all.values().filter_map(|one| {
        let over = over(one, &bindings, &attached, held, now)?;
        Some((one.clone(), over))
    });
    Ok(over.collect())
}

/// The CDI directory and the files of slots in it; none where it does not exist.
pub(super) fn files_of_slots(
    paths: &NodePaths,
) -> Result<Option<(CdiDirectory, Vec<String>)>, String> {
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
    directory: &CdiDirectory,
    names: Vec<String>,
    bindings: &Bindings,
) -> Result<(), String> {
    // Whose files they are is not known while a binding cannot be read.
    if !bindings.unreadable.is_empty() {
        return Ok(());
    }
    let bound: Vec<String> = bindings.all.values().map(file_name).collect();
    for name in names.into_iter().filter(|name| !bound.contains(name)) {
        directory.remove(&name).map_err(|error| error.to_string())?;
        tracing::info!(name, "removed a CDI file that no binding has");
    }
    Ok(())
}
