//! A netdev of the host, with all that is decided about it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use attachment::node::Node;
use cni_wire::Code;
use hca::{
    HcaId, Host, NetnsMode, PortId,
    lookup::{self, RdmaHardware},
    uplink::Why,
};
use netlink::{
    Socket,
    link::{self, By, Link},
    uplink,
};
use netlink_packet_route::link::InfoKind;
use node::policy::{Allow, Candidate};

use super::target::unreadable;
use crate::error::Error;

/// A netdev of the host's namespace and its part in the host's own networking.
#[derive(Clone, Debug, Default)]
pub struct HostLink {
    pub link: Link,
    /// Its RDMA ports; empty when it has none.
    pub rdma: Vec<PortId>,
    /// The partition keys of its port, of an IPoIB netdev with one; none where that is not known.
    pub pkeys: Option<Vec<u16>>,
    /// How the RDMA subsystem treats namespaces; none without RDMA devices.
    pub mode: Option<NetnsMode>,
    /// The HCA it is the netdev of, by the names that units have for it; several where netdev and
    /// RDMA device are on different hardware.
    pub hcas: BTreeSet<HcaId>,
    /// Whether the policy's selectors (`allow.netdevs`) have it.
    pub is_selected: bool,
    /// The bridge, bond or VRF it is a port of, and what that is.
    pub controller: Option<(String, String)>,
    /// The link below a macvlan or ipvlan, where that is on the host.
    pub below: Option<String>,
    /// Why taking it would cut the node off; none when it would not.
    pub uplink: Option<String>,
    pub addresses: Vec<IpAddr>,
}

/// The node's own networking, read once for all NICs of a call, while nothing of the host is changed.
#[derive(Debug, Default)]
pub struct NodeNetwork {
    known: Option<Known>,
    /// Those of the host.
    pub(super) links: Option<Vec<Link>>,
}

#[derive(Debug)]
struct Known {
    addresses: Vec<(u32, IpAddr)>,
    uplinks: BTreeMap<String, Why>,
}

impl NodeNetwork {
    fn read(
        &mut self,
        socket: &mut Socket,
        asked: &Link,
        node_addresses: &[IpAddr],
    ) -> Result<&Known, Error> {
        let known = match self.known.take() {
            Some(known) => known,
            None => {
                let addresses = uplink::addresses(socket)?;
                let uplinks = uplink::uplinks(socket, Some(asked), node_addresses, &addresses)?;
                Known { addresses, uplinks }
            }
        };
        Ok(self.known.insert(known))
    }
}

/// Reads the netdev of this name. Code 7 when it does not exist.
pub(super) fn read_named(
    node: &mut Node,
    name: &str,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let link = link::get(&mut node.netns.socket, By::Name(name.as_bytes()))?;
    read(node, link.ok_or_else(|| absent(name))?, network)
}

/// Reads a netdev of the host.
pub(super) fn read(
    node: &mut Node,
    link: Link,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let node_addresses = node.known_addresses()?;
    let (roots, socket) = (&node.roots, &mut node.netns.socket);
    let allow = &node.policy.values.allow;
    HostLink::read(roots, socket, link, allow, &node_addresses, network)
}

impl HostLink {
    /// Reads a netdev of the host's namespace, which `socket` is of.
    ///
    /// `node_addresses` are the addresses the node is known by, beside those found here.
    ///
    /// # Errors
    /// Code 5 or 100 when reading fails.
    pub fn read(
        roots: &Host,
        socket: &mut Socket,
        link: Link,
        allow: &Allow,
        node_addresses: &[IpAddr],
        network: &mut NodeNetwork,
    ) -> Result<HostLink, Error> {
        use InfoKind::{IpVlan, IpVtap, MacVlan, MacVtap};
        let shown = link.name.to_string();
        let RdmaHardware { ports, hcas } = match lookup::hardware_of_netdev(roots, &shown) {
            Ok(hardware) => hardware,
            // Not in this sysfs: a netdev that sysfs does not show has no RDMA device there either.
            Err(e) if e.is_missing() => RdmaHardware::default(),
            Err(e) => return Err(unreadable(&e)),
        };
        let rdma: Vec<PortId> = ports.into_iter().collect();
        let mode = match rdma.as_slice() {
            [] => None,
            _ => hca::netns_mode(roots).map_err(|e| unreadable(&e))?,
        };
        let pkeys = match rdma.as_slice() {
            [port] if link.is_infiniband() => {
                Some(hca::port::partition_keys(roots, port).map_err(|e| unreadable(&e))?)
            }
            _ => None,
        };
        let mut found = HostLink {
            hcas,
            pkeys,
            rdma,
            mode,
            is_selected: true,
            ..HostLink::default()
        };
        if allow.netdevs.is_some() {
            found.is_selected = is_selected(roots, &link, &found.rdma, allow)?;
        }
        if let Some(index) = link.controller {
            let controller = link::get(socket, By::Index(index))?;
            let kind = link.port_kind.clone().unwrap_or_else(|| "other".into());
            found.controller = controller.map(|c| (c.name.to_string(), kind));
        }
        if let (Some(below), None, Some(MacVlan | MacVtap | IpVlan | IpVtap)) =
            (link.parent, link.parent_netns, &link.kind)
        {
            let below = link::get(socket, By::Index(below))?;
            found.below = below.map(|below| below.name.to_string());
        }
        let known = network.read(socket, &link, node_addresses)?;
        let own = known.addresses.iter();
        let own = own.filter(|(index, _)| *index == link.index);
        found.addresses = own.map(|(_, address)| *address).collect();
        let uplink = known.uplinks.get(&shown);
        found.uplink = uplink.map(ToString::to_string);
        found.link = link;
        Ok(found)
    }
}

/// Whether selectors of the policy have a netdev, by any of its RDMA ports.
fn is_selected(roots: &Host, link: &Link, rdma: &[PortId], allow: &Allow) -> Result<bool, Error> {
    let name = link.name.to_string();
    let netdev = match hca::netdev::read(roots, &name) {
        Ok(netdev) => Some(netdev),
        Err(e) if e.is_missing() => None,
        Err(e) => return Err(unreadable(&e)),
    };
    let pci = netdev.as_ref().and_then(|netdev| netdev.pci);
    let function = pci.and_then(|address| hca::pci::read(roots, address).ok());
    let ids = function.map(|pci| (format!("{:04x}", pci.vendor), format!("{:04x}", pci.device)));
    let auxiliary = netdev.as_ref().and_then(|netdev| netdev.auxiliary.clone());
    let address = auxiliary.or(pci.map(|pci| pci.to_string()));
    let candidate = |rdma_device| Candidate {
        if_name: &name,
        pci_address: address.as_deref(),
        vendor: ids.as_ref().map(|(vendor, _)| vendor.as_str()),
        device_id: ids.as_ref().map(|(_, device)| device.as_str()),
        driver: netdev.as_ref().and_then(|netdev| netdev.driver.as_deref()),
        link_type: match link.hardware {
            1 => Some("ether"),
            32 => Some("infiniband"),
            _ => None,
        },
        rdma_device,
    };
    if rdma.is_empty() {
        return Ok(allow.selects(&candidate(None)));
    }
    let mut ports = rdma.iter();
    Ok(ports.any(|port| allow.selects(&candidate(Some(&port.device)))))
}

pub(super) fn absent(name: &str) -> Error {
    Error::advise(
        Code::InvalidConfig,
        format_args!("netdev {name} does not exist on this host"),
        "correct the name, or leave it out where Multus passes a deviceID",
    )
}

#[cfg(test)]
mod tests {
    use node::{pattern::Pattern, policy::Selector};

    use super::*;

    #[test]
    fn selectors_know_name_type_and_rdma_device() {
        let directory = tempfile::tempdir().unwrap();
        let host = Host::at(directory.path());
        let selected = |hardware: u16, change: fn(&mut Selector, Vec<Pattern>), word: &str| {
            let link = Link {
                name: "eth1".into(),
                hardware,
                ..Link::default()
            };
            let port = PortId {
                device: "mlx5_0".into(),
                port: 1,
            };
            let mut selector = Selector::default();
            change(&mut selector, vec![Pattern::parse(word).unwrap()]);
            let allow = Allow {
                netdevs: Some(vec![selector]),
                ..Allow::default()
            };
            is_selected(&host, &link, &[port], &allow).unwrap()
        };
        assert!(selected(1, |s, w| s.if_names = w, "eth*"));
        assert!(!selected(1, |s, w| s.if_names = w, "ens*"));
        assert!(selected(1, |s, w| s.rdma_devices = w, "mlx5_0"));
        assert!(!selected(1, |s, w| s.rdma_devices = w, "mlx5_1"));
        for (hardware, word, expected) in [
            (1, "ether", true),
            (1, "infiniband", false),
            (32, "infiniband", true),
            (32, "ether", false),
            (6, "ether", false),
        ] {
            let is_selected = selected(hardware, |s, w| s.link_types = w, word);
            assert_eq!(is_selected, expected, "{hardware} {word}");
        }
        // An unknown vendor does not match.
        assert!(!selected(1, |s, w| s.vendors = w, "15b3"));
        let named = Link {
            name: "eth1".into(),
            ..Link::default()
        };
        let none = Allow {
            netdevs: Some(Vec::new()),
            ..Allow::default()
        };
        assert!(!is_selected(&host, &named, &[], &none).unwrap());
    }
}
