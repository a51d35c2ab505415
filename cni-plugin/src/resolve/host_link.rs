//! A netdev of the host, with all that is decided about it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use attachment::node::Node;
use cni_wire::Code;
use hca::{HcaId, Host, NetnsMode, PortId, lookup, uplink::Why};
use netlink::{
    Socket,
    link::{self, By, Link},
    uplink,
};

use super::{Dependent, target::unreadable};
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
    /// RDMA device stand on different hardware.
    pub hcas: BTreeSet<HcaId>,
    /// What stands on it; only read for a move.
    pub dependent: Option<Dependent>,
    /// What selectors of the policy ask for; only read when there are any.
    pub netdev: Option<hca::Netdev>,
    /// Vendor and device of its PCI function, four hexadecimal digits each; likewise.
    pub pci_ids: Option<(String, String)>,
    /// The bridge, bond or VRF it is a port of, and what that is.
    pub controller: Option<(String, String)>,
    /// Why taking it would cut the node off; none when it would not.
    pub uplink: Option<String>,
    pub addresses: Vec<IpAddr>,
}

/// The node's own networking, read once for all NICs of a call, while nothing of the host is changed.
#[derive(Debug, Default)]
pub struct NodeNetwork {
    known: Option<Known>,
    /// All but loopback and pairs.
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

/// Reads what is to be known of the netdev of this name. Code 7 when there is none.
pub(super) fn read_named(
    node: &mut Node,
    name: &str,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let link = link::get(&mut node.netns.socket, By::Name(name.as_bytes()))?;
    read(node, link.ok_or_else(|| absent(name))?, network)
}

/// Reads what is to be known of a netdev of the host.
pub(super) fn read(
    node: &mut Node,
    link: Link,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let node_addresses = node.known_addresses()?;
    let with_selectors = node.policy.values.allow.netdevs.is_some();
    let (roots, socket) = (&node.roots, &mut node.netns.socket);
    HostLink::read(
        roots,
        socket,
        link,
        with_selectors,
        &node_addresses,
        network,
    )
}

impl HostLink {
    /// Reads what is to be known of a netdev of the namespace that `socket` is of, the host's.
    ///
    /// `with_selectors`: also what selectors of the policy ask for. `node_addresses` are the addresses
    /// the node is known by, beside those found here.
    ///
    /// # Errors
    /// Code 5 or 100 when reading fails.
    pub fn read(
        roots: &Host,
        socket: &mut Socket,
        link: Link,
        with_selectors: bool,
        node_addresses: &[IpAddr],
        network: &mut NodeNetwork,
    ) -> Result<HostLink, Error> {
        let shown = link.name.to_string();
        let rdma = match lookup::ports_of_netdev(roots, &shown) {
            Ok(ports) => ports,
            // Not in this sysfs: a netdev that sysfs does not show has no RDMA device there either.
            Err(e) if e.is_missing() => Vec::new(),
            Err(e) => return Err(unreadable(&e)),
        };
        let mode = match rdma.as_slice() {
            [] => None,
            _ => hca::netns_mode(roots).map_err(|e| unreadable(&e))?,
        };
        let hcas = match lookup::hcas_of_netdev(roots, &shown, &rdma) {
            Ok(hcas) => hcas,
            Err(e) if e.is_missing() => BTreeSet::new(),
            Err(e) => return Err(unreadable(&e)),
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
            ..HostLink::default()
        };
        if with_selectors {
            match hca::netdev::read(roots, &shown) {
                Ok(netdev) => {
                    found.pci_ids = netdev.pci.and_then(|address| {
                        let function = hca::pci::read(roots, address).ok()?;
                        Some((
                            format!("{:04x}", function.vendor),
                            format!("{:04x}", function.device),
                        ))
                    });
                    found.netdev = Some(netdev);
                }
                Err(e) if e.is_missing() => {}
                Err(e) => return Err(unreadable(&e)),
            }
        }
        if let Some(index) = link.controller {
            let controller = link::get(socket, By::Index(index))?;
            let kind = link.port_kind.clone().unwrap_or_else(|| "other".into());
            found.controller = controller.map(|c| (c.name.to_string(), kind));
        }
        let known = network.read(socket, &link, node_addresses)?;
        let own = known.addresses.iter();
        let own = own.filter(|(index, _)| *index == link.index);
        found.addresses = own.map(|(_, address)| *address).collect();
        let uplink = known.uplinks.get(&link.name.to_string());
        found.uplink = uplink.map(ToString::to_string);
        found.link = link;
        Ok(found)
    }
}

pub(super) fn absent(name: &str) -> Error {
    Error::new(
        Code::InvalidConfig,
        format!("netdev {name} does not exist on this host"),
    )
}
