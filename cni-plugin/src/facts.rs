//! All that a decision about an attachment needs to know, read before anything of the host changes.
//!
//! What moves, and what a child is on, is a [`HostLink`], which is read on the host: no link of the pod
//! can take its place by name or index. Names, addresses and RDMA devices come from sysfs through
//! `hca`; what the kernel thinks of a link at this moment comes over netlink.

mod dependents;
mod host_link;
mod rdma_only;
mod target;

use std::{cell::OnceCell, collections::BTreeSet, path::Path};

use attachment::{
    addresses::Ipam,
    netdev::{
        obstacle::{self, Addresses},
        snapshot::{Identity, Snapshot},
        vf::Vf,
    },
    node::Node,
    part::{self, Part},
    rdma::DeviceNodes,
};
use cni_wire::{CniResult, Request};
use hca::{HcaId, Host, MacAddress, NetnsMode, lookup};
use netlink::{
    Name, Socket,
    link::{self, By},
    route, rule,
};
use netlink_packet_route::AddressFamily;
use node::policy::{FabricAddresses, Policy};

pub use host_link::{HostLink, NodeNetwork};
pub use rdma_only::{RdmaOnly, RdmaTarget};
pub use target::{lacks_target, move_target, name_of};

use crate::{
    addressing,
    allocation::{self, Allocated, Devices},
    bind::Bound,
    config::{self, Attach, ChildKind, Config, UnitHcas},
    decide,
    error::Error,
    orphan,
    rdma::{self, MovableRdma, RdmaRequirement},
};
use host_link::{absent, read as read_link, read_named};

pub(crate) use rdma_only::needs_a_chain;
pub(crate) use target::unreadable;

/// What a decision is made of. Without NICs it is about what the network and the policy say alone.
#[derive(Debug)]
pub struct Facts<'a> {
    pub policy: &'a Policy,
    /// The policy's file, for messages.
    pub policy_path: &'a Path,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// Whether a unit of the pod decides about the NIC.
    pub by_unit: bool,
    /// Why the addresses are not for several interfaces, if so.
    pub for_one: Option<Error>,
    /// The rails for which the network has ranges of addresses; none where it has not one for each.
    pub ranges: Option<BTreeSet<u32>>,
    /// How the RDMA subsystem treats namespaces; none where that was not read: `rdma: required` asks.
    pub mode: Option<Option<NetnsMode>>,
    /// HCAs of exclusive pools: none of them is shared by a child of another pod.
    pub exclusive: Vec<HcaId>,
    /// What the kubelet allocated to the pod, where that matters.
    pub allocated: Option<Result<Allocated, Error>>,
    /// With `devices: all` the pod's units of the resource.
    pub devices: Option<Devices>,
    /// In the order of the HCAs.
    pub nics: Vec<Nic>,
}

/// A NIC that the network means.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The unit that it is of; none where no unit decides.
    pub unit: Option<UnitHcas>,
    /// Whether its netdev is one of the unit's HCA.
    pub is_of_unit: bool,
    pub found: Found,
    /// An index and an address that no link has, for a child.
    pub random: (u32, MacAddress),
}

/// What was found of a NIC, by what becomes of it.
#[derive(Clone, Debug)]
pub enum Found {
    Move(Box<Movable>),
    /// The netdev of the host that the child is on.
    Child(ChildKind, Box<HostLink>),
    RdmaOnly(Box<RdmaOnly>),
}

/// A netdev that is to move.
#[derive(Clone, Debug)]
pub struct Movable {
    pub link: HostLink,
    /// What is on it, as a clause of a message.
    pub dependent: Option<String>,
    /// Its state; where that cannot be read, the pod may have no right to it in the first place.
    pub state: Result<MovableState, Error>,
}

#[derive(Clone, Debug, Default)]
pub struct MovableState {
    pub snapshot: Snapshot,
    /// What the host has of it that a move would destroy, or that would act in the pod.
    pub obstacles: Vec<Error>,
    /// Its RDMA devices; read where they move.
    pub rdma: MovableRdma,
    /// What else of this host has the GUID that the network asks for.
    pub guid_holder: Option<String>,
}

impl Found {
    /// The netdev of the host that moves or that the child is on.
    pub fn host_link(&self) -> Option<&HostLink> {
        match self {
            Found::Move(movable) => Some(&movable.link),
            Found::Child(_, parent) => Some(parent),
            Found::RdmaOnly(_) => None,
        }
    }
}

/// Units, and which HCAs they are: what the kubelet allocated, or the daemon bound.
#[derive(Debug, Default)]
pub(crate) struct Units {
    allocated: OnceCell<Result<Allocated, Error>>,
    /// With `devices: all` those of the resource.
    devices: Option<Devices>,
    /// One for each NIC, in the order of the HCAs: every process that locks several NICs does so in this
    /// order.
    pub nics: Vec<Option<UnitHcas>>,
}

impl Units {
    /// A unit ID in a network is not proof: a tenant can forge it. The daemon has returned the HCAs of
    /// slots, `bound`, already.
    pub(crate) fn read(
        node: &Node,
        request: &Request,
        config: &Config,
        bound: Option<&Bound>,
    ) -> Result<Units, Error> {
        let mut units = Units::default();
        let Some(named) = &config.allocation else {
            units.nics.push(None);
            return Ok(units);
        };
        if config.devices == config::Devices::All {
            let held = allocation::ask(&node.daemon_socket(), &request.env.args, &node.log)?;
            units.devices = Some(held.devices(named, bound.map(Bound::hcas))?);
            units.allocated = Ok(held.allocated()).into();
        }
        if let Some(bound) = bound {
            units.allocated = Ok(bound.allocated()).into();
        }
        let hcas: Vec<HcaId> = match (&units.devices, bound) {
            (Some(devices), _) => devices.hcas.iter().cloned().collect(),
            (None, Some(bound)) => bound.hcas().into_iter().collect(),
            (None, None) => named.unit.hca().cloned().into_iter().collect(),
        };
        let unit = |hcas: Vec<HcaId>| UnitHcas {
            text: match hcas
                .first()
                .filter(|_| config.devices == config::Devices::All)
            {
                Some(hca) => hca.to_string(),
                None => named.text.clone(),
            },
            slot: bound.and_then(|bound| bound.slot(hcas.first()?).cloned()),
            hcas,
        };
        units.nics = match config.attach == Attach::RdmaOnly || hcas.len() < 2 {
            true => vec![Some(unit(hcas))],
            false => hcas.into_iter().map(|hca| Some(unit(vec![hca]))).collect(),
        };
        Ok(units)
    }

    /// What the kubelet allocated to the pod. The daemon is asked once.
    pub(crate) fn allocated(&self, node: &Node, request: &Request) -> &Result<Allocated, Error> {
        self.allocated.get_or_init(|| {
            let held = allocation::ask(&node.daemon_socket(), &request.env.args, &node.log)?;
            Ok(held.allocated())
        })
    }

    fn device_nodes(&self) -> DeviceNodes {
        let mut units = self.nics.iter().flatten();
        match units.all(|unit| unit.slot.is_none()) {
            true => DeviceNodes::Promised,
            false => DeviceNodes::ReadAfterwards,
        }
    }
}

/// What is read for an attachment.
pub(crate) struct Reading<'a> {
    pub node: &'a mut Node,
    pub request: &'a Request,
    pub config: &'a Config,
    pub ipam: &'a Ipam,
    pub units: &'a Units,
    pub network: NodeNetwork,
}

impl Reading<'_> {
    /// Reads what the NICs of the units are. `true_names` are those of netdevs that move, where another
    /// netdev has the name at present.
    ///
    /// # Errors
    /// Code 7 when the request does not say which link or device is meant, or there is none; code 11
    /// when the netdev is inside a pod; code 5 or 100 when reading fails.
    pub(crate) fn nics(&mut self, true_names: &[Option<Name>]) -> Result<Vec<Nic>, Error> {
        let mut nics = Vec::new();
        for (number, unit) in self.units.nics.iter().enumerate() {
            let mut found = self.found(unit.as_ref())?;
            let true_name = true_names.get(number).cloned().flatten();
            if let (Found::Move(movable), Some(name)) = (&mut found, true_name)
                && let Ok(state) = &mut movable.state
            {
                state.snapshot.name = name;
            }
            nics.push(Nic {
                is_of_unit: is_of_unit(&self.node.roots, unit.as_ref(), found.host_link())?,
                found,
                unit: unit.clone(),
                random: (link::random_index(), MacAddress::new(link::random_mac())),
            });
        }
        Ok(nics)
    }

    fn found(&mut self, unit: Option<&UnitHcas>) -> Result<Found, Error> {
        let (config, nodes) = (self.config, self.units.device_nodes());
        Ok(match config.attach {
            Attach::RdmaOnly => {
                let network = &mut self.network;
                let only = rdma_only::read(self.node, config, unit, nodes, network)?;
                Found::RdmaOnly(Box::new(only))
            }
            Attach::Move => {
                let link = self.on_host(&move_target(config, unit)?)?;
                Found::Move(Box::new(Movable {
                    dependent: dependents::of(self.node, &link, &mut self.network)?,
                    state: self.state(&link, nodes),
                    link,
                }))
            }
            Attach::Child(kind) => Found::Child(kind, Box::new(self.parent(unit)?)),
        })
    }

    /// The netdev of the host below a child.
    fn parent(&mut self, unit: Option<&UnitHcas>) -> Result<HostLink, Error> {
        let target = target::parent(self.node, self.config, unit)?;
        let host = self.on_host(&target)?;
        match (&target, &host.controller) {
            // A port of a bond carries no children; the bond is how its HCA is used.
            (config::Target::Hca(_), Some((bond, kind))) if kind == "bond" => {
                read_named(self.node, bond, &mut self.network)
            }
            _ => Ok(host),
        }
    }

    /// The netdev of the host that a target means.
    ///
    /// # Errors
    /// Code 11 when a pod has it, also one that was attached since the journal was read last; code 7 when
    /// there is none, or several.
    fn on_host(&mut self, target: &config::Target) -> Result<HostLink, Error> {
        let missing = match name_of(&self.node.roots, target, self.config.port) {
            Ok(name) => match link::get(&mut self.node.netns.socket, By::Name(name.as_bytes()))? {
                Some(link) => return read_link(self.node, link, &mut self.network),
                None => absent(&name),
            },
            Err(error) => error,
        };
        let Some((record, moved)) = orphan::holder(self.node, target)? else {
            return Err(missing);
        };
        orphan::may_have(self.node, self.request, self.units, &moved)?;
        Err(orphan::in_use(&record, &moved))
    }

    fn state(&mut self, link: &HostLink, nodes: DeviceNodes) -> Result<MovableState, Error> {
        let node = &mut *self.node;
        let mut snapshot = Snapshot::take(&mut node.netns.socket, &node.roots.proc, &link.link)?;
        snapshot.identity = Identity::on(&node.roots, &link.link);
        if let Some(address) = &snapshot.identity.bus_device {
            snapshot.vf = Vf::read(&node.roots, &mut node.netns.socket, address)?;
        }
        let addresses = match self.ipam {
            Ipam::None => Addresses::OfHost,
            _ => Addresses::OfIpam,
        };
        snapshot.static_addresses = addresses == Addresses::OfHost
            && node.policy.values.fabric_addresses == FabricAddresses::Static
            && !link.rdma.is_empty();
        let socket = &mut node.netns.socket;
        let obstacles = obstacle::obstacles(socket, &link.link, &snapshot, addresses)?;
        let moves_rdma = decide::moves_rdma(self.config, link).unwrap_or_default();
        // A driver that reads a new GUID makes the RDMA device anew.
        let rdma = match moves_rdma || self.config.vf.node_guid.is_some() {
            true => {
                let names = rdma::of_netdev(&node.roots, &link.link, &link.rdma)?;
                let guid = self.config.vf.node_guid;
                rdma::read(node, &names, Some(&link.link), nodes, guid)?
            }
            false => MovableRdma::default(),
        };
        let address = snapshot.identity.bus_device.as_deref();
        let guid_holder = match (&snapshot.vf, address, self.config.vf.node_guid) {
            (Some(vf), Some(address), Some(guid)) => part::holder(node, vf, address, guid)?,
            _ => None,
        };
        Ok(MovableState {
            snapshot,
            obstacles,
            rdma,
            guid_holder,
        })
    }
}

impl<'a> Facts<'a> {
    /// With NICs, and the answer of the kubelet where one needs it.
    ///
    /// # Errors
    /// What the daemon wrote of exclusive HCAs cannot be read.
    pub(crate) fn with_nics(
        self,
        node: &Node,
        request: &Request,
        config: &Config,
        units: Units,
        nics: Vec<Nic>,
    ) -> Result<Facts<'a>, Error> {
        let mut facts = Facts {
            exclusive: node.exclusive_hcas()?,
            nics,
            ..self
        };
        let mut nics = facts.nics.iter();
        if nics.any(|nic| decide::needs_allocation(config, &nic.found, &facts)) {
            facts.allocated = Some(units.allocated(node, request).clone());
        }
        facts.devices = units.devices;
        Ok(facts)
    }
}

/// How the RDMA subsystem treats namespaces, where a network asks.
///
/// # Errors
/// The kernel does not say.
pub(crate) fn mode(node: &Node, config: &Config) -> Result<Option<Option<NetnsMode>>, Error> {
    match config.rdma {
        RdmaRequirement::Required => Ok(Some(hca::netns_mode(&node.roots)?)),
        RdmaRequirement::Auto | RdmaRequirement::Off => Ok(None),
    }
}

/// The pod's default routes and tables, as far as these interfaces can conflict with them.
///
/// # Errors
/// The kernel's refusal.
pub(crate) fn pod(
    inside: &mut Socket,
    requests: &[addressing::Request<'_>],
) -> netlink::Result<addressing::Pod> {
    let has_default = |leased: &CniResult| leased.routes.iter().any(|r| r.dst.prefix() == 0);
    let mut pod = addressing::Pod::default();
    if (requests.iter()).any(|r| r.config.accept_ra || r.leased.is_none_or(has_default)) {
        for family in route::FAMILIES {
            let found = route::list_table(inside, family, route::MAIN, |length| length == 0)?;
            pod.defaults.extend((!found.is_empty()).then_some(family));
        }
    }
    if requests.iter().any(|r| !r.config.source_routing.is_off()) {
        let rules = rule::list(inside, AddressFamily::Unspec)?;
        pod.tables = rules.iter().map(rule::table_of).collect();
    }
    Ok(pod)
}

/// The NIC that a part is of.
pub(crate) fn nic_of<'n>(nics: &'n [Nic], part: &Part) -> Option<&'n Nic> {
    let index = match part {
        Part::Move(moved) => moved.host.identity.index,
        Part::Child(child) => child.parent.index,
        Part::RdmaOnly(_) => return nics.first(),
    };
    let is_it = |nic: &&Nic| {
        nic.found
            .host_link()
            .is_some_and(|host| host.link.index == index)
    };
    nics.iter().find(is_it)
}

impl<'a> Facts<'a> {
    /// For STATUS and `rdmactl validate`.
    pub fn without_pod(policy: &'a Policy, policy_path: &'a Path) -> Facts<'a> {
        Facts {
            policy,
            policy_path,
            ifname: "net1".to_owned(),
            by_unit: true,
            for_one: None,
            ranges: None,
            mode: None,
            exclusive: Vec::new(),
            allocated: None,
            devices: None,
            nics: Vec::new(),
        }
    }

    /// The netdevs of the host that children are on.
    pub(crate) fn parents(&self) -> Vec<&HostLink> {
        let nics = self.nics.iter();
        nics.filter_map(|nic| match &nic.found {
            Found::Child(_, parent) => Some(&**parent),
            Found::Move(_) | Found::RdmaOnly(_) => None,
        })
        .collect()
    }
}

/// Whether a netdev is one of the allocated HCA, or on one. A unit of all HCAs of a pool names none.
fn is_of_unit(
    host: &Host,
    unit: Option<&UnitHcas>,
    netdev: Option<&HostLink>,
) -> Result<bool, Error> {
    let (Some(hca), Some(netdev)) = (unit.and_then(|unit| unit.hcas.first()), netdev) else {
        return Ok(true);
    };
    if netdev.hcas.contains(hca) {
        return Ok(true);
    }
    // A GUID is another name of hardware that has an address. A device without a bus can be in a pod.
    let devices = match lookup::on_hca(host, hca) {
        Err(e) if e.is_missing() && matches!(hca, HcaId::NodeGuid(_)) => Vec::new(),
        Err(e) => return Err(unreadable(&e)),
        Ok(occupants) => occupants.rdma_devices,
    };
    Ok(netdev
        .rdma
        .iter()
        .any(|port| devices.contains(&port.device)))
}

/// The netdev of the host that a network names as its master; empty where a unit or the pod decides.
///
/// # Errors
/// Code 7: it does not exist.
pub(crate) fn named_master(node: &mut Node, config: &Config) -> Result<Vec<Nic>, Error> {
    let (Some(name), Attach::Child(kind)) = (&config.master, config.attach) else {
        return Ok(Vec::new());
    };
    let parent = read_named(node, name, &mut NodeNetwork::default())?;
    Ok(vec![Nic {
        unit: None,
        is_of_unit: true,
        found: Found::Child(kind, Box::new(parent)),
        random: (link::random_index(), MacAddress::new(link::random_mac())),
    }])
}
