//! Everything at once: the inventory of a host.
//!
//! The walk starts at `/sys/class/infiniband` and goes outward to ports, character devices,
//! netdevs and PCI functions, so that devices without a netdev, without a PCI function or
//! without either are seen like all others. A device that goes away during the walk is left
//! out; the next walk sees the host without it.

mod hca;

use std::collections::BTreeSet;

use serde::Serialize;

use crate::chardev::{self, CharDevice};
use crate::host::{self, Host, Result};
use crate::netdev::{self, Netdev};
use crate::netns_mode::{NetnsMode, netns_mode};
use crate::parent::Parent;
use crate::pci;
use crate::rdma::{self, RdmaDevice};
use crate::reserved;
use crate::unit::HcaId;

use hca::{Found, group};
pub use hca::{Function, FunctionKind, Hca, Unusable};

/// What RDMA hardware a host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// HCAs: those visible in this network namespace, in natural order of the names of their RDMA
    /// devices, then those that cannot be read, then those of other network namespaces.
    pub hcas: Vec<Hca>,
    /// RDMA devices that have no identity to be offered by.
    pub unusable: Vec<Unusable>,
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
fn hidden(host: &Host, name: String, parent: Option<&Parent>) -> Result<Found> {
    let address = parent.and_then(|parent| parent.pci.as_ref());
    let function = address.map(|(address, _)| pci::read(host, *address));
    let (pci, fault) = match outcome(function.transpose())? {
        Ok(pci) => (pci.flatten(), None),
        Err(reason) => (None, Some(reason)),
    };
    Ok(Found {
        device: RdmaDevice {
            name,
            pci,
            ..RdmaDevice::default()
        },
        // On no bus its identity is an attribute. A pool that had it before knows it by its name.
        id: parent.and_then(Parent::hca),
        elsewhere: false,
        fault,
    })
}

impl HcaId {
    /// The identity of an RDMA device: its sub-function, else its PCI function, else its GUID.
    ///
    /// Two RDMA devices can have the same: they then stand on one piece of hardware and can only
    /// be allocated together.
    #[must_use]
    pub fn of(device: &RdmaDevice) -> Option<Self> {
        let pci = device.pci.as_ref().map(|pci| pci.address);
        let place = Self::of_place(pci, device.auxiliary.as_deref());
        place.or(device.node_guid.map(Self::NodeGuid))
    }
}

/// Scans the whole host.
///
/// A host without the RDMA stack has an empty inventory; that is not an error.
///
/// A device that cannot be read is known by its name alone and takes no other with it.
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
    let (mut visible, unreadable) = rdma_devices(host)?;
    let (netdevs, unreadable_netdevs) = netdevs(host, &visible)?;
    reserved::mark(host, &mut visible, &netdevs);
    let netns_mode = netns_mode(host)?;
    let elsewhere = elsewhere(host, netns_mode, &visible)?;
    let visible = visible.into_iter().map(|device| Found {
        id: HcaId::of(&device),
        device,
        elsewhere: false,
        fault: None,
    });
    let (hcas, unusable) = group(visible.chain(unreadable).chain(elsewhere).collect());
    let mut inventory = Inventory {
        hcas,
        unusable,
        netdevs,
        rdma_cm: chardev::rdma_cm(host)?,
        netns_mode,
        unreadable_netdevs,
    };
    inventory.assign_netdevs();
    Ok(inventory)
}

/// Sorts out whose failure a failure is: the object, `None` if it is gone, or why it alone cannot be
/// read.
fn outcome<T>(result: Result<T>) -> Result<std::result::Result<Option<T>, String>> {
    match host::present(result) {
        Err(error) if error.is_of_one_object() => Ok(Err(error.to_string())),
        result => result.map(Ok),
    }
}

/// Reads each RDMA device; one that is gone by the time it is read is left out.
fn rdma_devices(host: &Host) -> Result<(Vec<RdmaDevice>, Vec<Found>)> {
    let class = host.class("infiniband");
    let (mut devices, mut unreadable) = (Vec::new(), Vec::new());
    for name in host::names(&class)? {
        match outcome(rdma::read(host, &name))? {
            Ok(device) => devices.extend(device),
            Err(reason) => {
                // Links are no attributes: no driver is asked for them.
                let directory = host::follow(&class, &name).ok().flatten();
                let parent = directory.map(|directory| Parent::of(host, &directory));
                let parent = parent.and_then(|parent| parent.ok().flatten());
                unreadable.push(Found {
                    fault: Some(reason),
                    ..hidden(host, name, parent.as_ref())?
                });
            }
        }
    }
    Ok((devices, unreadable))
}

fn netdevs(host: &Host, rdma_devices: &[RdmaDevice]) -> Result<(Vec<Netdev>, Vec<String>)> {
    let ports = || rdma_devices.iter().flat_map(|device| &device.ports);
    let of_gids = ports().flat_map(|port| &port.gids.entries);
    let of_gids = of_gids.filter_map(|entry| entry.netdev.as_deref());
    let of_ports = ports().filter_map(|port| port.netdev.as_deref());
    let of_rdma: BTreeSet<&str> = of_ports.chain(of_gids).collect();
    let class = host.class("net");
    let (mut names, mut unreadable) = (Vec::new(), Vec::new());
    let concerns_us = |name: &str| -> Result<bool> {
        Ok(of_rdma.contains(name)
            || host::exists(&class.join(name).join("device"))?
            || netdev::is_ipoib(host, name)?)
    };
    for name in host::names(&class)? {
        match outcome(concerns_us(&name))? {
            Ok(concerns_us) => names.extend(concerns_us.unwrap_or(false).then_some(name)),
            Err(reason) => unreadable.push(reason),
        }
    }
    let mut netdevs: Vec<Netdev> = Vec::new();
    while let Some(name) = names.pop() {
        if netdevs.iter().any(|known| known.name == name) {
            continue;
        }
        match outcome(netdev::read(host, &name))? {
            Ok(Some(netdev)) => {
                names.extend(netdev.uppers.clone());
                netdevs.push(netdev);
            }
            Ok(None) => {}
            Err(reason) => unreadable.push(reason),
        }
    }
    netdevs.sort_by_cached_key(|netdev| host::natural_key(&netdev.name));
    Ok((netdevs, unreadable))
}

/// Devices of other namespaces. In shared mode every namespace sees all; a verbs node without
/// its device is then a device that came during the walk.
fn elsewhere(host: &Host, mode: Option<NetnsMode>, here: &[RdmaDevice]) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    if mode != Some(NetnsMode::Exclusive) {
        return Ok(found);
    }
    let class = host.class("infiniband_verbs");
    for (rdma_device, uverbs) in chardev::verbs(host)? {
        // One that cannot be read is here as well.
        let came_now = || host::exists(&host.class("infiniband").join(&rdma_device));
        if here.iter().any(|device| device.name == rdma_device) || came_now()? {
            continue;
        }
        let parent = match host::follow(&class, &uverbs.name)? {
            Some(directory) => Parent::of(host, &directory)?,
            None => continue,
        };
        let mut away = hidden(host, rdma_device, parent.as_ref())?;
        away.elsewhere = true;
        away.device.char_devices.uverbs = Some(uverbs);
        found.push(away);
    }
    Ok(found)
}

impl Inventory {
    /// The RDMA devices that are visible, those for management alone left out.
    pub fn rdma_devices(&self) -> impl Iterator<Item = &RdmaDevice> {
        let of_hcas = self.hcas.iter().flat_map(|hca| &hca.rdma_devices);
        let others = self.unusable.iter().map(|one| &one.device);
        of_hcas
            .chain(others)
            .filter(|device| !device.ports.is_empty())
    }

    /// The HCA of this identity.
    #[must_use]
    pub fn hca(&self, id: &HcaId) -> Option<&Hca> {
        self.hcas.iter().find(|hca| hca.id == *id)
    }

    /// The RDMA device of this name, if it is visible.
    #[must_use]
    pub fn rdma_device(&self, name: &str) -> Option<&RdmaDevice> {
        self.rdma_devices().find(|device| device.name == name)
    }

    /// The netdev of this name.
    #[must_use]
    pub fn netdev(&self, name: &str) -> Option<&Netdev> {
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    /// All character devices of RDMA devices, those for management alone included.
    pub fn char_devices(&self) -> impl Iterator<Item = &CharDevice> {
        let of_hcas = self
            .hcas
            .iter()
            .flat_map(|hca| hca.rdma_devices.iter().chain(&hca.sub_devices));
        let others = self.unusable.iter().map(|one| &one.device);
        let of_devices = of_hcas
            .chain(others)
            .flat_map(|device| device.char_devices.iter());
        of_devices.chain(&self.rdma_cm)
    }
}
