//! RDMA devices of VFs without a node GUID.

use hca::RdmaDevice;
use hca::pci::Sriov;
use hca::rdma::NodeType;

/// Why `rdma_cm` does not work with a device, and the remedy: it is of a VF, and its node GUID is zero.
pub(crate) fn missing(device: &RdmaDevice) -> Option<(&'static str, String)> {
    let pci = device.pci.as_ref()?;
    if device.node_guid.is_some() || device.node_type != NodeType::ChannelAdapter {
        return None;
    }
    let remedy = match pci.sriov {
        Sriov::Virtual { physical, index } => {
            let number = index.map_or("N".to_owned(), |index| index.to_string());
            format!(
                "ip link set PF vf {number} node_guid GUID, with the netdev of {physical} as \
                 PF, or echo GUID > /sys/bus/pci/devices/{physical}/sriov/{number}/node; then \
                 bind the VF's driver again"
            )
        }
        // In a VM its PF is not visible.
        Sriov::None => {
            "set the VF's node GUID on the host of this VM, then start the VM again".to_owned()
        }
        Sriov::Physical { .. } => return None,
    };
    Some((
        "its node GUID is zero: verbs work, programs that use rdma_cm crash",
        remedy,
    ))
}
