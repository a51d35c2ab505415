//! Whether the node's policy and the kubelet allow what a request resolves to.
//!
//! This process is root and its input may come from a namespace's user, so the default is narrow:
//! RDMA netdevs that nothing else uses and that do not carry the node itself; and what is taken from
//! the host is allocated to the pod by the kubelet. There is one way in, [`authorize`], for every
//! kind of attachment.

use std::{collections::BTreeSet, fmt::Display, path::Path};

use attachment::netdev::identity;
use cni_wire::{Code, text::list};
use hca::HcaId;
use node::policy::{self, Candidate};

use super::partition;
use crate::{
    allocation::Allocated,
    config::{Attach, ChildKind, Config, vf},
    error::Error,
    facts::{Facts, Found, HostLink, RdmaTarget},
};

fn is_passthru(config: &Config) -> bool {
    config.mode.as_deref() == Some("passthru")
}

/// Allows or denies a NIC for a network: by the policy, then by what the kubelet allocated to the pod,
/// where something is taken from the host. What may name another pod comes last.
///
/// # Errors
/// The first rule that denies it; why the kubelet could not be asked.
pub fn authorize(config: &Config, found: &Found, facts: &Facts<'_>) -> Result<(), Error> {
    by_policy(config, found, facts)?;
    // STATUS and `validate` do not know the pod.
    if let Some(allocated) = &facts.allocated
        && needs_allocation(config, found, facts)
    {
        let allocated = allocated.as_ref().map_err(Error::clone)?;
        by_allocation(config, found, facts, allocated)?;
    }
    if let Found::Move(movable) = found
        && let Some(dependent) = &movable.dependent
    {
        return denied(
            attempt(config.attach, &movable.link),
            dependent,
            "the pod would receive the frames of that link; remove it first, or move another netdev",
        );
    }
    Ok(())
}

/// Whether the pod must hold the HCA.
pub(crate) fn needs_allocation(config: &Config, found: &Found, facts: &Facts<'_>) -> bool {
    let is_exclusive = |host: &HostLink| facts.exclusive.iter().any(|hca| host.hcas.contains(hca));
    !facts.policy.allow.unallocated
        && match found {
            Found::Move(_) => true,
            Found::RdmaOnly(only) => only.moving.is_some(),
            Found::Child(_, parent) => is_passthru(config) || is_exclusive(parent),
        }
}

/// Why the policy denies what a network says, whichever NIC it is about.
pub(super) fn by_policy_alone(config: &Config, facts: &Facts<'_>) -> Vec<Error> {
    let (allow, policy) = (&facts.policy.allow, facts.policy_path.display());
    let mut found: Vec<Result<(), Error>> = Vec::new();
    if is_passthru(config) && !allow.passthru {
        // A pod that has a macvlan of this mode changes the MAC address of the netdev below.
        found.push(denied(
            "mode passthru",
            "with it the pod sets the MAC address and the flags of the host's netdev",
            format_args!("use mode bridge; if pods may do so, set allow.passthru in {policy}"),
        ));
    }
    if let Some((key, value)) = vf::denied(&config.vf, &allow.vf) {
        found.push(denied(
            format_args!("{key} {value}"),
            "the policy does not allow it",
            format_args!(
                "leave {key} out, or choose an allowed value; if networks may set it, add it to \
                 allow.vf.{key} in {policy}"
            ),
        ));
    }
    let pkey = config
        .pkey
        .map(|pkey| in_partition("the network", pkey, facts));
    found.extend(pkey);
    found.into_iter().filter_map(Result::err).collect()
}

fn by_policy(config: &Config, found: &Found, facts: &Facts<'_>) -> Result<(), Error> {
    match found {
        Found::Move(movable) => {
            let what = attempt(config.attach, &movable.link);
            netdev(&what, &movable.link, facts)?;
            can_move(&what, &movable.link, facts)
        }
        Found::Child(kind, parent) => {
            let what = attempt(config.attach, parent);
            if *kind == ChildKind::Ipoib {
                in_partition(&what, partition(config, parent), facts)?;
            }
            netdev(&what, parent, facts)
        }
        Found::RdmaOnly(only) if only.moving.is_none() => Ok(()),
        Found::RdmaOnly(only) => {
            let mut devices = only.devices.iter();
            devices.try_for_each(|target| rdma_device(target, facts))
        }
    }
}

fn by_allocation(
    config: &Config,
    found: &Found,
    facts: &Facts<'_>,
    allocated: &Allocated,
) -> Result<(), Error> {
    let path = facts.policy_path;
    if let Found::RdmaOnly(only) = found {
        return only.devices.iter().try_for_each(|target| {
            let (what, hcas) = (moving_device(target), target.hca.iter().cloned().collect());
            is_allocated(&what, &target.device.name, &hcas, allocated, path)
        });
    }
    let Some(host) = found.host_link() else {
        return Ok(());
    };
    let what = attempt(config.attach, host);
    is_allocated(&what, &host.link.name, &host.hcas, allocated, path)
}

fn attempt(attach: Attach, host: &HostLink) -> String {
    let name = &host.link.name;
    match attach {
        Attach::Move => format!("moving netdev {name}"),
        Attach::Child(kind) => format!("attach {} on netdev {name}", kind.as_str()),
        Attach::RdmaOnly => format!("moving the RDMA device of netdev {name}"),
    }
}

fn moving_device(target: &RdmaTarget) -> String {
    format!("moving RDMA device {}", target.device.name)
}

fn denied(what: impl Display, why: impl Display, remedy: impl Display) -> Result<(), Error> {
    let what = format_args!("{what} is denied: {why}");
    Err(Error::advise(Code::Policy, what, remedy))
}

/// The rules for every use of a netdev of the host.
fn netdev(what: &str, host: &HostLink, facts: &Facts<'_>) -> Result<(), Error> {
    let (allow, policy) = (&facts.policy.allow, facts.policy_path.display());
    let name = &host.link.name;
    let (why, remedy) = if *name == "lo" {
        (
            "it is the loopback device".to_owned(),
            "name a netdev of an RDMA device".to_owned(),
        )
    } else if let Some((controller, kind)) = &host.controller
        && kind != "vrf"
    {
        (
            format!("it is a port of {kind} {controller}"),
            format!("name {controller} itself, or take {name} out of it"),
        )
    } else if let Some(why) = &host.uplink
        && !allow.uplinks
    {
        (
            why.clone(),
            format!(
                "name another netdev; if pods may have {name}, set allow.uplinks and list the netdevs \
                 for pods in allow.netdevs, both in {policy}"
            ),
        )
    } else if !allow.non_rdma && host.rdma.is_empty() {
        (
            "no RDMA device has it as its port".to_owned(),
            format!(
                "name a netdev of an RDMA device (rdmactl discover lists them), or set \
                 allow.nonRdma in {policy}"
            ),
        )
    } else if !host.is_selected {
        return unselected(what, facts);
    } else {
        return Ok(());
    };
    denied(what, why, remedy)
}

fn unselected(what: &str, facts: &Facts<'_>) -> Result<(), Error> {
    let path = facts.policy_path.display();
    denied(
        what,
        "none of the policy's selectors has it",
        format_args!("add it to allow.netdevs in {path}"),
    )
}

/// A network's user must not choose a partition that the administrator keeps for others.
fn in_partition(what: &str, pkey: u16, facts: &Facts<'_>) -> Result<(), Error> {
    let Some(allowed) = &facts.policy.allow.pkeys else {
        return Ok(());
    };
    let mut numbers = allowed.iter().map(|key| policy::partition(*key));
    if numbers.any(|number| number == policy::partition(pkey)) {
        return Ok(());
    }
    let allowed = list(allowed.iter().map(|key| format!("{key:#06x}")));
    let path = facts.policy_path.display();
    denied(
        what,
        format_args!("the policy allows only the partitions {allowed}, and not {pkey:#06x}"),
        format_args!("set pkey to one of them, or add it to allow.pkeys in {path}"),
    )
}

/// The rules for a netdev that leaves the host.
fn can_move(attempt: &str, nic: &HostLink, facts: &Facts<'_>) -> Result<(), Error> {
    let kind = nic.link.kind.as_ref();
    let what = kind.map_or("the kernel names no hardware below it".to_owned(), |kind| {
        format!("it is a {kind}, without hardware of its own")
    });
    // What the pod cannot change must identify a netdev.
    if !identity::is_certain(&nic.link) {
        return denied(
            attempt,
            format_args!("{what}, and in a pod it cannot be told from other links"),
            "move a NIC, a virtual function, or a VLAN or veth whose parent or peer is on the host",
        );
    }
    if facts.policy.allow.virtual_links || nic.link.is_hardware() {
        return Ok(());
    }
    let path = facts.policy_path.display();
    denied(
        attempt,
        what,
        format_args!(
            "move a NIC or a virtual function; if pods may have links without hardware, set \
             allow.virtual in {path}"
        ),
    )
}

/// An RDMA device that leaves the host: the netdevs that lose it, and where it has none on the host,
/// the device itself.
fn rdma_device(target: &RdmaTarget, facts: &Facts<'_>) -> Result<(), Error> {
    for host in &target.netdevs {
        netdev(&attempt(Attach::RdmaOnly, host), host, facts)?;
    }
    let device = &target.device;
    let pci = device.pci.as_ref();
    let address = device
        .auxiliary
        .clone()
        .or_else(|| pci.map(|pci| pci.address.to_string()));
    let ids = pci.map(|pci| (format!("{:04x}", pci.vendor), format!("{:04x}", pci.device)));
    let candidate = Candidate {
        if_name: "",
        pci_address: address.as_deref(),
        vendor: ids.as_ref().map(|(vendor, _)| vendor.as_str()),
        device_id: ids.as_ref().map(|(_, id)| id.as_str()),
        driver: pci.and_then(|pci| pci.driver.as_deref()),
        link_type: None,
        rdma_device: Some(&device.name),
    };
    match target.netdevs.is_empty() && !facts.policy.allow.selects(&candidate) {
        true => unselected(&moving_device(target), facts),
        false => Ok(()),
    }
}

/// Whether the kubelet allocated to the pod one of the HCAs of `name`, a netdev or an RDMA device. `path`
/// is that of the policy.
pub(crate) fn is_allocated(
    attempt: &str,
    name: impl Display,
    hcas: &BTreeSet<HcaId>,
    allocated: &Allocated,
    path: &Path,
) -> Result<(), Error> {
    if hcas.iter().any(|hca| allocated.hcas.contains(hca)) {
        return Ok(());
    }
    let what = match hcas.is_empty() {
        true => format!("{name} is not an RDMA device, so it cannot be allocated"),
        false => format!("the kubelet did not allocate {} to it", list(hcas)),
    };
    let has = match allocated.hcas.is_empty() {
        true => "the pod has no exclusive HCA".to_owned(),
        false => format!("it has {}", list(&allocated.hcas)),
    };
    denied(
        attempt,
        format_args!("pod {}: {what}; {has}", allocated.pod),
        format_args!(
            "request the resource of an exclusive pool that has this HCA, and let Multus pass the \
             deviceID (k8s.v1.cni.cncf.io/resourceName); for runtimes without a kubelet, set \
             allow.unallocated in {}",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests;
