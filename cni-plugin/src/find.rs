//! Which netdev of the host a configuration means, and what is known about it.
//!
//! Looks only. Names, addresses and RDMA devices come from sysfs through `hca`; what the kernel
//! thinks of the netdev at this moment comes over netlink.

use std::net::IpAddr;

use cni_wire::{Code, Error};
use hca::{HcaId, Host, NetnsMode, PortId, lookup};
use netlink_packet_route::{
    AddressFamily,
    address::AddressAttribute,
    route::{RouteAddress, RouteAttribute, RouteMessage},
};

use crate::{
    config::Target,
    kernel::{
        Socket, address,
        link::{self, By, Link},
        route,
    },
    netdev::replay,
};

/// Why there is no netdev to work with.
#[derive(Debug)]
pub enum Missing {
    /// Its hardware is here but its netdev is not: it is in a pod, on its way back from one, or
    /// its driver makes none.
    Netdev(Error),
    /// Anything else: it does not exist, or the request does not say which.
    Other(Error),
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::Netdev(error) | Missing::Other(error) => error,
        }
    }
}

impl From<hca::Error> for Missing {
    fn from(error: hca::Error) -> Self {
        Missing::Other(looked(&error))
    }
}

fn looked(error: &hca::Error) -> Error {
    let code = if error.is_missing() {
        Code::InvalidConfig
    } else {
        Code::Io
    };
    Error::new(code, error.to_string())
}

/// The name of the netdev a target means.
///
/// # Errors
/// See [`Missing`]; code 7 when it does not exist or several could be meant.
pub fn name_of(host: &Host, target: &Target, port: Option<u32>) -> Result<String, Missing> {
    match target {
        Target::Name(name) => Ok(name.clone()),
        Target::Mac(mac) => {
            let found = lookup::netdevs_by_mac(host, mac)?;
            // A bond has the address of a member, a VLAN that of its parent: the hardware is meant.
            let hardware: Vec<_> = found.iter().filter(|n| n.kind.is_none()).collect();
            let names: Vec<&str> = match hardware.as_slice() {
                [] => found.iter().map(|n| n.name.as_str()).collect(),
                some => some.iter().map(|n| n.name.as_str()).collect(),
            };
            only(&names, &format!("MAC address {mac}"))
        }
        Target::KernelPath(path) => {
            let relative = path.trim_start_matches("/sys/");
            let directory = host.sys.join(relative).join("net");
            let entries = std::fs::read_dir(&directory).map_err(|e| {
                Missing::Netdev(Error::new(
                    Code::InvalidConfig,
                    format!("kernelpath {path} has no netdev here: {e}"),
                ))
            })?;
            let names: Vec<String> = entries
                .filter_map(|e| e.ok()?.file_name().into_string().ok())
                .collect();
            only(&names.iter().map(String::as_str).collect::<Vec<_>>(), path)
        }
        Target::RdmaDevice(name) => {
            let device = hca::rdma::read(host, name).map_err(away)?;
            of_ports(&device, port)
        }
        Target::Hca(hca @ HcaId::NodeGuid(_)) => {
            let device = lookup::on_hca(host, hca).map_err(away)?;
            let device = device.rdma_devices.first().map(String::as_str);
            let device = hca::rdma::read(host, device.unwrap_or_default()).map_err(away)?;
            of_ports(&device, port)
        }
        Target::Hca(hca) => {
            let occupants = lookup::on_hca(host, hca)?;
            let candidates: Vec<(u32, &str)> = occupants
                .netdevs
                .iter()
                .map(|n| (n.dev_port + 1, n.name.as_str()))
                .collect();
            by_port(&candidates, port, &hca.to_string())
        }
    }
}

/// In exclusive mode an RDMA device that a pod has is not seen here.
fn away(error: hca::Error) -> Missing {
    match error.is_missing() {
        true => Missing::Netdev(looked(&error)),
        false => Missing::Other(looked(&error)),
    }
}

fn of_ports(device: &hca::RdmaDevice, port: Option<u32>) -> Result<String, Missing> {
    let candidates: Vec<(u32, &str)> = device
        .ports
        .iter()
        .filter_map(|p| Some((p.number, p.netdev.as_deref()?)))
        .collect();
    by_port(&candidates, port, &format!("RDMA device {}", device.name))
}

fn by_port(found: &[(u32, &str)], port: Option<u32>, what: &str) -> Result<String, Missing> {
    let names: Vec<&str> = found
        .iter()
        .filter(|(number, _)| port.is_none_or(|port| port == *number))
        .map(|(_, name)| *name)
        .collect();
    if names.is_empty() && !found.is_empty() {
        let ports: Vec<String> = found
            .iter()
            .map(|(n, name)| format!("{n} is {name}"))
            .collect();
        return Err(Missing::Other(Error::new(
            Code::InvalidConfig,
            format!(
                "{what} has no netdev on port {} ({})",
                port.unwrap_or(0),
                ports.join(", ")
            ),
        )));
    }
    only(&names, what)
}

fn only(names: &[&str], what: &str) -> Result<String, Missing> {
    match names {
        [] => Err(Missing::Netdev(Error::new(
            Code::InvalidConfig,
            format!("{what} has no netdev in the host's network namespace"),
        ))),
        [name] => Ok((*name).to_owned()),
        several => Err(Missing::Other(
            Error::new(
                Code::InvalidConfig,
                format!("{what} has several netdevs: {}", several.join(", ")),
            )
            .with_details("say which one with port (from 1), device or master"),
        )),
    }
}

/// A netdev of the host and its part in the host's own networking.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The netdev.
    pub link: Link,
    /// Its RDMA ports; empty when it has none.
    pub rdma: Vec<PortId>,
    /// How the RDMA subsystem treats namespaces; none without RDMA devices.
    pub mode: Option<NetnsMode>,
    /// What selectors of the policy ask for; only looked at when there are any.
    pub netdev: Option<hca::Netdev>,
    /// Vendor and device of its PCI function, four hexadecimal digits each; likewise.
    pub pci_ids: Option<(String, String)>,
    /// The bridge, bond or VRF it is a port of, and what that is.
    pub controller: Option<(String, String)>,
    /// Why taking it would cut the node off; none when it would not.
    pub uplink: Option<String>,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
}

/// Looks at a netdev of the namespace that `socket` is of.
///
/// `node_addresses` are the addresses the node is known by, beside those found here.
///
/// # Errors
/// Code 7 when there is none of that name, code 5 or 100 when looking fails.
pub fn look(
    host: &Host,
    socket: &mut Socket,
    name: &str,
    with_selectors: bool,
    node_addresses: &[IpAddr],
) -> Result<Found, Error> {
    let link = link::get(socket, By::Name(name.as_bytes()))?.ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            format!("netdev {name} does not exist on this host"),
        )
    })?;
    let rdma = match lookup::ports_of_netdev(host, &link.name.to_string()) {
        Ok(ports) => ports,
        // Not in this sysfs: a netdev that sysfs does not show has no RDMA device there either.
        Err(e) if e.is_missing() => Vec::new(),
        Err(e) => return Err(looked(&e)),
    };
    let mode = match rdma.as_slice() {
        [] => None,
        _ => hca::nldev::netns_mode(host).map_err(|e| looked(&e))?,
    };
    let mut found = Found {
        rdma,
        mode,
        ..Found::default()
    };
    if with_selectors {
        match hca::netdev::read(host, &link.name.to_string()) {
            Ok(netdev) => {
                found.pci_ids = netdev.pci.and_then(|address| {
                    let function = hca::pci::read(host, address).ok()?;
                    Some((
                        format!("{:04x}", function.vendor),
                        format!("{:04x}", function.device),
                    ))
                });
                found.netdev = Some(netdev);
            }
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(looked(&e)),
        }
    }
    if let Some(index) = link.controller {
        let controller = link::get(socket, By::Index(index))?;
        let kind = link.port_kind.clone().unwrap_or_else(|| "other".into());
        found.controller = controller.map(|c| (c.name.to_string(), kind));
    }
    found.addresses = address::list(socket, link.index)?
        .iter()
        .flat_map(|message| &message.attributes)
        .filter_map(|attribute| match attribute {
            AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
        .collect();
    found.uplink = uplink(socket, &link, &found.addresses, node_addresses)?;
    found.link = link;
    Ok(found)
}

/// Why taking a netdev would cut the node off.
///
/// It is an uplink when it carries a default route of the main table, when the kernel would
/// leave the node through it (or through a VLAN, macvlan, bridge or bond on it), or when it has
/// an address the node is known by: the source address towards the outside, or one of those
/// given. An address of its own subnet alone does not make it one: rails have those. Default
/// routes of other tables do not either: they are policy routing of rails.
fn uplink(
    socket: &mut Socket,
    link: &Link,
    addresses: &[IpAddr],
    node_addresses: &[IpAddr],
) -> Result<Option<String>, Error> {
    for family in route::FAMILIES {
        let default = route::list(socket, family, link.index)?
            .into_iter()
            .find(|r| replay::is_default(r) && route::table_of(r) == replay::MAIN);
        if default.is_some() {
            return Ok(Some("it carries the node's default route".to_owned()));
        }
        let Some(way) = way_out(socket, family)? else {
            continue;
        };
        if way.source.is_some_and(|source| addresses.contains(&source)) {
            return Ok(way
                .source
                .map(|source| format!("it has the node's address {source}")));
        }
        if let Some(name) = stands_on(socket, way.index, link)? {
            return Ok(Some(format!("{name}, the node's way out, is on top of it")));
        }
    }
    Ok(addresses
        .iter()
        .find(|address| node_addresses.contains(address))
        .map(|address| format!("it has the node's address {address}")))
}

struct WayOut {
    index: u32,
    source: Option<IpAddr>,
}

/// How the kernel would leave the node towards addresses nobody has (RFC 5737, RFC 3849).
fn way_out(socket: &mut Socket, family: AddressFamily) -> Result<Option<WayOut>, Error> {
    let (outside, bits): (IpAddr, u8) = match family {
        AddressFamily::Inet => ([192, 0, 2, 1].into(), 32),
        _ => ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(), 128),
    };
    let mut query = RouteMessage::default();
    query.header.address_family = family;
    query.header.destination_prefix_length = bits;
    query
        .attributes
        .push(RouteAttribute::Destination(outside.into()));
    let Some(answer) = route::get(socket, &query)? else {
        return Ok(None);
    };
    let mut way = WayOut {
        index: 0,
        source: None,
    };
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => way.index = *index,
            RouteAttribute::PrefSource(RouteAddress::Inet(source)) => {
                way.source = Some((*source).into());
            }
            RouteAttribute::PrefSource(RouteAddress::Inet6(source)) => {
                way.source = Some((*source).into());
            }
            _ => {}
        }
    }
    // Unreachable routes have no interface.
    Ok((way.index != 0).then_some(way))
}

/// Netdevs can be stacked only eight deep (`MAX_NEST_DEV`, include/linux/netdevice.h).
const MAX_STACK: u32 = 8;

/// The name of the netdev with index `upper`, when it stands on `link`: as VLAN or other child
/// of it, or as the bridge or bond it is a port of, over any number of steps.
fn stands_on(socket: &mut Socket, upper: u32, link: &Link) -> Result<Option<String>, Error> {
    let Some(top) = link::get(socket, By::Index(upper))? else {
        return Ok(None);
    };
    // From the netdev up through what it is a port of...
    let mut above = vec![link.index];
    let mut at = link.controller;
    while let Some(index) = at.filter(|_| above.len() < MAX_STACK as usize) {
        above.push(index);
        at = link::get(socket, By::Index(index))?.and_then(|l| l.controller);
    }
    // ... and from the way out down through what it is a child of.
    let mut below = Some(top.clone());
    for _ in 0..MAX_STACK {
        let Some(at) = below else { break };
        if above.contains(&at.index) {
            return Ok(Some(top.name.to_string()));
        }
        below = match (at.parent, at.parent_netns) {
            (Some(parent), None) if parent != at.index => link::get(socket, By::Index(parent))?,
            _ => None,
        };
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_netdevs_is_chosen_by_port() {
        let both = [(1, "ens1f0"), (2, "ens1f1")];
        assert_eq!(by_port(&both, Some(2), "x").unwrap(), "ens1f1");
        assert_eq!(by_port(&both[..1], None, "x").unwrap(), "ens1f0");
        let Err(Missing::Other(error)) = by_port(&both, None, "0000:3b:00.0") else {
            panic!()
        };
        assert!(error.msg.contains("ens1f0, ens1f1") && error.details.contains("port"));
        let Err(Missing::Other(error)) = by_port(&both, Some(3), "0000:3b:00.0") else {
            panic!()
        };
        assert!(error.msg.contains("port 3"), "{error}");
        assert!(matches!(by_port(&[], None, "x"), Err(Missing::Netdev(_))));
    }
}
