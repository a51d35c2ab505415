//! Which device nodes containers were promised, and whether they are still those of their HCAs.
//!
//! The kubelet uses the answer to Allocate for each start of a container. A reboot, a driver that is
//! loaded again and a move to a pod's namespace number device nodes anew: what was one HCA's node may
//! be another one's by then, and another pod's. So the HCAs of the container's units are read before it
//! starts. Only a difference that is proved refuses a start.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use hca::chardev::{self, Node};
use hca::{HcaId, Host, UnitId};
use kubelet_api::deviceplugin::ContainerAllocateResponse;

use pools::config::NodeClass;
use pools::snapshot::{Member, Snapshot};
use pools::words::word;

/// How many units an error names.
const MAX_NAMED_UNITS: usize = 4;

/// Device nodes that a container was allocated, and the HCAs that these are of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Promise {
    pub hcas: Vec<PromisedHca>,
    /// Paths.
    pub nodes: BTreeSet<String>,
}

impl Promise {
    pub(super) fn of(
        snapshot: &Snapshot,
        ids: &[String],
        response: &ContainerAllocateResponse,
    ) -> Self {
        let nodes = response.devices.iter();
        Self {
            hcas: named_hcas(ids, Some(snapshot)).unwrap_or_else(|| hcas_of_pool(snapshot)),
            nodes: nodes.map(|node| node.host_path.clone()).collect(),
        }
    }
}

/// Identity, and RDMA devices, by which one is found that is on no bus.
pub(super) type PromisedHca = (HcaId, Vec<String>);

/// What this process promised, by unit.
#[derive(Debug, Default)]
pub(super) struct Promises(Mutex<HashMap<String, Arc<Promise>>>);

impl Promises {
    pub(super) fn note(&self, ids: Vec<String>, promise: Promise) {
        let promise = Arc::new(promise);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(ids.into_iter().map(|id| (id, promise.clone())));
    }

    /// What was promised with these units; `None` if this process did not allocate all of them.
    pub(super) fn of(&self, ids: &[String]) -> Option<Vec<Promise>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut promises: Vec<&Arc<Promise>> = Vec::new();
        for id in ids {
            let promise = all.get(id)?;
            if !promises
                .last()
                .is_some_and(|last| Arc::ptr_eq(last, promise))
            {
                promises.push(promise);
            }
        }
        Some(promises.into_iter().map(|one| (**one).clone()).collect())
    }
}

fn promised_hca(member: &Member) -> PromisedHca {
    let names = member.hca.rdma_names().into_iter();
    (member.hca.id.clone(), names.map(str::to_owned).collect())
}

pub(super) fn hcas_of_pool(snapshot: &Snapshot) -> Vec<PromisedHca> {
    snapshot.members().iter().map(promised_hca).collect()
}

/// The HCAs that these units name; `None` where they stand for a whole pool, whose HCAs may be others
/// now, or where an HCA cannot be found by its identity alone.
pub(super) fn named_hcas(ids: &[String], snapshot: Option<&Snapshot>) -> Option<Vec<PromisedHca>> {
    let hcas: Option<BTreeSet<HcaId>> = ids
        .iter()
        .map(|id| id.parse::<UnitId>().ok()?.hca().cloned())
        .collect();
    let members = snapshot.map(Snapshot::members).unwrap_or_default();
    let hcas = hcas?.into_iter().map(|id| {
        match (members.iter().find(|member| member.hca.id == id), &id) {
            (Some(member), _) => Some(promised_hca(member)),
            (None, HcaId::NodeGuid(_)) => None,
            (None, _) => Some((id, Vec::new())),
        }
    });
    hcas.collect()
}

/// Reads the HCAs, and compares their nodes with the promised ones: what was promised and what is
/// there now, where they differ.
///
/// # Errors
/// An HCA cannot be read.
pub(super) fn difference(host: &Host, promise: &Promise) -> hca::Result<Option<String>> {
    let mut nodes = BTreeSet::new();
    for (hca, names) in &promise.hcas {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let devices = match chardev::of_hca(host, hca, &names) {
            // It is not on this host any more.
            Err(hca::Error::Missing { .. }) => continue,
            devices => devices?,
        };
        let devices = devices.values().flat_map(chardev::CharDevices::iter);
        let present = devices.filter(|device| device.node() == Node::Ready);
        nodes.extend(present.map(|device| format!("/dev/{}", device.dev_name())));
    }
    Ok(compare(&promise.nodes, &nodes))
}

fn compare(promised: &BTreeSet<String>, present: &BTreeSet<String>) -> Option<String> {
    // The others are the same for all HCAs.
    let of_one_hca = [
        NodeClass::Uverbs,
        NodeClass::Umad,
        NodeClass::Issm,
        NodeClass::Ucm,
    ];
    of_one_hca.into_iter().find_map(|class| {
        let prefix = format!("/dev/infiniband/{}", word(&class));
        let of_class = |paths: &BTreeSet<String>| -> Vec<String> {
            let paths = paths.iter().filter(|path| path.starts_with(&prefix));
            paths.cloned().collect()
        };
        let (then, now) = (of_class(promised), of_class(present));
        // Of an HCA in a pod's namespace, verbs nodes alone are seen.
        let is_seen = class == NodeClass::Uverbs || !now.is_empty();
        let is_proved = is_seen && then.iter().any(|path| !now.contains(path));
        let now = match now.is_empty() {
            true => "no node".to_owned(),
            false => now.join(","),
        };
        is_proved.then(|| format!("{} and is {now} now", then.join(",")))
    })
}

/// Units for an error.
pub(super) fn names(ids: &[String]) -> String {
    let named: Vec<&str> = ids
        .iter()
        .take(MAX_NAMED_UNITS)
        .map(String::as_str)
        .collect();
    let named = named.join(",");
    match ids.len().checked_sub(MAX_NAMED_UNITS) {
        None | Some(0) => named,
        Some(more) => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};

    use super::*;

    fn paths(names: &[&str]) -> BTreeSet<String> {
        let path = |name: &&str| format!("/dev/infiniband/{name}");
        names.iter().map(path).collect()
    }

    #[test]
    fn only_a_node_that_is_not_of_these_hcas_is_a_difference() {
        let promised = paths(&["uverbs0", "umad0", "rdma_cm"]);
        for (present, difference) in [
            (&["uverbs0", "umad0"][..], None),
            // It has come since.
            (&["uverbs0", "umad0", "issm0", "uverbs4"], None),
            // In a pod's namespace.
            (&["uverbs0"], None),
            (
                &["uverbs1", "umad0"],
                Some("uverbs0 and is /dev/infiniband/uverbs1 now"),
            ),
            (
                &["uverbs0", "umad1"],
                Some("umad0 and is /dev/infiniband/umad1 now"),
            ),
            (&[], Some("uverbs0 and is no node now")),
        ] {
            let found = compare(&promised, &paths(present));
            let difference = difference.map(|text| format!("/dev/infiniband/{text}"));
            assert_eq!(found, difference, "{present:?}");
        }
        assert_eq!(compare(&paths(&["rdma_cm"]), &paths(&[])), None);
    }

    #[test]
    fn what_is_read_are_the_nodes_of_an_hca_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(false);
        machine::a4(&tree);
        std::fs::remove_dir_all(tree.path("/dev")).unwrap();
        let device = std::fs::canonicalize(tree.path("/sys/class/infiniband/mlx5_3")).unwrap();
        let function = device.ancestors().nth(2).unwrap();
        let id = function.file_name().unwrap().to_str().unwrap().to_owned();
        let promise = Promise {
            hcas: vec![(id.parse().unwrap(), vec!["mlx5_3".into()])],
            nodes: paths(&["uverbs3"]),
        };
        let read = || difference(&tree.host(), &promise).unwrap();
        assert_eq!(read(), None);
        tree.hide_rdma("mlx5_3");
        assert_eq!(read(), None);
        // The kernel makes it anew in the pod's namespace.
        let verbs = function.join("infiniband_verbs");
        std::fs::rename(verbs.join("uverbs3"), verbs.join("uverbs11")).unwrap();
        assert!(read().unwrap().contains("uverbs11"));
        // Unplugged.
        std::fs::remove_dir_all(&verbs).unwrap();
        assert!(read().unwrap().contains("no node"));
    }

    #[test]
    fn units_of_one_allocation_have_one_promise() {
        let promises = Promises::default();
        let promise = |node: &str| Promise {
            hcas: Vec::new(),
            nodes: paths(&[node]),
        };
        let ids = |ids: &[&str]| -> Vec<String> { ids.iter().map(ToString::to_string).collect() };
        promises.note(ids(&["a", "b"]), promise("uverbs0"));
        assert_eq!(
            promises.of(&ids(&["a", "b"])),
            Some(vec![promise("uverbs0")])
        );
        // An app container has what an init container had, and more.
        promises.note(ids(&["b", "c"]), promise("uverbs1"));
        let both = vec![promise("uverbs0"), promise("uverbs1")];
        assert_eq!(promises.of(&ids(&["a", "b"])), Some(both));
        assert_eq!(promises.of(&ids(&["a", "d"])), None);
        assert_eq!(
            names(&ids(&["a", "b", "c", "d", "e", "f"])),
            "a,b,c,d and 2 more"
        );
    }
}
