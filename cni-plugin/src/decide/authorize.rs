//! Whether the node's policy and the kubelet allow what a request resolves to.
//!
//! This process is root and its input may come from a namespace's user, so the default is narrow:
//! RDMA netdevs that nothing else uses and that do not carry the node itself; and what is taken from
//! the host is allocated to the pod by the kubelet. There is one way in, [`authorize`], for every
//! kind of attachment.

use std::{collections::BTreeSet, fmt};

use attachment::netdev::identity;
use cni_wire::{Code, text::list};
use hca::HcaId;
use node::policy::{self, Candidate};

use super::partition;
use crate::{
    allocation::Allocated,
    config::{Attach, ChildKind, Config, vf},
    error::Error,
    facts::{Facts, Found, HostLink, Movable, RdmaTarget},
};

/// A NIC as the network asks for it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub config: &'a Config,
    pub found: &'a Found,
    /// RDMA devices are to leave the host's namespace.
    pub moves_rdma: bool,
}

impl Asked<'_> {
    /// A macvlan of mode `passthru`.
    fn passthru(self) -> bool {
        is_passthru(self.config)
    }
}

fn is_passthru(config: &Config) -> bool {
    config.mode.as_deref() == Some("passthru")
}

/// Allows or denies what a network asks for: by the policy, then by what the kubelet allocated to the
/// pod, where something is taken from the host.
///
/// # Errors
/// The first rule that denies it; why the kubelet could not be asked.
pub fn authorize(asked: Asked<'_>, facts: &Facts<'_>) -> Result<(), Error> {
    by_policy(asked, facts)?;
    if !needs_allocation(asked, facts) {
        return Ok(());
    }
    match &facts.allocated {
        Some(Ok(allocated)) => by_allocation(asked, facts, allocated),
        Some(Err(error)) => Err(error.clone()),
        // STATUS and `validate` do not know the pod.
        None => Ok(()),
    }
}

/// Whether the pod must hold the HCA.
pub(crate) fn needs_allocation(asked: Asked<'_>, facts: &Facts<'_>) -> bool {
    let is_exclusive = |host: &HostLink| facts.exclusive.iter().any(|hca| host.hcas.contains(hca));
    !facts.policy.allow.unallocated
        && match asked.found {
            Found::Move(_) => true,
            Found::RdmaOnly(_) => asked.moves_rdma,
            Found::Child(_, parent) => asked.passthru() || is_exclusive(parent),
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
            format!("use mode bridge; if pods may do so, set allow.passthru in {policy}"),
        ));
    }
    if let Some((key, value)) = vf::denied(&config.vf, &allow.vf) {
        found.push(denied(
            format_args!("{key} {value}"),
            "the policy does not allow it",
            format!(
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

fn by_policy(asked: Asked<'_>, facts: &Facts<'_>) -> Result<(), Error> {
    match asked.found {
        Found::Move(movable) => {
            let what = attempt(asked.config.attach, &movable.link);
            netdev(&what, &movable.link, facts)?;
            can_move(&what, movable, facts)
        }
        Found::Child(kind, parent) => {
            let what = attempt(asked.config.attach, parent);
            if *kind == ChildKind::Ipoib {
                in_partition(&what, partition(asked.config, parent), facts)?;
            }
            netdev(&what, parent, facts)
        }
        // In shared mode nothing leaves the host: the devices are only reported.
        Found::RdmaOnly(_) if !asked.moves_rdma => Ok(()),
        Found::RdmaOnly(only) => {
            let mut devices = only.devices.iter();
            devices.try_for_each(|target| rdma_device(target, facts))
        }
    }
}

fn by_allocation(asked: Asked<'_>, facts: &Facts<'_>, allocated: &Allocated) -> Result<(), Error> {
    if let Found::RdmaOnly(only) = asked.found {
        return only.devices.iter().try_for_each(|target| {
            let hcas = target.hca.iter().cloned().collect();
            let what = moving_device(target);
            belongs(what, &target.device.name, &hcas, facts, allocated)
        });
    }
    match asked.found.host_link() {
        Some(host) => {
            let what = attempt(asked.config.attach, host);
            let name = host.link.name.to_string();
            belongs(what, &name, &host.hcas, facts, allocated)
        }
        None => Ok(()),
    }
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

fn denied(
    what: impl fmt::Display,
    why: impl fmt::Display,
    remedy: impl AsRef<str>,
) -> Result<(), Error> {
    let what = format!("{what} is denied: {why}");
    Err(Error::new(Code::Policy, what).with_details(remedy))
}

/// The rules for every use of a netdev of the host.
fn netdev(what: &str, host: &HostLink, facts: &Facts<'_>) -> Result<(), Error> {
    let (allow, policy, name) = (
        &facts.policy.allow,
        facts.policy_path.display(),
        &host.link.name,
    );
    if *name == "lo" {
        return denied(
            what,
            "it is the loopback device",
            "name a netdev of an RDMA device",
        );
    }
    if let Some((controller, kind)) = &host.controller
        && kind != "vrf"
    {
        return denied(
            what,
            format_args!("it is a port of {kind} {controller}"),
            format!("name {controller} itself, or take {name} out of it"),
        );
    }
    if !allow.uplinks
        && let Some(why) = &host.uplink
    {
        return denied(
            what,
            why,
            format!(
                "name another netdev; if pods may have {name}, set allow.uplinks and list the netdevs \
                 for pods in allow.netdevs, both in {policy}"
            ),
        );
    }
    if !allow.non_rdma && host.rdma.is_empty() {
        return denied(
            what,
            "no RDMA device has it as its port",
            format!(
                "name a netdev of an RDMA device (rdmactl discover lists them), or set \
                 allow.nonRdma in {policy}"
            ),
        );
    }
    match host.is_selected {
        true => Ok(()),
        false => unselected(what, facts),
    }
}

fn unselected(what: &str, facts: &Facts<'_>) -> Result<(), Error> {
    denied(
        what,
        "none of the policy's selectors has it",
        format!("add it to allow.netdevs in {}", facts.policy_path.display()),
    )
}

/// A network's user must not choose a partition that the administrator keeps for others.
fn in_partition(what: &str, pkey: u16, facts: &Facts<'_>) -> Result<(), Error> {
    let Some(allowed) = &facts.policy.allow.pkeys else {
        return Ok(());
    };
    if allowed
        .iter()
        .any(|key| policy::partition(*key) == policy::partition(pkey))
    {
        return Ok(());
    }
    let allowed = allowed.iter().map(|key| format!("{key:#06x}"));
    denied(
        what,
        format_args!(
            "partition {pkey:#06x} is not among those that the policy allows ({})",
            list(allowed)
        ),
        format!(
            "set pkey to one of them, or add it to allow.pkeys in {}",
            facts.policy_path.display()
        ),
    )
}

/// The rules for a netdev that leaves the host.
fn can_move(attempt: &str, movable: &Movable, facts: &Facts<'_>) -> Result<(), Error> {
    let nic = &movable.link;
    let policy = facts.policy_path.display();
    let kind = nic.link.kind.as_ref().map(ToString::to_string);
    let what = match kind {
        Some(kind) => format!("it is a {kind}, without hardware of its own"),
        None => "the kernel names no hardware below it".to_owned(),
    };
    // What the pod cannot change must identify a netdev.
    if !identity::is_certain(&nic.link) {
        return denied(
            attempt,
            format!("{what}, and in a pod it cannot be told from other links"),
            "move a NIC, a virtual function, or a VLAN or veth whose parent or peer is on the host",
        );
    }
    if !facts.policy.allow.virtual_links && !nic.link.is_hardware() {
        return denied(
            attempt,
            what,
            format!(
                "move a NIC or a virtual function; if pods may have links without hardware, set \
                 allow.virtual in {policy}"
            ),
        );
    }
    match &movable.dependent {
        Some(dependent) => denied(
            attempt,
            dependent,
            "the pod would receive the frames of what stands on it; remove that first, or move another \
             netdev",
        ),
        None => Ok(()),
    }
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

fn belongs(
    attempt: String,
    name: &str,
    hcas: &BTreeSet<HcaId>,
    facts: &Facts<'_>,
    allocated: &Allocated,
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
        format!(
            "request the resource of an exclusive pool that has this HCA, and let Multus pass the \
             deviceID (k8s.v1.cni.cncf.io/resourceName); for runtimes without a kubelet, set \
             allow.unallocated in {}",
            facts.policy_path.display()
        ),
    )
}

#[cfg(test)]
mod tests;
