//! The loop that frees bindings of pods that ended without a DEL which reached this daemon, and
//! removes CDI files that no binding has.
//!
//! A binding is freed after two rounds showed that it ended, each by a list of the kubelet of its own
//! where that is the evidence, and it did not change in between ([`super::evidence`]). A CDI file without a binding is removed at once: its container must not
//! start with device nodes that are not bound to its pod.

use std::sync::Arc;
use std::time::Duration;

use attachment::cdi_file::{CdiDirectory, PREFIX};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::binder::Binder;
use super::evidence::{Facts, Over, over};
use super::slot_specification;
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
    if bindings.all.is_empty() {
        return Ok(Vec::new());
    }
    let attached = paths.attached()?;
    let now = attachment::node::now();
    let over = bindings.all.into_values().filter_map(|one| {
        let listed = held.map(|held| {
            let resource = crate::config::ResourceName::parse(&one.resource).ok();
            let holder = resource.and_then(|resource| {
                let mut units = held.of(&resource);
                units.find(|(unit, _)| *unit == one.unit)
            });
            (held.asked(), holder.map(|(_, holder)| holder))
        });
        let facts = Facts {
            attached: &attached,
            is_of_another_uid: held.is_some_and(|held| {
                let uid = one.pod.uid.as_deref();
                uid.is_some_and(|uid| held.is_of_another_uid(uid, &one.resource, &one.unit))
            }),
            listed,
            now,
        };
        let over = over(&one, facts)?;
        Some((one, over))
    });
    Ok(over.collect())
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
    directory: &CdiDirectory,
    names: Vec<String>,
    bindings: &Bindings,
) -> Result<(), String> {
    // Whose files they are is not known while a binding cannot be read.
    if !bindings.unreadable.is_empty() {
        return Ok(());
    }
    let bound: Vec<String> = bindings
        .all
        .values()
        .map(|one| slot_specification::file_name(&one.unit, one.sandbox.as_deref()))
        .collect();
    for name in names.into_iter().filter(|name| !bound.contains(name)) {
        directory.remove(&name).map_err(|error| error.to_string())?;
        tracing::info!(name, "removed a CDI file that no binding has");
    }
    Ok(())
}
