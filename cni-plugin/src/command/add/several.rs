//! ADD with `devices: all`: every NIC that the pod has of the network's resource, in one attachment.
//!
//! The runtime names one unit. The daemon says which others of the same resource the kubelet
//! allocated to the pod, so a unit that stands in a network proves nothing here either. Each NIC is
//! then resolved, authorized and checked by itself, as an attachment of its own would be.

use attachment::{addresses::Ipam, node::Node};
use cni_wire::{AttachmentId, CniResult, Code, Request};
use hca::HcaId;

use super::Nic;
use crate::{
    allocation::{self, Allocated, Devices},
    bind::Bound,
    config::{Allocation, Config},
    error::Error,
    parts::{self, Numbering},
};

/// The units of the resource that the pod has.
pub(super) struct Units {
    pub(super) allocated: Allocated,
    pub(super) devices: Devices,
}

/// Refuses what serves one interface only. Asks nobody.
///
/// # Errors
/// Code 7.
pub(super) fn check(config: &Config, ipam: &Ipam, chain: Option<&CniResult>) -> Result<(), Error> {
    if config.allocation.is_none() {
        return Err(Error::new(
            Code::InvalidConfig,
            "devices: all is about the units of a resource, and no deviceID says of which",
        )
        .with_details(
            "name the resource in the network's annotation k8s.v1.cni.cncf.io/resourceName, so \
             that Multus passes one of the pod's units",
        ));
    }
    ipam.serves_several()?;
    match chain {
        None => Ok(()),
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
) -> Result<Units, Error> {
    let held = allocation::ask(&node.daemon_socket(), &request.env.args, &node.log)?;
    Ok(match bound {
        Some(bound) => Units {
            devices: held.devices_bound(&named.unit, &named.text, bound.hcas())?,
            allocated: bound.allocated(),
        },
        None => Units {
            devices: held.devices_beside(&named.unit, &named.text)?,
            allocated: held.allocated(),
        },
    })
}

/// A configuration for each NIC, in the order of the HCAs: every process that locks several NICs
/// does so in this order.
pub(super) fn configs(config: &Config, devices: &Devices, bound: Option<&Bound>) -> Vec<Config> {
    let of = |hca: &HcaId| Config {
        allocation: config.allocation.clone().map(|named| Allocation {
            hca: Some(hca.clone()),
            text: hca.to_string(),
            slot: bound.and_then(|bound| bound.slot(hca).cloned()),
            ..named
        }),
        ..config.clone()
    };
    devices.hcas.iter().map(of).collect()
}

/// Puts the NICs, which are in the order of the HCAs, in the order of their rails, and names their
/// interfaces.
///
/// # Errors
/// The rails of the NICs, or the names of the interfaces, are not clear.
pub(super) fn number(
    config: &Config,
    id: &AttachmentId,
    numbering: Numbering<'_>,
    nics: &mut [Nic],
) -> Result<(), Error> {
    let described = numbering.devices.hcas.iter().zip(nics.iter());
    let described: Vec<parts::Nic> = described
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
    let rails = parts::rails(&described, numbering)?;
    let mut hosts: Vec<(u32, &str)> = rails
        .iter()
        .copied()
        .zip(described.iter().map(|nic| nic.netdev.as_str()))
        .collect();
    hosts.sort_unstable();
    let names = parts::names(&config.names, id.ifname.as_str(), hosts)?;
    for (nic, rail) in nics.iter_mut().zip(rails) {
        nic.rail = Some(rail);
    }
    nics.sort_by_key(|nic| nic.rail);
    for (nic, name) in nics.iter_mut().zip(names) {
        nic.ifname = name;
    }
    Ok(())
}
