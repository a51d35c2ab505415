//! Whether the node's policy and the kubelet allow what a request resolves to.
//!
//! This process is root and its input may come from a namespace's user, so the default is narrow:
//! RDMA netdevs that nothing else uses and that do not carry the node itself; and what is taken from
//! the host is allocated to the pod by the kubelet. There is one way in, [`authorize`], for every
//! kind of attachment. Pure.

use std::{collections::BTreeSet, path::Path};

use attachment::netdev::{identity, vf::Settings};
use hca::HcaId;
use node::policy::{Allow, Candidate, partition};

use crate::{
    allocation::Allocated,
    config::{Attach, vf},
    resolve::{HostLink, RdmaTarget, Resolved},
};

/// Why a request is denied, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is denied: {why}")]
pub struct Denied {
    /// The attempt and its object.
    pub what: String,
    pub why: String,
    pub remedy: String,
}

/// What the node's administrator allows, and where that stands.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub allow: &'a Allow,
    pub path: &'a Path,
    /// HCAs of exclusive pools: none of them is shared by a child of another pod.
    pub exclusive: &'a [HcaId],
}

/// What the request asks for beside its kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked<'a> {
    /// A macvlan of mode `passthru`.
    pub passthru: bool,
    /// RDMA devices are to leave the host's namespace.
    pub moves_rdma: bool,
    /// The partition of an IPoIB child.
    pub pkey: Option<u16>,
    /// What is set of a VF.
    pub vf: Option<&'a Settings>,
}

/// Allows or denies what a request resolves to.
///
/// `kubelet` is asked what the pod was allocated, after the policy has allowed the request and
/// where the request takes something from the host.
///
/// # Errors
/// The first rule that denies it; whatever `kubelet` says when it does not answer.
pub fn authorize<E: From<Denied>>(
    resolved: &Resolved,
    asked: Asked<'_>,
    rules: Rules<'_>,
    kubelet: impl FnOnce() -> Result<Allocated, E>,
) -> Result<(), E> {
    by_policy(resolved, asked, rules)?;
    if needs_allocation(resolved, asked, rules) {
        by_allocation(resolved, rules, &kubelet()?)?;
    }
    Ok(())
}

fn needs_allocation(resolved: &Resolved, asked: Asked<'_>, rules: Rules<'_>) -> bool {
    let is_exclusive = |host: &HostLink| rules.exclusive.iter().any(|hca| host.hcas.contains(hca));
    !rules.allow.unallocated
        && match resolved {
            Resolved::Move(_) => true,
            Resolved::RdmaOnly(_) => asked.moves_rdma,
            Resolved::Child { parent, .. } => asked.passthru || is_exclusive(parent),
        }
}

/// Allows or denies by the policy alone, whichever pod asks.
///
/// # Errors
/// The first rule that denies it.
pub fn by_policy(resolved: &Resolved, asked: Asked<'_>, rules: Rules<'_>) -> Result<(), Denied> {
    if let (Some(pkey), Resolved::Child { parent, .. }) = (asked.pkey, resolved) {
        in_partition(&parent.link.name.to_string(), pkey, rules)?;
    }
    match resolved {
        Resolved::Move(nic) => {
            let subject = Subject::of(Attach::Move, nic);
            netdev(&subject, nic, rules)?;
            movable(&subject, nic, rules)?;
            let asked = asked.vf;
            match asked.and_then(|asked| vf::denied(asked, &rules.allow.vf)) {
                Some((key, value)) => subject.denied(
                    format!("the policy does not allow {key} {value}"),
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
            let subject = Subject::of(Attach::Child(*kind), parent);
            netdev(&subject, parent, rules)?;
            match asked.passthru {
                true => passthru(&subject, rules),
                false => Ok(()),
            }
        }
        // In shared mode nothing leaves the host: the devices are only reported.
        Resolved::RdmaOnly(_) if !asked.moves_rdma => Ok(()),
        Resolved::RdmaOnly(request) => request
            .devices
            .iter()
            .try_for_each(|target| rdma_device(&Subject::rdma(&target.device.name), target, rules)),
    }
}

fn by_allocation(
    resolved: &Resolved,
    rules: Rules<'_>,
    allocated: &Allocated,
) -> Result<(), Denied> {
    if let Resolved::RdmaOnly(request) = resolved {
        return request.devices.iter().try_for_each(|target| {
            let hcas = target.hca.iter().cloned().collect();
            belongs(&Subject::rdma(&target.device.name), &hcas, rules, allocated)
        });
    }
    match resolved.host_link() {
        Some(host) => belongs(
            &Subject::of(resolved.attach(), host),
            &host.hcas,
            rules,
            allocated,
        ),
        None => Ok(()),
    }
}

/// What a message is about.
struct Subject {
    verb: String,
    kind: &'static str,
    name: String,
}

impl Subject {
    fn of(attach: Attach, host: &HostLink) -> Self {
        let verb = match attach {
            Attach::Move => "moving".to_owned(),
            Attach::Child(kind) => format!("attach {} on", kind.as_str()),
            Attach::RdmaOnly => "moving the RDMA device of".to_owned(),
        };
        Subject {
            verb,
            kind: "netdev",
            name: host.link.name.to_string(),
        }
    }

    fn rdma(name: &str) -> Self {
        Subject {
            verb: "moving".to_owned(),
            kind: "RDMA device",
            name: name.to_owned(),
        }
    }

    fn denied(&self, why: impl Into<String>, remedy: impl Into<String>) -> Result<(), Denied> {
        Err(Denied {
            what: format!("{} {} {}", self.verb, self.kind, self.name),
            why: why.into(),
            remedy: remedy.into(),
        })
    }
}

/// The rules for every use of a netdev of the host.
fn netdev(subject: &Subject, host: &HostLink, rules: Rules<'_>) -> Result<(), Denied> {
    let (allow, policy, name) = (rules.allow, rules.path.display(), &subject.name);
    if host.link.name == "lo" {
        return subject.denied(
            "it is the loopback device",
            "name a netdev of an RDMA device",
        );
    }
    if let Some((controller, kind)) = &host.controller
        && kind != "vrf"
    {
        return subject.denied(
            format!("it is a port of {kind} {controller}"),
            format!("name {controller} itself, or take {name} out of it"),
        );
    }
    if !allow.uplinks
        && let Some(why) = &host.uplink
    {
        return subject.denied(
            why.as_str(),
            format!(
                "name another netdev; if pods may have {name}, set allow.uplinks and list the netdevs \
                 for pods in allow.netdevs, both in {policy}"
            ),
        );
    }
    if !allow.non_rdma && host.rdma.is_empty() {
        return subject.denied(
            "no RDMA device has it as its port",
            format!(
                "name a netdev of an RDMA device (rdmactl discover lists them), or set \
                 allow.nonRdma in {policy}"
            ),
        );
    }
    if !selected(host, allow) {
        return subject.denied(
            "none of the policy's selectors has it",
            format!("add it to allow.netdevs in {policy}"),
        );
    }
    Ok(())
}

/// A network's user must not choose a partition that the administrator keeps for others.
fn in_partition(parent: &str, pkey: u16, rules: Rules<'_>) -> Result<(), Denied> {
    let Some(allowed) = &rules.allow.pkeys else {
        return Ok(());
    };
    if allowed.iter().any(|key| partition(*key) == partition(pkey)) {
        return Ok(());
    }
    let list: Vec<String> = allowed.iter().map(|key| format!("{key:#06x}")).collect();
    Err(Denied {
        what: format!("attach ipoib on netdev {parent}"),
        why: format!(
            "partition {pkey:#06x} is not among those that the policy allows ({})",
            list.join(", ")
        ),
        remedy: format!(
            "set pkey to one of them, or add it to allow.pkeys in {}",
            rules.path.display()
        ),
    })
}

/// The rules for a netdev that leaves the host.
fn movable(subject: &Subject, nic: &HostLink, rules: Rules<'_>) -> Result<(), Denied> {
    let policy = rules.path.display();
    let kind = nic.link.kind.as_ref().map(ToString::to_string);
    let what = match kind {
        Some(kind) => format!("it is a {kind}, without hardware of its own"),
        None => "the kernel names no hardware below it".to_owned(),
    };
    // What the pod cannot change must identify a netdev.
    if !identity::is_certain(&nic.link) {
        return subject.denied(
            format!("{what}, and in a pod it cannot be told from other links"),
            "move a NIC, a virtual function, or a VLAN or veth whose parent or peer is on the host",
        );
    }
    if !rules.allow.virtual_links && !nic.link.is_hardware() {
        return subject.denied(
            what,
            format!(
                "move a NIC or a virtual function; if pods may have links without hardware, set \
                 allow.virtual in {policy}"
            ),
        );
    }
    if let Some(dependent) = nic.dependents.first() {
        return subject.denied(dependent.to_string(), dependent.remedy());
    }
    Ok(())
}

/// A pod that has a macvlan of mode `passthru` changes the MAC address of the netdev below.
fn passthru(subject: &Subject, rules: Rules<'_>) -> Result<(), Denied> {
    if rules.allow.passthru {
        return Ok(());
    }
    subject.denied(
        "with mode passthru the pod sets the MAC address and the flags of the host's netdev",
        format!(
            "use mode bridge; if pods may do so, set allow.passthru in {}",
            rules.path.display()
        ),
    )
}

/// An RDMA device that leaves the host: the netdevs that lose it, and where it has none on the host,
/// the device itself.
fn rdma_device(subject: &Subject, target: &RdmaTarget, rules: Rules<'_>) -> Result<(), Denied> {
    for host in &target.netdevs {
        netdev(&Subject::of(Attach::RdmaOnly, host), host, rules)?;
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
    if target.netdevs.is_empty() && !rules.allow.selects(&candidate) {
        return subject.denied(
            "none of the policy's selectors has it",
            format!("add it to allow.netdevs in {}", rules.path.display()),
        );
    }
    Ok(())
}

fn belongs(
    subject: &Subject,
    hcas: &BTreeSet<HcaId>,
    rules: Rules<'_>,
    allocated: &Allocated,
) -> Result<(), Denied> {
    let list = |hcas: &BTreeSet<HcaId>| {
        let names: Vec<String> = hcas.iter().map(ToString::to_string).collect();
        names.join(", ")
    };
    if hcas.iter().any(|hca| allocated.hcas.contains(hca)) {
        return Ok(());
    }
    let what = match hcas.is_empty() {
        true => format!(
            "{} is not an RDMA device, so it cannot be allocated",
            subject.name
        ),
        false => format!("the kubelet did not allocate {} to it", list(hcas)),
    };
    let has = match allocated.hcas.is_empty() {
        true => "the pod has no exclusive HCA".to_owned(),
        false => format!("it has {}", list(&allocated.hcas)),
    };
    subject.denied(
        format!("pod {}: {what}; {has}", allocated.pod),
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
