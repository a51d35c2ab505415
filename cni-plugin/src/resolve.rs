//! What a request resolves to: the links and RDMA devices it is about.
//!
//! Reads only. What moves, and what a child stands on, is a [`HostLink`], which is read on the host: no
//! link of the pod can take its place by name or index. Names, addresses and RDMA devices come from
//! sysfs through `hca`; what the kernel thinks of a link at this moment comes over netlink.

mod dependents;
mod host_link;
mod rdma_only;
mod target;

use crate::error::Error;
use cni_wire::{CniResult, Code, Request, text::list};
use hca::{HcaId, lookup};
use netlink_packet_route::link::InfoKind;

pub use dependents::{Dependent, explain};
pub use host_link::{HostLink, NodeNetwork};
pub(crate) use rdma_only::needs_a_chain;
pub use rdma_only::{PodInterface, RdmaOnly, RdmaTarget};
pub use target::{Missing, move_target, name_of};

use crate::config::{Attach, ChildKind, Config, Target};
use attachment::node::Node;
use host_link::{absent, read, read_named};
use netlink::{
    Socket,
    link::{self, By, Link},
    uplink,
};
use target::allocated;
pub(crate) use target::unreadable;

/// What a request comes to.
#[derive(Clone, Debug)]
pub enum Resolved {
    /// The netdev of the host itself becomes the pod's.
    Move(HostLink),
    /// A child becomes the pod's.
    Child {
        kind: ChildKind,
        /// The netdev of the host it stands on.
        parent: HostLink,
    },
    /// Nothing is made: RDMA devices follow an interface that another plugin made.
    RdmaOnly(RdmaOnly),
}

impl Resolved {
    /// The netdev of the host that it takes or stands on.
    pub fn host_link(&self) -> Option<&HostLink> {
        match self {
            Resolved::Move(host) | Resolved::Child { parent: host, .. } => Some(host),
            Resolved::RdmaOnly(_) => None,
        }
    }
}

/// Resolves a request.
///
/// # Errors
/// Code 7 when the request does not say which link or device is meant, or there is none; code 11
/// when the netdev is inside a pod.
pub fn resolve(
    node: &mut Node,
    request: &Request,
    config: &Config,
    before: &CniResult,
    inside: &mut Socket,
    network: &mut NodeNetwork,
) -> Result<Resolved, Error> {
    match config.attach {
        Attach::RdmaOnly => {
            let target = rdma_only::resolve(node, request, config, before, inside, network)?;
            Ok(Resolved::RdmaOnly(target))
        }
        Attach::Move => {
            let target = move_target(config)?;
            let mut nic = on_host(node, &target, config.port, network)?;
            is_allocated(node, config, &nic)?;
            nic.dependent = dependents::of(node, &nic, network)?;
            Ok(Resolved::Move(nic))
        }
        Attach::Child(kind) => {
            let parent = parent_on_host(node, config, network)?;
            child_on(node, config, kind, parent)
        }
    }
}

/// What a network that names a master on the host resolves to, for whichever pod; none where the
/// allocation or the pod decides.
pub fn named_master(node: &mut Node, config: &Config) -> Result<Option<Resolved>, Error> {
    let (Some(name), Attach::Child(kind)) = (&config.master, config.attach) else {
        return Ok(None);
    };
    let parent = read_named(node, name, &mut NodeNetwork::default())?;
    child_on(node, config, kind, parent).map(Some)
}

fn child_on(
    node: &mut Node,
    config: &Config,
    kind: ChildKind,
    parent: HostLink,
) -> Result<Resolved, Error> {
    is_allocated(node, config, &parent)?;
    carries_children(&mut node.netns.socket, kind, &parent.link)?;
    Ok(Resolved::Child { kind, parent })
}

/// The netdev of the host below a child.
fn parent_on_host(
    node: &mut Node,
    config: &Config,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let target = match &config.master {
        Some(master) => Target::Name(master.clone()),
        None if config.allocation.is_some() => allocated(config)?,
        // As the reference plugins do, where the policy allows uplinks at all.
        None => match node.policy.values.allow.uplinks {
            true => uplink::default_route_link(&mut node.netns.socket)?,
            false => None,
        }
        .map(|link| Target::Name(link.name.to_string()))
        .ok_or_else(|| {
            Error::new(Code::InvalidConfig, "no netdev is selected for the child").with_details(
                "set master, or let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName)",
            )
        })?,
    };
    let host = on_host(node, &target, config.port, network)?;
    match (&target, &host.controller) {
        // A port of a bond carries no children; the bond is how its HCA is used.
        (Target::Hca(_), Some((bond, kind))) if kind == "bond" => {
            read_named(node, &bond.clone(), network)
        }
        _ => Ok(host),
    }
}

/// Refuses a netdev that is not one of the allocated HCA: the pod would have the device nodes of one
/// HCA and its address on another. A unit of all HCAs of a pool names none.
fn is_allocated(node: &Node, config: &Config, host: &HostLink) -> Result<(), Error> {
    let allocation = config.allocation.as_ref();
    let Some((hca, text)) = allocation.and_then(|unit| Some((unit.hcas.first()?, &unit.text)))
    else {
        return Ok(());
    };
    if host.hcas.contains(hca) {
        return Ok(());
    }
    // A GUID is another name of hardware that has an address, too. What has no bus a pod may have.
    let devices = match lookup::on_hca(&node.roots, hca) {
        Err(e) if e.is_missing() && matches!(hca, HcaId::NodeGuid(_)) => Vec::new(),
        Err(e) => return Err(unreadable(&e).context(format_args!("deviceID {text}"))),
        Ok(occupants) => occupants.rdma_devices,
    };
    if host.rdma.iter().any(|port| devices.contains(&port.device)) {
        return Ok(());
    }
    let name = &host.link.name;
    let of = match host.hcas.is_empty() {
        true => "of no HCA".to_owned(),
        false => format!("of {}", list(&host.hcas)),
    };
    Err(Error::new(
        Code::InvalidConfig,
        format!("netdev {name} is {of}, but deviceID {text} is a unit of {hca}"),
    )
    .with_details(format!(
        "leave out the key that names {name}: the unit decides; or name a netdev of {hca}, or a bond, \
         bridge or VLAN on it"
    )))
}

/// The netdev of the host that a target means.
///
/// # Errors
/// Code 11 when a pod has it, also one that was attached since the journal was read last; code 7 when
/// there is none, or several.
fn on_host(
    node: &mut Node,
    target: &Target,
    port: Option<u32>,
    network: &mut NodeNetwork,
) -> Result<HostLink, Error> {
    let found = name_of(&node.roots, target, port).and_then(|name| {
        match link::get(&mut node.netns.socket, By::Name(name.as_bytes())) {
            Ok(Some(link)) => Ok(link),
            Ok(None) => Err(Missing::Netdev(absent(&name))),
            Err(e) => Err(Missing::Other(e.into())),
        }
    });
    match found {
        Ok(link) => read(node, link, network),
        Err(Missing::Netdev(error)) => Err(match holder_of(node, target)? {
            Some((netdev, owner)) => Error::new(
                Code::TryAgain,
                format!("netdev {netdev} is in the network namespace of {owner}"),
            )
            .with_details("it returns to the host when that pod is deleted"),
            None => error,
        }),
        Err(Missing::Other(error)) => Err(error),
    }
}

/// The attachment that has the netdev a target means, and the netdev's name on the host.
fn holder_of(node: &Node, target: &Target) -> Result<Option<(String, String)>, Error> {
    let records = node.records()?;
    let here = records
        .into_iter()
        .filter(|(_, record)| node.is_of_this_boot(&record.boot));
    let mut held = here.filter_map(|(_, record)| {
        let part = record.parts.iter().find(|part| target.means(part))?;
        let moved = part.moved.as_ref()?;
        Some((moved.name.to_string(), record.owner()))
    });
    Ok(held.next())
}

/// Refuses a macvlan, ipvlan, macvtap or ipvtap as master. `socket` is of the master's namespace.
///
/// The kernel makes a macvlan that is asked for on a macvlan on the link below that
/// (`macvlan_common_newlink()`), and an ipvlan on an ipvlan likewise (`ipvlan_link_new()`), in
/// whichever namespace that link is. What is judged, recorded and printed must be the link that is
/// used. One kind upon the other is a stack indeed, but its frames are on the wire of the link below
/// all the same.
///
/// # Errors
/// Code 7 with the name of the link below, where that is in the same namespace.
fn carries_children(socket: &mut Socket, kind: ChildKind, link: &Link) -> Result<(), Error> {
    use InfoKind::{IpVlan, IpVtap, MacVlan, MacVtap};
    let Some(master @ (MacVlan | MacVtap | IpVlan | IpVtap)) = &link.kind else {
        return Ok(());
    };
    let below = match (link.parent, link.parent_netns) {
        (Some(index), None) => link::get(socket, By::Index(index))?,
        _ => None,
    };
    let (through, remedy) = match below {
        Some(below) => (
            below.name.to_string(),
            format!("name {} as master instead", below.name),
        ),
        None => (
            "a link in another network namespace".to_owned(),
            "name a netdev of the host as master that is not a macvlan or ipvlan".to_owned(),
        ),
    };
    Err(Error::new(
        Code::InvalidConfig,
        format!(
            "master: {} is a {master}; its {} child would send and receive through {through}",
            link.name,
            kind.as_str(),
        ),
    )
    .with_details(remedy))
}
