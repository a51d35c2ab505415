//! What a container gets for a slot: a CDI device of the slot's name, in a file that exists only
//! while the slot is bound and its devices are in place. Without that file a container runtime
//! refuses to create the container (containerd: `unresolvable CDI devices`).

use std::hash::Hasher as _;
use std::path::Path;

use fnv::FnvHasher;
use kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use serde_json::json;

use crate::binding::record::Binding;
use crate::config::{PoolConfig, Sharing};
use crate::deliver::{env, nodes};
use crate::snapshot::{Member, UnhealthyReason};

/// What the names of all files of slots begin with.
const PREFIX: &str = "rdma-device-plugin-slot_";
/// Vendor and class of all slots.
const KIND: &str = "rdma-device-plugin/slot";
/// The oldest specification that has all that is used. A slot's name begins with a letter.
const VERSION: &str = "0.5.0";

/// The answer to Allocate: one name for each slot, no nodes and no variables.
pub fn response(slots: &[&String]) -> ContainerAllocateResponse {
    let names = slots.iter().map(|slot| CdiDevice {
        name: format!("{KIND}={slot}"),
    });
    ContainerAllocateResponse {
        cdi_devices: names.collect(),
        ..ContainerAllocateResponse::default()
    }
}

/// The name of a slot's file for a sandbox. Each sandbox has its own, so that what removes the file
/// of an old one cannot remove the file of its successor.
pub fn file_name(binding: &Binding) -> String {
    let mut hasher = FnvHasher::default();
    hasher.write(binding.sandbox.as_deref().unwrap_or_default().as_bytes());
    format!("{}{:016x}.json", prefix(&binding.unit), hasher.finish())
}

/// What the names of all files of a slot begin with.
pub fn prefix(slot: &str) -> String {
    let slot = slot.strip_prefix("slot_").unwrap_or(slot);
    format!("{PREFIX}{slot}-")
}

/// The text of a slot's file. `of_container` are all HCAs of the resource that the container has: two
/// slots of one container set the same variables to the same values. `gid_index` is that of all of them,
/// `topology` a file for NCCL that the host has.
pub fn text(
    slot: &str,
    pool: &PoolConfig,
    member: &Member,
    of_container: &[&Member],
    gid_index: Option<u32>,
    topology: Option<&Path>,
) -> String {
    let nodes = nodes::cdi_nodes(pool, &[member]);
    let mut variables = variables(pool, of_container, gid_index);
    let mut edits = serde_json::Map::new();
    if let (Sharing::Late(late), Some(file)) = (pool.sharing, topology)
        && late.nccl_topology
    {
        variables.push(format!("NCCL_TOPO_FILE={}", file.display()));
        let mounts = json!([{"hostPath": file, "containerPath": file,
            "options": ["ro", "bind", "nosuid", "nodev", "noexec"]}]);
        edits.insert("mounts".to_owned(), mounts);
    }
    edits.insert("deviceNodes".to_owned(), nodes.into());
    edits.insert("env".to_owned(), variables.into());
    let device = json!({"name": slot, "containerEdits": edits});
    let document = json!({"cdiVersion": VERSION, "kind": KIND, "devices": [device]});
    format!("{document:#}\n")
}

/// The environment of a container with these HCAs, sorted.
fn variables(pool: &PoolConfig, members: &[&Member], gid_index: Option<u32>) -> Vec<String> {
    let of_libraries = env::of_libraries(pool, members, gid_index);
    let all = env::variables(pool, members)
        .into_iter()
        .chain(of_libraries);
    let mut variables: Vec<String> = all.map(|(name, value)| format!("{name}={value}")).collect();
    variables.sort();
    variables
}

/// Why an HCA's nodes cannot be given to a container, if so.
pub fn obstacle(member: &Member) -> Option<String> {
    let mut health = member.health.clone();
    // The slot is bound to it, whatever the pool would choose now.
    health.remove(|reason| *reason == UnhealthyReason::Excluded);
    if let Some(reason) = health.obstacle() {
        return Some(reason.to_string());
    }
    member
        .nodes
        .is_empty()
        .then(|| "it has no device node".to_owned())
}

#[cfg(test)]
mod tests {
    use crate::config::NodeClass;
    use serde_json::Value;

    use super::*;
    use crate::config::{Late, ResourceName};
    use crate::example::{named, virtual_function};
    use crate::snapshot::{DeviceNode, Health};

    fn member(index: u32) -> Member {
        let node = |class, path: String| DeviceNode { class, path };
        let mut hca = named(&format!("0000:3b:00.{index}"), &[]);
        hca.rdma_devices.push(hca::RdmaDevice {
            name: format!("mlx5_{index}"),
            ..virtual_function().rdma_devices.remove(0)
        });
        Member {
            nodes: vec![
                node(NodeClass::Uverbs, format!("/dev/infiniband/uverbs{index}")),
                node(NodeClass::RdmaCm, "/dev/infiniband/rdma_cm".into()),
            ],
            ..Member::example(hca)
        }
    }

    fn pool(environment: bool) -> PoolConfig {
        let resource = ResourceName::parse("rdma/nic").unwrap();
        let late = Sharing::Late(Late::default());
        PoolConfig {
            environment,
            ..PoolConfig::new(resource, late, Vec::new())
        }
    }

    #[test]
    fn allocate_answers_names_of_slots_and_nothing_else() {
        let slots = ["slot_3e71787e_0".to_owned(), "slot_3e71787e_1".to_owned()];
        let response = response(&slots.iter().collect::<Vec<_>>());
        let names: Vec<&str> = response
            .cdi_devices
            .iter()
            .map(|d| d.name.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "rdma-device-plugin/slot=slot_3e71787e_0",
                "rdma-device-plugin/slot=slot_3e71787e_1"
            ]
        );
        assert!(response.devices.is_empty() && response.envs.is_empty());
    }

    #[test]
    fn a_slots_file_has_the_nodes_of_its_hca_and_the_variables_of_its_container() {
        let (one, two) = (member(0), member(1));
        let text = text(
            "slot_3e71787e_1",
            &pool(true),
            &two,
            &[&one, &two],
            Some(3),
            None,
        );
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(read["kind"], "rdma-device-plugin/slot");
        let device = &read["devices"][0];
        assert_eq!(device["name"], "slot_3e71787e_1");
        let edits = &device["containerEdits"];
        assert_eq!(
            edits["deviceNodes"],
            json!([
                {"path": "/dev/infiniband/uverbs1", "type": "c", "permissions": "rw"},
                {"path": "/dev/infiniband/rdma_cm", "type": "c", "permissions": "rw"}])
        );
        let variables: Vec<&str> = edits["env"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Value::as_str)
            .collect();
        for expected in [
            "RDMA_DEVICES_RDMA_NIC=mlx5_0,mlx5_1",
            "PCIDEVICE_RDMA_NIC=0000:3b:00.0,0000:3b:00.1",
            "NCCL_IB_GID_INDEX=3",
            "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1",
            "NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1:1",
            "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1",
        ] {
            assert!(variables.contains(&expected), "{variables:?}");
        }
        let plain = super::text(
            "slot_3e71787e_1",
            &pool(false),
            &two,
            &[&two],
            Some(3),
            None,
        );
        assert!(!plain.contains("NCCL"), "{plain}");
    }

    #[test]
    fn the_topology_file_is_mounted_where_the_pool_asks_for_it() {
        let topology = Some(Path::new("/opt/microsoft/ndv5-topo.xml"));
        let edits = |pool: &PoolConfig| {
            let text = text("slot_3e71787e_1", pool, &member(0), &[], None, topology);
            let read: Value = serde_json::from_str(&text).unwrap();
            read["devices"][0]["containerEdits"].clone()
        };
        assert_eq!(edits(&pool(true)).get("mounts"), None);
        let late = Late {
            nccl_topology: true,
            ..Late::default()
        };
        let asking = PoolConfig {
            sharing: Sharing::Late(late),
            ..pool(false)
        };
        let edits = edits(&asking);
        assert_eq!(
            edits["mounts"],
            json!([{"hostPath": "/opt/microsoft/ndv5-topo.xml",
                "containerPath": "/opt/microsoft/ndv5-topo.xml",
                "options": ["ro", "bind", "nosuid", "nodev", "noexec"]}])
        );
        let variables = edits["env"].as_array().unwrap();
        let named = json!("NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml");
        assert!(variables.contains(&named), "{variables:?}");
    }

    #[test]
    fn an_hca_without_nodes_is_not_given() {
        assert_eq!(obstacle(&member(0)), None);
        let gone = Member {
            health: Health::from([UnhealthyReason::Gone]),
            ..member(0)
        };
        assert!(obstacle(&gone).unwrap().contains("not seen"));
        let down = Member {
            health: Health::from([UnhealthyReason::Port("down".into())]),
            ..member(0)
        };
        assert_eq!(obstacle(&down), None);
        let bare = Member {
            nodes: Vec::new(),
            ..member(0)
        };
        assert!(obstacle(&bare).is_some());
    }
}
