//! Environment of a response: which HCAs the container got.
//!
//! Names are made of the whole resource name, because the kubelet keeps only the first of two
//! values for one name, and a container may hold several resources.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

use crate::config::model::{TUN, VHOST_NET};
use crate::config::{NodeClass, PoolConfig, ResourceName, Variables};
use crate::snapshot::Member;
use crate::words::word;

/// Variables for a container:
/// - `RDMA_DEVICES_<RESOURCE>` lists RDMA devices as applications name them (`mlx5_0,mlx5_1`);
/// - `PCIDEVICE_<RESOURCE>` lists HCA identities, as the SR-IOV plugin does;
/// - `PCIDEVICE_<RESOURCE>_INFO` says more about each of them, in that plugin's JSON.
pub fn variables(pool: &PoolConfig, members: &[&Member]) -> HashMap<String, String> {
    let suffix = suffix(&pool.resource);
    let devices: Vec<&str> = members
        .iter()
        .flat_map(|member| member.hca.rdma_names())
        .collect();
    let identities: Vec<String> = members
        .iter()
        .map(|member| member.hca.id.to_string())
        .collect();
    let info: Map<String, Value> = members
        .iter()
        .map(|member| (member.hca.id.to_string(), describe(pool, member)))
        .collect();
    let (identities, info) = (identities.join(","), Value::Object(info).to_string());
    let mut variables = HashMap::from([(format!("RDMA_DEVICES_{suffix}"), devices.join(","))]);
    let suffixes = match pool.variables {
        Variables::Shell => vec![suffix],
        Variables::Sriov => vec![sriov_suffix(&pool.resource), suffix],
    };
    for suffix in suffixes {
        variables.insert(format!("PCIDEVICE_{suffix}"), identities.clone());
        variables.insert(format!("PCIDEVICE_{suffix}_INFO"), info.clone());
    }
    variables
}

/// Variables of communication libraries that name the ports of these HCAs; none unless the pool asks for
/// them. `gid_index` is that of all of them.
pub fn of_libraries(
    pool: &PoolConfig,
    members: &[&Member],
    gid_index: Option<u32>,
) -> Vec<(String, String)> {
    if !pool.environment {
        return Vec::new();
    }
    let ports = members.iter().flat_map(|member| member.hca.port_names());
    let ports = ports.collect::<Vec<String>>().join(",");
    let index = gid_index.map(|index| ("NCCL_IB_GID_INDEX", index.to_string()));
    let variables = [
        // `=` asks NCCL for exactly these: mlx5_1 alone would also mean mlx5_10.
        ("NCCL_IB_HCA", format!("={ports}")),
        ("NVSHMEM_HCA_LIST", ports.clone()),
        ("UCX_NET_DEVICES", ports),
    ];
    let all = variables.into_iter().chain(index);
    all.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The resource name as the SR-IOV plugin makes part of a variable's name of it: it replaces dots
/// and the slash alone, so a `-` stays, which programs can read and shells cannot.
fn sriov_suffix(resource: &ResourceName) -> String {
    resource
        .as_str()
        .replace(['.', '/'], "_")
        .to_ascii_uppercase()
}

/// The resource name as part of a variable's name that every shell can use.
pub fn suffix(resource: &ResourceName) -> String {
    let legal = |c: char| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_uppercase()
        } else {
            '_'
        }
    };
    resource.as_str().chars().map(legal).collect()
}

/// What the SR-IOV plugin's information providers say about an RDMA device.
fn describe(pool: &PoolConfig, member: &Member) -> Value {
    let mut rdma = Map::new();
    // A CDI file has the nodes of now, and these variables stay as they are over a reboot.
    for class in NodeClass::ALL.into_iter().filter(|_| !pool.has_file()) {
        let paths: Vec<&str> = member
            .nodes
            .iter()
            .filter(|node| node.class == class)
            .map(|node| node.path.as_str())
            .collect();
        if !paths.is_empty() {
            rdma.insert(word(&class), paths.join(",").into());
        }
    }
    rdma.insert("rdma_dev".into(), member.hca.rdma_names().join(",").into());
    let id = member.hca.id.to_string();
    let mut info = json!({"generic": {"deviceID": id}, "rdma": rdma});
    if let (Some(info), false) = (info.as_object_mut(), pool.extra_nodes.is_empty()) {
        let vhost = json!({"net-mount": VHOST_NET, "tun-mount": TUN});
        info.insert("vhost".into(), vhost);
    }
    let extra = extra_info(pool, &id);
    if let (Some(info), false) = (info.as_object_mut(), extra.is_empty()) {
        info.insert("extraInfo".into(), json!(extra));
    }
    info
}

/// What the administrator says about all HCAs, and above that about this one.
fn extra_info<'t>(pool: &'t PoolConfig, id: &str) -> BTreeMap<&'t str, &'t str> {
    ["*", id]
        .into_iter()
        .filter_map(|key| pool.additional_info.get(key))
        .flatten()
        .map(|(key, text)| (key.as_str(), text.as_str()))
        .collect()
}
