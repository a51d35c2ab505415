//! Everything at once: the inventory of a host.
//!
//! The walk starts at `/sys/class/infiniband` and goes outward to ports, character devices,
//! netdevs and PCI functions, so that devices without a netdev, without a PCI function or
//! without either are seen like all others. A device that goes away during the walk is left
//! out; the next walk sees the host without it.

use std::collections::BTreeSet;
use std::convert::Infallible;

use serde::Serialize;

use crate::association;
use crate::chardev::{self, CharDevice};
use crate::host::{self, Host, Result};
use crate::netdev::{self, Netdev};
use crate::netns_mode::{NetnsMode, netns_mode};
use crate::parent::Parent;
use crate::pci::{self, PciAddress, PciFunction};
use crate::rdma::{self, RdmaDevice};
use crate::reserved;
use crate::unit::{self, HcaId};

/// What RDMA hardware a host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// RDMA devices visible in this network namespace, in natural order of name.
    pub rdma_devices: Vec<RdmaDevice>,
    /// RDMA devices of which only the place is seen: those that cannot be read, in natural order of
    /// name, and those of other network namespaces.
    pub hidden: Vec<Hidden>,
    /// Netdevs on hardware, those that a GID table names, IPoIB children, and every netdev above
    /// one of these (bonds, bridges, VLANs, macvlans), in natural order of name.
    pub netdevs: Vec<Netdev>,
    /// The connection manager's node; `None` if `rdma_ucm` is not loaded.
    pub rdma_cm: Option<CharDevice>,
    /// How the RDMA subsystem treats network namespaces; `None` if it is not loaded.
    pub netns_mode: Option<NetnsMode>,
    /// Why netdevs that no RDMA device needs are left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable_netdevs: Vec<String>,
}

/// An RDMA device of which nothing is seen but where it stands: another network namespace has it
/// (exclusive mode), or its firmware or driver answers a read of an attribute with an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hidden {
    /// Its name.
    pub rdma_device: String,
    /// The HCA that it belongs to, where its place alone says so.
    pub hca: Option<HcaId>,
    /// PCI function it stands on.
    pub pci: Option<PciFunction>,
    /// Its verbs node, where another network namespace has the device: the class
    /// `infiniband_verbs` is not divided by namespaces.
    pub uverbs: Option<CharDevice>,
    /// What cannot be read, and what the kernel said.
    pub fault: Option<String>,
}

impl Hidden {
    fn at(host: &Host, rdma_device: String, parent: Option<&Parent>) -> Result<Self> {
        let address = parent.and_then(|parent| parent.pci.as_ref());
        let function = address.map(|(address, _)| pci::read(host, *address));
        let (pci, fault) = match outcome(function.transpose())? {
            Outcome::Read(pci) => (pci, None),
            Outcome::Gone => (None, None),
            Outcome::Unreadable(reason) => (None, Some(reason)),
        };
        Ok(Self {
            rdma_device,
            hca: parent.and_then(Parent::hca),
            pci,
            uverbs: None,
            fault,
        })
    }
}

impl HcaId {
    /// The identity of an RDMA device: its sub-function, else its PCI function, else its GUID.
    ///
    /// Two RDMA devices can have the same: they then stand on one piece of hardware and can only
    /// be allocated together.
    ///
    /// # Errors
    /// [`unit::Error::NoIdentity`] for a soft device without a GUID; [`unit::Error::Form`] for an auxiliary
    /// name that is not of the kernel's form.
    pub fn of(device: &RdmaDevice) -> std::result::Result<Self, unit::Error> {
        let pci = device.pci.as_ref().map(|pci| pci.address);
        match Self::of_place(pci, device.auxiliary.as_deref())? {
            Some(id) => Ok(id),
            None => device
                .node_guid
                .map(Self::NodeGuid)
                .ok_or_else(|| unit::Error::NoIdentity {
                    device: device.name.clone(),
                }),
        }
    }
}

/// Scans the whole host.
///
/// A host without the RDMA stack has an empty inventory; that is not an error.
///
/// A device that cannot be read is in [`Inventory::hidden`] and takes no other with it.
///
/// # Errors
/// [`host::Error::Read`] if sysfs as such cannot be read, for want of file descriptors or memory: the
/// previous inventory is then better than a partial one. [`host::Error::Missing`] if there is no sysfs at `host.sys` at all.
pub fn inventory(host: &Host) -> Result<Inventory> {
    if !host::exists(&host.class(""))? {
        return Err(host::Error::Missing {
            kind: "sysfs mount",
            name: host.sys.display().to_string(),
            path: host.class(""),
        });
    }
    let (mut rdma_devices, mut hidden) = rdma_devices(host)?;
    let (netdevs, unreadable_netdevs) = netdevs(host, &rdma_devices)?;
    reserved::mark(host, &mut rdma_devices, &netdevs);
    let netns_mode = netns_mode(host)?;
    hidden.extend(elsewhere(host, netns_mode, &rdma_devices)?);
    Ok(Inventory {
        hidden,
        netdevs,
        rdma_cm: chardev::rdma_cm(host)?,
        netns_mode,
        rdma_devices,
        unreadable_netdevs,
    })
}

/// What the outcome of reading one object is.
enum Outcome<T> {
    Read(T),
    Gone,
    Unreadable(String),
}

/// Sorts out whose failure a failure is.
fn outcome<T>(result: Result<T>) -> Result<Outcome<T>> {
    match result {
        Ok(object) => Ok(Outcome::Read(object)),
        Err(error) if error.is_missing() => Ok(Outcome::Gone),
        Err(error) if error.is_of_one_object() => Ok(Outcome::Unreadable(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Reads each RDMA device; one that is gone by the time it is read is left out.
fn rdma_devices(host: &Host) -> Result<(Vec<RdmaDevice>, Vec<Hidden>)> {
    let class = host.class("infiniband");
    let (mut devices, mut hidden) = (Vec::new(), Vec::new());
    for name in host::names(&class)? {
        match outcome(rdma::read(host, &name))? {
            Outcome::Read(device) => devices.push(device),
            Outcome::Gone => {}
            Outcome::Unreadable(reason) => {
                // Links are no attributes: no driver is asked for them.
                let parent = host::follow(&class, &name)
                    .and_then(|directory| match directory {
                        Some(directory) => Parent::of(host, &directory),
                        None => Ok(None),
                    })
                    .ok()
                    .flatten();
                hidden.push(Hidden {
                    fault: Some(reason),
                    ..Hidden::at(host, name, parent.as_ref())?
                });
            }
        }
    }
    Ok((devices, hidden))
}

fn netdevs(host: &Host, rdma_devices: &[RdmaDevice]) -> Result<(Vec<Netdev>, Vec<String>)> {
    let of_rdma: BTreeSet<&str> = rdma_devices
        .iter()
        .flat_map(|device| &device.ports)
        .flat_map(|port| {
            let of_gids = port
                .gids
                .entries
                .iter()
                .filter_map(|entry| entry.netdev.as_deref());
            port.netdev.as_deref().into_iter().chain(of_gids)
        })
        .collect();
    let class = host.class("net");
    let (mut names, mut unreadable) = (Vec::new(), Vec::new());
    let concerns_us = |name: &str| -> Result<bool> {
        Ok(of_rdma.contains(name)
            || host::exists(&class.join(name).join("device"))?
            || netdev::is_ipoib(host, name)?)
    };
    for name in host::names(&class)? {
        match outcome(concerns_us(&name))? {
            Outcome::Read(true) => names.push(name),
            Outcome::Read(false) | Outcome::Gone => {}
            Outcome::Unreadable(reason) => unreadable.push(reason),
        }
    }
    let mut netdevs: Vec<Netdev> = Vec::new();
    while let Some(name) = names.pop() {
        if netdevs.iter().any(|known| known.name == name) {
            continue;
        }
        match outcome(netdev::read(host, &name))? {
            Outcome::Read(netdev) => {
                names.extend(netdev.uppers.clone());
                netdevs.push(netdev);
            }
            Outcome::Gone => {}
            Outcome::Unreadable(reason) => unreadable.push(reason),
        }
    }
    netdevs.sort_by_cached_key(|netdev| host::natural_key(&netdev.name));
    Ok((netdevs, unreadable))
}

/// Devices of other namespaces. In shared mode every namespace sees all; a verbs node without
/// its device is then a device that came during the walk.
fn elsewhere(host: &Host, mode: Option<NetnsMode>, here: &[RdmaDevice]) -> Result<Vec<Hidden>> {
    let mut found = Vec::new();
    if mode != Some(NetnsMode::Exclusive) {
        return Ok(found);
    }
    let class = host.class("infiniband_verbs");
    for (rdma_device, uverbs, _) in chardev::entries(host, &class)? {
        // One that cannot be read is here as well.
        let came_now = || host::exists(&host.class("infiniband").join(&rdma_device));
        if here.iter().any(|device| device.name == rdma_device) || came_now()? {
            continue;
        }
        let parent = match host::follow(&class, &uverbs.name)? {
            Some(directory) => Parent::of(host, &directory)?,
            None => continue,
        };
        found.push(Hidden {
            uverbs: Some(uverbs),
            ..Hidden::at(host, rdma_device, parent.as_ref())?
        });
    }
    Ok(found)
}

impl Inventory {
    /// The RDMA device of this name.
    #[must_use]
    pub fn rdma_device(&self, name: &str) -> Option<&RdmaDevice> {
        self.rdma_devices.iter().find(|device| device.name == name)
    }

    /// The netdev of this name.
    #[must_use]
    pub fn netdev(&self, name: &str) -> Option<&Netdev> {
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    /// RDMA devices that stand directly on a PCI function, its sub-functions left out.
    pub fn rdma_on_pci(&self, address: PciAddress) -> impl Iterator<Item = &RdmaDevice> {
        self.rdma_devices.iter().filter(move |device| {
            device.subfunction_name().is_none()
                && device
                    .pci
                    .as_ref()
                    .is_some_and(|pci| pci.address == address)
        })
    }

    /// Netdevs on a PCI function, its sub-functions left out.
    pub fn netdevs_on_pci(&self, address: PciAddress) -> impl Iterator<Item = &Netdev> {
        self.netdevs.iter().filter(move |netdev| {
            netdev.pci == Some(address)
                && !netdev
                    .auxiliary
                    .as_deref()
                    .is_some_and(unit::is_subfunction)
        })
    }

    /// The netdevs of an HCA, in order of interface index; the same answer as
    /// [`crate::lookup::on_hca`]'s.
    #[must_use]
    pub fn netdevs_of_hca(&self, hca: &HcaId) -> Vec<&Netdev> {
        let on_hardware = match hca {
            HcaId::Pci(address) => self.netdevs_on_pci(*address).collect(),
            HcaId::Auxiliary(name) => {
                let is_on = |n: &&Netdev| n.auxiliary.as_deref() == Some(name.as_str());
                self.netdevs.iter().filter(is_on).collect()
            }
            HcaId::NodeGuid(_) => Vec::new(),
        };
        let of_hca = |device: &&RdmaDevice| HcaId::of(device).as_ref() == Ok(hca);
        let claimed = || -> std::result::Result<_, Infallible> {
            let devices = self.rdma_devices.iter().filter(of_hca);
            let names = devices.flat_map(RdmaDevice::netdevs);
            Ok(names.filter_map(|name| self.netdev(name)).collect())
        };
        let Ok(netdevs) = association::netdevs_of_hca(on_hardware, claimed);
        netdevs
    }

    /// What else a netdev of an HCA is known by: the bond on it, and that bond's other members that
    /// have no RDMA device of their own, because the HCA stands for all of them (RDMA LAG).
    #[must_use]
    pub fn bond_names(&self, netdev: &Netdev) -> Vec<&str> {
        let master = netdev.master.as_deref().and_then(|name| self.netdev(name));
        let Some(bond) = master.filter(|master| master.kind.as_deref() == Some("bond")) else {
            return Vec::new();
        };
        let has_device = |name: &str| {
            let ports = self.rdma_devices.iter().flat_map(RdmaDevice::netdevs);
            ports.into_iter().any(|port| port == name)
        };
        let members = bond.lowers.iter().map(String::as_str);
        let others = members.filter(|name| *name != netdev.name && !has_device(name));
        std::iter::once(bond.name.as_str()).chain(others).collect()
    }
}
