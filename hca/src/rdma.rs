//! RDMA devices: one directory of `/sys/class/infiniband` each, and what belongs to it.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use crate::address::Guid;
use crate::chardev::{self, CharDevices};
use crate::host::{self, Host, Result};
use crate::netdev::{self, Netdev};
use crate::parent::{self, Parent};
use crate::pci::{self, PciFunction};
use crate::port::{self, LinkLayer, Port};

/// A port of a named RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PortId {
    /// Name of the RDMA device, such as `mlx5_0`.
    pub device: String,
    /// Port number, from 1.
    pub port: u32,
}

impl fmt::Display for PortId {
    /// `mlx5_0/1`, as the `rdma` tool writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.device, self.port)
    }
}

/// One RDMA device with everything that hangs on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Name, such as `mlx5_0`. Unique on the host whatever the network namespace; may be changed
    /// by udev or an administrator.
    pub name: String,
    /// GUID of this device; `None` if it has none (zero).
    pub node_guid: Option<Guid>,
    /// GUID shared by all devices of one adapter.
    pub sys_image_guid: Option<Guid>,
    /// What kind of node it is.
    pub node_type: NodeType,
    /// Description that InfiniBand management shows, often `<host> <device>`.
    pub node_desc: Option<String>,
    /// Firmware version; soft devices have none.
    pub firmware: Option<String>,
    /// Board type, such as `MT_0000000359` (the PSID); some drivers do not tell.
    pub board_id: Option<String>,
    /// Chip, such as `MT4129`; some drivers do not tell.
    pub hca_type: Option<String>,
    /// The driver behind it: that of its parent (`mlx5_core`), or `rdma_rxe` for soft RoCE.
    pub driver: Option<String>,
    /// PCI function it stands on; `None` for soft devices. For a sub-function, the PCI function
    /// that the sub-function is part of.
    pub pci: Option<PciFunction>,
    /// Auxiliary device it stands on, such as `mlx5_core.sf.4`.
    pub auxiliary: Option<String>,
    /// The number an administrator gave a sub-function (`devlink port add ... sfnum N`).
    pub subfunction: Option<u32>,
    /// Ports, in order of number.
    pub ports: Vec<Port>,
    /// Character devices.
    pub char_devices: CharDevices,
}

impl RdmaDevice {
    /// The port of this number.
    #[must_use]
    pub fn port(&self, number: u32) -> Option<&Port> {
        self.ports.iter().find(|port| port.number == number)
    }

    /// Netdevs of its ports.
    pub fn netdevs(&self) -> impl Iterator<Item = &str> {
        self.ports.iter().filter_map(|port| port.netdev.as_deref())
    }

    /// True for a device without hardware of its own, such as soft RoCE.
    #[must_use]
    pub fn is_soft(&self) -> bool {
        self.driver.as_deref() == Some(SOFT_ROCE)
            || (self.pci.is_none() && self.auxiliary.is_none())
    }

    /// Name of the sub-function it stands on, if it does.
    #[must_use]
    pub fn subfunction_name(&self) -> Option<&str> {
        self.auxiliary
            .as_deref()
            .filter(|name| parent::is_subfunction(name))
    }

    /// NUMA node of its PCI function.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.pci.as_ref().and_then(|pci| pci.numa_node)
    }
}

/// The soft RoCE module's name.
const SOFT_ROCE: &str = "rdma_rxe";

/// Kind of node (sysfs `node_type`; `include/uapi/rdma/rdma_netlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
    let directory = host.class_entry("RDMA device", "infiniband", name)?;
    let parent = Parent::of(host, &directory)?;
    let text = |attribute| host::attribute(&directory, attribute);
    let guid = |attribute| -> Result<Option<Guid>> {
        Ok(host::parsed(&directory, attribute)?.filter(|guid: &Guid| !guid.is_zero()))
    };
    let auxiliary = parent.as_ref().and_then(|p| p.auxiliary.clone());
    let mut device = RdmaDevice {
        name: name.to_owned(),
        node_guid: guid("node_guid")?,
        sys_image_guid: guid("sys_image_guid")?,
        node_type: text("node_type")?.map_or(NodeType::Unspecified, |t| NodeType::parse(&t)),
        node_desc: text("node_desc")?,
        firmware: text("fw_ver")?,
        board_id: text("board_id")?,
        hca_type: text("hca_type")?,
        driver: driver(&directory, parent.as_ref())?,
        pci: match parent.as_ref().and_then(|p| p.pci.as_ref()) {
            Some((address, directory)) => Some(pci::read_at(directory, *address)?),
            None => None,
        },
        subfunction: match &parent {
            Some(p) if auxiliary.as_deref().is_some_and(parent::is_subfunction) => {
                host::parsed(&p.directory, "sfnum")?
            }
            _ => None,
        },
        auxiliary,
        ports: ports(&directory)?,
        char_devices: chardev::of_device(
            host,
            name,
            parent.as_ref().map(|p| p.directory.as_path()),
        )?,
    };
    assign_netdevs(host, &directory, parent.as_ref(), &mut device.ports)?;
    // All attributes of a device that went away meanwhile are absent: that is no device.
    host.class_entry("RDMA device", "infiniband", name)?;
    Ok(device)
}

fn driver(directory: &Path, parent: Option<&Parent>) -> Result<Option<String>> {
    // Only soft RoCE has an attribute that names the netdev below it
    // (drivers/infiniband/sw/rxe/rxe_verbs.c); it may borrow its netdev's parent.
    if host::attribute(directory, "parent")?.is_some() {
        return Ok(Some(SOFT_ROCE.to_owned()));
    }
    match parent {
        Some(parent) => parent.driver(),
        None => Ok(None),
    }
}

/// Port numbers of the device in `directory`.
pub(crate) fn port_numbers(directory: &Path) -> Result<Vec<u32>> {
    Ok(host::names(&directory.join("ports"))?
        .iter()
        .filter_map(|n| n.parse().ok())
        .collect())
}

fn ports(directory: &Path) -> Result<Vec<Port>> {
    port_numbers(directory)?
        .into_iter()
        .map(|number| port::read(&directory.join("ports").join(number.to_string()), number))
        .collect()
}

fn assign_netdevs(
    host: &Host,
    directory: &Path,
    parent: Option<&Parent>,
    ports: &mut [Port],
) -> Result<()> {
    let netdevs = siblings(host, parent)?;
    let soft_parent = host::attribute(directory, "parent")?;
    let single = ports.len() == 1;
    for port in ports {
        let of_gids = || {
            port.gids
                .entries
                .iter()
                .find_map(|entry| entry.netdev.clone())
        };
        let own = if soft_parent.is_some() {
            soft_parent.clone()
        } else {
            choose(
                &netdevs,
                port.number,
                port.link_layer,
                single,
                of_gids().as_deref(),
            )
            .map(|netdev| netdev.name.clone())
        };
        port.netdev = own.or_else(of_gids);
        if port.link_layer == LinkLayer::Ethernet
            && let Some(name) = &port.netdev
        {
            port.active_mtu = match netdevs.iter().find(|n| n.name == *name) {
                Some(netdev) => port::roce_mtu(netdev.mtu),
                None => netdev::mtu(host, name)?.and_then(port::roce_mtu),
            };
        }
    }
    Ok(())
}

/// Netdevs on the same hardware that can be a port's own: neither representors nor children.
pub(crate) fn siblings(host: &Host, parent: Option<&Parent>) -> Result<Vec<Netdev>> {
    let Some(parent) = parent else {
        return Ok(Vec::new());
    };
    let mut netdevs = Vec::new();
    for name in parent.netdevs()? {
        match netdev::read(host, &name) {
            Ok(netdev) if !netdev.is_representor() && !netdev.is_child() => netdevs.push(netdev),
            Ok(_) => {}
            // Listed below the device, yet not in this network namespace or gone meanwhile.
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(netdevs)
}

/// Which of a device's netdevs belongs to a port.
///
/// The link layers must agree. Among several, `dev_port` decides (mlx4 and IPoIB number their
/// netdevs so), then the netdev that the GID table names, then the first.
fn choose<'a>(
    netdevs: &'a [Netdev],
    port: u32,
    link_layer: LinkLayer,
    single_port: bool,
    in_gids: Option<&str>,
) -> Option<&'a Netdev> {
    let fitting: Vec<&Netdev> = netdevs
        .iter()
        .filter(|netdev| fits(netdev, link_layer))
        .collect();
    let by_port: Vec<&Netdev> = fitting
        .iter()
        .copied()
        .filter(|n| Some(n.dev_port) == port.checked_sub(1))
        .collect();
    // With one port the number says nothing: the second function of a dual-port card has one
    // port, number 1, and some drivers give its netdev dev_port 1.
    let candidates = if single_port && by_port.is_empty() {
        fitting
    } else {
        by_port
    };
    candidates
        .iter()
        .find(|n| Some(n.name.as_str()) == in_gids)
        .or_else(|| candidates.first())
        .copied()
}

/// True if a netdev of this kind can be that of a port with this link layer.
pub(crate) fn fits(netdev: &Netdev, link_layer: LinkLayer) -> bool {
    match link_layer {
        LinkLayer::InfiniBand => netdev.is_ipoib(),
        LinkLayer::Ethernet => netdev.link_type == netdev::link_type::ETHERNET,
        LinkLayer::Unknown => true,
    }
}
