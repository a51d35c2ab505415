//! Whether the node's policy and the kubelet allow what a request resolves to.
//!
//! This process is root and its input may come from a namespace's user, so the default is narrow:
//! RDMA netdevs that nothing else uses and that do not carry the node itself; and what is taken from
//! the host is allocated to the pod by the kubelet. There is one way in, [`authorize`], for every
//! kind of attachment. Pure.

use std::{collections::BTreeSet, fmt, path::Path};

use attachment::netdev::identity;
use cni_wire::{Code, text::list};
use hca::HcaId;
use node::policy::{self, Allow, Candidate};

use crate::{
    allocation::Allocated,
    config::{Attach, Config, vf},
    error::Error,
    plan::partition,
    resolve::{HostLink, RdmaTarget, Resolved},
};

/// What the node's administrator allows, and where that stands.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub allow: &'a Allow,
    pub path: &'a Path,
    /// HCAs of exclusive pools: none of them is shared by a child of another pod.
    pub exclusive: &'a [HcaId],
}

/// What the request asks for beside its kind.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub config: &'a Config,
    /// RDMA devices are to leave the host's namespace.
    pub moves_rdma: bool,
}

impl Asked<'_> {
    /// A macvlan of mode `passthru`.
    fn passthru(self) -> bool {
        self.config.mode.as_deref() == Some("passthru")
    }
}

/// Allows or denies what a request resolves to.
///
/// `kubelet` is asked what the pod was allocated, after the policy has allowed the request and
/// where the request takes something from the host.
///
/// # Errors
/// The first rule that denies it; whatever `kubelet` says when it does not answer.
pub fn authorize(
    resolved: &Resolved,
    asked: Asked<'_>,
    rules: Rules<'_>,
    kubelet: impl FnOnce() -> Result<Allocated, Error>,
) -> Result<(), Error> {
    by_policy(resolved, asked, rules)?;
    if needs_allocation(resolved, asked, rules) {
        by_allocation(resolved, asked, rules, &kubelet()?)?;
    }
    Ok(())
}

fn needs_allocation(resolved: &Resolved, asked: Asked<'_>, rules: Rules<'_>) -> bool {
    let is_exclusive = |host: &HostLink| rules.exclusive.iter().any(|hca| host.hcas.contains(hca));
    !rules.allow.unallocated
        && match resolved {
            Resolved::Move(_) => true,
            Resolved::RdmaOnly(_) => asked.moves_rdma,
            Resolved::Child { parent, .. } => asked.passthru() || is_exclusive(parent),
        }
}

/// Allows or denies by the policy alone, whichever pod asks.
///
/// # Errors
/// The first rule that denies it.
pub fn by_policy(resolved: &Resolved, asked: Asked<'_>, rules: Rules<'_>) -> Result<(), Error> {
    match resolved {
        Resolved::Move(nic) => {
            let what = attempt(Attach::Move, nic);
            netdev(&what, nic, rules)?;
            movable(&what, nic, rules)?;
            match vf::denied(&asked.config.vf, &rules.allow.vf) {
                Some((key, value)) => denied(
                    what,
                    format_args!("the policy does not allow {key} {value}"),
                    format!(
                        "leave {key} out, or choose an allowed value; if networks may set it, add it to \
                         allow.vf.{key} in {}",
                        rules.path.display()
                    ),
                ),
                None => Ok(()),
            }
        }
        Resolved::Child { kind, parent } => {
            let what = attempt(Attach::Child(*kind), parent);
            if let Some(pkey) = partition(resolved, asked.config) {
                in_partition(&what, pkey, rules)?;
            }
            netdev(&what, parent, rules)?;
            match asked.passthru() && !rules.allow.passthru {
                // A pod that has a macvlan of this mode changes the MAC address of the netdev below.
                true => denied(
                    what,
                    "with mode passthru the pod sets the MAC address and the flags of the host's netdev",
                    format!(
                        "use mode bridge; if pods may do so, set allow.passthru in {}",
                        rules.path.display()
                    ),
                ),
                false => Ok(()),
            }
        }
        // In shared mode nothing leaves the host: the devices are only reported.
        Resolved::RdmaOnly(_) if !asked.moves_rdma => Ok(()),
        Resolved::RdmaOnly(request) => {
            let mut devices = request.devices.iter();
            devices.try_for_each(|target| rdma_device(target, rules))
        }
    }
}

fn by_allocation(
    resolved: &Resolved,
    asked: Asked<'_>,
    rules: Rules<'_>,
    allocated: &Allocated,
) -> Result<(), Error> {
    if let Resolved::RdmaOnly(request) = resolved {
        return request.devices.iter().try_for_each(|target| {
            let hcas = target.hca.iter().cloned().collect();
            let what = moving_device(target);
            belongs(what, &target.device.name, &hcas, rules, allocated)
        });
    }
    match resolved.host_link() {
        Some(host) => {
            let what = attempt(asked.config.attach, host);
            belongs(
                what,
                &host.link.name.to_string(),
                &host.hcas,
                rules,
                allocated,
            )
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
fn netdev(what: &str, host: &HostLink, rules: Rules<'_>) -> Result<(), Error> {
    let (allow, policy, name) = (rules.allow, rules.path.display(), &host.link.name);
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
    match selected(host, allow) {
        true => Ok(()),
        false => unselected(what, rules),
    }
}

fn unselected(what: &str, rules: Rules<'_>) -> Result<(), Error> {
    denied(
        what,
        "none of the policy's selectors has it",
        format!("add it to allow.netdevs in {}", rules.path.display()),
    )
}

/// A network's user must not choose a partition that the administrator keeps for others.
fn in_partition(what: &str, pkey: u16, rules: Rules<'_>) -> Result<(), Error> {
    let Some(allowed) = &rules.allow.pkeys else {
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
            rules.path.display()
        ),
    )
}

/// The rules for a netdev that leaves the host.
fn movable(attempt: &str, nic: &HostLink, rules: Rules<'_>) -> Result<(), Error> {
    let policy = rules.path.display();
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
    if !rules.allow.virtual_links && !nic.link.is_hardware() {
        return denied(
            attempt,
            what,
            format!(
                "move a NIC or a virtual function; if pods may have links without hardware, set \
                 allow.virtual in {policy}"
            ),
        );
    }
    match &nic.dependent {
        Some(dependent) => denied(attempt, &dependent.what, dependent.remedy),
        None => Ok(()),
    }
}

/// An RDMA device that leaves the host: the netdevs that lose it, and where it has none on the host,
/// the device itself.
fn rdma_device(target: &RdmaTarget, rules: Rules<'_>) -> Result<(), Error> {
    for host in &target.netdevs {
        netdev(&attempt(Attach::RdmaOnly, host), host, rules)?;
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
    match target.netdevs.is_empty() && !rules.allow.selects(&candidate) {
        true => unselected(&moving_device(target), rules),
        false => Ok(()),
    }
}

fn belongs(
    attempt: String,
    name: &str,
    hcas: &BTreeSet<HcaId>,
    rules: Rules<'_>,
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
            rules.path.display()
        ),
    )
}

fn selected(host: &HostLink, allow: &Allow) -> bool {
    let netdev = host.netdev.as_ref();
    let name = host.link.name.to_string();
    let address = netdev.and_then(|n| n.auxiliary.clone().or(n.pci.map(|pci| pci.to_string())));
    let link_type = match host.link.hardware {
        1 => Some("ether"),
        32 => Some("infiniband"),
        _ => None,
    };
    let candidate = |rdma_device| Candidate {
        if_name: &name,
        pci_address: address.as_deref(),
        vendor: host.pci_ids.as_ref().map(|(vendor, _)| vendor.as_str()),
        device_id: host.pci_ids.as_ref().map(|(_, device)| device.as_str()),
        driver: netdev.and_then(|n| n.driver.as_deref()),
        link_type,
        rdma_device,
    };
    if host.rdma.is_empty() {
        return allow.selects(&candidate(None));
    }
    host.rdma
        .iter()
        .any(|port| allow.selects(&candidate(Some(&port.device))))
}

#[cfg(test)]
mod tests;
