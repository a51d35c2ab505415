//! What an attachment will be, decided before anything is changed. Pure: nothing here asks the kernel, a
//! file or a clock.
//!
//! [`decide`] is the only way from a network to [`Part`]s: ADD calls it with all facts, STATUS and
//! `rdmactl validate` with those that they have. Each refusal names what to do instead.

mod authorize;
mod fits;
mod rails;
mod vf;

use attachment::{
    netdev::snapshot::Snapshot,
    part::{Child, ChildLink, Interface, IpoibMode, MacvlanMode, Move, Parent, Part, RdmaOnly},
};
use cni_wire::{Code, text::list};
use hca::HcaId;
use netlink::link::Link;
use netlink_packet_route::link::InfoKind;

pub use authorize::authorize;
pub(crate) use authorize::{is_allocated, needs_allocation};
pub use fits::carries_ipv6;

use crate::{
    config::{Attach, ChildKind, Config, Devices},
    error::Error,
    facts::{self, Facts, Found, HostLink, MovableState, Nic},
    rdma::{self, RdmaRequirement},
};

/// Decides what becomes of each NIC, by rails where there are several. Complete but for what an IPAM
/// leases. Without NICs it judges network and policy alone, and returns no parts.
///
/// # Errors
/// Code 101: policy or kubelet deny it; code 7: the network says what cannot be; code 11: it can succeed
/// later; code 50: the node cannot do it.
pub fn decide(network: &Config, facts: &Facts<'_>) -> Result<Vec<Part>, Error> {
    if let Some(first) = refusals(network, facts).into_iter().next() {
        return Err(first);
    }
    for nic in &facts.nics {
        if let Some(host) = nic.found.host_link() {
            is_of_unit(nic, host)?;
            moves_rdma(network, host)?;
        }
        authorize(network, &nic.found, facts)?;
        fits::fits(network, nic, facts)?;
    }
    let rails = rails::number(network, facts)?;
    let mut parts = Vec::new();
    for (nic, rail) in facts.nics.iter().zip(rails) {
        parts.push(part(network, facts, nic, rail)?);
    }
    if network.devices == Devices::All {
        parts.sort_by_key(Part::rail);
        rails::name(&mut parts, &network.names, &facts.ifname)?;
    }
    Ok(parts)
}

/// All that is wrong for every NIC: of these [`decide`] names the first.
pub fn refusals(network: &Config, facts: &Facts<'_>) -> Vec<Error> {
    let mut found = Vec::new();
    if network.devices == Devices::All {
        if !facts.by_unit {
            found.push(Error::advise(
                Code::InvalidConfig,
                "devices: all is about the units of a resource, and no deviceID says of which",
                "name the resource in the network's annotation k8s.v1.cni.cncf.io/resourceName, so \
                 that Multus passes one of the pod's units",
            ));
        }
        found.extend(facts.for_one.clone());
    } else {
        let lacks_target = facts::lacks_target(network, facts.by_unit, &facts.policy.allow);
        found.extend(lacks_target.err());
    }
    if let Some(mtu) = network.mtu {
        found.extend(carries_ipv6(mtu, network, false).err());
    }
    if let (RdmaRequirement::Required, Some(mode)) = (network.rdma, facts.mode) {
        found.extend(rdma::isolation(mode).err());
    }
    if let Attach::Child(kind) = network.attach {
        found.extend(child_link(network, kind, &Link::default()).err());
    }
    found.extend(authorize::by_policy_alone(network, facts));
    if facts.nics.is_empty() {
        found.extend(rails::number(network, facts).err());
    }
    found
}

/// Whether the RDMA devices of a netdev leave the host for the pod with it.
///
/// # Errors
/// Code 50: the mode of the RDMA subsystem does not allow what the network says; code 7: the netdev has
/// no RDMA device.
pub(crate) fn moves_rdma(network: &Config, host: &HostLink) -> Result<bool, Error> {
    let (has_rdma, name) = (!host.rdma.is_empty(), host.link.name.to_string());
    rdma::moves(network.rdma, network.attach, host.mode, has_rdma, &name)
}

/// Refuses a netdev that is not one of the allocated HCA: the pod would have the device nodes of one
/// HCA and its address on another.
fn is_of_unit(nic: &Nic, host: &HostLink) -> Result<(), Error> {
    let Some((unit, hca)) = nic.unit.as_ref().and_then(|u| Some((u, u.hcas.first()?))) else {
        return Ok(());
    };
    if nic.is_of_unit {
        return Ok(());
    }
    let (name, text) = (&host.link.name, &unit.text);
    let of = match host.hcas.is_empty() {
        true => "does not belong to an HCA".to_owned(),
        false => format!("belongs to {}", list(&host.hcas)),
    };
    Err(Error::advise(
        Code::InvalidConfig,
        format_args!("netdev {name} {of}, but deviceID {text} is a unit of {hca}"),
        format_args!(
            "leave out the key that names {name}: the unit decides; or name a netdev of {hca}, or a \
             bond, bridge or VLAN on it"
        ),
    ))
}

fn part(network: &Config, facts: &Facts<'_>, nic: &Nic, rail: Option<u32>) -> Result<Part, Error> {
    let slot = nic.unit.as_ref().and_then(|unit| unit.slot.clone());
    let slots = slot.into_iter().collect();
    let interface = Interface {
        name: facts.ifname.clone(),
        rail,
        mtu: network.mtu,
        mac: network.mac.clone(),
        ..Interface::default()
    };
    Ok(match &nic.found {
        Found::Move(movable) => {
            let state = movable.state.as_ref().map_err(Error::clone)?;
            let mut rdma = state.rdma.decide()?;
            if !moves_rdma(network, &movable.link)? {
                rdma.clear();
            }
            Part::Move(Box::new(Move {
                host: moved(network, facts, state)?,
                hcas: movable.link.hcas.iter().map(HcaId::to_string).collect(),
                rdma,
                interface,
                slots,
                returned: None,
            }))
        }
        Found::Child(kind, parent) => {
            let (index, mac) = &nic.random;
            let link = child_link(network, *kind, &parent.link)?;
            let own_mac =
                matches!(link, ChildLink::Macvlan { mode, .. } if mode != MacvlanMode::Passthru);
            Part::Child(Box::new(Child {
                interface: Interface {
                    mtu: interface.mtu.or_else(|| default_mtu(link, &parent.link)),
                    mac: interface.mac.or_else(|| own_mac.then(|| mac.clone())),
                    ..interface
                },
                link,
                parent: Parent {
                    name: parent.link.name.to_string(),
                    index: parent.link.index,
                },
                index: *index,
                slots,
                may_lack_carrier: facts.policy.allow.inactive_partitions,
                warning: fits::lacks_carrier(network, *kind, parent, &facts.ifname),
            }))
        }
        Found::RdmaOnly(only) => Part::RdmaOnly(RdmaOnly {
            interface: interface.name,
            rdma: match &only.moving {
                Some(moving) => moving.as_ref().map_err(Error::clone)?.decide()?,
                None => Vec::new(),
            },
            slots,
        }),
    })
}

/// The netdev's state on the host, with what is set of a VF.
fn moved(network: &Config, facts: &Facts<'_>, state: &MovableState) -> Result<Snapshot, Error> {
    let mut snapshot = state.snapshot.clone();
    if let Some(found) = Error::all(state.obstacles.clone()) {
        let name = &snapshot.name;
        return Err(found.context(format_args!("moving netdev {name} is refused")));
    }
    let wanted = vf::wanted(network, snapshot.vf.as_ref(), &facts.policy.allow.vf);
    let holder = state.guid_holder.clone();
    snapshot.vf = vf::decide(snapshot.vf, &wanted, holder, &snapshot.name)?;
    Ok(snapshot)
}

/// A child has the MTU of its netdev. IPoIB in datagram mode cannot have that of one in connected mode.
fn default_mtu(link: ChildLink, parent: &Link) -> Option<u32> {
    match link {
        ChildLink::Ipoib {
            mode: IpoibMode::Datagram,
            ..
        } if ipoib_of(parent).1 == IpoibMode::Connected => None,
        _ => Some(parent.mtu),
    }
}

/// The child to be made; `mode` is by its kind.
fn child_link(network: &Config, kind: ChildKind, parent: &Link) -> Result<ChildLink, Error> {
    Ok(match kind {
        ChildKind::Macvlan => ChildLink::Macvlan {
            mode: network.mode()?.unwrap_or_default(),
            broadcast_queue: network.broadcast_queue,
        },
        ChildKind::Ipvlan => ChildLink::Ipvlan {
            mode: network.mode()?.unwrap_or_default(),
        },
        ChildKind::Ipoib => {
            let (pkey, of_parent) = ipoib_of(parent);
            ChildLink::Ipoib {
                // The kernel wants the membership bit set and works it out from the port's table.
                pkey: network.pkey.unwrap_or(pkey) | 0x8000,
                mode: network.mode()?.unwrap_or(of_parent),
                user_multicast: network.user_multicast.unwrap_or(true),
            }
        }
    })
}

/// The partition key of an IPoIB child.
fn partition(network: &Config, parent: &HostLink) -> u16 {
    network.pkey.unwrap_or(ipoib_of(&parent.link).0)
}

/// Partition key and mode of an IPoIB link (`IFLA_IPOIB_PKEY`, `IFLA_IPOIB_MODE`).
fn ipoib_of(link: &Link) -> (u16, IpoibMode) {
    let number = |attribute: u16| {
        let value = link.info.get(&attribute);
        let value = value.filter(|_| link.kind == Some(InfoKind::Ipoib))?;
        value.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
    };
    let mode = match number(2) {
        Some(1) => IpoibMode::Connected,
        _ => IpoibMode::Datagram,
    };
    (number(1).unwrap_or(0xffff), mode)
}
