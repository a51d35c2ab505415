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
use crate::port;
use crate::port_id::PortId;
use crate::rdma;
use crate::unit::HcaId;

/// What stands on a piece of hardware.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occupants {
    /// Netdevs of the HCA, which can be on another PCI function, in order of interface index.
    pub netdevs: Vec<Netdev>,
    /// Names of RDMA devices, in order.
    pub rdma_devices: Vec<String>,
}

/// Netdevs and RDMA devices of an HCA, by the name both plugins have for it; those of a PCI function's
/// sub-functions are not among them.
///
/// # Errors
/// [`host::Error::Missing`] if it is not on this host, or not in this network namespace;
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn on_hca(host: &Host, hca: &HcaId) -> Result<Occupants> {
    let parent = Parent::of_hca(host, hca)?;
    let mut rdma_devices = match &parent {
        Some(parent) => parent.rdma_devices()?,
        None => Vec::new(),
    };
    if let HcaId::NodeGuid(guid) = hca {
        let class = host.class("infiniband");
        for name in host::names(&class)? {
            if others(host::parsed(&class.join(&name), "node_guid"))?.flatten() == Some(*guid) {
                rdma_devices.push(name);
            }
        }
        if rdma_devices.is_empty() {
            return Err(host.no_node_guid(*guid));
        }
    }
    let netdevs = netdevs_of_hca(host, parent.as_ref(), &rdma_devices)?;
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
    /// Ports through which its traffic can go; empty if it is not RDMA-capable.
    pub ports: BTreeSet<PortId>,
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
/// [`host::Error::Missing`] if the netdev is not in this network namespace; [`host::Error::Read`] if
/// sysfs cannot be read.
pub fn hardware_of_netdev(host: &Host, name: &str) -> Result<RdmaHardware> {
    let mut found = RdmaHardware::default();
    collect(host, name, MAX_STACK, &mut found)?;
    for port in &found.ports {
        let hca = present(hca_of_rdma_device(host, &port.device))?;
        found.hcas.extend(hca.flatten());
    }
    Ok(found)
}

/// Netdevs can be stacked only eight deep (`MAX_NEST_DEV`, `include/linux/netdevice.h`).
const MAX_STACK: u32 = 8;

fn collect(host: &Host, name: &str, depth: u32, all: &mut RdmaHardware) -> Result<()> {
    let (directory, netdev) = netdev::outline(host, name)?;
    let parent = Parent::of(host, &directory)?;
    all.hcas.extend(parent.as_ref().and_then(Parent::hca));
    // An IPoIB child stands on the same hardware as its parent, but does not show its port.
    let is_ipoib_child = netdev.is_ipoib() && netdev.is_child();
    if let Some(parent) = parent.filter(|_| !is_ipoib_child) {
        let mut found = BTreeSet::new();
        for device in parent.rdma_devices()? {
            found.extend(ports_of(host, &device, &netdev, true)?);
        }
        if !found.is_empty() {
            all.ports.extend(found);
            return Ok(());
        }
    }
    let before = all.ports.len();
    if let Some(depth) = depth.checked_sub(1) {
        for lower in below(host, &directory, &netdev)? {
            present(collect(host, &lower, depth, all))?;
        }
    }
    if all.ports.len() == before {
        all.ports.extend(parentless(host, &netdev)?);
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

/// Ports of an RDMA device that belong to a netdev. A device with netdevs on its own hardware is asked by
/// number if it has one port and the netdev is `on_hardware` of its own, as a whole if it has several; one
/// without is asked for what it claims.
fn ports_of(
    host: &Host,
    device: &str,
    netdev: &Netdev,
    on_hardware: bool,
) -> Result<BTreeSet<PortId>> {
    let Some(directory) = present(host.rdma_device(device))? else {
        return Ok(BTreeSet::new());
    };
    let is_soft = rdma::soft_parent(&directory)?.is_some();
    let has_netdevs = match on_hardware || is_soft {
        true => !is_soft,
        false => match Parent::of(host, &directory)? {
            Some(parent) => !parent.netdevs()?.is_empty(),
            None => false,
        },
    };
    if !has_netdevs {
        return claimed_ports(&directory, device, netdev);
    }
    let of_netdev = match rdma::port_numbers(&directory)?.as_slice() {
        [_] if !on_hardware => Vec::new(),
        [number] => {
            let link_layer = port::link_layer(&port::port_of(&directory, *number))?;
            let serves = association::serves(netdev, *number, link_layer, true);
            serves.then_some(*number).into_iter().collect()
        }
        _ => {
            let device = present(rdma::read(host, device))?;
            let ports = device.iter().flat_map(|device| &device.ports);
            let ports = ports.filter(|port| port.netdev.as_deref() == Some(netdev.name.as_str()));
            ports.map(|port| port.number).collect()
        }
    };
    let id = |port| PortId {
        device: device.to_owned(),
        port,
    };
    Ok(of_netdev.into_iter().map(id).collect())
}

/// Ports of RDMA devices on other hardware that claim this netdev: of those without netdevs on their
/// own, and of those with several ports.
fn parentless(host: &Host, netdev: &Netdev) -> Result<BTreeSet<PortId>> {
    let mut ports = BTreeSet::new();
    for device in host::names(&host.class("infiniband"))? {
        let claimed = others(ports_of(host, &device, netdev, false))?;
        ports.extend(claimed.into_iter().flatten());
    }
    Ok(ports)
}

fn claimed_ports(directory: &Path, device: &str, netdev: &Netdev) -> Result<BTreeSet<PortId>> {
    let soft_parent = rdma::soft_parent(directory)?;
    if soft_parent
        .as_ref()
        .is_some_and(|parent| *parent != netdev.name)
    {
        return Ok(BTreeSet::new());
    }
    let mut ports = BTreeSet::new();
    for number in rdma::port_numbers(directory)? {
        let port = port::port_of(directory, number);
        let claim = NetdevHints {
            soft_parent: soft_parent.as_deref(),
            node_guid: host::parsed(directory, "node_guid")?,
            link_layer: port::link_layer(&port)?,
            gids: &gid::table(&port)?.entries,
        };
        if association::claims(claim, netdev) {
            ports.insert(PortId {
                device: device.to_owned(),
                port: number,
            });
        }
    }
    Ok(ports)
}

/// The HCA that an RDMA device belongs to; `None` for a device with neither hardware nor node GUID.
fn hca_of_rdma_device(host: &Host, name: &str) -> Result<Option<HcaId>> {
    let directory = host.rdma_device(name)?;
    if let Some(hca) = Parent::of(host, &directory)?.and_then(|parent| parent.hca()) {
        return Ok(Some(hca));
    }
    let guid: Option<Guid> = host::parsed(&directory, "node_guid")?;
    Ok(guid.filter(|guid| !guid.is_zero()).map(HcaId::NodeGuid))
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
