//! What is reported about an attachment beside its result: to the log, and to Multus in the
//! device information file.

use std::{collections::BTreeMap, net::IpAddr, time::Instant};

use attachment::node::Node;
use cni_wire::AttachmentId;
use hca::{HcaId, Host, PortId};
use netlink::{Namespace, link::Link, sysfs::Sysfs};

use crate::{
    config::Config,
    device_info::{self, Report},
    error::Error,
    gids,
};

/// What is known of an interface once it is made.
#[derive(Debug)]
pub(crate) struct Reported {
    /// Its name in the pod.
    pub ifname: String,
    /// The slot that it was made for.
    pub slot: Option<String>,
    /// The RDMA ports its traffic goes through.
    pub ports: Vec<PortId>,
    pub addresses: Vec<IpAddr>,
    /// The RDMA devices that moved into the pod.
    pub moved: Vec<String>,
    /// PCI address of the function below.
    pub pci: Option<String>,
}

/// The PCI function of an interface or of the netdev below it: that of the allocation, whose
/// netdev may stand on another bus (virtio), else that of the netdev.
pub(crate) fn function(link: Option<&Link>, config: &Config) -> Option<String> {
    let allocated = config.allocation.as_ref().and_then(|a| a.hcas.first());
    match allocated {
        Some(HcaId::Pci(address)) => Some(address.to_string()),
        _ => {
            let on_pci = link.filter(|link| link.bus.as_deref() == Some("pci"))?;
            on_pci.bus_device.clone()
        }
    }
}

/// Waits for the GIDs of the interfaces' addresses and writes the reports. There is one device
/// information file: of several interfaces it has the first's PCI function, and all RDMA devices and
/// GIDs.
///
/// Returns the GID indexes of slots, as the daemon is told them.
///
/// # Errors
/// Code 100: the pod's namespace cannot be read. What cannot be written is a warning.
pub(crate) fn write(
    node: &Node,
    pod: &Namespace,
    id: &AttachmentId,
    config: &Config,
    interfaces: &[Reported],
) -> Result<BTreeMap<String, u32>, Error> {
    let mut indexes = BTreeMap::new();
    if interfaces.iter().all(|one| one.ports.is_empty()) && config.device_info.is_none() {
        return Ok(indexes);
    }
    let started = Instant::now();
    let mut gids = Vec::new();
    for one in interfaces {
        let await_in = |host: &Host| {
            gids::await_ready(
                host,
                &one.ports,
                &one.addresses,
                &one.ifname,
                started,
                &node.log,
            )
        };
        let ready = if one.moved.is_empty() {
            await_in(&node.roots)
        } else {
            let sysfs = Sysfs::of(pod, &node.netns.namespace)?;
            await_in(&Host {
                sys: sysfs.path(),
                ..node.roots.clone()
            })
        };
        indexes.extend(one.slot.clone().zip(gids::common_index(&ready)));
        gids.extend(ready);
    }
    let Some(named) = &config.device_info else {
        return Ok(indexes);
    };
    let mut devices: Vec<&str> = Vec::new();
    for one in interfaces {
        let of_ports = one.ports.iter().map(|port| port.device.as_str());
        for device in one.moved.iter().map(String::as_str).chain(of_ports) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
    }
    let report = Report {
        pci: interfaces.first().and_then(|first| first.pci.as_deref()),
        rdma: devices,
        gids: &gids,
    };
    let written = device_info::place(&node.root, named, id).and_then(|file| {
        device_info::write(&file, &report).map_err(|e| format!("{}: {e}", file.display()))
    });
    if let Err(reason) = written {
        node.log
            .warn(format_args!("device information not written: {reason}"));
    }
    Ok(indexes)
}
