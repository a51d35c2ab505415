//! Finding one object by the name that a configuration gives, without a scan of the host.
//!
//! A network plugin has one netdev, one PCI address or one auxiliary device and a tenth of a
//! millisecond. Each function here reads the directories around that object only. The one
//! exception is stated at [`hardware_of_netdev`].

use std::collections::BTreeSet;
use std::path::Path;

use crate::address::{Guid, MacAddress};
use crate::association::{self, NetdevHints};
use crate::gid;
use crate::host::{self, Host, Result, present};
use crate::netdev::{self, Netdev};
use crate::parent::Parent;
use crate::pci::PciAddress;
use crate::port;
use crate::port_id::PortId;
use crate::rdma;
use crate::sub_device;
use crate::unit::HcaId;

/// What stands on a piece of hardware.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occupants {
    /// Netdevs of the HCA, which can be on another PCI function, in order of interface index.
    pub netdevs: Vec<Netdev>,
    /// Names of RDMA devices, in order.
    pub rdma_devices: Vec<String>,
}

/// Netdevs and RDMA devices of one PCI function; those of its sub-functions are not among them.
///
/// # Errors
/// [`host::Error::Missing`] if there is no such function; [`host::Error::Read`] if sysfs cannot be read.
pub fn on_pci(host: &Host, address: PciAddress) -> Result<Occupants> {
    let directory = host.pci(address)?;
    occupants(host, &Parent::at(host, directory)?)
}

/// Netdevs and RDMA devices of an HCA, by the name both plugins have for it.
///
/// # Errors
/// [`host::Error::Missing`] if it is not on this host, or not in this network namespace;
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn on_hca(host: &Host, hca: &HcaId) -> Result<Occupants> {
    let guid = match hca {
        HcaId::Pci(address) => return on_pci(host, *address),
        HcaId::Auxiliary(name) => {
            let directory = host.auxiliary(name)?;
            return occupants(host, &Parent::at(host, directory)?);
        }
        HcaId::NodeGuid(guid) => *guid,
    };
    let class = host.class("infiniband");
    let mut rdma_devices = Vec::new();
    for name in host::names(&class)? {
        if others(host::parsed(&class.join(&name), "node_guid"))?.flatten() == Some(guid) {
            rdma_devices.push(name);
        }
    }
    if rdma_devices.is_empty() {
        return Err(host::Error::Missing {
            kind: "RDMA device with node GUID",
            name: guid.to_string(),
            path: class,
        });
    }
    Ok(Occupants {
        netdevs: netdevs_of_hca(host, None, &rdma_devices)?,
        rdma_devices,
    })
}

fn occupants(host: &Host, parent: &Parent) -> Result<Occupants> {
    let mut rdma_devices = data_devices(parent)?;
    let netdevs = netdevs_of_hca(host, Some(parent), &rdma_devices)?;
    if rdma_devices.is_empty() {
        // Soft RoCE is not below the NIC, but says which netdev it is on.
        for netdev in &netdevs {
            rdma_devices.extend(parentless(host, netdev)?.into_iter().map(|p| p.device));
        }
    }
    Ok(Occupants {
        netdevs,
        rdma_devices,
    })
}

/// Names of the RDMA devices of a piece of hardware that carry data.
fn data_devices(parent: &Parent) -> Result<Vec<String>> {
    let mut names = parent.rdma_devices()?;
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let management = sub_device::among(&all);
    names.retain(|name| !management.contains(name));
    Ok(names)
}

/// The netdevs of an HCA: those on its hardware that can be a port's, and those that its ports have
/// elsewhere, which only devices with several ports do, and those without a netdev on their hardware.
fn netdevs_of_hca(
    host: &Host,
    parent: Option<&Parent>,
    rdma_devices: &[String],
) -> Result<Vec<Netdev>> {
    let mut found = rdma::on_hardware(host, parent)?;
    found.retain(Netdev::is_port_netdev);
    let has_own = !found.is_empty();
    for name in rdma_devices {
        if has_own && !has_several_ports(host, name)? {
            continue;
        }
        let Some(device) = present(rdma::read(host, name))? else {
            continue;
        };
        for netdev in device.netdevs() {
            found.extend(present(netdev::read(host, netdev))?);
        }
    }
    found.sort_by_key(|netdev| netdev.ifindex);
    found.dedup_by_key(|netdev| netdev.ifindex);
    Ok(found)
}

fn has_several_ports(host: &Host, rdma_device: &str) -> Result<bool> {
    let directory = host.class("infiniband").join(rdma_device);
    Ok(rdma::port_numbers(&directory)?.len() > 1)
}

/// The RDMA hardware that a netdev belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaHardware {
    /// Ports through which its traffic can go, in order; empty if it is not RDMA-capable.
    pub ports: Vec<PortId>,
    /// HCAs by the names that units have for them: the hardware of the netdev or of those below
    /// it, and that of its ports, which can be another PCI function's.
    pub hcas: BTreeSet<HcaId>,
}

/// Finds a netdev's RDMA hardware.
///
/// A netdev on RDMA hardware has that hardware's port. A bond, VLAN, macvlan, ipvlan or IPoIB
/// child has the ports of the netdevs below it. Otherwise the RDMA devices that have no netdev on
/// their own hardware (soft RoCE, and NICs whose RDMA function is a different PCI function) are
/// asked for theirs, which reads a few files of each such device.
///
/// # Errors
/// [`host::Error::Missing`] if the netdev is not in this network namespace,
/// [`host::Error::BadName`] if the name cannot be a netdev's; [`host::Error::Read`] if sysfs
/// cannot be read.
pub fn hardware_of_netdev(host: &Host, name: &str) -> Result<RdmaHardware> {
    let (mut ports, mut hcas) = (BTreeSet::new(), BTreeSet::new());
    collect(host, name, MAX_STACK, &mut ports, &mut hcas)?;
    for port in &ports {
        hcas.extend(present(hca_of_rdma_device(host, &port.device))?.flatten());
    }
    Ok(RdmaHardware {
        ports: ports.into_iter().collect(),
        hcas,
    })
}

/// Netdevs can be stacked only eight deep (`MAX_NEST_DEV`, `include/linux/netdevice.h`).
const MAX_STACK: u32 = 8;

fn collect(
    host: &Host,
    name: &str,
    depth: u32,
    ports: &mut BTreeSet<PortId>,
    hcas: &mut BTreeSet<HcaId>,
) -> Result<()> {
    let (directory, netdev) = netdev::outline(host, name)?;
    let parent = Parent::of(host, &directory)?;
    hcas.extend(parent.as_ref().and_then(Parent::hca));
    // An IPoIB child stands on the same hardware as its parent, but does not show its port.
    let is_ipoib_child = netdev.is_ipoib() && netdev.is_child();
    if let Some(parent) = parent.filter(|_| !is_ipoib_child) {
        let found = hardware_ports(host, &parent, &netdev)?;
        if !found.is_empty() {
            ports.extend(found);
            return Ok(());
        }
    }
    let before = ports.len();
    if let Some(depth) = depth.checked_sub(1) {
        for lower in below(host, &directory, &netdev)? {
            present(collect(host, &lower, depth, ports, hcas))?;
        }
    }
    if ports.len() == before {
        ports.extend(parentless(host, &netdev)?);
    }
    Ok(())
}

/// Names of the netdevs that a netdev stands on. IPoIB has no such links; there it is the
/// netdev that `iflink` points at.
fn below(host: &Host, directory: &Path, netdev: &Netdev) -> Result<Vec<String>> {
    if !(netdev.is_ipoib() && netdev.is_child()) {
        return Ok(netdev::neighbours(directory)?.0);
    }
    for name in host::names(&host.class("net"))? {
        if netdev::ifindex(host, &name)? == Some(netdev.iflink) && netdev::is_ipoib(host, &name)? {
            return Ok(vec![name]);
        }
    }
    Ok(Vec::new())
}

/// Ports of the RDMA devices on the same hardware that belong to this netdev.
fn hardware_ports(host: &Host, parent: &Parent, netdev: &Netdev) -> Result<Vec<PortId>> {
    let mut ports = Vec::new();
    for device in data_devices(parent)? {
        let Some(directory) = present(host.rdma_device(&device))? else {
            continue;
        };
        if rdma::soft_parent(&directory)?.is_some() {
            ports.extend(claimed_ports(&directory, &device, netdev)?);
            continue;
        }
        match rdma::port_numbers(&directory)?.as_slice() {
            [number] => {
                let link_layer = port::link_layer(&port::port_of(&directory, *number))?;
                if association::serves(netdev, *number, link_layer, true) {
                    ports.push(port_id(&device, *number));
                }
            }
            _ => ports.extend(ports_with(host, &device, netdev)?),
        }
    }
    Ok(ports)
}

fn port_id(device: &str, port: u32) -> PortId {
    PortId {
        device: device.to_owned(),
        port,
    }
}

/// Ports of a device with several that have this netdev.
fn ports_with(host: &Host, device: &str, netdev: &Netdev) -> Result<Vec<PortId>> {
    let Some(device) = present(rdma::read(host, device))? else {
        return Ok(Vec::new());
    };
    let ports = device.ports.iter();
    let ports = ports.filter(|port| port.netdev.as_deref() == Some(netdev.name.as_str()));
    Ok(ports
        .map(|port| port_id(&device.name, port.number))
        .collect())
}

/// Ports of RDMA devices on other hardware that claim this netdev: of those without netdevs on their
/// own, and of those with several ports.
fn parentless(host: &Host, netdev: &Netdev) -> Result<Vec<PortId>> {
    let mut ports = Vec::new();
    for device in host::names(&host.class("infiniband"))? {
        let Some(directory) = present(host.rdma_device(&device))? else {
            continue;
        };
        let hardware = match rdma::soft_parent(&directory)? {
            None => Parent::of(host, &directory)?,
            Some(_) => None,
        };
        let on_own_hardware = match hardware {
            Some(parent) => !parent.netdevs()?.is_empty(),
            None => false,
        };
        let claimed = match on_own_hardware {
            true if has_several_ports(host, &device)? => ports_with(host, &device, netdev),
            true => continue,
            false => claimed_ports(&directory, &device, netdev),
        };
        ports.extend(others(claimed)?.into_iter().flatten());
    }
    Ok(ports)
}

fn claimed_ports(directory: &Path, device: &str, netdev: &Netdev) -> Result<Vec<PortId>> {
    let soft_parent = rdma::soft_parent(directory)?;
    if soft_parent
        .as_ref()
        .is_some_and(|parent| *parent != netdev.name)
    {
        return Ok(Vec::new());
    }
    let mut ports = Vec::new();
    for number in rdma::port_numbers(directory)? {
        let port = port::port_of(directory, number);
        let claim = NetdevHints {
            soft_parent: soft_parent.as_deref(),
            node_guid: host::parsed(directory, "node_guid")?,
            link_layer: port::link_layer(&port)?,
            gids: &gid::table(&port)?.entries,
        };
        if association::claims(claim, netdev) {
            ports.push(port_id(device, number));
        }
    }
    Ok(ports)
}

/// The HCA that an RDMA device belongs to; `None` for a device with neither hardware nor node
/// GUID. Reads its parent, and the GUID of a device without one.
///
/// # Errors
/// [`host::Error::Missing`] if the device is not in this network namespace; [`host::Error::Read`]
/// if sysfs cannot be read.
pub fn hca_of_rdma_device(host: &Host, name: &str) -> Result<Option<HcaId>> {
    let directory = host.rdma_device(name)?;
    Ok(
        match Parent::of(host, &directory)?.and_then(|parent| parent.hca()) {
            Some(hca) => Some(hca),
            None => host::parsed(&directory, "node_guid")?
                .filter(|guid: &Guid| !guid.is_zero())
                .map(HcaId::NodeGuid),
        },
    )
}

/// Takes an object that is only read on the way, and cannot be read, for `None`: what is asked
/// about is another one.
fn others<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if error.is_of_one_object() => Ok(None),
        result => result.map(Some),
    }
}

/// Netdevs with this link-layer address, current or permanent, in order of name. Several can
/// have it: a bond and its members, a VLAN and its parent.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn netdevs_by_mac(host: &Host, mac: &MacAddress) -> Result<Vec<Netdev>> {
    let mut found = Vec::new();
    for name in host::names(&host.class("net"))? {
        let Some(netdev) = others(netdev::read(host, &name))? else {
            continue;
        };
        if netdev.mac.as_ref() == Some(mac) || netdev.permanent_mac.as_ref() == Some(mac) {
            found.push(netdev);
        }
    }
    Ok(found)
}
