//! Reads what bindings are judged by: the journal and the pods' cgroups.

use std::sync::Arc;
use std::time::Instant;

use attachment::journal::Journal;
use attachment::part::Part;
use pools::binding::record::Bindings;
use pools::binding::state::{Asker, Attached, Evidence, Processes};
use pools::holdings::Holdings;

use super::containers;
use crate::node_paths::NodePaths;

/// Reads the journal and the pods' cgroups.
///
/// # Errors
/// The journal cannot be listed.
pub(crate) fn read(
    paths: &NodePaths,
    bindings: Arc<Bindings>,
    held: Option<Arc<Holdings>>,
    asker: Option<Asker>,
) -> Result<Evidence, String> {
    let root = &paths.cgroup_dir;
    let processes = bindings.all.iter().map(|(hca, one)| {
        let found = || containers::find(root, one.pod.uid.as_deref()?);
        let cgroup = one.cgroup.clone().or_else(found);
        let processes = cgroup.map(|cgroup| containers::processes(root, &cgroup));
        (hca.clone(), processes.unwrap_or(Processes::Unknown))
    });
    let allocated = held.iter().flat_map(|held| held.hcas());
    let allocated = allocated.filter_map(|(hca, all)| Some((hca, all.into_iter().next()?)));
    let uid = asker.as_ref().and_then(|asker| asker.pod.uid.as_deref());
    Ok(Evidence {
        attached: attached(paths)?,
        cgroup: uid.and_then(|uid| containers::find(root, uid)),
        allocated: allocated.collect(),
        held,
        processes: processes.collect(),
        asker,
        now: Instant::now(),
        seconds: attachment::node::now(),
        bindings,
    })
}

/// What the CNI plugin's journal has.
fn attached(paths: &NodePaths) -> Result<Attached, String> {
    let read = Journal::at(&paths.state_dir()).records();
    let (records, unreadable) = read.map_err(|error| error.to_string())?;
    let slots = records.iter().flat_map(|(_, record)| {
        // A NIC that a record has is in use, by whatever unit it got there.
        let hcas = record.parts.iter().flat_map(Part::hcas);
        hcas.filter_map(|hca| Some((record.container_id.clone(), hca.parse().ok()?)))
    });
    let unreadable = unreadable.into_iter();
    Ok(Attached {
        slots: slots.collect(),
        unreadable: unreadable
            .map(|(id, _)| id.container_id.to_string())
            .collect(),
    })
}
