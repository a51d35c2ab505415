//! RDMA devices that serve the platform and that no pod can have.

use crate::host::Host;
use crate::netdev::Netdev;
use crate::pci;
use crate::port::LinkLayer;
use crate::rdma::{RdmaDevice, Reserved};

/// On HGX B200 and later each `NVSwitch` has InfiniBand functions for its own management. Their vital
/// product data has this word (NVIDIA Fabric Manager, "NVLink subnet manager").
const SWITCH_MANAGEMENT: &[u8] = b"SW_MNG";
const MELLANOX: u16 = 0x15b3;
/// Azure's Accelerated Networking puts a VF below it.
const NETVSC: &str = "hv_netvsc";

/// Marks the devices that are reserved.
pub(crate) fn mark(host: &Host, devices: &mut [RdmaDevice], netdevs: &[Netdev]) {
    for device in devices {
        let netvsc = device.netdevs().find_map(|name| {
            let named = |name: &str| netdevs.iter().find(|netdev| netdev.name == name);
            let master = named(named(name)?.master.as_deref()?)?;
            (master.driver.as_deref() == Some(NETVSC)).then(|| master.name.clone())
        });
        device.reserved = match netvsc {
            Some(netdev) => Some(Reserved::Netvsc(netdev)),
            None => manages_switch(host, device).then_some(Reserved::NvSwitch),
        };
    }
}

fn manages_switch(host: &Host, device: &RdmaDevice) -> bool {
    let mut layers = device.ports.iter().map(|port| port.link_layer);
    let Some(function) = device.pci.as_ref().filter(|pci| {
        pci.vendor == MELLANOX && !pci.is_vf() && layers.any(|one| one == LinkLayer::InfiniBand)
    }) else {
        return false;
    };
    let directory = host.pci(function.address);
    // Not permitted, or it does not answer: asked again by the next scan.
    let data = directory.and_then(|directory| pci::vital_product_data(&directory));
    data.ok().flatten().is_some_and(|data| {
        let mut words = data.windows(SWITCH_MANAGEMENT.len());
        words.any(|word| word == SWITCH_MANAGEMENT)
    })
}
