//! Writes what containers get for slots whose devices are in place: after a move of the CNI plugin, and
//! before each start of a container.
//!
//! The device nodes are read at that moment, for the HCAs of the containers alone.

use std::collections::BTreeMap;

use attachment::cdi_file::CdiDirectory;
use node_wire::{Committed, Failure, FailureKind, Pod};

use super::binder::unavailable;
use super::containers;
use super::slot_files;
use super::store::Store;
use crate::node_paths::NodePaths;
use crate::report::Report;
use pools::binding::plan::late_pool;
use pools::binding::record::{Binding, Stage};
use pools::config::NodeRule;
use pools::deliver::slot;
use pools::device_nodes::HcaDevices;
use pools::snapshot::{Member, UnhealthyReason};

/// Slots of a pod whose devices are in place.
#[derive(Debug, Clone)]
pub(super) struct Commit {
    pub pod: Pod,
    pub units: Vec<String>,
    /// The sandbox that the CNI plugin attached them to, with their GID indexes; none at the start of a
    /// container.
    pub attached: Option<(String, BTreeMap<String, u32>)>,
}

/// Writes the files of slots, and notes that they are there. The note comes first: a file without its
/// note would outlive evidence that is looked for by it.
///
/// # Errors
/// A slot is not bound to the pod and this sandbox, or its HCA cannot be given: nothing is written then.
pub(super) fn commit(
    question: &Commit,
    store: &Store,
    paths: &NodePaths,
    report: &Report,
) -> Result<Committed, Failure> {
    let bindings = store.load().map_err(unavailable)?;
    let mut all: Vec<Binding> = bindings.all.values().cloned().collect();
    let mut slots = Vec::new();
    for unit in &question.units {
        let newest = bindings.newest(&question.pod, unit);
        let sandbox = question.attached.as_ref().map(|(sandbox, _)| sandbox);
        let newest = newest.filter(|one| sandbox.is_none() || one.sandbox.as_ref() == sandbox);
        let Some(newest) = newest else {
            return Err(Failure::new(
                FailureKind::NotBound,
                format!(
                    "{unit} is not bound for pod {} and sandbox {}: its binding was freed, or is \
                     another sandbox's",
                    question.pod,
                    sandbox.map_or("(none)", String::as_str)
                ),
            ));
        };
        let mut one = newest.clone();
        // A container that runs with a slot keeps it, also if an attachment that is made later is undone.
        if matches!(one.stage, Stage::Bound | Stage::Detached) {
            one.stage = match question.attached {
                Some(_) => Stage::Attached,
                None => Stage::Started,
            };
        }
        if let Some((_, indexes)) = &question.attached {
            one.gid_index = indexes.get(unit).copied();
        }
        let found = || containers::find(&paths.cgroup_dir, one.pod.uid.as_deref()?);
        one.cgroup = one.cgroup.clone().or_else(found);
        all.retain(|known| known.hca != one.hca);
        all.push(one.clone());
        slots.push(one);
    }
    let texts = slots.iter().map(|one| text(one, &all, paths, report));
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let directory = CdiDirectory::create(&paths.cdi_dir).map_err(unavailable)?;
    let mut cdi_files = Vec::new();
    for (one, text) in slots.iter().zip(texts) {
        let before = bindings.all.get(&one.hca);
        store.put(one, before).map_err(unavailable)?;
        let name = slot_files::write(&directory, one, &text);
        cdi_files.push(name.map_err(unavailable)?);
    }
    Ok(Committed { cdi_files })
}

/// The text of a slot's file.
fn text(
    one: &Binding,
    all: &[Binding],
    paths: &NodePaths,
    report: &Report,
) -> Result<String, Failure> {
    let cannot = |why: String| {
        let what = format!("give {} to a container as {}: {why}", one.hca, one.unit);
        Failure::new(FailureKind::CannotBind, what)
    };
    let Some((snapshot, _)) = late_pool(&one.resource, &report.snapshots()) else {
        let resource = &one.resource;
        let why = format!("{resource} is not a pool with binding late of this node any more");
        return Err(cannot(why));
    };
    let member = |one: &Binding| -> Result<Member, String> {
        let mut members = snapshot.members().iter();
        let known = members.find(|member| member.hca.id == one.hca);
        let known = known.ok_or("it is not in the pool any more")?;
        let read = HcaDevices::read(&paths.host, &known.hca);
        let devices = read.map_err(|error| error.to_string())?;
        with_devices(known, &devices, &snapshot.pool().nodes)
    };
    let own = member(one).map_err(cannot)?;
    let of_container = |other: &&Binding| {
        (&other.sandbox, &other.container, &other.resource)
            == (&one.sandbox, &one.container, &one.resource)
            && other.is_of(&one.pod)
    };
    let mut of_container: Vec<&Binding> = all.iter().filter(of_container).collect();
    of_container.sort_by(|a, b| (a.rail, &a.hca).cmp(&(b.rail, &b.hca)));
    let gid_index = common_gid_index(&of_container).unwrap_or_else(|why| {
        if snapshot.pool().environment {
            let (pod, unit) = (&one.pod, &one.unit);
            tracing::info!(%pod, unit, "NCCL_IB_GID_INDEX is not set: {why}");
        }
        None
    });
    let members: Vec<Member> = of_container
        .into_iter()
        .filter_map(|one| member(one).ok())
        .collect();
    Ok(slot::text(
        &one.unit,
        snapshot.pool(),
        &own,
        &members.iter().collect::<Vec<_>>(),
        gid_index,
        report.topology.nccl_topology.as_deref(),
    ))
}

/// A member of the last scan with the device nodes of now.
fn with_devices(known: &Member, devices: &HcaDevices, rule: &NodeRule) -> Result<Member, String> {
    let (nodes, lacking) = devices.nodes(rule);
    let names: Vec<&str> = devices.rdma_devices().collect();
    if lacking.is_none() && names != known.hca.rdma_names() {
        return Err(format!(
            "its RDMA devices are [{}] by now, and the last scan found [{}]",
            names.join(", "),
            known.hca.rdma_names().join(", ")
        ));
    }
    let mut health = known.health.clone();
    // A node that the last scan missed may be there.
    health.remove(|reason| matches!(reason, UnhealthyReason::DeviceNode(_)));
    if let Some(lacking) = lacking {
        health.add(UnhealthyReason::DeviceNode(lacking));
    }
    let member = Member {
        nodes,
        health,
        ..known.clone()
    };
    match slot::obstacle(&member) {
        Some(why) => Err(why),
        None => Ok(member),
    }
}

/// The GID index of all HCAs of a container: NCCL takes one. None where no HCA has one, as on InfiniBand.
///
/// # Errors
/// HCAs differ, or one is not attached or has none.
fn common_gid_index(of_container: &[&Binding]) -> Result<Option<u32>, String> {
    let mut indexes = of_container.iter().map(|one| one.gid_index);
    let first = indexes.next().flatten();
    if indexes.all(|other| other == first) {
        return Ok(first);
    }
    let index = |one: &&Binding| match one.gid_index {
        Some(index) => format!("{} has GID index {index}", one.hca),
        None => format!("{} has none yet", one.hca),
    };
    let all: Vec<String> = of_container.iter().map(index).collect();
    Err(all.join(", "))
}
