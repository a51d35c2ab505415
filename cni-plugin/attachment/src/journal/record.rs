//! What the journal says of an attachment.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::part::Part;

/// The version of records that this program writes and reads.
pub const VERSION: u32 = 1;

/// One attachment: everything that undoing it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    /// Format of this file, [`VERSION`].
    pub version: u32,
    pub network: String,
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `namespace/name` of the pod, where the runtime passes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Seconds since 1970 when it was written.
    pub created: u64,
    pub boot: String,
    pub netns: Netns,
    /// Its interfaces: one of the name `ifname`, or with `devices: all` one for each NIC.
    pub parts: Vec<Part>,
    /// How its addresses are released; none when it has none of an IPAM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<Ipam>,
}

/// A namespace as the runtime named it, and what identified it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netns {
    pub path: String,
    /// Device of the namespace file.
    pub device: u64,
    /// Its inode, which another one has later.
    pub inode: u64,
}

/// An RDMA device that was moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaDevice {
    /// Its name on the host.
    pub name: String,
    /// Its index, which a move keeps.
    pub index: u32,
    /// Its node GUID, and the one that the attachment sets; four groups of hexadecimal digits each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_guids: Vec<String>,
    /// Its parent device, as a PCI address or an auxiliary device's name; none for devices without
    /// hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

/// A slot that was bound late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slot {
    /// The unit that the kubelet allocated.
    pub unit: String,
    /// The HCA that it became, as units name HCAs.
    pub hca: String,
    /// Name of its file in the CDI directory that the node's policy names.
    pub cdi_file: String,
}

/// What releasing the addresses takes, when the runtime no longer says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipam {
    /// `ipam.type`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The network configuration as it was.
    pub config: String,
    /// `CNI_ARGS` as it was.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub args: String,
    /// The directories of `CNI_PATH` whose names are text.
    pub path: Vec<PathBuf>,
}

impl Record {
    /// Whether nothing is left of it but netdevs that returned without their name or GUIDs, or with a
    /// child.
    pub fn is_returned(&self) -> bool {
        let mut moved = self.parts.iter().filter_map(Part::moved);
        moved.any(|moved| moved.returned.is_some())
    }

    /// All slots that the runtime passed for it.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.parts.iter().flat_map(Part::slots)
    }

    /// All RDMA devices that were moved.
    pub fn rdma(&self) -> impl Iterator<Item = &RdmaDevice> {
        self.parts.iter().flat_map(Part::rdma)
    }

    pub fn owner(&self) -> String {
        match &self.pod {
            Some(pod) => format!(
                "pod {pod} ({} of container {})",
                self.ifname, self.container_id
            ),
            None => format!("{} of container {}", self.ifname, self.container_id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back() {
        let text = serde_json::json!({
            "version": 1, "network": "rail0", "containerId": "c1", "ifname": "net1",
            "pod": "ml/a", "created": 1, "boot": "b",
            "netns": {"path": "/run/netns/a", "device": 4, "inode": 5},
            "parts": [
                {"child": {
                    "interface": {"name": "net1-0", "rail": 0, "mtu": 1500, "config": {}},
                    "link": {"macvlan": {"mode": "bridge"}},
                    "parent": {"name": "ens1", "index": 3},
                    "index": 1_048_577,
                }},
                {"rdmaOnly": {"interface": "net1-7", "rdma": [{"name": "mlx5_0", "index": 4}]}},
            ],
            "ipam": {"type": "static", "config": "{}", "path": []},
        });
        let record: Record = serde_json::from_value(text.clone()).unwrap();
        assert_eq!(serde_json::to_value(&record).unwrap(), text);
        assert_eq!(record.rdma().count(), 1);
        assert_eq!(record.owner(), "pod ml/a (net1 of container c1)");
        let nameless = Record {
            pod: None,
            ..record
        };
        assert_eq!(nameless.owner(), "net1 of container c1");
    }

    /// Otherwise DEL would undo nothing and forget it.
    #[test]
    fn a_record_without_parts_is_damaged() {
        let text = r#"{"version": 1, "network": "rail0", "containerId": "c1", "ifname": "net1",
            "created": 1, "boot": "b", "netns": {"path": "/a", "device": 4, "inode": 5}}"#;
        assert!(serde_json::from_str::<Record>(text).is_err());
    }
}
