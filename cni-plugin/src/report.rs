//! What is reported about an attachment beside its result: to the log, and to Multus in the
//! device information file.

use std::net::IpAddr;

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

/// What is known of an attachment once it is made.
#[derive(Debug)]
pub(crate) struct Reported<'a> {
    /// The RDMA ports its traffic goes through.
    pub ports: &'a [PortId],
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The RDMA devices that moved into the pod.
    pub moved: Vec<&'a str>,
    /// PCI address of the function below.
    pub pci: Option<&'a str>,
}

/// The PCI function of an interface or of the netdev below it: that of the allocation, whose
/// netdev may stand on another bus (virtio), else that of the netdev.
pub(crate) fn function(link: &Link, config: &Config) -> Option<String> {
    let allocated = config.allocation.as_ref().and_then(|a| a.unit.hca());
    match allocated {
        Some(HcaId::Pci(address)) => Some(address.to_string()),
        _ if link.bus.as_deref() == Some("pci") => link.bus_device.clone(),
        _ => None,
    }
}

/// Waits for the GIDs of the addresses and writes the reports.
///
/// # Errors
/// Code 100: the pod's namespace cannot be read. What cannot be written is a warning.
pub(crate) fn write(
    node: &Node,
    pod: &Namespace,
    id: &AttachmentId,
    config: &Config,
    reported: &Reported<'_>,
) -> Result<(), Error> {
    if reported.ports.is_empty() && config.device_info.is_none() {
        return Ok(());
    }
    let ifname = id.ifname.as_str();
    let await_in = |host: &Host| {
        gids::await_ready(host, reported.ports, &reported.addresses, ifname, &node.log)
    };
    let gids = if reported.moved.is_empty() {
        await_in(&node.roots)
    } else {
        let sysfs = Sysfs::of(pod, &node.netns.namespace)?;
        await_in(&Host {
            sys: sysfs.path(),
            ..node.roots.clone()
        })
    };
    let Some(named) = &config.device_info else {
        return Ok(());
    };
    let mut devices: Vec<&str> = reported.moved.clone();
    for port in reported.ports {
        if !devices.contains(&port.device.as_str()) {
            devices.push(&port.device);
        }
    }
    let report = Report {
        pci: reported.pci,
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
    Ok(())
}
