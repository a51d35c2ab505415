//! Looking up one object by a name somebody wrote down, without a scan of the host.
//!
//! A network plugin has one netdev, one PCI address or one auxiliary device and a tenth of a
//! millisecond. Each function here reads the directories around that object only. The one
//! exception is stated at [`ports_of_netdev`].

use std::collections::BTreeSet;

use serde::Serialize;

use crate::address::MacAddress;
use crate::host::{self, Host, Result};
use crate::netdev::{self, Netdev};
use crate::parent::Parent;
use crate::pci::PciAddress;
use crate::port;
use crate::rdma::{self, PortId};

/// What stands on a piece of hardware.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Occupants {
    /// Netdevs, representors and IPoIB children left out, in order of name.
    pub netdevs: Vec<Netdev>,
    /// Names of RDMA devices, in order.
    pub rdma_devices: Vec<String>,
}

/// Netdevs and RDMA devices of one PCI function; those of its sub-functions are not among them.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such function; [`host::Error::Read`] if sysfs cannot be read.
pub fn on_pci(host: &Host, address: PciAddress) -> Result<Occupants> {
    let directory = host.bus_entry("PCI device", "pci", &address.to_string())?;
    occupants(host, &Parent::at(host, directory)?)
}

/// Netdevs and RDMA devices of one auxiliary device, such as the sub-function `mlx5_core.sf.4`.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such device, [`host::Error::BadName`] if there cannot be;
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn on_auxiliary(host: &Host, name: &str) -> Result<Occupants> {
    let directory = host.bus_entry("auxiliary device", "auxiliary", name)?;
    occupants(host, &Parent::at(host, directory)?)
}

fn occupants(host: &Host, parent: &Parent) -> Result<Occupants> {
    let mut rdma_devices = parent.rdma_devices()?;
    if rdma_devices.is_empty() {
        // Soft RoCE on a NIC: the device is not below the NIC, but says which netdev it is on.
        for netdev in rdma::siblings(host, Some(parent))? {
            rdma_devices.extend(
                parentless(host, &netdev.name)?
                    .into_iter()
                    .map(|p| p.device),
            );
        }
    }
    Ok(Occupants {
        netdevs: rdma::siblings(host, Some(parent))?,
        rdma_devices,
    })
}

/// The RDMA ports through which a netdev's traffic can go; empty if it is not RDMA-capable.
///
/// A netdev on RDMA hardware has that hardware's port. A bond, VLAN, macvlan or ipvlan has the
/// ports of the netdevs below it. Otherwise the RDMA devices that have no netdev on their own
/// hardware (soft RoCE, and NICs whose RDMA function is a different PCI function) are asked for
/// theirs, which reads a few files of each such device.
///
/// # Errors
/// [`host::Error::Missing`] if the netdev is not in this network namespace, [`host::Error::BadName`] if the
/// name cannot be a netdev's; [`host::Error::Read`] if sysfs cannot be read.
pub fn ports_of_netdev(host: &Host, name: &str) -> Result<Vec<PortId>> {
    let mut ports = BTreeSet::new();
    collect_ports(host, name, MAX_STACK, &mut ports)?;
    Ok(ports.into_iter().collect())
}

/// Netdevs can be stacked only eight deep (`MAX_NEST_DEV`, `include/linux/netdevice.h`).
const MAX_STACK: u32 = 8;

fn collect_ports(host: &Host, name: &str, depth: u32, ports: &mut BTreeSet<PortId>) -> Result<()> {
    let directory = host.class_entry("netdev", "net", name)?;
    let parent = Parent::of(host, &directory)?;
    if let Some(parent) = &parent {
        let found = hardware_ports(host, parent, name)?;
        if !found.is_empty() {
            ports.extend(found);
            return Ok(());
        }
    }
    if depth > 0 {
        let before = ports.len();
        for lower in netdev::lowers(&directory)? {
            match collect_ports(host, &lower, depth - 1, ports) {
                Err(error) if error.is_missing() => {}
                result => result?,
            }
        }
        if ports.len() > before {
            return Ok(());
        }
    }
    ports.extend(parentless(host, name)?);
    Ok(())
}

/// Ports of the RDMA devices on the same hardware that belong to this netdev.
fn hardware_ports(host: &Host, parent: &Parent, name: &str) -> Result<Vec<PortId>> {
    let devices = parent.rdma_devices()?;
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    let netdev = netdev::read(host, name)?;
    if netdev.is_representor() {
        return Ok(Vec::new());
    }
    let mut ports = Vec::new();
    for device in devices {
        let directory = match host.class_entry("RDMA device", "infiniband", &device) {
            Err(error) if error.is_missing() => continue,
            directory => directory?,
        };
        let numbers = rdma::port_numbers(&directory)?;
        for number in &numbers {
            let link_layer = port::link_layer(&directory.join("ports").join(number.to_string()))?;
            let same_port = numbers.len() == 1 || netdev.dev_port + 1 == *number;
            if same_port && rdma::fits(&netdev, link_layer) {
                ports.push(PortId {
                    device: device.clone(),
                    port: *number,
                });
            }
        }
    }
    Ok(ports)
}

/// Ports of RDMA devices without netdevs on their own hardware that name this netdev.
fn parentless(host: &Host, netdev: &str) -> Result<Vec<PortId>> {
    let mut ports = Vec::new();
    for device in host::names(&host.class("infiniband"))? {
        let directory = match host.class_entry("RDMA device", "infiniband", &device) {
            Err(error) if error.is_missing() => continue,
            directory => directory?,
        };
        if let Some(soft) = host::attribute(&directory, "parent")? {
            if soft == netdev {
                ports.push(PortId { device, port: 1 });
            }
            continue;
        }
        if let Some(parent) = Parent::of(host, &directory)?
            && !parent.netdevs()?.is_empty()
        {
            continue;
        }
        for number in rdma::port_numbers(&directory)? {
            let port = directory.join("ports").join(number.to_string());
            let table = crate::gid::table(&port)?;
            if table
                .entries
                .iter()
                .any(|entry| entry.netdev.as_deref() == Some(netdev))
            {
                ports.push(PortId {
                    device: device.clone(),
                    port: number,
                });
            }
        }
    }
    Ok(ports)
}

/// Netdevs with this link-layer address, current or permanent, in order of name. Several can
/// have it: a bond and its members, a VLAN and its parent.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn netdevs_by_mac(host: &Host, mac: &MacAddress) -> Result<Vec<Netdev>> {
    let mut found = Vec::new();
    for name in host::names(&host.class("net"))? {
        let netdev = match netdev::read(host, &name) {
            Err(error) if error.is_missing() => continue,
            netdev => netdev?,
        };
        if netdev.mac.as_ref() == Some(mac) || netdev.permanent_mac.as_ref() == Some(mac) {
            found.push(netdev);
        }
    }
    Ok(found)
}
