//! RDMA devices: one directory of `/sys/class/infiniband` each, and what belongs to it.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::address::Guid;
use crate::association::{self, NetdevHints};
use crate::chardev::{self, CharDevices};
use crate::host::{self, Host, Result};
use crate::netdev::{self, Netdev};
use crate::parent::Parent;
use crate::pci::{self, PciFunction};
use crate::port::{self, LinkLayer, Port};
use crate::unit;

/// One RDMA device with everything that hangs on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaDevice {
    /// Name, such as `mlx5_0`. Unique on the host whatever the network namespace; may be changed
    /// by udev or an administrator.
    pub name: String,
    /// GUID of this device; `None` if it has none (zero).
    pub node_guid: Option<Guid>,
    /// What kind of node it is.
    pub node_type: NodeType,
    /// Firmware version; soft devices have none.
    pub firmware: Option<String>,
    /// Board type, such as `MT_0000000359` (the PSID); some drivers do not report it.
    pub board_id: Option<String>,
    /// The driver behind it: that of its parent (`mlx5_core`), or `rdma_rxe` for soft RoCE, which
    /// may borrow its netdev's parent.
    pub driver: Option<String>,
    /// PCI function it stands on; `None` for soft devices. For a sub-function, the PCI function
    /// that the sub-function is part of.
    pub pci: Option<PciFunction>,
    /// Auxiliary device it stands on, such as `mlx5_core.sf.4`.
    pub auxiliary: Option<String>,
    /// The number an administrator gave a sub-function (`devlink port add ... sfnum N`).
    pub subfunction: Option<u32>,
    /// For soft RoCE, the netdev it stands on, by its name in its own network namespace.
    pub soft_parent: Option<String>,
    /// Ports, in order of number.
    pub ports: Vec<Port>,
    /// Why no pod can have it; [`crate::inventory`] finds out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Reserved>,
    /// Character devices. Not read back: their numbers are those of one moment.
    #[serde(skip_deserializing)]
    pub char_devices: CharDevices,
}

impl RdmaDevice {
    /// The port of this number.
    #[must_use]
    pub fn port(&self, number: u32) -> Option<&Port> {
        self.ports.iter().find(|port| port.number == number)
    }

    /// True if messages of a port go by RoCE: an Ethernet port that is not iWARP.
    #[must_use]
    pub fn is_roce(&self, port: &Port) -> bool {
        port.link_layer == LinkLayer::Ethernet && self.node_type == NodeType::ChannelAdapter
    }

    /// Netdevs of its ports.
    pub fn netdevs(&self) -> impl Iterator<Item = &str> {
        self.ports.iter().filter_map(|port| port.netdev.as_deref())
    }

    /// True for a device without hardware of its own, such as soft RoCE.
    #[must_use]
    pub fn is_soft(&self) -> bool {
        self.soft_parent.is_some() || (self.pci.is_none() && self.auxiliary.is_none())
    }
}

/// What an RDMA device that no pod can have serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reserved {
    /// It manages an `NVSwitch`.
    NvSwitch,
    /// It carries the traffic of this netdev of Hyper-V.
    Netvsc(String),
}

impl fmt::Display for Reserved {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NvSwitch => formatter.write_str("it is a management function of an NVSwitch"),
            Self::Netvsc(netdev) => write!(
                formatter,
                "it carries the traffic of {netdev}, a netdev of Hyper-V (hv_netvsc)"
            ),
        }
    }
}

/// The soft RoCE module's name.
const SOFT_ROCE: &str = "rdma_rxe";

/// Kind of node (sysfs `node_type`; `include/uapi/rdma/rdma_netlink.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodeType {
    /// Channel adapter: InfiniBand or RoCE.
    ChannelAdapter,
    /// InfiniBand switch.
    Switch,
    /// InfiniBand router.
    Router,
    /// RDMA NIC: iWARP.
    Rnic,
    /// Cisco usNIC.
    Usnic,
    /// Other, such as EFA.
    #[default]
    Unspecified,
}

impl NodeType {
    fn parse(text: &str) -> Self {
        match text.split(':').next() {
            Some("1") => Self::ChannelAdapter,
            Some("2") => Self::Switch,
            Some("3") => Self::Router,
            Some("4") => Self::Rnic,
            Some("5" | "6") => Self::Usnic,
            _ => Self::Unspecified,
        }
    }
}

/// Reads one RDMA device whole.
///
/// # Errors
/// [`host::Error::Missing`] if it is not visible here; [`host::Error::Read`] if sysfs cannot be
/// read.
pub fn read(host: &Host, name: &str) -> Result<RdmaDevice> {
    let directory = host.rdma_device(name)?;
    let parent = Parent::of(host, &directory)?;
    let text = |attribute| host::attribute(&directory, attribute);
    let auxiliary = parent.as_ref().and_then(|p| p.auxiliary.clone());
    let soft_parent = soft_parent(&directory)?;
    let mut device = RdmaDevice {
        name: name.to_owned(),
        node_guid: host::parsed(&directory, "node_guid")?.filter(|guid: &Guid| !guid.is_zero()),
        node_type: text("node_type")?.map_or(NodeType::Unspecified, |t| NodeType::parse(&t)),
        firmware: text("fw_ver")?,
        board_id: text("board_id")?,
        driver: match soft_parent {
            Some(_) => Some(SOFT_ROCE.to_owned()),
            None => parent.as_ref().map_or(Ok(None), Parent::driver)?,
        },
        soft_parent,
        pci: (parent.as_ref().and_then(|p| p.pci.as_ref()))
            .map(|(address, directory)| pci::read_at(directory, *address))
            .transpose()?,
        subfunction: match &parent {
            Some(p) if auxiliary.as_deref().is_some_and(unit::is_subfunction) => {
                host::parsed(&p.directory, "sfnum")?
            }
            _ => None,
        },
        auxiliary,
        ports: ports(&directory)?,
        reserved: None,
        char_devices: chardev::of_device(
            host,
            name,
            parent.as_ref().map(|p| p.directory.as_path()),
        )?,
    };
    assign_netdevs(host, parent.as_ref(), &mut device)?;
    // All attributes of a device that went away meanwhile are absent: that is not a device.
    host.rdma_device(name)?;
    Ok(device)
}

/// The netdev that soft RoCE names as its own, the one driver with such an attribute
/// (`drivers/infiniband/sw/rxe/rxe_verbs.c`).
pub(crate) fn soft_parent(directory: &Path) -> Result<Option<String>> {
    host::attribute(directory, "parent")
}

/// Port numbers of the device in `directory`, in order.
pub(crate) fn port_numbers(directory: &Path) -> Result<Vec<u32>> {
    host::indexes(&directory.join("ports"))
}

fn ports(directory: &Path) -> Result<Vec<Port>> {
    port_numbers(directory)?
        .into_iter()
        .map(|number| port::read(&port::port_of(directory, number), number))
        .collect()
}

/// Finds the netdev of each port, and what follows from it.
fn assign_netdevs(host: &Host, parent: Option<&Parent>, device: &mut RdmaDevice) -> Result<()> {
    let own = match device.soft_parent {
        Some(_) => Vec::new(),
        None => on_hardware(host, parent)?,
    };
    let single_port = device.ports.len() == 1;
    let mut netdevs: Vec<Option<Netdev>> = Vec::new();
    for port in &device.ports {
        let hints = NetdevHints {
            soft_parent: device.soft_parent.as_deref(),
            node_guid: device.node_guid,
            link_layer: port.link_layer,
            gids: &port.gids.entries,
        };
        let mut named = own.iter().filter(|netdev| {
            netdev.is_port_netdev() && !hints.is_anonymous() && association::claims(hints, netdev)
        });
        netdevs.push(match named.next() {
            Some(netdev) => Some(netdev.clone()),
            None if own.is_empty() => claimed(host, hints)?,
            // The ports of a multiport e-switch have netdevs on several functions.
            None if !single_port && !hints.is_anonymous() => claimed(host, hints)?
                .filter(|netdev| netdev.is_port_netdev() && netdev.pci.is_some()),
            None => None,
        });
    }
    for (at, port) in device.ports.iter_mut().enumerate() {
        let is_taken = |netdev: &Netdev| {
            let mut taken = netdevs.iter().flatten();
            taken.any(|taken| taken.ifindex == netdev.ifindex)
        };
        let mut free = own.iter().filter(|netdev| {
            !netdev.is_child()
                && !is_taken(netdev)
                && association::serves(netdev, port.number, port.link_layer, single_port)
        });
        let by_number = free.next().cloned();
        let Some(netdev) = netdevs.get(at).cloned().flatten().or(by_number) else {
            continue;
        };
        if port.link_layer == LinkLayer::Ethernet {
            port.active_mtu = port::roce_mtu(netdev.mtu);
        }
        port.netdev = Some(netdev.name);
    }
    let is_ethernet = |port: &Port| port.link_layer == LinkLayer::Ethernet;
    let mut ethernet = device.ports.iter().filter(|port| is_ethernet(port));
    if ethernet.any(|port| port.netdev.is_some()) {
        for port in device.ports.iter_mut().filter(|port| is_ethernet(port)) {
            port.carries_data = port.netdev.is_some();
        }
    }
    Ok(())
}

/// The netdev of this network namespace that a port claims, wherever that stands.
fn claimed(host: &Host, claim: NetdevHints<'_>) -> Result<Option<Netdev>> {
    let mut names: Vec<String> = match claim.is_anonymous() {
        true => host::names(&host.class("net"))?,
        false => claim.names().map(str::to_owned).collect(),
    };
    names.dedup();
    for name in names {
        match netdev::read(host, &name) {
            Ok(netdev) if association::claims(claim, &netdev) => return Ok(Some(netdev)),
            Ok(_) => {}
            Err(error) if error.is_missing() => {}
            // Any netdev of the host is tried then, and most are none of this device's.
            Err(error) if claim.is_anonymous() && error.is_of_one_object() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Netdevs on the same hardware, in order of interface index: the first is the one the driver made
/// first.
pub(crate) fn on_hardware(host: &Host, parent: Option<&Parent>) -> Result<Vec<Netdev>> {
    let Some(parent) = parent else {
        return Ok(Vec::new());
    };
    let mut netdevs = Vec::new();
    for name in parent.netdevs()? {
        netdevs.extend(host::present(netdev::read(host, &name))?);
    }
    netdevs.sort_by_key(|netdev| netdev.ifindex);
    Ok(netdevs)
}
