//! Delivery by CDI: one specification file for each pool, one CDI device for each HCA.
//!
//! A file is written before the kubelet hears of the units, and left in place when the daemon ends: a
//! container that is restarted resolves its names anew, for as long as its pod lives.

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
pub fn names(resource: &ResourceName, members: &[&Member]) -> Vec<CdiDevice> {
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

/// The name of a pool's file.
pub fn file_name(resource: &ResourceName) -> String {
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

/// The text of the pool's file; none without any HCA: a pod may hold names of the file that is there.
pub fn text(snapshot: &Snapshot) -> Option<String> {
    let mut members = snapshot.members().iter();
    let has_nodes = members.any(|member| !member.nodes.is_empty());
    has_nodes.then(|| format!("{:#}\n", specification(snapshot)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::{Delivery, NodeClass, Policy};
    use crate::config::{PoolConfig, Sharing};
    use crate::example::named;
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
        let snapshot = snapshot(
            "example.com/nic_a",
            &["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"],
        );
        let read: Value = serde_json::from_str(&text(&snapshot).unwrap()).unwrap();
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
    fn a_pool_that_sees_no_node_keeps_the_file_it_has() {
        assert_eq!(text(&snapshot("rdma/a", &[])), None);
    }
}
