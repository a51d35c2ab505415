//! ADD with `devices: all`: every NIC that the pod has of the network's resource, in one attachment.
//!
//! The runtime names one unit. The daemon says which others of the same resource the kubelet
//! allocated to the pod, so a unit that stands in a network proves nothing here either. Each NIC is
//! then resolved, authorized and checked by itself, as an attachment of its own would be.

use std::collections::BTreeSet;

use attachment::{addresses::Ipam, node::Node};
use cni_wire::{AttachmentId, CniResult, Code, Request};
use hca::HcaId;

use super::{Nic, interface::Wanted};
use crate::{
    allocation::{self, Allocated, Devices},
    bind::Bound,
    config::{Allocation, Config},
    error::Error,
    parts::{self, Numbering},
    recover::Recovered,
};

/// What the pod has.
pub(super) struct All {
    pub(super) allocated: Allocated,
    pub(super) devices: Devices,
}

/// Refuses what serves one interface only. Asks nobody. Answers the unit that the runtime names.
///
/// # Errors
/// Code 7.
pub(super) fn check<'a>(
    config: &'a Config,
    ipam: &Ipam,
    chain: Option<&CniResult>,
) -> Result<&'a Allocation, Error> {
    let named = config.allocation.as_ref().ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            "devices: all is about the units of a resource, and no deviceID says of which",
        )
        .with_details(
            "name the resource in the network's annotation k8s.v1.cni.cncf.io/resourceName, so \
             that Multus passes one of the pod's units",
        )
    })?;
    ipam.serves_several()?;
    match chain {
        None => Ok(named),
        Some(_) => Err(Error::new(
            Code::InvalidConfig,
            "the addresses of the list's interface cannot go over to several ipvlans",
        )
        .with_details("set ipam, or leave devices out")),
    }
}

/// Asks which units the pod has beside the one that the runtime names. Of slots the daemon has said
/// already what they became.
///
/// # Errors
/// As [`allocation::ask`] and [`allocation::Held::devices_beside`].
pub(super) fn ask(
    node: &Node,
    request: &Request,
    named: &Allocation,
    bound: Option<&Bound>,
) -> Result<All, Error> {
    let held = allocation::ask(&node.daemon_socket(), &request.env.args, &node.log)?;
    Ok(match bound {
        Some(bound) => All {
            devices: held.devices_bound(&named.unit, &named.text, bound.hcas())?,
            allocated: bound.allocated(),
        },
        None => All {
            devices: held.devices_beside(&named.unit, &named.text)?,
            allocated: held.allocated(),
        },
    })
}

/// A configuration for each NIC, in the order of the HCAs: every process that locks several NICs
/// does so in this order.
pub(super) fn configs(
    config: &Config,
    named: &Allocation,
    devices: &Devices,
    bound: Option<&Bound>,
) -> Vec<Config> {
    let of = |hca: &HcaId| Config {
        allocation: Some(Allocation {
            unit: named.unit.clone(),
            hca: Some(hca.clone()),
            text: hca.to_string(),
            slot: bound.and_then(|bound| bound.slot(hca).cloned()),
        }),
        ..config.clone()
    };
    devices.hcas.iter().map(of).collect()
}

/// The interfaces by rail, and what keeps other processes off their NICs.
///
/// # Errors
/// The rails of the NICs, or the names of the interfaces, are not clear.
pub(super) fn interfaces(
    node: &Node,
    config: &Config,
    id: &AttachmentId,
    devices: &Devices,
    ranges: Option<&BTreeSet<u32>>,
    nics: Vec<Nic>,
) -> Result<(Vec<Wanted>, Vec<Recovered>), Error> {
    let described: Vec<parts::Nic> = devices
        .hcas
        .iter()
        .zip(&nics)
        .filter_map(|(hca, nic)| {
            let host = nic.resolved.host_link()?;
            Some(parts::Nic {
                hca: hca.clone(),
                index: host.link.index,
                netdev: host.link.name.to_string(),
                addresses: host.addresses.clone(),
            })
        })
        .collect();
    let numbering = Numbering {
        rails: &node.policy.values.rails,
        path: &node.policy.path,
        devices,
        ranges,
    };
    let rails = parts::rails(&described, numbering)?;
    let mut by_rail: Vec<(u32, parts::Nic, Nic)> = rails
        .into_iter()
        .zip(described)
        .zip(nics)
        .map(|((rail, described), nic)| (rail, described, nic))
        .collect();
    by_rail.sort_by_key(|(rail, ..)| *rail);
    let hosts = by_rail
        .iter()
        .map(|(rail, nic, _)| (*rail, nic.netdev.as_str()));
    let names = parts::names(&config.names, id.ifname.as_str(), hosts)?;
    let interfaces = by_rail.into_iter().zip(names);
    Ok(interfaces
        .map(|((rail, _, nic), name)| nic.interface(name, Some(rail)))
        .unzip())
}
