//! Network devices, as far as they matter to RDMA.
//!
//! `/sys/class/net` shows the network namespace that mounted this sysfs: a netdev that was moved
//! into a pod is not here, though its RDMA device still is in shared mode.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::address::MacAddress;
use crate::host::{self, Host, Result};
use crate::parent::Parent;
use crate::pci::PciAddress;
use crate::port::LinkLayer;

/// ARPHRD numbers (`include/uapi/linux/if_arp.h`) that this crate distinguishes.
pub mod link_type {
    /// Ethernet and everything that presents itself as Ethernet.
    pub const ETHERNET: u16 = 1;
    /// IP over InfiniBand.
    pub const INFINIBAND: u16 = 32;
}

/// One netdev.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Netdev {
    /// Name in this network namespace.
    pub name: String,
    /// Interface index.
    pub ifindex: u32,
    /// The index this netdev points at: its own, or that of the netdev it stands on (the parent
    /// of an IPoIB child, of a macvlan, of a VLAN).
    pub iflink: u32,
    /// Current link-layer address.
    pub mac: Option<MacAddress>,
    /// The address of the hardware, where sysfs shows it: the current one unless another was
    /// set, or what a bond remembers of its member.
    pub permanent_mac: Option<MacAddress>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Operational state, RFC 2863 by the kernel's names: `up`, `down`, `lowerlayerdown`,
    /// `dormant`, `unknown`, ...
    pub operstate: String,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Link type (ARPHRD), see [`link_type`].
    pub link_type: u16,
    /// Kind of virtual link (`bond`, `vlan`, `macvlan`, `bridge`); `None` for hardware.
    pub kind: Option<String>,
    /// Speed in Mb/s; `None` while the link is down.
    pub speed_mbps: Option<u32>,
    /// Port of its hardware, from 0: several netdevs of one PCI function differ in it.
    pub dev_port: u32,
    /// Name of the physical port where the driver reports it: `p0` for an uplink, `pf0vf3` for the
    /// representor of a VF.
    pub phys_port_name: Option<String>,
    /// PCI function it stands on.
    pub pci: Option<PciAddress>,
    /// Auxiliary device it stands on, such as `mlx5_core.sf.4`.
    pub auxiliary: Option<String>,
    /// Driver of the device it stands on.
    pub driver: Option<String>,
    /// The bond, bridge or VRF it belongs to.
    pub master: Option<String>,
    /// Netdevs below it: members of a bond, the parent of a VLAN or macvlan.
    pub lowers: Vec<String>,
    /// Netdevs above it: its master, VLANs and macvlans made on it.
    pub uppers: Vec<String>,
}

impl Netdev {
    /// What kind of network it speaks.
    #[must_use]
    pub fn link_layer(&self) -> LinkLayer {
        match self.link_type {
            link_type::ETHERNET => LinkLayer::Ethernet,
            link_type::INFINIBAND => LinkLayer::InfiniBand,
            _ => LinkLayer::Unknown,
        }
    }

    /// True for IP over InfiniBand.
    #[must_use]
    pub fn is_ipoib(&self) -> bool {
        self.link_type == link_type::INFINIBAND
    }

    /// True for a netdev made on top of another one: IPoIB child, macvlan, ipvlan, VLAN.
    #[must_use]
    pub fn is_child(&self) -> bool {
        self.iflink != self.ifindex && self.iflink != 0
    }

    /// True if it can be the netdev of an RDMA port: it is neither a representor nor a child.
    #[must_use]
    pub fn is_port_netdev(&self) -> bool {
        !self.is_representor() && !self.is_child()
    }

    /// True for the host side of a VF or sub-function in switchdev mode. It carries no RDMA of
    /// its own and must not be offered.
    #[must_use]
    pub fn is_representor(&self) -> bool {
        self.phys_port_name
            .as_deref()
            .is_some_and(names_representor)
    }
}

/// True for `pf0vf3`, `pf0sf88`, `c1pf0vf3`, `pf0hpf`, `pf1`: everything but an uplink (`p0`, or
/// split `p0s1`) (kernel: `Documentation/networking/switchdev.rst`, devlink port flavours).
fn names_representor(phys_port_name: &str) -> bool {
    let name = match phys_port_name.strip_prefix('c') {
        Some(rest) => rest.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => phys_port_name,
    };
    name.strip_prefix("pf")
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Reads one netdev.
///
/// # Errors
/// [`host::Error::Missing`] if it is not in this network namespace; [`host::Error::Read`] if
/// sysfs cannot be read.
pub fn read(host: &Host, name: &str) -> Result<Netdev> {
    let directory = host.netdev(name)?;
    let parent = Parent::of(host, &directory)?;
    let text = |attribute| host::attribute(&directory, attribute);
    let outline = place(&directory, name)?;
    let (lowers, uppers) = neighbours(&directory)?;
    let netdev = Netdev {
        lowers,
        uppers,
        permanent_mac: permanent_mac(&directory, outline.mac.as_ref())?,
        mtu: host::parsed(&directory, "mtu")?.unwrap_or(0),
        operstate: text("operstate")?.unwrap_or_else(|| "unknown".to_owned()),
        up: host::hexadecimal(&directory, "flags")?.unwrap_or(0) & 1 != 0,
        kind: kind(&directory)?,
        // Down gives EINVAL, unknown gives -1; neither parses.
        speed_mbps: host::parsed(&directory, "speed")?,
        driver: parent.as_ref().map_or(Ok(None), Parent::driver)?,
        auxiliary: parent.as_ref().and_then(|p| p.auxiliary.clone()),
        pci: parent.and_then(|p| p.pci).map(|(address, _)| address),
        master: host::link_name(&directory, "master")?,
        ..outline
    };
    // All attributes of a netdev that went away meanwhile are absent: that is not a netdev.
    host.netdev(name)?;
    Ok(netdev)
}

/// What determines a netdev's place among others and the RDMA port it belongs to: name, indexes,
/// link type, address, port; with its real directory. The rest is left empty; reading that costs
/// three times as much.
///
/// # Errors
/// As [`read`].
pub(crate) fn outline(host: &Host, name: &str) -> Result<(PathBuf, Netdev)> {
    let directory = host.netdev(name)?;
    let netdev = place(&directory, name)?;
    host.netdev(name)?;
    Ok((directory, netdev))
}

fn place(directory: &Path, name: &str) -> Result<Netdev> {
    Ok(Netdev {
        name: name.to_owned(),
        ifindex: host::parsed(directory, "ifindex")?.unwrap_or(0),
        iflink: host::parsed(directory, "iflink")?.unwrap_or(0),
        link_type: host::parsed(directory, "type")?.unwrap_or(0),
        mac: host::parsed(directory, "address")?,
        dev_port: dev_port(directory)?,
        phys_port_name: host::attribute(directory, "phys_port_name")?,
        ..Netdev::default()
    })
}

/// `dev_port`, or `dev_id` where an old driver says the port only there.
fn dev_port(directory: &Path) -> Result<u32> {
    match host::parsed(directory, "dev_port")? {
        None | Some(0) => Ok(host::hexadecimal(directory, "dev_id")?.unwrap_or(0)),
        Some(port) => Ok(port),
    }
}

/// `addr_assign_type` 0 says that the current address is the hardware's own
/// (`include/uapi/linux/netdevice.h`).
fn permanent_mac(directory: &Path, current: Option<&MacAddress>) -> Result<Option<MacAddress>> {
    if let Some(mac) = host::parsed(directory, "bonding_slave/perm_hwaddr")? {
        return Ok(Some(mac));
    }
    let assigned: Option<u32> = host::parsed(directory, "addr_assign_type")?;
    Ok(current
        .filter(|mac| assigned == Some(0) && !mac.is_zero())
        .cloned())
}

/// `DEVTYPE` of the uevent.
fn kind(directory: &Path) -> Result<Option<String>> {
    let uevent = host::attribute(directory, "uevent")?.unwrap_or_default();
    Ok(uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVTYPE="))
        .map(str::to_owned))
}

/// Names behind the `lower_<name>` and the `upper_<name>` links.
pub(crate) fn neighbours(directory: &Path) -> Result<(Vec<String>, Vec<String>)> {
    let (mut lowers, mut uppers) = (Vec::new(), Vec::new());
    for name in host::unsorted_names(directory)? {
        if let Some(lower) = name.strip_prefix("lower_") {
            lowers.push(lower.to_owned());
        } else if let Some(upper) = name.strip_prefix("upper_") {
            uppers.push(upper.to_owned());
        }
    }
    lowers.sort_unstable();
    uppers.sort_unstable();
    Ok((lowers, uppers))
}

/// The interface index alone; `None` if there is no such netdev (any more).
pub(crate) fn ifindex(host: &Host, name: &str) -> Result<Option<u32>> {
    host::parsed(&host.class("net").join(name), "ifindex")
}

/// True for an IPoIB netdev, by its type alone.
pub(crate) fn is_ipoib(host: &Host, name: &str) -> Result<bool> {
    let kind: Option<u16> = host::parsed(&host.class("net").join(name), "type")?;
    Ok(kind == Some(link_type::INFINIBAND))
}
