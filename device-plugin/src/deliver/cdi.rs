//! Delivery by CDI: one specification file for each pool, one CDI device for each HCA.
//!
//! Files are written before the kubelet hears of the units, replaced whole by a rename, and left in
//! place when the daemon ends: a container that is restarted resolves its names anew, for as long
//! as its pod lives. Only files that this program would write are ever removed.

use std::collections::BTreeSet;
use std::path::Path;

use attachment::cdi_file::{CdiDirectory, CdiError, POOL_PREFIX};
use hca::unit::PoolTag;
use kubelet_api::deviceplugin::CdiDevice;
use serde_json::{Value, json};

use super::nodes;
use crate::config::ResourceName;
use crate::snapshot::{Member, Snapshot};

/// Vendor of all our kinds.
const VENDOR: &str = "rdma-device-plugin";
/// What the classes begin with: a class begins with a letter, a resource prefix need not.
const CLASS_PREFIX: &str = "pool-";
/// The oldest specification that has all that is used: since then a device's name may begin with a
/// digit, as PCI addresses do.
const VERSION: &str = "0.5.0";

/// The names for these HCAs, as the container runtime resolves them.
pub(crate) fn names(resource: &ResourceName, members: &[&Member]) -> Vec<CdiDevice> {
    let kind = kind(resource);
    members
        .iter()
        .map(|member| CdiDevice {
            name: format!("{kind}={}", member.hca.id),
        })
        .collect()
}

fn kind(resource: &ResourceName) -> String {
    format!("{VENDOR}/{}", class(resource))
}

/// A class of its own for each resource. Dots are allowed in classes only since version 0.6 of the
/// specification, so the resource's tag distinguishes `a.b/c` from `a_b/c`.
fn class(resource: &ResourceName) -> String {
    let legal = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '_'
        }
    };
    let words: String = resource.as_str().chars().map(legal).collect();
    format!("{CLASS_PREFIX}{words}-{}", PoolTag::of(resource.as_str()))
}

fn file_name(resource: &ResourceName) -> String {
    format!("{VENDOR}-{}.json", class(resource))
}

/// The specification of a pool. An HCA without any node has no place in it: a device that edits
/// nothing is invalid, and a container that asks for it has to fail.
fn specification(snapshot: &Snapshot) -> Value {
    let devices: Vec<Value> = snapshot
        .members()
        .iter()
        .filter(|member| !member.nodes.is_empty())
        .map(|member| {
            let nodes = nodes::cdi_nodes(snapshot.pool(), &[member]);
            json!({"name": member.hca.id.to_string(), "containerEdits": {"deviceNodes": nodes}})
        })
        .collect();
    json!({"cdiVersion": VERSION, "kind": kind(snapshot.resource()), "devices": devices})
}

/// Makes the file of a pool say what its snapshot says; a pool without any HCA keeps the file it
/// has. Returns whether something was written.
///
/// # Errors
/// The file cannot be written, and is as it was.
pub(crate) fn write(directory: &Path, snapshot: &Snapshot) -> Result<bool, String> {
    let mut members = snapshot.members().iter();
    if members.all(|member| member.nodes.is_empty()) {
        return Ok(false);
    }
    let text = format!("{:#}\n", specification(snapshot));
    put(directory, &file_name(snapshot.resource()), &text).map_err(|error| {
        format!(
            "{error}; mount the host's CDI directory into this container, or name it with --cdi-dir"
        )
    })
}

fn put(directory: &Path, name: &str, text: &str) -> Result<bool, CdiError> {
    let directory = CdiDirectory::create(directory)?;
    let is_there = directory.read(name)?.as_deref() == Some(text.as_bytes());
    if !is_there {
        directory.write(name, text)?;
    }
    Ok(!is_there)
}

/// Whether a pool has a file. A pod may hold its names even if new ones are not given any more.
pub(crate) fn exists(directory: &Path, resource: &ResourceName) -> bool {
    directory.join(file_name(resource)).exists()
}

/// Removes our files of resources that are neither configured for CDI nor held by any pod.
pub(crate) fn remove_unused(directory: &Path, used: &BTreeSet<ResourceName>) {
    let keep: BTreeSet<String> = used.iter().map(file_name).collect();
    let Ok(directory) = CdiDirectory::open(directory) else {
        return;
    };
    let names = directory.names(POOL_PREFIX).unwrap_or_default();
    for name in names.into_iter().filter(|name| !keep.contains(name)) {
        match directory.remove(&name) {
            Ok(()) => tracing::info!(name, "removed an unused CDI specification"),
            Err(error) => tracing::warn!(%error, "cannot remove an unused CDI specification"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use super::*;
    use crate::candidate::example::named;
    use crate::config::{Delivery, NodeClass, Policy};
    use crate::config::{PoolConfig, Sharing};
    use crate::snapshot::DeviceNode;

    fn snapshot(resource: &str, uverbs: &[&str]) -> Snapshot {
        let members = uverbs.iter().enumerate().map(|(index, uverbs)| {
            let node = |class, path: &str| DeviceNode {
                class,
                path: path.into(),
            };
            Member {
                nodes: vec![
                    node(NodeClass::Uverbs, uverbs),
                    node(NodeClass::RdmaCm, "/dev/infiniband/rdma_cm"),
                ],
                ..Member::example(named(&format!("0000:3b:00.{index}"), &[]))
            }
        });
        let sharing = Sharing::Exclusive {
            policy: Policy::Spread,
        };
        let pool = PoolConfig {
            delivery: Delivery::Cdi,
            ..PoolConfig::new(ResourceName::parse(resource).unwrap(), sharing, Vec::new())
        };
        Snapshot::new(Arc::new(pool), 0, members.collect(), Arc::default())
    }

    #[test]
    fn a_specification_has_one_device_for_each_hca() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = snapshot(
            "example.com/nic_a",
            &["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"],
        );
        assert!(write(dir.path(), &snapshot).unwrap());
        let path = dir.path().join(file_name(snapshot.resource()));
        let read: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(
            read["kind"],
            "rdma-device-plugin/pool-example_com_nic_a-809a63c4"
        );
        assert_eq!(read["devices"].as_array().unwrap().len(), 2);
        assert_eq!(
            read["devices"][1],
            json!({"name": "0000:3b:00.1", "containerEdits": {"deviceNodes": [
                {"path": "/dev/infiniband/uverbs1", "type": "c", "permissions": "rw"},
                {"path": "/dev/infiniband/rdma_cm", "type": "c", "permissions": "rw"},
            ]}})
        );
        let members: Vec<&Member> = snapshot.members().iter().collect();
        assert_eq!(
            names(snapshot.resource(), &members)[0].name,
            "rdma-device-plugin/pool-example_com_nic_a-809a63c4=0000:3b:00.0"
        );
    }

    #[test]
    fn only_a_changed_file_is_written_and_it_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir
            .path()
            .join(file_name(&ResourceName::parse("rdma/a").unwrap()));
        let inode = || fs::metadata(&path).unwrap().ino();
        assert!(
            write(
                dir.path(),
                &snapshot("rdma/a", &["/dev/infiniband/uverbs0"])
            )
            .unwrap()
        );
        let first = inode();
        assert!(
            !write(
                dir.path(),
                &snapshot("rdma/a", &["/dev/infiniband/uverbs0"])
            )
            .unwrap()
        );
        assert_eq!(inode(), first);
        assert!(
            write(
                dir.path(),
                &snapshot("rdma/a", &["/dev/infiniband/uverbs3"])
            )
            .unwrap()
        );
        assert_ne!(inode(), first);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // Nothing seen: what pods may hold stays resolvable.
        assert!(!write(dir.path(), &snapshot("rdma/a", &[])).unwrap());
        assert!(path.exists());
    }

    #[test]
    fn only_our_own_unused_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for resource in ["rdma/a", "rdma/b"] {
            write(
                dir.path(),
                &snapshot(resource, &["/dev/infiniband/uverbs0"]),
            )
            .unwrap();
        }
        for foreign in [
            "nvidia.com_gpu.json",
            "rdma-device-plugin.json",
            "rdma-device-plugin-pool-x.yaml",
        ] {
            fs::write(dir.path().join(foreign), "{}").unwrap();
        }
        remove_unused(
            dir.path(),
            &BTreeSet::from([ResourceName::parse("rdma/b").unwrap()]),
        );
        let mut left: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(
            left,
            [
                "nvidia.com_gpu.json",
                &file_name(&ResourceName::parse("rdma/b").unwrap()),
                "rdma-device-plugin-pool-x.yaml",
                "rdma-device-plugin.json"
            ]
        );
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named_with_the_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = write(
            file.path(),
            &snapshot("rdma/a", &["/dev/infiniband/uverbs0"]),
        )
        .unwrap_err();
        assert!(error.to_string().contains("--cdi-dir"), "{error}");
    }
}
