//! What a request resolves to: the kind of attachment, and the links and RDMA devices it is about.
//!
//! Reads only. A link of the host and a link of the pod are different types, so that nothing which
//! takes a link of the host can be handed one of the pod that has its name or its index. Names,
//! addresses and RDMA devices come from sysfs through `hca`; what the kernel thinks of a link at
//! this moment comes over netlink.

mod dependents;
mod rdma_only;
mod uplink;

use std::{collections::BTreeSet, net::IpAddr};

use crate::error::Error;
use cni_wire::{CniResult, Code, Request};
use hca::{HcaId, Host, NetnsMode, PortId, lookup};
use netlink_packet_route::link::InfoKind;

pub use dependents::{Dependent, rivals};
pub use rdma_only::{PodInterface, RdmaOnly, RdmaTarget};

use crate::config::{Attach, Config, Target};
use attachment::netdev::replay;
use attachment::node::Node;
use netlink::{
    Namespace, Socket,
    link::{self, By, Link},
    route,
};

/// What a request comes to.
#[derive(Clone, Debug)]
pub enum Resolved {
    /// The netdev of the host itself becomes the pod's.
    Move(HostLink),
    /// A child becomes the pod's.
    Child {
        /// What it is.
        kind: ChildKind,
        /// The link it stands on.
        parent: Parent,
    },
    /// Nothing is made: RDMA devices follow an interface that another plugin made.
    RdmaOnly(RdmaOnly),
}

/// Kinds of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildKind {
    /// With a MAC address of its own.
    Macvlan,
    /// With its parent's MAC address.
    Ipvlan,
    /// In a partition of an InfiniBand port.
    Ipoib,
}

/// The link below a child.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a call has one, and never a list of them"
)]
pub enum Parent {
    /// A netdev of the host.
    OfHost(HostLink),
    /// An interface of the pod.
    OfPod(PodLink),
}

/// A link in the pod's namespace.
#[derive(Clone, Debug)]
pub struct PodLink(Link);

impl PodLink {
    /// The link as the kernel describes it in the pod's namespace.
    pub fn link(&self) -> &Link {
        &self.0
    }
}

impl Parent {
    /// The link as the kernel describes it in its own namespace.
    pub fn link(&self) -> &Link {
        match self {
            Parent::OfHost(host) => &host.link,
            Parent::OfPod(pod) => pod.link(),
        }
    }

    /// The netdev of the host; none for an interface of the pod.
    pub fn of_host(&self) -> Option<&HostLink> {
        match self {
            Parent::OfHost(host) => Some(host),
            Parent::OfPod(_) => None,
        }
    }
}

impl Resolved {
    /// The netdev of the host that it takes or stands on.
    pub fn host_link(&self) -> Option<&HostLink> {
        match self {
            Resolved::Move(nic) => Some(nic),
            Resolved::Child { parent, .. } => parent.of_host(),
            Resolved::RdmaOnly(_) => None,
        }
    }

    /// The kind, by its name in the configuration.
    pub fn attach(&self) -> Attach {
        match self {
            Resolved::Move(_) => Attach::Move,
            Resolved::Child { kind, .. } => kind.attach(),
            Resolved::RdmaOnly(_) => Attach::RdmaOnly,
        }
    }
}

impl ChildKind {
    /// By its name in the configuration.
    pub fn attach(self) -> Attach {
        match self {
            ChildKind::Macvlan => Attach::Macvlan,
            ChildKind::Ipvlan => Attach::Ipvlan,
            ChildKind::Ipoib => Attach::Ipoib,
        }
    }

    /// The kind of child that a link carries where the configuration does not say.
    fn on(link: &Link) -> Self {
        match link.is_infiniband() {
            true => ChildKind::Ipoib,
            false => ChildKind::Macvlan,
        }
    }
}

/// What the configuration alone says of the kind.
///
/// Without `attach`, a device ID of an exclusive pool and a netdev named for moving mean `move`; a
/// shared device ID, a master and `linkInContainer` mean a child of the kind that the link can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requested {
    /// `move`.
    Move,
    /// A child of this kind, or of the kind that fits the link.
    Child(Option<ChildKind>),
    /// `rdma-only`.
    RdmaOnly,
}

/// The kind that a configuration asks for. Pure.
///
/// # Errors
/// Code 7: `linkInContainer` with a netdev of the host.
pub fn requested(config: &Config) -> Result<Requested, Error> {
    let exclusive = config
        .allocation
        .as_ref()
        .is_some_and(|allocation| matches!(allocation.unit, hca::UnitId::Exclusive(_)));
    let requested = match config.attach {
        Some(Attach::Move) => Requested::Move,
        Some(Attach::Macvlan) => Requested::Child(Some(ChildKind::Macvlan)),
        Some(Attach::Ipvlan) => Requested::Child(Some(ChildKind::Ipvlan)),
        Some(Attach::Ipoib) => Requested::Child(Some(ChildKind::Ipoib)),
        Some(Attach::RdmaOnly) => Requested::RdmaOnly,
        None if config.master.is_some() => Requested::Child(None),
        None if config.device.is_some() || exclusive => Requested::Move,
        None => Requested::Child(None),
    };
    if config.link_in_container && !matches!(requested, Requested::Child(_)) {
        return Err(Error::new(
            Code::InvalidConfig,
            "linkInContainer: the request is about a netdev of the host, not about an interface of \
             the pod",
        )
        .with_details(
            "set attach to macvlan or ipvlan and master to an interface of the pod, or leave \
             linkInContainer out",
        ));
    }
    Ok(requested)
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
    pod: &Namespace,
    inside: &mut Socket,
) -> Result<Resolved, Error> {
    match requested(config)? {
        Requested::RdmaOnly => {
            rdma_only::resolve(node, request, config, before, pod, inside).map(Resolved::RdmaOnly)
        }
        Requested::Move => {
            let target = move_target(config)?;
            let mut nic = on_host(node, &target, config.port)?;
            nic.dependents = dependents::of(node, &nic, pod)?;
            Ok(Resolved::Move(nic))
        }
        Requested::Child(kind) => {
            let parent = match config.link_in_container {
                true => Parent::OfPod(pod_link(inside, config.master.as_deref())?),
                false => Parent::OfHost(parent_on_host(node, config)?),
            };
            let kind = kind.unwrap_or_else(|| ChildKind::on(parent.link()));
            let socket = match &parent {
                Parent::OfHost(_) => &mut node.netns.socket,
                Parent::OfPod(_) => inside,
            };
            carries_children(socket, kind, &parent)?;
            Ok(Resolved::Child { kind, parent })
        }
    }
}

/// What a network that names a master on the host resolves to, for whichever pod; none where the
/// allocation or the pod decides.
///
/// # Errors
/// As [`resolve`].
pub fn named_master(node: &mut Node, config: &Config) -> Result<Option<Resolved>, Error> {
    let (Some(name), Requested::Child(kind)) = (&config.master, requested(config)?) else {
        return Ok(None);
    };
    if config.link_in_container {
        return Ok(None);
    }
    let parent = Parent::OfHost(read_named(node, name)?);
    let kind = kind.unwrap_or_else(|| ChildKind::on(parent.link()));
    carries_children(&mut node.netns.socket, kind, &parent)?;
    Ok(Some(Resolved::Child { kind, parent }))
}

/// Which netdev of the host a request to move means. Pure.
///
/// # Errors
/// Code 7: nothing says so.
pub fn move_target(config: &Config) -> Result<Target, Error> {
    if let Some(device) = &config.device {
        return Ok(device.clone());
    }
    match &config.allocation {
        Some(_) => allocated(config),
        None => Err(
            Error::new(Code::InvalidConfig, "nothing says which netdev to move").with_details(
                "set device, hwaddr, kernelpath, pciBusID or rdmaDevice, or let Multus pass a \
                 deviceID (k8s.v1.cni.cncf.io/resourceName)",
            ),
        ),
    }
}

/// The HCA of the allocation.
fn allocated(config: &Config) -> Result<Target, Error> {
    let allocation = config.allocation.as_ref();
    if let Some(hca) = allocation.and_then(|allocation| allocation.unit.hca()) {
        return Ok(Target::Hca(hca.clone()));
    }
    Err(Error::new(
        Code::InvalidConfig,
        format!(
            "deviceID {} is a share of several HCAs and names none",
            allocation.map_or("", |allocation| &allocation.text)
        ),
    )
    .with_details("name the netdev with master"))
}

/// The netdev of the host below a child.
fn parent_on_host(node: &mut Node, config: &Config) -> Result<HostLink, Error> {
    let target = match &config.master {
        Some(master) => Target::Name(master.clone()),
        None if config.allocation.is_some() => allocated(config)?,
        // As the reference plugins do, where the policy allows uplinks at all.
        None => match uplink_of(&mut node.netns.socket)? {
            Some(link) if node.policy.values.allow.uplinks => Target::Name(link.name.to_string()),
            _ => {
                return Err(Error::new(
                    Code::InvalidConfig,
                    "nothing says which netdev the child stands on",
                )
                .with_details(
                    "set master, or let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName)",
                ));
            }
        },
    };
    on_host(node, &target, config.port)
}

/// The netdev of the host that a target means.
///
/// # Errors
/// Code 11 when a pod has it, also one that was attached since the journal was read last; code 7 when
/// there is none, or several.
fn on_host(node: &mut Node, target: &Target, port: Option<u32>) -> Result<HostLink, Error> {
    let found = name_of(&node.roots, target, port).and_then(|name| {
        match link::get(&mut node.netns.socket, By::Name(name.as_bytes())) {
            Ok(Some(link)) => Ok(link),
            Ok(None) => Err(Missing::Netdev(absent(&name))),
            Err(e) => Err(Missing::Other(e.into())),
        }
    });
    match found {
        Ok(link) => read(node, link),
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
    Ok(records.into_iter().find_map(|(_, record)| {
        let moved = record.moved.as_ref().filter(|_| record.boot == node.boot)?;
        target
            .means(&record)
            .then(|| (moved.name.to_string(), record.owner()))
    }))
}

fn absent(name: &str) -> Error {
    Error::new(
        Code::InvalidConfig,
        format!("netdev {name} does not exist on this host"),
    )
}

/// The pod's interface that a child stands on: the one that is named, else the one of the pod's
/// default route.
fn pod_link(inside: &mut Socket, master: Option<&str>) -> Result<PodLink, Error> {
    let missing = |what: String| Error::new(Code::InvalidConfig, format!("master: {what}"));
    let link = match master {
        Some(name) => link::get(inside, By::Name(name.as_bytes()))?
            .ok_or_else(|| missing(format!("the pod has no interface {name}")))?,
        None => uplink_of(inside)?.ok_or_else(|| {
            missing("none is named, and the pod has no default route that would say which".into())
        })?,
    };
    if let Some(controller) = link.controller
        && link.port_kind.as_deref() != Some("vrf")
    {
        let controller = link::get(inside, By::Index(controller))?.unwrap_or_default();
        return Err(missing(format!(
            "{} is a port of {} in the pod, which carries no children",
            link.name, controller.name
        ))
        .with_details(format!("name {} itself", controller.name)));
    }
    Ok(PodLink(link))
}

/// Refuses a macvlan, ipvlan, macvtap or ipvtap as master. `socket` is of the master's namespace.
///
/// The kernel makes a macvlan that is asked for on a macvlan on the link below that
/// (`macvlan_common_newlink()`), and an ipvlan on an ipvlan likewise (`ipvlan_link_new()`), in
/// whichever namespace that link is. What is judged, recorded and printed must be the link that is
/// used. One kind upon the other is a stack indeed, but its frames are on the wire of the link below
/// all the same; of these only an ipvlan on a macvlan of the pod adds nothing that the pod has not.
///
/// # Errors
/// Code 7 with the name of the link below, where that is in the same namespace.
fn carries_children(socket: &mut Socket, kind: ChildKind, parent: &Parent) -> Result<(), Error> {
    let link = parent.link();
    let Some(master) = &link.kind else {
        return Ok(());
    };
    let is_macvlan = matches!(master, InfoKind::MacVlan | InfoKind::MacVtap);
    let is_ipvlan = matches!(master, InfoKind::IpVlan | InfoKind::IpVtap);
    let within_the_pod = is_macvlan && kind == ChildKind::Ipvlan && parent.of_host().is_none();
    if !(is_macvlan || is_ipvlan) || within_the_pod {
        return Ok(());
    }
    let below = match (link.parent, link.parent_netns) {
        (Some(index), None) => link::get(socket, By::Index(index))?,
        _ => None,
    };
    let (through, remedy) = match (&below, parent) {
        (Some(below), _) => (
            below.name.to_string(),
            format!("name {} as master instead", below.name),
        ),
        (None, Parent::OfHost(_)) => (
            "a link in another network namespace".to_owned(),
            "name a netdev of the host as master that is no macvlan or ipvlan".to_owned(),
        ),
        (None, Parent::OfPod(_)) => (
            "a link outside of the pod".to_owned(),
            "leave linkInContainer out and name a netdev of the host as master; an ipvlan may have \
             a macvlan of the pod as master"
                .to_owned(),
        ),
    };
    Err(Error::new(
        Code::InvalidConfig,
        format!(
            "master: {} is a {master}; {} {} on it would send and receive through {through}",
            link.name,
            match kind {
                ChildKind::Ipvlan | ChildKind::Ipoib => "an",
                ChildKind::Macvlan => "a",
            },
            kind.attach().as_str(),
        ),
    )
    .with_details(remedy))
}

/// The link of the default route with the lowest metric, in the socket's namespace.
fn uplink_of(socket: &mut Socket) -> Result<Option<Link>, Error> {
    for family in route::FAMILIES {
        let mut defaults = route::list_table(socket, family, replay::MAIN)?;
        defaults.retain(replay::is_default);
        let best = defaults.iter().min_by_key(|route| replay::metric(route));
        if let Some(index) = best.and_then(replay::leaves_through)
            && let Some(link) = link::get(socket, By::Index(index))?
        {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// Why there is no netdev to work with.
#[derive(Debug)]
pub enum Missing {
    /// Its hardware is here but its netdev is not: it is in a pod, returning from one, or
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
        Missing::Other(unreadable(&error))
    }
}

/// What sysfs could not say.
pub(crate) fn unreadable(error: &hca::Error) -> Error {
    let code = match error {
        hca::Error::Missing { .. } | hca::Error::BadName { .. } => Code::InvalidConfig,
        _ => Code::Io,
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
        true => Missing::Netdev(unreadable(&error)),
        false => Missing::Other(unreadable(&error)),
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

/// A netdev of the host's namespace and its part in the host's own networking.
#[derive(Clone, Debug, Default)]
pub struct HostLink {
    /// The netdev.
    pub link: Link,
    /// Its RDMA ports; empty when it has none.
    pub rdma: Vec<PortId>,
    /// How the RDMA subsystem treats namespaces; none without RDMA devices.
    pub mode: Option<NetnsMode>,
    /// The HCA it is the netdev of, by the names that units have for it; several where netdev and
    /// RDMA device stand on different hardware.
    pub hcas: BTreeSet<HcaId>,
    /// What stands on it; only read for a move.
    pub dependents: Vec<Dependent>,
    /// What selectors of the policy ask for; only read when there are any.
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

/// Reads what is to be known of the netdev of this name. Code 7 when there is none.
fn read_named(node: &mut Node, name: &str) -> Result<HostLink, Error> {
    let link = link::get(&mut node.netns.socket, By::Name(name.as_bytes()))?;
    read(node, link.ok_or_else(|| absent(name))?)
}

/// Reads what is to be known of a netdev of the host.
fn read(node: &mut Node, link: Link) -> Result<HostLink, Error> {
    let node_addresses = node.known_addresses()?;
    let with_selectors = node.policy.values.allow.netdevs.is_some();
    let socket = &mut node.netns.socket;
    HostLink::read(&node.roots, socket, link, with_selectors, &node_addresses)
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
            _ => hca::nldev::netns_mode(roots).map_err(|e| unreadable(&e))?,
        };
        let hcas = match lookup::hcas_of_netdev(roots, &shown, &rdma) {
            Ok(hcas) => hcas,
            Err(e) if e.is_missing() => BTreeSet::new(),
            Err(e) => return Err(unreadable(&e)),
        };
        let mut found = HostLink {
            hcas,
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
        let addresses = uplink::addresses(socket)?;
        let own = addresses.iter().filter(|(index, _)| *index == link.index);
        found.addresses = own.map(|(_, address)| *address).collect();
        found.uplink =
            uplink::of(socket, &link, node_addresses, &addresses)?.map(|why| why.to_string());
        found.link = link;
        Ok(found)
    }
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

    fn unit(text: &str) -> Option<crate::config::Allocation> {
        Some(crate::config::Allocation {
            unit: text.parse().unwrap(),
            text: text.into(),
        })
    }

    #[test]
    fn the_allocation_decides_the_kind_unless_the_configuration_does() {
        let exclusive = Config {
            allocation: unit("0000:3b:00.0"),
            ..Config::default()
        };
        let shared = Config {
            allocation: unit("0000:3b:00.0_3e71787e_17"),
            ..Config::default()
        };
        let master = Config {
            master: Some("eth1".into()),
            ..exclusive.clone()
        };
        let ipvlan = Config {
            attach: Some(Attach::Ipvlan),
            ..exclusive.clone()
        };
        let device = Config {
            device: Some(Target::Name("e".into())),
            ..Config::default()
        };
        for (config, expected) in [
            (&exclusive, Requested::Move),
            (&device, Requested::Move),
            (&shared, Requested::Child(None)),
            (&master, Requested::Child(None)),
            (&ipvlan, Requested::Child(Some(ChildKind::Ipvlan))),
        ] {
            assert_eq!(requested(config).unwrap(), expected, "{config:?}");
        }
        let on = |hardware| {
            ChildKind::on(&Link {
                hardware,
                ..Link::default()
            })
        };
        assert_eq!((on(1), on(32)), (ChildKind::Macvlan, ChildKind::Ipoib));
    }

    #[test]
    fn an_interface_of_the_pod_is_never_meant_beside_a_netdev_of_the_host() {
        let within = Config {
            link_in_container: true,
            ..Config::default()
        };
        assert_eq!(requested(&within).unwrap(), Requested::Child(None));
        for config in [
            Config {
                device: Some(Target::Name("eth1".into())),
                ..within.clone()
            },
            Config {
                allocation: unit("0000:3b:00.0"),
                ..within.clone()
            },
            Config {
                attach: Some(Attach::Move),
                ..within.clone()
            },
            Config {
                attach: Some(Attach::RdmaOnly),
                ..within.clone()
            },
        ] {
            let error = requested(&config).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains("linkInContainer"), "{error}");
        }
    }
}
