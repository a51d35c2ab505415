//! The NICs that a network moves: locked, and returned where an orphaned attachment left them, before
//! anything else is read of them.
//!
//! A pod whose namespace died without a DEL leaves its NIC on the host under whatever name the
//! kernel gave it, without its state, or the kernel is still returning it. A claim names the attachment
//! that has a NIC, whose record says how it was: the NIC alone is restored, and the claim ends. The
//! record stays for DEL or the daemon, which find no claim, and release the rest. Nothing is returned out
//! of the namespace of a pod that is there.

use std::time::{Duration, Instant};

use attachment::{
    detach::living,
    journal::{Key, Lock, Record, Sharing},
    netdev::snapshot::Identity,
    node::Node,
    part::{Defect, Move, Part},
};
use cni_wire::{Code, Request};
use hca::HcaId;
use netlink::{
    Name,
    link::{self, By, Link},
};

use crate::{
    allocation::{self, Allocated},
    config::{Attach, Config, Target},
    error::Error,
    facts::{self, HostLink, Units},
};

/// How long an ADD waits for the DEL of the pod that had the NIC before: the kubelet frees a unit before
/// it calls DEL.
const DEL_TIMEOUT: Duration = Duration::from_secs(3);

/// The NICs that a network moves. No other process moves them until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct OwnNics {
    _lock: Option<Lock>,
    /// By NIC, the name that it is to have on the host, where it has another one at present.
    pub true_names: Vec<Option<Name>>,
    /// Records that have nothing else to undo: they go once this attachment has the NIC.
    pub ended: Vec<Key>,
}

impl OwnNics {
    /// # Errors
    /// Code 11 when a pod that is there has one, it has not arrived yet, or another attachment holds its
    /// lock too long.
    pub(crate) fn take(
        node: &mut Node,
        request: &Request,
        config: &Config,
        units: &Units,
    ) -> Result<OwnNics, Error> {
        if config.attach != Attach::Move {
            return Ok(OwnNics::default());
        }
        let started = Instant::now();
        loop {
            let mut identities = Vec::new();
            for unit in &units.nics {
                let target = facts::move_target(config, unit.as_ref())?;
                identities.push(identity(node, &target, config.port)?);
            }
            let here = identities.iter().flatten();
            let lock = node.journal.lock_all(here, Sharing::Exclusive)?;
            let mut own = OwnNics::default();
            let mut in_use = None;
            for identity in &identities {
                let claimant = match identity {
                    Some(identity) => claimant(node, identity)?,
                    // Whatever is wrong with the request is for the facts to say.
                    None => None,
                };
                let mut true_name = None;
                match claimant {
                    Some((key, record, moved))
                        if moved.returned.is_none() && living(&record)?.is_some() =>
                    {
                        in_use = in_use.or(Some((key, record, moved)));
                    }
                    Some((key, record, moved)) => {
                        true_name = moved.reclaim(node, &record)?;
                        let is_all = record.parts.len() == 1
                            && record.ipam.is_none()
                            && record.slots().next().is_none();
                        own.ended.extend(is_all.then_some(key));
                    }
                    None => {}
                }
                own.true_names.push(true_name);
            }
            let Some((key, record, moved)) = in_use else {
                own._lock = Some(lock);
                return Ok(own);
            };
            drop(lock);
            let left = match is_allocated(node, request, units, &moved) {
                true => DEL_TIMEOUT.saturating_sub(started.elapsed()),
                false => Duration::ZERO,
            };
            if !node.journal.wait_for_del(&key, left) {
                let (name, owner) = (&moved.host.name, record.owner());
                let what = format!("netdev {name} is in use by {owner}");
                return Err(Error::new(Code::TryAgain, what)
                    .with_details("it returns to the host when that pod is deleted"));
            }
        }
    }
}

/// The NIC that a target means: on the host, or by the record of the attachment that has it.
fn identity(
    node: &mut Node,
    target: &Target,
    port: Option<u32>,
) -> Result<Option<Identity>, Error> {
    if let Some(nic) = find(node, target, port)? {
        return Ok(Some(Identity::on(&node.roots, &nic)));
    }
    Ok(holder(node, target)?.map(|(_, moved)| moved.host.identity))
}

/// The NIC on the host.
fn find(node: &mut Node, target: &Target, port: Option<u32>) -> Result<Option<Link>, Error> {
    match facts::name_of(&node.roots, target, port) {
        Ok(name) => Ok(link::get(
            &mut node.netns.socket,
            By::Name(name.as_bytes()),
        )?),
        Err(_) => Ok(None),
    }
}

/// Whether the kubelet allocated to this pod what another attachment has: it has freed it, and calls DEL.
fn is_allocated(node: &Node, request: &Request, units: &Units, moved: &Move) -> bool {
    let has_it = |allocated: &Allocated| {
        let mut hcas = allocated.hcas.iter().map(ToString::to_string);
        hcas.any(|hca| moved.hcas.contains(&hca))
    };
    if node.policy.values.allow.unallocated {
        return false;
    }
    match &units.allocated {
        Some(allocated) => has_it(allocated),
        None => allocation::ask(&node.daemon_socket(), &request.env.args, &node.log)
            .is_ok_and(|held| has_it(&held.allocated())),
    }
}

/// The attachment of this boot that has the netdev a target means, by all records: for a netdev that is
/// not on the host.
///
/// # Errors
/// The journal cannot be listed.
pub(crate) fn holder(node: &Node, target: &Target) -> Result<Option<(Record, Move)>, Error> {
    for (_, record) in node.records()? {
        if !node.is_of_this_boot(&record.boot) {
            continue;
        }
        let mut moved = record.parts.iter().filter_map(Part::moved);
        if let Some(moved) = moved.find(|moved| target.means(moved)).cloned() {
            return Ok(Some((record, moved)));
        }
    }
    Ok(None)
}

/// The attachment of this boot that has claimed a netdev, if it is in the journal.
fn claimant(node: &Node, identity: &Identity) -> Result<Option<(Key, Record, Move)>, Error> {
    let Some(key) = node.journal.claimant(identity)? else {
        return Ok(None);
    };
    let record = node.journal.read(&key)?;
    let Some(record) = record.filter(|record| node.is_of_this_boot(&record.boot)) else {
        return Ok(None);
    };
    let of_identity = |moved: &&Move| moved.host.identity.key() == identity.key();
    let moved = record.parts.iter().filter_map(Part::moved);
    let moved = moved.clone().find(of_identity).cloned();
    Ok(moved.map(|moved| (key, record, moved)))
}

/// Keeps the netdevs of children from being moved until the children are made, and refuses one that an
/// attachment moved into its pod: the pod can send it back to the host under any name, MAC address and
/// alias.
///
/// # Errors
/// Code 11 with the attachment; the claim cannot be read.
pub(crate) fn keep_parents(node: &Node, parents: &[&HostLink]) -> Result<Lock, Error> {
    let on_host = parents
        .iter()
        .map(|host| Identity::on(&node.roots, &host.link));
    let identities: Vec<Identity> = on_host.collect();
    let lock = node.journal.lock_all(&identities, Sharing::Shared)?;
    for (host, identity) in parents.iter().zip(&identities) {
        let Some((_, record, moved)) = claimant(node, identity)? else {
            continue;
        };
        let what = match moved.returned {
            Some(Defect::Child) => moved.left_child(&record),
            _ => format!(
                "netdev {} is {}, which belongs to {}",
                host.link.name,
                moved.host.name,
                record.owner()
            ),
        };
        return Err(Error::new(Code::TryAgain, what)
            .with_details("it can be used when the attachment is undone, by DEL or the daemon"));
    }
    Ok(lock)
}

impl Target {
    /// Whether the netdev that was moved for a part of an attachment is the one that is meant. Pure.
    fn means(&self, moved: &Move) -> bool {
        let (host, rdma) = (&moved.host, &moved.rdma);
        let stands_on = |device: &str| host.identity.bus_device.as_deref() == Some(device);
        match self {
            Target::Name(name) => {
                let name = Name::from(name.as_str());
                host.name == name || host.state.altnames.contains(&name)
            }
            Target::Mac(mac) => {
                let macs = [&host.state.mac, &host.identity.permanent_mac];
                macs.contains(&&Some(mac.clone()))
            }
            Target::Hca(HcaId::NodeGuid(guid)) => {
                let guid = guid.to_string();
                let by_guid = rdma.iter().any(|d| d.node_guids.contains(&guid));
                by_guid
                    || moved
                        .hcas
                        .contains(&format!("guid-{}", guid.replace(':', "")))
            }
            Target::Hca(hca) => {
                let hca = hca.to_string();
                moved.hcas.contains(&hca) || stands_on(&hca)
            }
            Target::KernelPath(path) => path.split('/').next_back().is_some_and(stands_on),
            Target::RdmaDevice(name) => rdma.iter().any(|device| device.name == *name),
        }
    }
}
